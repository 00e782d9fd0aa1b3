//! Builds a manager's parts from its settings: the place that names concrete backends (but for
//! ranks) and policies.
//!
//! | module | holds |
//! |---|---|
//! | `durable` | tiers whose slots outlive the process |
//! | `engine` | an engine's memory in place of a device tier |
//! | `gpu` | the device tier in the memory of a GPU |
//! | `nixl` | which plugins run, and which backends use them |
//! | `objects` | the object tier, shared with other workers |
//! | `policies` | policies, by the settings |
//! | `ranks` | a leader's half of a manager, and a rank's |
//! | `sealed` | keys, and layers that encrypt around a backend |

mod durable;
mod engine;
mod gpu;
mod nixl;
mod objects;
mod policies;
mod ranks;
mod sealed;

use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::thread::available_parallelism;
use std::time::Duration;

use kvbm_settings::{
    Capacity, DiskBackend, MAX_BLOCK_BYTES, MAX_DISK_THREADS, MAX_TIER_BLOCKS,
    ObjectBackend as ObjectChoice, ObjectSettings, Settings,
};
use kvbm_tiers::geometry::{ALIGNMENT, MAX_SLOTS};
use kvbm_tiers::object::{OPERATION_LIMIT, ObjectBackend, Store, StoreOptions};
use kvbm_tiers::ranks::{Leader, RankRegistry};
use kvbm_tiers::sealed::{HostSeal, KeyRing, SEAL_BYTES, TenantKeys};
use kvbm_tiers::{
    Backend, Checksums, DeviceRegion, DiskOptions, DiskRegion, DramOptions, DramRegion, Frame,
    FramePool, Geometry, MediaLayer, MemcpyBackend, Memory, PersistOptions, Route, SetupError,
    SetupErrorKind, ThreadsBackend, Tier, UringBackend, Verified, VerifiedOnce, numa,
};
use prometheus::Registry;

use crate::api::allocation::Device;
use crate::api::engine_memory::EngineMemory;
use crate::api::manager::{Options, RouteReport};
use crate::durable::DurableTiers;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{Metrics, StateGauges, TenantMetrics, register_ranks};
use crate::names::fingerprint::Fingerprint;
use crate::scheduler::{Core, Executor, Parts, ScrubOptions, Tuning};
use crate::table::{Table, TierSpec};
use durable::{KeptTier, NameSeed, NamespaceNames};
use gpu::GpuTier;
use nixl::NixlChoice;
use objects::ObjectTier;
use ranks::LossHook;
use sealed::MemoryEnd;

pub use gpu::GpuReport;
pub(crate) use nixl::for_peers as nixl_for_peers;
pub use nixl::{NixlReport, PluginReport, probe as probe_nixl};
pub(crate) use objects::SharedStore;
pub(crate) use ranks::{OpenedRank, open_rank};
pub(crate) use sealed::Tenants;
pub use sealed::main_keys;

// Valid settings must not be refused here: the two leaf crates agree, and the largest tier fits.
const _: () = assert!(MAX_TIER_BLOCKS == MAX_SLOTS);
const _: () = assert!(MAX_BLOCK_BYTES.is_multiple_of(ALIGNMENT as u64));
const _: () =
    assert!(MAX_BLOCK_BYTES <= i64::MAX as u64 / MAX_SLOTS as u64 && size_of::<usize>() == 8);

/// What this machine has of CUDA and GPUDirect Storage. Starts the drivers behind them, and may
/// take seconds.
pub fn probe_gpu() -> GpuReport {
    gpu::probe()
}

/// The plugins of NIXL that this machine has as files; `library` as
/// [`NixlSettings::library`](kvbm_settings::NixlSettings::library).
pub fn installed_nixl_plugins(library: Option<&str>) -> Vec<String> {
    nixl::installed(library)
}

/// A manager's parts.
pub(crate) struct AssembledTiers {
    pub(crate) core: Arc<Core>,
    pub(crate) device: Option<Arc<dyn Device>>,
    /// The host tier's memory, or only that of the staging slots.
    pub(crate) host: Option<Arc<DramRegion>>,
    /// For blocks of other workers, if there are keys.
    pub(crate) host_seal: Option<Arc<HostSeal>>,
    pub(crate) routes: Vec<RouteReport>,
    /// What outlives the process.
    pub(crate) durable: DurableTiers,
    pub(crate) store: SharedStore,
    pub(crate) tenants: Tenants,
    /// Of a manager with ranks.
    pub(crate) leader: Option<Weak<Leader>>,
}

