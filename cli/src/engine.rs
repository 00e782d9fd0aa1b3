//! An engine in miniature: serves requests through a manager, with patterns in place of KV.
//!
//! Per request: lease the chain, load what is held, check every byte of it, fill the rest, save. It
//! is what `replay` does with a trace and `demo` with a generated chat.

use std::ops::{AddAssign, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvbm::{
    Allocation, BlockHash, Chain, ChainHasher, ErrorKind, Fingerprint, Hashing, Hints,
    JumpingClock, KvLayout, Lease, Manager, ManualClock, Options, RequestId, RequestInfo,
    SlotCounts, Tier, Transfer, Transferred,
};
use kvbm_policies::{BLOCK_TOKENS, Request, Running};
use kvbm_settings::Settings;
use kvbm_tiers::chaos::{Chaos, ClockJump};
use kvbm_tiers::clock;
use serde::Serialize;
use tokio::runtime::Runtime;

use crate::output::CommandFailure;
use crate::pattern::BlockPattern;
use crate::stop::StopSignal;
use crate::trace::TraceError;

/// How long one request waits for room before it goes on without.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks whether there is room.
const PAUSE: Duration = Duration::from_micros(200);

/// Tokens by the tier that had them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct HitTokens {
    pub(crate) device: u64,
    pub(crate) host: u64,
    pub(crate) disk: u64,
    pub(crate) object: u64,
}

impl HitTokens {
    pub(crate) const fn of(&self, tier: Tier) -> u64 {
        match tier {
            Tier::Device => self.device,
            Tier::Host => self.host,
            Tier::Disk => self.disk,
            Tier::Object => self.object,
        }
    }

    const fn of_mut(&mut self, tier: Tier) -> &mut u64 {
        match tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
            Tier::Disk => &mut self.disk,
            Tier::Object => &mut self.object,
        }
    }

    pub(crate) const fn total(&self) -> u64 {
        self.device + self.host + self.disk + self.object
    }
}

/// What serving requests came to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ServedTally {
    pub(crate) requests: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) hit_tokens: HitTokens,
    /// Blocks read back from the device and compared, byte by byte.
    pub(crate) blocks_verified: u64,
    /// Those of them with a wrong byte.
    pub(crate) mismatches: u64,
    /// Blocks that were held but did not arrive; they were computed again.
    pub(crate) failed_loads: u64,
    /// Blocks whose save failed.
    pub(crate) failed_saves: u64,
    /// Prompts longer than the device, of which only the first part is kept.
    pub(crate) cut_prompts: u64,
    /// Times that a request found no room and waited.
    pub(crate) full_waits: u64,
    /// Blocks that went without saving because no room came up.
    pub(crate) unsaved_blocks: u64,
    /// Time that requests waited for their loads.
    pub(crate) load_time: Duration,
    /// Requests that were given up because a transfer did not end in any reasonable time.
    pub(crate) hangs: u64,
}

impl AddAssign for ServedTally {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.prompt_tokens += other.prompt_tokens;
        for tier in Tier::ALL {
            *self.hit_tokens.of_mut(tier) += other.hit_tokens.of(tier);
        }
        self.blocks_verified += other.blocks_verified;
        self.mismatches += other.mismatches;
        self.failed_loads += other.failed_loads;
        self.failed_saves += other.failed_saves;
        self.cut_prompts += other.cut_prompts;
        self.full_waits += other.full_waits;
        self.unsaved_blocks += other.unsaved_blocks;
        self.load_time += other.load_time;
        self.hangs += other.hangs;
    }
}

/// Serves requests. Close it to have its memory, files and objects gone.
#[derive(Debug)]
pub(crate) struct SimulatedEngine {
    manager: Manager,
    clock: Arc<ManualClock>,
    /// The same with the jumps of `chaos`: the manager's clock.
    wall_clock: Arc<JumpingClock>,
    chaos: Option<Chaos>,
    /// Most time that a transfer takes, if that is watched.
    longest_wait: Option<Duration>,
    hasher: ChainHasher,
    /// Whose a request is, where that is known.
    tenant: fn(&Request) -> Option<u32>,
    tiers: Vec<Tier>,
    /// Blocks on the device.
    device_blocks: usize,
    /// Where saves go, if anywhere.
    below: Option<Tier>,
    room: DeviceRoom,
    runtime: Runtime,
    stop: StopSignal,
}

