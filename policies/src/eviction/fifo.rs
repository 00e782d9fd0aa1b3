//! First in, first out, leaves only.

use super::leaf_queue::LeafQueue;
use super::policy::Eviction;
use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Forest};

/// Evicts the leaf that entered the tier first: a use that adds nothing to the tier changes
/// nothing.
///
/// 8 bytes a block, O(1) a request; the queue is that of [`Lru`](super::Lru).
#[derive(Debug, Default)]
pub struct Fifo {
    queue: LeafQueue,
}

impl Eviction for Fifo {
    fn touch(&mut self, access: &Access, _forest: &dyn Forest, _reuse: &ReuseModel) {
        if access.inserted > 0 {
            self.queue.renew(access.deepest);
        }
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

    use super::super::model::{Tree, ops, ops_in_turn};
    use super::*;

    proptest! {
        #[test]
        fn victims_are_the_leaves_that_came_first(ops in ops_in_turn()) {
            let mut fifo = Fifo::default();
            let mut tree = Tree::default();
            for op in ops {
                if let Some(victim) = tree.apply(op, &mut fifo) {
                    prop_assert_eq!(victim.arrival, victim.oldest_arrival);
                }
            }
        }

        #[test]
        fn a_victim_is_found_wherever_there_is_one(ops in ops()) {
            let mut fifo = Fifo::default();
            let mut tree = Tree::default();
            for op in ops {
                tree.apply(op, &mut fifo);
            }
        }
    }
}
