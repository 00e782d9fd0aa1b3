//! An engine with memory of its own: its slots are adopted, blocks go between them and the tiers,
//! and every byte is right.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvbm::{
    BlockHash, Chain, EngineMemory, Error, ErrorKind, Fence, GroupSlots, HostFence, Loaded,
    Manager, Options, Rank, RankGroup, RankOptions, SaveRequest, Saved, SlotId, Tier, TransferId,
};
use kvbm_settings::{Capacity, Settings};
use kvbm_tests::engine;
use kvbm_tests::rig::{chain, chaos, hash, metric, number_of};
use kvbm_tests::slots::{load_slots, save_slots};
use kvbm_tiers::chaos::Chaos;
use kvbm_tiers::testing::{TensorView, Tensors, TwoFaced, fill_pattern, has_pattern};
use prometheus::Registry;
use proptest::prelude::*;

const BLOCK: usize = 4096;
const LAYERS: u16 = 8;
const SOON: Duration = Duration::from_mins(1);
/// Of copies: many times what one takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(2);

fn slots(range: std::ops::Range<u32>) -> Vec<SlotId> {
    range.map(SlotId).collect()
}

fn host_only() -> Settings {
    engine::without_device(BLOCK as u64, 64)
}

fn open(settings: Settings, memory: EngineMemory, chaos: Option<&Chaos>) -> Result<Manager, Error> {
    let media_layer = chaos.map(Chaos::layer);
    let options = Options { media_layer, engine: Some(memory), ..Options::default() };
    engine::open_with(settings, options)
}

fn memory(slots: u32) -> (EngineMemory, TensorView) {
    // Keys and values of a layer apart: sixteen tensors.
    let (region, view) = Tensors::new(slots, BLOCK, 2 * usize::from(LAYERS)).shared();
    (EngineMemory::new(region, LAYERS).expect("layers of one size"), view)
}

struct Engine {
    manager: Manager,
    memory: TensorView,
    /// Holds a disk tier, if there is one.
    _disk: Option<tempfile::TempDir>,
}

impl Engine {
    fn new() -> Self {
        Self::with(host_only(), None)
    }

    fn with(settings: Settings, chaos: Option<&Chaos>) -> Self {
        let (engine, view) = memory(128);
        Self {
            manager: open(settings, engine, chaos).expect("it opens"),
            memory: view,
            _disk: None,
        }
    }

    fn on_disk(chaos: Option<&Chaos>, timeout: Duration) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut settings = host_only();
        engine::add_disk(&mut settings, 256, dir.path());
        settings.host.staging_blocks = 8;
        settings.transfer.timeout_ms = timeout.as_millis() as u64;
        Self { _disk: Some(dir), ..Self::with(settings, chaos) }
    }

    fn compute(&self, chain: &[BlockHash], slots: &[SlotId]) {
        for (hash, &slot) in chain.iter().zip(slots) {
            let mut block = vec![0; BLOCK];
            fill_pattern(number_of(*hash), &mut block);
            self.memory.write(slot, &block);
        }
    }

    fn has(&self, hash: BlockHash, slot: SlotId) -> bool {
        has_pattern(number_of(hash), &self.memory.read(slot))
    }

    fn save(&self, chain: &[BlockHash], first: usize, slots: &[SlotId]) -> Saved {
        let saved = save_slots(&self.manager, chain, first, slots, Fence::Done);
        saved.wait().expect("the manager is open")
    }

    fn load(&self, chain: &[BlockHash], slots: &[SlotId]) -> Loaded {
        let lease = self.manager.lease(chain);
        let loaded = load_slots(&self.manager, lease, 0, slots, &Fence::Done);
        loaded.wait().expect("the manager is open")
    }

    #[track_caller]
    fn assert_loads(&self, chain: &[BlockHash], into: &[SlotId]) {
        let loaded = self.load(chain, into);
        assert_eq!((loaded.arrived, loaded.failed), (chain.len(), 0));
        assert!(loaded.writers.are_gone());
        chain.iter().zip(into).for_each(|(&hash, &slot)| assert!(self.has(hash, slot), "{slot:?}"));
    }

    /// All slots are free or resident, and the books are right.
    #[track_caller]
    fn assert_well(&self) {
        let began = Instant::now();
        while Tier::ALL.iter().any(|&tier| self.manager.admin().counts(tier).lost > 0) {
            assert!(began.elapsed() < SOON, "slots do not come back");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(self.manager.drain(SOON).is_complete());
        for tier in Tier::ALL {
            assert_eq!(self.manager.admin().counts(tier).filling, 0, "{tier}");
        }
        assert_eq!(self.manager.admin().audit(), []);
    }
}

