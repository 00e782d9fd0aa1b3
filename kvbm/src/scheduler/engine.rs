//! Transfers between the tiers and an engine's own memory: the engine names its slots, which have
//! no records.
//!
//! A transfer of an engine's slots is held back until the engine has raised its fence: no medium is
//! to blame for a missing one. A GPU's signals go along with the batches, since no thread here can
//! see them.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use kvbm_tiers::ranks::RankLoad;
use kvbm_tiers::{Fence, Fences, LayerCount, Layers, SlotId, SlotRef, Tier};

use super::Core;
use super::dispatch::RoutedTask;
use super::spans;
use crate::api::lease::Lease;
use crate::api::transfer::{Loaded, Saved, Transfer, Writers};
use crate::error::Error;
use crate::names::hash::Chain;
use crate::sync::Mutex;
use crate::table::{RequestInfo, SaveAgain, TransferEnd, TransferPlan};
use crate::task::{Class, CopyTask, TransferId, WithMedia};

/// Completions that wait for an engine that polls.
const MAX_COMPLETIONS: usize = 1 << 16;

/// A save from an engine's slots.
#[derive(Debug)]
pub struct SaveFrom<'a> {
    /// The request.
    pub info: RequestInfo,
    /// The request's chain.
    pub chain: Chain<'a>,
    /// Position in the chain of the block in the first of `slots`.
    pub first: usize,
    /// The engine's slots of successive blocks.
    pub slots: &'a [SlotId],
    /// Raised when they are written.
    pub ready: Fence,
    /// The larger transfer that it is a part of, if any.
    pub part_of: Option<Arc<JoinedTransfer>>,
}

/// A load into an engine's slots.
#[derive(Debug)]
pub struct LoadInto<'a> {
    /// Holds the blocks.
    pub lease: Lease,
    /// Positions of the wanted blocks in the lease's chain.
    pub blocks: Range<usize>,
    /// Where each goes.
    pub slots: &'a [SlotId],
    /// Raised when these may be written.
    pub after: Fence,
    /// Counts the wanted blocks, held or not: an engine that goes on with a layer must have it of
    /// all that it asked for.
    pub layers: Arc<LayerCount>,
    /// How ranks call it that count layers of their own.
    pub in_ranks: Option<RankLoad>,
    /// Dropped when no medium uses the slots any more.
    pub with_media: WithMedia,
    /// The larger transfer that it is a part of, if any.
    pub part_of: Option<Arc<JoinedTransfer>>,
}

/// A transfer of several cache groups: for an engine that polls, it has ended when no part holds
/// this any more.
#[derive(Debug)]
pub struct JoinedTransfer {
    // Weak: a hanging medium keeps a part of one group, which must not keep a closed manager alive.
    core: Weak<Core>,
    id: OnceLock<TransferId>,
    /// Is dropped before its end is noted.
    until_end: Option<Box<dyn Any + Send + Sync>>,
}

/// Transfers of an engine's slots.
pub(super) struct EngineTransfers {
    /// What each waits for.
    pub(super) orders: Mutex<EngineOrders>,
    pub(super) completions: EndedTransfers,
    /// Saves to plan anew.
    saves_again: Mutex<VecDeque<SaveAgain>>,
}

impl EngineTransfers {
    /// `is_device`: the device tier is the engine's.
    pub(super) fn new(is_device: bool) -> Self {
        Self {
            orders: Mutex::new(EngineOrders::new(is_device)),
            completions: EndedTransfers::default(),
            saves_again: Mutex::default(),
        }
    }
}

