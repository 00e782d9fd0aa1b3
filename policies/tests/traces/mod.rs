//! Real traces, which are not part of the repository.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use kvbm_policies::Request;
use serde_json::Value;

/// The trace from `KVBM_TRACES`, or beside the checkout. Its absence is said and skips the test.
pub(crate) fn load(trace: &str) -> Option<Vec<Request>> {
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/traces");
    let directory = std::env::var_os("KVBM_TRACES").unwrap_or_else(|| beside.into());
    let path = Path::new(&directory).join(trace);
    let Ok(file) = File::open(&path) else {
        eprintln!("SKIPPED: no {}; set KVBM_TRACES to the directory of traces", path.display());
        return None;
    };
    let lines = BufReader::new(MultiGzDecoder::new(BufReader::new(file))).lines();
    Some(lines.map(|line| request(&line.expect("the trace can be read"))).collect())
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
