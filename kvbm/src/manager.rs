//! The manager: what an engine talks to.

use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use kvbm_policies::{Ended, RequestId};
use kvbm_settings::Settings;
use kvbm_tiers::{DramRegion, Frame, SlotId, Tier, clock};

use crate::assemble::{self, SharedStore, Tenants};
use crate::checkpoints::CheckpointGroups;
use crate::device::{Device, LentSlot};
use crate::durable::{DurableTiers, RecoveryReport};
use crate::engine_memory::EngineMemory;
use crate::error::{Error, ErrorKind, Result};
use crate::events::Events;
use crate::hash::Chain;
use crate::lease::Lease;
use crate::options::{Options, RouteReport};
use crate::pinned::PinnedChains;
use crate::scheduler::{Core, Drained, StagingCounts};
use crate::serve::{Listener, Server};
use crate::shadow::{self, Elements, Shadow, ShadowCounts, ShadowSample, ShadowVerdict};
use crate::state::{ObservedState, Readiness, State, Why};
use crate::sync::{JoinHandle, Mutex, spawn};
use crate::table::{Match, RequestInfo, Reserved, SlotCounts, TierStats, Violation};
use crate::task::Class;
use crate::traces;
use crate::transfer::{Transfer, Transferred};

/// A new epoch is on the medium within this time, or it is an error.
const MAX_RESET: Duration = Duration::from_secs(30);
/// Local files are written in milliseconds: whoever has no patience still waits for them.
const MIN_SETTLE: Duration = Duration::from_secs(1);
/// A close has no second chance.
const MIN_CLOSE: Duration = Duration::from_secs(5);
/// So many events wait for a receiver: some 5 MB, taken as they come.
const MAX_EVENTS: usize = 1 << 16;

/// Keeps KV blocks in a hierarchy of tiers and gives them back.
///
/// A request goes: [`lease`](Self::lease) its chain; [`load`](Self::load) what is held somewhere onto the
/// device; [`allocate`](Self::allocate) device slots for the rest, compute, [`publish`](Allocation::publish);
/// [`save`](Self::save). Flushing to disk and objects happens by itself.
pub struct Manager {
    core: Arc<Core>,
    device: Option<Arc<dyn Device>>,
    host: Option<Arc<DramRegion>>,
    /// Blocks lie there encrypted.
    is_host_sealed: bool,
    observed: Arc<ObservedState>,
    /// Answers whoever asks.
    server: Mutex<Option<Server>>,
    durable: DurableTiers,
    store: SharedStore,
    tenants: Tenants,
    background: Mutex<Option<BackgroundThreads>>,
    pinned: Arc<PinnedChains>,
    engine: Option<EngineMemory>,
    shadow: Shadow,
    /// The groups of layers beside those that keep every block.
    checkpoints: CheckpointGroups,
    /// The one that opened it.
    process: u32,
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager").field("routes", &self.routes()).finish_non_exhaustive()
    }
}

impl Manager {
    /// Opens all tiers that the settings name: takes their memory, creates their files, probes their stores.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]: a setting is wrong or does not fit. [`ErrorKind::Unavailable`]: memory, a
    /// directory or a store cannot be had. The message names the setting to change.
    pub async fn open(settings: Settings, options: Options) -> Result<Self> {
        traces::check(&settings.traces)?;
        let listener = Listener::bind(&settings)?;
        let manager = Self::assemble(settings, &options, None, "").await?;
        manager.serve(listener, &options)
    }

    /// [`open`](Self::open), beside an engine with memory of its own: [`save_from`](Self::save_from) and
    /// [`load_into`](Self::load_into) copy between its slots and the tiers. A block goes down and comes back before this
    /// returns, through the first and the last slot, whose bytes are as before then.
    ///
    /// # Errors
    /// Those of [`open`](Self::open). [`ErrorKind::Invalid`] too: its blocks are not of `block_bytes`, the settings name a
    /// device tier, or no DRAM to copy to. [`ErrorKind::Unavailable`]: what came back is not what went down, so its layout
    /// is not what it says; or nothing here copies to its memory.
    pub async fn open_with(settings: Settings, options: Options, memory: EngineMemory) -> Result<Self> {
        traces::check(&settings.traces)?;
        let listener = Listener::bind(&settings)?;
        let manager = Self::assemble(settings, &options, Some(memory), "").await?;
        manager.serve(listener, &options)
    }

