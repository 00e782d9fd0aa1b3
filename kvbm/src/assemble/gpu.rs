//! The device tier in the memory of a GPU, and what connects it.

#[cfg(feature = "cuda")]
mod cuda;

use std::fmt;
use std::sync::Arc;

use kvbm_settings::{DeviceBackend, Settings};
#[cfg(not(feature = "cuda"))]
use kvbm_tiers::DeviceRegion;
use kvbm_tiers::{Backend, Checksums, DiskRegion, FramePool, Geometry, Memory, SetupError};

use super::setup;
use crate::api::allocation::Device;
use crate::error::Result;
#[cfg(feature = "cuda")]
use cuda::find;

/// The device tier on a GPU.
pub(super) trait GpuTier: fmt::Debug {
    /// Its slots. They have only one allocator.
    fn frames(&self) -> Result<FramePool>;

    /// The NUMA node nearest to the GPU, for host memory.
    fn numa_node(&self) -> Option<u32>;

    /// Access to its blocks.
    fn window(&self) -> Result<Arc<dyn Device>>;

    /// Between it and host memory.
    fn connect_memory(&self, memory: Arc<dyn Memory>) -> Result<Arc<dyn Backend>>;

    /// Between it and the disk tier. `asked_for`: any path of cuFile is accepted; else only one
    /// without host memory.
    fn connect_disk(
        &self,
        disk: Arc<DiskRegion>,
        checksums: Arc<Checksums>,
        depth: u32,
        asked_for: bool,
    ) -> Result<Arc<dyn Backend>>;
}

/// The state of GPU support: each part, or why it is missing and how to get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuReport {
    /// Driver and devices.
    pub cuda: Result<String, String>,
    /// The compiler of kernels, which may be missing.
    pub nvrtc: Result<String, String>,
    /// Transfers between disk and GPU.
    pub gds: Result<String, String>,
    /// The NUMA node of each GPU, if the kernel says so: host memory is taken from there.
    pub nodes: Vec<Option<u32>>,
}

/// `None`: the device tier is emulated, by the settings or for lack of a GPU. A GPU with too little
/// memory is always an error.
pub(super) fn open(settings: &Settings, geometry: Geometry) -> Result<Option<Box<dyn GpuTier>>> {
    if settings.device.backend == DeviceBackend::Emulated {
        return Ok(None);
    }
    match find(settings.device.ordinal) {
        // No fallback: if the GPU is too small, the operator must change the size.
        Ok(allocate) => Ok(Some(allocate(geometry).map_err(setup)?)),
        Err(error) if settings.device.backend == DeviceBackend::Cuda => Err(setup(error)),
        Err(error) => {
            tracing::info!(%error, "the device tier is emulated in host memory");
            Ok(None)
        }
    }
}

/// Between an engine's memory on a GPU and ours.
#[cfg(not(feature = "cuda"))]
pub(super) fn connect_engine(
    _ordinal: u32,
    _engine: &Arc<DeviceRegion>,
    _host: Arc<dyn Memory>,
    _has_peers: bool,
) -> Result<Arc<dyn Backend>> {
    Err(setup(SetupError::unavailable(ABSENT)))
}

/// Takes the tier's memory from a GPU that was found.
type AllocateFn = Box<dyn FnOnce(Geometry) -> Result<Box<dyn GpuTier>, SetupError>>;

#[cfg(feature = "cuda")]
pub(super) use cuda::{connect_engine, probe};

#[cfg(not(feature = "cuda"))]
const ABSENT: &str = "this build has no GPU backend: build it with the feature `cuda`";

#[cfg(not(feature = "cuda"))]
fn find(_: u32) -> Result<AllocateFn, SetupError> {
    Err(SetupError::unavailable(ABSENT))
}

#[cfg(not(feature = "cuda"))]
pub(super) fn probe() -> GpuReport {
    let no = || Err(ABSENT.to_owned());
    GpuReport { cuda: no(), nvrtc: no(), gds: no(), nodes: Vec::new() }
}
