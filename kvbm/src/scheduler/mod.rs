//! The scheduler: it takes copy tasks to the backends, in the order of their urgency, and judges
//! the media by their progress. The table decides what is resident where.
//!
//! There is one kind of work: blocks of a chain go from where they are to a tier, or to slots of
//! the engine's own. Loading, saving, flushing and prefetching differ in where the blocks come from
//! and in the [`Class`](crate::task::Class) that decides which copies go first. The table plans a
//! transfer and gives out tasks; the results of their copies return to it.
//!
//! | module | holds |
//! |---|---|
//! | `send` | how a transfer is planned and sent: which blocks may go now |
//! | `engine` | transfers between the tiers and an engine's own memory, and what they wait for |
//! | `queue` | queues per route and class; what goes next |
//! | `dispatch` | what follows from a change of the table; copies are sent, in one leg or two |
//! | `batch` | what the media work on; which copies are overdue |
//! | `landing` | what happens when a copy ends, and a transfer with it |
//! | `health` | judges the media by their progress |
//! | `breaker` | media that are away, full or hanging are left alone for a while |
//! | `directories` | a failing one of several directories of the disk tier is left alone |
//! | `staging` | DRAM slots through which blocks bounce |
//! | `background` | flushing, time-outs and other upkeep |
//! | `errand` | copies that no request asked for, overdue like all others |
//! | `scrub` | which idle blocks are verified, and how fast |
//! | `learner` | fits of policies, on a thread of their own |
//! | `reset` | closing a namespace, and forgetting a tenant |
//! | `observe` | what it reports of itself |
//! | `spans` | how long each step takes, for tracers |
//!
//! `docs/architecture.md` lists the locks and their order. Callbacks of backends hold the table for
//! 256 results at a time, and never wait for I/O.

mod background;
mod batch;
mod breaker;
mod directories;
mod dispatch;
mod engine;
mod errand;
mod health;
mod landing;
mod learner;
mod observe;
mod queue;
mod reset;
mod scrub;
mod send;
mod spans;
mod staging;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvbm_policies::{Leg, split};
use kvbm_tiers::object::{Discovery, FoundBlock};
use kvbm_tiers::{Frame, Route, SlotId, Tier, TierEpoch};
use tokio::sync::Notify;

use self::background::{BackgroundWaker, UpkeepState};
use self::batch::BatchesInFlight;
use self::breaker::Breakers;
use self::directories::DiskDirectories;
use self::dispatch::SendState;
use self::engine::EngineTransfers;
use self::health::{MediaHealth, TierPaces};
use self::observe::RequestLog;
use self::queue::{QueueLimits, RouteQueues};
use self::spans::TransferSpans;
use self::staging::StagingSlots;
use crate::api::layers::LayeredSaves;
use crate::api::lease::Lease;
use crate::api::transfer::{Transfer, Transferred};
use crate::clock::Clock;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::Metrics;
use crate::names::hash::Chain;
use crate::observe::requests::has_limit;
use crate::sync::{AtomicUsize, Mutex};
use crate::table::{
    Budget, LeftBlock, Match, Pins, RequestInfo, Reserved, SharedTable, Table, TableGuard,
};
use crate::task::TransferId;

pub use self::background::Drained;
pub use self::dispatch::Executor;
pub(crate) use self::engine::EndsLayers;
pub use self::engine::{JoinedTransfer, LoadInto, SaveFrom};
pub use self::scrub::ScrubOptions;
pub use self::staging::StagingCounts;

/// Filled blocks that are made resident, or given back, at a time: some 100 µs of the table.
const PUBLISHED: usize = 256;

/// Limits and times of the scheduler.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// Batches in flight per route.
    pub max_concurrent: usize,
    /// Blocks in a batch.
    pub max_batch: usize,
    /// Blocks in a batch to the object tier, and, if they are more than in others, from it.
    pub segment_blocks: usize,
    /// Blocks that may wait per route before more of the same are refused.
    pub queue_blocks: usize,
    /// How long a medium may complete nothing before its copies are overdue.
    pub timeout: Duration,
    /// The same for the object tier, if that is longer: its client still tries until then.
    pub object_timeout: Duration,
    /// How long a failed medium is left alone before one copy tests it. Doubles up to 64-fold while
    /// that fails.
    pub breaker_pause: Duration,
    /// The longest time from a block's arrival to its flush, in milliseconds of the clock.
    pub flush_interval_ms: u64,
    /// Share of a tier that may be dirty before flushing starts at once.
    pub dirty_watermark: f64,
    /// Seconds that the engine takes to compute a block; `None`: unknown, so all held blocks are
    /// loaded.
    pub prefill_block_s: Option<f64>,
}

