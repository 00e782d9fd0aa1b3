//! One tier of the table: its slots, their blocks, and the policy that ranks them.

use std::collections::HashMap;
use std::iter::Sum;

use kvbm_policies::{Admission, Eviction, TierPolicies};
use kvbm_tiers::{Ahead, FramePool, HugeVec, SlotId, SlotRef, Tier};

use super::budget::{Budget, touched};
use super::demotion::Climb;
use super::flush_queue::{DirtyBlock, FlushQueue};
use super::index::{RecordId, soon_appended};
use super::journal::Journal;
use super::namespace::ForgottenSlots;
use super::record::BlockRecords;

/// How a tier is described to the table.
#[derive(Debug)]
pub struct TierSpec {
    /// The handles to its slots. Those already taken are not the table's.
    pub pool: FramePool,
    /// Ranks its leaves for eviction.
    pub policy: Box<dyn Eviction>,
    /// The tier below into which its blocks are flushed before they may be evicted, and those of no
    /// other tier.
    pub flush_to: Option<Tier>,
    /// Which of its blocks go down, and when; `None`: all of them, soon.
    pub admission: Option<Box<dyn Admission>>,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Blocks that became resident.
    pub published: u64,
    /// Blocks evicted to make room.
    pub evicted: u64,
    /// Blocks not taken in: not worth their room.
    pub declined: u64,
    /// Reservations that found no room.
    pub full: u64,
    /// Blocks dropped because their bytes were found corrupt, descendants included.
    pub quarantined: u64,
    /// Blocks dropped because they could not be read any more, descendants included.
    pub unreadable: u64,
    /// Blocks whose copy to the tier below failed; each is retried while it is here.
    pub flush_failures: u64,
    /// Blocks that left before the tier below had them, because it could not be written.
    pub unflushed: u64,
}

impl Sum for TierStats {
    fn sum<I: Iterator<Item = Self>>(stats: I) -> Self {
        stats.fold(Self::default(), |sum, stats| Self {
            published: sum.published + stats.published,
            evicted: sum.evicted + stats.evicted,
            declined: sum.declined + stats.declined,
            full: sum.full + stats.full,
            quarantined: sum.quarantined + stats.quarantined,
            unreadable: sum.unreadable + stats.unreadable,
            flush_failures: sum.flush_failures + stats.flush_failures,
            unflushed: sum.unflushed + stats.unflushed,
        })
    }
}

/// A resident block's place. 8 bytes; without meaning while the slot is free or filling.
#[derive(Clone, Copy, Debug)]
pub(super) struct TierSlot {
    pub(super) record: RecordId,
    /// As many as the slot counts itself: see [`Tally`].
    pins: u16,
    children: u8,
    flags: u8,
}

const _: () = assert!(size_of::<TierSlot>() == 8, "a slot has outgrown its budget");

const QUARANTINED: u8 = 1;
const SKIPS_FLUSH: u8 = 2;
const FORGOTTEN: u8 = 4;

impl TierSlot {
    pub(super) const EMPTY: Self = Self::holding(RecordId(u32::MAX));

    pub(super) const fn holding(record: RecordId) -> Self {
        Self { record, pins: 0, children: 0, flags: 0 }
    }

    /// Whether no block of the tier hangs on it.
    pub(super) const fn is_leaf(self) -> bool {
        self.children == 0
    }

    /// Whether a pin keeps it where it is.
    pub(super) const fn is_pinned(self) -> bool {
        self.pins > 0
    }

    /// Its bytes are bad: no new reader may find it; its readers may finish.
    pub(super) const fn is_quarantined(self) -> bool {
        self.flags & QUARANTINED != 0
    }

    pub(super) const fn set_quarantined(&mut self) {
        self.flags |= QUARANTINED;
    }

    /// It should be flushed after all.
    pub(super) const fn want_flush(&mut self) {
        self.flags &= !SKIPS_FLUSH;
    }

    /// It may be evicted although the tier below lacks it.
    pub(super) const fn skips_flush(self) -> bool {
        self.flags & SKIPS_FLUSH != 0
    }

    pub(super) const fn skip_flush(&mut self) {
        self.flags |= SKIPS_FLUSH;
    }

    /// A reset forgot it: marked when the pass over the tier comes by, see
    /// [`TierTable::is_forgotten`].
    pub(super) const fn is_forgotten(self) -> bool {
        self.flags & FORGOTTEN != 0
    }

    pub(super) const fn set_forgotten(&mut self) {
        self.flags |= FORGOTTEN;
    }
}

