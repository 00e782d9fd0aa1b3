//! What is known about a segment, in small numbers.

/// How many factors there are.
pub(super) const FACTORS: usize = 8;

/// How many values each factor has.
pub(super) const VALUES: [usize; FACTORS] =
    [OUTPUTS, SIZES, SIZES, GAPS, REUSES, REUSES * OUTPUTS, 8, DIVERGENCES];

// The last value of each takes in all beyond: 16,383 tokens, 41,000 blocks, five and a half hours.
const OUTPUTS: usize = 16;
const SIZES: usize = 24;
const GAPS: usize = 20;
const REUSES: usize = 6;
const DIVERGENCES: usize = 13;

/// The output length while it is unknown.
pub(super) const UNKNOWN_OUTPUT: u8 = 0;
/// The divergence of a segment whose path no other one has left.
pub(super) const NO_DIVERGENCE: u8 = 0;
/// Reuse counts from here on are one.
pub(super) const MANY_REUSES: u8 = 32;

const GAP_STEP: f32 = 0.55;

/// A segment's value of each factor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReuseProfile([u8; FACTORS]);

impl ReuseProfile {
    pub(super) fn new(request: BlockTraits, reuse: u8, position: u8, divergence: u8) -> Self {
        // The model multiplies its factors, so what two of them say together must be a factor of
        // its own.
        let cross = reuse * OUTPUTS as u8 + request.output;
        Self([
            request.output,
            request.fresh,
            request.path,
            request.gap,
            reuse,
            cross,
            position,
            divergence,
        ])
    }

    /// The same segment when the length of its request's output was not yet known.
    pub(super) fn before_the_end(mut self) -> Self {
        let reuse = self.0[4];
        self.0[0] = UNKNOWN_OUTPUT;
        self.0[5] = reuse * OUTPUTS as u8 + UNKNOWN_OUTPUT;
        self
    }

    /// Whether the two differ in nothing but the position, at most.
    pub(super) fn is_akin(self, other: Self) -> bool {
        // 6 is the position: parts of one return begin at different ones.
        self.0[..6] == other.0[..6] && self.0[7] == other.0[7]
    }

    pub(super) const fn bits(self) -> u64 {
        u64::from_le_bytes(self.0)
    }

    pub(super) fn knows_the_output(self) -> bool {
        self.0[0] != UNKNOWN_OUTPUT
    }

    /// Where each value stands when those of all factors are put in one row.
    pub(super) fn places(self) -> [usize; FACTORS] {
        std::array::from_fn(|factor| START[factor] + usize::from(self.0[factor]))
    }
}

/// Where the values of each factor begin when all are put in one row.
pub(super) const START: [usize; FACTORS] = {
    let mut start = [0; FACTORS];
    let mut factor = 1;
    while factor < FACTORS {
        start[factor] = start[factor - 1] + VALUES[factor - 1];
        factor += 1;
    }
    start
};

/// Values of all factors together.
pub(super) const ALL_VALUES: usize = START[FACTORS - 1] + VALUES[FACTORS - 1];

/// What the segments of one request have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockTraits {
    pub(super) output: u8,
    pub(super) fresh: u8,
    pub(super) path: u8,
    pub(super) gap: u8,
}

/// The length of a request's output, by powers of two.
pub(super) fn output(tokens: u32) -> u8 {
    (1 + tokens.saturating_add(1).ilog2() as u8).min(OUTPUTS as u8 - 1)
}

/// A number of blocks, in 1.5 steps a doubling.
pub(super) fn size(blocks: u32) -> u8 {
    let steps = 1.5 * (1.0 + blocks as f32).log2();
    (steps as u8).min(SIZES as u8 - 1)
}

/// The smoothed ln(1 + seconds) between a chain's requests; `None` at its first one.
pub(super) fn gap(smoothed: Option<f32>) -> u8 {
    smoothed.map_or(0, |ln| 1 + ((ln / GAP_STEP) as u8).min(GAPS as u8 - 2))
}

/// How often a block was used again: 0, 1, 2–3, 4–7, 8–31, 32 and more.
pub(crate) fn reuse_bucket(count: impl Into<u32>) -> u8 {
    const MANY: u32 = MANY_REUSES as u32;
    match count.into() {
        0 => 0,
        1 => 1,
        2..=3 => 2,
        4..=7 => 3,
        8..MANY => 4,
        MANY.. => 5,
    }
}

/// In which eighth of its request's path a segment starts.
pub(super) fn position(start: u32, path: u32) -> u8 {
    (u64::from(start) * 8 / u64::from(path.max(1))).min(7) as u8
}

/// In which quarter of the path a later request left it, where `branches` had left before.
pub(super) fn divergence(depth: u32, path: u32, branches: u32) -> u8 {
    let quarter = (u64::from(depth) * 4 / u64::from(path.max(1))).min(3) as u8;
    let branches = match branches {
        0 => 0,
        1..=2 => 1,
        3.. => 2,
    };
    1 + quarter * 3 + branches
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_value_has_a_place(a: u32, b: u32, count: u8, ln in prop::option::of(0_f32..1e9)) {
            let traits = BlockTraits { output: output(a), fresh: size(a), path: size(b), gap: gap(ln) };
            let profile = ReuseProfile::new(traits, reuse_bucket(count), position(a, b), divergence(a, b, count.into()));
            for (place, factor) in profile.places().into_iter().zip(0..) {
                prop_assert!((START[factor]..START[factor] + VALUES[factor]).contains(&place));
            }
            prop_assert!(profile.knows_the_output());
            prop_assert!(!profile.before_the_end().knows_the_output());
        }
    }
}
