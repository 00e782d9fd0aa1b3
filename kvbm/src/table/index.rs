//! Hash index: from a block's key to its record number, and to the tiers where it is resident.
//!
//! Open addressing in one flat array of 8-byte buckets, with Robin Hood linear probing: an entry
//! that is far from its home takes the place of one that is near, so that searches are short and
//! misses end early. A bucket holds a record number, the tiers where the block is resident, the
//! distance from home (so that entries can move back on removal, without tombstones) and 24 bits of
//! hash. A match probes the index only, one cache miss each, and looks at records where the search
//! ends.
//!
//! It grows in steps, since an insertion holds the table's lock: each one moves the entries of a
//! few homes into a larger array. Homes are in the order of the hashes in both, so that one
//! comparison tells which of the two has a key, and there is never a second place to look. The
//! larger array is made before it is needed, with the lock released, if there is time (see
//! `shared`).

use kvbm_tiers::{BlockKey, HugeVec};

use super::record::TierSet;

/// Number of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordId(pub(super) u32);

/// How many more entries to be ready for in an index of `len`. A table takes in a million blocks a
/// second at most, and background work makes arrays ready 50 times a second: of a million entries
/// this is a thirty-second.
const fn soon(len: usize) -> usize {
    len / 32 + 1
}

/// The same in an array of `len`, which need not grow to be ready: also a short one may take in all
/// that comes between two rounds of background work.
pub(super) fn soon_appended(len: usize) -> usize {
    soon(len).max(A_ROUND)
}

const A_ROUND: usize = 1_000_000 / 50;

/// Records that the index can number.
const MAX_RECORDS: usize = (1 << RECORD_BITS) - 1;

const RECORD_BITS: u32 = 28;
const DISTANCE_BITS: u32 = 8;
const TAG_BITS: u32 = 24;
/// Homes that each insertion moves to the larger array. A growth then ends when a thirteenth as
/// many entries again have come, long before the larger array is full, and before the rest of the
/// smaller one is crowded.
const HOMES_MOVED: usize = 16;
/// To tear crowds apart, there may be this many times the buckets that the entries call for.
const MAX_GROWTH: usize = 8;
const MAX_DISTANT: u64 = (1 << DISTANCE_BITS) - 1;

/// From the lowest bit: record plus one, tiers, distance, tag.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct IndexBucket(u64);

/// Zero, like fresh memory: a new array costs nothing before it is used.
pub(super) const EMPTY: IndexBucket = IndexBucket(0);

const TIERS_AT: u32 = RECORD_BITS;
const DISTANCE_AT: u32 = TIERS_AT + 4;
const TAG_AT: u32 = DISTANCE_AT + DISTANCE_BITS;
const _: () = assert!(TAG_AT + TAG_BITS == u64::BITS);

impl IndexBucket {
    const fn new(hash: KeyHash, record: RecordId) -> Self {
        Self(hash.tag << TAG_AT | (record.0 as u64 + 1))
    }

    const fn record(self) -> RecordId {
        RecordId((self.0 & MAX_RECORDS as u64) as u32 - 1)
    }

    const fn tiers(self) -> TierSet {
        TierSet::from_bits((self.0 >> TIERS_AT) as u8)
    }

    const fn with_tiers(self, tiers: TierSet) -> Self {
        Self(self.0 & !(0xF << TIERS_AT) | (tiers.bits() as u64) << TIERS_AT)
    }

    const fn distance(self) -> u64 {
        self.0 >> DISTANCE_AT & MAX_DISTANT
    }

    const fn at_distance(self, distance: u64) -> Self {
        Self(self.0 & !(MAX_DISTANT << DISTANCE_AT) | distance << DISTANCE_AT)
    }

    const fn has_tag(self, hash: KeyHash) -> bool {
        self.0 >> TAG_AT == hash.tag
    }
}

