//! The block table: which block lies in which slot of which tier, what reads it, and what may
//! leave.
//!
//! Bookkeeping only, behind one mutex: no I/O and no threads, and the lock tells it the time. Its
//! invariant, checked by [`Table::audit`]: **a block is resident in a tier only if its parent is**
//! (design: fill root-first, drain leaf-first). Everything else follows from it:
//!
//! | module | holds |
//! |---|---|
//! | `index` | key → record number, one cache miss |
//! | `record` | a block: key, parent, slots, where it is resident or filling; sets of tiers |
//! | `tier` | a tier's slots: children, pins, flags; its policy and its queue of dirty blocks |
//! | `prefix` | the match: leading blocks per tier, found by galloping from where it was last |
//! | `pins` | leases: the deepest block of a chain in each tier, pinned; loans; idle blocks being verified |
//! | `budget` | what one hold of the table's lock may do |
//! | `transfers` | blocks on their way into a tier, from the plan to the landing, published in chain order |
//! | `evict` | eviction, and which blocks a full tier takes in |
//! | `namespace` | the names of blocks, how a reset changes them, and what it leaves behind in slots |
//! | `owners` | which tenant owns a block, and how a tenant is forgotten |
//! | `quarantine` | bad blocks and their readers, and tiers that gave wrong blocks |
//! | `flush` | which dirty blocks to copy down next, root-first |
//! | `flush_queue` | in which order they wait |
//! | `policy` | a tier as its policies see it, and the request behind a use |
//! | `events` | what listeners are told |
//! | `journal` | notes for the index of a tier that outlives the process |
//! | `restore` | what is resident again after a restart |
//! | `miss_history` | why blocks are gone: the reasons for misses |
//! | `demotion` | blocks that go down only when they leave |
//! | `shared` | the table behind its lock, memory made while it is unlocked, and, for the bench, how long it is held |
//! | `audit` | the invariants, checked one by one |

mod audit;
mod budget;
mod demotion;
#[cfg(test)]
mod drop_tests;
mod events;
mod evict;
mod flush;
mod flush_queue;
mod index;
mod journal;
mod miss_history;
mod namespace;
mod owners;
mod pins;
mod policy;
mod prefix;
mod quarantine;
mod record;
mod restore;
pub(crate) mod shared;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod tier;
mod transfers;

use std::iter::Sum;

use kvbm_policies::{Ended, Upkeep};
use kvbm_tiers::{BlockKey, Owner, SlotId, SlotRef, Tier};

use self::index::{Index, KeyHash};
use self::miss_history::MissHistory;
use self::namespace::PresentNamespace;
use self::owners::BlockOwners;
use self::prefix::BoundaryHints;
use self::quarantine::TierQuarantines;
use self::record::BlockRecords;
use self::tier::TierTable;
use self::transfers::OpenTransfers;
use crate::observe::events::EventListeners;

pub use self::audit::Violation;
pub use self::budget::Budget;
pub use self::flush::FlushStep;
pub use self::index::RecordId;
pub use self::journal::{Journal, Note, Notes, Taken};
pub use self::miss_history::{Miss, MissReason};
pub(crate) use self::namespace::EpochNames;
pub use self::namespace::{NamespaceId, Naming, Unflushed};
pub use self::pins::{Pins, Scrubbed};
pub use self::policy::{RequestContext, RequestInfo};
pub use self::prefix::Match;
pub use self::record::TierSet;
pub use self::restore::Restored;
#[cfg(feature = "testing")]
pub use self::shared::{LocksTaken, locks_taken, longest_hold};
pub use self::shared::{Provision, SharedTable, Spare, TableGuard};
pub use self::tier::{SlotLimits, TierSpec, TierStats};
pub(crate) use self::transfers::LeftBlock;
pub use self::transfers::{
    Dropped, Effects, Filled, Reply, Reserved, SaveAgain, Steps, TransferCursor, TransferEnd,
    TransferPlan,
};

pub use self::owners::TenantCounts;

/// Occupancy of a tier, in slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct SlotCounts {
    /// All.
    pub total: u32,
    /// On the free list.
    pub free: u32,
    /// Being written.
    pub filling: u32,
    /// Readable.
    pub resident: u32,
    /// Of blocks that were dropped because their bytes are bad, but still have readers.
    pub quarantined: u32,
    /// Of blocks that a reset forgot: free soon, or when their last reader leaves.
    pub forgotten: u32,
    /// Held by overdue copies: free again when these end after all.
    pub lost: u32,
}

