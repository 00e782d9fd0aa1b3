//! Writes what is likely enough to return.

use super::rule::{Admission, Candidates, Trigger};
use super::worth::WorthTally;
use crate::reuse::ReuseModel;
use crate::seam::Forest;

/// Writes blocks that are about to leave the upper tier, except those least likely to return:
/// [`REFUSED_RETURNS`] of all returns that are expected of the candidates are given up.
///
/// Deeper candidates of a path return no more often, and leave first. So it is enough to judge the
/// last one: if it is refused, the one above it is judged when it leaves in turn, and what is
/// written in the end is a prefix. In the first half hour, in which few blocks can be known not to
/// return, it writes everything.
///
/// O(1) a question. The upper tier's reuse model knows how likely a block is to return.
#[derive(Debug, Default)]
pub struct Selective {
    tally: WorthTally,
}

/// Expected returns that are given up, of all that the candidates promise.
// At 6 %, six sizes of the conversation trace lost 0.2 to 1.0 % of their hits; a test allows 1 %.
pub const REFUSED_RETURNS: f32 = 0.055;

impl Admission for Selective {
    fn needs_reuse(&self) -> bool {
        true
    }

    fn admit(
        &mut self,
        candidates: Candidates,
        trigger: Trigger,
        now_ms: u64,
        _forest: &dyn Forest,
        reuse: &ReuseModel,
    ) -> u32 {
        // The longer a block has lain unused, the more its age tells.
        if trigger == Trigger::Used {
            return 0;
        }
        let worth = reuse.return_chance(candidates.last, candidates.depth);
        let is_refused =
            reuse.is_ready(now_ms) && self.tally.share_of_returns_up_to(worth) <= REFUSED_RETURNS;
        // Of refused candidates only the last one is gone.
        self.tally.add(worth, if is_refused { 1 } else { candidates.blocks }, now_ms);
        if is_refused { 0 } else { candidates.blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seam::{Access, BlockId, Hints, RequestId};
    use crate::testing::Loose;

    /// Whether the first block that is asked about is admitted, half an hour after its use.
    fn admitted_first(will_not_return: bool) -> u32 {
        let mut reuse = ReuseModel::default();
        let hints = Hints { will_not_return, ..Hints::default() };
        let block = BlockId(0);
        let request = Some(RequestId(1));
        reuse.touch(
            &Access { now_ms: 0, request, deepest: block, depth: 1, inserted: 1, path: 1, hints },
            &Loose,
        );
        let now_ms = 1_900_000;
        assert!(reuse.is_ready(now_ms));
        let candidates = Candidates { last: block, blocks: 1, depth: 1 };
        Selective::default().admit(candidates, Trigger::Leaving, now_ms, &Loose, &reuse)
    }

    #[test]
    fn the_first_candidate_has_none_to_stand_behind() {
        assert_eq!(admitted_first(false), 1);
        assert_eq!(admitted_first(true), 0, "nobody returns for it");
    }
}
