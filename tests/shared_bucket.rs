//! Workers that share a bucket: each starts warm from what others stored, and none takes away what
//! another reads.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvbm::{CacheEvent, CachedBlock, ErrorKind, Fingerprint, Manager, Options, StoreReason, Tier};
use kvbm_settings::{OlderEpoch, Settings};
use kvbm_tests::bucket::{ALL, BLOCKS, CHAINS, fill, known, serve};
use kvbm_tests::rig::{chain, chaos, files_of, hash, wait_until};
use kvbm_tests::{engine, process};
use prometheus::Registry;

use process::Process;

/// A worker is taken for gone after half a second.
const RENEWAL_MS: u64 = 50;
const LIMIT: Duration = Duration::from_mins(1);

fn over_bucket(bucket: &Path) -> Settings {
    let mut settings = engine::settings(4096, 16, 16);
    engine::keep_in_bucket(&mut settings, 64 << 10, bucket);
    (settings.object.renewal_ms, settings.object.discover_ms) = (RENEWAL_MS, RENEWAL_MS);
    settings
}

fn open(settings: Settings, fingerprint: Option<Fingerprint>) -> Manager {
    engine::open_with(settings, Options { fingerprint, ..Options::default() }).unwrap()
}

fn worker(bucket: &Path) -> Manager {
    open(over_bucket(bucket), Some(engine::in_epoch("one", 0)))
}

/// One that counts no epochs.
fn following(bucket: &Path) -> Manager {
    let mut settings = over_bucket(bucket);
    settings.object.older_epoch = OlderEpoch::Follow;
    open(settings, Some(engine::in_epoch("one", 0)))
}

fn eventually(otherwise: &str, reached: impl Fn() -> bool) {
    wait_until(LIMIT, otherwise, reached);
}

/// What a process that a test started is: a worker that fills the bucket, until it is told or
/// killed.
#[test]
fn process() {
    let Some((_, bucket)) = process::role() else { return };
    let mut settings = over_bucket(&bucket);
    // It looks for nothing: what it found of another's it would rely on, and that would stay when
    // the other goes.
    settings.object.discover_ms = 3_600_000;
    let manager = open(settings, Some(engine::in_epoch("one", 0)));
    fill(&manager, 0..CHAINS);
    process::say("filled");
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "serve" => process::say(&serve(&manager).to_string()),
            _ => return,
        }
    }
}

/// A process that has filled the bucket.
fn start(bucket: &Path) -> Process {
    let mut process = Process::start(module_path!(), "worker", bucket);
    assert_eq!(process.hear(), "filled");
    process
}

#[test]
fn a_worker_starts_warm_from_what_a_killed_one_stored() {
    let home = tempfile::tempdir().unwrap();
    start(home.path()).kill();
    let (same, other, none) = (
        worker(home.path()),
        open(over_bucket(home.path()), Some(engine::in_epoch("two", 0))),
        open(over_bucket(home.path()), None),
    );
    assert!(known(&same) * 100 >= ALL * 95, "{} of {ALL}", known(&same));
    assert_eq!((known(&other), known(&none)), (0, 0));
    assert!(serve(&same) * 100 >= ALL * 95);
    assert_eq!((serve(&other), serve(&none)), (0, 0), "another model's blocks are no use to it");
    assert_eq!(same.admin().audit(), []);
}

#[test]
fn a_worker_starts_warm_beside_one_and_takes_nothing_away() {
    let home = tempfile::tempdir().unwrap();
    let mut first = start(home.path());
    let mut dropping = over_bucket(home.path());
    dropping.object.keep = false;
    let second = open(dropping, Some(engine::in_epoch("one", 0)));
    assert!(known(&second) * 100 >= ALL * 95);
    let before = files_of(home.path(), "kvseg");
    // What it stores goes with it, what it found stays.
    fill(&second, 100..110);
    assert!(files_of(home.path(), "kvseg").len() > before.len());
    assert_eq!(second.close(LIMIT).copies_left, 0);
    drop(second);
    // Meanwhile the first may remove files that it wrote in vain.
    let is_of_the_first = |file: &PathBuf| before.contains(file);
    eventually("what it stored is still there", || {
        files_of(home.path(), "kvseg").iter().all(is_of_the_first)
    });
    assert_eq!(first.ask("serve"), ALL.to_string());
    let third = worker(home.path());
    first.kill();
    assert!(serve(&third) * 100 >= ALL * 95);
    assert_eq!(third.admin().audit(), []);
}

