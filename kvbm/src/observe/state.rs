//! What a manager reports of itself: its state at a glance, what is degraded, and why a chain is
//! not held any further.
//!
//! Plain data, which `serve` shows over HTTP. It counts nothing itself: it reads the table, the
//! scheduler and the metrics, one tier at a time, so that a look holds up no request.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use kvbm_policies::RequestId;
use kvbm_settings::{AdmissionKind, Settings};
use kvbm_tiers::{Route, Tier, clock};
use serde::{Serialize, Serializer};

use crate::api::manager::RouteReport;
use crate::assemble::SharedStore;
use crate::metrics::Lookups as Counted;
use crate::names::hash::{BlockHash, Chain};
use crate::observe::requests::{FirstMiss, FromPeer, RecentRequest};
use crate::peers::{PeerBook, PeersState};
use crate::scheduler::Core;
use crate::table::{Match, Miss, MissReason};

/// A manager at a glance.
#[derive(Clone, Debug, Serialize)]
pub struct State {
    /// Of this crate.
    pub version: &'static str,
    /// Since the manager was opened.
    pub uptime_s: f64,
    /// Bytes of a block, those of one rank.
    pub block_bytes: u64,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// The names of blocks.
    pub namespace: NamespaceState,
    /// As [`Admin::device`](crate::Admin::device).
    pub device: Option<&'static str>,
    /// Existing tiers, fastest first; of full attention.
    pub tiers: Vec<TierState>,
    /// Tiers of each other cache group of a hybrid model, group 1 first.
    pub groups: Vec<Vec<TierState>>,
    /// Those that there are.
    pub routes: Vec<RouteState>,
    /// What leases asked for, and found.
    pub lookups: LookupCounts,
    /// Other workers; `None`: there are to be none.
    pub peers: Option<PeersState>,
    /// Recent faults, latest first; each kind once for each place.
    pub faults: Vec<FaultState>,
    /// Settings in force, by their TOML path. Secrets appear as `(set)`.
    pub settings: BTreeMap<String, String>,
}

/// The names of blocks.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct NamespaceState {
    /// See [`Admin::epoch`](crate::Admin::epoch).
    pub epoch: u64,
}

/// A tier.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TierState {
    /// Which.
    pub tier: Tier,
    /// Blocks that it has room for.
    pub capacity_blocks: u32,
    /// Blocks that can be read there.
    pub resident_blocks: u32,
    /// Blocks that wait to be flushed.
    pub dirty_blocks: usize,
    /// Slots that overdue copies hold.
    pub lost_blocks: u32,
    /// Blocks evicted since the start.
    pub evictions_total: u64,
    /// Blocks that leases found there first.
    pub hit_blocks_total: u64,
}

/// A route.
#[derive(Clone, Debug, Serialize)]
pub struct RouteState {
    /// Source tier.
    pub from: Tier,
    /// Destination tier.
    pub to: Tier,
    /// As [`RouteReport::backend`].
    pub backend: String,
    /// Blocks that wait to be copied.
    pub queued_blocks: usize,
    /// Blocks that a medium is copying.
    pub in_flight_blocks: usize,
    /// Bytes copied since the start, of all ranks.
    pub bytes_total: u64,
    /// Blocks copied since the start.
    pub copied_blocks_total: u64,
    /// Copies that failed since the start.
    pub failed_total: u64,
    /// Copies that are overdue now.
    pub overdue_now: u64,
    /// Whether the lower tier is left alone in this direction.
    pub breaker: BreakerState,
}

/// Whether a tier is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BreakerState {
    /// Copies go.
    Closed,
    /// None goes, except a probe now and then.
    Open,
}

/// What leases asked for, and found.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LookupCounts {
    /// Blocks asked for.
    pub blocks_total: u64,
    /// Those of them that some tier had.
    pub hit_blocks_total: u64,
}

