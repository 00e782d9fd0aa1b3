//! Shadow verification: an engine computes some of its hits again.

use std::time::Duration;

use kvbm::blocking::Blocks;
use kvbm::table::Budget;
use kvbm::{Class, Elements, Error, Lease, Manager, ShadowSample, ShadowVerdict, Tier};
use kvbm_settings::{Capacity, Settings};
use kvbm_tests::engine;
use kvbm_tests::parked::{PATIENT, Parked};
use kvbm_tests::rig::{self, Sizes, chain, metric};
use prometheus::Registry;

const BLOCK: usize = 4096;
const BLOCKS: u32 = 6;
const LIMIT: Duration = Duration::from_mins(1);

fn shadowing(share: f64) -> Settings {
    let mut settings = engine::settings(BLOCK as u64, 8, 2_000);
    settings.transfer.shadow_share = share;
    settings
}

fn open(share: f64) -> Manager {
    engine::open(shadowing(share), &Registry::new()).unwrap()
}

/// The keys and values of a block, as chunks of some size give them.
fn computed(seed: u32, noise: f32) -> Vec<u8> {
    let value =
        |at: u32| ((at * 7 + seed * 13) as f32 * 0.61).sin() * (1.0 + noise * (at % 3) as f32);
    (0..BLOCK as u32 / 4).flat_map(|at| value(at).to_le_bytes()).collect()
}

/// An engine that takes `wrong` blocks for those of the same name of the next chain: it hashes too
/// little.
fn fill(manager: &Manager, number: u32, wrong: &[usize]) {
    let computed = compute(manager, number, wrong);
    assert_eq!(manager.save(computed).wait().unwrap().blocks, BLOCKS as usize);
    manager.admin().evict(Tier::Device, BLOCKS as usize);
}

/// The same, before anything is saved.
fn compute(manager: &Manager, number: u32, wrong: &[usize]) -> Lease {
    let chain = chain(number, BLOCKS);
    let mut allocation = manager.allocate(&chain, manager.lease(&chain)).unwrap();
    for position in allocation.blocks() {
        let seed = 100 * (number + u32::from(wrong.contains(&position))) + position as u32;
        assert!(allocation.fill(position, |block| block.copy_from_slice(&computed(seed, 0.0))));
    }
    allocation.publish().unwrap().wait().unwrap().lease
}

/// Computes what is sampled of a chain again; returns how many were compared, and which were wrong.
fn verify(manager: &Manager, number: u32, noise: f32) -> (usize, Vec<usize>) {
    let chain = chain(number, BLOCKS);
    let lease = manager.lease(&chain);
    let samples = manager.admin().shadow_sample(&lease);
    let loaded: Lease = manager.load(lease).wait().unwrap().lease;
    let mut wrong = Vec::new();
    let held = loaded.blocks(Tier::Device);
    for sample in samples.iter().filter(|sample| sample.position < held) {
        assert_eq!(sample.tier, Tier::Host);
        // Behind a block that was wrong there is nothing any more.
        let Some(served) = manager.read_device(&loaded, &chain, sample.position, <[u8]>::to_vec)
        else {
            break;
        };
        let again = computed(100 * number + sample.position as u32, noise);
        match manager
            .admin()
            .shadow_compare(&chain, sample, Elements::F32, &served, &again)
            .unwrap()
        {
            ShadowVerdict::Same => {}
            ShadowVerdict::Wrong { distance } => {
                assert!(distance > 0.1, "{distance}");
                wrong.push(sample.position);
            }
        }
    }
    drop(loaded);
    manager.admin().evict(Tier::Device, BLOCKS as usize);
    (samples.len(), wrong)
}

#[test]
fn what_differs_in_its_lowest_bits_stays() {
    let manager = open(1.0);
    for number in 0..20 {
        fill(&manager, number, &[]);
        assert_eq!(verify(&manager, number, 1e-5), (BLOCKS as usize, vec![]));
        assert_eq!(manager.matches(&chain(number, BLOCKS)).blocks(Tier::Host), BLOCKS as usize);
    }
    let counts = manager.admin().shadow_counts(Tier::Host);
    assert_eq!((counts.compared, counts.wrong, counts.is_withdrawn), (120, 0, false));
    assert!((counts.upper_bound() - 0.0247).abs() < 1e-3, "{}", counts.upper_bound());
    assert_eq!(manager.admin().audit(), []);
}

