//! Transfers: blocks of one chain on their way into one tier, from the plan to the landing.
//!
//! | module | holds |
//! |---|---|
//! | `plan` | what a request lacks in a tier, and the slots for it: in steps that bound the lock |
//! | `land` | the results of copies: publication, failure, and the end |
//!
//! Copies end in any order, publication follows the chain: a block becomes resident when its bytes
//! are there and its parent is resident. A block that fails takes with it the rest of its transfer,
//! and every transfer that hangs on it. A transfer has ended when no more of its blocks can become
//! resident; it stays on the books until no medium uses its slots.

mod land;
mod plan;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::{BlockKey, Frame, SlotId, SlotRef, Tier};

use self::plan::EngineBlocks;
use super::budget::Budget;
use super::index::RecordId;
use super::namespace::{NamespaceId, Unflushed};
use super::pins::Pins;
use super::policy::RequestContext;
use super::record::TierSet;
use crate::names::hash::BlockHash;
use crate::observe::events::{EventBuffer, StoreReason};
use crate::task::{Class, CopyTask, Defect, TaskId, TransferId, WithMedia};

pub use self::land::TransferEnd;
pub use self::plan::{Filled, Reserved, Steps, TransferPlan};

/// What a transfer's first unpublished block hangs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransferParent {
    /// The block is a root.
    Root,
    /// The parent is resident in this slot, which the transfer pins.
    Resident(SlotId),
    /// The parent is on the way in another transfer.
    Awaited(RecordId),
}

/// Where a block goes.
#[derive(Clone, Copy, Debug)]
enum Destination {
    /// Into a tier, for this record.
    Tier(RecordId),
    /// Into a slot of the engine's own, which has no record: the block that the lease holds in
    /// `source`, unless it is dropped meanwhile.
    Engine { source: SlotRef },
}

/// A block on its way.
#[derive(Debug)]
struct BlockInTransfer {
    destination: Destination,
    slot: SlotId,
    /// The handle to its slot, unless the tier has it, or the engine, which fills or owns the slot.
    frame: Option<Frame>,
    state: BlockState,
    /// The host slot that its copy reads, pinned for that.
    source: Option<SlotId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockState {
    /// Its bytes are on the way, or will be.
    Coming,
    /// They are there; its parent is not there yet.
    Arrived,
    /// Given up, but a medium may still write them.
    Overdue,
    /// It is resident, or it failed and its slot is free.
    Ended,
}

impl BlockInTransfer {
    const fn record(&self) -> Option<RecordId> {
        match self.destination {
            Destination::Tier(record) => Some(record),
            Destination::Engine { .. } => None,
        }
    }
}

/// A block of a transfer: where a search among all blocks on their way goes on.
#[derive(Clone, Copy, Debug, Default)]
pub struct TransferCursor {
    /// The place of the transfer.
    place: u32,
    block: usize,
}

/// Who asked for a transfer.
#[derive(Debug)]
struct TransferCaller {
    /// The caller's lease. After the end it also holds the destination's part.
    pins: Pins,
    reply: Reply,
}

/// Handles the end of a transfer, once the table is unlocked.
pub struct Reply(Box<dyn FnOnce(TransferEnd) + Send>);

impl Reply {
    /// `reply` is called once.
    pub fn new(reply: impl FnOnce(TransferEnd) + Send + 'static) -> Self {
        Self(Box::new(reply))
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reply")
    }
}

/// One transfer.
#[derive(Debug)]
struct OpenTransfer {
    class: Class,
    to: Tier,
    context: RequestContext,
    /// The namespace of its blocks. Once it is past, nothing of the transfer lands.
    namespace: NamespaceId,
    parent: TransferParent,
    blocks: Vec<BlockInTransfer>,
    /// Leading blocks that are resident.
    published: usize,
    /// Blocks from here on have failed.
    alive: usize,
    /// Blocks from here on have been given up: their records no longer mention them. Those between
    /// `alive` and here have failed and will be given up.
    recorded: usize,
    /// Copies that a queue or a medium still has, and blocks that an engine fills.
    away: usize,
    /// Cancellations among the effects that are not made yet.
    cancellations: u32,
    /// How its blocks come, as listeners are told.
    reason: StoreReason,
    /// More blocks, or its caller, may still be added.
    is_open: bool,
    has_ended: bool,
    cut: TransferCut,
    /// The transfer of its blocks that stay in the host tier when they pass it, and the first of
    /// them here.
    kept: Option<(TransferId, usize)>,
    /// Pins what its copies read until media have finished the last of them, whether or not the
    /// caller keeps its lease.
    sources: Option<Pins>,
    caller: Option<TransferCaller>,
    /// Dropped when no medium uses its slots any more: the lender of the slots looks at that.
    with_media: Option<WithMedia>,
    /// Set for a save that relies on copies of others.
    relying: Option<EngineBlocks>,
    account: TransferAccount,
}

/// Whether a transfer has failed at its end, perhaps before its first block: then nothing can be
/// added behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferCut {
    /// Nothing has failed.
    Whole,
    /// It failed, or it was ended.
    Failed,
    /// All of it failed, because copies of others that it relied on did.
    LetDown,
}

