//! Converts numbers of 16 bits to FP8 and back. An FP8 number stands for itself times a scale. The
//! format is e4m3 of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022): it has no infinity,
//! and nothing above 448. As in engines, numbers are scaled in binary32, then rounded to the nearest,
//! ties to even.

use kvbm_tiers::numbers::{HalfType, fp8_to_halves, halves_to_fp8};

use super::numbers::NumberTypes;
use super::scales::ScaledRows;
use crate::names::fingerprint::SCALES;

/// Converts the numbers of a block.
#[derive(Debug)]
pub(super) struct Fp8Conversion {
    /// Of the numbers that are not FP8.
    half: HalfType,
    is_to_fp8: bool,
    scales: Vec<f32>,
    rows: ScaledRows,
}

impl Fp8Conversion {
    /// `None`: neither type is FP8, or a scale is not valid.
    pub(super) fn new(types: NumberTypes, scales: &[f32], rows: ScaledRows) -> Option<Self> {
        let (half, is_to_fp8) = match types {
            NumberTypes::Halves(_) => return None,
            NumberTypes::FromFp8(to) => (to, false),
            NumberTypes::ToFp8(from) => (from, true),
        };
        let are_scales = scales.iter().all(|scale| SCALES.contains(scale));
        are_scales.then(|| Self { half, is_to_fp8, scales: scales.to_vec(), rows })
    }

    /// Bytes of a block's numbers after conversion.
    pub(super) const fn made_bytes(&self, bytes: usize) -> usize {
        if self.is_to_fp8 { bytes / 2 } else { 2 * bytes }
    }

    /// Converts the numbers of `from`, a block of the rows' layout, into `to`. Returns how many were
    /// too large: such a number becomes the largest of its sign. NaNs stay NaNs.
    pub(super) fn convert(&self, from: &[u8], to: &mut [u8]) -> u64 {
        let mut too_large = 0;
        self.rows.each(|first, count, scale| {
            let [one, two] = [1, 2].map(|bytes| bytes * first..bytes * (first + count));
            let (half, scale) = (self.half, self.scales[scale]);
            too_large += if self.is_to_fp8 {
                halves_to_fp8(&from[two], half, scale, &mut to[one])
            } else {
                fp8_to_halves(&from[one], half, scale, &mut to[two])
            };
        });
        too_large as u64
    }
}

#[cfg(test)]
mod tests {
    use std::iter::zip;

    use super::super::conversion::tests::fp8_rows;
    use super::super::numbers::tests::{BF16_BITS, F16_BITS, nearest as nearest_half, value};
    use super::*;

    /// Among them are those at whose ends numbers of 16 bits are too large or vanish.
    const SCALES: [f32; 8] = [1.0, 0.5, 0.017_3, 3.0, 0.374_999, 200.0, 1e-6, 1e30];

    /// What bits mean by the definition: a sign, four bits of exponent, three of significand. `None`: no number.
    fn meant(bits: u8) -> Option<f64> {
        let (exponent, fraction) = (i32::from(bits >> 3 & 15), f64::from(bits & 7) / 8.0);
        let magnitude = match exponent {
            15 if bits & 7 == 7 => return None,
            0 => fraction * 2.0_f64.powi(-6),
            _ => (1.0 + fraction) * 2.0_f64.powi(exponent - 7),
        };
        Some(if bits >> 7 == 1 { -magnitude } else { magnitude })
    }

    /// All numbers that are none below zero, by their bits.
    fn all() -> Vec<f64> {
        (0..0x7F).map(|bits| meant(bits).unwrap()).collect()
    }

    fn conversion(types: NumberTypes, scale: f32, numbers: usize) -> Fp8Conversion {
        let rows = fp8_rows(numbers, types.bytes()[0]);
        Fp8Conversion::new(types, &[scale], rows).unwrap()
    }

    /// Of 16 bits, with the bits of their significands.
    const HALVES: [(HalfType, u32); 2] = [(HalfType::F16, F16_BITS), (HalfType::Bf16, BF16_BITS)];

