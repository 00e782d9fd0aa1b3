//! What tenants ask for, find and hold: those that the settings name, and all others together.
//!
//! Requests may name any of four billion tenants, too many for a series each. So a metric has a
//! label for each tenant with a weight or a quota, up to a bound, and `other`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvbm_settings::Settings;
use kvbm_tiers::Tier;
use prometheus::{IntCounterVec, IntGaugeVec, Registry};

use super::builder::MetricsBuilder;
use super::catch_up;
use crate::error::Result;
use crate::scheduler::Core;

/// Tenants that have a label: those with the smallest numbers.
const MAX_SHOWN: usize = 8;
const OTHER: &str = "other";

/// Which tenants are shown; empty: the settings name none.
pub(crate) fn shown_tenants(settings: &Settings) -> Vec<u32> {
    let named = settings.tenant_weights.keys().chain(settings.tenant_quotas.keys()).copied();
    let mut named: Vec<u32> = named.collect();
    named.sort_unstable();
    named.dedup();
    named.truncate(MAX_SHOWN);
    named
}

/// What leases of each shown tenant asked for and found, in blocks; of the others last.
#[derive(Debug)]
pub(crate) struct TenantLeases {
    shown: Vec<u32>,
    counts: Vec<TenantCounts>,
}

/// A cache line for each: tenants must not wait for each other's counts.
#[derive(Debug, Default)]
#[repr(align(64))]
struct TenantCounts {
    requested: AtomicU64,
    hit: AtomicU64,
}

impl TenantLeases {
    fn new(shown: Vec<u32>) -> Self {
        let counts = std::iter::repeat_with(TenantCounts::default).take(shown.len() + 1).collect();
        Self { shown, counts }
    }

    /// In order.
    pub(crate) fn shown(&self) -> &[u32] {
        &self.shown
    }

    pub(crate) fn requested(&self, tenant: Option<u32>, blocks: usize, hit: usize) {
        let shown = tenant.and_then(|tenant| self.shown.binary_search(&tenant).ok());
        let counts = &self.counts[shown.unwrap_or(self.shown.len())];
        counts.requested.fetch_add(blocks as u64, Ordering::Relaxed);
        counts.hit.fetch_add(hit as u64, Ordering::Relaxed);
    }
}

/// The registry's view of tenants.
pub(crate) struct TenantMetrics {
    leases: Arc<TenantLeases>,
    block_tokens: u64,
    requested: IntCounterVec,
    hit: IntCounterVec,
    blocks: IntGaugeVec,
    evicted: IntGaugeVec,
}

impl TenantMetrics {
    /// Shows nothing if the settings name no tenant.
    pub(crate) fn register(
        registry: &Registry,
        core: &Arc<Core>,
        settings: &Settings,
        block_tokens: u64,
    ) -> Result<()> {
        let shown = shown_tenants(settings);
        if shown.is_empty() {
            return Ok(());
        }
        let mut b = MetricsBuilder::default();
        let metrics = Self {
            leases: core.count_tenants(TenantLeases::new(shown)),
            block_tokens,
            requested: b.counters(
                "kvbm_tenant_requested_tokens_total",
                "Tokens of a tenant's leased chains.",
                &["tenant"],
            )?,
            hit: b.counters(
                "kvbm_tenant_hit_tokens_total",
                "Tokens found of a tenant's leased chains.",
                &["tenant"],
            )?,
            blocks: b.gauges(
                "kvbm_tenant_blocks",
                "Blocks of a tier that are charged to a tenant.",
                &["tenant", "tier"],
            )?,
            evicted: b.gauges(
                "kvbm_tenant_evicted_blocks",
                "Blocks of a tenant's evicted since the start.",
                &["tenant", "tier"],
            )?,
        };
        let quotas =
            b.gauges("kvbm_tenant_quota_blocks", "A tenant's quota of each tier.", &["tenant"])?;
        let block_bytes = settings.block_bytes.unwrap_or(u64::MAX);
        for tenant in &metrics.leases.shown {
            if let Some(quota) = settings.tenant_quotas.get(tenant) {
                let blocks = quota.blocks(block_bytes).cast_signed();
                quotas.with_label_values(&[&tenant.to_string()]).set(blocks);
            }
        }
        // Weak: as in gauges.
        let core = Arc::downgrade(core);
        b.register(registry, move || {
            metrics.catch_up();
            if let Some(core) = core.upgrade() {
                // The table is locked anew for each tier.
                Tier::ALL.into_iter().for_each(|tier| metrics.update_tier(&core, tier));
            }
        })
    }

    fn catch_up(&self) {
        for (label, counts) in self.labels().zip(&self.leases.counts) {
            // In this order: no rate is above 1.
            let hit = counts.hit.load(Ordering::Relaxed) * self.block_tokens;
            let requested = counts.requested.load(Ordering::Relaxed) * self.block_tokens;
            // A counter appears with its first event.
            if requested > 0 {
                catch_up(&self.requested.with_label_values(&[&label]), requested);
                catch_up(&self.hit.with_label_values(&[&label]), hit);
            }
        }
    }

    fn labels(&self) -> impl Iterator<Item = String> + '_ {
        self.leases.shown.iter().map(ToString::to_string).chain([OTHER.to_owned()])
    }

    fn update_tier(&self, core: &Core, tier: Tier) {
        let table = core.table();
        if !table.has(tier) {
            return;
        }
        let (total, evicted) = (table.counts(tier).resident, table.stats(tier).evicted);
        let of_shown = table.tenant_counts(tier);
        drop(table);
        let others = (
            total.saturating_sub(of_shown.iter().map(|counts| counts.charged).sum()),
            evicted.saturating_sub(of_shown.iter().map(|counts| counts.evicted).sum()),
        );
        let all = of_shown.iter().map(|counts| (counts.charged, counts.evicted)).chain([others]);
        for (label, (charged, evicted)) in self.labels().zip(all) {
            let labels = [label.as_str(), tier.name()];
            self.blocks.with_label_values(&labels).set(i64::from(charged));
            self.evicted.with_label_values(&labels).set(evicted.cast_signed());
        }
    }
}