/// What is reported about a transfer besides its blocks.
#[derive(Debug, Default)]
struct TransferAccount {
    /// Leading blocks of the chain that come before those of the transfer.
    before: usize,
    /// The last of them, root first: those that the caller's lease may not hold in the destination,
    /// because they came since or are on the way in other transfers.
    found: Vec<BlockKey>,
    /// Blocks that it should bring.
    blocks: usize,
    /// The engine's blocks that are there, or come, without it.
    duplicates: usize,
    recompute: usize,
    declined: usize,
    refused: usize,
    /// The tier that all its blocks come from, if there is one.
    source: Option<Tier>,
    started: Duration,
    /// When its last copy arrived.
    copied: Option<Duration>,
}

/// A save to plan anew, since it relied on copies of others that failed.
#[derive(Debug)]
pub struct SaveAgain {
    /// The new plan.
    pub plan: TransferPlan,
    /// Called with its end.
    pub reply: Reply,
}

/// Blocks that were dropped from a tier with a bad one.
#[derive(Clone, Copy, Debug)]
pub struct Dropped {
    /// The tier.
    pub tier: Tier,
    /// How many, descendants included.
    pub blocks: usize,
    /// What was wrong with the first.
    pub defect: Defect,
}

/// What a change of the table leads to once it is unlocked.
#[derive(Debug, Default)]
#[must_use]
pub struct Effects {
    /// Copies to make.
    pub tasks: Vec<CopyTask>,
    /// Blocks that a more urgent copy waits for than the one that queued them.
    pub awaited: Vec<BlockKey>,
    /// Transfers, and the block from which on their copies are useless.
    pub cancelled: Vec<(TransferId, u32)>,
    /// Transfers that have ended.
    pub ended: Vec<TransferEnd>,
    /// Saves to plan anew.
    pub again: Vec<SaveAgain>,
    /// Markers for lenders of slots to transfers that no medium has any more.
    pub released: Vec<WithMedia>,
    /// Blocks that were dropped.
    pub dropped: Vec<Dropped>,
    /// Blocks that left a tier, if a listener is set.
    pub(crate) left: Vec<LeftBlock>,
    /// Listeners for whom an event was noted.
    pub(crate) news: Vec<Arc<EventBuffer>>,
    /// Memory of transfers that are over. It is freed with the table unlocked: to free a large
    /// array the kernel interrupts every processor that the process runs on, and waits for each.
    pub(crate) spent: Vec<Spent>,
    /// Dirty blocks that were forgotten.
    pub unflushed: Vec<Unflushed>,
    /// More blocks can become resident than one step takes:
    /// [`Table::publish_more`](super::Table::publish_more) goes on.
    pub has_more: bool,
}

/// Only memory.
#[derive(Debug)]
#[expect(dead_code, reason = "it is kept to be dropped")]
pub(crate) struct Spent(Vec<BlockInTransfer>, Option<EngineBlocks>);

/// A block that left a tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeftBlock {
    pub(crate) tier: Tier,
    pub(crate) hash: BlockHash,
    /// Whether no tier has it any more.
    pub(crate) is_gone: bool,
}

