//! Numbers by rank, the lowest first.

/// A binary heap that knows where each of its numbers stands, so that a new rank moves the number
/// instead of leaving a stale entry behind: entries that no longer hold would have to be swept out
/// now and then, all at once.
///
/// O(log n) a change; 12 bytes a number. Numbers of equal rank come in ascending order.
#[derive(Debug, Default)]
pub(super) struct RankQueue {
    /// Rank and number; each entry is at most as large as the two at twice its index, plus 1 and
    /// plus 2.
    heap: Vec<(u32, u32)>,
    /// By number: its index in the heap; [`ABSENT`] where it has none.
    index: Vec<u32>,
}

const ABSENT: u32 = u32::MAX;

impl RankQueue {
    /// Numbers in the queue, and numbers below the largest that ever was.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.heap.len(), self.index.len())
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        self.index.get(number as usize).is_some_and(|&at| at != ABSENT)
    }

    /// The lowest rank, and its number.
    pub(super) fn first(&self) -> Option<(u32, u32)> {
        self.heap.first().copied()
    }

    /// Puts `number` where `rank` belongs, wherever it was.
    pub(super) fn set(&mut self, number: u32, rank: u32) {
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

    pub(super) fn remove_first(&mut self) {
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
