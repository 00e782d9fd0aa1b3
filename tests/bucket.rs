//! Chains that workers leave each other in a bucket.

use std::ops::Range;

use kvbm::{Manager, Tier};

use crate::engine;
use crate::rig::chain;

/// How many chains there are.
pub const CHAINS: u32 = 20;
/// Blocks of each.
pub const BLOCKS: u32 = 12;
/// Blocks of all.
pub const ALL: usize = (CHAINS * BLOCKS) as usize;

/// Computes chains, until they are in the bucket.
///
/// # Panics
/// If they do not get there.
pub fn fill(manager: &Manager, chains: Range<u32>) {
    for n in chains {
        engine::serve(manager, &chain(n, BLOCKS));
        engine::drain(manager);
    }
}

/// Blocks of all chains that the bucket is known to hold.
pub fn known(manager: &Manager) -> usize {
    (0..CHAINS).map(|n| manager.matches(&chain(n, BLOCKS)).blocks(Tier::Object)).sum()
}

/// Serves all chains. Returns how many blocks came from somewhere.
///
/// # Panics
/// If a byte is wrong.
#[track_caller]
pub fn serve(manager: &Manager) -> usize {
    let served = (0..CHAINS).map(|n| engine::serve(manager, &chain(n, BLOCKS)));
    served
        .inspect(|served| assert_eq!(served.wrong, 0, "{served:?}"))
        .map(|served| served.hit)
        .sum()
}
