//! Host tiers of other processes, read through the plugin UCX by NIXL's one-sided reads: the holder
//! of the blocks takes no part in them.
//!
//! | module | holds |
//! |---|---|
//! | here | the agent of the holder's side, which every reader may reach |
//! | `reader` | an agent of the reader's side: one for each holder in use |
//! | `posting` | the threads that post reads and look for their ends |
//!
//! # What ends a read
//! NIXL cancels nothing: a request that is released, or whose peer is forgotten, may still write
//! our slots, and no time limit changes that. A read ends when the library says that it is complete,
//! or else when its agent, which posted it, was destroyed: nothing that the agent started moves
//! afterwards (both were tried, over TCP and shared memory, with holders that are killed and
//! frozen). So each holder has an agent of its own, and the slots of a read come back at its end and
//! never before.
//!
//! Where there is neither RDMA nor shared memory a read fails, and says so: see [`NixlPeers::new`].

mod posting;
mod reader;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use self::posting::PostingThreads;
use self::reader::{AgentEnds, UnmetAgent};
use super::agent::{Agent, BackendHandle};
use super::library::Library;
use super::registration::Registration;
use crate::dram::DramRegion;
use crate::error::SetupError;
use crate::peers::{OneSided, TierPlace, UnmetReader};

const PLUGIN: &str = "UCX";
/// Of the plugin: UCX's own settings. Variables of the environment (`UCX_…`) come before them.
const UCX_SETTINGS: &str = "engine_config";
const SETTINGS: [(&str, &str); 3] = [
    // Else a holder whose link was cut is noticed after minutes or never.
    ("TCP_USER_TIMEOUT", "3s"),
    // Where neither hardware nor the kernel reads, over TCP for one, UCX has the holder send the
    // bytes, and ends the *holder's* process if the reader dies meanwhile (seen with UCX 1.23).
    ("PROTO_EMULATION_ENABLE", "n"),
    // POSIX's shared memory carries the same messages, and each agent saves a descriptor.
    ("TLS", "^sysv"),
];

/// NIXL between the host tier of this process and those of others.
pub struct NixlPeers {
    library: &'static Library,
    parameters: BTreeMap<String, String>,
    memory: Arc<DramRegion>,
    name: String,
    readers: AtomicU32,
    /// Made when the first reader asks.
    holder: Mutex<Option<Arc<HolderAgent>>>,
    posting: PostingThreads,
    ends: Arc<AgentEnds>,
}

impl NixlPeers {
    /// Agents are called `name` and `name/<number>`: no other process may have that name.
    /// `parameters` are those of the plugin UCX. What they and the environment do not choose of
    /// UCX's settings is set here: links that are cut are noticed, and reads that UCX would emulate
    /// fail.
    ///
    /// # Errors
    /// `Unavailable`: the plugin cannot be loaded, or there are no threads. `InUse`: this process
    /// has an agent of that name.
    pub fn new(
        library: &'static Library,
        mut parameters: BTreeMap<String, String>,
        memory: Arc<DramRegion>,
        name: &str,
    ) -> Result<Self, SetupError> {
        add_settings(parameters.entry(UCX_SETTINGS.to_owned()).or_default());
        Ok(Self {
            library,
            parameters,
            memory,
            name: name.to_owned(),
            readers: AtomicU32::new(0),
            holder: Mutex::default(),
            posting: PostingThreads::start()?,
            ends: Arc::default(),
        })
    }

    fn holder(&self) -> Result<Arc<HolderAgent>, SetupError> {
        let mut holder = self.holder.lock();
        if let Some(holder) = &*holder {
            return Ok(Arc::clone(holder));
        }
        let backend = self.backend(&self.name)?;
        let registration = Registration::memory(&backend, &(Arc::clone(&self.memory) as _))?;
        // SAFETY: given to readers that were let in, who are trusted to read and not to write
        // (docs/security.md).
        let metadata = unsafe { backend.agent().metadata() }?;
        let made = HolderAgent { metadata, _registration: registration, backend };
        Ok(Arc::clone(holder.insert(Arc::new(made))))
    }

    fn backend(&self, name: &str) -> Result<Arc<BackendHandle>, SetupError> {
        let agent = Agent::new(self.library, name)?;
        Ok(Arc::new(agent.backend(PLUGIN, &self.parameters)?))
    }
}

impl OneSided for NixlPeers {
    fn place(&self) -> Result<(Vec<u8>, TierPlace), SetupError> {
        Ok((self.holder()?.metadata.clone(), TierPlace::of(&*self.memory)))
    }

    /// One that cannot be reached would have UCX crash this process when it connects.
    fn admit(&self, metadata: &[u8]) -> Result<(), SetupError> {
        self.holder()?.backend.agent().load_remote_metadata(metadata).map(drop)
    }

    fn reader(&self) -> Result<Box<dyn UnmetReader>, SetupError> {
        Ok(Box::new(self.agent()?))
    }

    fn close(&self) {
        self.ends.end_all();
    }
}

impl NixlPeers {
    /// Another reader's.
    fn agent(&self) -> Result<UnmetAgent, SetupError> {
        let number = self.readers.fetch_add(1, Ordering::Relaxed);
        let backend = self.backend(&format!("{}/{number}", self.name))?;
        // SAFETY: nothing is registered yet, so these bytes give access to nothing.
        let metadata = unsafe { backend.agent().metadata() }?;
        Ok(UnmetAgent {
            backend: Some(backend),
            metadata,
            memory: Arc::clone(&self.memory),
            posts: self.posting.sender(),
            ends: Arc::clone(&self.ends),
        })
    }
}

impl fmt::Debug for NixlPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlPeers").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for NixlPeers {
    fn drop(&mut self) {
        self.close();
    }
}

/// Those that the user did not choose.
fn add_settings(chosen: &mut String) {
    for (key, value) in SETTINGS {
        let is_chosen = chosen.split(',').any(|one| one.trim().starts_with(key));
        if !is_chosen {
            let separator = if chosen.is_empty() { "" } else { "," };
            chosen.extend([separator, key, "=", value]);
        }
    }
}

/// The agent that readers reach.
struct HolderAgent {
    metadata: Vec<u8>,
    _registration: Arc<Registration>,
    backend: Arc<BackendHandle>,
}
