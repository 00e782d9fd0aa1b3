//! The CUDA backend, on a GPU where there is one.
//!
//! Where there is none the tests below skip aloud, and `on_a_simulated_gpu` runs them in a child process that finds
//! the driver of `simulated/cuda.cpp` instead. That shows that the calls, their order and the addresses in
//! them are right, and that the kernels compute what they should; it shows nothing about speed, and real drivers
//! may differ from what is simulated.

mod simulation;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::cuda::{
    self, CuFileMode, CuFileOptions, CudaBackend, DeviceChecksum, GdsBackend, Gpu, Rearranger, probe_cufile,
};
use kvbm_tiers::raw::RawGpu;
use kvbm_tiers::testing::conformance::{self, Pair};
use kvbm_tiers::testing::{fill_pattern, host, order, run, skip, start};
use kvbm_tiers::transform::{Layout, Shape, Transform, View};
use kvbm_tiers::{
    Backend, Checksums, CopyError, CopyErrorKind, CopyOp, DeviceRegion, DiskOptions, DiskRegion, Done,
    DramRegion, Frame, Geometry, Memory, Part, Route, SegmentMap, SetupError, SetupErrorKind, SlotId,
    SlotRef, Tier,
};
use proptest::prelude::*;

fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            skip("cuda", &error);
            None
        }
    }
}

#[test]
fn on_a_simulated_gpu() {
    simulation::run_all_tests("");
}

#[test]
fn on_a_simulated_gpu_whose_driver_copies_one_by_one() {
    simulation::run_all_tests("-DWITHOUT_BATCHES");
}

#[test]
fn whole_blocks_conform() {
    let Some(gpu) = gpu() else { return };
    conformance::check(|slots, block_bytes| {
        let geometry = Geometry::new(slots, block_bytes).unwrap();
        pair(&gpu, gpu.allocate(geometry).unwrap())
    });
}

#[test]
fn adopted_tensors_conform() {
    let Some(gpu) = gpu() else { return };
    for pieces in [2, 5, 64] {
        conformance::check(|slots, block_bytes| pair(&gpu, tensors(&gpu, slots, block_bytes, pieces)));
    }
}

#[test]
fn disk_and_device_conform() {
    let Some(gpu) = gpu() else { return };
    if let Err(why) = probe_cufile(&cufile_options()).ready() {
        return skip("gds", &why);
    }
    let home = tempfile::tempdir().unwrap();
    for pieces in [1, 5] {
        conformance::check(|slots, block_bytes| {
            let device = Arc::new(tensors(&gpu, slots, block_bytes, pieces));
            let memory = Arc::new(host(slots, block_bytes));
            let first = Arc::new(CudaBackend::new(&gpu, Arc::clone(&memory) as _, &device).unwrap());
            let second = Arc::new(gds(&gpu, &device, home.path(), Arc::default()).unwrap());
            let backend = Arc::new(Relay { first, second, routes: [RELAYED, (RELAYED.1, RELAYED.0)] });
            Pair { memory, other: Tier::Disk, backend }
        });
    }
}

#[test]
fn what_changed_on_disk_does_not_reach_the_engine() {
    let Some(gpu) = gpu() else { return };
    if let Err(why) = probe_cufile(&cufile_options()).ready() {
        return skip("gds", &why);
    }
    let (home, checksums) = (tempfile::tempdir().unwrap(), Arc::new(Checksums::new()));
    let mut bench = Bench::new(&gpu, tensors(&gpu, 2, 5000, 3));
    bench.upload(0, &[7; 5000]);
    let gds = gds(&gpu, &bench.device, home.path(), Arc::clone(&checksums)).unwrap();
    let disk = SlotRef { tier: Tier::Disk, ..bench.here[0].slot_ref() };
    let read = || run(&gds, vec![order(0, disk, bench.there[1].slot_ref())]).remove(0);
    assert_eq!(read().unwrap_err().kind(), CopyErrorKind::Corrupt);
    run(&gds, vec![order(0, bench.there[0].slot_ref(), disk)]).remove(0).unwrap();
    assert_eq!(checksums.get(disk.slot), Some(checksum(&[7; 5000])));
    read().unwrap();
    checksums.record(disk.slot, 1);
    assert_eq!(read().unwrap_err().kind(), CopyErrorKind::Corrupt);
}

