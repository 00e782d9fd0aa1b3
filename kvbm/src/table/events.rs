//! What the table tells listeners. It tells nothing of forgotten blocks: they were gone when the
//! reset was told.

use kvbm_policies::RequestId;
use kvbm_tiers::Tier;

use super::index::RecordId;
use super::record::TierSet;
use super::transfers::LeftBlock;
use super::{RequestInfo, Table};
use crate::names::hash::BlockHash;
use crate::observe::events::{CacheEvent, CachedBlock, Events, RemoveReason, StoreReason};

impl Table {
    /// The events from here on. Up to `capacity` of them wait for their receiver.
    pub fn listen(&mut self, capacity: usize) -> Events {
        self.listeners.add(capacity)
    }

    pub(super) fn tell_stored(
        &mut self,
        tier: Tier,
        record: RecordId,
        info: RequestInfo,
        reason: StoreReason,
    ) {
        if !self.listeners.is_empty() {
            let (block, request) = (
                self.cached_block(tier, record),
                info.request.filter(|&request| is_given(request)),
            );
            self.listeners.note(CacheEvent::Stored { block, request, reason });
        }
    }

    pub(super) fn tell_removed(&mut self, tier: Tier, record: RecordId, reason: RemoveReason) {
        if !self.listeners.is_empty() {
            let block = self.cached_block(tier, record);
            self.listeners.note(CacheEvent::Removed { block, reason });
        }
        if self.transfers.notes_left_blocks() {
            let hash = self.cached_block(tier, record).hash;
            let is_gone = self.records.at(record).resident() == TierSet::default();
            self.transfers.note_left(LeftBlock { tier, hash, is_gone });
        }
    }

    /// Reports blocks that leave a tier among the [effects](Self::take_effects).
    pub(crate) const fn note_left_blocks(&mut self) {
        self.transfers.note_left_blocks();
    }

    pub(super) fn tell_cleared(&mut self) {
        if !self.listeners.is_empty() {
            let epoch = self.epoch();
            self.listeners.note(CacheEvent::Cleared { epoch });
        }
    }

    fn cached_block(&self, tier: Tier, record: RecordId) -> CachedBlock {
        let known = self.records.at(record);
        let hash = |record: RecordId| {
            let key = self.records.at(record).key();
            BlockHash::from_u128(self.namespace.hash_of(key))
        };
        CachedBlock {
            tier,
            group: known.key().group,
            hash: hash(record),
            parent: known.parent().map(hash),
        }
    }
}

/// Whether the engine named the request: see [`Table::named`].
fn is_given(request: RequestId) -> bool {
    request.0 < super::FIRST_NAMELESS
}
