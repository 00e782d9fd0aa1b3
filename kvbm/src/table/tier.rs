//! One tier of the table: its slots, who sits in them, and the policy that ranks them.

use std::collections::{BTreeMap, VecDeque};

use kvbm_policies::{Admission, Eviction, TierPolicies};
use kvbm_tiers::{Ahead, FramePool, HugeVec, SlotId, Tier};

use super::forgotten::Forgotten;
use super::index::{RecordId, soon};
use super::journal::Journal;
use super::record::Records;
use super::request::RequestInfo;
use super::tally::{SlotLimits, Tally};

/// What the table is told about a tier.
#[derive(Debug)]
pub struct TierSpec {
    /// The slot handles to its slots. Those already taken are not the table's.
    pub pool: FramePool,
    /// Ranks its leaves for eviction.
    pub policy: Box<dyn Eviction>,
    /// The tier into which its blocks are flushed before they may be evicted.
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
    /// Blocks not taken in: not worth the room.
    pub declined: u64,
    /// Reservations that found no room.
    pub full: u64,
    /// Blocks dropped because their bytes were found corrupt, descendants included.
    pub quarantined: u64,
    /// Blocks dropped because they could not be read any more, descendants included.
    pub unreadable: u64,
    /// Blocks whose copy to the tier below failed; each is tried again while it is here.
    pub flush_failures: u64,
    /// Blocks that left before the tier below had them, because it could not be written.
    pub unflushed: u64,
}

/// A resident block's place. 8 bytes; without meaning while the slot is free or filling.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) record: RecordId,
    /// As far as the slot counts them itself: see [`Tally`].
    pins: u16,
    children: u8,
    flags: u8,
}

const _: () = assert!(size_of::<Slot>() == 8, "a slot has outgrown its budget");

const QUARANTINED: u8 = 1;
const SKIPS_FLUSH: u8 = 2;
const QUEUED: u8 = 4;
const FORGOTTEN: u8 = 8;

impl Slot {
    pub(super) const EMPTY: Self = Self::holding(RecordId(u32::MAX));

    pub(super) const fn holding(record: RecordId) -> Self {
        Self { record, pins: 0, children: 0, flags: 0 }
    }

    /// Whether no block of the tier hangs on it.
    pub(super) const fn is_leaf(self) -> bool {
        self.children == 0
    }

    /// Whether somebody keeps it where it is.
    pub(super) const fn is_pinned(self) -> bool {
        self.pins > 0
    }

    /// Its bytes are bad: nobody new may find it, its readers may finish.
    pub(super) const fn is_quarantined(self) -> bool {
        self.flags & QUARANTINED != 0
    }

    pub(super) const fn set_quarantined(&mut self) {
        self.flags |= QUARANTINED;
    }

    /// It is to be flushed after all.
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

    /// It waits in the queue of dirty blocks: once is enough, however often it is used.
    pub(super) const fn is_queued(self) -> bool {
        self.flags & QUEUED != 0
    }

    /// A reset forgot it: marked when the pass over the tier comes by, see [`TierTable::is_forgotten`].
    pub(super) const fn is_forgotten(self) -> bool {
        self.flags & FORGOTTEN != 0
    }

    pub(super) const fn set_forgotten(&mut self) {
        self.flags |= FORGOTTEN;
    }

    const fn set_queued(&mut self, queued: bool) {
        self.flags = if queued { self.flags | QUEUED } else { self.flags & !QUEUED };
    }
}

/// A block that waits for its flush. Stale entries are recognised by the slot's occupant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dirty {
    pub(super) slot: SlotId,
    pub(super) record: RecordId,
    pub(super) since_ms: u64,
    /// Of the request that brought it.
    pub(super) info: RequestInfo,
}

/// Slots by which the array of a tier grows.
const STEP: usize = 1_024;
/// Addresses are reserved for so many slots at the start, and for more when they are needed.
const RESERVED_SLOTS: usize = 1 << 24;

/// Of a directory's slots, one in so many may be free while a chain of another one waits for room in its own.
const SPARE: usize = 32;
/// No more than so many.
const MAX_SPARE: usize = 4_096;

/// First pause after a failed flush, and the longest, in milliseconds. The pause doubles while flushes of the tier
/// go on failing, so that a medium that refuses writes for an hour is not asked a million times.
const FIRST_PAUSE_MS: u64 = 500;
const MAX_PAUSE_MS: u64 = 60_000;

