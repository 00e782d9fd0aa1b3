//! The manager: what an engine talks to.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use kvbm_policies::RequestId;
use kvbm_settings::Settings;
use kvbm_tiers::chaos::Chaos;
use kvbm_tiers::{BlockKey, Frame, Loan, Tier};
use prometheus::Registry;

use crate::assemble;
use crate::clock::{Clock, SystemClock};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::hash::Chain;
use crate::lease::Lease;
use crate::pins::Pins;
use crate::scheduler::{Brought, Class, Core, Drained, StagingCounts, foreign_lease};
use crate::sync::{JoinHandle, Mutex, spawn};
use crate::table::{Drift, Match, RunId, SlotCounts, TierStats, Usage};
use crate::ticket::Ticket;

/// What a manager is opened with besides its settings.
#[derive(Debug)]
pub struct Options {
    /// Where its metrics are registered.
    pub registry: Registry,
    /// Time for policies and flushing.
    pub clock: Arc<dyn Clock>,
    /// Tokens in a block, for metrics.
    pub block_tokens: u64,
    /// What goes wrong on purpose with the copies of all tiers, for tests.
    pub chaos: Option<Chaos>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            registry: Registry::new(),
            clock: Arc::new(SystemClock::default()),
            block_tokens: 16,
            chaos: None,
        }
    }
}

/// Keeps KV blocks in a hierarchy of tiers and gives them back.
///
/// A request goes: [`lease`](Self::lease) its chain; [`load`](Self::load) what is held somewhere onto the
/// device; [`allocate`](Self::allocate) device slots for the rest, compute, [`publish`](Allocation::publish);
/// [`save`](Self::save). Flushing to disk and objects happens by itself.
pub struct Manager {
    core: Arc<Core>,
    device: Option<Arc<dyn Device>>,
    routes: Vec<RouteReport>,
    background: Mutex<Option<Background>>,
    pins: Arc<Pins>,
    /// The one that opened it.
    process: u32,
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

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager").field("routes", &self.routes).finish_non_exhaustive()
    }
}

