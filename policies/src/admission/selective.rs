//! Writes what is likely enough to return.

use super::worth::{Estimator, Tally};
use super::{Admission, Candidates, Moment};
use crate::eviction::{Access, BlockId, Forest, RequestId, Upkeep};

/// Writes blocks that are about to leave the upper tier, except those least likely to return: so many that
/// [`REFUSED_RETURNS`] of all returns that are expected of the candidates are given up.
///
/// The candidates of a path return no oftener the deeper they are, and leave in that order. So it is enough to
/// judge the last one: where it is refused, the one above it is asked about when it leaves in turn, and what is
/// written in the end is a prefix. For the first half hour, while few blocks have had the time not to return, it
/// writes everything.
///
/// O(1) a question; per use and in memory, what the policy `hazard` costs.
#[derive(Debug)]
pub struct Selective {
    estimator: Estimator,
    tally: Tally,
}

/// Expected returns that are given up, of all that the candidates promise.
pub const REFUSED_RETURNS: f32 = 0.055;

impl Selective {
    /// A rule below a tier of `upper` blocks.
    pub fn with_capacity(upper: u32) -> Self {
        Self { estimator: Estimator::with_capacity(upper), tally: Tally::new() }
    }
}

impl Admission for Selective {
    fn touch(&mut self, access: &Access, forest: &dyn Forest) {
        self.estimator.touch(access, forest);
    }

    fn remove(&mut self, block: BlockId, exposed: Option<BlockId>) {
        self.estimator.remove(block, exposed);
    }

    fn finished(&mut self, request: RequestId, output_tokens: u32, now_ms: u64) {
        self.estimator.finished(request, output_tokens, now_ms);
    }

    fn upkeep(&mut self) -> Option<Upkeep> {
        self.estimator.upkeep()
    }

    fn admit(&mut self, candidates: Candidates, moment: Moment, now_ms: u64, _forest: &dyn Forest) -> u32 {
        if moment == Moment::Used {
            return 0;
        }
        let worth = self.estimator.worth(candidates.last);
        let refuse =
            self.estimator.is_ready(now_ms) && self.tally.share_of_returns_up_to(worth) <= REFUSED_RETURNS;
        // Of refused candidates only the last one is gone.
        self.tally.add(worth, if refuse { 1 } else { candidates.blocks }, now_ms);
        if refuse { 0 } else { candidates.blocks }
    }
}
