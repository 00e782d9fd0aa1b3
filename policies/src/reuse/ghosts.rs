//! Blocks that have left and may return.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::ids::{NodeId, PathId};
use super::sharded::{ShardedMap, mixed};

/// How long after their last use blocks that have left are remembered.
// 600 s did as well, 1,800 s was half a point worse over ten cells (docs/policies.md).
pub(super) const GHOST_MS: u64 = 900_000;

/// Ghosts beyond two for each resident block are too many.
const SPARE_GHOSTS: usize = 65_536;

/// Where each ghost is known, and when those of each path are to be forgotten.
#[derive(Debug, Default)]
pub(super) struct PathGhosts {
    by_tag: ShardedMap<NodeId>,
    count: usize,
    /// The paths that end in ghosts.
    expiries: BinaryHeap<Reverse<GhostExpiry>>,
}

/// When the last ghosts of a path are to be forgotten. Of equals, the path that begins deepest
/// comes first: no block is forgotten before those below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GhostExpiry {
    pub(super) due_ms: u64,
    pub(super) start: Reverse<u32>,
    pub(super) path: PathId,
    pub(super) life: u32,
}

impl PathGhosts {
    pub(super) fn find(&self, tag: u32) -> Option<NodeId> {
        self.by_tag.get(tag.into()).copied()
    }

    pub(super) fn add(&mut self, tag: u32, node: NodeId) {
        self.count += 1;
        // Another ghost may have the same 32 bits: it is not found any more then, as if it were
        // forgotten.
        self.by_tag.insert(tag.into(), node);
    }

    /// The block came back.
    pub(super) fn revive(&mut self, tag: u32) {
        self.count -= 1;
        self.by_tag.remove(tag.into());
    }

    /// The ghost at `node` is forgotten. Another block may have its tag by now.
    pub(super) fn forget(&mut self, tag: u32, node: NodeId) {
        self.count -= 1;
        if self.find(tag) == Some(node) {
            self.by_tag.remove(tag.into());
        }
    }

    pub(super) fn expect(&mut self, expiry: GhostExpiry) {
        self.expiries.push(Reverse(expiry));
    }

    /// What is to be forgotten next, if that is due: it is too old, or beside `resident` blocks
    /// there are too many.
    pub(super) fn next_due(&mut self, now_ms: u64, resident: usize) -> Option<GhostExpiry> {
        let too_many = self.count > SPARE_GHOSTS + 2 * resident;
        self.expiries.peek().filter(|next| too_many || next.0.due_ms < now_ms)?;
        self.expiries.pop().map(|Reverse(next)| next)
    }

    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        self.by_tag.len() + self.expiries.len()
    }
}

/// A short name for a block's content.
pub(super) const fn tag(key: u64) -> u32 {
    (mixed(key) >> 32) as u32
}
