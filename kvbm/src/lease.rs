//! Leases: the right to read a chain's blocks.

use std::fmt;
use std::sync::Arc;

use kvbm_tiers::Tier;

use crate::table::{Match, Pins, SharedTable};

/// Keeps the leading blocks of a chain where they are, in every tier, until it is dropped. It pins one
/// block per tier, the deepest: tiers drain leaf-first, so its ancestors cannot leave before it.
pub struct Lease {
    table: Arc<SharedTable>,
    /// There until the drop.
    pins: Option<Pins>,
}

impl Lease {
    pub(crate) const fn new(table: Arc<SharedTable>, pins: Pins) -> Self {
        Self { table, pins: Some(pins) }
    }

    /// Leading blocks that each tier holds for this lease.
    pub fn held(&self) -> Match {
        self.pins.as_ref().map(|pins| *pins.held()).unwrap_or_default()
    }

    /// Leading blocks that `tier` holds for this lease.
    pub fn blocks(&self, tier: Tier) -> usize {
        self.held().blocks(tier)
    }

    /// Whether it is of this table.
    pub(crate) fn is_of(&self, table: &Arc<SharedTable>) -> bool {
        Arc::ptr_eq(&self.table, table)
    }

    pub(crate) fn pins(&self) -> &Pins {
        self.pins.as_ref().expect("a lease has its pins until it is dropped")
    }

    /// The pins, which somebody else releases from now on.
    pub(crate) fn into_pins(mut self) -> Pins {
        self.pins.take().expect("a lease has its pins until it is dropped")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(pins) = self.pins.take() {
            self.table.lock().release(pins);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.held()).finish()
    }
}
