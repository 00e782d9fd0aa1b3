//! Spans, sent to an OpenTelemetry collector by OTLP over HTTP.

use std::time::Duration;

use kvbm_settings::TraceSettings;
use opentelemetry::trace::TracerProvider;
use opentelemetry::{Key, Value};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::Layer;
use tracing_subscriber::registry::LookupSpan;

use crate::error::{Error, ErrorKind, Result};

/// A program ends even if its collector does not answer.
const MAX_FAREWELL: Duration = Duration::from_secs(2);

/// Sends spans to a collector, from a thread of its own, until it is dropped; then it sends what
/// waits, for two seconds at most.
///
/// A span that ends is queued. If the queue is full, since the collector is away or slow, the span
/// is dropped: no request waits for a collector. The variables of OpenTelemetry's SDK apply:
/// `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_MAX_QUEUE_SIZE`,
/// `OTEL_EXPORTER_OTLP_HEADERS` and so on.
///
/// ```no_run
/// use kvbm::SpanExport;
/// use kvbm_settings::TraceSettings;
/// use tracing_subscriber::layer::SubscriberExt;
/// use tracing_subscriber::util::SubscriberInitExt;
///
/// let export = SpanExport::open(&TraceSettings { enabled: true, ..TraceSettings::default() })?;
/// tracing_subscriber::registry().with(export.as_ref().map(SpanExport::layer)).init();
/// // … the program works; its managers' spans are sent …
/// drop(export);
/// # Ok::<(), kvbm::Error>(())
/// ```
#[derive(Debug)]
pub struct SpanExport {
    provider: SdkTracerProvider,
}

impl SpanExport {
    /// `None`: the settings do not ask for it. The collector need not be there, now or later.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]: the endpoint, of the settings or of `OTEL_EXPORTER_OTLP_…`, is no
    /// URL.
    pub fn open(settings: &TraceSettings) -> Result<Option<Self>> {
        if !settings.enabled {
            return Ok(None);
        }
        // For collectors behind TLS. The program may have chosen one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // What `OTEL_EXPORTER_OTLP_PROTOCOL` may name instead is not compiled in.
        let exporter = SpanExporter::builder().with_http().with_protocol(Protocol::HttpBinary);
        let exporter = match &settings.endpoint {
            Some(endpoint) => {
                exporter.with_endpoint(format!("{}/v1/traces", endpoint.trim_end_matches('/')))
            }
            None => exporter,
        };
        let exporter = exporter.build().map_err(|error| {
            let message = "cannot send spans; traces.endpoint (DYN_KVBM_TRACES_ENDPOINT) or OTEL_EXPORTER_OTLP_ENDPOINT \
                 names the collector, such as http://127.0.0.1:4318";
            Error::caused(ErrorKind::Invalid, message, error)
        })?;
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource());
        Ok(Some(Self { provider: provider.build() }))
    }

    /// For the program's subscriber: takes spans of `kvbm`, and those at the level INFO of the
    /// program itself, so that what a request does is found under the request.
    pub fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        // Sending must not make spans that are sent.
        let others = ["opentelemetry", "hyper", "hyper_util", "reqwest", "h2"]
            .map(|name| (name, LevelFilter::OFF));
        let taken = Targets::new()
            .with_default(LevelFilter::INFO)
            .with_target("kvbm", LevelFilter::DEBUG)
            .with_targets(others);
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer("kvbm"))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(taken)
    }

    /// Sends what waits, and waits for that. False: the collector did not take it.
    pub fn flush(&self) -> bool {
        self.provider.force_flush().is_ok()
    }
}

impl Drop for SpanExport {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown_with_timeout(MAX_FAREWELL) {
            tracing::warn!("not all spans were sent: {error}");
        }
    }
}

/// What the environment says of the process, and a name where it does not.
fn resource() -> Resource {
    let found = Resource::builder().build();
    let is_named = match found.get(&Key::from_static_str("service.name")) {
        Some(Value::String(name)) => !name.as_str().starts_with("unknown_service"),
        _ => false,
    };
    if is_named { found } else { Resource::builder().with_service_name("kvbm").build() }
}
