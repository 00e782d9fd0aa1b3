//! Switches to the rule that would have served best recently.

use super::fixed::{WriteBack, WriteThrough};
use super::pair::{TierPair, TierShape};
use super::rule::{Admission, Candidates, Trigger};
use super::selective::Selective;
use super::shadow::{ShadowSampling, ShadowTiers};
use crate::reuse::ReuseModel;
use crate::seam::{Access, Ended, Forest, Upkeep};
use crate::simulation::stages::Level;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eviction::EvictionKind;
    use crate::seam::{BlockId, Hints, RequestId};
    use crate::testing::Loose;

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
}
