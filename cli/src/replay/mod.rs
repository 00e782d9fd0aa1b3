//! `kvbm replay`: a trace through real tiers, every byte checked.

mod acknowledged;
mod chaos;
mod report;

use std::fs::File;
use std::path::{Path, PathBuf};

use clap::Args;
use kvbm::Options;
use kvbm_policies::Request;
use kvbm_settings::{Capacity, EvictionKind, Loader, Settings, parse_size};
use kvbm_tiers::clock;
use prometheus::Registry;

use self::acknowledged::AckLog;
use self::chaos::{ChaosArgs, ChaosReport, ChaosTrouble};
use self::report::ReplayReport;
use crate::engine::SimulatedEngine;
use crate::output::{CommandFailure, ReplayProgress};
use crate::pace::{self, PacedIter};
use crate::scratch::CommandScratch;
use crate::serve::{self, WatchedCommand};
use crate::stop::{self, StopSignal};
use crate::trace::{TraceError, TraceReader};
use crate::{GlobalOptions, by_name};

/// Each request takes the blocks that it finds in any tier back to the device, where every byte of
/// them is compared with what its hash says; it computes and saves the rest. The device is emulated
/// in host memory. A tier whose size is not given, here or in the settings, is absent.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Trace in the Mooncake format: JSON lines, plain, gzip or zstd
    trace: PathBuf,
    /// Size of the emulated device; longer prompts keep their leading blocks [default: 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    device_blocks: Option<u32>,
    /// Size of the host tier; 0: none
    #[arg(long, value_name = "N")]
    host_blocks: Option<u32>,
    /// Size of the disk tier; 0: none
    #[arg(long, value_name = "N")]
    disk_blocks: Option<u32>,
    /// Directory of the disk tier; several, each with its share [default: that for temporary files]
    #[arg(long, value_name = "DIR")]
    disk_dir: Vec<PathBuf>,
    /// Directory on tmpfs, such as /dev/shm/kvbm, that the host tier lies in: with --keep it
    /// outlives the process
    #[arg(long, value_name = "DIR")]
    host_persist: Option<PathBuf>,
    /// Object store
    #[arg(
        long,
        value_name = "URL",
        help = "Object store: file:///dir, s3://bucket/prefix or memory:///"
    )]
    object: Option<String>,
    /// Bytes of a block, such as 64KiB or 1MiB [default: 64KiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    block_bytes: Option<u64>,
    /// Eviction policy of all tiers [default: hazard]
    #[arg(
        long,
        value_name = "NAME",
        value_parser = by_name(EvictionKind::ALL.map(|policy| (policy.name(), policy)))
    )]
    eviction: Option<EvictionKind>,
    /// Stop after this many requests
    #[arg(long, value_name = "N")]
    requests: Option<u64>,
    /// Requests served at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    concurrency: u16,
    /// Begin requests when their timestamps say, X times as fast; without it each begins when one
    /// before it ends
    #[arg(long, value_name = "X", value_parser = pace::parse_speed)]
    speed: Option<f64>,
    #[command(flatten)]
    chaos: ChaosArgs,
    /// Leave what disk, objects and persistent memory hold in place, and use what an earlier run
    /// left there
    #[arg(long)]
    keep: bool,
    /// Note in this file which blocks a later run will find. One that is there is gone on with,
    /// once every block that it names has been loaded and compared
    #[arg(long, value_name = "FILE", requires = "keep")]
    ack_log: Option<PathBuf>,
    #[command(flatten)]
    watched: WatchedCommand,
}

pub(crate) fn run(args: ReplayArgs, global: &GlobalOptions) -> Result<(), CommandFailure> {
    let mut settings = global.load(|loader| args.apply(loader))?.settings;
    let ReplayArgs { trace, requests, concurrency, keep, ack_log, speed, chaos, .. } = args;
    let reader = TraceReader::open(&trace)?;
    let expected = check(&trace, requests)?;
    let runtime = stop::runtime()?;
    let stop = StopSignal::on_signals(&runtime)?;
    // Before the engine, so that it goes after it.
    let _scratch =
        if keep { CommandScratch::default() } else { CommandScratch::divert(&mut settings)? };
    let registry = Registry::new();
    let trouble = chaos.trouble(&settings);
    let faults = trouble.as_ref().map(ChaosTrouble::chaos);
    let acks = ack_log.map(|path| AckLog::open(&path)).transpose()?;
    let on_durable = acks.as_ref().map(|(log, _)| log.listener());
    let options = Options { registry: registry.clone(), on_durable, ..Options::default() };
    let engine = SimulatedEngine::open(settings, options, faults, runtime, stop.clone())?;
    let acknowledged = acks.map(|(log, earlier)| earlier.check(&engine, &log)).transpose()?;
    serve::tell(engine.manager());
    let requests = limited(reader, requests);
    let requests: Box<dyn Iterator<Item = _> + Send> = match speed {
        Some(speed) => Box::new(PacedIter::new(requests, speed, stop)),
        None => Box::new(requests),
    };
    let report = replay(&engine, &trace, requests, expected, concurrency.into(), trouble.as_ref())?;
    let report = report.with_acknowledged(acknowledged).with_object_requests(&registry);
    global.show(&report, ReplayReport::to_text)?;
    report.verdict()
}

