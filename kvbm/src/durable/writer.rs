//! The thread that writes one index.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use kvbm_tiers::{IndexChange, IndexEntry, SlotId, TierIndex, clock};

use super::WriterService;
use super::acknowledgement::DurableEvent;
use super::backlog::NoteBacklog;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{JoinHandle, spawn};
use crate::table::{Naming, Note, Notes};

/// How long what is noted waits for company, while there is more to note and when there was nothing: nobody who holds the
/// table's lock wakes the writer. A block that leaves is overwritten soon: what the index says of it is wrong until then.
const PERIOD: Duration = Duration::from_millis(1);
const IDLE_PERIOD: Duration = Duration::from_millis(10);
/// A medium that could not be written is left alone so long.
const PAUSE: Duration = Duration::from_secs(1);
/// Changes written together.
const MOST: usize = 4_096;

/// Whoever asks is told what became of all that was noted before; `None`: somebody waits for what is noted, and will see.
type WriterRequest = Option<SyncSender<io::Result<()>>>;

/// A thread with an index.
pub(super) struct IndexWriter {
    asks: SyncSender<WriterRequest>,
    _waker: WriterWaker,
    thread: JoinHandle,
    ended: Receiver<()>,
    path: PathBuf,
}

/// The notes can wake the writer as long as it is wanted: they would keep its thread.
struct WriterWaker(Arc<Notes>);

impl Drop for WriterWaker {
    fn drop(&mut self) {
        self.0.set_waker(None);
    }
}

/// What becomes of all that was noted until now.
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
    pub(super) fn start(index: TierIndex, notes: Arc<Notes>, service: WriterService) -> io::Result<Self> {
        let path = index.path().to_owned();
        let (asks, asked) = sync_channel(16);
        let (end, ended) = sync_channel(1);
        let waker = asks.clone();
        // A full channel means that it looks soon anyway.
        notes.set_waker(Some(Box::new(move || drop(waker.try_send(None)))));
        let waker = WriterWaker(Arc::clone(&notes));
        let (naming, backlog) = (service.naming, NoteBacklog::new());
        let work =
            WriterWork { index, notes, taken: 0, service, naming, backlog, retry_at: None, is_idle: true };
        let thread = spawn("kvbm-index", move || {
            work.run(&asked);
            drop(end);
        })?;
        Ok(Self { asks, _waker: waker, thread, ended, path })
    }

    /// Has all that was noted until now written.
    pub(super) fn settle(&self) -> WriterFlush {
        let (ask, answer) = sync_channel(1);
        // Where the thread is gone or hangs, no answer comes.
        drop(self.asks.try_send(Some(ask)));
        WriterFlush { answer, path: self.path.clone() }
    }

    pub(super) fn stop(self) -> WriterStop {
        let Self { thread, ended, path, .. } = self;
        WriterStop { thread, ended, path }
    }
}

impl WriterFlush {
    /// Until it is in the index, at most for `limit`.
    pub(super) fn wait(self, limit: Duration) -> Result<()> {
        let timed_out = Err(io::ErrorKind::TimedOut.into());
        self.answer.recv_timeout(limit).unwrap_or(timed_out).map_err(|error| {
            let message = format!("{} cannot be written: {error}", self.path.display());
            Error::caused(ErrorKind::Unavailable, message, error)
        })
    }
}

impl WriterStop {
    /// Until all is written, at most for `limit`.
    pub(super) fn wait(self, limit: Duration) {
        if self.ended.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected) {
            drop(self.thread.join());
        } else {
            tracing::warn!(path = %self.path.display(), "an index is still being written, and left to its thread");
        }
    }
}

impl Drop for WriterWork {
    /// Also where a round panicked.
    fn drop(&mut self) {
        self.notes.written(None);
    }
}

struct WriterWork {
    index: TierIndex,
    notes: Arc<Notes>,
    /// Notes that came with the last look and those before.
    taken: u64,
    service: WriterService,
    /// The names that blocks have by what was taken; the service's, by what was told.
    naming: Naming,
    backlog: NoteBacklog,
    /// When the medium, which failed, is tried again.
    retry_at: Option<Instant>,
    /// Nothing was noted of late.
    is_idle: bool,
}

impl WriterWork {
    fn run(mut self, asked: &Receiver<WriterRequest>) {
        loop {
            let period = if self.is_idle { IDLE_PERIOD } else { PERIOD };
            match asked.recv_timeout(period) {
                // Who asks has a reason to have it tried now.
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
        // An index that cannot be written stops nobody.
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
            // Before: a process that is killed in between has told of too little, not of too much.
            self.tell(&gone);
            let written = self.write_some()?;
            self.backlog.written(written);
            self.tell(&rest);
        }
        Ok(())
    }

    /// The notes that are written next: removals of blocks that were told of before, and all others.
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

    /// Those that are written together.
    fn next(&self) -> impl Iterator<Item = Note> {
        let is_reset = |note: &&Note| matches!(note, Note::Reset(_));
        let is_alone = self.backlog.iter().next().is_some_and(|note| is_reset(&note));
        let most = if is_alone { 1 } else { MOST };
        self.backlog.iter().take(most).take_while(move |note| is_alone || !is_reset(note)).copied()
    }

    /// Returns how many notes.
    fn write_some(&mut self) -> io::Result<usize> {
        if let Some(Note::Reset(naming)) = self.backlog.iter().next() {
            let (epoch, forgotten) = naming.epoch;
            self.index.set_epoch(epoch, forgotten)?;
            return Ok(1);
        }
        let changes: Vec<_> = self.next().filter_map(|note| change(&note, self.service.parts)).collect();
        self.index.append(&changes)?;
        Ok(changes.len())
    }

    fn tell(&mut self, notes: &[Note]) {
        if let Some(Note::Reset(naming)) = notes.iter().find(|note| matches!(note, Note::Reset(_))) {
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
