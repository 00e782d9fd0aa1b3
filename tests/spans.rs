//! What a manager's spans tell a tracer. A test of its own, since who listens listens in the whole
//! process.

use std::collections::BTreeMap;
use std::fmt;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvbm::{BlockHash, RequestId, RequestInfo, Tier};
use kvbm_settings::DiskBackend;
use kvbm_tests::engine;
use kvbm_tests::rig::hash;
use kvbm_tiers::testing::skip;
use prometheus::Registry;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

type Fields = BTreeMap<&'static str, String>;

/// The spans that are closed, with their fields.
#[derive(Clone, Default)]
struct Closed(Arc<Mutex<Vec<(&'static str, Fields)>>>);

struct Reader<'a>(&'a mut Fields);

impl Visit for Reader<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}").replace('"', ""));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Closed {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::new();
        attributes.record(&mut Reader(&mut fields));
        context.span(id).expect("it is new").extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &Id, record: &Record<'_>, context: Context<'_, S>) {
        let span = context.span(id).expect("it is open");
        record
            .record(&mut Reader(span.extensions_mut().get_mut::<Fields>().expect("made with it")));
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let span = context.span(&id).expect("it closes");
        let fields = span.extensions_mut().remove().expect("made with it");
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((span.name(), fields));
    }
}

impl Closed {
    /// The last one of this name that says `field` is `value`, among those of the crate. It is
    /// waited for: a batch's closes when its backend lets go of it, and that may be after who waits
    /// for the copies was told.
    fn find(&self, name: &str, (field, value): (&str, &str)) -> Fields {
        let says = |fields: &Fields| fields.get(field).is_some_and(|said| said == value);
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let closed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((_, fields)) =
                closed.iter().rev().find(|(of, fields)| *of == name && says(fields))
            {
                return fields.clone();
            }
            assert!(Instant::now() < until, "no {name} with {field} = {value} among {closed:#?}");
            drop(closed);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn matches_and_transfers_are_spans_that_name_their_request() {
    let closed = Closed::default();
    let listening = tracing_subscriber::registry()
        .with(closed.clone().with_filter(LevelFilter::from_level(Level::TRACE)));
    tracing::subscriber::set_global_default(listening).expect("the only subscriber");
    let dir = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(4096, 8, 8);
    engine::add_disk(&mut settings, 16, dir.path());
    let manager = engine::open(settings, &Registry::new()).unwrap();
    let chain: Vec<BlockHash> = (0..3).map(hash).collect();
    let of = |request| RequestInfo { request: Some(RequestId(request)), ..RequestInfo::default() };
    drop(manager.lease_for(of(5), &chain));
    assert_eq!(closed.find("match", ("request", "5"))["held"], "0");
    engine::serve(&manager, &chain);
    let saved = closed.find("save", ("to", "host"));
    assert_eq!((saved["from"].as_str(), saved["copied"].as_str()), ("device", "3"));
    assert!(manager.drain(Duration::from_secs(10)).is_complete());
    assert_eq!(closed.find("flush", ("to", "disk"))["copied"], "3");
    manager.admin().evict(Tier::Device, 8);
    drop(manager.load(manager.lease_for(of(6), &chain)).wait().unwrap());
    let loaded = closed.find("load", ("request", "6"));
    assert_eq!(
        (loaded["from"].as_str(), loaded["blocks"].as_str(), loaded["copied"].as_str()),
        ("host", "3", "3")
    );
    let copied = closed.find("copy", ("class", "load"));
    assert_eq!(
        ["from", "to", "backend", "blocks"].map(|key| copied[key].as_str()),
        ["host", "device", "memcpy", "3"]
    );
    // What there is nothing to copy of is a span as well, and closed.
    drop(manager.load(manager.lease_for(of(7), &chain)).wait().unwrap());
    closed.find("load", ("request", "7"));
}

/// NIXL is told by the environment to measure, so by that of a process of its own.
#[test]
fn spans_of_nixl_say_what_it_measured() {
    let itself = std::env::current_exe().unwrap();
    let mut inner = Command::new(itself);
    inner.args(["--exact", "--ignored", "--nocapture", "nixl_that_measures"]);
    let output = inner.env("NIXL_TELEMETRY_ENABLE", "y").output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    told.lines().filter(|line| line.starts_with("SKIPPED")).for_each(|line| eprintln!("{line}"));
}

#[test]
#[ignore = "the test above runs it, with the environment that it takes"]
fn nixl_that_measures() {
    let closed = Closed::default();
    let listening = tracing_subscriber::registry()
        .with(closed.clone().with_filter(LevelFilter::from_level(Level::TRACE)));
    tracing::subscriber::set_global_default(listening).expect("the only subscriber");
    let dir = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(4096, 8, 8);
    engine::add_disk(&mut settings, 16, dir.path());
    settings.disk.backend = DiskBackend::Nixl;
    settings.nixl.backends = [("POSIX".to_owned(), true)].into();
    let manager = match engine::open(settings, &Registry::new()) {
        Ok(manager) => manager,
        Err(error) => return skip("nixl", &error),
    };
    let chain: Vec<BlockHash> = (0..3).map(hash).collect();
    engine::serve(&manager, &chain);
    assert!(manager.drain(Duration::from_secs(10)).is_complete());
    let written = closed.find("nixl", ("direction", "write"));
    assert_eq!(written["bytes"], "12288");
    for key in ["descriptors", "post_us", "transfer_us"] {
        assert!(written.contains_key(key), "{key}: {written:?}");
    }
}
