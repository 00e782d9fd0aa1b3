//! A hybrid model: three cache groups with blocks of their own sizes, checkpoints on one chain, and
//! every byte is right.

mod peers;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvbm::{
    BlockHash, CacheGroup, EngineMemory, Error, ErrorKind, Fence, GroupKind, GroupSlots, HostFence,
    Lease, Loaded, Manager, Options, Rank, RankGroup, RankOptions, RequestInfo, SaveRequest, Saved,
    SlotId, Tier,
};
use kvbm_settings::{Capacity, Settings};
use kvbm_tests::engine;
use kvbm_tests::rig::{chain, chaos, hash, metric, number_of};
use kvbm_tiers::chaos::Chaos;
use kvbm_tiers::testing::{TensorView, Tensors, TwoFaced, fill_pattern, has_pattern};
use prometheus::Registry;
use proptest::prelude::*;

/// Bytes of a block of full attention, of the window's layers and of the state's.
const BYTES: [usize; 3] = [4096, 2048, 6144];
const LAYERS: [u16; 3] = [8, 4, 2];
const FULL: usize = 0;
const WINDOW: usize = 1;
const STATE: usize = 2;
const SLOTS: u32 = 256;
const SOON: Duration = Duration::from_mins(1);
/// Blocks from one checkpoint to the next.
const EVERY: usize = 4;

/// What tells a block's bytes from all others', those of other groups and ranks included.
fn number(rank: usize, group: usize, hash: BlockHash) -> usize {
    number_of(hash) + 1_000_003 * (group + 3 * rank)
}

fn with_checkpoints() -> Settings {
    let mut settings = engine::without_device(BYTES[FULL] as u64, 64);
    settings.hybrid.checkpoint_blocks = EVERY as u32;
    settings
}

struct Engine {
    manager: Manager,
    /// By rank, of which there is one but where a test says so.
    memory: Vec<[TensorView; 3]>,
    window: usize,
    registry: Registry,
    /// Holds a disk tier, if there is one.
    _disk: Option<tempfile::TempDir>,
}

fn memory(group: usize) -> (EngineMemory, TensorView) {
    let (region, view) = Tensors::new(SLOTS, BYTES[group], 2 * usize::from(LAYERS[group])).shared();
    (EngineMemory::new(region, LAYERS[group]).expect("layers of one size"), view)
}

fn groups(window: u32) -> (Vec<CacheGroup>, EngineMemory, [TensorView; 3]) {
    let [full, sliding, state] = [FULL, WINDOW, STATE].map(memory);
    let group = |name: &str, kind, memory| CacheGroup {
        name: name.to_owned(),
        kind,
        memory,
        share: Some(0.3),
    };
    let groups = vec![
        group("sliding", GroupKind::Window { blocks: window }, sliding.0),
        group("state", GroupKind::State, state.0),
    ];
    (groups, full.0, [full.1, sliding.1, state.1])
}

fn open(
    settings: Settings,
    options: Options,
    memory: EngineMemory,
    groups: Vec<CacheGroup>,
) -> Result<Manager, Error> {
    engine::open_with(settings, Options { engine: Some(memory), groups, ..options })
}

impl Engine {
    fn new(window: usize) -> Self {
        Self::with(window, with_checkpoints(), None)
    }

    fn with(window: usize, settings: Settings, chaos: Option<&Chaos>) -> Self {
        Self::opened(
            window,
            settings,
            Options { media_layer: chaos.map(Chaos::layer), ..Options::default() },
        )
    }

    fn opened(window: usize, settings: Settings, options: Options) -> Self {
        let (groups, full, memory) = groups(window as u32);
        let registry = options.registry.clone();
        let manager = open(settings, options, full, groups).expect("it opens");
        Self { manager, memory: vec![memory], window, registry, _disk: None }
    }

