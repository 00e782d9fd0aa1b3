//! Other workers: what one of them holds can be brought here.
//!
//! A peer is a place where a prefix is. A reader leases at a peer as it leases at home, takes the
//! blocks into slots of its own host tier, verifies them and publishes them there. What fails is a
//! miss of what is missing. Nothing of this is on the way of a local request.
//!
//! | module | holds |
//! |---|---|
//! | `discovery` | how a worker learns of others, and announces itself |
//! | `stream` | what a connection runs over |
//! | `tls` | this worker's certificate, and whose others are taken |
//! | `greeting` | who may connect, and whose blocks are the same |
//! | `probes` | which prefixes of a chain a reader asks for |
//! | `protocol` | the messages |
//! | `holder` | gives leases, and sends what they name |
//! | `link` | a reader's connection |
//! | `reader` | reads what others hold |
//! | `sealed` | blocks that lie encrypted in a host tier, there or here |
//! | `slices` | where the bytes of blocks are; a leader has its ranks bring theirs |
//! | `ranks` | a rank's part: it gives slices to ranks of others, and brings theirs |
//! | `shares` | how heads lie in slices, and whose blocks are alike but for the number of ranks |
//! | `chain_names` | what a prompt's blocks are called, here and there |
//! | `following` | brings what a peer has and what it comes to have meanwhile |
//! | `conversion` | blocks of other numbers of tokens, orders or types, made into ours |
//! | `numbers` | which types numbers have |
//! | `fp8` | scaled numbers of 8 bits as those of 16, and back |
//! | `scales` | which numbers of a block have which scale |
//! | `arriving` | where blocks go as they come |
//! | `loading` | loads onto the device from what a peer holds |
//! | `straight` | from a neighbour's memory straight into an engine's slots |
//! | `neighbour` | the memory of workers on the same host |
//! | `nixl` | reads of others' memory by NIXL |
//! | `counting` | how ends and refusals are counted |
//! | `book` | what goes on with each peer, for people |
//! | `spans` | what tracers are told |
//! | `look` | what peers show of themselves, to people |

mod arriving;
mod book;
mod chain_names;
mod conversion;
mod counting;
pub(crate) mod discovery;
mod following;
mod fp8;
mod greeting;
mod holder;
mod link;
mod loading;
mod look;
mod neighbour;
mod nixl;
mod numbers;
mod probes;
mod protocol;
mod ranks;
mod reader;
mod scales;
mod sealed;
mod shares;
mod slices;
mod spans;
mod straight;
mod stream;
#[cfg(test)]
mod tests;
mod tls;

use std::collections::VecDeque;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvbm_settings::{PeerNixl, PeerSettings, Settings};
use kvbm_tiers::{OneSided, Tier};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use self::discovery::{PeerAddress, PeerAnnouncement, PeerList, PeerSource, PeerWatch};
use self::greeting::{Credentials, PeerProofs, PeerSecret, random};
use self::holder::{Holder, LeasedBlocks};
use self::neighbour::Neighbours;
use self::nixl::{NixlHolders, agent_name};
use self::protocol::Member;
use self::reader::Reader;
use self::tls::PeerTls;
use crate::api::groups::{CheckpointGroups, GroupTier, described};
use crate::api::manager::Options;
use crate::api::transfer::Transfer;
use crate::assemble::nixl_for_peers;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::PeerMetrics;
use crate::names::fingerprint::Fingerprint;
use crate::scheduler::Core;
use crate::secret::read_private_secret;
use crate::sync::{JoinHandle, Mutex, spawn};
use crate::table::RequestInfo;

pub(crate) use self::book::PeerBook;
pub use self::book::{PeerFaultState, PeerState, PeersState};
pub use self::chain_names::ChainNames;
pub use self::following::FollowRequest;
pub(crate) use self::loading::EngineSlots;
pub use self::look::{PeerOffer, PeerReport, look_at_peers};
#[cfg(feature = "testing")]
pub use self::protocol::read_in_every_way as read_peer_frame;
pub(crate) use self::ranks::{RankListener, RankPeers};
pub use self::reader::{PeerLease, Pulled};
pub(crate) use self::slices::HostBytes;

/// Connections at a time, and those of them that have not said yet whose they are.
const MAX_READERS: usize = if cfg!(test) { 2 } else { 256 };
const MAX_STRANGERS: usize = 64;
/// The pause after a connection that could not be accepted: there are no descriptors left, most
/// often.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// What is cancelled ends within this time.
const MAX_END: Duration = Duration::from_secs(5);
const TIDY_PAUSE: Duration = Duration::from_secs(10);
/// Threads that wait for what the system does.
const MAX_LOOKING: usize = 4;

