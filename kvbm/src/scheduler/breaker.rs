//! Circuit breakers: a medium that is away, full or hanging is left alone for a while, so that
//! requests do not queue up behind its time-outs. Then one copy tests whether it is well again.

use std::time::Duration;

use kvbm_tiers::{CopyErrorKind, Route, Tier};

use crate::sync::Mutex;

/// Two per tier: a full disk can still be read.
#[derive(Debug)]
pub(super) struct Breakers {
    reads: [MediumBreaker; Tier::COUNT],
    writes: [MediumBreaker; Tier::COUNT],
    /// How long a breaker is open at first; each failed probe doubles it, up to 64 times that.
    first_pause: Duration,
}

/// Whether copies may go to or from a tier now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RoutePassage {
    /// All of them.
    Free,
    /// One, to test whether the medium is well again.
    Probe,
    /// None.
    Blocked,
}

type MediumBreaker = Mutex<BreakerState>;

#[derive(Clone, Copy, Debug)]
enum BreakerState {
    Closed {
        /// Errors since the last success.
        errors: u32,
    },
    Open {
        /// When a probe may go.
        until: Duration,
        pause: Duration,
        is_probing: bool,
        cause: OpeningCause,
    },
}

/// What opened a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpeningCause {
    /// The medium does not answer, in either direction.
    Away,
    /// It answers with an error: it is full, or fails, or its budget is spent.
    Refuses,
}

impl Default for BreakerState {
    fn default() -> Self {
        Self::Closed { errors: 0 }
    }
}

/// The pause after which doubling ends, in first pauses.
const MAX_PAUSES: u32 = 64;
/// A single bad sector is no reason to leave a disk alone; this many errors in a row are.
const MAX_ERRORS: u32 = 3;

impl Breakers {
    pub(super) fn new(first_pause: Duration) -> Self {
        Self { reads: Default::default(), writes: Default::default(), first_pause }
    }

    /// Whether copies may be planned on `route`. A caller that gets [`RoutePassage::Probe`] must
    /// send one block, and is the only one until the result is known. A probe without a result
    /// after `verdict`, which is longer than any copy may take, was never sent.
    pub(super) fn pass(&self, route: Route, verdict: Duration, now: Duration) -> RoutePassage {
        self.of(route).lock().pass(now, verdict)
    }

    /// Whether not even a probe may go on `route` now.
    pub(super) fn is_blocked(&self, route: Route, now: Duration) -> bool {
        matches!(*self.of(route).lock(), BreakerState::Open { until, .. } if now < until)
    }

    /// The caller that got [`RoutePassage::Probe`] has nothing to send: the next one may probe.
    pub(super) fn retract_probe(&self, route: Route, now: Duration) {
        if let BreakerState::Open { until, is_probing: probing @ true, .. } =
            &mut *self.of(route).lock()
        {
            (*until, *probing) = (now, false);
        }
    }

    /// Whether earlier plans must not go any more, except a probe.
    pub(super) fn is_open(&self, route: Route) -> bool {
        self.of(route).lock().is_open()
    }

    /// A copy on `route` arrived, even if its bytes are wrong: the medium answers. Only a probe
    /// closes a breaker; earlier copies may still arrive from a medium that hangs for every tenth
    /// copy.
    pub(super) fn succeeded(&self, route: Route, is_probe: bool, now: Duration) {
        self.of(route).lock().succeeded(is_probe, now, self.first_pause);
        // A medium that answers in one direction may answer in the other. If a probe there failed,
        // its pauses are not cut short: successful reads must not make a full disk be tested all
        // the time.
        self.opposite(route).lock().answers(now, self.first_pause);
    }

    /// A copy on `route` failed, or did not end in time.
    pub(super) fn failed(&self, route: Route, kind: CopyErrorKind, is_probe: bool, now: Duration) {
        let (own, pause) = (self.of(route), self.first_pause);
        match kind {
            CopyErrorKind::Unavailable | CopyErrorKind::TimedOut => {
                own.lock().open(OpeningCause::Away, is_probe, now, pause);
                // A medium that does not answer fails in both directions; a full one can still be
                // read.
                self.opposite(route).lock().open(OpeningCause::Away, false, now, pause);
            }
            CopyErrorKind::NoSpace | CopyErrorKind::OverBudget => {
                own.lock().open(OpeningCause::Refuses, is_probe, now, pause);
            }
            CopyErrorKind::Io => own.lock().count_error(is_probe, now, pause),
            // Wrong bytes of one block say nothing about the next.
            CopyErrorKind::Corrupt => self.succeeded(route, is_probe, now),
            _ => {}
        }
    }

