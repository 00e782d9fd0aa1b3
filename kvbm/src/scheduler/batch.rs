//! Batches: the tasks that a medium works on, and which of them are overdue.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvbm_tiers::{Completion, CopyError, CopyOp, Route, Tier};
use tracing::Span;

use super::dispatch::RoutedTask;
use super::errand::InternalCopy;
use crate::sync::{AtomicUsize, Mutex};
use crate::task::Class;

/// Tasks handed to a backend together. Each counts as ended once: when it completes or when it is
/// overdue.
#[derive(Debug)]
pub(super) struct TaskBatch {
    id: u64,
    pub(super) route: Route,
    pub(super) class: Class,
    /// It tests whether the medium is well again.
    pub(super) is_probe: bool,
    pub(super) started: Duration,
    /// When one of its copies last completed.
    progress: AtomicUptime,
    /// One lock for all: copies that end together are handled together.
    tasks: Mutex<BatchTasks>,
    left: AtomicUsize,
    /// Open until the medium has finished all of it.
    _span: Span,
    /// Instead of tasks: a copy that no request asked for.
    pub(super) errand: Option<InternalCopy>,
}

/// A point in time, written often and read seldom.
#[derive(Debug, Default)]
struct AtomicUptime(AtomicU64);

impl AtomicUptime {
    fn set(&self, now: Duration) {
        // Relaxed is enough: it is compared with limits of seconds, and orders nothing else.
        self.0.fetch_max(now.as_nanos() as u64, Ordering::Relaxed);
    }

    fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// The tasks of a batch, and the state of each.
#[derive(Debug, Default)]
struct BatchTasks {
    all: Vec<RoutedTask>,
    states: Vec<TaskState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskState {
    Working,
    /// It was given up; the medium may still touch its slots.
    Overdue,
    Ended,
}

impl BatchTasks {
    fn working(&self) -> impl Iterator<Item = &RoutedTask> {
        let tasks = self.all.iter().zip(&self.states);
        tasks.filter(|(_, state)| **state == TaskState::Working).map(|(task, _)| task)
    }
}

/// What a backend's report contains.
#[derive(Debug, Default)]
pub(super) struct ReportedTasks {
    /// Tasks that are still awaited, each with the result of its copy.
    pub(super) tasks: Vec<(RoutedTask, Result<(), CopyError>)>,
    /// Tasks that were given up.
    pub(super) overdue: Vec<RoutedTask>,
    /// Operations that were reported before: the backend breaks its contract.
    pub(super) twice: Vec<usize>,
}

impl TaskBatch {
    /// Takes the tasks of these reported operations.
    pub(super) fn take(&self, ended: Vec<Completion>) -> ReportedTasks {
        let mut reported =
            ReportedTasks { tasks: Vec::with_capacity(ended.len()), ..ReportedTasks::default() };
        let mut tasks = self.tasks.lock();
        for (op, result) in ended {
            match std::mem::replace(&mut tasks.states[op], TaskState::Ended) {
                TaskState::Working => reported.tasks.push((tasks.all[op].take(), result)),
                TaskState::Overdue => reported.overdue.push(tasks.all[op].take()),
                TaskState::Ended => reported.twice.push(op),
            }
        }
        reported
    }

    /// Gives up what is still being worked on. `tell` runs under the lock: a completion that comes
    /// at this moment waits until the table knows.
    pub(super) fn give_up<T>(&self, tell: impl FnOnce(&[&RoutedTask]) -> T) -> T {
        let mut tasks = self.tasks.lock();
        let told = tell(&tasks.working().collect::<Vec<_>>());
        // The completions of others came first.
        let working = tasks.states.iter_mut().filter(|state| **state == TaskState::Working);
        working.for_each(|state| *state = TaskState::Overdue);
        told
    }

    /// Whether the medium works on a copy that is not overdue.
    pub(super) fn is_working(&self) -> bool {
        self.errand.as_ref().is_some_and(InternalCopy::is_working)
            || self.tasks.lock().working().next().is_some()
    }

