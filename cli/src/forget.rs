//! `kvbm forget`: destroys what a tenant's blocks are encrypted with, while no engine works.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kvbm_settings::Settings;
use kvbm_tiers::object::Store;
use kvbm_tiers::sealed::{KeyFiles, KeyStore};
use serde::Serialize;

use crate::GlobalOptions;
use crate::output::{self, CommandFailure};

/// A process that was killed may not quite be gone.
const PATIENCE: Duration = Duration::from_secs(3);

/// Forgets a tenant while the engine is stopped: destroys the keys that its blocks on disk, in the
/// object store and in persistent memory are encrypted with, in all namespaces of the directories
/// and the bucket that the settings name. What is left of its blocks cannot be read, and the next
/// start does not find it. Other workers that share the bucket and still run have its key in memory
/// until they end: stop them first. Exit status: 0 done, 1 something there is not encrypted and
/// does not say whose it is, 2 it could not be done, such as while an engine has the tiers open.
#[derive(Debug, Args)]
pub(crate) struct ForgetArgs {
    /// The tenant, by the number that requests name
    #[arg(long, value_name = "T")]
    tenant: u32,
    /// Directories of the disk tier, instead of those of the settings
    #[arg(long = "disk-dir", value_name = "DIR")]
    disk_dirs: Vec<PathBuf>,
    /// Object store, instead of that of the settings
    #[arg(long, value_name = "URL")]
    object_url: Option<String>,
}

/// What is printed as JSON.
#[derive(Debug, Serialize)]
struct ForgetReport<'a> {
    tenant: u32,
    keys_destroyed: usize,
    /// Files of blocks that are not encrypted.
    in_the_clear: &'a [PathBuf],
}

pub(crate) fn run(args: &ForgetArgs, global: &GlobalOptions) -> Result<(), CommandFailure> {
    let settings = global.load(|loader| loader)?.settings;
    let named = if args.disk_dirs.is_empty() { &settings.disk.dirs } else { &args.disk_dirs };
    let memory = settings.host.persist.iter().chain(&settings.host.persist_index);
    let mut dirs: Vec<_> = named.iter().chain(memory).filter(|dir| dir.is_dir()).cloned().collect();
    dirs.sort();
    dirs.dedup();
    let keys_destroyed = on_disk(&dirs, args.tenant)? + in_store(args, &settings)?;
    let in_the_clear = in_the_clear(&dirs);
    if global.json {
        let report =
            ForgetReport { tenant: args.tenant, keys_destroyed, in_the_clear: &in_the_clear };
        output::print_json(&report)?;
    } else {
        output::print(&format!("{keys_destroyed} keys of tenant {} destroyed", args.tenant))?;
    }
    match in_the_clear.first() {
        None => Ok(()),
        Some(path) => Err(CommandFailure::unexpected(format!(
            "{} is not encrypted and does not say whose blocks it has: remove it if they must go",
            path.display()
        ))),
    }
}

fn on_disk(dirs: &[PathBuf], tenant: u32) -> Result<usize, CommandFailure> {
    let files = KeyFiles::open_all(dirs, PATIENCE)
        .map_err(|error| CommandFailure::unusable(error.to_string()))?;
    destroy(files.iter(), tenant)
}

fn in_store(args: &ForgetArgs, settings: &Settings) -> Result<usize, CommandFailure> {
    let object = &settings.object;
    let Some(url) = args.object_url.as_deref().or_else(|| object.place()) else { return Ok(0) };
    let store = Store::open(url, &kvbm::store_options(object))
        .map_err(|error| CommandFailure::unusable(error.to_string()))?;
    let keys = store.all_keys().map_err(|error| CommandFailure::unusable(error.to_string()))?;
    destroy(keys.iter(), args.tenant)
}

/// All, also where one cannot be.
fn destroy<'k, K: KeyStore + 'k>(
    stores: impl Iterator<Item = &'k K>,
    tenant: u32,
) -> Result<usize, CommandFailure> {
    let destroyed: Vec<_> = stores.map(|keys| keys.destroy(tenant, &[])).collect();
    let keys = destroyed.into_iter().sum::<std::io::Result<usize>>();
    keys.map_err(|error| {
        CommandFailure::unusable(format!("not every key could be destroyed: {error}; try again"))
    })
}

/// Files of slots, on drives or in memory, whose names say that they are not encrypted.
fn in_the_clear(dirs: &[PathBuf]) -> Vec<PathBuf> {
    let is_plain = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let has_slots = path.extension().is_some_and(|end| end == "blocks" || end == "memory");
        has_slots && name.starts_with("kvbm-v1-block")
    };
    let entries = dirs.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_plain).collect()
}
