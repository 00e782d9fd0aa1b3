//! Two workers over real sockets, whose certificates are as they should be or not.

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;

use kvbm_settings::{Capacity, Settings};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair,
    date_time_ymd,
};
use rustls::SupportedProtocolVersion;
use rustls::version::TLS12;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::*;
use crate::api::blocking::Blocks;
use crate::api::manager::Options;
use crate::metrics::PeerRefusal;
use crate::names::hash::BlockHash;
use crate::peers::discovery::EtcdTls;
use crate::peers::greeting::tests::member;
use crate::peers::greeting::{Credentials, PeerProofs, PeerSecret, look};
use crate::peers::holder::{LeasedBlocks, MAX_GREETING, welcome};
use crate::peers::protocol::Member;
use crate::peers::stream::{accept, connect};
use crate::peers::tests::Worker;
use crate::table::RequestInfo;

const HOST: &str = "127.0.0.1";

/// Signs certificates.
pub(in crate::peers) struct Ca(CertifiedIssuer<'static, KeyPair>);

impl Ca {
    pub(in crate::peers) fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn certificate(&self) -> CertificateDer<'static> {
        self.0.as_ref().der().clone()
    }

    /// A worker's certificate for a host, and its key.
    fn signed(&self, host: &str, last_year: i32) -> (Certificate, KeyPair) {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.not_before = date_time_ymd(2001, 1, 1);
        params.not_after = date_time_ymd(last_year, 1, 1);
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap(), key)
    }

    fn sign(&self, host: &str, last_year: i32) -> TlsFiles {
        let (certificate, key) = self.signed(host, last_year);
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        TlsFiles { chain: vec![certificate.der().clone()], key, ca: vec![self.certificate()] }
    }

    fn worker(&self) -> TlsFiles {
        self.sign(HOST, 4000)
    }

    /// What etcd and a worker show each other.
    pub(in crate::peers) fn etcd(&self) -> EtcdTls {
        let (certificate, key) = self.signed(HOST, 4000);
        let identity = [certificate.pem(), key.serialize_pem()].concat();
        EtcdTls { ca: self.0.as_ref().pem(), identity }
    }
}

fn proofs(files: TlsFiles) -> PeerProofs {
    PeerProofs { secret: None, tls: Some(PeerTls::new(files).unwrap()) }
}

fn with_secret(secret: &str, files: TlsFiles) -> PeerProofs {
    PeerProofs { secret: Some(PeerSecret::new(secret)), ..proofs(files) }
}

async fn listening() -> (TcpListener, String) {
    let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = socket.local_addr().unwrap().to_string();
    (socket, address)
}

/// What a holder says of the first that connects.
async fn hold(socket: TcpListener, proofs: PeerProofs) -> Result<(), BrokenLink> {
    let credentials = Credentials { member: member("holder", 1), proofs, converts_types: false };
    let (stream, _) = socket.accept().await.unwrap();
    let stream = accept(stream, credentials.proofs.tls.as_ref()).await?;
    welcome(stream, &credentials).await.map(drop)
}

async fn read(address: &str, proofs: PeerProofs) -> Result<Member, BrokenLink> {
    let credentials = Credentials { member: member("reader", 2), proofs, converts_types: false };
    let mut stream = connect(address, &credentials.proofs).await?;
    credentials.greet(&mut stream).await
}

/// What reader and holder say of each other; nothing where they meet.
async fn meet(reader: PeerProofs, holder: PeerProofs) -> [String; 2] {
    let (socket, address) = listening().await;
    let (read, held) = tokio::join!(read(&address, reader), hold(socket, holder));
    let said = |met: Result<(), BrokenLink>| met.err().map_or(String::new(), |why| why.to_string());
    [said(read.map(drop)), said(held)]
}

#[track_caller]
fn assert_says(said: &[String; 2], expected: [&str; 2]) {
    let fits =
        |(said, part): (&String, &str)| said.contains(part) && said.is_empty() == part.is_empty();
    assert!(said.iter().zip(expected).all(fits), "{said:#?}, not {expected:#?}");
}

#[tokio::test]
async fn workers_with_certificates_of_one_ca_meet() {
    let ca = Ca::new("a");
    assert_says(&meet(proofs(ca.worker()), proofs(ca.worker())).await, ["", ""]);
    let (socket, address) = listening().await;
    let looking = proofs(ca.worker());
    let look = async {
        let mut stream = connect(&address, &looking).await?;
        look(&mut stream, None).await
    };
    let (seen, held) = tokio::join!(look, hold(socket, proofs(ca.worker())));
    assert_eq!((seen.unwrap().name.as_str(), held.is_ok()), ("holder", true));
}