/// An address that is ours: connections wait until they are served.
#[derive(Debug)]
pub(crate) struct PeerListener {
    socket: TcpListener,
    address: SocketAddr,
    settings: Settings,
    proofs: PeerProofs,
    fingerprint: Fingerprint,
    /// Processes that have a slice of each block; 0: this one has the blocks.
    ranks: u16,
    /// Its cache groups, as others are told.
    groups: String,
}

impl PeerListener {
    /// Takes the address, before tiers are opened, since that takes long. `None`: there are to be
    /// no peers.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]: peers cannot be had with these options. [`ErrorKind::Unavailable`]:
    /// the address is taken or not this machine's, or the secret or the certificate cannot be
    /// read.
    pub(crate) fn bind(settings: &Settings, options: &Options) -> Result<Option<Self>> {
        let peers = &settings.peers;
        if !peers.enabled {
            return Ok(None);
        }
        let fingerprint = options.fingerprint.clone().ok_or_else(needs_fingerprint)?;
        if !options.groups.is_empty() && options.ranks.is_some() {
            return Err(no_groups());
        }
        refuse_sealed_nixl(settings)?;
        let proofs = proofs_of(peers)?;
        let (socket, address) = bind(SocketAddr::new(peers.host, peers.port))?;
        let (settings, ranks) = (settings.clone(), options.ranks.as_ref());
        let ranks = ranks.map_or(0, |group| group.world);
        let groups = described(&options.groups, &settings);
        Ok(Some(Self { socket, address, settings, proofs, fingerprint, ranks, groups }))
    }

    /// What others know of this worker.
    fn own_address(&self) -> Result<PeerAddress> {
        let PeerSettings { address, etcd, name, .. } = &self.settings.peers;
        if address.is_none() && etcd.is_some() && self.address.ip().is_unspecified() {
            let message = format!(
                "others cannot reach this worker at {}, which etcd would tell them: set peers.address \
                 (DYN_KVBM_PEERS_ADDRESS)",
                self.address
            );
            return Err(Error::invalid(message));
        }
        let address = address.clone().unwrap_or_else(|| self.address.to_string());
        match name {
            Some(name) => PeerAddress::new(name, address),
            None => PeerAddress::named_by_address(&address),
        }
    }
}

fn refuse_sealed_nixl(settings: &Settings) -> Result<()> {
    let is_sealed = settings.host.persist.is_some() && settings.encryption.is_on();
    if is_sealed && settings.peers.nixl == PeerNixl::Required {
        let message = "blocks of an encrypted host tier do not come by NIXL: leave peers.nixl \
             (DYN_KVBM_PEERS_NIXL) unset";
        return Err(Error::invalid(message));
    }
    Ok(())
}

fn needs_fingerprint() -> Error {
    let message = "peers share blocks of one model: open the manager, and its ranks, with a fingerprint (Options, \
         RankOptions), or set peers.enabled (DYN_KVBM_PEERS) to false";
    Error::invalid(message)
}

pub(crate) fn no_groups() -> Error {
    let message = "peers cannot be had with ranks and several cache groups at once yet: set peers.enabled (DYN_KVBM_PEERS) to false";
    Error::invalid(message)
}

pub(crate) fn no_host_tier() -> Error {
    let message = "peers read the host tier, and there is none: set host.capacity (DYN_KVBM_CPU_CACHE_GB), or \
         peers.enabled (DYN_KVBM_PEERS) to false";
    Error::invalid(message)
}

/// # Errors
/// [`ErrorKind::Unavailable`]: the address is taken or not this machine's.
fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let bound = TcpListener::bind(address).and_then(|socket| {
        socket.set_nonblocking(true)?;
        let address = socket.local_addr()?;
        Ok((socket, address))
    });
    bound.map_err(|error| {
        let message = format!(
            "cannot serve peers at {address}; choose another address with peers.host and peers.port \
             (DYN_KVBM_PEERS_HOST and DYN_KVBM_PEERS_PORT; 0 takes any free port)"
        );
        Error::caused(ErrorKind::Unavailable, message, error)
    })
}

