//! How transfers share copies, bound their queues and refuse nonsense: with backends that end
//! copies when told to.

use std::time::Duration;

use kvbm::scheduler::Tuning;
use kvbm::table::locks_taken;
use kvbm::{BlockHash, Chain, Class, ErrorKind, RequestInfo, Tier};
use kvbm_settings::Capacity;
use kvbm_tests::engine;
use kvbm_tests::parked::{PATIENT, Parked};
use kvbm_tests::rig::{Sizes, TIGHT, chain};
use kvbm_tiers::{CopyErrorKind, Route};
use prometheus::Registry;

const SIZES: Sizes = Sizes { tiers: [16, 16, 32, 64], staging: 4 };

#[test]
fn a_load_that_joins_another_gets_what_arrives() {
    for fails in 0..6 {
        let system = Parked::new(SIZES, PATIENT);
        let chain = chain(1, 6);
        system.seed(Tier::Host, &chain);
        let tickets = [(); 2].map(|()| system.transfer(Class::Load, Tier::Device, &chain));
        assert_eq!(system.pending().len(), 6, "the blocks are copied once");
        for (place, (id, _)) in system.pending().into_iter().enumerate() {
            system
                .finish(id, if place == fails { Err(CopyErrorKind::Unavailable) } else { Ok(()) });
        }
        for transferred in tickets.map(|ticket| ticket.wait().unwrap()) {
            assert_eq!(transferred.blocks, fails, "{transferred:?}");
        }
    }
}

#[test]
fn a_lease_keeps_what_lies_before_a_quarantined_block() {
    let system = Parked::new(SIZES, PATIENT);
    let chain = chain(1, 6);
    system.seed(Tier::Disk, &chain);
    let lease = system.core.lease(Chain::from(&chain), RequestInfo::default());
    system.quarantine(Tier::Disk, &chain, 5);
    system.quarantine(Tier::Disk, &chain, 3);
    let ticket = system.core.transfer(Class::Load, Tier::Device, lease);
    system.finish_all();
    let transferred = ticket.wait().unwrap();
    assert_eq!(
        (transferred.blocks, transferred.lease.blocks(Tier::Disk)),
        (3, 3),
        "{transferred:?}"
    );
    assert_eq!(system.core.table().audit(), []);
    drop(transferred);
    system.core.table().block_flushes(Tier::Disk, true);
    system.core.table().evict(Tier::Disk, 32);
    assert_eq!(system.core.table().counts(Tier::Disk).free, 32, "nothing stays pinned");
}

#[test]
fn a_bad_read_of_an_old_slot_spares_its_successor() {
    let system = Parked::new(SIZES, PATIENT);
    let chain = chain(1, 1);
    system.seed(Tier::Disk, &chain);
    let load = system.transfer(Class::Load, Tier::Device, &chain);
    let save = system.transfer(Class::Save, Tier::Object, &chain);
    let pending = system.pending();
    system.finish(pending[0].0, Err(CopyErrorKind::Corrupt));
    assert_eq!(system.held(Tier::Disk, &chain), 0);
    system.seed(Tier::Disk, &chain);
    system.finish(pending[1].0, Err(CopyErrorKind::Corrupt));
    assert_eq!(system.held(Tier::Disk, &chain), 1, "the verdict was on another slot's bytes");
    system.finish_all();
    drop((load.wait(), save.wait()));
}

#[test]
fn a_chain_may_begin_amid_a_longer_one() {
    let system = Parked::new(SIZES, Tuning { prefill_block_s: Some(1.0), ..PATIENT });
    let all = chain(1, 6);
    system.seed(Tier::Disk, &all);
    let load = system.transfer(Class::Load, Tier::Device, &all[3..]);
    let transferred = load.wait().unwrap();
    assert_eq!(
        (transferred.blocks, transferred.recompute, transferred.refused),
        (0, 0, 3),
        "its root is not there"
    );
    drop(transferred);
    let root = system.transfer(Class::Load, Tier::Device, &all[..3]);
    system.finish_all();
    drop(root.wait());
    let load = system.transfer(Class::Load, Tier::Device, &all[3..]);
    system.finish_all();
    assert_eq!(load.wait().unwrap().blocks, 3);
    assert_eq!(system.held(Tier::Device, &all), 6);
    assert_eq!(system.core.table().audit(), []);
}

