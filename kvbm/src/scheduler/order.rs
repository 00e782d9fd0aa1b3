//! One block on its way: the titles it travels with and the legs of its journey.

use std::sync::Arc;

use kvbm_tiers::{BlockKey, CopyOp, Frame, SlotRef};

use super::flow::Flow;
use crate::table::{Grip, RunId};

/// What kind of work a copy is; also its precedence, most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// An engine waits for these bytes.
    Load,
    /// An engine waits for its slots to be saved.
    Save,
    /// Copying down what is dirty.
    Flush,
    /// Nobody waits yet.
    Prefetch,
}

impl Class {
    /// All classes, most urgent first.
    pub const ALL: [Self; 4] = [Self::Load, Self::Save, Self::Flush, Self::Prefetch];

    /// Name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Save => "save",
            Self::Flush => "flush",
            Self::Prefetch => "prefetch",
        }
    }
}

/// A DRAM slot through which a block travels where no backend connects its source and destination.
#[derive(Debug)]
pub(super) enum Bounce {
    /// The source and the destination are connected.
    NotNeeded,
    /// A staging slot is taken when the order's turn comes.
    Wanted,
    /// Another flow brings the block into the host tier: it is copied on from there.
    Awaited,
    /// The block is in this slot, or on the way there.
    Held {
        frame: Frame,
        /// The slot belongs to the host tier, where the block stays.
        promotes: Option<(RunId, usize)>,
    },
}

/// The DRAM slots through which blocks bounce.
#[derive(Debug)]
pub(super) struct Staging {
    idle: Vec<Frame>,
    total: usize,
    /// Slots that overdue copies may still touch.
    lost: usize,
}

/// Occupancy of the staging slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingCounts {
    /// All.
    pub total: usize,
    /// Used by no copy.
    pub idle: usize,
    /// Held by copies that are overdue.
    pub lost: usize,
}

impl Staging {
    pub(super) const fn new(idle: Vec<Frame>) -> Self {
        Self { total: idle.len(), idle, lost: 0 }
    }

    pub(super) const fn counts(&self) -> StagingCounts {
        StagingCounts { total: self.total, idle: self.idle.len(), lost: self.lost }
    }

    /// Whether waiting for a slot is in vain: none will come back soon.
    pub(super) const fn is_gone(&self) -> bool {
        self.total == self.lost
    }

    pub(super) fn take(&mut self) -> Option<Frame> {
        self.idle.pop()
    }

    pub(super) fn give_back(&mut self, frame: Frame) {
        self.idle.push(frame);
    }

    /// The copy through a slot that was taken is overdue.
    pub(super) const fn lose(&mut self) {
        self.lost += 1;
    }

    /// It has ended after all.
    pub(super) fn regain(&mut self, frame: Frame) {
        self.lost -= 1;
        self.idle.push(frame);
    }
}

/// The order to copy one block. It owns the titles to every slot that the hardware may write.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) block: BlockKey,
    /// The source, pinned by the flow or by `source`.
    pub(super) from: SlotRef,
    pub(super) source: Option<Grip>,
    /// The title to the destination, which is entry `entry` of `run`.
    pub(super) to: Frame,
    pub(super) run: RunId,
    pub(super) entry: usize,
    pub(super) bounce: Bounce,
    /// The block has reached its bounce slot.
    pub(super) halfway: bool,
    pub(super) flow: Arc<Flow>,
}

impl Order {
    /// The next copy to make. The bounce slot must be held by now.
    pub(super) fn op(&self) -> CopyOp {
        let (from, to) = match &self.bounce {
            Bounce::Held { frame, .. } if self.halfway => (frame.slot_ref(), self.to.slot_ref()),
            Bounce::Held { frame, .. } => (self.from, frame.slot_ref()),
            _ => (self.from, self.to.slot_ref()),
        };
        CopyOp { block: self.block, from, to }
    }

    /// The tiers that the next copy connects.
    pub(super) fn route(&self) -> kvbm_tiers::Route {
        use kvbm_tiers::Tier::Host;
        match self.bounce {
            Bounce::NotNeeded => (self.from.tier, self.to.tier()),
            _ if self.halfway => (Host, self.to.tier()),
            _ => (self.from.tier, Host),
        }
    }

    /// Whether a copy would still be ahead after the present one.
    pub(super) const fn has_second_leg(&self) -> bool {
        !self.halfway && matches!(self.bounce, Bounce::Held { .. })
    }
}
