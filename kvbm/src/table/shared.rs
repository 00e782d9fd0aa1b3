//! The table behind its lock, memory made ahead so that no holder of the lock waits for the kernel,
//! and how long it is held.

use std::fmt;
use std::sync::Arc;

use kvbm_tiers::Ahead;

use super::Table;
use super::index::IndexBuckets;
use super::tier::TierTable;
use crate::clock::Clock;
use crate::sync::Mutex;

/// The table of a manager, and its clock. One mutex: a [`Budget`](super::Budget) bounds most
/// holds to some 300 µs.
pub struct SharedTable {
    table: Mutex<Table>,
    clock: Arc<dyn Clock>,
}

impl fmt::Debug for SharedTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedTable").field("clock", &self.clock).finish_non_exhaustive()
    }
}

impl SharedTable {
    /// Puts a table behind a lock.
    pub fn new(table: Table, clock: Arc<dyn Clock>) -> Self {
        Self { table: Mutex::new(table), clock }
    }

    /// The locked table, with its clock set.
    pub fn lock(&self) -> TableGuard<'_> {
        let mut table = watch(self.table.lock());
        table.advance_clock(self.clock.now_ms());
        table
    }

    /// Provides memory that the table needs soon, so that no holder of its lock waits for the
    /// kernel.
    pub(crate) fn provide_memory(&self) {
        let wanted = self.lock().wanted_memory();
        if let Some(spare) = wanted.provide() {
            // Dropped with the table unlocked.
            let _unused = self.lock().supply(spare);
        }
    }
}

/// Memory that the table needs soon, and memory that it no longer needs.
///
/// The first use of a page waits until the kernel has cleared it: for a huge page 5–8 ms in a
/// virtual machine. Freeing a large array takes time too. No holder of the table's lock should wait
/// for either. So background work asks what the table needs soon, provides it with the table
/// unlocked, and hands it over. If it comes too late, only time is lost: the table then makes what
/// it needs itself.
#[derive(Debug)]
#[must_use = "it is not provided until it is asked for"]
pub struct Provision {
    ahead: Vec<Ahead>,
    spare: Option<usize>,
    _retired: Option<IndexBuckets>,
}

/// The array into which the index grows next.
#[derive(Debug)]
pub struct Spare(IndexBuckets);

impl Provision {
    /// Provides it, with the table unlocked, since it takes milliseconds. The result is for
    /// [`Table::supply`].
    pub fn provide(self) -> Option<Spare> {
        self.ahead.into_iter().for_each(Ahead::provide);
        self.spare.map(|buckets| Spare(IndexBuckets::populated(buckets)))
    }
}

impl Table {
    /// What memory the table needs soon.
    pub fn wanted_memory(&mut self) -> Provision {
        let slots = self.tiers.iter_mut().flatten().flat_map(TierTable::ahead);
        let ahead = slots.chain(self.records.ahead()).collect();
        Provision { ahead, spare: self.index.wanted_spare(), _retired: self.index.take_retired() }
    }

    /// Takes what was provided. Returns what it no longer wants.
    pub fn supply(&mut self, Spare(buckets): Spare) -> Option<Spare> {
        self.index.keep_spare(buckets).map(Spare)
    }
}

/// How long the table's lock is held, for `kvbm bench table`, and how often locks are taken.
///
/// A hold is measured in CPU time of its thread, so that it does not count the wait for a processor
/// on a busy machine.
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
    #[cfg(not(feature = "shuttle"))]
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
        use super::*;
        use crate::sync::Mutex;

        #[test]
        fn the_longest_hold_is_cpu_time_of_holds_alone() {
            let table = Mutex::new(Table::new([]));
            let spin = |ms| {
                let _held = watch(table.lock());
                let until = thread_time() + Duration::from_millis(ms);
                while thread_time() < until {}
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

#[cfg(test)]
mod tests {
    use kvbm_policies::EvictionKind;
    use kvbm_tiers::{FramePool, Tier};

    use super::*;
    use crate::names::hash::{BlockHash, Chain};
    use crate::table::{RequestInfo, TierSpec};

    #[test]
    fn a_spare_is_wanted_once_before_each_growth() {
        let pool = FramePool::new(Tier::Host, 1_000);
        let policy = EvictionKind::Lru.build(1_000);
        let mut table = Table::new([TierSpec { pool, policy, flush_to: None, admission: None }]);
        assert!(table.wanted_memory().provide().is_none(), "an empty table has all it needs");
        let hashes: Vec<_> = (1..1_000).map(BlockHash::from_u128).collect();
        let _reserved = table.reserve(Tier::Host, Chain::from(&hashes[..]), RequestInfo::default());
        let (one, another) = (table.wanted_memory(), table.wanted_memory());
        assert!(one.provide().is_some_and(|spare| table.supply(spare).is_none()));
        assert!(table.wanted_memory().provide().is_none(), "it has one");
        assert!(
            another.provide().is_some_and(|spare| table.supply(spare).is_some()),
            "two are one too many"
        );
    }
}
