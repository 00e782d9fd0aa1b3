//! `kvbm bench`: what this machine does with the block table and the tiers.

#[cfg(feature = "nixl")]
pub(crate) mod nixl;
pub(crate) mod table;
pub(crate) mod tiers;

use clap::Subcommand;

use crate::Global;
use crate::failure::Failure;
use crate::output;

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Time the block table: match, cycle, memory
    Table(table::TableArgs),
    /// Time the tiers through the manager, against memcpy, a raw ring and the raw object client
    Tiers(tiers::TiersArgs),
    /// Time NIXL between two processes, and what our layer above it costs
    #[cfg(feature = "nixl")]
    Nixl(nixl::NixlArgs),
}

impl Bench {
    pub(crate) fn run(&self, global: &Global) -> Result<(), Failure> {
        global.load(|loader| loader)?;
        match self {
            Self::Table(args) => {
                let report = table::run(args);
                if global.json { output::print_json(&report) } else { output::print(&table_text(&report)) }
            }
            Self::Tiers(args) => {
                let report = tiers::run(args)?;
                if global.json { output::print_json(&report) } else { output::print(&report.to_text()) }
            }
            #[cfg(feature = "nixl")]
            Self::Nixl(args) => {
                let Some(report) = nixl::run(args)? else { return Ok(()) };
                if global.json { output::print_json(&report) } else { output::print(&report.to_text()) }
            }
        }
    }
}

fn table_text(report: &table::TableReport) -> String {
    let blocks = output::count(report.blocks.into());
    let mut table = output::table(&[&format!("table of {blocks} blocks"), "median", "unit"], 1);
    let rows = [
        ("match of 8,192 blocks", report.match_8192_us, "µs"),
        ("match of 288 blocks", report.match_288_us, "µs"),
        ("evict, allocate, publish, release", report.cycle_ns_per_block, "ns per block"),
        ("memory, resident in four tiers", report.bytes_per_block, "bytes per block"),
    ];
    for (what, median, unit) in rows {
        table.add_row([what, &format!("{median:.1}"), unit]);
    }
    table.trim_fmt()
}
