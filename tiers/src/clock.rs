//! Time and threads, from one place: clippy refuses the standard library's elsewhere.
//!
//! Media are judged by real time. A caller that wants another time for its own decisions, as a
//! replay does, has a clock of its own above this crate.

use std::io;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Now, for limits and for measuring: it never goes back, and does not follow the wall clock.
#[expect(clippy::disallowed_methods, reason = "the one place")]
pub fn now() -> Instant {
    Instant::now()
}

/// The wall clock, since 1970; zero before. It jumps: good for names, never for limits.
#[expect(clippy::disallowed_methods, reason = "the one place")]
pub fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Starts a named thread. The system refuses where a process may have no more.
#[expect(clippy::disallowed_methods, reason = "the one place")]
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    #[cfg(any(test, feature = "testing"))]
    crate::testing::end_at_panics();
    Builder::new().name(name.into()).spawn(work)
}