fn gds(
    gpu: &Gpu,
    device: &Arc<DeviceRegion>,
    home: &Path,
    checksums: Arc<Checksums>,
) -> Result<GdsBackend, SetupError> {
    gds_with(gpu, device, home, checksums, &cufile_options())
}

fn gds_with(
    gpu: &Gpu,
    device: &Arc<DeviceRegion>,
    home: &Path,
    checksums: Arc<Checksums>,
    options: &CuFileOptions,
) -> Result<GdsBackend, SetupError> {
    let segments = device.segments();
    let disk = DiskRegion::open(&DiskOptions {
        geometry: Geometry::new(segments.slots(), segments.block_bytes()).unwrap(),
        dirs: vec![home.to_owned()],
        o_direct: true,
        zerofill_fallback: true,
        keep: None,
    });
    GdsBackend::new(gpu, Arc::clone(device), Arc::new(disk.unwrap()), checksums, 4, options)
}

/// A list of modules that exists, and a short time-out.
fn cufile_options() -> CuFileOptions {
    let mut options = CuFileOptions { timeout: Duration::from_secs(1), ..CuFileOptions::default() };
    if simulation::is_on() {
        options.modules = std::env::current_exe().unwrap();
    }
    options
}

const RELAYED: Route = (Tier::Host, Tier::Disk);

/// Host to disk by way of the device slot of the same number as the host's: lets the suite look at what GDS moved.
#[derive(Debug)]
struct Relay {
    first: Arc<CudaBackend>,
    second: Arc<GdsBackend>,
    routes: [Route; 2],
}

// SAFETY: each operation ends with its second leg, or with the first if that failed; no two operations share a
// host slot, hence none a device slot.
unsafe impl Backend for Relay {
    fn name(&self) -> &'static str {
        "relay"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        for (index, op) in batch.into_iter().enumerate() {
            let outward = op.from.tier == Tier::Host;
            let own = if outward { op.from } else { op.to };
            let device = SlotRef { tier: Tier::Device, ..own };
            let legs = [CopyOp { to: device, ..op }, CopyOp { from: device, ..op }];
            let (first, second): (Arc<dyn Backend>, Arc<dyn Backend>) = if outward {
                (Arc::clone(&self.first) as _, Arc::clone(&self.second) as _)
            } else {
                (Arc::clone(&self.second) as _, Arc::clone(&self.first) as _)
            };
            let done = done.clone();
            let go_on = move |_, result: Result<(), CopyError>| match result {
                Ok(()) => {
                    let done = done.clone();
                    second.submit(vec![legs[1]], Done::new(move |_, result| done.complete(index, result)));
                }
                Err(error) => done.complete(index, Err(error)),
            };
            first.submit(vec![legs[0]], Done::new(go_on));
        }
    }
}

fn pair(gpu: &Gpu, device: DeviceRegion) -> Pair {
    let segments = device.segments();
    let memory = Arc::new(host(segments.slots(), segments.block_bytes()));
    let backend = CudaBackend::new(gpu, Arc::clone(&memory) as _, &Arc::new(device)).unwrap();
    Pair { memory, other: Tier::Device, backend: Arc::new(backend) }
}

/// What an engine might have allocated: a block is a piece of each of several tensors in one allocation.
fn tensors(gpu: &Gpu, slots: u32, block_bytes: usize, pieces: usize) -> DeviceRegion {
    let piece = block_bytes.div_ceil(pieces);
    let sizes = (0..block_bytes).step_by(piece).map(|from| piece.min(block_bytes - from));
    let mut end = 0;
    let mut parts: Vec<_> = sizes
        .map(|bytes| {
            let part = Part { base: end, stride: bytes + 8, bytes };
            end += part.stride * slots as usize;
            part
        })
        .collect();
    let memory = gpu.allocate(Geometry::new(1, end).unwrap()).unwrap();
    let base = memory.segments().parts()[0].base;
    parts.iter_mut().for_each(|part| part.base += base);
    let map = SegmentMap::new(slots, &parts).unwrap();
    // SAFETY: the parts lie in the allocation that is handed over, which nobody else uses.
    unsafe { gpu.adopt(map, memory) }
}

