//! Starts on stores that refuse, are slow or answer in part: never an older epoch, never a lost
//! key, and then they heal.

use super::sharing::{RENEWAL, TakeAll, Worker, following, seeds, shared};
use super::*;
use crate::MediaLayer as _;
use crate::chaos::{Chaos, Kind, Schedule};
use crate::object::{EpochStanding, OlderEpoch, Sharing, TakeIn};
use crate::sealed::{FoundKey, KeyId, KeyStore, RECORD_BYTES};

/// A request that takes longer is given up. Nothing here depends on how long that is.
const LIMIT: Duration = Duration::from_millis(150);

fn impatient(options: ObjectOptions) -> ObjectOptions {
    let sharing = options
        .sharing
        .map(|sharing| Sharing { collect_after: Duration::from_hours(1), ..sharing });
    ObjectOptions { operation_limit: LIMIT, sharing, ..options }
}

/// A bucket in its ninth epoch, with blocks of that one, blocks of an earlier one, and a key.
struct Bucket {
    objects: Arc<InMemory>,
}

/// Of tenant 7.
const KEY: KeyId = [0, 0, 0, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];

fn key_path() -> Path {
    Path::from(format!("model/tp0/keys/0000000008/{}.kvkey", hex::encode(KEY)))
}

fn wrapped_key() -> Vec<u8> {
    let mut bytes = vec![7; RECORD_BYTES];
    bytes[..4].copy_from_slice(b"KVK1");
    bytes
}

const PAST: std::ops::Range<u32> = 1..9;
const PRESENT: std::ops::Range<u32> = 21..25;

impl Bucket {
    fn new() -> Self {
        let objects = Arc::new(InMemory::new());
        let open = || Store::with_client(Arc::clone(&objects) as _).unwrap();
        // Nothing deletes what is past: it is there to be found by mistake.
        let past = Worker::start(open(), &shared(4));
        assert!(all_ok(&past.write(0, &seeds(PAST))));
        drop(past);
        let present = Worker::start(open(), &shared(4));
        present.object.begin_epoch(9, 0).unwrap();
        assert!(all_ok(&present.write(0, &seeds(PRESENT))));
        let put = async { objects.put(&key_path(), wrapped_key().into()).await };
        put.now_or_never().unwrap().unwrap();
        Self { objects }
    }

    fn has_its_key(&self) -> bool {
        let bytes = async { self.objects.get(&key_path()).await?.bytes().await };
        bytes.now_or_never().unwrap().is_ok_and(|bytes| bytes == wrapped_key())
    }

    fn open(&self) -> Store {
        Store::with_client(Arc::clone(&self.objects) as _).unwrap()
    }
}

/// One start, with a fault at its requests from number `spared` on; `None`: it makes no more than
/// that. Returns whether it knew of the epochs before all was well again.
fn start(bucket: &Bucket, options: &ObjectOptions, script: &str, spared: u64) -> Option<bool> {
    let chaos = Chaos::new(Schedule::scripted([script.parse().unwrap()]));
    chaos.spare(spared);
    chaos.start();
    let store = chaos.around_store(bucket.open());
    let keys = store.keys("model/tp0");
    let asked = keys.find(KEY);
    assert!(
        matches!(asked, Err(_) | Ok(FoundKey::Live(_))),
        "{script} {spared}: a key is lost: {asked:?}"
    );
    let worker = Worker::start(store, options);
    let all = Arc::new(TakeAll::default());
    worker.object.keep_looking(Arc::clone(&all) as Arc<dyn TakeIn>);
    let was_hit = !chaos.injected().is_empty();

    let found = worker.found();
    let knew = found.standing == EpochStanding::Current(9);
    assert!(
        knew || found.standing == EpochStanding::Unknown,
        "{script} {spared}: {:?}",
        found.standing
    );
    let is_present = |block: &BlockKey| PRESENT.contains(&((block.hash >> 64) as u32));
    assert!(
        found.blocks.iter().all(|found| is_present(&found.block)),
        "{script} {spared}: {found:?}"
    );
    if !knew
        && worker.object.epoch_standing() == EpochStanding::Unknown
        && !chaos_may_have_passed(script)
    {
        let refused = worker.write(40, &seeds(41..43));
        assert_eq!(kinds(&refused), [Some(CopyErrorKind::Unavailable); 2], "{script} {spared}");
    }

    // And then it heals, and everything works.
    chaos.heal();
    eventually("it does not find out", || {
        worker.object.epoch_standing() == EpochStanding::Current(9)
    });
    let there = || {
        found.blocks.iter().map(|found| found.block).chain(all.0.lock().iter().copied()).collect()
    };
    eventually("not all of the epoch is found", || {
        let there: Vec<BlockKey> = there();
        seeds(PRESENT).into_iter().all(|seed| there.contains(&key(seed)))
    });
    let there: Vec<BlockKey> = there();
    assert!(there.iter().all(is_present), "{script} {spared}: {there:?}");
    assert_eq!(worker.read_found(), found.blocks.len());
    assert!(all_ok(&worker.write(50, &seeds(51..55))));
    assert!(all_ok(&worker.read(&[(50, 51), (53, 54)])));
    assert!(matches!(keys.find(KEY), Ok(FoundKey::Live(_))), "{script} {spared}");
    assert!(bucket.has_its_key(), "{script} {spared}: a key is lost");
    was_hit.then_some(knew)
}

/// Whether a fault ends on its own, so that a worker may know of the epochs at any moment.
fn chaos_may_have_passed(script: &str) -> bool {
    script.ends_with("x1")
}

