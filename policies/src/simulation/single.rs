//! One tier, one workload, one policy: the token hit rate.
//!
//! A hit is the longest resident prefix of a request's full blocks. Then all of them become
//! resident and the policy evicts down to the capacity. The tier is prefix-closed throughout, so a
//! request costs time in proportion to the blocks it adds, not to its length.
//!
//! A request's output length is known once it has ended ([`Running`] says when); the policy's
//! upkeep is done as soon as it asks.

use std::iter::successors;

use super::workload::{BLOCK_TOKENS, Running, Workload};
use crate::eviction::{Belady, Eviction, EvictionKind};
use crate::seam::{Access, BlockId, Forest, Hints, RequestId, Standing, TierPolicies};

/// What a simulation counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Those of them that were resident.
    pub hit_tokens: u64,
}

impl Outcome {
    /// Hit tokens over prompt tokens; 0 where there are none.
    pub fn token_hit_rate(&self) -> f64 {
        self.hit_tokens as f64 / self.prompt_tokens.max(1) as f64
    }
}

/// Plays `workload` to a tier of `capacity` blocks that starts empty.
///
/// # Panics
/// If the policy names no victim in a full tier, or one that is not a resident leaf: no block is
/// ever busy here, so that is an error in the policy.
pub fn simulate(workload: &Workload, policy: Box<dyn Eviction>, capacity: u32) -> Outcome {
    let mut policies = TierPolicies::new(policy, None);
    let mut tier = SimulatedTier::default();
    let mut outcome = Outcome::default();
    let mut running = Running::default();
    let mut upkeep = Vec::new();
    for (visit, request) in workload.visits().iter().zip((0..).map(RequestId)) {
        while let Some(ended) = running.next_ended(visit.timestamp_ms) {
            policies.finished(&ended);
        }
        outcome.prompt_tokens += u64::from(visit.prompt_tokens);
        let Some(deepest) = visit.deepest else { continue };
        let depth = workload.depth(deepest);
        let inserted = tier.insert_path(workload, deepest);
        // What was not inserted was there, and it is the beginning: a tier is prefix-closed.
        outcome.hit_tokens += u64::from(depth - inserted) * u64::from(BLOCK_TOKENS);
        let access = Access {
            now_ms: visit.timestamp_ms,
            request: Some(request),
            deepest,
            depth,
            inserted,
            path: depth,
            hints: Hints::default(),
        };
        policies.touch(&access, &PolicyView { tier: &tier, chains: workload });
        tier.evict_down_to(capacity, workload, &mut policies);
        running.start(request, visit.timestamp_ms, visit.output_tokens);
        while policies.upkeep(&mut upkeep) {}
        upkeep.drain(..).for_each(|work| work());
    }
    outcome
}

/// What a plan may compare: the policies of a live tier and the offline bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// One that a live tier may use.
    Online(EvictionKind),
    /// [`Belady`], which knows the workload in advance.
    Belady,
}

impl Policy {
    /// Every policy.
    pub fn all() -> impl Iterator<Item = Self> {
        EvictionKind::ALL.into_iter().map(Self::Online).chain([Self::Belady])
    }

    /// The name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Online(kind) => kind.name(),
            Self::Belady => "belady",
        }
    }

    /// Simulates a fresh policy of this kind.
    pub fn simulate(self, workload: &Workload, capacity: u32) -> Outcome {
        let policy: Box<dyn Eviction> = match self {
            // Policies set memory aside by the capacity, and a plan may ask for a tier without
            // bounds.
            Self::Online(kind) => kind.build(capacity.min(workload.blocks())),
            Self::Belady => Box::new(Belady::new(workload.next_uses())),
        };
        simulate(workload, policy, capacity)
    }
}

/// Blocks and what is above each, whichever tier holds them.
pub(crate) trait ChainSource {
    /// The block before `block`; `None` at a root.
    fn parent(&self, block: BlockId) -> Option<BlockId>;
    /// Blocks of the path that ends at `block`, itself included.
    fn depth(&self, block: BlockId) -> u32;
    /// Names the content of `block`.
    fn key(&self, block: BlockId) -> u64;

