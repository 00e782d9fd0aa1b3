//! Background work: flushing dirty blocks, giving up overdue copies, and other upkeep.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use kvbm_policies::Trigger;
use kvbm_tiers::{Route, Tier};

use super::batch::TaskBatch;
use super::breaker::RoutePassage;
use super::learner::FitThread;
use super::scrub::{ScrubOptions, ScrubProgress};
use super::{Core, spans};
use crate::sync::{AtomicUsize, Mutex};
use crate::table::{Budget, Effects, FlushStep, SharedTable, Table};
use crate::task::{Class, CopyTask};

/// One slot in this many is kept free in a tier whose blocks go down only when they leave.
const HEADROOM: usize = 16;
/// But at most this many.
const MAX_HEADROOM: usize = 4_096;

/// Holds that may look for ancestors or room and send nothing: enough to climb a chain of a hundred
/// thousand blocks.
const MAX_HOLDS_IN_VAIN: usize = 64;

/// What background work goes on with.
#[derive(Debug)]
pub(super) struct UpkeepState {
    pub(super) flushing: FlushState,
    pub(super) audit: AuditPass,
    pub(super) scrubbing: ScrubProgress,
    pub(super) learner: FitThread,
}

impl UpkeepState {
    pub(super) fn new(scrub: ScrubOptions) -> Self {
        Self {
            flushing: FlushState::default(),
            audit: AuditPass::default(),
            scrubbing: ScrubProgress::new(scrub),
            learner: FitThread::default(),
        }
    }
}

/// State of flushing.
#[derive(Debug, Default)]
pub(super) struct FlushState {
    /// Per destination: blocks on their way.
    in_flight: [AtomicUsize; Tier::COUNT],
    /// Per source: dirty blocks still to be flushed since flushing was last due.
    goals: Mutex<[usize; Tier::COUNT]>,
    /// Calls of [`Core::drain`] under way: every block goes down as if it left.
    drains: AtomicUsize,
}

impl FlushState {
    pub(super) fn ended(&self, dest: Tier, blocks: usize) {
        self.in_flight[dest.index()].fetch_sub(blocks, Ordering::AcqRel);
    }
}

/// Wakes the thread that runs [`Core::tick`].
#[derive(Debug, Default)]
pub(super) struct BackgroundWaker(Mutex<Option<SyncSender<()>>>);

impl BackgroundWaker {
    pub(super) fn wake(&self) {
        if let Some(waker) = &*self.0.lock() {
            // If the channel is full, a wake-up is already under way.
            let _ = waker.try_send(());
        }
    }
}

/// How far the background audit has come, and what it found.
#[derive(Debug, Default)]
pub(super) struct AuditPass {
    /// The record to go on with.
    next: AtomicUsize,
    /// Violations found in this pass so far.
    found: AtomicUsize,
    /// Violations found in the last whole pass.
    found_last: AtomicUsize,
}

impl AuditPass {
    /// Audits some records for broken invariants: a million in a minute and a half. Else a table
    /// that has lost count would serve on for days, with fewer slots each hour.
    fn step(&self, table: &SharedTable) {
        let mut violations = Vec::new();
        let from = self.next.load(Ordering::Relaxed) as u32;
        let next = table.lock().audit_some(from, &mut violations, &mut Budget::of_a_hold());
        for violation in &violations {
            tracing::error!(%violation, "the block table has lost count: please report this");
        }
        self.found.fetch_add(violations.len(), Ordering::Relaxed);
        match next {
            Some(next) => self.next.store(next as usize, Ordering::Relaxed),
            None => self.end(),
        }
    }

