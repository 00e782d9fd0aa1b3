//! Blocks that a reset forgot and that are still in their slots.
//!
//! No match finds a forgotten block, but an earlier lease may still read it. Its slot is freed in
//! one pass over the tier's slots, in steps, or sooner if room is needed; a slot that is read then
//! is freed when its last reader leaves. Blocks leave leaf-first here too.

use kvbm_tiers::{SlotId, Tier};

use super::Table;
use super::budget::Budget;
use super::flush_queue::Entries;
use super::tier::{TierSlot, TierTable};

/// The forgotten blocks of a tier.
#[derive(Debug, Default)]
pub(super) struct ForgottenSlots {
    /// How many there are.
    pub(super) blocks: u32,
    /// Slots that the pass has yet to look at, to mark what is forgotten and let go what can. The
    /// last one comes first: a chain lies root-first where slots were free, so the pass meets its
    /// leaf at once.
    left: u32,
    /// Those of them that got a new block since the reset.
    renewed: SlotSet,
    /// Leaves without readers.
    leaves: Vec<SlotId>,
}

impl ForgottenSlots {
    /// Whether the block that `slot` holds is forgotten.
    pub(super) fn has(&self, slot: SlotId, held: TierSlot) -> bool {
        // A slot may have no block: it was noted as a leaf, and emptied another way.
        let is_old = || slot.0 < self.left && !self.renewed.has(slot);
        held.record != TierSlot::EMPTY.record && (held.is_forgotten() || is_old())
    }

    /// `slot` has a new block.
    pub(super) fn renew(&mut self, slot: SlotId) {
        if slot.0 < self.left {
            self.renewed.insert(slot);
        }
    }

    /// Forgets all blocks in the first `slots` slots. Returns the notes about them, which take time
    /// to drop.
    fn begin_pass(&mut self, slots: u32) -> SlotSet {
        self.left = slots;
        std::mem::replace(&mut self.renewed, SlotSet::of_first(slots))
    }
}

/// Slots of a part of a set: 4 KiB.
const PART: u32 = 1 << 15;
const WORDS: usize = PART as usize / 64;

/// A set of slots, a bit for each, in parts made on their first use: a reset of a tier of a hundred
/// million slots clears no megabytes.
#[derive(Debug, Default)]
struct SlotSet(Vec<Option<Box<[u64; WORDS]>>>);

impl SlotSet {
    fn of_first(slots: u32) -> Self {
        Self((0..slots.div_ceil(PART)).map(|_| None).collect())
    }

    fn insert(&mut self, slot: SlotId) {
        let part = self.0[(slot.0 / PART) as usize].get_or_insert_with(|| Box::new([0; WORDS]));
        part[(slot.0 % PART / 64) as usize] |= 1 << (slot.0 % 64);
    }

    fn has(&self, slot: SlotId) -> bool {
        let part = self.0[(slot.0 / PART) as usize].as_ref();
        part.is_some_and(|part| part[(slot.0 % PART / 64) as usize] >> (slot.0 % 64) & 1 == 1)
    }
}

/// Blocks of a tier that were dirty when a reset forgot them. There may be a million: they are
/// dropped with the table unlocked.
#[derive(Debug)]
pub struct Unflushed {
    flushes: Entries,
    _noted: SlotSet,
}

impl Unflushed {
    /// How many.
    pub fn blocks(&self) -> usize {
        self.flushes.len()
    }
}

impl TierTable {
    /// Forgets all blocks of the tier, dirty ones included.
    pub(super) fn forget_all(&mut self) -> Unflushed {
        self.forgotten.blocks += std::mem::take(&mut self.resident);
        let noted = self.forgotten.begin_pass(self.slots.len() as u32);
        self.pressed = false;
        Unflushed { flushes: self.flushes.take_all(), _noted: noted }
    }

    /// Whether the block in `slot` is forgotten.
    pub(super) fn is_forgotten(&self, slot: SlotId) -> bool {
        self.forgotten.has(slot, *self.at(slot))
    }

    /// Notes that a forgotten block may be a leaf without readers.
    pub(super) fn sweep_soon(&mut self, slot: SlotId) {
        self.forgotten.leaves.push(slot);
    }

    fn next_to_sweep(&mut self) -> Option<SlotId> {
        if let Some(leaf) = self.forgotten.leaves.pop() {
            return Some(leaf);
        }
        if self.forgotten.blocks == 0 {
            self.forgotten.left = 0;
        }
        let next = SlotId(self.forgotten.left.checked_sub(1)?);
        // The pass may be over before the block's last reader leaves.
        if self.is_forgotten(next) {
            self.at_mut(next).set_forgotten();
        }
        self.forgotten.left -= 1;
        Some(next)
    }
}

impl Table {
    /// Frees forgotten blocks without readers, as many as the hold has time for. Returns whether
    /// there is more to look at.
    pub fn sweep(&mut self, budget: &mut Budget) -> bool {
        // The tiers after the first that uses up the hold wait for their turn.
        Tier::ALL
            .into_iter()
            .any(|tier| self.has(tier) && self.sweep_tier(tier, usize::MAX, budget))
    }

    /// Frees up to `most` of them in `tier`. Returns whether there is more to look at.
    pub(super) fn sweep_tier(&mut self, tier: Tier, most: usize, budget: &mut Budget) -> bool {
        let mut swept = 0;
        while swept < most && budget.look() {
            let Some(slot) = self.tier_mut(tier).next_to_sweep() else { return false };
            if self.sweep_slot(tier, slot) {
                budget.change();
                swept += 1;
            }
        }
        true
    }

    /// Frees the block in `slot`, if it is forgotten, a leaf and not read.
    fn sweep_slot(&mut self, tier: Tier, slot: SlotId) -> bool {
        let held = self.tier(tier);
        let block = *held.at(slot);
        let is_free_to_go = block.is_leaf() && !block.is_pinned() && !block.is_quarantined();
        if !held.is_forgotten(slot) || !is_free_to_go {
            return false;
        }
        let frame = self.detach(tier, slot);
        self.tier_mut(tier).pool.give_back(frame);
        true
    }
}
