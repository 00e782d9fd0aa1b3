//! A leader with ranks in processes of their own: bytes right in each, and what becomes of them when one is killed,
//! hangs, is another's, or has no leader any more.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, thread};

use kvbm::table::SlotCounts;
use kvbm::{
    Allocation, BlockHash, Chain, ErrorKind, Lease, Manager, Options, Rank, RankGroup, RankOptions, SlotId,
    Tier, Transfer, Transferred,
};
use kvbm_settings::{Capacity, Settings};
use kvbm_tests::engine;
use kvbm_tests::process::{Process, role};
use kvbm_tests::rig::{hash, metric, number};
use kvbm_tiers::testing::{Child as Forked, fill_pattern, has_pattern};
use prometheus::Registry;

const WORLD: u16 = 4;
/// Large enough that a copy takes a while.
const BLOCK: u64 = 128 << 10;
const LIMIT: Duration = Duration::from_secs(30);
/// How long a forked child keeps what it got of its parent.
const LINGERS: Duration = Duration::from_secs(5);

/// What leader and ranks are opened with.
fn settings(dir: &Path) -> Settings {
    let mut settings = engine::settings(BLOCK, 32, 32);
    settings.disk.capacity = Some(Capacity::Blocks(64));
    settings.disk.dirs = vec![dir.join("slots")];
    settings.disk.keep = true;
    settings.host.staging_blocks = 8;
    settings.transfer.timeout_ms = 500;
    settings.flush.interval_ms = 1;
    settings
}

fn group(dir: &Path) -> RankGroup {
    RankGroup { dir: dir.join("meet"), world: WORLD, limit: LIMIT }
}

fn open(dir: &Path, group: RankGroup, registry: &Registry) -> kvbm::Result<Manager> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let options = Options { registry: registry.clone(), ranks: Some(group), ..Options::default() };
    runtime.block_on(Manager::open(settings(dir), options))
}

/// What block `number` of a test is in rank `rank`.
fn pattern(rank: u16, number: usize) -> usize {
    (usize::from(rank) << 24) + number
}

/// Not a test: the process of a rank, or of a leader that is to be killed, when another test starts it.
#[test]
fn process() {
    let Some((role, place)) = role() else { return };
    match role.parse() {
        Ok(rank) => be_a_rank(&place, rank),
        Err(_) => be_a_leader(&place),
    }
}

fn be_a_leader(place: &Path) {
    let _manager = open(place, group(place), &Registry::new()).unwrap();
    println!("@ open");
    // Until it is killed.
    thread::sleep(4 * LIMIT);
}

/// Plays the engine of a rank: it writes and checks the slots that its commands name.
fn be_a_rank(place: &Path, rank: u16) {
    let options = RankOptions { group: group(place), rank, fingerprint: None, chaos: None };
    let joined = match Rank::join(&settings(place), options) {
        Ok(rank) => rank,
        Err(error) => return println!("@ {:?}: {error}", error.kind()),
    };
    println!("@ joined");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        let answer = match words[0] {
            "fill" => joined.fill_device(SlotId(number(1) as u32), |block| fill_pattern(number(2), block)),
            // An engine's worker forks, and the child outlives it for a while.
            "fork" => {
                let _child = Forked::fork(|| {
                    thread::sleep(LINGERS);
                    true
                });
                true
            }
            "check" => {
                joined.read_device(SlotId(number(1) as u32), |block| has_pattern(number(2), block)).unwrap()
            }
            _ => {
                println!("@ {:?}", joined.wait().map_err(|error| error.to_string()));
                return;
            }
        };
        println!("@ {answer}");
    }
}

/// A manager and its ranks.
struct Fleet {
    manager: Manager,
    registry: Registry,
    /// `None` while it is dead.
    ranks: Vec<Option<Process>>,
    dir: tempfile::TempDir,
}

/// What became of a request.
#[derive(Debug, Default, PartialEq, Eq)]
struct Served {
    hit: usize,
    /// Slices whose bytes were not theirs.
    wrong: usize,
    computed: usize,
    saved: usize,
}

