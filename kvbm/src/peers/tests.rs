//! Two workers over a simulated network, in simulated time: a model of what a reader may see.

mod following;
mod layers;
mod limits;

use std::cell::RefCell;
use std::future::ready;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use kvbm_policies::EvictionKind;
use kvbm_settings::{Capacity, Settings};
use kvbm_tiers::{OneSided, PeerMemory, Tier};
use prometheus::Registry;
use proptest::prelude::*;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, duplex};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::book::PeerBook;
use super::chain_names::ChainNames;
use super::discovery::{PeerAddress, PeerList};
use super::following::FollowRequest;
use super::greeting::tests::member;
use super::greeting::{Credentials, PeerProofs, PeerSecret};
use super::holder::{Holder, LeasedBlocks};
use super::link::PeerLink;
use super::protocol::Member;
use super::reader::{PeerLease, Reader};
use super::slices::HostBytes;
use crate::api::blocking::Blocks;
use crate::api::manager::{Manager, Options};
use crate::error::Error;
use crate::names::epoch::NewEpoch;
use crate::names::fingerprint::KvLayout;
use crate::names::hash::BlockHash;
use crate::sync::Mutex;
use crate::table::RequestInfo;

/// Nothing is there: a new connection to it fails.
const ADDRESS: &str = "127.0.0.1:1";
const BLOCK: usize = 512;
pub(super) const SLOTS: u32 = 24;
pub(super) const TTL: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);

/// A worker with a host tier.
pub(super) struct Worker {
    blocks: Blocks,
    registry: Registry,
    /// What its blocks come from now.
    weights: RefCell<String>,
    credentials: Arc<Credentials>,
    /// Heads lie outside of tokens in its blocks, not inside.
    has_heads_outside: bool,
    pub(super) nixl: Option<Arc<dyn OneSided>>,
}

fn credentials(member: Member) -> Arc<Credentials> {
    let proofs = PeerProofs { secret: Some(PeerSecret::new("0123456789abcdef")), tls: None };
    Arc::new(Credentials { member, proofs, converts_types: false })
}

const HEADS: usize = 2;
const TOKENS: usize = 16;
const ROW: usize = BLOCK / HEADS / TOKENS;

/// A worker's whose blocks have an order of axes.
fn ordered_member(name: &str, incarnation: u64, has_heads_outside: bool) -> Member {
    let outer = if has_heads_outside { [HEADS, TOKENS] } else { [TOKENS, HEADS] };
    let order = if has_heads_outside { "head,token,byte" } else { "token,head,byte" };
    let shape = [outer[0], outer[1], ROW].map(|extent| extent as u64).to_vec();
    let strides = [outer[1] * ROW, ROW, 1].map(|stride| stride as u64).to_vec();
    let mut member = member(name, incarnation);
    member.fingerprint.layouts =
        vec![KvLayout { layers: 1, order: order.to_owned(), shape, strides }];
    member.fingerprint.block_tokens = TOKENS as u64;
    member.block_bytes = BLOCK as u64;
    member
}

impl Worker {
    pub(super) async fn new(name: &str, incarnation: u64) -> Self {
        Self::open(name, incarnation, |_| ()).await
    }

    async fn open(name: &str, incarnation: u64, set: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = Settings { block_bytes: Some(BLOCK as u64), ..Settings::default() };
        settings.host.capacity = Some(Capacity::Blocks(SLOTS.into()));
        settings.host.huge_pages = false;
        settings.eviction = EvictionKind::Lru;
        // Its memory can be mapped. Tests serve others over links of their own.
        settings.peers.enabled = true;
        set(&mut settings);
        let options = Options::default();
        let manager = Manager::assemble(settings, &options, "").await.unwrap();
        let blocks = Blocks::of(Arc::new(manager)).unwrap();
        Self {
            blocks,
            registry: options.registry,
            weights: RefCell::new("those of the fingerprint".to_owned()),
            credentials: credentials(member(name, incarnation)),
            has_heads_outside: false,
            nixl: None,
        }
    }

