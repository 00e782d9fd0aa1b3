//! From the host tier of a process on the same host straight to a GPU.
//!
//! The GPU reads the other process's memory, which is mapped here, and sums what has arrived. The
//! CPU touches no byte of it, and the host tier here has no copy.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cudarc::driver::result::DriverError;
use memmap2::MmapRaw;
use parking_lot::Mutex;

use super::checksum::BlockSummer;
use super::crossing::{BlockCopier, BlockEnds, TO_GPU};
use super::driver::{CudaStream, Gpu, HostUse, KernelTable, LockedHost, ends_the_context, failed};
use super::kernels::CopyKernels;
use crate::backend::Fence;
use crate::copy::{CopyError, CopyErrorKind};
use crate::error::{SetupError, SetupErrorKind};
use crate::geometry::{Geometry, Piece};
use crate::memory::{DeviceRegion, Space};
use crate::peers::StraightBlock;

/// What is copied with one wait for the GPU.
const AT_ONCE_BYTES: usize = 16 << 20;
/// How often a driver is asked again that does not say whether copies have ended.
const ASK_AGAIN: Duration = Duration::from_millis(1);

/// Copies blocks of a neighbour's to an engine's memory on a GPU.
#[derive(Debug)]
pub(crate) struct NeighbourCopies {
    gpu: Gpu,
    device: Arc<DeviceRegion>,
    kernels: Arc<CopyKernels>,
    host: Arc<LockedHost>,
    /// The neighbour's first slot.
    base: usize,
    geometry: Geometry,
    at_once: usize,
    idle: Mutex<Vec<CopyScratch>>,
}

/// What one thread needs that copies.
struct CopyScratch {
    stream: CudaStream,
    copier: BlockCopier,
    pieces: KernelTable<Piece>,
    sums: BlockSummer,
}

impl std::fmt::Debug for CopyScratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CopyScratch").finish_non_exhaustive()
    }
}

impl NeighbourCopies {
    /// Locks the memory for the GPU that the region is on, which takes a second for some GiB.
    ///
    /// # Errors
    /// `Unavailable`: the GPU does not read memory that this process may not write, or cannot be
    /// used. `Invalid`: blocks differ in size, or the region is not on a GPU.
    ///
    /// # Safety
    /// From `base` on within the mapping, which is of whole pages, lie the slots of `geometry`.
    pub(crate) unsafe fn new(
        map: &Arc<MmapRaw>,
        base: usize,
        geometry: Geometry,
        device: &Arc<DeviceRegion>,
    ) -> Result<Self, SetupError> {
        let (ours, theirs) = (device.segments().block_bytes(), geometry.block_bytes());
        let Space::Cuda(ordinal) = device.space() else {
            return Err(SetupError::invalid(format!("{device:?} is not on a GPU")));
        };
        if ours != theirs {
            let message = format!("a neighbour's blocks of {theirs} bytes do not fit {device:?}");
            return Err(SetupError::invalid(message));
        }
        let gpu = Gpu::open(ordinal)?;
        let base = map.as_ptr().addr() + base;
        let addresses = base..base + geometry.bytes();
        // SAFETY: the slots are in the mapping, which is kept.
        let host = unsafe { LockedHost::lock(&gpu, addresses, HostUse::Read, Arc::clone(map)) };
        let host = host.map_err(|error| {
            let message = format!("{gpu:?} does not read a neighbour's memory: {error}");
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })?;
        let (kernels, host) = (Arc::new(CopyKernels::load(&gpu)?), Arc::new(host));
        let grain = BlockCopier::new(TO_GPU, &gpu, &host, device, &kernels).grain();
        let at_once = (AT_ONCE_BYTES / ours).clamp(1, grain);
        let (device, idle) = (Arc::clone(device), Mutex::default());
        Ok(Self { gpu, device, kernels, host, base, geometry, at_once, idle })
    }

    pub(crate) const fn device(&self) -> &Arc<DeviceRegion> {
        &self.device
    }

    /// Blocks that one call copies, at most.
    pub(crate) const fn at_once(&self) -> usize {
        self.at_once
    }

