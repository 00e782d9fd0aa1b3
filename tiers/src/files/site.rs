//! What a file system's errors mean when a file is opened.

use std::io::{self, ErrorKind};
use std::path::PathBuf;

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
        SetupError::new(SetupErrorKind::Unavailable, message)
    }
}

/// A namespace that can be part of a file's name.
pub(crate) fn checked_namespace(namespace: &str) -> Result<&str, SetupError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !namespace.is_empty() && namespace.len() <= 200 && namespace.bytes().all(allowed) {
        return Ok(namespace);
    }
    let message = format!("namespace {namespace:?}: use letters, digits, '-' and '_' only");
    Err(SetupError::new(SetupErrorKind::Invalid, message))
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
