//! Workers that share a bucket: each finds what others stored, and none deletes what another relies
//! on.

use super::server::Server;
use super::*;
use crate::copy::Owner;
use crate::object::segment::Provenance;
use crate::object::{
    Discovered, Discovery, EpochStanding, FoundBlock, OlderEpoch, RequestKind, RequestOutcome,
    Sharing, TakeIn,
};

const PROVENANCE: Provenance = Provenance { fingerprint: 77, epoch: 3, forgotten: 0 };
/// A worker is gone after half a second.
pub(super) const RENEWAL: Duration = Duration::from_millis(50);

fn sharing() -> Sharing {
    Sharing {
        provenance: PROVENANCE,
        older_epoch: OlderEpoch::Refuse,
        renewal: RENEWAL,
        look: RENEWAL,
        collect_after: Duration::ZERO,
        collect_above: None,
    }
}

pub(super) fn shared(blocks_per_segment: usize) -> ObjectOptions {
    ObjectOptions { keep: true, sharing: Some(sharing()), ..options(blocks_per_segment) }
}

/// The same, of a worker that goes on in the bucket's epoch.
pub(super) fn following(blocks_per_segment: usize) -> ObjectOptions {
    let sharing = Sharing { older_epoch: OlderEpoch::Follow, ..sharing() };
    ObjectOptions { sharing: Some(sharing), ..shared(blocks_per_segment) }
}

/// A worker that shares a bucket, and what it has found there.
pub(super) struct Worker {
    heap: Arc<Heap>,
    pub(super) object: Arc<ObjectBackend>,
    verified: Verified<Arc<ObjectBackend>>,
    found: Discovered,
}

impl Worker {
    pub(super) fn start(store: Store, options: &ObjectOptions) -> Self {
        let heap = Heap::new();
        let (memory, checksums) =
            (Arc::clone(&heap) as Arc<dyn Memory>, Arc::new(Checksums::new()));
        let known = Some(Arc::clone(&checksums));
        let object =
            Arc::new(ObjectBackend::new(store, Arc::clone(&memory), known, options).unwrap());
        let found = object.discover(SLOTS);
        let verified = Verified::new(Arc::clone(&object), memory, checksums).unwrap();
        Self { heap, object, verified, found }
    }

    /// Writes a chain, block by block behind another, into slots from `first` on.
    pub(super) fn write(&self, first: u32, seeds: &[u32]) -> Results {
        let parents = std::iter::once(None).chain(seeds.iter().map(|&seed| Some(key(seed).hash)));
        let ops = seeds.iter().zip(parents).zip(0..).map(|((&seed, parent), at)| {
            self.heap.fill(at, seed);
            CopyOp {
                parent,
                ..op(slot_at(Tier::Host, at), slot_at(Tier::Object, first + at), seed)
            }
        });
        run(&self.verified, ops.collect())
    }

    /// Writes first blocks of chains, each for its tenant, into slots from `first` on.
    pub(super) fn write_owned(&self, first: u32, blocks: &[(u32, Owner)]) -> Results {
        let ops = blocks.iter().zip(0..).map(|(&(seed, owner), at)| {
            self.heap.fill(at, seed);
            CopyOp {
                owner: Some(owner),
                ..op(slot_at(Tier::Host, at), slot_at(Tier::Object, first + at), seed)
            }
        });
        run(&self.verified, ops.collect())
    }

    /// Reads every block that was found, and checks that it is what it is said to be. Returns how
    /// many came.
    pub(super) fn read_found(&self) -> usize {
        let seeds = self.found.blocks.iter().map(|found| (found.block.hash >> 64) as u32);
        let blocks: Vec<_> =
            self.found.blocks.iter().map(|found| found.slot.0).zip(seeds).collect();
        let read =
            blocks.chunks(SLOTS as usize).map(|blocks| read(&self.verified, &self.heap, blocks));
        read.flatten().flatten().count()
    }

    /// What was there when it started.
    pub(super) const fn found(&self) -> &Discovered {
        &self.found
    }

    /// Reads blocks from slots, and checks that they are what they are said to be.
    pub(super) fn read(&self, blocks: &[(u32, u32)]) -> Results {
        read(&self.verified, &self.heap, blocks)
    }

    fn has(&self, seed: u32) -> bool {
        self.found.blocks.iter().any(|found| found.block == key(seed))
    }
}

