//! The transfer scheduler: it plans how blocks get into a tier, and owns every title on the way.
//!
//! There is one kind of work, [`Core::bring`]: make the leading blocks of a leased chain resident in a tier.
//! Loading brings them to the device, saving to the tier below it, flushing to the tier below that,
//! prefetching to the host. What differs is where the blocks come from, and the [`Class`] that decides who
//! goes first.
//!
//! | module | holds |
//! |---|---|
//! | `order` | one block on its way, with its titles |
//! | `lane` | queues per route and class; what goes next |
//! | `batch` | what the media work on; which copies are overdue |
//! | `breaker` | media that are away, full or hanging are left alone for a while |
//! | `flow` | the orders of one request; its ticket |
//! | `pace` | how long a block takes from each tier |
//! | `executor` | which backend serves which route |
//! | `complete` | what happens when a copy ends |
//! | `background` | flushing and time-outs |
//!
//! Locks, outermost first: an order's place in its batch, the table, then any one of the lanes', the staging slots',
//! a flow's and a breaker's. Callbacks of backends take them for microseconds and never wait for I/O.

mod background;
mod batch;
mod breaker;
mod complete;
mod executor;
mod flow;
mod lane;
mod order;
mod pace;

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dashmap::DashMap;
use kvbm_policies::{Leg, split};
use kvbm_tiers::{BlockKey, Done, Frame, Route, SlotRef, Tier};

use self::background::Flushing;
use self::batch::Batches;
use self::breaker::{Breakers, Passage, Times};
use self::flow::{Flow, Outline, Waiter};
use self::lane::{Lanes, Limits, Next, Turn};
use self::order::{Bounce, Order, Staging};
use self::pace::Paces;
use crate::clock::Clock;
use crate::demand::Demand;
use crate::error::{Error, ErrorKind};
use crate::hash::Chain;
use crate::lease::Lease;
use crate::metrics::Metrics;
use crate::sync::{AtomicUsize, Mutex, MutexGuard};
use crate::table::{FlushRun, Grip, Match, Missing, Reserved, RunId, Table, TierSet, Usage, Visit};
use crate::ticket::Ticket;

pub use self::background::Drained;
pub use self::executor::Executor;
pub use self::flow::Brought;
pub use self::order::{Class, StagingCounts};

/// Limits and times of the scheduler.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// Batches in flight per route.
    pub max_concurrent: usize,
    /// Blocks in a batch.
    pub max_batch: usize,
    /// Blocks in a batch to the object tier.
    pub segment_blocks: usize,
    /// Blocks that may wait per route before more of the same are refused.
    pub queue_blocks: usize,
    /// How long a medium may complete nothing before what it works on is overdue.
    pub timeout: Duration,
    /// The same for the object tier, if that is longer: its client still tries until then.
    pub object_timeout: Duration,
    /// How long a medium that failed is left alone before one copy tries it. Doubles up to 64-fold while that fails.
    pub breaker_pause: Duration,
    /// A block is flushed at the latest so long after it became resident, in milliseconds of the clock.
    pub flush_interval_ms: u64,
    /// Share of a tier that may be dirty before flushing starts at once.
    pub dirty_watermark: f64,
    /// Seconds that the engine takes to compute a block; `None`: not known, so what is held is loaded.
    pub prefill_block_s: Option<f64>,
}

impl Tuning {
    /// How long the medium of `route` may complete nothing.
    fn limit(&self, (from, to): Route) -> Duration {
        let is_object = from == Tier::Object || to == Tier::Object;
        if is_object { self.timeout.max(self.object_timeout) } else { self.timeout }
    }
}

/// Everything that moves blocks. Shared by the manager, its leases and the callbacks of its backends.
pub struct Core {
    table: Mutex<Table>,
    lanes: Mutex<Lanes>,
    executor: Executor,
    batches: Batches,
    staging: Mutex<Staging>,
    /// Who waits for a block that another flow brings.
    flights: DashMap<(Tier, BlockKey), Vec<Waiter>>,
    flushing: Flushing,
    breakers: Breakers,
    paces: Paces,
    demand: Demand,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    tuning: Tuning,
    /// Calls of [`Core::pump`] that somebody has to act on.
    pumps: AtomicUsize,
    /// 1 when nothing is taken on any more.
    closed: AtomicUsize,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("tuning", &self.tuning).finish_non_exhaustive()
    }
}

