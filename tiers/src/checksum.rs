//! Checksums of blocks: crc32c, and where they are kept.

use crc_fast::{CrcAlgorithm, Digest};
use parking_lot::Mutex;

use crate::copy::SlotId;
use crate::stream;

/// The crc32c (Castagnoli) of the block in each slot of one tier. Four bytes per slot, in chunks that come
/// into being when a slot of theirs is first written.
#[derive(Debug, Default)]
pub struct Checksums(Mutex<Vec<Option<Box<[u32]>>>>);

const CHUNK: usize = 1 << 16;

impl Checksums {
    /// None known yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The block that is, or is about to be, in `slot`; `None`: nothing was recorded.
    ///
    /// Zero stands for that. A block whose checksum really is zero, one in four billion, counts as corrupt
    /// when it is read: a miss, which is safe.
    pub fn get(&self, slot: SlotId) -> Option<u32> {
        let (chunk, place) = position(slot);
        let chunks = self.0.lock();
        Some(chunks.get(chunk)?.as_ref()?[place]).filter(|&crc| crc != 0)
    }

    /// Notes the checksum of the block in `slot`.
    pub fn record(&self, slot: SlotId, crc: u32) {
        let (chunk, place) = position(slot);
        let mut chunks = self.0.lock();
        // By chunks: a tier may have a billion slots in name and use a few.
        if chunks.len() <= chunk {
            chunks.resize(chunk + 1, None);
        }
        chunks[chunk].get_or_insert_with(|| vec![0; CHUNK].into())[place] = crc;
    }

    /// From here on nothing is known about the bytes in `slot`.
    pub fn forget(&self, slot: SlotId) {
        let (chunk, place) = position(slot);
        if let Some(Some(chunk)) = self.0.lock().get_mut(chunk) {
            chunk[place] = 0;
        }
    }
}

/// Chunk, and place in it.
const fn position(slot: SlotId) -> (usize, usize) {
    (slot.0 as usize / CHUNK, slot.0 as usize % CHUNK)
}

/// The checksum of a block.
pub fn checksum(block: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(block)
}

/// So much is copied, then summed: the source must still lie in the first caches. From memory the sum alone
/// would take as long as the copy.
const STEP_BYTES: usize = 4 << 10;

/// Copies the pieces of a block one after the other, and sums them on the way.
pub(crate) struct SummedCopy(Digest);

impl SummedCopy {
    pub(crate) fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Copies the next piece to another place of the same size.
    ///
    /// # Panics
    /// If the sizes differ.
    pub(crate) fn piece(&mut self, from: &[u8], to: &mut [u8]) {
        assert_eq!(from.len(), to.len(), "pieces of one size");
        for (from, to) in from.chunks(STEP_BYTES).zip(to.chunks_mut(STEP_BYTES)) {
            stream::copy(from, to);
            self.0.update(from);
        }
    }

    /// All pieces are copied: the checksum of the block.
    pub(crate) fn finish(self) -> u32 {
        // Streaming stores pass the caches unordered: they are fenced before anybody is told that the block is there.
        stream::finish();
        self.0.finalize() as u32
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_summed_copy_is_a_copy_and_a_sum(bytes in 0..3 * STEP_BYTES, cut: usize, seed: u8) {
            let from: Vec<u8> = (0..bytes).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect();
            let mut to = vec![0; bytes];
            let cut = cut % (bytes + 1);
            let mut copy = SummedCopy::new();
            copy.piece(&from[..cut], &mut to[..cut]);
            copy.piece(&from[cut..], &mut to[cut..]);
            prop_assert_eq!(copy.finish(), checksum(&from));
            prop_assert_eq!(from, to);
        }
    }

    #[test]
    fn the_checksum_is_castagnoli() {
        // The check value of CRC-32/ISCSI in Greg Cook's catalogue.
        assert_eq!(checksum(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn what_is_forgotten_or_was_never_recorded_is_unknown() {
        let checksums = Checksums::new();
        let (near, far) = (SlotId(3), SlotId(u32::MAX));
        checksums.forget(near);
        checksums.record(far, 7);
        assert_eq!((checksums.get(near), checksums.get(far)), (None, Some(7)));
        checksums.forget(far);
        assert_eq!(checksums.get(far), None);
    }
}
