//! What is left of earlier processes: a block is resident again where leader and all ranks agree on
//! it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;

use parking_lot::Mutex;

use super::connection::SendResult;
use super::leader::Leader;
use super::protocol::{
    HeldSlot, InventoryPage, MAX_SLOTS_TOLD, MalformedFrame, PackedLives, ToRank,
};
use crate::clock;
use crate::copy::{SlotRef, Tier};
use crate::index::IndexEntry;

/// Why ranks and their leader did not agree: blocks of an earlier process are not found then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Disagreement {
    /// It was there when the leader opened.
    #[error("rank {0} is gone")]
    Lost(u16),
    /// It hangs, or has much to tell.
    #[error("rank {0} did not say in time what it holds")]
    Late(u16),
    /// It answers something else than it was asked.
    #[error("rank {0} cannot be understood: {1}")]
    Unintelligible(u16, String),
}

impl Leader {
    /// Which of these `entries`, at most one for each slot, every rank has as well: the same block,
    /// stored in the same slot in the same of its lives. To be called before the first copy. Waits
    /// for the ranks.
    ///
    /// # Errors
    /// Some rank does not tell what it has.
    pub fn agree(
        &self,
        tier: Tier,
        entries: Vec<IndexEntry>,
    ) -> Result<Vec<IndexEntry>, Disagreement> {
        let deadline = clock::now() + self.shared.options.limit;
        let answers = self.shared.answers.expect();
        let agreed = self.ask_all(tier, SlotVotes::on(&entries), &answers, deadline);
        self.shared.answers.close();
        let agreed = agreed?.of_all(self.shared.options.world);
        Ok(entries
            .into_iter()
            .zip(agreed)
            .filter_map(|(entry, is_agreed)| is_agreed.then_some(entry))
            .collect())
    }

    fn ask_all(
        &self,
        tier: Tier,
        mut votes: SlotVotes,
        answers: &Receiver<InventoryAnswer>,
        deadline: Instant,
    ) -> Result<SlotVotes, Disagreement> {
        let ranks = self.shared.connections().map_err(Disagreement::Lost)?;
        let ask = |rank: u16, from: u32| {
            let question = ToRank::TakeInventory { tier, from };
            let sent = self.shared.send_to(&ranks[usize::from(rank)], &question);
            if sent == SendResult::Refused { Err(Disagreement::Late(rank)) } else { Ok(()) }
        };
        let mut asked: Vec<u16> = (0..self.shared.options.world).collect();
        asked.iter().try_for_each(|&rank| ask(rank, 0))?;
        while let Some(&awaited) = asked.first() {
            let left = deadline.saturating_duration_since(clock::now());
            let (rank, inventory) = answers.recv_timeout(left).map_err(|error| match error {
                RecvTimeoutError::Timeout => Disagreement::Late(awaited),
                RecvTimeoutError::Disconnected => Disagreement::Lost(awaited),
            })?;
            let inventory = inventory.ok_or(Disagreement::Lost(rank))?;
            let next = votes
                .take(rank, tier, &inventory)
                .map_err(|why| Disagreement::Unintelligible(rank, why))?;
            match next {
                Some(from) => ask(rank, from)?,
                None => asked.retain(|&other| other != rank),
            }
        }
        Ok(votes)
    }

    /// Tells all ranks the lives of these slots by which the leader names from here on what it
    /// [agreed](Self::agree) on with them. Copies that are submitted later find it.
    pub fn adopt(&self, tier: Tier, lives: &[SlotRef]) {
        // If one is gone, its leader's owner has been told, or will be, that nothing is resident.
        let Ok(ranks) = self.shared.connections() else { return };
        for lives in lives.chunks(MAX_SLOTS_TOLD) {
            let message = ToRank::Adopt { tier, lives: PackedLives::of(lives) };
            for connection in &ranks {
                // A rank that misses it gives nothing out: those are misses.
                if self.shared.send_to(connection, &message) == SendResult::Refused {
                    tracing::error!("a rank that reads nothing is not told what it may give out");
                }
            }
        }
    }
}

/// `None`: it is gone.
type InventoryAnswer = (u16, Option<InventoryPage>);

/// Where the thread that listens to ranks leaves what they hold, while a caller waits for it.
#[derive(Debug, Default)]
pub(super) struct InventoryAnswers(Mutex<InventoryQuery>);

#[derive(Debug, Default)]
enum InventoryQuery {
    #[default]
    NotYet,
    Now(Sender<InventoryAnswer>),
    Before,
}

impl InventoryAnswers {
    fn expect(&self) -> Receiver<InventoryAnswer> {
        let (sender, answers) = channel();
        *self.0.lock() = InventoryQuery::Now(sender);
        answers
    }

    fn close(&self) {
        *self.0.lock() = InventoryQuery::Before;
    }

