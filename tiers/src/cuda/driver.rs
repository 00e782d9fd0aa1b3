//! The driver's objects, each freed when it is dropped and not before what it depends on.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};
use parking_lot::Mutex;

use super::probe::{Device, Driver, probe};
use crate::backend::{EventFence, Fence};
use crate::error::{SetupError, SetupErrorKind};
use crate::geometry::{Geometry, Part, SegmentMap};
use crate::memory::{DeviceRegion, Memory, Space};

/// A GPU that this process uses. Cheap to clone.
#[derive(Clone)]
pub struct Gpu(Arc<PrimaryContext>);

/// The device's primary context: the one that engines in this process use too.
struct PrimaryContext {
    ordinal: u32,
    device: Device,
    copies_batches: bool,
    handle: sys::CUdevice,
    primary: sys::CUcontext,
    /// Unused events: making one takes locks of the driver's.
    events: Mutex<Vec<sys::CUevent>>,
}

/// How often a driver is asked again that gave no answer.
const ASK_AGAIN: Duration = Duration::from_millis(1);
/// Events made at the start, for fences of engines: more are rarely in use at once.
const EVENTS: usize = 64;

// SAFETY: contexts may be made current in any thread.
unsafe impl Send for PrimaryContext {}
// SAFETY: the driver synchronises its calls itself.
unsafe impl Sync for PrimaryContext {}

impl Gpu {
    /// The GPU of this ordinal (as `CUDA_VISIBLE_DEVICES` numbers them).
    ///
    /// # Errors
    /// `Unavailable`: there is no driver, it is too old, or there is no such GPU; see
    /// [`probe`](super::probe).
    pub fn open(ordinal: u32) -> Result<Self, SetupError> {
        let driver = probe()
            .driver
            .map_err(|why| SetupError::unavailable(format!("no CUDA here: {why}")))?;
        let Driver { mut devices, copies_batches, .. } = driver;
        if ordinal as usize >= devices.len() {
            let message =
                format!("there is no GPU {ordinal}: set device.ordinal below {}", devices.len());
            return Err(SetupError::unavailable(message));
        }
        let device = devices.swap_remove(ordinal as usize);
        let handle =
            result::device::get(ordinal as i32).map_err(|error| failed("no such device", error))?;
        // SAFETY: a device that the driver just named.
        let primary = unsafe { result::primary_ctx::retain(handle) };
        let primary = primary.map_err(|error| failed("the GPU gives no context", error))?;
        let events = Mutex::default();
        let gpu = Self(Arc::new(PrimaryContext {
            ordinal,
            device,
            copies_batches,
            handle,
            primary,
            events,
        }));
        gpu.reserve_events(EVENTS).map_err(|error| failed("no events", error))?;
        Ok(gpu)
    }

    /// What it is.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Its number.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Whether an event of an engine's has passed.
    ///
    /// # Safety
    /// It lives, is this GPU's, and was not recorded inside a capture.
    pub(crate) unsafe fn event_has_passed(&self, event: u64) -> Result<bool, DriverError> {
        let event = std::ptr::with_exposed_provenance_mut(event as usize);
        // SAFETY: as the caller promises.
        self.inside(|| unsafe { has_passed(event) })
    }

    /// The start of the allocation that an address of this GPU's memory is in; 0: the driver does
    /// not say.
    pub(crate) fn allocation_of(&self, address: usize) -> u64 {
        let mut start = 0;
        let asked = self.inside(|| {
            // SAFETY: the driver looks at the address, not at what is there.
            unsafe {
                sys::cuMemGetAddressRange_v2(&raw mut start, std::ptr::null_mut(), address as u64)
            }
            .result()
        });
        asked.map_or(0, |()| start)
    }

    /// Takes device memory for slots of our own.
    ///
    /// # Errors
    /// `NoSpace`: the GPU has not that much left.
    pub fn allocate(&self, geometry: Geometry) -> Result<DeviceRegion, SetupError> {
        let memory = DeviceMemory::new(self, geometry.bytes())?;
        let map = SegmentMap::contiguous(memory.address as usize, geometry)?;
        // SAFETY: the memory is the region's, and nothing else knows it.
        Ok(unsafe { self.adopt(map, memory) })
    }