impl Core {
    /// Brings blocks from an engine's slots into `to`, if it lacks them and has or awaits their
    /// parents.
    pub fn save_from(self: &Arc<Self>, to: Tier, save: SaveFrom<'_>) -> Transfer<Saved> {
        if self.is_closed() {
            return Transfer::failed(Error::closed());
        }
        let SaveFrom { info, chain, first, slots, ready, part_of } = save;
        let slots = slot_refs(slots);
        let span = spans::of_transfer(Class::Save, to, info.request);
        let turn = self.turn_to_plan();
        let mut table = self.table();
        let chain = table.enter(chain);
        let pins = table.lease(chain, info);
        let mut plan = table.plan_saving(to, chain, first, &slots, pins);
        drop(table);
        self.send(Class::Save, to, &mut plan, Some(EngineOrder::after(&ready).part_of(part_of)));
        let (id, orphans) = (plan.transfer(), plan.orphans());
        self.metrics.orphaned(orphans);
        self.spans.open(id, span);
        let answer = move |ended: &TransferEnd, lease| Saved::new(ended, orphans, lease);
        let (reply, transfer) = Transfer::replied(&self.table, answer);
        self.hand_over(plan, reply, turn);
        self.go_after(id, ready);
        self.cancellable(transfer, id).named(id)
    }

    /// Plans saves anew whose blocks other transfers should have brought and did not.
    pub(super) fn save_again(self: &Arc<Self>) {
        while let Some(SaveAgain { mut plan, reply }) = self.next_again() {
            let turn = self.turn_to_plan();
            self.send(Class::Save, plan.to(), &mut plan, None);
            self.hand_over(plan, reply, turn);
        }
    }

    /// The same after a close: they end.
    pub(super) fn end_saves_again(self: &Arc<Self>) {
        while let Some(SaveAgain { mut plan, reply }) = self.next_again() {
            self.take_slots(&mut plan, None);
            let mut table = self.table();
            table.finish_plan(&mut plan, reply, self.clock.uptime());
            let effects = table.take_effects();
            drop(table);
            self.apply(effects);
        }
    }

    /// The one that begins first in its chain: another may hang on what it brings.
    fn next_again(&self) -> Option<SaveAgain> {
        let mut waiting = self.engine.saves_again.lock();
        let first = (0..waiting.len()).min_by_key(|&at| waiting[at].plan.before())?;
        waiting.swap_remove_back(first)
    }

    /// A thread that lands copies may have the turn to plan: this is left to background work.
    pub(super) fn save_again_soon(self: &Arc<Self>, again: Vec<SaveAgain>) {
        if again.is_empty() {
            return;
        }
        self.engine.saves_again.lock().extend(again);
        // Checked afterwards: a close looks at these after it has set its flag.
        if self.is_closed() {
            self.end_saves_again();
        } else {
            self.waker.wake();
        }
    }

    /// Brings what a lease holds into an engine's slots.
    pub fn load_into(self: &Arc<Self>, load: LoadInto<'_>) -> Transfer<Loaded> {
        if self.is_closed() {
            return Transfer::failed(Error::closed());
        }
        let LoadInto { lease, blocks, slots, after, layers, in_ranks, with_media, part_of } = load;
        let writers = Writers::new(&with_media);
        let until_told = Arc::clone(&with_media);
        let span =
            spans::of_transfer(Class::Load, Tier::Device, lease.pins().context().info.request);
        let turn = self.turn_to_plan();
        let mut plan = TransferPlan::into_engine(
            lease.into_pins(),
            blocks.start,
            slot_refs(slots),
            with_media,
        );
        while !self.table().trace(&mut plan) {}
        let order = EngineOrder::after(&after).in_layers(&layers, in_ranks).part_of(part_of);
        self.send(Class::Load, Tier::Device, &mut plan, Some(order));
        let id = plan.transfer();
        self.spans.open(id, span);
        let ends = EndsLayers(Arc::clone(&layers));
        let answer = move |ended: &TransferEnd, lease| {
            ends.0.end(ended.copied);
            drop(until_told);
            Loaded::new(blocks, ended.copied, lease, writers)
        };
        let (reply, transfer) = Transfer::replied(&self.table, answer);
        self.hand_over(plan, reply, turn);
        self.go_after(id, after);
        self.cancellable(transfer, id).named(id).in_layers(layers)
    }

    /// The copies of a transfer go once the engine is `ready`.
    fn go_after(self: &Arc<Self>, id: Option<TransferId>, ready: Fence) {
        if let (Some(id), Fence::Host(fence)) = (id, ready) {
            let waiting = WaitingTransfer { core: Arc::downgrade(self), id, is_raised: false };
            fence.park(move || waiting.raised());
        }
    }

