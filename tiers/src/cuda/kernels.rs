//! The kernels: compiled for this GPU by NVRTC where that is installed, else the embedded PTX.
//!
//! `kernels.ptx` is made of `kernels.cu` by `cargo test -p kvbm-tiers --features cuda` with
//! `KVBM_BLESS=1` and an NVRTC of CUDA 12.1 (`pip install nvidia-cuda-nvrtc-cu12==12.1.105`) in
//! `LD_LIBRARY_PATH`: drivers refuse PTX of a later version than their own. Its first line names
//! the source that it was made of.

use std::ffi::{CStr, CString, c_void};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::DriverError;
use cudarc::nvrtc;

use super::driver::{CudaStream, Gpu, KernelTable, LoadedKernel, LoadedModule, failed};
use super::probe::probe;
use crate::copy::{CopyError, CopyErrorKind};
use crate::error::SetupError;
use crate::geometry::Piece;
use crate::transform::{Transform, TransformPlan};

/// The kernels' source, CUDA C.
pub const SOURCE: &str = include_str!("kernels.cu");
const EMBEDDED: &str = include_str!("kernels.ptx");
const COPY_PIECES: &CStr = c"kvbm_copy_pieces";
const TRANSFORM: &CStr = c"kvbm_transform";
const CRC32C: &CStr = c"kvbm_crc32c";

/// Threads of a group.
pub(crate) const THREADS: u32 = 256;
/// Threads of a group that copies pieces: sixteen pieces of 4 KiB under way in each. (1,024 were no
/// faster on an H100.)
const COPY_THREADS: u32 = 512;
/// Groups that rearrange, per block and over blocks: the device's own bandwidth is to be saturated.
const TRANSFORM_GROUPS: (u32, u32) = (64, 256);

/// Groups that sum, at most: a block is verified before its request can go on, so more than copies
/// get. With 128 an H100 sums blocks of many pieces at 85 GB/s, with these at 200.
const SUM_GROUPS: u32 = 512;
/// Bytes of a piece that a thread of the checksum kernel takes at a time, as in `kernels.cu`.
const SUM_CHUNK: u64 = 512;

/// The kernels, loaded.
#[derive(Debug)]
pub(crate) struct CopyKernels {
    copy_pieces: LoadedKernel,
    transform: LoadedKernel,
    crc32c: LoadedKernel,
    /// Keeps the code.
    _module: LoadedModule,
}

/// A piece of a block whose checksum is computed: `struct Summand` of `kernels.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct ChecksumSummand {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Bytes of the block behind it.
    pub(crate) after: u64,
    /// Which of the sums.
    pub(crate) block: u32,
    pub(crate) unused: u32,
}

impl CopyKernels {
    /// # Errors
    /// `Unavailable`: the GPU takes neither.
    pub(crate) fn load(gpu: &Gpu) -> Result<Self, SetupError> {
        let _entered = gpu.enter().map_err(|error| failed("no context", error))?;
        match compile_here(gpu) {
            Ok(kernels) => Ok(kernels),
            Err(why) => {
                tracing::debug!(why, "kernels are not compiled here: the embedded ones serve");
                let ptx = CString::new(EMBEDDED).unwrap_or_default();
                let kernels = LoadedModule::load(gpu, &ptx).and_then(Self::of);
                kernels.map_err(|error| failed("the GPU does not take the kernels", error))
            }
        }
    }

    fn of(module: LoadedModule) -> Result<Self, DriverError> {
        Ok(Self {
            copy_pieces: module.kernel(COPY_PIECES)?,
            transform: module.kernel(TRANSFORM)?,
            crc32c: module.kernel(CRC32C)?,
            _module: module,
        })
    }

    /// Starts the copies that the `count` [`Piece`]s at address `table` name, by `groups` groups of
    /// threads.
    ///
    /// # Safety
    /// The table, and what it names, stay as they are until the stream has got past it; the GPU can
    /// address all of it.
    pub(crate) unsafe fn copy_pieces(
        &self,
        stream: &CudaStream,
        mut table: u64,
        count: usize,
        groups: u32,
    ) -> Result<(), DriverError> {
        const { assert!(size_of::<Piece>() == 24, "as in kernels.cu") };
        let mut number = count as u32;
        let mut parameters = [pointer(&mut table), pointer(&mut number)];
        // SAFETY: these are the kernel's parameters; else as the caller promises.
        unsafe { stream.launch(self.copy_pieces, [groups, 1], COPY_THREADS, &mut parameters) }
    }

