//! The CUDA backend, on a GPU where there is one.
//!
//! Where there is none the tests below skip aloud, and `on_a_simulated_gpu` runs them in a child
//! process that finds the driver of `simulated/cuda.cpp` instead. That shows that the calls, their
//! order and the addresses in them are right, and that the kernels compute what they should; it
//! shows nothing about speed, and real drivers may differ from what is simulated.

mod beside_an_engine;
mod faults;
mod faults_of_cufile;
mod neighbours;
mod simulation;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::cuda::{
    self, CuFileOptions, CudaBackend, DeviceChecksum, GdsBackend, Gpu, Rearranger, probe_cufile,
};
use kvbm_tiers::raw::RawGpu;
use kvbm_tiers::testing::conformance::{self, Pair};
use kvbm_tiers::testing::{
    disk, each, fill_pattern, frames, host, order, run, skip, start, take_all,
};
use kvbm_tiers::transform::{Layout, Shape, Transform, View};
use kvbm_tiers::{
    Backend, Checksums, CopyError, CopyErrorKind, CopyOp, DeviceRegion, Done, DramRegion, Frame,
    Geometry, Memory, Part, Route, SegmentMap, SetupError, SetupErrorKind, SlotId, SlotRef, Tier,
};
use proptest::prelude::*;

fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            skip("cuda", &error);
            None
        }
    }
}

#[test]
fn on_a_simulated_gpu() {
    simulation::run_all_tests("");
}

#[test]
fn on_a_simulated_gpu_whose_driver_copies_one_by_one() {
    simulation::run_all_tests("-DWITHOUT_BATCHES");
}

#[test]
fn whole_blocks_conform() {
    let Some(gpu) = gpu() else { return };
    conformance::check(|slots, block_bytes| {
        let geometry = Geometry::new(slots, block_bytes).unwrap();
        pair(&gpu, gpu.allocate(geometry).unwrap())
    });
}

#[test]
fn adopted_tensors_conform() {
    let Some(gpu) = gpu() else { return };
    for pieces in [2, 5, 64] {
        conformance::check(|slots, block_bytes| {
            pair(&gpu, tensors(&gpu, slots, block_bytes, pieces))
        });
    }
}

#[test]
fn disk_and_device_conform() {
    let Some(gpu) = gpu() else { return };
    if let Err(why) = probe_cufile(&cufile_options()) {
        return skip("gds", &why);
    }
    let home = tempfile::tempdir().unwrap();
    for pieces in [1, 5] {
        conformance::check(|slots, block_bytes| {
            let device = Arc::new(tensors(&gpu, slots, block_bytes, pieces));
            let memory = Arc::new(host(slots, block_bytes));
            let first =
                Arc::new(CudaBackend::new(&gpu, Arc::clone(&memory) as _, &device).unwrap());
            let second = Arc::new(gds(&gpu, &device, home.path(), Arc::default()).unwrap());
            let backend = Arc::new(Relay { first, second, routes: RELAYED.both_ways() });
            Pair { memory, other: Tier::Disk, backend }
        });
    }
}

#[test]
fn what_changed_on_disk_does_not_reach_the_engine() {
    let Some(gpu) = gpu() else { return };
    if let Err(why) = probe_cufile(&cufile_options()) {
        return skip("gds", &why);
    }
    let (home, checksums) = (tempfile::tempdir().unwrap(), Arc::new(Checksums::new()));
    let mut bench = Bench::new(&gpu, tensors(&gpu, 2, 5000, 3));
    bench.upload(0, &[7; 5000]);
    let gds = gds(&gpu, &bench.device, home.path(), Arc::clone(&checksums)).unwrap();
    let disk = SlotRef { tier: Tier::Disk, ..bench.here[0].slot_ref() };
    let read = || run(&gds, vec![order(0, disk, bench.there[1].slot_ref())]).remove(0);
    assert_eq!(read().unwrap_err().kind(), CopyErrorKind::Corrupt);
    run(&gds, vec![order(0, bench.there[0].slot_ref(), disk)]).remove(0).unwrap();
    assert_eq!(checksums.get(disk.slot), Some(checksum(&[7; 5000])));
    read().unwrap();
    checksums.record(disk.slot, 1);
    assert_eq!(read().unwrap_err().kind(), CopyErrorKind::Corrupt);
}

