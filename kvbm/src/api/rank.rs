//! One manager over several processes, for tensor and pipeline parallelism.
//!
//! Each rank of a model has its slice of every block: its heads' keys and values in the layers of
//! its stage. One process, the *leader*, has the [`Manager`](crate::Manager), which decides where
//! blocks lie. Each *rank* has tiers of its own, with memory, files and objects, and moves its
//! slice of a block when the leader moves the block, from and to the slot of the same number. A
//! block is there when every rank has it.
//!
//! ```text
//!  leader's process            a rank's process, one for each
//!  Manager::open ◄──joins──── Rank::join
//!  lease, load, save ──copies─► its slice: device, host, disk, objects
//!                    ◄─ended──
//! ```
//!
//! The leader opens with [`Options::ranks`](crate::Options::ranks), and waits for its ranks; they
//! are opened with the same settings, whose sizes are compared. `block_bytes` and capacities are of
//! *one* rank's slice. A process may be leader and rank at once: it opens both, the rank on another
//! thread.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvbm_settings::Settings;
use kvbm_tiers::ranks::{RankLoad, RankLoads, SliceLoad, Stopper};
use kvbm_tiers::{Failure, FramePool, MediaLayer, SlotId};
use parking_lot::Condvar;

use crate::api::allocation::Device;
use crate::api::engine_memory::EngineMemory;
use crate::api::groups::CacheGroup;
use crate::assemble::{OpenedRank, open_rank};
use crate::durable::DurableTiers;
use crate::error::{Error, ErrorKind, Result};
use crate::names::fingerprint::Fingerprint;
use crate::peers::{RankPeers, no_groups};
use crate::sync::{JoinHandle, Mutex, spawn};

/// Local files are written in milliseconds.
const MAX_CLOSE: Duration = Duration::from_secs(5);

/// The processes that share blocks. Leader and ranks are given the same.
#[derive(Clone, Debug)]
pub struct RankGroup {
    /// A directory on this machine where they meet, which no other user may write; its last
    /// component is created if missing. One leader at a time uses it. At most some 90 bytes, since
    /// sockets have short names.
    pub dir: PathBuf,
    /// How many ranks there are, 1 to 64.
    pub world: u16,
    /// How long the leader waits for its ranks when it opens, and a rank for its leader.
    pub limit: Duration,
}

/// What a rank is opened with besides its settings.
#[derive(Debug)]
pub struct RankOptions {
    /// The group that it joins.
    pub group: RankGroup,
    /// Its number, from 0.
    pub rank: u16,
    /// The memory of this rank's engine, in place of a device tier: the leader [saves
    /// from](crate::Manager::save_from) and [loads into](crate::Manager::load_into) its slots.
    pub engine: Option<EngineMemory>,
    /// Of a hybrid model: the leader's [`Options::groups`](crate::Options::groups), with this
    /// rank's memory.
    pub groups: Vec<CacheGroup>,
    /// What the bytes of its blocks depend on: the same as the leader's [`Options::fingerprint`],
    /// but for the tensor rank, the pipeline rank and the epoch. Without one nothing that outlives
    /// the process is found again, and there are no [peers](crate::Peers).
    ///
    /// [`Options::fingerprint`]: crate::Options::fingerprint
    pub fingerprint: Option<Fingerprint>,
    /// Stands around the media of its tiers: injects faults, for tests.
    pub media_layer: Option<Arc<dyn MediaLayer>>,
}

impl RankOptions {
    /// Options of the rank with this number, with device slots of its own, if any.
    pub const fn new(group: RankGroup, rank: u16) -> Self {
        Self { group, rank, engine: None, groups: Vec::new(), fingerprint: None, media_layer: None }
    }
}

/// A rank: it has tiers, and moves blocks between them as its leader says, on a thread of its own.
/// Dropping it ends its service; the leader then counts it as lost.
pub struct Rank {
    number: u16,
    leader: i32,
    device: Option<DeviceSlots>,
    stopper: Stopper,
    loads: Arc<RankLoads>,
    service: Arc<ServiceResult>,
    thread: Option<JoinHandle>,
    /// The indices of its slots, for the next process.
    durable: DurableTiers,
    /// Ranks of other workers.
    peers: Option<RankPeers>,
    /// The process that joined.
    process: u32,
    /// The same rank of other cache groups.
    groups: Vec<Self>,
}

/// The device tier of a rank, in which an engine writes and reads slots that its leader named.
struct DeviceSlots {
    device: Arc<dyn Device>,
    /// All slots count as resident: only the leader knows which are in use.
    pool: Mutex<FramePool>,
}

