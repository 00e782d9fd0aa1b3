//! Regions that the CPU can address.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::checksum::{Checksums, copy_summed};
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Route, SlotId, SlotRef, Tier};
use crate::error::{SetupError, SetupErrorKind};
use crate::geometry::Geometry;
use crate::stream;

/// A region of memory that the CPU reads and writes directly, cut into slots that lie one after another.
///
/// # Safety
/// [`base`](Self::base) is aligned to [`ALIGNMENT`](crate::geometry::ALIGNMENT) and points to
/// `geometry().bytes()` bytes that stay mapped, readable and writable, at the same address, until the region
/// drops. Neither value ever changes, [`slot`](Self::slot) agrees with them, and nothing but the holder of a
/// slot's title accesses the slot's bytes.
pub unsafe trait Memory: Send + Sync + fmt::Debug {
    /// Which tier it is.
    fn tier(&self) -> Tier;

    /// How it is cut.
    fn geometry(&self) -> Geometry;

    /// Its first byte.
    fn base(&self) -> NonNull<u8>;

    /// Number of slots.
    fn slots(&self) -> u32 {
        self.geometry().slots()
    }

    /// Bytes of one block.
    fn block_bytes(&self) -> usize {
        self.geometry().block_bytes()
    }

    /// Bytes from one slot to the next.
    fn stride(&self) -> usize {
        self.geometry().stride()
    }

    /// The checksums of the blocks in its slots, as far as they are known, if it remembers any. Whoever writes
    /// to a slot records its block's checksum or forgets the old one.
    fn checksums(&self) -> Option<&Checksums> {
        None
    }

    /// The `stride()` bytes of a slot, of which the first `block_bytes()` are the block's: `O_DIRECT` needs
    /// the rest. `None`: there is no such slot.
    fn slot(&self, slot: SlotId) -> Option<NonNull<[u8]>> {
        let offset = self.geometry().offset(slot)?;
        // SAFETY: the offset of a slot that exists lies within the region, which is one mapping.
        let start = unsafe { self.base().add(offset) };
        Some(NonNull::slice_from_raw_parts(start, self.stride()))
    }
}

/// The memory regions that a backend copies between, at most one per tier and all with blocks of one size.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memories([Option<Arc<dyn Memory>>; Tier::COUNT]);

impl Memories {
    pub(crate) fn new(regions: Vec<Arc<dyn Memory>>) -> Result<Self, SetupError> {
        let mut memories = Self::default();
        let mut block_bytes = None;
        for region in regions {
            let tier = region.tier();
            if *block_bytes.get_or_insert(region.block_bytes()) != region.block_bytes() {
                let message =
                    format!("the {tier} tier has blocks of {} bytes, unlike others", region.block_bytes());
                return Err(SetupError::new(SetupErrorKind::Invalid, message));
            }
            if memories.0[tier.index()].replace(region).is_some() {
                return Err(SetupError::new(
                    SetupErrorKind::Invalid,
                    format!("two regions for the {tier} tier"),
                ));
            }
        }
        Ok(memories)
    }

    /// All ordered pairs of the tiers, each with itself too.
    pub(crate) fn routes(&self) -> Vec<Route> {
        let tiers = self.0.iter().flatten().map(|region| region.tier());
        tiers.clone().flat_map(|from| tiers.clone().map(move |to| (from, to))).collect()
    }

    /// Whether both ends of a route are here.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn serves(&self, (from, to): Route) -> bool {
        self.0[from.index()].is_some() && self.0[to.index()].is_some()
    }

    fn checksums(&self, tier: Tier) -> Option<&Checksums> {
        self.0[tier.index()].as_ref()?.checksums()
    }

    /// The block of a slot; `None`: its tier is not memory of ours, or has no such slot.
    pub(crate) fn block(&self, slot: SlotRef) -> Option<NonNull<[u8]>> {
        let region = self.0[slot.tier.index()].as_ref()?;
        let start = region.slot(slot.slot)?.cast();
        Some(NonNull::slice_from_raw_parts(start, region.block_bytes()))
    }

    /// Copies a block from memory to memory, and sums it on the way where the destination remembers checksums.
    ///
    /// # Safety
    /// The caller answers for what [`Backend::submit`](crate::Backend::submit) asks of its callers.
    pub(crate) unsafe fn copy(&self, op: &CopyOp) -> Result<(), CopyError> {
        let from = self.block(op.from).ok_or_else(|| no_such_slot(op.from))?;
        let to = self.block(op.to).ok_or_else(|| no_such_slot(op.to))?;
        if std::ptr::eq(from.as_ptr(), to.as_ptr()) {
            let message = format!("{} cannot be copied onto itself", op.from);
            return Err(CopyError::new(CopyErrorKind::Refused, message));
        }
        // SAFETY: both are blocks of slots that exist, of one size, and distinct, hence disjoint; nobody else
        // writes the source or touches the destination, as the caller promises.
        let (from, to) = unsafe { (from.as_ref(), &mut *to.as_ptr()) };
        match self.checksums(op.to.tier) {
            Some(checksums) => checksums.record(op.to.slot, copy_summed(from, to)),
            None => {
                stream::copy(from, to);
                stream::finish();
            }
        }
        Ok(())
    }
}

/// The slot is about to be written by a way that does not sum what it writes.
pub(crate) fn forget_checksum(memory: &dyn Memory, slot: SlotId) {
    if let Some(checksums) = memory.checksums() {
        checksums.forget(slot);
    }
}

pub(crate) fn no_such_slot(slot: SlotRef) -> CopyError {
    CopyError::new(CopyErrorKind::Refused, format!("{slot} is not in a region of this backend"))
}
