//! The pauses between attempts, and what is said of them.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::gateway::EtcdFailure;

const SHORTEST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(5);
/// What fails after this long fails anew.
const QUIET: Duration = Duration::from_secs(10);

/// Attempts at something that may fail. An outage is said once, and so is its end.
#[derive(Debug)]
pub(super) struct Retry {
    /// What is attempted, in a sentence that goes on with why it failed.
    attempt: &'static str,
    is_failing: bool,
    pause: Duration,
    last_pause_ended: Instant,
}

impl Retry {
    pub(super) fn new(attempt: &'static str) -> Self {
        let last_pause_ended = Instant::now();
        Self { attempt, is_failing: false, pause: SHORTEST, last_pause_ended }
    }

    /// It works.
    pub(super) fn worked(&mut self) {
        if std::mem::take(&mut self.is_failing) {
            tracing::info!("etcd answers again");
        }
    }

    /// It failed: waits, from 0.2 to 5 seconds, until it may be attempted again.
    ///
    /// The pause grows until it worked for a while. Each is cut at random by up to a half, since
    /// all workers of a cluster notice at once that etcd is away.
    pub(super) async fn failed(&mut self, failure: &EtcdFailure) {
        if !std::mem::replace(&mut self.is_failing, true) {
            tracing::warn!("{}: {failure}; this is tried again until it works", self.attempt);
        }
        if self.last_pause_ended.elapsed() > QUIET {
            self.pause = SHORTEST;
        }
        sleep(self.pause.mul_f64(fastrand::f64().mul_add(-0.5, 1.0))).await;
        self.pause = (self.pause * 2).min(LONGEST);
        self.last_pause_ended = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn pause(retry: &mut Retry) -> Duration {
        let began = Instant::now();
        retry.failed(&EtcdFailure::TooLarge).await;
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_to_five_seconds_until_it_works_again() {
        let mut retry = Retry::new("it cannot be done");
        for _ in 0..2 {
            for whole in [200, 400, 800, 1_600, 3_200, 5_000, 5_000, 5_000] {
                let (whole, pause) = (Duration::from_millis(whole), pause(&mut retry).await);
                // A sleep ends up to a millisecond late.
                assert!(
                    pause >= whole / 2 && pause <= whole + Duration::from_millis(1),
                    "{pause:?}"
                );
            }
            retry.worked();
            assert!(pause(&mut retry).await >= LONGEST / 2, "it did not work for long");
            retry.worked();
            sleep(QUIET + SHORTEST).await;
        }
    }
}
