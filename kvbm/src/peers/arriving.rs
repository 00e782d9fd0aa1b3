//! Where blocks go that come from a peer one after the other: straight into slots, or by way of a
//! buffer if they are made into other blocks.

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::{PeerMemory, SlotId};
use tokio::time::Instant;

use super::conversion::Conversion;
use super::link::{NamedBlocks, PeerFault};
use super::nixl::{self, HolderReads, ReadByNixl};
use super::protocol::BrokenLink;
use super::sealed::Intake;
use crate::api::filling::FillingSlots;

/// Takes the blocks of a peer's chain in their order.
pub(super) trait Arriving: Send {
    /// Leading blocks of the peer's chain that need not come, and those that have.
    fn kept(&self) -> usize;
    /// Blocks that are still wanted.
    fn left(&self) -> usize;
    /// Where the next one is to be written, all of it. `None`: no more are wanted.
    fn next(&mut self) -> Option<&mut [u8]>;
    /// It is written: its checksum.
    fn written(&mut self) -> Option<u32>;
    /// Has the next one copied from a neighbour's memory; its checksum.
    fn copy(&mut self, memory: &PeerMemory, slot: SlotId) -> Option<u32>;
    /// It is what its checksum says.
    fn keep(&mut self) -> Result<(), PeerFault>;
}

/// What NIXL can read blocks for as well.
pub(super) trait ReadableByNixl: Arriving {
    /// Has the rest come by NIXL, as far as it does: then what comes next may come another way.
    fn read(
        &mut self,
        reads: &HolderReads,
        named: &NamedBlocks,
        until: Instant,
        came: &mut ReadByNixl,
    ) -> impl Future<Output = Result<(), PeerFault>> + Send;
    /// Whether NIXL may still write where they go.
    fn is_lent(&self) -> bool;
}

impl ReadableByNixl for FillingSlots<'_> {
    async fn read(
        &mut self,
        reads: &HolderReads,
        named: &NamedBlocks,
        until: Instant,
        came: &mut ReadByNixl,
    ) -> Result<(), PeerFault> {
        nixl::read(reads, named, until, self, came).await
    }

    fn is_lent(&self) -> bool {
        self.lent() > 0
    }
}

impl Arriving for FillingSlots<'_> {
    fn kept(&self) -> usize {
        self.kept()
    }

    fn left(&self) -> usize {
        self.left()
    }

    fn next(&mut self) -> Option<&mut [u8]> {
        self.next()
    }

    fn written(&mut self) -> Option<u32> {
        Self::written(self)
    }

    fn copy(&mut self, memory: &PeerMemory, slot: SlotId) -> Option<u32> {
        self.copy(|region, frame| memory.copy_into(slot, region, frame).ok())
    }

    fn keep(&mut self) -> Result<(), PeerFault> {
        Self::keep(self);
        Ok(())
    }
}

/// Opens each block, or seals it, once it has come and is what its checksum says.
pub(super) struct OpenedSlots<'a, 'f> {
    filling: &'a mut FillingSlots<'f>,
    intake: Intake<'a>,
    arrived: Vec<u8>,
    crc: u32,
}

impl<'a, 'f> OpenedSlots<'a, 'f> {
    pub(super) fn new(filling: &'a mut FillingSlots<'f>, intake: Intake<'a>) -> Self {
        let arrived = vec![0; intake.arriving_bytes()];
        Self { filling, intake, arrived, crc: 0 }
    }
}

impl Arriving for OpenedSlots<'_, '_> {
    fn kept(&self) -> usize {
        self.filling.kept()
    }

    fn left(&self) -> usize {
        self.filling.left()
    }

    fn next(&mut self) -> Option<&mut [u8]> {
        (self.left() > 0).then_some(&mut self.arrived)
    }

    fn written(&mut self) -> Option<u32> {
        self.crc = checksum(&self.arrived);
        Some(self.crc)
    }

    fn copy(&mut self, memory: &PeerMemory, slot: SlotId) -> Option<u32> {
        memory.copy_out(slot, &mut self.arrived).ok()?;
        self.written()
    }

