//! Switches to the rule that would have served best recently, as small tiers beside the real ones
//! tell.

use std::collections::{HashMap, VecDeque};

use super::selective::Selective;
use super::{Admission, Candidates, TierPair, TierShape, Trigger, WriteBack, WriteThrough};
use crate::gradual::mixed;
use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Ended, Forest, Hints, RequestId, Upkeep};
use crate::simulation::hierarchy::{BlockUse, Level, TierStages};
use crate::simulation::single::ChainSource;

/// Runs two small tiers beside the real ones for each of the other rules, on a sample of the
/// blocks, and does what the best of them does. Among rules that find nearly as many blocks, the
/// one that writes least.
///
/// Per use and in memory it costs what six policies cost for one block in [`stride`](Self::stride).
#[derive(Debug)]
pub struct Auto {
    sampling: ShadowSampling,
    rivals: [RivalRule; 3],
    chosen: usize,
    uses: u32,
}

/// A rule, and how it would have fared.
#[derive(Debug)]
struct RivalRule {
    rule: Box<dyn Admission>,
    shadow: ShadowTiers,
}

/// The rules to choose from, from few writes to many.
const RIVALS: [fn() -> Box<dyn Admission>; 3] =
    [|| Box::new(Selective::default()), || Box::new(WriteBack), || Box::new(WriteThrough)];
/// Until there is evidence: the rule that gives up nothing.
const FIRST: usize = 1;

/// Blocks in a shadow's lower tier.
const SHADOW_BLOCKS: u32 = 512;
/// A rule is nearly as good as the best one if it finds this share of what that one finds.
const NEARLY: f64 = 0.995;
/// Sampled uses from one choice to the next.
const TERM: u32 = 256;
/// What counts after one term of what counted before.
const KEPT: f64 = 0.95;

impl Auto {
    /// A rule between the tiers of `pair`.
    pub fn new(pair: &TierPair) -> Self {
        let stride = Self::stride(pair);
        // One rule for the real tiers, one for the shadow: each learns from what it is asked, and
        // must learn of one only.
        let rival = |rule: fn() -> Box<dyn Admission>| RivalRule {
            rule: rule(),
            shadow: shadow(pair, stride, rule()),
        };
        Self {
            sampling: ShadowSampling::one_in(stride),
            rivals: RIVALS.map(rival),
            chosen: FIRST,
            uses: 0,
        }
    }

    /// One block in this number is sampled.
    pub fn stride(pair: &TierPair) -> u32 {
        (pair.lower.capacity / SHADOW_BLOCKS).max(1)
    }

    fn choose(&mut self) {
        let best = self.rivals.iter().map(|rival| rival.shadow.hits).fold(0.0, f64::max);
        // While none has found anything, none is good.
        let is_good =
            |rival: &RivalRule| rival.shadow.hits > 0.0 && rival.shadow.hits >= NEARLY * best;
        // The first good one: they are ordered by what they write.
        self.chosen = self.rivals.iter().position(is_good).unwrap_or(FIRST);
        // So some twenty terms count: one term finds too little to tell half a per cent apart.
        for rival in &mut self.rivals {
            rival.shadow.hits *= KEPT;
        }
    }
}

fn shadow(pair: &TierPair, stride: u32, rule: Box<dyn Admission>) -> ShadowTiers {
    let level = |shape: TierShape, admission| Level {
        capacity: shape.capacity,
        eviction: shape.eviction.build(shape.capacity),
        admission,
    };
    let (upper, lower) = (pair.upper.shrunk(stride), pair.lower.shrunk(stride));
    // The first tier takes every block: its own rule is never asked.
    ShadowTiers::new(level(upper, Box::new(WriteBack)), level(lower, rule))
}

impl Admission for Auto {
    fn needs_reuse(&self) -> bool {
        self.rivals.iter().any(|rival| rival.rule.needs_reuse())
    }

