//! Checksums of blocks: crc32c, and where they are kept.

use std::sync::atomic::{AtomicU32, Ordering};

use crc_fast::{CrcAlgorithm, Digest};
use parking_lot::Mutex;

use crate::copy::SlotId;
use crate::stream;

/// The crc32c (Castagnoli) of the block in each slot of one tier. Four bytes per slot, in chunks
/// that come into being when a slot of theirs is first written.
#[derive(Debug, Default)]
pub struct Checksums {
    known: Mutex<SlotChecksums>,
    /// How many checksums are an earlier process's, and have not been compared with their blocks.
    /// Changed with `known` locked; read without, so that it costs nothing when there are none.
    inherited: AtomicU32,
}

#[derive(Debug, Default)]
struct SlotChecksums {
    chunks: Vec<Option<Box<[u32]>>>,
    /// A bit for each slot whose checksum is inherited.
    inherited: Vec<u64>,
}

const CHUNK: usize = 1 << 16;

impl Checksums {
    /// None known yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The block that is, or is about to be, in `slot`; `None`: nothing was recorded.
    ///
    /// Zero stands for that. A block whose checksum really is zero, one in four billion, counts as
    /// corrupt when it is read: a miss, which is safe.
    pub fn get(&self, slot: SlotId) -> Option<u32> {
        self.known.lock().get(slot)
    }

    /// Notes the checksum of the block in `slot`.
    pub fn record(&self, slot: SlotId, crc: u32) {
        let mut known = self.known.lock();
        known.set(slot, crc);
        self.mark_own(&mut known, slot);
    }

    /// From here on nothing is known about the bytes in `slot`.
    pub fn forget(&self, slot: SlotId) {
        let mut known = self.known.lock();
        if let Some(place) = known.place(slot) {
            *place = 0;
        }
        self.mark_own(&mut known, slot);
    }

