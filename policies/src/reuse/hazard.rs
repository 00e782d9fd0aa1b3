//! How soon blocks return: the hazard, how it is learned, and what a block is worth by it.
//!
//! The hazard of a segment in age bin b is `base[b] · Π m[x] · g[x][group(b)]` over the values x of
//! its factors. A fit counts, for the base and then for each factor in turn, how many returns there
//! were and how many the rest of the model expected, and sets the multiplier to the ratio (one
//! Gauss–Seidel sweep of a Poisson regression), held back by a prior where little was seen.

use std::cell::Cell;
use std::ops::RangeInclusive;

use super::factors::{ALL_VALUES, FACTORS, ReuseProfile, START, VALUES};
use crate::gradual::mixed;

/// Age bins. The first ends at 2 s, each further one is 1.4 times as old at its end.
const BINS: usize = 48;
/// Bins in an age group: 1.4³ = 2.74 times the age.
const GROUP: usize = 3;
/// Age groups.
const GROUPS: usize = BINS / GROUP;

/// Floats that are computed with together.
// 128 bits, which x86-64 and aarch64 always have: the compiler can make one instruction of such a
// loop.
const LANES: usize = 4;

/// Where each bin ends, in seconds.
const EDGES: [f32; BINS] = {
    let mut edges = [2.0; BINS];
    let mut bin = 1;
    while bin < BINS {
        edges[bin] = edges[bin - 1] * 1.4;
        bin += 1;
    }
    edges
};

/// Returns a bin, before anything is known: 0.3 for each e-fold of age.
const PRIOR_HAZARD: f32 = 0.3 * 0.336_472_24;
const BASE_PRIOR: f32 = 3.0;
// In returns. Half of it made no difference beyond noise (docs/policies.md).
const FACTOR_PRIOR: f32 = 20.0;
// So that no value, however seldom it was seen, decides alone.
const FACTOR_RANGE: RangeInclusive<f32> = 0.05..=20.0;
const GROUP_RANGE: RangeInclusive<f32> = 0.1..=10.0;

/// One value for each age group.
pub(super) type ByGroup = [f32; GROUPS];

/// The life of a segment under one profile, from one age to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LifeRecord {
    pub(super) profile: ReuseProfile,
    /// Whether it ended by a return.
    pub(super) returned: bool,
    /// √blocks.
    pub(super) weight: f32,
    pub(super) entry: AgeBucket,
    pub(super) exit: AgeBucket,
}

/// An age in bins: the whole part is the bin, the rest how much of the bin has passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub(super) struct AgeBucket(f32);

impl AgeBucket {
    pub(super) fn from_ms(ms: u64) -> Self {
        let seconds = ms as f32 / 1000.0;
        let bin = EDGES.partition_point(|&edge| edge <= seconds).min(BINS - 1);
        let begin = bin.checked_sub(1).map_or(0.0, |before| EDGES[before]);
        let part = (seconds - begin) / (EDGES[bin] - begin);
        // Below 1, or the whole part would name the next bin.
        Self(bin as f32 + part.min(0.999))
    }

    fn bin(self) -> usize {
        self.0 as usize
    }

    /// How much of its bin has passed.
    pub(super) fn part(self) -> f32 {
        self.0.fract()
    }
}

/// The hazard as learned so far.
#[derive(Clone, Debug)]
pub(super) struct HazardModel {
    /// Returns expected while a bin passes.
    base: [f32; BINS],
    /// By value of a factor: m.
    multipliers: Vec<f32>,
    /// By value of a factor: m · g.
    effects: Vec<ByGroup>,
}

impl Default for HazardModel {
    fn default() -> Self {
        Self {
            base: [PRIOR_HAZARD; BINS],
            multipliers: vec![1.0; ALL_VALUES],
            effects: vec![[1.0; GROUPS]; ALL_VALUES],
        }
    }
}

