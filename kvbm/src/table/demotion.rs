//! Keeping room in a tier whose blocks go down only when they leave.
//!
//! A request never waits for a flush. So the blocks that leave next are sent down ahead of time,
//! off the requests' path, until a few slots are free or will be.

use kvbm_policies::{BlockId, Candidates, Trigger};
use kvbm_tiers::{Route, SlotId, SlotRef, Tier};

use super::budget::Budget;
use super::flush::FlushGroup;
use super::flush_queue::DirtyBlock;
use super::index::RecordId;
use super::{MissReason, RequestInfo, Table};

/// Blocks sent down together.
const MAX_SENT: usize = 64;
/// Cost of asking a policy about a block, and the rule about its path, in changes.
const ASKED: usize = 3;
/// Looks that it takes to ask about [`MAX_SENT`] blocks, to weigh them, to make room for them and
/// to send them.
const SENDING: usize = 2_500;

/// What became of a block that is about to leave.
enum DemotionStep {
    /// It is gone.
    Gone,
    /// It goes once it is flushed.
    Sent,
    /// The tier below has no room now, or its ancestors go down first.
    Stuck,
    /// The hold ended first.
    Later,
}

/// How far the search for a leaf's ancestors has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Climb {
    leaf: SlotRef,
    to: RecordId,
}

impl Table {
    /// Lets blocks that the policy gives up next leave, until `slots` slots of `tier` are free or
    /// will be after the copies among the [effects](Self::take_effects), or there are `copies` of
    /// these, or the hold is over. Returns whether there is more to do. Does nothing in a tier
    /// whose blocks go down as soon as they come.
    pub fn make_headroom(
        &mut self,
        tier: Tier,
        slots: usize,
        copies: usize,
        budget: &mut Budget,
    ) -> bool {
        let Some(to) = self.flushes_to(tier) else { return false };
        if !self.tier(tier).policies.has_admission() {
            return false;
        }
        let mut promised = 0;
        while !budget.is_spent() {
            let is_enough = self.tier(tier).pool.free() as usize + promised >= slots;
            if is_enough || self.transfers.tasks_planned() >= copies {
                return false;
            }
            let (held, records) = self.tier_and_records(tier);
            // Asked anew each time: a block that was sent down is pinned now, so its parent is
            // next.
            let Some(leaf) = held.next_to_leave(records, budget) else { break };
            match self.demote(tier, to, leaf, budget) {
                DemotionStep::Gone => {}
                DemotionStep::Sent => promised += 1,
                DemotionStep::Stuck => return false,
                DemotionStep::Later => return true,
            }
        }
        budget.is_spent()
    }

    fn demote(&mut self, tier: Tier, to: Tier, leaf: SlotId, budget: &mut Budget) -> DemotionStep {
        let record = self.tier(tier).at(leaf).record;
        let is_clean = self.tier(tier).is_clean(leaf, &self.records);
        if !is_clean {
            let Some(mut blocks) = self.missing_beginning(tier, to, leaf, budget) else {
                return DemotionStep::Later;
            };
            blocks.truncate(MAX_SENT);
            let is_whole = blocks.last() == Some(&record);
            blocks.truncate(self.admitted(tier, &blocks, Trigger::Leaving, budget));
            let first = blocks.first().copied();
            let info = self.tier(tier).last_user(leaf, &self.records);
            let mut group = FlushGroup { blocks, info, ..FlushGroup::default() };
            if !self.launch(Route { from: tier, to }, &mut group, budget).is_empty() {
                return if budget.is_spent() { DemotionStep::Later } else { DemotionStep::Stuck };
            }
            if !is_whole && first.is_some_and(|first| self.records.at(first).has_or_awaits(to)) {
                // Its ancestors go down first.
                return DemotionStep::Stuck;
            }
            if self.records.at(record).filling().has(to) {
                return DemotionStep::Sent;
            }
        }
        let key = self.records.at(record).key();
        self.evict_leaf(tier, leaf, budget);
        if !is_clean && self.find(key).is_none() {
            self.miss_history.note(key, MissReason::Admission, to, self.now_ms);
        }
        DemotionStep::Gone
    }

