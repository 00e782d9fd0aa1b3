//! Events: who follows them knows what each tier holds. Random histories are followed in `model`
//! and, over threads in every order, in `interleavings`.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use kvbm::scheduler::{Core, Tuning};
use kvbm::{
    BlockHash, CacheEvent, CachedBlock, Chain, Class, Events, RemoveReason, RequestId, RequestInfo,
    StoreReason, Tier,
};
use kvbm_tests::follower::Follower;
use kvbm_tests::rig::{Rig, Sizes, TIGHT, chain, finish_all, parked_core, seed};
use kvbm_tiers::{Backend, CopyError, CopyErrorKind, MemcpyBackend};

const SIZES: Sizes = Sizes { tiers: [8, 12, 16, 24], staging: 4 };

fn all(events: &mut Events) -> Vec<CacheEvent> {
    std::iter::from_fn(|| events.try_next()).collect()
}

fn stored(events: &[CacheEvent], tier: Tier) -> Vec<(BlockHash, Option<BlockHash>, StoreReason)> {
    let stored = events.iter().filter_map(|event| match *event {
        CacheEvent::Stored { block, reason, .. } if block.tier == tier => {
            Some((block.hash, block.parent, reason))
        }
        _ => None,
    });
    stored.collect()
}

fn removed(events: &[CacheEvent]) -> Vec<(Tier, BlockHash, RemoveReason)> {
    let removed = events.iter().filter_map(|event| match *event {
        CacheEvent::Removed { block, reason } => Some((block.tier, block.hash, reason)),
        _ => None,
    });
    removed.collect()
}

#[test]
fn blocks_come_root_first_with_their_request_and_reason() {
    let (core, parked) = parked_core(SIZES);
    let mut events = core.table().listen(100);
    let hashes = chain(1, 3);
    let named = RequestInfo { request: Some(RequestId(7)), ..RequestInfo::default() };
    let path = |reason| {
        vec![
            (hashes[0], None, reason),
            (hashes[1], Some(hashes[0]), reason),
            (hashes[2], Some(hashes[1]), reason),
        ]
    };
    seed(&core, Tier::Device, Chain::from(&hashes));
    let filled = all(&mut events);
    assert_eq!(stored(&filled, Tier::Device), path(StoreReason::Filled));
    let nameless = |event: &CacheEvent| matches!(event, CacheEvent::Stored { request: None, .. });
    assert!(filled.iter().all(nameless), "the request has no name: {filled:?}");

    let save = core.transfer(Class::Save, Tier::Host, core.lease(Chain::from(&hashes), named));
    finish_all(&parked);
    drop(save.wait().unwrap());
    let saved = all(&mut events);
    assert_eq!(stored(&saved, Tier::Host), path(StoreReason::Saved));
    let of_seven = |event: &CacheEvent| {
        matches!(event, CacheEvent::Stored { request: Some(RequestId(7)), .. })
    };
    assert!(saved.iter().all(of_seven), "{saved:?}");

    let _ = core.drain(Duration::ZERO);
    finish_all(&parked);
    assert_eq!(stored(&all(&mut events), Tier::Disk), path(StoreReason::Flushed));

    core.table().evict(Tier::Device, 3);
    core.table().evict(Tier::Host, 3);
    let leaf_first =
        |tier| hashes.iter().rev().map(move |&hash| (tier, hash, RemoveReason::Evicted));
    let both: Vec<_> = leaf_first(Tier::Device).chain(leaf_first(Tier::Host)).collect();
    assert_eq!(removed(&all(&mut events)), both);

    let up = [
        (Class::Prefetch, Tier::Host, StoreReason::Prefetched),
        (Class::Load, Tier::Device, StoreReason::Loaded),
    ];
    for (class, to, reason) in up {
        let transfer = core.transfer(class, to, core.lease(Chain::from(&hashes), named));
        finish_all(&parked);
        drop(transfer.wait().unwrap());
        assert_eq!(stored(&all(&mut events), to), path(reason));
    }
}

#[test]
fn a_bad_block_follows_its_descendants_and_both_say_why() {
    for (kind, reason) in [
        (CopyErrorKind::Corrupt, RemoveReason::Corrupt),
        (CopyErrorKind::Io, RemoveReason::Unreadable),
    ] {
        let (core, parked) = parked_core(SIZES);
        let mut follower = Follower::of(&core);
        let hashes = chain(1, 4);
        seed(&core, Tier::Disk, Chain::from(&hashes));
        let mut events = core.table().listen(100);
        let lease = core.lease(Chain::from(&hashes), RequestInfo::default());
        let load = core.transfer(Class::Load, Tier::Device, lease);
        let second = core.table().enter(Chain::from(&hashes)).key(1);
        let bad = parked.pending().into_iter().find(|pending| pending.op.block == second).unwrap();
        assert!(parked.finish(bad.id, Err(CopyError::new(kind, "as the test says"))));
        finish_all(&parked);
        drop(load.wait().unwrap());
        let expected: Vec<_> =
            hashes[1..].iter().rev().map(|&hash| (Tier::Disk, hash, reason)).collect();
        assert_eq!(removed(&all(&mut events)), expected);
        follower.check(&core, [Chain::from(&hashes)]);
    }
}

