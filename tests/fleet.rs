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
use kvbm_tiers::numbers::{HalfType, halves_to_halves};
use kvbm_tiers::ranks::HeadShare;
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
    let (registry, ranks) = (registry.clone(), Some(group));
    let told = fingerprint.as_ref().map(|fingerprint| fingerprint.block_tokens);
    let block_tokens = told.unwrap_or(Options::default().block_tokens);
    let options = Options { registry, ranks, fingerprint, block_tokens, ..Options::default() };
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

/// Blocks of a test whose ranks split their heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadForm {
    /// Tokens of a block.
    pub tokens: usize,
    /// Its axes, outermost first: `kv`, `token`, `head`, `byte`, and `layer` unless that is the
    /// first.
    pub order: &'static str,
    /// `fp16`; or `bf16`, with the same numbers, rounded.
    pub dtype: &'static str,
}

/// How long each axis is, but for tokens.
const AXES: [(&str, usize); 4] = [("layer", 4), ("kv", 2), ("head", 8), ("byte", 128)];

impl HeadForm {
    /// Heads inside of tokens.
    pub const NHD: Self = Self { tokens: 16, order: "kv,token,head,byte", dtype: "fp16" };
    /// Heads outside of tokens.
    pub const HND: Self = Self { order: "kv,head,token,byte", ..Self::NHD };
    /// Layers inside of both.
    pub const LAYERS_INSIDE: Self = Self { order: "head,token,layer,kv,byte", ..Self::NHD };

    /// The same, with another number of tokens.
    #[must_use]
    pub const fn of_tokens(self, tokens: usize) -> Self {
        Self { tokens, ..self }
    }

    /// The same, with numbers of bfloat16.
    #[must_use]
    pub const fn of_bf16(self) -> Self {
        Self { dtype: "bf16", ..self }
    }

    /// Bytes of a block, in all ranks together.
    pub fn block_bytes(self) -> usize {
        self.tokens * AXES.iter().map(|(_, extent)| extent).product::<usize>()
    }

    /// Axes of a slice of one of `world` ranks, outermost first.
    fn axes(self, world: u16) -> Vec<(&'static str, usize)> {
        let extent = |name: &'static str| {
            let known = AXES.iter().find(|(known, _)| *known == name);
            let extent = known.map_or(self.tokens, |(_, extent)| *extent);
            (name, if name == "head" { extent / usize::from(world) } else { extent })
        };
        let layers = (!self.order.contains("layer")).then_some("layer");
        layers.into_iter().chain(self.order.split(',')).map(extent).collect()
    }

    /// Of `world` ranks.
    pub fn fingerprint(self, world: u16) -> Fingerprint {
        let axes = self.axes(world);
        let named = &axes[axes.len() - self.order.split(',').count()..];
        let shape: Vec<_> = named.iter().map(|(_, extent)| *extent as u64).collect();
        let strides = (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
        let order = self.order.to_owned();
        Fingerprint {
            model: "tests".to_owned(),
            weights: "1".to_owned(),
            dtype: self.dtype.to_owned(),
            layouts: vec![KvLayout { layers: AXES[0].1 as u32, order, shape, strides }],
            ranks: Ranks { tensor_world: world.into(), ..Ranks::default() },
            block_tokens: self.tokens as u64,
            ..Fingerprint::default()
        }
    }

    /// What a rank's share of the heads is of a test's block `number`, whose position in its chain is
    /// what `number` has over a multiple of 1,000, less 1.
    pub fn slice(self, share: HeadShare, number: usize) -> Vec<u8> {
        let (index, world) = share.get();
        // Without the part that names a rank.
        let number = number % pattern(1, 0);
        let (prompt, at) = (number / 1_000, (number % 1_000).max(1) - 1);
        let axes = self.axes(world);
        let (&(_, row_bytes), outer) = axes.split_last().expect("bytes");
        let rows: usize = outer.iter().map(|(_, extent)| extent).product();
        let mut slice = vec![0; rows * row_bytes];
        for (row, bytes) in slice.chunks_exact_mut(row_bytes).enumerate() {
            let mut rest = row;
            let mut place = prompt;
            let mut digits = [("", 0); 5];
            for (of, (name, extent)) in digits.iter_mut().zip(outer).rev() {
                *of = (*name, rest % extent);
                rest /= extent;
            }
            for (name, extent) in [("layer", 4), ("kv", 2), ("head", 8), ("token", 1 << 16)] {
                let digit = digits.iter().find(|(of, _)| *of == name).expect("an axis").1;
                let first = match name {
                    "token" => at * self.tokens,
                    "head" => usize::from(index) * AXES[2].1 / usize::from(world),
                    _ => 0,
                };
                place = place * extent + first + digit;
            }
            fill_pattern(place, bytes);
        }
        if self.dtype == "bf16" {
            halves_to_halves(&mut slice, HalfType::F16);
        }
        slice
    }
}

/// Of `world` ranks that split the heads of a model.
pub fn split_heads(world: u16) -> Fingerprint {
    HeadForm::NHD.fingerprint(world)
}

/// What a rank has of a test's blocks: blocks of its own, or its heads of what all ranks have.
struct Slice(Option<(HeadForm, HeadShare)>);

impl Slice {
    /// Heads are split where the fingerprint says how they lie.
    fn of(options: &RankOptions) -> Self {
        let fingerprint = options.fingerprint.as_ref();
        let form = fingerprint.and_then(|fingerprint| {
            let order = &fingerprint.layouts.first()?.order;
            let forms = [HeadForm::NHD, HeadForm::HND, HeadForm::LAYERS_INSIDE];
            let form = forms.into_iter().find(|form| form.order == order)?;
            let form = if fingerprint.dtype == "bf16" { form.of_bf16() } else { form };
            Some(form.of_tokens(fingerprint.block_tokens as usize))
        });
        Self(form.zip(HeadShare::new(options.rank, options.group.world)))
    }

    fn bytes(&self, number: usize, bytes: usize) -> Vec<u8> {
        if let Some((form, share)) = self.0 {
            return form.slice(share, number);
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

/// Is the rank as which another test started this process, if one did: of a model whose heads ranks
/// split, with these settings of a directory.
///
/// # Panics
/// As [`be_a_rank`].
pub fn be_a_started_rank(settings: impl Fn(&Path) -> Settings) {
    be_a_started_rank_of(settings, |_| HeadForm::NHD);
}

/// [`be_a_started_rank`], with blocks of a form that its directory says.
///
/// # Panics
/// As [`be_a_rank`].
pub fn be_a_started_rank_of(
    settings: impl Fn(&Path) -> Settings,
    form: impl Fn(&Path) -> HeadForm,
) {
    let Some((rank, dir)) = role() else { return };
    let group = group_of(&dir);
    let fingerprint = Some(form(&dir).fingerprint(group.world));
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
        self.manager.admin().evict(tier, 1 << 10);
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
