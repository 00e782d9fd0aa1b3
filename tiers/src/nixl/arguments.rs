//! What calls of the library take besides their subject.

use std::ptr::null_mut;

use super::agent::{Agent, BackendHandle};
use super::status::done;
use super::sys::OptArgsS;
use crate::error::SetupError;

/// Optional arguments: which backend is to do it, and what to tell the peer at the end.
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

    pub(super) fn with_notification(self, message: &[u8]) -> Result<Self, SetupError> {
        let api = self.1.api();
        // SAFETY: this many bytes are there, and the library copies them.
        let status =
            unsafe { (api.opt_args_set_notif_msg)(self.0, message.as_ptr().cast(), message.len()) };
        done(status, "hold arguments")?;
        // SAFETY: the arguments are ours.
        done(unsafe { (api.opt_args_set_has_notif)(self.0, true) }, "hold arguments")?;
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
