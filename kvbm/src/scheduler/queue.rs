//! Queues of tasks, one per route, and the choice of what goes to the hardware next.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use kvbm_tiers::{BlockKey, Route, Tier};

use super::dispatch::RoutedTask;
use crate::task::{Class, TransferId};

/// What to do with a task whose turn has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskTurn {
    /// It goes to the backend.
    Send,
    /// It waits for a staging slot, and so do those behind it.
    Wait,
    /// It is not sent.
    Drop,
}

/// The next batch for the hardware.
#[derive(Debug)]
pub(super) struct NextBatch {
    pub(super) route: Route,
    pub(super) class: Class,
    /// May be empty, if tasks were dropped.
    pub(super) tasks: Vec<RoutedTask>,
    pub(super) dropped: Vec<RoutedTask>,
}

/// How much may be in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueLimits {
    /// Batches in flight per route.
    pub(super) batches: usize,
    /// Blocks in a batch.
    pub(super) batch_blocks: usize,
    /// Blocks in a batch to or from the object tier: what fits into one segment.
    pub(super) segment_blocks: usize,
}

#[derive(Debug, Default)]
struct RouteQueue {
    by_class: [VecDeque<RoutedTask>; Class::ALL.len()],
    batches: [usize; Class::ALL.len()],
}

impl RouteQueue {
    fn batches(&self) -> usize {
        self.batches.iter().sum()
    }

    fn has_loads(&self) -> bool {
        let load = Class::Load as usize;
        !self.by_class[load].is_empty() || self.batches[load] > 0
    }

    /// Whether the next task belongs to a load whose layers are under way.
    fn goes_on(&self, class: Class) -> bool {
        let next = self.by_class[class as usize].front().filter(|task| !task.halfway);
        next.and_then(RoutedTask::order).is_some_and(|order| order.has_layers_under_way())
    }

    fn most_urgent(&self) -> Option<Class> {
        Class::ALL.into_iter().find(|&class| !self.by_class[class as usize].is_empty())
    }
}

/// All queues.
#[derive(Debug)]
pub(super) struct RouteQueues {
    queues: [[RouteQueue; Tier::COUNT]; Tier::COUNT],
    limits: QueueLimits,
}

impl RouteQueues {
    pub(super) fn new(limits: QueueLimits) -> Self {
        Self { queues: Default::default(), limits }
    }

    fn queue(&mut self, route: Route) -> &mut RouteQueue {
        &mut self.queues[route.from.index()][route.to.index()]
    }

    pub(super) fn push(&mut self, task: RoutedTask) {
        self.queue(task.route()).by_class[task.task.class as usize].push_back(task);
    }

    /// Blocks that wait on a route.
    pub(super) fn waiting(&self, route: Route) -> usize {
        self.queues[route.from.index()][route.to.index()].by_class.iter().map(VecDeque::len).sum()
    }

    /// Batches that the hardware is working on.
    pub(super) fn in_flight(&self, route: Route) -> usize {
        self.queues[route.from.index()][route.to.index()].batches()
    }

    /// Makes the prefetches of these blocks loads: an engine waits for them now.
    pub(super) fn raise(&mut self, blocks: &HashSet<BlockKey>) {
        let (load, prefetch) = (Class::Load as usize, Class::Prefetch as usize);
        for queue in self.queues.iter_mut().flatten() {
            let waiting = std::mem::take(&mut queue.by_class[prefetch]);
            let (raised, others): (VecDeque<_>, _) =
                waiting.into_iter().partition(|task| blocks.contains(&task.task.block));
            // Behind the loads that already wait: their engines have waited longer.
            queue.by_class[load].extend(raised);
            queue.by_class[prefetch] = others;
        }
    }

