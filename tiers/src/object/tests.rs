//! Behaviour of the backend over real and failing stores.

#![expect(unsafe_code, reason = "a region of the tests' own")]

mod compaction;
mod faults;
mod fsck;
mod scale;
mod server;
mod sharing;
mod starts;
mod upkeep;

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path as FilePath, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::stream::{BoxStream, StreamExt};
use object_store::chunked::ChunkedStore;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use parking_lot::Mutex;
use url::Url;

use super::segment::decode_footer;
use super::{Budgets, OPERATION_LIMIT, ObjectBackend, ObjectOptions, Store, StoreOptions};
use crate::backend::Backend;
use crate::checksum::{Checksums, checksum};
use crate::copy::{BlockKey, CopyError, CopyErrorKind, CopyOp, SlotId, SlotRef, Tier};
use crate::geometry::{ALIGNMENT, Geometry};
use crate::memory::Memory;
use crate::testing::{each, kinds};
use crate::verify::Verified;

/// Not a multiple of the alignment: the bytes between slots must not travel.
const BLOCK: usize = 5000;
const SLOTS: u32 = 64;

/// A host tier of plain memory.
#[derive(Debug)]
struct Heap {
    base: NonNull<u8>,
    geometry: Geometry,
}

impl Heap {
    fn new() -> Arc<Self> {
        let geometry = Geometry::new(SLOTS, BLOCK).unwrap();
        // SAFETY: the geometry's size is not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(Self::layout(geometry)) }).unwrap();
        Arc::new(Self { base, geometry })
    }

    fn layout(geometry: Geometry) -> Layout {
        Layout::from_size_align(geometry.bytes(), ALIGNMENT).unwrap()
    }

    fn fill(&self, slot: u32, seed: u32) {
        let mut bytes = self.slot(SlotId(slot)).unwrap();
        // SAFETY: the slot is ours between two batches.
        let bytes = unsafe { bytes.as_mut() };
        bytes[..BLOCK].copy_from_slice(&pattern(seed));
    }

    fn holds(&self, slot: u32, seed: u32) -> bool {
        let bytes = self.slot(SlotId(slot)).unwrap();
        // SAFETY: the slot is ours between two batches.
        let bytes = unsafe { bytes.as_ref() };
        bytes[..BLOCK] == pattern(seed)
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.base.as_ptr(), Self::layout(self.geometry)) }
    }
}

// SAFETY: plain memory without an owning thread.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