#[test]
fn what_an_engine_saves_comes_back_to_other_slots() {
    let engine = Engine::new();
    let (all, from) = (chain(1, 20), slots(0..20));
    engine.compute(&all, &from);
    let saved = engine.save(&all, 0, &from);
    assert_eq!((saved.blocks, saved.copied, saved.duplicates, saved.orphans), (20, 20, 0, 0));
    // Nothing is recorded of the engine's own memory.
    assert_eq!(saved.lease.held().plan().collect::<Vec<_>>(), [(Tier::Host, 0..20)]);
    let permuted: Vec<_> = (0..20).map(|i| SlotId(100 - i * 3)).collect();
    engine.assert_loads(&all, &permuted);
    // A part of the chain, in the middle.
    let part =
        load_slots(&engine.manager, saved.lease, 5, &slots(110..114), &Fence::Done).wait().unwrap();
    assert_eq!((part.arrived, part.failed), (4, 0));
    (5..9).zip(slots(110..114)).for_each(|(at, slot)| assert!(engine.has(all[at], slot)));
    drop(part);
    engine.assert_well();
}

#[test]
fn chunks_of_a_prefill_add_up_and_loose_ones_orphan() {
    let engine = Engine::new();
    let (all, from) = (chain(1, 12), slots(0..12));
    engine.compute(&all, &from);
    assert_eq!(engine.save(&all[..4], 0, &from[..4]).blocks, 4);
    // Blocks 4 to 7 are missing.
    let saved = engine.save(&all, 8, &from[8..]);
    assert_eq!((saved.copied, saved.orphans, saved.blocks), (0, 4, 4));
    let saved = engine.save(&all[..8], 4, &from[4..8]);
    assert_eq!((saved.copied, saved.duplicates, saved.blocks), (4, 0, 8));
    // From the root: what is there is not copied again.
    let saved = engine.save(&all, 0, &from);
    assert_eq!((saved.copied, saved.duplicates, saved.orphans, saved.blocks), (4, 8, 0, 12));
    drop(saved);
    engine.assert_loads(&all, &slots(50..62));
    engine.assert_well();
}

#[test]
fn orphans_and_duplicates_are_counted() {
    let (registry, (engine, memory)) = (Registry::new(), memory(128));
    let options = Options { registry: registry.clone(), ..Options::default() };
    let manager =
        engine::open_with(host_only(), Options { engine: Some(engine), ..options }).unwrap();
    let engine = Engine { manager, memory, _disk: None };
    let (all, from) = (chain(1, 12), slots(0..12));
    engine.compute(&all, &from);
    let counted = || {
        ["kvbm_orphan_blocks_total", "kvbm_duplicate_blocks_total"]
            .map(|name| metric(&registry, name, &[]))
    };
    assert_eq!(counted(), [0, 0]);
    assert_eq!(engine.save(&all, 5, &from[5..]).orphans, 7);
    assert_eq!(counted(), [7, 0]);
    assert_eq!(engine.save(&all[..4], 0, &from[..4]).copied, 4);
    assert_eq!(counted(), [7, 0]);
    assert_eq!(engine.save(&all, 1, &from[1..]).duplicates, 3);
    assert_eq!(counted(), [7, 3]);
    engine.assert_loads(&all, &slots(50..62));
    engine.assert_well();
}

/// A chain that was saved from its middle on begins there: with what others saved of its beginning
/// it is no chain yet.
#[test]
fn a_chain_with_a_hole_is_not_loaded_over_it() {
    let engine = Engine::new();
    let (all, from) = (chain(1, 9), slots(0..9));
    engine.compute(&all, &from);
    assert_eq!(engine.save(&all[..4], 0, &from[..4]).copied, 4);
    // Nothing says that something comes before them.
    assert_eq!(engine.save(&all[4..], 0, &from[4..]).copied, 5);
    let into = slots(50..59);
    assert_eq!(engine.load(&all, &into).arrived, 4);
    engine.assert_loads(&all[..4], &into[..4]);
    engine.assert_loads(&all[4..], &into[4..]);
    engine.assert_well();
}

#[test]
fn two_saves_of_one_chain_copy_each_block_once() {
    let engine = Engine::new();
    let (all, fence) = (chain(1, 8), HostFence::new());
    engine.compute(&all, &slots(0..8));
    engine.compute(&all, &slots(8..16));
    let save = |first: usize, from: &[SlotId], ready: Fence| {
        save_slots(&engine.manager, &all, first, from, ready)
    };
    let one = save(0, &slots(0..8), Fence::Host(fence.clone()));
    let two = save(0, &slots(8..16), Fence::Done);
    // What comes behind blocks that are on their way waits for them.
    fence.raise();
    let (one, two) = (one.wait().unwrap(), two.wait().unwrap());
    assert_eq!((one.copied, one.duplicates), (8, 0));
    assert_eq!((two.copied, two.duplicates, two.blocks), (0, 8, 8));
    drop((one, two));
    engine.assert_well();
}

