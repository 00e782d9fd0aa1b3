//! How a region is cut into slots.

use crate::copy::SlotId;
use crate::error::{SetupError, SetupErrorKind};

/// Slots start at multiples of this many bytes, in memory and on disk: a page, and enough for
/// `O_DIRECT`.
pub const ALIGNMENT: usize = 4096;

/// The most slots a region can have: a slot's number fits into 30 bits.
pub const MAX_SLOTS: u32 = (1 << 30) - 8;

/// Equal slots, `stride` bytes apart: `block_bytes` rounded up to [`ALIGNMENT`], or more. The bytes
/// between belong to the slot before them and mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    slots: u32,
    block_bytes: usize,
    stride: usize,
}

impl Geometry {
    /// `slots` slots for blocks of `block_bytes` bytes.
    ///
    /// # Errors
    /// `Invalid`: either is zero, or the region would not fit into the address space.
    pub fn new(slots: u32, block_bytes: usize) -> Result<Self, SetupError> {
        let invalid = |message: String| Err(SetupError::new(SetupErrorKind::Invalid, message));
        if slots == 0 || slots > MAX_SLOTS {
            return invalid(format!("a tier of {slots} blocks: choose between 1 and {MAX_SLOTS}"));
        }
        if block_bytes == 0 {
            return invalid(
                "block_bytes is 0: set the bytes of one KV block, all layers together".into(),
            );
        }
        let stride = block_bytes.checked_next_multiple_of(ALIGNMENT);
        let Some(stride) = stride.filter(|&stride| fits(stride, slots)) else {
            return invalid(format!(
                "{slots} blocks of {block_bytes} bytes exceed the address space"
            ));
        };
        Ok(Self { slots, block_bytes, stride })
    }

    /// The same slots, each with room for `bytes` bytes behind its block, as for a seal.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_room(self, bytes: usize) -> Result<Self, SetupError> {
        let Self { slots, block_bytes, .. } = self;
        let roomy = Self::new(slots, block_bytes.saturating_add(bytes))?;
        Ok(Self { block_bytes, ..roomy })
    }

    /// Number of slots.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of one block.
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes from one slot to the next, a multiple of [`ALIGNMENT`].
    pub const fn stride(&self) -> usize {
        self.stride
    }

    /// Bytes of the whole region.
    pub const fn bytes(&self) -> usize {
        self.stride * self.slots as usize
    }

    /// Where `slot` starts, in bytes from the region's start; `None`: there is no such slot.
    pub const fn offset(&self, slot: SlotId) -> Option<usize> {
        if slot.0 < self.slots { Some(slot.0 as usize * self.stride) } else { None }
    }
}

fn fits(stride: usize, slots: u32) -> bool {
    stride.checked_mul(slots as usize).is_some_and(|bytes| isize::try_from(bytes).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_page_aligned_and_bounded() {
        let geometry = Geometry::new(3, 5000).unwrap();
        assert_eq!((geometry.stride(), geometry.bytes()), (8192, 3 * 8192));
        assert_eq!(geometry.offset(SlotId(2)), Some(2 * 8192));
        assert_eq!(geometry.offset(SlotId(3)), None);
    }

    #[test]
    fn room_behind_a_block_is_no_part_of_it() {
        let geometry = Geometry::new(3, 8192).unwrap().with_room(1).unwrap();
        assert_eq!((geometry.block_bytes(), geometry.stride()), (8192, 3 * 4096));
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for (slots, bytes) in
            [(0, 4096), (1, 0), (u32::MAX, 1), (1, usize::MAX), (MAX_SLOTS, 1 << 40)]
        {
            assert_eq!(Geometry::new(slots, bytes).unwrap_err().kind(), SetupErrorKind::Invalid);
        }
    }
}
