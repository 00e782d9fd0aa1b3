//! Numbers of FP8, and others rounded to it, many at a time by the widest instructions that the processor
//! has: the e4m3 of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), which has no infinity and
//! nothing above 448.

#![expect(unsafe_code, reason = "instructions that not every processor has")]

/// All bits but the sign, which are also the bits of NaN.
pub const NAN: u8 = 0x7F;

/// The value of a number.
pub fn decode(bits: u8) -> f32 {
    let magnitude = bits & NAN;
    let meant = match magnitude {
        NAN => f32::NAN,
        0..8 => f32::from(magnitude) / 512.0,
        _ => f32::from_bits((u32::from(magnitude) << 20) + (BIAS << 23)),
    };
    if bits >> 7 == 1 { -meant } else { meant }
}

/// Divides numbers by a scale and rounds them to the nearest of 8 bits, of two as near to the even one;
/// as many as there are in the shorter list. Returns how many are too large, infinities among them: they
/// become the largest of their sign. What is no number stays so.
pub fn encode(exact: &[f32], scale: f32, to: &mut [u8]) -> usize {
    let too_large = encoder()(exact, scale, to);
    too_large as usize
}

type Encoder = fn(&[f32], f32, &mut [u8]) -> u32;

#[cfg(target_arch = "x86_64")]
fn encoder() -> Encoder {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn by_512_bits(exact: &[f32], scale: f32, to: &mut [u8]) -> u32 {
        encode_each(exact, scale, to)
    }
    #[target_feature(enable = "avx2")]
    fn by_256_bits(exact: &[f32], scale: f32, to: &mut [u8]) -> u32 {
        encode_each(exact, scale, to)
    }
    let has_512_bits = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    if has_512_bits {
        // SAFETY: the processor has the instructions.
        |exact, scale, to| unsafe { by_512_bits(exact, scale, to) }
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the instructions.
        |exact, scale, to| unsafe { by_256_bits(exact, scale, to) }
    } else {
        encode_each
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn encoder() -> Encoder {
    encode_each
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "it takes on the instructions of its callers")]
fn encode_each(exact: &[f32], scale: f32, to: &mut [u8]) -> u32 {
    let mut too_large = 0_u32;
    for (made, exact) in to.iter_mut().zip(exact) {
        let scaled = exact / scale;
        let magnitude = scaled.to_bits() & MAGNITUDE;
        *made = nearest(magnitude) as u8 | (scaled.to_bits() >> 24) as u8 & 0x80;
        let is_too_large = (HALFWAY + 1..=INFINITY).contains(&magnitude);
        too_large = too_large.wrapping_add(u32::from(is_too_large));
    }
    too_large
}

/// Bits of binary32: all but the sign, an infinity, the smallest number of 8 bits with a full
/// significand, and that halfway between the largest one and what would be the next. It is rounded down.
const MAGNITUDE: u32 = 0x7FFF_FFFF;
const INFINITY: u32 = f32::INFINITY.to_bits();
const FIRST_NORMAL: u32 = (1.0_f32 / 64.0).to_bits();
const HALFWAY: u32 = 464.0_f32.to_bits();
/// How far apart the exponents of one number are, which count from another origin in each type.
const BIAS: u32 = 127 - 7;
/// From here on numbers of binary32 are as far apart as the smallest of 8 bits, so an addition rounds.
const ROUNDER: f32 = 16_384.0;
const LARGEST: u32 = 0x7E;

/// Of a magnitude's bits. Without branches.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether they are the nearest is tested where blocks are converted, of the numbers there are.
    #[test]
    fn wide_instructions_round_as_narrow_ones_do() {
        let bits = (0..=u16::MAX)
            .flat_map(|high| [0, 1, 0x7FFF, 0x8000, 0xFFFF].map(|low| u32::from(high) << 16 | low));
        let exact: Vec<_> = bits.map(f32::from_bits).collect();
        for scale in [1.0, 0.017_3, 200.0] {
            let [mut wide, mut narrow] = [(); 2].map(|()| vec![0; exact.len()]);
            let counted = encode(&exact, scale, &mut wide);
            let expected = encode_each(&exact, scale, &mut narrow) as usize;
            assert!(counted == expected && wide == narrow, "by {scale}: {counted}, {expected}");
            assert!(counted > 0);
        }
    }
}