    async fn ordered(name: &str, incarnation: u64, has_heads_outside: bool) -> Self {
        let worker = Self::new(name, incarnation).await;
        let member = ordered_member(name, incarnation, has_heads_outside);
        Self { has_heads_outside, credentials: credentials(member), ..worker }
    }

    pub(super) fn manager(&self) -> &Manager {
        self.blocks.manager()
    }

    /// Computes what the host tier lacks of a chain.
    pub(super) fn compute(&self, chain: &[BlockHash]) {
        let fill = |at: usize, slot: &mut [u8]| {
            slot.copy_from_slice(&self.content(chain[at]));
            Ok::<_, Error>(())
        };
        self.blocks.put(chain, fill).unwrap();
    }

    /// How many leading blocks it has, each of which is what its name says with these weights.
    pub(super) fn check(&self, chain: &[BlockHash]) -> usize {
        let check = |at: usize, block: &[u8]| {
            assert_eq!(block, self.content(chain[at]), "a wrong block at {at}");
            Ok::<_, Error>(())
        };
        self.blocks.get(chain, check).unwrap()
    }

    /// The bytes of a block.
    fn content(&self, hash: BlockHash) -> Vec<u8> {
        let seed = format!("{hash:?} {}", self.weights.borrow());
        let block: Vec<_> = seed.bytes().cycle().take(BLOCK).collect();
        if !self.has_heads_outside {
            return block;
        }
        let rows: Vec<_> = block.chunks(ROW).collect();
        let row = |at: usize| rows[at % TOKENS * HEADS + at / TOKENS];
        (0..rows.len()).flat_map(row).copied().collect()
    }

    /// Begins epoch `number` with other weights, which others have as well if they have a name.
    fn reset(&self, number: u64, weights: Option<&str>) {
        self.manager().reset(NewEpoch { number, weights }).unwrap();
        let member = &self.credentials.member;
        let own = || format!("{} {} {number}", member.name, member.incarnation);
        *self.weights.borrow_mut() = weights.map_or_else(own, str::to_owned);
    }

    fn reset_again(&self, weights: Option<&str>) {
        self.reset(self.manager().admin().epoch() + 1, weights);
    }

    /// A counter, or the sum of those that have these labels.
    fn counted(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        let families = self.registry.gather();
        let rows = families.iter().filter(|family| family.name() == name);
        let rows = rows.flat_map(prometheus::proto::MetricFamily::get_metric);
        let has = |row: &&prometheus::proto::Metric| {
            let has = |wanted: &(&str, &str)| {
                row.get_label().iter().any(|label| (label.name(), label.value()) == *wanted)
            };
            labels.iter().all(has)
        };
        rows.filter(has).map(|row| row.get_counter().get_value() as u64).sum()
    }

    fn book(&self) -> Arc<PeerBook> {
        let known = watch::channel(Arc::default()).1;
        PeerBook::new(&self.credentials.member.name, ADDRESS.parse().unwrap(), known)
    }

    pub(super) fn holder(&self, leased: &Arc<LeasedBlocks>) -> Arc<Holder> {
        let (core, memory) = self.manager().host_tier().unwrap();
        Arc::new(Holder {
            core: Arc::clone(core),
            host: HostBytes::Here(Arc::clone(memory), None),
            credentials: Arc::clone(&self.credentials),
            ttl: TTL,
            leased: Arc::clone(leased),
            nixl: self.nixl.clone(),
            book: self.book(),
            metrics: core.metrics().peers().clone(),
            group: 0,
            window: 0,
            checkpoints: Arc::default(),
            others: Vec::new(),
        })
    }

    fn reader(&self) -> Reader {
        let (core, memory) = self.manager().host_tier().unwrap();
        let mut known = PeerList::default();
        known.insert(PeerAddress::new("there", ADDRESS).unwrap());
        Reader {
            core: Arc::clone(core),
            host: HostBytes::Here(Arc::clone(memory), None),
            credentials: Arc::clone(&self.credentials),
            known: watch::channel(Arc::new(known)).1,
            waiting: Mutex::default(),
            neighbours: None,
            nixl: None,
            copy_threads: 2,
            limit: TTL,
            book: self.book(),
            metrics: core.metrics().peers().clone(),
            group: 0,
            checkpoints: Arc::default(),
            others: Vec::new(),
        }
    }
}

