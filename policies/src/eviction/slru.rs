//! Segmented LRU, leaves only.

use super::residents::{AgeList, RankedLeaves, RankedPolicy, RankedResidents};
use crate::seam::{BlockId, Forest};

/// Keeps four fifths of the tier for blocks used again: they are protected until that many were
/// used later, then they stand behind the new ones. (R. Karedla, J. Love, B. Wherry, "Caching
/// strategies to improve disk system performance", Computer 27(3), 1994.)
///
/// Leaf-first changes nothing: whatever protects a block protects its parent, and longer.
///
/// O(path) a request, 32 bytes a block.
#[derive(Debug)]
pub struct Slru {
    blocks: RankedResidents<SlruBlock>,
    protected: AgeList,
    protected_len: usize,
    protected_room: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SlruBlock {
    is_protected: bool,
    stamp: u64,
}

impl RankedLeaves for SlruBlock {
    type Rank = (bool, u64);

    fn rank(&self) -> (bool, u64) {
        (self.is_protected, self.stamp)
    }
}

impl Slru {
    /// A policy for a tier of `capacity` blocks.
    pub fn with_capacity(capacity: u32) -> Self {
        Self {
            blocks: RankedResidents::with_capacity(capacity),
            protected: AgeList::default(),
            protected_len: 0,
            protected_room: capacity as usize / 5 * 4,
        }
    }

    fn place(&mut self, block: BlockId, is_protected: bool) {
        let stamp = self.blocks.stamp();
        self.blocks.set(block, SlruBlock { is_protected, stamp });
    }

    fn protect(&mut self, block: BlockId) {
        if self.protected.contains(block) {
            self.protected.unlink(block);
        } else {
            self.protected_len += 1;
        }
        self.protected.push_newest(block);
        self.place(block, true);
    }
}

impl RankedPolicy for Slru {
    type Block = SlruBlock;

    fn blocks(&mut self) -> &mut RankedResidents<SlruBlock> {
        &mut self.blocks
    }

    fn used(&mut self, block: BlockId, _forest: &dyn Forest) {
        match self.blocks.state(block) {
            Some(_) => self.protect(block),
            None => self.place(block, false),
        }
    }

    fn path_used(&mut self) {
        // A path that is longer than the room exposes its own tail: it was protected from the
        // deepest block up.
        while self.protected_len > self.protected_room {
            let Some(oldest) = self.protected.oldest() else { return };
            self.protected.unlink(oldest);
            self.protected_len -= 1;
            self.place(oldest, false);
            self.blocks.offer(oldest);
        }
    }

    fn left(&mut self, block: BlockId, known: SlruBlock) {
        if known.is_protected {
            self.protected.unlink(block);
            self.protected_len -= 1;
        }
    }
}