// SAFETY: one allocation of the geometry's size and alignment, freed on drop.
unsafe impl Memory for Heap {
    fn tier(&self) -> Tier {
        Tier::Host
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn base(&self) -> NonNull<u8> {
        self.base
    }
}

fn pattern(seed: u32) -> Vec<u8> {
    (0..BLOCK as u32)
        .map(|i| {
            (i.wrapping_mul(31) ^ seed.wrapping_mul(0x9e37_79b9)).to_le_bytes()[i as usize % 4]
        })
        .collect()
}

fn key(seed: u32) -> BlockKey {
    BlockKey { hash: u128::from(seed) << 64 | 7, group: 3 }
}

const fn slot_at(tier: Tier, slot: u32) -> SlotRef {
    SlotRef { tier, slot: SlotId(slot), generation: 1 }
}

fn op(from: SlotRef, to: SlotRef, seed: u32) -> CopyOp {
    CopyOp { block: key(seed), parent: None, owner: None, from, to }
}

type Results = Vec<Result<(), CopyError>>;

fn run(backend: &dyn Backend, batch: Vec<CopyOp>) -> Results {
    let count = batch.len();
    let (send, receive) = std::sync::mpsc::channel();
    backend.submit(batch, each(move |op, result| send.send((op, result)).unwrap()));
    // The channel closes when the backend has dropped the last clone of `Done`: no report is missed
    // or doubled.
    let mut reports: Vec<_> = receive.iter().collect();
    reports.sort_by_key(|(op, _)| *op);
    assert!(reports.iter().map(|(op, _)| *op).eq(0..count), "each operation once");
    reports.into_iter().map(|(_, result)| result).collect()
}

/// Writes blocks `seeds` from the first host slots to `slots` of the store.
fn write(backend: &dyn Backend, heap: &Heap, blocks: &[(u32, u32)]) -> Results {
    let ops = blocks.iter().zip(0..).map(|(&(slot, seed), host)| {
        heap.fill(host, seed);
        op(slot_at(Tier::Host, host), slot_at(Tier::Object, slot), seed)
    });
    run(backend, ops.collect())
}

/// Reads the slots into the first host slots and checks what arrived.
fn read(backend: &dyn Backend, heap: &Heap, blocks: &[(u32, u32)]) -> Results {
    let ops = blocks.iter().zip(0..).map(|(&(slot, seed), host)| {
        heap.fill(host, !seed);
        op(slot_at(Tier::Object, slot), slot_at(Tier::Host, host), seed)
    });
    let results = run(backend, ops.collect());
    for ((&(_, seed), result), host) in blocks.iter().zip(&results).zip(0..) {
        assert!(result.is_err() || heap.holds(host, seed), "block {seed} is not what was written");
    }
    results
}

fn all_ok(results: &Results) -> bool {
    results.iter().all(Result::is_ok)
}

fn options(blocks_per_segment: usize) -> ObjectOptions {
    let segment_bytes = (blocks_per_segment * BLOCK) as u64;
    ObjectOptions {
        namespace: "model/tp0".into(),
        segment_bytes,
        concurrency: 3,
        operation_limit: OPERATION_LIMIT,
        budgets: Budgets::default(),
        keep: false,
        keys: None,
        sharing: None,
    }
}

fn backend(store: Store, heap: &Arc<Heap>, options: &ObjectOptions) -> ObjectBackend {
    ObjectBackend::new(store, Arc::clone(heap) as Arc<dyn Memory>, None, options).unwrap()
}

fn open_directory(dir: &FilePath) -> Store {
    Store::open(Url::from_file_path(dir).unwrap().as_str(), &StoreOptions::default()).unwrap()
}

fn segment_files(dir: &FilePath) -> Vec<PathBuf> {
    let Ok(epochs) = std::fs::read_dir(dir.join("model/tp0/blocks")) else { return Vec::new() };
    let files = epochs.flat_map(|epoch| std::fs::read_dir(epoch.unwrap().path()).unwrap());
    files.map(|file| file.unwrap().path()).collect()
}

fn round_trips(store: Store) {
    let heap = Heap::new();
    let backend = backend(store, &heap, &options(7));
    let blocks: Vec<_> = (0..SLOTS).map(|i| (i * 70_001, i + 1)).collect();
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    assert_eq!(backend.stats().segments, u64::from(SLOTS.div_ceil(7)));

    let mut scattered = blocks.clone();
    scattered.reverse();
    scattered.retain(|(slot, _)| slot % 3 != 0);
    // The same block into two slots.
    scattered.push(scattered[0]);
    assert!(all_ok(&read(&backend, &heap, &scattered)));

    let rewritten: Vec<_> = blocks.iter().map(|&(slot, seed)| (slot, seed + 1000)).collect();
    assert!(all_ok(&write(&backend, &heap, &rewritten[..20])));
    assert!(all_ok(&read(&backend, &heap, &rewritten[..20])));
    assert!(all_ok(&read(&backend, &heap, &blocks[20..])));
}

#[test]
fn blocks_come_back_from_memory() {
    round_trips(Store::open("memory:///a/prefix", &StoreOptions::default()).unwrap());
}

#[test]
fn blocks_come_back_from_files() {
    let dir = tempfile::tempdir().unwrap();
    round_trips(open_directory(dir.path()));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "everything was removed");
}

#[test]
fn blocks_come_back_in_small_pieces() {
    let chunked = ChunkedStore::new(Arc::new(InMemory::new()), 777);
    round_trips(Store::with_client(Arc::new(chunked)).unwrap());
}

#[test]
fn segments_go_with_their_last_slot() {
    let dir = tempfile::tempdir().unwrap();
    let heap = Heap::new();
    let backend = backend(open_directory(dir.path()), &heap, &options(4));
    assert!(all_ok(&write(&backend, &heap, &[(0, 1), (1, 2), (2, 3), (3, 4)])));
    let first = segment_files(dir.path());
    assert!(all_ok(&write(&backend, &heap, &[(0, 5), (1, 6), (2, 7), (3, 8)])));
    assert_eq!(backend.stats().segments, 1);
    delete_all_dead(&backend);
    assert!(!first[0].exists());
}

/// Waits until nothing is left to delete.
fn delete_all_dead(backend: &ObjectBackend) {
    eventually("dead segments are still there", || backend.stats().undeleted == 0);
}

