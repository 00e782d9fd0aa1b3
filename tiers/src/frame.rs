//! Titles to slots: who may touch a slot, said by the type system.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::copy::{SlotId, SlotRef, Tier};
use crate::geometry::MAX_SLOTS;
use crate::huge::{Ahead, HugeVec};

/// The sole slot handle to one slot of one tier, for one of the slot's lives. It cannot be copied:
/// its holder alone may write the slot.
///
/// It ends in [`FramePool::give_back`] or [`FramePool::deposit`]. One that is dropped instead, or
/// kept by a copy that never ends, leaves its slot [`out`](FramePool::out) for ever.
#[derive(Debug)]
#[must_use = "a dropped frame leaves its slot unusable"]
pub struct Frame {
    pool: PoolId,
    slot: SlotRef,
}

impl Frame {
    /// The tier that the slot belongs to.
    pub const fn tier(&self) -> Tier {
        self.slot.tier
    }

    /// The slot's number.
    pub const fn slot(&self) -> SlotId {
        self.slot.slot
    }

    /// Which of the slot's lives.
    pub const fn generation(&self) -> u32 {
        self.slot.generation
    }

    /// All of that, as copy orders name it.
    pub const fn slot_ref(&self) -> SlotRef {
        self.slot
    }

    pub(crate) const fn pool(&self) -> PoolId {
        self.pool
    }

    /// A rank's, whose leader has the slot allocator: the leader gave this slot to one copy, and
    /// gives it to no other before it hears of that one's end.
    pub(crate) const fn of_leader(pool: PoolId, slot: SlotRef) -> Self {
        Self { pool, slot }
    }
}

/// Which pool a frame came from. Never used twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolId(u64);

