//! Making blocks resident again after a restart, and blocks that others have stored since.
//!
//! A list of what lay in the slots may lack entries, or have too many: it is taken as far as it
//! makes sense. Blocks come root-first, in any order of the list, and one whose parent is missing
//! is left out: its slot is free.

use std::collections::{HashMap, HashSet};

use foldhash::fast::RandomState;
use kvbm_tiers::object::{Discovery, FoundBlock};
use kvbm_tiers::{BlockKey, Frame, IndexEntry, SlotId, Tier};

use super::index::RecordId;
use super::{RequestContext, RequestInfo, Table};
use crate::observe::events::StoreReason;

/// What became of a list of a tier's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that are resident again.
    pub blocks: usize,
    /// Entries that were left out: blocks without those before them; the first of two blocks in one
    /// slot, or of two slots of one block; blocks in slots that are taken or no longer exist.
    pub dropped: usize,
}

/// A block to make resident again, and its slot if that is available.
struct PendingRestore<'a> {
    entry: &'a IndexEntry,
    frame: Option<Frame>,
}

/// Blocks restored one below another: policies hear of them together.
#[derive(Clone, Copy)]
struct RestoredRun {
    last: RecordId,
    blocks: u32,
}

/// What became of an entry.
enum RestoreOutcome {
    Resident(RecordId),
    /// Its parent is not there yet.
    Waits(BlockKey),
    Dropped,
}

impl Table {
    /// Makes the blocks that lay in `tier` resident again; `entries` are in the order in which they
    /// were stored, by the present names of blocks. Takes time in proportion to the slots used so
    /// far: it is for the start.
    pub fn restore(&mut self, tier: Tier, entries: &[IndexEntry]) -> Restored {
        let latest = latest(entries);
        let slots: Vec<_> = latest.iter().map(|entry| entry.slot).collect();
        let frames = self.tier_mut(tier).pool.take_these(&slots);
        let mut pending: Vec<_> = latest
            .into_iter()
            .zip(frames)
            .map(|(entry, frame)| PendingRestore { entry, frame })
            .collect();
        let blocks = self.restore_pending(tier, &mut pending);
        let pool = &mut self.tier_mut(tier).pool;
        pending.into_iter().filter_map(|left| left.frame).for_each(|frame| pool.give_back(frame));
        Restored { blocks, dropped: entries.len() - blocks }
    }

    /// Makes blocks that others have stored in `tier` resident, as far as there are free slots:
    /// nothing is evicted for them. Before a block can be found, `stand_for` makes its slot hold
    /// it. A block whose parent is missing waits, so parents go first.
    pub fn take_in(
        &mut self,
        tier: Tier,
        found: &[FoundBlock],
        stand_for: &mut dyn FnMut(usize, SlotId),
    ) -> Vec<Discovery> {
        let mut run = None;
        let mut intakes = Vec::with_capacity(found.len());
        for (at, found) in found.iter().enumerate() {
            let record = self.take_in_block(tier, found, &mut |slot| stand_for(at, slot));
            run = record.map_or(run, |record| Some(self.continue_run(tier, run, record)));
            intakes.push(record.map_or_else(|declined| declined, |_| Discovery::Taken));
        }
        run.into_iter().for_each(|run| self.tell_of_run(tier, run));
        intakes
    }

    fn take_in_block(
        &mut self,
        tier: Tier,
        &FoundBlock { block, parent, tenant }: &FoundBlock,
        stand_for: &mut dyn FnMut(SlotId),
    ) -> Result<RecordId, Discovery> {
        let above = parent.map(|hash| BlockKey { hash, group: block.group });
        let parent = above.and_then(|above| self.resident(tier, above));
        // Whether it was stored before or after is unknown, and its key may be destroyed.
        let is_forgotten = tenant.is_some_and(|tenant| self.owners.was_forgotten(tenant));
        if is_forgotten || !self.is_in_use(tier) {
            return Err(Discovery::Declined);
        }
        if above.is_some() && parent.is_none_or(|parent| self.is_dropped(parent)) {
            return Err(Discovery::Waits);
        }
        if self.has_another(tier, block, parent) {
            return Err(Discovery::Declined);
        }
        let frame = self.tier_mut(tier).pool.take().ok_or(Discovery::Waits)?;
        self.restore_in(frame, block, parent, tenant, stand_for).ok_or(Discovery::Waits)
    }

    /// The life in which a slot of `tier` has a block; `None`: it has none.
    pub fn life(&self, tier: Tier, slot: SlotId) -> Option<u32> {
        self.tier(tier).pool.resident_ref(slot).map(|at| at.generation)
    }