#[test]
fn a_changed_segment_is_a_miss_and_is_stored_anew() {
    let home = tempfile::tempdir().unwrap();
    fill(&worker(home.path()), 0..CHAINS);
    for (at, file) in
        files_of(home.path(), "kvseg").iter().enumerate().filter(|(at, _)| at % 2 == 0)
    {
        let mut bytes = std::fs::read(file).unwrap();
        // The block, or what is said of it.
        let place = if at % 4 == 0 { 1_000 } else { bytes.len() - 20 };
        bytes[place] ^= 1;
        std::fs::write(file, bytes).unwrap();
    }
    let second = worker(home.path());
    let hits = serve(&second);
    assert!((1..ALL).contains(&hits), "{hits}");
    // A store whose blocks had changed is left alone for a moment.
    eventually("what was lost is not there again", || {
        assert!(second.drain(LIMIT).is_complete());
        serve(&second) == ALL
    });
    assert_eq!(second.admin().audit(), []);
}

#[test]
fn what_a_killed_worker_left_is_collected_and_everything_works() {
    let home = tempfile::tempdir().unwrap();
    start(home.path()).kill();
    let left = files_of(home.path(), "kvseg");
    let mut eager = over_bucket(home.path());
    eager.object.collect_after_ms = 0;
    // To the next epoch what is there means nothing.
    let next = open(eager, Some(engine::in_epoch("one", 1)));
    assert_eq!(known(&next), 0);
    fill(&next, 0..CHAINS);
    eventually("garbage is left", || left.iter().all(|file| !file.exists()));
    assert_eq!(files_of(home.path(), "kvman").len(), 1);
    assert_eq!(serve(&next), ALL);
    let late = following(home.path());
    assert_eq!(
        (late.admin().epoch(), serve(&late)),
        (1, ALL),
        "it goes on with the epoch of the others"
    );
}

#[test]
fn a_reset_holds_for_whoever_starts_later() {
    let home = tempfile::tempdir().unwrap();
    let first = worker(home.path());
    fill(&first, 0..CHAINS);
    first.reset(7).unwrap();
    let second = following(home.path());
    assert_eq!((second.admin().epoch(), known(&second)), (7, 0));
    eventually("the past is still there", || files_of(home.path(), "kvseg").is_empty());
    fill(&first, 0..CHAINS);
    assert_eq!(serve(&following(home.path())), ALL);
}

#[test]
fn a_start_in_an_older_epoch_fails_and_names_both() {
    let home = tempfile::tempdir().unwrap();
    let first = worker(home.path());
    fill(&first, 0..CHAINS);
    first.reset(7).unwrap();
    let start = |older_epoch, epoch| {
        let mut settings = over_bucket(home.path());
        settings.object.older_epoch = older_epoch;
        let options =
            Options { fingerprint: Some(engine::in_epoch("one", epoch)), ..Options::default() };
        engine::open_with(settings, options).map(|manager| manager.admin().epoch())
    };
    let error = start(OlderEpoch::Refuse, 3).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let text = error.to_string();
    assert!(
        ["epoch 7", "epoch 3", "object.older_epoch"].iter().all(|part| text.contains(part)),
        "{text}"
    );
    assert_eq!(start(OlderEpoch::Keep, 3).unwrap(), 3);
    assert_eq!(start(OlderEpoch::Follow, 3).unwrap(), 7);
    assert_eq!(start(OlderEpoch::Refuse, 7).unwrap(), 7);
    assert_eq!(start(OlderEpoch::Refuse, 8).unwrap(), 8);
}

#[test]
fn a_start_without_readable_epochs_says_so_and_follows_later() {
    let home = tempfile::tempdir().unwrap();
    let first = worker(home.path());
    first.reset(7).unwrap();
    fill(&first, 0..CHAINS);
    // All that it asks of the store is refused, but for the probe that every start makes.
    let chaos = chaos(&["object:503@0s+1h"]);
    chaos.start();
    let mut settings = over_bucket(home.path());
    settings.object.older_epoch = OlderEpoch::Follow;
    let options = Options {
        fingerprint: Some(engine::in_epoch("one", 0)),
        media_layer: Some(chaos.layer()),
        ..Options::default()
    };
    let second = engine::open_with(settings, options).unwrap();
    assert_eq!((second.admin().epoch(), known(&second)), (0, 0));
    let degraded = second.admin().readiness().degraded;
    assert!(
        degraded
            .iter()
            .any(|degraded| degraded.what == "object" && degraded.why.contains("epochs")),
        "{degraded:?}"
    );
    engine::serve(&second, &chain(500, BLOCKS));
    chaos.heal();
    hears(&second, ALL);
    // A tier that refused what was to be flushed there is left alone for a moment.
    eventually("what is there is not served", || serve(&second) == ALL);
    assert_eq!((second.admin().epoch(), second.admin().audit()), (7, vec![]));
    engine::serve(&second, &chain(600, BLOCKS));
    let stored = || second.matches(&chain(600, BLOCKS)).blocks(Tier::Object) == BLOCKS as usize;
    eventually("what it brings now is not stored", stored);
    eventually("it is still degraded", || second.admin().readiness().degraded.is_empty());
}

