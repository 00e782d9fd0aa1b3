//! The crate's error: what happened, where, and, by its kind, what a caller can do.

use kvbm_tiers::Failure;

/// What a caller can do about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting or an argument is wrong: the message names it and what is valid.
    Invalid,
    /// The system lacks what was asked for (memory, a writable directory, a reachable store).
    Unavailable,
    /// No room: every leaf of the tier is leased, in flight or not yet flushed. Go on without
    /// saving.
    Full,
    /// The manager is shutting down.
    Closed,
    /// The lease is of a namespace that a reset ended: lease the chain again.
    Stale,
}

/// An error of the block manager.
#[derive(Clone, Debug, thiserror::Error)]
#[error(transparent)]
pub struct Error(Failure<ErrorKind>);

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Failure::new(kind, message))
    }

    pub(crate) fn caused(
        kind: ErrorKind,
        message: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self(Failure::caused(kind, message, source))
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message)
    }

    pub(crate) fn closed() -> Self {
        Self::new(ErrorKind::Closed, "the block manager was shut down before the transfer ended")
    }

    pub(crate) fn stale() -> Self {
        Self::new(ErrorKind::Stale, "the lease is from before a reset: lease the chain again")
    }

    /// What can be done about it.
    pub const fn kind(&self) -> ErrorKind {
        self.0.kind()
    }
}

/// Result of the block manager.
pub type Result<T, E = Error> = std::result::Result<T, E>;
