//! What is timed: the block table as the manager uses it, behind one lock taken for each call.

use kvbm::table::{Table, TierSpec};
use kvbm::{BlockHash, Chain, Tier, Usage};
use kvbm_policies::EvictionKind;
use kvbm_tiers::FramePool;
use parking_lot::Mutex;

use crate::chains::{Prompts, saves};

/// A block manager under test.
pub trait Subject {
    /// What it calls a block.
    type Name: Copy;

    /// A chain in its terms.
    fn names(chain: &[BlockHash]) -> Vec<Self::Name>;

    /// Makes the blocks of `chain` from its `from`-th on resident and lets go of them. Those before are
    /// resident already. Evicts where there is no room.
    fn publish(&self, chain: &[Self::Name], from: usize);

    /// Leases what it holds of `chain`, notes the use, and lets go; answers how many leading blocks that is.
    fn match_prompt(&self, chain: &[Self::Name]) -> usize;
}

/// Our block table.
#[derive(Debug)]
pub struct OurTable {
    table: Mutex<Table>,
    /// Where [`Subject::publish`] puts blocks.
    tier: Tier,
}

impl OurTable {
    /// A table of one tier of `slots` blocks, without anything below to flush to.
    pub fn of_one_tier(slots: usize) -> Self {
        Self::new(&[(Tier::Host, slots)])
    }

    /// A table that holds of each prompt what it says.
    pub fn holding(prompts: &Prompts) -> Self {
        let all: Vec<_> = prompts.iter().collect();
        let host: Vec<_> = all.iter().map(|prompt| prompt.host).collect();
        let disk: Vec<_> = all.iter().map(|prompt| prompt.disk).collect();
        let slots = |depths: &[usize]| depths.iter().sum();
        let ours = Self::new(&[(Tier::Disk, slots(&disk)), (Tier::Host, slots(&host))]);
        for (tier, depths) in [(Tier::Disk, disk), (Tier::Host, host)] {
            for (prompt, from, to) in saves(&depths) {
                ours.publish_in(tier, &all[prompt].hashes[..to], from);
            }
        }
        ours
    }

    /// A table of four tiers, all of which hold `chains`.
    pub fn of_four_tiers(slots: usize, chains: &[Vec<BlockHash>]) -> Self {
        let ours = Self::new(&Tier::ALL.map(|tier| (tier, slots)));
        for tier in Tier::ALL {
            chains.iter().for_each(|chain| ours.publish_in(tier, chain, 0));
        }
        ours
    }

    fn new(tiers: &[(Tier, usize)]) -> Self {
        let spec = |&(tier, slots): &(Tier, usize)| TierSpec {
            pool: FramePool::new(tier, slots as u32),
            policy: EvictionKind::Lru.build(slots as u32),
            flush_to: None,
            admission: None,
        };
        Self { table: Mutex::new(Table::new(tiers.iter().map(spec))), tier: tiers[0].0 }
    }

    fn publish_in(&self, tier: Tier, chain: &[BlockHash], from: usize) {
        let reserved = self.table.lock().reserve(tier, Chain { group: 0, hashes: chain }, Usage::default());
        debug_assert!(reserved.resident >= from, "the blocks before these are resident");
        let Some((run, frames)) = reserved.run else { return };
        for (entry, frame) in frames.into_iter().enumerate() {
            self.table.lock().filled(run, entry, frame);
        }
        self.table.lock().close(run, None);
    }

    /// Blocks that some tier holds.
    pub fn len(&self) -> usize {
        self.table.lock().len()
    }

    /// Whether no tier holds anything.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Subject for OurTable {
    type Name = BlockHash;

    fn names(chain: &[BlockHash]) -> Vec<BlockHash> {
        chain.to_vec()
    }

    fn publish(&self, chain: &[BlockHash], from: usize) {
        self.publish_in(self.tier, chain, from);
    }

    fn match_prompt(&self, chain: &[BlockHash]) -> usize {
        let grip = self.table.lock().lease(Chain { group: 0, hashes: chain }, Usage::default());
        let blocks = grip.held().longest();
        self.table.lock().release(grip);
        blocks
    }
}
