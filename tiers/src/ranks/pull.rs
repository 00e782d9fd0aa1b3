//! A rank's slots of the host tier, for ranks of other workers: what these have comes into them, and
//! what lies in them goes to these.

#![expect(unsafe_code, reason = "slots whose handles the leader has")]

use std::fmt;
use std::iter::repeat_n;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::shares::{HeadShare, ShareSource, sources};
use super::slots::SlotGenerations;
use crate::checksum::checksum;
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done, SlotId, SlotRef};
use crate::dram::DramRegion;
use crate::frame::Frame;
use crate::memory::Memory;
use crate::peers::PeerMemory;
use crate::stream;

/// Where a rank serves those of other workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PeerSeat {
    /// The port that it listens on.
    pub port: u16,
    /// Random, and another after each start.
    pub incarnation: u64,
}

/// From where all ranks are to bring blocks, each its slice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullOrder {
    /// The other worker's host.
    pub host: String,
    /// Its ranks, by their numbers.
    pub seats: Vec<PeerSeat>,
    /// What has not come after this time, in ms, does not come.
    pub limit_ms: u32,
    /// The bits in which hashes of blocks differ there.
    pub renamed: u128,
    /// The position of the first block in its chain; the others follow.
    pub first: u32,
    /// Tokens of a block there.
    pub block_tokens: u64,
}

/// A rank's part of that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullFrom {
    /// The other worker's host.
    pub host: String,
    /// Where the rank's heads are, all of them together.
    pub sources: Vec<PullSource>,
    /// What has not come within this time does not come.
    pub limit: Duration,
    /// The bits in which hashes of blocks differ there.
    pub renamed: u128,
    /// Ranks of the other worker, as its leader says.
    pub ranks: u16,
    /// Tokens of a block there, as its leader says.
    pub block_tokens: u64,
}

/// A rank of the other worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullSource {
    /// Where it serves others.
    pub seat: PeerSeat,
    /// The heads of its slices that are wanted.
    pub give: HeadShare,
    /// Which of ours they are.
    pub into: HeadShare,
}

impl PullSource {
    /// Whether all heads of a slice come, and are all of ours.
    pub fn has_all_heads(&self) -> bool {
        [self.give, self.into] == [HeadShare::WHOLE; 2]
    }
}

impl PullOrder {
    /// What a rank of `world` brings. `None`: heads are not split so that it could.
    pub(super) fn of_rank(&self, rank: u16, world: u16) -> Option<PullFrom> {
        let there = self.seats.len().try_into().ok()?;
        let source = |ShareSource { rank, give, into }| {
            Some(PullSource { seat: *self.seats.get(usize::from(rank))?, give, into })
        };
        let sources =
            sources(rank, world, there)?.into_iter().map(source).collect::<Option<_>>()?;
        Some(PullFrom {
            host: self.host.clone(),
            sources,
            limit: Duration::from_millis(self.limit_ms.into()),
            renamed: self.renamed,
            ranks: there,
            block_tokens: self.block_tokens,
        })
    }
}

/// Brings slices of blocks. It must not block.
pub type PullSlots = dyn Fn(PullFrom, Vec<PulledSlot>) + Send + Sync;

/// A slot that is to be filled from slots of another worker's ranks. Dropped before its
/// [`end`](Self::end), it is given up; but not while its frame is lent: then something may write it,
/// and its leader hears nothing of it.
pub struct PulledSlot {
    memory: Arc<DramRegion>,
    pulled: PulledBlock,
    /// In its batch, of the first of its copies.
    place: usize,
    /// `None` while it is lent.
    frame: Option<Frame>,
    /// `None` once it has ended.
    done: Option<Done>,
    saturated: SaturatedNumbers,
}

/// Numbers of a batch's pulled blocks that were too large for the type that they have here: how many
/// there were since the leader was told.
#[derive(Clone, Debug, Default)]
pub(super) struct SaturatedNumbers(Arc<AtomicU64>);

impl SaturatedNumbers {
    pub(super) fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

/// What a slot is to hold.
#[derive(Clone, Debug)]
pub struct PulledBlock {
    /// The copy into the slot; its source is the first of `from`.
    pub op: CopyOp,
    /// The other worker's slots, each in one of its lives, in the order of their tokens.
    pub from: Vec<SlotRef>,
    /// The position of the block in its chain.
    pub position: u32,
}

impl PulledBlock {
    /// Successive copies into one slot make one block.
    pub(super) fn of_copies(ops: &[CopyOp], first: u32) -> impl Iterator<Item = Self> {
        let of_slot = ops.chunk_by(|a, b| a.to == b.to);
        of_slot.enumerate().map(move |(place, copies)| Self {
            op: copies[0],
            from: copies.iter().map(|copy| copy.from).collect(),
            position: first.saturating_add(place as u32),
        })
    }
}

impl fmt::Debug for PulledSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PulledSlot").field("pulled", &self.pulled).finish_non_exhaustive()
    }
}