impl SimulatedEngine {
    /// Opens the tiers that `settings` name, on a clock that follows the requests' timestamps. With
    /// `chaos`, transfers that never end are given up.
    pub(crate) fn open(
        settings: Settings,
        options: Options,
        chaos: Option<Chaos>,
        runtime: Runtime,
        stop: StopSignal,
    ) -> Result<Self, CommandFailure> {
        let tiers = configured_tiers(&settings);
        let longest_wait = chaos.as_ref().map(|_| longest_wait(&settings));
        let clock = Arc::new(ManualClock::default());
        let wall_clock = Arc::new(JumpingClock::new(Arc::clone(&clock) as _));
        let options = Options {
            clock: Arc::clone(&wall_clock) as _,
            block_tokens: u64::from(BLOCK_TOKENS),
            fingerprint: Some(fingerprint(&settings)),
            media_layer: chaos.as_ref().map(Chaos::layer),
            ..options
        };
        let manager = runtime.block_on(stop.or(Manager::open(settings, options)))??;
        stop.check()?;
        let below = tiers.iter().copied().find(|&tier| tier > Tier::Device);
        let blocks = |tier| manager.admin().counts(tier).total as usize;
        let device_blocks = blocks(Tier::Device);
        let room =
            DeviceRoom::new(below.map_or(device_blocks, |below| blocks(below).min(device_blocks)));
        // The ids of a trace are chained already; chaining them again makes that sure, whatever the
        // trace says.
        let hasher = ChainHasher::new(TOKENS_PER_ID, SEED)?;
        Ok(Self {
            manager,
            clock,
            wall_clock,
            chaos,
            longest_wait,
            hasher,
            tenant: |_| None,
            tiers,
            device_blocks,
            below,
            room,
            runtime,
            stop,
        })
    }

    /// One whose requests belong to tenants.
    pub(crate) fn for_tenants(mut self, tenant: fn(&Request) -> Option<u32>) -> Self {
        self.tenant = tenant;
        self
    }

