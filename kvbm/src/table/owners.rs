//! Owners of blocks: the tenant that brought each first, so that what it stored can be found and
//! forgotten.
//!
//! Nothing is kept while no request names a tenant; then eight bytes for each record. Of a tenant
//! without blocks only the count of its forgettings is kept, if there were any. A tenant that was
//! forgotten and comes back is another owner: its earlier blocks are not confused with its new
//! ones.

use std::collections::HashMap;

use kvbm_tiers::{BlockKey, Owner, SlotId, Tier};

use super::Table;
use super::budget::Budget;
use super::index::RecordId;
use super::record::TierSet;
use super::transfers::TransferCursor;
use crate::task::Defect;

/// Who owns which record.
#[derive(Debug, Default)]
pub(super) struct BlockOwners {
    /// By record, in chunks made on first use: the first tenant may come when there are a million
    /// records.
    of: Vec<Option<Box<[Owner; CHUNK]>>>,
    /// How often tenants were forgotten; those never forgotten are not in it.
    lives: HashMap<u32, u32>,
    /// Tenants whose blocks are counted, in order.
    counted: Vec<u32>,
    /// Evictions of each of them, by tier.
    evicted: [Vec<u64>; Tier::COUNT],
}

/// What a tier holds of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantCounts {
    /// Blocks charged to it.
    pub charged: u32,
    /// Blocks that it brought first and that were evicted since the start.
    pub evicted: u64,
}

const CHUNK: usize = 1_024;
/// No owner: no tenant is forgotten that often.
const UNOWNED: Owner = Owner { tenant: 0, life: u32::MAX };

impl BlockOwners {
    /// A tenant as the owner of what comes in its name now.
    pub(super) fn present(&self, tenant: Option<u32>) -> Option<Owner> {
        tenant.map(|tenant| Owner { tenant, life: self.life(tenant) })
    }

    /// Sets the owner of a new record.
    pub(super) fn set(&mut self, record: RecordId, owner: Option<Owner>) {
        let (chunk, at) = (record.0 as usize / CHUNK, record.0 as usize % CHUNK);
        if owner.is_some() && chunk >= self.of.len() {
            self.of.resize_with(chunk + 1, || None);
        }
        match (self.of.get_mut(chunk), owner) {
            (Some(Some(chunk)), owner) => chunk[at] = owner.unwrap_or(UNOWNED),
            (Some(chunk), Some(owner)) => chunk.insert(Box::new([UNOWNED; CHUNK]))[at] = owner,
            // A record without an owner needs no place.
            (_, _) => {}
        }
    }

    pub(super) fn of(&self, record: RecordId) -> Option<Owner> {
        let chunk = self.of.get(record.0 as usize / CHUNK)?.as_ref()?;
        Some(chunk[record.0 as usize % CHUNK]).filter(|&owner| owner != UNOWNED)
    }

    fn life(&self, tenant: u32) -> u32 {
        self.lives.get(&tenant).copied().unwrap_or(0)
    }

    /// Whether a tenant was ever forgotten.
    pub(super) fn was_forgotten(&self, tenant: u32) -> bool {
        self.lives.contains_key(&tenant)
    }

    /// Counts the eviction of a record's block.
    fn note_evicted(&mut self, tier: Tier, record: RecordId) {
        if self.counted.is_empty() {
            return;
        }
        let at = self.of(record).and_then(|owner| self.counted.binary_search(&owner.tenant).ok());
        if let Some(at) = at {
            self.evicted[tier.index()][at] += 1;
        }
    }

    /// Whether an owner was forgotten since it was named.
    pub(super) fn is_past(&self, owner: Owner) -> bool {
        owner.life < self.life(owner.tenant)
    }

    /// Whether a record is from before its tenant was last forgotten.
    pub(super) fn is_forgotten(&self, record: RecordId) -> bool {
        !self.lives.is_empty() && self.of(record).is_some_and(|owner| self.is_past(owner))
    }
}

impl Table {
    /// A tenant as the owner of what comes in its name now.
    pub(crate) fn present_owner(&self, tenant: Option<u32>) -> Option<Owner> {
        self.owners.present(tenant)
    }

    /// Evictions of these tenants are counted from here on.
    pub fn count_tenants(&mut self, mut tenants: Vec<u32>) {
        tenants.sort_unstable();
        tenants.dedup();
        self.owners.evicted = std::array::from_fn(|_| vec![0; tenants.len()]);
        self.owners.counted = tenants;
    }

    /// What `tier` holds of the counted tenants, in the order of their numbers.
    pub fn tenant_counts(&self, tier: Tier) -> Vec<TenantCounts> {
        let Some(held) = &self.tiers[tier.index()] else { return Vec::new() };
        let evicted = &self.owners.evicted[tier.index()];
        let counts = |(&tenant, &evicted)| TenantCounts {
            charged: held.policies.charged_to(Some(tenant)),
            evicted,
        };
        self.owners.counted.iter().zip(evicted).map(counts).collect()
    }

