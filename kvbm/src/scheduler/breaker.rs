//! Circuit breakers: a medium that is away, full or hanging is left alone for a while, so that requests do not
//! queue up behind its time-outs. One copy then tries whether it is well again.

use std::time::Duration;

use kvbm_tiers::{CopyErrorKind, Route, Tier};

use crate::sync::Mutex;

/// Two per tier: a full disk can still be read.
#[derive(Debug)]
pub(super) struct Breakers {
    reads: [Breaker; Tier::COUNT],
    writes: [Breaker; Tier::COUNT],
    times: Times,
}

/// How long a breaker stays open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// At first; each probe that fails doubles it, up to 64 times that.
    pub(super) pause: Duration,
    /// A probe of which nothing was heard for so long was never sent: another may go.
    pub(super) verdict: Duration,
}

/// Whether copies may go to or from a tier now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Passage {
    /// All of them.
    Free,
    /// One, to see whether the medium is well again.
    Probe,
    /// None.
    Blocked,
}

#[derive(Debug, Default)]
struct Breaker(Mutex<State>);

#[derive(Clone, Copy, Debug)]
enum State {
    Closed {
        /// Errors since the last success.
        errors: u32,
    },
    Open {
        /// When a probe may go.
        until: Duration,
        pause: Duration,
        is_probing: bool,
        cause: Cause,
    },
}

/// What opened a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// The medium does not answer, in whichever direction.
    Away,
    /// It answers that it cannot do this: it is full, or fails.
    Refuses,
}

impl Default for State {
    fn default() -> Self {
        Self::Closed { errors: 0 }
    }
}

/// The pause after which doubling ends, in first pauses.
const MAX_PAUSES: u32 = 64;
/// A single bad sector is no reason to leave a disk alone; this many errors in a row are.
const MAX_ERRORS: u32 = 3;

impl Breakers {
    pub(super) fn new(times: Times) -> Self {
        Self { reads: Default::default(), writes: Default::default(), times }
    }

    /// Whether copies may be planned on `route`. Who is told [`Passage::Probe`] is the only one for a while, and
    /// sends one block.
    pub(super) fn pass(&self, route: Route, now: Duration) -> Passage {
        self.of(route).pass(now, self.times.verdict)
    }

    /// Whether not even a probe may go on `route` now.
    pub(super) fn is_blocked(&self, route: Route, now: Duration) -> bool {
        matches!(*self.of(route).0.lock(), State::Open { until, .. } if now < until)
    }

    /// Who was told [`Passage::Probe`] has nothing to try it with: the next one may.
    pub(super) fn retract_probe(&self, route: Route, now: Duration) {
        if let State::Open { until, is_probing: probing @ true, .. } = &mut *self.of(route).0.lock() {
            (*until, *probing) = (now, false);
        }
    }

    /// Whether what was planned before must not go any more, unless it is a probe.
    pub(super) fn is_open(&self, route: Route) -> bool {
        matches!(*self.of(route).0.lock(), State::Open { .. })
    }

    /// A copy on `route` arrived.
    pub(super) fn succeeded(&self, route: Route, now: Duration) {
        *self.of(route).0.lock() = State::default();
        // A medium that answers in one direction may in the other. If a probe there found out that it does not, its
        // pauses are not cut short: reads that succeed must not have a full disk tried all the time.
        self.opposite(route).answers(now, self.times.pause);
    }

    /// A copy on `route` failed, or did not end in time.
    pub(super) fn failed(&self, route: Route, kind: CopyErrorKind, now: Duration) {
        let own = self.of(route);
        match kind {
            CopyErrorKind::Unavailable | CopyErrorKind::TimedOut => {
                own.open(Cause::Away, now, self.times.pause);
                self.opposite(route).open(Cause::Away, now, self.times.pause);
            }
            CopyErrorKind::NoSpace => own.open(Cause::Refuses, now, self.times.pause),
            CopyErrorKind::Io => own.count_error(now, self.times.pause),
            // The medium answered: that a block's bytes are wrong says nothing of the next one's.
            _ => {}
        }
    }

    /// An overdue copy ended after all: the medium moves again, so a probe may go soon, however long the pause was.
    pub(super) fn revived(&self, route: Route, now: Duration) {
        let soon = now + self.times.pause;
        self.of(route).probe_by(soon);
        self.opposite(route).probe_by(soon);
    }

    /// The lower tier of a route is the one that may be away or full.
    fn of(&self, (from, to): Route) -> &Breaker {
        if to > from { &self.writes[to.index()] } else { &self.reads[from.index()] }
    }

    fn opposite(&self, (from, to): Route) -> &Breaker {
        if to > from { &self.reads[to.index()] } else { &self.writes[from.index()] }
    }
}

impl Breaker {
    fn pass(&self, now: Duration, verdict: Duration) -> Passage {
        match &mut *self.0.lock() {
            State::Closed { .. } => Passage::Free,
            State::Open { until, .. } if now < *until => Passage::Blocked,
            State::Open { until, is_probing, .. } => {
                (*until, *is_probing) = (now + verdict, true);
                Passage::Probe
            }
        }
    }

    fn count_error(&self, now: Duration, pause: Duration) {
        let mut state = self.0.lock();
        match &mut *state {
            State::Closed { errors } if *errors + 1 < MAX_ERRORS => *errors += 1,
            _ => {
                drop(state);
                self.open(Cause::Refuses, now, pause);
            }
        }
    }

