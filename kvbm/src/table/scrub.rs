//! Idle blocks, verified in turn.

use kvbm_tiers::{BlockKey, Loan, SlotId, SlotRef, Tier};

use super::Table;
use super::tier::TierSlot;
use crate::task::Defect;

/// A block being verified: it is pinned, and its slot lent, until [`Table::scrubbed`].
#[derive(Debug)]
pub struct Scrubbed {
    /// Which.
    pub block: BlockKey,
    /// The hash of the block before it.
    pub parent: Option<u128>,
    /// Where it lies.
    pub slot: SlotRef,
    /// The right to read it.
    pub loan: Loan,
}

/// Slots looked at in one step.
const LOOKED_AT: u32 = 1_024;

impl Table {
    /// Pins the next block of `tier` from slot `from` on, as far as one step goes, and says where
    /// the next step begins. `None`: at the first slot again.
    pub fn scrub_next(&mut self, tier: Tier, from: u32) -> (Option<Scrubbed>, Option<u32>) {
        let held = self.tier(tier);
        let slots = if held.is_withdrawn { 0 } else { held.slots.len() as u32 };
        let is_block = |&slot: &u32| {
            let block = held.at(SlotId(slot));
            let is_there = block.record != TierSlot::EMPTY.record && !block.is_quarantined();
            is_there
                && !held.is_forgotten(SlotId(slot))
                && held.pool.resident_ref(SlotId(slot)).is_some()
        };
        let end = slots.min(from.saturating_add(LOOKED_AT));
        let found = (from..end).find(is_block);
        let next = Some(found.map_or(end, |found| found + 1)).filter(|&next| next < slots);
        (found.and_then(|found| self.pin_to_scrub(tier, SlotId(found))), next)
    }

    fn pin_to_scrub(&mut self, tier: Tier, slot: SlotId) -> Option<Scrubbed> {
        let known = *self.records.at(self.tier(tier).at(slot).record);
        let parent = known.parent().map(|parent| self.records.at(parent).key().hash);
        let held = self.tier_mut(tier);
        let found = held.pool.resident_ref(slot)?;
        let loan = held.pool.lend(slot)?;
        held.pin(slot);
        Some(Scrubbed { block: known.key(), parent, slot: found, loan })
    }

    /// A block was verified. One with a defect leaves the tier with its descendants, and is written
    /// there anew if the tier above has it.
    pub fn scrubbed(&mut self, scrubbed: Scrubbed, defect: Option<Defect>) {
        let Scrubbed { block, slot, loan, .. } = scrubbed;
        self.tier_mut(slot.tier).pool.settle(loan);
        if let Some(defect) = defect {
            self.quarantine(block, slot, defect);
        }
        self.unpin(slot.tier, slot.slot);
    }
}
