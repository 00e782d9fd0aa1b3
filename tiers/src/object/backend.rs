//! The backend between a memory region and the object tier.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use futures::StreamExt;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::block::Pending;
use super::executor::{Executor, Ticket, drained};
use super::locations::Locations;
use super::open::{OPERATION_LIMIT, Store};
use super::segment::{SegmentName, SegmentNames};
use super::{read, write};
use crate::checksum::Checksums;
use crate::copy::{Backend, CopyError, CopyErrorKind, CopyOp, Done, Route, SlotId, Tier};
use crate::error::{SetupError, SetupErrorKind};
use crate::geometry::MAX_SLOTS;
use crate::memory::{Memory, forget_checksum};

/// How long closing waits for requests that have begun: their own limit, and a little to report it.
const CLOSE_LIMIT: Duration = Duration::from_secs(OPERATION_LIMIT.as_secs() + 2);

/// How blocks are laid out in the store.
#[derive(Clone, Debug)]
pub struct ObjectOptions {
    /// Part of all objects' names, `/` allowed. Bytes are never shared between namespaces.
    pub namespace: String,
    /// Largest payload of a segment, in bytes; a segment has at least one block.
    pub segment_bytes: u64,
    /// Requests in flight, reads and writes together.
    pub concurrency: u32,
    /// Leave the segments in place at the end.
    pub keep: bool,
}

/// Counts since the backend was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectStats {
    /// Segments that hold the content of a slot.
    pub segments: u64,
    /// Segments that could not be deleted and may be left in the store.
    pub failed_deletions: u64,
}

/// Moves blocks between a memory region and an object store, both ways.
///
/// Dropping it refuses what has not begun, waits for what has (at most 22 s) and, unless told to keep them,
/// deletes the segments that it wrote.
pub struct ObjectBackend {
    shared: Arc<Shared>,
    memory: Arc<dyn Memory>,
    routes: [Route; 2],
    keep: bool,
    /// Every operation holds a clone. `None` only while dropping.
    ticket: Option<Sender<Ticket>>,
    last_ticket: Receiver<Ticket>,
}

/// What the tasks need.
pub(super) struct Shared {
    pub(super) store: Store,
    pub(super) block_bytes: usize,
    /// Of the blocks that are being written.
    pub(super) checksums: Option<Arc<Checksums>>,
    pub(super) names: SegmentNames,
    pub(super) locations: Mutex<Locations>,
    /// One for each request in flight. Closed at the end.
    pub(super) requests: Semaphore,
    concurrency: usize,
    /// `<root>/<namespace>/segments`.
    directory: Path,
    blocks_per_segment: usize,
    failed_deletions: AtomicU64,
}

impl ObjectBackend {
    /// Between `memory` and segments in `store`.
    ///
    /// `checksums`: those that a [`Verified`](crate::verify::Verified) around this backend records; `None`:
    /// they are computed here.
    ///
    /// # Errors
    /// `Invalid`: no request may be in flight.
    pub fn new(
        store: Store,
        memory: Arc<dyn Memory>,
        checksums: Option<Arc<Checksums>>,
        options: &ObjectOptions,
    ) -> Result<Self, SetupError> {
        let concurrency = options.concurrency as usize;
        if !(1..=Semaphore::MAX_PERMITS).contains(&concurrency) {
            let message = "object.concurrency (DYN_KVBM_OBJECT_CONCURRENCY) is 0: allow at least one request";
            return Err(SetupError::new(SetupErrorKind::Invalid, message));
        }
        let block_bytes = memory.block_bytes();
        let blocks_per_segment = (options.segment_bytes / block_bytes as u64).clamp(1, u64::from(u32::MAX));
        let namespace = Path::from(options.namespace.as_str());
        let directory = store.root.parts().chain(namespace.parts()).collect::<Path>().join("segments");
        let (ticket, last_ticket) = bounded(0);
        let shared = Shared {
            store,
            block_bytes,
            checksums,
            directory,
            names: SegmentNames::new(),
            locations: Mutex::default(),
            requests: Semaphore::new(concurrency),
            concurrency,
            blocks_per_segment: blocks_per_segment as usize,
            failed_deletions: AtomicU64::new(0),
        };
        Ok(Self {
            shared: Arc::new(shared),
            routes: [(memory.tier(), Tier::Object), (Tier::Object, memory.tier())],
            memory,
            keep: options.keep,
            ticket: Some(ticket),
            last_ticket,
        })
    }

    /// Counts for metrics and tests.
    pub fn stats(&self) -> ObjectStats {
        ObjectStats {
            segments: self.shared.locations.lock().segments().count() as u64,
            failed_deletions: self.shared.failed_deletions.load(Ordering::Relaxed),
        }
    }