/// Slots on host and device, all ours.
struct Bench {
    memory: Arc<DramRegion>,
    device: Arc<DeviceRegion>,
    backend: CudaBackend,
    here: Vec<Frame>,
    there: Vec<Frame>,
}

impl Bench {
    fn new(gpu: &Gpu, device: DeviceRegion) -> Self {
        let device = Arc::new(device);
        let memory = Arc::new(host(device.segments().slots(), device.segments().block_bytes()));
        let backend = CudaBackend::new(gpu, Arc::clone(&memory) as _, &device).unwrap();
        let (mut ours, mut theirs) = (memory.frames().unwrap(), device.frames().unwrap());
        let here = std::iter::from_fn(|| ours.take()).collect();
        let there = std::iter::from_fn(|| theirs.take()).collect();
        Self { memory, device, backend, here, there }
    }

    fn upload(&mut self, slot: usize, bytes: &[u8]) {
        self.memory.write(&mut self.here[slot]).unwrap()[..bytes.len()].copy_from_slice(bytes);
        run(&self.backend, vec![order(0, self.here[slot].slot_ref(), self.there[slot].slot_ref())])
            .remove(0)
            .unwrap();
    }

    fn download(&mut self, slot: usize) -> &[u8] {
        run(&self.backend, vec![order(0, self.there[slot].slot_ref(), self.here[slot].slot_ref())])
            .remove(0)
            .unwrap();
        self.memory.read(&self.here[slot]).unwrap()
    }