impl Manager {
    /// Opens all tiers that the settings name: takes their memory, creates their files, probes their stores.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]: a setting is wrong or does not fit. [`ErrorKind::Unavailable`]: memory, a
    /// directory or a store cannot be had. The message names the setting to change.
    pub async fn open(settings: Settings, options: Options) -> Result<Self> {
        let assembled = assemble::open(settings, &options).await?;
        assemble::export(&options.registry, &assembled.core)?;
        let pins = Arc::new(Pins::default());
        let background = Background::start(&assembled.core, &pins)?;
        Ok(Self {
            core: assembled.core,
            device: assembled.device,
            routes: assembled.routes,
            background: Mutex::new(Some(background)),
            pins,
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
        self.lease_for(Usage::default(), chain)
    }

    /// [`lease`](Self::lease), for a request that the engine names or describes. Whatever is done with the lease
    /// counts as its doing.
    pub fn lease_for<'a>(&self, usage: Usage, chain: impl Into<Chain<'a>>) -> Lease {
        self.core.lease(chain.into(), usage)
    }

    /// Keeps what a lease holds where it is, in every tier that it holds it in, for `ttl_ms` milliseconds or until
    /// the manager closes. The rest of its chain is not protected: [`load`](Self::load) or [`save`](Self::save) it
    /// first, and pin the answer's lease.
    ///
    /// # Errors
    /// [`ErrorKind::Full`] if too many chains are pinned; [`ErrorKind::Invalid`] if the lease is of another manager.
    /// The lease ends then.
    pub fn pin(&self, lease: Lease, ttl_ms: u64) -> Result<()> {
        self.check_lease(&lease)?;
        let until_ms = self.core.now_ms().saturating_add(ttl_ms);
        self.pins.add(lease, until_ms)
    }

    /// The request has ended and generated `output_tokens`. Policies learn from it how long an answer it was;
    /// how soon a chain returns depends on that.
    pub fn finished(&self, request: RequestId, output_tokens: u32) {
        self.core.table().finished(request, output_tokens);
    }

    /// Brings what the lease holds in any tier onto the device. The answer's lease holds it there.
    pub fn load(&self, lease: Lease) -> Ticket<Brought> {
        self.core.bring(Class::Load, Tier::Device, lease)
    }

    /// Copies what the lease holds to the uppermost tier below the device.
    pub fn save(&self, lease: Lease) -> Ticket<Brought> {
        let below =
            [Tier::Host, Tier::Disk, Tier::Object].into_iter().find(|&tier| self.core.table().has(tier));
        self.core.bring(Class::Save, below.unwrap_or(Tier::Device), lease)
    }

    /// Brings what the lease holds further down up to `to`, when nothing more urgent is to be done.
    pub fn prefetch(&self, lease: Lease, to: Tier) -> Ticket<Brought> {
        self.core.bring(Class::Prefetch, to, lease)
    }

    /// Takes device slots for the blocks of `chain` that the device lacks, to be filled by the engine.
    ///
    /// # Errors
    /// [`ErrorKind::Full`] if not one of them finds room: every leaf of the device is in use. [`ErrorKind::Invalid`] if
    /// there is no device tier, or the lease is of another manager or of another chain; one of a beginning of `chain`,
    /// or of a longer chain that begins with it, will do.
    pub fn allocate<'a>(&self, chain: impl Into<Chain<'a>>, lease: Lease) -> Result<Allocation> {
        let chain = chain.into();
        if self.device.is_none() {
            return Err(Error::new(ErrorKind::Invalid, "there is no device tier: set device.capacity"));
        }
        self.check_lease(&lease)?;
        let mut table = self.core.table();
        if !table.is_lease_of(lease.grip(), chain) {
            return Err(Error::new(ErrorKind::Invalid, "the lease is of another chain: lease this one"));
        }
        let reserved = table.reserve(Tier::Device, chain, lease.grip().visit().usage);
        drop(table);
        let before = reserved.resident + reserved.in_flight;
        if reserved.run.is_none() && reserved.refused > 0 {
            return Err(Error::new(ErrorKind::Full, "every block of the device tier is in use"));
        }
        Ok(Allocation {
            core: Arc::clone(&self.core),
            device: self.device.clone(),
            before,
            behind: reserved.behind,
            in_flight: reserved.in_flight,
            refused: reserved.refused,
            filled: vec![false; reserved.run.as_ref().map_or(0, |(_, frames)| frames.len())],
            run: reserved.run,
            lease: Some(lease),
        })
    }

    fn check_lease(&self, lease: &Lease) -> Result<()> {
        if lease.is_of(&self.core) { Ok(()) } else { Err(foreign_lease()) }
    }

    /// Shows the bytes of a block on the device: block `position` of `chain`, which `lease` holds there. `None` if
    /// it does not, it is of another manager, or the GPU failed.
    pub fn read_device<'a, R>(
        &self,
        lease: &Lease,
        chain: impl Into<Chain<'a>>,
        position: usize,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Option<R> {
        let chain = chain.into();
        let is_held = lease.is_of(&self.core) && position < lease.blocks(Tier::Device).min(chain.len());
        let device = self.device.as_ref().filter(|_| is_held)?;
        let loan = self.core.table().lend(Tier::Device, chain.key(position))?;
        let lent = Lent { core: &self.core, loan: Some(loan) };
        let (mut read, mut answer) = (Some(read), None);
        device.read(lent.loan.as_ref()?, &mut |block| answer = read.take().map(|read| read(block)));
        answer
    }

    /// Sets the flushing clock's consequences in motion: call it after a manual clock was moved.
    pub fn tick(&self) {
        self.core.wake();
    }

