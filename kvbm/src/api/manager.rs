//! The manager: what an engine talks to.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvbm_policies::{Ended, RequestId};
use kvbm_settings::Settings;
use kvbm_tiers::ranks::Leader;
use kvbm_tiers::sealed::HostSeal;
use kvbm_tiers::{DramRegion, MediaLayer, SlotId, Tier, clock};
use prometheus::Registry;

use crate::api::admin::Admin;
use crate::api::allocation::{Allocation, Device, LentSlot};
use crate::api::background::BackgroundThreads;
use crate::api::engine_memory::EngineMemory;
use crate::api::groups::{CacheGroup, CheckpointGroups};
use crate::api::lease::{AnyLease, Lease, PinnedChains};
use crate::api::rank::RankGroup;
use crate::api::transfer::{Transfer, Transferred};
use crate::assemble::{self, SharedStore, Tenants};
use crate::clock::{Clock, SystemClock};
use crate::durable::{DurableTiers, OnDurable};
use crate::error::{Error, ErrorKind, Result};
use crate::names::epoch::NewEpoch;
use crate::names::fingerprint::Fingerprint;
use crate::names::hash::Chain;
use crate::observe::events::Events;
use crate::observe::shadow::Shadow;
use crate::observe::state::ObservedState;
use crate::peers::{HostBytes, PeerListener, Peers, no_host_tier};
use crate::scheduler::{Core, Drained};
use crate::serve::{Listener, Server};
use crate::sync::Mutex;
use crate::table::Match;
use crate::task::Class;
use crate::traces;

/// A new epoch is on the medium within this time, or it is an error.
const MAX_RESET: Duration = Duration::from_secs(30);
/// Local files are written in milliseconds: even a caller with a shorter limit waits for them.
const MIN_FLUSH: Duration = Duration::from_secs(1);
/// A close has no second chance.
const MIN_CLOSE: Duration = Duration::from_secs(5);
/// Events that wait for a receiver: some 5 MB, allocated as they come.
const MAX_EVENTS: usize = 1 << 16;

/// Keeps KV blocks in a hierarchy of tiers and gives them back.
///
/// ```
/// use kvbm::{BlockHash, Manager, Options, Tier};
/// use kvbm_settings::{Capacity, Settings};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
/// let mut settings = Settings { block_bytes: Some(4096), ..Settings::default() };
/// settings.device.capacity = Some(Capacity::Blocks(16));
/// settings.host.capacity = Some(Capacity::Blocks(64));
/// let manager = Manager::open(settings, Options::default()).await?;
///
/// // A prompt of eight blocks that no tier has: compute it in slots of the device, and save it.
/// let chain: Vec<_> = (1..=8).map(BlockHash::from_u128).collect();
/// let mut slots = manager.allocate(&chain, manager.lease(&chain))?;
/// for position in slots.blocks() {
///     slots.fill(position, |block| block.fill(position as u8));
/// }
/// let computed = slots.publish()?.await?;
/// assert_eq!(manager.save(computed.lease).await?.blocks, 8);
///
/// // It leaves the device. The next request that begins with it gets it back.
/// assert_eq!(manager.admin().evict(Tier::Device, 8), 8);
/// let loaded = manager.load(manager.lease(&chain)).await?;
/// assert_eq!((loaded.blocks, loaded.copied), (8, 8));
/// let last = manager.read_device(&loaded.lease, &chain, 7, |block| block[0]);
/// assert_eq!(last, Some(7));
/// # Ok(())
/// # })
/// # }
/// ```
///
/// For a request: [`lease`](Self::lease) its chain; [`load`](Self::load) what any tier holds onto
/// the device; [`allocate`](Self::allocate) device slots for the rest, compute,
/// [`publish`](Allocation::publish); [`save`](Self::save). Flushing to disk and objects happens by
/// itself.
pub struct Manager {
    pub(super) core: Arc<Core>,
    pub(super) device: Option<Arc<dyn Device>>,
    host: Option<Arc<DramRegion>>,
    /// Blocks lie there encrypted.
    host_seal: Option<Arc<HostSeal>>,
    pub(super) observed: Arc<ObservedState>,
    /// The HTTP server.
    pub(super) server: Mutex<Option<Server>>,
    pub(super) durable: DurableTiers,
    store: SharedStore,
    tenants: Tenants,
    background: Mutex<Option<BackgroundThreads>>,
    pinned: Arc<PinnedChains>,
    engine: Option<EngineMemory>,
    pub(super) shadow: Shadow,
    /// The cache groups other than full attention.
    checkpoints: Arc<CheckpointGroups>,
    /// Of a manager with ranks.
    leader: Option<Weak<Leader>>,
    /// Other workers.
    peers: Option<Peers>,
    /// The process that opened it.
    process: u32,
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager").field("routes", &self.observed.routes()).finish_non_exhaustive()
    }
}

