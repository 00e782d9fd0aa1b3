//! Several tiers, one workload: where the hits come from and what is written for them.
//!
//! Tiers are *inclusive*: a block that is read from a lower tier stays there, and comes to the first tier like
//! every block of a request. A request uses the blocks of its path in every tier that holds them. Each block is
//! read from the first tier whose prefix covers it, so hits of different tiers never overlap.
//!
//! A block goes down a tier at a time, when the [`Admission`] between the two says so; what it decides to write
//! is written at once. A block that goes down when it leaves is told to the lower tier's policy as part of
//! the use by the request that used it last.

use crate::admission::{Admission, AdmissionKind, Candidates, Moment};
use crate::eviction::{Access, BlockId, Eviction, EvictionKind, Hints, RequestId};
use crate::running::Running;
use crate::simulate::Tier;
use crate::workload::{BLOCK_TOKENS, Visit, Workload};

/// A tier to simulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierPlan {
    /// Blocks that it holds.
    pub capacity: u32,
    /// Which block leaves it.
    pub eviction: EvictionKind,
    /// Which blocks enter it from the tier above. Without meaning in the first tier, which takes every block.
    pub admission: AdmissionKind,
}

/// A tier with its policies, which may be any.
#[derive(Debug)]
pub struct Level {
    /// Blocks that it holds.
    pub capacity: u32,
    /// Which block leaves it.
    pub eviction: Box<dyn Eviction>,
    /// Which blocks enter it from the tier above. Never asked in the first tier.
    pub admission: Box<dyn Admission>,
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

/// What a simulation counted of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierOutcome {
    /// Tokens of the prompts that no faster tier held.
    pub hit_tokens: u64,
    /// Blocks that became resident.
    pub blocks_written: u64,
    /// Blocks that a request used from here because no faster tier held them.
    pub blocks_read: u64,
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
        let uppers = plans.iter().take(1).chain(plans);
        let levels = plans.iter().zip(uppers).map(|(plan, upper)| Level {
            capacity: plan.capacity,
            eviction: plan.eviction.build(plan.capacity),
            admission: plan.admission.build(upper.capacity),
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
    /// If a policy names no victim in a full tier, or one that is not a resident leaf: no block is ever busy
    /// here, so that is an error in the policy.
    pub fn simulate(self, workload: &Workload) -> HierarchyOutcome {
        let stages = self.0.into_iter().map(|level| Stage::new(level, workload)).collect();
        let mut simulation = Simulation { workload, stages };
        let mut running = Running::default();
        for (visit, request) in workload.visits().iter().zip((0..).map(RequestId)) {
            while let Some(ended) = running.next_ended(visit.timestamp_ms) {
                for stage in &mut simulation.stages {
                    stage.level.eviction.finished(ended.request, ended.output_tokens, ended.at_ms);
                    stage.level.admission.finished(ended.request, ended.output_tokens, ended.at_ms);
                }
            }
            if let Some(deepest) = visit.deepest {
                simulation.request(visit, deepest, request);
                running.start(request, visit.timestamp_ms, visit.output_tokens);
            }
        }
        HierarchyOutcome {
            tiers: simulation.stages.into_iter().map(|stage| stage.outcome).collect(),
            prompt_tokens: workload.visits().iter().map(|visit| u64::from(visit.prompt_tokens)).sum(),
            requests: workload.requests() as u64,
        }
    }
}

struct Simulation<'w> {
    workload: &'w Workload,
    stages: Vec<Stage<'w>>,
}

impl Simulation<'_> {
    fn request(&mut self, visit: &Visit, deepest: BlockId, request: RequestId) {
        self.count_reads(deepest);
        for index in 0..self.stages.len() {
            self.take_path(index, visit.timestamp_ms, deepest, request);
        }
        for index in 0..self.stages.len() {
            self.make_room(index, visit.timestamp_ms);
        }
    }

    fn count_reads(&mut self, deepest: BlockId) {
        let mut covered = 0;
        for stage in &mut self.stages {
            let held = stage.tier.deepest_resident(deepest).map_or(0, |block| self.workload.depth(block));
            let read = u64::from(held.saturating_sub(covered));
            stage.outcome.blocks_read += read;
            stage.outcome.hit_tokens += read * u64::from(BLOCK_TOKENS);
            covered = covered.max(held);
        }
    }

