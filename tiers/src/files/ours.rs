//! Opening what is there, if it is ours.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::error::{SetupError, SetupErrorKind};
use crate::files::OwnDirectory;
use crate::files::kept::make_dir;

/// Opens a file that is there; `None`: there is none.
///
/// # Errors
/// It is not a file of this user's that is closed to all others.
pub(crate) fn open_ours(site: &OwnDirectory) -> Result<Option<File>, SetupError> {
    // O_NONBLOCK: another user may have put a device or a pipe there.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    match OpenOptions::new().read(true).write(true).custom_flags(flags).open(&site.path) {
        Ok(file) => {
            check_ours(site, &file)?;
            block_again(&file).map_err(|error| site.failed(&error))?;
            Ok(Some(file))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            Err(not_ours(site, "is a symbolic link"))
        }
        Err(error) => Err(site.failed(&error)),
    }
}

/// Rings of older kernels return EAGAIN for files that must not block, instead of waiting
/// elsewhere.
fn block_again(file: &File) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags - OFlags::NONBLOCK)?;
    Ok(())
}

fn check_ours(site: &OwnDirectory, file: &File) -> Result<(), SetupError> {
    let found = file.metadata().map_err(|error| site.failed(&error))?;
    let (us, mode) = (rustix::process::geteuid().as_raw(), found.mode() & 0o7777);
    let wrong = if !found.is_file() {
        "is not a regular file".to_owned()
    } else if found.uid() != us {
        format!("belongs to user {}, and this process runs as {us}", found.uid())
    } else if mode != 0o600 {
        format!("has mode {mode:o} where 600 keeps others from reading and changing blocks")
    } else if found.nlink() > 1 {
        format!("has {} names, so others may reach it by another way", found.nlink())
    } else {
        return Ok(());
    };
    Err(not_ours(site, &wrong))
}

fn not_ours(site: &OwnDirectory, wrong: &str) -> SetupError {
    let what = format!(
        "{wrong}; remove it, or choose another {}, best a directory that no other user can write",
        site.settings.dir
    );
    site.error(SetupErrorKind::NotWritable, &what)
}

/// Makes the directory if its last component is missing.
///
/// # Errors
/// As [`is_private_dir`].
pub(crate) fn make_private_dir(site: &OwnDirectory) -> Result<(), SetupError> {
    make_dir(&site.path, site.settings)?;
    is_private_dir(site).map(drop)
}

/// Whether there is such a directory.
///
/// # Errors
/// It is not this user's, or others may write it, and so put something else in the place of what we
/// look for there.
pub(crate) fn is_private_dir(site: &OwnDirectory) -> Result<bool, SetupError> {
    let found = match site.path.symlink_metadata() {
        Ok(found) => found,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(site.failed(&error)),
    };
    let (us, mode) = (rustix::process::geteuid().as_raw(), found.mode() & 0o7777);
    let wrong = if found.is_symlink() {
        "is a symbolic link".to_owned()
    } else if !found.is_dir() {
        "is not a directory".to_owned()
    } else if found.uid() != us {
        format!("belongs to user {}, and this process runs as {us}", found.uid())
    } else if mode & 0o022 != 0 {
        format!("has mode {mode:o}, so others may write it: chmod 700")
    } else {
        return Ok(true);
    };
    Err(not_ours(site, &wrong))
}

/// Whether the path leads to this open file.
pub(crate) fn is_at(file: &File, site: &OwnDirectory) -> Result<bool, SetupError> {
    let ours = file.metadata().map_err(|error| site.failed(&error))?;
    match site.path.symlink_metadata() {
        Ok(there) => Ok((there.dev(), there.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(site.failed(&error)),
    }
}

/// Unlinks the path if it still is this file, which the caller has locked.
pub(crate) fn unlink_locked(file: &File, site: &OwnDirectory) -> Result<(), SetupError> {
    if is_at(file, site)? {
        unlink(&site.path);
    }
    Ok(())
}

/// Removes a name; says so if that fails for another reason than that it is gone.
pub(crate) fn unlink(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != ErrorKind::NotFound
    {
        tracing::warn!(%error, path = %path.display(), "could not remove a file");
    }
}
