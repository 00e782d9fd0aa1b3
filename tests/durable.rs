//! What a process finds that is started after another one: all that it has is found again, and
//! nothing wrong.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvbm::{
    BlockHash, BlockKey, DurableEvent, ErrorKind, Fingerprint, Manager, OnDurable, Options,
    RecoveryReport, SlotId, Tier,
};
use kvbm_settings::Settings;
use kvbm_tests::engine;
use kvbm_tests::process::{Process, role, say};
use kvbm_tests::rig::{chain, chaos, metric, wait_until};
use kvbm_tiers::chaos::Chaos;
use kvbm_tiers::{IndexChange, IndexEntry, IndexOptions, TierIndex};

const BLOCK: u64 = 4096;
const LIMIT: Duration = Duration::from_mins(1);

fn kept(dir: &Path, host: u64, disk: u64) -> Settings {
    let mut settings = engine::settings(BLOCK, 16, host);
    engine::keep_on_disk(&mut settings, disk, dir);
    settings
}

fn open(settings: Settings, fingerprint: Fingerprint) -> kvbm::Result<Manager> {
    engine::open_with(settings, engine::model(fingerprint))
}

fn closed(manager: &Manager) {
    assert!(manager.close(LIMIT).is_complete());
}

#[test]
fn what_was_flushed_is_served_after_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let settings = kept(home.path(), 64, 256);
    let first = open(settings.clone(), engine::in_epoch("one", 0)).unwrap();
    assert_eq!(engine::recovered(&first).blocks, 0);
    for n in 0..8 {
        engine::serve(&first, &chain(n, 8));
    }
    engine::drain(&first);
    closed(&first);
    drop(first);
    let second = open(settings.clone(), engine::in_epoch("one", 0)).unwrap();
    let RecoveryReport { tier, blocks, dropped, past, damaged, torn_bytes, .. } =
        engine::recovered(&second);
    assert_eq!((tier, blocks, dropped, past, damaged, torn_bytes), (Tier::Disk, 64, 0, 0, 0, 0));
    assert_eq!(second.admin().audit(), []);
    for n in 0..8 {
        assert_eq!(second.matches(&chain(n, 8)).blocks(Tier::Disk), 8);
        let served = engine::serve(&second, &chain(n, 8));
        assert_eq!((served.hit, served.wrong), (8, 0));
    }
    // And then it goes on: other blocks take the place of these.
    for n in 100..200 {
        engine::serve(&second, &chain(n, 8));
    }
    engine::drain(&second);
    assert_eq!(second.admin().audit(), []);
    let resident = second.admin().counts(Tier::Disk).resident as usize;
    drop(second);
    let third = open(settings, engine::in_epoch("one", 0)).unwrap();
    assert_eq!(engine::recovered(&third).blocks, resident);
    let served: Vec<_> = (0..200).map(|n| engine::serve(&third, &chain(n, 8))).collect();
    assert_eq!(served.iter().map(|served| served.wrong).sum::<usize>(), 0);
    assert_eq!(third.admin().audit(), []);
}

#[test]
fn what_one_of_two_directories_holds_is_found_in_both() {
    let home = tempfile::tempdir().unwrap();
    let mut settings = kept(home.path(), 64, 64);
    settings.disk.dirs = vec![home.path().join("a"), home.path().join("b")];
    let first = open(settings.clone(), engine::in_epoch("one", 0)).unwrap();
    engine::serve(&first, &chain(1, 9));
    engine::drain(&first);
    drop(first);
    let second = open(settings, engine::in_epoch("one", 0)).unwrap();
    assert_eq!(engine::recovered(&second).blocks, 9);
    let served = engine::serve(&second, &chain(1, 9));
    assert_eq!((served.hit, served.wrong), (9, 0));
}

#[test]
fn of_a_slot_file_that_was_removed_nothing_is_found() {
    let home = tempfile::tempdir().unwrap();
    let mut settings = kept(home.path(), 64, 64);
    settings.disk.dirs = vec![home.path().join("a"), home.path().join("b")];
    let first = open(settings.clone(), engine::in_epoch("one", 0)).unwrap();
    engine::serve(&first, &chain(1, 1));
    engine::serve(&first, &chain(2, 8));
    engine::drain(&first);
    drop(first);
    std::fs::remove_file(kept_file(&home.path().join("b"), "blocks")).unwrap();
    let second = open(settings.clone(), engine::in_epoch("one", 0)).unwrap();
    // Each chain lies in one directory.
    assert_eq!((engine::recovered(&second).blocks, engine::recovered(&second).dropped), (1, 0));
    assert_eq!(engine::serve(&second, &chain(1, 1)).hit, 1);
    assert_eq!(
        engine::serve(&second, &chain(2, 8)),
        engine::Served { computed: 8, saved: 8, ..Default::default() }
    );
    assert_eq!(second.admin().failures(), 0);
    engine::drain(&second);
    drop(second);
    let third = open(settings, engine::in_epoch("one", 0)).unwrap();
    assert_eq!(engine::serve(&third, &chain(2, 8)).hit, 8);
}

