//! Policies, by the settings.

use kvbm_policies::admission::{Budget, Budgeted, TierPair, TierShape, WriteThrough};
use kvbm_policies::eviction::{TenantTerms, Tenants};
use kvbm_policies::{Admission, AdmissionKind, Eviction};
use kvbm_settings::{Capacity, DiskSettings, Settings, WriteBudget};
use kvbm_tiers::Tier;

/// A fresh policy for a tier of `slots` slots.
pub(super) fn eviction(settings: &Settings, slots: u32) -> Box<dyn Eviction> {
    let policy = settings.eviction.build(slots);
    match tenant_terms(settings) {
        Some(terms) => Box::new(Tenants::new(policy, terms)),
        None => policy,
    }
}

/// The terms on which tenants share each tier; `None` if owners of blocks do not matter.
fn tenant_terms(settings: &Settings) -> Option<TenantTerms> {
    let Settings { fair_tenants, tenant_weights, tenant_quotas, .. } = settings;
    if !fair_tenants && tenant_weights.is_empty() && tenant_quotas.is_empty() {
        return None;
    }
    // Settings without a block size open no tier.
    let block_bytes = settings.block_bytes.unwrap_or(u64::MAX);
    let blocks = |quota: &Capacity| u32::try_from(quota.blocks(block_bytes)).unwrap_or(u32::MAX);
    let quotas = tenant_quotas.iter().map(|(&tenant, quota)| (tenant, blocks(quota)));
    let weights = tenant_weights.iter().map(|(&tenant, &weight)| (tenant, weight));
    Some(TenantTerms { weights: weights.collect(), quotas: quotas.collect() })
}

/// A tier and its slots.
pub(super) type TierSlots = (Tier, u32);

/// The rule by which blocks go from `upper` to `lower`; `None` if all do, soon.
pub(super) fn admission(
    upper: TierSlots,
    lower: TierSlots,
    settings: &Settings,
) -> Option<Box<dyn Admission>> {
    let disk = Some(&settings.disk).filter(|_| lower.0 == Tier::Disk)?;
    let side = |(_, capacity)| TierShape { capacity, eviction: settings.eviction };
    let pair = TierPair { upper: side(upper), lower: side(lower) };
    let rule = match disk.admission {
        AdmissionKind::WriteThrough => None,
        kind => Some(kind.build(&pair)),
    };
    let Some(budget) = budget(disk, settings.block_bytes.unwrap_or_default()) else { return rule };
    let rule = rule.unwrap_or_else(|| Box::new(WriteThrough));
    Some(Box::new(Budgeted::new(rule, budget, settings.block_bytes.unwrap_or_default())))
}

fn budget(disk: &DiskSettings, block_bytes: u64) -> Option<Budget> {
    Some(match disk.write_budget? {
        WriteBudget::BytesPerDay(bytes_per_day) => Budget { bytes_per_day },
        WriteBudget::DriveWritesPerDay(times) => {
            let bytes =
                disk.capacity.map_or(0, |capacity| capacity.blocks(block_bytes) * block_bytes);
            Budget::drive_writes_per_day(times, bytes)
        }
    })
}

/// What may be written to the disk tier in a day; `None`: any number of bytes.
pub(super) fn bytes_per_day(settings: &Settings) -> Option<u64> {
    settings.disk.capacity?;
    budget(&settings.disk, settings.block_bytes.unwrap_or_default())
        .map(|budget| budget.bytes_per_day)
}

/// A disk tier that nothing can enter is allowed, but odd.
pub(super) fn warn_of_no_budget(settings: &Settings) {
    let budget = budget(&settings.disk, settings.block_bytes.unwrap_or_default());
    if settings.disk.capacity.is_some() && budget.is_some_and(|budget| budget.bytes_per_day == 0) {
        tracing::warn!("disk.write_budget is 0: nothing is ever written to the disk tier");
    }
}
