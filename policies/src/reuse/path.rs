//! Radix paths: their segments, how often their blocks were used, and those that have left.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::num::NonZeroU32;

use super::factors::{self, MANY_REUSES, NO_DIVERGENCE};
use crate::gradual::{ShardedMap, mixed};
use crate::seam::BlockId;

/// One radix path among all that are known. It holds the path's number plus one, so that an
/// `Option` of it is not larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PathId(NonZeroU32);

impl PathId {
    pub(crate) const fn new(number: u32) -> Self {
        Self(NonZeroU32::MIN.saturating_add(number))
    }

    pub(crate) const fn number(self) -> u32 {
        self.0.get() - 1
    }
}

/// One request's use among all of which something is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UseId(pub(super) u32);

/// A place in a radix path; depths count from the root of the tree, which has depth 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeId {
    pub(super) path: PathId,
    pub(super) depth: u32,
}

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
        let reuse = factors::reuse_bucket(reuses);
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

    /// The depth and the tag of the first ghost.
    pub(super) fn first_ghost(&self) -> Option<(u32, u32)> {
        let tag = self.names.get(self.resident as usize)?;
        Some((self.start + self.resident, *tag))
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

/// Reuse counts by block, kept as runs of equal ones.
///
/// Uses begin at the root, so counts hardly ever grow with the depth: a path has at most some 30
/// runs, whatever its length, and a use of 65,536 blocks changes a few numbers instead of as many.
#[derive(Debug, Default)]
pub(super) struct ReuseCounts(Vec<CountRun>);

#[derive(Clone, Copy, Debug)]
struct CountRun {
    /// Behind its last block, from the path's first block on.
    end: u32,
    count: u8,
}

impl ReuseCounts {
    fn blocks(&self) -> u32 {
        self.0.last().map_or(0, |run| run.end)
    }

    /// Adds blocks that have not been used again.
    pub(super) fn extend(&mut self, blocks: u32) {
        let end = self.blocks() + blocks;
        match self.0.last_mut() {
            Some(last) if last.count == 0 => last.end = end,
            _ => {
                if self.0.is_empty() {
                    // Most paths have no other: the room for four that a `Vec` takes adds up.
                    self.0.reserve_exact(1);
                }
                self.0.push(CountRun { end, count: 0 });
            }
        }
    }

    /// Keeps the first `blocks` blocks.
    pub(super) fn truncate(&mut self, blocks: u32) {
        let kept = self.split(blocks.min(self.blocks()));
        self.0.truncate(kept);
    }

    /// The blocks from `from` to before `to` were used once more.
    pub(super) fn increment(&mut self, from: u32, to: u32) {
        let (first, last) = (self.split(from), self.split(to));
        for run in &mut self.0[first..last] {
            run.count = (run.count + 1).min(MANY_REUSES);
        }
        // Counts at the cap and the two ends may equal their neighbours now. From behind: a removal
        // moves what follows.
        for below in (first.max(1)..(last + 1).min(self.0.len())).rev() {
            if self.0[below - 1].count == self.0[below].count {
                self.0.remove(below - 1);
            }
        }
    }

    /// The blocks from `from` to before `to` by class of reuse: how many in a row, and the count of
    /// the first.
    pub(super) fn classes(&self, from: u32, to: u32) -> impl Iterator<Item = (u32, u8)> {
        let first = self.0.partition_point(|run| run.end <= from);
        let mut runs = self.0[first..].iter().peekable();
        let mut start = from;
        std::iter::from_fn(move || {
            let first = runs.next().filter(|_| start < to)?;
            let is_akin = |run: &&CountRun| {
                factors::reuse_bucket(run.count) == factors::reuse_bucket(first.count)
            };
            let mut end = first.end;
            while end < to
                && let Some(run) = runs.next_if(is_akin)
            {
                end = run.end;
            }
            let begin = std::mem::replace(&mut start, end.min(to));
            Some((start - begin, first.count))
        })
    }

    /// Makes a run begin at `block`, if any lies there. Returns its index, or how many there are.
    fn split(&mut self, block: u32) -> usize {
        let index = self.0.partition_point(|run| run.end <= block);
        let start = index.checked_sub(1).map_or(0, |before| self.0[before].end);
        if index == self.0.len() || start == block {
            return index;
        }
        self.0.insert(index, CountRun { end: block, count: self.0[index].count });
        index + 1
    }
}

/// How long after their last use blocks that have left are remembered.
// 600 s did as well, 1,800 s was half a point worse over ten cells (docs/policies.md).
pub(super) const GHOST_MS: u64 = 900_000;

/// Ghosts beyond two for each resident block are too many.
const SPARE_GHOSTS: usize = 65_536;

/// How many ghosts there are, and when those of each path are to be forgotten.
#[derive(Debug, Default)]
pub(super) struct PathGhosts {
    /// Where the first one of each path without resident blocks is. Paths with some tell what
    /// follows these.
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
    /// A ghost that is the first one of its path.
    pub(super) fn find(&self, tag: u32) -> Option<NodeId> {
        self.by_tag.get(tag.into()).copied()
    }

    /// One more; `first`: its place if it is the first one of its path.
    pub(super) fn add(&mut self, tag: u32, first: Option<NodeId>) {
        self.count += 1;
        // Another ghost may have the same 32 bits: it is not found any more then, as if it were
        // forgotten.
        first.into_iter().for_each(|node| self.by_tag.insert(tag.into(), node));
    }

    /// Successive blocks came back; the tag of the first if it was the first one of its path.
    pub(super) fn revive(&mut self, blocks: usize, first: Option<u32>) {
        self.count -= blocks;
        first.into_iter().for_each(|tag| _ = self.by_tag.remove(tag.into()));
    }

    /// The ghost at `node` is forgotten. Another one may have its tag by now.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::reuse::hazard::LifeRecord;
    use crate::reuse::uses::RequestUse;

    use super::*;

    /// docs/policies.md states these.
    #[test]
    fn what_is_kept_is_small() {
        assert_eq!(size_of::<BlockId>() + size_of::<Option<PathId>>(), 8, "a resident block");
        assert_eq!(size_of::<PathSegment>(), 20);
        assert!(size_of::<RequestUse>() <= 72, "{}", size_of::<RequestUse>());
        assert!(size_of::<RadixPath>() <= 104, "{}", size_of::<RadixPath>());
        assert_eq!(size_of::<LifeRecord>(), 24);
    }

    proptest! {
        #[test]
        fn agrees_with_a_count_for_each_block(steps in prop::collection::vec((0_u8..4, 0_u32..40, 0_u32..40), 0..200)) {
            let (mut counts, mut model) = (ReuseCounts::default(), Vec::<u8>::new());
            for (step, one, other) in steps {
                let limit = |at: u32| at.min(model.len() as u32);
                let (from, to) = (limit(one.min(other)), limit(one.max(other)));
                match step {
                    0 => {
                        counts.extend(1 + one % 8);
                        model.resize(model.len() + 1 + one as usize % 8, 0);
                    }
                    1 => {
                        counts.truncate(one);
                        model.truncate(one as usize);
                    }
                    _ => {
                        counts.increment(from, to);
                        model[from as usize..to as usize].iter_mut().for_each(|count| *count = (*count + 1).min(MANY_REUSES));
                    }
                }
                prop_assert_eq!(counts.blocks() as usize, model.len());
                prop_assert!(counts.0.windows(2).all(|pair| pair[0].count != pair[1].count && pair[0].end < pair[1].end));
                let (from, to) = (one.min(other).min(counts.blocks()), one.max(other).min(counts.blocks()));
                let expected = model[from as usize..to as usize].chunk_by(|&a, &b| factors::reuse_bucket(a) == factors::reuse_bucket(b));
                let expected: Vec<_> = expected.map(|run| (run.len() as u32, run[0])).collect();
                prop_assert_eq!(counts.classes(from, to).collect::<Vec<_>>(), expected);
            }
        }
    }
}
