//! Where a leader and its ranks meet: a socket in a directory that both were told.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::clock;
use crate::error::{SetupError, SetupErrorKind};

/// The socket, readable and writable by its owner alone.
const SOCKET: &str = "ranks.sock";
/// Locked by the leader of this directory's ranks, and names its process.
const LOCK: &str = "leader.lock";
/// Between two looks whether a leader listens.
const PAUSE: Duration = Duration::from_millis(20);

/// The leader's place in a directory. It ends with the value, or with the process.
#[derive(Debug)]
pub(super) struct Meeting {
    dir: PathBuf,
    pub(super) listener: UnixListener,
    /// Held for as long as it is open.
    _lock: File,
}

impl Meeting {
    /// Takes the place; the last component of `dir` is created if it is missing.
    pub(super) fn open(dir: &Path) -> Result<Self, SetupError> {
        make_dir(dir).map_err(|error| unusable(dir, error))?;
        let lock = lock(dir)?;
        let listener = listen(dir).map_err(|error| unusable(dir, error))?;
        Ok(Self { dir: dir.to_owned(), listener, _lock: lock })
    }

    /// Nobody finds it from here on.
    pub(super) fn close(&self) {
        // A successor may have taken the place only after the lock is released: the socket is still ours.
        if let Err(error) = fs::remove_file(self.dir.join(SOCKET)) {
            tracing::warn!(%error, dir = %self.dir.display(), "cannot remove the socket of a leader that ends");
        }
    }
}

fn make_dir(dir: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

fn lock(dir: &Path) -> Result<File, SetupError> {
    let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).clone();
    let mut file = options.open(dir.join(LOCK)).map_err(|error| unusable(dir, error))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(led_already(dir, &mut file)),
        Err(TryLockError::Error(error)) => return Err(unusable(dir, error)),
    }
    let noted = file.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
    noted.map_err(|error| unusable(dir, error))?;
    Ok(file)
}

/// A socket that a dead leader left is replaced; nobody sees one that is not closed to others yet.
fn listen(dir: &Path) -> io::Result<UnixListener> {
    let fresh = dir.join(format!(".{SOCKET}.{}", std::process::id()));
    let listener = UnixListener::bind(&fresh)?;
    fs::set_permissions(&fresh, Permissions::from_mode(0o600))?;
    fs::rename(&fresh, dir.join(SOCKET))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects to the leader, once there is one.
pub(super) fn connect(dir: &Path, deadline: Instant) -> Result<UnixStream, SetupError> {
    loop {
        match UnixStream::connect(dir.join(SOCKET)) {
            Ok(stream) => return Ok(stream),
            Err(error) if !is_absence(&error) => return Err(unusable(dir, error)),
            Err(error) if clock::now() >= deadline => return Err(no_leader(dir, error)),
            Err(_) => sleep(PAUSE),
        }
    }
}

/// Nobody listens yet, or not any more.
fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock)
}

fn no_leader(dir: &Path, error: io::Error) -> SetupError {
    let message = format!("no leader listens in {}: start it, or name its directory", dir.display());
    SetupError::caused(SetupErrorKind::Unavailable, message, error)
}

fn led_already(dir: &Path, lock: &mut File) -> SetupError {
    let mut holder = String::new();
    let _ = lock.read_to_string(&mut holder);
    let message = format!(
        "process {holder} (or a child that it forked) leads the ranks of {} already: stop it, or choose another \
         directory",
        dir.display()
    );
    SetupError::new(SetupErrorKind::InUse, message)
}

fn unusable(dir: &Path, error: io::Error) -> SetupError {
    let message = format!("cannot meet ranks in {}: {error}; choose another directory", dir.display());
    SetupError::caused(SetupErrorKind::NotWritable, message, error)
}
