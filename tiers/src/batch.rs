//! Threads that work off batches of copies together.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender};

use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done};

/// A pool of threads in which every thread takes the next few operations of the oldest batch until none is
/// left: a large batch occupies all threads, and a slow operation holds up nobody.
#[derive(Debug)]
pub(crate) struct CopyThreads {
    /// `None` once the pool is shutting down.
    queue: Option<Sender<Arc<Batch>>>,
    threads: Vec<JoinHandle<()>>,
    grain: usize,
}

/// Executes one operation, to its end.
pub(crate) type Execute = dyn Fn(&CopyOp) -> Result<(), CopyError> + Send + Sync;

struct Batch {
    ops: Vec<CopyOp>,
    done: Done,
    next: AtomicUsize,
}

impl CopyThreads {
    /// `grain`: how many operations a thread takes at a time.
    pub(crate) fn start(
        name: &str,
        threads: usize,
        grain: usize,
        execute: &Arc<Execute>,
    ) -> io::Result<Self> {
        let (queue, batches) = crossbeam_channel::unbounded();
        let grain = grain.max(1);
        let mut pool = Self { queue: Some(queue), threads: Vec::new(), grain };
        for number in 0..threads.max(1) {
            let (batches, execute) = (batches.clone(), Arc::clone(execute));
            let thread = thread::Builder::new().name(format!("{name}-{number}"));
            pool.threads.push(thread.spawn(move || work(&batches, grain, &*execute))?);
        }
        Ok(pool)
    }

    pub(crate) fn submit(&self, ops: Vec<CopyOp>, done: Done) {
        let helpers = ops.len().div_ceil(self.grain).min(self.threads.len());
        let batch = Arc::new(Batch { ops, done, next: AtomicUsize::new(0) });
        for _ in 0..helpers {
            let sent = self.queue.as_ref().is_some_and(|queue| queue.send(Arc::clone(&batch)).is_ok());
            if !sent {
                // Every thread died of a panic in `execute` or `done`: nobody else will complete the rest.
                batch.work(self.grain, &|_| Err(CopyError::new(CopyErrorKind::Refused, "copy threads died")));
            }
        }
    }
}

/// Finishes what was submitted.
impl Drop for CopyThreads {
    fn drop(&mut self) {
        self.queue = None;
        let own = thread::current().id();
        // A completion may have dropped the last handle of the pool: a thread cannot wait for itself.
        for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != own) {
            if thread.join().is_err() {
                tracing::error!("a copy thread died of a panic");
            }
        }
    }
}

fn work(batches: &Receiver<Arc<Batch>>, grain: usize, execute: &Execute) {
    for batch in batches {
        batch.work(grain, execute);
    }
}

impl Batch {
    fn work(&self, grain: usize, execute: &Execute) {
        loop {
            let from = self.next.fetch_add(grain, Ordering::Relaxed);
            let Some(rest) = self.ops.get(from..) else { return };
            if rest.is_empty() {
                return;
            }
            for (index, op) in rest.iter().enumerate().take(grain) {
                self.done.complete(from + index, execute(op));
            }
        }
    }
}
