//! Regions that the CPU can address, and the device tier's memory where it is not emulated: a
//! GPU's, or tensors that an engine lends.

#![expect(unsafe_code, reason = "addresses of slots")]

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::batch::Share;
use crate::checksum::{Checksums, SummedCopy};
use crate::copy::{CopyError, CopyOp, Route, SlotId, SlotRef, Tier};
use crate::error::SetupError;
use crate::frame::{FramePool, PoolId};
use crate::geometry::{Geometry, Piece, Segment, SegmentMap, pieces};
use crate::stream;

/// A region of memory that the CPU reads and writes directly, cut into slots that lie one after
/// another.
///
/// # Safety
/// [`base`](Self::base) is aligned to [`ALIGNMENT`](crate::geometry::ALIGNMENT) and points to
/// `geometry().bytes()` bytes that stay mapped, readable and writable, at the same address, until
/// the region drops. Neither value ever changes, [`slot`](Self::slot) agrees with them, and nothing
/// but the holder of a slot's slot handle accesses the slot's bytes.
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

    /// The checksums of the blocks in its slots, as far as they are known, if it remembers any. A
    /// writer to a slot records its block's checksum or forgets the old one.
    fn checksums(&self) -> Option<&Checksums> {
        None
    }

    /// The file whose lock says that the memory may still be written to, if it outlives its
    /// process. Hardware that writes to memory after the end of the process must keep this file
    /// open meanwhile, as rings do with files that they have registered: the next process waits for
    /// the lock.
    fn lock(&self) -> Option<&File> {
        None
    }

    /// The `stride()` bytes of a slot, of which the first `block_bytes()` are the block's:
    /// `O_DIRECT` needs the rest. `None`: there is no such slot.
    fn slot(&self, slot: SlotId) -> Option<NonNull<[u8]>> {
        let offset = self.geometry().offset(slot)?;
        // SAFETY: the offset of a slot that exists lies within the region, which is one mapping.
        let start = unsafe { self.base().add(offset) };
        Some(NonNull::slice_from_raw_parts(start, self.stride()))
    }
}

/// The regions that the CPU copies between, at most one per tier and all with blocks of one size.
#[derive(Clone, Debug, Default)]
pub(crate) struct CpuMemories([Option<MemoryPart>; Tier::COUNT]);

#[derive(Clone, Debug)]
enum MemoryPart {
    Whole(Arc<dyn Memory>),
    InPieces(Arc<DeviceRegion>),
}

impl MemoryPart {
    fn tier(&self) -> Tier {
        match self {
            Self::Whole(memory) => memory.tier(),
            Self::InPieces(_) => Tier::Device,
        }
    }

    fn block_bytes(&self) -> usize {
        match self {
            Self::Whole(memory) => memory.block_bytes(),
            Self::InPieces(region) => region.segments().block_bytes(),
        }
    }

    /// Where these bytes of a slot's block lie; `None`: there is no such slot.
    fn end(
        &self,
        slot: SlotId,
        bytes: Range<usize>,
    ) -> Option<CopyEnd<impl Iterator<Item = Segment> + '_>> {
        match self {
            Self::Whole(memory) => {
                let start = memory.slot(slot)?.as_ptr().cast::<u8>().expose_provenance();
                Some(CopyEnd::Whole(start + bytes.start))
            }
            Self::InPieces(region) => region.segments().cut(slot, bytes).map(CopyEnd::InPieces),
        }
    }
}

/// One end of a copy.
enum CopyEnd<I> {
    /// All bytes lie from this address on.
    Whole(usize),
    InPieces(I),
}

/// What a copy of this many bytes comes down to.
fn for_each_piece<I: Iterator<Item = Segment>>(
    from: CopyEnd<I>,
    to: CopyEnd<I>,
    bytes: usize,
    mut copy: impl FnMut(Piece),
) {
    match (from, to) {
        (CopyEnd::Whole(from), CopyEnd::Whole(to)) => copy(Piece { from, to, bytes }),
        // The pieces of the one end are those of the copy: a block has dozens, of a few KiB each.
        (CopyEnd::Whole(mut from), CopyEnd::InPieces(to)) => {
            to.for_each(|Segment { address: to, bytes }| {
                copy(Piece { from, to, bytes });
                from += bytes;
            });
        }
        (CopyEnd::InPieces(from), CopyEnd::Whole(mut to)) => {
            from.for_each(|Segment { address: from, bytes }| {
                copy(Piece { from, to, bytes });
                to += bytes;
            });
        }
        (CopyEnd::InPieces(from), CopyEnd::InPieces(to)) => pieces(from, to).for_each(copy),
    }
}

impl CpuMemories {
    pub(crate) fn new(regions: Vec<Arc<dyn Memory>>) -> Result<Self, SetupError> {
        let mut memories = Self::default();
        regions.into_iter().try_for_each(|region| memories.add(MemoryPart::Whole(region)))?;
        Ok(memories)
    }

    /// Copies to and from the device's memory too, which the CPU must be able to address.
    pub(crate) fn and_device(mut self, device: Arc<DeviceRegion>) -> Result<Self, SetupError> {
        if device.space() != Space::Host {
            let message = format!("the CPU cannot copy to or from {device:?}");
            return Err(SetupError::invalid(message));
        }
        self.add(MemoryPart::InPieces(device))?;
        Ok(self)
    }

