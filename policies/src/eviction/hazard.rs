//! Multiplicative return hazard, learned online: the leaf least worth its room.

use std::fmt;

use super::policy::Eviction;
use super::rank_queue::RankQueue;
use crate::reuse::{PathId, ReuseModel, TailRank};
use crate::seam::{Access, BlockId, Forest, Standing};

/// How often all tails are ranked anew while as many blocks come as are resident.
// Twice the pace gained 0.2 points over ten cells and cost 0.3 µs a block.
const RERANKS: usize = 16;

/// A search for a victim ranks no more tails than this: some 30 µs.
const MAX_RERANKS: usize = 64;

/// To rank a tail takes as long as this many looks at blocks.
const RANK_LOOKS: usize = 4;

/// Whether the owner has the time for another tail to be ranked.
fn may_rank(forest: &dyn Forest) -> bool {
    (0..RANK_LOOKS).all(|_| forest.may_look())
}

/// Evicts the leaf that brings the fewest expected hits for the time that it would be held: see
/// `docs/policies.md`. What it knows of returns is the tier's [`ReuseModel`]; its own is the order
/// of the leaves.
#[derive(Default)]
pub struct Hazard {
    /// The paths whose tail may go, by rank.
    queue: RankQueue,
    /// The path whose tail was ranked last in turn.
    cursor: usize,
    /// How many are due, in units of one for each resident block.
    due: usize,
}

impl Hazard {
    /// Ranks the tail of `path` and puts it into the queue.
    fn enqueue(&mut self, path: PathId, reuse: &ReuseModel) {
        if let Some(rank) = reuse.tail_rank(path) {
            self.queue.set(path.0, rank.0);
        }
    }

    /// Ranks some more tails anew, in turn, at such a pace that all have been after a sixteenth of
    /// the blocks was replaced.
    fn rerank_some(&mut self, forest: &dyn Forest, reuse: &ReuseModel) {
        let (_, paths) = self.queue.len();
        let resident = reuse.resident();
        if resident == 0 {
            return;
        }
        // A call stands for a block that is replaced, so this clock runs as fast as the tier
        // changes.
        self.due += RERANKS * paths;
        // In a circle over all numbers: one that is not queued costs a look, and no list of tails
        // need be kept.
        for _ in 0..(self.due / resident).min(paths).min(MAX_RERANKS) {
            self.cursor = (self.cursor + 1) % paths;
            if self.queue.contains(self.cursor as u32) {
                if !may_rank(forest) {
                    return;
                }
                self.enqueue(PathId(self.cursor as u32), reuse);
            }
        }
        self.due %= resident;
    }
}

impl Eviction for Hazard {
    fn needs_reuse(&self) -> bool {
        true
    }

    fn touch(&mut self, _access: &Access, _forest: &dyn Forest, reuse: &ReuseModel) {
        reuse.changed().iter().for_each(|&path| self.enqueue(path, reuse));
    }

    fn removed(&mut self, _block: BlockId, exposed: Option<BlockId>, reuse: &ReuseModel) {
        // As a rule the new tail is of the same segment as the old one, and has its rank.
        if let Some(path) = exposed.and_then(|parent| reuse.path_of(parent))
            && (reuse.changed().contains(&path) || !self.queue.contains(path.0))
        {
            self.enqueue(path, reuse);
        }
    }

    fn victim(&mut self, forest: &dyn Forest, reuse: &ReuseModel) -> Option<BlockId> {
        self.rerank_some(forest, reuse);
        let mut learned = 0;
        while let Some((rank, path)) = self.queue.first().filter(|_| forest.may_look()) {
            let path = PathId(path);
            if reuse.may_rank_better(TailRank(rank)) && learned < MAX_RERANKS && may_rank(forest) {
                learned += 1;
                self.queue.remove_first();
                self.enqueue(path, reuse);
                continue;
            }
            let tail =
                reuse.tail(path).filter(|&tail| forest.standing(tail) == Standing::Evictable);
            if tail.is_some() {
                return tail;
            }
            // Busy or interior: `released` or `removed` brings it back.
            self.queue.remove_first();
        }
        None
    }

    fn released(&mut self, block: BlockId, reuse: &ReuseModel) {
        if let Some(path) = reuse.path_of(block)
            && !self.queue.contains(path.0)
        {
            self.enqueue(path, reuse);
        }
    }

    fn finished(&mut self, reuse: &ReuseModel) {
        // At once, not in its turn: that was worth 0.4 points over ten cells (docs/policies.md).
        reuse.changed().iter().for_each(|&path| self.enqueue(path, reuse));
    }

    fn may_decline(&self) -> bool {
        // Before it could, good blocks left for worse ones that came: a point at agentic 5k
        // (docs/policies.md).
        true
    }
}

impl fmt::Debug for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hazard").field("queued", &self.queue.len().0).finish_non_exhaustive()
    }
}
