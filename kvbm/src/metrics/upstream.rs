//! Names that dashboards of NVIDIA's KVBM use, kept so that these go on working.

use kvbm_tiers::{Route, Tier};
use prometheus::{GaugeVec, IntCounter};

use super::builder::MetricsBuilder;
use super::catch_up;
use crate::error::Result;

/// Their handles.
#[derive(Clone)]
pub(super) struct UpstreamMetrics {
    offload_blocks: [(Route, IntCounter); 4],
    onboard_blocks: [(Route, IntCounter); 3],
    object_read_failures: IntCounter,
    object_write_failures: IntCounter,
}

impl UpstreamMetrics {
    pub(super) fn new(b: &mut MetricsBuilder) -> Result<Self> {
        use Tier::{Device, Disk, Host, Object};
        let mut blocks = |route, name: &str| {
            Ok((route, b.counter(name, "Blocks copied (name used by NVIDIA's KVBM).")?))
        };
        Ok(Self {
            offload_blocks: [
                blocks(Route::new(Device, Host), "kvbm_offload_blocks_d2h")?,
                // `h2d` is host to disk here, and host to device below, as in NVIDIA's dashboards.
                blocks(Route::new(Host, Disk), "kvbm_offload_blocks_h2d")?,
                blocks(Route::new(Device, Disk), "kvbm_offload_blocks_d2d")?,
                blocks(Route::new(Device, Object), "kvbm_offload_blocks_d2o")?,
            ],
            onboard_blocks: [
                blocks(Route::new(Host, Device), "kvbm_onboard_blocks_h2d")?,
                blocks(Route::new(Disk, Device), "kvbm_onboard_blocks_d2d")?,
                blocks(Route::new(Object, Device), "kvbm_onboard_blocks_o2d")?,
            ],
            object_read_failures: b.counter(
                "kvbm_object_read_failures",
                "Blocks that an object store failed to give.",
            )?,
            object_write_failures: b.counter(
                "kvbm_object_write_failures",
                "Blocks that an object store failed to take.",
            )?,
        })
    }

    pub(super) fn copied(&self, route: Route, blocks: u64) {
        // A block that stops in DRAM counts once for each leg: `d2d`, `d2o` and `o2d` count direct
        // copies only.
        let counters = self.offload_blocks.iter().chain(&self.onboard_blocks);
        counters.filter(|(of, _)| *of == route).for_each(|(_, counter)| counter.inc_by(blocks));
    }

    pub(super) fn failed(&self, route: Route) {
        if route.from == Tier::Object {
            self.object_read_failures.inc();
        } else if route.to == Tier::Object {
            self.object_write_failures.inc();
        }
    }
}

/// The metrics of leases, updated when they are read.
pub(super) struct UpstreamHits {
    matched_tokens: IntCounter,
    rates: [(Tier, GaugeVec); 3],
}

impl UpstreamHits {
    pub(super) fn new(b: &mut MetricsBuilder) -> Result<Self> {
        // A vector without labels appears with its first value. A plain gauge would say 0 before
        // the first request.
        let mut rate = |tier, name: &str| {
            let help = "Share of requested blocks that the tier held (name used by NVIDIA's KVBM).";
            b.shares(name, help, &[]).map(|rate| (tier, rate))
        };
        Ok(Self {
            rates: [
                rate(Tier::Host, "kvbm_host_cache_hit_rate")?,
                rate(Tier::Disk, "kvbm_disk_cache_hit_rate")?,
                rate(Tier::Object, "kvbm_object_cache_hit_rate")?,
            ],
            matched_tokens: b.counter("kvbm_matched_tokens", "Tokens found below the device.")?,
        })
    }

    /// `hit` of the `requested` tokens were hit in each tier since the start; NVIDIA has a window.
    pub(super) fn catch_up(&self, hit: [u64; Tier::COUNT], requested: u64) {
        catch_up(&self.matched_tokens, self.rates.iter().map(|(tier, _)| hit[tier.index()]).sum());
        for (tier, rate) in &self.rates {
            let share = hit[tier.index()] as f64 / requested.max(1) as f64;
            rate.with_label_values(&[] as &[&str]).set(share);
        }
    }
}
