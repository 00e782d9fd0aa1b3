//! Sending a request to its workers, and again where that fails.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt};
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use crate::Shared;
use crate::prompts::PromptText;
use crate::routes::Route;
use crate::workers::{Decoding, Worker};

/// Says what was decided, and why.
const ROUTE: &str = "x-kvbm-route";
/// Follows a request through the engines' logs.
const REQUEST: &str = "x-request-id";

/// A request on its way.
struct Request {
    path: String,
    /// Those that engines see.
    headers: HeaderMap,
    body: Value,
    prompt: PromptText,
}

/// What a prefill worker made of a prompt.
enum Prefilled {
    /// What the decode worker must know to read it.
    There(Value),
    /// The request is wrong in itself: another worker would say the same.
    Refused(Response),
    /// No prefill worker could: the decode worker computes the prompt.
    Nowhere,
}

/// An answer whose first piece is there.
struct Begun {
    status: StatusCode,
    kind: Option<HeaderValue>,
    pieces: BoxStream<'static, Result<Bytes, reqwest::Error>>,
    decoding: Decoding,
}

/// Answers a completion.
pub(crate) async fn complete(
    State(shared): State<Arc<Shared>>,
    uri: Uri,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Response {
    let Ok(permit) = Arc::clone(&shared.room).try_acquire_owned() else {
        let error = "as many requests as the router takes at a time; come again";
        return ([(RETRY_AFTER, "1")], failure(StatusCode::TOO_MANY_REQUESTS, error))
            .into_response();
    };
    // Who asks, and under which name, is the engines' business.
    let passed_on = [HeaderName::from_static(REQUEST), AUTHORIZATION];
    let passed_on =
        passed_on.into_iter().filter_map(|name| Some((name.clone(), headers.get(name)?.clone())));
    let prompt = PromptText::of(&body);
    let request =
        Request { path: uri.path().to_owned(), headers: passed_on.collect(), body, prompt };
    shared.answer(request, permit).await
}

/// The models of any decode worker.
pub(crate) async fn models(State(shared): State<Arc<Shared>>) -> Response {
    for worker in shared.decode.iter().filter(|worker| worker.is_healthy()) {
        if let Ok(answer) = shared.client.get(worker.page("/v1/models")).send().await {
            return passed_on(answer).await;
        }
    }
    failure(StatusCode::SERVICE_UNAVAILABLE, "no decode worker answers")
}

impl Shared {
    async fn answer(&self, request: Request, permit: OwnedSemaphorePermit) -> Response {
        let mut tried = Vec::new();
        while let Some(route) = self.route(&request.prompt, &tried) {
            let prefilled = self.prefill(&request, &route).await;
            let parameters = match prefilled {
                Prefilled::There(parameters) => Some(parameters),
                Prefilled::Refused(answer) => return answer,
                Prefilled::Nowhere => None,
            };
            match self.decode(&request, &route, parameters).await {
                Ok(begun) => return passed_piece_by_piece(begun, &route, permit),
                Err(error) => {
                    tracing::warn!(worker = route.decode.name(), %error, "another decode worker is asked");
                    tried.push(route.decode);
                }
            }
        }
        failure(StatusCode::SERVICE_UNAVAILABLE, "no decode worker answers")
    }

    /// Has the prompt computed by the best prefill worker that can.
    async fn prefill(&self, request: &Request, route: &Route) -> Prefilled {
        for worker in &route.prefill {
            match self.prefill_at(request, worker).await {
                Ok(answer) if answer.status().is_client_error() => {
                    return Prefilled::Refused(passed_on(answer).await);
                }
                Ok(answer) if answer.status().is_success() => match answer.json::<Value>().await {
                    Ok(mut answer) => match answer.get_mut("kv_transfer_params") {
                        Some(parameters) if parameters.is_object() => {
                            return Prefilled::There(parameters.take());
                        }
                        _ => tracing::warn!(worker = worker.name(), "names no place to read at"),
                    },
                    Err(error) => tracing::warn!(worker = worker.name(), %error, "breaks off"),
                },
                Ok(answer) => {
                    tracing::warn!(worker = worker.name(), status = %answer.status(), "fails");
                }
                Err(error) => {
                    if error.is_connect() {
                        worker.note_health(false);
                    }
                    tracing::warn!(worker = worker.name(), %error, "another prefill worker is asked");
                }
            }
        }
        Prefilled::Nowhere
    }

    async fn prefill_at(
        &self,
        request: &Request,
        worker: &Arc<Worker>,
    ) -> Result<reqwest::Response, reqwest::Error> {
        let missing = request.prompt.tokens().saturating_sub(worker.held(&request.prompt));
        let _computing = worker.computes(missing);
        let is_idle = worker.waiting() == u64::from(missing);
        let began = Instant::now();
        let answer = self.send(request, worker, &of_prefill(&request.body));
        let answer = answer.timeout(self.prefill_limit).send().await?;
        if answer.status().is_success() {
            worker.keep(&request.prompt);
            if is_idle {
                self.costs.there.lock().note(missing.into(), began.elapsed().as_secs_f64());
            }
        }
        Ok(answer)
    }

    /// The decode worker's answer, as soon as its first piece is there.
    async fn decode(
        &self,
        request: &Request,
        route: &Route,
        parameters: Option<Value>,
    ) -> Result<Begun, String> {
        let is_handed_over = parameters.is_some();
        let mut body = request.body.clone();
        if let Some(parameters) = parameters {
            transfer(&mut body, parameters);
        }
        let worker = &route.decode;
        // What is not streamed comes when it has been decoded.
        let is_streamed = request.body["stream"] == true;
        let decoding = (!is_streamed).then(|| worker.decodes());
        let missing = if is_handed_over || !is_streamed { 0 } else { route.missing };
        let computing = worker.computes(missing);
        let began = Instant::now();
        let answer = self.send(request, worker, &body).send().await.map_err(|error| {
            if error.is_connect() {
                worker.note_health(false);
            }
            error.to_string()
        })?;
        let (status, kind) = (answer.status(), answer.headers().get(CONTENT_TYPE).cloned());
        if status.is_server_error() {
            return Err(format!("it answers {status}"));
        }
        let mut pieces = answer.bytes_stream().boxed();
        let first = pieces.next().await.transpose().map_err(|error| error.to_string())?;
        drop(computing);
        if status.is_success() {
            worker.keep(&request.prompt);
            if is_streamed {
                let cost = if is_handed_over { &self.costs.moved } else { &self.costs.here };
                cost.lock().note(route.missing.into(), began.elapsed().as_secs_f64());
            }
        }
        let pieces = stream::iter(first.map(Ok)).chain(pieces).boxed();
        let decoding = decoding.unwrap_or_else(|| worker.decodes());
        Ok(Begun { status, kind, pieces, decoding })
    }

    fn send(&self, request: &Request, worker: &Worker, body: &Value) -> reqwest::RequestBuilder {
        self.client.post(worker.page(&request.path)).headers(request.headers.clone()).json(body)
    }
}

/// Hands an answer on piece by piece.
fn passed_piece_by_piece(begun: Begun, route: &Route, permit: OwnedSemaphorePermit) -> Response {
    let pieces = kept_until_end(begun.pieces, (begun.decoding, permit));
    let mut response = (begun.status, Body::from_stream(pieces)).into_response();
    response.headers_mut().extend(begun.kind.map(|kind| (CONTENT_TYPE, kind)));
    let said = route.decision.and_then(|said| HeaderValue::try_from(said.to_string()).ok());
    response.headers_mut().extend(said.map(|said| (HeaderName::from_static(ROUTE), said)));
    response
}

/// Puts into a request where its prompt is, or that it is to be kept for another worker. What the
/// client says of it under `kvbm` stays.
fn transfer(body: &mut Value, mut parameters: Value) {
    let Some(fields) = body.as_object_mut() else { return };
    let hints = fields.get_mut("kv_transfer_params").and_then(|said| said.get_mut("kvbm"));
    if let (Some(hints), Some(parameters)) = (hints.map(Value::take), parameters.as_object_mut()) {
        parameters.insert("kvbm".to_owned(), hints);
    }
    fields.insert("kv_transfer_params".to_owned(), parameters);
}

/// The request that makes a worker compute a prompt for another one, and answer with one token.
fn of_prefill(body: &Value) -> Value {
    let mut body = body.clone();
    let Some(fields) = body.as_object_mut() else { return body };
    for key in ["stream_options", "min_tokens"] {
        fields.remove(key);
    }
    fields.insert("stream".to_owned(), false.into());
    for key in ["max_tokens", "max_completion_tokens"] {
        if key == "max_tokens" || fields.contains_key(key) {
            fields.insert(key.to_owned(), 1.into());
        }
    }
    let asked = json!({
        "do_remote_decode": true,
        "do_remote_prefill": false,
        "remote_engine_id": null,
        "remote_block_ids": null,
        "remote_host": null,
        "remote_port": null,
    });
    transfer(&mut body, asked);
    body
}

/// `kept` lives as long as the pieces come.
fn kept_until_end<K: Send + 'static>(
    pieces: impl Stream<Item = Result<Bytes, reqwest::Error>> + Send + 'static,
    kept: K,
) -> impl Stream<Item = Result<Bytes, reqwest::Error>> + Send + 'static {
    let pieces = Box::pin(pieces);
    stream::unfold((pieces, kept), |(mut pieces, kept)| async {
        Some((pieces.next().await?, (pieces, kept)))
    })
}

async fn passed_on(answer: reqwest::Response) -> Response {
    let status = answer.status();
    let kind = answer.headers().get(CONTENT_TYPE).cloned();
    match answer.bytes().await {
        Ok(body) => {
            let mut response = (status, body).into_response();
            response.headers_mut().extend(kind.map(|kind| (CONTENT_TYPE, kind)));
            response
        }
        Err(error) => failure(StatusCode::BAD_GATEWAY, &error.to_string()),
    }
}

/// An error in the form of `OpenAI`.
fn failure(status: StatusCode, message: &str) -> Response {
    let error = json!({"error": {"message": message, "type": "router", "code": status.as_u16()}});
    (status, Json(error)).into_response()
}
