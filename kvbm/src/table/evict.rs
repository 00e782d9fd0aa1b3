//! How blocks leave a tier to make room: leaf by leaf, in the order of its policy. And which blocks
//! a full tier takes in: those that are worth more than what they would displace.
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
use kvbm_tiers::{BlockKey, Frame, SlotId, Tier};

use super::budget::Budget;
use super::flush_queue::DirtyBlock;
use super::index::{KeyHash, RecordId};
use super::record::BlockRecords;
use super::tier::{TierSlot, TierTable};
use super::{MissReason, RequestContext, Table};
use crate::observe::events::RemoveReason;

/// Forgotten blocks that leave first when there is no room.
const SWEPT: usize = 64;

/// Why there is no slot for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoSlot {
    /// The hold is over: the next one may find a slot.
    Later,
    /// Every leaf is busy, or the tier knows the block already.
    Refused,
}

impl Table {
    /// A handle to a slot of `tier` for a block behind `above`; evicts leaves if no slot is free
    /// where its chain lies.
    pub(super) fn claim(
        &mut self,
        tier: Tier,
        above: Option<RecordId>,
        budget: &mut Budget,
    ) -> Result<Frame, NoSlot> {
        let mut home = self.home(tier, above);
        if !self.tier(tier).has_room(home) && self.tier(tier).pool.free() == 0 {
            self.sweep_tier(tier, SWEPT, budget);
            home = self.home(tier, above);
        }
        // One for one, except a few slots that wait for chains of their own directory: nothing
        // leaves in vain.
        while !self.tier(tier).has_room(home) {
            match self.victim(tier, budget) {
                Some(victim) => self.evict_leaf(tier, victim, budget),
                None if budget.is_spent() => return Err(NoSlot::Later),
                None if self.tier(tier).pool.free() > 0 => break,
                None => {
                    let held = self.tier_mut(tier);
                    held.pressed = true;
                    held.stats.full += 1;
                    return Err(NoSlot::Refused);
                }
            }
        }
        budget.change();
        let pool = &mut self.tier_mut(tier).pool;
        let taken = if pool.free_in(home) > 0 { pool.take_in(home) } else { pool.take() };
        taken.ok_or(NoSlot::Refused)
    }

    /// The directory for a block behind `above`. A chain lies in one directory while there is room,
    /// so that a directory that dies takes whole chains, not a part of each. Chains begin where
    /// most room is, and so do branches if that is much more.
    fn home(&self, tier: Tier, above: Option<RecordId>) -> usize {
        let held = self.tier(tier);
        let pool = &held.pool;
        if pool.shards() == 1 {
            return 0;
        }
        let emptiest = pool.emptiest_shard();
        let above = above.map(|above| self.records.at(above));
        let Some(above) = above.filter(|above| above.has_or_awaits(tier)) else { return emptiest };
        let (slot, rows) = (above.slot(tier), pool.total() / pool.shards() as u32);
        let home = pool.shard_of(slot);
        let is_branch = above.resident().has(tier) && !held.at(slot).is_leaf();
        let is_fuller = pool.free_in(emptiest) > pool.free_in(home) + rows / 8;
        if pool.is_closed(home) || (is_branch && is_fuller) { emptiest } else { home }
    }

    /// The leaf that may leave `tier` now. While the tier below cannot be written, that includes
    /// dirty blocks, oldest first and no more than needed: a disk that is away must not close the
    /// host tier too. `None` also if the hold ends before one is found.
    fn victim(&mut self, tier: Tier, budget: &mut Budget) -> Option<SlotId> {
        while !budget.is_spent() {
            let (held, records) = self.tier_and_records(tier);
            let victim = held.victim(records, budget);
            if victim.is_some() || !held.is_flush_blocked || budget.is_spent() {
                return victim;
            }
            let waiting = held.flushes.pop_first()?;
            held.put_off(waiting, 0);
            budget.change();
        }
        None
    }

    /// Evicts a leaf.
    pub(super) fn evict_leaf(&mut self, tier: Tier, leaf: SlotId, budget: &mut Budget) {
        budget.change();
        self.note_evicted(tier, leaf);
        let (held, records) = self.tier_and_records(tier);
        held.stats.unflushed += u64::from(held.is_unflushed(leaf, records));
        let frame = self.detach(tier, leaf);
        self.tier_mut(tier).pool.give_back(frame);
    }

    /// Evicts up to `blocks` leaves of `tier`, as far as the hold goes; returns how many. There may
    /// be more if the hold [is spent](Budget::is_spent).
    pub fn evict_some(&mut self, tier: Tier, blocks: usize, budget: &mut Budget) -> usize {
        for done in 0..blocks {
            let Some(victim) = self.victim(tier, budget) else { return done };
            self.evict_leaf(tier, victim, budget);
        }
        blocks
    }

    /// Evicts up to `blocks` leaves of `tier` in one hold of any length; returns how many.
    pub fn evict(&mut self, tier: Tier, blocks: usize) -> usize {
        let mut evicted = 0;
        loop {
            let mut budget = Budget::of_a_hold();
            evicted += self.evict_some(tier, blocks - evicted, &mut budget);
            if evicted == blocks || !budget.is_spent() {
                return evicted;
            }
        }
    }