impl Fleet {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("slots")).unwrap();
        let mut ranks: Vec<_> =
            (0..WORLD).map(|rank| Process::start(&rank.to_string(), dir.path())).collect();
        let registry = Registry::new();
        let manager = open(dir.path(), group(dir.path()), &registry).unwrap();
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
        Self { manager, registry, ranks: ranks.into_iter().map(Some).collect(), dir }
    }

    /// All ranks that are there.
    fn ask(&mut self, command: impl Fn(u16) -> String, expected: &str) -> usize {
        let ranks = (0..).zip(&mut self.ranks);
        let asked = ranks.filter_map(|(number, rank)| Some(rank.as_mut()?.ask(&command(number))));
        asked.filter(|answer| answer != expected).count()
    }

    /// Serves one request as an engine in all ranks does: load, check, compute the rest, save.
    fn serve(&mut self, chain: &[BlockHash]) -> Served {
        let loaded = answer(self.manager.load(self.manager.lease(chain)));
        let mut served = Served { hit: loaded.blocks, ..Served::default() };
        served.wrong = self.wrong_slices(&loaded.lease, chain, loaded.blocks);
        let mut allocation = self.manager.allocate(chain, loaded.lease).unwrap();
        served.computed = self.compute(&mut allocation, chain);
        let published = answer(allocation.publish().unwrap());
        served.saved = answer(self.manager.save(published.lease)).blocks;
        served
    }

    fn wrong_slices(&mut self, lease: &Lease, chain: &[BlockHash], blocks: usize) -> usize {
        let check = |fleet: &mut Self, position| {
            let slot = fleet.manager.device_slot(lease, chain, position).unwrap().0;
            let block = number(Chain::from(chain).key(position));
            fleet.ask(|rank| format!("check {slot} {}", pattern(rank, block)), "true")
        };
        (0..blocks).map(|position| check(self, position)).sum()
    }

    fn compute(&mut self, allocation: &mut Allocation, chain: &[BlockHash]) -> usize {
        let blocks = allocation.blocks();
        for position in blocks.clone() {
            let slot = allocation.slot(position).unwrap().0;
            let block = number(Chain::from(chain).key(position));
            assert_eq!(self.ask(|rank| format!("fill {slot} {}", pattern(rank, block)), "true"), 0);
            assert!(allocation.mark_filled(position));
        }
        blocks.len()
    }

    fn kill(&mut self, rank: usize) {
        self.ranks[rank].take().unwrap().kill();
    }

    fn assert_forgets(&self, chain: &[BlockHash], limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.manager.matches(chain).longest() > 0 {
            assert!(Instant::now() < deadline, "what a dead rank held is still believed to be there");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Which ranks are away, by the metric.
    fn away(&self) -> Vec<u16> {
        let is_away =
            |rank: &u16| metric(&self.registry, "kvbm_rank_up", &[("rank", &rank.to_string())]) == 0;
        (0..WORLD).filter(is_away).collect()
    }

    fn restart(&mut self, rank: u16) {
        let mut process = Process::start(&rank.to_string(), self.dir.path());
        assert_eq!(process.hear(), "joined");
        self.ranks[usize::from(rank)] = Some(process);
    }

    /// Everything goes on as if nothing had been, once the media's breakers have found that out.
    fn assert_heals(&mut self, chain: &[BlockHash]) {
        let all = chain.len();
        self.serve_until(chain, &[Tier::Device], |served| served.saved == all);
        self.serve_until(chain, &[Tier::Device], |served| served.hit == all);
        self.serve_until(chain, &[Tier::Device, Tier::Host], |served| served.hit == all);
        self.assert_sound();
    }

    /// Serves a request again and again, until it goes well. The blocks are in none of the tiers `without` at first.
    fn serve_until(&mut self, chain: &[BlockHash], without: &[Tier], is_well: impl Fn(&Served) -> bool) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let drained = self.manager.drain(LIMIT / 4);
            without.iter().for_each(|&tier| self.empty(tier));
            let served = self.serve(chain);
            assert_eq!(served.wrong, 0);
            if is_well(&served) {
                return;
            }
            assert!(Instant::now() < deadline, "it does not heal: {served:?} after {drained:?}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Nothing leaks.
    fn assert_sound(&self) {
        let _ = self.manager.drain(LIMIT);
        assert_eq!(self.manager.audit(), []);
        assert_eq!(self.manager.overdue(), 0);
        for tier in [Tier::Disk, Tier::Host, Tier::Device] {
            let SlotCounts { total, free, filling, resident, lost, .. } = self.manager.counts(tier);
            assert_eq!((filling, lost, free + resident), (0, 0, total), "{tier}");
        }
        let staging = self.manager.staging();
        assert_eq!((staging.lost, staging.idle), (0, staging.total), "staging");
    }

    fn empty(&self, tier: Tier) {
        self.manager.evict(tier, 64);
    }
}

/// Nothing may hang.
fn answer(transfer: Transfer<Transferred>) -> Transferred {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(LIMIT, transfer).await }).expect("an answer").unwrap()
}

