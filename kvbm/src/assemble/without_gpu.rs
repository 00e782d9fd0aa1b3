//! In place of `gpu`, in a build without the feature `cuda`: there is no GPU.

use std::sync::Arc;

use kvbm_settings::{DeviceBackend, Settings};
use kvbm_tiers::{Backend, Checksums, DiskRegion, FramePool, Geometry, Memory};

use super::report::GpuReport;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};

/// Cannot be had.
#[derive(Debug)]
pub(super) enum GpuTier {}

impl GpuTier {
    pub(super) fn open(settings: &Settings, _: Geometry) -> Result<Option<Self>> {
        if settings.device.backend == DeviceBackend::Cuda {
            let message = "device.backend (DYN_KVBM_DEVICE_BACKEND) is cuda, and this build has no GPU backend: \
                 build with --features cuda";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        Ok(None)
    }

    pub(super) fn frames(&self) -> Result<FramePool> {
        match *self {}
    }

    pub(super) fn numa_node(&self) -> Option<u32> {
        match *self {}
    }

    pub(super) fn window(&self) -> Result<Arc<dyn Device>> {
        match *self {}
    }

    pub(super) fn connect_memory(&self, _: Arc<dyn Memory>) -> Result<Arc<dyn Backend>> {
        match *self {}
    }

    pub(super) fn connect_disk(
        &self,
        _: Arc<DiskRegion>,
        _: Arc<Checksums>,
        _: u32,
        _: bool,
    ) -> Result<Arc<dyn Backend>> {
        match *self {}
    }
}

pub(super) fn probe() -> GpuReport {
    let no = || Err("this build has no GPU backend; build with --features cuda".to_owned());
    GpuReport { cuda: no(), nvrtc: no(), gds: no(), nodes: Vec::new() }
}