    fn restore_pending(&mut self, tier: Tier, pending: &mut [PendingRestore<'_>]) -> usize {
        let mut waiting: HashMap<BlockKey, Vec<usize>, RandomState> = HashMap::default();
        let (mut blocks, mut run) = (0, None);
        for next in 0..pending.len() {
            let mut ready = vec![next];
            while let Some(at) = ready.pop() {
                match self.restore_block(tier, &mut pending[at]) {
                    RestoreOutcome::Resident(record) => {
                        blocks += 1;
                        run = Some(self.continue_run(tier, run, record));
                        let children = waiting.remove(&pending[at].entry.block);
                        ready.extend(children.into_iter().flatten().rev());
                    }
                    RestoreOutcome::Waits(parent) => waiting.entry(parent).or_default().push(at),
                    RestoreOutcome::Dropped => {}
                }
            }
        }
        run.into_iter().for_each(|run| self.tell_of_run(tier, run));
        blocks
    }

    fn restore_block(&mut self, tier: Tier, pending: &mut PendingRestore<'_>) -> RestoreOutcome {
        let &IndexEntry { block, parent, tenant, .. } = pending.entry;
        let above = parent.map(|hash| BlockKey { hash, group: block.group });
        let parent = above.and_then(|above| self.resident(tier, above));
        if let Some(above) = above.filter(|_| parent.is_none()) {
            return RestoreOutcome::Waits(above);
        }
        if self.has_another(tier, block, parent) {
            return RestoreOutcome::Dropped;
        }
        let Some(frame) = pending.frame.take() else { return RestoreOutcome::Dropped };
        let restored = self.restore_in(frame, block, parent, tenant, &mut |_| ());
        restored.map_or(RestoreOutcome::Dropped, RestoreOutcome::Resident)
    }

    /// Whether the tier has or awaits the block already, or another tier has it below another
    /// parent.
    fn has_another(&self, tier: Tier, block: BlockKey, parent: Option<RecordId>) -> bool {
        let known = self.find(block).map(|record| self.records.at(record));
        known.is_some_and(|known| known.has_or_awaits(tier) || known.parent() != parent)
    }

    /// Makes a block resident in a frame's slot. Before it can be found, `stand_for` makes the slot
    /// hold it. `None`: there is no room for its record.
    fn restore_in(
        &mut self,
        frame: Frame,
        block: BlockKey,
        parent: Option<RecordId>,
        tenant: Option<u32>,
        stand_for: &mut dyn FnMut(SlotId),
    ) -> Option<RecordId> {
        let (tier, slot) = (frame.tier(), frame.slot());
        let owner = self.owners.present(tenant);
        let Some(record) = self.intern(block, parent, owner) else {
            self.tier_mut(tier).pool.give_back(frame);
            return None;
        };
        stand_for(slot);
        self.records.at_mut(record).begin(tier, slot);
        self.publish(record, frame, RequestInfo::default(), StoreReason::Restored);
        Some(record)
    }

    pub(super) fn resident(&self, tier: Tier, block: BlockKey) -> Option<RecordId> {
        self.find(block).filter(|&record| self.records.at(record).resident().has(tier))
    }

    fn continue_run(
        &mut self,
        tier: Tier,
        run: Option<RestoredRun>,
        record: RecordId,
    ) -> RestoredRun {
        match run {
            Some(run) if self.records.at(record).parent() == Some(run.last) => {
                RestoredRun { last: record, blocks: run.blocks + 1 }
            }
            ended => {
                ended.into_iter().for_each(|run| self.tell_of_run(tier, run));
                RestoredRun { last: record, blocks: 1 }
            }
        }
    }

    /// Which request used it is unknown.
    fn tell_of_run(&mut self, tier: Tier, run: RestoredRun) {
        let now_ms = self.now_ms;
        let (slot, depth) = (self.records.at(run.last).slot(tier), self.records.depth(run.last));
        let access = RequestContext::default().access(now_ms, slot, depth, run.blocks);
        let (held, records) = self.tier_and_records(tier);
        held.touch(&access, records);
    }
}

/// The last entry of each slot and of each block. Two names that fold into one cost a miss, one
/// time in billions.
fn latest(entries: &[IndexEntry]) -> Vec<&IndexEntry> {
    let (mut slots, mut blocks) = (set_of(entries.len()), set_of(entries.len()));
    let mut latest = Vec::with_capacity(entries.len());
    let is_latest =
        |entry: &&IndexEntry| slots.insert(entry.slot) && blocks.insert(entry.block.folded());
    latest.extend(entries.iter().rev().filter(is_latest));
    latest.reverse();
    latest
}

/// A set that does not grow while it is filled: growing took most of a restart's time.
fn set_of<T>(len: usize) -> HashSet<T, RandomState> {
    HashSet::with_capacity_and_hasher(len, RandomState::default())
}