pub(super) fn seeds(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

fn files(dir: &FilePath, kind: &str) -> usize {
    if kind == "blocks" {
        return segment_files(dir).len();
    }
    std::fs::read_dir(dir.join("model/tp0").join(kind)).map_or(0, Iterator::count)
}

/// How many segments the manifest of each worker names: 16 bytes each, beside 28.
fn relied_on(dir: &FilePath) -> Vec<u64> {
    let manifests = std::fs::read_dir(dir.join("model/tp0/manifests")).into_iter().flatten();
    let bytes = manifests.filter_map(|entry| Some(entry.ok()?.metadata().ok()?.len()));
    bytes.map(|bytes| bytes.saturating_sub(28) / 16).collect()
}

fn finds_all(open: impl Fn() -> Store) {
    let first = Worker::start(open(), &shared(7));
    assert!(first.found.blocks.is_empty());
    assert!(all_ok(&first.write(0, &seeds(1..41))));
    let second = Worker::start(open(), &shared(7));
    assert_eq!((second.found.blocks.len(), second.found.segments, second.found.unread), (40, 6, 0));
    assert_eq!(second.read_found(), 40);
    for (at, found) in second.found.blocks.iter().enumerate() {
        let is_behind =
            |parent| second.found.blocks[..at].iter().any(|before| before.block.hash == parent);
        assert!(found.parent.is_none_or(is_behind), "root first");
    }
    drop(first);
    drop(second);
    let third = Worker::start(open(), &shared(7));
    assert_eq!(third.read_found(), 40, "what is kept is there without its writer");
}

#[test]
fn a_worker_finds_what_another_stored_in_files() {
    let dir = tempfile::tempdir().unwrap();
    finds_all(|| open_directory(dir.path()));
}

#[test]
fn a_worker_finds_what_another_stored_in_a_service() {
    let server = Server::start();
    finds_all(|| server.open());
}

#[test]
fn a_listing_of_a_service_stays_ended() {
    let server = Server::start();
    let store = server.open();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut listing = store.listing(&Path::from("prefix"), None, Duration::from_mins(1));
        // The client panics where it is asked for more behind the last.
        for _ in 0..2 {
            assert_eq!(listing.page().await.unwrap(), []);
        }
    });
}

#[test]
fn blocks_of_another_fingerprint_epoch_or_size_are_not_found() {
    let dir = tempfile::tempdir().unwrap();
    let first = Worker::start(open_directory(dir.path()), &shared(7));
    assert!(all_ok(&first.write(0, &seeds(1..9))));
    let earlier = |older_epoch| {
        let sharing =
            Sharing { provenance: Provenance { epoch: 1, ..PROVENANCE }, older_epoch, ..sharing() };
        let late = Worker::start(
            open_directory(dir.path()),
            &ObjectOptions { sharing: Some(sharing), ..shared(7) },
        );
        (late.found.standing, late.found.epoch, late.found.blocks.len())
    };
    assert_eq!(earlier(OlderEpoch::Refuse), (EpochStanding::Behind(3), 1, 0));
    assert_eq!(earlier(OlderEpoch::Follow), (EpochStanding::Current(3), 3, 8));
    assert_eq!(earlier(OlderEpoch::Keep), (EpochStanding::Current(1), 1, 0));
    // A worker in an epoch has begun it, for all who start later: the later one comes last.
    for provenance in [
        Provenance { fingerprint: 78, ..PROVENANCE },
        Provenance { forgotten: 1, ..PROVENANCE },
        Provenance { epoch: 4, ..PROVENANCE },
    ] {
        let sharing = Some(Sharing { provenance, ..sharing() });
        let other =
            Worker::start(open_directory(dir.path()), &ObjectOptions { sharing, ..shared(7) });
        assert!(other.found.blocks.is_empty(), "{provenance:?}: {:?}", other.found);
    }
}

#[test]
fn later_workers_start_in_the_epoch_that_has_begun() {
    let dir = tempfile::tempdir().unwrap();
    let first = Worker::start(open_directory(dir.path()), &shared(7));
    assert!(all_ok(&first.write(0, &seeds(1..9))));
    first.object.begin_epoch(9, 0).unwrap();
    let second = Worker::start(open_directory(dir.path()), &following(7));
    assert_eq!((second.found.epoch, second.found.blocks.len()), (9, 0));
    delete_all_dead(&first.object);
    assert_eq!(files(dir.path(), "blocks"), 0, "what is past is of no use to anybody");
    assert!(all_ok(&first.write(20, &seeds(21..25))));
    assert_eq!(Worker::start(open_directory(dir.path()), &following(7)).read_found(), 4);
}

