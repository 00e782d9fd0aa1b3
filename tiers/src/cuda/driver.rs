//! The driver's objects, each freed when it is dropped and not before what it depends on.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::probe::{Device, Driver, probe};
use crate::device::{DeviceRegion, Space};
use crate::error::{SetupError, SetupErrorKind};
use crate::geometry::Geometry;
use crate::memory::Memory;
use crate::segments::{Part, SegmentMap};

/// A GPU that this process uses. Cheap to clone.
#[derive(Clone)]
pub struct Gpu(Arc<Context>);

/// The device's primary context: the one that engines in this process use too.
struct Context {
    ordinal: u32,
    device: Device,
    copies_batches: bool,
    handle: sys::CUdevice,
    primary: sys::CUcontext,
}

// SAFETY: contexts may be made current in any thread.
unsafe impl Send for Context {}
// SAFETY: the driver synchronises its calls itself.
unsafe impl Sync for Context {}

impl Gpu {
    /// The GPU of this ordinal (as `CUDA_VISIBLE_DEVICES` numbers them).
    ///
    /// # Errors
    /// `Unavailable`: there is no driver, it is too old, or there is no such GPU; see [`probe`](super::probe).
    pub fn open(ordinal: u32) -> Result<Self, SetupError> {
        let driver = probe().driver.ready().map_err(|why| unavailable(format!("no CUDA here: {why}")))?;
        let Driver { mut devices, copies_batches, .. } = driver;
        if ordinal as usize >= devices.len() {
            let message = format!("there is no GPU {ordinal}: set device.ordinal below {}", devices.len());
            return Err(unavailable(message));
        }
        let device = devices.swap_remove(ordinal as usize);
        let handle = result::device::get(ordinal as i32).map_err(|error| failed("no such device", error))?;
        // SAFETY: a device that the driver just named.
        let primary = unsafe { result::primary_ctx::retain(handle) };
        let primary = primary.map_err(|error| failed("the GPU gives no context", error))?;
        Ok(Self(Arc::new(Context { ordinal, device, copies_batches, handle, primary })))
    }

    /// What it is.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Its number.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Takes device memory for slots of our own.
    ///
    /// # Errors
    /// `NoSpace`: the GPU has not that much left.
    pub fn allocate(&self, geometry: Geometry) -> Result<DeviceRegion, SetupError> {
        let memory = DeviceMemory::new(self, geometry.bytes())?;
        let map = SegmentMap::contiguous(memory.address as usize, geometry)?;
        // SAFETY: the memory is the region's, and nobody else knows it.
        Ok(unsafe { self.adopt(map, memory) })
    }

    /// Takes device memory as engines do: a block is a piece of each of several tensors, of these sizes.
    ///
    /// # Errors
    /// `NoSpace`: the GPU has not that much left. `Invalid`: a piece without bytes, or no piece.
    pub fn allocate_tensors(&self, slots: u32, pieces: &[usize]) -> Result<DeviceRegion, SetupError> {
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
        // SAFETY: the memory is the region's, and nobody else knows it.
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

    /// Makes the context current in this thread: whatever follows uses it.
    pub(crate) fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { result::ctx::set_current(self.0.primary) }
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.ordinal(), self.device().name)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
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
        let taken = gpu.enter().and_then(|()| unsafe { result::malloc_sync(bytes.max(1)) });
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
        // SAFETY: allocated in this context, and nobody uses it any more.
        note(self.gpu.enter().and_then(|()| unsafe { result::free_sync(self.address) }));
    }
}

/// Host memory of a region, locked and mapped for GPUs.
#[derive(Debug)]
pub(crate) struct Registration {
    gpu: Gpu,
    memory: Arc<dyn Memory>,
    /// What to add to a host address to get the address that kernels use for it.
    shift: usize,
}

