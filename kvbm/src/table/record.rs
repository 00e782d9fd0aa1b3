//! Records: what the table knows about one block, whatever tiers hold it.

use std::collections::BTreeMap;

use kvbm_tiers::{Ahead, BlockKey, HugeVec, SlotId, Tier};

use super::budget::touched;
use super::index::{RecordId, soon_appended};

/// Marks the absence of a slot, a parent or a free record.
const NONE: u32 = u32::MAX;

const FILLING: u32 = 4;

/// One block. 52 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockRecord {
    // In words of 32 bits, so that no record is padded.
    hash: [u32; 4],
    slots: [u32; Tier::COUNT],
    parent: u32,
    /// The child that was added last; the others follow it by `next_sibling`.
    first_child: u32,
    next_sibling: u32,
    /// None for the first child.
    prev_sibling: u32,
    depth: Depth,
    group: u8,
    /// Resident in the tiers of the low half, filling in those of the high half.
    places: u8,
}

/// Blocks from the root to a block, both included, if the number fits in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Depth(u16);

/// What a record counts itself: hardly any chain is longer. In tests short ones are.
const MAX_DEPTH: u16 = if cfg!(test) { 3 } else { u16::MAX - 1 };

impl Depth {
    fn of(depth: u32) -> Self {
        // The next number stands for all that do not fit.
        Self(depth.min(u32::from(MAX_DEPTH) + 1) as u16)
    }

    /// `None`: it is stored beside the records.
    fn known(self) -> Option<u32> {
        (self.0 <= MAX_DEPTH).then_some(u32::from(self.0))
    }
}

const _: () = assert!(size_of::<BlockRecord>() <= 52, "a record has outgrown its budget");

const fn words(hash: u128) -> [u32; 4] {
    [hash as u32, (hash >> 32) as u32, (hash >> 64) as u32, (hash >> 96) as u32]
}

/// A record's number, if it is one.
const fn some(record: u32) -> Option<RecordId> {
    if record == NONE { None } else { Some(RecordId(record)) }
}

impl BlockRecord {
    const fn new(key: BlockKey, parent: Option<RecordId>, depth: Depth) -> Self {
        let parent = match parent {
            Some(parent) => parent.0,
            None => NONE,
        };
        Self {
            hash: words(key.hash),
            slots: [NONE; Tier::COUNT],
            parent,
            first_child: NONE,
            next_sibling: NONE,
            prev_sibling: NONE,
            depth,
            group: key.group,
            places: 0,
        }
    }

    pub(super) const fn key(&self) -> BlockKey {
        let [a, b, c, d] = self.hash;
        let hash = a as u128 | (b as u128) << 32 | (c as u128) << 64 | (d as u128) << 96;
        BlockKey { hash, group: self.group }
    }

    pub(super) fn is(&self, key: BlockKey) -> bool {
        self.hash == words(key.hash) && self.group == key.group
    }

    pub(super) const fn parent(&self) -> Option<RecordId> {
        some(self.parent)
    }

    /// Tiers where it can be read.
    pub(super) const fn resident(&self) -> TierSet {
        TierSet::from_bits(self.places)
    }

    /// Tiers that it is being copied into.
    pub(super) const fn filling(&self) -> TierSet {
        TierSet::from_bits(self.places >> FILLING)
    }

    /// Whether `tier` has it, or it is on the way there.
    pub(super) const fn has_or_awaits(&self, tier: Tier) -> bool {
        self.resident().has(tier) || self.filling().has(tier)
    }

    /// Whether no tier has or awaits it.
    pub(super) const fn is_nowhere(&self) -> bool {
        self.places == 0
    }

    /// Its slot in a tier where it is resident or filling.
    pub(super) fn slot(&self, tier: Tier) -> SlotId {
        debug_assert!(self.resident().has(tier) || self.filling().has(tier));
        SlotId(self.slots[tier.index()])
    }

    pub(super) fn begin(&mut self, tier: Tier, slot: SlotId) {
        debug_assert!(!self.resident().has(tier) && !self.filling().has(tier));
        self.places |= bit(tier) << FILLING;
        self.slots[tier.index()] = slot.0;
    }

    pub(super) fn publish(&mut self, tier: Tier) {
        debug_assert!(self.filling().has(tier));
        self.places ^= bit(tier) << FILLING | bit(tier);
    }

    pub(super) const fn leave(&mut self, tier: Tier) {
        self.places &= !(bit(tier) << FILLING | bit(tier));
        self.slots[tier.index()] = NONE;
    }
}

