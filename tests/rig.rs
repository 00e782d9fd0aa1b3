//! What tests repeat: a block manager's core over small tiers in memory, whose backends a test
//! chooses, and the names that tests give to blocks, requests, keys and files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvbm::scheduler::{Core, Executor, Parts, ScrubOptions, Tuning};
use kvbm::table::{Reserved, SlotLimits, Steps, Table, TierSpec};
use kvbm::{
    BlockHash, Chain, Clock, Hints, ManualClock, Metrics, RequestInfo, Transfer, Transferred,
};
use kvbm_policies::AdmissionKind;
use kvbm_policies::admission::{TierPair, TierShape};
use kvbm_policies::eviction::EvictionKind;
use kvbm_tiers::chaos::{Chaos, Schedule};
use kvbm_tiers::nixl::Library;
use kvbm_tiers::testing::{
    FaultBackend, MemoryStore, ParkedBackend, fill_pattern, has_pattern, host, skip,
};
use kvbm_tiers::{
    Backend, BlockKey, Checksums, DramOptions, DramRegion, FramePool, Geometry, MemcpyBackend,
    Memory, Route, Tier, Verified,
};
use prometheus::Registry;
use prometheus::proto::MetricFamily;

/// Bytes of a block: enough to tell blocks apart.
pub const BLOCK_BYTES: usize = 64;

/// Routes between the device and the host.
pub const MEMORY: [Route; 2] = Route::new(Tier::Device, Tier::Host).both_ways();
/// Routes between the host and the disk.
pub const DISK: [Route; 2] = Route::new(Tier::Host, Tier::Disk).both_ways();
/// Routes between the host and the object store.
pub const OBJECT: [Route; 2] = Route::new(Tier::Host, Tier::Object).both_ways();

/// Time that a test moves: that of policies stands still otherwise, and that of hardware where the
/// test plays the hardware.
#[derive(Debug, Default)]
pub struct TestClock {
    policies: ManualClock,
    /// Microseconds that the test let pass for hardware, beside the time that passes.
    passed: AtomicU64,
    is_simulated: bool,
    is_broken: AtomicBool,
}

impl TestClock {
    /// A clock whose [`uptime`](Clock::uptime) stands still until the test moves it.
    pub fn simulated() -> Self {
        Self { is_simulated: true, ..Self::default() }
    }

    /// Moves the time of policies to `now_ms`.
    pub fn advance_to(&self, now_ms: u64) {
        self.policies.advance_to(now_ms);
    }

    /// The next call of [`uptime`](Clock::uptime) panics.
    pub fn break_once(&self) {
        self.is_broken.store(true, Ordering::Release);
    }

    /// Lets `time` pass for hardware and policies.
    pub fn pass(&self, time: Duration) {
        let time = time.as_micros() as u64;
        let passed = self.passed.fetch_add(time, Ordering::AcqRel) + time;
        self.policies.advance_to(passed / 1_000);
    }
}

impl Clock for TestClock {
    fn now_ms(&self) -> u64 {
        self.policies.now_ms()
    }

    fn uptime(&self) -> Duration {
        assert!(!self.is_broken.swap(false, Ordering::AcqRel), "a defect that a test wants");
        let real = if self.is_simulated { Duration::ZERO } else { self.policies.uptime() };
        real + Duration::from_micros(self.passed.load(Ordering::Acquire))
    }
}

/// How many slots each tier has.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Slots by tier.
    pub tiers: [u32; Tier::COUNT],
    /// DRAM slots beside the host tier through which blocks bounce.
    pub staging: u32,
}

/// Where the blocks lie.
#[derive(Clone, Debug)]
pub struct Places {
    /// Emulated device.
    pub device: Arc<DramRegion>,
    /// Host tier and staging slots.
    pub host: Arc<DramRegion>,
    /// Memory that plays the disk.
    pub disk: Arc<MemoryStore>,
    /// Memory that plays the object store.
    pub object: Arc<MemoryStore>,
}

impl Places {
    fn new(sizes: Sizes) -> Self {
        let slots = |tier: Tier| sizes.tiers[tier.index()];
        let geometry =
            Geometry::new(slots(Tier::Device), BLOCK_BYTES).expect("a test's geometry is valid");
        let options = DramOptions { geometry, huge_pages: false, fault_threads: 1 };
        let host = Arc::new(host(slots(Tier::Host) + sizes.staging, BLOCK_BYTES));
        let store =
            |tier| MemoryStore::new(Arc::clone(&host) as _, tier, slots(tier)).map(Arc::new);
        Self {
            device: Arc::new(DramRegion::emulated_device(options).expect("memory for a test")),
            disk: store(Tier::Disk).expect("memory for a test"),
            object: store(Tier::Object).expect("memory for a test"),
            host,
        }
    }

