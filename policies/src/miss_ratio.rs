//! Hit rate against capacity, for all capacities at once, from one pass over the requests.
//!
//! Under LRU that goes leaf first, a tier of C blocks holds the C blocks used last, the deeper ones
//! of a path being older. So a block that is used again is a hit exactly where C is at least its
//! *stack distance*, its place from the top in that order (R. L. Mattson et al., "Evaluation
//! techniques for storage hierarchies", IBM Systems Journal 9(2), 1970), and counting distances
//! gives the curve. [`MissRatio`] measures them on a [`Sample`], in bounded memory and at little
//! cost, so that a live tier may afford it.
//!
//! Two things make a small sample tell much. Blocks are taken evenly along each path, for
//! neighbours come and go together. And the few blocks that many requests begin with (`HotBlocks`)
//! are all measured: with one of them in a sample or not, the estimate would be off by tens of
//! points.

pub use crate::sample::SampledRequests;

use std::collections::HashMap;

use crate::sample::{HotBlocks, Sample, SampledRequest};

/// Blocks that are followed at most.
// On conversation one block in 7 makes the curve wrong by 0.1 points on average and at most 0.4,
// one in 25 by 0.4 and 1.4 (docs/planning.md).
const FOLLOWED: u32 = 16_384;

/// Estimates which token hit rate an LRU tier of any capacity would have reached.
///
/// Blocks that return from further down than the *horizon* count as misses, which bounds what is
/// kept: one block in ⌈horizon ÷ 16,384⌉ is followed, at about 75 bytes each, 1.3 MB in all.
///
/// A request reads the first few keys and a fixed share of the others, and costs some 100 ns for
/// each block that it follows. A caller that cannot wait for that collects [`SampledRequests`], at
/// a few ns for each of these, and lets another thread [take](Self::take) them.
#[derive(Debug)]
pub struct MissRatio {
    sample: Sample,
    horizon: u32,
    block_tokens: u32,
    hot: HotBlocks,
    stack: LruStack,
    /// What was measured of every hot block.
    exact: StackDistances,
    /// What was measured of those of the others that are in the sample.
    sampled: StackDistances,
    /// Uses of blocks that are not hot, in the sample or not.
    uses: f64,
    prompt_tokens: f64,
    /// The sampled part of the path at hand, kept for its memory.
    path: Vec<u64>,
}

impl MissRatio {
    /// For capacities up to `horizon` blocks of `block_tokens` tokens.
    pub fn new(horizon: u32, block_tokens: u32) -> Self {
        let sample = Sample::one_in(horizon.div_ceil(FOLLOWED));
        Self {
            sample,
            horizon,
            block_tokens,
            hot: HotBlocks::default(),
            stack: LruStack::new(horizon.clamp(1, FOLLOWED) as usize),
            exact: StackDistances::default(),
            sampled: StackDistances::default(),
            uses: 0.0,
            prompt_tokens: 0.0,
            path: Vec::new(),
        }
    }

    /// A request came whose prompt fills `blocks` blocks. `key` names the content at a position and
    /// all before it, such as by its hash.
    pub fn observe(&mut self, blocks: usize, key: impl Fn(usize) -> u64, prompt_tokens: u32) {
        let mut requests = SampledRequests::new(self.sample);
        requests.push(blocks, key, prompt_tokens);
        self.take(&mut requests);
    }

    /// Observes all of `requests`, in their order, and empties it. They were sampled as this curve
    /// [samples](Self::sample).
    pub fn take(&mut self, requests: &mut SampledRequests) {
        debug_assert_eq!(
            requests.sample(),
            self.sample,
            "another sample says nothing about these blocks"
        );
        requests.iter().for_each(|request| self.observe_sampled(&request));
        requests.clear();
    }

