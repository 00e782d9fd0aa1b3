//! Time, from one place.
//!
//! Policies and flush ages go by [`Clock::now_ms`], which a replay drives by its trace's timestamps. Hardware is
//! judged by [`Clock::uptime`], which is real time everywhere but in simulations of hardware.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Milliseconds since any origin, for policies and flush ages.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Now. May stand still or jump forward, never back.
    fn now_ms(&self) -> u64;

    /// Time since any origin, for time-outs and pauses: it passes although [`now_ms`](Self::now_ms) may not. The
    /// default is the time that the process has been running.
    fn uptime(&self) -> Duration {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed()
    }
}

/// The time that passes.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// A clock that somebody sets, such as the replay of a trace.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Moves it forward to `now_ms`; earlier times are ignored.
    pub fn advance_to(&self, now_ms: u64) {
        self.0.fetch_max(now_ms, Ordering::AcqRel);
    }
}

impl Clock for ManualClock {
    fn now_ms(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}
