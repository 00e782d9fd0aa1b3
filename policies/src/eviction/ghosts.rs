//! What a policy remembers of blocks that have left.

use lru::LruCache;

/// As many ghosts for each block of the tier serve the policies that measure long gaps: with fewer
/// they lose a point or more where the tier is small, with more they gain nothing.
pub(super) const GHOSTS_PER_BLOCK: usize = 4;

/// Blocks that have left, by content, the first to leave forgotten first. 50 to 90 bytes each, by
/// `V`.
///
/// Without a bound of its own: `arc` and `s3fifo` move theirs with every use.
#[derive(Debug)]
pub(super) struct EvictedGhosts<V>(LruCache<u64, V>);

impl<V> EvictedGhosts<V> {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Remembers `memory` of the block of content `key`, which left just now.
    pub(super) fn insert(&mut self, key: u64, memory: V) {
        self.0.put(key, memory);
    }

    /// Forgets the block of content `key`, which is back. Returns what was remembered.
    pub(super) fn take(&mut self, key: u64) -> Option<V> {
        self.0.pop(&key)
    }

    /// Forgets the oldest, so that no more than `len` remain.
    pub(super) fn truncate(&mut self, len: usize) {
        while self.0.len() > len {
            self.0.pop_lru();
        }
    }
}

impl<V> Default for EvictedGhosts<V> {
    fn default() -> Self {
        Self(LruCache::unbounded())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ghosts_behave_like_a_vec(moves in prop::collection::vec((0_u64..12, any::<bool>()), 0..300)) {
            let mut ghosts = EvictedGhosts::default();
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
            }
            for (key, now) in expected {
                prop_assert_eq!(ghosts.take(key), Some(now));
            }
        }
    }
}
