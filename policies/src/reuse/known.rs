//! What was used together, and what has become of it.
//!
//! The known blocks, resident ones and ghosts, form a radix tree of [`RadixPath`]s: another path
//! that leaves one begins a path of its own. A use costs time in proportion to the paths and
//! segments that it changes and the blocks that it adds.

use super::LastUse;
use super::factors::{self, ReuseProfile};
use super::hazard::{AgeBucket, LifeRecord};
use super::path::{
    GHOST_MS, GhostExpiry, NodeId, PathGhosts, PathId, PathSegment, RadixPath, UseId, tag,
};
use super::uses::{RequestUse, UseCounts};
use crate::gradual::ChunkedVec;
use crate::seam::{Access, BlockId, Ended, Forest};

/// Ghosts that one call forgets at most, besides two for each block that it adds: some 50 µs. What
/// is left over waits for the next calls, and counts as forgotten until then.
const MAX_FORGOTTEN: usize = 512;

/// How much a chain's latest gap counts in the smoothed one.
// 0.6 did as well within noise (docs/policies.md).
const GAP_WEIGHT: f32 = 0.4;

/// Blocks at the end of a chain that its next request may lack.
// Two instead of one gained 0.2 points over ten cells (docs/policies.md).
const REWRITTEN: u32 = 2;

/// What is known of a resident block.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockState {
    pub(super) profile: ReuseProfile,
    pub(super) age_ms: u64,
    /// The number of the touch that used it last, of all.
    pub(super) touched: u32,
    pub(super) will_not_return: bool,
}

/// What a use changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct TouchedPath {
    /// The path that it left last and the one where it ends: their tails may be others now.
    pub(super) paths: [PathId; 2],
    /// Whether it was a request's first use.
    pub(super) is_new: bool,
}

/// A record that ended by a return.
#[derive(Debug)]
struct ReturningPath {
    /// Which request used it before, and which does now.
    parties: (UseId, UseId),
    blocks: u32,
    record: LifeRecord,
}

/// All known blocks.
#[derive(Debug, Default)]
pub(super) struct KnownBlocks {
    paths: ChunkedVec<RadixPath>,
    free_paths: Vec<PathId>,
    uses: UseCounts,
    /// By block: the path of a resident one.
    home: ChunkedVec<Option<PathId>>,
    ghosts: PathGhosts,
    resident: usize,
    now_ms: u64,
    touches: u32,
    closed: Vec<LifeRecord>,
    /// The latest record that ended by a return: more of it may come.
    returning: Option<ReturningPath>,
    /// Kept for its memory.
    inserted: Vec<BlockId>,
    /// The same.
    gone: Vec<PathSegment>,
}

impl KnownBlocks {
    /// Resident blocks.
    pub(super) fn resident(&self) -> usize {
        self.resident
    }