    fn address(&self, slot: usize) -> u64 {
        self.device.segments().segments(SlotId(slot as u32)).unwrap().next().unwrap().address as u64
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn kernels_rearrange_as_the_reference_does(
        shape in (1_usize..5, 1_usize..4, 1_usize..3, 1_usize..17, 1_usize..9, 1_usize..40),
        ranks in 1_usize..3,
        orders in (0_usize..4, 0_usize..4),
        wide: bool,
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let (blocks, layers, kv, tokens, heads, row) = shape;
        let row_bytes = if wide { row * 16 } else { row };
        let shape = Shape { blocks, layers, kv, tokens, heads, row_bytes };
        let names = [Layout::BLOCKS_NHD, Layout::BLOCKS_HND, Layout::LAYERS_NHD, Layout::LAYERS_HND];
        let whole = Layout::new(Shape { heads: heads * ranks, ..shape }, names[orders.0]).unwrap();
        let part = Layout::new(shape, names[orders.1]).unwrap();
        // The last rank's heads: split off, and merged back.
        let ours = whole.heads((ranks - 1) * heads..ranks * heads).unwrap();
        let pairs: Vec<_> = (0..blocks as u32).map(|block| (block, blocks as u32 - 1 - block)).collect();
        check_transform(&gpu, ours, part.whole(), (whole.bytes(), part.bytes()), &pairs);
        check_transform(&gpu, part.whole(), ours, (part.bytes(), whole.bytes()), &pairs);
    }

    #[test]
    fn kernels_sum_as_the_cpu_does(
        block_bytes in prop_oneof![1_usize..9000, 1_usize..3 << 20], pieces in 1_usize..70, seed: usize
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let sums = DeviceChecksum::new(&gpu).unwrap();
        let mut bench = Bench::new(&gpu, tensors(&gpu, 2, block_bytes, pieces));
        let mut block = vec![0; block_bytes];
        fill_pattern(seed % 1000, &mut block);
        bench.upload(1, &block);
        for _ in 0..2 {
            prop_assert_eq!(sums.of(&bench.device, SlotId(1)).unwrap(), checksum(&block));
        }
    }
}

/// All of a GPU but one group would stand by while a request waits.
#[test]
fn a_block_is_summed_by_many_groups() {
    let name = "a_block_is_summed_by_many_groups";
    if simulation::is("no-fault") {
        let gpu = Gpu::open(0).unwrap();
        let (sums, block) = (DeviceChecksum::new(&gpu).unwrap(), vec![7; 2 << 20]);
        for (pieces, groups) in [(1, 16), (3, 18), (64, 64)] {
            let mut bench = Bench::new(&gpu, tensors(&gpu, 1, 2 << 20, pieces));
            bench.upload(0, &block);
            simulation::summing_groups();
            assert_eq!(sums.of(&bench.device, SlotId(0)).unwrap(), checksum(&block));
            assert_eq!(simulation::summing_groups(), groups, "blocks of {pieces} pieces");
        }
    }
    simulation::run_one_test("no-fault", "", name);
}

fn check_transform(gpu: &Gpu, from: View, to: View, (source, target): (usize, usize), pairs: &[(u32, u32)]) {
    let transform = Transform::new(from, to).unwrap();
    let geometry = Geometry::new(2, source.max(target)).unwrap();
    let mut bench = Bench::new(gpu, gpu.allocate(geometry).unwrap());
    let (mut input, mut expected) = (vec![0; source], vec![0x5a; target]);
    fill_pattern(source, &mut input);
    bench.upload(0, &input);
    bench.upload(1, &expected);
    transform.apply(&input, &mut expected, pairs).unwrap();
    let rearranger = Rearranger::new(gpu).unwrap();
    let addresses = (bench.address(0), bench.address(1));
    // SAFETY: two slots as large as the layouts, that nobody else uses now.
    unsafe { rearranger.apply(&transform, addresses, pairs) }.unwrap();
    assert_eq!(bench.download(1)[..target], expected);
}

#[test]
fn large_blocks_cross_in_every_way_of_copying() {
    let Some(gpu) = gpu() else { return };
    // One piece of 2 MiB, pieces of 512 KiB (one call), pieces of 32 KiB (the kernel).
    for pieces in [1, 4, 64] {
        let mut bench = Bench::new(&gpu, tensors(&gpu, 9, 2 << 20, pieces));
        for (number, frame) in bench.here.iter_mut().enumerate() {
            fill_pattern(number, bench.memory.write(frame).unwrap());
        }
        let up = |i: usize| order(i, bench.here[i].slot_ref(), bench.there[i].slot_ref());
        run(&bench.backend, (0..9).map(up).collect()).into_iter().for_each(Result::unwrap);
        let back = |i: usize| order(i, bench.there[i].slot_ref(), bench.here[8 - i].slot_ref());
        run(&bench.backend, (0..4).map(back).collect()).into_iter().for_each(Result::unwrap);
        for number in 0..4 {
            let block = bench.memory.read(&bench.here[8 - number]).unwrap();
            assert!(kvbm_tiers::testing::has_pattern(number, block));
        }
    }
}

#[test]
fn yardsticks_do_what_they_time() {
    let Some(gpu) = gpu() else { return };
    let mut raw = RawGpu::open(&gpu, 1 << 20).unwrap();
    for per_call in [1 << 20, 4096, 5000] {
        raw.to_device(per_call).unwrap();
        raw.to_host(per_call).unwrap();
    }
    raw.within_device().unwrap();
    raw.matmul(16, 2).unwrap();
    assert_eq!(raw.matmul(512, 1).unwrap_err().kind(), SetupErrorKind::Invalid);
    let shape = Shape { blocks: 4, layers: 2, kv: 2, tokens: 16, heads: 8, row_bytes: 256 };
    let [nhd, hnd] =
        [Layout::BLOCKS_NHD, Layout::LAYERS_HND].map(|order| Layout::new(shape, order).unwrap().whole());
    raw.transform(&Transform::new(nhd, hnd).unwrap(), 4).unwrap();
    let error = raw.transform(&Transform::new(nhd, hnd).unwrap(), 5).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::Invalid);
}

#[test]
fn tensors_of_our_own_lie_apart() {
    let Some(gpu) = gpu() else { return };
    let region = gpu.allocate_tensors(3, &[4096, 512, 4096]).unwrap();
    assert_eq!(region.segments().parts().len(), 3);
    assert_eq!(region.segments().block_bytes(), 2 * 4096 + 512);
    assert_eq!(gpu.allocate_tensors(3, &[]).unwrap_err().kind(), SetupErrorKind::Invalid);
    assert_eq!(gpu.allocate_tensors(3, &[usize::MAX]).unwrap_err().kind(), SetupErrorKind::Invalid);
}

