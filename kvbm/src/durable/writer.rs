//! The thread that writes one index.

use std::collections::{HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use std::{fmt, io};

use kvbm_tiers::{IndexChange, IndexEntry, SlotId, TierIndex, clock};

use super::{DurableEvent, WriterService};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{JoinHandle, spawn};
use crate::table::{Naming, Note, Notes};

/// How long notes are gathered, under load and when idle: holders of the table's lock do not wake
/// the writer. A block that leaves is overwritten soon: until then the index is wrong about it.
const PERIOD: Duration = Duration::from_millis(1);
const IDLE_PERIOD: Duration = Duration::from_millis(10);
/// How long a medium that could not be written is left alone.
const PAUSE: Duration = Duration::from_secs(1);
/// Changes written together.
const MOST: usize = 4_096;

/// A request to write. The sender gets the result for all notes made before; `None`: the caller
/// sees it by other means.
type WriterRequest = Option<SyncSender<io::Result<()>>>;

/// A thread with an index.
pub(super) struct IndexWriter {
    asks: SyncSender<WriterRequest>,
    _waker: WriterWaker,
    thread: JoinHandle,
    ended: Receiver<()>,
    path: PathBuf,
}

/// Lets the notes wake the writer while it is wanted: they would keep its thread alive.
struct WriterWaker(Arc<Notes>);

impl Drop for WriterWaker {
    fn drop(&mut self) {
        self.0.set_waker(None);
    }
}

/// The pending result for all notes made so far.
pub(super) struct WriterFlush {
    answer: Receiver<io::Result<()>>,
    path: PathBuf,
}

/// A writer that was told to stop.
pub(super) struct WriterStop {
    thread: JoinHandle,
    ended: Receiver<()>,
    path: PathBuf,
}

impl fmt::Debug for IndexWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer").field("path", &self.path).finish_non_exhaustive()
    }
}

impl IndexWriter {
    pub(super) fn start(
        index: TierIndex,
        notes: Arc<Notes>,
        service: WriterService,
    ) -> io::Result<Self> {
        let path = index.path().to_owned();
        let (asks, asked) = sync_channel(16);
        let (end, ended) = sync_channel(1);
        let waker = asks.clone();
        // If the channel is full, it looks soon anyway.
        notes.set_waker(Some(Box::new(move || drop(waker.try_send(None)))));
        let waker = WriterWaker(Arc::clone(&notes));
        let (naming, backlog) = (service.naming, NoteBacklog::new());
        let work = WriterWork {
            index,
            notes,
            taken: 0,
            service,
            naming,
            backlog,
            retry_at: None,
            is_idle: true,
        };
        let thread = spawn("kvbm-index", move || {
            work.run(&asked);
            drop(end);
        })?;
        Ok(Self { asks, _waker: waker, thread, ended, path })
    }

    /// Requests that all notes made so far are written.
    pub(super) fn flush(&self) -> WriterFlush {
        let (ask, answer) = sync_channel(1);
        // If the thread is gone or hangs, no answer comes.
        drop(self.asks.try_send(Some(ask)));
        WriterFlush { answer, path: self.path.clone() }
    }

    pub(super) fn stop(self) -> WriterStop {
        let Self { thread, ended, path, .. } = self;
        WriterStop { thread, ended, path }
    }
}

impl WriterFlush {
    /// Waits until they are in the index, at most for `limit`.
    pub(super) fn wait(self, limit: Duration) -> Result<()> {
        let timed_out = Err(io::ErrorKind::TimedOut.into());
        self.answer.recv_timeout(limit).unwrap_or(timed_out).map_err(|error| {
            let message = format!("{} cannot be written: {error}", self.path.display());
            Error::caused(ErrorKind::Unavailable, message, error)
        })
    }
}

impl WriterStop {
    /// Waits until everything is written, at most for `limit`.
    pub(super) fn wait(self, limit: Duration) {
        if self.ended.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected) {
            drop(self.thread.join());
        } else {
            tracing::warn!(path = %self.path.display(), "an index is still being written, and left to its thread");
        }
    }
}

impl Drop for WriterWork {
    /// Even if a round panicked.
    fn drop(&mut self) {
        self.notes.written(None);
    }
}

struct WriterWork {
    index: TierIndex,
    notes: Arc<Notes>,
    /// Notes taken so far.
    taken: u64,
    service: WriterService,
    /// The names of blocks as of the notes taken; the service's are as of those told.
    naming: Naming,
    backlog: NoteBacklog,
    /// When a failed medium is tried again.
    retry_at: Option<Instant>,
    /// Nothing was noted lately.
    is_idle: bool,
}