    /// Answers whoever asks, if the settings say so.
    pub(crate) fn serve(self, listener: Option<Listener>, options: &Options) -> Result<Self> {
        let Some(listener) = listener else { return Ok(self) };
        self.observed.remember_requests();
        let server = Server::start(listener, Arc::clone(&self.observed), options.registry.clone())?;
        *self.server.lock() = Some(server);
        Ok(self)
    }

    pub(crate) async fn assemble(
        settings: Settings,
        options: &Options,
        engine: Option<EngineMemory>,
        suffix: &str,
    ) -> Result<Self> {
        let shadow = Shadow::new(settings.transfer.shadow_share);
        let observed = settings.clone();
        let assembled = assemble::open(settings, options, engine.clone(), suffix).await?;
        assemble::export(&options.registry, &assembled.core, (&observed, options.block_tokens))?;
        let device = assembled.device.as_ref().map(|device| device.name());
        let observed =
            ObservedState::new(&assembled.core, assembled.routes, device, observed, options.block_tokens)
                .with_store(assembled.store.clone());
        let pinned = Arc::new(PinnedChains::default());
        let background = BackgroundThreads::start(&assembled.core, &pinned)?;
        Ok(Self {
            core: assembled.core,
            device: assembled.device,
            host: assembled.host,
            is_host_sealed: assembled.is_host_sealed,
            observed: Arc::new(observed),
            server: Mutex::default(),
            durable: assembled.durable,
            store: assembled.store,
            tenants: assembled.tenants,
            background: Mutex::new(Some(background)),
            pinned,
            engine,
            shadow,
            checkpoints: CheckpointGroups::default(),
            process: std::process::id(),
        })
    }

