//! An engine on four ranks, each with its slice of a paged KV cache in a process of its own, and one manager that brings
//! blocks down from them and back: in good times and in all the bad ones together.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use kvbm::{
    BlockHash, Chain, EngineMemory, ErrorKind, Fence, HostFence, Lease, Loaded, Manager, Options, Rank,
    RankGroup, RankOptions, RequestInfo, Saved, SlotId, Tier, Transfer,
};
use kvbm_settings::{Capacity, Settings};
use kvbm_tests::process::{Process, role, say};
use kvbm_tests::rig::hash;
use kvbm_tiers::testing::{Tensors, fill_pattern, has_pattern};

const WORLD: u16 = 4;
const BLOCK: usize = 8192;
const LAYERS: u16 = 8;
const SLOTS: u32 = 96;
const LIMIT: Duration = Duration::from_secs(30);

fn settings(dir: &Path) -> Settings {
    let mut settings = Settings { block_bytes: Some(BLOCK as u64), ..Settings::default() };
    settings.host.capacity = Some(Capacity::Blocks(64));
    settings.host.huge_pages = false;
    settings.host.staging_blocks = 8;
    settings.disk.capacity = Some(Capacity::Blocks(128));
    settings.disk.dirs = vec![dir.to_owned()];
    settings.transfer.timeout_ms = 500;
    settings.flush.interval_ms = 1;
    settings
}

fn group(dir: &Path) -> RankGroup {
    RankGroup { dir: dir.join("meet"), world: WORLD, limit: LIMIT }
}

/// What the engine computes in a rank for a block, under weights that were exchanged so many times.
fn pattern(rank: u16, weights: u64, hash: BlockHash) -> usize {
    let block = kvbm_tests::rig::number(Chain::from([hash].as_slice()).key(0));
    usize::from(rank) << 40 | (weights as usize) << 32 | block
}