/// The first saver's engine goes away; the second has the same blocks in slots of its own.
#[test]
fn a_save_brings_what_another_failed_to_bring() {
    let engine = Engine::new();
    let (all, fence) = (chain(1, 12), HostFence::new());
    engine.compute(&all, &slots(0..12));
    engine.compute(&all, &slots(20..32));
    engine.manager.completions(&mut Vec::new());
    let save = |chain: &[BlockHash], from: &[SlotId], ready: Fence| {
        save_slots(&engine.manager, chain, 0, from, ready)
    };
    let mut one = save(&all[..8], &slots(0..8), Fence::Host(fence.clone()));
    // Of this one eight are on their way already, and four hang on them.
    let two = save(&all, &slots(20..32), Fence::Done);
    let names = [one.id(), two.id()];
    one.cancel();
    let (one, two) = (one.wait().unwrap(), two.wait().unwrap());
    assert_eq!((one.copied, one.failed, one.duplicates), (0, 8, 0));
    assert_eq!((two.copied, two.failed, two.duplicates, two.blocks), (12, 0, 0, 12));
    let mut told = Vec::new();
    poll(&engine.manager, 2, |id| told.push(Some(id)));
    assert_eq!(told, names, "each is named once");
    drop((one, two));
    engine.assert_loads(&all, &slots(50..62));
    engine.assert_well();
}

#[test]
fn a_failed_copy_fails_no_save_of_the_same_blocks() {
    let faults = chaos(&["memory.write:eio@0s+1h x1"]);
    let engine = Engine::with(host_only(), Some(&faults));
    let (all, fence) = (chain(1, 8), HostFence::new());
    engine.compute(&all, &slots(0..8));
    engine.compute(&all, &slots(20..28));
    let save = |from: &[SlotId], ready: Fence| save_slots(&engine.manager, &all, 0, from, ready);
    let one = save(&slots(0..8), Fence::Host(fence.clone()));
    let two = save(&slots(20..28), Fence::Done);
    faults.start();
    fence.raise();
    let (one, two) = (one.wait().unwrap(), two.wait().unwrap());
    assert!(one.failed > 0, "{one:?}");
    assert_eq!(one.copied + one.failed, 8);
    assert_eq!((two.failed, two.blocks), (0, 8), "{two:?}");
    assert_eq!((two.copied, two.duplicates), (one.failed, one.copied));
    drop((one, two));
    faults.heal();
    // And then it heals, and everything works again.
    engine.assert_loads(&all, &slots(50..58));
    let other = chain(2, 8);
    engine.compute(&other, &slots(0..8));
    assert_eq!(engine.save(&other, 0, &slots(0..8)).copied, 8);
    engine.assert_loads(&other, &slots(50..58));
    engine.assert_well();
}

#[test]
fn layers_come_one_by_one() {
    let engine = Engine::new();
    let (all, from) = (chain(1, 48), slots(0..48));
    engine.compute(&all, &from);
    drop(engine.save(&all, 0, &from));
    let into = slots(64..112);
    for round in 0..20 {
        into.iter().for_each(|&slot| engine.memory.write(slot, &[0; BLOCK]));
        let lease = engine.manager.lease(&all);
        let mut load = load_slots(&engine.manager, lease, 0, &into, &Fence::Done);
        for layer in 0..LAYERS {
            assert!(load.wait_layers(layer + 1, SOON), "layer {layer} does not come");
            let share = BLOCK / usize::from(LAYERS);
            let bytes = share * usize::from(layer)..share * (usize::from(layer) + 1);
            for (&hash, &slot) in all.iter().zip(&into) {
                let mut block = vec![0; BLOCK];
                fill_pattern(number_of(hash), &mut block);
                assert_eq!(
                    engine.memory.read_part(slot, bytes.clone()),
                    block[bytes.clone()],
                    "round {round}"
                );
            }
        }
        let loaded = load.wait_for(SOON).expect("it ends").unwrap();
        assert_eq!((loaded.arrived, load.layers_arrived()), (48, LAYERS));
    }
    engine.assert_well();
}

#[test]
fn a_load_that_fails_in_part_tells_no_layer() {
    let engine = Engine::new();
    let (all, from) = (chain(1, 8), slots(0..8));
    engine.compute(&all, &from);
    drop(engine.save(&all[..4], 0, &from[..4]));
    for (chain, arrived) in [(all, 4), (chain(2, 8), 0)] {
        let lease = engine.manager.lease(&chain);
        let mut load = load_slots(&engine.manager, lease, 0, &slots(20..28), &Fence::Done);
        assert!(!load.wait_layers(1, SOON), "the first layer of blocks that are nowhere");
        let loaded = load.wait_for(SOON).expect("it ends").unwrap();
        assert_eq!((loaded.arrived, load.layers_arrived()), (arrived, 0));
    }
    engine.assert_well();
}

#[test]
fn copies_wait_for_the_engine() {
    let engine = Engine::new();
    let (all, from, fence) = (chain(1, 6), slots(0..6), HostFence::new());
    let mut save = save_slots(&engine.manager, &all, 0, &from, Fence::Host(fence.clone()));
    assert!(save.wait_for(Duration::from_millis(20)).is_none());
    engine.compute(&all, &from);
    fence.raise();
    assert_eq!(save.wait_for(SOON).unwrap().unwrap().copied, 6);
    let (into, fence) = (slots(20..26), HostFence::new());
    into.iter().for_each(|&slot| engine.memory.write(slot, &[7; BLOCK]));
    let lease = engine.manager.lease(&all);
    let mut load = load_slots(&engine.manager, lease, 0, &into, &Fence::Host(fence.clone()));
    assert!(load.try_take().is_none());
    std::thread::sleep(Duration::from_millis(20));
    assert!(
        into.iter().all(|&slot| engine.memory.read(slot) == [7; BLOCK]),
        "written before the engine let go"
    );
    fence.raise();
    assert_eq!(load.wait_for(SOON).unwrap().unwrap().arrived, 6);
    drop((save, load));
    engine.assert_well();
}

