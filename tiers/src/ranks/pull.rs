//! A rank's slots of the host tier, for ranks of other workers: what these have comes into them, and
//! what lies in them goes to these.

#![expect(unsafe_code, reason = "slots whose handles the leader has")]

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::shares::{HeadShare, ShareSource, sources};
use super::slots::SlotGenerations;
use crate::checksum::checksum;
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done, SlotId, SlotRef, Tier};
use crate::dram::DramRegion;
use crate::memory::{Memory, forget_checksum};
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

impl PullOrder {
    /// What a rank of `world` brings. `None`: heads are not split so that it could.
    pub(super) fn of_rank(&self, rank: u16, world: u16) -> Option<PullFrom> {
        let there = self.seats.len().try_into().ok()?;
        let source = |ShareSource { rank, give, into }| {
            Some(PullSource { seat: *self.seats.get(usize::from(rank))?, give, into })
        };
        let sources =
            sources(rank, world, there)?.into_iter().map(source).collect::<Option<_>>()?;
        let limit = Duration::from_millis(self.limit_ms.into());
        Some(PullFrom { host: self.host.clone(), sources, limit, renamed: self.renamed })
    }
}

/// Brings slices of blocks. It must not block.
pub type PullSlots = dyn Fn(PullFrom, Vec<PulledSlot>) + Send + Sync;

/// A slot that is to be filled from a slot of another worker's rank. Dropped before its
/// [`end`](Self::end), it is given up.
pub struct PulledSlot {
    memory: Arc<DramRegion>,
    op: CopyOp,
    /// In its batch.
    place: usize,
    /// `None` once it has ended.
    done: Option<Done>,
}

impl fmt::Debug for PulledSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PulledSlot")
            .field("from", &self.op.from)
            .field("to", &self.op.to)
            .finish_non_exhaustive()
    }
}

impl PulledSlot {
    /// The slot that `op` goes to has been checked to be the `memory`'s, and no one else's until
    /// `done` is told of this place in the batch.
    pub(super) fn new(memory: Arc<DramRegion>, op: CopyOp, place: usize, done: Done) -> Self {
        Self { memory, op, place, done: Some(done) }
    }

    /// What is to come: its source is a slot of the other worker's rank, in one of its lives.
    pub const fn op(&self) -> &CopyOp {
        &self.op
    }

    /// The slot, all of which is to be written.
    ///
    /// # Panics
    /// If the region has no such slot.
    pub fn bytes(&mut self) -> &mut [u8] {
        let to = self.op.to.slot;
        forget_checksum(&*self.memory, to);
        let slot = self.memory.slot(to).expect("it was checked when this was made");
        // SAFETY: the leader has the slot's only handle, and has given the slot to this copy until
        // it hears of its end, which is when this is gone; it is borrowed mutably meanwhile.
        unsafe { std::slice::from_raw_parts_mut(slot.as_ptr().cast(), self.memory.block_bytes()) }
    }

    /// The slot is written. Returns the checksum of what it has, which the region remembers.
    pub fn written(&mut self) -> u32 {
        let crc = checksum(self.bytes());
        self.memory.checksums().inspect(|known| known.record(self.op.to.slot, crc));
        crc
    }

    /// Nothing touches the slot any more.
    pub fn end(mut self, result: Result<(), CopyError>) {
        self.report(result);
    }

    fn report(&mut self, result: Result<(), CopyError>) {
        if let Some(done) = self.done.take() {
            done.report(vec![(self.place, result)]);
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

    /// Copies the slice that this life of a slot holds; returns its checksum. `None`: the slot holds
    /// something else or nothing, or what it holds has changed. Then `to` has any bytes.
    pub fn copy(&self, (slot, generation): (SlotId, u32), to: &mut Vec<u8>) -> Option<u32> {
        let held = SlotRef { tier: Tier::Host, slot, generation };
        let from = self.memory.slot(slot)?;
        to.clear();
        self.generations.check(held).ok()?;
        // SAFETY: a slot is whole mapped pages that start on a page boundary, and its block is no
        // longer. The region outlives this call.
        unsafe { stream::copy_block(from.as_ptr().cast(), self.memory.block_bytes(), to) };
        let known = self.memory.checksums()?;
        let is_sound = known.verify_inherited(slot, to).is_ok();
        let (crc, expected) = (checksum(to), known.get(slot));
        // What writes to the slot takes its life first: what was copied is of this one.
        self.generations.check(held).ok()?;
        if !is_sound || expected.is_some_and(|expected| expected != crc) {
            tracing::error!(
                slot = slot.0,
                "a block in a rank's host tier has changed: it is not given to others"
            );
            return None;
        }
        Some(crc)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;
    use crate::copy::BlockKey;
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
            let to = SlotRef { tier: Tier::Host, slot, generation };
            let done = Done::new(|_| ());
            self.slots.generations.begin_pull(&op(to));
            let mut pulled = PulledSlot::new(Arc::clone(&self.memory), op(to), 0, done);
            fill_pattern(pattern, pulled.bytes());
            pulled.written();
            pulled.end(Ok(()));
            self.slots.generations.adopt(to);
        }

        fn has(&self, slot: SlotId, generation: u32, pattern: usize) -> bool {
            let mut slice = Vec::new();
            let crc = self.slots.copy((slot, generation), &mut slice);
            assert!(crc.is_none_or(|crc| crc == checksum(&slice)));
            crc.is_some() && has_pattern(pattern, &slice)
        }
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
        assert!(!tier.has(slot, 8, 1));
        assert!(!tier.has(SlotId(SLOTS), 7, 1), "there is no such slot");
        tier.slots.generations.begin_pull(&op(SlotRef { tier: Tier::Host, slot, generation: 8 }));
        assert!(!tier.has(slot, 7, 1), "it is being written");
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
                if tier.slots.copy((slot, now), &mut slice).is_some() {
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
        known.inherit(slot, crc ^ 1);
        assert!(!tier.has(slot, 1, 1));
    }

    #[test]
    fn a_slot_that_is_given_up_has_not_come() {
        let told = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let tell = Arc::clone(&told);
        let done = Done::new(move |ended| tell.lock().extend(ended));
        let slot = SlotId(0);
        let from = SlotRef { tier: Tier::Host, slot, generation: 0 };
        drop(PulledSlot::new(HostTier::new().memory, op(from), 5, done));
        let told = told.lock();
        assert_eq!((told.len(), told[0].0), (1, 5));
        assert_eq!(told[0].1.as_ref().unwrap_err().kind(), CopyErrorKind::Unavailable);
    }
}