#[test]
fn who_submits_does_not_wait() {
    let Some(gpu) = gpu() else { return };
    let bench = Bench::new(&gpu, gpu.allocate(Geometry::new(64, 1 << 20).unwrap()).unwrap());
    let started = Instant::now();
    let up = |i: usize| order(i, bench.here[i].slot_ref(), bench.there[i].slot_ref());
    let reports = start(&bench.backend, (0..64).map(up).collect());
    assert!(started.elapsed() < Duration::from_millis(5), "64 MiB took less than this to submit");
    assert_eq!(reports.iter().filter(|(_, result)| result.is_ok()).count(), 64);
}

#[test]
fn memory_remembers_no_checksum_of_what_the_gpu_overwrote() {
    let Some(gpu) = gpu() else { return };
    let mut bench = Bench::new(&gpu, gpu.allocate(Geometry::new(1, 4096).unwrap()).unwrap());
    bench.upload(0, &[7; 4096]);
    let slot = bench.here[0].slot();
    bench.memory.checksums().unwrap().record(slot, 1);
    bench.download(0);
    assert_eq!(bench.memory.checksums().unwrap().get(slot), None);
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(gpu) = gpu() else { return };
    let device = Arc::new(gpu.allocate(Geometry::new(1, 4096).unwrap()).unwrap());
    for memory in [host(1, 8192), DramRegion::emulated_device(options(1, 4096)).unwrap()] {
        let error = CudaBackend::new(&gpu, Arc::new(memory), &device).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
    }
    assert_eq!(Gpu::open(1000).unwrap_err().kind(), SetupErrorKind::Unavailable);
}

fn options(slots: u32, block_bytes: usize) -> kvbm_tiers::DramOptions {
    let geometry = Geometry::new(slots, block_bytes).unwrap();
    kvbm_tiers::DramOptions { geometry, huge_pages: false, fault_threads: 1 }
}

/// Beside an engine that has contexts, streams and captures of its own.
mod beside_an_engine {
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicBool, Ordering};

    use cudarc::driver::sys;
    use kvbm_tiers::backend;
    use kvbm_tiers::cuda::DeviceWindow;
    use kvbm_tiers::fence::{Fence, Fences, HostFence, Mark};
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
            // SAFETY: the pointers are valid for the calls, and the flag makes it independent of the default stream.
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
            // SAFETY: slots of the bench, which the test knows nobody else to use.
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
            // SAFETY: nobody uses the stream any more; retained once, released once.
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
        let done = Done::new(move |_, result| send.send(result).unwrap());
        let save = order(0, engine.bench.there[0].slot_ref(), engine.bench.here[2].slot_ref());
        engine.bench.backend.submit_fenced(vec![save], Fences { after, mark: None }, done);
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
        let done = Done::new(move |_, result| send.send(result).unwrap());
        let (load, mark) =
            (order(0, engine.bench.here[0].slot_ref(), engine.bench.there[0].slot_ref()), Mark::new());
        let fences = Fences { after, mark: Some(mark.clone()) };
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
        // SAFETY: nobody uses it any more.
        unsafe { sys::cuStreamDestroy_v2(first) }.result().unwrap();
    }

    #[test]
    fn a_fence_inside_its_capture_is_refused_and_the_capture_goes_on() {
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
        let error = unsafe { engine.gpu.hold(engine.handle(), &Fence::Host(raised.clone())) }.unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
        let (send, reports) = std::sync::mpsc::channel();
        let done = Done::new(move |_, result| send.send(result).unwrap());
        let save = order(0, engine.bench.there[0].slot_ref(), engine.bench.here[2].slot_ref());
        let fences = Fences { after: Fence::Host(raised.clone()), mark: None };
        backend.submit_fenced(vec![save], fences.clone(), done.clone());
        assert_eq!(reports.recv().unwrap().unwrap_err().kind(), CopyErrorKind::Refused);
        backend::submit(&backend, vec![save], fences, done);
        assert!(reports.recv_timeout(Duration::from_millis(5)).is_err());
        raised.raise();
        reports.recv().unwrap().unwrap();
    }
}

