//! Low inter-reference recency set, leaves only.

use super::residents::{
    AgeList, EvictedGhosts, GHOSTS_PER_BLOCK, RankedLeaves, RankedPolicy, RankedResidents,
};
use crate::seam::{BlockId, Forest};

/// Keeps the blocks whose last two uses lie closest together (the *low* ones) and lets the others
/// pass through a small queue. A block that returns while its last use is more recent than that of
/// the stalest low block takes that block's place. (S. Jiang, X. Zhang, "LIRS: an efficient low
/// inter-reference recency set replacement policy to improve buffer cache performance", SIGMETRICS
/// 2002.)
///
/// The paper's stack is implied: a block stands in it while its last use is more recent than that
/// of the stalest low block, so a stamp per block and a list of the low ones say the same.
///
/// Leaf-first changes little: a parent's uses are those of its child and more, so it is low if the
/// child is. The blocks of one request are judged together, by the stalest low block before it. The
/// queue has 5 % of the tier, not the 1 % of the paper, for it has to hold whole prompts.
///
/// O(path) a request, 48 bytes a block and about 70 a ghost, of which there are at most four a
/// block.
#[derive(Debug)]
pub struct Lirs {
    blocks: RankedResidents<LirsBlock>,
    low: AgeList,
    low_len: usize,
    low_room: usize,
    /// The last uses of blocks that left.
    ghosts: EvictedGhosts<u64>,
    max_ghosts: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LirsBlock {
    is_low: bool,
    /// When it entered the queue; for a low block, its last use.
    stamp: u64,
    last_use: u64,
    key: u64,
}

impl RankedLeaves for LirsBlock {
    type Rank = (bool, u64);

    fn rank(&self) -> (bool, u64) {
        (self.is_low, self.stamp)
    }
}

impl Lirs {
    /// A policy for a tier of `capacity` blocks.
    pub fn with_capacity(capacity: u32) -> Self {
        Self {
            blocks: RankedResidents::with_capacity(capacity),
            low: AgeList::default(),
            low_len: 0,
            low_room: (capacity - capacity.div_ceil(20)) as usize,
            ghosts: EvictedGhosts::default(),
            max_ghosts: capacity as usize * GHOSTS_PER_BLOCK,
        }
    }

    /// The bottom of the stack; `None` where there is no low block.
    fn stalest_low_use(&self) -> Option<u64> {
        Some(self.blocks.state(self.low.oldest()?)?.last_use)
    }

    fn forget_low(&mut self, block: BlockId) {
        self.low.unlink(block);
        self.low_len -= 1;
    }
}

impl RankedPolicy for Lirs {
    type Block = LirsBlock;

    fn blocks(&mut self) -> &mut RankedResidents<LirsBlock> {
        &mut self.blocks
    }

    fn used(&mut self, block: BlockId, forest: &dyn Forest) {
        let (was_low, previous_use, key) = match self.blocks.state(block) {
            Some(known) => (known.is_low, Some(known.last_use), known.key),
            None => {
                let key = forest.key(block);
                (false, self.ghosts.take(key), key)
            }
        };
        // `None` is below any stamp: a first use is never more recent, and where no block is low
        // any earlier use is.
        let is_low =
            was_low || self.low_len < self.low_room || previous_use > self.stalest_low_use();
        if was_low {
            self.forget_low(block);
        }
        if is_low {
            self.low.push_newest(block);
            self.low_len += 1;
        }
        let stamp = self.blocks.stamp();
        self.blocks.set(block, LirsBlock { is_low, stamp, last_use: stamp, key });
    }

    /// Moves the stalest low blocks to the queue until the others fit.
    fn path_used(&mut self) {
        // After the whole path: its first blocks must not push out what its last ones are compared
        // with.
        while self.low_len > self.low_room {
            let Some(block) = self.low.oldest() else { return };
            self.forget_low(block);
            let Some(&place) = self.blocks.state(block) else { return };
            let stamp = self.blocks.stamp();
            // As in the paper, to the young end of the queue.
            self.blocks.set(block, LirsBlock { is_low: false, stamp, ..place });
            self.blocks.offer(block);
        }
    }

    fn left(&mut self, block: BlockId, known: LirsBlock) {
        if known.is_low {
            self.forget_low(block);
        }
        self.ghosts.insert(known.key, known.last_use);
        self.ghosts.truncate(self.max_ghosts);
    }
}
