//! Beside an engine that has contexts, streams and captures of its own.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys;
use kvbm_tiers::backend;
use kvbm_tiers::cuda::DeviceWindow;
use kvbm_tiers::{EngineCopies, Fence, Fences, HostFence, Mark, StraightBlock};
use parking_lot::{Mutex, MutexGuard};

use super::*;

/// One at a time: an engine's calls disturb each other's captures.
static TURN: Mutex<()> = Mutex::new(());

/// An engine in this thread: the GPU's primary context is current, and it has a stream.
struct Engine {
    gpu: Gpu,
    stream: sys::CUstream,
    bench: Bench,
    _turn: MutexGuard<'static, ()>,
}

const BLOCK: usize = 64 << 10;

impl Engine {
    fn new() -> Option<Self> {
        let turn = TURN.lock();
        let gpu = gpu()?;
        let bench = Bench::new(&gpu, tensors(&gpu, 4, BLOCK, 64));
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the pointers are valid for the calls, and the flag makes it independent of the
        // default stream.
        unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, 0).result().unwrap();
            sys::cuCtxSetCurrent(context).result().unwrap();
            sys::cuStreamCreate(&raw mut stream, 1).result().unwrap();
        }
        Some(Self { gpu, stream, bench, _turn: turn })
    }

    fn handle(&self) -> u64 {
        self.stream.expose_provenance() as u64
    }

    /// Between the bench's device and host memory that the bench does not know.
    fn device_elsewhere(&self) -> Arc<dyn Backend> {
        let segments = self.bench.device.segments();
        let memory = Arc::new(host(segments.slots(), segments.block_bytes()));
        Arc::new(CudaBackend::new(&self.gpu, memory, &self.bench.device).unwrap())
    }

    /// Has the stream wait until the flag is set, as it would for a kernel that runs for long.
    fn computes_until(&self, flag: &'static AtomicBool) {
        unsafe extern "C" fn spin(flag: *mut c_void) {
            // SAFETY: a static.
            let flag = unsafe { &*flag.cast::<AtomicBool>() };
            while !flag.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        }
        let flag = std::ptr::from_ref(flag).cast_mut().cast();
        // SAFETY: the function is given what it expects, and calls nothing of CUDA's.
        unsafe { sys::cuLaunchHostFunc(self.stream, Some(spin), flag) }.result().unwrap();
    }

    /// Starts a copy of the first piece of a device slot onto that of another.
    fn copies(&self, from: usize, to: usize) {
        let piece = BLOCK / 64;
        // SAFETY: slots of the bench, which the test alone uses.
        unsafe {
            sys::cuMemcpyAsync(self.bench.address(to), self.bench.address(from), piece, self.stream)
        }
        .result()
        .unwrap();
    }

    fn waits(&self) {
        // SAFETY: the stream lives.
        unsafe { sys::cuStreamSynchronize(self.stream) }.result().unwrap();
    }

    fn captures(&self, work: impl FnOnce()) -> Result<(), cudarc::driver::result::DriverError> {
        // What PyTorch uses for CUDA graphs.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream lives; the graph is not used.
        unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) }.result().unwrap();
        work();
        // SAFETY: as above.
        unsafe { sys::cuStreamEndCapture(self.stream, &raw mut graph) }.result()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: nothing uses the stream any more; retained once, released once.
        unsafe {
            let _ = sys::cuStreamDestroy_v2(self.stream);
            let _ = sys::cuCtxSetCurrent(std::ptr::null_mut());
            let _ = sys::cuDevicePrimaryCtxRelease_v2(0);
        }
    }
}

/// Sets a flag, at the latest when the test fails: else the stream never ends.
struct Held(&'static AtomicBool);

impl Held {
    fn free(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.free();
    }
}

fn current() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is valid for the call.
    unsafe { sys::cuCtxGetCurrent(&raw mut context) }.result().unwrap();
    context
}

