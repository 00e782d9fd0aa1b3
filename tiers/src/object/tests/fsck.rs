//! Checking a bucket beside those that use it.

use std::time::Instant;

use super::server::Server;
use super::sharing::{RENEWAL, Worker, seeds, shared};
use super::*;
use crate::object::fsck::Problem::{Damaged, Foreign, GoneWorker, Leftover, Torn};
use crate::object::fsck::{BucketReport, FsckOptions, Problem, check_store};
use crate::object::manifest::Manifest;
use crate::object::names::SegmentNames;
use crate::object::segment::FooterKeys;
use crate::sealed::KeyRing;
use crate::testing::key_ring;

/// For workers to tell what they claim.
const PATIENCE: Duration = Duration::from_secs(30);

fn options_of(repair: bool, collect_after: Duration) -> FsckOptions {
    FsckOptions { concurrency: 3, repair, renewal: RENEWAL, collect_after, keys: None }
}

/// Only looks, and takes nothing for garbage.
fn look(store: Store) -> BucketReport {
    check_store(store, &options_of(false, Duration::from_hours(1)), Arc::new(|_, _| {})).unwrap()
}

fn repair(store: Store, collect_after: Duration) -> BucketReport {
    check_store(store, &options_of(true, collect_after), Arc::new(|_, _| {})).unwrap()
}

fn problems(report: &BucketReport) -> Vec<Problem> {
    report.findings.iter().map(|finding| finding.problem).collect()
}