/// What a [`Core`] is made of.
#[derive(Debug)]
pub struct Parts {
    /// The block table.
    pub table: Table,
    /// The backends by route.
    pub executor: Executor,
    /// Titles to DRAM slots through which blocks bounce.
    pub staging: Vec<Frame>,
    /// Time for policies and flushing.
    pub clock: Arc<dyn Clock>,
    /// Where it counts.
    pub metrics: Metrics,
    /// Limits.
    pub tuning: Tuning,
}

impl Core {
    /// Puts the parts together. Nothing moves until somebody asks.
    pub fn new(parts: Parts) -> Arc<Self> {
        let Parts { table, executor, staging, clock, metrics, tuning } = parts;
        let largest = Tier::ALL.iter().map(|&tier| table.counts(tier).total).max().unwrap_or(0);
        let limits = Limits {
            batches: tuning.max_concurrent,
            batch_blocks: tuning.max_batch,
            segment_blocks: tuning.segment_blocks,
        };
        Arc::new(Self {
            table: Mutex::new(table),
            lanes: Mutex::new(Lanes::new(limits)),
            executor,
            batches: Batches::default(),
            staging: Mutex::new(Staging::new(staging)),
            flights: DashMap::new(),
            flushing: Flushing::default(),
            breakers: Breakers::new(Times {
                pause: tuning.breaker_pause,
                verdict: tuning.timeout.max(tuning.breaker_pause),
            }),
            paces: Paces::default(),
            demand: Demand::of_tiers(largest),
            clock,
            metrics,
            tuning,
            pumps: AtomicUsize::new(0),
            closed: AtomicUsize::new(0),
        })
    }

