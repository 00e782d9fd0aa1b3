//! Workers and an etcd that fails. Each test of a fault ends with [`Bench::assert_heals`].

mod fake;
mod over_http;
mod real;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use self::fake::{FakeEtcd, Fault};
use super::announcer::Announcer;
use super::gateway::{EtcdFailure, Gateway};
use super::messages::{RangeAnswer, RangeRequest};
use super::prefix;
use super::reader::Reader;
use crate::error::ErrorKind;
use crate::peers::discovery::{
    EtcdSource, EtcdUser, PeerAddress, PeerAnnouncement, PeerList, PeerSource, PeerWatch,
};

const A: &str = "http://a:2379";
const B: &str = "http://b:2379";
const TTL: Duration = EtcdSource::TTL;
const LATE: Duration = Duration::from_mins(2);

/// An etcd, and a worker that watches it.
struct Bench {
    etcd: FakeEtcd,
    source: EtcdSource,
    watch: PeerWatch,
}

impl Bench {
    fn new() -> Self {
        Self::with(EtcdSource::new(vec![A.into(), B.into()], "prod"), FakeEtcd::default())
    }

    fn with(source: EtcdSource, etcd: FakeEtcd) -> Self {
        let (list, peers) = watch::channel(Arc::default());
        let gateway = Gateway::new(&source, etcd.clone()).unwrap();
        let reader = Reader::new(gateway, prefix(&source.namespace).unwrap(), list);
        Self { etcd, watch: PeerWatch { peers, task: tokio::spawn(reader.run()) }, source }
    }

    /// Another worker.
    fn announce(&self, name: &str) -> PeerAnnouncement {
        self.announce_at(name, "node-1:6890")
    }

    fn announce_at(&self, name: &str, address: &str) -> PeerAnnouncement {
        let own = PeerAddress::new(name, address).unwrap();
        let gateway = Gateway::new(&self.source, self.etcd.clone()).unwrap();
        let prefix = prefix(&self.source.namespace).unwrap();
        let announcer = Announcer::new(gateway, &prefix, &own, self.source.ttl);
        let (stop, stopped) = oneshot::channel();
        PeerAnnouncement { stop, task: tokio::spawn(announcer.run(stopped)) }
    }

    /// Returns when the list is such.
    async fn wait_for(&self, is_such: impl Fn(&PeerList) -> bool) {
        let mut peers = self.watch.peers();
        let such = timeout(LATE, peers.wait_for(|list| is_such(list))).await.map(drop);
        such.unwrap_or_else(|_| panic!("the list stays {:?}", self.watch.peers().borrow()));
    }

    async fn wait_for_names(&self, names: &[&str]) {
        self.wait_for(|list| list.iter().map(|(name, _)| name).eq(names.iter().copied())).await;
    }

    fn names(&self) -> Vec<String> {
        self.watch.peers().borrow().iter().map(|(name, _)| name.to_owned()).collect()
    }

