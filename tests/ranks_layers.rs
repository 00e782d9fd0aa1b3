//! A load that an engine awaits layer by layer in each rank: in processes of their own, of which
//! one hangs, fails or is killed amid it, or their leader is.

use std::path::Path;
use std::time::{Duration, Instant};

use kvbm::{
    BlockHash, EngineMemory, ErrorKind, Fence, GroupSlots, Loaded, Manager, Options, Rank,
    RankGroup, RankLoad, RankOptions, SliceLoad, SlotId, Transfer,
};
use kvbm_settings::Settings;
use kvbm_tests::engine;
use kvbm_tests::fleet::{LIMIT, pattern};
use kvbm_tests::process::{Process, role, say};
use kvbm_tests::rig::{chain, chaos, number_of, wait_until};
use kvbm_tests::slots::{load_slots, save_slots};
use kvbm_tiers::layers::bytes_of_layer;
use kvbm_tiers::testing::{TensorView, Tensors, fill_pattern};
use tempfile::TempDir;

const WORLD: u16 = 2;
const BLOCK: usize = 32 << 10;
const LAYERS: u16 = 8;
const BLOCKS: u32 = 12;
const SLOTS: u32 = 48;
/// The engines' slots that a chain is computed in, and those that it is loaded into.
const COMPUTED: u32 = 0;
const LOADED: u32 = 24;
/// Of a copy.
const TIMEOUT: Duration = Duration::from_millis(300);

fn group(dir: &Path) -> RankGroup {
    RankGroup { dir: dir.join("meet"), world: WORLD, limit: LIMIT }
}

fn settings(timeout: Duration) -> Settings {
    let mut settings = engine::without_device(BLOCK as u64, 64);
    settings.transfer.timeout_ms = timeout.as_millis() as u64;
    settings
}

fn slots(first: u32) -> Vec<SlotId> {
    (first..first + BLOCKS).map(SlotId).collect()
}

/// Not a test: the process of a rank, or of a leader that is to be killed, when another test starts
/// it.
#[test]
fn process() {
    let Some((role, place)) = role() else { return };
    match role.parse() {
        Ok(rank) => be_a_rank(&place, rank),
        Err(_) => be_a_leader(&place),
    }
}

/// The memory of a rank's engine.
struct Slices {
    rank: u16,
    view: TensorView,
}

impl Slices {
    fn block(&self, hash: BlockHash) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        fill_pattern(pattern(self.rank, number_of(hash)), &mut block);
        block
    }

    fn compute(&self, n: u32) {
        for (hash, slot) in chain(n, BLOCKS).into_iter().zip(slots(COMPUTED)) {
            self.view.write(slot, &self.block(hash));
        }
        let nothing = vec![0; BLOCK];
        slots(LOADED).into_iter().for_each(|slot| self.view.write(slot, &nothing));
    }

    fn has_layer(&self, n: u32, layer: u16) -> bool {
        let bytes = bytes_of_layer(BLOCK, layer, LAYERS.try_into().expect("layers"));
        chain(n, BLOCKS).into_iter().zip(slots(LOADED)).all(|(hash, slot)| {
            self.view.read_part(slot, bytes.clone()) == self.block(hash)[bytes.clone()]
        })
    }
}

/// Plays the engine of a rank, which has one load at a time.
fn be_a_rank(place: &Path, rank: u16) {
    let (region, view) = Tensors::new(SLOTS, BLOCK, 2 * usize::from(LAYERS)).shared();
    let (faults, slices) = (chaos(&["memory.read:eio@0s+1h x1"]), Slices { rank, view });
    let options = RankOptions {
        engine: Some(EngineMemory::new(region, LAYERS).expect("layers of one size")),
        media_layer: Some(faults.layer()),
        ..RankOptions::new(group(place), rank)
    };
    let joined = Rank::join(&settings(LIMIT), options).expect("a leader");
    say("joined");
    let mut load: Option<SliceLoad> = None;
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let (word, number) = line.split_once(' ').unwrap_or((line.as_str(), "0"));
        let number: u64 = number.parse().expect("a number");
        let awaited = || load.as_ref().expect("a load");
        let answer = match word {
            "compute" => {
                slices.compute(number as u32);
                String::new()
            }
            "load" => {
                load = Some(joined.slice_of(named(number)));
                String::new()
            }
            "layers" => awaited().wait_layers(number as u16, LIMIT).to_string(),
            "has" => {
                let (n, layer) = (number / 100, number % 100);
                slices.has_layer(n as u32, layer as u16).to_string()
            }
            "ended" => format!("{:?}", awaited().wait(Duration::ZERO)),
            "end" => format!("{:?}", awaited().wait(LIMIT)),
            "fail" => {
                faults.start();
                String::new()
            }
            _ => format!("{:?}", joined.wait().map_err(|error| error.to_string())),
        };
        say(&answer);
    }
}