#[test]
fn a_neighbours_blocks_wait_for_its_event() {
    static FLAG: AtomicBool = AtomicBool::new(false);
    let Some(engine) = Engine::new() else { return };
    let neighbour = neighbours::holder(BLOCK).memory;
    // Locked before the engine computes.
    drop(neighbours::copies(&neighbour, &engine.bench.device));
    let held = Held(&FLAG);
    engine.computes_until(&FLAG);
    // SAFETY: the stream lives, and captures nothing.
    let after = unsafe { engine.gpu.fence_behind(engine.handle()) }.unwrap();
    let copies = EngineCopies::between(&neighbour, &engine.bench.device, &after).unwrap();
    assert!(!copies.is_ready().unwrap(), "the engine still uses its slots");
    held.free();
    engine.waits();
    assert!(copies.is_ready().unwrap());
    let block = [StraightBlock { from: SlotId(3), to: SlotId(0) }];
    let mut expected = vec![0; BLOCK];
    fill_pattern(3, &mut expected);
    assert_eq!(copies.copy(&block).unwrap(), [checksum(&expected)]);
}

#[test]
fn copies_leave_its_capture_alone_and_arrive() {
    let Some(engine) = Engine::new() else { return };
    let sums = DeviceChecksum::new(&engine.gpu).unwrap();
    let mut block = vec![0; BLOCK];
    fill_pattern(3, &mut block);
    let outcome = engine.captures(|| {
        // Also what is made and freed meanwhile.
        let mut bench = Bench::new(&engine.gpu, tensors(&engine.gpu, 4, BLOCK, 64));
        for slot in 0..4 {
            bench.upload(slot, &block);
            assert_eq!(bench.download(slot), block);
            assert_eq!(sums.of(&bench.device, SlotId(slot as u32)).unwrap(), checksum(&block));
        }
    });
    outcome.unwrap();
}

#[test]
fn calls_leave_its_context_current() {
    let Some(engine) = Engine::new() else { return };
    let used = || {
        let gpu = Gpu::open(0).unwrap();
        let region = Arc::new(gpu.allocate(Geometry::new(1, 4096).unwrap()).unwrap());
        let mut frame = region.frames().unwrap().take().unwrap();
        let window = DeviceWindow::new(&gpu, Arc::clone(&region)).unwrap();
        window.write(&mut frame, &[7; 4096]).unwrap().unwrap();
        DeviceChecksum::new(&gpu).unwrap().of(&region, frame.slot()).unwrap();
        drop(CudaBackend::new(&gpu, Arc::new(host(1, 4096)), &region).unwrap());
    };
    let own = current();
    assert!(!own.is_null());
    used();
    assert_eq!(current(), own);
    // A thread that has none has none afterwards.
    let without = std::thread::spawn(move || {
        used();
        current().is_null()
    });
    assert!(without.join().unwrap());
    drop(engine);
}

#[test]
fn a_save_reads_what_it_wrote_before_the_fence() {
    static COMPUTED: AtomicBool = AtomicBool::new(false);
    let Some(mut engine) = Engine::new() else { return };
    engine.bench.upload(0, &vec![1; BLOCK]);
    engine.bench.upload(1, &vec![2; BLOCK]);
    let computing = Held(&COMPUTED);
    engine.computes_until(&COMPUTED);
    engine.copies(1, 0);
    // SAFETY: the engine's stream lives.
    let after = unsafe { engine.gpu.fence_behind(engine.handle()) }.unwrap();
    let (send, reports) = std::sync::mpsc::channel();
    let done = each(move |_, result| send.send(result).unwrap());
    let save = order(0, engine.bench.there[0].slot_ref(), engine.bench.here[2].slot_ref());
    engine.bench.backend.submit_fenced(vec![save], Fences { after, ..Fences::default() }, done);
    assert!(reports.recv_timeout(Duration::from_millis(20)).is_err());
    computing.free();
    reports.recv().unwrap().unwrap();
    let saved = engine.bench.memory.read(&engine.bench.here[2]).unwrap();
    assert_eq!(saved[..BLOCK / 64], [2; BLOCK / 64]);
}