    /// And then it heals, and everything works again.
    async fn assert_heals(&self) {
        let others = self.names();
        let names = |more: &[&str]| {
            let mut names: Vec<_> =
                others.iter().map(String::as_str).chain(more.iter().copied()).collect();
            names.sort_unstable();
            names.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        let is = |list: &PeerList, names: &[String]| list.iter().map(|(name, _)| name).eq(names);
        let first = self.announce("healed/0");
        let second = self.announce("healed/1");
        self.wait_for(|list| is(list, &names(&["healed/0", "healed/1"]))).await;
        first.withdraw().await;
        self.wait_for(|list| is(list, &names(&["healed/1"]))).await;
        sleep(3 * TTL).await;
        assert_eq!(self.names(), names(&["healed/1"]), "kept alive");
        second.withdraw().await;
        self.wait_for(|list| is(list, &names(&[]))).await;
    }
}

fn key(name: &str) -> String {
    format!("kvbm/prod/peers/{name}")
}

const GOOD: &str = r#"{"address": "node-9:80"}"#;

#[tokio::test(start_paused = true)]
async fn workers_see_each_other_come_and_go() {
    let bench = Bench::new();
    let a = bench.announce_at("a/0", "node-1:6890");
    bench.wait_for_names(&["a/0"]).await;
    let b = bench.announce_at("b/0", "[fd00::2]:6890");
    bench.wait_for_names(&["a/0", "b/0"]).await;
    assert_eq!(bench.watch.peers().borrow().get("b/0"), Some("[fd00::2]:6890"));
    a.withdraw().await;
    bench.wait_for_names(&["b/0"]).await;
    // Dropped, it is taken back as well.
    drop(b);
    bench.wait_for_names(&[]).await;
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn a_namespace_has_workers_of_its_own() {
    let bench = Bench::new();
    for key in ["kvbm/other/peers/a", "kvbm/prod/peersx/a", "kvbm/prod/peers", "kvbm/prod/peers0"] {
        bench.etcd.put(key, GOOD);
    }
    bench.etcd.put(&key("mine"), GOOD);
    bench.wait_for_names(&["mine"]).await;
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_at_a_third_without_polling() {
    let bench = Bench::new();
    let _a = bench.announce("a/0");
    bench.wait_for_names(&["a/0"]).await;
    let ranges = bench.etcd.calls("/v3/kv/range").len();
    sleep(30 * TTL).await;
    let kept = bench.etcd.calls("/v3/lease/keepalive");
    for pair in kept.windows(2) {
        let pause = pair[1].at - pair[0].at;
        assert!(pause >= TTL / 3 && pause < TTL / 3 + Duration::from_millis(50), "{pause:?}");
    }
    assert!((85..=90).contains(&kept.len()), "{}", kept.len());
    // Each time the announcer looks whether its entry is there. The reader asks nothing.
    assert_eq!(bench.etcd.calls("/v3/kv/range").len(), ranges + kept.len());
    assert_eq!(bench.etcd.calls("/v3/watch").len(), 1);
    assert_eq!(bench.etcd.calls("/v3/kv/put").len(), 1);
    bench.wait_for_names(&["a/0"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_ended_is_granted_anew() {
    let bench = Bench::new();
    let _a = bench.announce("a/0");
    bench.wait_for_names(&["a/0"]).await;
    for _ in 0..3 {
        bench.etcd.revoke_all();
        bench.wait_for_names(&[]).await;
        bench.wait_for_names(&["a/0"]).await;
    }
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn an_entry_that_somebody_deleted_comes_back() {
    let bench = Bench::new();
    let _a = bench.announce("a/0");
    bench.wait_for_names(&["a/0"]).await;
    bench.etcd.delete(&key("a/0"));
    bench.wait_for_names(&[]).await;
    bench.wait_for_names(&["a/0"]).await;
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn a_restarted_worker_takes_the_place_of_the_old() {
    let bench = Bench::new();
    let old = bench.announce_at("a/0", "node-1:1");
    bench.wait_for_names(&["a/0"]).await;
    let new = bench.announce_at("a/0", "node-1:2");
    bench.wait_for(|list| list.get("a/0") == Some("node-1:2")).await;
    // The old one, which hangs or has the same name by mistake, does not take it back.
    sleep(3 * TTL).await;
    assert_eq!(bench.watch.peers().borrow().get("a/0"), Some("node-1:2"));
    new.withdraw().await;
    bench.wait_for(|list| list.get("a/0") == Some("node-1:1")).await;
    old.withdraw().await;
    bench.wait_for_names(&[]).await;
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn while_etcd_is_away_the_list_stays() {
    let garbage = Fault::Says(200, "<html>".into());
    let refusal = Fault::Says(503, r#"{"error": "etcdserver: no leader", "code": 14}"#.into());
    let huge = Fault::Says(200, "x".repeat(3 << 20));
    let empty = Fault::Says(200, "{}".into());
    for (what, fault) in [
        ("away", Fault::Away),
        ("silent", Fault::Silent),
        ("garbage", garbage),
        ("refusal", refusal),
        ("huge", huge),
        ("empty", empty),
    ] {
        let bench = Bench::new();
        let _a = bench.announce("a/0");
        bench.wait_for_names(&["a/0"]).await;
        let healthy = bench.etcd.all_calls();
        bench.etcd.cut_watches("");
        for member in [A, B] {
            bench.etcd.set_fault(member, Some(fault.clone()));
        }
        sleep(5 * TTL).await;
        assert_eq!(bench.names(), ["a/0"], "{what}");
        let calls = bench.etcd.all_calls() - healthy;
        assert!((10..120).contains(&calls), "{calls} calls in 50 s: {what}");
        for member in [A, B] {
            bench.etcd.set_fault(member, None);
        }
        bench.wait_for_names(&["a/0"]).await;
        bench.assert_heals().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_etcd_that_is_away_at_first_is_found_later() {
    let etcd = FakeEtcd::default();
    for member in [A, B] {
        etcd.set_fault(member, Some(Fault::Away));
    }
    let bench = Bench::with(EtcdSource::new(vec![A.into(), B.into()], "prod"), etcd);
    let _a = bench.announce("a/0");
    sleep(TTL).await;
    bench.etcd.set_fault(B, None);
    bench.wait_for_names(&["a/0"]).await;
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn an_etcd_that_lost_its_data_hears_of_all_again() {
    let bench = Bench::new();
    let _workers = ["a/0", "b/0"].map(|name| bench.announce(name));
    bench.wait_for_names(&["a/0", "b/0"]).await;
    for member in [A, B] {
        bench.etcd.set_fault(member, Some(Fault::Away));
    }
    sleep(TTL / 2).await;
    assert_eq!(bench.names(), ["a/0", "b/0"]);
    bench.etcd.lose_everything();
    for member in [A, B] {
        bench.etcd.set_fault(member, None);
    }
    sleep(TTL).await;
    assert_eq!(bench.names(), ["a/0", "b/0"]);
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn members_are_tried_in_turn() {
    let bench = Bench::new();
    let _a = bench.announce("a/0");
    bench.wait_for_names(&["a/0"]).await;
    for (dead, well) in [(A, B), (B, A), (A, B)] {
        bench.etcd.set_fault(dead, Some(Fault::Away));
        // Well before the lease of the one that was announced ends.
        let began = Instant::now();
        bench.etcd.put(&key("b/0"), GOOD);
        bench.wait_for_names(&["a/0", "b/0"]).await;
        assert!(began.elapsed() < TTL / 2, "{:?}", began.elapsed());
        sleep(2 * TTL).await;
        assert_eq!(bench.names(), ["a/0", "b/0"]);
        assert_eq!(bench.etcd.calls("/v3/lease/keepalive").last().unwrap().member, well);
        bench.etcd.set_fault(dead, None);
        bench.etcd.delete(&key("b/0"));
        bench.wait_for_names(&["a/0"]).await;
    }
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn a_member_that_hangs_costs_no_lease() {
    let bench = Bench::new();
    let _a = bench.announce("a/0");
    bench.wait_for_names(&["a/0"]).await;
    bench.etcd.set_fault(A, Some(Fault::Silent));
    sleep(5 * TTL).await;
    assert_eq!(bench.etcd.calls("/v3/lease/grant").len(), 1);
    // The watch hangs with it. etcd promised a sign of life every ten minutes.
    bench.etcd.put(&key("b/0"), GOOD);
    sleep(Duration::from_mins(12)).await;
    assert_eq!(bench.names(), ["a/0", "b/0"]);
    bench.etcd.set_fault(A, None);
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_breaks_is_begun_anew() {
    let bench = Bench::new();
    bench.etcd.put(&key("a"), GOOD);
    bench.wait_for_names(&["a"]).await;
    let huge = "x".repeat(3 << 20);
    for last_words in [
        "",
        "{\"result\":{\"hea",
        "<html>\n",
        "{}\n",
        "null\n",
        "{\"result\":{\"events\":[{}]}}\n",
        "{\"result\":{\"events\":[{\"kv\":{\"key\":\"***\"}}]}}\n",
        "{\"error\":{\"grpc_code\":14,\"message\":\"etcdserver: no leader\"}}\n",
        "{\"result\":{\"canceled\":true,\"cancel_reason\":\"etcdserver: permission denied\"}}\n",
        "{\"result\":{\"canceled\":true,\"compact_revision\":\"7\"}}\n",
        &huge,
    ] {
        bench.etcd.cut_watches(last_words);
        // While no client watches.
        bench.etcd.put(&key("b"), GOOD);
        bench.etcd.delete(&key("a"));
        bench.wait_for_names(&["b"]).await;
        bench.etcd.put(&key("a"), GOOD);
        bench.etcd.delete(&key("b"));
        bench.wait_for_names(&["a"]).await;
    }
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn what_was_compacted_is_read_again() {
    let bench = Bench::new();
    bench.etcd.put(&key("a"), GOOD);
    bench.wait_for_names(&["a"]).await;
    // Each time the list is read, more happens and is compacted before the watch begins.
    bench.etcd.cut_watches("");
    let reads = bench.etcd.calls("/v3/kv/range").len();
    while bench.etcd.calls("/v3/kv/range").len() == reads {
        sleep(Duration::from_millis(1)).await;
    }
    bench.etcd.put(&key("b"), GOOD);
    bench.etcd.put(&key("c"), GOOD);
    bench.etcd.compact();
    bench.wait_for_names(&["a", "b", "c"]).await;
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn bad_entries_cost_no_other() {
    let bench = Bench::new();
    let huge = "x".repeat(2 << 20);
    for (name, value) in [
        ("a", GOOD),
        ("b", "{}"),
        ("c", huge.as_str()),
        ("d", GOOD),
        ("e e", GOOD),
        ("f", r#"{"address": 7}"#),
        ("g", GOOD),
    ] {
        bench.etcd.put(&key(name), value);
    }
    bench.wait_for_names(&["a", "d", "g"]).await;
    // As changes, and when it is all read again.
    bench.etcd.put(&key("d"), "not any more");
    bench.etcd.put(&key("b"), GOOD);
    bench.wait_for_names(&["a", "b", "g"]).await;
    bench.etcd.put(&key("g"), &huge);
    bench.wait_for_names(&["a", "b"]).await;
    bench.etcd.put(&key("g"), GOOD);
    bench.etcd.delete(&key("c"));
    bench.wait_for_names(&["a", "b", "g"]).await;
    bench.assert_heals().await;
}

#[tokio::test(start_paused = true)]
async fn many_peers_are_read_in_pages() {
    let bench = Bench::new();
    for place in 0..1_000 {
        bench.etcd.put(&key(&format!("worker/{place}")), GOOD);
    }
    bench.wait_for(|list| list.len() == 1_000).await;
    assert_eq!(bench.etcd.calls("/v3/kv/range").len(), 4);
    for place in 1_000..5_000 {
        bench.etcd.put(&key(&format!("worker/{place}")), GOOD);
    }
    bench.wait_for(|list| list.len() == 4_096).await;
    for place in 100..5_000 {
        bench.etcd.delete(&key(&format!("worker/{place}")));
    }
    bench.etcd.cut_watches("");
    bench.wait_for(|list| list.len() == 100).await;
    bench.assert_heals().await;
}

fn with_user(password: &str) -> EtcdSource {
    let user = Some(EtcdUser { name: "kvbm".into(), password: password.into() });
    EtcdSource { user, ..EtcdSource::new(vec![A.into()], "prod") }
}

#[tokio::test(start_paused = true)]
async fn a_user_proves_who_it_is_and_does_so_again() {
    let etcd = FakeEtcd::default();
    etcd.ask_for_user("kvbm", "s3cret");
    let bench = Bench::with(with_user("s3cret"), etcd);
    let _a = bench.announce("a/0");
    bench.wait_for_names(&["a/0"]).await;
    assert_eq!(bench.etcd.calls("/v3/auth/authenticate").len(), 2);
    bench.etcd.end_tokens();
    bench.etcd.cut_watches("");
    bench.assert_heals().await;
    bench.wait_for_names(&["a/0"]).await;
}

/// The text of the first failure.
async fn failure(source: &EtcdSource, etcd: &FakeEtcd) -> String {
    let mut gateway = Gateway::new(source, etcd.clone()).unwrap();
    let asked: Result<RangeAnswer, EtcdFailure> =
        gateway.ask("/v3/kv/range", &RangeRequest::default()).await;
    let failure = asked.unwrap_err();
    format!("{failure} {failure:?}")
}

#[tokio::test(start_paused = true)]
async fn a_failure_names_the_member_and_no_secret() {
    let etcd = FakeEtcd::default();
    etcd.ask_for_user("kvbm", "other");
    let source = with_user("s3cret");
    let wrong = failure(&source, &etcd).await;
    assert!(wrong.contains(A) && wrong.contains("kvbm"), "{wrong}");
    // A server that repeats what it was sent.
    for (status, body) in [
        (400, r#"{"error": "name kvbm, password s3cret"}"#),
        (200, r#"{"error": "s3cret"}"#),
        (200, "s3cret"),
    ] {
        etcd.set_fault(A, Some(Fault::Says(status, body.into())));
        let repeated = failure(&source, &etcd).await;
        assert!(repeated.contains(A) && !repeated.contains("s3cret"), "{repeated}");
    }
    for text in [format!("{source:?}"), format!("{:?}", PeerSource::Etcd(source))] {
        assert!(text.contains("kvbm") && !text.contains("s3cret"), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_says_what_etcd_says() {
    let etcd = FakeEtcd::default();
    let source = EtcdSource::new(vec![A.into()], "prod");
    for (body, said) in [
        (r#"{"error": "etcdserver: permission denied", "code": 7}"#, "permission denied"),
        (r#"{"code": 7, "message": "etcdserver: permission denied"}"#, "permission denied"),
        (r#"{"error": {"message": "no \n leader"}}"#, "no \\n leader"),
        ("<html>", "status 503"),
    ] {
        etcd.set_fault(A, Some(Fault::Says(503, body.into())));
        let text = failure(&source, &etcd).await;
        assert!(text.contains(said), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_stops_soon_whatever_etcd_does() {
    for fault in [Fault::Away, Fault::Silent] {
        let bench = Bench::new();
        let a = bench.announce("a/0");
        bench.wait_for_names(&["a/0"]).await;
        for member in [A, B] {
            bench.etcd.set_fault(member, Some(fault.clone()));
        }
        let began = Instant::now();
        a.withdraw().await;
        assert!(began.elapsed() <= Duration::from_millis(2_050), "{:?}", began.elapsed());
        // Its lease ends anyway.
        for member in [A, B] {
            bench.etcd.set_fault(member, None);
        }
        bench.wait_for_names(&[]).await;
        bench.assert_heals().await;
    }
}

#[tokio::test(start_paused = true)]
async fn tasks_end_with_their_handles() {
    let bench = Bench::new();
    let a = bench.announce("a/0");
    bench.wait_for_names(&["a/0"]).await;
    let mut peers = bench.watch.peers();
    let Bench { etcd, watch, .. } = bench;
    drop((a, watch));
    while peers.changed().await.is_ok() {}
    sleep(TTL).await;
    let calls = etcd.all_calls();
    sleep(100 * TTL).await;
    assert_eq!((etcd.all_calls(), etcd.keys()), (calls, vec![]));
}

#[tokio::test]
async fn settings_that_cannot_work_are_errors() {
    let good = EtcdSource::new(vec![A.into()], "prod");
    let runtime = tokio::runtime::Handle::current();
    let own = PeerAddress::new("a/0", "node-1:80").unwrap();
    let endpoints =
        |endpoint: &str| EtcdSource { endpoints: vec![endpoint.into()], ..good.clone() };
    let namespace = |namespace: &str| EtcdSource { namespace: namespace.into(), ..good.clone() };
    let ttl = |ttl| EtcdSource { ttl, ..good.clone() };
    for (source, part) in [
        (EtcdSource { endpoints: vec![], ..good.clone() }, "endpoint"),
        (endpoints("127.0.0.1:2379"), "endpoint 1"),
        (endpoints("localhost:2379"), "endpoint 1"),
        (endpoints("http://root:s3cret@a:2379"), "endpoint 1"),
        (endpoints("http://a:2379/v3"), "endpoint 1"),
        (namespace(""), "namespace"),
        (namespace("a/peers/b"), "a/peers/b"),
        (ttl(Duration::from_secs(1)), "2 s to 1 h"),
        (ttl(Duration::from_hours(2)), "2 s to 1 h"),
    ] {
        let source = PeerSource::Etcd(source);
        let errors =
            [source.watch(&runtime).unwrap_err(), source.announce(&own, &runtime).unwrap_err()];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let text = error.to_string();
            assert!(text.contains(part) && !text.contains("s3cret"), "{text}");
        }
    }
}
