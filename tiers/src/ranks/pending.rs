//! Batches that the ranks are working on, and what each has said of them.

use std::collections::{BTreeMap, HashMap};

use super::protocol::{CopyRun, EndedCopies, FailedCopy};
use crate::copy::{Completion, CopyError, CopyErrorKind, Done};

/// Ranks at most, so that a set of them is a word.
pub const MAX_RANKS: u16 = 64;

/// A set of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RankSet(u64);

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

    pub(super) const fn contains(self, rank: u16) -> bool {
        self.0 & (1 << rank) != 0
    }

    const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// All batches under way.
#[derive(Debug)]
pub(super) struct PendingBatches {
    batches: BTreeMap<u64, PendingBatch>,
    next: u64,
    /// By rank: how many copies it has to end, but for those from other workers.
    awaited: Vec<usize>,
    /// Batches from other workers.
    pulls: usize,
}

#[derive(Debug)]
struct PendingBatch {
    done: Done,
    copies: usize,
    awaited: AwaitedRanks,
    /// The worst that a rank said of a copy, where one failed.
    errors: HashMap<usize, CopyError>,
    /// Copies that some rank has not ended.
    left: usize,
    /// It comes from other workers, which may take long.
    is_pull: bool,
}

/// The ranks that have not ended a copy.
#[derive(Debug)]
enum AwaitedRanks {
    /// Of all copies: what a rank says first of a batch is mostly that all of it arrived.
    Alike(RankSet),
    /// By copy.
    Each(Vec<RankSet>),
}

impl AwaitedRanks {
    fn by_copy(&mut self, copies: usize) -> &mut Vec<RankSet> {
        if let Self::Alike(ranks) = *self {
            *self = Self::Each(vec![ranks; copies]);
        }
        match self {
            Self::Each(each) => each,
            Self::Alike(_) => unreachable!("it was cut up above"),
        }
    }
}

/// Copies that every rank has ended, to be reported when no lock is held.
#[derive(Debug)]
#[must_use = "who waits for the copies is to be told"]
pub(super) struct EndedReport {
    done: Done,
    completions: Vec<Completion>,
}

impl EndedReport {
    pub(super) fn send(self) {
        self.done.report(self.completions);
    }
}

/// A rank reported what it cannot know of.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("it reported copy {op} of batch {batch}, which it was not working on")]
pub(super) struct UnexpectedReport {
    batch: u64,
    op: u32,
}

