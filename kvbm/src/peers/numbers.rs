//! Which type numbers have, by the words of a `dtype`.

use kvbm_tiers::numbers::HalfType;

/// The type of a cache's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NumberType {
    Half(HalfType),
    /// e4m3, each number of which stands for itself times a scale.
    Fp8,
}

/// The words for them: ours, and those of engines.
const WORDS: [(&str, NumberType); 8] = [
    ("fp16", NumberType::Half(HalfType::F16)),
    ("f16", NumberType::Half(HalfType::F16)),
    ("float16", NumberType::Half(HalfType::F16)),
    ("bf16", NumberType::Half(HalfType::Bf16)),
    ("bfloat16", NumberType::Half(HalfType::Bf16)),
    ("fp8_e4m3", NumberType::Fp8),
    ("fp8_e4m3fn", NumberType::Fp8),
    ("float8_e4m3fn", NumberType::Fp8),
];

/// The type that numbers have, and the one that they get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NumberTypes {
    /// From this type of 16 bits to the other one.
    Halves(HalfType),
    FromFp8(HalfType),
    ToFp8(HalfType),
}

impl NumberTypes {
    /// By the `dtype` of fingerprints. `None`: they are of one type, or differ in more than that.
    pub(super) fn between(from: &str, to: &str) -> Option<Self> {
        let [(from, around), (to, also_around)] = [told(from)?, told(to)?];
        if around != also_around {
            return None;
        }
        match (from, to) {
            (NumberType::Half(from), NumberType::Half(to)) => {
                (from != to).then_some(Self::Halves(from))
            }
            (NumberType::Fp8, NumberType::Half(to)) => Some(Self::FromFp8(to)),
            (NumberType::Half(from), NumberType::Fp8) => Some(Self::ToFp8(from)),
            (NumberType::Fp8, NumberType::Fp8) => None,
        }
    }

    /// Bytes of a number, before and after.
    pub(super) const fn bytes(self) -> [usize; 2] {
        match self {
            Self::Halves(_) => [2, 2],
            Self::FromFp8(_) => [1, 2],
            Self::ToFp8(_) => [2, 1],
        }
    }
}

/// The one type that a `dtype` names, as often as it likes, and what it says beside. With FP8 it may
/// also name that of 16 bits in which the model computes.
fn told(dtype: &str) -> Option<(NumberType, String)> {
    let (mut named, mut around) = (Vec::new(), String::new());
    let is_between = |letter: char| !letter.is_ascii_alphanumeric() && letter != '_';
    for word in dtype.split_inclusive(is_between) {
        let name = word.trim_end_matches(is_between);
        match WORDS.iter().find(|(known, _)| *known == name) {
            Some((_, of)) => {
                named.push(*of);
                around += "number";
                around += &word[name.len()..];
            }
            None => around += word,
        }
    }
    let of = named.iter().find(|of| **of == NumberType::Fp8).or(named.first())?;
    let is_one = *of == NumberType::Fp8 || named.iter().all(|other| other == of);
    is_one.then_some((*of, around))
}

#[cfg(test)]
pub(super) mod tests {
    use kvbm_tiers::numbers::halves_to_halves;

    use super::*;

    /// What the bits of a number mean, by the definition of IEEE 754: a sign, an exponent, and the bits
    /// of a significand. `None`: it is no finite number.
    pub(in crate::peers) fn value(bits: u16, significand_bits: u32) -> Option<f64> {
        let exponent_bits = 15 - significand_bits;
        let exponent = i32::from(bits & 0x7FFF) >> significand_bits;
        let fraction =
            f64::from(bits & ((1 << significand_bits) - 1)) / f64::from(1 << significand_bits);
        let origin = (1 << (exponent_bits - 1)) - 1;
        if exponent == (1 << exponent_bits) - 1 {
            return None;
        }
        let (whole, exponent) = if exponent == 0 { (0.0, 1) } else { (1.0, exponent) };
        let magnitude = (whole + fraction) * 2.0_f64.powi(exponent - origin);
        Some(if bits >> 15 == 1 { -magnitude } else { magnitude })
    }

    pub(in crate::peers) const F16_BITS: u32 = 10;
    pub(in crate::peers) const BF16_BITS: u32 = 7;

