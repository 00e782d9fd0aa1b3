//! The vocabulary of data movement: tiers, slots, copy orders and the trait that executes them.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::error::Failure;

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

impl BlockKey {
    /// All of it in 64 bits, for tables and samples that mix them further and can bear two blocks of one name. Both
    /// halves of the hash count, since an engine may bring hashes of which one half is the same everywhere.
    pub const fn folded(self) -> u64 {
        self.hash as u64 ^ (self.hash >> 64) as u64 ^ (self.group as u64) << 56
    }
}

/// Whose block it is: who brought it first. A tenant that was forgotten and comes back has another life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Owner {
    /// The tenant, as requests name him.
    pub tenant: u32,
    /// How often this process forgot him before the block came.
    pub life: u32,
}

/// From which tier to which.
pub type Route = (Tier, Tier);

/// Copy one block from one slot to another. Plain data: it can be sent to an executor in another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyOp {
    /// What is copied.
    pub block: BlockKey,
    /// Hash of the block before it in its chain, for stores that describe themselves; `None`: it is the first.
    pub parent: Option<u128>,
    /// Whose key seals it, where blocks are encrypted; `None`: nobody's in particular.
    pub owner: Option<Owner>,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// What the tier may cost is spent. Leave it alone in this direction for a while.
    OverBudget,
}

/// A copy that did not happen. The destination's content is undefined.
pub type CopyError = Failure<CopyErrorKind>;

/// The end of an operation of a batch: which one, and what became of it.
pub type Completion = (usize, Result<(), CopyError>);

/// Where a backend reports the end of each operation of a batch. Cheap to clone; called from any thread.
#[derive(Clone)]
pub struct Done(Report);

#[derive(Clone)]
enum Report {
    Each(Arc<dyn Fn(usize, Result<(), CopyError>) + Send + Sync>),
    Together(Arc<dyn Fn(Vec<Completion>) + Send + Sync>),
}

impl Done {
    /// `report(i, result)` is called once for the `i`-th operation of the batch. It must not block.
    pub fn new(report: impl Fn(usize, Result<(), CopyError>) + Send + Sync + 'static) -> Self {
        Self(Report::Each(Arc::new(report)))
    }

    /// `report` is called with each operation of the batch once, together with those that end with it: so it need not
    /// take its locks for every one of them. It must not block.
    pub fn together(report: impl Fn(Vec<Completion>) + Send + Sync + 'static) -> Self {
        Self(Report::Together(Arc::new(report)))
    }

    /// The `op`-th operation of the batch ended and nothing touches its slots any more.
    ///
    /// If the report panics, that is logged and counted ([`panics`](Self::panics)) and goes no further: the thread
    /// that called has other operations to look after, of other callers, and a ring's thread would take all of them
    /// along.
    pub fn complete(&self, op: usize, result: Result<(), CopyError>) {
        match &self.0 {
            Report::Each(report) => survive(|| report(op, result)),
            Report::Together(report) => survive(|| report(vec![(op, result)])),
        }
    }

    /// [`complete`](Self::complete), for several operations.
    pub fn complete_all(&self, ended: Vec<Completion>) {
        match &self.0 {
            Report::Each(report) => ended.into_iter().for_each(|(op, result)| survive(|| report(op, result))),
            Report::Together(report) => survive(|| report(ended)),
        }
    }

    /// How many reports of this process have panicked. Anything but 0 is a defect.
    pub fn panics() -> u64 {
        PANICS.load(Ordering::Relaxed)
    }
}

static PANICS: AtomicU64 = AtomicU64::new(0);

fn survive(report: impl FnOnce()) {
    // Unwind safety is asserted: nothing of the report is used afterwards.
    if catch_unwind(AssertUnwindSafe(report)).is_err() {
        PANICS.fetch_add(1, Ordering::Relaxed);
        tracing::error!("the report of a copy's end panicked; whoever waits for it may wait in vain");
    }
}

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Done")
    }
}