/// Faults that only a simulated driver can have: each test does nothing but in the child of its own.
mod faults {
    use super::*;

    #[test]
    fn of_drivers_are_told_with_a_remedy() {
        for (fault, flags, why) in [
            ("no-device", "", "CUDA_VISIBLE_DEVICES"),
            ("old-driver", "", "CUDA 11.4"),
            ("no-symbol", "-DWITHOUT_LOCK", "cuMemHostRegister_v2"),
        ] {
            if simulation::is(fault) {
                let error = Gpu::open(0).unwrap_err();
                assert_eq!(error.kind(), SetupErrorKind::Unavailable);
                assert!(error.to_string().contains(why), "{error}");
                assert!(cuda::probe().driver.ready().is_err());
            }
            simulation::run_one_test(fault, flags, "faults::of_drivers_are_told_with_a_remedy");
        }
    }

    #[test]
    fn of_memory_are_told_with_the_setting() {
        if simulation::is("out-of-memory") {
            let gpu = Gpu::open(0).unwrap();
            let error = gpu.allocate(Geometry::new(4, 4096).unwrap()).unwrap_err();
            assert_eq!(error.kind(), SetupErrorKind::NoSpace);
            assert!(error.to_string().contains("DYN_KVBM_DEVICE_CACHE_GB"), "{error}");
        }
        if simulation::is("no-lock") {
            let gpu = Gpu::open(0).unwrap();
            let device = Arc::new(gpu.allocate(Geometry::new(4, 4096).unwrap()).unwrap());
            let error = CudaBackend::new(&gpu, Arc::new(host(4, 4096)), &device).unwrap_err();
            assert!(error.to_string().contains("ulimit"), "{error}");
        }
        for fault in ["out-of-memory", "no-lock"] {
            simulation::run_one_test(fault, "", "faults::of_memory_are_told_with_the_setting");
        }
    }

    #[test]
    fn of_copies_end_every_operation_in_an_error() {
        if simulation::is("copies-fail") {
            let gpu = Gpu::open(0).unwrap();
            let bench = Bench::new(&gpu, tensors(&gpu, 9, 64 << 10, 64));
            let up = |i: usize| order(i, bench.here[i].slot_ref(), bench.there[i].slot_ref());
            // After the first batch the context is gone: what comes later fails too.
            for _ in 0..2 {
                for result in run(&bench.backend, (0..9).map(up).collect()) {
                    assert_eq!(result.unwrap_err().kind(), CopyErrorKind::Io);
                }
            }
        }
        simulation::run_one_test("copies-fail", "", "faults::of_copies_end_every_operation_in_an_error");
    }

    /// The driver does not say whether copies have ended: they may still run.
    #[test]
    fn of_questions_keep_the_slots_until_there_is_an_answer() {
        let name = "faults::of_questions_keep_the_slots_until_there_is_an_answer";
        if simulation::is("queries-fail") {
            let gpu = Gpu::open(0).unwrap();
            let mut bench = Bench::new(&gpu, tensors(&gpu, 9, 64 << 10, 64));
            for slot in 0..9 {
                let block = vec![slot as u8; 64 << 10];
                bench.upload(slot, &block);
                assert_eq!(bench.download(slot), block);
            }
        }
        simulation::run_one_test("queries-fail", "", name);
    }

    #[test]
    fn of_none_nothing_is_allocated_while_copies_run() {
        let name = "faults::of_none_nothing_is_allocated_while_copies_run";
        if simulation::is("no-fault") {
            let gpu = Gpu::open(0).unwrap();
            // The kernel, one call for all, and copies one by one.
            for pieces in [64, 4, 1] {
                let bench = Bench::new(&gpu, tensors(&gpu, 100, 1 << 20, pieces));
                let before = simulation::allocations();
                for _ in 0..3 {
                    let up = |i: usize| order(i, bench.here[i].slot_ref(), bench.there[i].slot_ref());
                    let back = |i: usize| order(i, bench.there[i].slot_ref(), bench.here[i].slot_ref());
                    run(&bench.backend, (0..100).map(up).collect()).into_iter().for_each(Result::unwrap);
                    run(&bench.backend, (0..100).map(back).collect()).into_iter().for_each(Result::unwrap);
                }
                assert_eq!(simulation::allocations(), before);
            }
        }
        simulation::run_one_test("no-fault", "", name);
    }