/// Slots by which the array of a tier grows.
const STEP: usize = 1_024;
/// Slots for which addresses are reserved at the start; more are reserved when needed.
const RESERVED_SLOTS: usize = 1 << 24;

/// One in this many slots of a directory may be free while a chain of another waits for room in its
/// own.
const SPARE: usize = 32;
/// But at most this many.
const MAX_SPARE: usize = 4_096;

/// First and longest pause after a failed flush, in milliseconds. The pause doubles while flushes
/// of the tier go on failing, so that a medium that refuses writes for an hour is not asked a
/// million times.
const FIRST_PAUSE_MS: u64 = 500;
const MAX_PAUSE_MS: u64 = 60_000;

#[derive(Debug)]
pub(super) struct TierTable {
    pub(super) tier: Tier,
    pub(super) total: u32,
    pub(super) pool: FramePool,
    pub(super) slots: HugeVec<TierSlot>,
    pins: Tally,
    children: Tally,
    pub(super) policies: TierPolicies,
    pub(super) flush_to: Option<Tier>,
    /// Blocks that the tier below lacks.
    pub(super) flushes: FlushQueue,
    pub(super) climbed: Option<Climb>,
    /// The block that a rule refused last, or that the tier below declined, or that hangs on such a
    /// one and waited for its flush.
    pub(super) turned_away: Option<SlotRef>,
    /// It gave wrong blocks: see [`Table::withdraw`](super::Table::withdraw).
    pub(super) is_withdrawn: bool,
    /// When failed flushes are retried, and how much later if they fail again.
    retry_at_ms: u64,
    retry_pause_ms: u64,
    /// The tier below cannot be written now: dirty blocks may leave unflushed.
    pub(super) is_flush_blocked: bool,
    pub(super) resident: u32,
    pub(super) forgotten: ForgottenSlots,
    /// Slots that an overdue copy may still touch.
    pub(super) lost: u32,
    /// A new block found no room while blocks wait only to be flushed.
    pub(super) pressed: bool,
    pub(super) stats: TierStats,
    /// Notes what comes and leaves, if another process should know it.
    pub(super) journal: Option<Journal>,
}

impl TierTable {
    pub(super) fn new(spec: TierSpec) -> Self {
        let total = spec.pool.total() - spec.pool.out();
        let reserved = (spec.pool.total() as usize).min(RESERVED_SLOTS);
        let limits = SlotLimits::default();
        Self {
            tier: spec.pool.tier(),
            total,
            // Addresses only: the kernel provides memory as it is used.
            slots: HugeVec::with_capacity(reserved),
            pins: Tally::up_to(limits.pins),
            children: Tally::up_to(limits.children.into()),
            pool: spec.pool,
            policies: TierPolicies::new(spec.policy, spec.admission),
            flush_to: spec.flush_to,
            flushes: FlushQueue::with_room_for(if spec.flush_to.is_some() { reserved } else { 0 }),
            climbed: None,
            turned_away: None,
            is_withdrawn: false,
            retry_at_ms: 0,
            retry_pause_ms: FIRST_PAUSE_MS,
            is_flush_blocked: false,
            resident: 0,
            forgotten: ForgottenSlots::default(),
            lost: 0,
            pressed: false,
            stats: TierStats::default(),
            journal: None,
        }
    }

    /// Whether a block of a chain that lies in the directory `home` has room, there or in one with
    /// more free slots than it keeps for its own chains.
    pub(super) fn has_room(&self, home: usize) -> bool {
        let has_spare = || {
            let spare = (self.pool.total() as usize / self.pool.shards() / SPARE).min(MAX_SPARE);
            self.pool.free_in(self.pool.emptiest_shard()) as usize > spare
        };
        self.pool.free_in(home) > 0 || (self.pool.shards() > 1 && has_spare())
    }

    pub(super) fn at(&self, slot: SlotId) -> &TierSlot {
        touched();
        &self.slots[slot.0 as usize]
    }

    pub(super) fn at_mut(&mut self, slot: SlotId) -> &mut TierSlot {
        touched();
        &mut self.slots[slot.0 as usize]
    }

    /// Sets how far slots count themselves. For a table without blocks.
    pub(super) fn count_up_to(&mut self, limits: SlotLimits) {
        (self.pins, self.children) =
            (Tally::up_to(limits.pins), Tally::up_to(limits.children.into()));
    }

    /// Keeps the block in `slot` where it is.
    pub(super) fn pin(&mut self, slot: SlotId) {
        self.slots[slot.0 as usize].pins = self.pins.add(slot, self.at(slot).pins);
    }

    /// Ends a pin. Returns whether it was the last.
    pub(super) fn unpin(&mut self, slot: SlotId) -> bool {
        self.slots[slot.0 as usize].pins = self.pins.take(slot, self.at(slot).pins);
        !self.at(slot).is_pinned()
    }

