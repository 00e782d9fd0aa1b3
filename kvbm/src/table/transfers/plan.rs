//! The plan: what a request lacks in a tier, where each block is read from, and the slots for them.
//!
//! A prompt may have thousands of blocks, and other calls need the table meanwhile: planning goes
//! in steps of a bounded number of blocks, with the table unlocked in between. [`Table::trace`]
//! finds what is missing, [`Table::extend`] takes slots and makes copy tasks,
//! [`Table::finish_plan`] hands the transfer over to its caller.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::{BlockKey, Frame, Owner, Route, SlotId, SlotRef, Tier};

use super::{
    BlockWaiter, Destination, OpenTransfer, Reply, TransferAccount, TransferCaller, TransferParent,
};
use crate::names::hash::Chain;
use crate::observe::events::StoreReason;
use crate::table::budget::Budget;
use crate::table::evict::{Admitted, NoSlot};
use crate::table::index::RecordId;
use crate::table::namespace::NamespaceId;
use crate::table::pins::Pins;
use crate::table::policy::{RequestContext, RequestInfo};
use crate::table::record::TierSet;
use crate::table::{MissReason, Table};
use crate::task::{Class, CopyTask, TaskId, TransferId, WithMedia};

/// The length of the steps of plans and drops, in blocks, unless the hold's [budget](Budget) ends
/// them first.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// Blocks that get slots.
    pub placed: usize,
    /// Blocks that are only looked at.
    pub looked_at: usize,
    /// Blocks that are dropped.
    pub dropped: usize,
}

impl Default for Steps {
    /// Some 300 µs, if each placed block evicts another and the index grows; a cache miss or two
    /// for each block that is looked at; some 200 µs for dropped ones.
    fn default() -> Self {
        Self { placed: 128, looked_at: 2_048, dropped: 256 }
    }
}

/// Newcomers that a full last tier weighs against what it has. The rest of a longer chain is taken
/// in as far as there is room: it is the least likely to be asked for again.
const WEIGHED: usize = 1_024;

/// Looks that the hold must have left for a block that stays in the host tier on its way: it has
/// its place in the destination when the host tier is asked, and cannot wait.
const FOR_HOST: usize = 1_280;

/// Blocks of the first step of a load into an engine's own memory.
const FIRST_INTO_ENGINE: usize = 32;

/// A block that the destination of a plan lacks. Other calls have the table between two steps. So
/// all that is known of a block stays together: one that is gone by then counts as missing, and
/// none is taken for another.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedBlock {
    key: BlockKey,
    /// Its position in the requested chain.
    position: u32,
    source: Source,
}

/// Where a block is read.
#[derive(Clone, Copy, Debug)]
enum Source {
    /// Nowhere: an engine fills its slot.
    Filled,
    /// In a slot of the engine's own.
    Engine(SlotRef),
    /// In this life of a tier's slot.
    Tier(SlotRef),
}

impl Source {
    const fn slot(self) -> Option<SlotRef> {
        match self {
            Self::Filled => None,
            Self::Engine(slot) | Self::Tier(slot) => Some(slot),
        }
    }
}

/// A transfer in the making.
#[derive(Debug)]
pub struct TransferPlan {
    class: Class,
    to: Tier,
    context: RequestContext,
    namespace: NamespaceId,
    /// The caller's lease; none if an engine fills the blocks.
    pins: Option<Pins>,
    trace: Option<TraceStep>,
    /// Leading blocks of the chain before `blocks`, which the destination has, and the last of
    /// them.
    before: usize,
    behind: Option<BlockKey>,
    /// The blocks that the destination lacks, root first.
    blocks: Vec<PlannedBlock>,
    /// Pins what is read.
    sources: Option<Pins>,
    /// Tiers whose only route to the destination passes the host tier.
    through_host: TierSet,
    /// The last block tests whether a medium is well again.
    is_probe: bool,
    is_probe_sent: bool,
    /// Leading ones of `blocks` that came to the destination since, and those behind them that
    /// other transfers bring.
    resident: usize,
    in_flight: usize,
    transfer: Option<TransferId>,
    /// The last block that has its place.
    above: Option<RecordId>,
    placed: usize,
    /// Blocks that a full tier may still decline, when the first of them is next.
    unweighed: usize,
    admitted: usize,
    keeping: HostKeeping,
    recompute: usize,
    declined: usize,
    refused: usize,
    /// Blocks that got no slots, because they, or those before them, were gone by then.
    failed: usize,
    found_no_room: bool,
    /// The owner of new blocks.
    owner: Option<Owner>,
    path: BlockPath,
}

/// The source and the destination of a plan.
#[derive(Debug)]
enum BlockPath {
    /// From the tiers where a lease holds them into another tier.
    BetweenTiers,
    /// An engine fills slots of a tier: these are their handles.
    Filled(Vec<Frame>),
    /// From slots of an engine's own into a tier.
    FromEngine(EngineSave),
    /// From tiers into slots of an engine's own.
    IntoEngine(EngineLoad),
}

/// A save from an engine's slots.
#[derive(Debug)]
struct EngineSave {
    /// Positions of the blocks in the chain.
    wanted: Range<usize>,
    /// Blocks whose parent is missing.
    orphans: usize,
    /// How many names had been dropped when the engine brought its blocks.
    names_dropped: u64,
    /// The transfer that this plan begins anew.
    reopens: Option<TransferId>,
}