/// Opens all tiers, keeping those of the cache group `suffix` apart from others'. Takes memory,
/// makes files and probes stores, so it works on a thread of its own.
pub(crate) async fn open(
    settings: Settings,
    options: &Options,
    suffix: &str,
) -> Result<AssembledTiers> {
    settings.validate().map_err(|error| Error::invalid(error.to_string()))?;
    let block_bytes = settings.block_bytes.unwrap_or_default();
    let world = options.ranks.as_ref().map_or(1, |group| u64::from(group.world));
    // A copy of a block moves a slice of it in every rank.
    let metrics = Metrics::new(&options.registry, block_bytes * world, options.block_tokens)?;
    let (clock, block_tokens) = (Arc::clone(&options.clock), options.block_tokens);
    let (layer, fingerprint) = (options.media_layer.clone(), options.fingerprint.clone());
    fingerprint
        .as_ref()
        .map_or(Ok(()), |fingerprint| fingerprint.validate(options.block_tokens))?;
    let (group, on_durable) = (options.ranks.clone(), options.on_durable.clone());
    let engine = options.engine.clone();
    let registry = options.registry.clone();
    let suffix = suffix.to_owned();
    let build = move || -> Result<AssembledTiers> {
        let on_loss = LossHook::default();
        let known = fingerprint.as_ref();
        durable::warn_of_cold_start(&settings, known);
        let named = namespace(&settings, known, &suffix);
        let tiers = match group {
            Some(_) if layer.is_some() => return Err(ranks::media_are_elsewhere()),
            Some(group) => {
                OpenedRegions::lead(&settings, known, named, group, &on_loss, engine.as_ref())?
            }
            None => {
                let engine = engine.as_ref().map(EngineMemory::region).transpose()?;
                OpenedRegions::open(&settings, named, layer, engine)?
            }
        };
        let tuning = tuning(&settings, block_tokens);
        let routes = tiers.routes();
        let host_seal = tiers.host_seal(&settings);
        let tenants = tiers.tenants();
        let leader = tiers.leader.as_ref().map(Arc::downgrade);
        let OpenedRegions {
            device,
            host,
            specs,
            staging,
            trials,
            executor,
            roll_call,
            fallbacks,
            kept,
            objects,
            ..
        } = tiers;
        fallbacks.into_iter().for_each(|wanted| metrics.fell_back(wanted));
        let directories =
            if settings.disk.capacity.is_some() { settings.disk.dirs.len() } else { 0 };
        metrics.count_from_zero(
            routes.iter().map(|route| Route::new(route.from, route.to)),
            directories,
        );
        let table = Table::new(specs);
        let table = fingerprint.into_iter().fold(table, Table::with_fingerprint);
        objects.iter().try_for_each(|objects| objects.export(&registry))?;
        roll_call.into_iter().try_for_each(|roll_call| register_ranks(&registry, roll_call))?;
        let store = objects.as_ref().map(ObjectTier::store).unwrap_or_default();
        let scrub = ScrubOptions {
            bytes_per_second: u64::from(settings.transfer.scrub_mib_per_second) << 20,
            block_bytes,
            memory: host.clone().filter(|host| host.persists().is_some()),
        };
        let (table, durable) =
            durable::resume(table, kept, objects, on_durable.as_ref(), &metrics)?;
        let core =
            Core::new(Parts { table, executor, staging, trials, scrub, clock, metrics, tuning });
        on_loss.set(&core);
        store.keep_looking(&core);
        Ok(AssembledTiers {
            core,
            device,
            host,
            host_seal,
            routes,
            durable,
            store,
            tenants,
            leader,
        })
    };
    tokio::task::spawn_blocking(build).await.map_err(|error| {
        Error::caused(ErrorKind::Unavailable, "opening the tiers was interrupted", error)
    })?
}

/// Long enough for a store that refuses for a moment, short enough to notice soon that it is well.
const BREAKER_PAUSE: Duration = Duration::from_millis(500);
/// The object client gives up earlier by itself.
const OBJECT_TIMEOUT: Duration = Duration::from_secs(OPERATION_LIMIT.as_secs() + 10);

fn tuning(settings: &Settings, block_tokens: u64) -> Tuning {
    Tuning {
        max_concurrent: settings.transfer.max_concurrent as usize,
        max_batch: settings.transfer.max_batch as usize,
        segment_blocks: segment_blocks(settings),
        queue_blocks: settings.transfer.queue_blocks as usize,
        timeout: Duration::from_millis(settings.transfer.timeout_ms),
        object_timeout: OBJECT_TIMEOUT,
        breaker_pause: BREAKER_PAUSE,
        flush_interval_ms: settings.flush.interval_ms,
        dirty_watermark: settings.flush.dirty_watermark,
        prefill_block_s: prefill_block_s(settings, block_tokens),
    }
}

