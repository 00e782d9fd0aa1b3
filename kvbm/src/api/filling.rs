//! Slots of the host tier that a caller fills: an engine that copies for itself, or a peer.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use kvbm_tiers::checksum::RunningChecksum;
use kvbm_tiers::{CopyError, DramRegion, Frame, Memory, ReadDone, Tier};
use tokio::sync::oneshot;

use crate::api::lease::Lease;
use crate::api::transfer::{Transfer, Transferred};
use crate::error::{Error, Result};
use crate::names::hash::Chain;
use crate::scheduler::Core;
use crate::table::{NamespaceId, RequestInfo, Reserved};

/// Slots for the blocks of a chain that the host tier lacks, root first. On every path the filled
/// ones are published and the others given back.
pub(crate) struct FillingSlots<'a> {
    core: &'a Arc<Core>,
    /// `None`: the bytes lie in ranks, which fill the slots, or the caller has filled them.
    memory: Option<&'a Arc<DramRegion>>,
    /// `None` once it is published.
    slots: Option<(Reserved, Lease)>,
    filled: usize,
    /// Parts that something else writes now.
    lent: VecDeque<LentSlots>,
}

/// Slots that something else writes, until it gives back their frames.
struct LentSlots {
    /// Which of the reserved slots.
    slots: Range<usize>,
    back: oneshot::Receiver<(Vec<Frame>, BlockSums)>,
}

/// The checksums of the blocks that were written, or why they were not.
pub(crate) type BlockSums = Result<Vec<Option<u32>>, CopyError>;

/// Takes back frames that nothing writes any more.
pub(crate) type FramesBack = Box<dyn FnOnce(Vec<Frame>, BlockSums) + Send>;

impl<'a> FillingSlots<'a> {
    /// Takes the slots. They must not be written before [`Core::after_removals`] says so.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::ErrorKind::Stale): a reset came in between.
    pub(crate) fn take(
        core: &'a Arc<Core>,
        memory: impl Into<Option<&'a Arc<DramRegion>>>,
        chain: Chain<'_>,
        info: RequestInfo,
    ) -> Result<Self> {
        let lease = core.lease(chain, RequestInfo { has_asked: true, ..info });
        let reserved = core.reserve(Tier::Host, chain, lease.pins().context().info);
        if reserved.namespace() != lease.pins().namespace() {
            core.abandon(reserved);
            return Err(Error::stale());
        }
        let memory = memory.into();
        Ok(Self { core, memory, slots: Some((reserved, lease)), filled: 0, lent: VecDeque::new() })
    }

    /// Goes on with slots that were [taken out](Self::into_slots) and that the caller has written.
    pub(crate) const fn go_on(core: &'a Arc<Core>, reserved: Reserved, lease: Lease) -> Self {
        let slots = Some((reserved, lease));
        Self { core, memory: None, slots, filled: 0, lent: VecDeque::new() }
    }

    /// The slots, none of which is filled, for a caller that keeps them longer than it borrows the
    /// core. It [goes on](Self::go_on) with them, or they stay out.
    pub(crate) fn into_slots(mut self) -> Option<(Reserved, Lease)> {
        self.slots.take()
    }

    /// What the blocks will be blocks of.
    pub(crate) fn namespace(&self) -> Option<NamespaceId> {
        self.slots.as_ref().map(|(reserved, _)| reserved.namespace())
    }

    /// Leading blocks of the chain that the tier has or awaits, and those that are filled.
    pub(crate) fn kept(&self) -> usize {
        self.slots.as_ref().map_or(0, |(reserved, _)| reserved.before) + self.filled
    }

    /// Slots that are not filled yet.
    pub(crate) fn left(&self) -> usize {
        self.slots.as_ref().map_or(0, |(reserved, _)| reserved.frames.len() - self.filled)
    }

