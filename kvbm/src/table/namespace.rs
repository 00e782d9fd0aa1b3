//! Namespaces: the names of blocks. A reset closes one and opens another.
//!
//! The key of a block is its hash and the namespace's salt, so a reset costs the same however much
//! the table holds: the names of earlier blocks match no request any more. They are *forgotten*.
//!
//! No match finds a forgotten block, but an earlier lease may still read it. Its slot is freed in
//! one pass over the tier's slots, in steps, or sooner if room is needed; a slot that is read then
//! is freed when its last reader leaves. Blocks leave leaf-first here too.

use kvbm_tiers::{BlockKey, SlotId, Tier, TierEpoch};

use super::budget::Budget;
use super::flush_queue::Entries;
use super::pins::Pins;
use super::tier::{TierSlot, TierTable};
use super::{Effects, Table};
use crate::error::{Error, Result};
use crate::names::epoch::{EpochDigest, NewEpoch, WeightsId};
use crate::names::fingerprint::{Fingerprint, digest};
use crate::names::hash::Chain;

/// Tells the namespaces of one table apart. Later ones have greater numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamespaceId(u64);

/// The present namespace.
#[derive(Debug, Default)]
pub(super) struct PresentNamespace {
    id: NamespaceId,
    fingerprint: Option<Fingerprint>,
    epoch: u64,
    weights: WeightsId,
    /// How often everything was forgotten in the epoch.
    forgotten: u64,
    salt: u128,
}

/// What the names of blocks depend on, for an index that keeps them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Naming {
    /// The epoch.
    pub epoch: TierEpoch,
    salt: u128,
}

impl Naming {
    /// The hash that the engine knows a block by.
    pub const fn hash_of(self, name: u128) -> u128 {
        name ^ self.salt
    }
}

/// What the names of an epoch's blocks depend on, here and at other workers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EpochNames {
    /// The salt of workers that have forgotten nothing.
    base: u128,
    here: u128,
}

impl EpochNames {
    /// The bits in which names differ at a worker of the same fingerprint, where everything was
    /// forgotten so often in the epoch.
    pub(crate) fn renamed_after(self, forgotten: u64) -> u128 {
        salt_after(self.base, forgotten) ^ self.here
    }
}

/// The salt once everything was forgotten so often.
fn salt_after(base: u128, forgotten: u64) -> u128 {
    match forgotten {
        0 => base,
        forgotten => digest(&[base.to_le_bytes().as_slice(), &forgotten.to_le_bytes()].concat()),
    }
}

impl PresentNamespace {
    fn of(fingerprint: Fingerprint) -> Self {
        let (epoch, salt) = (fingerprint.epoch, fingerprint.digest());
        Self { epoch, salt, fingerprint: Some(fingerprint), ..Self::default() }
    }

    /// The salt while nothing was forgotten: the same in every process for the same fingerprint and
    /// epoch.
    fn base(&self) -> u128 {
        match &self.fingerprint {
            Some(fingerprint) => fingerprint.digest_in(self.epoch),
            None => digest(&[b"kvbm epoch 1", &self.epoch.to_le_bytes()[..]].concat()),
        }
    }

    /// The hash that the engine knows a block by.
    pub(super) const fn hash_of(&self, key: BlockKey) -> u128 {
        key.hash ^ self.salt
    }

    fn change(&mut self, epoch: u64, forgotten: u64) {
        (self.epoch, self.forgotten) = (epoch, forgotten);
        self.id = NamespaceId(self.id.0 + 1);
        self.salt = salt_after(self.base(), forgotten);
    }
}

impl Table {
    /// Makes the names of its blocks depend on a fingerprint.
    #[must_use]
    pub fn with_fingerprint(self, fingerprint: Fingerprint) -> Self {
        Self { namespace: PresentNamespace::of(fingerprint), ..self }
    }

    /// Goes on where an earlier process was.
    #[must_use]
    pub fn resuming(mut self, TierEpoch { epoch, forgotten }: TierEpoch) -> Self {
        if epoch != self.namespace.epoch {
            // The fingerprint names those of its own epoch.
            self.namespace.weights = WeightsId::of(None);
        }
        self.namespace.change(epoch, forgotten);
        self
    }

