//! Other workers: leases at them, and what comes from them.

use kvbm::{KvPlace, PeerLease as HeldAtPeer, Pulled, SlotId, Transfer, Writers};
use pyo3::prelude::*;

use crate::errors::of_manager;
use crate::transfer::{Lease, duration, ended, used_before};

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PeerLease>()?;
    module.add_class::<PeerLeasing>()?;
    module.add_class::<Pull>()?;
    module.add_class::<PullEnd>()?;
    module.add_class::<KvTransfer>()?;
    module.add_class::<KvMoved>()?;
    module.add_function(wrap_pyfunction!(nixl_is_available, module)?)
}

/// Whether NIXL's library is there, or at the path that `nixl.library` would name. It is loaded,
/// which takes a moment the first time.
#[pyfunction]
#[pyo3(signature = (library=None))]
fn nixl_is_available(py: Python<'_>, library: Option<String>) -> bool {
    let mut settings = kvbm_settings::Settings::default();
    settings.nixl.library = library;
    py.detach(|| kvbm::probe_nixl(&settings).library.is_ok())
}

/// The right to read the leading blocks of a chain at a peer, for a while, until it is used up or
/// dropped.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct PeerLease {
    /// The peer that gave it.
    #[pyo3(get)]
    peer: String,
    /// Leading blocks of the chain that are here or at the peer.
    #[pyo3(get)]
    blocks: usize,
    /// How many of them only the peer has.
    #[pyo3(get)]
    only_there: usize,
    /// The peer has more, but leases no more at a time (`peers.lease_share`).
    #[pyo3(get)]
    is_cut: bool,
    held: Option<HeldAtPeer>,
}

impl PeerLease {
    fn new(lease: HeldAtPeer) -> Self {
        let (blocks, only_there, is_cut) = (lease.blocks(), lease.only_there(), lease.is_cut());
        Self { peer: lease.peer().to_owned(), blocks, only_there, is_cut, held: Some(lease) }
    }

    pub(crate) fn take(&mut self) -> PyResult<HeldAtPeer> {
        self.held.take().ok_or_else(used_before)
    }
}

/// A lease of either kind, for one call.
#[derive(FromPyObject)]
pub(crate) enum AnyLease<'py> {
    Here(PyRefMut<'py, Lease>),
    AtPeer(PyRefMut<'py, PeerLease>),
}

impl AnyLease<'_> {
    pub(crate) fn take(&mut self) -> PyResult<kvbm::AnyLease> {
        match self {
            Self::Here(lease) => lease.take().map(Into::into),
            Self::AtPeer(lease) => lease.take().map(Into::into),
        }
    }
}

/// A lease that is asked for. Dropping it gives it up.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct PeerLeasing(pub(crate) Transfer<HeldAtPeer>);

#[pymethods]
impl PeerLeasing {
    /// The lease, or `None` while the peer has not answered. It is given once. An error says why
    /// there is none.
    fn poll(&mut self) -> PyResult<Option<PeerLease>> {
        ended(self.0.try_take(), PeerLease::new)
    }

    /// The lease, for which it waits `seconds` at most; `None`: the peer has not answered.
    fn wait(&mut self, py: Python<'_>, seconds: f64) -> PyResult<Option<PeerLease>> {
        let limit = duration(seconds);
        ended(py.detach(|| self.0.wait_for(limit)), PeerLease::new)
    }
}

/// A load from a peer to the host tier. Dropping it loses the answer, not the work.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct Pull(pub(crate) Transfer<Pulled>);

#[pymethods]
impl Pull {
    /// Ends it early: what has come stays.
    fn cancel(&mut self) {
        self.0.cancel();
    }

    /// How it ended, or `None` while it is under way. The answer is given once.
    fn poll(&mut self) -> PyResult<Option<PullEnd>> {
        ended(self.0.try_take(), PullEnd::new)
    }

    /// How it ended, for which it waits `seconds` at most; `None`: it has not.
    fn wait(&mut self, py: Python<'_>, seconds: f64) -> PyResult<Option<PullEnd>> {
        let limit = duration(seconds);
        ended(py.detach(|| self.0.wait_for(limit)), PullEnd::new)
    }
}

/// How a load from a peer ended. Counts are in blocks.
#[pyclass(module = "kvbm_rs", frozen, get_all)]
#[derive(Debug)]
pub(crate) struct PullEnd {
    /// Leading blocks of the chain that the host tier has now.
    blocks: usize,
    /// Brought from the peer by this load.
    copied: usize,
    /// Why the peer did not give the others; `None`: it did, or they found no room.
    fault: Option<String>,
}

impl PullEnd {
    fn new(pulled: Pulled) -> Self {
        let Pulled { blocks, copied, fault, .. } = pulled;
        Self { blocks, copied, fault }
    }
}

/// Where blocks come from or go to: a peer by its name, or the engine's slots.
#[derive(FromPyObject)]
pub(crate) enum Place {
    Peer(String),
    Slots(Vec<u32>),
}

/// The engine's slots that a place names.
pub(crate) fn slots_of(place: Option<&Place>) -> Vec<SlotId> {
    match place {
        Some(Place::Slots(slots)) => slots.iter().copied().map(SlotId).collect(),
        _ => Vec::new(),
    }
}

pub(crate) fn kv_place<'a>(place: Option<&'a Place>, slots: &'a [SlotId]) -> KvPlace<'a> {
    match place {
        None => KvPlace::Tiers,
        Some(Place::Peer(peer)) => KvPlace::Peer(peer),
        Some(Place::Slots(_)) => KvPlace::Slots(slots),
    }
}

/// Tells `on_done` how a transfer ended.
pub(crate) fn tell(on_done: &Py<PyAny>, moved: kvbm::Result<kvbm::KvMoved>) {
    let told = Python::try_attach(|py| match moved {
        Ok(moved) => on_done.call1(py, (KvMoved::new(moved), py.None())),
        Err(error) => on_done.call1(py, (py.None(), of_manager(&error).into_value(py))),
    });
    // Without an interpreter there is no code to tell.
    if let Some(Err(error)) = told {
        Python::attach(|py| error.write_unraisable(py, None));
    }
}

/// A transfer under way, of `Manager.transfer_kv_cache`.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct KvTransfer(pub(crate) kvbm::KvTransfer);

#[pymethods]
impl KvTransfer {
    /// Blocks that are to be moved.
    #[getter]
    fn wanted(&self) -> usize {
        self.0.wanted()
    }

    /// Blocks that have come to this worker so far. Those that do not come from a peer count at the
    /// end.
    #[getter]
    fn arrived(&self) -> usize {
        self.0.arrived()
    }
}

/// What a transfer moved.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct KvMoved {
    /// Leading blocks of the chain that are at the destination now.
    #[pyo3(get)]
    blocks: usize,
    writers: Writers,
}

impl KvMoved {
    fn new(moved: kvbm::KvMoved) -> Self {
        Self { blocks: moved.blocks, writers: moved.writers }
    }
}

#[pymethods]
impl KvMoved {
    /// Whether no medium may still write the slots of blocks that did not come: until then they
    /// must not be used.
    fn slots_are_free(&self) -> bool {
        self.writers.are_gone()
    }
}
