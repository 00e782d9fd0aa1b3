use std::time::Duration;

use cudarc::driver::result::DriverError;

use crate::clock;
use crate::cuda::Gpu;
use crate::cuda::driver::{
    CudaStream, DeviceMemory, KernelTable, LoadedKernel, LoadedModule, Pinned, failed,
};
use crate::cuda::kernels::{CopyKernels, THREADS, compile_for, pointer};
use crate::error::SetupError;
use crate::transform::Transform;

/// Locked host memory and two arrays on a GPU, and what the driver's own copies and a busy engine
/// do with them. Times are from the start of a call to the end of its work.
#[derive(Debug)]
pub struct RawGpu {
    stream: CudaStream,
    kernels: CopyKernels,
    /// From its first use on.
    busy: Option<BusyKernels>,
    host: Pinned<u8>,
    device: [DeviceMemory; 2],
    pairs: KernelTable<(u32, u32)>,
    bytes: usize,
}

impl RawGpu {
    /// Three arrays of `bytes` bytes.
    ///
    /// # Errors
    /// `NoSpace`: the GPU has not that much. `Unavailable`: no locked memory, or no kernels.
    pub fn open(gpu: &Gpu, bytes: usize) -> Result<Self, SetupError> {
        let refused = |error| failed("no locked memory", error);
        let device = [DeviceMemory::new(gpu, bytes)?, DeviceMemory::new(gpu, bytes)?];
        Ok(Self {
            stream: CudaStream::new(gpu)?,
            kernels: CopyKernels::load(gpu)?,
            busy: None,
            host: Pinned::new(gpu, bytes).map_err(refused)?,
            pairs: KernelTable::new(gpu, 1 << 16)?,
            device,
            bytes,
        })
    }

    /// Copies all of the host's array to the device, `per_call` bytes with each call.
    ///
    /// # Errors
    /// `Unavailable`: the GPU failed.
    pub fn to_device(&mut self, per_call: usize) -> Result<Duration, SetupError> {
        self.copy(self.host.address(), self.device[0].address, per_call)
    }

    /// Copies all of the device's first array to the host, `per_call` bytes with each call.
    ///
    /// # Errors
    /// `Unavailable`: the GPU failed.
    pub fn to_host(&mut self, per_call: usize) -> Result<Duration, SetupError> {
        self.copy(self.device[0].address, self.host.address(), per_call)
    }

    /// Copies the device's first array to its second.
    ///
    /// # Errors
    /// `Unavailable`: the GPU failed.
    pub fn within_device(&mut self) -> Result<Duration, SetupError> {
        self.copy(self.device[0].address, self.device[1].address, self.bytes)
    }

    fn copy(&self, from: u64, to: u64, per_call: usize) -> Result<Duration, SetupError> {
        timed(&self.stream, || {
            (0..self.bytes).step_by(per_call.max(1)).try_for_each(|at| {
                let bytes = per_call.min(self.bytes - at);
                // SAFETY: within two of the arrays, which are disjoint and ours until the work has
                // ended.
                unsafe { self.stream.copy(from as usize + at, to as usize + at, bytes) }
            })
        })
    }

    /// Rearranges the first `blocks` blocks of the device's first array into its second.
    ///
    /// # Errors
    /// `Invalid`: there are not as many blocks, or the arrays are not as large as the layouts say.
    /// `Unavailable`: the GPU failed.
    pub fn transform(
        &mut self,
        transform: &Transform,
        blocks: u32,
    ) -> Result<Duration, SetupError> {
        let pairs: Vec<_> = (0..blocks).map(|block| (block, block)).collect();
        transform.check(&pairs)?;
        let (source, target) = transform.array_bytes();
        if source.max(target) > self.bytes || pairs.len() > self.pairs.capacity() {
            return Err(SetupError::invalid("the arrays are smaller than the layouts"));
        }
        let [from, to] = [0, 1].map(|end| self.device[end].address);
        let plan = transform.with_long_rows().plan();
        let Self { stream, kernels, pairs: table, .. } = self;
        timed(stream, || {
            // SAFETY: the arrays are as large as the layouts, disjoint, and ours until the work has
            // ended; so is the table.
            unsafe {
                let pairs_there = table.fill(stream, &pairs)?;
                kernels.transform(stream, from, to, pairs_there, pairs.len(), plan)
            }
        })
    }

    /// Multiplies square matrices of `n` rows of floats `times` times, as an engine would keep a
    /// GPU busy.
    ///
    /// # Errors
    /// `Invalid`: the matrices do not fit. `Unavailable`: the GPU failed, or NVRTC is not there.
    pub fn matmul(&mut self, n: u32, times: usize) -> Result<Duration, SetupError> {
        let matrix = u64::from(n) * u64::from(n) * size_of::<f32>() as u64;
        if 2 * matrix > self.bytes as u64 {
            return Err(SetupError::invalid("the matrices do not fit"));
        }
        let (a, c) = (self.device[0].address, self.device[1].address);
        let busy = BusyKernels::once(&mut self.busy, self.stream.gpu())?;
        timed(&self.stream, || {
            (0..times).try_for_each(|_| {
                // SAFETY: three arrays of this many floats, ours until the work has ended; any bits
                // are floats.
                unsafe { busy.matmul(&self.stream, a, a + matrix, c, n) }
            })
        })
    }

