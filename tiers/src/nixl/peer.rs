//! Agents elsewhere.

use std::ffi::{CStr, CString};
use std::fmt;
use std::ptr::null_mut;

use super::agent::Agent;
use super::arguments::done;
use crate::error::SetupError;

/// Another agent that this one has met. Dropping the last handle of it forgets it; lists and requests that
/// lead there hold one.
pub struct Peer {
    agent: Agent,
    name: CString,
}

impl Peer {
    pub(super) fn new(agent: &Agent, name: &CStr) -> Self {
        Self { agent: agent.clone(), name: name.to_owned() }
    }

    /// The agent that met it.
    pub const fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.name.to_str().unwrap_or_default()
    }

    /// Connects now rather than at the first transfer, which would otherwise take 100 to 500 ms longer.
    ///
    /// # Errors
    /// `Unavailable`: it does not answer.
    pub fn connect(&self) -> Result<(), SetupError> {
        // SAFETY: the agent lives and the name is a string.
        let status = unsafe {
            (self.agent.api().agent_make_connection)(self.agent.handle(), self.name.as_ptr(), null_mut())
        };
        done(status, &format!("connect to {:?}", self.name))
    }

    /// Sends a short message, which arrives in its [`notifications`](Agent::notifications).
    ///
    /// # Errors
    /// `Unavailable`: no backend carries messages there, or the peer is gone.
    pub fn notify(&self, message: &[u8]) -> Result<(), SetupError> {
        let agent = &self.agent;
        // SAFETY: the agent lives, the name is a string, and so many bytes are there.
        let status = unsafe {
            (agent.api().gen_notif)(
                agent.handle(),
                self.name.as_ptr(),
                message.as_ptr().cast(),
                message.len(),
                null_mut(),
            )
        };
        done(status, &format!("notify {:?}", self.name))
    }

    pub(super) fn c_name(&self) -> &CStr {
        &self.name
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Peer").field(&self.name).finish()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // SAFETY: the agent lives, the name is a string, and no request leads there any more.
        unsafe { (self.agent.api().invalidate_remote_md)(self.agent.handle(), self.name.as_ptr()) };
    }
}