impl PulledSlot {
    /// `frame` is of the slot that `pulled` is to be in, which is no one else's until `done` is told of
    /// all its copies, from this place in the batch on.
    pub(super) fn new(
        memory: &Arc<DramRegion>,
        pulled: PulledBlock,
        frame: Frame,
        place: usize,
        done: Done,
        saturated: SaturatedNumbers,
    ) -> Self {
        let memory = Arc::clone(memory);
        Self { memory, pulled, place, frame: Some(frame), done: Some(done), saturated }
    }

    /// The first of the copies into the slot; [`pulled`](Self::pulled) has all sources.
    pub const fn op(&self) -> &CopyOp {
        &self.pulled.op
    }

    /// All slots that it is made of.
    pub const fn pulled(&self) -> &PulledBlock {
        &self.pulled
    }

    /// The slot, all of which is to be written. Empty while its frame is lent.
    pub fn bytes(&mut self) -> &mut [u8] {
        self.frame.as_mut().and_then(|frame| self.memory.write(frame)).unwrap_or_default()
    }

    /// The slot is written. Returns the checksum of what it has, which the region remembers.
    pub fn written(&self) -> Option<u32> {
        self.memory.remember_checksum(self.frame.as_ref()?)
    }

    /// Writes the slot, past the caches: the block was put together in them.
    ///
    /// # Errors
    /// `Refused`: the block has another size, or the slot's frame is lent.
    pub fn fill(&mut self, block: &[u8]) -> Result<(), CopyError> {
        let filled = self.frame.as_mut().and_then(|frame| self.memory.fill(frame, block));
        filled.map(drop).ok_or_else(|| {
            CopyError::refused("the block does not fit the slot, or something else writes it")
        })
    }

    /// Copies what lies in a slot of a peer's memory; returns the checksum of what arrived, which the
    /// region remembers.
    ///
    /// # Errors
    /// Those of [`PeerMemory::copy_into`]; and `Refused` while the slot's frame is lent.
    pub fn copy_from(&mut self, peer: &PeerMemory, from: SlotId) -> Result<u32, CopyError> {
        let lent = || CopyError::refused("something else writes the slot");
        peer.copy_into(from, &self.memory, self.frame.as_mut().ok_or_else(lent)?)
    }

    /// For something that writes the slot by itself, until it [gives it back](Self::give_back).
    pub const fn lend(&mut self) -> Option<Frame> {
        self.frame.take()
    }

    /// Nothing writes the slot by way of its frame any more.
    pub fn give_back(&mut self, frame: Frame) {
        debug_assert!(self.frame.is_none() && frame.slot_ref() == self.pulled.op.to, "{frame:?}");
        self.frame = Some(frame);
    }

    /// As many numbers were too large for the type that they have here. To be said before the end.
    pub fn saturated(&self, numbers: u64) {
        // Relaxed: the end follows on this thread, and takes a lock that the report takes too.
        self.saturated.0.fetch_add(numbers, Ordering::Relaxed);
    }

    /// Nothing touches the slot any more.
    pub fn end(mut self, result: Result<(), CopyError>) {
        self.report(result);
    }

    fn report(&mut self, result: Result<(), CopyError>) {
        match (self.done.take(), self.frame.take()) {
            (Some(done), Some(_)) => {
                let results = repeat_n(result, self.pulled.from.len());
                done.report((self.place..).zip(results).collect());
            }
            // Something may write it for ever: what waits for its end keeps the leader's connection.
            (done, None) => std::mem::forget(done),
            (None, Some(_)) => {}
        }
    }
}

impl Drop for PulledSlot {
    fn drop(&mut self) {
        let why = "it was given up before it came";
        self.report(Err(CopyError::new(CopyErrorKind::Unavailable, why)));
    }
}

/// What lies in a rank's slots of the host tier, for others to read.
#[derive(Clone, Debug)]
pub struct RankSlots {
    memory: Arc<DramRegion>,
    generations: Arc<SlotGenerations>,
}

impl RankSlots {
    pub(super) const fn new(memory: Arc<DramRegion>, generations: Arc<SlotGenerations>) -> Self {
        Self { memory, generations }
    }