#[test]
fn of_a_share_of_the_leases_all_hits_are_sampled() {
    let manager = open(0.25);
    fill(&manager, 1, &[]);
    let sampled = |_| manager.admin().shadow_sample(&manager.lease(&chain(1, BLOCKS))).len();
    let sampled: Vec<_> = (0..200).map(sampled).filter(|&blocks| blocks > 0).collect();
    assert!((48..=52).contains(&sampled.len()), "{sampled:?}");
    assert!(sampled.iter().all(|&blocks| blocks == BLOCKS as usize), "{sampled:?}");
    assert!(
        manager.admin().shadow_sample(&manager.lease(&chain(2, BLOCKS))).is_empty(),
        "it has no hits"
    );
}

#[test]
fn a_block_of_another_is_found_out_and_gone() {
    let registry = Registry::new();
    let manager = engine::open(shadowing(1.0), &registry).unwrap();
    fill(&manager, 1, &[3]);
    fill(&manager, 2, &[]);
    assert_eq!(verify(&manager, 1, 0.0).1, [3]);
    let left = manager.matches(&chain(1, BLOCKS));
    assert_eq!(
        (left.blocks(Tier::Host), left.blocks(Tier::Device)),
        (3, 0),
        "it and what followed it"
    );
    assert_eq!(manager.matches(&chain(2, BLOCKS)).blocks(Tier::Host), BLOCKS as usize);
    assert!(!manager.admin().shadow_counts(Tier::Host).is_withdrawn, "once may be chance");
    let families = registry.gather();
    assert!(families.iter().any(|family| family.name() == "kvbm_shadow_wrong_rate_bound"));
    // And it heals: computed and saved anew, all is served, and right.
    fill_rest(&manager);
    assert_eq!(verify(&manager, 1, 0.0), (BLOCKS as usize, vec![]));
    assert_eq!(manager.admin().audit(), []);
}

/// Saves anew what chain 1 lost.
fn fill_rest(manager: &Manager) {
    let chain = chain(1, BLOCKS);
    let loaded = manager.load(manager.lease(&chain)).wait().unwrap().lease;
    let mut allocation = manager.allocate(&chain, loaded).unwrap();
    for position in allocation.blocks() {
        assert!(
            allocation.fill(position, |block| block
                .copy_from_slice(&computed(100 + position as u32, 0.0)))
        );
    }
    let published = allocation.publish().unwrap().wait().unwrap();
    assert_eq!(manager.save(published.lease).wait().unwrap().blocks, BLOCKS as usize);
    manager.admin().evict(Tier::Device, BLOCKS as usize);
}

#[test]
fn a_tier_wrong_too_often_gives_nothing_until_a_reset() {
    let manager = open(1.0);
    fill(&manager, 6, &[]);
    for number in 0..3 {
        fill(&manager, number * 2, &[0]);
        assert_eq!(verify(&manager, number * 2, 0.0).1, [0], "{number}");
    }
    assert!(manager.admin().shadow_counts(Tier::Host).is_withdrawn);
    let loaded = manager.load(manager.lease(&chain(6, BLOCKS))).wait().unwrap();
    assert_eq!(loaded.lease.blocks(Tier::Device), 0);
    drop(loaded);
    let saved = manager.save(compute(&manager, 8, &[])).wait().unwrap();
    assert_eq!((saved.blocks, saved.refused), (0, BLOCKS as usize));
    drop(saved);
    manager.reset(1).unwrap();
    fill(&manager, 20, &[]);
    assert_eq!(verify(&manager, 20, 1e-5), (BLOCKS as usize, vec![]));
    assert!(!manager.admin().shadow_counts(Tier::Host).is_withdrawn);
    assert!(manager.drain(LIMIT).is_complete());
    assert_eq!(manager.admin().audit(), []);
}

/// Finds enough blocks of a tier wrong to have it withdrawn. They are of no chain that a test uses.
fn withdraw(manager: &Manager, tier: Tier) {
    let (one, other) = (computed(1, 0.0), computed(2, 0.0));
    let sample = ShadowSample { position: 0, tier };
    while !manager.admin().shadow_counts(tier).is_withdrawn {
        manager
            .admin()
            .shadow_compare(&chain(99, BLOCKS), &sample, Elements::F32, &one, &other)
            .unwrap();
    }
}