impl WriterWork {
    fn run(mut self, asked: &Receiver<WriterRequest>) {
        loop {
            let period = if self.is_idle { IDLE_PERIOD } else { PERIOD };
            match asked.recv_timeout(period) {
                // A request is a reason to try now.
                Ok(Some(answer)) => drop(answer.send(self.round())),
                Ok(None) | Err(RecvTimeoutError::Timeout) => {
                    if self.retry_at.is_none_or(|due| clock::now() >= due) {
                        drop(self.round());
                    } else {
                        self.gather();
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let end = self.round().and_then(|()| self.index.sync());
                    return end.unwrap_or_else(|error| self.lost(&error));
                }
            }
        }
    }

    fn gather(&mut self) {
        let taken = self.notes.take();
        self.taken = taken.made;
        if let Some(naming) = taken.begins_anew {
            tracing::warn!(path = %self.index.path().display(), "an index hung for long, and is written anew");
            self.naming = naming.unwrap_or(self.naming);
            drop(self.backlog.extend(std::iter::once(Note::Reset(self.naming))));
        }
        let last_naming = &mut self.naming;
        let notes = taken.notes().inspect(|note| {
            if let Note::Reset(naming) = note {
                *last_naming = *naming;
            }
        });
        let mut notes = notes.peekable();
        self.is_idle = notes.peek().is_none();
        let left_out = self.backlog.extend(notes);
        self.tell(&left_out);
    }

    fn round(&mut self) -> io::Result<()> {
        self.gather();
        let written = self.write_backlog();
        match &written {
            Ok(()) if self.retry_at.take().is_some() => {
                tracing::info!(path = %self.index.path().display(), "an index can be written again");
            }
            Ok(()) => {}
            Err(error) => self.note_failure(error),
        }
        // An index that cannot be written holds nothing up.
        self.notes.written(written.is_ok().then_some(self.taken));
        written
    }

    fn note_failure(&mut self, error: &io::Error) {
        self.service.metrics.iter().for_each(|metrics| metrics.index_failed(self.service.tier));
        if self.retry_at.is_none() {
            let path = self.index.path().display();
            tracing::error!(%path, %error, "an index cannot be written: what comes now will not be found after a restart");
        }
        self.retry_at = Some(clock::now() + PAUSE);
    }

    fn lost(&self, error: &io::Error) {
        let (path, notes) = (self.index.path().display(), self.backlog.iter().count());
        tracing::error!(%path, %error, notes, "the end of an index could not be written");
    }

    fn write_backlog(&mut self) -> io::Result<()> {
        while !self.backlog.is_empty() {
            let (gone, rest) = self.next_told();
            // Before: a process killed in between has told too little, not too much.
            self.tell(&gone);
            let written = self.write_some()?;
            self.backlog.written(written);
            self.tell(&rest);
        }
        Ok(())
    }

    /// The notes to write next: removals of blocks that were told as stored, and all others.
    fn next_told(&self) -> (Vec<Note>, Vec<Note>) {
        let mut stored = HashSet::new();
        self.next().partition(|note| match note {
            Note::Stored(entry) => {
                stored.insert(entry.block);
                false
            }
            Note::Removed { block, .. } => !stored.contains(block),
            Note::Reset(_) => false,
        })
    }

    /// The notes that are written together.
    fn next(&self) -> impl Iterator<Item = Note> {
        let is_reset = |note: &&Note| matches!(note, Note::Reset(_));
        let is_alone = self.backlog.iter().next().is_some_and(|note| is_reset(&note));
        let most = if is_alone { 1 } else { MOST };
        self.backlog.iter().take(most).take_while(move |note| is_alone || !is_reset(note)).copied()
    }

    /// Returns how many notes.
    fn write_some(&mut self) -> io::Result<usize> {
        if let Some(Note::Reset(naming)) = self.backlog.iter().next() {
            self.index.set_epoch(naming.epoch)?;
            return Ok(1);
        }
        let changes: Vec<_> =
            self.next().filter_map(|note| change(&note, self.service.parts)).collect();
        self.index.append(&changes)?;
        Ok(changes.len())
    }

    fn tell(&mut self, notes: &[Note]) {
        if let Some(Note::Reset(naming)) = notes.iter().find(|note| matches!(note, Note::Reset(_)))
        {
            self.service.naming = *naming;
        }
        if let Some(on_durable) = &self.service.on_durable {
            let event = |note| DurableEvent::of(note, self.service.tier, self.service.naming);
            on_durable.tell(&notes.iter().map(event).collect::<Vec<_>>());
        }
    }
}

/// `None`: it concerns all slots.
const fn change(note: &Note, parts: u32) -> Option<IndexChange> {
    match note {
        Note::Stored(entry) => {
            let slot = SlotId(entry.slot.0 / parts);
            Some(IndexChange::Stored(IndexEntry { slot, ..*entry }))
        }
        Note::Removed { slot, .. } => Some(IndexChange::Removed(SlotId(slot.0 / parts))),
        Note::Reset(_) => None,
    }
}

/// Notes that wait for the medium.
///
/// Of what happens to a slot while a medium cannot be written, only the last matters. So the notes
/// are thinned out when they are many, and a medium that is away for a day costs memory only in
/// proportion to its slots.
#[derive(Debug)]
struct NoteBacklog {
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
    fn extend(&mut self, notes: impl Iterator<Item = Note>) -> Vec<Note> {
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