#[derive(Debug)]
pub(super) struct TierTable {
    pub(super) tier: Tier,
    pub(super) total: u32,
    pub(super) pool: FramePool,
    pub(super) slots: HugeVec<Slot>,
    pins: Tally,
    children: Tally,
    pub(super) policies: TierPolicies,
    pub(super) flush_to: Option<Tier>,
    /// What it gives is wrong: see [`Table::withdraw`](super::Table::withdraw).
    pub(super) is_withdrawn: bool,
    pub(super) dirty: VecDeque<Dirty>,
    /// Failed flushes by when they are due; the second number tells those of one time apart, in their order.
    pub(super) retries: BTreeMap<(u64, u64), Dirty>,
    put_off: u64,
    /// When failed flushes are tried again, and how much later if they fail once more.
    retry_at_ms: u64,
    retry_pause_ms: u64,
    /// The tier below cannot be written now: what is dirty may leave without it.
    pub(super) is_flush_blocked: bool,
    pub(super) resident: u32,
    pub(super) forgotten: Forgotten,
    /// Slots that an overdue copy may still touch.
    pub(super) lost: u32,
    /// Somebody found no room although blocks only wait to be flushed.
    pub(super) pressed: bool,
    pub(super) stats: TierStats,
    /// Where it is noted what comes and leaves, if that is to be known in another process.
    pub(super) journal: Option<Journal>,
}

impl TierTable {
    pub(super) fn new(spec: TierSpec) -> Self {
        let total = spec.pool.total() - spec.pool.out();
        let limits = SlotLimits::default();
        Self {
            tier: spec.pool.tier(),
            total,
            // Addresses only: the kernel provides memory as far as it is used.
            slots: HugeVec::with_capacity((spec.pool.total() as usize).min(RESERVED_SLOTS)),
            pins: Tally::up_to(limits.pins),
            children: Tally::up_to(limits.children.into()),
            pool: spec.pool,
            policies: TierPolicies::new(spec.policy, spec.admission),
            flush_to: spec.flush_to,
            is_withdrawn: false,
            dirty: VecDeque::new(),
            retries: BTreeMap::new(),
            put_off: 0,
            retry_at_ms: 0,
            retry_pause_ms: FIRST_PAUSE_MS,
            is_flush_blocked: false,
            resident: 0,
            forgotten: Forgotten::default(),
            lost: 0,
            pressed: false,
            stats: TierStats::default(),
            journal: None,
        }
    }

    /// Whether a block of a chain that lies in the directory `home` has room, there or where more is free than waits for
    /// others.
    pub(super) fn has_room(&self, home: usize) -> bool {
        let spare = (self.pool.total() as usize / self.pool.shards() / SPARE).min(MAX_SPARE);
        let most = self.pool.free_in(self.pool.emptiest_shard()) as usize;
        self.pool.free_in(home) > 0 || (self.pool.shards() > 1 && most > spare)
    }

    pub(super) fn at(&self, slot: SlotId) -> &Slot {
        &self.slots[slot.0 as usize]
    }

    pub(super) fn at_mut(&mut self, slot: SlotId) -> &mut Slot {
        &mut self.slots[slot.0 as usize]
    }

