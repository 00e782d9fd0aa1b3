//! The mapping of a peer's memory, and copies from it.

#![expect(unsafe_code, reason = "copies slots that another process writes")]

use std::ops::Range;
use std::sync::Arc;
use std::{io, ptr, slice};

use memmap2::MmapRaw;
#[cfg(feature = "cuda")]
use parking_lot::Mutex;

use super::SharedMemory;
use crate::checksum::RunningChecksum;
#[cfg(feature = "cuda")]
use crate::clock;
use crate::copy::{CopyError, SlotId};
#[cfg(feature = "cuda")]
use crate::cuda::NeighbourCopies;
use crate::dram::{DramRegion, PageMapper, map_for_reading};
use crate::error::{SetupError, SetupErrorKind};
use crate::fork::ProcessBound;
use crate::frame::Frame;
use crate::geometry::{Geometry, Segment};
use crate::memory::{DeviceRegion, Memory, Space};
use crate::stream::{self, LINE_BYTES, PAGE_BYTES, Page};

/// The host tier of another process, mapped for reading. It stays readable when that process dies,
/// and its memory stays taken until this is dropped.
///
/// The other process writes it whenever it likes, so no reference is ever had to its bytes: they
/// are copied, and what arrived is summed.
#[derive(Debug)]
pub struct PeerMemory {
    /// Before the mapping, which it has as well until its thread ends.
    _mapper: PageMapper,
    /// The GPU that reads it.
    #[cfg(feature = "cuda")]
    gpu: ProcessBound<Arc<Mutex<GpuAccess>>>,
    map: ProcessBound<Arc<MmapRaw>>,
    /// From the mapping's start to the first slot.
    base: usize,
    geometry: Geometry,
}

/// How far a GPU is with a peer's memory.
#[cfg(feature = "cuda")]
#[derive(Debug, Default)]
enum GpuAccess {
    #[default]
    NotAsked,
    Locking,
    Reads(Arc<NeighbourCopies>),
    Refused,
}

/// A GPU takes a while to let go of some GiB, and who drops them has other work.
#[cfg(feature = "cuda")]
impl Drop for PeerMemory {
    fn drop(&mut self) {
        if self.gpu.is_here() {
            let access = std::mem::take(&mut *self.gpu.lock());
            // Without a thread it is done here.
            let _ = clock::spawn("kvbm-peer-gpu", move || drop(access));
        }
    }
}

impl PeerMemory {
    /// Maps what another process handed over. Its pages, which are there, are mapped in the
    /// background.
    ///
    /// # Errors
    /// `Untrusted`: it is not as a [`DramRegion::shareable_host`] makes it, and reading it could
    /// kill this process or take memory. `Unavailable`: the system has no addresses or no thread
    /// for it.
    pub fn map(memory: &SharedMemory) -> Result<Self, SetupError> {
        memory.check()?;
        let (geometry, bytes) = (memory.geometry(), memory.geometry().bytes());
        let refused = |error: io::Error| {
            let message = format!("cannot map {} MiB of a peer: {error}", bytes >> 20);
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        };
        let (map, base) = map_for_reading(memory.file(), bytes).map_err(refused)?;
        let map = Arc::new(map);
        let mapper = PageMapper::start(Arc::clone(&map), base, bytes).map_err(refused)?;
        Ok(Self {
            _mapper: mapper,
            #[cfg(feature = "cuda")]
            gpu: ProcessBound::new(Arc::default()),
            map: ProcessBound::new(map),
            base,
            geometry,
        })
    }

