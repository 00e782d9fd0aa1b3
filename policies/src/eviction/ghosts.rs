//! What a policy remembers of blocks that have left.

use std::collections::{HashMap, VecDeque};

/// As many ghosts for each block of the tier serve the policies that measure long gaps: with fewer they lose
/// a point or more where the tier is small, with more they gain nothing.
pub(super) const GHOSTS_PER_BLOCK: usize = 4;

/// Blocks that have left, by content, the first to leave forgotten first. 60 to 80 bytes each, by `V`.
#[derive(Debug)]
pub(super) struct Ghosts<V> {
    entries: HashMap<u64, Ghost<V>>,
    /// Keys in order of departure with the number of it, among some that have returned since.
    order: VecDeque<(u64, u64)>,
    departures: u64,
}

#[derive(Debug)]
struct Ghost<V> {
    departure: u64,
    memory: V,
}

impl<V> Ghosts<V> {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Remembers `memory` of the block of content `key`, which left just now.
    pub(super) fn insert(&mut self, key: u64, memory: V) {
        self.departures += 1;
        self.entries.insert(key, Ghost { departure: self.departures, memory });
        self.order.push_back((key, self.departures));
        if self.order.len() > 2 * self.entries.len() + 64 {
            let entries = &self.entries;
            self.order.retain(|&(key, departure)| is_current(entries, key, departure));
        }
    }

    /// Forgets the block of content `key`, which is back. Answers what was remembered.
    pub(super) fn take(&mut self, key: u64) -> Option<V> {
        self.entries.remove(&key).map(|ghost| ghost.memory)
    }

    /// Forgets the oldest, so that no more than `len` remain.
    pub(super) fn truncate(&mut self, len: usize) {
        while self.entries.len() > len {
            let Some((key, departure)) = self.order.pop_front() else { return };
            if is_current(&self.entries, key, departure) {
                self.entries.remove(&key);
            }
        }
    }
}

impl<V> Default for Ghosts<V> {
    fn default() -> Self {
        Self { entries: HashMap::new(), order: VecDeque::new(), departures: 0 }
    }
}

fn is_current<V>(entries: &HashMap<u64, Ghost<V>>, key: u64, departure: u64) -> bool {
    entries.get(&key).is_some_and(|ghost| ghost.departure == departure)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ghosts_behave_like_a_vec(moves in prop::collection::vec((0_u64..12, any::<bool>()), 0..300)) {
            let mut ghosts = Ghosts::default();
            let mut expected: Vec<(u64, usize)> = Vec::new();
            for (now, (key, leaves)) in moves.into_iter().enumerate() {
                let known = expected.iter().position(|&(other, _)| other == key).map(|at| expected.remove(at).1);
                if leaves {
                    ghosts.insert(key, now);
                    expected.push((key, now));
                } else {
                    prop_assert_eq!(ghosts.take(key), known);
                }
                ghosts.truncate(8);
                expected.drain(..expected.len().saturating_sub(8));
                prop_assert_eq!(ghosts.len(), expected.len());
                prop_assert!(ghosts.order.len() <= 2 * 9 + 65);
            }
            for (key, now) in expected {
                prop_assert_eq!(ghosts.take(key), Some(now));
            }
        }
    }
}