    /// Ends transfers whose fence is overdue.
    pub(super) fn give_up_unfenced(self: &Arc<Self>) {
        let overdue = self.engine.orders.lock().overdue(self.clock.uptime(), self.tuning.timeout);
        for id in overdue {
            // The engine is late, not a medium: no breaker opens.
            tracing::error!(?id, "an engine's fence does not come: its transfer ends");
            self.end_early(id);
        }
    }

    /// Drops tasks that were held back.
    pub(super) fn drop_held(self: &Arc<Self>, held: Vec<CopyTask>) {
        self.drop_tasks(held.into_iter().map(|task| RoutedTask::new(task, true, None)).collect());
    }

    /// Adds the transfers of an engine's slots that have ended since the last call, of those since
    /// the first call.
    pub(crate) fn completions(&self, out: &mut Vec<TransferId>) {
        self.engine.completions.take(out);
    }
}

/// Transfers of an engine's slots that have ended, from its first poll on.
#[derive(Debug, Default)]
pub(super) struct EndedTransfers(Mutex<Option<VecDeque<TransferId>>>);

impl EndedTransfers {
    fn take(&self, out: &mut Vec<TransferId>) {
        // Collected from the first call on: they must not pile up for an engine that never asks.
        out.extend(self.0.lock().get_or_insert_default().drain(..));
    }

    pub(super) fn note(&self, id: TransferId) {
        if let Some(ended) = &mut *self.0.lock() {
            // Nor for one that stopped asking.
            if ended.len() == MAX_COMPLETIONS {
                ended.pop_front();
            }
            ended.push_back(id);
        }
    }
}

impl JoinedTransfer {
    /// A transfer whose end is noted in `core`.
    pub(crate) fn of(core: &Arc<Core>) -> Arc<Self> {
        Arc::new(Self { core: Arc::downgrade(core), id: OnceLock::new(), until_end: None })
    }

    /// The same, which keeps something until its end.
    pub(crate) fn keeping(core: &Arc<Core>, kept: impl Any + Send + Sync) -> Arc<Self> {
        let until_end: Option<Box<dyn Any + Send + Sync>> = Some(Box::new(kept));
        Arc::new(Self { core: Arc::downgrade(core), id: OnceLock::new(), until_end })
    }

    /// Names it after its first part, which is of that core. Without a name nothing is noted.
    pub(crate) fn name(&self, id: Option<TransferId>) {
        id.map(|id| self.id.get_or_init(|| id));
    }
}

impl Drop for JoinedTransfer {
    fn drop(&mut self) {
        drop(self.until_end.take());
        if let (Some(core), Some(&id)) = (self.core.upgrade(), self.id.get()) {
            core.engine.completions.note(id);
        }
    }
}

/// A transfer that waits for a thread of the engine.
struct WaitingTransfer {
    // Weak: a fence that is never raised must not keep a closed manager alive.
    core: Weak<Core>,
    id: TransferId,
    is_raised: bool,
}

impl WaitingTransfer {
    fn raised(mut self) {
        self.is_raised = true;
        if let Some(core) = self.core.upgrade() {
            let tasks = core.engine.orders.lock().raised(self.id);
            core.queue(tasks);
        }
    }
}

impl Drop for WaitingTransfer {
    /// A fence that can no longer be raised ends what waits for it.
    fn drop(&mut self) {
        if let Some(core) = self.core.upgrade().filter(|_| !self.is_raised) {
            core.end_early(self.id);
        }
    }
}

/// Tells waiters for layers that no more will come, even if the answer is never given.
pub(crate) struct EndsLayers(pub(crate) Arc<LayerCount>);

impl Drop for EndsLayers {
    fn drop(&mut self) {
        self.0.end(0);
    }
}

/// An engine's slots have one life, and no generation.
fn slot_refs(slots: &[SlotId]) -> Vec<SlotRef> {
    slots.iter().map(|&slot| SlotRef { tier: Tier::Device, slot, generation: 0 }).collect()
}

/// The order that the batches of a transfer keep.
#[derive(Debug)]
pub(super) struct EngineOrder {
    after: Fence,
    /// Reports its layers, if they come one by one.
    layers: Option<Layers>,
    /// Until it is [open](EngineOrders::open).
    part_of: Option<Arc<JoinedTransfer>>,
    /// A backend has or had a batch of it.
    is_begun: AtomicBool,
}