/// What waits for a block that is on its way into a tier.
#[derive(Debug)]
enum BlockWaiter {
    /// A transfer that hangs on it.
    Transfer(TransferId),
    /// A copy that would else read it from further down.
    Copy(CopyTask),
}

/// All transfers on the books, what waits for what, and what to do after unlock.
#[derive(Debug, Default)]
pub(super) struct OpenTransfers {
    places: Vec<(u32, Option<OpenTransfer>)>,
    free: Vec<u32>,
    waiting: HashMap<(Tier, RecordId), Vec<BlockWaiter>>,
    effects: Effects,
    /// Transfers with blocks that can become resident.
    ready: Vec<TransferId>,
    /// Transfers with blocks to give up. One that hangs on another comes after it, and goes first.
    failed: Vec<TransferId>,
    is_closed: bool,
    /// Whether blocks that leave are noted.
    notes_left: bool,
}

impl TransferCursor {
    /// The first block of the next transfer.
    pub(super) const fn after(id: TransferId) -> Self {
        Self { place: id.place + 1, block: 0 }
    }
}

impl OpenTransfers {
    /// Notes blocks that leave a tier from here on.
    pub(super) const fn note_left_blocks(&mut self) {
        self.notes_left = true;
    }

    pub(super) const fn notes_left_blocks(&self) -> bool {
        self.notes_left
    }

    pub(super) fn note_left(&mut self, left: LeftBlock) {
        self.effects.left.push(left);
    }

