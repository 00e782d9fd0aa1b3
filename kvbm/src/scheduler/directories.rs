//! Directories of the disk tier: one whose medium fails is left alone, and the others go on.
//!
//! A tier in one directory is left alone as a whole, by its [breakers](super::breaker); so is the last of several that
//! is well, and so are all where one hangs. One of several that fails every operation gets no slots any more and is not
//! read, and is tried from time to time, with a slot of its own that holds no block. What it holds leaves the tier, with
//! all that hangs on it, when it is not well again after a few tries.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvbm_tiers::{BlockKey, CopyError, CopyOp, Frame, SlotRef, Tier};

use super::Core;
use super::errand::Purpose;
use crate::sync::{AtomicUsize, Mutex};

/// All of them; none, where there are not several.
#[derive(Debug)]
pub(super) struct Directories {
    all: Vec<Directory>,
    first_pause: Duration,
}

#[derive(Debug)]
struct Directory {
    /// Holds no block.
    trial: Frame,
    /// Errors since the last success.
    errors: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Well,
    /// It could not be opened.
    Absent,
    LeftAlone {
        /// When it is tried next; `None`: it is being tried.
        next: Option<Duration>,
        pause: Duration,
        failed_trials: u32,
    },
}

/// What a trial showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Well,
    /// It was left alone for long enough: its blocks are to go.
    Lost,
    NotYet,
}

/// A bad block is no reason to leave a directory alone; this many errors in a row are.
const MAX_ERRORS: usize = 3;
/// So many trials fail before blocks are dropped: some 3.5 s, in which a bus may reset.
const TRIALS: u32 = 3;
/// The pause after which doubling ends, in first pauses.
const MAX_PAUSES: u32 = 64;

impl Directories {
    /// Each with a slot to try it with, and whether it is there.
    pub(super) fn new(trials: impl IntoIterator<Item = (Frame, bool)>, first_pause: Duration) -> Self {
        let directory = |(trial, is_there)| Directory {
            trial,
            errors: AtomicUsize::new(0),
            state: Mutex::new(if is_there { State::Well } else { State::Absent }),
        };
        Self { all: trials.into_iter().map(directory).collect(), first_pause }
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

    /// Whether nothing is to be read or written there now.
    pub(super) fn is_left_alone(&self, slot: SlotRef) -> bool {
        self.of_slot(slot).is_some_and(|dir| *self.all[dir].state.lock() != State::Well)
    }

    fn succeeded(&self, dir: usize) {
        let errors = &self.all[dir].errors;
        if errors.load(Ordering::Relaxed) > 0 {
            errors.store(0, Ordering::Relaxed);
        }
    }

    /// An operation failed. `None`: it is for the tier's breakers, since no other directory is well. Else whether this
    /// one is to be left alone from now on.
    fn failed(&self, dir: usize, now: Duration) -> Option<bool> {
        let is_well = |other: usize| *self.all[other].state.lock() == State::Well;
        if !(0..self.all.len()).any(|other| other != dir && is_well(other)) {
            return None;
        }
        let directory = &self.all[dir];
        let is_too_much = directory.errors.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_ERRORS;
        let mut state = directory.state.lock();
        if !is_too_much || *state != State::Well {
            return Some(false);
        }
        let pause = self.first_pause;
        *state = State::LeftAlone { next: Some(now + pause), pause, failed_trials: 0 };
        Some(true)
    }

    /// A directory that is to be tried now, and by this call is being tried.
    fn due(&self, now: Duration) -> Option<(usize, SlotRef)> {
        self.all.iter().enumerate().find_map(|(dir, directory)| match &mut *directory.state.lock() {
            State::LeftAlone { next, .. } if next.is_some_and(|due| due <= now) => {
                *next = None;
                Some((dir, directory.trial.slot_ref()))
            }
            _ => None,
        })
    }

    fn tried(&self, dir: usize, is_well: bool, now: Duration) -> Verdict {
        let directory = &self.all[dir];
        let mut state = directory.state.lock();
        if is_well {
            directory.errors.store(0, Ordering::Relaxed);
            *state = State::Well;
            return Verdict::Well;
        }
        let State::LeftAlone { next, pause, failed_trials } = &mut *state else { return Verdict::NotYet };
        *pause = (*pause * 2).min(self.first_pause * MAX_PAUSES);
        *next = Some(now + *pause);
        *failed_trials += 1;
        if *failed_trials == TRIALS { Verdict::Lost } else { Verdict::NotYet }
    }

    /// There was nothing to try it with.
    fn try_later(&self, dir: usize, now: Duration) {
        if let State::LeftAlone { next, pause, .. } = &mut *self.all[dir].state.lock() {
            *next = Some(now + *pause);
        }
    }
}

impl Core {
    /// A copy arrived.
    pub(super) fn directory_answers(&self, op: &CopyOp) {
        if let Some(dir) = self.directories.of(op) {
            self.directories.succeeded(dir);
        }
    }