#[test]
fn the_newest_chains_are_found_whole_when_room_is_short() {
    let dir = tempfile::tempdir().unwrap();
    let first = Worker::start(open_directory(dir.path()), &shared(64));
    // The root of the newest chain is the oldest segment of all.
    assert!(all_ok(&first.write(0, &seeds(1..5))));
    assert!(all_ok(&first.write(10, &seeds(11..21))));
    let parent = Some(key(4).hash);
    first.heap.fill(0, 50);
    let newest = CopyOp { parent, ..op(slot_at(Tier::Host, 0), slot_at(Tier::Object, 50), 50) };
    assert!(all_ok(&run(&first.verified, vec![newest])));
    // One whose parent no worker has.
    first.heap.fill(0, 60);
    let orphan = CopyOp {
        parent: Some(12_345),
        ..op(slot_at(Tier::Host, 0), slot_at(Tier::Object, 60), 60)
    };
    assert!(all_ok(&run(&first.verified, vec![orphan])));
    let found = first.object.discover(0);
    assert!(found.blocks.is_empty());

    let heap = Heap::new();
    let small = ObjectBackend::new(open_directory(dir.path()), heap, None, &shared(64)).unwrap();
    let found = small.discover(7).blocks;
    let names: Vec<_> = found.iter().map(|found| (found.block.hash >> 64) as u32).collect();
    assert_eq!(names, [1, 2, 3, 4, 50, 11, 12]);
    assert!(found.iter().map(|found| found.slot.0).eq(0..7));
}

#[test]
fn torn_or_foreign_segments_are_counted_and_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let first = Worker::start(open_directory(dir.path()), &shared(4));
    for part in 0..5 {
        assert!(all_ok(&first.write(part * 4, &seeds(part * 4 + 1..part * 4 + 5))));
    }
    let mut segments = segment_files(dir.path());
    segments.sort();
    let change = |at: usize, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = std::fs::read(&segments[at]).unwrap();
        change(&mut bytes);
        std::fs::write(&segments[at], bytes).unwrap();
    };
    change(0, &|bytes| bytes.truncate(bytes.len() - 1));
    change(1, &|bytes| *bytes.iter_mut().rev().nth(15).unwrap() = 1);
    change(2, &|bytes| bytes.clear());
    // A block that has changed is noticed when it is read.
    change(3, &|bytes| bytes[2 * BLOCK + 7] ^= 4);
    let second = Worker::start(open_directory(dir.path()), &shared(4));
    assert_eq!((second.found.blocks.len(), second.found.unread), (8, 3));
    assert_eq!(second.read_found(), 7);
    assert!(all_ok(&second.write(30, &seeds(1..5))), "and everything works");
    assert!(all_ok(&read(&second.verified, &second.heap, &[(30, 1), (31, 2)])));
}

#[test]
fn what_another_relies_on_stays_until_it_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let dropping = ObjectOptions { keep: false, ..shared(4) };
    let first = Worker::start(open_directory(dir.path()), &dropping);
    assert!(all_ok(&first.write(0, &seeds(1..5))));
    assert!(all_ok(&first.write(4, &seeds(5..9))));
    // No worker takes it for gone, however busy the machine is.
    let patient = Sharing { renewal: RENEWAL * 20, ..sharing() };
    let patient = ObjectOptions { sharing: Some(patient), ..shared(4) };
    let second = Worker::start(open_directory(dir.path()), &patient);
    assert_eq!(second.found.blocks.len(), 8);
    eventually("it did not say so", || relied_on(dir.path()) == [2, 2]);
    // The first one has other use for its slots, and ends: the second one still reads.
    assert!(all_ok(&first.write(0, &seeds(21..25))));
    delete_all_dead(&first.object);
    assert_eq!(second.read_found(), 8);
    drop(first);
    assert_eq!(
        files(dir.path(), "manifests"),
        1,
        "who does not keep anything takes back what it said"
    );
    assert_eq!(second.read_found(), 8);
    assert_eq!(files(dir.path(), "blocks"), 2, "what no other relies on went with its writer");
    // Slots that are written anew let go of what was found, but the segments are not this worker's
    // to delete at once.
    for first in (0..8).step_by(4) {
        assert!(all_ok(&second.write(first, &seeds(31 + first..35 + first))));
    }
    assert_eq!(second.object.stats().found_blocks, 0);
    eventually("garbage is left", || second.object.stats().collected == 2);
    assert_eq!(files(dir.path(), "blocks"), 2);
    assert!(all_ok(&read(&second.verified, &second.heap, &[(0, 31), (7, 38)])));
}