    /// Where they lie.
    pub const fn memory(&self) -> &Arc<DramRegion> {
        &self.memory
    }

    /// The checksum of the slice that this life of a slot holds. `None` as for [`copy`](Self::copy),
    /// which `scratch` is for.
    pub fn sum(&self, held: SlotRef, scratch: &mut Vec<u8>) -> Option<u32> {
        self.generations.check(held).ok()?;
        let known = self.memory.checksums()?;
        let Some(crc) = known.get(held.slot).filter(|_| !known.is_inherited(held.slot)) else {
            return self.copy(held, scratch);
        };
        // What writes to the slot takes its life first: the checksum is of this one.
        self.generations.check(held).ok()?;
        Some(crc)
    }

    /// Copies the slice that this life of a slot holds; returns its checksum. `None`: the slot holds
    /// something else or nothing, or what it holds has changed. Then `to` has any bytes.
    pub fn copy(&self, held: SlotRef, to: &mut Vec<u8>) -> Option<u32> {
        let from = self.memory.slot(held.slot)?;
        to.clear();
        self.generations.check(held).ok()?;
        // SAFETY: a slot is whole mapped pages that start on a page boundary, and its block is no
        // longer. The region outlives this call.
        unsafe { stream::copy_block(from.as_ptr().cast(), self.memory.block_bytes(), to) };
        let known = self.memory.checksums()?;
        let is_sound = known.verify_inherited(held.slot, to).is_ok();
        let (crc, expected) = (checksum(to), known.get(held.slot));
        // What writes to the slot takes its life first: what was copied is of this one.
        self.generations.check(held).ok()?;
        if !is_sound || expected.is_some_and(|expected| expected != crc) {
            tracing::error!(
                slot = held.slot.0,
                "a block in a rank's host tier has changed: it is not given to others"
            );
            return None;
        }
        Some(crc)
    }
}

/// A slot of `memory` that is to be filled as a leader orders.
///
/// # Panics
/// If there is no such slot.
#[cfg(any(test, feature = "testing"))]
pub fn pulled_slot(memory: &Arc<DramRegion>, op: CopyOp, place: usize, done: Done) -> PulledSlot {
    pulled_slot_of(memory, PulledBlock { op, from: vec![op.from], position: 0 }, place, done)
}

/// [`pulled_slot`], for what is made of several slots, or of a part of one.
///
/// # Panics
/// If there is no such slot.
#[cfg(any(test, feature = "testing"))]
pub fn pulled_slot_of(
    memory: &Arc<DramRegion>,
    pulled: PulledBlock,
    place: usize,
    done: Done,
) -> PulledSlot {
    let frame = memory.frame_of_leader(pulled.op.to).expect("a slot of this memory");
    PulledSlot::new(memory, pulled, frame, place, done, SaturatedNumbers::default())
}

