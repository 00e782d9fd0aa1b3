//! Resets: from one moment on nothing is found that was there before, and what is under way lands
//! nowhere.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvbm::scheduler::Core;
use kvbm::table::Table;
use kvbm::{
    BlockHash, CacheEvent, Chain, Class, ErrorKind, Fingerprint, Manager, Options, RequestInfo,
    Tier, Transfer, Transferred,
};
use kvbm_settings::Settings;
use kvbm_tests::engine;
use kvbm_tests::rig::{
    Rig, Sizes, TIGHT, chain, files, files_of, finish_all, hash, parked_core, seed,
};
use kvbm_tiers::testing::ParkedBackend;

const SIZES: Sizes = Sizes { tiers: [8, 12, 16, 24], staging: 4 };

fn blocks(core: &Arc<Core>, tier: Tier, chain: &[BlockHash]) -> usize {
    core.matches(Chain::from(chain)).blocks(tier)
}

fn transfer(
    core: &Arc<Core>,
    class: Class,
    to: Tier,
    chain: &[BlockHash],
) -> Transfer<Transferred> {
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
    let dirty = chain(10, 3);
    seed(core, Tier::Host, Chain::from(&dirty));
    let _ = core.drain(Duration::ZERO);
    finish_all(parked);
    assert_eq!(blocks(core, Tier::Disk, &dirty), 3, "flushing goes on");
}

