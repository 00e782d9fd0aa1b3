//! Spans as ranges of NVTX, which Nsight Systems shows beside kernels and copies of the GPU.

use std::ffi::CString;
use std::fmt::{self, Write as _};

use kvbm_tiers::error::SetupError;
use kvbm_tiers::nvtx::{Nvtx, NvtxRange};
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use crate::error::{Error, ErrorKind, Result};

/// Transfers, and batches that a backend copies, as ranges named by what their spans say when they
/// open.
///
/// Ranges may overlap and end on other threads: they are those that NVTX calls start and end
/// ranges.
#[derive(Debug)]
pub struct NvtxRanges(Nvtx);

impl NvtxRanges {
    /// Loads NVTX.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: it is not there. The message says how to get it.
    pub fn open() -> Result<Self> {
        let unavailable = |error: SetupError| {
            let message =
                format!("no ranges can be marked (traces.nvtx, DYN_KVBM_TRACES_NVTX): {error}");
            Error::caused(ErrorKind::Unavailable, message, error)
        };
        Nvtx::load().map(Self).map_err(unavailable)
    }

    /// For the program's subscriber.
    pub fn layer<S>(self) -> impl Layer<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        // A filter of the layer's own: what it does not take others still may.
        RangeMarking(self.0)
            .with_filter(filter_fn(|span| span.is_span() && span.target().starts_with("kvbm")))
    }
}

struct RangeMarking(Nvtx);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for RangeMarking {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut name = RangeName(format!("kvbm {}", attributes.metadata().name()));
        attributes.record(&mut name);
        // Names of tiers and backends have no NUL, nor have numbers.
        let name = CString::new(name.0).unwrap_or_default();
        span.extensions_mut().insert(self.0.start(&name));
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let range = context.span(&id).and_then(|span| span.extensions_mut().remove::<NvtxRange>());
        if let Some(range) = range {
            self.0.end(range);
        }
    }
}

/// `kvbm copy class=load from=host to=device backend=cuda blocks=32`.
struct RangeName(String);

impl Visit for RangeName {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let _ = write!(self.0, " {}={value}", field.name());
    }
}
