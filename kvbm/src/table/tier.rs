//! One tier of the table: its slots, who sits in them, and the policy that ranks them.

use std::collections::{BTreeMap, HashMap, VecDeque};

use kvbm_policies::{
    Access, Admission, BlockId, Candidates, Eviction, Forest, Moment, RequestId, Standing, Upkeep,
};
use kvbm_tiers::{BlockKey, FramePool, HugeVec, SlotId, Tier};

use super::index::RecordId;
use super::record::Records;
use super::visit::Usage;

/// What the table is told about a tier.
#[derive(Debug)]
pub struct TierSpec {
    /// The titles to its slots. Those already taken are not the table's.
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

/// A resident block's place. 12 bytes; without meaning while the slot is free or filling.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) record: RecordId,
    pub(super) children: u32,
    /// Pins in the upper 24 bits, flags below.
    state: u32,
}

const CONDEMNED: u32 = 1;
const WAIVED: u32 = 2;
const QUEUED: u32 = 4;
const ONE_PIN: u32 = 1 << 8;

impl Slot {
    pub(super) const EMPTY: Self = Self { record: RecordId(u32::MAX), children: 0, state: 0 };

    pub(super) const fn holding(record: RecordId) -> Self {
        Self { record, children: 0, state: 0 }
    }

    pub(super) const fn pins(self) -> u32 {
        self.state / ONE_PIN
    }

    /// False when the count is at its limit (16 million leases of one block).
    pub(super) const fn pin(&mut self) -> bool {
        let (state, overflow) = self.state.overflowing_add(ONE_PIN);
        if !overflow {
            self.state = state;
        }
        !overflow
    }

    /// Whether this was the last pin.
    pub(super) const fn unpin(&mut self) -> bool {
        debug_assert!(self.pins() > 0, "a lease was released twice");
        self.state -= ONE_PIN;
        self.pins() == 0
    }

    /// Its bytes are bad: nobody new may find it, its readers may finish.
    pub(super) const fn is_condemned(self) -> bool {
        self.state & CONDEMNED != 0
    }

    pub(super) const fn condemn(&mut self) {
        self.state |= CONDEMNED;
    }

    /// It is to be flushed after all.
    pub(super) const fn ask(&mut self) {
        self.state &= !WAIVED;
    }

    /// It may be evicted although the tier below lacks it.
    pub(super) const fn is_waived(self) -> bool {
        self.state & WAIVED != 0
    }

    pub(super) const fn waive(&mut self) {
        self.state |= WAIVED;
    }

    /// It waits in the queue of dirty blocks: once is enough, however often it is used.
    pub(super) const fn is_queued(self) -> bool {
        self.state & QUEUED != 0
    }

    const fn set_queued(&mut self, queued: bool) {
        self.state = if queued { self.state | QUEUED } else { self.state & !QUEUED };
    }
}

/// A block that waits for its flush. Stale entries are recognised by the slot's occupant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dirty {
    pub(super) slot: SlotId,
    pub(super) record: RecordId,
    pub(super) since_ms: u64,
    /// Of the request that brought it.
    pub(super) usage: Usage,
}

/// Slots of quarantined blocks that still have readers; they are freed together when the last one leaves.
#[derive(Debug)]
pub(super) struct Ward {
    /// Each with how many blocks below the anchor it was.
    pub(super) slots: HashMap<SlotId, u32>,
    pub(super) pins: u32,
    /// The pinned parent of the topmost of them.
    pub(super) anchor: Option<SlotId>,
}

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
    pub(super) policy: Box<dyn Eviction>,
    pub(super) flush_to: Option<Tier>,
    pub(super) admission: Option<Box<dyn Admission>>,
    pub(super) dirty: VecDeque<Dirty>,
    /// Failed flushes by when they are due; the second number tells those of one time apart, in their order.
    pub(super) retries: BTreeMap<(u64, u64), Dirty>,
    put_off: u64,
    /// When failed flushes are tried again, and how much later if they fail once more.
    retry_at_ms: u64,
    retry_pause_ms: u64,
    /// The tier below cannot be written now: what is dirty may leave without it.
    pub(super) is_flush_blocked: bool,
    pub(super) wards: Vec<Ward>,
    pub(super) resident: u32,
    /// Slots that an overdue copy may still touch.
    pub(super) lost: u32,
    /// Somebody found no room although blocks only wait to be flushed.
    pub(super) pressed: bool,
    pub(super) stats: TierStats,
}

