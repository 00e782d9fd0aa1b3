//! What happens when a copy ends: titles go home, blocks are published, tickets are answered.

use std::sync::Arc;

use kvbm_tiers::{BlockKey, CopyError, CopyErrorKind, Tier};

use super::Core;
use super::batch::Batch;
use super::flow::{Brought, End, Flow};
use super::order::{Bounce, Class, Order};
use crate::lease::Lease;
use crate::table::Table;

impl Core {
    /// A backend reports the end of a copy.
    pub(super) fn copy_ended(self: &Arc<Self>, batch: &Batch, op: usize, result: Result<(), CopyError>) {
        let order = match batch.take(op) {
            Ok(order) => order,
            Err(late) => return late.into_iter().for_each(|grip| self.table().release(grip)),
        };
        self.metrics.copied(batch.route, batch.started.elapsed(), &result);
        self.breakers.learn(batch.route, &result);
        match result {
            Ok(()) if order.has_second_leg() => self.go_on(order),
            Ok(()) => self.arrived(order),
            Err(error) => self.broke(order, &error),
        }
        self.order_left(batch);
    }

    pub(super) fn order_left(self: &Arc<Self>, batch: &Batch) {
        if batch.order_ended() {
            self.batches.end(batch);
            self.lanes.lock().ended(batch.route, batch.class);
            self.pump();
        }
    }

    fn go_on(&self, order: Order) {
        let order = Order { halfway: true, ..order };
        self.lanes.lock().push(order.flow.outline.class, order);
    }

    fn arrived(self: &Arc<Self>, order: Order) {
        let Order { to, entry, bounce, flow, .. } = order;
        let mut table = self.table();
        if let Some(run) = flow.outline.run {
            table.filled(run, entry, to);
        }
        self.settle_bounce(&mut table, bounce, true);
        self.leave(table, &flow);
    }

    /// A copy failed, and nothing touches its slots any more.
    fn broke(self: &Arc<Self>, order: Order, error: &CopyError) {
        tracing::warn!(op = ?order.op(), error = %error, "a copy failed; the block counts as a miss");
        let mut table = self.table();
        if error.kind() == CopyErrorKind::Corrupt && !order.halfway {
            let dropped = table.quarantine(order.from.tier, order.block);
            tracing::error!(tier = %order.from.tier, dropped, "corrupt bytes: block and descendants quarantined");
        }
        let Order { to, entry, bounce, halfway, flow, .. } = order;
        if let Some(run) = flow.outline.run {
            table.failed(run, entry, to);
        }
        self.settle_bounce(&mut table, bounce, halfway);
        self.leave(table, &flow);
    }

    /// A copy did not end in time: the slots that it may still write to are lost.
    pub(super) fn write_off(self: &Arc<Self>, order: Order) {
        tracing::error!(op = ?order.op(), "a copy did not end in time; its slot is lost");
        let Order { to, entry, bounce, halfway, flow, .. } = order;
        let mut table = self.table();
        let touches_destination = halfway || matches!(bounce, Bounce::NotNeeded);
        match flow.outline.run {
            Some(run) if touches_destination => table.lost(run, entry, to),
            Some(run) => table.failed(run, entry, to),
            None => {}
        }
        if let Bounce::Held { frame, promotes } = bounce {
            match promotes {
                Some((run, entry)) => table.lost(run, entry, frame),
                None => {
                    table.lose(frame);
                    self.staging.lock().lose();
                }
            }
        }
        self.leave(table, &flow);
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

    fn leave(self: &Arc<Self>, mut table: crate::sync::MutexGuard<'_, Table>, flow: &Arc<Flow>) {
        let settled = table.take_settled();
        let flush_is_due = self.flush_is_due(&table, flow.outline.dest);
        drop(table);
        self.announce(settled);
        if flow.order_ended() {
            self.finish_flow(flow);
        }
        if flush_is_due {
            self.flushing.wake();
        }
    }

    /// Blocks that other flows waited for have arrived or failed.
    pub(super) fn announce(self: &Arc<Self>, settled: Vec<(Tier, BlockKey)>) {
        for key in settled {
            if let Some((_, flows)) = self.flights.remove(&key) {
                flows.iter().for_each(|flow| self.finish_flow(flow));
            }
        }
    }

    /// All orders of a flow have ended. If an ancestor is on the way in another flow, this waits for it.
    pub(super) fn finish_flow(self: &Arc<Self>, flow: &Arc<Flow>) {
        let mut table = self.table();
        if let Some(behind) = flow.outline.behind.filter(|&behind| table.watch(flow.outline.dest, behind)) {
            self.flights.entry((flow.outline.dest, behind)).or_default().push(Arc::clone(flow));
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
        if let Some(source) =
            flow.outline.source.filter(|_| flow.outline.class == Class::Load && copied == flow.outline.orders)
        {
            self.paces.learn(source, copied, flow.started.elapsed());
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

fn close_runs(table: &mut Table, flow: &Flow, lease: &mut Lease) -> usize {
    if let Some(promotion) = flow.outline.promotion {
        table.close(promotion, None);
    }
    let grip = (flow.outline.class != Class::Flush).then(|| (lease.grip_mut(), flow.outline.before));
    let copied = flow.outline.run.map_or(0, |run| table.close(run, grip));
    match flow.outline.behind {
        Some(behind) if copied == 0 && flow.outline.class != Class::Flush => {
            table.hold_if_resident(lease.grip_mut(), flow.outline.dest, behind, flow.outline.before);
        }
        _ => {}
    }
    table.drop_condemned(lease.grip_mut());
    copied
}