    /// Starts a transform of `count` blocks, whose pairs of numbers are at address `pairs`.
    ///
    /// # Safety
    /// As for [`copy_pieces`](Self::copy_pieces); `from` and `to` are arrays as `plan` says.
    pub(crate) unsafe fn transform(
        &self,
        stream: &CudaStream,
        mut from: u64,
        mut to: u64,
        mut pairs: u64,
        count: usize,
        mut plan: TransformPlan,
    ) -> Result<(), DriverError> {
        let (mut number, mut unit) = (count as u32, widest_unit(from, to, &plan));
        let parameters = &mut [
            pointer(&mut from),
            pointer(&mut to),
            pointer(&mut pairs),
            pointer(&mut number),
            pointer(&mut unit),
            pointer(&mut plan),
        ];
        let units = u64::from(plan.rows) * (plan.row_bytes / u64::from(unit));
        let groups =
            units.div_ceil(u64::from(THREADS)).clamp(1, u64::from(TRANSFORM_GROUPS.0)) as u32;
        let grid = [groups, number.clamp(1, TRANSFORM_GROUPS.1)];
        // SAFETY: these are the kernel's parameters; else as the caller promises.
        unsafe { stream.launch(self.transform, grid, THREADS, parameters) }
    }

    /// Starts adding the checksums of `count` [`ChecksumSummand`]s at address `table`, none larger
    /// than `longest` bytes, to the sums at address `sums`.
    ///
    /// # Safety
    /// As for [`copy_pieces`](Self::copy_pieces).
    pub(crate) unsafe fn crc32c(
        &self,
        stream: &CudaStream,
        mut table: u64,
        count: usize,
        longest: usize,
        mut sums: u64,
    ) -> Result<(), DriverError> {
        const { assert!(size_of::<ChecksumSummand>() == 32, "as in kernels.cu") };
        let mut number = count as u32;
        let parameters = &mut [pointer(&mut table), pointer(&mut number), pointer(&mut sums)];
        // SAFETY: these are the kernel's parameters; else as the caller promises.
        unsafe { stream.launch(self.crc32c, sum_grid(number, longest as u64), THREADS, parameters) }
    }
}

/// Groups over pieces, and groups that share a piece: as many as find something to do.
fn sum_grid(count: u32, longest: u64) -> [u32; 2] {
    let pieces = count.clamp(1, SUM_GROUPS);
    let shares = longest.div_ceil(u64::from(THREADS) * SUM_CHUNK);
    [pieces, shares.clamp(1, u64::from(SUM_GROUPS / pieces)) as u32]
}

pub(crate) fn pointer<T>(parameter: &mut T) -> *mut c_void {
    (&raw mut *parameter).cast()
}

/// The largest unit that divides all addresses, strides and the bytes of a row.
fn widest_unit(from: u64, to: u64, plan: &TransformPlan) -> u32 {
    let offsets = [
        from,
        to,
        plan.row_bytes,
        plan.from_offset,
        plan.to_offset,
        plan.from_block,
        plan.to_block,
    ];
    let all = offsets
        .iter()
        .chain(&plan.from_strides)
        .chain(&plan.to_strides)
        .fold(0, |all, number| all | number);
    [16, 4].into_iter().find(|&unit| all.is_multiple_of(u64::from(unit))).unwrap_or(1)
}

/// What the checksum kernel leaves out, being linear: start value and final complement. The
/// kernel's sum of a block combined (exclusive or) with this is the block's [`checksum`].
pub(crate) fn checksum_of_zeroes(mut bytes: usize) -> u32 {
    // The sum of a block of zeroes is zero.
    let zeroes = [0; 4096];
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    while bytes > 0 {
        let some = bytes.min(zeroes.len());
        digest.update(&zeroes[..some]);
        bytes -= some;
    }
    digest.finalize() as u32
}

fn compile_here(gpu: &Gpu) -> Result<CopyKernels, String> {
    let loaded = compile_for(gpu, SOURCE)?.and_then(CopyKernels::of);
    loaded.map_err(|error| format!("the driver refuses what NVRTC made: {error}"))
}

/// Compiles a source for a GPU, whose context is current.
pub(crate) fn compile_for(
    gpu: &Gpu,
    source: &str,
) -> Result<Result<LoadedModule, DriverError>, String> {
    probe().nvrtc?;
    let (major, minor) = gpu.device().capability;
    let ptx = compile(source, &format!("compute_{major}{minor}"))?;
    Ok(LoadedModule::load(gpu, &ptx))
}

/// NVRTC is present.
fn compile(source: &str, architecture: &str) -> Result<CString, String> {
    let source = CString::new(source).map_err(|error| error.to_string())?;
    let options = [format!("--gpu-architecture={architecture}"), "--std=c++14".to_owned()];
    let program = nvrtc::result::create_program(&source, Some(c"kernels.cu"))
        .map_err(|error| error.to_string())?;
    // SAFETY: the program was just made, and is freed below.
    let made = unsafe {
        nvrtc::result::compile_program(program, &options)
            .and_then(|()| nvrtc::result::get_ptx(program))
            .map_err(|error| format!("{error}: {}", log(program)))
    };
    // SAFETY: made above, freed once.
    let _ = unsafe { nvrtc::result::destroy_program(program) };
    let bytes =
        made?.into_iter().map(i8::cast_unsigned).take_while(|&byte| byte != 0).collect::<Vec<_>>();
    CString::new(bytes).map_err(|error| error.to_string())
}