/// Blocks that go into a segment object.
fn segment_blocks(settings: &Settings) -> usize {
    // A block may be larger than a segment: then each is one.
    (settings.object.segment_bytes / settings.block_bytes.unwrap_or_default().max(1)).max(1)
        as usize
}

/// Seconds that the engine takes to compute a block, if it said so.
fn prefill_block_s(settings: &Settings, block_tokens: u64) -> Option<f64> {
    let rate = settings.transfer.prefill_tokens_per_second;
    (rate > 0).then(|| block_tokens as f64 / f64::from(rate))
}

/// Tiers as they are opened, fastest first.
#[derive(Default)]
struct OpenedRegions {
    device: Option<Arc<dyn Device>>,
    emulated: Option<Arc<DramRegion>>,
    /// The engine's memory, in place of a device tier.
    engine: Option<Arc<DeviceRegion>>,
    /// Whether there is such memory, here or in the ranks.
    has_engine: bool,
    gpu: Option<Box<dyn GpuTier>>,
    host: Option<Arc<DramRegion>>,
    specs: Vec<TierSpec>,
    staging: Vec<Frame>,
    /// One slot of each directory of the disk tier, if there are several.
    trials: Vec<Frame>,
    executor: Executor,
    /// Of a manager with ranks.
    leader: Option<Arc<Leader>>,
    roll_call: Option<RankRegistry>,
    /// Better backends that are missing.
    fallbacks: Vec<&'static str>,
    /// Stands around the media.
    media_layer: Option<Arc<dyn MediaLayer>>,
    /// Names the files and objects that are kept.
    namespace: NamespaceNames,
    /// Keys for what outlives the process.
    keys: Option<Arc<KeyRing>>,
    /// For each encrypted tier.
    tenant_keys: Vec<(Tier, Arc<TenantKeys>)>,
    /// Those whose slots outlive the process.
    kept: Vec<KeptTier>,
    objects: Option<ObjectTier>,
    /// Directories of the disk tier that cannot be used now.
    away: Vec<PathBuf>,
}

impl OpenedRegions {
    fn open(
        settings: &Settings,
        namespace: NamespaceNames,
        media_layer: Option<Arc<dyn MediaLayer>>,
        engine: Option<Arc<DeviceRegion>>,
    ) -> Result<Self> {
        policies::warn_of_no_budget(settings);
        let has_engine = engine.is_some();
        let keys = sealed::main_keys(settings)?;
        let mut tiers =
            Self { engine, has_engine, media_layer, namespace, keys, ..Self::default() };
        // In this order: lower tiers read and write the host's memory, which is best near the GPU.
        tiers.open_device(settings)?;
        tiers.open_host(settings)?;
        tiers.connect_memory(settings)?;
        tiers.connect_engine(settings)?;
        let nixl = NixlChoice::start(settings)?;
        tiers.open_disk(settings, &nixl)?;
        tiers.open_object(settings, &nixl)?;
        tiers.link_flushes(settings);
        Ok(tiers)
    }

    fn open_device(&mut self, settings: &Settings) -> Result<()> {
        let Some(capacity) = settings.device.capacity else { return Ok(()) };
        let slots = slots(capacity, settings)?;
        if let Some(gpu) = gpu::open(settings, geometry(slots, settings)?)? {
            self.add_tier(gpu.frames()?, settings);
            self.device = Some(gpu.window()?);
            self.gpu = Some(gpu);
            return Ok(());
        }
        let region =
            Arc::new(DramRegion::emulated_device(dram(slots, settings, 0)?).map_err(setup)?);
        self.add_tier(frames(&region)?, settings);
        self.device = Some(Arc::new(Arc::clone(&region)));
        self.emulated = Some(region);
        Ok(())
    }

