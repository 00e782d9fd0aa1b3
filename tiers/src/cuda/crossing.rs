//! How blocks cross between locked host memory and a GPU: as rows, in one call for many pieces, or by
//! a kernel.

use std::sync::Arc;

use cudarc::driver::result::DriverError;

use super::driver::{CudaStream, Gpu, KernelTable, LockedHost, PitchedAddress};
use super::kernels::CopyKernels;
use super::rows::{PitchedRows, rows};
use crate::copy::SlotId;
use crate::error::SetupError;
use crate::geometry::{Piece, Segment, pieces};
use crate::memory::DeviceRegion;

/// How pieces that are no rows cross in one direction. Measured on an H100 (docs/gpu.md): copy
/// engines cost the engine's kernels nothing, but need a moment for each piece; our kernel does
/// not, but takes room from the engine's, and what writes to the host at full speed keeps all else
/// from the GPU's memory, more so the more of it is under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyPath {
    /// Pieces smaller than this on average are copied by the kernel, where one call starts many
    /// copies.
    small: usize,
    /// Groups of threads that copy: the fewest that fill the link.
    groups: u32,
}

pub(super) const TO_GPU: CopyPath = CopyPath { small: 32 << 10, groups: 4 };
pub(super) const FROM_GPU: CopyPath = CopyPath { small: 16 << 10, groups: 2 };
/// As `CopyPath::small`, where each copy takes a call of its own: in its microseconds a link moves
/// about this much.
const SMALL_ALONE: usize = 256 << 10;
/// From this many pieces on, one call for all is worth its preparation.
const MANY_PIECES: usize = 4;
/// Pieces that one launch of the kernel takes, unless a single block has more.
const TABLE_PIECES: usize = 4096;

/// Where a block crosses.
#[derive(Clone, Copy)]
pub(super) struct BlockEnds {
    /// Its address in host memory.
    pub(super) host: usize,
    /// Its slot on the GPU.
    pub(super) slot: SlotId,
    pub(super) is_to_gpu: bool,
}

/// The arguments of a call that starts many copies.
#[derive(Default)]
struct BatchedCall {
    from: Vec<u64>,
    to: Vec<u64>,
    bytes: Vec<usize>,
}

/// Starts copies of blocks in one direction.
pub(super) struct BlockCopier {
    way: CopyPath,
    gpu: Gpu,
    host: Arc<LockedHost>,
    device: Arc<DeviceRegion>,
    pub(super) kernels: Arc<CopyKernels>,
    /// The pieces of a block, if they are rows.
    rows: Vec<PitchedRows>,
    /// Of the blocks that are being started.
    pieces: Vec<Piece>,
    call: BatchedCall,
}

impl BlockCopier {
    pub(super) fn new(
        way: CopyPath,
        gpu: &Gpu,
        host: &Arc<LockedHost>,
        device: &Arc<DeviceRegion>,
        kernels: &Arc<CopyKernels>,
    ) -> Self {
        Self {
            way,
            gpu: gpu.clone(),
            host: Arc::clone(host),
            device: Arc::clone(device),
            kernels: Arc::clone(kernels),
            rows: rows(device.segments(), |address| gpu.allocation_of(address)),
            pieces: Vec::new(),
            call: BatchedCall::default(),
        }
    }

    /// Blocks that are copied at once, at most.
    pub(super) fn grain(&self) -> usize {
        (TABLE_PIECES / self.parts()).max(1)
    }

    fn parts(&self) -> usize {
        self.device.segments().parts().len()
    }

    /// What a copy needs for as long as it runs.
    pub(super) fn table(&self) -> Result<KernelTable<Piece>, SetupError> {
        KernelTable::new(&self.gpu, TABLE_PIECES.max(self.parts()))
    }