    #[test]
    fn every_number_of_8_bits_becomes_the_nearest_of_16() {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        for ((half, significand), scale) in HALVES.iter().flat_map(|of| SCALES.map(|by| (*of, by)))
        {
            let halves: Vec<_> = (0..0x8000).map_while(|bits| value(bits, significand)).collect();
            let mut made = vec![0; 512];
            let types = NumberTypes::FromFp8(half);
            let counted = conversion(types, scale, 256).convert(&bytes, &mut made);
            let mut too_large = 0;
            for (bits, made) in zip(bytes.iter().copied(), made.as_chunks::<2>().0) {
                let made = u16::from_le_bytes(*made);
                let Some(number) = meant(bits) else {
                    let is_infinite = made.trailing_zeros() >= significand;
                    assert!(value(made, significand).is_none() && !is_infinite, "{made:x}");
                    continue;
                };
                let scaled = f64::from(number as f32 * scale);
                let (expected, is_too_large) = nearest_half(scaled.abs(), &halves);
                let sign = u16::from(bits >> 7) << 15;
                assert_eq!(made, expected | sign, "{bits:x} by {scale} as {half:?}");
                too_large += u64::from(is_too_large);
                // What docs/peers.md promises.
                let exact = number * f64::from(scale);
                let error = (value(made, significand).unwrap() - exact).abs();
                let relative = exact.abs() * 2.0_f64.powi(-1 - significand as i32);
                let is_tiny = half == HalfType::F16 && exact.abs() < 2.0_f64.powi(-14);
                let bound = if is_tiny { 2.0_f64.powi(-25) } else { relative };
                assert!(is_too_large || error <= bound, "{bits:x} by {scale}: off by {error}");
            }
            assert_eq!(counted, too_large, "{scale} as {half:?}");
            assert_eq!(too_large > 0, half == HalfType::F16 && scale >= 200.0);
        }
    }

    /// The nearest, and whether it is too large for any: where the next one would be is nearer.
    fn nearest_fp8(magnitude: f64, all: &[f64]) -> (u8, bool) {
        let (bits, is_too_large) = nearest_half(magnitude, all);
        // Halfway to what would be the next is as near to the even one, which is the largest.
        (bits as u8, is_too_large && magnitude > 464.0)
    }

    #[test]
    fn every_number_of_16_bits_becomes_the_nearest_of_8() {
        let all = all();
        let block: Vec<_> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for ((half, significand), scale) in HALVES.iter().flat_map(|of| SCALES.map(|by| (*of, by)))
        {
            let mut made = vec![0; 1 << 16];
            let types = NumberTypes::ToFp8(half);
            let counted = conversion(types, scale, 1 << 16).convert(&block, &mut made);
            let mut too_large = 0;
            for (bits, made) in zip(0..=u16::MAX, made) {
                let sign = (bits >> 8) as u8 & 0x80;
                let is_infinite = bits.trailing_zeros() >= significand;
                match value(bits, significand) {
                    None if is_infinite => {
                        too_large += 1;
                        assert_eq!(made, 0x7E | sign);
                    }
                    None => assert_eq!(made & 0x7F, 0x7F),
                    Some(exact) => {
                        let scaled = f64::from(exact as f32 / scale).abs();
                        let (expected, is_too_large) = nearest_fp8(scaled, &all);
                        assert_eq!(made, expected | sign, "{exact} by {scale} of {half:?}");
                        too_large += u64::from(is_too_large);
                        // What docs/peers.md promises, of what binary32 has of the quotient.
                        let error = (meant(made).unwrap().abs() - scaled).abs();
                        let is_tiny = scaled < 2.0_f64.powi(-6);
                        let bound = if is_tiny { 2.0_f64.powi(-10) } else { scaled / 16.0 };
                        assert!(is_too_large || error <= bound, "{exact} by {scale}: {error}");
                    }
                }
            }
            assert_eq!(counted, too_large, "{scale} of {half:?}");
        }
    }

    #[test]
    fn what_was_8_bits_comes_back_from_bfloat16() {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        for scale in SCALES {
            let (mut wide, mut back) = (vec![0; 512], vec![0; 256]);
            let half = HalfType::Bf16;
            let types = [NumberTypes::FromFp8(half), NumberTypes::ToFp8(half)];
            let [there, again] = types.map(|types| conversion(types, scale, 256));
            assert_eq!(there.convert(&bytes, &mut wide) + again.convert(&wide, &mut back), 0);
            assert_eq!(back, bytes, "{scale}");
        }
    }

    #[test]
    fn scales_that_are_none_convert_nothing() {
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e31] {
            let rows = fp8_rows(16, 1);
            let types = NumberTypes::FromFp8(HalfType::Bf16);
            assert!(Fp8Conversion::new(types, &[scale], rows).is_none(), "{scale}");
        }
    }
}
