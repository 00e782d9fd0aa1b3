//! Judges the media: which copies they work on, how they get on, and which of them are left alone.

use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::{CopyError, CopyErrorKind, Route, Tier};

use super::Tuning;
use super::background::BackgroundWaker;
use super::batch::{BatchesInFlight, TaskBatch};
use super::breaker::{Breakers, RoutePassage};
use super::directories::DiskDirectories;
use super::dispatch::Executor;
use super::dispatch::RoutedTask;
use crate::clock::Clock;
use crate::metrics::Metrics;
use crate::sync::Mutex;
use crate::table::SharedTable;

/// What is known of the media.
#[derive(Debug)]
pub(super) struct MediaHealth {
    pub(super) batches: BatchesInFlight,
    pub(super) breakers: Breakers,
    pub(super) directories: DiskDirectories,
    pub(super) paces: TierPaces,
    pub(super) executor: Arc<Executor>,
    /// Gives out no slots of a directory that is left alone.
    pub(super) table: Arc<SharedTable>,
    pub(super) waker: Arc<BackgroundWaker>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) metrics: Metrics,
    pub(super) tuning: Tuning,
}

impl MediaHealth {
    /// Whether blocks may go from one tier to another now.
    pub(super) fn pass(&self, route: Route) -> RoutePassage {
        let now = self.clock.uptime();
        let legs = || self.executor.legs(route);
        // All legs or none: a probe that cannot go on after one leg would be useless.
        if legs().any(|leg| self.breakers.is_blocked(leg, now)) {
            return RoutePassage::Blocked;
        }
        let verdict = |leg| self.tuning.limit(leg) + self.tuning.breaker_pause;
        let passages = legs().map(|leg| self.breakers.pass(leg, verdict(leg), now));
        passages.max().unwrap_or(RoutePassage::Free)
    }

    pub(super) fn retract_probe(&self, route: Route) {
        let now = self.clock.uptime();
        self.executor.legs(route).for_each(|leg| self.breakers.retract_probe(leg, now));
    }

    /// Batches whose copies are overdue.
    pub(super) fn overdue_batches(&self, now: Duration) -> Vec<Arc<TaskBatch>> {
        self.batches.overdue(now, |route| self.tuning.limit(route))
    }

    /// Judges the medium by a batch that is overdue.
    pub(super) fn judge_overdue(&self, batch: &TaskBatch, now: Duration) {
        if !self.directories_hang(batch, now) {
            self.breakers.failed(batch.route, CopyErrorKind::TimedOut, batch.is_probe, now);
        }
    }

    /// Judges the medium by copies that ended together, in their order: errors count until a
    /// success.
    pub(super) fn judge(
        &self,
        batch: &TaskBatch,
        tasks: &[(RoutedTask, Result<(), CopyError>)],
        now: Duration,
    ) {
        for alike in tasks.chunk_by(|(_, one), (_, next)| one.is_ok() == next.is_ok()) {
            if alike.first().is_some_and(|(_, result)| result.is_ok()) {
                self.metrics.copied(
                    batch.route,
                    now.saturating_sub(batch.started),
                    alike.len() as u64,
                );
                let on_disk = alike.iter().filter_map(|(task, _)| task.slot_on_disk());
                self.directories_answer(on_disk, now);
                self.breakers.succeeded(batch.route, batch.is_probe, now);
            }
            for (task, result) in alike {
                result
                    .as_ref()
                    .err()
                    .into_iter()
                    .for_each(|error| self.judge_failure(batch, task, error, now));
            }
        }
    }

    fn judge_failure(
        &self,
        batch: &TaskBatch,
        task: &RoutedTask,
        error: &CopyError,
        now: Duration,
    ) {
        tracing::warn!(op = ?task.op(), %error, "a copy failed; the block counts as a miss");
        self.metrics.failed(batch.route, error.kind());
        let is_a_directory = match error.kind() {
            CopyErrorKind::Io => self.directory_failed(&task.op(), now),
            CopyErrorKind::NoSpace => self.directory_is_full(&task.op(), now),
            _ => false,
        };
        if !is_a_directory {
            self.breakers.failed(batch.route, error.kind(), batch.is_probe, now);
        }
    }
}

