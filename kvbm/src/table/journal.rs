//! Notes for the index of a tier that outlives the process: what comes to it and leaves it.
//!
//! Notes are made under the table's lock, so that their order is that of the events; other threads
//! write them with the table unlocked, since a medium may be slow. Notes wait in chunks, so that no
//! note costs more than another. If the writer hangs and too many wait, no more are kept, and the
//! index begins anew with what the tier holds when the writer is back.

use std::fmt;
use std::mem;
use std::sync::Arc;

use kvbm_tiers::{BlockKey, Checksums, IndexEntry, SlotId, SlotRef, Tier};

use super::Table;
use super::budget::Budget;
use super::index::RecordId;
use super::namespace::Naming;
use super::tier::TierSlot;
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
    /// Everything was forgotten, and blocks have new names from here on.
    Reset(Naming),
}

/// Notes in a chunk, between two allocations.
const CHUNK: usize = 256;
/// Most notes that wait: some 25 MB.
const MAX_WAITING: usize = if cfg!(test) { 1 << 12 } else { 1 << 18 };

/// Notes on their way to an index, oldest first.
#[derive(Debug, Default)]
pub struct Notes(Mutex<NotedChange>);

#[derive(Default)]
struct NotedChange {
    chunks: Vec<Vec<Note>>,
    /// More notes were made than may wait.
    is_overrun: bool,
    /// The names that blocks have, if everything was forgotten since then.
    naming: Option<Naming>,
    /// The slot where the renewal of the index goes on.
    renewal: Option<u32>,
    /// Counts from the start: of all notes, up to the last removal, and of those that the index
    /// has.
    made: u64,
    last_removal: u64,
    written: u64,
    /// What is done once the index has that many notes.
    waiting: Vec<(u64, AfterRemovals)>,
    /// Wakes the writer.
    waker: Option<Box<dyn Fn() + Send>>,
    /// It was woken, and has not looked yet.
    is_woken: bool,
    /// The index cannot be written now, or has no writer: nothing waits for it.
    is_away: bool,
}

type AfterRemovals = Box<dyn FnOnce() + Send>;

/// Notes for an index.
#[derive(Debug)]
pub struct Taken {
    notes: Vec<Vec<Note>>,
    /// How many were made so far.
    pub made: u64,
    /// Some are lost: the index begins anew, with blocks of these names if everything was forgotten
    /// meanwhile. What the tier holds is noted again.
    pub begins_anew: Option<Option<Naming>>,
}

impl Taken {
    /// In the order in which they were made.
    pub fn notes(self) -> impl Iterator<Item = Note> {
        self.notes.into_iter().flatten()
    }
}

impl fmt::Debug for NotedChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Noted")
            .field("made", &self.made)
            .field("written", &self.written)
            .finish_non_exhaustive()
    }
}

impl Notes {
    fn add(&self, note: Note) {
        let mut noted = self.0.lock();
        noted.made += 1;
        if !matches!(note, Note::Stored(_)) {
            noted.last_removal = noted.made;
        }
        noted.is_overrun |= noted.chunks.len() == MAX_WAITING / CHUNK;
        if noted.is_overrun {
            if let Note::Reset(naming) = note {
                noted.naming = Some(naming);
            }
            return;
        }
        let chunks = &mut noted.chunks;
        match chunks.last_mut().filter(|chunk| chunk.len() < CHUNK) {
            Some(chunk) => chunk.push(note),
            None => {
                let mut chunk = Vec::with_capacity(CHUNK);
                chunk.push(note);
                chunks.push(chunk);
            }
        }
    }

    /// The notes made since the last call.
    pub fn take(&self) -> Taken {
        let mut noted = self.0.lock();
        noted.is_woken = false;
        let (chunks, made) = (mem::take(&mut noted.chunks), noted.made);
        let begins_anew = mem::take(&mut noted.is_overrun).then(|| {
            noted.renewal = Some(0);
            noted.naming.take()
        });
        drop(noted);
        Taken { notes: if begins_anew.is_some() { Vec::new() } else { chunks }, made, begins_anew }
    }

    /// The slot where the table goes on to note all that the tier holds; `None` also while enough
    /// notes wait.
    fn renewal(&self) -> Option<u32> {
        let noted = self.0.lock();
        noted.renewal.filter(|_| !noted.is_overrun && noted.chunks.len() <= MAX_WAITING / CHUNK / 2)
    }

    fn set_renewal(&self, next: Option<u32>) {
        self.0.lock().renewal = next;
    }

    /// Sets what wakes the writer; `None`: there is no writer any more.
    pub(crate) fn set_waker(&self, waker: Option<Box<dyn Fn() + Send>>) {
        self.0.lock().waker = waker;
    }

    /// The index has the first `written` notes, or `None`: it cannot be written. Does what waited
    /// for that.
    pub(crate) fn written(&self, written: Option<u64>) {
        let mut noted = self.0.lock();
        noted.is_away = written.is_none();
        noted.written = written.unwrap_or(noted.written);
        let up_to = written.unwrap_or(u64::MAX);
        let ready: Vec<_> = noted.waiting.extract_if(.., |(wanted, _)| *wanted <= up_to).collect();
        drop(noted);
        ready.into_iter().for_each(|(_, job)| job());
    }

