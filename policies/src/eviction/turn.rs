//! LRU with a grace for conversations and for what is used again and again, leaves only.

use super::ghosts::{GHOSTS_PER_BLOCK, Ghosts};
use super::policy::Eviction;
use super::residents::{Ranked, Residents};
use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Forest};

/// Evicts the leaf with the lowest last use plus grace. The grace is half the running median of the gaps
/// between the turns of conversations, times the sum of two buckets: of the turn's number and of the block's
/// uses. The rule is this project's own; it has nothing to tune.
///
/// A request continues a conversation if what is known of its path ends where an earlier request ended, or
/// one block before that. A prefix of fewer than three blocks is a prompt that strangers share: no turn
/// follows from it.
///
/// Leaf-first changes little: a parent is used no less often than its child, and no earlier. Ghosts keep a
/// conversation's turn number while its blocks are away. O(path) a request, 48 bytes a block and about 80 a
/// ghost, of which there are at most four a block.
#[derive(Debug)]
pub struct Turn {
    blocks: Residents<TurnBlock>,
    ghosts: Ghosts<History>,
    max_ghosts: usize,
    gaps: Gaps,
    /// The path at hand, from the deepest block up, with what was known of it. Kept for its memory.
    steps: Vec<Step>,
}

/// Blocks of a prefix from which on it belongs to one conversation.
const OWN_PREFIX: usize = 3;

#[derive(Clone, Copy, Debug)]
struct TurnBlock {
    /// When the grace ends, in milliseconds.
    until_ms: u64,
    stamp: u64,
    key: u64,
    history: History,
}

#[derive(Clone, Copy, Debug, Default)]
struct History {
    /// Uses after the first.
    reuses: u32,
    /// The number of the turn that ended here or at a child, from 1; 0 where none did.
    turn: u32,
    /// When it did, in milliseconds.
    turn_ms: u64,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    block: BlockId,
    key: u64,
    known: Option<History>,
}

impl Ranked for TurnBlock {
    type Rank = (u64, u64);

    fn rank(&self) -> (u64, u64) {
        (self.until_ms, self.stamp)
    }
}

impl Turn {
    /// A policy for a tier of `capacity` blocks.
    pub fn with_capacity(capacity: u32) -> Self {
        Self {
            blocks: Residents::with_capacity(capacity),
            ghosts: Ghosts::default(),
            max_ghosts: capacity as usize * GHOSTS_PER_BLOCK,
            gaps: Gaps::default(),
            steps: Vec::new(),
        }
    }

    fn step(&mut self, block: BlockId, forest: &dyn Forest) -> Step {
        if let Some(&TurnBlock { key, history, .. }) = self.blocks.state(block) {
            return Step { block, key, known: Some(history) };
        }
        let key = forest.key(block);
        Step { block, key, known: self.ghosts.take(key) }
    }

    /// The number of the turn that the path at hand is. Learns the gap since the one before.
    fn turn(&mut self, now_ms: u64) -> u32 {
        let Some(end) = self.steps.iter().position(|step| step.known.is_some()) else { return 1 };
        let is_own = self.steps.len() - end >= OWN_PREFIX;
        let Some(end) = self.steps[end].known.filter(|end| is_own && end.turn > 0) else { return 1 };
        self.gaps.add(now_ms.saturating_sub(end.turn_ms));
        end.turn.saturating_add(1)
    }

    fn place(&mut self, step: Step, ended: Option<u32>, grace_turns: u64, now_ms: u64) {
        let mut history = step.known.map_or_else(History::default, |known| History {
            reuses: known.reuses.saturating_add(1),
            ..known
        });
        if let Some(turn) = ended {
            (history.turn, history.turn_ms) = (turn, now_ms);
        }
        let grace_ms = self.gaps.median / 2 * (grace_turns + bucket(history.reuses));
        let stamp = self.blocks.stamp();
        let place = TurnBlock { until_ms: now_ms.saturating_add(grace_ms), stamp, key: step.key, history };
        self.blocks.set(step.block, place);
    }
}

/// 0, 1, 2–3, 4–7, 8–31, 32 and more.
const fn bucket(count: u32) -> u64 {
    match count {
        0 => 0,
        1 => 1,
        2..=3 => 2,
        4..=7 => 3,
        8..=31 => 4,
        32.. => 5,
    }
}

impl Eviction for Turn {
    fn touch(&mut self, access: &Access, forest: &dyn Forest, _reuse: &ReuseModel) {
        self.steps.clear();
        for block in self.blocks.path(access, forest) {
            let step = self.step(block, forest);
            self.steps.push(step);
        }
        let turn = self.turn(access.now_ms);
        let grace_turns = bucket(turn - 1);
        for at in 0..self.steps.len() {
            // One above the end, too: the next turn may write the last block otherwise.
            let ended = (at < 2).then_some(turn);
            self.place(self.steps[at], ended, grace_turns, access.now_ms);
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
struct Gaps {
    newest: Vec<u64>,
    seen: usize,
    median: u64,
}

impl Gaps {
    const KEPT: usize = 1024;
    /// The median is taken anew after so many, and after each one before the first so many.
    const STEP: usize = 32;

    fn add(&mut self, gap_ms: u64) {
        if self.newest.len() < Self::KEPT {
            self.newest.push(gap_ms);
        } else {
            self.newest[self.seen % Self::KEPT] = gap_ms;
        }
        self.seen += 1;
        if self.seen < Self::STEP || self.seen.is_multiple_of(Self::STEP) {
            let mut sorted = self.newest.clone();
            let middle = sorted.len() / 2;
            self.median = *sorted.select_nth_unstable(middle).1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_follows_the_newest_gaps() {
        let mut gaps = Gaps::default();
        [9, 1, 5].into_iter().for_each(|gap_ms| gaps.add(gap_ms));
        assert_eq!(gaps.median, 5);
        (0..Gaps::KEPT as u64).for_each(|_| gaps.add(70));
        assert_eq!(gaps.median, 70);
    }
}
