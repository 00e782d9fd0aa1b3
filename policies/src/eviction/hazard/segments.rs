//! What was used together, and what has become of it.
//!
//! The known blocks (resident ones and ghosts) form *strands*: runs of blocks each of which was first seen
//! below the one before it. Another path that leaves a strand begins a strand of its own. In a strand the
//! resident blocks come first, then the ghosts. A *segment* is the part of a strand that one request used
//! last and whose blocks were used again equally often (by bucket). The further down a strand, the longer ago
//! was the last use and the fewer were the uses, so a strand has few segments and a use changes them from
//! the head on.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::super::{Access, BlockId, Forest, PREPARED_BLOCKS, RequestId};
use super::factors::{self, MANY_REUSES, Profile, Traits, UNPARTED};
use super::fit::{Age, Record};

/// Blocks that have left are remembered until so long after their last use.
pub(crate) const GHOST_MS: u64 = 900_000;

/// Ghosts beyond two for each resident block are too many.
const GHOSTS: usize = 65_536;

/// How much a chain's latest gap counts in the smoothed one.
const GAP_WEIGHT: f32 = 0.4;

/// Blocks at the end of a chain that its next request may lack.
const REWRITTEN: u32 = 2;

const NOWHERE: u32 = u32::MAX;

/// A run of blocks below one another.
pub(super) type StrandId = u32;
type VisitId = u32;

/// A place in a strand; depths count from the root of the tree, which has depth 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    strand: StrandId,
    depth: u32,
}

#[derive(Debug, Default)]
struct Strand {
    /// The block above the first one.
    parent: Option<Node>,
    /// The first one's depth.
    start: u32,
    cells: Vec<Cell>,
    /// By block: how often it was used again. Never grows with the depth.
    reuses: Vec<u8>,
    /// How many of the blocks are resident.
    resident: u32,
    segments: Vec<Segment>,
    /// At which depths other paths began below this strand, and how many.
    forks: Vec<(u32, u32)>,
    /// Whether the queue of ghosts has it.
    expiring: bool,
    /// Tells the strands that had this id one after another apart.
    life: u32,
}

#[derive(Clone, Copy, Debug)]
struct Cell {
    block: BlockId,
    /// Of the block's content.
    tag: u32,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    /// The depth behind its last block.
    end: u32,
    /// How many blocks its record speaks of: those that it has, and ghosts that are forgotten.
    span: u32,
    visit: VisitId,
    /// The age since when it has had its present profile, in milliseconds.
    entry_ms: u32,
    reuse: u8,
    parting: u8,
}

/// One request's use, for as long as a segment of it is left.
#[derive(Clone, Copy, Debug)]
struct Visit {
    at_ms: u64,
    request: Option<RequestId>,
    /// Smoothed ln(1 + seconds) between its chain's requests.
    gap: Option<f32>,
    /// Blocks of its path that were known before.
    known: u32,
    path: u32,
    /// Blocks that it used so far.
    reached: u32,
    output: u8,
    will_not_return: bool,
    segments: u32,
    /// The strand where its path ended.
    end: StrandId,
}

impl Visit {
    fn traits(&self) -> Traits {
        Traits {
            output: self.output,
            // A block that leaves and comes back while its request goes on was known twice.
            fresh: factors::size(self.path.saturating_sub(self.known)),
            path: factors::size(self.path),
            gap: factors::gap(self.gap),
        }
    }
}

/// When the last ghosts of a strand are to be forgotten. Of equals, the strand that begins deepest comes first:
/// no block is forgotten before those below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Expiry {
    due_ms: u64,
    start: Reverse<u32>,
    strand: StrandId,
    life: u32,
}

/// What is known of a resident block.
#[derive(Clone, Copy, Debug)]
pub(super) struct State {
    pub(super) profile: Profile,
    pub(super) age_ms: u64,
    pub(super) will_not_return: bool,
}

/// What a use changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touched {
    /// The strand where the path ends, and the one that it left last: their tails may be others now.
    pub(super) strands: [StrandId; 2],
    /// Whether it was a request's first use.
    pub(super) is_new: bool,
}

