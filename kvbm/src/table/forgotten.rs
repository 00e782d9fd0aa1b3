//! What a reset forgot and is still in its slots.
//!
//! Nobody finds a forgotten block; whoever leased it before may still read it. Its slot comes back in one pass over
//! the tier's slots, in steps, or sooner where somebody needs room; one that is read then comes back when its last
//! reader leaves. Blocks leave leaf-first here as well.

use kvbm_tiers::{FramePool, SlotId, Tier};

use super::Table;
use super::budget::Budget;
use super::flush_queue::Entries;
use super::tier::{Slot, TierTable};

/// The forgotten blocks of a tier.
#[derive(Debug, Default)]
pub(super) struct Forgotten {
    /// How many there are.
    pub(super) blocks: u32,
    pass: Option<Pass>,
    /// Leaves that nobody reads any more.
    leaves: Vec<SlotId>,
}

/// A look at each slot in turn, to mark what is forgotten and let go what can.
#[derive(Clone, Copy, Debug)]
struct Pass {
    /// What lay in the tier when its slots had had so many lives is forgotten.
    lives: u32,
    /// Slots that have not been looked at. The last one comes first: a chain lies root-first where slots were free, so
    /// that this meets its leaf at once.
    left: u32,
}

impl Forgotten {
    /// Whether the block that `slot` of `pool` holds is forgotten.
    pub(super) fn has(&self, slot: SlotId, held: Slot, pool: &FramePool) -> bool {
        held.is_forgotten() || self.pass.is_some_and(|pass| pool.is_as_old_as(slot, pass.lives))
    }
}

/// Blocks of a tier that were to be flushed when a reset forgot them. There may be a million: they are dropped with the
/// table unlocked.
#[derive(Debug)]
pub struct Unflushed(Entries);

impl Unflushed {
    /// How many.
    pub fn blocks(&self) -> usize {
        self.0.len()
    }
}

impl TierTable {
    /// Forgets all blocks of the tier, and what of them was to be flushed.
    pub(super) fn forget_all(&mut self) -> Unflushed {
        self.forgotten.blocks += std::mem::take(&mut self.resident);
        self.forgotten.pass = Some(Pass { lives: self.pool.lives(), left: self.slots.len() as u32 });
        self.pressed = false;
        Unflushed(self.flushes.take_all())
    }

    /// Whether the block in `slot` is forgotten.
    pub(super) fn is_forgotten(&self, slot: SlotId) -> bool {
        self.forgotten.has(slot, *self.at(slot), &self.pool)
    }

    /// Notes that a forgotten block may be a leaf that nobody reads.
    pub(super) fn sweep_soon(&mut self, slot: SlotId) {
        self.forgotten.leaves.push(slot);
    }

    fn next_to_sweep(&mut self) -> Option<SlotId> {
        if let Some(leaf) = self.forgotten.leaves.pop() {
            return Some(leaf);
        }
        let left = self.forgotten.pass?.left;
        let Some(next) = left.checked_sub(1).filter(|_| self.forgotten.blocks > 0) else {
            self.forgotten.pass = None;
            return None;
        };
        let next = SlotId(next);
        // The pass may be over before the block's last reader leaves.
        if self.is_forgotten(next) {
            self.at_mut(next).set_forgotten();
        }
        self.forgotten.pass.as_mut()?.left -= 1;
        Some(next)
    }
}

impl Table {
    /// Lets forgotten blocks go that nobody reads, as many as the hold has time for. Returns whether there is more to look
    /// at.
    pub fn sweep(&mut self, budget: &mut Budget) -> bool {
        // The tiers after the first that takes all of the hold wait for their turn.
        Tier::ALL.into_iter().any(|tier| self.has(tier) && self.sweep_tier(tier, usize::MAX, budget))
    }

    /// Lets up to `most` of them leave `tier`. Returns whether there is more to look at.
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

    /// Lets the block in `slot` go, if it is forgotten, a leaf and not read.
    fn sweep_slot(&mut self, tier: Tier, slot: SlotId) -> bool {
        let held = self.tier(tier);
        let block = *held.at(slot);
        let is_free_to_go = block.is_leaf() && block.pins() == 0 && !block.is_quarantined();
        if !held.is_forgotten(slot) || !is_free_to_go {
            return false;
        }
        let frame = self.detach(tier, slot);
        self.tier_mut(tier).pool.give_back(frame);
        true
    }
}
