//! Regions that the CPU can address.

use std::fmt;
use std::ptr::NonNull;

use crate::copy::{SlotId, Tier};
use crate::geometry::Geometry;

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

    /// The `stride()` bytes of a slot, of which the first `block_bytes()` are the block's: `O_DIRECT` needs
    /// the rest. `None`: there is no such slot.
    fn slot(&self, slot: SlotId) -> Option<NonNull<[u8]>> {
        let offset = self.geometry().offset(slot)?;
        // SAFETY: the offset of a slot that exists lies within the region, which is one mapping.
        let start = unsafe { self.base().add(offset) };
        Some(NonNull::slice_from_raw_parts(start, self.stride()))
    }
}