    /// The memory of a tier.
    pub fn region(&self, tier: Tier) -> &Arc<DramRegion> {
        match tier {
            Tier::Device => &self.device,
            Tier::Host => &self.host,
            Tier::Disk => self.disk.region(),
            Tier::Object => self.object.region(),
        }
    }

    /// The memory of all tiers.
    pub fn all(&self) -> Vec<Arc<dyn Memory>> {
        Tier::ALL.into_iter().map(|tier| Arc::clone(self.region(tier)) as _).collect()
    }

    /// `inner`, its blocks checksummed on their way out of the host and verified on their way back.
    pub fn verified(&self, inner: impl Backend + 'static) -> Arc<dyn Backend> {
        let checksums = Arc::new(Checksums::new());
        Arc::new(
            Verified::new(inner, Arc::clone(&self.host) as _, checksums)
                .expect("one store, one host"),
        )
    }
}

/// A core over tiers without memory: for tests of bookkeeping alone.
pub fn bare_core(sizes: Sizes, tuning: Tuning, backend: &Arc<dyn Backend>) -> Arc<Core> {
    bare_core_by(Arc::default(), sizes, tuning, backend)
}

/// [`bare_core`], by a clock that the test keeps.
pub fn bare_core_by(
    clock: Arc<TestClock>,
    sizes: Sizes,
    tuning: Tuning,
    backend: &Arc<dyn Backend>,
) -> Arc<Core> {
    let pools = Tier::ALL.map(|tier| {
        let staging = if tier == Tier::Host { sizes.staging } else { 0 };
        FramePool::new(tier, sizes.tiers[tier.index()] + staging)
    });
    let backends = std::slice::from_ref(backend);
    make_core((pools, None), sizes.staging, tuning, backends, clock, &Registry::new())
}

/// [`bare_core`], and the backend of all its routes, whose copies end when a test says so.
///
/// # Panics
/// Never: without regions there are no conflicts.
pub fn parked_core(sizes: Sizes) -> (Arc<Core>, Arc<ParkedBackend>) {
    let parked = parked_backend();
    (bare_core(sizes, TIGHT, &(Arc::clone(&parked) as Arc<dyn Backend>)), parked)
}

/// A backend of all routes, without memory.
pub(crate) fn parked_backend() -> Arc<ParkedBackend> {
    let routes = [MEMORY, DISK, OBJECT].concat();
    Arc::new(ParkedBackend::new(Vec::new(), routes).expect("no regions, no conflict"))
}

/// Ends all copies, and those that follow from them, well.
pub fn finish_all(parked: &ParkedBackend) {
    while let Some(pending) = parked.pending().first() {
        parked.finish(pending.id, Ok(()));
    }
}

/// Slots count next to nothing themselves, and lives begin anew all the time.
const LIMITS: SlotLimits = SlotLimits { pins: 2, children: 1 };
const LIVES: u32 = 37;

/// Staging slots are taken from the host's pool first; what is left is the tier's.
fn make_core(
    (mut pools, rule): ([FramePool; Tier::COUNT], Option<AdmissionKind>),
    staging: u32,
    tuning: Tuning,
    backends: &[Arc<dyn Backend>],
    clock: Arc<TestClock>,
    registry: &Registry,
) -> Arc<Core> {
    let staging = (0..staging).filter_map(|_| pools[Tier::Host.index()].take()).collect();
    let mut executor = Executor::default();
    backends.iter().for_each(|backend| executor.add(backend));
    let metrics = Metrics::new(registry, BLOCK_BYTES as u64, 1).expect("a registry of its own");
    // Others come between the steps of even a short plan; but one batch is still sent as one.
    let (placed, looked_at) = ((tuning.max_batch - 1).max(1), tuning.max_batch);
    let steps = Steps { placed, looked_at, ..Steps::default() };
    let specs = pools.map(|pool| specify(pool.with_lives(LIVES), rule));
    let table = Table::new(specs).in_steps(steps).with_slot_limits(LIMITS);
    let scrub = ScrubOptions::default();
    Core::new(Parts { table, executor, staging, trials: Vec::new(), scrub, clock, metrics, tuning })
}

/// Makes a chain resident in a tier, as if it had been brought there.
pub fn seed(core: &Arc<Core>, tier: Tier, chain: Chain<'_>) {
    seed_for(core, RequestInfo::default(), tier, chain);
}

