//! The transfer scheduler: it plans how blocks get into a tier, and owns every title on the way.
//!
//! There is one kind of work, [`Core::bring`]: make the leading blocks of a leased chain resident in a tier.
//! Loading brings them to the device, saving to the tier below it, flushing to the tier below that,
//! prefetching to the host. What differs is where the blocks come from, and the [`Class`] that decides who
//! goes first.
//!
//! | module | holds |
//! |---|---|
//! | `plan` | what is copied from where, and through which slots |
//! | `dispatch` | from the queues to the backends |
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
//! Locks, outermost first: an order's place in its batch, the table, the lanes; innermost, one at a time, those of the
//! flights, the staging slots, a flow and a breaker. Callbacks of backends take them for microseconds and never wait
//! for I/O.

mod background;
mod batch;
mod breaker;
mod complete;
mod dispatch;
mod executor;
mod flow;
mod lane;
mod order;
mod pace;
mod plan;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dashmap::DashMap;
use kvbm_policies::{Leg, split};
use kvbm_tiers::{BlockKey, Frame, Route, Tier};

use self::background::Flushing;
use self::batch::Batches;
use self::breaker::Breakers;
use self::flow::{Flow, Outline, Waiter};
use self::lane::{Lanes, Limits};
use self::order::Staging;
use self::pace::Paces;
use crate::clock::Clock;
use crate::demand::Demand;
use crate::error::{Error, ErrorKind};
use crate::hash::Chain;
use crate::lease::Lease;
use crate::metrics::Metrics;
use crate::sync::{AtomicUsize, Mutex, MutexGuard};
use crate::table::{Match, RunId, Table, Usage};
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
            breakers: Breakers::new(tuning.breaker_pause),
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
            found: behind.filter(|_| before > 0).into_iter().collect(),
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
}

pub(crate) fn foreign_lease() -> Error {
    Error::new(ErrorKind::Invalid, "the lease is of another manager: give it to the one that made it")
}
