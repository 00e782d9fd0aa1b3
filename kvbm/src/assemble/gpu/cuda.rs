//! The device tier through CUDA.

use std::sync::Arc;

use kvbm_tiers::cuda::{
    self, CuFileOptions, CudaBackend, DeviceWindow, Driver, GdsBackend, Gpu, Probe, probe_cufile,
};
use kvbm_tiers::{Backend, Checksums, DeviceRegion, DiskRegion, FramePool, Memory, SetupError};

use super::super::setup;
use super::{AllocateFn, GpuReport, GpuTier};
use crate::api::allocation::Device;
use crate::error::{Error, Result};

/// The GPU that the settings name, and the tier's memory there.
#[derive(Debug)]
struct CudaTier {
    gpu: Gpu,
    region: Arc<DeviceRegion>,
}

/// Returns what allocates a tier on this GPU.
pub(super) fn find(ordinal: u32) -> Result<AllocateFn, SetupError> {
    let gpu = Gpu::open(ordinal)?;
    Ok(Box::new(move |geometry| {
        let region = Arc::new(gpu.allocate(geometry)?);
        Ok(Box::new(CudaTier { gpu, region }))
    }))
}

/// Between an engine's memory on a GPU and ours.
pub(in crate::assemble) fn connect_engine(
    ordinal: u32,
    engine: &Arc<DeviceRegion>,
    host: Arc<dyn Memory>,
    has_peers: bool,
) -> Result<Arc<dyn Backend>> {
    let gpu = Gpu::open(ordinal).map_err(setup)?;
    // Peers wait for the blocks of a prompt, and for their checksums.
    let open = if has_peers { CudaBackend::summing } else { CudaBackend::new };
    Ok(Arc::new(open(&gpu, host, engine).map_err(setup)?))
}

impl GpuTier for CudaTier {
    fn frames(&self) -> Result<FramePool> {
        self.region.frames().ok_or_else(|| Error::invalid("a region has one slot allocator only"))
    }

    fn numa_node(&self) -> Option<u32> {
        self.gpu.device().numa_node()
    }

    fn window(&self) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(DeviceWindow::new(&self.gpu, Arc::clone(&self.region)).map_err(setup)?))
    }

    fn connect_memory(&self, memory: Arc<dyn Memory>) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(CudaBackend::new(&self.gpu, memory, &self.region).map_err(setup)?))
    }

    fn connect_disk(
        &self,
        disk: Arc<DiskRegion>,
        checksums: Arc<Checksums>,
        depth: u32,
        asked_for: bool,
    ) -> Result<Arc<dyn Backend>> {
        let (device, options) = (Arc::clone(&self.region), CuFileOptions::default());
        let gds =
            GdsBackend::new(&self.gpu, device, disk, checksums, depth, &options).map_err(setup)?;
        // If it is not direct, `auto` goes through host memory by itself (docs/gpu.md).
        if let Some(why) = gds.indirect().filter(|_| !asked_for) {
            let message =
                format!("cuFile would go through host memory: the slot files lie on {why}");
            return Err(Error::unavailable(message));
        }
        Ok(Arc::new(gds))
    }
}

/// The state of driver, compiler and cuFile on this machine.
pub(in crate::assemble) fn probe() -> GpuReport {
    let Probe { driver, nvrtc } = cuda::probe();
    let gds = probe_cufile(&CuFileOptions::default());
    GpuReport {
        cuda: driver.clone().map(|driver| shown(&driver)),
        nvrtc: nvrtc.map(|()| "kernels are compiled for this GPU".to_owned()),
        gds: gds.map(|report| report.to_string()),
        nodes: driver
            .into_iter()
            .flat_map(|driver| driver.devices)
            .map(|gpu| gpu.numa_node())
            .collect(),
    }
}

fn shown(driver: &Driver) -> String {
    let devices = driver.devices.iter().enumerate().map(|(ordinal, gpu)| {
        let node = gpu.numa_node().map_or_else(String::new, |node| format!(", NUMA node {node}"));
        let window = gpu
            .window_bytes()
            .map_or_else(String::new, |bytes| format!(", BAR1 {} MiB", bytes >> 20));
        format!("GPU {ordinal}: {}, {} GiB{window}{node}", gpu.name, gpu.memory >> 30)
    });
    format!("CUDA {}; {}", driver.version, devices.collect::<Vec<_>>().join("; "))
}