fn change(path: &FilePath, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// Waits until a worker that has just begun can no longer rely on what is there.
fn outlast_grace() {
    std::thread::sleep(RENEWAL * 12);
}

fn is_sound(open: impl Fn() -> Store, check: impl Fn(Store) -> BucketReport) {
    let first = Worker::start(open(), &shared(7));
    assert!(all_ok(&first.write(0, &seeds(1..41))));
    let _second = Worker::start(open(), &shared(7));
    let until = Instant::now() + PATIENCE;
    let mut report = check(open());
    // Until both have told what they claim.
    while report.namespaces[0].unclaimed > 0 || report.namespaces[0].workers < 2 {
        assert!(Instant::now() < until, "{report:?}");
        std::thread::sleep(RENEWAL);
        report = check(open());
    }
    let [found] = &report.namespaces[..] else { panic!("{report:?}") };
    assert!(report.is_sound() && report.is_complete() && report.findings.is_empty(), "{report:?}");
    assert_eq!((found.segments, found.blocks, found.unclaimed, found.workers), (6, 40, 0, 2));
    assert_eq!((found.name.as_str(), report.strangers), ("model/tp0", 0));
}

#[test]
fn a_bucket_in_use_is_sound_in_files() {
    let dir = tempfile::tempdir().unwrap();
    is_sound(|| open_directory(dir.path()), look);
}

#[test]
fn a_bucket_in_use_is_sound_in_a_service() {
    let server = Server::start();
    // Its clock is not ours: only a writer is told its time.
    is_sound(|| server.open(), |store| repair(store, Duration::from_hours(1)));
    assert!(server.objects() > 6);
}

#[test]
fn progress_ends_at_all_bytes_and_looking_writes_nothing() {
    let server = Server::start();
    let worker = Worker::start(server.open(), &shared(7));
    assert!(all_ok(&worker.write(0, &seeds(1..41))));
    drop(worker);
    let store = server.open();
    let puts = server.requests("PUT");
    let seen = Arc::new(Mutex::new((0, 0)));
    let noted = Arc::clone(&seen);
    let on_progress = Arc::new(move |read, of| *noted.lock() = (read, of));
    let report = check_store(store, &options_of(false, Duration::ZERO), on_progress).unwrap();
    let bytes = report.namespaces[0].bytes;
    assert_eq!((*seen.lock(), server.requests("PUT")), ((bytes, bytes), puts));
}

#[test]
fn what_is_wrong_is_named_and_goes_if_unused() {
    let dir = tempfile::tempdir().unwrap();
    let killed = Worker::start(open_directory(dir.path()), &shared(4));
    for part in 0..6 {
        assert!(all_ok(&killed.write(part * 4, &seeds(part * 4 + 1..part * 4 + 5))));
    }
    drop(killed);
    let mut segments = segment_files(dir.path());
    segments.sort();
    change(&segments[0], |bytes| bytes.truncate(bytes.len() - 1));
    change(&segments[1], |bytes| *bytes.iter_mut().rev().nth(15).unwrap() = 9);
    change(&segments[2], |bytes| bytes[2 * BLOCK + 7] ^= 4);
    change(&segments[3], |bytes| *bytes.iter_mut().rev().nth(70).unwrap() ^= 1);
    let directory = segments[0].parent().unwrap().to_owned();
    std::fs::write(directory.join("notes.txt"), "mine").unwrap();
    std::fs::write(directory.join("0f.kvseg#1"), "half").unwrap();
    outlast_grace();
    let report = look(open_directory(dir.path()));
    let mut found = problems(&report);
    found.sort_by_key(ToString::to_string);
    assert_eq!(
        found,
        [Damaged, Damaged, Foreign, Foreign, Leftover, Torn, GoneWorker],
        "{report:?}"
    );
    assert!(!report.is_sound() && report.removed() == 0);
    assert_eq!(report.namespaces[0].wrong_blocks, 1);

    // No worker relies on what is damaged: it goes. What is not ours, or another version's, stays.
    let report = repair(open_directory(dir.path()), Duration::from_hours(1));
    assert_eq!(report.removed(), 5, "{report:?}");
    let again = look(open_directory(dir.path()));
    assert!(again.is_sound(), "{again:?}");
    assert_eq!(problems(&again), [Foreign, Foreign]);
    let next = Worker::start(open_directory(dir.path()), &shared(4));
    assert!(
        all_ok(&next.write(40, &seeds(41..45))) && next.read_found() == 8,
        "what is sound is of use"
    );
}

#[test]
fn a_living_workers_segments_stay_and_missing_ones_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let first = Worker::start(open_directory(dir.path()), &shared(4));
    assert!(all_ok(&first.write(0, &seeds(1..13))));
    // A busy machine delays a worker by more than half a second: this one is not gone before five.
    let mut patient = shared(4);
    patient.sharing.as_mut().unwrap().renewal = RENEWAL * 10;
    let second = Worker::start(open_directory(dir.path()), &patient);
    drop(first);
    outlast_grace();
    let mut segments = segment_files(dir.path());
    segments.sort();
    change(&segments[2], |bytes| bytes[7] ^= 4);
    std::fs::remove_file(&segments[1]).unwrap();
    let report = repair(open_directory(dir.path()), Duration::ZERO);
    // The manifest of the one that is gone the other one may have removed before.
    let mut found = problems(&report);
    found.retain(|&problem| problem != GoneWorker);
    found.sort_by_key(ToString::to_string);
    assert_eq!(found, [Damaged, Problem::Missing], "{report:?}");
    // Unless the other one removes it just now.
    assert!(
        report.findings.iter().all(|finding| !finding.removed || finding.problem == GoneWorker),
        "{report:?}"
    );
    assert!(segments[0].exists() && segments[2].exists() && !report.is_sound());
    // It heals on its own: what is missed is stored anew, and what is not needed any more goes.
    assert_eq!(second.read_found(), 7);
    assert!(all_ok(&second.write(20, &seeds(1..13))));
    drop(second);
    (0..10).for_each(|_| outlast_grace());
    repair(open_directory(dir.path()), Duration::from_hours(1));
    let last = look(open_directory(dir.path()));
    assert!(last.is_sound() && last.namespaces[0].damaged == 0, "{last:?}");
    assert_eq!(Worker::start(open_directory(dir.path()), &shared(4)).read_found(), 12);
}

