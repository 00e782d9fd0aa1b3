//! What policies know of the blocks of a tier: of those that are there, with the leaves sorted by
//! rank, their order of age, and what is remembered of those that have left.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{self, Debug};
use std::iter::successors;
use std::ops::RangeBounds;

use lru::LruCache;

use super::Eviction;
use crate::gradual::ChunkedVec;
use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Forest, PREPARED_BLOCKS, RequestId, Standing};

/// What a policy knows of one block.
pub(super) trait RankedLeaves: Debug {
    /// The lowest goes first. No two blocks of a tier share one.
    type Rank: Ord + Copy + Debug;

    fn rank(&self) -> Self::Rank;
}

/// A policy that ranks leaves by what it knows of each block alone.
pub(super) trait RankedPolicy: Send + Debug {
    type Block: RankedLeaves;

    fn blocks(&mut self) -> &mut RankedResidents<Self::Block>;

    /// A request used `block`. It tells each block of its path, from the deepest up.
    fn used(&mut self, block: BlockId, forest: &dyn Forest);

    /// All of the path was told.
    fn path_used(&mut self) {}

    /// `block` left the tier.
    fn left(&mut self, _block: BlockId, _known: Self::Block) {}

    /// The leaf to evict next.
    fn choose(&mut self, forest: &dyn Forest) -> Option<BlockId> {
        self.blocks().lowest(.., forest)
    }
}

impl<P: RankedPolicy> Eviction for P {
    fn touch(&mut self, access: &Access, forest: &dyn Forest, _reuse: &ReuseModel) {
        for block in self.blocks().path(access, forest) {
            self.used(block, forest);
        }
        self.path_used();
        self.blocks().offer(access.deepest);
    }

    fn removed(&mut self, block: BlockId, exposed: Option<BlockId>, _reuse: &ReuseModel) {
        if let Some(known) = self.blocks().remove(block, exposed) {
            self.left(block, known);
        }
    }

    fn victim(&mut self, forest: &dyn Forest, _reuse: &ReuseModel) -> Option<BlockId> {
        self.choose(forest)
    }

    fn released(&mut self, block: BlockId, _reuse: &ReuseModel) {
        self.blocks().offer(block);
    }
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
        let resident = ResidentBlock { state, is_sorted: false };
        let old = block.entry(&mut self.blocks).replace(resident);
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

/// A doubly linked ring of blocks from oldest to newest, indexed by block id. Every operation is
/// O(1), a block costs 8 bytes.
pub(super) struct AgeList {
    /// `links[0]` is the ring's joint: its `newer` is the oldest block and its `older` the newest
    /// one. Block `b` is at `b + 1`.
    links: ChunkedVec<AgeLink>,
}

#[derive(Clone, Copy)]
struct AgeLink {
    older: u32,
    newer: u32,
}

// It stands at both ends: no link has to ask whether it is the first or the last.
const JOINT: u32 = 0;
const UNLINKED: AgeLink = AgeLink { older: u32::MAX, newer: u32::MAX };

impl AgeList {
    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.links.get(position(block) as usize).is_some_and(|link| link.newer != UNLINKED.newer)
    }

    pub(super) fn oldest(&self) -> Option<BlockId> {
        self.links[JOINT as usize].newer.checked_sub(1).map(BlockId)
    }

    pub(super) fn push_oldest(&mut self, block: BlockId) {
        self.link(JOINT, position(block));
    }

    pub(super) fn push_newest(&mut self, block: BlockId) {
        self.link(self.links[JOINT as usize].older, position(block));
    }

    /// Links `block` as the one just younger than `older`, which is linked.
    pub(super) fn insert_after(&mut self, older: BlockId, block: BlockId) {
        self.link(position(older), position(block));
    }

    /// Does nothing where `block` is not linked.
    pub(super) fn unlink(&mut self, block: BlockId) {
        if self.contains(block) {
            let at = position(block) as usize;
            let AgeLink { older, newer } = std::mem::replace(&mut self.links[at], UNLINKED);
            self.links[older as usize].newer = newer;
            self.links[newer as usize].older = older;
        }
    }

