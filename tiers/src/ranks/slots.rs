//! What a rank's slots hold, as far as the rank itself knows, what an earlier process left in those
//! that outlive it, and who is told what comes to them.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::protocol::{HeldSlot, InventoryPage, MAX_SLOTS_TOLD, PackedHoldings};
use crate::copy::{CopyError, CopyErrorKind, CopyOp, SlotRef, Tier};
use crate::index::IndexEntry;

/// Which life's bytes each slot holds, of the tiers that copies alone write. A rank that was
/// started anew has nothing, whatever its leader believes: it must not give out what happens to lie
/// in a slot.
#[derive(Debug, Default)]
pub(super) struct SlotGenerations(Mutex<[Vec<u32>; Tier::COUNT]>);

/// No generation is that large.
const NOTHING: u32 = u32::MAX;

impl SlotGenerations {
    /// Before a copy: its source must hold what it names, and its destination holds nothing from
    /// here on.
    pub(super) fn begin(&self, op: &CopyOp) -> Result<(), CopyError> {
        self.check(op.from)?;
        self.set(op.to, NOTHING);
        Ok(())
    }

    /// Before what another worker has comes into a slot, which holds nothing from here on.
    pub(super) fn begin_pull(&self, op: &CopyOp) {
        self.set(op.to, NOTHING);
    }

    /// A copy arrived.
    pub(super) fn arrived(&self, op: &CopyOp) {
        self.adopt(op.to);
    }

    /// The slot holds what the leader means by this life of it.
    pub(super) fn adopt(&self, slot: SlotRef) {
        self.set(slot, slot.generation);
    }

    /// Whether a slot holds what it should in this life of it.
    pub(super) fn check(&self, from: SlotRef) -> Result<(), CopyError> {
        // Engines write to the device past all of this.
        if from.tier == Tier::Device {
            return Ok(());
        }
        let known = self.0.lock()[from.tier.index()].get(from.slot.0 as usize).copied();
        let held = match known.unwrap_or(NOTHING) {
            held if held == from.generation => return Ok(()),
            NOTHING => "nothing".to_owned(),
            other => format!("generation {other}"),
        };
        Err(CopyError::new(
            CopyErrorKind::Io,
            format!("{from} was never written: the slot holds {held}"),
        ))
    }

    /// Callers have checked that the slot exists: the list grows with what is used, not with what
    /// is asked for.
    fn set(&self, slot: SlotRef, generation: u32) {
        let (tier, slot) = (slot.tier.index(), slot.slot.0 as usize);
        let known = &mut self.0.lock()[tier];
        if known.len() <= slot {
            known.resize(slot + 1, NOTHING);
        }
        known[slot] = generation;
    }
}

/// A tier of a rank whose slots outlive the process.
#[derive(Debug)]
pub struct KeptSlots {
    /// Which.
    pub tier: Tier,
    /// What an earlier process left in them, each slot once.
    pub left: Vec<IndexEntry>,
    /// Who writes down what comes to them.
    pub journal: Arc<dyn SlotJournal>,
}

/// Is told what becomes of slots, so that the next process knows. It must not block.
pub trait SlotJournal: fmt::Debug + Send + Sync {
    /// A copy into a slot begins: what lay there is gone.
    fn begun(&self, op: &CopyOp);
    /// It has arrived, and nothing has been told yet.
    fn arrived(&self, op: &CopyOp);
}

/// The journals of a rank's kept tiers.
#[derive(Debug, Default)]
pub(super) struct SlotJournals([Option<Arc<dyn SlotJournal>>; Tier::COUNT]);

/// What an earlier process left in a rank's slots, as long as a leader may ask for it: until the
/// first copy, which may be into one of them.
#[derive(Debug, Default)]
pub(super) struct LeftBehind([Vec<IndexEntry>; Tier::COUNT]);

/// Parts what outlives the process into what is written down and what was.
pub(super) fn part(kept: Vec<KeptSlots>) -> (SlotJournals, LeftBehind) {
    let (mut journals, mut left) = (SlotJournals::default(), LeftBehind::default());
    for KeptSlots { tier, left: mut entries, journal } in kept {
        entries.sort_unstable_by_key(|entry| entry.slot);
        left.0[tier.index()] = entries;
        journals.0[tier.index()] = Some(journal);
    }
    (journals, left)
}

impl SlotJournals {
    pub(super) fn begun(&self, op: &CopyOp) {
        self.of(op.to.tier).inspect(|journal| journal.begun(op));
    }

    pub(super) fn arrived(&self, op: &CopyOp) {
        self.of(op.to.tier).inspect(|journal| journal.arrived(op));
    }

    fn of(&self, tier: Tier) -> Option<&dyn SlotJournal> {
        self.0[tier.index()].as_deref()
    }
}

impl LeftBehind {
    /// A page of what lies in a tier, from slot `from` on.
    pub(super) fn page(&self, tier: Tier, from: u32) -> InventoryPage {
        let entries = &self.0[tier.index()];
        let rest = &entries[entries.partition_point(|entry| entry.slot.0 < from)..];
        let (page, rest) = rest.split_at(rest.len().min(MAX_SLOTS_TOLD));
        let held = PackedHoldings::of(page.iter().map(HeldSlot::of));
        InventoryPage { tier, held, next: rest.first().map(|entry| entry.slot.0) }
    }

    /// Whether anything was left in a slot.
    pub(super) fn has(&self, slot: SlotRef) -> bool {
        let entries = &self.0[slot.tier.index()];
        entries.binary_search_by_key(&slot.slot, |entry| entry.slot).is_ok()
    }

    /// Nothing is told of it any more.
    pub(super) fn close(&mut self) {
        *self = Self::default();
    }
}
