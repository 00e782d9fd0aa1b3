//! The real etcd, where it is installed: what `fake` says of it is what it does.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::testing::skip;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::peers::discovery::etcd::gateway::{EtcdFailure, Gateway};
use crate::peers::discovery::etcd::http::Http;
use crate::peers::discovery::etcd::messages::{
    Base64, Int64, WatchAnswer, WatchCreation, WatchRequest,
};
use crate::peers::discovery::{
    EtcdSource, EtcdTls, EtcdUser, PeerAddress, PeerAnnouncement, PeerList, PeerSource, PeerWatch,
};
use crate::peers::tls::tests::Ca;

const LATE: Duration = Duration::from_mins(1);
const TTL: Duration = Duration::from_secs(2);

/// An etcd of one member, which ends with the test.
struct Etcd {
    child: Option<Child>,
    data: TempDir,
    client: String,
    peer: String,
    /// It asks for certificates, and shows one.
    tls: Option<EtcdTls>,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Etcd {
    /// `None`: it is not installed. Where `KVBM_REQUIRE` names `etcd` that is a failure.
    async fn start() -> Option<Self> {
        Self::start_with(None, "http").await
    }

    async fn start_with(tls: Option<EtcdTls>, scheme: &str) -> Option<Self> {
        let [client, peer] = free_urls();
        let mut etcd = Self {
            child: None,
            data: tempfile::tempdir().unwrap(),
            client: client.replace("http", scheme),
            peer,
            tls,
        };
        if let Err(error) = etcd.run() {
            skip("etcd", &format!("{error}; apt-get install etcd-server"));
            return None;
        }
        etcd.answers().await;
        Some(etcd)
    }

    fn run(&mut self) -> std::io::Result<()> {
        let mut command = Command::new("etcd");
        if let Some(tls) = &self.tls {
            // It takes the certificate and the key from one file.
            let path = |name: &str| self.data.path().join(name);
            std::fs::write(path("ca.pem"), &tls.ca)?;
            std::fs::write(path("own.pem"), &tls.identity)?;
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(path("ca.pem"));
            command.arg("--cert-file").arg(path("own.pem")).arg("--key-file").arg(path("own.pem"));
        }
        let child = command
            .arg("--data-dir")
            .arg(self.data.path())
            .args(["--listen-client-urls", &self.client, "--advertise-client-urls", &self.client])
            .args(["--listen-peer-urls", &self.peer, "--initial-advertise-peer-urls", &self.peer])
            .args(["--initial-cluster", &format!("default={}", self.peer)])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        self.child = Some(child);
        Ok(())
    }

    async fn answers(&self) {
        let answers = async {
            while self.ask("/v3/kv/range", json!({"key": "eA=="})).await.is_err() {
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(LATE, answers).await.expect("etcd does not answer");
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn signal(&self, signal: &str) {
        let id = self.child.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    async fn start_again(&mut self) {
        self.run().unwrap();
        self.answers().await;
    }

    fn source(&self) -> EtcdSource {
        let tls = self.tls.clone();
        EtcdSource { ttl: TTL, tls, ..EtcdSource::new(vec![self.client.clone()], "prod") }
    }

    async fn ask(&self, path: &str, request: Value) -> Result<Value, EtcdFailure> {
        gateway(&self.source()).ask(path, &request).await
    }

    async fn put(&self, name: &str, value: &str) {
        let key = Base64::from(format!("kvbm/prod/peers/{name}").as_str());
        self.ask("/v3/kv/put", json!({"key": key, "value": Base64::from(value)})).await.unwrap();
    }
}

fn gateway(source: &EtcdSource) -> Gateway<Http> {
    Gateway::new(source, Http::new(source.tls.as_ref()).unwrap()).unwrap()
}

/// Two, since one that is free again may be the next.
fn free_urls() -> [String; 2] {
    let sockets = [(), ()].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    sockets.map(|socket| format!("http://{}", socket.local_addr().unwrap()))
}

fn watched(source: &EtcdSource) -> PeerWatch {
    PeerSource::Etcd(source.clone()).watch(&Handle::current()).unwrap()
}

fn announced(source: &EtcdSource, name: &str) -> PeerAnnouncement {
    let own = PeerAddress::new(name, "node-1:80").unwrap();
    PeerSource::Etcd(source.clone()).announce(&own, &Handle::current()).unwrap().unwrap()
}

type Peers = watch::Receiver<Arc<PeerList>>;

async fn wait_for(peers: &mut Peers, names: &[&str]) {
    let are = |list: &PeerList| list.iter().map(|(name, _)| name).eq(names.iter().copied());
    let waited = timeout(LATE, peers.wait_for(|list| are(list))).await.map(drop);
    waited.unwrap_or_else(|_| panic!("the list stays {:?}", peers.borrow()));
}

/// Everything works: a worker comes, stays, and goes.
async fn assert_works(source: &EtcdSource, peers: &mut Peers, others: &[&str]) {
    let all = [others, &["z/0"]].concat();
    let z = announced(source, "z/0");
    wait_for(peers, &all).await;
    sleep(2 * TTL).await;
    wait_for(peers, &all).await;
    z.withdraw().await;
    wait_for(peers, others).await;
}

#[tokio::test]
async fn a_real_etcd_is_killed_frozen_and_emptied() {
    let Some(mut etcd) = Etcd::start().await else { return };
    let source = etcd.source();
    let watch = watched(&source);
    let mut peers = watch.peers();
    assert_works(&source, &mut peers, &[]).await;
    let _a = announced(&source, "a/0");
    wait_for(&mut peers, &["a/0"]).await;

    etcd.kill();
    sleep(TTL).await;
    wait_for(&mut peers, &["a/0"]).await;
    etcd.start_again().await;
    assert_works(&source, &mut peers, &["a/0"]).await;

    etcd.signal("-STOP");
    sleep(2 * TTL).await;
    etcd.signal("-CONT");
    wait_for(&mut peers, &["a/0"]).await;
    assert_works(&source, &mut peers, &["a/0"]).await;

    etcd.kill();
    etcd.data = tempfile::tempdir().unwrap();
    etcd.start_again().await;
    assert_works(&source, &mut peers, &["a/0"]).await;
}

#[tokio::test]
async fn a_real_etcd_has_bad_entries_and_compactions() {
    let Some(etcd) = Etcd::start().await else { return };
    let source = etcd.source();
    let watch = watched(&source);
    let mut peers = watch.peers();
    let good = r#"{"address": "node-9:80"}"#;
    etcd.put("a", good).await;
    etcd.put("b", &"x".repeat(1_100_000)).await;
    etcd.put("c", "no JSON").await;
    etcd.put("d", good).await;
    wait_for(&mut peers, &["a", "d"]).await;
    assert_works(&source, &mut peers, &["a", "d"]).await;

    let newest = etcd.ask("/v3/kv/range", json!({"key": "eA=="})).await.unwrap();
    let revision = &newest["header"]["revision"];
    etcd.ask("/v3/kv/compaction", json!({"revision": revision})).await.unwrap();
    let create_request = WatchCreation {
        key: "kvbm/".into(),
        range_end: "kvbm0".into(),
        start_revision: Int64(1),
        progress_notify: true,
    };
    let mut asking = gateway(&source);
    let mut changes = asking.listen("/v3/watch", &WatchRequest { create_request }).await.unwrap();
    let mut answer = WatchAnswer::default();
    while !answer.canceled {
        answer = changes.next(LATE).await.unwrap();
    }
    assert!(answer.compact_revision > Int64(1), "{answer:?}");
    assert_works(&source, &mut peers, &["a", "d"]).await;
}

#[tokio::test]
async fn a_real_etcd_asks_for_a_user() {
    let Some(etcd) = Etcd::start().await else { return };
    let rights = json!({"permType": "READWRITE", "key": Base64::from("kvbm/prod/peers/"),
        "range_end": Base64::from("kvbm/prod/peers0")});
    for (path, request) in [
        ("/v3/auth/user/add", json!({"name": "root", "password": "r00t"})),
        ("/v3/auth/user/grant", json!({"user": "root", "role": "root"})),
        ("/v3/auth/role/add", json!({"name": "peers"})),
        ("/v3/auth/role/grant", json!({"name": "peers", "perm": rights})),
        ("/v3/auth/user/add", json!({"name": "kvbm", "password": "s3cret"})),
        ("/v3/auth/user/grant", json!({"user": "kvbm", "role": "peers"})),
        ("/v3/auth/enable", json!({})),
    ] {
        let done = etcd.ask(path, request).await;
        // Before 3.5 the role root is there only once somebody adds it.
        if let Err(failure) = done {
            assert!(path == "/v3/auth/user/grant", "{path}: {failure}");
            etcd.ask("/v3/auth/role/add", json!({"name": "root"})).await.unwrap();
            etcd.ask(path, json!({"user": "root", "role": "root"})).await.unwrap();
        }
    }
    let user = |password: &str| {
        let user = Some(EtcdUser { name: "kvbm".into(), password: password.into() });
        EtcdSource { user, ..etcd.source() }
    };
    let source = user("s3cret");
    let watch = watched(&source);
    assert_works(&source, &mut watch.peers(), &[]).await;

    let range = json!({"key": Base64::from("kvbm/prod/peers/")});
    for (source, said) in
        [(etcd.source(), "user name is empty"), (user("wrong"), "does not take \"kvbm\"")]
    {
        let asked = gateway(&source).ask::<Value>("/v3/kv/range", &range).await;
        let text = asked.unwrap_err().to_string();
        assert!(text.contains(said) && text.contains(&etcd.client), "{text}");
    }
}

#[tokio::test]
async fn a_real_etcd_asks_for_a_certificate() {
    let ca = Ca::new("a");
    let Some(etcd) = Etcd::start_with(Some(ca.etcd()), "https").await else { return };
    let source = etcd.source();
    let watch = watched(&source);
    assert_works(&source, &mut watch.peers(), &[]).await;

    let range = json!({"key": Base64::from("kvbm/prod/peers/")});
    for (tls, said) in [(None, "UnknownIssuer"), (Some(Ca::new("b").etcd()), "UnknownIssuer")] {
        let source = EtcdSource { tls, ..etcd.source() };
        let asked = gateway(&source).ask::<Value>("/v3/kv/range", &range).await;
        let text = asked.unwrap_err().to_string();
        assert!(text.contains(said) && text.contains(&etcd.client), "{text}");
    }
}
