//! The vocabulary of data movement: tiers, slots, copy orders and the trait that executes them.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::fence::Fences;

/// A level of the memory hierarchy, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Tier {
    /// G1: GPU memory, or the emulated device.
    Device,
    /// G2: DRAM.
    Host,
    /// G3: local NVMe.
    Disk,
    /// G4: an object store.
    Object,
}

impl Tier {
    /// How many tiers there are.
    pub const COUNT: usize = 4;
    /// All tiers, fastest first.
    pub const ALL: [Self; Self::COUNT] = [Self::Device, Self::Host, Self::Disk, Self::Object];

    /// Position in [`Self::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The name used in metrics, settings and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
            Self::Object => "object",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Number of a slot in its tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SlotId(pub u32);

/// A slot of a tier in one of its lives: the generation changes each time that the slot changes hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SlotRef {
    /// The tier.
    pub tier: Tier,
    /// The slot in it.
    pub slot: SlotId,
    /// Which of the slot's lives.
    pub generation: u32,
}

impl fmt::Display for SlotRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} slot {} (generation {})", self.tier, self.slot.0, self.generation)
    }
}

/// The name of a block's content: its cache group and the chained hash that commits to all tokens up to its
/// end. Opaque here; stores that describe themselves (objects) write it down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockKey {
    /// Chained hash.
    pub hash: u128,
    /// Cache group (layers of one geometry).
    pub group: u8,
}

/// From which tier to which.
pub type Route = (Tier, Tier);

/// Copy one block from one slot to another. Plain data: it can be sent to an executor in another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyOp {
    /// What is copied.
    pub block: BlockKey,
    /// Source slot.
    pub from: SlotRef,
    /// Destination slot.
    pub to: SlotRef,
}

impl CopyOp {
    /// The tiers between which it moves.
    pub const fn route(&self) -> Route {
        (self.from.tier, self.to.tier)
    }
}

/// What a caller can do about a failed copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CopyErrorKind {
    /// The medium failed at this block, or returned fewer bytes than it has. What was read is not there any more.
    Io,
    /// The bytes read are not those written. Quarantine the source.
    Corrupt,
    /// The medium is full. Stop writing for a while.
    NoSpace,
    /// The service behind the tier does not answer. Try later.
    Unavailable,
    /// It did not end in time; the slots may still be written to.
    TimedOut,
    /// The backend is shutting down or does not serve this route.
    Refused,
}

/// A copy that did not happen. The destination's content is undefined.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct CopyError {
    kind: CopyErrorKind,
    message: String,
    #[source]
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl CopyError {
    /// An error without a cause below it. `message` says what, where and, if known, what to do.
    pub fn new(kind: CopyErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// An error caused by `source`.
    pub fn caused(
        kind: CopyErrorKind,
        message: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self { kind, message: message.into(), source: Some(Arc::new(source)) }
    }

    /// What can be done about it.
    pub const fn kind(&self) -> CopyErrorKind {
        self.kind
    }
}

/// Where a backend reports the end of each operation of a batch. Cheap to clone; called from any thread.
#[derive(Clone)]
pub struct Done(Arc<dyn Fn(usize, Result<(), CopyError>) + Send + Sync>);

impl Done {
    /// `report(i, result)` is called once for the `i`-th operation of the batch. It must not block.
    pub fn new(report: impl Fn(usize, Result<(), CopyError>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(report))
    }

    /// The `op`-th operation of the batch ended and nothing touches its slots any more.
    ///
    /// If the report panics, that is logged and counted ([`panics`](Self::panics)) and goes no further: the thread
    /// that called has other operations to look after, of other callers, and a ring's thread would take all of them
    /// along.
    pub fn complete(&self, op: usize, result: Result<(), CopyError>) {
        if catch_unwind(AssertUnwindSafe(|| (self.0)(op, result))).is_err() {
            PANICS.fetch_add(1, Ordering::Relaxed);
            tracing::error!(op, "the report of a copy's end panicked; whoever waits for it may wait in vain");
        }
    }

    /// How many reports of this process have panicked. Anything but 0 is a defect.
    pub fn panics() -> u64 {
        PANICS.load(Ordering::Relaxed)
    }
}

static PANICS: AtomicU64 = AtomicU64::new(0);

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Done")
    }
}

/// Moves blocks between regions.
///
/// # Safety
/// An implementation completes each operation of a batch exactly once, and only when neither it nor the
/// hardware behind it can touch the operation's slots any more. It keeps the regions alive until then. It
/// never writes outside the destination slots, and `Ok` means that all bytes of the block arrived.
///
/// Callers promise in turn that a slot named by a submitted operation is written by nobody else, and a
/// destination read by nobody, until its completion.
///
/// # What upholds the callers' promise
/// [`submit`](Self::submit) is a safe function although it asks this, so strictly it is unsound: safe code can make an
/// operation for slots that it has no title to. No type or borrow can rule that out, since an operation is plain data
/// and may come from another process; and an `unsafe fn` would move the promise into the `kvbm` crate, which forbids
/// `unsafe` code. It is kept by convention, in one place. The only safe ways to a slot's bytes ask for its
/// [`Frame`](crate::Frame) or a [`Loan`](crate::Loan) of its pool's; a frame is made once per slot and cannot be cloned;
/// and the scheduler of the `kvbm` crate, the only caller outside tests and benches, keeps the destinations' frames and
/// pins the sources from before the submission until the completion. An operation that never completes keeps them for
/// ever. Backends check that slots exist, not who holds them: a mistake there is a wrong block that
/// [`Verified`](crate::Verified) catches, never an access outside a region.
pub unsafe trait Backend: Send + Sync + fmt::Debug {
    /// Short name for reports: `memcpy`, `io_uring`, `threads` …
    fn name(&self) -> &'static str;

    /// The routes that it serves.
    fn routes(&self) -> &[Route];

    /// Starts the copies. Must return quickly; reports through `done`, possibly before it returns.
    fn submit(&self, batch: Vec<CopyOp>, done: Done);

    /// The same, in order with an engine's work: call [`fence::submit`](crate::fence::submit) instead. By default
    /// refused, unless there is nothing to wait for.
    fn submit_fenced(&self, batch: Vec<CopyOp>, fences: Fences, done: Done) {
        crate::fence::submit_unfenced(self, batch, &fences, done);
    }
}

// SAFETY: everything is the inner backend's doing.
unsafe impl<B: Backend + ?Sized> Backend for Arc<B> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn routes(&self) -> &[Route] {
        (**self).routes()
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        (**self).submit(batch, done);
    }

    fn submit_fenced(&self, batch: Vec<CopyOp>, fences: Fences, done: Done) {
        (**self).submit_fenced(batch, fences, done);
    }
}
