//! Requests at the times that a trace gives them.

use std::time::{Duration, Instant};

use kvbm_policies::Request;
use kvbm_tiers::clock;

use crate::stop::StopSignal;
use crate::trace::TraceError;

/// Hands out each request when its timestamp says, `speed` times as fast as the trace was recorded.
/// One that is asked for too late comes at once: the replay catches up.
#[derive(Debug)]
pub(crate) struct PacedIter<I> {
    requests: I,
    speed: f64,
    stop: StopSignal,
    /// When the first request came, and its timestamp.
    origin: Option<(Instant, u64)>,
}

impl<I> PacedIter<I> {
    pub(crate) const fn new(requests: I, speed: f64, stop: StopSignal) -> Self {
        Self { requests, speed, stop, origin: None }
    }

    fn wait_for(&mut self, request: &Request) {
        /// Time until a wish to stop is noticed.
        const LOOK: Duration = Duration::from_millis(100);
        let (start, first_ms) = *self.origin.get_or_insert((clock::now(), request.timestamp_ms));
        let due = due_after(request.timestamp_ms.saturating_sub(first_ms), self.speed);
        while let Some(left) = due.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            // The taker of the request says that it was interrupted.
            if self.stop.pause(left.min(LOOK)).is_err() {
                return;
            }
        }
    }
}

fn due_after(trace_ms: u64, speed: f64) -> Duration {
    Duration::try_from_secs_f64(trace_ms as f64 / 1e3 / speed).unwrap_or(Duration::MAX)
}

impl<I: Iterator<Item = Result<Request, TraceError>>> Iterator for PacedIter<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.requests.next()?;
        if let Ok(request) = &next {
            self.wait_for(request);
        }
        Some(next)
    }
}

/// How many times as fast as recorded.
pub(crate) fn parse_speed(text: &str) -> Result<f64, String> {
    let speed = text.parse().ok().filter(|&speed: &f64| speed.is_finite() && speed > 0.0);
    speed.ok_or_else(|| {
        "a speed is a number above 0: 1 as recorded, 10 ten times as fast".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_the_trace_shrink_with_the_speed() {
        assert_eq!(due_after(10_000, 1.0), Duration::from_secs(10));
        assert_eq!(due_after(10_000, 20.0), Duration::from_millis(500));
        assert_eq!(due_after(u64::MAX, 1e-9), Duration::MAX);
    }

    #[test]
    fn a_speed_is_above_nothing() {
        assert_eq!(parse_speed("0.5"), Ok(0.5));
        for text in ["0", "-1", "inf", "NaN", "fast"] {
            assert!(parse_speed(text).is_err(), "{text}");
        }
    }
}
