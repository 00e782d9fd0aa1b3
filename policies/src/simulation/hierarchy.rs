//! Several tiers, one workload: where the hits come from and what is written for them.
//!
//! Tiers are *inclusive*: a block that is read from a lower tier stays there, and comes to the
//! first tier like every block of a request. A request uses the blocks of its path in every tier
//! that holds them. Each block is read from the first tier whose prefix covers it, so hits of
//! different tiers never overlap.
//!
//! A block goes down a tier at a time, when the [`Admission`](crate::Admission) between the two
//! says so; what it decides to write is written at once. A block that goes down when it leaves is
//! told to the lower tier's policy as part of the use by the request that used it last.

use crate::admission::{AdmissionKind, TierPair, TierShape};
use crate::eviction::EvictionKind;
use crate::seam::{Hints, RequestId};
use crate::simulation::running::Running;
use crate::simulation::stages::{BlockUse, TierStages};
pub use crate::simulation::stages::{Level, TierOutcome};
use crate::simulation::workload::Workload;

/// A tier to simulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierPlan {
    /// Blocks that it holds.
    pub capacity: u32,
    /// Which block leaves it.
    pub eviction: EvictionKind,
    /// Which blocks enter it from the tier above. Without meaning in the first tier, which takes
    /// every block.
    pub admission: AdmissionKind,
}

/// Tiers that are empty, the fastest one first.
#[derive(Debug)]
pub struct Hierarchy(Vec<Level>);

/// What a simulation counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HierarchyOutcome {
    /// By tier.
    pub tiers: Vec<TierOutcome>,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Requests, those without a full block included.
    pub requests: u64,
}

impl HierarchyOutcome {
    /// Hit tokens of all tiers over prompt tokens; 0 where there are none.
    pub fn token_hit_rate(&self) -> f64 {
        let hits: u64 = self.tiers.iter().map(|tier| tier.hit_tokens).sum();
        hits as f64 / self.prompt_tokens.max(1) as f64
    }

    /// `blocks` a request; 0 where there is none.
    pub fn per_request(&self, blocks: u64) -> f64 {
        blocks as f64 / self.requests.max(1) as f64
    }
}

impl Hierarchy {
    /// The tiers of `plans`, each with fresh policies.
    pub fn new(plans: &[TierPlan]) -> Self {
        let sides =
            plans.iter().map(|plan| TierShape { capacity: plan.capacity, eviction: plan.eviction });
        // The first tier has none above it, and its rule is never asked: it is paired with itself.
        let uppers = sides.clone().take(1).chain(sides.clone());
        let edges = uppers.zip(sides).map(|(upper, lower)| TierPair { upper, lower });
        let levels = plans.iter().zip(edges).map(|(plan, pair)| Level {
            capacity: plan.capacity,
            eviction: plan.eviction.build(plan.capacity),
            admission: plan.admission.build(&pair),
        });
        Self(levels.collect())
    }

    /// Tiers with any policies.
    pub fn of_levels(levels: Vec<Level>) -> Self {
        Self(levels)
    }