impl PendingBatches {
    /// Of `world` ranks.
    pub(super) fn new(world: u16) -> Self {
        let awaited = vec![0; usize::from(world)];
        Self { batches: BTreeMap::new(), next: 0, awaited, pulls: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// The ranks that have copies to end, and which of them has most; `None`: none has any, or what
    /// comes from other workers is under way, of which any rank may be the last to speak.
    pub(super) fn busy(&self) -> Option<(RankSet, u16)> {
        if self.pulls > 0 {
            return None;
        }
        let (&most, busiest) = self.awaited.iter().zip(0..).max()?;
        let mut busy = RankSet::all(self.awaited.len() as u16);
        let idle = self.awaited.iter().zip(0..).filter(|&(&awaited, _)| awaited == 0);
        idle.for_each(|(_, rank)| _ = busy.remove(rank));
        (most > 0).then_some((busy, busiest))
    }

    /// All ranks are given `copies` copies. Returns the batch's number.
    pub(super) fn add(&mut self, copies: usize, done: Done, is_pull: bool) -> u64 {
        let batch = self.next;
        self.next += 1;
        let awaited = AwaitedRanks::Alike(RankSet::all(self.awaited.len() as u16));
        self.batches.insert(
            batch,
            PendingBatch { done, copies, awaited, errors: HashMap::new(), left: copies, is_pull },
        );
        if is_pull {
            self.pulls += 1;
        } else {
            self.awaited.iter_mut().for_each(|awaited| *awaited += copies);
        }
        batch
    }

    /// A rank has ended copies. An error leaves the batch as it was before the copy that it names.
    pub(super) fn ended(
        &mut self,
        rank: u16,
        ended: EndedCopies,
    ) -> (Option<EndedReport>, Result<(), UnexpectedReport>) {
        let number = ended.batch;
        let Some(batch) = self.batches.get_mut(&number) else {
            return (None, Err(UnexpectedReport { batch: number, op: 0 }));
        };
        let (copies, completions, outcome) = batch.take(rank, ended);
        let counted = if batch.is_pull { 0 } else { copies };
        let report = EndedReport { done: batch.done.clone(), completions };
        if batch.left == 0 {
            self.pulls -= usize::from(batch.is_pull);
            self.batches.remove(&number);
        }
        self.awaited[usize::from(rank)] -= counted;
        (Some(report), outcome)
    }

    /// A rank is gone, with all that it ever confirmed of what is still under way: all of that ends
    /// with `why`, as soon as the other ranks have ended it too.
    pub(super) fn lost(&mut self, rank: u16, why: &CopyError) -> Vec<EndedReport> {
        let reports = self.batches.values_mut().map(|batch| batch.lost(rank, why)).collect();
        self.batches.retain(|_, batch| batch.left > 0);
        self.pulls = self.batches.values().filter(|batch| batch.is_pull).count();
        self.awaited[usize::from(rank)] = 0;
        reports
    }
}

/// What became of copies, one by one. The caller stops at the first that does not exist, whatever a
/// run claims.
fn results(rank: u16, ended: EndedCopies) -> impl Iterator<Item = (u32, Result<(), CopyError>)> {
    let arrived =
        ended.arrived.into_iter().flat_map(|run| run.first..run.first.saturating_add(run.count));
    let failed = ended.failed.into_iter().map(move |FailedCopy { op, kind, why }| {
        (op, Err(CopyError::new(kind, format!("rank {rank}: {why}"))))
    });
    arrived.map(|op| (op, Ok(()))).chain(failed)
}

impl PendingBatch {
    /// What a rank says. Returns how many copies it has ended, and those that all have.
    fn take(
        &mut self,
        rank: u16,
        ended: EndedCopies,
    ) -> (usize, Vec<Completion>, Result<(), UnexpectedReport>) {
        let (batch, mut copies, mut completions) = (ended.batch, 0, Vec::new());
        if self.all_arrived(rank, &ended, &mut completions) {
            return (self.copies, completions, Ok(()));
        }
        let outcome = results(rank, ended).try_for_each(|(op, result)| {
            self.ended(rank, op as usize, result, &mut completions)
                .ok_or(UnexpectedReport { batch, op })?;
            copies += 1;
            Ok(())
        });
        (copies, completions, outcome)
    }

    /// False: the rank said something else, or has said something before, or another has.
    fn all_arrived(
        &mut self,
        rank: u16,
        ended: &EndedCopies,
        completions: &mut Vec<Completion>,
    ) -> bool {
        let all = [CopyRun { first: 0, count: self.copies as u32 }];
        let AwaitedRanks::Alike(ranks) = &mut self.awaited else { return false };
        if ended.arrived != all || !ended.failed.is_empty() || !ranks.remove(rank) {
            return false;
        }
        if ranks.is_empty() {
            completions.extend((0..self.copies).map(|op| (op, Ok(()))));
            self.left = 0;
        }
        true
    }

    /// `None`: the rank was not working on that.
    fn ended(
        &mut self,
        rank: u16,
        op: usize,
        result: Result<(), CopyError>,
        completions: &mut Vec<Completion>,
    ) -> Option<()> {
        let awaited = self.awaited.by_copy(self.copies).get_mut(op)?;
        awaited.remove(rank).then_some(())?;
        let is_last = awaited.is_empty();
        result.err().into_iter().for_each(|error| self.note(op, error));
        if is_last {
            completions.push((op, self.errors.remove(&op).map_or(Ok(()), Err)));
            self.left -= 1;
        }
        Some(())
    }

    fn lost(&mut self, rank: u16, why: &CopyError) -> EndedReport {
        let mut completions = Vec::new();
        for op in 0..self.copies {
            if !self.awaited.by_copy(self.copies)[op].is_empty() {
                self.note(op, why.clone());
                self.ended(rank, op, Ok(()), &mut completions);
            }
        }
        EndedReport { done: self.done.clone(), completions }
    }

    fn note(&mut self, op: usize, error: CopyError) {
        let is_worst = self
            .errors
            .get(&op)
            .is_none_or(|known| severity(known.kind()) < severity(error.kind()));
        if is_worst {
            self.errors.insert(op, error);
        }
    }
}

/// What one rank says of a block holds for all of it: an error that says more of the block goes
/// before one that is about the medium.
const fn severity(kind: CopyErrorKind) -> u8 {
    match kind {
        CopyErrorKind::Refused => 0,
        CopyErrorKind::NoSpace | CopyErrorKind::OverBudget => 1,
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
    use crate::testing::each;

    type Told = Arc<Mutex<Vec<(usize, Option<CopyErrorKind>)>>>;

    const WORLD: u16 = 3;

    fn listener() -> (Told, Done) {
        let told = Told::default();
        let done = {
            let told = Arc::clone(&told);
            each(move |op, result| told.lock().push((op, result.err().map(|error| error.kind()))))
        };
        (told, done)
    }

    fn arrived(batch: u64, ops: &[u32]) -> EndedCopies {
        let mut ended = EndedCopies::new(batch);
        ops.iter().for_each(|&op| ended.arrived(op));
        ended
    }

    fn failed(batch: u64, op: u32, kind: CopyErrorKind) -> EndedCopies {
        let mut ended = EndedCopies::new(batch);
        ended.failed(op, kind, "as the test wants");
        ended
    }

    fn take(
        pending: &mut PendingBatches,
        rank: u16,
        ended: EndedCopies,
    ) -> Result<(), UnexpectedReport> {
        let (report, outcome) = pending.ended(rank, ended);
        report.into_iter().for_each(EndedReport::send);
        outcome
    }

    fn lose(pending: &mut PendingBatches, rank: u16) {
        let why = CopyError::new(CopyErrorKind::Unavailable, "the rank is gone");
        pending.lost(rank, &why).into_iter().for_each(EndedReport::send);
    }

    #[test]
    fn a_copy_ends_when_the_last_rank_has_ended_it() {
        let (mut pending, (told, done)) = (PendingBatches::new(2), listener());
        let batch = pending.add(3, done, false);
        take(&mut pending, 0, arrived(batch, &[0, 1, 2])).unwrap();
        assert_eq!(*told.lock(), []);
        take(&mut pending, 1, arrived(batch, &[1])).unwrap();
        assert_eq!(*told.lock(), [(1, None)]);
        take(&mut pending, 1, arrived(batch, &[0, 2])).unwrap();
        assert_eq!(*told.lock(), [(1, None), (0, None), (2, None)]);
        assert!(pending.batches.is_empty());
    }

    #[test]
    fn all_ranks_are_heard_while_something_comes_from_other_workers() {
        let (mut pending, (told, done)) = (PendingBatches::new(2), listener());
        let copies = pending.add(1, done.clone(), false);
        take(&mut pending, 0, arrived(copies, &[0])).unwrap();
        assert_eq!(pending.busy().unwrap().1, 1, "it has a copy to end, and the other has none");
        let pull = pending.add(5, done.clone(), true);
        assert_eq!(pending.busy(), None);
        take(&mut pending, 1, arrived(pull, &[0, 1, 2, 3, 4])).unwrap();
        assert_eq!(pending.busy(), None);
        // The copy hangs, and what came is reported all the same.
        take(&mut pending, 0, arrived(pull, &[0, 1, 2, 3, 4])).unwrap();
        assert_eq!((told.lock().len(), pending.busy().unwrap().1), (5, 1));
        let pull = pending.add(1, done, true);
        lose(&mut pending, 0);
        assert_eq!(pending.busy(), None, "the other rank has yet to end it");
        take(&mut pending, 1, arrived(pull, &[0])).unwrap();
        take(&mut pending, 1, arrived(copies, &[0])).unwrap();
        assert_eq!((pending.busy(), pending.is_empty()), (None, true));
    }

    #[test]
    fn the_worst_that_a_rank_says_counts() {
        for (one, other) in [
            (CopyErrorKind::Corrupt, CopyErrorKind::Unavailable),
            (CopyErrorKind::Io, CopyErrorKind::NoSpace),
            (CopyErrorKind::TimedOut, CopyErrorKind::Refused),
        ] {
            for (first, second) in [(one, other), (other, one)] {
                let (mut pending, (told, done)) = (PendingBatches::new(WORLD), listener());
                let batch = pending.add(1, done, false);
                take(&mut pending, 0, failed(batch, 0, first)).unwrap();
                take(&mut pending, 1, arrived(batch, &[0])).unwrap();
                take(&mut pending, 2, failed(batch, 0, second)).unwrap();
                assert_eq!(*told.lock(), [(0, Some(one))]);
            }
        }
    }

    #[test]
    fn a_lost_rank_loses_its_answers_and_others_are_awaited() {
        let (mut pending, (told, done)) = (PendingBatches::new(WORLD), listener());
        let batch = pending.add(3, done, false);
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
    fn what_a_rank_cannot_know_is_called_unexpected() {
        let (mut pending, (told, done)) = (PendingBatches::new(2), listener());
        let batch = pending.add(2, done, false);
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
        /// Whatever the ranks say in whatever order, and whichever are lost: each copy is reported
        /// once, when no rank works on it any more, and well only if all confirmed it.
        #[test]
        fn each_copy_is_reported_once(
            world in 1..6u16,
            copies in 1..20usize,
            events in prop::collection::vec((0..6u16, 0..24u32, 0..8u8), 0..300),
        ) {
            let (mut pending, (told, done)) = (PendingBatches::new(world), listener());
            let batch = pending.add(copies, done, false);
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
                    2 => {
                        // All of it, as mostly: what it had said before is wrong from there on.
                        let all: Vec<_> = (0..copies as u32).collect();
                        let outcome = take(&mut pending, rank, arrived(batch, &all));
                        let ended = &mut ended[rank as usize];
                        let new = ended.iter().take_while(|ended| !**ended).count();
                        ended[..new].fill(true);
                        prop_assert_eq!(outcome.is_ok(), new == copies);
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
                let left: Vec<_> = ended.iter().map(|ended| ended.iter().filter(|ended| !**ended).count()).collect();
                prop_assert_eq!(&pending.awaited, &left);
            }
            for &(op, error) in told.lock().iter() {
                prop_assert_eq!(error.is_none(), is_well[op]);
            }
            prop_assert_eq!(pending.batches.is_empty(), told.lock().len() == copies);
        }
    }
}
