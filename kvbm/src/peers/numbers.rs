//! Numbers of 16 bits as the other type of 16 bits: IEEE's binary16 and bfloat16, rounded to the
//! nearest, of two as near the even one.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Numbers that are converted together.
const AT_ONCE: usize = 512;
/// From here on a number is rounded to an infinity in binary16.
const TOO_LARGE: f32 = 65_520.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HalfType {
    F16,
    Bf16,
}

/// The words for them: ours, and those of engines.
const WORDS: [(&str, HalfType); 5] = [
    ("fp16", HalfType::F16),
    ("f16", HalfType::F16),
    ("float16", HalfType::F16),
    ("bf16", HalfType::Bf16),
    ("bfloat16", HalfType::Bf16),
];

/// The type that numbers have, and the one that they get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HalfTypes {
    from: HalfType,
    to: HalfType,
}

impl HalfTypes {
    /// By the `dtype` of fingerprints. `None`: they are of one type, or differ in more than that.
    pub(super) fn between(from: &str, to: &str) -> Option<Self> {
        let [(from, around), (to, also_around)] = [told(from)?, told(to)?];
        (from != to && around == also_around).then_some(Self { from, to })
    }

    /// Converts all numbers of `block`. Returns how many are too large: such a number is the largest
    /// of its sign. Infinities and what is no number stay so.
    pub(super) fn convert(self, block: &mut [u8]) -> u64 {
        block.chunks_mut(2 * AT_ONCE).map(|numbers| self.convert_few(numbers)).sum()
    }

    fn convert_few(self, numbers: &mut [u8]) -> u64 {
        let (pairs, _) = numbers.as_chunks_mut::<2>();
        let mut wide = [0.0_f32; AT_ONCE];
        let wide = &mut wide[..pairs.len()];
        let mut too_large = 0;
        match self.to {
            HalfType::Bf16 => {
                let mut narrow = [f16::ZERO; AT_ONCE];
                for (narrow, pair) in narrow.iter_mut().zip(&*pairs) {
                    *narrow = f16::from_le_bytes(*pair);
                }
                narrow[..wide.len()].convert_to_f32_slice(wide);
                for (pair, wide) in pairs.iter_mut().zip(&*wide) {
                    *pair = bf16::from_f32(*wide).to_le_bytes();
                }
            }
            HalfType::F16 => {
                for (wide, pair) in wide.iter_mut().zip(&*pairs) {
                    let exact = bf16::from_le_bytes(*pair).to_f32();
                    let is_too_large = exact.abs() >= TOO_LARGE && exact.is_finite();
                    too_large += u64::from(is_too_large);
                    *wide = if is_too_large { f16::MAX.to_f32().copysign(exact) } else { exact };
                }
                let mut narrow = [f16::ZERO; AT_ONCE];
                narrow[..wide.len()].convert_from_f32_slice(wide);
                for (pair, narrow) in pairs.iter_mut().zip(&narrow) {
                    *pair = narrow.to_le_bytes();
                }
            }
        }
        too_large
    }
}

/// The one type of 16 bits that a `dtype` names, as often as it likes, and what it says beside.
fn told(dtype: &str) -> Option<(HalfType, String)> {
    let (mut found, mut around) = (None, String::new());
    for word in dtype.split_inclusive(|letter: char| !letter.is_ascii_alphanumeric()) {
        let name = word.trim_end_matches(|letter: char| !letter.is_ascii_alphanumeric());
        match WORDS.iter().find(|(known, _)| *known == name) {
            Some((_, of)) if found.is_some_and(|other| other != *of) => return None,
            Some((_, of)) => {
                found = Some(*of);
                around += "16 bits";
                around += &word[name.len()..];
            }
            None => around += word,
        }
    }
    found.map(|of| (of, around))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the bits of a number mean, by the definition of IEEE 754: a sign, an exponent, and so many
    /// bits of a significand. `None`: it is no finite number.
    fn value(bits: u16, significand_bits: u32) -> Option<f64> {
        let exponent_bits = 15 - significand_bits;
        let exponent = i32::from(bits & 0x7FFF) >> significand_bits;
        let fraction =
            f64::from(bits & ((1 << significand_bits) - 1)) / f64::from(1 << significand_bits);
        let bias = (1 << (exponent_bits - 1)) - 1;
        if exponent == (1 << exponent_bits) - 1 {
            return None;
        }
        let (whole, exponent) = if exponent == 0 { (0.0, 1) } else { (1.0, exponent) };
        let magnitude = (whole + fraction) * 2.0_f64.powi(exponent - bias);
        Some(if bits >> 15 == 1 { -magnitude } else { magnitude })
    }

    const F16_BITS: u32 = 10;
    const BF16_BITS: u32 = 7;

    /// The nearest of all numbers to a magnitude, of two as near the even one; and whether it is too
    /// large for any.
    fn nearest(magnitude: f64, all: &[f64]) -> (u16, bool) {
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

    fn each_number_is_the_nearest(types: HalfTypes, [from_bits, to_bits]: [u32; 2]) -> u64 {
        let mut block: Vec<_> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let counted = types.convert(&mut block);
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
            too_large += u64::from(is_too_large);
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
        let of = |from, to| HalfTypes::between(from, to).unwrap();
        assert_eq!(each_number_is_the_nearest(of("fp16", "bf16"), [F16_BITS, BF16_BITS]), 0);
        let large = each_number_is_the_nearest(of("bf16", "fp16"), [BF16_BITS, F16_BITS]);
        // Those from 65,536 on: bfloat16 has 112 exponents there, of 128 numbers each, and two signs.
        assert_eq!(large, 2 * 112 * 128);
    }

    #[test]
    fn types_are_told_by_their_words() {
        let types = HalfTypes::between;
        assert!(types("torch.float16 None", "torch.bfloat16 None").is_some());
        assert!(
            types("torch.float16 torch.float16, as x", "torch.bfloat16 torch.bfloat16, as x")
                .is_some()
        );
        for (from, to) in [
            ("fp16", "fp16"),
            ("fp16", "fp32"),
            ("fp8_e4m3", "bf16"),
            ("bf16 fp16", "fp16 fp16"),
            ("torch.float16, as x", "torch.bfloat16, as y"),
            ("", ""),
        ] {
            assert_eq!(types(from, to), None, "{from} {to}");
        }
    }
}
