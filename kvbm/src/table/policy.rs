//! The table's calls to the policies of its tiers, where these are shown a tier. Calls about blocks
//! that are about to come, which have no slots yet, are in `evict.rs`, through `Table::show`.
//!
//! A policy sees a tier through a [`TableForest`]: which blocks are leaves, which of them may
//! leave, what is above each. Called under the table's lock.

use std::cell::Cell;

use kvbm_policies::{
    Access, BlockId, Candidates, Forest, Hints, RequestId, Standing, TierPolicies, Trigger,
};
use kvbm_tiers::{BlockKey, FramePool, SlotId, Tier};

use super::Table;
use super::budget::{Budget, touched};
use super::namespace::ForgottenSlots;
use super::record::BlockRecords;
use super::tier::{TierSlot, TierTable};

impl TierTable {
    /// The policies, and the tier as they may see it. If a rule decides what goes down, an
    /// unflushed leaf may be the victim: the rule is asked about it.
    fn policies_and_structure<'a>(
        &'a mut self,
        records: &'a BlockRecords,
    ) -> (&'a mut TierPolicies, TableForest<'a>) {
        // No flush is awaited while the tier below cannot be written: a disk that is away must not
        // close the host tier.
        let awaited =
            self.flush_to.filter(|_| !self.policies.has_admission() && !self.is_flush_blocked);
        let forgotten = (&self.forgotten, &self.pool);
        let looks = Cell::new(usize::MAX);
        let structure =
            TableForest { tier: self.tier, slots: &self.slots, awaited, forgotten, records, looks };
        (&mut self.policies, structure)
    }

    /// What leaves next, flushed or not; `None` also if the hold ends before it is found.
    pub(super) fn next_to_leave(
        &mut self,
        records: &BlockRecords,
        budget: &mut Budget,
    ) -> Option<SlotId> {
        let (policies, structure) = self.policies_and_structure(records);
        structure.looks.set(budget.looks_left());
        let next = policies.victim(&structure).map(|block| SlotId(block.0));
        budget.pay(budget.looks_left() - structure.looks.get());
        next
    }

    /// What may leave at once; `None` also if what leaves next must be flushed first.
    pub(super) fn victim(&mut self, records: &BlockRecords, budget: &mut Budget) -> Option<SlotId> {
        self.next_to_leave(records, budget).filter(|&leaf| self.is_clean(leaf, records))
    }

    /// How many of the candidates go down.
    pub(super) fn admit(
        &mut self,
        candidates: Candidates,
        trigger: Trigger,
        now_ms: u64,
        records: &BlockRecords,
    ) -> u32 {
        let (policies, structure) = self.policies_and_structure(records);
        policies.admit(candidates, trigger, now_ms, &structure)
    }

    /// Reports a use to the policies.
    pub(super) fn touch(&mut self, access: &Access, records: &BlockRecords) {
        // A lease may be of a chain that begins in the middle of a longer one: policies count from
        // the root.
        let depth = records.depth(self.at(SlotId(access.deepest.0)).record);
        let access = Access { depth, path: access.path.max(depth), ..*access };
        let (policies, structure) = self.policies_and_structure(records);
        policies.touch(&access, &structure);
    }

    /// The request in whose name the block in `slot` goes down: the one that used it last, as far
    /// as a policy knows. Without it the tier below could charge no tenant, and would count the
    /// block's coming as a new request's use.
    pub(super) fn last_user(&self, slot: SlotId, records: &BlockRecords) -> RequestInfo {
        // The depth spares the model a search along the block's path.
        let depth = records.depth(self.at(slot).record);
        let last = self.policies.last_use(BlockId(slot.0), depth);
        last.map_or_else(RequestInfo::default, |last| RequestInfo {
            request: last.request,
            hints: last.hints,
            ..RequestInfo::default()
        })
    }

    /// Tells the policies about a leaf that may have become evictable.
    pub(super) fn reconsider(&mut self, slot: SlotId) {
        let held = self.at(slot);
        // A block that is still pinned is reconsidered when its last pin goes; one with children,
        // when the last of them leaves.
        if !held.is_leaf() || held.is_pinned() || held.is_quarantined() {
            return;
        }
        // No match finds it any more: it leaves with the next sweep, whatever its rank.
        if self.is_forgotten(slot) {
            self.sweep_soon(slot);
        } else {
            self.policies.released(BlockId(slot.0));
        }
    }
}

