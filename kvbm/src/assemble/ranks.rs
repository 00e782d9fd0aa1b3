//! The two halves of a manager with ranks: a leader has slots without bytes, a rank has bytes
//! without a table.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use kvbm_settings::Settings;
use kvbm_tiers::ranks::{JoinOptions, Leader, LeaderOptions, Member, Membership};
use kvbm_tiers::{Backend, Frame, FramePool, Loan, Route, Tier};

use super::durable::{NameSeed, resume_rank};
use super::{
    HostSlots, NamespaceNames, OpenedRegions, host_slots, namespace, object_slots, own_slots,
    policies, sealed, setup, slots,
};
use crate::api::allocation::Device;
use crate::api::engine_memory::EngineMemory;
use crate::api::rank::{RankGroup, RankOptions};
use crate::durable::DurableTiers;
use crate::error::{Error, Result};
use crate::names::fingerprint::{Fingerprint, Ranks};
use crate::peers::{RankListener, RankPeers};
use crate::scheduler::Core;

/// When a rank is lost, all residency ends, since a part of every block is gone.
#[derive(Clone, Default)]
pub(super) struct LossHook(Arc<RankLosses>);

#[derive(Default)]
struct RankLosses {
    core: OnceLock<Weak<Core>>,
    /// A rank was lost since blocks were made resident again, perhaps before there was a core.
    any: AtomicBool,
}

impl LossHook {
    /// Nothing is resident yet: a rank that was lost so far took nothing along.
    fn begin(&self) {
        self.0.any.store(false, Ordering::SeqCst);
    }

    /// Sets the core. A rank may have been lost since the restore.
    pub(super) fn set(&self, core: &Arc<Core>) {
        self.0.core.get_or_init(|| Arc::downgrade(core));
        if self.0.any.load(Ordering::SeqCst) {
            core.forget_all();
        }
    }

    fn lost(&self) {
        // Before reading the core: one of the two sides sees the other.
        self.0.any.store(true, Ordering::SeqCst);
        if let Some(core) = self.0.core.get().and_then(Weak::upgrade) {
            core.forget_all();
        }
    }
}

impl OpenedRegions {
    /// The tiers of a leader: it counts slots, and their bytes lie in the ranks, for which this
    /// waits.
    pub(super) fn lead(
        settings: &Settings,
        fingerprint: Option<&Fingerprint>,
        namespace: NamespaceNames,
        group: RankGroup,
        on_loss: &LossHook,
        engine: Option<&EngineMemory>,
    ) -> Result<Self> {
        policies::warn_of_no_budget(settings);
        engine.map_or(Ok(()), |engine| engine.check_in_ranks(settings))?;
        let HostSlots { tier: host, staging } = host_slots(settings)?;
        let slots = slots_by_tier(settings, engine)?;
        let namespace = namespace.part(&format!("ranks{}", group.world));
        let debts = debts_path(&namespace, settings, &group.dir);
        let options = LeaderOptions {
            dir: group.dir,
            world: group.world,
            slots,
            block_bytes: settings.block_bytes.unwrap_or_default(),
            fingerprint: shared_name(fingerprint),
            limit: group.limit,
            debts,
        };
        let keys = sealed::main_keys(settings)?;
        let has_engine = engine.is_some();
        let mut tiers = Self { has_engine, namespace, keys, ..Self::default() };
        let mut of_tiers = slots;
        if has_engine {
            // An engine's memory is no tier: it gives out its slots itself.
            of_tiers[Tier::Device.index()] = 0;
        }
        tiers.count_slots(of_tiers, staging, settings);
        let hook = on_loss.clone();
        let leader = Arc::new(Leader::open(options, move |_| hook.lost()).map_err(setup)?);
        on_loss.begin();
        tiers.roll_call = Some(leader.roll_call());
        tiers.leader = Some(Arc::clone(&leader));
        let mut own_slots = slots;
        own_slots[Tier::Host.index()] = host;
        tiers.keep_in_ranks(&leader, own_slots, settings)?;
        tiers.connect(leader)?;
        tiers.link_flushes(settings);
        Ok(tiers)
    }

    fn count_slots(&mut self, slots: [u32; Tier::COUNT], staging: u32, settings: &Settings) {
        for tier in Tier::ALL {
            let mut pool = FramePool::new(tier, slots[tier.index()]).in_random_lives();
            if tier == Tier::Host {
                self.staging.extend(pool.set_aside(staging));
            }
            if own_slots(&pool) > 0 {
                self.add_tier(pool, settings);
            }
        }
        if slots[Tier::Device.index()] > 0 {
            self.device = Some(Arc::new(RemoteRegions));
        }
    }
}

/// Where a leader notes what its ranks must still forget, if they keep anything: beside its own
/// indices, else where they meet.
fn debts_path(namespace: &NamespaceNames, settings: &Settings, meeting: &Path) -> Option<PathBuf> {
    let (disk, host) = (&settings.disk, &settings.host);
    let kept = disk.dirs.first().filter(|_| disk.keep && disk.capacity.is_some());
    let kept = kept.or(host.persist_index.as_ref()).or(host.persist.as_ref());
    let dir = kept.map_or(meeting, PathBuf::as_path);
    namespace.identity.map(|_| dir.join(format!("kvbm-{}.debts", namespace.name)))
}

pub(super) fn media_are_elsewhere() -> Error {
    let message =
        "a layer around the media is where these are: give it to the ranks, not to their leader";
    Error::invalid(message)
}

