//! From the queues to the backends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvbm_tiers::{Done, Tier};

use super::Core;
use super::flow::{Flow, Waiter};
use super::lane::{Next, Turn};
use super::order::{Bounce, Order};
use crate::sync::AtomicUsize;

impl Core {
    pub(super) fn launch(self: &Arc<Self>, flow: &Arc<Flow>, orders: Vec<Order>) {
        if orders.is_empty() {
            return self.finish_flow(flow);
        }
        let (awaited, ready): (Vec<_>, Vec<_>) =
            orders.into_iter().partition(|order| matches!(order.bounce, Bounce::Awaited));
        let mut lanes = self.lanes.lock();
        ready.into_iter().for_each(|order| lanes.push(flow.outline.class, order));
        if !awaited.is_empty() {
            lanes.raise(&awaited.iter().map(|order| order.block).collect());
        }
        drop(lanes);
        awaited.into_iter().for_each(|order| self.wait_for_host(order));
        self.pump();
        if self.is_closed() {
            // It was closed while this was planned.
            self.close();
        }
    }

    /// Sends an order on when its block has reached the host tier.
    fn wait_for_host(self: &Arc<Self>, order: Order) {
        let mut table = self.table();
        if !self.is_closed() && table.watch(Tier::Host, order.block) {
            let flight = (Tier::Host, order.block);
            self.flights.entry(flight).or_default().push(Waiter::Order(Box::new(order)));
            return;
        }
        drop(table);
        self.resume(order);
    }

    /// Hands waiting orders to the backends. A backend may complete a batch, and so come back here, before
    /// its `submit` returns: then the outer call goes on with the work, and the stack stays flat.
    pub(super) fn pump(self: &Arc<Self>) {
        if self.pumps.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let turn = PumpTurn(&self.pumps);
        loop {
            let asked = self.pumps.load(Ordering::Acquire);
            while self.start_batch() {}
            if self.pumps.fetch_sub(asked, Ordering::AcqRel) == asked {
                std::mem::forget(turn);
                return;
            }
        }
    }

    fn start_batch(self: &Arc<Self>) -> bool {
        let next = self.lanes.lock().next_batch(|order| self.turn_of(order));
        let Some(Next { route, class, orders, dropped }) = next else { return false };
        dropped.into_iter().for_each(|order| self.abandoned(order));
        if orders.is_empty() {
            return true;
        }
        let ops = orders.iter().map(Order::op).collect();
        let batch = self.batches.start(route, class, orders, self.clock.uptime());
        let core = Arc::clone(self);
        let ended = Arc::clone(&batch);
        let done = Done::new(move |op, result| core.copy_ended(&ended, op, result));
        // Nobody knows what became of a batch whose backend panicked: its copies will be overdue. The request that
        // happened to pump, and all the others, must not suffer for it.
        if catch_unwind(AssertUnwindSafe(|| self.executor.submit(route, ops, &done))).is_err() {
            tracing::error!(from = %route.0, to = %route.1, "a backend panicked when it was given a batch");
        }
        if self.is_closed() {
            // It was closed since this was decided: nobody else will give the batch up.
            self.give_up(&batch);
        }
        true
    }

    /// What becomes of an order whose turn has come. It gets the staging slot that it needs.
    fn turn_of(&self, order: &mut Order) -> Turn {
        let is_in_vain = self.is_closed() || order.flow.is_given_up(order.entry);
        if is_in_vain || (!order.flow.outline.is_probe && self.breakers.is_open(order.route())) {
            return Turn::Drop;
        }
        if !matches!(order.bounce, Bounce::Wanted) {
            return Turn::Send;
        }
        let mut staging = self.staging.lock();
        match staging.take() {
            Some(frame) => order.bounce = Bounce::Held { frame, promotes: None },
            None if staging.is_gone() => return Turn::Drop,
            None => return Turn::Wait,
        }
        Turn::Send
    }
}

/// Somebody pumps. If he panics, others may.
struct PumpTurn<'a>(&'a AtomicUsize);

impl Drop for PumpTurn<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}
