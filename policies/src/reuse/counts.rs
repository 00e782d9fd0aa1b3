//! How often each block of a path was used again.

use super::factors::{self, MANY_REUSES};

/// Reuse counts by block, kept as runs of equal ones.
///
/// Uses begin at the root, so counts hardly ever grow with the depth: a path has at most some 30
/// runs, whatever its length, and a use of 65,536 blocks changes a few numbers instead of as many.
#[derive(Debug, Default)]
pub(super) struct ReuseCounts(Vec<CountRun>);

#[derive(Clone, Copy, Debug)]
struct CountRun {
    /// Behind its last block, from the path's first block on.
    end: u32,
    count: u8,
}

impl ReuseCounts {
    fn blocks(&self) -> u32 {
        self.0.last().map_or(0, |run| run.end)
    }

    /// Adds blocks that have not been used again.
    pub(super) fn extend(&mut self, blocks: u32) {
        let end = self.blocks() + blocks;
        match self.0.last_mut() {
            Some(last) if last.count == 0 => last.end = end,
            _ => {
                if self.0.is_empty() {
                    // Most paths have no other: the room for four that a `Vec` takes adds up.
                    self.0.reserve_exact(1);
                }
                self.0.push(CountRun { end, count: 0 });
            }
        }
    }

    /// Keeps the first `blocks` blocks.
    pub(super) fn truncate(&mut self, blocks: u32) {
        let kept = self.split(blocks.min(self.blocks()));
        self.0.truncate(kept);
    }

    /// The blocks from `from` to before `to` were used once more.
    pub(super) fn increment(&mut self, from: u32, to: u32) {
        let (first, last) = (self.split(from), self.split(to));
        for run in &mut self.0[first..last] {
            run.count = (run.count + 1).min(MANY_REUSES);
        }
        // Counts at the cap and the two ends may equal their neighbours now. From behind: a removal
        // moves what follows.
        for below in (first.max(1)..(last + 1).min(self.0.len())).rev() {
            if self.0[below - 1].count == self.0[below].count {
                self.0.remove(below - 1);
            }
        }
    }

    /// The blocks from `from` to before `to` by class of reuse: how many in a row, and the count of
    /// the first.
    pub(super) fn classes(&self, from: u32, to: u32) -> impl Iterator<Item = (u32, u8)> {
        let first = self.0.partition_point(|run| run.end <= from);
        let mut runs = self.0[first..].iter().peekable();
        let mut start = from;
        std::iter::from_fn(move || {
            let first = runs.next().filter(|_| start < to)?;
            let is_akin =
                |run: &&CountRun| factors::reuse(run.count) == factors::reuse(first.count);
            let mut end = first.end;
            while end < to
                && let Some(run) = runs.next_if(is_akin)
            {
                end = run.end;
            }
            let begin = std::mem::replace(&mut start, end.min(to));
            Some((start - begin, first.count))
        })
    }

    /// Makes a run begin at `block`, if any lies there. Returns its index, or how many there are.
    fn split(&mut self, block: u32) -> usize {
        let index = self.0.partition_point(|run| run.end <= block);
        let start = index.checked_sub(1).map_or(0, |before| self.0[before].end);
        if index == self.0.len() || start == block {
            return index;
        }
        self.0.insert(index, CountRun { end: block, count: self.0[index].count });
        index + 1
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_a_count_for_each_block(steps in prop::collection::vec((0_u8..4, 0_u32..40, 0_u32..40), 0..200)) {
            let (mut counts, mut model) = (ReuseCounts::default(), Vec::<u8>::new());
            for (step, one, other) in steps {
                let limit = |at: u32| at.min(model.len() as u32);
                let (from, to) = (limit(one.min(other)), limit(one.max(other)));
                match step {
                    0 => {
                        counts.extend(1 + one % 8);
                        model.resize(model.len() + 1 + one as usize % 8, 0);
                    }
                    1 => {
                        counts.truncate(one);
                        model.truncate(one as usize);
                    }
                    _ => {
                        counts.increment(from, to);
                        model[from as usize..to as usize].iter_mut().for_each(|count| *count = (*count + 1).min(MANY_REUSES));
                    }
                }
                prop_assert_eq!(counts.blocks() as usize, model.len());
                prop_assert!(counts.0.windows(2).all(|pair| pair[0].count != pair[1].count && pair[0].end < pair[1].end));
                let (from, to) = (one.min(other).min(counts.blocks()), one.max(other).min(counts.blocks()));
                let expected = model[from as usize..to as usize].chunk_by(|&a, &b| factors::reuse(a) == factors::reuse(b));
                let expected: Vec<_> = expected.map(|run| (run.len() as u32, run[0])).collect();
                prop_assert_eq!(counts.classes(from, to).collect::<Vec<_>>(), expected);
            }
        }
    }
}
