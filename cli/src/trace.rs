//! Reads request traces in the Mooncake format, one JSON object a line, plain or compressed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use kvbm_policies::{BLOCK_TOKENS, Request};
use serde::Deserialize;
use thiserror::Error;

/// The longest line accepted, in bytes: room for about two million blocks.
const MAX_LINE: usize = 16 << 20;

/// Streams the requests of a trace in the order of the file. Ends after the first error.
///
/// Plain, gzip and zstd are told apart by their first bytes. Blank lines are skipped. A timestamp
/// before that of an earlier request is raised to it, and counted: see
/// [`out_of_order`](Self::out_of_order).
pub struct TraceReader {
    path: PathBuf,
    input: Box<dyn BufRead + Send>,
    line: Vec<u8>,
    line_number: u64,
    requests: u64,
    latest_ms: u64,
    out_of_order: u64,
    ended: bool,
}

/// Why a trace cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file could not be opened, or its compression not begun.
    #[error("cannot open the trace {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Reading or decompressing failed after the last complete line.
    #[error("{}:{line}: cannot read on: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The line that was being read, from 1.
        line: u64,
        /// Why not.
        source: io::Error,
    },
    /// A line is not a request.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Which, from 1.
        line: u64,
        /// What is wrong with it.
        problem: LineProblem,
    },
    /// The trace holds no request at all.
    #[error("the trace {} is empty: it holds no request", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// What is wrong with a line.
#[derive(Debug, Error)]
pub enum LineProblem {
    /// It is longer than `MAX_LINE`.
    #[error("the line is longer than {} MiB", MAX_LINE >> 20)]
    TooLong,
    /// It is not JSON, or a field is missing, negative or of another type.
    #[error("column {column}: {message}")]
    Json {
        /// Where in the line, from 1.
        column: usize,
        /// What the parser says.
        message: String,
    },
    /// The prompt's length and its number of blocks contradict each other.
    #[error(
        "hash_ids has {ids} entries, but a prompt of {input_length} tokens has {expected} blocks of \
         {BLOCK_TOKENS} tokens"
    )]
    BlockCount {
        /// Blocks that the line names.
        ids: usize,
        /// The prompt's tokens.
        input_length: u32,
        /// The blocks that hold these tokens, the last one perhaps in part.
        expected: u32,
    },
}

impl TraceReader {
    /// Opens the trace at `path`.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let file = File::open(path)
            .map_err(|source| TraceError::Open { path: path.to_owned(), source })?;
        Self::read(path, file)
    }

    /// Reads a trace from `input`, which errors call `path`.
    pub fn read(path: &Path, input: impl Read + Send + 'static) -> Result<Self, TraceError> {
        decompress(input)
            .map(|input| Self::new(path, input))
            .map_err(|source| TraceError::Open { path: path.to_owned(), source })
    }

    /// How many requests so far came with a timestamp before that of an earlier one.
    pub fn out_of_order(&self) -> u64 {
        self.out_of_order
    }

    fn new(path: &Path, input: Box<dyn BufRead + Send>) -> Self {
        Self {
            path: path.to_owned(),
            input,
            line: Vec::new(),
            line_number: 0,
            requests: 0,
            latest_ms: 0,
            out_of_order: 0,
            ended: false,
        }
    }

    fn next_request(&mut self) -> Result<Option<Request>, TraceError> {
        while self.read_line()? {
            if !self.line.trim_ascii().is_empty() {
                let request = parse(&self.line).map_err(|problem| self.line_error(problem))?;
                return Ok(Some(self.in_order(request)));
            }
        }
        if self.requests == 0 {
            return Err(TraceError::Empty { path: self.path.clone() });
        }
        Ok(None)
    }

    /// False at the end of the input.
    fn read_line(&mut self) -> Result<bool, TraceError> {
        self.line.clear();
        self.line_number += 1;
        // One byte more than allowed: the line feed, or the proof that the line is too long.
        let mut bounded = (&mut self.input).take(MAX_LINE as u64 + 1);
        let read = bounded.read_until(b'\n', &mut self.line).map_err(|source| {
            TraceError::Read { path: self.path.clone(), line: self.line_number, source }
        })?;
        self.line.pop_if(|last| *last == b'\n');
        if self.line.len() > MAX_LINE {
            return Err(self.line_error(LineProblem::TooLong));
        }
        Ok(read > 0)
    }

    fn in_order(&mut self, mut request: Request) -> Request {
        self.requests += 1;
        self.out_of_order += u64::from(request.timestamp_ms < self.latest_ms);
        self.latest_ms = self.latest_ms.max(request.timestamp_ms);
        request.timestamp_ms = self.latest_ms;
        request
    }

    fn line_error(&self, problem: LineProblem) -> TraceError {
        TraceError::Line { path: self.path.clone(), line: self.line_number, problem }
    }
}