impl PoolId {
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The slot allocator of a tier's slots: it mints each slot's [`Frame`] and never two at a time.
///
/// A slot is *free*; or *out*, its frame held by a caller; or *resident*, its slot handle kept here
/// for a block table that remembers no more than the slot's number. `take`: free → out; `deposit`:
/// out → resident; `withdraw`: resident → out; `give_back`: out → free.
///
/// Four bytes per slot that was ever used, so that a nominally huge tier costs nothing until it
/// fills. Not synchronised: the lock of the table that owns it guards it.
#[derive(Debug)]
pub struct FramePool {
    id: PoolId,
    tier: Tier,
    slots: u32,
    /// Slots from here on are set aside.
    own_slots: u32,
    states: HugeVec<SlotEntry>,
    shards: Vec<FrameShard>,
    lives: Lives,
    /// Slots lent for reading, each as often as it is. Few at any time.
    loans: Vec<SlotId>,
    out: u32,
    resident: u32,
}

/// Numbers the lives of a pool's slots: a slot's generation is its life's number. After the last
/// number the first comes again. That tells lives of one slot apart, since a slot starts no new one
/// while anything names its old one; which of two slots was taken earlier it does not tell.
#[derive(Clone, Copy, Debug)]
struct Lives {
    latest: u32,
    last: u32,
}

impl Lives {
    const fn next(&mut self) -> u32 {
        self.latest = if self.latest < self.last { self.latest + 1 } else { 0 };
        self.latest
    }
}

/// Every n-th slot: those of one medium, where a tier has several. They come and go together.
#[derive(Debug)]
struct FrameShard {
    /// The first of its free slots that were used before.
    free_head: u32,
    /// Its first slot that was never used.
    unused: u32,
    free: u32,
    is_closed: bool,
}

/// A slot's state in the upper two bits; below them the next free slot of a free one, else the
/// generation.
#[derive(Clone, Copy, Debug)]
struct SlotEntry(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum SlotState {
    Free = 0,
    Out = 1 << PAYLOAD_BITS,
    Resident = 2 << PAYLOAD_BITS,
}

const PAYLOAD_BITS: u32 = 30;
const PAYLOAD: u32 = (1 << PAYLOAD_BITS) - 1;
/// Addresses are reserved for this many slots at the start, and for more when they are needed.
const RESERVED: u32 = 1 << 24;
/// Ends the chain of free slots.
const LAST: u32 = PAYLOAD;
const _: () = assert!(MAX_SLOTS < LAST, "slot numbers must not collide with the end mark");

impl SlotEntry {
    const fn new(state: SlotState, payload: u32) -> Self {
        Self(state as u32 | payload)
    }

    const fn payload(self) -> u32 {
        self.0 & PAYLOAD
    }

    fn is(self, state: SlotState) -> bool {
        self.0 & !PAYLOAD == state as u32
    }
}

/// The right to read one resident slot. While it is out, the slot's slot handle cannot be
/// withdrawn.
#[derive(Debug)]
#[must_use = "a loan that is not ended keeps its slot from being evicted"]
pub struct Loan {
    pool: PoolId,
    slot: SlotRef,
}

impl Loan {
    /// The slot's number.
    pub const fn slot(&self) -> SlotId {
        self.slot.slot
    }

    /// Which of the slot's lives.
    pub const fn generation(&self) -> u32 {
        self.slot.generation
    }

    pub(crate) const fn pool(&self) -> PoolId {
        self.pool
    }
}

impl FramePool {
    /// The slot allocator of a tier of `slots` slots (at most [`MAX_SLOTS`]; more are not used),
    /// all free.
    ///
    /// The frames of a pool made here open no [`Memory`](crate::Memory): those come from
    /// [`DramRegion::frames`](crate::DramRegion::frames).
    pub fn new(tier: Tier, slots: u32) -> Self {
        Self::with_id(PoolId::fresh(), tier, slots)
    }

    pub(crate) fn with_id(id: PoolId, tier: Tier, slots: u32) -> Self {
        Self::with_shards(id, tier, slots, 1)
    }

    /// For a tier on several media: slot `i` lies on number `i` modulo `shards`.
    pub fn sharded(tier: Tier, slots: u32, shards: u32) -> Self {
        Self::with_shards(PoolId::fresh(), tier, slots, shards.max(1))
    }

    fn with_shards(id: PoolId, tier: Tier, slots: u32, shards: u32) -> Self {
        let slots = slots.min(MAX_SLOTS);
        let shard = |first: u32| FrameShard {
            free_head: LAST,
            unused: first,
            free: slots.saturating_sub(first).div_ceil(shards),
            is_closed: false,
        };
        Self {
            id,
            tier,
            slots,
            own_slots: slots,
            // Addresses only: the kernel provides memory as far as it is used.
            states: HugeVec::with_capacity(slots.min(RESERVED) as usize),
            shards: (0..shards).map(shard).collect(),
            lives: Lives { latest: 0, last: PAYLOAD },
            loans: Vec::new(),
            out: 0,
            resident: 0,
        }
    }

    /// Counts lives from a number drawn at random. Where others remember lives for longer than this
    /// process, one that it counts is then none of an earlier one's, but for one in a billion.
    #[must_use]
    pub fn in_random_lives(self) -> Self {
        Self { lives: Lives { latest: fastrand::u32(..) & PAYLOAD, ..self.lives }, ..self }
    }

    /// Numbers at most `lives` lives before it begins anew, by default a billion: tests check that
    /// nothing depends on it.
    #[must_use]
    pub fn with_lives(self, lives: u32) -> Self {
        Self { lives: Lives { latest: 0, last: lives.clamp(1, PAYLOAD) }, ..self }
    }

    /// Takes a free slot, in a new life, where most are free; `None`: none is free.
    pub fn take(&mut self) -> Option<Frame> {
        let shard = self.emptiest_shard();
        if self.free_in(shard) > 0 { self.take_in(shard) } else { None }
    }

    /// Takes a free slot of a shard, also of one that is closed; `None`: it has none.
    pub fn take_in(&mut self, shard: usize) -> Option<Frame> {
        let slot = self.pop_free(shard).or_else(|| self.first_use(shard))?;
        self.shards[shard].free -= 1;
        self.states[slot as usize] = SlotEntry::new(SlotState::Out, self.lives.next());
        self.out += 1;
        Some(self.frame(slot))
    }

    /// Takes certain slots, each in a new life; `None` for one that is not free, or that there is
    /// not. Goes over all slots that were ever used, so it is for the start, when what an earlier
    /// process stored is found again.
    pub fn take_these(&mut self, slots: &[SlotId]) -> Vec<Option<Frame>> {
        let ours = slots.iter().filter(|slot| slot.0 < self.own_slots);
        let used = ours.map(|slot| slot.0 as usize + 1).max().unwrap_or(0);
        self.use_up_to(used);
        let taken = slots.iter().map(|&slot| self.take_this(slot)).collect();
        self.chain_free_slots();
        taken
    }

    fn take_this(&mut self, slot: SlotId) -> Option<Frame> {
        self.states.get(slot.0 as usize).filter(|entry| entry.is(SlotState::Free))?;
        self.states[slot.0 as usize] = SlotEntry::new(SlotState::Out, self.lives.next());
        self.out += 1;
        let shard = self.shard_of(slot);
        self.shards[shard].free -= 1;
        Some(self.frame(slot.0))
    }

    /// Lowest first.
    fn chain_free_slots(&mut self) {
        let (used, shards) = (self.states.len() as u32, self.shards.len() as u32);
        for (first, shard) in (0..).zip(&mut self.shards) {
            shard.free_head = LAST;
            shard.unused = first + used.saturating_sub(first).div_ceil(shards) * shards;
        }
        for slot in (0..used).rev() {
            if self.states[slot as usize].is(SlotState::Free) {
                self.chain(slot);
            }
        }
    }

    /// A slot that is free comes first in the chain of its shard.
    fn chain(&mut self, slot: u32) {
        let shard = self.shard_of(SlotId(slot));
        let head = &mut self.shards[shard].free_head;
        self.states[slot as usize] = SlotEntry::new(SlotState::Free, *head);
        *head = slot;
    }

    /// Takes the last slots for good, `count` of them or as many as have never been used: they are
    /// out, and must not be given back. So the others keep their numbers, however many are set
    /// aside.
    pub fn set_aside(&mut self, count: u32) -> Vec<Frame> {
        let end = self.own_slots;
        self.own_slots = end.saturating_sub(count).max(self.states.len() as u32);
        self.out += end - self.own_slots;
        for slot in self.own_slots..end {
            let shard = self.shard_of(SlotId(slot));
            self.shards[shard].free -= 1;
        }
        let generation = self.lives.latest;
        let name = |slot| SlotRef { tier: self.tier, slot: SlotId(slot), generation };
        (self.own_slots..end).map(|slot| Frame { pool: self.id, slot: name(slot) }).collect()
    }

    /// The slot is free again.
    ///
    /// # Panics
    /// If the frame is another pool's.
    pub fn give_back(&mut self, frame: Frame) {
        let slot = self.redeem(frame);
        self.chain(slot.0);
        let shard = self.shard_of(slot);
        self.shards[shard].free += 1;
    }

    /// Keeps the slot handle for a table that remembers the slot's number only.
    ///
    /// # Panics
    /// If the frame is another pool's.
    pub fn deposit(&mut self, frame: Frame) -> SlotId {
        let slot = self.redeem(frame);
        self.mark(slot, SlotState::Resident);
        self.resident += 1;
        slot
    }

    /// Gives out the slot handle of a slot deposited before; `None`: there is no deposit for it, or
    /// it is lent.
    pub fn withdraw(&mut self, slot: SlotId) -> Option<Frame> {
        self.resident_ref(slot).filter(|_| !self.loans.contains(&slot))?;
        self.mark(slot, SlotState::Out);
        self.resident -= 1;
        self.out += 1;
        Some(self.frame(slot.0))
    }

    /// The name of a resident slot, as a copy order's source needs it; `None`: it is not resident.
    pub fn resident_ref(&self, slot: SlotId) -> Option<SlotRef> {
        let entry =
            self.states.get(slot.0 as usize).filter(|entry| entry.is(SlotState::Resident))?;
        Some(SlotRef { tier: self.tier, slot, generation: entry.payload() })
    }

    /// Lends a resident slot for reading; `None`: it is not resident. End it with
    /// [`end_loan`](Self::end_loan).
    pub fn lend(&mut self, slot: SlotId) -> Option<Loan> {
        let lent = self.resident_ref(slot)?;
        self.loans.push(slot);
        Some(Loan { pool: self.id, slot: lent })
    }

    /// Ends a loan.
    ///
    /// # Panics
    /// If the loan is another pool's.
    #[expect(clippy::needless_pass_by_value, reason = "the loan ends here")]
    pub fn end_loan(&mut self, loan: Loan) {
        assert_eq!(loan.pool, self.id, "slot {} was lent by another pool", loan.slot().0);
        // A list and no count per slot: few loans exist at a time, and four bytes a slot would be
        // paid by all.
        if let Some(place) = self.loans.iter().position(|&lent| lent == loan.slot()) {
            self.loans.swap_remove(place);
        }
    }

    /// The memory of the next `slots` slots that are used for the first time.
    pub fn ahead(&mut self, slots: usize) -> Option<Ahead> {
        self.states.ahead(slots)
    }

    /// The tier whose slots these are.
    pub const fn tier(&self) -> Tier {
        self.tier
    }

    /// All slots.
    pub const fn total(&self) -> u32 {
        self.slots
    }

    /// Slots that [`take`](Self::take) can still give out.
    pub fn free(&self) -> u32 {
        self.shards.iter().filter(|shard| !shard.is_closed).map(|shard| shard.free).sum()
    }

    /// How many shards there are.
    pub const fn shards(&self) -> usize {
        self.shards.len()
    }

    /// The shard that a slot belongs to.
    pub const fn shard_of(&self, slot: SlotId) -> usize {
        (slot.0 % self.shards.len() as u32) as usize
    }

    /// Free slots of a shard; none if it is closed.
    pub fn free_in(&self, shard: usize) -> u32 {
        let shard = &self.shards[shard];
        if shard.is_closed { 0 } else { shard.free }
    }

    /// The shard that has most free slots.
    pub fn emptiest_shard(&self) -> usize {
        // The first of several: `max_by_key` takes the last.
        (0..self.shards()).rev().max_by_key(|&shard| self.free_in(shard)).unwrap_or(0)
    }

    /// From here on no free slot of the shard is given out, or they are again.
    pub fn close_shard(&mut self, shard: usize, is_closed: bool) {
        self.shards[shard].is_closed = is_closed;
    }

    /// Whether no slot of the shard is given out.
    pub fn is_closed(&self, shard: usize) -> bool {
        self.shards[shard].is_closed
    }

    /// Whether a slot would not be given out if it were free.
    pub fn gives_no(&self, slot: SlotId) -> bool {
        self.shards.len() > 1 && self.is_closed(self.shard_of(slot))
    }

    /// Free slots of shards that are closed.
    pub fn closed(&self) -> u32 {
        self.shards.iter().filter(|shard| shard.is_closed).map(|shard| shard.free).sum()
    }

    /// Slots whose frame is held by a caller.
    pub const fn out(&self) -> u32 {
        self.out
    }

    /// Slots whose slot handle is deposited.
    pub const fn resident(&self) -> u32 {
        self.resident
    }

    fn pop_free(&mut self, shard: usize) -> Option<u32> {
        let slot = self.shards[shard].free_head;
        let entry = self.states.get(slot as usize)?;
        debug_assert!(entry.is(SlotState::Free), "slot {slot} handed out twice");
        self.shards[shard].free_head = entry.payload();
        Some(slot)
    }

    /// Slots are numbered in order of first use, so that the slot allocator grows with what is
    /// used.
    fn first_use(&mut self, shard: usize) -> Option<u32> {
        let slot = self.shards[shard].unused;
        if slot >= self.own_slots {
            return None;
        }
        self.shards[shard].unused += self.shards.len() as u32;
        self.use_up_to(slot as usize + 1);
        Some(slot)
    }

    /// Has a state for each of the first `slots` slots. Those of other shards among them are unused
    /// still.
    fn use_up_to(&mut self, slots: usize) {
        let used = self.states.len();
        if slots > self.states.capacity() {
            // Doubling alone would reserve beyond the tier's last slot: memory that is never used.
            let ahead = used.max(1024).max(slots - used).min(self.own_slots as usize - used);
            self.states.reserve_exact(ahead);
        }
        self.states.resize(slots.max(used), SlotEntry::new(SlotState::Free, LAST));
    }

    /// Consumes a slot handle; the caller says what becomes of its slot.
    #[expect(clippy::needless_pass_by_value, reason = "the slot handle ends here")]
    fn redeem(&mut self, frame: Frame) -> SlotId {
        assert_eq!(frame.pool, self.id, "{} belongs to another pool", frame.slot);
        let entry = self.states[frame.slot().0 as usize];
        debug_assert!(entry.is(SlotState::Out), "{} has a second slot handle", frame.slot);
        debug_assert_eq!(entry.payload(), frame.generation(), "{} outlived its slot", frame.slot);
        self.out -= 1;
        frame.slot()
    }

    fn mark(&mut self, slot: SlotId, state: SlotState) {
        let entry = &mut self.states[slot.0 as usize];
        *entry = SlotEntry::new(state, entry.payload());
    }

    fn frame(&self, slot: u32) -> Frame {
        let generation = self.states[slot as usize].payload();
        Frame { pool: self.id, slot: SlotRef { tier: self.tier, slot: SlotId(slot), generation } }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_number_after_the_last_is_the_first() {
        let mut pool = FramePool::new(Tier::Host, 1).with_lives(2);
        let lives = [(); 6].map(|()| {
            let frame = pool.take().unwrap();
            let life = frame.generation();
            pool.give_back(frame);
            life
        });
        assert_eq!(lives, [1, 2, 0, 1, 2, 0]);
    }

    proptest! {
        /// Whatever the order of events, no slot has two slot handles and the counts add up.
        #[test]
        fn every_slot_has_one_title(slots in 1..40u32, events in prop::collection::vec((0..5u8, any::<usize>()), 0..400)) {
            let mut pool = FramePool::new(Tier::Host, slots);
            let mut out: Vec<Frame> = Vec::new();
            let mut resident: Vec<SlotId> = Vec::new();
            for (event, pick) in events {
                match event {
                    0 | 1 => if let Some(frame) = pool.take() {
                        out.push(frame);
                    } else {
                        prop_assert_eq!(out.len() + resident.len(), slots as usize);
                    },
                    2 if !out.is_empty() => pool.give_back(out.swap_remove(pick % out.len())),
                    3 if !out.is_empty() => resident.push(pool.deposit(out.swap_remove(pick % out.len()))),
                    4 if !resident.is_empty() => {
                        let slot = resident.swap_remove(pick % resident.len());
                        out.push(pool.withdraw(slot).unwrap());
                        prop_assert!(pool.withdraw(slot).is_none());
                    }
                    _ => {}
                }
                let held: HashSet<_> = out.iter().map(Frame::slot).chain(resident.iter().copied()).collect();
                prop_assert_eq!(held.len(), out.len() + resident.len());
                prop_assert_eq!(pool.out() as usize, out.len());
                prop_assert_eq!(pool.resident() as usize, resident.len());
                prop_assert_eq!(pool.free() as usize, slots as usize - held.len());
            }
        }
    }

    proptest! {
        /// Each shard gives out its own slots, each once, and as many as it says.
        #[test]
        fn shards_have_their_own_slots(
            slots in 1..60u32, shards in 1..5u32, asked in prop::collection::vec(0..70u32, 0..30),
            events in prop::collection::vec((0..3u8, any::<usize>()), 0..200), closed in any::<usize>(),
        ) {
            let mut pool = FramePool::sharded(Tier::Disk, slots, shards);
            let asked: Vec<_> = asked.into_iter().map(SlotId).collect();
            let mut out: Vec<Frame> = pool.take_these(&asked).into_iter().flatten().collect();
            for (event, pick) in events {
                let shard = pick % shards as usize;
                match event {
                    0 => {
                        let free = pool.free_in(shard);
                        let taken = pool.take_in(shard);
                        prop_assert_eq!(taken.is_some(), free > 0);
                        prop_assert!(taken.iter().all(|frame| pool.shard_of(frame.slot()) == shard));
                        out.extend(taken);
                    }
                    1 => out.extend(pool.take()),
                    _ if !out.is_empty() => pool.give_back(out.swap_remove(pick % out.len())),
                    _ => {}
                }
                let held: HashSet<_> = out.iter().map(Frame::slot).collect();
                prop_assert_eq!(held.len(), out.len());
                prop_assert_eq!(pool.free(), slots - pool.out());
            }
            let closed = closed % shards as usize;
            let free = pool.free_in(closed);
            pool.close_shard(closed, true);
            prop_assert_eq!((pool.free_in(closed), pool.closed()), (0, free));
            out.extend(std::iter::from_fn(|| pool.take()));
            prop_assert_eq!(pool.out(), slots - free);
            pool.close_shard(closed, false);
            out.extend(std::iter::from_fn(|| pool.take()));
            prop_assert_eq!(out.len(), slots as usize);
        }
    }

    proptest! {
        #[test]
        fn slots_asked_for_are_taken_once_and_others_stay_free(
            slots in 1..40u32, before in 0..40usize, asked in prop::collection::vec(0..50u32, 0..60),
        ) {
            let mut pool = FramePool::new(Tier::Host, slots);
            let mut out: Vec<Frame> = (0..before).filter_map(|_| pool.take()).collect();
            out.drain(..out.len() / 2).for_each(|frame| pool.give_back(frame));
            let mut free: HashSet<u32> = (0..slots).collect();
            out.iter().for_each(|frame| assert!(free.remove(&frame.slot().0)));
            let asked: Vec<_> = asked.into_iter().map(SlotId).collect();
            for (slot, taken) in asked.iter().zip(pool.take_these(&asked)) {
                prop_assert_eq!(taken.as_ref().map(Frame::slot), free.remove(&slot.0).then_some(*slot));
                out.extend(taken);
            }
            prop_assert_eq!(pool.free() as usize, free.len());
            out.extend(std::iter::from_fn(|| pool.take()));
            let held: HashSet<_> = out.iter().map(Frame::slot).collect();
            prop_assert_eq!((held.len(), out.len()), (slots as usize, slots as usize));
        }
    }

    #[test]
    fn each_life_has_its_own_generation() {
        let mut pool = FramePool::new(Tier::Disk, 1);
        let first = pool.take().unwrap();
        let before = first.slot_ref();
        pool.give_back(first);
        let second = pool.take().unwrap();
        assert_eq!(second.slot(), before.slot);
        assert_ne!(second.slot_ref(), before);
        let kept = second.slot_ref();
        let slot = pool.deposit(second);
        assert_eq!(pool.resident_ref(slot), Some(kept));
        assert_eq!(pool.withdraw(slot).unwrap().slot_ref(), kept);
    }

    #[test]
    fn a_huge_tier_costs_only_what_is_used() {
        let mut pool = FramePool::new(Tier::Object, MAX_SLOTS);
        let frame = pool.take().unwrap();
        // Of addresses there are enough; memory is what is used.
        assert!(pool.states.capacity() <= RESERVED as usize && pool.states.len() == 1);
        assert_eq!(pool.free(), MAX_SLOTS - 1);
        pool.give_back(frame);
    }

    #[test]
    fn what_is_set_aside_leaves_the_others_their_numbers() {
        let mut pool = FramePool::new(Tier::Host, 5);
        let numbers =
            |frames: &[Frame]| frames.iter().map(|frame| frame.slot().0).collect::<Vec<_>>();
        let aside = pool.set_aside(2);
        assert_eq!((numbers(&aside), pool.out(), pool.free()), (vec![3, 4], 2, 3));
        assert!(pool.take_these(&[SlotId(3)])[0].is_none(), "nor are they taken by number");
        let taken: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!((numbers(&taken), pool.out(), pool.free()), (vec![0, 1, 2], 5, 0));
        assert!(pool.set_aside(1).is_empty(), "all others are in use");
    }

    #[test]
    fn an_entry_is_four_bytes() {
        assert_eq!(size_of::<SlotEntry>(), 4);
    }

    #[test]
    fn a_lent_slot_keeps_its_title() {
        let mut pool = FramePool::new(Tier::Device, 1);
        let frame = pool.take().unwrap();
        assert!(pool.lend(frame.slot()).is_none());
        let slot = pool.deposit(frame);
        let (one, two) = (pool.lend(slot).unwrap(), pool.lend(slot).unwrap());
        pool.end_loan(one);
        assert!(pool.withdraw(slot).is_none());
        pool.end_loan(two);
        let frame = pool.withdraw(slot).unwrap();
        pool.give_back(frame);
    }

    #[test]
    #[should_panic(expected = "another pool")]
    fn a_frame_of_another_pool_is_refused() {
        let frame = FramePool::new(Tier::Host, 1).take().unwrap();
        FramePool::new(Tier::Host, 1).give_back(frame);
    }
}
