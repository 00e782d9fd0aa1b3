//! Least frequently used, with aging, leaves only.

use super::residents::{RankedLeaves, RankedPolicy, RankedResidents};
use crate::seam::{BlockId, Forest};

/// Evicts the leaf of the lowest number of uses plus the age of the tier at its last use; of
/// equals, the one used least recently. The age is the sum of the last victim, so that a block that
/// was once popular does not stay for ever: LFU with dynamic aging (M. Arlitt et al., "Evaluating
/// content management techniques for Web proxy caches", Performance Evaluation Review 27(4), 2000).
///
/// Leaf-first changes little: a parent is used at least as often as its child and no earlier, so it
/// ranks above it anyway. O(path) a request, 32 bytes a block.
#[derive(Debug)]
pub struct Lfu {
    blocks: RankedResidents<UseFrequency>,
    age: u64,
}

#[derive(Debug)]
pub(super) struct UseFrequency {
    uses: u64,
    /// Uses plus the tier's age.
    worth: u64,
    stamp: u64,
}

impl RankedLeaves for UseFrequency {
    type Rank = (u64, u64);

    fn rank(&self) -> (u64, u64) {
        (self.worth, self.stamp)
    }
}

impl Lfu {
    /// A policy for a tier of `capacity` blocks.
    pub fn with_capacity(capacity: u32) -> Self {
        Self { blocks: RankedResidents::with_capacity(capacity), age: 0 }
    }
}

impl RankedPolicy for Lfu {
    type Block = UseFrequency;

    fn blocks(&mut self) -> &mut RankedResidents<UseFrequency> {
        &mut self.blocks
    }

    fn used(&mut self, block: BlockId, _forest: &dyn Forest) {
        let uses = 1 + self.blocks.state(block).map_or(0, |known| known.uses);
        let stamp = self.blocks.stamp();
        self.blocks.set(block, UseFrequency { uses, worth: self.age + uses, stamp });
    }

    fn choose(&mut self, forest: &dyn Forest) -> Option<BlockId> {
        let victim = self.blocks.lowest(.., forest)?;
        // Here and not when it leaves: what leaves because its bytes are bad was not worth least.
        self.age = self.blocks.state(victim)?.worth;
        Some(victim)
    }
}