/// What went wrong, where, and how often.
#[derive(Clone, Debug, Serialize)]
pub struct FaultState {
    /// The last time, in seconds since the manager was opened.
    pub at_s: f64,
    /// One of a closed set: docs/observe.md.
    pub what: &'static str,
    /// A tier, a route (`host>disk`), a directory (`disk.dirs[1]`) or `process`.
    #[serde(rename = "where")]
    pub place: String,
    /// How often.
    pub count: u64,
}

/// Whether a manager is usable, and which parts of it are degraded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Readiness {
    /// False once it is closed, and while every tier below the device is left alone.
    pub ready: bool,
    /// What is not as it should be.
    pub degraded: Vec<Degraded>,
}

/// What is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Degraded {
    /// A tier, a directory (`disk.dirs[1]`), or `table`.
    pub what: String,
    /// Why, for people.
    pub why: String,
}

/// How much of a chain each tier holds, and why not more.
#[derive(Clone, Debug, Serialize)]
pub struct Why {
    /// The request that asked, if one was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<u64>,
    /// When it asked, in seconds ago.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked_s_ago: Option<f64>,
    /// Blocks of the chain.
    pub blocks: usize,
    /// Leading blocks by existing tier.
    pub found: Vec<Found>,
    /// The first block that no tier has; `None`: all are there.
    pub next: Option<Missing>,
    /// What the request took from a peer, if it asked one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_peer: Option<FromPeer>,
}

/// How much of a chain a tier has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Found {
    /// Which.
    pub tier: Tier,
    /// Leading blocks.
    pub blocks: usize,
}

/// A block that no tier has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// Which.
    #[serde(serialize_with = "as_hex")]
    pub block: BlockHash,
    /// Its place in the chain, from 0.
    pub position: usize,
    /// Why it is not there: [`MissReason::name`].
    pub reason: &'static str,
    /// The tier that had it last, or that it could not enter.
    pub tier: Option<Tier>,
    /// How long ago, by the manager's clock.
    pub age_s: Option<u64>,
    /// The setting that decided it, and its value, if one did.
    pub policy: Option<String>,
}

fn as_hex<S: Serializer>(hash: &BlockHash, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{hash:?}"))
}

/// What these reports need.
#[derive(Debug)]
pub(crate) struct ObservedState {
    core: Weak<Core>,
    routes: Vec<RouteReport>,
    device: Option<&'static str>,
    settings: Settings,
    block_tokens: u64,
    opened: Instant,
    store: SharedStore,
    /// Of cache groups beside full attention.
    groups: OnceLock<Vec<Weak<Core>>>,
    peers: OnceLock<Arc<PeerBook>>,
}

impl ObservedState {
    pub(crate) fn new(
        core: &Arc<Core>,
        routes: Vec<RouteReport>,
        device: Option<&'static str>,
        settings: Settings,
        block_tokens: u64,
    ) -> Self {
        let (core, store) = (Arc::downgrade(core), SharedStore::default());
        let (opened, groups, peers) = (clock::now(), OnceLock::new(), OnceLock::new());
        Self { core, routes, device, settings, block_tokens, opened, store, groups, peers }
    }