/// The same, brought by a request.
pub fn seed_for(core: &Arc<Core>, info: RequestInfo, tier: Tier, chain: Chain<'_>) {
    let mut reserved = core.reserve(tier, chain, info);
    let blocks = reserved.frames.len();
    let mut table = core.table();
    let mut effects = table.fill(reserved.transfer, 0, reserved.frames.drain(..));
    while effects.has_more {
        effects = table.publish_more();
    }
    assert!(table.matches(chain).blocks(tier) >= blocks, "the test did not wait for these blocks");
    table.end_plan(reserved.transfer);
    let _ = table.take_effects();
}

/// A core and all that it works on.
#[derive(Debug)]
pub struct Rig {
    /// What is tested.
    pub core: Arc<Core>,
    /// Where the blocks lie.
    pub places: Places,
    /// Its clock.
    pub clock: Arc<TestClock>,
    /// Where it counts.
    pub registry: Registry,
}

/// Memory that plays a disk, and fails when told to.
pub type FaultyDisk = Arc<FaultBackend<Arc<MemoryStore>>>;

/// Few batches of few blocks, so that queues fill; copies that `tick` looks at are overdue at once,
/// and breakers let a probe through at once.
pub const TIGHT: Tuning = Tuning {
    max_concurrent: 2,
    max_batch: 3,
    segment_blocks: 4,
    queue_blocks: 16,
    timeout: Duration::ZERO,
    object_timeout: Duration::ZERO,
    breaker_pause: Duration::ZERO,
    flush_interval_ms: 1_000,
    dirty_watermark: 0.5,
    prefill_block_s: None,
};

impl Rig {
    /// Tiers of these sizes, joined by what `connect` makes.
    pub fn new(
        sizes: Sizes,
        tuning: Tuning,
        connect: impl FnOnce(&Places) -> Vec<Arc<dyn Backend>>,
    ) -> Self {
        Self::with(TestClock::default(), None, sizes, tuning, connect)
    }

    /// [`new`](Self::new), by another clock, and with a rule for what goes from the host tier to
    /// disk.
    pub fn with(
        clock: TestClock,
        rule: Option<AdmissionKind>,
        sizes: Sizes,
        tuning: Tuning,
        connect: impl FnOnce(&Places) -> Vec<Arc<dyn Backend>>,
    ) -> Self {
        let places = Places::new(sizes);
        let backends = connect(&places);
        let pools =
            Tier::ALL.map(|tier| places.region(tier).frames().expect("a region of its own"));
        let (clock, registry) = (Arc::new(clock), Registry::new());
        let core = make_core(
            (pools, rule),
            sizes.staging,
            tuning,
            &backends,
            Arc::clone(&clock),
            &registry,
        );
        Self { core, places, clock, registry }
    }

    /// A rig over stores, of which the disk fails when told to.
    ///
    /// # Panics
    /// If the system has no threads to give.
    pub fn with_faulty_disk(sizes: Sizes, tuning: Tuning) -> (Self, FaultyDisk) {
        let mut kept = None;
        let rig = Self::new(sizes, tuning, |places| {
            let memory = vec![Arc::clone(&places.device) as _, Arc::clone(&places.host) as _];
            let memory = MemcpyBackend::new(memory, 1).expect("threads");
            let disk =
                FaultBackend::new(Arc::clone(&places.disk), places.all()).expect("one geometry");
            let disk = kept.insert(Arc::new(disk));
            vec![
                Arc::new(memory) as Arc<dyn Backend>,
                places.verified(Arc::clone(disk)),
                places.verified(Arc::clone(&places.object)),
            ]
        });
        (rig, kept.expect("made with the rig"))
    }

    /// Takes device slots for what the device lacks of a chain, and fills them.
    pub fn fill(&self, chain: Chain<'_>) -> Filled {
        let mut reserved = self.core.reserve(Tier::Device, chain, RequestInfo::default());
        // The bytes of one epoch are not those of another.
        let chain = self.core.table().enter(chain);
        for (position, frame) in (reserved.before..).zip(&mut reserved.frames) {
            let block = self.places.device.write(frame).expect("a frame of the device");
            fill_pattern(number(chain.key(position)), block);
        }
        Filled(reserved)
    }

    /// Makes filled blocks resident.
    pub fn publish(&self, filled: Filled, chain: Chain<'_>) -> Transfer<Transferred> {
        let lease = self.core.lease(chain, RequestInfo::default());
        self.core.publish(filled.0, usize::MAX, lease)
    }

    /// Gives the slots back unpublished.
    pub fn abandon(&self, filled: Filled) {
        self.core.abandon(filled.0);
    }

    /// Whether the bytes of a block in a tier are its own; `None`: it is not there.
    pub fn is_intact(&self, tier: Tier, key: BlockKey) -> Option<bool> {
        let loan = self.core.table().lend(tier, key)?;
        let block = self.places.region(tier).read_loan(&loan).expect("a loan of this tier");
        let intact = has_pattern(number(key), block);
        self.core.table().return_loan(tier, loan);
        Some(intact)
    }