/// All records, in one array, with the free ones linked through it.
#[derive(Debug)]
pub(super) struct BlockRecords {
    all: HugeVec<BlockRecord>,
    /// Depths that do not fit in a record. A tree: a large map that grows would hold the lock for
    /// long.
    deep: BTreeMap<RecordId, u32>,
    free: u32,
    live: usize,
}

impl BlockRecords {
    pub(super) fn with_room_for(records: usize) -> Self {
        Self {
            all: HugeVec::with_capacity(records).populated(),
            deep: BTreeMap::new(),
            free: NONE,
            live: 0,
        }
    }

    pub(super) const fn len(&self) -> usize {
        self.live
    }

    pub(super) fn add(&mut self, key: BlockKey, parent: Option<RecordId>) -> RecordId {
        let depth = parent.map_or(1, |parent| self.depth(parent) + 1);
        let known = Depth::of(depth);
        let id = self.store(BlockRecord::new(key, parent, known));
        if known.known().is_none() {
            self.deep.insert(id, depth);
        }
        self.live += 1;
        if let Some(parent) = parent {
            self.link(id, parent);
        }
        id
    }

    /// Blocks from the root of its chain to a block, both included: exact for chains of any length.
    pub(super) fn depth(&self, id: RecordId) -> u32 {
        let beside =
            || self.deep.get(&id).copied().expect("what a record cannot tell is kept beside it");
        self.at(id).depth.known().unwrap_or_else(beside)
    }

    fn store(&mut self, record: BlockRecord) -> RecordId {
        if let Some(id) = some(self.free) {
            self.free = std::mem::replace(self.at_mut(id), record).parent;
            return id;
        }
        self.make_room_for(1);
        self.all.push(record);
        RecordId(self.all.len() as u32 - 1)
    }

    /// A little more room each time than asked for, but far less than twice: records are most of a
    /// table's cost.
    fn make_room_for(&mut self, records: usize) {
        if self.all.capacity() - self.all.len() < records {
            self.all.reserve_exact(records + self.all.len() / 8 + 1024);
        }
    }

    /// The memory of the next records.
    pub(super) fn ahead(&mut self) -> Option<Ahead> {
        let soon = soon_appended(self.all.len());
        // Free records are used first.
        if self.all.len() - self.live > soon {
            return None;
        }
        self.make_room_for(soon);
        self.all.ahead(soon)
    }

    fn link(&mut self, child: RecordId, parent: RecordId) {
        // In front: a shared prefix may have thousands of children.
        let next = std::mem::replace(&mut self.at_mut(parent).first_child, child.0);
        self.at_mut(child).next_sibling = next;
        if let Some(next) = some(next) {
            self.at_mut(next).prev_sibling = child.0;
        }
    }

    fn unlink(&mut self, id: RecordId) {
        let BlockRecord { parent, next_sibling, prev_sibling, .. } = *self.at(id);
        match (some(prev_sibling), some(parent)) {
            (Some(before), _) => self.at_mut(before).next_sibling = next_sibling,
            (None, Some(parent)) => self.at_mut(parent).first_child = next_sibling,
            // Roots are in no list.
            (None, None) => {}
        }
        if let Some(after) = some(next_sibling) {
            self.at_mut(after).prev_sibling = prev_sibling;
        }
    }

    /// The blocks that follow `id` in some chain, whichever tiers have them.
    pub(super) fn children(&self, id: RecordId) -> impl Iterator<Item = RecordId> {
        std::iter::successors(some(self.at(id).first_child), |&child| {
            some(self.at(child).next_sibling)
        })
    }

    /// Forgets a block that no tier has. Its remaining children, if any, are on their way in runs
    /// that fail with its own: a tier that has a block has its parent.
    pub(super) fn remove(&mut self, id: RecordId) {
        debug_assert!(self.at(id).is_nowhere(), "a record left while a tier held it");
        let mut orphan = some(self.at(id).first_child);
        while let Some(child) = orphan {
            let orphaned = self.at_mut(child);
            debug_assert!(
                orphaned.resident() == TierSet::default(),
                "a record left before its children"
            );
            orphaned.parent = NONE;
            orphaned.prev_sibling = NONE;
            orphan = some(std::mem::replace(&mut orphaned.next_sibling, NONE));
        }
        self.unlink(id);
        if self.at(id).depth.known().is_none() {
            self.deep.remove(&id);
        }
        // A free record has no parent: that field links the free ones.
        self.at_mut(id).parent = self.free;
        self.free = id.0;
        self.live -= 1;
    }

    pub(super) fn at(&self, id: RecordId) -> &BlockRecord {
        touched();
        &self.all[id.0 as usize]
    }

