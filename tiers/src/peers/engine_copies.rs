//! From a neighbour's memory straight into an engine's slots: by threads of the CPU, or by the GPU
//! that the engine is on.

use std::fmt;
use std::sync::Arc;

use super::PeerMemory;
use crate::backend::Fence;
use crate::copy::{CopyError, SlotId};
#[cfg(feature = "cuda")]
use crate::cuda::NeighbourCopies;
use crate::memory::{DeviceRegion, Space};

/// What one call copies on a CPU, in bytes: small blocks share its cost.
const AT_ONCE_BYTES: usize = 256 << 10;

/// A block in a slot of a neighbour's, and the slot of the engine's that it goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StraightBlock {
    /// The neighbour's.
    pub from: SlotId,
    /// The engine's.
    pub to: SlotId,
}

/// Copies of a neighbour's blocks into an engine's slots. Any number of threads may copy.
pub struct EngineCopies(Copier);

enum Copier {
    Cpu {
        memory: Arc<PeerMemory>,
        engine: Arc<DeviceRegion>,
    },
    #[cfg(feature = "cuda")]
    Gpu {
        copies: Arc<NeighbourCopies>,
        after: Fence,
    },
}

impl fmt::Debug for EngineCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineCopies").finish_non_exhaustive()
    }
}

impl EngineCopies {
    /// `None`: blocks do not go this way now. On a CPU the fence must be raised. A GPU reads the
    /// neighbour's memory once that is locked for it, which begins with the first call.
    pub fn between(
        memory: &Arc<PeerMemory>,
        engine: &Arc<DeviceRegion>,
        after: &Fence,
    ) -> Option<Self> {
        let copier = match engine.space() {
            Space::Host => {
                let (memory, engine) = (Arc::clone(memory), Arc::clone(engine));
                after.is_done().then_some(Copier::Cpu { memory, engine })?
            }
            #[cfg(feature = "cuda")]
            Space::Cuda(_) => {
                let is_for_gpus = after.is_done() || matches!(after, Fence::Event(_));
                let copies = is_for_gpus.then(|| memory.gpu_copies(engine))??;
                Copier::Gpu { copies, after: after.clone() }
            }
            #[cfg(not(feature = "cuda"))]
            Space::Cuda(_) => return None,
        };
        Some(Self(copier))
    }

    /// Blocks that one call copies, at most.
    pub fn at_once(&self) -> usize {
        match &self.0 {
            Copier::Cpu { memory, .. } => (AT_ONCE_BYTES / memory.geometry().block_bytes()).max(1),
            #[cfg(feature = "cuda")]
            Copier::Gpu { copies, .. } => copies.at_once(),
        }
    }

    /// Whether the engine's slots may be written by now: on a GPU once its event has passed.
    ///
    /// # Errors
    /// `Io`: the GPU does not say.
    pub fn is_ready(&self) -> Result<bool, CopyError> {
        match &self.0 {
            Copier::Cpu { .. } => Ok(true),
            #[cfg(feature = "cuda")]
            Copier::Gpu { copies, after } => copies.is_ready(after),
        }
    }

    /// Copies blocks once it [is ready](Self::is_ready), and returns the checksums of what arrived.
    /// The neighbour may write its slots meanwhile: these are any bytes. Nothing writes the engine's
    /// slots when it returns.
    ///
    /// # Errors
    /// `Refused`: a slot does not exist, blocks differ in size, or there are more than go at once.
    /// `Io`: the GPU failed. Some of the slots may have been written.
    pub fn copy(&self, blocks: &[StraightBlock]) -> Result<Vec<u32>, CopyError> {
        match &self.0 {
            Copier::Cpu { memory, engine } => {
                let copy =
                    |block: &StraightBlock| memory.copy_to_engine(block.from, engine, block.to);
                blocks.iter().map(copy).collect()
            }
            #[cfg(feature = "cuda")]
            Copier::Gpu { copies, .. } => copies.copy(blocks),
        }
    }
}