    /// Takes device memory as engines do: a block is a piece of each of several tensors, of these
    /// sizes.
    ///
    /// # Errors
    /// `NoSpace`: the GPU has not that much left. `Invalid`: a piece without bytes, or no piece.
    pub fn allocate_tensors(
        &self,
        slots: u32,
        pieces: &[usize],
    ) -> Result<DeviceRegion, SetupError> {
        let parts = |base: usize| {
            let mut end = base;
            let part = |&bytes: &usize| {
                let base = end;
                end = base.saturating_add(bytes.saturating_mul(slots as usize));
                Part { base, stride: bytes, bytes }
            };
            pieces.iter().map(part).collect::<Vec<_>>()
        };
        let room = SegmentMap::new(slots, &parts(0))?.block_bytes().saturating_mul(slots as usize);
        let memory = DeviceMemory::new(self, room)?;
        let map = SegmentMap::new(slots, &parts(memory.address as usize))?;
        // SAFETY: the memory is the region's, and nothing else knows it.
        Ok(unsafe { self.adopt(map, memory) })
    }

    /// Takes over device memory that an engine in this process allocated.
    ///
    /// # Safety
    /// Those of [`DeviceRegion::adopt`]; the memory is this GPU's.
    pub unsafe fn adopt(
        &self,
        segments: SegmentMap,
        owner: impl std::any::Any + Send + Sync,
    ) -> DeviceRegion {
        // SAFETY: as the caller promises.
        unsafe { DeviceRegion::adopt(segments, Space::Cuda(self.ordinal()), owner) }
    }

    /// Whether the driver takes many copies in one call.
    pub(crate) fn copies_batches(&self) -> bool {
        self.0.copies_batches
    }

    /// A fence behind all that an engine has started in a stream of its own (`CUstream`,
    /// `cudaStream_t`; 0 is the default stream) so far.
    ///
    /// # Errors
    /// `InUse`: the stream is being captured, so that its work has not started: ask before the
    /// capture, or after. `Unavailable`: the GPU failed.
    ///
    /// # Safety
    /// The stream is of this GPU's primary context, and not destroyed meanwhile.
    pub unsafe fn fence_behind(&self, stream: u64) -> Result<Fence, SetupError> {
        let stream = std::ptr::with_exposed_provenance_mut(stream as usize);
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: as the caller promises.
        let asked =
            self.inside(|| unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) }.result());
        asked.map_err(|error| failed("an engine's stream", error))?;
        if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            let message =
                "the engine's stream is being captured: take the fence outside of the capture";
            return Err(SetupError::new(SetupErrorKind::InUse, message));
        }
        let event = StreamEvent::new(self).map_err(|error| failed("no event", error))?;
        // SAFETY: as the caller promises.
        let recorded = self.inside(|| unsafe { result::event::record(event.event, stream) });
        recorded.map_err(|error| failed("an engine's stream", error))?;
        Ok(Arc::new(event).fence())
    }

    /// Has an engine's stream wait for a fence, with whatever is started in it from now on. Blocks
    /// no thread.
    ///
    /// # Errors
    /// `Invalid`: the fence is one of the CPU's that is not raised. `Unavailable`: the GPU failed.
    ///
    /// # Safety
    /// The stream is of this GPU's primary context, and not destroyed meanwhile; the fence is this
    /// GPU's.
    pub unsafe fn hold(&self, stream: u64, fence: &Fence) -> Result<(), SetupError> {
        let stream = std::ptr::with_exposed_provenance_mut(stream as usize);
        match fence {
            // SAFETY: as the caller promises; the fence keeps its event.
            Fence::Event(event) => self.inside(|| unsafe { wait_in(stream, event.handle()) }),
            fence if fence.is_done() => Ok(()),
            _ => {
                let message = format!("a GPU cannot wait for {fence:?}: wait for it on the CPU");
                return Err(SetupError::invalid(message));
            }
        }
        .map_err(|error| failed("an engine's stream does not wait", error))
    }

    /// Makes `count` more events, for later.
    pub(crate) fn reserve_events(&self, count: usize) -> Result<(), DriverError> {
        let made =
            self.inside(|| (0..count).map(|_| make_event()).collect::<Result<Vec<_>, _>>())?;
        self.0.events.lock().extend(made);
        Ok(())
    }

    /// Makes the context current in this thread until the guard is dropped. Then the thread has the
    /// context that it had before, or none: it may be the engine's.
    pub(crate) fn enter(&self) -> Result<EnteredContext, DriverError> {
        self.0.enter()
    }

    /// Calls the driver, with the context current.
    pub(crate) fn inside<T>(
        &self,
        call: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let _entered = self.enter()?;
        call()
    }
}

