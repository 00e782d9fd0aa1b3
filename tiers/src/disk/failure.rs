//! What a file system's errors mean for whoever opens slot files.

use std::io::{self, ErrorKind};
use std::path::Path;

use crate::error::{SetupError, SetupErrorKind};

pub(super) fn no_space(path: &Path, why: &str) -> SetupError {
    let message = format!(
        "{}: no space for the disk tier ({why}); \
         lower disk.capacity (DYN_KVBM_DISK_CACHE_GB) or choose another disk.dirs (DYN_KVBM_DISK_CACHE_DIR)",
        path.display()
    );
    SetupError::new(SetupErrorKind::NoSpace, message)
}

pub(crate) fn failed(path: &Path, error: &io::Error) -> SetupError {
    let kind = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            return no_space(path, &error.to_string());
        }
        ErrorKind::PermissionDenied
        | ErrorKind::NotFound
        | ErrorKind::NotADirectory
        | ErrorKind::ReadOnlyFilesystem => SetupErrorKind::NotWritable,
        _ if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
            return short_of(path, error);
        }
        _ => SetupErrorKind::Io,
    };
    let message = format!("{}: {error}; choose another disk.dirs (DYN_KVBM_DISK_CACHE_DIR)", path.display());
    SetupError::new(kind, message)
}

fn short_of(path: &Path, error: &io::Error) -> SetupError {
    let message = format!("{}: {error}; raise the limit on open files, or free memory", path.display());
    SetupError::new(SetupErrorKind::Unavailable, message)
}
