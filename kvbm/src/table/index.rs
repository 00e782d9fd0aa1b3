//! Hash index: from a block's key to its record number, and to where it is resident.
//!
//! Open addressing in one flat array of 8-byte buckets, with Robin Hood linear probing: an entry that is far
//! from its home takes the place of one that is near, so that searches are short and misses end early. A
//! bucket holds a record number, the tiers where the block is resident, the distance from home (so that
//! entries can move back on removal, without tombstones) and 24 bits of hash. A match probes the index only,
//! one cache miss each, and looks at records where the search ends.

use kvbm_tiers::{BlockKey, HugeVec};

use super::record::TierSet;

/// Number of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordId(pub(super) u32);

/// Records that the index can number.
const MOST_RECORDS: usize = (1 << RECORD_BITS) - 1;

const RECORD_BITS: u32 = 28;
const DISTANCE_BITS: u32 = 8;
const TAG_BITS: u32 = 24;
/// Buckets may be so many times as many as the entries call for, to tear crowds apart.
const MOST_GROWTH: usize = 8;
const MOST_DISTANT: u64 = (1 << DISTANCE_BITS) - 1;

/// From the lowest bit: record, tiers, distance, tag.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Bucket(u64);

pub(super) const EMPTY: Bucket = Bucket(u64::MAX);

const TIERS_AT: u32 = RECORD_BITS;
const DISTANCE_AT: u32 = TIERS_AT + 4;
const TAG_AT: u32 = DISTANCE_AT + DISTANCE_BITS;
const _: () = assert!(TAG_AT + TAG_BITS == u64::BITS);

impl Bucket {
    const fn new(hash: KeyHash, record: RecordId) -> Self {
        Self(hash.tag << TAG_AT | record.0 as u64)
    }

    const fn record(self) -> RecordId {
        RecordId((self.0 & MOST_RECORDS as u64) as u32)
    }

    const fn tiers(self) -> TierSet {
        TierSet::from_bits((self.0 >> TIERS_AT) as u8)
    }

    const fn with_tiers(self, tiers: TierSet) -> Self {
        Self(self.0 & !(0xF << TIERS_AT) | (tiers.bits() as u64) << TIERS_AT)
    }

    const fn distance(self) -> u64 {
        self.0 >> DISTANCE_AT & MOST_DISTANT
    }

    const fn at_distance(self, distance: u64) -> Self {
        Self(self.0 & !(MOST_DISTANT << DISTANCE_AT) | distance << DISTANCE_AT)
    }

    const fn has_tag(self, hash: KeyHash) -> bool {
        self.0 >> TAG_AT == hash.tag
    }
}

impl std::fmt::Debug for Bucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} in {:?} at +{}", self.record(), self.tiers(), self.distance())
    }
}

/// A key's place in the array and, independent of it, what tells it from its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyHash {
    place: u32,
    tag: u64,
}

impl KeyHash {
    pub(super) fn of(key: BlockKey) -> Self {
        let folded = (key.hash as u64) ^ (key.hash >> 64) as u64 ^ (u64::from(key.group) << 56);
        let mixed = u128::from(folded ^ 0x2545_F491_4F6C_DD1D) * 0x9E37_79B9_7F4A_7C15;
        let mixed = (mixed >> 64) as u64 ^ mixed as u64;
        Self { place: (mixed >> 32) as u32, tag: mixed & ((1 << TAG_BITS) - 1) }
    }
}

#[derive(Debug)]
pub(super) struct Index {
    buckets: HugeVec<Bucket>,
    len: usize,
}

impl Index {
    /// Room for `entries` before it grows.
    pub(super) fn with_room_for(entries: usize) -> Self {
        Self { buckets: HugeVec::filled(Self::buckets_for(entries), EMPTY), len: 0 }
    }