    fn touch(&mut self, access: &Access, forest: &dyn Forest) {
        let sampled = self.sampling.sample(access, forest);
        for rival in &mut self.rivals {
            rival.rule.touch(access, forest);
            if let Some(used) = &sampled {
                rival.shadow.take(used);
            }
        }
        self.uses += u32::from(sampled.is_some());
        if self.uses == TERM {
            self.uses = 0;
            self.choose();
        }
    }

    fn finished(&mut self, ended: &Ended) {
        for rival in &mut self.rivals {
            rival.rule.finished(ended);
            rival.shadow.finished(ended);
        }
    }

    fn upkeep(&mut self, work: &mut Vec<Upkeep>) {
        // The rules have no model of their own: the tier's model learns what they use.
        self.rivals.iter_mut().for_each(|rival| work.append(&mut rival.shadow.take_upkeep()));
    }

    fn admit(
        &mut self,
        candidates: Candidates,
        trigger: Trigger,
        now_ms: u64,
        forest: &dyn Forest,
        reuse: &ReuseModel,
    ) -> u32 {
        // All are asked, since some of them learn from the questions.
        let answers = self
            .rivals
            .each_mut()
            .map(|rival| rival.rule.admit(candidates, trigger, now_ms, forest, reuse));
        answers[self.chosen]
    }
}

/// Picks a few blocks of an upper tier to stand for all: one in `stride`, by content. A sampled
/// block's parent is its next sampled ancestor, so what is left of a forest is a forest.
///
/// O(new blocks + path ÷ stride) a use, 4 bytes a block.
#[derive(Debug)]
struct ShadowSampling {
    stride: u64,
    /// By block: the next sampled block on the way up, itself included, plus 1; 0 where there is
    /// none.
    nearest: Vec<u32>,
    /// The newest requests.
    seen: VecDeque<RequestId>,
    unnamed: u64,
}

/// A use, as far as it is sampled.
#[derive(Debug)]
struct SampledUse {
    now_ms: u64,
    request: RequestId,
    hints: Hints,
    /// The sampled blocks of the path, by content, root first.
    path: Vec<u64>,
    /// How many of the first ones the same request was known to use before.
    counted: usize,
}

impl ShadowSampling {
    /// Requests whose parts are told from new requests.
    const SEEN: usize = 64;
    /// Names for requests that have none; an engine's own do not come so far.
    const UNNAMED: u64 = 1 << 63;

    fn one_in(stride: u32) -> Self {
        Self {
            stride: stride.max(1).into(),
            nearest: Vec::new(),
            seen: VecDeque::new(),
            unnamed: 0,
        }
    }

    /// `None`: nothing of the path is in the sample.
    fn sample(&mut self, access: &Access, forest: &dyn Forest) -> Option<SampledUse> {
        let above = self.note_inserted(access, forest);
        let path = self.sampled_path(Some(access.deepest), forest);
        let (request, is_part) = self.identify(access);
        let counted = if is_part { self.sampled_path(above, forest).len() } else { 0 };
        // A part that brings no sampled block has been counted with the part before.
        let is_news = !path.is_empty() && (counted < path.len() || !is_part);
        is_news.then_some(SampledUse {
            now_ms: access.now_ms,
            request,
            hints: access.hints,
            path,
            counted,
        })
    }

    /// Returns the block above the inserted ones.
    fn note_inserted(&mut self, access: &Access, forest: &dyn Forest) -> Option<BlockId> {
        let upward = std::iter::successors(Some(access.deepest), |&block| forest.parent(block));
        let mut path: Vec<_> = upward.take(access.inserted as usize + 1).collect();
        let above = path.get(access.inserted as usize).copied();
        path.truncate(access.inserted as usize);
        let mut nearest = above.map_or(0, |block| self.nearest(block));
        // Root first: the nearest of a block that is not sampled is that of its parent.
        for &block in path.iter().rev() {
            // By its own content alone: a `Sample` picks by the first block of a group, which may
            // lie further up.
            if mixed(forest.key(block)).is_multiple_of(self.stride) {
                nearest = block.0 + 1;
            }
            *block.entry(&mut self.nearest) = nearest;
        }
        above
    }

