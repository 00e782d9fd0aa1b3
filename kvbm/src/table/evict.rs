//! How blocks leave a tier: evicted to make room, leaf by leaf, or quarantined with all their descendants.

use std::collections::HashMap;

use kvbm_policies::BlockId;
use kvbm_tiers::{BlockKey, Frame, SlotId, SlotRef, Tier};

use super::index::RecordId;
use super::run::{Anchor, RunId};
use super::tier::{Dirty, Slot, Ward};
use super::{MissReason, Table, Usage};

/// Why a block's bytes in a tier are given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// They are not those that were written.
    Corrupt,
    /// They cannot be read any more.
    Unreadable,
}

impl Defect {
    const fn miss_reason(self) -> MissReason {
        match self {
            Self::Corrupt => MissReason::Corrupt,
            Self::Unreadable => MissReason::Unreadable,
        }
    }
}

impl Table {
    /// A title to a slot of `tier`, evicting a leaf if none is free. `None`: every leaf is busy.
    pub(super) fn claim(&mut self, tier: Tier) -> Option<Frame> {
        if self.tier(tier).pool.free() == 0 {
            let Some(victim) = self.victim(tier) else {
                let held = self.tier_mut(tier);
                held.pressed = true;
                held.stats.full += 1;
                return None;
            };
            self.let_go(tier, victim);
        }
        self.tier_mut(tier).pool.take()
    }

    /// What may leave `tier` now. While the tier below cannot be written, that includes what waits to be flushed,
    /// oldest first and no more than is needed: a disk that is away must not close the host tier as well.
    fn victim(&mut self, tier: Tier) -> Option<SlotId> {
        loop {
            let now_ms = self.now_ms;
            let (held, records) = self.tier_and_records(tier);
            let victim = held.victim(records);
            if victim.is_some() || !held.is_flush_blocked {
                return victim;
            }
            let entry = held.next_dirty()?;
            if held.at(entry.slot).record == entry.record {
                held.put_off(entry, now_ms);
            }
        }
    }

    /// Evicts a leaf.
    pub(super) fn let_go(&mut self, tier: Tier, leaf: SlotId) {
        let (held, records) = self.tier_and_records(tier);
        held.stats.evicted += 1;
        held.stats.unflushed += u64::from(held.is_unflushed(leaf, records));
        let frame = self.detach(tier, leaf);
        self.tier_mut(tier).pool.give_back(frame);
    }

    /// Evicts up to `blocks` leaves of `tier`; answers how many it could.
    pub fn evict(&mut self, tier: Tier, blocks: usize) -> usize {
        for done in 0..blocks {
            let Some(victim) = self.victim(tier) else { return done };
            self.let_go(tier, victim);
        }
        blocks
    }

    /// Takes a leaf out of a tier and its title out of the table.
    fn detach(&mut self, tier: Tier, slot: SlotId) -> Frame {
        let record = self.tier(tier).at(slot).record;
        self.uproot(tier, slot, record);
        self.waive_above(tier, record);
        let held = self.tier_mut(tier);
        // So that entries of queues which still name the slot find nobody there.
        *held.at_mut(slot) = Slot::EMPTY;
        let frame = held.pool.withdraw(slot).expect("a resident block's title lies in the pool");
        self.forget_if_nowhere(record, MissReason::Evicted, tier);
        frame
    }

    /// Ends a leaf's residency; its slot stays taken.
    fn uproot(&mut self, tier: Tier, slot: SlotId, record: RecordId) {
        self.records.at_mut(record).leave(tier);
        self.note_residence(record);
        let exposed = self.lose_child(tier, self.records.at(record).parent());
        let held = self.tier_mut(tier);
        held.forget(slot, exposed);
        held.resident -= 1;
    }

    /// The parent, if it is a leaf now.
    fn lose_child(&mut self, tier: Tier, parent: Option<RecordId>) -> Option<BlockId> {
        let slot = self.records.at(parent?).slot(tier);
        let held = self.tier_mut(tier).at_mut(slot);
        held.children -= 1;
        (held.children == 0).then_some(BlockId(slot.0))
    }

