//! Switches to the rule that would have served best of late.

use super::shadow::{Sampling, Shadow};
use super::{Admission, AdmissionKind, Candidates, Edge, Moment};
use crate::eviction::{Access, BlockId, Forest, RequestId, Upkeep};
use crate::hierarchy::Level;

/// Runs two small tiers beside the real ones for each of the other rules, on a sample of the blocks, and does
/// what the best of them does. Among rules that find nearly as many blocks, the one that writes least.
///
/// Per use and in memory it costs what `selective` costs, and six policies' costs for one block in
/// [`stride`](Self::stride).
#[derive(Debug)]
pub struct Auto {
    sampling: Sampling,
    rivals: [Rival; 3],
    chosen: usize,
    uses: u32,
}

/// A rule, and how it would have fared.
#[derive(Debug)]
struct Rival {
    rule: Box<dyn Admission>,
    shadow: Shadow,
}

/// The rules to choose from, from few writes to many.
const RIVALS: [AdmissionKind; 3] =
    [AdmissionKind::Selective, AdmissionKind::WriteBack, AdmissionKind::WriteThrough];
/// Until there is evidence: the rule that gives up nothing.
const FIRST: usize = 1;

/// Blocks in a shadow's lower tier.
const SHADOW_BLOCKS: u32 = 512;
/// A rule is nearly as good as the best one that finds so much of what that one finds.
const NEARLY: f64 = 0.995;
/// Sampled uses from one choice to the next.
const TERM: u32 = 256;
/// What counts after one term of what counted before.
const KEPT: f64 = 0.95;

impl Auto {
    /// A rule between the tiers of `edge`.
    pub fn new(edge: &Edge) -> Self {
        let stride = Self::stride(edge);
        let rival =
            |kind: AdmissionKind| Rival { rule: kind.build(edge), shadow: shadow(edge, stride, kind) };
        Self { sampling: Sampling::one_in(stride), rivals: RIVALS.map(rival), chosen: FIRST, uses: 0 }
    }

    /// One block in so many is sampled.
    pub fn stride(edge: &Edge) -> u32 {
        (edge.lower.capacity / SHADOW_BLOCKS).max(1)
    }

    fn choose(&mut self) {
        let best = self.rivals.iter().map(|rival| rival.shadow.hits).fold(0.0, f64::max);
        let is_good = |rival: &Rival| rival.shadow.hits >= NEARLY * best;
        self.chosen = self.rivals.iter().position(is_good).unwrap_or(FIRST);
        for rival in &mut self.rivals {
            rival.shadow.hits *= KEPT;
        }
    }
}

fn shadow(edge: &Edge, stride: u32, kind: AdmissionKind) -> Shadow {
    let small = Edge { upper: edge.upper.shrunk(stride), lower: edge.lower.shrunk(stride) };
    let level = |side: super::Side, admission: AdmissionKind| Level {
        capacity: side.capacity,
        eviction: side.eviction.build(side.capacity),
        admission: admission.build(&small),
    };
    Shadow::new(level(small.upper, AdmissionKind::WriteBack), level(small.lower, kind))
}

impl Admission for Auto {
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

    fn remove(&mut self, block: BlockId, exposed: Option<BlockId>) {
        self.rivals.iter_mut().for_each(|rival| rival.rule.remove(block, exposed));
    }

    fn finished(&mut self, request: RequestId, output_tokens: u32, now_ms: u64) {
        for rival in &mut self.rivals {
            rival.rule.finished(request, output_tokens, now_ms);
            rival.shadow.finished(request, output_tokens, now_ms);
        }
    }

    fn upkeep(&mut self) -> Option<Upkeep> {
        let mut work = Vec::new();
        for rival in &mut self.rivals {
            work.extend(rival.rule.upkeep());
            work.extend(rival.shadow.take_upkeep());
        }
        let is_any = !work.is_empty();
        is_any.then(|| Box::new(move || work.into_iter().for_each(|upkeep| upkeep())) as Upkeep)
    }

    fn admit(&mut self, candidates: Candidates, moment: Moment, now_ms: u64, forest: &dyn Forest) -> u32 {
        // All are asked, for what they are asked about is what some of them learn from.
        let answers =
            self.rivals.each_mut().map(|rival| rival.rule.admit(candidates, moment, now_ms, forest));
        answers[self.chosen]
    }
}
