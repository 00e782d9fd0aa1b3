//! The chunks of a cache: a forest of those that can be reached, and orphans.

use std::collections::{BTreeMap, HashMap};

use super::ChunkKey;
use crate::seam::{BlockId, Forest, Standing};

/// All chunks of a cache.
#[derive(Debug, Default)]
pub(super) struct ChunkForest {
    ids: HashMap<ChunkKey, BlockId>,
    chunks: Vec<CachedChunk>,
    free: Vec<BlockId>,
    /// In the order in which they came.
    orphans: BTreeMap<u64, BlockId>,
    last_orphan: u64,
    /// Chunks that have a place and are not there.
    absent: usize,
}

#[derive(Clone, Copy, Debug)]
struct CachedChunk {
    key: ChunkKey,
    link: ForestLink,
    /// A copy uses it.
    is_busy: bool,
    /// The owner wants it kept for now.
    is_kept: bool,
    presence: ChunkPresence,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkPresence {
    There,
    /// It has not come yet, and need not: policies judge it as if it had.
    Expected,
    /// It is gone, but what follows it is not.
    Hidden,
}

#[derive(Clone, Copy, Debug)]
enum ForestLink {
    /// In the forest, so policies know it.
    Linked { parent: Option<BlockId>, depth: u32, children: u32 },
    /// Its predecessor is not there; by its number among orphans.
    Orphan(u64),
    /// Neither any more: it is about to be freed.
    Loose,
}

impl ChunkForest {
    /// Chunks that are there.
    pub(super) fn resident(&self) -> usize {
        self.ids.len() - self.absent
    }

    pub(super) fn id(&self, key: ChunkKey) -> Option<BlockId> {
        self.ids.get(&key).copied()
    }

    /// The chunk, where it is in the forest, there or not.
    pub(super) fn linked(&self, key: ChunkKey) -> Option<BlockId> {
        self.id(key).filter(|&block| matches!(self.chunk(block).link, ForestLink::Linked { .. }))
    }

    /// The chunk, where it is in the forest and there: look-ups can go on behind it.
    pub(super) fn reachable(&self, key: ChunkKey) -> Option<BlockId> {
        self.linked(key).filter(|&block| self.chunk(block).presence == ChunkPresence::There)
    }

    pub(super) fn is_orphan(&self, block: BlockId) -> bool {
        matches!(self.chunk(block).link, ForestLink::Orphan(_))
    }

    pub(super) fn is_leaf(&self, block: BlockId) -> bool {
        matches!(self.chunk(block).link, ForestLink::Linked { children: 0, .. })
    }

    pub(super) fn is_hidden(&self, block: BlockId) -> bool {
        self.chunk(block).presence == ChunkPresence::Hidden
    }

    pub(super) fn is_expected(&self, block: BlockId) -> bool {
        self.chunk(block).presence == ChunkPresence::Expected
    }

    /// Chunks of the path that ends at `block`, itself included.
    pub(super) fn depth(&self, block: BlockId) -> u32 {
        if let ForestLink::Linked { depth, .. } = self.chunk(block).link { depth } else { 0 }
    }

    /// Makes a chunk that has a place busy and there. Whether it has one.
    pub(super) fn restore(&mut self, key: ChunkKey) -> bool {
        let Some(block) = self.id(key) else { return false };
        let chunk = self.chunk_mut(block);
        chunk.is_busy = true;
        let was_absent =
            std::mem::replace(&mut chunk.presence, ChunkPresence::There) != ChunkPresence::There;
        self.absent -= usize::from(was_absent);
        true
    }

    /// Adds a busy chunk behind `parent`, or as a root.
    pub(super) fn add(&mut self, key: ChunkKey, parent: Option<BlockId>) -> BlockId {
        let block = self.allocate(key);
        self.link(block, parent);
        block
    }

    /// Adds a busy chunk that nothing leads to.
    pub(super) fn add_orphan(&mut self, key: ChunkKey) {
        let block = self.allocate(key);
        self.orphan(block);
    }

    /// Lets a chunk that is no longer in the forest wait for its chain to come back.
    pub(super) fn orphan(&mut self, block: BlockId) {
        self.last_orphan += 1;
        self.orphans.insert(self.last_orphan, block);
        self.chunk_mut(block).link = ForestLink::Orphan(self.last_orphan);
    }

    /// Adds a chunk that has not come yet, behind `parent` or as a root.
    pub(super) fn expect(&mut self, key: ChunkKey, parent: Option<BlockId>) -> BlockId {
        let block = self.add(key, parent);
        let chunk = self.chunk_mut(block);
        (chunk.is_busy, chunk.presence) = (false, ChunkPresence::Expected);
        self.absent += 1;
        block
    }

