//! Time, from one place.
//!
//! Policies and flush ages use the [`Clock`], which a replay drives by its trace's timestamps. Time-outs of
//! hardware use real time, always.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Milliseconds since any origin, for policies and flush ages.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Now. May stand still or jump forward, never back.
    fn now_ms(&self) -> u64;
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
