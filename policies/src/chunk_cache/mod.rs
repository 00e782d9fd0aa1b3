//! A cache that another program keeps, which names chunks by key and asks which of them go.
//!
//! An inference engine's own CPU tier, for one. Such an owner does not keep its cache
//! prefix-closed: a chunk may come without the one before it, or be taken out from under those
//! behind it. [`ChunkCache`] keeps a forest of those that can be reached and shows the policies
//! nothing else.
//!
//! | module | holds |
//! |---|---|
//! | `forest` | the chunks: which hangs on which, which are orphans |
//! | `requests` | the requests that have not ended, and their chains |

mod forest;
mod requests;
#[cfg(test)]
mod tests;

use std::fmt;

use self::forest::ChunkForest;
use self::requests::{ChainPlace, FollowedRequests};
use crate::eviction::Eviction;
use crate::seam::{Access, BlockId, Ended, Forest, Hints, RequestId, TierPolicies, Upkeep};

/// Names the content of a chunk, and with it all that comes before: chained hashes do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkKey(pub u128);

/// Decides which chunks leave a cache that its owner keeps. The owner tells of requests when it
/// can.
///
/// A request is [followed](Self::follow): these are the keys of its prompt, in order. Its chunks
/// are [offered](Self::offer) and some of them [inserted](Self::insert), each busy until it is
/// [idle](Self::idle); when room is needed, some are [evicted](Self::evict). At its
/// [end](Self::finish) the policies learn how much it generated.
///
/// An owner asks for room before a part of a prompt comes, and then takes in all of that part. So
/// what a request will compute is *expected* from its first offer on: policies judge it together
/// with what is there, and name the worst. What they name before it came is declined; the owner is
/// told nothing of that.
///
/// A chunk without its predecessor (declined, for instance) is an *orphan*: no look-up reaches it.
/// Orphans go first, oldest first; the next use of their chain takes in those that can be reached
/// again. Where chunks of a request are of several cache groups, gaps are usual (of a sliding
/// window only the end is kept), and a chunk behind one begins a chain.
pub struct ChunkCache {
    policies: TierPolicies,
    forest: ChunkForest,
    requests: FollowedRequests,
    /// Inserted since the policies were told; each follows the one before it.
    arrived: Vec<BlockId>,
    /// Where the last one of them is in its request's chain.
    arrived_at: Option<ChainPlace>,
    now_ms: u64,
}

impl ChunkCache {
    /// An empty cache, ruled by `eviction`.
    pub fn new(eviction: Box<dyn Eviction>) -> Self {
        Self {
            policies: TierPolicies::new(eviction, None),
            forest: ChunkForest::default(),
            requests: FollowedRequests::default(),
            arrived: Vec::new(),
            arrived_at: None,
            now_ms: 0,
        }
    }

    /// Chunks that are there.
    pub fn resident(&self) -> usize {
        self.forest.resident()
    }

    /// The chain of `request` in a cache group goes on with `keys`.
    pub fn follow(
        &mut self,
        request: RequestId,
        group: u32,
        keys: impl IntoIterator<Item = ChunkKey>,
    ) {
        self.requests.follow(request, group, keys);
    }

    /// `request` has computed `keys` of a cache group, which are not there: some may be inserted
    /// next. The first time, this is its use of what is there of its chains.
    pub fn offer(
        &mut self,
        request: RequestId,
        group: u32,
        keys: impl IntoIterator<Item = ChunkKey>,
        now_ms: u64,
    ) {
        let first = self.requests.offer(request, group, keys);
        self.use_chains(request, now_ms, first);
    }

    /// `key` has come, and is busy. A key that was not offered begins a chain.
    pub fn insert(&mut self, key: ChunkKey) {
        if self.forest.restore(key) {
            return;
        }
        let place = self.requests.place(key);
        let before = place.and_then(|place| self.requests.before(place));
        let parent = before.and_then(|before| self.forest.reachable(before));
        if before.is_some()
            && parent.is_none()
            && place.is_some_and(|place| !self.requests.has_gaps(place))
        {
            self.forest.add_orphan(key);
            return;
        }
        if place.map(|place| place.request) != self.arrived_at.map(|place| place.request)
            || parent != self.arrived.last().copied()
        {
            self.tell_arrivals();
        }
        self.arrived.push(self.forest.add(key, parent));
        self.arrived_at = place;
    }

    /// `key` is gone, wherever it was: its copy failed.
    pub fn remove(&mut self, key: ChunkKey) {
        self.tell_arrivals();
        let Some(block) = self.forest.id(key) else { return };
        if self.forest.is_orphan(block) {
            self.forest.free(block);
        } else if self.forest.is_leaf(block) {
            self.unlink(block);
            self.forest.free(block);
        } else {
            // Those behind it keep its place, so that they can go before it.
            self.forest.hide(block);
        }
    }

    /// A copy uses `key`: it stays until it is [idle](Self::idle).
    pub fn busy(&mut self, key: ChunkKey) {
        self.tell_arrivals();
        self.forest.set_busy(key, true);
    }

    /// No copy uses `key` any more.
    pub fn idle(&mut self, key: ChunkKey) {
        self.tell_arrivals();
        if let Some(block) = self.forest.set_busy(key, false) {
            self.policies.released(block);
        }
    }

    /// Takes `count` chunks out, in the order in which they are to go: none that is busy or in
    /// `keep`. `None` if fewer can go: all stay then.
    pub fn evict(
        &mut self,
        count: usize,
        keep: impl IntoIterator<Item = ChunkKey>,
    ) -> Option<Vec<ChunkKey>> {
        self.tell_arrivals();
        let kept: Vec<_> = keep.into_iter().filter_map(|key| self.forest.keep(key)).collect();
        let victims = self.victims(count);
        for block in kept {
            if self.forest.keep_no_more(block) {
                self.policies.released(block);
            }
        }
        victims.map(|victims| {
            victims.into_iter().filter_map(|block| self.forest.free(block)).collect()
        })
    }