fn named(number: u64) -> RankLoad {
    RankLoad { number, layers: LAYERS.try_into().expect("layers"), blocks: BLOCKS }
}

fn lead(place: &Path, timeout: Duration) -> Manager {
    let memory = EngineMemory::in_ranks(SLOTS, LAYERS).expect("layers");
    let (ranks, engine) = (Some(group(place)), Some(memory));
    let options = Options { ranks, engine, ..Options::default() };
    engine::open_with(settings(timeout), options).expect("all ranks")
}

fn save(manager: &Manager, n: u32) -> usize {
    let saved = save_slots(manager, &chain(n, BLOCKS), 0, &slots(COMPUTED), Fence::Done);
    saved.wait().expect("it is open").blocks
}

fn load(manager: &Manager, n: u32) -> (u64, Transfer<Loaded>) {
    let (lease, slots) = (manager.lease(&chain(n, BLOCKS)), slots(LOADED));
    let (load, transfer) =
        manager.load_in_ranks(lease, &[GroupSlots::full(0, &slots)]).expect("it is open");
    assert_eq!(load, named(load.number));
    (load.number, transfer)
}

/// Saves what the ranks have computed, and loads it when it is told so.
fn be_a_leader(place: &Path) {
    let manager = lead(place, LIMIT);
    say("open");
    let mut loads = Vec::new();
    for line in std::io::stdin().lines() {
        say(&match line.expect("a line").as_str() {
            "save" => save(&manager, 1).to_string(),
            _ => {
                let (number, transfer) = load(&manager, 1);
                loads.push(transfer);
                number.to_string()
            }
        });
    }
}

fn start_rank(dir: &Path, rank: u16) -> Process {
    Process::start(module_path!(), &rank.to_string(), dir)
}

fn start_ranks(dir: &Path) -> Vec<Process> {
    (0..WORLD).map(|rank| start_rank(dir, rank)).collect()
}

/// A leader in this process, and its ranks.
struct Fleet {
    dir: TempDir,
    manager: Manager,
    ranks: Vec<Process>,
}

impl Fleet {
    fn open(timeout: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ranks = start_ranks(dir.path());
        Self::over(dir, ranks, timeout)
    }

    fn over(dir: TempDir, mut ranks: Vec<Process>, timeout: Duration) -> Self {
        let manager = lead(dir.path(), timeout);
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
        Self { dir, manager, ranks }
    }

    fn ask(&mut self, command: &str) -> Vec<String> {
        self.ranks.iter_mut().for_each(|rank| rank.tell(command));
        self.ranks.iter_mut().map(Process::hear).collect()
    }

    fn all_say(&mut self, command: &str, answer: &str) -> bool {
        self.ask(command).iter().all(|said| said == answer)
    }

    /// A chain is computed and saved, once all is well enough for that.
    fn keep(&mut self, n: u32) {
        wait_until(LIMIT, "it is not saved", || {
            self.ask(&format!("compute {n}"));
            save(&self.manager, n) == BLOCKS as usize
        });
    }

    /// And then it heals: every rank gets every layer of its slice.
    fn assert_heals(&mut self) {
        let began = Instant::now();
        for n in [2, 3] {
            self.keep(n);
            // After a breaker's pause blocks come one by one.
            while !self.serves(n) {
                assert!(began.elapsed() < LIMIT, "it does not heal");
            }
        }
        assert_eq!(self.manager.admin().audit(), []);
        assert_eq!(self.manager.admin().overdue(), 0);
    }

