//! `kvbm demo`: a generated chat through all four tiers, and a report to look at.

mod chat;
mod html;
mod record;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use kvbm::Options;
use kvbm_settings::{Capacity, DeviceBackend, Settings};
use kvbm_tiers::clock;
use tempfile::NamedTempFile;

use self::record::{Record, Recorder};
use crate::engine::{Engine, Tally};
use crate::failure::Failure;
use crate::global::Global;
use crate::output;
use crate::progress::Progress;
use crate::scratch::{Scratch, file_url};
use crate::stop::{self, Stop};

const REPORT: &str = "kvbm-demo.html";

const BLOCK_BYTES: u64 = 64 << 10;
const DEVICE_BLOCKS: u64 = 500;
const HOST_BLOCKS: u64 = 1_500;
const DISK_BLOCKS: u64 = 5_000;

pub(crate) fn run(global: &Global) -> Result<(), Failure> {
    let objects = std::env::temp_dir().join("kvbm-demo-objects");
    let mut settings = settings(global, &objects)?;
    let page = blank_page()?;
    let runtime = stop::runtime()?;
    let stop = Stop::on_signals(&runtime)?;
    // Before the engine, so that it goes after it.
    let _scratch = Scratch::divert(&mut settings)?;
    let engine = Engine::open(settings, Options::default(), runtime, stop)?;
    let record = play(&engine)?;
    write_page(page, &html::page(&record))?;
    if global.json {
        output::print_json(&record.summary)?;
    } else {
        output::print(&record.to_text())?;
        output::print(&format!("\nThe whole story: {REPORT}"))?;
    }
    verdict(&record)
}

/// The stage is always the same; how blocks move and leave is as the settings say.
fn settings(global: &Global, objects: &Path) -> Result<Settings, Failure> {
    let url = file_url(objects)?;
    let loaded = global.load(|loader| {
        loader
            .set("block_bytes", |s| s.block_bytes = Some(BLOCK_BYTES))
            .set("device.capacity", |s| s.device.capacity = Some(Capacity::Blocks(DEVICE_BLOCKS)))
            .set("device.backend", |s| s.device.backend = DeviceBackend::Emulated)
            .set("host.capacity", |s| s.host.capacity = Some(Capacity::Blocks(HOST_BLOCKS)))
            .set("disk.capacity", |s| s.disk.capacity = Some(Capacity::Blocks(DISK_BLOCKS)))
            .set("disk.dirs", |s| s.disk.dirs = vec![std::env::temp_dir()])
            .set("object.url", move |s| s.object.url = Some(url))
            .set("object.capacity", |s| s.object.capacity = None)
    })?;
    Ok(loaded.settings)
}

fn play(engine: &Engine) -> Result<Record, Failure> {
    let requests = chat::requests();
    let (progress, recorder) = (Progress::new(Some(requests.len() as u64)), Recorder::new(engine));
    let started = clock::now();
    let tally = engine.run(requests.into_iter().map(Ok), 1, |_, tally: &Tally| {
        progress.show(tally, engine.manager());
        recorder.sample(tally);
    })?;
    let seconds = started.elapsed().as_secs_f64();
    progress.finishing("flushing what is dirty");
    let settled = engine.settle();
    engine.check_stop()?;
    Ok(recorder.finish(&tally, &settled, seconds))
}

/// The report's file, which has no name yet: that this directory cannot be written to is better known early.
fn blank_page() -> Result<NamedTempFile, Failure> {
    let builder = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o644))
        .prefix(".kvbm-demo-")
        .tempfile_in(".");
    builder.map_err(|error| {
        Failure::unusable(format!(
            "cannot write {REPORT} to the current directory: {error}; start it elsewhere"
        ))
    })
}

fn write_page(page: NamedTempFile, text: &str) -> Result<(), Failure> {
    let failed = |error| Failure::unusable(format!("cannot write {REPORT}: {error}"));
    std::fs::write(page.path(), text).map_err(failed)?;
    page.persist(REPORT).map(drop).map_err(|error| failed(error.error))
}

fn verdict(record: &Record) -> Result<(), Failure> {
    if record.summary.mismatches > 0 || record.drift > 0 {
        let message = format!(
            "{} blocks with wrong bytes, {} broken invariants",
            record.summary.mismatches, record.drift
        );
        return Err(Failure::unexpected(message));
    }
    Ok(())
}
