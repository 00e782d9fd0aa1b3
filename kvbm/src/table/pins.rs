//! Leases in the table's own terms: one pin per tier, on the deepest block of a chain that it
//! holds. Tiers drain leaf-first, so a block that is pinned keeps all its ancestors. And slots that
//! are lent, some of them to verify idle blocks.

use kvbm_policies::RequestId;
use kvbm_tiers::{BlockKey, Loan, SlotId, SlotRef, Tier};

use super::Table;
use super::index::RecordId;
use super::namespace::NamespaceId;
use super::policy::{RequestContext, RequestInfo};
use super::prefix::{FoundBoundaries, Match};
use super::record::TierSet;
use super::tier::TierSlot;
use crate::names::hash::Chain;
use crate::task::Defect;

/// A lease in the table's own terms: one pin per tier, on the deepest block of the chain that it
/// holds. Give it back with [`Table::release`]; [`Lease`](crate::Lease) does so by itself.
#[derive(Debug)]
#[must_use = "pins that are not released hold their blocks for ever"]
pub struct Pins {
    held: Match,
    deepest: [Option<SlotId>; Tier::COUNT],
    context: RequestContext,
    namespace: NamespaceId,
}

impl Pins {
    /// Holds nothing anywhere.
    pub(crate) const fn of_nothing(context: RequestContext, namespace: NamespaceId) -> Self {
        Self {
            held: Match::new([0; Tier::COUNT]),
            deepest: [None; Tier::COUNT],
            context,
            namespace,
        }
    }

    /// Whether nothing is pinned: then there is nothing to release.
    pub(crate) fn is_of_nothing(&self) -> bool {
        self.deepest.iter().all(Option::is_none)
    }

    pub(super) const fn hold(&mut self, tier: Tier, deepest: SlotId, blocks: usize) {
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

    /// The slot of the deepest block that `tier` holds of the chain.
    pub(super) const fn deepest(&self, tier: Tier) -> Option<SlotId> {
        self.deepest[tier.index()]
    }

    /// Tiers in which something is pinned.
    pub(super) fn tiers(&self) -> TierSet {
        let pinned = Tier::ALL.into_iter().filter(|&tier| self.deepest(tier).is_some());
        pinned.fold(TierSet::default(), TierSet::with)
    }

    /// The namespace of its blocks' names.
    pub(crate) const fn namespace(&self) -> NamespaceId {
        self.namespace
    }

    /// The request that holds the lease.
    pub const fn context(&self) -> RequestContext {
        self.context
    }
}

impl Table {
    /// Leases a chain: pins and touches the deepest block that each tier holds of it.
    pub fn lease(&mut self, chain: Chain<'_>, info: RequestInfo) -> Pins {
        let FoundBoundaries { held, deepest } = self.locate(chain);
        self.boundary_hints.note(self.enter(chain), Tier::ALL.map(|tier| held.blocks(tier) as u32));
        let context = RequestContext { info: self.named(info), path: chain.len() as u32 };
        let mut pins = Pins { held, ..Pins::of_nothing(context, self.namespace()) };
        for tier in Tier::ALL {
            if let Some(record) = deepest[tier.index()] {
                self.pin_deepest(&mut pins, tier, record, held.blocks(tier) as u32);
            }
        }
        pins
    }

    /// Names a request that the engine left unnamed, so that the parts of its use are reported
    /// together.
    pub(super) fn named(&mut self, info: RequestInfo) -> RequestInfo {
        let request = info.request.unwrap_or_else(|| {
            self.nameless += 1;
            RequestId(self.nameless)
        });
        RequestInfo { request: Some(request), ..info }
    }

    fn pin_deepest(&mut self, pins: &mut Pins, tier: Tier, record: RecordId, depth: u32) {
        let slot = self.records.at(record).slot(tier);
        let access = pins.context.access(self.now_ms, slot, depth, 0);
        let (held, records) = self.tier_and_records(tier);
        held.pin(slot);
        pins.deepest[tier.index()] = Some(slot);
        // Only the deepest block: its age goes up to its parent when it leaves, so a use costs the
        // same for any length of chain.
        held.touch(&access, records);
        self.want_flush_again(tier, slot, pins.context.info);
    }

    /// Ends a lease.
    #[expect(clippy::needless_pass_by_value, reason = "the pins end here")]
    pub fn release(&mut self, pins: Pins) {
        for tier in Tier::ALL {
            if let Some(slot) = pins.deepest[tier.index()] {
                self.unpin(tier, slot);
            }
        }
    }

