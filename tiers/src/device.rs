//! The device tier's memory where it is not emulated: a GPU's, or tensors that an engine lends.

#![expect(unsafe_code, reason = "adopts memory of an engine's")]

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::copy::Tier;
use crate::frame::{FramePool, PoolId};
use crate::segments::SegmentMap;

/// Who can address a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// The CPU: an engine that runs on it, or a test.
    Host,
    /// The GPU of this ordinal, and with CUDA's unified addresses its copy engines.
    Cuda(u32),
}

/// Slots on the device, whose blocks may lie in pieces: our own allocation, or an engine's KV
/// cache, adopted.
///
/// An adopted region is the engine's: we copy to and from its slots when asked and remember nothing
/// about what lies there.
pub struct DeviceRegion {
    segments: SegmentMap,
    space: Space,
    pool: PoolId,
    pool_given: AtomicBool,
    /// Holds the memory.
    _owner: Box<dyn Any + Send + Sync>,
}

impl DeviceRegion {
    /// Takes over memory that `owner` keeps alive.
    ///
    /// # Safety
    /// Until `owner` is dropped, every byte of `segments` stays allocated in `space` at the same
    /// address, aligned as its base is, readable and writable; nothing accesses a slot while a copy
    /// that names it is in flight, except to read its source.
    pub unsafe fn adopt(segments: SegmentMap, space: Space, owner: impl Any + Send + Sync) -> Self {
        let (pool, pool_given) = (PoolId::fresh(), AtomicBool::new(false));
        Self { segments, space, pool, pool_given, _owner: Box::new(owner) }
    }

    /// Where the blocks lie.
    pub const fn segments(&self) -> &SegmentMap {
        &self.segments
    }

    /// Who can address them.
    pub const fn space(&self) -> Space {
        self.space
    }

    /// Whether a slot handle is one of this region's [`frames`](Self::frames).
    #[cfg(feature = "cuda")]
    pub(crate) fn owns(&self, pool: PoolId) -> bool {
        self.pool == pool
    }

    /// The slot allocator of this region's slots. There is only one: `None` after the first call.
    pub fn frames(&self) -> Option<FramePool> {
        if self.pool_given.swap(true, Ordering::Relaxed) {
            return None;
        }
        Some(FramePool::with_id(self.pool, Tier::Device, self.segments.slots()))
    }
}

impl fmt::Debug for DeviceRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let segments = &self.segments;
        f.debug_struct("DeviceRegion")
            .field("space", &self.space)
            .field("slots", &segments.slots())
            .field("block_bytes", &segments.block_bytes())
            .field("pieces", &segments.parts().len())
            .finish_non_exhaustive()
    }
}