    fn observe_sampled(&mut self, request: &SampledRequest<'_>) {
        self.prompt_tokens += f64::from(request.prompt_tokens);
        let head = self.hot.head(request.head.iter().copied());
        self.uses += (request.blocks - head) as f64;
        self.path.clear();
        self.path.extend(&request.head[..head]);
        // Of the head all are measured, so what the sample has of it would count twice.
        let others = request.sampled.iter().filter(|other| other.at as usize >= head);
        self.path.extend(others.map(|other| other.key));
        // In this order: a path must not stand above its own blocks.
        self.measure(head);
        self.renew(head);
    }

    /// The share of all prompt tokens that a tier of `capacity` blocks would have held: 0 to 1.
    pub fn token_hit_rate(&self, capacity: u32) -> f64 {
        // By what the sample had, not by its stride: what it has too much or too little of is
        // scaled away.
        let scale = if self.sampled.uses > 0.0 { self.uses / self.sampled.uses } else { 0.0 };
        // Nothing was followed further down, so whatever was found is a hit there.
        let capacity = if capacity < self.horizon { capacity } else { u32::MAX };
        let hits = self.exact.up_to(capacity) + self.sampled.up_to(capacity) * scale;
        (hits * f64::from(self.block_tokens) / self.prompt_tokens.max(1.0)).min(1.0)
    }

    /// Which blocks are followed.
    pub const fn sample(&self) -> Sample {
        self.sample
    }

    /// Leaves `share` of the weight of all that was observed, so that what follows counts for more.
    ///
    /// Called at regular intervals, it makes the curve that of recent traffic.
    pub fn fade(&mut self, share: f64) {
        self.exact.fade(share);
        self.sampled.fade(share);
        self.uses *= share;
        self.prompt_tokens *= share;
    }

    fn measure(&mut self, head: usize) {
        let (hot, others) = self.path.split_at(head);
        for &key in hot {
            self.exact.count(self.stack.above(key).map(|above| above + 1));
        }
        for &key in others {
            // Where the block stands in its own stretch is unknown: take the middle.
            let own = self.sample.stride().div_ceil(2);
            self.sampled.count(self.stack.above(key).map(|above| above + own));
        }
    }

    /// The root is to be on top.
    fn renew(&mut self, head: usize) {
        for (at, &key) in self.path.iter().enumerate().rev() {
            // A hot block stands for itself, since all of them are here; another one for its
            // stretch.
            self.stack.raise(key, if at < head { 1 } else { self.sample.stride() });
        }
    }
}

/// How often each stack distance occurred; exact below 64, to 3 % beyond.
#[derive(Debug, Default)]
struct StackDistances {
    counts: Vec<f64>,
    uses: f64,
}

impl StackDistances {
    /// `None` is a use of a block that was nowhere.
    fn count(&mut self, distance: Option<u32>) {
        self.uses += 1.0;
        let Some(distance) = distance else { return };
        let bucket = bucket_of(distance);
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0.0);
        }
        self.counts[bucket] += 1.0;
    }

    /// Uses at this distance or less.
    fn up_to(&self, distance: u32) -> f64 {
        let bucket = bucket_of(distance);
        let below: f64 = self.counts.iter().take(bucket).sum();
        let (first, next) = (first_of(bucket), first_of(bucket + 1));
        // Within a bucket, distances count as evenly spread.
        let part = (u64::from(distance) + 1 - first) as f64 / (next - first) as f64;
        below + part * self.counts.get(bucket).copied().unwrap_or(0.0)
    }

    fn fade(&mut self, share: f64) {
        self.counts.iter_mut().for_each(|count| *count *= share);
        self.uses *= share;
    }
}

/// Each power of two has 32 buckets; so have all numbers below 32.
const BUCKETS: u32 = 32;

fn bucket_of(distance: u32) -> usize {
    let shift = (distance | BUCKETS).ilog2() - BUCKETS.ilog2();
    (shift * BUCKETS + (distance >> shift)) as usize
}

/// The smallest distance of a bucket.
fn first_of(bucket: usize) -> u64 {
    let shift = (bucket as u32 / BUCKETS).saturating_sub(1);
    (bucket as u64 - u64::from(shift * BUCKETS)) << shift
}

