//! An array and a map that never grow all at once: a tier's lock is held while one does.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::ops::{Index, IndexMut};

/// Values of a chunk.
// A power of two, so that a place is a shift and a mask. The list of the chunks of a million values
// takes 24 KB.
const CHUNK: usize = 1_024;

/// A growing array in chunks, of which it adds one at a time: a `Vec` copies all that it has when
/// it grows, which takes milliseconds.
#[derive(Debug)]
pub(crate) struct ChunkedVec<T> {
    chunks: Vec<Vec<T>>,
    len: usize,
}

impl<T> ChunkedVec<T> {
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// `None` where it does not reach.
    pub(crate) fn get(&self, at: usize) -> Option<&T> {
        self.chunks.get(at / CHUNK)?.get(at % CHUNK)
    }

    pub(crate) fn push(&mut self, value: T) {
        if self.len == self.chunks.len() * CHUNK {
            // At its full size at once: it never grows, so nothing in it moves.
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        if let Some(last) = self.chunks.last_mut() {
            last.push(value);
        }
        self.len += 1;
    }

    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flatten()
    }
}

impl<T: Copy> ChunkedVec<T> {
    /// The value at `at`. So that there is one, `fill` is appended as often as it takes.
    pub(crate) fn reach(&mut self, at: usize, fill: T) -> &mut T {
        while self.len <= at {
            self.push(fill);
        }
        &mut self[at]
    }
}

impl<T> Default for ChunkedVec<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), len: 0 }
    }
}

impl<T> Index<usize> for ChunkedVec<T> {
    type Output = T;

    fn index(&self, at: usize) -> &T {
        &self.chunks[at / CHUNK][at % CHUNK]
    }
}

impl<T> IndexMut<usize> for ChunkedVec<T> {
    fn index_mut(&mut self, at: usize) -> &mut T {
        &mut self.chunks[at / CHUNK][at % CHUNK]
    }
}

/// A map of numbers to what is known of them, in parts of their own.
///
/// A table of two million entries takes 100 ms to grow, and its lock is held meanwhile. A part
/// takes a tenth of a millisecond, and they grow at different times.
#[derive(Debug)]
pub(crate) struct ShardedMap<V>(Vec<HashMap<HalvedKey, V, BuildHasherDefault<HashMixer>>>);

const SHARDS: usize = 1_024;

/// A number in halves: with a value of four bytes that makes twelve, not sixteen.
#[derive(Debug, PartialEq, Eq)]
struct HalvedKey([u32; 2]);

impl HalvedKey {
    const fn new(number: u64) -> Self {
        Self([number as u32, (number >> 32) as u32])
    }
}

impl Hash for HalvedKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [low, high] = self.0.map(u64::from);
        state.write_u64(high << 32 | low);
    }
}

impl<V> Default for ShardedMap<V> {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| HashMap::default()).collect())
    }
}

impl<V> ShardedMap<V> {
    pub(crate) fn get(&self, key: u64) -> Option<&V> {
        self.0[shard(key)].get(&HalvedKey::new(key))
    }

    pub(crate) fn insert(&mut self, key: u64, value: V) {
        self.0[shard(key)].insert(HalvedKey::new(key), value);
    }

    pub(crate) fn remove(&mut self, key: u64) -> Option<V> {
        self.0[shard(key)].remove(&HalvedKey::new(key))
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(HashMap::len).sum()
    }
}

fn shard(key: u64) -> usize {
    // Bits from the middle: a map tells its keys apart by the first and the last ones.
    (mixed(key) >> 32) as usize % SHARDS
}

/// Hashes a number by [`mixed`] alone, without a secret: the keys are tags of contents, or names of
/// requests.
#[derive(Clone, Copy, Debug, Default)]
struct HashMixer(u64);

impl Hasher for HashMixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = mixed(self.0 ^ number);
    }
}

/// The finalizer of splitmix64: every bit of the result depends on every bit of `x`.
pub(crate) const fn mixed(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stay_where_they_are_while_it_grows() {
        let mut array = ChunkedVec::default();
        assert_eq!(array.get(0), None);
        array.push(1);
        let place: *const i32 = &raw const array[0];
        *array.reach(100 * CHUNK, 7) = 2;
        assert_eq!((&raw const array[0], array[0], array[1], array[100 * CHUNK]), (place, 1, 7, 2));
        assert_eq!((array.get(100 * CHUNK + 1), array.len()), (None, 100 * CHUNK + 1));
        assert!(array.iter().eq((0..array.len()).map(|at| &array[at])));
    }
}
