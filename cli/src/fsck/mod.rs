//! `kvbm fsck`: what a process left in directories, checked while no process works with it, and
//! what many left in a bucket.
//!
//! | module | holds |
//! |---|---|
//! | `files` | directories: what is wrong with indices and slots, and putting it right |
//! | `bucket` | buckets |

mod bucket;
mod files;

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use kvbm_settings::ObjectSettings;
use kvbm_tiers::sealed::KeyRing;
use serde::Serialize;

use self::bucket::BucketFindings;
use self::files::IndexFinding;
use crate::GlobalOptions;
use crate::output::{self, CommandFailure};

/// Checks what outlives a process: every block's bytes against the checksum that was stored with
/// them.
///
/// Directories of kept disk tiers and host tiers: besides, whether each block's chain is there from
/// its root. A URL, `file:///directory` or `s3://bucket/prefix`, names a bucket of an object tier,
/// which workers may go on using: besides, whether what they rely on is there, and what no
/// worker needs any more. It is reached as the settings of the object tier say. What is encrypted
/// is verified with the keys that the settings name. What is wrong no start serves; here it is
/// told, and with --repair dropped.
///
/// Exit status: 0 all is sound, 1 something was not, 2 it could not be checked, such as a directory
/// that somebody has open.
#[derive(Debug, Args)]
pub(crate) struct FsckArgs {
    /// Directories with slot files and their indices, all of a tier's together, else chains cannot
    /// be checked; or buckets
    #[arg(required = true, value_name = "DIR|URL")]
    places: Vec<String>,
    /// Drop what is wrong from indices, and from a bucket also garbage, but nothing that a worker
    /// relies on
    #[arg(long)]
    repair: bool,
}

/// What is printed as JSON.
#[derive(Debug, Serialize)]
struct FsckReport<'a> {
    is_sound: bool,
    repaired: bool,
    files: &'a [IndexFinding],
    /// Files of ours that no index tells of: no start finds anything in them.
    without_index: &'a [PathBuf],
    buckets: &'a [BucketFindings],
}

pub(crate) fn run(args: &FsckArgs, global: &GlobalOptions) -> Result<(), CommandFailure> {
    let (urls, dirs): (Vec<_>, Vec<_>) =
        args.places.iter().partition(|place| bucket::is_url(place));
    let dirs: Vec<PathBuf> = dirs.into_iter().map(PathBuf::from).collect();
    let found = files::find(&dirs)?;
    let keys = keys(global)?;
    let findings = files::check(&found.pairs, keys.as_ref(), args.repair)?;
    let object = if urls.is_empty() {
        ObjectSettings::default()
    } else {
        global.load(|all| all)?.settings.object
    };
    let buckets = urls.iter().map(|url| bucket::check(url, &object, keys.clone(), args.repair));
    let buckets = buckets.collect::<Result<Vec<_>, _>>()?;
    let is_sound = findings.iter().all(IndexFinding::is_sound)
        && buckets.iter().all(|bucket| bucket.report.is_sound());
    let repaired = args.repair
        && (!findings.iter().all(IndexFinding::is_sound)
            || buckets.iter().any(|bucket| bucket.report.removed() > 0));
    if global.json {
        let without_index = &found.without_index;
        let report =
            FsckReport { is_sound, repaired, files: &findings, without_index, buckets: &buckets };
        output::print_json(&report)?;
    } else {
        if !dirs.is_empty() {
            output::print(&files::table(&findings))?;
        }
        for path in &found.without_index {
            output::print(&format!(
                "no index tells of {}: no start finds anything in it",
                path.display()
            ))?;
        }
        buckets.iter().try_for_each(BucketFindings::print)?;
    }
    match (is_sound, repaired) {
        (true, _) if !buckets.iter().all(|bucket| bucket.report.is_complete()) => Err(
            CommandFailure::unusable("not all could be read: what was read is sound; try again"),
        ),
        (true, _) => Ok(()),
        (false, true) => Err(CommandFailure::unexpected(
            "what was wrong is dropped, unless a worker relies on it",
        )),
        (false, false) => {
            Err(CommandFailure::unexpected("not all is sound; --repair drops what is not"))
        }
    }
}

/// The main keys that the settings name: indices and footers of encrypted blocks are authenticated
/// with one.
fn keys(global: &GlobalOptions) -> Result<Option<Arc<KeyRing>>, CommandFailure> {
    let settings = global.load(|loader| loader)?.settings;
    kvbm::main_keys(&settings).map_err(|error| CommandFailure::unusable(error.to_string()))
}