#[test]
fn garbage_of_crashed_writers_goes_later_and_everything_works() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = Worker::start(open_directory(dir.path()), &shared(4));
    assert!(all_ok(&crashed.write(0, &seeds(1..9))));
    eventually("no manifest", || files(dir.path(), "manifests") == 1);
    // As kill -9 does: nothing is taken back, nothing is said any more.
    std::fs::create_dir_all(dir.path().join("other")).unwrap();
    let before = dir.path().join("other/model");
    copy_tree(&dir.path().join("model"), &before);
    drop(crashed);
    let bucket = dir.path().join("other");
    let none = ObjectOptions {
        sharing: Some(Sharing {
            provenance: Provenance { fingerprint: 1, ..PROVENANCE },
            ..sharing()
        }),
        ..shared(4)
    };
    // A worker to whom the blocks mean nothing.
    let other = Worker::start(open_directory(&bucket), &none);
    assert!(all_ok(&other.write(0, &seeds(51..55))));
    assert_eq!(files(&bucket, "blocks"), 3);
    eventually("garbage is left", || other.object.stats().collected == 2);
    assert_eq!((files(&bucket, "blocks"), files(&bucket, "manifests")), (1, 1));
    assert!(all_ok(&read(&other.verified, &other.heap, &[(0, 51), (3, 54)])));
    let late = Worker::start(open_directory(&bucket), &shared(4));
    assert!(late.found.blocks.is_empty());
    assert!(all_ok(&late.write(0, &seeds(1..5))));
}

fn copy_tree(from: &FilePath, to: &FilePath) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).map(drop).unwrap();
        }
    }
}

#[test]
fn an_overfull_bucket_loses_the_oldest_unused_segments() {
    let dir = tempfile::tempdir().unwrap();
    let first = Worker::start(open_directory(dir.path()), &shared(4));
    for part in 0..6 {
        assert!(all_ok(&first.write(part * 4, &seeds(part * 4 + 1..part * 4 + 5))));
    }
    drop(first);
    std::fs::remove_dir_all(dir.path().join("model/tp0/manifests")).unwrap();
    let segment = segment_files(dir.path())[0].metadata().unwrap().len();
    let limits = Sharing {
        collect_after: Duration::from_hours(1),
        collect_above: Some(segment * 3),
        ..sharing()
    };
    let stranger = Sharing { provenance: Provenance { fingerprint: 5, ..PROVENANCE }, ..limits };
    let stranger = Worker::start(
        open_directory(dir.path()),
        &ObjectOptions { sharing: Some(stranger), ..shared(4) },
    );
    eventually("it is still too full", || stranger.object.stats().collected == 3);
    std::thread::sleep(RENEWAL * 25);
    assert_eq!((stranger.object.stats().collected, files(dir.path(), "blocks")), (3, 3));
    drop(stranger);
    let late = Worker::start(open_directory(dir.path()), &shared(4));
    assert_eq!((late.found.blocks.len(), late.read_found()), (12, 12), "the newest three are left");
}

#[test]
fn a_manifest_that_nobody_understands_holds_everything_back() {
    let dir = tempfile::tempdir().unwrap();
    let first = Worker::start(open_directory(dir.path()), &shared(4));
    assert!(all_ok(&first.write(0, &seeds(1..5))));
    drop(first);
    let manifests = dir.path().join("model/tp0/manifests");
    std::fs::remove_dir_all(&manifests).unwrap();
    std::fs::create_dir_all(&manifests).unwrap();
    std::fs::write(manifests.join("00000000000000000000000000000001.kvman"), b"from the future")
        .unwrap();
    let stranger = Sharing { provenance: Provenance { fingerprint: 5, ..PROVENANCE }, ..sharing() };
    let stranger = Worker::start(
        open_directory(dir.path()),
        &ObjectOptions { sharing: Some(stranger), ..shared(4) },
    );
    std::thread::sleep(RENEWAL * 40);
    assert_eq!((stranger.object.stats().collected, files(dir.path(), "blocks")), (0, 1));
    std::fs::remove_file(manifests.join("00000000000000000000000000000001.kvman")).unwrap();
    eventually("garbage is left", || stranger.object.stats().collected == 1);
}