    /// Plays `workload` to the tiers. Upkeep is done as soon as a policy asks.
    ///
    /// # Panics
    /// If a policy names no victim in a full tier, or one that is not a resident leaf: no block is
    /// ever busy here, so that is an error in the policy.
    pub fn simulate(self, workload: &Workload) -> HierarchyOutcome {
        let mut stages = TierStages::new(self.0);
        let mut running = Running::default();
        for (visit, request) in workload.visits().iter().zip((0..).map(RequestId)) {
            while let Some(ended) = running.next_ended(visit.timestamp_ms) {
                stages.finished(&ended);
            }
            let Some(deepest) = visit.deepest else { continue };
            let hints = Hints::default();
            stages
                .take(workload, &BlockUse { now_ms: visit.timestamp_ms, request, deepest, hints });
            stages.take_upkeep().into_iter().for_each(|upkeep| upkeep());
            running.start(request, visit.timestamp_ms, visit.output_tokens);
        }
        HierarchyOutcome {
            tiers: stages.outcomes().collect(),
            prompt_tokens: workload
                .visits()
                .iter()
                .map(|visit| u64::from(visit.prompt_tokens))
                .sum(),
            requests: workload.requests() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::simulation::single::Policy;
    use crate::simulation::workload::{BLOCK_TOKENS, Request};

    /// Requests over few blocks, with much reuse. An id tells its whole chain, as in a real trace.
    fn workload() -> impl Strategy<Value = Workload> {
        let path = prop::collection::vec(1_u64..4, 0..6);
        let requests = prop::collection::vec((path, 0_u64..3_000, 0_u32..200), 0..60);
        requests.prop_map(|requests| {
            let mut now_ms = 0;
            let mut workload = Workload::default();
            for (path, gap_ms, output_length) in requests {
                now_ms += gap_ms;
                let chained = path.iter().scan(0, |chain, step| {
                    *chain = *chain * 4 + step;
                    Some(*chain)
                });
                workload.push(&Request {
                    timestamp_ms: now_ms,
                    input_length: path.len() as u32 * BLOCK_TOKENS,
                    output_length,
                    hash_ids: chained.collect(),
                });
            }
            workload
        })
    }

    fn plan(capacity: u32, eviction: EvictionKind, admission: AdmissionKind) -> TierPlan {
        TierPlan { capacity, eviction, admission }
    }

    fn kinds() -> impl Strategy<Value = (EvictionKind, AdmissionKind)> {
        (prop::sample::select(&EvictionKind::ALL), prop::sample::select(&AdmissionKind::ALL))
    }

    proptest! {
        #[test]
        fn one_tier_hits_what_a_single_tier_hits(workload in workload(), capacity in 0_u32..30, (eviction, admission) in kinds()) {
            let single = Policy::Online(eviction).simulate(&workload, capacity);
            let outcome = Hierarchy::new(&[plan(capacity, eviction, admission)]).simulate(&workload);
            prop_assert_eq!(outcome.tiers[0].hit_tokens, single.hit_tokens);
            prop_assert_eq!(outcome.prompt_tokens, single.prompt_tokens);
        }

        #[test]
        fn what_is_below_changes_nothing_above(
            workload in workload(), device in 0_u32..12, host in 0_u32..20, (eviction, admission) in kinds(),
        ) {
            let tiers = [plan(device, eviction, admission), plan(host, eviction, admission)];
            let both = Hierarchy::new(&tiers).simulate(&workload);
            let alone = Hierarchy::new(&tiers[..1]).simulate(&workload);
            prop_assert_eq!(both.tiers[0], alone.tiers[0]);
        }

        #[test]
        fn written_through_is_as_good_as_the_lower_tier_alone(
            workload in workload(), device in 0_u32..12, more in 0_u32..12,
        ) {
            let through = AdmissionKind::WriteThrough;
            let tiers = [plan(device, EvictionKind::Lru, through), plan(device + more, EvictionKind::Lru, through)];
            let both = Hierarchy::new(&tiers).simulate(&workload);
            let alone = Policy::Online(EvictionKind::Lru).simulate(&workload, device + more);
            prop_assert_eq!(both.tiers.iter().map(|tier| tier.hit_tokens).sum::<u64>(), alone.hit_tokens);
        }

        #[test]
        fn ample_tiers_miss_each_block_once(
            workload in workload(), device in 0_u32..12, (eviction, _) in kinds(),
            lossless in prop::sample::select(&[AdmissionKind::WriteThrough, AdmissionKind::WriteBack]),
        ) {
            let tiers = [plan(device, eviction, lossless), plan(10_000, eviction, lossless)];
            let outcome = Hierarchy::new(&tiers).simulate(&workload);
            let hits: u64 = outcome.tiers.iter().map(|tier| tier.hit_tokens).sum();
            let first_uses = u64::from(workload.blocks()) * u64::from(BLOCK_TOKENS);
            prop_assert_eq!(hits, outcome.prompt_tokens - first_uses);
            prop_assert!(outcome.tiers[1].blocks_written <= u64::from(workload.blocks()));
        }
    }
}