impl std::fmt::Debug for IndexBucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if *self == EMPTY {
            return f.write_str("empty");
        }
        write!(f, "{:?} in {:?} at +{}", self.record(), self.tiers(), self.distance())
    }
}

/// A key's place in the array and, independent of it, a tag that tells it from its neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeyHash {
    place: u32,
    tag: u64,
}

impl KeyHash {
    pub(super) fn of(key: BlockKey) -> Self {
        let folded = key.folded();
        let mixed = u128::from(folded ^ 0x2545_F491_4F6C_DD1D) * 0x9E37_79B9_7F4A_7C15;
        // Place and tag come from different halves: entries that crowd one place still differ in
        // their tags.
        let mixed = (mixed >> 64) as u64 ^ mixed as u64;
        Self { place: (mixed >> 32) as u32, tag: mixed & ((1 << TAG_BITS) - 1) }
    }

    /// 32 bits that are as good as random, and 32 others.
    pub(super) const fn halves(self) -> (u32, u32) {
        (self.place, self.tag as u32)
    }
}

/// One array.
#[derive(Debug)]
pub(super) struct IndexBuckets(HugeVec<u64>);

impl IndexBuckets {
    fn new(len: usize) -> Self {
        Self(HugeVec::zeroed(len))
    }

    /// An array whose memory is there from the start. That takes milliseconds for each 2 MiB.
    pub(super) fn populated(len: usize) -> Self {
        Self(HugeVec::zeroed(len).populated())
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn at(&self, position: usize) -> IndexBucket {
        IndexBucket(self.0[position])
    }

    fn set(&mut self, position: usize, bucket: IndexBucket) {
        self.0[position] = bucket.0;
    }

    fn home(&self, hash: KeyHash) -> usize {
        // By multiplication, not by remainder: homes are in the order of the hashes, whatever the
        // array's length.
        ((u64::from(hash.place) * self.len() as u64) >> u32::BITS) as usize
    }

    /// The least [`place`](KeyHash::place) whose home is `home` or comes after it.
    fn first_place_at(&self, home: usize) -> u64 {
        ((home as u64) << u32::BITS).div_ceil(self.len() as u64)
    }

    fn after(&self, position: usize) -> usize {
        if position + 1 == self.len() { 0 } else { position + 1 }
    }

    /// The first entry with the tag of `hash` that `is_it` accepts, and its position. `first` is
    /// the bucket at home.
    fn seek(
        &self,
        hash: KeyHash,
        first: IndexBucket,
        mut is_it: impl FnMut(IndexBucket) -> bool,
    ) -> Option<(usize, IndexBucket)> {
        let (mut at, mut bucket, mut distance) = (self.home(hash), first, 0);
        // An entry nearer to its home than ours would be came later: had ours been here, that entry
        // would have moved on.
        while bucket != EMPTY && bucket.distance() >= distance {
            if bucket.has_tag(hash) && is_it(bucket) {
                return Some((at, bucket));
            }
            at = self.after(at);
            bucket = self.at(at);
            distance += 1;
        }
        None
    }

    fn position(&self, hash: KeyHash, record: RecordId) -> usize {
        let found = self.seek(hash, self.at(self.home(hash)), |bucket| bucket.record() == record);
        found.expect("callers name records that are in the index").0
    }

    /// False, and nothing changed, if an entry would end up too far from home.
    fn place(&mut self, hash: KeyHash, bucket: IndexBucket) -> bool {
        if !self.has_room_for(hash) {
            return false;
        }
        let (mut at, mut moving, mut distance) = (self.home(hash), bucket, 0);
        while self.at(at) != EMPTY {
            let resident = self.at(at);
            if resident.distance() < distance {
                self.set(at, moving.at_distance(distance));
                (moving, distance) = (resident, resident.distance());
            }
            at = self.after(at);
            distance += 1;
        }
        self.set(at, moving.at_distance(distance));
        true
    }

    /// Whether no entry ends up too far from home: a look ahead over a cache line or two costs less
    /// than undoing.
    fn has_room_for(&self, hash: KeyHash) -> bool {
        let (mut at, mut distance) = (self.home(hash), 0);
        while self.at(at) != EMPTY && distance < MAX_DISTANT {
            // The entry nearer to its home gives way and moves on.
            distance = distance.min(self.at(at).distance()) + 1;
            at = self.after(at);
        }
        self.at(at) == EMPTY
    }

    /// Removes an entry: later ones move back, but none beyond its home.
    fn remove(&mut self, position: usize) {
        let mut hole = position;
        let mut at = self.after(hole);
        while self.at(at) != EMPTY && self.at(at).distance() > 0 {
            self.set(hole, self.at(at).at_distance(self.at(at).distance() - 1));
            hole = at;
            at = self.after(at);
        }
        self.set(hole, EMPTY);
    }

    /// The entries of one home, which lie side by side: the position of the first, and how many
    /// there are.
    fn at_home(&self, home: usize) -> (usize, usize) {
        let (mut first, mut distance) = (home, 0);
        // Entries of earlier homes come before, and are further from their home.
        while self.at(first) != EMPTY && self.at(first).distance() > distance {
            first = self.after(first);
            distance += 1;
        }
        let (mut end, mut count) = (first, 0);
        while self.at(end) != EMPTY && self.at(end).distance() == distance {
            end = self.after(end);
            distance += 1;
            count += 1;
        }
        (first, count)
    }

    fn entries(&self) -> impl Iterator<Item = IndexBucket> {
        self.0.iter().map(|&bucket| IndexBucket(bucket)).filter(|&bucket| bucket != EMPTY)
    }
}

#[derive(Debug)]
pub(super) struct Index {
    buckets: IndexBuckets,
    /// While it grows: the array that takes over. Else empty.
    larger: IndexBuckets,
    /// The next larger array, made ahead of its need.
    spare: Option<IndexBuckets>,
    /// An array that is not used any more. Freeing a large one takes long.
    retired: Option<IndexBuckets>,
    /// Homes of `buckets` that have moved.
    homes_moved: usize,
    /// Entries whose hashes have a place below lie in `larger`.
    moved_below: u64,
    len: usize,
}

impl Index {
    /// Room for `entries` before it grows.
    pub(super) fn with_room_for(entries: usize) -> Self {
        Self::of(IndexBuckets::populated(Self::buckets_for(entries)), 0)
    }