    /// How many pins keep the block in `slot` where it is.
    pub(super) fn pins(&self, slot: SlotId) -> u64 {
        self.pins.total(slot, self.at(slot).pins)
    }

    /// From now on one more block of the tier hangs on the one in `slot`.
    pub(super) fn gain_child(&mut self, slot: SlotId) {
        let own = self.at(slot).children;
        self.at_mut(slot).children = self.children.add(slot, own.into()) as u8;
    }

    /// One block less. Returns whether it was the last.
    pub(super) fn lose_child(&mut self, slot: SlotId) -> bool {
        let own = self.at(slot).children;
        self.at_mut(slot).children = self.children.take(slot, own.into()) as u8;
        self.at(slot).is_leaf()
    }

    /// Blocks of the tier that hang on the one in `slot`.
    pub(super) fn children(&self, slot: SlotId) -> u64 {
        self.children.total(slot, self.at(slot).children.into())
    }

    /// The slots from `from` on that hold blocks, as far as the hold goes, and where the next one
    /// begins.
    pub(super) fn step(
        &self,
        from: u32,
        budget: &mut Budget,
    ) -> (impl Iterator<Item = u32> + '_, Option<u32>) {
        let end =
            (from as usize + budget.looks_left()).min(self.slots.len()).max(from as usize) as u32;
        budget.pay((end - from) as usize);
        let holds_block = |slot: &u32| self.at(SlotId(*slot)).record != TierSlot::EMPTY.record;
        let next = ((end as usize) < self.slots.len()).then_some(end);
        ((from..end).filter(holds_block), next)
    }

    /// Puts `record` into `slot`, growing the array as far as the tier has been used so far.
    pub(super) fn occupy(&mut self, slot: SlotId, record: RecordId) {
        let index = slot.0 as usize;
        if index >= self.slots.len() {
            self.make_room_for(index + 1);
        }
        debug_assert!(self.children.is_within(slot), "a block left before its children");
        debug_assert!(self.pins.is_within(slot), "a block left before its readers");
        self.slots[index] = TierSlot::holding(record);
        self.forgotten.renew(slot);
        self.resident += 1;
        self.stats.published += 1;
    }

    /// Only as far as the tier has been used: a disk of a hundred million slots must not cost a
    /// gigabyte at the start. And a little at a time, since the lock is held.
    fn make_room_for(&mut self, slots: usize) {
        let total = self.pool.total() as usize;
        if slots > self.slots.capacity() {
            let more = (slots + slots / 8 + STEP).min(total);
            self.slots.reserve_exact(more.max(slots) - self.slots.len());
        }
        self.slots.resize((slots + STEP).min(total).max(slots), TierSlot::EMPTY);
        if self.flush_to.is_some() {
            self.flushes.reach(self.slots.len());
        }
    }

    /// The memory of the slots that will be used next for the first time.
    pub(super) fn ahead(&mut self) -> impl Iterator<Item = Ahead> {
        let soon = STEP + soon_appended(self.slots.len());
        self.slots
            .ahead(soon)
            .into_iter()
            .chain(self.pool.ahead(soon))
            .chain(self.flushes.ahead(soon))
    }

    /// Queues a block to be flushed, or asked about. A block that waits already keeps its place
    /// behind its parent, which was published before it, so that the queue is root-first along
    /// every chain.
    pub(super) fn queue(&mut self, block: DirtyBlock) {
        if !self.is_forgotten(block.slot) {
            self.flushes.push_last(block);
        }
    }

    /// Retries a failed flush after a pause. Until then the block may leave.
    pub(super) fn retry_later(&mut self, entry: DirtyBlock, now_ms: u64) {
        if self.is_forgotten(entry.slot) {
            return;
        }
        self.stats.flush_failures += 1;
        // The blocks of a batch fail together: that is one failure.
        if now_ms >= self.retry_at_ms {
            self.retry_at_ms = now_ms + self.retry_pause_ms;
            self.retry_pause_ms = (self.retry_pause_ms * 2).min(MAX_PAUSE_MS);
        }
        self.put_off(entry, self.retry_at_ms);
    }

    /// Lets a block leave unflushed, and flushes it at `due_ms` if it is still there.
    pub(super) fn put_off(&mut self, block: DirtyBlock, due_ms: u64) {
        if !self.flushes.has(block.slot) {
            self.flushes.put_off(block, due_ms);
            self.at_mut(block.slot).skip_flush();
            self.reconsider(block.slot);
        }
    }

