//! How soon blocks return: the hazard, and how it is learned.
//!
//! The hazard of a segment in age bin b is `base[b] · Π m[x] · g[x][group(b)]` over the values x of its
//! factors. A fit counts, for the base and then for each factor in turn, how many returns there were and how
//! many the rest of the model expected, and sets the multiplier to the ratio (one Gauss–Seidel sweep of a
//! Poisson regression), held back by a prior where little was seen.

use super::factors::{ALL_VALUES, FACTORS, Profile, START, VALUES};

/// Age bins. The first ends at 2 s, each further one is 1.4 times as old at its end.
pub(super) const BINS: usize = 48;
/// Bins in an age group: 1.4³ = 2.74 times the age.
pub(super) const GROUP: usize = 3;
/// Age groups.
pub(super) const GROUPS: usize = BINS / GROUP;

const FIRST_EDGE_S: f64 = 2.0;
const EDGE_RATIO: f64 = 1.4;

/// Returns a bin, before anything is known: 0.3 for each e-fold of age.
const PRIOR_HAZARD: f32 = 0.3 * 0.336_472_24;
const BASE_PRIOR: f32 = 3.0;
const FACTOR_PRIOR: f32 = 20.0;
const FACTOR_RANGE: (f32, f32) = (0.05, 20.0);
const GROUP_RANGE: (f32, f32) = (0.1, 10.0);

/// One value for each age group.
pub(super) type ByGroup = [f32; GROUPS];

/// The life of a segment under one profile, from one age to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) profile: Profile,
    /// Whether it ended by a return.
    pub(super) returned: bool,
    /// Whether it counts a second time, as if its output had never become known.
    pub(super) twice: bool,
    /// √blocks.
    pub(super) weight: f32,
    pub(super) entry: Age,
    pub(super) exit: Age,
}

/// An age in bins: the whole part is the bin, the rest how much of the bin has passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub(super) struct Age(f32);

impl Age {
    pub(super) fn from_ms(ms: u64) -> Self {
        let seconds = ms as f64 / 1000.0;
        if seconds < FIRST_EDGE_S {
            return Self((seconds / FIRST_EDGE_S) as f32);
        }
        let bin = (1.0 + (seconds / FIRST_EDGE_S).ln() / EDGE_RATIO.ln()).floor();
        let low = FIRST_EDGE_S * EDGE_RATIO.powf(bin - 1.0);
        let part = ((seconds - low) / (low * (EDGE_RATIO - 1.0))).clamp(0.0, 0.999);
        Self(((bin + part) as f32).min(BINS as f32 - 0.001))
    }

    pub(super) fn bin(self) -> usize {
        self.0 as usize
    }

    /// How much of its bin has passed.
    pub(super) fn part(self) -> f32 {
        self.0.fract()
    }
}

/// The end of a bin, in seconds.
pub(super) fn edge(bin: usize) -> f32 {
    (FIRST_EDGE_S * EDGE_RATIO.powi(bin as i32)) as f32
}

/// The hazard as learned so far.
#[derive(Clone, Debug)]
pub(super) struct Model {
    /// Returns expected while a bin passes.
    pub(super) base: [f32; BINS],
    multipliers: Vec<f32>,
    by_group: Vec<ByGroup>,
    /// The product of both.
    effects: Vec<ByGroup>,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            base: [PRIOR_HAZARD; BINS],
            multipliers: vec![1.0; ALL_VALUES],
            by_group: vec![[1.0; GROUPS]; ALL_VALUES],
            effects: vec![[1.0; GROUPS]; ALL_VALUES],
        }
    }
}

impl Model {
    /// What the factors together multiply the base with.
    pub(super) fn effect(&self, profile: Profile) -> ByGroup {
        let mut product = [1.0; GROUPS];
        for place in profile.places() {
            scale(&mut product, &self.effects[place]);
        }
        product
    }

    /// Learns from `records`.
    pub(super) fn fit(&mut self, records: &[Record]) {
        let mut lives = lives(records);
        if lives.is_empty() {
            return;
        }
        self.fit_base(&lives);
        for life in &mut lives {
            life.expected = self.expected(life);
        }
        for factor in 0..FACTORS {
            self.fit_factor(factor, &mut lives);
        }
    }

