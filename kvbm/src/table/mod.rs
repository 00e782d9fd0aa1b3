//! The block table: which block lies in which slot of which tier, who reads it, and what may leave.
//!
//! Pure bookkeeping behind one mutex: no I/O, no clock, no threads. Its invariant, checked by
//! [`Table::audit`]: **a block is resident in a tier only if its parent is** (design: fill root-first, drain
//! leaf-first). Everything else follows from it:
//!
//! | module | holds |
//! |---|---|
//! | `index` | key → record number, one cache miss |
//! | `record` | a block: key, parent, slots, where it is resident or filling |
//! | `tier` | a tier's slots: children, pins, flags; its policy and its queue of dirty blocks |
//! | `prefix` | the match: leading blocks per tier, found by galloping |
//! | `run` | blocks on their way into a tier, published in chain order |
//! | `evict` | eviction and quarantine |
//! | `flush` | which dirty blocks to copy down next, root-first |
//! | `visit` | whose use something is: the request, and what the engine says about it |
//! | `newcomers` | which blocks a full tier takes in |
//! | `departures` | why blocks are gone: the reasons for misses |
//! | `leaving` | blocks that go down when they leave, not before |
//! | `audit` | the invariants, checked one by one |

mod audit;
mod departures;
mod evict;
mod flush;
mod index;
mod leaving;
mod newcomers;
mod prefix;
mod record;
mod run;
#[cfg(test)]
mod tests;
mod tier;
mod visit;

use std::collections::HashSet;

use kvbm_policies::{RequestId, Upkeep};
use kvbm_tiers::{BlockKey, Frame, Loan, SlotId, SlotRef, Tier};

pub use self::audit::Drift;
pub use self::departures::{Miss, MissReason};
pub use self::evict::Defect;
pub use self::flush::FlushRun;
pub use self::index::RecordId;
pub use self::prefix::Match;
pub use self::record::TierSet;
pub use self::run::RunId;
pub use self::tier::{TierSpec, TierStats};
pub use self::visit::{Usage, Visit};

use self::departures::Departures;
use self::index::{Index, KeyHash};
use self::prefix::Found;
use self::record::{Record, Records};
use self::run::Runs;
use self::tier::TierTable;
use crate::hash::Chain;

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
    /// Of blocks that were dropped because their bytes are bad, while somebody still reads them.
    pub quarantined: u32,
    /// Held by copies that are overdue: free again when these end after all.
    pub lost: u32,
}

/// A lease in the table's own terms: one pin per tier, on the deepest block of the chain that it holds.
/// Give it back with [`Table::release`]; [`Lease`](crate::Lease) does so by itself.
#[derive(Debug)]
#[must_use = "a grip that is not released pins its blocks for ever"]
pub struct Grip {
    held: Match,
    deepest: [Option<SlotId>; Tier::COUNT],
    visit: Visit,
}

impl Grip {
    /// Holds nothing anywhere.
    pub(crate) const fn of_nothing(visit: Visit) -> Self {
        Self { held: Match::new([0; Tier::COUNT]), deepest: [None; Tier::COUNT], visit }
    }

    const fn hold(&mut self, tier: Tier, deepest: SlotId, blocks: usize) {
        self.held.set(tier, blocks as u32);
        self.deepest[tier.index()] = Some(deepest);
    }

    /// How many leading blocks of the chain each tier holds.
    pub const fn held(&self) -> &Match {
        &self.held
    }

    /// Notes how many leading blocks are worth loading.
    pub(crate) const fn judge(&mut self, worth_loading: u32) {
        self.held.judge(worth_loading);
    }

    /// Whose lease it is.
    pub const fn visit(&self) -> Visit {
        self.visit
    }
}

/// The blocks of a leased chain that a tier lacks.
#[derive(Debug)]
pub struct Missing {
    /// Leading blocks that the tier has.
    pub before: usize,
    /// The last of these; `None` if there is none.
    pub behind: Option<BlockKey>,
    /// Each block that it lacks, with the slot to read it from, root first.
    pub blocks: Vec<(BlockKey, SlotRef)>,
}