#[test]
fn segments_that_are_gone_are_misses_and_are_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let first = Worker::start(open_directory(dir.path()), &shared(4));
    assert!(all_ok(&first.write(0, &seeds(1..9))));
    let second = Worker::start(open_directory(dir.path()), &shared(4));
    segment_files(dir.path()).iter().for_each(|file| std::fs::remove_file(file).unwrap());
    let blocks: Vec<_> = second.found.blocks.iter().map(|found| (found.slot.0, 0)).collect();
    assert_eq!(kinds(&read(&second.verified, &second.heap, &blocks)), [Some(CopyErrorKind::Io); 8]);
    assert!(all_ok(&second.write(0, &seeds(1..9))));
    assert!(all_ok(&read(&second.verified, &second.heap, &[(0, 1), (7, 8)])));
    assert_eq!(Worker::start(open_directory(dir.path()), &shared(4)).read_found(), 8);
}

#[test]
fn a_store_that_cannot_list_is_unused_until_it_can() {
    for status in [500, 403, 503] {
        let server = Server::start();
        let first = Worker::start(server.open(), &shared(4));
        assert!(all_ok(&first.write(0, &seeds(1..9))));
        let store = server.open();
        server.feel(super::server::Mood::Refuses(status));
        let limited = ObjectOptions { operation_limit: Duration::from_millis(500), ..shared(4) };
        let second = Worker::start(store, &limited);
        assert_eq!((second.found.standing, second.found.blocks.len()), (EpochStanding::Unknown, 0));
        assert_eq!(kinds(&second.write(0, &seeds(11..15))), [Some(CopyErrorKind::Unavailable); 4]);
        server.feel(super::server::Mood::Well);
        eventually("it does not find out", || {
            second.object.epoch_standing() == EpochStanding::Current(3)
        });
        assert!(all_ok(&second.write(0, &seeds(11..15))));
        assert!(all_ok(&read(&second.verified, &second.heap, &[(0, 11), (3, 14)])));
        let third = Worker::start(server.open(), &shared(4));
        assert!(third.has(8) && third.has(14));
        assert_eq!(third.read_found(), 12);
    }
}

#[test]
fn what_another_has_stored_meanwhile_is_not_stored_again() {
    let dir = tempfile::tempdir().unwrap();
    let start = || Worker::start(open_directory(dir.path()), &shared(4));
    let (first, second) = (start(), start());
    // It learns what there is, and has room for none of it.
    second.object.keep_looking(Arc::new(TakeNone));
    assert!(all_ok(&first.write(0, &seeds(1..9))));
    // It takes a look until this is known.
    let mut slot = 0;
    eventually("it was stored again and again", || {
        second.object.stats().linked_blocks == 8 || {
            assert!(all_ok(&second.write(slot, &seeds(1..9))));
            std::thread::sleep(RENEWAL);
            false
        }
    });
    let stored = second.object.stats().segments;
    assert!(all_ok(&second.write(slot, &seeds(1..9))));
    assert_eq!(second.object.stats().segments, stored);
    let blocks: Vec<_> = (1..9).map(|seed| (seed - 1, seed)).collect();
    assert!(all_ok(&read(&second.verified, &second.heap, &blocks)));
    // What cannot be had from there is stored by a worker that has it.
    std::thread::sleep(RENEWAL * 2);
    drop(first);
    for file in segment_files(dir.path()) {
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[5] ^= 1;
        std::fs::write(&file, bytes).unwrap();
    }
    let results = kinds(&read(&second.verified, &second.heap, &blocks));
    assert!(results.contains(&Some(CopyErrorKind::Corrupt)), "{results:?}");
    slot += 8;
    assert!(all_ok(&second.write(slot, &seeds(1..9))));
    let blocks: Vec<_> = blocks.iter().map(|&(at, seed)| (at + slot, seed)).collect();
    assert!(all_ok(&read(&second.verified, &second.heap, &blocks)));
}

