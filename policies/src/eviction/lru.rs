//! Least recently used, leaves only.

use super::leaf_queue::LeafQueue;
use super::policy::Eviction;
use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Forest};

/// Evicts the leaf whose last use is the longest ago: LRU that goes tail first through each prompt.
///
/// Exact at O(1) a request: a use stamps the deepest block of the path alone, yet each block has
/// the stamp of the last path through it by the time it is a leaf. How, and what busy blocks do to
/// it: see the queue that it shares with [`Fifo`](super::Fifo) in `leaf_queue.rs`. 8 bytes a block.
#[derive(Debug, Default)]
pub struct Lru {
    queue: LeafQueue,
}

impl Eviction for Lru {
    fn touch(&mut self, access: &Access, _forest: &dyn Forest, _reuse: &ReuseModel) {
        self.queue.renew(access.deepest);
    }

    fn removed(&mut self, block: BlockId, exposed: Option<BlockId>, _reuse: &ReuseModel) {
        self.queue.remove(block, exposed);
    }

    fn victim(&mut self, forest: &dyn Forest, _reuse: &ReuseModel) -> Option<BlockId> {
        self.queue.victim(forest)
    }

    fn released(&mut self, block: BlockId, _reuse: &ReuseModel) {
        self.queue.release(block);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::model::{Op, Tree, ops, ops_in_turn};
    use super::*;

    proptest! {
        #[test]
        fn victims_are_those_of_lru_with_stamps_on_every_block(ops in ops_in_turn()) {
            check_order(ops)?;
        }

        #[test]
        fn only_blocks_out_of_turn_leave_early(ops in ops()) {
            check_order(ops)?;
        }
    }

    fn check_order(ops: Vec<Op>) -> Result<(), TestCaseError> {
        let mut lru = Lru::default();
        let mut tree = Tree::default();
        for op in ops {
            if let Some(victim) = tree.apply(op, &mut lru) {
                prop_assert!(victim.out_of_turn || victim.last_use == victim.oldest_use);
            }
        }
        Ok(())
    }
}