    fn add(&mut self, place: MemoryPart) -> Result<(), SetupError> {
        let (tier, ours) = (place.tier(), place.block_bytes());
        let invalid = |message| Err(SetupError::invalid(message));
        if self.0.iter().flatten().any(|other| other.block_bytes() != ours) {
            return invalid(format!("the {tier} tier has blocks of {ours} bytes, unlike others"));
        }
        if self.0[tier.index()].replace(place).is_some() {
            return invalid(format!("two regions for the {tier} tier"));
        }
        Ok(())
    }

    /// All ordered pairs of the tiers, each with itself too.
    pub(crate) fn routes(&self) -> Vec<Route> {
        let tiers = self.0.iter().flatten().map(MemoryPart::tier);
        tiers.clone().flat_map(|from| tiers.clone().map(move |to| Route { from, to })).collect()
    }

    /// Whether both ends of a route are here.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn serves(&self, route: Route) -> bool {
        self.0[route.from.index()].is_some() && self.0[route.to.index()].is_some()
    }

    fn checksums(&self, tier: Tier) -> Option<&Checksums> {
        match self.0[tier.index()].as_ref()? {
            MemoryPart::Whole(memory) => memory.checksums(),
            MemoryPart::InPieces(_) => None,
        }
    }

    /// The block of a slot; `None`: its tier is not memory of ours, has no such slot, or has blocks
    /// in pieces.
    #[cfg(any(test, feature = "chaos"))]
    pub(crate) fn block(&self, slot: SlotRef) -> Option<NonNull<[u8]>> {
        let MemoryPart::Whole(region) = self.0[slot.tier.index()].as_ref()? else { return None };
        let start = region.slot(slot.slot)?.cast();
        Some(NonNull::slice_from_raw_parts(start, region.block_bytes()))
    }

    fn part(&self, slot: SlotRef) -> Result<&MemoryPart, CopyError> {
        self.0[slot.tier.index()].as_ref().ok_or_else(|| no_such_slot(slot))
    }

    /// Whether blocks of this tier are summed as they arrive, and so must arrive whole.
    pub(crate) fn are_summed(&self, tier: Tier) -> bool {
        self.checksums(tier).is_some()
    }

    /// Copies a block or a share of it from memory to memory, and sums it on the way where the
    /// destination remembers checksums.
    ///
    /// # Safety
    /// The caller answers for what [`Backend::submit`](crate::Backend::submit) asks of its callers.
    pub(crate) unsafe fn copy(&self, op: &CopyOp, part: Share) -> Result<(), CopyError> {
        debug_assert!(part.is_whole() || !self.are_summed(op.to.tier), "a part has no checksum");
        let (from, to) = (self.part(op.from)?, self.part(op.to)?);
        // Blocks of all memories have one size.
        let share = part.of_bytes(from.block_bytes());
        let bytes = share.len();
        let from = from.end(op.from.slot, share.clone()).ok_or_else(|| no_such_slot(op.from))?;
        let to = to.end(op.to.slot, share).ok_or_else(|| no_such_slot(op.to))?;
        if (op.from.tier, op.from.slot) == (op.to.tier, op.to.slot) {
            let message = format!("{} cannot be copied onto itself", op.from);
            return Err(CopyError::refused(message));
        }
        // SAFETY: the pieces are those of slots that exist, of blocks of one size, and distinct,
        // hence disjoint; nothing else writes the source or touches the destination, as the caller
        // promises.
        let open = |piece| unsafe { opened(piece) };
        match self.checksums(op.to.tier) {
            Some(checksums) => {
                let mut copy = SummedCopy::new();
                for_each_piece(from, to, bytes, |piece| {
                    let (from, to) = open(piece);
                    copy.piece(from, to);
                });
                checksums.record(op.to.slot, copy.finish());
            }
            None => {
                for_each_piece(from, to, bytes, |piece| {
                    let (from, to) = open(piece);
                    stream::copy(from, to);
                });
                stream::finish();
            }
        }
        Ok(())
    }
}

/// # Safety
/// Both ends are memory of this process that stays allocated; nothing writes the source or touches
/// the destination, which are disjoint, as long as the slices are used.
unsafe fn opened<'a>(piece: Piece) -> (&'a [u8], &'a mut [u8]) {
    let from = std::ptr::with_exposed_provenance(piece.from);
    let to = std::ptr::with_exposed_provenance_mut(piece.to);
    // SAFETY: as the caller promises.
    unsafe {
        (
            std::slice::from_raw_parts(from, piece.bytes),
            std::slice::from_raw_parts_mut(to, piece.bytes),
        )
    }
}

/// The slot is about to be written by a way that does not sum what it writes.
pub(crate) fn forget_checksum(memory: &dyn Memory, slot: SlotId) {
    if let Some(checksums) = memory.checksums() {
        checksums.forget(slot);
    }
}

pub(crate) fn no_such_slot(slot: SlotRef) -> CopyError {
    CopyError::refused(format!("{slot} is not in a region of this backend"))
}

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

    /// Copies some bytes of the block in a slot to `to`. False: there is no such slot, the block is
    /// shorter, `to` is not as long, or the CPU cannot address the region. The engine must not
    /// write these bytes meanwhile.
    pub fn copy_part(&self, slot: SlotId, bytes: Range<usize>, to: &mut [u8]) -> bool {
        if self.space != Space::Host || to.len() != bytes.len() {
            return false;
        }
        let Some(segments) = self.segments.cut(slot, bytes) else { return false };
        let mut to = to;
        for Segment { address, bytes } in segments {
            let (part, rest) = to.split_at_mut(bytes);
            // SAFETY: the segment is of this region, whose memory stays allocated and is readable;
            // who adopted it promised that nothing writes what is being copied.
            let from = unsafe {
                std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), bytes)
            };
            part.copy_from_slice(from);
            to = rest;
        }
        true
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