/// Each half was stored by somebody who did not know of the other: together they are no chain.
#[test]
fn two_unlinked_halves_are_served_up_to_the_first() {
    let manager = manager();
    let all = chain(1, 6);
    engine::serve(&manager, &all[..2]);
    engine::serve(&manager, &all[2..]);
    for _ in 0..2 {
        while manager.admin().evict(Tier::Device, 16) > 0 {}
        let served = engine::serve(&manager, &all);
        assert_eq!((served.wrong, served.failed), (0, 0), "{served:?}");
        assert_eq!(engine::serve(&manager, &all[2..]).wrong, 0);
    }
    assert_eq!(manager.admin().audit(), []);
}

#[test]
fn the_queue_of_a_bouncing_route_is_bounded_too() {
    let sizes = Sizes { tiers: [128, 128, 128, 64], staging: 4 };
    let queue_blocks = TIGHT.queue_blocks;
    for to in [Tier::Host, Tier::Disk] {
        let system = Parked::new(sizes, Tuning { max_batch: 3, ..PATIENT });
        let tickets: Vec<_> = (0..6)
            .map(|n| {
                system.seed(Tier::Device, &chain(n, 16));
                system.transfer(Class::Save, to, &chain(n, 16))
            })
            .collect();
        system.finish_all();
        let transferred: Vec<_> =
            tickets.into_iter().map(|ticket| ticket.wait().unwrap()).collect();
        let copied: usize = transferred.iter().map(|transferred| transferred.copied).sum();
        let in_flight = TIGHT.max_concurrent * 3;
        assert!(copied <= queue_blocks + in_flight, "{copied} blocks were taken on to {to}");
        assert_eq!(
            transferred.iter().map(|transferred| transferred.refused).sum::<usize>(),
            96 - copied
        );
    }
}

/// The first block comes from the host, the others from a disk whose queue is full.
#[test]
fn the_queue_is_bounded_whatever_comes_first() {
    let system = Parked::new(
        Sizes { tiers: [128, 128, 128, 64], staging: 4 },
        Tuning { max_batch: 3, ..PATIENT },
    );
    let busy: Vec<_> = (1..6)
        .map(|n| {
            system.seed(Tier::Disk, &chain(n, 16));
            system.transfer(Class::Prefetch, Tier::Host, &chain(n, 16))
        })
        .collect();
    let mixed = chain(9, 8);
    system.seed(Tier::Disk, &mixed);
    system.seed(Tier::Host, &mixed[..1]);
    let save = system.transfer(Class::Save, Tier::Object, &mixed);
    system.finish_all();
    let saved = save.wait().unwrap();
    assert_eq!((saved.copied, saved.refused), (1, 7), "{saved:?}");
    busy.into_iter().for_each(|ticket| drop(ticket.wait()));
}

#[test]
fn second_legs_do_not_wait_for_other_first_legs() {
    let system = Parked::new(SIZES, PATIENT);
    let chain = chain(1, 3);
    system.seed(Tier::Disk, &chain);
    let load = system.transfer(Class::Load, Tier::Device, &chain);
    let reads = system.pending();
    assert_eq!(system.pending_on(Route::new(Tier::Disk, Tier::Host)), 3);
    system.finish(reads[0].0, Ok(()));
    assert_eq!(system.pending_on(Route::new(Tier::Host, Tier::Device)), 1);
    system.finish_all();
    assert_eq!(load.wait().unwrap().blocks, 3);
}

