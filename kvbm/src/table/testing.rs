//! What tests of the table share.

use crate::names::hash::BlockHash;

/// `blocks` blocks that no other `of` has.
pub(super) fn chain(of: u32, blocks: u32) -> Vec<BlockHash> {
    let hash = |at: u32| u128::from(of) << 32 | u128::from(at + 1);
    (0..blocks)
        .map(|at| BlockHash::from_u128(hash(at).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C)))
        .collect()
}
