//! A router in front of engines that prefill and engines that decode: the HTTP of `OpenAI`, streaming,
//! health, retries, back-pressure.
//!
//! For each prompt [`should_offload_prefill`](kvbm_policies::should_offload_prefill) says whether a
//! prefill worker computes it. If so the router sends it there, and hands what that answers in
//! `kv_transfer_params` to a decode worker, as the proxies of vLLM do. The header
//! `x-kvbm-route` of an answer says what was decided, and why.
//!
//! | module | holds |
//! |---|---|
//! | [`workers`] | the engines: their health, what waits there, what they hold |
//! | `prompts` | how long a prompt is, and which one it begins like |
//! | `routes` | which workers a prompt goes to |
//! | `forward` | sending it there, and again where that fails |

mod forward;
mod prompts;
mod routes;
pub mod workers;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tokio::sync::Semaphore;
use url::Url;

use self::routes::Costs;
use self::workers::Worker;

/// What a router is told.
#[derive(Clone, Debug)]
pub struct RouterOptions {
    /// Engines that compute prompts for others; there may be none.
    pub prefill: Vec<Url>,
    /// Engines that answer.
    pub decode: Vec<Url>,
    /// Requests at a time; one more is told to come again.
    pub max_requests: usize,
    /// How long a prefill worker may take before another one is asked.
    pub prefill_limit: Duration,
    /// How long a worker may say nothing before its answer is given up.
    pub silence: Duration,
    /// Seconds that a hand-over takes however short the prompt is.
    pub hand_over: f64,
}

/// The router's state.
#[derive(Debug)]
pub(crate) struct Shared {
    client: reqwest::Client,
    prefill: Vec<Arc<Worker>>,
    decode: Vec<Arc<Worker>>,
    room: Arc<Semaphore>,
    prefill_limit: Duration,
    costs: Costs,
}

/// The router as a service, and a task that asks after its workers' health until it is dropped.
///
/// # Errors
/// If TLS cannot be set up.
pub fn router(options: &RouterOptions) -> Result<Router, reqwest::Error> {
    // Another crate of the process may have chosen already.
    _ = rustls::crypto::ring::default_provider().install_default();
    let workers = |urls: &[Url]| urls.iter().cloned().map(Worker::new).map(Arc::new).collect();
    let shared = Arc::new(Shared {
        client: reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(2))
            .read_timeout(options.silence)
            .build()?,
        prefill: workers(&options.prefill),
        decode: workers(&options.decode),
        room: Arc::new(Semaphore::new(options.max_requests)),
        prefill_limit: options.prefill_limit,
        costs: Costs::new(options.hand_over),
    });
    tokio::spawn(workers::watch(Arc::downgrade(&shared)));
    Ok(Router::new()
        .route("/v1/completions", post(forward::complete))
        .route("/v1/chat/completions", post(forward::complete))
        .route("/v1/models", get(forward::models))
        .route("/health", get(health))
        .layer(DefaultBodyLimit::max(64 << 20))
        .with_state(shared))
}

async fn health(State(shared): State<Arc<Shared>>) -> Response {
    if shared.decode.iter().any(|worker| worker.is_healthy()) {
        return StatusCode::OK.into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, "no decode worker answers\n").into_response()
}