impl HazardModel {
    /// What the factors together multiply the base with.
    fn effect(&self, profile: ReuseProfile) -> ByGroup {
        let mut product = [1.0; GROUPS];
        for place in profile.places() {
            scale(&mut product, &self.effects[place], GROUPS);
        }
        product
    }

    /// Learns from `records`, each of which counts twice: as it is, and as if the length of the
    /// output were unknown, for that is how blocks are ranked while their request runs.
    pub(super) fn fit(&mut self, records: &[LifeRecord]) {
        let lives = lives(records);
        let Some(oldest) = lives.iter().map(|life| life.exit.bin()).max() else { return };
        // Ages that no record has reached cost nothing: whole vectors of groups.
        let groups = (oldest / GROUP + 1).next_multiple_of(LANES);
        let mut expected: Vec<_> = lives.iter().map(|life| self.effect(life.profile)).collect();
        self.fit_base(&lives, &expected);
        for (life, row) in lives.iter().zip(&mut expected) {
            scale(row, &self.base_of(life), groups);
        }
        // One sweep: it goes on from the last fit, and a second one gained nothing
        // (docs/policies.md).
        for factor in 0..FACTORS {
            self.fit_factor(factor, &lives, &mut expected, groups);
        }
    }

    fn fit_base(&mut self, lives: &[SegmentLife], effects: &[ByGroup]) {
        let mut returns = [0.0; BINS];
        let mut exposure = [0.0; BINS];
        for (life, effect) in lives.iter().zip(effects) {
            for (bin, part) in life.parts() {
                exposure[bin] += life.weight * effect[bin / GROUP] * part;
            }
            if life.returned {
                returns[life.exit.bin()] += life.weight;
            }
        }
        for (bin, base) in self.base.iter_mut().enumerate() {
            *base = (returns[bin] + BASE_PRIOR * PRIOR_HAZARD) / (exposure[bin] + BASE_PRIOR);
        }
    }

    /// The returns that the base alone expects of a life.
    fn base_of(&self, life: &SegmentLife) -> ByGroup {
        let mut expected = [0.0; GROUPS];
        for (bin, part) in life.parts() {
            expected[bin / GROUP] += self.base[bin] * part * life.weight;
        }
        expected
    }

    /// Fits one factor; `expected` has the returns that the model expects of each life.
    fn fit_factor(
        &mut self,
        factor: usize,
        lives: &[SegmentLife],
        expected: &mut [ByGroup],
        groups: usize,
    ) {
        let start = START[factor];
        let mut sums = vec![SeenLives::default(); VALUES[factor]];
        for (life, row) in lives.iter().zip(&*expected) {
            let seen = &mut sums[usize::from(life.places[factor]) - start];
            add(&mut seen.expected, row, groups);
            if life.returned {
                seen.returns[life.exit.bin() / GROUP] += life.weight;
            }
        }
        // Applied before the next factor is fitted, which then explains only what this one leaves.
        let change: Vec<_> =
            (start..).zip(&sums).map(|(place, seen)| self.update(place, seen)).collect();
        for (life, row) in lives.iter().zip(expected) {
            scale(row, &change[usize::from(life.places[factor]) - start], groups);
        }
    }

    /// Sets one value's multipliers. Returns by how much its effect changed.
    fn update(&mut self, place: usize, seen: &SeenLives) -> ByGroup {
        let before = self.effects[place];
        // The old multiplier is in what was expected, and comes out first.
        let overall: f32 = seen.expected.iter().sum::<f32>() / self.multipliers[place];
        let multiplier = ratio(seen.returns.iter().sum(), overall, &FACTOR_RANGE);
        self.multipliers[place] = multiplier;
        self.effects[place] = std::array::from_fn(|group| {
            let rest = multiplier * seen.expected[group] / before[group];
            multiplier * ratio(seen.returns[group], rest, &GROUP_RANGE)
        });
        std::array::from_fn(|group| self.effects[place][group] / before[group])
    }
}