    /// A block that left or missed `tier` need not go there before the tier above may evict it.
    pub(super) fn waive_above(&mut self, tier: Tier, record: RecordId) {
        let known = *self.records.at(record);
        for above in self.tiers.iter_mut().flatten().filter(|above| above.flush_to == Some(tier)) {
            if known.resident().has(above.tier) {
                let slot = known.slot(above.tier);
                above.at_mut(slot).waive();
                above.reconsider(slot);
            }
        }
    }

    /// Drops a block whose bytes in the slot `found` are bad, with its descendants in that tier. Slots that are being
    /// read are freed when the readers leave. Answers how many blocks went: none, if the block is not in that slot's
    /// life any more, because it was dropped and perhaps written anew elsewhere since the read began.
    ///
    /// Looks at every slot of the tier: bad bytes are rare, and child lists would cost every block.
    pub fn quarantine(&mut self, key: BlockKey, found: SlotRef, defect: Defect) -> usize {
        let tier = found.tier;
        let is_there = |&r: &RecordId| {
            let known = self.records.at(r);
            known.resident().has(tier)
                && known.slot(tier) == found.slot
                && self.tier(tier).pool.resident_ref(found.slot) == Some(found)
        };
        let Some(bad) = self.find(key).filter(is_there) else { return 0 };
        let doomed = self.descendants(tier, bad);
        let stats = &mut self.tier_mut(tier).stats;
        match defect {
            Defect::Corrupt => stats.quarantined += doomed.len() as u64,
            Defect::Unreadable => stats.unreadable += doomed.len() as u64,
        }
        self.abort_runs_on(tier, &doomed);
        let pins = doomed.iter().map(|&(slot, _)| self.tier(tier).at(slot).pins()).sum();
        let anchor = if pins > 0 { self.pin_parent(tier, bad) } else { None };
        let slots = self.depths_below(tier, bad, &doomed);
        let blocks = doomed.len();
        self.uproot_all(tier, doomed, defect);
        self.admit_to_ward(tier, Ward { slots, pins, anchor });
        blocks
    }

