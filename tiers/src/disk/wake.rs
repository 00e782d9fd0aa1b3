//! How a ring's thread learns that there is work while it sleeps in the kernel.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::Fd;
use io_uring::{opcode, squeue};

/// An event that the ring polls. From Linux 5.13 on one poll reports every write to the event,
/// which is then never read. Older kernels end such a poll at once with EINVAL: for them it is
/// armed anew each time, after the event was read, since a poll of an event that was not would end
/// at once as well.
#[derive(Debug)]
pub(super) struct RingWake {
    event: Arc<OwnedFd>,
    armed: bool,
    multishot: bool,
}

impl RingWake {
    pub(super) const fn new(event: Arc<OwnedFd>) -> Self {
        Self { event, armed: false, multishot: true }
    }

    /// As on a kernel that knows no multishot polls.
    #[cfg(test)]
    pub(super) const fn one_shot(event: Arc<OwnedFd>) -> Self {
        Self { event, armed: false, multishot: false }
    }

    /// The poll to be submitted, if none is armed.
    pub(super) fn arm(&mut self) -> Option<squeue::Entry> {
        if self.armed {
            return None;
        }
        self.armed = true;
        let poll = opcode::PollAdd::new(Fd(self.event.as_raw_fd()), libc::POLLIN as u32);
        Some(poll.multi(self.multishot).build())
    }

    /// The poll reported `result`; `more`: it is still armed.
    pub(super) fn polled(&mut self, result: i32, more: bool) {
        self.armed = more;
        match (result < 0, self.multishot) {
            (false, true) => {}
            (false, false) => self.read(),
            (true, true) => {
                tracing::info!(
                    errno = -result,
                    "this kernel has no multishot polls (Linux 5.13 has)"
                );
                self.multishot = false;
            }
            (true, false) => {
                // Nothing else wakes the thread: look once a millisecond rather than never, or all
                // the time.
                tracing::warn!(
                    errno = -result,
                    "the ring cannot poll its wake-up event; trying again"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// What is written from here on ends the next poll.
    fn read(&self) {
        if let Err(error) = rustix::io::read(&self.event, &mut [0; 8])
            && error != rustix::io::Errno::AGAIN
        {
            tracing::warn!(%error, "cannot read the ring's wake-up event");
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::EventfdFlags;

    use super::*;

    #[test]
    fn without_multishot_polls_each_wake_up_takes_one() {
        let event =
            rustix::event::eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let mut wake = RingWake::new(Arc::new(event));
        assert!(wake.arm().is_some() && wake.arm().is_none());
        wake.polled(-libc::EINVAL, false);
        assert!(!wake.multishot && wake.arm().is_some());
        wake.polled(libc::POLLIN.into(), false);
        let unread = rustix::io::read(&wake.event, &mut [0; 8]);
        assert_eq!(unread, Err(rustix::io::Errno::AGAIN), "the next poll would end at once");
        assert!(wake.arm().is_some() && wake.arm().is_none());
    }

    #[test]
    fn a_multishot_poll_is_rearmed_only_when_it_ended() {
        let event =
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let mut wake = RingWake::new(Arc::new(event));
        assert!(wake.arm().is_some());
        wake.polled(libc::POLLIN.into(), true);
        assert!(wake.arm().is_none());
        wake.polled(libc::POLLIN.into(), false);
        assert!(wake.arm().is_some() && wake.multishot);
    }
}
