//! Slices that a rank reads by NIXL out of another's memory, which says their checksums and takes no
//! further part. Those that are as they are here come straight into slots; of all others what is
//! wanted is taken out of scratch.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::future::join_all;
use kvbm_tiers::ranks::PulledSlot;
use kvbm_tiers::{CopyError, SlotRead, SlotReads};
use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use super::coming::{ComingSlots, SliceSums, another_life, compare, sums_of};
use super::reader::in_time;
use crate::peers::link::{PeerFault, PeerLink};
use crate::peers::nixl::scratch::{ScratchBlocks, ScratchReads};
use crate::peers::nixl::{GRACE, HolderReads, READ_BYTES, READS};
use crate::peers::protocol::{BrokenLink, MAX_SLICES, SlotLife};

/// A slot, the checksum of what is to come, and of what came.
struct SummedSlot {
    slot: PulledSlot,
    expected: [u8; 4],
    came: Option<u32>,
}

/// Slots whose frames are back, and whether they were read.
type SlotsBack = (Vec<SummedSlot>, Result<(), CopyError>);

/// Reads slices into slots. If NIXL fails those that have not come are left.
pub(super) async fn take(
    link: &mut PeerLink,
    slots: &mut ComingSlots,
    until: Instant,
) -> Result<(), PeerFault> {
    let reads = Arc::clone(link.reads().ok_or_else(PeerFault::nixl_is_gone)?);
    let mut posts = VecDeque::new();
    let taken = take_parts(link, &**reads, slots, until, &mut posts).await;
    // Those that come back now have not come. They have some more time, since the end of the agent
    // ends others' reads too.
    if !posts.is_empty() && timeout(GRACE, join_all(posts)).await.is_err() {
        // NIXL cancels nothing: the slots come back when the agent is gone.
        reads.end("it did not answer in time");
    }
    taken
}

/// Slices of one rank that come whole, and how far it got.
pub(super) struct NixlSlices<'a> {
    reading: ScratchReads<'a>,
    /// The checksums of those that are left, if they are there.
    sums: VecDeque<Option<[u8; 4]>>,
    part: Option<ScratchBlocks>,
    /// As many of that part are taken.
    taken: usize,
    /// Of a pull that reads at several ranks, until all reads here have begun.
    turn: Option<Arc<OwnedMutexGuard<()>>>,
}

impl<'a> NixlSlices<'a> {
    pub(super) fn new(
        reads: &'a HolderReads,
        lives: &[SlotLife],
        sums: SliceSums,
        turn: Option<Arc<OwnedMutexGuard<()>>>,
    ) -> Result<Self, PeerFault> {
        let there = lives.iter().zip(&sums).filter(|(_, sum)| sum.is_some());
        let reading = ScratchReads::new(reads, there.map(|(life, _)| life.get().slot).collect())?;
        Ok(Self { reading, sums: sums.into(), part: None, taken: 0, turn })
    }

    /// Begins to read.
    pub(super) async fn begin(&mut self) {
        self.reading.ask().await;
        self.turn.take_if(|_| self.reading.has_asked());
    }

    pub(super) async fn next(
        &mut self,
        until: Instant,
    ) -> Result<Result<&mut [u8], CopyError>, PeerFault> {
        let Some(sum) = self.sums.pop_front().flatten() else { return Ok(Err(another_life())) };
        if self.part.as_ref().is_none_or(|part| part.len() == self.taken) {
            // Its frames are free for what is read ahead.
            self.part = None;
            self.part = self.reading.next(until).await?;
            self.taken = 0;
            self.turn.take_if(|_| self.reading.has_asked());
        }
        let (part, at) = (self.part.as_mut(), self.taken);
        self.taken += 1;
        let (slice, came) =
            part.and_then(|part| part.block(at)).ok_or_else(PeerFault::nixl_is_gone)?;
        Ok(compare(came, sum).map(|()| slice))
    }

    /// Stops reading. Waits for reads under way as [`ScratchReads::end`] does.
    pub(super) async fn end(self, until: Instant) {
        drop(self.part);
        self.reading.end(until).await;
    }
}

/// Reads under way, in the order in which they began.
type Posts = VecDeque<oneshot::Receiver<SlotsBack>>;

async fn take_parts(
    link: &mut PeerLink,
    reads: &dyn SlotReads,
    slots: &mut ComingSlots,
    until: Instant,
    posts: &mut Posts,
) -> Result<(), PeerFault> {
    let Some(first) = slots.left.front_mut() else { return Ok(()) };
    let at_once = (READ_BYTES / first.bytes().len().max(1)).clamp(1, MAX_SLICES);
    let mut failed = None;
    loop {
        while failed.is_none() && posts.len() < READS && !slots.left.is_empty() {
            let part = in_time(until, summed(link, slots, at_once)).await?;
            posts.push_back(post(reads, part));
        }
        let Some(back) = posts.front_mut() else { break };
        let back: Result<SlotsBack, _> =
            timeout_at(until, back).await.map_err(|_| BrokenLink::Late)?;
        posts.pop_front();
        match back {
            Ok((came, Ok(()))) => came.into_iter().for_each(|slot| slots.take(slot)),
            Ok((left, Err(why))) => {
                slots.left.extend(left.into_iter().map(|summed| summed.slot));
                failed = Some(why.to_string());
            }
            Err(_) => failed = Some("its slots do not come back".to_owned()),
        }
    }
    failed.map_or(Ok(()), |why| Err(PeerFault::Nixl(why)))
}

/// The next slots, with the checksums of what they are to get.
async fn summed(
    link: &mut PeerLink,
    slots: &mut ComingSlots,
    at_once: usize,
) -> Result<Vec<SummedSlot>, BrokenLink> {
    let count = at_once.min(slots.left.len());
    let lives: Vec<_> =
        slots.left.range(..count).map(|slot| SlotLife::of(slot.op().from)).collect();
    let sums = sums_of(link, &lives).await?;
    let mut part = Vec::with_capacity(count);
    for (slot, sum) in slots.left.drain(..count).zip(sums) {
        match sum {
            Some(expected) => part.push(SummedSlot { slot, expected, came: None }),
            None => slot.end(Err(another_life())),
        }
    }
    Ok(part)
}

impl ComingSlots {
    /// A slot was read.
    fn take(&mut self, SummedSlot { slot, expected, came }: SummedSlot) {
        match compare(came, expected) {
            Ok(()) => self.came.push_back(slot),
            Err(why) => slot.end(Err(why)),
        }
    }
}

/// A slot whose frame does not come back has no end: something may write it.
fn post(reads: &dyn SlotReads, mut part: Vec<SummedSlot>) -> oneshot::Receiver<SlotsBack> {
    let from = part.iter().map(|summed| summed.slot.op().from.slot).collect();
    let to = part.iter_mut().filter_map(|summed| summed.slot.lend()).collect();
    let (told, back) = oneshot::channel();
    let done = move |frames: Vec<_>, result: Result<(), CopyError>| {
        for (summed, frame) in part.iter_mut().zip(frames) {
            summed.slot.give_back(frame);
            // Summed here: it is in the caches.
            summed.came = result.is_ok().then(|| summed.slot.written()).flatten();
        }
        let _ = told.send((part, result));
    };
    reads.read(SlotRead { from, to, bytes: None }, Box::new(done));
    back
}

#[cfg(test)]
mod tests;
