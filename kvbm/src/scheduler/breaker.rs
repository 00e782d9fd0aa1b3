//! Circuit breakers: a store that is down or full is left alone for a while, so that requests do not queue up
//! behind its time-outs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvbm_tiers::{CopyError, CopyErrorKind, Route, Tier};

/// Two per tier: a full disk can still be read.
#[derive(Debug)]
pub(super) struct Breakers {
    origin: Instant,
    reads: [Breaker; Tier::COUNT],
    writes: [Breaker; Tier::COUNT],
}

#[derive(Debug, Default)]
struct Breaker {
    /// Milliseconds since the origin until which it is open.
    open_until: AtomicU64,
    /// Failures in a row, one per opening.
    failures: AtomicU64,
}

const FIRST_PAUSE_MS: u64 = 500;
const MOST_DOUBLINGS: u64 = 6;

impl Default for Breakers {
    fn default() -> Self {
        Self { origin: Instant::now(), reads: Default::default(), writes: Default::default() }
    }
}

impl Breakers {
    /// Whether `tier` may be read now.
    pub(super) fn can_read(&self, tier: Tier) -> bool {
        self.is_closed(&self.reads[tier.index()])
    }

    /// Whether `tier` may be written now.
    pub(super) fn can_write(&self, tier: Tier) -> bool {
        self.is_closed(&self.writes[tier.index()])
    }

    fn is_closed(&self, breaker: &Breaker) -> bool {
        breaker.open_until.load(Ordering::Relaxed) <= self.now_ms()
    }

    fn now_ms(&self) -> u64 {
        self.origin.elapsed().as_millis() as u64
    }

    /// Learns from a copy that ended. The lower tier of its route is the one that may be down or full.
    pub(super) fn learn(&self, (from, to): Route, result: &Result<(), CopyError>) {
        let lower = from.max(to).index();
        let (read, write) = (&self.reads[lower], &self.writes[lower]);
        let (breaker, other) = if to > from { (write, read) } else { (read, write) };
        match result.as_ref().map_err(CopyError::kind) {
            Ok(()) => breaker.failures.store(0, Ordering::Relaxed),
            Err(CopyErrorKind::NoSpace) => self.open(breaker),
            Err(CopyErrorKind::Unavailable) => {
                self.open(breaker);
                self.open(other);
            }
            Err(_) => {}
        }
    }

    fn open(&self, breaker: &Breaker) {
        if self.is_closed(breaker) {
            let doublings = breaker.failures.fetch_add(1, Ordering::Relaxed).min(MOST_DOUBLINGS);
            breaker.open_until.store(self.now_ms() + (FIRST_PAUSE_MS << doublings), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(kind: CopyErrorKind) -> Result<(), CopyError> {
        Err(CopyError::new(kind, "a test"))
    }

    #[test]
    fn a_full_disk_can_be_read_and_a_store_that_is_away_cannot() {
        let breakers = Breakers::default();
        breakers.learn((Tier::Host, Tier::Disk), &failure(CopyErrorKind::NoSpace));
        assert!(!breakers.can_write(Tier::Disk) && breakers.can_read(Tier::Disk));
        breakers.learn((Tier::Object, Tier::Host), &failure(CopyErrorKind::Unavailable));
        assert!(!breakers.can_write(Tier::Object) && !breakers.can_read(Tier::Object));
        breakers.learn((Tier::Disk, Tier::Host), &failure(CopyErrorKind::Corrupt));
        assert!(breakers.can_read(Tier::Disk) && breakers.can_write(Tier::Host));
    }
}