    fn end(&self) {
        self.next.store(0, Ordering::Relaxed);
        self.found_last.store(self.found.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// The result of a [`Core::drain`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Drained {
    /// By tier: blocks that the tier below should have and lacks.
    pub unflushed: [usize; Tier::COUNT],
    /// Whether copies are still under way.
    pub in_flight: bool,
}

impl Drained {
    /// Whether everything is where it should be, and nothing is under way.
    pub fn is_complete(&self) -> bool {
        !self.in_flight && self.unflushed == [0; Tier::COUNT]
    }

    /// The sum of two cache groups.
    pub(crate) fn and(self, other: Self) -> Self {
        let unflushed =
            Tier::ALL.map(|tier| self.unflushed[tier.index()] + other.unflushed[tier.index()]);
        Self { unflushed, in_flight: self.in_flight || other.in_flight }
    }
}

/// A [`Core::drain`] under way. A panic ends it too: else every used block would go down from then
/// on.
struct DrainState<'a>(&'a AtomicUsize);

impl<'a> DrainState<'a> {
    fn start(drains: &'a AtomicUsize) -> Self {
        drains.fetch_add(1, Ordering::AcqRel);
        Self(drains)
    }
}

impl Drop for DrainState<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Flushes that are sent together, even if it took several holds of the table to plan them, and
/// even if one of these panicked, since the table counts on them.
struct PlannedFlushes<'a> {
    core: &'a Arc<Core>,
    to: Tier,
    tasks: Vec<CopyTask>,
}

impl Drop for PlannedFlushes<'_> {
    fn drop(&mut self) {
        self.core.trace_flushes(self.to, &self.tasks);
        self.core.queue(std::mem::take(&mut self.tasks));
    }
}

/// Between two retries of failed flushes during a drain.
const DRAIN_RETRY: Duration = Duration::from_millis(20);

impl Core {
    /// Blocks of one batch into `to`.
    const fn flush_batch(&self, to: Tier) -> usize {
        if matches!(to, Tier::Object) { self.tuning.segment_blocks } else { self.tuning.max_batch }
    }

    /// Most blocks that may be on their way into `to` as flushes: enough to keep the route busy,
    /// few enough that loads soon get through.
    const fn flush_window(&self, to: Tier) -> usize {
        self.flush_batch(to) * self.tuning.max_concurrent
    }

    /// One round of background work.
    pub fn tick(self: &Arc<Self>) {
        self.give_up_overdue();
        self.give_up_unfenced();
        self.save_again();
        // If a thread panicked in a pump, the work that others had left to it is still to do.
        self.pump();
        self.table.provide_memory();
        self.upkeep.learner.learn(&self.table);
        self.requests.demand.take_up();
        while self.hold(|table, _| table.drop_more()) {}
        self.try_directories();
        while self.hold(Table::reconsider_reopened) {}
        while self.drop_lost_some() {
            while self.hold(|table, _| table.drop_more()) {}
        }
        self.sweep_some();
        for tier in Tier::ALL {
            while self.hold(|table, hold| table.renew_indices(tier, hold)) {}
        }
        for from in Tier::ALL {
            self.flush(from, false);
        }
        self.upkeep.audit.step(&self.table);
        self.scrub_some();
    }

    /// Violations of the table's invariants that the background audit found, in this pass or the
    /// last.
    pub(crate) fn accounting_drift(&self) -> usize {
        self.upkeep
            .audit
            .found
            .load(Ordering::Relaxed)
            .max(self.upkeep.audit.found_last.load(Ordering::Relaxed))
    }

    /// Waits until the learner is idle.
    pub(crate) fn join_learner(&self) {
        self.upkeep.learner.join();
    }

    /// Sets the channel that is woken when background work is due before the next regular
    /// [`tick`](Self::tick).
    pub(crate) fn set_waker(&self, waker: Option<SyncSender<()>>) {
        *self.waker.0.lock() = waker;
    }