/// A load into an engine's slots.
#[derive(Debug)]
struct EngineLoad {
    /// Position in the chain of the block for the first slot.
    first: usize,
    slots: Vec<SlotRef>,
    /// Dropped when no medium uses the slots any more.
    with_media: WithMedia,
}

/// The engine's blocks of a save that relies on copies of other transfers. If these fail, the save
/// is planned anew from here.
#[derive(Debug)]
pub(super) struct EngineBlocks {
    wanted: Range<usize>,
    before: usize,
    behind: Option<BlockKey>,
    pub(super) blocks: Vec<PlannedBlock>,
    owner: Option<Owner>,
    /// The count when the engine brought them: a name dropped since may be one of these.
    pub(super) names_dropped: u64,
}

/// How far the search for missing blocks has come: up the chain from the deepest block of the
/// lease.
#[derive(Debug)]
struct TraceStep {
    longest: Tier,
    at: Option<RecordId>,
    before: usize,
    /// Quarantines so far: another one may have dropped what was traced.
    quarantines: u64,
}

/// Whether blocks that pass the host tier on their way up stay there.
#[derive(Clone, Copy, Debug)]
enum HostKeeping {
    /// No block has passed it yet.
    NotYet,
    /// The blocks so far are there or on their way: they need not be read twice.
    Known,
    /// They stay, as part of this transfer.
    Into(TransferId),
    /// There is no room for them, or their ancestors are missing.
    No,
}

/// A block that has its place.
struct PlacedBlock {
    record: RecordId,
    to: SlotRef,
    destination: Destination,
    frame: Option<Frame>,
}

/// Why a block has no place.
#[derive(Clone, Copy, Debug)]
enum Unplaced {
    /// The hold is over: the next one may find a slot.
    Later,
    /// There is no room for it, or the tier knows its name as another block.
    NoRoom,
    /// Its source is gone.
    Gone,
}

impl From<NoSlot> for Unplaced {
    fn from(why: NoSlot) -> Self {
        match why {
            NoSlot::Later => Self::Later,
            NoSlot::Refused => Self::NoRoom,
        }
    }
}

/// Slots that an engine fills.
#[derive(Debug)]
pub struct Reserved {
    /// The transfer that makes the blocks resident once they are filled.
    pub transfer: TransferId,
    /// Leading blocks of the chain that the tier has or awaits.
    pub before: usize,
    /// How many of these are on the way in other transfers.
    pub in_flight: usize,
    /// The handles to the slots of the blocks behind them, root first.
    pub frames: Vec<Frame>,
    /// Blocks after these that are not worth their room.
    pub declined: usize,
    /// Blocks at the end that found no room.
    pub refused: usize,
    behind: Option<BlockKey>,
    namespace: NamespaceId,
}

impl TransferPlan {
    /// The plan to make resident in `to` what a lease holds elsewhere.
    pub fn copying(class: Class, to: Tier, pins: Pins) -> Self {
        let (context, namespace) = (pins.context(), pins.namespace());
        Self { pins: Some(pins), ..Self::new(class, to, context, namespace) }
    }

    fn new(class: Class, to: Tier, context: RequestContext, namespace: NamespaceId) -> Self {
        Self {
            class,
            to,
            context,
            namespace,
            pins: None,
            trace: None,
            before: 0,
            behind: None,
            blocks: Vec::new(),
            sources: None,
            through_host: TierSet::default(),
            is_probe: false,
            is_probe_sent: false,
            resident: 0,
            in_flight: 0,
            transfer: None,
            above: None,
            placed: 0,
            unweighed: 0,
            admitted: usize::MAX,
            keeping: if class == Class::Load { HostKeeping::NotYet } else { HostKeeping::No },
            recompute: 0,
            declined: 0,
            refused: 0,
            failed: 0,
            found_no_room: false,
            owner: None,
            path: BlockPath::BetweenTiers,
        }
    }

    /// The plan to save again, under its name, what a save relied on others for.
    pub(super) fn again(id: TransferId, to: Tier, brought: EngineBlocks, pins: Pins) -> Self {
        let EngineBlocks { wanted, before, behind, blocks, owner, names_dropped } = brought;
        // The first plan refused the others for lack of a route, and they stay refused.
        let refused = wanted.end - before - blocks.len();
        let save = EngineSave { wanted, orphans: 0, names_dropped, reopens: Some(id) };
        Self {
            before,
            behind,
            blocks,
            owner,
            refused,
            path: BlockPath::FromEngine(save),
            ..Self::copying(Class::Save, to, pins)
        }
    }

    /// The plan to copy what a lease holds of its chain into slots of the engine's own: block
    /// `first` into the first of them, and so on. `with_media` is dropped when no medium uses these
    /// any more.
    pub fn into_engine(
        pins: Pins,
        first: usize,
        slots: Vec<SlotRef>,
        with_media: WithMedia,
    ) -> Self {
        Self {
            path: BlockPath::IntoEngine(EngineLoad { first, slots, with_media }),
            ..Self::copying(Class::Load, Tier::Device, pins)
        }
    }

    /// Whether the blocks go into the engine's own slots, which have no records.
    pub const fn is_into_engine(&self) -> bool {
        matches!(self.path, BlockPath::IntoEngine(_))
    }

    /// Positions in the chain of the requested blocks.
    fn wanted(&self) -> Range<usize> {
        match &self.path {
            BlockPath::BetweenTiers | BlockPath::Filled(_) => 0..usize::MAX,
            BlockPath::FromEngine(save) => save.wanted.clone(),
            BlockPath::IntoEngine(load) => load.first..load.first + load.slots.len(),
        }
    }

