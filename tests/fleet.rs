//! A leader over ranks in processes of their own, and the engine that uses them: what it loads it
//! checks in each rank.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, thread};

use kvbm::table::SlotCounts;
use kvbm::{
    Allocation, BlockHash, Fingerprint, KvLayout, Lease, Manager, Options, Rank, RankGroup,
    RankOptions, Ranks, RequestInfo, SlotId, Tier, Transfer, Transferred,
};
use kvbm_settings::Settings;
use kvbm_tiers::ranks::{HeadLayout, HeadShare};
use kvbm_tiers::sealed::{RECORD_BYTES, WrappedKey};
use kvbm_tiers::testing::{Child as Forked, fill_pattern};
use prometheus::Registry;

use crate::engine;
use crate::process::{Process, role, say};
use crate::rig::{files, metric, number_of, wait_until};

/// Ranks of a fleet.
pub const WORLD: u16 = 4;
/// Bytes of a block: large enough that a copy takes a while.
pub const BLOCK: u64 = 128 << 10;
/// Nothing may take longer.
pub const LIMIT: Duration = Duration::from_secs(30);
/// How long a forked child keeps what it got of its parent.
pub const LINGERS: Duration = Duration::from_secs(5);

/// What leader and ranks are opened with, with their files in `dir`.
pub fn settings(dir: &Path) -> Settings {
    let mut settings = engine::settings(BLOCK, 32, 32);
    engine::add_disk(&mut settings, 64, dir.join("slots"));
    settings.disk.keep = true;
    settings.host.staging_blocks = 8;
    settings.transfer.timeout_ms = 500;
    settings.flush.interval_ms = 1;
    settings
}

/// Where they meet.
pub fn group(dir: &Path) -> RankGroup {
    RankGroup { dir: dir.join("meet"), world: WORLD, limit: LIMIT }
}

/// Where ranks meet whose worker's directory says how many they are: `reader-2`.
///
/// # Panics
/// If it does not.
pub fn group_of(dir: &Path) -> RankGroup {
    let (_, world) = dir.to_str().and_then(|dir| dir.rsplit_once('-')).expect("a number of ranks");
    let world = world.parse().expect("a number of ranks");
    RankGroup { dir: dir.join("meet"), world, limit: LIMIT }
}

/// Opens a leader.
///
/// # Errors
/// Those of [`Manager::open`].
///
/// # Panics
/// If there is no runtime to be had.
pub fn lead(
    settings: Settings,
    group: RankGroup,
    fingerprint: Option<Fingerprint>,
    registry: &Registry,
) -> kvbm::Result<Manager> {
    let ranks = Some(group);
    let options = Options { registry: registry.clone(), ranks, fingerprint, ..Options::default() };
    engine::block_on(Manager::open(settings, options))
}

/// What block `number` of a test is in rank `rank`.
pub fn pattern(rank: u16, number: usize) -> usize {
    (usize::from(rank) << 24) + number
}

/// The ranks of `world` that have a key of a tenant in this directory.
///
/// # Panics
/// If it cannot be read.
pub fn keepers(dir: &Path, world: u16, tenant: u32) -> Vec<u16> {
    let has_key = |path: &PathBuf| {
        let bytes = fs::read(path).expect("keys");
        let records = bytes.as_chunks::<RECORD_BYTES>().0.iter().skip(1);
        records
            .filter_map(|record| WrappedKey::parse(*record))
            .any(|key| key.tenant() == Some(tenant))
    };
    let keys: Vec<_> =
        files(dir).into_iter().filter(|path| is_keys(path) && has_key(path)).collect();
    (0..world).filter(|rank| keys.iter().any(|path| is_of_rank(path, *rank))).collect()
}

/// Whether a file has keys of tenants.
pub fn is_keys(path: &Path) -> bool {
    path.extension().is_some_and(|kind| kind == "keys")
}

/// Whether a file is this rank's.
pub fn is_of_rank(path: &Path, rank: u16) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.contains(&format!("-rank{rank}of")))
}