    fn serves(&mut self, n: u32) -> bool {
        self.ask(&format!("compute {n}"));
        let (number, transfer) = load(&self.manager, n);
        self.ask(&format!("load {number}"));
        let arrived = transfer.wait().unwrap().arrived;
        let is_whole = arrived == BLOCKS as usize;
        for layer in 0..LAYERS {
            let is_there = self.ask(&format!("layers {}", layer + 1));
            let is_right = self.ask(&format!("has {}", 100 * n + u32::from(layer)));
            // What a rank says is there is, whatever became of it in others.
            let is_told = |(there, right): (&String, &String)| there != "true" || right == "true";
            assert!(is_there.iter().zip(&is_right).all(is_told));
            assert!(!is_whole || is_there.iter().all(|there| there == "true"));
        }
        assert!(self.all_say("end", &format!("{:?}", Some(arrived))));
        is_whole
    }
}

#[test]
fn each_rank_waits_for_layers_of_its_own_slice() {
    let mut fleet = Fleet::open(LIMIT);
    fleet.keep(1);
    for _ in 0..5 {
        assert!(fleet.serves(1));
    }
    // What the tiers do not have is no layer's, and an engine may ask before and after.
    let (number, transfer) = load(&fleet.manager, 9);
    assert_eq!(transfer.wait().unwrap().arrived, 0);
    fleet.ask(&format!("load {number}"));
    assert!(fleet.all_say("layers 1", "false") && fleet.all_say("end", "Some(0)"));
    fleet.ask(&format!("load {}", number + 1));
    assert_eq!(load(&fleet.manager, 1).0, number + 1);
    assert!(fleet.all_say("layers 8", "true") && fleet.all_say("end", "Some(12)"));
    fleet.assert_heals();
}

#[test]
fn a_block_that_one_rank_lacks_is_bad_in_all() {
    let mut fleet = Fleet::open(LIMIT);
    fleet.keep(1);
    fleet.ranks[1].ask("fail");
    let (number, transfer) = load(&fleet.manager, 1);
    fleet.ask(&format!("load {number}"));
    assert_eq!(fleet.ask("layers 8"), ["true", "false"]);
    let arrived = transfer.wait().unwrap().arrived;
    assert!(arrived < BLOCKS as usize);
    assert!(fleet.all_say("end", &format!("{:?}", Some(arrived))));
    fleet.assert_heals();
}

#[test]
fn a_load_ends_in_ranks_when_none_writes_any_more() {
    let mut fleet = Fleet::open(TIMEOUT);
    fleet.keep(1);
    fleet.ranks[1].stop();
    let (number, transfer) = load(&fleet.manager, 1);
    assert_eq!(fleet.ranks[0].ask(&format!("load {number}")), "");
    assert_eq!(fleet.ranks[0].ask("layers 8"), "true", "its own slice is there");
    let loaded = transfer.wait().unwrap();
    assert_eq!((loaded.arrived, loaded.writers.are_gone()), (0, false), "the other is overdue");
    assert_eq!(fleet.ranks[0].ask("ended"), "None");
    fleet.ranks[1].signal("CONT");
    fleet.ranks[1].ask(&format!("load {number}"));
    assert!(fleet.all_say("end", "Some(0)"));
    assert!(loaded.writers.are_gone());
    fleet.assert_heals();
}

#[test]
fn a_rank_killed_amid_a_load_ends_it_in_others() {
    let mut fleet = Fleet::open(LIMIT);
    fleet.keep(1);
    fleet.ranks[1].stop();
    let (number, transfer) = load(&fleet.manager, 1);
    assert_eq!(fleet.ranks[0].ask(&format!("load {number}")), "");
    assert_eq!(fleet.ranks[0].ask("layers 8"), "true");
    assert_eq!(fleet.ranks[0].ask("ended"), "None");
    fleet.ranks[1].signal("KILL");
    assert_eq!(fleet.ranks[0].ask("end"), "Some(0)");
    assert_eq!(transfer.wait().unwrap().arrived, 0);
    fleet.ranks[1] = start_rank(fleet.dir.path(), 1);
    assert_eq!(fleet.ranks[1].hear(), "joined");
    fleet.assert_heals();
}