    /// The next slot: it has any content before, and all of it must be written. `None`: there is no
    /// more.
    pub(crate) fn next(&mut self) -> Option<&mut [u8]> {
        let (reserved, _) = self.slots.as_mut()?;
        self.memory?.write(reserved.frames.get_mut(self.filled)?)
    }

    /// Has `copy` write the [next](Self::next) slot.
    pub(crate) fn copy<T>(
        &mut self,
        copy: impl FnOnce(&DramRegion, &mut Frame) -> Option<T>,
    ) -> Option<T> {
        let (reserved, _) = self.slots.as_mut()?;
        copy(self.memory?, reserved.frames.get_mut(self.filled)?)
    }

    /// Writes the [next](Self::next) slot, past the caches: the block was put together in them. `None`:
    /// there is no more, or the block has another size.
    pub(crate) fn fill(&mut self, block: &[u8]) -> Option<()> {
        self.copy(|region, frame| region.fill(frame, block)).map(drop)
    }

    /// The [next](Self::next) slot is written. Returns the checksum of its block.
    pub(crate) fn written(&self) -> Option<u32> {
        let (reserved, _) = self.slots.as_ref()?;
        self.memory?.remember_checksum(reserved.frames.get(self.filled)?)
    }

    /// Bytes of a block; 0: they lie in ranks.
    pub(crate) fn block_bytes(&self) -> usize {
        self.memory.map_or(0, |memory| memory.block_bytes())
    }

    /// Some bytes of a slot that is not filled yet, the `at`-th behind those that are. `None`: there
    /// is no such slot.
    pub(crate) fn part(&mut self, at: usize, bytes: Range<usize>) -> Option<&mut [u8]> {
        let (reserved, _) = self.slots.as_mut()?;
        self.memory?.write(reserved.frames.get_mut(self.filled + at)?)?.get_mut(bytes)
    }

    /// The [next](Self::next) slot is written, part by part, and holds what its name says. Its block
    /// has this checksum.
    pub(crate) fn keep_summed(&mut self, crc: u32) {
        let next = self.slots.as_ref().and_then(|(slots, _)| slots.frames.get(self.filled));
        if let (Some(memory), Some(frame)) = (self.memory, next) {
            memory.record_checksum(frame, crc);
            self.filled += 1;
        }
    }

    /// All slots hold what their names say, and their memory knows their checksums.
    pub(crate) fn keep_all(&mut self) {
        self.filled += self.left();
    }

    /// Takes out the frames of all slots, none of which is filled, until they are
    /// [returned](Self::return_frames).
    pub(crate) fn take_frames(&mut self) -> Vec<Frame> {
        self.slots.as_mut().map(|(slots, _)| std::mem::take(&mut slots.frames)).unwrap_or_default()
    }

    /// Puts back all that were taken out.
    pub(crate) fn return_frames(&mut self, frames: Vec<Frame>) {
        if let Some((slots, _)) = &mut self.slots {
            slots.frames = frames;
        }
    }

    /// The [next](Self::next) slot holds what its name says.
    pub(crate) const fn keep(&mut self) {
        self.filled += 1;
    }

    /// Takes out the frames of the next `count` slots, for something that writes them by itself,
    /// and what to call with them once it does so no more. They come back in this order. The blocks
    /// are summed where that is called: they are in the caches there.
    pub(crate) fn lend(&mut self, count: usize) -> (Vec<Frame>, ReadDone) {
        let memory = self.memory.cloned();
        let (frames, back) = self.lend_unsummed(count);
        let done: ReadDone = Box::new(move |frames, result| {
            let sum = |frame| memory.as_ref()?.remember_checksum(frame);
            let result = result.map(|()| frames.iter().map(sum).collect());
            back(frames, result);
        });
        (frames, done)
    }

