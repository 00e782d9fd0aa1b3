//! Threads that meet at every lock and counter, in orders that a checker chooses.
//!
//! `cargo test -p kvbm-tests --features shuttle --test interleavings`. The checker sees what goes
//! through `kvbm`'s `sync` module; a failure prints the schedule that replays it. `KVBM_SCHEDULES`
//! says how many schedules of each scenario are tried (800).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use kvbm::scheduler::{Core, LoadInto, SaveFrom};
use kvbm::{BlockHash, Chain, Class, ErrorKind, Fence, HostFence, RequestInfo, SlotId, Tier};
use kvbm_tests::follower::Follower;
use kvbm_tests::rig::{
    DISK, MEMORY, OBJECT, Sizes, TIGHT, bare_core, chain, info_of, parked_core, seed, seed_for,
};
use kvbm_tiers::testing::ParkedBackend;
use kvbm_tiers::{Backend, CopyError, CopyErrorKind, CopyOp, LayerCount};
use shuttle::future::block_on;
use shuttle::rand::Rng;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::Mutex;
use shuttle::{Config, Runner, thread};

const SIZES: Sizes = Sizes { tiers: [6, 6, 12, 12], staging: 2 };
/// The device is an engine's own.
const ENGINE: Sizes = Sizes { tiers: [0, 6, 12, 12], staging: 2 };

/// The checker gives 32 KiB, which a reset amid loads outgrows by now; a thread of the system has 2
/// MiB at least.
const STACK_BYTES: usize = 256 << 10;

