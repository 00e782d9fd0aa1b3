//! The queue behind the policies that evict the oldest leaf.

use super::age_list::AgeList;
use crate::seam::{BlockId, Forest, Standing};

/// Blocks in order of age, of which only the leaves count. Every operation is O(1) (amortised for
/// [`victim`](Self::victim)) and a block costs 8 bytes.
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
pub(super) struct LeafQueue {
    ages: AgeList,
}

impl LeafQueue {
    /// Makes `block` the youngest.
    pub(super) fn renew(&mut self, block: BlockId) {
        self.ages.unlink(block);
        self.ages.push_newest(block);
    }

    /// The oldest evictable leaf, after dropping those before it that are none.
    pub(super) fn victim(&mut self, forest: &dyn Forest) -> Option<BlockId> {
        while let Some(block) = self.ages.oldest().filter(|_| forest.may_look()) {
            if forest.standing(block) == Standing::Evictable {
                return Some(block);
            }
            self.ages.unlink(block);
        }
        None
    }

    /// Forgets `block`; the parent that it `exposed` inherits its place.
    pub(super) fn remove(&mut self, block: BlockId, exposed: Option<BlockId>) {
        if let Some(parent) = exposed.filter(|&parent| !self.ages.contains(parent)) {
            if self.ages.contains(block) {
                self.ages.insert_after(block, parent);
            } else {
                self.ages.push_oldest(parent);
            }
        }
        self.ages.unlink(block);
    }

    /// Takes back a leaf that [`victim`](Self::victim) may have dropped.
    pub(super) fn release(&mut self, block: BlockId) {
        if !self.ages.contains(block) {
            self.ages.push_oldest(block);
        }
    }
}
