//! How long the table's lock is held, for `kvbm bench table`, and how often locks are taken. Only
//! the feature `testing` measures anything.
//!
//! A hold is measured in CPU time of its thread, so that it does not count the wait for a processor
//! on a busy machine.

#[cfg(feature = "testing")]
mod timed {
    use std::cell::Cell;
    use std::ops::{Deref, DerefMut};
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::Duration;

    use rustix::time::{ClockId, clock_gettime};

    use crate::sync::MutexGuard;
    use crate::table::Table;

    /// Reading a thread's CPU time is a system call: only while a measurement runs.
    static IS_MEASURING: AtomicBool = AtomicBool::new(false);
    static LONGEST_NS: AtomicU64 = AtomicU64::new(0);

    /// Does `work` and returns, besides its answer, the longest time that any thread held the lock
    /// of any table meanwhile. One measurement at a time: the whole process shares one clock.
    pub fn longest_hold<R>(work: impl FnOnce() -> R) -> (R, Duration) {
        // Relaxed: whether a hold that begins just now is measured does not matter.
        LONGEST_NS.store(0, Ordering::Relaxed);
        IS_MEASURING.store(true, Ordering::Relaxed);
        let answer = work();
        IS_MEASURING.store(false, Ordering::Relaxed);
        (answer, Duration::from_nanos(LONGEST_NS.load(Ordering::Relaxed)))
    }

    /// How often a thread took locks.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct LocksTaken {
        /// The table's.
        pub table: u64,
        /// All locks of this crate, the table's included.
        pub all: u64,
    }

    thread_local! {
        static LOCKS_TAKEN: Cell<LocksTaken> = const { Cell::new(LocksTaken { table: 0, all: 0 }) };
    }

    /// This thread takes a lock.
    pub(crate) fn count() {
        LOCKS_TAKEN.set(LocksTaken { all: LOCKS_TAKEN.get().all + 1, ..LOCKS_TAKEN.get() });
    }

    /// Does `work` and returns, besides its answer, how often this thread took locks meanwhile.
    pub fn locks_taken<R>(work: impl FnOnce() -> R) -> (R, LocksTaken) {
        let before = LOCKS_TAKEN.get();
        let answer = work();
        let LocksTaken { table, all } = LOCKS_TAKEN.get();
        (answer, LocksTaken { table: table - before.table, all: all - before.all })
    }

    /// The table, locked.
    #[derive(Debug)]
    pub struct TableGuard<'a> {
        // Before the lock: the time is noted, then the lock is given up.
        _hold: Option<TimedHold>,
        table: MutexGuard<'a, Table>,
    }

    pub(crate) fn watch(table: MutexGuard<'_, Table>) -> TableGuard<'_> {
        LOCKS_TAKEN.set(LocksTaken { table: LOCKS_TAKEN.get().table + 1, ..LOCKS_TAKEN.get() });
        TableGuard { _hold: IS_MEASURING.load(Ordering::Relaxed).then(TimedHold::begin), table }
    }

    impl Deref for TableGuard<'_> {
        type Target = Table;

        fn deref(&self) -> &Table {
            &self.table
        }
    }

    impl DerefMut for TableGuard<'_> {
        fn deref_mut(&mut self) -> &mut Table {
            &mut self.table
        }
    }

    #[derive(Debug)]
    struct TimedHold {
        began: Duration,
    }

    impl TimedHold {
        fn begin() -> Self {
            Self { began: thread_time() }
        }
    }

    impl Drop for TimedHold {
        fn drop(&mut self) {
            let held = thread_time().saturating_sub(self.began);
            LONGEST_NS.fetch_max(held.as_nanos() as u64, Ordering::Relaxed);
        }
    }

    fn thread_time() -> Duration {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    #[cfg(test)]
    mod tests {
        use std::time::Instant;

        use super::*;
        use crate::sync::Mutex;

        #[test]
        fn the_longest_hold_is_cpu_time_and_nothing_is_measured_outside() {
            let table = Mutex::new(Table::new([]));
            let spin = |ms| {
                let _held = watch(table.lock());
                let began = Instant::now();
                while began.elapsed() < Duration::from_millis(ms) {}
            };
            let sleep = || {
                let _held = watch(table.lock());
                std::thread::sleep(Duration::from_millis(60));
            };
            spin(20);
            let ((), longest) = longest_hold(|| {
                spin(1);
                sleep();
                spin(2);
            });
            assert!(
                longest > Duration::from_micros(500) && longest < Duration::from_millis(20),
                "{longest:?}"
            );
        }
    }
}

#[cfg(all(feature = "testing", not(feature = "shuttle")))]
pub(crate) use timed::count;
#[cfg(feature = "testing")]
pub(crate) use timed::watch;
#[cfg(feature = "testing")]
pub use timed::{LocksTaken, TableGuard, locks_taken, longest_hold};
#[cfg(not(feature = "testing"))]
pub use untimed::TableGuard;
#[cfg(not(feature = "testing"))]
pub(crate) use untimed::watch;

#[cfg(not(feature = "testing"))]
mod untimed {
    use crate::sync::MutexGuard;
    use crate::table::Table;

    /// The table, locked.
    pub type TableGuard<'a> = MutexGuard<'a, Table>;

    pub(crate) const fn watch(table: MutexGuard<'_, Table>) -> TableGuard<'_> {
        table
    }
}
