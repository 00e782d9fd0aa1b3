//! Directories of the disk tier: one whose medium fails is left alone, and the others go on.
//!
//! For a tier in one directory its [breakers](super::breaker) do this; so they do for the last of
//! several that is well, and when none answers. One of several that fails every operation, or hangs
//! while another answers, gives out no slots and is not read. It is tried from time to time, with a
//! slot of its own that holds no block. If a few trials fail, its blocks leave the tier with their
//! descendants. A full one gives out no slots either until a trial succeeds, and is read as before.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvbm_tiers::{BlockKey, CopyError, CopyOp, Frame, SlotRef, Tier};

use super::Core;
use super::batch::TaskBatch;
use super::errand::{CopyPurpose, overdue};
use super::health::MediaHealth;
use crate::sync::{AtomicBool, AtomicUsize, Mutex};
use crate::table::Budget;

/// All of them; none, unless there are several.
#[derive(Debug)]
pub(super) struct DiskDirectories {
    all: Vec<DiskDirectory>,
    /// Some may be suspect.
    has_suspects: AtomicBool,
    first_pause: Duration,
}

#[derive(Debug)]
struct DiskDirectory {
    /// Holds no block.
    trial: Frame,
    /// Errors since the last success.
    errors: AtomicUsize,
    pulse: Mutex<DirectoryPulse>,
    state: Mutex<DirectoryState>,
}

/// Whether a directory answers.
#[derive(Clone, Copy, Debug, Default)]
struct DirectoryPulse {
    /// When it last completed something, successfully or not.
    answered: Duration,
    /// Copies have been overdue since, and so far no other directory has answered.
    is_suspect: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DirectoryState {
    Well,
    /// It could not be opened.
    Absent,
    /// It has no room for new blocks, and is read.
    Full(DirectoryTrials),
    LeftAlone(DirectoryTrials),
}

/// The trials of one that is not well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DirectoryTrials {
    /// When the next trial is due; `None`: one is under way.
    next: Option<Duration>,
    pause: Duration,
    failed: u32,
    /// A trial is overdue, and the medium has its slot until it ends: no other is sent, and each
    /// that falls due counts as failed.
    is_stuck: bool,
}

/// What is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DueTrial {
    /// A trial with this slot.
    Trial(SlotRef),
    /// Another trial, while an overdue one has not ended.
    Stuck,
}

/// What a trial showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrialVerdict {
    Well,
    /// It was left alone for long enough: its blocks must go.
    Lost,
    NotYet,
}

/// A bad block is no reason to leave a directory alone; this many errors in a row are.
const MAX_ERRORS: usize = 3;
/// Trials that fail before blocks are dropped: some 3.5 s, in which a bus may reset.
const TRIALS: u32 = 3;
/// The pause after which doubling ends, in first pauses.
const MAX_PAUSES: u32 = 64;

impl DiskDirectories {
    /// Each with a slot for its trials, and whether it is there.
    pub(super) fn new(
        trials: impl IntoIterator<Item = (Frame, bool)>,
        first_pause: Duration,
    ) -> Self {
        let directory = |(trial, is_there)| DiskDirectory {
            trial,
            errors: AtomicUsize::new(0),
            pulse: Mutex::default(),
            state: Mutex::new(if is_there { DirectoryState::Well } else { DirectoryState::Absent }),
        };
        let all = trials.into_iter().map(directory).collect();
        Self { all, has_suspects: AtomicBool::new(false), first_pause }
    }

    /// The directory that a copy reads or writes.
    fn of(&self, op: &CopyOp) -> Option<usize> {
        let slot = [op.from, op.to].into_iter().find(|slot| slot.tier == Tier::Disk)?;
        self.of_slot(slot)
    }

    fn of_slot(&self, slot: SlotRef) -> Option<usize> {
        let is_of_several = slot.tier == Tier::Disk && !self.all.is_empty();
        is_of_several.then(|| slot.slot.0 as usize % self.all.len())
    }