    /// The records that ended since the last call.
    pub(super) fn take_closed(&mut self) -> impl Iterator<Item = LifeRecord> + '_ {
        self.closed.drain(..)
    }

    /// The record that ended last, by a return of which more may come.
    pub(super) fn returning(&self) -> Option<LifeRecord> {
        self.returning.as_ref().map(|last| last.record)
    }

    /// How many paths there are, those included that are free for use.
    pub(super) fn paths(&self) -> usize {
        self.paths.len()
    }

    /// The records of the `index`-th path that have not ended.
    pub(super) fn open_records(&self, index: usize) -> impl Iterator<Item = LifeRecord> + '_ {
        let path = &self.paths[index];
        let starts =
            std::iter::once(path.start).chain(path.segments.iter().map(|segment| segment.end));
        starts.zip(&path.segments).map(move |(start, segment)| {
            self.record(segment, start, segment.span, self.age_ms(segment), false)
        })
    }

    /// Remembers that the request's path was used, and what of it is new.
    pub(super) fn touch(&mut self, access: &Access, forest: &dyn Forest) -> Option<TouchedPath> {
        self.advance(access.now_ms, MAX_FORGOTTEN + 2 * access.inserted as usize);
        let mut inserted = std::mem::take(&mut self.inserted);
        inserted.clear();
        let upward = std::iter::successors(Some(access.deepest), |&block| forest.parent(block));
        inserted.extend(upward.take(access.inserted as usize));
        let above = match inserted.last() {
            Some(&first) => forest.parent(first),
            None => Some(access.deepest),
        };
        inserted.reverse();
        let touched = self.touch_path(access, above, &inserted, forest);
        self.inserted = inserted;
        touched
    }

    fn touch_path(
        &mut self,
        access: &Access,
        above: Option<BlockId>,
        inserted: &[BlockId],
        forest: &dyn Forest,
    ) -> Option<TouchedPath> {
        let resident = match above {
            Some(block) => {
                Some(self.find(block, access.depth.saturating_sub(access.inserted + 1))?)
            }
            None => None,
        };
        let own = access.request.and_then(|request| self.uses.of(request));
        let (known, revived, returned) = self.revive(resident, inserted, own, forest);
        let inserted = &inserted[revived..];
        let known_depth = known.map_or(0, |node| node.depth + 1);
        let depth = known_depth + inserted.len() as u32;
        let (used, is_new) = self.find_or_add_use(access, resident, known, returned);
        self.touches = self.touches.saturating_add(1);
        let now = self.uses.at_mut(used);
        now.touched = self.touches;
        now.path = now.path.max(access.path).max(depth);
        // What an earlier part of this use has used is not used again.
        let from = now.reached.min(known_depth);
        // Until the end of this call, so that it is not given up in between.
        self.uses.hold(used);
        // Before `append` forks the path: requests that left it earlier are counted, not this one.
        if let Some(node) = known.filter(|_| !inserted.is_empty()) {
            self.diverge(node);
        }
        self.use_again(known, from, used);
        let end = self.append(known, inserted, used);
        let now = self.uses.at_mut(used);
        now.reached = now.reached.max(depth);
        now.end = Some(end);
        self.uses.leave(used);
        let left = known.map_or(end, |node| node.path);
        Some(TouchedPath { paths: [left, end], is_new })
    }

    /// The place of a resident block, which should be at `depth`.
    fn find(&self, block: BlockId, depth: u32) -> Option<NodeId> {
        let id = self.path_of(block)?;
        let path = self.path(id);
        let resident = path.resident_blocks();
        let is_there = |&at: &u32| resident.get(at as usize) == Some(&block.0);
        let guess = depth.checked_sub(path.start).filter(is_there);
        // Owners say the true depth. Without it, as in some tests, it is looked for, from the tail.
        let at = guess.or_else(|| (0..path.resident).rev().find(is_there))?;
        Some(NodeId { path: id, depth: path.start + at })
    }

    /// Makes those ghosts resident that go on from `node` through the first ones of `inserted`.
    /// Returns where they end, how many they are, and how many of them another request than `own`
    /// had used last.
    fn revive(
        &mut self,
        node: Option<NodeId>,
        inserted: &[BlockId],
        own: Option<UseId>,
        forest: &dyn Forest,
    ) -> (Option<NodeId>, usize, u32) {
        let mut known = node;
        let (mut revived, mut returned) = (0, 0);
        while let Some(&block) = inserted.get(revived)
            && let Some((ghost, segment)) = self.ghost_below(known, tag(forest.key(block)))
        {
            let blocks = self.revive_segment(ghost, segment.end, &inserted[revived..], forest);
            // What this request itself used last has left and come back meanwhile: that is no
            // return.
            returned += if own == Some(segment.used) { 0 } else { blocks };
            revived += blocks as usize;
            known = Some(NodeId { depth: ghost.depth + blocks - 1, ..ghost });
        }
        (known, revived, returned)
    }

    /// Makes `ghost` resident, the first of its path's, as the first one of `inserted`; and those
    /// behind it, up to depth `end`, that are next there too. Returns how many.
    fn revive_segment(
        &mut self,
        ghost: NodeId,
        end: u32,
        inserted: &[BlockId],
        forest: &dyn Forest,
    ) -> u32 {
        let path = &mut self.paths[ghost.path.number() as usize];
        let first = path.first_ghost().filter(|_| path.resident == 0);
        let mut blocks = 0;
        for &block in &inserted[..inserted.len().min((end - ghost.depth) as usize)] {
            // The first one's tag has been compared.
            if blocks > 0
                && path.first_ghost() != Some((ghost.depth + blocks, tag(forest.key(block))))
            {
                break;
            }
            path.revive(block);
            *self.home.reach(block.0 as usize, None) = Some(ghost.path);
            blocks += 1;
        }
        self.resident += blocks as usize;
        self.ghosts.revive(blocks as usize, first.map(|(_, tag)| tag));
        blocks
    }

    /// The ghost of this tag that is next below `node`, the first of its path's, and not old enough
    /// to be forgotten; and its segment.
    fn ghost_below(&self, node: Option<NodeId>, tag: u32) -> Option<(NodeId, PathSegment)> {
        let fresh = |ghost: NodeId| {
            let (_, segment) = self.segment(ghost)?;
            (self.age_ms(&segment) <= GHOST_MS).then_some((ghost, segment))
        };
        let below = node.map(|node| NodeId { depth: node.depth + 1, ..node });
        let in_its_path =
            below.filter(|&at| self.path(at.path).first_ghost() == Some((at.depth, tag)));
        let of_another = || self.ghosts.find(tag).filter(|at| self.path(at.path).parent == node);
        in_its_path.and_then(fresh).or_else(|| of_another().and_then(fresh))
    }

    fn place(&mut self, block: BlockId, path: PathId) {
        *self.home.reach(block.0 as usize, None) = Some(path);
        self.resident += 1;
    }

    /// The use that this access is part of, perhaps a new one, and whether it is.
    fn find_or_add_use(
        &mut self,
        access: &Access,
        resident: Option<NodeId>,
        known: Option<NodeId>,
        returned: u32,
    ) -> (UseId, bool) {
        let gap = known.and_then(|node| self.gap(node));
        let earlier = match access.request {
            Some(request) => self.uses.of(request),
            None => resident
                .filter(|_| access.inserted > 0)
                .and_then(|node| self.unnamed_use_ending_at(node)),
        };
        if let Some(id) = earlier {
            let used = self.uses.at_mut(id);
            used.known += returned;
            // Only among what returned: elsewhere a request would find the end of its own use, and
            // no gap.
            gap.filter(|_| returned > 0).into_iter().for_each(|gap| used.learn_gap(gap));
            used.hints.merge(&access.hints);
            if let Some(tokens) = access.hints.expected_output_tokens {
                used.output = factors::output(tokens);
            }
            return (id, false);
        }
        let mut used = RequestUse::new(access, self.now_ms, gap);
        used.known = known.map_or(0, |node| node.depth + 1);
        (self.uses.add(used), true)
    }

    fn unnamed_use_ending_at(&self, node: NodeId) -> Option<UseId> {
        let (_, segment) = self.segment(node)?;
        let used = self.uses.at(segment.used);
        (used.request().is_none() && used.reached == node.depth + 1).then_some(segment.used)
    }

    /// The smoothed gap of the chain that a request continues whose path is known up to `node`: one
    /// that ended there or a little further down, for the last blocks of a prompt may be written
    /// otherwise in the next one.
    fn gap(&self, node: NodeId) -> Option<f32> {
        let below = NodeId { depth: node.depth + 1, ..node };
        let ends = node.depth + 1..=node.depth + 1 + REWRITTEN;
        let of = |at: NodeId| self.segment(at).map(|(_, segment)| *self.uses.at(segment.used));
        let earlier =
            [node, below].into_iter().filter_map(of).find(|used| ends.contains(&used.reached))?;
        let gap = (1.0 + (self.now_ms - earlier.at_ms) as f32 / 1000.0).ln();
        Some(earlier.gap().map_or(gap, |smoothed| GAP_WEIGHT * gap + (1.0 - GAP_WEIGHT) * smoothed))
    }

    /// A request's output is known now. Returns the path where it ended, if that has not been used
    /// since.
    pub(super) fn finished(&mut self, ended: &Ended) -> Option<PathId> {
        self.advance(ended.at_ms, MAX_FORGOTTEN);
        let id = self.uses.end(ended.request)?;
        let used = self.uses.at_mut(id);
        used.output = factors::output(ended.output_tokens);
        used.hints.will_not_return |= ended.will_not_return;
        let end = used.end?;
        self.path(end).segments.iter().any(|segment| segment.used == id).then_some(end)
    }

    /// Ends the records of the path to `node`, from depth `from` on, by a return, and makes what
    /// they spoke of segments of `used`.
    fn use_again(&mut self, node: Option<NodeId>, from: u32, used: UseId) {
        let mut at = node;
        while let Some(NodeId { path, depth }) = at.filter(|node| node.depth >= from) {
            let RadixPath { start, parent, .. } = *self.path(path);
            self.take(path, start.max(from), depth + 1, used);
            at = parent;
            // Here this use leaves the parent's path: what lies further down there is of another
            // kind from now on.
            if let Some(parent) = parent.filter(|parent| parent.depth >= from) {
                self.diverge(parent);
            }
        }
    }

    /// Makes the blocks from depth `from` to before `to` segments of `used`.
    fn take(&mut self, id: PathId, from: u32, to: u32, used: UseId) {
        let (first, last) = (self.split(id, from), self.split(id, to));
        let mut start = from;
        for index in first..last {
            let segment = self.path(id).segments[index];
            if segment.used != used {
                self.close_by_return(&segment, start, used);
                let path = self.path_mut(id);
                path.counts.increment(start - path.start, segment.end - path.start);
            }
            start = segment.end;
        }
        let path = &mut self.paths[id.number() as usize];
        let mut end = from;
        let segments =
            path.counts.classes(from - path.start, to - path.start).map(|(blocks, count)| {
                end += blocks;
                self.uses.hold(used);
                PathSegment::new(end, blocks, used, count)
            });
        // The new ones hold the use before the old ones leave theirs: a use without segments is
        // given up.
        self.gone.extend(path.segments.splice(first..last, segments));
        self.gone.drain(..).for_each(|segment| self.uses.leave(segment.used));
        if let Some(joined) = self.path_mut(id).join(first) {
            self.uses.leave(joined);
        }
    }

    /// Ends a segment's record, which began at depth `start`, because `used` uses it again. Parts
    /// of it that the request uses one after another count as one.
    fn close_by_return(&mut self, segment: &PathSegment, start: u32, used: UseId) {
        let blocks = segment.end - start;
        let parties = (segment.used, used);
        let profile = self.profile(segment, start);
        match &mut self.returning {
            // Records and segments of single blocks cost three points at conversation 5k
            // (docs/policies.md).
            Some(last) if last.parties == parties && last.record.profile.is_akin(profile) => {
                last.blocks += blocks;
                last.record.weight = (last.blocks as f32).sqrt();
            }
            _ => {
                let record = self.record(segment, start, blocks, self.age_ms(segment), true);
                let last = self.returning.replace(ReturningPath { parties, blocks, record });
                self.closed.extend(last.map(|last| last.record));
            }
        }
    }

    /// Makes a segment begin at `depth`, if any lies there. Returns its index, or how many there
    /// are.
    fn split(&mut self, id: PathId, depth: u32) -> usize {
        let (index, cut) = self.path_mut(id).split(depth);
        if let Some(used) = cut {
            self.uses.hold(used);
        }
        index
    }

    /// A request's path leaves that of `node` below it: whatever follows there has another profile
    /// from now on.
    fn diverge(&mut self, node: NodeId) {
        let (id, depth) = (node.path, node.depth + 1);
        let first = self.split(id, depth);
        let branches = self.path(id).forks_at(depth);
        for index in first..self.path(id).segments.len() {
            let path = self.path(id);
            let (start, segment) = (path.segment_start(index), path.segments[index]);
            let divergence = factors::divergence(depth, self.uses.at(segment.used).path, branches);
            if divergence != segment.divergence {
                // Cut off, not ended by a return: under its new profile another record begins at
                // this age.
                let age_ms = self.age_ms(&segment);
                self.closed.push(self.record(&segment, start, segment.span, age_ms, false));
                let segment = &mut self.path_mut(id).segments[index];
                segment.divergence = divergence;
                segment.entry_ms = u32::try_from(age_ms).unwrap_or(u32::MAX);
            }
        }
    }

    /// Adds blocks that were not known below `node`. Returns the path where they end.
    fn append(&mut self, node: Option<NodeId>, inserted: &[BlockId], used: UseId) -> PathId {
        let id = match node {
            Some(node) if inserted.is_empty() || self.path(node.path).end() == node.depth + 1 => {
                node.path
            }
            _ => self.add_path(node),
        };
        if !inserted.is_empty() {
            inserted.iter().for_each(|&block| self.place(block, id));
            self.lengthen(id, inserted, used);
        }
        id
    }

    fn lengthen(&mut self, id: PathId, inserted: &[BlockId], used: UseId) {
        let path = self.path_mut(id);
        path.extend(inserted);
        let (blocks, end) = (inserted.len() as u32, path.end());
        match path.segments.last_mut() {
            Some(last) if last.used == used && last.reuse == 0 => {
                last.end = end;
                last.span += blocks;
            }
            _ => {
                if path.segments.is_empty() {
                    // Most paths have no other.
                    path.segments.reserve_exact(1);
                }
                path.segments.push(PathSegment::new(end, blocks, used, 0));
                self.uses.hold(used);
            }
        }
    }

    fn add_path(&mut self, parent: Option<NodeId>) -> PathId {
        if let Some(node) = parent {
            self.path_mut(node.path).fork(node.depth + 1);
        }
        let id = self.free_paths.pop().unwrap_or_else(|| {
            self.paths.push(RadixPath::default());
            PathId::new(self.paths.len() as u32 - 1)
        });
        let path = self.path_mut(id);
        path.parent = parent;
        path.start = parent.map_or(0, |node| node.depth + 1);
        id
    }

    /// A resident block, which is a leaf and whose content `key` names, became a ghost. Returns the
    /// path whose last resident block is of another segment now.
    pub(super) fn remove(&mut self, block: BlockId, key: u64) -> Option<PathId> {
        let id = self.path_of(block)?;
        self.home[block.0 as usize] = None;
        debug_assert_eq!(self.last_block(id), Some(block), "only leaves leave");
        let (path, tag) = (self.path_mut(id), tag(key));
        path.lose_tail(tag);
        let (depth, is_first) = (path.start + path.resident, path.resident == 0);
        let above = if is_first { path.parent.map(|node| node.path) } else { Some(id) };
        let (start, segment) = self.segment(NodeId { path: id, depth })?;
        let age_ms = self.age_ms(&segment);
        self.resident -= 1;
        self.ghosts.add(tag, is_first.then_some(NodeId { path: id, depth }));
        // Too old for a ghost. Where that is a long tail, `advance` forgets it step by step.
        if age_ms > GHOST_MS && self.path(id).ghosts() as usize <= MAX_FORGOTTEN {
            self.truncate(id, depth, age_ms);
        } else {
            self.expect_expiry(id);
        }
        above.filter(|_| start == depth)
    }

    /// Forgets ghosts that are too old or too many, at most `limit`.
    fn advance(&mut self, now_ms: u64, limit: usize) {
        self.now_ms = self.now_ms.max(now_ms);
        let mut left = limit;
        while left > 0
            && let Some(due) = self.ghosts.next_due(self.now_ms, self.resident)
        {
            // An expiry that no longer stands costs about as much as a ghost.
            left -= 1;
            if self.path(due.path).life == due.life {
                self.path_mut(due.path).expiring = false;
                left = left.saturating_sub(self.expire_tail(due.path, due.due_ms, left));
            }
        }
    }

    /// Forgets the ghosts at the end of a path that one request used last, at most `limit`. Returns
    /// how many.
    fn expire_tail(&mut self, id: PathId, due_ms: u64, limit: usize) -> usize {
        let path = self.path(id);
        let Some(last) = path.segments.last().filter(|_| path.ghosts() > 0) else { return 0 };
        let mut forgotten = 0;
        // Else it was used after it was queued, and its time comes later.
        if self.uses.at(last.used).at_ms + GHOST_MS <= due_ms {
            let first_ghost = path.start + path.resident;
            let start = path.segment_start(path.segments.len() - 1).max(first_ghost);
            let age_ms = self.age_ms(last).min(GHOST_MS);
            let depth = start.max(path.end().saturating_sub(limit.max(1) as u32));
            forgotten = path.end() - depth;
            self.truncate(id, depth, age_ms);
        }
        self.expect_expiry(id);
        forgotten as usize
    }

    fn expect_expiry(&mut self, id: PathId) {
        let path = self.path(id);
        // One entry a path will do: when its time comes, it is looked at anew.
        if path.expiring || path.ghosts() == 0 {
            return;
        }
        if let Some(last) = path.segments.last() {
            let due_ms = self.uses.at(last.used).at_ms + GHOST_MS;
            let expiry = GhostExpiry {
                due_ms,
                start: std::cmp::Reverse(path.start),
                path: id,
                life: path.life,
            };
            self.path_mut(id).expiring = true;
            self.ghosts.expect(expiry);
        }
    }

    /// Forgets the ghosts from `depth` on. Records that lose all their blocks end at `age_ms`.
    fn truncate(&mut self, id: PathId, depth: u32, age_ms: u64) {
        let path = &mut self.paths[id.number() as usize];
        path.counts.truncate(depth - path.start);
        while path.end() > depth {
            let Some(tag) = path.pop_ghost() else { break };
            self.ghosts.forget(tag, NodeId { path: id, depth: path.end() });
        }
        while let Some(&last) = self.path(id).segments.last().filter(|last| last.end > depth) {
            let path = self.path_mut(id);
            let start = path.segment_start(path.segments.len() - 1);
            if start < depth {
                // Its span stays: the record speaks of the forgotten blocks, too.
                path.segments.last_mut().expect("it is not empty").end = depth;
                break;
            }
            path.segments.pop();
            self.closed.push(self.record(&last, start, last.span, age_ms, false));
            self.uses.leave(last.used);
        }
        let path = self.path_mut(id);
        path.drop_forks_below(depth);
        if path.is_empty() {
            path.clear();
            self.free_paths.push(id);
        }
    }

    fn path(&self, id: PathId) -> &RadixPath {
        &self.paths[id.number() as usize]
    }

    fn path_mut(&mut self, id: PathId) -> &mut RadixPath {
        &mut self.paths[id.number() as usize]
    }

    /// Everything that is kept, in entries of any kind.
    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        let paths: usize = self.paths.iter().map(RadixPath::entries).sum();
        paths + self.uses.entries() + self.home.len() + self.ghosts.entries()
    }

    /// What is known of the last resident block of a path.
    pub(super) fn tail(&self, id: PathId) -> Option<BlockState> {
        let path = self.path(id);
        let last = path.resident.checked_sub(1)?;
        self.state_at(NodeId { path: id, depth: path.start + last })
    }

    /// What is known of a resident block, the last one of a path of `depth` blocks.
    pub(super) fn state(&self, block: BlockId, depth: u32) -> Option<BlockState> {
        self.state_at(self.find(block, depth.saturating_sub(1))?)
    }

    /// Which request used a resident block last, the last one of a path of `depth` blocks.
    pub(super) fn last_use(&self, block: BlockId, depth: u32) -> Option<LastUse> {
        let (_, segment) = self.segment(self.find(block, depth.saturating_sub(1))?)?;
        let used = self.uses.at(segment.used);
        Some(LastUse { request: used.request(), hints: used.hints })
    }

    fn state_at(&self, node: NodeId) -> Option<BlockState> {
        let (start, segment) = self.segment(node)?;
        let used = self.uses.at(segment.used);
        Some(BlockState {
            profile: self.profile(&segment, start),
            age_ms: self.age_ms(&segment),
            touched: used.touched,
            will_not_return: used.hints.will_not_return && self.is_below_the_last_fork(node, used),
        })
    }

    /// Whether a use ended in the path of `node`, which no other path leaves from there on: then
    /// only continuations of that request come by.
    fn is_below_the_last_fork(&self, node: NodeId, used: &RequestUse) -> bool {
        used.end == Some(node.path) && node.depth >= self.path(node.path).last_fork()
    }

    /// The last resident block of a path.
    pub(super) fn last_block(&self, id: PathId) -> Option<BlockId> {
        let path = self.path(id);
        path.resident_blocks().last().copied().map(BlockId)
    }

    /// The path of a resident block.
    pub(super) fn path_of(&self, block: BlockId) -> Option<PathId> {
        self.home.get(block.0 as usize).copied().flatten()
    }

    /// The segment at `node`, and where it starts.
    fn segment(&self, node: NodeId) -> Option<(u32, PathSegment)> {
        let path = self.path(node.path);
        let index = path.segment_at(node.depth);
        path.segments.get(index).map(|&segment| (path.segment_start(index), segment))
    }

    fn age_ms(&self, segment: &PathSegment) -> u64 {
        self.now_ms - self.uses.at(segment.used).at_ms
    }

    fn profile(&self, segment: &PathSegment, start: u32) -> ReuseProfile {
        let used = self.uses.at(segment.used);
        let position = factors::position(start, used.path);
        ReuseProfile::new(used.traits(), segment.reuse, position, segment.divergence)
    }

    fn record(
        &self,
        segment: &PathSegment,
        start: u32,
        blocks: u32,
        age_ms: u64,
        returned: bool,
    ) -> LifeRecord {
        LifeRecord {
            profile: self.profile(segment, start),
            returned,
            // Blocks that return together are no independent events. ^0.7 was worse, ^0.35 no
            // better (docs/policies.md).
            weight: (blocks as f32).sqrt(),
            entry: AgeBucket::from_ms(segment.entry_ms.into()),
            exit: AgeBucket::from_ms(age_ms),
        }
    }
}
