//! The table's invariants, checked one by one over everything it holds. Linear in its size: for
//! tests and operators, never on a request's path. The background checks some records at a time.

use std::fmt;

use kvbm_tiers::Tier;

use super::Table;
use super::budget::Budget;
use super::index::{KeyHash, RecordId};
use super::record::BlockRecord;

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Children of one record that the background audit counts; more are left to [`Table::audit`].
const MAX_COUNTED: usize = 512;

impl Table {
    /// Every invariant that does not hold. Empty, always.
    pub fn audit(&self) -> Vec<Violation> {
        let mut violations = Vec::new();
        for (id, record) in self.records.live() {
            self.audit_record(id, record, usize::MAX, &mut violations);
        }
        Tier::ALL.iter().for_each(|&tier| self.audit_tier(tier, &mut violations));
        expect(
            self.records.len() == self.index.len(),
            || "the index and the records disagree",
            &mut violations,
        );
        violations
    }

    /// Audits some records one by one, from number `from` on, as many as the hold has time for.
    /// What shows only in all of them together is left to [`audit`](Self::audit). Returns where to
    /// go on; `None`: there are no more.
    pub fn audit_some(
        &self,
        from: u32,
        violations: &mut Vec<Violation>,
        budget: &mut Budget,
    ) -> Option<u32> {
        let mut next = from;
        while self.records.has_beyond(next) {
            if !budget.change() {
                return Some(next);
            }
            let (id, record) = (RecordId(next), self.records.at(RecordId(next)));
            if !record.is_nowhere() {
                // Once for all children, and once for each tier that has any.
                budget.pay(
                    self.audit_record(id, record, MAX_COUNTED, violations) * (1 + Tier::COUNT),
                );
            }
            next += 1;
        }
        Tier::ALL.iter().for_each(|&tier| self.audit_slots(tier, violations));
        None
    }

    /// Returns how many children it counted.
    fn audit_record(
        &self,
        id: RecordId,
        record: &BlockRecord,
        most: usize,
        violations: &mut Vec<Violation>,
    ) -> usize {
        self.audit_identity(id, record, violations);
        for tier in Tier::ALL {
            self.audit_residency(id, record, tier, violations);
        }
        self.audit_children(id, record, most, violations)
    }

    fn audit_identity(&self, id: RecordId, record: &BlockRecord, violations: &mut Vec<Violation>) {
        let hash = KeyHash::of(record.key());
        let found =
            self.index.find(hash, self.index.first(hash), |r| self.records.at(r).is(record.key()));
        expect(found == Some(id), || format!("{id:?} is not found by its key"), violations);
        let noted = self.index.residence(hash, self.index.first(hash));
        // It may overstate, if a neighbour has the same tag. It must hide nothing.
        let agrees = noted.union(record.resident()) == noted;
        expect(agrees, || format!("the index hides where {id:?} is resident"), violations);
        let above = record.parent().map(|parent| self.records.depth(parent));
        let is_below = above.is_none_or(|above| self.records.depth(id) == above + 1);
        expect(is_below, || format!("{id:?} is not one deeper than its parent"), violations);
        expect(
            self.records.is_linked(id),
            || format!("{id:?} is no child of its parent"),
            violations,
        );
    }

    /// The counts in slots say which blocks are leaves, and so which may leave.
    fn audit_children(
        &self,
        id: RecordId,
        record: &BlockRecord,
        most: usize,
        violations: &mut Vec<Violation>,
    ) -> usize {
        // No record has more children than there are records, unless their links form a circle.
        let most = most.min(self.records.len());
        let children = self.records.children(id).take(most + 1).count();
        if children > most {
            return children;
        }
        for tier in Tier::ALL.into_iter().filter(|&tier| record.resident().has(tier)) {
            let there = |child: &RecordId| self.records.at(*child).resident().has(tier);
            let counted = self.records.children(id).filter(there).count();
            let slot = record.slot(tier);
            let agrees = self.tier(tier).children(slot) == counted as u64;
            expect(agrees, || format!("{tier} slot {} miscounts its children", slot.0), violations);
        }
        children
    }

    fn audit_residency(
        &self,
        id: RecordId,
        record: &BlockRecord,
        tier: Tier,
        violations: &mut Vec<Violation>,
    ) {
        let (resident, filling) = (record.resident().has(tier), record.filling().has(tier));
        expect(
            !(resident && filling),
            || format!("{id:?} is resident and filling in {tier}"),
            violations,
        );
        let parent = record.parent().map(|parent| self.records.at(parent));
        if resident {
            let slot = self.tier(tier).at(record.slot(tier));
            expect(
                slot.record == id,
                || format!("{id:?} and its slot in {tier} disagree"),
                violations,
            );
            let closed = parent.is_none_or(|parent| parent.resident().has(tier));
            expect(
                closed,
                || format!("{id:?} is resident in {tier} without its parent"),
                violations,
            );
        }
        if filling {
            let has =
                |parent: &BlockRecord| parent.resident().has(tier) || parent.filling().has(tier);
            expect(
                parent.is_none_or(has),
                || format!("{id:?} fills in {tier} without its parent"),
                violations,
            );
        }
    }

    fn audit_tier(&self, tier: Tier, violations: &mut Vec<Violation>) {
        let Some(held) = &self.tiers[tier.index()] else { return };
        let resident =
            self.records.live().filter(|(_, record)| record.resident().has(tier)).count();
        expect(
            resident == (held.resident + held.forgotten.blocks) as usize,
            || format!("{tier} miscounts its residents"),
            violations,
        );
        self.audit_slots(tier, violations);
    }

    fn audit_slots(&self, tier: Tier, violations: &mut Vec<Violation>) {
        let counts = self.counts(tier);
        // The rest is filling or in quarantine.
        let used = counts.free + counts.resident + counts.forgotten + counts.lost;
        expect(
            used <= counts.total,
            || format!("{tier} has more slot handles than slots"),
            violations,
        );
    }
}

fn expect<M: Into<String>>(holds: bool, message: impl Fn() -> M, violations: &mut Vec<Violation>) {
    if !holds {
        violations.push(Violation(message().into()));
    }
}