#[test]
fn a_fence_that_never_comes_blames_no_medium() {
    let engine = Engine::on_disk(None, TIMEOUT);
    let (all, from) = (chain(1, 6), slots(0..6));
    engine.compute(&all, &from);
    let kept = HostFence::new();
    for fence in [kept.clone(), HostFence::new()] {
        let save = save_slots(&engine.manager, &all, 0, &from, Fence::Host(fence));
        let saved = save.wait().unwrap();
        assert_eq!((saved.copied, saved.failed, saved.blocks), (0, 6, 0));
    }
    // The medium is not to blame, and what comes too late is not copied.
    kept.raise();
    assert_eq!(engine.manager.admin().failures(), 0);
    assert_eq!(engine.save(&all, 0, &from).copied, 6);
    let lease = engine.manager.lease(&all);
    let load =
        load_slots(&engine.manager, lease, 0, &slots(20..26), &Fence::Host(HostFence::new()));
    let loaded = load.wait().unwrap();
    assert_eq!((loaded.arrived, loaded.failed), (0, 6));
    assert!(loaded.writers.are_gone());
    drop(loaded);
    engine.assert_loads(&all, &slots(20..26));
    engine.assert_well();
}

#[test]
fn waiting_on_a_runtime_thread_keeps_it_and_ends() {
    let engine = Engine::new();
    let (all, from) = (chain(1, 6), slots(0..6));
    engine.compute(&all, &from);
    engine::block_on(async {
        // More often than the runtime lets a task go on without a pause.
        for _ in 0..200 {
            assert_eq!(engine.save(&all, 0, &from).blocks, 6);
            assert_eq!(engine.load(&all, &slots(20..26)).arrived, 6);
        }
    });
    engine.assert_well();
}

#[test]
fn what_waits_can_be_cancelled() {
    let engine = Engine::new();
    let (all, from, fence) = (chain(1, 6), slots(0..6), HostFence::new());
    engine.compute(&all, &from);
    let mut save = save_slots(&engine.manager, &all, 0, &from, Fence::Host(fence.clone()));
    save.cancel();
    let saved = save.wait_for(SOON).unwrap().unwrap();
    assert_eq!((saved.copied, saved.failed), (0, 6));
    drop(saved);
    fence.raise();
    assert_eq!(engine.manager.admin().counts(Tier::Host).resident, 0);
    engine.assert_well();
    assert_eq!(engine.save(&all, 0, &from).copied, 6);
    engine.assert_loads(&all, &slots(20..26));
    engine.assert_well();
}

#[test]
fn an_engine_that_polls_learns_what_ended_and_how() {
    let engine = Engine::on_disk(None, TIMEOUT);
    let (all, orphans, from) = (chain(1, 4), chain(2, 4), slots(0..4));
    engine.compute(&all, &from);
    let mut ended = Vec::new();
    engine.manager.completions(&mut ended);
    let save = |chain: &[BlockHash], first: usize, ready: Fence| {
        save_slots(&engine.manager, chain, first, &from[first..], ready)
    };
    let mut saves: HashMap<_, _> = [
        save(&all, 0, Fence::Done),
        save(&all, 0, Fence::Done),
        save(&orphans, 2, Fence::Done),
        save(&orphans, 0, Fence::Host(HostFence::new())),
    ]
    .into_iter()
    .map(|save| (save.id().expect("it was begun"), save))
    .collect();
    let told = |saved: Saved| (saved.copied + saved.duplicates, saved.orphans, saved.failed);
    let mut counts = Vec::new();
    poll(&engine.manager, saves.len(), |id| {
        let mut save = saves.remove(&id).expect("each is named once");
        counts.push(told(save.try_take().expect("it has ended").unwrap()));
    });
    counts.sort_unstable();
    assert_eq!(counts, [(0, 0, 4), (0, 2, 0), (4, 0, 0), (4, 0, 0)]);

    let kept = HostFence::new();
    let load = |into: u32, after: Fence| {
        let slots = slots(into..into + 4);
        load_slots(&engine.manager, engine.manager.lease(&all), 0, &slots, &after)
    };
    let late = load(20, Fence::Host(HostFence::new()));
    let mut cancelled = load(30, Fence::Host(kept.clone()));
    cancelled.cancel();
    let nothing = load_slots(&engine.manager, engine.manager.lease(&all), 4, &[], &Fence::Done);
    let mut loads: HashMap<_, _> = [load(40, Fence::Done), late, cancelled, nothing]
        .into_iter()
        .map(|load| (load.id().expect("it was begun"), load))
        .collect();
    let mut arrived = Vec::new();
    poll(&engine.manager, loads.len(), |id| {
        let mut load = loads.remove(&id).expect("each is named once");
        arrived.push(load.try_take().expect("it has ended").unwrap().arrived);
    });
    arrived.sort_unstable();
    assert_eq!(arrived, [0, 0, 0, 4]);
    kept.raise();

    // What touches no memory of the engine's has no name, nor has what is refused.
    let prefetch = engine.manager.prefetch(engine.manager.lease(&all), Tier::Host);
    assert_eq!(prefetch.id(), None);
    drop(prefetch.wait().unwrap());
    assert_eq!(save(&all[..1], 0, Fence::Done).id(), None, "there are more slots than blocks");
    let mut again = load(50, Fence::Done);
    poll(&engine.manager, 1, |id| {
        assert_eq!(Some(id), again.id(), "that load, and nothing of others");
    });
    assert_eq!(again.try_take().expect("it has ended").unwrap().arrived, 4);
    engine.assert_loads(&all, &slots(50..54));
    engine.assert_well();
}