    /// The host region also holds the staging slots, with or without a host tier.
    fn open_host(&mut self, settings: &Settings) -> Result<()> {
        let HostSlots { tier, staging } = host_slots(settings)?;
        if tier + staging == 0 {
            return Ok(());
        }
        let kept = settings.host.persist.clone().filter(|_| tier > 0);
        if kept.is_some() {
            self.seal_host(&settings.host)?;
        }
        let seal_bytes = self.keys_of(Tier::Host).map_or(0, |_| SEAL_BYTES);
        let options = dram(tier + staging, settings, seal_bytes)?;
        let kept = kept.map(|dir| PersistOptions {
            dir,
            namespace: self.namespace.name.clone(),
            slots: tier,
        });
        let open = || match &kept {
            Some(place) => DramRegion::persistent(options, place),
            None if settings.peers.enabled && settings.peers.shared_memory => shareable(options),
            None => DramRegion::host(options),
        };
        let node = self.gpu.as_ref().and_then(|gpu| gpu.numa_node());
        let region = numa::near(node, open).map_err(setup)?;
        let mut pool = frames(&region)?;
        // The last slots: the others persist, with or without a tier below.
        self.staging.extend(pool.set_aside(staging));
        if tier > 0 {
            self.add_tier(pool, settings);
        }
        self.keep_host(&region, &settings.host, tier)?;
        self.host = Some(Arc::new(region));
        Ok(())
    }

    fn connect_memory(&mut self, settings: &Settings) -> Result<()> {
        let has_device = self.gpu.is_some() || self.emulated.is_some();
        if self.host.is_none() || !has_device {
            return Ok(());
        }
        let end = self.host_end(sealed::device_run(settings), settings)?;
        let memory = Arc::clone(&end.memory);
        let backend = if let Some(gpu) = &self.gpu {
            self.with_layer(gpu.connect_memory(memory)?, &end.memory)?
        } else {
            let device = self.emulated.iter().map(|device| Arc::clone(device) as _);
            let threads = settings.transfer.copy_threads as usize;
            let both = device.chain([memory]).collect();
            self.with_layer(MemcpyBackend::new(both, threads).map_err(setup)?, &end.memory)?
        };
        self.connect_host(backend, end)
    }

    /// The engine's memory takes the place of the device tier, and is tried at once.
    fn connect_engine(&mut self, settings: &Settings) -> Result<()> {
        let Some(engine) = self.engine.clone() else { return Ok(()) };
        engine::check(engine.segments().block_bytes() as u64, settings)?;
        let host = self.host.clone().ok_or_else(engine::no_memory)?;
        let end = self.host_end(sealed::device_run(settings), settings)?;
        let backend = engine::connect(&engine, Arc::clone(&end.memory), settings)?;
        let backend = self.with_layer(backend, &end.memory)?;
        let limit = Duration::from_millis(settings.transfer.timeout_ms);
        if let Some((region, frame)) = end.borrow_slot() {
            let mut slots = vec![frame];
            engine::try_out(&engine, &backend, limit, &region, None, &mut slots)?;
            slots.into_iter().for_each(|frame| end.return_slot(frame));
        } else {
            let pool = self.specs.iter_mut().find(|spec| spec.pool.tier() == Tier::Host);
            let pool = pool.map(|spec| &mut spec.pool);
            engine::try_out(&engine, &backend, limit, &host, pool, &mut self.staging)?;
        }
        self.connect_host(backend, end)
    }

    fn open_disk(&mut self, settings: &Settings, nixl: &NixlChoice) -> Result<()> {
        let Some(capacity) = settings.disk.capacity else { return Ok(()) };
        let kept = settings.disk.keep && self.namespace.identity.is_some();
        let keys = sealed::KeyPlace::in_files(&settings.disk.dirs, kept);
        let end = self.memory_end(Tier::Disk, 1, keys, settings)?;
        let block_bytes = end.memory.block_bytes();
        let dirs = settings.disk.dirs.len() as u32;
        // Each of several directories has one more slot, for its trials after a failure.
        let trials = if dirs > 1 { dirs } else { 0 };
        let slots = slots(capacity, settings)?.min(MAX_SLOTS.saturating_sub(trials)) + trials;
        let geometry = Geometry::new(slots, block_bytes).map_err(setup)?;
        let options = DiskOptions {
            geometry,
            dirs: settings.disk.dirs.clone(),
            o_direct: settings.disk.o_direct,
            zerofill_fallback: settings.disk.zerofill_fallback,
            keep: settings.disk.keep.then(|| self.namespace.name.clone()),
        };
        let new = durable::missing_files(&options);
        let region = Arc::new(DiskRegion::open(&options).map_err(setup)?);
        let checksums = Arc::new(Checksums::new());
        let mut away = vec![false; options.dirs.len()];
        region.absent().for_each(|dir| away[dir] = true);
        self.keep_disk(&options, &new, &mut away, &checksums)?;
        let ends = DiskEnds { end, region, depth: settings.disk.queue_depth, checksums };
        self.connect_disk(ends, settings.disk.backend, nixl)?;
        let mut pool = FramePool::sharded(Tier::Disk, geometry.slots(), dirs);
        self.trials = pool.set_aside(trials);
        if let Some(layer) = &self.media_layer {
            layer.set_directories(dirs);
        }
        let away = (0..away.len()).filter(|&dir| away[dir]);
        away.clone().for_each(|dir| pool.close_shard(dir, true));
        self.away.extend(away.map(|dir| options.dirs[dir].clone()));
        if self.away.len() == options.dirs.len() {
            return Err(no_directory(&self.away));
        }
        self.add_tier(pool, settings);
        Ok(())
    }

