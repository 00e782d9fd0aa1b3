//! What a rank's slots hold, as far as the rank itself knows.

use parking_lot::Mutex;

use crate::copy::{CopyError, CopyErrorKind, CopyOp, SlotRef, Tier};

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

    /// A copy arrived.
    pub(super) fn arrived(&self, op: &CopyOp) {
        self.adopt(op.to);
    }

    /// The slot holds what the leader means by this life of it.
    pub(super) fn adopt(&self, slot: SlotRef) {
        self.set(slot, slot.generation);
    }

    fn check(&self, from: SlotRef) -> Result<(), CopyError> {
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
