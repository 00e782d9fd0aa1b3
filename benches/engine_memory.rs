//! An engine's own memory beside memcpy of the same pieces with as many threads: saves and loads of
//! a prompt, in turns, in one process, with default settings; and how soon the first layer of a
//! load is there.
//!
//! `cargo bench -p kvbm-bench --bench engine_memory` prints one JSON object. A ratio of 1 is
//! memcpy's speed: 0.8 is wanted of 32 layers with keys and values apart, 0.95 of blocks in one
//! piece. The first layer is wanted after 1.5/32 of the whole load.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use kvbm::{
    BlockHash, EngineMemory, Error, Fence, GroupSlots, Manager, Options, SaveRequest, SlotId,
};
use kvbm_cli::measuring::chains::Random;
use kvbm_cli::measuring::rounds::{Picks, Spread};
use kvbm_settings::{Capacity, Settings};
use kvbm_tiers::HugeVec;
use kvbm_tiers::testing::Tensors;
use serde::Serialize;

const LAYERS: u16 = 32;
/// Keys, or values, of 16 tokens in a layer.
const PIECE_BYTES: usize = 4 << 10;
const BLOCK_BYTES: usize = 2 * LAYERS as usize * PIECE_BYTES;
const PROMPT_BLOCKS: usize = 256;
/// Of the raw side, and ours before the first round: larger together than the processor's last
/// cache.
const PROMPTS: usize = 5;
const ROUNDS: usize = 31;
const PATIENCE: Duration = Duration::from_mins(1);

#[derive(Serialize)]
struct Report {
    prompt_blocks: usize,
    block_bytes: usize,
    rounds: usize,
    pieces: Figure,
    contiguous: Figure,
}

#[derive(Serialize)]
struct Figure {
    piece_bytes: usize,
    memcpy_gb_per_s: Spread,
    save_ratio: Spread,
    load_ratio: Spread,
    /// Of the time of the whole load.
    first_layer_share: Spread,
}

fn main() -> Result<(), Error> {
    let report = Report {
        prompt_blocks: PROMPT_BLOCKS,
        block_bytes: BLOCK_BYTES,
        rounds: ROUNDS,
        pieces: measure(PIECE_BYTES)?,
        contiguous: measure(BLOCK_BYTES)?,
    };
    println!("{}", serde_json::to_string(&report).expect("plain data"));
    Ok(())
}

fn measure(piece_bytes: usize) -> Result<Figure, Error> {
    let mut bench = Bench::open(piece_bytes)?;
    let mut raw = RawPieces::new(piece_bytes, Settings::default().transfer.copy_threads as usize);
    let (mut memcpy, mut saves, mut loads, mut layers) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut picks = Picks::new(PROMPTS);
    for round in 0..ROUNDS {
        let save = bench.save()?;
        let down = raw.down(round % PROMPTS);
        let (load, first) = bench.load(picks.pick())?;
        let up = raw.up(picks.pick());
        let bytes = (PROMPT_BLOCKS * BLOCK_BYTES) as f64;
        memcpy.push(bytes / up.as_secs_f64() / 1e9);
        saves.push(down.as_secs_f64() / save.as_secs_f64());
        loads.push(up.as_secs_f64() / load.as_secs_f64());
        layers.push(first.as_secs_f64() / load.as_secs_f64());
    }
    Ok(Figure {
        piece_bytes,
        memcpy_gb_per_s: Spread::of(memcpy),
        save_ratio: Spread::of(saves),
        load_ratio: Spread::of(loads),
        first_layer_share: Spread::of(layers),
    })
}

/// A manager beside an engine that has room for one prompt, and whose host tier has room for all
/// prompts.
struct Bench {
    manager: Manager,
    random: Random,
    slots: Vec<SlotId>,
    /// Those in the host tier.
    prompts: Vec<Vec<BlockHash>>,
}

impl Bench {
    fn open(piece_bytes: usize) -> Result<Self, Error> {
        let mut settings =
            Settings { block_bytes: Some(BLOCK_BYTES as u64), ..Settings::default() };
        settings.host.capacity =
            Some(Capacity::Blocks(((PROMPTS + ROUNDS) * PROMPT_BLOCKS) as u64));
        let tensors = Tensors::new(PROMPT_BLOCKS as u32, BLOCK_BYTES, BLOCK_BYTES / piece_bytes);
        let memory = EngineMemory::new(tensors.into_region(), LAYERS)?;
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let manager = runtime.block_on(Manager::open(
            settings,
            Options { engine: Some(memory), ..Options::default() },
        ))?;
        let slots = (0..PROMPT_BLOCKS as u32).map(SlotId).collect();
        let mut bench = Self { manager, random: Random::new(7), slots, prompts: Vec::new() };
        for _ in 0..PROMPTS {
            bench.save()?;
        }
        Ok(bench)
    }

