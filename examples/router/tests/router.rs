//! The router before stand-ins for engines, which note what they are sent.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt;
use kvbm_router::{RouterOptions, router};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use url::Url;

/// What an engine does with a request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Behaviour {
    /// Answers; with a place to read at, if it is asked for one.
    Well,
    /// Answers 500.
    Fails,
    /// Answers 400.
    Refuses,
    /// Sends a first piece, and the second when it is told to.
    Streams,
    /// Breaks off before the first piece.
    Breaks,
}

#[derive(Debug)]
struct Engine {
    behaviour: Mutex<Behaviour>,
    seen: Mutex<Vec<Value>>,
    go_on: Notify,
    url: Url,
    server: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    async fn start(behaviour: Behaviour) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let engine = Arc::new(Self {
            behaviour: Mutex::new(behaviour),
            seen: Mutex::new(Vec::new()),
            go_on: Notify::new(),
            url: url.parse().expect("a URL"),
            server: Mutex::new(None),
        });
        let service = Router::new()
            .route("/v1/completions", post(answer))
            .route("/v1/models", get(|| async { Json(json!({"data": []})) }))
            .route("/health", get(|| async {}))
            .with_state(Arc::clone(&engine));
        let server =
            tokio::spawn(async { axum::serve(listener, service).await.expect("it serves") });
        *engine.server.lock() = Some(server);
        engine
    }

    async fn kill(&self) {
        let server = self.server.lock().take().expect("it lives");
        server.abort();
        _ = server.await;
    }

    fn seen(&self) -> Vec<Value> {
        std::mem::take(&mut self.seen.lock())
    }
}