    /// A medium failed at a copy. Whether that was one of several, which the tier's breakers need not know.
    pub(super) fn directory_failed(&self, op: &CopyOp, now: Duration) -> bool {
        let Some(dir) = self.directories.of(op) else { return false };
        let Some(is_left_alone) = self.directories.failed(dir, now) else { return false };
        if is_left_alone {
            tracing::error!(dir, "a directory of the disk tier fails, and is left alone; the others go on");
            self.metrics.directory_failed(dir);
            self.table.lock().close_directory(Tier::Disk, dir, true);
            self.flushing.wake();
        }
        true
    }

    /// Tries directories that are left alone, where it is time.
    pub(super) fn try_directories(self: &Arc<Self>) {
        let now = self.clock.uptime();
        while let Some((dir, slot)) = self.directories.due(now) {
            let Some(staging) = self.staging.lock().lend() else {
                return self.directories.try_later(dir, now);
            };
            let here = staging.slot_ref();
            self.try_copy(dir, (here, slot), staging);
        }
    }

    /// Writes to the directory, and reads what was written, which is verified on the way.
    fn try_copy(self: &Arc<Self>, dir: usize, (from, to): (SlotRef, SlotRef), staging: Frame) {
        let block = BlockKey { hash: 0, group: 0 };
        let op = CopyOp { block, parent: None, owner: None, from, to };
        self.run_errand(op, staging, Purpose::Trial(dir));
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
            return self.try_copy(dir, (op.to, op.from), staging);
        }
        self.staging.lock().settle(staging);
        self.directory_tried(dir, error);
    }

    /// A trial has ended, or is overdue.
    pub(super) fn directory_tried(self: &Arc<Self>, dir: usize, error: Option<&CopyError>) {
        let verdict = self.directories.tried(dir, error.is_none(), self.clock.uptime());
        match (verdict, error) {
            (Verdict::Well, _) => {
                tracing::info!(dir, "a directory of the disk tier is well again");
                self.table.lock().close_directory(Tier::Disk, dir, false);
            }
            (Verdict::Lost, _) => {
                tracing::error!(dir, "a directory of the disk tier is lost: its blocks are dropped");
                self.table.lock().lose_directory(Tier::Disk, dir);
            }
            (Verdict::NotYet, Some(error)) => {
                tracing::warn!(dir, %error, "a directory of the disk tier still fails");
            }
            (Verdict::NotYet, None) => {}
        }
        self.flushing.wake();
        self.pump();
    }

    /// Drops some of the blocks of directories that are lost. Returns whether there are more.
    pub(super) fn drop_lost_some(self: &Arc<Self>) -> bool {
        let mut table = self.table();
        let has_more = table.drop_lost();
        let mut effects = table.take_effects();
        drop(table);
        // They were told of together.
        effects.dropped.clear();
        self.apply(effects);
        has_more
    }
}

#[cfg(test)]
mod tests {
    use kvbm_tiers::FramePool;

    use super::*;

    fn directories(there: &[bool]) -> Directories {
        let mut pool = FramePool::sharded(Tier::Disk, there.len() as u32, there.len() as u32);
        let trials: Vec<_> = there.iter().map(|&is_there| (pool.take().unwrap(), is_there)).collect();
        Directories::new(trials, Duration::from_millis(500))
    }

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn errors_in_a_row_have_one_left_alone_and_a_trial_brings_it_back() {
        let two = directories(&[true, true]);
        for _ in 0..2 {
            assert_eq!(two.failed(1, at(0)), Some(false));
            assert_eq!(two.failed(1, at(0)), Some(false));
            two.succeeded(1);
        }
        (0..2).for_each(|_| assert_eq!(two.failed(1, at(0)), Some(false)));
        assert_eq!(two.failed(1, at(0)), Some(true));
        assert_eq!(two.failed(1, at(0)), Some(false), "it is known");
        assert!(two.is_left_alone(two.all[1].trial.slot_ref()));
        assert_eq!(two.due(at(499)), None);
        assert_eq!(two.due(at(500)).map(|(dir, _)| dir), Some(1));
        assert_eq!(two.due(at(900)), None, "one trial at a time");
        assert_eq!(two.tried(1, true, at(900)), Verdict::Well);
        assert!(!two.is_left_alone(two.all[1].trial.slot_ref()));
    }

    #[test]
    fn a_few_trials_that_fail_have_it_lost_once_and_it_is_tried_all_the_same() {
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
        let lost = verdicts.iter().position(|&verdict| verdict == Verdict::Lost);
        assert_eq!(
            (lost, verdicts.iter().filter(|&&verdict| verdict == Verdict::Lost).count()),
            (Some(2), 1)
        );
    }

    #[test]
    fn the_last_one_that_is_well_is_the_affair_of_the_breakers() {
        let two = directories(&[true, false]);
        assert_eq!(two.failed(0, at(0)), None);
        let two = directories(&[true, true]);
        (0..3).for_each(|_| _ = two.failed(0, at(0)));
        assert_eq!((two.failed(1, at(0)), two.due(at(500)).is_some()), (None, true));
    }
}
