//! Checksums of blocks on the GPU, for what never passes the CPU.

use cudarc::driver::result::DriverError;
use parking_lot::Mutex;

use super::driver::{CudaStream, DeviceMemory, Gpu, KernelTable, Pinned, failed};
use super::kernels::{ChecksumSummand, CopyKernels, checksum_of_zeroes};
use crate::copy::{CopyError, CopyErrorKind, SlotId};
use crate::error::SetupError;
use crate::memory::DeviceRegion;

/// Computes the [`checksum`](crate::checksum::checksum) of blocks in device memory. Callers wait
/// for theirs, each in a stream of its own.
#[derive(Debug)]
pub struct DeviceChecksum {
    gpu: Gpu,
    kernels: CopyKernels,
    idle: Mutex<Vec<ChecksumScratch>>,
}

/// What one computation needs.
#[derive(Debug)]
struct ChecksumScratch {
    stream: CudaStream,
    sums: BlockSummer,
}

/// Sums blocks of a region behind whatever else is in a stream.
#[derive(Debug)]
pub(super) struct BlockSummer {
    /// The pieces of the blocks.
    table: KernelTable<ChecksumSummand>,
    /// Where the GPU adds up the checksums of each block's pieces.
    sums: DeviceMemory,
    /// The same for the CPU to read.
    results: Pinned<u32>,
}

impl DeviceChecksum {
    /// Loads the kernels.
    ///
    /// # Errors
    /// `Unavailable`: the GPU does not take them.
    pub fn new(gpu: &Gpu) -> Result<Self, SetupError> {
        Ok(Self { gpu: gpu.clone(), kernels: CopyKernels::load(gpu)?, idle: Mutex::default() })
    }

    /// Makes what `callers` callers at a time need for blocks of `pieces` pieces, so that it is not
    /// made while an engine works.
    pub(crate) fn reserve(&self, callers: usize, pieces: usize) -> Result<(), SetupError> {
        let scratches = (0..callers)
            .map(|_| ChecksumScratch::new(&self.gpu, pieces))
            .collect::<Result<Vec<_>, _>>()?;
        self.idle.lock().extend(scratches);
        Ok(())
    }

    /// The checksum of the block in a slot, which nothing writes meanwhile; the region is in this
    /// GPU's memory.
    ///
    /// # Errors
    /// `Refused`: there is no such slot. `Io`: the GPU failed.
    pub fn of(&self, region: &DeviceRegion, slot: SlotId) -> Result<u32, CopyError> {
        let mut summands = Vec::new();
        add_pieces(&mut summands, region, slot, 0)?;
        let idle = self.idle.lock().pop();
        let mut scratch = idle
            .map_or_else(|| ChecksumScratch::new(&self.gpu, summands.len()), Ok)
            .map_err(|e| broken(&e))?;
        let sum =
            scratch.sum(&self.gpu, &self.kernels, &summands).map_err(|error| broken(&error))?;
        self.idle.lock().push(scratch);
        Ok(sum ^ checksum_of_zeroes(region.segments().block_bytes()))
    }
}

/// The pieces of the block in a slot, whose checksum is the `block`-th of those that are computed.
fn add_pieces(
    summands: &mut Vec<ChecksumSummand>,
    region: &DeviceRegion,
    slot: SlotId,
    block: usize,
) -> Result<(), CopyError> {
    let segments = region
        .segments()
        .segments(slot)
        .ok_or_else(|| CopyError::refused(format!("device slot {} does not exist", slot.0)))?;
    let mut after = region.segments().block_bytes();
    summands.extend(segments.map(|segment| {
        after -= segment.bytes;
        ChecksumSummand {
            address: segment.address as u64,
            bytes: segment.bytes as u64,
            after: after as u64,
            block: block as u32,
            unused: 0,
        }
    }));
    Ok(())
}

impl ChecksumScratch {
    fn new(gpu: &Gpu, pieces: usize) -> Result<Self, SetupError> {
        Ok(Self { stream: CudaStream::new(gpu)?, sums: BlockSummer::new(gpu, 1, pieces)? })
    }

