//! Bad blocks leave a tier with all their descendants. Slots that are being read are freed when
//! their readers leave.
//!
//! A tier of which too much was wrong is *withdrawn*: until the next reset it neither gives nor
//! takes blocks. This is a state of the tier, not a breaker: its medium may be well. No match finds
//! its blocks, no lease holds them, none are lent, copied or flushed, and none come. Loads from
//! below pass it by. A tier that flushes into it goes on as if it could not be written.

use std::collections::{HashMap, HashSet};

use kvbm_tiers::{BlockKey, SlotId, SlotRef, Tier};

use super::budget::Budget;
use super::index::RecordId;
use super::prefix::FoundBoundaries;
use super::record::TierSet;
use super::tier::TierSlot;
use super::transfers::{Dropped, Effects};
use super::{MissReason, Table};
use crate::names::hash::Chain;
use crate::observe::events::RemoveReason;
use crate::task::Defect;

/// Slots of quarantined blocks that still have readers; they are freed together when the last one
/// leaves.
#[derive(Debug)]
struct TierQuarantine {
    /// Each with how many blocks below the anchor it lay.
    slots: HashMap<SlotId, u32>,
    pins: u64,
    /// The pinned parent of the topmost of them.
    anchor: Option<SlotId>,
}

/// A bad block with many descendants, which are dropped in steps.
#[derive(Debug)]
struct DroppingChain {
    key: BlockKey,
    found: SlotRef,
    defect: Defect,
    /// Blocks from its chain's root to it, both included.
    depth: u32,
    /// Where the search for the next leaf continues.
    at: BlockKey,
}

/// Looks that it takes to rank a leaf anew.
const CONSIDERED: usize = 4;
/// Blocks passed in one step on the way down to a leaf.
const MAX_DESCENT: usize = 2_048;

impl Defect {
    const fn remove_reason(self) -> RemoveReason {
        match self {
            Self::Corrupt | Self::Wrong => RemoveReason::Corrupt,
            Self::Unreadable => RemoveReason::Unreadable,
            Self::Forgotten => RemoveReason::Forgotten,
        }
    }

    const fn miss_reason(self) -> MissReason {
        match self {
            Self::Corrupt | Self::Wrong => MissReason::Corrupt,
            Self::Unreadable => MissReason::Unreadable,
            Self::Forgotten => MissReason::Forgotten,
        }
    }
}

/// All quarantines.
#[derive(Debug, Default)]
pub(super) struct TierQuarantines {
    by_tier: [Vec<TierQuarantine>; Tier::COUNT],
    /// How many blocks were dropped so far, or are being dropped, each with its descendants.
    so_far: u64,
    /// How often blocks were dropped by their names.
    names_dropped: u64,
    /// Bad blocks with more descendants than one step drops.
    dropping: Vec<DroppingChain>,
    /// Directories whose blocks cannot be read any more, and are being dropped.
    lost: Vec<DirectoryWalk>,
    /// Directories that are open again, so that their leaves may leave.
    reopened: Vec<DirectoryWalk>,
}

/// A block that a quarantine drops.
#[derive(Clone, Copy, Debug)]
struct DoomedBlock {
    slot: SlotId,
    record: RecordId,
}

/// A walk over a tier's directory, in steps.
#[derive(Clone, Copy, Debug)]
struct DirectoryWalk {
    tier: Tier,
    dir: usize,
    /// The slot to go on with.
    next: u32,
}

impl TierQuarantines {
    pub(super) const fn so_far(&self) -> u64 {
        self.so_far
    }

    /// How often a name was dropped everywhere, copies on their way included.
    pub(super) const fn names_dropped(&self) -> u64 {
        self.names_dropped
    }

    /// What an engine has under earlier names is not planned anew.
    pub(super) const fn drop_name(&mut self) {
        self.names_dropped += 1;
    }

    /// Traces begin anew, as after a quarantine.
    const fn have_traces_begin_anew(&mut self) {
        self.so_far += 1;
    }

    /// Slots of `tier` whose blocks are gone but which still have readers.
    pub(super) fn slots_of(&self, tier: Tier) -> u32 {
        self.by_tier[tier.index()].iter().map(|quarantine| quarantine.slots.len() as u32).sum()
    }

