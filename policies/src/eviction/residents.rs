//! What a policy knows of each block of a tier, with the leaves sorted by rank.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::iter::successors;
use std::ops::RangeBounds;

use crate::seam::{Access, BlockId, Forest, PREPARED_BLOCKS, RequestId, Standing};

/// What a policy knows of one block.
pub(super) trait RankedLeaves: Debug {
    /// The lowest goes first. No two blocks of a tier share one.
    type Rank: Ord + Copy + Debug;

    fn rank(&self) -> Self::Rank;
}

/// The blocks of a tier, each with a `T`, and its leaves in order of rank.
///
/// A touch writes to each block of a path (O(1) each, no order is kept among interior blocks) and
/// sorts one leaf; a removal sorts the parent that it exposes. So the tree below holds leaves only,
/// besides those that have become interior or busy since: each search drops the ones it meets. A
/// leaf costs about 32 bytes more than the other blocks.
#[derive(Debug)]
pub(super) struct RankedResidents<T: RankedLeaves> {
    blocks: Vec<Option<ResidentBlock<T>>>,
    leaves: BTreeMap<T::Rank, BlockId>,
    last_stamp: u64,
    /// The newest requests, whose use of known blocks has been counted.
    counted: VecDeque<RequestId>,
}

#[derive(Debug)]
struct ResidentBlock<T> {
    state: T,
    /// Whether `leaves` has it, under the rank of `state`.
    is_sorted: bool,
}

impl<T: RankedLeaves> RankedResidents<T> {
    /// Requests whose parts are told from new requests.
    pub(super) const COUNTED: usize = 64;

    pub(super) fn with_capacity(capacity: u32) -> Self {
        Self {
            blocks: Vec::with_capacity(capacity.min(PREPARED_BLOCKS) as usize),
            leaves: BTreeMap::new(),
            last_stamp: 0,
            counted: VecDeque::new(),
        }
    }

    /// A number above all those before. The first is 1.
    pub(super) const fn stamp(&mut self) -> u64 {
        self.last_stamp += 1;
        self.last_stamp
    }

