//! A manager whose host tier outlives its process, in a directory in memory.

use std::fs;
use std::io::stdin;
use std::path::{Path, PathBuf};

use kvbm::{Manager, Options};
use kvbm_settings::Settings;
use kvbm_tiers::Mount;
use kvbm_tiers::testing::skip;
use prometheus::Registry;
use tempfile::TempDir;

use crate::engine::{self, Served};
use crate::process::{Process, say};
use crate::rig::files_of;

/// Blocks of the host tier.
pub const HOST: u64 = 48;

/// A directory in memory.
pub fn shm() -> Option<TempDir> {
    let shm = Path::new("/dev/shm");
    let found = Mount::of(shm).inspect_err(|error| skip("tmpfs", error)).ok();
    found.map(|_| tempfile::Builder::new().prefix("kvbm-test-").tempdir_in(shm).unwrap())
}

/// Of a manager in `dir`. Where that has a link to a directory for a disk tier there is one, and
/// where it has keys, blocks are encrypted.
pub fn settings(dir: &Path, block_bytes: usize) -> Settings {
    let mut settings = engine::settings(block_bytes as u64, 16, HOST);
    settings.host.persist = Some(dir.join("memory"));
    settings.host.staging_blocks = 4;
    settings.flush.interval_ms = 1;
    let keys = dir.join("keys");
    settings.encryption.key_file = keys.exists().then(|| keys.display().to_string());
    if let Ok(disk) = fs::read_link(dir.join("disk")) {
        engine::keep_on_disk(&mut settings, 256, disk);
    }
    settings
}

/// The same model each time, counted in `registry`.
pub fn options(registry: &Registry) -> Options {
    let fingerprint = engine::fingerprint("w");
    Options { fingerprint: Some(fingerprint), registry: registry.clone(), ..Options::default() }
}

/// Opens it, with a registry of its own.
pub fn open(dir: &Path, block_bytes: usize) -> kvbm::Result<(Manager, Registry)> {
    let registry = Registry::new();
    Ok((engine::open_with(settings(dir, block_bytes), options(&registry))?, registry))
}

/// The file in memory that holds the host tier of a manager in `dir`.
///
/// # Panics
/// If there is none.
pub fn memory_file(dir: &Path) -> PathBuf {
    files_of(dir, "memory").pop().expect("a region")
}

/// Plays an engine in a process of its own: serves the chains that it is told to, or chains without
/// end if it is to be killed while it is `busy`.
///
/// # Panics
/// If a byte is wrong.
pub fn be_an_engine(role: &str, manager: &Manager, serve: impl Fn(&Manager, u32) -> Served) {
    say("open");
    if role == "busy" {
        for n in 0.. {
            assert_eq!(serve(manager, n % 16).wrong, 0);
        }
    }
    for line in stdin().lines() {
        let line = line.expect("a line");
        if let Some(epoch) = line.strip_prefix("reset ") {
            manager.reset(epoch.parse::<u64>().expect("a number")).expect("a later epoch");
            say("reset");
            continue;
        }
        let served = serve(manager, line.parse().expect("a number"));
        // What was drained is in the index.
        engine::drain(manager);
        say(&format!("{} {}", served.saved, served.wrong));
    }
}

/// Has an engine serve these requests of eight blocks, and kills it.
///
/// # Panics
/// If it cannot.
pub fn leave(module: &str, dir: &Path, requests: impl IntoIterator<Item = u32>) {
    let mut process = Process::start(module, "engine", dir);
    assert_eq!(process.hear(), "open");
    for n in requests {
        assert_eq!(process.ask(&n.to_string()), "8 0");
    }
    process.kill();
}
