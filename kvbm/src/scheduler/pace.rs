//! How long a block takes from each tier to the device, as measured lately.

use std::time::Duration;

use kvbm_tiers::Tier;

use crate::sync::Mutex;

/// How much of earlier measurements counts when a new one comes.
// So some ten loads count: few enough to follow a medium that slows down.
const KEPT: f64 = 0.9;
/// An older measurement does not count: a tier that was slow is tried again.
const VALID: Duration = Duration::from_secs(30);

/// One tier's loads.
#[derive(Clone, Copy, Debug)]
struct TierPace {
    seconds: f64,
    blocks: f64,
    measured: Duration,
}

impl TierPace {
    fn is_valid(&self, now: Duration) -> bool {
        now.saturating_sub(self.measured) < VALID
    }
}

/// Measures loads.
#[derive(Debug, Default)]
pub(super) struct TierPaces([Mutex<Option<TierPace>>; Tier::COUNT]);

impl TierPaces {
    /// `blocks` blocks came from `tier` within `took`, the load's time in the queue included.
    pub(super) fn learn(&self, tier: Tier, blocks: usize, took: Duration, now: Duration) {
        let mut pace = self.0[tier.index()].lock();
        let before = pace.filter(|pace| pace.is_valid(now));
        let of = |known: fn(&TierPace) -> f64| before.as_ref().map_or(0.0, known) * KEPT;
        // Seconds and blocks apart: a long load says more about a block's time than a short one.
        *pace = Some(TierPace {
            seconds: of(|pace| pace.seconds) + took.as_secs_f64(),
            blocks: of(|pace| pace.blocks) + blocks as f64,
            measured: now,
        });
    }

    /// Seconds a block; `None` if nothing was loaded lately.
    pub(super) fn block_s(&self, tier: Tier, now: Duration) -> Option<f64> {
        let pace = self.0[tier.index()].lock().filter(|pace| pace.is_valid(now))?;
        (pace.blocks > 0.0).then(|| pace.seconds / pace.blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_follows_what_is_measured() {
        let paces = TierPaces::default();
        let now = Duration::from_mins(1);
        assert_eq!(paces.block_s(Tier::Disk, now), None);
        let near = |expected: f64| {
            paces.block_s(Tier::Disk, now).is_some_and(|s| (s - expected).abs() < 1e-4)
        };
        paces.learn(Tier::Disk, 10, Duration::from_millis(10), now);
        assert!(near(0.001));
        (0..100).for_each(|_| paces.learn(Tier::Disk, 10, Duration::from_millis(50), now));
        assert!(near(0.005));
        assert_eq!(paces.block_s(Tier::Host, now), None);
        assert_eq!(
            paces.block_s(Tier::Disk, now + VALID),
            None,
            "a tier that was slow is tried again"
        );
    }
}
