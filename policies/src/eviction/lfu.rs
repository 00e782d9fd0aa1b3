//! Least frequently used, with aging, leaves only.

use super::policy::Eviction;
use super::residents::{RankedLeaves, RankedResidents};
use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Forest};

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
struct UseFrequency {
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

impl Eviction for Lfu {
    fn touch(&mut self, access: &Access, forest: &dyn Forest, _reuse: &ReuseModel) {
        for block in self.blocks.path(access, forest) {
            let uses = 1 + self.blocks.state(block).map_or(0, |known| known.uses);
            let stamp = self.blocks.stamp();
            self.blocks.set(block, UseFrequency { uses, worth: self.age + uses, stamp });
        }
        self.blocks.offer(access.deepest);
    }

    fn removed(&mut self, block: BlockId, exposed: Option<BlockId>, _reuse: &ReuseModel) {
        self.blocks.remove(block, exposed);
    }

    fn victim(&mut self, forest: &dyn Forest, _reuse: &ReuseModel) -> Option<BlockId> {
        let victim = self.blocks.lowest(.., forest)?;
        // Here and not in `removed`: what leaves because its bytes are bad was not worth least.
        self.age = self.blocks.state(victim)?.worth;
        Some(victim)
    }

    fn released(&mut self, block: BlockId, _reuse: &ReuseModel) {
        self.blocks.offer(block);
    }
}