    fn sum(
        &mut self,
        gpu: &Gpu,
        kernels: &CopyKernels,
        summands: &[ChecksumSummand],
    ) -> Result<u32, SetupError> {
        let gone = |error| failed("a checksum failed", error);
        let _entered = gpu.enter().map_err(gone)?;
        if self.sums.table.capacity() < summands.len() {
            self.sums.table = KernelTable::new(gpu, summands.len())?;
        }
        // SAFETY: the pieces are of a slot that nothing writes, and nothing else has this scratch
        // before the wait has ended.
        let started = unsafe { self.sums.start(&self.stream, kernels, summands, 1) };
        // Also if not all was started: what was uses the scratch.
        self.stream.wait_for_quiet().and(started).map_err(gone)?;
        let mut sum = [0];
        self.sums.results.copy_to(&mut sum);
        Ok(sum[0])
    }
}

impl BlockSummer {
    /// For `blocks` blocks of `pieces` pieces at a time.
    pub(super) fn new(gpu: &Gpu, blocks: usize, pieces: usize) -> Result<Self, SetupError> {
        let refused = |error| failed("no locked memory", error);
        Ok(Self {
            table: KernelTable::new(gpu, blocks * pieces)?,
            sums: DeviceMemory::new(gpu, blocks * size_of::<u32>())?,
            results: Pinned::new(gpu, blocks).map_err(refused)?,
        })
    }

    /// Starts summing the blocks in these slots, no more than it was made for. The context is current.
    ///
    /// # Errors
    /// `Refused`: there is no such slot. `Io`: the GPU failed.
    ///
    /// # Safety
    /// Nothing writes the slots before the stream has got past this, nor is the summer used or
    /// dropped.
    pub(super) unsafe fn start_slots(
        &mut self,
        stream: &CudaStream,
        kernels: &CopyKernels,
        region: &DeviceRegion,
        slots: impl Iterator<Item = SlotId>,
    ) -> Result<(), CopyError> {
        let (mut summands, mut blocks) = (Vec::new(), 0);
        for slot in slots {
            add_pieces(&mut summands, region, slot, blocks)?;
            blocks += 1;
        }
        // SAFETY: as the caller promises.
        let started = unsafe { self.start(stream, kernels, &summands, blocks) };
        started.map_err(|error| broken(&failed("a checksum failed", error)))
    }

    /// The checksums of the first blocks that were summed last. The stream has got past them.
    pub(super) fn sums(&self, region: &DeviceRegion, blocks: usize) -> Vec<u32> {
        let mut sums = vec![0; blocks];
        self.results.copy_to(&mut sums);
        let of_zeroes = checksum_of_zeroes(region.segments().block_bytes());
        sums.iter_mut().for_each(|sum| *sum ^= of_zeroes);
        sums
    }

    /// # Safety
    /// As for [`start_slots`](Self::start_slots), of these pieces.
    unsafe fn start(
        &mut self,
        stream: &CudaStream,
        kernels: &CopyKernels,
        summands: &[ChecksumSummand],
        blocks: usize,
    ) -> Result<(), DriverError> {
        let (bytes, count) = (blocks * size_of::<u32>(), summands.len());
        let longest = summands.iter().map(|summand| summand.bytes).max().unwrap_or(0) as usize;
        let (sums, results) = (self.sums.address, self.results.address());
        // SAFETY: table, sums and results are this summer's, which has room for as many blocks; else
        // as the caller promises.
        unsafe {
            stream
                .zero(&self.sums, bytes)
                .and_then(|()| self.table.fill(stream, summands))
                .and_then(|table| kernels.crc32c(stream, table, count, longest, sums))
                .and_then(|()| stream.copy(sums as usize, results as usize, bytes))
        }
    }
}

fn broken(error: &SetupError) -> CopyError {
    CopyError::caused(CopyErrorKind::Io, error.to_string(), error.clone())
}