    /// An overdue copy ended after all: the medium moves again, so a probe may go soon, even after
    /// a long pause.
    pub(super) fn revived(&self, route: Route, now: Duration) {
        let soon = now + self.first_pause;
        self.of(route).lock().probe_by(soon);
        self.opposite(route).lock().probe_by(soon);
    }

    /// The lower tier of a route is the one that may be away or full.
    fn of(&self, Route { from, to }: Route) -> &MediumBreaker {
        if to > from { &self.writes[to.index()] } else { &self.reads[from.index()] }
    }

    fn opposite(&self, Route { from, to }: Route) -> &MediumBreaker {
        if to > from { &self.reads[to.index()] } else { &self.writes[from.index()] }
    }
}

/// These are called with the lock held: a check and its change are one step.
impl BreakerState {
    const fn is_open(&self) -> bool {
        !matches!(self, Self::Closed { .. })
    }

    fn pass(&mut self, now: Duration, verdict: Duration) -> RoutePassage {
        match self {
            Self::Closed { .. } => RoutePassage::Free,
            Self::Open { until, .. } if now < *until => RoutePassage::Blocked,
            Self::Open { until, is_probing, .. } => {
                (*until, *is_probing) = (now + verdict, true);
                RoutePassage::Probe
            }
        }
    }

    fn succeeded(&mut self, is_probe: bool, now: Duration, first_pause: Duration) {
        if is_probe || !self.is_open() {
            *self = Self::default();
        } else {
            self.answers(now, first_pause);
        }
    }

    fn count_error(&mut self, is_probe: bool, now: Duration, pause: Duration) {
        match self {
            Self::Closed { errors } if *errors + 1 < MAX_ERRORS => *errors += 1,
            _ => self.open(OpeningCause::Refuses, is_probe, now, pause),
        }
    }

    fn open(&mut self, cause: OpeningCause, is_probe: bool, now: Duration, first_pause: Duration) {
        let pause = match *self {
            Self::Closed { .. } => first_pause,
            // A copy that was on its way when it opened: nothing new.
            Self::Open { .. } if !is_probe => return,
            Self::Open { pause, .. } => (pause * 2).min(first_pause * MAX_PAUSES),
        };
        *self = Self::Open { until: now + pause, pause, is_probing: false, cause };
    }

    /// The medium did something in the other direction.
    fn answers(&mut self, now: Duration, first_pause: Duration) {
        match self {
            Self::Open { until, pause, is_probing: false, cause: OpeningCause::Away }
                if *pause == first_pause =>
            {
                *until = now;
            }
            _ => {}
        }
    }

