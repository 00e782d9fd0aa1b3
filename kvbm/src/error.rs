//! The crate's error: what happened, where, and by its kind what a caller can do.

use std::fmt;
use std::sync::Arc;

/// What a caller can do about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting or an argument is wrong: the message names it and what is valid.
    Invalid,
    /// The system lacks what was asked for (memory, a writable directory, a reachable store).
    Unavailable,
    /// No room: every leaf of the tier is leased, in flight or not yet flushed. Go on without saving.
    Full,
    /// The manager is shutting down.
    Closed,
}

/// An error of the block manager.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    pub(crate) fn caused(
        kind: ErrorKind,
        message: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self { kind, message: message.into(), source: Some(Arc::new(source)) }
    }

    pub(crate) fn closed() -> Self {
        Self::new(ErrorKind::Closed, "the block manager was shut down before the transfer ended")
    }

    /// What can be done about it.
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source.as_ref() as _)
    }
}

/// Result of the block manager.
pub type Result<T> = std::result::Result<T, Error>;
