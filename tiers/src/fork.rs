//! What the children that this process forks must leave alone.
//!
//! Engines fork: workers, data loaders, probes of libraries. A child has a copy of every value here, but none of the
//! threads, not the memory that is kept from children, and its files and locks on them are still the parent's.

/// The process that made a value. In any other one its destructor must not join threads (they are not there: it
/// would wait for ever), unlock files (the parent would lose its lock), remove what the parent uses, unmap memory
/// that is not there (something else of the child's may have its addresses), or close channels, whose locks a
/// thread of the parent may have held at the moment of the fork.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maker(u32);

impl Maker {
    pub(crate) fn this_process() -> Self {
        Self(std::process::id())
    }

    pub(crate) fn is_this_process(self) -> bool {
        self.0 == std::process::id()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use crate::copy::Backend;
    use crate::memcpy::MemcpyBackend;
    use crate::testing::{fill_pattern, has_pattern, host, order, run};

    /// Whether `child`, called in a forked copy of this process, returns true within ten seconds.
    pub(crate) fn holds_in_a_child(child: impl FnOnce() -> bool) -> bool {
        Child::fork(child).held()
    }

    /// A forked copy of this process.
    pub(crate) struct Child(libc::pid_t);

    impl Child {
        /// The child should do little: other threads of this process may have held locks when it was forked.
        pub(crate) fn fork(child: impl FnOnce() -> bool) -> Self {
            // SAFETY: the child has its own copy of all memory and leaves with `_exit`, so nothing runs twice.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                let held = catch_unwind(AssertUnwindSafe(child)).unwrap_or(false);
                // SAFETY: ends the child without running destructors or handlers of the parent's.
                unsafe { libc::_exit(i32::from(!held)) };
            }
            assert!(pid > 0, "no fork: {}", std::io::Error::last_os_error());
            Self(pid)
        }

        /// Whether it returned true within ten seconds.
        pub(crate) fn held(self) -> bool {
            let (deadline, mut status) = (Instant::now() + Duration::from_secs(10), 0);
            loop {
                // SAFETY: a child of ours that nobody else waits for, and a place for its status.
                if unsafe { libc::waitpid(self.0, &raw mut status, libc::WNOHANG) } == self.0 {
                    return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
                }
                if Instant::now() > deadline {
                    // SAFETY: a child of ours, not waited for yet.
                    unsafe { libc::kill(self.0, libc::SIGKILL) };
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn a_child_drops_a_pool_of_threads_without_waiting_for_it() {
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
}