fn eventually(otherwise: &str, reached: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !reached() {
        assert!(Instant::now() < deadline, "{otherwise}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn segments_are_private_in_a_directory_that_was_there() {
    let (dir, heap) = (tempfile::tempdir().unwrap(), Heap::new());
    let set = |mode| std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(mode)).unwrap();
    let mode = |path: &FilePath| path.metadata().unwrap().permissions().mode() & 0o777;
    set(0o755);
    let backend = backend(open_directory(dir.path()), &heap, &options(4));
    assert!(all_ok(&write(&backend, &heap, &[(0, 1), (1, 2)])));
    let file = &segment_files(dir.path())[0];
    let modes: Vec<_> = file.ancestors().take(6).map(mode).collect();
    assert_eq!(modes, [0o600, 0o700, 0o700, 0o700, 0o700, 0o755]);
    // Only the owner may change a directory's mode: what is open to others stays so.
    drop(backend);
    assert_eq!(mode(dir.path()), 0o755);
}

#[test]
fn segments_describe_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let heap = Heap::new();
    let keep = ObjectOptions { keep: true, ..options(8) };
    let backend = backend(open_directory(dir.path()), &heap, &keep);
    assert!(all_ok(&write(&backend, &heap, &[(9, 1), (8, 2), (7, 3)])));
    drop(backend);
    let files = segment_files(dir.path());
    let object = std::fs::read(&files[0]).unwrap();
    let entries = decode_footer(&object, object.len() as u64).unwrap().entries;
    assert_eq!(entries.len(), 3);
    for (entry, seed) in entries.iter().zip(1..) {
        let bytes = &object[entry.offset as usize..(entry.offset + entry.length) as usize];
        assert_eq!((entry.block, bytes), (key(seed), &pattern(seed)[..]));
        assert_eq!(entry.crc32c, checksum(bytes));
    }
}

#[test]
fn recorded_checksums_are_written_down() {
    let dir = tempfile::tempdir().unwrap();
    let heap = Heap::new();
    let (memory, checksums) = (Arc::clone(&heap) as Arc<dyn Memory>, Arc::new(Checksums::new()));
    let keep = ObjectOptions { keep: true, ..options(8) };
    let recorded = Some(Arc::clone(&checksums));
    let backend =
        ObjectBackend::new(open_directory(dir.path()), Arc::clone(&memory), recorded, &keep)
            .unwrap();
    let backend = Verified::new(backend, memory, checksums).unwrap();
    assert!(all_ok(&write(&backend, &heap, &[(9, 1), (8, 2), (7, 3)])));
    assert!(all_ok(&read(&backend, &heap, &[(9, 1), (8, 2), (7, 3)])));
    drop(backend);
    let object = std::fs::read(&segment_files(dir.path())[0]).unwrap();
    let entries = decode_footer(&object, object.len() as u64).unwrap().entries;
    assert!(
        entries.iter().map(|entry| entry.crc32c).eq((1..=3).map(|seed| checksum(&pattern(seed))))
    );
}

#[test]
fn a_short_object_fails_only_the_blocks_that_it_lost() {
    let dir = tempfile::tempdir().unwrap();
    let heap = Heap::new();
    let backend = backend(open_directory(dir.path()), &heap, &options(8));
    let blocks = [(0, 1), (1, 2), (2, 3), (3, 4)];
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    let file = std::fs::File::options().write(true).open(&segment_files(dir.path())[0]).unwrap();
    file.set_len(3 * BLOCK as u64 - 1).unwrap();
    let results = read(&backend, &heap, &blocks);
    assert_eq!(kinds(&results), [None, None, Some(CopyErrorKind::Io), Some(CopyErrorKind::Io)]);
    assert_eq!(kinds(&read(&backend, &heap, &[(3, 4)])), [Some(CopyErrorKind::Io)]);
}

#[test]
fn a_lost_object_is_an_error_and_slots_stay_writable() {
    let dir = tempfile::tempdir().unwrap();
    let heap = Heap::new();
    let backend = backend(open_directory(dir.path()), &heap, &options(8));
    assert!(all_ok(&write(&backend, &heap, &[(5, 1)])));
    std::fs::remove_file(&segment_files(dir.path())[0]).unwrap();
    assert_eq!(kinds(&read(&backend, &heap, &[(5, 1)])), [Some(CopyErrorKind::Io)]);
    assert!(all_ok(&write(&backend, &heap, &[(5, 2)])));
    assert!(all_ok(&read(&backend, &heap, &[(5, 2)])));
    delete_all_dead(&backend);
}

