//! Agents: who takes part in transfers, here and elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::arguments::{PluginParameters, c_string, done, refused};
use super::library::{Library, REMEDY};
use super::sys::{self, AgentConfig, AgentS, BackendS, MemListS, ParamsS, Status};
use crate::error::{SetupError, SetupErrorKind};

/// A participant of transfers, in this process. Cheap to clone: it ends with its last handle, and
/// every backend, registration, list and request holds one.
#[derive(Clone)]
pub struct Agent(Arc<AgentInner>);

struct AgentInner {
    library: &'static Library,
    handle: NonNull<AgentS>,
    name: CString,
}

// SAFETY: the agent is made with strict thread synchronisation: its functions may be called from
// any thread.
unsafe impl Send for AgentInner {}
// SAFETY: as above.
unsafe impl Sync for AgentInner {}

/// Names of the agents of this process. The library takes a second agent of a name for the first.
static NAMES: Mutex<BTreeSet<CString>> = Mutex::new(BTreeSet::new());

impl Agent {
    /// An agent whose name no other among its peers has.
    ///
    /// # Errors
    /// `InUse`: this process has an agent of that name. `Invalid`: the name is empty or holds a
    /// zero byte. `Unavailable`: the library refuses.
    pub fn new(library: &'static Library, name: &str) -> Result<Self, SetupError> {
        let name = c_string(name, "the name of a NIXL agent")?;
        if name.is_empty() {
            return Err(SetupError::invalid("a NIXL agent needs a name"));
        }
        if !NAMES.lock().insert(name.clone()) {
            let message =
                format!("this process has a NIXL agent {name:?} already: choose another name");
            return Err(SetupError::new(SetupErrorKind::InUse, message));
        }
        match create(library, &name) {
            Ok(handle) => Ok(Self(Arc::new(AgentInner { library, handle, name }))),
            Err(status) => {
                NAMES.lock().remove(&name);
                Err(refused(status, &format!("make the agent {name:?}")))
            }
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.0.name.to_str().unwrap_or_default()
    }

    /// The library that it runs on.
    pub fn library(&self) -> &'static Library {
        self.0.library
    }

    /// Loads a plugin without starting it.
    ///
    /// # Errors
    /// `Unavailable`: there is no such plugin, or it lacks a library that it needs. `Invalid`: no
    /// name.
    pub fn probe(&self, plugin: &str) -> Result<(), SetupError> {
        let (mut mems, mut params): (*mut MemListS, *mut ParamsS) = (null_mut(), null_mut());
        let name = c_string(plugin, "the name of a NIXL plugin")?;
        let api = self.api();
        // SAFETY: the agent lives, the name is a string, and the lists are ours if the call
        // succeeds.
        let status = unsafe {
            (api.get_plugin_params)(self.handle(), name.as_ptr(), &raw mut mems, &raw mut params)
        };
        if status != sys::SUCCESS {
            return Err(cannot_load(plugin));
        }
        // SAFETY: ours, and used no more.
        unsafe { ((api.destroy_mem_list)(mems), (api.destroy_params)(params)) };
        Ok(())
    }

    /// Starts a plugin with its default parameters, some of them changed.
    ///
    /// # Errors
    /// `Unavailable`: the plugin cannot be loaded, or does not start with these parameters.
    /// `Invalid`: a parameter holds a zero byte.
    pub fn backend(
        &self,
        plugin: &str,
        parameters: &BTreeMap<String, String>,
    ) -> Result<BackendHandle, SetupError> {
        self.probe(plugin)?;
        let name = c_string(plugin, "the name of a NIXL plugin")?;
        let params = PluginParameters::new(self.api(), parameters)?;
        let mut handle = null_mut();
        // SAFETY: agent and parameters live, the name is a string; the handle is ours if the call
        // succeeds.
        let status = unsafe {
            (self.api().create_backend)(
                self.handle(),
                name.as_ptr(),
                params.as_ptr(),
                &raw mut handle,
            )
        };
        match NonNull::new(handle).filter(|_| status == sys::SUCCESS) {
            Some(handle) => {
                Ok(BackendHandle { agent: self.clone(), handle, plugin: plugin.to_owned() })
            }
            None => {
                let message = format!(
                    "the NIXL plugin {plugin} does not start with the parameters {:?}: see what it printed",
                    parameters.keys()
                );
                Err(SetupError::unavailable(message))
            }
        }
    }