    /// Starts to flush `from` if that is due, or if `all`.
    fn flush(self: &Arc<Self>, from: Tier, all: bool) {
        let Some(to) = self.table().flushes_to(from) else { return };
        // Without a route down every copy would fail at once, and be retried without end.
        let legs = || self.sending.executor.legs(Route { from, to });
        if !legs().all(|leg| self.sending.executor.connects(leg)) {
            return;
        }
        let is_blocked = legs().any(|leg| self.health.breakers.is_open(leg));
        self.table().block_flushes(from, is_blocked);
        if is_blocked {
            return self.probe_flush(from, to);
        }
        while self.hold(|table, hold| table.revive_flushes(from, hold)) {}
        self.set_goal(from, all);
        while self.flush_some(from, to) {}
        self.keep_headroom(from, to);
    }

    /// Why blocks go down now. Asked with the table locked: a drain announces itself before it
    /// locks the table to queue its blocks, so none of these is refused as if it were merely used.
    fn trigger(&self) -> Trigger {
        if self.upkeep.flushing.drains.load(Ordering::Acquire) > 0 {
            Trigger::Leaving
        } else {
            Trigger::Used
        }
    }

    /// Sends the block that waits longest, if it is time to test whether the media that it passes
    /// are well again. In a tier whose blocks go down only when they leave, sends the next to
    /// leave, with the ancestors that the tier below lacks.
    fn probe_flush(self: &Arc<Self>, from: Tier, to: Tier) {
        if self.health.pass(Route { from, to }) == RoutePassage::Blocked {
            return;
        }
        // A block whose flush failed may be the only one to test with.
        self.hold(|table, hold| {
            table.end_pauses(from);
            table.revive_flushes(from, hold);
        });
        let turn = self.planning.lock();
        let (mut table, mut hold) = (self.table(), Budget::of_a_hold());
        table.block_flushes(from, false);
        table.take_probe(from, self.trigger(), &mut hold);
        if !table.has_tasks() {
            let slots = headroom(&table, from);
            table.make_headroom(from, slots, 1, &mut hold);
        }
        let mut effects = table.take_effects();
        table.block_flushes(from, true);
        drop(table);
        drop(turn);
        // A probe tests a medium that a copy touches: a block that also lies in DRAM is not read
        // from disk.
        if !effects.tasks.iter().any(|task| task.from.tier == from) {
            let to = if effects.tasks.is_empty() { to } else { Tier::Host };
            self.health.retract_probe(Route { from, to });
        }
        effects.tasks.iter_mut().for_each(|task| task.is_probe = true);
        self.start_flushes(to, effects);
    }

    /// Sends down what leaves `from` next, so that there is room when a request needs it.
    fn keep_headroom(self: &Arc<Self>, from: Tier, to: Tier) {
        let mut is_short = true;
        while is_short {
            let in_flight = self.upkeep.flushing.in_flight[to.index()].load(Ordering::Acquire);
            let copies = self.flush_window(to).saturating_sub(in_flight);
            let turn = self.planning.lock();
            let mut table = self.table();
            let slots = headroom(&table, from);
            is_short = table.make_headroom(from, slots, copies, &mut Budget::of_a_hold());
            let effects = table.take_effects();
            drop(table);
            drop(turn);
            self.start_flushes(to, effects);
        }
    }

    fn start_flushes(self: &Arc<Self>, to: Tier, effects: Effects) {
        self.upkeep.flushing.in_flight[to.index()].fetch_add(effects.tasks.len(), Ordering::AcqRel);
        self.trace_flushes(to, &effects.tasks);
        self.apply(effects);
    }

    /// Without a request: each flush is of a stretch of one chain.
    fn trace_flushes(&self, to: Tier, tasks: &[CopyTask]) {
        let firsts = tasks.iter().filter(|task| task.class == Class::Flush && task.id.block == 0);
        firsts.for_each(|first| {
            self.spans.open(Some(first.id.transfer), spans::of_transfer(Class::Flush, to, None));
        });
    }

    fn set_goal(&self, from: Tier, all: bool) {
        let table = self.table();
        let dirty = table.dirty(from);
        let is_due = all || self.flush_is_due(&table, from);
        drop(table);
        let mut goals = self.upkeep.flushing.goals.lock();
        let goal = &mut goals[from.index()];
        *goal = if is_due { dirty } else { (*goal).min(dirty) };
    }

