//! Threads that work off batches of copies together.

use std::io;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender};

use crate::clock;
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done};
use crate::fork::Maker;

/// A pool of threads in which every thread takes the next few operations of the oldest batch until none is
/// left: a large batch occupies all threads, and a slow operation holds up nobody.
#[derive(Debug)]
pub(crate) struct CopyThreads {
    /// `None` once the pool is shutting down.
    queue: Option<Sender<Arc<Batch>>>,
    threads: Vec<JoinHandle<()>>,
    grain: usize,
    maker: Maker,
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
        let mut pool = Self { queue: Some(queue), threads: Vec::new(), grain, maker: Maker::this_process() };
        for number in 0..threads.max(1) {
            let (batches, execute) = (batches.clone(), Arc::clone(execute));
            let work = move || work(&batches, grain, &*execute);
            pool.threads.push(clock::spawn(format!("{name}-{number}"), work)?);
        }
        Ok(pool)
    }

    pub(crate) fn submit(&self, ops: Vec<CopyOp>, done: Done) {
        let helpers = ops.len().div_ceil(self.grain).min(self.threads.len());
        let batch = Arc::new(Batch { ops, done, next: AtomicUsize::new(0) });
        for _ in 0..helpers {
            // One message per helper and not per operation: each takes a grain of what is left when it comes, so
            // that a slow one holds up nobody.
            let sent = self.queue.as_ref().is_some_and(|queue| queue.send(Arc::clone(&batch)).is_ok());
            if !sent {
                // Panics end no thread, but if all were gone nobody else would complete the rest.
                batch.work(self.grain, &|_| Err(CopyError::new(CopyErrorKind::Refused, "copy threads died")));
            }
        }
    }
}

/// Finishes what was submitted.
impl Drop for CopyThreads {
    fn drop(&mut self) {
        if !self.maker.is_this_process() {
            return mem::forget((self.queue.take(), mem::take(&mut self.threads)));
        }
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
            let ended = rest.iter().take(grain).zip(from..).map(|(op, index)| (index, caught(op, execute)));
            self.done.complete_all(ended.collect());
        }
    }
}

/// The batch goes on whatever one operation does.
fn caught(op: &CopyOp, execute: &Execute) -> Result<(), CopyError> {
    catch_unwind(AssertUnwindSafe(|| execute(op))).unwrap_or_else(|_| {
        let message = format!("{} to {}: the copy panicked; please report this", op.from, op.to);
        Err(CopyError::new(CopyErrorKind::Io, message))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::copy::{SlotId, SlotRef, Tier};
    use crate::testing::order;

    /// Two threads that panic for the slot 1.
    fn pool() -> CopyThreads {
        let execute: Arc<Execute> = Arc::new(|op: &CopyOp| {
            assert!(op.from.slot != SlotId(1), "as the test wants");
            Ok(())
        });
        CopyThreads::start("test", 2, 2, &execute).unwrap()
    }

    fn ops() -> Vec<CopyOp> {
        let slot = |slot| SlotRef { tier: Tier::Host, slot: SlotId(slot), generation: 1 };
        (0..64).map(|n| order(n as usize, slot(n), slot(n))).collect()
    }

    #[test]
    fn a_copy_that_panics_is_an_error_and_the_rest_goes_on() {
        let pool = pool();
        for _ in 0..3 {
            let (report, reports) = mpsc::channel();
            pool.submit(ops(), Done::new(move |op, result| report.send((op, result)).unwrap()));
            let mut ended: Vec<_> = reports.into_iter().collect();
            ended.sort_unstable_by_key(|&(op, _)| op);
            assert_eq!(ended.len(), 64);
            for (op, result) in ended {
                let expected = if op == 1 { Err(CopyErrorKind::Io) } else { Ok(()) };
                assert_eq!(result.map_err(|error| error.kind()), expected);
            }
        }
    }

    #[test]
    fn a_report_that_panics_ends_neither_the_thread_nor_the_batch() {
        let (pool, panics) = (pool(), Done::panics());
        for _ in 0..3 {
            let (report, reports) = mpsc::channel();
            pool.submit(
                ops(),
                Done::new(move |op, _| {
                    assert!(op % 8 != 0, "as the test wants");
                    report.send(op).unwrap();
                }),
            );
            let deadline = Duration::from_secs(10);
            let ended = std::iter::from_fn(|| reports.recv_timeout(deadline).ok()).count();
            assert_eq!(ended, 64 - 8);
        }
        assert!(Done::panics() >= panics + 3 * 8);
    }
}
