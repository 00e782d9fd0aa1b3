//! A hash table that never grows all at once.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// A map of numbers to what is known of them, in parts of their own.
///
/// A table of two million entries takes 100 ms to grow, and its lock is held meanwhile. A part
/// takes a tenth of a millisecond, and they grow at different times.
#[derive(Debug)]
pub(super) struct ShardedMap<V>(Vec<HashMap<HalvedKey, V, BuildHasherDefault<HashMixer>>>);

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
    pub(super) fn get(&self, key: u64) -> Option<&V> {
        self.0[shard(key)].get(&HalvedKey::new(key))
    }

    pub(super) fn insert(&mut self, key: u64, value: V) {
        self.0[shard(key)].insert(HalvedKey::new(key), value);
    }

    pub(super) fn remove(&mut self, key: u64) -> Option<V> {
        self.0[shard(key)].remove(&HalvedKey::new(key))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
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
pub(super) struct HashMixer(u64);

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
pub(super) const fn mixed(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}
