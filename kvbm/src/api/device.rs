//! The device tier's bytes, for engines that write or read them on the CPU; and slots lent for
//! reading.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kvbm_tiers::{DramRegion, Frame, Loan, Tier};

use crate::api::lease::Lease;
use crate::names::hash::Chain;
use crate::scheduler::Core;

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
