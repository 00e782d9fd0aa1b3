//! What the manager counts, built from a registry that the caller injects.
//!
//! Counters of copies move when a copy has ended or is given up, never when it starts. Labels come
//! from closed sets (tiers, routes, kinds of error) and from what the settings name (directories,
//! ranks, tenants). docs/metrics.md describes each metric; a test compares.
//!
//! | module | holds |
//! |---|---|
//! | `builder` | how metrics are made, and brought up to date when they are read |
//! | `faults` | recent faults, each kind once for each place |
//! | `gauges` | the state of a manager, ranks, the traffic of an object store |
//! | `leases` | what leases found and missed |
//! | `peers`, `tenants`, `upstream` | other workers; tenants; names that NVIDIA's dashboards use |

mod builder;
mod faults;
mod gauges;
mod leases;
mod peers;
mod tenants;
mod upstream;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvbm_tiers::{CopyErrorKind, Route, Tier};
use prometheus::core::Collector;
use prometheus::proto::{Metric, MetricFamily};
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Registry,
};

use self::builder::MetricsBuilder;
use self::faults::{FaultKind, FaultLog, FaultPlace};
use self::leases::LeaseMetrics;
use self::upstream::UpstreamMetrics;
use crate::error::Result;
use crate::table::{Match, Miss};

pub(crate) use self::faults::Fault;
pub(crate) use self::gauges::{StateGauges, register_object_traffic, register_ranks};
pub(crate) use self::leases::Lookups;
pub(crate) use self::peers::{CountedLease, PeerLeaseEnd, PeerMetrics, PeerRefusal, PeerWay};
pub(crate) use self::tenants::{TenantLeases, TenantMetrics};

