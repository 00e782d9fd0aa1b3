//! Our side: a manager and the chains that go to and fro.

use std::time::Duration;

use kvbm::{
    BlockHash, ChainHasher, Lease, Manager, ManualClock, Options, Tier, Transfer, Transferred,
};
use kvbm_settings::Settings;
use kvbm_tiers::clock;
use tokio::runtime::Runtime;

use crate::output::CommandFailure;
use crate::pattern::BlockPattern;

/// Blocks of a chain: as many as a prompt of 4,096 tokens has.
const CHAIN: usize = 256;
/// Nothing that is timed takes as long.
const LIMIT: Duration = Duration::from_mins(2);

/// A manager whose device, host and, unless that is the host, bottom tier hold exactly the working
/// set.
#[derive(Debug)]
pub(crate) struct Bed<'r> {
    manager: Manager,
    chains: Vec<Vec<BlockHash>>,
    blocks: usize,
    bottom: Tier,
    runtime: &'r Runtime,
}

impl<'r> Bed<'r> {
    pub(crate) fn open(
        mut settings: Settings,
        bottom: Tier,
        runtime: &'r Runtime,
    ) -> Result<Self, CommandFailure> {
        // The address may be an engine's, which runs.
        settings.metrics.enabled = false;
        // The clock stands still: only what is asked for is flushed.
        let options =
            Options { clock: std::sync::Arc::new(ManualClock::default()), ..Options::default() };
        let manager = runtime.block_on(Manager::open(settings, options))?;
        let blocks = manager.admin().counts(Tier::Device).total as usize;
        let bed = Self { manager, chains: chains(blocks)?, blocks, bottom, runtime };
        bed.fill_device()?;
        Ok(bed)
    }

    fn fill_device(&self) -> Result<(), CommandFailure> {
        for chain in &self.chains {
            let mut allocation = self.manager.allocate(chain, self.manager.lease(chain))?;
            for position in allocation.blocks() {
                allocation.fill(position, |slot| BlockPattern::of(chain[position]).fill(slot));
            }
            self.runtime.block_on(allocation.publish()?)?;
        }
        self.expect_all_in(Tier::Device)
    }

    /// Whatever is to be written lies in the tier above the bottom, and nowhere below.
    pub(crate) fn prepare_write(&self) -> Result<(), CommandFailure> {
        if self.manager.admin().counts(Tier::Device).resident == 0 {
            self.move_all(Manager::load)?;
        }
        self.empty(Tier::Host);
        if self.bottom > Tier::Host {
            self.empty(self.bottom);
            self.move_all(Manager::save)?;
        }
        self.expect_none_in(self.bottom)
    }

    /// Whatever is to be read lies in the bottom tier alone.
    pub(crate) fn prepare_read(&self) -> Result<(), CommandFailure> {
        Tier::ALL.into_iter().filter(|&tier| tier < self.bottom).for_each(|tier| {
            self.empty(tier);
        });
        self.expect_none_in(Tier::Device)?;
        self.expect_all_in(self.bottom)
    }

    /// Saves to the host, or flushes from there.
    pub(crate) fn write(&self) -> Result<Duration, CommandFailure> {
        let started = clock::now();
        if self.bottom == Tier::Host {
            self.move_all(Manager::save)?;
        } else if !self.manager.drain(LIMIT).is_complete() {
            return Err(CommandFailure::unexpected("flushing did not end"));
        }
        let time = started.elapsed();
        self.expect_all_in(self.bottom)?;
        Ok(time)
    }

    /// Loads from the host, or brings up to there.
    pub(crate) fn read(&self) -> Result<Duration, CommandFailure> {
        let started = clock::now();
        let top = if self.bottom == Tier::Host {
            self.move_all(Manager::load)?;
            Tier::Device
        } else {
            self.move_all(|manager, lease| manager.prefetch(lease, Tier::Host))?;
            Tier::Host
        };
        let time = started.elapsed();
        self.expect_all_in(top)?;
        Ok(time)
    }

    /// Every block that went through all of this is as it was made.
    pub(crate) fn check(&self) -> Result<(), CommandFailure> {
        self.move_all(Manager::load)?;
        for chain in &self.chains {
            let lease = self.manager.lease(chain);
            for (position, &hash) in chain.iter().enumerate() {
                let is_whole = |block: &[u8]| BlockPattern::of(hash).matches(block);
                if self.manager.read_device(&lease, chain, position, is_whole) != Some(true) {
                    return Err(CommandFailure::unexpected("a block came back with other bytes"));
                }
            }
        }
        Ok(())
    }

    /// All chains at once, as concurrent requests would.
    fn move_all(
        &self,
        start: impl Fn(&Manager, Lease) -> Transfer<Transferred>,
    ) -> Result<(), CommandFailure> {
        let start = |chain| start(&self.manager, self.manager.lease(chain));
        let tickets: Vec<_> = self.chains.iter().map(start).collect();
        tickets.into_iter().try_for_each(|ticket| self.runtime.block_on(ticket).map(drop))?;
        Ok(())
    }

    /// A reader of a block holds it where it is, with those before it: the scrubber does for as
    /// long as the drive takes.
    fn empty(&self, tier: Tier) {
        let started = clock::now();
        while self.manager.admin().counts(tier).resident > 0 && started.elapsed() < LIMIT {
            if self.manager.admin().evict(tier, self.blocks) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn expect_all_in(&self, tier: Tier) -> Result<(), CommandFailure> {
        self.expect(tier, self.blocks)
    }

    fn expect_none_in(&self, tier: Tier) -> Result<(), CommandFailure> {
        self.expect(tier, 0)
    }

    fn expect(&self, tier: Tier, blocks: usize) -> Result<(), CommandFailure> {
        let resident = self.manager.admin().counts(tier).resident as usize;
        if resident == blocks {
            return Ok(());
        }
        let failures = self.manager.admin().failures();
        let message = format!(
            "the {tier} tier holds {resident} blocks instead of {blocks} ({failures} copies failed)"
        );
        Err(CommandFailure::unexpected(message))
    }
}

fn chains(blocks: usize) -> Result<Vec<Vec<BlockHash>>, CommandFailure> {
    let hasher = ChainHasher::new(1, b"bench tiers")?;
    let tokens: Vec<u32> = (0..blocks as u32).collect();
    Ok(tokens.chunks(CHAIN).map(|chunk| hasher.chain(chunk)).collect())
}
