//! Checksums of blocks on the GPU, for what never passes the CPU.

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
    /// The pieces of the block.
    table: KernelTable<ChecksumSummand>,
    /// Where the GPU adds up the checksums of the pieces.
    sum: DeviceMemory,
    /// The same for the CPU to read.
    result: Pinned<u32>,
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
        let segments = region
            .segments()
            .segments(slot)
            .ok_or_else(|| CopyError::refused(format!("device slot {} does not exist", slot.0)))?;
        let mut after = region.segments().block_bytes();
        let summands = segments.map(|segment| {
            after -= segment.bytes;
            ChecksumSummand {
                address: segment.address as u64,
                bytes: segment.bytes as u64,
                after: after as u64,
                block: 0,
                unused: 0,
            }
        });
        let summands: Vec<_> = summands.collect();
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

impl ChecksumScratch {
    fn new(gpu: &Gpu, pieces: usize) -> Result<Self, SetupError> {
        let refused = |error| failed("no locked memory", error);
        Ok(Self {
            stream: CudaStream::new(gpu)?,
            table: KernelTable::new(gpu, pieces)?,
            sum: DeviceMemory::new(gpu, size_of::<u32>())?,
            result: Pinned::new(gpu, 1).map_err(refused)?,
        })
    }

    fn sum(
        &mut self,
        gpu: &Gpu,
        kernels: &CopyKernels,
        summands: &[ChecksumSummand],
    ) -> Result<u32, SetupError> {
        let gone = |error| failed("a checksum failed", error);
        let _entered = gpu.enter().map_err(gone)?;
        if self.table.capacity() < summands.len() {
            self.table = KernelTable::new(gpu, summands.len())?;
        }
        self.result.write(&[0]);
        let longest = summands.iter().map(|summand| summand.bytes).max().unwrap_or(0) as usize;
        let (stream, bytes, count) = (&self.stream, size_of::<u32>(), summands.len());
        // SAFETY: table, sum and result are this scratch's, which nothing else has before the wait has
        // ended. The pieces are of a slot that nothing writes.
        let summed = unsafe {
            stream
                .zero(&self.sum, bytes)
                .and_then(|()| self.table.fill(stream, summands))
                .and_then(|table| kernels.crc32c(stream, table, count, longest, self.sum.address))
                .and_then(|()| {
                    stream.copy(self.sum.address as usize, self.result.address() as usize, bytes)
                })
                .and_then(|()| stream.wait())
        };
        summed.map_err(gone)?;
        let mut sum = [0];
        self.result.copy_to(&mut sum);
        Ok(sum[0])
    }
}

fn broken(error: &SetupError) -> CopyError {
    CopyError::caused(CopyErrorKind::Io, error.to_string(), error.clone())
}