    /// Starts one batch's worth; false when the goal is reached or the window is full. The next
    /// batch goes out when an earlier one has ended: the route never runs dry in between.
    fn flush_some(self: &Arc<Self>, from: Tier, to: Tier) -> bool {
        let in_flight = &self.upkeep.flushing.in_flight[to.index()];
        let room = self.flush_window(to).saturating_sub(in_flight.load(Ordering::Acquire));
        let goal = self.upkeep.flushing.goals.lock()[from.index()].min(self.flush_batch(to));
        // A full batch later is better than a small one now: in an object store each batch becomes
        // a segment.
        if room < goal {
            return false;
        }
        let mut planned = PlannedFlushes { core: self, to, tasks: Vec::new() };
        let (mut looked_at, mut holds_in_vain, mut has_more) = (0, 0, goal > 0);
        while has_more {
            let _turn = self.planning.lock();
            let mut table = self.table();
            let (so_far, before) = (planned.tasks.len(), table.dirty(from));
            let mut hold = Budget::of_a_hold();
            let step = table.take_flush(from, goal - so_far, self.trigger(), &mut hold);
            let mut effects = table.take_effects();
            // Before others have the table: each end subtracts again.
            in_flight.fetch_add(effects.tasks.len(), Ordering::AcqRel);
            let done = before.saturating_sub(table.dirty(from));
            drop(table);
            planned.tasks.append(&mut effects.tasks);
            self.apply(effects);
            looked_at += done;
            let count = planned.tasks.len();
            let has_moved = done > 0 || count > so_far;
            holds_in_vain = if has_moved { 0 } else { holds_in_vain + 1 };
            // A spent hold says nothing about what is left to do.
            let goes_on = step == FlushStep::HasMore && holds_in_vain < MAX_HOLDS_IN_VAIN;
            has_more = count < goal && (has_moved || goes_on);
        }
        {
            let mut goals = self.upkeep.flushing.goals.lock();
            goals[from.index()] = goals[from.index()].saturating_sub(looked_at);
        }
        // If a rule refused all that it was asked about, there is more to ask about.
        looked_at > 0 || !planned.tasks.is_empty()
    }

    pub(super) fn flush_is_due(&self, table: &Table, from: Tier) -> bool {
        let watermark =
            (f64::from(table.counts(from).total) * self.tuning.dirty_watermark) as usize;
        table.flush_is_due(from, self.tuning.flush_interval_ms, watermark)
    }

    /// Copies all dirty blocks down and waits until nothing is in flight, at most for `limit`.
    /// Tells what did not get there.
    pub fn drain(self: &Arc<Self>, limit: Duration) -> Drained {
        {
            let _under_way = DrainState::start(&self.upkeep.flushing.drains);
            self.drain_until(self.clock.uptime().saturating_add(limit));
        }
        self.drained()
    }

    fn drained(&self) -> Drained {
        let unflushed = Tier::ALL.map(|tier| self.unflushed(tier));
        Drained { unflushed, in_flight: self.is_busy(&self.table()) }
    }

    /// Blocks that the tier below should have and lacks.
    fn unflushed(&self, tier: Tier) -> usize {
        let (mut unflushed, mut from) = (0, Some(0));
        while let Some(slot) = from {
            let (more, next) = self.table().unflushed(tier, slot, &mut Budget::of_a_hold());
            unflushed += more;
            from = next;
        }
        unflushed
    }

    /// A quick check, for frequent calls.
    fn is_drained(&self) -> bool {
        let table = self.table();
        !self.is_busy(&table) && !Tier::ALL.into_iter().any(|tier| table.has_dirty(tier))
    }

    fn is_busy(&self, table: &Table) -> bool {
        self.health.batches.have_tasks()
            || [Tier::Disk, Tier::Object].into_iter().any(|tier| table.is_filling(tier))
    }