/// The goal: at most a fiftieth of the requests of one object for each block.
#[test]
fn blocks_of_64_kib_take_few_requests() {
    const LONG: u32 = 256;
    let home = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(64 << 10, LONG.into(), 4 * u64::from(LONG));
    settings.object.url = Some(format!("file://{}", home.path().display()));
    settings.object.keep = true;
    // What is stored since it has waited for long would depend on who gets a processor: a quarter
    // of the host tier comes together, or more.
    (settings.flush.interval_ms, settings.flush.dirty_watermark) = (3_600_000, 0.25);
    let chains: Vec<Vec<_>> =
        (0..4).map(|n| (0..LONG).map(|block| hash(10_000 * n + block)).collect()).collect();
    let blocks = chains.len() * LONG as usize;
    let requests = |registry: &Registry| -> u64 {
        let families = registry.gather();
        let family = families.iter().find(|family| family.name() == "kvbm_object_requests_total");
        family.map_or(0, |family| {
            family.get_metric().iter().map(|metric| metric.get_counter().get_value() as u64).sum()
        })
    };
    let run = |hits: usize| {
        let registry = Registry::new();
        let options = Options {
            fingerprint: Some(engine::in_epoch("one", 0)),
            registry: registry.clone(),
            ..Options::default()
        };
        let manager = engine::block_on(Manager::open(settings.clone(), options)).unwrap();
        let served: usize = chains.iter().map(|chain| engine::serve(&manager, chain).hit).sum();
        assert!(manager.drain(LIMIT).is_complete());
        assert_eq!(served, hits);
        drop(manager);
        requests(&registry)
    };
    let (written, read) = (run(0), run(blocks));
    println!(
        "{blocks} blocks of 64 KiB: {written} requests to store them, {read} to find and read them"
    );
    // One object for each block is a request to store it, and one to read it. The goal is 50, and
    // holds; a machine that is slow says meanwhile that it lives.
    assert!((written + read) * 40 <= 2 * blocks as u64, "{written} {read}");
}

#[test]
fn what_another_stored_is_not_stored_again() {
    let home = tempfile::tempdir().unwrap();
    let (first, second) = (worker(home.path()), worker(home.path()));
    fill(&first, 0..CHAINS);
    let stored = files_of(home.path(), "kvseg");
    hears(&second, ALL);
    fill(&second, 0..CHAINS);
    assert_eq!(files_of(home.path(), "kvseg"), stored);
    assert_eq!(serve(&second), ALL);
}

/// Waits until a manager knows this many blocks of the bucket.
fn hears(manager: &Manager, blocks: usize) {
    eventually("what another stored is not found", || known(manager) == blocks);
}

#[test]
fn what_another_stores_is_found_while_both_live() {
    let home = tempfile::tempdir().unwrap();
    let (first, second) = (worker(home.path()), worker(home.path()));
    let other = open(over_bucket(home.path()), Some(engine::in_epoch("two", 0)));
    assert_eq!(known(&second), 0);
    fill(&first, 0..CHAINS / 2);
    hears(&second, ALL / 2);
    assert_eq!(serve(&second), ALL / 2, "from the bucket");
    // The other way round, and behind what was found.
    fill(&second, 0..CHAINS);
    hears(&first, ALL);
    assert_eq!((serve(&first), serve(&second)), (ALL, ALL));
    assert_eq!(known(&other), 0, "another model's blocks are no use to it");
    assert_eq!((first.admin().audit(), second.admin().audit()), (vec![], vec![]));
}

