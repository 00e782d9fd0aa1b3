//! An engine on four ranks, each with its slice of a paged KV cache in a process of its own, and
//! one manager that brings blocks down from them and back: in good times and in all the bad ones
//! together.

use std::path::Path;
use std::time::{Duration, Instant};

use kvbm::{
    BlockHash, EngineMemory, ErrorKind, Fence, HostFence, Loaded, Manager, Options, Rank,
    RankOptions, Saved, SlotId, Tier, Transfer,
};
use kvbm_settings::{Capacity, Settings};
use kvbm_tests::engine;
use kvbm_tests::fleet::group;
use kvbm_tests::process::{Process, role, say};
use kvbm_tests::rig::{chain, chaos, hash, number_of};
use kvbm_tests::slots::{load_slots, save_slots};
use kvbm_tiers::chaos::Chaos;
use kvbm_tiers::testing::{TensorView, Tensors, fill_pattern, has_pattern};

const WORLD: u16 = 4;
const BLOCK: usize = 8192;
const LAYERS: u16 = 8;
const SLOTS: u32 = 96;
const LIMIT: Duration = Duration::from_mins(1);

fn of_rank(dir: &Path) -> Settings {
    let mut settings = engine::without_device(BLOCK as u64, 64);
    settings.host.staging_blocks = 8;
    engine::add_disk(&mut settings, 128, dir);
    settings.transfer.timeout_ms = 500;
    // Little at a time is under way, so that something waits in queues.
    settings.transfer.max_concurrent = 1;
    settings.transfer.max_batch = 4;
    settings.flush.interval_ms = 1;
    settings
}

/// What goes wrong in a rank from when it is told to break until it is told to heal.
const fn faults(rank: u16) -> &'static str {
    match rank {
        0 => "disk.read:hang@0s+2s x1",
        1 => "disk.read:corrupt@0s+1h x1",
        2 => "memory:hang@0s+1h",
        _ => "memory.write:eio@0s+1h x2",
    }
}

/// What the engine computes in a rank for a block, under weights of this number.
fn pattern(rank: u16, weights: u64, hash: BlockHash) -> usize {
    usize::from(rank) << 40 | (weights as usize) << 32 | number_of(hash)
}

/// Not a test: the process of a rank, when another test starts it.
#[test]
fn process() {
    let Some((role, place)) = role() else { return };
    let rank = role.parse().expect("a rank's number");
    let (region, tensors) = Tensors::new(SLOTS, BLOCK, 2 * usize::from(LAYERS)).shared();
    let memory = EngineMemory::new(region, LAYERS).unwrap();
    let chaos = chaos(&[faults(rank)]);
    let options =
        RankOptions { media_layer: Some(chaos.layer()), ..RankOptions::new(group(&place), rank) };
    let _joined =
        Rank::join(&of_rank(&place), RankOptions { engine: Some(memory), ..options }).unwrap();
    say("joined");
    for line in std::io::stdin().lines() {
        say(&obey(&line.unwrap(), &tensors, &chaos).to_string());
    }
}

/// What a rank is told: `compute SLOT NUMBER`, `check SLOT NUMBER`, `break` or `heal`.
fn obey(line: &str, tensors: &TensorView, chaos: &Chaos) -> bool {
    let words: Vec<_> = line.split(' ').collect();
    let place = || (SlotId(words[1].parse().unwrap()), words[2].parse().unwrap());
    match words[0] {
        "compute" => {
            let ((slot, number), mut block) = (place(), vec![0; BLOCK]);
            fill_pattern(number, &mut block);
            tensors.write(slot, &block);
        }
        "check" => {
            let (slot, number) = place();
            return has_pattern(number, &tensors.read(slot));
        }
        "break" => chaos.start(),
        _ => chaos.heal(),
    }
    true
}

struct Engine {
    manager: Manager,
    /// `None` while it is dead.
    ranks: Vec<Option<Process>>,
    weights: u64,
    /// Slots that nothing uses, in no order.
    free: Vec<SlotId>,
    dir: tempfile::TempDir,
}

/// A prompt that was computed, and where.
struct Prompt {
    chain: Vec<BlockHash>,
    slots: Vec<SlotId>,
}

