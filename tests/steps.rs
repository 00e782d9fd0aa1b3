//! Plans go in steps, between which others use the table: what may come in between, and what a caller has at the end.

use std::sync::Arc;
use std::time::Duration;

use kvbm::Defect;
use kvbm::scheduler::{Core, Tuning};
use kvbm::table::{TierSet, TransferPlan};
use kvbm::{BlockHash, Chain, Class, Outcome, RequestInfo, Tier, Transfer, Transferred};
use kvbm_tests::rig::{DISK, MEMORY, OBJECT, Sizes, TIGHT, bare_core, hash, seed};
use kvbm_tiers::testing::ParkedBackend;
use kvbm_tiers::{Backend, CopyError, CopyErrorKind, Route};

const PATIENT: Tuning = Tuning {
    timeout: Duration::from_mins(1),
    object_timeout: Duration::from_mins(1),
    max_batch: 8,
    queue_blocks: 100_000,
    ..TIGHT
};
const BIG: Sizes = Sizes { tiers: [128, 128, 128, 128], staging: 4 };

fn chain(n: u32, blocks: u32) -> Vec<BlockHash> {
    (0..blocks).map(|i| hash(1_000 * n + i + 1)).collect()
}

struct Parked {
    core: Arc<Core>,
    parked: Arc<ParkedBackend>,
}

impl Parked {
    fn new(sizes: Sizes, tuning: Tuning) -> Self {
        let routes = [MEMORY, DISK, OBJECT].concat();
        let parked = Arc::new(ParkedBackend::new(Vec::new(), routes).expect("no regions, no conflict"));
        let core = bare_core(sizes, tuning, &(Arc::clone(&parked) as Arc<dyn Backend>));
        Self { core, parked }
    }
    fn seed(&self, tier: Tier, chain: &[BlockHash]) {
        seed(&self.core, tier, Chain::from(chain));
    }
    fn transfer(&self, class: Class, to: Tier, chain: &[BlockHash]) -> Transfer<Transferred> {
        let lease = self.core.lease(Chain::from(chain), RequestInfo::default());
        self.core.transfer(class, to, lease)
    }
    fn pending(&self) -> Vec<(u64, Route)> {
        self.parked.pending().into_iter().map(|pending| (pending.id, pending.op.route())).collect()
    }
    fn finish(&self, id: u64, result: Result<(), CopyErrorKind>) {
        assert!(self.parked.finish(id, result.map_err(|kind| CopyError::new(kind, "as the test says"))));
    }
    fn finish_all(&self) {
        while let Some(&(id, _)) = self.pending().first() {
            self.finish(id, Ok(()));
        }
    }
    fn plan(&self, class: Class, to: Tier, chain: &[BlockHash], through: TierSet) -> TransferPlan {
        let mut table = self.core.table();
        let pins = table.lease(Chain::from(chain), RequestInfo::default());
        let mut plan = TransferPlan::copying(class, to, pins);
        while !table.trace(&mut plan) {}
        plan.pass_host_from(through);
        plan
    }
}

fn tiers(list: &[Tier]) -> TierSet {
    list.iter().fold(TierSet::default(), |set, &tier| set.with(tier))
}

#[test]
fn a_load_of_what_is_there_keeps_all_of_its_lease() {
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

#[test]
fn what_blocks_would_stay_behind_may_fail_between_two_steps() {
    let system = Parked::new(BIG, PATIENT);
    let all = chain(1, 60);
    system.seed(Tier::Disk, &all);
    let _prefetch = system.transfer(Class::Prefetch, Tier::Host, &all[..10]);
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
fn what_others_bring_to_the_host_may_fail_between_two_steps() {
    let system = Parked::new(BIG, PATIENT);
    let all = chain(1, 60);
    system.seed(Tier::Disk, &all);
    let _prefetch = system.transfer(Class::Prefetch, Tier::Host, &all);
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
        let _ = table.land(effects.tasks.into_iter().map(|t| t.ended(Outcome::Arrived)), Duration::ZERO);
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
fn what_was_on_its_way_at_one_step_may_be_there_at_the_next() {
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
fn a_probe_that_need_not_touch_its_medium_lets_the_next_one_try() {
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
    std::thread::sleep(Duration::from_millis(80));
    let load = system.core.transfer(Class::Load, Tier::Device, lease);
    system.finish_all();
    assert_eq!(load.wait().unwrap().blocks, 1);
    std::thread::sleep(Duration::from_millis(200));
    let again = system.transfer(Class::Load, Tier::Device, &other[..1]);
    system.finish_all();
    let got = again.wait().unwrap();
    assert_eq!(got.blocks, 1, "{got:?}");
}

#[test]
fn a_full_tier_below_is_not_tried_all_the_time() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = kvbm_tests::engine::settings(4096, 32, 32);
    settings.disk.capacity = Some(kvbm_settings::Capacity::Blocks(8));
    settings.disk.dirs = vec![dir.path().to_owned()];
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
    assert!(manager.drain(Duration::from_secs(5)).is_complete());
    let held = manager.lease(&one);
    assert_eq!(held.blocks(Tier::Disk), 8);
    drop(fill(&two));
    std::thread::sleep(Duration::from_millis(200));
    let before = manager.stats(Tier::Disk).full;
    std::thread::sleep(Duration::from_secs(1));
    let tries = manager.stats(Tier::Disk).full - before;
    assert!(tries <= 100, "{tries}");
}

#[test]
fn a_closed_manager_allocates_nothing() {
    let manager =
        kvbm_tests::engine::open(kvbm_tests::engine::settings(4096, 32, 32), &prometheus::Registry::new())
            .unwrap();
    let all = chain(1, 4);
    assert!(manager.close(Duration::ZERO).is_complete());
    let error = manager.allocate(&all, manager.lease(&all)).unwrap_err();
    assert_eq!(error.kind(), kvbm::ErrorKind::Closed);
}

#[test]
fn an_allocation_keeps_all_of_its_lease() {
    let manager =
        kvbm_tests::engine::open(kvbm_tests::engine::settings(4096, 32, 32), &prometheus::Registry::new())
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
    let manager =
        kvbm_tests::engine::open(kvbm_tests::engine::settings(4096, 32, 32), &prometheus::Registry::new())
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
