//! A workload on a smaller scale, for simulations that would take too long.
//!
//! Each path is thinned out to the blocks in a [`Sample`], and a tier's capacity shrinks likewise.
//! The policies see every request, at its time, with a shorter path.
//!
//! The few blocks that one request in 20 begins with are left out: they are taken for resident from
//! their first use on. A sample with or without one of them would differ by more than all others
//! together change it.

use std::collections::{HashMap, HashSet};

use super::single::{ChainSource, Outcome, Policy};
use super::workload::{BLOCK_TOKENS, Request, Workload};
use crate::miss_ratio::MissRatio;
use crate::sample::Sample;

/// A block is left out if one request in this number begins with it.
// Rarer than hot blocks of the curve, for these are not measured but taken for resident.
const SHARE: usize = 20;
/// At most this number of blocks of a path is.
const DEEPEST: usize = 32;

/// Collects the requests of a [`Miniature`].
#[derive(Debug)]
pub struct TraceThinning {
    sample: Sample,
    /// In the sample, of all paths.
    blocks: usize,
    requests: Vec<ThinnedTrace>,
}

#[derive(Debug)]
struct ThinnedTrace {
    /// With the sampled blocks alone; `positions` says where in the path they were.
    request: Request,
    positions: Vec<u32>,
    blocks: u32,
    head: Vec<u64>,
}

impl TraceThinning {
    /// Keeps what `sample` holds of each path.
    pub const fn new(sample: Sample) -> Self {
        Self { sample, blocks: 0, requests: Vec::new() }
    }

    /// Adds a request, which comes after all those before.
    pub fn push(&mut self, request: &Request) {
        let path = request.full_blocks();
        let positions: Vec<_> =
            self.sample.positions(path.len(), |at| path[at]).map(|at| at as u32).collect();
        let hash_ids = positions.iter().map(|&at| path[at as usize]).collect();
        self.blocks += positions.len();
        // Where every block is in, none need be counted apart.
        let exact = self.sample == Sample::ALL;
        self.requests.push(ThinnedTrace {
            request: Request { hash_ids, ..*request },
            positions,
            blocks: path.len() as u32,
            head: if exact { Vec::new() } else { path[..path.len().min(DEEPEST)].to_vec() },
        });
    }

    /// Blocks that are kept so far, of all paths together: 8 bytes and more each.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// The miniature of all requests so far.
    pub fn finish(self) -> Miniature {
        let hot = self.hot();
        let mut small = Miniature {
            workload: Workload::default(),
            sample: self.sample,
            hot_blocks: hot.len() as u32,
            hot_hits: 0,
            scale: 1.0,
        };
        let (mut kept, mut all, mut hot_uses) = (0, 0, 0);
        for mut thinned in self.requests {
            let head = thinned.head.iter().take_while(|key| hot.contains(key)).count() as u32;
            let cut = thinned.positions.partition_point(|&at| at < head);
            thinned.request.hash_ids.drain(..cut);
            kept += thinned.request.hash_ids.len();
            all += (thinned.blocks - head) as usize;
            hot_uses += u64::from(head);
            small.workload.push(&thinned.request);
        }
        // The first use of each finds nothing.
        small.hot_hits = hot_uses - u64::from(small.hot_blocks);
        small.scale = all as f64 / kept.max(1) as f64;
        small
    }

    fn hot(&self) -> HashSet<u64> {
        let mut uses: HashMap<u64, usize> = HashMap::new();
        self.requests
            .iter()
            .flat_map(|thinned| &thinned.head)
            .for_each(|&key| *uses.entry(key).or_default() += 1);
        let least = self.requests.len() / SHARE;
        uses.retain(|_, uses| *uses > least);
        uses.into_keys().collect()
    }
}

/// A workload thinned out, and what turns results about it into results about the whole.
#[derive(Debug)]
pub struct Miniature {
    workload: Workload,
    sample: Sample,
    /// Blocks that were left out as always resident.
    hot_blocks: u32,
    /// Uses of them but the first.
    hot_hits: u64,
    /// Uses of other blocks, over those of the sampled ones.
    scale: f64,
}

impl Miniature {
    /// The requests with what is left of their paths.
    pub const fn workload(&self) -> &Workload {
        &self.workload
    }

    /// Which blocks are left.
    pub const fn sample(&self) -> Sample {
        self.sample
    }

    /// Distinct blocks of the whole, about.
    pub fn blocks(&self) -> u64 {
        u64::from(self.workload.blocks()) * u64::from(self.sample.stride())
            + u64::from(self.hot_blocks)
    }

    /// What stands for a tier of `capacity` blocks. At least 1, unless there is none.
    pub fn capacity(&self, capacity: u32) -> u32 {
        // What is left out still takes up room in the whole tier.
        let others = capacity.saturating_sub(self.hot_blocks);
        if capacity == 0 { 0 } else { (others / self.sample.stride()).max(1) }
    }

