//! What is asked when the registry is read: the table and the queues, ranks, and the client of an
//! object store, which counts its requests.

use std::sync::{Arc, Weak};

use kvbm_tiers::object::{Expense, RequestKind, RequestOutcome, Traffic};
use kvbm_tiers::ranks::RankRegistry;
use kvbm_tiers::{Done, Route, Tier};
use prometheus::{GaugeVec, IntGauge, IntGaugeVec, Registry};

use super::builder::MetricsBuilder;
use super::catch_up;
use crate::error::Result;
use crate::observe::requests::has_limit;
use crate::scheduler::{Core, StagingCounts};
use crate::table::TierStats;

/// The state of a [`Core`], which is asked at each scrape. They show the last state after the core
/// is gone.
pub(crate) struct StateGauges {
    epoch: IntGauge,
    accounting_drift: IntGauge,
    completion_panics: IntGauge,
    slots: IntGaugeVec,
    directories: IntGaugeVec,
    dirty_blocks: IntGaugeVec,
    staging_slots: IntGaugeVec,
    estimated_hit_rate: GaugeVec,
    /// As [`OF_TIER`] and [`OF_ROUTE`].
    of_tier: Vec<IntGaugeVec>,
    of_route: Vec<IntGaugeVec>,
}

/// At which multiples of a tier's size its hit rate is estimated.
// Within the reach of the curve: see `Demand`.
const SCALES: [(&str, f64); 5] = [("0.25", 0.25), ("0.5", 0.5), ("1", 1.0), ("2", 2.0), ("4", 4.0)];

/// What is counted of each tier, and where.
// Gauges, although most only grow: the table counts, and a counter cannot be set.
const OF_TIER: [(&str, &str, TierCount); 8] = [
    ("kvbm_published_blocks", "Blocks that became resident since the start.", |s| s.published),
    ("kvbm_evicted_blocks", "Blocks evicted since the start.", |s| s.evicted),
    (
        "kvbm_declined_blocks",
        "Blocks not taken in since the start: not worth the room that they would have taken.",
        |s| s.declined,
    ),
    ("kvbm_quarantined_blocks", "Blocks dropped as corrupt since the start.", |s| s.quarantined),
    (
        "kvbm_unreadable_blocks",
        "Blocks dropped because they could not be read any more, since the start.",
        |s| s.unreadable,
    ),
    ("kvbm_flush_failures", "Blocks whose flush failed since the start. It is tried again.", |s| {
        s.flush_failures
    }),
    (
        "kvbm_unflushed_blocks",
        "Blocks that left since the start before the tier below had them: it could not be written.",
        |s| s.unflushed,
    ),
    ("kvbm_full_reservations", "Reservations without room since the start.", |s| s.full),
];

type TierCount = fn(&TierStats) -> u64;

/// What is known of each route.
const OF_ROUTE: [(&str, &str); 4] = [
    ("kvbm_queue_blocks", "Blocks that wait to be copied."),
    ("kvbm_batches_in_flight", "Batches being copied."),
    ("kvbm_copies_overdue", "Copies that are overdue now."),
    ("kvbm_breaker_open", "1 while a medium is left alone in this direction, 0 otherwise."),
];

