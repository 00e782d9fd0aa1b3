//! Names that dashboards of NVIDIA's KVBM use, kept so that they go on working.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvbm_tiers::{Route, Tier};
use prometheus::{GaugeVec, IntCounter, Opts};

use super::Builder;
use crate::error::Result;

/// Their handles.
#[derive(Clone)]
pub(super) struct Upstream {
    offload_blocks: [(Route, IntCounter); 4],
    onboard_blocks: [(Route, IntCounter); 3],
    pub(super) matched_tokens: IntCounter,
    object_read_failures: IntCounter,
    object_write_failures: IntCounter,
    hit_rates: [HitRate; 3],
}

#[derive(Clone)]
struct HitRate {
    tier: Tier,
    /// Not in the registry, which has it under another name where there was a hit.
    hit_tokens: Arc<AtomicU64>,
    rate: GaugeVec,
}

impl Upstream {
    pub(super) fn new(b: &Builder<'_>) -> Result<Self> {
        use Tier::{Device, Disk, Host, Object};
        let blocks =
            |route, name: &str| Ok((route, b.counter(name, "Blocks copied (name used by NVIDIA's KVBM).")?));
        // A vector without labels appears with its first value. A plain gauge would say 0 before anybody asked.
        let rate = |tier, name: &str| {
            let help = "Share of requested blocks that the tier held (name used by NVIDIA's KVBM).";
            let rate = b.register(GaugeVec::new(Opts::new(name, help), &[]))?;
            Ok(HitRate { tier, hit_tokens: Arc::default(), rate })
        };
        Ok(Self {
            offload_blocks: [
                blocks((Device, Host), "kvbm_offload_blocks_d2h")?,
                // `h2d` is host to disk here, and host to device below: NVIDIA's dashboards know them so.
                blocks((Host, Disk), "kvbm_offload_blocks_h2d")?,
                blocks((Device, Disk), "kvbm_offload_blocks_d2d")?,
                blocks((Device, Object), "kvbm_offload_blocks_d2o")?,
            ],
            onboard_blocks: [
                blocks((Host, Device), "kvbm_onboard_blocks_h2d")?,
                blocks((Disk, Device), "kvbm_onboard_blocks_d2d")?,
                blocks((Object, Device), "kvbm_onboard_blocks_o2d")?,
            ],
            matched_tokens: b.counter("kvbm_matched_tokens", "Tokens found below the device.")?,
            object_read_failures: b
                .counter("kvbm_object_read_failures", "Blocks that an object store failed to give.")?,
            object_write_failures: b
                .counter("kvbm_object_write_failures", "Blocks that an object store failed to take.")?,
            hit_rates: [
                rate(Host, "kvbm_host_cache_hit_rate")?,
                rate(Disk, "kvbm_disk_cache_hit_rate")?,
                rate(Object, "kvbm_object_cache_hit_rate")?,
            ],
        })
    }

    pub(super) fn copied(&self, route: Route) {
        // A block that stops in DRAM comes by once for each leg: `d2d`, `d2o` and `o2d` count direct copies alone.
        let counters = self.offload_blocks.iter().chain(&self.onboard_blocks);
        counters.filter(|(of, _)| *of == route).for_each(|(_, counter)| counter.inc());
    }

    pub(super) fn failed(&self, (from, to): Route) {
        if from == Tier::Object {
            self.object_read_failures.inc();
        } else if to == Tier::Object {
            self.object_write_failures.inc();
        }
    }

    pub(super) fn hit(&self, tier: Tier, tokens: u64) {
        let of_tier = self.hit_rates.iter().filter(|of| of.tier == tier);
        of_tier.for_each(|of| {
            of.hit_tokens.fetch_add(tokens, Ordering::Relaxed);
        });
    }

    pub(super) fn rates(&self, requested: u64) {
        for HitRate { hit_tokens, rate, .. } in &self.hit_rates {
            // Since the start: no window as NVIDIA has it.
            let share = hit_tokens.load(Ordering::Relaxed) as f64 / requested.max(1) as f64;
            rate.with_label_values(&[] as &[&str]).set(share);
        }
    }
}