    fn on_disk(window: usize, chaos: Option<&Chaos>) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut settings = with_checkpoints();
        engine::add_disk(&mut settings, 256, dir.path());
        settings.host.staging_blocks = 8;
        Self { _disk: Some(dir), ..Self::with(window, settings, chaos) }
    }

    fn write(&self, group: usize, hash: BlockHash, slot: SlotId) {
        let mut block = vec![0; BYTES[group]];
        for (rank, memory) in self.memory.iter().enumerate() {
            fill_pattern(number(rank, group, hash), &mut block);
            memory[group].write(slot, &block);
        }
    }

    fn has(&self, group: usize, hash: BlockHash, slot: SlotId) -> bool {
        let mut ranks = self.memory.iter().enumerate();
        ranks
            .all(|(rank, memory)| has_pattern(number(rank, group, hash), &memory[group].read(slot)))
    }

    /// The engine runs on: nothing is left of what was in its slots.
    fn clobber(&self) {
        for (group, memory) in self.memory.iter().flat_map(|memory| memory.iter().enumerate()) {
            (0..SLOTS).for_each(|slot| memory.write(SlotId(slot), &vec![0xA5; BYTES[group]]));
        }
    }

    /// Positions that an engine still has of each group after it has computed `chunk`: all, the
    /// window as of its beginning and what came since, the state at its end.
    fn there(&self, chunk: &Range<usize>) -> [Range<usize>; 3] {
        [
            chunk.clone(),
            chunk.start.saturating_sub(self.window)..chunk.end,
            chunk.end - 1..chunk.end,
        ]
    }

    /// Block p of a chain is in slot p of each group.
    fn compute(&self, chain: &[BlockHash], chunk: &Range<usize>) -> Vec<Vec<SlotId>> {
        self.clobber();
        let there = self.there(chunk);
        let slots = there.iter().enumerate().map(|(group, there)| {
            there.clone().for_each(|at| self.write(group, chain[at], SlotId(at as u32)));
            there.clone().map(|at| SlotId(at as u32)).collect()
        });
        slots.collect()
    }

    fn save(&self, chain: &[BlockHash], chunk: Range<usize>, is_end: bool) -> Saved {
        self.begin_save(chain, chunk, is_end).wait().expect("the manager is open")
    }

    fn begin_save(
        &self,
        chain: &[BlockHash],
        chunk: Range<usize>,
        is_end: bool,
    ) -> kvbm::Transfer<Saved> {
        let slots = self.compute(chain, &chunk);
        let there = self.there(&chunk);
        let slots: Vec<_> = (0..3)
            .map(|group| GroupSlots {
                group: group as u8,
                first: there[group].start,
                slots: &slots[group],
            })
            .collect();
        let chain = &chain[..chunk.end];
        let save = SaveRequest {
            info: RequestInfo::default(),
            chain: chain.into(),
            slots: &slots,
            is_end,
            ready: Fence::Done,
        };
        self.manager.save_from(&save)
    }

    /// A whole prompt, `chunk` blocks at a time.
    fn prefill(&self, chain: &[BlockHash], chunk: usize) {
        for start in (0..chain.len()).step_by(chunk) {
            let end = (start + chunk).min(chain.len());
            let saved = self.save(chain, start..end, end == chain.len());
            assert_eq!(saved.blocks, end);
            saved
                .checkpoints
                .iter()
                .for_each(|group| assert_eq!(group.checkpoints, group.whole, "{group:?}"));
        }
    }

    fn lease(&self, chain: &[BlockHash]) -> Lease {
        self.manager.lease_for(RequestInfo::default(), chain)
    }

    /// Slots from the top down, so that they are others than those of [`compute`](Self::compute).
    fn slots(wanted: &Range<usize>) -> Vec<SlotId> {
        wanted.clone().map(|at| SlotId(SLOTS - 1 - at as u32)).collect()
    }

    fn load(&self, lease: Lease) -> Loaded {
        self.begin_load(lease, &Fence::Done).wait().expect("the manager is open")
    }

    fn begin_load(&self, lease: Lease, after: &Fence) -> kvbm::Transfer<Loaded> {
        self.clobber();
        let wanted: Vec<_> = (0..3).map(|group| lease.wanted(group).expect("a group")).collect();
        let slots: Vec<_> = wanted.iter().map(Self::slots).collect();
        let slots: Vec<_> = (0..3)
            .map(|group| GroupSlots {
                group: group as u8,
                first: wanted[group].start,
                slots: &slots[group],
            })
            .collect();
        self.manager.load_into(lease, &slots, after)
    }

    /// What a match at `blocks` brings is right in all groups.
    #[track_caller]
    fn assert_loaded(&self, chain: &[BlockHash], blocks: usize) {
        let wanted = [
            0..blocks,
            blocks.saturating_sub(self.window)..blocks,
            blocks.saturating_sub(1)..blocks,
        ];
        for (group, wanted) in wanted.into_iter().enumerate() {
            for (at, slot) in wanted.clone().zip(Self::slots(&wanted)) {
                assert!(self.has(group, chain[at], slot), "group {group}, block {at} of {blocks}");
            }
        }
    }

    #[track_caller]
    fn assert_loads(&self, chain: &[BlockHash], blocks: usize) {
        let lease = self.lease(chain);
        assert_eq!(lease.usable(), blocks);
        let loaded = self.load(lease);
        assert!(loaded.is_whole && loaded.usable == blocks, "{loaded:?}");
        self.assert_loaded(chain, blocks);
    }

    fn resident(&self, tier: Tier) -> [u32; 3] {
        [0, 1, 2].map(|group| self.manager.admin().counts_of(group, tier).resident)
    }

    /// All slots are free or resident, and the books are right, in all groups.
    #[track_caller]
    fn assert_well(&self) {
        assert!(self.manager.drain(SOON).is_complete());
        for (tier, group) in
            Tier::ALL.into_iter().flat_map(|tier| [0, 1, 2].map(|group| (tier, group)))
        {
            let counts = self.manager.admin().counts_of(group, tier);
            let rest = counts.filling + counts.lost + counts.quarantined;
            assert_eq!(rest, 0, "{tier} of group {group}: {counts:?}");
        }
        assert_eq!(self.manager.admin().audit(), []);
    }
}

#[test]
fn a_prompt_saved_in_chunks_comes_back_in_every_group() {
    for window in [1, 3, 4, 6, 11, 30] {
        let engine = Engine::new(window);
        let all = chain(1, 18);
        engine.prefill(&all, 4);
        engine.assert_loads(&all, 18);
        // Another prompt that goes on from there, and those that end earlier: checkpoints are on
        // the grid.
        let longer: Vec<_> = all.iter().copied().chain(chain(2, 9)).collect();
        engine.assert_loads(&longer, 18);
        engine.assert_loads(&all[..17], 16);
        engine.assert_loads(&all[..11], 8);
        engine.assert_loads(&all[..3], 0);
        engine.assert_well();
    }
}

#[test]
fn a_window_is_kept_once_however_far_checkpoints_are_apart() {
    // Four checkpoints on the grid, and one two blocks behind the last of them.
    for (window, kept) in [(1, 5), (2, 4 * 2 + 2), (3, 4 * 3 + 2), (4, 18), (6, 18), (30, 18)] {
        let engine = Engine::new(window);
        engine.prefill(&chain(1, 18), 4);
        assert_eq!(engine.resident(Tier::Host), [18, kept, 5], "a window of {window}");
        let planned = kvbm_policies::checkpoints::kept(window as u64, EVERY as u64);
        assert_eq!(u64::from(kept), 4 * planned + planned.min(2));
        // The same again costs nothing.
        engine.prefill(&chain(1, 18), 4);
        assert_eq!(engine.resident(Tier::Host), [18, kept, 5]);
        engine.assert_well();
    }
}

#[test]
fn a_checkpoint_missing_in_one_group_shortens_every_match() {
    let engine = Engine::new(6);
    let all = chain(1, 20);
    engine.prefill(&all[..16], 4);
    // The state is not named at the end, and the window's checkpoint alone is of no use.
    let slots = engine.compute(&all, &(16..20));
    let given =
        |group: usize, first| GroupSlots { group: group as u8, first, slots: &slots[group] };
    let slots = [given(FULL, 16), given(WINDOW, 10)];
    let info = RequestInfo::default();
    let save =
        SaveRequest { info, chain: (&all).into(), slots: &slots, is_end: true, ready: Fence::Done };
    let saved = engine.manager.save_from(&save).wait().unwrap();
    assert_eq!((saved.blocks, saved.checkpoints.len()), (20, 1));
    assert_eq!(
        (
            saved.checkpoints[0].checkpoints,
            saved.checkpoints[0].whole,
            saved.checkpoints[0].duplicates
        ),
        (2, 2, 4)
    );
    drop(saved);
    engine.assert_loads(&all, 16);
    assert_eq!(
        metric(&engine.registry, "kvbm_out_of_reach_tokens_total", &[("group", "full")]),
        4 * 16
    );
    // The window at 16 has the checkpoint at 12 in it: it takes the one at 16 along.
    let of_window = engine.manager.admin().counts_of(1, Tier::Host).resident;
    assert_eq!(
        engine.manager.admin().evict_of(1, Tier::Host, of_window as usize),
        of_window as usize
    );
    assert_eq!(engine.lease(&all).usable(), 0);
    engine.prefill(&all, 4);
    engine.assert_loads(&all, 20);
    engine.assert_well();
}

