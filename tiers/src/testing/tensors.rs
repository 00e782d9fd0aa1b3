use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::copy::SlotId;
use crate::geometry::{Part, SegmentMap};
use crate::memory::{DeviceRegion, Space};

/// The KV cache of an engine that runs on the CPU: a block is one piece of each of several tensors.
#[derive(Debug)]
pub struct Tensors {
    tensors: Vec<Vec<u8>>,
    map: SegmentMap,
}

/// Pieces start this many bytes behind a multiple of their size, so that they are not all aligned.
const SHIFT: usize = 8;

impl Tensors {
    /// Blocks of `block_bytes` bytes, cut into `pieces` pieces (or fewer, of a byte at least).
    /// Every other tensor has room between the pieces.
    ///
    /// # Panics
    /// If a size is zero.
    pub fn new(slots: u32, block_bytes: usize, pieces: usize) -> Self {
        let piece = block_bytes.div_ceil(pieces.min(block_bytes));
        let sizes = (0..block_bytes).step_by(piece).map(|from| piece.min(block_bytes - from));
        let (tensors, parts): (Vec<_>, Vec<_>) = sizes
            .enumerate()
            .map(|(place, bytes)| tensor(slots, bytes, bytes + place % 2 * SHIFT))
            .unzip();
        let map = SegmentMap::new(slots, &parts).expect("tensors of their own");
        Self { tensors, map }
    }

    /// Where the blocks lie.
    pub const fn segments(&self) -> &SegmentMap {
        &self.map
    }

    /// A device region that has adopted the tensors.
    pub fn into_region(self) -> DeviceRegion {
        // SAFETY: the tensors are allocated as long as the region owns them, and nothing else knows
        // them.
        unsafe { DeviceRegion::adopt(self.map, Space::Host, self.tensors) }
    }
}

/// Memory that does not lie as it says: two slots of one block each, at two addresses of the same
/// bytes.
#[derive(Debug)]
pub struct TwoFaced {
    faces: [NonNull<c_void>; 2],
    bytes: usize,
}

// SAFETY: it only keeps the mappings; their user answers for that.
unsafe impl Send for TwoFaced {}
// SAFETY: likewise.
unsafe impl Sync for TwoFaced {}

impl TwoFaced {
    /// Two slots of `bytes` bytes, a multiple of the page size.
    ///
    /// # Panics
    /// If the system lacks the memory.
    pub fn region(bytes: usize) -> DeviceRegion {
        let file = memfd_create("two-faced", MemfdFlags::CLOEXEC).expect("memory");
        ftruncate(&file, bytes as u64).expect("memory");
        let map = || {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a fresh mapping at an address of the system's choice.
            let mapped = unsafe { mmap(null_mut(), bytes, access, MapFlags::SHARED, &file, 0) };
            NonNull::new(mapped.expect("memory")).expect("a mapping has an address")
        };
        let faces = [map(), map()];
        let mut addresses = faces.map(|face| face.as_ptr().expose_provenance());
        addresses.sort_unstable();
        let [base, other] = addresses;
        let map = SegmentMap::new(2, &[Part { base, stride: other - base, bytes }])
            .expect("two blocks apart");
        // SAFETY: mapped until the region drops the owner, and nothing else uses it.
        unsafe { DeviceRegion::adopt(map, Space::Host, Self { faces, bytes }) }
    }
}

impl Drop for TwoFaced {
    fn drop(&mut self) {
        for face in self.faces {
            // SAFETY: of this size, and nothing uses it any more.
            let unmapped = unsafe { munmap(face.as_ptr(), self.bytes) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

/// A look at tensors that a region has adopted: the engine's own access.
#[derive(Clone, Debug)]
pub struct TensorView(Arc<Tensors>);

impl Tensors {
    /// A device region that has adopted the tensors, and the engine's access to them.
    pub fn shared(self) -> (DeviceRegion, TensorView) {
        let tensors = Arc::new(self);
        // SAFETY: the tensors are allocated as long as the region holds them; the view is used as
        // its methods ask.
        let region =
            unsafe { DeviceRegion::adopt(tensors.map.clone(), Space::Host, Arc::clone(&tensors)) };
        (region, TensorView(tensors))
    }
}

impl TensorView {
    /// The bytes of a slot's block. No copy that is under way may write it.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn read(&self, slot: SlotId) -> Vec<u8> {
        self.read_part(slot, 0..self.0.map.block_bytes())
    }

    /// These bytes of a slot's block. No copy that is under way may write them.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn read_part(&self, slot: SlotId, bytes: std::ops::Range<usize>) -> Vec<u8> {
        let segments = self.0.map.cut(slot, bytes).expect("the slot is there");
        let mut block = Vec::new();
        for segment in segments {
            let start = std::ptr::with_exposed_provenance::<u8>(segment.address);
            // SAFETY: the segments of a slot lie within the tensors, and nothing writes them, as
            // the caller promises.
            block.extend_from_slice(unsafe { std::slice::from_raw_parts(start, segment.bytes) });
        }
        block
    }

    /// Writes a block into a slot. No copy that is under way may have it.
    ///
    /// # Panics
    /// If there is no such slot, or the block is shorter.
    pub fn write(&self, slot: SlotId, block: &[u8]) {
        let mut rest = block;
        for segment in self.0.map.segments(slot).expect("the slot is there") {
            let (piece, others) = rest.split_at(segment.bytes);
            let start = std::ptr::with_exposed_provenance_mut::<u8>(segment.address);
            // SAFETY: the segments of a slot lie within the tensors, which the engine alone writes
            // now.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), start, piece.len()) };
            rest = others;
        }
    }
}

fn tensor(slots: u32, bytes: usize, stride: usize) -> (Vec<u8>, Part) {
    let mut memory = vec![0; SHIFT + stride * slots as usize];
    let base = memory.as_mut_ptr().expose_provenance() + SHIFT;
    (memory, Part { base, stride, bytes })
}