impl Iterator for TraceReader {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.next_request().transpose();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

fn decompress(input: impl Read + Send + 'static) -> io::Result<Box<dyn BufRead + Send>> {
    const GZIP: &[u8] = &[0x1f, 0x8b];
    const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

    let mut input = input;
    let mut magic = Vec::new();
    input.by_ref().take(ZSTD.len() as u64).read_to_end(&mut magic)?;
    let (gzip, zstd) = (magic.starts_with(GZIP), magic == ZSTD);
    let input = BufReader::new(io::Cursor::new(magic).chain(input));
    Ok(if gzip {
        Box::new(BufReader::new(MultiGzDecoder::new(input)))
    } else if zstd {
        Box::new(BufReader::new(zstd::Decoder::with_buffer(input)?))
    } else {
        Box::new(input)
    })
}

/// A line as it is written; fields beyond these are ignored.
#[derive(Deserialize)]
struct TraceLine {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

fn parse(line: &[u8]) -> Result<Request, LineProblem> {
    let TraceLine { timestamp, input_length, output_length, hash_ids } =
        serde_json::from_slice(line).map_err(|error| json_problem(&error))?;
    // Some traces name the partial last block and some do not; both tell the full ones.
    let full = input_length / BLOCK_TOKENS;
    let expected = input_length.div_ceil(BLOCK_TOKENS);
    if !(full as usize..=expected as usize).contains(&hash_ids.len()) {
        return Err(LineProblem::BlockCount { ids: hash_ids.len(), input_length, expected });
    }
    Ok(Request { timestamp_ms: timestamp, input_length, output_length, hash_ids })
}

/// The parser counts lines from its own start, which would contradict the trace's line number.
fn json_problem(error: &serde_json::Error) -> LineProblem {
    let message = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    let message = message.strip_suffix(&position).unwrap_or(&message).to_owned();
    LineProblem::Json { column: error.column(), message }
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, Write};

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;

    use super::*;

    const LINE: &str =
        r#"{"timestamp": 7, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}"#;

    fn read(bytes: Vec<u8>) -> Result<Vec<Request>, String> {
        let input = decompress(Cursor::new(bytes)).map_err(|error| error.to_string())?;
        let requests: Result<_, _> = TraceReader::new(Path::new("t"), input).collect();
        requests.map_err(|error: TraceError| error.to_string())
    }

    fn problem(text: &str) -> String {
        read(text.into()).expect_err("the trace is bad")
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).expect("memory takes all");
        encoder.finish().expect("memory takes all")
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        zstd::encode_all(bytes, 1).expect("memory takes all")
    }

    fn request() -> impl Strategy<Value = Request> {
        let hash_ids = prop::collection::vec(any::<u64>(), 0..9);
        (0_u64..1000, 0..BLOCK_TOKENS, any::<u32>(), hash_ids).prop_map(
            |(timestamp_ms, partial, output_length, hash_ids)| Request {
                timestamp_ms,
                input_length: (hash_ids.len() as u32 * BLOCK_TOKENS).saturating_sub(partial),
                output_length,
                hash_ids,
            },
        )
    }