#[test]
fn what_the_window_has_left_behind_is_not_asked_for() {
    let engine = Engine::new(6);
    let all = chain(1, 40);
    // One chunk: of the checkpoints before its end, the engine has no state.
    engine.prefill(&all, 40);
    assert_eq!(engine.resident(Tier::Host), [40, 40, 1]);
    assert_eq!(engine.lease(&all[..39]).usable(), 0);
    engine.assert_loads(&all, 40);
    // Of another, the window's early blocks are gone as well: position 30 begins it.
    let other = chain(2, 40);
    let slots = engine.compute(&other, &(0..40));
    let window = GroupSlots { group: 1, first: 34, slots: &slots[WINDOW][34..] };
    let given = [GroupSlots { group: 0, first: 0, slots: &slots[FULL] }, window];
    let info = RequestInfo::default();
    let save = SaveRequest {
        info,
        chain: (&other).into(),
        slots: &given,
        is_end: true,
        ready: Fence::Done,
    };
    let saved = engine.manager.save_from(&save).wait().unwrap();
    assert_eq!(
        (saved.checkpoints[0].checkpoints, saved.checkpoints[0].copied),
        (1, 4),
        "that at 40 alone"
    );
    drop(saved);
    engine.assert_well();
}

#[test]
fn checkpoints_leave_with_their_block() {
    let engine = Engine::new(6);
    let all = chain(1, 18);
    engine.prefill(&all, 4);
    assert_eq!(engine.manager.admin().evict(Tier::Host, 1), 1);
    assert_eq!(engine.resident(Tier::Host), [17, 16, 4]);
    engine.assert_loads(&all, 16);
    // One that is read stays until its last reader has gone, and is not found.
    let lease = engine.lease(&all);
    assert_eq!(engine.manager.admin().evict_of(0, Tier::Host, 1), 0, "leased as well");
    drop(lease);
    assert_eq!(engine.manager.admin().evict(Tier::Host, 100), 17);
    assert_eq!(engine.resident(Tier::Host), [0, 0, 0]);
    for group in 0..3 {
        let counts = engine.manager.admin().counts_of(group, Tier::Host);
        assert_eq!(counts.free, counts.total);
    }
    engine.prefill(&all, 4);
    engine.assert_loads(&all, 18);
    engine.assert_well();
}

#[test]
fn checkpoints_go_down_with_their_block() {
    let engine = Engine::on_disk(6, None);
    let all = chain(1, 18);
    engine.prefill(&all, 4);
    assert!(engine.manager.drain(SOON).is_complete());
    assert_eq!(engine.manager.admin().evict(Tier::Host, 100), 18);
    assert_eq!(
        (engine.resident(Tier::Host), engine.resident(Tier::Disk)),
        ([0, 0, 0], [18, 18, 5])
    );
    engine.assert_loads(&all, 18);
    engine.assert_well();
    // From nowhere they are gone, whatever is still to be written.
    engine.manager.admin().evict(Tier::Host, 100);
    engine.manager.admin().evict(Tier::Disk, 100);
    assert_eq!((engine.resident(Tier::Host), engine.resident(Tier::Disk)), ([0, 0, 0], [0, 0, 0]));
    engine.assert_well();
}

/// Ten blocks find room, and so does no checkpoint behind these.
fn small() -> Engine {
    let mut settings = with_checkpoints();
    settings.host.capacity = Some(Capacity::Blocks(10));
    Engine::with(3, settings, None)
}

#[test]
fn a_checkpoint_without_its_block_leaves_though_nobody_asks() {
    let engine = small();
    let all = chain(1, 16);
    let mut ended = Vec::new();
    engine.manager.completions(&mut ended);
    let id = engine.begin_save(&all, 0..16, true).id().expect("it was begun");
    while !ended.contains(&id) {
        std::thread::yield_now();
        engine.manager.completions(&mut ended);
    }
    assert_eq!(engine.resident(Tier::Host), [10, 6, 0]);
    engine.assert_well();
}

#[test]
fn a_checkpoint_without_its_block_is_not_kept() {
    let engine = small();
    let all = chain(1, 16);
    let lease = engine.lease(&all);
    let saved = engine.save(&all, 0..16, true);
    assert_eq!(saved.blocks, 10, "there is room for ten");
    assert_eq!(saved.checkpoints[0].checkpoints, 4);
    assert_eq!((saved.checkpoints[0].whole, saved.checkpoints[1].whole), (2, 0));
    drop((saved, lease));
    assert_eq!(engine.resident(Tier::Host), [10, 6, 0]);
    engine.assert_well();
}

#[test]
fn what_fails_in_one_group_is_used_in_none() {
    for group in [WINDOW, STATE] {
        let faults = chaos(&["disk.read:corrupt@0s+1h x1"]);
        let engine = Engine::on_disk(6, Some(&faults));
        let all = chain(1, 18);
        engine.prefill(&all, 4);
        assert!(engine.manager.drain(SOON).is_complete());
        // It alone is read from disk.
        engine.manager.admin().evict_of(group as u8, Tier::Host, 100);
        faults.start();
        let loaded = engine.load(engine.lease(&all));
        assert!(!loaded.is_whole);
        assert_eq!(loaded.usable, 17);
        faults.heal();
        // The next match ends where all is there.
        let lease = engine.lease(&all);
        assert!(lease.usable() < 18 && lease.usable().is_multiple_of(EVERY), "{lease:?}");
        let blocks = lease.usable();
        let loaded = engine.load(lease);
        assert!(loaded.is_whole, "{loaded:?}");
        engine.assert_loaded(&all, blocks);
        // And then it heals: the engine computes what was lost, and all is there again.
        engine.prefill(&all, 4);
        engine.assert_loads(&all, 18);
        engine.assert_well();
    }
}