#[test]
fn a_load_during_a_prefetch_reads_no_block_twice() {
    for prefetch_fails in [false, true] {
        let system = Parked::new(SIZES, PATIENT);
        let chain = chain(1, 3);
        system.seed(Tier::Disk, &chain);
        let prefetch = system.transfer(Class::Prefetch, Tier::Host, &chain);
        let load = system.transfer(Class::Load, Tier::Device, &chain);
        let reads = system.pending();
        assert_eq!(reads.len(), 3, "{reads:?}");
        if prefetch_fails {
            reads.iter().for_each(|&(id, _)| system.finish(id, Err(CopyErrorKind::Refused)));
            assert_eq!(
                system.pending_on(Route::new(Tier::Disk, Tier::Host)),
                3,
                "the load reads for itself then"
            );
        }
        system.finish_all();
        assert_eq!(load.wait().unwrap().blocks, 3);
        assert_eq!(prefetch.wait().unwrap().blocks, if prefetch_fails { 0 } else { 3 });
        assert_eq!(system.core.table().audit(), []);
    }
}

/// A prefetch that waits behind others becomes urgent when an engine waits for its blocks.
#[test]
fn a_load_raises_the_prefetch_that_it_waits_for() {
    let system = Parked::new(SIZES, Tuning { max_concurrent: 1, max_batch: 1, ..PATIENT });
    let (first, second) = (chain(1, 1), chain(2, 1));
    let other = chain(3, 3);
    [&first, &second, &other].into_iter().for_each(|chain| system.seed(Tier::Disk, chain));
    let early: Vec<_> =
        [&first, &other, &second].map(|c| system.transfer(Class::Prefetch, Tier::Host, c)).into();
    let load = system.transfer(Class::Load, Tier::Device, &second);
    system.finish(system.pending()[0].0, Ok(()));
    let next = system.parked.pending()[0].op.block;
    assert_eq!(
        next,
        Chain::from(&second).key(0),
        "it overtakes the prefetches, which have no caller"
    );
    system.finish_all();
    assert_eq!(load.wait().unwrap().blocks, 1);
    early.into_iter().for_each(|ticket| drop(ticket.wait()));
}

#[test]
fn waits_for_an_engine_do_not_slow_a_tiers_pace() {
    let system = Parked::new(SIZES, Tuning { prefill_block_s: Some(0.05), ..PATIENT });
    let one = chain(1, 6);
    system.seed(Tier::Host, &one);
    let reserved =
        system.core.reserve(Tier::Device, Chain::from(&one[..3]), RequestInfo::default());
    let load = system.transfer(Class::Load, Tier::Device, &one);
    system.finish_all();
    system.clock.pass(Duration::from_millis(200));
    let lease = system.core.lease(Chain::from(&one[..3]), RequestInfo::default());
    drop(system.core.publish(reserved, 3, lease).wait());
    assert_eq!(load.wait().unwrap().blocks, 6);
    let other = chain(2, 6);
    system.seed(Tier::Host, &other);
    let held = system.core.matches(Chain::from(&other));
    assert_eq!(held.worth_loading(), 6, "the copies took no time, the engine did");
}

#[test]
fn an_overdue_copy_counts_with_the_source_it_pins() {
    let system = Parked::new(SIZES, TIGHT);
    let chain = chain(1, 3);
    system.seed(Tier::Host, &chain);
    let load = system.transfer(Class::Load, Tier::Device, &chain);
    system.clock.pass(Duration::from_millis(1));
    system.core.tick();
    assert_eq!(load.wait().unwrap().failed, 3);
    assert_eq!(system.core.table().counts(Tier::Device).lost, 3);
    assert_eq!(system.core.overdue(Route::new(Tier::Host, Tier::Device)), 3);
    system.core.table().block_flushes(Tier::Host, true);
    assert_eq!(system.core.table().evict(Tier::Host, 16), 0, "a medium may still read them");
    system.finish_all();
    assert_eq!(system.core.overdue(Route::new(Tier::Host, Tier::Device)), 0);
    assert_eq!(system.core.table().counts(Tier::Device).lost, 0);
    system.core.table().block_flushes(Tier::Host, true);
    assert_eq!(system.core.table().evict(Tier::Host, 16), 3);
}

