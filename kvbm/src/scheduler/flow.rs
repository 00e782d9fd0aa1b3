//! A flow: the blocks of one request on their way into one tier.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvbm_tiers::{BlockKey, Tier};
use tokio::sync::oneshot;

use super::order::Class;
use crate::lease::Lease;
use crate::sync::{AtomicUsize, Mutex};
use crate::table::RunId;
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
    /// Blocks that it found no room or no queue space for.
    pub refused: usize,
    /// Blocks whose copy failed, with those behind them.
    pub failed: usize,
}

/// Shared by the orders of a flow; the last one to end finishes it.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) outline: Outline,
    pub(super) started: Instant,
    /// Orders that have not ended.
    left: AtomicUsize,
    /// What the end needs; taken by it.
    end: Mutex<Option<End>>,
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
#[derive(Clone, Copy, Debug)]
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
    /// Orders of this flow.
    pub(super) orders: usize,
    /// The tier that all its blocks come from, if it is one.
    pub(super) source: Option<Tier>,
    /// These three as in [`Brought`].
    pub(super) recompute: usize,
    pub(super) declined: usize,
    pub(super) refused: usize,
}

impl Flow {
    pub(super) fn start(outline: Outline, lease: Lease) -> (Arc<Self>, Ticket<Brought>) {
        let (report, ticket) = oneshot::channel();
        let left = AtomicUsize::new(outline.orders);
        let end = Mutex::new(Some(End { lease, report }));
        let flow = Self { outline, started: Instant::now(), left, end };
        (Arc::new(flow), Ticket::new(ticket))
    }

    /// One order ended. True for the last one.
    pub(super) fn order_ended(&self) -> bool {
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// What the end needs, once.
    pub(super) fn take_end(&self) -> Option<End> {
        self.end.lock().take()
    }
}