impl Tuning {
    /// How long the medium of `route` may complete nothing.
    fn limit(&self, route: Route) -> Duration {
        let is_object = route.touches(Tier::Object);
        if is_object { self.timeout.max(self.object_timeout) } else { self.timeout }
    }
}

type OnLeft = Box<dyn Fn(&[LeftBlock]) + Send + Sync>;

/// Everything that moves blocks. Shared by the manager, its leases and the callbacks of its
/// backends.
pub struct Core {
    table: Arc<SharedTable>,
    /// The turn to plan, flushes included. A plan of many blocks goes in steps, between which
    /// others use the table; two plans of one chain would split its blocks between them.
    planning: Mutex<()>,
    /// Sends copies to the media.
    sending: SendState,
    /// Judges the media.
    health: MediaHealth,
    /// Keeps up what no request waits for.
    upkeep: UpkeepState,
    /// Transfers of an engine's slots.
    engine: EngineTransfers,
    requests: RequestLog,
    waker: Arc<BackgroundWaker>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    tuning: Tuning,
    /// Called with blocks that leave a tier.
    on_left: OnceLock<OnLeft>,
    spans: TransferSpans,
    /// Wakes who waits for blocks to land.
    landed: Notify,
    layered_saves: LayeredSaves,
    /// 1 when no more work is taken.
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
    /// Handles to the DRAM slots through which blocks bounce.
    pub staging: Vec<Frame>,
    /// For each directory of the disk tier, if there are several: the handle to a slot that holds
    /// no block.
    pub trials: Vec<Frame>,
    /// Which idle blocks are verified, and how fast.
    pub scrub: ScrubOptions,
    /// Time for policies and flushing.
    pub clock: Arc<dyn Clock>,
    /// Where it counts.
    pub metrics: Metrics,
    /// Limits.
    pub tuning: Tuning,
}

impl Core {
    /// Puts the parts together. Nothing is copied until a call asks for it.
    pub fn new(parts: Parts) -> Arc<Self> {
        let Parts { table, executor, staging, trials, scrub, clock, metrics, tuning } = parts;
        let trials: Vec<_> = trials.into_iter().zip(table.directories(Tier::Disk)).collect();
        let largest = Tier::ALL
            .iter()
            .map(|&tier| table.counts(tier).total)
            .filter(|&slots| has_limit(slots))
            .max();
        let is_device_of_engine = table.counts(Tier::Device).total == 0;
        let journals = Tier::ALL.map(|tier| table.journal(tier).cloned());
        let limits = QueueLimits {
            batches: tuning.max_concurrent,
            batch_blocks: tuning.max_batch,
            segment_blocks: tuning.segment_blocks,
        };
        let table = Arc::new(SharedTable::new(table, Arc::clone(&clock)));
        // A request may come before the first round of background work.
        table.provide_memory();
        let (executor, waker) = (Arc::new(executor), Arc::<BackgroundWaker>::default());
        let health = MediaHealth {
            batches: BatchesInFlight::default(),
            breakers: Breakers::new(tuning.breaker_pause),
            directories: DiskDirectories::new(trials, tuning.breaker_pause),
            paces: TierPaces::default(),
            executor: Arc::clone(&executor),
            table: Arc::clone(&table),
            waker: Arc::clone(&waker),
            clock: Arc::clone(&clock),
            metrics: metrics.clone(),
            tuning: tuning.clone(),
        };
        Arc::new(Self {
            table,
            planning: Mutex::new(()),
            sending: SendState {
                queues: Mutex::new(RouteQueues::new(limits)),
                executor,
                journals,
                staging: Mutex::new(StagingSlots::new(staging)),
                pumps: AtomicUsize::new(0),
                with_media: Arc::default(),
            },
            health,
            upkeep: UpkeepState::new(scrub),
            engine: EngineTransfers::new(is_device_of_engine),
            requests: RequestLog::of_tiers(largest.unwrap_or(0)),
            waker,
            clock,
            metrics,
            tuning,
            on_left: OnceLock::new(),
            spans: TransferSpans::default(),
            landed: Notify::new(),
            layered_saves: LayeredSaves::default(),
            closed: AtomicUsize::new(0),
        })
    }

