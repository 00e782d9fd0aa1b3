//! Notes that wait for the medium.
//!
//! Of what happens to a slot while a medium cannot be written, only the last matters. So the notes
//! are thinned out when they are many, and a medium that is away for a day costs memory only in
//! proportion to its slots.

use std::collections::{HashSet, VecDeque};

use kvbm_tiers::SlotId;

use crate::table::Note;

#[derive(Debug)]
pub(super) struct NoteBacklog {
    notes: VecDeque<Note>,
    /// Thinned out at this many.
    limit: usize,
}

/// Notes that wait without thinning: 6 MB.
const LIMIT: usize = 1 << 16;

impl NoteBacklog {
    pub(super) const fn new() -> Self {
        Self { notes: VecDeque::new(), limit: LIMIT }
    }

    /// Adds notes. Returns removals that later notes make needless to write: they still happened.
    pub(super) fn extend(&mut self, notes: impl Iterator<Item = Note>) -> Vec<Note> {
        for note in notes {
            // Earlier notes do not matter any more.
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
                Some(_) => {
                    left_out.extend(Some(note).filter(|note| matches!(note, Note::Removed { .. })));
                }
            }
        }
        self.notes = kept;
        left_out.reverse();
        left_out
    }

    pub(super) fn is_empty(&self) -> bool {
        self.notes.is_empty()
    }

    /// The notes to write next.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Note> {
        self.notes.iter()
    }

    /// The first `notes` are written.
    pub(super) fn written(&mut self, notes: usize) {
        self.notes.drain(..notes);
    }
}

/// `None`: it is about all slots.
const fn slot_of(note: &Note) -> Option<SlotId> {
    match note {
        Note::Stored(entry) => Some(entry.slot),
        Note::Removed { slot, .. } => Some(*slot),
        Note::Reset(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kvbm_tiers::{BlockKey, IndexEntry};
    use proptest::prelude::*;

    use super::*;
    use crate::table::Table;

    fn note() -> impl Strategy<Value = Note> {
        (0..8u32, 0..9u128, any::<bool>()).prop_map(|(slot, hash, is_stored)| {
            let (slot, block, parent) = (SlotId(slot), BlockKey { hash, group: 0 }, None);
            let entry =
                IndexEntry { slot, generation: 0, block, parent, checksum: 1, tenant: None };
            if is_stored { Note::Stored(entry) } else { Note::Removed { slot, block, parent } }
        })
    }

    fn end(notes: impl Iterator<Item = Note>) -> BTreeMap<SlotId, BlockKey> {
        let mut slots = BTreeMap::new();
        for note in notes {
            match note {
                Note::Stored(entry) => drop(slots.insert(entry.slot, entry.block)),
                Note::Removed { slot, .. } => drop(slots.remove(&slot)),
                Note::Reset(_) => slots.clear(),
            }
        }
        slots
    }

    proptest! {
        #[test]
        fn thinned_out_they_end_the_same(notes in prop::collection::vec(note(), 0..100), reset_at: prop::sample::Index) {
            let mut notes = notes;
            notes.insert(reset_at.index(notes.len() + 1), Note::Reset(Table::new([]).naming()));
            let mut backlog = NoteBacklog { notes: VecDeque::new(), limit: 1 };
            let left_out = backlog.extend(notes.iter().copied());
            prop_assert_eq!(end(backlog.iter().copied()), end(notes.iter().copied()));
            prop_assert!(backlog.notes.len() <= 8 + 1);
            let last_reset = notes.iter().position(|note| matches!(note, Note::Reset(_))).unwrap();
            let removals = |notes: &[Note]| notes.iter().filter(|note| matches!(note, Note::Removed { .. })).count();
            let kept: Vec<Note> = backlog.iter().copied().collect();
            prop_assert_eq!(removals(&left_out) + removals(&kept), removals(&notes[last_reset..]));
            prop_assert_eq!(left_out.len(), removals(&left_out));
        }
    }
}
