//! The hit rates of the hazard policy over real traces, which are not part of the repository.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use kvbm_policies::{EvictionKind, Policy, Request, Workload};
use serde_json::Value;

/// The floor in per cent by capacity in blocks: what a published policy of this kind reached, less 0.3 points.
const CONVERSATION: [(u32, f64); 6] =
    [(1_000, 7.90), (3_000, 13.77), (5_000, 17.76), (10_000, 24.73), (20_000, 31.37), (30_000, 34.24)];
const AGENTIC: [(u32, f64); 4] = [(1_000, 36.66), (5_000, 77.65), (10_000, 91.50), (20_000, 95.00)];

#[test]
fn conversations_hit_as_often_as_published() {
    check("conversation.jsonl.gz", &CONVERSATION);
}

#[test]
fn agents_hit_as_often_as_published() {
    check("agentic.jsonl.gz", &AGENTIC);
}

fn check(trace: &str, floors: &[(u32, f64)]) {
    let Some(workload) = load(trace) else { return };
    // Without optimisation one figure takes as long as all do with it.
    let floors = if cfg!(debug_assertions) { &floors[1..2] } else { floors };
    for &(capacity, floor) in floors {
        let percent = |kind| Policy::Online(kind).simulate(&workload, capacity).token_hit_rate() * 100.0;
        let (hazard, lru) = (percent(EvictionKind::Hazard), percent(EvictionKind::Lru));
        eprintln!("{trace} at {capacity}: hazard {hazard:.2} %, lru {lru:.2} %");
        assert!(hazard >= floor, "{trace} at {capacity}: {hazard:.2} % is below {floor}");
        assert!(hazard >= lru - 0.1, "{trace} at {capacity}: {hazard:.2} % is below lru, {lru:.2} %");
    }
}

/// The trace from `KVBM_TRACES`, or beside the checkout. Its absence is said and skips the test.
fn load(trace: &str) -> Option<Workload> {
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/traces");
    let directory = std::env::var_os("KVBM_TRACES").unwrap_or_else(|| beside.into());
    let path = Path::new(&directory).join(trace);
    let Ok(file) = File::open(&path) else {
        eprintln!("SKIPPED: no {}; set KVBM_TRACES to the directory of traces", path.display());
        return None;
    };
    let lines = BufReader::new(MultiGzDecoder::new(BufReader::new(file))).lines();
    let mut workload = Workload::default();
    for line in lines {
        workload.push(&request(&line.expect("the trace can be read")));
    }
    Some(workload)
}

fn request(line: &str) -> Request {
    let line: Value = serde_json::from_str(line).expect("a line is JSON");
    let number = |value: &Value| value.as_u64().expect("a number");
    let ids = line["hash_ids"].as_array().expect("an array");
    Request {
        timestamp_ms: number(&line["timestamp"]),
        input_length: number(&line["input_length"]) as u32,
        output_length: number(&line["output_length"]) as u32,
        hash_ids: ids.iter().map(number).collect(),
    }
}