    /// Multiplies a square matrix of `n` rows of floats, a multiple of 64, with a vector `times`
    /// times, as an engine that decodes keeps a GPU's memory busy.
    ///
    /// # Errors
    /// `Invalid`: the matrix does not fit. `Unavailable`: the GPU failed, or NVRTC is not there.
    pub fn matvec(&mut self, n: u32, times: usize) -> Result<Duration, SetupError> {
        let matrix = u64::from(n) * u64::from(n) * size_of::<f32>() as u64;
        if matrix > self.bytes as u64
            || n < BusyKernels::PARTS
            || !n.is_multiple_of(BusyKernels::PARTS)
        {
            return Err(SetupError::invalid("the matrix does not fit"));
        }
        // Its first row is the vector.
        let (a, y) = (self.device[0].address, self.device[1].address);
        let busy = BusyKernels::once(&mut self.busy, self.stream.gpu())?;
        timed(&self.stream, || {
            (0..times).try_for_each(|_| {
                // SAFETY: arrays of this many floats, ours until the work has ended; any bits are
                // floats.
                unsafe { busy.matvec(&self.stream, a, a, y, n) }
            })
        })
    }
}

/// Their source, CUDA C.
pub(crate) const BUSY: &str = include_str!("busy.cu");

/// What an engine keeps a GPU busy with.
#[derive(Debug)]
struct BusyKernels {
    matmul: LoadedKernel,
    matvec: LoadedKernel,
    /// Keeps the code.
    _module: LoadedModule,
}

impl BusyKernels {
    /// Groups that share a column of the matrix that a vector is multiplied with.
    const PARTS: u32 = 64;

    /// Those in `loaded`, which are compiled the first time.
    ///
    /// # Errors
    /// `Unavailable`: NVRTC is not there, or the GPU does not take them.
    fn once<'a>(loaded: &'a mut Option<Self>, gpu: &Gpu) -> Result<&'a Self, SetupError> {
        Ok(match loaded {
            Some(loaded) => loaded,
            None => loaded.insert(Self::load(gpu)?),
        })
    }

    fn load(gpu: &Gpu) -> Result<Self, SetupError> {
        let _entered = gpu.enter().map_err(|error| failed("no context", error))?;
        let needed = |why| SetupError::unavailable(format!("a busy GPU needs NVRTC: {why}"));
        let loaded = compile_for(gpu, BUSY).map_err(needed)?;
        let of = |module: LoadedModule| -> Result<Self, DriverError> {
            Ok(Self {
                matmul: module.kernel(c"kvbm_matmul")?,
                matvec: module.kernel(c"kvbm_matvec")?,
                _module: module,
            })
        };
        loaded.and_then(of).map_err(|error| failed("the GPU does not take its work", error))
    }

    /// Starts multiplying two matrices of `n` rows of floats.
    ///
    /// # Safety
    /// All three are arrays of `n * n` floats, the last distinct, until the stream has got past it.
    unsafe fn matmul(
        &self,
        stream: &CudaStream,
        mut a: u64,
        mut b: u64,
        mut c: u64,
        mut n: u32,
    ) -> Result<(), DriverError> {
        let parameters = &mut [pointer(&mut a), pointer(&mut b), pointer(&mut c), pointer(&mut n)];
        // SAFETY: these are the kernel's parameters; else as the caller promises.
        unsafe { stream.launch(self.matmul, [n.div_ceil(THREADS), n], THREADS, parameters) }
    }

    /// Starts multiplying a matrix of `n` rows of floats, a multiple of [`PARTS`](Self::PARTS),
    /// with a vector.
    ///
    /// # Safety
    /// Arrays of `n * n`, `n` and `PARTS * n` floats, the last distinct, until the stream has got
    /// past it.
    unsafe fn matvec(
        &self,
        stream: &CudaStream,
        mut a: u64,
        mut x: u64,
        mut y: u64,
        mut n: u32,
    ) -> Result<(), DriverError> {
        let parameters = &mut [pointer(&mut a), pointer(&mut x), pointer(&mut y), pointer(&mut n)];
        let grid = [n.div_ceil(THREADS), Self::PARTS];
        // SAFETY: these are the kernel's parameters; else as the caller promises.
        unsafe { stream.launch(self.matvec, grid, THREADS, parameters) }
    }
}

fn timed(
    stream: &CudaStream,
    start: impl FnOnce() -> Result<(), DriverError>,
) -> Result<Duration, SetupError> {
    let gone = |error| failed("a measurement failed", error);
    let _entered = stream.gpu().enter().map_err(gone)?;
    let started = clock::now();
    let outcome = start();
    // Also after an error: what was started must end.
    stream.wait().and(outcome).map_err(gone)?;
    Ok(started.elapsed())
}
