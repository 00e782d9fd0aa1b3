//! Which routes are open: their legs, the room in their queues, and their breakers.

use kvbm_tiers::{Route, SlotRef, Tier};

use super::Core;
use super::breaker::RoutePassage;
use crate::table::{TierSet, TransferPlan};
use crate::task::Class;

impl Core {
    /// Cuts from a plan the blocks that the engine computes faster than they load, that cannot be
    /// copied now, or that the queues have no room for. The plan's last block is to test the
    /// returned route, if any.
    pub(super) fn limit(&self, class: Class, to: Tier, plan: &mut TransferPlan) -> Option<Route> {
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
            if self.sending.executor.connects((from, to)) { tiers } else { tiers.with(from) }
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
            let route = (from.tier, to);
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
        let first_leg =
            |from: Tier| self.sending.executor.legs((from, to)).next().unwrap_or((from, to));
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
