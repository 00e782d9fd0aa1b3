//! The landing of copies: it has media judged, returns slots, tells the table, and answers those who
//! wait for it.

use std::pin::pin;
use std::sync::Arc;

use kvbm_tiers::{BlockKey, Completion, CopyError, CopyErrorKind, Tier};

use super::Core;
use super::batch::{ReportedTasks, TaskBatch};
use super::dispatch::RoutedTask;
use super::engine::EndedOrder;
use crate::names::hash::Chain;
use crate::table::{Table, TransferEnd};
use crate::task::{Class, Defect, Outcome, TaskResult};

/// Copies that land at a time, of those that ended together.
const MAX_LANDED: usize = 256;

impl Core {
    /// A backend reports the ends of copies.
    pub(super) fn copies_ended(self: &Arc<Self>, batch: &TaskBatch, completions: Vec<Completion>) {
        let now = self.clock.uptime();
        self.health.batches.progressed(batch, now);
        let ReportedTasks { mut tasks, overdue, twice } = batch.take(completions);
        if !twice.is_empty() {
            tracing::error!(route = ?(batch.route.from, batch.route.to), ops = ?twice, "a backend reported copies twice");
        }
        self.health.judge(batch, &tasks, now);
        let left = tasks.len();
        let goes_on = |(task, result): &mut (RoutedTask, Result<(), _>)| {
            result.is_ok() && task.has_second_leg()
        };
        let going_on = tasks.extract_if(.., goes_on);
        let going_on = going_on.map(|(task, _)| RoutedTask { halfway: true, ..task }).collect();
        self.came_back(batch, overdue);
        self.free_held(tasks.iter_mut().map(|(task, _)| task));
        self.land_all(tasks.iter().map(|(task, result)| {
            let broken = result.as_ref().err().map(|error| why_broken(task, error));
            task.task.ended(broken.unwrap_or(Outcome::Arrived))
        }));
        drop(tasks);
        self.tasks_left(batch, left, going_on);
    }

    /// Counts `tasks` of a batch's copies as ended or given up. Those `going_on` need not wait for
    /// the first legs of the batch's other blocks.
    fn tasks_left(self: &Arc<Self>, batch: &TaskBatch, tasks: usize, going_on: Vec<RoutedTask>) {
        let is_over = batch.tasks_ended(tasks);
        if is_over {
            self.health.batches.end(batch);
        }
        if !is_over && going_on.is_empty() {
            return;
        }
        let mut queues = self.sending.queues.lock();
        going_on.into_iter().for_each(|task| queues.push(task));
        if is_over {
            queues.ended(batch.route, batch.class);
        }
        drop(queues);
        self.pump();
    }

