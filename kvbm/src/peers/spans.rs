//! Spans of what goes between workers, at the level DEBUG: `peer_lease` and `peer_pull` at the
//! reader, and `peer_serve` at the holder, a child of the reader's lease. Without a listener none
//! is made, and nothing is sent of them.

use kvbm_policies::RequestId;
use tracing::Span;
use tracing::field::Empty;

use super::protocol::ToReader;
use super::reader::{PeerLease, Pulled};
use crate::error::Result;
use crate::metrics::{PeerLeaseEnd, PeerWay};
use crate::table::RequestInfo;
use crate::traces::TraceParent;

fn number(info: &RequestInfo) -> Option<u64> {
    info.request.map(|RequestId(request)| request)
}

/// The request for a lease, until it is answered.
pub(super) fn of_lease(peer: &str, info: &RequestInfo) -> Span {
    tracing::debug_span!("peer_lease", request = number(info), peer, blocks = Empty, fault = Empty)
}

pub(super) fn leased(span: &Span, leased: &Result<PeerLease>) {
    if span.is_none() {
        return;
    }
    match leased {
        Ok(lease) => span.record("blocks", lease.only_there()),
        Err(error) => span.record("fault", tracing::field::display(error)),
    };
}

/// What a lease names comes here.
pub(super) fn of_pull(peer: &str, way: PeerWay, info: &RequestInfo) -> Span {
    let (request, way) = (number(info), way.name());
    tracing::debug_span!("peer_pull", request, peer, way, blocks = Empty, fault = Empty)
}

pub(super) fn pulled(span: &Span, pulled: &Result<Pulled>) {
    if span.is_none() {
        return;
    }
    match pulled {
        Ok(Pulled { copied, fault, .. }) => {
            span.record("blocks", copied);
            fault.as_ref().map(|fault| span.record("fault", &**fault));
        }
        Err(error) => _ = span.record("fault", tracing::field::display(error)),
    }
}

/// A lease of a reader, from its request to its end.
pub(super) fn of_serving(reader: &str, parent: Option<TraceParent>) -> Span {
    let (blocks, sent, end) = (Empty, Empty, Empty);
    let span = tracing::debug_span!(parent: None, "peer_serve", reader, blocks, sent, end);
    if let Some(parent) = parent {
        parent.adopt(&span);
    }
    span
}

/// What was leased, or why nothing was.
pub(super) fn answered(span: &Span, answer: &ToReader) {
    match answer {
        ToReader::Leased(leased) => span.record("blocks", leased.checksums.len()),
        ToReader::Ended(why) => span.record("end", PeerLeaseEnd::from(*why).name()),
        _ => span,
    };
}

pub(super) fn served(span: &Span, sent: usize, end: PeerLeaseEnd) {
    span.record("sent", sent).record("end", end.name());
}