/// Handles to all metrics.
#[derive(Clone)]
pub struct Metrics {
    block_bytes: u64,
    block_tokens: u64,
    transfer_blocks: IntCounterVec,
    transfer_bytes: IntCounterVec,
    /// Handles to the counters of each route that has copied blocks: finding them by their labels
    /// takes half a microsecond, noticeable in a copy of 64 KiB.
    routes: Arc<[[OnceLock<RouteCounters>; Tier::COUNT]; Tier::COUNT]>,
    transfer_failures: IntCounterVec,
    transfer_seconds: HistogramVec,
    checksum_failures: IntCounterVec,
    overdue_copies: IntCounterVec,
    returned_copies: IntCounterVec,
    background_panics: IntCounter,
    fallbacks: IntCounterVec,
    index_failures: IntCounterVec,
    leases: Arc<LeaseMetrics>,
    directory_failures: IntCounterVec,
    scrubbed_blocks: IntCounterVec,
    shadow_blocks: IntCounterVec,
    shadow_bound: GaugeVec,
    recompute_tokens: IntCounter,
    orphans: IntCounter,
    duplicates: IntCounter,
    layered: IntCounter,
    out_of_reach: IntCounter,
    faults: FaultLog,
    peers: PeerMetrics,
    upstream: UpstreamMetrics,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct RouteCounters {
    blocks: IntCounter,
    bytes: IntCounter,
    seconds: Histogram,
}

/// Bounds of the transfer histogram, in seconds: 16 µs to 2 s.
// Doubling: a quantile is wrong by less than a factor of two, from DRAM to object stores.
const TRANSFER_BOUNDS: [f64; 18] = [
    0.000_016, 0.000_032, 0.000_064, 0.000_128, 0.000_256, 0.000_512, 0.001, 0.002, 0.004, 0.008,
    0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0,
];

/// Why a copy fails: label values of `kvbm_transfer_failures_total`. `CopyErrorKind` may grow; the
/// set of labels is closed.
const FAILURES: [(&str, Option<CopyErrorKind>); 7] = [
    ("io", Some(CopyErrorKind::Io)),
    ("corrupt", Some(CopyErrorKind::Corrupt)),
    ("no_space", Some(CopyErrorKind::NoSpace)),
    ("unavailable", Some(CopyErrorKind::Unavailable)),
    ("timed_out", Some(CopyErrorKind::TimedOut)),
    ("over_budget", Some(CopyErrorKind::OverBudget)),
    ("refused", None),
];

/// A counter shows what was counted elsewhere.
fn catch_up(counter: &IntCounter, now: u64) {
    counter.inc_by(now.saturating_sub(counter.get()));
}

/// There from the start, since what it counts happens at the start or never.
fn fallbacks(b: &mut MetricsBuilder) -> Result<IntCounterVec> {
    let help = "Backends that `auto` would have taken, and that this machine has not.";
    let fallbacks = b.counters("kvbm_backend_fallbacks_total", help, &["backend"])?;
    fallbacks.with_label_values(&["gds"]);
    Ok(fallbacks)
}

impl Metrics {
    /// Registers all metrics. `block_bytes` and `block_tokens` turn blocks into bytes and tokens.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if the registry has one of the names
    /// already.
    pub fn new(registry: &Registry, block_bytes: u64, block_tokens: u64) -> Result<Self> {
        let route = ["from", "to"];
        let mut b = MetricsBuilder::default();
        let histogram = HistogramOpts::new(
            "kvbm_transfer_seconds",
            "Time from a batch's start to a block's arrival.",
        )
        .buckets(TRANSFER_BOUNDS.to_vec());
        let metrics = Self {
            block_bytes,
            block_tokens,
            transfer_blocks: b.counters("kvbm_transfer_blocks_total", "Blocks copied.", &route)?,
            transfer_bytes: b.counters("kvbm_transfer_bytes_total", "Bytes copied.", &route)?,
            routes: Arc::default(),
            transfer_failures: b.counters(
                "kvbm_transfer_failures_total",
                "Copies that failed.",
                &["from", "to", "kind"],
            )?,
            transfer_seconds: b.keep(HistogramVec::new(histogram, &route))?,
            checksum_failures: b.counters(
                "kvbm_checksum_failures_total",
                "Blocks whose bytes had changed.",
                &["tier"],
            )?,
            overdue_copies: b.counters(
                "kvbm_overdue_copies_total",
                "Copies that were given up because their medium completed nothing for the limit.",
                &route,
            )?,
            returned_copies: b.counters(
                "kvbm_returned_copies_total",
                "Copies that were given up and ended after all.",
                &route,
            )?,
            background_panics: b
                .counter("kvbm_background_panics_total", "Rounds of background work that panicked.")?,
            fallbacks: fallbacks(&mut b)?,
            index_failures: b.counters(
                "kvbm_index_failures_total",
                "Times that the index of a tier could not be written. It is tried again.",
                &["tier"],
            )?,
            leases: Arc::new(LeaseMetrics::new(&mut b, block_tokens)?),
            directory_failures: b.counters(
                "kvbm_disk_directory_failures_total",
                "Times that a directory of the disk tier failed or hung, and was left alone.",
                &["dir"],
            )?,
            scrubbed_blocks: b.counters(
                "kvbm_scrubbed_blocks_total",
                "Blocks verified that no request had asked for.",
                &["tier", "outcome"],
            )?,
            shadow_blocks: b.counters(
                "kvbm_shadow_blocks_total",
                "Hits that the engine computed again, by what became of the comparison.",
                &["tier", "verdict"],
            )?,
            shadow_bound: b.shares(
                "kvbm_shadow_wrong_rate_bound",
                "The share of wrong blocks is not larger than this, with a confidence of 95 %.",
                &["tier"],
            )?,
            recompute_tokens: b.counter(
                "kvbm_recompute_tokens_total",
                "Tokens held but left to the engine, which computes them sooner than they are loaded.",
            )?,
            orphans: b.counter(
                "kvbm_orphan_blocks_total",
                "Blocks that an engine brought and that could not be kept, because those before them are not there.",
            )?,
            duplicates: b.counter(
                "kvbm_duplicate_blocks_total",
                "Blocks that an engine brought and that are there without it.",
            )?,
            layered: b.counter(
                "kvbm_layered_blocks_total",
                "Blocks that an engine saved layer by layer.",
            )?,
            out_of_reach: b.counter(
                "kvbm_out_of_reach_tokens_total",
                "Tokens held of full attention behind the last checkpoint that all cache groups have.",
            )?,
            faults: FaultLog::default(),
            peers: PeerMetrics::new(&mut b, block_bytes)?,
            upstream: UpstreamMetrics::new(&mut b)?,
        };
        let leases = Arc::clone(&metrics.leases);
        b.register(registry, move || leases.catch_up())?;
        Ok(metrics)
    }