    /// The beginning of the [path](Self::missing_path) that a leaf lacks in `to`, however long that
    /// is. `None`: the hold ended before it was found, and the next one goes on.
    fn missing_beginning(
        &mut self,
        tier: Tier,
        to: Tier,
        leaf: SlotId,
        budget: &mut Budget,
    ) -> Option<Vec<RecordId>> {
        // These are the leaf's ancestors in this life of its slot.
        let leaf_ref = self.slot_ref(tier, leaf);
        let climbed = self.tier_mut(tier).climbed.take().filter(|climb| climb.leaf == leaf_ref);
        // The block that it had reached may have gone down meanwhile.
        let known = climbed.filter(|climb| !self.records.at(climb.to).has_or_awaits(to));
        let mut from = known.map_or(self.tier(tier).at(leaf).record, |climb| climb.to);
        while budget.looks_left() > MAX_SENT {
            match self.missing_path(to, from, None, budget) {
                // With too few looks left to send it, the next hold would climb from the leaf
                // again.
                Ok(path)
                    if known.is_none() && budget.looks_left() < SENDING && !path.is_empty() =>
                {
                    from = path[path.len().min(MAX_SENT) - 1];
                    break;
                }
                Ok(path) => return Some(path),
                Err(above) => from = above,
            }
        }
        self.tier_mut(tier).climbed = Some(Climb { leaf: leaf_ref, to: from });
        None
    }

    /// How many blocks of a path that the tier below `tier` lacks it admits.
    pub(super) fn admitted(
        &mut self,
        tier: Tier,
        path: &[RecordId],
        trigger: Trigger,
        budget: &mut Budget,
    ) -> usize {
        let Some(&last) = path.last() else { return 0 };
        budget.pay_changes(ASKED);
        let (blocks, depth) = (path.len() as u32, self.records.depth(last));
        let candidates = Candidates { last: self.block_id(tier, last), blocks, depth };
        let now_ms = self.now_ms;
        let (held, records) = self.tier_and_records(tier);
        held.admit(candidates, trigger, now_ms, records) as usize
    }

    fn block_id(&self, tier: Tier, record: RecordId) -> BlockId {
        BlockId(self.records.at(record).slot(tier).0)
    }

    /// Queues a used block of `tier` to be asked about again, if the tier below lacks it.
    pub(super) fn want_flush_again(&mut self, tier: Tier, slot: SlotId, info: RequestInfo) {
        let since_ms = self.now_ms;
        let (held, records) = self.tier_and_records(tier);
        let record = held.at(slot).record;
        let lacks = |below: Tier| !records.at(record).resident().has(below);
        if held.policies.has_admission() && held.flush_to.is_some_and(lacks) {
            held.at_mut(slot).want_flush();
            held.queue(DirtyBlock { slot, record, since_ms, info });
        }
    }

    /// Queues leaves of `tier` that the tier below lacks, from slot `from` on, to be asked about as
    /// if they left now. Returns where the next hold goes on.
    pub fn want_flush_of_all(&mut self, tier: Tier, from: u32, budget: &mut Budget) -> Option<u32> {
        let held =
            self.tiers[tier.index()].as_mut().filter(|held| held.policies.has_admission())?;
        if from == 0 {
            // What is refused when it is used may be admitted when it leaves.
            held.turned_away = None;
        }
        // Each slot that is looked at may hold a leaf.
        let (slots, next) = held.step(from, &mut budget.changes_as_looks());
        let is_leaf = |slot: &u32| {
            let at = held.at(SlotId(*slot));
            at.is_leaf() && !at.is_quarantined() && !held.is_forgotten(SlotId(*slot))
        };
        let leaves: Vec<u32> = slots.filter(is_leaf).collect();
        for leaf in leaves.into_iter().map(SlotId) {
            let info = self.tier(tier).last_user(leaf, &self.records);
            self.want_flush_again(tier, leaf, info);
        }
        next
    }
}