    /// What a peer needs in order to reach this agent and the memory that is registered with it by
    /// now, in a form to be sent by any channel.
    ///
    /// # Errors
    /// `Unavailable`: no backend of this agent reaches other agents.
    ///
    /// # Safety
    /// A process that has these bytes can read and write all registered memory at any time. The
    /// caller answers for them: they touch only slots whose slot handles are held for them.
    pub unsafe fn metadata(&self) -> Result<Vec<u8>, SetupError> {
        let (mut data, mut bytes) = (null_mut(), 0);
        // SAFETY: the agent lives; the data is ours, from `malloc`, if the call succeeds.
        let status =
            unsafe { (self.api().get_local_md)(self.handle(), &raw mut data, &raw mut bytes) };
        done(status, "describe itself to peers: does it have a backend that reaches them?")?;
        // SAFETY: this many bytes were returned.
        let metadata = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), bytes) }.to_vec();
        // SAFETY: from `malloc`, and used no more.
        unsafe { libc::free(data) };
        Ok(metadata)
    }

    /// Tells when it is gone, without keeping it.
    pub(super) fn watch(&self) -> AgentWatch {
        AgentWatch(Arc::downgrade(&self.0))
    }

    pub(super) fn api(&self) -> &'static sys::NixlApi {
        &self.0.library.api
    }

    pub(super) fn handle(&self) -> *mut AgentS {
        self.0.handle.as_ptr()
    }

    pub(super) fn c_name(&self) -> &CStr {
        &self.0.name
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Agent").field(&self.0.name).finish()
    }
}

impl Drop for AgentInner {
    fn drop(&mut self) {
        // SAFETY: this was the last handle: requests, lists, registrations and backends are gone.
        unsafe { (self.library.api.destroy_agent)(self.handle.as_ptr()) };
        NAMES.lock().remove(&self.name);
    }
}

/// Tells whether an agent is destroyed, to who dropped what may have been its last handle.
pub(super) struct AgentWatch(Weak<AgentInner>);

impl AgentWatch {
    pub(super) fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// Whether NIXL is told to measure its requests: by the variable that switches its own exporters
/// on.
fn has_telemetry() -> bool {
    let asked = std::env::var("NIXL_TELEMETRY_ENABLE").unwrap_or_default();
    ["y", "yes", "1", "true", "on"].iter().any(|yes| asked.trim().eq_ignore_ascii_case(yes))
}

/// The thread of UCX sleeps until something comes, or for this time. With 0 it takes a whole core.
const PROGRESS_PAUSE_US: u64 = 10_000;

fn create(library: &Library, name: &CStr) -> Result<NonNull<AgentS>, Status> {
    let config = AgentConfig {
        // Without it transfers between agents do not progress.
        enable_prog_thread: true,
        enable_listen_thread: false,
        listen_port: 0,
        thread_sync: sys::THREAD_SYNC_STRICT,
        num_workers: 1,
        pthr_delay_us: PROGRESS_PAUSE_US,
        lthr_delay_us: 100_000,
        capture_telemetry: has_telemetry(),
    };
    let mut handle = null_mut();
    // SAFETY: name and configuration live as long as the call.
    let status = unsafe {
        (library.api.create_configured_agent)(name.as_ptr(), &raw const config, &raw mut handle)
    };
    NonNull::new(handle).filter(|_| status == sys::SUCCESS).ok_or(status)
}

/// A plugin that was started for an agent. It runs as long as the agent does.
pub struct BackendHandle {
    agent: Agent,
    handle: NonNull<BackendS>,
    plugin: String,
}

// SAFETY: the handle is a pointer into the agent, whose functions may be called from any thread.
unsafe impl Send for BackendHandle {}
// SAFETY: as above; nothing is changed through it.
unsafe impl Sync for BackendHandle {}

impl BackendHandle {
    /// The agent that it works for.
    pub const fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Name of the plugin.
    pub fn plugin(&self) -> &str {
        &self.plugin
    }

    pub(super) const fn as_ptr(&self) -> *mut BackendS {
        self.handle.as_ptr()
    }
}

impl fmt::Debug for BackendHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BackendHandle").field(&self.plugin).finish()
    }
}

impl Drop for BackendHandle {
    fn drop(&mut self) {
        // SAFETY: frees the handle only; the plugin stays with the agent.
        unsafe { (self.agent.api().destroy_backend)(self.handle.as_ptr()) };
    }
}

fn cannot_load(plugin: &str) -> SetupError {
    let message = match plugin {
        "GDS" | "GDS_MT" => {
            format!(
                "the NIXL plugin {plugin} cannot be loaded: it needs libcudart and libcufile of CUDA"
            )
        }
        "LIBFABRIC" => format!("the NIXL plugin {plugin} cannot be loaded: it needs libfabric"),
        _ => format!(
            "NIXL has no plugin {plugin}, or it cannot be loaded: see what it printed; {REMEDY}"
        ),
    };
    SetupError::unavailable(message)
}

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
            sys::ERROR_INVALID_PARAM => {
                Err(SetupError::invalid("the metadata of a NIXL agent is empty"))
            }
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