fn gds(
    gpu: &Gpu,
    device: &Arc<DeviceRegion>,
    home: &Path,
    checksums: Arc<Checksums>,
) -> Result<GdsBackend, SetupError> {
    gds_with(gpu, device, home, checksums, &cufile_options())
}

fn gds_with(
    gpu: &Gpu,
    device: &Arc<DeviceRegion>,
    home: &Path,
    checksums: Arc<Checksums>,
    options: &CuFileOptions,
) -> Result<GdsBackend, SetupError> {
    let segments = device.segments();
    let disk = disk(&[home], segments.slots(), segments.block_bytes());
    GdsBackend::new(gpu, Arc::clone(device), disk, checksums, 4, options)
}

/// A list of modules that exists, and a short time-out.
fn cufile_options() -> CuFileOptions {
    let mut options = CuFileOptions { timeout: Duration::from_secs(1), ..CuFileOptions::default() };
    if simulation::is_on() {
        options.modules = std::env::current_exe().unwrap();
    }
    options
}

const RELAYED: Route = Route::new(Tier::Host, Tier::Disk);

/// Host to disk by way of the device slot of the same number as the host's: lets the suite look at
/// what GDS moved.
#[derive(Debug)]
struct Relay {
    first: Arc<CudaBackend>,
    second: Arc<GdsBackend>,
    routes: [Route; 2],
}

// SAFETY: each operation ends with its second leg, or with the first if that failed; no two
// operations share a host slot, hence none a device slot.
unsafe impl Backend for Relay {
    fn name(&self) -> &'static str {
        "relay"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        for (index, op) in batch.into_iter().enumerate() {
            let outward = op.from.tier == Tier::Host;
            let own = if outward { op.from } else { op.to };
            let device = SlotRef { tier: Tier::Device, ..own };
            let legs = [CopyOp { to: device, ..op }, CopyOp { from: device, ..op }];
            let (first, second): (Arc<dyn Backend>, Arc<dyn Backend>) = if outward {
                (Arc::clone(&self.first) as _, Arc::clone(&self.second) as _)
            } else {
                (Arc::clone(&self.second) as _, Arc::clone(&self.first) as _)
            };
            let done = done.clone().renumbered(move |_| index);
            let go_on = move |op, result: Result<(), CopyError>| match result {
                Ok(()) => second.submit(vec![legs[1]], done.clone()),
                Err(error) => done.report(vec![(op, Err(error))]),
            };
            first.submit(vec![legs[0]], each(go_on));
        }
    }
}

fn pair(gpu: &Gpu, device: DeviceRegion) -> Pair {
    let segments = device.segments();
    let memory = Arc::new(host(segments.slots(), segments.block_bytes()));
    let backend = CudaBackend::new(gpu, Arc::clone(&memory) as _, &Arc::new(device)).unwrap();
    Pair { memory, other: Tier::Device, backend: Arc::new(backend) }
}

/// What an engine might have allocated: a block is a piece of each of several tensors in one
/// allocation.
fn tensors(gpu: &Gpu, slots: u32, block_bytes: usize, pieces: usize) -> DeviceRegion {
    tensors_in(gpu, slots, block_bytes, pieces, false)
}

