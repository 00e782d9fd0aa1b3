//! The table's invariants, checked one by one over everything it holds. Linear in its size: for tests, for
//! operators, never on a request's path.

use kvbm_tiers::Tier;

use super::Table;
use super::index::{KeyHash, RecordId};
use super::record::Record;

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

impl Table {
    /// Every invariant that does not hold. Empty, always.
    pub fn audit(&self) -> Vec<Violation> {
        let mut violations = Vec::new();
        for (id, record) in self.records.live() {
            self.audit_identity(id, record, &mut violations);
            for tier in Tier::ALL {
                self.audit_residency(id, record, tier, &mut violations);
            }
        }
        Tier::ALL.iter().for_each(|&tier| self.audit_tier(tier, &mut violations));
        expect(
            self.records.len() == self.index.len(),
            || "the index and the records disagree",
            &mut violations,
        );
        violations
    }

    fn audit_identity(&self, id: RecordId, record: &Record, violations: &mut Vec<Violation>) {
        let hash = KeyHash::of(record.key());
        let found = self.index.find(hash, self.index.first(hash), |r| self.records.at(r).is(record.key()));
        expect(found == Some(id), || format!("{id:?} is not found by its key"), violations);
        let noted = self.index.residence(hash, self.index.first(hash));
        // It may overstate, where a neighbour has the same tag. It must hide nothing.
        let agrees = noted.union(record.resident()) == noted;
        expect(agrees, || format!("the index hides where {id:?} is resident"), violations);
        let is_linked = |parent| self.records.children(parent).any(|child| child == id);
        expect(
            record.parent().is_none_or(is_linked),
            || format!("{id:?} is no child of its parent"),
            violations,
        );
    }

    fn audit_residency(&self, id: RecordId, record: &Record, tier: Tier, violations: &mut Vec<Violation>) {
        let (resident, filling) = (record.resident().has(tier), record.filling().has(tier));
        expect(!(resident && filling), || format!("{id:?} is resident and filling in {tier}"), violations);
        let parent = record.parent().map(|parent| self.records.at(parent));
        if resident {
            let slot = self.tier(tier).at(record.slot(tier));
            expect(slot.record == id, || format!("{id:?} and its slot in {tier} disagree"), violations);
            let closed = parent.is_none_or(|parent| parent.resident().has(tier));
            expect(closed, || format!("{id:?} is resident in {tier} without its parent"), violations);
        }
        if filling {
            let has = |parent: &Record| parent.resident().has(tier) || parent.filling().has(tier);
            expect(
                parent.is_none_or(has),
                || format!("{id:?} fills in {tier} without its parent"),
                violations,
            );
        }
    }

    fn audit_tier(&self, tier: Tier, violations: &mut Vec<Violation>) {
        let Some(held) = &self.tiers[tier.index()] else { return };
        // Counted anew: the counts in the slots are what is checked.
        let mut children = vec![0u32; held.slots.len()];
        let mut resident = 0;
        for (_, record) in self.records.live().filter(|(_, record)| record.resident().has(tier)) {
            resident += 1;
            let parent = record.parent().map(|parent| self.records.at(parent));
            if let Some(parent) = parent.filter(|parent| parent.resident().has(tier)) {
                children[parent.slot(tier).0 as usize] += 1;
            }
        }
        expect(
            resident == held.resident + held.forgotten.blocks,
            || format!("{tier} miscounts its residents"),
            violations,
        );
        for (_, record) in self.records.live().filter(|(_, record)| record.resident().has(tier)) {
            let slot = record.slot(tier);
            let agrees = held.children(slot) == children[slot.0 as usize];
            expect(agrees, || format!("{tier} slot {} miscounts its children", slot.0), violations);
        }
        let counts = self.counts(tier);
        // What is filling or in quarantine makes up the rest.
        let used = counts.free + counts.resident + counts.forgotten + counts.lost;
        expect(used <= counts.total, || format!("{tier} has more slot handles than slots"), violations);
    }
}

fn expect<M: Into<String>>(holds: bool, message: impl Fn() -> M, violations: &mut Vec<Violation>) {
    if !holds {
        violations.push(Violation(message().into()));
    }
}