    /// Notes the checksum that the block in `slot` has if it is what an earlier process left there.
    /// What reads it compares them first, once: see [`verify_inherited`](Self::verify_inherited).
    pub fn inherit(&self, slot: SlotId, crc: u32) {
        let mut known = self.known.lock();
        known.set(slot, crc);
        if known.mark(slot) {
            self.inherited.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many checksums are inherited, and not verified yet.
    pub fn inherited(&self) -> u32 {
        self.inherited.load(Ordering::Relaxed)
    }

    /// Whether the block in `slot` must be verified before it is used.
    pub fn is_inherited(&self, slot: SlotId) -> bool {
        self.inherited() > 0 && self.known.lock().is_marked(slot)
    }

    /// Compares the block in `slot`, which nothing writes meanwhile, with its checksum if that is
    /// inherited. A caller that comes while another compares does so too; later callers need not. A
    /// block that does not match stays corrupt for all callers until its slot is written.
    ///
    /// # Errors
    /// What was expected, unless nothing was, and what `block` has.
    pub fn verify_inherited(&self, slot: SlotId, block: &[u8]) -> Result<(), (Option<u32>, u32)> {
        if !self.is_inherited(slot) {
            return Ok(());
        }
        let (expected, actual) = (self.get(slot), checksum(block));
        if expected != Some(actual) {
            return Err((expected, actual));
        }
        self.mark_own(&mut self.known.lock(), slot);
        Ok(())
    }

    /// The checksum of a slot is this process's own.
    fn mark_own(&self, known: &mut SlotChecksums, slot: SlotId) {
        if self.inherited() > 0 && known.unmark(slot) {
            self.inherited.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl SlotChecksums {
    fn get(&self, slot: SlotId) -> Option<u32> {
        let (chunk, place) = position(slot);
        Some(self.chunks.get(chunk)?.as_ref()?[place]).filter(|&crc| crc != 0)
    }

    fn place(&mut self, slot: SlotId) -> Option<&mut u32> {
        let (chunk, place) = position(slot);
        self.chunks.get_mut(chunk)?.as_mut()?.get_mut(place)
    }

    fn set(&mut self, slot: SlotId, crc: u32) {
        let (chunk, place) = position(slot);
        // By chunks: a tier may have a billion slots in name and use a few.
        if self.chunks.len() <= chunk {
            self.chunks.resize(chunk + 1, None);
        }
        self.chunks[chunk].get_or_insert_with(|| vec![0; CHUNK].into())[place] = crc;
    }

    fn is_marked(&self, slot: SlotId) -> bool {
        let (word, bit) = bit(slot);
        self.inherited.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// Whether it was not.
    fn mark(&mut self, slot: SlotId) -> bool {
        let (word, bit) = bit(slot);
        if self.inherited.len() <= word {
            self.inherited.resize(word + 1, 0);
        }
        let was_marked = self.inherited[word] & bit != 0;
        self.inherited[word] |= bit;
        !was_marked
    }

    /// Whether it was.
    fn unmark(&mut self, slot: SlotId) -> bool {
        let was_marked = self.is_marked(slot);
        let (word, bit) = bit(slot);
        self.inherited.get_mut(word).into_iter().for_each(|bits| *bits &= !bit);
        was_marked
    }
}

/// Word, and bit in it.
const fn bit(slot: SlotId) -> (usize, u64) {
    (slot.0 as usize / 64, 1 << (slot.0 % 64))
}

/// Chunk, and place in it.
const fn position(slot: SlotId) -> (usize, usize) {
    (slot.0 as usize / CHUNK, slot.0 as usize % CHUNK)
}

/// The checksum of a block.
pub fn checksum(block: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(block)
}

/// Bytes that are copied, then summed: the source must still lie in the first caches. From memory
/// the sum alone would take as long as the copy.
const STEP_BYTES: usize = 4 << 10;

/// Copies the pieces of a block one after the other, and sums them on the way.
pub(crate) struct SummedCopy(Digest);

/// The checksum of a block whose bytes come in pieces.
#[derive(Clone, Copy, Debug)]
pub struct RunningChecksum(Digest);

impl RunningChecksum {
    /// Of nothing yet.
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Of pieces whose checksum is `crc`.
    pub fn after(crc: u32) -> Self {
        let state = u64::from(crc ^ u32::MAX);
        Self(Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, state))
    }

    /// The next piece.
    pub fn add(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    /// The checksum of all pieces so far.
    pub fn value(&self) -> u32 {
        self.0.finalize() as u32
    }
}

impl Default for RunningChecksum {
    fn default() -> Self {
        Self::new()
    }
}

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
        // Streaming stores pass the caches unordered: they are fenced before the block is reported
        // as there.
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
    fn a_checksum_goes_on_where_it_was() {
        let mut sum = RunningChecksum::new();
        for piece in [&b"1234"[..], b"", b"56789"] {
            sum = RunningChecksum::after(sum.value());
            sum.add(piece);
        }
        assert_eq!(sum.value(), checksum(b"123456789"));
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

    #[test]
    fn inherited_slots_are_verified_once_and_rewritten_ones_never() {
        let checksums = Checksums::new();
        let [good, bad, written, forgotten, zero] = [1, 2, 300, 4, 5].map(SlotId);
        for slot in [good, bad, written, forgotten, good] {
            checksums.inherit(slot, checksum(b"block"));
        }
        checksums.inherit(zero, 0);
        assert_eq!((checksums.inherited(), checksums.get(good)), (5, Some(checksum(b"block"))));
        checksums.record(written, 7);
        checksums.forget(forgotten);
        checksums.forget(SlotId(1 << 20));
        assert_eq!(checksums.inherited(), 3);
        assert_eq!(checksums.verify_inherited(good, b"block"), Ok(()));
        for _ in 0..2 {
            let told = Err((Some(checksum(b"block")), checksum(b"blocc")));
            assert_eq!(checksums.verify_inherited(bad, b"blocc"), told);
        }
        assert!(checksums.verify_inherited(zero, b"").is_err(), "nothing is known of it");
        assert_eq!(checksums.inherited(), 2);
        for slot in [good, written, forgotten] {
            assert_eq!(
                checksums.verify_inherited(slot, b"anything"),
                Ok(()),
                "nothing says otherwise"
            );
        }
    }
}