    /// Copies that the medium works on and that are not overdue.
    pub(super) fn working(&self) -> Vec<CopyOp> {
        let errand =
            self.errand.iter().filter(|errand| errand.is_working()).map(|errand| *errand.op());
        errand.chain(self.tasks.lock().working().map(RoutedTask::op)).collect()
    }

    /// How long ago one of its copies last completed.
    pub(super) fn idle(&self, now: Duration) -> Duration {
        now.saturating_sub(self.started.max(self.progress.get()))
    }

    /// Counts `tasks` tasks as ended. True with the last one.
    pub(super) fn tasks_ended(&self, tasks: usize) -> bool {
        tasks > 0 && self.left.fetch_sub(tasks, Ordering::AcqRel) == tasks
    }

    /// The tier whose medium does the work: the lower one.
    fn medium(&self) -> Tier {
        self.route.lower()
    }
}

/// All batches in flight, and the progress of their media.
///
/// A copy waits in the queues of its backend and of the medium, behind copies of other routes and
/// requests. So it judges the medium's progress, not the age of a copy: a copy is overdue when its
/// medium has completed nothing at all for the limit, or when its batch has been the medium's
/// oldest for that long without any completion of its own. A healthy medium may be slow and busy.
#[derive(Debug, Default)]
pub(super) struct BatchesInFlight {
    in_flight: Mutex<BatchRegister>,
    progress: [AtomicUptime; Tier::COUNT],
}

#[derive(Debug, Default)]
struct BatchRegister {
    /// In the order in which they were started.
    batches: BTreeMap<u64, Arc<TaskBatch>>,
    next: u64,
    /// The oldest batch of each medium, and since when it has been the oldest.
    oldest: [Option<(u64, Duration)>; Tier::COUNT],
}

impl BatchesInFlight {
    pub(super) fn start(
        &self,
        route: Route,
        class: Class,
        tasks: Vec<RoutedTask>,
        now: Duration,
        span: Span,
    ) -> Arc<TaskBatch> {
        let is_probe = tasks.iter().any(|task| task.task.is_probe);
        self.register(|id| TaskBatch {
            id,
            route,
            class,
            is_probe,
            started: now,
            progress: AtomicUptime::default(),
            left: AtomicUsize::new(tasks.len()),
            tasks: Mutex::new(BatchTasks {
                states: vec![TaskState::Working; tasks.len()],
                all: tasks,
            }),
            _span: span,
            errand: None,
        })
    }

    /// Starts a copy that no request asked for; it goes overdue as all others do.
    pub(super) fn start_errand(&self, errand: InternalCopy, now: Duration) -> Arc<TaskBatch> {
        self.register(|id| TaskBatch {
            id,
            route: errand.op().route(),
            class: Class::Flush,
            is_probe: false,
            started: now,
            progress: AtomicUptime::default(),
            left: AtomicUsize::new(0),
            tasks: Mutex::default(),
            _span: Span::none(),
            errand: Some(errand),
        })
    }

    fn register(&self, batch: impl FnOnce(u64) -> TaskBatch) -> Arc<TaskBatch> {
        // Numbered under the lock: the oldest batch of a medium is the one with the least number.
        let mut register = self.in_flight.lock();
        let id = register.next;
        register.next += 1;
        let batch = Arc::new(batch(id));
        register.batches.insert(id, Arc::clone(&batch));
        batch
    }

    /// A copy completed, successfully or not, in time or not.
    pub(super) fn progressed(&self, batch: &TaskBatch, now: Duration) {
        batch.progress.set(now);
        // Late and failed completions count too: they show that the medium moves.
        self.progress[batch.medium().index()].set(now);
    }

    pub(super) fn end(&self, batch: &TaskBatch) {
        self.in_flight.lock().batches.remove(&batch.id);
    }

