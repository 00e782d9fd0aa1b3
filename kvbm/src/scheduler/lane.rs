//! Queues of orders, one lane per route, and the decision what goes to the hardware next.

use std::collections::VecDeque;

use kvbm_tiers::{Route, Tier};

use super::order::{Class, Order};

/// How much may be in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Batches in flight per route.
    pub(super) batches: usize,
    /// Blocks in a batch.
    pub(super) batch_blocks: usize,
    /// Blocks in a batch to the object tier: what fits into one segment.
    pub(super) segment_blocks: usize,
}

#[derive(Debug, Default)]
struct Lane {
    queues: [VecDeque<Order>; Class::ALL.len()],
    batches: [usize; Class::ALL.len()],
}

impl Lane {
    fn batches(&self) -> usize {
        self.batches.iter().sum()
    }

    fn has_loads(&self) -> bool {
        let load = Class::Load as usize;
        !self.queues[load].is_empty() || self.batches[load] > 0
    }

    fn most_urgent(&self) -> Option<Class> {
        Class::ALL.into_iter().find(|&class| !self.queues[class as usize].is_empty())
    }
}

/// All lanes.
#[derive(Debug)]
pub(super) struct Lanes {
    lanes: [[Lane; Tier::COUNT]; Tier::COUNT],
    limits: Limits,
}

impl Lanes {
    pub(super) fn new(limits: Limits) -> Self {
        Self { lanes: Default::default(), limits }
    }

    fn lane(&mut self, (from, to): Route) -> &mut Lane {
        &mut self.lanes[from.index()][to.index()]
    }

    pub(super) fn push(&mut self, class: Class, order: Order) {
        self.lane(order.route()).queues[class as usize].push_back(order);
    }

    /// Blocks that wait on a route.
    pub(super) fn waiting(&self, (from, to): Route) -> usize {
        self.lanes[from.index()][to.index()].queues.iter().map(VecDeque::len).sum()
    }

    /// Batches that the hardware is working on.
    pub(super) fn in_flight(&self, (from, to): Route) -> usize {
        self.lanes[from.index()][to.index()].batches()
    }

    /// A batch that should start now. `admit` may refuse an order (no staging slot), which ends the batch.
    pub(super) fn next_batch(
        &mut self,
        mut admit: impl FnMut(&mut Order) -> bool,
    ) -> Option<(Route, Class, Vec<Order>)> {
        let loading = Tier::ALL.map(|tier| self.is_loading_from(tier));
        for route in routes() {
            let limit = self.batch_limit(route);
            let most = self.limits.batches;
            let lane = self.lane(route);
            let Some(class) = lane.most_urgent().filter(|_| lane.batches() < most) else { continue };
            let yields = class > Class::Save && (loading[route.0.index()] || loading[route.1.index()]);
            if yields && lane.batches() > 0 {
                continue;
            }
            let queue = &mut lane.queues[class as usize];
            let mut batch = Vec::with_capacity(limit.min(queue.len()));
            while batch.len() < limit && queue.front_mut().is_some_and(&mut admit) {
                batch.extend(queue.pop_front());
            }
            if !batch.is_empty() {
                lane.batches[class as usize] += 1;
                return Some((route, class, batch));
            }
        }
        None
    }

    fn batch_limit(&self, route: Route) -> usize {
        if route.1 == Tier::Object { self.limits.segment_blocks } else { self.limits.batch_blocks }
    }

    /// Whether blocks are being, or wait to be, loaded out of `tier` (a lower one: the device has no queue
    /// to protect).
    fn is_loading_from(&self, tier: Tier) -> bool {
        tier > Tier::Host && self.lanes[tier.index()].iter().any(Lane::has_loads)
    }

    /// A batch ended.
    pub(super) fn ended(&mut self, route: Route, class: Class) {
        self.lane(route).batches[class as usize] -= 1;
    }
}

/// All routes. What an engine waits for comes first: towards the device, then out of it.
fn routes() -> impl Iterator<Item = Route> {
    Tier::ALL.into_iter().flat_map(|to| Tier::ALL.into_iter().map(move |from| (from, to)))
}
