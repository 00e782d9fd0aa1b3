//! `kvbm bench table`: how fast the block table matches and cycles, how long its lock is held, and
//! what a block costs in memory.

mod holds;

use cap::Cap;
use clap::Args;
use kvbm_cli::measuring::chains::{Prompts, Random, SHORT};
use kvbm_cli::measuring::rounds::{CacheSweep, FullTier, Spread, cycle_ns, match_us};
use kvbm_cli::measuring::subject::{OurManager, device_of, table_of_four_tiers};
use kvbm_policies::EvictionKind;
use serde::Serialize;

use self::holds::Holds;
use crate::output::{self, CommandFailure};

/// Counts what the whole program allocates: one relaxed addition for each allocation.
#[global_allocator]
static ALLOCATED: Cap<std::alloc::System> = Cap::new(std::alloc::System, usize::MAX);

/// Times the block table through a manager in memory.
#[derive(Args, Debug)]
pub(crate) struct TableArgs {
    /// Blocks of 16 tokens that the table holds. Each takes a page of memory in the host tier, and
    /// a quarter as many more in the others
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1024..=100_000_000))]
    pub(crate) blocks: u32,
    /// Samples of each figure
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) samples: u32,
    /// Which block leaves a full tier
    #[arg(long, value_name = "NAME", default_value = EvictionKind::default().name())]
    pub(crate) eviction: EvictionKind,
    /// Bytes written before each match to displace the processor's caches
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub(crate) sweep: usize,
}

/// What was measured: medians, but for the longest hold. Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(crate) struct TableReport {
    /// Blocks that the table held.
    blocks: u32,
    /// By this policy.
    eviction: EvictionKind,
    /// Microseconds to lease, touch and release a prompt of 288 blocks, of which a random part is
    /// held.
    match_288_us: f64,
    /// The same for 8,192 blocks.
    match_8192_us: f64,
    /// The same for 65,536 blocks.
    match_65536_us: f64,
    /// Nanoseconds per block to allocate and publish chains of 64 new blocks in a full tier.
    cycle_ns_per_block: f64,
    /// Bytes allocated for a block that lies in all four tiers, policies included.
    bytes_per_block: f64,
    /// Microseconds of its own CPU time that a thread held the table's lock at most.
    longest_hold_us: f64,
    /// The same by what went on meanwhile.
    holds_us: Holds,
    /// Quartiles of the medians.
    spread: Spreads,
}

/// How much the samples differ, in the units of the figures that they belong to.
#[derive(Debug, Serialize)]
struct Spreads {
    match_288_us: Spread,
    match_8192_us: Spread,
    match_65536_us: Spread,
    cycle_ns_per_block: Spread,
}

/// Opens managers and a table, one after the other, and times them. Takes a minute for a million
/// blocks.
pub(crate) fn run(args: &TableArgs) -> Result<TableReport, CommandFailure> {
    let (blocks, samples) = (args.blocks as usize, args.samples as usize);
    let bytes_per_block = bytes_per_block(blocks, args.eviction);
    let [match_288_us, match_8192_us, match_65536_us] = matches(args);
    let full = FullTier::new(OurManager::open(device_of(blocks, args.eviction)), blocks);
    let cycle_ns_per_block = cycle_ns(&full, samples);
    drop(full);
    let holds_us = holds::measure(blocks, args.eviction)?;
    Ok(TableReport {
        blocks: args.blocks,
        eviction: args.eviction,
        match_288_us: match_288_us.median,
        match_8192_us: match_8192_us.median,
        match_65536_us: match_65536_us.median,
        cycle_ns_per_block: cycle_ns_per_block.median,
        bytes_per_block,
        longest_hold_us: holds_us.longest(),
        holds_us,
        spread: Spreads { match_288_us, match_8192_us, match_65536_us, cycle_ns_per_block },
    })
}

/// Of prompts of 288, 8,192 and 65,536 blocks.
fn matches(args: &TableArgs) -> [Spread; 3] {
    let prompts = Prompts::new(args.blocks as usize);
    let ours = OurManager::holding(&prompts, args.eviction);
    let mut cold = CacheSweep::new(args.sweep);
    [&prompts.medium, &prompts.long, &prompts.longest]
        .map(|prompts| match_us(&ours, prompts, args.samples as usize, &mut cold))
}

fn bytes_per_block(blocks: usize, eviction: EvictionKind) -> f64 {
    let mut random = Random::new(7);
    let chains: Vec<_> = (0..blocks / SHORT).map(|_| random.chain(SHORT)).collect();
    let memory = || ALLOCATED.allocated() + kvbm_tiers::mapped_bytes();
    let before = memory();
    let table = table_of_four_tiers(chains.len() * SHORT, &chains, eviction);
    (memory() - before) as f64 / table.len() as f64
}

impl TableReport {
    pub(crate) fn to_text(&self) -> String {
        let title =
            format!("{} blocks, {}", output::count(self.blocks.into()), self.eviction.name());
        let mut table = output::table(&[&title, "", "unit"], 1);
        let mut row = |what: &str, figure: f64, unit: &str| {
            table.add_row([what, &format!("{figure:.1}"), unit]);
        };
        row("match of 288 blocks", self.match_288_us, "µs");
        row("match of 8,192 blocks", self.match_8192_us, "µs");
        row("match of 65,536 blocks", self.match_65536_us, "µs");
        row("evict, allocate, publish", self.cycle_ns_per_block, "ns per block");
        row("memory, resident in four tiers", self.bytes_per_block, "bytes per block");
        row("longest hold of the lock", self.longest_hold_us, "µs");
        for (what, us) in self.holds_us.named() {
            row(&format!("- {what}"), us, "µs");
        }
        table.trim_fmt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_reports_every_figure() {
        let args = TableArgs {
            blocks: 8192,
            samples: 5,
            eviction: EvictionKind::default(),
            sweep: 1 << 16,
        };
        let json = serde_json::to_value(run(&args).unwrap()).unwrap();
        let keys = [
            "match_288_us",
            "match_8192_us",
            "match_65536_us",
            "cycle_ns_per_block",
            "longest_hold_us",
        ];
        for key in [&keys[..], &["bytes_per_block"]].concat() {
            assert!(json[key].as_f64().unwrap() > 0.0, "{key} of {json}");
        }
        let memory = json["bytes_per_block"].as_f64().unwrap();
        assert!(
            memory < 1_000.0,
            "{memory} bytes a block, although other tests may allocate meanwhile"
        );
    }
}
