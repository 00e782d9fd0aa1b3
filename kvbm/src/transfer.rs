//! Transfers as their callers see them: the answer to come of work that has been started.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::lease::Lease;

/// Stands for a transfer in progress: `await` it, [`wait`](Self::wait) for it on a thread, or
/// [`cancel`](Self::cancel) it. Dropping it cancels nothing: the hardware finishes, and the slots come back by
/// themselves.
#[must_use = "dropping a transfer loses the answer, not the work"]
pub struct Transfer<T> {
    state: State<T>,
    /// Ends it early.
    cancel: Option<Box<dyn FnOnce() + Send + Sync>>,
}

#[derive(Debug)]
enum State<T> {
    UnderWay(oneshot::Receiver<T>),
    /// It was never begun; the reason, until it is asked for.
    Refused(Option<Error>),
}

/// How a transfer ended.
#[derive(Debug)]
pub struct Transferred {
    /// Holds the chain; where the destination is concerned, as far as it is there now.
    pub lease: Lease,
    /// Leading blocks of the chain that the destination holds now.
    pub blocks: usize,
    /// Blocks that this transfer copied.
    pub copied: usize,
    /// Blocks that the lease holds but that are sooner computed again: see [`Match::worth_loading`].
    ///
    /// [`Match::worth_loading`]: crate::table::Match::worth_loading
    pub recompute: usize,
    /// Blocks that the destination does not think worth the room that they would take.
    pub declined: usize,
    /// Blocks that it found no room or no queue space for, or whose medium is left alone for now.
    pub refused: usize,
    /// Blocks whose copy failed, with those behind them.
    pub failed: usize,
}

impl<T> fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transfer")
    }
}

impl<T> Transfer<T> {
    pub(crate) const fn new(answer: oneshot::Receiver<T>) -> Self {
        Self { state: State::UnderWay(answer), cancel: None }
    }

    /// Of work that was not begun.
    pub(crate) const fn failed(error: Error) -> Self {
        Self { state: State::Refused(Some(error)), cancel: None }
    }

    /// With what ends it early.
    pub(crate) fn cancelled_by(self, cancel: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { cancel: Some(Box::new(cancel)), ..self }
    }

    /// Ends it early: blocks that have not arrived do not come, what waits in a queue is not copied, and the answer
    /// counts them as failed. Copies that a medium works on end by themselves.
    pub fn cancel(&mut self) {
        if let Some(cancel) = self.cancel.take() {
            cancel();
        }
    }

    /// Blocks the thread until the work has ended. Not for use inside an async runtime.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) if the manager was shut down first;
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if what was asked for makes no sense: a lease of another
    /// manager.
    pub fn wait(self) -> Result<T> {
        match self.state {
            State::UnderWay(answer) => answer.blocking_recv().map_err(|_| Error::closed()),
            State::Refused(error) => Err(error.unwrap_or_else(Error::closed)),
        }
    }
}

impl<T> Future for Transfer<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.state {
            State::UnderWay(answer) => Pin::new(answer).poll(context).map_err(|_| Error::closed()),
            State::Refused(error) => Poll::Ready(Err(error.take().unwrap_or_else(Error::closed))),
        }
    }
}