impl Manager {
    /// Opens all tiers that the settings name: takes their memory, creates their files, probes
    /// their stores. For an engine with [memory of its own](Options::engine), it also copies a
    /// block down and back through the first and the last slot, and restores their bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]: a setting is wrong or does not fit; the engine's blocks are not of
    /// `block_bytes`, or the settings name a device tier beside it, or no DRAM to copy to; two
    /// cache groups have one name, a window has no block, or shares leave nothing.
    /// [`ErrorKind::Unavailable`]: memory, a directory or a store is not available; the block that
    /// came back from the engine's memory is not what went down, so its layout is not what it says;
    /// or no backend copies to it. The message names what to change.
    pub async fn open(settings: Settings, options: Options) -> Result<Self> {
        traces::check(&settings.traces)?;
        let (listener, peers) =
            (Listener::bind(&settings)?, PeerListener::bind(&settings, &options)?);
        let manager = if options.groups.is_empty() {
            Self::assemble(settings, &options, "").await?
        } else {
            Self::open_groups(settings, &options).await?
        };
        manager.with_peers(peers)?.serve(listener, &options)
    }

    /// Serves other workers, if the settings say so.
    fn with_peers(mut self, listener: Option<PeerListener>) -> Result<Self> {
        let Some(listener) = listener else { return Ok(self) };
        let host = match &self.leader {
            Some(leader) => {
                let has_tier = self.core.table().has(Tier::Host);
                has_tier.then(|| HostBytes::InRanks(Weak::clone(leader)))
            }
            None => self.host_bytes(),
        };
        let host = host.ok_or_else(no_host_tier)?;
        let peers = Peers::start(listener, &self.core, host, &self.checkpoints)?;
        self.observed.with_peers(peers.book());
        self.peers = Some(peers);
        Ok(self)
    }

    /// Starts the HTTP server, if the settings say so.
    fn serve(self, listener: Option<Listener>, options: &Options) -> Result<Self> {
        let Some(listener) = listener else { return Ok(self) };
        self.core.remember_requests();
        let server = Server::start(listener, Arc::clone(&self.observed), options.registry.clone())?;
        *self.server.lock() = Some(server);
        Ok(self)
    }

    pub(crate) async fn assemble(
        settings: Settings,
        options: &Options,
        suffix: &str,
    ) -> Result<Self> {
        let shadow = Shadow::new(settings.transfer.shadow_share);
        let observed = settings.clone();
        let assembled = assemble::open(settings, options, suffix).await?;
        assemble::export(&options.registry, &assembled.core, &observed, options.block_tokens)?;
        let device = assembled.device.as_ref().map(|device| device.name());
        let observed = ObservedState::new(
            &assembled.core,
            assembled.routes,
            device,
            observed,
            options.block_tokens,
        )
        .with_store(assembled.store.clone());
        let pinned = Arc::new(PinnedChains::default());
        let background = BackgroundThreads::start(&assembled.core, &pinned)?;
        Ok(Self {
            core: assembled.core,
            device: assembled.device,
            host: assembled.host,
            host_seal: assembled.host_seal,
            observed: Arc::new(observed),
            server: Mutex::default(),
            durable: assembled.durable,
            store: assembled.store,
            tenants: assembled.tenants,
            background: Mutex::new(Some(background)),
            pinned,
            engine: options.engine.clone(),
            shadow,
            checkpoints: Arc::default(),
            leader: assembled.leader,
            peers: None,
            process: std::process::id(),
        })
    }

