//! An etcd in memory, as far as peers need one. Its time is tokio's, and it fails as it is told.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep, sleep_until};

use crate::peers::discovery::etcd::http::{Answer, Call, Transport};

const LATENCY: Duration = Duration::from_millis(5);

/// What is wrong with a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It refuses connections.
    Away,
    /// It takes requests, and answers none.
    Silent,
    /// It answers everything with this status and body.
    Says(u16, String),
}

/// All members of one etcd. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct FakeEtcd(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    revision: i64,
    compacted: i64,
    entries: BTreeMap<Vec<u8>, Entry>,
    leases: BTreeMap<i64, Lease>,
    leases_granted: i64,
    events: Vec<Event>,
    watchers: Vec<Watcher>,
    /// Watches of members that fell silent, and what they know of.
    stalled: Vec<(i64, Watcher)>,
    faults: BTreeMap<String, Fault>,
    calls: Vec<Received>,
    user: Option<(String, String)>,
    tokens: usize,
}

/// A call that arrived.
#[derive(Clone, Debug)]
pub(super) struct Received {
    pub(super) at: Instant,
    pub(super) member: String,
    pub(super) path: String,
}

struct Entry {
    value: Vec<u8>,
    lease: i64,
}

struct Lease {
    ttl: u64,
    ends: Instant,
}

#[derive(Clone)]
struct Event {
    revision: i64,
    key: Vec<u8>,
    json: Value,
}

struct Watcher {
    member: String,
    from: Vec<u8>,
    until: Vec<u8>,
    pieces: UnboundedSender<Vec<u8>>,
}

impl Watcher {
    fn tell(&self, event: &Event) -> bool {
        let is_mine = event.key >= self.from && event.key < self.until;
        !is_mine
            || self.say(&line(&json!({"header": header(event.revision), "events": [event.json]})))
    }

    fn say(&self, text: &str) -> bool {
        self.pieces.send(text.into()).is_ok()
    }
}

fn line(result: &Value) -> String {
    format!("{}\n", json!({"result": result}))
}

fn header(revision: i64) -> Value {
    json!({"cluster_id": "14841639068965178418", "revision": revision.to_string(), "raft_term": "2"})
}

