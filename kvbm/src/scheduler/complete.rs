//! What happens when a copy ends: titles go home, blocks are published, tickets are answered.

use std::sync::Arc;

use kvbm_tiers::{BlockKey, CopyError, CopyErrorKind, SlotRef, Tier};

use super::Core;
use super::batch::{Batch, Completed, Overdue};
use super::flow::{Brought, End, Flow, Outline, Waiter};
use super::order::{Bounce, Class, Order};
use crate::lease::Lease;
use crate::sync::MutexGuard;
use crate::table::{Defect, Table};

/// An order's end, as far as its flow is concerned.
struct Ended<'a> {
    flow: &'a Arc<Flow>,
    entry: usize,
    arrived: bool,
}

impl Core {
    /// A backend reports the end of a copy.
    pub(super) fn copy_ended(self: &Arc<Self>, batch: &Batch, op: usize, result: Result<(), CopyError>) {
        let now = self.clock.uptime();
        self.batches.progressed(batch, now);
        match batch.take(op) {
            Completed::Order(order) => {
                self.metrics.copied(batch.route, now.saturating_sub(batch.started), &result);
                match &result {
                    Ok(()) => self.breakers.succeeded(batch.route, batch.is_probe, now),
                    Err(error) => self.breakers.failed(batch.route, error.kind(), batch.is_probe, now),
                }
                match result {
                    Ok(()) if order.has_second_leg() => self.go_on(order),
                    Ok(()) => self.arrived(order),
                    Err(error) => self.broke(order, &error),
                }
                self.order_left(batch);
            }
            Completed::Overdue(overdue) => self.came_back(batch, overdue),
            Completed::Twice => tracing::error!(route = ?batch.route, op, "a backend reported a copy twice"),
        }
    }

    pub(super) fn order_left(self: &Arc<Self>, batch: &Batch) {
        if batch.order_ended() {
            self.batches.end(batch);
            self.lanes.lock().ended(batch.route, batch.class);
            self.pump();
        }
    }

    /// The second leg need not wait for the first legs of its batch's other blocks.
    fn go_on(self: &Arc<Self>, order: Order) {
        let order = Order { halfway: true, ..order };
        self.lanes.lock().push(order.flow.outline.class, order);
        self.pump();
    }

    fn arrived(self: &Arc<Self>, order: Order) {
        let Order { to, run, entry, bounce, source, flow, .. } = order;
        let mut table = self.table();
        table.filled(run, entry, to);
        self.settle_bounce(&mut table, bounce, true);
        source.into_iter().for_each(|grip| table.release(grip));
        self.order_ended(table, &Ended { flow: &flow, entry, arrived: true }, true);
    }

    /// A copy failed, and nothing touches its slots any more.
    fn broke(self: &Arc<Self>, order: Order, error: &CopyError) {
        let op = order.op();
        tracing::warn!(?op, %error, "a copy failed; the block counts as a miss");
        if let Some(defect) = defect_of(error.kind()).filter(|_| !order.halfway) {
            self.quarantine(order.block, order.from, defect);
        }
        self.abandoned(order);
    }

    /// What was read is given up where it lies. Only tiers below DRAM lose single blocks: an error on a route within
    /// memory says something of the device, nothing of the block.
    fn quarantine(&self, block: BlockKey, found: SlotRef, defect: Defect) {
        if found.tier <= Tier::Host {
            return;
        }
        let dropped = self.table().quarantine(block, found, defect);
        if dropped > 0 {
            tracing::error!(tier = %found.tier, dropped, ?defect, "a block and its descendants are dropped");
        }
    }

    /// The order will not arrive, and no medium has it.
    pub(super) fn abandoned(self: &Arc<Self>, order: Order) {
        let Order { to, run, entry, bounce, halfway, source, flow, .. } = order;
        let mut table = self.table();
        table.failed(run, entry, to);
        self.settle_bounce(&mut table, bounce, halfway);
        source.into_iter().for_each(|grip| table.release(grip));
        self.order_ended(table, &Ended { flow: &flow, entry, arrived: false }, true);
    }

    /// Nobody waits for the batch's copies any more. What the medium may still touch stays theirs.
    pub(super) fn give_up(self: &Arc<Self>, batch: &Batch) {
        let given_up = batch.give_up(|order| self.part_overdue(order));
        for (flow, entry) in given_up {
            self.metrics.went_overdue(batch.route);
            self.order_ended(self.table(), &Ended { flow: &flow, entry, arrived: false }, false);
            self.order_left(batch);
        }
    }

    fn part_overdue(&self, order: Order) -> (Overdue, (Arc<Flow>, usize)) {
        let Order { to, run, entry, bounce, halfway, source, flow, .. } = order;
        let mut table = self.table();
        let mut overdue = Overdue { flow: Arc::clone(&flow), frames: Vec::new(), staging: None, source };
        let is_first_leg = matches!(bounce, Bounce::Held { .. }) && !halfway;
        if is_first_leg {
            table.failed(run, entry, to);
        } else {
            table.overdue(run, entry, to.tier());
            overdue.frames.push(to);
        }
        match bounce {
            Bounce::Held { frame, promotes: Some((run, entry)) } => {
                table.overdue(run, entry, frame.tier());
                overdue.frames.push(frame);
            }
            Bounce::Held { frame, promotes: None } => {
                self.staging.lock().lose();
                overdue.staging = Some(frame);
            }
            _ => {}
        }
        (overdue, (flow, entry))
    }