fn proofs_of(settings: &PeerSettings) -> Result<PeerProofs> {
    let file = settings.secret_file.as_ref();
    let secret = file.map(|path| read_private_secret(path, "peers.secret_file")).transpose()?;
    let secret = secret.as_ref().or(settings.secret.as_ref());
    let secret = secret.map(|secret| PeerSecret::new(secret));
    Ok(PeerProofs { secret, tls: PeerTls::of(settings)? })
}

/// Other workers that hold blocks of the same model. A manager has them if the settings say so
/// (`peers.enabled`, `DYN_KVBM_PEERS`): see [`Manager::peers`](crate::Manager::peers).
///
/// ```no_run
/// # async fn example(manager: &kvbm::Manager, chain: Vec<kvbm::BlockHash>) -> kvbm::Result<()> {
/// let peers = manager.peers().expect("peers.enabled is set");
/// // The worker that computed the prompt, by the name that it has in the list of peers.
/// let lease = peers.lease("prefill-1/0", &chain, kvbm::RequestInfo::default()).await?;
/// println!("{} blocks are only there", lease.only_there());
/// let pulled = peers.pull(lease).await?;
/// // From here on they are in the host tier, as if they had been computed here.
/// let loaded = manager.load(pulled.lease).await?;
/// # Ok(())
/// # }
/// ```
pub struct Peers {
    reader: Arc<Reader>,
    /// By cache group.
    leased: Vec<Arc<LeasedBlocks>>,
    book: Arc<PeerBook>,
    name: String,
    address: SocketAddr,
    reached_at: String,
    runtime: Handle,
    reads: Reads,
    watch: PeerWatch,
    /// `None` once it is closed.
    thread: Mutex<Option<PeerThread>>,
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peers")
            .field("name", &self.name)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// What holders and readers of all cache groups have alike.
struct CommonParts {
    credentials: Arc<Credentials>,
    known: watch::Receiver<Arc<PeerList>>,
    limit: Duration,
    copy_threads: usize,
    lease_share: f64,
    /// For the host tier of each group, by its number.
    nixl: Vec<Option<Arc<dyn OneSided>>>,
    requires_nixl: bool,
    /// Neighbours' memory is mapped.
    maps: bool,
    book: Arc<PeerBook>,
    metrics: PeerMetrics,
}

impl CommonParts {
    /// Of full attention (group 0), in a plain model.
    fn holder(&self, core: &Arc<Core>, host: HostBytes, group: u8) -> Holder {
        let most = f64::from(core.table().counts(Tier::Host).total) * self.lease_share;
        Holder {
            core: Arc::clone(core),
            host,
            credentials: Arc::clone(&self.credentials),
            ttl: self.limit,
            leased: Arc::new(LeasedBlocks::new(most as usize)),
            nixl: self.nixl_of(group),
            book: Arc::clone(&self.book),
            metrics: self.metrics.clone(),
            group,
            window: 0,
            checkpoints: Arc::default(),
            others: Vec::new(),
        }
    }

    fn holder_of(&self, tier: &GroupTier<'_>) -> Holder {
        let holder = self.holder(tier.core, tier.host.clone(), tier.number);
        Holder { window: tier.window, ..holder }
    }

    fn nixl_of(&self, group: u8) -> Option<Arc<dyn OneSided>> {
        self.nixl.get(usize::from(group)).cloned().flatten()
    }

    /// Of full attention (group 0), in a plain model.
    fn reader(&self, core: &Arc<Core>, host: HostBytes, group: u8) -> Reader {
        let nixl = self.nixl_of(group);
        let maps = self.maps && host.memory().is_some() && host.sealed().is_none();
        Reader {
            core: Arc::clone(core),
            host,
            credentials: Arc::clone(&self.credentials),
            known: self.known.clone(),
            waiting: Mutex::default(),
            neighbours: maps.then(|| Neighbours::new(group)),
            nixl: nixl.map(|nixl| NixlHolders::new(nixl, self.requires_nixl, group)),
            limit: self.limit,
            copy_threads: self.copy_threads,
            book: Arc::clone(&self.book),
            metrics: self.metrics.clone(),
            group,
            checkpoints: Arc::default(),
            others: Vec::new(),
        }
    }

