//! What is timed: a manager over tiers in memory, called as an engine calls it.

use std::sync::Arc;

use kvbm::table::{Table, TierSpec};
use kvbm::{BlockHash, Chain, Lease, Manager, ManualClock, Options, RequestId, RequestInfo, Tier};
use kvbm_settings::{Capacity, DeviceBackend, EvictionKind, Settings};
use kvbm_tiers::FramePool;
use kvbm_tiers::chaos::Chaos;
use tokio::runtime::Runtime;

use super::chains::{Prompts, Random, SHORT, saves};

/// A block manager under test.
pub trait Subject {
    /// What it calls a block.
    type Name: Copy;

    /// A chain in its terms.
    fn names(chain: &[BlockHash]) -> Vec<Self::Name>;

    /// Makes the blocks of `chain` from its `from`-th on resident and lets go of them. Those before
    /// are resident already. Evicts where there is no room.
    fn publish(&self, chain: &[Self::Name], from: usize);

    /// Leases what it holds of `chain`, notes the use, and lets go; returns how many leading blocks
    /// that is.
    fn match_prompt(&self, chain: &[Self::Name]) -> usize;
}

/// Bytes of a block. A slot still takes a page of memory.
const BLOCK_BYTES: u64 = 64;

/// Our manager. Nothing fills its device: blocks are allocated and published without bytes.
#[derive(Debug)]
pub struct OurManager {
    manager: Manager,
    clock: Arc<ManualClock>,
    runtime: Runtime,
}

/// Settings of a manager with an emulated device of this many blocks, and everything else as by
/// default.
pub fn device_of(slots: usize, eviction: EvictionKind) -> Settings {
    let mut settings = Settings { block_bytes: Some(BLOCK_BYTES), eviction, ..Settings::default() };
    settings.device.backend = DeviceBackend::Emulated;
    settings.device.capacity = Some(Capacity::Blocks(slots as u64));
    settings
}

/// Settings of a manager whose host holds `slots` blocks, and whose device a quarter of that.
pub fn device_and_host_of(slots: usize, eviction: EvictionKind) -> Settings {
    let mut settings = device_of((slots / 4).max(1), eviction);
    settings.host.capacity = Some(Capacity::Blocks(slots as u64));
    settings
}

impl OurManager {
    /// Opens a manager.
    ///
    /// # Panics
    /// If there is not enough memory, or the settings are wrong.
    pub fn open(settings: Settings) -> Self {
        Self::open_with(settings, None)
    }

    /// The same, with media that misbehave on purpose.
    ///
    /// # Panics
    /// If there is not enough memory, or the settings are wrong.
    pub fn open_with(settings: Settings, chaos: Option<&Chaos>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build();
        let runtime = runtime.expect("threads can be started");
        // The clock moves when the bench says so.
        let clock = Arc::new(ManualClock::default());
        let media_layer = chaos.map(Chaos::layer);
        let options = Options { clock: Arc::clone(&clock) as _, media_layer, ..Options::default() };
        let manager = runtime.block_on(Manager::open(settings, options));
        Self { manager: manager.expect("a manager in memory opens"), clock, runtime }
    }

    /// A manager whose host holds of each prompt what it says, and whose device what its policy
    /// kept.
    pub fn holding(prompts: &Prompts, eviction: EvictionKind) -> Self {
        let ours = Self::open(device_and_host_of(prompts.saved(), eviction));
        ours.save_all(prompts);
        ours
    }

    /// Saves of each prompt what it says, as a server would: several prompts at a time, each in
    /// steps. No more at a time than half of the device holds, so that few are evicted there before
    /// their next step.
    pub fn save_all(&self, prompts: &Prompts) {
        let mut all: Vec<_> = prompts.iter().collect();
        Random::new(8).shuffle(&mut all);
        let most = self.manager.admin().counts(Tier::Device).total as usize / 2;
        while !all.is_empty() {
            let mut blocks = 0;
            let fits = all.iter().rev().take_while(|prompt| {
                blocks += prompt.saved;
                blocks <= most
            });
            let batch = all.split_off(all.len() - fits.count().max(1));
            let depths: Vec<_> = batch.iter().map(|prompt| prompt.saved).collect();
            for (prompt, _, to) in saves(&depths) {
                self.save(&batch[prompt].hashes[..to], None);
            }
        }
    }

    /// Publishes the blocks of `chain` on the device and saves them below.
    pub fn save(&self, chain: &[BlockHash], request: Option<RequestId>) {
        self.save_for(RequestInfo { request, ..RequestInfo::default() }, chain);
    }

    /// [`save`](Self::save), for a request of which more is known.
    pub fn save_for(&self, info: RequestInfo, chain: &[BlockHash]) {
        let lease = self.put_on_device(chain, info);
        self.runtime.block_on(self.manager.save(lease)).expect("the manager is open");
    }

    /// Publishes those blocks of `chain` that the device lacks. The lease holds them.
    pub fn put_on_device(&self, chain: &[BlockHash], info: RequestInfo) -> Lease {
        let lease = self.manager.lease_for(info, chain);
        if lease.blocks(Tier::Device) == chain.len() {
            return lease;
        }
        let mut allocation = self.manager.allocate(chain, lease).expect("old blocks make room");
        for position in allocation.blocks() {
            allocation.mark_filled(position);
        }
        let ticket = allocation.publish().expect("it is published once");
        self.runtime.block_on(ticket).expect("the manager is open").lease
    }

    /// The manager itself.
    pub const fn manager(&self) -> &Manager {
        &self.manager
    }

    /// The manager's clock.
    pub const fn clock(&self) -> &Arc<ManualClock> {
        &self.clock
    }

    /// Where its futures are waited for.
    pub const fn runtime(&self) -> &Runtime {
        &self.runtime
    }
}

impl Subject for OurManager {
    type Name = BlockHash;

    fn names(chain: &[BlockHash]) -> Vec<BlockHash> {
        chain.to_vec()
    }

    fn publish(&self, chain: &[BlockHash], _from: usize) {
        drop(self.put_on_device(chain, RequestInfo::default()));
    }

    fn match_prompt(&self, chain: &[BlockHash]) -> usize {
        let lease = self.manager.lease(chain);
        lease.held().longest()
    }
}

/// A bare table of four tiers, all of which hold `chains`: for its memory.
pub fn table_of_four_tiers(
    slots: usize,
    chains: &[Vec<BlockHash>],
    eviction: EvictionKind,
) -> Table {
    let spec = |tier| TierSpec {
        pool: FramePool::new(tier, slots as u32),
        policy: eviction.build(slots as u32),
        flush_to: None,
        admission: None,
    };
    let mut table = Table::new(Tier::ALL.map(spec));
    for tier in Tier::ALL {
        for chain in chains {
            debug_assert_eq!(chain.len(), SHORT);
            let reserved = table.reserve(tier, Chain::from(chain), RequestInfo::default());
            let mut effects = table.fill(reserved.transfer, 0, reserved.frames);
            while effects.has_more {
                effects = table.publish_more();
            }
            table.end_plan(reserved.transfer);
            let _ = table.take_effects();
        }
    }
    table
}
