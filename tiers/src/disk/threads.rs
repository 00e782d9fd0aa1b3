//! Disk transfers by a pool of threads, for systems that forbid `io_uring`.

#![expect(unsafe_code, reason = "reads and writes slots")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::backend::Backend;
use crate::batch::{CopyThreads, ExecuteFn};
use crate::copy::{CopyError, CopyOp, Done, Route};
use crate::disk::DiskRegion;
use crate::disk::transfer::{self, DiskDirection, SlotTransfer, persistently};
use crate::error::{SetupError, SetupErrorKind};
use crate::memory::Memory;

/// `pread` and `pwrite`, one thread for each operation in flight.
#[derive(Debug)]
pub struct ThreadsBackend {
    routes: [Route; 2],
    threads: CopyThreads,
}

impl ThreadsBackend {
    /// Moves blocks between `memory` and `disk`, at most `depth` at a time.
    ///
    /// # Errors
    /// `Invalid`: the regions' blocks differ in size. `Unavailable`: no threads.
    pub fn new(
        memory: Arc<dyn Memory>,
        disk: Arc<DiskRegion>,
        depth: u32,
    ) -> Result<Self, SetupError> {
        transfer::check_fit(&*memory, &disk)?;
        let routes = transfer::routes(memory.tier());
        let execute: Arc<ExecuteFn> = Arc::new(move |op: &CopyOp, _| execute(op, &*memory, &disk));
        let threads =
            CopyThreads::start("kvbm-disk", depth as usize, 1, &execute).map_err(|error| {
                let message =
                    "cannot start disk threads; lower disk.queue_depth (DYN_KVBM_DISK_QUEUE_DEPTH)";
                SetupError::caused(SetupErrorKind::Unavailable, message, error)
            })?;
        Ok(Self { routes, threads })
    }
}

// SAFETY: every thread executes the operations that it took, one by one, with system calls that end
// before they return, and completes each right after; the closure of `execute` keeps the regions
// alive.
unsafe impl Backend for ThreadsBackend {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        self.threads.submit(batch, None, done);
    }
}

fn execute(op: &CopyOp, memory: &dyn Memory, disk: &DiskRegion) -> Result<(), CopyError> {
    let transfer = SlotTransfer::of(op, memory, disk)?;
    let file = disk.file(transfer.file);
    let moved = persistently(|| match transfer.direction {
        DiskDirection::Read => read(&transfer, file),
        DiskDirection::Write => write(&transfer, file),
    });
    transfer.outcome(moved)
}

fn read(transfer: &SlotTransfer, file: &File) -> std::io::Result<usize> {
    // SAFETY: a slot that exists, and the submitter promises that nothing else touches the
    // destination.
    let buffer = unsafe { &mut *transfer.memory.as_ptr() };
    file.read_at(buffer, transfer.offset)
}

fn write(transfer: &SlotTransfer, file: &File) -> std::io::Result<usize> {
    // SAFETY: a slot that exists, and the submitter promises that nothing writes the source.
    let buffer = unsafe { transfer.memory.as_ref() };
    file.write_at(buffer, transfer.offset)
}
