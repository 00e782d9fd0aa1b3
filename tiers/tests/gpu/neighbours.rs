//! From the host tier of a neighbour straight into an engine's slots on a GPU.

use std::os::unix::net::UnixStream;

use kvbm_tiers::{
    DramOptions, EngineCopies, Fence, HostFence, PeerMemory, StraightBlock, receive_memory,
    send_memory,
};

use super::*;

const SLOTS: u32 = 6;

/// A holder whose slots have the patterns of their numbers, and its memory as a neighbour maps it.
pub(super) struct Holder {
    region: DramRegion,
    frames: Vec<Frame>,
    pub(super) memory: Arc<PeerMemory>,
}

pub(super) fn holder(block_bytes: usize) -> Holder {
    let geometry = Geometry::new(SLOTS, block_bytes).unwrap();
    let options = DramOptions { geometry, huge_pages: false, fault_threads: 1 };
    let region = DramRegion::shareable_host(options).unwrap();
    let mut frames = frames(&region);
    for frame in &mut frames {
        fill_pattern(frame.slot().0 as usize, region.write(frame).unwrap());
    }
    let (ours, theirs) = UnixStream::pair().unwrap();
    send_memory(&theirs, region.shareable().unwrap()).unwrap();
    let memory = PeerMemory::map(&receive_memory(&ours).unwrap()).unwrap();
    Holder { region, frames, memory: Arc::new(memory) }
}

fn pattern(seed: usize, block_bytes: usize) -> Vec<u8> {
    let mut block = vec![0; block_bytes];
    fill_pattern(seed, &mut block);
    block
}

/// The first call has the memory locked for the GPU, in a thread.
pub(super) fn copies(memory: &Arc<PeerMemory>, engine: &Arc<DeviceRegion>) -> EngineCopies {
    let until = Instant::now() + Duration::from_mins(1);
    loop {
        if let Some(copies) = EngineCopies::between(memory, engine, &Fence::Done) {
            return copies;
        }
        assert!(Instant::now() < until, "the GPU does not read a neighbour's memory");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_neighbours_blocks_come_straight_to_a_gpu() {
    let Some(gpu) = gpu() else { return };
    for (block_bytes, pieces) in [(4096, 1), (5000, 5), (1 << 20, 64), (9 << 20, 2)] {
        let mut bench = Bench::new(&gpu, tensors(&gpu, SLOTS, block_bytes, pieces));
        let holder = holder(block_bytes);
        let copies = copies(&holder.memory, &bench.device);
        let block = |from| StraightBlock { from: SlotId(from), to: SlotId(SLOTS - 1 - from) };
        let blocks: Vec<_> = (0..SLOTS).map(block).collect();
        for blocks in blocks.chunks(copies.at_once()) {
            let expected =
                blocks.iter().map(|block| checksum(&pattern(block.from.0 as usize, block_bytes)));
            assert_eq!(copies.copy(blocks).unwrap(), expected.collect::<Vec<_>>());
        }
        for StraightBlock { from, to } in blocks {
            let expected = pattern(from.0 as usize, block_bytes);
            assert!(bench.download(to.0 as usize)[..block_bytes] == expected, "slot {from:?}");
        }
    }
}

#[test]
fn what_a_neighbour_writes_meanwhile_has_another_checksum() {
    let Some(gpu) = gpu() else { return };
    let bench = Bench::new(&gpu, tensors(&gpu, SLOTS, 5000, 3));
    let mut holder = holder(5000);
    let copies = copies(&holder.memory, &bench.device);
    let block = [StraightBlock { from: SlotId(2), to: SlotId(0) }];
    let before = copies.copy(&block).unwrap();
    for frame in &mut holder.frames {
        holder.region.write(frame).unwrap()[7] ^= 1;
    }
    assert_ne!(copies.copy(&block).unwrap(), before);
    assert_ne!(before, [0]);
}

#[test]
fn a_gpu_refuses_slots_that_do_not_exist() {
    let Some(gpu) = gpu() else { return };
    let bench = Bench::new(&gpu, tensors(&gpu, SLOTS, 4096, 1));
    let memory = holder(4096).memory;
    let copies = copies(&memory, &bench.device);
    for (from, to) in [(SLOTS, 0), (0, SLOTS)] {
        let blocks = [StraightBlock { from: SlotId(from), to: SlotId(to) }];
        assert_eq!(copies.copy(&blocks).unwrap_err().kind(), CopyErrorKind::Refused);
    }
    let unraised = Fence::Host(HostFence::new());
    assert!(EngineCopies::between(&memory, &bench.device, &unraised).is_none());
    let other = Arc::new(tensors(&gpu, SLOTS, 4096, 1));
    assert!(EngineCopies::between(&memory, &other, &Fence::Done).is_none());
    assert!(copies.copy(&[StraightBlock { from: SlotId(0), to: SlotId(0) }]).is_ok());
}

#[test]
fn a_gpu_sums_what_leaves_it_if_asked() {
    let Some(gpu) = gpu() else { return };
    for (block_bytes, pieces) in [(4096, 1), (5000, 5), (1 << 20, 64)] {
        let mut bench = Bench::new(&gpu, tensors(&gpu, SLOTS, block_bytes, pieces));
        (0..SLOTS as usize).for_each(|slot| bench.upload(slot, &pattern(slot, block_bytes)));
        for sums in [false, true] {
            let memory: Arc<DramRegion> = Arc::new(host(SLOTS, block_bytes));
            let open = if sums { CudaBackend::summing } else { CudaBackend::new };
            let backend = open(&gpu, Arc::clone(&memory) as _, &bench.device).unwrap();
            let here = frames(&memory);
            let pairs = bench.there.iter().zip(&here).enumerate();
            let orders = pairs.map(|(at, (from, to))| order(at, from.slot_ref(), to.slot_ref()));
            run(&backend, orders.collect()).into_iter().for_each(|copied| copied.unwrap());
            for (frame, slot) in here.iter().zip(0..) {
                let expected = sums.then(|| checksum(&pattern(slot, block_bytes)));
                assert_eq!(memory.checksums().unwrap().get(frame.slot()), expected);
            }
        }
    }
}