#[test]
fn it_reads_what_a_load_brought_before_the_mark() {
    static FREED: AtomicBool = AtomicBool::new(false);
    let Some(mut engine) = Engine::new() else { return };
    engine.bench.upload(0, &vec![1; BLOCK]);
    engine.bench.memory.write(&mut engine.bench.here[0]).unwrap().fill(5);
    let reading = Held(&FREED);
    engine.computes_until(&FREED);
    // SAFETY: the engine's stream lives.
    let after = unsafe { engine.gpu.fence_behind(engine.handle()) }.unwrap();
    let (send, reports) = std::sync::mpsc::channel();
    let done = each(move |_, result| send.send(result).unwrap());
    let (load, mark) =
        (order(0, engine.bench.here[0].slot_ref(), engine.bench.there[0].slot_ref()), Mark::new());
    let fences = Fences { after, mark: Some(mark.clone()), ..Fences::default() };
    engine.bench.backend.submit_fenced(vec![load], fences, done);
    // The copy is started at once, though it cannot run.
    let started = Instant::now();
    let arrived = loop {
        assert!(started.elapsed() < Duration::from_secs(10), "no mark");
        match mark.fence() {
            Some(fence) => break fence,
            None => std::thread::yield_now(),
        }
    };
    assert!(!arrived.is_done() && reports.try_recv().is_err());
    // A second stream of the engine reads behind it.
    let mut second = std::ptr::null_mut();
    // SAFETY: the pointer is valid for the call.
    unsafe { sys::cuStreamCreate(&raw mut second, 1) }.result().unwrap();
    let first = std::mem::replace(&mut engine.stream, second);
    // SAFETY: the engine's stream lives.
    unsafe { engine.gpu.hold(engine.handle(), &arrived) }.unwrap();
    engine.copies(0, 3);
    // Time for a copy that does not wait to read what was there before.
    std::thread::sleep(Duration::from_millis(5));
    reading.free();
    engine.waits();
    reports.recv().unwrap().unwrap();
    assert_eq!(engine.bench.download(3)[..BLOCK / 64], [5; BLOCK / 64]);
    // SAFETY: nothing uses it any more.
    unsafe { sys::cuStreamDestroy_v2(first) }.result().unwrap();
}

#[test]
fn a_fence_inside_its_capture_is_refused_and_capture_continues() {
    let Some(engine) = Engine::new() else { return };
    let outcome = engine.captures(|| {
        // SAFETY: the engine's stream lives.
        let error = unsafe { engine.gpu.fence_behind(engine.handle()) }.unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::InUse);
    });
    outcome.unwrap();
    // And then it heals.
    // SAFETY: as above.
    assert!(!unsafe { engine.gpu.fence_behind(engine.handle()) }.unwrap().is_done());
}

#[test]
fn a_thread_of_its_own_may_hold_a_save_too() {
    let Some(engine) = Engine::new() else { return };
    let backend = engine.device_elsewhere();
    let raised = HostFence::new();
    // SAFETY: the engine's stream lives.
    let error =
        unsafe { engine.gpu.hold(engine.handle(), &Fence::Host(raised.clone())) }.unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::Invalid);
    let (send, reports) = std::sync::mpsc::channel();
    let done = each(move |_, result| send.send(result).unwrap());
    let save = order(0, engine.bench.there[0].slot_ref(), engine.bench.here[2].slot_ref());
    let fences = Fences { after: Fence::Host(raised.clone()), ..Fences::default() };
    backend.submit_fenced(vec![save], fences.clone(), done.clone());
    assert_eq!(reports.recv().unwrap().unwrap_err().kind(), CopyErrorKind::Refused);
    backend::submit(&backend, vec![save], fences, done);
    assert!(reports.recv_timeout(Duration::from_millis(5)).is_err());
    raised.raise();
    reports.recv().unwrap().unwrap();
}
