//! How saves from and loads into an engine's own memory ended.

use std::sync::{Arc, Weak};
use std::time::Duration;

use kvbm_tiers::clock;

use crate::lease::Lease;
use crate::table::TransferEnd;

/// How a [`Manager::save_from`](crate::Manager::save_from) ended. All counts are in blocks.
#[derive(Debug)]
pub struct Saved {
    /// Holds the chain, as far as the tiers have it now.
    pub lease: Lease,
    /// Leading blocks of the chain that the uppermost tier has now.
    pub blocks: usize,
    /// Copied by this save.
    pub copied: usize,
    /// There before, or on their way: each is copied once.
    pub duplicates: usize,
    /// Not kept, because those before them are not there: bring these as well.
    pub orphans: usize,
    /// Not worth the room that they would take.
    pub declined: usize,
    /// Found no room or no queue space, or the medium is left alone for now.
    pub refused: usize,
    /// Failed, with those behind them.
    pub failed: usize,
}

impl Saved {
    pub(crate) fn new(ended: &TransferEnd, (duplicates, orphans): (usize, usize), lease: Lease) -> Self {
        Self {
            blocks: lease.blocks(ended.to),
            copied: ended.copied,
            duplicates,
            orphans,
            declined: ended.declined,
            refused: ended.refused,
            failed: ended.blocks - ended.copied,
            lease,
        }
    }
}

/// How a [`Manager::load_into`](crate::Manager::load_into) ended. Counts are in blocks.
#[derive(Debug)]
pub struct Loaded {
    /// Holds the chain as before, but for blocks that turned out bad.
    pub lease: Lease,
    /// Leading wanted blocks that are in the engine's slots now.
    pub arrived: usize,
    /// The wanted blocks behind them: their slots hold no bytes that can be used.
    pub failed: usize,
    /// Who may still write the slots of those that failed.
    pub writers: Writers,
}

/// Copies into an engine's slots that nobody waits for any more, but that a medium may not have ended: until they are
/// gone, the engine must not use the slots of blocks that failed.
#[derive(Clone, Debug)]
pub struct Writers(Weak<()>);

impl Writers {
    pub(crate) fn new(with_media: &Arc<()>) -> Self {
        Self(Arc::downgrade(with_media))
    }

    /// Whether no medium has any of the slots any more.
    pub fn are_gone(&self) -> bool {
        self.0.strong_count() == 0
    }

    /// Waits for that, at most for `limit`. False: a medium still has one.
    pub fn wait(&self, limit: Duration) -> bool {
        const LOOK: Duration = Duration::from_micros(200);
        // None: beyond the end of time.
        let deadline = clock::now().checked_add(limit);
        // A medium that hangs is rare, and goes on when it will.
        while !self.are_gone() && deadline.is_none_or(|deadline| clock::now() < deadline) {
            std::thread::sleep(LOOK);
        }
        self.are_gone()
    }
}