/// What the fingerprints of all ranks and their leader share. Epochs are the leader's: it may have
/// begun others when a rank is started anew.
fn shared_name(fingerprint: Option<&Fingerprint>) -> String {
    fingerprint.map_or("none".to_owned(), |fingerprint| {
        let ranks = Ranks { tensor_rank: 0, pipeline_rank: 0, ..fingerprint.ranks };
        format!("{:032x}", Fingerprint { ranks, ..fingerprint.clone() }.digest_in(0))
    })
}

/// Slots that a region of each tier has, on the leader's side and on a rank's.
fn slots_by_tier(settings: &Settings, engine: Option<&EngineMemory>) -> Result<[u32; Tier::COUNT]> {
    let count = |capacity: Option<_>| capacity.map_or(Ok(0), |capacity| slots(capacity, settings));
    let HostSlots { tier, staging } = host_slots(settings)?;
    let object = settings.object.place().map_or(Ok(0), |_| object_slots(settings))?;
    let device =
        engine.map_or_else(|| count(settings.device.capacity), |engine| Ok(engine.slots()))?;
    Ok([device, tier + staging, count(settings.disk.capacity)?, object])
}

/// A rank that has joined, and its device's bytes.
pub(crate) struct OpenedRank {
    pub(crate) member: Member,
    pub(crate) device: Option<(Arc<dyn Device>, FramePool)>,
    /// What outlives the process.
    pub(crate) durable: DurableTiers,
    /// Ranks of other workers.
    pub(crate) peers: Option<RankPeers>,
}

/// Opens a rank's tiers, keeping those of the cache group `suffix` apart from others', and joins.
/// Takes memory, makes files, probes stores, and waits for the leader.
pub(crate) fn open_rank(
    settings: &Settings,
    options: RankOptions,
    suffix: &str,
) -> Result<OpenedRank> {
    settings.validate().map_err(|error| Error::invalid(error.to_string()))?;
    let RankOptions { group, rank, engine, groups: _, fingerprint, media_layer } = options;
    let (RankGroup { dir, world, limit }, fingerprint) = (group, fingerprint.as_ref());
    // Ranks do not know a block's tokens, so there is nothing to compare these with.
    fingerprint.map_or(Ok(()), |fingerprint| fingerprint.validate(fingerprint.block_tokens))?;
    // Before tiers are opened, since that takes long.
    let peers = RankListener::bind(settings, fingerprint, rank, world)?;
    // Ranks may share directories and stores: each has files and objects of its own there.
    let namespace = namespace(settings, fingerprint, suffix).part(&format!("rank{rank}of{world}"));
    // Epochs are in the names of blocks, which the leader has.
    let identity = namespace.identity.map(|identity| NameSeed { epoch: 0, ..identity });
    // Slices of blocks: their objects are of no use to others.
    let namespace = NamespaceNames { identity, shares_objects: false, ..namespace };
    let region = engine.as_ref().map(EngineMemory::region).transpose()?;
    let tiers = OpenedRegions::open(settings, namespace, media_layer, region)?;
    let (tenants, seal) = (tiers.tenants(), tiers.host_seal(settings));
    let OpenedRegions { device, host, specs, executor, kept, away, .. } = tiers;
    if !away.is_empty() {
        return Err(leader_counts_on(&away));
    }
    let (kept, durable) = resume_rank(kept)?;
    let backend = |route: Route| Some((route, Arc::clone(executor.backend(route)?)));
    let backends: HashMap<Route, Arc<dyn Backend>> = Route::all().filter_map(backend).collect();
    let member = Membership {
        rank,
        world,
        slots: slots_by_tier(settings, engine.as_ref())?,
        block_bytes: settings.block_bytes.unwrap_or_default(),
        fingerprint: shared_name(fingerprint),
        routes: Vec::new(),
        peers: peers.as_ref().map(RankListener::seat),
    };
    let member = Member::join(JoinOptions { dir, member, kept, limit }, backends).map_err(setup)?;
    let tenants = Arc::new(tenants);
    let member = member.forgetting(move |tenant, life| {
        tenants.begin_forgetting(tenant, life);
        let tenants = Arc::clone(&tenants);
        Box::new(move || tenants.destroy_keys(tenant, life).map_err(|error| error.to_string()))
    });
    let mut member = member.map_err(setup)?;
    let peers = match peers.zip(host) {
        Some((listener, memory)) => {
            let peers = listener.serve(settings, member.host_slots(&memory), seal)?;
            member = member.pulling(memory, peers.puller());
            Some(peers)
        }
        None => None,
    };
    let pool = specs.into_iter().map(|spec| spec.pool).find(|pool| pool.tier() == Tier::Device);
    Ok(OpenedRank { member, device: device.zip(pool), durable, peers })
}

/// A leader gives out slots of all directories, since it does not know which a rank has.
fn leader_counts_on(away: &[PathBuf]) -> Error {
    let message = format!(
        "{away:?} cannot be used, and a rank needs all its disk.dirs (DYN_KVBM_DISK_CACHE_DIR): put them right or choose \
         others"
    );
    Error::unavailable(message)
}

/// The device of a leader: its bytes are the ranks'.
#[derive(Debug)]
struct RemoteRegions;

impl Device for RemoteRegions {
    fn name(&self) -> &'static str {
        "ranks"
    }

    fn fill(&self, _: &mut Frame, _: &mut dyn FnMut(&mut [u8])) -> bool {
        false
    }

    fn read(&self, _: &Loan, _: &mut dyn FnMut(&[u8])) -> bool {
        false
    }
}