impl EngineOrder {
    pub(super) fn after(fence: &Fence) -> Self {
        Self { after: fence.clone(), layers: None, part_of: None, is_begun: AtomicBool::new(false) }
    }

    pub(super) fn in_layers(self, count: &Arc<LayerCount>, in_ranks: Option<RankLoad>) -> Self {
        Self { layers: Some(Layers::counted(count).in_ranks(in_ranks)), ..self }
    }

    pub(super) fn part_of(self, joined: Option<Arc<JoinedTransfer>>) -> Self {
        Self { part_of: joined, ..self }
    }

    pub(super) const fn has_layers(&self) -> bool {
        self.layers.is_some()
    }

    /// Whether earlier batches of the load are already copying layers. New ones do not wait until
    /// these have finished the last: an engine waits for the first layer of all blocks.
    pub(super) fn has_layers_under_way(&self) -> bool {
        // Relaxed: the thread that plans the load also sends it. Another thread that sees this late
        // sends a batch later.
        self.has_layers() && self.is_begun.load(Ordering::Relaxed)
    }

    /// The fences for a batch that is sent.
    pub(super) fn fences(&self) -> Fences {
        self.is_begun.store(true, Ordering::Relaxed);
        Fences { after: self.after.clone(), layers: self.layers.clone(), ..Fences::default() }
    }
}

/// A transfer of an engine's slots.
#[derive(Debug)]
struct OrderedTransfer {
    order: Arc<EngineOrder>,
    /// Not in the order, which batches keep for as long as a medium has them.
    part_of: Option<Arc<JoinedTransfer>>,
    /// The engine has not raised its fence yet: nothing is copied.
    lacks_fence: bool,
    /// Its time does not measure the tiers alone.
    waits: bool,
    since: Duration,
    held: Vec<CopyTask>,
}

/// What is left of a transfer of an engine's slots that has ended.
#[derive(Debug)]
pub(super) struct EndedOrder {
    /// It had to wait for the engine.
    pub(super) waited: bool,
    /// Tasks held back for it, which are now useless.
    pub(super) held: Vec<CopyTask>,
    /// Dropped once its caller was told.
    pub(super) part_of: Option<Arc<JoinedTransfer>>,
}

/// All transfers of engines' slots.
#[derive(Debug)]
pub(super) struct EngineOrders {
    transfers: HashMap<TransferId, OrderedTransfer>,
    /// No device slot is ours: every copy from or to the device belongs to one of these transfers.
    is_device_of_engine: bool,
}

impl EngineOrders {
    pub(super) fn new(is_device_of_engine: bool) -> Self {
        Self { transfers: HashMap::new(), is_device_of_engine }
    }

    /// Holds back a transfer that is being planned.
    pub(super) fn open(&mut self, id: TransferId, mut order: EngineOrder, now: Duration) {
        let waits = !order.after.is_done();
        let part_of = order.part_of.take();
        // A thread's fence is waited for here; everything else is left to the backend.
        let (lacks_fence, after) = match order.after {
            Fence::Host(fence) => (!fence.is_raised(), Fence::Done),
            other => (false, other),
        };
        let order = Arc::new(EngineOrder { after, ..order });
        let ordered =
            OrderedTransfer { order, part_of, lacks_fence, waits, since: now, held: Vec::new() };
        self.transfers.insert(id, ordered);
    }

    /// Holds back those of `tasks` that must wait; `queue` gets the others, each with its order.
    /// Returns those whose transfers ended meanwhile: the engine may use their slots again, and no
    /// fence says when.
    pub(super) fn let_through(
        &mut self,
        tasks: Vec<CopyTask>,
        mut queue: impl FnMut(CopyTask, Option<Arc<EngineOrder>>),
    ) -> Vec<CopyTask> {
        let mut in_vain = Vec::new();
        // Most managers have no engine memory.
        if !self.is_device_of_engine {
            tasks.into_iter().for_each(|task| queue(task, None));
            return in_vain;
        }
        // Hundreds of one transfer come together.
        for tasks in tasks.chunk_by(|task, next| task.id.transfer == next.id.transfer) {
            match self.transfers.get_mut(&tasks[0].id.transfer) {
                Some(ordered) if ordered.lacks_fence => ordered.held.extend_from_slice(tasks),
                Some(ordered) => {
                    tasks.iter().for_each(|task| queue(*task, Some(Arc::clone(&ordered.order))));
                }
                None => {
                    let (touching, others): (Vec<_>, Vec<_>) =
                        tasks.iter().copied().partition(touches_device);
                    in_vain.extend(touching);
                    others.into_iter().for_each(|task| queue(task, None));
                }
            }
        }
        in_vain
    }