    /// The chain with the names that its blocks have now.
    #[must_use]
    pub const fn enter<'a>(&self, chain: Chain<'a>) -> Chain<'a> {
        chain.salted(self.namespace.salt)
    }

    /// The present namespace.
    pub const fn namespace(&self) -> NamespaceId {
        self.namespace.id
    }

    /// The present epoch.
    pub const fn epoch(&self) -> u64 {
        self.namespace.epoch
    }

    /// The present epoch, as other workers must know it to have the same blocks.
    pub(crate) fn epoch_digest(&self) -> EpochDigest {
        self.namespace.weights.digest_in(self.namespace.epoch)
    }

    /// What the names of blocks depend on now.
    pub const fn naming(&self) -> Naming {
        let PresentNamespace { epoch, forgotten, salt, .. } = self.namespace;
        Naming { epoch: TierEpoch { epoch, forgotten }, salt }
    }

    /// What the names of blocks have in common with those at workers in the present epoch.
    pub(crate) fn epoch_names(&self) -> EpochNames {
        EpochNames { base: self.namespace.base(), here: self.namespace.salt }
    }

    /// Whether a lease is of the present namespace.
    pub fn is_present(&self, pins: &Pins) -> bool {
        pins.namespace() == self.namespace.id
    }

    /// Begins another epoch: no present block is found again. Takes the same time however much the
    /// table holds. Transfers under way are discarded; [`end_next`](Self::end_next) ends them.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) unless the number is greater than the
    /// present one.
    pub fn reset<'a>(&mut self, epoch: impl Into<NewEpoch<'a>>) -> Result<Effects> {
        let NewEpoch { number: epoch, weights } = epoch.into();
        if epoch <= self.namespace.epoch {
            let now = self.namespace.epoch;
            let message =
                format!("epoch {epoch} has been: the present one is {now}, give a greater one");
            return Err(Error::invalid(message));
        }
        self.namespace.change(epoch, 0);
        self.namespace.weights = WeightsId::of(weights);
        self.reinstate_tiers();
        self.note_reset();
        Ok(self.forget_blocks())
    }

    /// [`reset`](Self::reset) within the epoch: this process does not find its present blocks
    /// again. The next one may find what outlives this, unless another block comes first: the
    /// blocks are still good, but where some of them lie is unknown here.
    pub fn forget_all(&mut self) -> Effects {
        self.namespace.change(self.namespace.epoch, self.namespace.forgotten + 1);
        self.note_reset_later();
        self.forget_blocks()
    }

    fn forget_blocks(&mut self) -> Effects {
        self.tell_cleared();
        let unflushed = self.tiers.iter_mut().flatten().map(TierTable::forget_all).collect();
        Effects { unflushed, ..self.take_effects() }
    }
}

/// The forgotten blocks of a tier.
#[derive(Debug, Default)]
pub(super) struct ForgottenSlots {
    /// How many there are.
    pub(super) blocks: u32,
    /// Slots that the pass has yet to look at, to mark what is forgotten and let go what can. The
    /// last one comes first: a chain lies root-first where slots were free, so the pass meets its
    /// leaf at once.
    left: u32,
    /// Those of them that got a new block since the reset.
    renewed: SlotSet,
    /// Leaves without readers.
    leaves: Vec<SlotId>,
}

impl ForgottenSlots {
    /// Whether the block that `slot` holds is forgotten.
    pub(super) fn has(&self, slot: SlotId, held: TierSlot) -> bool {
        // A slot may have no block: it was noted as a leaf, and emptied another way.
        let is_old = || slot.0 < self.left && !self.renewed.has(slot);
        held.record != TierSlot::EMPTY.record && (held.is_forgotten() || is_old())
    }

    /// `slot` has a new block.
    pub(super) fn renew(&mut self, slot: SlotId) {
        if slot.0 < self.left {
            self.renewed.insert(slot);
        }
    }

    /// Forgets all blocks in the first `slots` slots. Returns the notes about them, which take time
    /// to drop.
    fn begin_pass(&mut self, slots: u32) -> SlotSet {
        self.left = slots;
        std::mem::replace(&mut self.renewed, SlotSet::of_first(slots))
    }
}