    fn fit_base(&mut self, lives: &[Life]) {
        let mut returns = [0.0; BINS];
        let mut exposure = [0.0; BINS];
        for life in lives {
            let effect = self.effect(life.profile);
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

    /// The returns that the model expects of a life.
    fn expected(&self, life: &Life) -> ByGroup {
        let mut expected = [0.0; GROUPS];
        for (bin, part) in life.parts() {
            expected[bin / GROUP] += self.base[bin] * part;
        }
        scale(&mut expected, &self.effect(life.profile));
        expected.map(|returns| returns * life.weight)
    }

    fn fit_factor(&mut self, factor: usize, lives: &mut [Life]) {
        let (start, values) = (START[factor], VALUES[factor]);
        let mut expected = vec![[0.0; GROUPS]; values];
        let mut returns = vec![[0.0; GROUPS]; values];
        for life in &*lives {
            let value = life.places[factor] as usize - start;
            add(&mut expected[value], &life.expected);
            if life.returned {
                returns[value][life.exit.bin() / GROUP] += life.weight;
            }
        }
        let change: Vec<ByGroup> =
            (0..values).map(|value| self.update(start + value, &expected[value], &returns[value])).collect();
        for life in lives {
            scale(&mut life.expected, &change[life.places[factor] as usize - start]);
        }
    }

    /// Sets one value's multipliers. Answers by how much its effect changed.
    fn update(&mut self, place: usize, expected: &ByGroup, returns: &ByGroup) -> ByGroup {
        let before = self.effects[place];
        let without = |expected: f32, multiplier: f32| expected / multiplier;
        let total = without(expected.iter().sum(), self.multipliers[place]);
        let seen: f32 = returns.iter().sum();
        let ratio = (seen + FACTOR_PRIOR) / (total + FACTOR_PRIOR);
        let multiplier = ratio.clamp(FACTOR_RANGE.0, FACTOR_RANGE.1);
        for group in 0..GROUPS {
            let rest = multiplier * without(expected[group], before[group]);
            let ratio = (returns[group] + FACTOR_PRIOR) / (rest + FACTOR_PRIOR);
            self.by_group[place][group] = ratio.clamp(GROUP_RANGE.0, GROUP_RANGE.1);
        }
        self.multipliers[place] = multiplier;
        self.effects[place] = self.by_group[place].map(|by_group| by_group * multiplier);
        std::array::from_fn(|group| self.effects[place][group] / before[group])
    }
}

/// A record as a fit looks at it.
struct Life {
    profile: Profile,
    places: [u16; FACTORS],
    returned: bool,
    weight: f32,
    entry: Age,
    exit: Age,
    expected: ByGroup,
}

impl Life {
    fn new(profile: Profile, record: &Record, scale: f32) -> Self {
        Self {
            profile,
            places: profile.places().map(|place| place as u16),
            returned: record.returned,
            weight: record.weight * scale,
            entry: record.entry,
            exit: record.exit,
            expected: [0.0; GROUPS],
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

/// Every record, and some twice, with weights of mean 1.
fn lives(records: &[Record]) -> Vec<Life> {
    let again = |record: &&Record| record.twice && record.profile.knows_the_output();
    let count = records.len() + records.iter().filter(again).count();
    let total: f32 =
        records.iter().map(|record| record.weight * if again(&record) { 2.0 } else { 1.0 }).sum();
    let scale = count as f32 / total.max(f32::MIN_POSITIVE);
    let once = records.iter().map(|record| Life::new(record.profile, record, scale));
    let twice = records.iter().filter(again);
    let twice = twice.map(|record| Life::new(record.profile.before_the_end(), record, scale));
    once.chain(twice).collect()
}

fn scale(row: &mut ByGroup, by: &ByGroup) {
    for (cell, by) in row.iter_mut().zip(by) {
        *cell *= by;
    }
}

fn add(row: &mut ByGroup, other: &ByGroup) {
    for (cell, other) in row.iter_mut().zip(other) {
        *cell += other;
    }
}
