//! Why blocks are not there: reasons noted when they left or could not come, for as long as there
//! is room.

use kvbm_tiers::{BlockKey, Tier};

use super::{Match, Table};
use crate::names::hash::Chain;

/// Why a block that a request asked for is in no tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MissReason {
    /// It was never there, or it left too long ago to be remembered.
    NeverSeen,
    /// It made room for others.
    Evicted,
    /// There was no room for it.
    Capacity,
    /// It was not worth its room.
    Admission,
    /// Its copy failed, or its filler gave up.
    IoError,
    /// Its bytes, or those of a block before it, had changed.
    Corrupt,
    /// It, or a block before it, could not be read any more.
    Unreadable,
    /// Its tenant, or that of a block before it, was forgotten.
    Forgotten,
    /// It is on its way.
    InFlight,
    /// It lies in a tier that was withdrawn: too much of it was wrong.
    Withdrawn,
}

impl MissReason {
    /// Every reason.
    pub const ALL: [Self; 10] = [
        Self::NeverSeen,
        Self::Evicted,
        Self::Capacity,
        Self::Admission,
        Self::IoError,
        Self::Corrupt,
        Self::Unreadable,
        Self::Forgotten,
        Self::InFlight,
        Self::Withdrawn,
    ];

    /// The name used in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NeverSeen => "never_seen",
            Self::Evicted => "evicted",
            Self::Capacity => "capacity",
            Self::Admission => "admission",
            Self::IoError => "io_error",
            Self::Corrupt => "corrupt",
            Self::Unreadable => "unreadable",
            Self::Forgotten => "forgotten",
            Self::InFlight => "in_flight",
            Self::Withdrawn => "withdrawn",
        }
    }
}

/// Why a chain is not held any further: what became of the next block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miss {
    /// Why that block is not there.
    pub reason: MissReason,
    /// The tier that had it last, or that it could not enter or has not entered yet.
    pub tier: Option<Tier>,
    /// How long ago that was, in seconds.
    pub age_s: Option<u64>,
}

impl Miss {
    pub(super) const NEVER_SEEN: Self =
        Self { reason: MissReason::NeverSeen, tier: None, age_s: None };
}

impl Table {
    /// Why `held` is not all of `chain`; `None` if it is.
    pub fn miss(&self, chain: Chain<'_>, held: &Match) -> Option<Miss> {
        let chain = self.enter(chain);
        let first = Some(held.longest()).filter(|&first| first < chain.len())?;
        let key = chain.key(first);
        let known = self.find(key).map(|record| self.records.at(record));
        let awaited = Tier::ALL
            .into_iter()
            .find(|&tier| known.is_some_and(|known| known.filling().has(tier)));
        let is_there = |&tier: &Tier| known.is_some_and(|known| known.resident().has(tier));
        let withdrawn =
            Tier::ALL.into_iter().filter(|&tier| self.is_withdrawn(tier)).find(is_there);
        Some(match (awaited, withdrawn) {
            (Some(_), _) => Miss { reason: MissReason::InFlight, tier: awaited, age_s: None },
            (None, Some(_)) => Miss { reason: MissReason::Withdrawn, tier: withdrawn, age_s: None },
            (None, None) => self.miss_history.find(key, self.now_ms),
        })
    }
}

/// Most notes that are remembered, 8 bytes each.
const MAX_NOTES: usize = 1 << 18;

/// A table with one place for each hash: a later note displaces an earlier one.
#[derive(Debug)]
pub(super) struct MissHistory {
    /// From the top: 32 bits of the hash, 4 of the reason, 2 of the tier, 26 of the time in
    /// seconds.
    notes: Box<[u64]>,
}

const TIME_BITS: u32 = 26;
const TIME: u64 = (1 << TIME_BITS) - 1;

impl MissHistory {
    /// For tiers of `blocks` blocks.
    pub(super) fn with_room_for(blocks: usize) -> Self {
        Self { notes: vec![0; blocks.next_power_of_two().clamp(64, MAX_NOTES)].into_boxed_slice() }
    }

    pub(super) fn note(&mut self, key: BlockKey, reason: MissReason, tier: Tier, now_ms: u64) {
        let hash = name(key);
        let cause = ((reason as u64) << 2) | tier.index() as u64;
        let place = self.place(hash);
        // The place comes from the lower half of the hash: the upper half tells apart those that
        // share it.
        self.notes[place] = (hash >> 32 << 32) | (cause << TIME_BITS) | ((now_ms / 1000) & TIME);
    }

    pub(super) fn find(&self, key: BlockKey, now_ms: u64) -> Miss {
        let hash = name(key);
        let note = self.notes[self.place(hash)];
        // No note has the first reason, so an unwritten one is not taken for a note.
        let reason =
            MissReason::ALL[(note >> (TIME_BITS + 2) & 15) as usize % MissReason::ALL.len()];
        if note >> 32 != hash >> 32 || reason == MissReason::NeverSeen {
            return Miss::NEVER_SEEN;
        }
        let tier = Tier::ALL[(note >> TIME_BITS & 3) as usize];
        let age_s = (now_ms / 1000).wrapping_sub(note) & TIME;
        Miss { reason, tier: Some(tier), age_s: Some(age_s) }
    }

    const fn place(&self, hash: u64) -> usize {
        hash as usize & (self.notes.len() - 1)
    }
}

/// A short name for a block.
fn name(key: BlockKey) -> u64 {
    let folded = key.folded();
    folded.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(hash: u128) -> BlockKey {
        BlockKey { hash, group: 0 }
    }

    #[test]
    fn what_left_is_remembered_with_its_age() {
        let mut miss_history = MissHistory::with_room_for(1_000);
        assert_eq!(miss_history.find(key(7), 0), Miss::NEVER_SEEN);
        miss_history.note(key(7), MissReason::Evicted, Tier::Disk, 90_000);
        let evicted = Miss { reason: MissReason::Evicted, tier: Some(Tier::Disk), age_s: Some(30) };
        assert_eq!(miss_history.find(key(7), 120_500), evicted);
        assert_eq!(miss_history.find(key(8), 120_500), Miss::NEVER_SEEN);
    }

    #[test]
    fn memory_is_bounded_and_what_is_displaced_was_never_seen() {
        let mut miss_history = MissHistory::with_room_for(usize::MAX >> 1);
        (0..1_000_000).for_each(|n| miss_history.note(key(n), MissReason::Corrupt, Tier::Host, 0));
        let known = |n: &u128| miss_history.find(key(*n), 0).reason == MissReason::Corrupt;
        assert_eq!(miss_history.notes.len(), MAX_NOTES);
        assert!((0..1_000_000).filter(known).count() <= MAX_NOTES);
    }

    #[test]
    fn every_reason_fits_into_its_bits() {
        let mut miss_history = MissHistory::with_room_for(0);
        for (n, reason) in MissReason::ALL.into_iter().enumerate().skip(1) {
            miss_history.note(key(n as u128), reason, Tier::Object, u64::MAX);
            assert_eq!(miss_history.find(key(n as u128), u64::MAX).reason, reason);
        }
    }
}