    /// A prompt that is not there yet. There is room for all.
    fn save(&mut self) -> Result<Duration, Error> {
        let chain = self.random.chain(PROMPT_BLOCKS);
        let started = Instant::now();
        let save = self
            .manager
            .save_from(&SaveRequest::of(&chain, &[GroupSlots::full(0, &self.slots)]))
            .wait()?;
        let took = started.elapsed();
        assert_eq!(save.copied, PROMPT_BLOCKS);
        self.prompts.push(chain);
        Ok(took)
    }

    /// The time of it all, and that until the first layer was there.
    fn load(&mut self, prompt: usize) -> Result<(Duration, Duration), Error> {
        let chain = &self.prompts[prompt % self.prompts.len()];
        let started = Instant::now();
        let lease = self.manager.lease(chain);
        let mut load =
            self.manager.load_into(lease, &[GroupSlots::full(0, &self.slots)], &Fence::Done);
        assert!(load.wait_layers(1, PATIENCE), "the first layer does not come");
        let first = started.elapsed();
        let loaded = load.wait_for(PATIENCE).expect("it ends")?;
        let took = started.elapsed();
        assert_eq!(loaded.arrived, PROMPT_BLOCKS);
        Ok((took, first))
    }
}

/// Memory of the same shape: an engine's tensors, and prompts whose blocks lie whole.
struct RawPieces {
    tensors: Vec<Vec<u8>>,
    host: HugeVec<u8>,
    piece_bytes: usize,
    threads: usize,
}

impl RawPieces {
    fn new(piece_bytes: usize, threads: usize) -> Self {
        let tensor = || vec![1; PROMPT_BLOCKS * piece_bytes];
        let tensors = (0..BLOCK_BYTES / piece_bytes).map(|_| tensor()).collect();
        let host = HugeVec::filled(PROMPTS * PROMPT_BLOCKS * BLOCK_BYTES, 1);
        Self { tensors, host, piece_bytes, threads }
    }

    fn down(&mut self, prompt: usize) -> Duration {
        let blocks =
            &mut self.host[prompt * PROMPT_BLOCKS * BLOCK_BYTES..][..PROMPT_BLOCKS * BLOCK_BYTES];
        let tensors = &self.tensors;
        let pieces = blocks.chunks_exact_mut(self.piece_bytes).enumerate().map(|(place, to)| {
            let (block, tensor) = (place / tensors.len(), place % tensors.len());
            (to, &tensors[tensor][block * self.piece_bytes..][..self.piece_bytes])
        });
        copy(pieces.collect(), self.threads)
    }

    fn up(&mut self, prompt: usize) -> Duration {
        let blocks =
            &self.host[prompt * PROMPT_BLOCKS * BLOCK_BYTES..][..PROMPT_BLOCKS * BLOCK_BYTES];
        let piece_bytes = self.piece_bytes;
        let mut tensors: Vec<_> =
            self.tensors.iter_mut().map(|tensor| tensor.chunks_exact_mut(piece_bytes)).collect();
        let count = tensors.len();
        let pieces = blocks.chunks_exact(piece_bytes).enumerate().map(|(place, from)| {
            let to = tensors[place % count].next().expect("a piece for each block");
            (to, from)
        });
        copy(pieces.collect(), self.threads)
    }
}

/// Copies all pieces, each thread a run of them. Starting the threads does not count.
fn copy(mut pieces: Vec<(&mut [u8], &[u8])>, threads: usize) -> Duration {
    let barrier = Barrier::new(threads);
    let share = pieces.len().div_ceil(threads);
    let times: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
        let work = |pieces: &mut [(&mut [u8], &[u8])]| {
            barrier.wait();
            let started = Instant::now();
            pieces.iter_mut().for_each(|(to, from)| to.copy_from_slice(from));
            (started, Instant::now())
        };
        let threads: Vec<_> =
            pieces.chunks_mut(share).map(|pieces| scope.spawn(move || work(pieces))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it copies")).collect()
    });
    let (started, ended) =
        (times.iter().map(|time| time.0).min(), times.iter().map(|time| time.1).max());
    ended.zip(started).map_or(Duration::ZERO, |(ended, started)| ended - started)
}