fn replay(
    engine: &SimulatedEngine,
    trace: &Path,
    requests: impl Iterator<Item = Result<Request, TraceError>> + Send,
    expected: Option<u64>,
    concurrency: usize,
    trouble: Option<&ChaosTrouble>,
) -> Result<ReplayReport, CommandFailure> {
    let progress = ReplayProgress::new(expected);
    let started = clock::now();
    let tally =
        engine.run(requests, concurrency, |_, tally| progress.show(tally, engine.manager()))?;
    let seconds = started.elapsed().as_secs_f64();
    progress.finishing("flushing what is dirty");
    let recovery = trouble
        .map(|trouble| Ok::<_, CommandFailure>((trouble, trouble.heal(engine)?)))
        .transpose()?;
    let audited = engine.drain_and_audit();
    if let Some((trouble, _)) = &recovery {
        engine.wait_for_late_copies(trouble.never_completing());
    }
    engine.check_stop()?;
    let chaos = recovery.map(|(trouble, recovery)| {
        ChaosReport::new(trouble, &recovery, tally.mismatches, tally.hangs, engine)
    });
    Ok(ReplayReport::new(trace, &tally, audited, engine, seconds).with(chaos))
}

/// Reads a trace to its end before anything is made, so that a bad line spoils no half-done run.
/// Returns how many requests there are; `None` for what can only be read once, such as a pipe.
fn check(trace: &Path, requests: Option<u64>) -> Result<Option<u64>, TraceError> {
    if !File::open(trace).and_then(|file| file.metadata()).is_ok_and(|metadata| metadata.is_file())
    {
        return Ok(requests);
    }
    let requests = limited(TraceReader::open(trace)?, requests);
    requests.map(|request| request.map(|_| 1)).sum::<Result<u64, _>>().map(Some)
}

fn limited(
    reader: TraceReader,
    requests: Option<u64>,
) -> impl Iterator<Item = Result<Request, TraceError>> {
    reader.take(
        requests.map_or(usize::MAX, |requests| usize::try_from(requests).unwrap_or(usize::MAX)),
    )
}

impl ReplayArgs {
    /// The command's defaults below every other source, its options above them.
    fn apply(&self, loader: Loader) -> Loader {
        let mut loader = loader.defaults(defaults());
        let blocks = |count: u32| (count > 0).then_some(Capacity::Blocks(count.into()));
        if let Some(bytes) = self.block_bytes {
            loader = loader.set("block_bytes", move |s| s.block_bytes = Some(bytes));
        }
        if let Some(eviction) = self.eviction {
            loader = loader.set("eviction", move |s| s.eviction = eviction);
        }
        if let Some(count) = self.device_blocks {
            loader = loader.set("device.capacity", move |s| s.device.capacity = blocks(count));
        }
        if let Some(count) = self.host_blocks {
            loader = loader.set("host.capacity", move |s| s.host.capacity = blocks(count));
        }
        if let Some(count) = self.disk_blocks {
            loader = loader.set("disk.capacity", move |s| s.disk.capacity = blocks(count));
        }
        if !self.disk_dir.is_empty() {
            let dirs = self.disk_dir.clone();
            loader = loader.set("disk.dirs", move |s| s.disk.dirs = dirs);
        }
        if let Some(dir) = self.host_persist.clone() {
            loader = loader.set("host.persist", move |s| s.host.persist = Some(dir));
        }
        if let Some(url) = self.object.clone() {
            loader = loader.set("object.url", move |s| s.object.url = Some(url));
        }
        if self.keep {
            loader = loader
                .set("disk.keep", |s| s.disk.keep = true)
                .set("object.keep", |s| s.object.keep = true);
        }
        self.watched.apply(loader)
    }
}

fn defaults() -> Settings {
    let mut settings = Settings { block_bytes: Some(64 << 10), ..Settings::default() };
    settings.device.capacity = Some(Capacity::Blocks(1_000));
    settings.disk.dirs = vec![std::env::temp_dir()];
    settings
}
