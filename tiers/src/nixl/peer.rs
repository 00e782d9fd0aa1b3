//! Agents elsewhere.

use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ptr::null_mut;

use super::agent::Agent;
use super::status::{done, refused};
use super::sys;
use crate::error::{SetupError, SetupErrorKind};

/// Another agent that this one has met. Dropping the last handle of it forgets it; lists and
/// requests that lead there hold one.
pub struct RemotePeer {
    agent: Agent,
    name: CString,
}

impl Agent {
    /// Gets to know a peer by its [`metadata`](Self::metadata).
    ///
    /// # Errors
    /// `InUse`: the peer has this agent's name. `Invalid`: these bytes describe no agent, or
    /// another one of a known name. `Unavailable`: no common backend.
    pub fn load_remote_metadata(&self, metadata: &[u8]) -> Result<RemotePeer, SetupError> {
        let mut name: *mut c_char = null_mut();
        // SAFETY: the agent lives and this many bytes are there; the name is ours, from `malloc`,
        // on success.
        let status = unsafe {
            (self.api().load_remote_md)(
                self.handle(),
                metadata.as_ptr().cast(),
                metadata.len(),
                &raw mut name,
            )
        };
        match status {
            sys::SUCCESS => {
                // SAFETY: a string that the library made for us.
                let peer = RemotePeer::new(self, unsafe { CStr::from_ptr(name) });
                // SAFETY: from `malloc`, and used no more.
                unsafe { libc::free(name.cast()) };
                Ok(peer)
            }
            sys::ERROR_INVALID_PARAM if !metadata.is_empty() => {
                let message = format!(
                    "agent {:?} met metadata that names itself or no agent at all: give every agent a name of its own",
                    self.name()
                );
                Err(SetupError::new(SetupErrorKind::InUse, message))
            }
            sys::ERROR_INVALID_PARAM => Err(SetupError::new(
                SetupErrorKind::Invalid,
                "the metadata of a NIXL agent is empty",
            )),
            status => Err(refused(
                status,
                "use a peer's metadata: cut short, of an agent with a known name, or without a common backend",
            )),
        }
    }
}

impl RemotePeer {
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

    /// Connects now rather than at the first transfer, which would otherwise take 100 to 500 ms
    /// longer.
    ///
    /// # Errors
    /// `Unavailable`: it does not answer.
    pub fn connect(&self) -> Result<(), SetupError> {
        // SAFETY: the agent lives and the name is a string.
        let status = unsafe {
            (self.agent.api().agent_make_connection)(
                self.agent.handle(),
                self.name.as_ptr(),
                null_mut(),
            )
        };
        done(status, &format!("connect to {:?}", self.name))
    }

    /// Sends a short message, which arrives in its [`notifications`](Agent::notifications).
    ///
    /// # Errors
    /// `Unavailable`: no backend carries messages there, or the peer is gone.
    pub fn notify(&self, message: &[u8]) -> Result<(), SetupError> {
        let agent = &self.agent;
        // SAFETY: the agent lives, the name is a string, and this many bytes are there.
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

impl fmt::Debug for RemotePeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Peer").field(&self.name).finish()
    }
}

impl Drop for RemotePeer {
    fn drop(&mut self) {
        // SAFETY: the agent lives, the name is a string, and no request leads there any more.
        unsafe { (self.agent.api().invalidate_remote_md)(self.agent.handle(), self.name.as_ptr()) };
    }
}
