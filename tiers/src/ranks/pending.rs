//! Batches that the ranks are working on, and what each has said of them.

use std::collections::HashMap;

use super::protocol::{Ended, FailedCopy};
use crate::copy::{Completion, CopyError, CopyErrorKind, Done};

/// Ranks at most, so that a set of them is a word.
pub const MAX_RANKS: u16 = 64;

/// A set of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RankSet(u64);

impl RankSet {
    const fn all(world: u16) -> Self {
        Self(u64::MAX >> (MAX_RANKS - world))
    }

    /// Whether it was in.
    const fn remove(&mut self, rank: u16) -> bool {
        let bit = 1 << rank;
        let was_in = self.0 & bit != 0;
        self.0 &= !bit;
        was_in
    }

    const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// All batches under way.
#[derive(Debug, Default)]
pub(super) struct Pending {
    batches: HashMap<u64, Batch>,
    next: u64,
}

#[derive(Debug)]
struct Batch {
    done: Done,
    copies: Vec<Copy>,
    /// Copies that some rank has not ended.
    left: usize,
}

#[derive(Clone, Debug)]
struct Copy {
    /// Ranks that have not ended it.
    awaited: RankSet,
    /// The worst that a rank said of it.
    error: Option<CopyError>,
}

/// Copies that every rank has ended, to be reported when no lock is held.
#[derive(Debug)]
#[must_use = "who waits for the copies is to be told"]
pub(super) struct Report {
    done: Done,
    completions: Vec<Completion>,
}

impl Report {
    pub(super) fn send(self) {
        if !self.completions.is_empty() {
            self.done.complete_all(self.completions);
        }
    }
}

/// A rank reported what it cannot know of.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("it reported copy {op} of batch {batch}, which it was not working on")]
pub(super) struct Unexpected {
    batch: u64,
    op: u32,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// All of `world` ranks are given `copies` copies. Returns the batch's number.
    pub(super) fn add(&mut self, copies: usize, world: u16, done: Done) -> u64 {
        let batch = self.next;
        self.next += 1;
        let copy = Copy { awaited: RankSet::all(world), error: None };
        self.batches.insert(batch, Batch { done, copies: vec![copy; copies], left: copies });
        batch
    }

    /// A rank has ended copies. An error leaves the batch as it was before the copy that it names.
    pub(super) fn ended(&mut self, rank: u16, ended: Ended) -> (Option<Report>, Result<(), Unexpected>) {
        let Some(batch) = self.batches.get_mut(&ended.batch) else {
            return (None, Err(Unexpected { batch: ended.batch, op: 0 }));
        };
        let mut completions = Vec::new();
        let number = ended.batch;
        let outcome = batch.take(rank, ended, &mut completions);
        let report = Report { done: batch.done.clone(), completions };
        if batch.left == 0 {
            self.batches.remove(&number);
        }
        (Some(report), outcome)
    }

    /// A rank is gone, with all that it ever confirmed of what is still under way: `why` becomes of all of that, as soon
    /// as the other ranks have ended it too.
    pub(super) fn lost(&mut self, rank: u16, why: &CopyError) -> Vec<Report> {
        let lost = |batch: &mut Batch| {
            let mut completions = Vec::new();
            for op in 0..batch.copies.len() {
                if !batch.copies[op].awaited.is_empty() {
                    batch.copies[op].note(why.clone());
                    batch.ended(rank, op, Ok(()), &mut completions);
                }
            }
            Report { done: batch.done.clone(), completions }
        };
        let reports = self.batches.values_mut().map(lost).collect();
        self.batches.retain(|_, batch| batch.left > 0);
        reports
    }
}

impl Batch {
    fn take(&mut self, rank: u16, ended: Ended, completions: &mut Vec<Completion>) -> Result<(), Unexpected> {
        let batch = ended.batch;
        for run in ended.arrived {
            // The first that the batch does not have ends it, whatever the run claims.
            for op in run.first..run.first.saturating_add(run.count) {
                self.ended(rank, op as usize, Ok(()), completions).ok_or(Unexpected { batch, op })?;
            }
        }
        for FailedCopy { op, kind, why } in ended.failed {
            let error = CopyError::new(kind, format!("rank {rank}: {why}"));
            self.ended(rank, op as usize, Err(error), completions).ok_or(Unexpected { batch, op })?;
        }
        Ok(())
    }

