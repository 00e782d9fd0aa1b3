//! Policies by their settings.

use std::collections::HashMap;

use kvbm_policies::admission::{Budget, Budgeted, Edge, Side, WriteThrough};
use kvbm_policies::eviction::Tenants;
use kvbm_policies::{Admission, AdmissionKind, Eviction, EvictionKind};
use kvbm_settings::{AdmissionMode, DiskSettings, EvictionPolicy, Settings, WriteBudget};
use kvbm_tiers::Tier;

/// A fresh policy for a tier of `slots` slots.
pub(super) fn eviction(settings: &Settings, slots: u32) -> Box<dyn Eviction> {
    let policy = eviction_kind(settings.eviction).build(slots);
    if settings.fair_tenants { Box::new(Tenants::new(policy, HashMap::new())) } else { policy }
}

const fn eviction_kind(eviction: EvictionPolicy) -> EvictionKind {
    match eviction {
        EvictionPolicy::Hazard => EvictionKind::Hazard,
        EvictionPolicy::Lru => EvictionKind::Lru,
        EvictionPolicy::Fifo => EvictionKind::Fifo,
        EvictionPolicy::Lfu => EvictionKind::Lfu,
        EvictionPolicy::Lru2 => EvictionKind::Lru2,
        EvictionPolicy::Slru => EvictionKind::Slru,
        EvictionPolicy::Arc => EvictionKind::Arc,
        EvictionPolicy::S3Fifo => EvictionKind::S3Fifo,
        EvictionPolicy::Sieve => EvictionKind::Sieve,
        EvictionPolicy::Lirs => EvictionKind::Lirs,
        EvictionPolicy::Turn => EvictionKind::Turn,
    }
}

/// A tier and its slots.
pub(super) type Place = (Tier, u32);

/// The rule by which blocks go from `upper` to `lower`; `None` where all do, soon.
pub(super) fn admission(upper: Place, lower: Place, settings: &Settings) -> Option<Box<dyn Admission>> {
    let disk = Some(&settings.disk).filter(|_| lower.0 == Tier::Disk)?;
    let side = |(_, capacity)| Side { capacity, eviction: eviction_kind(settings.eviction) };
    let edge = Edge { upper: side(upper), lower: side(lower) };
    let rule = match disk.admission {
        AdmissionMode::WriteThrough => None,
        AdmissionMode::WriteBack => Some(AdmissionKind::WriteBack.build(&edge)),
        AdmissionMode::Selective => Some(AdmissionKind::Selective.build(&edge)),
        AdmissionMode::Auto => Some(AdmissionKind::Auto.build(&edge)),
    };
    let Some(budget) = budget(disk, settings.block_bytes.unwrap_or_default()) else { return rule };
    let rule = rule.unwrap_or_else(|| Box::new(WriteThrough));
    Some(Box::new(Budgeted::new(rule, budget, upper.1, settings.block_bytes.unwrap_or_default())))
}

fn budget(disk: &DiskSettings, block_bytes: u64) -> Option<Budget> {
    Some(match disk.write_budget? {
        WriteBudget::BytesPerDay(bytes_per_day) => Budget { bytes_per_day },
        WriteBudget::DriveWritesPerDay(times) => {
            let bytes = disk.capacity.map_or(0, |capacity| capacity.blocks(block_bytes) * block_bytes);
            Budget::drive_writes_per_day(times, bytes)
        }
    })
}

/// A disk tier that nothing can get into is allowed, and odd.
pub(super) fn warn_of_no_budget(settings: &Settings) {
    let budget = budget(&settings.disk, settings.block_bytes.unwrap_or_default());
    if settings.disk.capacity.is_some() && budget.is_some_and(|budget| budget.bytes_per_day == 0) {
        tracing::warn!("disk.write_budget is 0: nothing is ever written to the disk tier");
    }
}
