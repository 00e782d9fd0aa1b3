//! Whose blocks are: of whom brought each first, so that what a tenant stored can be found and forgotten.
//!
//! Nothing is kept while no request names a tenant, then four bytes for each record. A tenant that was forgotten and comes
//! back is another owner: what it stored before is found by its number, and not taken for what comes now.

use std::collections::HashMap;

use kvbm_tiers::{Owner, SlotId, Tier};

use super::Table;
use super::index::RecordId;
use super::tier_set::TierSet;
use super::transfers::TransferCursor;
use crate::task::Defect;

/// Records, or blocks of a transfer, looked at in one step.
const LOOKED_AT: usize = 2_048;

/// Who owns which record.
#[derive(Debug, Default)]
pub(super) struct Owners {
    /// For each record the number of its owner and one, 0: nobody.
    of: Vec<u32>,
    all: Vec<KnownOwner>,
    /// Of each tenant the number that its blocks get now.
    current: HashMap<u32, u32>,
    /// How often each was forgotten.
    lives: HashMap<u32, u32>,
    /// Tenants whose blocks are counted, in order.
    counted: Vec<u32>,
    /// Evictions of each of them, by tier.
    evicted: [Vec<u64>; Tier::COUNT],
}

#[derive(Debug)]
struct KnownOwner {
    owner: Owner,
    /// The tenant was forgotten since: so is every block of this owner, at once, however many there are.
    is_past: bool,
}

/// What a tier has of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantCounts {
    /// Blocks that are charged to it.
    pub charged: u32,
    /// Blocks evicted since the start, of those that it brought first.
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
            self.all.push(KnownOwner { owner: Owner { tenant, life }, is_past: false });
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
        self.known(record).map(|known| known.owner)
    }

    fn known(&self, record: RecordId) -> Option<&KnownOwner> {
        let number = self.of.get(record.0 as usize)?.checked_sub(1)?;
        self.all.get(number as usize)
    }

    /// From here on what the tenant's number names is forgotten. Returns how often that was so by now.
    fn forget(&mut self, tenant: u32) -> u32 {
        let life = self.lives.entry(tenant).or_default();
        *life += 1;
        if let Some(number) = self.current.remove(&tenant) {
            self.all[number as usize].is_past = true;
        }
        *life
    }

    /// Whether a tenant was ever forgotten.
    pub(super) fn was_forgotten(&self, tenant: u32) -> bool {
        self.lives.contains_key(&tenant)
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
        self.all.get(number as usize).is_none_or(|known| known.is_past)
    }

    /// Whether a record is of a tenant, from before it was forgotten last.
    pub(super) fn is_forgotten(&self, record: RecordId) -> bool {
        self.known(record).is_some_and(|known| known.is_past)
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

    /// From here on what the tenant stored is forgotten: nothing more of it comes to any tier by a copy that is not planned
    /// yet. Returns how often it was forgotten by now. [`end_forgotten`](Self::end_forgotten) ends what is under way, and then
    /// [`drop_forgotten`](Self::drop_forgotten) drops what is there.
    pub fn begin_forgetting(&mut self, tenant: u32) -> u32 {
        self.owners.forget(tenant)
    }

    /// Ends a transfer of what is forgotten from its first such block on, as far as a step goes. Returns where the next step
    /// goes on. `None`: there are no more.
    pub fn end_forgotten(&mut self, from: TransferCursor) -> Option<TransferCursor> {
        let (id, mut coming, next) = self.transfers.coming_from(from, LOOKED_AT)?;
        let forgotten = coming.find(|&(_, record)| self.owners.is_forgotten(record));
        drop(coming);
        if let Some((block, _)) = forgotten {
            self.abort(id, block);
        }
        Some(next)
    }

    /// Drops the topmost blocks of what is forgotten among the records from number `from` on, and what hangs on them, as
    /// far as a step goes; [`drop_more`](Self::drop_more) ends what is too much for one. Returns where the next step goes
    /// on.
    pub fn drop_forgotten(&mut self, from: u32) -> Option<u32> {
        let is_forgotten = |record: RecordId| self.owners.is_forgotten(record);
        let is_topmost = |&(record, _): &(RecordId, &super::record::Record)| {
            self.records.at(record).resident() != TierSet::default()
                && is_forgotten(record)
                && !self.records.at(record).parent().is_some_and(is_forgotten)
        };
        let among = self.records.live_among(from, LOOKED_AT).filter(is_topmost);
        let topmost: Vec<_> = among.map(|(id, record)| (id, record.key())).collect();
        let mut dropped = 0;
        for (record, key) in topmost {
            for tier in Tier::ALL.into_iter().filter(|&tier| self.has(tier)).collect::<Vec<_>>() {
                if dropped >= self.steps.dropped || self.is_dropping() {
                    return Some(record.0);
                }
                dropped += self.quarantine_resident(tier, key, Defect::Forgotten);
            }
        }
        let next = from + LOOKED_AT as u32;
        self.records.has_beyond(next).then_some(next)
    }
}