    fn open(&mut self, transfer: OpenTransfer) -> TransferId {
        let awaited = transfer.awaited();
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            self.places.len() as u32 - 1
        });
        let (life, held) = &mut self.places[place as usize];
        *held = Some(transfer);
        let id = TransferId { place, life: *life };
        if let Some((tier, record)) = awaited {
            self.wait_for(tier, record, BlockWaiter::Transfer(id));
        }
        id
    }

    /// Begins an open transfer without copies anew. Returns whether it has been cut.
    fn reopen(&mut self, id: TransferId, transfer: OpenTransfer) -> bool {
        let awaited = transfer.awaited();
        let held = self.at_mut(id).expect("it is open until its plan is finished");
        let old = std::mem::replace(held, transfer);
        let was_cut = old.is_cut();
        self.effects.spent.push(Spent(old.blocks, old.relying));
        if let Some((tier, record)) = awaited {
            self.wait_for(tier, record, BlockWaiter::Transfer(id));
        }
        was_cut
    }

    fn at_mut(&mut self, id: TransferId) -> Option<&mut OpenTransfer> {
        let (life, transfer) = self.places.get_mut(id.place as usize)?;
        transfer.as_mut().filter(|_| *life == id.life)
    }

    fn remove(&mut self, id: TransferId) -> Option<OpenTransfer> {
        self.at_mut(id)?;
        let (life, transfer) = &mut self.places[id.place as usize];
        // A completion of an ended transfer must not find the next one in its place.
        *life = life.wrapping_add(1);
        self.free.push(id.place);
        transfer.take()
    }

    /// Has a block read from a slot of the host tier instead, which is pinned for that.
    fn read_from(&mut self, task: TaskId, host: SlotId) {
        let transfer = self.at_mut(task.transfer).expect("its copy is not sent yet");
        transfer.blocks[task.block as usize].source = Some(host);
    }

    fn wait_for(&mut self, tier: Tier, record: RecordId, waiter: BlockWaiter) {
        self.waiting.entry((tier, record)).or_default().push(waiter);
    }

    /// Takes what waits for a block that has come or failed.
    fn take_waiting_for(&mut self, tier: Tier, record: RecordId) -> Vec<BlockWaiter> {
        // Nearly always nothing waits.
        if self.waiting.is_empty() {
            return Vec::new();
        }
        self.waiting.remove(&(tier, record)).unwrap_or_default()
    }

    fn iter(&self) -> impl Iterator<Item = (TransferId, &OpenTransfer)> {
        let places = (0u32..).zip(&self.places);
        places.filter_map(|(place, (life, held))| {
            Some((TransferId { place, life: *life }, held.as_ref()?))
        })
    }

    /// The unfinished transfer at a place, with the tiers that it fills and reads, if there is one.
    /// `None`: there is no such place.
    pub(super) fn tiers_at(&self, place: u32) -> Option<(TransferId, TierSet)> {
        let (life, held) = self.places.get(place as usize)?;
        let tiers = held
            .as_ref()
            .filter(|held| !held.has_ended)
            .map(OpenTransfer::tiers)
            .unwrap_or_default();
        Some((TransferId { place, life: *life }, tiers))
    }

    /// The first from place `from` on that `is_it` accepts.
    fn next(&self, from: u32, is_it: impl Fn(&OpenTransfer) -> bool) -> Option<TransferId> {
        let mut places = (from..).zip(self.places.get(from as usize..)?);
        let (place, (life, _)) = places.find(|(_, (_, held))| held.as_ref().is_some_and(&is_it))?;
        Some(TransferId { place, life: *life })
    }

    /// The transfer that brings a block into `tier`, and the block's number in it. Blocks of a
    /// transfer are successive in a chain: `depth_of` tells where.
    pub(super) fn bringing(
        &self,
        tier: Tier,
        record: RecordId,
        depth_of: impl Fn(RecordId) -> u32,
    ) -> Option<(TransferId, usize)> {
        let depth = depth_of(record);
        let place_in = |transfer: &OpenTransfer| {
            let coming = transfer.blocks.get(transfer.published..transfer.alive)?;
            let below = depth.checked_sub(depth_of(coming.first()?.record()?))?;
            let is_it = coming.get(below as usize)?.record() == Some(record);
            is_it.then_some(transfer.published + below as usize)
        };
        let mut into_tier = self.iter().filter(|(_, transfer)| transfer.to == tier);
        into_tier.find_map(|(id, transfer)| Some((id, place_in(transfer)?)))
    }

    /// The first block on its way, from `from` on, whose record is accepted. Else where the next
    /// hold goes on, if this one ended before all were looked at.
    pub(super) fn next_with(
        &self,
        mut from: TransferCursor,
        is_it: impl Fn(RecordId) -> bool,
        budget: &mut Budget,
    ) -> Result<(TransferId, usize), Option<TransferCursor>> {
        while let Some((life, held)) = self.places.get(from.place as usize) {
            let first =
                held.as_ref().map_or(0, |held| held.published.max(from.block).min(held.alive));
            let coming = held.as_ref().map_or(&[][..], |held| &held.blocks[first..held.alive]);
            for (at, block) in (first..).zip(coming) {
                if block.record().is_some_and(&is_it) {
                    return Ok((TransferId { place: from.place, life: *life }, at));
                }
                if !budget.look() {
                    return Err(Some(TransferCursor { block: at, ..from }));
                }
            }
            from = TransferCursor { place: from.place + 1, block: 0 };
            if !budget.look() {
                return Err(Some(from));
            }
        }
        Err(None)
    }

    /// Whether none is on the books.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.iter().next().is_none() && self.waiting.is_empty()
    }

    /// Whether blocks are on their way into `tier`.
    pub(super) fn is_filling(&self, tier: Tier) -> bool {
        self.iter().any(|(_, transfer)| transfer.to == tier && !transfer.has_ended)
    }

    /// The transfers into `tier` whose next block hangs on one of `slots`, with how far each has
    /// come.
    pub(super) fn hanging_on(
        &self,
        tier: Tier,
        is_one: impl Fn(SlotId) -> bool,
    ) -> Vec<(TransferId, usize)> {
        let hangs = |transfer: &OpenTransfer| {
            transfer.to == tier
                && matches!(transfer.parent, TransferParent::Resident(slot) if is_one(slot))
        };
        self.iter()
            .filter(|(_, transfer)| hangs(transfer))
            .map(|(id, held)| (id, held.published))
            .collect()
    }

    /// Copies to make once the table is unlocked.
    pub(super) const fn tasks_planned(&self) -> usize {
        self.effects.tasks.len()
    }

    /// Notes that blocks were dropped.
    pub(super) fn note_dropped(&mut self, dropped: Dropped) {
        self.effects.dropped.push(dropped);
    }
}

