//! Where the boundaries of chains were at their last lease: the next search begins there.
//!
//! Most prompts continue an earlier one, and most of what that one found is still there. Then a
//! search takes one round, instead of four or five rounds of cache misses. A hint may be wrong or
//! another chain's: what it says is looked up, so it costs only time.

use kvbm_tiers::Tier;

use super::index::KeyHash;
use crate::names::hash::Chain;

/// Blocks of the largest tier for each hint: shorter chains need none.
const BLOCKS_A_HINT: usize = 256;
/// The fewest hints, and the most: 1.3 MB.
const RANGE: (usize, usize) = (64, 1 << 16);
/// A search of a shorter chain takes one or two rounds anyway. Tests have short chains, and hints
/// for them.
const LEAST_BLOCKS: usize = if cfg!(test) { 4 } else { 32 };

/// By tier: how many leading blocks it had.
pub(super) type TierBoundaries = [u32; Tier::COUNT];

/// A table with one place for each hash: a later entry displaces an earlier one.
#[derive(Debug)]
pub(super) struct BoundaryHints(Box<[BoundaryHint]>);

#[derive(Clone, Copy, Debug, Default)]
struct BoundaryHint {
    tag: u32,
    boundaries: TierBoundaries,
}

impl BoundaryHints {
    /// For tiers of `blocks` blocks.
    pub(super) fn with_room_for(blocks: usize) -> Self {
        let hints = (blocks / BLOCKS_A_HINT).next_power_of_two().clamp(RANGE.0, RANGE.1);
        Self(vec![BoundaryHint::default(); hints].into_boxed_slice())
    }

    /// Where the boundaries of such a chain were.
    pub(super) fn find(&self, chain: Chain<'_>) -> Option<TierBoundaries> {
        let (place, tag) = anchor(chain)?.halves();
        let hint = self.0[self.place(place)];
        (hint.tag == tag).then_some(hint.boundaries)
    }

    pub(super) fn note(&mut self, chain: Chain<'_>, boundaries: TierBoundaries) {
        if let Some((place, tag)) = anchor(chain).map(KeyHash::halves) {
            let place = self.place(place);
            self.0[place] = BoundaryHint { tag, boundaries };
        }
    }

    fn place(&self, hash: u32) -> usize {
        hash as usize & (self.0.len() - 1)
    }
}

/// The block that identifies a chain after it has grown: between a quarter and half of the way, and
/// the same one until the chain is twice as long. The root would not do, since many prompts share
/// it.
fn anchor(chain: Chain<'_>) -> Option<KeyHash> {
    let is_long = chain.len() >= LEAST_BLOCKS;
    is_long.then(|| KeyHash::of(chain.key((1 << chain.len().ilog2()) / 2)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::hash::BlockHash;

    fn chain(of: u128, blocks: u128) -> Vec<BlockHash> {
        (0..blocks).map(|at| BlockHash::from_u128(of << 64 | at << 8)).collect()
    }

    #[test]
    fn a_chain_that_has_grown_is_known_again_and_another_is_not() {
        let mut hints = BoundaryHints::with_room_for(1_000_000);
        let (before, after, other) = (chain(1, 300), chain(1, 500), chain(2, 300));
        hints.note(Chain::from(&before), [7, 250, 0, 0]);
        assert_eq!(hints.find(Chain::from(&after)), Some([7, 250, 0, 0]));
        assert_eq!(hints.find(Chain::from(&other)), None);
    }

    #[test]
    fn short_chains_have_none() {
        let mut hints = BoundaryHints::with_room_for(0);
        let short = chain(1, LEAST_BLOCKS as u128 - 1);
        hints.note(Chain::from(&short), [1, 1, 1, 1]);
        assert_eq!(hints.find(Chain::from(&short)), None);
    }
}
