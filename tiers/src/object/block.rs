//! The memory side of one operation: whose bytes they are, until when, and where the end is
//! reported.

#![expect(unsafe_code, reason = "reads and writes the slots of a copy")]

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::executor::WorkTicket;
use crate::copy::{BlockKey, CopyError, CopyOp, Done, Endings, Owner, SlotId};
use crate::memory::Memory;

/// An operation that was accepted and not reported yet. Dropping it reports it, as refused unless
/// it was finished: however a task ends, its operations are completed exactly once.
pub(super) struct PendingBlock {
    index: usize,
    done: Done,
    /// How it ended; `None` once that is reported.
    result: Option<Result<(), CopyError>>,
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps `start` mapped.
    _region: Arc<dyn Memory>,
    /// Keeps the backend from closing.
    _ticket: WorkTicket,
    /// What is copied.
    pub(super) block: BlockKey,
    /// Hash of the block before it in its chain.
    pub(super) parent: Option<u128>,
    /// Whose it is.
    pub(super) owner: Option<Owner>,
    /// Its slot in memory.
    pub(super) memory: SlotId,
    /// Its slot in the object tier.
    pub(super) object: SlotId,
}

// SAFETY: `start` points into a region that is itself `Send` and `Sync` and is kept alive by
// `_region`; the callers of `Backend::submit` promise that nothing else uses the slot until the
// operation is completed.
unsafe impl Send for PendingBlock {}
// SAFETY: as above; through `&PendingBlock` the bytes are only read.
unsafe impl Sync for PendingBlock {}

impl PendingBlock {
    /// `None`: the region has no slot `memory`.
    pub(super) fn new(
        index: usize,
        done: Done,
        region: &Arc<dyn Memory>,
        memory: SlotId,
        op: &CopyOp,
        object: SlotId,
        ticket: WorkTicket,
    ) -> Option<Self> {
        let refused = CopyError::refused("the object tier is shutting down");
        Some(Self {
            start: region.slot(memory)?.cast(),
            bytes: region.block_bytes(),
            _region: Arc::clone(region),
            _ticket: ticket,
            result: Some(Err(refused)),
            index,
            done,
            block: op.block,
            parent: op.parent,
            owner: op.owner,
            memory,
            object,
        })
    }

    /// Reports the end. Nothing touches the slot after this.
    pub(super) fn finish(mut self, result: Result<(), CopyError>) {
        self.result = Some(result);
    }

    /// Bytes of the block.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The block's bytes, as the source of a write.
    pub(super) fn source(&self) -> &[u8] {
        // SAFETY: the slot holds at least `bytes` bytes, stays mapped as long as `self`, and is not
        // written until the operation is completed, which takes `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// The block's bytes, as the destination of a read.
    pub(super) fn destination(&mut self) -> &mut [u8] {
        // SAFETY: as for `source`; nothing reads the destination either, and `&mut self` is unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for PendingBlock {
    fn drop(&mut self) {
        self.done
            .report(self.result.take().map(|result| (self.index, result)).into_iter().collect());
    }
}

impl fmt::Debug for PendingBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending")
            .field("index", &self.index)
            .field("object", &self.object)
            .finish_non_exhaustive()
    }
}

/// Reports the same end for all, together.
pub(super) fn finish_all(
    blocks: impl IntoIterator<Item = PendingBlock>,
    result: &Result<(), CopyError>,
) {
    let (mut blocks, mut ended): (Vec<_>, _) = (blocks.into_iter().collect(), Endings::default());
    for block in &mut blocks {
        block.result = None;
        ended.add(&block.done, block.index, result.clone());
    }
    ended.report();
}