#[test]
fn a_medium_hanging_in_one_group_costs_a_miss_only() {
    let faults = chaos(&["memory.write:hang@0s+6s x1"]);
    let mut settings = with_checkpoints();
    settings.transfer.timeout_ms = 2_000;
    let engine = Engine::with(6, settings, Some(&faults));
    let all = chain(1, 18);
    faults.start();
    let saved = engine.save(&all, 0..18, true);
    let whole: usize = saved.checkpoints.iter().map(|group| group.whole).sum();
    assert!(saved.blocks < 18 || whole < 6, "{saved:?}");
    drop(saved);
    let lease = engine.lease(&all);
    let blocks = lease.usable();
    if engine.load(lease).is_whole {
        engine.assert_loaded(&all, blocks);
    }
    faults.heal();
    let began = Instant::now();
    while engine.lease(&all).usable() < 18 || !engine.load(engine.lease(&all)).is_whole {
        assert!(began.elapsed() < SOON, "it does not heal");
        drop(engine.save(&all, 0..18, true));
        std::thread::sleep(Duration::from_millis(20));
    }
    engine.assert_loads(&all, 18);
    while (0..3).any(|group| engine.manager.admin().counts_of(group, Tier::Host).lost > 0) {
        assert!(began.elapsed() < SOON, "slots do not come back");
        std::thread::sleep(Duration::from_millis(2));
    }
    engine.assert_well();
}

#[test]
fn one_answer_awaits_all_groups_and_one_call_cancels_them() {
    let engine = Engine::new(6);
    let all = chain(1, 18);
    engine.prefill(&all, 4);
    let fence = HostFence::new();
    let mut load = engine.begin_load(engine.lease(&all), &Fence::Host(fence.clone()));
    assert!(load.wait_for(Duration::from_millis(20)).is_none());
    fence.raise();
    for (group, layers) in (0..).zip(LAYERS) {
        assert!(load.wait_group_layers(group, layers, SOON), "group {group}");
    }
    assert!(load.wait_for(SOON).expect("it ends").unwrap().is_whole);
    engine.assert_loaded(&all, 18);
    let mut load = engine.begin_load(engine.lease(&all), &Fence::Host(HostFence::new()));
    load.cancel();
    let loaded = load.wait_for(SOON).expect("it ends").unwrap();
    assert_eq!((loaded.is_whole, loaded.usable), (false, 0));
    assert!(loaded.writers.are_gone());
    // What the engine has already it does not ask for.
    let lease = engine.lease(&all);
    let slots = [0, 1, 2].map(|group| GroupSlots { group, first: 18, slots: &[] });
    assert!(engine.manager.load_into(lease, &slots, &Fence::Done).wait().unwrap().is_whole);
    engine.assert_well();
}

#[test]
fn an_engine_that_polls_hears_once_of_all_groups() {
    let engine = Engine::new(6);
    let all = chain(1, 18);
    let mut ended = Vec::new();
    engine.manager.completions(&mut ended);
    let slots: Vec<_> = engine.compute(&all, &(0..18));
    let slots = [0, 1, 2].map(|group| {
        let first = if group == STATE { 17 } else { 0 };
        GroupSlots { group: group as u8, first, slots: &slots[group] }
    });
    let info = RequestInfo::default();
    let save =
        SaveRequest { info, chain: (&all).into(), slots: &slots, is_end: true, ready: Fence::Done };
    let mut save = engine.manager.save_from(&save);
    let saved = hear(&engine, &mut save);
    assert_eq!((saved.blocks, saved.checkpoints[0].whole, saved.checkpoints[1].whole), (18, 5, 1));
    drop(saved);

    // Of full attention there is nothing to load: the state is still waited for.
    let fence = HostFence::new();
    let begin = |after: &Fence| {
        let state = [SlotId(100)];
        let given = |group, first, slots| GroupSlots { group, first, slots };
        let slots = [given(0, 18, &[]), given(1, 18, &[]), given(2, 17, state.as_slice())];
        engine.manager.load_into(engine.lease(&all), &slots, after)
    };
    let mut load = begin(&Fence::Host(fence.clone()));
    assert!(load.try_take().is_none());
    engine.manager.completions(&mut ended);
    assert_eq!(ended, [], "a part has ended, and the whole has not");
    fence.raise();
    assert!(hear(&engine, &mut load).is_whole);
    assert!(engine.has(STATE, all[17], SlotId(100)));

    let mut cancelled = begin(&Fence::Host(HostFence::new()));
    cancelled.cancel();
    assert!(!hear(&engine, &mut cancelled).is_whole);
    // And then all is well again.
    let mut load = engine.begin_load(engine.lease(&all), &Fence::Done);
    assert!(hear(&engine, &mut load).is_whole);
    engine.assert_loaded(&all, 18);
    engine.assert_well();
}

/// What a transfer says when the engine hears of its end, and of nothing else.
#[track_caller]
fn hear<T>(engine: &Engine, transfer: &mut kvbm::Transfer<T>) -> T {
    let (began, mut ended) = (Instant::now(), Vec::new());
    while ended.is_empty() {
        assert!(began.elapsed() < SOON, "it ends unheard");
        engine.manager.completions(&mut ended);
    }
    assert_eq!(ended, [transfer.id().expect("it was begun")]);
    transfer.try_take().expect("it has ended").unwrap()
}

#[test]
fn a_reset_comes_to_all_groups_at_once() {
    let engine = Engine::new(6);
    let (all, other) = (chain(1, 18), chain(2, 18));
    engine.prefill(&all, 4);
    let fence = HostFence::new();
    let (stale, load) =
        (engine.lease(&all), engine.begin_load(engine.lease(&all), &Fence::Host(fence.clone())));
    let slots: Vec<_> = engine.compute(&other, &(0..18));
    let slots = [0, 1, 2].map(|group| {
        let first = if group == STATE { 17 } else { 0 };
        GroupSlots { group: group as u8, first, slots: &slots[group] }
    });
    let (info, ready) = (RequestInfo::default(), Fence::Host(fence.clone()));
    let save = SaveRequest { info, chain: (&other).into(), slots: &slots, is_end: true, ready };
    let save = engine.manager.save_from(&save);
    engine.manager.reset(1).unwrap();
    assert_eq!(engine.manager.reset(1).unwrap_err().kind(), ErrorKind::Invalid);
    let (loaded, saved) = (load.wait().unwrap(), save.wait().unwrap());
    assert_eq!((loaded.is_whole, loaded.usable), (false, 0));
    assert_eq!((saved.blocks, saved.checkpoints[0].whole, saved.checkpoints[1].whole), (0, 0, 0));
    drop((loaded, saved));
    fence.raise();
    let refused = engine.begin_load(stale, &Fence::Done).wait().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Stale);
    assert_eq!(engine.lease(&all).usable() + engine.lease(&other).usable(), 0);
    engine.prefill(&other, 4);
    engine.assert_loads(&other, 18);
    engine.assert_well();
}

