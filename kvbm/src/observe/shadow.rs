//! Shadow verification: a share of the hits is computed again, and compared.
//!
//! Checksums say that a block is what was stored. They do not say that it is what its name
//! promises: an engine may hash too little, two engines may read a layout differently, a transform
//! may have a fault. Recomputing a served block shows that. Equal tokens computed in other chunks
//! differ in their lowest bits, so blocks are compared by their distance: near one for other
//! tokens, thousands of times less for the same tokens.

use std::sync::atomic::{AtomicU64, Ordering};

use kvbm_tiers::Tier;

use crate::error::{Error, Result};
use crate::sync::Mutex;

/// What a block's bytes are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elements {
    /// IEEE 754, 32 bits.
    F32,
    /// IEEE 754, 16 bits.
    F16,
    /// The upper half of an `F32`.
    Bf16,
}

impl Elements {
    /// The largest distance of two computations of the same block, as a share of its length as a
    /// vector. Measured between chunks of other sizes: 1e-5, 7e-3 and 6e-2 at most
    /// (docs/reliability.md); one wrong token of 16 gives 0.3.
    pub const fn tolerance(self) -> f64 {
        match self {
            Self::F32 => 1e-3,
            Self::F16 => 2e-2,
            Self::Bf16 => 1e-1,
        }
    }

    const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    fn value(self, bytes: &[u8]) -> f64 {
        match (self, bytes) {
            (Self::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
            (Self::Bf16, &[a, b]) => f32::from_le_bytes([0, 0, a, b]).into(),
            (Self::F16, &[a, b]) => half(u16::from_le_bytes([a, b])),
            _ => f64::NAN,
        }
    }

    /// How far `served` is from `recomputed`, as a share of the length of the latter; NaN if they
    /// hold NaN.
    fn distance(self, served: &[u8], recomputed: &[u8]) -> f64 {
        let values = |bytes: &'_ [u8]| {
            bytes.chunks_exact(self.bytes()).map(move |value| self.value(value)).collect()
        };
        let (served, recomputed): (Vec<f64>, Vec<f64>) = (values(served), values(recomputed));
        let square = |sum: f64, value: f64| value.mul_add(value, sum);
        let apart = served.iter().zip(&recomputed).map(|(a, b)| a - b).fold(0.0, square);
        let length = recomputed.iter().copied().fold(0.0, square);
        if apart == 0.0 { 0.0 } else { (apart / length).sqrt() }
    }
}

/// An `F16`, exactly.
fn half(bits: u16) -> f64 {
    let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from((bits >> 10) & 0x1f), f64::from(bits & 0x3ff));
    sign * match exponent {
        0 => fraction * 2_f64.powi(-24),
        0x1f if fraction == 0.0 => f64::INFINITY,
        0x1f => f64::NAN,
        _ => (fraction / 1_024.0 + 1.0) * 2_f64.powi(exponent - 15),
    }
}

/// A hit that the engine should compute again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShadowSample {
    /// Which block of the chain.
    pub position: usize,
    /// The fastest tier below the device that held it.
    pub tier: Tier,
}

/// How two computations of a block compare.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ShadowVerdict {
    /// They differ as much as two computations may.
    Same,
    /// The block is wrong: it has left every tier, with its descendants.
    Wrong {
        /// Their distance, as a share of the length.
        distance: f64,
    },
}

/// What was compared of one tier's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShadowCounts {
    /// Blocks compared.
    pub compared: u64,
    /// Of these, blocks that were wrong.
    pub wrong: u64,
    /// The tier gives no more blocks until [`Manager::reset`](crate::Manager::reset).
    pub is_withdrawn: bool,
}

impl ShadowCounts {
    /// The share of wrong blocks is not larger than this, with a confidence of 95 % (Clopper and
    /// Pearson, one-sided). 1 if nothing was compared.
    pub fn upper_bound(&self) -> f64 {
        bisect(|share| at_most(self.wrong, self.compared, share) > MISTRUST)
    }