    /// Lets a chain leave `tier`, from its block `last` up, until a block that is read or that
    /// another hangs on. Blocks that the tier below should have and lacks stay, unless they
    /// `go_unflushed`. Returns the block to go on with if the hold ends first.
    pub(crate) fn let_go(
        &mut self,
        tier: Tier,
        last: BlockKey,
        go_unflushed: bool,
        budget: &mut Budget,
    ) -> Option<BlockKey> {
        let mut next = self.find(last);
        while let Some(record) = next.filter(|&record| self.records.at(record).resident().has(tier))
        {
            let (held, records) = self.tier_and_records(tier);
            let slot = records.at(record).slot(tier);
            let block = held.at(slot);
            let is_free = block.is_leaf() && !block.is_pinned() && !block.is_quarantined();
            if !is_free || !(go_unflushed || held.is_clean(slot, records)) {
                return None;
            }
            if !budget.change() {
                return Some(records.at(record).key());
            }
            next = records.at(record).parent();
            self.note_evicted(tier, slot);
            let frame = self.detach(tier, slot);
            self.tier_mut(tier).pool.give_back(frame);
        }
        None
    }

    /// Takes a leaf out of a tier and its slot handle out of the table.
    pub(super) fn detach(&mut self, tier: Tier, slot: SlotId) -> Frame {
        let record = self.tier(tier).at(slot).record;
        self.unlink_leaf(tier, slot, record, RemoveReason::Evicted);
        self.skip_flush_above(tier, record);
        let held = self.tier_mut(tier);
        // So that a walk over the slots finds no block here.
        *held.at_mut(slot) = TierSlot::EMPTY;
        let frame =
            held.pool.withdraw(slot).expect("a resident block's slot handle lies in the pool");
        self.forget_if_nowhere(record, MissReason::Evicted, tier);
        frame
    }

    /// Ends a leaf's residency; its slot stays taken.
    pub(super) fn unlink_leaf(
        &mut self,
        tier: Tier,
        slot: SlotId,
        record: RecordId,
        reason: RemoveReason,
    ) {
        let known = self.records.at_mut(record);
        known.leave(tier);
        let (key, parent, resident) = (known.key(), known.parent(), known.resident());
        self.index.note(KeyHash::of(key), record, resident);
        let exposed = self.lose_child(tier, parent);
        let held = self.tier_mut(tier);
        // The reuse model keeps a tag of the name, for the ghost.
        held.policies.removed(BlockId(slot.0), key.folded(), exposed);
        held.flushes.remove(slot);
        if held.is_forgotten(slot) {
            held.forgotten.blocks -= 1;
            exposed.into_iter().for_each(|parent| held.sweep_soon(SlotId(parent.0)));
        } else {
            held.resident -= 1;
            self.note_removed(tier, slot, record);
            self.tell_removed(tier, record, reason);
        }
    }

    /// The parent, if it is a leaf now.
    fn lose_child(&mut self, tier: Tier, parent: Option<RecordId>) -> Option<BlockId> {
        let slot = self.records.at(parent?).slot(tier);
        self.tier_mut(tier).lose_child(slot).then_some(BlockId(slot.0))
    }

    /// The tier that is flushed into `tier`, if it has a block, and the block's slot there.
    pub(super) fn above(
        &mut self,
        tier: Tier,
        record: RecordId,
    ) -> Option<(&mut TierTable, SlotId, &BlockRecords)> {
        // Only tiers above it are.
        let mut above = self.tiers[..tier.index()].iter_mut().flatten();
        let above = above.find(|above| above.flush_to == Some(tier))?;
        let known = self.records.at(record);
        let slot = known.resident().has(above.tier).then(|| known.slot(above.tier))?;
        Some((above, slot, &self.records))
    }

    /// A block that left or missed `tier` need not go there before the tier above may evict it.
    pub(super) fn skip_flush_above(&mut self, tier: Tier, record: RecordId) {
        if let Some((above, slot, _)) = self.above(tier, record) {
            above.at_mut(slot).skip_flush();
            above.reconsider(slot);
        }
    }

    /// Writes a good copy above of what `tier` has lost there again.
    pub(super) fn flush_again(&mut self, tier: Tier, record: RecordId) {
        let since_ms = self.now_ms;
        if let Some((above, slot, records)) = self.above(tier, record) {
            above.at_mut(slot).want_flush();
            let info = above.last_user(slot, records);
            above.queue(DirtyBlock { slot, record, since_ms, info });
        }
    }

    /// The copy of a block into `tier` failed: it is retried later from where it was to come, and
    /// may leave there until then.
    pub(super) fn retry_above(&mut self, tier: Tier, record: RecordId) {
        let since_ms = self.now_ms;
        if let Some((above, slot, records)) = self.above(tier, record) {
            let info = above.last_user(slot, records);
            above.retry_later(DirtyBlock { slot, record, since_ms, info }, since_ms);
        }
    }
}

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
            self.reject_new(tier, BlockId(first + left as u32), &keys[left], left, parent);
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
                    self.reject_new(tier, block, &keys[kept], kept, parent);
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
        newcomer: BlockId,
        key: &BlockKey,
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
