//! How operations of this crate fail: what happened and, by its kind, what a caller can do.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// Something that did not happen. The message says what, where and, if known, what to do; a caller
/// acts on `K`.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure<K: fmt::Debug> {
    kind: K,
    message: String,
    #[source]
    source: Option<Arc<dyn Error + Send + Sync>>,
}

impl<K: Copy + fmt::Debug> Failure<K> {
    /// An error without a cause below it.
    pub fn new(kind: K, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// An error caused by `source`.
    pub fn caused(
        kind: K,
        message: impl Into<String>,
        source: impl Error + Send + Sync + 'static,
    ) -> Self {
        Self { kind, message: message.into(), source: Some(Arc::new(source)) }
    }

    /// What can be done about it.
    pub const fn kind(&self) -> K {
        self.kind
    }
}

/// A region or backend that did not open. The message names the setting to change where there is
/// one.
pub type SetupError = Failure<SetupErrorKind>;

impl SetupError {
    /// A setting makes no sense on this machine.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(SetupErrorKind::Invalid, message)
    }

    /// The system does not offer what was asked for.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(SetupErrorKind::Unavailable, message)
    }
}

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
    /// What another process offers could harm this one. Do without it.
    Untrusted,
}
