//! Plans go in steps, between which others use the table: what may come in between, and what a
//! caller has at the end.

use std::time::Duration;

use kvbm::Defect;
use kvbm::scheduler::Tuning;
use kvbm::table::TierSet;
use kvbm::{BlockHash, Chain, Class, Outcome, RequestInfo, Tier};
use kvbm_tests::engine;
use kvbm_tests::parked::{self, Parked};
use kvbm_tests::rig::{Sizes, chain};
use kvbm_tiers::{CopyErrorKind, Route};

const PATIENT: Tuning = Tuning { queue_blocks: 100_000, ..parked::PATIENT };
const BIG: Sizes = Sizes { tiers: [128, 128, 128, 128], staging: 4 };

fn tiers(list: &[Tier]) -> TierSet {
    list.iter().fold(TierSet::default(), |set, &tier| set.with(tier))
}

#[test]
fn a_load_of_present_blocks_keeps_all_its_lease() {
    let system = Parked::new(BIG, PATIENT);
    let all = chain(1, 10);
    system.seed(Tier::Device, &all);
    system.seed(Tier::Host, &all[..5]);
    let lease = system.core.lease(Chain::from(&all), RequestInfo::default());
    assert_eq!(lease.blocks(Tier::Device), 10);
    let got = system.core.transfer(Class::Load, Tier::Device, lease).wait().unwrap();
    let evicted = system.core.table().evict(Tier::Device, 100);
    assert_eq!((got.blocks, evicted), (10, 0));
}

/// A load passes the host, to which another transfer brings the first `brought` of the same blocks,
/// and these fail.
fn others_fail_between_two_steps(brought: usize) {
    let system = Parked::new(BIG, PATIENT);
    let all = chain(1, 60);
    system.seed(Tier::Disk, &all);
    let _prefetch = system.transfer(Class::Prefetch, Tier::Host, &all[..brought]);
    let mut plan = system.plan(Class::Load, Tier::Device, &all, tiers(&[Tier::Disk, Tier::Object]));
    {
        let mut table = system.core.table();
        assert!(!table.extend(&mut plan));
        let _ = table.take_effects();
    }
    for (id, _) in system.pending() {
        system.finish(id, Err(CopyErrorKind::Refused));
    }
    let mut table = system.core.table();
    while !table.extend(&mut plan) {}
    assert_eq!(table.audit(), []);
}

#[test]
fn what_blocks_would_stay_behind_may_fail_between_two_steps() {
    others_fail_between_two_steps(10);
}

#[test]
fn what_others_bring_may_fail_between_two_steps() {
    others_fail_between_two_steps(60);
}

#[test]
fn what_was_published_may_be_dropped_between_two_steps() {
    let system = Parked::new(BIG, PATIENT);
    let all = chain(1, 60);
    system.seed(Tier::Object, &all);
    let mut plan = system.plan(Class::Prefetch, Tier::Disk, &all, tiers(&[]));
    let effects = {
        let mut table = system.core.table();
        assert!(!table.extend(&mut plan));
        table.take_effects()
    };
    assert_eq!(effects.tasks.len(), 7);
    let later = {
        let mut table = system.core.table();
        let _ = table
            .land(effects.tasks.into_iter().map(|t| t.ended(Outcome::Arrived)), Duration::ZERO);
        let key = Chain::from(&all).key(0);
        let (found, pins) = table.pin_resident(Tier::Disk, key).unwrap();
        table.release(pins);
        assert_eq!(table.quarantine(key, found, Defect::Corrupt), 7);
        while !table.extend(&mut plan) {}
        table.take_effects()
    };
    let mut table = system.core.table();
    let _ = table.land(later.tasks.into_iter().map(|t| t.ended(Outcome::Arrived)), Duration::ZERO);
    assert_eq!(table.audit(), []);
}

#[test]
fn what_one_step_saw_coming_the_next_may_find_there() {
    let system = Parked::new(BIG, PATIENT);
    let all = chain(1, 60);
    system.seed(Tier::Host, &all);
    let first = system.transfer(Class::Load, Tier::Device, &all);
    let mut plan = system.plan(Class::Load, Tier::Device, &all, tiers(&[]));
    {
        let mut table = system.core.table();
        assert!(!table.extend(&mut plan));
        let _ = table.take_effects();
    }
    system.finish_all();
    assert_eq!(first.wait().unwrap().blocks, 60);
    let mut table = system.core.table();
    while !table.extend(&mut plan) {}
    assert_eq!(plan.refused(), 0);
}

/// The disk has lost a chain: what comes before its last block is found in several holds.
#[test]
fn a_spent_hold_does_not_put_off_a_flush() {
    const LONG: u32 = 6_000;
    let sizes = Sizes { tiers: [16, LONG + 16, LONG + 16, 16], staging: 4 };
    let system = Parked::new(sizes, Tuning { dirty_watermark: 0.1, ..PATIENT });
    let all = chain(1, LONG);
    system.seed(Tier::Disk, &all);
    system.seed(Tier::Host, &all);
    {
        let mut table = system.core.table();
        table.quarantine_resident(Tier::Disk, Chain::from(&all).key(0), Defect::Corrupt);
        assert!(table.is_dropping(), "it is too long for one step");
    }
    system.core.tick();
    assert_eq!(system.held(Tier::Disk, &all), 0);
    assert!(system.pending_on(Route::new(Tier::Host, Tier::Disk)) > 0, "all of it is due");
    while system.held(Tier::Disk, &all) < LONG as usize {
        system.finish_all();
        system.core.tick();
    }
    assert_eq!(system.core.table().audit(), []);
}

