//! The place of a span in its trace, on its way to another process.

use serde::{Deserialize, Serialize};
use tracing::Span;

/// What W3C's `traceparent` of version 00 says, in 25 bytes: the trace, the span that is to be the
/// parent, and flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TraceParent {
    trace: [u8; 16],
    span: [u8; 8],
    flags: u8,
}

#[cfg(feature = "otel")]
impl TraceParent {
    /// For children of `span` in other processes. `None`: it is not sent to a collector.
    pub(crate) fn of(span: &Span) -> Option<Self> {
        use opentelemetry::trace::TraceContextExt;
        use tracing_opentelemetry::OpenTelemetrySpanExt;

        // Without it the context would be looked for.
        if span.is_none() {
            return None;
        }
        let context = span.context();
        let sent = context.span().span_context().clone();
        sent.is_valid().then(|| Self {
            trace: sent.trace_id().to_bytes(),
            span: sent.span_id().to_bytes(),
            flags: sent.trace_flags().to_u8(),
        })
    }

    /// Makes a new span the child of another process's. One that is not sent to a collector stays
    /// as it is.
    pub(crate) fn adopt(self, span: &Span) {
        use opentelemetry::trace::{
            SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState,
        };
        use tracing_opentelemetry::OpenTelemetrySpanExt;

        let (trace, parent) = (TraceId::from_bytes(self.trace), SpanId::from_bytes(self.span));
        let flags = TraceFlags::new(self.flags);
        let parent = SpanContext::new(trace, parent, flags, true, TraceState::default());
        if !span.is_none() && parent.is_valid() {
            let context = opentelemetry::Context::new().with_remote_span_context(parent);
            let _ = span.set_parent(context);
        }
    }
}

#[cfg(not(feature = "otel"))]
impl TraceParent {
    /// This program sends no spans.
    pub(crate) const fn of(_: &Span) -> Option<Self> {
        None
    }

    /// This program sends no spans.
    pub(crate) const fn adopt(self, _: &Span) {}
}
