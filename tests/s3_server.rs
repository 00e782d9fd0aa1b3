//! The object tier against a server of the S3 protocol that others wrote: moto's, where it is
//! installed (`pip install 'moto[server]'`). The double in `tiers/src/object/tests/server.rs` says
//! what we think of the protocol.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvbm::Manager;
use kvbm_settings::{OlderEpoch, Settings};
use kvbm_tests::bucket::{ALL, CHAINS, fill, known, serve};
use kvbm_tests::engine;
use kvbm_tiers::object::StoreOptions;
use kvbm_tiers::object::fsck::{FsckOptions, fsck};
use kvbm_tiers::testing::skip;

const LIMIT: Duration = Duration::from_mins(1);

/// A server that ends with the test.
struct Moto {
    child: Child,
    endpoint: String,
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Moto {
    /// `None`: it is not installed. Where `KVBM_REQUIRE` names `s3` that is a failure.
    fn start() -> Option<Self> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new("moto_server");
        command
            .args(["-H", "127.0.0.1", "-p", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let Ok(child) = command.spawn() else {
            skip("s3", &"no server of its protocol: pip install 'moto[server]'");
            return None;
        };
        let server = Self { child, endpoint: format!("http://127.0.0.1:{port}") };
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(began.elapsed() < LIMIT, "moto_server does not listen");
            std::thread::sleep(Duration::from_millis(50));
        }
        server.make_bucket(port);
        Some(server)
    }

    /// The one request that the tier never sends.
    fn make_bucket(&self, port: u16) {
        use std::io::{Read, Write};
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let head = format!(
            "PUT /kvbm-test HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(self.endpoint.ends_with(&port.to_string()));
    }

    fn worker(&self) -> Manager {
        let mut settings: Settings = engine::settings(4096, 16, 16);
        settings.object.url = Some("s3://kvbm-test/prefix".to_owned());
        settings.object.endpoint = Some(self.endpoint.clone());
        (settings.object.access_key, settings.object.secret_key) =
            (Some("key".into()), Some("secret".into()));
        settings.object.keep = true;
        (settings.object.renewal_ms, settings.object.discover_ms) = (500, 500);
        settings.object.older_epoch = OlderEpoch::Follow;
        settings.object.segment_bytes = 64 << 10;
        settings.flush.interval_ms = 1;
        engine::open_with(settings, engine::model(engine::fingerprint("one"))).unwrap()
    }
}

#[test]
fn workers_share_a_bucket_of_a_real_server() {
    let Some(server) = Moto::start() else { return };
    let (first, second) = (server.worker(), server.worker());
    fill(&first, 0..CHAINS);
    let began = Instant::now();
    while known(&second) < ALL {
        assert!(began.elapsed() < LIMIT, "{} of {ALL} found by the one that lived", known(&second));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(serve(&second), ALL);
    assert_eq!(serve(&server.worker()), ALL, "and by one that starts");
    let store = StoreOptions {
        endpoint: Some(server.endpoint.clone()),
        region: None,
        access_key: Some("key".into()),
        secret_key: Some("secret".into()),
    };
    let (renewal, collect_after) = (Duration::from_millis(500), Duration::from_hours(1));
    let options = FsckOptions { concurrency: 4, repair: true, renewal, collect_after, keys: None };
    let report =
        fsck("s3://kvbm-test/prefix", &store, &options, std::sync::Arc::new(|_, _| {})).unwrap();
    assert!(report.is_sound() && report.is_complete() && report.removed() == 0, "{report:?}");
    assert_eq!(report.namespaces[0].blocks as usize, ALL);
    assert_eq!((first.admin().audit(), second.admin().audit()), (vec![], vec![]));
    // Epochs are conditional puts: the second announcement finds the first.
    first.reset(5).unwrap();
    second.reset(5).unwrap();
    assert_eq!((known(&first), server.worker().admin().epoch()), (0, 5));
}
