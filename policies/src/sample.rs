//! Which blocks are looked at: by spatial sampling a few that stand for all, and the hot ones,
//! which stand for themselves.
//!
//! What a tier of C blocks does with all blocks, a tier of C ÷ s blocks does, about, with one block
//! in s, provided that a block is in the sample in all its uses or in none. (C. A. Waldspurger et
//! al., "Efficient MRC construction with SHARDS", FAST'15, and "Cache modeling and optimization
//! using miniature simulations", ATC'17.) Taking single blocks of a path, not whole paths, keeps
//! every request in: what is left of a path is a shorter path, so a sampled prefix-closed tier is a
//! prefix-closed tier.

use std::collections::HashMap;

/// Which blocks stand for all: a fixed share, evenly along each path.
///
/// A path is cut into groups of 1, 1, 2, 4, … blocks up to the sample's stride, and of the stride
/// from there on. The hash of a group's first block picks one of `stride` places; the block there
/// is in, where the group has that place. So each block is in with the same probability, every
/// stretch of a long path is sampled, and a look for the sampled blocks of a path reads few of its
/// keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    stride: u32,
}

impl Sample {
    /// Every block.
    pub const ALL: Self = Self { stride: 1 };

    /// One block in `stride`; every block for 0 and 1.
    pub const fn one_in(stride: u32) -> Self {
        Self { stride: if stride == 0 { 1 } else { stride } }
    }

    /// Blocks that a sampled one stands for.
    pub const fn stride(self) -> u32 {
        self.stride
    }

    /// The positions, in ascending order, of the sampled ones among the `blocks` blocks of a path.
    /// `key` names the content at a position and all before it.
    pub fn positions(
        self,
        blocks: usize,
        key: impl Fn(usize) -> u64,
    ) -> impl Iterator<Item = usize> {
        let stride = self.stride as usize;
        let group_after = move |&start: &usize| Some(start + start.clamp(1, stride));
        std::iter::successors(Some(0), group_after)
            .take_while(move |&start| start < blocks)
            .filter_map(move |start| {
                let place = share(mixed(key(start)), self.stride);
                (place < start.clamp(1, stride) && start + place < blocks).then_some(start + place)
            })
    }
}

/// A number below `places`, each equally likely if `bits` are random.
fn share(bits: u64, places: u32) -> usize {
    // By the upper bits: a remainder would cost a division, and prefer the first places.
    ((u128::from(bits) * u128::from(places)) >> 64) as usize
}

