//! Which prefixes of a chain a reader asks for.
//!
//! A chain may have thousands of blocks, and a request has room for twelve hashes. So the first
//! request asks for the shortest and the longest prefix and some between: that one answer says all
//! where the whole chain or nothing of it is held. Else a second request asks between the two
//! prefixes of which one is held and one is not. Of chains of up to 132 blocks the answer is exact;
//! of longer ones it may miss one block in a hundred at the end.

use std::ops::RangeInclusive;

use super::protocol::MAX_PROBES;

/// The lengths to ask for where a prefix of at least `held` blocks is known to be there, and at
/// most `wanted` can be: ascending, with `held + 1` and `wanted` among them.
pub(super) fn lengths(held: usize, wanted: usize) -> Vec<usize> {
    let spread = RangeInclusive::new(1, MAX_PROBES - 1);
    let left = wanted.saturating_sub(held);
    let mut lengths = vec![held + 1; usize::from(left > 0)];
    lengths.extend(spread.map(|n| held + (left * n).div_ceil(MAX_PROBES - 1)));
    lengths.dedup();
    lengths.retain(|length| (held + 1..=wanted).contains(length));
    lengths
}

/// Whether more than the `found` of the `lengths` asked for may be there, and how much can be.
pub(super) fn gap_behind(found: usize, lengths: &[usize]) -> Option<usize> {
    let next = lengths.iter().copied().find(|&length| length > found)?;
    (next > found + 1).then_some(next - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The longest of these that a holder of `there` blocks has; `held` if none.
    fn found(held: usize, lengths: &[usize], there: usize) -> usize {
        lengths.iter().copied().rfind(|&length| length <= there).unwrap_or(held)
    }

    proptest! {
        #[test]
        fn two_requests_find_all_but_a_hundredth(held in 0..50_usize, more in 0..5_000_usize, there: usize) {
            let wanted = held + more;
            let there = held + there % (more + 1);
            let first = lengths(held, wanted);
            prop_assert!(first.len() <= MAX_PROBES && first.is_sorted());
            let mut got = found(held, &first, there);
            if let Some(most) = gap_behind(got, &first) {
                prop_assert!(there != held && there != wanted, "one answer says it");
                let second = lengths(got, most);
                prop_assert!(second.len() <= MAX_PROBES);
                got = found(got, &second, there);
            }
            prop_assert!(got <= there && there - got <= more / 100, "{got} of {there}");
        }
    }
}
