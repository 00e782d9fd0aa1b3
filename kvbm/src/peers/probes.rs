//! Which prefixes of a chain a reader asks for.
//!
//! A chain may have thousands of blocks, and a request has room for twelve hashes. So the first
//! request asks for the shortest and the longest prefix and some between: that one answer says all
//! where the whole chain or nothing of it is held. Else a second request asks between the two
//! prefixes of which one is held and one is not. Of chains of up to 132 blocks the answer is exact;
//! of longer ones it may miss one block in a hundred at the end.

use super::protocol::MAX_PROBES;

/// What to ask for first where `held` blocks are here and `wanted` could be there.
pub(super) fn first(held: usize, wanted: usize) -> Vec<usize> {
    spread(held, wanted, MAX_PROBES)
}

/// What to ask for then, if `found` blocks are there, and `most` could be. The found ones are asked
/// for again, in case no more are there.
pub(super) fn second(found: usize, most: usize) -> Vec<usize> {
    [vec![found], spread(found, most, MAX_PROBES - 1)].concat()
}

/// At most `probes` lengths from `held + 1` to `wanted`, both among them.
fn spread(held: usize, wanted: usize, probes: usize) -> Vec<usize> {
    let (left, parts) = (wanted.saturating_sub(held), probes - 1);
    let between = (1..=parts).map(|n| held + (left * n).div_ceil(parts));
    let mut lengths: Vec<_> = std::iter::once(held + 1).chain(between).collect();
    lengths.dedup();
    lengths.retain(|&length| length > held && length <= wanted);
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
            let asked = first(held, wanted);
            prop_assert!(asked.len() <= MAX_PROBES && asked.is_sorted());
            let mut got = found(held, &asked, there);
            if let Some(most) = gap_behind(got, &asked) {
                prop_assert!(there != held && there != wanted, "one answer says it");
                let asked = second(got, most);
                prop_assert!(asked.len() <= MAX_PROBES && asked.is_sorted());
                got = found(got, &asked, there);
            }
            prop_assert!(more > 132 || got == there, "{got} of {there}");
            prop_assert!(got <= there && there - got <= more / 100, "{got} of {there}");
        }
    }
}