impl PrimaryContext {
    fn enter(&self) -> Result<EnteredContext, DriverError> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { sys::cuCtxPushCurrent_v2(self.primary) }.result()?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid for the call.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        exchanged.result().inspect_err(|_| pop())?;
        Ok(EnteredContext { mode, _of_this_thread: PhantomData })
    }
}

/// A thread that calls the driver. While an engine captures a stream (in the mode of
/// `torch.cuda.graph`), harmless calls of other threads, be it the question whether an event has
/// passed, fail and end the capture, unless the thread has said that it does not care for captures.
/// Ours does not: nothing of ours is ever captured.
#[derive(Debug)]
pub(crate) struct EnteredContext {
    mode: sys::CUstreamCaptureMode,
    /// Not `Send`: mode and context are the thread's.
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for EnteredContext {
    fn drop(&mut self) {
        // SAFETY: the pointer is valid for the call.
        note(unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.mode) }.result());
        pop();
    }
}

/// The thread's context before the last push is current again.
fn pop() {
    let mut popped = std::ptr::null_mut();
    // SAFETY: the pointer is valid for the call.
    note(unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) }.result());
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.ordinal(), self.device().name)
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        let events = std::mem::take(self.events.get_mut());
        note(self.enter().and_then(|_entered| {
            // SAFETY: events that nothing uses.
            events.into_iter().try_for_each(|event| unsafe { result::event::destroy(event) })
        }));
        // SAFETY: retained once, released once.
        note(unsafe { result::primary_ctx::release(self.handle) });
    }
}

/// Memory of a GPU.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    gpu: Gpu,
    pub(crate) address: sys::CUdeviceptr,
}

impl DeviceMemory {
    pub(crate) fn new(gpu: &Gpu, bytes: usize) -> Result<Self, SetupError> {
        // SAFETY: the context is current; the size is not zero.
        let taken = gpu.inside(|| unsafe { result::malloc_sync(bytes.max(1)) });
        let address = taken.map_err(|error| {
            let message = format!(
                "{gpu:?} gives no {} MiB ({error}); lower device.capacity (DYN_KVBM_DEVICE_CACHE_GB)",
                bytes >> 20
            );
            SetupError::caused(SetupErrorKind::NoSpace, message, error)
        })?;
        Ok(Self { gpu: gpu.clone(), address })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in this context, and nothing uses it any more.
        note(self.gpu.inside(|| unsafe { result::free_sync(self.address) }));
    }
}

/// Host memory that is locked and mapped for GPUs until this is dropped.
#[derive(Debug)]
pub(crate) struct LockedHost {
    gpu: Gpu,
    addresses: Range<usize>,
    /// What to add to a host address to get the address that kernels use for it.
    shift: usize,
    /// Keeps the memory mapped.
    _keeper: Box<dyn Any + Send + Sync>,
}

/// What GPUs do with locked memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostUse {
    ReadAndWrite,
    /// They read it, and this process may not write it either.
    Read,
}

