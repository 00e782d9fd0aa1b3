//! Multiplicative return hazard, learned online: the leaf least worth its room.

use std::fmt;

use super::Eviction;
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
            self.queue.set(path.number(), rank.0);
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
                self.enqueue(PathId::new(self.cursor as u32), reuse);
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
            && (reuse.changed().contains(&path) || !self.queue.contains(path.number()))
        {
            self.enqueue(path, reuse);
        }
    }

    fn victim(&mut self, forest: &dyn Forest, reuse: &ReuseModel) -> Option<BlockId> {
        self.rerank_some(forest, reuse);
        let mut learned = 0;
        while let Some((rank, path)) = self.queue.first().filter(|_| forest.may_look()) {
            let path = PathId::new(path);
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
            && !self.queue.contains(path.number())
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

/// A binary heap that knows where each of its numbers stands, so that a new rank moves the number
/// instead of leaving a stale entry behind: entries that no longer hold would have to be swept out
/// now and then, all at once.
///
/// O(log n) a change; 12 bytes a number. Numbers of equal rank come in ascending order.
#[derive(Debug, Default)]
struct RankQueue {
    /// Rank and number; each entry is at most as large as the two at twice its index, plus 1 and
    /// plus 2.
    heap: Vec<(u32, u32)>,
    /// By number: its index in the heap; [`ABSENT`] where it has none.
    index: Vec<u32>,
}

const ABSENT: u32 = u32::MAX;

impl RankQueue {
    /// Numbers in the queue, and numbers below the largest that ever was.
    fn len(&self) -> (usize, usize) {
        (self.heap.len(), self.index.len())
    }

    fn contains(&self, number: u32) -> bool {
        self.index.get(number as usize).is_some_and(|&at| at != ABSENT)
    }

    /// The lowest rank, and its number.
    fn first(&self) -> Option<(u32, u32)> {
        self.heap.first().copied()
    }

    /// Puts `number` where `rank` belongs, wherever it was.
    fn set(&mut self, number: u32, rank: u32) {
        let slot = number as usize;
        if self.index.len() <= slot {
            self.index.resize(slot + 1, ABSENT);
        }
        let at = match self.index[slot] {
            ABSENT => {
                self.heap.push((rank, number));
                self.heap.len() - 1
            }
            at => at as usize,
        };
        self.heap[at] = (rank, number);
        self.index[slot] = at as u32;
        // The rank may have fallen or grown: at most one of the two moves it.
        let at = self.rise(at);
        self.sink(at);
    }

    fn remove_first(&mut self) {
        if self.heap.is_empty() {
            return;
        }
        let (_, number) = self.heap.swap_remove(0);
        self.index[number as usize] = ABSENT;
        if let Some(&(_, moved)) = self.heap.first() {
            self.index[moved as usize] = 0;
            self.sink(0);
        }
    }

    fn rise(&mut self, mut at: usize) -> usize {
        while at > 0 && self.heap[at] < self.heap[(at - 1) / 2] {
            self.swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
        at
    }

    fn sink(&mut self, mut at: usize) {
        loop {
            let below = 2 * at + 1..self.heap.len().min(2 * at + 3);
            match below.min_by_key(|&below| self.heap[below]) {
                Some(lowest) if self.heap[lowest] < self.heap[at] => {
                    self.swap(at, lowest);
                    at = lowest;
                }
                _ => return,
            }
        }
    }

    fn swap(&mut self, one: usize, other: usize) {
        self.heap.swap(one, other);
        for at in [one, other] {
            self.index[self.heap[at].1 as usize] = at as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_a_sorted_map(steps in prop::collection::vec(prop::option::of((0_u32..20, 0_u32..6)), 0..300)) {
            let mut queue = RankQueue::default();
            let mut ranks = BTreeMap::new();
            for step in steps {
                let lowest = ranks.iter().map(|(&number, &rank)| (rank, number)).min();
                prop_assert_eq!(queue.first(), lowest);
                match step {
                    Some((number, rank)) => {
                        queue.set(number, rank);
                        ranks.insert(number, rank);
                    }
                    None => {
                        queue.remove_first();
                        lowest.map(|(_, number)| ranks.remove(&number));
                    }
                }
                prop_assert!((0..20).all(|number| queue.contains(number) == ranks.contains_key(&number)));
            }
        }
    }
}
