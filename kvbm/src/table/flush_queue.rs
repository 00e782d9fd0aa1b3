//! Blocks of a tier that wait to be flushed.
//!
//! Each has one entry, found by its slot, so that an entry goes with its block: none is ever stale,
//! and no queue needs thinning. Entries lie in chunks that never move, and are linked in the order
//! in which they are due.

use std::collections::BTreeMap;

use kvbm_tiers::{Ahead, HugeVec, SlotId};

use super::budget::touched;
use super::index::RecordId;
use super::policy::RequestInfo;

/// A block that waits for its flush.
#[derive(Clone, Copy, Debug)]
pub(super) struct DirtyBlock {
    pub(super) slot: SlotId,
    pub(super) record: RecordId,
    pub(super) since_ms: u64,
    /// The request that brought it.
    pub(super) info: RequestInfo,
}

/// Blocks that wait for their turn, and blocks that are put off.
#[derive(Debug)]
pub(super) struct FlushQueue {
    entries: Entries,
    /// By slot: the number of its entry, if that entry is of this slot. Else the number means
    /// nothing, so it need not be cleared when all entries go.
    numbers: HugeVec<u32>,
}

/// The entries alone: a reset takes them all, to drop them with the table unlocked.
#[derive(Debug)]
pub(super) struct Entries {
    chunks: Vec<Vec<Entry>>,
    /// The first unused entry; these are linked too.
    free: u32,
    waiting: List,
    /// Failures of one batch are due together, and there are few batches.
    put_off: BTreeMap<Due, List>,
    /// Entries of earlier rounds are due, whatever their time.
    round: u64,
}

/// When a block that is put off waits for its turn again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    round: u64,
    at_ms: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// `None`: it is unused.
    block: Option<DirtyBlock>,
    /// `None`: it waits for its turn.
    due: Option<Due>,
    before: u32,
    after: u32,
}

#[derive(Clone, Copy, Debug)]
struct List {
    first: u32,
    last: u32,
    len: usize,
}

/// Entries made at a time: adding more neither moves nor copies any.
const CHUNK: usize = 256;
const NONE: u32 = u32::MAX;

impl FlushQueue {
    /// For a tier of `slots` slots. Addresses only: the kernel provides memory as it is used.
    pub(super) fn with_room_for(slots: usize) -> Self {
        Self { entries: Entries::default(), numbers: HugeVec::with_capacity(slots) }
    }

    /// Makes it ready for blocks in the first `slots` slots.
    pub(super) fn reach(&mut self, slots: usize) {
        if slots > self.numbers.capacity() {
            self.numbers.reserve_exact(slots / 8);
        }
        self.numbers.resize(slots, NONE);
    }

    /// The memory of the next `slots` slots.
    pub(super) fn ahead(&mut self, slots: usize) -> Option<Ahead> {
        self.numbers.ahead(slots)
    }

    /// Takes all entries out.
    pub(super) fn take_all(&mut self) -> Entries {
        std::mem::take(&mut self.entries)
    }

    /// Blocks that wait for their turn.
    pub(super) const fn waiting(&self) -> usize {
        self.entries.waiting.len
    }

    /// Whether no block waits, or is put off.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether the block in `slot` waits, or is put off.
    pub(super) fn has(&self, slot: SlotId) -> bool {
        self.number(slot).is_some()
    }

    /// The block that waits longest.
    pub(super) fn first(&self) -> Option<&DirtyBlock> {
        self.entries.get(self.entries.waiting.first)?.block.as_ref()
    }

    /// Puts the block behind all that wait. One that has an entry keeps its place.
    pub(super) fn push_last(&mut self, block: DirtyBlock) {
        if !self.has(block.slot) {
            self.numbers[block.slot.0 as usize] = self.entries.push_last(block, None);
        }
    }

    /// Puts the block before all that wait, wherever it waited. One that is put off stays so.
    pub(super) fn push_first(&mut self, block: DirtyBlock) {
        let known = self.number(block.slot);
        if known.is_some_and(|number| self.entries.at(number).due.is_some()) {
            return;
        }
        known.into_iter().for_each(|number| _ = self.entries.remove(number));
        self.numbers[block.slot.0 as usize] = self.entries.push_first(block);
    }

    pub(super) fn pop_first(&mut self) -> Option<DirtyBlock> {
        self.entries.remove(self.entries.waiting.first)
    }

    /// Has the block wait for its turn again at `due_ms`. One that has an entry keeps its place.
    pub(super) fn put_off(&mut self, block: DirtyBlock, due_ms: u64) {
        if !self.has(block.slot) {
            let due = Due { round: self.entries.round, at_ms: due_ms };
            self.numbers[block.slot.0 as usize] = self.entries.push_last(block, Some(due));
        }
    }

