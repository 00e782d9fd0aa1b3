//! Keeping room in a tier whose blocks go down when they leave, not before.
//!
//! A request never waits for a flush. So what leaves next is sent down ahead of time, off the requests' path,
//! until a few slots are free or will be.

use kvbm_policies::{BlockId, Candidates, Moment};
use kvbm_tiers::{SlotId, Tier};

use super::flush::{FlushRun, Group};
use super::index::RecordId;
use super::tier::Dirty;
use super::{MissReason, Table, Usage};

/// What became of a block that is about to leave.
enum Fate {
    /// It is gone.
    Gone,
    /// It goes once it is flushed.
    Sent,
    /// The tier below has no room now.
    Stuck,
}

impl Table {
    /// Lets leave what its policy gives up next, until `slots` slots of `tier` are free or will be after the
    /// returned runs, or these copy `copies` blocks. Nothing, where blocks go down as soon as they come.
    pub fn make_headroom(&mut self, tier: Tier, slots: usize, copies: usize) -> Vec<FlushRun> {
        let mut runs: Vec<FlushRun> = Vec::new();
        let held = self.tiers[tier.index()].as_ref().filter(|held| held.admission.is_some());
        let Some(to) = held.and_then(|held| held.flush_to) else { return runs };
        let mut promised = 0;
        while self.tier(tier).pool.free() as usize + promised < slots
            && runs.iter().map(|run| run.copies.len()).sum::<usize>() < copies
        {
            let (held, records) = self.tier_and_records(tier);
            let Some(leaf) = held.next_to_leave(records) else { break };
            match self.send_off(tier, to, leaf, &mut runs) {
                Fate::Gone => {}
                Fate::Sent => promised += 1,
                Fate::Stuck => break,
            }
        }
        runs
    }

    fn send_off(&mut self, tier: Tier, to: Tier, leaf: SlotId, runs: &mut Vec<FlushRun>) -> Fate {
        let record = self.tier(tier).at(leaf).record;
        let is_clean = self.tier(tier).is_clean(leaf, &self.records);
        if !is_clean {
            let blocks = self.admitted(tier, to, record, Moment::Leaving);
            let mut group = Group { blocks, ..Group::default() };
            if !self.launch(tier, to, &mut group, runs).is_empty() {
                return Fate::Stuck;
            }
            if self.records.at(record).filling().has(to) {
                return Fate::Sent;
            }
        }
        let key = self.records.at(record).key();
        self.let_go(tier, leaf);
        if !is_clean && self.find(key).is_none() {
            self.departures.note(key, MissReason::Admission, to, self.now_ms);
        }
        Fate::Gone
    }

    /// Those of `last` and its ancestors which `to` neither has nor awaits, root first, as far as they are
    /// admitted there.
    pub(super) fn admitted(&mut self, tier: Tier, to: Tier, last: RecordId, moment: Moment) -> Vec<RecordId> {
        let mut path = self.missing_path(to, last);
        let candidates = Candidates { last: self.block_id(tier, last), blocks: path.len() as u32 };
        let now_ms = self.now_ms;
        let (held, records) = self.tier_and_records(tier);
        path.truncate(held.admit(candidates, moment, now_ms, records) as usize);
        path
    }

    fn block_id(&self, tier: Tier, record: RecordId) -> BlockId {
        BlockId(self.records.at(record).slot(tier).0)
    }

    /// Has a block of `tier` that was used asked about again, if the tier below lacks it.
    pub(super) fn ask_again(&mut self, tier: Tier, slot: SlotId, usage: Usage) {
        let since_ms = self.now_ms;
        let (held, records) = self.tier_and_records(tier);
        let record = held.at(slot).record;
        let lacks = |below: Tier| !records.at(record).resident().has(below);
        if held.admission.is_some() && held.flush_to.is_some_and(lacks) {
            held.at_mut(slot).ask();
            held.queue(Dirty { slot, record, since_ms, usage });
        }
    }

    /// Has everything in `tier` that the tier below lacks asked about as if it left now. Linear in the blocks.
    pub fn ask_about_all(&mut self, tier: Tier) {
        if self.tiers[tier.index()].as_ref().is_none_or(|held| held.admission.is_none()) {
            return;
        }
        let resident = self.records.live().filter(|(_, record)| record.resident().has(tier));
        let slots = resident.map(|(_, record)| record.slot(tier));
        let leaves: Vec<SlotId> = slots.filter(|&slot| self.tier(tier).at(slot).children == 0).collect();
        leaves.into_iter().for_each(|leaf| self.ask_again(tier, leaf, Usage::default()));
    }
}