/// Returns over expected returns, drawn towards 1 where there are few.
fn ratio(returns: f32, expected: f32, range: &RangeInclusive<f32>) -> f32 {
    ((returns + FACTOR_PRIOR) / (expected + FACTOR_PRIOR)).clamp(*range.start(), *range.end())
}

/// What happened to the lives with one value of a factor.
#[derive(Clone, Default)]
struct SeenLives {
    returns: ByGroup,
    expected: ByGroup,
}

/// A record as a fit looks at it.
struct SegmentLife {
    profile: ReuseProfile,
    places: [u16; FACTORS],
    returned: bool,
    weight: f32,
    entry: AgeBucket,
    exit: AgeBucket,
}

impl SegmentLife {
    fn new(profile: ReuseProfile, record: &LifeRecord, scale: f32) -> Self {
        Self {
            profile,
            places: profile.places().map(|place| place as u16),
            returned: record.returned,
            weight: record.weight * scale,
            entry: record.entry,
            exit: record.exit,
        }
    }

    /// The bins lived through, each with how much of it.
    fn parts(&self) -> impl Iterator<Item = (usize, f32)> + use<> {
        let (first, last) = (self.entry.bin(), self.exit.bin());
        let (skipped, passed) = (self.entry.part(), self.exit.part());
        (first..=last).map(move |bin| {
            let until = if bin == last { passed } else { 1.0 };
            let from = if bin == first { skipped } else { 0.0 };
            (bin, (until - from).max(0.0))
        })
    }
}

/// Every record as it is, and once more without its output, with weights of mean 1.
fn lives(records: &[LifeRecord]) -> Vec<SegmentLife> {
    let weight: f32 = records.iter().map(|record| record.weight).sum();
    // A mean of 1: the priors are counted in returns.
    let scale = records.len() as f32 / weight.max(f32::MIN_POSITIVE);
    let known = records.iter().filter(|record| record.profile.knows_the_output());
    let known = known.map(|record| SegmentLife::new(record.profile, record, scale));
    let unknown = records
        .iter()
        .map(|record| SegmentLife::new(record.profile.before_the_end(), record, scale));
    known.chain(unknown).collect()
}

fn scale(row: &mut ByGroup, by: &ByGroup, groups: usize) {
    for (cells, by) in row[..groups].chunks_exact_mut(LANES).zip(by.chunks_exact(LANES)) {
        (0..LANES).for_each(|lane| cells[lane] *= by[lane]);
    }
}

fn add(row: &mut ByGroup, other: &ByGroup, groups: usize) {
    for (cells, other) in row[..groups].chunks_exact_mut(LANES).zip(other.chunks_exact(LANES)) {
        (0..LANES).for_each(|lane| cells[lane] += other[lane]);
    }
}

impl HazardModel {
    /// The most returns for each second that the block is held, over all times to hold it that are
    /// at least half as long as the time since its last use: P(return while held) ÷ expected
    /// seconds until it returns or is let go. (J. C. Gittins, "Bandit processes and dynamic
    /// allocation indices", JRSS B 41(2), 1979; the shortest time keeps one bin's chance peak from
    /// ruling.)
    pub(super) fn gittins(&self, profile: ReuseProfile, age_ms: u64) -> f32 {
        let effect = self.effect(profile);
        let age = AgeBucket::from_ms(age_ms);
        let seconds = age_ms as f32 / 1000.0;
        let (mut absent, mut held_s, mut best) = (1.0_f32, 0.0_f32, 0.0_f32);
        let mut from_s = seconds;
        for bin in age.bin()..BINS {
            let until_s = EDGES[bin];
            let part = if bin == age.bin() { 1.0 - age.part() } else { 1.0 };
            let returns = self.base[bin] * effect[bin / GROUP] * part;
            let stays = (-returns).exp();
            // The mean time in the bin. Where hardly anything returns, the quotient would be all
            // rounding.
            let share = if returns > 1e-4 { (1.0 - stays) / returns } else { 1.0 };
            held_s += absent * (until_s - from_s).max(0.0) * share;
            absent *= stays;
            from_s = until_s;
            // Against half the age, any time gained 1.3 points over the conversation cells and lost
            // 0.5 over the agentic ones; all of the age lost a point over both (docs/policies.md).
            // Beyond the last edge nothing is held.
            if until_s >= 1.5 * seconds && held_s > 0.0 {
                best = best.max((1.0 - absent) / held_s);
            }
        }
        best
    }