    fn reader_of(&self, tier: &GroupTier<'_>) -> Reader {
        self.reader(tier.core, tier.host.clone(), tier.number)
    }
}

/// The thread that serves others, and reads at them.
struct PeerThread {
    stop: oneshot::Sender<()>,
    thread: JoinHandle,
}

impl Peers {
    /// Serves others and reads at them, on a thread of its own.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the system refuses a thread or random bytes, or the password of
    /// etcd cannot be read; [`ErrorKind::Invalid`] if that, a name or an address is none.
    pub(crate) fn start(
        listener: PeerListener,
        core: &Arc<Core>,
        host: HostBytes,
        checkpoints: &Arc<CheckpointGroups>,
    ) -> Result<Self> {
        let own = listener.own_address()?;
        let PeerListener { socket, address, settings, proofs, fingerprint, ranks, groups } =
            listener;
        if ranks > 0 && host.seats().is_none() {
            return Err(ranks_without_peers());
        }
        let tiers = checkpoints.host_tiers().ok_or_else(no_host_tier)?;
        let source = PeerSource::of(&settings.peers)?;
        let refused = |error| Error::caused(ErrorKind::Unavailable, "cannot serve peers", error);
        let incarnation = u64::from_le_bytes(random()?);
        let nixl = |group, host: &HostBytes| {
            // What arrives sealed, or is to lie sealed, is opened and sealed on its way.
            let in_the_clear = host.memory().filter(|_| host.sealed().is_none());
            let name = agent_name(incarnation, group);
            let nixl = in_the_clear.map(|memory| nixl_for_peers(&settings, &name, memory));
            Ok::<_, Error>(nixl.transpose()?.flatten())
        };
        let of_groups = tiers.iter().map(|tier| (tier.number, &tier.host));
        let nixl =
            std::iter::once((0, &host)).chain(of_groups).map(|(group, host)| nixl(group, host));
        let nixl = nixl.collect::<Result<_>>()?;
        let block_bytes = host.block_bytes().map(|bytes| bytes as u64);
        let block_bytes = block_bytes.or(settings.block_bytes).unwrap_or_default();
        let copy_threads = settings.transfer.copy_threads as usize;
        let settings = settings.peers;
        let runtime = PeerRuntime::new(copy_threads).map_err(refused)?;
        let entered = runtime.runtime().enter();
        let socket = tokio::net::TcpListener::from_std(socket).map_err(refused)?;
        drop(entered);
        let of_groups = tiers.iter().map(|tier| (tier.number, &tier.host));
        for (group, host) in std::iter::once((0, &host)).chain(of_groups) {
            let shared = host.memory().map_or(Ok(()), |memory| {
                neighbour::share(memory, incarnation, group, &runtime.handle())
            });
            shared.map_err(refused)?;
        }
        let watch = source.watch(&runtime.handle())?;
        let announcement = source.announce(&own, &runtime.handle())?;
        let name = own.name().to_owned();
        let rank = None;
        let member = Member { name, incarnation, block_bytes, fingerprint, ranks, rank, groups };
        core.metrics().peers().count_from_zero();
        let common = CommonParts {
            credentials: Arc::new(Credentials {
                member,
                proofs,
                converts_types: settings.convert_types,
            }),
            known: watch.peers(),
            limit: Duration::from_millis(settings.lease_ttl_ms),
            copy_threads,
            lease_share: settings.lease_share,
            nixl,
            requires_nixl: settings.nixl == PeerNixl::Required,
            maps: settings.shared_memory,
            book: PeerBook::new(own.name(), address, watch.peers()),
            metrics: core.metrics().peers().clone(),
        };
        let holder = Holder {
            checkpoints: Arc::clone(checkpoints),
            others: tiers.iter().map(|tier| common.holder_of(tier)).collect(),
            ..common.holder(core, host.clone(), 0)
        };
        let reader = Reader {
            checkpoints: Arc::clone(checkpoints),
            others: tiers.iter().map(|tier| common.reader_of(tier)).collect(),
            ..common.reader(core, host, 0)
        };
        let holders = std::iter::once(&holder).chain(&holder.others);
        let leased = holders.map(|holder| Arc::clone(&holder.leased)).collect();
        let (reader, handle) = (Arc::new(reader), runtime.handle());
        let tidied = Arc::clone(&reader);
        handle.spawn(tidy(move || tidied.tidy()));
        let (stop, stopped) = oneshot::channel();
        let reads = Reads::default();
        let ends = reads.clone();
        let serve = move || serve(&runtime, socket, holder, announcement, (stopped, ends));
        let thread = spawn("kvbm-peers", serve).map_err(refused)?;
        tracing::info!(name = own.name(), %address, "peers read here");
        Ok(Self {
            reader,
            leased,
            book: common.book,
            name: own.name().to_owned(),
            address,
            reached_at: own.address().to_owned(),
            runtime: handle,
            reads,
            watch,
            thread: Mutex::new(Some(PeerThread { stop, thread })),
        })
    }

