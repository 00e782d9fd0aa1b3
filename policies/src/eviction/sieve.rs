//! SIEVE: one queue and a hand, leaves only.

use super::residents::{RankedLeaves, RankedPolicy, RankedResidents};
use crate::seam::{BlockId, Forest};

/// A hand moves from the oldest block to the youngest, clears the mark of those used since it last
/// came by and evicts the first without one. (Y. Zhang et al., "SIEVE is simpler than LRU: an
/// efficient turn-key eviction algorithm for Web caches", NSDI 2024.)
///
/// Leaf-first: the hand passes interior blocks without a look.
///
/// O(path) a request, 24 bytes a block.
#[derive(Debug)]
pub struct Sieve {
    blocks: RankedResidents<SieveBlock>,
    /// Blocks with lower stamps are behind it.
    hand: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SieveBlock {
    stamp: u64,
    is_used: bool,
}

impl RankedLeaves for SieveBlock {
    type Rank = u64;

    fn rank(&self) -> u64 {
        self.stamp
    }
}

impl Sieve {
    /// A policy for a tier of `capacity` blocks.
    pub fn with_capacity(capacity: u32) -> Self {
        Self { blocks: RankedResidents::with_capacity(capacity), hand: 0 }
    }
}

impl RankedPolicy for Sieve {
    type Block = SieveBlock;

    fn blocks(&mut self) -> &mut RankedResidents<SieveBlock> {
        &mut self.blocks
    }

    fn used(&mut self, block: BlockId, _forest: &dyn Forest) {
        let place = match self.blocks.state(block) {
            Some(known) => SieveBlock { is_used: true, ..*known },
            None => SieveBlock { stamp: self.blocks.stamp(), is_used: false },
        };
        self.blocks.set(block, place);
    }

    fn choose(&mut self, forest: &dyn Forest) -> Option<BlockId> {
        loop {
            // Behind the youngest, the hand begins again at the oldest.
            let ahead = self.blocks.lowest(self.hand.., forest);
            let block = ahead.or_else(|| self.blocks.lowest(.., forest))?;
            let place = *self.blocks.state(block)?;
            // On the victim, not past it: a second question before that has gone gets the same
            // answer.
            self.hand = place.stamp;
            if !place.is_used {
                return Some(block);
            }
            self.hand += 1;
            self.blocks.set(block, SieveBlock { is_used: false, ..place });
            self.blocks.offer(block);
        }
    }
}
