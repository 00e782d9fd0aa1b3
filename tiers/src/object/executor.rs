//! The threads on which the store's client runs, so that callers need no asynchronous runtime.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use crossbeam_channel::bounded;
use futures::future::Either;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;

use crate::error::{SetupError, SetupErrorKind};

/// Enough to keep a fast link and one decryption going: the copies to files run on threads of their
/// own.
const WORKERS: usize = 2;

const THREAD_NAME: &str = "kvbm-object";

/// A small tokio runtime that may be used and dropped from any thread, also from one of another
/// runtime.
#[derive(Debug)]
pub(super) struct StoreRuntime {
    /// `None` only while dropping.
    runtime: Option<Runtime>,
    handle: Handle,
}

impl StoreRuntime {
    pub(super) fn start() -> Result<Self, SetupError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .thread_name(THREAD_NAME)
            .enable_all()
            .build()
            .map_err(|e| {
                let message =
                    "cannot start the threads of the object tier: raise the limit on processes";
                SetupError::caused(SetupErrorKind::Unavailable, message, e)
            })?;
        Ok(Self { handle: runtime.handle().clone(), runtime: Some(runtime) })
    }

    /// Whether this thread belongs to an executor, and so must not wait for one.
    pub(super) fn is_own_thread() -> bool {
        std::thread::current().name() == Some(THREAD_NAME)
    }

    /// Runs `task` in the background.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.handle.spawn(task);
    }

    /// Runs `task` and waits for it on the calling thread; `None`: it did not end within `limit`.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        limit: Duration,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        self.caller().wait(limit, task)
    }

    /// For a caller that may outlive this, and gets no answers then.
    pub(super) fn caller(&self) -> TaskCaller {
        TaskCaller(self.handle.clone())
    }
}

/// Has tasks run by an executor, and waits for them.
#[derive(Clone, Debug)]
pub(super) struct TaskCaller(Handle);

impl TaskCaller {
    /// As [`StoreRuntime::wait`]. Not `block_on`, which panics on a thread that belongs to a
    /// runtime.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        limit: Duration,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (send, receive) = bounded(1);
        self.0.spawn(async move {
            if let Ok(output) = tokio::time::timeout(limit, task).await {
                let _ = send.send(output);
            }
        });
        // The task's own time limit wakes this one: the sender goes with the task.
        receive.recv().ok()
    }
}

impl Drop for StoreRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// What is under way, so that closing can wait for it, and it can hurry when closing waits.
#[derive(Debug, Default)]
pub(super) struct WorkInProgress(watch::Sender<bool>);

impl WorkInProgress {
    /// A ticket to hold while at work.
    pub(super) fn ticket(&self) -> WorkTicket {
        WorkTicket(self.0.subscribe())
    }

    /// Asks all tasks to come to an end.
    pub(super) fn hurry(&self) {
        self.0.send_replace(true);
    }

    /// How many are at work.
    pub(super) fn count(&self) -> usize {
        self.0.receiver_count()
    }

    /// Waits until no task is at work.
    pub(super) async fn ended(&self) {
        self.0.closed().await;
    }
}

/// Holding it means to be at work.
#[derive(Debug)]
pub(super) struct WorkTicket(watch::Receiver<bool>);

impl WorkTicket {
    /// Runs the work, but stops once closing waits: then `None`, and the rest is dropped.
    pub(super) async fn unless_hurried<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let hurry = self.0.wait_for(|hurry| *hurry);
        match futures::future::select(pin!(hurry), pin!(work)).await {
            Either::Left(_) => None,
            Either::Right((done, _)) => Some(done),
        }
    }

    /// Sleeps, but not when closing waits. Returns whether it does.
    pub(super) async fn sleep(&mut self, time: Duration) -> bool {
        tokio::time::timeout(time, self.0.wait_for(|hurry| *hurry)).await.is_ok()
    }
}