#[test]
fn what_cannot_be_copied_is_refused() {
    let heap = Heap::new();
    let backend =
        backend(Store::with_client(Arc::new(InMemory::new())).unwrap(), &heap, &options(4));
    let results = run(
        &backend,
        vec![
            op(slot_at(Tier::Host, SLOTS), slot_at(Tier::Object, 0), 1),
            op(slot_at(Tier::Disk, 0), slot_at(Tier::Host, 0), 1),
            op(slot_at(Tier::Object, 0), slot_at(Tier::Object, 1), 1),
            op(slot_at(Tier::Object, 77), slot_at(Tier::Host, 0), 1),
        ],
    );
    let refused = Some(CopyErrorKind::Refused);
    assert_eq!(kinds(&results), [refused, refused, refused, Some(CopyErrorKind::Io)]);
    assert!(run(&backend, Vec::new()).is_empty());
}

#[test]
fn a_failing_store_fails_operations_and_nothing_else() {
    for budget in 0..20 {
        let faulty = Faulty::new(Fault::AfterRequests(AtomicI64::new(budget)));
        let heap = Heap::new();
        let backend = backend(Store::with_client(faulty.clone()).unwrap(), &heap, &options(2));
        let blocks: Vec<_> = (0..16).map(|i| (i, i + 1)).collect();
        let written = write(&backend, &heap, &blocks);
        faulty.heal();
        for (block, result) in blocks.iter().zip(&written) {
            let read = read(&backend, &heap, &[*block]);
            assert_eq!(read[0].is_ok(), result.is_ok(), "what was not written cannot be read");
        }
        drop(backend);
        assert_eq!(faulty.inner.list(None).collect::<Vec<_>>().now_or_never().unwrap().len(), 0);
    }
}

#[test]
fn reads_that_fail_are_reported() {
    let faulty = Faulty::new(Fault::AfterRequests(AtomicI64::new(1)));
    let heap = Heap::new();
    let backend = backend(Store::with_client(faulty.clone()).unwrap(), &heap, &options(8));
    assert!(all_ok(&write(&backend, &heap, &[(0, 1), (1, 2)])));
    assert_eq!(kinds(&read(&backend, &heap, &[(0, 1), (1, 2)])), [Some(CopyErrorKind::Io); 2]);
    faulty.heal();
    assert!(all_ok(&read(&backend, &heap, &[(0, 1), (1, 2)])));
}

#[test]
fn a_write_whose_answer_got_lost_is_a_success() {
    let heap = Heap::new();
    let store = Store::with_client(Faulty::new(Fault::LostAnswers)).unwrap();
    let backend = backend(store, &heap, &options(8));
    assert!(all_ok(&write(&backend, &heap, &[(0, 1), (1, 2)])));
    assert!(all_ok(&read(&backend, &heap, &[(0, 1), (1, 2)])));
}

#[test]
fn a_write_ends_when_the_client_releases_the_bytes() {
    let faulty = Faulty::new(Fault::Hoards(Mutex::default()));
    let heap = Heap::new();
    let backend = backend(Store::with_client(faulty.clone()).unwrap(), &heap, &options(8));
    heap.fill(0, 1);
    let (send, receive) = std::sync::mpsc::channel();
    let done = each(move |_, result| send.send(result).unwrap());
    backend.submit(vec![op(slot_at(Tier::Host, 0), slot_at(Tier::Object, 0), 1)], done);
    while backend.stats().segments == 0 {
        std::thread::yield_now();
    }
    assert!(
        receive.recv_timeout(Duration::from_millis(50)).is_err(),
        "the client can still read the slot"
    );
    faulty.heal();
    receive.recv().unwrap().unwrap();
}

#[test]
fn a_short_answer_is_an_error() {
    let heap = Heap::new();
    let memory = Arc::new(InMemory::new());
    let backend = backend(Store::with_client(memory.clone()).unwrap(), &heap, &options(8));
    assert!(all_ok(&write(&backend, &heap, &[(0, 1), (1, 2)])));
    let object = memory.list(None).next().now_or_never().unwrap().unwrap().unwrap().location;
    let short = pattern(1).into_iter().chain([0; 10]).collect::<PutPayload>();
    memory.put(&object, short).now_or_never().unwrap().unwrap();
    assert_eq!(kinds(&read(&backend, &heap, &[(0, 1), (1, 2)])), [None, Some(CopyErrorKind::Io)]);
}

