//! Hash index: from a block's key to its record number.
//!
//! Open addressing with linear probing in one flat array of 8-byte buckets (a 32-bit tag beside the record
//! number), so that a look-up costs one cache miss here and one in the record. The home of a tag is its
//! rank scaled to the array, so the array may have any length and entries move back on removal without
//! tombstones.

use kvbm_tiers::BlockKey;

/// Number of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordId(pub(super) u32);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Bucket {
    tag: u32,
    record: u32,
}

const EMPTY: Bucket = Bucket { tag: 0, record: u32::MAX };

/// 32 well-mixed bits of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(u32);

impl Tag {
    pub(super) fn of(key: BlockKey) -> Self {
        let folded = (key.hash as u64) ^ (key.hash >> 64) as u64 ^ (u64::from(key.group) << 56);
        let mixed = u128::from(folded ^ 0x2545_F491_4F6C_DD1D) * 0x9E37_79B9_7F4A_7C15;
        Self(((mixed >> 64) as u64 ^ mixed as u64) as u32)
    }
}

#[derive(Debug)]
pub(super) struct Index {
    buckets: Vec<Bucket>,
    len: usize,
}

impl std::fmt::Debug for Bucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:08x}→{}", self.tag, self.record)
    }
}

impl Index {
    /// Room for `entries` before it grows.
    pub(super) fn with_room_for(entries: usize) -> Self {
        Self { buckets: vec![EMPTY; Self::buckets_for(entries)], len: 0 }
    }

    /// Three buckets for two entries: misses, half of a match's probes, then end within a cache line.
    const fn buckets_for(entries: usize) -> usize {
        entries + entries / 2 + 8
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    const fn home(&self, tag: u32) -> usize {
        ((tag as u64 * self.buckets.len() as u64) >> 32) as usize
    }

    const fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// The bucket where a search for `tag` begins. Reading it early lets many misses overlap.
    pub(super) fn first(&self, tag: Tag) -> Bucket {
        self.buckets[self.home(tag.0)]
    }

    /// The record of `tag` for which `is_it` holds, starting from [`first`](Self::first)'s answer.
    pub(super) fn find(&self, tag: Tag, first: Bucket, is_it: impl Fn(RecordId) -> bool) -> Option<RecordId> {
        let mut at = self.home(tag.0);
        let mut bucket = first;
        while bucket != EMPTY {
            if bucket.tag == tag.0 && is_it(RecordId(bucket.record)) {
                return Some(RecordId(bucket.record));
            }
            at = self.after(at);
            bucket = self.buckets[at];
        }
        None
    }

    /// Adds a record that is not in it.
    pub(super) fn insert(&mut self, tag: Tag, record: RecordId) {
        if Self::buckets_for(self.len + 1) > self.buckets.len() {
            self.grow();
        }
        self.place(Bucket { tag: tag.0, record: record.0 });
        self.len += 1;
    }

    fn place(&mut self, bucket: Bucket) {
        let mut at = self.home(bucket.tag);
        while self.buckets[at] != EMPTY {
            at = self.after(at);
        }
        self.buckets[at] = bucket;
    }

    fn grow(&mut self) {
        let bigger = Self::buckets_for(self.len + self.len / 2 + 1024);
        let old = std::mem::replace(&mut self.buckets, vec![EMPTY; bigger]);
        old.into_iter().filter(|bucket| *bucket != EMPTY).for_each(|bucket| self.place(bucket));
    }

    /// Removes a record that is in it.
    pub(super) fn remove(&mut self, tag: Tag, record: RecordId) {
        let mut hole = self.home(tag.0);
        while self.buckets[hole].record != record.0 {
            debug_assert!(self.buckets[hole] != EMPTY, "record {record:?} is not in the index");
            hole = self.after(hole);
        }
        self.close(hole);
        self.len -= 1;
    }

    /// Moves later entries of the cluster back, each no further than its home.
    fn close(&mut self, mut hole: usize) {
        let mut at = self.after(hole);
        while self.buckets[at] != EMPTY {
            if self.distance(self.home(self.buckets[at].tag), at) >= self.distance(hole, at) {
                self.buckets[hole] = self.buckets[at];
                hole = at;
            }
            at = self.after(at);
        }
        self.buckets[hole] = EMPTY;
    }

    const fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.buckets.len() - from }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn key(n: u8) -> BlockKey {
        BlockKey { hash: u128::from(n), group: n % 2 }
    }

    proptest! {
        /// Against a map, with few keys and a tiny array so that clusters wrap and collide.
        #[test]
        fn agrees_with_a_map(steps in prop::collection::vec((any::<bool>(), 0..40u8), 1..300)) {
            let mut index = Index::with_room_for(1);
            let mut model = HashSet::new();
            for (insert, n) in steps {
                if insert && !model.contains(&n) {
                    index.insert(Tag::of(key(n)), RecordId(u32::from(n)));
                    model.insert(n);
                } else if !insert && model.remove(&n) {
                    index.remove(Tag::of(key(n)), RecordId(u32::from(n)));
                }
                prop_assert_eq!(index.len(), model.len());
                for probe in 0..40u8 {
                    let tag = Tag::of(key(probe));
                    let found = index.find(tag, index.first(tag), |r| r.0 == u32::from(probe));
                    prop_assert_eq!(found.is_some(), model.contains(&probe));
                }
            }
        }
    }
}
