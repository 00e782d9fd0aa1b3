//! The order between copies and an engine's own work, where copies touch the engine's memory.
//!
//! A transfer of an engine's slots is held back until it is planned to its end and the engine has raised its fence: a
//! layer is that of all blocks, and a fence that never comes must cost nobody but its caller. What a GPU signals goes
//! along with the batches, since no thread here can see it.

use std::collections::HashMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::{Fence, Fences, Layers};

use crate::layers::LayerCount;
use crate::task::{CopyTask, TransferId};

/// What the batches of a transfer keep to.
#[derive(Debug)]
pub(super) struct EngineOrder {
    after: Fence,
    /// How far its layers have come, where they come one by one.
    layers: Option<(NonZeroU16, Arc<LayerCount>)>,
}

impl EngineOrder {
    pub(super) const fn has_layers(&self) -> bool {
        self.layers.is_some()
    }

    /// For a batch of `blocks`.
    pub(super) fn fences(&self, blocks: usize) -> Fences {
        let layers = self.layers.as_ref().map(|(count, arrived)| {
            let arrived = Arc::clone(arrived);
            Layers::new(*count, move |layer| arrived.add(layer, blocks))
        });
        Fences { after: self.after.clone(), layers, ..Fences::default() }
    }
}

/// A transfer of an engine's slots.
#[derive(Debug)]
struct Ordered {
    order: Arc<EngineOrder>,
    /// What is yet to come before anything is copied: the rest of the plan, and the engine's fence.
    lacks_plan: bool,
    lacks_fence: bool,
    since: Duration,
    held: Vec<CopyTask>,
}

/// All transfers of engines' slots.
#[derive(Debug, Default)]
pub(super) struct EngineOrders(HashMap<TransferId, Ordered>);

impl EngineOrders {
    /// Holds back a transfer that is being planned, and whose copies come `after` the engine's work.
    pub(super) fn open(
        &mut self,
        id: TransferId,
        after: Fence,
        layers: Option<(NonZeroU16, Arc<LayerCount>)>,
        now: Duration,
    ) {
        // A thread's fence is waited for here, everything else is left to the backend.
        let (lacks_fence, after) = match after {
            Fence::Host(fence) => (!fence.is_raised(), Fence::Done),
            other => (false, other),
        };
        let order = Arc::new(EngineOrder { after, layers });
        let ordered = Ordered { order, lacks_plan: true, lacks_fence, since: now, held: Vec::new() };
        self.0.insert(id, ordered);
    }

    /// Those of `tasks` that are not held back, with the order that they keep.
    pub(super) fn let_through(&mut self, tasks: Vec<CopyTask>) -> Vec<(CopyTask, Option<Arc<EngineOrder>>)> {
        // Most managers have no engine's memory.
        if self.0.is_empty() {
            return tasks.into_iter().map(|task| (task, None)).collect();
        }
        let mut through = Vec::with_capacity(tasks.len());
        for task in tasks {
            match self.0.get_mut(&task.id.transfer) {
                Some(ordered) if ordered.lacks_plan || ordered.lacks_fence => ordered.held.push(task),
                Some(ordered) => through.push((task, Some(Arc::clone(&ordered.order)))),
                None => through.push((task, None)),
            }
        }
        through
    }

    /// The plan is complete. Returns what may go now.
    pub(super) fn planned(&mut self, id: TransferId) -> Vec<CopyTask> {
        self.advance(id, |ordered| ordered.lacks_plan = false)
    }

    /// The engine has raised the fence. Returns what may go now.
    pub(super) fn raised(&mut self, id: TransferId) -> Vec<CopyTask> {
        self.advance(id, |ordered| ordered.lacks_fence = false)
    }

    fn advance(&mut self, id: TransferId, step: impl FnOnce(&mut Ordered)) -> Vec<CopyTask> {
        let Some(ordered) = self.0.get_mut(&id) else { return Vec::new() };
        step(ordered);
        if ordered.lacks_plan || ordered.lacks_fence { Vec::new() } else { std::mem::take(&mut ordered.held) }
    }

    /// Takes out what is held back of a transfer for its blocks from `block` on.
    pub(super) fn cancel(&mut self, (id, block): (TransferId, u32)) -> Vec<CopyTask> {
        let Some(ordered) = self.0.get_mut(&id) else { return Vec::new() };
        let held = std::mem::take(&mut ordered.held);
        let (in_vain, others) = held.into_iter().partition(|task| task.id.block >= block);
        ordered.held = others;
        in_vain
    }

    /// Everything that is held back.
    pub(super) fn take_all(&mut self) -> Vec<CopyTask> {
        self.0.values_mut().flat_map(|ordered| std::mem::take(&mut ordered.held)).collect()
    }

    /// Transfers whose fence has not come within `limit`.
    pub(super) fn overdue(&self, now: Duration, limit: Duration) -> Vec<TransferId> {
        let is_overdue = |ordered: &Ordered| ordered.lacks_fence && now.saturating_sub(ordered.since) > limit;
        self.0.iter().filter(|(_, ordered)| is_overdue(ordered)).map(|(&id, _)| id).collect()
    }

    /// A transfer has ended. If it was one of these: what was held back for it since it failed, and is in vain.
    pub(super) fn end(&mut self, id: TransferId) -> Option<Vec<CopyTask>> {
        self.0.remove(&id).map(|ordered| ordered.held)
    }
}
