//! Several tiers, one workload: where the hits come from and what is written for them.
//!
//! Tiers are *inclusive*: a block that is read from a lower tier stays there, and comes to the
//! first tier like every block of a request. A request uses the blocks of its path in every tier
//! that holds them. Each block is read from the first tier whose prefix covers it, so hits of
//! different tiers never overlap.
//!
//! A block goes down a tier at a time, when the [`Admission`] between the two
//! says so; what it decides to write is written at once. A block that goes down when it leaves is
//! told to the lower tier's policy as part of the use by the request that used it last.

use std::fmt;

use super::single::{ChainSource, PolicyView, SimulatedTier};
use super::workload::{BLOCK_TOKENS, Running, Workload};
use crate::admission::{Admission, AdmissionKind, Candidates, TierPair, TierShape, Trigger};
use crate::eviction::{Eviction, EvictionKind};
use crate::seam::{Access, BlockId, Ended, Hints, RequestId, TierPolicies, Upkeep};

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

/// The tiers, the fastest one first.
pub(crate) struct TierStages {
    tiers: Vec<TierStage>,
    /// Blocks that left a tier during the latest use, and may be in no tier any more.
    departed: Vec<BlockId>,
    upkeep: Vec<Upkeep>,
}

/// A request uses the path that ends at `deepest`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockUse {
    pub(crate) now_ms: u64,
    pub(crate) request: RequestId,
    pub(crate) deepest: BlockId,
    pub(crate) hints: Hints,
}

impl TierStages {
    pub(crate) fn new(levels: Vec<Level>) -> Self {
        // A level brings the rule by which blocks enter it; that is fed and asked with the tier
        // above it.
        let mut rule_below = None;
        let stage = |level: Level| {
            let rule = rule_below.replace(level.admission);
            TierStage::new(level.capacity, TierPolicies::new(level.eviction, rule))
        };
        let mut tiers: Vec<_> = levels.into_iter().rev().map(stage).collect();
        tiers.reverse();
        Self { tiers, departed: Vec::new(), upkeep: Vec::new() }
    }

    /// Takes a path through the tiers. Returns how many of its blocks were in any.
    pub(crate) fn take(&mut self, chains: &impl ChainSource, used: &BlockUse) -> u32 {
        self.departed.clear();
        let hits = self.count_reads(chains, used.deepest);
        for index in 0..self.tiers.len() {
            self.take_into(index, chains, used);
        }
        for index in 0..self.tiers.len() {
            // From the top: what leaves a tier may come into the next one, which then makes room
            // for it as well.
            self.make_room(index, chains, used.now_ms);
        }
        hits
    }

    pub(crate) fn finished(&mut self, ended: &Ended) {
        self.tiers.iter_mut().for_each(|stage| stage.policies.finished(ended));
    }

    /// What the policies have asked for since the last call.
    pub(crate) fn take_upkeep(&mut self) -> Vec<Upkeep> {
        std::mem::take(&mut self.upkeep)
    }

    /// Blocks that were in a tier before the latest use, or passed through one, and are in none
    /// now.
    pub(crate) fn take_departed(&mut self) -> Vec<BlockId> {
        let mut departed = std::mem::take(&mut self.departed);
        departed.retain(|&block| !self.tiers.iter().any(|stage| stage.tier.holds(block)));
        departed.sort_unstable();
        departed.dedup();
        departed
    }

    pub(crate) fn outcomes(&self) -> impl Iterator<Item = TierOutcome> {
        self.tiers.iter().map(|stage| stage.outcome)
    }

    fn count_reads(&mut self, chains: &impl ChainSource, deepest: BlockId) -> u32 {
        let mut covered = 0;
        for stage in &mut self.tiers {
            let held =
                stage.tier.deepest_resident(chains, deepest).map_or(0, |block| chains.depth(block));
            let read = u64::from(held.saturating_sub(covered));
            stage.outcome.blocks_read += read;
            stage.outcome.hit_tokens += read * u64::from(BLOCK_TOKENS);
            covered = covered.max(held);
        }
        covered
    }

    /// Brings the path into a tier, as far as it is admitted, and tells the policies of the use.
    fn take_into(&mut self, index: usize, chains: &impl ChainSource, used: &BlockUse) {
        let inserted = match index.checked_sub(1) {
            None => self.tiers[0].write(chains, used.deepest),
            Some(upper) => match self.tiers[upper].tier.deepest_resident(chains, used.deepest) {
                Some(last) => {
                    let written = self.offer(upper, chains, last, Trigger::Used, used.now_ms);
                    written.map_or(0, |(_, written)| written)
                }
                None => 0,
            },
        };
        if let Some(deepest) = self.tiers[index].tier.deepest_resident(chains, used.deepest) {
            self.touch(
                index,
                chains,
                &BlockUse { deepest, ..*used },
                inserted,
                chains.depth(used.deepest),
            );
        }
    }