#[test]
fn blocks_from_before_a_reset_vanish_and_free_their_slots() {
    let (core, parked) = parked_core(SIZES);
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
    let (core, _) = parked_core(SIZES);
    core.reset(7).unwrap();
    seed(&core, Tier::Host, Chain::from(&chain(1, 3)));
    for epoch in [0, 6, 7] {
        assert_eq!(core.reset(epoch).unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert_eq!(
        blocks(&core, Tier::Host, &chain(1, 3)),
        3,
        "a reset that is refused changes nothing"
    );
    assert_eq!(core.table().epoch(), 7);
    core.forget_all();
    assert_eq!(core.table().epoch(), 7);
    assert_eq!(blocks(&core, Tier::Host, &chain(1, 3)), 0);
    core.reset(8).unwrap();
}

#[test]
fn whoever_needs_room_before_the_sweep_has_it() {
    let (core, parked) = parked_core(SIZES);
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

/// A dirty chain that is longer than what one step looks at, its leaf where the pass comes last.
#[test]
fn room_is_found_however_a_forgotten_chain_lies() {
    let sizes = Sizes { tiers: [8, 20_000, 8, 8], staging: 4 };
    let (core, _) = parked_core(sizes);
    let upside_down: Vec<_> = (1..=20_000).map(|n| chain(n, 1)).collect();
    upside_down.iter().for_each(|chain| seed(&core, Tier::Host, Chain::from(chain)));
    // The first slots are the last to be free again, and so the first to be taken.
    core.table().block_flushes(Tier::Host, true);
    assert_eq!(core.table().evict(Tier::Host, 20_000), 20_000);
    core.table().block_flushes(Tier::Host, false);
    let long: Vec<_> = (1..=20_000).map(hash).collect();
    seed(&core, Tier::Host, Chain::from(&long));
    core.reset(1).unwrap();
    seed(&core, Tier::Host, Chain::from(&long[..100]));
    assert_eq!(blocks(&core, Tier::Host, &long[..100]), 100);
    assert_eq!(core.table().audit(), []);
}

#[test]
fn an_old_lease_keeps_its_blocks_and_does_nothing_else() {
    let (core, parked) = parked_core(SIZES);
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
        assert_eq!(
            (counts.resident, counts.forgotten),
            (0, 4),
            "{tier}: what has no reader has left"
        );
    }
    for (class, to, lease) in
        [(Class::Load, Tier::Device, loader), (Class::Save, Tier::Host, saver)]
    {
        assert_eq!(core.transfer(class, to, lease).wait().unwrap_err().kind(), ErrorKind::Stale);
    }
    // What is asked for in between does not wait for it.
    seed(&core, Tier::Device, Chain::from(&chain(1, 4)));
    assert_eq!(blocks(&core, Tier::Device, &chain(1, 4)), 4);
    assert_eq!(core.table().counts(Tier::Device).forgotten, 4, "the reader has its own");
    drop(reader);
    core.tick();
    assert_eq!(core.table().counts(Tier::Device).forgotten, 0);
    core.reset(2).unwrap();
    assert_healed(&core, &parked);
}

#[test]
fn what_is_under_way_lands_nowhere() {
    let (core, parked) = parked_core(SIZES);
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
        parked
            .pending()
            .first()
            .into_iter()
            .for_each(|first| assert!(parked.finish(first.id, Ok(()))));
    }
    core.reset(1).unwrap();
    let answers = underway.map(|transfer| transfer.wait().expect("the core is there"));
    for answer in &answers {
        let held = (answer.blocks, answer.copied, answer.lease.held().longest());
        assert_eq!(held, (0, 0, 0), "{answer:?}");
    }
    assert_eq!(answers[0].failed, 5);
    let [lease, ..] = answers.map(|answer| answer.lease);
    assert_eq!(
        core.transfer(Class::Load, Tier::Device, lease).wait().unwrap_err().kind(),
        ErrorKind::Stale
    );
    assert_healed(&core, &parked);
}

#[test]
fn slots_being_filled_are_not_published_after_a_reset() {
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
    let (core, parked) = parked_core(SIZES);
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
fn a_flush_failed_after_a_reset_is_not_retried() {
    let (core, parked) = parked_core(SIZES);
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

fn open(settings: Settings, fingerprint: Option<Fingerprint>) -> kvbm::Result<Manager> {
    engine::open_with(settings, Options { fingerprint, ..Options::default() })
}

#[test]
fn a_manager_says_what_an_old_lease_does() {
    let manager = open(engine::settings(4096, 16, 32), Some(engine::fingerprint("one"))).unwrap();
    let mut events = manager.events();
    let hashes = chain(1, 6);
    engine::serve(&manager, &hashes);
    let lease = || manager.lease(&hashes);
    manager.pin(lease(), 3_600_000).unwrap();
    let (loads, saves, prefetches, pins, reads) = (lease(), lease(), lease(), lease(), lease());
    let longer = chain(1, 8);
    let mut under_way = manager.allocate(&longer, manager.lease(&longer)).unwrap();
    assert_eq!(under_way.blocks(), 6..8);
    under_way.blocks().for_each(|block| assert!(under_way.mark_filled(block)));

    manager.reset(1).unwrap();
    assert_eq!((manager.admin().epoch(), manager.matches(&hashes).longest()), (1, 0));
    assert_eq!(manager.reset(1).unwrap_err().kind(), ErrorKind::Invalid);
    let kind = |answer: kvbm::Result<()>| answer.unwrap_err().kind();
    assert_eq!(kind(manager.load(loads).wait().map(drop)), ErrorKind::Stale);
    assert_eq!(kind(manager.save(saves).wait().map(drop)), ErrorKind::Stale);
    assert_eq!(kind(manager.prefetch(prefetches, Tier::Host).wait().map(drop)), ErrorKind::Stale);
    assert_eq!(kind(manager.pin(pins, 1)), ErrorKind::Stale);
    assert_eq!(kind(under_way.publish().unwrap().wait().map(drop)), ErrorKind::Stale);
    assert_eq!(manager.read_device(&reads, &hashes, 0, <[u8]>::len), None);
    assert_eq!(kind(manager.allocate(&hashes, reads).map(drop)), ErrorKind::Stale);

    // The pin has ended, and with the last lease all of it is gone.
    let start = Instant::now();
    while manager.admin().counts(Tier::Host).forgotten
        + manager.admin().counts(Tier::Device).forgotten
        > 0
    {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "{:?}",
            manager.admin().counts(Tier::Host)
        );
        thread::sleep(Duration::from_millis(1));
    }
    let again = engine::serve(&manager, &hashes);
    assert_eq!((again.hit, again.wrong, again.computed), (0, 0, 6));
    assert_eq!(engine::serve(&manager, &hashes).hit, 6);
    let cleared = std::iter::from_fn(|| events.try_next())
        .filter(|event| *event == CacheEvent::Cleared { epoch: 1 });
    assert_eq!(cleared.count(), 1);
    assert_eq!(manager.admin().audit(), []);
}

#[test]
fn another_fingerprint_has_other_files_and_objects() {
    let home = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(4096, 16, 16);
    engine::keep_on_disk(&mut settings, 16, home.path().join("slots"));
    engine::keep_in_bucket(&mut settings, 64 << 10, &home.path().join("objects"));
    let given = [None, Some(engine::fingerprint("one")), Some(engine::fingerprint("two"))];
    for fingerprint in &given {
        let manager = open(settings.clone(), fingerprint.clone()).unwrap();
        engine::serve(&manager, &chain(1, 6));
        assert!(manager.drain(Duration::from_secs(30)).is_complete());
    }
    let (slots, objects) = (files(&home.path().join("slots")), files(&home.path().join("objects")));
    for fingerprint in &given {
        let suffix =
            fingerprint.as_ref().map_or_else(String::new, |fingerprint| format!("-{fingerprint}"));
        let namespace = format!("v1-block4096{suffix}");
        let file = format!("kvbm-{namespace}.blocks");
        let is_below = |path: &PathBuf| path.iter().any(|part| part == namespace.as_str());
        assert!(
            slots.iter().any(|path| path.ends_with(&file)) && objects.iter().any(is_below),
            "{namespace}: {slots:?} {objects:?}"
        );
    }
    assert_eq!(files_of(&home.path().join("slots"), "blocks").len(), 3, "{slots:?}");
}

#[test]
fn a_fingerprint_that_cannot_be_true_is_refused() {
    let error = open(engine::settings(4096, 16, 16), Some(Fingerprint::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let other_blocks = Fingerprint { block_tokens: 32, ..engine::fingerprint("one") };
    let error = open(engine::settings(4096, 16, 16), Some(other_blocks)).unwrap_err();
    assert!(error.to_string().contains("32 tokens"), "{error}");
}

#[test]
fn block_names_differ_with_the_fingerprint_and_the_epoch() {
    let hashes = chain(1, 1);
    let mut names = BTreeSet::new();
    for fingerprint in [None, Some(engine::fingerprint("one")), Some(engine::fingerprint("two"))] {
        let mut table = fingerprint.into_iter().fold(Table::new([]), Table::with_fingerprint);
        for epoch in 1..4 {
            names.insert(table.enter(Chain::from(&hashes)).key(0));
            drop(table.forget_all());
            names.insert(table.enter(Chain::from(&hashes)).key(0));
            drop(table.reset(epoch).unwrap());
        }
    }
    assert_eq!(names.len(), 3 * 2 * 3);
    let opened_later = Fingerprint { epoch: 3, ..engine::fingerprint("one") };
    let mut reset = Table::new([]).with_fingerprint(engine::fingerprint("one"));
    drop(reset.reset(3).unwrap());
    let opened = Table::new([]).with_fingerprint(opened_later);
    let name = |table: &Table| table.enter(Chain::from(&hashes)).key(0);
    assert_eq!(
        name(&reset),
        name(&opened),
        "a process that is started in an epoch knows the names of one that came to it"
    );
}
