//! What is asked when the registry is read: the table and the queues, ranks, and the client of an
//! object store, which counts its requests.

use std::sync::{Arc, Weak};

use kvbm_tiers::object::{Expense, RequestKind, RequestOutcome, Traffic};
use kvbm_tiers::ranks::RankRegistry;
use kvbm_tiers::{Done, Route, Tier};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, IntCounterVec, IntGauge, IntGaugeVec, Opts};

use super::catch_up;
use crate::observe::requests::has_limit;
use crate::scheduler::{Core, StagingCounts};
use crate::sync::Mutex;
use crate::table::TierStats;

/// Asks a [`Core`] for its state at each scrape. Shows the last state after the core is gone.
pub(crate) struct StateGauges {
    // Weak: a registry may outlive the manager, and must not keep its tiers open.
    core: Weak<Core>,
    epoch: IntGauge,
    accounting_drift: IntGauge,
    completion_panics: IntGauge,
    /// If there is a budget.
    write_budget: Option<IntGauge>,
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
    /// `bytes_per_day` may be written to the disk tier.
    pub(crate) fn new(core: Weak<Core>, bytes_per_day: Option<u64>) -> prometheus::Result<Self> {
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            IntGaugeVec::new(Opts::new(name, help), labels)
        };
        let of_tier = OF_TIER.map(|(name, help, _)| gauges(name, help, &["tier"]));
        let of_route = OF_ROUTE.map(|(name, help)| gauges(name, help, &["from", "to"]));
        Ok(Self {
            core,
            epoch: IntGauge::new("kvbm_epoch", "The present epoch.")?,
            accounting_drift: IntGauge::new(
                "kvbm_accounting_drift",
                "Invariants of the block table that the audit in the background found broken.",
            )?,
            completion_panics: IntGauge::new(
                "kvbm_completion_panics",
                "Ends of copies whose handling panicked since the process started.",
            )?,
            write_budget: bytes_per_day.map(write_budget).transpose()?,
            slots: gauges("kvbm_slots", "Slots by state.", &["tier", "state"])?,
            directories: gauges(
                "kvbm_disk_directory_up",
                "1 for a directory of the disk tier that takes blocks, 0 for one that does not.",
                &["dir"],
            )?,
            dirty_blocks: gauges(
                "kvbm_dirty_blocks",
                "Blocks that wait to be flushed.",
                &["tier"],
            )?,
            staging_slots: gauges(
                "kvbm_staging_slots",
                "DRAM slots through which blocks bounce, by state.",
                &["state"],
            )?,
            estimated_hit_rate: GaugeVec::new(
                Opts::new(
                    "kvbm_estimated_hit_rate",
                    "Share of requested blocks that a tier of a multiple of this one's size would have held.",
                ),
                &["tier", "scale"],
            )?,
            of_tier: of_tier.into_iter().collect::<Result<_, _>>()?,
            of_route: of_route.into_iter().collect::<Result<_, _>>()?,
        })
    }

    fn all(&self) -> impl Iterator<Item = &dyn Collector> {
        let always: [&dyn Collector; 8] = [
            &self.epoch,
            &self.accounting_drift,
            &self.completion_panics,
            &self.slots,
            &self.directories,
            &self.dirty_blocks,
            &self.staging_slots,
            &self.estimated_hit_rate,
        ];
        let vectors =
            self.of_tier.iter().chain(&self.of_route).map(|gauge| gauge as &dyn Collector);
        let budget = self.write_budget.iter().map(|gauge| gauge as &dyn Collector);
        always.into_iter().chain(vectors).chain(budget)
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

fn write_budget(bytes_per_day: u64) -> prometheus::Result<IntGauge> {
    let gauge = IntGauge::new(
        "kvbm_disk_write_budget_bytes",
        "Bytes that may be written to the disk tier in a day.",
    )?;
    gauge.set(i64::try_from(bytes_per_day).unwrap_or(i64::MAX));
    Ok(gauge)
}

impl Collector for StateGauges {
    fn desc(&self) -> Vec<&Desc> {
        self.all().flat_map(|gauge| gauge.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        if let Some(core) = self.core.upgrade() {
            self.update(&core);
        }
        self.all().flat_map(Collector::collect).collect()
    }
}

/// One gauge for each rank. Shows the last state after the leader is gone.
pub(crate) struct RankGauges {
    roll_call: RankRegistry,
    up: IntGaugeVec,
}

impl RankGauges {
    pub(crate) fn new(roll_call: RankRegistry) -> prometheus::Result<Self> {
        let up = IntGaugeVec::new(
            Opts::new("kvbm_rank_up", "1 for a rank that is there, 0 for one that is away."),
            &["rank"],
        )?;
        Ok(Self { roll_call, up })
    }
}

impl Collector for RankGauges {
    fn desc(&self) -> Vec<&Desc> {
        self.up.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for (rank, is_there) in self.roll_call.present().into_iter().flatten().enumerate() {
            self.up.with_label_values(&[&rank.to_string()]).set(i64::from(is_there));
        }
        self.up.collect()
    }
}

/// Counters of one store's requests and bytes.
pub(crate) struct ObjectTraffic {
    traffic: Arc<Traffic>,
    requests: IntCounterVec,
    bytes: IntCounterVec,
    refusals: IntCounterVec,
    left: GaugeVec,
    // Held while the counters catch up: two scrapes at once would add the same requests twice.
    turn: Mutex<()>,
}

impl ObjectTraffic {
    pub(crate) fn new(traffic: Arc<Traffic>) -> prometheus::Result<Self> {
        let requests = Opts::new("kvbm_object_requests_total", "Requests to the object store.");
        let bytes = Opts::new(
            "kvbm_object_bytes_total",
            "Bytes of objects sent to the object store and asked of it.",
        );
        let refusals = Opts::new(
            "kvbm_object_budget_refusals_total",
            "Segments not stored and runs of blocks not read because a budget of the object tier was spent.",
        );
        let left = Opts::new(
            "kvbm_object_budget_left",
            "Share of a budget of the object tier that is left.",
        );
        Ok(Self {
            traffic,
            refusals: IntCounterVec::new(refusals, &["budget"])?,
            left: GaugeVec::new(left, &["budget"])?,
            requests: IntCounterVec::new(requests, &["request", "outcome"])?,
            bytes: IntCounterVec::new(bytes, &["direction"])?,
            turn: Mutex::new(()),
        })
    }

    fn all(&self) -> [&dyn Collector; 4] {
        [&self.requests, &self.bytes, &self.refusals, &self.left]
    }
}

impl Collector for ObjectTraffic {
    fn desc(&self) -> Vec<&Desc> {
        self.all().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let _turn = self.turn.lock();
        for kind in RequestKind::ALL {
            for outcome in RequestOutcome::ALL {
                let now = self.traffic.requests(kind, outcome);
                if now > 0 {
                    catch_up(&self.requests.with_label_values(&[kind.name(), outcome.name()]), now);
                }
            }
        }
        catch_up(&self.bytes.with_label_values(&["sent"]), self.traffic.bytes_sent());
        catch_up(&self.bytes.with_label_values(&["received"]), self.traffic.bytes_received());
        for expense in Expense::ALL {
            // Without a limit there is nothing to watch.
            if let Some(left) = self.traffic.budget_left(expense) {
                catch_up(
                    &self.refusals.with_label_values(&[expense.name()]),
                    self.traffic.refused(expense),
                );
                self.left.with_label_values(&[expense.name()]).set(left);
            }
        }
        self.all().into_iter().flat_map(Collector::collect).collect()
    }
}
