//! vLLM's memory and model, as a manager takes them.

use kvbm::{
    DeviceRegion, EngineMemory, Fingerprint, Hashing, KvLayout, Manager, Options, Part, Ranks,
    SegmentMap, Space,
};
use kvbm_settings::Settings;
use prometheus::Registry;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::errors::{classes, of_manager};

/// The primary tier's memory: rows of chunks, each of all ranks.
pub(super) struct Memory {
    view: PyBuffer<i8>,
    pub(super) slots: u32,
    pub(super) chunk_bytes: usize,
}

impl Memory {
    pub(super) fn of(view: PyBuffer<i8>) -> PyResult<Self> {
        let (shape, strides) = (view.shape().to_vec(), view.strides().to_vec());
        let wrong = |what: &str| {
            let message = format!(
                "the primary tier's memory has shape {shape:?} and strides {strides:?}: {what}"
            );
            Err(classes::InvalidError::new_err(message))
        };
        let &[chunks, chunk_bytes] = &shape[..] else { return wrong("wanted are rows of chunks") };
        if strides != [chunk_bytes as isize, 1] || view.readonly() {
            return wrong("wanted are rows one after the other that can be written");
        }
        let Ok(slots) = u32::try_from(chunks) else { return wrong("these are too many chunks") };
        Ok(Self { view, slots, chunk_bytes })
    }

    #[allow(unsafe_code)]
    fn adopt(self) -> PyResult<EngineMemory> {
        let invalid =
            |error: kvbm_tiers::SetupError| classes::InvalidError::new_err(error.to_string());
        let row = Part {
            base: self.view.buf_ptr() as usize,
            stride: self.chunk_bytes,
            bytes: self.chunk_bytes,
        };
        let map = SegmentMap::new(self.slots, &[row]).map_err(invalid)?;
        // SAFETY: the buffer that Python exports stays where it is until it is released, which
        // happens when the region drops it. vLLM uses no chunk of a job before it heard that the
        // job ended, but to read one that is stored.
        let region = unsafe { DeviceRegion::adopt(map, Space::Host, self.view) };
        // A chunk comes as a whole: its layers are not told apart.
        EngineMemory::new(region, 1).map_err(|error| of_manager(&error))
    }
}

/// What the bytes of a chunk depend on besides its tokens.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct Identity {
    model: String,
    weights: String,
    dtype: String,
    /// Names of the layers, by cache group, and how they lie.
    layout: String,
    layers: u32,
    tensor_world: u32,
    pipeline_world: u32,
    engine_version: String,
    hashing: String,
    seed: Vec<u8>,
}

impl Identity {
    fn fingerprint(self, chunk_bytes: u64, chunk_tokens: u64) -> Fingerprint {
        let layout = KvLayout {
            layers: self.layers,
            order: self.layout,
            shape: vec![chunk_bytes],
            strides: vec![1],
        };
        Fingerprint {
            model: self.model,
            weights: self.weights,
            dtype: self.dtype,
            layouts: vec![layout],
            // A row has the bytes of all ranks: it is theirs together.
            ranks: Ranks {
                tensor_world: self.tensor_world,
                pipeline_world: self.pipeline_world,
                ..Ranks::default()
            },
            block_tokens: chunk_tokens,
            engine: "vllm".to_owned(),
            engine_version: self.engine_version,
            hashing: Hashing { algorithm: self.hashing, seed: self.seed },
            ..Fingerprint::default()
        }
    }
}

/// Opens the manager: takes memory, makes files, probes stores.
pub(super) fn open(
    settings: Settings,
    identity: Identity,
    memory: Memory,
    chunk_tokens: u64,
    registry: Registry,
) -> PyResult<Manager> {
    let chunk_bytes = memory.chunk_bytes as u64;
    let fingerprint = Some(identity.fingerprint(chunk_bytes, chunk_tokens));
    let engine = Some(memory.adopt()?);
    let options =
        Options { block_tokens: chunk_tokens, engine, fingerprint, registry, ..Options::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| classes::UnavailableError::new_err(error.to_string()))?;
    runtime.block_on(Manager::open(settings, options)).map_err(|error| of_manager(&error))
}