#[test]
fn a_leader_killed_amid_a_load_ends_it_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let mut leader = Process::start(module_path!(), "leader", dir.path());
    let mut ranks = start_ranks(dir.path());
    assert_eq!(leader.hear(), "open");
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "joined");
        rank.ask("compute 1");
    }
    assert_eq!(leader.ask("save"), BLOCKS.to_string());
    ranks[1].stop();
    let number = leader.ask("load");
    assert_eq!(ranks[0].ask(&format!("load {number}")), "");
    assert_eq!(ranks[0].ask("layers 8"), "true");
    assert_eq!(ranks[0].ask("ended"), "None");
    leader.signal("KILL");
    ranks[1].signal("CONT");
    ranks[1].ask(&format!("load {number}"));
    for rank in &mut ranks {
        assert_eq!(rank.ask("end"), "Some(0)");
        assert!(rank.ask("wait").contains("lost its leader"));
    }
    drop(ranks);
    let ranks = start_ranks(dir.path());
    Fleet::over(dir, ranks, LIMIT).assert_heals();
}

#[test]
fn a_reset_amid_a_load_ends_it_and_nothing_stays() {
    let mut fleet = Fleet::open(LIMIT);
    fleet.keep(1);
    fleet.ranks[1].stop();
    let (number, transfer) = load(&fleet.manager, 1);
    fleet.manager.reset(fleet.manager.admin().epoch() + 1).unwrap();
    assert_eq!(transfer.wait().unwrap().arrived, 0);
    assert_eq!(fleet.ranks[0].ask(&format!("load {number}")), "");
    assert_eq!(fleet.ranks[0].ask("ended"), "None", "the other may write yet");
    fleet.ranks[1].signal("CONT");
    fleet.ranks[1].ask(&format!("load {number}"));
    assert!(fleet.all_say("end", "Some(0)"));
    assert!(!fleet.serves(1), "it is of the epoch before");
    fleet.assert_heals();
}

#[test]
fn loads_that_cannot_be_named_are_refused() {
    let mut fleet = Fleet::open(LIMIT);
    fleet.keep(1);
    let lease = || fleet.manager.lease(&chain(1, BLOCKS));
    let refused = |slots: &[SlotId]| {
        let named = [GroupSlots::full(0, slots)];
        fleet.manager.load_in_ranks(lease(), &named).unwrap_err().kind()
    };
    assert_eq!(refused(&[SlotId(SLOTS)]), ErrorKind::Invalid);
    assert_eq!(refused(&[SlotId(1), SlotId(1)]), ErrorKind::Invalid);
    let stale = lease();
    fleet.manager.reset(fleet.manager.admin().epoch() + 1).unwrap();
    let named = slots(LOADED);
    let named = [GroupSlots::full(0, &named)];
    assert_eq!(fleet.manager.load_in_ranks(stale, &named).unwrap_err().kind(), ErrorKind::Stale);
    // A load that is awaited as a whole has no name, and goes beside others.
    fleet.keep(2);
    let whole = load_slots(
        &fleet.manager,
        fleet.manager.lease(&chain(2, BLOCKS)),
        0,
        &slots(LOADED),
        &Fence::Done,
    );
    assert_eq!(whole.wait().unwrap().arrived, BLOCKS as usize);
    let (region, _) = Tensors::new(SLOTS, BLOCK, 1).shared();
    let engine = Some(EngineMemory::new(region, 1).unwrap());
    let alone =
        engine::open_with(settings(LIMIT), Options { engine, ..Options::default() }).unwrap();
    let none = alone.load_in_ranks(alone.lease(&chain(1, BLOCKS)), &named).unwrap_err();
    assert!(none.to_string().contains("Options::ranks"), "{none}");
    fleet.assert_heals();
}