/// Every request of a start in turn; `extent`: that one alone, or all from there on.
fn every_request(kind: Kind, extent: &str) {
    for options in [impatient(following(4)), ninth()] {
        let (mut spared, mut knew) = (0, 0);
        // Of a bucket of its own each time: what one start stores is not there for the next.
        while let Some(did_know) =
            start(&Bucket::new(), &options, &format!("object:{kind}@0s+1h{extent}"), spared)
        {
            knew += u64::from(did_know);
            spared += 1;
        }
        assert!(spared >= 4, "{kind}{extent}: a start asks for keys, epochs, segments and footers");
        assert!(knew > 0, "{kind}{extent}: the last requests are not about epochs");
    }
}

/// A worker that says itself which epoch it is in.
fn ninth() -> ObjectOptions {
    let options = impatient(shared(4));
    let sharing = options.sharing.map(|sharing| Sharing {
        provenance: crate::object::segment::Provenance { epoch: 9, ..sharing.provenance },
        ..sharing
    });
    ObjectOptions { sharing, ..options }
}

#[test]
fn one_refused_request_of_a_start_brings_no_older_epoch() {
    every_request(Kind::Http503, " x1");
}

#[test]
fn a_store_refusing_from_any_request_brings_no_older_epoch() {
    every_request(Kind::Http503, "");
}

#[test]
fn one_hanging_request_of_a_start_brings_no_older_epoch() {
    every_request(Kind::Hang, " x1");
}

#[test]
fn a_store_hanging_from_any_request_brings_no_older_epoch() {
    every_request(Kind::Hang, "");
}

#[test]
fn one_answer_in_part_brings_no_older_epoch() {
    every_request(Kind::Short, " x1");
}

#[test]
fn answers_in_part_from_any_request_bring_no_older_epoch() {
    every_request(Kind::Short, "");
}

#[test]
fn a_worker_behind_the_buckets_epoch_stores_and_finds_nothing() {
    let bucket = Bucket::new();
    let behind = Worker::start(bucket.open(), &impatient(shared(4)));
    assert_eq!(
        (behind.found().standing, behind.found().blocks.len()),
        (EpochStanding::Behind(9), 0)
    );
    assert_eq!(kinds(&behind.write(0, &seeds(31..33))), [Some(CopyErrorKind::Unavailable); 2]);
    let error = behind.object.begin_epoch(5, 0).unwrap_err();
    assert!(
        error.to_string().contains("epoch 9") && error.to_string().contains("epoch 5"),
        "{error}"
    );
    assert_eq!(kinds(&behind.write(0, &seeds(31..33))), [Some(CopyErrorKind::Unavailable); 2]);
    behind.object.begin_epoch(9, 0).unwrap();
    assert!(all_ok(&behind.write(0, &seeds(31..33))));
    assert_eq!(Worker::start(bucket.open(), &impatient(following(4))).read_found(), 6);
}

#[test]
fn a_worker_in_an_older_epoch_finds_only_its_blocks() {
    let bucket = Bucket::new();
    let options = impatient(shared(4));
    let sharing =
        options.sharing.map(|sharing| Sharing { older_epoch: OlderEpoch::Keep, ..sharing });
    let kept = Worker::start(bucket.open(), &ObjectOptions { sharing, ..options });
    assert_eq!((kept.found().standing, kept.read_found()), (EpochStanding::Current(3), 8));
    assert!(all_ok(&kept.write(20, &seeds(61..63))));
    let others = Worker::start(bucket.open(), &impatient(following(4)));
    assert_eq!(
        (others.found().epoch, others.read_found()),
        (9, 4),
        "for others the bucket's is the ninth"
    );
}

#[test]
fn nothing_is_stored_in_an_epoch_unknown_to_the_bucket() {
    let objects = Arc::new(InMemory::new());
    let chaos = Chaos::new(Schedule::scripted(["object.write:503@0s+1h".parse().unwrap()]));
    let store = chaos.around_store(Store::with_client(Arc::clone(&objects) as _).unwrap());
    let worker = Worker::start(store, &impatient(shared(4)));
    assert!(all_ok(&worker.write(0, &seeds(1..5))));
    chaos.start();
    worker.object.begin_epoch(9, 0).unwrap_err();
    assert_eq!(kinds(&worker.write(10, &seeds(11..13))), [Some(CopyErrorKind::Unavailable); 2]);
    chaos.heal();
    eventually("it is not told again", || {
        worker.object.epoch_standing() == EpochStanding::Current(9)
    });
    assert!(all_ok(&worker.write(10, &seeds(11..13))));
    let late = Worker::start(Store::with_client(objects).unwrap(), &impatient(following(4)));
    assert_eq!((late.found().epoch, late.read_found()), (9, 2));
}

#[test]
fn segments_of_former_versions_are_unread_and_go_when_unused() {
    let dir = tempfile::tempdir().unwrap();
    let first = Worker::start(open_directory(dir.path()), &shared(4));
    assert!(all_ok(&first.write(0, &seeds(1..5))));
    drop(first);
    let former = dir.path().join("model/tp0/segments");
    std::fs::create_dir_all(&former).unwrap();
    let file = segment_files(dir.path()).remove(0);
    let moved = former.join(file.file_name().unwrap());
    std::fs::rename(&file, &moved).unwrap();
    let second = Worker::start(open_directory(dir.path()), &shared(4));
    assert_eq!(
        (second.found().standing, second.found().blocks.len()),
        (EpochStanding::Current(3), 0)
    );
    eventually("garbage is left", || !moved.exists());
    assert!(all_ok(&second.write(0, &seeds(1..5))));
    std::thread::sleep(RENEWAL);
    assert_eq!(Worker::start(open_directory(dir.path()), &shared(4)).read_found(), 4);
}