#[test]
fn ends_that_nobody_asks_for_are_bounded() {
    const MOST: usize = 65_536;
    let engine = Engine::new();
    let end = |saves: usize| (0..saves).for_each(|_| drop(engine.save(&[], 0, &[])));
    let mut ended = Vec::new();
    end(3);
    engine.manager.completions(&mut ended);
    assert_eq!(ended, [], "they are noted from the first call on");
    end(MOST + 3);
    engine.manager.completions(&mut ended);
    assert_eq!(ended.len(), MOST);
    engine.assert_well();
}

/// Hears of `all` ends of transfers, and of no more.
#[track_caller]
fn poll(manager: &Manager, all: usize, mut hear: impl FnMut(TransferId)) {
    let (began, mut heard, mut ended) = (Instant::now(), 0, Vec::new());
    while heard < all {
        assert!(began.elapsed() < SOON, "a transfer ends unheard");
        manager.completions(&mut ended);
        heard += ended.len();
        ended.drain(..).for_each(&mut hear);
    }
}

#[test]
fn an_answer_comes_once_and_waits_have_any_limit() {
    let engine = Engine::new();
    let (all, from) = (chain(1, 4), slots(0..4));
    engine.compute(&all, &from);
    let mut save = save_slots(&engine.manager, &all, 0, &from, Fence::Done);
    assert_eq!(save.wait_for(Duration::MAX).expect("it ends").unwrap().copied, 4);
    assert_eq!(save.try_take().expect("it has ended").unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(save.wait().unwrap_err().kind(), ErrorKind::Closed);
    assert!(engine.load(&all, &slots(20..24)).writers.wait(Duration::MAX));
    assert!(engine.manager.close(Duration::MAX).is_complete());
}

#[test]
fn waits_for_the_engine_say_nothing_of_tiers_pace() {
    let mut settings = host_only();
    // A block in a few milliseconds.
    settings.transfer.prefill_tokens_per_second = 5_000;
    let engine = Engine::with(settings, None);
    let (all, from, fence) = (chain(1, 6), slots(0..6), HostFence::new());
    engine.compute(&all, &from);
    drop(engine.save(&all, 0, &from));
    let lease = engine.manager.lease(&all);
    let load = load_slots(&engine.manager, lease, 0, &slots(20..26), &Fence::Host(fence.clone()));
    std::thread::sleep(Duration::from_millis(300));
    fence.raise();
    assert_eq!(load.wait().unwrap().arrived, 6);
    assert_eq!(
        engine.manager.matches(&all).worth_loading(),
        6,
        "the engine was slow, not the tier"
    );
}

/// A chain on disk and nowhere else.
fn sink(engine: &Engine, all: &[BlockHash]) {
    let from = slots(0..all.len() as u32);
    engine.compute(all, &from);
    drop(engine.save(all, 0, &from));
    assert!(engine.manager.drain(SOON).is_complete());
    engine.manager.admin().evict(Tier::Host, 1_000);
    assert_eq!(
        engine.manager.lease(all).held().plan().collect::<Vec<_>>(),
        [(Tier::Disk, 0..all.len())]
    );
}

#[test]
fn disk_blocks_come_through_the_host_tier_and_stay() {
    let engine = Engine::on_disk(None, SOON);
    let all = chain(1, 30);
    sink(&engine, &all);
    engine.assert_loads(&all, &slots(60..90));
    assert_eq!(engine.manager.lease(&all).blocks(Tier::Host), 30);
    engine.assert_well();
}

#[test]
fn a_corrupt_block_below_ends_a_load_before_it() {
    let faults = chaos(&["disk.read:corrupt@0s+1h x1"]);
    let engine = Engine::on_disk(Some(&faults), SOON);
    let all = chain(1, 12);
    sink(&engine, &all);
    faults.start();
    let loaded = engine.load(&all, &slots(60..72));
    assert!(loaded.arrived < 12, "{loaded:?}");
    assert_eq!(loaded.arrived + loaded.failed, 12);
    all[..loaded.arrived]
        .iter()
        .zip(slots(60..72))
        .for_each(|(&hash, slot)| assert!(engine.has(hash, slot)));
    drop(loaded);
    faults.heal();
    // And then it heals: the engine computes what was lost, and all is there again.
    engine.compute(&all, &slots(0..12));
    assert_eq!(engine.save(&all, 0, &slots(0..12)).blocks, 12);
    engine.assert_loads(&all, &slots(60..72));
    engine.assert_well();
}

#[test]
fn slots_that_a_hanging_medium_may_still_write_are_told() {
    let faults = chaos(&["memory.read:hang@0s+6s"]);
    let engine = Engine::on_disk(Some(&faults), TIMEOUT);
    let (all, into) = (chain(1, 4), slots(60..64));
    engine.compute(&all, &slots(0..4));
    drop(engine.save(&all, 0, &slots(0..4)));
    faults.start();
    let loaded = engine.load(&all, &into);
    assert_eq!((loaded.arrived, loaded.failed), (0, 4));
    assert!(!loaded.writers.are_gone(), "the medium has the slots still");
    assert!(loaded.writers.wait(SOON));
    drop(loaded);
    faults.heal();
    let began = Instant::now();
    // The first one may be the probe, of one block.
    while engine.load(&all, &into).arrived < 4 {
        assert!(began.elapsed() < SOON, "the way stays shut");
        std::thread::sleep(Duration::from_millis(5));
    }
    engine.assert_loads(&all, &into);
    engine.assert_well();
}

#[test]
fn closing_ends_what_is_under_way() {
    let engine = Engine::new();
    let (all, from) = (chain(1, 6), slots(0..6));
    engine.compute(&all, &from);
    let fence = HostFence::new();
    let held = save_slots(&engine.manager, &all, 0, &from, Fence::Host(fence.clone()));
    assert!(engine.manager.close(SOON).is_complete());
    assert_eq!(held.wait().unwrap().copied, 0);
    let refused = save_slots(&engine.manager, &all, 0, &from, Fence::Done);
    assert_eq!(refused.wait().unwrap_err().kind(), ErrorKind::Closed);
    let refused = load_slots(&engine.manager, engine.manager.lease(&all), 0, &from, &Fence::Done);
    assert_eq!(refused.wait().unwrap_err().kind(), ErrorKind::Closed);
    fence.raise();
    assert_eq!(engine.manager.admin().counts(Tier::Host).free, 64);
    assert_eq!(engine.manager.admin().audit(), []);
}

#[test]
fn a_reset_ends_transfers_and_all_works_again() {
    let engine = Engine::new();
    let (all, other, fence) = (chain(1, 6), chain(2, 6), HostFence::new());
    engine.compute(&all, &slots(0..6));
    drop(engine.save(&all, 0, &slots(0..6)));
    let (lease, stale) = (engine.manager.lease(&all), engine.manager.lease(&all));
    let load = load_slots(&engine.manager, lease, 0, &slots(20..26), &Fence::Host(fence.clone()));
    let ready = Fence::Host(fence.clone());
    let save = save_slots(&engine.manager, &other, 0, &slots(0..6), ready);
    engine.manager.reset(1).unwrap();
    let (loaded, saved) = (load.wait().unwrap(), save.wait().unwrap());
    assert_eq!((loaded.arrived, loaded.failed, saved.copied, saved.blocks), (0, 6, 0, 0));
    assert!(loaded.writers.are_gone());
    let refused =
        load_slots(&engine.manager, stale, 0, &slots(20..26), &Fence::Done).wait().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Stale);
    fence.raise();
    for chain in [&all, &other] {
        assert_eq!(engine.manager.matches(chain).longest(), 0);
    }
    drop((loaded, saved));
    // The new weights make other bytes of the same tokens.
    engine.compute(&other, &slots(0..6));
    assert_eq!(engine.save(&all, 0, &slots(0..6)).copied, 6);
    let loaded = engine.load(&all, &slots(20..26));
    assert_eq!(loaded.arrived, 6);
    other.iter().zip(slots(20..26)).for_each(|(&hash, slot)| assert!(engine.has(hash, slot)));
    drop(loaded);
    engine.assert_well();
}