/// Six blocks that no other `n` has.
fn chain(n: u32) -> Vec<BlockHash> {
    (0..6).map(|i| hash(100 * n + i + 1)).collect()
}

#[test]
fn each_rank_has_its_own_bytes_in_every_tier() {
    let mut fleet = Fleet::new();
    assert_eq!(fleet.manager.device(), Some("ranks"));
    for n in 1..4 {
        assert_eq!(fleet.serve(&chain(n)), Served { computed: 6, saved: 6, ..Served::default() });
    }
    (1..4).for_each(|n| fleet.assert_heals(&chain(n)));
    let files = fs::read_dir(fleet.dir.path().join("slots")).unwrap();
    let names: Vec<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    for rank in 0..WORLD {
        let own = format!("-rank{rank}of{WORLD}-");
        assert_eq!(names.iter().filter(|name| name.contains(&own)).count(), 1, "{names:?}");
    }
    let Fleet { manager, mut ranks, dir: _dir, .. } = fleet;
    drop(manager);
    ranks.iter_mut().flatten().for_each(|rank| assert_eq!(rank.ask("wait"), "Ok(())"));
}

#[test]
fn a_rank_killed_while_it_copies_costs_what_it_held_and_comes_back() {
    let mut fleet = Fleet::new();
    for n in 1..4 {
        assert_eq!(fleet.serve(&chain(n)).saved, 6);
    }
    for round in 0..6 {
        fleet.empty(Tier::Device);
        let is_in_flight = round % 2 == 0;
        if is_in_flight {
            // The other ranks end their copies, and this one never does.
            fleet.ranks[2].as_ref().unwrap().stop();
        }
        let loads = (1..4).map(|n| fleet.manager.load(fleet.manager.lease(&chain(n)))).collect::<Vec<_>>();
        fleet.kill(2);
        for loaded in loads.into_iter().map(answer) {
            assert!(!is_in_flight || loaded.blocks == 0, "round {round}: what a dead rank never had");
        }
        (1..4).for_each(|n| fleet.assert_forgets(&chain(n), LIMIT));
        let started = Instant::now();
        let served = fleet.serve(&chain(1));
        assert_eq!((served.hit, served.computed, served.saved), (0, 6, 0), "the engine goes on alone");
        assert!(started.elapsed() < LIMIT / 4, "misses take no time");
        fleet.restart(2);
        (1..4).for_each(|n| fleet.assert_heals(&chain(n)));
    }
}

#[test]
fn a_child_that_outlives_its_rank_does_not_keep_its_place() {
    let mut fleet = Fleet::new();
    assert_eq!(fleet.serve(&chain(1)).saved, 6);
    assert_eq!(fleet.ranks[0].as_mut().unwrap().ask("fork"), "true");
    assert_eq!(fleet.away(), [0_u16; 0]);
    fleet.kill(0);
    fleet.assert_forgets(&chain(1), LINGERS / 2);
    assert_eq!(fleet.away(), [0]);
    // It waits for the lock on its file, which the child has too.
    fleet.restart(0);
    assert_eq!(fleet.away(), [0_u16; 0]);
    fleet.assert_heals(&chain(1));
}

