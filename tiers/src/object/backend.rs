//! The backend between a memory region and the object tier.

#![expect(unsafe_code, reason = "promises of a backend")]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use object_store::path::Path;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::block::PendingBlock;
use super::budget::Budgets;
use super::collect::keep_collecting;
use super::discover::{DISCOVERY_LIMIT, Discovered, discover};
use super::epochs::EpochStanding;
use super::executor::{StoreRuntime, WorkInProgress};
use super::look::{TakeIn, keep_looking};
use super::names::SegmentNames;
use super::open::Store;
use super::segment::{FooterKeys, Provenance};
use super::share::{BucketShare, Sharing, keep_up};
use super::shared::{StoreContext, now_ms};
use super::traffic::{CountedRequests, Traffic};
use super::{read, write};
use crate::backend::Backend;
use crate::checksum::Checksums;
use crate::clock;
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done, Route, SlotId, Tier};
use crate::error::SetupError;
use crate::fork::MakerProcess;
use crate::geometry::MAX_SLOTS;
use crate::memory::{Memory, forget_checksum};

/// How long the last handle's owner waits for a store that gets on with it: many segments, or a
/// machine that is busy with other things. Half a minute is what supervisors of services give all
/// of a shutdown.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);
/// How long it waits for a store that gets on with nothing. What takes longer goes on without it.
const CLOSE_STALL: Duration = Duration::from_secs(1);
/// How often it looks.
const CLOSE_LOOK: Duration = Duration::from_millis(50);
/// A new epoch is announced within this time, or in the background.
const ANNOUNCEMENT_LIMIT: Duration = Duration::from_secs(5);
/// One request in flight out of this number may compact: each holds up to three segments in memory.
const COMPACTIONS_SHARE: usize = 4;

/// How blocks are laid out in the store.
#[derive(Clone, Debug)]
pub struct ObjectOptions {
    /// Part of all objects' names, `/` allowed. Bytes are never shared between namespaces.
    pub namespace: String,
    /// Largest payload of a segment, in bytes; a segment has at least one block.
    pub segment_bytes: u64,
    /// Requests in flight, reads and writes together.
    pub concurrency: u32,
    /// The most time from an operation's submission to its end, with waiting for others and
    /// retries. Only a file system that hangs can take longer, because nothing else can stop what
    /// it does to a slot.
    pub operation_limit: Duration,
    /// What requests may come to.
    pub budgets: Budgets,
    /// Leave the segments in place at the end.
    pub keep: bool,
    /// What authenticates footers, where blocks are encrypted.
    pub keys: Option<FooterKeys>,
    /// With which workers; `None`: no one else reads what is written here.
    pub sharing: Option<Sharing>,
}

/// What there is now, and counts since the backend was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectStats {
    /// Segments that hold the content of a slot, or are being read.
    pub segments: u64,
    /// Blocks in them.
    pub stored_blocks: u64,
    /// Blocks that are the content of a slot.
    pub live_blocks: u64,
    /// Blocks that compactions wrote again.
    pub moved_blocks: u64,
    /// Segments that no worker needs and that are, or may be, still in the store: they are deleted
    /// soon, or when the store is well again.
    pub undeleted: u64,
    /// Blocks in segments that others wrote which are the content of a slot.
    pub found_blocks: u64,
    /// Blocks that were not written because others had written them.
    pub linked_blocks: u64,
    /// Segments that garbage collection deleted.
    pub collected: u64,
}

/// Moves blocks between a memory region and an object store, both ways.
///
/// Dropping it refuses what has not begun and, unless told to keep them, deletes the segments that
/// it wrote. It waits for that as long as something ends every second, ten seconds at most; what
/// takes longer goes on as long as the process lives, with the region kept alive.
pub struct ObjectBackend {
    shared: Arc<StoreContext>,
    memory: Arc<dyn Memory>,
    routes: [Route; 2],
    keep: bool,
    maker: MakerProcess,
}