impl LockedHost {
    /// Locks all slots of a region.
    pub(crate) fn of(gpu: &Gpu, memory: &Arc<dyn Memory>) -> Result<Self, SetupError> {
        let start = memory.base().addr().get();
        let addresses = start..start + memory.geometry().bytes();
        // SAFETY: the region's memory stays mapped as long as `memory` lives, which is kept.
        let locked =
            unsafe { Self::lock(gpu, addresses, HostUse::ReadAndWrite, Arc::clone(memory)) };
        locked.map_err(|error| {
            let bytes = memory.geometry().bytes();
            let message = format!("{gpu:?} cannot lock {} MiB of host memory ({error}); lower host.capacity, or raise ulimit -l", bytes >> 20);
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })
    }

    /// # Safety
    /// The addresses stay mapped as long as the keeper lives.
    pub(crate) unsafe fn lock(
        gpu: &Gpu,
        addresses: Range<usize>,
        host_use: HostUse,
        keeper: impl Any + Send + Sync,
    ) -> Result<Self, DriverError> {
        let mut flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        if host_use == HostUse::Read {
            flags |= sys::CU_MEMHOSTREGISTER_READ_ONLY;
        }
        let start: *mut c_void = std::ptr::with_exposed_provenance_mut(addresses.start);
        // SAFETY: as the caller promises.
        gpu.inside(|| unsafe {
            sys::cuMemHostRegister_v2(start, addresses.len(), flags).result()
        })?;
        let mut locked = Self { gpu: gpu.clone(), addresses, shift: 0, _keeper: Box::new(keeper) };
        let mut mapped = 0;
        // SAFETY: the memory is registered with the flag that maps it.
        gpu.inside(|| unsafe {
            sys::cuMemHostGetDevicePointer_v2(&raw mut mapped, start, 0).result()
        })?;
        locked.shift = (mapped as usize).wrapping_sub(locked.addresses.start);
        Ok(locked)
    }

    /// The address that a kernel uses for one of this memory; any other one as it is.
    pub(crate) fn mapped(&self, address: usize) -> usize {
        let shift = if self.addresses.contains(&address) { self.shift } else { 0 };
        address.wrapping_add(shift)
    }
}

impl Drop for LockedHost {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.addresses.start);
        // SAFETY: registered once, unregistered once; no copy of ours is in flight.
        note(self.gpu.inside(|| unsafe { sys::cuMemHostUnregister(start).result() }));
    }
}

/// An array in locked host memory that both sides can read and write.
#[derive(Debug)]
pub(crate) struct Pinned<T: Copy> {
    gpu: Gpu,
    start: NonNull<T>,
    capacity: usize,
}

// SAFETY: it owns its values, which are plain data.
unsafe impl<T: Copy + Send> Send for Pinned<T> {}
// SAFETY: shared access gives out an address only.
unsafe impl<T: Copy + Sync> Sync for Pinned<T> {}

impl<T: Copy> Pinned<T> {
    pub(crate) fn new(gpu: &Gpu, capacity: usize) -> Result<Self, DriverError> {
        let bytes = capacity.max(1) * size_of::<T>();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the size is not zero; the driver's memory is aligned to pages.
        let start = gpu.inside(|| unsafe { result::malloc_host(bytes, flags) })?.cast();
        let start =
            NonNull::new(start).ok_or(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
        Ok(Self { gpu: gpu.clone(), start, capacity: capacity.max(1) })
    }

    pub(crate) const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Overwrites the first values. No kernel uses the array now.
    ///
    /// # Panics
    /// If there are more than fit.
    pub(crate) fn write(&mut self, values: &[T]) {
        self.check_room(values.len());
        // SAFETY: they fit, and the array is borrowed mutably.
        unsafe { self.start.copy_from_nonoverlapping(NonNull::from(values).cast(), values.len()) };
    }

    /// Reads the first values. No kernel uses the array now, and they were written.
    ///
    /// # Panics
    /// If there are not as many.
    pub(crate) fn copy_to(&self, values: &mut [T]) {
        self.check_room(values.len());
        // SAFETY: the array has as many, which every caller has had written before.
        unsafe {
            self.start.copy_to_nonoverlapping(NonNull::from(&mut *values).cast(), values.len());
        };
    }

    fn check_room(&self, values: usize) {
        assert!(values <= self.capacity, "{values} values in an array of {}", self.capacity);
    }

    /// Where kernels find it: locked memory has one address for all (unified addressing).
    pub(crate) fn address(&self) -> u64 {
        self.start.addr().get() as u64
    }
}

impl<T: Copy> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: allocated in this context, and no kernel uses it any more.
        note(self.gpu.inside(|| unsafe { result::free_host(self.start.as_ptr().cast()) }));
    }
}