    /// Copies to an engine's memory on a GPU. The first call has a thread lock this memory for that
    /// GPU: there are none before it is done, nor if the GPU refuses.
    #[cfg(feature = "cuda")]
    pub(super) fn gpu_copies(&self, engine: &Arc<DeviceRegion>) -> Option<Arc<NeighbourCopies>> {
        let mut access = self.gpu.lock();
        match &*access {
            GpuAccess::Reads(copies) => {
                let is_of_use = Arc::ptr_eq(copies.device(), engine) && !copies.is_broken();
                return is_of_use.then(|| Arc::clone(copies));
            }
            GpuAccess::Locking | GpuAccess::Refused => return None,
            GpuAccess::NotAsked => {}
        }
        let (map, base, geometry) = (Arc::clone(&self.map), self.base, self.geometry);
        let (engine, told) = (Arc::clone(engine), Arc::clone(&self.gpu));
        let lock = move || {
            // SAFETY: the slots begin there, on a page's boundary, and their file is sealed.
            let copies = unsafe { NeighbourCopies::new(&map, base, geometry, &engine) };
            *told.lock() = match copies {
                Ok(copies) => GpuAccess::Reads(Arc::new(copies)),
                Err(error) => {
                    tracing::warn!(%error, "blocks of a neighbour come by way of the host tier: its memory could not be locked for the GPU (see ulimit -l)");
                    GpuAccess::Refused
                }
            };
        };
        let is_started = clock::spawn("kvbm-peer-gpu", lock).is_ok();
        *access = if is_started { GpuAccess::Locking } else { GpuAccess::Refused };
        None
    }

    /// How the peer's memory is cut into slots.
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Copies the block in a slot of the peer's into a slot of ours. The peer may write its slot
    /// meanwhile: the checksum that comes back is that of the bytes which arrived, whatever they
    /// are. The caller compares it with that of the block that it wants.
    ///
    /// The region remembers the checksum, as it does of other blocks that arrive.
    ///
    /// # Errors
    /// `Refused`: the peer has no such slot, the frame is not the region's, or their blocks differ
    /// in size. Nothing was copied.
    pub fn copy_into(
        &self,
        from: SlotId,
        to: &DramRegion,
        frame: &mut Frame,
    ) -> Result<u32, CopyError> {
        let source = self.source(from)?;
        let block_bytes = self.geometry.block_bytes();
        if to.geometry().block_bytes() != block_bytes {
            let message =
                format!("a peer has blocks of {block_bytes} bytes, unlike {}", to.label());
            return Err(CopyError::refused(message));
        }
        let ours = frame.slot_ref();
        let slot = to.write_slot(frame);
        let slot =
            slot.ok_or_else(|| CopyError::refused(format!("{ours} is not in this region")))?;
        // SAFETY: a slot is `stride` mapped bytes that start on a page boundary, and its block is
        // no longer. The kernel keeps them there, as their file is sealed.
        let checksum = unsafe { copy_pages(source, block_bytes, slot) };
        to.record_checksum(frame, checksum);
        Ok(checksum)
    }

    /// Copies the block in a slot of the peer's to `to`, in place of what that has. As with
    /// [`copy_into`](Self::copy_into) these are any bytes, of which the caller takes the checksum.
    ///
    /// # Errors
    /// `Refused`: the peer has no such slot.
    pub fn copy_out(&self, from: SlotId, to: &mut Vec<u8>) -> Result<(), CopyError> {
        let source = self.source(from)?;
        to.clear();
        // SAFETY: as above: a slot is mapped pages that stay, and its block is no longer.
        unsafe { stream::copy_block(source, self.geometry.block_bytes(), to) };
        Ok(())
    }

