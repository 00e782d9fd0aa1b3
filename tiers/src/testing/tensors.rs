use crate::device::{DeviceRegion, Space};
use crate::segments::{Part, SegmentMap};

/// The KV cache of an engine that runs on the CPU: a block is one piece of each of several tensors.
#[derive(Debug)]
pub struct Tensors {
    tensors: Vec<Vec<u8>>,
    map: SegmentMap,
}

/// Pieces start so many bytes behind a multiple of their size, so that they are not all aligned.
const SHIFT: usize = 8;

impl Tensors {
    /// Blocks of `block_bytes` bytes, cut into `pieces` pieces (or fewer, of a byte at least). Every other
    /// tensor has room between the pieces.
    ///
    /// # Panics
    /// If a size is zero.
    pub fn new(slots: u32, block_bytes: usize, pieces: usize) -> Self {
        let piece = block_bytes.div_ceil(pieces.min(block_bytes));
        let sizes = (0..block_bytes).step_by(piece).map(|from| piece.min(block_bytes - from));
        let (tensors, parts): (Vec<_>, Vec<_>) =
            sizes.enumerate().map(|(place, bytes)| tensor(slots, bytes, bytes + place % 2 * SHIFT)).unzip();
        let map = SegmentMap::new(slots, &parts).expect("tensors of their own");
        Self { tensors, map }
    }

    /// Where the blocks lie.
    pub const fn segments(&self) -> &SegmentMap {
        &self.map
    }

    /// A device region that has adopted the tensors.
    pub fn into_region(self) -> DeviceRegion {
        // SAFETY: the tensors are allocated as long as the region owns them, and nobody else knows them.
        unsafe { DeviceRegion::adopt(self.map, Space::Host, self.tensors) }
    }
}

fn tensor(slots: u32, bytes: usize, stride: usize) -> (Vec<u8>, Part) {
    let mut memory = vec![0; SHIFT + stride * slots as usize];
    let base = memory.as_mut_ptr().expose_provenance() + SHIFT;
    (memory, Part { base, stride, bytes })
}
