//! LRU with a grace for conversations and for what is used again and again, leaves only.

use std::collections::VecDeque;
use std::iter::successors;

use super::Eviction;
use super::residents::{EvictedGhosts, GHOSTS_PER_BLOCK, RankedLeaves, RankedResidents};
use crate::reuse::{ReuseModel, reuse_bucket};
use crate::seam::{Access, BlockId, Forest, RequestId};

/// Evicts the leaf with the lowest last use plus grace. The grace is half the running median of the
/// gaps between the turns of conversations, times the sum of two buckets: of the turn's number and
/// of the block's uses. The rule is this project's own; it has nothing to tune.
///
/// A request continues a conversation if what is known of its path ends where an earlier request
/// ended, or one block before that. A prefix of fewer than three blocks is a prompt that strangers
/// share: no turn follows from it.
///
/// A use that comes in parts is one turn: each part takes the number on, and moves the turn's end
/// to its own.
///
/// Leaf-first changes little: a parent is used no less often than its child, and no earlier. Ghosts
/// keep a conversation's turn number while its blocks are away. O(path) a request, 48 bytes a block
/// and about 80 a ghost, of which there are at most four a block.
#[derive(Debug)]
pub struct Turn {
    blocks: RankedResidents<TurnBlock>,
    ghosts: EvictedGhosts<TurnHistory>,
    max_ghosts: usize,
    gaps: TurnGaps,
    /// The turns of the newest requests, to which parts may come.
    going: VecDeque<GoingTurn>,
    /// The path at hand, from the deepest block up, with what was known of it. Kept for its memory.
    steps: Vec<TurnStep>,
}

/// Blocks of a prefix from which on it belongs to one conversation.
const OWN_PREFIX: usize = 3;

#[derive(Clone, Copy, Debug)]
struct TurnBlock {
    /// When the grace ends, in milliseconds.
    until_ms: u64,
    stamp: u64,
    key: u64,
    history: TurnHistory,
}

#[derive(Clone, Copy, Debug, Default)]
struct TurnHistory {
    /// Uses after the first.
    reuses: u32,
    /// The number of the turn that ended here or at a child, from 1; 0 where none did.
    turn: u32,
    /// When it did, in milliseconds.
    turn_ms: u64,
}

/// A turn that may go on.
#[derive(Clone, Copy, Debug)]
struct GoingTurn {
    request: RequestId,
    progress: TurnProgress,
    end: [Option<CoveredTurn>; END],
}

/// What is known of a turn so far.
#[derive(Clone, Copy, Debug)]
struct TurnProgress {
    /// From 1.
    number: u32,
    /// Where the gap before it stands among all [`TurnGaps`].
    gap: Option<usize>,
}

/// The turn that ended at a block before the one that ends there for now.
#[derive(Clone, Copy, Debug)]
struct CoveredTurn {
    block: BlockId,
    key: u64,
    turn: u32,
    turn_ms: u64,
}

/// Blocks at which a turn counts as ended.
// One above the last, too: the next turn may write the last block otherwise.
const END: usize = 2;

#[derive(Clone, Copy, Debug)]
struct TurnStep {
    block: BlockId,
    key: u64,
    known: Option<TurnHistory>,
}

impl RankedLeaves for TurnBlock {
    type Rank = (u64, u64);

    fn rank(&self) -> (u64, u64) {
        (self.until_ms, self.stamp)
    }
}

impl Turn {
    /// A policy for a tier of `capacity` blocks.
    pub fn with_capacity(capacity: u32) -> Self {
        Self {
            blocks: RankedResidents::with_capacity(capacity),
            ghosts: EvictedGhosts::default(),
            max_ghosts: capacity as usize * GHOSTS_PER_BLOCK,
            gaps: TurnGaps::default(),
            going: VecDeque::new(),
            steps: Vec::new(),
        }
    }

    fn step(&mut self, block: BlockId, forest: &dyn Forest) -> TurnStep {
        if let Some(&TurnBlock { key, history, .. }) = self.blocks.state(block) {
            return TurnStep { block, key, known: Some(history) };
        }
        let key = forest.key(block);
        TurnStep { block, key, known: self.ghosts.take(key) }
    }

    /// Takes a turn on by the path at hand, which ends at `depth`: the deepest known block tells
    /// its number and the gap since the one before.
    fn advance(&mut self, progress: &mut TurnProgress, depth: u32, now_ms: u64) {
        let Some(end) = self.steps.iter().position(|step| step.known.is_some()) else { return };
        progress.number = 1;
        let is_own = depth as usize - end >= OWN_PREFIX;
        let Some(end) = self.steps[end].known.filter(|end| is_own && end.turn > 0) else { return };
        progress.number = end.turn.saturating_add(1);
        let gap_ms = now_ms.saturating_sub(end.turn_ms);
        match progress.gap {
            // A conversation that comes back in parts comes by the ends of all its turns. The last
            // one counts.
            Some(at) => self.gaps.set(at, gap_ms),
            None => progress.gap = Some(self.gaps.add(gap_ms)),
        }
    }