    /// The locked table, with its clock set.
    pub fn table(&self) -> TableGuard<'_> {
        self.table.lock()
    }

    /// Works on the table for one hold of its lock, and does what follows. Others have the table
    /// before the next hold.
    fn hold<T>(self: &Arc<Self>, work: impl FnOnce(&mut Table, &mut Budget) -> T) -> T {
        let mut table = self.table();
        let done = work(&mut table, &mut Budget::of_a_hold());
        let effects = table.take_effects();
        drop(table);
        self.apply(effects);
        done
    }

    /// Evicts up to `blocks` blocks of `tier`, in the order of its policy; returns how many.
    pub(crate) fn evict(self: &Arc<Self>, tier: Tier, blocks: usize) -> usize {
        let (mut evicted, mut has_more) = (0, self.table().has(tier));
        while has_more {
            has_more = self.hold(|table, hold| {
                evicted += table.evict_some(tier, blocks - evicted, hold);
                evicted < blocks && hold.is_spent()
            });
        }
        evicted
    }

    /// Calls `on_left` with blocks that leave a tier, soon after, with the table unlocked.
    pub(crate) fn tell_left_blocks(&self, on_left: impl Fn(&[LeftBlock]) + Send + Sync + 'static) {
        self.on_left.get_or_init(|| Box::new(on_left));
        self.table().note_left_blocks();
    }

    /// Lets a chain leave, named by its last block: see [`Table::let_go`].
    pub(crate) fn let_go(self: &Arc<Self>, tier: Tier, last: Chain<'_>, go_unflushed: bool) {
        let mut next = self.hold(|table, _| table.has(tier).then(|| table.enter(last).key(0)));
        while let Some(block) = next {
            next = self.hold(|table, hold| table.let_go(tier, block, go_unflushed, hold));
        }
    }

    /// Checks that a lease can be used.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if it is of another manager; [`ErrorKind::Stale`] if it is from
    /// before a reset.
    pub(crate) fn check_lease(&self, lease: &Lease) -> Result<()> {
        if !lease.is_of(&self.table) {
            return Err(foreign_lease());
        }
        if self.table().is_present(lease.pins()) { Ok(()) } else { Err(Error::stale()) }
    }

    /// What engines save layer by layer now.
    pub(crate) const fn layered_saves(&self) -> &LayeredSaves {
        &self.layered_saves
    }

    /// Now, by the clock of policies and flushing.
    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Wakes background work.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// The counters.
    pub const fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Occupancy of the staging slots.
    pub fn staging(&self) -> StagingCounts {
        self.sending.staging.lock().counts()
    }

    /// Copies on a route that are overdue now. Each holds the slot that it writes, and pins the one
    /// that it reads with its ancestors.
    pub fn overdue(&self, route: Route) -> u64 {
        self.metrics.overdue_now(route)
    }

    /// Blocks that wait on a route, and batches in flight there.
    pub(crate) fn traffic(&self, route: Route) -> (usize, usize) {
        let queues = self.sending.queues.lock();
        (queues.waiting(route), queues.in_flight(route))
    }

    /// Pins the leading blocks of `chain` in every tier that holds any, and counts as their use.
    pub fn lease(&self, chain: Chain<'_>, info: RequestInfo) -> Lease {
        if info.has_asked {
            let mut table = self.table();
            let chain = table.enter(chain);
            let mut pins = table.lease(chain, info);
            drop(table);
            self.judge_lease(&mut pins);
            return Lease::new(Arc::clone(&self.table), pins);
        }
        let span = spans::of_match(&info, chain.len());
        let mut table = self.table();
        let chain = table.enter(chain);
        let mut pins = table.lease(chain, info);
        let mut found = *pins.held();
        let in_host = (info.from_peer as usize).min(chain.len()).max(found.blocks(Tier::Host));
        found.set(Tier::Host, in_host as u32);
        let miss = table.miss(chain, &found);
        drop(table);
        spans::found(&span, &found);
        self.metrics.requested(chain.len(), &found);
        if let Some(miss) = miss {
            self.metrics.missed(chain.len() - found.longest(), miss);
        }
        // With the table unlocked: of 65,536 blocks this takes most of a lease's time
        // (docs/policies.md).
        self.requests.note(&info, chain, &found, miss, self.clock.now_ms());
        self.judge_lease(&mut pins);
        Lease::new(Arc::clone(&self.table), pins)
    }

    /// Says how much of a lease is worth loading.
    fn judge_lease(&self, pins: &mut Pins) {
        if let Some(blocks) = self.worth_loading(pins.held()) {
            pins.judge(blocks);
        }
    }

    /// A lease of what each tier holds of a prefix of a leased chain, for a part of the lease's
    /// work.
    pub(crate) fn lease_beginning(&self, of: &Lease, chain: Chain<'_>) -> Lease {
        let mut table = self.table();
        let chain = table.enter(chain);
        let pins = table.pin_beginning(of.pins(), chain);
        drop(table);
        Lease::new(Arc::clone(&self.table), pins)
    }

    /// How many leading blocks of `chain` each tier holds, and how many are worth loading. It has
    /// no side effect.
    pub fn matches(&self, chain: Chain<'_>) -> Match {
        let mut held = self.table().matches(chain);
        if let Some(blocks) = self.worth_loading(&held) {
            held.judge(blocks);
        }
        held
    }

    /// `None` if the engine's pace is unknown.
    fn worth_loading(&self, held: &Match) -> Option<u32> {
        let prefill_s = self.tuning.prefill_block_s?;
        let now = self.clock.uptime();
        let leg = |(tier, range): (Tier, Range<usize>)| Leg {
            blocks: range.len() as u32,
            block_s: if tier == Tier::Device {
                Some(0.0)
            } else {
                self.health.paces.block_s(tier, now)
            },
        };
        Some(split(held.plan().map(leg), prefill_s))
    }

    /// The share of recently requested blocks that an LRU tier of `capacity` blocks would have
    /// held: 0 to 1.
    pub fn estimated_hit_rate(&self, capacity: u32) -> f64 {
        self.requests.demand.hit_rate(capacity)
    }

    /// Takes slots of `to` for what it lacks of `chain`, for an engine to fill.
    pub fn reserve(self: &Arc<Self>, to: Tier, chain: Chain<'_>, info: RequestInfo) -> Reserved {
        let _turn = self.planning.lock();
        let mut plan = self.table().plan_filling(to, chain, info);
        self.take_slots(&mut plan, None);
        self.table().reserved(&mut plan)
    }

    /// Makes blocks of an epoch resident that others have stored in the object tier: see
    /// [`Table::take_in`].
    pub fn take_in(
        self: &Arc<Self>,
        epoch: TierEpoch,
        found: &[FoundBlock],
        stand_for: &mut dyn FnMut(usize, SlotId),
    ) -> Vec<Discovery> {
        // Plans count on what is missing.
        let turn = self.planning.lock();
        let mut table = self.table();
        if table.naming().epoch != epoch {
            return vec![Discovery::Declined; found.len()];
        }
        let intakes = table.take_in(Tier::Object, found, stand_for);
        let effects = table.take_effects();
        drop(table);
        drop(turn);
        self.apply(effects);
        intakes
    }

    /// Waits until the index of `tier` knows what has left it, as long as it would wait for a copy
    /// to the tier. False: it does not know yet, and slots must not be written.
    pub(crate) fn removals_are_noted(&self, tier: Tier) -> bool {
        let (told, noted) = std::sync::mpsc::sync_channel(1);
        self.after_removals(tier, move || _ = told.send(()));
        noted.recv_timeout(self.tuning.timeout).is_ok()
    }

    /// Does `job` once the index of `tier`, if it has one, knows what has left it.
    pub(crate) fn after_removals(&self, tier: Tier, job: impl FnOnce() + Send + 'static) {
        match &self.sending.journals[tier.index()] {
            Some(journal) => journal.after_removals(job),
            None => job(),
        }
    }

    /// Makes the first `filled` of the reserved blocks resident, as the last part of their chain.
    /// The others' slots are given back.
    pub fn publish(
        self: &Arc<Self>,
        mut reserved: Reserved,
        filled: usize,
        lease: Lease,
    ) -> Transfer<Transferred> {
        if let Err(error) = self.check_lease(&lease) {
            self.abandon(reserved);
            return Transfer::failed(error);
        }
        let filled = filled.min(reserved.frames.len());
        let (reply, transfer) = Transfer::replied(&self.table, Transferred::new);
        let mut first = 0;
        while first < filled {
            let step = PUBLISHED.min(filled - first);
            let effects =
                self.table().fill(reserved.transfer, first, reserved.frames.drain(..step));
            self.apply(effects);
            first += step;
        }
        self.give_back(&mut reserved, filled);
        let mut table = self.table();
        table.finish_filling(reserved.filled(filled), lease.into_pins(), reply);
        let effects = table.take_effects();
        drop(table);
        self.apply(effects);
        transfer
    }

    /// Gives back reserved slots that will not be filled, and tells what waits for their blocks.
    pub fn abandon(self: &Arc<Self>, mut reserved: Reserved) {
        self.give_back(&mut reserved, 0);
        let mut table = self.table();
        table.end_plan(reserved.transfer);
        let effects = table.take_effects();
        drop(table);
        self.apply(effects);
    }

    fn give_back(self: &Arc<Self>, reserved: &mut Reserved, first: usize) {
        self.regain(reserved.transfer, first, std::mem::take(&mut reserved.frames));
    }

    /// Reserved slots come back unfilled: the `first`-th of their transfer and those behind it.
    pub(crate) fn regain(
        self: &Arc<Self>,
        transfer: TransferId,
        mut first: usize,
        mut frames: Vec<Frame>,
    ) {
        while !frames.is_empty() {
            let step = PUBLISHED.min(frames.len());
            let effects = self.table().abandon(transfer, first, frames.drain(..step));
            self.apply(effects);
            first += step;
        }
    }

    /// Reserved slots will not be filled, and something may still write them: they are lost until
    /// they [come back](Self::regain).
    pub(crate) fn lose(self: &Arc<Self>, transfer: TransferId, slots: Range<usize>) {
        let effects = self.table().lose(transfer, slots);
        self.apply(effects);
    }

    /// Ends everything: queued copies are dropped, waiting callers are answered, and no more work
    /// is taken. Copies that a medium works on end by themselves and keep their slots until then.
    pub fn close(self: &Arc<Self>) {
        // First: code that queues or starts a batch checks this afterwards (`dispatch.rs`). So
        // nothing slips by.
        self.closed.store(1, Ordering::Release);
        self.drop_waiting();
        self.health.batches.all().iter().for_each(|batch| self.give_up(batch));
        self.table().close();
        self.end_transfers();
        self.end_saves_again();
    }

    /// Drops tasks that wait for their turn or for an engine.
    fn drop_waiting(self: &Arc<Self>) {
        let waiting = self.sending.queues.lock().take_all();
        self.drop_tasks(waiting);
        let held = self.engine.orders.lock().take_all();
        self.drop_held(held);
    }

    /// Ends the transfers of past namespaces, or all when the table is closed. One at a time: there
    /// may be thousands, and others need the table.
    fn end_transfers(self: &Arc<Self>) {
        let mut from = Some(0);
        while let Some(place) = from {
            from = self.hold(|table, hold| table.end_next(place, hold));
        }
    }

    /// Waits until no backend has any copy of ours, at most for `limit`. Returns how many copies
    /// are left.
    pub fn wait_for_media(&self, limit: Duration) -> u64 {
        let deadline = self.clock.uptime().saturating_add(limit);
        while Arc::strong_count(&self.sending.with_media) > 1 && self.clock.uptime() < deadline {
            // As often as a drain looks: a close is in no hurry.
            std::thread::sleep(Duration::from_micros(200));
        }
        let held = Arc::strong_count(&self.sending.with_media) - 1;
        self.overdue_in_all().max(held as u64)
    }

    /// What is kept while something copies that no backend knows of: a close waits for it.
    pub(crate) fn with_media(&self) -> Arc<()> {
        Arc::clone(&self.sending.with_media)
    }

    /// Copies that are overdue now, on all routes.
    pub(crate) fn overdue_in_all(&self) -> u64 {
        Route::all().map(|route| self.overdue(route)).sum()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) > 0
    }
}

fn foreign_lease() -> Error {
    Error::new(
        ErrorKind::Invalid,
        "the lease is of another manager: give it to the one that made it",
    )
}

/// A core over a table, without backends.
#[cfg(test)]
fn core_of(table: Table) -> Arc<Core> {
    let limit = Duration::from_mins(1);
    let registry = prometheus::Registry::new();
    Core::new(Parts {
        table,
        executor: Executor::default(),
        staging: Vec::new(),
        trials: Vec::new(),
        scrub: ScrubOptions::default(),
        clock: Arc::new(crate::clock::ManualClock::default()),
        metrics: Metrics::new(&registry, 64, 1).expect("a registry of its own"),
        tuning: Tuning {
            max_concurrent: 1,
            max_batch: 8,
            segment_blocks: 8,
            queue_blocks: 8,
            timeout: limit,
            object_timeout: limit,
            breaker_pause: Duration::ZERO,
            flush_interval_ms: 1_000,
            dirty_watermark: 1.0,
            prefill_block_s: None,
        },
    })
}
