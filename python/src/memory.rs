//! An engine's KV tensors, adopted by their addresses; the cache groups and ranks that have them;
//! and what copies wait for before they touch them.

use std::num::NonZeroU16;

use kvbm::{
    DeviceRegion, Fence, GroupKind, GroupSlots, Part, RankGroup, RankLoad, RankOptions, SegmentMap,
    SlotId, Space,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{classes, of_manager};
use crate::settings::Settings;
use crate::transfer::{NamedLoad, SliceLoad, duration};

/// An engine's KV cache: where its blocks lie. Blocks go straight between its slots and the tiers.
///
/// Args: slots: how many blocks it has room for. layers: equal shares of a block's bytes, in the
/// order of `parts`. parts: for each piece of a block an address, the bytes from the piece of one
/// slot to that of the next, and the bytes of a piece: keys, then values, of the first layer, of
/// the second, and so on. owner: keeps the memory where it is: the tensors. It is dropped when the
/// last copy has ended. device: the GPU's ordinal; `None`: the CPU's memory.
///
/// The addresses must be right: what lies elsewhere is overwritten.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct EngineMemory {
    pub(crate) memory: kvbm::EngineMemory,
    /// Of this process's GPU: its events can be waited for.
    pub(crate) is_on_gpu: bool,
}

#[pymethods]
impl EngineMemory {
    #[new]
    #[pyo3(signature = (slots, layers, parts, *, owner, device=None))]
    fn new(
        slots: u32,
        layers: u16,
        parts: Vec<(usize, usize, usize)>,
        owner: Py<PyAny>,
        device: Option<u32>,
    ) -> PyResult<Self> {
        let parts: Vec<_> =
            parts.into_iter().map(|(base, stride, bytes)| Part { base, stride, bytes }).collect();
        let map = SegmentMap::new(slots, &parts);
        let map = map.map_err(|error| classes::InvalidError::new_err(error.to_string()))?;
        let space = device.map_or(Space::Host, Space::Cuda);
        // SAFETY: the docstring asks for it, and only the caller can know: Python has no types for
        // it. The owner keeps the tensors; an engine leaves slots alone while a transfer names
        // them.
        #[allow(unsafe_code)]
        let region = unsafe { DeviceRegion::adopt(map, space, owner) };
        let memory = kvbm::EngineMemory::new(region, layers).map_err(|error| of_manager(&error))?;
        Ok(Self { memory, is_on_gpu: device.is_some() })
    }

    /// For the leader of ranks, each of which brings its slice of `slots` slots.
    #[staticmethod]
    fn in_ranks(slots: u32, layers: u16) -> PyResult<Self> {
        kvbm::EngineMemory::in_ranks(slots, layers)
            .map(Self::elsewhere)
            .map_err(|error| of_manager(&error))
    }

    /// For the leader of ranks, each of which brings its slice of `slots` slots of a `CacheGroup`,
    /// of `block_bytes` bytes.
    #[staticmethod]
    fn group_in_ranks(slots: u32, layers: u16, block_bytes: u64) -> PyResult<Self> {
        let memory = kvbm::EngineMemory::group_in_ranks(slots, layers, block_bytes);
        memory.map(Self::elsewhere).map_err(|error| of_manager(&error))
    }
}

impl EngineMemory {
    const fn elsewhere(memory: kvbm::EngineMemory) -> Self {
        Self { memory, is_on_gpu: false }
    }
}

/// A group's number, the position on the chain of the first block, and the engine's slots of it and
/// those that follow.
pub(crate) type Slots = (u8, usize, Vec<u32>);

/// Layers of a hybrid model that do not keep every block.
///
/// Args: name: names it in metrics: letters, digits and `_`, and not `full`. memory: the KV tensors
/// of these layers, in blocks of their own size. window: how many full blocks a token may look back
/// into; `None`: the layers keep a state, in one slot.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct CacheGroup(kvbm::CacheGroup);

#[pymethods]
impl CacheGroup {
    #[new]
    #[pyo3(signature = (name, memory, *, window=None))]
    fn new(name: String, memory: &EngineMemory, window: Option<u32>) -> Self {
        let kind = window.map_or(GroupKind::State, |blocks| GroupKind::Window { blocks });
        Self(kvbm::CacheGroup { name, kind, memory: memory.memory.clone(), share: None })
    }
}

