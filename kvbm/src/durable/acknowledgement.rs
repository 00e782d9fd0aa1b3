//! Telling listeners what is durable.

use std::fmt;
use std::sync::Arc;

use kvbm_tiers::{BlockKey, Tier};

use crate::names::hash::BlockHash;
use crate::observe::events::CachedBlock;
use crate::sync::Mutex;
use crate::table::{Naming, Note};

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