/// The goal: at most a fiftieth of the requests of one object for each block.
#[test]
fn segments_take_few_requests() {
    const BLOCKS: u32 = 1024;
    let (server, heap) = (Server::start(), Heap::new());
    let options = ObjectOptions {
        sharing: Some(Sharing { renewal: Duration::from_mins(1), ..sharing() }),
        ..shared(256)
    };
    let backend = backend(server.open(), &heap, &options);
    backend.discover(0);
    let traffic = backend.traffic();
    let requests = || -> u64 {
        let of = |kind| RequestOutcome::ALL.map(|outcome| traffic.requests(kind, outcome));
        RequestKind::ALL.into_iter().flat_map(of).sum()
    };
    for first in (0..BLOCKS).step_by(SLOTS as usize * 4) {
        // A segment of 16 MiB holds 256 blocks of 64 KiB; the blocks of this test are smaller,
        // their number counts.
        let ops = (0..256).map(|at| {
            op(slot_at(Tier::Host, at % SLOTS), slot_at(Tier::Object, first + at), first + at)
        });
        assert!(all_ok(&run(&backend, ops.collect())));
    }
    let written = requests();
    for first in (0..BLOCKS).step_by(SLOTS as usize) {
        let ops = (0..SLOTS)
            .map(|at| op(slot_at(Tier::Object, first + at), slot_at(Tier::Host, at), first + at));
        assert!(all_ok(&run(&backend, ops.collect())));
    }
    println!("{BLOCKS} blocks: {written} requests to write, {} to read", requests() - written);
    assert!(requests() * 50 <= u64::from(2 * BLOCKS), "{traffic:?}");
    assert_eq!(traffic.requests(RequestKind::Put, RequestOutcome::Failed), 0);
    assert!(traffic.bytes_sent() >= u64::from(BLOCKS) * BLOCK as u64);
    assert!(traffic.bytes_received() >= u64::from(BLOCKS) * BLOCK as u64);
}

/// Takes in all that comes.
#[derive(Default)]
pub(super) struct TakeAll(pub(super) Mutex<Vec<BlockKey>>);

/// Has no slot for anything.
pub(super) struct TakeNone;

impl TakeIn for TakeNone {
    fn take_in(
        &self,
        _provenance: Provenance,
        found: &[FoundBlock],
        _stand_for: &mut dyn FnMut(usize, SlotId),
    ) -> Vec<Discovery> {
        vec![Discovery::Waits; found.len()]
    }

    fn follow(&self, _: u64) -> bool {
        true
    }
}

impl TakeIn for TakeAll {
    fn take_in(
        &self,
        _: Provenance,
        found: &[FoundBlock],
        stand_for: &mut dyn FnMut(usize, SlotId),
    ) -> Vec<Discovery> {
        let mut taken = self.0.lock();
        for (at, found) in found.iter().enumerate() {
            stand_for(at, SlotId(taken.len() as u32));
            taken.push(found.block);
        }
        vec![Discovery::Taken; found.len()]
    }

    fn follow(&self, _: u64) -> bool {
        true
    }
}

#[test]
fn looking_reads_each_segment_once() {
    let server = Server::start();
    // Nothing but looks goes on.
    let looking = Sharing { renewal: Duration::from_hours(1), ..sharing() };
    let looking = ObjectOptions { sharing: Some(looking), ..shared(4) };
    let first = Worker::start(server.open(), &looking);
    let second = Worker::start(server.open(), &looking);
    let all = Arc::new(TakeAll::default());
    second.object.keep_looking(Arc::clone(&all) as Arc<dyn TakeIn>);
    assert!(all_ok(&first.write(0, &seeds(1..21))));
    eventually("not all was found", || all.0.lock().len() == 20);
    let blocks: Vec<_> =
        (0..).zip(all.0.lock().iter().map(|block| (block.hash >> 64) as u32)).collect();
    assert!(all_ok(&read(&second.verified, &second.heap, &blocks)));
    let gets = || second.object.traffic().requests(RequestKind::Get, RequestOutcome::Done);
    let before = gets();
    std::thread::sleep(RENEWAL * 6);
    // A look is a listing.
    assert_eq!(gets(), before);
    assert_eq!(all.0.lock().len(), 20, "once");
}

#[test]
fn failed_fetches_are_found_when_the_store_is_well() {
    let server = Server::start();
    let first = Worker::start(server.open(), &shared(4));
    let second = Worker::start(server.open(), &shared(4));
    let all = Arc::new(TakeAll::default());
    second.object.keep_looking(Arc::clone(&all) as Arc<dyn TakeIn>);
    server.feel(super::server::Mood::CutsOff);
    first.write(0, &seeds(1..9));
    std::thread::sleep(RENEWAL * 6);
    server.feel(super::server::Mood::Well);
    assert!(all_ok(&first.write(20, &seeds(9..13))));
    eventually("what is new is not found", || all.0.lock().contains(&key(12)));
}
