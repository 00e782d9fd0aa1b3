//! Whose blocks are: of whom brought each first, so that what a tenant stored can be found and forgotten.
//!
//! Nothing is kept while no request names a tenant, then four bytes for each record. A tenant that was forgotten and comes
//! back is another owner: what he stored before is found by its number, and not taken for what comes now.

use std::collections::HashMap;

use kvbm_tiers::{BlockKey, Owner, SlotId, Tier};

use super::Table;
use super::budget::Budget;
use super::index::RecordId;
use super::tier_set::TierSet;
use crate::task::Defect;

/// Who owns which record.
#[derive(Debug, Default)]
pub(super) struct Owners {
    /// For each record the number of its owner and one, 0: nobody.
    of: Vec<u32>,
    all: Vec<Owner>,
    /// Of each tenant the number that his blocks get now.
    current: HashMap<u32, u32>,
    /// How often each was forgotten.
    lives: HashMap<u32, u32>,
    /// Tenants whose blocks are counted, in order.
    counted: Vec<u32>,
    /// Evictions of each of them, by tier.
    evicted: [Vec<u64>; Tier::COUNT],
}

/// What a tier has of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantCounts {
    /// Blocks that are charged to him.
    pub charged: u32,
    /// Blocks evicted since the start, of those that he brought first.
    pub evicted: u64,
}

/// An owner's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OwnerId(u32);

impl Owners {
    /// The number of a tenant that is named now.
    pub(super) fn number(&mut self, tenant: Option<u32>) -> Option<OwnerId> {
        let tenant = tenant?;
        let number = *self.current.entry(tenant).or_insert_with(|| {
            let life = self.lives.get(&tenant).copied().unwrap_or(0);
            self.all.push(Owner { tenant, life });
            self.all.len() as u32 - 1
        });
        Some(OwnerId(number))
    }

    /// A new record is this owner's.
    pub(super) fn set(&mut self, record: RecordId, owner: Option<OwnerId>) {
        let at = record.0 as usize;
        if at >= self.of.len() {
            // What nobody owns needs no place.
            if owner.is_none() {
                return;
            }
            self.of.resize(at + 1, 0);
        }
        self.of[at] = owner.map_or(0, |OwnerId(number)| number + 1);
    }

    pub(super) fn of(&self, record: RecordId) -> Option<Owner> {
        let number = self.of.get(record.0 as usize)?.checked_sub(1)?;
        self.all.get(number as usize).copied()
    }

    /// A record's block is evicted.
    fn note_evicted(&mut self, tier: Tier, record: RecordId) {
        if self.counted.is_empty() {
            return;
        }
        let at = self.of(record).and_then(|owner| self.counted.binary_search(&owner.tenant).ok());
        if let Some(at) = at {
            self.evicted[tier.index()][at] += 1;
        }
    }

    /// Whether what this number named is forgotten.
    pub(super) fn is_past(&self, OwnerId(number): OwnerId) -> bool {
        self.all.get(number as usize).is_none_or(|owner| self.current.get(&owner.tenant) != Some(&number))
    }

    /// Whether a record is of a tenant, from before he was forgotten last.
    fn is_forgotten(&self, record: RecordId, tenant: u32) -> bool {
        let life = self.lives.get(&tenant).copied().unwrap_or(0);
        self.of(record).is_some_and(|owner| owner.tenant == tenant && owner.life < life)
    }
}

impl Table {
    /// Evictions of these tenants are counted from here on.
    pub fn count_tenants(&mut self, mut tenants: Vec<u32>) {
        tenants.sort_unstable();
        tenants.dedup();
        self.owners.evicted = std::array::from_fn(|_| vec![0; tenants.len()]);
        self.owners.counted = tenants;
    }

    /// What `tier` has of the tenants that are counted, in the order of their numbers.
    pub fn tenant_counts(&self, tier: Tier) -> Vec<TenantCounts> {
        let Some(held) = &self.tiers[tier.index()] else { return Vec::new() };
        let evicted = &self.owners.evicted[tier.index()];
        let counts = |(&tenant, &evicted)| TenantCounts { charged: held.charged_to(tenant), evicted };
        self.owners.counted.iter().zip(evicted).map(counts).collect()
    }

    /// Counts the eviction of the block in `slot`.
    pub(super) fn note_evicted(&mut self, tier: Tier, slot: SlotId) {
        let held = self.tier_mut(tier);
        held.stats.evicted += 1;
        let record = held.at(slot).record;
        self.owners.note_evicted(tier, record);
    }

    /// From here on what the tenant stored is another's. Returns how often he was forgotten by now.
    pub fn begin_forgetting(&mut self, tenant: u32) -> u32 {
        let life = self.owners.lives.entry(tenant).or_default();
        *life += 1;
        self.owners.current.remove(&tenant);
        *life
    }

    /// Ends a transfer of what is forgotten, the one at place `from` or behind it, from its first such block on. Returns
    /// where the next step goes on. `None`: there are no more.
    pub fn end_forgotten(&mut self, tenant: u32, from: u32) -> Option<u32> {
        let (transfers, owners) = (&self.transfers, &self.owners);
        let (id, block) = transfers.next_with(from, |record| owners.is_forgotten(record, tenant))?;
        self.abort(id, block);
        Some(id.place + 1)
    }

    /// Drops the topmost blocks of what is forgotten among the records from number `from` on, and what hangs on them, as
    /// far as the hold goes; [`drop_more`](Self::drop_more) ends what is too much for one. Returns how many, and where the
    /// next hold goes on.
    pub fn drop_forgotten(
        &mut self,
        tenant: u32,
        from: u32,
        hold: &mut Budget,
    ) -> (usize, Option<u32>) {
        let (mut dropped, mut next) = (0, from);
        while self.records.has_beyond(next) {
            if !hold.look() {
                return (dropped, Some(next));
            }
            if let Some(key) = self.topmost_forgotten(tenant, RecordId(next)) {
                dropped += 1;
                for tier in Tier::ALL {
                    let blocks = self.quarantine_resident(tier, key, Defect::Forgotten);
                    hold.pay_changes(blocks + 1);
                    // Each tier may have many of them; and a match looks at each block of which more is to be dropped.
                    if hold.is_spent() || self.is_dropping() {
                        return (dropped, Some(next));
                    }
                }
            }
            next += 1;
        }
        (dropped, None)
    }

    /// The name of a record, if its block is forgotten and what comes before it is not.
    fn topmost_forgotten(&self, tenant: u32, record: RecordId) -> Option<BlockKey> {
        let is_forgotten = |record: RecordId| self.owners.is_forgotten(record, tenant);
        let known = Some(self.records.at(record)).filter(|known| known.resident() != TierSet::default())?;
        let is_topmost = is_forgotten(record) && !known.parent().is_some_and(is_forgotten);
        is_topmost.then(|| known.key())
    }
}
