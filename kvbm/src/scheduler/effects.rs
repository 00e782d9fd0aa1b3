//! What follows from a change of the table, with the table unlocked: copies are sent or cancelled,
//! listeners are woken, callers are answered.

use std::pin::pin;
use std::sync::Arc;

use super::Core;
use super::engine::EndedOrder;
use crate::table::{Dropped, Effects, TransferEnd};
use crate::task::{Class, Defect};

impl Core {
    /// Does what follows from a change of the table, in steps if it is long.
    pub(super) fn apply(self: &Arc<Self>, mut effects: Effects) {
        loop {
            let has_more = effects.has_more;
            self.apply_step(effects);
            if !has_more {
                return;
            }
            effects = self.table.lock().publish_more();
        }
    }

    fn apply_step(self: &Arc<Self>, effects: Effects) {
        let Effects {
            tasks, awaited, cancelled, ended, again, dropped, released, left, news, ..
        } = effects;
        // Before the replies: a caller that hears of the end must find it so.
        drop(released);
        if let Some(on_left) = self.on_left.get().filter(|_| !left.is_empty()) {
            on_left(&left);
        }
        news.iter().for_each(|listener| listener.wake());
        self.landed.notify_waiters();
        for Dropped { tier, blocks, defect } in dropped {
            if defect == Defect::Forgotten {
                continue;
            }
            tracing::error!(%tier, blocks, ?defect, "a block and its descendants are dropped");
        }
        for rest in cancelled {
            let cancelled = self.sending.queues.lock().cancel(rest);
            self.drop_tasks(cancelled);
            let held = self.engine.orders.lock().cancel(rest);
            self.drop_held(held);
            let effects = self.table.lock().cancellation_made(rest.0);
            self.apply(effects);
        }
        if !awaited.is_empty() {
            self.sending.queues.lock().raise(&awaited.into_iter().collect());
        }
        // Copies before replies: an answered caller may bring more work, and the media need not
        // idle meanwhile.
        self.queue(tasks);
        self.save_again_soon(again);
        ended.into_iter().for_each(|ended| self.transfer_ended(ended));
    }

    /// Waits until something holds, which is looked at again whenever blocks may have landed.
    pub(crate) async fn until_landed(&self, holds: impl Fn() -> bool) {
        let mut landed = pin!(self.landed.notified());
        loop {
            // What lands from here on is heard.
            landed.as_mut().enable();
            if holds() {
                return;
            }
            landed.as_mut().await;
            landed.set(self.landed.notified());
        }
    }

    fn transfer_ended(self: &Arc<Self>, ended: TransferEnd) {
        if ended.class == Class::Flush {
            self.upkeep.flushing.ended(ended.to, ended.blocks);
            self.waker.wake();
        }
        self.spans.close(&ended);
        let id = ended.id;
        let of_engine = self.engine.orders.lock().end(id);
        let has_waited = of_engine.as_ref().is_some_and(|order| order.waited);
        let source = ended.source.filter(|_| ended.class == Class::Load && !has_waited);
        if let (Some(source), Some(took)) = (source, ended.took) {
            self.health.paces.learn(source, ended.copied, took, self.clock.uptime());
        }
        let Some(EndedOrder { held, part_of, .. }) = of_engine else { return ended.report() };
        self.metrics.duplicated(ended.duplicates);
        // Before the reply: a caller that hears of the end may count on its slots being free.
        self.drop_held(held);
        ended.report();
        // The answer is there before the engine polls its name.
        match part_of {
            Some(joined) => drop(joined),
            None => self.engine.completions.note(id),
        }
    }
}
