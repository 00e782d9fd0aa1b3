//! A file that outlives its process: found or made, locked, complete.
//!
//! Locks are `flock`'s: of the open file, not of the process. So two regions of one process exclude
//! each other too, and the kernel holds a killed process's lock until its ring has ended the last
//! write to the file, which may be after the process is gone. Without it a successor would read
//! blocks that are still being overwritten.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::ops::Deref;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::clock;
use crate::error::{SetupError, SetupErrorKind};
use crate::files::ours::{is_at, open_ours, unlink, unlink_locked};
use crate::files::{OwnDirectory, SettingNames};
use crate::fork::MakerProcess;

/// A file that this process has locked until this is dropped, or the process ends.
#[derive(Debug)]
pub(crate) struct LockedFile {
    file: File,
    maker: MakerProcess,
}

impl LockedFile {
    /// A file that the caller has locked, or that no one else can open.
    pub(crate) fn of(file: File) -> Self {
        Self { file, maker: MakerProcess::this_process() }
    }

    pub(crate) const fn file(&self) -> &File {
        &self.file
    }
}

impl Deref for LockedFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for LockedFile {
    /// A ring that had the file registered lets go of it some time after its own end, and so do
    /// children that were forked: closing alone would leave it locked. A child that closes its copy
    /// must not unlock, since there is only one lock, its parent's.
    fn drop(&mut self) {
        if self.maker.is_this_process()
            && let Err(error) = self.file.unlock()
        {
            tracing::debug!(%error, "could not unlock a file");
        }
    }
}

/// A file that is kept, and whether it was there before.
#[derive(Debug)]
pub(crate) struct KeptFile {
    pub(crate) file: LockedFile,
    pub(crate) was_there: bool,
}

/// Makes the last component of `dir` if it is missing, for this user alone. Whether it was.
pub(crate) fn make_dir(dir: &Path, settings: &'static SettingNames) -> Result<bool, SetupError> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        // Where a directory must not be made, it may still be there.
        Err(_) if dir.is_dir() => Ok(false),
        Err(error) => Err(OwnDirectory::new(dir, settings).failed(&error)),
    }
}

/// The file that an earlier process left, or a new one that `fill` has made complete. Waits until
/// `patience` ends for the process that has it locked.
///
/// # Errors
/// `NotWritable`: what lies there is not a file of this user's that is closed to all others.
/// `InUse`: another process has it. And what `fill` fails with.
pub(crate) fn open_kept(
    site: &OwnDirectory,
    patience: &mut LockWait,
    fill: impl Fn(&File) -> Result<(), SetupError>,
) -> Result<KeptFile, SetupError> {
    loop {
        if let Some(file) = open_ours(site)? {
            lock(&file, site, patience)?;
            if is_at(&file, site)? {
                return Ok(KeptFile { file: LockedFile::of(file), was_there: true });
            }
        } else if let Some(file) = make_kept(site, patience, &fill)? {
            return Ok(KeptFile { file: LockedFile::of(file), was_there: false });
        }
    }
}

/// A new file gets its name when it is complete: a process that is killed before leaves nothing
/// that looks like it. `None`: another process made it meanwhile.
fn make_kept(
    site: &OwnDirectory,
    patience: &mut LockWait,
    fill: impl Fn(&File) -> Result<(), SetupError>,
) -> Result<Option<File>, SetupError> {
    let partial = partial(site);
    let made = create_locked(&partial, patience)?;
    // The process that makes the file holds the lock on the partial one until it has its final
    // name.
    let outcome = if site.path.symlink_metadata().is_ok() {
        Ok(None)
    } else {
        fill(&made)
            .and_then(|()| {
                fs::rename(&partial.path, &site.path).map_err(|error| site.failed(&error))
            })
            .map(|()| Some(made))
    };
    if !matches!(outcome, Ok(Some(_))) {
        unlink(&partial.path);
    }
    outcome
}

/// Writes a file as a whole: a reader finds the old content or the new, which is on the medium when
/// this returns.
pub(crate) fn replace(site: &OwnDirectory, content: &[u8]) -> Result<(), SetupError> {
    let partial = partial(site);
    let file = LockedFile::of(create_locked(&partial, &mut LockWait::new(Duration::ZERO))?);
    let written = file.write_all_at(content, 0).and_then(|()| file.sync_all());
    let placed = written.and_then(|()| fs::rename(&partial.path, &site.path));
    placed.inspect_err(|_| unlink(&partial.path)).map_err(|error| site.failed(&error))?;
    sync_dir(&site.path).map_err(|error| site.failed(&error))
}

/// The names of a file's directory are on the medium.
pub(crate) fn sync_dir(file: &Path) -> io::Result<()> {
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
}

/// Where a file lies until it is complete.
pub(crate) fn partial(site: &OwnDirectory) -> OwnDirectory {
    site.at(site.path.with_added_extension(PARTIAL))
}

const PARTIAL: &str = "partial";

/// A file that did not exist before. One that a dead process left under the name is removed, one of
/// a living process waited for.
pub(crate) fn create_locked(
    site: &OwnDirectory,
    patience: &mut LockWait,
) -> Result<File, SetupError> {
    let create =
        || OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&site.path);
    loop {
        match create() {
            Ok(file) => {
                lock(&file, site, patience)?;
                // Another process may have taken it for abandoned before it was locked.
                if is_at(&file, site)? {
                    return Ok(file);
                }
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                if let Some(file) = open_ours(site)? {
                    lock(&file, site, patience)?;
                    unlink_locked(&file, site)?;
                }
            }
            Err(error) => return Err(site.failed(&error)),
        }
    }
}

/// Removes what processes that died while they made a file left in the directory, of whichever
/// namespace.
pub(crate) fn remove_abandoned(dir: &Path, settings: &'static SettingNames) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| is_partial(path)) {
        let site = OwnDirectory::new(path, settings);
        // What is not ours, or is still locked, is left alone.
        if let Ok(Some(file)) = open_ours(&site)
            && file.try_lock().is_ok()
        {
            tracing::info!(path = %site.path.display(), "removing a file that was never finished");
            // The next process that needs the name will meet the error again.
            let _ = unlink_locked(&file, &site);
        }
    }
}

fn is_partial(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with("kvbm-") && name.ends_with(".partial"))
}

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
