//! The order between an engine's own work and copies that touch its memory.
//!
//! A transfer of an engine's slots is held back until the engine has raised its fence: no medium is
//! to blame for a missing one. A GPU's signals go along with the batches, since no thread here can
//! see them.

use std::collections::HashMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvbm_tiers::{Fence, Fences, Layers, Tier};

use super::engine::JoinedTransfer;
use crate::api::transfer::LayerCount;
use crate::task::{CopyTask, TransferId};

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

    pub(super) fn in_layers(self, layers: NonZeroU16, arrived: &Arc<LayerCount>) -> Self {
        let arrived = Arc::clone(arrived);
        Self {
            layers: Some(Layers::new(layers, move |layer, blocks| arrived.add(layer, blocks))),
            ..self
        }
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
    pub(super) fn cancel(&mut self, (id, block): (TransferId, u32)) -> Vec<CopyTask> {
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
    fn what_comes_after_the_end_of_its_transfer_is_in_vain() {
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