    /// `None`: the rank was not working on that.
    fn ended(
        &mut self,
        rank: u16,
        op: usize,
        result: Result<(), CopyError>,
        completions: &mut Vec<Completion>,
    ) -> Option<()> {
        let copy = self.copies.get_mut(op)?;
        copy.awaited.remove(rank).then_some(())?;
        result.err().into_iter().for_each(|error| copy.note(error));
        if copy.awaited.is_empty() {
            completions.push((op, copy.error.take().map_or(Ok(()), Err)));
            self.left -= 1;
        }
        Some(())
    }
}

impl Copy {
    fn note(&mut self, error: CopyError) {
        if self.error.as_ref().is_none_or(|known| severity(known.kind()) < severity(error.kind())) {
            self.error = Some(error);
        }
    }
}

/// What one rank says of a block holds for all of it: what says most of the block goes before what says something of
/// the medium.
const fn severity(kind: CopyErrorKind) -> u8 {
    match kind {
        CopyErrorKind::Refused => 0,
        CopyErrorKind::NoSpace => 1,
        CopyErrorKind::Unavailable => 2,
        CopyErrorKind::TimedOut => 3,
        CopyErrorKind::Io => 4,
        CopyErrorKind::Corrupt => 5,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use proptest::prelude::*;

    use super::*;

    type Told = Arc<Mutex<Vec<(usize, Option<CopyErrorKind>)>>>;

    fn listener() -> (Told, Done) {
        let told = Told::default();
        let done = {
            let told = Arc::clone(&told);
            Done::new(move |op, result| told.lock().push((op, result.err().map(|error| error.kind()))))
        };
        (told, done)
    }

    fn arrived(batch: u64, ops: &[u32]) -> Ended {
        let mut ended = Ended::new(batch);
        ops.iter().for_each(|&op| ended.arrived(op));
        ended
    }

    fn failed(batch: u64, op: u32, kind: CopyErrorKind) -> Ended {
        let mut ended = Ended::new(batch);
        ended.failed(op, kind, "as the test wants");
        ended
    }

    fn take(pending: &mut Pending, rank: u16, ended: Ended) -> Result<(), Unexpected> {
        let (report, outcome) = pending.ended(rank, ended);
        report.into_iter().for_each(Report::send);
        outcome
    }

    fn lose(pending: &mut Pending, rank: u16) {
        let why = CopyError::new(CopyErrorKind::Unavailable, "the rank is gone");
        pending.lost(rank, &why).into_iter().for_each(Report::send);
    }

    #[test]
    fn a_copy_ends_when_the_last_rank_has_ended_it() {
        let (mut pending, (told, done)) = (Pending::default(), listener());
        let batch = pending.add(3, 2, done);
        take(&mut pending, 0, arrived(batch, &[0, 1, 2])).unwrap();
        assert_eq!(*told.lock(), []);
        take(&mut pending, 1, arrived(batch, &[1])).unwrap();
        assert_eq!(*told.lock(), [(1, None)]);
        take(&mut pending, 1, arrived(batch, &[0, 2])).unwrap();
        assert_eq!(*told.lock(), [(1, None), (0, None), (2, None)]);
        assert!(pending.batches.is_empty());
    }

    #[test]
    fn the_worst_that_a_rank_says_counts() {
        for (one, other) in [
            (CopyErrorKind::Corrupt, CopyErrorKind::Unavailable),
            (CopyErrorKind::Io, CopyErrorKind::NoSpace),
            (CopyErrorKind::TimedOut, CopyErrorKind::Refused),
        ] {
            for (first, second) in [(one, other), (other, one)] {
                let (mut pending, (told, done)) = (Pending::default(), listener());
                let batch = pending.add(1, 3, done);
                take(&mut pending, 0, failed(batch, 0, first)).unwrap();
                take(&mut pending, 1, arrived(batch, &[0])).unwrap();
                take(&mut pending, 2, failed(batch, 0, second)).unwrap();
                assert_eq!(*told.lock(), [(0, Some(one))]);
            }
        }
    }

    #[test]
    fn a_lost_rank_takes_along_what_it_had_confirmed_and_the_others_are_waited_for() {
        let (mut pending, (told, done)) = (Pending::default(), listener());
        let batch = pending.add(3, 3, done);
        take(&mut pending, 0, arrived(batch, &[0, 1, 2])).unwrap();
        take(&mut pending, 1, arrived(batch, &[0, 1])).unwrap();
        take(&mut pending, 2, arrived(batch, &[0])).unwrap();
        assert_eq!(*told.lock(), [(0, None)]);
        lose(&mut pending, 1);
        assert_eq!(*told.lock(), [(0, None)], "rank 2 still writes to the slots");
        take(&mut pending, 2, arrived(batch, &[1, 2])).unwrap();
        let away = Some(CopyErrorKind::Unavailable);
        assert_eq!(*told.lock(), [(0, None), (1, away), (2, away)]);
    }

    #[test]
    fn what_a_rank_cannot_know_of_is_said_to_be_unexpected() {
        let (mut pending, (told, done)) = (Pending::default(), listener());
        let batch = pending.add(2, 2, done);
        take(&mut pending, 0, arrived(batch, &[0])).unwrap();
        for nonsense in [arrived(batch, &[0]), arrived(batch, &[2]), arrived(batch + 1, &[0])] {
            assert!(take(&mut pending, 0, nonsense).is_err());
        }
        assert!(take(&mut pending, 0, failed(batch, 7, CopyErrorKind::Io)).is_err());
        lose(&mut pending, 0);
        take(&mut pending, 1, arrived(batch, &[0, 1])).unwrap();
        assert_eq!(told.lock().len(), 2);
    }

    proptest! {
        /// Whatever the ranks say in whatever order, and whichever are lost: each copy is reported once, when nobody is
        /// left who works on it, and well only if all confirmed it.
        #[test]
        fn each_copy_is_reported_once(
            world in 1..6u16,
            copies in 1..20usize,
            events in prop::collection::vec((0..6u16, 0..24u32, 0..8u8), 0..300),
        ) {
            let (mut pending, (told, done)) = (Pending::default(), listener());
            let batch = pending.add(copies, world, done);
            let mut is_well = vec![true; copies];
            let mut ended = vec![vec![false; copies]; world as usize];
            for (rank, op, event) in events {
                let (rank, at) = (rank % world, op as usize);
                let was_over = |ended: &[Vec<bool>], op: usize| ended.iter().all(|ranks| ranks[op]);
                match event {
                    0 => {
                        (0..copies).filter(|&op| !was_over(&ended, op)).for_each(|op| is_well[op] = false);
                        ended[rank as usize].fill(true);
                        lose(&mut pending, rank);
                    }
                    1 => {
                        let is_new = at < copies && !ended[rank as usize][at];
                        let outcome = take(&mut pending, rank, failed(batch, op, CopyErrorKind::Io));
                        prop_assert_eq!(outcome.is_ok(), is_new);
                        if is_new {
                            (is_well[at], ended[rank as usize][at]) = (false, true);
                        }
                    }
                    _ => {
                        let is_new = at < copies && !ended[rank as usize][at];
                        let outcome = take(&mut pending, rank, arrived(batch, &[op]));
                        prop_assert_eq!(outcome.is_ok(), is_new);
                        if is_new {
                            ended[rank as usize][at] = true;
                        }
                    }
                }
                let over: Vec<_> = (0..copies).filter(|&op| was_over(&ended, op)).collect();
                let mut reported: Vec<_> = told.lock().iter().map(|&(op, _)| op).collect();
                reported.sort_unstable();
                prop_assert_eq!(reported, over);
            }
            for &(op, error) in told.lock().iter() {
                prop_assert_eq!(error.is_none(), is_well[op]);
            }
            prop_assert_eq!(pending.batches.is_empty(), told.lock().len() == copies);
        }
    }
}
