//! A manager's counts, for Python.

use std::collections::BTreeMap;

use kvbm::table::{SlotCounts, TierStats};
use kvbm::{Manager, Tier};

/// By tier that is there and by name: slots now, and what happened since the start. All in blocks.
pub(crate) fn by_tier(manager: &Manager) -> BTreeMap<&'static str, BTreeMap<&'static str, u64>> {
    let tiers = Tier::ALL.into_iter().filter(|&tier| manager.counts(tier).total > 0);
    tiers.map(|tier| (tier.name(), counts(manager.counts(tier), manager.stats(tier)))).collect()
}

fn counts(slots: SlotCounts, stats: TierStats) -> BTreeMap<&'static str, u64> {
    // Named one by one, so that none that is added is forgotten.
    let SlotCounts { total, free, filling, resident, quarantined: in_quarantine, forgotten, lost } = slots;
    let slots = [
        ("total", total),
        ("free", free),
        ("filling", filling),
        ("resident", resident),
        ("in_quarantine", in_quarantine),
        ("forgotten", forgotten),
        ("lost", lost),
    ];
    let TierStats { published, evicted, declined, full, quarantined, unreadable, flush_failures, unflushed } =
        stats;
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