    /// An overdue copy ended after all: its slots are free, and its medium moves.
    fn came_back(self: &Arc<Self>, batch: &Batch, overdue: Overdue) {
        let Overdue { flow, frames, staging, source } = overdue;
        let mut table = self.table();
        frames.into_iter().for_each(|frame| table.came_back(frame));
        let sources = source.into_iter().chain(flow.title_returned());
        sources.for_each(|grip| table.release(grip));
        drop(table);
        if let Some(frame) = staging {
            self.staging.lock().regain(frame);
        }
        self.metrics.came_back(batch.route);
        self.breakers.revived(batch.route, self.clock.uptime());
        self.flushing.wake();
        self.pump();
    }

    /// A bounce slot is not needed any more. If the block reached it, the host tier keeps it.
    fn settle_bounce(&self, table: &mut Table, bounce: Bounce, reached: bool) {
        let Bounce::Held { frame, promotes } = bounce else { return };
        match promotes {
            Some((run, entry)) if reached => table.filled(run, entry, frame),
            Some((run, entry)) => table.failed(run, entry, frame),
            None => self.staging.lock().give_back(frame),
        }
    }

    /// Tells everybody whom an order's end concerns. `is_home`: no medium has its slots.
    fn order_ended(self: &Arc<Self>, mut table: MutexGuard<'_, Table>, ended: &Ended<'_>, is_home: bool) {
        let &Ended { flow, entry, arrived } = ended;
        let settled = table.take_settled();
        if is_home {
            flow.title_returned().into_iter().for_each(|grip| table.release(grip));
        }
        let flush_is_due = self.flush_is_due(&table, flow.outline.dest);
        drop(table);
        self.announce(settled);
        if flow.order_ended(entry, arrived, self.clock.uptime()) {
            self.finish_flow(flow);
        }
        if flush_is_due {
            self.flushing.wake();
        }
    }

    /// Blocks that others waited for have arrived or failed.
    pub(super) fn announce(self: &Arc<Self>, settled: Vec<(Tier, BlockKey)>) {
        for key in settled {
            let waiters = self.flights.remove(&key).map(|(_, waiters)| waiters);
            waiters.into_iter().flatten().for_each(|waiter| match waiter {
                Waiter::Flow(flow) => self.finish_flow(&flow),
                Waiter::Order(order) => self.resume(*order),
            });
        }
    }

    /// The block of an awaited order is in the host tier now, or will not come there.
    pub(super) fn resume(self: &Arc<Self>, mut order: Order) {
        let there = self.table().pin_resident(Tier::Host, order.block);
        if let Some((slot, grip)) = there {
            (order.from, order.source) = (slot, Some(grip));
        }
        let is_direct = self.executor.connects((order.from.tier, order.to.tier()));
        order.bounce = if is_direct { Bounce::NotNeeded } else { Bounce::Wanted };
        self.lanes.lock().push(order.flow.outline.class, order);
        self.pump();
    }

    /// All orders of a flow that count have ended. If an ancestor is on the way in another flow, this waits for it.
    pub(super) fn finish_flow(self: &Arc<Self>, flow: &Arc<Flow>) {
        let mut table = self.table();
        let awaited = flow.outline.behind.filter(|_| !self.is_closed());
        if let Some(behind) = awaited.filter(|&behind| table.watch(flow.outline.dest, behind)) {
            let waiter = Waiter::Flow(Arc::clone(flow));
            self.flights.entry((flow.outline.dest, behind)).or_default().push(waiter);
            return;
        }
        let Some(mut end) = flow.take_end() else { return };
        let copied = close_runs(&mut table, flow, &mut end.lease);
        let settled = table.take_settled();
        drop(table);
        self.announce(settled);
        self.report(flow, end, copied);
    }

    fn report(&self, flow: &Flow, end: End, copied: usize) {
        if flow.outline.class == Class::Flush {
            self.flushing.ended(flow.outline.dest, flow.outline.orders);
        }
        let source = flow.outline.source.filter(|_| flow.outline.class == Class::Load);
        if let (Some(source), Some(took)) = (source, flow.took())
            && copied == flow.outline.orders
        {
            self.paces.learn(source, copied, took, self.clock.uptime());
        }
        end.report(|lease| Brought {
            blocks: lease.blocks(flow.outline.dest),
            copied,
            recompute: flow.outline.recompute,
            declined: flow.outline.declined,
            refused: flow.outline.refused,
            failed: flow.outline.orders - copied,
            lease,
        });
    }
}

/// What an error says of the block that was read. A medium that is away, full or shutting down says nothing of it.
const fn defect_of(kind: CopyErrorKind) -> Option<Defect> {
    match kind {
        CopyErrorKind::Corrupt => Some(Defect::Corrupt),
        CopyErrorKind::Io => Some(Defect::Unreadable),
        _ => None,
    }
}

fn close_runs(table: &mut Table, flow: &Flow, lease: &mut Lease) -> usize {
    let Outline { class, dest, run, promotion, before, ref found, .. } = flow.outline;
    if let Some(promotion) = promotion {
        table.close(promotion, None);
    }
    if class == Class::Flush {
        return run.map_or(0, |run| table.close(run, None));
    }
    let copied = run.map_or(0, |run| table.close(run, Some((lease.grip_mut(), before))));
    if copied == 0 {
        // Of what other flows brought, as much as arrived.
        table.hold_leading(lease.grip_mut(), dest, before - found.len(), found);
    }
    table.drop_condemned(lease.grip_mut());
    copied
}
