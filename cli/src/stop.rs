//! The user's wish to stop: Ctrl-C, or the signal that asks a process to end.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::output::CommandFailure;

/// A small runtime for what waits beside the work: signals, tickets.
pub(crate) fn runtime() -> Result<Runtime, CommandFailure> {
    Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("kvbm-cli")
        .enable_all()
        .build()
        .map_err(|error| CommandFailure::unusable(format!("cannot start a thread: {error}")))
}

/// Tells whether the user wants to stop, and lets waits end early.
#[derive(Clone, Debug)]
pub(crate) struct StopSignal(watch::Receiver<Option<u8>>);

impl StopSignal {
    /// From here on the first signal asks for a clean end; the second one ends the process where it
    /// is.
    pub(crate) fn on_signals(runtime: &Runtime) -> Result<Self, CommandFailure> {
        let _entered = runtime.enter();
        let unusable =
            |error| CommandFailure::unusable(format!("cannot listen to signals: {error}"));
        let mut interrupt = signal(SignalKind::interrupt()).map_err(unusable)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(unusable)?;
        let (raise, raised) = watch::channel(None);
        runtime.spawn(async move {
            loop {
                let number = tokio::select! {
                    _ = interrupt.recv() => SignalKind::interrupt(),
                    _ = terminate.recv() => SignalKind::terminate(),
                };
                let number = number.as_raw_value() as u8;
                if raise.borrow().is_some() {
                    std::process::exit(128 + i32::from(number));
                }
                raise.send_replace(Some(number));
            }
        });
        Ok(Self(raised))
    }

    /// An error once the user wants to stop.
    pub(crate) fn check(&self) -> Result<(), CommandFailure> {
        self.0.borrow().map_or(Ok(()), |signal| Err(CommandFailure::interrupted(signal)))
    }

    /// The outcome of `work`, or an error as soon as the user wants to stop.
    pub(crate) async fn or<T>(&self, work: impl Future<Output = T>) -> Result<T, CommandFailure> {
        let mut raised = self.0.clone();
        tokio::select! {
            biased;
            outcome = work => Ok(outcome),
            _ = raised.wait_for(Option::is_some) => {
                self.check()?;
                // Only a runtime that shuts down drops the sender.
                Err(CommandFailure::unexpected("the signal handler is gone"))
            }
        }
    }

    /// Waits until the user wants to stop.
    pub(crate) async fn asked(&self) {
        // An error: the runtime that listens to signals is gone.
        let _ = self.0.clone().wait_for(Option::is_some).await;
    }

    /// Lets `time` pass.
    pub(crate) fn pause(&self, time: Duration) -> Result<(), CommandFailure> {
        std::thread::sleep(time);
        self.check()
    }
}