    /// How many leading blocks of `chain` each tier holds, and how many of them are worth loading. No side
    /// effect.
    pub fn matches<'a>(&self, chain: impl Into<Chain<'a>>) -> Match {
        self.core.matches(chain.into())
    }

    /// Pins the leading blocks of `chain` in every tier that holds any, and counts as their use by a request of
    /// which nothing else is known.
    pub fn lease<'a>(&self, chain: impl Into<Chain<'a>>) -> Lease {
        self.lease_for(RequestInfo::default(), chain)
    }

    /// [`lease`](Self::lease), for a request that the engine names or describes. Whatever is done with the lease
    /// counts as its doing.
    pub fn lease_for<'a>(&self, info: RequestInfo, chain: impl Into<Chain<'a>>) -> Lease {
        self.core.lease(chain.into(), info)
    }

    /// [`lease_for`](Self::lease_for), for a request that has leased before, to load what it found or at its end. It uses the
    /// chain as it is now, and neither metrics nor the curve of hit rates take it for another request.
    pub fn lease_again<'a>(&self, info: RequestInfo, chain: impl Into<Chain<'a>>) -> Lease {
        self.core.lease_uncounted(chain.into(), info)
    }

    /// Keeps what a lease holds where it is, in every tier that it holds it in, for `ttl_ms` milliseconds or until
    /// the manager closes. The rest of its chain is not protected: [`load`](Self::load) or [`save`](Self::save) it
    /// first, and pin the answer's lease.
    ///
    /// # Errors
    /// [`ErrorKind::Full`] if too many chains are pinned; [`ErrorKind::Invalid`] if the lease is of another manager;
    /// [`ErrorKind::Stale`] if it is from before a [`reset`](Self::reset). The lease ends then.
    pub fn pin(&self, lease: Lease, ttl_ms: u64) -> Result<()> {
        let until_ms = self.core.now_ms().saturating_add(ttl_ms);
        self.pinned.add(lease, until_ms, |lease| self.core.check_lease(lease))
    }

    /// The request has ended and generated `output_tokens`. Policies learn from it how long an answer it was;
    /// how soon a chain returns depends on that.
    pub fn finished(&self, request: RequestId, output_tokens: u32) {
        self.end(request, output_tokens, false);
    }

    /// [`finished`](Self::finished), and nobody will continue the request: what only it used may leave first. The end is
    /// when an engine knows that best; [`Hints::will_not_return`](crate::Hints) says it earlier.
    pub fn finished_for_good(&self, request: RequestId, output_tokens: u32) {
        self.end(request, output_tokens, true);
    }

    fn end(&self, request: RequestId, output_tokens: u32, will_not_return: bool) {
        let at_ms = self.core.now_ms();
        let ended = Ended { request, output_tokens, will_not_return, at_ms };
        self.cores().for_each(|core| core.table().finished(&ended));
    }

    /// Brings what the lease holds in any tier onto the device. The answer's lease holds it there. It is an error of kind
    /// [`Invalid`](ErrorKind::Invalid) if the lease is of another manager, of kind [`Stale`](ErrorKind::Stale) if it is from
    /// before a [`reset`](Self::reset), and of kind [`Closed`](ErrorKind::Closed) after [`close`](Self::close).
    pub fn load(&self, lease: Lease) -> Transfer<Transferred> {
        self.core.transfer(Class::Load, Tier::Device, lease)
    }

    /// Copies what the lease holds to the uppermost tier below the device. Errors are those of [`load`](Self::load).
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

    /// Of all cache groups, that of full attention first.
    fn cores(&self) -> impl Iterator<Item = &Arc<Core>> {
        std::iter::once(&self.core).chain(self.checkpoints.cores())
    }

    pub(crate) const fn checkpoints(&self) -> &CheckpointGroups {
        &self.checkpoints
    }

    /// With other cache groups beside it.
    pub(crate) fn with_checkpoints(mut self, checkpoints: CheckpointGroups) -> Self {
        checkpoints.follow(&self.core);
        self.checkpoints = checkpoints;
        self
    }

    pub(crate) fn engine(&self) -> Result<&EngineMemory> {
        self.engine.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::Invalid, "there is no engine's memory: open the manager with open_with")
        })
    }

    /// Brings what the lease holds further down up to `to`, when nothing more urgent is to be done. What it holds above stays
    /// there: it goes down by the rules of flushing. Errors are those of [`load`](Self::load).
    pub fn prefetch(&self, lease: Lease, to: Tier) -> Transfer<Transferred> {
        self.core.transfer(Class::Prefetch, to, lease)
    }

    /// Takes device slots for the blocks of `chain` that the device lacks, to be filled by the engine.
    ///
    /// # Errors
    /// [`ErrorKind::Full`] if not one of them finds room: every leaf of the device is in use. [`ErrorKind::Invalid`] if
    /// there is no device tier, or the lease is of another manager or of another chain; one of a beginning of `chain`,
    /// or of a longer chain that begins with it, will do. [`ErrorKind::Stale`] if the lease is from before a
    /// [`reset`](Self::reset).
    pub fn allocate<'a>(&self, chain: impl Into<Chain<'a>>, lease: Lease) -> Result<Allocation> {
        let chain = chain.into();
        if self.device.is_none() {
            return Err(Error::new(ErrorKind::Invalid, "there is no device tier: set device.capacity"));
        }
        self.core.check_lease(&lease)?;
        if self.core.is_closed() {
            return Err(Error::closed());
        }
        if !self.core.table().is_lease_of(lease.pins(), chain) {
            self.core.check_lease(&lease)?;
            return Err(Error::new(ErrorKind::Invalid, "the lease is of another chain: lease this one"));
        }
        let reserved = self.core.reserve(Tier::Device, chain, lease.pins().context().info);
        if reserved.namespace() != lease.pins().namespace() {
            // A reset came in between: what the engine is about to compute would be taken for what it computes now.
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

    /// Shows the bytes of a block on the device: block `position` of `chain`, which `lease` holds there. `None` if
    /// it does not, it is of another manager or from before a [`reset`](Self::reset), or the GPU failed. With ranks always:
    /// each has its slice, which [`Rank::read_device`](crate::Rank::read_device) shows.
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
        let lent = LentSlot::leading(&self.core, Tier::Device, lease, chain, position..position + 1);
        let (mut read, mut answer) = (Some(read), None);
        device.read(lent.loans().first()?, &mut |block| answer = read.take().map(|read| read(block)));
        answer
    }

    /// In which slot of the device the block `position` of `chain` is, which `lease` holds there: for engines that read
    /// it themselves, and for ranks. `None`: it is not held there, or the lease is of another manager or from before a
    /// [`reset`](Self::reset).
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

    /// Begins another epoch: with new weights, or to forget all. From here on no block is found that was there before,
    /// in any tier; the call takes the same time whatever they hold, and their slots come back in the background.
    ///
    /// What is under way lands nowhere: transfers end with 0 blocks and a lease that holds nothing, pins end, and what
    /// was to be flushed is not. A lease from before still keeps what it holds where it is, so that an engine may end
    /// what it is doing; whoever asks something else with it is told [`ErrorKind::Stale`]. To a call that is made
    /// meanwhile the reset comes before or after. Stop a model from computing with old weights before: what it
    /// [allocates](Self::allocate) with a lease from after the reset is taken for new.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] unless `epoch` is greater than the present one: whoever meant to exchange the weights and
    /// did not must learn it, and no epoch comes twice. Nothing has changed then.
    /// [`ErrorKind::Unavailable`]: the epoch has begun, but a tier that outlives the process could not be told within 30 s
    /// in all (of a hybrid model, within a second more for each cache group): if the process ends before it can, blocks of
    /// past epochs are found again. It is tried again in the background.
    pub fn reset(&self, epoch: u64) -> Result<()> {
        self.checkpoints.reset_with(&self.core, epoch)?;
        self.shadow.reset();
        self.pinned.end_past(self.core.namespace());
        let left = countdown(MAX_RESET);
        let settled = self.tell_epoch(epoch, left());
        // All, also where one cannot be told: that is tried again.
        self.checkpoints.managers().map(|group| group.tell_epoch(epoch, left())).fold(settled, Result::and)
    }

    /// Tells tiers that outlive the process, and those who share them.
    fn tell_epoch(&self, epoch: u64, limit: Duration) -> Result<()> {
        let told = self.store.begin_epoch(epoch, 0);
        self.durable.settle(limit.max(MIN_SETTLE)).and(told)
    }

    /// Forgets what a tenant stored, in every tier and for good: what requests brought that named him (see
    /// [`Hints::tenant`](crate::Hints)). From here on it is a miss. What of it is under way lands nowhere, the keys that
    /// his blocks are encrypted with are destroyed, and after a restart nothing of it is there. Who reads a block of his now may
    /// end that. He may come back, with new blocks and a new key. Other tenants' blocks stay, unless they hang on one of his:
    /// a prefix that tenants share is the one's who brought it first, and goes with him; where each has a salt of his own in the hashes
    /// ([`ChainHasher::for_tenant`](crate::ChainHasher::for_tenant)) there are none. docs/security.md says what copies others may
    /// have.
    ///
    /// Takes time in proportion to what the tiers hold, in steps between which others use them.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]: something outlives the process and does not say whose it is, since it is not encrypted. Nothing
    /// has changed then. [`ErrorKind::Unavailable`]: nothing of him is found here any more, but a key of his may be left on a
    /// medium, or in a rank that is away or does not encrypt, which the message names: try again. A rank that was away is told
    /// when it joins this manager again; of one that is started after this manager's end nobody knows: call it again then.
    pub fn forget(&self, tenant: u32) -> Result<()> {
        let managers = || std::iter::once(self).chain(self.checkpoints.managers());
        managers().try_for_each(|manager| manager.tenants.check())?;
        // All, also where one cannot be told.
        managers().map(|manager| manager.forget_in_group(tenant)).fold(Ok(()), Result::and)
    }

    fn forget_in_group(&self, tenant: u32) -> Result<()> {
        let life = self.core.forget(tenant);
        self.tenants.begin_forgetting(tenant, life);
        self.store.forget_tenant(tenant, life);
        let destroyed = self.tenants.destroy_keys(tenant, life);
        destroyed.and(self.durable.settle(MAX_RESET))
    }

    /// The present epoch: that of the [fingerprint](Options::fingerprint), or 0, until the first [`reset`](Self::reset).
    pub fn epoch(&self) -> u64 {
        self.core.table().epoch()
    }

    /// Sets the flushing clock's consequences in motion: call it after a manual clock was moved.
    pub fn tick(&self) {
        self.cores().for_each(|core| core.wake());
    }

    /// Flushes everything dirty and waits until nothing is in flight, at most for `limit`. Tells what did not get
    /// there: a tier that is away is waited for until then, but not once the manager is closed. What did get to a tier that
    /// outlives the process is found by the next one.
    pub fn drain(&self, limit: Duration) -> Drained {
        let left = countdown(limit);
        let drained = self.core.drain(limit);
        if let Err(error) = self.durable.settle(left().max(MIN_SETTLE)) {
            tracing::error!(%error, "what was drained may not be found after a restart");
        }
        self.checkpoints.managers().map(|group| group.drain(left())).fold(drained, Drained::and)
    }

    /// What was found at the start of tiers that an earlier process left.
    pub fn recovered(&self) -> &[RecoveryReport] {
        self.durable.reports()
    }

    /// Lets up to `blocks` blocks of `tier` go, in the order of its policy; returns how many could. What is
    /// leased stays, and what is still to be flushed, unless the tier below cannot be written now.
    pub fn evict(&self, tier: Tier, blocks: usize) -> usize {
        self.core.evict(tier, blocks)
    }

    /// What comes to the tiers and leaves them from here on. For each receiver up to 65,536 events wait; one that is
    /// slower loses the oldest. Where nobody listens nothing is paid for it.
    pub fn events(&self) -> Events {
        self.core.table().listen(MAX_EVENTS)
    }

    /// Occupancy of a tier.
    pub fn counts(&self, tier: Tier) -> SlotCounts {
        self.core.table().counts(tier)
    }

    /// Copies that are overdue now: their media completed nothing for too long, and nobody waits for them any more.
    /// Each holds the slot that it writes, and one that bounces also the slot that it bounces through.
    pub fn overdue(&self) -> u64 {
        self.cores().map(|core| core.overdue_in_all()).sum()
    }

    /// Occupancy of the DRAM slots through which blocks bounce between tiers that nothing connects.
    pub fn staging(&self) -> StagingCounts {
        self.core.staging()
    }

    /// Counts of a tier since the start.
    pub fn stats(&self, tier: Tier) -> TierStats {
        self.core.table().stats(tier)
    }

    /// Which hits of a lease the engine is asked to compute again, for [`shadow_compare`](Self::shadow_compare): the share
    /// `transfer.shadow_share` of all blocks that a tier below the device has for it, none unless that is set.
    pub fn shadow_sample(&self, lease: &Lease) -> Vec<ShadowSample> {
        let held = lease.held();
        let below = held.plan().filter(|(tier, _)| *tier > Tier::Device);
        let hits = below.flat_map(|(tier, range)| range.map(move |position| ShadowSample { position, tier }));
        hits.filter(|_| self.shadow.chooses()).collect()
    }

    /// Compares a block that was served with what the engine computed for the same tokens, both as they lie in its
    /// memory. One that is further off than two computations are ([`Elements::tolerance`]) leaves every tier with what
    /// followed it. A tier of which more than one block in a thousand is wrong, with a confidence of 95 %, neither gives nor
    /// takes anything any more until the next [`reset`](Self::reset).
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]: these are no two computations of one block.
    pub fn shadow_compare<'a>(
        &self,
        chain: impl Into<Chain<'a>>,
        sample: &ShadowSample,
        elements: Elements,
        (served, recomputed): (&[u8], &[u8]),
    ) -> Result<ShadowVerdict> {
        let (chain, tier) = (chain.into(), sample.tier);
        if sample.position >= chain.len() {
            return Err(Error::new(ErrorKind::Invalid, "the sample is of a longer chain: give that one"));
        }
        let verdict = shadow::compare(elements, served, recomputed)?;
        let wrong = match verdict {
            ShadowVerdict::Same => None,
            ShadowVerdict::Wrong { distance } => Some(distance),
        };
        let (counts, is_guilty) = self.shadow.note(tier, wrong.is_some());
        self.core.metrics().shadowed(tier, wrong.is_some(), counts.upper_bound());
        if let Some(distance) = wrong {
            tracing::error!(%tier, distance, "a block is not what its name says: it is dropped");
            self.core.drop_wrong(chain, sample.position);
        }
        if is_guilty {
            tracing::error!(%tier, ?counts, "too many blocks of a tier are wrong: it gives nothing any more");
            self.core.withdraw(tier);
        }
        Ok(verdict)
    }

    /// What was compared of a tier's blocks since the last [`reset`](Self::reset).
    pub fn shadow_counts(&self, tier: Tier) -> ShadowCounts {
        self.shadow.counts(tier)
    }

    /// What share of the blocks requested lately a tier of `capacity` blocks would have held, 0 to 1, had it
    /// evicted the least recently used ones: an estimate on a sample of the requests.
    pub fn estimated_hit_rate(&self, capacity: u32) -> f64 {
        self.core.estimated_hit_rate(capacity)
    }

    /// Bytes copied on each route so far, where any were.
    pub fn bytes(&self) -> Vec<(Tier, Tier, u64)> {
        let routes = Tier::ALL.into_iter().flat_map(|from| Tier::ALL.map(|to| (from, to)));
        let bytes_of = |route| self.cores().map(|core| core.metrics().bytes(route)).sum();
        let bytes = routes.map(|(from, to)| (from, to, bytes_of((from, to))));
        bytes.filter(|&(.., bytes)| bytes > 0).collect()
    }

    /// Copies that failed so far.
    pub fn failures(&self) -> u64 {
        let routes = Tier::ALL.into_iter().flat_map(|from| Tier::ALL.map(|to| (from, to)));
        routes.flat_map(|route| self.cores().map(move |core| core.metrics().failures(route))).sum()
    }

    /// Whose memory the device tier is: `emulated` (the host's) or `cuda`; `None`: there is no such tier.
    pub fn device(&self) -> Option<&'static str> {
        self.device.as_ref().map(|device| device.name())
    }

    /// What moves blocks, and the host tier's memory; `None`: there is no such tier.
    pub(crate) fn host_tier(&self) -> Option<(&Arc<Core>, &Arc<DramRegion>)> {
        // Without the tier the memory may be there all the same, for blocks that bounce through it.
        let memory = self.host.as_ref().filter(|_| self.core.table().has(Tier::Host))?;
        Some((&self.core, memory))
    }

    /// Whether blocks lie encrypted in the host tier, so that nobody can be shown them there.
    pub(crate) const fn is_host_sealed(&self) -> bool {
        self.is_host_sealed
    }

    /// The routing table: which backend moves blocks from where to where.
    pub fn routes(&self) -> &[RouteReport] {
        self.observed.routes()
    }

    /// Its state at a glance. Of a hybrid model, that of full attention.
    pub fn state(&self) -> State {
        self.observed.state().expect("the manager holds what is observed")
    }

    /// Whether it is of use, and what of it is degraded.
    pub fn readiness(&self) -> Readiness {
        self.observed.readiness()
    }

    /// How much of `chain` is where, and why it is not more. No side effect.
    pub fn why<'a>(&self, chain: impl Into<Chain<'a>>) -> Why {
        self.observed.why(chain.into()).expect("the manager holds what is observed")
    }

    /// What a request found when it asked last; `None`: it is not among those of late, or requests are not remembered
    /// (they are from [`remember_requests`](Self::remember_requests) on).
    pub fn why_of(&self, request: RequestId) -> Option<Why> {
        self.observed.why_of(request)
    }

    /// Remembers what requests find from here on, the last 4,096 of them. Whoever is served does so anyway
    /// (`metrics.enabled`).
    pub fn remember_requests(&self) {
        self.observed.remember_requests();
    }

    /// Where it answers whoever asks; `None`: it is not to (`metrics.enabled`).
    pub fn serving_at(&self) -> Option<SocketAddr> {
        self.server.lock().as_ref().map(Server::address)
    }

    /// Every invariant of the table that does not hold, and whether the audit in the background found one broken lately.
    /// Linear in the number of blocks.
    pub fn audit(&self) -> Vec<Violation> {
        self.cores().flat_map(|core| violations(core)).collect()
    }

    /// Stops everything: background work ends, what waits for its turn is not copied, and every [`Transfer`] has its
    /// answer soon. What is asked for afterwards is refused as [`ErrorKind::Closed`]. Copies that a medium works on are
    /// waited for, at most for `limit`; they end by themselves and keep their memory until then. Only when none is left
    /// may somebody else use the tiers' files and objects. What tiers that outlive the process hold is on their media then:
    /// what they have is written down whatever the `limit`, within 5 s if that is shorter (of a hybrid model, within a second
    /// more for each cache group).
    pub fn close(&self, limit: Duration) -> Closing {
        let (left, left_to_write) = (countdown(limit), countdown(limit.max(MIN_CLOSE)));
        self.close_within(&left, &left_to_write)
    }

    fn close_within(&self, left: &dyn Fn() -> Duration, left_to_write: &dyn Fn() -> Duration) -> Closing {
        drop(self.background.lock().take());
        self.core.close();
        self.pinned.clear();
        let copies_left = self.core.wait_for_media(left());
        self.durable.close(left_to_write().max(MIN_SETTLE));
        let of_groups =
            self.checkpoints.managers().map(|group| group.close_within(left, left_to_write).copies_left);
        let copies_left = copies_left + of_groups.sum::<u64>();
        // Last: until here it says that it is closed, and what is still to be waited for.
        *self.server.lock() = None;
        Closing { copies_left }
    }
}