    /// Adds the tables of the other cache groups.
    pub(crate) fn with_groups<'a>(&self, groups: impl Iterator<Item = &'a Arc<Core>>) {
        self.groups.get_or_init(|| groups.map(Arc::downgrade).collect());
    }

    /// Adds the other workers.
    pub(crate) fn with_peers(&self, book: &Arc<PeerBook>) {
        self.peers.get_or_init(|| Arc::clone(book));
    }

    /// Adds a shared store, which may be out of use.
    pub(crate) fn with_store(self, store: SharedStore) -> Self {
        Self { store, ..self }
    }

    pub(crate) fn routes(&self) -> &[RouteReport] {
        &self.routes
    }

    /// `None`: the manager is gone.
    pub(crate) fn state(&self) -> Option<State> {
        let core = self.core.upgrade()?;
        let (counted, epoch) = (core.metrics().lookups(), core.table().epoch());
        Some(State {
            version: env!("CARGO_PKG_VERSION"),
            uptime_s: self.opened.elapsed().as_secs_f64(),
            block_bytes: self.settings.block_bytes.unwrap_or_default(),
            block_tokens: self.block_tokens,
            namespace: NamespaceState { epoch },
            device: self.device,
            tiers: tier_states(&core),
            groups: self.groups().map(|core| tier_states(&core)).collect(),
            routes: self.routes.iter().map(|route| route_state(&core, route)).collect(),
            lookups: LookupCounts {
                blocks_total: counted.blocks,
                hit_blocks_total: counted.hit.iter().sum(),
            },
            peers: self.peers.get().map(|book| book.state(self.opened)),
            faults: self.faults(&core),
            settings: self.settings.shown_values().into_iter().collect(),
        })
    }

    fn groups(&self) -> impl Iterator<Item = Arc<Core>> {
        self.groups.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    fn faults(&self, core: &Core) -> Vec<FaultState> {
        let faults = core.metrics().faults().into_iter();
        faults
            .map(|fault| FaultState {
                at_s: fault.at.saturating_duration_since(self.opened).as_secs_f64(),
                what: fault.kind.name(),
                place: fault.place.name(),
                count: fault.count,
            })
            .collect()
    }

    pub(crate) fn readiness(&self) -> Readiness {
        let Some(core) = self.core.upgrade().filter(|core| !core.is_closed()) else {
            let closed = Degraded { what: "manager".to_owned(), why: "it is closed".to_owned() };
            return Readiness { ready: false, degraded: vec![closed] };
        };
        let mut below = tiers(&core).filter(|&tier| tier > Tier::Device).peekable();
        let is_of_use = below.peek().is_none()
            || below.any(|tier| !core.is_left_alone(Route::new(tier, Tier::Device)));
        Readiness { ready: is_of_use, degraded: degraded(&core, &self.store) }
    }

    /// How much of a chain each tier holds now.
    pub(crate) fn why(&self, chain: Chain<'_>) -> Option<Why> {
        let core = self.core.upgrade()?;
        let (held, miss) = core.why(chain);
        let missing = FirstMiss::behind(&held, chain, miss);
        Some(self.explain(&core, &held, chain.len(), missing))
    }

    /// What a request found when it last asked; `None`: it is not among the recent ones.
    pub(crate) fn why_of(&self, request: RequestId) -> Option<Why> {
        let core = self.core.upgrade()?;
        let RecentRequest { held, blocks, missing, at, from_peer, .. } =
            core.recent_request(request)?;
        let (request, asked_s_ago) = (Some(request.0), Some(at.elapsed().as_secs_f64()));
        let from_peer = from_peer.map(|taken| *taken);
        let why = self.explain(&core, &held, blocks, missing);
        Some(Why { request, asked_s_ago, from_peer, ..why })
    }

    fn explain(&self, core: &Core, held: &Match, blocks: usize, missing: Option<FirstMiss>) -> Why {
        let found = tiers(core).map(|tier| Found { tier, blocks: held.blocks(tier) }).collect();
        let next = missing.map(|FirstMiss { block, miss: Miss { reason, tier, age_s } }| Missing {
            block,
            position: held.longest(),
            reason: reason.name(),
            tier,
            age_s,
            policy: self.policy_behind(reason, tier),
        });
        Why { request: None, asked_s_ago: None, blocks, found, next, from_peer: None }
    }

    /// The setting that keeps blocks of the host from the disk: the rule, or else the budget.
    fn disk_rule(&self) -> Option<&'static str> {
        let disk = &self.settings.disk;
        match disk.admission {
            AdmissionKind::WriteThrough => disk.write_budget.map(|_| "disk.write_budget"),
            _ => Some("disk.admission"),
        }
    }

    /// The setting to change, with its value.
    fn policy_behind(&self, reason: MissReason, tier: Option<Tier>) -> Option<String> {
        let path = match (reason, tier) {
            // Without a rule a full tier declines what its policy would give up first.
            (MissReason::Admission, Some(Tier::Disk)) => {
                self.disk_rule().unwrap_or("eviction").to_owned()
            }
            (MissReason::Evicted | MissReason::Admission, _) => "eviction".to_owned(),
            (MissReason::Capacity, Some(tier)) => format!("{tier}.capacity"),
            _ => return None,
        };
        let (_, value) =
            self.settings.shown_values().into_iter().find(|(known, _)| *known == path)?;
        Some(format!("{path} = {value}"))
    }
}