    /// How many leading blocks of `chain` each tier holds, and how many of them are worth loading.
    /// It has no side effect.
    pub fn matches<'a>(&self, chain: impl Into<Chain<'a>>) -> Match {
        self.core.matches(chain.into())
    }

    /// Keeps what a lease holds in every tier where it holds it, for `ttl_ms` milliseconds or until
    /// the manager closes. The rest of its chain is not protected: [`load`](Self::load) or
    /// [`save`](Self::save) it first, and pin the answer's lease.
    ///
    /// # Errors
    /// [`ErrorKind::Full`] if too many chains are pinned; [`ErrorKind::Invalid`] if the lease is of
    /// another manager; [`ErrorKind::Stale`] if it is from before a [`reset`](Self::reset). The
    /// lease ends then.
    pub fn pin(&self, lease: Lease, ttl_ms: u64) -> Result<()> {
        let until_ms = self.core.now_ms().saturating_add(ttl_ms);
        self.pinned.add(lease, until_ms, |lease| self.core.check_lease(lease))
    }

    /// The request has ended and generated `end` tokens; a [`RequestEnd`] may say more. Policies
    /// learn the length of the answer from it; how soon a chain returns depends on that.
    pub fn finished(&self, request: RequestId, end: impl Into<RequestEnd>) {
        let RequestEnd { output_tokens, will_not_return } = end.into();
        let at_ms = self.core.now_ms();
        let ended = Ended { request, output_tokens, will_not_return, at_ms };
        self.cores().for_each(|core| core.table().finished(&ended));
    }

    /// Brings what the lease holds in any tier or at a peer onto the device. The answer's lease
    /// holds it there. It is an error of kind [`Invalid`](ErrorKind::Invalid) if the lease is of
    /// another manager, of kind [`Stale`](ErrorKind::Stale) if it is from before a
    /// [`reset`](Self::reset), and of kind [`Closed`](ErrorKind::Closed) after
    /// [`close`](Self::close).
    pub fn load(&self, lease: impl Into<AnyLease>) -> Transfer<Transferred> {
        match lease.into() {
            AnyLease::Here(lease) => self.core.transfer(Class::Load, Tier::Device, lease),
            AnyLease::AtPeer(lease) => match self.own_peers() {
                Ok(peers) => peers.load(*lease),
                Err(error) => Transfer::failed(error),
            },
        }
    }

    /// Copies what the lease holds to the uppermost tier below the device. Errors are those of
    /// [`load`](Self::load).
    pub fn save(&self, lease: Lease) -> Transfer<Transferred> {
        self.core.transfer(Class::Save, self.below_device().unwrap_or(Tier::Device), lease)
    }

    /// The uppermost tier below the device.
    pub(crate) fn below_device(&self) -> Option<Tier> {
        [Tier::Host, Tier::Disk, Tier::Object].into_iter().find(|&tier| self.core.table().has(tier))
    }

    pub(crate) const fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Those of all cache groups, full attention first.
    pub(super) fn cores(&self) -> impl Iterator<Item = &Arc<Core>> {
        std::iter::once(&self.core).chain(self.checkpoints.cores())
    }

    /// Other workers that hold blocks of the same model; `None`: the settings want none.
    pub const fn peers(&self) -> Option<&Peers> {
        self.peers.as_ref()
    }

    pub(crate) fn leader(&self) -> Result<&Weak<Leader>> {
        self.leader.as_ref().ok_or_else(|| {
            Error::invalid("there are no ranks: open the manager with Options::ranks")
        })
    }

    pub(crate) fn own_peers(&self) -> Result<&Peers> {
        self.peers.as_ref().ok_or_else(|| {
            Error::invalid("this manager has no peers: set peers.enabled (DYN_KVBM_PEERS) to true")
        })
    }

    /// What operators, tests and benches ask.
    pub const fn admin(&self) -> Admin<'_> {
        Admin(self)
    }

    pub(crate) fn checkpoints(&self) -> &CheckpointGroups {
        &self.checkpoints
    }

    /// Adds the other cache groups.
    pub(crate) fn with_checkpoints(mut self, checkpoints: CheckpointGroups) -> Self {
        checkpoints.follow(&self.core);
        self.observed.with_groups(checkpoints.cores());
        self.checkpoints = Arc::new(checkpoints);
        self
    }

    pub(crate) fn engine(&self) -> Result<&EngineMemory> {
        self.engine.as_ref().ok_or_else(|| {
            Error::invalid("there is no engine's memory: open the manager with Options::engine")
        })
    }

    /// Brings what the lease holds below `to` up to `to`, when there is nothing more urgent. What
    /// it holds above stays there: flushing brings it down. Errors are those of
    /// [`load`](Self::load).
    pub fn prefetch(&self, lease: Lease, to: Tier) -> Transfer<Transferred> {
        self.core.transfer(Class::Prefetch, to, lease)
    }

    /// Takes device slots for the blocks of `chain` that the device lacks, to be filled by the
    /// engine.
    ///
    /// # Errors
    /// [`ErrorKind::Full`] if none of them finds room: every leaf of the device is in use.
    /// [`ErrorKind::Invalid`] if there is no device tier, or the lease is of another manager or of
    /// another chain; a lease of a prefix of `chain`, or of a longer chain that begins with it,
    /// will do. [`ErrorKind::Stale`] if the lease is from before a [`reset`](Self::reset).
    pub fn allocate<'a>(&self, chain: impl Into<Chain<'a>>, lease: Lease) -> Result<Allocation> {
        let chain = chain.into();
        if self.device.is_none() {
            return Err(Error::invalid("there is no device tier: set device.capacity"));
        }
        self.core.check_lease(&lease)?;
        if self.core.is_closed() {
            return Err(Error::closed());
        }
        if !self.core.table().is_lease_of(lease.pins(), chain) {
            self.core.check_lease(&lease)?;
            return Err(Error::invalid("the lease is of another chain: lease this one"));
        }
        let reserved = self.core.reserve(Tier::Device, chain, lease.pins().context().info);
        if reserved.namespace() != lease.pins().namespace() {
            // A reset came in between: what the engine computes with old weights would count as
            // new.
            self.core.abandon(reserved);
            return Err(Error::stale());
        }
        if reserved.frames.is_empty() && reserved.refused > 0 {
            self.core.abandon(reserved);
            return Err(Error::new(ErrorKind::Full, "every block of the device tier is in use"));
        }
        Ok(Allocation {
            core: Arc::clone(&self.core),
            device: self.device.clone(),
            filled: vec![false; reserved.frames.len()],
            slots: Some((reserved, lease)),
        })
    }

    /// Shows the bytes of a block on the device: block `position` of `chain`, which `lease` holds
    /// there. `None` if it does not, it is of another manager or from before a
    /// [`reset`](Self::reset), or the GPU failed. With ranks always: each has its slice, which
    /// [`Rank::read_device`](crate::Rank::read_device) shows.
    pub fn read_device<'a, R>(
        &self,
        lease: &Lease,
        chain: impl Into<Chain<'a>>,
        position: usize,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Option<R> {
        let chain = chain.into();
        let is_held = position < lease.blocks(Tier::Device).min(chain.len());
        let device = self.device.as_ref().filter(|_| is_held)?;
        let lent =
            LentSlot::leading(&self.core, Tier::Device, lease, chain, position..position + 1);
        let (mut read, mut answer) = (Some(read), None);
        device
            .read(lent.loans().first()?, &mut |block| answer = read.take().map(|read| read(block)));
        answer
    }

    /// The device slot of block `position` of `chain`, which `lease` holds there: for engines that
    /// read it themselves, and for ranks. `None`: it is not held there, or the lease is of another
    /// manager or from before a [`reset`](Self::reset).
    pub fn device_slot<'a>(
        &self,
        lease: &Lease,
        chain: impl Into<Chain<'a>>,
        position: usize,
    ) -> Option<SlotId> {
        let chain = chain.into();
        let is_held = position < lease.blocks(Tier::Device).min(chain.len());
        let held = if is_held { position..position + 1 } else { 0..0 };
        let lent = LentSlot::leading(&self.core, Tier::Device, lease, chain, held);
        lent.loans().first().map(kvbm_tiers::Loan::slot)
    }

    /// Begins another epoch: with new weights, or to forget everything. From here on no earlier
    /// block is found in any tier. The call takes the same time however much they hold; their slots
    /// come back in the background.
    ///
    /// Work under way is discarded: transfers end with 0 blocks and a lease that holds nothing,
    /// pins end, and dirty blocks are not flushed. A lease from before the reset still keeps what
    /// it holds in place, so that an engine may finish its work; any other call with it fails with
    /// [`ErrorKind::Stale`]. A concurrent call runs before or after the reset. Stop the model from
    /// computing with old weights first: what it [allocates](Self::allocate) with a lease from
    /// after the reset counts as new.
    ///
    /// [Peers](crate::Peers) give each other blocks of an epoch in which both know the name of the
    /// weights ([`NewEpoch::of_weights`]): the numbers alone may have come together by chance.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] unless the number is greater than the present one: a caller whose
    /// change of weights went wrong must learn of it, and no epoch comes twice. Nothing has changed
    /// then.
    /// [`ErrorKind::Unavailable`]: the epoch has begun, but a tier that outlives the process could
    /// not be told within 30 s in all (of a hybrid model, within a second more for each cache
    /// group): if the process ends before it can, blocks of past epochs are found again. It is
    /// retried in the background.
    pub fn reset<'a>(&self, epoch: impl Into<NewEpoch<'a>>) -> Result<()> {
        let epoch = epoch.into();
        self.checkpoints.reset_with(&self.core, epoch)?;
        self.shadow.reset();
        self.pinned.end_past(self.core.namespace());
        let left = countdown(MAX_RESET);
        let told = self.tell_epoch(epoch.number, left());
        // All of them, even if one cannot be told: that is retried.
        self.checkpoints
            .managers()
            .map(|group| group.tell_epoch(epoch.number, left()))
            .fold(told, Result::and)
    }

    /// Tells tiers that outlive the process, and processes that share them.
    fn tell_epoch(&self, epoch: u64, limit: Duration) -> Result<()> {
        let told = self.store.begin_epoch(epoch, 0);
        self.durable.flush(limit.max(MIN_FLUSH)).and(told)
    }

    /// Forgets what a tenant stored, in every tier and for good: the blocks of requests that named
    /// it (see [`Hints::tenant`](crate::Hints)). From here on they are misses. Its copies under way
    /// are discarded, the keys of its blocks are destroyed, and after a restart none of its blocks
    /// are there. Current readers of its blocks may finish. The tenant may come back, with new
    /// blocks and a new key. Other tenants' blocks stay, unless they hang on one of its blocks: a
    /// shared prefix belongs to the tenant that stored it first, and goes with it. No prefix is
    /// shared if each tenant has its own salt in the hashes
    /// ([`ChainHasher::for_tenant`](crate::ChainHasher::for_tenant)). docs/security.md says what
    /// copies others may have.
    ///
    /// Takes time in proportion to what the tiers hold, in steps between which other calls use
    /// them.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]: a tier outlives the process and does not record tenants, since it is
    /// not encrypted. Nothing has changed then. [`ErrorKind::Unavailable`]: none of its blocks are
    /// found here any more, but a key may be left on a medium, or in a rank that is away or does
    /// not encrypt, which the message names: try again. A rank that was away is told when it joins
    /// this manager again. One that starts after this manager's end is not told: call it again
    /// then.
    pub fn forget(&self, tenant: u32) -> Result<()> {
        let managers = || std::iter::once(self).chain(self.checkpoints.managers());
        managers().try_for_each(|manager| manager.tenants.check())?;
        // All of them, even if one cannot be told.
        managers().map(|manager| manager.forget_in_group(tenant)).fold(Ok(()), Result::and)
    }

    fn forget_in_group(&self, tenant: u32) -> Result<()> {
        let life = self.core.forget(tenant);
        self.tenants.begin_forgetting(tenant, life);
        self.store.forget_tenant(tenant, life);
        let destroyed = self.tenants.destroy_keys(tenant, life);
        destroyed.and(self.durable.flush(MAX_RESET))
    }

    /// Flushes all dirty blocks and waits until nothing is in flight, at most for `limit`. Tells
    /// what was not flushed: it waits for a tier that is away until then, unless the manager is
    /// closed. The next process finds what reached a tier that outlives this one.
    pub fn drain(&self, limit: Duration) -> Drained {
        let left = countdown(limit);
        let drained = self.core.drain(limit);
        if let Err(error) = self.durable.flush(left().max(MIN_FLUSH)) {
            tracing::error!(%error, "what was drained may not be found after a restart");
        }
        self.checkpoints.managers().map(|group| group.drain(left())).fold(drained, Drained::and)
    }

    /// Blocks that come to the tiers and leave them from here on. Up to 65,536 events wait for each
    /// receiver; a slower one loses the oldest. Without a receiver this costs nothing.
    pub fn events(&self) -> Events {
        self.core.table().listen(MAX_EVENTS)
    }

    /// What moves blocks, and the host tier's memory; `None`: there is no such tier.
    pub(crate) fn host_tier(&self) -> Option<(&Arc<Core>, &Arc<DramRegion>)> {
        // The memory may be there without the tier, for blocks that bounce through it.
        let memory = self.host.as_ref().filter(|_| self.core.table().has(Tier::Host))?;
        Some((&self.core, memory))
    }

    /// Whether blocks lie encrypted in the host tier, so that they cannot be shown there.
    pub(crate) fn is_host_sealed(&self) -> bool {
        self.host_seal.as_ref().is_some_and(|seal| seal.is_of_memory())
    }

    /// The host tier in this process, as peers read and fill it.
    pub(crate) fn host_bytes(&self) -> Option<HostBytes> {
        let (_, memory) = self.host_tier()?;
        Some(HostBytes::Here(Arc::clone(memory), self.host_seal.clone()))
    }

    /// Stops everything: background work ends, queued copies are dropped, and every [`Transfer`]
    /// gets its answer soon. Later calls fail with [`ErrorKind::Closed`]. It waits for copies that
    /// a medium works on, at most for `limit`; they end by themselves and keep their memory until
    /// then. Only when none is left may another process use the tiers' files and objects. The
    /// indices of tiers that outlive the process are written by then, even if `limit` is shorter,
    /// within 5 s (of a hybrid model, within a second more for each cache group).
    pub fn close(&self, limit: Duration) -> Closing {
        let (left, left_to_write) = (countdown(limit), countdown(limit.max(MIN_CLOSE)));
        self.close_within(&left, &left_to_write)
    }

    fn close_within(
        &self,
        left: &dyn Fn() -> Duration,
        left_to_write: &dyn Fn() -> Duration,
    ) -> Closing {
        drop(self.background.lock().take());
        self.peers.iter().for_each(Peers::close);
        self.core.close();
        self.pinned.clear();
        let copies_left = self.core.wait_for_media(left());
        self.durable.close(left_to_write().max(MIN_FLUSH));
        let of_groups = self
            .checkpoints
            .managers()
            .map(|group| group.close_within(left, left_to_write).copies_left);
        let copies_left = copies_left + of_groups.sum::<u64>();
        // Last: until here it reports that it is closed, and what it still waits for.
        *self.server.lock() = None;
        Closing { copies_left }
    }
}

