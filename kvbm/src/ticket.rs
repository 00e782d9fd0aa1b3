//! Tickets: the answer to come of work that has been started.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use crate::error::{Error, Result};

/// Stands for work in progress: `await` it, or [`wait`](Self::wait) for it on a thread. Dropping a ticket
/// cancels nothing: the hardware finishes, and the titles to its slots come back by themselves.
#[derive(Debug)]
#[must_use = "dropping a ticket loses the answer, not the work"]
pub struct Ticket<T>(State<T>);

#[derive(Debug)]
enum State<T> {
    UnderWay(oneshot::Receiver<T>),
    /// It was never begun; the reason, until it is asked for.
    Refused(Option<Error>),
}

impl<T> Ticket<T> {
    pub(crate) const fn new(answer: oneshot::Receiver<T>) -> Self {
        Self(State::UnderWay(answer))
    }

    /// Of work that was not begun.
    pub(crate) const fn failed(error: Error) -> Self {
        Self(State::Refused(Some(error)))
    }

    /// Blocks the thread until the work has ended. Not for use inside an async runtime.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) if the manager was shut down first;
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if what was asked for makes no sense: a lease of another
    /// manager.
    pub fn wait(self) -> Result<T> {
        match self.0 {
            State::UnderWay(answer) => answer.blocking_recv().map_err(|_| Error::closed()),
            State::Refused(error) => Err(error.unwrap_or_else(Error::closed)),
        }
    }
}

impl<T> Future for Ticket<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            State::UnderWay(answer) => Pin::new(answer).poll(context).map_err(|_| Error::closed()),
            State::Refused(error) => Poll::Ready(Err(error.take().unwrap_or_else(Error::closed))),
        }
    }
}