    /// The nearest of all numbers to a magnitude, of two as near the even one; and whether it is too
    /// large for any.
    pub(in crate::peers) fn nearest(magnitude: f64, all: &[f64]) -> (u16, bool) {
        let above = all.partition_point(|of| *of < magnitude);
        let last = all.len() - 1;
        if above > last {
            // What would come next, if there were another exponent.
            let next = 2.0 * all[last] - all[last - 1];
            return (last as u16, magnitude >= f64::midpoint(all[last], next));
        }
        let below = above.saturating_sub(1);
        let (down, up) = (magnitude - all[below], all[above] - magnitude);
        let is_up = up < down || (up.total_cmp(&down).is_eq() && above % 2 == 0);
        (if is_up { above } else { below } as u16, false)
    }

    fn each_number_is_the_nearest(from: HalfType, [from_bits, to_bits]: [u32; 2]) -> usize {
        let all_bits: Vec<_> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut block = all_bits.clone();
        let counted = halves_to_halves(&mut block, from);
        // It does not matter beside which others a number is.
        let mut alone = all_bits;
        alone.chunks_mut(2).for_each(|number| _ = halves_to_halves(number, from));
        assert!(alone == block);
        let all: Vec<_> = (0..0x8000).map_while(|bits| value(bits, to_bits)).collect();
        let mut too_large = 0;
        for (bits, made) in (0..=u16::MAX).zip(block.as_chunks::<2>().0) {
            let made = u16::from_le_bytes(*made);
            let Some(exact) = value(bits, from_bits) else {
                let is_infinite = |bits: u16, of: u32| bits.trailing_zeros() >= of;
                assert_eq!(value(made, to_bits), None, "{bits:x} became {made:x}");
                assert_eq!(is_infinite(made, to_bits), is_infinite(bits, from_bits), "{bits:x}");
                continue;
            };
            let (expected, is_too_large) = nearest(exact.abs(), &all);
            assert_eq!(made, expected | (bits & 0x8000), "{bits:x} is {exact}");
            too_large += usize::from(is_too_large);
            // What docs/peers.md promises.
            let error = (value(made, to_bits).unwrap() - exact).abs();
            let relative = if to_bits == BF16_BITS { exact.abs() / 256.0 } else { 0.0 };
            let is_tiny = to_bits == F16_BITS && exact.abs() < 2.0_f64.powi(-14);
            let bound = if is_tiny { 2.0_f64.powi(-25) } else { relative };
            assert!(is_too_large || error <= bound, "{exact} off by {error}");
        }
        assert_eq!(counted, too_large);
        counted
    }

    #[test]
    fn every_number_is_rounded_to_the_nearest() {
        let of = |from, to| match NumberTypes::between(from, to) {
            Some(NumberTypes::Halves(from)) => from,
            other => panic!("{from} to {to}: {other:?}"),
        };
        assert_eq!(each_number_is_the_nearest(of("fp16", "bf16"), [F16_BITS, BF16_BITS]), 0);
        let large = each_number_is_the_nearest(of("bf16", "fp16"), [BF16_BITS, F16_BITS]);
        // Those from 65,536 on: bfloat16 has 112 exponents there, of 128 numbers each, and two signs.
        assert_eq!(large, 2 * 112 * 128);
    }

    #[test]
    fn types_are_told_by_their_words() {
        let types = NumberTypes::between;
        let (f16, bf16) = (HalfType::F16, HalfType::Bf16);
        assert_eq!(types("fp8_e4m3", "bf16"), Some(NumberTypes::FromFp8(bf16)));
        // As an engine says in which type it computes, and in which it caches.
        let [half, fp8] =
            ["torch.float16", "torch.float8_e4m3fn"].map(|of| format!("torch.float16 {of} x"));
        assert_eq!(types(&half, &fp8), Some(NumberTypes::ToFp8(f16)));
        assert!(types("torch.float16 None", "torch.bfloat16 None").is_some());
        assert!(
            types("torch.float16 torch.float16, as x", "torch.bfloat16 torch.bfloat16, as x")
                .is_some()
        );
        for (from, to) in [
            ("fp16", "fp16"),
            ("fp16", "fp32"),
            ("fp8_e4m3", "fp8_e4m3fn"),
            ("fp8_e5m2", "bf16"),
            ("fp8_e4m3fnuz", "bf16"),
            ("bf16 fp16", "fp16 fp16"),
            ("torch.float16, as x", "torch.bfloat16, as y"),
            ("", ""),
        ] {
            assert_eq!(types(from, to), None, "{from} {to}");
        }
    }
}
