//! Writes what is likely enough to return, compared to other candidates.

use super::{Admission, Candidates, Trigger};
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

/// What candidates were worth lately. The older, the less they count: all is halved after every
/// [`HALF_LIFE`] of them.
#[derive(Debug)]
pub(super) struct WorthTally {
    /// By class of worth, the lowest first.
    classes: [WorthClass; CLASSES],
    /// For how long, in milliseconds, likewise halved.
    span_ms: u64,
    last_ms: Option<u64>,
    /// Questions.
    asked: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct WorthClass {
    blocks: f32,
    returns: f32,
}

/// 25 for each doubling of the probability, the lowest for all below 1/65,536.
const CLASSES: usize = 401;
const CLASSES_A_DOUBLING: f32 = 25.0;

/// Questions.
const HALF_LIFE: u64 = 4096;

impl Default for WorthTally {
    fn default() -> Self {
        Self { classes: [WorthClass::default(); CLASSES], span_ms: 0, last_ms: None, asked: 0 }
    }
}

impl WorthTally {
    /// Counts `blocks` candidates at `now_ms`, each of which is worth `worth`.
    pub(super) fn add(&mut self, worth: f32, blocks: u32, now_ms: u64) {
        self.span_ms += now_ms.saturating_sub(*self.last_ms.get_or_insert(now_ms));
        self.last_ms = self.last_ms.max(Some(now_ms));
        let class = &mut self.classes[class(worth)];
        class.blocks += blocks as f32;
        class.returns += blocks as f32 * worth;
        self.asked += 1;
        // All at once and rarely: to fade every class with every question would double its cost.
        if self.asked.is_multiple_of(HALF_LIFE) {
            self.halve();
        }
    }

    fn halve(&mut self) {
        self.span_ms /= 2;
        for class in &mut self.classes {
            class.blocks /= 2.0;
            class.returns /= 2.0;
        }
    }

    /// The share of all expected returns that candidates worth no more than `worth` have. Before
    /// any is expected, every candidate of any worth counts as all.
    fn share_of_returns_up_to(&self, worth: f32) -> f32 {
        let returns =
            |classes: &[WorthClass]| classes.iter().map(|class| class.returns).sum::<f32>();
        let all = returns(&self.classes);
        if all == 0.0 {
            return f32::from(worth > 0.0);
        }
        returns(&self.classes[..=class(worth)]) / all
    }

    /// Blocks worth more than `worth`.
    pub(super) fn blocks_above(&self, worth: f32) -> f32 {
        self.classes[class(worth) + 1..].iter().map(|class| class.blocks).sum()
    }

    /// The time for which candidates are counted, in milliseconds.
    pub(super) const fn span_ms(&self) -> u64 {
        self.span_ms
    }
}

fn class(worth: f32) -> usize {
    // What will not return is worth 0, which has no logarithm.
    let doublings = worth.clamp(f32::MIN_POSITIVE, 1.0).log2();
    (CLASSES as f32 - 1.0 + CLASSES_A_DOUBLING * doublings).max(0.0) as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::seam::{Access, BlockId, Hints, RequestId};
    use crate::testing::Loose;

    use super::*;

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
        assert_eq!(admitted_first(true), 0, "no request returns for it");
    }

    proptest! {
        #[test]
        fn shares_grow_with_the_worth(candidates in prop::collection::vec((0_f32..=1.0, 1_u32..100), 1..50)) {
            let mut tally = WorthTally::default();
            candidates.iter().for_each(|&(worth, blocks)| tally.add(worth, blocks, 0));
            let mut worths: Vec<_> = candidates.iter().map(|&(worth, _)| worth).collect();
            worths.sort_by(f32::total_cmp);
            let shares: Vec<_> = worths.iter().map(|&worth| tally.share_of_returns_up_to(worth)).collect();
            prop_assert!(shares.is_sorted() && shares.iter().all(|share| (0.0..=1.001).contains(share)));
            prop_assert!(worths.iter().map(|&worth| tally.blocks_above(worth)).is_sorted_by(|a, b| a >= b));
            prop_assert!(tally.blocks_above(1.0).abs() < f32::EPSILON);
        }
    }

    #[test]
    fn what_is_long_past_counts_no_more() {
        let mut tally = WorthTally::default();
        tally.add(1.0, 1_000, 0);
        (1..=20 * HALF_LIFE).for_each(|now_ms| tally.add(0.1, 1, now_ms));
        assert!(tally.blocks_above(0.5) < 0.01);
        assert!((HALF_LIFE..=2 * HALF_LIFE).contains(&tally.span_ms()));
    }
}
