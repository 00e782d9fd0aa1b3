//! Request traces.

use std::fmt::Write as _;
use std::io::Cursor;
use std::path::Path;

use kvbm_cli::trace::{TraceError, TraceReader};

/// Reads a trace; what is in it, written as a line each, is read again.
pub fn trace(bytes: &[u8]) {
    let Ok(text) = rewritten(bytes) else { return };
    let again = rewritten(text.as_bytes()).expect("what we write can be read");
    assert_eq!(again, text);
}

/// The trace in JSON lines, in the order of time.
fn rewritten(bytes: &[u8]) -> Result<String, TraceError> {
    let mut text = String::new();
    for request in TraceReader::read(Path::new("trace"), Cursor::new(bytes.to_vec()))? {
        let request = request?;
        let (timestamp, ids) = (request.timestamp_ms, &request.hash_ids);
        let (input, output) = (request.input_length, request.output_length);
        let _ = writeln!(
            text,
            r#"{{"timestamp":{timestamp},"input_length":{input},"output_length":{output},"hash_ids":{ids:?}}}"#
        );
    }
    Ok(text)
}