#[test]
fn bad_input_is_named() {
    let engine = Engine::new();
    let all = chain(1, 4);
    let named = |error: Error, words: &str| {
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(words), "{error}");
    };
    let save = |first, slots: &[SlotId]| {
        save_slots(&engine.manager, &all, first, slots, Fence::Done).wait().unwrap_err()
    };
    named(save(0, &[SlotId(128)]), "slot 128 is not among the engine's 128 slots");
    named(save(2, &slots(0..3)), "3 blocks from position 2 on, of 4");
    named(save(usize::MAX, &slots(0..3)), "of 4");
    let load = |slots: &[SlotId]| {
        load_slots(&engine.manager, engine.manager.lease(&all), 0, slots, &Fence::Done)
            .wait()
            .unwrap_err()
    };
    named(load(&[SlotId(3), SlotId(3)]), "slot 3 is to get two blocks at once");
    let other = Engine::new();
    let foreign =
        load_slots(&engine.manager, other.manager.lease(&all), 0, &slots(0..1), &Fence::Done);
    named(foreign.wait().unwrap_err(), "another manager");
    let without = kvbm_tests::engine::open(host_only(), &Registry::new()).unwrap();
    let error = save_slots(&without, &all, 0, &slots(0..4), Fence::Done).wait().unwrap_err();
    named(error, "Options::engine");

    let refused = |settings: Settings, words: &str| {
        named(open(settings, memory(4).0, None).unwrap_err(), words);
    };
    refused(
        Settings { block_bytes: Some(8192), ..host_only() },
        "a block of the engine has 4096 bytes",
    );
    let mut both = host_only();
    both.device.capacity = Some(Capacity::Blocks(4));
    refused(both, "device.capacity");
    let mut nowhere = host_only();
    nowhere.host.capacity = None;
    refused(nowhere, "needs DRAM");
    let uneven = EngineMemory::new(Tensors::new(4, BLOCK, 2).into_region(), 7).unwrap_err();
    named(uneven, "4096 bytes has no 7 layers");
    named(
        EngineMemory::new(Tensors::new(4, BLOCK, 2).into_region(), 0).unwrap_err(),
        "no 0 layers",
    );

    // Nothing has leaked, and all works.
    let counts = engine.manager.admin().counts(Tier::Host);
    assert_eq!((counts.free, counts.resident), (64, 0));
    engine.compute(&all, &slots(0..4));
    assert_eq!(engine.save(&all, 0, &slots(0..4)).copied, 4);
    engine.assert_loads(&all, &slots(20..24));
    engine.assert_well();
}