    /// Whether nothing may be read or written there now.
    pub(super) fn is_left_alone(&self, slot: SlotRef) -> bool {
        self.of_slot(slot).is_some_and(|dir| !self.is_of_use(dir))
    }

    /// Whether its blocks can be read.
    fn is_of_use(&self, dir: usize) -> bool {
        matches!(*self.all[dir].state.lock(), DirectoryState::Well | DirectoryState::Full(_))
    }

    /// Whether any is left alone, even an empty one.
    fn are_left_alone(&self) -> bool {
        self.all
            .iter()
            .any(|directory| matches!(*directory.state.lock(), DirectoryState::LeftAlone(_)))
    }

    /// An operation succeeded. Returns those to leave alone from now on, since copies there are
    /// overdue.
    fn succeeded(&self, dir: usize, now: Duration) -> Vec<usize> {
        self.answered(dir, now);
        let errors = &self.all[dir].errors;
        if errors.load(Ordering::Relaxed) > 0 {
            errors.store(0, Ordering::Relaxed);
        }
        if !self.has_suspects.swap(false, Ordering::Relaxed) {
            return Vec::new();
        }
        let is_suspect = |other: &usize| self.all[*other].pulse.lock().is_suspect;
        (0..self.all.len())
            .filter(is_suspect)
            .filter(|&other| self.leave_alone(other, now))
            .collect()
    }

    /// It completed something, successfully or not.
    fn answered(&self, dir: usize, now: Duration) {
        *self.all[dir].pulse.lock() = DirectoryPulse { answered: now, is_suspect: false };
    }

    fn to_be_tried(&self, now: Duration) -> DirectoryTrials {
        let pause = self.first_pause;
        DirectoryTrials { next: Some(now + pause), pause, failed: 0, is_stuck: false }
    }

    /// An operation failed. `None`: the tier's breakers handle it, since no other directory is
    /// well. Else whether to leave this one alone from now on.
    fn failed(&self, dir: usize, now: Duration) -> Option<bool> {
        self.answered(dir, now);
        if !(0..self.all.len()).any(|other| other != dir && self.is_of_use(other)) {
            return None;
        }
        let is_too_much = self.all[dir].errors.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_ERRORS;
        Some(is_too_much && self.leave_alone(dir, now))
    }

    /// Returns whether that is new.
    fn leave_alone(&self, dir: usize, now: Duration) -> bool {
        let mut state = self.all[dir].state.lock();
        let is_new = matches!(*state, DirectoryState::Well | DirectoryState::Full(_));
        if is_new {
            *state = DirectoryState::LeftAlone(self.to_be_tried(now));
        }
        is_new
    }

    /// There is no room for a block. `None`: the tier's breakers handle it, since no other
    /// directory takes blocks. Else whether this one gets none from now on.
    fn found_full(&self, dir: usize, now: Duration) -> Option<bool> {
        self.answered(dir, now);
        let is_well = |other: usize| *self.all[other].state.lock() == DirectoryState::Well;
        if !(0..self.all.len()).any(|other| other != dir && is_well(other)) {
            return None;
        }
        let mut state = self.all[dir].state.lock();
        let is_new = *state == DirectoryState::Well;
        if is_new {
            *state = DirectoryState::Full(self.to_be_tried(now));
        }
        Some(is_new)
    }

    /// These have completed nothing in time `since` then. `None`: the tier's breakers handle it,
    /// since no other directory has answered meanwhile; when one does, these are the ones that
    /// hang. Else those of them to leave alone from now on.
    fn hang(&self, hanging: &[usize], since: Duration, now: Duration) -> Option<Vec<usize>> {
        let answers =
            |dir: usize| self.is_of_use(dir) && self.all[dir].pulse.lock().answered >= since;
        let is_known = hanging.iter().all(|&dir| !self.is_of_use(dir));
        if !is_known && !(0..self.all.len()).any(|dir| !hanging.contains(&dir) && answers(dir)) {
            hanging.iter().for_each(|&dir| self.all[dir].pulse.lock().is_suspect = true);
            self.has_suspects.store(true, Ordering::Relaxed);
            return None;
        }
        Some(hanging.iter().copied().filter(|&dir| self.leave_alone(dir, now)).collect())
    }