    /// Serves all `requests`, up to `concurrency` at a time and begun in their order. `observe`
    /// sees the tally after each.
    pub(crate) fn run(
        &self,
        requests: impl Iterator<Item = Result<Request, TraceError>> + Send,
        concurrency: usize,
        observe: impl Fn(&Request, &ServedTally) + Sync,
    ) -> Result<ServedTally, CommandFailure> {
        self.chaos.iter().for_each(Chaos::start);
        let total = Mutex::new(ServedTally::default());
        let failed = AtomicBool::new(false);
        let requests = Mutex::new(RequestArrivals::new(requests));
        let work = || -> Result<(), CommandFailure> {
            while !failed.load(Ordering::Relaxed)
                && let Some(RequestArrival { request, info, hashes, room }) =
                    self.next(&requests)?
            {
                let tally = self.serve(&request, info, Chain::from(&hashes))?;
                drop(room);
                let mut total = lock(&total);
                *total += tally;
                observe(&request, &total);
            }
            Ok(())
        };
        let work = || work().inspect_err(|_| failed.store(true, Ordering::Relaxed));
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..concurrency).map(|_| scope.spawn(work)).collect();
            let own = work();
            others.into_iter().fold(own, |outcome, other| {
                let died = || Err(CommandFailure::unexpected("a worker thread died"));
                outcome.and(other.join().unwrap_or_else(|_| died()))
            })
        })?;
        Ok(total.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// The next request. Time moves to its timestamp, and requests that have ended by then are
    /// reported.
    fn next<'e>(
        &'e self,
        arrivals: &Mutex<RequestArrivals<impl Iterator<Item = Result<Request, TraceError>>>>,
    ) -> Result<Option<RequestArrival<'e>>, CommandFailure> {
        let mut arrivals = lock(arrivals);
        self.stop.check()?;
        let Some(request) = arrivals.requests.next().transpose()? else { return Ok(None) };
        let hashes = self.hashes(&request);
        let room = self.room.admit(hashes.len());
        self.let_the_clock_jump();
        self.clock.advance_to(request.timestamp_ms);
        // After the clock has moved and before the request is leased: policies learn in the order
        // of a real engine.
        while let Some(ended) = arrivals.running.next_ended(request.timestamp_ms) {
            self.manager.finished(ended.request, ended.output_tokens);
        }
        let (begun, tenant) = (arrivals.begin(&request), (self.tenant)(&request));
        let info = RequestInfo {
            request: Some(begun),
            hints: Hints { tenant, ..Hints::default() },
            ..RequestInfo::default()
        };
        self.manager.admin().tick();
        Ok(Some(RequestArrival { request, info, hashes, room }))
    }

    fn let_the_clock_jump(&self) {
        for jump in self.chaos.iter().flat_map(Chaos::clock_jumps) {
            self.wall_clock.jump(match jump {
                ClockJump::Forward(by) => by.as_millis() as i64,
                ClockJump::Back(by) => -(by.as_millis() as i64),
            });
        }
    }

    /// The request's blocks, as far as the device can hold them.
    fn hashes(&self, request: &Request) -> Vec<BlockHash> {
        let blocks = request.full_blocks();
        let kept = &blocks[..blocks.len().min(self.device_blocks)];
        let ids: Vec<u32> = kept.iter().flat_map(|&id| [id as u32, (id >> 32) as u32]).collect();
        self.hasher.chain(&ids)
    }

    fn serve(
        &self,
        request: &Request,
        info: RequestInfo,
        chain: Chain<'_>,
    ) -> Result<ServedTally, CommandFailure> {
        let mut tally = ServedTally {
            requests: 1,
            prompt_tokens: u64::from(request.input_length),
            cut_prompts: u64::from(request.full_blocks().len() > self.device_blocks),
            ..ServedTally::default()
        };
        match self.try_to_serve(info, chain, &mut tally) {
            Ok(()) => Ok(tally),
            Err(UnservedBlock::Hung) => Ok(ServedTally { hangs: 1, ..tally }),
            Err(UnservedBlock::Failed(failure)) => Err(failure),
        }
    }

    fn try_to_serve(
        &self,
        info: RequestInfo,
        chain: Chain<'_>,
        tally: &mut ServedTally,
    ) -> Result<(), UnservedBlock> {
        if chain.is_empty() {
            return Ok(());
        }
        let lease = self.manager.lease_for(info, chain);
        let plan: Vec<_> = lease.held().plan().collect();
        let lease = self.load(lease, tally)?;
        tally.hit(&plan, lease.blocks(Tier::Device));
        self.verify(chain, &lease, tally);
        let lease = self.fill(info, chain, lease, tally)?;
        self.save(lease, tally)
    }

    fn load(&self, lease: Lease, tally: &mut ServedTally) -> Result<Lease, UnservedBlock> {
        let started = clock::now();
        let mut lease = lease;
        loop {
            // The count of refusals tells: by the time that the load has ended the tier may have
            // room again.
            let full_before = self.manager.admin().stats(Tier::Device).full;
            let transferred = self.wait(self.manager.load(lease))?;
            tally.load_time = started.elapsed();
            let is_full = transferred.refused > 0
                && self.manager.admin().stats(Tier::Device).full > full_before;
            if !is_full || started.elapsed() > PATIENCE {
                return Ok(transferred.lease);
            }
            lease = transferred.lease;
            self.wait_for_room(tally)?;
        }
    }

    fn verify(&self, chain: Chain<'_>, lease: &Lease, tally: &mut ServedTally) {
        let hits = (tally.hit_tokens.total() / u64::from(BLOCK_TOKENS)) as usize;
        self.verify_leading(chain, lease, hits, tally);
    }

    fn verify_leading(
        &self,
        chain: Chain<'_>,
        lease: &Lease,
        blocks: usize,
        tally: &mut ServedTally,
    ) {
        for (position, &hash) in chain.hashes.iter().enumerate().take(blocks) {
            let matches = self
                .manager
                .read_device(lease, chain, position, |block| BlockPattern::of(hash).matches(block));
            tally.blocks_verified += 1;
            tally.mismatches += u64::from(matches != Some(true));
        }
    }

    /// Loads as much of a chain as is held, and compares it.
    pub(crate) fn read_back(&self, chain: &[BlockHash]) -> Result<ReadBack, CommandFailure> {
        let chain = Chain::from(&chain[..chain.len().min(self.device_blocks)]);
        let lease = self.manager.lease(chain);
        let plan: Vec<_> = lease.held().plan().collect();
        let lease = match self.load(lease, &mut ServedTally::default()) {
            Ok(lease) => lease,
            Err(UnservedBlock::Hung) => {
                return Err(CommandFailure::unexpected(
                    "a load did not end in any reasonable time",
                ));
            }
            Err(UnservedBlock::Failed(failure)) => return Err(failure),
        };
        let mut sources: Vec<_> =
            plan.into_iter().flat_map(|(tier, range)| range.map(move |_| tier)).collect();
        sources.truncate(lease.blocks(Tier::Device));
        let mut tally = ServedTally::default();
        self.verify_leading(chain, &lease, sources.len(), &mut tally);
        Ok(ReadBack { sources, wrong: tally.mismatches })
    }

    /// Computes what the device lacks.
    fn fill(
        &self,
        info: RequestInfo,
        chain: Chain<'_>,
        lease: Lease,
        tally: &mut ServedTally,
    ) -> Result<Lease, UnservedBlock> {
        if lease.blocks(Tier::Device) == chain.len() {
            return Ok(lease);
        }
        let Some(mut allocation) = self.allocate(info, chain, lease, tally)? else {
            return Ok(self.manager.lease_for(info, chain));
        };
        for position in allocation.blocks() {
            allocation.fill(position, |slot| BlockPattern::of(chain.hashes[position]).fill(slot));
        }
        Ok(self.wait(allocation.publish()?)?.lease)
    }

    /// `None`: no room came up.
    fn allocate(
        &self,
        info: RequestInfo,
        chain: Chain<'_>,
        lease: Lease,
        tally: &mut ServedTally,
    ) -> Result<Option<Allocation>, UnservedBlock> {
        let started = clock::now();
        let mut lease = lease;
        loop {
            match self.manager.allocate(chain, lease) {
                Ok(allocation) => return Ok(Some(allocation)),
                Err(error) if error.kind() != ErrorKind::Full => return Err(error.into()),
                Err(_) if started.elapsed() > PATIENCE => return Ok(None),
                Err(_) => self.wait_for_room(tally)?,
            }
            lease = self.manager.lease_for(info, chain);
        }
    }

    /// Saves what the device holds, as far as the tier below can take it.
    fn save(&self, lease: Lease, tally: &mut ServedTally) -> Result<(), UnservedBlock> {
        let Some(below) = self.below else { return Ok(()) };
        let SlotCounts { total, lost, .. } = self.manager.admin().counts(below);
        let goal = lease.blocks(Tier::Device).min((total - lost) as usize);
        let started = clock::now();
        let mut lease = lease;
        loop {
            let Transferred { blocks, refused, failed, lease: held, .. } =
                self.wait(self.manager.save(lease))?;
            tally.failed_saves += failed as u64;
            if refused == 0 || failed > 0 || blocks >= goal {
                return Ok(());
            }
            if started.elapsed() > PATIENCE {
                tally.unsaved_blocks += (goal - blocks) as u64;
                return Ok(());
            }
            lease = held;
            self.wait_for_room(tally)?;
        }
    }

    fn wait_for_room(&self, tally: &mut ServedTally) -> Result<(), CommandFailure> {
        tally.full_waits += 1;
        self.manager.admin().tick();
        self.stop.pause(PAUSE)
    }

    fn wait(&self, ticket: Transfer<Transferred>) -> Result<Transferred, UnservedBlock> {
        let answer = self.stop.or(ticket);
        let Some(limit) = self.longest_wait else { return Ok(self.runtime.block_on(answer)??) };
        let answer = self.runtime.block_on(async { tokio::time::timeout(limit, answer).await });
        Ok(answer.map_err(|_| UnservedBlock::Hung)???)
    }

    /// Saves, flushes and loads fresh blocks until that works in every tier.
    pub(crate) fn recover(&self) -> Result<RecoveryTally, CommandFailure> {
        /// The longest pause of a store that was down, and time to flush what has gathered
        /// meanwhile.
        const LIMIT: Duration = Duration::from_mins(2);
        const BETWEEN_ROUNDS: Duration = Duration::from_millis(20);
        let started = clock::now();
        let mut tally = ServedTally::default();
        let mut broken: Vec<_> =
            self.tiers.iter().copied().filter(|&tier| tier > Tier::Device).collect();
        for round in 0.. {
            let mut still_broken = Vec::new();
            for tier in broken {
                if !self.works(tier, round, &mut tally)? {
                    still_broken.push(tier);
                }
            }
            broken = still_broken;
            if broken.is_empty() || started.elapsed() > LIMIT {
                break;
            }
            self.stop.pause(BETWEEN_ROUNDS)?;
        }
        let after = broken.is_empty().then(|| started.elapsed());
        Ok(RecoveryTally { after, mismatches: tally.mismatches, hangs: tally.hangs })
    }

    fn works(
        &self,
        tier: Tier,
        round: u32,
        tally: &mut ServedTally,
    ) -> Result<bool, CommandFailure> {
        match self.probe(tier, round, tally) {
            Ok(works) => Ok(works),
            Err(UnservedBlock::Hung) => {
                tally.hangs += 1;
                Ok(false)
            }
            Err(UnservedBlock::Failed(failure)) => Err(failure),
        }
    }

    /// Whether blocks that no request has go down to `tier` and come back from there.
    fn probe(
        &self,
        tier: Tier,
        round: u32,
        tally: &mut ServedTally,
    ) -> Result<bool, UnservedBlock> {
        const BLOCKS: u32 = 4;
        let ids: Vec<_> =
            (0..BLOCKS).flat_map(|block| [u32::MAX - block, round << 2 | tier as u32]).collect();
        let hashes = self.hasher.chain(&ids);
        let (chain, info) = (Chain::from(&hashes), RequestInfo::default());
        self.make_room(tier, BLOCKS as usize);
        let lease = self.fill(info, chain, self.manager.lease_for(info, chain), tally)?;
        self.save(lease, tally)?;
        self.flush_for_a_while();
        // Else the blocks would come from above, and say nothing of this tier.
        for upper in self.tiers.iter().copied().filter(|&upper| upper < tier) {
            self.manager.admin().evict(upper, self.manager.admin().counts(upper).total as usize);
        }
        let lease = self.manager.lease_for(info, chain);
        let comes_from_there = lease.held().plan().eq([(tier, 0..chain.len())]);
        let lease = self.load(lease, tally)?;
        let (arrived, before) = (lease.blocks(Tier::Device), tally.mismatches);
        self.verify_leading(chain, &lease, arrived, tally);
        Ok(comes_from_there && arrived == chain.len() && tally.mismatches == before)
    }

    /// A full tier may rightly decline blocks that no request has asked for before.
    fn make_room(&self, lowest: Tier, blocks: usize) {
        self.flush_for_a_while();
        for tier in self.tiers.iter().copied().filter(|&tier| tier <= lowest) {
            self.manager.admin().evict(tier, 4 * blocks);
        }
    }

    fn flush_for_a_while(&self) {
        const LIMIT: Duration = Duration::from_secs(5);
        // What was not flushed in time shows when it is asked for.
        let _ = self.manager.drain(LIMIT);
    }

    /// Flushes what is dirty, waits for all copies and checks the table's invariants.
    pub(crate) fn drain_and_audit(&self) -> DrainedAudit {
        /// For the slowest of stores.
        const LIMIT: Duration = Duration::from_mins(1);
        let deadline = clock::now() + LIMIT;
        let mut drained = false;
        while !drained && self.stop.check().is_ok() && clock::now() < deadline {
            drained = self.manager.drain(Duration::from_millis(200)).is_complete();
        }
        let drift = self.manager.admin().audit();
        DrainedAudit { drained, drift: drift.iter().map(|drift| format!("{drift:?}")).collect() }
    }

    /// Waits until no more copies than `never` are overdue. A busy machine may keep a healthy
    /// medium from completing anything for as long as a copy may take; such copies end soon.
    pub(crate) fn wait_for_late_copies(&self, never: u64) {
        const LIMIT: Duration = Duration::from_secs(10);
        let deadline = clock::now() + LIMIT;
        while self.manager.admin().overdue() > never && clock::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Occupancy by tier, from the fastest.
    pub(crate) fn slots(&self) -> Vec<(Tier, SlotCounts)> {
        self.tiers.iter().map(|&tier| (tier, self.manager.admin().counts(tier))).collect()
    }

    /// What moves blocks, and how many bytes.
    pub(crate) const fn manager(&self) -> &Manager {
        &self.manager
    }

    /// Fails once the user wants to stop.
    pub(crate) fn check_stop(&self) -> Result<(), CommandFailure> {
        self.stop.check()
    }
}