    fn drain_until(self: &Arc<Self>, deadline: Duration) {
        // Nothing goes down any more: waiting would not help.
        if self.is_closed() {
            return;
        }
        for tier in Tier::ALL {
            let mut from = Some(0);
            while let Some(slot) = from {
                from = self.hold(|table, hold| table.want_flush_of_all(tier, slot, hold));
            }
        }
        let mut retry_at = Duration::ZERO;
        loop {
            let now = self.clock.uptime();
            if now >= retry_at {
                retry_at = now + DRAIN_RETRY;
                Tier::ALL.into_iter().for_each(|tier| self.table().end_pauses(tier));
                // A drain fills the tiers below faster than anything else.
                self.table.provide_memory();
            }
            Tier::ALL.into_iter().for_each(|tier| self.flush(tier, true));
            if self.is_drained() || self.is_closed() || self.clock.uptime() >= deadline {
                return;
            }
            // Copies end on other threads; a look five times a millisecond costs a drain nothing
            // noticeable.
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn give_up_overdue(self: &Arc<Self>) {
        let now = self.clock.uptime();
        self.give_up_all(self.health.overdue_batches(now), now);
        self.give_up_all(self.health.stuck_batches(now), now);
    }

    fn give_up_all(self: &Arc<Self>, overdue: Vec<Arc<TaskBatch>>, now: Duration) {
        // If handling a completion panicked, its batch is never done, and works on nothing.
        for batch in overdue.into_iter().filter(|batch| batch.is_working()) {
            tracing::error!(from = %batch.route.from, to = %batch.route.to, "copies are overdue: no request waits for them");
            self.health.judge_overdue(&batch, now);
            self.give_up(&batch);
        }
    }
}

/// How many slots are kept free in a tier whose blocks go down only when they leave.
fn headroom(table: &Table, tier: Tier) -> usize {
    (table.counts(tier).total as usize / HEADROOM).clamp(1, MAX_HEADROOM)
}

#[cfg(test)]
mod tests {
    use kvbm_policies::{EvictionKind, Hints};
    use kvbm_tiers::{CopyErrorKind, FramePool};

    use super::*;
    use crate::names::hash::{BlockHash, Chain};
    use crate::scheduler::core_of;
    use crate::table::{RequestInfo, TierSpec};

    fn save(core: &Arc<Core>, tier: Tier, number: u128, tenant: Option<u32>) {
        let hashes = [BlockHash::from_u128(number << 64 | number)];
        let info = RequestInfo {
            hints: Hints { tenant, ..Hints::default() },
            request: None,
            ..RequestInfo::default()
        };
        let mut reserved = core.reserve(tier, Chain::from(&hashes[..]), info);
        let effects = core.table().fill(reserved.transfer, 0, reserved.frames.drain(..));
        core.apply(effects);
        core.abandon(reserved);
    }

    /// The block of the probe was forgotten once there was room for it.
    #[test]
    fn a_probe_that_sends_nothing_still_tells_what_left() {
        let spec = |tier, flush_to| TierSpec {
            pool: FramePool::new(tier, 1),
            policy: EvictionKind::Lru.build(1),
            flush_to,
            admission: None,
        };
        let route = Route::new(Tier::Host, Tier::Disk);
        let core =
            core_of(Table::new([spec(Tier::Host, Some(Tier::Disk)), spec(Tier::Disk, None)]));
        let left: Arc<Mutex<Vec<Tier>>> = Arc::default();
        let heard = Arc::clone(&left);
        core.tell_left_blocks(move |blocks| {
            heard.lock().extend(blocks.iter().map(|block| block.tier));
        });
        save(&core, Tier::Disk, 1, None);
        save(&core, Tier::Host, 2, Some(7));
        core.table().begin_forgetting(7);
        core.health.breakers.failed(route, CopyErrorKind::Unavailable, false, Duration::ZERO);
        core.probe_flush(Tier::Host, Tier::Disk);
        assert_eq!(*left.lock(), [Tier::Disk]);
    }
}