    /// Flushes everything dirty and waits until nothing is in flight, at most for `limit`. Tells what did not get
    /// there: a tier that is away is waited for until then.
    pub fn drain(&self, limit: Duration) -> Drained {
        self.core.drain(limit)
    }

    /// Lets up to `blocks` blocks of `tier` go, in the order of its policy; returns how many could. What is
    /// leased stays, and what is still to be flushed, unless the tier below cannot be written now.
    pub fn evict(&self, tier: Tier, blocks: usize) -> usize {
        let mut table = self.core.table();
        if table.has(tier) { table.evict(tier, blocks) } else { 0 }
    }

    /// Occupancy of a tier.
    pub fn counts(&self, tier: Tier) -> SlotCounts {
        self.core.table().counts(tier)
    }

    /// Copies that are overdue now: their media completed nothing for too long, and nobody waits for them any more.
    /// Each holds the slot that it writes, and one that bounces also the slot that it bounces through.
    pub fn overdue(&self) -> u64 {
        let routes = Tier::ALL.into_iter().flat_map(|from| Tier::ALL.map(|to| (from, to)));
        routes.map(|route| self.core.overdue(route)).sum()
    }

    /// Occupancy of the DRAM slots through which blocks bounce between tiers that nothing connects.
    pub fn staging(&self) -> StagingCounts {
        self.core.staging()
    }

    /// Counts of a tier since the start.
    pub fn stats(&self, tier: Tier) -> TierStats {
        self.core.table().stats(tier)
    }

    /// What share of the blocks requested lately a tier of `capacity` blocks would have held, 0 to 1, had it
    /// evicted the least recently used ones: an estimate on a sample of the requests.
    pub fn estimated_hit_rate(&self, capacity: u32) -> f64 {
        self.core.estimated_hit_rate(capacity)
    }

    /// Bytes copied on each route so far, where any were.
    pub fn bytes(&self) -> Vec<(Tier, Tier, u64)> {
        let routes = Tier::ALL.into_iter().flat_map(|from| Tier::ALL.map(|to| (from, to)));
        let bytes = routes.map(|(from, to)| (from, to, self.core.metrics().bytes((from, to))));
        bytes.filter(|&(.., bytes)| bytes > 0).collect()
    }

    /// Copies that failed so far.
    pub fn failures(&self) -> u64 {
        let routes = Tier::ALL.into_iter().flat_map(|from| Tier::ALL.map(|to| (from, to)));
        routes.map(|route| self.core.metrics().failures(route)).sum()
    }

    /// Whose memory the device tier is: `emulated` (the host's) or `cuda`; `None`: there is no such tier.
    pub fn device(&self) -> Option<&'static str> {
        self.device.as_ref().map(|device| device.name())
    }

    /// The routing table: which backend moves blocks from where to where.
    pub fn routes(&self) -> &[RouteReport] {
        &self.routes
    }

    /// Every invariant of the table that does not hold. Linear in the number of blocks.
    pub fn audit(&self) -> Vec<Drift> {
        self.core.table().audit()
    }

    /// Stops everything: background work ends, what waits for its turn is not copied, and every [`Ticket`] has its
    /// answer soon. What is asked for afterwards is refused as [`ErrorKind::Closed`]. Copies that a medium works on end
    /// by themselves and keep their memory until then.
    pub fn close(&self) {
        drop(self.background.lock().take());
        self.core.close();
        self.pins.clear();
    }
}

impl Drop for Manager {
    /// In a forked child the parent's threads are not there to end, and what they share is the parent's still.
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.close();
        } else {
            std::mem::forget(self.background.lock().take());
        }
    }
}

/// A device slot lent to a caller, settled also if the caller panics.
struct Lent<'a> {
    core: &'a Core,
    loan: Option<Loan>,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(loan) = self.loan.take() {
            self.core.table().settle_loan(Tier::Device, loan);
        }
    }
}