impl Registration {
    pub(crate) fn new(gpu: &Gpu, memory: Arc<dyn Memory>) -> Result<Self, SetupError> {
        let (base, bytes) = (memory.base(), memory.geometry().bytes());
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the region's memory stays mapped as long as `memory` lives, which is longer than this.
        let locked = gpu
            .enter()
            .and_then(|()| unsafe { sys::cuMemHostRegister_v2(base.as_ptr().cast(), bytes, flags).result() });
        locked.map_err(|error| {
            let message = format!("{gpu:?} cannot lock {} MiB of host memory ({error}); lower host.capacity, or raise ulimit -l", bytes >> 20);
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })?;
        let mut registration = Self { gpu: gpu.clone(), memory, shift: 0 };
        let mut mapped = 0;
        // SAFETY: the memory is registered with the flag that maps it.
        let asked =
            unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut mapped, base.as_ptr().cast(), 0) }.result();
        asked.map_err(|error| failed("host memory is not mapped for the GPU", error))?;
        registration.shift = (mapped as usize).wrapping_sub(base.addr().get());
        Ok(registration)
    }

    pub(crate) fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// The address that a kernel uses for an address of the region.
    pub(crate) fn mapped(&self, address: usize) -> usize {
        address.wrapping_add(self.shift)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let base = self.memory.base().as_ptr().cast();
        // SAFETY: registered once, unregistered once; no copy of ours is in flight.
        note(self.gpu.enter().and_then(|()| unsafe { sys::cuMemHostUnregister(base).result() }));
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
    /// The context is current.
    pub(crate) fn new(gpu: &Gpu, capacity: usize) -> Result<Self, DriverError> {
        let bytes = capacity.max(1) * size_of::<T>();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the size is not zero; the driver's memory is aligned to pages.
        let start = unsafe { result::malloc_host(bytes, flags) }?.cast();
        let start = NonNull::new(start).ok_or(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
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
        assert!(values.len() <= self.capacity, "{} values in an array of {}", values.len(), self.capacity);
        // SAFETY: they fit, and the array is borrowed mutably.
        unsafe { self.start.copy_from_nonoverlapping(NonNull::from(values).cast(), values.len()) };
    }

    /// Reads the first values. No kernel uses the array now, and they were written.
    ///
    /// # Panics
    /// If there are not as many.
    pub(crate) fn copy_to(&self, values: &mut [T]) {
        assert!(values.len() <= self.capacity, "{} values of an array of {}", values.len(), self.capacity);
        // SAFETY: the array has as many, which every caller has had written before.
        unsafe { self.start.copy_to_nonoverlapping(NonNull::from(&mut *values).cast(), values.len()) };
    }

    /// Where kernels find it: locked memory has one address for all (unified addressing).
    pub(crate) fn address(&self) -> u64 {
        self.start.addr().get() as u64
    }
}

impl<T: Copy> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: allocated in this context, and no kernel uses it any more.
        note(self.gpu.enter().and_then(|()| unsafe { result::free_host(self.start.as_ptr().cast()) }));
    }
}

/// Work in order.
#[derive(Debug)]
pub(crate) struct Stream {
    gpu: Gpu,
    stream: sys::CUstream,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver synchronises its calls itself.
unsafe impl Sync for Stream {}

impl Stream {
    /// One that does not wait for the default stream, which may be the engine's.
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, SetupError> {
        let made = gpu.enter().and_then(|()| result::stream::create(result::stream::StreamKind::NonBlocking));
        let stream = made.map_err(|error| failed("no stream", error))?;
        Ok(Self { gpu: gpu.clone(), stream })
    }

    pub(crate) const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Waits for all that was started.
    pub(crate) fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the stream lives.
        unsafe { result::stream::synchronize(self.stream) }
    }

    /// Starts a copy between any two places that the GPU can address.
    ///
    /// # Safety
    /// Both ends stay allocated, the source unwritten and the destination untouched by others, until the stream
    /// has got past it. The context is current.
    pub(crate) unsafe fn copy(&self, from: usize, to: usize, bytes: usize) -> Result<(), DriverError> {
        // SAFETY: as the caller promises.
        unsafe { sys::cuMemcpyAsync(to as u64, from as u64, bytes, self.stream).result() }
    }