    /// Takes out the tasks of a transfer for its blocks from `block` on, which are useless now.
    pub(super) fn cancel(&mut self, transfer: TransferId, block: u32) -> Vec<RoutedTask> {
        let is_in_vain =
            |task: &RoutedTask| task.task.id.transfer == transfer && task.task.id.block >= block;
        let mut cancelled = Vec::new();
        for waiting in self.queues.iter_mut().flatten().flat_map(|queue| &mut queue.by_class) {
            // Most queues have nothing of the transfer, and are left as they are.
            if waiting.iter().any(is_in_vain) {
                let (in_vain, others): (VecDeque<_>, _) =
                    std::mem::take(waiting).into_iter().partition(is_in_vain);
                *waiting = others;
                cancelled.extend(in_vain);
            }
        }
        cancelled
    }

    /// Everything that waits.
    pub(super) fn take_all(&mut self) -> Vec<RoutedTask> {
        let queues = self.queues.iter_mut().flatten().flat_map(|queue| &mut queue.by_class);
        queues.flat_map(std::mem::take).collect()
    }

    /// A batch that should start now; `turn` says what to do with each task in its turn.
    pub(super) fn next_batch(
        &mut self,
        mut turn: impl FnMut(&mut RoutedTask) -> TaskTurn,
    ) -> Option<NextBatch> {
        let loading = Tier::ALL.map(|tier| self.is_loading_from(tier));
        for route in routes() {
            let limit = self.batch_limit(route);
            let most = self.limits.batches;
            let queue = self.queue(route);
            let may_start = |&class: &Class| queue.batches() < most || queue.goes_on(class);
            let Some(class) = queue.most_urgent().filter(may_start) else { continue };
            // One batch of flushes still goes while a tier is loaded from: else a busy disk would
            // never get flushes.
            let yields =
                class > Class::Save && (loading[route.from.index()] || loading[route.to.index()]);
            if yields && queue.batches() > 0 {
                continue;
            }
            let waiting = &mut queue.by_class[class as usize];
            // A batch has one order with the engine's work, and layers are those of all its blocks.
            let order = waiting.front().and_then(RoutedTask::order).cloned();
            let limit = if order.as_ref().is_some_and(|order| order.has_layers()) {
                usize::MAX
            } else {
                limit
            };
            let is_of_batch = |task: &&mut RoutedTask| match (&order, task.order()) {
                (Some(order), Some(other)) => Arc::ptr_eq(order, other),
                (order, other) => order.is_none() && other.is_none(),
            };
            let (mut sent, mut drops) = (0, Vec::new());
            while sent < limit {
                let at = sent + drops.len();
                match waiting.get_mut(at).filter(is_of_batch).map(&mut turn) {
                    Some(TaskTurn::Send) => sent += 1,
                    Some(TaskTurn::Drop) => drops.push(at),
                    Some(TaskTurn::Wait) | None => break,
                }
            }
            // All at once: a task is large, and would be moved more often.
            let mut tasks: Vec<_> = waiting.drain(..sent + drops.len()).collect();
            let mut places = 0..tasks.len();
            let is_dropped = |_: &mut RoutedTask| {
                places.next().is_some_and(|at| drops.binary_search(&at).is_ok())
            };
            let dropped: Vec<_> = tasks.extract_if(.., is_dropped).collect();
            // If all were dropped nothing is in flight, and nothing would end the batch.
            if !tasks.is_empty() {
                queue.batches[class as usize] += 1;
            }
            if !(tasks.is_empty() && dropped.is_empty()) {
                return Some(NextBatch { route, class, tasks, dropped });
            }
        }
        None
    }

    fn batch_limit(&self, route: Route) -> usize {
        match route {
            Route { to: Tier::Object, .. } => self.limits.segment_blocks,
            // Neighbours in a segment are fetched with one request, for any number of blocks.
            Route { from: Tier::Object, .. } => {
                self.limits.segment_blocks.max(self.limits.batch_blocks)
            }
            _ => self.limits.batch_blocks,
        }
    }