impl Drop for Manager {
    /// In a forked child the parent's threads are not there to end, and what they share is the parent's still.
    fn drop(&mut self) {
        if self.process == std::process::id() {
            let _ = self.close(Duration::ZERO);
        } else {
            std::mem::forget(self.background.lock().take());
            let _server = std::mem::ManuallyDrop::new(self.server.lock().take());
            self.durable.abandon();
        }
    }
}

fn violations(core: &Core) -> Vec<Violation> {
    let mut violations = core.table().audit();
    let drift = core.accounting_drift();
    if drift > 0 {
        violations.push(Violation(format!("the audit in the background found {drift} (the log has them)")));
    }
    violations
}

/// What is left of `limit` from now on.
fn countdown(limit: Duration) -> impl Fn() -> Duration {
    // None: beyond the end of time.
    let deadline = clock::now().checked_add(limit);
    move || deadline.map_or(limit, |deadline| deadline.saturating_duration_since(clock::now()))
}

/// What a [`Manager::close`] left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Closing {
    /// Copies that a medium still works on.
    pub copies_left: u64,
}

impl Closing {
    /// Whether nobody touches the tiers any more.
    pub const fn is_complete(self) -> bool {
        self.copies_left == 0
    }
}

/// Device slots that an engine fills, block by block, before it publishes them.
#[must_use = "dropping an allocation gives its slots back"]
pub struct Allocation {
    core: Arc<Core>,
    device: Option<Arc<dyn Device>>,
    /// Until it is published.
    slots: Option<(Reserved, Lease)>,
    /// Which of the blocks have their bytes.
    filled: Vec<bool>,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation").field("blocks", &self.blocks()).finish_non_exhaustive()
    }
}

