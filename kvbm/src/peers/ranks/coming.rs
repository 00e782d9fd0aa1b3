//! Slots that slices come into, and the slices that they are made of.

use std::collections::VecDeque;

use kvbm_tiers::ranks::PulledSlot;
use kvbm_tiers::sealed::SEAL_BYTES;
use kvbm_tiers::{CopyError, CopyErrorKind};
use tokio::time::Instant;

use super::reader::in_time;
use crate::peers::link::{PeerFault, PeerLink};
use crate::peers::protocol::{BrokenLink, MAX_SLICES, SlotLife, ToHolder, ToReader};
use crate::peers::sealed::{self, SliceSeals};

/// Slots that slices come into.
pub(super) struct ComingSlots {
    /// Slots that wait for their slices, in order.
    pub(super) left: VecDeque<PulledSlot>,
    /// Slots that have all their slices.
    pub(super) came: VecDeque<PulledSlot>,
    pub(super) seals: SliceSeals,
    /// Numbers that were too large for their new type.
    pub(super) saturated: u64,
}

impl ComingSlots {
    /// Sees to it that slices can be sealed here without a wait: all of an order are one tenant's.
    pub(super) async fn prepare(&self) -> Result<(), CopyError> {
        match self.seals.own().zip(self.left.front()) {
            Some((seal, first)) => sealed::prepare(seal, first.op().owner).await,
            None => Ok(()),
        }
    }

    /// Bytes of a block, without what seals it.
    pub(super) fn block_bytes(&mut self) -> usize {
        let seal_bytes = if self.seals.own().is_some() { SEAL_BYTES } else { 0 };
        self.left.front_mut().map_or(0, |slot| slot.bytes().len().saturating_sub(seal_bytes))
    }

    /// The slot there that each remaining slot is copied from. For blocks that lie there as they do
    /// here.
    pub(super) fn lives(&self) -> Vec<SlotLife> {
        self.left.iter().map(|slot| SlotLife::of(slot.op().from)).collect()
    }

    /// Whether each slot is made of this number of slots there.
    pub(super) fn are_made_of(&self, slots: usize) -> bool {
        self.left.iter().all(|slot| slot.pulled().from.len() == slots)
    }

    /// The next slot has come or failed.
    pub(super) fn next(&mut self, came: Result<(), CopyError>) {
        let Some(slot) = self.left.pop_front() else { return };
        match came {
            Ok(()) => self.came.push_back(slot),
            Err(error) => slot.end(Err(error)),
        }
    }

    /// Nothing more comes.
    pub(super) fn end(self) {
        if let Some(slot) = self.came.front() {
            slot.saturated(self.saturated);
        }
        self.came.into_iter().for_each(|slot| slot.end(Ok(())));
    }

    pub(super) fn fail(self, error: &CopyError) {
        let slots = self.left.into_iter().chain(self.came);
        slots.for_each(|slot| slot.end(Err(error.clone())));
    }
}

/// Where a slice goes.
pub(super) struct SliceGoal {
    /// How many slots get a part of it: the first ones left when it comes.
    pub(super) slots: usize,
    /// How many slices go into each before it.
    pub(super) nth: usize,
}

/// The slices that slots are made of, each once, and where they go.
pub(super) fn goals_of(slots: &VecDeque<PulledSlot>) -> (Vec<SlotLife>, Vec<SliceGoal>) {
    let (mut lives, mut goals) = (Vec::new(), Vec::<SliceGoal>::new());
    for slot in slots {
        for (nth, from) in slot.pulled().from.iter().enumerate() {
            let life = SlotLife::of(*from);
            let is_next =
                |goal: &&mut SliceGoal| nth == 0 && goal.nth == 0 && lives.last() == Some(&life);
            match goals.last_mut().filter(is_next) {
                Some(goal) => goal.slots += 1,
                None => {
                    lives.push(life);
                    goals.push(SliceGoal { slots: 1, nth });
                }
            }
        }
    }
    (lives, goals)
}

/// The checksums of slices, if they are there.
pub(super) type SliceSums = Vec<Option<[u8; 4]>>;

/// Has the other rank say the checksums of slices, of those that are there.
pub(super) async fn sums_of(
    link: &mut PeerLink,
    lives: &[SlotLife],
) -> Result<SliceSums, BrokenLink> {
    match link.exchange(&ToHolder::SliceSums(lives.to_vec())).await? {
        ToReader::SliceSums(sums) if sums.len() == lives.len() => Ok(sums),
        _ => {
            // More may be on its way, so the connection is not used again.
            link.is_asked = true;
            Err(BrokenLink::Unexpected("no answer to a request for checksums"))
        }
    }
}

/// The same, of any number of slices.
pub(super) async fn sums_of_all(
    link: &mut PeerLink,
    lives: &[SlotLife],
    until: Instant,
) -> Result<SliceSums, PeerFault> {
    let mut sums = Vec::with_capacity(lives.len());
    for lives in lives.chunks(MAX_SLICES) {
        sums.extend(in_time(until, sums_of(link, lives)).await?);
    }
    Ok(sums)
}

/// Whether what came has the checksum that came with it.
pub(super) fn compare(crc: Option<u32>, sent: [u8; 4]) -> Result<(), CopyError> {
    let wrong = || CopyError::new(CopyErrorKind::Corrupt, "it is not what its checksum says");
    (crc == Some(u32::from_le_bytes(sent))).then_some(()).ok_or_else(wrong)
}

pub(super) fn another_life() -> CopyError {
    CopyError::new(CopyErrorKind::Unavailable, "its slot holds something else by now")
}