#[test]
fn memory_not_laid_out_as_said_is_found() {
    let two_faced = EngineMemory::new(TwoFaced::region(BLOCK), LAYERS).unwrap();
    let error = open(host_only(), two_faced, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("came back changed"), "{error}");
    // One slot is the first and the last.
    drop(open(host_only(), memory(1).0, None).unwrap());
    // What was in the slots is there still.
    let (engine, view) = memory(4);
    view.write(SlotId(0), &[3; BLOCK]);
    view.write(SlotId(3), &[4; BLOCK]);
    drop(open(host_only(), engine, None).unwrap());
    assert_eq!((view.read(SlotId(0)), view.read(SlotId(3))), (vec![3; BLOCK], vec![4; BLOCK]));
}

#[test]
fn a_rank_with_wrong_memory_is_refused_and_leaders_wait() {
    let dir = tempfile::tempdir().unwrap();
    let group = RankGroup { dir: dir.path().join("meet"), world: 1, limit: SOON };
    let options = Options { ranks: Some(group.clone()), ..Options::default() };
    let leading = std::thread::spawn(move || {
        let memory = EngineMemory::in_ranks(128, LAYERS).unwrap();
        engine::open_with(host_only(), Options { engine: Some(memory), ..options }).unwrap()
    });
    let join = |memory: &EngineMemory| {
        let options = RankOptions::new(group.clone(), 0);
        Rank::join(&host_only(), RankOptions { engine: Some(memory.clone()), ..options })
    };
    let error = join(&EngineMemory::new(TwoFaced::region(BLOCK), LAYERS).unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("came back changed"), "{error}");
    assert!(!leading.is_finished(), "the leader has no rank");
    let (engine, memory) = memory(128);
    let rank = join(&engine).unwrap();
    let engine = Engine { manager: leading.join().unwrap(), memory, _disk: None };
    let all = chain(1, 12);
    engine.compute(&all, &slots(0..12));
    assert_eq!(engine.save(&all, 0, &slots(0..12)).copied, 12);
    engine.assert_loads(&all, &slots(50..62));
    engine.assert_well();
    drop(engine);
    rank.wait().unwrap();
}

#[test]
fn a_trial_that_hangs_ends_the_start_with_a_reason() {
    let faults = chaos(&["memory.write:hang@0s+1h"]);
    faults.start();
    let mut settings = host_only();
    settings.transfer.timeout_ms = TIMEOUT.as_millis() as u64;
    let (engine, view) = memory(4);
    view.write(SlotId(0), &[3; BLOCK]);
    let error = open(settings.clone(), engine.clone(), Some(&faults)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("DYN_KVBM_TRANSFER_TIMEOUT_MS"), "{error}");
    assert_eq!(view.read(SlotId(0)), vec![3; BLOCK]);
    // And then it heals.
    faults.heal();
    drop(open(settings, engine, Some(&faults)).unwrap());
}

#[derive(Clone, Debug)]
enum Step {
    Save { chain: u32, first: u32, blocks: u32 },
    Load { chain: u32, first: u32, blocks: u32 },
    Evict { tier: Tier, blocks: usize },
    Drain,
    Reset,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tier = prop_oneof![Just(Tier::Host), Just(Tier::Disk)];
    let step = prop_oneof![
        4 => (0..4_u32, 0..20_u32, 1..24_u32).prop_map(|(chain, first, blocks)| Step::Save { chain, first, blocks }),
        4 => (0..4_u32, 0..20_u32, 1..24_u32).prop_map(|(chain, first, blocks)| Step::Load { chain, first, blocks }),
        1 => (tier, 1..40_usize).prop_map(|(tier, blocks)| Step::Evict { tier, blocks }),
        1 => Just(Step::Drain),
        1 => Just(Step::Reset),
    ];
    proptest::collection::vec(step, 1..30)
}

