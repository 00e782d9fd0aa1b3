//! Converts numbers of 8 and 16 bits into each other, many at a time by the widest instructions that
//! the processor has: IEEE's binary16, bfloat16, and the e4m3 of "FP8 Formats for Deep Learning"
//! (Micikevicius et al., 2022), which has no infinity and nothing above 448. All go by binary32, and
//! are rounded to the nearest, of two as near to the even one. What is too large becomes the largest of
//! its sign, and is counted; NaNs stay NaNs.

#![expect(unsafe_code, reason = "instructions that not every processor has")]
#![expect(
    clippy::inline_always,
    reason = "what is inlined takes on the instructions of its callers"
)]

/// A type of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfType {
    /// binary16
    F16,
    /// bfloat16
    Bf16,
}

/// A function that does what another does, by the widest instructions.
macro_rules! widest {
    ($(#[$doc:meta])* pub fn $name:ident($($given:ident: $type:ty),*) by $each:ident) => {
        $(#[$doc])*
        pub fn $name($($given: $type),*) -> usize {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn by_512_bits($($given: $type),*) -> u32 {
                    $each($($given),*)
                }
                #[target_feature(enable = "avx2")]
                fn by_256_bits($($given: $type),*) -> u32 {
                    $each($($given),*)
                }
                if has_512_bits() {
                    // SAFETY: the processor has the instructions.
                    return unsafe { by_512_bits($($given),*) } as usize;
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has the instructions.
                    return unsafe { by_256_bits($($given),*) } as usize;
                }
            }
            $each($($given),*) as usize
        }
    };
}

#[cfg(target_arch = "x86_64")]
fn has_512_bits() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

widest! {
    /// Has numbers of 16 bits become those of the other type, in place. Returns how many are too
    /// large. Infinities stay infinite.
    pub fn halves_to_halves(block: &mut [u8], from: HalfType) by halves_to_halves_each
}

widest! {
    /// Divides numbers of 16 bits by a scale, and rounds them to FP8: as many as there are in the
    /// shorter list. Returns how many are too large, infinities among them.
    pub fn halves_to_fp8(from: &[u8], half: HalfType, scale: f32, to: &mut [u8]) by halves_to_fp8_each
}

widest! {
    /// Multiplies numbers of FP8 by a scale, which is positive and at most 1e30, and rounds them to 16
    /// bits: as many as there are in the shorter list. Returns how many are too large.
    pub fn fp8_to_halves(from: &[u8], half: HalfType, scale: f32, to: &mut [u8]) by fp8_to_halves_each
}

/// The bits of magnitudes that are no numbers, of 8 bits and of 16.
const NAN: u8 = 0x7F;
const HALF_NAN: u16 = 0x7FFF;

#[inline(always)]
fn halves_to_halves_each(block: &mut [u8], from: HalfType) -> u32 {
    match from {
        HalfType::F16 => halves_by(|of| nearest_bf16(widen_f16(of)), block),
        HalfType::Bf16 => halves_by(|of| nearest_f16(widen_bf16(of)), block),
    }
}

#[inline(always)]
fn halves_to_fp8_each(from: &[u8], half: HalfType, scale: f32, to: &mut [u8]) -> u32 {
    match half {
        HalfType::F16 => to_fp8_by(widen_f16, from, scale, to),
        HalfType::Bf16 => to_fp8_by(widen_bf16, from, scale, to),
    }
}

#[inline(always)]
fn fp8_to_halves_each(from: &[u8], half: HalfType, scale: f32, to: &mut [u8]) -> u32 {
    match half {
        HalfType::F16 => from_fp8_by(nearest_f16, from, scale, to),
        // A NaN of FP8 becomes one that rounding leaves alone.
        HalfType::Bf16 => {
            from_fp8_by(|of| (first_bits::<16>(of.to_bits()), false), from, scale, to)
        }
    }
}

/// A magnitude's bits, and whether it is too large.
type Rounded = (u32, bool);

#[inline(always)]
fn halves_by(nearest: impl Fn(u16) -> Rounded, block: &mut [u8]) -> u32 {
    let mut too_large = 0_u32;
    for number in block.as_chunks_mut::<2>().0 {
        let bits = u16::from_le_bytes(*number);
        let (rounded, is_too_large) = nearest(bits & HALF_NAN);
        *number = (rounded as u16 | bits & !HALF_NAN).to_le_bytes();
        too_large = too_large.wrapping_add(u32::from(is_too_large));
    }
    too_large
}

#[inline(always)]
fn to_fp8_by(widen: impl Fn(u16) -> f32, from: &[u8], scale: f32, to: &mut [u8]) -> u32 {
    let mut too_large = 0_u32;
    for (number, pair) in to.iter_mut().zip(from.as_chunks::<2>().0) {
        let bits = u16::from_le_bytes(*pair);
        let (rounded, is_too_large) = nearest_fp8(widen(bits & HALF_NAN) / scale);
        *number = rounded as u8 | (bits >> 8) as u8 & !NAN;
        too_large = too_large.wrapping_add(u32::from(is_too_large));
    }
    too_large
}

#[inline(always)]
fn from_fp8_by(nearest: impl Fn(f32) -> Rounded, from: &[u8], scale: f32, to: &mut [u8]) -> u32 {
    let mut too_large = 0_u32;
    for (number, bits) in to.as_chunks_mut::<2>().0.iter_mut().zip(from) {
        let (rounded, is_too_large) = nearest(widen_fp8(bits & NAN) * scale);
        *number = (rounded as u16 | u16::from(bits & !NAN) << 8).to_le_bytes();
        too_large = too_large.wrapping_add(u32::from(is_too_large));
    }
    too_large
}

// What follows is without branches, so that it is done to many numbers at once. Magnitudes of 8 and 16
// bits are given by their bits, those of binary32 by their value. Bits of binary32 grow with magnitudes.

const INFINITY: u32 = f32::INFINITY.to_bits();

/// From here on significands are full.
const FP8_NORMAL: u32 = (1.0_f32 / 64.0).to_bits();
const F16_NORMAL: u32 = (1.0_f32 / 16_384.0).to_bits();
/// By how much the exponent of one number differs in binary32.
const FP8_BIAS: u32 = 127 - 7;
const F16_BIAS: u32 = 127 - 15;
/// Numbers of binary32 are as far apart here as the smallest of the type: an addition rounds.
const FP8_ROUNDER: f32 = 16_384.0;
const F16_ROUNDER: f32 = 0.5;

/// Largest numbers, and those halfway to what would be the next: of FP8 it is rounded down, of binary16
/// up.
const FP8_LARGEST: u32 = 0x7E;
const FP8_HALFWAY: u32 = 464.0_f32.to_bits();
const F16_LARGEST: u32 = 0x7BFF;
const F16_HALFWAY: u32 = 65_520.0_f32.to_bits();
const F16_INFINITY: u32 = 31 << 10;

#[inline(always)]
const fn widen_bf16(of: u16) -> f32 {
    f32::from_bits((of as u32) << 16)
}

#[inline(always)]
const fn widen_f16(of: u16) -> f32 {
    const FIRST: u32 = (F16_BIAS + 1) << 23;
    let significand = (of as u32) << 13;
    let normal = significand.wrapping_add(F16_BIAS << 23);
    let tiny = f32::from_bits(significand.wrapping_add(FIRST)) - f32::from_bits(FIRST);
    let made = if of < 1 << 10 { tiny.to_bits() } else { normal };
    let is_none = of as u32 >= F16_INFINITY;
    f32::from_bits(if is_none { normal.wrapping_add(F16_BIAS << 23) } else { made })
}

#[inline(always)]
const fn widen_fp8(of: u8) -> f32 {
    let normal = f32::from_bits(((of as u32) << 20).wrapping_add(FP8_BIAS << 23));
    let tiny = of as f32 / 512.0;
    let made = if of < 8 { tiny } else { normal };
    if of == NAN { f32::NAN } else { made }
}

#[inline(always)]
const fn nearest_bf16(of: f32) -> Rounded {
    let rounded = first_bits::<16>(of.to_bits());
    (if of.is_nan() { HALF_NAN as u32 } else { rounded }, false)
}

#[inline(always)]
const fn nearest_f16(of: f32) -> Rounded {
    let bits = of.to_bits();
    let normal = first_bits::<13>(bits).wrapping_sub(F16_BIAS << 10);
    let tiny = (of + F16_ROUNDER).to_bits().wrapping_sub(F16_ROUNDER.to_bits());
    let made = if bits < F16_NORMAL { tiny } else { normal };
    let made = if bits >= F16_HALFWAY { F16_LARGEST } else { made };
    let made = if bits >= INFINITY { F16_INFINITY } else { made };
    let is_too_large = bits >= F16_HALFWAY && bits < INFINITY;
    (if of.is_nan() { HALF_NAN as u32 } else { made }, is_too_large)
}

#[inline(always)]
const fn nearest_fp8(of: f32) -> Rounded {
    let bits = of.to_bits();
    let normal = first_bits::<20>(bits).wrapping_sub(FP8_BIAS << 3);
    let tiny = (of + FP8_ROUNDER).to_bits().wrapping_sub(FP8_ROUNDER.to_bits());
    let made = if bits < FP8_NORMAL { tiny } else { normal };
    let made = if bits > FP8_HALFWAY { FP8_LARGEST } else { made };
    let is_too_large = bits > FP8_HALFWAY && bits <= INFINITY;
    (if of.is_nan() { NAN as u32 } else { made }, is_too_large)
}

/// Bits without the last ones, rounded. Where the rest is a half, up only from an odd number.
#[inline(always)]
const fn first_bits<const LAST: u32>(bits: u32) -> u32 {
    let half = (1 << (LAST - 1)) - 1;
    bits.wrapping_add(half).wrapping_add(bits >> LAST & 1) >> LAST
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
            let counted = halves_to_fp8(&halves, half, scale, &mut wide);
            let expected = halves_to_fp8_each(&halves, half, scale, &mut narrow) as usize;
            assert!(counted == expected && wide == narrow, "by {scale}: {counted}, {expected}");
            assert!(counted > 0);
            let [mut wide, mut narrow] = [(); 2].map(|()| halves.clone());
            let counted = halves_to_halves(&mut wide, half);
            let expected = halves_to_halves_each(&mut narrow, half) as usize;
            assert!(counted == expected && wide == narrow, "{counted}, {expected}");
            let [mut wide, mut narrow] = [(); 2].map(|()| vec![0; 512]);
            let counted = fp8_to_halves(&bytes, half, scale, &mut wide);
            let expected = fp8_to_halves_each(&bytes, half, scale, &mut narrow) as usize;
            assert!(counted == expected && wide == narrow, "by {scale}: {counted}, {expected}");
        }
    }
}