/// Weights of an epoch make other bytes of the same tokens.
const OF_EPOCH: usize = 50_000_017;
const EPOCHS: usize = 80;

impl Engine {
    fn save_of_epoch(&self, chain: &[BlockHash], epoch: usize) {
        let there = self.there(&(0..chain.len()));
        for (group, at) in there
            .iter()
            .enumerate()
            .flat_map(|(group, there)| there.clone().map(move |at| (group, at)))
        {
            let mut block = vec![0; BYTES[group]];
            fill_pattern(number(0, group, chain[at]) + OF_EPOCH * epoch, &mut block);
            self.memory[0][group].write(SlotId(at as u32), &block);
        }
        let slots: Vec<_> = (0..chain.len() as u32).map(SlotId).collect();
        let given = [0, 1, 2].map(|group| {
            let there = there[group].clone();
            GroupSlots { group: group as u8, first: there.start, slots: &slots[there] }
        });
        let info = RequestInfo::default();
        let save = SaveRequest {
            info,
            chain: chain.into(),
            slots: &given,
            is_end: true,
            ready: Fence::Done,
        };
        drop(self.manager.save_from(&save).wait().expect("the manager is open"));
    }

    /// Loads what there is, and says of which epoch it is.
    fn load_of_one_epoch(&self, chain: &[BlockHash]) -> Option<usize> {
        let lease = self.lease(chain);
        let wanted = [0, 1, 2].map(|group| lease.wanted(group).expect("a group"));
        let slots = wanted.each_ref().map(Self::slots);
        let given = [0, 1, 2].map(|group| GroupSlots {
            group: group as u8,
            first: wanted[group].start,
            slots: &slots[group],
        });
        // The lease may be from before a reset.
        let loaded = self.manager.load_into(lease, &given, &Fence::Done).wait().ok()?;
        if !loaded.is_whole || wanted[0].is_empty() {
            return None;
        }
        let is_of = |epoch: usize, group: usize| {
            wanted[group].clone().zip(&slots[group]).all(|(at, &slot)| {
                let of_epoch = number(0, group, chain[at]) + OF_EPOCH * epoch;
                has_pattern(of_epoch, &self.memory[0][group].read(slot))
            })
        };
        let epoch =
            (0..EPOCHS).find(|&epoch| is_of(epoch, FULL)).expect("full attention of one epoch");
        assert!(is_of(epoch, WINDOW) && is_of(epoch, STATE), "epoch {epoch} is mixed with another");
        Some(epoch)
    }
}

#[test]
fn a_reset_amid_loads_never_mixes_old_and_new() {
    let engine = Engine::new(6);
    let all = chain(1, 18);
    let (is_over, loads) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut newest = 0;
            while !is_over.load(Ordering::Acquire) {
                let Some(epoch) = engine.load_of_one_epoch(&all) else { continue };
                assert!(epoch >= newest, "epoch {epoch} after {newest}");
                newest = epoch;
                loads.fetch_add(1, Ordering::AcqRel);
            }
        });
        for epoch in 0..EPOCHS {
            engine.save_of_epoch(&all, epoch);
            let (began, before) = (Instant::now(), loads.load(Ordering::Acquire));
            while epoch % 8 == 0
                && loads.load(Ordering::Acquire) == before
                && began.elapsed() < SOON
            {
                std::thread::yield_now();
            }
            engine.manager.reset(epoch as u64 + 1).unwrap();
        }
        is_over.store(true, Ordering::Release);
    });
    assert!(loads.into_inner() >= EPOCHS / 8);
    assert_eq!(engine.lease(&all).usable(), 0);
    engine.prefill(&all, 4);
    engine.assert_loads(&all, 18);
    engine.assert_well();
}

#[test]
fn a_restart_finds_checkpoints_made_by_the_same_rule() {
    let dir = tempfile::tempdir().expect("a directory");
    let open = |every| {
        let mut settings = with_checkpoints();
        engine::add_disk(&mut settings, 256, dir.path());
        settings.disk.keep = true;
        settings.hybrid.checkpoint_blocks = every;
        Engine::opened(6, settings, engine::model(engine::fingerprint("w")))
    };
    let all = chain(1, 18);
    let engine = open(4);
    engine.prefill(&all, 4);
    assert!(engine.manager.drain(SOON).is_complete());
    assert!(engine.manager.close(SOON).is_complete());
    drop(engine);
    let engine = open(8);
    assert_eq!((engine.manager.matches(&all).longest(), engine.lease(&all).usable()), (18, 0));
    drop(engine);
    let engine = open(4);
    assert_eq!(engine.resident(Tier::Disk), [18, 18, 5]);
    engine.assert_loads(&all, 18);
    engine.manager.reset(7).unwrap();
    drop(engine);
    // Another rule has other files, which know of no reset yet: the newest epoch is that of all
    // groups.
    let engine = open(8);
    assert_eq!((engine.manager.admin().epoch(), engine.lease(&all).usable()), (7, 0));
    engine.prefill(&all, 8);
    engine.assert_loads(&all, 18);
    engine.assert_well();
}

/// An engine of full attention and two windows alike, named in this order.
fn twins(dir: &Path, names: [&str; 2]) -> (Manager, [TensorView; 3]) {
    let mut settings = with_checkpoints();
    engine::add_disk(&mut settings, 256, dir);
    settings.disk.keep = true;
    let [full, one, two] = [FULL, WINDOW, WINDOW].map(memory);
    let group = |name: &str, memory| CacheGroup {
        name: name.to_owned(),
        kind: GroupKind::Window { blocks: 6 },
        memory,
        share: Some(0.3),
    };
    let groups = vec![group(names[0], one.0), group(names[1], two.0)];
    let options = engine::model(engine::fingerprint("w"));
    let manager = open(settings, options, full.0, groups).expect("it opens");
    (manager, [full.1, one.1, two.1])
}

