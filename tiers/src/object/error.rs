//! What a store's errors mean for a copy.
//!
//! A caller drops a block that is not there, and keeps one that is unavailable for now. So an error
//! says which:
//!
//! | the store says | kind | the block |
//! |---|---|---|
//! | 404, no such file | `Io` | is gone |
//! | 416, or an object or file that ends before the block does | `Io` | is gone |
//! | EIO and other errors of a file | `Io` | cannot be read any more |
//! | 412 or 409 on a write, and the object is not ours | `Io` | was not written |
//! | 500, 503, 429, 401, 403 and other refusals | `Unavailable` | stays |
//! | connection refused or lost, no answer in time, an answer that is cut off | `Unavailable` | stays |
//! | a file that we may not open (EACCES, EROFS), or not now (EMFILE, ENFILE, ENOMEM) | `Unavailable` | stays |
//! | a file system that is full (ENOSPC, EDQUOT) | `NoSpace` | was not written |

use std::error::Error;
use std::io;

use object_store::client::HttpError;
use tokio::time::error::Elapsed;

use crate::copy::CopyErrorKind;

/// The text of a store's error, without credentials. Servers quote parts of a request that they
/// refuse.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct StoreError(String);

impl StoreError {
    pub(super) fn new(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<Elapsed> for StoreError {
    fn from(elapsed: Elapsed) -> Self {
        Self(elapsed.to_string())
    }
}

/// Strings that no message may contain.
#[derive(Clone, Default)]
pub(super) struct UrlSecrets(Vec<String>);

impl UrlSecrets {
    pub(super) fn new(secrets: impl IntoIterator<Item = String>) -> Self {
        Self(secrets.into_iter().filter(|secret| !secret.is_empty()).collect())
    }

    pub(super) fn scrub(&self, error: &object_store::Error) -> StoreError {
        let hide = |text: String, secret: &String| text.replace(secret, "<hidden>");
        StoreError(self.0.iter().fold(error.to_string(), hide))
    }
}

/// Whether the service said more than that it refuses the request.
pub(super) fn is_an_answer(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::Generic { .. })
        && !causes(error).any(<dyn Error>::is::<HttpError>)
}

pub(super) fn remote_kind(error: &object_store::Error) -> CopyErrorKind {
    use object_store::Error::{AlreadyExists, NotFound, Precondition};
    match error {
        NotFound { .. } | AlreadyExists { .. } | Precondition { .. } => CopyErrorKind::Io,
        _ => CopyErrorKind::Unavailable,
    }
}

pub(super) fn local_kind(error: &object_store::Error) -> CopyErrorKind {
    let cause = causes(error).find_map(|cause| cause.downcast_ref::<io::Error>());
    cause.map_or(CopyErrorKind::Io, file_kind)
}

/// What an error of a file system means.
pub(super) fn file_kind(error: &io::Error) -> CopyErrorKind {
    use io::ErrorKind::{
        OutOfMemory, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull, TimedOut,
    };
    match (error.kind(), error.raw_os_error()) {
        (StorageFull | QuotaExceeded, _) => CopyErrorKind::NoSpace,
        (PermissionDenied | ReadOnlyFilesystem | OutOfMemory | TimedOut, _)
        | (_, Some(libc::EMFILE | libc::ENFILE)) => CopyErrorKind::Unavailable,
        _ => CopyErrorKind::Io,
    }
}

/// An error and what is behind it.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_hidden_wherever_they_are() {
        let secrets = UrlSecrets::new(["AKIA".to_owned(), "s3cr3t".to_owned(), String::new()]);
        let error =
            object_store::Error::Generic { store: "S3", source: "AKIA signed with s3cr3t".into() };
        let text = secrets.scrub(&error).to_string();
        assert_eq!(text, "Generic S3 error: <hidden> signed with <hidden>");
    }

    #[test]
    fn what_a_file_system_says_is_found_below_other_errors() {
        let kind = |errno| {
            let inner = generic(io::Error::from_raw_os_error(errno));
            local_kind(&generic(inner))
        };
        assert_eq!(kind(libc::ENOSPC), CopyErrorKind::NoSpace);
        assert_eq!(kind(libc::EDQUOT), CopyErrorKind::NoSpace);
        assert_eq!(kind(libc::EACCES), CopyErrorKind::Unavailable);
        assert_eq!(kind(libc::EMFILE), CopyErrorKind::Unavailable);
        assert_eq!(kind(libc::EIO), CopyErrorKind::Io);
        assert_eq!(kind(libc::ESTALE), CopyErrorKind::Io);
    }

    fn generic(source: impl Error + Send + Sync + 'static) -> object_store::Error {
        object_store::Error::Generic { store: "files", source: Box::new(source) }
    }
}