impl TierTable {
    pub(super) fn new(spec: TierSpec) -> Self {
        Self {
            tier: spec.pool.tier(),
            total: spec.pool.total() - spec.pool.out(),
            pool: spec.pool,
            slots: HugeVec::with_capacity(0),
            policy: spec.policy,
            flush_to: spec.flush_to,
            admission: spec.admission,
            dirty: VecDeque::new(),
            retries: BTreeMap::new(),
            put_off: 0,
            retry_at_ms: 0,
            retry_pause_ms: FIRST_PAUSE_MS,
            is_flush_blocked: false,
            wards: Vec::new(),
            resident: 0,
            lost: 0,
            pressed: false,
            stats: TierStats::default(),
        }
    }

    pub(super) fn at(&self, slot: SlotId) -> &Slot {
        &self.slots[slot.0 as usize]
    }

    pub(super) fn at_mut(&mut self, slot: SlotId) -> &mut Slot {
        &mut self.slots[slot.0 as usize]
    }

    /// Puts `record` into `slot`, growing the array as far as the tier has been used so far.
    pub(super) fn settle(&mut self, slot: SlotId, record: RecordId) {
        let index = slot.0 as usize;
        if index >= self.slots.len() {
            self.make_room_for(index + 1);
        }
        self.slots[index] = Slot::holding(record);
        self.resident += 1;
        self.stats.published += 1;
    }

    fn make_room_for(&mut self, slots: usize) {
        if slots > self.slots.capacity() {
            let more = (slots + slots / 8 + 1024).min(self.pool.total() as usize);
            self.slots.reserve_exact(more.max(slots) - self.slots.len());
        }
        self.slots.resize(slots, Slot::EMPTY);
    }

    /// The ward in which a condemned slot lies.
    pub(super) fn ward_of(&self, slot: SlotId) -> usize {
        let ward = self.wards.iter().position(|ward| ward.slots.contains_key(&slot));
        ward.expect("a condemned slot lies in a ward")
    }