    /// How many blocks below the parent of `top` each of `doomed` lies.
    fn depths_below(&self, tier: Tier, top: RecordId, doomed: &[(SlotId, RecordId)]) -> HashMap<SlotId, u32> {
        let mut depths = HashMap::from([(self.records.at(top).slot(tier), 1)]);
        let mut path = Vec::new();
        for &(_, record) in doomed {
            let mut at = record;
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

    /// Whoever reads a doomed block may also be reading its ancestors, which his pin on it protected: from now
    /// on the ward does.
    fn pin_parent(&mut self, tier: Tier, record: RecordId) -> Option<SlotId> {
        let parent = self.records.at(record).parent()?;
        let slot = self.records.at(parent).slot(tier);
        self.tier_mut(tier).at_mut(slot).pin().then_some(slot)
    }

    /// Ends the residency of a block with all its descendants, leaves first.
    fn uproot_all(&mut self, tier: Tier, doomed: Vec<(SlotId, RecordId)>, defect: Defect) {
        let slots: std::collections::HashSet<_> = doomed.iter().map(|&(slot, _)| slot).collect();
        let mut leaves: Vec<_> =
            doomed.into_iter().filter(|&(slot, _)| self.tier(tier).at(slot).children == 0).collect();
        while let Some((slot, record)) = leaves.pop() {
            let parent = self.records.at(record).parent();
            let above = parent.map(|parent| (self.records.at(parent).slot(tier), parent));
            self.uproot(tier, slot, record);
            self.tier_mut(tier).at_mut(slot).condemn();
            self.flush_again(tier, record);
            self.forget_if_nowhere(record, defect.miss_reason(), tier);
            let is_next =
                |&(above, _): &(SlotId, _)| slots.contains(&above) && self.tier(tier).at(above).children == 0;
            leaves.extend(above.filter(is_next));
        }
    }

    /// A good copy above of what `tier` has lost is written there anew.
    fn flush_again(&mut self, tier: Tier, record: RecordId) {
        let (known, since_ms) = (*self.records.at(record), self.now_ms);
        for above in self.tiers.iter_mut().flatten().filter(|above| above.flush_to == Some(tier)) {
            if known.resident().has(above.tier) {
                let slot = known.slot(above.tier);
                above.at_mut(slot).ask();
                above.queue(Dirty { slot, record, since_ms, usage: Usage::default() });
            }
        }
    }

    /// The copy of a block into `tier` failed: where it was to come from it is tried again later, and may leave
    /// until then.
    pub(super) fn retry_above(&mut self, tier: Tier, record: RecordId) {
        let (known, since_ms) = (*self.records.at(record), self.now_ms);
        for above in self.tiers.iter_mut().flatten().filter(|above| above.flush_to == Some(tier)) {
            if known.resident().has(above.tier) {
                let slot = known.slot(above.tier);
                above.retry_later(Dirty { slot, record, since_ms, usage: Usage::default() }, since_ms);
            }
        }
    }

    /// `bad` and every resident block below it.
    fn descendants(&self, tier: Tier, bad: RecordId) -> Vec<(SlotId, RecordId)> {
        let mut doomed = std::collections::HashMap::from([(bad, true)]);
        let mut path = Vec::new();
        for (record, _) in self.records.live().filter(|(_, known)| known.resident().has(tier)) {
            let mut at = Some(record);
            let verdict = loop {
                let Some(above) = at else { break false };
                if let Some(&verdict) = doomed.get(&above) {
                    break verdict;
                }
                path.push(above);
                at = self.records.at(above).parent();
            };
            doomed.extend(path.drain(..).map(|above| (above, verdict)));
        }
        let doomed = doomed.into_iter().filter(|&(_, is_doomed)| is_doomed);
        doomed.map(|(record, _)| (self.records.at(record).slot(tier), record)).collect()
    }

    /// Runs that hang on a doomed block will never be published.
    fn abort_runs_on(&mut self, tier: Tier, doomed: &[(SlotId, RecordId)]) {
        let slots: std::collections::HashSet<_> = doomed.iter().map(|&(slot, _)| slot).collect();
        let hangs = |anchor| matches!(anchor, Anchor::Resident(slot) if slots.contains(&slot));
        let runs = self.runs.iter().filter(|(_, run)| run.tier == tier && hangs(run.anchor));
        let runs: Vec<(RunId, usize)> = runs.map(|(id, run)| (id, run.published)).collect();
        runs.into_iter().for_each(|(id, from)| self.abort(id, from));
    }

    fn admit_to_ward(&mut self, tier: Tier, ward: Ward) {
        let is_idle = ward.pins == 0;
        let wards = &mut self.tier_mut(tier).wards;
        wards.push(ward);
        let newest = wards.len() - 1;
        if is_idle {
            self.empty_ward(tier, newest);
        }
    }

    /// A reader of a condemned slot left.
    pub(super) fn discharge(&mut self, tier: Tier, slot: SlotId) {
        let held = self.tier_mut(tier);
        let ward = held.ward_of(slot);
        held.wards[ward].pins -= 1;
        if held.wards[ward].pins == 0 {
            self.empty_ward(tier, ward);
        }
    }

    fn empty_ward(&mut self, tier: Tier, ward: usize) {
        let held = self.tier_mut(tier);
        let Ward { slots, anchor, .. } = held.wards.swap_remove(ward);
        for slot in slots.into_keys() {
            *held.at_mut(slot) = Slot::EMPTY;
            if let Some(frame) = held.pool.withdraw(slot) {
                held.pool.give_back(frame);
            }
        }
        if let Some(anchor) = anchor {
            self.unpin(tier, anchor);
        }
    }
}