    /// A directory whose trial is due now; this call begins it.
    fn due(&self, now: Duration) -> Option<(usize, DueTrial)> {
        self.all.iter().enumerate().find_map(|(dir, directory)| {
            match &mut *directory.state.lock() {
                DirectoryState::LeftAlone(trials) | DirectoryState::Full(trials)
                    if trials.next.is_some_and(|due| due <= now) =>
                {
                    trials.next = None;
                    let trial = DueTrial::Trial(directory.trial.slot_ref());
                    Some((dir, if trials.is_stuck { DueTrial::Stuck } else { trial }))
                }
                _ => None,
            }
        })
    }

    fn tried(&self, dir: usize, is_well: bool, now: Duration) -> TrialVerdict {
        let directory = &self.all[dir];
        let mut state = directory.state.lock();
        if is_well {
            directory.errors.store(0, Ordering::Relaxed);
            *state = DirectoryState::Well;
            return TrialVerdict::Well;
        }
        let is_read = matches!(*state, DirectoryState::Full(_));
        let (DirectoryState::LeftAlone(trials) | DirectoryState::Full(trials)) = &mut *state else {
            return TrialVerdict::NotYet;
        };
        trials.pause = (trials.pause * 2).min(self.first_pause * MAX_PAUSES);
        trials.next = Some(now + trials.pause);
        trials.failed += 1;
        if trials.failed == TRIALS && !is_read { TrialVerdict::Lost } else { TrialVerdict::NotYet }
    }

    /// A trial is overdue, or has ended after all: then the next may go.
    fn trial_is_stuck(&self, dir: usize, is_stuck: bool, now: Duration) {
        self.change_trials(dir, |trials| {
            trials.is_stuck = is_stuck;
            if !is_stuck {
                trials.next = Some(now);
            }
        });
    }

    /// Its trial could not be made: another is due later.
    fn try_later(&self, dir: usize, now: Duration) {
        self.change_trials(dir, |trials| trials.next = Some(now + trials.pause));
    }

    fn change_trials(&self, dir: usize, change: impl FnOnce(&mut DirectoryTrials)) {
        if let DirectoryState::LeftAlone(trials) | DirectoryState::Full(trials) =
            &mut *self.all[dir].state.lock()
        {
            change(trials);
        }
    }
}

impl MediaHealth {
    /// Copies arrived.
    pub(super) fn directories_answer(&self, slots: impl Iterator<Item = SlotRef>, now: Duration) {
        let mut dirs: Vec<_> = slots.filter_map(|slot| self.directories.of_slot(slot)).collect();
        dirs.sort_unstable();
        dirs.dedup();
        let hanging = dirs.into_iter().flat_map(|dir| self.directories.succeeded(dir, now));
        hanging.for_each(|dir| self.directory_hangs(dir));
    }

    /// A copy that was overdue has ended.
    pub(super) fn directory_came_back(&self, to_or_from: [SlotRef; 2]) {
        let dir = to_or_from.into_iter().find_map(|slot| self.directories.of_slot(slot));
        dir.into_iter().for_each(|dir| self.directories.answered(dir, self.clock.uptime()));
    }

    fn directory_hangs(&self, dir: usize) {
        tracing::error!(
            dir,
            "a directory of the disk tier hangs, and is left alone; the others go on"
        );
        self.directory_is_left_alone(dir);
    }

    /// A medium failed at a copy. True: it was one of several directories, and the tier's breakers
    /// need not know.
    pub(super) fn directory_failed(&self, op: &CopyOp, now: Duration) -> bool {
        let Some(dir) = self.directories.of(op) else { return false };
        let Some(is_left_alone) = self.directories.failed(dir, now) else { return false };
        if is_left_alone {
            tracing::error!(
                dir,
                "a directory of the disk tier fails, and is left alone; the others go on"
            );
            self.directory_is_left_alone(dir);
        }
        true
    }