    /// Where the blocks go.
    pub const fn to(&self) -> Tier {
        self.to
    }

    /// The save from the engine's own slots, if it is one.
    const fn engine_save(&self) -> Option<&EngineSave> {
        if let BlockPath::FromEngine(save) = &self.path { Some(save) } else { None }
    }

    /// Blocks that the engine brought and that the destination has or awaits already.
    fn duplicates(&self) -> usize {
        let there = self.before + self.known();
        self.engine_save().map_or(0, |save| there.saturating_sub(save.wanted.start))
    }

    /// What the engine brought.
    fn take_brought(&mut self) -> Option<EngineBlocks> {
        let EngineSave { wanted, names_dropped, .. } = self.engine_save()?;
        Some(EngineBlocks {
            wanted: wanted.clone(),
            names_dropped: *names_dropped,
            before: self.before,
            behind: self.behind,
            owner: self.owner,
            blocks: std::mem::take(&mut self.blocks),
        })
    }

    /// Blocks that the engine brought and that are not copied, since their parent is missing.
    pub fn orphans(&self) -> usize {
        self.engine_save().map_or(0, |save| save.orphans)
    }

    /// What the lease holds; nothing if an engine fills the blocks.
    pub fn held(&self) -> crate::table::Match {
        self.pins.as_ref().map(|pins| *pins.held()).unwrap_or_default()
    }

    /// Leading blocks of the chain that the destination has.
    pub const fn before(&self) -> usize {
        self.before
    }

    /// Where each missing block is read, root first.
    pub fn sources(&self) -> impl Iterator<Item = SlotRef> + '_ {
        self.blocks.iter().filter_map(|block| block.source.slot())
    }

    /// Whether an engine fills the blocks.
    const fn is_filled(&self) -> bool {
        matches!(self.path, BlockPath::Filled(_))
    }

    /// Leaves all but the first `blocks` missing ones to the engine, which computes them faster.
    /// Returns how many.
    pub fn recompute_behind(&mut self, blocks: usize) -> usize {
        let left = self.cut(blocks);
        self.recompute += left;
        left
    }

    /// Refuses all but the first `blocks` missing ones.
    pub fn refuse_behind(&mut self, blocks: usize) {
        self.refused += self.cut(blocks);
    }

    fn cut(&mut self, blocks: usize) -> usize {
        let all = self.blocks.len();
        self.blocks.truncate(blocks);
        all - self.blocks.len()
    }

    /// Makes the last block a test whether a medium is well again.
    pub const fn mark_probe(&mut self) {
        self.is_probe = true;
    }

    /// Whether the test copy was made: the block may have found no room, or be on its way already.
    pub const fn is_probe_sent(&self) -> bool {
        self.is_probe_sent
    }

    /// Blocks that found no room, no queue space or no route.
    pub const fn refused(&self) -> usize {
        self.refused
    }

    /// Whether the destination had no room for all of it.
    pub const fn found_no_room(&self) -> bool {
        self.found_no_room
    }

    /// Sets the tiers whose only route to the destination passes the host tier.
    pub const fn pass_host_from(&mut self, tiers: TierSet) {
        self.through_host = tiers;
    }

    /// The transfer, once it has slots.
    pub const fn transfer(&self) -> Option<TransferId> {
        self.transfer
    }

    /// The transfer of its blocks into a tier, still empty.
    fn open(&self, to: Tier, parent: TransferParent) -> OpenTransfer {
        OpenTransfer::new(self.class, to, self.context, self.namespace, parent)
    }

    /// A reset closed the namespace of its blocks, or their source was withdrawn: none of them
    /// comes.
    fn fail(&mut self) {
        self.failed += self.cut_all();
    }

    /// The destination was withdrawn: it takes none of them.
    fn refuse_all(&mut self) {
        self.refused += self.cut_all();
    }

    fn cut_all(&mut self) -> usize {
        (self.before, self.behind, self.resident, self.in_flight) = (0, None, 0, 0);
        self.cut(0)
    }

    /// Makes room for `blocks` blocks at once: a growing array would be moved with the table
    /// locked.
    fn set_room_aside(&mut self, blocks: usize) {
        if self.blocks.is_empty() {
            self.blocks.reserve_exact(blocks);
        }
    }

    const fn known(&self) -> usize {
        self.resident + self.in_flight
    }

    /// The next blocks to place, as far as one step goes.
    fn next(&self, most: usize) -> Range<usize> {
        let next = self.known() + self.placed;
        next..self.blocks.len().min(self.admitted).min(next.saturating_add(most)).max(next)
    }

    const fn looks_for_host(&self) -> usize {
        if matches!(self.keeping, HostKeeping::No) { 0 } else { FOR_HOST }
    }

    fn last_known(&self) -> Option<BlockKey> {
        self.known().checked_sub(1).map_or(self.behind, |last| Some(self.blocks[last].key))
    }

    /// The tier that all its blocks come from, if there is one.
    fn only_source(&self) -> Option<Tier> {
        let placed = &self.blocks[self.known()..][..self.placed];
        let mut placed = placed.iter().filter_map(|block| Some(block.source.slot()?.tier));
        let first = placed.next()?;
        placed.all(|tier| tier == first).then_some(first)
    }

    fn account(&mut self, started: Duration) -> TransferAccount {
        let known = self.known();
        let behind = self.behind.filter(|_| self.before > 0);
        TransferAccount {
            before: self.before + known,
            found: behind
                .into_iter()
                .chain(self.blocks[..known].iter().map(|block| block.key))
                .collect(),
            blocks: self.placed + self.failed,
            duplicates: self.duplicates(),
            recompute: self.recompute,
            declined: self.declined,
            refused: self.refused,
            source: self.only_source(),
            started,
            copied: None,
        }
    }
}

