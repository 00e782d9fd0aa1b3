//! A cache group beside full attention, and the names of what its checkpoints keep.

use std::sync::{Arc, Weak};

use kvbm_tiers::Tier;

use crate::api::manager::Manager;
use crate::names::fingerprint::digest;
use crate::names::hash::{BlockHash, Chain};
use crate::scheduler::Core;
use crate::table::LeftBlock;

/// A cache group beside full attention.
pub(super) struct GroupTable {
    pub(super) number: u8,
    /// Blocks that it looks back over; 1 for a state.
    pub(super) window: usize,
    /// Holds its blocks.
    pub(super) manager: Manager,
}

impl GroupTable {
    /// The blocks that a checkpoint keeps, root first. The last one has the name of the block at
    /// the checkpoint's position, so that a look for it costs no digest; the others' names are
    /// their own, so that no two checkpoints share a block.
    pub(super) fn names(at: BlockHash, kept: usize) -> Vec<BlockHash> {
        (1..kept).rev().map(|back| name(at, back)).chain([at]).collect()
    }

    pub(super) const fn chain<'a>(&self, names: &'a [BlockHash]) -> Chain<'a> {
        Chain::of_group(self.number, names)
    }

    /// Whether any tier has the checkpoint at a block. (Tiers are prefix-closed.)
    pub(super) fn has(&self, at: &BlockHash) -> bool {
        self.manager.core().matches(self.chain(std::slice::from_ref(at))).longest() > 0
    }

    pub(super) fn follower(&self) -> GroupFollower {
        GroupFollower { number: self.number, core: Arc::downgrade(self.manager.core()) }
    }
}

/// The block `back` blocks before the last one of a checkpoint.
fn name(at: BlockHash, back: usize) -> BlockHash {
    let (at, back) = (at.get().to_le_bytes(), (back as u64).to_le_bytes());
    BlockHash::from_u128(digest(&[b"kvbm checkpoint 1".as_slice(), &at, &back].concat()))
}

/// Makes a group's checkpoints leave no later than the blocks that they hang on.
pub(super) struct GroupFollower {
    number: u8,
    // Weak: transfers that a medium keeps must not keep a closed manager alive.
    core: Weak<Core>,
}

impl GroupFollower {
    pub(super) fn blocks_left(&self, left: &[LeftBlock]) {
        let left: Vec<_> = left
            .iter()
            .map(|left| (left.hash, Some(left.tier).filter(|_| !left.is_gone)))
            .collect();
        self.let_go(&left);
    }

    /// With a tier named, drops from it what the tier below has: the block went down, and its
    /// checkpoint is found there. With none, drops it from all: the block is nowhere, so its
    /// checkpoint cannot be found.
    pub(super) fn let_go(&self, left: &[(BlockHash, Option<Tier>)]) {
        let Some(core) = self.core.upgrade() else { return };
        let chains = left.iter().flat_map(|(hash, from)| {
            let last = Chain::of_group(self.number, std::slice::from_ref(hash));
            let tiers =
                Tier::ALL.into_iter().filter(move |&tier| from.is_none_or(|from| from == tier));
            tiers.map(move |tier| (tier, last, from.is_none()))
        });
        core.let_go(chains);
    }
}
