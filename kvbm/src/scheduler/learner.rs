//! Fits of policies, on a thread of their own, off the path of requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvbm_policies::Upkeep;

use crate::sync::{AtomicUsize, JoinHandle, Mutex, spawn};
use crate::table::SharedTable;

/// Runs fits of reuse models, one round at a time. A fit of a large tier takes most of a second; on
/// the flushing thread it would hold up flushes.
#[derive(Debug, Default)]
pub(super) struct FitThread {
    /// Rounds under way: 0 or 1.
    running: Arc<AtomicUsize>,
    thread: Mutex<Option<JoinHandle>>,
}

/// Ends a round, even one that panics: it must not be the last.
struct LearningRound(Arc<AtomicUsize>);

impl Drop for LearningRound {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

impl FitThread {
    /// Lets policies learn. They collect their data in steps, between which others get the table.
    pub(super) fn learn(&self, table: &SharedTable) {
        if self.is_busy() {
            return;
        }
        let mut work = Vec::new();
        while table.lock().upkeep(&mut work) {}
        self.start(work);
    }

    /// Whether it has work to do. Policies are asked for more only when it has none.
    fn is_busy(&self) -> bool {
        self.running.load(Ordering::Acquire) > 0
    }

    /// Does `work` on its thread, unless it is busy. Policies ask again for work that is not done.
    fn start(&self, work: Vec<Upkeep>) {
        if work.is_empty() || self.running.swap(1, Ordering::AcqRel) > 0 {
            return;
        }
        let round = LearningRound(Arc::clone(&self.running));
        let thread = spawn("kvbm-learning", move || {
            let _ends_with_the_work = round;
            work.into_iter().for_each(|work| work());
        });
        match thread {
            // The earlier thread has ended, or it would be busy.
            Ok(thread) => drop(self.thread.lock().replace(thread)),
            // The round ended when the closure was dropped. The policy asks again when the work is
            // due next.
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread: policies do not learn now");
            }
        }
    }

    /// Waits for what is under way.
    pub(super) fn join(&self) {
        let thread = self.thread.lock().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("learning panicked: please report it with the message above");
        }
    }
}

impl Drop for FitThread {
    fn drop(&mut self) {
        self.join();
    }
}