/// Slots of a part of a set: 4 KiB.
const PART: u32 = 1 << 15;
const WORDS: usize = PART as usize / 64;

/// A set of slots, a bit for each, in parts made on their first use: a reset of a tier of a hundred
/// million slots clears no megabytes.
#[derive(Debug, Default)]
struct SlotSet(Vec<Option<Box<[u64; WORDS]>>>);

impl SlotSet {
    fn of_first(slots: u32) -> Self {
        Self((0..slots.div_ceil(PART)).map(|_| None).collect())
    }

    fn insert(&mut self, slot: SlotId) {
        let part = self.0[(slot.0 / PART) as usize].get_or_insert_with(|| Box::new([0; WORDS]));
        part[(slot.0 % PART / 64) as usize] |= 1 << (slot.0 % 64);
    }

    fn has(&self, slot: SlotId) -> bool {
        let part = self.0[(slot.0 / PART) as usize].as_ref();
        part.is_some_and(|part| part[(slot.0 % PART / 64) as usize] >> (slot.0 % 64) & 1 == 1)
    }
}

/// Blocks of a tier that were dirty when a reset forgot them. There may be a million: they are
/// dropped with the table unlocked.
#[derive(Debug)]
pub struct Unflushed {
    flushes: Entries,
    _noted: SlotSet,
}

impl Unflushed {
    /// How many.
    pub fn blocks(&self) -> usize {
        self.flushes.len()
    }
}

impl TierTable {
    /// Forgets all blocks of the tier, dirty ones included.
    pub(super) fn forget_all(&mut self) -> Unflushed {
        self.forgotten.blocks += std::mem::take(&mut self.resident);
        let noted = self.forgotten.begin_pass(self.slots.len() as u32);
        self.pressed = false;
        Unflushed { flushes: self.flushes.take_all(), _noted: noted }
    }

    /// Whether the block in `slot` is forgotten.
    pub(super) fn is_forgotten(&self, slot: SlotId) -> bool {
        self.forgotten.has(slot, *self.at(slot))
    }

    /// Notes that a forgotten block may be a leaf without readers.
    pub(super) fn sweep_soon(&mut self, slot: SlotId) {
        self.forgotten.leaves.push(slot);
    }

    fn next_to_sweep(&mut self) -> Option<SlotId> {
        if let Some(leaf) = self.forgotten.leaves.pop() {
            return Some(leaf);
        }
        if self.forgotten.blocks == 0 {
            self.forgotten.left = 0;
        }
        let next = SlotId(self.forgotten.left.checked_sub(1)?);
        // The pass may be over before the block's last reader leaves.
        if self.is_forgotten(next) {
            self.at_mut(next).set_forgotten();
        }
        self.forgotten.left -= 1;
        Some(next)
    }
}

impl Table {
    /// Frees forgotten blocks without readers, as many as the hold has time for. Returns whether
    /// there is more to look at.
    pub fn sweep(&mut self, budget: &mut Budget) -> bool {
        // The tiers after the first that uses up the hold wait for their turn.
        Tier::ALL
            .into_iter()
            .any(|tier| self.has(tier) && self.sweep_tier(tier, usize::MAX, budget))
    }

    /// Frees up to `most` of them in `tier`. Returns whether there is more to look at.
    pub(super) fn sweep_tier(&mut self, tier: Tier, most: usize, budget: &mut Budget) -> bool {
        let mut swept = 0;
        while swept < most && budget.look() {
            let Some(slot) = self.tier_mut(tier).next_to_sweep() else { return false };
            if self.sweep_slot(tier, slot) {
                budget.change();
                swept += 1;
            }
        }
        true
    }

    /// Frees the block in `slot`, if it is forgotten, a leaf and not read.
    fn sweep_slot(&mut self, tier: Tier, slot: SlotId) -> bool {
        let held = self.tier(tier);
        let block = *held.at(slot);
        let is_free_to_go = block.is_leaf() && !block.is_pinned() && !block.is_quarantined();
        if !held.is_forgotten(slot) || !is_free_to_go {
            return false;
        }
        let frame = self.detach(tier, slot);
        self.tier_mut(tier).pool.give_back(frame);
        true
    }
}
