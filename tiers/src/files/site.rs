//! Where a file lies: what its file system's errors mean, and room for it, taken before it is
//! needed.

use std::fs::File;
use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::path::PathBuf;

use rustix::fs::FallocateFlags;

use crate::error::{SetupError, SetupErrorKind};

/// Where a file lies, and the settings that its errors name.
#[derive(Clone, Debug)]
pub(crate) struct OwnDirectory {
    pub(crate) path: PathBuf,
    pub(crate) settings: &'static SettingNames,
}

/// What to change when a file of a tier cannot be had.
#[derive(Debug)]
pub(crate) struct SettingNames {
    /// `the disk tier`.
    pub(crate) tier: &'static str,
    /// Chooses the directory.
    pub(crate) dir: &'static str,
    /// Chooses the size.
    pub(crate) capacity: &'static str,
    /// What to do where there is too little space.
    pub(crate) space: &'static str,
}

impl OwnDirectory {
    pub(crate) fn new(path: impl Into<PathBuf>, settings: &'static SettingNames) -> Self {
        Self { path: path.into(), settings }
    }

    /// Another file of the same tier.
    pub(crate) fn at(&self, path: impl Into<PathBuf>) -> Self {
        Self::new(path, self.settings)
    }

    pub(crate) fn error(&self, kind: SetupErrorKind, what: &str) -> SetupError {
        SetupError::new(kind, format!("{} {what}", self.path.display()))
    }

    pub(crate) fn no_space(&self, why: &str) -> SetupError {
        let SettingNames { tier, space, .. } = self.settings;
        let message = format!("{}: no space for {tier} ({why}); {space}", self.path.display());
        SetupError::new(SetupErrorKind::NoSpace, message)
    }

    pub(crate) fn failed(&self, error: &io::Error) -> SetupError {
        let kind = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                return self.no_space(&error.to_string());
            }
            ErrorKind::PermissionDenied
            | ErrorKind::NotFound
            | ErrorKind::NotADirectory
            | ErrorKind::ReadOnlyFilesystem => SetupErrorKind::NotWritable,
            _ if matches!(
                error.raw_os_error(),
                Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)
            ) =>
            {
                return self.short_of(error);
            }
            _ => SetupErrorKind::Io,
        };
        let message =
            format!("{}: {error}; choose another {}", self.path.display(), self.settings.dir);
        SetupError::new(kind, message)
    }

    fn short_of(&self, error: &io::Error) -> SetupError {
        let message = format!(
            "{}: {error}; raise the limit on open files, or free memory",
            self.path.display()
        );
        SetupError::unavailable(message)
    }
}

/// A namespace that can be part of a file's name.
pub(crate) fn checked_namespace(namespace: &str) -> Result<&str, SetupError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !namespace.is_empty() && namespace.len() <= 200 && namespace.bytes().all(allowed) {
        return Ok(namespace);
    }
    let message = format!("namespace {namespace:?}: use letters, digits, '-' and '_' only");
    Err(SetupError::invalid(message))
}

/// Gives a file that was there another size; what lies below that stays.
pub(crate) fn resize(
    site: &OwnDirectory,
    file: &File,
    bytes: u64,
    zerofill: bool,
) -> Result<(), SetupError> {
    let found = file.metadata().map_err(|error| site.failed(&error))?.len();
    if found == bytes {
        return Ok(());
    }
    tracing::info!(path = %site.path.display(), found, bytes, "a file is given another size");
    if found > bytes {
        file.set_len(bytes).map_err(|error| site.failed(&error))
    } else {
        fill(site, file, bytes, zerofill)
    }
}

/// Gives the file its size, with the space behind it. `zerofill`: by writing, where the file system
/// cannot otherwise.
pub(crate) fn fill(
    site: &OwnDirectory,
    file: &File,
    bytes: u64,
    zerofill: bool,
) -> Result<(), SetupError> {
    let found = file.metadata().map_err(|error| site.failed(&error))?.len();
    check_space(site, file, bytes.saturating_sub(found))?;
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) if zerofill => {
            tracing::info!(path = %site.path.display(), "no fallocate here: writing zeroes");
            zero_fill(file, bytes.saturating_sub(found)).map_err(|error| site.failed(&error))
        }
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            let message = format!(
                "{}: the file system has no fallocate; \
                 allow disk.zerofill_fallback (DYN_KVBM_DISK_ZEROFILL_FALLBACK)",
                site.path.display()
            );
            Err(SetupError::unavailable(message))
        }
        Err(error) => Err(site.failed(&error.into())),
    }
}

/// Checks that the file system has `bytes` bytes for the file.
pub(crate) fn check_space(site: &OwnDirectory, file: &File, bytes: u64) -> Result<(), SetupError> {
    let stat = rustix::fs::fstatvfs(file).map_err(|error| site.failed(&error.into()))?;
    let (limit, available) = (stat.f_blocks, stat.f_bavail.saturating_mul(stat.f_frsize));
    // File systems in memory may have no limit of their own.
    if available >= bytes || limit == 0 {
        return Ok(());
    }
    let limit = limit.saturating_mul(stat.f_frsize);
    let [wanted, available, limit] = [bytes, available, limit].map(|bytes| bytes >> 20);
    Err(site.no_space(&format!("{wanted} MiB wanted, {available} MiB of {limit} MiB available")))
}

/// That a file that was there is of the size that it would be given.
pub(crate) fn check_size(site: &OwnDirectory, file: &File, wanted: u64) -> Result<(), SetupError> {
    let found = file.metadata().map_err(|error| site.failed(&error))?.len();
    if found == wanted {
        return Ok(());
    }
    let what = format!(
        "has {found} bytes where {} asks for {wanted}; \
         restore the setting it was made with, or remove the file",
        site.settings.capacity
    );
    Err(site.error(SetupErrorKind::Invalid, &what))
}

fn zero_fill(mut file: &File, more: u64) -> io::Result<()> {
    let zeroes = vec![0; 1 << 20];
    let mut left = more;
    file.seek(SeekFrom::End(0))?;
    while left > 0 {
        let some = left.min(zeroes.len() as u64);
        file.write_all(&zeroes[..some as usize])?;
        left -= some;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lack_of_files_or_memory_is_no_medium_fault() {
        let site = OwnDirectory::new("x", &crate::disk::SETTINGS);
        for errno in [libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
            let error = site.failed(&io::Error::from_raw_os_error(errno));
            assert_eq!(error.kind(), SetupErrorKind::Unavailable, "{error}");
        }
    }
}
