//! Numbers of FP8, and those of 16 bits, as each other, many at a time by the widest instructions that
//! the processor has: the e4m3 of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), which has
//! no infinity and nothing above 448. All are rounded to the nearest, of two as near to the even one.

#![expect(unsafe_code, reason = "instructions that not every processor has")]

/// A type of 16 bits: IEEE's binary16, or bfloat16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfType {
    /// binary16
    F16,
    /// bfloat16
    Bf16,
}

/// What converts numbers, in little-endian bytes: as many as there are in the shorter list.
type Converter = fn(&[u8], HalfType, f32, &mut [u8]) -> u32;

/// A converter, compiled for the widest instructions that the processor has.
macro_rules! widest {
    ($each:ident) => {{
        #[cfg(target_arch = "x86_64")]
        fn widest() -> Converter {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn by_512_bits(from: &[u8], half: HalfType, scale: f32, to: &mut [u8]) -> u32 {
                $each(from, half, scale, to)
            }
            #[target_feature(enable = "avx2")]
            fn by_256_bits(from: &[u8], half: HalfType, scale: f32, to: &mut [u8]) -> u32 {
                $each(from, half, scale, to)
            }
            let has_512_bits = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if has_512_bits {
                // SAFETY: the processor has the instructions.
                |from, half, scale, to| unsafe { by_512_bits(from, half, scale, to) }
            } else if is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has the instructions.
                |from, half, scale, to| unsafe { by_256_bits(from, half, scale, to) }
            } else {
                $each
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        fn widest() -> Converter {
            $each
        }
        widest()
    }};
}

/// Divides numbers of 16 bits by a scale, and rounds them to 8. Returns how many are too large,
/// infinities among them: they become the largest of their sign. NaNs stay NaNs.
pub fn encode(from: &[u8], half: HalfType, scale: f32, to: &mut [u8]) -> usize {
    widest!(encode_each)(from, half, scale, to) as usize
}

/// Multiplies numbers of 8 bits by a scale, which is positive and at most 1e30, and rounds them to 16.
/// Returns how many are too large: they become the largest of their sign. NaNs stay NaNs.
pub fn decode(from: &[u8], half: HalfType, scale: f32, to: &mut [u8]) -> usize {
    widest!(decode_each)(from, half, scale, to) as usize
}

/// The bits of a magnitude of 8 bits and of 16 that are no number.
const NAN: u8 = 0x7F;
const HALF_NAN: u16 = 0x7FFF;

#[inline(always)]
#[expect(clippy::inline_always, reason = "it takes on the instructions of its callers")]
fn encode_each(from: &[u8], half: HalfType, scale: f32, to: &mut [u8]) -> u32 {
    match half {
        HalfType::F16 => encode_by(widen_f16, from, scale, to),
        HalfType::Bf16 => encode_by(|magnitude| magnitude << 16, from, scale, to),
    }
}

/// By what makes the bits of binary32 of a magnitude's.
#[inline(always)]
#[expect(clippy::inline_always, reason = "it takes on the instructions of its callers")]
fn encode_by(widen: impl Fn(u32) -> u32, from: &[u8], scale: f32, to: &mut [u8]) -> u32 {
    let mut too_large = 0_u32;
    for (made, pair) in to.iter_mut().zip(from.as_chunks::<2>().0) {
        let bits = u16::from_le_bytes(*pair);
        let exact = f32::from_bits(widen(u32::from(bits & HALF_NAN)));
        let magnitude = (exact / scale).to_bits();
        *made = nearest(magnitude) as u8 | (bits >> 8) as u8 & 0x80;
        let is_too_large = (HALFWAY + 1..=INFINITY).contains(&magnitude);
        too_large = too_large.wrapping_add(u32::from(is_too_large));
    }
    too_large
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "it takes on the instructions of its callers")]
fn decode_each(from: &[u8], half: HalfType, scale: f32, to: &mut [u8]) -> u32 {
    match half {
        HalfType::F16 => decode_by(nearest_f16, from, scale, to),
        HalfType::Bf16 => decode_by(|magnitude| (nearest_bf16(magnitude), false), from, scale, to),
    }
}

/// By what rounds the bits of a magnitude in binary32, and says whether it is too large.
#[inline(always)]
#[expect(clippy::inline_always, reason = "it takes on the instructions of its callers")]
fn decode_by(nearest: impl Fn(u32) -> (u32, bool), from: &[u8], scale: f32, to: &mut [u8]) -> u32 {
    let mut too_large = 0_u32;
    for (made, bits) in to.as_chunks_mut::<2>().0.iter_mut().zip(from) {
        let magnitude = bits & NAN;
        let (rounded, is_too_large) = nearest((widen(magnitude) * scale).to_bits());
        let is_too_large = is_too_large & (magnitude != NAN);
        let half = if magnitude == NAN { HALF_NAN } else { rounded as u16 };
        *made = (half | u16::from(bits & !NAN) << 8).to_le_bytes();
        too_large = too_large.wrapping_add(u32::from(is_too_large));
    }
    too_large
}

