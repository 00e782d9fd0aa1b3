//! What a fit looks at, when one is due, and how its result comes back.

use std::sync::{Arc, OnceLock};

use super::hazard::{HazardModel, LifeRecord};
use super::known::KnownBlocks;
use crate::seam::Upkeep;

/// Paths whose open records one step collects. Steps of twice as many were two in three of a
/// drain's holds above 0.3 ms.
const PATHS_A_STEP: usize = 1_024;

/// Where learning stands.
#[derive(Debug)]
pub(super) struct FitSchedule {
    requests: u64,
    /// The number of the request after which to fit next.
    next_fit: u64,
    phase: LearningPhase,
}

#[derive(Debug)]
enum LearningPhase {
    Waiting,
    /// A fit is due; the open records of the paths before this one are here.
    Collecting(usize, Vec<Vec<LifeRecord>>),
    /// Another thread has the work. If it dropped the work undone, only this holds the result's
    /// place.
    Fitting(Arc<OnceLock<Arc<HazardModel>>>),
}

impl Default for FitSchedule {
    fn default() -> Self {
        Self { requests: 0, next_fit: fit_after(0), phase: LearningPhase::Waiting }
    }
}

/// After every 5 % more requests, but neither too often nor too seldom.
fn fit_after(requests: u64) -> u64 {
    // 10 and 20 % lost 0.3 and 0.5 points over ten cells; 20 % saved 0.3 µs a block
    // (docs/policies.md).
    requests + (requests / 20).clamp(50, 500)
}

impl FitSchedule {
    pub(super) const fn requests(&self) -> u64 {
        self.requests
    }

    pub(super) const fn count_request(&mut self) {
        self.requests += 1;
    }

    /// What was learned elsewhere since the last call.
    pub(super) fn take_result(&mut self) -> Option<Arc<HazardModel>> {
        let LearningPhase::Fitting(learned) = &self.phase else { return None };
        let model = learned.get().cloned()?;
        self.phase = LearningPhase::Waiting;
        Some(model)
    }

    /// Takes a bounded step towards the next fit, if one is due. Adds it to `work` when all is
    /// collected; returns whether another step is due.
    pub(super) fn step(
        &mut self,
        known: &KnownBlocks,
        records: &LifeRecords,
        model: &Arc<HazardModel>,
        work: &mut Vec<Upkeep>,
    ) -> bool {
        match &mut self.phase {
            LearningPhase::Fitting(learned) if Arc::strong_count(learned) > 1 => return false,
            // Done: the next use takes it. Before that there is nothing new to learn from.
            LearningPhase::Fitting(learned) if learned.get().is_some() => return false,
            LearningPhase::Collecting(..) => {}
            _ if self.requests < self.next_fit => return false,
            phase => {
                self.next_fit = fit_after(self.requests);
                *phase = LearningPhase::Collecting(0, Vec::new());
            }
        }
        let LearningPhase::Collecting(next, open) = &mut self.phase else { return false };
        let until = known.paths().min(*next + PATHS_A_STEP);
        // What changes between two steps may be seen twice or not at all: a few records among
        // thousands.
        open.push((*next..until).flat_map(|path| known.open_records(path)).collect());
        *next = until;
        if until < known.paths() {
            return true;
        }
        let (ended, open) = (records.snapshot(), std::mem::take(open));
        // The record that may still grow is not among the ended ones. Ranks go by the old model
        // while a copy is fitted.
        let (last, mut model) = (known.returning(), HazardModel::clone(model));
        let learned = Arc::new(OnceLock::new());
        self.phase = LearningPhase::Fitting(Arc::clone(&learned));
        work.push(Box::new(move || {
            let ended = ended.iter().flat_map(|chunk| chunk.iter().copied());
            let records: Vec<_> = ended.chain(last).chain(open.into_iter().flatten()).collect();
            model.fit(&records);
            // Nothing else writes it, so it cannot be set already.
            let _ = learned.set(Arc::new(model));
        }));
        false
    }
}

/// Ended records that a fit looks at: 0.8 MB.
// Half as many lost 0.8 points over ten cells, twice as many gained nothing (docs/policies.md).
const RECORDS: usize = 32_768;
/// Records that are copied together.
const CHUNK: usize = 1_024;

/// The latest records, in chunks that a fit may read while others are added.
///
/// Handing them out copies none. A chunk that a fit still reads is copied when a record is added to
/// it, 24 KB at a time: a copy of all took up to 146 ms under the table's lock, page faults
/// included.
#[derive(Debug, Default)]
pub(super) struct LifeRecords {
    chunks: Vec<Arc<Vec<LifeRecord>>>,
    len: usize,
    oldest: usize,
}

impl LifeRecords {
    pub(super) fn push(&mut self, record: LifeRecord) {
        if self.len == RECORDS {
            Arc::make_mut(&mut self.chunks[self.oldest / CHUNK])[self.oldest % CHUNK] = record;
            self.oldest = (self.oldest + 1) % RECORDS;
            return;
        }
        if self.len.is_multiple_of(CHUNK) {
            self.chunks.push(Arc::new(Vec::with_capacity(CHUNK)));
        }
        if let Some(newest) = self.chunks.last_mut() {
            Arc::make_mut(newest).push(record);
        }
        self.len += 1;
    }

    /// All of them, as they are now.
    fn snapshot(&self) -> Vec<Arc<Vec<LifeRecord>>> {
        self.chunks.clone()
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &LifeRecord> {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }
}

#[cfg(test)]
mod tests {
    use crate::reuse::factors::ReuseProfile;
    use crate::reuse::hazard::AgeBucket;

    use super::*;

    fn record(number: usize) -> LifeRecord {
        let (entry, exit) = (AgeBucket::default(), AgeBucket::default());
        LifeRecord {
            profile: ReuseProfile::default(),
            returned: false,
            weight: number as f32,
            entry,
            exit,
        }
    }

    #[test]
    fn the_latest_are_kept_and_a_snapshot_does_not_change() {
        let mut records = LifeRecords::default();
        (0..RECORDS).for_each(|number| records.push(record(number)));
        let before = records.snapshot();
        (RECORDS..RECORDS + 3).for_each(|number| records.push(record(number)));
        let oldest = |chunks: &[Arc<Vec<LifeRecord>>]| {
            chunks[0][..4].iter().map(|of| of.weight).collect::<Vec<_>>()
        };
        assert_eq!(oldest(&before), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(oldest(&records.snapshot()), [32_768.0, 32_769.0, 32_770.0, 3.0]);
        assert_eq!(records.iter().count(), RECORDS);
    }
}