impl Sum for SlotCounts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |sum, counts| Self {
            total: sum.total + counts.total,
            free: sum.free + counts.free,
            filling: sum.filling + counts.filling,
            resident: sum.resident + counts.resident,
            quarantined: sum.quarantined + counts.quarantined,
            forgotten: sum.forgotten + counts.forgotten,
            lost: sum.lost + counts.lost,
        })
    }
}

/// Names of requests without a name from the engine begin here.
const FIRST_NAMELESS: u64 = 1 << 63;

/// The block table.
#[derive(Debug)]
pub struct Table {
    namespace: PresentNamespace,
    index: Index,
    records: BlockRecords,
    owners: BlockOwners,
    tiers: [Option<TierTable>; Tier::COUNT],
    transfers: OpenTransfers,
    steps: Steps,
    quarantines: TierQuarantines,
    miss_history: MissHistory,
    boundary_hints: BoundaryHints,
    listeners: EventListeners,
    /// Journals are told with the next block that everything was forgotten.
    owes_reset: bool,
    /// The last name given to a request that had none.
    nameless: u64,
    now_ms: u64,
}

impl Table {
    /// An empty table of these tiers, at most one of each kind.
    pub fn new(specs: impl IntoIterator<Item = TierSpec>) -> Self {
        let mut tiers = [const { None }; Tier::COUNT];
        let mut largest = 0;
        for spec in specs {
            let held = TierTable::new(spec);
            // Tiers hold much the same blocks: the largest has most of them.
            largest = largest.max(held.total.min(Self::RESERVED_RECORDS));
            let tier = held.tier;
            tiers[tier.index()] = Some(held);
        }
        Self {
            namespace: PresentNamespace::default(),
            index: Index::with_room_for(largest as usize),
            records: BlockRecords::with_room_for(largest as usize),
            owners: BlockOwners::default(),
            tiers,
            transfers: OpenTransfers::default(),
            steps: Steps::default(),
            quarantines: TierQuarantines::default(),
            miss_history: MissHistory::with_room_for(largest as usize),
            boundary_hints: BoundaryHints::with_room_for(largest as usize),
            listeners: EventListeners::default(),
            owes_reset: false,
            // Beyond what engines that count their requests reach.
            nameless: FIRST_NAMELESS,
            now_ms: 0,
        }
    }

    /// Sets the steps of plans and drops: tests let other calls come between any two of them.
    #[must_use]
    pub fn in_steps(self, steps: Steps) -> Self {
        Self { steps, ..self }
    }

    /// Sets how far slots count themselves, in an empty table: tests reach counts that go on
    /// elsewhere.
    #[must_use]
    pub fn with_slot_limits(mut self, limits: SlotLimits) -> Self {
        self.tiers.iter_mut().flatten().for_each(|held| held.count_up_to(limits));
        self
    }

    /// Most records that are set aside at the start, whatever a tier's nominal size.
    const RESERVED_RECORDS: u32 = 1 << 20;

    /// Time for policies and flush ages, in milliseconds since any origin. Earlier times are
    /// ignored.
    pub fn advance_clock(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
    }

    /// Whether the table has this tier.
    pub const fn has(&self, tier: Tier) -> bool {
        self.tiers[tier.index()].is_some()
    }

    fn tier(&self, tier: Tier) -> &TierTable {
        self.tiers[tier.index()].as_ref().expect("callers name configured tiers")
    }

    fn tier_mut(&mut self, tier: Tier) -> &mut TierTable {
        self.tiers[tier.index()].as_mut().expect("callers name configured tiers")
    }

    /// A tier together with the records, which its policy may look at.
    fn tier_and_records(&mut self, tier: Tier) -> (&mut TierTable, &BlockRecords) {
        let tier = self.tiers[tier.index()].as_mut().expect("callers name configured tiers");
        (tier, &self.records)
    }

    fn find(&self, key: BlockKey) -> Option<RecordId> {
        let hash = KeyHash::of(key);
        self.index.find(hash, self.index.first(hash), |record| self.records.at(record).is(key))
    }