impl Table {
    /// The plan to take slots of `to` for what it lacks of `chain`, which an engine fills.
    pub fn plan_filling(&mut self, to: Tier, chain: Chain<'_>, info: RequestInfo) -> TransferPlan {
        let chain = self.enter(chain);
        let context = RequestContext { info: self.named(info), path: chain.len() as u32 };
        let mut plan = TransferPlan::new(Class::Save, to, context, self.namespace());
        plan.owner = self.owners.present(info.hints.tenant);
        plan.before = self.matches(chain).blocks(to);
        plan.behind = match plan.before.checked_sub(1) {
            Some(last) => Some(chain.key(last)),
            None => self.parent_of_first(chain),
        };
        let planned =
            |at| PlannedBlock { key: chain.key(at), position: at as u32, source: Source::Filled };
        plan.blocks = (plan.before..chain.len()).map(planned).collect();
        plan.path = BlockPath::Filled(Vec::new());
        plan
    }

    /// The plan to bring blocks from an engine's own slots into `to`: block `first` of `chain` from
    /// the first of `slots`, and so on. If the blocks before these are neither there nor on their
    /// way, all are [orphans](TransferPlan::orphans).
    pub fn plan_saving(
        &mut self,
        to: Tier,
        chain: Chain<'_>,
        first: usize,
        slots: &[SlotRef],
        pins: Pins,
    ) -> TransferPlan {
        let held = pins.held().blocks(to);
        let before = held.clamp(first, first + slots.len());
        let last_of = |blocks: usize| blocks.checked_sub(1).map(|last| chain.key(last));
        let hangs =
            |key: BlockKey| self.find(key).is_some_and(|id| self.records.at(id).has_or_awaits(to));
        let are_orphans = held < first && !last_of(before).is_some_and(hangs);
        let mut plan = TransferPlan::copying(Class::Save, to, pins);
        plan.path = BlockPath::FromEngine(EngineSave {
            wanted: first..first + slots.len(),
            orphans: if are_orphans { slots.len() } else { 0 },
            names_dropped: self.quarantines.names_dropped(),
            reopens: None,
        });
        if are_orphans {
            plan.before = held;
        } else {
            plan.owner = self.owners.present(plan.context.info.hints.tenant);
            plan.before = before;
            let planned = |(at, &slot)| PlannedBlock {
                key: chain.key(at),
                position: at as u32,
                source: Source::Engine(slot),
            };
            plan.blocks = (before..).zip(&slots[before - first..]).map(planned).collect();
        }
        plan.behind = last_of(plan.before).or_else(|| self.parent_of_first(chain));
        plan
    }

    /// The parent of a chain that is known to begin in the middle of a longer one.
    fn parent_of_first(&self, chain: Chain<'_>) -> Option<BlockKey> {
        let first = self.find((!chain.is_empty()).then(|| chain.key(0))?)?;
        self.records.at(first).parent().map(|parent| self.records.at(parent).key())
    }

    /// Finds what the destination of a plan lacks of a leased chain. True when done.
    pub fn trace(&mut self, plan: &mut TransferPlan) -> bool {
        let Some(mut pins) = plan.pins.take() else { return true };
        let has_destination = self.has(plan.to) || plan.is_into_engine();
        let is_complete = !has_destination || self.trace_lease(plan, &mut pins);
        if is_complete {
            plan.blocks.reverse();
            let read = plan.sources().fold(TierSet::default(), |tiers, from| tiers.with(from.tier));
            plan.sources = (!plan.blocks.is_empty()).then(|| self.pin_again(&pins, read));
        }
        plan.pins = Some(pins);
        is_complete
    }

    fn trace_lease(&mut self, plan: &mut TransferPlan, pins: &mut Pins) -> bool {
        let (to, class) = (plan.to, plan.class);
        let quarantines = self.quarantines.so_far();
        if plan.trace.as_ref().is_none_or(|trace| trace.quarantines != quarantines) {
            self.drop_quarantined(pins);
            plan.blocks.clear();
        }
        // Up from the deepest block, since only a parent is one step away; the lease's pins keep
        // all of them in place. Flushing decides which blocks go down.
        let wanted = plan.wanted();
        let is_source = |tier: Tier| tier != to && (class != Class::Prefetch || tier > to);
        let held = Tier::ALL.map(|tier| if is_source(tier) { pins.held().blocks(tier) } else { 0 });
        // Blocks in a withdrawn destination count as missing: they are refused.
        let is_in_use = !self.is_withdrawn(to);
        let mut trace = match plan.trace.take().filter(|trace| trace.quarantines == quarantines) {
            Some(trace) => trace,
            None => {
                let by_blocks = |tier: &Tier| held[tier.index()];
                let longest = Tier::ALL.into_iter().rev().max_by_key(by_blocks).unwrap_or(to);
                let before = held[longest.index()];
                let deepest = pins.deepest(longest).filter(|_| before > 0);
                let at = deepest.map(|slot| self.tier(longest).at(slot).record);
                TraceStep { longest, at, before, quarantines }
            }
        };
        for _ in 0..self.steps.looked_at {
            // A chain may begin in the middle of a longer one: the blocks before its first are not
            // its own.
            let record = trace.at.filter(|_| trace.before > wanted.start);
            let record = record.map(|id| self.records.at(id));
            let Some(record) = record.filter(|record| !(is_in_use && record.resident().has(to)))
            else {
                if trace.at.is_none() && trace.before > wanted.start {
                    // The chain begins behind the lease's first block: that one is missing, and so
                    // is what follows.
                    plan.failed += plan.cut(0);
                }
                plan.before = trace.before;
                // In the engine's own memory blocks have no parents.
                let behind = trace.at.filter(|_| !plan.is_into_engine());
                plan.behind = behind.map(|id| self.records.at(id).key());
                return true;
            };
            trace.before -= 1;
            let before = trace.before;
            if before < wanted.end {
                plan.set_room_aside(before + 1 - wanted.start);
                let fastest = Tier::ALL
                    .into_iter()
                    .find(|tier| held[tier.index()] > before)
                    .unwrap_or(trace.longest);
                let from = self.slot_ref(fastest, record.slot(fastest));
                plan.blocks.push(PlannedBlock {
                    key: record.key(),
                    position: before as u32,
                    source: Source::Tier(from),
                });
            }
            trace.at = record.parent();
        }
        plan.trace = Some(trace);
        false
    }