    /// Retries failed flushes whose pause is over by `now_ms`. Returns whether there are more.
    pub(super) fn revive_flushes(&mut self, now_ms: u64, budget: &mut Budget) -> bool {
        while self.flushes.has_due(now_ms) {
            if !budget.change() {
                return true;
            }
            if let Some(block) = self.flushes.pop_due(now_ms) {
                self.at_mut(block.slot).want_flush();
                // Due at once: it has waited before.
                self.flushes.push_last(DirtyBlock { since_ms: 0, ..block });
            }
        }
        false
    }

    /// A block reached the tier below: the next failure starts with a short pause again.
    pub(super) const fn flush_succeeded(&mut self) {
        (self.retry_at_ms, self.retry_pause_ms) = (0, FIRST_PAUSE_MS);
    }

    /// Whether the tier below has the block, or does not need it.
    pub(super) fn is_clean(&self, slot: SlotId, records: &BlockRecords) -> bool {
        let held = self.at(slot);
        let is_wanted = !held.skips_flush() && !self.is_flush_blocked && !self.is_forgotten(slot);
        let below = self.flush_to.filter(|_| is_wanted);
        below.is_none_or(|below| records.at(held.record).resident().has(below))
    }

    /// Whether a block is still to go down, or to be asked about.
    pub(super) fn is_unflushed(&self, slot: SlotId, records: &BlockRecords) -> bool {
        let held = self.at(slot);
        let lacks = |below: Tier| !records.at(held.record).resident().has(below);
        self.flushes.has(slot)
            && !self.is_withdrawn
            && !self.is_forgotten(slot)
            && !self.policies.has_admission()
            && self.flush_to.is_some_and(lacks)
    }
}

/// How far slots count themselves.
///
/// Most blocks have one child, and one reader at a time or none, so a slot has little room for
/// either count. A count that outgrows it goes on in a map of its tier: there is no limit on a
/// block's readers.
#[derive(Clone, Copy, Debug)]
pub struct SlotLimits {
    /// Pins: leases, copies and others that keep the block where it is.
    pub pins: u16,
    /// Blocks of the tier that hang on the block.
    pub children: u8,
}

impl Default for SlotLimits {
    fn default() -> Self {
        Self { pins: u16::MAX, children: u8::MAX }
    }
}

/// The parts of counts for which slots have no room.
#[derive(Debug)]
struct Tally {
    /// What a slot counts itself.
    limit: u16,
    beyond: HashMap<SlotId, u64>,
}

impl Tally {
    pub(super) fn up_to(limit: u16) -> Self {
        // A slot tells whether there is any.
        Self { limit: limit.max(1), beyond: HashMap::new() }
    }

    /// Adds one to `slot`, which counts `own` itself. Returns what it counts from now on.
    pub(super) fn add(&mut self, slot: SlotId, own: u16) -> u16 {
        if own < self.limit {
            return own + 1;
        }
        *self.beyond.entry(slot).or_default() += 1;
        own
    }

    /// Takes one away.
    pub(super) fn take(&mut self, slot: SlotId, own: u16) -> u16 {
        debug_assert!(own > 0, "slot {} lost what it did not have", slot.0);
        match self.beyond.get_mut(&slot).filter(|_| own == self.limit) {
            Some(1) => _ = self.beyond.remove(&slot),
            Some(beyond) => *beyond -= 1,
            None => return own - 1,
        }
        own
    }

    /// The whole count of `slot`, which counts `own` itself.
    pub(super) fn total(&self, slot: SlotId, own: u16) -> u64 {
        u64::from(own) + self.beyond.get(&slot).copied().unwrap_or(0)
    }

    /// Whether `slot` counts everything itself.
    fn is_within(&self, slot: SlotId) -> bool {
        !self.beyond.contains_key(&slot)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_count_is_exact_whatever_its_slot_has_room_for(
            limit in 1..5_u16,
            steps in prop::collection::vec((0..3_u32, prop::bool::weighted(0.6)), 0..200),
        ) {
            let mut tally = Tally::up_to(limit);
            let (mut own, mut counts) = ([0; 3], [0_u64; 3]);
            for (slot, grows) in steps {
                let at = slot as usize;
                if grows {
                    own[at] = tally.add(SlotId(slot), own[at]);
                    counts[at] += 1;
                } else if counts[at] > 0 {
                    own[at] = tally.take(SlotId(slot), own[at]);
                    counts[at] -= 1;
                }
                prop_assert_eq!(tally.total(SlotId(slot), own[at]), counts[at]);
                prop_assert_eq!(u64::from(own[at]), counts[at].min(u64::from(limit)));
            }
        }
    }
}