    /// `None`: it was refused and reported.
    fn accept(&self, index: usize, op: &CopyOp, done: &Done) -> Option<Pending> {
        let (memory, object) = match op.route() {
            route if route == self.routes[0] => (op.from.slot, op.to.slot),
            route if route == self.routes[1] => (op.to.slot, op.from.slot),
            _ => (SlotId(u32::MAX), SlotId(u32::MAX)),
        };
        let ticket = self.ticket.clone()?;
        let block = (op.block, object);
        let pending = (object.0 < MAX_SLOTS)
            .then(|| Pending::new((index, done.clone()), (&self.memory, memory), block, ticket))
            .flatten();
        if pending.is_none() {
            let message = format!("the object tier cannot copy {} to {}", op.from, op.to);
            done.complete(index, Err(CopyError::new(CopyErrorKind::Refused, message)));
        }
        pending
    }

    fn write(&self, blocks: Vec<Pending>) {
        self.vacate(&blocks);
        let mut blocks = blocks.into_iter().peekable();
        while blocks.peek().is_some() {
            let segment = blocks.by_ref().take(self.shared.blocks_per_segment).collect();
            self.shared.store.executor.spawn(write::upload(Arc::clone(&self.shared), segment));
        }
    }

    /// From here on the slots' old content is gone, whether or not the new one arrives.
    fn vacate(&self, blocks: &[Pending]) {
        let mut locations = self.shared.locations.lock();
        let dead: Vec<_> = blocks.iter().filter_map(|block| locations.vacate(block.object)).collect();
        drop(locations);
        for name in dead {
            let (shared, ticket) = (Arc::clone(&self.shared), self.ticket.clone());
            self.shared.store.executor.spawn(async move {
                shared.delete(name).await;
                drop(ticket);
            });
        }
    }

    fn read(&self, blocks: Vec<Pending>) {
        blocks.iter().for_each(|block| forget_checksum(&*self.memory, block.memory));
        for run in read::plan(&self.shared, blocks) {
            self.shared.store.executor.spawn(read::fetch(Arc::clone(&self.shared), run));
        }
    }
}

// SAFETY: a `Pending` completes its operation exactly once, when it is dropped. A write's are owned by every
// `Bytes` that the client got, so they go when nobody can read the slots any more; a read's by the only task
// or thread that writes to the slots. Each holds the region. Destinations are written through slices of one
// block, and finished with `Ok` only when filled to the end.
unsafe impl Backend for ObjectBackend {
    fn name(&self) -> &'static str {
        "object_store"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        let (mut writes, mut reads) = (Vec::new(), Vec::new());
        for (index, op) in batch.iter().enumerate() {
            let accepted = if op.to.tier == Tier::Object { &mut writes } else { &mut reads };
            accepted.extend(self.accept(index, op, &done));
        }
        self.write(writes);
        self.read(reads);
    }
}

/// Ends what was submitted, and deletes what is not kept.
impl Drop for ObjectBackend {
    fn drop(&mut self) {
        self.shared.requests.close();
        let Some(ticket) = self.ticket.take() else { return };
        let (shared, last_ticket, keep) = (Arc::clone(&self.shared), self.last_ticket.clone(), self.keep);
        let close = move || shared.close(ticket, &last_ticket, keep);
        if !Executor::is_own_thread() {
            return close();
        }
        // The last report held the last handle: the thread that makes it cannot wait for its end.
        if let Err(error) = thread::Builder::new().name("kvbm-object-close".to_owned()).spawn(close) {
            tracing::warn!(store = %self.shared.store, %error, "segments are left in the object store");
        }
    }
}

impl fmt::Debug for ObjectBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectBackend").field("store", &self.shared.store).finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn path(&self, name: SegmentName) -> Path {
        self.directory.clone().join(name.to_string())
    }

    fn close(self: &Arc<Self>, ticket: Sender<Ticket>, last_ticket: &Receiver<Ticket>, keep: bool) {
        if !drained(ticket, last_ticket, CLOSE_LIMIT) {
            tracing::warn!(store = %self.store, "requests to the object store did not end");
        }
        if !keep {
            self.delete_all();
        }
    }

    fn delete_all(self: &Arc<Self>) {
        let names: Vec<_> = self.locations.lock().segments().collect();
        let shared = Arc::clone(self);
        let deletions = futures::stream::iter(names)
            .map(move |name| {
                let shared = Arc::clone(&shared);
                async move { shared.delete(name).await }
            })
            .buffer_unordered(self.concurrency)
            .collect::<()>();
        if self.store.executor.wait(CLOSE_LIMIT, deletions).is_none() {
            tracing::warn!(store = %self.store, directory = %self.directory, "segments are left in the object store");
        }
        self.store.remove_directory();
    }

    /// Deletes a segment. That it is gone already is no failure.
    pub(super) async fn delete(&self, name: SegmentName) {
        let path = self.path(name);
        let deletion = tokio::time::timeout(OPERATION_LIMIT, self.store.client.delete(&path)).await;
        let error = match deletion {
            Ok(Ok(()) | Err(object_store::Error::NotFound { .. })) => return,
            Ok(Err(e)) => self.store.secrets.scrub(&e).to_string(),
            Err(elapsed) => elapsed.to_string(),
        };
        self.failed_deletions.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(%path, error, "a dead segment is left in the object store");
    }
}
