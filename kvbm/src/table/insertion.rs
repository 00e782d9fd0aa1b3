//! Which blocks a full tier takes in: those that are worth more than what they would displace.
//!
//! A policy that learns knows before a copy starts that a block will be the first to leave again.
//! So it is shown the blocks that are about to come under provisional ids, beyond the tier's slots.
//! What it then gives up, a block of the tier or a new one, makes room for the others. New ones
//! that it gives up are not copied at all. Only the last tier declines: what another tier does not
//! want, the tier below may.
//!
//! If that takes more than one hold of the table, newcomers are shown again in the next one,
//! without those that were given up: between two holds no policy knows an id without a slot.

use kvbm_policies::BlockId;
use kvbm_tiers::{BlockKey, SlotId, Tier};

use super::budget::Budget;
use super::index::RecordId;
use super::{RequestContext, Table};

/// What became of newcomers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Admitted {
    /// How many leading ones were not given up.
    pub(super) blocks: usize,
    /// Ask about these again: the hold ended before there was room for all of them.
    pub(super) has_more: bool,
}

impl Admitted {
    const fn all(blocks: usize) -> Self {
        Self { blocks, has_more: false }
    }
}

impl Table {
    /// How many leading blocks of `keys`, which come below `parent`, `tier` takes in. Makes room
    /// for them, if its policy has a say in that, as far as the hold goes.
    pub(super) fn admit_new(
        &mut self,
        tier: Tier,
        parent: Option<RecordId>,
        keys: &[BlockKey],
        context: RequestContext,
        budget: &mut Budget,
    ) -> Admitted {
        // Forgotten blocks must not count against new ones.
        self.sweep_tier(tier, keys.len(), budget);
        let held = self.tier(tier);
        // The engine is about to compute what the device lacks: it must have the room. And what
        // comes to a tier that is flushed may be wanted below.
        let takes_all =
            tier == Tier::Device || held.flush_to.is_some() || !held.policies.may_decline();
        if takes_all || keys.len() <= held.pool.free() as usize {
            return Admitted::all(keys.len());
        }
        // Showing them and taking them back must leave something to spend.
        if budget.looks_left() < 3 * keys.len() {
            return Admitted { blocks: keys.len(), has_more: true };
        }
        budget.pay(2 * keys.len());
        let depth = parent.map_or(0, |parent| self.records.depth(parent));
        let parent = parent.map(|parent| BlockId(self.records.at(parent).slot(tier).0));
        // Beyond all slots, staging included: no block of the tier has such an id.
        let first = held.pool.total();
        let last = first + keys.len() as u32 - 1;
        let count = keys.len() as u32;
        let access = context.access(self.now_ms, SlotId(last), depth + count, count);
        let (policies, insertion) = self.show(tier, first, keys, parent);
        // Not by `TierTable::touch`, which looks up the depth in a record: these have none.
        policies.touch(&access, &insertion);
        let kept = self.choose(tier, first, keys, parent, budget);
        // From the last one up, as leaves leave. When they come, they are told under their slot
        // numbers.
        for left in (0..kept.blocks).rev() {
            self.reject_new(tier, (BlockId(first + left as u32), &keys[left]), left, parent);
        }
        self.tier_mut(tier).stats.declined += (keys.len() - kept.blocks) as u64;
        kept
    }

    /// Gives up blocks of the tier and new ones until the others have room, or the hold is over.
    fn choose(
        &mut self,
        tier: Tier,
        first: u32,
        keys: &[BlockKey],
        parent: Option<BlockId>,
        budget: &mut Budget,
    ) -> Admitted {
        let mut kept = keys.len();
        while kept > self.tier(tier).pool.free() as usize {
            match self.victim_among(tier, first, &keys[..kept], parent, budget) {
                Some(block) if block.0 >= first => {
                    // Only the last one: those before it have children.
                    kept -= 1;
                    budget.change();
                    self.reject_new(tier, (block, &keys[kept]), kept, parent);
                }
                Some(block) => self.evict_leaf(tier, SlotId(block.0), budget),
                None if budget.is_spent() => return Admitted { blocks: kept, has_more: true },
                // The rest finds no room, and is refused later.
                None => break,
            }
        }
        Admitted::all(kept)
    }

    /// Gives up the last newcomer, behind `left` others.
    fn reject_new(
        &mut self,
        tier: Tier,
        (newcomer, key): (BlockId, &BlockKey),
        left: usize,
        parent: Option<BlockId>,
    ) {
        let is_leaf = |parent: &BlockId| self.tier(tier).at(SlotId(parent.0)).is_leaf();
        let exposed = match left {
            // It may have other children in the tier.
            0 => parent.filter(is_leaf),
            _ => Some(BlockId(newcomer.0 - 1)),
        };
        self.tier_mut(tier).policies.removed(newcomer, key.folded(), exposed);
    }
}
