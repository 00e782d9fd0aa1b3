//! The device tier in the memory of a GPU, and what connects it.

use std::sync::Arc;

use kvbm_settings::{DeviceBackend, Settings};
use kvbm_tiers::cuda::{
    self, CuFileOptions, CudaBackend, DeviceWindow, Driver, GdsBackend, Gpu, probe_cufile,
};
use kvbm_tiers::{Backend, Checksums, DeviceRegion, DiskRegion, FramePool, Geometry, Memory};

use super::report::GpuReport;
use super::setup;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};

/// The device tier on a GPU.
#[derive(Debug)]
pub(super) struct GpuTier {
    gpu: Gpu,
    region: Arc<DeviceRegion>,
}

impl GpuTier {
    /// `None`: the device tier is to be emulated, or may be and there is no GPU.
    pub(super) fn open(settings: &Settings, geometry: Geometry) -> Result<Option<Self>> {
        if settings.device.backend == DeviceBackend::Emulated {
            return Ok(None);
        }
        let gpu = match Gpu::open(settings.device.ordinal) {
            Ok(gpu) => gpu,
            Err(error) if settings.device.backend == DeviceBackend::Cuda => return Err(setup(error)),
            Err(error) => {
                tracing::info!(%error, "the device tier is emulated in host memory");
                return Ok(None);
            }
        };
        let region = Arc::new(gpu.allocate(geometry).map_err(setup)?);
        Ok(Some(Self { gpu, region }))
    }

    pub(super) fn frames(&self) -> Result<FramePool> {
        self.region.frames().ok_or_else(|| Error::new(ErrorKind::Invalid, "a region has one ledger only"))
    }

    /// The NUMA node that copies from and to host memory are shortest from.
    pub(super) fn numa_node(&self) -> Option<u32> {
        self.gpu.device().numa_node()
    }

    /// Where its blocks can be looked at.
    pub(super) fn window(&self) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(DeviceWindow::new(&self.gpu, Arc::clone(&self.region)).map_err(setup)?))
    }

    /// Between it and host memory.
    pub(super) fn connect_memory(&self, memory: Arc<dyn Memory>) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(CudaBackend::new(&self.gpu, memory, &self.region).map_err(setup)?))
    }

    /// Between it and the disk tier. `asked_for`: any way of cuFile's is welcome; else only one without host memory.
    pub(super) fn connect_disk(
        &self,
        disk: Arc<DiskRegion>,
        checksums: Arc<Checksums>,
        depth: u32,
        asked_for: bool,
    ) -> Result<Arc<dyn Backend>> {
        let (device, options) = (Arc::clone(&self.region), CuFileOptions::default());
        let gds = GdsBackend::new(&self.gpu, device, disk, checksums, depth, &options).map_err(setup)?;
        if let Some(why) = gds.indirect().filter(|_| !asked_for) {
            let message = format!("cuFile would go through host memory: the slot files lie on {why}");
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        Ok(Arc::new(gds))
    }
}

/// Driver, compiler and cuFile, as they are here.
pub(super) fn probe() -> GpuReport {
    let found = cuda::probe();
    let driver = found.driver.clone().ready();
    let gds = probe_cufile(&CuFileOptions::default());
    GpuReport {
        cuda: found.driver.ready().map(|driver| shown(&driver)),
        nvrtc: found.nvrtc.ready().map(|()| "kernels are compiled for this GPU".to_owned()),
        gds: gds.ready().map(|report| report.to_string()),
        nodes: driver.into_iter().flat_map(|driver| driver.devices).map(|gpu| gpu.numa_node()).collect(),
    }
}

fn shown(driver: &Driver) -> String {
    let devices = driver.devices.iter().enumerate().map(|(ordinal, gpu)| {
        let node = gpu.numa_node().map_or_else(String::new, |node| format!(", NUMA node {node}"));
        let window =
            gpu.window_bytes().map_or_else(String::new, |bytes| format!(", BAR1 {} MiB", bytes >> 20));
        format!("GPU {ordinal}: {}, {} GiB{window}{node}", gpu.name, gpu.memory >> 30)
    });
    format!("CUDA {}; {}", driver.version, devices.collect::<Vec<_>>().join("; "))
}