    /// The blocks that `access` is the first to use on behalf of its request, from the deepest up:
    /// a use that comes in parts counts once. All of the path, or what was inserted if an earlier
    /// part had the rest.
    pub(super) fn path<'f>(
        &mut self,
        access: &Access,
        forest: &'f dyn Forest,
    ) -> impl Iterator<Item = BlockId> + use<'f, T> {
        let blocks = if self.is_first_part(access) { access.depth } else { access.inserted };
        // From the deepest up: stamped in this order, a path goes tail first.
        successors(Some(access.deepest), |&block| forest.parent(block)).take(blocks as usize)
    }

    fn is_first_part(&mut self, access: &Access) -> bool {
        let Some(request) = access.request else { return access.inserted == 0 };
        let is_first = !self.counted.contains(&request);
        if is_first {
            // A request that outlives 64 others counts twice, and its blocks then rank a little too
            // high.
            self.counted.truncate(Self::COUNTED - 1);
            self.counted.push_front(request);
        }
        is_first
    }

    /// `None`: the block is not resident.
    pub(super) fn state(&self, block: BlockId) -> Option<&T> {
        self.blocks.get(block.0 as usize)?.as_ref().map(|resident| &resident.state)
    }

    /// As [`state`](Self::state), for changes that leave the rank as it is.
    pub(super) fn state_mut(&mut self, block: BlockId) -> Option<&mut T> {
        Some(&mut self.blocks.get_mut(block.0 as usize)?.as_mut()?.state)
    }

    /// Sets what is known of `block`, which is sorted no longer.
    pub(super) fn set(&mut self, block: BlockId, state: T) {
        let at = block.0 as usize;
        if self.blocks.len() <= at {
            self.blocks.resize_with(at + 1, || None);
        }
        let old = self.blocks[at].replace(ResidentBlock { state, is_sorted: false });
        // By its old rank: the tree has the leaf under that.
        self.unsort(old.as_ref());
    }

    /// Sorts `block` among the leaves. Does nothing where it is not resident.
    pub(super) fn offer(&mut self, block: BlockId) {
        if let Some(Some(resident)) = self.blocks.get_mut(block.0 as usize) {
            resident.is_sorted = true;
            self.leaves.insert(resident.state.rank(), block);
        }
    }

    /// Forgets `block` and offers the parent that it `exposed`. Returns what was known.
    pub(super) fn remove(&mut self, block: BlockId, exposed: Option<BlockId>) -> Option<T> {
        let old = self.blocks.get_mut(block.0 as usize).and_then(Option::take);
        self.unsort(old.as_ref());
        if let Some(parent) = exposed {
            self.offer(parent);
        }
        old.map(|resident| resident.state)
    }

    /// The evictable leaf of the lowest rank in `ranks`.
    pub(super) fn lowest(
        &mut self,
        ranks: impl RangeBounds<T::Rank> + Clone,
        forest: &dyn Forest,
    ) -> Option<BlockId> {
        while let Some((&rank, &block)) =
            self.leaves.range(ranks.clone()).next().filter(|_| forest.may_look())
        {
            if forest.standing(block) == Standing::Evictable {
                return Some(block);
            }
            self.leaves.remove(&rank);
            if let Some(Some(resident)) = self.blocks.get_mut(block.0 as usize) {
                resident.is_sorted = false;
            }
        }
        None
    }

    fn unsort(&mut self, resident: Option<&ResidentBlock<T>>) {
        if let Some(resident) = resident.filter(|resident| resident.is_sorted) {
            self.leaves.remove(&resident.state.rank());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::seam::Hints;
    use crate::testing::Line;

    const LINE: Line = Line(Standing::Busy);

    impl RankedLeaves for u64 {
        type Rank = Self;

        fn rank(&self) -> Self {
            *self
        }
    }

    #[test]
    fn a_use_in_parts_counts_once() {
        let mut residents = RankedResidents::<u64>::with_capacity(8);
        let mut used = |request: Option<u64>, depth: u32, inserted| {
            let access = Access {
                now_ms: 0,
                request: request.map(RequestId),
                deepest: BlockId(depth - 1),
                depth,
                inserted,
                path: depth,
                hints: Hints::default(),
            };
            residents.path(&access, &LINE).count()
        };
        assert_eq!([used(Some(1), 3, 0), used(Some(2), 4, 1), used(Some(1), 5, 1)], [3, 4, 1]);
        assert_eq!([used(None, 5, 0), used(None, 6, 1), used(None, 6, 6)], [5, 1, 6]);
    }

    /// Every block is a root; those of odd number are busy.
    struct OddAreBusy;

    impl Forest for OddAreBusy {
        fn standing(&self, block: BlockId) -> Standing {
            if block.0.is_multiple_of(2) { Standing::Evictable } else { Standing::Busy }
        }

        fn parent(&self, _block: BlockId) -> Option<BlockId> {
            None
        }

        fn key(&self, block: BlockId) -> u64 {
            block.0.into()
        }
    }

    proptest! {
        #[test]
        fn the_lowest_evictable_block_is_found(moves in prop::collection::vec((0_u32..12, 0_u32..4), 0..100)) {
            let mut residents = RankedResidents::with_capacity(4);
            let mut expected = BTreeMap::new();
            for (block, step) in moves {
                match step {
                    0 | 1 => {
                        let stamp = residents.stamp();
                        residents.set(BlockId(block), stamp);
                        residents.offer(BlockId(block));
                        expected.insert(block, stamp);
                    }
                    2 => prop_assert_eq!(residents.remove(BlockId(block), None), expected.remove(&block)),
                    _ => residents.offer(BlockId(block)),
                }
                let evictable = expected.iter().filter(|(block, _)| block.is_multiple_of(2));
                let lowest = evictable.min_by_key(|&(_, stamp)| stamp).map(|(&block, _)| BlockId(block));
                prop_assert_eq!(residents.lowest(.., &OddAreBusy), lowest);
                prop_assert!(residents.leaves.len() <= expected.len());
            }
        }
    }
}