/// Not a test: the process of a rank, when another test starts it.
#[test]
fn process() {
    let Some((role, place)) = role() else { return };
    let rank = role.parse().expect("a rank's number");
    let (region, tensors) = Tensors::new(SLOTS, BLOCK, 2 * usize::from(LAYERS)).shared();
    let memory = EngineMemory::new(region, LAYERS).unwrap();
    let options = RankOptions { group: group(&place), rank, fingerprint: None, chaos: None };
    let _joined = Rank::join_with(&settings(&place), options, &memory).unwrap();
    say("joined");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        let (slot, number) = (SlotId(words[1].parse().unwrap()), words[2].parse().unwrap());
        if words[0] == "compute" {
            let mut block = vec![0; BLOCK];
            fill_pattern(number, &mut block);
            tensors.write(slot, &block);
            say("true");
        } else {
            say(&has_pattern(number, &tensors.read(slot)).to_string());
        }
    }
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
        let mut ranks: Vec<_> =
            (0..WORLD).map(|rank| Process::start(&rank.to_string(), dir.path())).collect();
        let options = Options { ranks: Some(group(dir.path())), ..Options::default() };
        let memory = EngineMemory::in_ranks(SLOTS, LAYERS).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let manager = runtime.block_on(Manager::open_with(settings(dir.path()), options, memory)).unwrap();
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
        let mut free: Vec<_> = (0..SLOTS).map(SlotId).collect();
        fastrand::Rng::with_seed(7).shuffle(&mut free);
        Self { manager, ranks: ranks.into_iter().map(Some).collect(), weights: 0, free, dir }
    }

    /// How many of the ranks that are there do not say yes to this of a slot and a block.
    fn ask(&mut self, what: &str, slot: SlotId, block: BlockHash) -> usize {
        let weights = self.weights;
        let ranks = (0..).zip(&mut self.ranks).filter_map(|(number, rank)| Some((number, rank.as_mut()?)));
        ranks
            .filter_map(|(number, rank)| {
                let number = pattern(number, weights, block);
                (rank.ask(&format!("{what} {} {number}", slot.0)) != "true").then_some(())
            })
            .count()
    }

    fn take(&mut self, slots: usize) -> Vec<SlotId> {
        self.free.split_off(self.free.len() - slots)
    }

    fn give_back(&mut self, slots: Vec<SlotId>) {
        // Those given back last are not the first to be taken again.
        self.free.splice(0..0, slots);
    }

    fn compute(&mut self, n: u32, blocks: u32) -> Prompt {
        let chain: Vec<_> = (0..blocks).map(|i| hash(1_000 * n + i + 1)).collect();
        let slots = self.take(chain.len());
        for (&hash, &slot) in chain.iter().zip(&slots) {
            assert_eq!(self.ask("compute", slot, hash), 0);
        }
        Prompt { chain, slots }
    }

    /// Saves a prompt as its prefill goes on, chunk by chunk.
    fn save(&self, prompt: &Prompt, chunk: usize, ready: &Fence) -> Vec<Transfer<Saved>> {
        let firsts = (0..prompt.chain.len()).step_by(chunk);
        let save = |first: usize| {
            let end = prompt.chain.len().min(first + chunk);
            let (chain, slots) = (&prompt.chain[..end], &prompt.slots[first..end]);
            self.manager.save_from(RequestInfo::default(), chain, first, slots, ready.clone())
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

    /// Loads what is there of a prompt, and checks every byte of it in every rank. Returns how many blocks arrived.
    fn load(&mut self, prompt: &Prompt) -> usize {
        let lease = self.manager.lease(&prompt.chain);
        let slots = self.take(prompt.chain.len());
        let mut load = self.manager.load_into(lease, 0..slots.len(), &slots, Fence::Done);
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
        let (began, all) = (Instant::now(), prompt.chain.len());
        loop {
            let _ = self.manager.drain(LIMIT);
            self.manager.evict(Tier::Host, 64);
            let is_on_disk = self.manager.matches(&prompt.chain).blocks(Tier::Disk) == all;
            if is_on_disk && self.load(prompt) == all {
                return;
            }
            assert!(began.elapsed() < LIMIT, "a prompt does not come back from disk");
            self.save_all(prompt);
        }
    }

    /// Every slot is back, and the books are right.
    fn assert_well(&self) {
        let began = Instant::now();
        let is_back = |tier| {
            let counts = self.manager.counts(tier);
            counts.filling == 0 && counts.lost == 0 && counts.free + counts.resident == counts.total
        };
        while !(self.manager.drain(LIMIT).is_complete() && [Tier::Host, Tier::Disk].into_iter().all(is_back))
        {
            assert!(began.elapsed() < LIMIT, "slots do not come back: {:?}", self.manager.counts(Tier::Host));
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!((self.manager.audit(), self.manager.overdue()), (Vec::new(), 0));
    }
}

/// Nothing may hang.
fn end<T: Unpin>(mut transfer: Transfer<T>) -> T {
    transfer.wait_for(LIMIT).expect("it ends").unwrap()
}

#[test]
fn an_engine_on_four_ranks_in_good_times_and_bad() {
    let mut engine = Engine::start();
    let one = engine.compute(1, 14);
    engine.save_all(&one);
    assert_eq!(engine.load(&one), 14);
    engine.assert_comes_from_disk(&one);

    // Behind a gap nothing is kept; what was cancelled while it waited for the engine is neither.
    let two = engine.compute(2, 10);
    let behind =
        engine.manager.save_from(RequestInfo::default(), &two.chain, 4, &two.slots[4..], Fence::Done);
    assert_eq!(end(behind).orphans, 6);
    let fence = HostFence::new();
    let mut held = engine.save(&two, 5, &Fence::Host(fence.clone()));
    held.iter_mut().for_each(Transfer::cancel);
    held.into_iter().for_each(|save| assert_eq!(end(save).copied, 0));
    fence.raise();
    engine.assert_heals(&two);

    // A rank dies while it copies: what it held is gone, and nobody waits for ever.
    let three = engine.compute(3, 12);
    for round in 0..2 {
        engine.save_all(&three);
        let into = engine.take(24);
        let load = |prompt: &Prompt, slots: &[SlotId]| {
            let lease: Lease = engine.manager.lease(&prompt.chain);
            engine.manager.load_into(lease, 0..slots.len(), slots, Fence::Done)
        };
        let loads = [load(&three, &into[..12]), load(&one, &into[12..])];
        let saves = engine.save(&two, 3, &Fence::Done);
        engine.ranks[2].take().expect("it is there").kill();
        for loaded in loads.map(end) {
            assert!(loaded.writers.wait(LIMIT), "round {round}");
        }
        saves.into_iter().for_each(|save| drop(end(save)));
        let began = Instant::now();
        while engine.manager.matches(&three.chain).longest() > 0 {
            assert!(began.elapsed() < LIMIT, "what a dead rank held is still believed to be there");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut rank = Process::start("2", engine.dir.path());
        assert_eq!(rank.hear(), "joined");
        engine.ranks[2] = Some(rank);
        engine.give_back(into);
        // Its memory is new: the engine computes again what was there.
        for prompt in [&one, &two, &three] {
            for (&hash, &slot) in prompt.chain.iter().zip(&prompt.slots) {
                assert_eq!(engine.ask("compute", slot, hash), 0);
            }
        }
        engine.assert_heals(&three);
    }

    // New weights while blocks are on their way: nothing of the old ones is ever seen again.
    engine.save_all(&two);
    let into = engine.take(10);
    let (fence, lease) = (HostFence::new(), engine.manager.lease(&two.chain));
    let stale = engine.manager.lease(&two.chain);
    let load = engine.manager.load_into(lease, 0..10, &into, Fence::Host(fence.clone()));
    let under_way = engine.save(&one, 5, &Fence::Host(fence.clone()));
    engine.manager.reset(engine.manager.epoch() + 1).unwrap();
    fence.raise();
    let Loaded { arrived, writers, .. } = end(load);
    assert_eq!(arrived, 0);
    assert!(writers.wait(LIMIT));
    under_way.into_iter().for_each(|save| assert_eq!(end(save).lease.held().longest(), 0));
    let refused = engine.manager.load_into(stale, 0..10, &into, Fence::Done);
    assert_eq!(refused.wait().unwrap_err().kind(), ErrorKind::Stale);
    engine.give_back(into);
    assert_eq!(engine.load(&two), 0);
    engine.weights += 1;
    let old: HashMap<_, _> = [(1, one), (2, two), (3, three)].into();
    for (n, prompt) in old {
        let blocks = prompt.chain.len() as u32;
        engine.give_back(prompt.slots);
        let again = engine.compute(n, blocks);
        engine.assert_heals(&again);
    }
}
