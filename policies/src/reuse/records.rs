//! The records that ended lately.

use std::sync::Arc;

use super::fit::LifeRecord;

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
    pub(super) fn snapshot(&self) -> Vec<Arc<Vec<LifeRecord>>> {
        self.chunks.clone()
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &LifeRecord> {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::super::factors::ReuseProfile;
    use super::super::fit::AgeBucket;
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
