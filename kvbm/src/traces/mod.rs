//! Spans for tracers: to an OpenTelemetry collector, also those that another worker's are parts
//! of, and as ranges on the timeline of a profiler.
//!
//! A library has no subscriber of its own: the program that embeds it adds a layer to its one, and
//! the settings say whether and where to.

#[cfg(feature = "otel")]
mod export;
#[cfg(feature = "nvtx")]
mod nvtx;
mod parent;

use kvbm_settings::TraceSettings;
use tracing::Level;

#[cfg(feature = "otel")]
pub use self::export::SpanExport;
#[cfg(feature = "nvtx")]
pub use self::nvtx::NvtxRanges;

pub(crate) use self::parent::TraceParent;
use crate::error::{Error, Result};

/// A requested but missing feature is an error; spans without a listener are a warning.
pub(crate) fn check(settings: &TraceSettings) -> Result<()> {
    let asked = [
        (
            settings.enabled,
            cfg!(feature = "otel"),
            "spans are to be sent (traces.enabled, DYN_KVBM_TRACES)",
            "otel",
        ),
        (
            settings.nvtx,
            cfg!(feature = "nvtx"),
            "ranges are to be marked (traces.nvtx, DYN_KVBM_TRACES_NVTX)",
            "nvtx",
        ),
    ];
    let mut lacking = asked.iter().filter(|(is_asked, is_there, ..)| *is_asked && !is_there);
    if let Some((_, _, what, feature)) = lacking.next() {
        let message = format!(
            "{what}, which this program was built without: build kvbm with its feature {feature}"
        );
        return Err(Error::unavailable(message));
    }
    if (settings.enabled || settings.nvtx) && !tracing::enabled!(Level::DEBUG) {
        tracing::warn!(
            "spans are asked for (traces), but no subscriber of this program takes those of kvbm: none is made"
        );
    }
    Ok(())
}