impl Allocation {
    /// Positions in the chain of the blocks to fill.
    pub fn blocks(&self) -> Range<usize> {
        let before = self.reserved(|reserved| reserved.before);
        before..before + self.filled.len()
    }

    /// Blocks before these that another request is filling or loading.
    pub fn in_flight(&self) -> usize {
        self.reserved(|reserved| reserved.in_flight)
    }

    /// Blocks at the end of the chain that found no room.
    pub fn refused(&self) -> usize {
        self.reserved(|reserved| reserved.refused)
    }

    fn reserved(&self, count: impl Fn(&Reserved) -> usize) -> usize {
        self.slots.as_ref().map_or(0, |(reserved, _)| count(reserved))
    }

    /// The slot of the device for block `position`: for engines that write it themselves, and for ranks. `None`: it is
    /// not among [`blocks`](Self::blocks).
    pub fn slot(&self, position: usize) -> Option<SlotId> {
        let place = position.checked_sub(self.blocks().start)?;
        let (reserved, _) = self.slots.as_ref()?;
        reserved.frames.get(place).map(Frame::slot)
    }

    /// Lets `fill` write block `position` into its slot. False: it is not among [`blocks`](Self::blocks), or the GPU
    /// failed. With ranks always: [`Rank::fill_device`](crate::Rank::fill_device) writes their slices, and
    /// [`mark_filled`](Self::mark_filled) says so.
    pub fn fill(&mut self, position: usize, mut fill: impl FnMut(&mut [u8])) -> bool {
        let place = position.checked_sub(self.blocks().start);
        let reserved = self.slots.as_mut().map(|(reserved, _)| reserved);
        let frame = place.zip(reserved).and_then(|(place, reserved)| reserved.frames.get_mut(place));
        let (Some(place), Some(frame), Some(device)) = (place, frame, &self.device) else { return false };
        self.filled[place] = device.fill(frame, &mut fill);
        self.filled[place]
    }