/// Chains that begin alike: number `n` leaves the others behind its first `3 n` blocks.
pub(super) fn chain(n: usize, blocks: usize) -> Vec<BlockHash> {
    let name = |at: usize| (if at < 3 * n { 0 } else { n + 1 } as u128) << 64 | (at as u128 + 1);
    (0..blocks).map(|at| BlockHash::from_u128(name(at) << 32 | name(at))).collect()
}

/// What a reader follows at the holder.
pub(super) fn asked(
    chain: impl Into<ChainNames>,
    info: RequestInfo,
    patience: Duration,
) -> FollowRequest {
    FollowRequest { info, patience, ..FollowRequest::new("there", chain) }
}

/// What happens to the bytes that a holder sends.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    None,
    /// A bit is flipped behind this many bytes.
    Flip(usize),
    /// The link is cut there.
    Cut(usize),
    /// Nothing goes on from there.
    Hang(usize),
    /// Nothing goes on from there for a [while](PAUSE).
    Pause(usize),
}

struct FaultyStream {
    stream: DuplexStream,
    fault: Fault,
    sent: usize,
    pause: Pin<Box<Sleep>>,
}

impl FaultyStream {
    fn new(stream: DuplexStream, fault: Fault) -> Self {
        Self { stream, fault, sent: 0, pause: Box::pin(sleep(PAUSE)) }
    }
}