    fn touch(
        &mut self,
        index: usize,
        chains: &impl ChainSource,
        used: &BlockUse,
        inserted: u32,
        path: u32,
    ) {
        let BlockUse { now_ms, request, deepest, hints } = *used;
        let depth = chains.depth(deepest);
        let access =
            Access { now_ms, request: Some(request), deepest, depth, inserted, path, hints };
        let stage = &mut self.tiers[index];
        stage.note_use(deepest, LastUser { request, hints });
        stage.policies.touch(&access, &PolicyView { tier: &stage.tier, chains });
        while stage.policies.upkeep(&mut self.upkeep) {}
    }

    fn make_room(&mut self, index: usize, chains: &impl ChainSource, now_ms: u64) {
        loop {
            let stage = &mut self.tiers[index];
            if stage.tier.resident() <= stage.capacity {
                return;
            }
            let victim = stage.policies.victim(&PolicyView { tier: &stage.tier, chains });
            let victim = victim.expect("nothing is busy, so every leaf is evictable");
            let last_user = stage.forget_use(chains, victim);
            // Asked while the victim is there, for rules look at it. Told as a use of now: with the
            // time of its last one `hazard` lost half a point at conversation 1k + 5k.
            if let Some((deepest, written)) =
                self.offer(index, chains, victim, Trigger::Leaving, now_ms)
                && let Some(LastUser { request, hints }) = last_user
            {
                let used = BlockUse { now_ms, request, deepest, hints };
                self.touch(index + 1, chains, &used, written, chains.depth(victim));
            }
            let exposed = self.tiers[index].tier.remove(chains, victim);
            self.tiers[index].policies.removed(victim, chains.key(victim), exposed);
            self.departed.push(victim);
        }
    }

    /// Asks whether the path to `last`, a block of tier `upper`, is to go down, and writes it as
    /// far as it is. Returns where it ends in the lower tier and how many of its blocks are new
    /// there, if any.
    fn offer(
        &mut self,
        upper: usize,
        chains: &impl ChainSource,
        last: BlockId,
        trigger: Trigger,
        now_ms: u64,
    ) -> Option<(BlockId, u32)> {
        let [stage, lower, ..] = &mut self.tiers[upper..] else { return None };
        let held = lower.tier.deepest_resident(chains, last).map_or(0, |block| chains.depth(block));
        let blocks = chains.depth(last) - held;
        // Were the lower tier told of clean blocks that leave, `hazard` would take each for a use.
        if blocks == 0 {
            return None;
        }
        let candidates = Candidates { last, blocks, depth: chains.depth(last) };
        let view = PolicyView { tier: &stage.tier, chains };
        let admitted = stage.policies.admit(candidates, trigger, now_ms, &view).min(blocks);
        let deepest =
            chains.path(last).nth((blocks - admitted) as usize).filter(|_| admitted > 0)?;
        Some((deepest, lower.write(chains, deepest)))
    }
}

impl fmt::Debug for TierStages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stages").field("tiers", &self.tiers).finish_non_exhaustive()
    }
}

/// The request and tenant in whose name a block goes down when it leaves.
#[derive(Clone, Copy, Debug)]
struct LastUser {
    request: RequestId,
    hints: Hints,
}

/// One tier in use.
#[derive(Debug)]
struct TierStage {
    tier: SimulatedTier,
    capacity: u32,
    policies: TierPolicies,
    /// By block: which request used it last, exact once it is a leaf. A use marks the deepest block
    /// alone; what leaves hands its mark to its parent.
    last_use: Vec<Option<LastUser>>,
    outcome: TierOutcome,
}

impl TierStage {
    fn new(capacity: u32, policies: TierPolicies) -> Self {
        Self {
            tier: SimulatedTier::default(),
            capacity,
            policies,
            last_use: Vec::new(),
            outcome: TierOutcome::default(),
        }
    }

    /// Returns how many blocks of the path that ends at `deepest` are new.
    fn write(&mut self, chains: &impl ChainSource, deepest: BlockId) -> u32 {
        let written = self.tier.insert_path(chains, deepest);
        self.outcome.blocks_written += u64::from(written);
        written
    }

    fn note_use(&mut self, block: BlockId, user: LastUser) {
        let last = block.entry(&mut self.last_use);
        // Requests are numbered in their order, so the later one counts.
        if last.is_none_or(|before| before.request <= user.request) {
            *last = Some(user);
        }
    }

    fn forget_use(&mut self, chains: &impl ChainSource, leaf: BlockId) -> Option<LastUser> {
        let user = self.last_use.get_mut(leaf.0 as usize).and_then(Option::take)?;
        if let Some(parent) = chains.parent(leaf) {
            self.note_use(parent, user);
        }
        Some(user)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::simulation::single::Policy;
    use crate::simulation::workload::{BLOCK_TOKENS, Request};

    use super::*;

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