/// The first one lies last if they are `backwards`: they are no rows then.
fn tensors_in(
    gpu: &Gpu,
    slots: u32,
    block_bytes: usize,
    pieces: usize,
    backwards: bool,
) -> DeviceRegion {
    let piece = block_bytes.div_ceil(pieces);
    let sizes = (0..block_bytes).step_by(piece).map(|from| piece.min(block_bytes - from));
    let mut end = 0;
    let mut parts: Vec<_> = sizes
        .map(|bytes| {
            let part = Part { base: end, stride: bytes + 8, bytes };
            end += part.stride * slots as usize;
            part
        })
        .collect();
    let memory = gpu.allocate(Geometry::new(1, end).unwrap()).unwrap();
    let base = memory.segments().parts()[0].base;
    for part in &mut parts {
        let there =
            if backwards { end - part.stride * slots as usize - part.base } else { part.base };
        part.base = base + there;
    }
    let map = SegmentMap::new(slots, &parts).unwrap();
    // SAFETY: the parts lie in the allocation that is handed over, which no other code uses.
    unsafe { gpu.adopt(map, memory) }
}

/// Slots on host and device, all ours.
struct Bench {
    memory: Arc<DramRegion>,
    device: Arc<DeviceRegion>,
    backend: CudaBackend,
    here: Vec<Frame>,
    there: Vec<Frame>,
}

impl Bench {
    fn new(gpu: &Gpu, device: DeviceRegion) -> Self {
        let device = Arc::new(device);
        let memory = Arc::new(host(device.segments().slots(), device.segments().block_bytes()));
        let backend = CudaBackend::new(gpu, Arc::clone(&memory) as _, &device).unwrap();
        let (here, there) = (frames(&memory), take_all(device.frames().unwrap()));
        Self { memory, device, backend, here, there }
    }

    fn upload(&mut self, slot: usize, bytes: &[u8]) {
        self.memory.write(&mut self.here[slot]).unwrap()[..bytes.len()].copy_from_slice(bytes);
        run(&self.backend, vec![order(0, self.here[slot].slot_ref(), self.there[slot].slot_ref())])
            .remove(0)
            .unwrap();
    }

    fn download(&mut self, slot: usize) -> &[u8] {
        run(&self.backend, vec![order(0, self.there[slot].slot_ref(), self.here[slot].slot_ref())])
            .remove(0)
            .unwrap();
        self.memory.read(&self.here[slot]).unwrap()
    }

