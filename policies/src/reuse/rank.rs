//! What a block is worth: its Gittins index.

use std::cell::Cell;

use super::factors::ReuseProfile;
use super::fit::{AgeBucket, BINS, EDGES, GROUP, HazardModel};
use super::sharded::mixed;

/// The most returns for each second that the block is held, over all times to hold it that are at
/// least half as long as the time since its last use: P(return while held) ÷ expected seconds until
/// it returns or is let go. (J. C. Gittins, "Bandit processes and dynamic allocation indices", JRSS
/// B 41(2), 1979; the shortest time keeps one bin's chance peak from ruling.)
pub(super) fn gittins(model: &HazardModel, profile: ReuseProfile, age_ms: u64) -> f32 {
    let effect = model.effect(profile);
    let age = AgeBucket::from_ms(age_ms);
    let seconds = age_ms as f32 / 1000.0;
    let (mut absent, mut held_s, mut best) = (1.0_f32, 0.0_f32, 0.0_f32);
    let mut from_s = seconds;
    for bin in age.bin()..BINS {
        let until_s = EDGES[bin];
        let part = if bin == age.bin() { 1.0 - age.part() } else { 1.0 };
        let returns = model.base[bin] * effect[bin / GROUP] * part;
        let stays = (-returns).exp();
        // The mean time in the bin. Where hardly anything returns, the quotient would be all
        // rounding.
        let share = if returns > 1e-4 { (1.0 - stays) / returns } else { 1.0 };
        held_s += absent * (until_s - from_s).max(0.0) * share;
        absent *= stays;
        from_s = until_s;
        // Against half the age, any time gained 1.3 points over the conversation cells and lost 0.5
        // over the agentic ones; all of the age lost a point over both (docs/policies.md). Beyond
        // the last edge nothing is held.
        if until_s >= 1.5 * seconds && held_s > 0.0 {
            best = best.max((1.0 - absent) / held_s);
        }
    }
    best
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
    /// [`gittins`] at the age of 0, by the one model that this cache is for.
    pub(super) fn rank(&self, model: &HazardModel, profile: ReuseProfile) -> f32 {
        let place = &self.0[mixed(profile.bits()) as usize % CACHED];
        let known = place.get();
        let rank = known.rank.filter(|_| known.profile == profile);
        rank.unwrap_or_else(|| {
            let rank = gittins(model, profile, 0);
            place.set(FreshRank { profile, rank: Some(rank) });
            rank
        })
    }

    /// Another model has come.
    pub(super) fn clear(&mut self) {
        self.0.iter_mut().for_each(|place| place.set(FreshRank::default()));
    }
}

/// The probability of a use between the ages `age_ms` and `age_ms + within_ms`.
pub(super) fn return_chance(
    model: &HazardModel,
    profile: ReuseProfile,
    age_ms: u64,
    within_ms: u64,
) -> f32 {
    let effect = model.effect(profile);
    let (now, then) =
        (AgeBucket::from_ms(age_ms), AgeBucket::from_ms(age_ms.saturating_add(within_ms)));
    let returns: f32 = (now.bin()..=then.bin())
        .map(|bin| {
            let from = if bin == now.bin() { now.part() } else { 0.0 };
            let until = if bin == then.bin() { then.part() } else { 1.0 };
            model.base[bin] * effect[bin / GROUP] * (until - from).max(0.0)
        })
        .sum();
    1.0 - (-returns).exp()
}

#[cfg(test)]
mod tests {
    use super::super::factors::BlockTraits;
    use super::*;

    #[test]
    fn before_anything_is_learned_the_oldest_is_worth_least() {
        let rank = |age_ms| gittins(&HazardModel::default(), ReuseProfile::default(), age_ms);
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
            let (cached, computed) =
                (ranks.rank(&model, profile(n)), gittins(&model, profile(n), 0));
            assert_eq!(cached.to_bits(), computed.to_bits(), "{n}");
        }
    }

    #[test]
    fn a_return_is_likelier_the_longer_one_waits() {
        let chance = |age_ms, within_ms| {
            return_chance(&HazardModel::default(), ReuseProfile::default(), age_ms, within_ms)
        };
        for age_ms in [0, 1_000, 100_000, u64::MAX] {
            let chances =
                [0, 1_000, 60_000, 900_000, u64::MAX].map(|within_ms| chance(age_ms, within_ms));
            assert!(chances.is_sorted() && chances[0] >= 0.0 && chances[4] <= 1.0, "{chances:?}");
        }
        assert!(chance(0, 60_000) > chance(100_000, 60_000));
    }
}
