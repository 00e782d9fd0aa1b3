//! Resets: from one moment on nothing is found that was there before, and what is under way lands nowhere.

use std::sync::Arc;
use std::time::Duration;

use kvbm::scheduler::Core;
use kvbm::{BlockHash, Chain, Class, ErrorKind, RequestInfo, Tier, Transfer, Transferred};
use kvbm_tests::rig::{DISK, MEMORY, OBJECT, Rig, Sizes, TIGHT, bare_core, hash, seed};
use kvbm_tiers::Backend;
use kvbm_tiers::testing::ParkedBackend;

const SIZES: Sizes = Sizes { tiers: [8, 12, 16, 24], staging: 4 };

fn chain(n: u32, blocks: u32) -> Vec<BlockHash> {
    (1..=blocks).map(|block| hash(100 * n + block)).collect()
}

fn blocks(core: &Arc<Core>, tier: Tier, chain: &[BlockHash]) -> usize {
    core.matches(Chain::from(chain)).blocks(tier)
}

/// A core whose copies end when a test says so.
fn parked(sizes: Sizes) -> (Arc<Core>, Arc<ParkedBackend>) {
    let routes = [MEMORY, DISK, OBJECT].concat();
    let parked = Arc::new(ParkedBackend::new(Vec::new(), routes).expect("no regions, no conflict"));
    (bare_core(sizes, TIGHT, &(Arc::clone(&parked) as Arc<dyn Backend>)), parked)
}

fn finish_all(parked: &ParkedBackend) {
    while let Some(pending) = parked.pending().first() {
        parked.finish(pending.id, Ok(()));
    }
}

fn transfer(core: &Arc<Core>, class: Class, to: Tier, chain: &[BlockHash]) -> Transfer<Transferred> {
    core.transfer(class, to, core.lease(Chain::from(chain), RequestInfo::default()))
}

/// Everything is free again, and everything works.
fn assert_healed(core: &Arc<Core>, parked: &ParkedBackend) {
    finish_all(parked);
    core.tick();
    finish_all(parked);
    assert_eq!(core.table().audit(), []);
    for tier in Tier::ALL {
        let counts = core.table().counts(tier);
        assert_eq!((counts.free, counts.forgotten), (counts.total, 0), "{tier}: {counts:?}");
    }
    assert!(core.table().is_empty());
    let fresh = chain(9, 3);
    seed(core, Tier::Disk, Chain::from(&fresh));
    let load = transfer(core, Class::Load, Tier::Device, &fresh);
    finish_all(parked);
    assert_eq!(load.wait().expect("the core is there").blocks, 3);
}

#[test]
fn what_was_there_before_a_reset_is_not_found_and_its_slots_come_back() {
    let (core, parked) = parked(SIZES);
    for tier in Tier::ALL {
        seed(&core, tier, Chain::from(&chain(1, 8)));
    }
    assert_eq!(core.matches(Chain::from(&chain(1, 8))).longest(), 8);
    core.reset(1).unwrap();
    assert_eq!(core.matches(Chain::from(&chain(1, 8))).longest(), 0);
    assert_eq!(core.lease(Chain::from(&chain(1, 8)), RequestInfo::default()).held().longest(), 0);
    for tier in Tier::ALL {
        let counts = core.table().counts(tier);
        assert_eq!((counts.resident, counts.forgotten), (0, 8), "{tier}: {counts:?}");
    }
    assert_healed(&core, &parked);
}

