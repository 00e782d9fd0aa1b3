//! One who knows what each tier holds from events alone.

use std::collections::HashMap;

use kvbm::scheduler::Core;
use kvbm::{BlockHash, CacheEvent, CachedBlock, Chain, Events, Tier};

/// Follows the events of a core from its first block on.
#[derive(Debug)]
pub struct Follower {
    events: Events,
    /// By tier: each block with its parent.
    held: [HashMap<(u8, BlockHash), Option<BlockHash>>; Tier::COUNT],
    /// How many children each block has in a tier.
    children: HashMap<(Tier, u8, BlockHash), usize>,
    /// The epoch that the last [`CacheEvent::Cleared`] told of.
    pub epoch: u64,
}

impl Follower {
    /// To be made before anything is in the tiers.
    pub fn of(core: &Core) -> Self {
        let events = core.table().listen(usize::MAX);
        Self { events, held: Default::default(), children: HashMap::new(), epoch: 0 }
    }

    /// Takes all events that wait.
    ///
    /// # Panics
    /// If they make no sense one after the other: parents come before their children and go after
    /// them.
    pub fn follow(&mut self) {
        while let Some(event) = self.events.try_next() {
            match event {
                CacheEvent::Stored { block, .. } => self.store(block),
                CacheEvent::Removed { block, .. } => self.remove(block),
                CacheEvent::Cleared { epoch } => {
                    self.held.iter_mut().for_each(HashMap::clear);
                    self.children.clear();
                    self.epoch = epoch;
                }
                other => panic!("not lost, and not known: {other:?}"),
            }
        }
    }

    fn store(&mut self, block: CachedBlock) {
        let CachedBlock { tier, group, hash, parent } = block;
        if let Some(parent) = parent {
            assert!(self.holds(tier, group, parent), "stored before its parent: {block:?}");
            *self.children.entry((tier, group, parent)).or_default() += 1;
        }
        let before = self.held[tier.index()].insert((group, hash), parent);
        assert_eq!(before, None, "stored twice: {block:?}");
    }

    fn remove(&mut self, block: CachedBlock) {
        let CachedBlock { tier, group, hash, parent } = block;
        let children = self.children.get(&(tier, group, hash)).copied().unwrap_or_default();
        assert_eq!(children, 0, "removed before its children: {block:?}");
        let held = self.held[tier.index()].remove(&(group, hash));
        assert_eq!(held, Some(parent), "removed, and not held so: {block:?}");
        if let Some(parent) = parent {
            *self.children.entry((tier, group, parent)).or_default() -= 1;
        }
    }

    fn holds(&self, tier: Tier, group: u8, hash: BlockHash) -> bool {
        self.held[tier.index()].contains_key(&(group, hash))
    }

    /// How many leading blocks of a chain a tier holds.
    pub fn blocks(&self, tier: Tier, chain: Chain<'_>) -> usize {
        chain.hashes.iter().take_while(|&&hash| self.holds(tier, chain.group, hash)).count()
    }

    /// Follows, and compares what it knows with what the core says, which must be at rest
    /// meanwhile.
    ///
    /// # Panics
    /// If they disagree.
    pub fn check<'a>(&mut self, core: &Core, chains: impl IntoIterator<Item = Chain<'a>>) {
        self.follow();
        let table = core.table();
        assert_eq!(self.epoch, table.epoch());
        for tier in Tier::ALL {
            assert_eq!(
                self.held[tier.index()].len(),
                table.counts(tier).resident as usize,
                "in {tier}"
            );
        }
        for chain in chains {
            let there = table.matches(chain);
            // What a withdrawn tier holds and does not give is not told to go.
            for tier in Tier::ALL.into_iter().filter(|&tier| !table.is_withdrawn(tier)) {
                assert_eq!(self.blocks(tier, chain), there.blocks(tier), "{chain:?} in {tier}");
            }
        }
    }
}
