//! Memory ahead of its need.
//!
//! The first use of a page waits until the kernel has cleared it: for a huge page 5–8 ms in a
//! virtual machine. Freeing a large array takes time too. No holder of the table's lock should wait
//! for either. So background work asks what the table needs soon, provides it with the table
//! unlocked, and hands it over. If it comes too late, only time is lost: the table then makes what
//! it needs itself.

use kvbm_tiers::Ahead;

use super::Table;
use super::index::IndexBuckets;
use super::tier::TierTable;

/// Memory that the table needs soon, and memory that it no longer needs.
#[derive(Debug)]
#[must_use = "it is not provided until it is asked for"]
pub struct Provision {
    ahead: Vec<Ahead>,
    spare: Option<usize>,
    _retired: Option<IndexBuckets>,
}

/// The array into which the index grows next.
#[derive(Debug)]
pub struct Spare(IndexBuckets);

impl Provision {
    /// Provides it, with the table unlocked, since it takes milliseconds. The result is for
    /// [`Table::supply`].
    pub fn provide(self) -> Option<Spare> {
        self.ahead.into_iter().for_each(Ahead::provide);
        self.spare.map(|buckets| Spare(IndexBuckets::populated(buckets)))
    }
}

impl Table {
    /// What memory the table needs soon.
    pub fn wanted_memory(&mut self) -> Provision {
        let slots = self.tiers.iter_mut().flatten().flat_map(TierTable::ahead);
        let ahead = slots.chain(self.records.ahead()).collect();
        Provision { ahead, spare: self.index.wanted_spare(), _retired: self.index.take_retired() }
    }

    /// Takes what was provided. Returns what it no longer wants.
    pub fn supply(&mut self, Spare(buckets): Spare) -> Option<Spare> {
        self.index.keep_spare(buckets).map(Spare)
    }
}

#[cfg(test)]
mod tests {
    use kvbm_policies::EvictionKind;
    use kvbm_tiers::{FramePool, Tier};

    use super::*;
    use crate::names::hash::{BlockHash, Chain};
    use crate::table::{RequestInfo, TierSpec};

    #[test]
    fn a_spare_is_wanted_once_before_each_growth() {
        let pool = FramePool::new(Tier::Host, 1_000);
        let policy = EvictionKind::Lru.build(1_000);
        let mut table = Table::new([TierSpec { pool, policy, flush_to: None, admission: None }]);
        assert!(table.wanted_memory().provide().is_none(), "an empty table has all it needs");
        let hashes: Vec<_> = (1..1_000).map(BlockHash::from_u128).collect();
        let _reserved = table.reserve(Tier::Host, Chain::from(&hashes[..]), RequestInfo::default());
        let (one, another) = (table.wanted_memory(), table.wanted_memory());
        assert!(one.provide().is_some_and(|spare| table.supply(spare).is_none()));
        assert!(table.wanted_memory().provide().is_none(), "it has one");
        assert!(
            another.provide().is_some_and(|spare| table.supply(spare).is_some()),
            "two are one too many"
        );
    }
}
