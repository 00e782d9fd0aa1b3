//! Disk transfers: through a ring of the kernel's, and by a pool of threads for systems that forbid
//! `io_uring`.

#![expect(unsafe_code, reason = "reads and writes slots")]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crossbeam_channel::Sender;
use rustix::event::EventfdFlags;

use crate::backend::Backend;
use crate::batch::{CopyThreads, ExecuteFn, Grains};
use crate::copy::{CopyError, CopyOp, Done, Route};
use crate::disk::DiskRegion;
use crate::disk::ring::{self, DiskRing, RingBatch};
use crate::disk::transfer::{self, DiskDirection, SlotTransfer, persistently};
use crate::error::{SetupError, SetupErrorKind};
use crate::fork::{ProcessBound, ServiceThread};
use crate::memory::Memory;

/// `io_uring`, served by a thread of its own: files and memory are registered once, and the only
/// system call in the steady state submits and waits at the same time.
#[derive(Debug)]
pub struct UringBackend {
    routes: [Route; 2],
    /// `None` once the backend is shutting down.
    batches: Option<ProcessBound<Sender<RingBatch>>>,
    wake: Arc<OwnedFd>,
    thread: ServiceThread,
}

impl UringBackend {
    /// Moves blocks between `memory` and `disk`, at most `depth` (1–4096) at a time; more wait
    /// inside.
    ///
    /// # Errors
    /// `Invalid`: the regions' blocks differ in size or exceed 1 GiB. `Unavailable`: see
    /// [`Self::probe`].
    pub fn new(
        memory: Arc<dyn Memory>,
        disk: Arc<DiskRegion>,
        depth: u32,
    ) -> Result<Self, SetupError> {
        transfer::check_fit(&*memory, &disk)?;
        if memory.stride() > ring::MAX_BUFFER {
            let message = format!(
                "blocks of {} bytes: io_uring moves at most 1 GiB at once",
                memory.block_bytes()
            );
            return Err(SetupError::invalid(message));
        }
        let wake = Arc::new(
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(refused)?,
        );
        let routes = transfer::routes(memory.tier());
        let (batches, incoming) = crossbeam_channel::unbounded();
        let (ready, opened) = crossbeam_channel::bounded(1);
        let ring_wake = Arc::clone(&wake);
        // The kernel wants the ring to be made by the thread that uses it.
        let serve = move || match DiskRing::open(memory, disk, depth, ring_wake) {
            Ok(ring) => {
                let _ = ready.send(Ok(()));
                ring.serve(&incoming);
            }
            Err(error) => {
                let _ = ready.send(Err(error));
            }
        };
        let thread = ServiceThread::spawn("kvbm-ring", serve).map_err(refused)?;
        let backend = Self { routes, batches: Some(ProcessBound::new(batches)), wake, thread };
        match opened.recv() {
            Ok(Ok(())) => Ok(backend),
            Ok(Err(error)) => Err(refused(error)),
            Err(_) => Err(SetupError::unavailable("the ring thread died at start-up")),
        }
    }

    /// Whether this process may use `io_uring`.
    ///
    /// # Errors
    /// `Unavailable`, with the reason: an old kernel, a container's seccomp filter,
    /// `kernel.io_uring_disabled`.
    pub fn probe() -> Result<(), SetupError> {
        ring::probe().map_err(refused)
    }

    fn wake(&self) {
        if let Err(error) = rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) {
            tracing::error!(%error, "cannot wake the ring thread");
        }
    }
}

// SAFETY: the ring thread completes an operation when the kernel has reported its end, and ends
// itself only when all have; it keeps the regions alive and moves whole slots that exist.
unsafe impl Backend for UringBackend {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, ops: Vec<CopyOp>, done: Done) {
        let batch = RingBatch { ops, done };
        let Some(batches) = &self.batches else { unreachable!("taken in drop only") };
        match batches.send(batch) {
            Ok(()) => self.wake(),
            Err(unsent) => unsent.0.refuse(),
        }
    }
}

/// Finishes what was submitted.
impl Drop for UringBackend {
    fn drop(&mut self) {
        self.batches = None;
        if self.thread.is_here() {
            self.wake();
        }
    }
}

impl RingBatch {
    /// The ring thread is gone, which is a bug; but no operation may be lost.
    fn refuse(self) {
        self.done.refuse(0..self.ops.len(), "the ring thread died");
    }
}

fn refused(error: impl Into<std::io::Error>) -> SetupError {
    let error = error.into();
    let message = format!(
        "io_uring is not available ({error}); \
         set disk.backend (DYN_KVBM_DISK_BACKEND) to auto or threads, or allow it (kernel.io_uring_disabled, seccomp)"
    );
    SetupError::caused(SetupErrorKind::Unavailable, message, error)
}

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
        let each = Grains { taken: 1, reported: 1 };
        let threads =
            CopyThreads::start("kvbm-disk", depth as usize, each, &execute).map_err(|error| {
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