    /// `deepest` and its ancestors, from the deepest up.
    fn path(&self, deepest: BlockId) -> impl Iterator<Item = BlockId> {
        successors(Some(deepest), |&block| self.parent(block))
    }
}

/// Which blocks are resident: always whole paths from a root on.
#[derive(Debug, Default)]
pub(crate) struct SimulatedTier {
    /// By block: how many of its children are resident; `None` where it is not itself.
    children: Vec<Option<u32>>,
    resident: u32,
}

impl SimulatedTier {
    /// How many blocks are resident.
    pub(crate) fn resident(&self) -> u32 {
        self.resident
    }

    pub(crate) fn holds(&self, block: BlockId) -> bool {
        self.children.get(block.0 as usize).is_some_and(Option::is_some)
    }

    /// The deepest resident block of the path that ends at `deepest`.
    pub(crate) fn deepest_resident(
        &self,
        chains: &impl ChainSource,
        deepest: BlockId,
    ) -> Option<BlockId> {
        chains.path(deepest).find(|&block| self.holds(block))
    }

    /// Makes the path that ends at `deepest` resident. Returns how many of its blocks were not.
    pub(crate) fn insert_path(&mut self, chains: &impl ChainSource, deepest: BlockId) -> u32 {
        let before = self.resident;
        let mut children = 0;
        for block in chains.path(deepest) {
            // Its ancestors are there as well: the tier is prefix-closed.
            if let Some(present) = self.children_mut(block) {
                *present += children;
                break;
            }
            *self.children_mut(block) = Some(children);
            self.resident += 1;
            children = 1;
        }
        self.resident - before
    }

    /// Lets leaves go, as `policies` say, until no more than `capacity` blocks are resident.
    fn evict_down_to(
        &mut self,
        capacity: u32,
        chains: &impl ChainSource,
        policies: &mut TierPolicies,
    ) {
        while self.resident > capacity {
            let victim = policies.victim(&PolicyView { tier: self, chains });
            let victim = victim.expect("nothing is busy, so every leaf is evictable");
            policies.removed(victim, chains.key(victim), self.remove(chains, victim));
        }
    }

    /// Returns the parent where this made it a leaf.
    pub(crate) fn remove(&mut self, chains: &impl ChainSource, leaf: BlockId) -> Option<BlockId> {
        assert_eq!(self.children_mut(leaf).take(), Some(0), "victims are leaves");
        self.resident -= 1;
        let parent = chains.parent(leaf)?;
        let siblings = self.children_mut(parent).as_mut().expect("a tier is prefix-closed");
        *siblings -= 1;
        (*siblings == 0).then_some(parent)
    }

    fn children_mut(&mut self, block: BlockId) -> &mut Option<u32> {
        block.entry(&mut self.children)
    }
}

/// A tier as its policy sees it. No block is ever busy.
#[derive(Debug)]
pub(crate) struct PolicyView<'t, C> {
    pub(crate) tier: &'t SimulatedTier,
    pub(crate) chains: &'t C,
}

