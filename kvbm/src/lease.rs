//! Leases: the right to read a chain's blocks.

use std::fmt;
use std::sync::Arc;

use kvbm_tiers::Tier;

use crate::table::{Match, Pins, SharedTable};

/// Keeps the leading blocks of a chain where they are, in every tier, until it is dropped. It pins one
/// block per tier, the deepest: tiers drain leaf-first, so its ancestors cannot leave before it.
pub struct Lease {
    table: Arc<SharedTable>,
    pins: Pins,
}

impl Lease {
    pub(crate) const fn new(table: Arc<SharedTable>, pins: Pins) -> Self {
        Self { table, pins }
    }

    /// Leading blocks that each tier holds for this lease.
    pub const fn held(&self) -> Match {
        *self.pins.held()
    }

    /// Leading blocks that `tier` holds for this lease.
    pub const fn blocks(&self, tier: Tier) -> usize {
        self.held().blocks(tier)
    }

    /// Whether it is of this table.
    pub(crate) fn is_of(&self, table: &Arc<SharedTable>) -> bool {
        Arc::ptr_eq(&self.table, table)
    }

    pub(crate) const fn pins(&self) -> &Pins {
        &self.pins
    }

    /// The pins, which somebody else releases from now on.
    pub(crate) fn into_pins(mut self) -> Pins {
        self.take_pins()
    }

    /// Leaves a lease of nothing, whose drop does nothing.
    const fn take_pins(&mut self) -> Pins {
        let nothing = Pins::of_nothing(self.pins.context(), self.pins.namespace());
        std::mem::replace(&mut self.pins, nothing)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let pins = self.take_pins();
        // A lease of nothing is no reason to ask for the lock.
        if !pins.is_of_nothing() {
            self.table.lock().release(pins);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.held()).finish()
    }
}