/// How heads lie in a whole block of a test whose ranks split them: layers, keys and values, tokens.
pub const HEADS: (u32, [u64; 4]) = (4, [2, 16, 8, 128]);

/// Of `world` ranks that split the heads of a model.
pub fn split_heads(world: u16) -> Fingerprint {
    let (layers, mut shape) = HEADS;
    shape[2] /= u64::from(world);
    let [_, tokens, heads, bytes] = shape;
    let layout = KvLayout {
        layers,
        order: "kv,token,head,byte".to_owned(),
        shape: shape.to_vec(),
        strides: vec![tokens * heads * bytes, heads * bytes, bytes, 1],
    };
    Fingerprint {
        model: "tests".to_owned(),
        weights: "1".to_owned(),
        layouts: vec![layout],
        ranks: Ranks { tensor_world: world.into(), ..Ranks::default() },
        block_tokens: 16,
        ..Fingerprint::default()
    }
}

/// What a rank has of a test's blocks: blocks of its own, or its heads of what all ranks have.
struct Slice(Option<HeadShare>);

impl Slice {
    /// Heads are split where the fingerprint says how they lie.
    fn of(options: &RankOptions) -> Self {
        let splits = options.fingerprint.as_ref().is_some_and(|of| !of.layouts.is_empty());
        Self(HeadShare::new(options.rank, options.group.world).filter(|_| splits))
    }

    fn bytes(&self, number: usize, bytes: usize) -> Vec<u8> {
        if let Some(share) = self.0 {
            return heads_of(share, number, bytes);
        }
        let mut block = vec![0; bytes];
        fill_pattern(number, &mut block);
        block
    }

    fn fill(&self, number: usize, block: &mut [u8]) {
        block.copy_from_slice(&self.bytes(number, block.len()));
    }

    fn is_in(&self, number: usize, block: &[u8]) -> bool {
        block == self.bytes(number, block.len())
    }
}

/// The heads of a test's block `number` that are this share: `bytes` of it.
///
/// # Panics
/// If heads do not make such shares.
pub fn heads_of(share: HeadShare, number: usize, bytes: usize) -> Vec<u8> {
    let mut block = vec![0; bytes * usize::from(share.get().1)];
    // Of no rank.
    fill_pattern(number % pattern(1, 0), &mut block);
    let (layers, [kv, tokens, heads, _]) = HEADS;
    let outer = u64::from(layers) * kv * tokens;
    let layout = HeadLayout::new(outer as usize, heads as usize, block.len());
    layout.and_then(|layout| layout.cut(share, &mut block)).expect("whole heads");
    block
}

/// Is the rank as which another test started this process, if one did: of a model whose heads ranks
/// split, with these settings of a directory.
///
/// # Panics
/// As [`be_a_rank`].
pub fn be_a_started_rank(settings: impl Fn(&Path) -> Settings) {
    let Some((rank, dir)) = role() else { return };
    let group = group_of(&dir);
    let fingerprint = Some(split_heads(group.world));
    let rank = rank.parse().expect("the number of a rank");
    be_a_rank(&settings(&dir), RankOptions { fingerprint, ..RankOptions::new(group, rank) });
}

/// Plays the engine of a rank: it writes and checks the slots that its commands name.
///
/// # Panics
/// If it is told nonsense.
pub fn be_a_rank(settings: &Settings, options: RankOptions) {
    let slice = Slice::of(&options);
    let joined = match Rank::join(settings, options) {
        Ok(rank) => rank,
        Err(error) => return say(&format!("{:?}: {error}", error.kind())),
    };
    say("joined");
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let words: Vec<_> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().expect("a number");
        let answer = match words[0] {
            "fill" => {
                joined.fill_device(SlotId(number(1) as u32), |block| slice.fill(number(2), block))
            }
            // An engine's worker forks, and the child outlives it for a while.
            "fork" => {
                let _child = Forked::fork(|| {
                    thread::sleep(LINGERS);
                    true
                });
                true
            }
            "check" => joined
                .read_device(SlotId(number(1) as u32), |block| slice.is_in(number(2), block))
                .expect("there is such a slot"),
            _ => return say(&format!("{:?}", joined.wait().map_err(|error| error.to_string()))),
        };
        say(&answer.to_string());
    }
}

