//! Reads of another process's host tier, on this host or another, in which the holder takes no
//! part: what a library that does them offers.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::copy::{CopyError, SlotId};
use crate::dram::{DramOptions, DramRegion};
use crate::error::SetupError;
use crate::frame::Frame;
use crate::geometry::Geometry;
use crate::memory::Memory;

/// Where a holder's host tier lies, for readers that know the metadata of its library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierPlace {
    /// Address of the first slot, in the holder's process.
    pub base: u64,
    /// Bytes from one slot to the next.
    pub stride: u64,
    /// Number of slots.
    pub slots: u32,
}

impl TierPlace {
    /// Where memory of this process lies.
    pub fn of(memory: &dyn Memory) -> Self {
        let base = memory.base().addr().get() as u64;
        Self { base, stride: memory.stride() as u64, slots: memory.slots() }
    }

    /// Memory of this process with `slots` slots as far apart as those there, for blocks of
    /// `block_bytes`: what lies in slots there can be read into these, whatever a block is here.
    ///
    /// # Errors
    /// `Invalid`: there can be no such slots. `NoSpace`: the system has not that much memory.
    pub fn scratch(&self, slots: u32, block_bytes: usize) -> Result<DramRegion, SetupError> {
        let stride = usize::try_from(self.stride).unwrap_or(usize::MAX);
        let room = stride.saturating_sub(block_bytes);
        let geometry = Geometry::new(slots, block_bytes)?.with_room(room)?;
        if geometry.stride() != stride {
            let message = format!("blocks of {block_bytes} bytes in slots {stride} bytes apart");
            return Err(SetupError::invalid(message));
        }
        DramRegion::host(DramOptions { geometry, huge_pages: false, fault_threads: 1 })
    }
}

/// A library that reads one-sided, between the host tier here and those of others.
pub trait OneSided: fmt::Debug + Send + Sync {
    /// What readers need to reach the host tier: metadata of the library, and its place. Registers
    /// it the first time, which takes a while.
    ///
    /// # Errors
    /// `Unavailable`: the library cannot do it here.
    fn place(&self) -> Result<(Vec<u8>, TierPlace), SetupError>;

    /// Tries whether a reader with this metadata can be reached from here. One that cannot must not
    /// connect.
    ///
    /// # Errors
    /// `Unavailable`: it cannot be reached. Others: these bytes describe no reader.
    fn admit(&self, metadata: &[u8]) -> Result<(), SetupError>;

    /// A reader for another holder. Takes a while.
    ///
    /// # Errors
    /// `Unavailable`: the library cannot do it here.
    fn reader(&self) -> Result<Box<dyn UnmetReader>, SetupError>;

    /// Ends all readers, and waits for that, some seconds at most.
    fn close(&self);
}

/// A reader before it knows the holder.
pub trait UnmetReader: Send {
    /// What the holder needs to [see](OneSided::admit) whether it reaches this reader. It gives
    /// access to no memory.
    fn metadata(&self) -> &[u8];

    /// Gets to know the holder of this name, by what its [`place`](OneSided::place) says. Its slots
    /// will be read into those of `into`; `None`: of the host tier here. The reads keep that memory
    /// as long as they may write it, for ever if need be. Takes a while.
    ///
    /// # Errors
    /// `Invalid`: these bytes describe another holder, or no such memory of it, or its slots are of
    /// another size. `Unavailable`: it cannot be reached from here.
    fn meet(
        self: Box<Self>,
        name: &str,
        metadata: &[u8],
        place: TierPlace,
        into: Option<Arc<DramRegion>>,
    ) -> Result<Box<dyn SlotReads>, SetupError>;
}

/// Slots of a holder to read, and slots of the memory here to read them into, one to one.
#[derive(Debug)]
pub struct SlotRead {
    /// The holder's.
    pub from: Vec<SlotId>,
    /// Those here.
    pub to: Vec<Frame>,
    /// Which bytes of each. `None`: all.
    pub bytes: Option<Range<usize>>,
}

/// Told once, when nothing writes the frames any more: the frames, and whether all of them are
/// written.
pub type ReadDone = Box<dyn FnOnce(Vec<Frame>, Result<(), CopyError>) + Send>;

/// Reads slots of one holder into slots of memory here. Dropping it [ends](Self::end) it.
///
/// The frames of a read come back exactly once: when all bytes are there, when the read never
/// began, or when nothing of it can move any more. If the library cannot say so, they never come
/// back: their slots may not be used again.
pub trait SlotReads: fmt::Debug + Send + Sync {
    /// Reads slots by a thread of its own. What arrives may be anything: the holder can write its
    /// slots meanwhile.
    ///
    /// A read that fails ends all reads at this holder. `done` runs in a thread that others wait
    /// for.
    fn read(&self, read: SlotRead, done: ReadDone);

    /// Ends all reads that have not ended, as failed, in a thread of its own; later ones are
    /// refused.
    fn end(&self, why: &str);

    /// Whether it was ended, by a failure or by [`end`](Self::end).
    fn is_over(&self) -> bool;
}