#[test]
fn an_epoch_comes_once_and_in_order() {
    let (core, _) = parked(SIZES);
    core.reset(7).unwrap();
    seed(&core, Tier::Host, Chain::from(&chain(1, 3)));
    for epoch in [0, 6, 7] {
        assert_eq!(core.reset(epoch).unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert_eq!(blocks(&core, Tier::Host, &chain(1, 3)), 3, "a reset that is refused changes nothing");
    assert_eq!(core.table().epoch(), 7);
    core.forget_all();
    assert_eq!(core.table().epoch(), 7);
    assert_eq!(blocks(&core, Tier::Host, &chain(1, 3)), 0);
    core.reset(8).unwrap();
}

#[test]
fn whoever_needs_room_before_the_sweep_has_it() {
    let (core, parked) = parked(SIZES);
    // A chain and leaves, dirty, in every tier: full.
    for tier in Tier::ALL {
        for n in 1..=SIZES.tiers[tier.index()] / 4 {
            seed(&core, tier, Chain::from(&chain(n, 4)));
        }
        assert_eq!(core.table().counts(tier).free, 0);
    }
    core.reset(1).unwrap();
    for tier in Tier::ALL {
        let whole = chain(20, SIZES.tiers[tier.index()]);
        seed(&core, tier, Chain::from(&whole));
        assert_eq!(blocks(&core, tier, &whole), whole.len(), "{tier}");
    }
    assert_eq!(core.table().audit(), []);
    core.reset(2).unwrap();
    assert_healed(&core, &parked);
}

#[test]
fn a_lease_from_before_keeps_its_blocks_and_is_good_for_nothing_else() {
    let (core, parked) = parked(SIZES);
    for tier in [Tier::Device, Tier::Disk] {
        seed(&core, tier, Chain::from(&chain(1, 5)));
        seed(&core, tier, Chain::from(&chain(2, 3)));
    }
    let lease = || core.lease(Chain::from(&chain(1, 4)), RequestInfo::default());
    let (reader, loader, saver) = (lease(), lease(), lease());
    core.reset(1).unwrap();
    core.tick();
    for tier in [Tier::Device, Tier::Disk] {
        let counts = core.table().counts(tier);
        assert_eq!((counts.resident, counts.forgotten), (0, 4), "{tier}: what nobody reads has left");
    }
    for (class, to, lease) in [(Class::Load, Tier::Device, loader), (Class::Save, Tier::Host, saver)] {
        assert_eq!(core.transfer(class, to, lease).wait().unwrap_err().kind(), ErrorKind::Stale);
    }
    // What is asked for in between does not wait for it.
    seed(&core, Tier::Device, Chain::from(&chain(1, 4)));
    assert_eq!(blocks(&core, Tier::Device, &chain(1, 4)), 4);
    assert_eq!(core.table().counts(Tier::Device).forgotten, 4, "the reader has his own");
    drop(reader);
    core.tick();
    assert_eq!(core.table().counts(Tier::Device).forgotten, 0);
    core.reset(2).unwrap();
    assert_healed(&core, &parked);
}

#[test]
fn what_is_under_way_lands_nowhere() {
    let (core, parked) = parked(SIZES);
    seed(&core, Tier::Disk, Chain::from(&chain(1, 5)));
    seed(&core, Tier::Device, Chain::from(&chain(2, 4)));
    let underway = [
        transfer(&core, Class::Load, Tier::Device, &chain(1, 5)),
        transfer(&core, Class::Load, Tier::Device, &chain(1, 3)),
        transfer(&core, Class::Save, Tier::Host, &chain(2, 4)),
    ];
    let _ = core.drain(Duration::ZERO);
    // Part of it has landed.
    for _ in 0..4 {
        parked.pending().first().into_iter().for_each(|first| assert!(parked.finish(first.id, Ok(()))));
    }
    core.reset(1).unwrap();
    let answers = underway.map(|transfer| transfer.wait().expect("the core is there"));
    for answer in &answers {
        let held = (answer.blocks, answer.copied, answer.lease.held().longest());
        assert_eq!(held, (0, 0, 0), "{answer:?}");
    }
    assert_eq!(answers[0].failed, 5);
    let [lease, ..] = answers.map(|answer| answer.lease);
    assert_eq!(core.transfer(Class::Load, Tier::Device, lease).wait().unwrap_err().kind(), ErrorKind::Stale);
    assert_healed(&core, &parked);
}

#[test]
fn slots_that_an_engine_fills_are_not_published_after_a_reset() {
    let rig = Rig::new(SIZES, TIGHT, |_| Vec::new());
    let before = chain(1, 4);
    let lease = rig.core.lease(Chain::from(&before), RequestInfo::default());
    let reserved = rig.core.reserve(Tier::Device, Chain::from(&before), RequestInfo::default());
    let late = rig.fill(Chain::from(&chain(2, 3)));
    rig.core.reset(1).unwrap();
    let refused = rig.core.publish(reserved, usize::MAX, lease).wait().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Stale);
    // With a lease from after the reset, what was computed before it must not come in either.
    let answer = rig.publish(late, Chain::from(&chain(2, 3))).wait().unwrap();
    assert_eq!((answer.blocks, answer.copied, answer.failed), (0, 0, 3));
    assert_eq!(blocks(&rig.core, Tier::Device, &chain(2, 3)), 0);
    let counts = rig.core.table().counts(Tier::Device);
    assert_eq!(counts.free, counts.total);
}

#[test]
fn nothing_of_a_past_epoch_is_flushed_any_more() {
    let (core, parked) = parked(SIZES);
    seed(&core, Tier::Host, Chain::from(&chain(1, 6)));
    let reader = core.lease(Chain::from(&chain(1, 6)), RequestInfo::default());
    core.reset(1).unwrap();
    assert!(!core.table().has_dirty(Tier::Host));
    let drained = core.drain(Duration::from_millis(50));
    assert!(drained.is_complete() && parked.pending().is_empty(), "{drained:?}");
    drop(reader);
    assert_healed(&core, &parked);
}

#[test]
fn a_flush_that_fails_after_a_reset_is_not_tried_again() {
    let (core, parked) = parked(SIZES);
    seed(&core, Tier::Host, Chain::from(&chain(1, 6)));
    let reader = core.lease(Chain::from(&chain(1, 6)), RequestInfo::default());
    let _ = core.drain(Duration::ZERO);
    assert!(!parked.pending().is_empty());
    core.reset(1).unwrap();
    assert!(!core.table().has_dirty(Tier::Host));
    assert_eq!(core.table().stats(Tier::Host).flush_failures, 0);
    drop(reader);
    assert_healed(&core, &parked);
}
