//! What the backend's tasks share: the store, where each slot's block lies in it, whose turn it is.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use object_store::ObjectStoreExt;
use object_store::path::Path;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use super::budget::Expense;
use super::error::StoreError;
use super::executor::WorkInProgress;
use super::known::ForeignSpot;
use super::locations::BlockLocations;
use super::names::{SegmentId, SegmentName, SegmentNames, epoch_name};
use super::open::Store;
use super::segment::{FooterKey, FooterKeys, Provenance, footer_bytes};
use super::share::BucketShare;
use super::traffic::Traffic;
use crate::checksum::Checksums;
use crate::clock;
use crate::copy::{CopyError, CopyErrorKind, SlotId};

/// Segments that are emptied within this time are deleted together: whether others rely on them is
/// asked once.
const ASKING_PAUSE: Duration = Duration::from_secs(1);

/// By this machine's clock, in milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    u64::try_from(clock::since_1970().as_millis()).unwrap_or(u64::MAX)
}

/// What the tasks need.
pub(super) struct StoreContext {
    pub(super) store: Store,
    pub(super) block_bytes: usize,
    /// Of the blocks that are being written.
    pub(super) checksums: Option<Arc<Checksums>>,
    pub(super) names: SegmentNames,
    /// What authenticates footers, where blocks are encrypted.
    pub(super) keys: Option<FooterKeys>,
    pub(super) locations: Mutex<BlockLocations>,
    pub(super) blocks_per_segment: usize,
    /// Of an operation.
    pub(super) limit: Duration,
    /// One for each compaction at a time.
    pub(super) compactions: Semaphore,
    pub(super) moved_blocks: AtomicU64,
    /// One for each request in flight. Closed at the end.
    pub(super) requests: Arc<Semaphore>,
    /// One for each deletion in flight.
    pub(super) deletions: Semaphore,
    pub(super) work: WorkInProgress,
    /// `<root>/<namespace>/blocks`: a directory for each epoch.
    pub(super) directory: Path,
    /// `<root>/<namespace>/segments`, where versions that did not tell epochs apart put theirs.
    pub(super) former_directory: Path,
    pub(super) undeleted: AtomicU64,
    /// Whose blocks are written.
    pub(super) provenance: Mutex<Provenance>,
    /// `None`: no one else reads what is written here.
    pub(super) share: Option<BucketShare>,
    /// Segments that no worker relied on in the last collection.
    pub(super) suspects: Mutex<HashSet<SegmentName>>,
    pub(super) collected: AtomicU64,
    pub(super) linked_blocks: AtomicU64,
    pub(super) traffic: Arc<Traffic>,
}

/// Keeps a segment in the store while it is read.
pub(super) struct SegmentPin {
    shared: Arc<StoreContext>,
    /// The segment's.
    number: u32,
}

impl StoreContext {
    pub(super) fn epoch_directory(&self, epoch: u64) -> Path {
        self.directory.clone().join(epoch_name(epoch))
    }

    pub(super) fn path(&self, SegmentId { epoch, name }: SegmentId) -> Path {
        self.epoch_directory(epoch).join(name.to_string())
    }

