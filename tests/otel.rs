//! What an OpenTelemetry collector is told of requests, and that one that fails disturbs no
//! request. A test of its own, since who listens listens in the whole process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use kvbm::blocking::Blocks;
use kvbm::{BlockHash, Error, Manager, RequestId, RequestInfo, SpanExport, Tier};
use kvbm_settings::TraceSettings;
use kvbm_tests::engine;
use kvbm_tests::rig::hash;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prometheus::Registry;
use prost::Message;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tracing_subscriber::layer::SubscriberExt;

/// How a collector answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Well,
    /// With an error.
    Failing,
    /// Not, until it is well again.
    Hanging,
}

/// Takes spans by OTLP over HTTP at `/v1/traces`.
struct Collector {
    runtime: Runtime,
    endpoint: String,
    mood: watch::Sender<Mood>,
    asked: Arc<AtomicUsize>,
    received: mpsc::UnboundedReceiver<ExportTraceServiceRequest>,
    spans: Vec<Span>,
    service: String,
}

#[derive(Clone)]
struct Receiving {
    mood: watch::Receiver<Mood>,
    asked: Arc<AtomicUsize>,
    received: mpsc::UnboundedSender<ExportTraceServiceRequest>,
}

async fn receive(State(mut receiving): State<Receiving>, body: Bytes) -> StatusCode {
    receiving.asked.fetch_add(1, Ordering::SeqCst);
    let mood = *receiving
        .mood
        .wait_for(|&mood| mood != Mood::Hanging)
        .await
        .expect("the collector is there");
    if mood == Mood::Failing {
        return StatusCode::BAD_REQUEST;
    }
    receiving
        .received
        .send(ExportTraceServiceRequest::decode(body).expect("OTLP"))
        .expect("somebody looks");
    StatusCode::OK
}

impl Collector {
    fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let socket = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let endpoint = format!("http://{}", socket.local_addr().unwrap());
        let (mood, moods) = watch::channel(Mood::Well);
        let (sender, received) = mpsc::unbounded_channel();
        let asked = Arc::new(AtomicUsize::new(0));
        let receiving = Receiving { mood: moods, asked: Arc::clone(&asked), received: sender };
        let app = Router::new().route("/v1/traces", post(receive)).with_state(receiving);
        runtime.spawn(async { axum::serve(socket, app).await });
        Self { runtime, endpoint, mood, asked, received, spans: Vec::new(), service: String::new() }
    }

    fn is(&self, mood: Mood) {
        self.mood.send_replace(mood);
    }

    /// Takes what has come.
    fn look(&mut self) {
        while let Ok(request) = self.received.try_recv() {
            for of_resource in request.resource_spans {
                let resource = of_resource.resource.expect("it says of what");
                self.service = text(&resource.attributes, "service.name").expect("a name");
                self.spans
                    .extend(of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans));
            }
        }
    }

    fn find(&mut self, name: &str, key: &str, value: &str) -> Span {
        self.look();
        let is = |span: &&Span| {
            span.name == name && text(&span.attributes, key).as_deref() == Some(value)
        };
        let mut found = self.spans.iter().filter(is);
        let span = found
            .next()
            .unwrap_or_else(|| panic!("no {name} with {key} = {value}: {:#?}", self.spans));
        assert!(found.next().is_none(), "two spans {name} with {key} = {value}");
        span.clone()
    }
}

fn text(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    Some(match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        other => panic!("{key} is {other:?}"),
    })
}

fn of(request: u64) -> RequestInfo {
    RequestInfo { request: Some(RequestId(request)), ..RequestInfo::default() }
}

/// As an engine does that has a span for each request.
fn serve_traced(manager: &Manager, request: u64, chain: &[BlockHash]) {
    let _entered = tracing::info_span!("serve", request).entered();
    engine::serve_for(manager, of(request), chain);
}

/// A worker that others read at.
fn worker(addresses: &str) -> Blocks {
    let mut settings = engine::without_device(4096, 16);
    engine::add_peers(&mut settings, addresses);
    Blocks::open(settings, engine::model(engine::fingerprint("1"))).unwrap()
}

/// As an engine does that has a span for each request: what another worker does for it is found
/// under that span.
fn read_at_a_peer(collector: &mut Collector, export: &SpanExport, chain: &[BlockHash]) {
    let there = worker("");
    let fill = |at: usize, slot: &mut [u8]| {
        slot.fill(at as u8);
        Ok::<_, Error>(())
    };
    there.put(chain, fill).unwrap();
    let peers_there = there.manager().peers().unwrap();
    let address = engine::address(there.manager());
    let here = worker(&address);
    let peers = here.manager().peers().unwrap();
    let peer = engine::peer_name(&address);
    let root = tracing::info_span!("serve", request = 9).entered();
    let lease = peers.lease(&peer, chain, of(9)).wait().unwrap();
    assert_eq!(peers.pull(lease).wait().unwrap().copied, chain.len());
    drop(root);
    let began = Instant::now();
    while peers_there.leased() > 0 {
        assert!(began.elapsed() < Duration::from_mins(1), "the lease goes on");
        std::thread::yield_now();
    }
    // Then all that it did has ended.
    let reader = peers.name().to_owned();
    drop(there);
    assert!(export.flush());
    let root = collector.find("serve", "request", "9");
    let leased = collector.find("peer_lease", "request", "9");
    let pulled = collector.find("peer_pull", "request", "9");
    let served = collector.find("peer_serve", "reader", &reader);
    for (span, parent) in [(&leased, &root), (&pulled, &root), (&served, &leased)] {
        let (of_parent, trace) = (&parent.span_id, &parent.trace_id);
        assert_eq!((&span.parent_span_id, &span.trace_id), (of_parent, trace), "{}", span.name);
    }
    let says = |span: &Span, keys: [&str; 2]| keys.map(|key| text(&span.attributes, key).unwrap());
    assert_eq!(says(&leased, ["peer", "blocks"]), [&*peer, "3"]);
    assert_eq!(says(&pulled, ["way", "blocks"]), ["shared_memory", "3"]);
    assert_eq!(says(&served, ["blocks", "end"]), ["3", "whole"]);
}