/// A tier in these directories, with a name for each.
fn spread(home: &Path, dirs: &[&str], disk: u64) -> Settings {
    let mut settings = kept(home, 64, disk);
    settings.disk.dirs = dirs.iter().map(|name| home.join(name)).collect();
    settings
}

/// Serves chains and has each on disk before the next one comes.
fn store(manager: &Manager, chains: std::ops::Range<u32>) {
    for n in chains {
        assert_eq!(engine::serve(manager, &chain(n, 8)).wrong, 0);
        engine::drain(manager);
    }
}

/// Stores chains, and tells which are there at the end.
fn fill(settings: &Settings, chains: u32) -> Vec<(u32, usize)> {
    let manager = open(settings.clone(), engine::in_epoch("one", 0)).unwrap();
    store(&manager, 0..chains);
    assert_eq!(manager.admin().audit(), []);
    let held = (0..chains).map(|n| (n, manager.matches(&chain(n, 8)).blocks(Tier::Disk)));
    held.filter(|&(_, blocks)| blocks > 0).collect()
}

/// How many of these blocks a start with these settings finds and serves.
fn served(settings: &Settings, held: &[(u32, usize)]) -> usize {
    let manager = open(settings.clone(), engine::in_epoch("one", 0)).unwrap();
    let load = |&(n, blocks): &(u32, usize)| {
        let chain = chain(n, blocks as u32);
        let loaded = manager.load(manager.lease(&chain)).wait().unwrap();
        assert_eq!(engine::wrong_blocks(&manager, &loaded.lease, &chain, loaded.blocks), 0);
        loaded.blocks
    };
    let served = held.iter().map(load).sum();
    assert_eq!((manager.admin().audit(), manager.admin().failures()), (vec![], 0));
    served
}

#[test]
fn one_directory_of_several_that_is_lost_takes_its_share() {
    let home = tempfile::tempdir().unwrap();
    let three = spread(home.path(), &["a", "b", "c"], 600);
    let held = fill(&three, 300);
    let all: usize = held.iter().map(|&(_, blocks)| blocks).sum();
    assert!(all > 500, "the tier is all but full: {all}");
    assert_eq!(served(&three, &held), all);
    std::fs::remove_dir_all(home.path().join("b")).unwrap();
    // A third is lost, and what the places where chains go on elsewhere add to that.
    let without = served(&three, &held);
    assert!(without >= all * 55 / 100 && without < all, "{without} of {all}");
    // And then it is used again.
    let held = fill(&three, 300);
    let all: usize = held.iter().map(|&(_, blocks)| blocks).sum();
    assert!(all > 500, "{all}");
    assert_eq!(served(&three, &held), all);
}

#[test]
fn directories_come_and_go_and_the_others_keep_their_blocks() {
    let home = tempfile::tempdir().unwrap();
    let two = spread(home.path(), &["a", "b"], 400);
    let held = fill(&two, 40);
    let all = 40 * 8;
    assert_eq!(held.iter().map(|&(_, blocks)| blocks).sum::<usize>(), all);
    let three = spread(home.path(), &["new", "b", "a"], 600);
    assert_eq!(served(&three, &held), all);
    assert!(fill(&three, 70).len() > 60, "the new one is used");
    let one = spread(home.path(), &["b"], 200);
    let part = served(&one, &held);
    assert!((all / 3..all).contains(&part), "{part} of {all}");
    // A tier of another size keeps what lies in the slots that it has.
    let small = spread(home.path(), &["b"], 100);
    let smaller = served(&small, &held);
    assert!(smaller > 50 && smaller <= 100, "{smaller} of {part}");
}