    /// Counts failures of these routes, of their source tiers and of `directories` directories from
    /// 0 on: a panel shows something before the first, and the first is an increase.
    pub(crate) fn count_from_zero(
        &self,
        routes: impl IntoIterator<Item = Route>,
        directories: usize,
    ) {
        for Route { from, to } in routes {
            let route = [from.name(), to.name()];
            for (kind, _) in FAILURES {
                self.transfer_failures.with_label_values(&[route[0], route[1], kind]);
            }
            self.overdue_copies.with_label_values(&route);
            self.returned_copies.with_label_values(&route);
            self.checksum_failures.with_label_values(&[from.name()]);
            if from > Tier::Device {
                self.index_failures.with_label_values(&[from.name()]);
            }
        }
        for directory in 0..directories {
            self.directory_failures.with_label_values(&[&directory.to_string()]);
        }
    }

    /// Those of what goes between workers.
    pub(crate) const fn peers(&self) -> &PeerMetrics {
        &self.peers
    }

    /// `blocks` blocks arrived together after `took`.
    pub(crate) fn copied(&self, route: Route, took: Duration, blocks: u64) {
        let counters = self.of_route(route);
        counters.blocks.inc_by(blocks);
        counters.bytes.inc_by(self.block_bytes * blocks);
        (0..blocks).for_each(|_| counters.seconds.observe(took.as_secs_f64()));
        self.upstream.copied(route, blocks);
    }

    // Made with the first copy, not at the start: an unused route is not shown.
    fn of_route(&self, Route { from, to }: Route) -> &RouteCounters {
        self.routes[from.index()][to.index()].get_or_init(|| {
            let labels = [from.name(), to.name()];
            RouteCounters {
                blocks: self.transfer_blocks.with_label_values(&labels),
                bytes: self.transfer_bytes.with_label_values(&labels),
                seconds: self.transfer_seconds.with_label_values(&labels),
            }
        })
    }

    /// A copy failed.
    pub(crate) fn failed(&self, route: Route, kind: CopyErrorKind) {
        let named = FAILURES.iter().find(|(_, known)| *known == Some(kind));
        let name = named.map_or("refused", |(name, _)| name);
        self.transfer_failures.with_label_values(&[route.from.name(), route.to.name(), name]).inc();
        self.faults.note(FaultKind::Copy(kind), FaultPlace::Route(route));
        if kind == CopyErrorKind::Corrupt {
            self.checksum_failures.with_label_values(&[route.from.name()]).inc();
        }
        self.upstream.failed(route);
    }

    /// A block that was lent, or verified in a copy, had changed.
    pub(crate) fn found_corrupt(&self, tier: Tier) {
        self.faults.note(FaultKind::Checksum, FaultPlace::Tier(tier));
        self.checksum_failures.with_label_values(&[tier.name()]).inc();
    }

    pub(crate) fn went_overdue(&self, route: Route, copies: u64) {
        self.overdue_copies.with_label_values(&[route.from.name(), route.to.name()]).inc_by(copies);
        // To the engine they have failed, even if they end after all.
        (0..copies).for_each(|_| self.failed(route, CopyErrorKind::TimedOut));
    }

    /// Copies that went overdue ended.
    pub(crate) fn came_back(&self, route: Route, copies: u64) {
        self.returned_copies
            .with_label_values(&[route.from.name(), route.to.name()])
            .inc_by(copies);
    }

    /// Copies on a route that are overdue now.
    pub(crate) fn overdue_now(&self, route: Route) -> u64 {
        // An end may be counted before the time-out, which is counted once the batch's lock is
        // free.
        let returned = counted(&self.returned_copies, route);
        counted(&self.overdue_copies, route).saturating_sub(returned)
    }

    pub(crate) fn background_panicked(&self) {
        self.faults.note(FaultKind::Panic, FaultPlace::Process);
        self.background_panics.inc();
    }

    /// `auto` took a backend other than the best.
    pub(crate) fn fell_back(&self, wanted: &'static str) {
        self.fallbacks.with_label_values(&[wanted]).inc();
    }

    /// A tier's index could not be written.
    pub(crate) fn index_failed(&self, tier: Tier) {
        self.faults.note(FaultKind::Index, FaultPlace::Tier(tier));
        self.index_failures.with_label_values(&[tier.name()]).inc();
    }

