//! Slots that are written layer by layer, while others read the layers that are written: a prefill
//! worker's blocks travel before they are whole.
//!
//! The layers of a block are equal shares of its bytes, the first layer first. A layer's checksum is
//! the crc32c of its block's bytes up to the layer's end. So a sum that goes on tells each layer
//! apart, and ends as the block's own.

#![expect(unsafe_code, reason = "writes and reads parts of slots")]

use std::fmt;
use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::batch::Share;
use crate::checksum::RunningChecksum;
use crate::copy::SlotId;
use crate::dram::DramRegion;
use crate::frame::Frame;
use crate::memory::{Memory, forget_checksum};

/// Where a layer lies in a block. The last one has what cannot be divided.
pub fn bytes_of_layer(block_bytes: usize, layer: u16, layers: NonZeroU16) -> Range<usize> {
    Share::layer(layer, layers).of_bytes(block_bytes)
}

/// Writes successive layers of blocks. It must end in [`finish`](Self::finish): without that its
/// slots stay out.
#[must_use = "dropping it leaves its slots unusable"]
pub struct LayerWriter {
    slots: Arc<LayeredSlots>,
    /// Checksums of what is written of each block.
    sums: Vec<u32>,
}

/// Slots whose first layers may be read, as long as they are being written.
pub struct LayeredSlots {
    region: Arc<DramRegion>,
    layers: NonZeroU16,
    blocks: usize,
    /// Those of the slots until the writer has finished. A lock, so that no slot changes hands while
    /// it is read.
    frames: RwLock<Vec<Frame>>,
    written: AtomicU16,
    /// Layer by layer, of each block.
    checksums: Mutex<Vec<u32>>,
}

impl fmt::Debug for LayeredSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayeredSlots")
            .field("layers", &self.layers)
            .field("written", &self.written())
            .finish_non_exhaustive()
    }
}

impl LayerWriter {
    /// Takes over slots to write blocks of `layers` layers into.
    ///
    /// # Errors
    /// A frame is not of the region's [`frames`](DramRegion::frames): all come back.
    pub fn new(
        region: Arc<DramRegion>,
        frames: Vec<Frame>,
        layers: NonZeroU16,
    ) -> Result<Self, Vec<Frame>> {
        if frames.iter().any(|frame| region.start_of(frame).is_none()) {
            return Err(frames);
        }
        frames.iter().for_each(|frame| forget_checksum(&*region, frame.slot()));
        let sums = vec![0; frames.len()];
        let slots = LayeredSlots {
            region,
            layers,
            blocks: frames.len(),
            frames: RwLock::new(frames),
            written: AtomicU16::new(0),
            checksums: Mutex::default(),
        };
        Ok(Self { slots: Arc::new(slots), sums })
    }

    /// What others read.
    pub const fn slots(&self) -> &Arc<LayeredSlots> {
        &self.slots
    }

    /// Whether all layers are written.
    pub fn is_whole(&self) -> bool {
        self.slots.written() == self.slots.layers.get()
    }

    /// Has `write` write the next layer of each block, all of its bytes. Then others may read it.
    /// False: there are no more layers.
    ///
    /// # Errors
    /// Those of `write`: the layer is still to be written.
    pub fn write<E>(
        &mut self,
        mut write: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let slots = &*self.slots;
        let layer = slots.written();
        if layer == slots.layers.get() {
            return Ok(false);
        }
        let bytes = slots.bytes_of(layer);
        let mut sums = self.sums.clone();
        let frames = slots.frames.read();
        for (block, (frame, sum)) in frames.iter().zip(&mut sums).enumerate() {
            let Some(start) = slots.region.start_of(frame) else { continue };
            // SAFETY: the frame is the slot's sole slot handle, and lies under the lock as long as
            // the slice lives. The layer lies within the slot's block. This writer alone touches
            // layers that are not written, and is borrowed mutably; readers touch those before.
            let part = unsafe {
                std::slice::from_raw_parts_mut(start.as_ptr().add(bytes.start), bytes.len())
            };
            write(block, part)?;
            let mut running = RunningChecksum::after(*sum);
            running.add(part);
            *sum = running.value();
        }
        drop(frames);
        slots.checksums.lock().extend_from_slice(&sums);
        self.sums = sums;
        // A reader that sees the number sees the bytes, and their checksums.
        slots.written.store(layer + 1, Ordering::Release);
        Ok(true)
    }

    /// Gives the frames back, once those that read a layer now have read it. Where all layers are
    /// written the region knows the blocks' checksums.
    pub fn finish(self) -> Vec<Frame> {
        let frames = std::mem::take(&mut *self.slots.frames.write());
        if self.is_whole() {
            for (frame, &sum) in frames.iter().zip(&self.sums) {
                self.slots.region.record_checksum(frame, sum);
            }
        }
        frames
    }
}

impl LayeredSlots {
    /// Layers of a block.
    pub const fn layers(&self) -> NonZeroU16 {
        self.layers
    }

    /// Layers that are written of all blocks.
    pub fn written(&self) -> u16 {
        self.written.load(Ordering::Acquire)
    }

    /// Where a layer lies in a block.
    pub fn bytes_of(&self, layer: u16) -> Range<usize> {
        bytes_of_layer(self.region.block_bytes(), layer, self.layers)
    }

