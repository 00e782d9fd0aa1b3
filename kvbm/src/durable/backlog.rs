//! Notes that wait for the medium.
//!
//! What happens to a slot while a medium cannot be written matters only by its end. So the notes are thinned out when
//! they are many, and a medium that is away for a day costs no more memory than there are slots.

use std::collections::{HashSet, VecDeque};

use kvbm_tiers::SlotId;

use crate::table::Note;

#[derive(Debug)]
pub(super) struct Backlog {
    notes: VecDeque<Note>,
    /// Thinned out when there are so many.
    limit: usize,
}

/// Notes that wait as they came, 6 MB of them.
const LIMIT: usize = 1 << 16;

impl Backlog {
    pub(super) const fn new() -> Self {
        Self { notes: VecDeque::new(), limit: LIMIT }
    }

    /// Adds notes. Returns those of removals that are not written because of what came after: they are true all the same.
    pub(super) fn extend(&mut self, notes: impl Iterator<Item = Note>) -> Vec<Note> {
        for note in notes {
            // What was before does not matter any more.
            if matches!(note, Note::Reset(_)) {
                self.notes.clear();
            }
            self.notes.push_back(note);
        }
        if self.notes.len() < self.limit {
            return Vec::new();
        }
        let left_out = self.thin_out();
        self.limit = LIMIT.max(2 * self.notes.len());
        left_out
    }

    /// Keeps the last note of each slot.
    fn thin_out(&mut self) -> Vec<Note> {
        let (mut slots, mut left_out) = (HashSet::new(), Vec::new());
        let mut kept = VecDeque::new();
        while let Some(note) = self.notes.pop_back() {
            match slot_of(&note) {
                None => kept.push_front(note),
                Some(slot) if slots.insert(slot) => kept.push_front(note),
                Some(_) => left_out.extend(Some(note).filter(|note| matches!(note, Note::Removed { .. }))),
            }
        }
        self.notes = kept;
        left_out.reverse();
        left_out
    }

    pub(super) fn is_empty(&self) -> bool {
        self.notes.is_empty()
    }

    /// What comes next.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Note> {
        self.notes.iter()
    }

    /// The first `notes` are written.
    pub(super) fn written(&mut self, notes: usize) -> impl Iterator<Item = Note> + '_ {
        self.notes.drain(..notes)
    }
}

/// `None`: it is about all.
const fn slot_of(note: &Note) -> Option<SlotId> {
    match note {
        Note::Stored(entry) => Some(entry.slot),
        Note::Removed { slot, .. } => Some(*slot),
        Note::Reset(_) => None,
    }
}