/// Bits of binary32: an infinity, the smallest number of 8 bits with a full significand, and that
/// halfway between the largest one and what would be the next. It is rounded down.
const INFINITY: u32 = f32::INFINITY.to_bits();
const FIRST_NORMAL: u32 = (1.0_f32 / 64.0).to_bits();
const HALFWAY: u32 = 464.0_f32.to_bits();
/// How far apart the exponents of one number are, which count from another origin in each type.
const BIAS: u32 = 127 - 7;
const F16_BIAS: u32 = 127 - 15;
/// From here on numbers of binary32 are as far apart as the smallest of 8 bits, so an addition rounds;
/// and as the smallest of binary16.
const ROUNDER: f32 = 16_384.0;
const F16_ROUNDER: f32 = 0.5;
const LARGEST: u32 = 0x7E;
/// Of binary16: the smallest one with a full significand, and that halfway between the largest one and
/// what would be the next. It is rounded up.
const F16_FIRST_NORMAL: u32 = (1.0_f32 / 16_384.0).to_bits();
const F16_HALFWAY: u32 = 65_520.0_f32.to_bits();
const F16_LARGEST: u32 = 0x7BFF;

/// Of a magnitude's bits in binary32. Without branches, as all that follow.
#[inline(always)]
#[expect(clippy::inline_always, reason = "it takes on the instructions of its callers")]
const fn nearest(magnitude: u32) -> u32 {
    // Where the rest is a half, up only from an odd number.
    let rounded = magnitude.wrapping_add(0x7_FFFF).wrapping_add(magnitude >> 20 & 1) >> 20;
    let normal = rounded.wrapping_sub(BIAS << 3);
    let tiny = (f32::from_bits(magnitude) + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits());
    let made = if magnitude < FIRST_NORMAL { tiny } else { normal };
    let made = if magnitude > HALFWAY { LARGEST } else { made };
    if magnitude > INFINITY { NAN as u32 } else { made }
}

/// The value of a magnitude of 8 bits that is a number.
#[inline(always)]
#[expect(clippy::inline_always, reason = "it takes on the instructions of its callers")]
fn widen(magnitude: u8) -> f32 {
    let bits = u32::from(magnitude);
    let normal = f32::from_bits((bits << 20) + (BIAS << 23));
    let tiny = bits as f32 / 512.0;
    if bits < 8 { tiny } else { normal }
}

/// The bits in binary32 of a magnitude of binary16.
#[inline(always)]
#[expect(clippy::inline_always, reason = "it takes on the instructions of its callers")]
const fn widen_f16(magnitude: u32) -> u32 {
    const FIRST: u32 = (F16_BIAS + 1) << 23;
    let significand = magnitude << 13;
    let normal = significand.wrapping_add(F16_BIAS << 23);
    let tiny = (f32::from_bits(significand.wrapping_add(FIRST)) - f32::from_bits(FIRST)).to_bits();
    let made = if magnitude < 1 << 10 { tiny } else { normal };
    // Infinities and NaNs.
    if magnitude >= 31 << 10 { normal.wrapping_add(F16_BIAS << 23) } else { made }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "it takes on the instructions of its callers")]
const fn nearest_f16(magnitude: u32) -> (u32, bool) {
    let rounded = magnitude.wrapping_add(0xFFF).wrapping_add(magnitude >> 13 & 1) >> 13;
    let normal = rounded.wrapping_sub(F16_BIAS << 10);
    let sum = f32::from_bits(magnitude) + F16_ROUNDER;
    let tiny = sum.to_bits().wrapping_sub(F16_ROUNDER.to_bits());
    let made = if magnitude < F16_FIRST_NORMAL { tiny } else { normal };
    let is_too_large = magnitude >= F16_HALFWAY;
    (if is_too_large { F16_LARGEST } else { made }, is_too_large)
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "it takes on the instructions of its callers")]
const fn nearest_bf16(magnitude: u32) -> u32 {
    magnitude.wrapping_add(0x7FFF).wrapping_add(magnitude >> 16 & 1) >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether they are the nearest is tested where blocks are converted, of the numbers there are.
    #[test]
    fn wide_instructions_round_as_narrow_ones_do() {
        let halves: Vec<_> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let bytes: Vec<_> = (0..=u8::MAX).collect();
        let both = [HalfType::F16, HalfType::Bf16];
        for (half, scale) in
            both.iter().flat_map(|half| [1.0, 0.017_3, 200.0].map(|by| (*half, by)))
        {
            let [mut wide, mut narrow] = [(); 2].map(|()| vec![0; 1 << 16]);
            let counted = encode(&halves, half, scale, &mut wide);
            let expected = encode_each(&halves, half, scale, &mut narrow) as usize;
            assert!(counted == expected && wide == narrow, "by {scale}: {counted}, {expected}");
            assert!(counted > 0);
            let [mut wide, mut narrow] = [(); 2].map(|()| vec![0; 512]);
            let counted = decode(&bytes, half, scale, &mut wide);
            let expected = decode_each(&bytes, half, scale, &mut narrow) as usize;
            assert!(counted == expected && wide == narrow, "by {scale}: {counted}, {expected}");
        }
    }
}