    /// Extends a lease to the `blocks` leading blocks that end with `deepest`, if `tier` has that.
    /// A lease that holds more there already keeps it.
    fn hold_if_resident(&mut self, pins: &mut Pins, tier: Tier, deepest: BlockKey, blocks: usize) {
        if pins.held.blocks(tier) >= blocks {
            return;
        }
        let Some(slot) = self.slot_of(tier, deepest) else { return };
        self.tier_mut(tier).pin(slot);
        self.release_tier(pins, tier);
        pins.hold(tier, slot, blocks);
    }

    /// Extends a lease to those of the successive blocks `keys`, which come after `before` leading
    /// ones, that `tier` has.
    pub fn hold_leading(&mut self, pins: &mut Pins, tier: Tier, before: usize, keys: &[BlockKey]) {
        let is_there = |key: &BlockKey| self.slot_of(tier, *key).is_some();
        // Along a chain blocks are resident up to a boundary.
        let there = keys.partition_point(is_there);
        if let Some(last) = there.checked_sub(1) {
            self.hold_if_resident(pins, tier, keys[last], before + there);
        }
    }

    /// Pins again what a lease pins in `tiers`: for copies that may outlive it. If the lease may
    /// hold quarantined blocks, [`drop_quarantined`](Self::drop_quarantined) comes first.
    pub fn pin_again(&mut self, pins: &Pins, tiers: TierSet) -> Pins {
        let mut again = Pins::of_nothing(pins.context, pins.namespace);
        for tier in Tier::ALL.into_iter().filter(|&tier| tiers.has(tier)) {
            if let Some(slot) = pins.deepest[tier.index()] {
                self.tier_mut(tier).pin(slot);
                again.hold(tier, slot, pins.held.blocks(tier));
            }
        }
        again
    }

    /// Pins what each tier holds of a prefix of a leased chain: for a part of the lease's work, so
    /// it counts as no use. Pins nothing if the lease is from before a reset.
    pub fn pin_beginning(&mut self, of: &Pins, chain: Chain<'_>) -> Pins {
        let mut pins = Pins::of_nothing(of.context, of.namespace);
        if !self.is_present(of) {
            return pins;
        }
        let FoundBoundaries { held, deepest } = self.locate(chain);
        for tier in Tier::ALL {
            if let Some(record) = deepest[tier.index()] {
                let slot = self.records.at(record).slot(tier);
                self.tier_mut(tier).pin(slot);
                pins.hold(tier, slot, held.blocks(tier));
            }
        }
        pins
    }

    /// Pins a block in `tier`, and returns its slot. `None`: the tier lacks it.
    pub fn pin_resident(&mut self, tier: Tier, key: BlockKey) -> Option<(SlotRef, Pins)> {
        let slot = self.slot_of(tier, key)?;
        let mut pins = Pins::of_nothing(RequestContext::default(), self.namespace());
        self.tier_mut(tier).pin(slot);
        pins.hold(tier, slot, 0);
        Some((self.slot_ref(tier, slot), pins))
    }

    /// Shortens the lease in tiers where blocks were quarantined meanwhile, to the blocks before
    /// these, and ends it in withdrawn tiers.
    pub fn drop_quarantined(&mut self, pins: &mut Pins) {
        for tier in Tier::ALL {
            if self.is_withdrawn(tier) {
                self.release_tier(pins, tier);
            }
            while let Some(slot) =
                pins.deepest[tier.index()].filter(|&slot| self.tier(tier).at(slot).is_quarantined())
            {
                self.retreat_above(pins, tier, slot);
            }
        }
    }

    /// Moves a lease from a quarantined slot up to the last block before the quarantined ones.
    fn retreat_above(&mut self, pins: &mut Pins, tier: Tier, quarantined: SlotId) {
        let (below, anchor) = self.quarantines.anchor_of(tier, quarantined);
        let left = pins.held.blocks(tier).saturating_sub(below);
        // The quarantine's own pin keeps the anchor where it is until the lease has one there.
        let anchor = anchor.filter(|_| left > 0);
        anchor.into_iter().for_each(|anchor| self.tier_mut(tier).pin(anchor));
        if let Some(anchor) = anchor.filter(|&anchor| self.tier(tier).at(anchor).is_quarantined()) {
            self.quarantines.add_reader(tier, anchor);
        }
        self.release_tier(pins, tier);
        if let Some(anchor) = anchor {
            pins.hold(tier, anchor, left);
        }
    }