    fn of(&mut self, tier: Tier, slot: SlotId) -> (usize, &mut TierQuarantine) {
        let quarantines = self.by_tier[tier.index()].iter_mut().enumerate();
        let mut holding =
            quarantines.filter(|(_, quarantine)| quarantine.slots.contains_key(&slot));
        holding.next().expect("a quarantined slot lies in a quarantine")
    }

    /// How many blocks a slot lies below the anchor of its quarantine, and the anchor.
    pub(super) fn anchor_of(&mut self, tier: Tier, slot: SlotId) -> (usize, Option<SlotId>) {
        let (_, quarantine) = self.of(tier, slot);
        (quarantine.slots.get(&slot).map_or(0, |&depth| depth as usize), quarantine.anchor)
    }

    /// A reader pinned a quarantined slot.
    pub(super) fn add_reader(&mut self, tier: Tier, slot: SlotId) {
        self.of(tier, slot).1.pins += 1;
    }

    /// A reader of a quarantined slot left. The last one ends the quarantine.
    fn remove_reader(&mut self, tier: Tier, slot: SlotId) -> Option<TierQuarantine> {
        let (at, quarantine) = self.of(tier, slot);
        quarantine.pins -= 1;
        (quarantine.pins == 0).then(|| self.by_tier[tier.index()].swap_remove(at))
    }
}

impl Table {
    /// Drops a block whose bytes in the slot `found` are bad, with its descendants in that tier.
    /// Slots that are being read are freed when their readers leave. Returns how many blocks went:
    /// none if the block has left that life of the slot, dropped and perhaps written anew elsewhere
    /// since the read began; and none yet if they are too many for one step: then no match finds
    /// them, and [`drop_more`](Self::drop_more) goes on.
    pub fn quarantine(&mut self, key: BlockKey, found: SlotRef, defect: Defect) -> usize {
        let Some(bad) = self.resident_in(key, found) else { return 0 };
        let most = self.steps.dropped;
        if self.count_from(found.tier, bad, most) <= most {
            return self.drop_from(found.tier, bad, defect);
        }
        // Several readers of the block may find it bad, one after another.
        if !self.quarantines.dropping.iter().any(|known| known.found == found) {
            let depth = self.records.depth(bad);
            self.quarantines.so_far += 1;
            self.quarantines.dropping.push(DroppingChain { key, found, defect, depth, at: key });
        }
        0
    }

    /// Drops a block that is not what its name says, with its descendants: from every tier, and
    /// from every copy on its way to one. A planned copy that has not begun finds it gone.
    pub fn drop_wrong(&mut self, key: BlockKey) {
        self.quarantines.drop_name();
        // First the copies on their way: their end must not make a tier copy the block anew.
        for tier in Tier::ALL {
            let filling = |record: &RecordId| self.records.at(*record).filling().has(tier);
            let Some(record) = self.find(key).filter(filling) else { continue };
            if let Some((id, block)) =
                self.transfers.bringing(tier, record, |r| self.records.depth(r))
            {
                self.abort(id, block);
            }
        }
        for tier in Tier::ALL {
            self.quarantine_resident(tier, key, Defect::Wrong);
        }
    }

    /// Whether the block in a slot may be copied: the slot is in the life in which it was found,
    /// and the block is not dropped.
    pub(super) fn is_given(&self, from: SlotRef) -> bool {
        let held = self.tier(from.tier);
        held.pool.resident_ref(from.slot) == Some(from)
            && !held.at(from.slot).is_quarantined()
            && !self.is_dropped(held.at(from.slot).record)
    }

    /// Whether nothing may come under a record's name, since its block is dropped, at once or in
    /// steps.
    pub(super) fn is_dropped(&self, record: RecordId) -> bool {
        self.owners.is_forgotten(record)
            || self.quarantines.dropping.iter().any(|bad| self.lies_in(bad.found, record))
    }

    /// The same for a block that a reader found bad where it is now; does nothing if it is gone.
    pub fn quarantine_resident(&mut self, tier: Tier, key: BlockKey, defect: Defect) -> usize {
        let slot = self.resident(tier, key).map(|record| self.records.at(record).slot(tier));
        let found = slot.and_then(|slot| self.tier(tier).pool.resident_ref(slot));
        found.map_or(0, |found| self.quarantine(key, found, defect))
    }

