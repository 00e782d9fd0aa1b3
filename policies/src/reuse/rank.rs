//! What a block is worth: its Gittins index.

use super::factors::Profile;
use super::fit::{Age, BINS, EDGES, GROUP, Model};

/// The most returns for each second that the block is held, over all times to hold it that are at least
/// half as long as the time since its last use: P(return while held) ÷ expected seconds until it returns or is
/// let go. (J. C. Gittins, "Bandit processes and dynamic allocation indices", JRSS B 41(2), 1979; the shortest
/// time keeps one bin's chance peak from ruling.)
pub(super) fn gittins(model: &Model, profile: Profile, age_ms: u64) -> f32 {
    let effect = model.effect(profile);
    let age = Age::from_ms(age_ms);
    let seconds = age_ms as f32 / 1000.0;
    let (mut absent, mut held_s, mut best) = (1.0_f32, 0.0_f32, 0.0_f32);
    let mut from_s = seconds;
    for bin in age.bin()..BINS {
        let until_s = EDGES[bin];
        let part = if bin == age.bin() { 1.0 - age.part() } else { 1.0 };
        let returns = model.base[bin] * effect[bin / GROUP] * part;
        let stays = (-returns).exp();
        // The mean time in the bin. Where hardly anything returns, the quotient would be all rounding.
        let share = if returns > 1e-4 { (1.0 - stays) / returns } else { 1.0 };
        held_s += absent * (until_s - from_s).max(0.0) * share;
        absent *= stays;
        from_s = until_s;
        // Against half the age, any time gained 1.3 points over the conversation cells and lost 0.5 over the agentic
        // ones; all of the age lost a point over both (docs/policies.md). Beyond the last edge nothing is held.
        if until_s >= 1.5 * seconds && held_s > 0.0 {
            best = best.max((1.0 - absent) / held_s);
        }
    }
    best
}

/// The probability of a use between the ages `age_ms` and `age_ms + within_ms`.
pub(super) fn return_chance(model: &Model, profile: Profile, age_ms: u64, within_ms: u64) -> f32 {
    let effect = model.effect(profile);
    let (now, then) = (Age::from_ms(age_ms), Age::from_ms(age_ms.saturating_add(within_ms)));
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
    use super::*;

    #[test]
    fn before_anything_is_learned_the_oldest_is_worth_least() {
        let rank = |age_ms| gittins(&Model::default(), Profile::default(), age_ms);
        for minutes in 0..600 {
            assert!(rank(minutes * 60_000) > rank((minutes + 1) * 60_000), "{minutes}");
        }
        assert!(rank(u64::MAX) >= 0.0);
    }

    #[test]
    fn a_return_is_likelier_the_longer_one_waits() {
        let chance =
            |age_ms, within_ms| return_chance(&Model::default(), Profile::default(), age_ms, within_ms);
        for age_ms in [0, 1_000, 100_000, u64::MAX] {
            let chances = [0, 1_000, 60_000, 900_000, u64::MAX].map(|within_ms| chance(age_ms, within_ms));
            assert!(chances.is_sorted() && chances[0] >= 0.0 && chances[4] <= 1.0, "{chances:?}");
        }
        assert!(chance(0, 60_000) > chance(100_000, 60_000));
    }
}
