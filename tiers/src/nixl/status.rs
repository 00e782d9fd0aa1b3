//! The text that the library's calls take, and what they answer.

use std::ffi::CString;

use super::sys::{self, Status};
use crate::error::{SetupError, SetupErrorKind};

pub(super) fn c_string(text: &str, what: &str) -> Result<CString, SetupError> {
    CString::new(text).map_err(|e| {
        SetupError::caused(SetupErrorKind::Invalid, format!("{what} holds a zero byte"), e)
    })
}

/// Whether a call that sets something up succeeded.
pub(super) fn done(status: Status, what: &str) -> Result<(), SetupError> {
    if status >= sys::SUCCESS { Ok(()) } else { Err(refused(status, what)) }
}

pub(super) fn refused(status: Status, what: &str) -> SetupError {
    let message = format!("NIXL cannot {what} ({})", status_name(status));
    SetupError::new(SetupErrorKind::Unavailable, message)
}

/// The library reduces its own errors to these few.
pub(super) const fn status_name(status: Status) -> &'static str {
    match status {
        sys::SUCCESS => "success",
        sys::IN_PROGRESS => "in progress",
        sys::ERROR_INVALID_PARAM => "invalid parameter",
        sys::ERROR_BACKEND => "backend error",
        sys::ERROR_INVALID_STATE => "invalid state",
        sys::ERROR_EXCEPTION => "exception",
        sys::ERROR_NOT_FOUND => "not found",
        _ => "unknown error",
    }
}