/// Values that kernels read. They are copied to the GPU's memory first: across the bus every group
/// of threads would wait microseconds for its own.
#[derive(Debug)]
pub(crate) struct KernelTable<T: Copy> {
    here: Pinned<T>,
    there: DeviceMemory,
}

impl<T: Copy> KernelTable<T> {
    pub(crate) fn new(gpu: &Gpu, capacity: usize) -> Result<Self, SetupError> {
        let here = Pinned::new(gpu, capacity).map_err(|error| failed("no locked memory", error))?;
        let there = DeviceMemory::new(gpu, here.capacity() * size_of::<T>())?;
        Ok(Self { here, there })
    }

    pub(crate) const fn capacity(&self) -> usize {
        self.here.capacity()
    }

    /// Puts values there that kernels behind this in the stream find at the address that is
    /// returned.
    ///
    /// # Safety
    /// Nothing that was started reads the table any more, and it lives until the stream has got
    /// past its readers. The context is current.
    ///
    /// # Panics
    /// If there are more than fit.
    pub(crate) unsafe fn fill(
        &mut self,
        stream: &CudaStream,
        values: &[T],
    ) -> Result<u64, DriverError> {
        self.here.write(values);
        let (from, to) = (self.here.address(), self.there.address);
        // SAFETY: both are the table's, and have room for the values.
        unsafe { stream.copy(from as usize, to as usize, size_of_val(values)) }?;
        Ok(to)
    }
}

/// Work in order.
#[derive(Debug)]
pub(crate) struct CudaStream {
    gpu: Gpu,
    stream: sys::CUstream,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for CudaStream {}
// SAFETY: the driver synchronises its calls itself.
unsafe impl Sync for CudaStream {}

/// Where rows begin, and how far each lies behind the one before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PitchedAddress {
    pub(crate) address: usize,
    pub(crate) pitch: usize,
}

impl CudaStream {
    /// One that does not wait for the default stream, which may be the engine's.
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, SetupError> {
        let made = gpu.inside(|| result::stream::create(result::stream::StreamKind::NonBlocking));
        let stream = made.map_err(|error| failed("no stream", error))?;
        Ok(Self { gpu: gpu.clone(), stream })
    }