    /// The table, its clock set.
    pub fn table(&self) -> MutexGuard<'_, Table> {
        let mut table = self.table.lock();
        table.advance_clock(self.clock.now_ms());
        table
    }

    /// Now, by the clock of policies and flushing.
    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Has background work looked at soon.
    pub(crate) fn wake(&self) {
        self.flushing.wake();
    }

    /// The counters.
    pub const fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Occupancy of the staging slots.
    pub fn staging(&self) -> StagingCounts {
        self.staging.lock().counts()
    }

    /// Copies on a route that are overdue now. Each holds the slot that it writes, and pins the one that it reads with
    /// its ancestors.
    pub fn overdue(&self, route: Route) -> u64 {
        self.metrics.overdue_now(route)
    }

    /// Blocks that wait on a route, and batches in flight there.
    pub(crate) fn traffic(&self, route: Route) -> (usize, usize) {
        let lanes = self.lanes.lock();
        (lanes.waiting(route), lanes.in_flight(route))
    }

    /// Pins the leading blocks of `chain` in every tier that holds any, and counts as their use.
    pub fn lease(self: &Arc<Self>, chain: Chain<'_>, usage: Usage) -> Lease {
        let mut table = self.table();
        let mut grip = table.lease(chain, usage);
        let miss = table.miss(chain, grip.held());
        drop(table);
        self.demand.observe(chain, self.clock.now_ms());
        self.metrics.requested(chain.len(), grip.held());
        if let Some(miss) = miss {
            self.metrics.missed(chain.len() - grip.held().longest(), miss);
        }
        if let Some(blocks) = self.worth_loading(grip.held()) {
            grip.judge(blocks);
        }
        Lease::new(Arc::clone(self), grip)
    }

    /// How many leading blocks of `chain` each tier holds, and how many are worth loading. No side effect.
    pub fn matches(&self, chain: Chain<'_>) -> Match {
        let mut held = self.table().matches(chain);
        if let Some(blocks) = self.worth_loading(&held) {
            held.judge(blocks);
        }
        held
    }

    /// `None` where the engine's pace is not known.
    fn worth_loading(&self, held: &Match) -> Option<u32> {
        let prefill_s = self.tuning.prefill_block_s?;
        let now = self.clock.uptime();
        let leg = |(tier, range): (Tier, Range<usize>)| Leg {
            blocks: range.len() as u32,
            block_s: if tier == Tier::Device { Some(0.0) } else { self.paces.block_s(tier, now) },
        };
        Some(split(held.plan().map(leg), prefill_s))
    }

    /// What share of the requested blocks, of late, an LRU tier of `capacity` blocks would have held: 0 to 1.
    pub fn estimated_hit_rate(&self, capacity: u32) -> f64 {
        self.demand.hit_rate(capacity)
    }

    /// Makes the leading blocks of a leased chain resident in `to`: as many as the lease holds anywhere, as
    /// far as there is room.
    ///
    /// The answer is an error of kind [`Invalid`](crate::ErrorKind::Invalid) for a lease of another manager, and of
    /// kind [`Closed`](crate::ErrorKind::Closed) after [`close`](Self::close).
    pub fn bring(self: &Arc<Self>, class: Class, to: Tier, lease: Lease) -> Ticket<Brought> {
        if !lease.is_of(self) {
            return Ticket::failed(foreign_lease());
        }
        if self.is_closed() {
            return Ticket::failed(Error::closed());
        }
        let (flow, ticket, orders) = self.plan(class, to, lease);
        self.launch(&flow, orders);
        ticket
    }

    /// Ends everything: what waits is not sent, who waits is answered, and nothing is taken on any more. Copies that a
    /// medium works on end by themselves and keep their slots until then.
    pub fn close(self: &Arc<Self>) {
        self.closed.store(1, Ordering::Release);
        let waiting = self.lanes.lock().take_all();
        waiting.into_iter().for_each(|order| self.abandoned(order));
        self.batches.all().iter().for_each(|batch| self.give_up(batch));
        // Who began to wait before it was closed did so under the table's lock, and is seen from here on. They wait for
        // blocks that an engine was to fill.
        drop(self.table());
        let waited_for: Vec<_> = self.flights.iter().map(|flight| *flight.key()).collect();
        self.announce(waited_for);
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) > 0
    }

    fn plan(
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
        if let Some(route) = probe.filter(|_| frames.len() < missing.blocks.len() - known) {
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
            let lanes = self.lanes.lock();
            let first_leg = |from: Tier| self.legs((from, to)).next().unwrap_or((from, to));
            let room = |from: Tier| self.tuning.queue_blocks.saturating_sub(lanes.waiting(first_leg(from)));
            let room = missing.blocks.first().map_or(0, |&(_, from)| room(from.tier));
            missing.blocks.truncate(room);
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

    /// The routes that a block takes from one tier to another.
    fn legs(&self, (from, to): Route) -> impl Iterator<Item = Route> + use<> {
        let is_direct = self.executor.connects((from, to));
        let legs = if is_direct {
            [Some((from, to)), None]
        } else {
            [Some((from, Tier::Host)), Some((Tier::Host, to))]
        };
        legs.into_iter().flatten()
    }

    /// Whether blocks may go from one tier to another now.
    fn pass(&self, route: Route) -> Passage {
        let now = self.clock.uptime();
        // All legs or none: a probe of one of them that cannot go on would be in vain.
        if self.legs(route).any(|leg| self.breakers.is_blocked(leg, now)) {
            return Passage::Blocked;
        }
        self.legs(route).map(|leg| self.breakers.pass(leg, now)).max().unwrap_or(Passage::Free)
    }

    fn retract_probe(&self, route: Route) {
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
    fn flush_run(self: &Arc<Self>, to: Tier, run: FlushRun, is_probe: bool) {
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

    /// Publishes blocks that were written in place, as the last part of their chain in `to`: the first `filled` ones of
    /// the run that the table reserved behind `before` blocks, the last of which is `behind`.
    pub fn publish(
        self: &Arc<Self>,
        to: Tier,
        run: Option<(RunId, Vec<Frame>)>,
        filled: usize,
        (before, behind): (usize, Option<BlockKey>),
        lease: Lease,
    ) -> Ticket<Brought> {
        if !lease.is_of(self) {
            run.into_iter().for_each(|(run, frames)| self.abandon(run, frames));
            return Ticket::failed(foreign_lease());
        }
        let reserved = run.as_ref().map_or(0, |(_, frames)| frames.len());
        let outline = Outline {
            run: run.as_ref().map(|&(run, _)| run),
            before,
            behind,
            orders: reserved.min(filled),
            ..Outline::of_nothing(Class::Save, to)
        };
        let (flow, ticket) = Flow::start(outline, lease, None, self.clock.uptime());
        let mut table = self.table();
        if let Some((run, frames)) = run {
            frames.into_iter().enumerate().for_each(|(entry, frame)| {
                if entry < filled {
                    table.filled(run, entry, frame);
                } else {
                    table.failed(run, entry, frame);
                }
            });
        }
        let settled = table.take_settled();
        drop(table);
        self.announce(settled);
        self.finish_flow(&flow);
        ticket
    }

    /// Gives back reserved slots that will not be filled, and tells those who wait for their blocks.
    pub fn abandon(self: &Arc<Self>, run: RunId, frames: Vec<Frame>) {
        let mut table = self.table();
        frames.into_iter().enumerate().for_each(|(entry, frame)| table.failed(run, entry, frame));
        table.close(run, None);
        let settled = table.take_settled();
        drop(table);
        self.announce(settled);
    }

    fn launch(self: &Arc<Self>, flow: &Arc<Flow>, orders: Vec<Order>) {
        if orders.is_empty() {
            return self.finish_flow(flow);
        }
        let (awaited, ready): (Vec<_>, Vec<_>) =
            orders.into_iter().partition(|order| matches!(order.bounce, Bounce::Awaited));
        let mut lanes = self.lanes.lock();
        ready.into_iter().for_each(|order| lanes.push(flow.outline.class, order));
        if !awaited.is_empty() {
            lanes.raise(&awaited.iter().map(|order| order.block).collect());
        }
        drop(lanes);
        awaited.into_iter().for_each(|order| self.wait_for_host(order));
        self.pump();
        if self.is_closed() {
            // It was closed while this was planned.
            self.close();
        }
    }

    /// Sends an order on when its block has reached the host tier.
    fn wait_for_host(self: &Arc<Self>, order: Order) {
        let mut table = self.table();
        if !self.is_closed() && table.watch(Tier::Host, order.block) {
            let flight = (Tier::Host, order.block);
            self.flights.entry(flight).or_default().push(Waiter::Order(Box::new(order)));
            return;
        }
        drop(table);
        self.resume(order);
    }

    /// Hands waiting orders to the backends. A backend may complete a batch, and so come back here, before
    /// its `submit` returns: then the outer call goes on with the work, and the stack stays flat.
    fn pump(self: &Arc<Self>) {
        if self.pumps.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let turn = PumpTurn(&self.pumps);
        loop {
            let asked = self.pumps.load(Ordering::Acquire);
            while self.start_batch() {}
            if self.pumps.fetch_sub(asked, Ordering::AcqRel) == asked {
                std::mem::forget(turn);
                return;
            }
        }
    }

    fn start_batch(self: &Arc<Self>) -> bool {
        let next = self.lanes.lock().next_batch(|order| self.turn_of(order));
        let Some(Next { route, class, orders, dropped }) = next else { return false };
        dropped.into_iter().for_each(|order| self.abandoned(order));
        if orders.is_empty() {
            return true;
        }
        let ops = orders.iter().map(Order::op).collect();
        let batch = self.batches.start(route, class, orders, self.clock.uptime());
        let core = Arc::clone(self);
        let done = Done::new(move |op, result| core.copy_ended(&batch, op, result));
        // Nobody knows what became of a batch whose backend panicked: its copies will be overdue. The request that
        // happened to pump, and all the others, must not suffer for it.
        if catch_unwind(AssertUnwindSafe(|| self.executor.submit(route, ops, &done))).is_err() {
            tracing::error!(from = %route.0, to = %route.1, "a backend panicked when it was given a batch");
        }
        true
    }

    /// What becomes of an order whose turn has come. It gets the staging slot that it needs.
    fn turn_of(&self, order: &mut Order) -> Turn {
        let is_in_vain = self.is_closed() || order.flow.is_given_up(order.entry);
        if is_in_vain || (!order.flow.outline.is_probe && self.breakers.is_open(order.route())) {
            return Turn::Drop;
        }
        if !matches!(order.bounce, Bounce::Wanted) {
            return Turn::Send;
        }
        let mut staging = self.staging.lock();
        match staging.take() {
            Some(frame) => order.bounce = Bounce::Held { frame, promotes: None },
            None if staging.is_gone() => return Turn::Drop,
            None => return Turn::Wait,
        }
        Turn::Send
    }
}

/// Somebody pumps. If he panics, others may.
struct PumpTurn<'a>(&'a AtomicUsize);

impl Drop for PumpTurn<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// What is left of what is missing.
struct Shortened {
    /// Blocks that were cut off.
    refused: usize,
    /// The last block is to try whether the media between these tiers are well again.
    probe: Option<Route>,
}

pub(crate) fn foreign_lease() -> Error {
    Error::new(ErrorKind::Invalid, "the lease is of another manager: give it to the one that made it")
}

/// The tier that all blocks of `way` come from, if it is one.
fn only_source(way: &[(BlockKey, SlotRef)]) -> Option<Tier> {
    let source = way.first()?.1.tier;
    way.iter().all(|(_, from)| from.tier == source).then_some(source)
}