fn on_disk(dir: &tempfile::TempDir) -> Settings {
    let mut settings = shadowing(1.0);
    settings.host.capacity = Some(Capacity::Blocks(64));
    settings.host.staging_blocks = 8;
    engine::add_disk(&mut settings, 64, dir.path());
    // What goes down does so when a test drains.
    settings.flush.interval_ms = 3_600_000;
    settings.flush.dirty_watermark = 1.0;
    settings
}

fn reasons(manager: &Manager) -> Vec<(String, String)> {
    manager
        .admin()
        .readiness()
        .degraded
        .into_iter()
        .map(|degraded| (degraded.what, degraded.why))
        .collect()
}

#[test]
fn a_withdrawn_host_gives_nothing_anywhere_until_a_reset() {
    let (dir, registry) = (tempfile::tempdir().unwrap(), Registry::new());
    let manager = engine::open(on_disk(&dir), &registry).unwrap();
    let (down, up) = (chain(1, BLOCKS), chain(2, BLOCKS));
    engine::serve(&manager, &down);
    assert!(manager.drain(LIMIT).is_complete());
    engine::serve(&manager, &up);
    manager.admin().evict(Tier::Device, 8);
    let early = manager.lease(&up);
    assert_eq!(early.blocks(Tier::Host), BLOCKS as usize);
    withdraw(&manager, Tier::Host);
    assert_eq!(manager.matches(&up).longest(), 0);
    assert_eq!(manager.lease(&up).held().longest(), 0);
    let miss = manager.admin().why(&up).next.unwrap();
    assert_eq!((miss.reason, miss.tier), ("withdrawn", Some(Tier::Host)));
    let loaded = manager.load(early).wait().unwrap();
    assert_eq!((loaded.copied, loaded.lease.held().longest()), (0, 0), "a lease from before");
    drop(loaded);
    // Nothing of it goes down, nor does anything come.
    assert!(manager.drain(LIMIT).is_complete());
    assert_eq!(
        (manager.matches(&up).blocks(Tier::Disk), manager.admin().counts(Tier::Disk).resident),
        (0, BLOCKS)
    );
    let prefetched = manager.prefetch(manager.lease(&down), Tier::Host).wait().unwrap();
    assert_eq!((prefetched.copied, prefetched.refused), (0, BLOCKS as usize));
    drop(prefetched);
    // What lies on disk passes through slots that are for that.
    let served = engine::serve(&manager, &down);
    assert_eq!((served.hit, served.wrong, served.failed), (BLOCKS as usize, 0, 0));
    let [(what, why)] = &reasons(&manager)[..] else { panic!("{:?}", reasons(&manager)) };
    assert!(what == "host" && why.contains("reset"), "{why}");
    assert!(manager.admin().readiness().ready, "the disk is of use");
    assert_eq!(metric(&registry, "kvbm_breaker_open", &[("from", "host"), ("to", "device")]), 1);
    // And then it heals.
    manager.reset(1).unwrap();
    assert!(manager.admin().readiness().ready && reasons(&manager).is_empty());
    for _ in 0..2 {
        assert_eq!(engine::serve(&manager, &up).saved, BLOCKS as usize);
        manager.admin().evict(Tier::Device, 8);
    }
    assert_eq!(engine::serve(&manager, &up).hit, BLOCKS as usize);
    assert!(manager.drain(LIMIT).is_complete());
    assert_eq!(manager.matches(&up).blocks(Tier::Disk), BLOCKS as usize);
    assert_eq!(metric(&registry, "kvbm_breaker_open", &[]), 0);
    assert_eq!(manager.admin().audit(), []);
}