impl StateGauges {
    /// `core` is weak: a registry may outlive the manager, and must not keep its tiers open.
    /// `bytes_per_day` may be written to the disk tier.
    pub(crate) fn register(
        registry: &Registry,
        core: Weak<Core>,
        bytes_per_day: Option<u64>,
    ) -> Result<()> {
        let mut b = MetricsBuilder::default();
        let gauges = Self::new(&mut b)?;
        if let Some(bytes) = bytes_per_day {
            let help = "Bytes that may be written to the disk tier in a day.";
            let budget = b.gauge("kvbm_disk_write_budget_bytes", help)?;
            budget.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
        b.register(registry, move || {
            if let Some(core) = core.upgrade() {
                gauges.update(&core);
            }
        })
    }

    fn new(b: &mut MetricsBuilder) -> Result<Self> {
        Ok(Self {
            epoch: b.gauge("kvbm_epoch", "The present epoch.")?,
            accounting_drift: b.gauge(
                "kvbm_accounting_drift",
                "Invariants of the block table that the audit in the background found broken.",
            )?,
            completion_panics: b.gauge(
                "kvbm_completion_panics",
                "Ends of copies whose handling panicked since the process started.",
            )?,
            slots: b.gauges("kvbm_slots", "Slots by state.", &["tier", "state"])?,
            directories: b.gauges(
                "kvbm_disk_directory_up",
                "1 for a directory of the disk tier that takes blocks, 0 for one that does not.",
                &["dir"],
            )?,
            dirty_blocks: b.gauges(
                "kvbm_dirty_blocks",
                "Blocks that wait to be flushed.",
                &["tier"],
            )?,
            staging_slots: b.gauges(
                "kvbm_staging_slots",
                "DRAM slots through which blocks bounce, by state.",
                &["state"],
            )?,
            estimated_hit_rate: b.shares(
                "kvbm_estimated_hit_rate",
                "Share of requested blocks that a tier of a multiple of this one's size would have held.",
                &["tier", "scale"],
            )?,
            of_tier: OF_TIER
                .into_iter()
                .map(|(name, help, _)| b.gauges(name, help, &["tier"]))
                .collect::<Result<_>>()?,
            of_route: OF_ROUTE
                .into_iter()
                .map(|(name, help)| b.gauges(name, help, &["from", "to"]))
                .collect::<Result<_>>()?,
        })
    }

    fn update(&self, core: &Core) {
        self.update_staging(core);
        self.epoch.set(i64::try_from(core.table().epoch()).unwrap_or(i64::MAX));
        self.accounting_drift.set(core.accounting_drift() as i64);
        // Counted in `tiers`, which knows no manager: those of the whole process.
        self.completion_panics.set(Done::panics() as i64);
        for (dir, is_up) in core.table().directories(Tier::Disk).enumerate() {
            self.directories.with_label_values(&[&dir.to_string()]).set(i64::from(is_up));
        }
        // The table is locked anew for each tier: a scrape must not hold up requests for all of
        // them.
        let present: Vec<Tier> =
            Tier::ALL.into_iter().filter(|&tier| core.table().has(tier)).collect();
        for &tier in &present {
            self.update_tier(core, tier);
            for &to in present.iter().filter(|&&to| to != tier) {
                let route = Route { from: tier, to };
                let (waiting, in_flight) = core.traffic(route);
                let overdue = core.metrics().overdue_now(route) as i64;
                let is_open = i64::from(core.is_left_alone(route));
                let values = [waiting as i64, in_flight as i64, overdue, is_open];
                for (gauge, value) in self.of_route.iter().zip(values) {
                    gauge.with_label_values(&[tier.name(), to.name()]).set(value);
                }
            }
        }
    }

    fn update_staging(&self, core: &Core) {
        let StagingCounts { total, idle, lost } = core.staging();
        for (state, slots) in [("free", idle), ("filling", total - idle - lost), ("lost", lost)] {
            self.staging_slots.with_label_values(&[state]).set(slots as i64);
        }
    }

    fn update_tier(&self, core: &Core, tier: Tier) {
        let table = core.table();
        let (counts, stats, dirty) = (table.counts(tier), table.stats(tier), table.dirty(tier));
        // The estimates take in the waiting keys, some 100 ns each: not with the table locked.
        drop(table);
        let by_state = [
            ("free", counts.free),
            ("filling", counts.filling),
            ("resident", counts.resident),
            ("quarantined", counts.quarantined),
            ("forgotten", counts.forgotten),
            ("lost", counts.lost),
        ];
        for (state, slots) in by_state {
            self.slots.with_label_values(&[tier.name(), state]).set(i64::from(slots));
        }
        for (label, scale) in SCALES.into_iter().filter(|_| has_limit(counts.total)) {
            let rate = core.estimated_hit_rate((f64::from(counts.total) * scale) as u32);
            self.estimated_hit_rate.with_label_values(&[tier.name(), label]).set(rate);
        }
        self.dirty_blocks.with_label_values(&[tier.name()]).set(dirty as i64);
        for (gauge, (.., count)) in self.of_tier.iter().zip(OF_TIER) {
            gauge.with_label_values(&[tier.name()]).set(count(&stats) as i64);
        }
    }
}

/// One gauge for each rank. Shows the last state after the leader is gone.
pub(crate) fn register_ranks(registry: &Registry, roll_call: RankRegistry) -> Result<()> {
    let mut b = MetricsBuilder::default();
    let help = "1 for a rank that is there, 0 for one that is away.";
    let up = b.gauges("kvbm_rank_up", help, &["rank"])?;
    b.register(registry, move || {
        for (rank, is_there) in roll_call.present().into_iter().flatten().enumerate() {
            up.with_label_values(&[&rank.to_string()]).set(i64::from(is_there));
        }
    })
}

/// Counters of one store's requests and bytes.
pub(crate) fn register_object_traffic(registry: &Registry, traffic: Arc<Traffic>) -> Result<()> {
    let mut b = MetricsBuilder::default();
    let requests = b.counters(
        "kvbm_object_requests_total",
        "Requests to the object store.",
        &["request", "outcome"],
    )?;
    let bytes = b.counters(
        "kvbm_object_bytes_total",
        "Bytes of objects sent to the object store and asked of it.",
        &["direction"],
    )?;
    let refusals = b.counters(
        "kvbm_object_budget_refusals_total",
        "Segments not stored and runs of blocks not read because a budget of the object tier was spent.",
        &["budget"],
    )?;
    let left = b.shares(
        "kvbm_object_budget_left",
        "Share of a budget of the object tier that is left.",
        &["budget"],
    )?;
    b.register(registry, move || {
        for kind in RequestKind::ALL {
            for outcome in RequestOutcome::ALL {
                let now = traffic.requests(kind, outcome);
                if now > 0 {
                    catch_up(&requests.with_label_values(&[kind.name(), outcome.name()]), now);
                }
            }
        }
        catch_up(&bytes.with_label_values(&["sent"]), traffic.bytes_sent());
        catch_up(&bytes.with_label_values(&["received"]), traffic.bytes_received());
        for expense in Expense::ALL {
            // Without a limit there is nothing to watch.
            if let Some(share) = traffic.budget_left(expense) {
                let refused = refusals.with_label_values(&[expense.name()]);
                catch_up(&refused, traffic.refused(expense));
                left.with_label_values(&[expense.name()]).set(share);
            }
        }
    })
}
