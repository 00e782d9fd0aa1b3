//! What comes to the tiers and leaves them, told to whoever listens: routers that send a request where its blocks are,
//! indices of several managers, tests.
//!
//! Events are noted under the table's lock, so that their order is that of what happened: whoever follows them from the
//! start knows at any time which blocks each tier held when the last of them was noted. Their receivers are woken after it.
//! (To carry the events out of the lock as well would let two threads that come out of it overtake each other, and a
//! block that came and left would be there for ever.)

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvbm_policies::RequestId;
use kvbm_tiers::Tier;
use tokio::sync::Notify;

use crate::hash::BlockHash;
use crate::sync::Mutex;
use crate::transfer::wait_for;

/// Something that happened to the blocks of a tier.
///
/// A block is stored after its parent, and removed before it: what a follower knows of a tier is prefix-closed at any
/// time, as the tier itself is.
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
    /// A [reset](crate::Manager::reset): no tier holds anything any more. No block is removed one by one.
    Cleared {
        /// The epoch from now on.
        epoch: u64,
    },
    /// The receiver was too slow: so many events before the next one are lost. What it knows may be wrong now, blocks
    /// that come and leave from here on excepted; [`matches`](crate::Manager::matches) tells of single chains.
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
    /// That of the block before it; `None` for the first block of a chain.
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
    /// It was copied up for an engine that waits, or stayed where it passed on its way.
    Loaded,
    /// It was copied up before anybody needs it.
    Prefetched,
    /// It was copied down in the background.
    Flushed,
    /// Another process left it there: a worker that shares the store. What an earlier one left was there before anybody
    /// could listen.
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
    /// It was a tenant's that was forgotten, or a block before it was.
    Forgotten,
}

/// The events of a manager from [`Manager::events`](crate::Manager::events) on, oldest first.
///
/// A receiver that is too slow loses the oldest ones, and learns how many: it never holds the manager up.
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
            // In this order: what is noted after the look leaves word.
            let is_over = self.0.ring.lock().is_over;
            let next = self.try_next();
            if next.is_some() || is_over {
                return next;
            }
            self.0.news.notified().await;
        }
    }

    /// [`next`](Self::next) for a thread, which it blocks for `limit` at most. `None` also where no event came in time.
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
    /// No more events come, or nobody wants them.
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
    /// To be called with the table unlocked.
    pub(crate) fn wake(&self) {
        // Leaves word where nobody waits yet: no wake-up is lost.
        self.news.notify_one();
    }

    /// False: nobody wants it.
    fn note(&self, event: CacheEvent) -> bool {
        let mut ring = self.ring.lock();
        let is_wanted = !ring.is_over;
        if is_wanted {
            ring.push(event);
        }
        is_wanted
    }
}

/// Whoever is told of events.
#[derive(Debug, Default)]
pub(crate) struct EventListeners {
    buffers: Vec<Arc<EventBuffer>>,
    has_news: bool,
    is_over: bool,
}

impl EventListeners {
    /// One more, for whom up to `capacity` events wait (at least one).
    pub(crate) fn add(&mut self, capacity: usize) -> Events {
        let (capacity, is_over) = (capacity.max(1), self.is_over);
        let ring = EventRing { waiting: VecDeque::new(), capacity, lost: 0, is_over };
        let buffer = Arc::new(EventBuffer { ring: Mutex::new(ring), news: Notify::new() });
        self.buffers.push(Arc::clone(&buffer));
        Events(buffer)
    }

    /// Whether nobody listens: then no event need be made.
    pub(crate) const fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    pub(crate) fn note(&mut self, event: CacheEvent) {
        self.buffers.retain(|buffer| buffer.note(event));
        self.has_news = true;
    }

    /// Whom to wake because of what was noted since the last call.
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