    /// Takes slots for the next blocks of a plan; the tasks to copy them are among the
    /// [effects](Table::take_effects). True when there are no more.
    pub fn extend(&mut self, plan: &mut TransferPlan) -> bool {
        // Blocks that a tenant was storing when it was forgotten do not come.
        let is_owner_past = plan.owner.is_some_and(|owner| self.owners.is_past(owner));
        // A name that was dropped since the engine brought its blocks may be one of these.
        let dropped = self.quarantines.names_dropped();
        let is_dropped = plan
            .engine_save()
            .is_some_and(|save| save.reopens.is_some() && save.names_dropped != dropped);
        let is_past = plan.namespace != self.namespace() || is_owner_past || is_dropped;
        if plan.transfer.is_none() {
            if is_past || plan.sources.as_ref().is_some_and(|pins| self.are_withdrawn(pins.tiers()))
            {
                plan.fail();
            } else if self.is_withdrawn(plan.to) {
                plan.refuse_all();
            }
        }
        if plan.transfer.is_none() && !self.pass_known(plan) {
            return false;
        }
        if plan.transfer.is_none() && self.has_lost_known(plan) {
            // The engine's own slots can supply what others were to bring.
            (plan.resident, plan.in_flight) = (0, 0);
            return false;
        }
        let id = plan.transfer.unwrap_or_else(|| self.open_transfer(plan));
        // It may have failed, or the table may have been closed, since the last step.
        let is_cut = self.transfers.at_mut(id).is_none_or(|transfer| transfer.is_cut());
        if self.transfers.is_closed || is_cut || is_past {
            plan.failed += plan.next(usize::MAX).len();
            plan.admitted = plan.known() + plan.placed;
            return true;
        }
        let mut budget = Budget::of_a_hold();
        if plan.unweighed > 0 && !self.weigh(plan, &mut budget) {
            return false;
        }
        self.set_room_aside(plan, id);
        // An engine waits for its first layer: copying a few blocks starts while the rest is
        // planned.
        let is_first_of_engine = plan.is_into_engine() && plan.placed == 0;
        let most = if is_first_of_engine { FIRST_INTO_ENGINE } else { usize::MAX };
        let step = plan.next(self.steps.placed.min(most));
        self.transfers.effects.tasks.reserve(if plan.is_filled() { 0 } else { step.len() });
        for at in step {
            if budget.looks_left() < plan.looks_for_host() {
                return false;
            }
            match self.place_next(plan, id, at, &mut budget) {
                Ok(()) => {}
                Err(Unplaced::Later) => return false,
                Err(why) => {
                    self.end_placing(plan, at, why);
                    break;
                }
            }
        }
        plan.next(1).is_empty()
    }

    /// Block `at` of a plan has no place, so those behind it have no parent.
    fn end_placing(&mut self, plan: &mut TransferPlan, at: usize, why: Unplaced) {
        let left = plan.blocks.len().min(plan.admitted) - at;
        plan.admitted = at;
        match why {
            Unplaced::Later => unreachable!("the next hold goes on"),
            Unplaced::NoRoom => {
                self.miss_history.note(
                    plan.blocks[at].key,
                    MissReason::Capacity,
                    plan.to,
                    self.now_ms,
                );
                plan.refused += left;
                plan.found_no_room = true;
            }
            Unplaced::Gone => plan.failed += left,
        }
    }

    /// Passes over blocks that the destination has or awaits. False: there is more to look at.
    fn pass_known(&mut self, plan: &mut TransferPlan) -> bool {
        if plan.is_into_engine() {
            return true;
        }
        let mut above = plan.last_known().and_then(|key| self.find(key));
        for _ in 0..self.steps.looked_at {
            let Some(&PlannedBlock { key, .. }) = plan.blocks.get(plan.known()) else {
                return true;
            };
            let record = self.find(key).filter(|&record| !self.is_dropped(record));
            let known = record.map(|record| *self.records.at(record));
            // A block with another parent is of another chain.
            let known = known.filter(|known| above.is_none() || known.parent() == above);
            above = record;
            if plan.in_flight == 0 && known.is_some_and(|known| known.resident().has(plan.to)) {
                plan.resident += 1;
            } else if known.is_some_and(|known| known.has_or_awaits(plan.to)) {
                // Resident ones too: they came since the last step, while those before them were in
                // flight.
                plan.in_flight += 1;
            } else {
                return true;
            }
        }
        false
    }