/// The tier as its policy may see it.
struct TableForest<'a> {
    tier: Tier,
    slots: &'a [TierSlot],
    /// The tier that must have a block before it may leave this one.
    awaited: Option<Tier>,
    /// Blocks that it need not have.
    forgotten: (&'a ForgottenSlots, &'a FramePool),
    records: &'a BlockRecords,
    /// How many more blocks it may look at.
    looks: Cell<usize>,
}

impl Forest for TableForest<'_> {
    fn may_look(&self) -> bool {
        let left = self.looks.get();
        self.looks.set(left.saturating_sub(1));
        left > 0
    }

    fn standing(&self, block: BlockId) -> Standing {
        touched();
        let held = self.slots[block.0 as usize];
        let is_clean = || {
            let (forgotten, _) = self.forgotten;
            let is_wanted = || !held.skips_flush() && !forgotten.has(SlotId(block.0), held);
            let awaited = self.awaited.filter(|_| is_wanted());
            awaited.is_none_or(|below| self.records.at(held.record).resident().has(below))
        };
        let is_closed = || self.forgotten.1.gives_no(SlotId(block.0));
        // In the order of cost: a block with children needs no look at its record, a cache miss.
        match held {
            held if !held.is_leaf() => Standing::Interior,
            // Evicting from a closed directory makes no room.
            held if !held.is_pinned() && !is_closed() && is_clean() => Standing::Evictable,
            _ => Standing::Busy,
        }
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        // Every block here has its parent here, in a slot: the tier is prefix-closed.
        let parent = self.records.at(self.slots[block.0 as usize].record).parent()?;
        Some(BlockId(self.records.at(parent).slot(self.tier).0))
    }

    fn key(&self, block: BlockId) -> u64 {
        self.records.at(self.slots[block.0 as usize].record).key().folded()
    }
}

/// Blocks that are about to come, as a policy sees them beside those of the tier.
pub(super) struct NewPath<'a> {
    tier: TableForest<'a>,
    /// The first provisional id.
    first: u32,
    /// Those that have not been given up.
    keys: &'a [BlockKey],
    parent: Option<BlockId>,
}

impl NewPath<'_> {
    fn position(&self, block: BlockId) -> Option<usize> {
        block.0.checked_sub(self.first).map(|position| position as usize)
    }
}

impl Forest for NewPath<'_> {
    fn may_look(&self) -> bool {
        self.tier.may_look()
    }

    fn standing(&self, block: BlockId) -> Standing {
        match self.position(block) {
            Some(position) if position + 1 < self.keys.len() => Standing::Interior,
            Some(_) => Standing::Evictable,
            // To the tier the new blocks' parent is still a leaf, but not once they are there.
            None if Some(block) == self.parent && !self.keys.is_empty() => Standing::Interior,
            None => self.tier.standing(block),
        }
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        match self.position(block) {
            Some(0) => self.parent,
            // Provisional ids follow one another down the chain.
            Some(_) => Some(BlockId(block.0 - 1)),
            None => self.tier.parent(block),
        }
    }

    fn key(&self, block: BlockId) -> u64 {
        match self.position(block) {
            Some(position) => self.keys[position].folded(),
            None => self.tier.key(block),
        }
    }
}