/// A record that ended by a return.
#[derive(Debug)]
struct Returning {
    /// Who used it before, and who does now.
    parties: (VisitId, VisitId),
    blocks: u32,
    record: Record,
}

/// All known blocks.
#[derive(Debug, Default)]
pub(super) struct Segments {
    strands: Vec<Strand>,
    free_strands: Vec<StrandId>,
    visits: Vec<Visit>,
    free_visits: Vec<VisitId>,
    requests: HashMap<RequestId, VisitId>,
    /// By resident block: its strand.
    home: Vec<StrandId>,
    ghosts: HashMap<u32, Node>,
    resident: usize,
    ghost_count: usize,
    /// The strands that end in ghosts.
    expiries: BinaryHeap<Reverse<Expiry>>,
    now_ms: u64,
    closed: Vec<Record>,
    /// The latest record that ended by a return: more of it may come.
    returning: Option<Returning>,
    inserted: Vec<BlockId>,
}

impl Segments {
    pub(super) fn with_capacity(capacity: u32) -> Self {
        Self { home: Vec::with_capacity(capacity.min(PREPARED_BLOCKS) as usize), ..Self::default() }
    }

    /// Resident blocks.
    pub(super) fn resident(&self) -> usize {
        self.resident
    }

    /// The records that ended since the last call.
    pub(super) fn take_closed(&mut self) -> impl Iterator<Item = Record> + '_ {
        self.closed.drain(..)
    }

    /// The record that ended last, by a return of which more may come.
    pub(super) fn returning(&self) -> Option<Record> {
        self.returning.as_ref().map(|last| last.record)
    }

    /// The records that have not ended.
    pub(super) fn open_records(&self) -> impl Iterator<Item = Record> + '_ {
        self.strands.iter().flat_map(move |strand| {
            let starts =
                std::iter::once(strand.start).chain(strand.segments.iter().map(|segment| segment.end));
            starts.zip(&strand.segments).map(move |(start, segment)| {
                self.record(segment, start, segment.span, self.age_ms(segment), false)
            })
        })
    }

    /// Remembers that the request's path was used, and what of it is new.
    pub(super) fn touch(&mut self, access: &Access, forest: &dyn Forest) -> Option<Touched> {
        self.advance(access.now_ms);
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
    ) -> Option<Touched> {
        let resident = match above {
            Some(block) => Some(self.find(block, access.depth.saturating_sub(access.inserted + 1))?),
            None => None,
        };
        let own = access.request.and_then(|request| self.requests.get(&request).copied());
        let (known, revived, returned) = self.revive(resident, inserted, own, forest);
        let inserted = &inserted[revived..];
        let known_depth = known.map_or(0, |node| node.depth + 1);
        let depth = known_depth + inserted.len() as u32;
        let (visit, is_new) = self.visit(access, resident, known, returned);
        self.visits[visit as usize].path = self.visits[visit as usize].path.max(access.path).max(depth);
        let from = self.visits[visit as usize].reached.min(known_depth);
        self.visits[visit as usize].segments += 1;
        if let Some(node) = known.filter(|_| !inserted.is_empty()) {
            self.leave(node);
        }
        self.use_again(known, from, visit);
        let end = self.append(known, inserted, visit, forest);
        let reached = self.visits[visit as usize].reached.max(depth);
        self.visits[visit as usize].reached = reached;
        self.visits[visit as usize].end = end;
        self.leave_visit(visit);
        let left = known.map_or(end, |node| node.strand);
        Some(Touched { strands: [left, end], is_new })
    }

    /// The place of a resident block, which should be at `depth`.
    fn find(&self, block: BlockId, depth: u32) -> Option<Node> {
        let id = *self.home.get(block.0 as usize).filter(|&&id| id != NOWHERE)?;
        let strand = &self.strands[id as usize];
        let is_there = |&at: &u32| strand.cells.get(at as usize).is_some_and(|cell| cell.block == block);
        let guess = depth.checked_sub(strand.start).filter(|at| *at < strand.resident).filter(is_there);
        let at = guess.or_else(|| (0..strand.resident).rev().find(is_there))?;
        Some(Node { strand: id, depth: strand.start + at })
    }

    /// Makes those ghosts resident that go on from `node` through the first ones of `inserted`. Answers where
    /// they end, how many they are, and how many of them somebody else than `own` had used last.
    fn revive(
        &mut self,
        node: Option<Node>,
        inserted: &[BlockId],
        own: Option<VisitId>,
        forest: &dyn Forest,
    ) -> (Option<Node>, usize, u32) {
        let mut known = node;
        let mut returned = 0;
        for (revived, &block) in inserted.iter().enumerate() {
            let tag = tag(forest.key(block));
            let Some(ghost) = self.ghosts.get(&tag).copied().filter(|&ghost| self.follows(known, ghost))
            else {
                return (known, revived, returned);
            };
            let last = self.segment(ghost).map(|(_, segment)| segment.visit);
            returned += u32::from(last != own || own.is_none());
            self.ghosts.remove(&tag);
            self.ghost_count -= 1;
            let strand = &mut self.strands[ghost.strand as usize];
            strand.cells[strand.resident as usize].block = block;
            strand.resident += 1;
            self.settle(block, ghost.strand);
            known = Some(ghost);
        }
        (known, inserted.len(), returned)
    }

    /// Whether `ghost` is the first ghost of its strand and next below `node`.
    fn follows(&self, node: Option<Node>, ghost: Node) -> bool {
        let strand = &self.strands[ghost.strand as usize];
        let above = match strand.resident {
            0 => strand.parent,
            _ => Some(Node { strand: ghost.strand, depth: ghost.depth - 1 }),
        };
        strand.start + strand.resident == ghost.depth && above == node
    }

    fn settle(&mut self, block: BlockId, strand: StrandId) {
        let at = block.0 as usize;
        if self.home.len() <= at {
            self.home.resize(at + 1, NOWHERE);
        }
        self.home[at] = strand;
        self.resident += 1;
    }

    /// The visit that this use is part of, perhaps a new one, and whether it is.
    fn visit(
        &mut self,
        access: &Access,
        resident: Option<Node>,
        known: Option<Node>,
        returned: u32,
    ) -> (VisitId, bool) {
        let gap = known.and_then(|node| self.gap(node));
        let earlier = match access.request {
            Some(request) => self.requests.get(&request).copied(),
            None => {
                resident.filter(|_| access.inserted > 0).and_then(|node| self.unnamed_visit_ending_at(node))
            }
        };
        if let Some(id) = earlier {
            let visit = &mut self.visits[id as usize];
            visit.known += returned;
            visit.gap = visit.gap.or(gap.filter(|_| returned > 0));
            return (id, false);
        }
        let visit = Visit {
            at_ms: self.now_ms,
            request: access.request,
            gap,
            known: known.map_or(0, |node| node.depth + 1),
            path: 0,
            reached: 0,
            output: access.hints.expected_output_tokens.map_or(factors::UNKNOWN_OUTPUT, factors::output),
            will_not_return: access.hints.will_not_return,
            segments: 0,
            end: NOWHERE,
        };
        (self.add_visit(visit), true)
    }

    fn unnamed_visit_ending_at(&self, node: Node) -> Option<VisitId> {
        let (_, segment) = self.segment(node)?;
        let visit = &self.visits[segment.visit as usize];
        (visit.request.is_none() && visit.reached == node.depth + 1).then_some(segment.visit)
    }

    /// The smoothed gap of the chain that a request continues whose path is known up to `node`: one that
    /// ended there or a little further down, for the last blocks of a prompt may be written otherwise in the
    /// next one.
    fn gap(&self, node: Node) -> Option<f32> {
        let below = Node { depth: node.depth + 1, ..node };
        let ends = node.depth + 1..=node.depth + 1 + REWRITTEN;
        let of = |at: Node| self.segment(at).map(|(_, segment)| self.visits[segment.visit as usize]);
        let earlier = [node, below].into_iter().filter_map(of).find(|visit| ends.contains(&visit.reached))?;
        let gap = (1.0 + (self.now_ms - earlier.at_ms) as f32 / 1000.0).ln();
        Some(earlier.gap.map_or(gap, |smoothed| GAP_WEIGHT * gap + (1.0 - GAP_WEIGHT) * smoothed))
    }

    fn add_visit(&mut self, visit: Visit) -> VisitId {
        let id = self.free_visits.pop().unwrap_or_else(|| {
            self.visits.push(visit);
            self.visits.len() as u32 - 1
        });
        self.visits[id as usize] = visit;
        if let Some(request) = visit.request {
            self.requests.insert(request, id);
        }
        id
    }

    /// A segment of the visit is gone.
    fn leave_visit(&mut self, id: VisitId) {
        let visit = &mut self.visits[id as usize];
        visit.segments -= 1;
        if visit.segments == 0 {
            if let Some(request) = visit.request.filter(|request| self.requests.get(request) == Some(&id)) {
                self.requests.remove(&request);
            }
            self.free_visits.push(id);
        }
    }

    /// The request's output is known to have this length. Answers the strand where its path ended, if that
    /// has not been used since.
    pub(super) fn finished(
        &mut self,
        request: RequestId,
        output_tokens: u32,
        now_ms: u64,
    ) -> Option<StrandId> {
        self.advance(now_ms);
        let id = self.requests.remove(&request)?;
        let visit = &mut self.visits[id as usize];
        visit.output = factors::output(output_tokens);
        let end = visit.end;
        self.strands[end as usize].segments.iter().any(|segment| segment.visit == id).then_some(end)
    }

    /// Ends the records of the path to `node`, from depth `from` on, by a return, and makes what they spoke
    /// of segments of `visit`.
    fn use_again(&mut self, node: Option<Node>, from: u32, visit: VisitId) {
        let mut at = node;
        while let Some(Node { strand, depth }) = at.filter(|node| node.depth >= from) {
            let Strand { start, parent, .. } = self.strands[strand as usize];
            self.take(strand, start.max(from), depth + 1, visit);
            at = parent;
            if let Some(parent) = parent.filter(|parent| parent.depth >= from) {
                self.leave(parent);
            }
        }
    }

    /// Makes the blocks from depth `from` to before `to` segments of `visit`.
    fn take(&mut self, id: StrandId, from: u32, to: u32, visit: VisitId) {
        let (first, last) = (self.split(id, from), self.split(id, to));
        let mut start = from;
        for index in first..last {
            let segment = self.strands[id as usize].segments[index];
            if segment.visit != visit {
                self.close_by_return(&segment, start, visit);
                let strand = &mut self.strands[id as usize];
                let cells = (start - strand.start) as usize..(segment.end - strand.start) as usize;
                strand.reuses[cells].iter_mut().for_each(|count| *count = (*count + 1).min(MANY_REUSES));
            }
            start = segment.end;
        }
        let strand = &mut self.strands[id as usize];
        let counts = &strand.reuses[(from - strand.start) as usize..(to - strand.start) as usize];
        let mut start = from;
        let segments =
            counts.chunk_by(|&one, &next| factors::reuse(one) == factors::reuse(next)).map(|run| {
                start += run.len() as u32;
                Segment::new(start, run.len() as u32, visit, run[0])
            });
        let segments: Vec<_> = segments.collect();
        self.visits[visit as usize].segments += segments.len() as u32;
        let gone: Vec<_> = strand.segments.splice(first..last, segments).collect();
        gone.into_iter().for_each(|segment| self.leave_visit(segment.visit));
        self.join(id, first);
    }

    /// Ends a segment's record, which began at depth `start`, because `visit` uses it again. Parts of it that the
    /// visit uses one after another count as one.
    fn close_by_return(&mut self, segment: &Segment, start: u32, visit: VisitId) {
        let blocks = segment.end - start;
        let parties = (segment.visit, visit);
        let profile = self.profile(segment, start);
        match &mut self.returning {
            Some(last) if last.parties == parties && last.record.profile.is_akin(profile) => {
                last.blocks += blocks;
                last.record.weight = (last.blocks as f32).sqrt();
            }
            _ => {
                let record = self.record(segment, start, blocks, self.age_ms(segment), true);
                let last = self.returning.replace(Returning { parties, blocks, record });
                self.closed.extend(last.map(|last| last.record));
            }
        }
    }

    /// Makes one of the `index`-th segment and the one before it, if one request used them last and nothing else
    /// tells them apart: parts of a path that it used one after another.
    fn join(&mut self, id: StrandId, index: usize) {
        let segments = &mut self.strands[id as usize].segments;
        let Some([above, below]) = index.checked_sub(1).and_then(|above| segments.get_mut(above..=index))
        else {
            return;
        };
        let alike = |of: &Segment| (of.visit, of.reuse, of.parting, of.entry_ms);
        if alike(above) == alike(below) {
            above.end = below.end;
            above.span += below.span;
            let visit = segments.remove(index).visit;
            self.leave_visit(visit);
        }
    }

    /// Makes a segment begin at `depth`, if any lies there. Answers its index, or how many there are.
    fn split(&mut self, id: StrandId, depth: u32) -> usize {
        let strand = &mut self.strands[id as usize];
        let index = strand.segments.partition_point(|segment| segment.end <= depth);
        let start = strand.segment_start(index);
        if index == strand.segments.len() || start >= depth {
            return index;
        }
        let rest = &mut strand.segments[index];
        let head = Segment { end: depth, span: depth - start, ..*rest };
        rest.span = rest.span.saturating_sub(head.span).max(1);
        self.visits[head.visit as usize].segments += 1;
        strand.segments.insert(index, head);
        index + 1
    }

    /// A request's path leaves the strand of `node` below it: whatever follows there has another profile from
    /// now on.
    fn leave(&mut self, node: Node) {
        let (id, depth) = (node.strand, node.depth + 1);
        let first = self.split(id, depth);
        let branches = self.strands[id as usize].forks(depth);
        for index in first..self.strands[id as usize].segments.len() {
            let strand = &self.strands[id as usize];
            let (start, segment) = (strand.segment_start(index), strand.segments[index]);
            let parting = factors::parting(depth, self.visits[segment.visit as usize].path, branches);
            if parting != segment.parting {
                let age_ms = self.age_ms(&segment);
                self.closed.push(self.record(&segment, start, segment.span, age_ms, false));
                let segment = &mut self.strands[id as usize].segments[index];
                segment.parting = parting;
                segment.entry_ms = u32::try_from(age_ms).unwrap_or(u32::MAX);
            }
        }
    }

    /// Adds blocks that were not known below `node`. Answers the strand where they end.
    fn append(
        &mut self,
        node: Option<Node>,
        inserted: &[BlockId],
        visit: VisitId,
        forest: &dyn Forest,
    ) -> StrandId {
        let id = match node {
            Some(node)
                if inserted.is_empty() || self.strands[node.strand as usize].end() == node.depth + 1 =>
            {
                node.strand
            }
            _ => self.add_strand(node),
        };
        for &block in inserted {
            self.settle(block, id);
            let strand = &mut self.strands[id as usize];
            strand.cells.push(Cell { block, tag: tag(forest.key(block)) });
            strand.reuses.push(0);
            strand.resident += 1;
        }
        if !inserted.is_empty() {
            self.lengthen(id, inserted.len() as u32, visit);
        }
        id
    }

    fn lengthen(&mut self, id: StrandId, blocks: u32, visit: VisitId) {
        let strand = &mut self.strands[id as usize];
        let end = strand.end();
        match strand.segments.last_mut() {
            Some(last) if last.visit == visit && last.reuse == 0 => {
                last.end = end;
                last.span += blocks;
            }
            _ => {
                strand.segments.push(Segment::new(end, blocks, visit, 0));
                self.visits[visit as usize].segments += 1;
            }
        }
    }

    fn add_strand(&mut self, parent: Option<Node>) -> StrandId {
        if let Some(node) = parent {
            self.strands[node.strand as usize].fork(node.depth + 1);
        }
        let id = self.free_strands.pop().unwrap_or_else(|| {
            self.strands.push(Strand::default());
            self.strands.len() as u32 - 1
        });
        let strand = &mut self.strands[id as usize];
        strand.parent = parent;
        strand.start = parent.map_or(0, |node| node.depth + 1);
        id
    }

    /// A resident block, which is a leaf, became a ghost. Answers its strand and whether its segment has no
    /// resident block left.
    pub(super) fn remove(&mut self, block: BlockId) -> Option<(StrandId, bool)> {
        let Node { strand: id, depth } = self.find(block, u32::MAX)?;
        self.home[block.0 as usize] = NOWHERE;
        let strand = &mut self.strands[id as usize];
        debug_assert_eq!(depth + 1, strand.start + strand.resident, "only leaves leave");
        strand.resident = depth - strand.start;
        let tag = strand.cells[strand.resident as usize].tag;
        let (start, segment) = self.segment(Node { strand: id, depth })?;
        let age_ms = self.age_ms(&segment);
        self.resident -= 1;
        self.ghost_count += 1;
        self.ghosts.insert(tag, Node { strand: id, depth });
        if age_ms > GHOST_MS {
            self.truncate(id, depth, age_ms);
        } else {
            self.expect_expiry(id);
        }
        Some((id, start == depth))
    }

    /// Forgets ghosts that are too old or too many.
    fn advance(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        while let Some(&Reverse(Expiry { due_ms, strand: id, life, .. })) = self.expiries.peek()
            && (due_ms < self.now_ms || self.ghost_count > GHOSTS + 2 * self.resident)
        {
            self.expiries.pop();
            if self.strands[id as usize].life == life {
                self.strands[id as usize].expiring = false;
                self.expire_tail(id, due_ms);
            }
        }
    }

    fn expire_tail(&mut self, id: StrandId, due_ms: u64) {
        let strand = &self.strands[id as usize];
        let Some(last) = strand.segments.last().filter(|_| strand.cells.len() > strand.resident as usize)
        else {
            return;
        };
        if self.visits[last.visit as usize].at_ms + GHOST_MS <= due_ms {
            let start = strand.segment_start(strand.segments.len() - 1);
            let age_ms = self.age_ms(last).min(GHOST_MS);
            self.truncate(id, start.max(strand.start + strand.resident), age_ms);
        }
        self.expect_expiry(id);
    }

    fn expect_expiry(&mut self, id: StrandId) {
        let strand = &mut self.strands[id as usize];
        if strand.expiring || strand.cells.len() == strand.resident as usize {
            return;
        }
        if let Some(last) = strand.segments.last() {
            let due_ms = self.visits[last.visit as usize].at_ms + GHOST_MS;
            strand.expiring = true;
            let expiry = Expiry { due_ms, start: Reverse(strand.start), strand: id, life: strand.life };
            self.expiries.push(Reverse(expiry));
        }
    }

    /// Forgets the ghosts from `depth` on. Records that lose all their blocks end at `age_ms`.
    fn truncate(&mut self, id: StrandId, depth: u32, age_ms: u64) {
        while self.strands[id as usize].end() > depth {
            let strand = &mut self.strands[id as usize];
            strand.reuses.pop();
            let Some(cell) = strand.cells.pop() else { break };
            let node = Node { strand: id, depth: strand.end() };
            if self.ghosts.get(&cell.tag) == Some(&node) {
                self.ghosts.remove(&cell.tag);
            }
            self.ghost_count -= 1;
        }
        while let Some(&last) = self.strands[id as usize].segments.last().filter(|last| last.end > depth) {
            let strand = &mut self.strands[id as usize];
            let start = strand.segment_start(strand.segments.len() - 1);
            if start < depth {
                strand.segments.last_mut().expect("it is not empty").end = depth;
                break;
            }
            strand.segments.pop();
            self.closed.push(self.record(&last, start, last.span, age_ms, false));
            self.leave_visit(last.visit);
        }
        let strand = &mut self.strands[id as usize];
        strand.forks.retain(|&(fork, _)| fork <= depth);
        if strand.cells.is_empty() {
            *strand = Strand { life: strand.life + 1, ..Strand::default() };
            self.free_strands.push(id);
        }
    }

    /// Everything that is kept, in entries of any kind.
    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        let within = |strand: &Strand| strand.cells.len() + strand.segments.len() + strand.forks.len();
        let strands: usize = self.strands.iter().map(within).sum();
        let visits = self.visits.len() + self.requests.len();
        strands + self.strands.len() + visits + self.home.len() + self.ghosts.len() + self.expiries.len()
    }

    /// What is known of the last resident block of a strand.
    pub(super) fn tail(&self, id: StrandId) -> Option<State> {
        let strand = &self.strands[id as usize];
        let last = strand.resident.checked_sub(1)?;
        self.state_at(Node { strand: id, depth: strand.start + last })
    }

    /// What is known of a resident block. Looks through its strand from the tail up.
    pub(super) fn state(&self, block: BlockId) -> Option<State> {
        self.state_at(self.find(block, u32::MAX)?)
    }

    fn state_at(&self, node: Node) -> Option<State> {
        let (start, segment) = self.segment(node)?;
        let visit = &self.visits[segment.visit as usize];
        Some(State {
            profile: self.profile(&segment, start),
            age_ms: self.age_ms(&segment),
            will_not_return: visit.will_not_return && segment.reuse == 0,
        })
    }

    /// The last resident block of a strand.
    pub(super) fn last_block(&self, id: StrandId) -> Option<BlockId> {
        let strand = &self.strands[id as usize];
        strand.resident.checked_sub(1).map(|last| strand.cells[last as usize].block)
    }

    /// The strand of a resident block.
    pub(super) fn strand(&self, block: BlockId) -> Option<StrandId> {
        self.home.get(block.0 as usize).copied().filter(|&id| id != NOWHERE)
    }

    /// The segment at `node`, and where it starts.
    fn segment(&self, node: Node) -> Option<(u32, Segment)> {
        let strand = &self.strands[node.strand as usize];
        let index = strand.segments.partition_point(|segment| segment.end <= node.depth);
        strand.segments.get(index).map(|&segment| (strand.segment_start(index), segment))
    }

    fn age_ms(&self, segment: &Segment) -> u64 {
        self.now_ms - self.visits[segment.visit as usize].at_ms
    }

    fn profile(&self, segment: &Segment, start: u32) -> Profile {
        let visit = &self.visits[segment.visit as usize];
        let position = factors::position(start, visit.path);
        Profile::new(visit.traits(), segment.reuse, position, segment.parting)
    }

    fn record(&self, segment: &Segment, start: u32, blocks: u32, age_ms: u64, returned: bool) -> Record {
        Record {
            profile: self.profile(segment, start),
            returned,
            weight: (blocks as f32).sqrt(),
            entry: Age::from_ms(segment.entry_ms.into()),
            exit: Age::from_ms(age_ms),
        }
    }
}