    /// Does `job` once the index has the removals noted so far; gives it back if it has them
    /// already.
    fn after_removals(&self, job: AfterRemovals) -> Option<AfterRemovals> {
        let mut noted = self.0.lock();
        if noted.is_away || noted.written >= noted.last_removal || noted.waker.is_none() {
            return Some(job);
        }
        let wanted = noted.last_removal;
        noted.waiting.push((wanted, job));
        if !std::mem::replace(&mut noted.is_woken, true) {
            noted.waker.iter().for_each(|wake| wake());
        }
        None
    }
}

/// Where a tier's notes go: slot `i` belongs to index number `i` modulo their count. An index may
/// be missing, with its medium.
#[derive(Clone, Debug)]
pub struct Journal {
    /// `None`: other processes have the bytes, and their checksums.
    checksums: Option<Arc<Checksums>>,
    notes: Arc<[Option<Arc<Notes>>]>,
}

impl Journal {
    /// For a tier whose blocks have these checksums, and as many indices as there are `notes`, at
    /// least one.
    pub fn new(
        checksums: Arc<Checksums>,
        notes: impl IntoIterator<Item = Option<Arc<Notes>>>,
    ) -> Self {
        Self { checksums: Some(checksums), notes: notes.into_iter().collect() }
    }

    /// For a tier whose bytes, with their checksums, are in ranks.
    pub fn of_ranks(notes: impl IntoIterator<Item = Option<Arc<Notes>>>) -> Self {
        Self { checksums: None, notes: notes.into_iter().collect() }
    }

    /// A block, perhaps a tenant's, has come to a slot. Without a checksum its bytes could not be
    /// told from others later: then it is not noted.
    pub fn stored(&self, at: SlotRef, block: BlockKey, parent: Option<u128>, tenant: Option<u32>) {
        let known = self.checksums.as_ref().map_or(Some(0), |checksums| checksums.get(at.slot));
        if let Some(checksum) = known {
            let SlotRef { slot, generation, .. } = at;
            let entry = IndexEntry { slot, generation, block, parent, checksum, tenant };
            self.add(slot, Note::Stored(entry));
        }
    }

    /// A block has left a slot.
    pub fn removed(&self, slot: SlotId, block: BlockKey, parent: Option<u128>) {
        self.add(slot, Note::Removed { slot, block, parent });
    }

    /// Does `job` once the indices have all removals noted so far: at once, or on a thread that
    /// writes one. If a slot were written before its index knows that its old block has left, a
    /// process killed in between would lose that block, although its removal was never reported.
    pub fn after_removals(&self, job: impl FnOnce() + Send + 'static) {
        let notes: Vec<_> = self.notes.iter().flatten().cloned().collect();
        after_removals(notes.into_iter(), Box::new(job));
    }

    fn add(&self, slot: SlotId, note: Note) {
        if let Some(notes) = &self.notes[slot.0 as usize % self.notes.len()] {
            notes.add(note);
        }
    }
}

/// One index after another: few tiers have several, and most have nothing to wait for.
fn after_removals(mut notes: std::vec::IntoIter<Arc<Notes>>, job: AfterRemovals) {
    let Some(next) = notes.next() else { return job() };
    let go_on = Box::new(move || after_removals(notes, job));
    if let Some(go_on) = next.after_removals(go_on) {
        go_on();
    }
}

impl Table {
    /// The journal of `tier`, if it has one.
    pub fn journal(&self, tier: Tier) -> Option<&Journal> {
        self.tiers[tier.index()].as_ref()?.journal.as_ref()
    }

    /// From here on notes in `journal` what comes to `tier` and leaves it.
    pub fn keep_journal(&mut self, tier: Tier, journal: Journal) {
        self.tier_mut(tier).journal = Some(journal);
    }

    /// Notes again what `tier` holds, for indices that lost notes, as far as the hold goes. Returns
    /// whether there is more, and room for it.
    pub fn renew_indices(&mut self, tier: Tier, budget: &mut Budget) -> bool {
        let journal = self.tiers[tier.index()].as_ref().and_then(|held| held.journal.clone());
        let Some(Journal { notes, .. }) = journal else { return false };
        for (share, waiting) in notes.iter().enumerate() {
            let Some((waiting, from)) =
                waiting.as_ref().and_then(|notes| Some((notes, notes.renewal()?)))
            else {
                continue;
            };
            let mut next = (from as usize).max(share);
            while next < self.tier(tier).slots.len() {
                if !budget.look() {
                    waiting.set_renewal(Some(next as u32));
                    return true;
                }
                if let Some(record) = self.resident_at(tier, SlotId(next as u32)) {
                    budget.change();
                    self.note_stored(tier, record);
                }
                next += notes.len();
            }
            waiting.set_renewal(None);
        }
        false
    }

    /// The block that can be found in a slot.
    fn resident_at(&self, tier: Tier, slot: SlotId) -> Option<RecordId> {
        let held = self.tier(tier);
        let block = *held.at(slot);
        let is_there = block.record != TierSlot::EMPTY.record
            && !block.is_quarantined()
            && !held.is_forgotten(slot);
        (is_there && self.records.at(block.record).resident().has(tier)).then_some(block.record)
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
            journal.stored(at, block, parent, tenant);
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
        let notes = journals.flat_map(|journal| journal.notes.iter().flatten());
        notes.for_each(|notes| notes.add(Note::Reset(naming)));
    }

    /// What was there is forgotten, but the next process may find it: that is noted with the next
    /// block that comes.
    pub(super) const fn note_reset_later(&mut self) {
        self.owes_reset = true;
    }

    fn names(&self, record: RecordId) -> (BlockKey, Option<u128>) {
        let known = self.records.at(record);
        (known.key(), known.parent().map(|parent| self.records.at(parent).key().hash))
    }
}
