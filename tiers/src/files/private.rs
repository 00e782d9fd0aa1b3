//! Files of secrets that settings name: what must hold of one before it is read.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Opens a file of secrets for reading. A pipe in its place is opened too, without waiting for one
/// who writes it.
///
/// # Errors
/// The system does not open it.
pub fn open_secret(path: impl AsRef<Path>) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Why a file is no place for a secret, and what to do; `None`: only its owner, who is this user or
/// root, can read it.
///
/// # Errors
/// The system does not tell.
pub fn privacy_problem(file: &File) -> io::Result<Option<String>> {
    let about = file.metadata()?;
    let (user, owner, mode) =
        (rustix::process::geteuid().as_raw(), about.uid(), about.mode() & 0o777);
    Ok(if !about.is_file() {
        Some("is not a file".to_owned())
    } else if owner != user && owner != 0 {
        Some(format!("belongs to user {owner}: chown it to user {user}"))
    } else if mode & 0o077 != 0 {
        Some(format!("has mode {mode:04o}, so others can read it: chmod 0600"))
    } else {
        None
    })
}