/// Spreads keys that may be small or regular over all 64 bits, one to one (the finaliser of
/// `MurmurHash3`).
const fn mixed(key: u64) -> u64 {
    let key = (key ^ (key >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let key = (key ^ (key >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    key ^ (key >> 33)
}

/// A block is hot if one request in this number uses it.
// Without these apart, conversation was off by tens of points: its first block is in every request.
const SHARE: u32 = 50;
/// Uses below which nothing is hot.
const LEAST_USES: u32 = 16;
/// Blocks of a path that may be hot, from its root on. Of longer shared prefixes a sample takes
/// enough.
pub(crate) const DEEPEST: usize = 32;
/// After this number of requests half of the counts is forgotten.
const WINDOW: u32 = 8_192;

/// Counts the uses of the blocks that are hot, and of those next to them.
///
/// A block is used whenever one below it is, so hot blocks are the heads of paths: a request costs
/// a look-up for each hot block that it begins with, and one more. At most some 25,000 blocks are
/// counted at a time, typically a few hundred.
#[derive(Debug, Default)]
pub(crate) struct HotBlocks {
    uses: HashMap<u64, u32>,
    requests: u32,
}

impl HotBlocks {
    /// Counts a request. Returns how many of its first blocks are hot.
    pub(crate) fn head(&mut self, path: impl IntoIterator<Item = u64>) -> usize {
        self.requests += 1;
        if self.requests >= WINDOW {
            self.forget_half();
        }
        let least = LEAST_USES.max(self.requests / SHARE);
        let is_hot = |key: &u64| {
            let uses = self.uses.entry(*key).or_default();
            *uses += 1;
            *uses >= least
        };
        // The first block that is not hot is counted as well: so it may become hot.
        path.into_iter().take(DEEPEST).take_while(is_hot).count()
    }

    fn forget_half(&mut self) {
        self.requests /= 2;
        // What is half as frequent as a hot block keeps its count; all others would only fill the
        // table.
        let least = self.requests / SHARE / 2;
        self.uses.retain(|_, uses| {
            *uses /= 2;
            *uses > least
        });
    }
}

/// The sampled parts of requests, in the order of their arrival.
#[derive(Debug)]
pub struct SampledRequests {
    sample: Sample,
    requests: Vec<HitBounds>,
    // Flat, and emptied for use again: once these have grown, a request allocates nothing.
    heads: Vec<u64>,
    sampled: Vec<SampledKey>,
}

/// What is kept of one request, and where its keys end.
#[derive(Clone, Copy, Debug)]
struct HitBounds {
    blocks: usize,
    prompt_tokens: u32,
    heads_end: usize,
    sampled_end: usize,
}

/// A sampled block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampledKey {
    /// Its position in the path.
    pub(crate) at: u32,
    pub(crate) key: u64,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampledRequest<'a> {
    pub(crate) blocks: usize,
    pub(crate) prompt_tokens: u32,
    /// The keys of its first blocks, sampled or not: these may be hot.
    pub(crate) head: &'a [u64],
    pub(crate) sampled: &'a [SampledKey],
}

impl SampledRequests {
    /// None yet, of which `sample` will be kept.
    pub const fn new(sample: Sample) -> Self {
        Self { sample, requests: Vec::new(), heads: Vec::new(), sampled: Vec::new() }
    }

    /// Which blocks are kept.
    pub const fn sample(&self) -> Sample {
        self.sample
    }

    /// A request came whose prompt fills `blocks` blocks. `key` names the content at a position and
    /// all before it.
    pub fn push(&mut self, blocks: usize, key: impl Fn(usize) -> u64, prompt_tokens: u32) {
        // Sampled or not: which of them are hot is known only when they are observed.
        self.heads.extend((0..blocks.min(DEEPEST)).map(&key));
        let sampled = self.sample.positions(blocks, &key);
        self.sampled.extend(sampled.map(|at| SampledKey { at: at as u32, key: key(at) }));
        let (heads_end, sampled_end) = (self.heads.len(), self.sampled.len());
        self.requests.push(HitBounds { blocks, prompt_tokens, heads_end, sampled_end });
    }

    /// Keys that are held.
    pub const fn keys(&self) -> usize {
        self.heads.len() + self.sampled.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = SampledRequest<'_>> {
        let starts = std::iter::once((0, 0));
        let starts = starts.chain(self.requests.iter().map(|of| (of.heads_end, of.sampled_end)));
        starts.zip(&self.requests).map(|((head, sampled), of)| SampledRequest {
            blocks: of.blocks,
            prompt_tokens: of.prompt_tokens,
            head: &self.heads[head..of.heads_end],
            sampled: &self.sampled[sampled..of.sampled_end],
        })
    }

    pub(crate) fn clear(&mut self) {
        self.requests.clear();
        self.heads.clear();
        self.sampled.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampled(stride: u32, path: &[u64]) -> Vec<usize> {
        Sample::one_in(stride).positions(path.len(), |at| path[at]).collect()
    }

    proptest! {
        #[test]
        fn a_longer_path_has_the_samples_of_a_shorter_one(
            path in prop::collection::vec(any::<u64>(), 0..300),
            stride in 0_u32..40,
            cut in 0_usize..300,
        ) {
            let cut = cut.min(path.len());
            let mut positions = sampled(stride, &path);
            prop_assert!(positions.is_sorted());
            positions.retain(|&at| at < cut);
            prop_assert_eq!(positions, sampled(stride, &path[..cut]));
        }
    }

    #[test]
    fn every_block_is_in_a_sample_of_all() {
        assert_eq!(sampled(1, &[7; 50]), (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn every_position_is_sampled_as_often_as_any_other() {
        let mut times = [0_u32; 40];
        for chain in 0_u64..16_000 {
            let path: Vec<u64> = (0..40).map(|at| chain << 8 | at).collect();
            sampled(16, &path).into_iter().for_each(|at| times[at] += 1);
        }
        assert!(times.iter().all(|times| (900..1_100).contains(times)), "{times:?}");
    }
}
