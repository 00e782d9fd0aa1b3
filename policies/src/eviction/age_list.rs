//! Blocks in order of age.

use std::fmt;

use crate::chunked::ChunkedVec;
use crate::seam::BlockId;

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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
}
