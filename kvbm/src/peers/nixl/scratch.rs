//! Memory into which NIXL reads what is not as it is here: each block is verified there, and then made
//! ours.
//!
//! NIXL cancels nothing, so scratch is used again only when nothing writes it any more. A holder's is
//! its own, of slots like those there: an agent of NIXL is one holder's, and the end of that agent is
//! what ends its reads. Both go together, or neither does.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::future::join_all;
use kvbm_tiers::{CopyError, DramRegion, Frame, SetupError, SlotId, SlotRead, TierPlace};
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

use super::{GRACE, HolderReads, READ_BYTES, READS, descriptors};
use crate::api::filling::BlockSums;
use crate::peers::link::PeerFault;
use crate::peers::protocol::LeaseEnd;
use crate::sync::Mutex;

/// The largest slot that scratch is made for, and how far behind a block the next slot may begin.
const MAX_SLOT: u64 = 256 << 20;
const MAX_ROOM: u64 = 16 << 10;

/// As much as one pull reads at once. Several at one holder share it.
#[derive(Debug)]
pub(in crate::peers) struct Scratch {
    memory: Arc<DramRegion>,
    /// What a post moves, in slots.
    at_once: usize,
    free: Mutex<Vec<Frame>>,
    /// A permit for each frame that is free. Pulls get theirs in the order in which they ask.
    permits: Arc<Semaphore>,
    /// A pull that needs scratch of several holders holds this until it has all of it. Without it,
    /// two pulls could each hold what the other waits for.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Scratch {
    /// For what lies in slots at this place.
    pub(super) fn of(place: TierPlace, block_bytes: u64) -> Result<Arc<Self>, SetupError> {
        // What another worker says costs no more than that.
        if place.stride > MAX_SLOT.min(block_bytes.saturating_add(MAX_ROOM)) {
            let message = format!("slots {} bytes apart, of {block_bytes} each", place.stride);
            return Err(SetupError::unavailable(message));
        }
        let stride = usize::try_from(place.stride).unwrap_or(usize::MAX);
        let at_once = (READ_BYTES / stride.max(1)).max(1);
        let block_bytes = usize::try_from(block_bytes).unwrap_or(usize::MAX);
        let memory = place.scratch((READS * at_once) as u32, block_bytes)?;
        let pool = memory.frames();
        let free: Vec<_> =
            pool.into_iter().flat_map(|mut pool| std::iter::from_fn(move || pool.take())).collect();
        let permits = Arc::new(Semaphore::new(free.len()));
        let (memory, free, turn) = (Arc::new(memory), Mutex::new(free), Arc::default());
        Ok(Arc::new(Self { memory, at_once, free, permits, turn }))
    }

    pub(super) const fn memory(&self) -> &Arc<DramRegion> {
        &self.memory
    }

    /// Waits for the turn of a pull that needs scratch of several holders. Such a pull takes its
    /// turn at the first holder only.
    pub(in crate::peers) async fn turn(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.turn).lock_owned().await
    }

    /// Takes some frames. `None`: there are not as many now, unless they are waited for.
    async fn take(self: &Arc<Self>, count: usize, waits: bool) -> Option<ScratchFrames> {
        let (permits, count) = (Arc::clone(&self.permits), count as u32);
        let permit = if waits {
            permits.acquire_many_owned(count).await.ok()?
        } else {
            permits.try_acquire_many_owned(count).ok()?
        };
        let mut free = self.free.lock();
        let first = free.len() - permit.num_permits();
        let frames = free.split_off(first);
        Some(ScratchFrames { scratch: Arc::clone(self), frames, permit })
    }
}

/// Frames of it that are taken, or what is left of them while something writes them.
struct ScratchFrames {
    scratch: Arc<Scratch>,
    frames: Vec<Frame>,
    permit: OwnedSemaphorePermit,
}

impl Drop for ScratchFrames {
    fn drop(&mut self) {
        // Something may write those that are missing for ever: no other pull gets them.
        let lost = self.permit.num_permits() - self.frames.len();
        self.permit.split(lost).into_iter().for_each(OwnedSemaphorePermit::forget);
        self.scratch.free.lock().append(&mut self.frames);
    }
}

/// Blocks that have come. Their frames are free again when it is dropped.
pub(in crate::peers) struct ScratchBlocks {
    frames: ScratchFrames,
    sums: Vec<Option<u32>>,
}

impl ScratchBlocks {
    pub(in crate::peers) const fn len(&self) -> usize {
        self.sums.len()
    }

    /// One of them, with its checksum.
    pub(in crate::peers) fn block(&mut self, at: usize) -> Option<(&mut [u8], Option<u32>)> {
        let ScratchFrames { scratch, frames, .. } = &mut self.frames;
        Some((scratch.memory.write(frames.get_mut(at)?)?, *self.sums.get(at)?))
    }
}

