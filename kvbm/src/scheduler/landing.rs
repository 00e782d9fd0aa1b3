//! The landing of copies: media are judged by them, slots go home, the table is told, callers are answered.

use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::{BlockKey, Completion, CopyError, CopyErrorKind, Tier};

use super::Core;
use super::batch::{Batch, Completed, Overdue};
use super::engine_order::EndedOrder;
use super::routed::RoutedTask;
use crate::hash::Chain;
use crate::table::{Dropped, Effects, Table, TransferEnd};
use crate::task::{Class, Defect, Outcome, TaskResult};

/// Tasks that are dropped land so many at a time.
const MAX_LANDED: usize = 256;

impl Core {
    /// A backend reports the ends of copies.
    pub(super) fn copies_ended(self: &Arc<Self>, batch: &Batch, completions: Vec<Completion>) {
        let now = self.clock.uptime();
        self.batches.progressed(batch, now);
        let mut landed = Vec::with_capacity(completions.len());
        let mut left = 0;
        for (op, result) in completions {
            match batch.take(op) {
                Completed::Task(task) => {
                    left += 1;
                    landed.extend(self.task_ended(batch, task, result, now));
                }
                Completed::Overdue(overdue) => self.came_back(batch, overdue),
                Completed::Twice => {
                    tracing::error!(route = ?batch.route, op, "a backend reported a copy twice");
                }
            }
        }
        if !landed.is_empty() {
            self.land(landed);
        }
        self.tasks_left(batch, left);
    }

    /// Judges the medium by a copy. Returns what is to be told of the task, if it has ended.
    fn task_ended(
        self: &Arc<Self>,
        batch: &Batch,
        task: RoutedTask,
        result: Result<(), CopyError>,
        now: Duration,
    ) -> Option<TaskResult> {
        self.metrics.copied(batch.route, now.saturating_sub(batch.started), &result);
        match result {
            Ok(()) => {
                self.directory_answers(&task.op(), now);
                self.breakers.succeeded(batch.route, batch.is_probe, now);
                if task.has_second_leg() {
                    self.go_on(task);
                    return None;
                }
                Some(self.outcome(task, Outcome::Arrived))
            }
            Err(error) => {
                let is_a_directory = match error.kind() {
                    CopyErrorKind::Io => self.directory_failed(&task.op(), now),
                    CopyErrorKind::NoSpace => self.directory_is_full(&task.op(), now),
                    _ => false,
                };
                if !is_a_directory {
                    self.breakers.failed(batch.route, error.kind(), batch.is_probe, now);
                }
                Some(self.broke(task, &error))
            }
        }
    }

    /// So many of a batch's copies are not waited for any more.
    fn tasks_left(self: &Arc<Self>, batch: &Batch, tasks: usize) {
        if batch.tasks_ended(tasks) {
            self.batches.end(batch);
            self.queues.lock().ended(batch.route, batch.class);
            self.pump();
        }
    }

    /// The second leg need not wait for the first legs of its batch's other blocks.
    fn go_on(self: &Arc<Self>, task: RoutedTask) {
        self.queues.lock().push(RoutedTask { halfway: true, ..task });
        self.pump();
    }

    /// A task that no medium has any more, with what became of it. Its staging slot is free.
    fn outcome(&self, mut task: RoutedTask, outcome: Outcome) -> TaskResult {
        task.take_staging().into_iter().for_each(|frame| self.staging.lock().give_back(frame));
        task.task.ended(outcome)
    }

    /// A copy failed, and nothing touches its slots any more.
    fn broke(&self, task: RoutedTask, error: &CopyError) -> TaskResult {
        tracing::warn!(op = ?task.op(), %error, "a copy failed; the block counts as a miss");
        // Tiers below DRAM lose single blocks, and so does memory that an earlier process left: any other error on a route
        // within memory says something of the device, nothing of the block.
        let can_lose = match task.task.from.tier {
            Tier::Device => false,
            Tier::Host => error.kind() == CopyErrorKind::Corrupt,
            Tier::Disk | Tier::Object => true,
        };
        let defect = defect_of(error.kind()).filter(|_| can_lose && !task.halfway);
        let halfway = task.halfway;
        self.outcome(task, Outcome::Failed { halfway, defect })
    }

    /// These tasks are not sent, or not sent on.
    pub(super) fn drop_tasks(self: &Arc<Self>, tasks: Vec<RoutedTask>) {
        if !tasks.is_empty() {
            let dropped = tasks.into_iter().map(|task| {
                let halfway = task.halfway;
                self.outcome(task, Outcome::Failed { halfway, defect: None })
            });
            let dropped: Vec<TaskResult> = dropped.collect();
            // A prompt of thousands of blocks may be dropped at once: others get the table in between.
            dropped.chunks(MAX_LANDED).for_each(|dropped| self.land(dropped.iter().copied()));
        }
    }