#[test]
fn a_collector_is_told_of_requests_and_disturbs_nobody() {
    let mut collector = Collector::start();
    let endpoint = Some(collector.endpoint.clone());
    let settings = TraceSettings { enabled: true, endpoint, ..TraceSettings::default() };
    let export = SpanExport::open(&settings).unwrap().expect("it is asked for");
    let subscriber = tracing_subscriber::registry().with(export.layer());
    tracing::subscriber::set_global_default(subscriber).expect("the only subscriber");
    let dir = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(4096, 8, 8);
    engine::add_disk(&mut settings, 16, dir.path());
    let manager = engine::open(settings, &Registry::new()).unwrap();
    let chain: Vec<BlockHash> = (0..3).map(hash).collect();

    // Well: what a request did is found under its span, by its number; what no request asked for
    // stands alone.
    serve_traced(&manager, 5, &chain);
    assert!(manager.drain(Duration::from_secs(10)).is_complete());
    manager.admin().evict(Tier::Device, 8);
    serve_traced(&manager, 6, &chain);
    assert!(export.flush());
    for (request, held) in [("5", "0"), ("6", "3")] {
        let root = collector.find("serve", "request", request);
        assert!(root.parent_span_id.is_empty());
        let matched = collector.find("match", "request", request);
        assert_eq!(text(&matched.attributes, "held").as_deref(), Some(held));
        for name in ["match", "load", "save"] {
            let span = collector.find(name, "request", request);
            assert_eq!(
                (&span.trace_id, &span.parent_span_id),
                (&root.trace_id, &root.span_id),
                "{name}"
            );
            assert!(span.start_time_unix_nano >= root.start_time_unix_nano, "{name}");
            assert!(span.end_time_unix_nano >= span.start_time_unix_nano, "{name}");
        }
    }
    let loaded = collector.find("load", "request", "6");
    let of_load =
        ["from", "to", "blocks", "copied"].map(|key| text(&loaded.attributes, key).unwrap());
    assert_eq!(of_load, ["host", "device", "3", "3"]);
    let flushed = collector.find("flush", "to", "disk");
    assert!(flushed.parent_span_id.is_empty() && text(&flushed.attributes, "request").is_none());
    assert_eq!(collector.service, "kvbm");
    read_at_a_peer(&mut collector, &export, &chain);

    // Whatever the collector does, requests are served.
    for (mood, request) in [(Mood::Failing, 1_000), (Mood::Hanging, 20_000)] {
        collector.is(mood);
        let (began, asked) = (Instant::now(), collector.asked.load(Ordering::SeqCst));
        // More than wait in the queue.
        for request in request..request + 3_000 {
            drop(manager.lease_for(of(request), &chain));
        }
        serve_traced(&manager, request, &chain);
        assert!(began.elapsed() < Duration::from_mins(1), "{mood:?}: {:?}", began.elapsed());
        while collector.asked.load(Ordering::SeqCst) == asked {
            assert!(began.elapsed() < Duration::from_mins(1), "{mood:?}: it is not asked");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    // And then it heals.
    collector.is(Mood::Well);
    let began = Instant::now();
    while !export.flush() {
        assert!(began.elapsed() < Duration::from_mins(1), "nothing is taken any more");
    }
    drop(manager.lease_for(of(7), &chain));
    assert!(export.flush());
    collector.find("match", "request", "7");

    // The program ends, whatever waits.
    collector.is(Mood::Hanging);
    drop(manager.lease_for(of(8), &chain));
    let began = Instant::now();
    drop(export);
    assert!(began.elapsed() < Duration::from_mins(1), "{:?}", began.elapsed());
    collector.runtime.shutdown_background();
}

/// Nothing is opened, and no thread started, unless it is asked for.
#[test]
fn nothing_is_sent_unasked_and_a_wrong_endpoint_is_named() {
    assert!(SpanExport::open(&TraceSettings::default()).unwrap().is_none());
    let endpoint = Some("not a URL".to_owned());
    let settings = TraceSettings { enabled: true, endpoint, ..TraceSettings::default() };
    let error = SpanExport::open(&settings).unwrap_err();
    assert!(error.to_string().contains("DYN_KVBM_TRACES_ENDPOINT"), "{error}");
}
