//! How a transfer goes: what is copied from where, through which slots, and what is not worth it now.

use std::sync::Arc;

use kvbm_tiers::{BlockKey, Frame, Route, SlotRef, Tier};

use super::Core;
use super::breaker::Passage;
use super::flow::{Brought, Flow, Outline};
use super::order::{Bounce, Class, Order};
use crate::lease::Lease;
use crate::table::{FlushRun, Grip, Match, Missing, Reserved, RunId, Table, TierSet, Visit};
use crate::ticket::Ticket;

/// What is left of what is missing.
struct Shortened {
    /// Blocks that were cut off.
    refused: usize,
    /// The last block is to try whether the media between these tiers are well again.
    probe: Option<Route>,
}

impl Core {
    pub(super) fn plan(
        self: &Arc<Self>,
        class: Class,
        to: Tier,
        mut lease: Lease,
    ) -> (Arc<Flow>, Ticket<Brought>, Vec<Order>) {
        let mut table = self.table();
        table.drop_condemned(lease.grip_mut());
        let mut missing = table.missing(lease.grip(), to);
        if !table.has(to) {
            missing = Missing { before: 0, behind: None, blocks: Vec::new() };
        }
        let recompute = self.leave_to_engine(class, lease.grip().held(), &mut missing);
        let Shortened { refused, probe } = self.shorten(class, to, &mut missing);
        let keys: Vec<BlockKey> = missing.blocks.iter().map(|&(key, _)| key).collect();
        let Reserved { resident, in_flight, behind, run, declined, refused: no_room } =
            table.reserve_after(to, missing.behind, &keys, lease.grip().visit());
        let known = resident + in_flight;
        let (run, frames) = run.map_or((None, Vec::new()), |(run, frames)| (Some(run), frames));
        let way = &missing.blocks[known..known + frames.len()];
        let visit = lease.grip().visit();
        let (promotion, bounces) = self.bounces(&mut table, class, to, (way, behind), visit);
        let read = way.iter().fold(TierSet::default(), |tiers, (_, from)| tiers.with(from.tier));
        let sources = (!frames.is_empty()).then(|| table.pin_again(lease.grip(), read));
        drop(table);
        if no_room > 0 {
            self.flushing.wake();
        }
        // The last block is the probe. It may have found no room, or be on its way already.
        let is_sent = !frames.is_empty() && known + frames.len() == missing.blocks.len();
        let asks_medium = is_sent && !matches!(bounces.last(), Some(Bounce::Awaited));
        if let Some(route) = probe.filter(|_| !asks_medium) {
            self.retract_probe(route);
        }
        let outline = Outline {
            class,
            dest: to,
            run,
            promotion,
            before: missing.before + known,
            orders: frames.len(),
            refused: refused + no_room,
            recompute,
            declined,
            source: only_source(way),
            is_probe: probe.is_some(),
            behind,
            found: missing
                .behind
                .filter(|_| missing.before > 0)
                .into_iter()
                .chain(keys[..known].iter().copied())
                .collect(),
        };
        let (flow, ticket) = Flow::start(outline, lease, sources, self.clock.uptime());
        let run = run.into_iter().cycle();
        let orders = way.iter().zip(frames).zip(bounces).zip(run).enumerate();
        let orders = orders.map(|(entry, (((&(block, from), to), bounce), run))| Order {
            block,
            from,
            source: None,
            to,
            run,
            entry,
            bounce,
            halfway: false,
            flow: Arc::clone(&flow),
        });
        let orders = orders.collect();
        (flow, ticket, orders)
    }

    /// Cuts off what the engine computes sooner than it is loaded; answers how many blocks.
    fn leave_to_engine(&self, class: Class, held: &Match, missing: &mut Missing) -> usize {
        if class != Class::Load {
            return 0;
        }
        let all = missing.blocks.len();
        missing.blocks.truncate(held.worth_loading().saturating_sub(missing.before));
        let recompute = all - missing.blocks.len();
        self.metrics.left_to_engine(recompute);
        recompute
    }

    /// Cuts off what cannot be copied now, and what the queue has no room for.
    fn shorten(&self, class: Class, to: Tier, missing: &mut Missing) -> Shortened {
        let all = missing.blocks.len();
        if class != Class::Load {
            missing.blocks.truncate(self.room_in_queues(to, &missing.blocks));
        }
        let mut passages = [None; Tier::COUNT];
        let mut probe = None;
        for place in 0..missing.blocks.len() {
            let from = missing.blocks[place].1.tier;
            match *passages[from.index()].get_or_insert_with(|| self.pass((from, to))) {
                Passage::Free => {}
                Passage::Probe => {
                    // One block, and none behind it: nobody waits for more than that on a medium that may hang.
                    probe = Some((from, to));
                    missing.blocks.truncate(place + 1);
                    break;
                }
                Passage::Blocked => {
                    missing.blocks.truncate(place);
                    break;
                }
            }
        }
        Shortened { refused: all - missing.blocks.len(), probe }
    }