    /// Three buckets for two entries: a search then ends within a cache line or two.
    const fn buckets_for(entries: usize) -> usize {
        entries + entries / 2 + 8
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    fn home(&self, hash: KeyHash) -> usize {
        ((u64::from(hash.place) * self.buckets.len() as u64) >> u32::BITS) as usize
    }

    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// The bucket where a search begins. Reading it early lets many misses overlap.
    pub(super) fn first(&self, hash: KeyHash) -> Bucket {
        self.buckets[self.home(hash)]
    }

    /// The first entry with the tag of `hash` that `is_it` accepts, and its position. `first` is
    /// [`first`](Self::first)'s answer.
    fn seek(
        &self,
        hash: KeyHash,
        first: Bucket,
        mut is_it: impl FnMut(Bucket) -> bool,
    ) -> Option<(usize, Bucket)> {
        let (mut at, mut bucket, mut distance) = (self.home(hash), first, 0);
        while bucket != EMPTY && bucket.distance() >= distance {
            if bucket.has_tag(hash) && is_it(bucket) {
                return Some((at, bucket));
            }
            at = self.after(at);
            bucket = self.buckets[at];
            distance += 1;
        }
        None
    }

    /// The record of `hash` for which `is_it` holds.
    pub(super) fn find(
        &self,
        hash: KeyHash,
        first: Bucket,
        is_it: impl Fn(RecordId) -> bool,
    ) -> Option<RecordId> {
        self.seek(hash, first, |bucket| is_it(bucket.record())).map(|(_, bucket)| bucket.record())
    }

    /// Tiers where the block of `hash` may be resident: all where it is, and once in millions others, where a
    /// neighbour has the same tag.
    pub(super) fn residence(&self, hash: KeyHash, first: Bucket) -> TierSet {
        let mut tiers = TierSet::default();
        self.seek(hash, first, |bucket| {
            tiers = tiers.union(bucket.tiers());
            false
        });
        tiers
    }

    fn position(&self, hash: KeyHash, record: RecordId) -> usize {
        let found = self.seek(hash, self.first(hash), |bucket| bucket.record() == record);
        found.expect("callers name records that are in the index").0
    }

    /// Notes where a record that is in it is resident now.
    pub(super) fn note(&mut self, hash: KeyHash, record: RecordId, tiers: TierSet) {
        let at = self.position(hash, record);
        self.buckets[at] = self.buckets[at].with_tiers(tiers);
    }

    /// Adds a record that is not in it and resident nowhere; `hash_of` gives the hashes of those that are.
    /// False if it cannot: the numbers are used up, or somebody crafts keys that crowd one place.
    pub(super) fn insert(
        &mut self,
        hash: KeyHash,
        record: RecordId,
        hash_of: impl Fn(RecordId) -> KeyHash,
    ) -> bool {
        if record.0 as usize >= MOST_RECORDS {
            return false;
        }
        if Self::buckets_for(self.len + 1) > self.buckets.len() && !self.grow(&hash_of) {
            return false;
        }
        while !self.place(hash, Bucket::new(hash, record)) {
            if !self.grow(&hash_of) {
                return false;
            }
        }
        self.len += 1;
        true
    }

    /// False, and nothing changed, if somebody would end up too far from home.
    fn place(&mut self, hash: KeyHash, bucket: Bucket) -> bool {
        let (mut at, mut moving, mut distance) = (self.home(hash), bucket, 0);
        let mut displaced = Vec::new();
        while self.buckets[at] != EMPTY {
            if distance == MOST_DISTANT {
                displaced.into_iter().rev().for_each(|(at, old)| self.buckets[at] = old);
                return false;
            }
            let resident = self.buckets[at];
            if resident.distance() < distance {
                displaced.push((at, resident));
                self.buckets[at] = moving.at_distance(distance);
                (moving, distance) = (resident, resident.distance());
            }
            at = self.after(at);
            distance += 1;
        }
        self.buckets[at] = moving.at_distance(distance);
        true
    }

    /// Half as many buckets again; false, and nothing changed, if most would be empty.
    fn grow(&mut self, hash_of: &impl Fn(RecordId) -> KeyHash) -> bool {
        let most = Self::buckets_for(self.len + 1) * MOST_GROWTH;
        let mut bigger = self.buckets.len() + self.buckets.len() / 2 + 1024;
        while bigger <= most.max(MOST_GROWTH * 1024) {
            if self.rebuild(bigger, hash_of) {
                return true;
            }
            bigger += bigger / 2;
        }
        false
    }

    fn rebuild(&mut self, buckets: usize, hash_of: &impl Fn(RecordId) -> KeyHash) -> bool {
        let mut rebuilt = Self { buckets: HugeVec::filled(buckets, EMPTY), len: self.len };
        let mut entries = self.buckets.iter().filter(|bucket| **bucket != EMPTY);
        let fits = entries.all(|bucket| rebuilt.place(hash_of(bucket.record()), *bucket));
        if fits {
            *self = rebuilt;
        }
        fits
    }

    /// Removes a record that is in it: later entries move back, none beyond its home.
    pub(super) fn remove(&mut self, hash: KeyHash, record: RecordId) {
        let mut hole = self.position(hash, record);
        let mut at = self.after(hole);
        while self.buckets[at] != EMPTY && self.buckets[at].distance() > 0 {
            self.buckets[hole] = self.buckets[at].at_distance(self.buckets[at].distance() - 1);
            hole = at;
            at = self.after(at);
        }
        self.buckets[hole] = EMPTY;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn hash(record: RecordId) -> KeyHash {
        KeyHash::of(BlockKey { hash: u128::from(record.0), group: (record.0 % 2) as u8 })
    }

    proptest! {
        /// Against a set, with few keys and a tiny array so that clusters wrap and collide.
        #[test]
        fn agrees_with_a_set(steps in prop::collection::vec((any::<bool>(), 0..40u32), 1..300)) {
            let mut index = Index::with_room_for(1);
            let mut model = HashSet::new();
            for (insert, n) in steps {
                let record = RecordId(n);
                if insert && model.insert(n) {
                    prop_assert!(index.insert(hash(record), record, hash));
                    index.note(hash(record), record, TierSet::from_bits(n as u8));
                } else if !insert && model.remove(&n) {
                    index.remove(hash(record), record);
                }
                prop_assert_eq!(index.len(), model.len());
                for probe in (0..40).map(RecordId) {
                    let first = index.first(hash(probe));
                    let found = index.find(hash(probe), first, |record| record == probe);
                    prop_assert_eq!(found.is_some(), model.contains(&probe.0));
                    let expected = if found.is_some() { TierSet::from_bits(probe.0 as u8) } else { TierSet::default() };
                    prop_assert_eq!(index.residence(hash(probe), first), expected);
                }
            }
        }
    }

    /// Neighbouring keys: the array grows until nobody is too far away, whatever the load says.
    #[test]
    fn grows_rather_than_lose_a_crowd() {
        let crowded = |record: RecordId| KeyHash { place: record.0 << 20, tag: u64::from(record.0) };
        let mut index = Index::with_room_for(16);
        for record in (0..900).map(RecordId) {
            assert!(index.insert(crowded(record), record, crowded));
        }
        for record in (0..900).map(RecordId) {
            let found = index.find(crowded(record), index.first(crowded(record)), |r| r == record);
            assert_eq!(found, Some(record));
        }
    }

    /// Keys that no growth can separate are refused, not paid for with all memory.
    #[test]
    fn refuses_what_cannot_be_separated() {
        let one_place = |record: RecordId| KeyHash { place: 7, tag: u64::from(record.0) };
        let mut index = Index::with_room_for(16);
        let taken =
            (0..1000).map(RecordId).take_while(|&record| index.insert(one_place(record), record, one_place));
        let taken = taken.count();
        assert!((200..=256).contains(&taken), "{taken}");
        assert_eq!(index.len(), taken);
    }
}