    /// The slots by block; none once the writer has finished.
    pub fn slot_ids(&self) -> Vec<SlotId> {
        self.frames.read().iter().map(Frame::slot).collect()
    }

    /// The checksums of a written layer of some blocks; none if it is not written.
    pub fn checksums(&self, layer: u16, blocks: Range<usize>) -> Vec<u32> {
        let first = usize::from(layer) * self.blocks;
        let of_blocks = first + blocks.start..first + blocks.end.min(self.blocks);
        self.checksums.lock().get(of_blocks).unwrap_or_default().to_vec()
    }

    /// Adds the bytes of a layer of some blocks to `to`. False: it is not written, or the writer has
    /// finished, and nothing is added.
    pub fn read(&self, layer: u16, blocks: Range<usize>, to: &mut Vec<u8>) -> bool {
        let frames = self.frames.read();
        let Some(frames) = frames.get(blocks).filter(|_| layer < self.written()) else {
            return false;
        };
        let bytes = self.bytes_of(layer);
        for start in frames.iter().filter_map(|frame| self.region.start_of(frame)) {
            // SAFETY: the frame lies under the lock as long as the slice lives, so the slot is not
            // another's. The layer lies within the block, and is written: nothing writes it again.
            let part =
                unsafe { std::slice::from_raw_parts(start.as_ptr().add(bytes.start), bytes.len()) };
            to.extend_from_slice(part);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::checksum;
    use crate::testing::{fill_pattern, host};

    fn layers(count: u16) -> NonZeroU16 {
        count.try_into().unwrap()
    }

    fn writer(memory: &Arc<DramRegion>, blocks: usize, count: u16) -> LayerWriter {
        let mut frames = memory.frames().unwrap();
        let frames = (0..blocks).map(|_| frames.take().unwrap()).collect();
        LayerWriter::new(Arc::clone(memory), frames, layers(count)).unwrap()
    }

    fn block(number: usize) -> Vec<u8> {
        let mut block = vec![0; 4096];
        fill_pattern(number, &mut block);
        block
    }

    #[test]
    fn layers_are_read_once_written_and_sum_up_to_blocks() {
        // The second number leaves the last layer a rest.
        for count in [1, 7, 32] {
            let memory = Arc::new(host(3, 4096));
            let mut writer = writer(&memory, 3, count);
            let slots = Arc::clone(writer.slots());
            for layer in 0..count {
                let (bytes, mut read) = (slots.bytes_of(layer), Vec::new());
                assert!(!slots.read(layer, 0..3, &mut read) && read.is_empty());
                assert!(slots.checksums(layer, 0..3).is_empty());
                let written = writer.write(|at, part| {
                    part.copy_from_slice(&block(at)[bytes.clone()]);
                    Ok::<_, ()>(())
                });
                assert_eq!(written, Ok(true));
                assert!(slots.read(layer, 1..3, &mut read));
                assert_eq!(read, [&block(1)[bytes.clone()], &block(2)[bytes.clone()]].concat());
                let sums = [1, 2].map(|at| checksum(&block(at)[..bytes.end]));
                assert_eq!(slots.checksums(layer, 1..3), sums);
            }
            assert_eq!(writer.write(|_, _| Err(())), Ok(false), "there are no more");
            let frames = writer.finish();
            for (at, frame) in frames.iter().enumerate() {
                assert_eq!(memory.read(frame).unwrap(), block(at));
                assert_eq!(
                    memory.checksums().unwrap().get(frame.slot()),
                    Some(checksum(&block(at)))
                );
            }
            assert!(!slots.read(0, 0..3, &mut Vec::new()), "they may be another's");
        }
    }

    #[test]
    fn a_layer_that_fails_is_written_again() {
        let memory = Arc::new(host(2, 4096));
        let mut writer = writer(&memory, 2, 2);
        for fails_at in [0, 1] {
            let failed = writer.write(|at, part| {
                part.fill(9);
                if at == fails_at { Err("no") } else { Ok(()) }
            });
            assert_eq!((failed, writer.slots().written()), (Err("no"), 0));
        }
        for layer in 0..2 {
            let bytes = writer.slots().bytes_of(layer);
            let written = writer.write(|at, part| {
                part.copy_from_slice(&block(at)[bytes.clone()]);
                Ok::<_, ()>(())
            });
            assert_eq!((written, writer.is_whole()), (Ok(true), layer == 1));
        }
        assert_eq!(writer.slots().checksums(1, 0..2), [0, 1].map(|at| checksum(&block(at))));
        drop(writer.finish());
    }

    #[test]
    fn what_is_not_whole_has_no_checksum() {
        let memory = Arc::new(host(1, 4096));
        let mut writer = writer(&memory, 1, 2);
        let fill = |_, part: &mut [u8]| {
            part.fill(1);
            Ok::<_, ()>(())
        };
        writer.write(fill).unwrap();
        let frames = writer.finish();
        assert_eq!(memory.checksums().unwrap().get(frames[0].slot()), None);
    }

    #[test]
    fn frames_of_other_memory_come_back() {
        let [memory, other] = [(); 2].map(|()| Arc::new(host(1, 4096)));
        let frame = other.frames().unwrap().take().unwrap();
        let refused = LayerWriter::new(memory, vec![frame], layers(1));
        assert_eq!(refused.err().map(|frames| frames.len()), Some(1));
    }
}
