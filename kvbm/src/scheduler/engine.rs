//! Transfers between the tiers and an engine's own memory: the engine names its slots, and nothing is recorded of them.

use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::{Arc, Weak};

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
}

impl Core {
    /// Brings blocks from an engine's slots into `to`, as far as it lacks them and they can hang on what it has.
    pub fn save_from(self: &Arc<Self>, to: Tier, save: SaveFrom<'_>) -> Transfer<Saved> {
        if self.is_closed() {
            return Transfer::failed(Error::closed());
        }
        let SaveFrom { info, chain, first, slots, ready } = save;
        let slots = slot_refs(slots);
        let span = spans::of_transfer(Class::Save, to, info.request);
        let turn = self.planning.lock();
        let started = self.clock.uptime();
        let mut table = self.table();
        let chain = table.enter(chain);
        let pins = table.lease(chain, info);
        let planned = table.plan_saving(to, chain, (first, &slots), pins);
        drop(table);
        let mut plan = match planned {
            Ok(plan) => plan,
            Err(pins) => {
                drop(turn);
                self.metrics.orphaned(slots.len());
                let lease = Lease::new(Arc::clone(&self.table), pins);
                return Transfer::ended(Saved::orphans(slots.len(), to, lease));
            }
        };
        self.send(Class::Save, to, &mut plan, Some(EngineOrder::after(&ready)));
        let (id, duplicates) = (plan.transfer(), plan.duplicates());
        self.metrics.duplicated(duplicates);
        self.spans.open(id, span);
        let (reply, transfer) = self.reply_with(move |ended, lease| Saved::new(ended, duplicates, lease));
        self.hand_over(plan, reply, (turn, started));
        self.go_after(id, ready);
        self.cancellable(transfer, id)
    }

    /// Brings what a lease holds into an engine's slots.
    pub fn load_into(self: &Arc<Self>, load: LoadInto<'_>) -> Transfer<Loaded> {
        if self.is_closed() {
            return Transfer::failed(Error::closed());
        }
        let LoadInto { lease, blocks, slots, after, layers } = load;
        let (with_media, wanted) = (Arc::new(()), blocks.len());
        // Of what is not held no layer comes: an engine that goes on with a layer must have it of all that it asked for.
        let count = Arc::new(LayerCount::new(layers.get(), wanted));
        let writers = Writers::new(&with_media);
        let span = spans::of_transfer(Class::Load, Tier::Device, lease.pins().context().info.request);
        let turn = self.planning.lock();
        let started = self.clock.uptime();
        let mut plan =
            TransferPlan::into_engine(lease.into_pins(), blocks.start, slot_refs(slots), with_media);
        while !self.table().trace(&mut plan) {}
        let order = EngineOrder::after(&after).in_layers(layers, &count);
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
        self.cancellable(transfer, id).in_layers(count)
    }

    /// The copies of a transfer go once the engine is `ready`.
    fn go_after(self: &Arc<Self>, id: Option<TransferId>, ready: Fence) {
        if let (Some(id), Fence::Host(fence)) = (id, ready) {
            let waiting = Waiting { core: Arc::downgrade(self), id, is_raised: false };
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
        out.append(self.completions.lock().get_or_insert_default());
    }

    pub(super) fn note_completion(&self, id: TransferId) {
        if let Some(completions) = &mut *self.completions.lock() {
            completions.push(id);
        }
    }
}

/// A transfer that waits for a thread of the engine.
struct Waiting {
    // Weak: a fence that nobody raises must not keep a closed manager alive.
    core: Weak<Core>,
    id: TransferId,
    is_raised: bool,
}

impl Waiting {
    fn raised(mut self) {
        self.is_raised = true;
        if let Some(core) = self.core.upgrade() {
            let tasks = core.orders.lock().raised(self.id);
            core.queue(tasks);
        }
    }
}

impl Drop for Waiting {
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
