//! Which blocks a full tier takes in: those that are worth more than what they would displace.
//!
//! A policy that learns knows before a copy starts that a block will be the first to leave again. So the blocks
//! that are about to come are shown to it under provisional ids, beyond the tier's slots; whatever it then gives
//! up, a block of the tier or one of the newcomers, makes room for the others. Newcomers that it gives up are not
//! copied at all. Only the last tier declines: what another one does not want, the tier below may.

use kvbm_policies::{BlockId, Eviction, Forest, Standing};
use kvbm_tiers::{BlockKey, SlotId, Tier};

use super::index::RecordId;
use super::tier::Structure;
use super::{Table, Visit};

/// Blocks that are about to come, as a policy may see them beside those of the tier.
struct Newcomers<'a> {
    tier: Structure<'a>,
    /// The first provisional id.
    first: u32,
    /// Those that have not been given up.
    keys: &'a [BlockKey],
    parent: Option<BlockId>,
}

impl Newcomers<'_> {
    fn position(&self, block: BlockId) -> Option<usize> {
        block.0.checked_sub(self.first).map(|position| position as usize)
    }
}

impl Forest for Newcomers<'_> {
    fn standing(&self, block: BlockId) -> Standing {
        match self.position(block) {
            Some(position) if position + 1 < self.keys.len() => Standing::Interior,
            Some(_) => Standing::Evictable,
            None if Some(block) == self.parent && !self.keys.is_empty() => Standing::Interior,
            None => self.tier.standing(block),
        }
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        match self.position(block) {
            Some(0) => self.parent,
            Some(_) => Some(BlockId(block.0 - 1)),
            None => self.tier.parent(block),
        }
    }

    fn key(&self, block: BlockId) -> u64 {
        match self.position(block) {
            Some(position) => super::tier::content(self.keys[position]),
            None => self.tier.key(block),
        }
    }
}

impl Table {
    /// How many leading ones of `keys`, which come below `parent`, `tier` takes in. Makes room for them, where it
    /// has a say in that.
    pub(super) fn welcome(
        &mut self,
        tier: Tier,
        parent: Option<RecordId>,
        keys: &[BlockKey],
        visit: Visit,
    ) -> usize {
        let held = self.tier(tier);
        // What the device lacks the engine is about to compute there: it must have the room. And what comes to
        // a tier that is flushed may be wanted below.
        let takes_all = tier == Tier::Device || held.flush_to.is_some() || !held.policy.may_decline();
        if takes_all || keys.len() <= held.pool.free() as usize {
            return keys.len();
        }
        let depth = parent.map_or(0, |parent| self.records.at(parent).depth());
        let parent = parent.map(|parent| BlockId(self.records.at(parent).slot(tier).0));
        let first = held.pool.total();
        let last = first + keys.len() as u32 - 1;
        let count = keys.len() as u32;
        let access = visit.access(self.now_ms, SlotId(last), depth + count, count);
        let (policy, newcomers) = self.show(tier, first, keys, parent);
        policy.touch(&access, &newcomers);
        let kept = self.choose(tier, first, keys, parent);
        for left in (0..kept).rev() {
            self.dismiss(tier, BlockId(first + left as u32), left, parent);
        }
        self.tier_mut(tier).stats.declined += (keys.len() - kept) as u64;
        kept
    }

    /// Gives up blocks of the tier and newcomers until the others have room; answers how many newcomers do.
    fn choose(&mut self, tier: Tier, first: u32, keys: &[BlockKey], parent: Option<BlockId>) -> usize {
        let mut kept = keys.len();
        while kept > self.tier(tier).pool.free() as usize {
            let (policy, newcomers) = self.show(tier, first, &keys[..kept], parent);
            match policy.victim(&newcomers) {
                Some(block) if block.0 >= first => {
                    kept -= 1;
                    self.dismiss(tier, block, kept, parent);
                }
                Some(block) => self.let_go(tier, SlotId(block.0)),
                // The rest finds no room, and is refused when it asks for it.
                None => break,
            }
        }
        kept
    }

    /// The last newcomer, behind `left` others, is none any more.
    fn dismiss(&mut self, tier: Tier, newcomer: BlockId, left: usize, parent: Option<BlockId>) {
        let is_leaf = |parent: &BlockId| self.tier(tier).at(SlotId(parent.0)).children == 0;
        let exposed = match left {
            0 => parent.filter(is_leaf),
            _ => Some(BlockId(newcomer.0 - 1)),
        };
        self.tier_mut(tier).policy.remove(newcomer, exposed);
    }

    fn show<'a>(
        &'a mut self,
        tier: Tier,
        first: u32,
        keys: &'a [BlockKey],
        parent: Option<BlockId>,
    ) -> (&'a mut dyn Eviction, Newcomers<'a>) {
        let (held, records) = self.tier_and_records(tier);
        let (policy, tier) = held.policy_and_structure(records);
        (policy, Newcomers { tier, first, keys, parent })
    }
}
