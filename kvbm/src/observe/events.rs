//! What comes to the tiers and leaves them, told to listeners: routers that send a request where
//! its blocks are, indices of several managers, tests.
//!
//! Events are noted under the table's lock, so that they are in order: a listener that follows them
//! from the start knows which blocks each tier held when the last one was noted. Receivers are
//! woken after unlock. (If the events were also delivered after unlock, two threads could overtake
//! each other, and a block that came and left would seem to stay for ever.)

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvbm_policies::RequestId;
use kvbm_tiers::Tier;
use tokio::sync::Notify;

use crate::api::transfer::wait_for;
use crate::names::hash::BlockHash;
use crate::sync::Mutex;

/// Something that happened to the blocks of a tier.
///
/// A block is stored after its parent, and removed before it: a listener's view of a tier is always
/// prefix-closed, as the tier itself is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheEvent {
    /// A block became resident.
    Stored {
        /// Which, and where.
        block: CachedBlock,
        /// The request that brought it, if the engine [named](crate::RequestInfo::request) it.
        request: Option<RequestId>,
        /// How it came.
        reason: StoreReason,
    },
    /// A block is not resident any more.
    Removed {
        /// Which, and where.
        block: CachedBlock,
        /// Why it left.
        reason: RemoveReason,
    },
    /// A [reset](crate::Manager::reset): no tier holds anything any more. Blocks are not removed
    /// one by one.
    Cleared {
        /// The epoch from now on.
        epoch: u64,
    },
    /// The receiver was too slow: this many events before the next one are lost. Its view may be
    /// wrong now, except for blocks that come and leave from here on;
    /// [`matches`](crate::Manager::matches) tells about single chains.
    Lost(u64),
}

/// A block in a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CachedBlock {
    /// The tier.
    pub tier: Tier,
    /// Cache group of the block: see [`Chain::group`](crate::Chain::group).
    pub group: u8,
    /// Its hash, as the engine gave it.
    pub hash: BlockHash,
    /// Hash of the block before it; `None` for the first block of a chain.
    pub parent: Option<BlockHash>,
}

/// How a block came to a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreReason {
    /// An engine computed it into its slot.
    Filled,
    /// It was copied down for an engine that waits.
    Saved,
    /// It was copied up for an engine that waits, or stayed in a tier that it passed.
    Loaded,
    /// It was copied up before a request needs it.
    Prefetched,
    /// It was copied down in the background.
    Flushed,
    /// Another process stored it: a worker that shares the store. (Blocks of an earlier process
    /// were there before anything could listen.)
    Restored,
}

/// Why a block left a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RemoveReason {
    /// It made room.
    Evicted,
    /// Its bytes, or those of a block before it, had changed.
    Corrupt,
    /// It, or a block before it, could not be read any more.
    Unreadable,
    /// Its tenant, or that of a block before it, was forgotten.
    Forgotten,
}

/// The events of a manager from [`Manager::events`](crate::Manager::events) on, oldest first.
///
/// A receiver that is too slow loses the oldest events, and learns how many: it never holds up the
/// manager.
#[must_use = "events are buffered for it until it is dropped"]
pub struct Events(Arc<EventBuffer>);

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Events")
    }
}

impl Events {
    /// The next event, if one waits.
    pub fn try_next(&mut self) -> Option<CacheEvent> {
        self.0.ring.lock().take()
    }

    /// The next event, once there is one. `None`: the manager is closed, and no event waits.
    pub async fn next(&mut self) -> Option<CacheEvent> {
        loop {
            // In this order: an event that is noted after the check wakes us.
            let is_over = self.0.ring.lock().is_over;
            let next = self.try_next();
            if next.is_some() || is_over {
                return next;
            }
            self.0.news.notified().await;
        }
    }

    /// [`next`](Self::next) for a thread, which it blocks for `limit` at most. `None` also if no
    /// event came in time.
    pub fn wait(&mut self, limit: Duration) -> Option<CacheEvent> {
        wait_for(self.next(), limit).flatten()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let mut ring = self.0.ring.lock();
        ring.is_over = true;
        let waiting = std::mem::take(&mut ring.waiting);
        drop(ring);
        drop(waiting);
    }
}

/// What waits for one receiver.
#[derive(Debug)]
pub(crate) struct EventBuffer {
    ring: Mutex<EventRing>,
    news: Notify,
}

#[derive(Debug)]
struct EventRing {
    waiting: VecDeque<CacheEvent>,
    capacity: usize,
    lost: u64,
    /// No more events come, or the receiver is gone.
    is_over: bool,
}

impl EventRing {
    fn push(&mut self, event: CacheEvent) {
        if self.waiting.len() >= self.capacity {
            self.waiting.pop_front();
            self.lost += 1;
        }
        self.waiting.push_back(event);
    }

    fn take(&mut self) -> Option<CacheEvent> {
        match std::mem::take(&mut self.lost) {
            0 => self.waiting.pop_front(),
            lost => Some(CacheEvent::Lost(lost)),
        }
    }
}

impl EventBuffer {
    /// Call it with the table unlocked.
    pub(crate) fn wake(&self) {
        // It is remembered if no one waits yet: no wake-up is lost.
        self.news.notify_one();
    }

    /// False: the receiver is gone.
    fn note(&self, event: CacheEvent) -> bool {
        let mut ring = self.ring.lock();
        let is_wanted = !ring.is_over;
        if is_wanted {
            ring.push(event);
        }
        is_wanted
    }
}

/// The listeners.
#[derive(Debug, Default)]
pub(crate) struct EventListeners {
    buffers: Vec<Arc<EventBuffer>>,
    has_news: bool,
    is_over: bool,
}

impl EventListeners {
    /// Adds a listener, for which up to `capacity` events wait (at least one).
    pub(crate) fn add(&mut self, capacity: usize) -> Events {
        let (capacity, is_over) = (capacity.max(1), self.is_over);
        let ring = EventRing { waiting: VecDeque::new(), capacity, lost: 0, is_over };
        let buffer = Arc::new(EventBuffer { ring: Mutex::new(ring), news: Notify::new() });
        self.buffers.push(Arc::clone(&buffer));
        Events(buffer)
    }

    /// Whether there are no listeners: then no event need be made.
    pub(crate) const fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    pub(crate) fn note(&mut self, event: CacheEvent) {
        self.buffers.retain(|buffer| buffer.note(event));
        self.has_news = true;
    }

    /// The listeners to wake because of events noted since the last call.
    pub(crate) fn take_news(&mut self) -> Vec<Arc<EventBuffer>> {
        if std::mem::take(&mut self.has_news) { self.buffers.clone() } else { Vec::new() }
    }

    /// No more events come.
    pub(crate) fn close(&mut self) {
        self.is_over = true;
        self.has_news = true;
        self.buffers.iter().for_each(|buffer| buffer.ring.lock().is_over = true);
    }
}

impl Drop for EventListeners {
    fn drop(&mut self) {
        self.close();
        self.buffers.iter().for_each(|buffer| buffer.wake());
    }
}
