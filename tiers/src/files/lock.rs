//! Locks on files, and how long a start waits for them.
//!
//! They are `flock`'s: of the open file, not of the process. So two regions of one process exclude
//! each other too, and the kernel holds a killed process's lock until its ring has ended the last
//! write to the file, which may be after the process is gone. Without it a successor would read
//! blocks that are still being overwritten.

use std::fs::{File, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use crate::clock;
use crate::error::{SetupError, SetupErrorKind};
use crate::files::OwnDirectory;

/// How long a start waits for locks, all files together.
#[derive(Debug)]
pub(crate) struct LockWait {
    limit: Duration,
    deadline: Instant,
    told: bool,
}

impl LockWait {
    /// A ring outlives its process by a second or so; on a machine with more work than cores it was
    /// more than five, because the kernel ends it on a worker of its own that has to get its turn.
    pub(crate) const FOR_A_DEAD_RING: Duration = Duration::from_secs(15);

    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, deadline: clock::now() + limit, told: false }
    }

    fn is_over(&self) -> bool {
        clock::now() >= self.deadline
    }

    /// Says once that it waits.
    fn pause(&mut self, site: &OwnDirectory) {
        if !self.told {
            tracing::warn!(path = %site.path.display(), limit = ?self.limit, "a file is in use: waiting for it");
            self.told = true;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn lock(
    file: &File,
    site: &OwnDirectory,
    patience: &mut LockWait,
) -> Result<(), SetupError> {
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if patience.is_over() => {
                return Err(in_use(site, patience.limit));
            }
            Err(TryLockError::WouldBlock) => patience.pause(site),
            Err(TryLockError::Error(error)) => return Err(site.failed(&error)),
        }
    }
}

fn in_use(site: &OwnDirectory, waited: Duration) -> SetupError {
    let what = format!(
        "is still in use after {waited:?} by another process, or a child that a dead one forked; \
         stop it, or choose another {}",
        site.settings.dir
    );
    site.error(SetupErrorKind::InUse, &what)
}