#[tokio::test]
async fn certificates_of_another_ca_are_refused() {
    let (ours, theirs) = (Ca::new("a"), Ca::new("b"));
    let said = meet(proofs(theirs.worker()), proofs(ours.worker())).await;
    assert_says(&said, ["another CA signed", "refuses our certificate"]);
    // It takes the holder for one of its own.
    let stranger = TlsFiles { ca: vec![ours.certificate()], ..theirs.worker() };
    let said = meet(proofs(stranger), proofs(ours.worker())).await;
    assert_says(&said, ["did not sign it", "another CA signed"]);
}

#[tokio::test]
async fn expired_certificates_are_refused() {
    let ca = Ca::new("a");
    let said = meet(proofs(ca.sign(HOST, 2002)), proofs(ca.worker())).await;
    assert_says(&said, ["it has expired", "have the CA sign another"]);
    let said = meet(proofs(ca.worker()), proofs(ca.sign(HOST, 2002))).await;
    assert_says(&said, ["have the CA sign another", "it has expired"]);
}

#[tokio::test]
async fn holders_need_the_dialled_name_and_readers_any() {
    let ca = Ca::new("a");
    let elsewhere = || proofs(ca.sign("node-9", 4000));
    assert_says(&meet(elsewhere(), proofs(ca.worker())).await, ["", ""]);
    let said = meet(proofs(ca.worker()), elsewhere()).await;
    assert_says(&said, ["subjectAltName", "does not name this worker's host"]);
    assert!(said[0].contains("node-9"), "{said:?}");
}

#[tokio::test]
async fn who_speaks_no_tls_and_who_does_hear_of_it() {
    let ca = Ca::new("a");
    let plain = PeerProofs::default;
    assert_says(&meet(plain(), proofs(ca.worker())).await, [ONE_SIDED; 2]);
    assert_says(&meet(proofs(ca.worker()), plain()).await, [ONE_SIDED; 2]);
}

#[tokio::test]
async fn a_secret_counts_beside_certificates() {
    let ca = Ca::new("a");
    let [ours, other] = ["0123456789abcdef", "another secret 1"];
    let of = |secret: &str| with_secret(secret, ca.worker());
    assert_says(&meet(of(ours), of(ours)).await, ["", ""]);
    for reader in [of(other), proofs(ca.worker())] {
        let said = meet(reader, of(ours)).await;
        assert!(said.iter().any(|said| said.contains("do not know the same secret")), "{said:?}");
    }
}

/// A TLS client that is none of ours.
async fn stranger(files: TlsFiles, version: &'static SupportedProtocolVersion) -> String {
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(files.roots().unwrap())
        .with_no_client_auth();
    let (socket, address) = listening().await;
    let client = async {
        let stream = TcpStream::connect(&address).await.unwrap();
        let name = ServerName::try_from(HOST).unwrap();
        let connected = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
        let Ok(mut stream) = connected else { return };
        assert!(stream.read_u8().await.is_err(), "it is let in");
    };
    let (held, ()) = tokio::join!(hold(socket, proofs(files)), client);
    let why = held.unwrap_err();
    assert_eq!(PeerRefusal::from(&why), PeerRefusal::Tls);
    why.to_string()
}

#[tokio::test]
async fn no_certificate_or_an_old_version_is_refused() {
    let ca = Ca::new("a");
    let said = stranger(ca.worker(), &TLS13).await;
    assert!(said.contains("shows no certificate"), "{said}");
    let said = stranger(ca.worker(), &TLS12).await;
    assert!(said.contains("TLS failed"), "{said}");
}

#[tokio::test(start_paused = true)]
async fn a_client_silent_amid_tls_is_let_go() {
    let tls = PeerTls::new(Ca::new("a").worker()).unwrap();
    let holder = Worker::new("there", 1).await.holder(&Arc::new(LeasedBlocks::new(1)));
    let (socket, address) = listening().await;
    let mut silent = TcpStream::connect(&address).await.unwrap();
    silent.write_all(&[22, 3, 1]).await.unwrap();
    let (stream, _) = socket.accept().await.unwrap();
    let started = Instant::now();
    holder.serve(accept(stream, Some(&tls)), || panic!("it is let in")).await;
    assert_eq!(started.elapsed().as_secs(), MAX_GREETING.as_secs());
    assert_eq!(silent.read(&mut [0]).await.unwrap_or(0), 0, "the connection is closed");
}

/// Files as settings name them.
struct Place(TempDir);