    pub(crate) const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Waits for all that was started. The context is current.
    pub(crate) fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the stream lives.
        unsafe { result::stream::synchronize(self.stream) }
    }

    /// [`wait`](Self::wait), until nothing that was started is under way: an error that does not end
    /// the context says nothing of that.
    pub(crate) fn wait_for_quiet(&self) -> Result<(), DriverError> {
        let mut is_told = false;
        loop {
            match self.wait() {
                Err(error) if !ends_the_context(error) => {
                    if !std::mem::replace(&mut is_told, true) {
                        tracing::warn!(%error, "the driver does not say whether its work has ended: asking again");
                    }
                    std::thread::sleep(ASK_AGAIN);
                }
                ended => return ended,
            }
        }
    }

    /// Starts a copy between any two places that the GPU can address.
    ///
    /// # Safety
    /// Both ends stay allocated, the source unwritten and the destination untouched by others,
    /// until the stream has got past it. The context is current.
    pub(crate) unsafe fn copy(
        &self,
        from: usize,
        to: usize,
        bytes: usize,
    ) -> Result<(), DriverError> {
        // SAFETY: as the caller promises.
        unsafe { sys::cuMemcpyAsync(to as u64, from as u64, bytes, self.stream).result() }
    }

    /// Starts copying `count` rows of `bytes` bytes, each a pitch behind the one before at either
    /// end.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy), of every row.
    pub(crate) unsafe fn copy_rows(
        &self,
        from: PitchedAddress,
        to: PitchedAddress,
        bytes: usize,
        count: usize,
    ) -> Result<(), DriverError> {
        // SAFETY: zero is a valid value of every field: no array, no offset.
        let mut rows: sys::CUDA_MEMCPY2D = unsafe { MaybeUninit::zeroed().assume_init() };
        (rows.srcMemoryType, rows.dstMemoryType) =
            (sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED, sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED);
        (rows.srcDevice, rows.srcPitch) = (from.address as u64, from.pitch);
        (rows.dstDevice, rows.dstPitch) = (to.address as u64, to.pitch);
        (rows.WidthInBytes, rows.Height) = (bytes, count);
        // SAFETY: as the caller promises.
        unsafe { sys::cuMemcpy2DAsync_v2(&raw const rows, self.stream).result() }
    }

    /// Starts filling the first bytes of an array of our own with zeroes.
    ///
    /// # Safety
    /// There are this many bytes, and nothing else touches them until the stream has got past it.
    pub(crate) unsafe fn zero(
        &self,
        memory: &DeviceMemory,
        bytes: usize,
    ) -> Result<(), DriverError> {
        // SAFETY: as the caller promises.
        unsafe { result::memset_d8_async(memory.address, 0, bytes, self.stream) }
    }

    /// Starts many copies with one call.
    ///
    /// # Safety
    /// Those of [`copy`](Self::copy) for each; the driver copies batches.
    pub(crate) unsafe fn copy_all(
        &self,
        from: &mut [u64],
        to: &mut [u64],
        bytes: &mut [usize],
    ) -> Result<(), DriverError> {
        // SAFETY: zero is a valid value of every field, and means: no hint.
        let mut attributes: sys::CUmemcpyAttributes =
            unsafe { MaybeUninit::zeroed().assume_init() };
        attributes.srcAccessOrder = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let (mut first, mut failed) = (0, 0);
        // SAFETY: arrays of one length that outlive the call; else as the caller promises.
        unsafe {
            sys::cuMemcpyBatchAsync(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                bytes.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                &raw mut failed,
                self.stream,
            )
        }
        .result()
    }

    /// Whatever is started from now on waits for the event. The context is current.
    ///
    /// # Safety
    /// The event lives, is this GPU's, and was not recorded inside a capture.
    pub(crate) unsafe fn wait_for(&self, event: u64) -> Result<(), DriverError> {
        // SAFETY: as the caller promises.
        unsafe { wait_in(self.stream, event) }
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// `parameters` are the kernel's, and what they point to obeys what [`copy`](Self::copy) asks
    /// for.
    pub(crate) unsafe fn launch(
        &self,
        kernel: LoadedKernel,
        grid: [u32; 2],
        threads: u32,
        parameters: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let (grid, threads) = ((grid[0], grid[1], 1), (threads, 1, 1));
        // SAFETY: as the caller promises.
        unsafe { result::launch_kernel(kernel.0, grid, threads, 0, self.stream, parameters) }
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // SAFETY: the stream is not used again; the driver frees it when its work is done.
        note(self.gpu.inside(|| unsafe { result::stream::destroy(self.stream) }));
    }
}

/// A mark in a stream.
#[derive(Debug)]
pub(crate) struct StreamEvent {
    gpu: Gpu,
    event: sys::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for StreamEvent {}
// SAFETY: the driver synchronises its calls itself.
unsafe impl Sync for StreamEvent {}

impl StreamEvent {
    /// One that is idle; makes one if there is none.
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, DriverError> {
        let idle = gpu.0.events.lock().pop();
        let event = idle.map_or_else(|| gpu.inside(make_event), Ok)?;
        Ok(Self { gpu: gpu.clone(), event })
    }

