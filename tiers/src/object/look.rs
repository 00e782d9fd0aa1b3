//! What others have stored since this worker began: finds it in the background, and has slots stand
//! for it.
//!
//! A look is a listing from a little before the newest segment that was seen, and the footers of
//! those that are new: a bounded number of each, so that a bucket into which a thousand workers
//! write is not asked without end. What is left is for the next look.

use std::sync::Arc;

use tokio::time::Instant;

use super::budget::Expense;
use super::discover::{KnownFooters, ReadFooter};
use super::epochs::{EpochStanding, OlderEpoch};
use super::error::StoreError;
use super::known::ForeignSpot;
use super::names::{Least, ListedSegment, SegmentId, SegmentName};
use super::segment::Provenance;
use super::share::BucketShare;
use super::shared::{StoreContext, now_ms};
use crate::copy::{BlockKey, SlotId};

/// Names that a look lists of a service: ten requests.
const MAX_NAMES: usize = 10_000;
/// Footers that a look fetches: a request each.
const MAX_FOOTERS: usize = 256;
/// Blocks that are offered at a time: some 50 us of the block table.
const OFFERED: usize = 64;
/// Blocks that are offered after a look.
const MAX_OFFERED: usize = 1 << 16;

/// A block that another worker has stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundBlock {
    /// Which block.
    pub block: BlockKey,
    /// Hash of the block before it in its chain; `None`: it is the first.
    pub parent: Option<u128>,
    /// Whose it is, if its footer says so.
    pub tenant: Option<u32>,
}

impl ForeignSpot {
    const fn found(self, block: BlockKey) -> FoundBlock {
        FoundBlock { block, parent: self.parent, tenant: self.tenant }
    }
}

/// What became of a block that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discovery {
    /// A slot stands for it now.
    Taken,
    /// The one before it is not there, or there is no slot for it: it is offered again.
    Waits,
    /// It is there already, or cannot be.
    Declined,
}

/// Who knows which slots are free, and makes blocks resident in them.
pub trait TakeIn: Send + Sync {
    /// Makes blocks of `provenance` resident. Before that `stand_for(i, slot)` is called for each
    /// that is, whereupon `slot` holds the `i`-th of them. Must not call the backend otherwise.
    fn take_in(
        &self,
        provenance: Provenance,
        found: &[FoundBlock],
        stand_for: &mut dyn FnMut(usize, SlotId),
    ) -> Vec<Discovery>;

    /// The bucket is in a later epoch, which was not known at the start, and the worker is to go on
    /// there: from here on blocks have the names of that epoch. Returns whether they do. Must not
    /// call the backend.
    fn follow(&self, epoch: u64) -> bool;
}

/// Looks again and again, as long as `into` can take blocks in.
pub(super) fn keep_looking(shared: &Arc<StoreContext>, into: Arc<dyn TakeIn>) {
    let (own, mut ticket) = (Arc::clone(shared), shared.work.ticket());
    shared.store.executor.spawn(async move {
        let Some(share) = &own.share else { return };
        while !ticket.sleep(share.sharing.look).await {
            let look = async {
                own.follow_late(share, &*into);
                own.look(share).await?;
                // A worker that deletes asks who relies on what.
                if own.offer(share, &*into) { own.renew(share).await } else { Ok(()) }
            };
            match ticket.unless_hurried(look).await {
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    tracing::debug!(store = %own.store, %error, "what others have stored is looked for later");
                }
                None => return,
            }
        }
    });
}

/// Segments that were not looked at, oldest first.
struct NewSegments {
    listed: Vec<ListedSegment>,
    /// Where the listing ended, if there are more.
    last: Option<SegmentName>,
}

impl StoreContext {
    /// A start that could not read the bucket's epochs may turn out to have been in an older one.
    fn follow_late(&self, share: &BucketShare, into: &dyn TakeIn) {
        let EpochStanding::Behind(epoch) = *share.standing.lock() else { return };
        if share.sharing.older_epoch == OlderEpoch::Follow && into.follow(epoch) {
            tracing::info!(store = %self.store, epoch, "goes on in the bucket's epoch: all blocks of the former one are forgotten");
            self.follow_epoch(share, epoch);
        }
    }

