//! S3-FIFO: three static queues, leaves only.

use super::residents::{AgeList, EvictedGhosts, RankedLeaves, RankedPolicy, RankedResidents};
use crate::seam::{BlockId, Forest, Standing};

/// New blocks pass through a small queue of a tenth of the tier. Those used more than once
/// meanwhile, and those that left it not long ago, go to the main queue, which gives a used block
/// another round. (J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.)
///
/// Leaf-first: a block that may not leave counts as used when it comes to the head of a queue, for
/// it is. To bound a search, the oldest leaf goes after 1,024 blocks were passed over in vain.
///
/// O(path) a request and O(1) moves a victim as a rule. 48 bytes a block and about 60 a ghost, of
/// which there are at most nine for ten blocks.
#[derive(Debug)]
pub struct S3Fifo {
    blocks: RankedResidents<S3FifoBlock>,
    small: AgeList,
    small_len: usize,
    main: AgeList,
    ghosts: EvictedGhosts<()>,
    capacity: usize,
}

/// How many blocks one search passes over at most.
const MAX_PASSES: usize = 1_024;

// Two bits, as in the paper.
const MAX_USES: u8 = 3;

#[derive(Clone, Copy, Debug)]
pub(super) struct S3FifoBlock {
    is_main: bool,
    stamp: u64,
    /// Uses since it entered or was last passed over, up to [`MAX_USES`].
    uses: u8,
    key: u64,
}

impl RankedLeaves for S3FifoBlock {
    type Rank = (bool, u64);

    fn rank(&self) -> (bool, u64) {
        (self.is_main, self.stamp)
    }
}

impl S3Fifo {
    /// A policy for a tier of `capacity` blocks.
    pub fn with_capacity(capacity: u32) -> Self {
        Self {
            blocks: RankedResidents::with_capacity(capacity),
            small: AgeList::default(),
            small_len: 0,
            main: AgeList::default(),
            ghosts: EvictedGhosts::default(),
            capacity: capacity as usize,
        }
    }

    fn enter(&mut self, block: BlockId, key: u64) -> S3FifoBlock {
        let is_main = self.ghosts.take(key).is_some();
        if is_main {
            self.main.push_newest(block);
        } else {
            self.small.push_newest(block);
            self.small_len += 1;
        }
        S3FifoBlock { is_main, stamp: self.blocks.stamp(), uses: 0, key }
    }

    fn unlink(&mut self, block: BlockId, is_main: bool) {
        if is_main {
            self.main.unlink(block);
        } else {
            self.small.unlink(block);
            self.small_len -= 1;
        }
    }

    /// The head of the queue that has to give.
    fn head(&self) -> Option<BlockId> {
        let small = self.small.oldest();
        // At last the small one in any case: at the start the main one is empty.
        small
            .filter(|_| self.small_len >= self.capacity / 10)
            .or_else(|| self.main.oldest())
            .or(small)
    }

    /// Puts a block that stays behind the others of the main queue.
    fn pass_over(&mut self, block: BlockId, place: S3FifoBlock, standing: Standing) {
        self.unlink(block, place.is_main);
        self.main.push_newest(block);
        let uses = if place.is_main { place.uses.saturating_sub(1) } else { 0 };
        let stamp = self.blocks.stamp();
        self.blocks.set(block, S3FifoBlock { is_main: true, stamp, uses, ..place });
        // A busy one is offered when it is released: the search among the leaves, which follows, is
        // to come to an end.
        if standing == Standing::Evictable {
            self.blocks.offer(block);
        }
    }
}

impl RankedPolicy for S3Fifo {
    type Block = S3FifoBlock;

    fn blocks(&mut self) -> &mut RankedResidents<S3FifoBlock> {
        &mut self.blocks
    }

    fn used(&mut self, block: BlockId, forest: &dyn Forest) {
        let place = match self.blocks.state(block) {
            Some(known) => S3FifoBlock { uses: MAX_USES.min(known.uses + 1), ..*known },
            None => self.enter(block, forest.key(block)),
        };
        self.blocks.set(block, place);
    }

    fn left(&mut self, block: BlockId, known: S3FifoBlock) {
        self.unlink(block, known.is_main);
        if !known.is_main {
            // Of the small queue alone, as in the paper: a ghost that returns says that it was too
            // short.
            self.ghosts.insert(known.key, ());
            self.ghosts.truncate(self.capacity - self.capacity / 10);
        }
    }

    fn choose(&mut self, forest: &dyn Forest) -> Option<BlockId> {
        for _ in 0..MAX_PASSES {
            let head = self.head().filter(|_| forest.may_look())?;
            let place = *self.blocks.state(head)?;
            // As in the paper: one use keeps a block in the main queue, two bring it there.
            let enough = if place.is_main { 1 } else { 2 };
            let standing = forest.standing(head);
            if place.uses < enough && standing == Standing::Evictable {
                return Some(head);
            }
            self.pass_over(head, place, standing);
        }
        self.blocks.lowest(.., forest)
    }
}
