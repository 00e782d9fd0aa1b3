//! Pieces at equal distances, as the rows of an array, which a copy engine takes with one call: engines' tensors are of
//! one size, and mostly lie one after the other.

use crate::copy::SlotId;
use crate::segments::Part;

/// Pieces of a block, in order: each as far behind the one before on the GPU, and as far in the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
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

/// All pieces of a block as rows; none: on average they are too few for a call each.
/// `allocation` says in which allocation an address is: the driver refuses rows of several.
pub(super) fn rows(parts: &[Part], allocation: impl Fn(usize) -> u64) -> Vec<Rows> {
    let homes: Vec<_> = parts.iter().map(|part| allocation(part.base)).collect();
    let mut offsets = Vec::with_capacity(parts.len());
    let mut block_bytes = 0;
    for part in parts {
        offsets.push(block_bytes);
        block_bytes += part.bytes;
    }
    let mut taken = vec![false; parts.len()];
    let mut all = Vec::new();
    for first in 0..parts.len() {
        if taken[first] {
            continue;
        }
        let is_free = |at: usize| !taken[at] && homes[at] == homes[first];
        let from_here = |period| (follow(parts, is_free, first, period), period);
        // Of two that are as long the one that leaves no gaps.
        let (count, period) =
            (1..=PERIODS).rev().map(from_here).max_by_key(|&(count, _)| count).unwrap_or((1, 1));
        (0..count).for_each(|row| taken[first + row * period] = true);
        let Part { base, stride, bytes } = parts[first];
        let next = first + period;
        let (pitch, step) = if count == 1 {
            (bytes, bytes)
        } else {
            (parts[next].base - base, offsets[next] - offsets[first])
        };
        all.push(Rows { base, stride, offset: offsets[first], bytes, count, pitch, step });
    }
    // Where none has a second piece, a call for all of them is better.
    let is_worth_it = all.len() < parts.len() && block_bytes / all.len() >= WORTH;
    if is_worth_it { all } else { Vec::new() }
}

/// How many parts, of every `period`-th from `first` on, lie at equal distances, and are free.
fn follow(parts: &[Part], is_free: impl Fn(usize) -> bool, first: usize, period: usize) -> usize {
    let start = parts[first];
    let Some(pitch) = parts.get(first + period).and_then(|next| next.base.checked_sub(start.base)) else {
        return 1;
    };
    if pitch < start.bytes || pitch > MAX_PITCH {
        return 1;
    }
    let is_next = |&(row, at): &(usize, usize)| {
        let part = parts[at];
        let is_alike = part.bytes == start.bytes && part.stride == start.stride;
        is_free(at) && is_alike && part.base.checked_sub(start.base) == pitch.checked_mul(row)
    };
    (first..parts.len()).step_by(period).enumerate().take_while(is_next).count().max(1)
}

impl Rows {
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

    fn rows_of(parts: &[Part]) -> Vec<Rows> {
        rows(parts, |_| 0)
    }

    #[test]
    fn rows_end_with_the_allocation() {
        let parts = tensors((0..8).map(|layer| layer * 4 * PIECE));
        let counts: Vec<_> =
            rows(&parts, |address| u64::from(address >= 12 * PIECE)).iter().map(|r| r.count).collect();
        assert_eq!(counts, [3, 5]);
    }

    #[test]
    fn tensors_one_after_the_other_are_one_array() {
        let found = rows_of(&tensors((0..8).map(|layer| 1000 + layer * 3 * PIECE)));
        let (pitch, step) = (3 * PIECE, PIECE);
        let one = Rows { base: 1000, stride: PIECE, offset: 0, bytes: PIECE, count: 8, pitch, step };
        assert_eq!(found, [one]);
        assert_eq!(one.address(SlotId(2)), 1000 + 2 * PIECE);
    }

    #[test]
    fn keys_and_values_of_tensors_with_room_between_are_two() {
        let found =
            rows_of(&tensors((0..8).flat_map(|layer| [layer * 11 * PIECE, layer * 11 * PIECE + 5 * PIECE])));
        let shapes: Vec<_> = found.iter().map(|r| (r.base, r.offset, r.count, r.pitch, r.step)).collect();
        assert_eq!(shapes, [(0, 0, 8, 11 * PIECE, 2 * PIECE), (5 * PIECE, PIECE, 8, 11 * PIECE, 2 * PIECE)]);
    }

    #[test]
    fn what_is_not_worth_a_call_is_none() {
        assert!(rows_of(&tensors([0, 5 * PIECE, 7 * PIECE, 16 * PIECE, 18 * PIECE])).is_empty());
        assert!(rows_of(&tensors((0..4).rev().map(|layer| layer * 9 * PIECE))).is_empty());
        assert!(rows_of(&tensors((0..4).map(|layer| layer * (MAX_PITCH + 1)))).is_empty());
    }

    proptest! {
        #[test]
        fn rows_are_all_pieces_once(gaps in proptest::collection::vec(1_usize..4, 1..12)) {
            let bases: Vec<_> = gaps.iter().scan(0, |end, gap| { *end += gap * 4 * PIECE; Some(*end) }).collect();
            // Pieces that are worth a call by themselves, so that there are rows unless no two gaps are alike.
            let parts: Vec<_> = bases.iter().map(|&base| Part { base, stride: 4 * PIECE, bytes: 2 * PIECE }).collect();
            let mut found: Vec<_> = rows_of(&parts)
                .iter()
                .flat_map(|r| (0..r.count).map(move |i| (r.offset + i * r.step, r.base + i * r.pitch, r.bytes)))
                .collect();
            found.sort_unstable();
            prop_assume!(!found.is_empty());
            let wanted: Vec<_> = bases.iter().enumerate().map(|(i, &base)| (i * 2 * PIECE, base, 2 * PIECE)).collect();
            prop_assert_eq!(found, wanted);
        }
    }
}