/// A manager and its ranks.
#[derive(Debug)]
pub struct Fleet {
    /// The leader.
    pub manager: Manager,
    /// Its metrics.
    pub registry: Registry,
    /// `None` while it is dead.
    pub ranks: Vec<Option<Process>>,
    /// Where the `process` of its ranks is.
    module: &'static str,
    dir: PathBuf,
}

/// What became of a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Blocks that were loaded or were there.
    pub hit: usize,
    /// Slices whose bytes were not theirs.
    pub wrong: usize,
    /// Blocks that were computed.
    pub computed: usize,
    /// Blocks that are in the host tier at the end.
    pub saved: usize,
}

impl Fleet {
    /// Starts ranks, which are the `process` of a test's module by their numbers, and leads them.
    ///
    /// # Panics
    /// If they do not come together.
    pub fn open(
        module: &'static str,
        dir: &Path,
        settings: Settings,
        group: RankGroup,
        fingerprint: Option<Fingerprint>,
    ) -> Self {
        fs::create_dir_all(dir.join("slots")).expect("a directory");
        let mut ranks: Vec<_> =
            (0..group.world).map(|rank| Process::start(module, &rank.to_string(), dir)).collect();
        let registry = Registry::new();
        let manager = lead(settings, group, fingerprint, &registry).expect("all ranks");
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
        Self::over(module, manager, registry, ranks, dir)
    }

    /// Of parts that a test opened.
    pub fn over(
        module: &'static str,
        manager: Manager,
        registry: Registry,
        ranks: Vec<Process>,
        dir: &Path,
    ) -> Self {
        Self {
            module,
            manager,
            registry,
            ranks: ranks.into_iter().map(Some).collect(),
            dir: dir.to_owned(),
        }
    }

    /// Ends all in good order, the leader first.
    ///
    /// # Panics
    /// If some do not end so.
    pub fn end(self) {
        drop(self.manager);
        for mut rank in self.ranks.into_iter().flatten() {
            assert_eq!(rank.ask("wait"), "Ok(())");
            assert!(rank.ends_well());
        }
    }

    /// All ranks that are there.
    fn ask(&mut self, command: impl Fn(u16) -> String, expected: &str) -> usize {
        let ranks = (0..).zip(&mut self.ranks);
        let asked = ranks.filter_map(|(number, rank)| Some(rank.as_mut()?.ask(&command(number))));
        asked.filter(|answer| answer != expected).count()
    }

    /// Serves one request as an engine in all ranks does: load, check, compute the rest, save.
    ///
    /// # Panics
    /// If anything hangs, or the manager closes.
    pub fn serve(&mut self, chain: &[BlockHash]) -> Served {
        self.serve_for(RequestInfo::default(), chain)
    }

    /// [`serve`](Self::serve), of a request that says something about itself.
    ///
    /// # Panics
    /// As [`serve`](Self::serve).
    pub fn serve_for(&mut self, info: RequestInfo, chain: &[BlockHash]) -> Served {
        let loaded = answer(self.manager.load(self.manager.lease_for(info, chain)));
        let mut served = Served { hit: loaded.blocks, ..Served::default() };
        served.wrong = self.wrong_slices(&loaded.lease, chain, loaded.blocks);
        let mut allocation = self.manager.allocate(chain, loaded.lease).expect("it goes on");
        served.computed = self.compute(&mut allocation, chain);
        let published = answer(allocation.publish().expect("it goes on"));
        served.saved = answer(self.manager.save(published.lease)).blocks;
        served
    }

    fn wrong_slices(&mut self, lease: &Lease, chain: &[BlockHash], blocks: usize) -> usize {
        let check = |fleet: &mut Self, position| {
            let slot = fleet.manager.device_slot(lease, chain, position).expect("it goes on").0;
            let block = number_of(chain[position]);
            fleet.ask(|rank| format!("check {slot} {}", pattern(rank, block)), "true")
        };
        (0..blocks).map(|position| check(self, position)).sum()
    }