    /// Takes the orphan `key` into the forest, behind `parent` or as a root. `None`: it is not one.
    pub(super) fn adopt(&mut self, key: ChunkKey, parent: Option<BlockId>) -> Option<BlockId> {
        let block = self.id(key)?;
        let ForestLink::Orphan(number) = self.chunk(block).link else { return None };
        self.orphans.remove(&number);
        self.link(block, parent);
        Some(block)
    }

    /// Takes a leaf out of the forest. Returns its name for policies, and its parent.
    pub(super) fn unlink(&mut self, leaf: BlockId) -> (u64, Option<BlockId>) {
        let chunk = self.chunk_mut(leaf);
        let key = name(chunk.key);
        let link = std::mem::replace(&mut chunk.link, ForestLink::Loose);
        let ForestLink::Linked { parent, .. } = link else { return (key, None) };
        if let Some(parent) = parent
            && let ForestLink::Linked { children, .. } = &mut self.chunk_mut(parent).link
        {
            *children -= 1;
        }
        (key, parent)
    }

    /// Gives up a chunk without a place, or an orphan. `None`: it was not there, so the owner knows
    /// of nothing.
    pub(super) fn free(&mut self, block: BlockId) -> Option<ChunkKey> {
        let CachedChunk { key, link, presence, .. } = *self.chunk(block);
        if let ForestLink::Orphan(number) = link {
            self.orphans.remove(&number);
        }
        let is_there = presence == ChunkPresence::There;
        self.absent -= usize::from(!is_there);
        self.ids.remove(&key);
        self.free.push(block);
        is_there.then_some(key)
    }

    /// It is gone, but keeps its place for those behind it.
    pub(super) fn hide(&mut self, block: BlockId) {
        let chunk = self.chunk_mut(block);
        chunk.is_busy = false;
        let was_there =
            std::mem::replace(&mut chunk.presence, ChunkPresence::Hidden) == ChunkPresence::There;
        self.absent += usize::from(was_there);
    }

    /// Returns the chunk where policies may name it now and could not before.
    pub(super) fn set_busy(&mut self, key: ChunkKey, is_busy: bool) -> Option<BlockId> {
        let block = self.id(key)?;
        self.chunk_mut(block).is_busy = is_busy;
        (!is_busy && self.is_leaf(block)).then_some(block)
    }

    /// Keeps `key` for now. `None`: it is not there.
    pub(super) fn keep(&mut self, key: ChunkKey) -> Option<BlockId> {
        let block = self.id(key)?;
        self.chunk_mut(block).is_kept = true;
        Some(block)
    }

    /// Returns whether policies may name it now.
    pub(super) fn keep_no_more(&mut self, block: BlockId) -> bool {
        self.chunk_mut(block).is_kept = false;
        self.is_leaf(block) && !self.chunk(block).is_busy
    }

    /// Orphans that may go, the oldest first.
    pub(super) fn idle_orphans(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.orphans.values().copied().filter(|&block| self.chunk(block).may_go())
    }

    fn link(&mut self, block: BlockId, parent: Option<BlockId>) {
        let mut depth = 1;
        if let Some(parent) = parent
            && let ForestLink::Linked { children, depth: above, .. } =
                &mut self.chunk_mut(parent).link
        {
            *children += 1;
            depth += *above;
        }
        self.chunk_mut(block).link = ForestLink::Linked { parent, depth, children: 0 };
    }

    fn allocate(&mut self, key: ChunkKey) -> BlockId {
        let chunk = CachedChunk {
            key,
            link: ForestLink::Loose,
            is_busy: true,
            is_kept: false,
            presence: ChunkPresence::There,
        };
        let block = self.free.pop().unwrap_or_else(|| {
            self.chunks.push(chunk);
            BlockId(self.chunks.len() as u32 - 1)
        });
        *self.chunk_mut(block) = chunk;
        self.ids.insert(key, block);
        block
    }

    fn chunk(&self, block: BlockId) -> &CachedChunk {
        &self.chunks[block.0 as usize]
    }

    fn chunk_mut(&mut self, block: BlockId) -> &mut CachedChunk {
        &mut self.chunks[block.0 as usize]
    }
}

impl CachedChunk {
    fn may_go(&self) -> bool {
        !self.is_busy && !self.is_kept && self.presence != ChunkPresence::Hidden
    }
}

impl Forest for ChunkForest {
    fn standing(&self, block: BlockId) -> Standing {
        let chunk = self.chunk(block);
        match chunk.link {
            ForestLink::Linked { children: 1.., .. } => Standing::Interior,
            ForestLink::Linked { .. } if chunk.may_go() => Standing::Evictable,
            _ => Standing::Busy,
        }
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        if let ForestLink::Linked { parent, .. } = self.chunk(block).link { parent } else { None }
    }

    fn key(&self, block: BlockId) -> u64 {
        name(self.chunk(block).key)
    }
}

/// What policies know a chunk by.
const fn name(key: ChunkKey) -> u64 {
    key.0 as u64
}
