//! Transforms of blocks on the GPU.

use std::sync::{Mutex, PoisonError};

use super::driver::{CudaStream, Gpu, KernelTable};
use super::kernels::{CopyKernels, KernelOrigin};
use crate::copy::{CopyError, CopyErrorKind};
use crate::error::SetupError;
use crate::transform::Transform;

/// Executes [`Transform`]s in the memory of a GPU, in a stream of its own.
#[derive(Debug)]
pub struct Rearranger {
    kernels: CopyKernels,
    /// Taken by one caller at a time, with the table that its kernel reads.
    stream: Mutex<(CudaStream, KernelTable<(u32, u32)>)>,
}

impl Rearranger {
    /// Blocks that one launch takes.
    const TABLE: usize = 4096;

    /// Loads the kernels.
    ///
    /// # Errors
    /// `Unavailable`: the GPU does not take them, or has no memory left.
    pub fn new(gpu: &Gpu) -> Result<Self, SetupError> {
        let (kernels, stream) = (CopyKernels::load(gpu)?, CudaStream::new(gpu)?);
        let table = KernelTable::new(gpu, Self::TABLE)?;
        Ok(Self { kernels, stream: Mutex::new((stream, table)) })
    }

    /// Where the kernels come from.
    pub const fn origin(&self) -> &KernelOrigin {
        self.kernels.origin()
    }

    /// Copies the blocks `(source, destination)` from the array at address `from` to that at `to`,
    /// and waits for it.
    ///
    /// # Errors
    /// `Refused`: there is no such block. `Io`: the GPU failed.
    ///
    /// # Safety
    /// The arrays are of the transform's layouts, disjoint, and in this GPU's memory or mapped for
    /// it; nothing else writes the source or touches the destination meanwhile.
    pub unsafe fn apply(
        &self,
        transform: &Transform,
        (from, to): (u64, u64),
        blocks: &[(u32, u32)],
    ) -> Result<(), CopyError> {
        transform
            .check(blocks)
            .map_err(|error| CopyError::new(CopyErrorKind::Refused, error.to_string()))?;
        let plan = transform.with_long_rows().plan();
        let mut turn = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let (stream, table) = &mut *turn;
        let outcome = stream.gpu().inside(|| {
            blocks.chunks(Self::TABLE).try_for_each(|some| {
                // SAFETY: the table stays until the wait below has ended; else as the caller
                // promises.
                unsafe {
                    let pairs = table.fill(stream, some)?;
                    self.kernels.transform(stream, (from, to), pairs, some.len(), plan)?;
                }
                stream.wait()
            })
        });
        outcome.map_err(|error| {
            CopyError::caused(
                CopyErrorKind::Io,
                format!("CUDA: a transform failed: {error}"),
                error,
            )
        })
    }
}