    /// Copies blocks, each from a slot of the neighbour's to one of the engine's, behind a fence, and
    /// returns the checksums of what arrived: any bytes, as the neighbour may write its slots
    /// meanwhile. It returns when nothing writes the engine's slots any more.
    ///
    /// # Errors
    /// `Refused`: too many blocks, a slot that does not exist, or a fence that a thread raises. `Io`:
    /// the GPU failed. Some slots may have been written.
    pub(crate) fn copy(
        &self,
        after: &Fence,
        blocks: &[StraightBlock],
    ) -> Result<Vec<u32>, CopyError> {
        if blocks.len() > self.at_once || matches!(after, Fence::Host(_)) && !after.is_done() {
            return Err(CopyError::refused("more blocks, or another fence, than a GPU takes"));
        }
        let ends = blocks.iter().map(|block| self.ends(*block)).collect::<Result<Vec<_>, _>>()?;
        let _entered = self.gpu.enter().map_err(failed_copy)?;
        let idle = self.idle.lock().pop();
        let scratch = idle.map_or_else(|| self.scratch(), Ok);
        let mut scratch = scratch
            .map_err(|error| CopyError::caused(CopyErrorKind::Io, error.to_string(), error))?;
        let started = self.start(&mut scratch, after, &ends);
        // Also if not all was started: what was may still write.
        wait(&scratch.stream).map_err(failed_copy)?;
        started?;
        let sums = scratch.sums.sums(&self.device, blocks.len());
        self.idle.lock().push(scratch);
        Ok(sums)
    }

    fn ends(&self, StraightBlock { from, to }: StraightBlock) -> Result<BlockEnds, CopyError> {
        let offset = self.geometry.offset(from);
        let offset = offset.filter(|_| to.0 < self.device.segments().slots());
        let offset = offset.ok_or_else(|| {
            CopyError::refused(format!("{from:?} of a neighbour, or {to:?} here, does not exist"))
        })?;
        Ok(BlockEnds { host: self.base + offset, slot: to, is_to_gpu: true })
    }

    fn scratch(&self) -> Result<CopyScratch, SetupError> {
        let copier = BlockCopier::new(TO_GPU, &self.gpu, &self.host, &self.device, &self.kernels);
        let parts = self.device.segments().parts().len();
        Ok(CopyScratch {
            stream: CudaStream::new(&self.gpu)?,
            pieces: copier.table()?,
            copier,
            sums: BlockSummer::new(&self.gpu, self.at_once, parts)?,
        })
    }

    fn start(
        &self,
        CopyScratch { stream, copier, pieces, sums }: &mut CopyScratch,
        after: &Fence,
        blocks: &[BlockEnds],
    ) -> Result<(), CopyError> {
        let slots = blocks.iter().map(|block| block.slot);
        // SAFETY: the event is as the fence's maker promised, and lives as long as the fence. The
        // slots were looked at; the engine's are the caller's, and the scratch is this call's, until
        // the stream has got past.
        unsafe {
            if let Fence::Event(event) = after {
                stream.wait_for(event.handle()).map_err(failed_copy)?;
            }
            copier.copy(stream, blocks, pieces).map_err(failed_copy)?;
            sums.start_slots(stream, &self.kernels, &self.device, slots)
        }
    }
}

/// Until nothing that was started is under way: an error that does not end the context says nothing
/// of that.
fn wait(stream: &CudaStream) -> Result<(), DriverError> {
    let mut is_told = false;
    loop {
        match stream.wait() {
            Err(error) if !ends_the_context(error) => {
                if !std::mem::replace(&mut is_told, true) {
                    tracing::warn!(%error, "the driver does not say whether copies have ended: asking again");
                }
                thread::sleep(ASK_AGAIN);
            }
            ended => return ended,
        }
    }
}

fn failed_copy(error: DriverError) -> CopyError {
    let message = failed("a copy from a neighbour failed", error).to_string();
    CopyError::caused(CopyErrorKind::Io, message, error)
}