    fn written(requests: &[Request]) -> String {
        let line = |r: &Request| {
            format!(
                "{{\"timestamp\":{},\"input_length\":{},\"output_length\":{},\"hash_ids\":{:?}}}\n",
                r.timestamp_ms, r.input_length, r.output_length, r.hash_ids
            )
        };
        requests.iter().map(line).collect()
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(mut requests in prop::collection::vec(request(), 1..20)) {
            requests.sort_by_key(|request| request.timestamp_ms);
            let text = written(&requests).into_bytes();
            prop_assert_eq!(&read(gzip(&text)).unwrap(), &requests);
            prop_assert_eq!(&read(zstd(&text)).unwrap(), &requests);
            prop_assert_eq!(&read(text).unwrap(), &requests);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>, cut: prop::sample::Index, flip: prop::sample::Index) {
            for mut bytes in [bytes.clone(), gzip(&bytes), zstd(&bytes), LINE.into(), gzip(LINE.as_bytes())] {
                let _ = read(bytes[..cut.index(bytes.len() + 1)].to_vec());
                let flip = flip.index(bytes.len().max(1));
                bytes.iter_mut().skip(flip).take(1).for_each(|byte| *byte ^= 0x55);
                let _ = read(bytes);
            }
        }

        #[test]
        fn a_truncated_archive_is_an_error(kept in 4_usize..40) {
            let archive = gzip(LINE.repeat(3).as_bytes());
            prop_assert!(read(archive[..kept].to_vec()).unwrap_err().starts_with("t:1: cannot read on: "));
        }
    }

    #[test]
    fn archives_of_several_members_are_read_to_the_end() {
        let line = format!("{LINE}\n");
        for member in [gzip(line.as_bytes()), zstd(line.as_bytes())] {
            assert_eq!(read(member.repeat(2)).unwrap().len(), 2);
        }
    }

    #[test]
    fn a_bad_line_is_named_with_its_number_and_fault() {
        let after_a_good_one = |line: &str| problem(&format!("{LINE}\n\n{line}\n"));
        assert_eq!(after_a_good_one("{]"), "t:3: column 2: key must be a string");
        assert_eq!(
            after_a_good_one(&LINE.replace("output_length", "output")),
            "t:3: column 70: missing field `output_length`"
        );
        assert_eq!(
            after_a_good_one(&LINE.replace('7', "-7")),
            "t:3: column 16: invalid value: integer `-7`, expected u64"
        );
        assert_eq!(
            after_a_good_one(&LINE.replace("600", "6000")),
            "t:3: hash_ids has 2 entries, but a prompt of 6000 tokens has 12 blocks of 512 tokens"
        );
    }

    #[test]
    fn the_partial_last_block_may_be_left_out() {
        assert_eq!(read(LINE.replace(", 2]", "]").into()).unwrap()[0].hash_ids, [1]);
        assert!(read(LINE.replace("[1, 2]", "[]").into()).is_err());
    }

    #[test]
    fn an_endless_line_is_refused_before_it_fills_the_memory() {
        let endless = " ".repeat(MAX_LINE + 1);
        assert_eq!(problem(&endless), "t:1: the line is longer than 16 MiB");
    }

    #[test]
    fn an_empty_trace_is_an_error() {
        assert_eq!(problem(""), "the trace t is empty: it holds no request");
        assert_eq!(problem(" \n\n"), "the trace t is empty: it holds no request");
    }

    #[test]
    fn time_never_runs_backwards() {
        let text = [7, 3, 9].map(|ms| LINE.replace('7', &ms.to_string())).join("\n");
        let input = decompress(Cursor::new(text.into_bytes())).unwrap();
        let mut reader = TraceReader::new(Path::new("t"), input);
        let times: Vec<_> = reader.by_ref().map(|request| request.unwrap().timestamp_ms).collect();
        assert_eq!(times, [7, 7, 9]);
        assert_eq!(reader.out_of_order(), 1);
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = TraceReader::open(Path::new("no/such/trace")).err().unwrap();
        assert!(error.to_string().starts_with("cannot open the trace no/such/trace: "));
    }
}