    fn probe_by(&mut self, latest: Duration) {
        if let Self::Open { until, is_probing: false, .. } = self {
            *until = latest.min(*until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Route = Route::new(Tier::Disk, Tier::Host);
    const WRITE: Route = Route::new(Tier::Host, Tier::Disk);
    const VERDICT: Duration = Duration::from_secs(5);

    fn breakers() -> Breakers {
        Breakers::new(Duration::from_millis(500))
    }

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_full_disk_is_read_and_an_absent_store_not() {
        let breakers = breakers();
        breakers.failed(WRITE, CopyErrorKind::NoSpace, true, at(0));
        assert_eq!(breakers.pass(WRITE, VERDICT, at(1)), RoutePassage::Blocked);
        assert_eq!(breakers.pass(READ, VERDICT, at(1)), RoutePassage::Free);
        let (get, put) =
            (Route::new(Tier::Object, Tier::Host), Route::new(Tier::Host, Tier::Object));
        breakers.failed(get, CopyErrorKind::Unavailable, true, at(0));
        assert!(breakers.is_open(get) && breakers.is_open(put));
        breakers.failed(READ, CopyErrorKind::Corrupt, true, at(0));
        assert_eq!(breakers.pass(READ, VERDICT, at(1)), RoutePassage::Free);
    }

    #[test]
    fn one_probe_decides_and_pauses_double() {
        let breakers = breakers();
        breakers.failed(READ, CopyErrorKind::TimedOut, false, at(0));
        breakers.failed(READ, CopyErrorKind::TimedOut, false, at(1));
        assert_eq!(breakers.pass(READ, VERDICT, at(499)), RoutePassage::Blocked);
        assert_eq!(breakers.pass(READ, VERDICT, at(500)), RoutePassage::Probe);
        assert_eq!(
            breakers.pass(READ, VERDICT, at(501)),
            RoutePassage::Blocked,
            "one probe at a time"
        );
        breakers.failed(READ, CopyErrorKind::TimedOut, true, at(600));
        assert_eq!(breakers.pass(READ, VERDICT, at(1_599)), RoutePassage::Blocked);
        assert_eq!(breakers.pass(READ, VERDICT, at(1_600)), RoutePassage::Probe);
        breakers.succeeded(READ, true, at(1_700));
        assert_eq!(breakers.pass(READ, VERDICT, at(1_700)), RoutePassage::Free);
        assert_eq!(
            breakers.pass(WRITE, VERDICT, at(1_700)),
            RoutePassage::Probe,
            "no need to wait there"
        );
    }

    #[test]
    fn reads_do_not_have_a_full_disk_tried_constantly() {
        let breakers = breakers();
        breakers.failed(WRITE, CopyErrorKind::NoSpace, true, at(0));
        let probes = (1..1_000).filter(|&now| {
            breakers.succeeded(READ, true, at(now));
            let probes = breakers.pass(WRITE, VERDICT, at(now)) == RoutePassage::Probe;
            if probes {
                breakers.failed(WRITE, CopyErrorKind::NoSpace, true, at(now));
            }
            probes
        });
        assert_eq!(probes.count(), 1, "after the first pause of 500 ms, the next one is of 1 s");
    }

    #[test]
    fn earlier_copies_neither_close_it_nor_double_its_pause() {
        let breakers = breakers();
        breakers.failed(READ, CopyErrorKind::TimedOut, false, at(0));
        breakers.succeeded(READ, false, at(1));
        assert!(breakers.is_open(READ));
        assert_eq!(
            breakers.pass(READ, VERDICT, at(1)),
            RoutePassage::Probe,
            "it answers: a probe may go"
        );
        breakers.failed(READ, CopyErrorKind::Unavailable, false, at(2));
        assert_eq!(
            breakers.pass(READ, VERDICT, at(1_000)),
            RoutePassage::Blocked,
            "the probe is still out"
        );
        breakers.succeeded(READ, true, at(1_001));
        assert!(!breakers.is_open(READ));
    }

    #[test]
    fn an_unsent_probe_does_not_keep_the_breaker_open() {
        let breakers = breakers();
        breakers.failed(READ, CopyErrorKind::Unavailable, true, at(0));
        assert_eq!(breakers.pass(READ, VERDICT, at(500)), RoutePassage::Probe);
        assert_eq!(breakers.pass(READ, VERDICT, at(5_500)), RoutePassage::Probe);
    }

    #[test]
    fn late_completions_bring_the_probe_forward() {
        let breakers = breakers();
        breakers.failed(READ, CopyErrorKind::TimedOut, true, at(0));
        for now in [500, 1_500] {
            assert_eq!(breakers.pass(READ, VERDICT, at(now)), RoutePassage::Probe);
            breakers.failed(READ, CopyErrorKind::TimedOut, true, at(now));
        }
        breakers.revived(READ, at(1_600));
        assert_eq!(
            breakers.pass(READ, VERDICT, at(2_099)),
            RoutePassage::Blocked,
            "the pause is of 2 s by now"
        );
        assert_eq!(breakers.pass(READ, VERDICT, at(2_100)), RoutePassage::Probe);
        assert_eq!(breakers.pass(WRITE, VERDICT, at(2_100)), RoutePassage::Probe);
    }

    #[test]
    fn errors_in_a_row_open_it_single_ones_not() {
        let breakers = breakers();
        for _ in 0..10 {
            breakers.failed(READ, CopyErrorKind::Io, true, at(0));
            breakers.failed(READ, CopyErrorKind::Io, true, at(0));
            breakers.succeeded(READ, true, at(0));
        }
        assert!(!breakers.is_open(READ));
        (0..3).for_each(|_| breakers.failed(READ, CopyErrorKind::Io, true, at(0)));
        assert!(breakers.is_open(READ) && !breakers.is_open(WRITE));
    }
}