/// Slots of a rank that has what lies in `memory`, in these of their lives.
#[cfg(any(test, feature = "testing"))]
pub fn rank_slots(memory: Arc<DramRegion>, lives: impl IntoIterator<Item = SlotRef>) -> RankSlots {
    let generations = SlotGenerations::default();
    lives.into_iter().for_each(|life| generations.adopt(life));
    RankSlots::new(memory, Arc::new(generations))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;
    use crate::copy::{BlockKey, Tier};
    use crate::testing::{fill_pattern, has_pattern, options};

    const SLOTS: u32 = 4;
    /// Not whole pages.
    const BYTES: usize = 10_000;

    struct HostTier {
        memory: Arc<DramRegion>,
        slots: RankSlots,
    }

    impl HostTier {
        fn new() -> Self {
            let memory = Arc::new(DramRegion::host(options(SLOTS, BYTES)).unwrap());
            let slots = RankSlots::new(Arc::clone(&memory), Arc::default());
            Self { memory, slots }
        }

        /// What a copy does that arrives in a slot.
        fn store(&self, slot: SlotId, generation: u32, pattern: usize) {
            let to = in_life(slot, generation);
            let done = Done::new(|_| ());
            self.slots.generations.begin_pull(&op(to));
            let mut pulled = pulled_slot(&self.memory, op(to), 0, done);
            fill_pattern(pattern, pulled.bytes());
            assert!(pulled.written().is_some());
            pulled.end(Ok(()));
            self.slots.generations.adopt(to);
        }

        fn has(&self, slot: SlotId, generation: u32, pattern: usize) -> bool {
            let mut slice = Vec::new();
            let crc = self.slots.copy(in_life(slot, generation), &mut slice);
            assert!(crc.is_none_or(|crc| crc == checksum(&slice)));
            assert!(
                crc.is_none() || self.slots.sum(in_life(slot, generation), &mut Vec::new()) == crc
            );
            crc.is_some() && has_pattern(pattern, &slice)
        }
    }

    const fn in_life(slot: SlotId, generation: u32) -> SlotRef {
        SlotRef { tier: Tier::Host, slot, generation }
    }

    fn op(to: SlotRef) -> CopyOp {
        let block = BlockKey { hash: 0, group: 0 };
        CopyOp { block, parent: None, owner: None, from: to, to }
    }

    #[test]
    fn a_slot_gives_what_it_holds_in_one_life_alone() {
        let tier = HostTier::new();
        let slot = SlotId(3);
        assert!(!tier.has(slot, 7, 1), "it was never written");
        tier.store(slot, 7, 1);
        assert!(tier.has(slot, 7, 1));
        let summed = |slot, generation| tier.slots.sum(in_life(slot, generation), &mut Vec::new());
        assert!(!tier.has(slot, 8, 1) && summed(slot, 8).is_none());
        assert!(!tier.has(SlotId(SLOTS), 7, 1), "there is no such slot");
        assert!(summed(SlotId(SLOTS), 7).is_none());
        tier.slots.generations.begin_pull(&op(in_life(slot, 8)));
        assert!(!tier.has(slot, 7, 1) && summed(slot, 7).is_none(), "it is being written");
        tier.store(slot, 8, 2);
        assert!(tier.has(slot, 8, 2) && !tier.has(slot, 7, 1));
    }

    /// What is copied then is of neither life, or of the next.
    #[test]
    fn what_is_overwritten_while_it_is_copied_is_not_given() {
        const LIVES: u32 = 20_000;
        let (tier, slot, life) = (HostTier::new(), SlotId(0), AtomicU32::new(0));
        tier.store(slot, 0, 0);
        thread::scope(|scope| {
            scope.spawn(|| {
                for next in 1..=LIVES {
                    tier.store(slot, next, next as usize);
                    life.store(next, Ordering::Release);
                }
            });
            loop {
                let now = life.load(Ordering::Acquire);
                let mut slice = Vec::new();
                if tier.slots.copy(in_life(slot, now), &mut slice).is_some() {
                    assert!(has_pattern(now as usize, &slice), "what life {now} did not hold");
                }
                if now == LIVES {
                    break;
                }
            }
        });
        assert!(tier.has(slot, LIVES, LIVES as usize));
    }

    #[test]
    fn a_slice_that_has_changed_is_not_given() {
        let tier = HostTier::new();
        let slot = SlotId(0);
        tier.store(slot, 1, 1);
        let known = tier.memory.checksums().unwrap();
        let crc = known.get(slot).unwrap();
        known.record(slot, crc ^ 1);
        assert!(!tier.has(slot, 1, 1));
        known.record(slot, crc);
        assert!(tier.has(slot, 1, 1));
        // An earlier process left it, and had another checksum of it.
        let summed = || tier.slots.sum(in_life(slot, 1), &mut Vec::new());
        known.inherit(slot, crc ^ 1);
        assert!(!tier.has(slot, 1, 1) && summed().is_none());
        known.inherit(slot, crc);
        assert_eq!((summed(), known.inherited()), (Some(crc), 0));
    }

    #[test]
    fn a_slot_that_is_given_up_has_not_come() {
        let told = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let tell = Arc::clone(&told);
        let done = Done::new(move |ended| tell.lock().extend(ended));
        let (slot, memory) = (SlotId(0), HostTier::new().memory);
        let to = in_life(slot, 0);
        drop(pulled_slot(&memory, op(to), 5, done.clone()));
        let end = told.lock().pop().unwrap();
        assert_eq!((end.0, end.1.unwrap_err().kind()), (5, CopyErrorKind::Unavailable));
        // What may still be written has not ended, even where it is dropped, and is waited for.
        let waits = Arc::strong_count(&told);
        let alone = Done::new({
            let told = Arc::clone(&told);
            move |ended| told.lock().extend(ended)
        });
        let mut lent = pulled_slot(&memory, op(to), 5, alone);
        let frame = lent.lend().unwrap();
        assert_eq!((lent.bytes().len(), lent.written()), (0, None));
        lent.end(Ok(()));
        assert!(told.lock().is_empty() && Arc::strong_count(&told) == waits + 1);
        let mut back = pulled_slot(&memory, op(to), 5, done);
        assert!(back.lend().is_some() && back.lend().is_none());
        back.give_back(frame);
        back.end(Ok(()));
        assert_eq!(told.lock().pop().unwrap().0, 5);
    }
}