    /// Copies the block in a slot of the peer's into a slot of an engine's, and returns the checksum
    /// of what arrived, as [`copy_into`](Self::copy_into) does. Nothing else may use the engine's
    /// slot meanwhile.
    ///
    /// # Errors
    /// `Refused`: one of them has no such slot, their blocks differ in size, or the CPU cannot
    /// address the engine's. Nothing was copied.
    pub fn copy_to_engine(
        &self,
        from: SlotId,
        to: &DeviceRegion,
        slot: SlotId,
    ) -> Result<u32, CopyError> {
        self.source(from)?;
        let block_bytes = self.geometry.block_bytes();
        let segments = to.segments();
        let fits = to.space() == Space::Host && segments.block_bytes() == block_bytes;
        let pieces = segments.segments(slot).filter(|_| fits).ok_or_else(|| {
            CopyError::refused(format!("{to:?} takes no block of {block_bytes} bytes in {slot:?}"))
        })?;
        let (mut sum, mut start) = (RunningChecksum::new(), 0);
        for Segment { address, bytes } in pieces {
            // SAFETY: the piece is one of a slot that exists, in memory that stays allocated and that
            // the CPU can write. Its adopter promised that nothing else accesses the slot meanwhile.
            let piece = unsafe {
                slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(address), bytes)
            };
            self.copy_part(from, start..start + bytes, piece, &mut sum)?;
            start += bytes;
        }
        Ok(sum.value())
    }

    /// Copies some bytes of the block in a slot of the peer's to `to`, and adds what arrived to
    /// `sum`. As with [`copy_into`](Self::copy_into) these are any bytes.
    ///
    /// # Errors
    /// `Refused`: the peer has no such slot, its blocks are shorter, or `to` is not as long.
    pub fn copy_part(
        &self,
        from: SlotId,
        bytes: Range<usize>,
        to: &mut [u8],
        sum: &mut RunningChecksum,
    ) -> Result<(), CopyError> {
        let source = self.source(from)?;
        if bytes.end > self.geometry.block_bytes() || to.len() != bytes.len() {
            return Err(CopyError::refused(format!("a peer's blocks have no bytes {bytes:?}")));
        }
        let mut seen = Page::default();
        for page in (bytes.start / PAGE_BYTES * PAGE_BYTES..bytes.end).step_by(PAGE_BYTES) {
            let part = bytes.start.max(page)..bytes.end.min(page + PAGE_BYTES);
            let to = &mut to[part.start - bytes.start..part.end - bytes.start];
            let (seen_part, wanted) = (part.start - page..part.end - page, bytes.end - page);
            match whole_page(to) {
                // SAFETY: the page starts within the block: it is one of the slot's mapped pages,
                // which stay, as their file is sealed.
                Some(to) => unsafe { stream::copy_page(source.add(page), wanted, to, &mut seen) },
                None => {
                    // SAFETY: as above.
                    unsafe { stream::read_page(source.add(page), wanted, &mut seen) };
                    stream::copy(&seen.0[seen_part.clone()], to);
                }
            }
            sum.add(&seen.0[seen_part]);
        }
        stream::finish();
        Ok(())
    }

    fn source(&self, slot: SlotId) -> Result<*const u8, CopyError> {
        self.slot(slot).ok_or_else(|| {
            let slots = self.geometry.slots();
            CopyError::refused(format!("a peer with {slots} slots has no {slot:?}"))
        })
    }

    /// Where a slot starts; `None`: there is no such slot.
    pub(super) fn slot(&self, slot: SlotId) -> Option<*const u8> {
        let offset = self.geometry.offset(slot)?;
        Some(self.map.as_ptr().wrapping_add(self.base + offset))
    }
}

/// A place that a page can go to as it is.
fn whole_page(to: &mut [u8]) -> Option<&mut [u8; PAGE_BYTES]> {
    let to: &mut [u8; PAGE_BYTES] = to.try_into().ok()?;
    Some(to).filter(|to| to.as_ptr().addr().is_multiple_of(LINE_BYTES))
}

/// Copies a block page by page, and sums what arrived of each while it is in the first caches.
/// Bytes behind the block's last, which mean nothing, are copied as far as its last page goes.
///
/// # Safety
/// From `from` on, a page boundary, lie the pages of a block of `block_bytes` bytes, mapped as long
/// as this runs.
unsafe fn copy_pages(from: *const u8, block_bytes: usize, to: &mut [u8]) -> u32 {
    let (mut sum, mut arrived) = (RunningChecksum::new(), Page::default());
    let pages = to.as_chunks_mut::<PAGE_BYTES>().0;
    for (start, page) in (0..block_bytes).step_by(PAGE_BYTES).zip(pages) {
        // SAFETY: the page starts within the block, so it is one of those that the caller names.
        unsafe { stream::copy_page(from.add(start), usize::MAX, page, &mut arrived) };
        sum.add(&arrived.0[..PAGE_BYTES.min(block_bytes - start)]);
    }
    stream::finish();
    sum.value()
}