    /// Drops some more descendants of bad blocks, deepest first, so that the rest is always a
    /// chain's beginning. Returns whether there are more.
    pub fn drop_more(&mut self) -> bool {
        let Some(mut dropping) = self.quarantines.dropping.pop() else { return false };
        let tier = dropping.found.tier;
        if let Some(bad) = self.resident_in(dropping.key, dropping.found) {
            let is_there = |&record: &RecordId| self.records.at(record).resident().has(tier);
            // The block where the last step stopped may have been evicted since.
            let from = self.find(dropping.at).filter(is_there).unwrap_or(bad);
            let (at, is_leaf) = self.descend(tier, from);
            dropping.at = self.records.at(at).key();
            if is_leaf {
                let part = self.small_part(tier, bad, at);
                let above =
                    self.records.at(part).parent().map(|parent| self.records.at(parent).key());
                self.drop_from(tier, part, dropping.defect);
                dropping.at = above.unwrap_or(dropping.key);
            }
            // The next step finds whether that was all.
            self.quarantines.dropping.push(dropping);
        }
        !self.quarantines.dropping.is_empty()
    }

    /// Whether there is something to [drop](Self::drop_more).
    pub const fn is_dropping(&self) -> bool {
        !self.quarantines.dropping.is_empty()
    }

    /// Closes a directory of `tier`: none of its slots is given out, and nothing leaves it to make
    /// room. Or opens it again: [`reconsider_reopened`](Self::reconsider_reopened) completes that.
    pub fn close_directory(&mut self, tier: Tier, dir: usize, is_closed: bool) {
        self.tier_mut(tier).pool.close_shard(dir, is_closed);
        let is_other = |walk: &DirectoryWalk| (walk.tier, walk.dir) != (tier, dir);
        self.quarantines.reopened.retain(is_other);
        if !is_closed {
            // Its remaining blocks can be read.
            self.quarantines.lost.retain(is_other);
            self.quarantines.reopened.push(DirectoryWalk { tier, dir, next: dir as u32 });
        }
    }

    /// Has policies consider some leaves in reopened directories, which they passed over while
    /// these were closed. Returns whether there are more.
    pub fn reconsider_reopened(&mut self, budget: &mut Budget) -> bool {
        let Some(mut walk) = self.quarantines.reopened.pop() else { return false };
        let held = self.tier_mut(walk.tier);
        let shards = held.pool.shards() as u32;
        while budget.look() {
            if walk.next as usize >= held.slots.len() {
                return !self.quarantines.reopened.is_empty();
            }
            let slot = SlotId(walk.next);
            if held.at(slot).record != TierSlot::EMPTY.record {
                held.reconsider(slot);
                budget.pay(CONSIDERED);
            }
            walk.next += shards;
        }
        self.quarantines.reopened.push(walk);
        true
    }

    /// The blocks in a directory of `tier` cannot be read any more: [`drop_lost`](Self::drop_lost)
    /// drops them.
    pub fn lose_directory(&mut self, tier: Tier, dir: usize) {
        self.quarantines.lost.push(DirectoryWalk { tier, dir, next: dir as u32 });
    }

    /// Drops some blocks in [lost](Self::lose_directory) directories, with all descendants. Returns
    /// whether there are more; call it again once there is nothing else to [drop](Self::drop_more).
    pub fn drop_lost(&mut self, budget: &mut Budget) -> bool {
        let Some(mut lost) = self.quarantines.lost.pop() else { return false };
        let shards = self.tier(lost.tier).pool.shards() as u32;
        while !self.is_dropping() && budget.look() {
            let held = self.tier(lost.tier);
            if lost.next as usize >= held.slots.len() {
                return !self.quarantines.lost.is_empty();
            }
            let slot = SlotId(lost.next);
            let record = held.at(slot).record;
            if let Some(found) =
                held.pool.resident_ref(slot).filter(|_| record != TierSlot::EMPTY.record)
            {
                let dropped =
                    self.quarantine(self.records.at(record).key(), found, Defect::Unreadable);
                budget.pay_changes(dropped);
            }
            lost.next += shards;
        }
        self.quarantines.lost.push(lost);
        true
    }

    /// The record of a block in this life of a slot.
    fn resident_in(&self, key: BlockKey, found: SlotRef) -> Option<RecordId> {
        self.find(key).filter(|&record| self.lies_in(found, record))
    }