async fn answer(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> Response {
    let place = (body["kv_transfer_params"]["do_remote_decode"] == true)
        .then(|| json!({"do_remote_prefill": true, "remote_host": engine.url.authority(), "x": [1, null]}));
    engine.seen.lock().push(body);
    let behaviour = *engine.behaviour.lock();
    match behaviour {
        Behaviour::Well => {
            Json(json!({"choices": [{"text": "a"}], "kv_transfer_params": place})).into_response()
        }
        Behaviour::Fails => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Behaviour::Refuses => (StatusCode::BAD_REQUEST, "no such model").into_response(),
        Behaviour::Breaks => {
            let broken = std::io::Error::other("as the test wants");
            let pieces = futures::stream::once(async { Err::<&str, _>(broken) });
            Body::from_stream(pieces).into_response()
        }
        Behaviour::Streams => {
            let second = async move {
                engine.go_on.notified().await;
                Ok::<_, std::io::Error>("data: two\n\n")
            };
            let first = futures::stream::once(async { Ok("data: one\n\n") });
            Body::from_stream(first.chain(futures::stream::once(second))).into_response()
        }
    }
}

/// A router in front of engines, and a client of it.
struct Front {
    url: String,
    client: reqwest::Client,
}

impl Front {
    async fn of(prefill: &[&Arc<Engine>], decode: &[&Arc<Engine>], max_requests: usize) -> Self {
        Self::impatient(prefill, decode, max_requests, Duration::from_mins(1)).await
    }

    async fn impatient(
        prefill: &[&Arc<Engine>],
        decode: &[&Arc<Engine>],
        max_requests: usize,
        silence: Duration,
    ) -> Self {
        let urls =
            |engines: &[&Arc<Engine>]| engines.iter().map(|engine| engine.url.clone()).collect();
        let options = RouterOptions {
            prefill: urls(prefill),
            decode: urls(decode),
            max_requests,
            prefill_limit: Duration::from_mins(1),
            silence,
            // A stand-in is never busy, so that a prompt would never leave.
            hand_over: -1e6,
        };
        let router = router(&options).expect("a router");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(async { axum::serve(listener, router).await.expect("it serves") });
        Self { url, client: reqwest::Client::new() }
    }

    async fn post(&self, body: &Value) -> reqwest::Response {
        let request = self.client.post(format!("{}/v1/completions", self.url)).json(body);
        request.send().await.expect("an answer")
    }
}

fn prompt() -> Value {
    json!({"model": "m", "prompt": "x".repeat(4_000), "max_tokens": 8, "min_tokens": 2, "stream": false})
}

#[tokio::test]
async fn a_prompt_is_computed_there_and_answered_here() {
    let (there, here) =
        (Engine::start(Behaviour::Well).await, Engine::start(Behaviour::Well).await);
    let front = Front::of(&[&there], &[&here], 8).await;
    let answer = front.post(&prompt()).await;
    assert_eq!(answer.status(), 200);
    let why = answer.headers()["x-kvbm-route"].to_str().expect("text").to_owned();
    assert!(why.starts_with("offloaded: here "), "{why}");
    let asked = there.seen().remove(0);
    assert_eq!((&asked["max_tokens"], &asked["stream"]), (&json!(1), &json!(false)));
    assert!(asked.get("min_tokens").is_none());
    assert_eq!(asked["kv_transfer_params"]["remote_block_ids"], Value::Null);
    let asked = here.seen().remove(0);
    let place =
        json!({"do_remote_prefill": true, "remote_host": there.url.authority(), "x": [1, null]});
    assert_eq!(asked["kv_transfer_params"], place, "as the prefill worker said it");
    assert_eq!((&asked["max_tokens"], &asked["min_tokens"]), (&json!(8), &json!(2)));
    // What the client says of its request both hear.
    let mut said = prompt();
    said["kv_transfer_params"] = json!({"kvbm": {"priority": 80}});
    assert_eq!(front.post(&said).await.status(), 200);
    for asked in [there.seen().remove(0), here.seen().remove(0)] {
        assert_eq!(asked["kv_transfer_params"]["kvbm"]["priority"], 80);
    }
}

#[tokio::test]
async fn another_worker_is_asked_where_one_fails() {
    let (dead, fails, well) = (
        Engine::start(Behaviour::Well).await,
        Engine::start(Behaviour::Fails).await,
        Engine::start(Behaviour::Well).await,
    );
    let (gone, broken, here) = (
        Engine::start(Behaviour::Well).await,
        Engine::start(Behaviour::Fails).await,
        Engine::start(Behaviour::Well).await,
    );
    let front = Front::of(&[&dead, &fails, &well], &[&gone, &broken, &here], 8).await;
    dead.kill().await;
    gone.kill().await;
    assert_eq!(front.post(&prompt()).await.status(), 200);
    let asked = here.seen().remove(0);
    assert_eq!(asked["kv_transfer_params"]["remote_host"], well.url.authority());
    // So where one breaks off before it says anything.
    *broken.behaviour.lock() = Behaviour::Breaks;
    assert_eq!(front.post(&prompt()).await.status(), 200);
    assert_eq!(here.seen().len(), 1);
    // Without any prefill worker the decode worker computes; and once one is back, it does again.
    *well.behaviour.lock() = Behaviour::Fails;
    assert_eq!(front.post(&prompt()).await.status(), 200);
    assert!(here.seen().remove(0).get("kv_transfer_params").is_none());
    *well.behaviour.lock() = Behaviour::Well;
    assert_eq!(front.post(&prompt()).await.status(), 200);
    assert!(here.seen().remove(0)["kv_transfer_params"].is_object());
    // No decode worker: an error, and not for long.
    *here.behaviour.lock() = Behaviour::Fails;
    let answer = front.post(&prompt()).await;
    assert_eq!(answer.status(), 503);
    assert!(answer.text().await.expect("a text").contains("no decode worker answers"));
    *here.behaviour.lock() = Behaviour::Well;
    assert_eq!(front.post(&prompt()).await.status(), 200);
}

#[tokio::test]
async fn what_is_wrong_in_itself_is_told_at_once() {
    let (there, here) =
        (Engine::start(Behaviour::Refuses).await, Engine::start(Behaviour::Well).await);
    let front = Front::of(&[&there], &[&here], 8).await;
    let answer = front.post(&prompt()).await;
    assert_eq!(
        (answer.status().as_u16(), answer.text().await.expect("a text")),
        (400, "no such model".into())
    );
    assert_eq!(here.seen(), [] as [Value; 0]);
}

#[tokio::test]
async fn pieces_arrive_as_made_and_one_too_many_waits() {
    let here = Engine::start(Behaviour::Streams).await;
    let front = Front::of(&[], &[&here], 1).await;
    let answer = front.post(&json!({"prompt": "p", "stream": true})).await;
    let mut pieces = answer.bytes_stream();
    assert_eq!(pieces.next().await.expect("a piece").expect("whole"), "data: one\n\n");
    let refused = front.post(&prompt()).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["retry-after"]),
        (429, &"1".parse().expect("a value"))
    );
    here.go_on.notify_one();
    assert_eq!(pieces.next().await.expect("a piece").expect("whole"), "data: two\n\n");
    assert!(pieces.next().await.is_none());
    *here.behaviour.lock() = Behaviour::Well;
    // The room is free as soon as the server has seen the end.
    while front.post(&prompt()).await.status() == 429 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_engine_that_falls_silent_keeps_no_room() {
    let here = Engine::start(Behaviour::Streams).await;
    let front = Front::impatient(&[], &[&here], 1, Duration::from_millis(100)).await;
    let answer = front.post(&json!({"prompt": "p", "stream": true})).await;
    let mut pieces = answer.bytes_stream();
    assert_eq!(pieces.next().await.expect("a piece").expect("whole"), "data: one\n\n");
    assert!(pieces.next().await.expect("an end").is_err(), "it never goes on");
    *here.behaviour.lock() = Behaviour::Well;
    while front.post(&prompt()).await.status() == 429 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn health_is_that_of_the_decode_workers() {
    let here = Engine::start(Behaviour::Well).await;
    let front = Front::of(&[], &[&here], 1).await;
    let get = |page: &str| front.client.get(format!("{}{page}", front.url)).send();
    assert_eq!(get("/health").await.expect("an answer").status(), 200);
    assert_eq!(
        get("/v1/models").await.expect("an answer").text().await.expect("a text"),
        r#"{"data":[]}"#
    );
    here.kill().await;
    assert_eq!(front.post(&prompt()).await.status(), 503);
    assert_eq!(get("/health").await.expect("an answer").status(), 503);
}