    /// Starts the copies of blocks, all in one direction, no more than a [grain](Self::grain) of them.
    /// The context is current.
    ///
    /// # Safety
    /// The slots exist, and are the caller's until the stream has got past it; so is the table.
    pub(super) unsafe fn copy(
        &mut self,
        stream: &CudaStream,
        blocks: &[BlockEnds],
        table: &mut KernelTable<Piece>,
    ) -> Result<(), DriverError> {
        if !self.rows.is_empty() {
            match self.copy_rows(stream, blocks) {
                Err(error) if is_refusal(error) => {
                    let gpu = &self.gpu;
                    tracing::warn!(%error, ?gpu, "the driver does not copy blocks as rows: they go by pieces from now on");
                    self.rows.clear();
                }
                outcome => return outcome,
            }
        }
        self.cut(blocks);
        self.copy_pieces(stream, table)
    }

    fn copy_rows(&self, stream: &CudaStream, blocks: &[BlockEnds]) -> Result<(), DriverError> {
        for &BlockEnds { host, slot, is_to_gpu } in blocks {
            for rows in &self.rows {
                let here = PitchedAddress { address: host + rows.offset, pitch: rows.step };
                let there = PitchedAddress { address: rows.address(slot), pitch: rows.pitch };
                let (from, to) = if is_to_gpu { (here, there) } else { (there, here) };
                // SAFETY: pieces of blocks whose slots are the caller's until the stream has got past.
                unsafe { stream.copy_rows(from, to, rows.bytes, rows.count) }?;
            }
        }
        Ok(())
    }

    /// Cuts the blocks into pieces.
    fn cut(&mut self, blocks: &[BlockEnds]) {
        self.pieces.clear();
        let segments = self.device.segments();
        for &BlockEnds { host, slot, is_to_gpu } in blocks {
            let here = std::iter::once(Segment { address: host, bytes: segments.block_bytes() });
            let there = segments.segments(slot).into_iter().flatten();
            if is_to_gpu {
                self.pieces.extend(pieces(here, there));
            } else {
                self.pieces.extend(pieces(there, here));
            }
        }
    }

    fn copy_pieces(
        &mut self,
        stream: &CudaStream,
        table: &mut KernelTable<Piece>,
    ) -> Result<(), DriverError> {
        let bytes: usize = self.pieces.iter().map(|piece| piece.bytes).sum();
        let batches = self.gpu.copies_batches();
        let small = if batches { self.way.small } else { SMALL_ALONE };
        if self.pieces.len() >= MANY_PIECES && bytes / self.pieces.len() < small {
            return self.copy_by_kernel(stream, table);
        }
        if self.pieces.len() >= MANY_PIECES && batches {
            return self.copy_in_one_call(stream);
        }
        let copy = |piece: &Piece| {
            // SAFETY: pieces of blocks whose slots are the caller's until the stream has got past.
            unsafe { stream.copy(piece.from, piece.to, piece.bytes) }
        };
        self.pieces.iter().try_for_each(copy)
    }

    fn copy_in_one_call(&mut self, stream: &CudaStream) -> Result<(), DriverError> {
        let BatchedCall { from, to, bytes } = &mut self.call;
        from.clear();
        to.clear();
        bytes.clear();
        for piece in &self.pieces {
            from.push(piece.from as u64);
            to.push(piece.to as u64);
            bytes.push(piece.bytes);
        }
        // SAFETY: as in `copy`; the driver copies batches.
        unsafe { stream.copy_all(from, to, bytes) }
    }

    fn copy_by_kernel(
        &mut self,
        stream: &CudaStream,
        table: &mut KernelTable<Piece>,
    ) -> Result<(), DriverError> {
        for piece in &mut self.pieces {
            piece.from = self.host.mapped(piece.from);
            piece.to = self.host.mapped(piece.to);
        }
        // SAFETY: as in `copy`; nothing else has the table meanwhile.
        unsafe {
            let pieces = table.fill(stream, &self.pieces)?;
            self.kernels.copy_pieces(stream, pieces, self.pieces.len(), self.way.groups)
        }
    }
}

/// Whether it would be the same next time.
fn is_refusal(error: DriverError) -> bool {
    use cudarc::driver::sys::CUresult;
    matches!(error.0, CUresult::CUDA_ERROR_INVALID_VALUE | CUresult::CUDA_ERROR_NOT_SUPPORTED)
}