    pub(super) fn lies_in(&self, found: SlotRef, record: RecordId) -> bool {
        let known = self.records.at(record);
        known.resident().has(found.tier)
            && known.slot(found.tier) == found.slot
            && self.tier(found.tier).pool.resident_ref(found.slot) == Some(found)
    }

    fn resident_children(&self, tier: Tier, record: RecordId) -> impl Iterator<Item = RecordId> {
        // It stops at the last of them: a shared prefix may have thousands of children that only
        // other tiers have.
        let count = self.tier(tier).children(self.records.at(record).slot(tier)) as usize;
        let is_there = move |&child: &RecordId| self.records.at(child).resident().has(tier);
        self.records.children(record).filter(is_there).take(count)
    }

    /// How many blocks `tier` has of `top` and below; it stops counting above `max`.
    fn count_from(&self, tier: Tier, top: RecordId, max: usize) -> usize {
        let (mut left, mut count) = (vec![top], 0);
        while let Some(record) = left.pop() {
            count += 1;
            // A block may have more children than one step looks at.
            left.extend(self.resident_children(tier, record).take(max + 1));
            if count + left.len() > max {
                return max + 1;
            }
        }
        count
    }

    /// A leaf of `tier` below `from`, or the block where one step ends.
    fn descend(&self, tier: Tier, from: RecordId) -> (RecordId, bool) {
        let mut at = from;
        for _ in 0..MAX_DESCENT {
            match self.resident_children(tier, at).next() {
                Some(child) => at = child,
                None => return (at, true),
            }
        }
        (at, false)
    }

    /// The uppermost ancestor of `leaf`, up to `top`, whose descendants can be dropped in one step.
    fn small_part(&self, tier: Tier, top: RecordId, leaf: RecordId) -> RecordId {
        let (mut part, mut size, most) = (leaf, 1, self.steps.dropped);
        while part != top {
            let Some(parent) = self.records.at(part).parent() else { break };
            size += 1;
            for sibling in self.resident_children(tier, parent).filter(|&child| child != part) {
                size += self.count_from(tier, sibling, most);
                if size > most {
                    break;
                }
            }
            if size > most {
                break;
            }
            part = parent;
        }
        part
    }

    /// Drops a block and everything below it.
    fn drop_from(&mut self, tier: Tier, bad: RecordId, defect: Defect) -> usize {
        let doomed = self.descendants(tier, bad);
        let stats = &mut self.tier_mut(tier).stats;
        match defect {
            Defect::Corrupt | Defect::Wrong => stats.quarantined += doomed.len() as u64,
            Defect::Unreadable => stats.unreadable += doomed.len() as u64,
            // Nothing is wrong with them.
            Defect::Forgotten => {}
        }
        self.quarantines.so_far += 1;
        let slots_of_doomed: HashSet<_> = doomed.iter().map(|block| block.slot).collect();
        let pins = doomed.iter().map(|block| self.tier(tier).pins(block.slot)).sum();
        let anchor = if pins > 0 { self.pin_parent_of(tier, bad) } else { None };
        // While they are linked: afterwards their depth cannot be found.
        let slots = self.depths_below(tier, bad, &doomed);
        let blocks = doomed.len();
        self.unlink_all(tier, doomed, defect);
        self.hold_quarantined(tier, TierQuarantine { slots, pins, anchor });
        // Now that their slots are marked, the leases of waiting callers end before them.
        self.abort_transfers_on(tier, &slots_of_doomed);
        self.transfers.note_dropped(Dropped { tier, blocks, defect });
        blocks
    }

    /// Cuts a match before bad blocks that are still to be dropped. Their depth tells their place
    /// in the chain: a lease of a part that begins behind them still finds it, until it is dropped.
    pub(super) fn hide_dropping(&self, chain: Chain<'_>, found: &mut FoundBoundaries) {
        if !self.is_dropping() || found.held.longest() == 0 {
            return;
        }
        let first = self.depth_of_first(chain).unwrap_or(1);
        for bad in &self.quarantines.dropping {
            let Some(above) = bad.depth.checked_sub(first).map(|above| above as usize) else {
                continue;
            };
            let tier = bad.found.tier;
            if found.held.blocks(tier) > above && chain.key(above) == bad.key {
                found.held.set(tier, above as u32);
                let deepest = above.checked_sub(1).and_then(|last| self.find(chain.key(last)));
                found.deepest[tier.index()] = deepest;
            }
        }
    }

