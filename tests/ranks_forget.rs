//! A tenant that a leader forgets: every rank destroys its keys, and one that was away does so when
//! it joins again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvbm::{ErrorKind, Fingerprint, RankOptions, Tier};
use kvbm_settings::{Capacity, Settings};
use kvbm_tests::engine;
use kvbm_tests::fleet::{self, Fleet, LIMIT, Served, WORLD, be_a_rank, drained};
use kvbm_tests::kept::shm;
use kvbm_tests::process::role;
use kvbm_tests::rig::{chain, files, info_of, wait_until};
use kvbm_tiers::testing::main_key;
use tempfile::TempDir;

/// Tenants, whose chains have their numbers.
const ONE: u32 = 1;
const OTHER: u32 = 2;

/// What outlives the processes lies on disk, or in memory where the home does.
fn of_fleet(home: &Path) -> Settings {
    let mut settings = fleet::settings(home);
    let key = || main_key(1, "0123456789abcdef");
    settings.encryption.key = (!home.join("plain").exists()).then(key);
    if home.starts_with("/dev/shm") {
        settings.host.persist = Some(home.join("slots"));
        settings.disk.capacity = None;
        settings.host.capacity = Some(Capacity::Blocks(32));
    }
    settings
}

#[expect(clippy::unnecessary_wraps, reason = "as options have it")]
fn fingerprint() -> Option<Fingerprint> {
    Some(engine::fingerprint("w"))
}

/// Not a test: the process of a rank, when another test starts it.
#[test]
fn process() {
    let Some((role, home)) = role() else { return };
    let rank = role.parse().unwrap();
    let options =
        RankOptions { fingerprint: fingerprint(), ..RankOptions::new(fleet::group(&home), rank) };
    be_a_rank(&of_fleet(&home), options);
}

fn open(home: &Path) -> Fleet {
    Fleet::open(module_path!(), home, of_fleet(home), fleet::group(home), fingerprint())
}

/// Where what outlives the processes lies on disk, and where it does in memory.
fn homes() -> Vec<TempDir> {
    [Some(tempfile::tempdir().unwrap()), shm()].into_iter().flatten().collect()
}

fn serve(fleet: &mut Fleet, tenant: u32) -> Served {
    let served = fleet.serve_for(info_of(tenant), &chain(tenant, 6));
    drained(&fleet.manager);
    served
}

#[track_caller]
fn assert_served(fleet: &mut Fleet, tenant: u32, hit: usize) {
    let served = serve(fleet, tenant);
    assert_eq!((served.hit, served.wrong, served.saved), (hit, 0, 6), "{served:?}");
}

/// The ranks that have a key of a tenant.
fn keepers(home: &Path, tenant: u32) -> Vec<u16> {
    fleet::keepers(&home.join("slots"), WORLD, tenant)
}

#[test]
fn the_forgotten_have_no_key_in_any_rank_ever_again() {
    for home in homes() {
        let home = home.path();
        let mut fleet = open(home);
        [ONE, OTHER].into_iter().for_each(|tenant| assert_served(&mut fleet, tenant, 0));
        assert_eq!(keepers(home, ONE), [0, 1, 2, 3]);
        let kept = files(&home.join("slots")).into_iter().filter(|path| !fleet::is_keys(path));
        let before: Vec<_> = kept.map(|path| (fs::read(&path).unwrap(), path)).collect();
        fleet.manager.forget(ONE).unwrap();
        assert_eq!(fleet.manager.matches(&chain(ONE, 6)).longest(), 0);
        assert_eq!((keepers(home, ONE), keepers(home, OTHER)), (vec![], vec![0, 1, 2, 3]));
        assert_served(&mut fleet, OTHER, 6);
        // It comes back, under new keys, and is found.
        assert_served(&mut fleet, ONE, 0);
        Tier::ALL.into_iter().take(2).for_each(|tier| fleet.empty(tier));
        assert_eq!(serve(&mut fleet, ONE).wrong, 0);
        fleet.manager.forget(ONE).unwrap();
        fleet.assert_sound();
        fleet.end();
        // Also where everything but the keys is put back as it was.
        before.iter().for_each(|(bytes, path)| fs::write(path, bytes).unwrap());
        let mut fleet = open(home);
        assert_served(&mut fleet, OTHER, 6);
        assert_served(&mut fleet, ONE, 0);
        assert_served(&mut fleet, ONE, 6);
        fleet.assert_sound();
        fleet.end();
    }
}

#[test]
fn an_absent_rank_hears_of_it_when_it_joins_again() {
    for home in homes() {
        let home = home.path();
        let mut fleet = open(home);
        [ONE, OTHER].into_iter().for_each(|tenant| assert_served(&mut fleet, tenant, 0));
        fleet.kill(2);
        fleet.assert_forgets(&chain(OTHER, 6), LIMIT);
        let error = fleet.manager.forget(ONE).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("rank 2 is away"), "{error}");
        assert_eq!(keepers(home, ONE), [2]);
        fleet.restart(2);
        wait_until(LIMIT, "it is not told", || keepers(home, ONE).is_empty());
        // And then all is well.
        fleet.manager.forget(ONE).unwrap();
        [ONE, OTHER].into_iter().for_each(|tenant| assert_heals(&mut fleet, tenant));
        fleet.end();
    }
}

#[test]
fn an_absent_rank_hears_of_it_from_the_next_leader() {
    for home in homes() {
        let home = home.path();
        let mut fleet = open(home);
        [ONE, OTHER].into_iter().for_each(|tenant| assert_served(&mut fleet, tenant, 0));
        fleet.kill(2);
        fleet.assert_forgets(&chain(OTHER, 6), LIMIT);
        let error = fleet.manager.forget(ONE).unwrap_err();
        assert!(error.to_string().contains("is told when it joins again"), "{error}");
        fleet.end();
        assert_eq!((keepers(home, ONE), debts(home).len()), (vec![2], 1));
        // All ranks are there, and the leader is another one.
        let mut fleet = open(home);
        wait_until(LIMIT, "it is not told", || {
            keepers(home, ONE).is_empty() && debts(home).is_empty()
        });
        // And then all is well, also for the tenant: it has other keys.
        assert_eq!(keepers(home, OTHER), [0, 1, 2, 3]);
        [ONE, OTHER].into_iter().for_each(|tenant| assert_heals(&mut fleet, tenant));
        drained(&fleet.manager);
        fleet.end();
        let mut fleet = open(home);
        assert_served(&mut fleet, ONE, 6);
        fleet.end();
    }
}

/// Files that say what ranks have yet to forget.
fn debts(home: &Path) -> Vec<PathBuf> {
    let is_debts = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "debts");
    files(&home.join("slots")).into_iter().filter(is_debts).collect()
}

/// What is lowest takes blocks and gives them.
fn assert_heals(fleet: &mut Fleet, tenant: u32) {
    let deadline = Instant::now() + LIMIT;
    loop {
        fleet.empty(Tier::Device);
        let served = serve(fleet, tenant);
        assert_eq!(served.wrong, 0);
        if served.hit == 6 {
            return fleet.assert_sound();
        }
        assert!(Instant::now() < deadline, "it does not heal: {served:?}");
    }
}

/// Without keys it is unknown whose blocks are.
#[test]
fn ranks_that_encrypt_nothing_say_so() {
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("plain"), "").unwrap();
    let mut fleet = open(home.path());
    assert_served(&mut fleet, ONE, 0);
    let error = fleet.manager.forget(ONE).unwrap_err();
    assert!(error.to_string().contains("not encrypted"), "{error}");
    fleet.end();
}