#[test]
fn groups_alike_find_no_file_of_another_after_swaps() {
    let dir = tempfile::tempdir().expect("a directory");
    let (manager, memory) = twins(dir.path(), ["one", "two"]);
    let all = chain(1, 6);
    let slots: Vec<SlotId> = (0..6).map(SlotId).collect();
    for (group, memory) in memory.iter().enumerate() {
        slots
            .iter()
            .for_each(|&slot| memory.write(slot, &vec![group as u8 + 1; memory.read(slot).len()]));
    }
    let given = [0, 1, 2].map(|group| GroupSlots { group, first: 0, slots: &slots });
    let save = SaveRequest {
        info: RequestInfo::default(),
        chain: (&all).into(),
        slots: &given,
        is_end: true,
        ready: Fence::Done,
    };
    assert_eq!(manager.save_from(&save).wait().unwrap().copied, 6);
    assert!(manager.drain(SOON).is_complete() && manager.close(SOON).is_complete());
    drop(manager);
    let (manager, _) = twins(dir.path(), ["two", "one"]);
    let lease = manager.lease_for(RequestInfo::default(), &all);
    assert_eq!(
        lease.usable(),
        0,
        "blocks are named by their group's number, which another has now"
    );
    drop((lease, manager));
    let (manager, memory) = twins(dir.path(), ["one", "two"]);
    let lease = manager.lease_for(RequestInfo::default(), &all);
    assert_eq!(lease.usable(), 6, "and in the old order all is there");
    assert!(manager.load_into(lease, &given, &Fence::Done).wait().unwrap().is_whole);
    assert_eq!([0, 1, 2].map(|group| memory[group].read(SlotId(5))[0]), [1, 2, 3]);
}

#[test]
fn closing_closes_all_groups() {
    let engine = Engine::new(6);
    let all = chain(1, 18);
    engine.prefill(&all, 4);
    let lease = engine.lease(&all);
    assert!(engine.manager.close(SOON).is_complete());
    let refused = engine.begin_load(lease, &Fence::Done).wait().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed);
    assert_eq!(engine.manager.admin().audit(), []);
}

#[test]
fn groups_share_the_tiers_by_what_their_checkpoints_take() {
    let (mut groups, full, _) = groups(6);
    groups.iter_mut().for_each(|group| group.share = None);
    let mut settings = with_checkpoints();
    settings.host.capacity = Some(Capacity::Blocks(64));
    let manager = open(settings.clone(), Options::default(), full.clone(), groups.clone()).unwrap();
    // Sixteen ways of four blocks, each with four blocks of the window and one state.
    let totals = |manager: &Manager| {
        [0, 1, 2].map(|group| manager.admin().counts_of(group, Tier::Host).total)
    };
    assert_eq!(totals(&manager), [64, 64, 16]);
    drop(manager);
    // A way takes 4 × 4096 + 4 × 2048 + 6144 bytes.
    settings.host.capacity = Some(Capacity::Bytes(10 * 30_720));
    let manager = open(settings, Options::default(), full, groups).unwrap();
    assert_eq!(totals(&manager), [40, 40, 10]);
}

#[test]
fn metrics_tell_groups_apart() {
    let engine = Engine::new(6);
    engine.prefill(&chain(1, 18), 4);
    let resident =
        |group| metric(&engine.registry, "kvbm_slots", &[("group", group), ("state", "resident")]);
    assert_eq!((resident("full"), resident("sliding"), resident("state")), (18, 18, 5));
}

const WORLD: u16 = 2;

fn rank_group(dir: &Path) -> RankGroup {
    RankGroup { dir: dir.join("meet"), world: WORLD, limit: SOON }
}

fn rank_options(dir: &Path, rank: u16) -> RankOptions {
    RankOptions::new(rank_group(dir), rank)
}

/// Joins on a thread of its own, since the leader waits for all.
fn join(dir: &Path, rank: u16, window: usize) -> JoinHandle<(Rank, [TensorView; 3])> {
    let options = rank_options(dir, rank);
    std::thread::spawn(move || {
        let (groups, full, memory) = groups(window as u32);
        let options = RankOptions { engine: Some(full), groups, ..options };
        (Rank::join(&with_checkpoints(), options).expect("it joins"), memory)
    })
}

/// Leads ranks whose window is one of six blocks.
fn lead(dir: &Path) -> (Manager, Registry) {
    let (mut groups, ..) = groups(6);
    for (group, number) in groups.iter_mut().zip(1..) {
        group.memory =
            EngineMemory::group_in_ranks(SLOTS, LAYERS[number], BYTES[number] as u64).unwrap();
    }
    let registry = Registry::new();
    let ranks = Some(rank_group(dir));
    let options = Options { ranks, registry: registry.clone(), ..Options::default() };
    let memory = EngineMemory::in_ranks(SLOTS, LAYERS[FULL]).unwrap();
    (open(with_checkpoints(), options, memory, groups).expect("it opens"), registry)
}

