//! How a command fails: a paragraph for the user and an exit status.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

use kvbm::ErrorKind;
use kvbm_settings::SettingsError;

use crate::trace::TraceError;

/// Why a command ends before its time.
#[derive(Debug)]
pub(crate) struct CommandFailure {
    status: u8,
    message: String,
}

impl CommandFailure {
    /// The input, the settings or the system are not as the command needs them: the user can change
    /// that.
    const UNUSABLE: u8 = 2;
    /// Something that should not happen did.
    const UNEXPECTED: u8 = 1;

    /// What was asked for cannot be done: says what is wrong, where, and what to change.
    pub(crate) fn unusable(message: impl Into<String>) -> Self {
        Self { status: Self::UNUSABLE, message: message.into() }
    }

    /// A result that must not be.
    pub(crate) fn unexpected(message: impl Into<String>) -> Self {
        Self { status: Self::UNEXPECTED, message: message.into() }
    }

    /// The user asked to stop; the status is the shell's for that signal.
    pub(crate) fn interrupted(signal: u8) -> Self {
        Self { status: 128 + signal, message: "interrupted".to_owned() }
    }

    /// The exit status.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.status)
    }
}

impl fmt::Display for CommandFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// The error and its causes in one line. Errors that quote their cause already are not repeated.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        cause = error.source();
    }
    message
}

impl From<SettingsError> for CommandFailure {
    fn from(error: SettingsError) -> Self {
        Self::unusable(with_causes(&error))
    }
}

impl From<TraceError> for CommandFailure {
    fn from(error: TraceError) -> Self {
        Self::unusable(with_causes(&error))
    }
}

impl From<kvbm::Error> for CommandFailure {
    fn from(error: kvbm::Error) -> Self {
        match error.kind() {
            ErrorKind::Invalid | ErrorKind::Unavailable => Self::unusable(with_causes(&error)),
            _ => Self::unexpected(with_causes(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use thiserror::Error;

    use super::*;

    #[derive(Debug, Error)]
    #[error("cannot open it: {0}")]
    struct QuotedCause(#[source] io::Error);

    #[derive(Debug, Error)]
    #[error("the tier is not there")]
    struct SilentFailure(#[source] QuotedCause);

    #[test]
    fn every_cause_appears_once() {
        let error = SilentFailure(QuotedCause(io::Error::other("no such device")));
        assert_eq!(with_causes(&error), "the tier is not there: cannot open it: no such device");
    }
}
