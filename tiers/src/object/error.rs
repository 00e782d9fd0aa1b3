//! What a store's errors mean for a copy.

use std::error::Error;
use std::io;

use super::open::Store;
use crate::copy::{CopyError, CopyErrorKind};

/// The text of a store's error, without credentials. Servers quote parts of a request that they refuse.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct StoreError(String);

/// Texts that no message may contain.
#[derive(Clone, Default)]
pub(super) struct Secrets(Vec<String>);

impl Secrets {
    pub(super) fn new(secrets: impl IntoIterator<Item = String>) -> Self {
        Self(secrets.into_iter().filter(|secret| !secret.is_empty()).collect())
    }

    pub(super) fn scrub(&self, error: &object_store::Error) -> StoreError {
        let hide = |text: String, secret: &String| text.replace(secret, "<hidden>");
        StoreError(self.0.iter().fold(error.to_string(), hide))
    }
}

impl Store {
    /// `message` says what was being done.
    pub(super) fn copy_error(&self, message: String, error: &object_store::Error) -> CopyError {
        let kind = if is_full(error) {
            CopyErrorKind::NoSpace
        } else if self.is_remote() && !is_about_the_object(error) {
            CopyErrorKind::Unavailable
        } else {
            CopyErrorKind::Io
        };
        CopyError::caused(kind, message, self.secrets.scrub(error))
    }
}

/// Whether the store answered and only this object is not as it should be.
const fn is_about_the_object(error: &object_store::Error) -> bool {
    use object_store::Error::{AlreadyExists, NotFound, Precondition};
    matches!(error, NotFound { .. } | AlreadyExists { .. } | Precondition { .. })
}

fn is_full(error: &object_store::Error) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        let kind = error.downcast_ref().map(io::Error::kind);
        if matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)) {
            return true;
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_hidden_wherever_they_are() {
        let secrets = Secrets::new(["AKIA".to_owned(), "s3cr3t".to_owned(), String::new()]);
        let error = object_store::Error::Generic { store: "S3", source: "AKIA signed with s3cr3t".into() };
        let text = secrets.scrub(&error).to_string();
        assert_eq!(text, "Generic S3 error: <hidden> signed with <hidden>");
    }

    #[test]
    fn a_full_disk_is_found_below_other_errors() {
        let io = io::Error::from(io::ErrorKind::StorageFull);
        let inner = object_store::Error::Generic { store: "inner", source: Box::new(io) };
        assert!(is_full(&object_store::Error::Generic { store: "outer", source: Box::new(inner) }));
        let other = io::Error::from(io::ErrorKind::TimedOut);
        assert!(!is_full(&object_store::Error::Generic { store: "outer", source: Box::new(other) }));
    }
}
