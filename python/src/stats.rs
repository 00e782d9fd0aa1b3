//! A manager's counts and metrics, for Python.

use std::collections::BTreeMap;

use kvbm::{Manager, Tier};
use kvbm::{SlotCounts, TierStats};
use prometheus::Registry;
use prometheus::proto::{Metric, MetricFamily, MetricType};

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
