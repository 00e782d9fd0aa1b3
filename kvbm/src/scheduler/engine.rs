//! Transfers between the tiers and an engine's own memory: the engine names its slots, and nothing is recorded of them.

use std::any::Any;
use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use kvbm_tiers::{Fence, SlotId, SlotRef, Tier};

use super::Core;
use super::engine_order::EngineOrder;
use super::routed::RoutedTask;
use super::spans;
use crate::engine_results::{Loaded, Saved, Writers};
use crate::error::Error;
use crate::hash::Chain;
use crate::layers::LayerCount;
use crate::lease::Lease;
use crate::table::{RequestInfo, TransferEnd, TransferPlan};
use crate::task::{Class, CopyTask, TransferId};
use crate::transfer::Transfer;

/// So many completions wait for an engine that polls.
const MAX_COMPLETIONS: usize = 1 << 16;

/// A save from an engine's slots.
#[derive(Debug)]
pub struct SaveFrom<'a> {
    /// Whose blocks they are.
    pub info: RequestInfo,
    /// The request's chain.
    pub chain: Chain<'a>,
    /// Position in the chain of the block in the first of `slots`.
    pub first: usize,
    /// The engine's slots of successive blocks.
    pub slots: &'a [SlotId],
    /// When they are written.
    pub ready: Fence,
    /// What it is a part of, if it is.
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
    /// When these may be written.
    pub after: Fence,
    /// Layers of a block.
    pub layers: NonZeroU16,
    /// Goes when no medium has any of the slots any more.
    pub with_media: Arc<()>,
    /// What it is a part of, if it is.
    pub part_of: Option<Arc<JoinedTransfer>>,
}

/// A transfer of several cache groups: it has ended, for an engine that polls, when no part holds this any more.
#[derive(Debug)]
pub struct JoinedTransfer {
    // Weak: a medium that hangs keeps a part of one group, which must not keep a closed manager alive.
    core: Weak<Core>,
    id: OnceLock<TransferId>,
    /// Is dropped before its end is noted.
    until_end: Option<Box<dyn Any + Send + Sync>>,
}

impl Core {
    /// Brings blocks from an engine's slots into `to`, as far as it lacks them and they can hang on what it has.
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
        let (id, duplicates, orphans) = (plan.transfer(), plan.duplicates(), plan.orphans());
        self.metrics.duplicated(duplicates);
        self.metrics.orphaned(orphans);
        self.spans.open(id, span);
        let (reply, transfer) =
            self.reply_with(move |ended, lease| Saved::new(ended, (duplicates, orphans), lease));
        self.hand_over(plan, reply, (turn, started));
        self.go_after(id, ready);
        self.cancellable(transfer, id).named(id)
    }

    /// Brings what a lease holds into an engine's slots.
    pub fn load_into(self: &Arc<Self>, load: LoadInto<'_>) -> Transfer<Loaded> {
        if self.is_closed() {
            return Transfer::failed(Error::closed());
        }
        let LoadInto { lease, blocks, slots, after, layers, with_media, part_of } = load;
        let wanted = blocks.len();
        // Of what is not held no layer comes: an engine that goes on with a layer must have it of all that it asked for.
        let count = Arc::new(LayerCount::new(layers.get(), wanted));
        let writers = Writers::new(&with_media);
        let span = spans::of_transfer(Class::Load, Tier::Device, lease.pins().context().info.request);
        let turn = self.planning.lock();
        let started = self.clock.uptime();
        let mut plan =
            TransferPlan::into_engine(lease.into_pins(), blocks.start, slot_refs(slots), with_media);
        while !self.table().trace(&mut plan) {}
        let order = EngineOrder::after(&after).in_layers(layers, &count).part_of(part_of);
        self.send(Class::Load, Tier::Device, &mut plan, Some(order));
        let id = plan.transfer();
        self.spans.open(id, span);
        let ends = EndsLayers(Arc::clone(&count));
        let (reply, transfer) = self.reply_with(move |ended: &TransferEnd, lease| {
            ends.0.end(ended.copied == wanted);
            Loaded { arrived: ended.copied, failed: wanted - ended.copied, lease, writers }
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

    /// Ends transfers whose fence does not come.
    pub(super) fn give_up_unfenced(self: &Arc<Self>) {
        let overdue = self.orders.lock().overdue(self.clock.uptime(), self.tuning.timeout);
        for id in overdue {
            // The engine is late, no medium: no breaker opens.
            tracing::error!(?id, "an engine's fence does not come: its transfer ends");
            self.end_early(id);
        }
    }

    /// Tasks that were held back are not sent.
    pub(super) fn drop_held(self: &Arc<Self>, held: Vec<CopyTask>) {
        self.drop_tasks(held.into_iter().map(|task| RoutedTask::new(task, true, None)).collect());
    }

    /// Adds the transfers of an engine's slots that have ended since the last call, of those since the first call.
    pub(crate) fn completions(&self, out: &mut Vec<TransferId>) {
        // Collected from the first call on: whoever never asks must not have them pile up.
        out.extend(self.completions.lock().get_or_insert_default().drain(..));
    }

    pub(super) fn note_completion(&self, id: TransferId) {
        if let Some(completions) = &mut *self.completions.lock() {
            // Nor whoever asks no more.
            if completions.len() == MAX_COMPLETIONS {
                completions.pop_front();
            }
            completions.push_back(id);
        }
    }
}

impl JoinedTransfer {
    /// Its end is noted in `core`.
    pub(crate) fn of(core: &Arc<Core>) -> Arc<Self> {
        Arc::new(Self { core: Arc::downgrade(core), id: OnceLock::new(), until_end: None })
    }

    /// The same, which keeps something until its end.
    pub(crate) fn keeping(core: &Arc<Core>, kept: impl Any + Send + Sync) -> Arc<Self> {
        let until_end: Option<Box<dyn Any + Send + Sync>> = Some(Box::new(kept));
        Arc::new(Self { core: Arc::downgrade(core), id: OnceLock::new(), until_end })
    }

    /// Gives it the name of its first part, which is of that core. Without one nothing is noted.
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
    // Weak: a fence that nobody raises must not keep a closed manager alive.
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
    /// A fence that nobody can raise any more ends what waits for it.
    fn drop(&mut self) {
        if let Some(core) = self.core.upgrade().filter(|_| !self.is_raised) {
            core.end_early(self.id);
        }
    }
}

/// Tells whoever waits for layers that no more will come, also where the answer is never given.
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
