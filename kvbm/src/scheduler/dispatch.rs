//! What follows from a change of the table, with the table unlocked: above all, copies go through the
//! queues to the backends, in one leg if a backend connects their tiers, else in two with a stop in
//! DRAM.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvbm_tiers::backend::submit;
use kvbm_tiers::{
    Backend, Completion, CopyError, CopyOp, Done, Fences, Frame, Route, SlotRef, Tier,
};

use super::Core;
use super::batch::TaskBatch;
use super::engine::EngineOrder;
use super::queue::{NextBatch, RouteQueues, TaskTurn};
use super::spans;
use super::staging::StagingSlots;
use crate::sync::{AtomicUsize, Mutex, MutexGuard};
use crate::table::{Dropped, Effects, Journal};
use crate::task::{CopyTask, Defect};

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
    /// Does what follows from a change of the table, in steps if it is long.
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
        let Effects {
            tasks, awaited, cancelled, ended, again, dropped, released, left, news, ..
        } = effects;
        // Before the replies: a caller that hears of the end must find it so.
        drop(released);
        if let Some(on_left) = self.on_left.get().filter(|_| !left.is_empty()) {
            on_left(&left);
        }
        news.iter().for_each(|listener| listener.wake());
        self.landed.notify_waiters();
        for Dropped { tier, blocks, defect } in dropped {
            if defect == Defect::Forgotten {
                continue;
            }
            tracing::error!(%tier, blocks, ?defect, "a block and its descendants are dropped");
        }
        for (id, from) in cancelled {
            let cancelled = self.sending.queues.lock().cancel(id, from);
            self.drop_tasks(cancelled);
            let held = self.engine.orders.lock().cancel(id, from);
            self.drop_held(held);
            let effects = self.table.lock().cancellation_made(id);
            self.apply(effects);
        }
        if !awaited.is_empty() {
            self.sending.queues.lock().raise(&awaited.into_iter().collect());
        }
        // Copies before replies: an answered caller may bring more work, and the media need not
        // idle meanwhile.
        self.queue(tasks);
        self.save_again_soon(again);
        ended.into_iter().for_each(|ended| self.transfer_ended(ended));
    }

    /// Queues copy tasks, and sends those that may go.
    pub(super) fn queue(self: &Arc<Self>, tasks: Vec<CopyTask>) {
        if tasks.is_empty() {
            return;
        }
        let mut queues = self.sending.queues.lock();
        // Straight into the queues: a task is moved often enough.
        let in_vain = self.engine.orders.lock().let_through(tasks, |task, order| {
            let is_direct =
                self.sending.executor.connects(Route::new(task.from.tier, task.to.tier));
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
        let batch = self.health.batches.start(route, class, tasks, self.clock.uptime(), span);
        let report = self.report(&batch);
        let done = Done::new(move |completions| report.copies_ended(completions));
        let executor = Arc::clone(&self.sending.executor);
        // If its backend panics, the state of a batch is unknown: its copies will be overdue. The
        // request that happened to pump, and all others, must not suffer.
        let submit = move || {
            if catch_unwind(AssertUnwindSafe(|| executor.submit(route, ops, fences, &done)))
                .is_err()
            {
                tracing::error!(from = %route.from, to = %route.to, "a backend panicked when it was given a batch");
            }
        };
        match &self.sending.journals[route.to.index()] {
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
        match self.open {
            Some((of, is_open)) if of == route => is_open,
            _ => self.open.insert((route, self.core.health.breakers.is_open(route))).1,
        }
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

/// At most one backend per route, fixed at start-up.
#[derive(Clone, Debug, Default)]
pub struct Executor {
    routes: [[Option<Arc<dyn Backend>>; Tier::COUNT]; Tier::COUNT],
}

impl Executor {
    /// Lets `backend` serve those of its routes that no other backend serves yet.
    pub fn add(&mut self, backend: &Arc<dyn Backend>) {
        for &Route { from, to } in backend.routes() {
            self.routes[from.index()][to.index()].get_or_insert_with(|| Arc::clone(backend));
        }
    }

    /// The backend of a route.
    pub fn backend(&self, route: Route) -> Option<&Arc<dyn Backend>> {
        self.routes[route.from.index()][route.to.index()].as_ref()
    }

    /// Whether a backend serves this route, so that blocks need not bounce.
    pub fn connects(&self, route: Route) -> bool {
        self.backend(route).is_some()
    }

    /// The routes that a block takes from one tier to another.
    pub(super) fn legs(&self, route: Route) -> impl Iterator<Item = Route> + use<> {
        let legs = if self.connects(route) {
            [Some(route), None]
        } else {
            [Some(Route { to: Tier::Host, ..route }), Some(Route { from: Tier::Host, ..route })]
        };
        legs.into_iter().flatten()
    }

    /// Starts a batch whose operations share `route`, in this order with the engine's work.
    pub(super) fn submit(&self, route: Route, batch: Vec<CopyOp>, fences: Fences, done: &Done) {
        if let Some(backend) = self.backend(route) {
            return submit(backend, batch, fences, done.clone());
        }
        // Answers anyway: a task that is never completed would hold its slots for ever.
        done.refuse(0..batch.len(), &format!("no backend copies {} to {}", route.from, route.to));
    }
}

/// Where a block stops between its two legs.
#[derive(Debug)]
pub(super) enum BounceStop {
    /// A staging slot is taken when the task's turn comes.
    Wanted,
    /// In this staging slot.
    Staging(Frame),
    /// In a slot of the host tier, where it stays.
    Kept(SlotRef),
}

/// A copy task and its route.
#[derive(Debug)]
pub(super) struct RoutedTask {
    pub(super) task: CopyTask,
    /// `None`: its source and its destination are connected.
    pub(super) stop: Option<BounceStop>,
    /// The block has reached the stop.
    pub(super) halfway: bool,
    /// The order to keep with the engine's work, if its memory is touched.
    pub(super) order: Option<Arc<EngineOrder>>,
}

impl RoutedTask {
    pub(super) fn new(task: CopyTask, is_direct: bool, order: Option<Arc<EngineOrder>>) -> Self {
        let through_dram = || task.via.map_or(BounceStop::Wanted, BounceStop::Kept);
        Self { task, stop: (!is_direct).then(through_dram), halfway: false, order }
    }

    /// The order that the next copy keeps. One that does not touch the engine's memory need not
    /// wait for it.
    pub(super) fn order(&self) -> Option<&Arc<EngineOrder>> {
        self.order.as_ref().filter(|_| self.route().touches(Tier::Device))
    }

    /// The next copy to make. The staging slot must have been taken by now.
    pub(super) fn op(&self) -> CopyOp {
        let stop = match &self.stop {
            Some(BounceStop::Staging(frame)) => Some(frame.slot_ref()),
            Some(BounceStop::Kept(slot)) => Some(*slot),
            _ => None,
        };
        let CopyTask { block, parent, owner, from, to, .. } = self.task;
        match stop {
            None => CopyOp { block, parent, owner, from, to },
            Some(stop) if self.halfway => CopyOp { block, parent, owner, from: stop, to },
            Some(stop) => CopyOp { block, parent, owner, from, to: stop },
        }
    }

    /// The tiers that the next copy connects.
    pub(super) const fn route(&self) -> Route {
        let CopyTask { from, to, .. } = self.task;
        // A staging slot lies in the host's memory: to a backend both kinds of stop are the host
        // tier.
        match self.stop {
            None => Route::new(from.tier, to.tier),
            Some(_) if self.halfway => Route::new(Tier::Host, to.tier),
            Some(_) => Route::new(from.tier, Tier::Host),
        }
    }

    /// The slot on disk that the next copy reads or writes.
    pub(super) const fn slot_on_disk(&self) -> Option<SlotRef> {
        match self.route() {
            Route { from: Tier::Disk, .. } => Some(self.task.from),
            Route { to: Tier::Disk, .. } => Some(self.task.to),
            _ => None,
        }
    }

    /// Whether another copy follows the present one.
    pub(super) const fn has_second_leg(&self) -> bool {
        !self.halfway && self.stop.is_some()
    }

    /// The task, with what it holds: the one that is left names its slots, and nothing more.
    pub(super) fn take(&mut self) -> Self {
        Self { stop: self.stop.take(), order: self.order.take(), ..*self }
    }

    pub(super) const fn has_staging(&self) -> bool {
        matches!(self.stop, Some(BounceStop::Staging(_)))
    }

    /// The staging slot, if it has one.
    pub(super) fn take_staging(&mut self) -> Option<Frame> {
        match self.stop.take() {
            Some(BounceStop::Staging(frame)) => Some(frame),
            other => {
                self.stop = other;
                None
            }
        }
    }
}