/// Chains share their first eight blocks.
fn forked(n: u32) -> Vec<BlockHash> {
    (0..40).map(|i| if i < 8 { hash(i + 1) } else { hash(1_000 * (n + 1) + i) }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_said_to_have_arrived_has(steps in steps(), seed in any::<u64>()) {
        let engine = Engine::on_disk(None, SOON);
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut free: Vec<u32> = (0..128).collect();
        for step in steps {
            rng.shuffle(&mut free);
            match step {
                Step::Save { chain, first, blocks } => {
                    let all = forked(chain);
                    let (first, end) = (first as usize, (first + blocks).min(40) as usize);
                    let from: Vec<_> = free[..end - first].iter().map(|&slot| SlotId(slot)).collect();
                    engine.compute(&all[first..end], &from);
                    let saved = engine.save(&all[..end], first, &from);
                    let told = [saved.copied, saved.duplicates, saved.orphans, saved.declined, saved.refused];
                    prop_assert_eq!(told.iter().sum::<usize>() + saved.failed, end - first);
                    prop_assert_eq!(saved.failed, 0);
                }
                Step::Load { chain, first, blocks } => {
                    let all = forked(chain);
                    let (first, end) = (first as usize, (first + blocks).min(40) as usize);
                    let into: Vec<_> = free[..end - first].iter().map(|&slot| SlotId(slot)).collect();
                    let lease = engine.manager.lease(Chain::from(&all));
                    let held = lease.held().longest().clamp(first, end) - first;
                    let loaded = load_slots(&engine.manager, lease, first, &into, &Fence::Done).wait().unwrap();
                    prop_assert_eq!((loaded.arrived, loaded.failed), (held, end - first - held));
                    for (&hash, &slot) in all[first..first + held].iter().zip(&into) {
                        prop_assert!(engine.has(hash, slot));
                    }
                }
                Step::Evict { tier, blocks } => drop(engine.manager.admin().evict(tier, blocks)),
                Step::Reset => engine.manager.reset(engine.manager.admin().epoch() + 1).unwrap(),
                Step::Drain => prop_assert!(engine.manager.drain(SOON).is_complete()),
            }
            prop_assert_eq!(engine.manager.admin().audit(), []);
        }
        engine.assert_well();
    }
}

#[test]
fn a_save_in_layers_is_there_when_it_is_whole() {
    let engine = Engine::new();
    let (chain, prompt) = (chain(1, 12), slots(0..12));
    engine.compute(&chain, &prompt);
    let named = [GroupSlots::full(0, &prompt)];
    let save = SaveRequest::of(&chain, &named);
    for (layers, kept) in [(LAYERS - 1, 0), (LAYERS, 12)] {
        let mut saving = engine.manager.save_in_layers(&save).unwrap();
        assert_eq!(saving.blocks(), 0..12);
        (0..layers).for_each(|_| saving.layer_is_ready().unwrap());
        assert_eq!(engine.manager.matches(&chain).longest(), 0, "the engine may give it up");
        assert_eq!(saving.finish().unwrap_or_default(), kept);
        assert_eq!(engine.manager.matches(&chain).longest(), kept);
    }
    engine.assert_loads(&chain, &slots(40..52));
    let saving = engine.manager.save_in_layers(&save).unwrap();
    assert_eq!((saving.blocks(), saving.finish().unwrap()), (12..12, 12), "it is there");
}

#[test]
fn a_save_in_layers_may_outlive_its_manager() {
    let engine = Engine::new();
    let (chain, prompt) = (chain(1, 12), slots(0..12));
    let named = [GroupSlots::full(0, &prompt)];
    let mut saving = engine.manager.save_in_layers(&SaveRequest::of(&chain, &named)).unwrap();
    drop(engine);
    (0..LAYERS).for_each(|_| saving.layer_is_ready().unwrap());
    assert_eq!(saving.finish().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn a_save_in_layers_that_makes_no_sense_begins_nothing() {
    let engine = Engine::new();
    let chain = chain(1, 4);
    let refused = |first: usize, slots: &[SlotId]| {
        let named = [GroupSlots::full(first, slots)];
        let save = SaveRequest::of(&chain, &named);
        engine.manager.save_in_layers(&save).unwrap_err().kind()
    };
    assert_eq!(refused(0, &slots(126..130)), ErrorKind::Invalid);
    assert_eq!(refused(1, &slots(0..4)), ErrorKind::Invalid);
    assert_eq!(refused(1, &slots(0..3)), ErrorKind::Unavailable, "the first block is missing");
    assert_eq!(engine.manager.admin().counts(Tier::Host).filling, 0);
}
