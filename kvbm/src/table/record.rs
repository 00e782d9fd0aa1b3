//! Records: what the table knows about one block, whatever tiers hold it.

use kvbm_tiers::{BlockKey, HugeVec, SlotId, Tier};

use super::index::RecordId;

/// Marks the absence of a slot, a parent or a free record.
const NONE: u32 = u32::MAX;

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

const fn bit(tier: Tier) -> u8 {
    1 << tier.index()
}

const FILLING: u32 = 4;

/// One block. 40 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    hash: [u64; 2],
    slots: [u32; Tier::COUNT],
    parent: u32,
    depth: u16,
    group: u8,
    /// Resident in the tiers of the low half, filling in those of the high half.
    places: u8,
}

const _: () = assert!(size_of::<Record>() <= 40, "a record has outgrown its budget");

impl Record {
    const fn new(key: BlockKey, parent: Option<RecordId>, depth: u16) -> Self {
        let parent = match parent {
            Some(parent) => parent.0,
            None => NONE,
        };
        Self {
            hash: [key.hash as u64, (key.hash >> 64) as u64],
            slots: [NONE; Tier::COUNT],
            parent,
            depth,
            group: key.group,
            places: 0,
        }
    }

    pub(super) const fn key(&self) -> BlockKey {
        BlockKey { hash: self.hash[0] as u128 | (self.hash[1] as u128) << 64, group: self.group }
    }

    pub(super) fn is(&self, key: BlockKey) -> bool {
        self.hash == [key.hash as u64, (key.hash >> 64) as u64] && self.group == key.group
    }

    pub(super) const fn parent(&self) -> Option<RecordId> {
        if self.parent == NONE { None } else { Some(RecordId(self.parent)) }
    }

    /// Blocks from the root to this one, both included; saturates at 65,535.
    pub(super) fn depth(&self) -> u32 {
        u32::from(self.depth)
    }

    /// Tiers where it can be read.
    pub(super) const fn resident(&self) -> TierSet {
        TierSet(self.places & 0xF)
    }

    /// Tiers into which it is being copied.
    pub(super) const fn filling(&self) -> TierSet {
        TierSet(self.places >> FILLING)
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

/// All records, in one array with the free ones chained through it.
#[derive(Debug)]
pub(super) struct Records {
    all: HugeVec<Record>,
    free: u32,
    live: usize,
}

impl Records {
    pub(super) fn with_room_for(records: usize) -> Self {
        Self { all: HugeVec::with_capacity(records), free: NONE, live: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.live
    }

    pub(super) fn add(&mut self, key: BlockKey, parent: Option<RecordId>) -> RecordId {
        let depth = parent.map_or(1, |parent| self.at(parent).depth.saturating_add(1));
        let record = Record::new(key, parent, depth);
        self.live += 1;
        if self.free != NONE {
            let id = self.free;
            self.free = std::mem::replace(&mut self.all[id as usize], record).parent;
            return RecordId(id);
        }
        if self.all.len() == self.all.capacity() {
            self.all.reserve_exact(self.all.len() / 8 + 1024);
        }
        self.all.push(record);
        RecordId(self.all.len() as u32 - 1)
    }

    pub(super) fn remove(&mut self, id: RecordId) {
        debug_assert!(self.at(id).is_nowhere(), "a record left while a tier held it");
        self.all[id.0 as usize].parent = self.free;
        self.free = id.0;
        self.live -= 1;
    }

    pub(super) fn at(&self, id: RecordId) -> &Record {
        &self.all[id.0 as usize]
    }

    pub(super) fn at_mut(&mut self, id: RecordId) -> &mut Record {
        &mut self.all[id.0 as usize]
    }

    /// All records that some tier has or awaits.
    pub(super) fn live(&self) -> impl Iterator<Item = (RecordId, &Record)> {
        (0u32..).map(RecordId).zip(self.all.iter()).filter(|(_, record)| !record.is_nowhere())
    }
}