    /// Whether blocks that a save passed over will not come after all, and may be saved from the
    /// engine's slots.
    fn has_lost_known(&self, plan: &TransferPlan) -> bool {
        let has = |key| self.find(key).is_some_and(|id| self.records.at(id).has_or_awaits(plan.to));
        let dropped = self.quarantines.names_dropped();
        plan.engine_save().is_some_and(|save| save.names_dropped == dropped)
            && plan.known() > 0
            && !plan.last_known().is_some_and(has)
    }

    fn open_transfer(&mut self, plan: &mut TransferPlan) -> TransferId {
        debug_assert!(
            plan.context.info.request.is_some(),
            "a policy could not tell the parts of this use together"
        );
        let behind = plan.last_known();
        let above = behind.and_then(|key| self.find(key));
        let has = |record: RecordId| self.records.at(record).has_or_awaits(plan.to);
        let is_rooted = behind.is_none() || above.is_some_and(has);
        let parent = if is_rooted { self.pin_parent(plan.to, above) } else { TransferParent::Root };
        if !is_rooted {
            plan.refuse_behind(plan.known());
        }
        plan.above = above;
        // A policy is shown new blocks below a resident one; it does not know a block on its way
        // yet.
        if is_rooted && !matches!(parent, TransferParent::Awaited(_)) {
            plan.unweighed = if self.has(plan.to) { plan.next(WEIGHED).len() } else { 0 };
        }
        let mut transfer = plan.open(plan.to, parent);
        transfer.sources = plan.sources.take();
        let mut reopens = None;
        match &plan.path {
            BlockPath::BetweenTiers => {}
            BlockPath::Filled(_) => transfer.reason = StoreReason::Filled,
            BlockPath::FromEngine(save) => reopens = save.reopens,
            BlockPath::IntoEngine(load) => transfer.with_media = Some(Arc::clone(&load.with_media)),
        }
        let id = match reopens {
            Some(id) => self.reopen(id, transfer),
            None => self.transfers.open(transfer),
        };
        plan.transfer = Some(id);
        id
    }

    /// Begins a transfer anew under its name.
    fn reopen(&mut self, id: TransferId, transfer: OpenTransfer) -> TransferId {
        if self.transfers.reopen(id, transfer) {
            // Its caller cancelled it meanwhile.
            self.fail(id, 0);
        }
        id
    }

    /// Asks a full tier which of the new blocks it takes in, as far as the hold goes. True when
    /// that is known.
    fn weigh(&mut self, plan: &mut TransferPlan, budget: &mut Budget) -> bool {
        let new = plan.next(plan.unweighed);
        let keys: Vec<_> = plan.blocks[new.clone()].iter().map(|block| block.key).collect();
        let Admitted { blocks, has_more } =
            self.admit_new(plan.to, plan.above, &keys, plan.context, budget);
        if blocks < new.len() {
            plan.admitted = new.start + blocks;
            plan.declined = plan.blocks.len() - plan.admitted;
            let first = keys[blocks];
            self.miss_history.note(first, MissReason::Admission, plan.to, self.now_ms);
        }
        plan.unweighed = if has_more { blocks } else { 0 };
        plan.unweighed == 0
    }

    /// Makes room for all blocks at once: a growing array would be moved with the table locked.
    fn set_room_aside(&mut self, plan: &mut TransferPlan, id: TransferId) {
        if plan.placed > 0 {
            return;
        }
        let blocks = plan.next(usize::MAX).len();
        self.transfers
            .at_mut(id)
            .into_iter()
            .for_each(|transfer| transfer.blocks.reserve_exact(blocks));
        if let BlockPath::Filled(frames) = &mut plan.path {
            frames.reserve_exact(blocks);
        }
    }

    /// Takes a slot for block `at` of a plan, to be copied or filled by the engine.
    fn place_next(
        &mut self,
        plan: &mut TransferPlan,
        id: TransferId,
        at: usize,
        budget: &mut Budget,
    ) -> Result<(), Unplaced> {
        let planned = plan.blocks[at];
        let PlacedBlock { record, to, destination, frame } =
            self.place_planned(plan, planned, budget)?;
        let block = plan.placed as u32;
        let kept_here = match &mut plan.path {
            BlockPath::Filled(frames) => {
                frames.extend(frame);
                None
            }
            _ => frame,
        };
        let transfer =
            self.transfers.at_mut(id).expect("the transfer is open until its plan is finished");
        transfer.add(destination, to.slot, kept_here);
        plan.above = Some(record);
        plan.placed += 1;
        if let Some(from) = planned.source.slot() {
            let is_probe = plan.is_probe && at + 1 == plan.blocks.len();
            let id = TaskId { transfer: id, block };
            let (class, parent, owner) =
                (plan.class, self.parent_hash(record), self.owners.of(record));
            let task = CopyTask {
                id,
                class,
                block: planned.key,
                parent,
                owner,
                from,
                to,
                via: None,
                is_probe,
            };
            if from.tier > Tier::Host && plan.through_host.has(from.tier) {
                self.pass_host(plan, record, task, budget);
            } else {
                self.send(plan, task);
            }
        }
        Ok(())
    }

