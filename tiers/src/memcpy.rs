//! Copies between memory tiers.

use std::sync::Arc;

use crate::batch::{CopyThreads, Execute};
use crate::copy::{Backend, CopyOp, Done, Route};
use crate::error::{SetupError, SetupErrorKind};
use crate::memory::{Memories, Memory};

/// What a thread copies before it looks for the next work: enough to make the look negligible.
const GRAIN_BYTES: usize = 256 << 10;

/// A pool of threads that copies blocks between regions of memory, and within one.
#[derive(Debug)]
pub struct MemcpyBackend {
    routes: Vec<Route>,
    threads: CopyThreads,
}

impl MemcpyBackend {
    /// Copies among all of `regions` with `threads` threads (at least one).
    ///
    /// # Errors
    /// `Invalid`: two regions are of one tier, or their blocks differ in size. `Unavailable`: no threads.
    pub fn new(regions: Vec<Arc<dyn Memory>>, threads: usize) -> Result<Self, SetupError> {
        let grain = regions.first().map_or(1, |region| GRAIN_BYTES / region.block_bytes());
        let memories = Memories::new(regions)?;
        let routes = memories.routes();
        // SAFETY: executes submitted operations only, whose submitter answers for their slots.
        let copy: Arc<Execute> = Arc::new(move |op: &CopyOp| unsafe { memories.copy(op) });
        let threads = CopyThreads::start("kvbm-copy", threads, grain, &copy).map_err(|error| {
            let message =
                "cannot start copy threads; lower transfer.copy_threads (DYN_KVBM_TRANSFER_COPY_THREADS)";
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })?;
        Ok(Self { routes, threads })
    }
}

// SAFETY: every thread copies the operations that it took, one by one, and completes each right after;
// `Memories` keeps the regions alive and copies whole blocks between slots that exist.
unsafe impl Backend for MemcpyBackend {
    fn name(&self) -> &'static str {
        "memcpy"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        self.threads.submit(batch, done);
    }
}
