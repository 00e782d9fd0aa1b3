//! From the queues to the backends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvbm_tiers::{Completion, CopyError, Done, Fences, Route, Tier};

use super::Core;
use super::batch::TaskBatch;
use super::queue::{NextBatch, RouteQueues, TaskTurn};
use super::routes::Executor;
use super::routes::{BounceStop, RoutedTask};
use super::spans;
use super::staging::StagingSlots;
use crate::sync::{AtomicUsize, Mutex, MutexGuard};
use crate::table::Journal;
use crate::task::CopyTask;

/// What waits to be sent, and what sends it.
pub(super) struct SendState {
    pub(super) queues: Mutex<RouteQueues>,
    pub(super) executor: Arc<Executor>,
    /// Journals of tiers that outlive the process.
    pub(super) journals: [Option<Journal>; Tier::COUNT],
    pub(super) staging: Mutex<StagingSlots>,
    /// Calls of [`Core::pump`] that are still to be served.
    pub(super) pumps: AtomicUsize,
    /// Held once for each batch that a backend has.
    pub(super) with_media: Arc<()>,
}

impl Core {
    /// Queues copy tasks, and sends those that may go.
    pub(super) fn queue(self: &Arc<Self>, tasks: Vec<CopyTask>) {
        if tasks.is_empty() {
            return;
        }
        let mut queues = self.sending.queues.lock();
        // Straight into the queues: a task is moved often enough.
        let in_vain = self.engine.orders.lock().let_through(tasks, |task, order| {
            let is_direct = self.sending.executor.connects((task.from.tier, task.to.tier));
            queues.push(RoutedTask::new(task, is_direct, order));
        });
        drop(queues);
        self.drop_held(in_vain);
        self.pump();
        if self.is_closed() {
            // It was closed while these were planned.
            self.drop_waiting();
        }
    }

    /// Hands waiting tasks to the backends. A backend may complete a batch, and so come back here,
    /// before its `submit` returns: then the outer call continues the work, and the stack stays
    /// flat.
    pub(super) fn pump(self: &Arc<Self>) {
        if self.sending.pumps.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let turn = PumpTurn(&self.sending.pumps);
        loop {
            // A later call is counted after `asked`, and gets another round.
            let asked = self.sending.pumps.load(Ordering::Acquire);
            while self.start_batch() {}
            if self.sending.pumps.fetch_sub(asked, Ordering::AcqRel) == asked {
                std::mem::forget(turn);
                return;
            }
        }
    }

    fn start_batch(self: &Arc<Self>) -> bool {
        let mut turns = TaskTurns { core: self, staging: None, open: None };
        let next = self.sending.queues.lock().next_batch(|task| turns.of(task));
        drop(turns);
        let Some(NextBatch { route, class, tasks, dropped }) = next else { return false };
        self.drop_tasks(dropped);
        if tasks.is_empty() {
            return true;
        }
        let ops: Vec<_> = tasks.iter().map(RoutedTask::op).collect();
        let order = tasks.first().and_then(RoutedTask::order);
        let fences = order.map_or_else(Fences::default, |order| order.fences());
        let backend = self.sending.executor.backend(route).map_or("none", |backend| backend.name());
        let span = spans::of_batch(class, route, backend, tasks.len());
        let batch = self.health.batches.start((route, class), tasks, self.clock.uptime(), span);
        let report = self.report(&batch);
        let done = Done::new(move |completions| report.copies_ended(completions));
        let executor = Arc::clone(&self.sending.executor);
        // If its backend panics, the state of a batch is unknown: its copies will be overdue. The
        // request that happened to pump, and all others, must not suffer.
        let submit = move || {
            if catch_unwind(AssertUnwindSafe(|| executor.submit(route, ops, fences, &done)))
                .is_err()
            {
                tracing::error!(from = %route.0, to = %route.1, "a backend panicked when it was given a batch");
            }
        };
        match &self.sending.journals[route.1.index()] {
            Some(journal) => journal.after_removals(submit),
            None => submit(),
        }
        if self.is_closed() {
            // It was closed since this was decided: nothing else will give the batch up.
            self.give_up(&batch);
        }
        true
    }

    /// What a backend keeps of a batch.
    pub(super) fn report(self: &Arc<Self>, batch: &Arc<TaskBatch>) -> BatchReport {
        BatchReport {
            core: Arc::clone(self),
            batch: Arc::clone(batch),
            _with_medium: Arc::clone(&self.sending.with_media),
        }
    }
}

/// Decides what happens to tasks whose turn has come. A batch asks breakers and staging slots once.
struct TaskTurns<'a> {
    core: &'a Core,
    staging: Option<MutexGuard<'a, StagingSlots>>,
    /// The route that was last asked about, and whether its breaker is open.
    open: Option<(Route, bool)>,
}

impl TaskTurns<'_> {
    /// Gives the task the staging slot that it needs.
    fn of(&mut self, task: &mut RoutedTask) -> TaskTurn {
        let core = self.core;
        if core.is_closed() || (!task.task.is_probe && self.is_open(task.route())) {
            return TaskTurn::Drop;
        }
        if task.slot_on_disk().is_some_and(|slot| core.health.directories.is_left_alone(slot)) {
            return TaskTurn::Drop;
        }
        if !matches!(task.stop, Some(BounceStop::Wanted)) {
            return TaskTurn::Send;
        }
        // Taken at the last moment: a queued task must not keep a slot from one that could go.
        let staging = self.staging.get_or_insert_with(|| core.sending.staging.lock());
        match staging.take() {
            Some(frame) => task.stop = Some(BounceStop::Staging(frame)),
            None if staging.is_gone() => return TaskTurn::Drop,
            None => return TaskTurn::Wait,
        }
        TaskTurn::Send
    }

    fn is_open(&mut self, route: Route) -> bool {
        let core = self.core;
        let known = self.open.filter(|&(of, _)| of == route);
        self.open.insert(known.unwrap_or_else(|| (route, core.health.breakers.is_open(route)))).1
    }
}

/// What a backend keeps of a batch until it has finished.
pub(super) struct BatchReport {
    core: Arc<Core>,
    batch: Arc<TaskBatch>,
    /// Dropped after the core: once none of these is left, no medium's thread is the last holder of
    /// the core.
    _with_medium: Arc<()>,
}

impl BatchReport {
    fn copies_ended(&self, completions: Vec<Completion>) {
        self.core.copies_ended(&self.batch, completions);
    }

    pub(super) fn errand_ended(&self, error: Option<&CopyError>) {
        self.core.errand_ended(&self.batch, error);
    }
}

/// A thread pumps. If it panics, others may.
struct PumpTurn<'a>(&'a AtomicUsize);

impl Drop for PumpTurn<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}