/// Frames that are back, and the checksums of what they have if they were read.
type FramesBack = (ScratchFrames, BlockSums);

/// Reads slots of a holder in their order, some ahead of those that have come.
pub(in crate::peers) struct ScratchReads<'a> {
    reads: &'a HolderReads,
    scratch: &'a Arc<Scratch>,
    left: VecDeque<SlotId>,
    /// How many there were.
    wanted: usize,
    posts: VecDeque<oneshot::Receiver<FramesBack>>,
    descriptors: usize,
}

impl<'a> ScratchReads<'a> {
    pub(in crate::peers) fn new(
        reads: &'a HolderReads,
        slots: Vec<SlotId>,
    ) -> Result<Self, PeerFault> {
        let (scratch, posts, wanted) = (reads.scratch()?, VecDeque::new(), slots.len());
        Ok(Self { reads, scratch, left: slots.into(), wanted, posts, descriptors: 0 })
    }

    /// Pieces of memory that were read.
    pub(super) const fn descriptors(&self) -> usize {
        self.descriptors
    }

    /// The next blocks. `None`: all have come.
    pub(in crate::peers) async fn next(
        &mut self,
        until: Instant,
    ) -> Result<Option<ScratchBlocks>, PeerFault> {
        let late = || Err(PeerFault::Ended(LeaseEnd::Expired));
        timeout_at(until, self.come()).await.unwrap_or_else(|_| late())
    }

    /// Whether all reads have begun.
    pub(in crate::peers) fn has_asked(&self) -> bool {
        self.left.is_empty()
    }

    /// Begins reads ahead of the next blocks, once there is scratch for one.
    pub(in crate::peers) async fn ask(&mut self) {
        while !self.left.is_empty() && self.posts.len() < READS {
            let count = self.left.len().min(self.scratch.at_once);
            // While it has some under way it need not wait for those of others.
            let frames = self.scratch.take(count, self.posts.is_empty()).await;
            let Some(frames) = frames else { break };
            let next = self.left.drain(..count).collect();
            let post = self.post(next, frames);
            self.posts.push_back(post);
        }
    }

    async fn come(&mut self) -> Result<Option<ScratchBlocks>, PeerFault> {
        self.ask().await;
        let Some(post) = self.posts.front_mut() else { return Ok(None) };
        let back = post.await;
        self.posts.pop_front();
        match back {
            Ok((frames, Ok(sums))) => Ok(Some(ScratchBlocks { frames, sums })),
            Ok((_, Err(why))) => Err(PeerFault::Nixl(why.to_string())),
            Err(_) => Err(PeerFault::Nixl("its frames do not come back".to_owned())),
        }
    }

    fn post(
        &mut self,
        from: Vec<SlotId>,
        mut taken: ScratchFrames,
    ) -> oneshot::Receiver<FramesBack> {
        let (told, back) = oneshot::channel();
        let to = std::mem::take(&mut taken.frames);
        self.descriptors += descriptors(&from, &to);
        let done = move |frames: Vec<Frame>, result: Result<(), CopyError>| {
            // Summed here: it is in the caches.
            let sum = |frame| taken.scratch.memory.remember_checksum(frame);
            let sums = result.map(|()| frames.iter().map(sum).collect());
            taken.frames = frames;
            let _ = told.send((taken, sums));
        };
        self.reads.read(SlotRead { from, to, bytes: None }, Box::new(done));
        back
    }

    /// Stops reading. Waits for reads under way until `until`, and for `GRACE` at least, then ends
    /// the agent: that ends others' reads too. If this pull never got scratch, it waits for others'
    /// reads instead: frames that never come back would keep all pulls from reading.
    pub(in crate::peers) async fn end(self, until: Instant) {
        let had_frames = self.left.len() < self.wanted;
        let is_alive = async {
            drop(join_all(self.posts).await);
            if !had_frames {
                drop(self.scratch.permits.acquire().await);
            }
        };
        if timeout_at(until.max(Instant::now() + GRACE), is_alive).await.is_err() {
            // NIXL cancels nothing: frames come back when the agent is gone.
            self.reads.end("it did not answer in time");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_cannot_ask_for_large_scratch() {
        let slots = |stride| TierPlace { base: 0, stride, slots: 9 };
        assert!(Scratch::of(slots(8 << 10), 5_000).is_ok());
        for (stride, block_bytes) in [(1 << 20, 5_000), (1 << 40, 1 << 40), (u64::MAX, 5_000)] {
            let why = Scratch::of(slots(stride), block_bytes).unwrap_err();
            assert!(why.to_string().contains(&stride.to_string()), "{why}");
        }
    }
}