    /// Links position `at`, which is not linked, just after `older`.
    fn link(&mut self, older: u32, at: u32) {
        let newer = std::mem::replace(&mut self.links[older as usize].newer, at);
        *self.links.reach(at as usize, UNLINKED) = AgeLink { older, newer };
        self.links[newer as usize].older = at;
    }
}

fn position(block: BlockId) -> u32 {
    block.0 + 1
}

impl Default for AgeList {
    fn default() -> Self {
        let mut links = ChunkedVec::default();
        links.push(AgeLink { older: JOINT, newer: JOINT });
        Self { links }
    }
}

impl fmt::Debug for AgeList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgeList").field("oldest", &self.oldest()).finish_non_exhaustive()
    }
}

/// As many ghosts for each block of the tier serve the policies that measure long gaps: with fewer
/// they lose a point or more where the tier is small, with more they gain nothing.
pub(super) const GHOSTS_PER_BLOCK: usize = 4;

/// Blocks that have left, by content, the first to leave forgotten first. 50 to 90 bytes each, by
/// `V`.
///
/// Without a bound of its own: `arc` and `s3fifo` move theirs with every use.
#[derive(Debug)]
pub(super) struct EvictedGhosts<V>(LruCache<u64, V>);

impl<V> EvictedGhosts<V> {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Remembers `memory` of the block of content `key`, which left just now.
    pub(super) fn insert(&mut self, key: u64, memory: V) {
        self.0.put(key, memory);
    }

    /// Forgets the block of content `key`, which is back. Returns what was remembered.
    pub(super) fn take(&mut self, key: u64) -> Option<V> {
        self.0.pop(&key)
    }

    /// Forgets the oldest, so that no more than `len` remain.
    pub(super) fn truncate(&mut self, len: usize) {
        while self.0.len() > len {
            self.0.pop_lru();
        }
    }
}

impl<V> Default for EvictedGhosts<V> {
    fn default() -> Self {
        Self(LruCache::unbounded())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use crate::seam::Hints;
    use crate::testing::Line;

    use super::*;

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

    fn drain(list: &mut AgeList) -> Vec<u32> {
        std::iter::from_fn(|| {
            let block = list.oldest()?;
            list.unlink(block);
            Some(block.0)
        })
        .collect()
    }

    proptest! {
        #[test]
        fn the_list_behaves_like_a_vec(moves in prop::collection::vec((0_u32..12, 0_u32..3), 0..60)) {
            let mut list = AgeList::default();
            let mut expected = Vec::new();
            for (block, end) in moves {
                prop_assert_eq!(list.contains(BlockId(block)), expected.contains(&block));
                list.unlink(BlockId(block));
                expected.retain(|&other| other != block);
                match end {
                    0 => {
                        list.push_oldest(BlockId(block));
                        expected.insert(0, block);
                    }
                    1 => {
                        list.push_newest(BlockId(block));
                        expected.push(block);
                    }
                    _ => {}
                }
            }
            prop_assert_eq!(drain(&mut list), expected);
        }
    }

    #[test]
    fn a_block_inserted_after_another_leaves_right_after_it() {
        let mut list = AgeList::default();
        list.push_newest(BlockId(0));
        list.push_newest(BlockId(1));
        list.insert_after(BlockId(0), BlockId(2));
        assert_eq!(drain(&mut list), [0, 2, 1]);
    }

    #[test]
    fn a_block_costs_eight_bytes() {
        assert_eq!(size_of::<AgeLink>(), 8);
    }

    proptest! {
        #[test]
        fn ghosts_behave_like_a_vec(moves in prop::collection::vec((0_u64..12, any::<bool>()), 0..300)) {
            let mut ghosts = EvictedGhosts::default();
            let mut expected: Vec<(u64, usize)> = Vec::new();
            for (now, (key, leaves)) in moves.into_iter().enumerate() {
                let known = expected.iter().position(|&(other, _)| other == key).map(|at| expected.remove(at).1);
                if leaves {
                    ghosts.insert(key, now);
                    expected.push((key, now));
                } else {
                    prop_assert_eq!(ghosts.take(key), known);
                }
                ghosts.truncate(8);
                expected.drain(..expected.len().saturating_sub(8));
                prop_assert_eq!(ghosts.len(), expected.len());
            }
            for (key, now) in expected {
                prop_assert_eq!(ghosts.take(key), Some(now));
            }
        }
    }
}
