//! A manager whose host tier outlives its process, in a directory in memory.

use std::fs;
use std::path::Path;

use kvbm::{Manager, Options};
use kvbm_settings::Settings;
use kvbm_tiers::Mount;
use kvbm_tiers::testing::skip;
use prometheus::Registry;
use tempfile::TempDir;

use crate::engine;

/// Blocks of the host tier.
pub const HOST: u64 = 48;

/// A directory in memory.
pub fn shm() -> Option<TempDir> {
    let shm = Path::new("/dev/shm");
    let found = Mount::of(shm).inspect_err(|error| skip("tmpfs", error)).ok();
    found.map(|_| tempfile::Builder::new().prefix("kvbm-test-").tempdir_in(shm).unwrap())
}

/// Of a manager in `dir`. Where that has a link to a directory for a disk tier there is one, of so
/// many blocks.
pub fn settings(dir: &Path, block_bytes: u64, disk_blocks: u64) -> Settings {
    let mut settings = engine::settings(block_bytes, 16, HOST);
    settings.host.persist = Some(dir.join("memory"));
    settings.host.staging_blocks = 4;
    settings.flush.interval_ms = 1;
    if let Ok(disk) = fs::read_link(dir.join("disk")) {
        engine::add_disk(&mut settings, disk_blocks, disk);
        settings.disk.keep = true;
    }
    settings
}

/// The same model each time, counted in `registry`.
pub fn options(registry: &Registry) -> Options {
    let fingerprint = engine::fingerprint("w");
    Options { fingerprint: Some(fingerprint), registry: registry.clone(), ..Options::default() }
}

/// Opens it, with a registry of its own.
pub fn open(settings: Settings) -> kvbm::Result<(Manager, Registry)> {
    let registry = Registry::new();
    Ok((engine::block_on(Manager::open(settings, options(&registry)))?, registry))
}
