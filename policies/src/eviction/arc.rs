//! The adaptive replacement cache, leaves only.

use super::residents::{EvictedGhosts, RankedLeaves, RankedPolicy, RankedResidents};
use crate::seam::{BlockId, Forest};

/// Keeps blocks used once and blocks used again in two LRU queues and shifts room between them:
/// towards the one whose ghosts return. (N. Megiddo, D. Modha, "ARC: a self-tuning, low overhead
/// replacement cache", FAST 2003.)
///
/// Leaf-first: a block used once has children used once and earlier, so the oldest of that queue is
/// a leaf. The oldest of the blocks used again may have younger children in the other queue; the
/// oldest leaf goes in its stead.
///
/// O(path) a request, 32 bytes a block and about 60 a ghost, of which there are at most as many as
/// blocks.
#[derive(Debug)]
pub struct Arc {
    blocks: RankedResidents<ArcBlock>,
    recent: ArcQueue,
    frequent: ArcQueue,
    /// How many blocks `recent` may have, as adapted so far.
    target: usize,
    capacity: usize,
}

#[derive(Debug, Default)]
struct ArcQueue {
    len: usize,
    ghosts: EvictedGhosts<()>,
}

#[derive(Debug)]
pub(super) struct ArcBlock {
    is_frequent: bool,
    stamp: u64,
    key: u64,
}

impl RankedLeaves for ArcBlock {
    type Rank = (bool, u64);

    fn rank(&self) -> (bool, u64) {
        (self.is_frequent, self.stamp)
    }
}

impl Arc {
    /// A policy for a tier of `capacity` blocks.
    pub fn with_capacity(capacity: u32) -> Self {
        Self {
            blocks: RankedResidents::with_capacity(capacity),
            recent: ArcQueue::default(),
            frequent: ArcQueue::default(),
            target: 0,
            capacity: capacity as usize,
        }
    }

    fn queue(&mut self, is_frequent: bool) -> &mut ArcQueue {
        if is_frequent { &mut self.frequent } else { &mut self.recent }
    }

    /// Whether a block that enters was here not long ago. Learns from it.
    fn has_returned(&mut self, key: u64) -> bool {
        // Counted before the ghost is taken, so that whichever divides is not 0.
        let (recent, frequent) = (self.recent.ghosts.len(), self.frequent.ghosts.len());
        if self.recent.ghosts.take(key).is_some() {
            self.target = (self.target + (frequent / recent).max(1)).min(self.capacity);
            true
        } else if self.frequent.ghosts.take(key).is_some() {
            self.target = self.target.saturating_sub((recent / frequent).max(1));
            true
        } else {
            false
        }
    }
}

impl RankedPolicy for Arc {
    type Block = ArcBlock;

    fn blocks(&mut self) -> &mut RankedResidents<ArcBlock> {
        &mut self.blocks
    }

    fn used(&mut self, block: BlockId, forest: &dyn Forest) {
        let (is_frequent, key) = match self.blocks.state(block) {
            Some(&ArcBlock { is_frequent, key, .. }) => {
                self.queue(is_frequent).len -= 1;
                (true, key)
            }
            None => {
                let key = forest.key(block);
                (self.has_returned(key), key)
            }
        };
        self.queue(is_frequent).len += 1;
        let stamp = self.blocks.stamp();
        self.blocks.set(block, ArcBlock { is_frequent, stamp, key });
    }

    fn left(&mut self, _block: BlockId, known: ArcBlock) {
        let capacity = self.capacity;
        let queue = self.queue(known.is_frequent);
        queue.len -= 1;
        queue.ghosts.insert(known.key, ());
        // The paper's bounds: what was used once, ghosts included, at most the tier; all four lists
        // at most two tiers.
        self.recent.ghosts.truncate(capacity.saturating_sub(self.recent.len));
        let others = self.recent.len + self.frequent.len + self.recent.ghosts.len();
        self.frequent.ghosts.truncate((2 * capacity).saturating_sub(others));
    }

    fn choose(&mut self, forest: &dyn Forest) -> Option<BlockId> {
        let from_recent = self.recent.len > self.target;
        let preferred = if from_recent { None } else { self.blocks.lowest((true, 0).., forest) };
        // The whole range begins with those used once, for `false` is less.
        preferred.or_else(|| self.blocks.lowest(.., forest))
    }
}
