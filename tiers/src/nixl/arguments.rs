//! What calls of the library take besides their subject, and what they answer.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ptr::null_mut;

use super::agent::{Agent, BackendHandle};
use super::sys::{self, NixlApi, OptArgsS, ParamsS, Status};
use crate::error::{SetupError, SetupErrorKind};

/// Optional arguments: which backend is to do it.
pub(super) struct OptArgs(*mut OptArgsS, Agent);

impl OptArgs {
    pub(super) fn new(agent: &Agent) -> Result<Self, SetupError> {
        let mut handle = null_mut();
        // SAFETY: makes empty arguments, ours.
        done(unsafe { (agent.api().create_opt_args)(&raw mut handle) }, "hold arguments")?;
        Ok(Self(handle, agent.clone()))
    }

    pub(super) fn with_backend(self, backend: &BackendHandle) -> Result<Self, SetupError> {
        // SAFETY: both are valid, and the library copies the backend's pointer.
        let status = unsafe { (self.1.api().opt_args_add_backend)(self.0, backend.as_ptr()) };
        done(status, "hold arguments")?;
        Ok(self)
    }

    pub(super) const fn as_ptr(&self) -> *mut OptArgsS {
        self.0
    }
}

impl Drop for OptArgs {
    fn drop(&mut self) {
        // SAFETY: ours; the library copies what it keeps.
        unsafe { (self.1.api().destroy_opt_args)(self.0) };
    }
}

/// Parameters of a plugin that is to be started.
pub(super) struct PluginParameters(*mut ParamsS, &'static NixlApi);

impl PluginParameters {
    pub(super) fn new(
        api: &'static NixlApi,
        parameters: &BTreeMap<String, String>,
    ) -> Result<Self, SetupError> {
        let mut handle = null_mut();
        // SAFETY: makes an empty map, ours.
        done(unsafe { (api.create_params)(&raw mut handle) }, "hold parameters")?;
        let params = Self(handle, api);
        for (key, value) in parameters {
            let (key, value) =
                (c_string(key, "a NIXL parameter")?, c_string(value, "a NIXL parameter")?);
            // SAFETY: the map is ours, key and value are strings, which it copies.
            let status = unsafe { (api.params_add)(params.0, key.as_ptr(), value.as_ptr()) };
            done(status, "hold parameters")?;
        }
        Ok(params)
    }

    pub(super) const fn as_ptr(&self) -> *mut ParamsS {
        self.0
    }
}

impl Drop for PluginParameters {
    fn drop(&mut self) {
        // SAFETY: ours; the library copies what it keeps.
        unsafe { (self.1.destroy_params)(self.0) };
    }
}

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
    SetupError::unavailable(message)
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