#[test]
fn a_start_does_without_an_unusable_directory_which_then_heals() {
    let home = tempfile::tempdir().unwrap();
    let two = spread(home.path(), &["a", "b"], 400);
    let held = fill(&two, 40);
    let (dir, away) = (home.path().join("b"), home.path().join("away"));
    std::fs::rename(&dir, &away).unwrap();
    std::fs::write(&dir, "no directory").unwrap();
    let registry = prometheus::Registry::new();
    let given = Some(engine::in_epoch("one", 0));
    let options = Options { fingerprint: given, registry: registry.clone(), ..Options::default() };
    let manager = engine::open_with(two.clone(), options).unwrap();
    let is_up = |dir| metric(&registry, "kvbm_disk_directory_up", &[("dir", dir)]);
    assert_eq!((is_up("0"), is_up("1")), (1, 0));
    assert_eq!(manager.admin().counts(Tier::Disk).total, 200);
    // What is there is served, and what comes goes to the other one.
    let found = held.iter().filter(|&&(n, _)| manager_has(&manager, n)).count();
    assert!((15..=25).contains(&found), "{found}");
    store(&manager, 100..150);
    assert!(manager_has(&manager, 149) && manager.admin().audit().is_empty());
    closed(&manager);
    drop(manager);
    std::fs::remove_file(&dir).unwrap();
    std::fs::rename(&away, &dir).unwrap();
    let again = open(two.clone(), engine::in_epoch("one", 0)).unwrap();
    assert_eq!(again.admin().counts(Tier::Disk).total, 400);
    let back = held.iter().filter(|&&(n, _)| manager_has(&again, n)).count();
    assert!(back >= 15, "what lay there is found again: {back}");
    drop(again);
    for name in ["a", "b"] {
        std::fs::remove_dir_all(home.path().join(name)).unwrap();
        std::fs::write(home.path().join(name), "no directory").unwrap();
    }
    let error = open(two, engine::in_epoch("one", 0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("DYN_KVBM_DISK_CACHE_DIR"), "{error}");
}

fn manager_has(manager: &Manager, n: u32) -> bool {
    manager.matches(&chain(n, 8)).blocks(Tier::Disk) == 8
}

/// A manager with two directories, the second of which fails from [`Chaos::start`] on as `fault`
/// says.
fn open_with_fault(home: &Path, fault: &str) -> (Manager, Chaos, prometheus::Registry) {
    let chaos = chaos(&[fault]);
    let registry = prometheus::Registry::new();
    let options = Options {
        fingerprint: Some(engine::in_epoch("one", 0)),
        registry: registry.clone(),
        media_layer: Some(chaos.layer()),
        ..Options::default()
    };
    let mut settings = spread(home, &["a", "b"], 400);
    // Short only for directories that hang: on a busy machine others are late too.
    if fault.contains(":hang") {
        settings.transfer.timeout_ms = 300;
    }
    (engine::open_with(settings, options).unwrap(), chaos, registry)
}

fn is_up(registry: &prometheus::Registry) -> bool {
    metric(registry, "kvbm_disk_directory_up", &[("dir", "1")]) == 1
}

/// How many of these chains are served whole; none is served wrong.
fn served_whole(manager: &Manager, chains: std::ops::Range<u32>) -> usize {
    let served: Vec<_> = chains.map(|n| engine::serve(manager, &chain(n, 8))).collect();
    assert!(served.iter().all(|served| served.wrong == 0), "{served:?}");
    served.iter().filter(|served| served.hit == 8).count()
}

#[test]
fn a_hanging_directory_is_avoided_while_another_serves_then_heals() {
    let home = tempfile::tempdir().unwrap();
    let (manager, chaos, registry) = open_with_fault(home.path(), "disk1:hang@0s+1h");
    store(&manager, 0..40);
    chaos.start();
    wait_until(LIMIT, "the directory is left alone", || {
        served_whole(&manager, 0..40);
        !is_up(&registry)
    });
    assert_eq!(metric(&registry, "kvbm_disk_directory_failures_total", &[("dir", "1")]), 1);
    // From here on no load waits for it, and the tier's breakers have not heard of it.
    let began = std::time::Instant::now();
    let in_the_other = (0..40).filter(|&n| manager_has(&manager, n)).count();
    assert!(in_the_other >= 15, "{in_the_other}");
    wait_until(LIMIT, "the other one serves what it has and takes blocks", || {
        store(&manager, 100..104);
        served_whole(&manager, 0..40) >= 15 && (100..104).all(|n| manager_has(&manager, n))
    });
    assert!(began.elapsed() < LIMIT);
    // But for those that copies which hang still read.
    wait_until(LIMIT, "its blocks are dropped", || manager.admin().counts(Tier::Disk).total < 250);
    chaos.heal();
    wait_until(LIMIT, "the directory is used again", || is_up(&registry));
    wait_until(LIMIT, "what hung has come back", || {
        Tier::ALL.iter().all(|&tier| manager.admin().counts(tier).lost == 0)
    });
    store(&manager, 200..220);
    assert!(
        manager.admin().counts(Tier::Disk).resident > 200,
        "{:?}",
        manager.admin().counts(Tier::Disk)
    );
    // A busy machine may let a directory wait once more.
    wait_until(LIMIT, "all is served again", || {
        store(&manager, 200..220);
        served_whole(&manager, 200..220) == 20
    });
    engine::drain(&manager);
    assert_eq!((manager.admin().counts(Tier::Disk).total, manager.admin().audit()), (400, vec![]));
    let staging = manager.admin().staging();
    assert_eq!((staging.lost, staging.idle), (0, staging.total));
    closed(&manager);
}

#[test]
fn where_all_directories_hang_the_tier_rests_and_then_heals() {
    let home = tempfile::tempdir().unwrap();
    let (manager, chaos, registry) = open_with_fault(home.path(), "disk:hang@0s+1h");
    store(&manager, 0..40);
    chaos.start();
    assert_eq!(served_whole(&manager, 0..40), 0);
    // Not by directories: none answers.
    assert_eq!(metric(&registry, "kvbm_disk_directory_failures_total", &[]), 0);
    assert_eq!(manager.admin().counts(Tier::Disk).total, 400);
    chaos.heal();
    wait_until(LIMIT, "it is used again", || {
        manager.admin().tick();
        served_whole(&manager, 0..40) == 40
    });
    wait_until(LIMIT, "what hung has come back", || {
        Tier::ALL.iter().all(|&tier| manager.admin().counts(tier).lost == 0)
    });
    engine::drain(&manager);
    assert_eq!(manager.admin().audit(), []);
}

#[test]
fn a_full_directory_serves_while_another_takes_blocks() {
    let home = tempfile::tempdir().unwrap();
    let (manager, chaos, registry) = open_with_fault(home.path(), "disk1.write:enospc@0s+1h");
    store(&manager, 0..20);
    chaos.start();
    store(&manager, 100..110);
    wait_until(LIMIT, "it gets no blocks", || !is_up(&registry));
    wait_until(LIMIT, "the other one takes all", || {
        engine::drain(&manager);
        (100..110).all(|n| manager_has(&manager, n))
    });
    // What it has is there and read, whatever time passes.
    std::thread::sleep(Duration::from_secs(4));
    manager.admin().evict(Tier::Host, usize::MAX);
    assert!((0..20).all(|n| manager_has(&manager, n)));
    assert_eq!(served_whole(&manager, 0..20), 20);
    assert_eq!(metric(&registry, "kvbm_unreadable_blocks", &[("tier", "disk")]), 0);
    assert_eq!(metric(&registry, "kvbm_disk_directory_failures_total", &[("dir", "1")]), 0);
    chaos.heal();
    wait_until(LIMIT, "it gets blocks again", || is_up(&registry));
    store(&manager, 200..220);
    assert_eq!(served_whole(&manager, 200..220), 20);
    assert!(
        manager.admin().counts(Tier::Disk).resident > 200,
        "{:?}",
        manager.admin().counts(Tier::Disk)
    );
    assert_eq!(manager.admin().audit(), []);
    closed(&manager);
}

#[test]
fn a_failing_directory_loses_its_own_blocks_and_then_heals() {
    let home = tempfile::tempdir().unwrap();
    let (manager, chaos, registry) = open_with_fault(home.path(), "disk1:eio@0s+1h");
    store(&manager, 0..40);
    let held = |manager: &Manager| (0..40).filter(|&n| manager_has(manager, n)).count();
    assert_eq!(held(&manager), 40);
    chaos.start();
    let is_up = || metric(&registry, "kvbm_disk_directory_up", &[("dir", "1")]) == 1;
    // What lies there is missed, what lies in the other one served, and no load waits.
    let served: Vec<_> = (0..40).map(|n| engine::serve(&manager, &chain(n, 8))).collect();
    assert!(served.iter().all(|served| served.wrong == 0));
    let hits = served.iter().filter(|served| served.hit == 8).count();
    assert!((15..=25).contains(&hits), "{hits}");
    wait_until(LIMIT, "the directory is left alone", || !is_up());
    assert_eq!(metric(&registry, "kvbm_disk_directory_failures_total", &[("dir", "1")]), 1);
    // The tier takes blocks all the while, those that were lost again as well.
    store(&manager, 100..110);
    assert!((100..110).all(|n| manager_has(&manager, n)));
    wait_until(LIMIT, "its blocks are dropped", || manager.admin().counts(Tier::Disk).total == 200);
    assert!(metric(&registry, "kvbm_unreadable_blocks", &[("tier", "disk")]) > 0);
    assert_eq!(manager.admin().audit(), []);
    chaos.heal();
    wait_until(LIMIT, "the directory is used again", is_up);
    store(&manager, 200..220);
    assert!(
        manager.admin().counts(Tier::Disk).resident > 200,
        "{:?}",
        manager.admin().counts(Tier::Disk)
    );
    for n in 200..220 {
        let chain = chain(n, 8);
        let loaded = manager.load(manager.lease(&chain)).wait().unwrap();
        assert_eq!(
            (loaded.blocks, engine::wrong_blocks(&manager, &loaded.lease, &chain, 8)),
            (8, 0)
        );
    }
    assert_eq!((manager.admin().counts(Tier::Disk).total, manager.admin().audit()), (400, vec![]));
    closed(&manager);
}

#[test]
fn a_directory_that_fails_briefly_keeps_its_good_blocks() {
    let home = tempfile::tempdir().unwrap();
    let (manager, chaos, registry) = open_with_fault(home.path(), "disk1.write:eio@0s+3s");
    store(&manager, 0..20);
    chaos.start();
    for n in 100..107 {
        engine::serve(&manager, &chain(n, 8));
    }
    let is_up = || metric(&registry, "kvbm_disk_directory_up", &[("dir", "1")]) == 1;
    wait_until(LIMIT, "the directory is left alone", || !is_up());
    wait_until(LIMIT, "the directory is used again", is_up);
    engine::drain(&manager);
    assert!(
        (0..20).all(|n| manager_has(&manager, n)) && (100..107).all(|n| manager_has(&manager, n))
    );
    assert_eq!(metric(&registry, "kvbm_unreadable_blocks", &[("tier", "disk")]), 0);
    assert_eq!(manager.admin().audit(), []);
}

#[test]
fn another_fingerprint_starts_cold_and_both_stay_open() {
    let home = tempfile::tempdir().unwrap();
    let settings = kept(home.path(), 64, 64);
    let one = open(settings.clone(), engine::in_epoch("one", 0)).unwrap();
    engine::serve(&one, &chain(1, 6));
    engine::drain(&one);
    let two = open(settings.clone(), engine::in_epoch("two", 0)).unwrap();
    assert_eq!((engine::recovered(&two).blocks, two.matches(&chain(1, 6)).longest()), (0, 0));
    assert_eq!(engine::serve(&two, &chain(1, 6)).hit, 0);
    engine::drain(&two);
    drop((one, two));
    for weights in ["one", "two"] {
        let again = open(settings.clone(), engine::in_epoch(weights, 0)).unwrap();
        assert_eq!(
            engine::serve(&again, &chain(1, 6)),
            engine::Served { hit: 6, saved: 6, ..Default::default() }
        );
    }
}

#[test]
fn the_greatest_epoch_is_continued_wherever_it_comes_from() {
    let home = tempfile::tempdir().unwrap();
    let settings = kept(home.path(), 64, 64);
    let store = |manager: &Manager, n| {
        engine::serve(manager, &chain(n, 6));
        engine::drain(manager);
    };
    let first = open(settings.clone(), engine::in_epoch("one", 0)).unwrap();
    store(&first, 1);
    first.reset(3).unwrap();
    store(&first, 2);
    drop(first);
    // The medium's is greater.
    let second = open(settings.clone(), engine::in_epoch("one", 2)).unwrap();
    assert_eq!((second.admin().epoch(), engine::recovered(&second).blocks), (3, 6));
    assert_eq!(second.matches(&chain(1, 6)).longest(), 0);
    assert_eq!(engine::serve(&second, &chain(2, 6)).hit, 6);
    drop(second);
    // The fingerprint's is greater.
    let third = open(settings.clone(), engine::in_epoch("one", 4)).unwrap();
    assert_eq!(
        (third.admin().epoch(), engine::recovered(&third).blocks, engine::recovered(&third).past),
        (4, 0, 6)
    );
    store(&third, 5);
    drop(third);
    let fourth = open(settings, engine::in_epoch("one", 0)).unwrap();
    assert_eq!((fourth.admin().epoch(), engine::recovered(&fourth).blocks), (4, 6));
    assert_eq!(fourth.matches(&chain(5, 6)).blocks(Tier::Disk), 6);
}

#[test]
fn an_unwritable_epoch_is_an_error_and_is_tried_again() {
    let home = tempfile::tempdir().unwrap();
    let settings = kept(home.path(), 64, 64);
    let registry = prometheus::Registry::new();
    let given = Some(engine::in_epoch("one", 0));
    let options = Options { fingerprint: given, registry: registry.clone(), ..Options::default() };
    let manager = engine::open_with(settings.clone(), options).unwrap();
    engine::serve(&manager, &chain(1, 6));
    engine::drain(&manager);
    let in_the_way = index_file(home.path()).with_added_extension("partial");
    std::fs::create_dir(&in_the_way).unwrap();
    let error = manager.reset(1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!((manager.admin().epoch(), manager.matches(&chain(1, 6)).longest()), (1, 0));
    // Others do not notice.
    assert_eq!(engine::serve(&manager, &chain(2, 6)).computed, 6);
    assert_eq!(engine::serve(&manager, &chain(2, 6)).hit, 6);
    assert!(metric(&registry, "kvbm_index_failures_total", &[("tier", "disk")]) > 0);
    std::fs::remove_dir(&in_the_way).unwrap();
    engine::drain(&manager);
    drop(manager);
    let again = open(settings, engine::in_epoch("one", 0)).unwrap();
    assert_eq!((again.admin().epoch(), engine::recovered(&again).blocks), (1, 6));
    assert_eq!(engine::serve(&again, &chain(2, 6)).hit, 6);
}

fn kept_file(dir: &Path, extension: &str) -> PathBuf {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    files
        .into_iter()
        .find(|path| path.extension().is_some_and(|its| its == extension))
        .expect("it is there")
}

fn index_file(dir: &Path) -> PathBuf {
    kept_file(dir, "index")
}

/// Flips a bit of a file.
fn flip(path: &Path, bit: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, bit / 8).unwrap();
    file.write_all_at(&[byte[0] ^ 1 << (bit % 8)], bit / 8).unwrap();
}

#[test]
fn a_flipped_bit_is_a_miss_or_nothing() {
    let home = tempfile::tempdir().unwrap();
    let settings = kept(home.path(), 64, 64);
    let chains: Vec<_> = (1..5).map(|n| chain(n, 8)).collect();
    let mut rng = fastrand::Rng::with_seed(11);
    for round in 0..60 {
        let manager = open(settings.clone(), engine::in_epoch("one", 0)).unwrap();
        for chain in &chains {
            let served = engine::serve(&manager, chain);
            assert_eq!(served.wrong, 0, "in round {round}");
            assert!(round == 0 || served.hit + 8 >= chain.len());
        }
        engine::drain(&manager);
        assert_eq!(manager.admin().audit(), []);
        drop(manager);
        let victim = kept_file(home.path(), if round % 2 == 0 { "blocks" } else { "index" });
        // Of the slot file, what is in use.
        let bytes = victim.metadata().unwrap().len().min(34 * BLOCK);
        flip(&victim, rng.u64(..bytes * 8));
    }
    // And then all is well.
    let last = open(settings, engine::in_epoch("one", 0)).unwrap();
    assert!(chains.iter().all(|chain| engine::serve(&last, chain).wrong == 0));
    assert!(chains.iter().all(|chain| engine::serve(&last, chain).hit == 8));
}

#[test]
fn a_flipped_bit_in_idle_slots_is_found_and_healed() {
    let home = tempfile::tempdir().unwrap();
    let mut settings = kept(home.path(), 64, 64);
    settings.transfer.scrub_mib_per_second = 100;
    let registry = prometheus::Registry::new();
    let given = Some(engine::in_epoch("one", 0));
    let options = Options { fingerprint: given, registry: registry.clone(), ..Options::default() };
    let manager = engine::open_with(settings.clone(), options).unwrap();
    engine::serve(&manager, &chain(1, 8));
    engine::drain(&manager);
    let scrubbed = |outcome| {
        metric(&registry, "kvbm_scrubbed_blocks_total", &[("tier", "disk"), ("outcome", outcome)])
    };
    wait_until(LIMIT, "all are looked at several times", || scrubbed("sound") > 30);
    assert_eq!((scrubbed("bad"), manager.admin().audit()), (0, vec![]));
    flip(&kept_file(home.path(), "blocks"), 2 * BLOCK * 8 + 77);
    wait_until(LIMIT, "it is found", || scrubbed("bad") == 1);
    assert_eq!(metric(&registry, "kvbm_checksum_failures_total", &[("tier", "disk")]), 1);
    // The host tier has good copies.
    wait_until(LIMIT, "it is healed", || manager_has(&manager, 1));
    let before = scrubbed("sound");
    wait_until(LIMIT, "they are looked at again", || scrubbed("sound") > before + 30);
    assert_eq!(
        (scrubbed("bad"), manager.admin().failures(), manager.admin().audit()),
        (1, 0, vec![])
    );
    closed(&manager);
    drop(manager);
    let again = open(settings, engine::in_epoch("one", 0)).unwrap();
    let served = engine::serve(&again, &chain(1, 8));
    assert_eq!((served.hit, served.wrong), (8, 0));
}

/// The block of a test that an engine's hash names: which of which chain.
fn place(hash: BlockHash) -> (u32, usize) {
    let number = hash.get() as u32 - 1;
    (number / 1_000, (number % 1_000) as usize)
}

const ACKNOWLEDGED: &str = "acknowledged";
/// More blocks than slots, so that blocks leave all the time.
const SLOTS_OF_ENGINE: u64 = 4_096;
const CHAINS_OF_ENGINE: u32 = 800;

/// An engine that is killed while it works, having written down what it was told is durable.
fn serve_until_killed(home: &Path) {
    let mut log = File::create(home.join(ACKNOWLEDGED)).unwrap();
    let (mut there, count) = (BTreeSet::new(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&count);
    let on_durable = OnDurable::new(move |events| {
        let line = |event: &DurableEvent| match event {
            DurableEvent::Stored(block) => {
                there.insert(block.hash);
                format!("+ {:x}\n", block.hash.get())
            }
            DurableEvent::Removed(block) => {
                there.remove(&block.hash);
                format!("- {:x}\n", block.hash.get())
            }
            _ => "0\n".to_owned(),
        };
        log.write_all(events.iter().map(line).collect::<String>().as_bytes()).unwrap();
        counted.store(there.len(), Ordering::Relaxed);
    });
    let (fingerprint, on_durable) = (Some(engine::in_epoch("one", 0)), Some(on_durable));
    let options = Options { fingerprint, on_durable, ..Options::default() };
    let manager = engine::open_with(kept(home, 64, SLOTS_OF_ENGINE), options).unwrap();
    let mut rng = fastrand::Rng::new();
    let (mut served, mut is_said) = (0, false);
    loop {
        assert_eq!(engine::serve(&manager, &chain(rng.u32(1..CHAINS_OF_ENGINE), 8)).wrong, 0);
        served += 1;
        // How far the disk is behind is the machine's.
        if !is_said && served >= 2_000 && count.load(Ordering::Relaxed) >= 1_000 {
            is_said = true;
            say("working");
        }
    }
}

fn reset_and_wait(home: &Path) {
    let manager = open(kept(home, 64, 64), engine::in_epoch("one", 0)).unwrap();
    engine::serve(&manager, &chain(1, 6));
    engine::drain(&manager);
    engine::serve(&manager, &chain(2, 6));
    manager.reset(1).unwrap();
    say("reset");
    std::thread::sleep(LIMIT);
}

#[test]
fn process() {
    match role() {
        Some((role, home)) if role == "engine" => serve_until_killed(&home),
        Some((_, home)) => reset_and_wait(&home),
        None => {}
    }
}

fn acknowledged(home: &Path) -> BTreeSet<(u32, usize)> {
    let mut there = BTreeSet::new();
    let text = std::fs::read_to_string(home.join(ACKNOWLEDGED)).unwrap();
    // A kill may cut the last line.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for line in whole.lines() {
        let block = |hash| place(BlockHash::from_u128(u128::from_str_radix(hash, 16).unwrap()));
        match line.split_at(2) {
            ("+ ", hash) => drop(there.insert(block(hash))),
            (_, hash) => drop(there.remove(&block(hash))),
        }
    }
    there
}

#[test]
fn what_a_killed_process_made_durable_the_next_serves() {
    const KILLS: usize = 4;
    let home = tempfile::tempdir().unwrap();
    let (mut expected, mut missing, mut failed) = (0, 0, 0);
    for _ in 0..KILLS {
        let mut engine = Process::start(module_path!(), "engine", home.path());
        assert_eq!(engine.hear(), "working");
        engine.kill();
        let manager =
            open(kept(home.path(), 64, SLOTS_OF_ENGINE), engine::in_epoch("one", 0)).unwrap();
        assert_eq!(manager.admin().audit(), []);
        let there = acknowledged(home.path());
        assert!(there.len() > 500, "{}", there.len());
        expected += there.len();
        for n in there.iter().map(|&(n, _)| n).collect::<BTreeSet<_>>() {
            // Nothing of this chain has been asked for yet: what is there is what was left.
            let last =
                there.range((n, 0)..(n + 1, 0)).map(|&(_, position)| position).max().unwrap();
            let acknowledged = chain(n, last as u32 + 1);
            let lease = manager.lease(&acknowledged);
            let loaded = manager.load(lease).wait().unwrap();
            assert_eq!(
                engine::wrong_blocks(&manager, &loaded.lease, &acknowledged, loaded.blocks),
                0
            );
            missing += there.range((n, loaded.blocks)..(n + 1, 0)).count();
            failed += loaded.failed;
        }
        engine::drain(&manager);
        assert_eq!(manager.admin().audit(), []);
        closed(&manager);
    }
    println!("{expected} blocks acknowledged, {missing} missing, {failed} found bad");
    assert_eq!((missing, failed), (0, 0), "of {expected}");
}

#[test]
fn nothing_from_before_a_reset_is_found_after_a_kill() {
    let home = tempfile::tempdir().unwrap();
    let mut engine = Process::start(module_path!(), "reset", home.path());
    assert_eq!(engine.hear(), "reset");
    engine.kill();
    let manager = open(kept(home.path(), 64, 64), engine::in_epoch("one", 0)).unwrap();
    assert_eq!((manager.admin().epoch(), engine::recovered(&manager).blocks), (1, 0));
    for n in [1, 2] {
        assert_eq!(manager.matches(&chain(n, 6)).longest(), 0);
        assert_eq!(engine::serve(&manager, &chain(n, 6)).computed, 6);
    }
}

/// `cargo nextest run -p kvbm-tests --run-ignored only --no-capture durable::`
#[test]
#[ignore = "a measurement"]
fn recovery_of_100_000_blocks() {
    let home = tempfile::tempdir().unwrap();
    let settings = kept(home.path(), 64, 100_000);
    drop(open(settings.clone(), engine::in_epoch("one", 0)).unwrap());
    let path = index_file(home.path());
    let options = IndexOptions {
        tier: Tier::Disk,
        namespace: format!("v1-block{BLOCK}-{}", engine::in_epoch("one", 0)),
        identity: engine::in_epoch("one", 0).digest(),
        slots: 100_000,
        block_bytes: BLOCK,
        parts: 1,
        epoch: 0,
        patience: Duration::ZERO,
        keys: None,
        path,
    };
    let name =
        |block: u32| u128::from(block + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
    let stored = |block: u32| {
        let (slot, key) = (SlotId(block), BlockKey { hash: name(block), group: 0 });
        let parent = (!block.is_multiple_of(500)).then(|| name(block - 1));
        IndexChange::Stored(IndexEntry {
            slot,
            generation: 1,
            block: key,
            parent,
            checksum: 1,
            tenant: None,
        })
    };
    let (mut index, _) = TierIndex::open(&options).unwrap();
    index.append(&(0..100_000).map(stored).collect::<Vec<_>>()).unwrap();
    drop(index);
    for _ in 0..3 {
        let manager = open(settings.clone(), engine::in_epoch("one", 0)).unwrap();
        println!("{:?}", engine::recovered(&manager));
    }
}

/// By hand: what the index costs, with the wait of a write into a slot whose old block it must have
/// left first. Without a fingerprint there is none. `cargo nextest run -p kvbm-tests --run-ignored
/// only --no-capture durable::`
#[test]
#[ignore = "a measurement"]
fn what_it_costs_to_wait_for_the_index() {
    let home = tempfile::tempdir().unwrap();
    let known = engine::model(engine::in_epoch("one", 0));
    let managers = [("kept", known), ("not kept", Options::default())].map(|(dir, options)| {
        let manager = engine::open_with(kept(&home.path().join(dir), 64, 256), options).unwrap();
        // Full, so that each write is into a slot that had another block.
        for n in 0..64 {
            engine::serve(&manager, &chain(n, 8));
        }
        engine::drain(&manager);
        manager
    });
    let mut took = [const { Vec::new() }; 2];
    for round in 0..40 {
        for turn in 0..2 {
            let of = (turn + round as usize) % 2;
            let started = Instant::now();
            for n in 0..16 {
                engine::serve(&managers[of], &chain(100 + 16 * round + n, 8));
            }
            engine::drain(&managers[of]);
            took[of].push(started.elapsed());
        }
    }
    let [kept, not_kept] = took.map(|mut rounds| {
        rounds.sort();
        rounds[rounds.len() / 2]
    });
    println!(
        "128 blocks of 4 KiB saved and flushed, median of 40 rounds: kept {kept:?}, not kept {not_kept:?}"
    );
}