/// What became of the service, once it has ended.
#[derive(Default)]
struct ServiceResult {
    // Not the mutex of `sync`, which has no condition variable.
    outcome: parking_lot::Mutex<Option<Result<()>>>,
    ended: Condvar,
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rank")
            .field("number", &self.number)
            .field("leader", &self.leader)
            .finish_non_exhaustive()
    }
}

impl Rank {
    /// Opens the tiers that the settings name, and joins the leader, for which it waits. Blocks
    /// meanwhile.
    ///
    /// # Errors
    /// For the engine's memory and cache groups those of [`open`](crate::Manager::open).
    /// [`ErrorKind::Invalid`]: a setting is wrong or does not fit, or the leader has other ones,
    /// another fingerprint or version, or another number of ranks. [`ErrorKind::Unavailable`]:
    /// memory, a directory, a store or the address for [peers](crate::Peers) is not available, no
    /// leader came in time, or another process has this rank's number. The message says which.
    pub fn join(settings: &Settings, options: RankOptions) -> Result<Self> {
        if settings.peers.enabled && !options.groups.is_empty() {
            return Err(no_groups());
        }
        if options.groups.is_empty() {
            Self::join_as(settings, options, "")
        } else {
            Self::join_groups(settings, &options)
        }
    }

    pub(crate) fn join_as(settings: &Settings, options: RankOptions, suffix: &str) -> Result<Self> {
        let number = options.rank;
        let OpenedRank { member, device, durable, peers } = open_rank(settings, options, suffix)?;
        // Taken now: from here on the thread owns the member, until the service ends.
        let (stopper, loads, leader) = (member.stopper(), member.loads(), member.leader());
        let service = Arc::new(ServiceResult::default());
        let outcome = Arc::clone(&service);
        let thread =
            spawn("kvbm-rank", move || outcome.run(|| member.serve().map_err(leader_gone)))
                .map_err(|error| {
                    Error::caused(ErrorKind::Unavailable, "cannot start a thread", error)
                })?;
        let device = device.map(|(device, pool)| DeviceSlots::new(device, pool));
        let (thread, process) = (Some(thread), std::process::id());
        Ok(Self {
            number,
            leader,
            device,
            stopper,
            loads,
            service,
            thread,
            durable,
            peers,
            process,
            groups: Vec::new(),
        })
    }

    pub(crate) fn with_groups(mut self, groups: Vec<Self>) -> Self {
        self.groups = groups;
        self
    }

    /// Its number, from 0.
    pub const fn number(&self) -> u16 {
        self.number
    }

    /// Waits until the service ends: `Ok` when the leader closed its manager. Then
    /// [`join`](Self::join) again.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: the leader, which the message names, is gone, or the service
    /// itself panicked. Only what outlives the process is then of use: drop the rank, and join the
    /// next leader.
    pub fn wait(&self) -> Result<()> {
        self.service.wait()?;
        self.groups.iter().try_for_each(Self::wait)
    }

    /// Whether it still serves its leader.
    pub fn is_serving(&self) -> bool {
        self.service.outcome.lock().is_none() && self.groups.iter().all(Self::is_serving)
    }

    /// This rank's slice of a load that its leader began with
    /// [`load_in_ranks`](crate::Manager::load_in_ranks), and named: its engine waits for layers
    /// here. Ask once for each load that began after this rank joined, before it has ended or
    /// after. All end with the service.
    pub fn slice_of(&self, load: RankLoad) -> SliceLoad {
        self.loads.slice(load)
    }

    /// Lets `fill` write this rank's slice of a block, `block_bytes` long, into a slot of its
    /// device: one of the leader's [`Allocation`](crate::Allocation). False: there is no such slot,
    /// or the GPU failed.
    pub fn fill_device(&self, slot: SlotId, mut fill: impl FnMut(&mut [u8])) -> bool {
        self.device.as_ref().is_some_and(|slots| slots.fill(slot, &mut fill))
    }

    /// Shows this rank's slice of a block in a slot of its device: one that the leader
    /// [holds](crate::Manager::device_slot). `None`: there is no such slot, or the GPU failed.
    pub fn read_device<R>(&self, slot: SlotId, read: impl FnOnce(&[u8]) -> R) -> Option<R> {
        // By its type a device may call several times; the caller's closure is good for one call.
        let (mut read, mut answer) = (Some(read), None);
        let mut show = |block: &[u8]| answer = read.take().map(|read| read(block));
        self.device.as_ref()?.read(slot, &mut show).then_some(())?;
        answer
    }
}