    /// Nobody waits for the batch's copies any more. What the medium may still touch stays theirs.
    pub(super) fn give_up(self: &Arc<Self>, batch: &Batch) {
        if let Some(errand) = &batch.errand {
            return self.give_up_errand(batch, errand);
        }
        let now = self.clock.uptime();
        let told = batch.give_up(|task| {
            if task.has_staging() {
                self.staging.lock().lose();
            }
            let outcome = Outcome::Overdue { writes_destination: !task.has_second_leg() };
            self.table.lock().land([task.task.ended(outcome)], now)
        });
        for effects in told {
            self.metrics.went_overdue(batch.route);
            self.apply(effects);
            self.tasks_left(batch, 1);
        }
    }

    /// An overdue copy ended after all: its slots are free, and its medium moves.
    fn came_back(self: &Arc<Self>, batch: &Batch, overdue: Overdue) {
        let Overdue { task, staging } = overdue;
        self.directory_came_back([task.from, task.to]);
        self.land([task.ended(Outcome::Returned)]);
        staging.into_iter().for_each(|frame| self.staging.lock().regain(frame));
        self.metrics.came_back(batch.route);
        // It neither closes the breaker nor counts as failed: only a probe tells whether the medium is well.
        self.breakers.revived(batch.route, self.clock.uptime());
        self.flushing.wake();
        self.pump();
    }

    /// Tells the table what became of copies, and does what follows from it.
    pub(super) fn land(self: &Arc<Self>, results: impl IntoIterator<Item = TaskResult>) {
        let now = self.clock.uptime();
        let mut table = self.table.lock();
        let effects = table.land(results, now);
        // Looked at while the lock is held anyway: what arrived may have made a tier dirty enough.
        let is_due = table.is_dropping() || Tier::ALL.into_iter().any(|tier| self.flush_is_due(&table, tier));
        drop(table);
        self.apply(effects);
        if is_due {
            self.flushing.wake();
        }
    }

    /// A block of a chain that was lent for reading is not what it was: it leaves `tier` with its descendants.
    pub(crate) fn lent_is_corrupt(self: &Arc<Self>, tier: Tier, chain: Chain<'_>, position: usize) {
        self.metrics.found_corrupt(tier);
        self.drop_block(chain, position, |table, key| {
            table.quarantine_resident(tier, key, Defect::Corrupt);
        });
    }

    /// A block of a chain is not what its name says: it leaves every tier with its descendants, and no copy of it that is
    /// under way lands.
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
            self.flushing.wake();
        }
    }

    /// Does what follows from a change of the table, step by step where it is long.
    pub(super) fn apply(self: &Arc<Self>, mut effects: Effects) {
        loop {
            let has_more = effects.has_more;
            self.apply_step(effects);
            if !has_more {
                return;
            }
            effects = self.table.lock().publish_more();
        }
    }

    fn apply_step(self: &Arc<Self>, effects: Effects) {
        let Effects { tasks, awaited, cancelled, ended, dropped, released, left, news, .. } = effects;
        // Before the replies: who is told that all is over must find that it is.
        drop(released);
        if let Some(on_left) = self.on_left.get().filter(|_| !left.is_empty()) {
            on_left(&left);
        }
        news.iter().for_each(|listener| listener.wake());
        for Dropped { tier, blocks, defect } in dropped {
            if defect == Defect::Forgotten {
                continue;
            }
            tracing::error!(%tier, blocks, ?defect, "a block and its descendants are dropped");
        }
        for rest in cancelled {
            let cancelled = self.queues.lock().cancel(rest);
            self.drop_tasks(cancelled);
            let held = self.orders.lock().cancel(rest);
            self.drop_held(held);
        }
        if !awaited.is_empty() {
            self.queues.lock().raise(&awaited.into_iter().collect());
        }
        // Copies before replies: a caller who is told may come with more work, and the media need not idle meanwhile.
        self.queue(tasks);
        ended.into_iter().for_each(|ended| self.transfer_ended(ended));
    }

    fn transfer_ended(self: &Arc<Self>, ended: TransferEnd) {
        if ended.class == Class::Flush {
            self.flushing.ended(ended.to, ended.blocks);
        }
        self.spans.close(&ended);
        let id = ended.id;
        let of_engine = self.orders.lock().end(id);
        let has_waited = of_engine.as_ref().is_some_and(|order| order.waited);
        let source = ended.source.filter(|_| ended.class == Class::Load && !has_waited);
        if let (Some(source), Some(took)) = (source, ended.took) {
            self.paces.learn(source, ended.copied, took, self.clock.uptime());
        }
        let Some(EndedOrder { held, part_of, .. }) = of_engine else { return ended.report() };
        // Before the reply: who is told that it is over may find that its slots are free.
        self.drop_held(held);
        ended.report();
        // The answer is there when the engine reads of it.
        match part_of {
            Some(joined) => drop(joined),
            None => self.note_completion(id),
        }
    }
}

/// What an error says of the block that was read. A medium that is away, full or shutting down says nothing of it.
const fn defect_of(kind: CopyErrorKind) -> Option<Defect> {
    match kind {
        CopyErrorKind::Corrupt => Some(Defect::Corrupt),
        CopyErrorKind::Io => Some(Defect::Unreadable),
        _ => None,
    }
}