    /// The value of a counter or a gauge of whole numbers, summed over those of its labels that
    /// match all of `labels`.
    pub fn metric(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        metric(&self.registry, name, labels)
    }
}

fn specify(pool: FramePool, rule: Option<AdmissionKind>) -> TierSpec {
    let flush_to = match pool.tier() {
        Tier::Host => Some(Tier::Disk),
        Tier::Disk => Some(Tier::Object),
        Tier::Device | Tier::Object => None,
    };
    let eviction = EvictionKind::default();
    let capacity = pool.total() - pool.out();
    let pair = TierPair {
        upper: TierShape { capacity, eviction },
        lower: TierShape { capacity: 2 * capacity, eviction },
    };
    let admission = rule.filter(|_| pool.tier() == Tier::Host).map(|rule| rule.build(&pair));
    TierSpec { pool, policy: eviction.build(capacity), flush_to, admission }
}

/// Device slots that were filled and not yet published.
#[derive(Debug)]
pub struct Filled(Reserved);

impl Filled {
    /// How many slots.
    pub fn blocks(&self) -> usize {
        self.0.frames.len()
    }

    /// Blocks that found no room.
    pub const fn refused(&self) -> usize {
        self.0.refused
    }
}

/// The hash of the `number`-th block of a test.
pub fn hash(number: u32) -> BlockHash {
    BlockHash::from_u128(u128::from(number) * 0x1_0000_0001_0000_0001)
}

/// Whether NIXL is installed here; if not, that is said aloud.
pub fn has_nixl() -> bool {
    Library::load(None).inspect_err(|error| skip("nixl", error)).is_ok()
}

/// Waits until something holds, and fails with `otherwise` where it takes longer than `limit`.
///
/// # Panics
/// If it takes longer.
#[track_caller]
pub fn wait_until(limit: Duration, otherwise: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < deadline, "{otherwise}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The `n`-th chain of a test, of `blocks` blocks (at most 999).
pub fn chain(n: u32, blocks: u32) -> Vec<BlockHash> {
    (1..=blocks).map(|block| hash(1_000 * n + block)).collect()
}

/// The `n`-th of chains in three families, whose members share their first two or three blocks.
pub fn related_chain(n: usize) -> Vec<BlockHash> {
    let (family, member) = (1_000 * (n % 3) as u32, (n / 3) as u32);
    let shared = (1..=2 + member.min(1)).map(|i| family + i);
    let own = (0..3 + member).map(|i| family + 100 * (member + 1) + i);
    shared.chain(own).map(hash).collect()
}

/// Which block of a test a hash names.
pub const fn number_of(hash: BlockHash) -> usize {
    hash.get() as u32 as usize
}

/// Which block of a test a key names.
pub const fn number(key: BlockKey) -> usize {
    key.hash as u32 as usize
}

/// The value of a counter or a gauge of whole numbers, summed over those of its labels that match
/// all of `labels`.
pub fn metric(registry: &Registry, name: &str, labels: &[(&str, &str)]) -> u64 {
    let families = registry.gather();
    let rows =
        families.iter().filter(|family| family.name() == name).flat_map(MetricFamily::get_metric);
    let matching = rows.filter(|row| {
        labels.iter().all(|&(name, value)| {
            row.get_label().iter().any(|label| (label.name(), label.value()) == (name, value))
        })
    });
    matching.map(|row| (row.get_counter().get_value() + row.get_gauge().get_value()) as u64).sum()
}

/// A request of a tenant, or of none.
pub fn info_of(tenant: impl Into<Option<u32>>) -> RequestInfo {
    let hints = Hints { tenant: tenant.into(), ..Hints::default() };
    RequestInfo { hints, ..RequestInfo::default() }
}

/// Media that do what these episodes say.
///
/// # Panics
/// If one cannot be read.
pub fn chaos(script: &[&str]) -> Chaos {
    let episodes = script.iter().map(|text| text.parse().expect("an episode"));
    Chaos::new(Schedule::scripted(episodes))
}

/// All files in a directory, at any depth, by name; none if there is no such directory.
///
/// # Panics
/// If they cannot be listed.
pub fn files(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let below = |path: PathBuf| if path.is_dir() { files(&path) } else { vec![path] };
    let mut all: Vec<_> = paths.flat_map(below).collect();
    all.sort();
    all
}

/// Those whose names end with `.` and `extension`.
///
/// # Panics
/// As [`files`].
pub fn files_of(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut all = files(dir);
    all.retain(|path| path.extension().is_some_and(|own| own == extension));
    all
}
