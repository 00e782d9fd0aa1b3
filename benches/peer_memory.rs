//! Blocks from a host tier that is mapped as a peer maps it, summed, beside memcpy of as many bytes
//! from private memory, which are not: in turns, on one thread, into the same slots.
//!
//! `cargo bench -p kvbm-bench --bench peer_memory` prints one JSON object. A ratio of 1 is memcpy's
//! speed, and 0.9 is wanted.

use std::hint::black_box;
use std::time::{Duration, Instant};

use kvbm_cli::measuring::rounds::Spread;
use kvbm_tiers::{DramOptions, DramRegion, Frame, Geometry, PeerMemory};
use serde::Serialize;

const BLOCK_SIZES: [usize; 3] = [64 << 10, 1 << 20, 4 << 20];
/// What a turn copies: a prompt.
const TURN_BYTES: usize = 16 << 20;
/// Larger than the processor's last cache.
const WORKING_SET: usize = 512 << 20;
const TURNS: usize = WORKING_SET / TURN_BYTES;
const ROUNDS: usize = 61;

#[derive(Serialize)]
struct Report {
    rounds: usize,
    copies: Vec<Figure>,
}

#[derive(Serialize)]
struct Figure {
    block_bytes: usize,
    huge_pages: bool,
    peer_gb_per_s: Spread,
    memcpy_gb_per_s: Spread,
    ratio: Spread,
}

fn main() {
    let sizes = BLOCK_SIZES.into_iter();
    let copies =
        sizes.flat_map(|size| [true, false].map(|huge_pages| measure(size, huge_pages))).collect();
    let report = Report { rounds: ROUNDS, copies };
    println!("{}", serde_json::to_string(&report).expect("plain data"));
}

fn measure(block_bytes: usize, huge_pages: bool) -> Figure {
    let mut bench = Bench::open(block_bytes, huge_pages);
    // The second time the pages are mapped.
    for turn in 0..TURNS {
        bench.copy(turn);
    }
    let (mut peer, mut memcpy, mut ratio) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let turn = round % TURNS;
        let first = (round % 2 == 0).then(|| bench.memcpy(turn));
        let ours = bench.copy(turn);
        let theirs = first.unwrap_or_else(|| bench.memcpy(turn));
        peer.push(TURN_BYTES as f64 / ours.as_secs_f64() / 1e9);
        memcpy.push(TURN_BYTES as f64 / theirs.as_secs_f64() / 1e9);
        ratio.push(theirs.as_secs_f64() / ours.as_secs_f64());
    }
    Figure {
        block_bytes,
        huge_pages,
        peer_gb_per_s: Spread::of(peer),
        memcpy_gb_per_s: Spread::of(memcpy),
        ratio: Spread::of(ratio),
    }
}

/// The memory of the holder, mapped a second time as a reader does; and private memory, from which
/// and to which memcpy copies.
struct Bench {
    _holder: DramRegion,
    peer: PeerMemory,
    plain: DramRegion,
    sources: Vec<Frame>,
    reader: DramRegion,
    slots: Vec<Frame>,
    turn_blocks: usize,
}

impl Bench {
    fn open(block_bytes: usize, huge_pages: bool) -> Self {
        let geometry = |bytes: usize| Geometry::new((bytes / block_bytes) as u32, block_bytes);
        let options = |bytes, huge_pages| DramOptions {
            geometry: geometry(bytes).expect("a valid geometry"),
            huge_pages,
            fault_threads: 2,
        };
        let holder = DramRegion::shareable_host(options(WORKING_SET, huge_pages));
        let holder = holder.expect("memory for the holder");
        fill(&holder);
        let peer = PeerMemory::map(holder.shareable().expect("it was made for it"));
        let peer = peer.expect("the kernel maps it");
        let plain = DramRegion::host(options(WORKING_SET, true)).expect("memory for memcpy");
        let reader = DramRegion::host(options(WORKING_SET, true)).expect("memory for the reader");
        let (sources, slots) = (fill(&plain), fill(&reader));
        let turn_blocks = TURN_BYTES / block_bytes;
        Self { _holder: holder, peer, plain, sources, reader, slots, turn_blocks }
    }

    fn copy(&mut self, turn: usize) -> Duration {
        let slots = &mut self.slots[turn * self.turn_blocks..][..self.turn_blocks];
        let started = Instant::now();
        for slot in slots {
            let sum = self.peer.copy_into(slot.slot(), &self.reader, slot);
            black_box(sum.expect("the block is there"));
        }
        started.elapsed()
    }

    fn memcpy(&mut self, turn: usize) -> Duration {
        let turn = turn * self.turn_blocks..(turn + 1) * self.turn_blocks;
        let started = Instant::now();
        for (source, slot) in self.sources[turn.clone()].iter().zip(&mut self.slots[turn]) {
            let block = self.plain.read(source).expect("its own slot");
            let slot = self.reader.write(slot).expect("its own slot");
            slot.copy_from_slice(black_box(block));
            black_box(&*slot);
        }
        started.elapsed()
    }
}

/// Writes all slots: pages that nothing has written may all be one.
fn fill(region: &DramRegion) -> Vec<Frame> {
    let mut pool = region.frames().expect("a region of its own");
    let mut frames: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    for frame in &mut frames {
        let content = frame.slot().0 as u8 | 1;
        region.write(frame).expect("its own slot").fill(content);
    }
    frames
}
