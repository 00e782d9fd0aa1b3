//! The bytes of blocks on a GPU, for those who look at them one by one: demonstrations, tests, an
//! engine without kernels.

use std::sync::Arc;

use parking_lot::Mutex;

use super::driver::{CudaStream, Gpu, Pinned, failed};
use crate::copy::{CopyError, CopyErrorKind, SlotId};
use crate::error::SetupError;
use crate::frame::{Frame, Loan, PoolId};
use crate::geometry::{Segment, pieces};
use crate::memory::{DeviceRegion, Space};

/// Copies single blocks out of and into a GPU's memory, one at a time, and waits for it.
#[derive(Debug)]
pub struct DeviceWindow {
    region: Arc<DeviceRegion>,
    scratch: Mutex<WindowScratch>,
}

type WindowScratch = (CudaStream, Pinned<u8>);

/// Which way a block goes.
#[derive(Clone, Copy)]
enum WindowDirection {
    Out,
    In,
}

impl DeviceWindow {
    /// On `region`, which is in this GPU's memory.
    ///
    /// # Errors
    /// `Invalid`: the region is elsewhere. `Unavailable`: the GPU gives no stream or no locked
    /// memory.
    pub fn new(gpu: &Gpu, region: Arc<DeviceRegion>) -> Result<Self, SetupError> {
        if region.space() != Space::Cuda(gpu.ordinal()) {
            let message = format!("{region:?} is not in the memory of {gpu:?}");
            return Err(SetupError::invalid(message));
        }
        let stream = CudaStream::new(gpu)?;
        let buffer = Pinned::new(gpu, region.segments().block_bytes());
        let buffer = buffer.map_err(|error| failed("no locked memory", error))?;
        Ok(Self { region, scratch: Mutex::new((stream, buffer)) })
    }

    /// The block in a slot that its pool lent; `None`: the loan is not of this region's pool.
    ///
    /// # Errors
    /// `Io`: the GPU failed.
    pub fn read(&self, loan: &Loan) -> Option<Result<Vec<u8>, CopyError>> {
        let slot = self.own(loan.pool(), loan.slot())?;
        let mut scratch = self.scratch.lock();
        let mut block = vec![0; self.block_bytes()];
        let crossed = self.cross(&mut scratch, slot, WindowDirection::Out);
        Some(crossed.map(|()| {
            scratch.1.copy_to(&mut block);
            block
        }))
    }

    /// Overwrites the block in the frame's slot; `None` as for [`read`](Self::read).
    ///
    /// # Errors
    /// `Refused`: the block is not of the region's size. `Io`: the GPU failed.
    pub fn write(&self, frame: &mut Frame, block: &[u8]) -> Option<Result<(), CopyError>> {
        let slot = self.own(frame.pool(), frame.slot())?;
        if block.len() != self.block_bytes() {
            let message =
                format!("a block of {} bytes does not fit {:?}", block.len(), self.region);
            return Some(Err(CopyError::refused(message)));
        }
        let mut scratch = self.scratch.lock();
        scratch.1.write(block);
        Some(self.cross(&mut scratch, slot, WindowDirection::In))
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.region.segments().block_bytes()
    }

    fn own(&self, pool: PoolId, slot: SlotId) -> Option<SlotId> {
        self.region.owns(pool).then_some(slot)
    }

    /// Copies between the slot and the buffer. The caller holds a slot handle that allows it.
    fn cross(
        &self,
        scratch: &mut WindowScratch,
        slot: SlotId,
        direction: WindowDirection,
    ) -> Result<(), CopyError> {
        let refused = || CopyError::refused(format!("device slot {} does not exist", slot.0));
        let device = self.region.segments().segments(slot).ok_or_else(refused)?;
        let (stream, buffer) = scratch;
        let ours = std::iter::once(Segment {
            address: buffer.address() as usize,
            bytes: self.block_bytes(),
        });
        let copied = stream.gpu().inside(|| {
            pieces(device, ours).try_for_each(|piece| {
                let (from, to) = match direction {
                    WindowDirection::Out => (piece.from, piece.to),
                    WindowDirection::In => (piece.to, piece.from),
                };
                // SAFETY: the scratch is the caller's until the wait below has ended, and so is the
                // slot.
                unsafe { stream.copy(from, to, piece.bytes) }
            })
        });
        // Also after an error: copies that were started before it must end.
        let copied = stream.gpu().inside(|| stream.wait()).and(copied);
        copied.map_err(|error| {
            CopyError::caused(CopyErrorKind::Io, format!("CUDA: a copy failed: {error}"), error)
        })
    }
}
