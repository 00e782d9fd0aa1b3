//! `kvbm demo`: a generated chat through all four tiers, and a report to look at, or a page to
//! watch.

mod chat;
mod html;
mod record;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use clap::Args;
use kvbm::Options;
use kvbm_settings::{Capacity, DeviceBackend, Loader, Settings, WriteBudget};
use kvbm_tiers::clock;
use tempfile::NamedTempFile;

use self::record::{DemoRecord, DemoRecorder};
use crate::GlobalOptions;
use crate::engine::{ServedTally, SimulatedEngine};
use crate::output::{self, CommandFailure, ReplayProgress};
use crate::pace::PacedIter;
use crate::scratch::{CommandScratch, file_url};
use crate::serve::{self, WatchedCommand};
use crate::stop::{self, StopSignal};

const REPORT: &str = "kvbm-demo.html";

const BLOCK_BYTES: u64 = 64 << 10;
const DEVICE_BLOCKS: u64 = 500;
const HOST_BLOCKS: u64 = 1_500;
const DISK_BLOCKS: u64 = 5_000;
/// What there is to watch besides: an object store that fills up in minutes, and limits that are
/// not reached.
const OBJECT_BLOCKS: u64 = 10_000;
const REQUESTS_PER_HOUR: u32 = 1_000_000;
const WRITTEN_PER_DAY: u64 = 100 << 40;
const QUOTA_BYTES: u64 = 256 << 20;
/// How much faster than people chats go on: some twenty requests a second.
const SPEED: f64 = 60.0;

/// Plays an hour of a chat service as fast as it goes, compares every byte that comes back, and
/// writes kvbm-demo.html. With --serve the chats go on after that, at sixty times their pace, until
/// it is interrupted, and there are quotas of tenants and budgets to watch, whatever the settings
/// say of them.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DemoArgs {
    #[command(flatten)]
    watched: WatchedCommand,
}

pub(crate) fn run(args: DemoArgs, global: &GlobalOptions) -> Result<(), CommandFailure> {
    let objects = std::env::temp_dir().join("kvbm-demo-objects");
    let mut settings = settings(global, &objects, args.watched)?;
    let page = blank_page()?;
    let runtime = stop::runtime()?;
    let stop = StopSignal::on_signals(&runtime)?;
    // Before the engine, so that it goes after it.
    let _scratch = CommandScratch::divert(&mut settings)?;
    let engine = SimulatedEngine::open(settings, Options::default(), None, runtime, stop.clone())?
        .for_tenants(chat::tenant);
    serve::tell(engine.manager());
    let record = play(&engine)?;
    write_page(page, &html::page(&record))?;
    global
        .show(&record.summary, |_| format!("{}\n\nThe whole story: {REPORT}", record.to_text()))?;
    verdict(&record)?;
    if args.watched.is_on() {
        go_on(&engine, &stop)?;
    }
    Ok(())
}

/// The stage is always the same; how blocks move and leave is as the settings say, but for what is
/// there to be watched.
fn settings(
    global: &GlobalOptions,
    objects: &Path,
    watched: WatchedCommand,
) -> Result<Settings, CommandFailure> {
    let url = file_url(objects)?;
    let loaded = global.load(|loader| {
        let loader = loader
            .set("block_bytes", |s| s.block_bytes = Some(BLOCK_BYTES))
            .set("device.capacity", |s| s.device.capacity = Some(Capacity::Blocks(DEVICE_BLOCKS)))
            .set("device.backend", |s| s.device.backend = DeviceBackend::Emulated)
            .set("host.capacity", |s| s.host.capacity = Some(Capacity::Blocks(HOST_BLOCKS)))
            .set("disk.capacity", |s| s.disk.capacity = Some(Capacity::Blocks(DISK_BLOCKS)))
            .set("disk.dirs", |s| s.disk.dirs = vec![std::env::temp_dir()])
            .set("object.url", move |s| s.object.url = Some(url))
            .set("object.capacity", |s| s.object.capacity = None);
        if watched.is_on() { watched.apply(worth_watching(loader)) } else { loader }
    })?;
    Ok(loaded.settings)
}

/// Every panel of the dashboards has something to show.
fn worth_watching(loader: Loader) -> Loader {
    let quota = |tenant| (tenant, Capacity::Bytes(QUOTA_BYTES));
    loader
        .set("object.capacity", |s| s.object.capacity = Some(Capacity::Blocks(OBJECT_BLOCKS)))
        .set("object.put_budget", |s| s.object.put_budget = REQUESTS_PER_HOUR)
        .set("object.get_budget", |s| s.object.get_budget = REQUESTS_PER_HOUR)
        .set("disk.write_budget", |s| {
            s.disk.write_budget = Some(WriteBudget::BytesPerDay(WRITTEN_PER_DAY));
        })
        .set("tenant_quotas", move |s| s.tenant_quotas = chat::TENANTS.map(quota).into())
}

fn play(engine: &SimulatedEngine) -> Result<DemoRecord, CommandFailure> {
    let requests = chat::requests();
    let (progress, recorder) =
        (ReplayProgress::new(Some(requests.len() as u64)), DemoRecorder::new(engine));
    let started = clock::now();
    let tally = engine.run(requests.into_iter().map(Ok), 1, |_, tally: &ServedTally| {
        progress.show(tally, engine.manager());
        recorder.sample(tally);
    })?;
    let seconds = started.elapsed().as_secs_f64();
    progress.finishing("flushing what is dirty");
    let audited = engine.drain_and_audit();
    engine.check_stop()?;
    Ok(recorder.finish(&tally, &audited, seconds))
}

/// Chats that go on, to be watched. An interrupt ends them.
fn go_on(engine: &SimulatedEngine, stop: &StopSignal) -> Result<(), CommandFailure> {
    output::tell("the chats go on at sixty times their pace; Ctrl-C ends them");
    let requests = PacedIter::new(chat::without_end().map(Ok), SPEED, stop.clone());
    let ended = engine.run(requests, 1, |_, _| ());
    if stop.check().is_err() { Ok(()) } else { ended.map(drop) }
}

/// The report's file, which has no name yet: that this directory cannot be written to is better
/// known early.
fn blank_page() -> Result<NamedTempFile, CommandFailure> {
    let builder = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o644))
        .prefix(".kvbm-demo-")
        .tempfile_in(".");
    builder.map_err(|error| {
        CommandFailure::unusable(format!(
            "cannot write {REPORT} to the current directory: {error}; start it elsewhere"
        ))
    })
}

fn write_page(page: NamedTempFile, text: &str) -> Result<(), CommandFailure> {
    let failed = |error| CommandFailure::unusable(format!("cannot write {REPORT}: {error}"));
    std::fs::write(page.path(), text).map_err(failed)?;
    page.persist(REPORT).map(drop).map_err(|error| failed(error.error))
}

fn verdict(record: &DemoRecord) -> Result<(), CommandFailure> {
    if record.summary.mismatches > 0 || record.drift > 0 {
        let message = format!(
            "{} blocks with wrong bytes, {} broken invariants",
            record.summary.mismatches, record.drift
        );
        return Err(CommandFailure::unexpected(message));
    }
    Ok(())
}
