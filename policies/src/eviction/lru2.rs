//! LRU-2: by the last use but one, leaves only.

use super::residents::{
    EvictedGhosts, GHOSTS_PER_BLOCK, RankedLeaves, RankedPolicy, RankedResidents,
};
use crate::seam::{BlockId, Forest};

/// Evicts the leaf whose last use but one is the longest ago. Those used once come first, the least
/// recent of them first. (E. O'Neil, P. O'Neil, G. Weikum, "The LRU-K page replacement algorithm
/// for database disk buffering", SIGMOD 1993, with K = 2 and without a correlated reference
/// period.)
///
/// Leaf-first changes nothing: a parent's uses are those of its child and more. The last use of a
/// block is remembered after it left, of four times as many blocks as the tier holds.
///
/// O(path) a request, 32 bytes a block and about 70 a ghost.
#[derive(Debug)]
pub struct Lru2 {
    blocks: RankedResidents<LastTwo>,
    ghosts: EvictedGhosts<u64>,
    max_ghosts: usize,
}

#[derive(Debug)]
pub(super) struct LastTwo {
    /// Stamp of the last use but one; 0 if there is none.
    previous: u64,
    last: u64,
    key: u64,
}

impl RankedLeaves for LastTwo {
    type Rank = (u64, u64);

    fn rank(&self) -> (u64, u64) {
        (self.previous, self.last)
    }
}

impl Lru2 {
    /// A policy for a tier of `capacity` blocks.
    pub fn with_capacity(capacity: u32) -> Self {
        Self {
            blocks: RankedResidents::with_capacity(capacity),
            ghosts: EvictedGhosts::default(),
            max_ghosts: capacity as usize * GHOSTS_PER_BLOCK,
        }
    }
}

impl RankedPolicy for Lru2 {
    type Block = LastTwo;

    fn blocks(&mut self) -> &mut RankedResidents<LastTwo> {
        &mut self.blocks
    }

    fn used(&mut self, block: BlockId, forest: &dyn Forest) {
        let last = self.blocks.stamp();
        let state = match self.blocks.state(block) {
            Some(known) => LastTwo { previous: known.last, last, key: known.key },
            None => {
                let key = forest.key(block);
                // 0 is below any stamp: what was used once goes before all that was used twice.
                LastTwo { previous: self.ghosts.take(key).unwrap_or(0), last, key }
            }
        };
        self.blocks.set(block, state);
    }

    fn left(&mut self, _block: BlockId, known: LastTwo) {
        self.ghosts.insert(known.key, known.last);
        self.ghosts.truncate(self.max_ghosts);
    }
}
