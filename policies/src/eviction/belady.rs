//! Belady's offline optimum: what no online policy can beat.

use std::collections::BinaryHeap;

use super::Eviction;
use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Forest, Standing};

/// The next use of a block that no later request uses.
pub const NEVER: u32 = u32::MAX;

/// Evicts the block that is used again last; of those with equal next use, the deepest.
///
/// A request that uses a block uses its parent too, so a parent's next use never comes after its
/// child's: the block that ranks highest is a leaf without being forced to be one, and the optimum
/// over prefix-closed tiers is the optimum. (L. A. Belady, "A study of replacement algorithms for a
/// virtual-storage computer", IBM Systems Journal 5(2), 1966.)
///
/// O(path) a request, for it ranks every block of the path anew.
#[derive(Debug)]
pub struct Belady {
    /// Of each touch to come, in order, what it will learn.
    future: std::vec::IntoIter<Vec<u32>>,
    /// By block, as of its last touch; `None` where it is not resident.
    ranks: Vec<Option<Rank>>,
    /// Every leaf with its rank, among entries that no longer hold (interior, touched since, gone).
    leaves: BinaryHeap<(Rank, BlockId)>,
}

/// The highest goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    next_use: u32,
    /// Blocks above it, so that of equals the deepest goes first.
    depth: u32,
}

impl Belady {
    /// `next_uses[k]` is what touch number k learns: for each block of its path, from the root on,
    /// the number of the next touch that uses the block, or [`NEVER`]. Blocks and touches beyond
    /// are never used again.
    pub fn new(next_uses: Vec<Vec<u32>>) -> Self {
        Self { future: next_uses.into_iter(), ranks: Vec::new(), leaves: BinaryHeap::new() }
    }

    fn rank_of(&self, block: BlockId) -> Option<Rank> {
        self.ranks.get(block.0 as usize).copied().flatten()
    }

    fn offer(&mut self, leaf: BlockId) {
        self.leaves.extend(self.rank_of(leaf).map(|rank| (rank, leaf)));
    }
}

impl Eviction for Belady {
    fn touch(&mut self, access: &Access, forest: &dyn Forest, _reuse: &ReuseModel) {
        // By order alone, so it serves only where a request is one touch: in a simulation.
        let next_uses = self.future.next().unwrap_or_default();
        let path = std::iter::successors(Some(access.deepest), |&block| forest.parent(block));
        for (block, depth) in path.zip((0..access.depth).rev()) {
            let next_use = next_uses.get(depth as usize).copied().unwrap_or(NEVER);
            *block.entry(&mut self.ranks) = Some(Rank { next_use, depth });
        }
        self.offer(access.deepest);
    }

    fn removed(&mut self, block: BlockId, exposed: Option<BlockId>, _reuse: &ReuseModel) {
        *block.entry(&mut self.ranks) = None;
        if let Some(parent) = exposed {
            self.offer(parent);
        }
    }

    fn victim(&mut self, forest: &dyn Forest, _reuse: &ReuseModel) -> Option<BlockId> {
        while let Some(&(rank, block)) = self.leaves.peek().filter(|_| forest.may_look()) {
            // A busy one is dropped as well: `released` offers it again.
            if self.rank_of(block) == Some(rank) && forest.standing(block) == Standing::Evictable {
                return Some(block);
            }
            self.leaves.pop();
        }
        None
    }

    fn released(&mut self, block: BlockId, _reuse: &ReuseModel) {
        self.offer(block);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::eviction::model::{Tree, ops};

    use super::*;

    proptest! {
        #[test]
        fn a_victim_is_found_wherever_there_is_one(ops in ops()) {
            let mut belady = Belady::new(Vec::new());
            let mut tree = Tree::default();
            for op in ops {
                tree.apply(op, &mut belady);
            }
        }
    }
}