    /// Starts filling the first bytes of an array of our own with zeroes.
    ///
    /// # Safety
    /// There are so many bytes, and nobody else touches them until the stream has got past it.
    pub(crate) unsafe fn zero(&self, memory: &DeviceMemory, bytes: usize) -> Result<(), DriverError> {
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
        let mut attributes: sys::CUmemcpyAttributes = unsafe { MaybeUninit::zeroed().assume_init() };
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

    /// Starts a kernel.
    ///
    /// # Safety
    /// `parameters` are the kernel's, and what they point to obeys what [`copy`](Self::copy) asks for.
    pub(crate) unsafe fn launch(
        &self,
        kernel: Kernel,
        grid: (u32, u32),
        threads: u32,
        parameters: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let (grid, threads) = ((grid.0, grid.1, 1), (threads, 1, 1));
        // SAFETY: as the caller promises.
        unsafe { result::launch_kernel(kernel.0, grid, threads, 0, self.stream, parameters) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is not used again; the driver frees it when its work is done.
        note(self.gpu.enter().and_then(|()| unsafe { result::stream::destroy(self.stream) }));
    }
}

/// A mark in a stream.
#[derive(Debug)]
pub(crate) struct Event {
    gpu: Gpu,
    event: sys::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// The context is current. `timed`: [`since`](Self::since) works.
    pub(crate) fn new(gpu: &Gpu, timed: bool) -> Result<Self, DriverError> {
        use sys::CUevent_flags as Flags;
        let flags = if timed { Flags::CU_EVENT_DEFAULT } else { Flags::CU_EVENT_DISABLE_TIMING };
        Ok(Self { gpu: gpu.clone(), event: result::event::create(flags)? })
    }

    /// Marks all that was started in the stream so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: both live.
        unsafe { result::event::record(self.event, stream.stream) }
    }

    /// Whether the stream has got past it.
    ///
    /// # Errors
    /// The GPU is lost, or some earlier work failed in a way that ends the context.
    pub(crate) fn has_passed(&self) -> Result<bool, DriverError> {
        // SAFETY: the event lives.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is not used again.
        note(self.gpu.enter().and_then(|()| unsafe { result::event::destroy(self.event) }));
    }
}

/// Compiled kernels.
#[derive(Debug)]
pub(crate) struct Module {
    gpu: Gpu,
    module: sys::CUmodule,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: the driver synchronises its calls itself.
unsafe impl Sync for Module {}

/// A kernel of a module that is still loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel(sys::CUfunction);

// SAFETY: a name for code; see `Module`.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Module {
    /// Loads PTX. The context is current.
    pub(crate) fn load(gpu: &Gpu, ptx: &CStr) -> Result<Self, DriverError> {
        // SAFETY: PTX is text that ends in a zero.
        let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) }?;
        Ok(Self { gpu: gpu.clone(), module })
    }

    pub(crate) fn kernel(&self, name: &CStr) -> Result<Kernel, DriverError> {
        // SAFETY: the module is loaded.
        unsafe { result::module::get_function(self.module, name.to_owned()) }.map(Kernel)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: no kernel of it runs, and none is started again.
        note(self.gpu.enter().and_then(|()| unsafe { result::module::unload(self.module) }));
    }
}

fn unavailable(message: String) -> SetupError {
    SetupError::new(SetupErrorKind::Unavailable, message)
}

pub(crate) fn failed(what: &str, error: DriverError) -> SetupError {
    SetupError::caused(SetupErrorKind::Unavailable, format!("CUDA: {what}: {error}"), error)
}

/// Nothing can be done about an error in a `drop`.
fn note(result: Result<(), DriverError>) {
    if let Err(error) = result {
        tracing::debug!(%error, "CUDA could not free something");
    }
}
