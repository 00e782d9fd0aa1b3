//! Describes what a manager has, in lines for a log.

use kvbm::{Manager, Tier};
use kvbm_settings::Capacity;

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
