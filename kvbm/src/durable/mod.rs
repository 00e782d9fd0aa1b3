//! What outlives the process: the indices of tiers whose slots do.
//!
//! The table notes what comes and leaves ([`Journal`](crate::table::Journal)); for each index a
//! thread takes the notes and appends them. A block is *durable* from then on: a process that is
//! killed finds it again. A medium that cannot be written holds nothing up: notes wait in memory,
//! at most as many as there are slots, and are written when it is well. If that never happens,
//! blocks are lost, or are found in the wrong place, where their checksums show it.
//!
//! | module | holds |
//! |---|---|
//! | `writer` | the thread, and notes that wait for the medium |

mod writer;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::{BlockKey, Tier, TierIndex, clock};

use self::writer::IndexWriter;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::Metrics;
use crate::names::hash::BlockHash;
use crate::observe::events::CachedBlock;
use crate::sync::Mutex;
use crate::table::{Naming, Note, Notes};

/// The writers of all indices. None if no tier outlives the process.
#[derive(Debug, Default)]
pub(crate) struct DurableTiers {
    writers: Mutex<Vec<IndexWriter>>,
    reports: Vec<RecoveryReport>,
}

/// What was found in a tier that an earlier process left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RecoveryReport {
    /// Which.
    pub tier: Tier,
    /// Blocks that are resident again.
    pub blocks: usize,
    /// Useless entries of the index: blocks without those before them, or in slots that are taken.
    pub dropped: usize,
    /// Blocks of a past epoch, which must not be found.
    pub past: usize,
    /// Blocks that some [rank](crate::Rank) does not have where the leader has them; these must not
    /// be found either.
    pub disagreed: usize,
    /// Damaged entries, which were skipped.
    pub damaged: u64,
    /// Bytes of incomplete entries at the end of indices.
    pub torn_bytes: u64,
    /// Microseconds that it took.
    pub took_us: u64,
}

/// What a writer reports to.
pub(crate) struct WriterService {
    pub(crate) tier: Tier,
    /// How many indices the tier has; each numbers its slots from 0.
    pub(crate) parts: u32,
    pub(crate) naming: Naming,
    pub(crate) on_durable: Option<OnDurable>,
    /// A rank has none.
    pub(crate) metrics: Option<Metrics>,
}

impl DurableTiers {
    pub(crate) fn reporting(reports: Vec<RecoveryReport>) -> Self {
        Self { writers: Mutex::default(), reports }
    }

    /// Writes notes to these indices from here on. Returns where to note, for each of them.
    pub(crate) fn write_all<T>(
        &self,
        indices: Vec<Option<(TierIndex, T)>>,
        service: impl Fn() -> WriterService,
    ) -> Result<Vec<Option<Arc<Notes>>>> {
        let start = |(index, _)| {
            let notes = Arc::<Notes>::default();
            let writer = IndexWriter::start(index, Arc::clone(&notes), service());
            let writer = writer.map_err(|error| {
                Error::caused(ErrorKind::Unavailable, "cannot start a thread", error)
            })?;
            self.writers.lock().push(writer);
            Ok(notes)
        };
        indices.into_iter().map(|index| index.map(start).transpose()).collect()
    }

    pub(crate) fn reports(&self) -> &[RecoveryReport] {
        &self.reports
    }

    /// Waits until the indices have all notes made so far, at most for `limit`.
    ///
    /// # Errors
    /// `Unavailable`: one of them cannot be written, or takes longer. It is retried in the
    /// background.
    pub(crate) fn flush(&self, limit: Duration) -> Result<()> {
        let began = clock::now();
        let flushes: Vec<_> = self.writers.lock().iter().map(IndexWriter::flush).collect();
        flushes.into_iter().try_for_each(|end| end.wait(limit.saturating_sub(began.elapsed())))
    }

    /// [`flush`](Self::flush), on the medium itself; then closes the files.
    pub(crate) fn close(&self, limit: Duration) {
        let began = clock::now();
        let writers = std::mem::take(&mut *self.writers.lock());
        let ends: Vec<_> = writers.into_iter().map(IndexWriter::stop).collect();
        for end in ends {
            end.wait(limit.saturating_sub(began.elapsed()));
        }
    }

    /// Leaves everything as it is: this is a forked child of the manager's process.
    pub(crate) fn abandon(&self) {
        std::mem::forget(std::mem::take(&mut *self.writers.lock()));
    }
}

/// What the next process will find if this one is killed.
///
/// Events of one block in one tier come in order: stored once its index has it, removed before its
/// slot gets another block, perhaps twice if the index could not be written. They hold for the end
/// of a process; docs/disk-format.md says what a power cut takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DurableEvent {
    /// A block that is there until it is removed.
    Stored(CachedBlock),
    /// A block that will not be found any more.
    Removed(CachedBlock),
    /// No earlier block of the tier will be found: a [reset](crate::Manager::reset).
    Cleared(Tier),
}

/// Called with what has become durable, on the manager's threads, one call at a time: it should not
/// take long.
#[derive(Clone)]
pub struct OnDurable(Arc<Mutex<Box<Listener>>>);

type Listener = dyn FnMut(&[DurableEvent]) + Send;

impl OnDurable {
    /// Tells `listener`.
    pub fn new(listener: impl FnMut(&[DurableEvent]) + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Box::new(listener))))
    }

    pub(super) fn tell(&self, events: &[DurableEvent]) {
        if !events.is_empty() {
            (self.0.lock())(events);
        }
    }
}

impl fmt::Debug for OnDurable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnDurable")
    }
}

impl DurableEvent {
    pub(super) fn of(note: &Note, tier: Tier, naming: Naming) -> Self {
        let cached = |block: BlockKey, parent: Option<u128>| {
            let hash = |name| BlockHash::from_u128(naming.hash_of(name));
            CachedBlock {
                tier,
                group: block.group,
                hash: hash(block.hash),
                parent: parent.map(hash),
            }
        };
        match note {
            Note::Stored(entry) => Self::Stored(cached(entry.block, entry.parent)),
            Note::Removed { block, parent, .. } => Self::Removed(cached(*block, *parent)),
            Note::Reset(_) => Self::Cleared(tier),
        }
    }
}