/// Device slots that an engine fills, block by block, before it publishes them.
#[must_use = "dropping an allocation gives its slots back"]
pub struct Allocation {
    core: Arc<Core>,
    device: Option<Arc<dyn Device>>,
    before: usize,
    behind: Option<BlockKey>,
    in_flight: usize,
    refused: usize,
    run: Option<(RunId, Vec<Frame>)>,
    /// Which of the run's blocks have their bytes.
    filled: Vec<bool>,
    lease: Option<Lease>,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation").field("blocks", &self.blocks()).finish_non_exhaustive()
    }
}

impl Allocation {
    /// Positions in the chain of the blocks to fill.
    pub fn blocks(&self) -> Range<usize> {
        let placed = self.run.as_ref().map_or(0, |(_, frames)| frames.len());
        self.before..self.before + placed
    }

    /// Blocks before these that another request is filling or loading.
    pub const fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Blocks at the end of the chain that found no room.
    pub const fn refused(&self) -> usize {
        self.refused
    }

    /// Lets `fill` write block `position` into its slot. False: it is not among [`blocks`](Self::blocks), or the GPU
    /// failed.
    pub fn fill(&mut self, position: usize, mut fill: impl FnMut(&mut [u8])) -> bool {
        let Some(place) = position.checked_sub(self.before).filter(|&place| place < self.filled.len()) else {
            return false;
        };
        let frame = self.run.as_mut().and_then(|(_, frames)| frames.get_mut(place));
        let (Some(frame), Some(device)) = (frame, &self.device) else { return false };
        self.filled[place] = device.fill(frame, &mut fill);
        self.filled[place]
    }

    /// Says that the engine has written block `position` into its slot itself. False: it is not among
    /// [`blocks`](Self::blocks).
    pub fn mark_filled(&mut self, position: usize) -> bool {
        let place = position.checked_sub(self.before);
        let filled = place.and_then(|place| self.filled.get_mut(place));
        filled.map(|filled| *filled = true).is_some()
    }

    /// Makes the filled blocks resident, as far as they follow on the chain without a gap; the slots of the others are
    /// given back. The answer's lease holds the chain on the device.
    ///
    /// # Errors
    /// Never for an allocation of [`Manager::allocate`]; the type keeps the door shut on using one twice.
    pub fn publish(mut self) -> Result<Ticket<Brought>> {
        let lease = self.lease.take();
        let lease =
            lease.ok_or_else(|| Error::new(ErrorKind::Invalid, "this allocation was published before"))?;
        let filled = self.filled.iter().take_while(|&&filled| filled).count();
        Ok(self.core.publish(Tier::Device, self.run.take(), filled, (self.before, self.behind), lease))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some((run, frames)) = self.run.take() {
            self.core.abandon(run, frames);
        }
    }
}

/// The thread that flushes and gives up what is overdue.
struct Background {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle>,
    core: Arc<Core>,
}

impl Background {
    /// How often it looks, when nobody wakes it.
    const PERIOD: Duration = Duration::from_millis(20);

    fn start(core: &Arc<Core>, pins: &Arc<Pins>) -> Result<Self> {
        let (wake, woken) = sync_channel(1);
        core.set_waker(Some(wake.clone()));
        let (worker, pins) = (Arc::clone(core), Arc::clone(pins));
        let thread = spawn("kvbm-background", move || run(&worker, &pins, &woken))
            .map_err(|error| Error::caused(ErrorKind::Unavailable, "cannot start a thread", error))?;
        Ok(Self { stop: Some(wake), thread: Some(thread), core: Arc::clone(core) })
    }
}

fn run(core: &Arc<Core>, pins: &Pins, woken: &Receiver<()>) {
    loop {
        match woken.recv_timeout(Background::PERIOD) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => {
                // Flushing must go on whatever a policy or a backend does.
                let round = AssertUnwindSafe(|| {
                    pins.expire(core.now_ms());
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

impl Drop for Background {
    fn drop(&mut self) {
        self.core.set_waker(None);
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
