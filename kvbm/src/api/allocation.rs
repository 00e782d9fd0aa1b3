//! Device slots that an engine fills, their bytes for engines that write or read them on the CPU,
//! and slots lent for reading.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kvbm_tiers::{DramRegion, Frame, Loan, SlotId, Tier};

use crate::api::lease::Lease;
use crate::api::transfer::{Transfer, Transferred};
use crate::error::{Error, Result};
use crate::names::hash::Chain;
use crate::scheduler::Core;
use crate::table::Reserved;

/// Device slots that an engine fills, block by block, before it publishes them.
#[must_use = "dropping an allocation gives its slots back"]
pub struct Allocation {
    pub(super) core: Arc<Core>,
    pub(super) device: Option<Arc<dyn Device>>,
    /// `None` once it is published.
    pub(super) slots: Option<(Reserved, Lease)>,
    /// Which of the blocks are filled.
    pub(super) filled: Vec<bool>,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation").field("blocks", &self.blocks()).finish_non_exhaustive()
    }
}

impl Allocation {
    /// Positions in the chain of the blocks to fill.
    pub fn blocks(&self) -> Range<usize> {
        let before = self.reserved(|reserved| reserved.before);
        before..before + self.filled.len()
    }

    /// Blocks before these that another request is filling or loading.
    pub fn in_flight(&self) -> usize {
        self.reserved(|reserved| reserved.in_flight)
    }

    /// Blocks at the end of the chain that found no room.
    pub fn refused(&self) -> usize {
        self.reserved(|reserved| reserved.refused)
    }

    fn reserved(&self, count: impl Fn(&Reserved) -> usize) -> usize {
        self.slots.as_ref().map_or(0, |(reserved, _)| count(reserved))
    }

    /// The device slot for block `position`: for engines that write it themselves, and for ranks.
    /// `None`: it is not among [`blocks`](Self::blocks).
    pub fn slot(&self, position: usize) -> Option<SlotId> {
        let place = position.checked_sub(self.blocks().start)?;
        let (reserved, _) = self.slots.as_ref()?;
        reserved.frames.get(place).map(Frame::slot)
    }

    /// Lets `fill` write block `position` into its slot. False: it is not among
    /// [`blocks`](Self::blocks), or the GPU failed. With ranks always:
    /// [`Rank::fill_device`](crate::Rank::fill_device) writes their slices, and
    /// [`mark_filled`](Self::mark_filled) says so.
    pub fn fill(&mut self, position: usize, mut fill: impl FnMut(&mut [u8])) -> bool {
        let place = position.checked_sub(self.blocks().start);
        let reserved = self.slots.as_mut().map(|(reserved, _)| reserved);
        let frame =
            place.zip(reserved).and_then(|(place, reserved)| reserved.frames.get_mut(place));
        let (Some(place), Some(frame), Some(device)) = (place, frame, &self.device) else {
            return false;
        };
        self.filled[place] = device.fill(frame, &mut fill);
        self.filled[place]
    }

    /// Says that the engine has written block `position` into its slot itself. False: it is not
    /// among [`blocks`](Self::blocks).
    pub fn mark_filled(&mut self, position: usize) -> bool {
        let place = position.checked_sub(self.blocks().start);
        let filled = place.and_then(|place| self.filled.get_mut(place));
        filled.map(|filled| *filled = true).is_some()
    }

    /// Makes the filled blocks resident, up to the first gap in the chain; the slots of the others
    /// are given back. The answer's lease holds the chain on the device.
    ///
    /// # Errors
    /// Never for an allocation of [`Manager::allocate`](crate::Manager::allocate); the type forbids
    /// using one twice.
    pub fn publish(mut self) -> Result<Transfer<Transferred>> {
        let slots = self.slots.take();
        let (reserved, lease) =
            slots.ok_or_else(|| Error::invalid("this allocation was published before"))?;
        let filled = self.filled.iter().take_while(|&&filled| filled).count();
        Ok(self.core.publish(reserved, filled, lease))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some((reserved, _)) = self.slots.take() {
            self.core.abandon(reserved);
        }
    }
}

/// Access to the device tier's blocks, for any kind of memory.
pub(crate) trait Device: Send + Sync + fmt::Debug {
    /// Whose memory it is, for reports.
    fn name(&self) -> &'static str;

    /// Lets `fill` write a block into the frame's slot. False: the slot is not of this device, or
    /// it failed.
    fn fill(&self, frame: &mut Frame, fill: &mut dyn FnMut(&mut [u8])) -> bool;

    /// Shows `read` the block in a lent slot. False as for [`fill`](Self::fill).
    fn read(&self, loan: &Loan, read: &mut dyn FnMut(&[u8])) -> bool;
}

/// The emulated device is host memory.
impl Device for Arc<DramRegion> {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn fill(&self, frame: &mut Frame, fill: &mut dyn FnMut(&mut [u8])) -> bool {
        self.write(frame).map(fill).is_some()
    }

    fn read(&self, loan: &Loan, read: &mut dyn FnMut(&[u8])) -> bool {
        self.read_loan(loan).map(read).is_some()
    }
}

/// A GPU's blocks are copied to host memory, one by one.
#[cfg(feature = "cuda")]
impl Device for kvbm_tiers::cuda::DeviceWindow {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn fill(&self, frame: &mut Frame, fill: &mut dyn FnMut(&mut [u8])) -> bool {
        let mut block = vec![0; self.block_bytes()];
        fill(&mut block);
        self.write(frame, &block).is_some_and(|written| noted(written).is_some())
    }

    fn read(&self, loan: &Loan, read: &mut dyn FnMut(&[u8])) -> bool {
        Self::read(self, loan).and_then(noted).map(|block| read(&block)).is_some()
    }
}

/// Slots of resident blocks, lent for reading, and given back even if the reader panics. The blocks
/// stay where they are meanwhile.
pub(crate) struct LentSlot<'a> {
    core: &'a Core,
    tier: Tier,
    loans: Vec<Loan>,
}

impl<'a> LentSlot<'a> {
    /// The blocks of a chain at `positions`, up to the first that `tier` does not hold; none if the
    /// lease is from before a reset.
    pub(crate) fn leading(
        core: &'a Core,
        tier: Tier,
        lease: &Lease,
        chain: Chain<'_>,
        positions: Range<usize>,
    ) -> Self {
        Self { core, tier, loans: core.lend(tier, lease, chain, positions) }
    }

    /// What opens the slots.
    pub(crate) fn loans(&self) -> &[Loan] {
        &self.loans
    }
}

impl Drop for LentSlot<'_> {
    fn drop(&mut self) {
        if self.loans.is_empty() {
            return;
        }
        let mut table = self.core.table();
        self.loans.drain(..).for_each(|loan| table.return_loan(self.tier, loan));
    }
}

#[cfg(feature = "cuda")]
fn noted<T>(result: Result<T, kvbm_tiers::CopyError>) -> Option<T> {
    result
        .inspect_err(|error| tracing::warn!(%error, "a block on the device cannot be looked at"))
        .ok()
}
