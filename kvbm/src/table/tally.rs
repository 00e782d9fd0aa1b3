//! Counts that have few bits in a slot, and overflow into a map.
//!
//! Most blocks have one child, and one reader at a time or none, so a slot has little room for
//! either count. A count that outgrows it goes on in a map of its tier: there is no limit on a
//! block's readers.

use std::collections::HashMap;

use kvbm_tiers::SlotId;

/// How far slots count themselves.
#[derive(Clone, Copy, Debug)]
pub struct SlotLimits {
    /// Pins: leases, copies and others that keep the block where it is.
    pub pins: u16,
    /// Blocks of the tier that hang on the block.
    pub children: u8,
}

impl Default for SlotLimits {
    fn default() -> Self {
        Self { pins: u16::MAX, children: u8::MAX }
    }
}

/// The parts of counts for which slots have no room.
#[derive(Debug)]
pub(super) struct Tally {
    /// What a slot counts itself.
    limit: u16,
    beyond: HashMap<SlotId, u64>,
}

impl Tally {
    pub(super) fn up_to(limit: u16) -> Self {
        // A slot tells whether there is any.
        Self { limit: limit.max(1), beyond: HashMap::new() }
    }

    /// Adds one to `slot`, which counts `own` itself. Returns what it counts from now on.
    pub(super) fn add(&mut self, slot: SlotId, own: u16) -> u16 {
        if own < self.limit {
            return own + 1;
        }
        *self.beyond.entry(slot).or_default() += 1;
        own
    }

    /// Takes one away.
    pub(super) fn take(&mut self, slot: SlotId, own: u16) -> u16 {
        debug_assert!(own > 0, "slot {} lost what it did not have", slot.0);
        match self.beyond.get_mut(&slot).filter(|_| own == self.limit) {
            Some(1) => _ = self.beyond.remove(&slot),
            Some(beyond) => *beyond -= 1,
            None => return own - 1,
        }
        own
    }

    /// The whole count of `slot`, which counts `own` itself.
    pub(super) fn total(&self, slot: SlotId, own: u16) -> u64 {
        u64::from(own) + self.beyond.get(&slot).copied().unwrap_or(0)
    }

    /// Whether `slot` counts everything itself.
    pub(super) fn is_within(&self, slot: SlotId) -> bool {
        !self.beyond.contains_key(&slot)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_count_is_exact_whatever_its_slot_has_room_for(
            limit in 1..5_u16,
            steps in prop::collection::vec((0..3_u32, prop::bool::weighted(0.6)), 0..200),
        ) {
            let mut tally = Tally::up_to(limit);
            let (mut own, mut counts) = ([0; 3], [0_u64; 3]);
            for (slot, grows) in steps {
                let at = slot as usize;
                if grows {
                    own[at] = tally.add(SlotId(slot), own[at]);
                    counts[at] += 1;
                } else if counts[at] > 0 {
                    own[at] = tally.take(SlotId(slot), own[at]);
                    counts[at] -= 1;
                }
                prop_assert_eq!(tally.total(SlotId(slot), own[at]), counts[at]);
                prop_assert_eq!(u64::from(own[at]), counts[at].min(u64::from(limit)));
            }
        }
    }
}