    /// Counts the eviction of the block in `slot`.
    pub(super) fn note_evicted(&mut self, tier: Tier, slot: SlotId) {
        let held = self.tier_mut(tier);
        held.stats.evicted += 1;
        let record = held.at(slot).record;
        self.owners.note_evicted(tier, record);
    }

    /// From here on what the tenant stored is forgotten: no copy that is planned later brings any
    /// of it to a tier. Returns how often the tenant was forgotten so far.
    /// [`end_forgotten`](Self::end_forgotten) ends what is under way, and then
    /// [`drop_forgotten`](Self::drop_forgotten) drops what is there.
    pub fn begin_forgetting(&mut self, tenant: u32) -> u32 {
        self.quarantines.drop_name();
        let life = self.owners.lives.entry(tenant).or_default();
        *life += 1;
        *life
    }

    /// Ends the next transfer of forgotten blocks, from its first such block on, as far as the hold
    /// goes. Returns where the next hold goes on. `None`: there are no more.
    pub fn end_forgotten(
        &mut self,
        from: TransferCursor,
        budget: &mut Budget,
    ) -> Option<TransferCursor> {
        let (transfers, owners) = (&self.transfers, &self.owners);
        match transfers.next_with(from, |record| owners.is_forgotten(record), budget) {
            Ok((id, block)) => {
                self.abort(id, block);
                Some(TransferCursor::after(id))
            }
            Err(next) => next,
        }
    }

    /// Drops the topmost forgotten blocks among the records from number `from` on, and their
    /// descendants, as far as the hold goes; [`drop_more`](Self::drop_more) finishes what is too
    /// much for one hold. Returns where the next hold goes on.
    pub fn drop_forgotten(&mut self, from: u32, budget: &mut Budget) -> Option<u32> {
        let mut next = from;
        while self.records.has_beyond(next) {
            if !budget.look() {
                return Some(next);
            }
            if let Some(key) = self.topmost_forgotten(RecordId(next)) {
                for tier in Tier::ALL.into_iter().filter(|&tier| self.has(tier)).collect::<Vec<_>>()
                {
                    // A match looks at each chain that is still being dropped, and each tier may
                    // have many.
                    if budget.is_spent() || self.is_dropping() {
                        return Some(next);
                    }
                    let blocks = self.quarantine_resident(tier, key, Defect::Forgotten);
                    budget.pay_changes(blocks + 1);
                }
            }
            next += 1;
        }
        None
    }

    /// The name of a record, if its block is forgotten and its parent is not.
    fn topmost_forgotten(&self, record: RecordId) -> Option<BlockKey> {
        let is_forgotten = |record: RecordId| self.owners.is_forgotten(record);
        let known =
            Some(self.records.at(record)).filter(|known| known.resident() != TierSet::default())?;
        let is_topmost = is_forgotten(record) && !known.parent().is_some_and(is_forgotten);
        is_topmost.then(|| known.key())
    }
}

#[cfg(test)]
mod tests {
    use kvbm_policies::{EvictionKind, Hints};
    use kvbm_tiers::FramePool;

    use super::*;
    use crate::names::hash::{BlockHash, Chain};
    use crate::table::{RequestInfo, TierSpec};

    #[test]
    fn a_tenant_without_blocks_costs_nothing() {
        let spec = TierSpec {
            pool: FramePool::new(Tier::Host, 16),
            policy: EvictionKind::Lru.build(16),
            flush_to: None,
            admission: None,
        };
        let mut table = Table::new([spec]);
        for tenant in 0..10_000 {
            let info = RequestInfo {
                hints: Hints { tenant: Some(tenant), ..Hints::default() },
                request: None,
                ..RequestInfo::default()
            };
            let hashes = vec![BlockHash::from_u128(u128::from(tenant) + 1)];
            let reserved = table.reserve(Tier::Host, Chain::from(&hashes), info);
            let _ = table.fill(reserved.transfer, 0, reserved.frames);
            table.end_plan(reserved.transfer);
            let _ = table.take_effects();
            let owner = table
                .find(table.enter(Chain::from(&hashes)).key(0))
                .and_then(|record| table.owners.of(record));
            assert_eq!(owner, Some(Owner { tenant, life: 0 }));
        }
        let BlockOwners { of, lives, .. } = &table.owners;
        assert_eq!((of.len(), lives.len()), (1, 0), "no more than for the records that there are");
    }

    #[test]
    fn a_record_of_nobody_is_not_its_last_owners() {
        let mut owners = BlockOwners::default();
        let mine = Owner { tenant: 0, life: 0 };
        owners.set(RecordId(5_000), Some(mine));
        assert_eq!(
            (owners.of(RecordId(5_000)), owners.of(RecordId(5_001)), owners.of(RecordId(0))),
            (Some(mine), None, None)
        );
        owners.set(RecordId(5_000), None);
        assert_eq!(owners.of(RecordId(5_000)), None);
    }
}
