//! What comes to a tier that outlives the process, and leaves it, noted for its index.
//!
//! Noted under the table's lock, so that the order is that of what happened; written by others, with it unlocked: a
//! medium may be slow. What is noted waits in chunks, so that no note costs more than another.

use std::mem;
use std::sync::Arc;

use kvbm_tiers::{BlockKey, Checksums, IndexEntry, SlotId, SlotRef, Tier};

use super::Table;
use super::index::RecordId;
use super::namespace::Naming;
use crate::sync::Mutex;

/// What happened in a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// A block became resident.
    Stored(IndexEntry),
    /// A block is not resident any more.
    Removed {
        /// Where it lay.
        slot: SlotId,
        /// Which it was.
        block: BlockKey,
        /// The hash of the block before it.
        parent: Option<u128>,
    },
    /// Everything was forgotten, and blocks have other names from here on.
    Reset(Naming),
}

/// Notes made at a time, between two allocations.
const CHUNK: usize = 256;

/// Notes on their way to an index, oldest first.
#[derive(Debug, Default)]
pub struct Notes(Mutex<Vec<Vec<Note>>>);

impl Notes {
    fn add(&self, note: Note) {
        let mut chunks = self.0.lock();
        match chunks.last_mut().filter(|chunk| chunk.len() < CHUNK) {
            Some(chunk) => chunk.push(note),
            None => {
                let mut chunk = Vec::with_capacity(CHUNK);
                chunk.push(note);
                chunks.push(chunk);
            }
        }
    }

    /// All that were made since the last call.
    pub fn take(&self) -> impl Iterator<Item = Note> + use<> {
        std::mem::take(&mut *self.0.lock()).into_iter().flatten()
    }
}

/// Where a tier's notes go: slot `i` is the affair of the index number `i` modulo their count.
#[derive(Clone, Debug)]
pub struct Journal {
    /// `None`: others have the bytes, and their checksums.
    checksums: Option<Arc<Checksums>>,
    notes: Arc<[Arc<Notes>]>,
}

impl Journal {
    /// For a tier whose blocks have these checksums, and as many indices as there are `notes`, at least one.
    pub fn new(checksums: Arc<Checksums>, notes: impl IntoIterator<Item = Arc<Notes>>) -> Self {
        Self { checksums: Some(checksums), notes: notes.into_iter().collect() }
    }

    /// For a tier whose bytes, with their checksums, are in ranks.
    pub fn of_ranks(notes: impl IntoIterator<Item = Arc<Notes>>) -> Self {
        Self { checksums: None, notes: notes.into_iter().collect() }
    }

    /// A block, a tenant's or nobody's, has come to a slot. Without a checksum nobody could tell its bytes from others later: then it is not noted.
    pub fn stored(&self, at: SlotRef, (block, parent): (BlockKey, Option<u128>), tenant: Option<u32>) {
        let known = self.checksums.as_ref().map_or(Some(0), |checksums| checksums.get(at.slot));
        if let Some(checksum) = known {
            let SlotRef { slot, generation, .. } = at;
            let entry = IndexEntry { slot, generation, block, parent, checksum, tenant };
            self.of(at.slot).add(Note::Stored(entry));
        }
    }

    /// A block has left a slot.
    pub fn removed(&self, slot: SlotId, block: BlockKey, parent: Option<u128>) {
        self.of(slot).add(Note::Removed { slot, block, parent });
    }

    fn of(&self, slot: SlotId) -> &Notes {
        &self.notes[slot.0 as usize % self.notes.len()]
    }
}

impl Table {
    /// Has noted from here on what comes to `tier` and leaves it.
    pub fn keep_journal(&mut self, tier: Tier, journal: Journal) {
        self.tier_mut(tier).journal = Some(journal);
    }

    /// A block became resident.
    pub(super) fn note_stored(&mut self, tier: Tier, record: RecordId) {
        if self.tier(tier).journal.is_none() {
            return;
        }
        if mem::take(&mut self.owes_reset) {
            self.note_reset();
        }
        let (block, parent) = self.names(record);
        let held = self.tier(tier);
        let at = held.pool.resident_ref(self.records.at(record).slot(tier));
        if let (Some(journal), Some(at)) = (&held.journal, at) {
            let tenant = self.owners.of(record).map(|owner| owner.tenant);
            journal.stored(at, (block, parent), tenant);
        }
    }

    /// The block in `slot` left it.
    pub(super) fn note_removed(&self, tier: Tier, slot: SlotId, record: RecordId) {
        if let Some(journal) = &self.tier(tier).journal {
            let (block, parent) = self.names(record);
            journal.removed(slot, block, parent);
        }
    }

    /// What was there is forgotten.
    pub(super) fn note_reset(&mut self) {
        self.owes_reset = false;
        let naming = self.naming();
        let journals = self.tiers.iter().flatten().filter_map(|held| held.journal.as_ref());
        journals.flat_map(|journal| journal.notes.iter()).for_each(|notes| notes.add(Note::Reset(naming)));
    }

    /// What was there is forgotten, but may be found by the next process: it is noted with the next block that comes.
    pub(super) const fn note_reset_later(&mut self) {
        self.owes_reset = true;
    }

    fn names(&self, record: RecordId) -> (BlockKey, Option<u128>) {
        let known = self.records.at(record);
        (known.key(), known.parent().map(|parent| self.records.at(parent).key().hash))
    }
}