    fn open(&self, cause: Cause, now: Duration, first_pause: Duration) {
        let mut state = self.0.lock();
        let pause = match *state {
            State::Closed { .. } => first_pause,
            // One of those that were on their way when it opened: nothing new.
            State::Open { is_probing: false, .. } => return,
            State::Open { pause, .. } => (pause * 2).min(first_pause * MAX_PAUSES),
        };
        *state = State::Open { until: now + pause, pause, is_probing: false, cause };
    }

    /// The medium did something in the other direction.
    fn answers(&self, now: Duration, first_pause: Duration) {
        match &mut *self.0.lock() {
            State::Open { until, pause, is_probing: false, cause: Cause::Away } if *pause == first_pause => {
                *until = now;
            }
            _ => {}
        }
    }

    fn probe_by(&self, latest: Duration) {
        if let State::Open { until, is_probing: false, .. } = &mut *self.0.lock() {
            *until = latest.min(*until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Route = (Tier::Disk, Tier::Host);
    const WRITE: Route = (Tier::Host, Tier::Disk);

    fn breakers() -> Breakers {
        Breakers::new(Times { pause: Duration::from_millis(500), verdict: Duration::from_secs(5) })
    }

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_full_disk_can_be_read_and_a_store_that_is_away_cannot() {
        let breakers = breakers();
        breakers.failed(WRITE, CopyErrorKind::NoSpace, at(0));
        assert_eq!(breakers.pass(WRITE, at(1)), Passage::Blocked);
        assert_eq!(breakers.pass(READ, at(1)), Passage::Free);
        let (get, put) = ((Tier::Object, Tier::Host), (Tier::Host, Tier::Object));
        breakers.failed(get, CopyErrorKind::Unavailable, at(0));
        assert!(breakers.is_open(get) && breakers.is_open(put));
        breakers.failed(READ, CopyErrorKind::Corrupt, at(0));
        assert_eq!(breakers.pass(READ, at(1)), Passage::Free);
    }

    #[test]
    fn one_probe_decides_and_pauses_double() {
        let breakers = breakers();
        breakers.failed(READ, CopyErrorKind::TimedOut, at(0));
        breakers.failed(READ, CopyErrorKind::TimedOut, at(1));
        assert_eq!(breakers.pass(READ, at(499)), Passage::Blocked);
        assert_eq!(breakers.pass(READ, at(500)), Passage::Probe);
        assert_eq!(breakers.pass(READ, at(501)), Passage::Blocked, "one probe at a time");
        breakers.failed(READ, CopyErrorKind::TimedOut, at(600));
        assert_eq!(breakers.pass(READ, at(1_599)), Passage::Blocked);
        assert_eq!(breakers.pass(READ, at(1_600)), Passage::Probe);
        breakers.succeeded(READ, at(1_700));
        assert_eq!(breakers.pass(READ, at(1_700)), Passage::Free);
        assert_eq!(breakers.pass(WRITE, at(1_700)), Passage::Probe, "no need to wait there");
    }

    #[test]
    fn reads_that_succeed_do_not_have_a_full_disk_tried_all_the_time() {
        let breakers = breakers();
        breakers.failed(WRITE, CopyErrorKind::NoSpace, at(0));
        let probes = (1..1_000).filter(|&now| {
            breakers.succeeded(READ, at(now));
            let probes = breakers.pass(WRITE, at(now)) == Passage::Probe;
            if probes {
                breakers.failed(WRITE, CopyErrorKind::NoSpace, at(now));
            }
            probes
        });
        assert_eq!(probes.count(), 1, "after the first pause of 500 ms, the next one is of 1 s");
    }

    #[test]
    fn a_probe_that_was_never_sent_does_not_keep_the_breaker_open() {
        let breakers = breakers();
        breakers.failed(READ, CopyErrorKind::Unavailable, at(0));
        assert_eq!(breakers.pass(READ, at(500)), Passage::Probe);
        assert_eq!(breakers.pass(READ, at(5_500)), Passage::Probe);
    }

    #[test]
    fn late_completions_bring_the_probe_forward() {
        let breakers = breakers();
        breakers.failed(READ, CopyErrorKind::TimedOut, at(0));
        for now in [500, 1_500] {
            assert_eq!(breakers.pass(READ, at(now)), Passage::Probe);
            breakers.failed(READ, CopyErrorKind::TimedOut, at(now));
        }
        breakers.revived(READ, at(1_600));
        assert_eq!(breakers.pass(READ, at(2_099)), Passage::Blocked, "the pause is of 2 s by now");
        assert_eq!(breakers.pass(READ, at(2_100)), Passage::Probe);
        assert_eq!(breakers.pass(WRITE, at(2_100)), Passage::Probe);
    }

    #[test]
    fn errors_in_a_row_open_it_and_single_ones_do_not() {
        let breakers = breakers();
        for _ in 0..10 {
            breakers.failed(READ, CopyErrorKind::Io, at(0));
            breakers.failed(READ, CopyErrorKind::Io, at(0));
            breakers.succeeded(READ, at(0));
        }
        assert!(!breakers.is_open(READ));
        (0..3).for_each(|_| breakers.failed(READ, CopyErrorKind::Io, at(0)));
        assert!(breakers.is_open(READ) && !breakers.is_open(WRITE));
    }
}
