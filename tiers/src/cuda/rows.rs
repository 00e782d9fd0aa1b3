//! Pieces at equal distances, as the rows of an array, which a copy engine takes with one call:
//! engines' tensors are of one size, and mostly lie one after the other.

use crate::copy::SlotId;
use crate::geometry::{Part, SegmentMap};

/// Pieces of a block, in order: each as far behind the one before on the GPU, and as far in the
/// block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PitchedRows {
    /// The first piece on the GPU: its address in slot 0, and bytes from slot to slot.
    base: usize,
    stride: usize,
    /// Bytes of the block before it.
    pub(super) offset: usize,
    /// Bytes of a piece, and how many there are.
    pub(super) bytes: usize,
    pub(super) count: usize,
    /// Bytes from one to the next on the GPU.
    pub(super) pitch: usize,
    /// And in the block.
    pub(super) step: usize,
}

/// The largest pitch of copies on every GPU.
const MAX_PITCH: usize = i32::MAX as usize;
/// Every part may follow on the last one, or every second: keys and values are apart.
const PERIODS: usize = 2;
/// A call takes microseconds, in which a link to the host moves about this much.
const WORTH: usize = 128 << 10;

/// All pieces of a block as rows; none: on average they are too few for a call each. `allocation`
/// says in which allocation an address is: the driver refuses rows of several.
pub(super) fn rows(segments: &SegmentMap, allocation: impl Fn(usize) -> u64) -> Vec<PitchedRows> {
    let parts = segments.parts();
    let allocations = parts.iter().map(|part| allocation(part.base)).collect();
    let is_there = vec![true; parts.len()];
    let mut left = LeftParts { parts, offsets: segments.offsets(), allocations, is_there };
    let all: Vec<_> = (0..parts.len()).filter_map(|first| left.take(first)).collect();
    // Where none has a second piece, a call for all of them is better.
    let is_worth_it = all.len() < parts.len() && segments.block_bytes() / all.len() >= WORTH;
    if is_worth_it { all } else { Vec::new() }
}

/// Parts that belong to no rows yet.
struct LeftParts<'a> {
    parts: &'a [Part],
    /// Of each: where its piece begins in a block, its allocation, and whether it is still there.
    offsets: &'a [usize],
    allocations: Vec<u64>,
    is_there: Vec<bool>,
}

impl LeftParts<'_> {
    /// The most rows that begin with this part; `None`: it is in others.
    fn take(&mut self, first: usize) -> Option<PitchedRows> {
        let from_here = |period| (self.follow(first, period), period);
        // Of two that are as long the one that leaves no gaps.
        let longest = (1..=PERIODS).rev().map(from_here).max_by_key(|&(count, _)| count);
        let (count, period) = longest.filter(|_| self.is_there[first])?;
        (0..count).for_each(|row| self.is_there[first + row * period] = false);
        let Part { base, stride, bytes } = self.parts[first];
        let (mut pitch, mut step) = (bytes, bytes);
        if count > 1 {
            (pitch, step) = self.distance(first, first + period)?;
        }
        Some(PitchedRows { base, stride, offset: self.offsets[first], bytes, count, pitch, step })
    }

    /// How many parts, of every `period`-th from `first` on, are as far apart as the first two of
    /// them: on the GPU and in the block, or a row would be copied over its neighbours.
    fn follow(&self, first: usize, period: usize) -> usize {
        let Some((pitch, step)) = self.distance(first, first + period) else { return 1 };
        if pitch < self.parts[first].bytes || pitch > MAX_PITCH {
            return 1;
        }
        let is_next = |&(row, at): &(usize, usize)| {
            self.is_alike(first, at)
                && self.distance(first, at) == pitch.checked_mul(row).zip(step.checked_mul(row))
        };
        (first..self.parts.len()).step_by(period).enumerate().take_while(is_next).count().max(1)
    }

    /// Bytes between two parts, the second of which lies higher: on the GPU, and in the block.
    fn distance(&self, first: usize, other: usize) -> Option<(usize, usize)> {
        let pitch = self.parts.get(other)?.base.checked_sub(self.parts[first].base)?;
        Some((pitch, self.offsets[other] - self.offsets[first]))
    }

    fn is_alike(&self, first: usize, other: usize) -> bool {
        let (one, two) = (self.parts[first], self.parts[other]);
        self.is_there[other]
            && self.allocations[first] == self.allocations[other]
            && (one.bytes, one.stride) == (two.bytes, two.stride)
    }
}

