//! From the host tier of a process on the same host straight to a GPU.
//!
//! The GPU reads the other process's memory, which is mapped here, and sums what has arrived. The
//! CPU touches no byte of it, and the host tier here has no copy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, Sender};
use cudarc::driver::result::DriverError;
use memmap2::MmapRaw;

use super::checksum::BlockSummer;
use super::crossing::{BlockCopier, BlockEnds, TO_GPU};
use super::driver::{CudaStream, Gpu, HostUse, KernelTable, LockedHost, failed};
use super::kernels::CopyKernels;
use crate::backend::Fence;
use crate::copy::{CopyError, CopyErrorKind};
use crate::error::{SetupError, SetupErrorKind};
use crate::geometry::{Geometry, Piece};
use crate::memory::{DeviceRegion, Space};
use crate::peers::StraightBlock;

/// What is copied with one wait for the GPU.
const AT_ONCE_BYTES: usize = 16 << 20;
/// Threads that copy at a time: while one copies, another's blocks are summed.
const THREADS: usize = 2;

/// Copies blocks of a neighbour's to an engine's memory on a GPU.
#[derive(Debug)]
pub(crate) struct NeighbourCopies {
    gpu: Gpu,
    device: Arc<DeviceRegion>,
    /// The neighbour's first slot.
    base: usize,
    geometry: Geometry,
    at_once: usize,
    /// Made at the start: an engine leaves little of a GPU's memory, and to allocate while it works
    /// takes locks of the driver's.
    idle: (Sender<CopyScratch>, Receiver<CopyScratch>),
    /// The GPU failed.
    is_broken: AtomicBool,
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
        let copier = || BlockCopier::new(TO_GPU, &gpu, &host, device, &kernels);
        let at_once = (AT_ONCE_BYTES / ours).clamp(1, copier().grain());
        let idle = crossbeam_channel::bounded(THREADS);
        for _ in 0..THREADS {
            // It has room for all.
            let _ = idle.0.send(CopyScratch::new(&gpu, copier(), at_once, device)?);
        }
        let (device, is_broken) = (Arc::clone(device), AtomicBool::new(false));
        Ok(Self { gpu, device, base, geometry, at_once, idle, is_broken })
    }

    /// It failed once: other ways are better.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    /// Whether the engine's slots may be written.
    ///
    /// # Errors
    /// `Io`: the GPU does not say.
    pub(crate) fn is_ready(&self, after: &Fence) -> Result<bool, CopyError> {
        let Fence::Event(event) = after else { return Ok(after.is_done()) };
        // SAFETY: the event is as the fence's maker promised, and lives as long as the fence.
        let passed = unsafe { self.gpu.event_has_passed(event.handle()) };
        passed.map_err(failed_copy)
    }

    pub(crate) const fn device(&self) -> &Arc<DeviceRegion> {
        &self.device
    }

    /// Blocks that one call copies, at most.
    pub(crate) const fn at_once(&self) -> usize {
        self.at_once
    }

    /// Copies blocks, each from a slot of the neighbour's to one of the engine's, and returns the
    /// checksums of what arrived: any bytes, as the neighbour may write its slots meanwhile. It
    /// returns when nothing writes the engine's slots any more.
    ///
    /// # Errors
    /// `Refused`: too many blocks, or a slot that does not exist. `Io`: the GPU failed. Some slots may
    /// have been written.
    pub(crate) fn copy(&self, blocks: &[StraightBlock]) -> Result<Vec<u32>, CopyError> {
        if blocks.len() > self.at_once {
            return Err(CopyError::refused("more blocks than are copied at once"));
        }
        let ends = blocks.iter().map(|block| self.ends(*block)).collect::<Result<Vec<_>, _>>()?;
        let _entered = self.gpu.enter().map_err(failed_copy)?;
        let (give_back, idle) = &self.idle;
        let Ok(mut scratch) = idle.recv() else {
            return Err(CopyError::refused("nothing copies any more"));
        };
        let started = self.start(&mut scratch, &ends);
        // Also if not all was started: what was may still write.
        let ended = scratch.stream.wait_for_quiet().map_err(failed_copy);
        let sums = ended.and(started).map(|()| scratch.sums.sums(&self.device, blocks.len()));
        if sums.is_err() {
            self.is_broken.store(true, Ordering::Relaxed);
        }
        // It has room for all.
        let _ = give_back.send(scratch);
        sums
    }

    fn ends(&self, StraightBlock { from, to }: StraightBlock) -> Result<BlockEnds, CopyError> {
        let offset = self.geometry.offset(from);
        let offset = offset.filter(|_| to.0 < self.device.segments().slots());
        let offset = offset.ok_or_else(|| {
            CopyError::refused(format!("{from:?} of a neighbour, or {to:?} here, does not exist"))
        })?;
        Ok(BlockEnds { host: self.base + offset, slot: to, is_to_gpu: true })
    }

    fn start(
        &self,
        CopyScratch { stream, copier, pieces, sums }: &mut CopyScratch,
        blocks: &[BlockEnds],
    ) -> Result<(), CopyError> {
        let slots = blocks.iter().map(|block| block.slot);
        // SAFETY: the slots were looked at; the engine's are the caller's, and the scratch is this
        // call's, until the stream has got past.
        unsafe {
            copier.copy(stream, blocks, pieces).map_err(failed_copy)?;
            sums.start_slots(stream, &copier.kernels, &self.device, slots)
        }
    }
}

impl CopyScratch {
    fn new(
        gpu: &Gpu,
        copier: BlockCopier,
        blocks: usize,
        device: &DeviceRegion,
    ) -> Result<Self, SetupError> {
        Ok(Self {
            stream: CudaStream::new(gpu)?,
            pieces: copier.table()?,
            copier,
            sums: BlockSummer::new(gpu, blocks, device.segments().parts().len())?,
        })
    }
}

fn failed_copy(error: DriverError) -> CopyError {
    let message = failed("a copy from a neighbour failed", error).to_string();
    CopyError::caused(CopyErrorKind::Io, message, error)
}
