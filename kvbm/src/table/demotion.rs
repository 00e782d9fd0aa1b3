//! Keeping room in a tier whose blocks go down when they leave, not before.
//!
//! A request never waits for a flush. So what leaves next is sent down ahead of time, off the requests' path,
//! until a few slots are free or will be.

use kvbm_policies::{BlockId, Candidates, Trigger};
use kvbm_tiers::{SlotId, Tier};

use super::flush::Group;
use super::index::RecordId;
use super::tier::Dirty;
use super::{MissReason, RequestInfo, Table};

/// Blocks that leave in one step, some 10 µs each: a policy is asked for each, and the tier below.
const STEP: usize = 64;
/// Slots looked at in one step.
const LOOKED_AT: usize = 1_024;

/// What became of a block that is about to leave.
enum Demotion {
    /// It is gone.
    Gone,
    /// It goes once it is flushed.
    Sent,
    /// The tier below has no room now.
    Stuck,
}

impl Table {
    /// Lets leave what its policy gives up next, until `slots` slots of `tier` are free or will be after the copies
    /// that are among the [effects](Self::take_effects), or these are `copies`, or one step is done. Returns whether
    /// there is more to do. Nothing, where blocks go down as soon as they come.
    pub fn make_headroom(&mut self, tier: Tier, slots: usize, copies: usize) -> bool {
        let held = self.tiers[tier.index()].as_ref().filter(|held| held.policies.has_admission());
        let Some(to) = held.and_then(|held| held.flush_to) else { return false };
        let mut promised = 0;
        for _ in 0..STEP {
            let is_enough = self.tier(tier).pool.free() as usize + promised >= slots;
            if is_enough || self.transfers.tasks_planned() >= copies {
                return false;
            }
            let (held, records) = self.tier_and_records(tier);
            // Asked anew for each: what was sent down is pinned now, so its parent is next.
            let Some(leaf) = held.next_to_leave(records) else { return false };
            match self.demote(tier, to, leaf) {
                Demotion::Gone => {}
                Demotion::Sent => promised += 1,
                Demotion::Stuck => return false,
            }
        }
        true
    }

    fn demote(&mut self, tier: Tier, to: Tier, leaf: SlotId) -> Demotion {
        let record = self.tier(tier).at(leaf).record;
        let is_clean = self.tier(tier).is_clean(leaf, &self.records);
        if !is_clean {
            let mut blocks = self.missing_beginning(to, record);
            blocks.truncate(STEP);
            let is_whole = blocks.last() == Some(&record);
            blocks.truncate(self.admitted(tier, &blocks, Trigger::Leaving));
            let is_refused = blocks.is_empty();
            let info = self.tier(tier).last_user(leaf, &self.records);
            let mut group = Group { blocks, info, ..Group::default() };
            if !self.launch(tier, to, &mut group).is_empty() {
                return Demotion::Stuck;
            }
            if !is_whole && !is_refused {
                // What comes before it goes down first.
                return Demotion::Stuck;
            }
            if self.records.at(record).filling().has(to) {
                return Demotion::Sent;
            }
        }
        let key = self.records.at(record).key();
        self.evict_leaf(tier, leaf);
        if !is_clean && self.find(key).is_none() {
            self.miss_history.note(key, MissReason::Admission, to, self.now_ms);
        }
        Demotion::Gone
    }

    /// How many blocks of a path that the tier below `tier` lacks are admitted there.
    pub(super) fn admitted(&mut self, tier: Tier, path: &[RecordId], trigger: Trigger) -> usize {
        let Some(&last) = path.last() else { return 0 };
        let (blocks, depth) = (path.len() as u32, self.records.depth(last));
        let candidates = Candidates { last: self.block_id(tier, last), blocks, depth };
        let now_ms = self.now_ms;
        let (held, records) = self.tier_and_records(tier);
        held.admit(candidates, trigger, now_ms, records) as usize
    }

    fn block_id(&self, tier: Tier, record: RecordId) -> BlockId {
        BlockId(self.records.at(record).slot(tier).0)
    }

    /// Has a block of `tier` that was used asked about again, if the tier below lacks it.
    pub(super) fn want_flush_again(&mut self, tier: Tier, slot: SlotId, info: RequestInfo) {
        let since_ms = self.now_ms;
        let (held, records) = self.tier_and_records(tier);
        let record = held.at(slot).record;
        let lacks = |below: Tier| !records.at(record).resident().has(below);
        if held.policies.has_admission() && held.flush_to.is_some_and(lacks) {
            held.at_mut(slot).want_flush();
            held.queue(Dirty { slot, record, since_ms, info });
        }
    }

    /// Has the leaves of `tier` that the tier below lacks asked about as if they left now, from slot `from` on. Returns
    /// where the next step goes on.
    pub fn want_flush_of_all(&mut self, tier: Tier, from: u32) -> Option<u32> {
        let held = self.tiers[tier.index()].as_ref().filter(|held| held.policies.has_admission())?;
        let (slots, next) = held.step(from, LOOKED_AT);
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