    fn directory_is_left_alone(&self, dir: usize) {
        self.metrics.directory_failed(dir);
        self.table.lock().close_directory(Tier::Disk, dir, true);
        self.waker.wake();
    }

    /// A medium has no room for a block. True: it is one of several directories, and the tier's
    /// breakers need not know.
    pub(super) fn directory_is_full(&self, op: &CopyOp, now: Duration) -> bool {
        let Some(dir) = self.directories.of(op) else { return false };
        let Some(is_news) = self.directories.found_full(dir, now) else { return false };
        if is_news {
            tracing::error!(
                dir,
                "a directory of the disk tier is full: it is read, and gets no more blocks"
            );
            self.table.lock().close_directory(Tier::Disk, dir, true);
            self.waker.wake();
        }
        true
    }

    /// Copies of a batch are overdue. True: some of several directories hang while others answer,
    /// and the tier's breakers need not know.
    pub(super) fn directories_hang(&self, batch: &TaskBatch, now: Duration) -> bool {
        let Some(hanging) = self.directories_of(batch) else { return false };
        let Some(left_alone) = self.directories.hang(&hanging, batch.started, now) else {
            return false;
        };
        left_alone.into_iter().for_each(|dir| self.directory_hangs(dir));
        true
    }

    /// The directories where copies of a batch are pending; `None`: another medium is among them.
    fn directories_of(&self, batch: &TaskBatch) -> Option<Vec<usize>> {
        let mut dirs =
            batch.working().iter().map(|op| self.directories.of(op)).collect::<Option<Vec<_>>>()?;
        dirs.sort_unstable();
        dirs.dedup();
        (!dirs.is_empty()).then_some(dirs)
    }

    /// Batches that reached their time limit in directories that are left alone: the limit need not
    /// run for each of them in turn.
    pub(super) fn stuck_batches(&self, now: Duration) -> Vec<Arc<TaskBatch>> {
        if !self.directories.are_left_alone() {
            return Vec::new();
        }
        let are_left_alone =
            |dirs: Vec<usize>| dirs.into_iter().all(|dir| !self.directories.is_of_use(dir));
        let is_stuck = |batch: &Arc<TaskBatch>| {
            let is_late = batch.idle(now) > self.tuning.limit(batch.route);
            is_late
                && batch.errand.is_none()
                && self.directories_of(batch).is_some_and(are_left_alone)
        };
        self.batches.all().into_iter().filter(is_stuck).collect()
    }

    /// A trial has ended, or is overdue.
    fn directory_tried(&self, dir: usize, error: Option<&CopyError>) {
        let verdict = self.directories.tried(dir, error.is_none(), self.clock.uptime());
        match (verdict, error) {
            (TrialVerdict::Well, _) => {
                tracing::info!(dir, "a directory of the disk tier is well again");
                self.table.lock().close_directory(Tier::Disk, dir, false);
            }
            (TrialVerdict::Lost, _) => {
                tracing::error!(
                    dir,
                    "a directory of the disk tier is lost: its blocks are dropped"
                );
                self.table.lock().lose_directory(Tier::Disk, dir);
            }
            (TrialVerdict::NotYet, Some(error)) => {
                tracing::warn!(dir, %error, "a directory of the disk tier still fails");
            }
            (TrialVerdict::NotYet, None) => {}
        }
        self.waker.wake();
    }
}

impl Core {
    /// Tries directories that are left alone, if a trial is due.
    pub(super) fn try_directories(self: &Arc<Self>) {
        let now = self.clock.uptime();
        while let Some((dir, due)) = self.health.directories.due(now) {
            let DueTrial::Trial(slot) = due else {
                self.directory_tried(dir, Some(&overdue()));
                continue;
            };
            let Some(staging) = self.sending.staging.lock().lend() else {
                return self.health.directories.try_later(dir, now);
            };
            let here = staging.slot_ref();
            self.try_copy(dir, here, slot, staging);
        }
    }

