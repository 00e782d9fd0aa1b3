//! A tenant that is forgotten is so in every tier, now and after a restart, and no other is.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvbm::{CacheEvent, ErrorKind, Manager, RemoveReason, Tier};
use kvbm_settings::{Capacity, Settings};
use kvbm_tests::engine::{self, Served, drain, push_down, serve_for, settings, stop};
use kvbm_tests::rig::{chain, files, info_of};
use kvbm_tiers::object::{Store, StoreOptions};
use kvbm_tiers::sealed::{KeyFiles, KeyStore};
use kvbm_tiers::testing::main_key;

const BLOCK: usize = 8192;
const BLOCKS: u32 = 300;
const ONE: u32 = 7;
const OTHER: u32 = 8;

fn serve(manager: &Manager, tenant: u32) -> Served {
    serve_for(manager, info_of(tenant), &chain(tenant, BLOCKS))
}

/// Where the last tier lies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lowest {
    Disk,
    Object,
}

fn lower(dir: &Path, lowest: Lowest) -> Settings {
    let mut settings =
        settings(BLOCK as u64, 2 * u64::from(BLOCKS) + 16, 2 * u64::from(BLOCKS) + 16);
    settings.flush.interval_ms = 1;
    settings.encryption.key = Some(main_key(1, "0123456789abcdef"));
    if lowest == Lowest::Disk {
        settings.disk.capacity = Some(Capacity::Blocks(4096));
        settings.disk.dirs = vec![dir.join("one"), dir.join("two")];
        settings.disk.keep = true;
    } else {
        engine::keep_in_bucket(&mut settings, 8 * BLOCK as u64, &dir.join("objects"));
    }
    settings
}

fn open(settings: Settings) -> Manager {
    engine::open_with(settings, engine::model(engine::fingerprint("one"))).unwrap()
}

#[track_caller]
fn assert_served(manager: &Manager, tenant: u32, hit: u32) {
    let served = serve(manager, tenant);
    assert_eq!((served.hit, served.wrong), (hit as usize, 0), "tenant {tenant}: {served:?}");
}

/// What somebody keeps of all files but those of keys.
fn backup(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let is_key =
        |path: &PathBuf| path.extension().is_some_and(|end| end == "keys" || end == "kvkey");
    let kept = files(dir).into_iter().filter(|path| !is_key(path));
    kept.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

#[test]
fn the_forgotten_are_never_found_again_and_others_are() {
    for lowest in [Lowest::Disk, Lowest::Object] {
        let dir = tempfile::tempdir().unwrap();
        let manager = open(lower(dir.path(), lowest));
        for tenant in [ONE, OTHER] {
            assert_served(&manager, tenant, 0);
        }
        drain(&manager);
        let before = backup(dir.path());
        manager.forget(ONE).unwrap();
        let held = manager.matches(&chain(ONE, BLOCKS));
        assert!(Tier::ALL.iter().all(|&tier| held.blocks(tier) == 0), "{held:?}");
        assert!(manager.admin().audit().is_empty(), "{:?}", manager.admin().audit());
        assert_served(&manager, OTHER, BLOCKS);
        push_down(&manager, &chain(OTHER, BLOCKS));
        assert_served(&manager, OTHER, BLOCKS);
        stop(manager);
        // Also where everything but the keys is put back as it was.
        for restored in [false, true] {
            if restored {
                before.iter().for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
            }
            let again = open(lower(dir.path(), lowest));
            assert_served(&again, ONE, 0);
            drain(&again);
            assert_served(&again, OTHER, BLOCKS);
            // It comes back, and is found.
            push_down(&again, &chain(ONE, BLOCKS));
            assert_served(&again, ONE, BLOCKS);
            assert!(again.admin().audit().is_empty());
            again.forget(ONE).unwrap();
            stop(again);
        }
        let again = open(lower(dir.path(), lowest));
        assert_served(&again, ONE, 0);
        assert_served(&again, OTHER, BLOCKS);
        stop(again);
    }
}

/// As `kvbm forget` does it.
fn forget_while_nobody_works(settings: &Settings, tenant: u32) -> usize {
    let Some(url) = &settings.object.url else {
        let files = KeyFiles::open_all(&settings.disk.dirs, Duration::from_secs(10)).unwrap();
        return files.iter().map(|files| files.destroy(tenant, &[]).unwrap()).sum();
    };
    let store = Store::open(url, &StoreOptions::default()).unwrap();
    store.all_keys().unwrap().iter().map(|keys| keys.destroy(tenant, &[]).unwrap()).sum()
}

#[test]
fn who_is_forgotten_offline_is_not_found_after_a_start() {
    for lowest in [Lowest::Disk, Lowest::Object] {
        let dir = tempfile::tempdir().unwrap();
        let settings = lower(dir.path(), lowest);
        let manager = open(settings.clone());
        for tenant in [ONE, OTHER] {
            assert_served(&manager, tenant, 0);
        }
        stop(manager);
        assert_eq!(forget_while_nobody_works(&settings, ONE), 1);
        let again = open(settings);
        let held = again.matches(&chain(ONE, BLOCKS));
        assert!(Tier::ALL.iter().all(|&tier| held.blocks(tier) == 0), "{lowest:?}: {held:?}");
        assert_served(&again, ONE, 0);
        assert_served(&again, OTHER, BLOCKS);
        stop(again);
    }
}

#[test]
fn an_absent_directory_is_named_and_forbids_no_encrypted_start() {
    let dir = tempfile::tempdir().unwrap();
    let settings = lower(dir.path(), Lowest::Disk);
    // Something else lies in its place.
    fs::write(dir.path().join("two"), "").unwrap();
    let manager = open(settings.clone());
    [ONE, OTHER].into_iter().for_each(|tenant| assert_served(&manager, tenant, 0));
    stop(manager);
    let manager = open(settings.clone());
    assert!(serve(&manager, OTHER).hit > 0, "what the other directory has is found again");
    let error = manager.forget(ONE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("two is away"), "{error}");
    let held = manager.matches(&chain(ONE, BLOCKS));
    assert!(Tier::ALL.iter().all(|&tier| held.blocks(tier) == 0), "{held:?}");
    stop(manager);
    // And then it is there.
    fs::remove_file(dir.path().join("two")).unwrap();
    let manager = open(settings.clone());
    assert_served(&manager, ONE, 0);
    manager.forget(ONE).unwrap();
    assert!(serve(&manager, OTHER).hit > 0);
    stop(manager);
    let manager = open(settings);
    assert_served(&manager, ONE, 0);
    stop(manager);
}

#[test]
fn what_is_on_its_way_lands_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let manager = open(lower(dir.path(), Lowest::Disk));
    for round in 0..20 {
        // Flushes of some of it are under way, and of some have not begun.
        assert_served(&manager, ONE, 0);
        std::thread::sleep(Duration::from_micros(300 * round));
        manager.forget(ONE).unwrap();
        let held = manager.matches(&chain(ONE, BLOCKS));
        assert!(Tier::ALL.iter().all(|&tier| held.blocks(tier) == 0), "{held:?}");
    }
    drain(&manager);
    let held = manager.matches(&chain(ONE, BLOCKS));
    assert!(Tier::ALL.iter().all(|&tier| held.blocks(tier) == 0), "{held:?}");
    assert!(manager.admin().audit().is_empty(), "{:?}", manager.admin().audit());
    assert_eq!(manager.admin().counts(Tier::Disk).resident, 0);
    assert_served(&manager, ONE, 0);
    drain(&manager);
    push_down(&manager, &chain(ONE, BLOCKS));
    assert_served(&manager, ONE, BLOCKS);
}

