//! Spans of `tracing`: what a request's transfers take, from the plan to the landing.
//!
//! A span is `match`, or the class of a transfer (`load`, `save`, `flush`, `prefetch`), at the
//! level DEBUG, or `copy`, for a batch, at the level TRACE. Without a listener none is made.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use kvbm_policies::RequestId;
use kvbm_tiers::{Route, Tier};
use tracing::Span;
use tracing::field::Empty;

use crate::sync::{AtomicUsize, Mutex};
use crate::table::{Match, RequestInfo, TransferEnd};
use crate::task::{Class, TransferId};

/// Spans of transfers under way that have a listener.
#[derive(Debug, Default)]
pub(super) struct TransferSpans {
    open: Mutex<HashMap<TransferId, Span>>,
    // So that landing without a listener takes no lock.
    listened_to: AtomicUsize,
}

impl TransferSpans {
    /// A transfer is about to be handed over: its end will close the span.
    pub(super) fn open(&self, id: Option<TransferId>, span: Span) {
        if let Some(id) = id.filter(|_| !span.is_none())
            && self.open.lock().insert(id, span).is_none()
        {
            self.listened_to.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// A transfer has ended.
    pub(super) fn close(&self, ended: &TransferEnd) {
        if self.listened_to.load(Ordering::Acquire) == 0 {
            return;
        }
        let closed = self.open.lock().remove(&ended.id);
        if let Some(span) = closed {
            self.listened_to.fetch_sub(1, Ordering::AcqRel);
            span.record("blocks", ended.blocks);
            span.record("copied", ended.copied);
            span.record("refused", ended.refused + ended.declined);
            if let Some(source) = ended.source {
                span.record("from", source.name());
            }
        }
    }
}

/// The search for a chain, and its lease.
pub(super) fn of_match(info: &RequestInfo, blocks: usize) -> Span {
    let request = info.request.map(|RequestId(request)| request);
    tracing::debug_span!("match", request, blocks, held = Empty)
}

/// Records how much of it is held.
pub(super) fn found(span: &Span, held: &Match) {
    if !span.is_none() {
        span.record("held", held.longest());
    }
}

/// A batch given to a backend, for timelines that show what overlaps. It may be of several
/// requests, so it has no parent.
pub(super) fn of_batch(class: Class, route: Route, backend: &str, blocks: usize) -> Span {
    let (class, from, to) = (class.name(), route.from.name(), route.to.name());
    tracing::trace_span!(parent: None, "copy", class, from, to, backend, blocks)
}

/// A transfer.
pub(super) fn of_transfer(class: Class, to: Tier, request: Option<RequestId>) -> Span {
    let (request, to) = (request.map(|RequestId(request)| request), to.name());
    // A span's name belongs to its place in the source.
    macro_rules! named {
        ($($parent:ident: None,)? $name:literal) => {
            tracing::debug_span!(
                $($parent: None,)?
                $name,
                request,
                from = Empty,
                to,
                blocks = Empty,
                copied = Empty,
                refused = Empty
            )
        };
    }
    match class {
        Class::Load => named!("load"),
        Class::Save => named!("save"),
        // The request that happens to make it due is not its parent.
        Class::Flush => named!(parent: None, "flush"),
        Class::Prefetch => named!("prefetch"),
    }
}