    fn place(&mut self, step: TurnStep, grace_turns: u64, now_ms: u64) {
        let history = step.known.map_or_else(TurnHistory::default, |known| TurnHistory {
            reuses: known.reuses.saturating_add(1),
            ..known
        });
        let grace_ms =
            self.gaps.median / 2 * (grace_turns + u64::from(reuse_bucket(history.reuses)));
        let stamp = self.blocks.stamp();
        let place =
            TurnBlock { until_ms: now_ms.saturating_add(grace_ms), stamp, key: step.key, history };
        self.blocks.set(step.block, place);
    }

    /// The request's turn so far, if this is not its first part. Its end is further down from now
    /// on.
    fn reopen(&mut self, request: Option<RequestId>) -> Option<TurnProgress> {
        let at = self.going.iter().position(|going| Some(going.request) == request)?;
        let GoingTurn { progress, end, .. } = self.going[at];
        for CoveredTurn { block, key, turn, turn_ms } in end.into_iter().flatten() {
            // Another block may have the number by now.
            if let Some(state) = self.blocks.state_mut(block).filter(|state| state.key == key) {
                (state.history.turn, state.history.turn_ms) = (turn, turn_ms);
            }
        }
        Some(progress)
    }

    /// The turn ends at `access.deepest`, unless another part comes.
    fn end(&mut self, progress: TurnProgress, access: &Access, forest: &dyn Forest) {
        let mut path = successors(Some(access.deepest), |&block| forest.parent(block));
        let end = std::array::from_fn(|_| {
            let block = path.next()?;
            let TurnBlock { key, history, .. } = self.blocks.state_mut(block)?;
            let covered =
                CoveredTurn { block, key: *key, turn: history.turn, turn_ms: history.turn_ms };
            (history.turn, history.turn_ms) = (progress.number, access.now_ms);
            Some(covered)
        });
        let Some(request) = access.request else { return };
        let going = GoingTurn { request, progress, end };
        match self.going.iter_mut().find(|going| going.request == request) {
            Some(earlier) => *earlier = going,
            None => {
                self.going.truncate(RankedResidents::<TurnBlock>::COUNTED - 1);
                self.going.push_front(going);
            }
        }
    }
}

impl Eviction for Turn {
    fn touch(&mut self, access: &Access, forest: &dyn Forest, _reuse: &ReuseModel) {
        self.steps.clear();
        for block in self.blocks.path(access, forest) {
            let step = self.step(block, forest);
            self.steps.push(step);
        }
        // A part that brings nothing leaves the turn's end where it is.
        if !self.steps.is_empty() {
            let first = TurnProgress { number: 1, gap: None };
            let mut progress = self.reopen(access.request).unwrap_or(first);
            self.advance(&mut progress, access.depth, access.now_ms);
            for at in 0..self.steps.len() {
                self.place(self.steps[at], reuse_bucket(progress.number - 1).into(), access.now_ms);
            }
            self.end(progress, access, forest);
        }
        self.blocks.offer(access.deepest);
    }

    fn removed(&mut self, block: BlockId, exposed: Option<BlockId>, _reuse: &ReuseModel) {
        if let Some(gone) = self.blocks.remove(block, exposed) {
            self.ghosts.insert(gone.key, gone.history);
            self.ghosts.truncate(self.max_ghosts);
        }
    }

    fn victim(&mut self, forest: &dyn Forest, _reuse: &ReuseModel) -> Option<BlockId> {
        self.blocks.lowest(.., forest)
    }

    fn released(&mut self, block: BlockId, _reuse: &ReuseModel) {
        self.blocks.offer(block);
    }
}

/// The median of the newest gaps, in milliseconds.
#[derive(Debug, Default)]
struct TurnGaps {
    newest: Vec<u64>,
    seen: usize,
    median: u64,
}

impl TurnGaps {
    const KEPT: usize = 1024;
    /// The median is taken anew after this number, and after each one before that.
    const STEP: usize = 32;

    /// Returns its place, by which it can be [set](Self::set).
    fn add(&mut self, gap_ms: u64) -> usize {
        let at = self.seen;
        self.seen += 1;
        self.set(at, gap_ms);
        at
    }