    /// This worker's own name among all.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it serves others.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where others reach it: `peers.address`, or else the [address](Self::address) that is bound.
    pub fn reached_at(&self) -> &str {
        &self.reached_at
    }

    /// The peers that are known, by name, with their addresses.
    pub fn known(&self) -> Vec<(String, String)> {
        let known = self.watch.peers();
        let known = known.borrow();
        let others = known.iter().filter(|(name, _)| *name != self.name);
        others.map(|(name, address)| (name.to_owned(), address.to_owned())).collect()
    }

    /// For the live page.
    pub(crate) const fn book(&self) -> &Arc<PeerBook> {
        &self.book
    }

    /// Blocks that are leased to others now, of all cache groups.
    pub fn leased(&self) -> usize {
        self.leased.iter().map(|leased| leased.blocks()).sum()
    }

    /// Leases at a peer what the tiers here lack of `chain`. What [`pull`](Self::pull) brings has the
    /// names that blocks have here.
    ///
    /// The answer is an error of kind [`Invalid`](ErrorKind::Invalid) if no peer has this name, of
    /// kind [`Unavailable`](ErrorKind::Unavailable) if the peer cannot be reached, has other blocks
    /// or gives no lease, and of kind [`Closed`](ErrorKind::Closed) after
    /// [`Manager::close`](crate::Manager::close).
    pub fn lease(
        &self,
        peer: &str,
        chain: impl Into<ChainNames>,
        info: RequestInfo,
    ) -> Transfer<PeerLease> {
        let reader = Arc::clone(&self.reader);
        let asked = FollowRequest { info, ..FollowRequest::new(peer, chain) };
        self.start_on_thread(async move |cancelled| {
            let leased = reader.lease(asked, Duration::ZERO, 0);
            tokio::select! {
                leased = leased => leased,
                () = cancelled.cancelled() => Err(Error::unavailable("the request for a lease was cancelled")),
            }
        })
    }

    /// Brings what a lease names into the host tier, as far as there is room. Blocks that do not
    /// come, come late or are not what they should be are missing, and the answer says why; so it
    /// does if it is [cancelled](Transfer::cancel).
    ///
    /// [`Manager::load`](crate::Manager::load) and [`Manager::load_into`](crate::Manager::load_into)
    /// take the lease as well, and bring the blocks further.
    ///
    /// The answer is an error of kind [`Invalid`](ErrorKind::Invalid) if the lease is of another
    /// manager's, of kind [`Stale`](ErrorKind::Stale) if a reset came in between, and of kind
    /// [`Closed`](ErrorKind::Closed) after [`Manager::close`](crate::Manager::close).
    pub fn pull(&self, lease: PeerLease) -> Transfer<Pulled> {
        let reader = Arc::clone(&self.reader);
        self.start_on_thread(async move |cancelled| reader.pull(lease, None, &cancelled).await)
    }

    /// Brings what a peer has of a chain into the host tier, and goes on while it comes to have
    /// more, as one does that computes it now. It ends with the whole chain, where the peer or the
    /// way to it fails, where there is no more room here, or where nothing more has come for the
    /// request's `patience`, which what others lease there has as well. With none, nothing is waited
    /// for.
    ///
    /// The answer is an error as [`lease`](Self::lease)'s is, if nothing came.
    pub fn follow(&self, asked: FollowRequest) -> Transfer<Pulled> {
        let reader = Arc::clone(&self.reader);
        self.start_on_thread(async move |cancelled| reader.follow(asked, &cancelled).await)
    }

    fn start_on_thread<T: Send + 'static, Work>(
        &self,
        work: impl FnOnce(CancellationToken) -> Work,
    ) -> Transfer<T>
    where
        Work: Future<Output = Result<T>> + Send + 'static,
    {
        let (told, answer) = oneshot::channel();
        let cancelled = self.reads.all.child_token();
        let work = work(cancelled.clone());
        let work = async move { drop(told.send(work.await)) };
        self.reads.under_way.spawn_on(work.in_current_span(), &self.runtime);
        Transfer::answered(answer).cancelled_by(move || cancelled.cancel())
    }

    /// Serves no worker any more. Leases of others end, and what reads at others is cancelled and
    /// answered.
    pub(crate) fn close(&self) {
        if let Some(PeerThread { stop, thread }) = self.thread.lock().take() {
            drop(stop);
            drop(thread.join());
            self.reader.forget_links();
            self.reader.end_nixl();
        }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.close();
    }
}