impl Drop for SimulatedEngine {
    /// Copies under way hold their tiers. They end first, so that nothing is written where others
    /// tidy up.
    fn drop(&mut self) {
        // Of what went wrong on purpose, something may never end.
        let limit = Duration::from_secs(if self.chaos.is_some() { 1 } else { 10 });
        let closing = self.manager.close(limit);
        if !closing.is_complete() && self.chaos.is_none() {
            tracing::warn!(
                copies = closing.copies_left,
                "copies are still under way; their files may stay"
            );
        }
    }
}

/// Why a request was not served to its end.
#[derive(Debug)]
enum UnservedBlock {
    /// A transfer did not end in any reasonable time.
    Hung,
    /// The replay ends here.
    Failed(CommandFailure),
}

impl From<CommandFailure> for UnservedBlock {
    fn from(failure: CommandFailure) -> Self {
        Self::Failed(failure)
    }
}

impl From<kvbm::Error> for UnservedBlock {
    fn from(error: kvbm::Error) -> Self {
        Self::Failed(error.into())
    }
}

/// What of a chain was held.
#[derive(Debug)]
pub(crate) struct ReadBack {
    /// The tiers that its leading blocks came from.
    pub(crate) sources: Vec<Tier>,
    /// How many of them had a wrong byte.
    pub(crate) wrong: u64,
}