    /// Nor is it smaller than this.
    fn lower_bound(&self) -> f64 {
        if self.wrong == 0 {
            return 0.0;
        }
        bisect(|share| 1.0 - at_most(self.wrong - 1, self.compared, share) < MISTRUST)
    }
}

/// One minus the confidence.
const MISTRUST: f64 = 0.05;

/// The largest share for which `holds` is true; it is true for all below.
fn bisect(holds: impl Fn(f64) -> bool) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if holds(middle) { low = middle } else { high = middle }
    }
    high
}

/// How likely `some` or fewer of `all` are, each with probability `share`.
fn at_most(some: u64, all: u64, share: f64) -> f64 {
    if some >= all {
        return 1.0;
    }
    // By logarithms: with a million samples the single terms are too small for a double.
    let (log_is, log_is_not) = (share.ln(), (-share).ln_1p());
    let mut log_ways = 0.0;
    let mut sum = 0.0;
    for count in 0..=some {
        if count > 0 {
            log_ways += ((all - count + 1) as f64).ln() - (count as f64).ln();
        }
        sum += (log_ways + count as f64 * log_is + (all - count) as f64 * log_is_not).exp();
    }
    sum.min(1.0)
}

/// A tier with a larger wrong share than this, with a confidence of 95 %, gives no more blocks.
const MAX_WRONG: f64 = 1e-3;
/// But not for fewer wrong blocks than these: one may be an engine's fault in its second
/// computation.
const MIN_WRONG: u64 = 3;
/// The fractional parts of its multiples are spread evenly.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// Chooses leases whose hits are computed again, and counts the results.
#[derive(Debug, Default)]
pub(crate) struct Shadow {
    share: f64,
    /// Leases with hits so far.
    leases: AtomicU64,
    counts: Mutex<[ShadowCounts; Tier::COUNT]>,
}

impl Shadow {
    pub(crate) fn new(share: f64) -> Self {
        Self { share, ..Self::default() }
    }

    /// Whether the engine should compute the hits of the next lease again.
    pub(crate) fn chooses(&self) -> bool {
        if self.share <= 0.0 {
            return false;
        }
        let lease = self.leases.fetch_add(1, Ordering::Relaxed);
        (lease as f64 * GOLDEN).fract() < self.share
    }

    pub(crate) fn counts(&self, tier: Tier) -> ShadowCounts {
        self.counts.lock()[tier.index()]
    }

    /// Notes a comparison; returns the tier's counts, and whether it has just been found guilty.
    pub(crate) fn note(&self, tier: Tier, is_wrong: bool) -> (ShadowCounts, bool) {
        let mut all = self.counts.lock();
        let counts = &mut all[tier.index()];
        counts.compared += 1;
        counts.wrong += u64::from(is_wrong);
        let is_guilty = counts.wrong >= MIN_WRONG && counts.lower_bound() > MAX_WRONG;
        let is_new = is_guilty && !counts.is_withdrawn;
        counts.is_withdrawn |= is_guilty;
        (*counts, is_new)
    }

    /// The stored blocks are gone: the counts begin anew.
    pub(crate) fn reset(&self) {
        *self.counts.lock() = Default::default();
    }
}

