//! What is kept and what goes to disk: pins, rules and budgets in a manager over real files.

use std::time::{Duration, Instant};

use kvbm::{BlockHash, ErrorKind, Manager, Tier};
use kvbm_settings::{AdmissionKind, Capacity, DiskSettings, Settings, WriteBudget};
use kvbm_tests::engine::{self, serve};
use kvbm_tests::rig::{chain, info_of};
use prometheus::Registry;

const BLOCK: u64 = 16 << 10;
const LIMIT: Duration = Duration::from_mins(1);

/// A device of 8 blocks, a host of 16, a disk of 64.
fn over_disk(dir: &tempfile::TempDir, change: impl FnOnce(&mut DiskSettings)) -> Settings {
    let mut settings = engine::settings(BLOCK, 8, 16);
    settings.flush.interval_ms = 1;
    engine::add_disk(&mut settings, 64, dir.path());
    change(&mut settings.disk);
    settings
}

fn with_disk(dir: &tempfile::TempDir, change: impl FnOnce(&mut DiskSettings)) -> Manager {
    engine::open(over_disk(dir, change), &Registry::new()).unwrap()
}

/// Serves a chain as soon as there is room for all of it.
fn serve_fully(manager: &Manager, chain: &[BlockHash]) {
    let began = Instant::now();
    while began.elapsed() < LIMIT {
        let served = serve(manager, chain);
        assert_eq!(served.wrong, 0);
        if served.saved == chain.len() {
            return;
        }
        manager.admin().tick();
        std::thread::sleep(Duration::from_millis(2));
    }
    panic!("no room came up: {:?}", manager.admin().counts(Tier::Host));
}

#[test]
fn written_back_is_what_leaves_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let manager = with_disk(&dir, |disk| disk.admission = AdmissionKind::WriteBack);
    for n in 0..3 {
        serve_fully(&manager, &chain(n, 4));
    }
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(manager.admin().stats(Tier::Disk).published, 0, "there is room above for all");
    for n in 3..12 {
        serve_fully(&manager, &chain(n, 4));
    }
    for n in 0..12 {
        assert_eq!(manager.matches(&chain(n, 4)).longest(), 4, "chain {n}");
        serve_fully(&manager, &chain(n, 4));
    }
    assert!(manager.drain(LIMIT).is_complete());
    assert_eq!(manager.admin().counts(Tier::Disk).resident, 48, "everything goes down in the end");
    assert_eq!(manager.admin().audit(), []);
}

/// The background thread asks about blocks as if they were merely used; a drain must not lose to
/// it.
#[test]
fn a_drain_sends_down_everything_however_much_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = over_disk(&dir, |disk| {
        disk.admission = AdmissionKind::WriteBack;
        disk.capacity = Some(Capacity::Blocks(1_000));
    });
    settings.host.capacity = Some(Capacity::Blocks(600));
    let manager = engine::open(settings, &Registry::new()).unwrap();
    for n in 0..120 {
        serve_fully(&manager, &chain(n, 4));
    }
    assert!(manager.admin().stats(Tier::Disk).published < 480);
    assert!(manager.drain(LIMIT).is_complete());
    assert_eq!(manager.admin().counts(Tier::Disk).resident, 480);
    assert_eq!(manager.admin().audit(), []);
}

#[test]
fn no_day_sees_more_writes_than_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let budget = WriteBudget::BytesPerDay(96 * BLOCK);
    let manager = with_disk(&dir, |disk| disk.write_budget = Some(budget));
    for n in 0..12 {
        serve_fully(&manager, &chain(n, 4));
    }
    assert!(manager.drain(LIMIT).is_complete());
    let written = manager.admin().stats(Tier::Disk).published;
    assert!(written <= 4, "{written} blocks within an hour, of a budget of 4 an hour");
    assert_eq!(manager.admin().audit(), []);
}

#[test]
fn a_budget_of_nothing_writes_nothing_and_serves_on() {
    let dir = tempfile::tempdir().unwrap();
    let manager = with_disk(&dir, |disk| {
        disk.admission = AdmissionKind::Selective;
        disk.write_budget = Some(WriteBudget::DriveWritesPerDay(0.0));
    });
    for n in 0..12 {
        serve_fully(&manager, &chain(n, 4));
    }
    assert!(manager.drain(LIMIT).is_complete());
    assert_eq!(manager.admin().stats(Tier::Disk).published, 0);
}

#[test]
fn a_rule_without_a_host_tier_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = over_disk(&dir, |disk| disk.admission = AdmissionKind::WriteBack);
    settings.host.capacity = None;
    let error = engine::open(settings, &Registry::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("set host.capacity"), "{error}");
}

#[test]
fn a_pin_keeps_a_chain_until_it_expires() {
    let manager = engine::open(engine::settings(BLOCK, 8, 16), &Registry::new()).unwrap();
    let pinned = chain(50, 4);
    serve_fully(&manager, &pinned);
    manager.pin(manager.lease(&pinned), 1_000_000).unwrap();
    for n in 0..10 {
        serve(&manager, &chain(n, 4));
    }
    assert_eq!(manager.matches(&pinned).longest(), 4);

    let brief = chain(60, 4);
    serve(&manager, &brief);
    manager.pin(manager.lease(&brief), 0).unwrap();
    let deadline = Instant::now() + LIMIT;
    while manager.matches(&brief).longest() > 0 && Instant::now() < deadline {
        manager.admin().tick();
        std::thread::sleep(Duration::from_millis(5));
        manager.admin().evict(Tier::Device, 8);
        manager.admin().evict(Tier::Host, 16);
    }
    assert_eq!((manager.matches(&brief).longest(), manager.matches(&pinned).longest()), (0, 4));
}

#[test]
fn a_tenant_that_takes_all_gives_way_to_another() {
    let mut settings = engine::settings(BLOCK, 8, 16);
    settings.fair_tenants = true;
    let manager = engine::open(settings, &Registry::new()).unwrap();
    let serve_for = |tenant: u32, chain: &[BlockHash]| {
        let lease = manager.load(manager.lease_for(info_of(tenant), chain)).wait().unwrap().lease;
        let mut allocation = manager.allocate(chain, lease).unwrap();
        allocation.blocks().for_each(|position| assert!(allocation.mark_filled(position)));
        let filled = allocation.publish().unwrap().wait().unwrap();
        manager.save(filled.lease).wait().unwrap().blocks
    };
    assert_eq!(serve_for(1, &chain(1, 4)), 4);
    for n in 10..20 {
        assert_eq!(serve_for(2, &chain(n, 4)), 4);
    }
    assert_eq!(
        manager.matches(&chain(1, 4)).blocks(Tier::Host),
        4,
        "tenant 2 is above its share, tenant 1 is not"
    );
    assert_eq!(manager.admin().audit(), []);
}
