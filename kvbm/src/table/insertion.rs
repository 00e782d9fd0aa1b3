//! Which blocks a full tier takes in: those that are worth more than what they would displace.
//!
//! A policy that learns knows before a copy starts that a block will be the first to leave again. So the blocks
//! that are about to come are shown to it under provisional ids, beyond the tier's slots; whatever it then gives
//! up, a block of the tier or one of the new ones, makes room for the others. New ones that it gives up are not
//! copied at all. Only the last tier declines: what another one does not want, the tier below may.

use kvbm_policies::BlockId;
use kvbm_tiers::{BlockKey, SlotId, Tier};

use super::index::RecordId;
use super::{RequestContext, Table};

impl Table {
    /// How many leading ones of `keys`, which come below `parent`, `tier` takes in. Makes room for them, where it
    /// has a say in that.
    pub(super) fn admit_new(
        &mut self,
        tier: Tier,
        parent: Option<RecordId>,
        keys: &[BlockKey],
        context: RequestContext,
    ) -> usize {
        // What nobody asks for any more must not count against what is new.
        self.sweep_tier(tier, keys.len());
        let held = self.tier(tier);
        // What the device lacks the engine is about to compute there: it must have the room. And what comes to
        // a tier that is flushed may be wanted below.
        let takes_all = tier == Tier::Device || held.flush_to.is_some() || !held.policies.may_decline();
        if takes_all || keys.len() <= held.pool.free() as usize {
            return keys.len();
        }
        let depth = parent.map_or(0, |parent| self.records.depth(parent));
        let parent = parent.map(|parent| BlockId(self.records.at(parent).slot(tier).0));
        // Beyond all slots, those for staging included: no block of the tier has such an id.
        let first = held.pool.total();
        let last = first + keys.len() as u32 - 1;
        let count = keys.len() as u32;
        let access = context.access(self.now_ms, SlotId(last), depth + count, count);
        let (policies, insertion) = self.show(tier, first, keys, parent);
        // Not by `TierTable::touch`, which looks the depth up in a record: these have none.
        policies.touch(&access, &insertion);
        let kept = self.choose(tier, first, keys, parent);
        // From the last one up, as leaves leave. When they come, they are told under the numbers of their slots.
        for left in (0..kept).rev() {
            self.reject_new(tier, (BlockId(first + left as u32), &keys[left]), left, parent);
        }
        self.tier_mut(tier).stats.declined += (keys.len() - kept) as u64;
        kept
    }

    /// Gives up blocks of the tier and new ones until the others have room; returns how many new ones do.
    fn choose(&mut self, tier: Tier, first: u32, keys: &[BlockKey], parent: Option<BlockId>) -> usize {
        let mut kept = keys.len();
        while kept > self.tier(tier).pool.free() as usize {
            let (policies, insertion) = self.show(tier, first, &keys[..kept], parent);
            match policies.victim(&insertion) {
                Some(block) if block.0 >= first => {
                    // The last one: those before it have children.
                    kept -= 1;
                    self.reject_new(tier, (block, &keys[kept]), kept, parent);
                }
                Some(block) => self.evict_leaf(tier, SlotId(block.0)),
                // The rest finds no room, and is refused when it asks for it.
                None => break,
            }
        }
        kept
    }

    /// The last newcomer, behind `left` others, is none any more.
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
