//! Copies between memory tiers.

#![expect(unsafe_code, reason = "copies slots")]

use std::sync::Arc;

use crate::backend::{Backend, Fences, submit_unfenced};
use crate::batch::{CopyThreads, ExecuteFn, Grains};
use crate::copy::{CopyOp, Done, Route};
use crate::error::{SetupError, SetupErrorKind};
use crate::memory::{CpuMemories, DeviceRegion, Memory};

/// What a thread copies before it looks for the next work: enough to make the look negligible.
const GRAIN_BYTES: usize = 256 << 10;
/// What it reports together: to land blocks costs far less a block where they are more.
const REPORT_BYTES: usize = 1 << 20;

/// A pool of threads that copies blocks between regions of memory, and within one.
#[derive(Debug)]
pub struct MemcpyBackend {
    memories: Arc<CpuMemories>,
    routes: Vec<Route>,
    threads: CopyThreads,
}

impl MemcpyBackend {
    /// Copies among all of `regions` with `threads` threads (at least one).
    ///
    /// # Errors
    /// `Invalid`: two regions are of one tier, or their blocks differ in size. `Unavailable`: no
    /// threads.
    pub fn new(regions: Vec<Arc<dyn Memory>>, threads: usize) -> Result<Self, SetupError> {
        let block_bytes = regions.first().map_or(GRAIN_BYTES, |region| region.block_bytes());
        Self::start(CpuMemories::new(regions)?, block_bytes, threads)
    }

    /// Copies between `memory` and the slots of a device that the CPU can address, such as an
    /// engine's tensors.
    ///
    /// # Errors
    /// Those of [`new`](Self::new). `Invalid` too: the CPU cannot address the device.
    pub fn with_device(
        memory: Arc<dyn Memory>,
        device: Arc<DeviceRegion>,
        threads: usize,
    ) -> Result<Self, SetupError> {
        let block_bytes = memory.block_bytes();
        Self::start(CpuMemories::new(vec![memory])?.and_device(device)?, block_bytes, threads)
    }

    fn start(
        memories: CpuMemories,
        block_bytes: usize,
        threads: usize,
    ) -> Result<Self, SetupError> {
        let grains =
            Grains { taken: GRAIN_BYTES / block_bytes, reported: REPORT_BYTES / block_bytes };
        let (routes, memories) = (memories.routes(), Arc::new(memories));
        let between = Arc::clone(&memories);
        // SAFETY: executes submitted operations only, whose submitter answers for their slots.
        let copy: Arc<ExecuteFn> =
            Arc::new(move |op: &CopyOp, part| unsafe { between.copy(op, part) });
        let threads = CopyThreads::start("kvbm-copy", threads, grains, &copy).map_err(|error| {
            let message =
                "cannot start copy threads; lower transfer.copy_threads (DYN_KVBM_TRANSFER_COPY_THREADS)";
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })?;
        Ok(Self { memories, routes, threads })
    }
}

