//! Where the crates' events go: standard error, and a tracer where the settings name one.

use std::io;

use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry};

use crate::GlobalOptions;
use crate::output::{self, CommandFailure};

/// What is told until this is dropped reaches a tracer.
#[derive(Default)]
pub(crate) struct SpanSending {
    #[cfg(feature = "otel")]
    _spans: Option<kvbm::SpanExport>,
}

/// Begins to listen. What a tracer lacks is an error; settings that are wrong are said by the
/// command that takes them.
pub(crate) fn start(global: &GlobalOptions) -> Result<SpanSending, CommandFailure> {
    let (layer, sending) = match tracers(global) {
        Ok((sending, layers)) => {
            (layers.into_iter().reduce(|one, other| one.and_then(other).boxed()), Ok(sending))
        }
        Err(failure) => (None, Err(failure)),
    };
    tracing_subscriber::registry().with(layer).with(log_to_stderr(global.verbose)).init();
    sending
}

type Listener = Box<dyn Layer<Registry> + Send + Sync>;

#[cfg(any(feature = "nvtx", feature = "otel"))]
fn tracers(global: &GlobalOptions) -> Result<(SpanSending, Vec<Listener>), CommandFailure> {
    let Ok(loaded) = global.loader().and_then(kvbm_settings::Loader::load) else {
        return Ok(Default::default());
    };
    let (settings, mut layers) = (&loaded.settings.traces, Vec::new());
    #[cfg(feature = "nvtx")]
    if settings.nvtx {
        layers.push(kvbm::NvtxRanges::open()?.layer().boxed());
    }
    let sending = SpanSending {
        #[cfg(feature = "otel")]
        _spans: kvbm::SpanExport::open(settings)?
            .inspect(|export| layers.push(export.layer().boxed())),
    };
    Ok((sending, layers))
}

#[cfg(not(any(feature = "nvtx", feature = "otel")))]
#[expect(clippy::unnecessary_wraps, reason = "with the features it fails")]
fn tracers(_: &GlobalOptions) -> Result<(SpanSending, Vec<Listener>), CommandFailure> {
    Ok(Default::default())
}

/// `RUST_LOG`, where it is set, has the last word on what is logged.
fn log_to_stderr<S>(verbose: u8) -> impl Layer<S>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    // That NIXL is missing is no warning: most users do well without it, and `kvbm doctor` says it.
    let level = ["warn", "info", "debug"][usize::from(verbose.min(2))];
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(output::is_lively(&io::stderr()))
        .log_internal_errors(false)
        .without_time()
        .with_target(verbose > 1)
        .with_filter(filter)
}
