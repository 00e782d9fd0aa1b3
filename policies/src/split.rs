//! Load or recompute: how many held blocks are loaded faster than they are computed.
//!
//! The leading blocks of a prompt lie in ever slower tiers. Loading k of them and computing the
//! rest takes, one after the other, the loads of the first k and the prefill of the others. Within
//! a tier each block costs the same, so the best k is where one of the tiers ends.

/// Leading blocks, behind those before, that are read from one place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leg {
    /// How many.
    pub blocks: u32,
    /// Seconds that a block takes from there; `None` if that is not known, and then it counts as
    /// nothing.
    pub block_s: Option<f64>,
}

/// How many leading blocks of those on `legs` to load, if computing a block takes `prefill_s`
/// seconds. Of equals the most: loading leaves the engine free for others.
pub fn split(legs: impl IntoIterator<Item = Leg>, prefill_s: f64) -> u32 {
    let (mut blocks, mut gain) = (0, 0.0);
    let mut best = (0, 0.0);
    for leg in legs {
        blocks += leg.blocks;
        gain += f64::from(leg.blocks) * (prefill_s - leg.block_s.unwrap_or(0.0));
        // Not up to the first slow tier: a slow stretch may be worth crossing for what lies behind
        // it.
        if gain >= best.1 {
            best = (blocks, gain);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn leg(blocks: u32, seconds: f64) -> Leg {
        Leg { blocks, block_s: Some(seconds) }
    }

    #[test]
    fn a_tier_slower_than_the_engine_is_not_read() {
        assert_eq!(split([leg(4, 0.0), leg(10, 0.1), leg(100, 3.0)], 1.0), 14);
        assert_eq!(split([leg(10, 2.0)], 1.0), 0);
    }

    #[test]
    fn a_slow_stretch_is_crossed_if_what_follows_pays() {
        assert_eq!(split([leg(1, 3.0), leg(100, 0.1)], 1.0), 101);
        assert_eq!(split([leg(100, 3.0), leg(1, 0.1)], 1.0), 0);
    }

    #[test]
    fn what_is_not_known_is_tried() {
        assert_eq!(split([Leg { blocks: 7, block_s: None }], 1e-9), 7);
    }

    proptest! {
        #[test]
        fn no_other_split_is_sooner(legs in prop::collection::vec((0_u32..50, 0.0_f64..3.0), 0..4)) {
            let total: u32 = legs.iter().map(|leg| leg.0).sum();
            let seconds = |loaded: u32| {
                let mut left = loaded;
                let load = |&(blocks, block_s): &(u32, f64)| {
                    let taken = left.min(blocks);
                    left -= taken;
                    f64::from(taken) * block_s
                };
                legs.iter().map(load).sum::<f64>() + f64::from(total - loaded)
            };
            let chosen = split(legs.iter().map(|&(blocks, block_s)| leg(blocks, block_s)), 1.0);
            for other in 0..=total {
                prop_assert!(seconds(chosen) <= seconds(other) + 1e-9);
            }
        }
    }
}
