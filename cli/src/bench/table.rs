//! `kvbm bench table`: how fast the block table matches and cycles, and what a block costs in memory.

use cap::Cap;
use clap::Args;
use kvbm_bench::chains::{Prompts, Random, SHORT};
use kvbm_bench::measure::{CacheSweep, DEFAULT_SWEEP, FullTier, Spread, cycle_ns, match_us};
use kvbm_bench::subject::OurTable;
use serde::Serialize;

/// Counts what the whole program allocates: one relaxed addition for each allocation.
#[global_allocator]
static ALLOCATED: Cap<std::alloc::System> = Cap::new(std::alloc::System, usize::MAX);

/// Times the block table.
#[derive(Args, Debug)]
pub(crate) struct TableArgs {
    /// Blocks of 16 tokens that the table holds.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1024..=100_000_000))]
    pub(crate) blocks: u32,
    /// Samples of each figure.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) samples: u32,
    /// Bytes written before each match to displace the processor's caches.
    #[arg(long, default_value_t = DEFAULT_SWEEP, value_name = "BYTES")]
    pub(crate) sweep: usize,
}

/// What was measured: medians. Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(crate) struct TableReport {
    /// Blocks that the table held.
    pub(crate) blocks: u32,
    /// Microseconds to lease, touch and release a prompt of 8,192 blocks with cold caches.
    pub(crate) match_8192_us: f64,
    /// The same for 288 blocks.
    pub(crate) match_288_us: f64,
    /// Nanoseconds per block to put chains of 64 new blocks into a full tier.
    pub(crate) cycle_ns_per_block: f64,
    /// Bytes allocated for a block that lies in all four tiers, policies included.
    pub(crate) bytes_per_block: f64,
    /// Quartiles of the above.
    pub(crate) spread: Spreads,
}

/// How much the samples differ, in the units of the figures that they belong to.
#[derive(Debug, Serialize)]
pub(crate) struct Spreads {
    match_8192_us: Spread,
    match_288_us: Spread,
    cycle_ns_per_block: Spread,
}

/// Builds three tables, one after the other, and times them. Takes seconds for a million blocks.
pub(crate) fn run(args: &TableArgs) -> TableReport {
    let (blocks, samples) = (args.blocks as usize, args.samples as usize);
    let [match_8192_us, match_288_us] = matches(blocks, samples, args.sweep);
    let cycle_ns_per_block = cycle_ns(&FullTier::new(OurTable::of_one_tier(blocks), blocks), samples);
    TableReport {
        blocks: args.blocks,
        match_8192_us: match_8192_us.median,
        match_288_us: match_288_us.median,
        cycle_ns_per_block: cycle_ns_per_block.median,
        bytes_per_block: bytes_per_block(blocks),
        spread: Spreads { match_8192_us, match_288_us, cycle_ns_per_block },
    }
}

/// Of long and of medium prompts.
fn matches(blocks: usize, samples: usize, sweep: usize) -> [Spread; 2] {
    let prompts = Prompts::new(blocks);
    let table = OurTable::holding(&prompts);
    let mut cold = CacheSweep::new(sweep);
    [&prompts.long, &prompts.medium].map(|prompts| match_us(&table, prompts, samples, &mut cold))
}

fn bytes_per_block(blocks: usize) -> f64 {
    let mut random = Random::new(7);
    let chains: Vec<_> = (0..blocks / SHORT).map(|_| random.chain(SHORT)).collect();
    let before = ALLOCATED.allocated();
    let table = OurTable::of_four_tiers(chains.len() * SHORT, &chains);
    (ALLOCATED.allocated() - before) as f64 / table.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_reports_every_figure() {
        let report = run(&TableArgs { blocks: 2048, samples: 5, sweep: 1 << 16 });
        let json = serde_json::to_value(report).unwrap();
        for key in ["match_8192_us", "match_288_us", "cycle_ns_per_block", "bytes_per_block"] {
            assert!(json[key].as_f64().unwrap() > 0.0, "{key} of {json}");
        }
        let memory = json["bytes_per_block"].as_f64().unwrap();
        assert!(memory < 400.0, "{memory} bytes a block, although other tests may allocate meanwhile");
    }
}
