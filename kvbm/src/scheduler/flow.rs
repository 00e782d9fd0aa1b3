//! A flow: the blocks of one request on their way into one tier.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvbm_tiers::{BlockKey, Tier};
use tokio::sync::oneshot;

use super::order::{Class, Order};
use crate::lease::Lease;
use crate::sync::{AtomicUsize, Mutex};
use crate::table::{Grip, RunId};
use crate::ticket::Ticket;

/// How a flow ended.
#[derive(Debug)]
pub struct Brought {
    /// Holds the chain; where the destination is concerned, as far as it is there now.
    pub lease: Lease,
    /// Leading blocks of the chain that the destination holds now.
    pub blocks: usize,
    /// Blocks that this flow copied.
    pub copied: usize,
    /// Blocks that the lease holds but that are sooner computed again: see [`Match::worth_loading`].
    ///
    /// [`Match::worth_loading`]: crate::table::Match::worth_loading
    pub recompute: usize,
    /// Blocks that the destination does not think worth the room that they would take.
    pub declined: usize,
    /// Blocks that it found no room or no queue space for, or whose medium is left alone for now.
    pub refused: usize,
    /// Blocks whose copy failed, with those behind them.
    pub failed: usize,
}

/// Who waits for a block that another flow brings.
#[derive(Debug)]
pub(super) enum Waiter {
    /// A flow whose own blocks hang on it.
    Flow(Arc<Flow>),
    /// An order that copies it on from there.
    Order(Box<Order>),
}

/// Shared by the orders of a flow.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) outline: Outline,
    pub(super) started: Duration,
    progress: Mutex<Progress>,
    /// Pins what its copies read until the last of them is out of the medium's hands, whatever becomes of the
    /// caller's lease.
    sources: Mutex<Option<Grip>>,
    /// Orders whose titles have not come home.
    abroad: AtomicUsize,
    /// What the end needs; taken by it.
    end: Mutex<Option<End>>,
}

/// How far the orders of a flow have come. A flow ends when everything before its first failure has ended: what
/// comes after that can never be published, so nobody waits for it.
#[derive(Debug)]
struct Progress {
    ended: Vec<bool>,
    /// Leading orders that have ended.
    leading: usize,
    /// The first order that failed, or their number.
    failed_from: usize,
    /// When the flow had no copy to wait for any more.
    settled: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct End {
    pub(super) lease: Lease,
    report: oneshot::Sender<Brought>,
}

impl End {
    /// Answers the ticket. If nobody holds it any more, the lease ends here.
    pub(super) fn report(self, brought: impl FnOnce(Lease) -> Brought) {
        drop(self.report.send(brought(self.lease)));
    }
}

/// What a flow brings, and where.
#[derive(Debug)]
pub(super) struct Outline {
    pub(super) class: Class,
    pub(super) dest: Tier,
    /// The blocks' run in the destination; `None` if all of them are on the way in other flows.
    pub(super) run: Option<RunId>,
    /// The host run of the blocks that are promoted on their way up.
    pub(super) promotion: Option<RunId>,
    /// Leading blocks of the chain that come before the run.
    pub(super) before: usize,
    /// The last of these; it may be on the way in another flow.
    pub(super) behind: Option<BlockKey>,
    /// The last of them, root first: those of which the caller's lease may not know in the destination, because they
    /// came there since or are on the way in other flows.
    pub(super) found: Vec<BlockKey>,
    /// Orders of this flow.
    pub(super) orders: usize,
    /// The tier that all its blocks come from, if it is one.
    pub(super) source: Option<Tier>,
    /// It tries whether a medium is well again, although its breaker is open.
    pub(super) is_probe: bool,
    /// These three as in [`Brought`].
    pub(super) recompute: usize,
    pub(super) declined: usize,
    pub(super) refused: usize,
}

impl Outline {
    /// Of a flow that copies nothing.
    pub(super) const fn of_nothing(class: Class, dest: Tier) -> Self {
        Self {
            class,
            dest,
            run: None,
            promotion: None,
            before: 0,
            behind: None,
            found: Vec::new(),
            orders: 0,
            source: None,
            is_probe: false,
            recompute: 0,
            declined: 0,
            refused: 0,
        }
    }
}

impl Flow {
    pub(super) fn start(
        outline: Outline,
        lease: Lease,
        sources: Option<Grip>,
        now: Duration,
    ) -> (Arc<Self>, Ticket<Brought>) {
        let (report, ticket) = oneshot::channel();
        let orders = outline.orders;
        let progress =
            Progress { ended: vec![false; orders], leading: 0, failed_from: orders, settled: None };
        let flow = Self {
            outline,
            started: now,
            progress: Mutex::new(progress),
            sources: Mutex::new(sources),
            abroad: AtomicUsize::new(orders),
            end: Mutex::new(Some(End { lease, report })),
        };
        (Arc::new(flow), Ticket::new(ticket))
    }

    /// An order ended. True when the flow has nothing to wait for any more, once.
    pub(super) fn order_ended(&self, entry: usize, arrived: bool, now: Duration) -> bool {
        let mut progress = self.progress.lock();
        let Progress { ended, leading, failed_from, settled } = &mut *progress;
        ended[entry] = true;
        if !arrived {
            *failed_from = entry.min(*failed_from);
        }
        while *leading < *failed_from && ended[*leading] {
            *leading += 1;
        }
        let settles = settled.is_none() && *leading >= *failed_from;
        if settles {
            *settled = Some(now);
        }
        settles
    }

    /// Whether an order can be dropped: something before it has failed.
    pub(super) fn is_given_up(&self, entry: usize) -> bool {
        entry >= self.progress.lock().failed_from
    }

    /// How long its copies took, time in queues included.
    pub(super) fn took(&self) -> Option<Duration> {
        Some(self.progress.lock().settled?.saturating_sub(self.started))
    }

    /// No medium touches the slots of one of its orders any more. The last one returns what pinned the sources.
    pub(super) fn title_returned(&self) -> Option<Grip> {
        (self.abroad.fetch_sub(1, Ordering::AcqRel) == 1).then(|| self.sources.lock().take())?
    }

    /// What the end needs, once.
    pub(super) fn take_end(&self) -> Option<End> {
        self.end.lock().take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(orders: usize) -> Flow {
        let outline = Outline { orders, ..Outline::of_nothing(Class::Load, Tier::Device) };
        let progress =
            Progress { ended: vec![false; orders], leading: 0, failed_from: orders, settled: None };
        Flow {
            outline,
            started: Duration::ZERO,
            progress: Mutex::new(progress),
            sources: Mutex::new(None),
            abroad: AtomicUsize::new(orders),
            end: Mutex::new(None),
        }
    }

    #[test]
    fn a_flow_ends_with_its_first_failure_and_what_comes_before_that() {
        let flow = progress(5);
        let end = |entry, arrived| flow.order_ended(entry, arrived, Duration::ZERO);
        assert!(!end(4, true));
        assert!(!end(2, false));
        assert!(flow.is_given_up(3) && !flow.is_given_up(1));
        assert!(!end(0, true));
        assert!(end(1, true), "0 and 1 have arrived, 2 has failed");
        assert!(!end(3, false), "it ends once");
    }

    #[test]
    fn a_flow_without_failures_ends_with_its_last_order() {
        let flow = progress(3);
        let ends = [1, 2, 0].map(|entry| flow.order_ended(entry, true, Duration::ZERO));
        assert_eq!(ends, [false, false, true]);
    }
}
