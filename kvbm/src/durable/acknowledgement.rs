//! Who is told what is durable.

use std::fmt;
use std::sync::Arc;

use kvbm_tiers::{BlockKey, Tier};

use crate::events::CachedBlock;
use crate::hash::BlockHash;
use crate::sync::Mutex;
use crate::table::{Naming, Note};

/// What a process that is started after this one was killed will find.
///
/// Of one block in one tier they come in the order in which it happened: that it is stored once its index has it, that it
/// is removed before its slot is another block's, perhaps twice where the index could not be written. They tell of the end
/// of a process: what a power cut takes is in docs/disk-format.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DurableEvent {
    /// A block that is there until it is removed.
    Stored(CachedBlock),
    /// A block that will not be found, or not any more.
    Removed(CachedBlock),
    /// Nothing of the tier that was stored before: a [reset](crate::Manager::reset).
    Cleared(Tier),
}

/// Is told what has become durable, on threads of the manager's, one call at a time: it should not take long.
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
            CachedBlock { tier, group: block.group, hash: hash(block.hash), parent: parent.map(hash) }
        };
        match note {
            Note::Stored(entry) => Self::Stored(cached(entry.block, entry.parent)),
            Note::Removed { block, parent, .. } => Self::Removed(cached(*block, *parent)),
            Note::Reset(_) => Self::Cleared(tier),
        }
    }
}