/// How all tiers came to work again.
#[derive(Debug)]
pub(crate) struct RecoveryTally {
    /// How soon; `None`: they did not.
    pub(crate) after: Option<Duration>,
    /// Fresh blocks that came back with a wrong byte.
    pub(crate) mismatches: u64,
    /// Transfers that did not end.
    pub(crate) hangs: u64,
}

/// The state after the last request.
#[derive(Debug)]
pub(crate) struct DrainedAudit {
    /// Whether everything dirty was flushed in time.
    pub(crate) drained: bool,
    /// Invariants of the table that do not hold.
    pub(crate) drift: Vec<String>,
}

/// Ids of traces have 64 bits, tokens 32.
const TOKENS_PER_ID: usize = 2;
/// What the first block of every chain is hashed with.
const SEED: &[u8] = b"replay";

/// What the bytes of a block depend on besides its hash: what an earlier process left is used if
/// that is the same.
pub(crate) fn fingerprint(settings: &Settings) -> Fingerprint {
    let bytes = settings.block_bytes.unwrap_or_default();
    Fingerprint {
        model: "pattern of the hash".to_owned(),
        weights: "1".to_owned(),
        dtype: "u64".to_owned(),
        layouts: vec![KvLayout {
            layers: 1,
            order: "byte".to_owned(),
            shape: vec![bytes],
            strides: vec![1],
        }],
        block_tokens: u64::from(BLOCK_TOKENS),
        engine: "kvbm replay".to_owned(),
        hashing: Hashing {
            algorithm: "ids of a trace, chained by BLAKE3".to_owned(),
            seed: SEED.to_vec(),
        },
        ..Fingerprint::default()
    }
}

