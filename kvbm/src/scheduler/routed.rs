//! A copy task on its way: one leg if a backend connects its tiers, else two with a stop in DRAM.

use std::sync::Arc;

use kvbm_tiers::{CopyOp, Frame, Route, SlotRef, Tier};

use super::engine_order::EngineOrder;
use crate::task::CopyTask;

/// Where a block stops between its two legs.
#[derive(Debug)]
pub(super) enum BounceStop {
    /// A staging slot is taken when the task's turn comes.
    Wanted,
    /// In this staging slot.
    Staging(Frame),
    /// In a slot of the host tier, where it stays.
    Kept(SlotRef),
}

/// A copy task and its route.
#[derive(Debug)]
pub(super) struct RoutedTask {
    pub(super) task: CopyTask,
    /// `None`: its source and its destination are connected.
    pub(super) stop: Option<BounceStop>,
    /// The block has reached the stop.
    pub(super) halfway: bool,
    /// The order to keep with the engine's work, if its memory is touched.
    pub(super) order: Option<Arc<EngineOrder>>,
}

impl RoutedTask {
    pub(super) fn new(task: CopyTask, is_direct: bool, order: Option<Arc<EngineOrder>>) -> Self {
        let through_dram = || task.via.map_or(BounceStop::Wanted, BounceStop::Kept);
        Self { task, stop: (!is_direct).then(through_dram), halfway: false, order }
    }

    /// The order that the next copy keeps. One that does not touch the engine's memory need not
    /// wait for it.
    pub(super) fn order(&self) -> Option<&Arc<EngineOrder>> {
        let (from, to) = self.route();
        self.order.as_ref().filter(|_| from == Tier::Device || to == Tier::Device)
    }

    /// The next copy to make. The staging slot must have been taken by now.
    pub(super) fn op(&self) -> CopyOp {
        let stop = match &self.stop {
            Some(BounceStop::Staging(frame)) => Some(frame.slot_ref()),
            Some(BounceStop::Kept(slot)) => Some(*slot),
            _ => None,
        };
        let CopyTask { block, parent, owner, from, to, .. } = self.task;
        match stop {
            None => CopyOp { block, parent, owner, from, to },
            Some(stop) if self.halfway => CopyOp { block, parent, owner, from: stop, to },
            Some(stop) => CopyOp { block, parent, owner, from, to: stop },
        }
    }

    /// The tiers that the next copy connects.
    pub(super) const fn route(&self) -> Route {
        let CopyTask { from, to, .. } = self.task;
        // A staging slot lies in the host's memory: to a backend both kinds of stop are the host
        // tier.
        match self.stop {
            None => (from.tier, to.tier),
            Some(_) if self.halfway => (Tier::Host, to.tier),
            Some(_) => (from.tier, Tier::Host),
        }
    }

    /// The slot on disk that the next copy reads or writes.
    pub(super) const fn slot_on_disk(&self) -> Option<SlotRef> {
        match self.route() {
            (Tier::Disk, _) => Some(self.task.from),
            (_, Tier::Disk) => Some(self.task.to),
            _ => None,
        }
    }

    /// Whether another copy follows the present one.
    pub(super) const fn has_second_leg(&self) -> bool {
        !self.halfway && self.stop.is_some()
    }

    pub(super) const fn has_staging(&self) -> bool {
        matches!(self.stop, Some(BounceStop::Staging(_)))
    }

    /// The staging slot, if it has one.
    pub(super) fn take_staging(&mut self) -> Option<Frame> {
        match self.stop.take() {
            Some(BounceStop::Staging(frame)) => Some(frame),
            other => {
                self.stop = other;
                None
            }
        }
    }
}