#[test]
fn sealed_segments_take_their_key_a_wrong_one_removes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, impostor) = (key_ring(1, "0123456789abcdef"), key_ring(1, "fedcba9876543210"));
    let sealed = || {
        let keys = FooterKeys::new(Arc::clone(&ours), "model/tp0");
        ObjectOptions { keys: Some(keys), ..shared(4) }
    };
    let killed = Worker::start(open_directory(dir.path()), &sealed());
    for part in 0..4 {
        assert!(all_ok(&killed.write(part * 4, &seeds(part * 4 + 1..part * 4 + 5))));
    }
    drop(killed);
    outlast_grace();
    let check = |keys: Option<&Arc<KeyRing>>, is_repair, collect_after| {
        let options = FsckOptions { keys: keys.cloned(), ..options_of(is_repair, collect_after) };
        check_store(open_directory(dir.path()), &options, Arc::new(|_, _| {})).unwrap()
    };
    let hour = Duration::from_hours(1);
    let segments = |report: &BucketReport| {
        let found: Vec<_> =
            problems(report).into_iter().filter(|&problem| problem != GoneWorker).collect();
        (report.namespaces[0].blocks, found)
    };
    assert_eq!(segments(&check(Some(&ours), false, hour)), (16, vec![]));
    for keys in [None, Some(&impostor), Some(&key_ring(2, "0123456789abcdef"))] {
        let report = check(keys, true, hour);
        assert_eq!(segments(&report), (0, vec![Foreign; 4]), "{report:?}");
    }
    // Another's footer, a changed block, and a changed footer with a checksum that fits.
    let mut files = segment_files(dir.path());
    files.sort();
    std::fs::copy(&files[3], &files[0]).unwrap();
    change(&files[1], |bytes| bytes[7] ^= 4);
    // What was just written may be a worker's that is not done with it.
    outlast_grace();
    let report = check(Some(&ours), true, hour);
    assert_eq!(segments(&report), (12, vec![Damaged; 2]), "{report:?}");
    assert!(!files[0].exists() && !files[1].exists() && files[2].exists());
    // And then it heals: what is sound is of use, and goes when no worker relies on it for long
    // enough.
    let next = Worker::start(open_directory(dir.path()), &sealed());
    assert!(all_ok(&next.write(40, &seeds(41..45))) && next.read_found() == 8);
    assert!(check(Some(&ours), true, hour).is_sound());
    drop(next);
    outlast_grace();
    assert_eq!(check(Some(&ours), true, Duration::ZERO).namespaces[0].garbage, 3 + 1);
    assert!(segment_files(dir.path()).is_empty());
}

#[test]
fn garbage_goes_by_the_age_that_workers_collect_by() {
    let dir = tempfile::tempdir().unwrap();
    drop(Worker::start(open_directory(dir.path()), &shared(4)));
    let worker = Worker::start(open_directory(dir.path()), &shared(4));
    assert!(all_ok(&worker.write(0, &seeds(1..13))));
    drop(worker);
    outlast_grace();
    let kept = repair(open_directory(dir.path()), Duration::from_hours(1));
    assert_eq!((kept.namespaces[0].unclaimed, segment_files(dir.path()).len()), (3, 3));
    // A worker of another version may rely on anything.
    let manifest = dir
        .path()
        .join("model/tp0/manifests")
        .join(format!("{:032x}.kvman", SegmentNames::new().next().0));
    std::fs::create_dir_all(manifest.parent().unwrap()).unwrap();
    std::fs::write(&manifest, "from the future").unwrap();
    let held = repair(open_directory(dir.path()), Duration::ZERO);
    assert_eq!(
        (held.removed(), problems(&held)),
        (0, vec![Problem::UnreadableManifest]),
        "{held:?}"
    );
    std::fs::write(&manifest, Manifest::new(RENEWAL * 100, []).encode()).unwrap();
    let gone = repair(open_directory(dir.path()), Duration::ZERO);
    assert_eq!(
        (gone.removed(), segment_files(dir.path()).len(), gone.is_sound()),
        (3, 0, true),
        "{gone:?}"
    );
}

#[test]
fn a_store_that_cannot_be_read_is_no_damage() {
    let server = Server::start();
    drop(Worker::start(server.open(), &shared(4)));
    let store = server.open();
    server.feel(server::Mood::Refuses(403));
    let error =
        check_store(store, &options_of(false, Duration::ZERO), Arc::new(|_, _| {})).unwrap_err();
    let text = format!("{error} {:?}", std::error::Error::source(&error).map(ToString::to_string));
    assert!(text.contains("cannot check the object store") && !text.contains("secret"), "{text}");
}
