//! The trace, made ready for simulation.

use std::fs::File;
use std::path::Path;

use kvbm_policies::{Miniature, Sample, TraceThinning};

use crate::trace::{TraceError, TraceReader};

/// Blocks of all paths that are kept, before only a sample of them is.
const MAX_BLOCKS: usize = 20_000_000;

/// A trace in memory.
#[derive(Debug)]
pub(super) struct PlanInput {
    pub(super) miniature: Miniature,
    pub(super) requests: u64,
    pub(super) prompt_tokens: u64,
    /// From the first request to the last one, in seconds.
    pub(super) seconds: f64,
    pub(super) out_of_order: u64,
}

/// Reads the trace, or as much of each path as `sample` says. Where nothing is said, that is all of
/// it, unless the trace is a file too large for that.
pub(super) fn read(trace: &Path, sample: Option<Sample>) -> Result<PlanInput, TraceError> {
    let is_file =
        File::open(trace).and_then(|file| file.metadata()).is_ok_and(|metadata| metadata.is_file());
    let most = if sample.is_none() && is_file { MAX_BLOCKS } else { usize::MAX };
    read_at_most(trace, sample.unwrap_or(Sample::ALL), most)
}

fn read_at_most(trace: &Path, first: Sample, max_blocks: usize) -> Result<PlanInput, TraceError> {
    let mut sample = first;
    loop {
        if let Some(input) = read_sample(trace, sample, max_blocks)? {
            return Ok(input);
        }
        sample = Sample::one_in(4 * sample.stride());
    }
}

/// `None` where the sample has more blocks than the limit.
fn read_sample(
    trace: &Path,
    sample: Sample,
    max_blocks: usize,
) -> Result<Option<PlanInput>, TraceError> {
    let mut reader = TraceReader::open(trace)?;
    let mut thinning = TraceThinning::new(sample);
    let (mut requests, mut prompt_tokens, mut times) = (0, 0, None);
    for request in reader.by_ref() {
        let request = request?;
        requests += 1;
        prompt_tokens += u64::from(request.input_length);
        let (first, _) = times.unwrap_or((request.timestamp_ms, 0));
        times = Some((first, request.timestamp_ms));
        thinning.push(&request);
        if thinning.blocks() > max_blocks {
            return Ok(None);
        }
    }
    let (first, last) = times.unwrap_or_default();
    Ok(Some(PlanInput {
        miniature: thinning.finish(),
        requests,
        prompt_tokens,
        seconds: (last - first) as f64 / 1e3,
        out_of_order: reader.out_of_order(),
    }))
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    #[test]
    fn what_is_too_large_is_read_again_as_a_sample() {
        let text = (0_u64..200).fold(String::new(), |mut text, request| {
            let ids: Vec<_> = (0..20_u64).map(|block| (request << 8 | block).to_string()).collect();
            let _ = writeln!(
                text,
                r#"{{"timestamp":{request},"input_length":10240,"output_length":1,"hash_ids":[{}]}}"#,
                ids.join(",")
            );
            text
        });
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.jsonl");
        std::fs::write(&path, text).unwrap();
        let input = |most| read_at_most(&path, Sample::ALL, most).unwrap();
        assert_eq!(input(4_000).miniature.sample(), Sample::ALL);
        let small = input(1_500);
        assert_eq!(small.miniature.sample(), Sample::one_in(4));
        assert_eq!((small.requests, small.prompt_tokens), (200, 200 * 10_240));
        assert!((small.seconds - 0.199).abs() < 1e-9);
    }
}