impl AsyncRead for FaultyStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for FaultyStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let (sent, end) = (self.sent, self.sent + bytes.len());
        let (mut bytes, fault) = (bytes.to_vec(), self.fault);
        match fault {
            Fault::Flip(at) if (sent..end).contains(&at) => bytes[at - sent] ^= 1 << (at % 8),
            Fault::Cut(at) if at < end => {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            Fault::Hang(at) if at < end => return Poll::Pending,
            Fault::Pause(at) if at < end && self.pause.as_mut().poll(context).is_pending() => {
                return Poll::Pending;
            }
            _ => {}
        }
        let written = Pin::new(&mut self.stream).poll_write(context, &bytes);
        if let Poll::Ready(Ok(written)) = written {
            self.sent += written;
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// The holder computes a chain.
    Compute(usize, usize),
    /// So does the reader.
    ComputeHere(usize, usize),
    EvictThere(usize),
    EvictHere(usize),
    /// The reader asks for a lease over a new link.
    Lease(usize, usize, Fault),
    /// It uses the lease.
    Pull,
    /// It takes what there is of a chain, and waits for more.
    Follow(usize, usize),
    /// It follows a chain of which the holder computes some layers, and finishes all or gives up.
    FollowLayers {
        n: usize,
        blocks: usize,
        layers: u16,
        finishes: bool,
        fault: Fault,
    },
    /// It drops it.
    Drop,
    Pass(Duration),
    ResetThere(Option<&'static str>),
    ResetHere(Option<&'static str>),
    /// The holder is another process now.
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let chain = || (0..4_usize, 1..20_usize);
    let at = || 0..12 * BLOCK;
    let fault = prop_oneof![
        4 => Just(Fault::None),
        2 => at().prop_map(Fault::Flip),
        1 => at().prop_map(Fault::Cut),
        1 => at().prop_map(Fault::Hang),
    ];
    let saved = (chain(), 0..=layers::LAYERS, any::<bool>(), fault.clone());
    let weights = || prop::sample::select(vec![None, Some("new"), Some("newer")]);
    let step = prop_oneof![
        6 => chain().prop_map(|(n, blocks)| Step::Compute(n, blocks)),
        2 => chain().prop_map(|(n, blocks)| Step::ComputeHere(n, blocks)),
        2 => (1..8_usize).prop_map(Step::EvictThere),
        2 => (1..24_usize).prop_map(Step::EvictHere),
        6 => (chain(), fault).prop_map(|((n, blocks), fault)| Step::Lease(n, blocks, fault)),
        6 => Just(Step::Pull),
        2 => chain().prop_map(|(n, blocks)| Step::Follow(n, blocks)),
        3 => saved.prop_map(|((n, blocks), layers, finishes, fault)| {
            Step::FollowLayers { n, blocks, layers, finishes, fault }
        }),
        1 => Just(Step::Drop),
        2 => (0..12_000_u64).prop_map(|ms| Step::Pass(Duration::from_millis(ms))),
        1 => weights().prop_map(Step::ResetThere),
        1 => weights().prop_map(Step::ResetHere),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 1..40)
}

pub(super) struct Pair {
    pub(super) there: Worker,
    pub(super) here: Worker,
    pub(super) reader: Reader,
    pub(super) leased: Arc<LeasedBlocks>,
    pub(super) lease: Option<PeerLease>,
    incarnation: u64,
    tasks: Vec<AbortHandle>,
    /// Why there is no lease.
    pub(super) said: Option<String>,
    /// The reader has mapped the holder's memory.
    are_neighbours: bool,
}

impl Pair {
    pub(super) async fn new() -> Self {
        Self::of(Worker::new("there", 1).await, Worker::new("here", 2).await)
    }

    /// Blocks lie there in another order than here.
    pub(super) async fn of_other_order() -> Self {
        let there = Worker::ordered("there", 1, true).await;
        Self::of(there, Worker::ordered("here", 2, false).await)
    }

    fn of(there: Worker, here: Worker) -> Self {
        let (reader, leased) = (here.reader(), Arc::new(LeasedBlocks::new(SLOTS as usize / 2)));
        Self {
            there,
            here,
            reader,
            leased,
            lease: None,
            incarnation: 2,
            tasks: Vec::new(),
            said: None,
            are_neighbours: false,
        }
    }

    pub(super) async fn lease(&mut self, chain: &[BlockHash], fault: Fault) {
        self.lease = None;
        // The holder hears that.
        tokio::time::sleep(Duration::from_millis(1)).await;
        let has_none = self.reader.waiting.lock().values().all(Vec::is_empty);
        if (has_none || !matches!(fault, Fault::None)) && !self.connect(fault).await {
            return;
        }
        let info = RequestInfo::default();
        let leased = self.reader.lease(asked(chain, info, Duration::ZERO), Duration::ZERO, 0);
        let leased = leased.await;
        self.said = leased.as_ref().err().map(ToString::to_string);
        self.lease = leased.ok();
    }

    async fn connect(&mut self, fault: Fault) -> bool {
        let (ours, theirs) = duplex(1 << 10);
        let holder = self.there.holder(&self.leased);
        let stream = FaultyStream::new(theirs, fault);
        let task = tokio::spawn(async move { holder.serve(ready(Ok(stream)), || {}).await });
        self.tasks.push(task.abort_handle());
        let met = timeout(TTL, PeerLink::over(Box::new(ours), &self.reader.credentials)).await;
        let Ok(Ok(mut link)) = met else { return false };
        if self.are_neighbours {
            let (_, memory) = self.there.manager().host_tier().unwrap();
            let mapped = PeerMemory::map(memory.shareable().unwrap()).unwrap();
            link.memory = Some(Arc::new(mapped));
        }
        self.reader.waiting.lock().clear();
        self.reader.keep(ADDRESS, link);
        true
    }

    pub(super) async fn pull(&mut self) -> usize {
        let Some(lease) = self.lease.take() else { return 0 };
        let chain = lease.chain.clone();
        let never = CancellationToken::new();
        let pulled = self.reader.pull(lease, None, &never).await;
        let pulled = pulled.map_or(0, |pulled| pulled.copied);
        self.here.check(&chain);
        pulled
    }

    async fn step(&mut self, step: &Step) {
        match *step {
            Step::Compute(n, blocks) => self.there.compute(&chain(n, blocks)),
            Step::ComputeHere(n, blocks) => self.here.compute(&chain(n, blocks)),
            Step::EvictThere(blocks) => _ = self.there.manager().admin().evict(Tier::Host, blocks),
            Step::EvictHere(blocks) => _ = self.here.manager().admin().evict(Tier::Host, blocks),
            Step::Lease(n, blocks, fault) => self.lease(&chain(n, blocks), fault).await,
            Step::Pull => _ = self.pull().await,
            Step::Follow(n, blocks) => {
                let (wanted, never) = (chain(n, blocks), CancellationToken::new());
                let info = RequestInfo::default();
                drop(self.reader.follow(asked(&wanted, info, TTL / 8), &never).await);
            }
            Step::FollowLayers { n, blocks, layers, finishes, fault } => {
                self.lease = None;
                sleep(Duration::from_millis(1)).await;
                if !self.connect(fault).await {
                    return;
                }
                let (wanted, never) = (chain(n, blocks), CancellationToken::new());
                let info = RequestInfo::default();
                let computing = async {
                    let put = self.there.compute_layers(&wanted, layers).await;
                    drop(finishes.then(|| put.finish()));
                };
                let following = self.reader.follow(asked(&wanted, info, TTL / 8), &never);
                drop(tokio::join!(following, computing));
            }
            Step::Drop => self.lease = None,
            Step::Pass(time) => tokio::time::sleep(time).await,
            Step::ResetThere(weights) => self.there.reset_again(weights),
            Step::ResetHere(weights) => self.here.reset_again(weights),
            Step::Restart => {
                self.incarnation += 1;
                self.tasks.drain(..).for_each(|task| task.abort());
                self.there = Worker::new("there", self.incarnation).await;
            }
        }
        for n in 0..4 {
            self.here.check(&chain(n, 20));
        }
    }

    /// Nothing is left over, and everything works again.
    pub(super) async fn heals(&mut self) {
        self.lease = None;
        self.reader.waiting.lock().clear();
        tokio::time::sleep(2 * TTL).await;
        assert_eq!(self.leased.blocks(), 0, "leases are left");
        let epoch =
            1 + self.there.manager().admin().epoch().max(self.here.manager().admin().epoch());
        for worker in [&self.there, &self.here] {
            worker.reset(epoch, Some("healed"));
            worker.manager().admin().tick();
        }
        let wanted = chain(3, 12);
        self.there.compute(&wanted);
        self.lease(&wanted, Fault::None).await;
        let copied = self.pull().await;
        assert_eq!((copied, self.here.check(&wanted)), (12, 12));
        for worker in [&self.there, &self.here] {
            assert_eq!(worker.manager().admin().audit(), []);
            let counts = worker.manager().admin().counts(Tier::Host);
            assert_eq!((counts.filling, counts.lost), (0, 0));
        }
    }
}

pub(super) fn simulated<T>(work: impl Future<Output = T>) -> T {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    runtime.unwrap().block_on(work)
}

fn cases() -> u32 {
    std::env::var("KVBM_PEER_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(500)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]
    #[test]
    fn a_reader_never_has_a_wrong_byte_and_recovers(
        steps in steps(),
        are_neighbours: bool,
    ) {
        simulated(async {
            let mut pair = Pair { are_neighbours, ..Pair::new().await };
            for step in &steps {
                pair.step(step).await;
            }
            pair.heals().await;
        });
    }
}

#[test]
fn blocks_that_only_a_peer_has_come_from_there() {
    simulated(async {
        let mut pair = Pair::new().await;
        let wanted = chain(0, 10);
        pair.there.compute(&wanted);
        pair.here.compute(&wanted[..4]);
        pair.lease(&wanted, Fault::None).await;
        let lease = pair.lease.as_ref().unwrap();
        assert_eq!((lease.blocks(), lease.only_there(), lease.is_cut()), (10, 6, false));
        assert_eq!(pair.leased.blocks(), 10, "all of them are pinned");
        assert_eq!((pair.pull().await, pair.here.check(&wanted)), (6, 10));
        pair.heals().await;
    });
}

#[test]
fn a_chain_held_in_part_is_leased_in_part() {
    simulated(async {
        let mut pair = Pair::new().await;
        for held in 0..=12 {
            let wanted = chain(0, 20);
            pair.there.compute(&wanted[..held]);
            pair.lease(&wanted, Fault::None).await;
            assert_eq!(pair.lease.as_ref().map(PeerLease::blocks), Some(held), "{:?}", pair.said);
        }
        pair.heals().await;
    });
}

#[test]
fn leased_blocks_stay_until_their_lease_ends_and_no_longer() {
    simulated(async {
        let mut pair = Pair::new().await;
        let wanted = chain(0, 10);
        pair.there.compute(&wanted);
        pair.lease(&wanted, Fault::None).await;
        assert_eq!(pair.there.manager().admin().evict(Tier::Host, 10), 0, "they are leased");
        tokio::time::sleep(TTL + Duration::from_secs(1)).await;
        assert_eq!(pair.there.manager().admin().evict(Tier::Host, 10), 10);
        pair.there.compute(&chain(2, 12)[..]);
        assert_eq!((pair.pull().await, pair.here.check(&wanted)), (0, 0), "its time is over");
        pair.heals().await;
    });
}

#[test]
fn no_more_is_leased_than_the_share() {
    simulated(async {
        let mut pair = Pair::new().await;
        let wanted = chain(0, 13);
        pair.there.compute(&wanted);
        pair.lease(&wanted, Fault::None).await;
        let lease = pair.lease.as_ref().unwrap();
        assert_eq!((lease.blocks(), lease.is_cut()), (12, true));
        assert_eq!(pair.there.counted("kvbm_peer_leases_cut_total", &[]), 1);
        assert_eq!(pair.pull().await, 12);
        pair.lease(&wanted, Fault::None).await;
        assert!(pair.lease.is_none(), "a lease of the last block pins all 13");
        pair.heals().await;
    });
}

#[test]
fn workers_of_different_epochs_give_each_other_nothing() {
    simulated(async {
        let mut pair = Pair::new().await;
        let wanted = chain(0, 8);
        pair.there.compute(&wanted);
        pair.here.reset_again(Some("new"));
        pair.lease(&wanted, Fault::None).await;
        assert!(pair.lease.is_none());
        pair.there.reset_again(Some("new"));
        pair.lease(&wanted, Fault::None).await;
        assert_eq!(pair.lease.as_ref().unwrap().blocks(), 0, "those are of other weights");
        pair.there.compute(&wanted);
        pair.lease(&wanted, Fault::None).await;
        pair.there.reset_again(Some("newer"));
        assert_eq!(pair.pull().await, 0, "a reset ended it");
        pair.heals().await;
    });
}

#[test]
fn equal_epochs_with_other_weights_share_nothing() {
    simulated(async {
        let mut pair = Pair::new().await;
        let wanted = chain(0, 8);
        for (theirs, ours) in [(None, None), (Some("new"), None), (Some("new"), Some("newer"))] {
            let number = pair.here.manager().admin().epoch() + 1;
            pair.there.reset(number, theirs);
            pair.here.reset(number, ours);
            pair.there.compute(&wanted);
            pair.lease(&wanted, Fault::None).await;
            assert!(pair.lease.is_none(), "{theirs:?} and {ours:?}");
            assert!(pair.said.as_ref().unwrap().contains("the same weights"), "{:?}", pair.said);
        }
        pair.heals().await;
    });
}

/// What deployed systems answer with wrong tokens: the lease is over, the holder gave its blocks'
/// slots to others, and then the reader reads.
#[test]
fn blocks_reused_after_a_lease_are_not_taken_for_its() {
    simulated(async {
        let mut pair = Pair { are_neighbours: true, ..Pair::new().await };
        for n in 0..1_000 {
            let wanted = [BlockHash::from_u128(1 << 80 | n)];
            pair.there.compute(&wanted);
            pair.lease(&wanted, Fault::None).await;
            let lease = pair.lease.as_mut().unwrap();
            assert_eq!(lease.only_there(), 1);
            // Its own clock fails: it takes the lease for one that goes on.
            lease.named.ttl = Duration::from_hours(1);
            tokio::time::sleep(TTL + Duration::from_secs(1)).await;
            assert_eq!(pair.there.manager().admin().evict(Tier::Host, 1), 1);
            let others: Vec<_> = (0..u128::from(SLOTS))
                .map(|at| BlockHash::from_u128(1 << 90 | n << 8 | at))
                .collect();
            pair.there.compute(&others);
            assert_eq!((pair.pull().await, pair.here.check(&wanted)), (0, 0));
            pair.there.manager().admin().evict(Tier::Host, SLOTS as usize);
        }
        pair.heals().await;
    });
}