    /// Has slots count so far themselves. For a table without blocks.
    pub(super) fn count_up_to(&mut self, limits: SlotLimits) {
        (self.pins, self.children) = (Tally::up_to(limits.pins), Tally::up_to(limits.children.into()));
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

    /// Those who keep the block in `slot` where it is.
    pub(super) fn pins(&self, slot: SlotId) -> u64 {
        self.pins.total(slot, self.at(slot).pins)
    }

    /// A block of the tier hangs on that in `slot` from now on.
    pub(super) fn gain_child(&mut self, slot: SlotId) {
        let own = self.at(slot).children;
        self.at_mut(slot).children = self.children.add(slot, own.into()) as u8;
    }

    /// One less. Returns whether it was the last.
    pub(super) fn lose_child(&mut self, slot: SlotId) -> bool {
        let own = self.at(slot).children;
        self.at_mut(slot).children = self.children.take(slot, own.into()) as u8;
        self.at(slot).is_leaf()
    }

    /// Blocks of the tier that hang on that in `slot`.
    pub(super) fn children(&self, slot: SlotId) -> u64 {
        self.children.total(slot, self.at(slot).children.into())
    }

    /// The slots from `from` on that hold blocks, as far as one step of `most` slots goes, and where the next begins.
    pub(super) fn step(&self, from: u32, most: usize) -> (impl Iterator<Item = u32> + '_, Option<u32>) {
        let end = (from as usize + most).min(self.slots.len()) as u32;
        let holds_block = |slot: &u32| self.at(SlotId(*slot)).record != Slot::EMPTY.record;
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
        self.slots[index] = Slot::holding(record);
        self.forgotten.renew(slot);
        self.resident += 1;
        self.stats.published += 1;
    }

    /// As far as the tier has been used: a disk of a hundred million slots must not cost a gigabyte at the start. And a
    /// little at a time, since the lock is held.
    fn make_room_for(&mut self, slots: usize) {
        let total = self.pool.total() as usize;
        if slots > self.slots.capacity() {
            let more = (slots + slots / 8 + STEP).min(total);
            self.slots.reserve_exact(more.max(slots) - self.slots.len());
        }
        self.slots.resize((slots + STEP).min(total).max(slots), Slot::EMPTY);
    }

    /// The memory of the slots that are used next for the first time.
    pub(super) fn ahead(&mut self) -> impl Iterator<Item = Ahead> {
        let soon = STEP + soon(self.slots.len());
        self.slots.ahead(soon).into_iter().chain(self.pool.ahead(soon))
    }

    /// Has a block flushed, or asked about. A block that waits already keeps its place.
    pub(super) fn queue(&mut self, entry: Dirty) {
        if !self.at(entry.slot).is_queued() && !self.is_forgotten(entry.slot) {
            self.at_mut(entry.slot).set_queued(true);
            // Behind its parent, which was published before it: the queue is root-first along every chain.
            self.dirty.push_back(entry);
            self.forget_stale_entries();
        }
    }

    /// Blocks leave while the tier below is away, and their entries stay. So that the queues are in proportion to the
    /// tier all the same, they are gone through once as many entries have come as may be stale.
    fn forget_stale_entries(&mut self) {
        const SPARE: usize = 1_024;
        let slots = &self.slots;
        let stands = |entry: &Dirty| {
            let slot = slots[entry.slot.0 as usize];
            slot.record == entry.record && slot.is_queued()
        };
        let most = 2 * self.resident as usize + SPARE;
        if self.dirty.len() > most {
            self.dirty.retain(stands);
        }
        if self.retries.len() > most {
            self.retries.retain(|_, entry| stands(entry));
        }
    }

    /// Puts back what was taken out and could not be dealt with.
    pub(super) fn queue_first(&mut self, entry: Dirty) {
        self.at_mut(entry.slot).set_queued(true);
        self.dirty.push_front(entry);
    }

    /// What waits longest.
    pub(super) fn next_dirty(&mut self) -> Option<Dirty> {
        let entry = self.dirty.pop_front()?;
        // The slot may be another block's by now, whose own entry is elsewhere in the queue.
        if self.at(entry.slot).record == entry.record {
            self.at_mut(entry.slot).set_queued(false);
        }
        Some(entry)
    }

    /// Has a failed flush tried again after a pause. Until then the block may leave.
    pub(super) fn retry_later(&mut self, entry: Dirty, now_ms: u64) {
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

    /// Lets a block leave unflushed, and has it flushed at `due_ms` if it is still there.
    pub(super) fn put_off(&mut self, entry: Dirty, due_ms: u64) {
        let slot = self.at_mut(entry.slot);
        if !slot.is_queued() {
            slot.set_queued(true);
            slot.skip_flush();
            self.put_off += 1;
            self.retries.insert((due_ms, self.put_off), entry);
            self.reconsider(entry.slot);
            self.forget_stale_entries();
        }
    }

    /// Has those failed flushes tried again whose pause is over by `now_ms`.
    pub(super) fn revive_flushes(&mut self, now_ms: u64) {
        while let Some(due) = self.retries.first_entry().filter(|due| due.key().0 <= now_ms) {
            let entry = due.remove();
            let slot = self.at_mut(entry.slot);
            if slot.record == entry.record {
                slot.want_flush();
                // Due at once: it has waited before.
                self.dirty.push_back(Dirty { since_ms: 0, ..entry });
            }
        }
    }

    /// A block reached the tier below: the next failure starts with a short pause again.
    pub(super) const fn flush_succeeded(&mut self) {
        (self.retry_at_ms, self.retry_pause_ms) = (0, FIRST_PAUSE_MS);
    }

    /// Whether the tier below has the block, or need not have it.
    pub(super) fn is_clean(&self, slot: SlotId, records: &Records) -> bool {
        let held = self.at(slot);
        let is_wanted = !held.skips_flush() && !self.is_flush_blocked && !self.is_forgotten(slot);
        let below = self.flush_to.filter(|_| is_wanted);
        below.is_none_or(|below| records.at(held.record).resident().has(below))
    }

    /// Whether a block is to go down, or to be asked about, and has not been.
    pub(super) fn is_unflushed(&self, slot: SlotId, records: &Records) -> bool {
        let held = self.at(slot);
        let lacks = |below: Tier| !records.at(held.record).resident().has(below);
        held.is_queued()
            && !self.is_withdrawn
            && !self.is_forgotten(slot)
            && !self.policies.has_admission()
            && self.flush_to.is_some_and(lacks)
    }
}