    fn keep(&mut self) -> Result<(), PeerFault> {
        self.intake.take_in(self.filling, self.crc, &mut self.arrived)?;
        self.filling.keep();
        Ok(())
    }
}

/// Makes each block into blocks of ours once it has come and is what its checksum says.
pub(super) struct ConvertedSlots<'a, 'f> {
    filling: &'a mut FillingSlots<'f>,
    conversion: &'a Conversion,
    /// Counts numbers that were too large for their new type.
    saturated: &'a mut u64,
    block: Vec<u8>,
    /// Its numbers in our type, where that takes another size.
    made: Vec<u8>,
    /// One of our blocks, put together in the caches. Written part by part, its slot would be
    /// fetched from memory first.
    joined: Vec<u8>,
    kept: usize,
    until: usize,
}

impl<'a, 'f> ConvertedSlots<'a, 'f> {
    /// Of the peer's blocks, each of `block_bytes`, the first `leased` may be read.
    pub(super) fn new(
        filling: &'a mut FillingSlots<'f>,
        conversion: &'a Conversion,
        saturated: &'a mut u64,
        leased: usize,
        block_bytes: usize,
    ) -> Self {
        let kept = conversion.whole_there(filling.kept());
        let wanted = Some(filling.kept() + filling.left()).filter(|_| filling.left() > 0);
        let until = wanted.map_or(0, |wanted| conversion.needed_there(wanted).min(leased));
        let (until, block) = (until.max(kept), vec![0; block_bytes]);
        let (made, joined) = (Vec::new(), vec![0; filling.block_bytes()]);
        Self { filling, conversion, saturated, block, made, joined, kept, until }
    }

    /// Blocks of ours that are here.
    pub(super) fn made(&self) -> usize {
        self.filling.kept()
    }

    /// Makes the next block, which is what its checksum says, into blocks of ours.
    pub(super) fn take(&mut self, block: &mut [u8]) -> Result<(), PeerFault> {
        let (theirs, too_large) = self.conversion.convert_numbers(block, &mut self.made);
        *self.saturated += too_large;
        let block = self.kept;
        self.kept += 1;
        for (at, part) in self.conversion.parts_of(block) {
            // The first of several may be here already, and the last one not be wanted.
            if at < self.filling.kept() {
                continue;
            }
            if self.filling.left() == 0 {
                break;
            }
            let other_size = || BrokenLink::Unexpected("a block has another size than its layout");
            self.conversion.put(part, theirs, &mut self.joined).ok_or_else(other_size)?;
            if self.conversion.is_last(part) {
                self.filling.fill(&self.joined).ok_or_else(other_size)?;
                self.filling.keep();
            }
        }
        Ok(())
    }
}

impl ReadableByNixl for ConvertedSlots<'_, '_> {
    async fn read(
        &mut self,
        reads: &HolderReads,
        named: &NamedBlocks,
        until: Instant,
        came: &mut ReadByNixl,
    ) -> Result<(), PeerFault> {
        nixl::read_converted(reads, named, until, self, came).await
    }

    /// It writes scratch alone.
    fn is_lent(&self) -> bool {
        false
    }
}

impl Arriving for ConvertedSlots<'_, '_> {
    fn kept(&self) -> usize {
        self.kept
    }

    fn left(&self) -> usize {
        self.until - self.kept
    }

    fn next(&mut self) -> Option<&mut [u8]> {
        (self.left() > 0).then_some(&mut self.block)
    }

    fn written(&mut self) -> Option<u32> {
        Some(checksum(&self.block))
    }

    fn copy(&mut self, memory: &PeerMemory, slot: SlotId) -> Option<u32> {
        memory.copy_out(slot, &mut self.block).ok()?;
        self.written()
    }

    fn keep(&mut self) -> Result<(), PeerFault> {
        let mut block = std::mem::take(&mut self.block);
        let taken = self.take(&mut block);
        self.block = block;
        taken
    }
}
