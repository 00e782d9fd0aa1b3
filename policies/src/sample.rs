//! Spatial sampling: a few blocks stand for all.
//!
//! What a tier of C blocks does with all blocks, a tier of C ÷ s blocks does, about, with one block
//! in s, provided that a block is in the sample in all its uses or in none. (C. A. Waldspurger et
//! al., "Efficient MRC construction with SHARDS", FAST'15, and "Cache modeling and optimization
//! using miniature simulations", ATC'17.) Taking single blocks of a path, not whole paths, keeps
//! every request in: what is left of a path is a shorter path, so a sampled prefix-closed tier is a
//! prefix-closed tier.

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