impl ObjectBackend {
    /// Between `memory` and segments in `store`.
    ///
    /// `checksums`: those that a [`Verified`](crate::verify::Verified) around this backend records;
    /// `None`: they are computed here.
    ///
    /// # Errors
    /// `Invalid`: no request may be in flight, or none may take any time.
    pub fn new(
        store: Store,
        memory: Arc<dyn Memory>,
        checksums: Option<Arc<Checksums>>,
        options: &ObjectOptions,
    ) -> Result<Self, SetupError> {
        let traffic = Arc::new(Traffic::new(&options.budgets));
        let store =
            store.map_client(|client| Arc::new(CountedRequests::new(client, Arc::clone(&traffic))));
        let concurrency = options.concurrency as usize;
        if !(1..=Semaphore::MAX_PERMITS).contains(&concurrency) {
            let message =
                "object.concurrency (DYN_KVBM_OBJECT_CONCURRENCY) is 0: allow at least one request";
            return Err(SetupError::invalid(message));
        }
        if options.operation_limit.is_zero() {
            let message = "operations of the object tier may take no time at all: allow them some";
            return Err(SetupError::invalid(message));
        }
        let block_bytes = memory.block_bytes();
        let blocks_per_segment =
            (options.segment_bytes / block_bytes as u64).clamp(1, u64::from(u32::MAX));
        let namespace = Path::from(options.namespace.as_str());
        let namespace = store.root.parts().chain(namespace.parts()).collect::<Path>();
        let names = SegmentNames::new();
        let share = options
            .sharing
            .clone()
            .map(|sharing| BucketShare::new(sharing, &namespace, names.next()));
        let provenance =
            options.sharing.as_ref().map(|sharing| sharing.provenance).unwrap_or_default();
        let shared = StoreContext {
            store,
            block_bytes,
            checksums,
            directory: namespace.clone().join("blocks"),
            former_directory: namespace.join("segments"),
            names,
            keys: options.keys.clone(),
            locations: Mutex::default(),
            blocks_per_segment: blocks_per_segment as usize,
            limit: options.operation_limit,
            compactions: Semaphore::new(concurrency.div_ceil(COMPACTIONS_SHARE)),
            moved_blocks: AtomicU64::new(0),
            requests: Arc::new(Semaphore::new(concurrency)),
            deletions: Semaphore::new(concurrency),
            work: WorkInProgress::default(),
            undeleted: AtomicU64::new(0),
            provenance: Mutex::new(provenance),
            share,
            suspects: Mutex::default(),
            collected: AtomicU64::new(0),
            linked_blocks: AtomicU64::new(0),
            traffic,
        };
        Ok(Self {
            shared: Arc::new(shared),
            routes: Route::new(memory.tier(), Tier::Object).both_ways(),
            memory,
            keep: options.keep,
            maker: MakerProcess::this_process(),
        })
    }

    /// Finds what this process, in an earlier life, and others have left in the namespace, and has
    /// slots below `slots` stand for it. Nothing may have been written yet. From here on this
    /// worker says what it relies on, and collects garbage. This takes ten seconds at most: a store
    /// that fails or is slow until then leaves the worker without
    /// [knowledge](EpochStanding::Unknown), and so without a use for the store until it has found
    /// out.
    ///
    /// Without [`Sharing`] there is nothing to be found.
    pub fn discover(&self, slots: u32) -> Discovered {
        let found = discover(Arc::clone(&self.shared), slots);
        let epoch = self.shared.provenance().epoch;
        let found = self.shared.store.executor.wait(2 * DISCOVERY_LIMIT, found);
        let found = found.unwrap_or_else(|| Discovered::nothing(EpochStanding::Unknown, epoch));
        keep_up(&self.shared);
        keep_collecting(&self.shared);
        found
    }

    /// How the present epoch stands to those that the bucket knows of.
    pub fn epoch_standing(&self) -> EpochStanding {
        let share = self.shared.share.as_ref();
        let standing = share.map(|share| *share.standing.lock());
        let own = self.shared.provenance().epoch;
        // It is that of the epoch before until the bucket knows of the present one.
        let of_another = |standing: &EpochStanding| !matches!(standing, EpochStanding::Current(epoch) if *epoch != own);
        standing.map_or(EpochStanding::Current(own), |standing| {
            Some(standing).filter(of_another).unwrap_or(EpochStanding::Unknown)
        })
    }

    /// A tenant was forgotten for the `life`-th time: what others have stored for it is not what it
    /// stores from here on.
    pub fn forget_tenant(&self, tenant: u32, life: u32) {
        if let Some(share) = &self.shared.share {
            share.known.lock().forget_tenant(tenant, life, now_ms());
        }
    }

    /// From here on `into` takes in what others store: it is looked for at the interval that
    /// [`Sharing::look`] says. Without [`Sharing`] there is nothing to be looked for.
    pub fn keep_looking(&self, into: Arc<dyn TakeIn>) {
        keep_looking(&self.shared, into);
    }