    fn connect_disk(
        &mut self,
        ends: DiskEnds,
        backend: DiskBackend,
        nixl: &NixlChoice,
    ) -> Result<()> {
        self.connect_disk_and_device(&ends, backend)?;
        match backend {
            // GPUDirect Storage serves only the device: the host still needs one of these.
            DiskBackend::Auto | DiskBackend::Gds => match ends.ring() {
                Ok(ring) => self.connect_verified_aside(ring, ends.end, ends.checksums),
                Err(error) => {
                    // Containers often forbid it (seccomp). An operation in flight takes a thread
                    // here, not a place in a ring.
                    tracing::warn!(%error, "no io_uring: the disk tier uses threads");
                    let depth = ends.depth.min(MAX_DISK_THREADS);
                    self.connect_threads(DiskEnds { depth, ..ends })
                }
            },
            DiskBackend::Uring => {
                let ring = ends.ring().map_err(setup)?;
                self.connect_verified_aside(ring, ends.end, ends.checksums)
            }
            DiskBackend::Threads => self.connect_threads(ends),
            DiskBackend::Nixl => {
                let DiskEnds { end, region, depth, checksums } = ends;
                let backend = nixl.plugin("POSIX")?.disk(Arc::clone(&end.memory), region, depth)?;
                self.connect_verified_aside(backend, end, checksums)
            }
        }
    }

    /// Without host memory, if that is possible and allowed.
    fn connect_disk_and_device(&mut self, ends: &DiskEnds, backend: DiskBackend) -> Result<()> {
        let asked_for = backend == DiskBackend::Gds;
        let (region, checksums) = (Arc::clone(&ends.region), Arc::clone(&ends.checksums));
        match &self.gpu {
            // Settings that demand it are refused if there are keys.
            Some(_) if ends.end.is_sealed() && backend == DiskBackend::Auto => {
                tracing::info!(
                    "blocks go from disk to the device through host memory, where they are decrypted"
                );
                self.fallbacks.push("gds");
            }
            Some(gpu) if asked_for || backend == DiskBackend::Auto => {
                match gpu.connect_disk(region, checksums, ends.depth, asked_for) {
                    Ok(gds) => self.connect(gds)?,
                    // If it was asked for, its absence is an error; `auto` logs it and does
                    // without.
                    Err(error) if asked_for => return Err(error),
                    Err(error) => {
                        tracing::info!(%error, "blocks go from disk to the device through host memory");
                        self.fallbacks.push("gds");
                    }
                }
            }
            None if asked_for => return Err(no_gpu_for_gds()),
            _ => {}
        }
        Ok(())
    }

    fn connect_threads(&mut self, ends: DiskEnds) -> Result<()> {
        let DiskEnds { end, region, depth, checksums } = ends;
        let threads = ThreadsBackend::new(Arc::clone(&end.memory), region, depth).map_err(setup)?;
        let threads = self.with_layer(threads, &end.memory)?;
        self.connect_verified(threads, end, checksums)
    }

    fn open_object(&mut self, settings: &Settings, nixl: &NixlChoice) -> Result<()> {
        let object = &settings.object;
        let Some(url) = object.place() else { return Ok(()) };
        let store = Store::open(url, &store_options(object)).map_err(setup)?;
        let slots = object_slots(settings)?;
        match object.backend {
            ObjectChoice::Native => {
                let store = match &self.media_layer {
                    // Around the client, so that it also tests how the backend handles a failing
                    // store.
                    Some(layer) => layer.around_store(store),
                    None => store,
                };
                self.connect_objects(store, settings)?;
            }
            ObjectChoice::Nixl => {
                let end = self.memory_end(Tier::Object, 1, sealed::KeyPlace::Nowhere, settings)?;
                let namespace = self.namespace.name.clone();
                let memory = Arc::clone(&end.memory);
                let plugin = nixl.plugin("OBJ")?;
                let backend =
                    plugin.objects(memory, store, slots, namespace, object.concurrency)?;
                self.connect_verified_aside(backend, end, Arc::default())?;
            }
        }
        self.add_tier(FramePool::new(Tier::Object, slots), settings);
        Ok(())
    }