fn text(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

fn bytes(value: &Value) -> Vec<u8> {
    STANDARD.decode(value.as_str().unwrap_or_default()).unwrap()
}

fn number(value: &Value) -> i64 {
    value.as_str().map_or(0, |digits| digits.parse().unwrap())
}

type Refusal = (u16, i64, &'static str);

/// What people and other workers do to it.
impl FakeEtcd {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Breaks a member, or mends it. Watches of a member that is silent go on when it is mended;
    /// those of any other broken one end.
    pub(super) fn set_fault(&self, member: &str, fault: Option<Fault>) {
        let mut state = self.state();
        let Some(fault) = fault else {
            state.faults.remove(member);
            return state.wake_watches(member);
        };
        let watchers = std::mem::take(&mut state.watchers);
        let (broken, others): (Vec<_>, _) =
            watchers.into_iter().partition(|watch| watch.member == member);
        state.watchers = others;
        if fault == Fault::Silent {
            let since = state.revision;
            state.stalled.extend(broken.into_iter().map(|watch| (since, watch)));
        }
        state.faults.insert(member.to_owned(), fault);
    }

    /// Starts again without its data.
    pub(super) fn lose_everything(&self) {
        let mut state = self.state();
        let (calls, faults) = (std::mem::take(&mut state.calls), std::mem::take(&mut state.faults));
        *state = State { calls, faults, user: state.user.take(), ..State::default() };
    }

    /// Every watch ends, after some last words.
    pub(super) fn cut_watches(&self, last_words: &str) {
        for watch in self.state().watchers.drain(..) {
            watch.say(last_words);
        }
    }

    pub(super) fn put(&self, key: &str, value: &str) {
        self.state().put(key.into(), value.into(), 0);
    }

    pub(super) fn delete(&self, key: &str) {
        self.state().delete(key.as_bytes());
    }

    pub(super) fn keys(&self) -> Vec<String> {
        let state = self.state();
        state.entries.keys().map(|key| String::from_utf8(key.clone()).unwrap()).collect()
    }

    pub(super) fn revoke_all(&self) {
        let mut state = self.state();
        let all: Vec<_> = state.leases.keys().copied().collect();
        all.into_iter().for_each(|lease| state.end_lease(lease));
    }

    pub(super) fn compact(&self) {
        let mut state = self.state();
        state.compacted = state.revision;
        state.events.clear();
    }

    pub(super) fn ask_for_user(&self, name: &str, password: &str) {
        self.state().user = Some((name.to_owned(), password.to_owned()));
    }

    pub(super) fn end_tokens(&self) {
        self.state().tokens += 1;
    }

    pub(super) fn calls(&self, path: &str) -> Vec<Received> {
        self.state().calls.iter().filter(|call| call.path == path).cloned().collect()
    }

    pub(super) fn all_calls(&self) -> usize {
        self.state().calls.len()
    }

    fn end_leases(&self) {
        let (mut state, now) = (self.state(), Instant::now());
        let ended: Vec<_> =
            state.leases.iter().filter(|(_, lease)| lease.ends <= now).map(|(&id, _)| id).collect();
        ended.into_iter().for_each(|lease| state.end_lease(lease));
    }

    /// A lease ends even if no client asks for anything.
    fn end_leases_at(&self, ends: Instant) {
        let etcd = self.clone();
        tokio::spawn(async move {
            sleep_until(ends).await;
            etcd.end_leases();
        });
    }
}

impl State {
    fn put(&mut self, key: Vec<u8>, value: Vec<u8>, lease: i64) {
        self.revision += 1;
        let kv = json!({"key": text(&key), "value": text(&value), "lease": lease.to_string(),
            "mod_revision": self.revision.to_string()});
        self.entries.insert(key.clone(), Entry { value, lease });
        self.happened(key, json!({"kv": kv}));
    }

    fn delete(&mut self, key: &[u8]) {
        if self.entries.remove(key).is_none() {
            return;
        }
        self.revision += 1;
        let kv = json!({"key": text(key), "mod_revision": self.revision.to_string()});
        self.happened(key.to_vec(), json!({"type": "DELETE", "kv": kv}));
    }

    fn happened(&mut self, key: Vec<u8>, json: Value) {
        let event = Event { revision: self.revision, key, json };
        self.watchers.retain(|watch| watch.tell(&event));
        self.events.push(event);
    }

    fn wake_watches(&mut self, member: &str) {
        let stalled = std::mem::take(&mut self.stalled);
        let (woken, others): (Vec<_>, _) =
            stalled.into_iter().partition(|(_, watch)| watch.member == member);
        self.stalled = others;
        for (known, watch) in woken {
            self.events
                .iter()
                .filter(|event| event.revision > known)
                .for_each(|event| _ = watch.tell(event));
            self.watchers.push(watch);
        }
    }

    fn end_lease(&mut self, lease: i64) {
        self.leases.remove(&lease);
        let held: Vec<_> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.lease == lease)
            .map(|(key, _)| key.clone())
            .collect();
        held.iter().for_each(|key| self.delete(key));
    }

    fn range(&self, request: &Value) -> Result<Value, Refusal> {
        let asked = number(&request["revision"]);
        if asked > 0 && asked < self.compacted {
            return Err((400, 11, "etcdserver: mvcc: required revision has been compacted"));
        }
        let (key, end, limit) =
            (bytes(&request["key"]), bytes(&request["range_end"]), number(&request["limit"]));
        let until =
            if end.is_empty() { Bound::Included(key.clone()) } else { Bound::Excluded(end) };
        let found: Vec<_> = self.entries.range((Bound::Included(key), until)).collect();
        let length = if limit > 0 { found.len().min(limit as usize) } else { found.len() };
        let kvs = found[..length].iter().map(|(key, entry)| {
            let value =
                if request["keys_only"] == true { String::new() } else { text(&entry.value) };
            json!({"key": text(key), "value": value, "lease": entry.lease.to_string()})
        });
        let kvs: Vec<_> = kvs.collect();
        Ok(json!({"header": header(self.revision), "kvs": kvs, "more": length < found.len()}))
    }

    fn answer(&mut self, path: &str, request: &Value) -> Result<Value, Refusal> {
        match path {
            "/v3/kv/range" => self.range(request),
            "/v3/kv/put" => {
                let lease = number(&request["lease"]);
                if lease > 0 && !self.leases.contains_key(&lease) {
                    return Err((404, 5, "etcdserver: requested lease not found"));
                }
                self.put(bytes(&request["key"]), bytes(&request["value"]), lease);
                Ok(json!({"header": header(self.revision)}))
            }
            "/v3/lease/grant" => {
                self.leases_granted += 1;
                let (id, ttl) = (7_587_000 + self.leases_granted, number(&request["TTL"]) as u64);
                let ends = Instant::now() + Duration::from_secs(ttl);
                self.leases.insert(id, Lease { ttl, ends });
                Ok(
                    json!({"header": header(self.revision), "ID": id.to_string(), "TTL": ttl.to_string()}),
                )
            }
            "/v3/lease/revoke" => {
                self.end_lease(number(&request["ID"]));
                Ok(json!({"header": header(self.revision)}))
            }
            "/v3/lease/keepalive" => {
                let (id, header) = (number(&request["ID"]), header(self.revision));
                let Some(lease) = self.leases.get_mut(&id) else {
                    return Ok(json!({"result": {"header": header, "ID": id.to_string()}}));
                };
                lease.ends = Instant::now() + Duration::from_secs(lease.ttl);
                let ttl = lease.ttl.to_string();
                Ok(json!({"result": {"header": header, "ID": id.to_string(), "TTL": ttl}}))
            }
            "/v3/auth/authenticate" => self.authenticate(request),
            _ => Err((404, 5, "Not Found")),
        }
    }

    fn authenticate(&self, request: &Value) -> Result<Value, Refusal> {
        let shown = (request["name"].as_str(), request["password"].as_str());
        match &self.user {
            Some((name, password)) if shown == (Some(name), Some(password)) => {
                Ok(json!({"header": header(self.revision), "token": self.token()}))
            }
            _ => Err((400, 3, "etcdserver: authentication failed, invalid user ID or password")),
        }
    }

    fn token(&self) -> String {
        format!("token.{}", self.tokens)
    }

    fn watch(&mut self, member: &str, request: &Value, pieces: UnboundedSender<Vec<u8>>) {
        let create = &request["create_request"];
        let (from, until) = (bytes(&create["key"]), bytes(&create["range_end"]));
        let (start, member) = (number(&create["start_revision"]), member.to_owned());
        let watch = Watcher { member, from, until, pieces };
        watch.say(&line(&json!({"header": header(self.revision), "created": true})));
        if start <= self.compacted {
            watch.say(&line(&json!({"header": header(self.revision), "canceled": true,
                "compact_revision": self.compacted.to_string()})));
            return;
        }
        let missed = self.events.iter().filter(|event| event.revision >= start);
        missed.for_each(|event| _ = watch.tell(event));
        self.watchers.push(watch);
    }
}

impl Transport for FakeEtcd {
    type Answer = FakeAnswer;

    async fn post(&self, call: Call<'_>) -> Result<FakeAnswer, String> {
        sleep(LATENCY).await;
        let at = call.url.find("/v3/").unwrap();
        let (member, path) = call.url.split_at(at);
        let fault = self.received(member, path);
        match fault {
            Some(Fault::Away) => Err("connection refused".into()),
            Some(Fault::Silent) => std::future::pending().await,
            Some(Fault::Says(status, body)) => Ok(FakeAnswer::whole(status, &body)),
            None => Ok(self.answered(member, path, &call)),
        }
    }
}

impl FakeEtcd {
    fn received(&self, member: &str, path: &str) -> Option<Fault> {
        let mut state = self.state();
        let (at, member, path) = (Instant::now(), member.to_owned(), path.to_owned());
        let fault = state.faults.get(&member).cloned();
        state.calls.push(Received { at, member, path });
        fault
    }

    fn answered(&self, member: &str, path: &str, call: &Call<'_>) -> FakeAnswer {
        self.end_leases();
        let mut state = self.state();
        let needs_token = state.user.is_some() && path != "/v3/auth/authenticate";
        if needs_token && call.token != Some(&state.token()) {
            return FakeAnswer::refused(401, 16, "etcdserver: invalid auth token");
        }
        let request: Value = serde_json::from_str(&call.body).unwrap();
        if path == "/v3/watch" {
            let (pieces, received) = unbounded_channel();
            state.watch(member, &request, pieces);
            return FakeAnswer { status: 200, pieces: received };
        }
        let answer = state.answer(path, &request);
        state.leases.values().for_each(|lease| self.end_leases_at(lease.ends));
        match answer {
            Ok(answer) => FakeAnswer::whole(200, &format!("{answer}\n")),
            Err((status, code, message)) => FakeAnswer::refused(status, code, message),
        }
    }
}

/// An answer of an etcd in memory.
pub(super) struct FakeAnswer {
    pub(super) status: u16,
    pieces: UnboundedReceiver<Vec<u8>>,
}

impl FakeAnswer {
    /// In two pieces, wherever that cuts it.
    fn whole(status: u16, body: &str) -> Self {
        let (send, pieces) = unbounded_channel();
        let (first, second) = body.as_bytes().split_at(body.len() / 2);
        for piece in [first, second] {
            send.send(piece.to_vec()).unwrap();
        }
        Self { status, pieces }
    }

    fn refused(status: u16, code: i64, message: &str) -> Self {
        Self::whole(
            status,
            &json!({"error": message, "code": code, "message": message}).to_string(),
        )
    }
}

impl Answer for FakeAnswer {
    fn status(&self) -> u16 {
        self.status
    }

    async fn piece(&mut self) -> Result<Option<Vec<u8>>, String> {
        Ok(self.pieces.recv().await)
    }
}
