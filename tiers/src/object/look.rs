//! What others have stored since this worker began: it is found in the background, and slots stand for it.
//!
//! A look is a listing from a little before the newest segment that was seen, and the footers of those that are new:
//! at most so many of each that a bucket into which a thousand workers write is not asked without end. What is left is
//! for the next look.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt};
use tokio::time::{Instant, timeout};

use super::budget::Expense;
use super::discover::{Footers, segment_name};
use super::error::StoreError;
use super::known::Spot;
use super::names::SegmentName;
use super::segment::Provenance;
use super::share::Share;
use super::shared::Shared;
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

impl Spot {
    const fn found(self, block: BlockKey) -> FoundBlock {
        FoundBlock { block, parent: self.parent, tenant: self.tenant }
    }
}

/// What became of a block that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intake {
    /// A slot stands for it now.
    Taken,
    /// The one before it is not there, or there is no slot for it: it is offered again.
    Waits,
    /// It is there already, or cannot be.
    Declined,
}

/// Who knows which slots are free, and makes blocks resident in them.
pub trait TakeIn: Send + Sync {
    /// Makes blocks of `provenance` resident. Before that `stand_for(i, slot)` is called for each that is, whereupon
    /// `slot` holds the `i`-th of them. Must not call the backend otherwise.
    fn take_in(
        &self,
        provenance: Provenance,
        found: &[FoundBlock],
        stand_for: &mut dyn FnMut(usize, SlotId),
    ) -> Vec<Intake>;
}

/// Looks again and again, for as long as `into` can take in.
pub(super) fn keep_looking(shared: &Arc<Shared>, into: Arc<dyn TakeIn>) {
    let (own, mut ticket) = (Arc::clone(shared), shared.work.ticket());
    shared.store.executor.spawn(async move {
        let Some(share) = &own.share else { return };
        while !ticket.sleep(share.sharing.look).await {
            let look = async {
                own.look(share).await?;
                // Who deletes asks who relies on what.
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

impl Shared {
    /// Takes note of what others have stored since.
    async fn look(&self, share: &Share) -> Result<(), StoreError> {
        self.afford(&Expense::ALL).map_err(|error| StoreError::new(&error.to_string()))?;
        let (mut new, last) = self.list_new(share).await?;
        let is_all = new.len() <= MAX_FOOTERS;
        new.truncate(MAX_FOOTERS);
        let names: Vec<_> = new.iter().filter_map(segment_name).collect();
        let until = if is_all { last } else { names.last().copied() };
        let Footers { mut read, away, .. } = self.read_footers(new, Instant::now() + self.limit).await;
        let provenance = self.provenance();
        read.retain(|read| read.footer.provenance == provenance);
        let mut known = share.known.lock();
        // What could not be had is listed again.
        known.looked_until(until, &away);
        known.see(names.into_iter().filter(|name| !away.contains(name)));
        known.learn(&read);
        Ok(())
    }

    /// Segments that were not looked at, oldest first, and the last one of all if there are more.
    async fn list_new(
        &self,
        share: &Share,
    ) -> Result<(Vec<object_store::ObjectMeta>, Option<SegmentName>), StoreError> {
        let from = share.known.lock().look_from();
        let listing = match from {
            Some(name) => self.store.client.list_with_offset(Some(&self.directory), &self.path(name)),
            None => self.store.client.list(Some(&self.directory)),
        };
        // Only a service lists in order.
        let most = if self.store.is_remote() { MAX_NAMES } else { usize::MAX };
        let listed = timeout(self.limit, listing.take(most).try_collect::<Vec<_>>()).await?;
        let mut listed = listed.map_err(|error| self.store.secrets.scrub(&error))?;
        let last = (listed.len() == most).then(|| listed.last().and_then(segment_name)).flatten();
        let known = share.known.lock();
        listed.retain(|meta| {
            segment_name(meta).is_some_and(|name| !self.names.gave(name) && !known.has_seen(name))
        });
        listed.sort_unstable_by(|a, b| a.location.cmp(&b.location));
        Ok((listed, last))
    }

    /// Has what is known taken in, as far as it can be. Returns whether anything was.
    fn offer(self: &Arc<Self>, share: &Share, into: &dyn TakeIn) -> bool {
        let mut has_taken = false;
        let mut left = share.known.lock().waiting().min(MAX_OFFERED);
        while left > 0 {
            let offered = share.known.lock().next_waiting(left.min(OFFERED));
            left = left.saturating_sub(OFFERED);
            let found: Vec<_> = offered.iter().map(|&(block, spot)| spot.found(block)).collect();
            let mut stand_for = |at: usize, slot| {
                let (block, spot) = offered[at];
                // What lay there before is nobody's any more.
                self.forget_slots([slot]);
                self.stand_for(slot, spot);
                share.known.lock().take(block);
            };
            let intakes = into.take_in(self.provenance(), &found, &mut stand_for);
            let mut known = share.known.lock();
            for (&(block, _), intake) in offered.iter().zip(intakes) {
                match intake {
                    Intake::Taken => has_taken = true,
                    Intake::Waits => known.wait(block),
                    Intake::Declined => _ = known.take(block),
                }
            }
        }
        has_taken
    }
}
