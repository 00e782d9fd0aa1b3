//! Children of the test's process: engines fork, and a child's destructors must leave the parent's
//! things alone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::clock;

/// Whether `child`, called in a forked copy of this process, returns true within a minute.
pub fn holds_in_a_child(child: impl FnOnce() -> bool) -> bool {
    Child::fork(child).held()
}

/// A forked copy of this process.
#[derive(Debug)]
pub struct Child(libc::pid_t);

impl Child {
    /// Forks. The child should do little: other threads of this process may have held locks when it
    /// was forked.
    pub fn fork(child: impl FnOnce() -> bool) -> Self {
        // SAFETY: the child has its own copy of all memory and leaves with `_exit`, so nothing runs
        // twice.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let held = catch_unwind(AssertUnwindSafe(child)).unwrap_or(false);
            // SAFETY: ends the child without running destructors or handlers of the parent's.
            unsafe { libc::_exit(i32::from(!held)) };
        }
        assert!(pid > 0, "no fork: {}", std::io::Error::last_os_error());
        Self(pid)
    }

    /// Whether it returned true within a minute.
    pub fn held(self) -> bool {
        let (deadline, mut status) = (clock::now() + Duration::from_mins(1), 0);
        loop {
            // SAFETY: a child of ours that nothing else waits for, and a place for its status.
            if unsafe { libc::waitpid(self.0, &raw mut status, libc::WNOHANG) } == self.0 {
                return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
            }
            if clock::now() > deadline {
                // SAFETY: a child of ours, not waited for yet.
                unsafe { libc::kill(self.0, libc::SIGKILL) };
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
