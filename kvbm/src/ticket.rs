//! Tickets: the answer to come of work that has been started.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use crate::error::{Error, ErrorKind, Result};

/// Stands for work in progress: `await` it, or [`wait`](Self::wait) for it on a thread. Dropping a ticket
/// cancels nothing: the hardware finishes, and the titles to its slots come back by themselves.
#[derive(Debug)]
#[must_use = "dropping a ticket loses the answer, not the work"]
pub struct Ticket<T>(oneshot::Receiver<T>);

impl<T> Ticket<T> {
    pub(crate) const fn new(answer: oneshot::Receiver<T>) -> Self {
        Self(answer)
    }

    /// Blocks the thread until the work has ended. Not for use inside an async runtime.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] if the manager was shut down first.
    pub fn wait(self) -> Result<T> {
        self.0.blocking_recv().map_err(closed)
    }
}

fn closed(_: oneshot::error::RecvError) -> Error {
    Error::new(ErrorKind::Closed, "the block manager was shut down before the transfer ended")
}

impl<T> Future for Ticket<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map_err(closed)
    }
}
