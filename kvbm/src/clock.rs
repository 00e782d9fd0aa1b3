//! Time, from one place.
//!
//! Policies and flush ages go by [`Clock::now_ms`], which a replay drives by its trace's
//! timestamps. Hardware is judged by [`Clock::uptime`], which is real time except in simulations of
//! hardware.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvbm_tiers::clock;

/// Milliseconds since any origin, for policies and flush ages.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Now. May stand still or jump forward, never back.
    fn now_ms(&self) -> u64;

    /// Time since any origin, for time-outs and pauses: it passes even if [`now_ms`](Self::now_ms)
    /// stands still. The default is the time that the process has been running.
    fn uptime(&self) -> Duration {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(clock::now).elapsed()
    }
}

/// Real time.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(clock::now())
    }
}

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// A clock that is set by hand, or by the replay of a trace.
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

/// A clock that is set while it runs, as an administrator or NTP sets that of a machine.
///
/// A [`Clock`] never goes back: after a jump into the past this one stands still until it has
/// caught up.
#[derive(Debug)]
pub struct JumpingClock {
    inner: Arc<dyn Clock>,
    /// By how much it is set forward, in milliseconds.
    ahead: AtomicI64,
    /// The latest time that was told.
    told: AtomicU64,
}

impl JumpingClock {
    /// Tells the time of `inner` until the first jump.
    pub const fn new(inner: Arc<dyn Clock>) -> Self {
        Self { inner, ahead: AtomicI64::new(0), told: AtomicU64::new(0) }
    }

    /// Jumps `milliseconds` forward, or back if negative.
    pub fn jump(&self, milliseconds: i64) {
        self.ahead.fetch_add(milliseconds, Ordering::AcqRel);
    }
}

impl Clock for JumpingClock {
    fn now_ms(&self) -> u64 {
        let now = self.inner.now_ms().saturating_add_signed(self.ahead.load(Ordering::Acquire));
        // Of two concurrent calls none is told less than the other was before.
        now.max(self.told.fetch_max(now, Ordering::AcqRel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_jumps_back_stands_until_it_catches_up() {
        let manual = Arc::new(ManualClock::default());
        let clock = JumpingClock::new(Arc::clone(&manual) as _);
        let at = |now_ms| {
            manual.advance_to(now_ms);
            clock.now_ms()
        };
        assert_eq!(at(100), 100);
        clock.jump(1_000);
        assert_eq!(at(150), 1_150);
        clock.jump(-1_000);
        assert_eq!((at(160), at(1_149)), (1_150, 1_150));
        assert_eq!(at(1_151), 1_151);
        clock.jump(-10_000);
        assert_eq!(at(1_200), 1_151, "not before the origin either");
    }
}