    /// Tasks in progress on a route.
    pub(super) fn blocks(&self, route: Route) -> usize {
        let register = self.in_flight.lock();
        let of_route = register.batches.values().filter(|batch| batch.route == route);
        of_route.map(|batch| batch.left.load(Ordering::Relaxed)).sum()
    }

    /// Batches whose copies are overdue.
    pub(super) fn overdue(
        &self,
        now: Duration,
        limit: impl Fn(Route) -> Duration,
    ) -> Vec<Arc<TaskBatch>> {
        let mut register = self.in_flight.lock();
        let BatchRegister { batches, oldest, .. } = &mut *register;
        for medium in Tier::ALL {
            // Computed here, not kept: batches end far more often than this is called.
            let first =
                batches.values().find(|batch| batch.medium() == medium).map(|batch| batch.id);
            let known = &mut oldest[medium.index()];
            if known.map(|(id, _)| id) != first {
                *known = first.map(|id| (id, now));
            }
        }
        let is_overdue = |batch: &&Arc<TaskBatch>| {
            let medium = batch.medium().index();
            let limit = limit(batch.route);
            let is_over = |since: Duration| now.saturating_sub(since) > limit;
            let first = oldest[medium].filter(|&(id, _)| id == batch.id);
            is_over(batch.started.max(self.progress[medium].get()))
                || first.is_some_and(|(_, since)| {
                    is_over(since.max(batch.started).max(batch.progress.get()))
                })
        };
        batches.values().filter(is_overdue).cloned().collect()
    }

    /// All batches in flight.
    pub(super) fn all(&self) -> Vec<Arc<TaskBatch>> {
        self.in_flight.lock().batches.values().cloned().collect()
    }

    /// Whether anything is in flight but errands.
    pub(super) fn have_tasks(&self) -> bool {
        self.in_flight.lock().batches.values().any(|batch| batch.errand.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Route = Route::new(Tier::Disk, Tier::Host);
    const WRITE: Route = Route::new(Tier::Host, Tier::Disk);

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn overdue(batches: &BatchesInFlight, now: u64) -> Vec<u64> {
        batches.overdue(at(now), |_| at(100)).iter().map(|batch| batch.id).collect()
    }

    fn start(batches: &BatchesInFlight, route: Route, now: u64) -> Arc<TaskBatch> {
        batches.start(route, Class::Load, Vec::new(), at(now), Span::none())
    }

    #[test]
    fn nothing_is_overdue_at_a_medium_that_gets_on() {
        let batches = BatchesInFlight::default();
        let queue: Vec<_> = (0..20).map(|_| start(&batches, READ, 0)).collect();
        for (turn, batch) in (1..).zip(&queue) {
            let now = 60 * turn;
            assert_eq!(overdue(&batches, now), [0; 0], "at {now} ms");
            batches.progressed(batch, at(now));
            batches.end(batch);
        }
    }

    #[test]
    fn a_medium_that_stands_still_makes_all_overdue_at_once() {
        let batches = BatchesInFlight::default();
        let first = start(&batches, READ, 0);
        let _second = start(&batches, WRITE, 50);
        let _elsewhere = start(&batches, Route::new(Tier::Host, Tier::Device), 120);
        batches.progressed(&first, at(60));
        assert_eq!(overdue(&batches, 160), [0; 0]);
        assert_eq!(overdue(&batches, 161), [0, 1]);
    }

    #[test]
    fn a_copy_that_hangs_amid_others_is_found() {
        let batches = BatchesInFlight::default();
        let _hangs = start(&batches, READ, 0);
        for turn in 1..=10 {
            let other = start(&batches, READ, 20 * turn - 20);
            batches.progressed(&other, at(20 * turn));
            batches.end(&other);
            let expected: &[u64] = if 20 * turn > 120 { &[0] } else { &[] };
            assert_eq!(overdue(&batches, 20 * turn), expected, "at {} ms", 20 * turn);
        }
    }
}
