//! Multiplicative return hazard, learned online: the leaf least worth its room.

use std::fmt;

use super::lru::Lru;
use super::policy::Eviction;
use super::rank_queue::RankQueue;
use crate::reuse::{PathId, ReuseModel};
use crate::seam::{Access, BlockId, Forest, Standing};

/// How often all tails are ranked anew while as many blocks come as are resident.
// Twice the pace gained 0.2 points over ten cells and cost 0.3 µs a block.
const RERANKS: usize = 16;

/// The rank of what will not return, which is known without learning.
const WORTHLESS: u32 = 0;

/// A search for a victim ranks no more tails than this: some 30 µs.
const MAX_RERANKS: usize = 64;

/// Evicts the leaf that brings the fewest expected hits for the time that it would be held: see
/// `docs/policies.md`. What it knows of returns is the tier's [`ReuseModel`]; its own is the order of the leaves.
pub struct Hazard {
    /// Until every tail is ranked by what the model has learned.
    warmup: Option<Warmup>,
    /// The paths whose tail may go, by rank.
    queue: RankQueue,
    /// The path whose tail was ranked last in turn.
    cursor: usize,
    /// How many are due, in units of one for each resident block.
    due: usize,
}

/// Least recently used decides while nothing has been learned: a model that knows nothing does worse.
// By 0.7 points over the first 100 agentic requests at 1,000 blocks.
#[derive(Debug, Default)]
struct Warmup {
    lru: Lru,
    /// Paths before this one are ranked by what was learned.
    ranked: usize,
}

impl Default for Hazard {
    fn default() -> Self {
        Self { warmup: Some(Warmup::default()), queue: RankQueue::default(), cursor: 0, due: 0 }
    }
}

impl Hazard {
    /// Once the model has learned something, ranks some more tails by it, until all are.
    fn finish_warmup(&mut self, reuse: &ReuseModel) {
        let Some(warmup) = self.warmup.as_mut().filter(|_| reuse.has_learned()) else { return };
        let (_, paths) = self.queue.len();
        let (from, to) = (warmup.ranked, paths.min(warmup.ranked + MAX_RERANKS));
        warmup.ranked = to;
        if to == paths {
            self.warmup = None;
        }
        (from..to).for_each(|path| self.rerank(path, reuse));
    }

    /// Ranks the tail of a path anew if it is queued.
    fn rerank(&mut self, path: usize, reuse: &ReuseModel) {
        if self.queue.contains(path as u32) {
            self.enqueue(PathId(path as u32), reuse);
        }
    }

    /// Ranks the tail of `path` and puts it into the queue.
    fn enqueue(&mut self, path: PathId, reuse: &ReuseModel) {
        // Orders like the index, which is never negative.
        if let Some(rank) = reuse.tail_rank(path).map(f32::to_bits) {
            self.queue.set(path.0, rank);
        }
    }

    /// Ranks some more tails anew, in turn, at such a pace that all have been after a sixteenth of the blocks
    /// was replaced.
    fn rerank_some(&mut self, reuse: &ReuseModel) {
        let (_, paths) = self.queue.len();
        let resident = reuse.resident();
        if resident == 0 {
            return;
        }
        // A call stands for a block that is replaced, so this clock runs as fast as the tier changes.
        self.due += RERANKS * paths;
        // In a circle over all numbers: one that is not queued costs a look, and no list of tails need be kept.
        for _ in 0..(self.due / resident).min(paths).min(MAX_RERANKS) {
            self.cursor = (self.cursor + 1) % paths;
            self.rerank(self.cursor, reuse);
        }
        self.due %= resident;
    }
}

impl Eviction for Hazard {
    fn needs_reuse(&self) -> bool {
        true
    }

    fn touch(&mut self, access: &Access, forest: &dyn Forest, reuse: &ReuseModel) {
        if let Some(warmup) = &mut self.warmup {
            warmup.lru.touch(access, forest, reuse);
        }
        reuse.changed().iter().for_each(|&path| self.enqueue(path, reuse));
    }

    fn removed(&mut self, block: BlockId, exposed: Option<BlockId>, reuse: &ReuseModel) {
        if let Some(warmup) = &mut self.warmup {
            warmup.lru.removed(block, exposed, reuse);
        }
        // As a rule the new tail is of the same segment as the old one, and has its rank.
        if let Some(path) = exposed.and_then(|parent| reuse.path_of(parent))
            && (reuse.changed().contains(&path) || !self.queue.contains(path.0))
        {
            self.enqueue(path, reuse);
        }
    }

    fn victim(&mut self, forest: &dyn Forest, reuse: &ReuseModel) -> Option<BlockId> {
        self.finish_warmup(reuse);
        self.rerank_some(reuse);
        while let Some((rank, path)) = self.queue.first().filter(|_| forest.may_look()) {
            if let Some(warmup) = self.warmup.as_mut().filter(|_| rank != WORTHLESS) {
                return warmup.lru.victim(forest, reuse);
            }
            let path = PathId(path);
            let tail = reuse.tail(path).filter(|&tail| forest.standing(tail) == Standing::Evictable);
            if tail.is_some() {
                return tail;
            }
            // Busy or interior: `released` or `removed` brings it back.
            self.queue.remove_first();
        }
        None
    }

    fn released(&mut self, block: BlockId, reuse: &ReuseModel) {
        if let Some(warmup) = &mut self.warmup {
            warmup.lru.released(block, reuse);
        }
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
        // Before it could, good blocks left for worse ones that came: a point at agentic 5k (docs/policies.md).
        true
    }
}

impl fmt::Debug for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hazard").field("queued", &self.queue.len().0).finish_non_exhaustive()
    }
}
