//! Bounds what is written.

use super::selective::WorthTally;
use super::{Admission, Candidates, Trigger};
use crate::reuse::ReuseModel;
use crate::seam::{Access, Ended, Forest, Upkeep};

/// How much may be written to a medium that wears out, in bytes a day. No 24 hours see more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Bytes a day. 0: nothing is written.
    pub bytes_per_day: u64,
}

const DAY_MS: u64 = 86_400_000;
/// Hours, of the day's 24, whose allowance may be saved up.
const SAVED_HOURS: u64 = 1;

impl Budget {
    /// A multiple of `capacity_bytes` a day, as endurance is specified for drives. Nothing if it is
    /// negative or no number.
    pub fn drive_writes_per_day(drive_writes: f64, capacity_bytes: u64) -> Self {
        Self { bytes_per_day: (drive_writes * capacity_bytes as f64) as u64 }
    }
}

/// Another rule, within a [`Budget`].
///
/// Of the blocks that the other rule admits, those most likely to return are written, as far as the
/// budget allows. While the budget exceeds the demand it changes nothing.
///
/// An allowance runs up at 23/24 of the daily rate, to at most an hour's worth: so no day sees more
/// than the budget, wherever it begins.
///
/// O(1) a question, besides the other rule. The upper tier's reuse model knows how likely a block
/// is to return.
#[derive(Debug)]
pub struct Budgeted {
    inner: Box<dyn Admission>,
    bucket: TokenBucket,
    block_bytes: u64,
    tally: WorthTally,
}

impl Budgeted {
    /// Holds `inner` to `budget`, between tiers whose blocks take `block_bytes` bytes.
    pub fn new(inner: Box<dyn Admission>, budget: Budget, block_bytes: u64) -> Self {
        Self {
            inner,
            bucket: TokenBucket::new(budget),
            block_bytes: block_bytes.max(1),
            tally: WorthTally::default(),
        }
    }

    /// Whether recent demand for blocks worth more than `worth` leaves something of the budget.
    fn is_affordable(&self, worth: f32) -> bool {
        // Demand and span are halved together, so both are of the same time.
        let allowance = self.bucket.level.saturating_add(self.bucket.income(self.tally.span_ms()));
        self.tally.blocks_above(worth) * self.block_bytes as f32 <= allowance as f32
    }
}

impl Admission for Budgeted {
    fn refund(&mut self, blocks: u32) {
        self.inner.refund(blocks);
        let level = self.bucket.level.saturating_add(u64::from(blocks) * self.block_bytes);
        // Income may have come since. With more than the saved hour, a day could see more than its
        // budget.
        self.bucket.level = level.min(self.bucket.most());
    }

    fn needs_reuse(&self) -> bool {
        true
    }

    fn touch(&mut self, access: &Access, forest: &dyn Forest) {
        self.inner.touch(access, forest);
    }

    fn finished(&mut self, ended: &Ended) {
        self.inner.finished(ended);
    }

    fn upkeep(&mut self, work: &mut Vec<Upkeep>) {
        self.inner.upkeep(work);
    }

    fn admit(
        &mut self,
        candidates: Candidates,
        trigger: Trigger,
        now_ms: u64,
        forest: &dyn Forest,
        reuse: &ReuseModel,
    ) -> u32 {
        let wanted =
            self.inner.admit(candidates, trigger, now_ms, forest, reuse).min(candidates.blocks);
        self.bucket.advance(now_ms);
        // Demand is what the rule wants: else the budget would be saved for blocks that are never
        // written.
        if wanted == 0 {
            return 0;
        }
        let worth = reuse.return_chance(candidates.last, candidates.depth);
        let affordable = self.is_affordable(worth);
        self.tally.add(worth, wanted, now_ms);
        let blocks = if affordable {
            u64::from(wanted).min(self.bucket.level / self.block_bytes)
        } else {
            0
        };
        self.bucket.level -= blocks * self.block_bytes;
        blocks as u32
    }
}

/// What may be written right now, in bytes.
#[derive(Debug)]
struct TokenBucket {
    budget: Budget,
    level: u64,
    filled_ms: Option<u64>,
}

