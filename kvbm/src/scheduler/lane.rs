//! Queues of orders, one lane per route, and the decision what goes to the hardware next.

use std::collections::{HashSet, VecDeque};

use kvbm_tiers::{BlockKey, Route, Tier};

use super::order::{Class, Order};

/// What is to be done with an order whose turn has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// It goes to the backend.
    Send,
    /// It waits for a staging slot, and those behind it with it.
    Wait,
    /// It is not sent at all.
    Drop,
}

/// What goes to the hardware next.
#[derive(Debug)]
pub(super) struct Next {
    pub(super) route: Route,
    pub(super) class: Class,
    /// May be none, when some were dropped.
    pub(super) orders: Vec<Order>,
    pub(super) dropped: Vec<Order>,
}

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

    /// Makes the prefetches of these blocks loads: an engine waits for them now.
    pub(super) fn raise(&mut self, blocks: &HashSet<BlockKey>) {
        let (load, prefetch) = (Class::Load as usize, Class::Prefetch as usize);
        for lane in self.lanes.iter_mut().flatten() {
            let waiting = std::mem::take(&mut lane.queues[prefetch]);
            let (raised, others): (VecDeque<_>, _) =
                waiting.into_iter().partition(|order| blocks.contains(&order.block));
            lane.queues[load].extend(raised);
            lane.queues[prefetch] = others;
        }
    }

    /// Everything that waits.
    pub(super) fn take_all(&mut self) -> Vec<Order> {
        let queues = self.lanes.iter_mut().flatten().flat_map(|lane| &mut lane.queues);
        queues.flat_map(std::mem::take).collect()
    }

    /// A batch that should start now; `turn` says of each order in its turn what is to be done with it.
    pub(super) fn next_batch(&mut self, mut turn: impl FnMut(&mut Order) -> Turn) -> Option<Next> {
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
            let mut orders = Vec::with_capacity(limit.min(queue.len()));
            let mut dropped = Vec::new();
            while orders.len() < limit {
                match queue.front_mut().map(&mut turn) {
                    Some(Turn::Send) => orders.extend(queue.pop_front()),
                    Some(Turn::Drop) => dropped.extend(queue.pop_front()),
                    Some(Turn::Wait) | None => break,
                }
            }
            if !orders.is_empty() {
                lane.batches[class as usize] += 1;
            }
            if !(orders.is_empty() && dropped.is_empty()) {
                return Some(Next { route, class, orders, dropped });
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
