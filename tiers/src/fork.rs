//! What the children that this process forks must leave alone.
//!
//! Engines fork: workers, data loaders, probes of libraries. A child has a copy of every value
//! here, but none of the threads, not the memory that is kept from children, and its files and
//! locks on them are still the parent's.

#![expect(unsafe_code, reason = "a child forgets what its parent owns")]

use std::io;
use std::mem::{self, ManuallyDrop};
use std::ops::Deref;
use std::thread::{self, JoinHandle};

use crate::clock;

/// The process that made a value. In any other one its destructor must not join threads (they are
/// not there: it would wait for ever), unlock files (the parent would lose its lock), remove what
/// the parent uses, unmap memory that is not there (something else of the child's may have its
/// addresses), or close channels, whose locks a thread of the parent may have held at the moment of
/// the fork.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MakerProcess(u32);

impl MakerProcess {
    pub(crate) fn this_process() -> Self {
        Self(std::process::id())
    }

    pub(crate) fn is_this_process(self) -> bool {
        self.0 == std::process::id()
    }
}

/// What only the process that made it drops: the sending end of its threads' queue, or a mapping. A
/// forked child leaves it as it is.
#[derive(Debug)]
pub(crate) struct ProcessBound<T> {
    value: ManuallyDrop<T>,
    maker: MakerProcess,
}

impl<T> ProcessBound<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), maker: MakerProcess::this_process() }
    }

    /// Whether this process made it.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_here(&self) -> bool {
        self.maker.is_this_process()
    }
}

impl<T> Deref for ProcessBound<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for ProcessBound<T> {
    fn drop(&mut self) {
        if self.maker.is_this_process() {
            // SAFETY: it is dropped here only, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A thread that serves a value. Dropping it waits for its end, so what tells it to end goes first:
/// a field of the same value that stands before it, for one.
#[derive(Debug)]
pub(crate) struct ServiceThread {
    /// `None` only while dropping.
    handle: Option<JoinHandle<()>>,
    maker: MakerProcess,
}

impl ServiceThread {
    /// The system refuses where a process may have no more.
    pub(crate) fn spawn(
        name: impl Into<String>,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        Ok(Self { handle: Some(clock::spawn(name, work)?), maker: MakerProcess::this_process() })
    }

    /// Whether it runs in this process, and not in the parent of a forked child.
    pub(crate) fn is_here(&self) -> bool {
        self.maker.is_this_process()
    }
}

impl Drop for ServiceThread {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        if !self.is_here() {
            return mem::forget(handle);
        }
        let name = handle.thread().name().unwrap_or_default().to_owned();
        // A completion may have dropped the last handle of what it serves: a thread cannot wait for
        // itself.
        if handle.thread().id() != thread::current().id() && handle.join().is_err() {
            tracing::error!(name, "a thread died of a panic");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::Backend;
    use crate::memcpy::MemcpyBackend;
    use crate::testing::{fill_pattern, has_pattern, holds_in_a_child, host, order, run};

    #[test]
    fn a_child_drops_a_thread_pool_without_waiting() {
        let memory = Arc::new(host(2, 4096));
        let mut frames = memory.frames().unwrap();
        let (mut from, to) = (frames.take().unwrap(), frames.take().unwrap());
        fill_pattern(1, memory.write(&mut from).unwrap());
        let mut backend = Some(MemcpyBackend::new(vec![Arc::clone(&memory) as _], 2).unwrap());
        assert!(holds_in_a_child(|| {
            drop(backend.take());
            true
        }));
        let backend: &dyn Backend = backend.as_ref().unwrap();
        run(backend, vec![order(1, from.slot_ref(), to.slot_ref())]).remove(0).unwrap();
        assert!(has_pattern(1, memory.read(&to).unwrap()));
    }

    #[test]
    fn a_child_leaves_threads_and_their_queue_to_the_parent() {
        let (queue, orders) = crossbeam_channel::unbounded::<u32>();
        let (answer, answers) = std::sync::mpsc::channel();
        let work = move || orders.iter().for_each(|order| answer.send(order).unwrap());
        let thread = ServiceThread::spawn("kvbm-test", work).unwrap();
        let mut served = Some((ProcessBound::new(queue), thread));
        assert!(holds_in_a_child(|| {
            drop(served.take());
            true
        }));
        let (queue, thread) = served.unwrap();
        queue.send(7).unwrap();
        assert_eq!(answers.recv(), Ok(7), "the parent's go on");
        drop((queue, thread));
        assert!(answers.recv().is_err(), "and end with it");
    }
}