    #[test]
    fn that_hang_the_gpu_hang_nobody_who_drops_the_backend() {
        if simulation::is("streams-hang") {
            let gpu = Gpu::open(0).unwrap();
            let bench = Bench::new(&gpu, gpu.allocate(Geometry::new(1, 4096).unwrap()).unwrap());
            let order = order(0, bench.here[0].slot_ref(), bench.there[0].slot_ref());
            let reports = start(&bench.backend, vec![order]);
            let started = Instant::now();
            drop(bench);
            assert!(started.elapsed() < Duration::from_secs(1));
            assert!(reports.recv_timeout(Duration::from_millis(50)).is_err());
        }
        simulation::run_one_test(
            "streams-hang",
            "",
            "faults::that_hang_the_gpu_hang_nobody_who_drops_the_backend",
        );
    }
}

mod faults_of_cufile {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// A device region of two slots, and what opening GDS for it comes to.
    fn opened(gpu: &Gpu) -> (Arc<DeviceRegion>, Result<GdsBackend, SetupError>) {
        let device = Arc::new(gpu.allocate(Geometry::new(2, 4096).unwrap()).unwrap());
        let home = tempfile::tempdir().unwrap();
        let gds = gds(gpu, &device, home.path(), Arc::default());
        (device, gds)
    }

    #[test]
    fn are_told_in_time_with_a_remedy() {
        for (fault, why) in [
            ("cufile-hangs", "did not end in 1s"),
            ("cufile-fails", "cuFile error 5010"),
            ("cufile-no-files", "put disk.dirs on ext4 or XFS"),
        ] {
            if simulation::is(fault) {
                let gpu = Gpu::open(0).unwrap();
                for _ in 0..2 {
                    let started = Instant::now();
                    let error = opened(&gpu).1.unwrap_err();
                    assert_eq!(error.kind(), SetupErrorKind::Unavailable);
                    assert!(error.to_string().contains(why), "{error}");
                    assert!(started.elapsed() < Duration::from_secs(3));
                }
            }
            simulation::run_one_test(fault, "", "faults_of_cufile::are_told_in_time_with_a_remedy");
        }
    }

    #[test]
    fn modules_that_cannot_be_read_keep_cufile_from_starting() {
        if simulation::is("cufile-hangs") {
            let options = CuFileOptions { modules: "/no/such/list".into(), ..CuFileOptions::default() };
            let why = probe_cufile(&options).ready().unwrap_err();
            assert!(why.contains("/no/such/list") && why.contains("mount /proc"), "{why}");
        }
        let name = "faults_of_cufile::modules_that_cannot_be_read_keep_cufile_from_starting";
        simulation::run_one_test("cufile-hangs", "", name);
    }

    #[test]
    fn compatibility_mode_is_told() {
        if simulation::is("cufile-compatible") {
            let gpu = Gpu::open(0).unwrap();
            let gds = opened(&gpu).1.unwrap();
            assert_eq!((gds.mode(), gds.name()), (CuFileMode::Compatibility, "gds (compatibility mode)"));
        }
        simulation::run_one_test("cufile-compatible", "", "faults_of_cufile::compatibility_mode_is_told");
    }