#[test]
fn listeners_hear_of_what_another_stores() {
    let home = tempfile::tempdir().unwrap();
    let (first, second) = (worker(home.path()), worker(home.path()));
    let mut events = second.events();
    fill(&first, 0..1);
    hears(&second, BLOCKS as usize);
    let told: Vec<_> = std::iter::from_fn(|| events.try_next()).collect();
    let hashes = chain(0, BLOCKS);
    let parents = std::iter::once(None).chain(hashes.iter().copied().map(Some));
    let restored = hashes.iter().zip(parents).map(|(&hash, parent)| CacheEvent::Stored {
        block: CachedBlock { tier: Tier::Object, group: 0, hash, parent },
        request: None,
        reason: StoreReason::Restored,
    });
    assert_eq!(told, restored.collect::<Vec<_>>());
}

#[test]
fn a_chain_that_another_continues_is_found_to_its_end() {
    let home = tempfile::tempdir().unwrap();
    let (first, second) = (worker(home.path()), worker(home.path()));
    let whole = chain(0, BLOCKS);
    let (root, most) = (&whole[..3], &whole[..9]);
    engine::serve(&first, root);
    assert!(first.drain(LIMIT).is_complete());
    eventually("the root is not found", || second.matches(root).blocks(Tier::Object) == 3);
    engine::serve(&second, most);
    assert!(second.drain(LIMIT).is_complete());
    eventually("the rest is not found", || first.matches(most).blocks(Tier::Object) == 9);
    let served = engine::serve(&first, &whole);
    assert_eq!((served.hit, served.wrong), (9, 0));
    assert_eq!((first.admin().audit(), second.admin().audit()), (vec![], vec![]));
}

#[test]
fn only_what_fits_in_the_present_epoch_is_found() {
    let home = tempfile::tempdir().unwrap();
    let first = worker(home.path());
    let mut small = over_bucket(home.path());
    small.object.capacity = Some(kvbm_settings::Capacity::Blocks(u64::from(BLOCKS) * 3));
    let small = open(small, Some(engine::in_epoch("one", 0)));
    let past = worker(home.path());
    past.reset(3).unwrap();
    fill(&first, 0..CHAINS);
    eventually("a small tier is not filled", || known(&small) == (BLOCKS * 3) as usize);
    std::thread::sleep(Duration::from_millis(RENEWAL_MS * 4));
    assert_eq!((known(&small), known(&past)), ((BLOCKS * 3) as usize, 0));
    assert!(serve(&small) >= (BLOCKS * 3) as usize);
    assert_eq!((small.admin().audit(), past.admin().audit()), (vec![], vec![]));
    // What goes makes room, and everything works.
    fill(&small, 0..CHAINS);
    assert_eq!(small.admin().audit(), []);
}

/// A worker with budgets whose own upkeep asks for next to nothing, and its metrics.
fn thrifty(
    bucket: &Path,
    change: impl FnOnce(&mut kvbm_settings::ObjectSettings),
) -> (Manager, Registry) {
    let mut settings = over_bucket(bucket);
    (settings.object.renewal_ms, settings.object.discover_ms) = (60_000, 60_000);
    settings.object.budget_period_ms = 4_000;
    change(&mut settings.object);
    let registry = Registry::new();
    let options = Options {
        fingerprint: Some(engine::in_epoch("one", 0)),
        registry: registry.clone(),
        ..Options::default()
    };
    (engine::open_with(settings, options).unwrap(), registry)
}

/// How often a budget refused something, and what is left of it.
fn budget(registry: &Registry, name: &str) -> (u64, Option<f64>) {
    let families = registry.gather();
    let metric = |family: &str| {
        let family = families.iter().find(|found| found.name() == family)?;
        family.get_metric().iter().find(|metric| metric.get_label()[0].value() == name).cloned()
    };
    let refused = metric("kvbm_object_budget_refusals_total")
        .map_or(0.0, |found| found.get_counter().get_value());
    let left = metric("kvbm_object_budget_left").map(|found| found.get_gauge().get_value());
    (refused as u64, left)
}

#[test]
fn writes_beyond_the_budget_wait_until_there_is_some() {
    let home = tempfile::tempdir().unwrap();
    let (manager, registry) = thrifty(home.path(), |object| object.put_budget = 12);
    assert!(budget(&registry, "puts").1.is_some_and(|left| left > 0.0));
    for number in 0..CHAINS {
        engine::serve(&manager, &chain(number, BLOCKS));
    }
    // What could not be flushed in time was dropped, or is flushed by and by.
    assert!(manager.drain(LIMIT).is_complete());
    fill(&manager, 0..CHAINS);
    let (refused, left) = budget(&registry, "puts");
    assert!(refused > 0 && left.is_some(), "{refused} {left:?}");
    assert_eq!(budget(&registry, "gets"), (0, None), "there is no limit");
    assert!(files_of(home.path(), "kvseg").len() >= CHAINS as usize / 2);
    assert_eq!((known(&manager), manager.admin().audit()), (ALL, vec![]));
    assert_eq!(serve(&manager), ALL, "what is read has another budget");
}