    /// [`lend`](Self::lend) for some bytes of slots, which are not filled afterwards either. The
    /// slots begin `at` behind the filled ones, and lie behind all that are lent. `sums`, one per
    /// slot, are the checksums of the bytes before; the checksums that come back continue them.
    pub(crate) fn lend_parts(
        &mut self,
        at: usize,
        bytes: Range<usize>,
        sums: Vec<u32>,
    ) -> (Vec<Frame>, ReadDone) {
        let memory = self.memory.cloned();
        let (frames, back) = self.lend_from(self.filled + at, sums.len());
        let done: ReadDone = Box::new(move |frames, result| {
            let sum = |(frame, sum)| {
                let mut running = RunningChecksum::after(sum);
                running.add(memory.as_ref()?.read(frame)?.get(bytes.clone())?);
                Some(running.value())
            };
            let result = result.map(|()| frames.iter().zip(sums).map(sum).collect());
            back(frames, result);
        });
        (frames, done)
    }

    /// [`lend`](Self::lend), to what says itself which blocks were written.
    pub(crate) fn lend_unsummed(&mut self, count: usize) -> (Vec<Frame>, FramesBack) {
        let first = self.lent.back().map_or(self.filled, |lent| lent.slots.end);
        self.lend_from(first, count)
    }

    fn lend_from(&mut self, first: usize, count: usize) -> (Vec<Frame>, FramesBack) {
        let Some((reserved, _)) = self.slots.as_mut() else {
            return (Vec::new(), Box::new(|_, _| {}));
        };
        let out: usize = self.lent.iter().map(|lent| lent.slots.len()).sum();
        let at = first - out;
        let frames: Vec<_> =
            reserved.frames.drain(at..reserved.frames.len().min(at + count)).collect();
        let (told, back) = oneshot::channel();
        self.lent.push_back(LentSlots { slots: first..first + frames.len(), back });
        let (core, transfer) = (Arc::clone(self.core), reserved.transfer);
        let done: FramesBack = Box::new(move |frames, result| {
            if let Err((frames, _)) = told.send((frames, result)) {
                core.regain(transfer, first, frames);
            }
        });
        (frames, done)
    }

    /// Waits for the frames that were lent first, and returns the checksums of their blocks, if they
    /// are written. `None`: they will not come back, or none are lent.
    pub(crate) async fn regain(&mut self) -> Option<BlockSums> {
        let lent = &mut self.lent.front_mut()?.back;
        if lent.is_terminated() {
            // It was told before that these do not come back.
            return None;
        }
        let (frames, result) = lent.await.ok()?;
        let first = self.lent.pop_front()?.slots.start;
        let (reserved, _) = self.slots.as_mut()?;
        reserved.frames.splice(first..first, frames);
        Some(result)
    }

    /// Parts that something else may write.
    pub(crate) fn lent(&self) -> usize {
        self.lent.len()
    }

    /// Waits for all frames that are lent and can come back.
    pub(crate) async fn regain_all(&mut self) {
        while self.regain().await.is_some() {}
    }

    /// Makes the filled blocks resident, and gives back the other slots. Those that are lent are
    /// lost until they come back.
    pub(crate) fn publish(&mut self) -> Option<Transfer<Transferred>> {
        let (mut reserved, lease) = self.slots.take()?;
        let (mut left, mut first) = (reserved.frames.split_off(self.filled), self.filled);
        for LentSlots { slots, mut back } in self.lent.drain(..) {
            let between = left.drain(..(slots.start - first).min(left.len())).collect();
            self.core.regain(reserved.transfer, first, between);
            first = slots.end;
            self.core.lose(reserved.transfer, slots.clone());
            // From here on they go to the core, or are here already.
            back.close();
            if let Ok((frames, _)) = back.try_recv() {
                self.core.regain(reserved.transfer, slots.start, frames);
            }
        }
        self.core.regain(reserved.transfer, first, left);
        Some(self.core.publish(reserved, self.filled, lease))
    }
}

impl Drop for FillingSlots<'_> {
    fn drop(&mut self) {
        // The caller's own error is the one to report.
        drop(self.publish());
    }
}