    /// The request has ended and generated `output_tokens`.
    pub fn finish(&mut self, request: RequestId, output_tokens: u32, now_ms: u64) {
        // A request that found all of its prompt in the cache has offered nothing.
        self.use_chains(request, now_ms, None);
        self.expect_no_more(request);
        self.requests.end(request);
        let at_ms = self.now_ms;
        self.policies.finished(&Ended { request, output_tokens, will_not_return: false, at_ms });
    }

    /// What the policies want done besides: see [`TierPolicies::upkeep`].
    pub fn upkeep(&mut self, work: &mut Vec<Upkeep>) -> bool {
        self.policies.upkeep(work)
    }

    /// As many as are wanted, out of the policies' sight but not freed; `None`: there are fewer.
    fn victims(&mut self, count: usize) -> Option<Vec<BlockId>> {
        let mut victims: Vec<_> = self.forest.idle_orphans().take(count).collect();
        let first_linked = victims.len();
        while victims.len() < count {
            let Some(victim) = self.policies.victim(&self.forest) else {
                // They stay, but the policies have seen them go: the next use of their chain tells
                // of them again.
                for &block in &victims[first_linked..] {
                    self.forest.orphan(block);
                }
                return None;
            };
            self.unlink(victim);
            if self.forest.is_expected(victim) {
                // Declined: if it comes anyway, nothing leads to it, and it goes first.
                self.forest.free(victim);
            } else {
                victims.push(victim);
            }
        }
        Some(victims)
    }

    /// Lets the policies know that a leaf goes, and with it what was hidden above it.
    fn unlink(&mut self, leaf: BlockId) {
        let mut next = Some(leaf);
        while let Some(block) = next {
            let (key, parent) = self.forest.unlink(block);
            let exposed = parent.filter(|&parent| self.forest.is_leaf(parent));
            self.policies.removed(block, key, exposed);
            if block != leaf {
                self.forest.free(block);
            }
            next = exposed.filter(|&parent| self.forest.is_hidden(parent));
        }
    }

    /// Tells of the request's use of its chains, once: what is there, and what will come from the
    /// `offered` place on.
    fn use_chains(&mut self, request: RequestId, now_ms: u64, offered: Option<ChainPlace>) {
        self.tell_arrivals();
        self.now_ms = self.now_ms.max(now_ms);
        for chain in self.requests.begin_use(request) {
            let first = ChainPlace { request, chain, index: 0 };
            let (index, deepest) = self.requests.deepest_linked(first, &self.forest);
            // It is not known which chunks of several groups are kept.
            let expected =
                offered.filter(|&place| place.chain == chain && !self.requests.has_gaps(place));
            self.tell_use(
                ChainPlace { index, ..first },
                deepest,
                0,
                expected.map(|place| place.index),
            );
        }
    }

    /// What the request computed has come by now, or never will.
    fn expect_no_more(&mut self, request: RequestId) {
        for chain in 0..self.requests.chains(request) {
            let first = ChainPlace { request, chain, index: 0 };
            let (_, deepest) = self.requests.deepest_linked(first, &self.forest);
            let mut next = deepest;
            while let Some(block) = next {
                next = self.forest.parent(block);
                if self.forest.is_expected(block) {
                    self.forest.hide(block);
                }
            }
            if let Some(leaf) =
                deepest.filter(|&block| self.forest.is_leaf(block) && self.forest.is_hidden(block))
            {
                self.unlink(leaf);
                self.forest.free(leaf);
            }
        }
    }

    /// Tells of what was inserted: a further part of the request's use.
    fn tell_arrivals(&mut self) {
        let Some(&deepest) = self.arrived.last() else { return };
        let inserted = self.arrived.len() as u32;
        self.arrived.clear();
        match self.arrived_at.take() {
            Some(place) => {
                self.tell_use(
                    ChainPlace { index: place.index + 1, ..place },
                    Some(deepest),
                    inserted,
                    None,
                );
            }
            None => self.touch(None, deepest, inserted, 0),
        }
    }

    /// A request uses the path that ends at `deepest`, and what follows it from `next` on: orphans,
    /// and from the index `expected` on also what has not come yet. So the policies judge a prompt
    /// as a whole before room is made for a part of it, and a long one that will not return
    /// displaces nothing that is worth more.
    fn tell_use(
        &mut self,
        next: ChainPlace,
        deepest: Option<BlockId>,
        mut inserted: u32,
        expected: Option<usize>,
    ) {
        let mut last = deepest;
        for (index, &key) in (next.index..).zip(self.requests.rest(next)) {
            let is_expected = expected.is_some_and(|first| first <= index);
            let orphan = self.forest.adopt(key, last);
            let Some(block) = orphan.or_else(|| is_expected.then(|| self.forest.expect(key, last)))
            else {
                break;
            };
            last = Some(block);
            inserted += 1;
        }
        if let Some(last) = last {
            self.touch(
                Some(next.request),
                last,
                inserted,
                self.requests.rest(ChainPlace { index: 0, ..next }).len(),
            );
        }
    }

    fn touch(&mut self, request: Option<RequestId>, deepest: BlockId, inserted: u32, path: usize) {
        let depth = self.forest.depth(deepest);
        let (now_ms, path, hints) = (self.now_ms, depth.max(path as u32), Hints::default());
        let access = Access { now_ms, request, deepest, depth, inserted, path, hints };
        self.policies.touch(&access, &self.forest);
    }
}

impl fmt::Debug for ChunkCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkCache").field("resident", &self.resident()).finish_non_exhaustive()
    }
}