#[test]
fn listeners_hear_of_each_block_that_is_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let manager = open(lower(dir.path(), Lowest::Disk));
    [ONE, OTHER].into_iter().for_each(|tenant| assert_served(&manager, tenant, 0));
    drain(&manager);
    let mut gone: Vec<_> = Tier::ALL
        .into_iter()
        .flat_map(|tier| {
            chain(ONE, BLOCKS)[..manager.matches(&chain(ONE, BLOCKS)).blocks(tier)].to_vec()
        })
        .collect();
    assert_eq!(gone.len(), 3 * BLOCKS as usize, "on the device, in memory and on disk");
    let mut events = manager.events();
    manager.forget(ONE).unwrap();
    drain(&manager);
    let removed = |event| match event {
        CacheEvent::Removed { block, reason: RemoveReason::Forgotten } => block.hash,
        other => panic!("nothing else happens: {other:?}"),
    };
    let mut told: Vec<_> = std::iter::from_fn(|| events.try_next()).map(removed).collect();
    gone.sort_unstable();
    told.sort_unstable();
    assert!(told == gone, "{} were told of {}", told.len(), gone.len());
}

#[test]
fn a_lease_from_before_may_end_its_reading() {
    let dir = tempfile::tempdir().unwrap();
    let manager = open(lower(dir.path(), Lowest::Disk));
    assert_served(&manager, ONE, 0);
    drain(&manager);
    let lease = manager.lease(&chain(ONE, BLOCKS));
    let read =
        |position| manager.read_device(&lease, &chain(ONE, BLOCKS), position, <[u8]>::to_vec);
    assert!(read(0).is_some());
    manager.forget(ONE).unwrap();
    assert!(read(0).is_none(), "nothing new is begun with it");
    assert!(manager.admin().counts(Tier::Device).quarantined > 0);
    drop(lease);
    assert_eq!(manager.admin().counts(Tier::Device).quarantined, 0);
    assert!(manager.admin().audit().is_empty());
    assert_served(&manager, ONE, 0);
}

#[test]
fn where_nobody_knows_whose_blocks_are_it_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = lower(dir.path(), Lowest::Disk);
    settings.encryption.key = None;
    let manager = open(settings.clone());
    assert_served(&manager, ONE, 0);
    let error = manager.forget(ONE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("DYN_KVBM_ENCRYPTION_KEY_FILE"), "{error}");
    assert_served(&manager, ONE, BLOCKS);
    stop(manager);
    // What ends with the process says whose it is.
    settings.disk.keep = false;
    let manager = open(settings);
    assert_served(&manager, ONE, 0);
    drain(&manager);
    manager.forget(ONE).unwrap();
    assert_served(&manager, ONE, 0);
}