    /// Where a block of a plan goes. It checks again what the plan found: other calls had the table
    /// since.
    fn place_planned(
        &mut self,
        plan: &TransferPlan,
        block: PlannedBlock,
        budget: &mut Budget,
    ) -> Result<PlacedBlock, Unplaced> {
        let Source::Tier(source) = block.source else {
            let (record, frame) =
                self.place_new(plan.to, block.key, plan.above, plan.owner, budget)?;
            let to = frame.slot_ref();
            return Ok(PlacedBlock {
                record,
                to,
                destination: Destination::Tier(record),
                frame: Some(frame),
            });
        };
        if !self.is_given(source) {
            return Err(Unplaced::Gone);
        }
        let record = self.tier(source.tier).at(source.slot).record;
        if let BlockPath::IntoEngine(load) = &plan.path {
            budget.change();
            let at = (block.position as usize).checked_sub(load.first);
            let to = *at.and_then(|at| load.slots.get(at)).ok_or(Unplaced::Gone)?;
            return Ok(PlacedBlock {
                record,
                to,
                destination: Destination::Engine { source },
                frame: None,
            });
        }
        let frame = self.place(plan.to, record, plan.above, budget)?;
        let to = frame.slot_ref();
        Ok(PlacedBlock { record, to, destination: Destination::Tier(record), frame: Some(frame) })
    }

    /// The parent's hash, by the name that the table has for it.
    fn parent_hash(&self, record: RecordId) -> Option<u128> {
        let parent = self.records.at(record).parent()?;
        Some(self.records.at(parent).key().hash)
    }

    fn send(&mut self, plan: &mut TransferPlan, task: CopyTask) {
        plan.is_probe_sent |= task.is_probe;
        self.transfers.effects.tasks.push(task);
    }

    /// Sends a block through the host tier, where it stays if there is room and its ancestors are
    /// there.
    fn pass_host(
        &mut self,
        plan: &mut TransferPlan,
        record: RecordId,
        mut task: CopyTask,
        budget: &mut Budget,
    ) {
        let known = *self.records.at(record);
        if matches!(plan.keeping, HostKeeping::NotYet) {
            let has = |parent: RecordId| self.records.at(parent).has_or_awaits(Tier::Host);
            plan.keeping =
                if known.parent().is_none_or(has) { HostKeeping::Known } else { HostKeeping::No };
        }
        if !self.is_in_use(Tier::Host) {
            plan.keeping = HostKeeping::No;
        }
        if matches!(plan.keeping, HostKeeping::Known) {
            if known.filling().has(Tier::Host) {
                self.transfers.effects.awaited.push(task.block);
                task.is_probe = false;
                return self.transfers.wait_for(Tier::Host, record, BlockWaiter::Copy(task));
            }
            if known.resident().has(Tier::Host) {
                return self.copy_from_host(plan, known.slot(Tier::Host), task);
            }
            plan.keeping = self.keep_from(plan, known.parent(), task.id);
        }
        if let HostKeeping::Into(kept) = plan.keeping
            && self.transfers.at_mut(kept).is_none_or(|kept| kept.is_cut())
        {
            plan.keeping = HostKeeping::No;
        }
        if let HostKeeping::Into(kept) = plan.keeping {
            match self.place(Tier::Host, record, known.parent(), budget) {
                Ok(frame) => {
                    task.via = Some(frame.slot_ref());
                    let slot = frame.slot();
                    let kept =
                        self.transfers.at_mut(kept).expect("it is open until the plan is finished");
                    kept.add(Destination::Tier(record), slot, Some(frame));
                }
                Err(_) => plan.keeping = HostKeeping::No,
            }
        }
        self.send(plan, task);
    }

    fn copy_from_host(&mut self, plan: &mut TransferPlan, slot: SlotId, mut task: CopyTask) {
        self.tier_mut(Tier::Host).pin(slot);
        task.from = self.slot_ref(Tier::Host, slot);
        // This copy says nothing about the medium to be tested.
        task.is_probe = false;
        self.transfers.read_from(task.id, slot);
        self.send(plan, task);
    }

    /// Keeps blocks from `task` on in the host tier, behind `parent`.
    fn keep_from(
        &mut self,
        plan: &TransferPlan,
        parent: Option<RecordId>,
        task: TaskId,
    ) -> HostKeeping {
        // It may have failed, or left, since it was looked at.
        let has = |parent: RecordId| self.records.at(parent).has_or_awaits(Tier::Host);
        if !parent.is_none_or(has) {
            return HostKeeping::No;
        }
        let parent = self.pin_parent(Tier::Host, parent);
        let kept = self.transfers.open(plan.open(Tier::Host, parent));
        let transfer = self.transfers.at_mut(task.transfer).expect("it is being planned");
        transfer.kept = Some((kept, task.block as usize));
        HostKeeping::Into(kept)
    }

    /// Sends down successive blocks in the upper tier of `route`, as many as find room behind
    /// `parent`. `pins` keeps them there. Returns how many.
    pub(in crate::table) fn send_down(
        &mut self,
        Route { from: source, to }: Route,
        records: &[RecordId],
        parent: TransferParent,
        pins: Pins,
        is_probe: bool,
        budget: &mut Budget,
    ) -> usize {
        let mut placed = Vec::with_capacity(records.len());
        for &record in records {
            let known = *self.records.at(record);
            let Ok(frame) = self.place(to, record, known.parent(), budget) else { break };
            placed.push((record, frame));
        }
        let blocks = placed.len();
        if blocks == 0 {
            // Its end would wake flushing, which would retry at once.
            self.unpin_parent(to, parent);
            self.release(pins);
            return 0;
        }
        let mut transfer =
            OpenTransfer::new(Class::Flush, to, pins.context(), pins.namespace(), parent);
        transfer.account.blocks = blocks;
        transfer.sources = Some(pins);
        let id = self.transfers.open(transfer);
        for ((record, frame), block) in placed.into_iter().zip(0..) {
            let known = *self.records.at(record);
            let task = CopyTask {
                id: TaskId { transfer: id, block },
                class: Class::Flush,
                block: known.key(),
                parent: self.parent_hash(record),
                owner: self.owners.of(record),
                from: self.slot_ref(source, known.slot(source)),
                to: frame.slot_ref(),
                via: None,
                is_probe,
            };
            let transfer = self.transfers.at_mut(id).expect("it was opened here");
            transfer.add(Destination::Tier(record), task.to.slot, Some(frame));
            self.transfers.effects.tasks.push(task);
        }
        self.end_plan(id);
        blocks
    }

