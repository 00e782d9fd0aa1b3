//! Least recently used, and first in, first out: leaves only.

use super::Eviction;
use super::residents::AgeList;
use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Forest, Standing};

/// Evicts the leaf whose last use is the longest ago: LRU that goes tail first through each prompt.
///
/// Exact at O(1) a request: a use stamps the deepest block of the path alone, yet each block has
/// the stamp of the last path through it by the time it is a leaf. How, and what busy blocks do to
/// it: see [`LeafQueue`]. 8 bytes a block.
pub type Lru = LeafQueue<false>;

/// Evicts the leaf that entered the tier first: a use that adds nothing to the tier changes
/// nothing.
///
/// 8 bytes a block, O(1) a request; the queue is that of [`Lru`].
pub type Fifo = LeafQueue<true>;

/// Blocks in order of age, of which only the leaves count. `BY_ARRIVAL`: a use without new blocks
/// does not count. Every operation is O(1) (amortised for [`victim`](Eviction::victim)) and a block
/// costs 8 bytes.
///
/// A block is stamped alone, whatever the length of its path, by moving it to the young end. Its
/// age is meant to be that of the youngest block at or below it, and it matters only once the block
/// is a leaf. Two moves make it so, without any stamp being stored:
///
/// - *An interior block at the old end leaves the queue.* Blocks below it were stamped later, so
///   its own stamp will not count.
/// - *When a block goes and exposes its parent, the parent takes its place,* unless the parent is
///   still queued. The block was the last one below, and siblings that went before it were older:
///   its stamp is the youngest. A parent still queued while its child came to the old end was
///   stamped after the child.
///
/// So each leaf stands exactly where its stamp would sort it, as long as victims leave when they
/// are named. Busy blocks are the exception. A busy leaf at the old end is dropped (it would be met
/// again on each search) and comes back at the old end: rightly older than all that stayed, but
/// blocks that were passed over together return in reverse order of their release. Likewise a block
/// that is removed before its turn leaves a parent that is still queued with the parent's own,
/// perhaps older stamp. Both let a block go somewhat early; neither keeps one too long nor loses
/// one.
#[derive(Debug, Default)]
pub struct LeafQueue<const BY_ARRIVAL: bool> {
    ages: AgeList,
}

impl<const BY_ARRIVAL: bool> Eviction for LeafQueue<BY_ARRIVAL> {
    fn touch(&mut self, access: &Access, _forest: &dyn Forest, _reuse: &ReuseModel) {
        if !BY_ARRIVAL || access.inserted > 0 {
            self.ages.unlink(access.deepest);
            self.ages.push_newest(access.deepest);
        }
    }

    /// The parent that `block` exposed inherits its place.
    fn removed(&mut self, block: BlockId, exposed: Option<BlockId>, _reuse: &ReuseModel) {
        if let Some(parent) = exposed.filter(|&parent| !self.ages.contains(parent)) {
            if self.ages.contains(block) {
                self.ages.insert_after(block, parent);
            } else {
                self.ages.push_oldest(parent);
            }
        }
        self.ages.unlink(block);
    }

    /// The oldest evictable leaf, after dropping those before it that are none.
    fn victim(&mut self, forest: &dyn Forest, _reuse: &ReuseModel) -> Option<BlockId> {
        while let Some(block) = self.ages.oldest().filter(|_| forest.may_look()) {
            if forest.standing(block) == Standing::Evictable {
                return Some(block);
            }
            self.ages.unlink(block);
        }
        None
    }

    /// Takes back a leaf that [`victim`](Eviction::victim) may have dropped.
    fn released(&mut self, block: BlockId, _reuse: &ReuseModel) {
        if !self.ages.contains(block) {
            self.ages.push_oldest(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::eviction::model::{Op, Tree, ops, ops_in_turn};

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