fn ranks_without_peers() -> Error {
    let message = "a rank is away, or serves no peers: open all ranks with the settings of their leader \
         (peers.enabled, DYN_KVBM_PEERS)";
    Error::unavailable(message)
}

/// Cuts a range into parts of `most` at most.
fn parts(of: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    of.clone().step_by(most).map(move |first| first..of.end.min(first + most))
}

/// What the thread runs on. Its tasks end with it, and what blocks a thread of its own, such as the
/// look-up of a name, is not waited for.
struct PeerRuntime(Option<Runtime>);

impl PeerRuntime {
    fn new(copy_threads: usize) -> std::io::Result<Self> {
        // Names of hosts, and files, are looked up by blocking threads, agents of NIXL made, and
        // blocks copied into an engine's slots.
        let threads = MAX_LOOKING + copy_threads;
        let mut runtime = Builder::new_current_thread();
        runtime.enable_all().max_blocking_threads(threads).thread_name("kvbm-peers-blocking");
        Ok(Self(Some(runtime.build()?)))
    }

    fn runtime(&self) -> &Runtime {
        self.0.as_ref().expect("it is there until it is dropped")
    }

    fn handle(&self) -> Handle {
        self.runtime().handle().clone()
    }
}

impl Drop for PeerRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

fn serve(
    runtime: &PeerRuntime,
    socket: tokio::net::TcpListener,
    holder: Holder,
    announcement: Option<PeerAnnouncement>,
    (stopped, reads): (oneshot::Receiver<()>, Reads),
) {
    runtime.runtime().block_on(async {
        tokio::select! {
            () = accept(socket, Arc::new(holder)) => {}
            _ = stopped => {}
        }
        if let Some(announcement) = announcement {
            announcement.withdraw().await;
        }
        reads.end().await;
    });
}

/// What reads at others.
#[derive(Clone, Default)]
struct Reads {
    under_way: TaskTracker,
    /// Cancels all of it.
    all: CancellationToken,
}

impl Reads {
    /// Ends all. What has begun to write an engine's slots says what became of them.
    async fn end(&self) {
        self.all.cancel();
        self.under_way.close();
        if timeout(MAX_END, self.under_way.wait()).await.is_err() {
            tracing::error!("reads at peers do not end: they are answered as closed");
        }
    }
}

/// Lets go of what is not used, now and then.
async fn tidy(let_go: impl Fn() + Send) {
    loop {
        tokio::time::sleep(TIDY_PAUSE).await;
        let_go();
    }
}

/// What serves those that connect.
trait Serves: Send + Sync + 'static {
    /// Until they leave. `greeted` is called once they are let in.
    fn serve(
        &self,
        stream: TcpStream,
        greeted: impl FnOnce() + Send,
    ) -> impl Future<Output = ()> + Send;

    /// One was sent away, since there are as many as there may be.
    fn is_full(&self) {}
}

async fn accept(socket: tokio::net::TcpListener, holder: Arc<impl Serves>) {
    let places = Arc::new(Semaphore::new(MAX_READERS));
    let mut strangers = Strangers::default();
    loop {
        match socket.accept().await {
            Ok((stream, _)) => {
                // Without it answers come late, no more.
                let _ = stream.set_nodelay(true);
                let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                    holder.is_full();
                    continue;
                };
                strangers.make_room();
                let (holder, is_known) = (Arc::clone(&holder), Arc::new(AtomicBool::new(false)));
                let greeted = Arc::clone(&is_known);
                let task = tokio::spawn(async move {
                    holder.serve(stream, || greeted.store(true, Ordering::Relaxed)).await;
                    drop(place);
                });
                strangers.0.push_back((task.abort_handle(), is_known));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot take a connection of a peer");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Connections that have not said yet whose they are, and whether they have.
#[derive(Default)]
struct Strangers(VecDeque<(AbortHandle, Arc<AtomicBool>)>);

impl Strangers {
    /// Silent connections keep no worker out: the oldest makes room.
    fn make_room(&mut self) {
        self.0.retain(|(task, is_known)| !task.is_finished() && !is_known.load(Ordering::Relaxed));
        while self.0.len() >= MAX_STRANGERS
            && let Some((oldest, _)) = self.0.pop_front()
        {
            oldest.abort();
        }
    }
}