    /// Takes note of what others have stored since.
    async fn look(&self, share: &BucketShare) -> Result<(), StoreError> {
        let Some(provenance) = self.present() else { return Ok(()) };
        self.afford(&Expense::ALL).map_err(|error| StoreError::new(&error.to_string()))?;
        let deadline = Instant::now() + self.limit;
        if !share.known.lock().is_surveyed {
            let mut footers = self.survey(share, provenance, deadline).await;
            footers.read.retain(|read| !self.names.gave(read.id.name));
            // Parents were stored before their children.
            self.learn(share, provenance, footers.read.iter().rev());
            return Ok(());
        }
        let NewSegments { mut listed, last } = self.list_new(share, provenance.epoch).await?;
        let is_all = listed.len() <= MAX_FOOTERS;
        listed.truncate(MAX_FOOTERS);
        let until = if is_all { last } else { listed.last().map(|segment| segment.name) };
        let now_ms = now_ms();
        let newest_ms = listed.iter().map(|segment| segment.written_ms(now_ms)).max();
        let mut footers = KnownFooters::default();
        self.read_footers(&mut footers, provenance.epoch, listed, deadline).await;
        footers.read.retain(|read| read.footer.provenance == provenance);
        if self.learn(share, provenance, &footers.read) {
            let mut known = share.known.lock();
            // What could not be fetched is listed again.
            known.looked_until(until, &footers.away);
            known.see(footers.looked_at, newest_ms);
        }
        Ok(())
    }

    /// Unless another epoch has begun since.
    fn learn<'a>(
        &self,
        share: &BucketShare,
        read_in: Provenance,
        read: impl IntoIterator<Item = &'a ReadFooter>,
    ) -> bool {
        let mut known = share.known.lock();
        let is_present = self.provenance() == read_in;
        if is_present {
            known.learn(read);
        }
        is_present
    }

    async fn list_new(&self, share: &BucketShare, epoch: u64) -> Result<NewSegments, StoreError> {
        let after = share.known.lock().look_from().map(|name| self.path(SegmentId { epoch, name }));
        let mut listing =
            self.store.listing(&self.epoch_directory(epoch), after.as_ref(), self.limit);
        let (mut new, mut last, mut names) = (Least::new(MAX_NAMES), None, 0);
        while let Some(meta) = listing.next().await? {
            names += 1;
            if let Some(segment) = ListedSegment::new(meta) {
                last = last.max(Some(segment.name));
                if !self.names.gave(segment.name) && !share.known.lock().has_seen(segment.name) {
                    new.push(segment);
                }
            }
            // Only where names are in order is a part of them the oldest.
            if names == MAX_NAMES && self.store.lists_in_order() {
                return Ok(NewSegments { listed: new.into_sorted(), last });
            }
        }
        let has_more = new.has_dropped();
        let listed = new.into_sorted();
        let last = listed.last().filter(|_| has_more).map(|segment| segment.name);
        Ok(NewSegments { listed, last })
    }

    /// Has what is known taken in, as far as it can be. Returns whether anything was.
    fn offer(self: &Arc<Self>, share: &BucketShare, into: &dyn TakeIn) -> bool {
        let mut has_taken = false;
        let mut left = share.known.lock().waiting().min(MAX_OFFERED);
        while left > 0 {
            let offered = share.known.lock().next_waiting(left.min(OFFERED));
            left = left.saturating_sub(OFFERED);
            let found: Vec<_> = offered.iter().map(|&(block, spot)| spot.found(block)).collect();
            let mut stand_for = |at: usize, slot| {
                let (block, spot) = offered[at];
                // Nothing needs what lay there before.
                self.forget_slots([slot]);
                self.stand_for(slot, spot);
                share.known.lock().take(block);
            };
            let Some(provenance) = self.present() else { return has_taken };
            let intakes = into.take_in(provenance, &found, &mut stand_for);
            let mut known = share.known.lock();
            for (&(block, _), intake) in offered.iter().zip(intakes) {
                match intake {
                    Discovery::Taken => has_taken = true,
                    Discovery::Waits => known.wait(block),
                    Discovery::Declined => _ = known.take(block),
                }
            }
        }
        has_taken
    }
}