    /// The probability of a use between the ages `age_ms` and `age_ms + within_ms`.
    pub(super) fn return_chance(&self, profile: ReuseProfile, age_ms: u64, within_ms: u64) -> f32 {
        let effect = self.effect(profile);
        let (now, then) =
            (AgeBucket::from_ms(age_ms), AgeBucket::from_ms(age_ms.saturating_add(within_ms)));
        let returns: f32 = (now.bin()..=then.bin())
            .map(|bin| {
                let from = if bin == now.bin() { now.part() } else { 0.0 };
                let until = if bin == then.bin() { then.part() } else { 1.0 };
                self.base[bin] * effect[bin / GROUP] * (until - from).max(0.0)
            })
            .sum();
        1.0 - (-returns).exp()
    }
}

/// Where a tail stands among those that may go: the lowest goes first. First what will not return,
/// then what was ranked before anything was learned, the least recently used first, then the rest
/// by worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TailRank(pub(crate) u32);

impl TailRank {
    pub(super) const WORTHLESS: Self = Self(0);

    /// Above every age, and what positive floating point numbers leave free.
    const LEARNED: u32 = 1 << 31;

    /// By the number of the touch that used it last.
    pub(super) fn by_age(touched: u32) -> Self {
        Self(touched.clamp(1, Self::LEARNED - 1))
    }

    /// By its Gittins index, which is never negative: then its bits order like it.
    pub(super) fn by_worth(index: f32) -> Self {
        Self(Self::LEARNED | index.to_bits())
    }

    pub(super) fn is_by_age(self) -> bool {
        self != Self::WORTHLESS && self.0 < Self::LEARNED
    }
}

/// Ranks that a cache holds: 4 KB.
const CACHED: usize = 256;

/// What blocks of different kinds are worth to one model when they have just been used, once that
/// was asked for.
///
/// Each use ranks the tail that it has just used, and few kinds come by again and again: a look
/// here takes the place of a sum over all bins, half a microsecond.
#[derive(Debug)]
pub(super) struct FreshRanks(Box<[Cell<FreshRank>]>);

#[derive(Clone, Copy, Debug, Default)]
struct FreshRank {
    profile: ReuseProfile,
    /// `None`: not asked for yet.
    rank: Option<f32>,
}

impl Default for FreshRanks {
    fn default() -> Self {
        Self(vec![Cell::default(); CACHED].into_boxed_slice())
    }
}

impl FreshRanks {
    /// [`HazardModel::gittins`] at the age of 0, by the one model that this cache is for.
    pub(super) fn rank(&self, model: &HazardModel, profile: ReuseProfile) -> f32 {
        let place = &self.0[mixed(profile.bits()) as usize % CACHED];
        let known = place.get();
        let rank = known.rank.filter(|_| known.profile == profile);
        rank.unwrap_or_else(|| {
            let rank = model.gittins(profile, 0);
            place.set(FreshRank { profile, rank: Some(rank) });
            rank
        })
    }

