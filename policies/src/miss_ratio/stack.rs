//! Blocks in the order of their last use, and how many stand above each.

use std::collections::HashMap;

/// At most `depth` keys, the one used last on top. A key stands for as many blocks as it weighs.
///
/// Keys stand in a lane of twice as many places, filled from the left, and a Fenwick tree over it
/// adds up the weights on the way to a place. A lane that is full is packed to the left: O(log n) a
/// use, amortised.
#[derive(Debug)]
pub(super) struct LruStack {
    places: HashMap<u64, u32>,
    lane: Vec<LaneEntry>,
    weights: FenwickTree,
    /// Of all keys together.
    total: u32,
    /// Everything from here on is empty.
    top: u32,
    /// Everything before is empty.
    bottom: u32,
    depth: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct LaneEntry {
    key: u64,
    /// 0: no block stands here.
    weight: u32,
}

impl LruStack {
    /// # Panics
    /// If `depth` is 0.
    pub(super) fn new(depth: usize) -> Self {
        assert!(depth > 0, "a stack holds something");
        Self {
            // One more than stay: a key comes in before the lowest falls off.
            places: HashMap::with_capacity(depth + 1),
            lane: vec![LaneEntry::default(); 2 * depth],
            weights: FenwickTree::new(2 * depth),
            total: 0,
            top: 0,
            bottom: 0,
            depth,
        }
    }

    /// The weight of the keys used after this one; `None` where it is not here.
    pub(super) fn above(&self, key: u64) -> Option<u32> {
        let place = *self.places.get(&key)?;
        Some(self.total - self.weights.sum_to(place))
    }

    /// Puts the key on top. If they are too many, the lowest falls off.
    ///
    /// `weight` is at least 1.
    pub(super) fn raise(&mut self, key: u64, weight: u32) {
        // Before the key's former place is looked up, for this moves it.
        if self.top as usize == self.lane.len() {
            self.pack();
        }
        if let Some(former) = self.places.insert(key, self.top) {
            self.clear(former);
        }
        self.fill(self.top, LaneEntry { key, weight });
        self.top += 1;
        if self.places.len() > self.depth {
            self.drop_lowest();
        }
    }

    fn fill(&mut self, at: u32, place: LaneEntry) {
        self.lane[at as usize] = place;
        self.weights.add(at, place.weight);
        self.total += place.weight;
    }

    fn clear(&mut self, at: u32) {
        let LaneEntry { weight, .. } = std::mem::take(&mut self.lane[at as usize]);
        self.weights.subtract(at, weight);
        self.total -= weight;
    }

    fn drop_lowest(&mut self) {
        // Only ever to the right until the next packing: O(1) a use, amortised.
        while self.lane[self.bottom as usize].weight == 0 {
            self.bottom += 1;
        }
        self.places.remove(&self.lane[self.bottom as usize].key);
        self.clear(self.bottom);
    }

    fn pack(&mut self) {
        let standing: Vec<_> = self.lane.iter().copied().filter(|place| place.weight > 0).collect();
        self.lane.fill(LaneEntry::default());
        self.weights = FenwickTree::new(self.lane.len());
        (self.total, self.top, self.bottom) = (0, 0, 0);
        for place in standing {
            self.places.insert(place.key, self.top);
            self.fill(self.top, place);
            self.top += 1;
        }
    }
}

/// Sums from the left in O(log n). (P. M. Fenwick, "A new data structure for cumulative frequency
/// tables", Software: Practice and Experience 24(3), 1994.)
#[derive(Debug)]
struct FenwickTree(Vec<u32>);

impl FenwickTree {
    fn new(places: usize) -> Self {
        Self(vec![0; places])
    }

    fn add(&mut self, place: u32, weight: u32) {
        self.covering(place, |sum| *sum += weight);
    }

    fn subtract(&mut self, place: u32, weight: u32) {
        self.covering(place, |sum| *sum -= weight);
    }

    fn covering(&mut self, place: u32, change: impl Fn(&mut u32)) {
        let mut at = place as usize;
        while let Some(sum) = self.0.get_mut(at) {
            change(sum);
            at |= at + 1;
        }
    }

    /// The sum up to this place, itself included.
    fn sum_to(&self, place: u32) -> u32 {
        let mut end = place as usize + 1;
        let mut sum = 0;
        while end > 0 {
            sum += self.0[end - 1];
            end &= end - 1;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn counts_what_a_list_counts(depth in 1_usize..12, uses in prop::collection::vec((0_u64..20, 1_u32..4), 0..200)) {
            let mut stack = LruStack::new(depth);
            let mut list: Vec<(u64, u32)> = Vec::new();
            for (key, weight) in uses {
                stack.raise(key, weight);
                list.retain(|&(other, _)| other != key);
                list.insert(0, (key, weight));
                list.truncate(depth);
                for key in 0..20 {
                    let place = list.iter().position(|&(other, _)| other == key);
                    let above = place.map(|place| list[..place].iter().map(|&(_, weight)| weight).sum::<u32>());
                    prop_assert_eq!(stack.above(key), above);
                }
            }
        }
    }
}