impl Engine {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut ranks: Vec<_> = (0..WORLD)
            .map(|rank| Process::start(module_path!(), &rank.to_string(), dir.path()))
            .collect();
        let options = Options { ranks: Some(group(dir.path())), ..Options::default() };
        let memory = EngineMemory::in_ranks(SLOTS, LAYERS).unwrap();
        let manager = engine::block_on(Manager::open(
            of_rank(dir.path()),
            Options { engine: Some(memory), ..options },
        ))
        .unwrap();
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
        let mut free: Vec<_> = (0..SLOTS).map(SlotId).collect();
        fastrand::Rng::with_seed(7).shuffle(&mut free);
        Self { manager, ranks: ranks.into_iter().map(Some).collect(), weights: 0, free, dir }
    }

    /// How many of the ranks that are there do not say yes to this of a slot and a block.
    fn ask(&mut self, what: &str, slot: SlotId, block: BlockHash) -> usize {
        let weights = self.weights;
        let ranks =
            (0..).zip(&mut self.ranks).filter_map(|(number, rank)| Some((number, rank.as_mut()?)));
        ranks
            .filter_map(|(number, rank)| {
                let number = pattern(number, weights, block);
                (rank.ask(&format!("{what} {} {number}", slot.0)) != "true").then_some(())
            })
            .count()
    }

    /// Has the media of a rank break or heal.
    fn tell(&mut self, rank: usize, what: &str) {
        assert_eq!(self.ranks[rank].as_mut().expect("it is there").ask(what), "true");
    }

    fn take(&mut self, slots: usize) -> Vec<SlotId> {
        self.free.split_off(self.free.len() - slots)
    }

    fn give_back(&mut self, slots: Vec<SlotId>) {
        // Those given back last are not the first to be taken again.
        self.free.splice(0..0, slots);
    }

    fn compute(&mut self, n: u32, blocks: u32) -> Prompt {
        let chain = chain(n, blocks);
        let slots = self.take(chain.len());
        let prompt = Prompt { chain, slots };
        self.compute_again(&prompt);
        prompt
    }

    fn compute_again(&mut self, prompt: &Prompt) {
        for (&hash, &slot) in prompt.chain.iter().zip(&prompt.slots) {
            assert_eq!(self.ask("compute", slot, hash), 0);
        }
    }

    /// Saves a prompt as its prefill goes on, chunk by chunk.
    fn save(&self, prompt: &Prompt, chunk: usize, ready: &Fence) -> Vec<Transfer<Saved>> {
        let firsts = (0..prompt.chain.len()).step_by(chunk);
        let save = |first: usize| {
            let end = prompt.chain.len().min(first + chunk);
            let (chain, slots) = (&prompt.chain[..end], &prompt.slots[first..end]);
            save_slots(&self.manager, chain, first, slots, ready.clone())
        };
        firsts.map(save).collect()
    }

    /// Saves a prompt, again and again while media are tried, until all of it is there.
    fn save_all(&self, prompt: &Prompt) {
        let began = Instant::now();
        loop {
            let saves = self.save(prompt, 4, &Fence::Done).into_iter().map(end);
            if saves.last().is_some_and(|saved| saved.blocks == prompt.chain.len()) {
                return;
            }
            assert!(began.elapsed() < LIMIT, "a save does not heal");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn begin_load(&self, prompt: &Prompt, slots: &[SlotId], after: &Fence) -> Transfer<Loaded> {
        load_slots(&self.manager, self.manager.lease(&prompt.chain), 0, slots, after)
    }

    /// Loads what is there of a prompt, and checks every byte of it in every rank. Returns how many
    /// blocks arrived.
    fn load(&mut self, prompt: &Prompt) -> usize {
        let slots = self.take(prompt.chain.len());
        let mut load = self.begin_load(prompt, &slots, &Fence::Done);
        let (all, loaded) =
            (load.wait_layers(LAYERS, LIMIT), load.wait_for(LIMIT).expect("it ends").unwrap());
        assert_eq!(all, loaded.arrived == prompt.chain.len());
        assert!(loaded.writers.wait(LIMIT));
        let arrived = loaded.arrived;
        drop(loaded);
        for (&hash, &slot) in prompt.chain[..arrived].iter().zip(&slots) {
            assert_eq!(self.ask("check", slot, hash), 0, "ranks have a wrong byte in {slot:?}");
        }
        self.give_back(slots);
        arrived
    }

    /// What the engine computed in slots into which nothing was loaded is there still. Gives them
    /// back.
    fn assert_untouched(&mut self, prompt: Prompt) {
        for (&hash, &slot) in prompt.chain.iter().zip(&prompt.slots) {
            assert_eq!(self.ask("check", slot, hash), 0, "somebody wrote {slot:?}");
        }
        self.give_back(prompt.slots);
    }

    /// Everything goes on as if nothing had been, once the media's breakers have found that out.
    fn assert_heals(&mut self, prompt: &Prompt) {
        self.save_all(prompt);
        let began = Instant::now();
        while self.load(prompt) < prompt.chain.len() {
            assert!(began.elapsed() < LIMIT, "a load does not heal");
            self.save_all(prompt);
        }
        self.assert_comes_from_disk(prompt);
        self.assert_well();
    }

    fn assert_comes_from_disk(&mut self, prompt: &Prompt) {
        let began = Instant::now();
        loop {
            self.sink(prompt);
            if self.load(prompt) == prompt.chain.len() {
                return;
            }
            assert!(began.elapsed() < LIMIT, "a prompt does not come back from disk");
        }
    }

    /// Has all of a prompt on disk, and nothing above.
    fn sink(&self, prompt: &Prompt) {
        let began = Instant::now();
        loop {
            let _ = self.manager.drain(LIMIT);
            self.manager.admin().evict(Tier::Host, 64);
            let held = self.manager.matches(&prompt.chain);
            if held.blocks(Tier::Disk) == prompt.chain.len() && held.blocks(Tier::Host) == 0 {
                return;
            }
            assert!(began.elapsed() < LIMIT, "a prompt does not go to disk");
            self.save_all(prompt);
        }
    }

    /// Every slot is back, and the books are right.
    fn assert_well(&self) {
        let began = Instant::now();
        let is_back = |tier| {
            let counts = self.manager.admin().counts(tier);
            counts.filling == 0 && counts.lost == 0 && counts.free + counts.resident == counts.total
        };
        while !(self.manager.drain(LIMIT).is_complete()
            && [Tier::Host, Tier::Disk].into_iter().all(is_back))
        {
            assert!(
                began.elapsed() < LIMIT,
                "slots do not come back: {:?}",
                self.manager.admin().counts(Tier::Host)
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!((self.manager.admin().audit(), self.manager.admin().overdue()), (Vec::new(), 0));
    }
}

/// Nothing may hang.
fn end<T: Unpin>(mut transfer: Transfer<T>) -> T {
    transfer.wait_for(LIMIT).expect("it ends").unwrap()
}

#[test]
fn an_engine_on_four_ranks_in_good_times_and_bad() {
    let mut engine = Engine::start();
    let [one, two, three] =
        [(1, 14), (2, 10), (3, 12)].map(|(n, blocks)| engine.compute(n, blocks));
    engine.save_all(&one);
    assert_eq!(engine.load(&one), 14);
    engine.assert_comes_from_disk(&one);
    what_comes_behind_a_gap_is_not_kept(&mut engine, &two);
    what_waits_for_the_engine_can_be_cancelled(&mut engine, &two);
    what_waits_in_a_queue_can_be_cancelled(&mut engine, [&one, &two]);
    media_of_single_ranks_fail(&mut engine, &three);
    for hangs in [true, false] {
        a_rank_dies_while_it_copies(&mut engine, [&one, &two, &three], hangs);
    }
    weights_change_while_blocks_are_on_their_way(&mut engine, [one, two, three]);
}

fn what_comes_behind_a_gap_is_not_kept(engine: &mut Engine, prompt: &Prompt) {
    let Prompt { chain, slots } = prompt;
    let behind = save_slots(&engine.manager, chain, 4, &slots[4..], Fence::Done);
    assert_eq!(end(behind).orphans, 6);
}

fn what_waits_for_the_engine_can_be_cancelled(engine: &mut Engine, prompt: &Prompt) {
    let fence = HostFence::new();
    let mut saves = engine.save(prompt, 5, &Fence::Host(fence.clone()));
    saves.iter_mut().for_each(Transfer::cancel);
    saves.into_iter().for_each(|save| assert_eq!(end(save).copied, 0));
    engine.assert_heals(prompt);
    let old = engine.compute(9, prompt.chain.len() as u32);
    let mut load = engine.begin_load(prompt, &old.slots, &Fence::Host(fence.clone()));
    assert!(load.wait_for(Duration::from_millis(20)).is_none());
    load.cancel();
    let Loaded { arrived, writers, .. } = end(load);
    assert_eq!((arrived, writers.are_gone()), (0, true), "it was not to begin before the fence");
    fence.raise();
    engine.assert_untouched(old);
    engine.assert_heals(prompt);
}

/// A rank that does not go on keeps the only batch of each way busy.
fn what_waits_in_a_queue_can_be_cancelled(engine: &mut Engine, [one, two]: [&Prompt; 2]) {
    [one, two].into_iter().for_each(|prompt| engine.save_all(prompt));
    let [old, new, into] = [engine.compute(8, 10), engine.compute(9, 12), engine.compute(7, 14)];
    engine.ranks[1].as_ref().expect("it is there").stop();
    let under_way = engine.begin_load(one, &into.slots, &Fence::Done);
    let mut queued = engine.begin_load(two, &old.slots, &Fence::Done);
    let mut saves = engine.save(&new, 12, &Fence::Done);
    queued.cancel();
    saves.iter_mut().for_each(Transfer::cancel);
    let Loaded { arrived, writers, .. } = end(queued);
    assert_eq!((arrived, writers.are_gone()), (0, true), "no rank was told of it");
    engine.ranks[1].as_ref().expect("it is there").signal("CONT");
    saves
        .into_iter()
        .for_each(|save| assert!(end(save).copied < 12, "what waited was copied after all"));
    assert!(end(under_way).writers.wait(LIMIT));
    engine.assert_untouched(old);
    engine.give_back(into.slots);
    engine.assert_heals(&new);
    engine.give_back(new.slots);
    engine.assert_heals(two);
}

/// Whatever becomes of the slice of one rank becomes of the block.
fn media_of_single_ranks_fail(engine: &mut Engine, prompt: &Prompt) {
    let all = prompt.chain.len();
    engine.tell(3, "break");
    let saved: Vec<_> = engine.save(prompt, 4, &Fence::Done).into_iter().map(end).collect();
    assert!(saved.iter().any(|saved| saved.failed > 0), "{saved:?}");
    assert!(saved.iter().all(|saved| saved.blocks < all), "{saved:?}");
    drop(saved);
    engine.tell(3, "heal");
    engine.assert_heals(prompt);
    // Bytes that changed, and a medium that hangs for longer than it may.
    for rank in [1, 0] {
        engine.sink(prompt);
        engine.tell(rank, "break");
        assert!(engine.load(prompt) < all, "rank {rank} has no fault");
        engine.tell(rank, "heal");
        engine.assert_heals(prompt);
    }
}

/// What it held is gone, and no caller waits for ever. One that `hangs` has copies when it dies,
/// whenever that is.
fn a_rank_dies_while_it_copies(engine: &mut Engine, prompts: [&Prompt; 3], hangs: bool) {
    let [one, _, three] = prompts;
    [one, three].into_iter().for_each(|prompt| engine.save_all(prompt));
    let (new, into) = (engine.compute(9, 9), engine.take(26));
    if hangs {
        engine.tell(2, "break");
    }
    let loads = [(three, &into[..12]), (one, &into[12..])]
        .map(|(prompt, slots)| engine.begin_load(prompt, slots, &Fence::Done));
    let saves = engine.save(&new, 3, &Fence::Done);
    engine.ranks[2].take().expect("it is there").kill();
    for loaded in loads.map(end) {
        assert!(!hangs || loaded.arrived == 0, "what a dead rank never had: {loaded:?}");
        assert!(loaded.writers.wait(LIMIT));
    }
    saves.into_iter().map(end).for_each(|saved| assert!(!hangs || saved.copied == 0, "{saved:?}"));
    let began = Instant::now();
    while engine.manager.matches(&three.chain).longest() > 0 {
        assert!(began.elapsed() < LIMIT, "what a dead rank held is still believed to be there");
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut rank = Process::start(module_path!(), "2", engine.dir.path());
    assert_eq!(rank.hear(), "joined");
    engine.ranks[2] = Some(rank);
    engine.give_back(into);
    // Its memory is new: the engine computes again what was there.
    prompts.into_iter().chain([&new]).for_each(|prompt| engine.compute_again(prompt));
    [three, &new].into_iter().for_each(|prompt| engine.assert_heals(prompt));
    engine.give_back(new.slots);
}

/// Nothing of the old ones is ever seen again.
fn weights_change_while_blocks_are_on_their_way(engine: &mut Engine, prompts: [Prompt; 3]) {
    let [one, two, _] = &prompts;
    engine.save_all(two);
    let (into, fence) = (engine.take(10), HostFence::new());
    let load = engine.begin_load(two, &into, &Fence::Host(fence.clone()));
    let stale = engine.manager.lease(&two.chain);
    let under_way = engine.save(one, 5, &Fence::Host(fence.clone()));
    engine.manager.reset(engine.manager.admin().epoch() + 1).unwrap();
    fence.raise();
    let Loaded { arrived, writers, .. } = end(load);
    assert_eq!(arrived, 0);
    assert!(writers.wait(LIMIT));
    under_way.into_iter().for_each(|save| assert_eq!(end(save).lease.held().longest(), 0));
    let refused = load_slots(&engine.manager, stale, 0, &into, &Fence::Done);
    assert_eq!(refused.wait().unwrap_err().kind(), ErrorKind::Stale);
    engine.give_back(into);
    assert_eq!(engine.load(two), 0);
    engine.weights += 1;
    for (prompt, n) in prompts.into_iter().zip(1..) {
        let blocks = prompt.chain.len() as u32;
        engine.give_back(prompt.slots);
        let again = engine.compute(n, blocks);
        engine.assert_heals(&again);
    }
}

/// Without ranks the engine need not wait for the end: while the first layer is computed with, the
/// others come.
#[test]
fn the_first_layer_is_there_before_the_load_has_ended() {
    const BLOCK: usize = 1 << 20;
    const LAYERS: u16 = 32;
    let mut settings = Settings { block_bytes: Some(BLOCK as u64), ..Settings::default() };
    settings.host.capacity = Some(Capacity::Blocks(24));
    settings.host.huge_pages = false;
    let (region, tensors) = Tensors::new(48, BLOCK, 2 * usize::from(LAYERS)).shared();
    let memory = EngineMemory::new(region, LAYERS).unwrap();
    let manager = engine::block_on(Manager::open(
        settings,
        Options { engine: Some(memory), ..Options::default() },
    ))
    .unwrap();
    let chain: Vec<_> = (1..=24).map(hash).collect();
    let slots: Vec<_> = (0..48).map(SlotId).collect();
    let mut block = vec![0; BLOCK];
    for (number, &slot) in slots[..24].iter().enumerate() {
        fill_pattern(number, &mut block);
        tensors.write(slot, &block);
    }
    drop(end(save_slots(&manager, &chain, 0, &slots[..24], Fence::Done)));
    // Another thread may take the processor from this one for as long as the load takes.
    let is_early = (0..20).any(|_| {
        let mut load = load_slots(&manager, manager.lease(&chain), 0, &slots[24..], &Fence::Done);
        assert!(load.wait_layers(1, LIMIT));
        let is_early = load.layers_arrived() < LAYERS && load.try_take().is_none();
        assert!(load.wait_layers(LAYERS, LIMIT));
        is_early
    });
    assert!(is_early, "no layer is there before all are");
    assert!(
        slots[24..]
            .iter()
            .enumerate()
            .all(|(number, &slot)| has_pattern(number, &tensors.read(slot)))
    );
    assert!(manager.drain(LIMIT).is_complete());
    assert_eq!(manager.admin().audit(), []);
}