    fn of(buckets: IndexBuckets, len: usize) -> Self {
        let larger = IndexBuckets::new(0);
        Self { buckets, larger, spare: None, retired: None, homes_moved: 0, moved_below: 0, len }
    }

    /// How many buckets the next array has, if it is needed soon and not made yet.
    pub(super) fn wanted_spare(&self) -> Option<usize> {
        let is_near = Self::buckets_for(self.len + soon(self.len)) > self.buckets.len();
        (is_near && !self.is_growing() && self.spare.is_none()).then(|| self.next_size())
    }

    /// Keeps an array for the next growth. Returns it if it is no longer wanted.
    pub(super) fn keep_spare(&mut self, spare: IndexBuckets) -> Option<IndexBuckets> {
        if self.wanted_spare() != Some(spare.len()) {
            return Some(spare);
        }
        self.spare.replace(spare)
    }

    /// An array that is not used any more, to be dropped with the lock released.
    pub(super) fn take_retired(&mut self) -> Option<IndexBuckets> {
        self.retired.take()
    }

    /// Six buckets for five entries: an entry is two or three buckets from home, so that a search
    /// ends within a cache line or two.
    const fn buckets_for(entries: usize) -> usize {
        entries + entries / 5 + 8
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// The array in which a key is, if it is in any.
    fn array(&self, hash: KeyHash) -> &IndexBuckets {
        if u64::from(hash.place) < self.moved_below { &self.larger } else { &self.buckets }
    }

    fn array_mut(&mut self, hash: KeyHash) -> &mut IndexBuckets {
        if u64::from(hash.place) < self.moved_below { &mut self.larger } else { &mut self.buckets }
    }

    /// The bucket where a search begins. Reading it early lets many misses overlap.
    pub(super) fn first(&self, hash: KeyHash) -> IndexBucket {
        let array = self.array(hash);
        array.at(array.home(hash))
    }

    /// The record of `hash` that `is_it` accepts. `first` is [`first`](Self::first)'s answer.
    pub(super) fn find(
        &self,
        hash: KeyHash,
        first: IndexBucket,
        is_it: impl Fn(RecordId) -> bool,
    ) -> Option<RecordId> {
        let found = self.array(hash).seek(hash, first, |bucket| is_it(bucket.record()));
        found.map(|(_, bucket)| bucket.record())
    }

    /// Tiers where the block of `hash` may be resident: all where it is, and once in millions
    /// others, if a neighbour has the same tag.
    pub(super) fn residence(&self, hash: KeyHash, first: IndexBucket) -> TierSet {
        let mut tiers = TierSet::default();
        self.array(hash).seek(hash, first, |bucket| {
            tiers = tiers.union(bucket.tiers());
            false
        });
        tiers
    }

    /// Notes where an indexed record is resident now.
    pub(super) fn note(&mut self, hash: KeyHash, record: RecordId, tiers: TierSet) {
        let array = self.array_mut(hash);
        let at = array.position(hash, record);
        array.set(at, array.at(at).with_tiers(tiers));
    }

    /// Adds a record that is not indexed and resident nowhere; `hash_of` gives the hashes of
    /// indexed ones. False if it cannot: the numbers are used up, or crafted keys crowd one place.
    pub(super) fn insert(
        &mut self,
        hash: KeyHash,
        record: RecordId,
        hash_of: impl Fn(RecordId) -> KeyHash,
    ) -> bool {
        if record.0 as usize >= MAX_RECORDS {
            return false;
        }
        if !self.is_growing() && Self::buckets_for(self.len + 1) > self.buckets.len() {
            self.larger = self.spare.take().unwrap_or_else(|| IndexBuckets::new(self.next_size()));
        }
        if self.is_growing() && !self.move_homes(&hash_of) && !self.grow_at_once(&hash_of) {
            return false;
        }
        // The array is chosen anew each time: a growth may have moved the border past this hash.
        while !self.array_mut(hash).place(hash, IndexBucket::new(hash, record)) {
            if !self.grow_at_once(&hash_of) {
                return false;
            }
        }
        self.len += 1;
        true
    }

    fn is_growing(&self) -> bool {
        self.larger.len() > 0
    }

    /// Half as many buckets again.
    fn next_size(&self) -> usize {
        let now = self.buckets.len().max(self.larger.len());
        now + now / 2 + 1024
    }

    /// A step of growth. False if a home cannot move, because keys crowd there.
    fn move_homes(&mut self, hash_of: &impl Fn(RecordId) -> KeyHash) -> bool {
        for _ in 0..HOMES_MOVED {
            if !self.move_home(hash_of) {
                return false;
            }
            if self.homes_moved == self.buckets.len() {
                let grown = std::mem::replace(&mut self.larger, IndexBuckets::new(0));
                self.retired = Some(std::mem::replace(&mut self.buckets, grown));
                (self.homes_moved, self.moved_below) = (0, 0);
                return true;
            }
        }
        true
    }

    /// Moves the entries of the next home, all or none.
    fn move_home(&mut self, hash_of: &impl Fn(RecordId) -> KeyHash) -> bool {
        let (first, count) = self.buckets.at_home(self.homes_moved);
        let mut at = first;
        for moved in 0..count {
            let bucket = self.buckets.at(at);
            if !self.larger.place(hash_of(bucket.record()), bucket) {
                self.take_back(first, moved, hash_of);
                return false;
            }
            at = self.buckets.after(at);
        }
        // Later entries move back each time: the next one lies where the last one did.
        (0..count).for_each(|_| self.buckets.remove(first));
        self.homes_moved += 1;
        self.moved_below = self.buckets.first_place_at(self.homes_moved);
        true
    }

    /// Takes `count` entries from `first` on out of the larger array again.
    fn take_back(&mut self, first: usize, count: usize, hash_of: &impl Fn(RecordId) -> KeyHash) {
        let mut at = first;
        for _ in 0..count {
            let record = self.buckets.at(at).record();
            self.larger.remove(self.larger.position(hash_of(record), record));
            at = self.buckets.after(at);
        }
    }

    /// Tears a crowd apart, at a cost in proportion to all entries: keys that are hashes never need
    /// it. False, and nothing changed, if most buckets would be empty.
    fn grow_at_once(&mut self, hash_of: &impl Fn(RecordId) -> KeyHash) -> bool {
        let most = Self::buckets_for(self.len + 1) * MAX_GROWTH;
        let mut bigger = self.next_size();
        // A step is of a thousand buckets at least, which a small index must be allowed too.
        while bigger <= most.max(MAX_GROWTH * 1024) {
            if let Some(rebuilt) = self.rebuilt(bigger, hash_of) {
                *self = Self::of(rebuilt, self.len);
                return true;
            }
            bigger += bigger / 2;
        }
        false
    }

    fn rebuilt(
        &self,
        buckets: usize,
        hash_of: &impl Fn(RecordId) -> KeyHash,
    ) -> Option<IndexBuckets> {
        let mut rebuilt = IndexBuckets::new(buckets);
        // Keys may crowd in the middle of a growth, when each array has a part.
        let mut entries = self.buckets.entries().chain(self.larger.entries());
        entries.all(|bucket| rebuilt.place(hash_of(bucket.record()), bucket)).then_some(rebuilt)
    }

    /// Removes an indexed record.
    pub(super) fn remove(&mut self, hash: KeyHash, record: RecordId) {
        let array = self.array_mut(hash);
        array.remove(array.position(hash, record));
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::HashMap;
    use std::collections::hash_map::Entry;

    use proptest::prelude::*;
    use proptest::test_runner::TestCaseResult;

    use super::*;

    fn hash(record: RecordId) -> KeyHash {
        KeyHash::of(BlockKey { hash: u128::from(record.0), group: (record.0 % 2) as u8 })
    }

    #[derive(Clone, Copy, Debug)]
    enum ProbeStep {
        Insert(u32),
        Remove(u32),
        Note(u32, u8),
    }

    fn steps() -> impl Strategy<Value = Vec<ProbeStep>> {
        const KEYS: std::ops::Range<u32> = 0..4000;
        let step = prop_oneof![
            6 => KEYS.prop_map(ProbeStep::Insert),
            1 => KEYS.prop_map(ProbeStep::Remove),
            1 => (KEYS, 0..16u8).prop_map(|(n, tiers)| ProbeStep::Note(n, tiers)),
        ];
        prop::collection::vec(step, 1..6000)
    }

    /// A few dozen crowds, one of them at the end of the array.
    fn crowded(record: RecordId) -> KeyHash {
        KeyHash { place: !((record.0 % 64) << 26 | record.0), tag: u64::from(record.0) }
    }

    fn agree(
        index: &Index,
        model: &HashMap<u32, TierSet>,
        hash: fn(RecordId) -> KeyHash,
    ) -> TestCaseResult {
        prop_assert_eq!(index.len(), model.len());
        for probe in (0..4000).map(RecordId) {
            let first = index.first(hash(probe));
            let found = index.find(hash(probe), first, |record| record == probe);
            prop_assert_eq!(found.is_some(), model.contains_key(&probe.0));
            let expected = model.get(&probe.0).copied().unwrap_or_default();
            prop_assert_eq!(index.residence(hash(probe), first), expected);
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Compared with a map, through several growths and in the middle of them; with hashes, and
        /// with keys that collide and wrap.
        #[test]
        fn agrees_with_a_map(steps in steps(), is_crowded in any::<bool>(), is_provided in any::<bool>()) {
            let hash = if is_crowded { crowded } else { hash };
            let mut index = Index::with_room_for(1);
            let mut model = HashMap::new();
            for (count, step) in steps.into_iter().enumerate() {
                match step {
                    ProbeStep::Insert(n) => if let Entry::Vacant(place) = model.entry(n) {
                        prop_assert!(index.insert(hash(RecordId(n)), RecordId(n), hash));
                        place.insert(TierSet::default());
                    },
                    ProbeStep::Remove(n) => if model.remove(&n).is_some() {
                        index.remove(hash(RecordId(n)), RecordId(n));
                    },
                    ProbeStep::Note(n, tiers) => if let Some(noted) = model.get_mut(&n) {
                        *noted = TierSet::from_bits(tiers);
                        index.note(hash(RecordId(n)), RecordId(n), *noted);
                    },
                }
                if is_provided && let Some(buckets) = index.wanted_spare() {
                    prop_assert!(index.keep_spare(IndexBuckets::populated(buckets)).is_none());
                }
                // A growth takes twice as many insertions, or more.
                if count % 64 == 0 {
                    agree(&index, &model, hash)?;
                }
            }
            agree(&index, &model, hash)?;
        }
    }

    /// An insertion holds the table's lock.
    #[test]
    fn no_insertion_moves_many_entries() {
        let mut index = Index::with_room_for(1000);
        let (mut most, mut all) = (0, 0);
        for record in (0..200_000).map(RecordId) {
            let moved = Cell::new(0);
            let hash_of = |record| {
                moved.set(moved.get() + 1);
                hash(record)
            };
            assert!(index.insert(hash(record), record, hash_of));
            most = most.max(moved.get());
            all += moved.get();
        }
        assert!(most <= 8 * HOMES_MOVED && all > 200_000, "{most} at a time, {all} in all");
    }

    /// An insertion neither makes an array, if there is a spare, nor frees one.
    #[test]
    fn growth_takes_a_spare_and_leaves_the_old_array() {
        let mut index = Index::with_room_for(1_000);
        let old = index.buckets.0.as_ptr();
        let mut records = (0..).map(RecordId);
        let mut insert = |index: &mut Index| {
            let record = records.next().expect("there is no end of numbers");
            assert!(index.insert(hash(record), record, hash));
        };
        while index.wanted_spare().is_none() {
            insert(&mut index);
        }
        let spare = IndexBuckets::populated(index.next_size());
        let new = spare.0.as_ptr();
        assert!(index.keep_spare(spare).is_none() && !index.is_growing());
        while !index.is_growing() {
            insert(&mut index);
        }
        assert_eq!(index.larger.0.as_ptr(), new);
        assert!(index.take_retired().is_none());
        while index.is_growing() {
            insert(&mut index);
        }
        assert_eq!(index.buckets.0.as_ptr(), new);
        assert_eq!(index.take_retired().map(|retired| retired.0.as_ptr()), Some(old));
    }

    /// Neighbouring keys: the array grows until no entry is too far from home, whatever the load.
    #[test]
    fn grows_rather_than_lose_a_crowd() {
        let crowded =
            |record: RecordId| KeyHash { place: record.0 << 20, tag: u64::from(record.0) };
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
        let taken = (0..1000)
            .map(RecordId)
            .take_while(|&record| index.insert(one_place(record), record, one_place));
        let taken = taken.count();
        assert!((200..=256).contains(&taken), "{taken}");
        assert_eq!(index.len(), taken);
    }
}
