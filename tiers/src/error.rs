//! What can go wrong while a region or a backend is set up.

use std::sync::Arc;

/// What a caller can do about a region or backend that did not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SetupErrorKind {
    /// A setting makes no sense on this machine. Change it.
    Invalid,
    /// There is less memory or disk space than asked for. Ask for less or make room.
    NoSpace,
    /// A directory or file is not ours to write. Choose another or change its permissions.
    NotWritable,
    /// Another process uses it. Stop that process or choose another place.
    InUse,
    /// The system does not offer what was asked for. Choose another backend.
    Unavailable,
    /// The medium failed.
    Io,
}

/// A region or backend that did not open. The message names the setting to change where there is one.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct SetupError {
    kind: SetupErrorKind,
    message: String,
    #[source]
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl SetupError {
    /// An error without a cause below it.
    pub fn new(kind: SetupErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// An error caused by `source`.
    pub fn caused(
        kind: SetupErrorKind,
        message: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self { kind, message: message.into(), source: Some(Arc::new(source)) }
    }

    /// What can be done about it.
    pub const fn kind(&self) -> SetupErrorKind {
        self.kind
    }
}
