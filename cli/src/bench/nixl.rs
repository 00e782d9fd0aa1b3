//! `kvbm bench nixl`: NIXL between two processes, through our layer and without it.

use std::io::{self, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::Args;
use kvbm_cli::measuring::rounds::Spread;
use kvbm_settings::parse_size;
use kvbm_tiers::nixl::Direction;
use kvbm_tiers::nixl::raw::{Caller, RawNixl, RawNixlPeer};
use kvbm_tiers::{DramOptions, Geometry};
use serde::Serialize;

use super::{failed, setup};
use crate::output::{self, CommandFailure};

/// Blocks of a request, as in the manager's batches.
const BATCH: usize = 16;
/// Requests in flight between the processes.
const IN_FLIGHT: usize = 2;
/// Of the transfers that show what the layer costs: next to nothing is moved.
const TINY_BLOCKS: u32 = 1600;

/// Times UCX between this process and one that it starts.
#[derive(Args, Debug)]
pub(crate) struct NixlArgs {
    /// Bytes of a block
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_size)]
    size: u64,
    /// Bytes that each round moves
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_size)]
    working_set: u64,
    /// Rounds, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Be the other process, and introduce yourself in this file
    #[arg(long, hide = true)]
    peer: Option<PathBuf>,
}

/// What was measured. Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(crate) struct NixlReport {
    size: u64,
    rows: Vec<Row>,
    /// What our layer adds to a request of [`BATCH`] blocks, in microseconds: the median of the
    /// rounds.
    layer_us: Spread,
}

/// One direction: medians over the rounds.
#[derive(Debug, Serialize)]
struct Row {
    op: &'static str,
    mib_s: f64,
    direct_mib_s: f64,
    /// Of the rounds' ratios.
    ratio: Spread,
}

/// `None`: this was the other process.
pub(crate) fn run(args: &NixlArgs) -> Result<Option<NixlReport>, CommandFailure> {
    if let Some(place) = &args.peer {
        let _peer = RawNixlPeer::open(memory(args.blocks(), args.size)?, place).map_err(setup)?;
        // Until the first process lets go of its end.
        let _ = io::stdin().read(&mut [0]);
        return Ok(None);
    }
    let rows = two_processes(args)?;
    Ok(Some(NixlReport { size: args.size, rows, layer_us: layer(args.rounds)? }))
}

impl NixlArgs {
    fn blocks(&self) -> u32 {
        (self.working_set / self.size.max(1)) as u32
    }
}

fn memory(blocks: u32, size: u64) -> Result<DramOptions, CommandFailure> {
    let geometry = Geometry::new(blocks, size as usize).map_err(setup)?;
    Ok(DramOptions { geometry, huge_pages: true, fault_threads: 1 })
}

/// Both callers in turns that change who goes first.
fn two_processes(args: &NixlArgs) -> Result<Vec<Row>, CommandFailure> {
    let home = tempfile::tempdir().map_err(|error| CommandFailure::unusable(error.to_string()))?;
    let place = home.path().join("introduction");
    let _peer = Peer::start(args, &place)?;
    let mut raw =
        RawNixl::load_remote_metadata(memory(args.blocks(), args.size)?, &place, BATCH, IN_FLIGHT)
            .map_err(setup)?;
    let bytes = u64::from(args.blocks()) * args.size;
    [("write", Direction::Write), ("read", Direction::Read)]
        .into_iter()
        .map(|(op, direction)| Ok(row(op, bytes, &rounds(&mut raw, direction, args.rounds)?)))
        .collect()
}

/// Layered and direct, once each.
type Round = [Duration; 2];

fn rounds(
    raw: &mut RawNixl,
    direction: Direction,
    count: u32,
) -> Result<Vec<Round>, CommandFailure> {
    let mut rounds = Vec::new();
    for round in 0..=count {
        let mut run = |caller| raw.run(direction, caller).map_err(failed);
        let times = if round % 2 == 0 {
            [run(Caller::Layered)?, run(Caller::Direct)?]
        } else {
            let direct = run(Caller::Direct)?;
            [run(Caller::Layered)?, direct]
        };
        rounds.extend((round > 0).then_some(times));
    }
    Ok(rounds)
}

fn row(op: &'static str, bytes: u64, rounds: &[Round]) -> Row {
    let mib_s = |who: usize| {
        let rate = |round: &Round| bytes as f64 / f64::from(1 << 20) / round[who].as_secs_f64();
        Spread::of(rounds.iter().map(rate).collect()).median
    };
    let ratio = |[ours, direct]: &Round| direct.as_secs_f64() / ours.as_secs_f64();
    Row {
        op,
        mib_s: mib_s(0),
        direct_mib_s: mib_s(1),
        ratio: Spread::of(rounds.iter().map(ratio).collect()),
    }
}

/// Tiny blocks within this process, so that the calls are what takes the time.
fn layer(count: u32) -> Result<Spread, CommandFailure> {
    let mut raw = RawNixl::loopback(memory(TINY_BLOCKS, 64)?, BATCH).map_err(setup)?;
    let requests = f64::from(TINY_BLOCKS) / BATCH as f64;
    let added =
        |[ours, direct]: &Round| (ours.as_secs_f64() - direct.as_secs_f64()) * 1e6 / requests;
    let rounds = rounds(&mut raw, Direction::Write, 10 * count)?;
    Ok(Spread::of(rounds.iter().map(added).collect()))
}

/// The other process; ends with its standard input.
struct Peer(Child);

impl Peer {
    fn start(args: &NixlArgs, place: &std::path::Path) -> Result<Self, CommandFailure> {
        let cannot = |error: io::Error| {
            CommandFailure::unusable(format!("cannot start a second process: {error}"))
        };
        let mut command = Command::new(std::env::current_exe().map_err(cannot)?);
        command.args(["bench", "nixl", "--size", &args.size.to_string()]);
        command.args(["--working-set", &args.working_set.to_string()]).arg("--peer").arg(place);
        command.stdin(Stdio::piped()).spawn().map(Self).map_err(cannot)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

impl NixlReport {
    /// A table for people.
    pub(crate) fn to_text(&self) -> String {
        let title = format!("UCX, blocks of {}", output::bytes(self.size));
        let mut table = output::table(&[&title, "MiB/s", "direct MiB/s", "ratio", "quartiles"], 1);
        for Row { op, mib_s, direct_mib_s, ratio } in &self.rows {
            table.add_row([
                (*op).to_owned(),
                format!("{mib_s:.0}"),
                format!("{direct_mib_s:.0}"),
                format!("{:.2}", ratio.median),
                format!("{:.2}–{:.2}", ratio.p25, ratio.p75),
            ]);
        }
        let layer =
            format!("our layer adds {:.2} µs to a request of {BATCH} blocks", self.layer_us.median);
        format!("{}\n{layer}", table.trim_fmt())
    }
}