    /// Writes to the directory, and reads that back, which verifies it.
    fn try_copy(self: &Arc<Self>, dir: usize, from: SlotRef, to: SlotRef, staging: Frame) {
        let block = BlockKey { hash: 0, group: 0 };
        let op = CopyOp { block, parent: None, owner: None, from, to };
        self.run_errand(op, staging, CopyPurpose::Trial(dir));
    }

    /// A copy of a trial has ended.
    pub(super) fn trial_ended(
        self: &Arc<Self>,
        dir: usize,
        op: &CopyOp,
        staging: Frame,
        error: Option<&CopyError>,
    ) {
        if error.is_none() && op.to.tier == Tier::Disk {
            return self.try_copy(dir, op.to, op.from, staging);
        }
        self.sending.staging.lock().return_lent(staging);
        self.directory_tried(dir, error);
    }

    /// A trial is overdue.
    pub(super) fn trial_overdue(self: &Arc<Self>, dir: usize) {
        self.health.directories.trial_is_stuck(dir, true, self.clock.uptime());
        self.directory_tried(dir, Some(&overdue()));
    }

    /// An overdue trial has ended.
    pub(super) fn trial_came_back(&self, dir: usize) {
        self.health.directories.trial_is_stuck(dir, false, self.clock.uptime());
    }

    /// A trial has ended, or is overdue.
    fn directory_tried(self: &Arc<Self>, dir: usize, error: Option<&CopyError>) {
        self.health.directory_tried(dir, error);
        self.pump();
    }

    /// Drops some of the blocks of directories that are lost. Returns whether there are more.
    pub(super) fn drop_lost_some(self: &Arc<Self>) -> bool {
        let mut table = self.table();
        let has_more = table.drop_lost(&mut Budget::of_a_hold());
        let mut effects = table.take_effects();
        drop(table);
        // They were reported together.
        effects.dropped.clear();
        self.apply(effects);
        has_more
    }
}

#[cfg(test)]
mod tests {
    use kvbm_tiers::FramePool;

    use super::*;

    fn directories(there: &[bool]) -> DiskDirectories {
        let mut pool = FramePool::sharded(Tier::Disk, there.len() as u32, there.len() as u32);
        let trials: Vec<_> =
            there.iter().map(|&is_there| (pool.take().unwrap(), is_there)).collect();
        DiskDirectories::new(trials, Duration::from_millis(500))
    }

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn errors_have_one_left_alone_until_a_trial_succeeds() {
        let two = directories(&[true, true]);
        for _ in 0..2 {
            assert_eq!(two.failed(1, at(0)), Some(false));
            assert_eq!(two.failed(1, at(0)), Some(false));
            assert!(two.succeeded(1, at(0)).is_empty());
        }
        (0..2).for_each(|_| assert_eq!(two.failed(1, at(0)), Some(false)));
        assert_eq!(two.failed(1, at(0)), Some(true));
        assert_eq!(two.failed(1, at(0)), Some(false), "it is known");
        assert!(two.is_left_alone(two.all[1].trial.slot_ref()));
        assert_eq!(two.due(at(499)), None);
        assert_eq!(two.due(at(500)), Some((1, DueTrial::Trial(two.all[1].trial.slot_ref()))));
        assert_eq!(two.due(at(900)), None, "one trial at a time");
        assert_eq!(two.tried(1, true, at(900)), TrialVerdict::Well);
        assert!(!two.is_left_alone(two.all[1].trial.slot_ref()));
    }

    #[test]
    fn failed_trials_lose_it_once_and_trials_go_on() {
        let two = directories(&[true, true]);
        (0..3).for_each(|_| _ = two.failed(0, at(0)));
        let mut now = 0;
        let verdicts: Vec<_> = (0..5)
            .map(|_| {
                now += 64_000;
                assert!(two.due(at(now)).is_some());
                two.tried(0, false, at(now))
            })
            .collect();
        let lost = verdicts.iter().position(|&verdict| verdict == TrialVerdict::Lost);
        assert_eq!(
            (lost, verdicts.iter().filter(|&&verdict| verdict == TrialVerdict::Lost).count()),
            (Some(2), 1)
        );
    }