/// What a block that nothing touches any more leaves to release.
struct Homecoming {
    /// Whether no other block of its transfer is away.
    is_last: bool,
    /// The slot of the host tier that it was read from.
    source: Option<SlotId>,
    /// What the whole transfer read.
    sources: Option<Pins>,
}

impl OpenTransfer {
    fn new(
        class: Class,
        to: Tier,
        context: RequestContext,
        namespace: NamespaceId,
        parent: TransferParent,
    ) -> Self {
        Self {
            class,
            to,
            context,
            namespace,
            parent,
            blocks: Vec::new(),
            published: 0,
            alive: 0,
            recorded: 0,
            away: 0,
            cancellations: 0,
            reason: store_reason(class),
            is_open: true,
            has_ended: false,
            cut: TransferCut::Whole,
            kept: None,
            sources: None,
            caller: None,
            with_media: None,
            relying: None,
            account: TransferAccount::default(),
        }
    }

    fn is_cut(&self) -> bool {
        self.cut != TransferCut::Whole
    }

    /// The block of another transfer that it hangs on.
    const fn awaited(&self) -> Option<(Tier, RecordId)> {
        match self.parent {
            TransferParent::Awaited(parent) => Some((self.to, parent)),
            _ => None,
        }
    }

    /// The tiers that it fills and reads.
    fn tiers(&self) -> TierSet {
        let tiers = self.sources.as_ref().map(Pins::tiers).unwrap_or_default().with(self.to);
        // Copies may read blocks that were to pass the host tier, and are there.
        let reads_host = self.blocks.iter().any(|block| block.source.is_some());
        if reads_host { tiers.with(Tier::Host) } else { tiers }
    }

    fn add(&mut self, destination: Destination, slot: SlotId, frame: Option<Frame>) {
        debug_assert_eq!(self.alive, self.blocks.len(), "a block was added behind one that failed");
        self.recorded += 1;
        self.blocks.push(BlockInTransfer {
            destination,
            slot,
            frame,
            state: BlockState::Coming,
            source: None,
        });
        self.alive += 1;
        self.away += 1;
    }

    /// Where the next block goes, if its turn has come.
    fn next_ready(&self) -> Option<Destination> {
        if matches!(self.parent, TransferParent::Awaited(_)) || self.published == self.alive {
            return None;
        }
        let next =
            self.blocks.get(self.published).filter(|block| block.state == BlockState::Arrived)?;
        Some(next.destination)
    }

    /// Counts the next block as published, and returns the handle to its slot in a tier.
    fn take_ready(&mut self) -> Option<Frame> {
        let block = self.blocks.get_mut(self.published)?;
        block.state = BlockState::Ended;
        self.published += 1;
        block.frame.take()
    }

    /// No queue, no medium and no engine has its `block`-th block any more.
    fn takes_home(&mut self, block: usize) -> Homecoming {
        self.away -= 1;
        let is_last = self.away == 0;
        Homecoming {
            is_last,
            source: self.blocks[block].source.take(),
            // An open transfer may get more blocks that read the same sources.
            sources: if is_last && !self.is_open { self.sources.take() } else { None },
        }
    }

    /// Whether no block of it can become resident any more.
    const fn is_done(&self) -> bool {
        let is_given_up = self.recorded == self.alive;
        !self.is_open
            && !matches!(self.parent, TransferParent::Awaited(_))
            && self.published == self.alive
            && is_given_up
    }

    /// The last failed block that has not been given up, with its tier and record.
    fn last_failed(&self) -> Option<(Tier, usize, Option<RecordId>)> {
        let last = self.recorded.checked_sub(1).filter(|&last| last >= self.alive)?;
        Some((self.to, last, self.blocks[last].record()))
    }

    /// Where in the host tier's transfer its `block`-th block stays on its way.
    fn kept_block(&self, block: usize) -> Option<(TransferId, usize)> {
        let (id, first) = self.kept?;
        Some((id, block.checked_sub(first)?))
    }
}

/// How copied blocks come.
const fn store_reason(class: Class) -> StoreReason {
    match class {
        Class::Load => StoreReason::Loaded,
        Class::Save => StoreReason::Saved,
        Class::Flush => StoreReason::Flushed,
        Class::Prefetch => StoreReason::Prefetched,
    }
}