    /// The engine has raised the fence. Returns what may go now.
    pub(super) fn raised(&mut self, id: TransferId) -> Vec<CopyTask> {
        let Some(ordered) = self.transfers.get_mut(&id) else { return Vec::new() };
        ordered.lacks_fence = false;
        std::mem::take(&mut ordered.held)
    }

    /// Takes out the held-back tasks of a transfer for its blocks from `block` on.
    pub(super) fn cancel(&mut self, id: TransferId, block: u32) -> Vec<CopyTask> {
        let Some(ordered) = self.transfers.get_mut(&id) else { return Vec::new() };
        let held = std::mem::take(&mut ordered.held);
        let (in_vain, others) = held.into_iter().partition(|task| task.id.block >= block);
        ordered.held = others;
        in_vain
    }

    /// Everything that is held back.
    pub(super) fn take_all(&mut self) -> Vec<CopyTask> {
        self.transfers.values_mut().flat_map(|ordered| std::mem::take(&mut ordered.held)).collect()
    }

    /// Transfers whose fence was not raised within `limit`.
    pub(super) fn overdue(&self, now: Duration, limit: Duration) -> Vec<TransferId> {
        let is_overdue = |ordered: &OrderedTransfer| {
            ordered.lacks_fence && now.saturating_sub(ordered.since) > limit
        };
        self.transfers
            .iter()
            .filter(|(_, ordered)| is_overdue(ordered))
            .map(|(&id, _)| id)
            .collect()
    }

    /// A transfer has ended, perhaps one of these.
    pub(super) fn end(&mut self, id: TransferId) -> Option<EndedOrder> {
        let OrderedTransfer { waits: waited, held, part_of, .. } = self.transfers.remove(&id)?;
        Some(EndedOrder { waited, held, part_of })
    }
}

fn touches_device(task: &CopyTask) -> bool {
    task.from.tier == Tier::Device || task.to.tier == Tier::Device
}

#[cfg(test)]
mod tests {
    use kvbm_tiers::{BlockKey, HostFence, SlotId, SlotRef};

    use super::*;
    use crate::task::{Class, TaskId};

    const ID: TransferId = TransferId { place: 0, life: 0 };

    fn task(to: Tier) -> CopyTask {
        let slot = |tier| SlotRef { tier, slot: SlotId(0), generation: 0 };
        CopyTask {
            id: TaskId { transfer: ID, block: 0 },
            class: Class::Load,
            block: BlockKey { hash: 1, group: 0 },
            parent: None,
            owner: None,
            from: slot(Tier::Disk),
            to: slot(to),
            via: None,
            is_probe: false,
        }
    }

    #[test]
    fn tasks_after_the_end_of_their_transfer_are_dropped() {
        let mut orders = EngineOrders::new(true);
        orders.open(ID, EngineOrder::after(&Fence::Host(HostFence::new())), Duration::ZERO);
        let mut queued = 0;
        let in_vain = orders.let_through(vec![task(Tier::Device)], |_, _| queued += 1);
        assert!(queued == 0 && in_vain.is_empty(), "it waits for its fence");
        let ended = orders.end(ID).expect("it is an engine's");
        assert!(ended.waited && ended.held.len() == 1);
        let in_vain =
            orders.let_through(vec![task(Tier::Device), task(Tier::Host)], |_, _| queued += 1);
        assert_eq!(in_vain.len(), 1, "nothing orders it with the engine any more");
        assert_eq!(queued, 1, "a flush touches no memory of the engine's");
    }
}