#[test]
fn a_rank_that_hangs_makes_misses_and_works_again_when_it_goes_on() {
    let mut fleet = Fleet::new();
    assert_eq!(fleet.serve(&chain(1)).saved, 6);
    fleet.assert_heals(&chain(1));
    fleet.empty(Tier::Device);
    fleet.ranks[1].as_ref().unwrap().stop();
    let started = Instant::now();
    let loaded = answer(fleet.manager.load(fleet.manager.lease(&chain(1))));
    assert_eq!(loaded.blocks, 0);
    assert!(started.elapsed() < Duration::from_secs(5));
    drop(loaded);
    assert_eq!(fleet.manager.audit(), []);
    // Asked again, the medium is left alone: an answer at once.
    let started = Instant::now();
    drop(answer(fleet.manager.load(fleet.manager.lease(&chain(1)))));
    assert!(started.elapsed() < Duration::from_millis(300));
    fleet.ranks[1].as_ref().unwrap().signal("CONT");
    let deadline = Instant::now() + LIMIT;
    while fleet.manager.overdue() > 0 {
        assert!(Instant::now() < deadline, "{} copies are still overdue", fleet.manager.overdue());
        thread::sleep(Duration::from_millis(1));
    }
    fleet.assert_heals(&chain(1));
    fleet.assert_heals(&chain(2));
}

#[test]
fn a_rank_killed_while_it_hangs_gives_its_slots_back() {
    let mut fleet = Fleet::new();
    assert_eq!(fleet.serve(&chain(1)).saved, 6);
    fleet.empty(Tier::Device);
    fleet.ranks[3].as_ref().unwrap().stop();
    assert_eq!(answer(fleet.manager.load(fleet.manager.lease(&chain(1)))).blocks, 0);
    assert!(fleet.manager.counts(Tier::Device).lost > 0);
    fleet.kill(3);
    fleet.restart(3);
    fleet.assert_heals(&chain(1));
    fleet.assert_heals(&chain(2));
}

#[test]
fn ranks_whose_leader_is_killed_say_so_and_join_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("slots")).unwrap();
    let mut leader = Process::start("leader", dir.path());
    let mut ranks: Vec<_> = (0..WORLD).map(|rank| Process::start(&rank.to_string(), dir.path())).collect();
    assert_eq!(leader.hear(), "open");
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
    leader.signal("KILL");
    for (number, mut rank) in ranks.into_iter().enumerate() {
        let outcome = rank.ask("wait");
        let words = format!("rank {number} lost its leader (process {})", leader.id());
        assert!(outcome.contains(&words), "{outcome}");
        assert!(rank.ends_well());
    }
    // All of them start anew, in the same place.
    let mut ranks: Vec<_> = (0..WORLD).map(|rank| Process::start(&rank.to_string(), dir.path())).collect();
    let registry = Registry::new();
    let manager = open(dir.path(), group(dir.path()), &registry).unwrap();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
    let mut fleet = Fleet { manager, registry, ranks: ranks.into_iter().map(Some).collect(), dir };
    fleet.assert_heals(&chain(1));
}

#[test]
fn second_leaders_and_second_ranks_are_refused_and_named() {
    let mut fleet = Fleet::new();
    let dir = fleet.dir.path().to_owned();
    let second = open(&dir, group(&dir), &Registry::new()).unwrap_err();
    assert_eq!(second.kind(), ErrorKind::Unavailable);
    let own = std::process::id();
    assert!(second.to_string().contains(&format!("process {own}")), "{second}");
    let mut impostor = settings(&dir);
    impostor.disk.keep = false;
    let options = |rank| RankOptions { group: group(&dir), rank, fingerprint: None, chaos: None };
    let taken = Rank::join(&impostor, options(2)).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::Unavailable);
    let holder = fleet.ranks[2].as_ref().unwrap().id();
    assert!(taken.to_string().contains(&format!("process {holder} is that rank")), "{taken}");
    impostor.host.capacity = Some(Capacity::Blocks(31));
    let other = Rank::join(&impostor, options(2)).unwrap_err();
    assert_eq!(other.kind(), ErrorKind::Invalid);
    assert!(other.to_string().contains("number of host slots is 39, this leader's 40"), "{other}");
    fleet.assert_heals(&chain(1));
}

#[test]
fn a_leader_says_which_ranks_it_waits_for_in_vain() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("slots")).unwrap();
    let group = RankGroup { limit: Duration::from_secs(3), ..group(dir.path()) };
    let _one = Process::start("1", dir.path());
    let error = open(dir.path(), group, &Registry::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().ends_with("0, 2, 3"), "{error}");
}
