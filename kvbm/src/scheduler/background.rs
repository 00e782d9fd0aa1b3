//! What nobody asks for but must happen: flushing dirty blocks, and writing off copies that never end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvbm_policies::Moment;
use kvbm_tiers::Tier;

use super::Core;
use crate::sync::{AtomicUsize, Mutex};
use crate::table::{FlushRun, Headroom, Table};

/// Where blocks go down only when they leave, one slot in so many is kept free.
const HEADROOM: usize = 16;
/// No more than so many.
const MOST_HEADROOM: usize = 4_096;

/// State of flushing.
#[derive(Debug, Default)]
pub(super) struct Flushing {
    /// Per destination: blocks on their way.
    in_flight: [AtomicUsize; Tier::COUNT],
    /// Per source: dirty blocks still to be flushed since flushing was last due.
    goals: Mutex<[usize; Tier::COUNT]>,
    /// Calls of [`Core::drain`] under way: everything goes down as if it left.
    drains: AtomicUsize,
    /// Wakes whoever runs [`Core::tick`].
    waker: Mutex<Option<std::sync::mpsc::SyncSender<()>>>,
}

impl Flushing {
    pub(super) fn ended(&self, dest: Tier, blocks: usize) {
        self.in_flight[dest.index()].fetch_sub(blocks, Ordering::AcqRel);
        self.wake();
    }

    pub(super) fn wake(&self) {
        if let Some(waker) = &*self.waker.lock() {
            // A full channel means that a wake-up is under way already.
            let _ = waker.try_send(());
        }
    }
}

impl Core {
    /// Blocks of one batch into `to`.
    const fn flush_batch(&self, to: Tier) -> usize {
        if matches!(to, Tier::Object) { self.tuning.segment_blocks } else { self.tuning.max_batch }
    }

    /// Most blocks that may be on their way into `to` to be flushed: enough to keep the route busy, few enough
    /// that loads soon get through.
    const fn flush_window(&self, to: Tier) -> usize {
        self.flush_batch(to) * self.tuning.max_concurrent
    }

    /// One round of background work.
    pub fn tick(self: &Arc<Self>) {
        self.write_off_overdue();
        let upkeep = self.table().upkeep();
        upkeep.into_iter().for_each(|work| work());
        for from in Tier::ALL {
            self.flush(from, false);
        }
    }

    /// Sets who is woken when background work is due before the next regular [`tick`](Self::tick).
    pub(crate) fn set_waker(&self, waker: Option<std::sync::mpsc::SyncSender<()>>) {
        *self.flushing.waker.lock() = waker;
    }

    /// Starts to flush `from` if that is due, or in any case if `all`.
    fn flush(self: &Arc<Self>, from: Tier, all: bool) {
        let Some(to) = self.table().flushes_to(from) else { return };
        if !self.breakers.can_write(to) {
            let waived = self.table().waive_all(from);
            self.metrics.flushes_waived(from, waived);
            return self.keep_headroom(from, to, false);
        }
        self.set_goal(from, all);
        let moment =
            if self.flushing.drains.load(Ordering::Acquire) > 0 { Moment::Leaving } else { Moment::Used };
        while self.flush_some(from, to, moment) {}
        self.keep_headroom(from, to, true);
    }

    /// Sends down what leaves `from` next, so that there is room when somebody needs it.
    fn keep_headroom(self: &Arc<Self>, from: Tier, to: Tier, can_write: bool) {
        let in_flight = self.flushing.in_flight[to.index()].load(Ordering::Acquire);
        let copies = self.flush_window(to).saturating_sub(in_flight);
        let mut table = self.table();
        let slots = (table.counts(from).total as usize / HEADROOM).clamp(1, MOST_HEADROOM);
        let Headroom { runs, dropped } = table.make_headroom(from, slots, copies, can_write);
        drop(table);
        self.metrics.flushes_waived(from, dropped);
        self.start_flushes(to, runs);
    }

    fn start_flushes(self: &Arc<Self>, to: Tier, runs: Vec<FlushRun>) {
        let blocks = runs.iter().map(|run| run.copies.len()).sum();
        self.flushing.in_flight[to.index()].fetch_add(blocks, Ordering::AcqRel);
        runs.into_iter().for_each(|run| self.flush_run(to, run));
    }

    fn set_goal(&self, from: Tier, all: bool) {
        let table = self.table();
        let dirty = table.dirty(from);
        let is_due = all || self.flush_is_due(&table, from);
        drop(table);
        let mut goals = self.flushing.goals.lock();
        let goal = &mut goals[from.index()];
        *goal = if is_due { dirty } else { (*goal).min(dirty) };
    }

    /// Starts one batch's worth; false when the goal is reached or the window is full. The next batch goes out
    /// when one of those before it has ended: the route never runs dry in between.
    fn flush_some(self: &Arc<Self>, from: Tier, to: Tier, moment: Moment) -> bool {
        let in_flight = &self.flushing.in_flight[to.index()];
        let room = self.flush_window(to).saturating_sub(in_flight.load(Ordering::Acquire));
        let goal = self.flushing.goals.lock()[from.index()].min(self.flush_batch(to));
        if room < goal {
            return false;
        }
        let before = self.table().dirty(from);
        let runs = self.table().take_flush(from, goal, moment);
        let after = self.table().dirty(from);
        {
            let mut goals = self.flushing.goals.lock();
            goals[from.index()] = goals[from.index()].saturating_sub(before.saturating_sub(after));
        }
        let started = !runs.is_empty();
        self.start_flushes(to, runs);
        started
    }

    pub(super) fn flush_is_due(&self, table: &Table, from: Tier) -> bool {
        let watermark = (f64::from(table.counts(from).total) * self.tuning.dirty_watermark) as usize;
        table.flush_is_due(from, self.tuning.flush_interval_ms, watermark)
    }

    /// Copies everything dirty down and waits until nothing is in flight, at most for `limit`. True if it
    /// got there.
    pub fn drain(self: &Arc<Self>, limit: Duration) -> bool {
        self.flushing.drains.fetch_add(1, Ordering::AcqRel);
        let is_drained = self.drain_until(Instant::now() + limit);
        self.flushing.drains.fetch_sub(1, Ordering::AcqRel);
        is_drained
    }

    fn drain_until(self: &Arc<Self>, deadline: Instant) -> bool {
        Tier::ALL
            .into_iter()
            .filter(|&tier| self.table().has(tier))
            .for_each(|tier| self.table().ask_about_all(tier));
        loop {
            Tier::ALL.into_iter().for_each(|tier| self.flush(tier, true));
            let is_dirty =
                |tier: &Tier| self.table().flushes_to(*tier).is_some() && self.table().dirty(*tier) > 0;
            let awaits = |tier: &Tier| self.table().awaits_blocks(*tier);
            let is_idle = self.batches.is_empty() && ![Tier::Disk, Tier::Object].iter().any(awaits);
            if is_idle && !Tier::ALL.iter().any(is_dirty) {
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn write_off_overdue(self: &Arc<Self>) {
        for batch in self.batches.overdue(|route| self.tuning.limit(route)) {
            let orders = batch.write_off(|order| self.table().hold_source(order.op().from));
            for order in orders {
                self.metrics.lost(batch.route);
                self.write_off(order);
                self.order_left(&batch);
            }
        }
    }
}