impl<C: ChainSource> Forest for PolicyView<'_, C> {
    fn standing(&self, block: BlockId) -> Standing {
        match self.tier.children.get(block.0 as usize) {
            Some(Some(1..)) => Standing::Interior,
            _ => Standing::Evictable,
        }
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        self.chains.parent(block)
    }

    fn key(&self, block: BlockId) -> u64 {
        self.chains.key(block)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use crate::simulation::workload::Request;

    use super::*;

    const LRU: Policy = Policy::Online(EvictionKind::Lru);
    const FIFO: Policy = Policy::Online(EvictionKind::Fifo);
    const HAZARD: Policy = Policy::Online(EvictionKind::Hazard);

    /// Requests over few blocks, with much reuse. An id tells its whole chain, as in a real trace.
    fn requests() -> impl Strategy<Value = Vec<Request>> {
        let path = prop::collection::vec(1_u64..4, 0..6);
        prop::collection::vec((path, 0..BLOCK_TOKENS), 0..60)
            .prop_map(|paths| paths.into_iter().map(|(path, rest)| request(&path, rest)).collect())
    }

    fn request(path: &[u64], partial: u32) -> Request {
        let chained = path.iter().scan(0, |chain, step| {
            *chain = *chain * 4 + step;
            Some(*chain)
        });
        Request {
            timestamp_ms: 0,
            input_length: path.len() as u32 * BLOCK_TOKENS + partial,
            output_length: 0,
            hash_ids: chained.collect(),
        }
    }

    /// The rules in the plainest form: stamps on every block, the victim by exhaustive search for
    /// the lowest rank, ties deepest first. `rank` sees the number of the request and the block.
    fn hit_blocks(
        requests: &[Request],
        capacity: usize,
        rank: impl Fn(usize, u64) -> usize,
    ) -> u64 {
        let mut resident: HashMap<u64, (usize, isize)> = HashMap::new();
        let mut hits = 0;
        for (now, request) in requests.iter().enumerate() {
            let path = request.full_blocks();
            hits += path.iter().take_while(|id| resident.contains_key(id)).count() as u64;
            for (depth, &id) in path.iter().enumerate() {
                resident.insert(id, (rank(now, id), -depth.cast_signed()));
            }
            while resident.len() > capacity {
                let victim = *resident.iter().min_by_key(|&(_, rank)| rank).unwrap().0;
                resident.remove(&victim);
            }
        }
        hits
    }

    /// How soon after request `now` the block is used again, the later the lower.
    fn imminence(requests: &[Request], now: usize, id: u64) -> usize {
        let later = &requests[now + 1..];
        let gap = later.iter().position(|request| request.full_blocks().contains(&id));
        gap.map_or(0, |gap| usize::MAX - (now + gap))
    }

    fn hits(policy: Policy, requests: &[Request], capacity: u32) -> u64 {
        policy.simulate(&requests.iter().collect(), capacity).hit_tokens / u64::from(BLOCK_TOKENS)
    }

    proptest! {
        #[test]
        fn lru_hits_what_plain_lru_hits(requests in requests(), capacity in 0_u32..40) {
            let expected = hit_blocks(&requests, capacity as usize, |now, _| now);
            prop_assert_eq!(hits(LRU, &requests, capacity), expected);
        }

        #[test]
        fn belady_hits_what_plain_belady_hits(requests in requests(), capacity in 0_u32..40) {
            let rank = |now, id| imminence(&requests, now, id);
            let expected = hit_blocks(&requests, capacity as usize, rank);
            prop_assert_eq!(hits(Policy::Belady, &requests, capacity), expected);
        }

        #[test]
        fn no_policy_beats_belady(requests in requests(), capacity in 0_u32..40) {
            let bound = hits(Policy::Belady, &requests, capacity);
            for policy in Policy::all() {
                prop_assert!(hits(policy, &requests, capacity) <= bound, "{policy:?}");
            }
        }

        #[test]
        fn hazard_is_lru_until_it_has_learned(mut requests in requests(), capacity in 0_u32..40, pause_ms in 0_u64..5_000) {
            // The first fit is due after the fiftieth.
            requests.truncate(50);
            requests.iter_mut().zip(0..).for_each(|(request, nth)| request.timestamp_ms = nth * pause_ms);
            prop_assert_eq!(hits(HAZARD, &requests, capacity), hits(LRU, &requests, capacity));
        }

        #[test]
        fn all_policies_agree_where_all_fits_or_nothing_does(requests in requests()) {
            for policy in Policy::all() {
                prop_assert_eq!(hits(policy, &requests, 0), 0);
                prop_assert_eq!(hits(policy, &requests, u32::MAX), hits(LRU, &requests, 10_000));
            }
        }
    }

    #[test]
    fn a_prompt_longer_than_the_tier_keeps_its_head() {
        let requests = [request(&[1, 1, 1, 1], 0), request(&[1, 1, 1, 1], 0)];
        assert_eq!(hits(LRU, &requests, 3), 3);
    }

    #[test]
    fn fifo_ignores_use() {
        let requests = [&[1], &[2], &[1], &[3], &[1]].map(|path| request(path, 0));
        assert_eq!(hits(FIFO, &requests, 2), 1);
        assert_eq!(hits(LRU, &requests, 2), 2);
    }

    #[test]
    fn no_tokens_is_a_rate_of_zero() {
        assert!(Outcome::default().token_hit_rate().abs() < f64::EPSILON);
    }
}