/// Slots reserved for blocks of one chain in one tier.
#[derive(Debug)]
pub struct Reserved {
    /// Leading blocks that the tier had already.
    pub resident: usize,
    /// Blocks after these that are on the way in other runs.
    pub in_flight: usize,
    /// The last of all these; `None` if there is none.
    pub behind: Option<BlockKey>,
    /// The run of the blocks behind it, with the titles to their slots; `None` when there are none.
    pub run: Option<(RunId, Vec<Frame>)>,
    /// Blocks after these that are not worth the room that they would take.
    pub declined: usize,
    /// Blocks at the end that found no room.
    pub refused: usize,
}

/// The block table.
#[derive(Debug)]
pub struct Table {
    index: Index,
    records: Records,
    tiers: [Option<TierTable>; Tier::COUNT],
    runs: Runs,
    watched: HashSet<(Tier, RecordId)>,
    settled: Vec<(Tier, BlockKey)>,
    departures: Departures,
    /// The name given last to a request that had none.
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
            largest = largest.max(held.total.min(Self::RESERVED_RECORDS));
            let tier = held.tier;
            tiers[tier.index()] = Some(held);
        }
        Self {
            index: Index::with_room_for(largest as usize),
            records: Records::with_room_for(largest as usize),
            tiers,
            runs: Runs::default(),
            watched: HashSet::new(),
            settled: Vec::new(),
            departures: Departures::with_room_for(largest as usize),
            nameless: 1 << 63,
            now_ms: 0,
        }
    }

    /// No more than so many records are set aside at the start, whatever a tier's nominal size.
    const RESERVED_RECORDS: u32 = 1 << 20;

    /// Time for policies and flush ages, in milliseconds since any origin. Earlier times are ignored.
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
    fn tier_and_records(&mut self, tier: Tier) -> (&mut TierTable, &Records) {
        let tier = self.tiers[tier.index()].as_mut().expect("callers name configured tiers");
        (tier, &self.records)
    }

    /// Leases a chain: pins and touches the deepest block that each tier holds of it.
    pub fn lease(&mut self, chain: Chain<'_>, usage: Usage) -> Grip {
        let Found { held, deepest } = self.locate(chain);
        let visit = Visit { usage: self.named(usage), path: chain.len() as u32 };
        let mut grip = Grip { held, ..Grip::of_nothing(visit) };
        for tier in Tier::ALL {
            if let Some(record) = deepest[tier.index()] {
                self.grasp(&mut grip, tier, record, held.blocks(tier) as u32);
            }
        }
        grip
    }

    /// Names a request that the engine has no name for, so that the parts of its use are told together.
    fn named(&mut self, usage: Usage) -> Usage {
        let request = usage.request.unwrap_or_else(|| {
            self.nameless += 1;
            RequestId(self.nameless)
        });
        Usage { request: Some(request), ..usage }
    }

    fn grasp(&mut self, grip: &mut Grip, tier: Tier, record: RecordId, depth: u32) {
        let slot = self.records.at(record).slot(tier);
        let access = grip.visit.access(self.now_ms, slot, depth, 0);
        let (held, records) = self.tier_and_records(tier);
        if !held.at_mut(slot).pin() {
            grip.held.set(tier, 0);
            return;
        }
        grip.deepest[tier.index()] = Some(slot);
        held.touch(&access, records);
        self.ask_again(tier, slot, grip.visit.usage);
    }

    /// Why `held` is not all of `chain`; `None` if it is.
    pub fn miss(&self, chain: Chain<'_>, held: &Match) -> Option<Miss> {
        let first = Some(held.longest()).filter(|&first| first < chain.len())?;
        let key = chain.key(first);
        let filling = self.find(key).map(|record| self.records.at(record).filling());
        let awaited = Tier::ALL.into_iter().find(|&tier| filling.is_some_and(|tiers| tiers.has(tier)));
        Some(match awaited {
            Some(_) => Miss { reason: MissReason::Late, tier: awaited, age_s: None },
            None => self.departures.find(key, self.now_ms),
        })
    }

    /// Ends a lease.
    #[expect(clippy::needless_pass_by_value, reason = "the grip ends here")]
    pub fn release(&mut self, grip: Grip) {
        for tier in Tier::ALL {
            if let Some(slot) = grip.deepest[tier.index()] {
                self.unpin(tier, slot);
            }
        }
    }

    /// Extends a lease to the `blocks` leading blocks that end with `deepest`, if `tier` has that. A lease that
    /// holds more there already keeps it.
    fn hold_if_resident(&mut self, grip: &mut Grip, tier: Tier, deepest: BlockKey, blocks: usize) {
        if grip.held.blocks(tier) >= blocks {
            return;
        }
        let Some(record) = self.find(deepest).filter(|&r| self.records.at(r).resident().has(tier)) else {
            return;
        };
        let slot = self.records.at(record).slot(tier);
        if self.tier_mut(tier).at_mut(slot).pin() {
            self.release_tier(grip, tier);
            grip.hold(tier, slot, blocks);
        }
    }

    /// Extends a lease to those of the successive blocks `keys`, which come after `before` leading ones, that `tier`
    /// has.
    pub fn hold_leading(&mut self, grip: &mut Grip, tier: Tier, before: usize, keys: &[BlockKey]) {
        let is_there =
            |key: &BlockKey| self.find(*key).is_some_and(|r| self.records.at(r).resident().has(tier));
        // Residency along a chain is true up to a boundary.
        let there = keys.partition_point(is_there);
        if let Some(last) = there.checked_sub(1) {
            self.hold_if_resident(grip, tier, keys[last], before + there);
        }
    }

    /// Pins once more what a lease pins in `tiers`: for copies that may outlive it. Not for a lease that may hold
    /// quarantined blocks: [`drop_condemned`](Self::drop_condemned) comes first.
    pub fn pin_again(&mut self, grip: &Grip, tiers: TierSet) -> Grip {
        let mut again = Grip::of_nothing(grip.visit);
        for tier in Tier::ALL.into_iter().filter(|&tier| tiers.has(tier)) {
            if let Some(slot) =
                grip.deepest[tier.index()].filter(|&slot| self.tier_mut(tier).at_mut(slot).pin())
            {
                again.hold(tier, slot, grip.held.blocks(tier));
            }
        }
        again
    }

    /// Pins a block that `tier` holds, and names its slot. `None`: it does not.
    pub fn pin_resident(&mut self, tier: Tier, key: BlockKey) -> Option<(SlotRef, Grip)> {
        let record = self.find(key).filter(|&r| self.records.at(r).resident().has(tier))?;
        let slot = self.records.at(record).slot(tier);
        let mut grip = Grip::of_nothing(Visit::default());
        self.tier_mut(tier).at_mut(slot).pin().then(|| grip.hold(tier, slot, 0))?;
        Some((self.slot_ref(tier, slot), grip))
    }

    /// Shortens the lease in those tiers where blocks were quarantined meanwhile, to what is left before these.
    pub fn drop_condemned(&mut self, grip: &mut Grip) {
        for tier in Tier::ALL {
            while let Some(slot) =
                grip.deepest[tier.index()].filter(|&slot| self.tier(tier).at(slot).is_condemned())
            {
                self.retreat(grip, tier, slot);
            }
        }
    }

    /// Moves a lease from a condemned slot up to the last block before the quarantined ones.
    fn retreat(&mut self, grip: &mut Grip, tier: Tier, condemned: SlotId) {
        let held = self.tier_mut(tier);
        let ward = &held.wards[held.ward_of(condemned)];
        let below = ward.slots.get(&condemned).map_or(0, |&depth| depth as usize);
        let left = grip.held.blocks(tier).saturating_sub(below);
        let anchor = ward.anchor.filter(|_| left > 0);
        // The ward's own pin keeps the anchor where it is until the lease has one there.
        let anchor = anchor.filter(|&anchor| held.at_mut(anchor).pin());
        if let Some(anchor) = anchor.filter(|&anchor| held.at(anchor).is_condemned()) {
            let outer = held.ward_of(anchor);
            held.wards[outer].pins += 1;
        }
        self.release_tier(grip, tier);
        if let Some(anchor) = anchor {
            grip.hold(tier, anchor, left);
        }
    }

    /// Whether all that `grip` holds belongs to `chain`.
    pub fn is_lease_of(&self, grip: &Grip, chain: Chain<'_>) -> bool {
        Tier::ALL.into_iter().all(|tier| {
            let Some(slot) =
                grip.deepest[tier.index()].filter(|&slot| !self.tier(tier).at(slot).is_condemned())
            else {
                return true;
            };
            let blocks = grip.held.blocks(tier);
            let shared = blocks.min(chain.len());
            let ancestors = std::iter::successors(Some(self.tier(tier).at(slot).record), |&r| {
                self.records.at(r).parent()
            });
            let mut ancestors = ancestors.skip(blocks - shared);
            shared == 0 || ancestors.next().is_some_and(|r| self.records.at(r).is(chain.key(shared - 1)))
        })
    }

    /// Ends the lease in one tier only.
    pub fn release_tier(&mut self, grip: &mut Grip, tier: Tier) {
        grip.held.set(tier, 0);
        if let Some(slot) = grip.deepest[tier.index()].take() {
            self.unpin(tier, slot);
        }
    }

    fn unpin(&mut self, tier: Tier, slot: SlotId) {
        let held = self.tier_mut(tier);
        let last = held.at_mut(slot).unpin();
        if held.at(slot).is_condemned() {
            self.discharge(tier, slot);
        } else if last {
            held.reconsider(slot);
        }
    }

    fn find(&self, key: BlockKey) -> Option<RecordId> {
        let hash = KeyHash::of(key);
        self.index.find(hash, self.index.first(hash), |record| self.records.at(record).is(key))
    }

    /// The record of a block, made if no tier knows it. `None` if the index cannot take another.
    fn intern(&mut self, key: BlockKey, parent: Option<RecordId>) -> Option<RecordId> {
        self.find(key).or_else(|| {
            let record = self.records.add(key, parent);
            let hash_of = |record| KeyHash::of(self.records.at(record).key());
            if !self.index.insert(KeyHash::of(key), record, hash_of) {
                self.records.remove(record);
                return None;
            }
            Some(record)
        })
    }

    /// Brings the index up to date with a record's residence.
    fn note_residence(&mut self, record: RecordId) {
        let known = self.records.at(record);
        self.index.note(KeyHash::of(known.key()), record, known.resident());
    }

    /// Drops the record of a block that no tier has any more, noting why it left the last one.
    fn forget_if_nowhere(&mut self, record: RecordId, reason: MissReason, tier: Tier) {
        if self.records.at(record).is_nowhere() {
            self.departures.note(self.records.at(record).key(), reason, tier, self.now_ms);
            self.index.remove(KeyHash::of(self.records.at(record).key()), record);
            self.records.remove(record);
        }
    }

    /// What `to` lacks of a leased chain, each block with its slot in the fastest other tier that the lease
    /// holds it in. [`drop_condemned`](Self::drop_condemned) comes first.
    pub fn missing(&self, grip: &Grip, to: Tier) -> Missing {
        let held = |tier: Tier| if tier == to { 0 } else { grip.held.blocks(tier) };
        let longest = Tier::ALL.into_iter().rev().max_by_key(|&tier| held(tier)).unwrap_or(to);
        let mut before = held(longest);
        let deepest = grip.deepest[longest.index()].filter(|_| before > 0);
        let mut at = deepest.map(|slot| self.tier(longest).at(slot).record);
        let mut blocks = Vec::new();
        // A chain may begin in the middle of a longer one: what comes before its first block is not its own.
        while let Some(record) = at
            .filter(|_| before > 0)
            .map(|id| self.records.at(id))
            .filter(|record| !record.resident().has(to))
        {
            before -= 1;
            let fastest = Tier::ALL.into_iter().find(|&tier| held(tier) > before).unwrap_or(longest);
            blocks.push((record.key(), self.slot_ref(fastest, record.slot(fastest))));
            at = record.parent();
        }
        blocks.reverse();
        Missing { before, behind: at.map(|id| self.records.at(id).key()), blocks }
    }

    fn slot_ref(&self, tier: Tier, slot: SlotId) -> SlotRef {
        self.tier(tier).pool.resident_ref(slot).expect("the table names resident slots only")
    }

    /// Reserves slots in `tier` for the blocks of `chain` that it lacks, evicting where it must.
    pub fn reserve(&mut self, tier: Tier, chain: Chain<'_>, usage: Usage) -> Reserved {
        let resident = self.matches(chain).blocks(tier);
        let parent = match resident.checked_sub(1) {
            Some(last) => Some(chain.key(last)),
            None => self.parent_of_first(chain),
        };
        let keys: Vec<_> = (resident..chain.len()).map(|i| chain.key(i)).collect();
        let visit = Visit { usage: self.named(usage), path: chain.len() as u32 };
        Reserved { resident, ..self.reserve_after(tier, parent, &keys, visit) }
    }

    /// What comes before a chain that is known to begin in the middle of a longer one.
    fn parent_of_first(&self, chain: Chain<'_>) -> Option<BlockKey> {
        let first = self.find((!chain.is_empty()).then(|| chain.key(0))?)?;
        self.records.at(first).parent().map(|parent| self.records.at(parent).key())
    }

    /// Reserves slots in `tier` for successive blocks behind `parent`, which the tier has. Blocks that it
    /// has or awaits already are passed over.
    pub fn reserve_after(
        &mut self,
        tier: Tier,
        parent: Option<BlockKey>,
        keys: &[BlockKey],
        visit: Visit,
    ) -> Reserved {
        let is = |key: &BlockKey, state: fn(&Record) -> TierSet| {
            self.find(*key).is_some_and(|record| state(self.records.at(record)).has(tier))
        };
        let resident = keys.iter().take_while(|key| is(key, Record::resident)).count();
        let in_flight = keys[resident..].iter().take_while(|key| is(key, Record::filling)).count();
        let (known, new) = keys.split_at(resident + in_flight);
        let behind = known.last().copied().or(parent);
        let parent = behind.and_then(|key| self.find(key));
        let has = |record: RecordId| {
            let known = self.records.at(record);
            known.resident().has(tier) || known.filling().has(tier)
        };
        if behind.is_some() && !parent.is_some_and(has) {
            return Reserved { resident, in_flight, behind, run: None, declined: 0, refused: new.len() };
        }
        let (run, declined) = self.reserve_run(tier, parent, new, visit);
        let placed = run.as_ref().map_or(0, |(_, frames)| frames.len());
        if let Some(&first) = new.get(placed) {
            let reason = if declined > 0 { MissReason::Admission } else { MissReason::Capacity };
            self.departures.note(first, reason, tier, self.now_ms);
        }
        Reserved { resident, in_flight, behind, run, declined, refused: new.len() - placed - declined }
    }

    /// Lends a resident block's slot for reading, and pins it meanwhile. `None`: `tier` does not have it.
    pub fn lend(&mut self, tier: Tier, key: BlockKey) -> Option<Loan> {
        let record = self.find(key).filter(|&r| self.records.at(r).resident().has(tier))?;
        let slot = self.records.at(record).slot(tier);
        let held = self.tier_mut(tier);
        held.at_mut(slot).pin().then(|| held.pool.lend(slot))?
    }

    /// Ends a loan of a slot of `tier`.
    pub fn settle_loan(&mut self, tier: Tier, loan: Loan) {
        let slot = loan.slot();
        self.tier_mut(tier).pool.settle(loan);
        self.unpin(tier, slot);
    }

    /// A request has ended and generated `output_tokens`: every tier's policy may learn from it.
    pub fn finished(&mut self, request: RequestId, output_tokens: u32) {
        let now_ms = self.now_ms;
        let tiers = self.tiers.iter_mut().flatten();
        tiers.for_each(|held| held.finished(request, output_tokens, now_ms));
    }

    /// What the policies want done without the table: see [`Eviction::upkeep`](kvbm_policies::Eviction::upkeep).
    pub fn upkeep(&mut self) -> Vec<Upkeep> {
        self.tiers.iter_mut().flatten().flat_map(TierTable::upkeep).collect()
    }

    /// The tier into which the blocks of `tier` are flushed.
    pub fn flushes_to(&self, tier: Tier) -> Option<Tier> {
        self.tiers[tier.index()].as_ref().and_then(|held| held.flush_to)
    }

    /// Occupancy of `tier`; zeroes if there is none.
    pub fn counts(&self, tier: Tier) -> SlotCounts {
        let Some(held) = &self.tiers[tier.index()] else { return SlotCounts::default() };
        let (total, free, lost) = (held.total, held.pool.free(), held.lost);
        let resident = held.resident;
        let quarantined = held.wards.iter().map(|ward| ward.slots.len() as u32).sum();
        let filling = total.saturating_sub(free + resident + lost + quarantined);
        SlotCounts { total, free, filling, resident, quarantined, lost }
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
