//! What comes to the tiers and leaves them.

use kvbm::{CacheEvent, CachedBlock};
use pyo3::prelude::*;

/// What comes to a manager's tiers and leaves them, from `Manager.events` on.
///
/// A reader that is too slow loses the oldest: 65,536 wait.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct Events(pub(crate) kvbm::Events);

/// What happened, in which tier, to which block, and after which it comes in its chain.
type Event = (&'static str, Option<&'static str>, Option<u128>, Option<u128>);

#[pymethods]
impl Events {
    /// Those that wait, `limit` at most, oldest first: `(what, tier, block, parent)`. Blocks go by
    /// their `Chain.names`.
    ///
    /// `what` is `stored` or `removed`; `cleared`: a reset, and no tier holds anything any more;
    /// `lost`: some events are, since this was called too late. The latter two have nothing else.
    fn take(&mut self, py: Python<'_>, limit: usize) -> Vec<Event> {
        py.detach(|| {
            std::iter::from_fn(|| self.0.try_next()).take(limit).filter_map(event).collect()
        })
    }
}

fn event(event: CacheEvent) -> Option<Event> {
    match event {
        CacheEvent::Stored { block, .. } => Some(of_block("stored", block)),
        CacheEvent::Removed { block, .. } => Some(of_block("removed", block)),
        CacheEvent::Cleared { .. } => Some(("cleared", None, None, None)),
        CacheEvent::Lost(_) => Some(("lost", None, None, None)),
        // Kinds that are not known here yet.
        _ => None,
    }
}

const fn of_block(what: &'static str, block: CachedBlock) -> Event {
    let parent = match block.parent {
        Some(parent) => Some(parent.get()),
        None => None,
    };
    (what, Some(block.tier.name()), Some(block.hash.get()), parent)
}