impl PitchedRows {
    /// Where the first one of a slot lies on the GPU.
    pub(super) const fn address(&self, slot: SlotId) -> usize {
        self.base + slot.0 as usize * self.stride
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PIECE: usize = 64 << 10;

    fn tensors(bases: impl IntoIterator<Item = usize>) -> Vec<Part> {
        bases.into_iter().map(|base| Part { base, stride: PIECE, bytes: PIECE }).collect()
    }

    fn rows_of(parts: &[Part]) -> Vec<PitchedRows> {
        rows(&map(parts), |_| 0)
    }

    /// Of one slot, so that parts lie wherever a test wants them.
    fn map(parts: &[Part]) -> SegmentMap {
        SegmentMap::new(1, parts).unwrap()
    }

    #[test]
    fn rows_end_with_the_allocation() {
        let parts = tensors((0..8).map(|layer| layer * 4 * PIECE));
        let counts: Vec<_> = rows(&map(&parts), |address| u64::from(address >= 12 * PIECE))
            .iter()
            .map(|r| r.count)
            .collect();
        assert_eq!(counts, [3, 5]);
    }

    #[test]
    fn tensors_one_after_the_other_are_one_array() {
        let found = rows_of(&tensors((0..8).map(|layer| 1000 + layer * 3 * PIECE)));
        let (pitch, step) = (3 * PIECE, PIECE);
        let one = PitchedRows {
            base: 1000,
            stride: PIECE,
            offset: 0,
            bytes: PIECE,
            count: 8,
            pitch,
            step,
        };
        assert_eq!(found, [one]);
        assert_eq!(one.address(SlotId(2)), 1000 + 2 * PIECE);
    }

    #[test]
    fn keys_and_values_of_tensors_with_room_between_are_two() {
        let found = rows_of(&tensors(
            (0..8).flat_map(|layer| [layer * 11 * PIECE, layer * 11 * PIECE + 5 * PIECE]),
        ));
        let shapes: Vec<_> =
            found.iter().map(|r| (r.base, r.offset, r.count, r.pitch, r.step)).collect();
        assert_eq!(
            shapes,
            [(0, 0, 8, 11 * PIECE, 2 * PIECE), (5 * PIECE, PIECE, 8, 11 * PIECE, 2 * PIECE)]
        );
    }

    #[test]
    fn what_is_not_worth_a_call_is_none() {
        assert!(rows_of(&tensors([0, 5 * PIECE, 7 * PIECE, 16 * PIECE, 18 * PIECE])).is_empty());
        assert!(rows_of(&tensors((0..4).rev().map(|layer| layer * 9 * PIECE))).is_empty());
        assert!(rows_of(&tensors((0..4).map(|layer| layer * (MAX_PITCH + 1)))).is_empty());
    }

    #[test]
    fn what_lies_between_counts_in_the_block_too() {
        // Every second part is as far on the GPU, and not in the block.
        let sizes = [4, 2, 4, 1, 4, 1].map(|pieces| pieces * PIECE);
        let bases = [0, 100, 20, 200, 40, 300].map(|at| at * PIECE);
        let parts: Vec<_> = sizes
            .iter()
            .zip(bases)
            .map(|(&bytes, base)| Part { base, stride: bytes, bytes })
            .collect();
        check(&parts, &rows_of(&parts));
    }

    /// Each piece is copied once, from where it is to where it belongs.
    fn check(parts: &[Part], found: &[PitchedRows]) {
        let row = |r: &PitchedRows, i: usize| {
            (r.offset + i * r.step, r.base + i * r.pitch, r.bytes, r.stride)
        };
        let mut copied: Vec<_> =
            found.iter().flat_map(|r| (0..r.count).map(|i| row(r, i))).collect();
        copied.sort_unstable();
        let mut end = 0;
        let pieces = parts.iter().map(|part| {
            end += part.bytes;
            (end - part.bytes, part.base, part.bytes, part.stride)
        });
        assert_eq!(copied, pieces.collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn rows_are_all_pieces_once(shapes in proptest::collection::vec((1_usize..3, 1_usize..3), 2..16)) {
            let mut end = 0;
            let parts: Vec<_> = shapes.iter().map(|&(gap, pieces)| {
                let bytes = 2 * pieces * PIECE;
                end += gap * 16 * PIECE;
                Part { base: end, stride: bytes, bytes }
            }).collect();
            let found = rows(&map(&parts), |address| (address / (100 * PIECE)) as u64);
            // Pieces that are worth a call of their own: there are rows unless nothing lies alike.
            if !found.is_empty() {
                check(&parts, &found);
            }
        }
    }
}
