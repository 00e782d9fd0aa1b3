//! How saves from and loads into an engine's own memory ended.

use std::sync::{Arc, Weak};
use std::time::Duration;

use kvbm_tiers::clock;

use crate::api::groups::CheckpointsSaved;
use crate::api::lease::Lease;
use crate::table::TransferEnd;

/// How a [`Manager::save_from`](crate::Manager::save_from) ended. All counts are in blocks.
#[derive(Debug)]
pub struct Saved {
    /// Holds as much of the chain as the tiers have now.
    pub lease: Lease,
    /// Leading blocks of the chain that the uppermost tier has now.
    pub blocks: usize,
    /// Copied by this save.
    pub copied: usize,
    /// Already there without this save: each block is copied once.
    pub duplicates: usize,
    /// Not kept, because those before them are missing: save these as well.
    pub orphans: usize,
    /// Not worth their room.
    pub declined: usize,
    /// Found no room or no queue space, or the medium is left alone for now.
    pub refused: usize,
    /// Failed, and those behind them.
    pub failed: usize,
    /// For each named cache group other than full attention; the counts above are of full
    /// attention.
    pub checkpoints: Vec<CheckpointsSaved>,
}

impl Saved {
    pub(crate) fn new(ended: &TransferEnd, orphans: usize, lease: Lease) -> Self {
        Self {
            blocks: lease.blocks(ended.to),
            copied: ended.copied,
            duplicates: ended.duplicates,
            orphans,
            declined: ended.declined,
            refused: ended.refused,
            failed: ended.blocks - ended.copied,
            checkpoints: Vec::new(),
            lease,
        }
    }
}

/// How a [`Manager::load_into`](crate::Manager::load_into) ended. Counts are in blocks.
#[derive(Debug)]
pub struct Loaded {
    /// Holds the chain as before, except blocks that turned out bad.
    pub lease: Lease,
    /// Leading wanted blocks of full attention that are in the engine's slots now.
    pub arrived: usize,
    /// The wanted blocks behind them: their slots hold no usable bytes.
    pub failed: usize,
    /// Everything that was asked for is in the engine's slots, of all cache groups. Else no window
    /// and no state in them may be used: something before their position is missing.
    pub is_whole: bool,
    /// Leading blocks that may be asked for next: all, if everything came. Else lease this many
    /// blocks of the chain, or fewer, and load what that lease wants; blocks of full attention
    /// before these have arrived.
    pub usable: usize,
    /// The media that may still write the slots of failed blocks.
    pub writers: Writers,
}

impl Loaded {
    /// Of the `wanted` blocks from position `first` on, `arrived` came.
    pub(crate) const fn new(
        (first, wanted): (usize, usize),
        arrived: usize,
        lease: Lease,
        writers: Writers,
    ) -> Self {
        let (failed, usable) = (wanted - arrived, first + arrived);
        Self { lease, arrived, failed, is_whole: failed == 0, usable, writers }
    }
}

/// Copies into an engine's slots that were given up, but that a medium may still work on: until
/// they are gone, the engine must not use the slots of failed blocks.
#[derive(Clone, Debug)]
pub struct Writers(Weak<()>);

impl Writers {
    pub(crate) fn new(with_media: &Arc<()>) -> Self {
        Self(Arc::downgrade(with_media))
    }

    /// Whether no medium uses any of the slots any more.
    pub fn are_gone(&self) -> bool {
        self.0.strong_count() == 0
    }

    /// Waits for that, at most for `limit`. False: a medium still uses one.
    pub fn wait(&self, limit: Duration) -> bool {
        const LOOK: Duration = Duration::from_micros(200);
        // None: the deadline overflows.
        let deadline = clock::now().checked_add(limit);
        // A hanging medium is rare, and nothing tells when it goes on.
        while !self.are_gone() && deadline.is_none_or(|deadline| clock::now() < deadline) {
            std::thread::sleep(LOOK);
        }
        self.are_gone()
    }
}