    /// How many blocks below the parent of `top` each of `doomed` lies.
    fn depths_below(
        &self,
        tier: Tier,
        top: RecordId,
        doomed: &[DoomedBlock],
    ) -> HashMap<SlotId, u32> {
        let mut depths = HashMap::from([(self.records.at(top).slot(tier), 1)]);
        let mut path = Vec::new();
        for block in doomed {
            let mut at = block.record;
            let above = loop {
                let slot = self.records.at(at).slot(tier);
                match (depths.get(&slot), self.records.at(at).parent()) {
                    (Some(&depth), _) => break depth,
                    (None, Some(parent)) => {
                        path.push(slot);
                        at = parent;
                    }
                    (None, None) => break 0,
                }
            };
            depths.extend(path.drain(..).rev().zip(above + 1..));
        }
        depths
    }

    /// A reader of a doomed block may also be reading its ancestors, which its pin protected: from
    /// now on the quarantine does.
    fn pin_parent_of(&mut self, tier: Tier, record: RecordId) -> Option<SlotId> {
        let parent = self.records.at(record).parent()?;
        let slot = self.records.at(parent).slot(tier);
        self.tier_mut(tier).pin(slot);
        Some(slot)
    }

    /// Ends the residency of a block with all its descendants, leaves first.
    fn unlink_all(&mut self, tier: Tier, doomed: Vec<DoomedBlock>, defect: Defect) {
        let slots: HashSet<_> = doomed.iter().map(|block| block.slot).collect();
        let mut leaves: Vec<_> =
            doomed.into_iter().filter(|block| self.tier(tier).at(block.slot).is_leaf()).collect();
        while let Some(DoomedBlock { slot, record }) = leaves.pop() {
            let parent = self.records.at(record).parent();
            let above = parent.map(|parent| self.doomed(tier, parent));
            self.unlink_leaf(tier, slot, record, defect.remove_reason());
            self.tier_mut(tier).at_mut(slot).set_quarantined();
            // A block dropped by its name is bad above too.
            if !defect.is_of_name() {
                self.flush_again(tier, record);
            }
            self.forget_if_nowhere(record, defect.miss_reason(), tier);
            let is_next = |above: &DoomedBlock| {
                slots.contains(&above.slot) && self.tier(tier).at(above.slot).is_leaf()
            };
            leaves.extend(above.filter(is_next));
        }
    }

    /// `bad` and every resident block below it.
    fn descendants(&self, tier: Tier, bad: RecordId) -> Vec<DoomedBlock> {
        let mut doomed = vec![bad];
        let mut looked_at = 0;
        while let Some(&above) = doomed.get(looked_at) {
            doomed.extend(self.resident_children(tier, above));
            looked_at += 1;
        }
        doomed.into_iter().map(|record| self.doomed(tier, record)).collect()
    }

    fn doomed(&self, tier: Tier, record: RecordId) -> DoomedBlock {
        DoomedBlock { slot: self.records.at(record).slot(tier), record }
    }

    /// Transfers that hang on a doomed block will never be published.
    fn abort_transfers_on(&mut self, tier: Tier, slots: &HashSet<SlotId>) {
        let hanging = self.transfers.hanging_on(tier, |slot| slots.contains(&slot));
        hanging.into_iter().for_each(|(id, from)| self.fail(id, from));
        self.give_up_failed(&mut Budget::of_a_hold());
    }

    fn hold_quarantined(&mut self, tier: Tier, quarantine: TierQuarantine) {
        if quarantine.pins == 0 {
            self.free_quarantined(tier, quarantine);
        } else {
            self.quarantines.by_tier[tier.index()].push(quarantine);
        }
    }

    /// A reader of a quarantined slot left.
    pub(super) fn release_reader(&mut self, tier: Tier, slot: SlotId) {
        if let Some(quarantine) = self.quarantines.remove_reader(tier, slot) {
            self.free_quarantined(tier, quarantine);
        }
    }

    fn free_quarantined(&mut self, tier: Tier, quarantine: TierQuarantine) {
        let held = self.tier_mut(tier);
        for slot in quarantine.slots.into_keys() {
            *held.at_mut(slot) = TierSlot::EMPTY;
            if let Some(frame) = held.pool.withdraw(slot) {
                held.pool.give_back(frame);
            }
        }
        if let Some(anchor) = quarantine.anchor {
            self.unpin(tier, anchor);
        }
    }
}

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
