//! Our manager beside `kvbm-logical`: the same chains, the same order, in turns, in one process.
//! Ours runs its default policy unless told otherwise, and both are asked for a match and let go of
//! it.
//!
//! `cd benches/peers && cargo run --release` prints one JSON object. A ratio above 1 says how many
//! times faster ours is; those of cycles and bytes are ours over theirs.

mod logical;

use cap::Cap;
use clap::Parser;
use kvbm::BlockHash;
use kvbm_cli::measuring::chains::{Prompt, Prompts, Random, SHORT, saves};
use kvbm_cli::measuring::rounds::{
    CacheSweep, FullTier, Picks, PromptArrival, Spread, round_of_chains,
};
use kvbm_cli::measuring::subject::{OurManager, Subject, device_of, table_of_four_tiers};
use kvbm_policies::EvictionKind;
use serde::Serialize;

use logical::Logical;

#[global_allocator]
static ALLOCATED: Cap<std::alloc::System> = Cap::new(std::alloc::System, usize::MAX);

/// Compares block tables.
#[derive(Parser)]
struct Args {
    /// Blocks of the large tables.
    #[arg(long, default_value_t = 1_000_000)]
    blocks: usize,
    /// Samples of each figure.
    #[arg(long, default_value_t = 200)]
    samples: usize,
    /// Bytes of cache that are swept before each match.
    #[arg(long, default_value_t = 0)]
    sweep: usize,
    /// Which block leaves a full tier of ours.
    #[arg(long, value_name = "NAME", default_value = EvictionKind::default().name(), value_parser = eviction)]
    eviction: EvictionKind,
}

fn eviction(name: &str) -> Result<EvictionKind, String> {
    let found = EvictionKind::ALL.iter().copied().find(|policy| policy.name() == name);
    found.ok_or_else(|| format!("{name} is no policy"))
}

#[derive(Serialize)]
struct Report {
    blocks: usize,
    eviction: EvictionKind,
    match_65536_us: Match,
    match_8192_us: Match,
    match_288_us: Match,
    cycle_ns_per_block: Vec<Cycle>,
    bytes_per_block: Bytes,
}

/// In runs one manager matches every prompt once, and then `RUN` of them on the clock, before it is
/// the other's turn: each finds of its own tables in the caches what they hold of them, as a
/// worker's does that matches request after request. One by one each finds the other's there.
#[derive(Serialize)]
struct Match {
    in_runs: Matches,
    one_by_one: Matches,
}

/// Matches of one manager that are timed before it is the other's turn.
const RUN: usize = 100;

/// `theirs_same` finds just the blocks that ours finds; `theirs_whole` the whole prompt, all
/// resident.
#[derive(Serialize)]
struct Matches {
    ours: Spread,
    theirs_same: Spread,
    theirs_whole: Spread,
    speedup_same: f64,
    speedup_whole: f64,
}

#[derive(Serialize)]
struct Cycle {
    blocks: usize,
    ours: Spread,
    theirs: Spread,
    ratio: f64,
}

/// Ours holds the blocks in four tiers, theirs in its one.
#[derive(Serialize)]
struct Bytes {
    ours: f64,
    theirs: f64,
    ratio: f64,
}

fn main() {
    let args = Args::parse();
    let prompts = Prompts::new(args.blocks);
    let ours = OurManager::holding(&prompts, args.eviction);
    let theirs = logical_holding(&prompts, args.blocks);
    let (our_arrival, their_arrival) = (PromptArrival::new(), PromptArrival::new());
    let cold = CacheSweep::new(args.sweep);
    let mut duel = Duel { ours, theirs, our_arrival, their_arrival, cold, samples: args.samples };
    let match_65536_us = duel.matches(&prompts.longest);
    let match_8192_us = duel.matches(&prompts.long);
    let match_288_us = duel.matches(&prompts.medium);
    drop((duel, prompts));
    let cycle = |blocks| cycles(blocks, &args);
    let report = Report {
        blocks: args.blocks,
        eviction: args.eviction,
        match_65536_us,
        match_8192_us,
        match_288_us,
        cycle_ns_per_block: vec![cycle(1 << 16), cycle(args.blocks)],
        bytes_per_block: bytes(args.blocks, args.eviction),
    };
    println!("{}", serde_json::to_string_pretty(&report).expect("a report is plain data"));
}

