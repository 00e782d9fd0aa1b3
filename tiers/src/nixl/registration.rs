//! What transfers may touch: memory, files and objects that an agent was told of.

use std::any::Any;
use std::fmt;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::Arc;

use super::agent::{Agent, BackendHandle};
use super::arguments::{OptArgs, done};
use super::sys::{self, MemType, RegDlistS};
use crate::disk::DiskRegion;
use crate::error::SetupError;
use crate::memory::Memory;

/// Something that is registered with a backend, and kept alive as long as it is. Lists that name
/// parts of it hold it in turn.
pub struct Registration {
    list: RegList,
    args: OptArgs,
    backend: Arc<BackendHandle>,
    /// What the registered addresses belong to. Goes last.
    _region: Arc<dyn Any + Send + Sync>,
}

// SAFETY: lists and arguments are not changed after the registration, and the agent's functions may
// be called from any thread.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

/// A range that is registered. `device` tells files and objects apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisteredRange {
    /// Address in memory, offset in a file or object.
    pub address: usize,
    /// Length.
    pub bytes: usize,
    /// Memory: 0; a file: its descriptor; an object: the number that it was registered by.
    pub device: u64,
}

impl Registration {
    /// All slots of a memory region.
    ///
    /// # Errors
    /// `Unavailable`: the backend cannot register memory, or not that much of it.
    pub fn memory(
        backend: &Arc<BackendHandle>,
        memory: &Arc<dyn Memory>,
    ) -> Result<Arc<Self>, SetupError> {
        let address = memory.base().addr().get();
        let whole = RegisteredRange { address, bytes: memory.geometry().bytes(), device: 0 };
        let what = [(whole, String::new())];
        Self::new(backend, sys::MEM_DRAM, what, Arc::new(Arc::clone(memory)))
    }

    /// The slot files of a disk region.
    ///
    /// # Errors
    /// `Unavailable`: the backend cannot register files.
    pub fn files(
        backend: &Arc<BackendHandle>,
        disk: &Arc<DiskRegion>,
    ) -> Result<Arc<Self>, SetupError> {
        let bytes = disk.file_bytes() as usize;
        let whole =
            |file: &std::fs::File| RegisteredRange { address: 0, bytes, device: device_of(file) };
        let files: Vec<_> = disk.files().map(|file| (whole(file), String::new())).collect();
        Self::new(backend, sys::MEM_FILE, files, Arc::clone(disk) as _)
    }

    /// Objects of `bytes` bytes, by number and key.
    ///
    /// # Errors
    /// `Unavailable`: the backend cannot register objects.
    pub fn objects(
        backend: &Arc<BackendHandle>,
        bytes: usize,
        keys: impl IntoIterator<Item = (u64, String)>,
    ) -> Result<Arc<Self>, SetupError> {
        let object = |(device, key)| (RegisteredRange { address: 0, bytes, device }, key);
        Self::new(backend, sys::MEM_OBJECT, keys.into_iter().map(object), Arc::new(()))
    }

    fn new(
        backend: &Arc<BackendHandle>,
        kind: MemType,
        what: impl IntoIterator<Item = (RegisteredRange, String)>,
        region: Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<Self>, SetupError> {
        let agent = backend.agent();
        let mut list = RegList::new(agent, kind)?;
        for (segment, name) in what {
            list.push(segment, &name)?;
        }
        let args = OptArgs::new(agent)?.with_backend(backend)?;
        // SAFETY: agent, list and arguments live; the region is kept until the registration is
        // undone.
        let status =
            unsafe { (agent.api().register_mem)(agent.handle(), list.handle, args.as_ptr()) };
        done(status, &format!("register it with {}", backend.plugin()))?;
        Ok(Arc::new(Self { list, args, backend: Arc::clone(backend), _region: region }))
    }

    /// With which backend.
    pub fn backend(&self) -> &Arc<BackendHandle> {
        &self.backend
    }

    pub(super) const fn kind(&self) -> MemType {
        self.list.kind
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("backend", &self.backend).finish_non_exhaustive()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let agent = self.backend.agent();
        // SAFETY: it was registered with this list, and no list or request names a part of it any
        // more.
        let status = unsafe {
            (agent.api().deregister_mem)(agent.handle(), self.list.handle, self.args.as_ptr())
        };
        if let Err(error) = done(status, "undo a registration") {
            tracing::warn!(%error, "memory or files stay registered");
        }
    }
}

/// The number by which NIXL knows a file.
pub(super) fn device_of(file: &std::fs::File) -> u64 {
    u64::from(file.as_raw_fd().unsigned_abs())
}

/// A list of what is to be registered.
struct RegList {
    agent: Agent,
    kind: MemType,
    handle: *mut RegDlistS,
}

impl RegList {
    fn new(agent: &Agent, kind: MemType) -> Result<Self, SetupError> {
        let mut handle = null_mut();
        // SAFETY: makes an empty list, ours.
        done(unsafe { (agent.api().create_reg_dlist)(kind, &raw mut handle) }, "hold a list")?;
        Ok(Self { agent: agent.clone(), kind, handle })
    }

    fn push(&mut self, segment: RegisteredRange, name: &str) -> Result<(), SetupError> {
        let RegisteredRange { address, bytes, device } = segment;
        // SAFETY: the list is ours, and it copies the name.
        let status = unsafe {
            let name = (name.as_ptr().cast(), name.len());
            (self.agent.api().reg_dlist_add_desc)(
                self.handle,
                address,
                bytes,
                device,
                name.0,
                name.1,
            )
        };
        done(status, "hold a list")
    }
}

impl Drop for RegList {
    fn drop(&mut self) {
        // SAFETY: ours, and used no more.
        unsafe { (self.agent.api().destroy_reg_dlist)(self.handle) };
    }
}