    /// Whether all that `pins` holds belongs to `chain`.
    pub fn is_lease_of(&self, pins: &Pins, chain: Chain<'_>) -> bool {
        let chain = self.enter(chain);
        Tier::ALL.into_iter().all(|tier| {
            let Some(slot) = pins.deepest[tier.index()]
                .filter(|&slot| !self.tier(tier).at(slot).is_quarantined())
            else {
                return true;
            };
            let blocks = pins.held.blocks(tier);
            let shared = blocks.min(chain.len());
            let ancestors = std::iter::successors(Some(self.tier(tier).at(slot).record), |&r| {
                self.records.at(r).parent()
            });
            // If the lease holds more than the chain, it looks at the block where the chain ends.
            let mut ancestors = ancestors.skip(blocks - shared);
            shared == 0
                || ancestors.next().is_some_and(|r| self.records.at(r).is(chain.key(shared - 1)))
        })
    }

    /// Ends the lease in one tier.
    pub fn release_tier(&mut self, pins: &mut Pins, tier: Tier) {
        pins.held.set(tier, 0);
        if let Some(slot) = pins.deepest[tier.index()].take() {
            self.unpin(tier, slot);
        }
    }

    pub(super) fn unpin(&mut self, tier: Tier, slot: SlotId) {
        let held = self.tier_mut(tier);
        let last = held.unpin(slot);
        // A quarantined slot is freed with its last reader; any other only becomes evictable.
        if held.at(slot).is_quarantined() {
            self.release_reader(tier, slot);
        } else if last {
            held.reconsider(slot);
        }
    }
}

/// A block being verified: it is pinned, and its slot lent, until [`Table::scrubbed`].
#[derive(Debug)]
pub struct Scrubbed {
    /// Which.
    pub block: BlockKey,
    /// The hash of the block before it.
    pub parent: Option<u128>,
    /// Where it lies.
    pub slot: SlotRef,
    /// The right to read it.
    pub loan: Loan,
}

/// Slots looked at in one step.
const LOOKED_AT: u32 = 1_024;

impl Table {
    /// Lends a resident block's slot for reading, and pins it meanwhile. `None`: `tier` lacks it.
    pub fn lend(&mut self, tier: Tier, key: BlockKey) -> Option<Loan> {
        let slot = self.slot_of(tier, key)?;
        let held = self.tier_mut(tier);
        let loan = held.pool.lend(slot)?;
        held.pin(slot);
        Some(loan)
    }

    /// Ends a loan of a slot of `tier`.
    pub fn return_loan(&mut self, tier: Tier, loan: Loan) {
        let slot = loan.slot();
        self.tier_mut(tier).pool.end_loan(loan);
        self.unpin(tier, slot);
    }

    /// Pins the next block of `tier` from slot `from` on, as far as one step goes, and says where
    /// the next step begins. `None`: at the first slot again.
    pub fn scrub_next(&mut self, tier: Tier, from: u32) -> (Option<Scrubbed>, Option<u32>) {
        let held = self.tier(tier);
        let slots = if held.is_withdrawn { 0 } else { held.slots.len() as u32 };
        let is_block = |&slot: &u32| {
            let block = held.at(SlotId(slot));
            let is_there = block.record != TierSlot::EMPTY.record && !block.is_quarantined();
            is_there
                && !held.is_forgotten(SlotId(slot))
                && held.pool.resident_ref(SlotId(slot)).is_some()
        };
        let end = slots.min(from.saturating_add(LOOKED_AT));
        let found = (from..end).find(is_block);
        let next = Some(found.map_or(end, |found| found + 1)).filter(|&next| next < slots);
        (found.and_then(|found| self.pin_to_scrub(tier, SlotId(found))), next)
    }

    fn pin_to_scrub(&mut self, tier: Tier, slot: SlotId) -> Option<Scrubbed> {
        let known = *self.records.at(self.tier(tier).at(slot).record);
        let parent = known.parent().map(|parent| self.records.at(parent).key().hash);
        let held = self.tier_mut(tier);
        let found = held.pool.resident_ref(slot)?;
        let loan = held.pool.lend(slot)?;
        held.pin(slot);
        Some(Scrubbed { block: known.key(), parent, slot: found, loan })
    }

    /// A block was verified. One with a defect leaves the tier with its descendants, and is written
    /// there anew if the tier above has it.
    pub fn scrubbed(&mut self, scrubbed: Scrubbed, defect: Option<Defect>) {
        let Scrubbed { block, slot, loan, .. } = scrubbed;
        self.tier_mut(slot.tier).pool.end_loan(loan);
        if let Some(defect) = defect {
            self.quarantine(block, slot, defect);
        }
        self.unpin(slot.tier, slot.slot);
    }
}
