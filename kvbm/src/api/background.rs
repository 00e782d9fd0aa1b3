//! The background thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use crate::api::lease::PinnedChains;
use crate::error::{Error, ErrorKind, Result};
use crate::scheduler::Core;
use crate::sync::{JoinHandle, spawn};

/// The thread that flushes, and gives up overdue copies.
pub(super) struct BackgroundThreads {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle>,
    core: Arc<Core>,
}

impl BackgroundThreads {
    /// How often it looks, unless it is woken.
    const PERIOD: Duration = Duration::from_millis(20);

    pub(super) fn start(core: &Arc<Core>, pinned: &Arc<PinnedChains>) -> Result<Self> {
        let (wake, woken) = sync_channel(1);
        core.set_waker(Some(wake.clone()));
        let (worker, pinned) = (Arc::clone(core), Arc::clone(pinned));
        let thread =
            spawn("kvbm-background", move || run(&worker, &pinned, &woken)).map_err(|error| {
                Error::caused(ErrorKind::Unavailable, "cannot start a thread", error)
            })?;
        Ok(Self { stop: Some(wake), thread: Some(thread), core: Arc::clone(core) })
    }
}

fn run(core: &Arc<Core>, pinned: &PinnedChains, woken: &Receiver<()>) {
    loop {
        match woken.recv_timeout(BackgroundThreads::PERIOD) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => {
                // Flushing must go on even if a policy or a backend panics.
                let round = AssertUnwindSafe(|| {
                    pinned.expire(core.now_ms());
                    pinned.end_past(core.namespace());
                    core.tick();
                });
                if catch_unwind(round).is_err() {
                    core.metrics().background_panicked();
                    tracing::error!(
                        "a round of background work panicked: please report it with the message above"
                    );
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

impl Drop for BackgroundThreads {
    fn drop(&mut self) {
        self.core.set_waker(None);
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
        self.core.join_learner();
    }
}