impl ServedTally {
    /// Of what was planned, `arrived` leading blocks count as hits; the rest failed.
    fn hit(&mut self, plan: &[(Tier, Range<usize>)], arrived: usize) {
        for (tier, range) in plan {
            let hits = range.end.min(arrived).saturating_sub(range.start);
            *self.hit_tokens.of_mut(*tier) += hits as u64 * u64::from(BLOCK_TOKENS);
            self.failed_loads += (range.len() - hits) as u64;
        }
    }
}

/// What transfers may take while media misbehave: three copies that time out, after the longest
/// pause of a breaker, and what the client of an object store takes before it gives up.
fn longest_wait(settings: &Settings) -> Duration {
    const LONGEST_PAUSE: Duration = Duration::from_secs(32);
    const OBJECT_CLIENT: Duration = Duration::from_secs(20);
    let object = settings.object.url.as_ref().map_or(Duration::ZERO, |_| OBJECT_CLIENT);
    3 * Duration::from_millis(settings.transfer.timeout_ms) + LONGEST_PAUSE + object
}

/// The tiers that the settings name, from the fastest.
pub(crate) fn configured_tiers(settings: &Settings) -> Vec<Tier> {
    let is_present = |tier: &Tier| match tier {
        Tier::Device => settings.device.capacity.is_some(),
        Tier::Host => settings.host.capacity.is_some(),
        Tier::Disk => settings.disk.capacity.is_some(),
        Tier::Object => settings.object.place().is_some(),
    };
    Tier::ALL.into_iter().filter(is_present).collect()
}

/// Admits requests while all admitted ones fit into the smallest tier that they fill: else each
/// could hold a part and wait for the others' for ever.
#[derive(Debug)]
struct DeviceRoom {
    blocks: usize,
    free: Mutex<usize>,
    freed: Condvar,
}