#[test]
fn a_reset_is_one_event_and_ends_the_past() {
    let (core, parked) = parked_core(SIZES);
    let mut events = core.table().listen(1_000);
    for tier in Tier::ALL {
        seed(&core, tier, Chain::from(&chain(1, 8)));
    }
    let lease = core.lease(Chain::from(&chain(1, 8)), RequestInfo::default());
    let load = core.transfer(Class::Prefetch, Tier::Host, lease);
    drop(all(&mut events));
    core.reset(5).unwrap();
    finish_all(&parked);
    core.tick();
    drop(load.wait());
    assert_eq!(all(&mut events), [CacheEvent::Cleared { epoch: 5 }]);
    let hashes = chain(1, 2);
    seed(&core, Tier::Device, Chain::from(&hashes));
    // By the names that the engine gave, in this epoch as in those before.
    let block = |i: usize| CachedBlock {
        tier: Tier::Device,
        group: 0,
        hash: hashes[i],
        parent: i.checked_sub(1).map(|i| hashes[i]),
    };
    let stored =
        |i| CacheEvent::Stored { block: block(i), request: None, reason: StoreReason::Filled };
    assert_eq!(all(&mut events), [stored(0), stored(1)]);
}

#[test]
fn a_slow_receiver_counts_its_losses_and_delays_nobody() {
    let (core, _) = parked_core(SIZES);
    let mut slow = core.table().listen(3);
    let mut follower = Follower::of(&core);
    let hashes = chain(1, 8);
    seed(&core, Tier::Device, Chain::from(&hashes));
    let told = all(&mut slow);
    assert_eq!(told[0], CacheEvent::Lost(5));
    let rest: Vec<_> = stored(&told, Tier::Device).into_iter().map(|(hash, ..)| hash).collect();
    assert_eq!(rest, hashes[5..]);
    follower.check(&core, [Chain::from(&hashes)]);
    // It is well again once it has caught up.
    core.table().evict(Tier::Device, 2);
    assert_eq!(removed(&all(&mut slow)).len(), 2);
}

#[test]
fn a_sleeping_receiver_wakes_by_events_and_the_end() {
    let (core, _) = parked_core(SIZES);
    let mut events = core.table().listen(10);
    seed(&core, Tier::Device, Chain::from(&chain(1, 1)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let sleeper = thread::spawn(move || {
        runtime.block_on(async move {
            let limit = Duration::from_secs(30);
            let mut told = Vec::new();
            while let Some(event) =
                tokio::time::timeout(limit, events.next()).await.expect("it is woken")
            {
                told.push(event);
            }
            told.len()
        })
    });
    thread::sleep(Duration::from_millis(20));
    core.reset(1).unwrap();
    thread::sleep(Duration::from_millis(20));
    core.close();
    assert_eq!(sleeper.join().unwrap(), 2);
    let mut late = core.table().listen(10);
    let mut context = Context::from_waker(Waker::noop());
    assert_eq!(
        std::pin::pin!(late.next()).poll(&mut context),
        Poll::Ready(None),
        "no events come any more"
    );
}

/// Threads that fill, load, save and evict, and one that resets: the order of events is that of
/// what happened.
#[test]
fn whoever_follows_many_threads_knows_what_each_tier_holds() {
    const TUNING: Tuning = Tuning { max_concurrent: 4, timeout: Duration::from_secs(30), ..TIGHT };
    let rig = Rig::new(SIZES, TUNING, |places| {
        let copies = MemcpyBackend::new(places.all(), 2).expect("tiers of one geometry");
        vec![Arc::new(copies) as Arc<dyn Backend>]
    });
    let mut follower = Follower::of(&rig.core);
    thread::scope(|scope| {
        for thread in 0..4 {
            let core = &rig.core;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                (0..1_500).for_each(|_| do_something(core, &mut random));
            });
        }
        scope.spawn(|| {
            for epoch in 1..=20 {
                thread::sleep(Duration::from_millis(5));
                rig.core.reset(epoch).unwrap();
            }
        });
    });
    let _ = rig.core.drain(Duration::from_secs(30));
    let chains: Vec<_> = (0..5).map(|n| chain(n, 6)).collect();
    follower.check(&rig.core, chains.iter().map(Chain::from));
    assert_eq!(rig.core.table().audit(), []);
}

fn do_something(core: &Arc<Core>, random: &mut fastrand::Rng) {
    let hashes = chain(random.u32(0..5), random.u32(1..=6));
    let lease = core.lease(Chain::from(&hashes), RequestInfo::default());
    let waited = match random.u32(0..6) {
        0 => core.transfer(Class::Load, Tier::Device, lease).wait().map(drop),
        1 => core.transfer(Class::Save, Tier::Host, lease).wait().map(drop),
        2 => core.transfer(Class::Prefetch, Tier::Host, lease).wait().map(drop),
        3 => {
            core.table().evict(random.choice(Tier::ALL).expect("tiers"), 4);
            Ok(())
        }
        4 => {
            core.tick();
            Ok(())
        }
        _ => {
            let reserved = core.reserve(Tier::Device, Chain::from(&hashes), RequestInfo::default());
            core.publish(reserved, usize::MAX, lease).wait().map(drop)
        }
    };
    // A reset may have come in between.
    waited
        .or_else(|error| if error.kind() == kvbm::ErrorKind::Stale { Ok(()) } else { Err(error) })
        .unwrap();
}

#[test]
fn a_thread_waits_for_the_next_event() {
    let (core, _parked) = parked_core(SIZES);
    let mut events = core.table().listen(8);
    assert_eq!(events.wait(Duration::from_millis(5)), None, "nothing happens");
    let other = Arc::clone(&core);
    let resetting = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        other.reset(1).unwrap();
    });
    assert_eq!(events.wait(Duration::from_secs(30)), Some(CacheEvent::Cleared { epoch: 1 }));
    resetting.join().unwrap();
    core.close();
    assert_eq!(events.wait(Duration::from_secs(30)), None, "at once: no event comes any more");
}