    /// Frees what tasks hold that no medium has any more.
    fn free_held<'a>(&self, tasks: impl Iterator<Item = &'a mut RoutedTask>) {
        let held = tasks.filter_map(|task| {
            task.order = None;
            task.take_staging()
        });
        let frames: Vec<_> = held.collect();
        if !frames.is_empty() {
            self.sending.staging.lock().give_back(frames);
        }
    }

    /// Drops tasks before their first or second leg.
    pub(super) fn drop_tasks(self: &Arc<Self>, mut tasks: Vec<RoutedTask>) {
        if !tasks.is_empty() {
            self.free_held(tasks.iter_mut());
            self.land_all(tasks.iter().map(|&RoutedTask { ref task, halfway, .. }| {
                task.ended(Outcome::Failed { halfway, defect: None })
            }));
        }
    }

    /// A prompt of thousands of blocks may end at once: others get the table in between steps.
    fn land_all(self: &Arc<Self>, mut results: impl ExactSizeIterator<Item = TaskResult>) {
        while results.len() > 0 {
            self.land(results.by_ref().take(MAX_LANDED));
        }
    }

    /// Gives the batch's copies up. They keep what the medium may still touch.
    pub(super) fn give_up(self: &Arc<Self>, batch: &TaskBatch) {
        if let Some(errand) = &batch.errand {
            return self.give_up_errand(batch, errand);
        }
        let now = self.clock.uptime();
        let (effects, overdue) = batch.give_up(|tasks| {
            let staged = tasks.iter().filter(|task| task.has_staging()).count();
            self.sending.staging.lock().lose(staged);
            let results = tasks.iter().map(|task| {
                task.task.ended(Outcome::Overdue { writes_destination: !task.has_second_leg() })
            });
            let results: Vec<_> = results.collect();
            let land = |some: &[TaskResult]| self.table.lock().land(some.iter().copied(), now);
            (results.chunks(MAX_LANDED).map(land).collect::<Vec<_>>(), tasks.len())
        });
        if overdue == 0 {
            return;
        }
        self.metrics.went_overdue(batch.route, overdue as u64);
        effects.into_iter().for_each(|effects| self.apply(effects));
        self.tasks_left(batch, overdue, Vec::new());
    }

    /// Overdue copies ended after all: their slots are free, and their medium moves.
    fn came_back(self: &Arc<Self>, batch: &TaskBatch, overdue: Vec<RoutedTask>) {
        if overdue.is_empty() {
            return;
        }
        overdue.iter().for_each(|RoutedTask { task, .. }| {
            self.health.directory_came_back([task.from, task.to]);
        });
        self.metrics.came_back(batch.route, overdue.len() as u64);
        self.land_all(overdue.iter().map(|overdue| overdue.task.ended(Outcome::Returned)));
        let mut staging = self.sending.staging.lock();
        overdue
            .into_iter()
            .filter_map(|mut overdue| overdue.take_staging())
            .for_each(|frame| staging.regain(frame));
        drop(staging);
        // This neither closes the breaker nor counts as a failure: only a probe tells whether the
        // medium is well.
        self.health.breakers.revived(batch.route, self.clock.uptime());
        self.waker.wake();
        self.pump();
    }

    /// Tells the table the results of copies, and does what follows.
    fn land(self: &Arc<Self>, results: impl Iterator<Item = TaskResult>) {
        let now = self.clock.uptime();
        let mut table = self.table.lock();
        let effects = table.land(results, now);
        // Checked while the lock is held anyway: arrivals may have made a tier dirty enough.
        let is_due = table.is_dropping()
            || Tier::ALL.into_iter().any(|tier| self.flush_is_due(&table, tier));
        drop(table);
        self.apply(effects);
        if is_due {
            self.waker.wake();
        }
    }

    /// Answers the caller of a transfer.
    pub(super) fn transfer_ended(self: &Arc<Self>, ended: TransferEnd) {
        if ended.class == Class::Flush {
            self.upkeep.flushing.ended(ended.to, ended.blocks);
            self.waker.wake();
        }
        self.spans.close(&ended);
        let id = ended.id;
        let of_engine = self.engine.orders.lock().end(id);
        let has_waited = of_engine.as_ref().is_some_and(|order| order.waited);
        let source = ended.source.filter(|_| ended.class == Class::Load && !has_waited);
        if let (Some(source), Some(took)) = (source, ended.took) {
            self.health.paces.learn(source, ended.copied, took, self.clock.uptime());
        }
        let Some(EndedOrder { held, part_of, .. }) = of_engine else { return ended.report() };
        self.metrics.duplicated(ended.duplicates);
        // Before the reply: a caller that hears of the end may count on its slots being free.
        self.drop_held(held);
        ended.report();
        // The answer is there before the engine polls its name.
        match part_of {
            Some(joined) => drop(joined),
            None => self.engine.completions.note(id),
        }
    }

    /// Waits until something holds, which is looked at again whenever blocks may have landed.
    pub(crate) async fn until_landed(&self, holds: impl Fn() -> bool) {
        let mut landed = pin!(self.landed.notified());
        loop {
            // What lands from here on is heard.
            landed.as_mut().enable();
            if holds() {
                return;
            }
            landed.as_mut().await;
            landed.set(self.landed.notified());
        }
    }

    /// Wakes who waits for blocks, of which there are more layers now.
    pub(crate) fn wake_followers(&self) {
        self.landed.notify_waiters();
    }

    /// A block of a chain that was lent for reading has changed: it leaves `tier` with its
    /// descendants.
    pub(crate) fn lent_is_corrupt(self: &Arc<Self>, tier: Tier, chain: Chain<'_>, position: usize) {
        self.metrics.found_corrupt(tier);
        self.drop_block(chain, position, |table, key| {
            table.quarantine_resident(tier, key, Defect::Corrupt);
        });
    }

    /// A block of a chain is not what its name says: it leaves every tier with its descendants, and
    /// its copies under way are discarded.
    pub fn drop_wrong(self: &Arc<Self>, chain: Chain<'_>, position: usize) {
        self.drop_block(chain, position, Table::drop_wrong);
    }

    fn drop_block(
        self: &Arc<Self>,
        chain: Chain<'_>,
        position: usize,
        drop_from: impl FnOnce(&mut Table, BlockKey),
    ) {
        let mut table = self.table.lock();
        let key = table.enter(chain).key(position);
        drop_from(&mut table, key);
        let (is_dropping, effects) = (table.is_dropping(), table.take_effects());
        drop(table);
        self.apply(effects);
        if is_dropping {
            self.waker.wake();
        }
    }
}

/// A copy failed, and nothing touches its slots any more.
fn why_broken(task: &RoutedTask, error: &CopyError) -> Outcome {
    // Tiers below DRAM lose single blocks, and so does memory that an earlier process left: any
    // other error on a route within memory is about the device, not the block.
    let can_lose = match task.task.from.tier {
        Tier::Device => false,
        Tier::Host => error.kind() == CopyErrorKind::Corrupt,
        Tier::Disk | Tier::Object => true,
    };
    let defect = defect_of(error.kind()).filter(|_| can_lose && !task.halfway);
    Outcome::Failed { halfway: task.halfway, defect }
}

/// What an error says about the block that was read: nothing, if the medium is away, full or
/// shutting down.
const fn defect_of(kind: CopyErrorKind) -> Option<Defect> {
    match kind {
        CopyErrorKind::Corrupt => Some(Defect::Corrupt),
        CopyErrorKind::Io => Some(Defect::Unreadable),
        _ => None,
    }
}
