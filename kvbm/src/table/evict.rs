//! How blocks leave a tier: evicted to make room, leaf by leaf, or quarantined with all their descendants.

use kvbm_policies::BlockId;
use kvbm_tiers::{BlockKey, Frame, SlotId, Tier};

use super::index::RecordId;
use super::run::{Anchor, RunId};
use super::tier::{Slot, Ward};
use super::{MissReason, Table};

impl Table {
    /// A title to a slot of `tier`, evicting a leaf if none is free. `None`: every leaf is busy.
    pub(super) fn claim(&mut self, tier: Tier) -> Option<Frame> {
        let (held, records) = self.tier_and_records(tier);
        if let Some(frame) = held.pool.take() {
            return Some(frame);
        }
        let Some(victim) = held.victim(records) else {
            held.pressed = true;
            held.stats.full += 1;
            return None;
        };
        self.let_go(tier, victim);
        self.tier_mut(tier).pool.take()
    }

    /// Evicts a leaf.
    pub(super) fn let_go(&mut self, tier: Tier, leaf: SlotId) {
        self.tier_mut(tier).stats.evicted += 1;
        let frame = self.detach(tier, leaf);
        self.tier_mut(tier).pool.give_back(frame);
    }

    /// Evicts up to `blocks` leaves of `tier`; answers how many it could.
    pub fn evict(&mut self, tier: Tier, blocks: usize) -> usize {
        for done in 0..blocks {
            let (held, records) = self.tier_and_records(tier);
            let Some(victim) = held.victim(records) else { return done };
            self.let_go(tier, victim);
        }
        blocks
    }

    /// Takes a leaf out of a tier and its title out of the table.
    fn detach(&mut self, tier: Tier, slot: SlotId) -> Frame {
        let record = self.tier(tier).at(slot).record;
        self.uproot(tier, slot, record);
        let frame =
            self.tier_mut(tier).pool.withdraw(slot).expect("a resident block's title lies in the pool");
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
        self.waive_above(tier, record);
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

    /// Drops a block whose bytes in `tier` are bad, with its descendants there. Slots that are being read
    /// are freed when the readers leave. Answers how many blocks went.
    ///
    /// Looks at every slot of the tier: corruption is rare, and child lists would cost every block.
    pub fn quarantine(&mut self, tier: Tier, key: BlockKey) -> usize {
        let Some(bad) = self.find(key).filter(|&r| self.records.at(r).resident().has(tier)) else { return 0 };
        let doomed = self.descendants(tier, bad);
        self.tier_mut(tier).stats.quarantined += doomed.len() as u64;
        self.abort_runs_on(tier, &doomed);
        let pins = doomed.iter().map(|&(slot, _)| self.tier(tier).at(slot).pins()).sum();
        let anchor = if pins > 0 { self.pin_parent(tier, bad) } else { None };
        let slots = doomed.iter().map(|&(slot, _)| slot).collect();
        let blocks = doomed.len();
        self.uproot_all(tier, doomed);
        self.admit_to_ward(tier, Ward { slots, pins, anchor });
        blocks
    }

    /// Whoever reads a doomed block may also be reading its ancestors, which his pin on it protected: from now
    /// on the ward does.
    fn pin_parent(&mut self, tier: Tier, record: RecordId) -> Option<SlotId> {
        let parent = self.records.at(record).parent()?;
        let slot = self.records.at(parent).slot(tier);
        self.tier_mut(tier).at_mut(slot).pin().then_some(slot)
    }

    /// Ends the residency of a block with all its descendants, leaves first.
    fn uproot_all(&mut self, tier: Tier, doomed: Vec<(SlotId, RecordId)>) {
        let slots: std::collections::HashSet<_> = doomed.iter().map(|&(slot, _)| slot).collect();
        let mut leaves: Vec<_> =
            doomed.into_iter().filter(|&(slot, _)| self.tier(tier).at(slot).children == 0).collect();
        while let Some((slot, record)) = leaves.pop() {
            let parent = self.records.at(record).parent();
            let above = parent.map(|parent| (self.records.at(parent).slot(tier), parent));
            self.uproot(tier, slot, record);
            self.tier_mut(tier).at_mut(slot).condemn();
            self.forget_if_nowhere(record, MissReason::Corrupt, tier);
            let is_next =
                |&(above, _): &(SlotId, _)| slots.contains(&above) && self.tier(tier).at(above).children == 0;
            leaves.extend(above.filter(is_next));
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
        for slot in slots {
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