    /// Whether blocks are being, or wait to be, loaded out of `tier` (a lower one: the device has
    /// no queue to protect).
    fn is_loading_from(&self, tier: Tier) -> bool {
        tier > Tier::Host && self.queues[tier.index()].iter().any(RouteQueue::has_loads)
    }

    /// A batch ended.
    pub(super) fn ended(&mut self, route: Route, class: Class) {
        self.queue(route).batches[class as usize] -= 1;
    }
}

/// All routes, those that an engine waits for first: towards the device, then out of it.
fn routes() -> impl Iterator<Item = Route> {
    Tier::ALL.into_iter().flat_map(|to| Tier::ALL.into_iter().map(move |from| Route { from, to }))
}

#[cfg(test)]
mod tests {
    use kvbm_tiers::{Fence, LayerCount, SlotId, SlotRef};

    use super::super::engine::EngineOrder;
    use super::*;
    use crate::task::{CopyTask, TaskId};

    fn order() -> Arc<EngineOrder> {
        let count = Arc::new(LayerCount::new(2.try_into().unwrap(), 1));
        Arc::new(EngineOrder::after(&Fence::Done).in_layers(&count, None))
    }

    fn task(order: &Arc<EngineOrder>) -> RoutedTask {
        let slot = |tier| SlotRef { tier, slot: SlotId(0), generation: 0 };
        let task = CopyTask {
            id: TaskId { transfer: TransferId { place: 0, life: 0 }, block: 0 },
            class: Class::Load,
            block: BlockKey { hash: 1, group: 0 },
            parent: None,
            owner: None,
            from: slot(Tier::Host),
            to: slot(Tier::Device),
            via: None,
            is_probe: false,
        };
        RoutedTask::new(task, true, Some(Arc::clone(order)))
    }

    #[test]
    fn a_load_in_layers_does_not_wait_for_its_beginning() {
        let mut queues =
            RouteQueues::new(QueueLimits { batches: 1, batch_blocks: 8, segment_blocks: 8 });
        let (first, other) = (order(), order());
        let next = |queues: &mut RouteQueues| {
            queues.next_batch(|_| TaskTurn::Send).map(|next| {
                let order = next.tasks[0].order().expect("it has one");
                let _ = order.fences();
                Arc::ptr_eq(order, &first)
            })
        };
        queues.push(task(&first));
        assert_eq!(next(&mut queues), Some(true));
        queues.push(task(&first));
        assert_eq!(next(&mut queues), Some(true), "its layers are under way");
        queues.push(task(&other));
        assert_eq!(next(&mut queues), None);
        for _ in 0..2 {
            queues.ended(Route::new(Tier::Host, Tier::Device), Class::Load);
        }
        assert_eq!(next(&mut queues), Some(false));
    }

    #[test]
    fn a_batch_has_what_is_sent_without_what_is_dropped() {
        let limits = QueueLimits { batches: 1, batch_blocks: 3, segment_blocks: 3 };
        let mut queues = RouteQueues::new(limits);
        let order = order();
        for block in 0..7 {
            let mut task = task(&order);
            task.order = None;
            task.task.id.block = block;
            queues.push(task);
        }
        let blocks = |tasks: &[RoutedTask]| -> Vec<u32> {
            tasks.iter().map(|task| task.task.id.block).collect()
        };
        let next = queues.next_batch(|task| match task.task.id.block {
            0 | 2 | 3 => TaskTurn::Drop,
            6 => TaskTurn::Wait,
            _ => TaskTurn::Send,
        });
        let next = next.expect("there is one");
        assert_eq!(blocks(&next.tasks), [1, 4, 5]);
        assert_eq!(blocks(&next.dropped), [0, 2, 3]);

        let route = next.route;
        queues.ended(route, Class::Load);
        let next = queues.next_batch(|_| TaskTurn::Drop).expect("all of it is dropped");
        assert_eq!((blocks(&next.tasks), blocks(&next.dropped)), (vec![], vec![6]));
        assert!(queues.next_batch(|_| TaskTurn::Send).is_none());
    }
}
