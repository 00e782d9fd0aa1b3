//! Slices that a rank reads by NIXL out of another's memory, which says their checksums and takes no
//! further part.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::future::join_all;
use kvbm_tiers::{CopyError, SlotRead, SlotReads};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::{ComingSlots, SliceSlot, another_life, expect};
use crate::peers::link::{PeerFault, PeerLink};
use crate::peers::nixl::{GRACE, READ_BYTES, READS};
use crate::peers::protocol::{BrokenLink, MAX_SLICES, SlotLife, ToHolder, ToReader};

/// A slot, the checksum of what is to come, and of what came.
struct PostedSlot<S> {
    slot: S,
    expected: [u8; 4],
    came: Option<u32>,
}

/// Slots whose frames are back, and whether they were read.
type SlotsBack<S> = (Vec<PostedSlot<S>>, Result<(), CopyError>);

/// Reads slices into slots. If NIXL fails those that have not come are left.
pub(super) async fn take<S: SliceSlot>(
    link: &mut PeerLink,
    slots: &mut ComingSlots<S>,
) -> Result<(), PeerFault> {
    let Some(first) = slots.left.front_mut() else { return Ok(()) };
    let at_once = (READ_BYTES / first.bytes().len().max(1)).clamp(1, MAX_SLICES);
    let reads = Arc::clone(link.reads().ok_or_else(PeerFault::nixl_is_gone)?);
    let mut posts = Posts { reads, back: VecDeque::new() };
    let mut failed = None;
    loop {
        while failed.is_none() && posts.back.len() < READS && !slots.left.is_empty() {
            let part = named(link, slots, at_once).await?;
            posts.post(part);
        }
        let Some(back) = posts.back.front_mut() else { break };
        let back: Option<SlotsBack<S>> = back.await.ok();
        posts.back.pop_front();
        match back {
            Some((came, Ok(()))) => came.into_iter().for_each(|posted| slots.take(posted)),
            Some((left, Err(why))) => {
                slots.left.extend(left.into_iter().map(|posted| posted.slot));
                failed = Some(why.to_string());
            }
            None => failed = Some("its slots do not come back".to_owned()),
        }
    }
    failed.map_or(Ok(()), |why| Err(PeerFault::Nixl(why)))
}

/// The next slots, with the checksums of what they are to get.
async fn named<S: SliceSlot>(
    link: &mut PeerLink,
    slots: &mut ComingSlots<S>,
    at_once: usize,
) -> Result<Vec<PostedSlot<S>>, BrokenLink> {
    let count = at_once.min(slots.left.len());
    let lives = slots.left.range(..count).map(|slot| SlotLife::of(slot.op().from)).collect();
    let sums = match link.exchange(&ToHolder::SliceSums(lives)).await? {
        ToReader::SliceSums(sums) if sums.len() == count => sums,
        _ => return Err(BrokenLink::Unexpected("no answer to a request for checksums")),
    };
    let mut part = Vec::with_capacity(count);
    for (slot, sum) in slots.left.drain(..count).zip(sums) {
        match sum {
            Some(expected) => part.push(PostedSlot { slot, expected, came: None }),
            None => slot.end(Err(another_life())),
        }
    }
    Ok(part)
}

impl<S: SliceSlot> ComingSlots<S> {
    /// A slot was read.
    fn take(&mut self, PostedSlot { slot, expected, came }: PostedSlot<S>) {
        match expect(came, expected) {
            Ok(()) => self.came.push_back(slot),
            Err(why) => slot.end(Err(why)),
        }
    }
}

/// Reads under way. Given up, they have some more time: their agent's end ends others' reads too.
/// Slots that come back then have not come.
struct Posts<S: SliceSlot> {
    reads: Arc<dyn SlotReads>,
    back: VecDeque<oneshot::Receiver<SlotsBack<S>>>,
}

impl<S: SliceSlot> Posts<S> {
    /// A slot whose frame does not come back has no end: something may write it.
    fn post(&mut self, mut part: Vec<PostedSlot<S>>) {
        let from = part.iter().map(|posted| posted.slot.op().from.slot).collect();
        let to = part.iter_mut().filter_map(|posted| posted.slot.lend()).collect();
        let (told, back) = oneshot::channel();
        self.back.push_back(back);
        let done = move |frames: Vec<_>, result: Result<(), CopyError>| {
            for (posted, frame) in part.iter_mut().zip(frames) {
                posted.slot.give_back(frame);
                // Summed here: it is in the caches.
                posted.came = result.is_ok().then(|| posted.slot.written()).flatten();
            }
            let _ = told.send((part, result));
        };
        self.reads.read(SlotRead { from, to, bytes: None }, Box::new(done));
    }
}

impl<S: SliceSlot> Drop for Posts<S> {
    fn drop(&mut self) {
        if self.back.is_empty() {
            return;
        }
        let (reads, back) = (Arc::clone(&self.reads), join_all(self.back.drain(..)));
        let ended = async move {
            if timeout(GRACE, back).await.is_err() {
                // NIXL cancels nothing: the slots come back when the agent is gone.
                reads.end("it did not answer in time");
            }
        };
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(ended)),
            Err(_) => self.reads.end("peers are closed"),
        }
    }
}

#[cfg(test)]
mod tests;