    pub(super) fn at_mut(&mut self, id: RecordId) -> &mut BlockRecord {
        touched();
        &mut self.all[id.0 as usize]
    }

    /// All records that some tier has or awaits.
    pub(super) fn live(&self) -> impl Iterator<Item = (RecordId, &BlockRecord)> {
        (0..).map(RecordId).zip(self.all.iter()).filter(|(_, record)| !record.is_nowhere())
    }

    /// Whether there are records from number `next` on.
    pub(super) fn has_beyond(&self, next: u32) -> bool {
        (next as usize) < self.all.len()
    }

    /// Whether its parent's list of children, if it has a parent, leads to it.
    pub(super) fn is_linked(&self, id: RecordId) -> bool {
        let BlockRecord { parent, next_sibling, prev_sibling, .. } = *self.at(id);
        let Some(parent) = some(parent) else { return true };
        let before = match some(prev_sibling) {
            Some(before) => self.at(before).next_sibling,
            None => self.at(parent).first_child,
        };
        let after = some(next_sibling).is_none_or(|after| self.at(after).prev_sibling == id.0);
        before == id.0 && after
    }
}

// Records, index buckets and this have four bits for tiers: a fifth would overflow into the next
// field.
const _: () = assert!(Tier::COUNT == 4, "a tier more needs wider records and buckets");

/// A set of tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierSet(u8);

impl TierSet {
    /// Whether it has `tier`.
    pub const fn has(self, tier: Tier) -> bool {
        self.0 >> tier.index() & 1 == 1
    }

    /// The set with `tier` in it.
    #[must_use]
    pub const fn with(self, tier: Tier) -> Self {
        Self(self.0 | bit(tier))
    }

    pub(super) const fn bits(self) -> u8 {
        self.0
    }

    /// The set with these bits; higher ones are ignored.
    pub(super) const fn from_bits(bits: u8) -> Self {
        Self(bits & 0xF)
    }

    pub(super) const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

pub(super) const fn bit(tier: Tier) -> u8 {
    1 << tier.index()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn key(n: u128) -> BlockKey {
        BlockKey { hash: n << 96 | n << 40 | n, group: n as u8 }
    }

    #[test]
    fn a_key_comes_back_as_it_was() {
        let record = BlockRecord::new(key(0xABCD_EF01), None, Depth::of(1));
        assert!(record.is(key(0xABCD_EF01)) && record.key() == key(0xABCD_EF01));
        assert!(!record.is(BlockKey { group: 9, ..key(0xABCD_EF01) }) && !record.is(key(2)));
    }

    proptest! {
        /// A forest grows and loses blocks, mostly leaves: each block's children are those that
        /// name it as parent.
        #[test]
        fn links_agree_with_parents(steps in prop::collection::vec((0..4u8, any::<prop::sample::Index>()), 1..200)) {
            let mut records = BlockRecords::with_room_for(1);
            let mut parents: BTreeMap<u32, Option<u32>> = BTreeMap::new();
            let mut depths: BTreeMap<u32, u32> = BTreeMap::new();
            for (count, (kind, which)) in steps.into_iter().enumerate() {
                let some_record = (!parents.is_empty()).then(|| *parents.keys().nth(which.index(parents.len())).unwrap());
                if kind > 0 || some_record.is_none() {
                    let parent = some_record.filter(|_| kind > 1);
                    let added = records.add(key(count as u128), parent.map(RecordId));
                    prop_assert_eq!(parents.insert(added.0, parent), None);
                    depths.insert(added.0, parent.map_or(1, |parent| depths[&parent] + 1));
                } else if let Some(gone) = some_record {
                    records.remove(RecordId(gone));
                    parents.remove(&gone);
                    depths.remove(&gone);
                    parents.values_mut().filter(|parent| **parent == Some(gone)).for_each(|parent| *parent = None);
                }
                prop_assert_eq!(records.len(), parents.len());
                prop_assert_eq!(records.deep.len(), depths.values().filter(|&&depth| depth > u32::from(MAX_DEPTH)).count());
                for (&id, &parent) in &parents {
                    prop_assert_eq!(records.at(RecordId(id)).parent(), parent.map(RecordId));
                    prop_assert_eq!(records.depth(RecordId(id)), depths[&id]);
                    let children: Vec<u32> = records.children(RecordId(id)).map(|child| child.0).collect();
                    let set: BTreeSet<u32> = children.iter().copied().collect();
                    prop_assert_eq!(set.len(), children.len());
                    let expected = parents.iter().filter(|(_, parent)| **parent == Some(id)).map(|(&child, _)| child);
                    prop_assert_eq!(set, expected.collect::<BTreeSet<u32>>());
                }
            }
        }
    }
}