    fn connect_objects(&mut self, store: Store, settings: &Settings) -> Result<()> {
        let segment_blocks = segment_blocks(settings);
        let is_shared = self.namespace.identity.is_some();
        let keys = if is_shared { sealed::KeyPlace::In(&store) } else { sealed::KeyPlace::Nowhere };
        let end = self.memory_end(Tier::Object, segment_blocks, keys, settings)?;
        let kept_epoch = self.kept.iter().flat_map(KeptTier::epochs).map(|kept| kept.epoch).max();
        let keys = self.keys.as_ref();
        let options = objects::options(
            &settings.object,
            &self.namespace,
            keys,
            segment_blocks,
            end.memory.block_bytes(),
            kept_epoch.unwrap_or_default(),
        );
        let checksums = Arc::new(Checksums::new());
        // `Verified` sums each block already; a segment's footer takes the sums from there.
        let known = Some(Arc::clone(&checksums));
        let backend =
            ObjectBackend::new(store, Arc::clone(&end.memory), known, &options).map_err(setup)?;
        let backend = Arc::new(backend);
        let (slots, is_shared) = (object_slots(settings)?, options.sharing.is_some());
        let found =
            ObjectTier::find(Arc::clone(&backend), slots, is_shared, self.keys_of(Tier::Object))?;
        self.objects = Some(found);
        self.connect_verified(backend, end, checksums)
    }

    fn connect_verified(
        &mut self,
        backend: impl Backend + 'static,
        end: MemoryEnd,
        checksums: Arc<Checksums>,
    ) -> Result<()> {
        let verified = Verified::new(backend, Arc::clone(&end.memory), checksums).map_err(setup)?;
        self.connect_sealed(verified, end)
    }

    /// Other threads verify the reads of a backend with one thread. Pools verify by themselves. The
    /// layer around media is put around it.
    fn connect_verified_aside(
        &mut self,
        backend: impl Backend + 'static,
        end: MemoryEnd,
        checksums: Arc<Checksums>,
    ) -> Result<()> {
        let backend = self.with_layer(backend, &end.memory)?;
        let verified = Verified::new(backend, Arc::clone(&end.memory), checksums).map_err(setup)?;
        self.connect_sealed(verified.on_threads_of_its_own(), end)
    }

    /// Inside the verifying layer. GPUDirect Storage verifies by itself, so its routes have no
    /// layer.
    fn with_layer(
        &self,
        backend: impl Backend + 'static,
        memory: &Arc<dyn Memory>,
    ) -> Result<Arc<dyn Backend>> {
        let backend = Arc::new(backend);
        match &self.media_layer {
            Some(layer) => layer.around(backend, Arc::clone(memory)).map_err(setup),
            None => Ok(backend),
        }
    }

    /// Around every backend with an end in memory that an earlier process may have left.
    fn connect(&mut self, backend: impl Backend + 'static) -> Result<()> {
        let is_near_host = backend.routes().iter().any(|route| route.touches(Tier::Host));
        let kept = self.host.clone().filter(|host| is_near_host && host.persists().is_some());
        let backend: Arc<dyn Backend> = match kept {
            Some(host) => Arc::new(VerifiedOnce::new(backend, host).map_err(setup)?),
            None => Arc::new(backend),
        };
        self.executor.add(&backend);
        Ok(())
    }

    fn add_tier(&mut self, pool: FramePool, settings: &Settings) {
        let policy = policies::eviction(settings, own_slots(&pool));
        // Its flush destination is known once all tiers are: `link_flushes`.
        self.specs.push(TierSpec { pool, policy, flush_to: None, admission: None });
    }

    /// Each tier below the device flushes to the next one.
    fn link_flushes(&mut self, settings: &Settings) {
        let places = self.specs.iter().map(|spec| (spec.pool.tier(), own_slots(&spec.pool)));
        let below: Vec<policies::TierSlots> =
            places.filter(|&(tier, _)| tier > Tier::Device).collect();
        for spec in &mut self.specs {
            let own = below.iter().position(|&(tier, _)| tier == spec.pool.tier());
            let Some([upper, lower]) = own.and_then(|own| below.get(own..own + 2)) else {
                continue;
            };
            spec.flush_to = Some(lower.0);
            spec.admission = policies::admission(*upper, *lower, settings);
        }
    }