    fn address(&self, slot: usize) -> u64 {
        self.device.segments().segments(SlotId(slot as u32)).unwrap().next().unwrap().address as u64
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn kernels_rearrange_as_the_reference_does(
        shape in (1_usize..5, 1_usize..4, 1_usize..3, 1_usize..17, 1_usize..9, 1_usize..40),
        ranks in 1_usize..3,
        orders in (0_usize..4, 0_usize..4),
        wide: bool,
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let (blocks, layers, kv, tokens, heads, row) = shape;
        let row_bytes = if wide { row * 16 } else { row };
        let shape = Shape { blocks, layers, kv, tokens, heads, row_bytes };
        let names = [Layout::BLOCKS_NHD, Layout::BLOCKS_HND, Layout::LAYERS_NHD, Layout::LAYERS_HND];
        let whole = Layout::new(Shape { heads: heads * ranks, ..shape }, names[orders.0]).unwrap();
        let part = Layout::new(shape, names[orders.1]).unwrap();
        // The last rank's heads: split off, and merged back.
        let ours = whole.heads((ranks - 1) * heads..ranks * heads).unwrap();
        let pairs: Vec<_> = (0..blocks as u32).map(|block| (block, blocks as u32 - 1 - block)).collect();
        check_transform(&gpu, ours, part.whole(), (whole.bytes(), part.bytes()), &pairs);
        check_transform(&gpu, part.whole(), ours, (part.bytes(), whole.bytes()), &pairs);
    }

    #[test]
    fn kernels_sum_as_the_cpu_does(
        block_bytes in prop_oneof![1_usize..9000, 1_usize..3 << 20], pieces in 1_usize..70, seed: usize
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let sums = DeviceChecksum::new(&gpu).unwrap();
        let mut bench = Bench::new(&gpu, tensors(&gpu, 2, block_bytes, pieces));
        let mut block = vec![0; block_bytes];
        fill_pattern(seed % 1000, &mut block);
        bench.upload(1, &block);
        for _ in 0..2 {
            prop_assert_eq!(sums.of(&bench.device, SlotId(1)).unwrap(), checksum(&block));
        }
    }
}

/// All of a GPU but one group would stand by while a request waits.
#[test]
fn a_block_is_summed_by_many_groups() {
    let name = "a_block_is_summed_by_many_groups";
    if simulation::is("no-fault") {
        let gpu = Gpu::open(0).unwrap();
        let (sums, block) = (DeviceChecksum::new(&gpu).unwrap(), vec![7; 2 << 20]);
        for (pieces, groups) in [(1, 16), (3, 18), (64, 64)] {
            let mut bench = Bench::new(&gpu, tensors(&gpu, 1, 2 << 20, pieces));
            bench.upload(0, &block);
            simulation::summing_groups();
            assert_eq!(sums.of(&bench.device, SlotId(0)).unwrap(), checksum(&block));
            assert_eq!(simulation::summing_groups(), groups, "blocks of {pieces} pieces");
        }
    }
    simulation::run_one_test("no-fault", "", name);
}

fn check_transform(
    gpu: &Gpu,
    from: View,
    to: View,
    (source, target): (usize, usize),
    pairs: &[(u32, u32)],
) {
    let transform = Transform::new(from, to).unwrap();
    let geometry = Geometry::new(2, source.max(target)).unwrap();
    let mut bench = Bench::new(gpu, gpu.allocate(geometry).unwrap());
    let (mut input, mut expected) = (vec![0; source], vec![0x5a; target]);
    fill_pattern(source, &mut input);
    bench.upload(0, &input);
    bench.upload(1, &expected);
    transform.apply(&input, &mut expected, pairs).unwrap();
    let rearranger = Rearranger::new(gpu).unwrap();
    // SAFETY: two slots as large as the layouts, that nothing else uses now.
    unsafe { rearranger.apply(&transform, bench.address(0), bench.address(1), pairs) }.unwrap();
    assert_eq!(bench.download(1)[..target], expected);
}

#[test]
fn large_blocks_cross_in_every_way_of_copying() {
    // A driver that does not take rows gets pieces.
    simulation::run_one_test("rows-refused", "", "large_blocks_cross_in_every_way_of_copying");
    let Some(gpu) = gpu() else { return };
    // One piece of 2 MiB, pieces of 512 KiB (one call), of 32 KiB, of 16 KiB (the kernel, in one
    // direction) and of 4 KiB (in both).
    let sizes = [1, 4, 64, 128, 512];
    for (pieces, backwards) in
        sizes.into_iter().flat_map(|pieces| [(pieces, false), (pieces, true)])
    {
        let mut bench = Bench::new(&gpu, tensors_in(&gpu, 9, 2 << 20, pieces, backwards));
        for (number, frame) in bench.here.iter_mut().enumerate() {
            fill_pattern(number, bench.memory.write(frame).unwrap());
        }
        let up = |i: usize| order(i, bench.here[i].slot_ref(), bench.there[i].slot_ref());
        run(&bench.backend, (0..9).map(up).collect()).into_iter().for_each(Result::unwrap);
        let back = |i: usize| order(i, bench.there[i].slot_ref(), bench.here[8 - i].slot_ref());
        run(&bench.backend, (0..4).map(back).collect()).into_iter().for_each(Result::unwrap);
        for number in 0..4 {
            let block = bench.memory.read(&bench.here[8 - number]).unwrap();
            assert!(kvbm_tiers::testing::has_pattern(number, block));
        }
    }
}

#[test]
fn yardsticks_do_what_they_time() {
    let Some(gpu) = gpu() else { return };
    let mut raw = RawGpu::open(&gpu, 1 << 20).unwrap();
    for per_call in [1 << 20, 4096, 5000] {
        raw.to_device(per_call).unwrap();
        raw.to_host(per_call).unwrap();
    }
    raw.within_device().unwrap();
    // A simulated GPU takes nothing that NVRTC makes; the sources are compiled by a test of theirs.
    let busy = raw.matmul(16, 2).map_err(|error| error.kind());
    assert!(matches!(busy, Ok(_) | Err(SetupErrorKind::Unavailable)), "{busy:?}");
    assert_eq!(raw.matmul(512, 1).unwrap_err().kind(), SetupErrorKind::Invalid);
    let shape = Shape { blocks: 4, layers: 2, kv: 2, tokens: 16, heads: 8, row_bytes: 256 };
    let [nhd, hnd] = [Layout::BLOCKS_NHD, Layout::LAYERS_HND]
        .map(|order| Layout::new(shape, order).unwrap().whole());
    raw.transform(&Transform::new(nhd, hnd).unwrap(), 4).unwrap();
    let error = raw.transform(&Transform::new(nhd, hnd).unwrap(), 5).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::Invalid);
}

