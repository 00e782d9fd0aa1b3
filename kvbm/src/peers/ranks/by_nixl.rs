//! Slices that a rank reads by NIXL out of another's memory, which says their checksums and takes no
//! further part. Those that are as they are here come straight into slots; of all others what is
//! wanted is taken out of scratch.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::future::join_all;
use kvbm_tiers::ranks::PulledSlot;
use kvbm_tiers::{CopyError, SlotRead, SlotReads};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};

use super::coming::{ComingSlots, SliceGoal, another_life, compare, goals_of, sums_of};
use super::whole::{WholeSlices, sums_of_all};
use super::{ReadRank, in_time};
use crate::peers::link::{PeerFault, PeerLink};
use crate::peers::nixl::scratch::ScratchReads;
use crate::peers::nixl::{GRACE, READ_BYTES, READS};
use crate::peers::protocol::{BrokenLink, MAX_SLICES, Member, SlotLife};

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

/// Reads whole slices, and puts what is wanted of them into slots. If it does not come to its end all
/// slots are left: all that they got of this rank comes again.
pub(super) async fn take_wanted(
    rank: &mut ReadRank<'_>,
    ours: &Member,
    slots: &mut ComingSlots,
    until: Instant,
) -> Result<(), PeerFault> {
    let mut whole = WholeSlices::of(rank, ours)?;
    let reads = Arc::clone(rank.link.reads().ok_or_else(PeerFault::nixl_is_gone)?);
    let (lives, goals) = goals_of(&slots.left);
    let mut made = vec![Ok(()); slots.left.len()];
    let (mut from, mut expected) = (Vec::new(), VecDeque::new());
    let sums = sums_of_all(&mut rank.link, &lives, until).await?;
    for ((life, goal), sum) in lives.iter().zip(&goals).zip(sums) {
        match sum {
            Some(sum) => {
                from.push(life.get().0);
                expected.push_back(ExpectedSlice { goal, sum });
            }
            None => goal.fail(&mut made, &another_life()),
        }
    }
    let mut reading = ScratchReads::new(&reads, &from)?;
    let before = slots.saturated;
    let into = (&mut *slots, &mut *made);
    let taken = place_slices(&mut reading, &mut whole, expected, into, until).await;
    match &taken {
        Ok(()) => slots.next_all(made),
        Err(_) => {
            slots.saturated = before;
            reading.end().await;
        }
    }
    taken
}

/// A slice that is to come.
struct ExpectedSlice<'a> {
    goal: &'a SliceGoal,
    sum: [u8; 4],
}

async fn place_slices(
    reading: &mut ScratchReads<'_>,
    whole: &mut WholeSlices,
    mut expected: VecDeque<ExpectedSlice<'_>>,
    (slots, made): (&mut ComingSlots, &mut [Result<(), CopyError>]),
    until: Instant,
) -> Result<(), PeerFault> {
    while let Some(mut part) = reading.next(until).await? {
        for (slice, came) in part.blocks() {
            let Some(ExpectedSlice { goal, sum }) = expected.pop_front() else { break };
            match compare(came, sum) {
                Ok(()) => whole.place(goal, slice, slots, made),
                Err(why) => goal.fail(made, &why),
            }
        }
        // Others have this thread too.
        yield_now().await;
    }
    Ok(())
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