    /// Another model has come.
    pub(super) fn clear(&mut self) {
        self.0.iter_mut().for_each(|place| place.set(FreshRank::default()));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::reuse::factors::{self, BlockTraits};

    use super::*;

    fn record(output: u32, exit_ms: u64, returned: bool) -> LifeRecord {
        let traits = BlockTraits { output: factors::output(output), fresh: 3, path: 5, gap: 0 };
        let profile = ReuseProfile::new(traits, 0, 0, factors::NO_DIVERGENCE);
        LifeRecord {
            profile,
            returned,
            weight: 1.0,
            entry: AgeBucket::default(),
            exit: AgeBucket::from_ms(exit_ms),
        }
    }

    proptest! {
        #[test]
        fn no_records_make_the_hazard_absurd(
            lives in prop::collection::vec((any::<u32>(), any::<u64>(), any::<bool>(), 0_f32..300.0), 0..200),
        ) {
            let weigh = |(output, exit, returned, weight)| LifeRecord { weight, ..record(output, exit, returned) };
            let records: Vec<_> = lives.into_iter().map(weigh).collect();
            let mut model = HazardModel::default();
            for _ in 0..3 {
                model.fit(&records);
            }
            for record in &records {
                let effect = model.effect(record.profile);
                prop_assert!(effect.iter().chain(&model.base).all(|&rate| rate.is_finite() && rate > 0.0));
            }
        }

        #[test]
        fn ages_are_ordered_and_have_a_bin(one: u64, other: u64) {
            let (young, old) = (AgeBucket::from_ms(one.min(other)), AgeBucket::from_ms(one.max(other)));
            prop_assert!(young <= old && old.bin() < BINS);
        }
    }

    #[test]
    fn what_returns_sooner_is_learned() {
        let talkers = (0..4000).map(|k| record(1000, 10_000 + k, k % 2 == 0));
        let others = (0..4000).map(|k| record(10, 10_000 + k, k % 8 == 0));
        let records: Vec<_> = talkers.chain(others).collect();
        let mut model = HazardModel::default();
        for _ in 0..5 {
            model.fit(&records);
        }
        let group = record(0, 10_000, false).exit.bin() / GROUP;
        let rate = |output| model.effect(record(output, 0, false).profile)[group];
        let ratio = rate(1000) / rate(10);
        assert!((3.0..5.0).contains(&ratio), "4 times as many returned, learned {ratio}");
    }

    #[test]
    fn before_anything_is_learned_the_oldest_is_worth_least() {
        let rank = |age_ms| HazardModel::default().gittins(ReuseProfile::default(), age_ms);
        for minutes in 0..600 {
            assert!(rank(minutes * 60_000) > rank((minutes + 1) * 60_000), "{minutes}");
        }
        assert!(rank(u64::MAX) >= 0.0);
    }

    #[test]
    fn a_cached_rank_is_what_would_be_computed() {
        let (model, ranks) = (HazardModel::default(), FreshRanks::default());
        let profile = |n: u8| {
            let traits = BlockTraits { output: n % 7, fresh: n % 11, path: n % 13, gap: n % 5 };
            ReuseProfile::new(traits, n % 6, n % 8, n % 3)
        };
        // Each of them twice; some share a place.
        for n in (0..=255).chain(0..=255) {
            let (cached, computed) = (ranks.rank(&model, profile(n)), model.gittins(profile(n), 0));
            assert_eq!(cached.to_bits(), computed.to_bits(), "{n}");
        }
    }

    #[test]
    fn a_return_is_likelier_the_longer_one_waits() {
        let chance = |age_ms, within_ms| {
            HazardModel::default().return_chance(ReuseProfile::default(), age_ms, within_ms)
        };
        for age_ms in [0, 1_000, 100_000, u64::MAX] {
            let chances =
                [0, 1_000, 60_000, 900_000, u64::MAX].map(|within_ms| chance(age_ms, within_ms));
            assert!(chances.is_sorted() && chances[0] >= 0.0 && chances[4] <= 1.0, "{chances:?}");
        }
        assert!(chance(0, 60_000) > chance(100_000, 60_000));
    }
}
