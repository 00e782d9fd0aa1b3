//! What a pull waits for, and what a holder gives at most.

use tokio::io::copy_bidirectional;
use tokio::net::TcpListener;

use super::*;
use crate::api::filling::FillingSlots;
use crate::names::hash::Chain;
use crate::observe::events::{CacheEvent, StoreReason};
use crate::peers::link::PeerFault;
use crate::peers::protocol::{LeaseEnd, Member};
use crate::peers::reader::Pulled;
use crate::peers::{MAX_READERS, accept};

#[test]
fn a_pull_waits_for_others_no_longer_than_its_limit() {
    simulated(async {
        let mut pair = Pair::new().await;
        let wanted = chain(0, 10);
        pair.there.compute(&wanted);
        let here = Arc::clone(pair.here.blocks.manager());
        let (core, memory) = here.host_tier().unwrap();
        let (beginning, info) = (Chain::from(&wanted[..4]), RequestInfo::default());
        let others = FillingSlots::take(core, memory, beginning, info).unwrap();
        pair.lease(&wanted, Fault::None).await;
        let (lease, never) = (pair.lease.take().unwrap(), CancellationToken::new());
        let pulled = timeout(2 * TTL, pair.reader.pull(lease, None, &never)).await;
        let Pulled { blocks, copied, fault, .. } = pulled.expect("it goes on").unwrap();
        assert_eq!((blocks, copied), (0, 6));
        assert!(fault.as_ref().unwrap().contains("on their way from elsewhere"), "{fault:?}");
        drop(others);
        pair.heals().await;
    });
}

#[test]
fn a_cancelled_pull_ends_at_once_and_leaves_nothing() {
    for are_neighbours in [false, true] {
        simulated(async {
            let mut pair = Pair { are_neighbours, ..Pair::new().await };
            let wanted = chain(0, 10);
            pair.there.compute(&wanted);
            pair.lease(&wanted, Fault::None).await;
            let (lease, cancelled) = (pair.lease.take().unwrap(), CancellationToken::new());
            cancelled.cancel();
            let pulled = pair.reader.pull(lease, None, &cancelled).await.unwrap();
            assert_eq!((pulled.copied, pulled.fault.as_deref()), (0, Some("it was cancelled")));
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(pair.leased.blocks(), 0, "the holder's blocks are leased");
            pair.heals().await;
        });
    }
}

#[test]
fn a_pull_that_hangs_can_be_cancelled() {
    simulated(async {
        let mut pair = Pair::new().await;
        let wanted = chain(0, 10);
        pair.there.compute(&wanted);
        pair.lease(&wanted, Fault::Hang(4 * BLOCK)).await;
        let (lease, cancelled) = (pair.lease.take().unwrap(), CancellationToken::new());
        let cancel = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            cancelled.cancel();
        };
        let pulled = async { timeout(TTL / 2, pair.reader.pull(lease, None, &cancelled)).await };
        let (pulled, ()) = tokio::join!(pulled, cancel);
        let pulled = pulled.expect("it goes on").unwrap();
        assert_eq!(pulled.fault.as_deref(), Some("it was cancelled"));
        assert!((1..10).contains(&pulled.blocks), "{} have come before", pulled.blocks);
        assert_eq!(pair.here.check(&wanted), pulled.blocks);
        assert_eq!(pair.here.manager().admin().counts(Tier::Host).filling, 0);
        drop(pulled);
        pair.heals().await;
    });
}

/// In real time, since a disk is.
fn for_real<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

