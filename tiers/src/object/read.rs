//! Store → memory: blocks that lie side by side in a segment are fetched with one request.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{GetOptions, GetResult, GetResultPayload};
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use super::block::{PendingBlock, finish_all};
use super::budget::Expense;
use super::error::file_kind;
use super::locations::BlockPlace;
use super::names::SegmentId;
use super::shared::{SegmentPin, StoreContext};
use crate::copy::{CopyError, CopyErrorKind};

/// Bytes between two blocks that are fetched and thrown away rather than asked for separately: they
/// take less time than another request (at 1 Gbit/s half a millisecond, and a request takes
/// several).
const MAX_GAP: u64 = 64 << 10;
/// Bytes of one request, at least one block: long runs are split so that several connections share
/// them.
const MAX_RUN: u64 = 8 << 20;

/// Blocks of one segment that are fetched together, in the order of their places.
pub(super) struct ReadRun {
    segment: SegmentId,
    blocks: Vec<WantedBlock>,
}

/// A block and where in its segment it lies.
struct WantedBlock {
    offset: u64,
    filled: usize,
    pending: PendingBlock,
    /// The segment is not deleted meanwhile, though its blocks may be compacted into another.
    _pin: SegmentPin,
}

/// Groups the blocks into few requests. Those without a place are reported here.
pub(super) fn plan(shared: &Arc<StoreContext>, blocks: Vec<PendingBlock>) -> Vec<ReadRun> {
    let mut runs: Vec<ReadRun> = Vec::new();
    for (place, pending) in find(shared, blocks) {
        let offset = u64::from(place.location.position) * shared.block_bytes as u64;
        let pin = SegmentPin::new(shared, place.location.segment);
        let wanted = WantedBlock { offset, filled: 0, pending, _pin: pin };
        match runs.last_mut() {
            Some(run) if run.takes(place.segment, &wanted) => run.blocks.push(wanted),
            _ => runs.push(ReadRun { segment: place.segment, blocks: vec![wanted] }),
        }
    }
    runs
}

fn find(shared: &StoreContext, blocks: Vec<PendingBlock>) -> Vec<(BlockPlace, PendingBlock)> {
    let mut locations = shared.locations.lock();
    let places: Vec<_> = blocks.iter().map(|block| locations.read(block.object)).collect();
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
    // Blocks come in the order of the chain, and neighbours in a segment are what one request can
    // fetch.
    found.sort_unstable_by_key(|(place, _)| *place);
    found
}

impl ReadRun {
    fn takes(&self, segment: SegmentId, next: &WantedBlock) -> bool {
        let range = self.range();
        // A block that is wanted twice starts before the end of the first.
        let gap = next.offset.checked_sub(range.end);
        self.segment == segment
            && gap.is_some_and(|gap| gap <= MAX_GAP)
            && next.end() - range.start <= MAX_RUN
    }

    fn range(&self) -> Range<u64> {
        let start = self.blocks.first().map_or(0, |first| first.offset);
        start..self.blocks.last().map_or(start, WantedBlock::end)
    }
}

impl WantedBlock {
    fn end(&self) -> u64 {
        self.offset + self.pending.bytes() as u64
    }

    /// Copies what `chunk`, which starts at `at`, holds of the block. Returns whether the block is
    /// complete.
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
pub(super) async fn fetch(shared: Arc<StoreContext>, run: ReadRun, deadline: Instant) {
    let (range, path) = (run.range(), shared.path(run.segment));
    let context = format!("cannot read {path} from {}", shared.store);
    let blocks = run.blocks.into();
    let request = match shared.afford(&[Expense::Gets, Expense::Bytes]) {
        Ok(()) => shared.request(deadline).await,
        Err(error) => Err(error),
    };
    let (rest, result) = match request {
        Ok(request) => {
            RangeFetch { shared: &shared, path, range, deadline, context }
                .copy(blocks, request)
                .await
        }
        Err(error) => (blocks, Err(error)),
    };
    finish_all(rest.into_iter().map(|wanted| wanted.pending), &result);
}

/// A request for a range of a segment.
struct RangeFetch<'a> {
    shared: &'a StoreContext,
    path: Path,
    range: Range<u64>,
    deadline: Instant,
    context: String,
}

/// The blocks that were not reported, and why.
type UnreportedBlocks = (VecDeque<WantedBlock>, Result<(), CopyError>);