    /// Marks all that was started in the stream so far. The context is current.
    pub(crate) fn record(&self, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: both live.
        unsafe { result::event::record(self.event, stream.stream) }
    }

    /// Whether the stream has got past it. The context is current.
    ///
    /// # Errors
    /// Those of [`ends_the_context`] mean that it has, in the end of the context. Any other says
    /// nothing: ask again.
    pub(crate) fn has_passed(&self) -> Result<bool, DriverError> {
        // SAFETY: the event lives.
        unsafe { has_passed(self.event) }
    }

    /// For others to wait for.
    pub(crate) fn fence(self: Arc<Self>) -> Fence {
        Fence::Event(EventFence::kept(self.event.expose_provenance() as u64, self))
    }
}

/// Another may record it at once: a waiter for this record has told the driver so.
impl Drop for StreamEvent {
    fn drop(&mut self) {
        self.gpu.0.events.lock().push(self.event);
    }
}

fn make_event() -> Result<sys::CUevent, DriverError> {
    result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
}

/// # Safety
/// Both live; the context is current.
unsafe fn wait_in(stream: sys::CUstream, event: u64) -> Result<(), DriverError> {
    let event = std::ptr::with_exposed_provenance_mut(event as usize);
    // SAFETY: as the caller promises; there are no flags.
    unsafe { sys::cuStreamWaitEvent(stream, event, 0) }.result()
}

/// Whether an error means that the context has ended and all its work with it: nothing touches any
/// slot any more.
///
/// These are the codes of which the driver's documentation says that every later call returns them
/// too until the process is started anew ("leaves the process in an inconsistent state"), or that
/// the context is gone. Errors that are merely often the last ones (`ECC_UNCORRECTABLE`,
/// `NVLINK_UNCORRECTABLE`, `UNKNOWN`) are not among them: a slot that is kept for ever costs a
/// slot, one that is reused too early costs bytes.
pub(crate) const fn ends_the_context(error: DriverError) -> bool {
    matches!(
        error.0,
        CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
    )
}

/// Compiled kernels.
#[derive(Debug)]
pub(crate) struct LoadedModule {
    gpu: Gpu,
    module: sys::CUmodule,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for LoadedModule {}
// SAFETY: the driver synchronises its calls itself.
unsafe impl Sync for LoadedModule {}

/// A kernel of a module that is still loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadedKernel(sys::CUfunction);

// SAFETY: a name for code; see `LoadedModule`.
unsafe impl Send for LoadedKernel {}
// SAFETY: as above.
unsafe impl Sync for LoadedKernel {}

impl LoadedModule {
    /// Loads PTX. The context is current.
    pub(crate) fn load(gpu: &Gpu, ptx: &CStr) -> Result<Self, DriverError> {
        // SAFETY: PTX is text that ends in a zero.
        let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) }?;
        Ok(Self { gpu: gpu.clone(), module })
    }

    pub(crate) fn kernel(&self, name: &CStr) -> Result<LoadedKernel, DriverError> {
        // SAFETY: the module is loaded.
        unsafe { result::module::get_function(self.module, name.to_owned()) }.map(LoadedKernel)
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        // SAFETY: no kernel of it runs, and none is started again.
        note(self.gpu.inside(|| unsafe { result::module::unload(self.module) }));
    }
}

pub(crate) fn failed(what: &str, error: DriverError) -> SetupError {
    SetupError::caused(SetupErrorKind::Unavailable, format!("CUDA: {what}: {error}"), error)
}

/// # Safety
/// The event lives. The context is current.
unsafe fn has_passed(event: sys::CUevent) -> Result<bool, DriverError> {
    // SAFETY: as the caller promises.
    match unsafe { result::event::query(event) } {
        Ok(()) => Ok(true),
        Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Nothing can be done about an error in a `drop`.
fn note(result: Result<(), DriverError>) {
    if let Err(error) = result {
        tracing::debug!(%error, "CUDA could not free something");
    }
}
