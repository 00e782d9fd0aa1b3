//! Store → memory: blocks that lie side by side in a segment are fetched with one request.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use object_store::{GetOptions, GetResult, GetResultPayload};
use tokio::time::{Instant, timeout_at};

use super::backend::Shared;
use super::block::{Pending, finish_all};
use super::locations::Place;
use super::open::OPERATION_LIMIT;
use super::segment::SegmentName;
use crate::copy::{CopyError, CopyErrorKind};

/// Bytes between two blocks that are fetched and thrown away rather than asked for separately: they take less
/// time than another request (at 1 Gbit/s half a millisecond, and a request takes several).
const MAX_GAP: u64 = 64 << 10;
/// Bytes of one request, at least one block: long runs are split so that several connections share them.
const MAX_RUN: u64 = 8 << 20;

/// Blocks of one segment that are fetched together, in the order of their places.
pub(super) struct Run {
    segment: SegmentName,
    blocks: Vec<Wanted>,
}

/// A block and where in its segment it lies.
struct Wanted {
    offset: u64,
    filled: usize,
    pending: Pending,
}

/// Groups the blocks into few requests. Those without a place are reported here.
pub(super) fn plan(shared: &Shared, blocks: Vec<Pending>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (place, pending) in find(shared, blocks) {
        let offset = u64::from(place.position) * shared.block_bytes as u64;
        let wanted = Wanted { offset, filled: 0, pending };
        match runs.last_mut() {
            Some(run) if run.takes(place.segment, &wanted) => run.blocks.push(wanted),
            _ => runs.push(Run { segment: place.segment, blocks: vec![wanted] }),
        }
    }
    runs
}

fn find(shared: &Shared, blocks: Vec<Pending>) -> Vec<(Place, Pending)> {
    let locations = shared.locations.lock();
    let places: Vec<_> = blocks.iter().map(|block| locations.find(block.object)).collect();
    drop(locations);
    let mut found = Vec::with_capacity(blocks.len());
    for (place, pending) in places.into_iter().zip(blocks) {
        if let Some(place) = place {
            found.push((place, pending));
        } else {
            let message = format!("object slot {} holds no block", pending.object.0);
            pending.finish(Err(CopyError::new(CopyErrorKind::Io, message)));
        }
    }
    found.sort_unstable_by_key(|(place, _)| *place);
    found
}

impl Run {
    fn takes(&self, segment: SegmentName, next: &Wanted) -> bool {
        let range = self.range();
        // A block that is wanted twice starts before the end of the first.
        let gap = next.offset.checked_sub(range.end);
        self.segment == segment
            && gap.is_some_and(|gap| gap <= MAX_GAP)
            && next.end() - range.start <= MAX_RUN
    }

    fn range(&self) -> Range<u64> {
        let start = self.blocks.first().map_or(0, |first| first.offset);
        start..self.blocks.last().map_or(start, Wanted::end)
    }
}

impl Wanted {
    fn end(&self) -> u64 {
        self.offset + self.pending.bytes() as u64
    }

    /// Copies what `chunk`, which starts at `at`, holds of the block. Returns whether the block is complete.
    fn take(&mut self, at: u64, chunk: &[u8]) -> bool {
        let skip = self.offset.saturating_sub(at).min(chunk.len() as u64) as usize;
        let room = &mut self.pending.destination()[self.filled..];
        let count = room.len().min(chunk.len() - skip);
        room[..count].copy_from_slice(&chunk[skip..skip + count]);
        self.filled += count;
        count == room.len()
    }
}

/// Fetches a run and reports its blocks, each as soon as it is complete.
pub(super) async fn fetch(shared: Arc<Shared>, run: Run) {
    let Ok(_request) = shared.requests.acquire().await else { return };
    let range = run.range();
    let path = shared.path(run.segment);
    let options = GetOptions { range: Some(range.clone().into()), ..GetOptions::default() };
    let context = format!("cannot read {path} from {}", shared.store);
    let deadline = Instant::now() + OPERATION_LIMIT;
    let answer = timeout_at(deadline, shared.store.client.get_opts(&path, options)).await;
    let blocks = run.blocks.into();
    let (rest, result) = match answer {
        Ok(Ok(GetResult { payload: GetResultPayload::File(file, _), .. })) => {
            copy_file(file, blocks, context).await
        }
        Ok(Ok(GetResult { payload: GetResultPayload::Stream(stream), range: sent, .. })) => {
            let mut body = Body { shared: &shared, stream, at: sent.start, deadline, context };
            body.copy(blocks, range.start).await
        }
        Ok(Err(e)) => (blocks, Err(shared.store.copy_error(context, &e))),
        Err(_) => (blocks, Err(too_late(&context))),
    };
    finish_all(rest.into_iter().map(|wanted| wanted.pending), &result);
}

/// The blocks that were not reported, and why.
type Rest = (VecDeque<Wanted>, Result<(), CopyError>);

/// A store in files lends us the file: read into the slots, without a buffer between.
async fn copy_file(file: File, mut blocks: VecDeque<Wanted>, context: String) -> Rest {
    let copy = move || {
        while let Some(mut wanted) = blocks.pop_front() {
            let read = file.read_exact_at(wanted.pending.destination(), wanted.offset);
            wanted.pending.finish(read.map_err(|e| file_error(&context, e)));
        }
    };
    // A panic in there drops, and so reports, the blocks.
    let _ = tokio::task::spawn_blocking(copy).await;
    (VecDeque::new(), Ok(()))
}

fn file_error(context: &str, error: io::Error) -> CopyError {
    CopyError::caused(CopyErrorKind::Io, context, error)
}

/// The body of an answer.
struct Body<'a> {
    shared: &'a Shared,
    stream: BoxStream<'static, object_store::Result<Bytes>>,
    /// Where in the segment the next chunk starts.
    at: u64,
    deadline: Instant,
    context: String,
}

impl Body<'_> {
    async fn copy(&mut self, mut blocks: VecDeque<Wanted>, start: u64) -> Rest {
        if self.at != start {
            return (blocks, Err(self.error("the store sent another range")));
        }
        while !blocks.is_empty() {
            let chunk = match self.next().await {
                Ok(chunk) => chunk,
                Err(e) => return (blocks, Err(e)),
            };
            deliver(&mut blocks, self.at, &chunk);
            self.at += chunk.len() as u64;
        }
        (blocks, Ok(()))
    }

    async fn next(&mut self) -> Result<Bytes, CopyError> {
        match timeout_at(self.deadline, self.stream.next()).await {
            Ok(Some(Ok(chunk))) => Ok(chunk),
            Ok(Some(Err(e))) => Err(self.shared.store.copy_error(self.context.clone(), &e)),
            Ok(None) => Err(self.error("the object is too short")),
            Err(_) => Err(too_late(&self.context)),
        }
    }

    fn error(&self, why: &str) -> CopyError {
        CopyError::new(CopyErrorKind::Io, format!("{}: {why}", self.context))
    }
}

/// Copies a chunk to the blocks that it belongs to and reports those that it completes.
fn deliver(blocks: &mut VecDeque<Wanted>, at: u64, chunk: &[u8]) {
    while let Some(wanted) = blocks.front_mut() {
        if !wanted.take(at, chunk) {
            return;
        }
        if let Some(wanted) = blocks.pop_front() {
            wanted.pending.finish(Ok(()));
        }
    }
}

fn too_late(context: &str) -> CopyError {
    let limit = OPERATION_LIMIT.as_secs();
    CopyError::new(CopyErrorKind::Unavailable, format!("{context}: no answer within {limit} s"))
}