    /// Makes all that are put off due.
    pub(super) const fn make_due(&mut self) {
        self.entries.round += 1;
    }

    /// Whether the time of any has come.
    pub(super) fn has_due(&self, now_ms: u64) -> bool {
        self.entries.next_due(now_ms).is_some()
    }

    /// Takes out a block whose time has come.
    pub(super) fn pop_due(&mut self, now_ms: u64) -> Option<DirtyBlock> {
        let number = self.entries.next_due(now_ms)?;
        self.entries.remove(number)
    }

    /// Takes out the entry of the block in `slot`.
    pub(super) fn remove(&mut self, slot: SlotId) {
        if let Some(number) = self.number(slot) {
            self.entries.remove(number);
        }
    }

    fn number(&self, slot: SlotId) -> Option<u32> {
        let number = *self.numbers.get(slot.0 as usize)?;
        let block = self.entries.get(number)?.block.as_ref();
        block.is_some_and(|block| block.slot == slot).then_some(number)
    }
}

impl Entries {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.waiting.len + self.put_off.values().map(|list| list.len).sum::<usize>()
    }

    fn is_empty(&self) -> bool {
        // No list in `put_off` is empty.
        self.waiting.len == 0 && self.put_off.is_empty()
    }

    fn next_due(&self, now_ms: u64) -> Option<u32> {
        let (due, list) = self.put_off.first_key_value()?;
        (due.round < self.round || due.at_ms <= now_ms).then_some(list.first)
    }

    fn get(&self, number: u32) -> Option<&Entry> {
        touched();
        self.chunks.get(number as usize / CHUNK)?.get(number as usize % CHUNK)
    }

    fn at(&self, number: u32) -> &Entry {
        &self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    fn at_mut(&mut self, number: u32) -> &mut Entry {
        &mut self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    fn add(&mut self, entry: Entry) -> u32 {
        if self.free == NONE {
            self.add_chunk();
        }
        let number = self.free;
        self.free = std::mem::replace(self.at_mut(number), entry).after;
        number
    }

    fn add_chunk(&mut self) {
        let first = (self.chunks.len() * CHUNK) as u32;
        let last = first + CHUNK as u32 - 1;
        let unused = |number: u32| {
            let after = if number == last { NONE } else { number + 1 };
            Entry { block: None, due: None, before: NONE, after }
        };
        self.chunks.push((first..=last).map(unused).collect());
        self.free = first;
    }

    /// Takes an entry out of its list; `None`: there is no such entry.
    fn remove(&mut self, number: u32) -> Option<DirtyBlock> {
        let Entry { block, due, before, after } = *self.get(number)?;
        self.list(due).len -= 1;
        match before {
            NONE => self.list(due).first = after,
            before => self.at_mut(before).after = after,
        }
        match after {
            NONE => self.list(due).last = before,
            after => self.at_mut(after).before = before,
        }
        if let Some(due) = due.filter(|&due| self.list(Some(due)).len == 0) {
            self.put_off.remove(&due);
        }
        *self.at_mut(number) = Entry { block: None, due: None, before: NONE, after: self.free };
        self.free = number;
        block
    }

    fn push_last(&mut self, block: DirtyBlock, due: Option<Due>) -> u32 {
        let before = self.list(due).last;
        let number = self.add(Entry { block: Some(block), due, before, after: NONE });
        match before {
            NONE => self.list(due).first = number,
            before => self.at_mut(before).after = number,
        }
        let list = self.list(due);
        (list.last, list.len) = (number, list.len + 1);
        number
    }

    fn push_first(&mut self, block: DirtyBlock) -> u32 {
        let after = self.waiting.first;
        let number = self.add(Entry { block: Some(block), due: None, before: NONE, after });
        match after {
            NONE => self.waiting.last = number,
            after => self.at_mut(after).before = number,
        }
        (self.waiting.first, self.waiting.len) = (number, self.waiting.len + 1);
        number
    }

    fn list(&mut self, due: Option<Due>) -> &mut List {
        match due {
            Some(due) => self.put_off.entry(due).or_default(),
            None => &mut self.waiting,
        }
    }
}

impl Default for Entries {
    fn default() -> Self {
        let (waiting, put_off) = (List::default(), BTreeMap::new());
        Self { chunks: Vec::new(), free: NONE, waiting, put_off, round: 0 }
    }
}

impl Default for List {
    fn default() -> Self {
        Self { first: NONE, last: NONE, len: 0 }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Last(u32),
        First(u32),
        PutOff(u32, u64),
        Pop,
        PopDue(u64),
        Remove(u32),
        MakeDue,
        TakeAll,
    }

    fn step() -> impl Strategy<Value = Step> {
        let slot = 0..12u32;
        prop_oneof![
            4 => slot.clone().prop_map(Step::Last),
            2 => slot.clone().prop_map(Step::First),
            4 => (slot.clone(), 0..6u64).prop_map(|(slot, due)| Step::PutOff(slot, due)),
            2 => Just(Step::Pop),
            3 => (0..6u64).prop_map(Step::PopDue),
            3 => slot.prop_map(Step::Remove),
            1 => Just(Step::MakeDue),
            1 => Just(Step::TakeAll),
        ]
    }

    fn dirty(slot: u32) -> DirtyBlock {
        DirtyBlock {
            slot: SlotId(slot),
            record: RecordId(slot),
            since_ms: 0,
            info: RequestInfo::default(),
        }
    }

    /// Slots in their order, with the time when they are due: 0 if all are.
    #[derive(Default)]
    struct Model {
        waiting: VecDeque<u32>,
        put_off: Vec<(u64, u64, u32)>,
        round: u64,
    }

    impl Model {
        fn has(&self, slot: u32) -> bool {
            self.waiting.contains(&slot) || self.is_put_off(slot)
        }

        fn is_put_off(&self, slot: u32) -> bool {
            self.put_off.iter().any(|&(.., other)| other == slot)
        }

        fn take(&mut self, step: Step) -> Option<u32> {
            match step {
                Step::Last(slot) if !self.has(slot) => self.waiting.push_back(slot),
                Step::First(slot) if !self.is_put_off(slot) => {
                    self.waiting.retain(|&other| other != slot);
                    self.waiting.push_front(slot);
                }
                // Of one time, the first to come is the first to go.
                Step::PutOff(slot, due) if !self.has(slot) => {
                    let key = (self.round, due);
                    let at = self.put_off.partition_point(|&(round, due, _)| (round, due) <= key);
                    self.put_off.insert(at, (self.round, due, slot));
                }
                Step::Pop => return self.waiting.pop_front(),
                Step::PopDue(now) => {
                    let &(round, due, slot) = self.put_off.first()?;
                    let is_due = round < self.round || due <= now;
                    return is_due.then(|| {
                        self.put_off.remove(0);
                        slot
                    });
                }
                Step::Remove(slot) => {
                    self.waiting.retain(|&other| other != slot);
                    self.put_off.retain(|&(.., other)| other != slot);
                }
                Step::MakeDue => self.round += 1,
                Step::TakeAll => *self = Self::default(),
                Step::Last(_) | Step::First(_) | Step::PutOff(..) => {}
            }
            None
        }
    }

    proptest! {
        #[test]
        fn each_block_has_one_place_in_the_order(steps in prop::collection::vec(step(), 0..200)) {
            let (mut queue, mut model) = (FlushQueue::with_room_for(12), Model::default());
            queue.reach(12);
            for step in steps {
                let popped = match step {
                    Step::Last(slot) => { queue.push_last(dirty(slot)); None }
                    Step::First(slot) => { queue.push_first(dirty(slot)); None }
                    Step::PutOff(slot, due) => { queue.put_off(dirty(slot), due); None }
                    Step::Pop => queue.pop_first(),
                    Step::PopDue(now) => queue.pop_due(now),
                    Step::Remove(slot) => { queue.remove(SlotId(slot)); None }
                    Step::MakeDue => { queue.make_due(); None }
                    Step::TakeAll => { drop(queue.take_all()); None }
                };
                prop_assert_eq!(popped.map(|block| block.slot.0), model.take(step));
                prop_assert_eq!(queue.waiting(), model.waiting.len());
                prop_assert_eq!(queue.is_empty(), model.waiting.is_empty() && model.put_off.is_empty());
                prop_assert_eq!(queue.first().map(|first| first.slot.0), model.waiting.front().copied());
                prop_assert!((0..12).all(|slot| queue.has(SlotId(slot)) == model.has(slot)));
            }
        }
    }

    /// An entry is added under the table's lock.
    #[test]
    fn entries_stay_where_they_are_while_there_are_more() {
        let mut queue = FlushQueue::with_room_for(0);
        queue.reach(100 * CHUNK);
        queue.push_last(dirty(0));
        let place: *const Entry = queue.entries.at(0);
        (1..100 * CHUNK as u32).for_each(|slot| queue.push_last(dirty(slot)));
        assert_eq!(&raw const *queue.entries.at(0), place);
        (0..100 * CHUNK as u32).for_each(|slot| queue.remove(SlotId(slot)));
        queue.push_last(dirty(7));
        assert_eq!(
            (queue.entries.chunks.len(), queue.waiting()),
            (100, 1),
            "entries are used again"
        );
    }
}