    /// Estimates what LRU would do at each of these capacities, in one pass over the requests: see
    /// [`MissRatio`].
    pub fn lru_token_hit_rates(&self, capacities: &[u32]) -> Vec<f64> {
        let mut curve = MissRatio::new(self.workload.blocks(), BLOCK_TOKENS);
        let (mut path, mut prompt_tokens) = (Vec::new(), 0);
        for visit in self.workload.visits() {
            path.clear();
            path.extend(visit.deepest.into_iter().flat_map(|deepest| self.workload.path(deepest)));
            let key = |at: usize| u64::from(path[path.len() - 1 - at].0);
            curve.observe(path.len(), key, visit.prompt_tokens);
            prompt_tokens += u64::from(visit.prompt_tokens);
        }
        let hot = self.hot_hit_tokens() as f64 / prompt_tokens.max(1) as f64;
        let rate = |&capacity: &u32| match capacity {
            0 => 0.0,
            _ => (curve.token_hit_rate(self.capacity(capacity)) * self.scale + hot).min(1.0),
        };
        capacities.iter().map(rate).collect()
    }

    /// How many blocks this number of sampled ones stands for.
    pub fn scaled(&self, blocks: u64) -> f64 {
        blocks as f64 * self.scale
    }

    /// Hits of the blocks that were left out, in tokens.
    pub const fn hot_hit_tokens(&self) -> u64 {
        self.hot_hits * BLOCK_TOKENS as u64
    }

    /// Estimates what a fresh policy of this kind would do in a tier of `capacity` blocks.
    pub fn simulate(&self, policy: Policy, capacity: u32) -> Outcome {
        let small = policy.simulate(&self.workload, self.capacity(capacity));
        let hot = if capacity == 0 { 0 } else { self.hot_hit_tokens() };
        let hit_tokens = self.scaled(small.hit_tokens).round() as u64 + hot;
        Outcome { hit_tokens: hit_tokens.min(small.prompt_tokens), ..small }
    }
}

#[cfg(test)]
mod tests {
    use crate::eviction::EvictionKind;

    use super::*;

    fn request(chain: u64, blocks: u64) -> Request {
        let hash_ids = (0..blocks).map(|at| if at == 0 { 1 } else { chain << 16 | at }).collect();
        Request {
            timestamp_ms: 0,
            input_length: blocks as u32 * BLOCK_TOKENS,
            output_length: 0,
            hash_ids,
        }
    }

    /// 200 chats in turn, all with the same first block; each turn adds 3 blocks.
    fn chats() -> Vec<Request> {
        (0..2_000).map(|at| request(1 + at % 200, 20 + 3 * (at / 200))).collect()
    }

    fn miniature(stride: u32) -> Miniature {
        let mut thinning = TraceThinning::new(Sample::one_in(stride));
        chats().iter().for_each(|request| thinning.push(request));
        thinning.finish()
    }

    #[test]
    fn a_sample_of_all_is_exact() {
        let (small, whole) = (miniature(1), chats().iter().collect::<Workload>());
        for policy in Policy::all() {
            assert_eq!(small.simulate(policy, 3_000), policy.simulate(&whole, 3_000), "{policy:?}");
        }
        assert_eq!(small.blocks(), u64::from(whole.blocks()));
    }

    #[test]
    fn the_block_that_all_begin_with_is_counted_apart() {
        let small = miniature(8);
        assert_eq!((small.hot_blocks, small.hot_hits), (1, 1_999));
    }

    #[test]
    fn a_small_tier_stands_for_a_large_one() {
        let (small, whole) = (miniature(8), chats().iter().collect::<Workload>());
        let policy = Policy::Online(EvictionKind::Lru);
        for capacity in [0, 4_000, 6_000, 8_000, 20_000] {
            let rates = [small.simulate(policy, capacity), policy.simulate(&whole, capacity)];
            let [estimate, exact] = rates.map(|outcome| outcome.token_hit_rate());
            assert!((estimate - exact).abs() < 0.03, "{capacity}: {estimate} instead of {exact}");
            let curve = small.lru_token_hit_rates(&[capacity])[0];
            assert!(
                (curve - exact).abs() < 0.03,
                "{capacity}: {curve} on the curve instead of {exact}"
            );
        }
        let off = small.blocks() as f64 / f64::from(whole.blocks()) - 1.0;
        assert!(off.abs() < 0.1, "{off}");
    }

    #[test]
    fn nothing_gives_nothing() {
        let small = TraceThinning::new(Sample::one_in(4)).finish();
        assert_eq!((small.blocks(), small.simulate(Policy::Belady, 7).hit_tokens), (0, 0));
    }
}