/// All blocks are on their way in other hands: publishing nothing of one's own still holds them
/// when they arrive.
#[test]
fn an_engine_that_fills_nothing_holds_what_others_bring() {
    let manager = manager();
    let chain = chain(1, 4);
    let mut other = manager.allocate(&chain, manager.lease(&chain)).unwrap();
    other.blocks().for_each(|position| assert!(other.mark_filled(position)));
    let own = manager.allocate(&chain, manager.lease(&chain)).unwrap();
    assert_eq!((own.blocks().len(), own.in_flight()), (0, 4));
    let ticket = own.publish().unwrap();
    drop(other.publish().unwrap().wait().unwrap());
    let held = ticket.wait().unwrap();
    assert_eq!((held.blocks, held.lease.blocks(Tier::Device)), (4, 4));
    assert_eq!(manager.admin().evict(Tier::Device, 16), 0, "they are held");
    assert_eq!(manager.save(held.lease).wait().unwrap().blocks, 4);
}

#[test]
fn what_nobody_filled_is_not_published() {
    let manager = manager();
    let chain = chain(1, 4);
    let mut allocation = manager.allocate(&chain, manager.lease(&chain)).unwrap();
    for position in [0, 1, 3] {
        assert!(allocation.fill(position, |block| block.fill(7)));
    }
    let published = allocation.publish().unwrap().wait().unwrap();
    assert_eq!((published.blocks, manager.matches(&chain).blocks(Tier::Device)), (2, 2));
    drop(published);
    assert_eq!(manager.admin().counts(Tier::Device).free, 14);
    let allocation = manager.allocate(&chain, manager.lease(&chain)).unwrap();
    assert_eq!(allocation.blocks(), 2..4, "the others can be computed again");
}

/// A manager over a disk to which nothing goes by itself, and a chain in its host tier.
fn above_a_disk(dir: &tempfile::TempDir, chain: &[BlockHash]) -> kvbm::Manager {
    let mut settings = engine::settings(4 << 10, 16, 16);
    settings.host.staging_blocks = 4;
    engine::add_disk(&mut settings, 16, dir.path());
    settings.flush.interval_ms = 3_600_000;
    settings.flush.dirty_watermark = 1.0;
    let manager = engine::open(settings, &Registry::new()).unwrap();
    engine::serve(&manager, chain);
    manager
}

#[test]
fn a_drain_after_a_close_says_what_is_left() {
    let (dir, chain) = (tempfile::tempdir().unwrap(), chain(1, 4));
    let manager = above_a_disk(&dir, &chain);
    assert!(manager.close(Duration::from_secs(20)).is_complete());
    // It would be waited for.
    let drained = manager.drain(Duration::MAX);
    assert_eq!((drained.unflushed[Tier::Host.index()], drained.in_flight), (4, false));
    assert_eq!(manager.admin().stats(Tier::Host).flush_failures, 0, "nothing was tried");
}

#[test]
fn a_prefetch_brings_blocks_up_and_never_down() {
    let (dir, chain) = (tempfile::tempdir().unwrap(), chain(1, 4));
    let manager = above_a_disk(&dir, &chain);
    let prefetched = manager.prefetch(manager.lease(&chain), Tier::Disk).wait().unwrap();
    assert_eq!((prefetched.copied, manager.admin().counts(Tier::Disk).resident), (0, 0));
    drop(prefetched);
    assert!(manager.drain(Duration::from_secs(20)).is_complete());
    manager.admin().evict(Tier::Device, 16);
    manager.admin().evict(Tier::Host, 16);
    let prefetched = manager.prefetch(manager.lease(&chain), Tier::Host).wait().unwrap();
    assert_eq!((prefetched.copied, prefetched.blocks), (4, 4));
}