    pub(super) fn footer_key(&self, segment: SegmentName) -> Option<FooterKey<'_>> {
        self.keys.as_ref().map(|keys| keys.of(segment.0))
    }

    /// Of a segment with `blocks` blocks.
    pub(super) fn footer_bytes(&self, blocks: usize) -> u64 {
        footer_bytes(blocks, self.keys.is_some()) as u64
    }

    pub(super) fn provenance(&self) -> Provenance {
        *self.provenance.lock()
    }

    /// A request's turn. A request that does not get it in time ends without one.
    pub(super) async fn request(
        &self,
        deadline: Instant,
    ) -> Result<OwnedSemaphorePermit, CopyError> {
        match timeout_at(deadline, Arc::clone(&self.requests).acquire_owned()).await {
            Ok(Ok(request)) if Instant::now() < deadline => Ok(request),
            Ok(Err(_closed)) => Err(CopyError::refused("the object tier is shutting down")),
            _ => Err(self.too_late(&format!("no request to {} was free", self.store))),
        }
    }

    /// Whether blocks may cost this much now.
    pub(super) fn afford(&self, expenses: &[Expense]) -> Result<(), CopyError> {
        self.traffic.purse.affords(expenses).map_err(|lacking| {
            let message = format!("the budget of {} for {} is spent", self.store, lacking.name());
            CopyError::new(CopyErrorKind::OverBudget, message)
        })
    }

    pub(super) fn too_late(&self, context: &str) -> CopyError {
        let message = format!("{context}: it took more than {:?}", self.limit);
        CopyError::new(CopyErrorKind::Unavailable, message)
    }

    /// From here on the slots' old content is gone.
    pub(super) fn forget_slots(self: &Arc<Self>, slots: impl IntoIterator<Item = SlotId>) {
        let mut locations = self.locations.lock();
        let dead: Vec<_> = slots.into_iter().filter_map(|slot| locations.vacate(slot)).collect();
        drop(locations);
        dead.into_iter().for_each(|id| self.discard(id, Duration::ZERO));
    }

    /// From here on another worker's block is the content of a slot, which is vacant.
    pub(super) fn stand_for(&self, slot: SlotId, block: ForeignSpot) {
        // The same tokens computed elsewhere may differ in their lowest bits: what is read is to
        // match what is there.
        self.checksums.iter().for_each(|checksums| checksums.record(slot, block.crc32c));
        self.locations.lock().link(slot, block.segment, block.position, block.blocks);
        self.linked_blocks.fetch_add(1, Ordering::Relaxed);
    }

    /// Deletes a segment that nothing here needs, as soon as `delay` is over and the store lets us.
    /// One that another worker relies on is left to it.
    pub(super) fn discard(self: &Arc<Self>, id: SegmentId, delay: Duration) {
        self.undeleted.fetch_add(1, Ordering::Relaxed);
        let mut since = Instant::now();
        let pause = if self.share.is_some() { ASKING_PAUSE } else { Duration::ZERO };
        let (shared, mut ticket, mut delay) =
            (Arc::clone(self), self.work.ticket(), delay.max(pause));
        let mut pause = self.limit / 10;
        self.store.executor.spawn(async move {
            loop {
                let is_last_try = ticket.sleep(delay).await;
                match shared.delete_unless_relied_on(id, since).await {
                    Ok(()) => break,
                    Err(error) if is_last_try => {
                        let path = shared.path(id);
                        return tracing::warn!(%path, %error, "a dead segment is left in the object store");
                    }
                    Err(error) => tracing::debug!(%error, "a dead segment will be deleted later"),
                }
                // Another worker may have come to rely on it meanwhile.
                since = Instant::now();
                delay = pause;
                pause = (pause * 2).min(shared.limit * 3);
            }
            shared.undeleted.fetch_sub(1, Ordering::Relaxed);
        });
    }

    async fn delete_unless_relied_on(
        &self,
        id: SegmentId,
        since: Instant,
    ) -> Result<(), StoreError> {
        let is_relied_on = match &self.share {
            Some(share) => self.is_relied_on(share, id.name, since).await?,
            None => false,
        };
        if is_relied_on { Ok(()) } else { self.remove(&self.path(id)).await }
    }

    /// That it is gone already is no failure.
    pub(super) async fn remove(&self, path: &Path) -> Result<(), StoreError> {
        let _turn = self.deletions.acquire().await;
        match timeout(self.limit, self.store.client.delete(path)).await {
            Ok(Ok(()) | Err(object_store::Error::NotFound { .. })) => Ok(()),
            Ok(Err(error)) => Err(self.store.secrets.scrub(&error)),
            Err(elapsed) => Err(StoreError::from(elapsed)),
        }
    }

    /// Waits for what is under way, then deletes what is not kept.
    pub(super) async fn close(self: &Arc<Self>, keep: bool) {
        self.work.ended().await;
        if !keep {
            let own: Vec<_> = self.locations.lock().own_segments().collect();
            own.into_iter().for_each(|id| self.discard(id, Duration::ZERO));
            self.work.ended().await;
        }
        if let Some(share) = &self.share {
            self.give_up_lease(share).await;
        }
        match &self.share {
            // What is kept is this worker's for a while, so that it may come back.
            Some(share) if keep => _ = self.renew(share).await,
            Some(share) => self.resign(share).await,
            None => {}
        }
        self.store.remove_directory();
    }
}

impl SegmentPin {
    /// Of a segment that its caller has marked as being read.
    pub(super) fn new(shared: &Arc<StoreContext>, number: u32) -> Self {
        Self { shared: Arc::clone(shared), number }
    }
}

impl Drop for SegmentPin {
    fn drop(&mut self) {
        let unneeded = self.shared.locations.lock().release(self.number);
        unneeded.into_iter().for_each(|id| self.shared.discard(id, Duration::ZERO));
    }
}