#[test]
fn closing_ends_every_operation() {
    let heap = Heap::new();
    let store = Store::open("memory:///", &StoreOptions::default()).unwrap();
    let backend = backend(store, &heap, &options(1));
    let ops = (0..SLOTS).map(|i| op(slot_at(Tier::Host, i), slot_at(Tier::Object, i), i)).collect();
    let (send, receive) = std::sync::mpsc::channel();
    backend.submit(ops, each(move |_, result| send.send(result).unwrap()));
    drop(backend);
    let results: Results = receive.try_iter().collect();
    assert_eq!(results.len(), SLOTS as usize);
    assert!(kinds(&results).iter().flatten().all(|kind| *kind == CopyErrorKind::Refused));
}

#[test]
fn closing_waits_for_deletions_as_long_as_they_get_on() {
    let heap = Heap::new();
    let faulty = Faulty::new(Fault::DeletesSlowly(Duration::from_millis(150)));
    let backend =
        backend(Store::with_client(Arc::clone(&faulty) as _).unwrap(), &heap, &options(1));
    // Three at a time: more than a second's work.
    assert!(all_ok(&write(
        &backend,
        &heap,
        &(0..30).map(|slot| (slot, slot + 1)).collect::<Vec<_>>()
    )));
    drop(backend);
    assert_eq!(faulty.sizes(), [0; 0], "segments are left behind");
}

/// A store with a defect.
#[derive(Debug)]
struct Faulty {
    inner: Arc<InMemory>,
    fault: Fault,
    healed: AtomicBool,
}

#[derive(Debug)]
enum Fault {
    /// None.
    None,
    /// Every request after this many fails.
    AfterRequests(AtomicI64),
    /// Does what it is asked and says that it failed.
    LostAnswers,
    /// Keeps what it was sent until it is healed.
    Hoards(Mutex<Vec<PutPayload>>),
    /// Takes objects this long after they were sent, when their writers wait no more.
    TakesLate(Duration),
    /// Deletes one object at a time, each in this time.
    DeletesSlowly(Duration),
    /// Returns the first question for an object when it is healed.
    HoldsFirstGet(AtomicBool),
    /// Deletes nothing until it is healed.
    KeepsAll,
}

impl Faulty {
    fn new(fault: Fault) -> Arc<Self> {
        Arc::new(Self { inner: Arc::new(InMemory::new()), fault, healed: AtomicBool::new(false) })
    }

    fn heal(&self) {
        self.healed.store(true, Ordering::Relaxed);
        if let Fault::Hoards(payloads) = &self.fault {
            payloads.lock().clear();
        }
    }

    fn is_healed(&self) -> bool {
        self.healed.load(Ordering::Relaxed)
    }

    /// Names of the objects of a kind.
    fn names(&self, kind: &str) -> Vec<String> {
        let listing =
            self.inner.list(None).map(|object| object.unwrap().location.to_string()).collect();
        let mut names: Vec<String> = FutureExt::now_or_never(listing).unwrap();
        names.retain(|name| name.ends_with(kind));
        names
    }

    /// Bytes of the objects that there are.
    fn sizes(&self) -> Vec<u64> {
        let listing = self.inner.list(None).map(|object| object.unwrap().size).collect();
        FutureExt::now_or_never(listing).unwrap()
    }

    fn request(&self) -> object_store::Result<()> {
        match &self.fault {
            Fault::AfterRequests(budget)
                if budget.fetch_sub(1, Ordering::Relaxed) <= 0 && !self.is_healed() =>
            {
                Err(failure())
            }
            _ => Ok(()),
        }
    }
}

fn failure() -> object_store::Error {
    object_store::Error::Generic { store: "faulty", source: "as arranged".into() }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.request()?;
        if let Fault::Hoards(payloads) = &self.fault {
            payloads.lock().push(payload.clone());
        }
        if let Fault::TakesLate(delay) = self.fault
            && !self.is_healed()
        {
            let (inner, location) = (self.inner.clone(), location.clone());
            tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                inner.put_opts(&location, payload.iter().cloned().collect(), opts).await
            });
            return std::future::pending().await;
        }
        let result = self.inner.put_opts(location, payload, opts).await;
        if matches!(self.fault, Fault::LostAnswers) { Err(failure()) } else { result }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        self.request()?;
        if let Fault::HoldsFirstGet(held) = &self.fault
            && !held.swap(true, Ordering::Relaxed)
        {
            while !self.is_healed() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        if matches!(self.fault, Fault::KeepsAll) && !self.is_healed() {
            return locations.map(|_| Err(failure())).boxed();
        }
        if let Fault::DeletesSlowly(pause) = self.fault {
            let slowly = move |location| async move {
                tokio::time::sleep(pause).await;
                location
            };
            return self.inner.delete_stream(locations.then(slowly).boxed());
        }
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
