//! How a transfer is planned and sent: which blocks may go now.

use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::{Route, SlotRef, Tier};

use super::breaker::RoutePassage;
use super::engine::EngineOrder;
use super::{Core, spans};
use crate::api::lease::Lease;
use crate::api::transfer::{Transfer, Transferred};
use crate::error::Error;
use crate::sync::MutexGuard;
use crate::table::{Reply, TierSet, TransferPlan};
use crate::task::{Class, TransferId};

/// The turn to plan a transfer.
#[must_use]
pub(super) struct PlanningTurn<'a> {
    /// When it came: the wait for it is no part of a tier's pace.
    started: Duration,
    _others_wait: MutexGuard<'a, ()>,
}

impl Core {
    /// Makes the leading blocks of a leased chain resident in `to`: as many as the lease holds
    /// anywhere, as far as there is room.
    ///
    /// The answer is an error of kind [`Invalid`](crate::ErrorKind::Invalid) for a lease of another
    /// manager, of kind [`Stale`](crate::ErrorKind::Stale) for one from before a reset, and of kind
    /// [`Closed`](crate::ErrorKind::Closed) after [`close`](Self::close).
    pub fn transfer(
        self: &Arc<Self>,
        class: Class,
        to: Tier,
        lease: Lease,
    ) -> Transfer<Transferred> {
        if let Err(error) = self.check_lease(&lease) {
            return Transfer::failed(error);
        }
        if self.is_closed() {
            return Transfer::failed(Error::closed());
        }
        let (reply, transfer) = Transfer::replied(&self.table, Transferred::new);
        let span = spans::of_transfer(class, to, lease.pins().context().info.request);
        let turn = self.turn_to_plan();
        let mut plan = TransferPlan::copying(class, to, lease.into_pins());
        // Locked anew for each step: a chain may have thousands of blocks.
        while !self.table().trace(&mut plan) {}
        self.send(class, to, &mut plan, None);
        let id = plan.transfer();
        self.spans.open(id, span);
        self.hand_over(plan, reply, turn);
        self.cancellable(transfer, id)
    }

    pub(super) fn turn_to_plan(&self) -> PlanningTurn<'_> {
        let turn = self.planning.lock();
        PlanningTurn { started: self.clock.uptime(), _others_wait: turn }
    }

    /// Ends a transfer early: blocks that have not arrived do not come.
    pub(super) fn end_early(self: &Arc<Self>, id: TransferId) {
        let effects = self.table().cancel(id);
        self.apply(effects);
    }

    /// Sends those copies of a plan that may go now.
    pub(super) fn send(
        self: &Arc<Self>,
        class: Class,
        to: Tier,
        plan: &mut TransferPlan,
        order: Option<EngineOrder>,
    ) {
        let probe = self.limit(class, to, plan);
        self.take_slots(plan, order);
        if let Some(route) = probe.filter(|_| !plan.is_probe_sent()) {
            self.health.retract_probe(route);
        }
    }

    /// Hands a planned transfer over to its caller, and lets the next one plan.
    pub(super) fn hand_over(
        self: &Arc<Self>,
        mut plan: TransferPlan,
        reply: Reply,
        turn: PlanningTurn<'_>,
    ) {
        let found_no_room = plan.found_no_room();
        let mut table = self.table();
        table.finish_plan(&mut plan, reply, turn.started);
        let effects = table.take_effects();
        drop(table);
        // The next caller plans while this transfer is sent.
        drop(turn);
        self.apply(effects);
        // Flushing makes room, but may not be due yet.
        if found_no_room {
            self.waker.wake();
        }
    }

    /// A transfer that its caller can cancel.
    pub(super) fn cancellable<T>(
        self: &Arc<Self>,
        transfer: Transfer<T>,
        id: Option<TransferId>,
    ) -> Transfer<T> {
        // Weak: a caller's handle may outlive the manager.
        let core = Arc::downgrade(self);
        let cancel = move || {
            if let (Some(core), Some(id)) = (core.upgrade(), id) {
                core.end_early(id);
            }
        };
        transfer.cancelled_by(cancel)
    }

    /// Takes slots for all blocks of a plan, and sends the copies, or holds them back for an
    /// engine.
    pub(super) fn take_slots(
        self: &Arc<Self>,
        plan: &mut TransferPlan,
        mut order: Option<EngineOrder>,
    ) {
        let mut is_complete = false;
        while !is_complete {
            let mut table = self.table();
            is_complete = table.extend(plan);
            let effects = table.take_effects();
            // While the table is locked: a copy that waits for another's block may be sent by the
            // thread that lands that.
            if let Some(id) = plan.transfer()
                && let Some(order) = order.take()
            {
                self.engine.orders.lock().open(id, order, self.clock.uptime());
            }
            drop(table);
            self.apply(effects);
        }
    }

    /// Cuts from a plan the blocks that the engine computes faster than they load, that cannot be
    /// copied now, or that the queues have no room for. The plan's last block is to test the
    /// returned route, if any.
    fn limit(&self, class: Class, to: Tier, plan: &mut TransferPlan) -> Option<Route> {
        if plan.is_into_engine() {
            // The engine knows what is worth loading, and asks for this.
        } else if class == Class::Load {
            let worth_loading = plan.held().worth_loading().saturating_sub(plan.before());
            self.metrics.left_to_engine(plan.recompute_behind(worth_loading));
        } else {
            // An engine waits for loads, so a full queue never refuses them; other work can be
            // asked for again.
            let room = self.room_in_queues(to, plan.sources());
            plan.refuse_behind(room);
        }
        let (open, probe) = self.open_way(to, plan.sources());
        plan.refuse_behind(open);
        if probe.is_some() {
            plan.mark_probe();
        }
        let indirect = |tiers: TierSet, &from: &Tier| {
            if self.sending.executor.connects(Route { from, to }) {
                tiers
            } else {
                tiers.with(from)
            }
        };
        plan.pass_host_from(Tier::ALL.iter().fold(TierSet::default(), indirect));
        probe
    }

    /// How many of the leading blocks may go now; the last of them, perhaps, as a probe of its
    /// route.
    fn open_way(&self, to: Tier, sources: impl Iterator<Item = SlotRef>) -> (usize, Option<Route>) {
        let mut passages = [None; Tier::COUNT];
        let mut open = 0;
        for (at, from) in sources.enumerate() {
            if self.health.directories.is_left_alone(from) {
                return (at, None);
            }
            let route = Route::new(from.tier, to);
            match *passages[from.tier.index()].get_or_insert_with(|| self.health.pass(route)) {
                RoutePassage::Free => open = at + 1,
                // One block, and none behind it: no more than that waits for a medium that may
                // hang.
                RoutePassage::Probe => return (at + 1, Some(route)),
                RoutePassage::Blocked => return (at, None),
            }
        }
        (open, None)
    }

    /// How many of the leading blocks the queues of their routes have room for.
    fn room_in_queues(&self, to: Tier, sources: impl Iterator<Item = SlotRef>) -> usize {
        let queues = self.sending.queues.lock();
        let first_leg = |from: Tier| {
            let route = Route { from, to };
            self.sending.executor.legs(route).next().unwrap_or(route)
        };
        let mut room = Tier::ALL
            .map(|from| self.tuning.queue_blocks.saturating_sub(queues.waiting(first_leg(from))));
        let has_room = |from: &SlotRef| {
            let room = &mut room[from.tier.index()];
            *room = room.wrapping_sub(1);
            *room != usize::MAX
        };
        sources.take_while(has_room).count()
    }
}