#[test]
fn a_withdrawn_disk_gives_and_takes_nothing_and_hosts_continue() {
    let dir = tempfile::tempdir().unwrap();
    let manager = engine::open(on_disk(&dir), &Registry::new()).unwrap();
    let (down, up) = (chain(1, BLOCKS), chain(2, BLOCKS));
    engine::serve(&manager, &down);
    assert!(manager.drain(LIMIT).is_complete());
    manager.admin().evict(Tier::Device, 8);
    manager.admin().evict(Tier::Host, 64);
    engine::serve(&manager, &up);
    withdraw(&manager, Tier::Disk);
    assert_eq!(manager.matches(&down).longest(), 0);
    let drained = manager.drain(Duration::MAX);
    assert_eq!(
        (drained.unflushed[Tier::Host.index()], drained.in_flight),
        (BLOCKS as usize, false)
    );
    assert_eq!(manager.admin().counts(Tier::Disk).resident, BLOCKS);
    manager.admin().evict(Tier::Device, 8);
    assert_eq!(engine::serve(&manager, &up).hit, BLOCKS as usize);
    manager.admin().evict(Tier::Device, 8);
    assert_eq!(manager.admin().evict(Tier::Host, 64), BLOCKS as usize, "they may leave");
    assert_eq!(manager.admin().stats(Tier::Host).unflushed, u64::from(BLOCKS));
    manager.reset(1).unwrap();
    engine::serve(&manager, &down);
    assert!(manager.drain(LIMIT).is_complete());
    assert_eq!(manager.matches(&down).blocks(Tier::Disk), BLOCKS as usize);
    assert_eq!(manager.admin().audit(), []);
}

#[test]
fn engines_that_copy_themselves_get_nothing_from_withdrawn_hosts() {
    let mut settings = shadowing(1.0);
    settings.device.capacity = None;
    let blocks = Blocks::open(settings, kvbm::Options::default()).unwrap();
    let put = |n: u32| {
        blocks.put(&chain(n, BLOCKS), |position, slot| {
            slot.copy_from_slice(&computed(100 * n + position as u32, 0.0));
            Ok::<_, Error>(())
        })
    };
    let get = |n: u32| {
        blocks.get(&chain(n, BLOCKS), |position, block| {
            assert_eq!(block, computed(100 * n + position as u32, 0.0));
            Ok::<_, Error>(())
        })
    };
    assert_eq!((put(1).unwrap(), get(1).unwrap()), (BLOCKS as usize, BLOCKS as usize));
    let lease = blocks.manager().lease(&chain(1, BLOCKS));
    withdraw(blocks.manager(), Tier::Host);
    assert_eq!((get(1).unwrap(), put(2).unwrap(), get(2).unwrap()), (0, 0, 0));
    drop(lease);
    assert!(!blocks.manager().admin().readiness().ready, "there is no other tier");
    blocks.manager().reset(1).unwrap();
    assert!(blocks.manager().admin().readiness().ready);
    assert_eq!(
        (get(1).unwrap(), put(1).unwrap(), get(1).unwrap()),
        (0, BLOCKS as usize, BLOCKS as usize)
    );
    assert_eq!(blocks.manager().admin().audit(), []);
}

#[test]
fn copies_under_way_from_a_withdrawn_tier_land_nowhere() {
    let system = Parked::new(Sizes { tiers: [16, 16, 16, 16], staging: 4 }, PATIENT);
    let (from_host, from_disk) = (rig::chain(1, 4), rig::chain(2, 4));
    system.seed(Tier::Host, &from_host);
    system.seed(Tier::Disk, &from_disk);
    let leaves = system.transfer(Class::Load, Tier::Device, &from_host);
    let passes = system.transfer(Class::Load, Tier::Device, &from_disk);
    system.core.withdraw(Tier::Host);
    system.finish_all();
    let (leaves, passes) = (leaves.wait().unwrap(), passes.wait().unwrap());
    assert_eq!((leaves.blocks, leaves.failed, passes.blocks), (0, 4, 4));
    assert_eq!(
        (system.held(Tier::Device, &from_host), system.held(Tier::Host, &from_disk)),
        (0, 0)
    );
    drop((leaves, passes));
    system.core.reset(1).unwrap();
    while system.core.table().sweep(&mut Budget::of_a_hold()) {}
    for tier in Tier::ALL {
        let counts = system.core.table().counts(tier);
        assert_eq!(counts.free, counts.total, "{tier}: {counts:?}");
    }
    assert_eq!(system.core.table().audit(), []);
}

#[test]
fn nothing_is_asked_for_unless_it_is_wanted() {
    let manager = open(0.0);
    fill(&manager, 1, &[]);
    assert_eq!(verify(&manager, 1, 0.0), (0, vec![]));
    let some = open(0.5);
    let asked: usize = (0..20)
        .map(|number| {
            fill(&some, number, &[]);
            verify(&some, number, 0.0).0
        })
        .sum();
    assert!((55..=65).contains(&asked), "{asked} of 120");
}