/// Compares two computations of a block.
pub(crate) fn compare(
    elements: Elements,
    served: &[u8],
    recomputed: &[u8],
) -> Result<ShadowVerdict> {
    if served.len() != recomputed.len()
        || served.is_empty()
        || !served.len().is_multiple_of(elements.bytes())
    {
        let message = format!(
            "{} bytes served and {} recomputed are no two computations of a block: give both whole",
            served.len(),
            recomputed.len()
        );
        return Err(Error::invalid(message));
    }
    let distance = elements.distance(served, recomputed);
    // NaN is in no range.
    let is_same = distance <= elements.tolerance();
    Ok(if is_same { ShadowVerdict::Same } else { ShadowVerdict::Wrong { distance } })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    fn f32s(values: impl Iterator<Item = f32>) -> Vec<u8> {
        values.flat_map(f32::to_le_bytes).collect()
    }

    fn wave(phase: f32) -> impl Iterator<Item = f32> {
        (0..512).map(move |at| (at as f32 * 0.37 + phase).sin())
    }

    #[test]
    fn only_the_same_tokens_match_whatever_their_chunks() {
        let served = f32s(wave(0.0));
        let again = f32s(wave(0.0).map(|value| value * (1.0 + 1e-5)));
        let one_token =
            f32s(wave(0.0).enumerate().map(|(at, value)| if at < 32 { -value } else { value }));
        assert_eq!(compare(Elements::F32, &served, &again).unwrap(), ShadowVerdict::Same);
        for other in
            [f32s(wave(1.0)), one_token, f32s(wave(0.0).map(|_| f32::NAN)), vec![0; served.len()]]
        {
            let verdict = compare(Elements::F32, &served, &other).unwrap();
            assert!(matches!(verdict, ShadowVerdict::Wrong { .. }), "{verdict:?}");
        }
        let zeros = vec![0; 64];
        assert_eq!(compare(Elements::Bf16, &zeros, &zeros).unwrap(), ShadowVerdict::Same);
        assert_eq!(compare(Elements::F32, &served, &zeros).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(compare(Elements::F32, &[], &[]).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn halves_are_what_they_say() {
        let known = [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65_504.0),
            (1, 2_f64.powi(-24)),
            (0x3555, 0.333_251_953_125),
        ];
        for (bits, value) in known {
            assert!(
                (Elements::F16.value(&u16::to_le_bytes(bits)) - value).abs() < 1e-12,
                "{bits:x}"
            );
        }
        assert!(half(0x7e00).is_nan() && half(0xfc00) == f64::NEG_INFINITY);
        assert!((Elements::Bf16.value(&[0x80, 0x3f]) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn bounds_are_those_of_the_tables() {
        let counts = |wrong, compared| ShadowCounts { compared, wrong, is_withdrawn: false };
        assert!((counts(0, 0).upper_bound() - 1.0).abs() < 1e-9);
        // 1 - 0.05^(1/n), and R's binom.test(k, n, alternative = "less"/"greater").
        assert!((counts(0, 1_000).upper_bound() - 0.002_991).abs() < 1e-6);
        assert!((counts(1, 100).upper_bound() - 0.046_557).abs() < 1e-5);
        assert!((counts(3, 10).lower_bound() - 0.087_264).abs() < 1e-5);
        assert!((counts(0, 1_000_000).upper_bound() - 2.995_7e-6).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn as_many_are_chosen_as_are_to_be(percent in 0_u32..=100) {
            let shadow = Shadow::new(f64::from(percent) / 100.0);
            let chosen = (0..10_000).filter(|_| shadow.chooses()).count();
            prop_assert!((chosen as i64 - i64::from(percent) * 100).abs() <= 20, "{}", chosen);
        }
    }

    #[test]
    fn a_tier_is_guilty_when_too_much_is_wrong() {
        let shadow = Shadow::new(1.0);
        (0..2_000).for_each(|_| assert!(!shadow.note(Tier::Disk, false).1));
        let guilty: Vec<_> = (0..9).map(|_| shadow.note(Tier::Disk, true).1).collect();
        // Three of 2,003 would be by chance too often.
        assert_eq!(guilty.iter().filter(|&&is_new| is_new).count(), 1, "{guilty:?}");
        assert!(!guilty[..3].contains(&true) && shadow.counts(Tier::Disk).is_withdrawn);
        assert!(!shadow.counts(Tier::Host).is_withdrawn);
        shadow.reset();
        assert_eq!(shadow.counts(Tier::Disk), ShadowCounts::default());
    }
}