impl Segment {
    fn new(end: u32, blocks: u32, visit: VisitId, reuses: u8) -> Self {
        let reuse = factors::reuse(reuses);
        Self { end, span: blocks, visit, entry_ms: 0, reuse, parting: UNPARTED }
    }
}

impl Strand {
    fn end(&self) -> u32 {
        self.start + self.cells.len() as u32
    }

    fn segment_start(&self, index: usize) -> u32 {
        index.checked_sub(1).map_or(self.start, |before| self.segments[before].end)
    }

    fn forks(&self, depth: u32) -> u32 {
        self.forks.iter().find(|fork| fork.0 == depth).map_or(0, |fork| fork.1)
    }

    fn fork(&mut self, depth: u32) {
        match self.forks.iter_mut().find(|fork| fork.0 == depth) {
            Some(fork) => fork.1 += 1,
            None => self.forks.push((depth, 1)),
        }
    }
}

/// A short name for a block's content.
fn tag(key: u64) -> u32 {
    (mixed(key) >> 32) as u32
}

/// The finalizer of splitmix64: every bit of the result depends on every bit of `x`.
fn mixed(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    /// docs/policies.md states these.
    #[test]
    fn what_is_kept_is_small() {
        assert_eq!(size_of::<Cell>() + size_of::<u8>() + size_of::<StrandId>(), 13, "a resident block");
        assert_eq!(size_of::<Segment>(), 20);
        assert!(size_of::<Visit>() <= 64, "{}", size_of::<Visit>());
        assert!(size_of::<Strand>() <= 136, "{}", size_of::<Strand>());
        assert_eq!(size_of::<Record>(), 24);
    }
}