/// The whole of each prompt but the filler, and as much filler as finds room, so that the table is
/// full.
fn logical_holding(prompts: &Prompts, blocks: usize) -> Logical {
    let whole: Vec<_> =
        prompts.longest.iter().chain(&prompts.long).chain(&prompts.medium).collect();
    let held: usize = whole.iter().map(|prompt| prompt.hashes.len()).sum();
    let filler = prompts.filler.iter().take(blocks.saturating_sub(held) / SHORT);
    let all: Vec<_> = whole.iter().copied().chain(filler).collect();
    let names: Vec<_> = all.iter().map(|prompt| Logical::names(&prompt.hashes)).collect();
    let depths: Vec<_> = names.iter().map(Vec::len).collect();
    let theirs = Logical::of(depths.iter().sum());
    for (prompt, from, to) in saves(&depths) {
        theirs.publish(&names[prompt][..to], from);
    }
    theirs
}

struct Duel {
    ours: OurManager,
    theirs: Logical,
    our_arrival: PromptArrival<BlockHash>,
    their_arrival: PromptArrival<Name>,
    cold: CacheSweep,
    samples: usize,
}

/// As the peer names a block.
type Name = <Logical as Subject>::Name;

impl Duel {
    fn matches(&mut self, prompts: &[Prompt]) -> Match {
        let names: Vec<_> = prompts.iter().map(|prompt| Logical::names(&prompt.hashes)).collect();
        Match {
            in_runs: self.matches_in_runs_of(RUN, prompts, &names),
            one_by_one: self.matches_in_runs_of(1, prompts, &names),
        }
    }

    fn matches_in_runs_of(
        &mut self,
        run: usize,
        prompts: &[Prompt],
        names: &[Vec<Name>],
    ) -> Matches {
        let mut picks = Picks::new(prompts.len());
        let mut samples = [const { Vec::new() }; 3];
        for _ in 0..self.samples.div_ceil(run) {
            let picked: Vec<_> = (0..run).map(|_| picks.pick()).collect();
            let in_order = (0..if run > 1 { prompts.len() } else { 0 }).chain(picked);
            let saved = |pick: usize| &names[pick][..prompts[pick].saved];
            let timed = |all: Vec<f64>| all.into_iter().rev().take(run);
            samples[0].extend(timed(
                in_order.clone().map(|pick| self.time_ours(&prompts[pick])).collect(),
            ));
            samples[1].extend(timed(
                in_order.clone().map(|pick| self.time_theirs(saved(pick))).collect(),
            ));
            samples[2].extend(timed(in_order.map(|pick| self.time_theirs(&names[pick])).collect()));
        }
        let [ours, theirs_same, theirs_whole] = samples.map(Spread::of);
        let speedup = |theirs: Spread| theirs.median / ours.median;
        Matches {
            ours,
            theirs_same,
            theirs_whole,
            speedup_same: speedup(theirs_same),
            speedup_whole: speedup(theirs_whole),
        }
    }

    /// Microseconds.
    fn time_ours(&mut self, prompt: &Prompt) -> f64 {
        let (took, found) = self.our_arrival.time_match(&self.ours, &prompt.hashes, &mut self.cold);
        assert_eq!(found, prompt.saved, "ours must find what it holds");
        took.as_secs_f64() * 1e6
    }

    fn time_theirs(&mut self, names: &[Name]) -> f64 {
        let (took, found) = self.their_arrival.time_match(&self.theirs, names, &mut self.cold);
        assert_eq!(found, names.len(), "theirs must find what it holds");
        took.as_secs_f64() * 1e6
    }
}

fn cycles(blocks: usize, args: &Args) -> Cycle {
    let ours = FullTier::new(OurManager::open(device_of(blocks, args.eviction)), blocks);
    let theirs = FullTier::new(Logical::of(blocks), blocks);
    let mut random = Random::new(5);
    let mut samples = [Vec::new(), Vec::new()];
    for _ in 0..args.samples {
        let chains = round_of_chains(&mut random);
        samples[0].push(ours.time_round(&chains));
        samples[1].push(theirs.time_round(&chains));
    }
    let [ours, theirs] = samples.map(Spread::of);
    Cycle { blocks, ours, theirs, ratio: ours.median / theirs.median }
}

fn bytes(blocks: usize, eviction: EvictionKind) -> Bytes {
    let mut random = Random::new(7);
    let chains: Vec<_> = (0..blocks / SHORT).map(|_| random.chain(SHORT)).collect();
    let slots = chains.len() * SHORT;
    let kind = eviction;
    let ours = allocated_by(|| table_of_four_tiers(slots, &chains, kind)) / slots as f64;
    let theirs = allocated_by(|| {
        let theirs = Logical::of(slots);
        for chain in &chains {
            theirs.publish(&Logical::names(chain), 0);
        }
        theirs
    });
    let theirs = theirs / slots as f64;
    Bytes { ours, theirs, ratio: ours / theirs }
}

fn allocated_by<T>(build: impl FnOnce() -> T) -> f64 {
    let memory = || ALLOCATED.allocated() + kvbm_tiers::mapped_bytes();
    let before = memory();
    let _kept = build();
    (memory() - before) as f64
}