/// What the compiler said.
///
/// # Safety
/// The program is not freed.
unsafe fn log(program: nvrtc::sys::nvrtcProgram) -> String {
    // SAFETY: as the caller promises.
    let log = unsafe { nvrtc::result::get_program_log(program) }.unwrap_or_default();
    let bytes: Vec<_> =
        log.into_iter().map(i8::cast_unsigned).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Executes [`Transform`]s in the memory of a GPU, in a stream of its own.
#[derive(Debug)]
pub struct Rearranger {
    kernels: CopyKernels,
    /// Taken by one caller at a time, with the table that its kernel reads.
    stream: Mutex<(CudaStream, KernelTable<(u32, u32)>)>,
}

impl Rearranger {
    /// Blocks that one launch takes.
    const TABLE: usize = 4096;

    /// Loads the kernels.
    ///
    /// # Errors
    /// `Unavailable`: the GPU does not take them, or has no memory left.
    pub fn new(gpu: &Gpu) -> Result<Self, SetupError> {
        let (kernels, stream) = (CopyKernels::load(gpu)?, CudaStream::new(gpu)?);
        let table = KernelTable::new(gpu, Self::TABLE)?;
        Ok(Self { kernels, stream: Mutex::new((stream, table)) })
    }

    /// Copies the blocks `(source, destination)` from the array at address `from` to that at `to`,
    /// and waits for it.
    ///
    /// # Errors
    /// `Refused`: there is no such block. `Io`: the GPU failed.
    ///
    /// # Safety
    /// The arrays are of the transform's layouts, disjoint, and in this GPU's memory or mapped for
    /// it; nothing else writes the source or touches the destination meanwhile.
    pub unsafe fn apply(
        &self,
        transform: &Transform,
        from: u64,
        to: u64,
        blocks: &[(u32, u32)],
    ) -> Result<(), CopyError> {
        transform.check(blocks).map_err(|error| CopyError::refused(error.to_string()))?;
        let plan = transform.with_long_rows().plan();
        let mut turn = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let (stream, table) = &mut *turn;
        let outcome = stream.gpu().inside(|| {
            blocks.chunks(Self::TABLE).try_for_each(|some| {
                // SAFETY: the table stays until the wait below has ended; else as the caller
                // promises.
                unsafe {
                    let pairs = table.fill(stream, some)?;
                    self.kernels.transform(stream, from, to, pairs, some.len(), plan)?;
                }
                stream.wait()
            })
        });
        outcome.map_err(|error| {
            CopyError::caused(
                CopyErrorKind::Io,
                format!("CUDA: a transform failed: {error}"),
                error,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::checksum;
    use crate::testing::skip;

    /// The oldest GPUs that are served (Volta).
    const ARCHITECTURE: &str = "compute_70";

    /// The first line of PTX made of this source.
    fn stamp() -> String {
        format!("// of kernels.cu {:08x} for {ARCHITECTURE}", checksum(SOURCE.as_bytes()))
    }

    /// The names of the kernels, in the order of the text.
    fn entries(ptx: &str) -> Vec<&str> {
        ptx.lines()
            .filter_map(|line| line.strip_prefix(".visible .entry ")?.strip_suffix('('))
            .collect()
    }

    #[test]
    fn the_source_compiles_and_the_embedded_kernels_are_of_it() {
        let names = [COPY_PIECES, TRANSFORM, CRC32C].map(|name| name.to_str().unwrap());
        match probe().nvrtc {
            Err(why) => skip("nvrtc", &why),
            Ok(()) => {
                let blesses = std::env::var_os("KVBM_BLESS").is_some();
                let ptx = match compile(SOURCE, ARCHITECTURE) {
                    // From CUDA 13 on there is nothing older than Turing.
                    Err(why) if !blesses && why.contains("invalid value") => {
                        compile(SOURCE, "compute_75").unwrap()
                    }
                    compiled => compiled.unwrap(),
                };
                let ptx = ptx.into_string().unwrap();
                assert_eq!(entries(&ptx), names);
                compile(crate::raw::BUSY, "compute_75").unwrap();
                if blesses {
                    let home = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/kernels.ptx");
                    return std::fs::write(home, format!("{}\n{ptx}", stamp())).unwrap();
                }
            }
        }
        assert_eq!(
            EMBEDDED.lines().next(),
            Some(&*stamp()),
            "kernels.ptx is not of this kernels.cu: see kernels.rs"
        );
        assert_eq!(entries(EMBEDDED), names);
    }

    #[test]
    fn a_driver_of_the_oldest_cuda_takes_the_embedded_kernels() {
        let version = EMBEDDED.lines().find_map(|line| line.strip_prefix(".version "));
        // PTX 8.1 came with CUDA 12.1.
        assert_eq!((version, super::super::MIN_DRIVER.to_string().as_str()), (Some("8.1"), "12.1"));
    }

    #[test]
    fn zeroes_have_the_checksum_that_the_kernel_leaves_out() {
        for bytes in [1, 4096, 5000] {
            assert_eq!(checksum_of_zeroes(bytes), checksum(&vec![0; bytes]));
        }
    }
}
