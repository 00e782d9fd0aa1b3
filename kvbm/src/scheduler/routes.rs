//! Routes: which backend serves which, and a copy task on its way: one leg if a backend connects its
//! tiers, else two with a stop in DRAM.

use std::sync::Arc;

use kvbm_tiers::backend::submit;
use kvbm_tiers::{Backend, CopyOp, Done, Fences, Frame, Route, SlotRef, Tier};

use super::engine::EngineOrder;
use crate::task::CopyTask;

/// At most one backend per route, fixed at start-up.
#[derive(Clone, Debug, Default)]
pub struct Executor {
    routes: [[Option<Arc<dyn Backend>>; Tier::COUNT]; Tier::COUNT],
}

impl Executor {
    /// Lets `backend` serve those of its routes that no other backend serves yet.
    pub fn add(&mut self, backend: &Arc<dyn Backend>) {
        for &(from, to) in backend.routes() {
            self.routes[from.index()][to.index()].get_or_insert_with(|| Arc::clone(backend));
        }
    }

    /// The backend of a route.
    pub fn backend(&self, (from, to): Route) -> Option<&Arc<dyn Backend>> {
        self.routes[from.index()][to.index()].as_ref()
    }

    /// Whether a backend serves this route, so that blocks need not bounce.
    pub fn connects(&self, route: Route) -> bool {
        self.backend(route).is_some()
    }

    /// The routes that a block takes from one tier to another.
    pub(super) fn legs(&self, (from, to): Route) -> impl Iterator<Item = Route> + use<> {
        let legs = if self.connects((from, to)) {
            [Some((from, to)), None]
        } else {
            [Some((from, Tier::Host)), Some((Tier::Host, to))]
        };
        legs.into_iter().flatten()
    }

    /// Starts a batch whose operations share `route`, in this order with the engine's work.
    pub(super) fn submit(&self, route: Route, batch: Vec<CopyOp>, fences: Fences, done: &Done) {
        if let Some(backend) = self.backend(route) {
            return submit(backend, batch, fences, done.clone());
        }
        // Answers anyway: a task that is never completed would hold its slots for ever.
        done.refuse(0..batch.len(), &format!("no backend copies {} to {}", route.0, route.1));
    }
}

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
