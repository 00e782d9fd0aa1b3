//! An engine's KV tensors, adopted by their addresses.

use kvbm::{DeviceRegion, Part, SegmentMap, Space};
use pyo3::prelude::*;

use crate::errors::{classes, of_manager};

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