fn tiers(core: &Core) -> impl Iterator<Item = Tier> + '_ {
    Tier::ALL.into_iter().filter(|&tier| core.table().has(tier))
}

fn tier_states(core: &Core) -> Vec<TierState> {
    let counted = core.metrics().lookups();
    tiers(core).map(|tier| tier_state(core, tier, &counted)).collect()
}

fn tier_state(core: &Core, tier: Tier, counted: &Counted) -> TierState {
    let table = core.table();
    let (counts, stats, dirty) = (table.counts(tier), table.stats(tier), table.dirty(tier));
    TierState {
        tier,
        capacity_blocks: counts.total,
        resident_blocks: counts.resident,
        dirty_blocks: dirty,
        lost_blocks: counts.lost,
        evictions_total: stats.evicted,
        hit_blocks_total: counted.hit[tier.index()],
    }
}

fn route_state(core: &Core, route: &RouteReport) -> RouteState {
    let (from, to) = (route.from, route.to);
    let (metrics, way) = (core.metrics(), Route { from, to });
    RouteState {
        from,
        to,
        backend: route.backend.clone(),
        queued_blocks: core.traffic(way).0,
        in_flight_blocks: core.blocks_in_flight(way),
        bytes_total: metrics.bytes(way),
        copied_blocks_total: metrics.blocks(way),
        failed_total: metrics.failures(way),
        overdue_now: metrics.overdue_now(way),
        breaker: if core.is_left_alone(way) { BreakerState::Open } else { BreakerState::Closed },
    }
}

fn degraded(core: &Core, store: &SharedStore) -> Vec<Degraded> {
    let mut degraded = Vec::new();
    let mut note = |what: String, why: String| degraded.push(Degraded { what, why });
    for tier in tiers(core) {
        let is_left_alone = |route| tier > Tier::Device && core.is_left_alone(route);
        if core.is_withdrawn(tier) {
            let why = "it neither gives nor takes anything until the next reset: too many of its blocks were wrong";
            note(tier.to_string(), why.to_owned());
        } else {
            if is_left_alone(Route::new(tier, Tier::Device)) {
                let why = "it is not read: copies from it failed, and it is tried again";
                note(tier.to_string(), why.to_owned());
            }
            if is_left_alone(Route::new(Tier::Device, tier)) {
                let why = "it is not written: copies to it failed, and it is tried again";
                note(tier.to_string(), why.to_owned());
            }
        }
        let lost = core.table().counts(tier).lost;
        if lost > 0 {
            note(tier.to_string(), format!("{lost} slots are held by copies that do not end"));
        }
    }
    store.is_not_used().into_iter().for_each(|why| note(Tier::Object.to_string(), why));
    let directories: Vec<bool> = core.table().directories(Tier::Disk).collect();
    for (dir, _) in directories.iter().enumerate().filter(|(_, is_up)| !**is_up) {
        note(
            format!("disk.dirs[{dir}]"),
            "it failed and is not used: the log has the reason".to_owned(),
        );
    }
    if core.accounting_drift() > 0 {
        note(
            "table".to_owned(),
            "an invariant is broken: please report it with the log".to_owned(),
        );
    }
    degraded
}