    /// An idle block was verified.
    pub(crate) fn scrubbed(&self, tier: Tier, is_sound: bool) {
        let outcome = if is_sound { "sound" } else { "bad" };
        self.scrubbed_blocks.with_label_values(&[tier.name(), outcome]).inc();
    }

    /// One of several directories of the disk tier is left alone.
    pub(crate) fn directory_failed(&self, dir: usize) {
        self.faults.note(FaultKind::Directory, FaultPlace::Directory(dir));
        self.directory_failures.with_label_values(&[&dir.to_string()]).inc();
    }

    /// A hit was computed again; `bound` now bounds the share of wrong ones.
    pub(crate) fn shadowed(&self, tier: Tier, is_wrong: bool, bound: f64) {
        let verdict = if is_wrong { "wrong" } else { "same" };
        if is_wrong {
            self.faults.note(FaultKind::Shadow, FaultPlace::Tier(tier));
        }
        self.shadow_blocks.with_label_values(&[tier.name(), verdict]).inc();
        self.shadow_bound.with_label_values(&[tier.name()]).set(bound);
    }

    /// A chain of `blocks` blocks was leased.
    pub(crate) fn requested(&self, blocks: usize, held: &Match) {
        self.leases.requested(blocks, held);
    }

    /// The last `blocks` blocks of a chain were not found, the first of them because of `miss`.
    pub(crate) fn missed(&self, blocks: usize, miss: Miss) {
        self.leases.missed(blocks, miss);
    }

    /// `blocks` blocks are faster to compute than to load.
    pub(crate) fn left_to_engine(&self, blocks: usize) {
        self.recompute_tokens.inc_by(blocks as u64 * self.block_tokens);
    }

    /// The engine's blocks whose parents were missing.
    pub(crate) fn orphaned(&self, blocks: usize) {
        self.orphans.inc_by(blocks as u64);
    }

    /// The engine's blocks that were there already.
    pub(crate) fn duplicated(&self, blocks: usize) {
        self.duplicates.inc_by(blocks as u64);
    }

    /// Blocks that were saved layer by layer.
    pub(crate) fn saved_in_layers(&self, blocks: usize) {
        self.layered.inc_by(blocks as u64);
    }

    /// `blocks` blocks are held that no checkpoint reaches.
    pub(crate) fn out_of_reach(&self, blocks: usize) {
        self.out_of_reach.inc_by(blocks as u64 * self.block_tokens);
    }

    /// Recent faults, latest first.
    pub(crate) fn faults(&self) -> Vec<Fault> {
        self.faults.latest()
    }

    /// What leases asked for, and found.
    pub(crate) fn lookups(&self) -> Lookups {
        self.leases.lookups()
    }

    /// Blocks copied on a route so far.
    pub(crate) fn blocks(&self, route: Route) -> u64 {
        counted(&self.transfer_blocks, route)
    }

    /// Bytes copied on a route so far.
    pub fn bytes(&self, route: Route) -> u64 {
        counted(&self.transfer_bytes, route)
    }

    /// Copies that failed on a route so far, for any reason.
    pub fn failures(&self, route: Route) -> u64 {
        counted(&self.transfer_failures, route)
    }
}

/// The sum of a route's counters over all other labels. Asking for a counter by its labels would
/// make it appear.
fn counted(counters: &IntCounterVec, route: Route) -> u64 {
    let families = counters.collect();
    let has = |row: &Metric, name, value| {
        row.get_label().iter().any(|label| (label.name(), label.value()) == (name, value))
    };
    let rows = families.iter().flat_map(MetricFamily::get_metric);
    let of_route =
        rows.filter(|row| has(row, "from", route.from.name()) && has(row, "to", route.to.name()));
    // By its labels: other calls give a row's value if `prometheus` is compiled with protobuf.
    let labels = |row: &Metric| -> HashMap<String, String> {
        row.get_label()
            .iter()
            .map(|label| (label.name().to_owned(), label.value().to_owned()))
            .collect()
    };
    let counters = of_route.filter_map(|row| {
        let labels = labels(row);
        let labels: HashMap<&str, &str> =
            labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        counters.get_metric_with(&labels).ok()
    });
    counters.map(|counter| counter.get()).sum()
}
