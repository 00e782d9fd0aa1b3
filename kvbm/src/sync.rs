//! Locks, counters and threads, from one place, so that the interleaving checker can replace them.
//!
//! With the feature `shuttle` every lock, count, wait and spawn is a scheduling point of a
//! `shuttle` test.

#[cfg(not(feature = "shuttle"))]
mod real {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize};

    #[cfg(feature = "testing")]
    pub(crate) use super::counted::Mutex;
    #[cfg(not(feature = "testing"))]
    pub(crate) use parking_lot::Mutex;
    pub(crate) use parking_lot::{MutexGuard, RwLock, RwLockReadGuard};

    /// Starts a named thread.
    pub(crate) fn spawn(
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<JoinHandle> {
        kvbm_tiers::clock::spawn(name, work)
    }

    pub(crate) type JoinHandle = std::thread::JoinHandle<()>;
}

/// `parking_lot`'s mutex, which counts how often each thread takes one.
#[cfg(all(feature = "testing", not(feature = "shuttle")))]
mod counted {
    use parking_lot::MutexGuard;

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(parking_lot::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            crate::table::shared::count();
            self.0.lock()
        }
    }
}

#[cfg(feature = "shuttle")]
mod real {
    use shuttle::sync::RwLockWriteGuard;
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicUsize};
    pub(crate) use shuttle::sync::{MutexGuard, RwLockReadGuard};

    /// `shuttle`'s mutex with the interface of `parking_lot`'s.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
        }
    }

    /// `shuttle`'s lock with the interface of `parking_lot`'s.
    #[derive(Debug, Default)]
    pub(crate) struct RwLock<T>(shuttle::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::RwLock::new(value))
        }

        pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner)
        }

        pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner)
        }
    }

    #[expect(clippy::unnecessary_wraps, reason = "threads of the system may be refused")]
    pub(crate) fn spawn(
        _name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<JoinHandle> {
        Ok(shuttle::thread::spawn(work))
    }

    pub(crate) type JoinHandle = shuttle::thread::JoinHandle<()>;
}

pub(crate) use real::*;
