//! What a rule is told about the tiers between which it stands.

use crate::eviction::EvictionKind;

/// The two tiers between which a rule stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierPair {
    /// From which blocks go down.
    pub upper: TierShape,
    /// To which they go.
    pub lower: TierShape,
}

/// A tier, as a rule needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierShape {
    /// Blocks that it holds.
    pub capacity: u32,
    /// Which block leaves it.
    pub eviction: EvictionKind,
}

impl TierShape {
    pub(super) fn shrunk(self, by: u32) -> Self {
        // Not 0: a tier that keeps nothing tells nothing of one that does.
        Self { capacity: (self.capacity / by).max(1), ..self }
    }
}