    /// Writes blocks by the names of another epoch from here on, forgets all that the slots hold,
    /// and tells later workers, before it returns, that it has begun: none of them goes on in an
    /// earlier one unasked. Where nothing is shared, nothing happens.
    ///
    /// # Errors
    /// `Unavailable`: the store did not take it, or is in a later epoch. Until it takes it nothing
    /// is stored or found.
    pub fn begin_epoch(&self, epoch: u64, forgotten: u64) -> Result<(), CopyError> {
        let Some(share) = &self.shared.share else { return Ok(()) };
        let present = self.shared.provenance();
        *self.shared.provenance.lock() = Provenance { epoch, forgotten, ..present };
        let past = self.shared.locations.lock().slots();
        self.shared.forget_slots(past);
        share.known.lock().begin_epoch();
        if self.shared.present().is_some() {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let join = async move {
            let share = shared.share.as_ref()?;
            Some(shared.join_epoch(share).await.map_err(|error| error.to_string()))
        };
        let answer = self.shared.store.executor.wait(ANNOUNCEMENT_LIMIT, join).flatten();
        let why = match answer {
            Some(Ok(EpochStanding::Behind(latest))) => format!("it is in epoch {latest}"),
            Some(Ok(_)) => return Ok(()),
            Some(Err(why)) => why,
            None => "no answer in time".to_owned(),
        };
        let message =
            format!("cannot tell {} that epoch {epoch} has begun: {why}", self.shared.store);
        Err(CopyError::new(CopyErrorKind::Unavailable, message))
    }

    /// Counts of requests and bytes.
    pub fn traffic(&self) -> Arc<Traffic> {
        Arc::clone(&self.shared.traffic)
    }

    /// Counts for metrics and tests.
    pub fn stats(&self) -> ObjectStats {
        let locations = self.shared.locations.lock();
        ObjectStats {
            segments: locations.segments().count() as u64,
            stored_blocks: locations.blocks().stored,
            live_blocks: locations.blocks().live,
            moved_blocks: self.shared.moved_blocks.load(Ordering::Relaxed),
            undeleted: self.shared.undeleted.load(Ordering::Relaxed),
            found_blocks: locations.found_blocks(),
            linked_blocks: self.shared.linked_blocks.load(Ordering::Relaxed),
            collected: self.shared.collected.load(Ordering::Relaxed),
        }
    }

    /// Waits until `end` comes, while there is progress.
    fn has_closed(&self, end: &Receiver<()>) -> bool {
        let began = clock::now();
        let (mut left, mut moved) = (self.shared.work.count(), began);
        while end.recv_timeout(CLOSE_LOOK).is_err_and(|error| error.is_timeout()) {
            let now = clock::now();
            if self.shared.work.count() != left {
                (left, moved) = (self.shared.work.count(), now);
            }
            if now - moved >= CLOSE_STALL || now - began >= CLOSE_LIMIT {
                return false;
            }
        }
        true
    }

    fn accept(&self, index: usize, op: &CopyOp, done: &Done) -> Result<PendingBlock, CopyError> {
        let (memory, object) = match op.route() {
            route if route == self.routes[0] => (op.from.slot, op.to.slot),
            route if route == self.routes[1] => (op.to.slot, op.from.slot),
            _ => (SlotId(u32::MAX), SlotId(u32::MAX)),
        };
        let ticket = self.shared.work.ticket();
        let pending = (object.0 < MAX_SLOTS)
            .then(|| {
                PendingBlock::new(index, done.clone(), &self.memory, memory, op, object, ticket)
            })
            .flatten();
        pending.ok_or_else(|| {
            let message = format!("the object tier cannot copy {} to {}", op.from, op.to);
            CopyError::refused(message)
        })
    }

    fn write(&self, blocks: Vec<PendingBlock>, deadline: Instant) {
        // Whether or not the new content arrives.
        self.shared.forget_slots(blocks.iter().map(|block| block.object));
        let mut blocks = blocks.into_iter().peekable();
        while blocks.peek().is_some() {
            let segment = blocks.by_ref().take(self.shared.blocks_per_segment).collect();
            let upload = write::upload(Arc::clone(&self.shared), segment, deadline);
            self.shared.store.executor.spawn(upload);
        }
    }

    fn read(&self, blocks: Vec<PendingBlock>, deadline: Instant) {
        blocks.iter().for_each(|block| forget_checksum(&*self.memory, block.memory));
        for run in read::plan(&self.shared, blocks) {
            self.shared.store.executor.spawn(read::fetch(Arc::clone(&self.shared), run, deadline));
        }
    }
}

// SAFETY: a `PendingBlock` completes its operation exactly once, when it is dropped. A write's are
// owned by every `Bytes` that shows the client a slot, so they go when nothing can read the slots
// any more; a read's by the only task or thread that writes to the slots. Each holds the region,
// also after this backend has gone. Destinations are written through slices of one block, and
// finished with `Ok` only when filled to the end.
unsafe impl Backend for ObjectBackend {
    fn name(&self) -> &'static str {
        "object_store"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        let deadline = Instant::now() + self.shared.limit;
        let (mut writes, mut reads, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        for (index, op) in batch.iter().enumerate() {
            let accepted = if op.to.tier == Tier::Object { &mut writes } else { &mut reads };
            match self.accept(index, op, &done) {
                Ok(pending) => accepted.push(pending),
                Err(error) => refused.push((index, Err(error))),
            }
        }
        done.report(refused);
        self.write(writes, deadline);
        self.read(reads, deadline);
    }
}

impl Drop for ObjectBackend {
    fn drop(&mut self) {
        // Its threads, and what they do to the store, are the parent's.
        if !self.maker.is_this_process() {
            return;
        }
        self.shared.requests.close();
        self.shared.work.hurry();
        let (shared, keep) = (Arc::clone(&self.shared), self.keep);
        let (ended, end) = bounded::<()>(0);
        self.shared.store.executor.spawn(async move {
            shared.close(keep).await;
            drop(ended);
        });
        // The last report may have held the last handle: the thread that makes it cannot wait for
        // its end.
        if !StoreRuntime::is_own_thread() && !self.has_closed(&end) {
            let store = &self.shared.store;
            tracing::warn!(%store, "the object store is slow: requests and deletions go on in the background");
        }
    }
}

impl fmt::Debug for ObjectBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectBackend").field("store", &self.shared.store).finish_non_exhaustive()
    }
}