    /// The driver reaches NVMe, and the slot files may lie elsewhere.
    #[test]
    fn only_files_that_the_driver_reaches_are_direct() {
        let name = "faults_of_cufile::only_files_that_the_driver_reaches_are_direct";
        if simulation::is("no-fault") {
            let gpu = Gpu::open(0).unwrap();
            let (device, gds) = opened(&gpu);
            let gds = gds.unwrap();
            assert_eq!(gds.mode(), CuFileMode::Compatibility);
            let why = gds.indirect().unwrap();
            assert!(why.contains("no direct path") || why.contains("does not describe"), "{why}");
            // A kernel that knows the drive as NVMe.
            let (home, sysfs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let on = std::fs::metadata(home.path()).unwrap().dev();
            let block = sysfs.path().join("dev/block");
            let (drive, link) =
                (block.join("nvme0n1"), block.join(format!("{}:{}", libc::major(on), libc::minor(on))));
            std::fs::create_dir_all(&drive).unwrap();
            std::os::unix::fs::symlink(drive, link).unwrap();
            let options = CuFileOptions { sysfs: sysfs.path().to_owned(), ..cufile_options() };
            let gds = gds_with(&gpu, &device, home.path(), Arc::default(), &options).unwrap();
            match gds.indirect() {
                None => assert_eq!((gds.mode(), gds.name()), (CuFileMode::Direct, "gds")),
                Some(why) => skip("direct", &why),
            }
        }
        simulation::run_one_test("no-fault", "", name);
    }

    #[test]
    fn a_block_of_many_pieces_is_shared_by_all_threads() {
        let name = "faults_of_cufile::a_block_of_many_pieces_is_shared_by_all_threads";
        if simulation::is("no-fault") {
            let gpu = Gpu::open(0).unwrap();
            let home = tempfile::tempdir().unwrap();
            let mut bench = Bench::new(&gpu, tensors(&gpu, 2, 64 << 10, 16));
            let gds = gds(&gpu, &bench.device, home.path(), Arc::default()).unwrap();
            let mut block = vec![0; 64 << 10];
            fill_pattern(5, &mut block);
            bench.upload(0, &block);
            let disk = SlotRef { tier: Tier::Disk, ..bench.here[0].slot_ref() };
            for op in [order(0, bench.there[0].slot_ref(), disk), order(0, disk, bench.there[1].slot_ref())] {
                run(&gds, vec![op]).remove(0).unwrap();
                // How many of the four load_remote_metadata depends on the scheduler of a busy machine.
                let at_once = simulation::transfers_at_once();
                assert!((2..=4).contains(&at_once), "{at_once} transfers at once");
            }
            assert_eq!(bench.download(1), block);
        }
        simulation::run_one_test("no-fault", "", name);
    }

    #[test]
    fn of_pinning_name_the_limits_and_blocks_move_all_the_same() {
        let name = "faults_of_cufile::of_pinning_name_the_limits_and_blocks_move_all_the_same";
        if simulation::is("cufile-pins-little") {
            let gpu = Gpu::open(0).unwrap();
            let (device, gds) = opened(&gpu);
            let gds = gds.unwrap();
            let why = gds.unregistered().unwrap();
            assert!(why.contains("max_device_pinned_mem_size_kb") && why.contains("BAR1"), "{why}");
            let report = probe_cufile(&cufile_options()).ready().unwrap();
            assert_eq!((report.max_pinned, &*report.reached), (4096, &["NVMe"][..]));
            let from = device.frames().unwrap().take().unwrap();
            let disk = SlotRef { tier: Tier::Disk, ..from.slot_ref() };
            run(&gds, vec![order(0, from.slot_ref(), disk)]).remove(0).unwrap();
        }
        simulation::run_one_test("cufile-pins-little", "", name);
    }

    #[test]
    fn short_transfers_are_errors() {
        if simulation::is("cufile-short") {
            let gpu = Gpu::open(0).unwrap();
            let (device, gds) = opened(&gpu);
            let from = device.frames().unwrap().take().unwrap();
            let disk = SlotRef { tier: Tier::Disk, ..from.slot_ref() };
            let error = run(&gds.unwrap(), vec![order(0, from.slot_ref(), disk)]).remove(0).unwrap_err();
            assert!(error.to_string().contains("4095 of 4096"), "{error}");
        }
        simulation::run_one_test("cufile-short", "", "faults_of_cufile::short_transfers_are_errors");
    }
}

#[test]
fn a_backend_names_its_routes() {
    let Some(gpu) = gpu() else { return };
    let bench = Bench::new(&gpu, gpu.allocate(Geometry::new(1, 4096).unwrap()).unwrap());
    assert_eq!(bench.backend.name(), "cuda");
    assert_eq!(bench.backend.routes(), [(Tier::Host, Tier::Device), (Tier::Device, Tier::Host)]);
}
