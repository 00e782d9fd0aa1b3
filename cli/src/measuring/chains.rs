//! The chains of a bench, the same in every run.

use kvbm::BlockHash;

/// Blocks of the longest prompts: 1,048,576 tokens at 16 a block.
pub const LONGEST: usize = 65_536;
/// Blocks of a long prompt: 131,072 tokens.
pub const LONG: usize = 8192;
/// Blocks of a medium prompt: 4,608 tokens.
pub const MEDIUM: usize = 288;
/// Blocks of a filler chain, and of a chain that is cycled through a full tier.
pub const SHORT: usize = 64;

/// Leading blocks that the filler chains of one family share.
const SHARED: usize = 16;
/// Filler chains in a family.
const FAMILY: usize = 16;

/// Pseudo-random numbers (`SplitMix64`, Steele et al. 2014), the same for the same seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A stream of its own for each seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// A number below `bound`, which is not 0.
    pub const fn below(&mut self, bound: usize) -> usize {
        ((self.next() as u128 * bound as u128) >> 64) as usize
    }

    /// Puts `items` into random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// A chain of `blocks` new blocks.
    pub fn chain(&mut self, blocks: usize) -> Vec<BlockHash> {
        let hash =
            |_| BlockHash::from_u128(u128::from(self.next()) << 64 | u128::from(self.next()));
        (0..blocks).map(hash).collect()
    }
}

/// A prompt, and how many of its leading blocks are saved.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Its blocks, root first.
    pub hashes: Vec<BlockHash>,
    /// Leading blocks in the host tier.
    pub saved: usize,
}

/// The prompts of a table for matching.
#[derive(Clone, Debug)]
pub struct Prompts {
    /// Of [`LONGEST`] blocks; a quarter of the resident ones are theirs.
    pub longest: Vec<Prompt>,
    /// Of [`LONG`] blocks; a quarter.
    pub long: Vec<Prompt>,
    /// Of [`MEDIUM`] blocks; one eighth.
    pub medium: Vec<Prompt>,
    /// Of [`SHORT`] blocks, wholly resident; the rest.
    pub filler: Vec<Prompt>,
}

impl Prompts {
    /// Prompts of which about `blocks` blocks are saved.
    pub fn new(blocks: usize) -> Self {
        let mut random = Random::new(1);
        Self {
            longest: prompts(&mut random, LONGEST, blocks / 4),
            long: prompts(&mut random, LONG, blocks / 4),
            medium: prompts(&mut random, MEDIUM, blocks / 8),
            filler: filler(&mut random, blocks * 3 / 8),
        }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Prompt> {
        self.longest.iter().chain(&self.long).chain(&self.medium).chain(&self.filler)
    }

    /// Different blocks that are saved.
    pub fn saved(&self) -> usize {
        let shared = self.filler.len() / FAMILY * (FAMILY - 1) * SHARED;
        self.iter().map(|prompt| prompt.saved).sum::<usize>() - shared
    }
}

/// Prompts of `len` blocks until `saved` blocks are saved: of each a random part, the greater of
/// two draws. A small table holds at least four, none of them wholly.
fn prompts(random: &mut Random, len: usize, saved: usize) -> Vec<Prompt> {
    let deepest = len.min(saved / 4).max(2);
    let mut prompts = Vec::new();
    let mut sum = 0;
    while sum < saved || prompts.len() < 2 {
        let depth = 1 + random.below(deepest).max(random.below(deepest));
        sum += depth;
        prompts.push(Prompt { hashes: random.chain(len), saved: depth });
    }
    prompts
}

/// Families of short chains with a shared root.
fn filler(random: &mut Random, saved: usize) -> Vec<Prompt> {
    let family_blocks = SHARED + FAMILY * (SHORT - SHARED);
    let mut filler = Vec::new();
    for _ in 0..saved.div_ceil(family_blocks) {
        let root = random.chain(SHARED);
        for _ in 0..FAMILY {
            let hashes = [root.clone(), random.chain(SHORT - SHARED)].concat();
            filler.push(Prompt { hashes, saved: SHORT });
        }
    }
    filler
}

/// Pieces of prompts in the order in which a server would save them: many prompts at a time, each
/// in steps of [`SHORT`] blocks. Returns `(prompt, from, to)`.
pub fn saves(depths: &[usize]) -> Vec<(usize, usize, usize)> {
    let steps =
        |(prompt, &depth): (usize, &usize)| std::iter::repeat_n(prompt, depth.div_ceil(SHORT));
    let mut order: Vec<usize> = depths.iter().enumerate().flat_map(steps).collect();
    Random::new(2).shuffle(&mut order);
    let mut saved = vec![0; depths.len()];
    let save = |prompt: usize| {
        let from: usize = saved[prompt];
        saved[prompt] = (from + SHORT).min(depths[prompt]);
        (prompt, from, saved[prompt])
    };
    order.into_iter().map(save).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_each_prompt_in_order() {
        let depths = [130, 64, 0, 1];
        let mut saved = [0; 4];
        for (prompt, from, to) in saves(&depths) {
            assert_eq!(from, saved[prompt]);
            assert!(from < to && to <= from + SHORT);
            saved[prompt] = to;
        }
        assert_eq!(saved, depths);
    }

    #[test]
    fn prompts_fill_the_table_to_its_size() {
        for blocks in [4000, 100_000] {
            let prompts = Prompts::new(blocks);
            let saved = prompts.saved();
            assert!(saved.abs_diff(blocks) < blocks / 2, "{saved} of {blocks}");
            assert!(prompts.iter().all(|prompt| prompt.saved <= prompt.hashes.len()));
        }
    }
}