    /// The policy, and the tier as it may see it. Where a rule decides what goes down, a leaf that has not been
    /// flushed may be named as victim: it is what the rule is asked about.
    pub(super) fn policy_and_structure<'a>(
        &'a mut self,
        records: &'a Records,
    ) -> (&'a mut dyn Eviction, Structure<'a>) {
        let awaited = self.flush_to.filter(|_| self.admission.is_none() && !self.is_flush_blocked);
        (self.policy.as_mut(), Structure { tier: self.tier, slots: &self.slots, awaited, records })
    }

    /// What leaves next, flushed or not.
    pub(super) fn next_to_leave(&mut self, records: &Records) -> Option<SlotId> {
        let (policy, structure) = self.policy_and_structure(records);
        policy.victim(&structure).map(|block| SlotId(block.0))
    }

    /// What may leave at once; `None` also where what leaves next must be flushed first.
    pub(super) fn victim(&mut self, records: &Records) -> Option<SlotId> {
        self.next_to_leave(records).filter(|&leaf| self.is_clean(leaf, records))
    }

    /// Has a block flushed, or asked about. A block that waits already keeps its place.
    pub(super) fn queue(&mut self, entry: Dirty) {
        if !self.at(entry.slot).is_queued() {
            self.at_mut(entry.slot).set_queued(true);
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
            slot.waive();
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
                slot.ask();
                self.dirty.push_back(Dirty { since_ms: 0, ..entry });
            }
        }
    }

    /// A block reached the tier below: the next failure starts with a short pause again.
    pub(super) const fn flush_succeeded(&mut self) {
        (self.retry_at_ms, self.retry_pause_ms) = (0, FIRST_PAUSE_MS);
    }

    /// So many admitted blocks were not written.
    pub(super) fn refund(&mut self, blocks: usize) {
        if let Some(admission) = &mut self.admission {
            admission.refund(blocks as u32);
        }
    }

    /// Whether the tier below has the block, or need not have it.
    pub(super) fn is_clean(&self, slot: SlotId, records: &Records) -> bool {
        let held = self.at(slot);
        let below = self.flush_to.filter(|_| !held.is_waived() && !self.is_flush_blocked);
        below.is_none_or(|below| records.at(held.record).resident().has(below))
    }

    /// Whether a block is to go down, or to be asked about, and has not been.
    pub(super) fn is_unflushed(&self, slot: SlotId, records: &Records) -> bool {
        let held = self.at(slot);
        let lacks = |below: Tier| !records.at(held.record).resident().has(below);
        held.is_queued() && self.admission.is_none() && self.flush_to.is_some_and(lacks)
    }

    /// How many of the candidates go down.
    pub(super) fn admit(
        &mut self,
        candidates: Candidates,
        moment: Moment,
        now_ms: u64,
        records: &Records,
    ) -> u32 {
        let structure = Structure { tier: self.tier, slots: &self.slots, awaited: None, records };
        let admission = self.admission.as_mut();
        admission.map_or(candidates.blocks, |rule| rule.admit(candidates, moment, now_ms, &structure))
    }

    /// Reports a use to the policies.
    pub(super) fn touch(&mut self, access: &Access, records: &Records) {
        let (policy, structure) = self.policy_and_structure(records);
        policy.touch(access, &structure);
        if let Some(admission) = &mut self.admission {
            let structure = Structure { tier: self.tier, slots: &self.slots, awaited: None, records };
            admission.touch(access, &structure);
        }
    }

    /// Reports to the policies that a block left.
    pub(super) fn forget(&mut self, slot: SlotId, exposed: Option<BlockId>) {
        self.policy.remove(BlockId(slot.0), exposed);
        if let Some(admission) = &mut self.admission {
            admission.remove(BlockId(slot.0), exposed);
        }
    }

    /// Reports to the policies that a request has ended.
    pub(super) fn finished(&mut self, request: RequestId, output_tokens: u32, now_ms: u64) {
        self.policy.finished(request, output_tokens, now_ms);
        if let Some(admission) = &mut self.admission {
            admission.finished(request, output_tokens, now_ms);
        }
    }

    /// What the policies want done elsewhere.
    pub(super) fn upkeep(&mut self) -> impl Iterator<Item = Upkeep> {
        let admission = self.admission.as_mut().and_then(|rule| rule.upkeep());
        self.policy.upkeep().into_iter().chain(admission)
    }

    /// Tells the policy about a leaf that may have become evictable.
    pub(super) fn reconsider(&mut self, slot: SlotId) {
        let held = self.at(slot);
        if held.children == 0 && held.pins() == 0 && !held.is_condemned() {
            self.policy.release(BlockId(slot.0));
        }
    }
}

/// The tier as its policy may see it.
pub(super) struct Structure<'a> {
    tier: Tier,
    slots: &'a [Slot],
    /// The tier that must have a block before it may leave this one.
    awaited: Option<Tier>,
    records: &'a Records,
}

impl Forest for Structure<'_> {
    fn standing(&self, block: BlockId) -> Standing {
        let held = self.slots[block.0 as usize];
        let is_clean = || {
            let awaited = self.awaited.filter(|_| !held.is_waived());
            awaited.is_none_or(|below| self.records.at(held.record).resident().has(below))
        };
        match held {
            Slot { children: 1.., .. } => Standing::Interior,
            held if held.pins() == 0 && is_clean() => Standing::Evictable,
            _ => Standing::Busy,
        }
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        let parent = self.records.at(self.slots[block.0 as usize].record).parent()?;
        Some(BlockId(self.records.at(parent).slot(self.tier).0))
    }

    fn key(&self, block: BlockId) -> u64 {
        content(self.records.at(self.slots[block.0 as usize].record).key())
    }
}

/// Names a block's content to a policy.
pub(super) const fn content(key: BlockKey) -> u64 {
    key.hash as u64 ^ key.group as u64
}
