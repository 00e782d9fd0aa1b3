//! What a manager tells of itself: counts and metrics, what it has, what comes and goes.

use std::collections::BTreeMap;

use kvbm::{CacheEvent, CachedBlock, Manager, SlotCounts, Tier, TierStats};
use kvbm_settings::Capacity;
use prometheus::proto::{Metric, MetricFamily, MetricType};
use prometheus::{Registry, TextEncoder};
use pyo3::prelude::*;

use crate::errors::classes;
use crate::names::Chain;

/// By tier that is there and by name: slots now, and what happened since the start. All in blocks.
pub(crate) fn by_tier(manager: &Manager) -> BTreeMap<&'static str, BTreeMap<&'static str, u64>> {
    let tiers = Tier::ALL.into_iter().filter(|&tier| manager.admin().counts(tier).total > 0);
    tiers
        .map(|tier| {
            (tier.name(), counts(manager.admin().counts(tier), manager.admin().stats(tier)))
        })
        .collect()
}

fn counts(slots: SlotCounts, stats: TierStats) -> BTreeMap<&'static str, u64> {
    // Named one by one, so that none that is added is forgotten.
    let SlotCounts { total, free, filling, resident, quarantined: in_quarantine, forgotten, lost } =
        slots;
    let slots = [
        ("total", total),
        ("free", free),
        ("filling", filling),
        ("resident", resident),
        ("in_quarantine", in_quarantine),
        ("forgotten", forgotten),
        ("lost", lost),
    ];
    let TierStats {
        published,
        evicted,
        declined,
        full,
        quarantined,
        unreadable,
        flush_failures,
        unflushed,
    } = stats;
    let since = [
        ("published", published),
        ("evicted", evicted),
        ("declined", declined),
        ("full", full),
        ("quarantined", quarantined),
        ("unreadable", unreadable),
        ("flush_failures", flush_failures),
        ("unflushed", unflushed),
    ];
    slots.map(|(name, count)| (name, u64::from(count))).into_iter().chain(since).collect()
}

/// Leading blocks of a chain that each tier holds, of tiers that hold any.
pub(crate) fn matches(
    py: Python<'_>,
    manager: &Manager,
    chain: &Chain,
) -> BTreeMap<&'static str, usize> {
    let held = py.detach(|| manager.matches(&chain.hashes));
    let by_tier = Tier::ALL.into_iter().map(|tier| (tier.name(), held.blocks(tier)));
    by_tier.filter(|&(_, held)| held > 0).collect()
}

/// All metrics of a registry, as Prometheus takes them.
pub(crate) fn text(py: Python<'_>, registry: &Registry) -> PyResult<String> {
    let text = py.detach(|| TextEncoder::new().encode_to_string(&registry.gather()));
    text.map_err(|error| classes::KvbmError::new_err(error.to_string()))
}

/// A metric: its name, what it means, whether it only grows, and its values by labels.
pub(crate) type Samples = (String, String, bool, Vec<(BTreeMap<String, String>, f64)>);

/// All counters and gauges of a registry. Not its histograms: a collector of counts cannot add
/// their buckets to its own.
pub(crate) fn samples(registry: &Registry) -> Vec<Samples> {
    registry.gather().iter().filter_map(samples_of).collect()
}

fn samples_of(family: &MetricFamily) -> Option<Samples> {
    let value: fn(&Metric) -> f64 = match family.get_field_type() {
        MetricType::COUNTER => |metric| metric.get_counter().get_value(),
        MetricType::GAUGE => |metric| metric.get_gauge().get_value(),
        _ => return None,
    };
    let values = family.get_metric().iter().map(|metric| (labels(metric), value(metric))).collect();
    let grows = family.get_field_type() == MetricType::COUNTER;
    Some((family.name().to_owned(), family.help().to_owned(), grows, values))
}

fn labels(metric: &Metric) -> BTreeMap<String, String> {
    metric
        .get_label()
        .iter()
        .map(|label| (label.name().to_owned(), label.value().to_owned()))
        .collect()
}

/// A line for each tier, and one for the routes between them.
pub(crate) fn opened(manager: &Manager) -> Vec<String> {
    let state = manager.admin().state();
    let place = |tier| match tier {
        Tier::Device => None,
        Tier::Host => state.settings.get("host.persist"),
        Tier::Disk => state.settings.get("disk.dirs"),
        Tier::Object => state.settings.get("object.url"),
    };
    let found = |tier| -> usize {
        manager
            .admin()
            .recovered()
            .iter()
            .filter(|report| report.tier == tier)
            .map(|report| report.blocks)
            .sum()
    };
    let mut lines = Vec::new();
    for held in &state.tiers {
        let (tier, blocks) = (held.tier, held.capacity_blocks);
        let size = Capacity::Bytes(u64::from(blocks) * state.block_bytes);
        let place = place(tier).filter(|place| *place != "none");
        let place = place.map(|place| format!(" in {place}")).unwrap_or_default();
        let found = match found(tier) {
            0 => String::new(),
            found => format!(", {found} blocks of an earlier process"),
        };
        lines.push(format!("{tier}: {blocks} blocks, {size}{place}{found}"));
    }
    let routes = state
        .routes
        .iter()
        .map(|route| format!("{} to {} ({})", route.from, route.to, route.backend));
    lines.push(format!("routes: {}", routes.collect::<Vec<_>>().join(", ")));
    lines
}

/// What comes to a manager's tiers and leaves them, from `Manager.events` on.
///
/// A reader that is too slow loses the oldest: 65,536 wait.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct Events(pub(crate) kvbm::Events);

/// What happened, in which tier, to which block, and after which it comes in its chain.
type Event = (&'static str, Option<&'static str>, Option<u128>, Option<u128>);

#[pymethods]
impl Events {
    /// Those that wait, `limit` at most, oldest first: `(what, tier, block, parent)`. Blocks go by
    /// their `Chain.names`.
    ///
    /// `what` is `stored` or `removed`; `cleared`: a reset, and no tier holds anything any more;
    /// `lost`: some events are, since this was called too late. The latter two have nothing else.
    fn take(&mut self, py: Python<'_>, limit: usize) -> Vec<Event> {
        py.detach(|| {
            std::iter::from_fn(|| self.0.try_next()).take(limit).filter_map(event).collect()
        })
    }
}

fn event(event: CacheEvent) -> Option<Event> {
    match event {
        CacheEvent::Stored { block, .. } => Some(of_block("stored", block)),
        CacheEvent::Removed { block, .. } => Some(of_block("removed", block)),
        CacheEvent::Cleared { .. } => Some(("cleared", None, None, None)),
        CacheEvent::Lost(_) => Some(("lost", None, None, None)),
        // Kinds that are not known here yet.
        _ => None,
    }
}

const fn of_block(what: &'static str, block: CachedBlock) -> Event {
    let parent = match block.parent {
        Some(parent) => Some(parent.get()),
        None => None,
    };
    (what, Some(block.tier.name()), Some(block.hash.get()), parent)
}