    /// Returns whether a caller has asked. A rank that hung may answer when none waits any more:
    /// that is no reason to do without it.
    pub(super) fn told(&self, rank: u16, inventory: InventoryPage) -> bool {
        match &*self.0.lock() {
            InventoryQuery::NotYet => false,
            InventoryQuery::Now(waiting) => waiting.send((rank, Some(inventory))).is_ok(),
            InventoryQuery::Before => true,
        }
    }

    pub(super) fn lost(&self, rank: u16) {
        if let InventoryQuery::Now(waiting) = &*self.0.lock() {
            // A caller that stopped waiting need not know.
            let _ = waiting.send((rank, None));
        }
    }
}

/// Which ranks have what the leader has.
struct SlotVotes {
    /// What, and its place in the leader's list, by ascending slots.
    candidates: Vec<(HeldSlot, usize)>,
    /// By place in the leader's list: a bit for each rank.
    ranks: Vec<u64>,
}

impl SlotVotes {
    fn on(entries: &[IndexEntry]) -> Self {
        let mut candidates: Vec<_> = entries.iter().map(HeldSlot::of).zip(0..).collect();
        candidates.sort_unstable_by_key(|(held, _)| held.slot);
        Self { candidates, ranks: vec![0; entries.len()] }
    }

    /// Counts a page of what a rank has. Returns where the next one begins.
    fn take(
        &mut self,
        rank: u16,
        tier: Tier,
        inventory: &InventoryPage,
    ) -> Result<Option<u32>, String> {
        let InventoryPage { tier: told, held, next } = inventory;
        if *told != tier {
            return Err(format!("it tells of the {told} tier, asked for the {tier} tier"));
        }
        let held = held.unpack().map_err(|error: MalformedFrame| error.to_string())?;
        let mut last = None;
        for held in held {
            last = last.max(Some(held.slot.0));
            if let Ok(at) = self.candidates.binary_search_by_key(&held.slot, |(ours, _)| ours.slot)
                && self.candidates[at].0 == held
            {
                self.ranks[self.candidates[at].1] |= 1 << rank;
            }
        }
        // Else it could go on for ever.
        match next {
            Some(next) if last.is_none_or(|last| *next <= last) => {
                Err("its pages do not ascend".to_owned())
            }
            next => Ok(*next),
        }
    }

    /// By place in the leader's list, whether all ranks have it.
    fn of_all(self, world: u16) -> impl Iterator<Item = bool> {
        self.ranks.into_iter().map(move |ranks| ranks.count_ones() == u32::from(world))
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::PackedHoldings;
    use super::*;
    use crate::copy::{BlockKey, SlotId};

    fn entry(slot: u32, generation: u32, hash: u128) -> IndexEntry {
        let block = BlockKey { hash, group: 0 };
        IndexEntry {
            slot: SlotId(slot),
            generation,
            block,
            parent: None,
            checksum: 0,
            tenant: None,
        }
    }

    fn page(entries: &[IndexEntry], next: Option<u32>) -> InventoryPage {
        InventoryPage {
            tier: Tier::Disk,
            held: PackedHoldings::of(entries.iter().map(HeldSlot::of)),
            next,
        }
    }

    #[test]
    fn what_all_have_in_one_slot_and_life_is_agreed() {
        let ours = [entry(9, 1, 90), entry(2, 2, 20), entry(5, 3, 50), entry(7, 4, 70)];
        let mut votes = SlotVotes::on(&ours);
        // One says the same thing twice: that does not make two.
        votes
            .take(
                0,
                Tier::Disk,
                &page(&[ours[1], ours[1], entry(5, 2, 50), entry(7, 4, 71)], Some(8)),
            )
            .unwrap();
        votes.take(0, Tier::Disk, &page(&[ours[0]], None)).unwrap();
        votes
            .take(1, Tier::Disk, &page(&[entry(1, 1, 1), ours[2], ours[3], ours[0]], None))
            .unwrap();
        assert_eq!(votes.of_all(2).collect::<Vec<_>>(), [true, false, false, false]);
    }

    #[test]
    fn ranks_that_stall_or_say_other_things_are_ignored() {
        let mut votes = SlotVotes::on(&[entry(1, 1, 1)]);
        assert!(votes.take(0, Tier::Host, &page(&[], None)).unwrap_err().contains("the disk tier"));
        for next in [0, 3] {
            assert!(votes.take(0, Tier::Disk, &page(&[entry(3, 1, 1)], Some(next))).is_err());
        }
        assert!(votes.take(0, Tier::Disk, &page(&[], Some(7))).is_err());
        assert_eq!(votes.take(0, Tier::Disk, &page(&[entry(3, 1, 1)], Some(4))), Ok(Some(4)));
    }
}