impl Place {
    fn new(ca: &Ca, signed: &(Certificate, KeyPair)) -> Self {
        let (certificate, key) = signed;
        let place = Self(tempfile::tempdir().unwrap());
        place.write("ca.pem", &ca.0.as_ref().pem());
        place.write("own.pem", &certificate.pem());
        place.write("own.key", &key.serialize_pem());
        place
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
        fs::set_permissions(self.path(name), Permissions::from_mode(0o600)).unwrap();
    }

    fn settings(&self) -> PeerSettings {
        let [certificate, key, ca] = ["own.pem", "own.key", "ca.pem"].map(|name| self.path(name));
        PeerSettings {
            tls_certificate: Some(certificate),
            tls_key: Some(key),
            tls_ca: Some(ca),
            ..PeerSettings::default()
        }
    }

    fn open(&self) -> Result<PeerTls> {
        PeerTls::of(&self.settings()).map(|tls| tls.expect("all are named"))
    }

    #[track_caller]
    fn assert_refused(&self, part: &str) {
        let error = self.open().unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("peers.tls_"), "{error}, not {part}");
    }
}

#[test]
fn files_that_others_would_refuse_are_refused_at_the_start() {
    let (ca, other) = (Ca::new("a"), Ca::new("b"));
    let place = Place::new(&ca, &ca.signed(HOST, 4000));
    place.open().unwrap();
    place.write("own.key", &KeyPair::generate().unwrap().serialize_pem());
    place.assert_refused("KeyMismatch");
    Place::new(&ca, &ca.signed(HOST, 2002)).assert_refused("expired");
    Place::new(&ca, &other.signed(HOST, 4000)).assert_refused("another CA");
}

#[test]
fn files_that_hold_something_else_are_named() {
    let ca = Ca::new("a");
    for (name, what) in
        [("own.pem", "certificate"), ("own.key", "private key"), ("ca.pem", "certificate")]
    {
        let place = Place::new(&ca, &ca.signed(HOST, 4000));
        for text in ["", "no PEM", "-----BEGIN CERTIFICATE-----\n!"] {
            place.write(name, text);
            place.assert_refused(&format!("{name} (peers.tls_"));
            place.assert_refused(&format!("holds no {what}"));
        }
        fs::remove_file(place.path(name)).unwrap();
        place.assert_refused("cannot read");
    }
}

#[test]
fn a_key_that_others_can_read_is_refused() {
    let ca = Ca::new("a");
    let place = Place::new(&ca, &ca.signed(HOST, 4000));
    fs::set_permissions(place.path("own.key"), Permissions::from_mode(0o640)).unwrap();
    place.assert_refused("mode 0640");
}

fn worker(peers: PeerSettings) -> Blocks {
    let mut settings = Settings { block_bytes: Some(64 << 10), ..Settings::default() };
    settings.host.capacity = Some(Capacity::Blocks(16));
    settings.host.huge_pages = false;
    settings.peers = PeerSettings {
        enabled: true,
        port: 0,
        shared_memory: false,
        lease_share: 1.0,
        lease_ttl_ms: 60_000,
        ..peers
    };
    let fingerprint = Some(member("", 0).fingerprint);
    Blocks::open(settings, Options { fingerprint, ..Options::default() }).unwrap()
}

#[test]
fn blocks_come_over_tls_and_over_nothing_else() {
    let ca = Ca::new("a");
    let place = Place::new(&ca, &ca.signed(HOST, 4000));
    let there = worker(place.settings());
    let chain: Vec<_> = (1..=12).map(BlockHash::from_u128).collect();
    let fill = |at: usize, slot: &mut [u8]| {
        slot.fill(at as u8 + 1);
        Ok::<_, Error>(())
    };
    assert_eq!(there.put(&chain, fill).unwrap(), 12);

    let address = there.manager().peers().unwrap().address().to_string();
    let (name, addresses) = (address.replace(':', "/"), Some(address));
    let lease = |here: &Blocks| {
        here.manager().peers().unwrap().lease(&name, &chain, RequestInfo::default()).wait()
    };
    let plain = worker(PeerSettings { addresses: addresses.clone(), ..PeerSettings::default() });
    let refused = lease(&plain).unwrap_err().to_string();
    assert!(refused.contains(ONE_SIDED), "{refused}");

    let here = worker(PeerSettings { addresses, ..place.settings() });
    let pulled = here.manager().peers().unwrap().pull(lease(&here).unwrap()).wait().unwrap();
    assert_eq!((pulled.copied, pulled.fault), (12, None));
    let check = |at: usize, block: &[u8]| {
        assert!(block.iter().all(|&byte| byte == at as u8 + 1), "a wrong block at {at}");
        Ok::<_, Error>(())
    };
    assert_eq!(here.get(&chain, check).unwrap(), 12);
}