    fn set(&mut self, at: usize, gap_ms: u64) {
        if self.seen - at > Self::KEPT {
            return;
        }
        match self.newest.get_mut(at % Self::KEPT) {
            Some(gap) => *gap = gap_ms,
            None => self.newest.push(gap_ms),
        }
        if self.seen < Self::STEP || self.seen.is_multiple_of(Self::STEP) {
            let mut sorted = self.newest.clone();
            let middle = sorted.len() / 2;
            self.median = *sorted.select_nth_unstable(middle).1;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::seam::{Hints, RequestId, Standing};
    use crate::testing::Line;

    use super::*;

    /// One conversation: a block is its position.
    const LINE: Line = Line(Standing::Evictable);

    /// How a use is reported: all at once, or what is there and then a number of blocks at a time.
    #[derive(Clone, Copy, Debug)]
    enum ReportedParts {
        One,
        Of(u32),
    }

    /// A policy of the tier that holds the first `resident` blocks of the conversation.
    struct KnownConversation {
        policy: Turn,
        resident: u32,
        turns: u64,
    }

    impl KnownConversation {
        fn new() -> Self {
            Self { policy: Turn::with_capacity(64), resident: 0, turns: 0 }
        }

        /// The next turn, a minute after the last, up to block `len`.
        fn turn(&mut self, len: u32, parts: ReportedParts) {
            self.turns += 1;
            let (from, step) = match parts {
                ReportedParts::One => (len, len),
                ReportedParts::Of(step) => (self.resident.min(len), step),
            };
            let mut depth = from;
            if depth > 0 {
                let inserted =
                    if matches!(parts, ReportedParts::One) { len - self.resident } else { 0 };
                self.part(depth, inserted, len);
            }
            while depth < len {
                let inserted = step.min(len - depth);
                depth += inserted;
                self.part(depth, inserted, len);
            }
            self.resident = self.resident.max(len);
        }

        fn part(&mut self, depth: u32, inserted: u32, path: u32) {
            let (request, deepest) = (Some(RequestId(self.turns)), BlockId(depth - 1));
            let hints = Hints::default();
            let access = Access {
                now_ms: self.turns * 60_000,
                request,
                deepest,
                depth,
                inserted,
                path,
                hints,
            };
            self.policy.touch(&access, &LINE, &ReuseModel::idle());
        }

        fn forget_from(&mut self, len: u32) {
            for block in (len..self.resident).rev() {
                let exposed = block.checked_sub(1).map(BlockId);
                self.policy.removed(BlockId(block), exposed, &ReuseModel::idle());
            }
            self.resident = len;
        }

        /// Which turn ended at each block, and when its grace ends.
        fn blocks(&self) -> Vec<(u32, u64)> {
            let state = |block| self.policy.blocks.state(BlockId(block)).expect("it is there");
            (0..self.resident)
                .map(|block| (state(block).history.turn, state(block).until_ms))
                .collect()
        }
    }

    #[test]
    fn the_parts_of_a_turn_are_one_turn() {
        let played = |parts| {
            let mut conversation = KnownConversation::new();
            [4, 9, 10, 16, 20].into_iter().for_each(|len| conversation.turn(len, parts));
            (conversation.blocks(), conversation.policy.gaps.newest)
        };
        let (blocks, gaps) = played(ReportedParts::One);
        let ends = blocks.iter().map(|&(turn, _)| turn).collect::<Vec<_>>();
        assert_eq!(ends, [0, 0, 1, 1, 0, 0, 0, 2, 3, 3, 0, 0, 0, 0, 4, 4, 0, 0, 5, 5]);
        for step in 1..6 {
            assert_eq!(
                played(ReportedParts::Of(step)),
                (blocks.clone(), gaps.clone()),
                "{step} blocks at a time"
            );
        }
    }

    #[test]
    fn a_turn_that_comes_back_in_parts_goes_on_counting() {
        for parts in [ReportedParts::One, ReportedParts::Of(1), ReportedParts::Of(3)] {
            let mut conversation = KnownConversation::new();
            [8, 12, 16].into_iter().for_each(|len| conversation.turn(len, parts));
            conversation.forget_from(6);
            conversation.turn(20, parts);
            let ends = conversation.blocks().into_iter().map(|(turn, _)| turn);
            let ends: Vec<_> = (0..).zip(ends).filter(|&(_, turn)| turn > 0).collect();
            let marks = [(6, 1), (7, 1), (10, 2), (11, 2), (14, 3), (15, 3), (18, 4), (19, 4)];
            assert_eq!(ends, marks, "{parts:?}");
            assert_eq!(conversation.policy.gaps.newest, [60_000; 3], "{parts:?}");
        }
    }

    #[test]
    fn the_median_follows_the_newest_gaps() {
        let mut gaps = TurnGaps::default();
        for gap_ms in [9, 1, 5] {
            gaps.add(gap_ms);
        }
        assert_eq!(gaps.median, 5);
        for _ in 0..TurnGaps::KEPT {
            gaps.add(70);
        }
        assert_eq!(gaps.median, 70);
    }
}
