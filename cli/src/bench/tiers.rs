//! `kvbm bench tiers`: how much of what the media can do is left after the manager.
//!
//! Every row is a contest over one working set: the manager moves it, then the raw medium does,
//! then the manager again, in turns that change who goes first. Both use the same kind of memory
//! and files, as many threads and as many operations at a time; the manager keeps its checksums.

mod bed;
mod raw;

#[cfg(feature = "nixl")]
use kvbm_settings::DiskBackend;

pub(crate) use bed::Bed;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use kvbm::Tier;
use kvbm_cli::measuring::rounds::Spread;
use kvbm_settings::{Capacity, DeviceBackend, Settings, format_size, parse_size};
use serde::Serialize;
use tokio::runtime::Runtime;

use self::raw::Raw;
use crate::output::{self, CommandFailure};
use crate::scratch::{CommandScratch, file_url};
use crate::stop::{self, StopSignal};

/// Times the tiers through the manager against the bare media.
#[derive(Args, Debug)]
pub(crate) struct TiersArgs {
    /// Where slot files and objects are made, and removed at the end
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Bytes of a block
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "64KiB,1MiB,4MiB", value_parser = parse_size)]
    size: Vec<u64>,
    /// What to time: host is emulated device ⇄ host, the others host ⇄ disk, host ⇄ objects in
    /// files, and host ⇄ disk through NIXL against NIXL called directly
    #[arg(long, value_name = "TIER", value_delimiter = ',', default_value = "host,disk,object")]
    tier: Vec<Bottom>,
    /// Bytes that each round moves: more than the processor's caches hold
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = parse_size)]
    working_set: u64,
    /// Rounds of each row, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

/// What was measured. Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(crate) struct TiersReport {
    working_set: u64,
    rounds: u32,
    rows: Vec<Row>,
}

/// One tier, block size and direction: medians over the rounds.
#[derive(Debug, Serialize)]
struct Row {
    tier: Tier,
    /// Bytes of a block.
    size: u64,
    /// Operations at a time; threads, where it is memory.
    depth: u32,
    op: &'static str,
    /// Through the manager.
    mib_s: f64,
    /// Without it.
    raw_mib_s: f64,
    /// The median of the rounds' ratios, not the ratio of the medians.
    ratio: f64,
    spread: Spreads,
}

#[derive(Debug, Serialize)]
struct Spreads {
    mib_s: Spread,
    raw_mib_s: Spread,
    ratio: Spread,
}

/// One row's working set and who moves it.
#[derive(Debug)]
struct Contest {
    bottom: Bottom,
    size: u64,
    depth: u32,
    settings: Settings,
}

/// Ours and the raw medium's, once each.
type Round = [Duration; 2];

/// Runs all contests; seconds each.
pub(crate) fn run(args: &TiersArgs) -> Result<TiersReport, CommandFailure> {
    let runtime = stop::runtime()?;
    let stop = StopSignal::on_signals(&runtime)?;
    let steps = args.tier.len() as u64 * args.size.len() as u64 * u64::from(args.rounds + 1);
    // Dropped, it is off the terminal.
    let bar = output::bar(Some(steps), "{bar:30} {pos}/{len} rounds, {msg} ({eta} left)");
    let mut rows = Vec::new();
    for &bottom in &args.tier {
        for &size in &args.size {
            let contest = Contest::new(bottom, size, args)?;
            rows.extend(contest.run(args, &runtime, &stop, &bar)?);
        }
    }
    Ok(TiersReport { working_set: args.working_set, rounds: args.rounds, rows })
}

impl Contest {
    fn new(bottom: Bottom, size: u64, args: &TiersArgs) -> Result<Self, CommandFailure> {
        let blocks = args.working_set / size.max(1);
        if blocks == 0 {
            let (set, size) = (format_size(args.working_set), format_size(size));
            let message = format!("--working-set {set} holds no block of {size}: raise it");
            return Err(CommandFailure::unusable(message));
        }
        let mut settings = Settings { block_bytes: Some(size), ..Settings::default() };
        settings.device.capacity = Some(Capacity::Blocks(blocks));
        settings.device.backend = DeviceBackend::Emulated;
        settings.host.capacity = Some(Capacity::Blocks(blocks));
        // Nothing is flushed before it is asked for.
        settings.flush.interval_ms = 86_400_000;
        settings.flush.dirty_watermark = 1.0;
        match bottom {
            Bottom::Host => {}
            Bottom::Disk => put_on_disk(&mut settings, blocks, args),
            #[cfg(feature = "nixl")]
            Bottom::Nixl => {
                put_on_disk(&mut settings, blocks, args);
                settings.disk.backend = DiskBackend::Nixl;
                settings.nixl.backends.insert("POSIX".to_owned(), true);
                let uring = ("use_uring".to_owned(), "true".to_owned());
                settings.nixl.parameters.insert("POSIX".to_owned(), [uring].into());
            }
            Bottom::Object => {
                settings.object.capacity = Some(Capacity::Blocks(blocks));
                let dir = std::path::absolute(&args.dir).unwrap_or_else(|_| args.dir.clone());
                settings.object.url = Some(file_url(&dir)?);
            }
        }
        let depth = match bottom {
            Bottom::Host => settings.transfer.copy_threads,
            Bottom::Disk => settings.disk.queue_depth,
            #[cfg(feature = "nixl")]
            Bottom::Nixl => settings.disk.queue_depth,
            Bottom::Object => settings.object.concurrency,
        };
        Ok(Self { bottom, size, depth, settings })
    }