    /// The record of a block that is about to come, made if no tier knows it. `None` if the index
    /// is full, or the block of this name is being dropped.
    fn intern(
        &mut self,
        key: BlockKey,
        parent: Option<RecordId>,
        owner: Option<Owner>,
    ) -> Option<RecordId> {
        if let Some(known) = self.find(key) {
            return (!self.is_dropped(known)).then_some(known);
        }
        // The index holds record numbers, so the record is made first, and removed if the index is
        // full.
        let record = self.records.add(key, parent);
        self.owners.set(record, owner);
        let hash_of = |record| KeyHash::of(self.records.at(record).key());
        if !self.index.insert(KeyHash::of(key), record, hash_of) {
            self.records.remove(record);
            return None;
        }
        Some(record)
    }

    /// Drops the record of a block that no tier has any more, noting why it left the last one.
    fn forget_if_nowhere(&mut self, record: RecordId, reason: MissReason, tier: Tier) {
        if self.records.at(record).is_nowhere() {
            self.miss_history.note(self.records.at(record).key(), reason, tier, self.now_ms);
            self.index.remove(KeyHash::of(self.records.at(record).key()), record);
            self.records.remove(record);
        }
    }

    fn slot_ref(&self, tier: Tier, slot: SlotId) -> SlotRef {
        self.tier(tier).pool.resident_ref(slot).expect("the table names resident slots only")
    }

    /// Where a block lies in `tier`, if the tier may give it.
    pub(super) fn slot_of(&self, tier: Tier, key: BlockKey) -> Option<SlotId> {
        let known = self.records.at(self.find(key).filter(|_| self.is_in_use(tier))?);
        known.resident().has(tier).then(|| known.slot(tier))
    }

    /// A request has ended: every tier's policies may learn from it.
    pub fn finished(&mut self, ended: &Ended) {
        self.tiers.iter_mut().flatten().for_each(|held| held.policies.finished(ended));
    }

    /// Takes a bounded step of the policies' own upkeep, and adds to `work` what is to be done with
    /// the table unlocked. Returns whether another step is due: see
    /// [`TierPolicies::upkeep`](kvbm_policies::TierPolicies::upkeep).
    pub fn upkeep(&mut self, work: &mut Vec<Upkeep>) -> bool {
        // One step a call: tiers after the first that wants another wait their turn.
        self.tiers.iter_mut().flatten().any(|held| held.policies.upkeep(work))
    }

    /// The tier into which the blocks of `tier` are flushed now.
    pub fn flushes_to(&self, tier: Tier) -> Option<Tier> {
        let to = self.tiers[tier.index()].as_ref().and_then(|held| held.flush_to);
        to.filter(|&to| self.is_in_use(tier) && self.is_in_use(to))
    }

    /// Whether blocks are on their way into `tier`.
    pub fn is_filling(&self, tier: Tier) -> bool {
        self.transfers.is_filling(tier)
    }

    /// Occupancy of `tier`; zeroes if there is none.
    pub fn counts(&self, tier: Tier) -> SlotCounts {
        let Some(held) = &self.tiers[tier.index()] else { return SlotCounts::default() };
        let (total, free, lost) = (held.total - held.pool.closed(), held.pool.free(), held.lost);
        let (resident, forgotten) = (held.resident, held.forgotten.blocks);
        let quarantined = self.quarantines.slots_of(tier);
        // The rest is being written.
        let filling = total.saturating_sub(free + resident + forgotten + lost + quarantined);
        SlotCounts { total, free, filling, resident, quarantined, forgotten, lost }
    }

    /// Which directories of `tier` are there, in their order, if it has any.
    pub fn directories(&self, tier: Tier) -> impl Iterator<Item = bool> {
        let pool = self.tiers[tier.index()].as_ref().map(|held| &held.pool);
        pool.into_iter().flat_map(|pool| (0..pool.shards()).map(|shard| !pool.is_closed(shard)))
    }

    /// Counts of `tier` since the start.
    pub fn stats(&self, tier: Tier) -> TierStats {
        self.tiers[tier.index()].as_ref().map(|held| held.stats).unwrap_or_default()
    }

    /// Blocks known to any tier.
    pub const fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether no tier holds anything.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