impl Table {
    /// What leaves next of a tier and of blocks that are about to come; `None` also if the hold
    /// ends before it is found.
    pub(super) fn victim_among(
        &mut self,
        tier: Tier,
        first: u32,
        keys: &[BlockKey],
        parent: Option<BlockId>,
        budget: &mut Budget,
    ) -> Option<BlockId> {
        let (policies, insertion) = self.show(tier, first, keys, parent);
        insertion.tier.looks.set(budget.looks_left());
        let next = policies.victim(&insertion);
        budget.pay(budget.looks_left() - insertion.tier.looks.get());
        next
    }

    /// The policies, and the tier as they see it with blocks that are about to come.
    pub(super) fn show<'a>(
        &'a mut self,
        tier: Tier,
        first: u32,
        keys: &'a [BlockKey],
        parent: Option<BlockId>,
    ) -> (&'a mut TierPolicies, NewPath<'a>) {
        let (held, records) = self.tier_and_records(tier);
        let (policies, tier) = held.policies_and_structure(records);
        (policies, NewPath { tier, first, keys, parent })
    }
}

/// What an engine says about the request that uses a chain. All of it is optional.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestInfo {
    /// Below 2⁶³. Ties together all uses by one request, until
    /// [`Manager::finished`](crate::Manager::finished).
    pub request: Option<RequestId>,
    /// Hints for policies.
    pub hints: Hints,
    /// It has leased before, and now comes to load what it found, or at its end.
    pub has_asked: bool,
    /// Leading blocks that a peer gave straight to its engine: metrics count them as found in the
    /// host tier, where the peer had them.
    pub from_peer: u32,
}

/// A request's use of one chain.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestContext {
    /// The request.
    pub info: RequestInfo,
    /// Blocks of its whole chain, held or not.
    pub path: u32,
}

impl RequestContext {
    /// What a tier's policy is told: the leading `depth` blocks, down to `deepest`, were used, and
    /// the last `inserted` of them are new there.
    pub(super) fn access(&self, now_ms: u64, deepest: SlotId, depth: u32, inserted: u32) -> Access {
        Access {
            now_ms,
            request: self.info.request,
            deepest: BlockId(deepest.0),
            depth,
            inserted,
            path: self.path.max(depth),
            hints: self.info.hints,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvbm_policies::admission::WriteBack;
    use kvbm_policies::{Admission, EvictionKind, Hints, RequestId};
    use kvbm_tiers::FramePool;

    use super::super::TierSpec;
    use super::*;
    use crate::names::hash::{BlockHash, Chain};
    use crate::task::Outcome;

    fn spec(tier: Tier, flush_to: Option<Tier>) -> TierSpec {
        let admission = flush_to.map(|_| Box::new(WriteBack) as Box<dyn Admission>);
        TierSpec {
            pool: FramePool::new(tier, 4),
            policy: EvictionKind::Hazard.build(4),
            flush_to,
            admission,
        }
    }

    #[test]
    fn what_goes_down_keeps_its_request() {
        let mut table = Table::new([spec(Tier::Host, Some(Tier::Disk)), spec(Tier::Disk, None)]);
        let hints = Hints { tenant: Some(7), priority: Some(80), ..Hints::default() };
        let info = RequestInfo { request: Some(RequestId(3)), hints, ..RequestInfo::default() };
        let hashes: Vec<_> = (1..5).map(BlockHash::from_u128).collect();
        let reserved = table.reserve(Tier::Host, Chain::from(&hashes[..]), info);
        let _ = table.fill(reserved.transfer, 0, reserved.frames);
        table.end_plan(reserved.transfer);
        table.make_headroom(Tier::Host, 1, 8, &mut Budget::of_a_hold());
        let down = table.take_effects().tasks;
        let slot = down.first().expect("a block goes down").to.slot;
        let _ = table.land(down.iter().map(|task| task.ended(Outcome::Arrived)), Duration::ZERO);
        assert_eq!(table.tier(Tier::Disk).last_user(slot, &table.records), info);
    }
}
