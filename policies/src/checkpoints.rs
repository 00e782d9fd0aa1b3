//! Checkpoints: what is kept of layers that look back over a window only, or carry a state.
//!
//! Such a layer's old blocks no longer exist, so it has no chain of its own. At some positions of
//! the chain it leaves a checkpoint, its last blocks as of there: at regular distances (the
//! *grid*), and where a prompt or a turn ends. A state is a window of one block. **A window longer
//! than the way between two checkpoints is not kept twice**: a checkpoint keeps what came after the
//! one of the grid before it, and the whole window takes that one too.
//!
//! Positions count blocks: the checkpoint at position 32 is as of the end of the 32nd block.

use std::ops::Range;

/// How much a checkpoint keeps of a window where the one before it lies `way` back. All are in the
/// same unit.
pub const fn kept(window: u64, way: u64) -> u64 {
    if window < way { window } else { way }
}

/// Where on a chain checkpoints are left in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointGrid {
    every: usize,
}

/// The part of a window that one checkpoint keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointPart {
    /// Where the checkpoint is, in blocks of the chain before it.
    pub at: usize,
    /// How many blocks it keeps: the last ones before `at`.
    pub kept: usize,
    /// Positions on the chain of those of them that are in the window.
    pub wanted: Range<usize>,
}

impl CheckpointGrid {
    /// A checkpoint every `every` blocks, of at least one.
    pub const fn new(every: u32) -> Self {
        Self { every: if every == 0 { 1 } else { every as usize } }
    }

    /// Blocks from one checkpoint to the next.
    pub const fn every(self) -> usize {
        self.every
    }

    /// Whether there is one at `at`.
    pub const fn has(self, at: usize) -> bool {
        at > 0 && at.is_multiple_of(self.every)
    }

    /// The last position of the grid before `at`, 0 where that is the beginning of the chain.
    pub const fn before(self, at: usize) -> usize {
        at.saturating_sub(1) / self.every * self.every
    }

    /// How many blocks of a window of `window` blocks the checkpoint at `at` keeps.
    pub const fn kept_at(self, at: usize, window: usize) -> usize {
        kept(window as u64, (at - self.before(at)) as u64) as usize
    }

    /// The checkpoints that together have the last `window` blocks before `at` (all, where the
    /// chain is shorter), that at `at` first.
    pub fn cover(self, at: usize, window: usize) -> impl Iterator<Item = CheckpointPart> {
        let start = at.saturating_sub(window);
        std::iter::successors((at > 0).then_some(at), move |&at| {
            Some(self.before(at)).filter(|&at| at > start)
        })
        .map(move |at| {
            let kept = self.kept_at(at, window);
            CheckpointPart { at, kept, wanted: start.max(at - kept)..at }
        })
    }

    /// Where checkpoints can be made from the blocks `there` of a window: on the grid, and at the
    /// end if that `is_end`. Each needs all that it keeps.
    pub fn within(
        self,
        there: Range<usize>,
        window: usize,
        is_end: bool,
    ) -> impl Iterator<Item = usize> {
        let on_grid = (there.start / self.every * self.every..=there.end).step_by(self.every);
        let end = (is_end && !there.is_empty() && !self.has(there.end)).then_some(there.end);
        on_grid
            .filter(move |&at| at > there.start)
            .chain(end)
            .filter(move |&at| at - self.kept_at(at, window) >= there.start)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cover(every: u32, at: usize, window: usize) -> Vec<(usize, usize, Range<usize>)> {
        let parts = CheckpointGrid::new(every).cover(at, window);
        parts.map(|part| (part.at, part.kept, part.wanted)).collect()
    }

    #[test]
    fn a_window_shorter_than_the_way_fits_in_one_checkpoint() {
        assert_eq!(cover(16, 32, 4), [(32, 4, 28..32)]);
        assert_eq!(cover(16, 37, 4), [(37, 4, 33..37)]);
        // Three blocks since the last checkpoint, which has the fourth.
        assert_eq!(cover(16, 35, 4), [(35, 3, 32..35), (32, 4, 31..32)]);
        assert_eq!(cover(16, 3, 4), [(3, 3, 0..3)]);
        assert_eq!(cover(16, 33, 1), [(33, 1, 32..33)]);
        assert_eq!(cover(16, 0, 4), []);
    }

    #[test]
    fn a_window_that_is_longer_is_kept_once() {
        assert_eq!(cover(4, 12, 10), [(12, 4, 8..12), (8, 4, 4..8), (4, 4, 2..4)]);
        assert_eq!(cover(4, 13, 10), [(13, 1, 12..13), (12, 4, 8..12), (8, 4, 4..8), (4, 4, 3..4)]);
        assert_eq!(cover(4, 6, 100), [(6, 2, 4..6), (4, 4, 0..4)]);
    }

    #[test]
    fn checkpoints_are_made_of_what_is_there() {
        let within = |there, window, is_end| -> Vec<usize> {
            CheckpointGrid::new(4).within(there, window, is_end).collect()
        };
        assert_eq!(within(0..10, 2, true), [4, 8, 10]);
        assert_eq!(within(0..8, 2, true), [4, 8]);
        assert_eq!(within(0..10, 2, false), [4, 8]);
        // The window has moved on: of the checkpoint at 4 a block is gone.
        assert_eq!(within(3..10, 2, true), [8, 10]);
        assert_eq!(within(9..10, 2, true), Vec::<usize>::new());
        assert_eq!(within(9..10, 1, true), [10]);
        assert_eq!(within(5..5, 1, true), Vec::<usize>::new());
    }

    proptest! {
        #[test]
        fn the_parts_are_the_window(every in 1_u32..20, at in 0_usize..200, window in 1_usize..60) {
            let mut parts = cover(every, at, window);
            parts.reverse();
            let wanted: Vec<usize> = parts.iter().flat_map(|(.., wanted)| wanted.clone()).collect();
            prop_assert_eq!(wanted, (at.saturating_sub(window)..at).collect::<Vec<_>>());
            for (checkpoint, kept, _) in &parts {
                prop_assert!(*kept > 0 && kept <= checkpoint);
                prop_assert!(*checkpoint == at || CheckpointGrid::new(every).has(*checkpoint));
            }
        }

        /// A long chain costs what the planner says.
        #[test]
        fn a_grid_keeps_as_much_as_is_planned_for(every in 1_u32..20, ways in 1_usize..20, window in 1_usize..60) {
            let (grid, end) = (CheckpointGrid::new(every), every as usize * ways);
            let blocks: usize = grid.within(0..end, window, true).map(|at| grid.kept_at(at, window)).sum();
            prop_assert_eq!(blocks as u64, ways as u64 * kept(window as u64, u64::from(every)));
        }
    }
}