    /// How many of the leading blocks the queues of their routes have room for.
    fn room_in_queues(&self, to: Tier, blocks: &[(BlockKey, SlotRef)]) -> usize {
        let lanes = self.lanes.lock();
        let first_leg = |from: Tier| self.legs((from, to)).next().unwrap_or((from, to));
        let mut room =
            Tier::ALL.map(|from| self.tuning.queue_blocks.saturating_sub(lanes.waiting(first_leg(from))));
        let has_room = |(_, from): &&(BlockKey, SlotRef)| {
            let room = &mut room[from.tier.index()];
            *room = room.wrapping_sub(1);
            *room != usize::MAX
        };
        blocks.iter().take_while(has_room).count()
    }

    /// The routes that a block takes from one tier to another.
    pub(super) fn legs(&self, (from, to): Route) -> impl Iterator<Item = Route> + use<> {
        let is_direct = self.executor.connects((from, to));
        let legs = if is_direct {
            [Some((from, to)), None]
        } else {
            [Some((from, Tier::Host)), Some((Tier::Host, to))]
        };
        legs.into_iter().flatten()
    }

    /// Whether blocks may go from one tier to another now.
    pub(super) fn pass(&self, route: Route) -> Passage {
        let now = self.clock.uptime();
        // All legs or none: a probe of one of them that cannot go on would be in vain.
        if self.legs(route).any(|leg| self.breakers.is_blocked(leg, now)) {
            return Passage::Blocked;
        }
        let verdict = |leg| self.tuning.limit(leg) + self.tuning.breaker_pause;
        let passages = self.legs(route).map(|leg| self.breakers.pass(leg, verdict(leg), now));
        passages.max().unwrap_or(Passage::Free)
    }

    pub(super) fn retract_probe(&self, route: Route) {
        let now = self.clock.uptime();
        self.legs(route).for_each(|leg| self.breakers.retract_probe(leg, now));
    }

    /// How each block of `way` gets across: directly, or through DRAM. Blocks on their way up to the device
    /// stay in the host tier when they pass it, if it has room and their ancestors.
    fn bounces(
        &self,
        table: &mut Table,
        class: Class,
        to: Tier,
        (way, behind): (&[(BlockKey, SlotRef)], Option<BlockKey>),
        visit: Visit,
    ) -> (Option<RunId>, Vec<Bounce>) {
        let is_direct = |from: &SlotRef| self.executor.connects((from.tier, to));
        let plain =
            |(_, from): &(_, SlotRef)| if is_direct(from) { Bounce::NotNeeded } else { Bounce::Wanted };
        let mut bounces: Vec<Bounce> = way.iter().map(plain).collect();
        let first = way.iter().position(|(_, from)| !is_direct(from) && from.tier > Tier::Host);
        let Some(first) = first.filter(|_| class == Class::Load && table.has(Tier::Host)) else {
            return (None, bounces);
        };
        let behind = if first == 0 { behind } else { Some(way[first - 1].0) };
        let keys: Vec<BlockKey> = way[first..].iter().map(|&(key, _)| key).collect();
        let Reserved { resident, in_flight, run, .. } = table.reserve_after(Tier::Host, behind, &keys, visit);
        // What is on its way into the host tier need not be read twice.
        bounces[first..first + resident + in_flight].fill_with(|| Bounce::Awaited);
        let Some((run, frames)) = run else { return (None, bounces) };
        let places = bounces[first + resident + in_flight..].iter_mut();
        for (entry, (place, frame)) in places.zip(frames).enumerate() {
            *place = Bounce::Held { frame, promotes: Some((run, entry)) };
        }
        (Some(run), bounces)
    }

    /// Copies dirty blocks down.
    pub(super) fn flush_run(self: &Arc<Self>, to: Tier, run: FlushRun, is_probe: bool) {
        let FlushRun { run, behind, grip, copies } = run;
        let outline = Outline {
            run: Some(run),
            orders: copies.len(),
            behind,
            is_probe,
            ..Outline::of_nothing(Class::Flush, to)
        };
        let lease = Lease::new(Arc::clone(self), Grip::of_nothing(grip.visit()));
        let (flow, ticket) = Flow::start(outline, lease, Some(grip), self.clock.uptime());
        drop(ticket);
        let order = |(entry, (block, from, to)): (usize, (BlockKey, SlotRef, Frame))| {
            let is_direct = self.executor.connects((from.tier, to.tier()));
            let bounce = if is_direct { Bounce::NotNeeded } else { Bounce::Wanted };
            let flow = Arc::clone(&flow);
            Order { block, from, source: None, to, run, entry, bounce, halfway: false, flow }
        };
        let orders = copies.into_iter().enumerate().map(order).collect();
        self.launch(&flow, orders);
    }
}

/// The tier that all blocks of `way` come from, if it is one.
fn only_source(way: &[(BlockKey, SlotRef)]) -> Option<Tier> {
    let source = way.first()?.1.tier;
    way.iter().all(|(_, from)| from.tier == source).then_some(source)
}
