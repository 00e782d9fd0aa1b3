//! Withdrawn tiers: too much of what they gave was wrong. Until the next reset they neither give
//! nor take blocks.
//!
//! This is a state of the tier, not a breaker: its medium may be well. No match finds its blocks,
//! no lease holds them, none are lent, copied or flushed, and none come. Loads from below pass it
//! by. A tier that flushes into it goes on as if it could not be written.

use kvbm_tiers::Tier;

use super::Table;
use super::tier_set::TierSet;
use super::transfers::Effects;

impl Table {
    /// Withdraws `tier` until the next [reset](Self::reset). [`end_withdrawn`](Self::end_withdrawn)
    /// ends what is under way.
    pub fn withdraw(&mut self, tier: Tier) -> Effects {
        for held in self.tiers.iter_mut().flatten() {
            held.is_withdrawn |= held.tier == tier;
            // Dirty blocks may leave unflushed.
            held.is_flush_blocked |= held.tier == tier || held.flush_to == Some(tier);
        }
        self.quarantines.have_traces_begin_anew();
        self.take_effects()
    }

    /// Ends the transfer at place `from`, if it reads a withdrawn tier or fills one. Returns where
    /// the next step goes on. `None`: there are no more.
    pub fn end_withdrawn(&mut self, from: u32) -> Option<u32> {
        let (id, tiers) = self.transfers.tiers_at(from)?;
        if self.are_withdrawn(tiers) {
            self.abort(id, 0);
        }
        Some(from + 1)
    }

    /// Whether any of these are withdrawn.
    pub(super) fn are_withdrawn(&self, tiers: TierSet) -> bool {
        Tier::ALL.into_iter().any(|tier| tiers.has(tier) && self.is_withdrawn(tier))
    }

    /// Whether `tier` is withdrawn.
    pub fn is_withdrawn(&self, tier: Tier) -> bool {
        self.tiers[tier.index()].as_ref().is_some_and(|held| held.is_withdrawn)
    }

    /// Whether the tier exists, and gives and takes blocks.
    pub(super) fn is_in_use(&self, tier: Tier) -> bool {
        self.has(tier) && !self.is_withdrawn(tier)
    }

    /// Ends all withdrawals: the wrong blocks are forgotten.
    pub(super) fn reinstate_tiers(&mut self) {
        self.tiers.iter_mut().flatten().for_each(|held| held.is_withdrawn = false);
    }
}
