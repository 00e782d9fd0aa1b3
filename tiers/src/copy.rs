//! The vocabulary of data movement: tiers, slots, copy orders, and how their ends are reported.

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

/// A slot of a tier in one of its lives: the generation changes each time that the slot changes
/// hands.
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

/// The name of a block's content: its cache group and the chained hash that commits to all tokens
/// up to its end. Opaque here; stores that describe themselves (objects) write it down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockKey {
    /// Chained hash.
    pub hash: u128,
    /// Cache group (layers of one geometry).
    pub group: u8,
}

impl BlockKey {
    /// All of it in 64 bits, for tables and samples that mix them further and can bear two blocks
    /// of one name. Both halves of the hash count, since an engine may bring hashes of which one
    /// half is the same everywhere.
    pub const fn folded(self) -> u64 {
        self.hash as u64 ^ (self.hash >> 64) as u64 ^ (self.group as u64) << 56
    }
}

/// Whose block it is: who brought it first. A tenant that was forgotten and comes back has another
/// life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Owner {
    /// The tenant, as requests name it.
    pub tenant: u32,
    /// How often this process forgot it before the block came.
    pub life: u32,
}

/// From which tier to which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Route {
    /// Where blocks are read.
    pub from: Tier,
    /// Where they are written.
    pub to: Tier,
}

impl Route {
    /// The route between two tiers.
    pub const fn new(from: Tier, to: Tier) -> Self {
        Self { from, to }
    }

    /// All routes, each tier's to itself too.
    pub fn all() -> impl Iterator<Item = Self> {
        Tier::ALL.into_iter().flat_map(|from| Tier::ALL.map(|to| Self { from, to }))
    }

    /// The route, and the one back.
    pub const fn both_ways(self) -> [Self; 2] {
        [self, Self { from: self.to, to: self.from }]
    }

    /// The lower end, whose medium does the work.
    pub fn lower(self) -> Tier {
        self.from.max(self.to)
    }

    /// Whether an end of it is there.
    pub fn touches(self, tier: Tier) -> bool {
        self.from == tier || self.to == tier
    }
}

/// Copy one block from one slot to another. Plain data: it can be sent to an executor in another
/// process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyOp {
    /// What is copied.
    pub block: BlockKey,
    /// Hash of the block before it in its chain, for stores that describe themselves; `None`: it is
    /// the first.
    pub parent: Option<u128>,
    /// Whose key seals it, where blocks are encrypted; `None`: no particular tenant's.
    pub owner: Option<Owner>,
    /// Source slot.
    pub from: SlotRef,
    /// Destination slot.
    pub to: SlotRef,
}

impl CopyOp {
    /// The tiers between which it moves.
    pub const fn route(&self) -> Route {
        Route { from: self.from.tier, to: self.to.tier }
    }
}

/// What a caller can do about a failed copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CopyErrorKind {
    /// The medium failed at this block, or returned fewer bytes than it has. What was read is not
    /// there any more.
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

impl CopyError {
    /// Nothing was begun.
    pub fn refused(message: impl Into<String>) -> Self {
        Self::new(CopyErrorKind::Refused, message)
    }
}

/// The end of an operation of a batch: which one, and what became of it.
pub type Completion = (usize, Result<(), CopyError>);

/// Where a backend reports the ends of a batch's operations. Cheap to clone; called from any
/// thread.
///
/// A backend reports together what ended together: the listener takes its locks once for each
/// report, not once for each block.
#[derive(Clone)]
pub struct Done(Arc<dyn Fn(Vec<Completion>) + Send + Sync>);

impl Done {
    /// `listen` is told of each operation of the batch once, together with those that ended with
    /// it. It must not block.
    pub fn new(listen: impl Fn(Vec<Completion>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(listen))
    }

    /// These operations of the batch ended, and nothing touches their slots any more.
    ///
    /// A listener that panics is logged and counted ([`panics`](Self::panics)), and the panic goes
    /// no further: the thread that called has operations of other callers to look after, and a
    /// ring's thread would take all of them along.
    pub fn report(&self, ended: Vec<Completion>) {
        // Unwind safety is asserted: nothing of the report is used afterwards.
        if !ended.is_empty() && catch_unwind(AssertUnwindSafe(|| (self.0)(ended))).is_err() {
            PANICS.fetch_add(1, Ordering::Relaxed);
            tracing::error!(
                "what listens to the ends of copies panicked; its callers may wait in vain"
            );
        }
    }

    /// None of these operations was begun.
    pub fn refuse(&self, ops: impl IntoIterator<Item = usize>, why: &str) {
        let refused = CopyError::refused(why);
        self.report(ops.into_iter().map(|op| (op, Err(refused.clone()))).collect());
    }

    /// The same, for a part of the batch whose operations are numbered anew: `number_of` knows
    /// their numbers in the batch.
    #[must_use]
    pub fn renumbered(self, number_of: impl Fn(usize) -> usize + Send + Sync + 'static) -> Self {
        Self::new(move |ended| {
            self.report(ended.into_iter().map(|(op, result)| (number_of(op), result)).collect());
        })
    }

    /// How many listeners of this process have panicked. Anything but 0 is a defect.
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

/// What a backend finds ended at one wake-up, of several batches perhaps. Dropping it reports it:
/// a panic on the way loses nothing that has ended.
#[derive(Debug, Default)]
pub(crate) struct Endings(Vec<(Done, Vec<Completion>)>);

impl Endings {
    pub(crate) fn add(&mut self, done: &Done, op: usize, result: Result<(), CopyError>) {
        // From the back: what ends together was mostly submitted together.
        match self.0.iter_mut().rev().find(|(known, _)| Arc::ptr_eq(&known.0, &done.0)) {
            Some((_, ended)) => ended.push((op, result)),
            None => self.0.push((done.clone(), vec![(op, result)])),
        }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Each batch hears once.
    pub(crate) fn report(self) {
        drop(self);
    }
}

impl Drop for Endings {
    fn drop(&mut self) {
        std::mem::take(&mut self.0).into_iter().for_each(|(done, ended)| done.report(ended));
    }
}