    fn routes(&self) -> Vec<RouteReport> {
        // An engine's memory is no tier, but blocks come and go there too.
        let engine = self.has_engine.then_some(Tier::Device);
        let tiers = || engine.into_iter().chain(self.specs.iter().map(|spec| spec.pool.tier()));
        let pairs = tiers()
            .flat_map(|from| tiers().map(move |to| Route { from, to }))
            .filter(|route| route.from != route.to);
        let name = |route| {
            let backend = self.executor.backend(route);
            backend.map_or_else(
                || "via host".to_owned(),
                |backend| self.told_sealed(route, backend.name()),
            )
        };
        pairs
            .map(|route| RouteReport { from: route.from, to: route.to, backend: name(route) })
            .collect()
    }
}

/// What a backend of the disk tier works with.
struct DiskEnds {
    end: MemoryEnd,
    region: Arc<DiskRegion>,
    depth: u32,
    /// Checksums of the tier's blocks, for every writer.
    checksums: Arc<Checksums>,
}

impl DiskEnds {
    fn ring(&self) -> Result<UringBackend, SetupError> {
        UringBackend::new(Arc::clone(&self.end.memory), Arc::clone(&self.region), self.depth)
    }
}

/// A host tier that neighbours may map, where the system can have one.
fn shareable(options: DramOptions) -> Result<DramRegion, SetupError> {
    DramRegion::shareable_host(options).or_else(|error| match error.kind() {
        SetupErrorKind::Unavailable => {
            tracing::warn!(%error, "workers of this host read the host tier by TCP (peers.shared_memory)");
            DramRegion::host(options)
        }
        _ => Err(error),
    })
}

fn no_directory(dirs: &[PathBuf]) -> Error {
    let message =
        format!("none of {dirs:?} can be used; choose other disk.dirs (DYN_KVBM_DISK_CACHE_DIR)");
    Error::unavailable(message)
}

fn no_gpu_for_gds() -> Error {
    let message = "disk.backend (DYN_KVBM_DISK_BACKEND) is gds, and the device tier is not on a GPU: set \
         device.capacity and device.backend = \"cuda\", or disk.backend to auto, uring, threads or nixl";
    Error::unavailable(message)
}

/// Slots that can hold a block of the tier: staging slots are taken from the host's pool
/// beforehand.
const fn own_slots(pool: &FramePool) -> u32 {
    pool.total() - pool.out()
}

fn frames(region: &DramRegion) -> Result<FramePool> {
    region.frames().ok_or_else(|| Error::invalid("a region has one slot allocator only"))
}

/// Slots with room for a block and `seal_bytes` bytes to seal it.
fn dram(slots: u32, settings: &Settings, seal_bytes: usize) -> Result<DramOptions> {
    let fault_threads = available_parallelism().map_or(1, usize::from);
    let plain = geometry(slots, settings)?;
    let geometry = Geometry::new(slots, plain.block_bytes() + seal_bytes).map_err(setup)?;
    Ok(DramOptions { geometry, huge_pages: settings.host.huge_pages, fault_threads })
}

fn geometry(slots: u32, settings: &Settings) -> Result<Geometry> {
    let block_bytes =
        usize::try_from(settings.block_bytes.unwrap_or_default()).unwrap_or(usize::MAX);
    Geometry::new(slots, block_bytes).map_err(setup)
}

/// Slots of the host region: those of the tier, and others.
#[derive(Clone, Copy, Debug)]
struct HostSlots {
    tier: u32,
    staging: u32,
}

fn host_slots(settings: &Settings) -> Result<HostSlots> {
    let has_lower = settings.disk.capacity.is_some() || settings.object.place().is_some();
    Ok(HostSlots {
        tier: settings.host.capacity.map_or(Ok(0), |capacity| slots(capacity, settings))?,
        // Memory alone connects device and host; only lower tiers may need a stop between.
        staging: if has_lower { settings.host.staging_blocks } else { 0 },
    })
}

fn object_slots(settings: &Settings) -> Result<u32> {
    settings.object.capacity.map_or(Ok(MAX_SLOTS), |capacity| slots(capacity, settings))
}

fn slots(capacity: Capacity, settings: &Settings) -> Result<u32> {
    let blocks = capacity.blocks(settings.block_bytes.unwrap_or_default());
    u32::try_from(blocks).ok().filter(|&slots| slots <= MAX_SLOTS).ok_or_else(|| {
        let message = format!(
            "a tier of {blocks} blocks is too large: choose at most {MAX_SLOTS}, or larger blocks"
        );
        Error::invalid(message)
    })
}