    fn nearest(&self, block: BlockId) -> u32 {
        self.nearest.get(block.0 as usize).copied().unwrap_or(0)
    }

    fn sampled_path(&self, deepest: Option<BlockId>, forest: &dyn Forest) -> Vec<u64> {
        let up = |block: BlockId| self.nearest(block).checked_sub(1).map(BlockId);
        let path =
            std::iter::successors(deepest.and_then(up), |&block| forest.parent(block).and_then(up));
        let mut path: Vec<_> = path.map(|block| forest.key(block)).collect();
        path.reverse();
        path
    }

    /// The request, and whether it is one that was seen before and goes on.
    fn identify(&mut self, access: &Access) -> (RequestId, bool) {
        // Without a name, what inserts goes on with the use before: see `Access::request`.
        let Some(request) = access.request else {
            self.unnamed += 1;
            return (RequestId(Self::UNNAMED + self.unnamed), access.inserted > 0);
        };
        let is_known = self.seen.contains(&request);
        if !is_known {
            // Once forgotten, a request's next part counts as a new use: in all shadows alike, so
            // no rule gains by it.
            self.seen.truncate(Self::SEEN - 1);
            self.seen.push_front(request);
        }
        (request, is_known)
    }
}

/// Two tiers that run beside the real ones on a sample of the blocks.
#[derive(Debug)]
struct ShadowTiers {
    stages: TierStages,
    names: ShadowNames,
    /// Blocks found lately: the older, the less they count.
    hits: f64,
}

impl ShadowTiers {
    fn new(upper: Level, lower: Level) -> Self {
        Self {
            stages: TierStages::new(vec![upper, lower]),
            names: ShadowNames::default(),
            hits: 0.0,
        }
    }

    fn take(&mut self, used: &SampledUse) {
        let Some(deepest) = self.names.intern(&used.path) else { return };
        let SampledUse { now_ms, request, hints, counted, .. } = *used;
        let hits = self.stages.take(&self.names, &BlockUse { now_ms, request, deepest, hints });
        // What an earlier part of the same use brought in was not found.
        self.hits += f64::from(hits.saturating_sub(counted as u32));
        // Their numbers serve again: what a shadow keeps stays in proportion to its tiers.
        for block in self.stages.take_departed() {
            self.names.forget(block);
        }
    }

    fn finished(&mut self, ended: &Ended) {
        self.stages.finished(ended);
    }

    fn take_upkeep(&mut self) -> Vec<Upkeep> {
        self.stages.take_upkeep()
    }
}

/// The blocks of a shadow: those that any of its tiers holds.
#[derive(Debug, Default)]
struct ShadowNames {
    by_key: HashMap<u64, BlockId>,
    blocks: Vec<ShadowName>,
    free: Vec<BlockId>,
}

#[derive(Clone, Copy, Debug)]
struct ShadowName {
    key: u64,
    parent: Option<BlockId>,
    depth: u32,
}

impl ShadowNames {
    /// The id of the last block of a path, which is given from the root on.
    fn intern(&mut self, path: &[u64]) -> Option<BlockId> {
        path.iter().zip(1..).fold(None, |parent, (&key, depth)| {
            let name = ShadowName { key, parent, depth };
            // A key names all that is above it, too: a known block already has its place.
            let known = self.by_key.get(&key).copied();
            Some(known.unwrap_or_else(|| self.add(name)))
        })
    }