    /// Takes a slot of `tier` for a copy of a block behind `above`.
    fn place(
        &mut self,
        tier: Tier,
        record: RecordId,
        above: Option<RecordId>,
        budget: &mut Budget,
    ) -> Result<Frame, NoSlot> {
        let frame = self.claim(tier, above, budget)?;
        self.begin_in(frame, record, above).ok_or(NoSlot::Refused)
    }

    /// The same for a block that comes from elsewhere and may be unknown.
    fn place_new(
        &mut self,
        tier: Tier,
        key: BlockKey,
        above: Option<RecordId>,
        owner: Option<Owner>,
        budget: &mut Budget,
    ) -> Result<(RecordId, Frame), NoSlot> {
        // The slot first: a block without room needs no record.
        let frame = self.claim(tier, above, budget)?;
        let Some(record) = self.intern(key, above, owner) else {
            self.tier_mut(tier).pool.give_back(frame);
            return Err(NoSlot::Refused);
        };
        Ok((record, self.begin_in(frame, record, above).ok_or(NoSlot::Refused)?))
    }

    /// Begins to fill a slot with a block; gives the handle back if that is not allowed.
    fn begin_in(
        &mut self,
        frame: Frame,
        record: RecordId,
        above: Option<RecordId>,
    ) -> Option<Frame> {
        let tier = frame.tier();
        let known = self.records.at(record);
        // A chain that names a block twice, or under another parent than before, is invalid.
        if known.parent() != above || known.has_or_awaits(tier) || self.is_dropped(record) {
            self.tier_mut(tier).pool.give_back(frame);
            return None;
        }
        self.records.at_mut(record).begin(tier, frame.slot());
        Some(frame)
    }

    /// Hands a transfer over to its caller: `reply` is called with its end. Drop the rest of the
    /// plan with the table unlocked.
    pub fn finish_plan(&mut self, plan: &mut TransferPlan, reply: Reply, now: Duration) {
        let (Some(id), Some(pins)) = (plan.transfer, plan.pins.take()) else { return };
        let account = plan.account(now);
        if let Some(transfer) = self.transfers.at_mut(id) {
            // Some of it, or what it hangs on, is to come by copies of others.
            let relies = matches!(transfer.parent, TransferParent::Awaited(_));
            if relies || plan.in_flight > 0 {
                transfer.relying = plan.take_brought();
            }
            // Copies are sent from the first step on, so some may have arrived.
            let copied = transfer.account.copied;
            transfer.account = TransferAccount { copied, ..account };
        }
        self.end_plan_for(id, Some(TransferCaller { pins, reply }));
    }

    /// The slots that a plan took for an engine to fill. Drop the rest of it with the table
    /// unlocked.
    ///
    /// # Panics
    /// If the plan was never [extended](Self::extend).
    pub fn reserved(&mut self, plan: &mut TransferPlan) -> Reserved {
        let frames = match &mut plan.path {
            BlockPath::Filled(frames) => std::mem::take(frames),
            _ => Vec::new(),
        };
        Reserved {
            transfer: plan.transfer.expect("the first step opens the transfer"),
            before: plan.before + plan.known(),
            in_flight: plan.in_flight,
            behind: plan.last_known(),
            namespace: plan.namespace,
            declined: plan.declined,
            refused: plan.refused,
            frames,
        }
    }

    /// Takes slots of `to` for what it lacks of `chain`, in one hold of any length.
    pub fn reserve(&mut self, to: Tier, chain: Chain<'_>, info: RequestInfo) -> Reserved {
        let mut plan = self.plan_filling(to, chain, info);
        while !self.extend(&mut plan) {}
        self.reserved(&mut plan)
    }

    /// Hands over a transfer that an engine filled to its caller. `filled`: how many of its blocks
    /// came.
    pub fn finish_filling(&mut self, filled: Filled, pins: Pins, reply: Reply) {
        let Filled { transfer: id, before, behind, blocks } = filled;
        if let Some(transfer) = self.transfers.at_mut(id) {
            let found = behind.filter(|_| before > 0).into_iter().collect();
            transfer.account =
                TransferAccount { before, found, blocks, ..TransferAccount::default() };
        }
        self.end_plan_for(id, Some(TransferCaller { pins, reply }));
    }
}

/// What an engine made of slots that were [reserved](Reserved) for it.
#[derive(Clone, Copy, Debug)]
pub struct Filled {
    transfer: TransferId,
    before: usize,
    behind: Option<BlockKey>,
    blocks: usize,
}

impl Reserved {
    /// The namespace of its blocks.
    pub(crate) const fn namespace(&self) -> NamespaceId {
        self.namespace
    }

    /// Says that the engine filled the first `blocks` of them.
    pub const fn filled(&self, blocks: usize) -> Filled {
        Filled { transfer: self.transfer, before: self.before, behind: self.behind, blocks }
    }
}