/// A request to serve.
#[derive(Debug)]
struct RequestArrival<'e> {
    request: Request,
    info: RequestInfo,
    hashes: Vec<BlockHash>,
    /// Its right to fill its blocks.
    room: FillPermit<'e>,
}

/// Requests still to come, and those that would still be running.
#[derive(Debug)]
struct RequestArrivals<I> {
    requests: I,
    running: Running,
    begun: u64,
}

impl<I> RequestArrivals<I> {
    fn new(requests: I) -> Self {
        Self { requests, running: Running::default(), begun: 0 }
    }

    fn begin(&mut self, request: &Request) -> RequestId {
        let id = RequestId(self.begun);
        self.begun += 1;
        self.running.start(id, request.timestamp_ms, request.output_length);
        id
    }
}

/// The right to fill `blocks` blocks.
#[derive(Debug)]
struct FillPermit<'r> {
    room: &'r DeviceRoom,
    blocks: usize,
}

impl DeviceRoom {
    const fn new(blocks: usize) -> Self {
        Self { blocks, free: Mutex::new(blocks), freed: Condvar::new() }
    }

    fn admit(&self, blocks: usize) -> FillPermit<'_> {
        let blocks = blocks.min(self.blocks);
        let free = self.freed.wait_while(lock(&self.free), |free| *free < blocks);
        *free.unwrap_or_else(PoisonError::into_inner) -= blocks;
        FillPermit { room: self, blocks }
    }
}

impl Drop for FillPermit<'_> {
    fn drop(&mut self) {
        *lock(&self.room.free) += self.blocks;
        self.room.freed.notify_all();
    }
}

/// What a panicking thread left behind is counters: good enough for the others to end on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use kvbm_tiers::chaos::Schedule;

    use super::*;

    #[test]
    fn hits_count_as_far_as_blocks_arrived() {
        let plan = [(Tier::Device, 0..2), (Tier::Host, 2..5), (Tier::Object, 5..9)];
        let mut tally = ServedTally::default();
        tally.hit(&plan, 4);
        let blocks = Tier::ALL.map(|tier| tally.hit_tokens.of(tier) / u64::from(BLOCK_TOKENS));
        assert_eq!((blocks, tally.failed_loads), ([2, 2, 0, 0], 5));
    }

    #[test]
    fn a_request_whose_transfer_hangs_is_given_up_and_counted() {
        let runtime = crate::stop::runtime().unwrap();
        let stop = StopSignal::on_signals(&runtime).unwrap();
        let mut settings = Settings { block_bytes: Some(4_096), ..Settings::default() };
        settings.device.capacity = Some(kvbm_settings::Capacity::Blocks(8));
        settings.device.backend = kvbm_settings::DeviceBackend::Emulated;
        settings.host.capacity = Some(kvbm_settings::Capacity::Blocks(8));
        settings.host.huge_pages = false;
        settings.transfer.timeout_ms = 200;
        let schedule = Schedule::scripted(["memory:hang@0s+100ms".parse().unwrap()]);
        let chaos = Some(Chaos::new(schedule));
        let mut engine =
            SimulatedEngine::open(settings, Options::default(), chaos, runtime, stop).unwrap();
        engine.longest_wait = Some(Duration::from_millis(10));
        let request = Request {
            timestamp_ms: 0,
            input_length: 2 * BLOCK_TOKENS,
            output_length: 1,
            hash_ids: vec![1, 2],
        };
        let tally = engine.run(std::iter::once(Ok(request.clone())), 1, |_, _| ()).unwrap();
        assert_eq!((tally.requests, tally.hangs), (1, 1));
        engine.chaos.iter().for_each(Chaos::heal);
        engine.longest_wait = Some(Duration::from_mins(1));
        assert!(engine.drain_and_audit().drained);
        assert_eq!(engine.run(std::iter::once(Ok(request)), 1, |_, _| ()).unwrap().hangs, 0);
    }

    #[test]
    fn requests_larger_than_the_room_come_in_alone() {
        let room = DeviceRoom::new(10);
        let small = room.admit(4);
        std::thread::scope(|scope| {
            let large = scope.spawn(|| room.admit(1_000).blocks);
            drop(small);
            assert_eq!(large.join().unwrap(), 10);
        });
        assert_eq!(*lock(&room.free), 10);
    }
}
