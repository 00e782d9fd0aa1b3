//! `kvbm fsck`: what a process left, checked while nobody works with it.
//!
//! | module | holds |
//! |---|---|
//! | `files` | which files of a directory belong together |
//! | `check` | what is wrong with them, and putting it right |

mod check;
mod files;

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use self::check::Finding;
use crate::failure::Failure;
use crate::global::Global;
use crate::output;

/// Checks kept disk tiers and host tiers: every block's bytes against the checksum in its index, and whether its chain
/// is there from its root. What is wrong no start serves; here it is told, and with --repair dropped. Exit status: 0 all
/// is sound, 1 something was not, 2 it could not be checked, such as while somebody has it open.
#[derive(Debug, Args)]
pub(crate) struct FsckArgs {
    /// Directories with slot files and their indices: all of a tier's together, else chains cannot be checked
    #[arg(required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// Drop from the indices what is wrong, so that the next start is clean; what is sound stays as it is
    #[arg(long)]
    repair: bool,
}

/// What is printed as JSON.
#[derive(Debug, Serialize)]
struct Report<'a> {
    is_sound: bool,
    repaired: bool,
    files: &'a [Finding],
    /// Files of ours that no index tells of: no start finds anything in them.
    without_index: &'a [PathBuf],
}

pub(crate) fn run(args: &FsckArgs, global: &Global) -> Result<(), Failure> {
    let found = files::find(&args.dirs)?;
    let findings = check::check(&found.pairs, args.repair)?;
    let is_sound = findings.iter().all(Finding::is_sound);
    let repaired = args.repair && !is_sound;
    if global.json {
        let report = Report { is_sound, repaired, files: &findings, without_index: &found.without_index };
        output::print_json(&report)?;
    } else {
        output::print(&text(&findings))?;
        for path in &found.without_index {
            output::print(&format!("no index tells of {}: no start finds anything in it", path.display()))?;
        }
    }
    match (is_sound, repaired) {
        (true, _) => Ok(()),
        (false, true) => Err(Failure::unexpected("what was wrong is dropped; the next start is clean")),
        (false, false) => Err(Failure::unexpected("not all is sound; --repair drops what is not")),
    }
}

fn text(findings: &[Finding]) -> String {
    let titles = ["index", "tier", "blocks", "wrong bytes", "no root", "bad entries", "torn", "header"];
    let mut table = output::table(&titles, 2);
    for finding in findings {
        let Finding { index, tier, blocks, wrong, orphans, damaged, torn_bytes, header_is_whole } = finding;
        let orphans = orphans.map_or("?".to_owned(), output::count);
        let header = if *header_is_whole { "sound" } else { "one copy bad" };
        let [blocks, wrong, damaged] = [blocks, wrong, damaged].map(|&number| output::count(number));
        let torn = output::bytes(*torn_bytes);
        let name = index.display().to_string();
        table.add_row([&name, *tier, &blocks, &wrong, &orphans, &damaged, &torn, header]);
    }
    table.trim_fmt()
}
