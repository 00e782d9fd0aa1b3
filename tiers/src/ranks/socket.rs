//! Where a leader and its ranks meet: a socket in a directory that both were told.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::clock;
use crate::error::{SetupError, SetupErrorKind};
use crate::files::{
    LockWait, LockedFile, OwnDirectory, SettingNames, is_private_dir, make_private_dir, open_kept,
    open_ours, unlink,
};

/// The socket, readable and writable by its owner alone.
const SOCKET: &str = "ranks.sock";
/// Where it lies until it is closed to others.
const FRESH_SOCKET: &str = ".ranks.sock";
/// Locked by the leader of this directory's ranks, and names its process.
const LOCK: &str = "leader.lock";
/// Between two looks whether a leader listens.
const PAUSE: Duration = Duration::from_millis(20);

/// What to change when leader and ranks do not meet.
static SETTINGS: SettingNames = SettingNames {
    tier: "the ranks",
    dir: "directory for the ranks",
    capacity: "the number of ranks",
    space: "make room, or choose another directory for the ranks",
};

/// The leader's place in a directory. It ends with the value, or with the process.
#[derive(Debug)]
pub(super) struct LeaderSocket {
    dir: PathBuf,
    pub(super) listener: UnixListener,
    /// Held for as long as it is open.
    _lock: LockedFile,
}

impl LeaderSocket {
    /// Takes the place; the last component of `dir` is created if it is missing.
    pub(super) fn open(dir: &Path) -> Result<Self, SetupError> {
        let site = OwnDirectory::new(dir, &SETTINGS);
        make_private_dir(&site)?;
        let lock = lock(&site.at(dir.join(LOCK)))?;
        let listener = listen(dir).map_err(|error| unusable(dir, error))?;
        Ok(Self { dir: dir.to_owned(), listener, _lock: lock })
    }

    /// No rank finds it from here on.
    pub(super) fn close(&self) {
        // A successor may have taken the place only after the lock is released: the socket is still
        // ours.
        unlink(&self.dir.join(SOCKET));
    }
}

fn lock(site: &OwnDirectory) -> Result<LockedFile, SetupError> {
    let file = match open_kept(site, &mut LockWait::new(Duration::ZERO), |_| Ok(())) {
        Ok(kept) => kept.file,
        Err(error) if error.kind() == SetupErrorKind::InUse => return Err(led_already(site)),
        Err(error) => return Err(error),
    };
    let process = std::process::id().to_string();
    let noted = file.set_len(0).and_then(|()| file.write_all_at(process.as_bytes(), 0));
    noted.map_err(|error| site.failed(&error))?;
    Ok(file)
}

/// A socket that a dead leader left is replaced; no one sees one that is not closed to others yet.
/// The lock is ours: so is what lies here, finished or not.
fn listen(dir: &Path) -> io::Result<UnixListener> {
    let fresh = dir.join(FRESH_SOCKET);
    unlink(&fresh);
    let listener = UnixListener::bind(&fresh)?;
    fs::set_permissions(&fresh, Permissions::from_mode(0o600))?;
    fs::rename(&fresh, dir.join(SOCKET))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects to the leader, once there is one.
pub(super) fn connect(dir: &Path, deadline: Instant) -> Result<UnixStream, SetupError> {
    let site = OwnDirectory::new(dir, &SETTINGS);
    loop {
        // Whose directory it is says whose leader listens there.
        let found = if is_private_dir(&site)? {
            UnixStream::connect(dir.join(SOCKET))
        } else {
            Err(ErrorKind::NotFound.into())
        };
        match found {
            Ok(stream) => return Ok(stream),
            Err(error) if !is_absence(&error) => return Err(unusable(dir, error)),
            Err(error) if clock::now() >= deadline => return Err(no_leader(dir, error)),
            Err(_) => sleep(PAUSE),
        }
    }
}

/// No leader listens, yet or any more.
fn is_absence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock
    )
}

fn no_leader(dir: &Path, error: io::Error) -> SetupError {
    let message =
        format!("no leader listens in {}: start it, or name its directory", dir.display());
    SetupError::caused(SetupErrorKind::Unavailable, message, error)
}

fn led_already(lock: &OwnDirectory) -> SetupError {
    let mut holder = String::new();
    if let Ok(Some(mut file)) = open_ours(lock) {
        let _ = file.read_to_string(&mut holder);
    }
    let dir = lock.path.parent().unwrap_or(&lock.path);
    let message = format!(
        "process {holder} (or a child that it forked) leads the ranks of {} already: stop it, or choose another \
         directory",
        dir.display()
    );
    SetupError::new(SetupErrorKind::InUse, message)
}

fn unusable(dir: &Path, error: io::Error) -> SetupError {
    let message =
        format!("cannot meet ranks in {}: {error}; choose another directory", dir.display());
    SetupError::caused(SetupErrorKind::NotWritable, message, error)
}