impl RangeFetch<'_> {
    async fn copy(
        &self,
        blocks: VecDeque<WantedBlock>,
        request: OwnedSemaphorePermit,
    ) -> UnreportedBlocks {
        let options =
            GetOptions { range: Some(self.range.clone().into()), ..GetOptions::default() };
        match timeout_at(self.deadline, self.shared.store.client.get_opts(&self.path, options))
            .await
        {
            Ok(Ok(GetResult { payload: GetResultPayload::File(file, _), .. })) => {
                self.copy_file(file, blocks, request).await
            }
            Ok(Ok(GetResult {
                payload: GetResultPayload::Stream(stream), range: sent, ..
            })) => self.copy_body(stream, sent, blocks).await,
            Ok(Err(error)) => (blocks, Err(self.failed(&error).await)),
            Err(_) => (blocks, Err(self.shared.too_late(&self.context))),
        }
    }

    /// A store in files lends us the file: read into the slots, without a buffer between. Nothing
    /// can stop a read that hangs in the kernel: its block is reported, and its request over, when
    /// it ends.
    async fn copy_file(
        &self,
        file: File,
        blocks: VecDeque<WantedBlock>,
        request: OwnedSemaphorePermit,
    ) -> UnreportedBlocks {
        let rest = Arc::new(Mutex::new(blocks));
        let (waiting, context) = (Arc::clone(&rest), self.context.clone());
        let copy = move || {
            // The lock is not held while a block is read: a task that gives up at the deadline
            // takes what is still waiting.
            let next = || waiting.lock().pop_front();
            while let Some(mut wanted) = next() {
                let read = file.read_exact_at(wanted.pending.destination(), wanted.offset);
                wanted.pending.finish(read.map_err(|error| file_error(&context, error)));
            }
            drop(request);
        };
        // A panic in there drops, and so reports, the block that it was at.
        let ended = timeout_at(self.deadline, tokio::task::spawn_blocking(copy)).await;
        let result = ended.map(|_| ()).map_err(|_| self.shared.too_late(&self.context));
        (std::mem::take(&mut *rest.lock()), result)
    }

    async fn copy_body(
        &self,
        mut stream: BodyStream,
        sent: Range<u64>,
        mut blocks: VecDeque<WantedBlock>,
    ) -> UnreportedBlocks {
        let mut at = sent.start;
        if at != self.range.start {
            return (
                blocks,
                Err(self.error(CopyErrorKind::Unavailable, "the store sent another range")),
            );
        }
        while !blocks.is_empty() {
            match timeout_at(self.deadline, stream.next()).await {
                Ok(Some(Ok(chunk))) => {
                    deliver(&mut blocks, at, &chunk);
                    at += chunk.len() as u64;
                }
                Ok(Some(Err(error))) => {
                    return (
                        blocks,
                        Err(self.shared.store.copy_error(self.context.clone(), &error)),
                    );
                }
                Ok(None) if at < sent.end => {
                    return (
                        blocks,
                        Err(self.error(CopyErrorKind::Unavailable, "the answer was cut off")),
                    );
                }
                Ok(None) => {
                    return (blocks, Err(self.error(CopyErrorKind::Io, "the object is too short")));
                }
                Err(_) => return (blocks, Err(self.shared.too_late(&self.context))),
            }
        }
        (blocks, Ok(()))
    }

    async fn failed(&self, error: &object_store::Error) -> CopyError {
        let context = self.context.clone();
        self.shared
            .store
            .read_error(&self.path, self.range.end, context, error, self.deadline)
            .await
    }

    fn error(&self, kind: CopyErrorKind, why: &str) -> CopyError {
        CopyError::new(kind, format!("{}: {why}", self.context))
    }
}

/// The body of an answer.
type BodyStream = BoxStream<'static, object_store::Result<Bytes>>;

fn file_error(context: &str, error: io::Error) -> CopyError {
    CopyError::caused(file_kind(&error), context, error)
}

/// Copies a chunk to the blocks that it belongs to and reports those that it completes.
fn deliver(blocks: &mut VecDeque<WantedBlock>, at: u64, chunk: &[u8]) {
    let complete = std::iter::from_fn(|| blocks.pop_front_if(|wanted| wanted.take(at, chunk)));
    let complete: Vec<_> = complete.map(|wanted| wanted.pending).collect();
    finish_all(complete, &Ok(()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_became_unreadable_is_no_outage() {
        // Nothing is mapped at address 0: the kernel answers EIO, as for a bad sector.
        let memory = File::open("/proc/self/mem").unwrap();
        let error = memory.read_exact_at(&mut [0], 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert_eq!(file_error("reading", error).kind(), CopyErrorKind::Io);
    }
}