/// Keeps the files and objects of other block sizes, fingerprints and cache groups apart. Without a
/// fingerprint nothing in it tells models apart: no process reads what another has written.
fn namespace(
    settings: &Settings,
    fingerprint: Option<&Fingerprint>,
    suffix: &str,
) -> NamespaceNames {
    let block_bytes = settings.block_bytes.unwrap_or_default();
    // Encrypted and plain data lie side by side, and neither is taken for the other.
    let form = if settings.encryption.is_on() { "v2-sealed" } else { "v1-block" };
    let name = match fingerprint {
        Some(fingerprint) => format!("{form}{block_bytes}-{fingerprint}{suffix}"),
        None => format!("{form}{block_bytes}{suffix}"),
    };
    NamespaceNames { name, identity: fingerprint.map(NameSeed::of), shares_objects: true }
}

/// How the object store is reached that the settings name.
pub fn store_options(object: &ObjectSettings) -> StoreOptions {
    StoreOptions {
        endpoint: object.endpoint.clone(),
        region: object.region.clone(),
        access_key: object.access_key.clone(),
        secret_key: object.secret_key.clone(),
    }
}

fn setup(error: SetupError) -> Error {
    let kind = match error.kind() {
        SetupErrorKind::Invalid => ErrorKind::Invalid,
        _ => ErrorKind::Unavailable,
    };
    let message = error.to_string();
    Error::caused(kind, message, error)
}

/// Exports the state of the table and the queues.
pub(crate) fn export(
    registry: &Registry,
    core: &Arc<Core>,
    settings: &Settings,
    block_tokens: u64,
) -> Result<()> {
    let bytes_per_day = policies::bytes_per_day(settings);
    StateGauges::register(registry, Arc::downgrade(core), bytes_per_day)?;
    TenantMetrics::register(registry, core, settings, block_tokens)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn policies_are_not_sized_with_staging_slots() {
        let mut pool = FramePool::new(Tier::Host, 20);
        let _staging = pool.set_aside(4);
        assert_eq!(own_slots(&pool), 16);
    }

    fn capacities() -> impl Strategy<Value = Option<Capacity>> {
        let near_the_end = (0..100_u64).prop_map(|less| u64::from(MAX_SLOTS) + 20 - less);
        prop_oneof![
            Just(None),
            any::<u64>().prop_map(|bytes| Some(Capacity::Bytes(bytes))),
            (0..1_u64 << 40).prop_map(|bytes| Some(Capacity::Bytes(bytes))),
            (0..1_u64 << 33).prop_map(|blocks| Some(Capacity::Blocks(blocks))),
            near_the_end.prop_map(|blocks| Some(Capacity::Blocks(blocks))),
        ]
    }

    fn any_settings() -> impl Strategy<Value = Settings> {
        let sizes = (capacities(), capacities(), capacities(), capacities());
        let block_bytes = prop_oneof![
            any::<u64>(),
            1..5_000_u64,
            Just(MAX_BLOCK_BYTES),
            Just(MAX_BLOCK_BYTES + 1)
        ];
        (sizes, block_bytes, 0..200_u32, any::<bool>()).prop_map(
            |(sizes, block_bytes, staging, has_url)| {
                let mut settings =
                    Settings { block_bytes: Some(block_bytes), ..Settings::default() };
                (settings.device.capacity, settings.host.capacity) = (sizes.0, sizes.1);
                (settings.disk.capacity, settings.object.capacity) = (sizes.2, sizes.3);
                settings.host.staging_blocks = staging;
                settings.object.url = has_url.then(|| "memory:///".to_owned());
                settings
            },
        )
    }

    /// Every size that [`OpenedRegions::open`] takes from the settings.
    fn sizes(settings: &Settings) -> Result<()> {
        for capacity in [settings.device.capacity, settings.disk.capacity].into_iter().flatten() {
            geometry(slots(capacity, settings)?, settings)?;
        }
        let HostSlots { tier, staging } = host_slots(settings)?;
        if tier + staging > 0 {
            geometry(tier + staging, settings)?;
        }
        settings.object.place().map_or(Ok(0), |_| object_slots(settings)).map(drop)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]
        #[test]
        fn valid_settings_have_sizes_that_can_be_opened(settings in any_settings()) {
            if settings.validate().is_ok() {
                prop_assert!(sizes(&settings).is_ok(), "{:?}", sizes(&settings));
            }
        }
    }

    #[test]
    fn what_cannot_be_numbered_is_always_refused_in_one_wording() {
        let mut settings = Settings { block_bytes: Some(4096), ..Settings::default() };
        settings.disk.capacity = Some(Capacity::Blocks(u64::from(MAX_SLOTS) + 1));
        let words = "a tier of 1073741817 blocks is too large";
        assert!(settings.validate().expect_err(words).to_string().contains(words));
        assert!(sizes(&settings).expect_err(words).to_string().contains(words));
    }
}