/// Under random schedules, and under those of a scheduler that is good at rare orders (Burckhardt
/// et al., "A randomized scheduler with probabilistic guarantees of finding bugs", 2010).
fn check(scenario: fn()) {
    let schedules =
        std::env::var("KVBM_SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(800);
    let config = || {
        let mut config = Config::default();
        config.stack_size = STACK_BYTES;
        config
    };
    Runner::new(RandomScheduler::new(schedules / 2), config()).run(scenario);
    Runner::new(PctScheduler::new(3, schedules / 2), config()).run(scenario);
}

/// A core, and hardware on a thread of its own that ends copies in any order.
struct Machine {
    core: Arc<Core>,
    parked: Arc<ParkedBackend>,
    off: Arc<AtomicBool>,
    ended: Arc<AtomicUsize>,
    /// An engine's memory is not to be touched now.
    hands_off: Arc<AtomicBool>,
    contents: Contents,
    hardware: thread::JoinHandle<()>,
}

/// Which block's bytes lie where: a copy takes along what its source has.
#[derive(Clone, Default)]
struct Contents(Arc<Mutex<HashMap<(Tier, SlotId), BlockHash>>>);

impl Contents {
    fn set(&self, tier: Tier, slot: SlotId, hash: BlockHash) {
        self.0.lock().unwrap().insert((tier, slot), hash);
    }

    fn of(&self, tier: Tier, slot: SlotId) -> Option<BlockHash> {
        self.0.lock().unwrap().get(&(tier, slot)).copied()
    }

    fn copy(&self, op: &CopyOp) {
        let mut contents = self.0.lock().unwrap();
        if let Some(&there) = contents.get(&(op.from.tier, op.from.slot)) {
            contents.insert((op.to.tier, op.to.slot), there);
        }
    }
}

impl Machine {
    /// One copy in `fails_one_in` fails.
    fn start(sizes: Sizes, fails_one_in: Option<u32>) -> Self {
        let (core, parked) = parked_core(sizes);
        let (off, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (hands_off, contents) = (Arc::new(AtomicBool::new(false)), Contents::default());
        let hardware = {
            let (parked, off, ended) = (Arc::clone(&parked), Arc::clone(&off), Arc::clone(&ended));
            let (hands_off, contents) = (Arc::clone(&hands_off), contents.clone());
            thread::spawn(move || {
                work(&parked, (&off, &hands_off), (&ended, &contents), fails_one_in)
            })
        };
        Self { core, parked, off, ended, hands_off, contents, hardware }
    }

    /// Makes a tenant's chain resident in a tier, with its bytes.
    fn seed_bytes(&self, tier: Tier, chain: &[BlockHash]) {
        seed_for(&self.core, info_of(TENANT), tier, Chain::from(chain));
        for (slot, hash) in self.slots(tier, chain).into_iter().zip(chain) {
            self.contents.set(tier, slot, *hash);
        }
    }

    /// Where the leading blocks of a chain lie.
    fn slots(&self, tier: Tier, chain: &[BlockHash]) -> Vec<SlotId> {
        let mut table = self.core.table();
        let chain = table.enter(Chain::from(chain));
        let held = table.matches(chain).blocks(tier);
        let mut slot = |at| {
            let loan = table.lend(tier, chain.key(at)).expect("a block of the match");
            let slot = loan.slot();
            table.return_loan(tier, loan);
            slot
        };
        (0..held).map(&mut slot).collect()
    }

    /// Every block that is found has its own bytes.
    fn check_bytes(&self, chain: &[BlockHash]) {
        for tier in Tier::ALL {
            for (slot, hash) in self.slots(tier, chain).into_iter().zip(chain) {
                assert_eq!(self.contents.of(tier, slot), Some(*hash), "{slot:?} of {tier}");
            }
        }
    }

    /// Brings a chain somewhere from a thread of its own; returns how much of it arrived.
    fn transfer(&self, class: Class, to: Tier, chain: Vec<BlockHash>) -> thread::JoinHandle<usize> {
        let core = Arc::clone(&self.core);
        thread::spawn(move || {
            let lease = core.lease(Chain::from(&chain), RequestInfo::default());
            block_on(core.transfer(class, to, lease)).expect("the core is there").blocks
        })
    }

    fn held(&self, tier: Tier, chain: &[BlockHash]) -> usize {
        self.core.table().matches(Chain::from(chain)).blocks(tier)
    }

    /// Ends the hardware when it has nothing left to do. Then nothing is out of place.
    fn stop(self) -> (Arc<Core>, usize) {
        self.off.store(true, Ordering::Release);
        self.hardware.join().unwrap();
        assert!(self.parked.pending().is_empty());
        assert_eq!(self.core.table().audit(), []);
        for tier in Tier::ALL {
            let counts = self.core.table().counts(tier);
            assert_eq!(counts.filling, 0, "{tier}: {counts:?}");
        }
        (self.core, self.ended.load(Ordering::Acquire))
    }
}

fn work(
    parked: &ParkedBackend,
    (off, hands_off): (&AtomicBool, &AtomicBool),
    (ended, contents): (&AtomicUsize, &Contents),
    fails_one_in: Option<u32>,
) {
    loop {
        let pending = parked.pending();
        let touches_device = pending
            .iter()
            .any(|copy| [copy.op.from, copy.op.to].map(|end| end.tier).contains(&Tier::Device));
        assert!(
            !(touches_device && hands_off.load(Ordering::Acquire)),
            "the engine has not let go: {pending:?}"
        );
        if pending.is_empty() {
            if off.load(Ordering::Acquire) {
                return;
            }
            thread::yield_now();
            continue;
        }
        let mut random = shuttle::rand::thread_rng();
        let which = random.gen_range(0..pending.len());
        let fails = fails_one_in.is_some_and(|n| random.gen_range(0..n) == 0);
        let result =
            if fails { Err(CopyError::new(CopyErrorKind::Io, "by chance")) } else { Ok(()) };
        if result.is_ok() {
            contents.copy(&pending[which].op);
        }
        if parked.finish(pending[which].id, result) {
            ended.fetch_add(1, Ordering::AcqRel);
        }
    }
}

#[test]
fn concurrent_loads_of_a_chain_share_one_flight() {
    check(|| {
        let machine = Machine::start(SIZES, None);
        seed(&machine.core, Tier::Disk, Chain::from(&chain(1, 3)));
        let loads = [(); 3].map(|()| machine.transfer(Class::Load, Tier::Device, chain(1, 3)));
        for load in loads {
            assert_eq!(load.join().unwrap(), 3);
        }
        let (_, copies) = machine.stop();
        assert_eq!(copies, 6, "three blocks took two copies each, once");
    });
}

#[test]
fn a_leased_chain_is_not_evicted() {
    check(|| {
        let machine = Machine::start(SIZES, None);
        seed(&machine.core, Tier::Device, Chain::from(&chain(1, 3)));
        let core = Arc::clone(&machine.core);
        let reader = thread::spawn(move || {
            for _ in 0..3 {
                let lease = core.lease(Chain::from(&chain(1, 3)), RequestInfo::default());
                let promised = lease.blocks(Tier::Device);
                thread::yield_now();
                let there = core.table().matches(Chain::from(&chain(1, 3))).blocks(Tier::Device);
                assert!(there >= promised, "{there} of {promised} leased blocks are left");
            }
        });
        let core = Arc::clone(&machine.core);
        let writer = thread::spawn(move || (2..5).for_each(|n| compute(&core, &chain(n, 3))));
        reader.join().unwrap();
        writer.join().unwrap();
        machine.stop();
    });
}

/// Reserves device slots for what is missing of a chain, and publishes or abandons them.
fn compute(core: &Arc<Core>, chain: &[BlockHash]) {
    let reserved = core.reserve(Tier::Device, Chain::from(chain), RequestInfo::default());
    thread::yield_now();
    if shuttle::rand::thread_rng().gen_range(0..3) == 0 {
        core.abandon(reserved);
    } else {
        let lease = core.lease(Chain::from(chain), RequestInfo::default());
        drop(core.publish(reserved, usize::MAX, lease));
    }
}

#[test]
fn one_that_waits_for_others_gets_an_answer() {
    check(|| {
        let machine = Machine::start(SIZES, Some(5));
        seed(&machine.core, Tier::Disk, Chain::from(&chain(1, 3)));
        let core = Arc::clone(&machine.core);
        let engine = thread::spawn(move || compute(&core, &chain(1, 3)[..2]));
        let requests = [
            machine.transfer(Class::Load, Tier::Device, chain(1, 3)),
            machine.transfer(Class::Prefetch, Tier::Host, chain(1, 3)),
            machine.transfer(Class::Load, Tier::Device, chain(1, 3)),
            machine.transfer(Class::Save, Tier::Object, chain(1, 3)),
        ];
        for request in requests {
            assert!(request.join().unwrap() <= 3);
        }
        engine.join().unwrap();
        machine.stop();
    });
}

#[test]
fn a_copy_ends_once_by_completion_or_by_time_out() {
    check(|| {
        let machine = Machine::start(SIZES, None);
        seed(&machine.core, Tier::Disk, Chain::from(&chain(1, 3)));
        let load = machine.transfer(Class::Load, Tier::Device, chain(1, 3));
        let core = Arc::clone(&machine.core);
        let ticker = thread::spawn(move || (0..3).for_each(|_| core.tick()));
        let arrived = load.join().unwrap();
        ticker.join().unwrap();
        assert!(arrived <= machine.held(Tier::Device, &chain(1, 3)));
        let (core, _) = machine.stop();
        let lost: u32 = Tier::ALL.iter().map(|&tier| core.table().counts(tier).lost).sum();
        assert_eq!(lost, 0, "an overdue copy ended, and its slot did not come back");
        let staging = core.staging();
        assert_eq!((staging.idle, staging.lost), (staging.total, 0));
    });
}

#[test]
fn saves_flushes_and_evictions_get_along() {
    check(|| {
        let machine = Machine::start(SIZES, Some(8));
        for n in 1..3 {
            seed(&machine.core, Tier::Device, Chain::from(&chain(n, 3)));
        }
        let saves = [1, 2].map(|n| machine.transfer(Class::Save, Tier::Host, chain(n, 3)));
        let core = Arc::clone(&machine.core);
        let flusher = thread::spawn(move || {
            for _ in 0..2 {
                let _ = core.drain(Duration::ZERO);
                core.table().evict(Tier::Host, 2);
            }
        });
        assert!(saves.map(|save| save.join().unwrap()).iter().all(|&saved| saved <= 3));
        flusher.join().unwrap();
        machine.stop();
    });
}

#[test]
fn a_core_dropped_amid_transfers_goes_with_the_last() {
    check(|| {
        let machine = Machine::start(SIZES, None);
        seed(&machine.core, Tier::Disk, Chain::from(&chain(1, 3)));
        let lease = machine.core.lease(Chain::from(&chain(1, 3)), RequestInfo::default());
        drop(machine.core.transfer(Class::Load, Tier::Device, lease));
        let Machine { core, off, hardware, .. } = machine;
        let weak = Arc::downgrade(&core);
        let dropper = thread::spawn(move || drop(core));
        dropper.join().unwrap();
        off.store(true, Ordering::Release);
        hardware.join().unwrap();
        assert!(weak.upgrade().is_none(), "the core outlives its last copy");
    });
}

#[test]
fn a_transfer_cancelled_amid_others_is_answered_and_leaves_nothing() {
    check(|| {
        let machine = Machine::start(SIZES, Some(6));
        seed(&machine.core, Tier::Disk, Chain::from(&chain(1, 3)));
        let core = Arc::clone(&machine.core);
        let fickle = thread::spawn(move || {
            let lease = core.lease(Chain::from(&chain(1, 3)), RequestInfo::default());
            let mut transfer = core.transfer(Class::Load, Tier::Device, lease);
            thread::yield_now();
            transfer.cancel();
            let transferred = block_on(transfer).expect("the core is there");
            assert!(transferred.blocks <= 3);
        });
        let others = [(Class::Load, Tier::Device), (Class::Prefetch, Tier::Host)]
            .map(|(class, to)| machine.transfer(class, to, chain(1, 3)));
        fickle.join().unwrap();
        for other in others {
            assert!(other.join().unwrap() <= 3);
        }
        let (core, _) = machine.stop();
        let staging = core.staging();
        assert_eq!((staging.idle, staging.lost), (staging.total, 0));
    });
}

#[test]
fn one_that_asks_while_it_closes_gets_an_answer() {
    check(|| {
        let machine = Machine::start(SIZES, Some(6));
        seed(&machine.core, Tier::Disk, Chain::from(&chain(1, 3)));
        let asks = |class, to| {
            let core = Arc::clone(&machine.core);
            thread::spawn(move || {
                let lease = core.lease(Chain::from(&chain(1, 3)), RequestInfo::default());
                drop(block_on(core.transfer(class, to, lease)));
            })
        };
        let askers = [
            asks(Class::Load, Tier::Device),
            asks(Class::Prefetch, Tier::Host),
            asks(Class::Load, Tier::Device),
        ];
        let core = Arc::clone(&machine.core);
        let closer = thread::spawn(move || {
            core.tick();
            core.close();
        });
        askers.into_iter().for_each(|asker| asker.join().unwrap());
        closer.join().unwrap();
        let (core, _) = machine.stop();
        let staging = core.staging();
        assert_eq!(
            (staging.idle, staging.lost),
            (staging.total, 0),
            "every copy ended, and slots are out"
        );
    });
}

/// The medium ends a copy or two and then hangs: the closing answers all that wait.
#[test]
fn closing_answers_all_that_wait_for_a_medium_that_hangs() {
    check(|| {
        let routes = [MEMORY, DISK, OBJECT].concat();
        let parked =
            Arc::new(ParkedBackend::new(Vec::new(), routes).expect("no regions, no conflict"));
        let core = bare_core(SIZES, TIGHT, &(Arc::clone(&parked) as Arc<dyn Backend>));
        seed(&core, Tier::Disk, Chain::from(&chain(1, 3)));
        let asker = {
            let core = Arc::clone(&core);
            thread::spawn(move || {
                let lease = core.lease(Chain::from(&chain(1, 3)), RequestInfo::default());
                drop(block_on(core.transfer(Class::Load, Tier::Device, lease)));
            })
        };
        let hardware = thread::spawn(move || {
            for _ in 0..2 {
                if let Some(pending) = parked.pending().first() {
                    parked.finish(pending.id, Ok(()));
                }
                thread::yield_now();
            }
        });
        let closer = {
            let core = Arc::clone(&core);
            thread::spawn(move || core.close())
        };
        // The checker reports a deadlock if the ticket has no answer.
        [asker, hardware, closer].into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(core.table().audit(), []);
    });
}

/// Those that a load of `blocks` blocks counts.
fn layers(count: u16, blocks: usize) -> Arc<LayerCount> {
    Arc::new(LayerCount::new(count.try_into().expect("above zero"), blocks))
}

/// What becomes of an engine's fence.
fn end_fence(fence: HostFence, hands_off: &AtomicBool) {
    if shuttle::rand::thread_rng().gen_range(0..2) == 0 {
        hands_off.store(false, Ordering::Release);
        fence.raise();
    }
}

/// Whatever else brings the same blocks, fails, cancels or closes.
#[test]
fn nothing_touches_an_engines_memory_before_its_fence() {
    check(|| {
        let machine = Machine::start(ENGINE, Some(6));
        machine.hands_off.store(true, Ordering::Release);
        seed(&machine.core, Tier::Disk, Chain::from(&chain(1, 3)));
        let others = [(); 2].map(|()| {
            let core = Arc::clone(&machine.core);
            thread::spawn(move || {
                let lease = core.lease(Chain::from(&chain(1, 3)), RequestInfo::default());
                // An error, if it is closed.
                drop(block_on(core.transfer(Class::Prefetch, Tier::Host, lease)));
            })
        });
        let (core, hands_off) = (Arc::clone(&machine.core), Arc::clone(&machine.hands_off));
        let engine = thread::spawn(move || {
            let (wanted, computed, fence) = (chain(1, 3), chain(2, 3), HostFence::new());
            let slots: Vec<_> = (0..6).map(SlotId).collect();
            let order = || Fence::Host(fence.clone());
            let lease = core.lease(Chain::from(&wanted), RequestInfo::default());
            let load = LoadInto {
                lease,
                blocks: 0..3,
                slots: &slots[..3],
                after: order(),
                layers: layers(2, 3),
                in_ranks: None,
                with_media: Arc::new(()),
                part_of: None,
            };
            let mut load = core.load_into(load);
            let (info, chain) = (RequestInfo::default(), Chain::from(&computed));
            let save = SaveFrom {
                info,
                chain,
                first: 0,
                slots: &slots[3..],
                ready: order(),
                part_of: None,
            };
            let mut save = core.save_from(Tier::Host, save);
            let raiser = thread::spawn(move || end_fence(fence, &hands_off));
            if shuttle::rand::thread_rng().gen_range(0..3) == 0 {
                load.cancel();
                save.cancel();
            }
            if let Ok(loaded) = block_on(load) {
                assert_eq!(loaded.arrived + loaded.failed, 3);
            }
            if let Ok(saved) = block_on(save) {
                assert_eq!(saved.copied + saved.refused + saved.failed, 3);
            }
            raiser.join().unwrap();
        });
        let core = Arc::clone(&machine.core);
        let closer = thread::spawn(move || match shuttle::rand::thread_rng().gen_range(0..3) {
            0 => core.tick(),
            1 => core.close(),
            _ => {}
        });
        engine.join().unwrap();
        closer.join().unwrap();
        others.into_iter().for_each(|other| other.join().unwrap());
        let (core, _) = machine.stop();
        let staging = core.staging();
        assert_eq!((staging.idle, staging.lost), (staging.total, 0));
    });
}

/// A load, a prefetch, a save, a flush and an engine that fills its slots, all begun before or
/// after a reset: what was there or under way is not found after it, and every slot comes back.
#[test]
fn nothing_from_before_a_reset_is_found_after_it() {
    check(|| {
        let machine = Machine::start(SIZES, Some(6));
        let mut follower = Follower::of(&machine.core);
        seed(&machine.core, Tier::Disk, Chain::from(&chain(1, 3)));
        seed(&machine.core, Tier::Device, Chain::from(&chain(2, 3)));
        let asks = |class, to, n| {
            let core = Arc::clone(&machine.core);
            thread::spawn(move || {
                let lease = core.lease(Chain::from(&chain(n, 3)), RequestInfo::default());
                answered(block_on(core.transfer(class, to, lease)));
            })
        };
        let reserved =
            machine.core.reserve(Tier::Device, Chain::from(&chain(3, 3)), RequestInfo::default());
        let core = Arc::clone(&machine.core);
        let engine = thread::spawn(move || {
            let lease = core.lease(Chain::from(&chain(3, 3)), RequestInfo::default());
            answered(block_on(core.publish(reserved, usize::MAX, lease)));
        });
        let core = Arc::clone(&machine.core);
        let flusher = thread::spawn(move || {
            let _ = core.drain(Duration::ZERO);
            core.tick();
        });
        let core = Arc::clone(&machine.core);
        let resetter = thread::spawn(move || {
            core.reset(1).expect("a greater epoch");
            assert_nothing_is_found(&core);
        });
        let others = [
            asks(Class::Load, Tier::Device, 1),
            asks(Class::Prefetch, Tier::Host, 1),
            asks(Class::Save, Tier::Host, 2),
            engine,
            flusher,
            resetter,
        ];
        others.into_iter().for_each(|other| other.join().unwrap());
        let (core, _) = machine.stop();
        core.tick();
        assert_nothing_is_found(&core);
        follower.check(&core, [1, 2, 3].map(|n| chain(n, 3)).iter().map(Chain::from));
        for tier in Tier::ALL {
            let counts = core.table().counts(tier);
            assert_eq!(counts.free, counts.total, "{tier}: {counts:?}");
        }
        assert!(core.table().is_empty());
    });
}

const TENANT: u32 = 7;

/// Has a block of the chain found wrong, its tenant forgotten or everything reset; returns how many
/// blocks may be left, and finds no more from here on.
fn drop_some(core: &Arc<Core>) -> usize {
    let at = shuttle::rand::thread_rng().gen_range(0..5);
    let left = match shuttle::rand::thread_rng().gen_range(0..4) {
        0 => {
            core.forget(TENANT);
            0
        }
        1 => {
            core.reset(1).expect("a greater epoch");
            0
        }
        _ => {
            core.drop_wrong(Chain::from(&chain(10, 5)), at);
            at
        }
    };
    assert!(
        core.matches(Chain::from(&chain(10, 5))).longest() <= left,
        "it was dropped, and is found"
    );
    left
}

/// The chain is not computed again: whatever of it comes to a tier afterwards is what was dropped.
fn assert_stays_dropped(machine: Machine, left: usize) {
    machine.check_bytes(&chain(10, 5));
    let (core, _) = machine.stop();
    core.tick();
    assert!(
        core.matches(Chain::from(&chain(10, 5))).longest() <= left,
        "what was dropped came back"
    );
    let staging = core.staging();
    assert_eq!((staging.idle, staging.lost), (staging.total, 0));
}

#[test]
fn what_was_dropped_comes_back_by_no_copy() {
    check(|| {
        let machine = Machine::start(SIZES, Some(8));
        machine.seed_bytes(Tier::Disk, &chain(10, 5));
        if shuttle::rand::thread_rng().gen_range(0..2) == 0 {
            machine.seed_bytes(Tier::Host, &chain(10, 5));
        }
        let asks = |class, to| {
            let core = Arc::clone(&machine.core);
            thread::spawn(move || {
                let lease = core.lease(Chain::from(&chain(10, 5)), info_of(TENANT));
                drop(block_on(core.transfer(class, to, lease)));
            })
        };
        let askers = [
            asks(Class::Load, Tier::Device),
            asks(Class::Prefetch, Tier::Host),
            asks(Class::Save, Tier::Object),
        ];
        let core = Arc::clone(&machine.core);
        let flusher = thread::spawn(move || _ = core.drain(Duration::ZERO));
        let core = Arc::clone(&machine.core);
        let left = thread::spawn(move || drop_some(&core)).join().unwrap();
        askers.into_iter().for_each(|asker| asker.join().unwrap());
        flusher.join().unwrap();
        assert_stays_dropped(machine, left);
    });
}

#[test]
fn an_engine_is_given_each_positions_own_bytes_or_none() {
    check(|| {
        let machine = Machine::start(ENGINE, Some(8));
        machine.seed_bytes(Tier::Disk, &chain(10, 5));
        let loads = [0, 2].map(|first| {
            let (core, contents) = (Arc::clone(&machine.core), machine.contents.clone());
            thread::spawn(move || {
                let slots: Vec<_> = (0..5).map(|at| SlotId(10 * first as u32 + at)).collect();
                let lease = core.lease(Chain::from(&chain(10, 5)), info_of(TENANT));
                let slots = &slots[first..];
                let load = LoadInto {
                    lease,
                    blocks: first..5,
                    slots,
                    after: Fence::Done,
                    layers: layers(1, slots.len()),
                    in_ranks: None,
                    with_media: Arc::new(()),
                    part_of: None,
                };
                let Ok(loaded) = block_on(core.load_into(load)) else { return };
                for (slot, hash) in slots.iter().zip(&chain(10, 5)[first..]).take(loaded.arrived) {
                    assert_eq!(contents.of(Tier::Device, *slot), Some(*hash), "given for {hash:?}");
                }
            })
        });
        let core = Arc::clone(&machine.core);
        let prefetch = thread::spawn(move || {
            let lease = core.lease(Chain::from(&chain(10, 5)), info_of(TENANT));
            drop(block_on(core.transfer(Class::Prefetch, Tier::Host, lease)));
        });
        let (core, contents) = (Arc::clone(&machine.core), machine.contents.clone());
        // Another prompt wants the room.
        let saver = thread::spawn(move || {
            let slots: Vec<_> = (40..43).map(SlotId).collect();
            slots
                .iter()
                .zip(chain(2, 3))
                .for_each(|(&slot, hash)| contents.set(Tier::Device, slot, hash));
            let (info, computed) = (info_of(TENANT), chain(2, 3));
            let chain = Chain::from(&computed);
            let save = SaveFrom {
                info,
                chain,
                first: 0,
                slots: &slots,
                ready: Fence::Done,
                part_of: None,
            };
            drop(block_on(core.save_from(Tier::Host, save)));
        });
        let core = Arc::clone(&machine.core);
        let left = thread::spawn(move || drop_some(&core)).join().unwrap();
        loads.into_iter().for_each(|load| load.join().unwrap());
        prefetch.join().unwrap();
        saver.join().unwrap();
        machine.check_bytes(&chain(2, 3));
        assert_stays_dropped(machine, left);
    });
}

/// Loads from the host tier and past it, what comes to it and what goes down from it, begun before
/// or after it is withdrawn: from then on nothing of it arrives anywhere, and what lies below it
/// does.
#[test]
fn nothing_of_a_withdrawn_tier_lands_once_it_is() {
    check(|| {
        let machine = Machine::start(Sizes { tiers: [12, 6, 12, 12], staging: 2 }, None);
        seed(&machine.core, Tier::Host, Chain::from(&chain(1, 3)));
        seed(&machine.core, Tier::Disk, Chain::from(&chain(2, 3)));
        seed(&machine.core, Tier::Device, Chain::from(&chain(3, 3)));
        let there = |core: &Core, tier| core.matches(Chain::from(&chain(1, 3))).blocks(tier);
        let core = Arc::clone(&machine.core);
        let withdrawal = thread::spawn(move || {
            core.withdraw(Tier::Host);
            assert_eq!(
                [1, 2, 3].map(|n| core.matches(Chain::from(&chain(n, 3))).blocks(Tier::Host)),
                [0; 3]
            );
            [Tier::Device, Tier::Disk].map(|tier| there(&core, tier))
        });
        let core = Arc::clone(&machine.core);
        let flusher = thread::spawn(move || {
            let _ = core.drain(Duration::ZERO);
        });
        let others = [
            machine.transfer(Class::Load, Tier::Device, chain(1, 3)),
            machine.transfer(Class::Load, Tier::Device, chain(2, 3)),
            machine.transfer(Class::Prefetch, Tier::Host, chain(2, 3)),
            machine.transfer(Class::Save, Tier::Host, chain(3, 3)),
        ];
        let [on_device, on_disk] = withdrawal.join().unwrap();
        flusher.join().unwrap();
        others.into_iter().for_each(|other| assert!(other.join().unwrap() <= 3));
        let past = machine.transfer(Class::Load, Tier::Device, chain(2, 3));
        assert_eq!(past.join().unwrap(), 3, "what lies below is loaded");
        let (core, _) = machine.stop();
        assert!(there(&core, Tier::Disk) <= on_disk, "more went down than the {on_disk} before");
        // What had gone down comes up from there.
        let most = on_device.max(on_disk);
        assert!(there(&core, Tier::Device) <= most, "more came up than the {most} before");
        // And then it heals.
        core.reset(1).expect("a greater epoch");
        core.tick();
        for tier in Tier::ALL {
            let counts = core.table().counts(tier);
            assert_eq!(counts.free, counts.total, "{tier}: {counts:?}");
        }
        seed(&core, Tier::Host, Chain::from(&chain(1, 3)));
        assert_eq!(there(&core, Tier::Host), 3);
    });
}

/// Well, or by the reset.
fn answered(answer: kvbm::Result<kvbm::Transferred>) {
    match answer {
        Ok(transferred) => assert!(transferred.blocks <= 3),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Stale),
    }
}

fn assert_nothing_is_found(core: &Core) {
    for n in 1..4 {
        assert_eq!(core.matches(Chain::from(&chain(n, 3))).longest(), 0, "chain {n} is found");
    }
}