    fn compute(&mut self, allocation: &mut Allocation, chain: &[BlockHash]) -> usize {
        let blocks = allocation.blocks();
        for position in blocks.clone() {
            let slot = allocation.slot(position).expect("it goes on").0;
            let block = number_of(chain[position]);
            assert_eq!(self.ask(|rank| format!("fill {slot} {}", pattern(rank, block)), "true"), 0);
            assert!(allocation.mark_filled(position));
        }
        blocks.len()
    }

    /// Kills a rank.
    ///
    /// # Panics
    /// If it is dead.
    pub fn kill(&mut self, rank: usize) {
        self.ranks[rank].take().expect("it lives").kill();
    }

    /// Waits until nothing of a chain is found.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn assert_forgets(&self, chain: &[BlockHash], limit: Duration) {
        wait_until(limit, "what a dead rank held is still believed to be there", || {
            self.manager.matches(chain).longest() == 0
        });
    }

    /// Which ranks are away, by the metric.
    pub fn away(&self) -> Vec<u16> {
        let is_away = |rank: &u16| {
            metric(&self.registry, "kvbm_rank_up", &[("rank", &rank.to_string())]) == 0
        };
        (0..self.ranks.len() as u16).filter(is_away).collect()
    }

    /// Starts a rank anew.
    ///
    /// # Panics
    /// If it is not let in.
    pub fn restart(&mut self, rank: u16) {
        let mut process = Process::start(self.module, &rank.to_string(), &self.dir);
        assert_eq!(process.hear(), "joined");
        self.ranks[usize::from(rank)] = Some(process);
    }

    /// Everything goes on as if nothing had been, once the media's breakers have found that out.
    ///
    /// # Panics
    /// If it does not.
    pub fn assert_heals(&mut self, chain: &[BlockHash]) {
        let all = chain.len();
        self.serve_until(chain, &[Tier::Device], |served| served.saved == all);
        self.serve_until(chain, &[Tier::Device], |served| served.hit == all);
        self.serve_until(chain, &[Tier::Device, Tier::Host], |served| served.hit == all);
        self.assert_sound();
    }

    /// Serves a request again and again, until it goes well. The blocks are in none of the tiers
    /// `without` at first.
    fn serve_until(
        &mut self,
        chain: &[BlockHash],
        without: &[Tier],
        is_well: impl Fn(&Served) -> bool,
    ) {
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
    ///
    /// # Panics
    /// If something does.
    pub fn assert_sound(&self) {
        let _ = self.manager.drain(LIMIT);
        assert_eq!(self.manager.admin().audit(), []);
        assert_eq!(self.manager.admin().overdue(), 0);
        for tier in [Tier::Disk, Tier::Host, Tier::Device] {
            let SlotCounts { total, free, filling, resident, lost, .. } =
                self.manager.admin().counts(tier);
            assert_eq!((filling, lost, free + resident), (0, 0, total), "{tier}");
        }
        let staging = self.manager.admin().staging();
        assert_eq!((staging.lost, staging.idle), (0, staging.total), "staging");
    }

    /// Lets all go that may leave a tier.
    pub fn empty(&self, tier: Tier) {
        self.manager.admin().evict(tier, 64);
    }
}

/// Nothing may hang.
///
/// # Panics
/// If it does.
pub fn answer(transfer: Transfer<Transferred>) -> Transferred {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("it goes on");
    runtime
        .block_on(async { tokio::time::timeout(LIMIT, transfer).await })
        .expect("an answer")
        .expect("it goes on")
}

/// Waits until all is flushed, and all ranks know.
///
/// # Panics
/// If that takes too long.
pub fn drained(manager: &Manager) {
    assert!(manager.drain(LIMIT).is_complete());
    // Ranks note by themselves what they have confirmed, every ten milliseconds.
    thread::sleep(Duration::from_millis(100));
}