impl Drop for Rank {
    /// In a forked child the service is still the parent's, and the threads do not exist.
    fn drop(&mut self) {
        let thread = self.thread.take();
        if self.process != std::process::id() {
            self.durable.abandon();
            // Its connections are the parent's, and so is what watches them.
            std::mem::forget(self.peers.take());
            return std::mem::forget(thread);
        }
        // What comes from other workers is given up.
        drop(self.peers.take());
        // Before the join, which would otherwise wait until the leader closes.
        self.stopper.stop();
        // It has caught and logged its panics.
        let _ = thread.map(JoinHandle::join);
        // No copy ends any more, so there is nothing more to write down.
        self.durable.close(MAX_CLOSE);
    }
}

impl ServiceResult {
    fn wait(&self) -> Result<()> {
        let mut outcome = self.outcome.lock();
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            self.ended.wait(&mut outcome);
        }
    }

    /// A panic ends it too: callers that wait for the end would else wait for ever.
    fn run(&self, serve: impl FnOnce() -> Result<()>) {
        self.end(catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|_| Err(panicked())));
    }

    fn end(&self, outcome: Result<()>) {
        if let Err(error) = &outcome {
            tracing::error!(%error, "a rank's service ended");
        }
        *self.outcome.lock() = Some(outcome);
        self.ended.notify_all();
    }
}

impl DeviceSlots {
    fn new(device: Arc<dyn Device>, mut pool: FramePool) -> Self {
        // A handle that is deposited can be had by its slot's number, and a leader names no more
        // than that.
        while let Some(frame) = pool.take() {
            pool.deposit(frame);
        }
        Self { device, pool: Mutex::new(pool) }
    }

    /// The filler has the slot's handle meanwhile: two cannot write to one slot.
    fn fill(&self, slot: SlotId, fill: &mut dyn FnMut(&mut [u8])) -> bool {
        let Some(mut frame) = self.pool.lock().withdraw(slot) else { return false };
        // With the pool unlocked: others fill and read their slots meanwhile.
        let is_filled = catch_unwind(AssertUnwindSafe(|| self.device.fill(&mut frame, fill)));
        self.pool.lock().deposit(frame);
        is_filled.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn read(&self, slot: SlotId, read: &mut dyn FnMut(&[u8])) -> bool {
        let Some(loan) = self.pool.lock().lend(slot) else { return false };
        let is_shown = catch_unwind(AssertUnwindSafe(|| self.device.read(&loan, read)));
        self.pool.lock().end_loan(loan);
        is_shown.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

fn panicked() -> Error {
    let message = "the rank's service panicked: please report it with the log, and join again";
    Error::unavailable(message)
}

fn leader_gone<K: fmt::Debug + Copy + Send + Sync + 'static>(error: Failure<K>) -> Error {
    let message = error.to_string();
    Error::caused(ErrorKind::Unavailable, message, error)
}

#[cfg(test)]
mod tests {
    use kvbm_tiers::{Frame, Loan, Tier};

    use super::*;

    #[test]
    fn a_service_that_panics_has_ended() {
        let service = ServiceResult::default();
        let _ = catch_unwind(AssertUnwindSafe(|| service.run(|| panic!("a defect"))));
        let error =
            service.outcome.lock().clone().expect("who waits would wait for ever").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }

    /// A device whose blocks have no bytes.
    #[derive(Debug)]
    struct EmptyTable;

    impl Device for EmptyTable {
        fn name(&self) -> &'static str {
            "empty"
        }

        fn fill(&self, _: &mut Frame, fill: &mut dyn FnMut(&mut [u8])) -> bool {
            fill(&mut []);
            true
        }

        fn read(&self, _: &Loan, read: &mut dyn FnMut(&[u8])) -> bool {
            read(&[]);
            true
        }
    }

    #[test]
    fn a_slot_outlives_who_panics_over_it() {
        let slots = DeviceSlots::new(Arc::new(EmptyTable), FramePool::new(Tier::Device, 1));
        let panicked = |over: &dyn Fn() -> bool| catch_unwind(AssertUnwindSafe(over)).is_err();
        assert!(panicked(&|| slots.fill(SlotId(0), &mut |_| panic!("an engine's defect"))));
        assert!(slots.read(SlotId(0), &mut |_| ()), "the slot can be read again");
        assert!(panicked(&|| slots.read(SlotId(0), &mut |_| panic!("an engine's defect"))));
        assert!(slots.fill(SlotId(0), &mut |_| ()), "the slot can be written again");
    }
}
