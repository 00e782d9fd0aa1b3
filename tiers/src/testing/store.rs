use std::sync::Arc;

use crate::backend::Backend;
use crate::batch::Share;
use crate::copy::{CopyOp, Done, Route, SlotId, Tier};
use crate::dram::DramRegion;
use crate::error::SetupError;
use crate::memory::{CpuMemories, Memory};
use crate::testing::options;

/// Memory that plays a disk or an object store, and the backend that moves blocks between it and
/// real memory, in the submitting thread.
#[derive(Debug)]
pub struct MemoryStore {
    region: Arc<DramRegion>,
    memories: CpuMemories,
    routes: [Route; 2],
}

impl MemoryStore {
    /// `slots` slots of the tier `stands_for`, reached from `memory`.
    ///
    /// # Errors
    /// Both are of one tier, or there is not that much memory.
    pub fn new(memory: Arc<dyn Memory>, stands_for: Tier, slots: u32) -> Result<Self, SetupError> {
        let routes = Route::new(memory.tier(), stands_for).both_ways();
        let region = Arc::new(DramRegion::open(stands_for, options(slots, memory.block_bytes()))?);
        let memories = CpuMemories::new(vec![memory, Arc::clone(&region) as Arc<dyn Memory>])?;
        Ok(Self { region, memories, routes })
    }

    /// The slots themselves: frames of the region open what is stored.
    pub fn region(&self) -> &Arc<DramRegion> {
        &self.region
    }

    /// Flips a bit of a stored block, as a failing medium does. No copy of the slot may be in
    /// flight.
    ///
    /// # Panics
    /// If there is no such slot or byte.
    pub fn flip_bit(&self, slot: SlotId, byte: usize) {
        let block = self.region.slot(slot).expect("a slot of the store");
        assert!(byte < block.len(), "byte {byte} of a slot of {}", block.len());
        // SAFETY: within a slot that exists, which nothing else uses now.
        unsafe { *block.cast::<u8>().add(byte).as_ptr() ^= 1 };
    }
}

// SAFETY: each operation is executed and completed before the next one; the regions are this
// struct's.
unsafe impl Backend for MemoryStore {
    fn name(&self) -> &'static str {
        "memory store"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        // SAFETY: the submitter answers for the slots.
        let copied = batch.iter().map(|op| unsafe { self.memories.copy(op, Share::WHOLE) });
        done.report(copied.enumerate().collect());
    }
}