#[test]
fn misuse_is_an_error_that_says_what_is_wrong() {
    let (one, two) = (manager(), manager());
    let (chain, other) = (chain(1, 4), [&chain(1, 2)[..], &chain(2, 2)[..]].concat());
    let kept = fill(&one, &chain);
    let foreign = || one.lease(&chain);
    for ticket in [two.load(foreign()), two.save(foreign()), two.prefetch(foreign(), Tier::Host)] {
        assert_eq!(ticket.wait().unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert_eq!(two.pin(foreign(), 1_000).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(two.allocate(&chain, foreign()).unwrap_err().kind(), ErrorKind::Invalid);
    assert!(two.read_device(&kept, &chain, 0, |_| ()).is_none());
    let error = one.allocate(&other, one.lease(&chain)).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Invalid && error.to_string().contains("another chain"),
        "{error}"
    );
    let longer = [&chain[..], &other[2..]].concat();
    assert!(one.allocate(&longer, one.lease(&chain)).is_ok(), "a beginning of the chain will do");
    assert!(one.allocate(&chain[..2], one.lease(&chain)).is_ok(), "so will a longer one");
    assert_eq!((one.admin().audit(), two.admin().audit()), (Vec::new(), Vec::new()));
}

#[test]
fn blocks_refused_by_a_rule_wait_once_whatever_their_use() {
    let mut settings = engine::settings(4 << 10, 16, 16);
    settings.disk.capacity = Some(Capacity::Blocks(16));
    settings.disk.admission = kvbm_settings::AdmissionKind::WriteBack;
    let dir = tempfile::tempdir().unwrap();
    settings.disk.dirs = vec![dir.path().to_owned()];
    settings.flush.interval_ms = 1_000_000;
    let registry = Registry::new();
    let manager = engine::open(settings, &registry).unwrap();
    let chain = chain(1, 4);
    engine::serve(&manager, &chain);
    (0..1_000).for_each(|_| drop(manager.lease(&chain)));
    let dirty = kvbm_tests::rig::metric(&registry, "kvbm_dirty_blocks", &[("tier", "host")]);
    assert!(dirty <= 4, "{dirty} blocks wait, and there are 4");
}

fn manager() -> kvbm::Manager {
    engine::open(engine::settings(4 << 10, 16, 16), &Registry::new()).unwrap()
}

fn fill(manager: &kvbm::Manager, chain: &[BlockHash]) -> kvbm::Lease {
    let mut allocation = manager.allocate(chain, manager.lease(chain)).unwrap();
    for position in allocation.blocks() {
        assert!(allocation.fill(position, |block| block.fill(1)));
    }
    allocation.publish().unwrap().wait().unwrap().lease
}

/// A backend that ends all blocks of a batch at one wake-up: a save into the host tier, a read from
/// disk by way of DRAM, and a load.
#[test]
fn what_ends_together_takes_the_table_once_and_few_locks() {
    let tuning = Tuning { max_batch: 17, ..PATIENT };
    let system = Parked::new(Sizes { tiers: [32, 32, 32, 64], staging: 16 }, tuning);
    let chain = chain(1, 16);
    let ends = |class, to| {
        let transfer = system.transfer(class, to, &chain);
        let mut wake_ups = Vec::new();
        while !system.pending().is_empty() {
            wake_ups.push(locks_taken(|| system.parked.finish_together()).1);
        }
        assert_eq!(transfer.wait().unwrap().blocks, 16);
        wake_ups
    };
    system.seed(Tier::Device, &chain);
    let save = ends(Class::Save, Tier::Host);
    system.core.table().evict(Tier::Device, 16);
    let load = ends(Class::Load, Tier::Device);
    system.seed(Tier::Disk, &chain);
    system.core.table().evict(Tier::Device, 16);
    system.core.table().block_flushes(Tier::Host, true);
    system.core.table().evict(Tier::Host, 16);
    let read = ends(Class::Load, Tier::Device);
    assert_eq!(
        (save.len(), load.len(), read.len()),
        (1, 1, 2),
        "a read takes a second leg to the device"
    );
    for taken in [save, load, read].concat() {
        assert!(taken.table <= 1 && taken.all <= 12, "{taken:?}");
    }
}
