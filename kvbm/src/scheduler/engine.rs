//! Transfers between the tiers and an engine's own memory: the engine names its slots, which have
//! no records.

use std::any::Any;
use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use kvbm_tiers::{Fence, SlotId, SlotRef, Tier};

use super::Core;
use super::engine_order::EngineOrder;
use super::routed::RoutedTask;
use super::spans;
use crate::api::engine_memory::{Loaded, Saved, Writers};
use crate::api::lease::Lease;
use crate::api::transfer::LayerCount;
use crate::api::transfer::Transfer;
use crate::error::Error;
use crate::names::hash::Chain;
use crate::table::{RequestInfo, SaveAgain, TransferEnd, TransferPlan};
use crate::task::{Class, CopyTask, TransferId};

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
    /// Layers of a block.
    pub layers: NonZeroU16,
    /// Dropped when no medium uses the slots any more.
    pub with_media: Arc<()>,
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
        let turn = self.planning.lock();
        let started = self.clock.uptime();
        let mut table = self.table();
        let chain = table.enter(chain);
        let pins = table.lease(chain, info);
        let mut plan = table.plan_saving(to, chain, (first, &slots), pins);
        drop(table);
        self.send(Class::Save, to, &mut plan, Some(EngineOrder::after(&ready).part_of(part_of)));
        let (id, orphans) = (plan.transfer(), plan.orphans());
        self.metrics.orphaned(orphans);
        self.spans.open(id, span);
        let (reply, transfer) =
            self.reply_with(move |ended, lease| Saved::new(ended, orphans, lease));
        self.hand_over(plan, reply, (turn, started));
        self.go_after(id, ready);
        self.cancellable(transfer, id).named(id)
    }

    /// Plans saves anew whose blocks other transfers should have brought and did not.
    pub(super) fn save_again(self: &Arc<Self>) {
        while let Some(SaveAgain { mut plan, reply }) = self.next_again() {
            let turn = self.planning.lock();
            let started = self.clock.uptime();
            self.send(Class::Save, plan.to(), &mut plan, None);
            self.hand_over(plan, reply, (turn, started));
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
        let mut waiting = self.saves_again.lock();
        let first = (0..waiting.len()).min_by_key(|&at| waiting[at].plan.before())?;
        waiting.swap_remove_back(first)
    }

    /// A thread that lands copies may have the turn to plan: this is left to background work.
    pub(super) fn save_again_soon(self: &Arc<Self>, again: Vec<SaveAgain>) {
        if again.is_empty() {
            return;
        }
        self.saves_again.lock().extend(again);
        // Checked afterwards: a close looks at these after it has set its flag.
        if self.is_closed() {
            self.end_saves_again();
        } else {
            self.flushing.wake();
        }
    }

    /// Brings what a lease holds into an engine's slots.
    pub fn load_into(self: &Arc<Self>, load: LoadInto<'_>) -> Transfer<Loaded> {
        if self.is_closed() {
            return Transfer::failed(Error::closed());
        }
        let LoadInto { lease, blocks, slots, after, layers, with_media, part_of } = load;
        let (first, wanted) = (blocks.start, blocks.len());
        // No layer comes of blocks that are not held: an engine that goes on with a layer must have
        // it of all the blocks that it asked for.
        let count = Arc::new(LayerCount::new(layers.get(), wanted));
        let writers = Writers::new(&with_media);
        let span =
            spans::of_transfer(Class::Load, Tier::Device, lease.pins().context().info.request);
        let turn = self.planning.lock();
        let started = self.clock.uptime();
        let mut plan = TransferPlan::into_engine(
            lease.into_pins(),
            blocks.start,
            slot_refs(slots),
            with_media,
        );
        while !self.table().trace(&mut plan) {}
        let order = EngineOrder::after(&after).in_layers(layers, &count).part_of(part_of);
        self.send(Class::Load, Tier::Device, &mut plan, Some(order));
        let id = plan.transfer();
        self.spans.open(id, span);
        let ends = EndsLayers(Arc::clone(&count));
        let (reply, transfer) = self.reply_with(move |ended: &TransferEnd, lease| {
            ends.0.end(ended.copied == wanted);
            Loaded::new((first, wanted), ended.copied, lease, writers)
        });
        self.hand_over(plan, reply, (turn, started));
        self.go_after(id, after);
        self.cancellable(transfer, id).named(id).in_layers(count)
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
        let overdue = self.orders.lock().overdue(self.clock.uptime(), self.tuning.timeout);
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
        // Collected from the first call on: they must not pile up for an engine that never asks.
        out.extend(self.completions.lock().get_or_insert_default().drain(..));
    }

    pub(super) fn note_completion(&self, id: TransferId) {
        if let Some(completions) = &mut *self.completions.lock() {
            // Nor for one that stopped asking.
            if completions.len() == MAX_COMPLETIONS {
                completions.pop_front();
            }
            completions.push_back(id);
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
            core.note_completion(id);
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
            let tasks = core.orders.lock().raised(self.id);
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
struct EndsLayers(Arc<LayerCount>);

impl Drop for EndsLayers {
    fn drop(&mut self) {
        self.0.end(false);
    }
}

/// An engine's slots have one life, and no generation.
fn slot_refs(slots: &[SlotId]) -> Vec<SlotRef> {
    slots.iter().map(|&slot| SlotRef { tier: Tier::Device, slot, generation: 0 }).collect()
}