#[test]
fn a_transfer_that_a_quarantine_ends_counts_what_is_left() {
    let system = Parked::new(BIG, PATIENT);
    let all = chain(1, 6);
    system.seed(Tier::Object, &all);
    system.seed(Tier::Disk, &all[..3]);
    let prefetch = system.transfer(Class::Prefetch, Tier::Disk, &all);
    let effects = {
        let key = Chain::from(&all).key(1);
        let mut table = system.core.table();
        let (found, pins) = table.pin_resident(Tier::Disk, key).unwrap();
        table.release(pins);
        table.quarantine(key, found, Defect::Corrupt);
        table.take_effects()
    };
    for ended in effects.ended {
        ended.report();
    }
    let got = prefetch.wait().unwrap();
    assert_eq!(got.blocks, 1);
}

#[test]
fn a_probe_without_use_of_its_medium_passes_the_turn() {
    let system = Parked::new(BIG, Tuning { breaker_pause: Duration::from_millis(50), ..PATIENT });
    let (all, other) = (chain(1, 1), chain(2, 2));
    system.seed(Tier::Disk, &all);
    system.seed(Tier::Disk, &other);
    // Opens the breaker on the disk.
    let load = system.transfer(Class::Load, Tier::Device, &other);
    system.finish(system.pending()[0].0, Err(CopyErrorKind::Unavailable));
    system.finish_all();
    drop(load.wait());
    let lease = system.core.lease(Chain::from(&all), RequestInfo::default());
    system.seed(Tier::Host, &all);
    system.clock.pass(Duration::from_millis(80));
    let load = system.core.transfer(Class::Load, Tier::Device, lease);
    system.finish_all();
    assert_eq!(load.wait().unwrap().blocks, 1);
    system.clock.pass(Duration::from_millis(200));
    let again = system.transfer(Class::Load, Tier::Device, &other[..1]);
    system.finish_all();
    let got = again.wait().unwrap();
    assert_eq!(got.blocks, 1, "{got:?}");
}

#[test]
fn a_full_tier_below_is_not_tried_all_the_time() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = kvbm_tests::engine::settings(4096, 32, 32);
    engine::add_disk(&mut settings, 8, dir.path());
    settings.flush.interval_ms = 10;
    let manager = kvbm_tests::engine::open(settings, &prometheus::Registry::new()).unwrap();
    let (one, two) = (chain(1, 8), chain(2, 4));
    let fill = |chain: &[BlockHash]| {
        let mut allocation = manager.allocate(chain, manager.lease(chain)).unwrap();
        for position in allocation.blocks() {
            assert!(allocation.fill(position, |block| block.fill(1)));
        }
        let lease = allocation.publish().unwrap().wait().unwrap().lease;
        manager.save(lease).wait().unwrap().lease
    };
    drop(fill(&one));
    assert!(manager.drain(Duration::from_mins(1)).is_complete());
    let held = manager.lease(&one);
    assert_eq!(held.blocks(Tier::Disk), 8);
    drop(fill(&two));
    std::thread::sleep(Duration::from_millis(200));
    let before = manager.admin().stats(Tier::Disk).full;
    std::thread::sleep(Duration::from_secs(1));
    let tries = manager.admin().stats(Tier::Disk).full - before;
    assert!(tries <= 100, "{tries}");
}

#[test]
fn a_closed_manager_allocates_nothing() {
    let manager = kvbm_tests::engine::open(
        kvbm_tests::engine::settings(4096, 32, 32),
        &prometheus::Registry::new(),
    )
    .unwrap();
    let all = chain(1, 4);
    assert!(manager.close(Duration::ZERO).is_complete());
    let error = manager.allocate(&all, manager.lease(&all)).unwrap_err();
    assert_eq!(error.kind(), kvbm::ErrorKind::Closed);
}

#[test]
fn an_allocation_keeps_all_of_its_lease() {
    let manager = kvbm_tests::engine::open(
        kvbm_tests::engine::settings(4096, 32, 32),
        &prometheus::Registry::new(),
    )
    .unwrap();
    let all = chain(1, 10);
    let mut allocation = manager.allocate(&all, manager.lease(&all)).unwrap();
    allocation.blocks().for_each(|at| assert!(allocation.mark_filled(at)));
    let lease = allocation.publish().unwrap().wait().unwrap().lease;
    assert_eq!(lease.blocks(Tier::Device), 10);
    let got = manager.allocate(&all[..5], lease).unwrap().publish().unwrap().wait().unwrap();
    assert_eq!(got.lease.blocks(Tier::Device), 10);
}

#[test]
fn a_load_of_what_the_device_has_keeps_it_there() {
    let manager = kvbm_tests::engine::open(
        kvbm_tests::engine::settings(4096, 32, 32),
        &prometheus::Registry::new(),
    )
    .unwrap();
    let all = chain(1, 10);
    for n in [5, 10] {
        let mut allocation = manager.allocate(&all[..n], manager.lease(&all[..n])).unwrap();
        allocation.blocks().for_each(|at| assert!(allocation.mark_filled(at)));
        let lease = allocation.publish().unwrap().wait().unwrap().lease;
        if n == 5 {
            drop(manager.save(lease).wait().unwrap());
        }
    }
    let got = manager.load(manager.lease(&all)).wait().unwrap();
    assert_eq!(got.blocks, 10);
}
