//! Copy tasks: what the table asks of the scheduler, and what it is told about them. Plain data,
//! which could be sent to another process: the slot handles that a task needs stay with the table.

use std::any::Any;
use std::sync::Arc;

use kvbm_tiers::{BlockKey, Owner, SlotRef};
use serde::{Deserialize, Serialize};

/// What kind of work a copy is; also its precedence, most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Class {
    /// An engine waits for these bytes.
    Load,
    /// An engine waits for its slots to be saved.
    Save,
    /// Copying dirty blocks down.
    Flush,
    /// No request of this manager waits yet.
    Prefetch,
}

impl Class {
    /// All classes, most urgent first.
    pub const ALL: [Self; 4] = [Self::Load, Self::Save, Self::Flush, Self::Prefetch];

    /// Name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Save => "save",
            Self::Flush => "flush",
            Self::Prefetch => "prefetch",
        }
    }
}

/// Names a transfer for the whole life of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TransferId {
    /// Its place among the transfers under way; others had it before.
    pub(crate) place: u32,
    /// How many transfers had it.
    pub(crate) life: u32,
}

/// Names a block of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TaskId {
    /// The transfer.
    pub transfer: TransferId,
    /// Which of its blocks, root first.
    pub block: u32,
}

/// Held as long as a medium may use the slots of a load into an engine's memory. The engine looks
/// at that, or what lies in it says so when it is dropped.
pub(crate) type WithMedia = Arc<dyn Any + Send + Sync>;

/// The task to copy one block from slot to slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyTask {
    /// Which block of which transfer.
    pub id: TaskId,
    /// How urgent it is.
    pub class: Class,
    /// What is copied.
    pub block: BlockKey,
    /// Hash of the block before it in its chain; `None`: it is the first.
    pub parent: Option<u128>,
    /// Its owner, if it is a tenant's.
    pub owner: Option<Owner>,
    /// Its source, pinned by the transfer.
    pub from: SlotRef,
    /// Its destination.
    pub to: SlotRef,
    /// The slot of the host tier that it passes, and stays in. Without one, a block without a
    /// direct route passes a staging slot, which the scheduler provides.
    pub via: Option<SlotRef>,
    /// It tests whether a medium is well again, although its breaker is open.
    pub is_probe: bool,
}

/// The outcome of a copy task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// All its bytes are in the destination.
    Arrived,
    /// It will not arrive, and no medium has its slots.
    Failed {
        /// All its bytes are in [`CopyTask::via`], or in the staging slot.
        halfway: bool,
        /// What that says about the source.
        defect: Option<Defect>,
    },
    /// It was given up; a medium may still read the source, and write the next slot on the way.
    Overdue {
        /// Whether that slot is the destination: else the destination has not been touched, and
        /// will not be.
        writes_destination: bool,
    },
    /// It was overdue, and ended after all.
    Returned,
}

/// Why a block's bytes in a tier are given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Defect {
    /// They are not those that were written.
    Corrupt,
    /// They cannot be read any more.
    Unreadable,
    /// They are not what the block's name says, wherever they lie.
    Wrong,
    /// Their tenant was forgotten.
    Forgotten,
}

/// The result of a copy task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskResult {
    /// The task.
    pub task: CopyTask,
    /// Its outcome.
    pub outcome: Outcome,
}

impl Defect {
    /// Whether the block itself is bad, not only its bytes in one tier: its copies are no better.
    pub(crate) const fn is_of_name(self) -> bool {
        matches!(self, Self::Wrong | Self::Forgotten)
    }
}

impl CopyTask {
    /// The task with its outcome.
    pub const fn ended(self, outcome: Outcome) -> TaskResult {
        TaskResult { task: self, outcome }
    }

    /// The task that was never begun.
    pub const fn dropped(self) -> TaskResult {
        self.ended(Outcome::Failed { halfway: false, defect: None })
    }
}