impl Drop for Manager {
    /// In a forked child the parent's threads do not exist, and what they share is still the
    /// parent's.
    fn drop(&mut self) {
        if self.process == std::process::id() {
            let _ = self.close(Duration::ZERO);
        } else {
            std::mem::forget(self.background.lock().take());
            std::mem::forget(self.peers.take());
            let _server = std::mem::ManuallyDrop::new(self.server.lock().take());
            self.durable.abandon();
        }
    }
}

/// What is left of `limit` from now on.
fn countdown(limit: Duration) -> impl Fn() -> Duration {
    // None: the deadline overflows.
    let deadline = clock::now().checked_add(limit);
    move || deadline.map_or(limit, |deadline| deadline.saturating_duration_since(clock::now()))
}

/// How a request ended. A number alone is that of its tokens.
#[derive(Clone, Copy, Debug)]
pub struct RequestEnd {
    /// Tokens that it generated.
    pub output_tokens: u32,
    /// No request will continue it: what only it used may leave first. An engine knows that best at
    /// the end; [`Hints::will_not_return`](crate::Hints) says it earlier.
    pub will_not_return: bool,
}

impl From<u32> for RequestEnd {
    fn from(output_tokens: u32) -> Self {
        Self { output_tokens, will_not_return: false }
    }
}