#[test]
fn reads_beyond_the_budget_are_misses_until_there_is_some() {
    let home = tempfile::tempdir().unwrap();
    fill(&worker(home.path()), 0..CHAINS);
    let gets: fn(&mut kvbm_settings::ObjectSettings) = |object| object.get_budget = 3 * CHAINS;
    let bytes: fn(&mut kvbm_settings::ObjectSettings) =
        |object| object.byte_budget = Some(kvbm_settings::Capacity::Bytes(2_000_000));
    for change in [gets, bytes] {
        let (manager, registry) = thrifty(home.path(), change);
        let refused = || budget(&registry, "gets").0 + budget(&registry, "bytes").0;
        assert!(known(&manager) * 100 >= ALL * 95);
        let began = Instant::now();
        let mut hits = ALL;
        while refused() == 0 && began.elapsed() < LIMIT {
            hits = serve(&manager);
        }
        assert!(hits < ALL && refused() > 0, "{hits} of {ALL}");
        // It fills up while no request asks; the tier is not left alone any more by then.
        eventually("what is there is not served again", || {
            std::thread::sleep(Duration::from_secs(5));
            serve(&manager) == ALL
        });
        assert_eq!((known(&manager), manager.admin().audit()), (ALL, vec![]));
    }
}

/// A worker whose blocks are encrypted with these keys: `A` and `B` stand for two.
fn sealed_worker(bucket: &Path, keys: &str) -> Manager {
    let keys = keys
        .replace('A', &"0123456789abcdef".repeat(4))
        .replace('B', &"fedcba9876543210".repeat(4));
    let mut settings = over_bucket(bucket);
    settings.encryption.key = Some(keys);
    open(settings, Some(engine::in_epoch("one", 0)))
}

/// What was found at the start: blocks, and segments that were not used.
fn found(manager: &Manager) -> (usize, u64) {
    let report =
        manager.admin().recovered().iter().find(|report| report.tier == Tier::Object).unwrap();
    (report.blocks, report.damaged)
}

fn serves_all(manager: &Manager) -> bool {
    (0..CHAINS).all(|number| {
        let served = engine::serve(manager, &chain(number, BLOCKS));
        assert_eq!(served.wrong, 0);
        served.hit == BLOCKS as usize
    })
}

#[test]
fn workers_with_one_key_share_an_encrypted_bucket() {
    let bucket = tempfile::tempdir().unwrap();
    let first = sealed_worker(bucket.path(), "1:A");
    fill(&first, 0..CHAINS);
    let second = sealed_worker(bucket.path(), "1:A");
    assert_eq!((known(&second), found(&second)), (ALL, (ALL, 0)));
    assert!(serves_all(&second));
    // One that joins while the main key is being exchanged reads all, and what it stores the others
    // of both keys do.
    let third = sealed_worker(bucket.path(), "2:B,1:A");
    assert_eq!(known(&third), ALL);
    assert!(serves_all(&third));
    let more = chain(CHAINS, BLOCKS);
    engine::serve(&third, &more);
    assert!(third.drain(LIMIT).is_complete());
    let fourth = sealed_worker(bucket.path(), "1:A,2:B");
    assert_eq!((known(&fourth), fourth.matches(&more).blocks(Tier::Object)), (ALL, more.len()));
    assert!(serves_all(&fourth));
}

#[test]
fn another_key_sees_nothing_says_so_and_works() {
    let bucket = tempfile::tempdir().unwrap();
    let first = sealed_worker(bucket.path(), "1:A");
    fill(&first, 0..CHAINS);
    for keys in ["2:B", "1:B"] {
        let stranger = sealed_worker(bucket.path(), keys);
        let (blocks, unread) = found(&stranger);
        assert_eq!((known(&stranger), blocks), (0, 0), "{keys}");
        assert!(unread > 0, "{keys}: it says so");
        fill(&stranger, 0..CHAINS);
        assert_eq!(known(&stranger), ALL, "{keys}: what it stores it finds");
        assert!(serves_all(&stranger));
        assert!(stranger.close(LIMIT).is_complete());
    }
    // And the first one lost nothing.
    assert!(serves_all(&first));
    let again = sealed_worker(bucket.path(), "1:A");
    assert_eq!(known(&again), ALL);
    assert!(serves_all(&again));
}
