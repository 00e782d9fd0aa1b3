//! Radix paths: blocks one below another that were first seen so.

use std::collections::BTreeMap;

use super::counts::ReuseCounts;
use super::factors::{self, NO_DIVERGENCE};
use super::ids::{NodeId, UseId};
use crate::seam::BlockId;

/// A run of blocks each of which was first seen below the one before it. Resident blocks come
/// first, then ghosts.
#[derive(Debug, Default)]
pub(super) struct RadixPath {
    /// The block above the first one.
    pub(super) parent: Option<NodeId>,
    /// The first one's depth.
    pub(super) start: u32,
    /// Of a resident block its id, of a ghost the tag of its content.
    names: Vec<u32>,
    pub(super) counts: ReuseCounts,
    /// How many of the blocks are resident.
    pub(super) resident: u32,
    pub(super) segments: Vec<PathSegment>,
    /// At which depths other paths began below this one, and how many. Below most none does.
    #[expect(
        clippy::box_collection,
        reason = "8 bytes instead of 24 where there are none, as nearly everywhere"
    )]
    forks: Option<Box<BTreeMap<u32, u32>>>,
    /// Whether the queue of ghosts has it.
    pub(super) expiring: bool,
    /// Tells the paths that had this id one after another apart.
    pub(super) life: u32,
}

/// The part of a radix path that one request used last and whose blocks were used again equally
/// often (by class).
///
/// The further down a path, the longer ago was the last use and the fewer were the uses, so a path
/// has few segments and a use changes them from the head on.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathSegment {
    /// The depth behind its last block.
    pub(super) end: u32,
    /// How many blocks its record speaks of: those that it has, and ghosts that are forgotten.
    pub(super) span: u32,
    pub(super) used: UseId,
    /// The age since when it has had its present profile, in milliseconds.
    pub(super) entry_ms: u32,
    pub(super) reuse: u8,
    pub(super) divergence: u8,
}

impl PathSegment {
    pub(super) fn new(end: u32, blocks: u32, used: UseId, reuses: u8) -> Self {
        let reuse = factors::reuse(reuses);
        Self { end, span: blocks, used, entry_ms: 0, reuse, divergence: NO_DIVERGENCE }
    }

    fn is_alike(&self, other: &Self) -> bool {
        let traits = |of: &Self| (of.used, of.reuse, of.divergence, of.entry_ms);
        traits(self) == traits(other)
    }
}

impl RadixPath {
    pub(super) fn end(&self) -> u32 {
        self.start + self.names.len() as u32
    }

    /// Whether nothing is known of it any more.
    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    pub(super) fn ghosts(&self) -> u32 {
        self.names.len() as u32 - self.resident
    }

    /// The ids of its resident blocks.
    pub(super) fn resident_blocks(&self) -> &[u32] {
        &self.names[..self.resident as usize]
    }

    /// Adds resident blocks. None of the others is a ghost.
    pub(super) fn extend(&mut self, blocks: &[BlockId]) {
        self.names.extend(blocks.iter().map(|block| block.0));
        self.resident += blocks.len() as u32;
        self.counts.extend(blocks.len() as u32);
    }

    /// The first ghost is resident again, as `block`.
    pub(super) fn revive(&mut self, block: BlockId) {
        self.names[self.resident as usize] = block.0;
        self.resident += 1;
    }

    /// The last resident block is a ghost from now on.
    pub(super) fn lose_tail(&mut self, tag: u32) {
        self.resident -= 1;
        self.names[self.resident as usize] = tag;
    }

    /// Forgets the last ghost. Returns its tag.
    pub(super) fn pop_ghost(&mut self) -> Option<u32> {
        if self.ghosts() == 0 { None } else { self.names.pop() }
    }

    /// Where the `index`-th segment begins.
    pub(super) fn segment_start(&self, index: usize) -> u32 {
        index.checked_sub(1).map_or(self.start, |before| self.segments[before].end)
    }

    /// The index of the segment at `depth`.
    pub(super) fn segment_at(&self, depth: u32) -> usize {
        self.segments.partition_point(|segment| segment.end <= depth)
    }

    /// Makes a segment begin at `depth`, if any lies there. Returns its index, or how many there
    /// are, and whose segment was cut in two.
    pub(super) fn split(&mut self, depth: u32) -> (usize, Option<UseId>) {
        let index = self.segment_at(depth);
        let start = self.segment_start(index);
        if index == self.segments.len() || start >= depth {
            return (index, None);
        }
        let rest = &mut self.segments[index];
        let head = PathSegment { end: depth, span: depth - start, ..*rest };
        // Ghosts that were forgotten were the last ones, so it is the rest that speaks of them.
        rest.span = rest.span.saturating_sub(head.span).max(1);
        self.segments.insert(index, head);
        (index + 1, Some(head.used))
    }

    /// Makes one of the `index`-th segment and the one before it, if one request used them last and
    /// nothing else tells them apart: parts of a path that it used one after another. Returns whose
    /// it was.
    pub(super) fn join(&mut self, index: usize) -> Option<UseId> {
        let [above, below] = self.segments.get_mut(index.checked_sub(1)?..=index)? else {
            return None;
        };
        if !above.is_alike(below) {
            return None;
        }
        above.end = below.end;
        above.span += below.span;
        Some(self.segments.remove(index).used)
    }

    /// Nothing is known of it any more; its id may serve another.
    pub(super) fn clear(&mut self) {
        *self = Self { life: self.life + 1, ..Self::default() };
    }

    /// How many other paths began at `depth`.
    pub(super) fn forks_at(&self, depth: u32) -> u32 {
        self.forks.as_ref().and_then(|forks| forks.get(&depth)).copied().unwrap_or(0)
    }

    pub(super) fn fork(&mut self, depth: u32) {
        *self.forks.get_or_insert_default().entry(depth).or_default() += 1;
    }

    /// The depth from which on no other path leaves this one.
    pub(super) fn last_fork(&self) -> u32 {
        let last = self.forks.as_ref().and_then(|forks| forks.last_key_value());
        last.map_or(self.start, |(&depth, _)| depth)
    }

    /// Forgets which paths began further down than `depth`.
    pub(super) fn drop_forks_below(&mut self, depth: u32) {
        let Some(forks) = &mut self.forks else { return };
        while let Some(last) = forks.last_entry().filter(|last| *last.key() > depth) {
            last.remove();
        }
    }

    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        1 + self.names.len()
            + self.segments.len()
            + self.forks.as_ref().map_or(0, |forks| forks.len())
    }
}

#[cfg(test)]
mod tests {
    use super::super::fit::LifeRecord;
    use super::super::ids::PathId;
    use super::super::uses::RequestUse;
    use super::*;

    /// docs/policies.md states these.
    #[test]
    fn what_is_kept_is_small() {
        assert_eq!(size_of::<BlockId>() + size_of::<PathId>(), 8, "a resident block");
        assert_eq!(size_of::<PathSegment>(), 20);
        assert!(size_of::<RequestUse>() <= 72, "{}", size_of::<RequestUse>());
        assert!(size_of::<RadixPath>() <= 112, "{}", size_of::<RadixPath>());
        assert_eq!(size_of::<LifeRecord>(), 24);
    }
}
