//! Contents of blocks that tell their name: generated from a block's hash, and checked byte by
//! byte.
//!
//! The words of a block are a Weyl sequence, `start + i · step`. Start and step are scrambled from
//! the hash, so two blocks differ everywhere but by chance, and a block that is shifted, cut short
//! or patched with an older one differs from itself. It takes one addition per word, so memory is
//! what limits the speed.

use kvbm::BlockHash;
use kvbm_cli::measuring::chains::Random;

const WORD: usize = size_of::<u64>();
/// Words between two looks at the result of a check: enough to keep the loop free of branches.
const STRETCH: usize = 512 * WORD;

/// The content of one block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockPattern {
    start: u64,
    step: u64,
}

impl BlockPattern {
    /// The content of the block called `hash`.
    pub(crate) fn of(hash: BlockHash) -> Self {
        let hash = hash.get();
        let (low, high) = (hash as u64, (hash >> 64) as u64);
        Self {
            start: scramble(low ^ high.rotate_left(32)),
            step: scramble(high.wrapping_add(low)) | 1,
        }
    }

    /// Writes the block's content.
    pub(crate) fn fill(self, block: &mut [u8]) {
        let (words, rest) = block.as_chunks_mut::<WORD>();
        let mut next = self.start;
        for word in words {
            *word = next.to_le_bytes();
            next = next.wrapping_add(self.step);
        }
        rest.copy_from_slice(&next.to_le_bytes()[..rest.len()]);
    }

    /// Whether every byte is as [`fill`](Self::fill) wrote it.
    pub(crate) fn matches(self, block: &[u8]) -> bool {
        let mut next = self.start;
        block.chunks(STRETCH).all(|stretch| {
            let (words, rest) = stretch.as_chunks::<WORD>();
            let mut difference = 0;
            for word in words {
                difference |= u64::from_le_bytes(*word) ^ next;
                next = next.wrapping_add(self.step);
            }
            difference == 0 && *rest == next.to_le_bytes()[..rest.len()]
        })
    }
}

/// A bijection in which every bit of the input reaches every bit of the output.
pub(crate) const fn scramble(word: u64) -> u64 {
    Random::new(word).next()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn block(hash: u128, bytes: usize) -> Vec<u8> {
        let mut block = vec![0; bytes];
        BlockPattern::of(BlockHash::from_u128(hash)).fill(&mut block);
        block
    }

    fn matches(hash: u128, block: &[u8]) -> bool {
        BlockPattern::of(BlockHash::from_u128(hash)).matches(block)
    }

    proptest! {
        #[test]
        fn a_block_matches_its_own_hash_alone(a in any::<u128>(), b in any::<u128>(), bytes in 16_usize..20_000) {
            let filled = block(a, bytes);
            prop_assert!(matches(a, &filled));
            prop_assert!(a == b || !matches(b, &filled));
        }

        #[test]
        fn every_changed_byte_shows(hash in any::<u128>(), bytes in 1_usize..20_000, at in any::<prop::sample::Index>(),
                                    change in 1_u8..) {
            let mut filled = block(hash, bytes);
            filled[at.index(bytes)] ^= change;
            prop_assert!(!matches(hash, &filled));
        }

        #[test]
        fn shifted_and_half_copied_blocks_show(hash in any::<u128>(), other in any::<u128>(),
                                               by in 1_usize..4_000, keep in 1_usize..4_000) {
            let filled = block(hash, 8_192);
            let mut shifted = filled.clone();
            shifted.rotate_left(by);
            prop_assert!(!matches(hash, &shifted));
            let mut half = block(other, 8_192);
            half[..keep].copy_from_slice(&filled[..keep]);
            prop_assert!(hash == other || !matches(hash, &half));
        }
    }

    #[test]
    fn neighbours_in_name_have_nothing_in_common() {
        let (a, b) = (block(1, 8_192), block(2, 8_192));
        let equal = a.chunks(8).zip(b.chunks(8)).filter(|(a, b)| a == b).count();
        assert_eq!(equal, 0);
        assert!(!matches(0, &[0; 4096]), "a slot never written");
    }
}