    #[test]
    fn one_that_hangs_is_left_alone_only_while_another_answers() {
        let two = directories(&[true, true]);
        assert!(two.succeeded(0, at(50)).is_empty());
        assert_eq!(two.hang(&[1], at(60), at(200)), None);
        two.answered(1, at(201));
        assert!(two.succeeded(0, at(202)).is_empty(), "it answered meanwhile");
        assert_eq!(two.hang(&[0, 1], at(10), at(203)), None);
        [0, 1].into_iter().for_each(|dir| two.answered(dir, at(204)));
        two.answered(0, at(205));
        assert_eq!(two.hang(&[1], at(10), at(200)), Some(vec![1]));
        assert!(two.is_left_alone(two.all[1].trial.slot_ref()) && two.are_left_alone());
        assert_eq!(two.hang(&[1], at(100), at(300)), Some(vec![]), "it is known");
        assert_eq!(two.hang(&[0], at(100), at(300)), None, "it is the last one");
    }

    #[test]
    fn one_that_hung_is_left_alone_when_another_answers() {
        let two = directories(&[true, true]);
        assert_eq!(two.hang(&[1], at(60), at(200)), None);
        assert!(!two.is_left_alone(two.all[1].trial.slot_ref()));
        assert_eq!(two.succeeded(0, at(300)), [1]);
        assert!(two.is_left_alone(two.all[1].trial.slot_ref()));
        assert_eq!((two.succeeded(0, at(301)), two.hang(&[0], at(400), at(500))), (vec![], None));
        assert!(two.succeeded(0, at(501)).is_empty(), "it has shown that it answers");
    }

    #[test]
    fn a_hanging_trial_keeps_its_slot_and_later_ones_fail() {
        let two = directories(&[true, true]);
        assert!(two.leave_alone(1, at(0)));
        assert!(matches!(two.due(at(500)), Some((1, DueTrial::Trial(_)))));
        two.trial_is_stuck(1, true, at(900));
        assert_eq!(two.tried(1, false, at(900)), TrialVerdict::NotYet);
        assert_eq!(two.due(at(2_000)), Some((1, DueTrial::Stuck)));
        assert_eq!(two.tried(1, false, at(2_000)), TrialVerdict::NotYet);
        assert_eq!(two.due(at(4_000)), Some((1, DueTrial::Stuck)));
        assert_eq!(two.tried(1, false, at(4_000)), TrialVerdict::Lost);
        two.trial_is_stuck(1, false, at(5_000));
        assert!(matches!(two.due(at(5_000)), Some((1, DueTrial::Trial(_)))));
        assert_eq!(two.tried(1, true, at(5_001)), TrialVerdict::Well);
    }

    #[test]
    fn one_that_is_full_is_read_and_never_lost() {
        let two = directories(&[true, true]);
        assert_eq!((two.found_full(1, at(0)), two.found_full(1, at(0))), (Some(true), Some(false)));
        assert!(!two.is_left_alone(two.all[1].trial.slot_ref()));
        assert_eq!(two.found_full(0, at(0)), None, "nothing else takes blocks");
        for trial in 1..6 {
            assert!(two.due(at(trial * 64_000)).is_some());
            assert_eq!(two.tried(1, false, at(trial * 64_000)), TrialVerdict::NotYet);
        }
        // It may fail too.
        assert_eq!((0..3).map(|_| two.failed(1, at(0))).last(), Some(Some(true)));
        assert!(two.is_left_alone(two.all[1].trial.slot_ref()));
        assert_eq!(two.tried(1, true, at(1)), TrialVerdict::Well);
    }

    #[test]
    fn the_last_healthy_one_is_left_to_the_breakers() {
        let two = directories(&[true, false]);
        assert_eq!(two.failed(0, at(0)), None);
        let two = directories(&[true, true]);
        (0..3).for_each(|_| _ = two.failed(0, at(0)));
        assert_eq!((two.failed(1, at(0)), two.due(at(500)).is_some()), (None, true));
    }
}