/// What a [`Manager::close`] left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Closing {
    /// Copies that a medium still works on.
    pub copies_left: u64,
}

impl Closing {
    /// Whether nothing touches the tiers any more.
    pub const fn is_complete(self) -> bool {
        self.copies_left == 0
    }
}

/// What a manager is opened with besides its settings.
#[derive(Debug)]
pub struct Options {
    /// Where its metrics are registered.
    pub registry: Registry,
    /// Time for policies and flushing.
    pub clock: Arc<dyn Clock>,
    /// Tokens in a block, for metrics.
    pub block_tokens: u64,
    /// An engine's own memory, in place of a device tier: [saves from](crate::Manager::save_from)
    /// and [loads into](crate::Manager::load_into) its slots take blocks from there and bring them.
    pub engine: Option<EngineMemory>,
    /// Of a hybrid model: the engine's layers that do not keep every block, each group with its
    /// memory; those of `engine` do. Tier sizes in bytes are for all groups together. Sizes in
    /// blocks are of full attention, and the other groups get theirs in addition.
    pub groups: Vec<CacheGroup>,
    /// What the bytes of its blocks depend on besides tokens. Blocks of different fingerprints
    /// share neither names nor files nor objects. `None`: the caller keeps them apart.
    pub fingerprint: Option<Fingerprint>,
    /// The processes whose memory, files and objects the tiers are; `None`: those of this process.
    pub ranks: Option<RankGroup>,
    /// Called with what has become durable in tiers that outlive the process.
    pub on_durable: Option<OnDurable>,
    /// Stands around the media of all tiers: injects faults, for tests.
    pub media_layer: Option<Arc<dyn MediaLayer>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            registry: Registry::new(),
            clock: Arc::new(SystemClock::default()),
            block_tokens: 16,
            engine: None,
            groups: Vec::new(),
            fingerprint: None,
            ranks: None,
            on_durable: None,
            media_layer: None,
        }
    }
}

/// A row of the routing table.
#[derive(Clone, Debug, serde::Serialize)]
pub struct RouteReport {
    /// Source tier.
    pub from: Tier,
    /// Destination tier.
    pub to: Tier,
    /// The backend's name, or `via host`.
    pub backend: String,
}