/// How much of earlier measurements counts when a new one comes.
// So some ten loads count: few enough to follow a medium that slows down.
const KEPT: f64 = 0.9;
/// An older measurement does not count: a tier that was slow is tried again.
const VALID: Duration = Duration::from_secs(30);

/// One tier's loads.
#[derive(Clone, Copy, Debug)]
struct TierPace {
    seconds: f64,
    blocks: f64,
    measured: Duration,
}

impl TierPace {
    fn is_valid(&self, now: Duration) -> bool {
        now.saturating_sub(self.measured) < VALID
    }
}

/// Measures loads.
#[derive(Debug, Default)]
pub(super) struct TierPaces([Mutex<Option<TierPace>>; Tier::COUNT]);

impl TierPaces {
    /// `blocks` blocks came from `tier` within `took`, the load's time in the queue included.
    pub(super) fn learn(&self, tier: Tier, blocks: usize, took: Duration, now: Duration) {
        let mut pace = self.0[tier.index()].lock();
        let before = pace.filter(|pace| pace.is_valid(now));
        let of = |known: fn(&TierPace) -> f64| before.as_ref().map_or(0.0, known) * KEPT;
        // Seconds and blocks apart: a long load says more about a block's time than a short one.
        *pace = Some(TierPace {
            seconds: of(|pace| pace.seconds) + took.as_secs_f64(),
            blocks: of(|pace| pace.blocks) + blocks as f64,
            measured: now,
        });
    }

    /// Seconds a block; `None` if nothing was loaded lately.
    pub(super) fn block_s(&self, tier: Tier, now: Duration) -> Option<f64> {
        let pace = self.0[tier.index()].lock().filter(|pace| pace.is_valid(now))?;
        (pace.blocks > 0.0).then(|| pace.seconds / pace.blocks)
    }
}

#[cfg(test)]
mod tests {
    use kvbm_tiers::{BlockKey, SlotId, SlotRef};
    use tracing::Span;

    use super::*;
    use crate::scheduler::core_of;
    use crate::table::Table;
    use crate::task::{Class, CopyTask, TaskId, TransferId};

    const WRITE: Route = Route::new(Tier::Host, Tier::Object);

    fn task(block: u32) -> RoutedTask {
        let slot = |tier| SlotRef { tier, slot: SlotId(block), generation: 0 };
        let task = CopyTask {
            id: TaskId { transfer: TransferId { place: 0, life: 0 }, block },
            class: Class::Flush,
            block: BlockKey { hash: u128::from(block) + 1, group: 0 },
            parent: None,
            owner: None,
            from: slot(WRITE.from),
            to: slot(WRITE.to),
            via: None,
            is_probe: false,
        };
        RoutedTask::new(task, true, None)
    }

    #[test]
    fn a_success_between_errors_keeps_the_breaker_closed() {
        let core = core_of(Table::new([]));
        let batch = core.health.batches.start(
            WRITE,
            Class::Flush,
            Vec::new(),
            Duration::ZERO,
            Span::none(),
        );
        let judge = |are_well: &[bool]| {
            let result = |is_well: &bool| {
                let error = || CopyError::new(CopyErrorKind::Io, "a defect that a test wants");
                if *is_well { Ok(()) } else { Err(error()) }
            };
            let tasks: Vec<_> = (0..).map(task).zip(are_well.iter().map(result)).collect();
            core.health.judge(&batch, &tasks, Duration::ZERO);
            core.health.breakers.is_open(WRITE)
        };
        assert!(!judge(&[false, false, true, false]), "no three errors came in a row");
        assert!(judge(&[false, false]));
    }

    #[test]
    fn the_pace_follows_what_is_measured() {
        let paces = TierPaces::default();
        let now = Duration::from_mins(1);
        assert_eq!(paces.block_s(Tier::Disk, now), None);
        let near = |expected: f64| {
            paces.block_s(Tier::Disk, now).is_some_and(|s| (s - expected).abs() < 1e-4)
        };
        paces.learn(Tier::Disk, 10, Duration::from_millis(10), now);
        assert!(near(0.001));
        (0..100).for_each(|_| paces.learn(Tier::Disk, 10, Duration::from_millis(50), now));
        assert!(near(0.005));
        assert_eq!(paces.block_s(Tier::Host, now), None);
        assert_eq!(
            paces.block_s(Tier::Disk, now + VALID),
            None,
            "a tier that was slow is tried again"
        );
    }
}
