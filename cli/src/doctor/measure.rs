//! How fast the routes are: each tier's working set goes down and comes back, once to warm up and
//! then a few times.

use std::time::Duration;

use kvbm::Tier;
use kvbm_cli::measuring::rounds::Spread;
use kvbm_settings::{Capacity, Settings};
use tokio::runtime::Runtime;

use crate::bench::tiers::Bed;
use crate::failure::CommandFailure;
use crate::scratch::CommandScratch;

/// Bytes that go to and fro.
const WORKING_SET: u64 = 64 << 20;
const ROUNDS: usize = 3;

/// A route and how many MiB/s it moved, with everything that the manager does on the way.
pub(super) type Measured = ((Tier, Tier), f64);

/// Measures the routes between the device and the host, and between the host and `bottom` if that
/// is another.
pub(super) fn routes(
    runtime: &Runtime,
    settings: &Settings,
    bottom: Tier,
) -> Result<[Measured; 2], CommandFailure> {
    let (mut settings, bytes) = working_set(settings, bottom);
    let _scratch = CommandScratch::divert(&mut settings)?;
    let bed = Bed::open(settings, bottom, runtime)?;
    let (mut writes, mut reads) = (Vec::new(), Vec::new());
    let mib_s = |time: Duration| bytes as f64 / f64::from(1 << 20) / time.as_secs_f64();
    for round in 0..=ROUNDS {
        bed.prepare_write()?;
        let write = bed.write()?;
        bed.prepare_read()?;
        let read = bed.read()?;
        if round > 0 {
            writes.push(mib_s(write));
            reads.push(mib_s(read));
        }
    }
    let above = if bottom == Tier::Host { Tier::Device } else { Tier::Host };
    let median = |rates| Spread::of(rates).median;
    Ok([((above, bottom), median(writes)), ((bottom, above), median(reads))])
}

/// The settings with tiers just large enough, and how many bytes go through them.
fn working_set(settings: &Settings, bottom: Tier) -> (Settings, u64) {
    let block_bytes = settings.block_bytes.unwrap_or_default().max(1);
    let blocks = (WORKING_SET / block_bytes).max(1);
    let capacity = Some(Capacity::Blocks(blocks));
    let mut small = settings.clone();
    (small.device.capacity, small.host.capacity) = (capacity, capacity);
    small.disk.capacity = capacity.filter(|_| bottom == Tier::Disk);
    small.object.url = small.object.url.filter(|_| bottom == Tier::Object);
    small.object.capacity = capacity;
    // Nothing is flushed before it is asked for.
    small.flush.interval_ms = 86_400_000;
    small.flush.dirty_watermark = 1.0;
    (small, blocks * block_bytes)
}
