//! Closing a namespace and forgetting a tenant: no block of theirs is found again, and what is
//! under way is discarded.

use std::ops::Range;
use std::sync::Arc;

use kvbm_tiers::{Loan, Tier};

use super::Core;
use crate::api::lease::Lease;
use crate::error::Result;
use crate::names::epoch::NewEpoch;
use crate::names::hash::Chain;
use crate::table::{Effects, NamespaceId, Table, TransferCursor, Unflushed};

/// Steps in one round: some 10 ms. A disk of a hundred million slots must not hold up flushes and
/// time-outs.
const SWEEPS: usize = 64;

impl Core {
    /// Begins another epoch. May be called from anywhere, completions of backends included.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) unless the number is greater than the
    /// present one.
    pub fn reset<'a>(self: &Arc<Self>, epoch: impl Into<NewEpoch<'a>>) -> Result<()> {
        let effects = self.table().reset(epoch)?;
        self.forgotten(effects);
        Ok(())
    }

    /// Forgets all blocks within the epoch, which stays: some were lost, say, and which is unknown.
    /// Else like [`reset`](Self::reset).
    pub fn forget_all(self: &Arc<Self>) {
        let effects = self.table().forget_all();
        self.forgotten(effects);
    }

    /// Withdraws a tier that gives wrong blocks: until the next [`reset`](Self::reset) nothing is
    /// read from it or written to it. Copies under way from it or to it are discarded.
    pub fn withdraw(self: &Arc<Self>, tier: Tier) {
        let effects = self.table().withdraw(tier);
        self.apply(effects);
        let mut from = Some(0);
        while let Some(place) = from {
            from = self.hold(|table, _| table.end_withdrawn(place));
        }
    }

    /// The present namespace.
    pub(crate) fn namespace(&self) -> NamespaceId {
        self.table().namespace()
    }

    /// The namespace has been closed: ends its transfers.
    fn forgotten(self: &Arc<Self>, effects: Effects) {
        let unflushed: usize = effects.unflushed.iter().map(Unflushed::blocks).sum();
        tracing::info!(unflushed, "a reset: all blocks are forgotten");
        self.apply(effects);
        self.end_transfers();
        self.waker.wake();
    }

    /// Frees slots of forgotten blocks, as many as one round of background work has time for.
    pub(super) fn sweep_some(self: &Arc<Self>) {
        // Every step was full, so there is more, and it need not wait for the next regular round.
        if (0..SWEEPS).all(|_| self.hold(Table::sweep)) {
            self.waker.wake();
        }
    }

    /// Lends successive blocks of a chain in `tier`, up to the first that it lacks; none if the
    /// lease is not of the present namespace.
    pub(crate) fn lend(
        &self,
        tier: Tier,
        lease: &Lease,
        chain: Chain<'_>,
        positions: Range<usize>,
    ) -> Vec<Loan> {
        let mut table = self.table();
        // Checked and lent in one hold of the lock: no reset comes in between.
        if !lease.is_of(&self.table) || !table.is_present(lease.pins()) {
            return Vec::new();
        }
        let chain = table.enter(chain);
        positions.map_while(|position| table.lend(tier, chain.key(position))).collect()
    }

    /// Forgets what a tenant stored, and returns how often it was forgotten so far. Takes time in
    /// proportion to the table, in steps between which others use it. Current readers of its blocks
    /// may finish.
    pub fn forget(self: &Arc<Self>, tenant: u32) -> u32 {
        // From here on no copy of its blocks is planned: once those under way have ended, no more
        // come.
        let life = self.table().begin_forgetting(tenant);
        let mut under_way = Some(TransferCursor::default());
        while let Some(from) = under_way {
            under_way = self.hold(|table, hold| table.end_forgotten(from, hold));
        }
        let mut next = Some(0);
        while let Some(record) = next {
            next = self.hold(|table, hold| table.drop_forgotten(record, hold));
            // At once: a match looks at each chain that is still being dropped.
            while self.hold(|table, _| table.drop_more()) {}
        }
        life
    }
}