#[test]
fn what_a_reader_wants_of_the_disk_is_prefetched_there() {
    for_real(async {
        let dir = tempfile::tempdir().unwrap();
        let there = Worker::open("there", 3, |settings| {
            settings.disk.capacity = Some(Capacity::Blocks(SLOTS.into()));
            settings.disk.dirs = vec![dir.path().to_owned()];
        });
        let mut pair = Pair { there: there.await, ..Pair::new().await };
        let wanted = chain(0, 4);
        pair.there.compute(&wanted);
        let manager = Arc::clone(pair.there.blocks.manager());
        assert!(manager.drain(TTL).is_complete());
        assert_eq!(manager.admin().evict(Tier::Host, 4), 4);
        let mut events = manager.events();
        pair.lease(&wanted, Fault::None).await;
        assert_eq!(pair.lease.as_ref().map(PeerLease::blocks), Some(4), "{:?}", pair.said);
        let reasons: Vec<_> = std::iter::from_fn(|| events.try_next())
            .filter_map(|event| match event {
                CacheEvent::Stored { reason, .. } => Some(reason),
                _ => None,
            })
            .collect();
        assert_eq!(reasons, [StoreReason::Prefetched; 4]);
    });
}

#[test]
fn a_reader_too_many_is_turned_away_and_counted() {
    for_real(async {
        let pair = Pair::new().await;
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap().to_string();
        tokio::spawn(accept(socket, pair.there.holder(&pair.leased)));
        let connect = || PeerLink::connect(&address, &pair.reader.credentials);
        let refused = || pair.there.counted("kvbm_peer_refused_total", &[("reason", "full")]);
        let mut links = Vec::new();
        for _ in 0..MAX_READERS {
            links.push(connect().await.unwrap());
        }
        assert_eq!(refused(), 0);
        assert!(connect().await.is_err());
        assert_eq!(refused(), 1);
    });
}

/// A holder whose bytes stop coming.
async fn hang(socket: TcpListener, holder: Holder) {
    let (mut reader, _) = socket.accept().await.unwrap();
    let (theirs, mut ours) = duplex(1 << 10);
    let stream = FaultyStream::new(theirs, Fault::Hang(4 * BLOCK));
    let passing = copy_bidirectional(&mut reader, &mut ours);
    let serving = holder.serve(ready(Ok(stream)), || {});
    let ((), _) = tokio::join!(serving, passing);
}

#[test]
fn a_transfer_from_a_peer_that_hangs_can_be_cancelled() {
    for_real(async {
        let pair = Pair::new().await;
        let wanted = chain(0, 10);
        pair.there.compute(&wanted);
        let mut holder = Arc::into_inner(pair.there.holder(&pair.leased)).unwrap();
        let of_holder = Member { block_bytes: BLOCK as u64, ..member("there", 1) };
        let proofs = PeerProofs { secret: None, tls: None };
        holder.credentials =
            Arc::new(Credentials { member: of_holder.clone(), proofs, converts_types: false });
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap().to_string();
        tokio::spawn(hang(socket, holder));

        let mut settings = Settings { block_bytes: Some(BLOCK as u64), ..Settings::default() };
        settings.host.capacity = Some(Capacity::Blocks(SLOTS.into()));
        settings.host.huge_pages = false;
        (settings.peers.enabled, settings.peers.port) = (true, 0);
        settings.peers.addresses = Some(address.clone());
        // Nothing else ends it.
        settings.peers.lease_ttl_ms = 3_600_000;
        let fingerprint = Some(of_holder.fingerprint);
        let options = Options { fingerprint, ..Options::default() };
        let manager = Manager::open(settings, options).await.unwrap();
        let peers = manager.peers().unwrap();
        let peer = address.replace(':', "/");
        let lease = peers.lease(&peer, &wanted, RequestInfo::default()).await.unwrap();
        let mut pull = peers.pull(lease);
        pull.cancel();
        let pulled = timeout(Duration::from_mins(1), pull).await.expect("it goes on").unwrap();
        assert_eq!(pulled.fault.as_deref(), Some("it was cancelled"));
        assert_eq!(manager.admin().counts(Tier::Host).filling, 0);
    });
}

#[test]
fn what_is_read_behind_a_lease_is_not_damaged() {
    simulated(async {
        let until = Instant::now() + TTL;
        assert!(PeerFault::Wrong.expired_if_over(until).is_wrong());
        tokio::time::sleep(TTL).await;
        let fault = PeerFault::Wrong.expired_if_over(until);
        assert!(matches!(fault, PeerFault::Ended(LeaseEnd::Expired)), "{fault}");
    });
}