impl TokenBucket {
    const fn new(budget: Budget) -> Self {
        let most = budget.bytes_per_day / 24 * SAVED_HOURS;
        // A full hour at the start: with the 23/24 that run up in a day, it makes the day's budget.
        Self { budget, level: most, filled_ms: None }
    }

    const fn most(&self) -> u64 {
        self.budget.bytes_per_day / 24 * SAVED_HOURS
    }

    /// What runs up in `ms` milliseconds.
    fn income(&self, ms: u64) -> u64 {
        // 64 bits overflow after five hours of a terabyte a day.
        let daily = u128::from(self.budget.bytes_per_day - self.most());
        (daily * u128::from(ms) / u128::from(DAY_MS)).try_into().unwrap_or(u64::MAX)
    }

    fn advance(&mut self, now_ms: u64) {
        let filled_ms = *self.filled_ms.get_or_insert(now_ms);
        let income = self.income(now_ms.saturating_sub(filled_ms));
        // Fractions of a byte go on running up.
        if income > 0 {
            self.level = self.level.saturating_add(income).min(self.most());
            self.filled_ms = Some(now_ms);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::admission::WriteThrough;
    use crate::seam::BlockId;
    use crate::testing::Loose;

    use super::*;

    const HOUR_MS: u64 = DAY_MS / 24;

    /// What of `wants`, blocks with the time since the question before, is written, with the time.
    fn written(bytes_per_day: u64, block_bytes: u64, wants: &[(u64, u32)]) -> Vec<(u64, u64)> {
        let budget = Budget { bytes_per_day };
        let mut rule = Budgeted::new(Box::new(WriteThrough), budget, block_bytes);
        let (mut now_ms, reuse) = (0, ReuseModel::idle());
        let mut ask = |&(gap_ms, blocks)| {
            now_ms += gap_ms;
            let candidates = Candidates { last: BlockId(0), blocks, depth: blocks };
            (
                now_ms,
                u64::from(rule.admit(candidates, Trigger::Used, now_ms, &Loose, &reuse))
                    * block_bytes,
            )
        };
        wants.iter().map(&mut ask).collect()
    }

    proptest! {
        #[test]
        fn no_day_sees_more_than_the_budget(
            bytes_per_day in 0_u64..1_000_000,
            block_bytes in 1_u64..5_000,
            wants in prop::collection::vec((0..2 * HOUR_MS, 0_u32..300), 0..200),
        ) {
            let written = written(bytes_per_day, block_bytes, &wants);
            for (first, &(begin_ms, _)) in written.iter().enumerate() {
                let day = written[first..].iter().take_while(|&&(at_ms, _)| at_ms < begin_ms + DAY_MS);
                prop_assert!(day.map(|&(_, bytes)| bytes).sum::<u64>() <= bytes_per_day);
            }
        }
    }

    #[test]
    fn an_ample_budget_changes_nothing() {
        let wants: Vec<_> = (0..100).map(|at| (60_000, at % 40)).collect();
        let written = written(u64::MAX, 1, &wants);
        assert!(
            written.iter().zip(wants).all(|(&(_, bytes), (_, blocks))| bytes == u64::from(blocks))
        );
    }

    #[test]
    fn no_budget_writes_nothing() {
        assert!(
            written(0, 1, &[(0, 10), (DAY_MS, 10), (DAY_MS, 10)])
                .iter()
                .all(|&(_, bytes)| bytes == 0)
        );
    }

    #[test]
    fn most_of_a_steady_budget_is_used() {
        let wants = vec![(HOUR_MS / 60, 100); 2 * 24 * 60];
        let bytes: u64 = written(100_000, 10, &wants).iter().map(|&(_, bytes)| bytes).sum();
        assert!((180_000..=200_000).contains(&bytes), "{bytes}");
    }

    #[test]
    fn drive_writes_are_times_the_capacity() {
        assert_eq!(Budget::drive_writes_per_day(0.5, 4_000).bytes_per_day, 2_000);
        assert_eq!(Budget::drive_writes_per_day(-1.0, 4_000).bytes_per_day, 0);
        assert_eq!(Budget::drive_writes_per_day(f64::NAN, 4_000).bytes_per_day, 0);
    }
}