impl Engine {
    /// Saves until all is there: each group hears of a lost rank by itself, and media that were
    /// lost are tried by one block first.
    #[track_caller]
    fn heal(&self, chain: &[BlockHash]) {
        let began = Instant::now();
        while self.lease(chain).usable() < chain.len() {
            assert!(began.elapsed() < SOON, "it does not heal");
            drop(self.save(chain, 0..chain.len(), true));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn groups_come_back_by_slices_and_lost_ranks_cost_misses() {
    let dir = tempfile::tempdir().unwrap();
    let joining: Vec<_> = (0..WORLD).map(|rank| join(dir.path(), rank, 6)).collect();
    let (manager, registry) = lead(dir.path());
    let (mut ranks, memory): (Vec<_>, Vec<_>) =
        joining.into_iter().map(|joining| joining.join().expect("it joins")).unzip();
    let mut engine = Engine { manager, memory, window: 6, registry, _disk: None };
    let all = chain(1, 18);
    engine.prefill(&all, 4);
    engine.assert_loads(&all, 18);

    drop(ranks.pop());
    let began = Instant::now();
    while engine.lease(&all).usable() > 0 {
        assert!(began.elapsed() < SOON, "a part of each block is gone");
        std::thread::sleep(Duration::from_millis(2));
    }
    let (rank, memory) = join(dir.path(), WORLD - 1, 6).join().expect("it joins again");
    assert!(rank.is_serving());
    ranks.push(rank);
    *engine.memory.last_mut().expect("two ranks") = memory;
    engine.heal(&all);
    engine.assert_loads(&all, 18);
    engine.assert_well();
}

/// The state's memory is not what it says it is.
fn two_faced(mut groups: Vec<CacheGroup>) -> Vec<CacheGroup> {
    let region = TwoFaced::region(2 * BYTES[FULL]);
    groups[STATE - 1].memory =
        EngineMemory::new(region, LAYERS[STATE]).expect("layers of one size");
    groups
}

#[track_caller]
fn assert_came_back_changed<T: std::fmt::Debug>(opened: Result<T, Error>) {
    let error = opened.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("came back changed"), "{error}");
}

#[test]
fn wrong_memory_of_one_group_is_found_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut on_disk = with_checkpoints();
    engine::add_disk(&mut on_disk, 256, dir.path());
    let (groups, full, _) = groups(6);
    assert_came_back_changed(open(on_disk.clone(), Options::default(), full, two_faced(groups)));
    // With the right memory it opens, in the same place.
    let engine = Engine::with(6, on_disk, None);
    let all = chain(1, 18);
    engine.prefill(&all, 4);
    engine.assert_loads(&all, 18);
    engine.assert_well();
}

#[test]
fn a_rank_with_a_bad_group_is_refused_leaders_wait() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().to_owned();
    let leading = std::thread::spawn(move || lead(&place));
    let one = join(dir.path(), 0, 6);
    let (groups, full, _) = groups(6);
    let options = rank_options(dir.path(), 1);
    let options = RankOptions { engine: Some(full), groups: two_faced(groups), ..options };
    let bad = Rank::join(&with_checkpoints(), options);
    assert_came_back_changed(bad);
    assert!(!leading.is_finished(), "a rank is missing");
    let (ranks, memory): (Vec<_>, Vec<_>) = [one, join(dir.path(), 1, 6)]
        .map(|joining| joining.join().expect("it joins"))
        .into_iter()
        .unzip();
    let (manager, registry) = leading.join().expect("it opens");
    let engine = Engine { manager, memory, window: 6, registry, _disk: None };
    let all = chain(1, 18);
    engine.heal(&all);
    engine.assert_loads(&all, 18);
    engine.assert_well();
    drop(engine);
    ranks.iter().for_each(|rank| rank.wait().expect("the leader said goodbye"));
}

#[test]
fn bad_input_is_named() {
    let engine = Engine::new(6);
    let all = chain(1, 8);
    let named = |error: Error, words: &str| {
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(words), "{error}");
    };
    let slots: Vec<_> = (0..8).map(SlotId).collect();
    let given = |group, first, blocks: usize| GroupSlots { group, first, slots: &slots[..blocks] };
    let save = |slots: &[GroupSlots<'_>]| {
        let info = RequestInfo::default();
        let save =
            SaveRequest { info, chain: (&all).into(), slots, is_end: true, ready: Fence::Done };
        engine.manager.save_from(&save).wait().unwrap_err()
    };
    named(save(&[given(1, 0, 8)]), "group 0 as well");
    named(save(&[given(0, 0, 8), given(1, 4, 5)]), "group 1 go on to position 9, of 8");
    named(save(&[given(0, 0, 8), given(1, usize::MAX, 5)]), "of 8");
    named(save(&[given(0, 0, 8), given(3, 0, 8)]), "no cache group 3: there are 2");
    named(save(&[given(0, 0, 8), given(1, 0, 8), given(1, 0, 8)]), "named twice");
    let beyond = [SlotId(SLOTS)];
    named(
        save(&[given(0, 0, 8), GroupSlots { group: 2, first: 7, slots: &beyond }]),
        "not among the engine's",
    );
    engine.prefill(&all, 4);
    let load = |slots: &[GroupSlots<'_>]| {
        engine.manager.load_into(engine.lease(&all), slots, &Fence::Done).wait().unwrap_err()
    };
    named(load(&[given(0, 0, 8), given(1, 2, 6)]), "name the slots of cache group 2");
    named(
        load(&[given(0, 0, 8), given(1, 1, 7), given(2, 7, 1)]),
        "positions 1 to 8 of cache group 1",
    );
    named(load(&[given(0, 0, 7), given(1, 2, 6), given(2, 7, 1)]), "the lease has 0 to 8");
    let in_layers = engine.manager.load_in_ranks(engine.lease(&all), &[given(0, 0, 8)]);
    named(in_layers.unwrap_err(), "awaited as a whole");
    engine.assert_loads(&all, 8);
    let refused = |change: fn(&mut Vec<CacheGroup>), words: &str| {
        let (mut groups, full, _) = groups(6);
        change(&mut groups);
        named(open(with_checkpoints(), Options::default(), full, groups).unwrap_err(), words);
    };
    refused(|groups| groups[1].name = "sliding".into(), "each name once");
    refused(|groups| groups[1].name = "full".into(), "not full");
    refused(|groups| groups[1].name = "a b".into(), "letters, digits");
    refused(|groups| groups[0].kind = GroupKind::Window { blocks: 0 }, "has no block");
    refused(|groups| groups[0].share = Some(0.7), "leave some to full attention");
    refused(|groups| groups[0].share = Some(-0.1), "above 0");
    let in_ranks =
        |groups: &mut Vec<CacheGroup>| groups[0].memory = EngineMemory::in_ranks(4, 1).unwrap();
    refused(in_ranks, "group_in_ranks");
}

/// The median time of a match and its end, in a chain of 8,192 blocks whose checkpoints are those
/// of `given`.
fn time_of_a_match(given: &[Range<usize>]) -> (usize, Duration) {
    let tiny = || Tensors::new(8_192, 64, 1).shared().0;
    let memory = || EngineMemory::new(tiny(), 1).expect("one layer");
    let group = |name: &str, kind| CacheGroup {
        name: name.to_owned(),
        kind,
        memory: memory(),
        share: Some(0.3),
    };
    let groups =
        vec![group("sliding", GroupKind::Window { blocks: 64 }), group("state", GroupKind::State)];
    let mut settings = Settings { block_bytes: Some(64), ..with_checkpoints() };
    settings.host.capacity = Some(Capacity::Blocks(16_384));
    settings.hybrid.checkpoint_blocks = 16;
    settings.transfer.queue_blocks = 1 << 14;
    let manager = open(settings, Options::default(), memory(), groups).expect("it opens");
    let all: Vec<_> = (1..=8_192).map(hash).collect();
    let slots: Vec<_> = (0..8_192).map(SlotId).collect();
    let info = RequestInfo::default();
    for given in given {
        let of_group = |group, range: &Range<usize>| GroupSlots {
            group,
            first: range.start,
            slots: &slots[range.clone()],
        };
        let slots = [
            of_group(0, &(0..8_192)),
            of_group(1, given),
            of_group(2, &(given.end - 1..given.end)),
        ];
        let save = SaveRequest {
            info,
            chain: (&all).into(),
            slots: &slots,
            is_end: true,
            ready: Fence::Done,
        };
        assert_eq!(manager.save_from(&save).wait().expect("it is open").blocks, 8_192);
    }
    let mut blocks = 0;
    let times = (0..100).map(|_| {
        let start = Instant::now();
        blocks = manager.lease_for(info, &all).usable();
        start.elapsed()
    });
    let mut times: Vec<_> = times.collect();
    times.sort_unstable();
    (blocks, times[times.len() / 2])
}