    fn add(&mut self, name: ShadowName) -> BlockId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.blocks.push(name);
            BlockId(self.blocks.len() as u32 - 1)
        });
        self.blocks[id.0 as usize] = name;
        self.by_key.insert(name.key, id);
        id
    }

    fn forget(&mut self, block: BlockId) {
        self.by_key.remove(&self.blocks[block.0 as usize].key);
        self.free.push(block);
    }
}

impl ChainSource for ShadowNames {
    fn parent(&self, block: BlockId) -> Option<BlockId> {
        self.blocks[block.0 as usize].parent
    }

    fn depth(&self, block: BlockId) -> u32 {
        self.blocks[block.0 as usize].depth
    }

    fn key(&self, block: BlockId) -> u64 {
        self.blocks[block.0 as usize].key
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::admission::WriteBack;
    use crate::eviction::EvictionKind;
    use crate::seam::{BlockId, Hints, RequestId, Standing};
    use crate::testing::{Line, Loose};

    use super::*;

    #[test]
    fn without_a_hit_no_rule_is_better_than_the_first() {
        let shape = TierShape { capacity: 8, eviction: EvictionKind::Lru };
        let mut auto = Auto::new(&TierPair { upper: shape, lower: shape });
        for number in 0..2 * TERM {
            let (deepest, request) = (BlockId(number), Some(RequestId(number.into())));
            let hints = Hints::default();
            let access =
                Access { now_ms: 0, request, deepest, depth: 1, inserted: 1, path: 1, hints };
            auto.touch(&access, &Loose);
        }
        assert_eq!(auto.chosen, FIRST);
    }

    /// Blocks are named by their position.
    const LINE: Line = Line(Standing::Interior);

    const CAPACITY: u32 = 8;

    fn shadow() -> ShadowTiers {
        let level = || Level {
            capacity: CAPACITY,
            eviction: EvictionKind::Lru.build(CAPACITY),
            admission: Box::new(WriteBack),
        };
        ShadowTiers::new(level(), level())
    }

    proptest! {
        #[test]
        fn a_shadow_knows_only_what_its_tiers_hold(
            uses in prop::collection::vec(prop::collection::vec(1_u64..4, 1..12), 0..60),
        ) {
            let mut shadow = shadow();
            for (steps, now_ms) in uses.into_iter().zip(0..) {
                let chained = steps.iter().scan(0, |chain, step| {
                    *chain = *chain * 4 + step;
                    Some(*chain)
                });
                let path = chained.collect();
                let hints = Hints::default();
                shadow.take(&SampledUse { now_ms, request: RequestId(now_ms), hints, path, counted: 0 });
                prop_assert!(shadow.names.by_key.len() <= 2 * CAPACITY as usize);
                prop_assert_eq!(shadow.names.by_key.len() + shadow.names.free.len(), shadow.names.blocks.len());
            }
        }
    }

    fn access(request: u64, depth: u32, inserted: u32) -> Access {
        Access {
            now_ms: 0,
            request: Some(RequestId(request)),
            deepest: BlockId(depth - 1),
            depth,
            inserted,
            path: depth,
            hints: Hints::default(),
        }
    }

    #[test]
    fn a_use_in_parts_counts_each_block_once() {
        let mut sampling = ShadowSampling::one_in(1);
        let mut lengths = |access: &Access| {
            let used = sampling.sample(access, &LINE)?;
            Some((used.path.len(), used.counted))
        };
        assert_eq!(lengths(&access(1, 3, 3)), Some((3, 0)));
        assert_eq!(lengths(&access(1, 5, 2)), Some((5, 3)));
        assert_eq!(lengths(&access(1, 5, 0)), None);
        assert_eq!(lengths(&access(2, 5, 0)), Some((5, 0)));
    }

    #[test]
    fn about_one_block_in_so_many_is_sampled() {
        let used = ShadowSampling::one_in(10).sample(&access(1, 10_000, 10_000), &LINE);
        let sampled = used.map_or(0, |used| used.path.len());
        assert!((900..1_100).contains(&sampled), "{sampled}");
    }
}