// SAFETY: every thread copies the operations that it took, one by one, and completes each after the
// last of its bytes; `CpuMemories` keeps the regions alive and copies whole blocks between slots
// that exist.
unsafe impl Backend for MemcpyBackend {
    fn name(&self) -> &'static str {
        "memcpy"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        self.threads.submit(batch, None, done);
    }

    fn submit_fenced(&self, batch: Vec<CopyOp>, fences: Fences, done: Done) {
        let are_summed = batch.iter().any(|op| self.memories.are_summed(op.to.tier));
        if !fences.after.is_done() || are_summed {
            return submit_unfenced(self, batch, &fences, done);
        }
        self.threads.submit(batch, fences.layers, done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Layers;
    use crate::copy::{CopyErrorKind, SlotId, SlotRef, Tier};
    use crate::dram::{DramOptions, DramRegion};
    use crate::error::SetupErrorKind;
    use crate::geometry::{Geometry, Part, SegmentMap};
    use crate::memory::Space;
    use crate::testing::conformance::{self, Pair};
    use crate::testing::{Tensors, each, fill_pattern, has_pattern, host, order, run};

    #[test]
    fn conforms_between_host_and_emulated_device() {
        conformance::check(|slots, block_bytes| {
            let geometry = Geometry::new(slots, block_bytes).unwrap();
            let options = DramOptions { geometry, huge_pages: false, fault_threads: 1 };
            let device = Arc::new(DramRegion::emulated_device(options).unwrap());
            let memory = Arc::new(host(slots, block_bytes));
            let regions = vec![device as Arc<dyn Memory>, Arc::clone(&memory) as _];
            Pair {
                memory,
                other: Tier::Device,
                backend: Arc::new(MemcpyBackend::new(regions, 2).unwrap()),
            }
        });
    }

    #[test]
    fn conforms_between_host_and_tensors_of_an_engine() {
        for cut in [1, 3, 64] {
            conformance::check(|slots, block_bytes| {
                let memory = Arc::new(host(slots, block_bytes));
                let device = Arc::new(Tensors::new(slots, block_bytes, cut).into_region());
                let backend =
                    MemcpyBackend::with_device(Arc::clone(&memory) as _, device, 2).unwrap();
                Pair { memory, other: Tier::Device, backend: Arc::new(backend) }
            });
        }
    }

    #[test]
    fn layers_of_blocks_in_pieces_come_to_the_same_bytes() {
        let memory = Arc::new(host(4, 4096));
        let device = Arc::new(Tensors::new(4, 4096, 24).into_region());
        let backend = MemcpyBackend::with_device(Arc::clone(&memory) as _, device, 2).unwrap();
        let mut frames = memory.frames().unwrap();
        let there = |slot| SlotRef { tier: Tier::Device, slot: SlotId(slot), generation: 0 };
        for slot in 0..4 {
            let mut from = frames.take().unwrap();
            fill_pattern(slot as usize, memory.write(&mut from).unwrap());
            let (report, reports) = std::sync::mpsc::channel();
            let layers = Layers::new(7.try_into().unwrap(), |_, _| {});
            let fences = Fences { layers: Some(layers), ..Fences::default() };
            let done = each(move |_, result| report.send(result).unwrap());
            backend.submit_fenced(vec![order(0, from.slot_ref(), there(slot))], fences, done);
            reports.recv().unwrap().unwrap();
            memory.write(&mut from).unwrap().fill(0);
            let results = run(&backend, vec![order(0, there(slot), from.slot_ref())]);
            assert!(results[0].is_ok());
            assert!(has_pattern(slot as usize, memory.read(&from).unwrap()));
            frames.give_back(from);
        }
    }

    #[test]
    fn what_the_cpu_cannot_address_is_refused() {
        let map = SegmentMap::new(1, &[Part { base: 4096, stride: 4096, bytes: 4096 }]).unwrap();
        // SAFETY: nothing copies to or from it.
        let device = Arc::new(unsafe { DeviceRegion::adopt(map, Space::Cuda(0), ()) });
        let error = MemcpyBackend::with_device(Arc::new(host(1, 4096)), device, 1).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
    }

    #[test]
    fn copies_within_a_tier_but_not_onto_itself() {
        let memory = Arc::new(host(2, 4096));
        let mut frames = memory.frames().unwrap();
        let (mut a, b) = (frames.take().unwrap(), frames.take().unwrap());
        memory.write(&mut a).unwrap().fill(7);
        let backend = MemcpyBackend::new(vec![Arc::clone(&memory) as _], 1).unwrap();
        let batch =
            vec![order(0, a.slot_ref(), b.slot_ref()), order(1, a.slot_ref(), a.slot_ref())];
        let results = run(&backend, batch);
        assert!(results[0].is_ok());
        assert_eq!(results[1].as_ref().unwrap_err().kind(), CopyErrorKind::Refused);
        assert!(memory.read(&b).unwrap().iter().all(|&byte| byte == 7));
    }

    #[test]
    fn regions_of_one_tier_or_of_other_blocks_are_refused() {
        for other in [host(1, 4096), host(1, 8192)] {
            let regions: Vec<Arc<dyn Memory>> = vec![Arc::new(host(1, 4096)), Arc::new(other)];
            assert_eq!(MemcpyBackend::new(regions, 1).unwrap_err().kind(), SetupErrorKind::Invalid);
        }
    }
}