    /// Brings the path into a tier, as far as it is admitted, and tells the policies of the use.
    fn take_path(&mut self, index: usize, now_ms: u64, deepest: BlockId, request: RequestId) {
        let inserted = match index.checked_sub(1) {
            None => self.stages[0].write(deepest),
            Some(upper) => match self.stages[upper].tier.deepest_resident(deepest) {
                Some(last) => self.offer(upper, last, Moment::Used, now_ms).map_or(0, |(_, written)| written),
                None => 0,
            },
        };
        let path = self.workload.depth(deepest);
        let Some(deepest) = self.stages[index].tier.deepest_resident(deepest) else { return };
        self.touch(index, now_ms, deepest, inserted, path, request);
    }

    fn touch(
        &mut self,
        index: usize,
        now_ms: u64,
        deepest: BlockId,
        inserted: u32,
        path: u32,
        request: RequestId,
    ) {
        let depth = self.workload.depth(deepest);
        let hints = Hints::default();
        let access = Access { now_ms, request: Some(request), deepest, depth, inserted, path, hints };
        let stage = &mut self.stages[index];
        stage.last_use[deepest.0 as usize] = Some(request);
        stage.level.eviction.touch(&access, &stage.tier);
        if let Some(upkeep) = stage.level.eviction.upkeep() {
            upkeep();
        }
        if let [stage, lower, ..] = &mut self.stages[index..] {
            lower.level.admission.touch(&access, &stage.tier);
            if let Some(upkeep) = lower.level.admission.upkeep() {
                upkeep();
            }
        }
    }

    fn make_room(&mut self, index: usize, now_ms: u64) {
        loop {
            let stage = &mut self.stages[index];
            if stage.tier.resident() <= stage.level.capacity {
                return;
            }
            let victim = stage.level.eviction.victim(&stage.tier);
            let victim = victim.expect("nothing is busy, so every leaf is evictable");
            let request = stage.forget_use(victim);
            if index + 1 < self.stages.len()
                && let Some((deepest, written)) = self.offer(index, victim, Moment::Leaving, now_ms)
                && let Some(request) = request
            {
                self.touch(index + 1, now_ms, deepest, written, self.workload.depth(victim), request);
            }
            let exposed = self.stages[index].tier.remove(victim);
            self.stages[index].level.eviction.remove(victim, exposed);
            if let Some(lower) = self.stages.get_mut(index + 1) {
                lower.level.admission.remove(victim, exposed);
            }
        }
    }

    /// Asks whether the path to `last`, a block of tier `upper`, is to go down, and writes it as far as it is.
    /// Answers where it ends in the lower tier and how many of its blocks are new there, if any.
    fn offer(&mut self, upper: usize, last: BlockId, moment: Moment, now_ms: u64) -> Option<(BlockId, u32)> {
        let [stage, lower, ..] = &mut self.stages[upper..] else { return None };
        let held = lower.tier.deepest_resident(last).map_or(0, |block| self.workload.depth(block));
        let blocks = self.workload.depth(last) - held;
        let candidates = Candidates { last, blocks };
        if blocks == 0 {
            return None;
        }
        let admitted = lower.level.admission.admit(candidates, moment, now_ms, &stage.tier).min(blocks);
        let deepest = self.workload.path(last).nth((blocks - admitted) as usize).filter(|_| admitted > 0)?;
        Some((deepest, lower.write(deepest)))
    }
}

/// A tier in use.
struct Stage<'w> {
    tier: Tier<'w>,
    level: Level,
    /// By block: who used it last, exact once it is a leaf. A use marks the deepest block alone; what leaves
    /// hands its mark to its parent.
    last_use: Vec<Option<RequestId>>,
    workload: &'w Workload,
    outcome: TierOutcome,
}

impl<'w> Stage<'w> {
    fn new(level: Level, workload: &'w Workload) -> Self {
        let last_use = vec![None; workload.blocks() as usize];
        Self { tier: Tier::new(workload), level, last_use, workload, outcome: TierOutcome::default() }
    }

    /// Answers how many blocks of the path that ends at `deepest` are new.
    fn write(&mut self, deepest: BlockId) -> u32 {
        let written = self.tier.insert_path(deepest);
        self.outcome.blocks_written += u64::from(written);
        written
    }

    fn forget_use(&mut self, leaf: BlockId) -> Option<RequestId> {
        let request = self.last_use[leaf.0 as usize].take();
        if let Some(parent) = self.workload.parent(leaf) {
            let above = &mut self.last_use[parent.0 as usize];
            *above = request.max(*above);
        }
        request
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::simulate::Policy;
    use crate::workload::Request;

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
