//! Leases: the right to read a chain's blocks.

use std::fmt;
use std::sync::Arc;

use kvbm_tiers::Tier;

use crate::scheduler::Core;
use crate::table::{Grip, Match};

/// Keeps the leading blocks of a chain where they are, in every tier, until it is dropped. It pins one
/// block per tier, the deepest: tiers drain leaf-first, so its ancestors cannot leave before it.
pub struct Lease {
    core: Arc<Core>,
    grip: Option<Grip>,
}

impl Lease {
    pub(crate) const fn new(core: Arc<Core>, grip: Grip) -> Self {
        Self { core, grip: Some(grip) }
    }

    /// Leading blocks that each tier holds for this lease.
    pub fn held(&self) -> Match {
        self.grip.as_ref().map(|grip| *grip.held()).unwrap_or_default()
    }

    /// Leading blocks that `tier` holds for this lease.
    pub fn blocks(&self, tier: Tier) -> usize {
        self.held().blocks(tier)
    }

    /// Whether `core` made it.
    pub(crate) fn is_of(&self, core: &Arc<Core>) -> bool {
        Arc::ptr_eq(&self.core, core)
    }

    /// The grip; there until the drop.
    pub(crate) fn grip(&self) -> &Grip {
        self.grip.as_ref().expect("a lease has its grip until it is dropped")
    }

    pub(crate) fn grip_mut(&mut self) -> &mut Grip {
        self.grip.as_mut().expect("a lease has its grip until it is dropped")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(grip) = self.grip.take() {
            self.core.table().release(grip);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.held()).finish()
    }
}