    /// Says that the engine has written block `position` into its slot itself. False: it is not among
    /// [`blocks`](Self::blocks).
    pub fn mark_filled(&mut self, position: usize) -> bool {
        let place = position.checked_sub(self.blocks().start);
        let filled = place.and_then(|place| self.filled.get_mut(place));
        filled.map(|filled| *filled = true).is_some()
    }

    /// Makes the filled blocks resident, as far as they follow on the chain without a gap; the slots of the others are
    /// given back. The answer's lease holds the chain on the device.
    ///
    /// # Errors
    /// Never for an allocation of [`Manager::allocate`]; the type keeps the door shut on using one twice.
    pub fn publish(mut self) -> Result<Transfer<Transferred>> {
        let slots = self.slots.take();
        let (reserved, lease) =
            slots.ok_or_else(|| Error::new(ErrorKind::Invalid, "this allocation was published before"))?;
        let filled = self.filled.iter().take_while(|&&filled| filled).count();
        Ok(self.core.publish(reserved, filled, lease))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some((reserved, _)) = self.slots.take() {
            self.core.abandon(reserved);
        }
    }
}

/// The thread that flushes and gives up what is overdue.
struct BackgroundThreads {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle>,
    core: Arc<Core>,
}

impl BackgroundThreads {
    /// How often it looks, when nobody wakes it.
    const PERIOD: Duration = Duration::from_millis(20);

