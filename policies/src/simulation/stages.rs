//! Tiers one below another, in use.

use std::fmt;

use crate::admission::rule::{Admission, Candidates, Trigger};
use crate::eviction::policy::Eviction;
use crate::seam::{Access, BlockId, Ended, Hints, RequestId, Upkeep};
use crate::simulation::tier::{ChainSource, PolicyView, SimulatedTier};
use crate::simulation::workload::BLOCK_TOKENS;
use crate::tier_policies::TierPolicies;

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
        let at = block.0 as usize;
        if self.last_use.len() <= at {
            self.last_use.resize(at + 1, None);
        }
        // Requests are numbered in their order, so the later one counts.
        let is_later = self.last_use[at].is_none_or(|before| before.request <= user.request);
        if is_later {
            self.last_use[at] = Some(user);
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