/// At most `depth` keys, the one used last on top. A key stands for as many blocks as it weighs.
///
/// Keys stand in a lane of twice as many places, filled from the left, and a Fenwick tree over it
/// adds up the weights on the way to a place. A lane that is full is packed to the left: O(log n) a
/// use, amortised.
#[derive(Debug)]
struct LruStack {
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
    fn new(depth: usize) -> Self {
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
    fn above(&self, key: u64) -> Option<u32> {
        let place = *self.places.get(&key)?;
        Some(self.total - self.weights.sum_to(place))
    }

    /// Puts the key on top. If they are too many, the lowest falls off.
    ///
    /// `weight` is at least 1.
    fn raise(&mut self, key: u64, weight: u32) {
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

    use crate::eviction::EvictionKind;
    use crate::simulation::single::Policy;
    use crate::simulation::workload::{BLOCK_TOKENS, Request, Workload};

    use super::*;

    proptest! {
        #[test]
        fn a_distance_is_in_its_bucket(distance: u32) {
            let bucket = bucket_of(distance);
            let (first, next) = (first_of(bucket), first_of(bucket + 1));
            prop_assert!((first..next).contains(&u64::from(distance)));
            prop_assert!((next - first) * 32 <= first.max(32));
        }
    }

    /// Paths through one tree; a key tells its whole chain.
    fn paths() -> impl Strategy<Value = Vec<Vec<u64>>> {
        let chained = |path: Vec<u64>| {
            let key = |key: &mut u64, step| {
                *key = *key * 4 + step;
                Some(*key)
            };
            path.into_iter().scan(0, key).collect()
        };
        prop::collection::vec(prop::collection::vec(1_u64..4, 0..8).prop_map(chained), 0..150)
    }

    fn request(path: &[u64]) -> Request {
        let input_length = path.len() as u32 * BLOCK_TOKENS;
        Request { timestamp_ms: 0, input_length, output_length: 0, hash_ids: path.to_vec() }
    }

    proptest! {
        #[test]
        fn the_curve_is_that_of_lru_if_all_is_followed(paths in paths(), capacity in 0_u32..64) {
            let mut curve = MissRatio::new(1_000, BLOCK_TOKENS);
            for path in &paths {
                curve.observe(path.len(), |at| path[at], path.len() as u32 * BLOCK_TOKENS);
            }
            let workload: Workload = paths.iter().map(|path| request(path)).collect::<Vec<_>>().iter().collect();
            let lru = Policy::Online(EvictionKind::Lru).simulate(&workload, capacity);
            prop_assert!((curve.token_hit_rate(capacity) - lru.token_hit_rate()).abs() < 1e-9);
        }

        #[test]
        fn more_capacity_never_hits_less(paths in paths(), stride in 1_u32..5) {
            let mut curve = MissRatio::new(stride * FOLLOWED, BLOCK_TOKENS);
            for path in &paths {
                curve.observe(path.len(), |at| path[at], path.len() as u32 * BLOCK_TOKENS);
            }
            let rates: Vec<_> = (0..300).map(|capacity| curve.token_hit_rate(capacity)).collect();
            prop_assert!(rates.is_sorted() && rates.iter().all(|rate| (0.0..=1.0).contains(rate)));
        }
    }

    #[test]
    fn what_faded_counts_for_less() {
        let mut curve = MissRatio::new(100, BLOCK_TOKENS);
        (0..4).for_each(|key| curve.observe(1, |_| key, BLOCK_TOKENS));
        curve.fade(0.25);
        curve.observe(1, |_| 3, BLOCK_TOKENS);
        assert!((curve.token_hit_rate(10) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn nothing_observed_is_a_rate_of_zero() {
        assert!(MissRatio::new(0, 512).token_hit_rate(u32::MAX).abs() < f64::EPSILON);
    }

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