    fn start(core: &Arc<Core>, pinned: &Arc<PinnedChains>) -> Result<Self> {
        let (wake, woken) = sync_channel(1);
        core.set_waker(Some(wake.clone()));
        let (worker, pinned) = (Arc::clone(core), Arc::clone(pinned));
        let thread = spawn("kvbm-background", move || run(&worker, &pinned, &woken))
            .map_err(|error| Error::caused(ErrorKind::Unavailable, "cannot start a thread", error))?;
        Ok(Self { stop: Some(wake), thread: Some(thread), core: Arc::clone(core) })
    }
}

fn run(core: &Arc<Core>, pinned: &PinnedChains, woken: &Receiver<()>) {
    loop {
        match woken.recv_timeout(BackgroundThreads::PERIOD) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => {
                // Flushing must go on whatever a policy or a backend does.
                let round = AssertUnwindSafe(|| {
                    pinned.expire(core.now_ms());
                    pinned.end_past(core.namespace());
                    core.tick();
                });
                if catch_unwind(round).is_err() {
                    core.metrics().background_panicked();
                    tracing::error!(
                        "a round of background work panicked: please report it with the message above"
                    );
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

impl Drop for BackgroundThreads {
    fn drop(&mut self) {
        self.core.set_waker(None);
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
        self.core.join_learner();
    }
}