#[test]
fn a_match_looks_at_few_places_of_a_long_chain() {
    let (at_the_end, near, far) = (8_000..8_192, 7_890..8_000, 0..64);
    for (given, found) in [(at_the_end, 8_192), (near, 8_000), (far, 64)] {
        let (blocks, time) = time_of_a_match(std::slice::from_ref(&given));
        eprintln!("a match of {blocks} of 8,192 blocks: {time:?}");
        assert_eq!(blocks, found);
        // Some 100 µs for the last one; a look at each block, in an unoptimised build, would still
        // pass.
        assert!(time < Duration::from_millis(20), "{time:?}");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Save { chain: u32, first: usize, blocks: usize, is_end: bool },
    Load { chain: u32, blocks: usize },
    Evict { group: u8, tier: Tier, blocks: usize },
    Drain,
    Reset,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tier = prop_oneof![Just(Tier::Host), Just(Tier::Disk)];
    let step = prop_oneof![
        6 => (0..3_u32, 0..24_usize, 1..12_usize, any::<bool>())
            .prop_map(|(chain, first, blocks, is_end)| Step::Save { chain, first, blocks, is_end }),
        4 => (0..3_u32, 1..40_usize).prop_map(|(chain, blocks)| Step::Load { chain, blocks }),
        1 => (0..3_u8, tier, 1..40_usize).prop_map(|(group, tier, blocks)| Step::Evict { group, tier, blocks }),
        1 => Just(Step::Drain),
        1 => Just(Step::Reset),
    ];
    proptest::collection::vec(step, 1..40)
}

/// Chains share their first ten blocks.
fn forked(n: u32) -> Vec<BlockHash> {
    (0..36).map(|i| if i < 10 { hash(i + 1) } else { hash(1_000 * (n + 1) + i) }).collect()
}

/// Says, block by block, what must be there.
#[derive(Default)]
struct Reference {
    full: HashSet<BlockHash>,
    /// By group and block: positions that its checkpoint has.
    checkpoints: HashMap<(usize, BlockHash), Range<usize>>,
    /// Checkpoints whose block is not there go, but not before they are flushed: if the block comes
    /// until then, they are there already. So there may be more than must be.
    keeps_orphans: bool,
}

impl Reference {
    fn save(&mut self, engine: &Engine, chain: &[BlockHash], chunk: &Range<usize>, is_end: bool) {
        let is_orphan = chunk.start > 0 && !self.full.contains(&chain[chunk.start - 1]);
        if is_orphan && !self.keeps_orphans {
            return;
        }
        if !is_orphan {
            self.full.extend(&chain[chunk.clone()]);
        }
        let there = engine.there(chunk);
        for (group, window) in [(WINDOW, engine.window), (STATE, 1)] {
            for at in 1..=chunk.end {
                let is_place = at % EVERY == 0 || (is_end && at == chunk.end);
                let start = (at.saturating_sub(window)).max((at - 1) / EVERY * EVERY);
                if is_place && start >= there[group].start {
                    self.checkpoints.insert((group, chain[at - 1]), start..at);
                }
            }
        }
    }

    /// Every block of each group's window lies in a checkpoint of the grid, or in the one at the
    /// end.
    fn matches(&self, engine: &Engine, chain: &[BlockHash]) -> usize {
        let is_kept = |group, end: usize, block: usize| {
            let places = (block + 1..=end).filter(|&at| at == end || at % EVERY == 0);
            let mut kept = places.filter_map(|at| self.checkpoints.get(&(group, chain[at - 1])));
            kept.any(|kept| kept.contains(&block))
        };
        let is_whole = |end: usize| {
            let windows = [(WINDOW, engine.window), (STATE, 1)];
            windows.into_iter().all(|(group, window)| {
                (end.saturating_sub(window)..end).all(|block| is_kept(group, end, block))
            })
        };
        let held = chain.iter().take_while(|&hash| self.full.contains(hash)).count();
        (0..=held).rev().find(|&end| is_whole(end)).unwrap_or(0)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn a_match_agrees_with_a_reference_and_brings_right_bytes(steps in steps(), window in 1..10_usize) {
        let engine = Engine::on_disk(window, None);
        let all_orphans = || Reference { keeps_orphans: true, ..Reference::default() };
        let (mut least, mut most, mut is_whole) = (Reference::default(), all_orphans(), true);
        for step in steps {
            match step {
                Step::Save { chain, first, blocks, is_end } => {
                    let all = forked(chain);
                    let chunk = first..first + blocks;
                    drop(engine.save(&all, chunk.clone(), is_end));
                    least.save(&engine, &all, &chunk, is_end);
                    most.save(&engine, &all, &chunk, is_end);
                }
                Step::Load { chain, blocks } => {
                    let all = &forked(chain)[..blocks.min(36)];
                    let lease = engine.lease(all);
                    // What was evicted is missing.
                    let least = if is_whole { least.matches(&engine, all) } else { 0 };
                    let (blocks, most) = (lease.usable(), most.matches(&engine, all));
                    prop_assert!((least..=most).contains(&blocks), "{blocks} where {least} to {most} must be");
                    prop_assert!(engine.load(lease).is_whole);
                    engine.assert_loaded(all, blocks);
                }
                Step::Evict { group, tier, blocks } => {
                    is_whole &= engine.manager.admin().evict_of(group, tier, blocks) == 0;
                }
                Step::Drain => prop_assert!(engine.manager.drain(SOON).is_complete()),
                Step::Reset => {
                    engine.manager.reset(engine.manager.admin().epoch() + 1).unwrap();
                    (least, most, is_whole) = (Reference::default(), all_orphans(), true);
                }
            }
            prop_assert_eq!(engine.manager.admin().audit(), []);
        }
        engine.assert_well();
    }
}