pub(crate) fn plain(groups: &[Bound<'_, CacheGroup>]) -> Vec<kvbm::CacheGroup> {
    groups.iter().map(|group| group.get().0.clone()).collect()
}

/// The engine's slots of each group, while a call names them.
pub(crate) struct NamedSlots(Vec<(u8, usize, Vec<SlotId>)>);

impl NamedSlots {
    pub(crate) fn new(slots: Vec<Slots>) -> Self {
        let named =
            |(group, first, slots): Slots| (group, first, slots.into_iter().map(SlotId).collect());
        Self(slots.into_iter().map(named).collect())
    }

    pub(crate) fn slots(&self) -> Vec<GroupSlots<'_>> {
        self.0.iter().map(|&(group, first, ref slots)| GroupSlots { group, first, slots }).collect()
    }

    /// Where the named blocks of full attention end on the chain.
    pub(crate) fn end_of_full(&self) -> usize {
        let of_full = self.0.iter().find(|&&(group, ..)| group == 0);
        of_full.map_or(0, |(_, first, slots)| first.saturating_add(slots.len()))
    }
}

/// An event of CUDA's that the engine recorded behind its work: an argument `ready` or `after`.
pub(crate) struct Behind(pub(crate) Fence);

impl FromPyObject<'_, '_> for Behind {
    type Error = PyErr;

    fn extract(event: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let handle = event.getattr("cuda_event").and_then(|handle| handle.extract::<u64>());
        let handle = handle.map_err(|_| {
            let message =
                "a fence is an event with `cuda_event`, such as torch.cuda.Event, or None";
            classes::InvalidError::new_err(message)
        })?;
        if handle == 0 {
            return Err(classes::InvalidError::new_err(
                "the event was not recorded: record it behind the work",
            ));
        }
        // SAFETY: the manager's docstring asks for an event of the memory's GPU, recorded outside
        // of captures and not again; it lives as long as its Python object.
        #[allow(unsafe_code)]
        let fence = unsafe { Fence::event_kept_by(handle, event.to_owned().unbind()) };
        Ok(Self(fence))
    }
}

/// Where ranks and their leader meet: an argument `(directory, world, seconds)`.
pub(crate) struct MeetingPlace(pub(crate) RankGroup);

impl FromPyObject<'_, '_> for MeetingPlace {
    type Error = PyErr;

    fn extract(place: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let (dir, world, seconds) = place.extract()?;
        Ok(Self(RankGroup { dir, world, limit: duration(seconds) }))
    }
}

/// A tensor-parallel rank: it moves its slice of blocks as its leader, a `Manager` in another
/// process, says, on a thread of its own.
///
/// Args: settings: the leader's; capacities and `block_bytes` are of one rank's slice. memory: its
/// KV tensors. group: `(directory, world, seconds)`: where leader and ranks meet, how many ranks
/// there are, how long it waits. rank: its number, from 0. fingerprint: the leader's, with
/// `block_tokens`. groups: the
/// leader's, each with this rank's KV tensors.
///
/// Blocks until the leader is there. Dropping it ends its service.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct Rank {
    rank: kvbm::Rank,
}

#[pymethods]
impl Rank {
    #[new]
    #[pyo3(signature = (settings, memory, *, group, rank, fingerprint=None, groups=Vec::new()))]
    fn new(
        py: Python<'_>,
        settings: &Settings,
        memory: &EngineMemory,
        group: MeetingPlace,
        rank: u16,
        fingerprint: Option<&Bound<'_, PyDict>>,
        groups: Vec<Bound<'_, CacheGroup>>,
    ) -> PyResult<Self> {
        let MeetingPlace(group) = group;
        let fingerprint =
            fingerprint.map(|values| crate::names::fingerprint(values, 0)).transpose()?;
        let (engine, groups) = (Some(memory.memory.clone()), plain(&groups));
        let options = RankOptions { group, rank, engine, groups, fingerprint, media_layer: None };
        let settings = settings.plain();
        let joined = py.detach(|| kvbm::Rank::join(&settings, options));
        joined.map(|rank| Self { rank }).map_err(|error| of_manager(&error))
    }

    /// This rank's slice of a load that the leader began, by what `Manager.load_in_ranks` returned
    /// there. Ask once for each such load.
    fn slice_of(&self, load: NamedLoad) -> PyResult<SliceLoad> {
        let (number, layers, blocks) = load;
        let layers = NonZeroU16::new(layers)
            .ok_or_else(|| classes::InvalidError::new_err("a load has layers"))?;
        Ok(SliceLoad(self.rank.slice_of(RankLoad { number, layers, blocks })))
    }
}
