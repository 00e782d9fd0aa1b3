//! The requests that have not ended, and the chains of their chunks.

use std::collections::HashMap;
use std::ops::Range;

use super::ChunkKey;
use super::forest::ChunkForest;
use crate::seam::{BlockId, RequestId};

/// A place in a chain of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChainPlace {
    pub(super) request: RequestId,
    pub(super) chain: usize,
    pub(super) index: usize,
}

/// All requests that are followed.
#[derive(Debug, Default)]
pub(super) struct FollowedRequests {
    followed: HashMap<RequestId, FollowedRequest>,
    /// Which request offered a chunk last.
    offered: HashMap<ChunkKey, ChainPlace>,
}

#[derive(Debug, Default)]
struct FollowedRequest {
    /// One for each cache group.
    chains: Vec<ChunkChain>,
    offered: Vec<ChunkKey>,
    has_used: bool,
}

#[derive(Debug)]
struct ChunkChain {
    group: u32,
    keys: Vec<ChunkKey>,
    /// Behind the chunk that was offered last.
    next: usize,
}

impl FollowedRequests {
    pub(super) fn follow(
        &mut self,
        request: RequestId,
        group: u32,
        keys: impl IntoIterator<Item = ChunkKey>,
    ) {
        let followed = self.followed.entry(request).or_default();
        let chain = followed.chain(group);
        followed.chains[chain].keys.extend(keys);
    }

    /// Returns where the first one of `keys` belongs.
    pub(super) fn offer(
        &mut self,
        request: RequestId,
        group: u32,
        keys: impl IntoIterator<Item = ChunkKey>,
    ) -> Option<ChainPlace> {
        let followed = self.followed.entry(request).or_default();
        let chain = followed.chain(group);
        let mut first = None;
        for key in keys {
            let index = followed.chains[chain].find_or_add(key);
            followed.offered.push(key);
            let place = ChainPlace { request, chain, index };
            self.offered.insert(key, place);
            first.get_or_insert(place);
        }
        first
    }

    /// Forgets the request.
    pub(super) fn end(&mut self, request: RequestId) {
        let Some(followed) = self.followed.remove(&request) else { return };
        for key in followed.offered {
            if self.offered.get(&key).is_some_and(|place| place.request == request) {
                self.offered.remove(&key);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.followed.is_empty() && self.offered.is_empty()
    }

    /// The chains that the request now uses for the first time: all or none.
    pub(super) fn begin_use(&mut self, request: RequestId) -> Range<usize> {
        match self.followed.get_mut(&request) {
            Some(followed) if !followed.has_used => {
                followed.has_used = true;
                0..followed.chains.len()
            }
            _ => 0..0,
        }
    }

    /// Where `key` belongs, if it was offered.
    pub(super) fn place(&self, key: ChunkKey) -> Option<ChainPlace> {
        self.offered.get(&key).copied()
    }

    /// The chunk before a place.
    pub(super) fn before(&self, place: ChainPlace) -> Option<ChunkKey> {
        let index = place.index.checked_sub(1)?;
        self.rest(ChainPlace { index, ..place }).first().copied()
    }

    /// The chunks of a chain from a place on.
    pub(super) fn rest(&self, place: ChainPlace) -> &[ChunkKey] {
        let chain =
            self.followed.get(&place.request).and_then(|followed| followed.chains.get(place.chain));
        chain.and_then(|chain| chain.keys.get(place.index..)).unwrap_or_default()
    }

    /// How many chains the request has.
    pub(super) fn chains(&self, request: RequestId) -> usize {
        self.followed.get(&request).map_or(0, |followed| followed.chains.len())
    }

    /// Whether chunks may lack the one before them: layers that keep a window or a state leave
    /// their past out.
    pub(super) fn has_gaps(&self, place: ChainPlace) -> bool {
        self.followed.get(&place.request).is_some_and(|followed| followed.chains.len() > 1)
    }

    /// The deepest chunk of a chain that is in the forest, and the index behind it.
    pub(super) fn deepest_linked(
        &self,
        first: ChainPlace,
        forest: &ChunkForest,
    ) -> (usize, Option<BlockId>) {
        let keys = self.rest(first);
        let end = if self.has_gaps(first) {
            keys.iter().rposition(|&key| forest.linked(key).is_some()).map_or(0, |last| last + 1)
        } else {
            // What is in the forest has all that is before it.
            keys.partition_point(|&key| forest.linked(key).is_some())
        };
        (end, end.checked_sub(1).and_then(|last| forest.linked(keys[last])))
    }
}

impl FollowedRequest {
    fn chain(&mut self, group: u32) -> usize {
        let known = self.chains.iter().position(|chain| chain.group == group);
        known.unwrap_or_else(|| {
            self.chains.push(ChunkChain { group, keys: Vec::new(), next: 0 });
            self.chains.len() - 1
        })
    }
}

impl ChunkChain {
    /// Where `key` is. One that is not known is the next one.
    fn find_or_add(&mut self, key: ChunkKey) -> usize {
        // Chunks are offered in order, so the first look finds it as a rule.
        let (before, after) = self.keys.split_at(self.next.min(self.keys.len()));
        let behind = after.iter().position(|&known| known == key).map(|index| before.len() + index);
        let found = behind.or_else(|| before.iter().position(|&known| known == key));
        let index = found.unwrap_or_else(|| {
            self.keys.push(key);
            self.keys.len() - 1
        });
        self.next = index + 1;
        index
    }
}