    fn run(
        self,
        args: &TiersArgs,
        runtime: &Runtime,
        stop: &StopSignal,
        bar: &ProgressBar,
    ) -> Result<[Row; 2], CommandFailure> {
        let (tier, size) = (self.bottom.tier(), output::bytes(self.size));
        bar.set_message(format!("{tier}, blocks of {size}"));
        let (mut ours, mut theirs) = (self.settings.clone(), self.settings.clone());
        // The first makes the directory that both use, and so must be the last to go.
        let _ours = CommandScratch::divert(&mut ours)?;
        let _theirs = CommandScratch::divert(&mut theirs)?;
        let mut bed = Bed::open(ours, self.bottom.tier(), runtime)?;
        let mut raw = Raw::open(&theirs, self.bottom)?;
        let (mut writes, mut reads) = (Vec::new(), Vec::new());
        for round in 0..=args.rounds {
            stop.check()?;
            let [write, read] = play(&mut bed, &mut raw, round % 2 == 1)?;
            // The first one warms up.
            if round > 0 {
                writes.push(write);
                reads.push(read);
            }
            bar.inc(1);
        }
        bed.check()?;
        let bytes = self.size * (args.working_set / self.size);
        Ok([self.row("write", bytes, &writes), self.row("read", bytes, &reads)])
    }

    fn row(&self, op: &'static str, bytes: u64, rounds: &[Round]) -> Row {
        let rate = |who: usize| {
            let mib_s =
                |round: &Round| bytes as f64 / f64::from(1 << 20) / round[who].as_secs_f64();
            Spread::of(rounds.iter().map(mib_s).collect())
        };
        let ratio = |[ours, raw]: &Round| raw.as_secs_f64() / ours.as_secs_f64();
        let spread = Spreads {
            mib_s: rate(0),
            raw_mib_s: rate(1),
            ratio: Spread::of(rounds.iter().map(ratio).collect()),
        };
        Row {
            tier: self.bottom.tier(),
            size: self.size,
            depth: self.depth,
            op,
            mib_s: spread.mib_s.median,
            raw_mib_s: spread.raw_mib_s.median,
            ratio: spread.ratio.median,
            spread,
        }
    }
}

/// One round: both write, both read.
fn play(bed: &mut Bed<'_>, raw: &mut Raw, raw_first: bool) -> Result<[Round; 2], CommandFailure> {
    bed.prepare_write()?;
    raw.sync()?;
    let write = in_turns(raw_first, || bed.write(), || raw.write())?;
    bed.prepare_read()?;
    raw.sync()?;
    let read = in_turns(raw_first, || bed.read(), || raw.read())?;
    Ok([write, read])
}

fn in_turns(
    raw_first: bool,
    mut ours: impl FnMut() -> Result<Duration, CommandFailure>,
    mut raw: impl FnMut() -> Result<Duration, CommandFailure>,
) -> Result<Round, CommandFailure> {
    if raw_first {
        let raw = raw()?;
        return Ok([ours()?, raw]);
    }
    Ok([ours()?, raw()?])
}

fn put_on_disk(settings: &mut Settings, blocks: u64, args: &TiersArgs) {
    settings.disk.capacity = Some(Capacity::Blocks(blocks));
    settings.disk.dirs = vec![args.dir.clone()];
    settings.disk.queue_depth = disk_depth(settings.block_bytes.unwrap_or_default());
}

/// Small blocks need many operations in flight to keep a drive busy, large ones few.
const fn disk_depth(size: u64) -> u32 {
    match size >> 20 {
        0 => 32,
        1 => 16,
        _ => 4,
    }
}

impl TiersReport {
    /// A table for people.
    pub(crate) fn to_text(&self) -> String {
        let mut table = output::table(
            &["tier", "block", "depth", "op", "MiB/s", "raw MiB/s", "ratio", "quartiles"],
            1,
        );
        for row in &self.rows {
            table.add_row([
                row.tier.to_string(),
                output::bytes(row.size),
                row.depth.to_string(),
                row.op.to_owned(),
                format!("{:.0}", row.mib_s),
                format!("{:.0}", row.raw_mib_s),
                format!("{:.2}", row.ratio),
                format!("{:.2}–{:.2}", row.spread.ratio.p25, row.spread.ratio.p75),
            ]);
        }
        table.trim_fmt()
    }
}

/// The lower end of the route that is timed.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Bottom {
    Host,
    Disk,
    Object,
    #[cfg(feature = "nixl")]
    Nixl,
}

impl Bottom {
    const fn tier(self) -> Tier {
        match self {
            Self::Host => Tier::Host,
            Self::Disk => Tier::Disk,
            #[cfg(feature = "nixl")]
            Self::Nixl => Tier::Disk,
            Self::Object => Tier::Object,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_reports_every_row() {
        let home = tempfile::tempdir().unwrap();
        let args = TiersArgs {
            dir: home.path().join("made"),
            size: vec![64 << 10, 1 << 20],
            tier: vec![Bottom::Host, Bottom::Disk, Bottom::Object],
            working_set: 4 << 20,
            rounds: 2,
        };
        let report = run(&args).unwrap();
        let json = serde_json::to_value(&report).unwrap();
        let rows = json["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 12);
        for row in rows {
            for key in ["size", "depth", "mib_s", "raw_mib_s", "ratio"] {
                assert!(row[key].as_f64().unwrap() > 0.0, "{key} of {row}");
            }
        }
        assert_eq!(rows[4]["tier"], "disk");
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "nothing is left behind");
        assert_eq!(report.to_text().lines().count(), 12 + 4);
    }

    #[test]
    fn a_working_set_without_a_block_is_refused() {
        let args = TiersArgs {
            dir: std::env::temp_dir(),
            size: vec![1 << 20],
            tier: vec![Bottom::Host],
            working_set: 1 << 10,
            rounds: 1,
        };
        assert!(run(&args).unwrap_err().to_string().contains("--working-set"));
    }
}