#[test]
fn tensors_of_our_own_lie_apart() {
    let Some(gpu) = gpu() else { return };
    let region = gpu.allocate_tensors(3, &[4096, 512, 4096]).unwrap();
    assert_eq!(region.segments().parts().len(), 3);
    assert_eq!(region.segments().block_bytes(), 2 * 4096 + 512);
    assert_eq!(gpu.allocate_tensors(3, &[]).unwrap_err().kind(), SetupErrorKind::Invalid);
    assert_eq!(gpu.allocate_tensors(3, &[usize::MAX]).unwrap_err().kind(), SetupErrorKind::Invalid);
}

#[test]
fn who_submits_does_not_wait() {
    let Some(gpu) = gpu() else { return };
    let bench = Bench::new(&gpu, gpu.allocate(Geometry::new(64, 1 << 20).unwrap()).unwrap());
    let started = Instant::now();
    let up = |i: usize| order(i, bench.here[i].slot_ref(), bench.there[i].slot_ref());
    let reports = start(&bench.backend, (0..64).map(up).collect());
    assert!(started.elapsed() < Duration::from_millis(5), "64 MiB took less than this to submit");
    assert_eq!(reports.iter().filter(|(_, result)| result.is_ok()).count(), 64);
}

#[test]
fn memory_remembers_no_checksum_of_what_the_gpu_overwrote() {
    let Some(gpu) = gpu() else { return };
    let mut bench = Bench::new(&gpu, gpu.allocate(Geometry::new(1, 4096).unwrap()).unwrap());
    bench.upload(0, &[7; 4096]);
    let slot = bench.here[0].slot();
    bench.memory.checksums().unwrap().record(slot, 1);
    bench.download(0);
    assert_eq!(bench.memory.checksums().unwrap().get(slot), None);
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(gpu) = gpu() else { return };
    let device = Arc::new(gpu.allocate(Geometry::new(1, 4096).unwrap()).unwrap());
    for memory in [host(1, 8192), DramRegion::emulated_device(options(1, 4096)).unwrap()] {
        let error = CudaBackend::new(&gpu, Arc::new(memory), &device).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
    }
    assert_eq!(Gpu::open(1000).unwrap_err().kind(), SetupErrorKind::Unavailable);
}

fn options(slots: u32, block_bytes: usize) -> kvbm_tiers::DramOptions {
    let geometry = Geometry::new(slots, block_bytes).unwrap();
    kvbm_tiers::DramOptions { geometry, huge_pages: false, fault_threads: 1 }
}

#[test]
fn a_backend_names_its_routes() {
    let Some(gpu) = gpu() else { return };
    let bench = Bench::new(&gpu, gpu.allocate(Geometry::new(1, 4096).unwrap()).unwrap());
    assert_eq!(bench.backend.name(), "cuda");
    assert_eq!(bench.backend.routes(), Route::new(Tier::Host, Tier::Device).both_ways());
}
