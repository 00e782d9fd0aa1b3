//! `get` of a prompt of 256 blocks beside memcpy of the same bytes, in the same pieces, into the
//! same place: in turns, in one process, with default settings.
//!
//! `cargo bench -p kvbm-bench --bench blocking` prints one JSON object. A ratio of 1 is memcpy's
//! speed, and 0.9 is wanted.

use std::hint::black_box;
use std::time::{Duration, Instant};

use kvbm::blocking::Blocks;
use kvbm::{BlockHash, Error, Options};
use kvbm_cli::measuring::chains::Random;
use kvbm_cli::measuring::rounds::{Picks, Spread};
use kvbm_settings::{Capacity, Settings};
use kvbm_tiers::HugeVec;
use serde::Serialize;

const BLOCK_SIZES: [usize; 2] = [64 << 10, 256 << 10];
const PROMPT_BLOCKS: usize = 256;
/// All prompts of a size together: larger than the processor's last cache.
const WORKING_SET: usize = 256 << 20;
const ROUNDS: usize = 61;

#[derive(Serialize)]
struct Report {
    prompt_blocks: usize,
    rounds: usize,
    get: Vec<Figure>,
}

#[derive(Serialize)]
struct Figure {
    block_bytes: usize,
    get_gb_per_s: Spread,
    memcpy_gb_per_s: Spread,
    ratio: Spread,
}

fn main() -> Result<(), Error> {
    let get = BLOCK_SIZES.map(measure).into_iter().collect::<Result<_, _>>()?;
    let report = Report { prompt_blocks: PROMPT_BLOCKS, rounds: ROUNDS, get };
    println!("{}", serde_json::to_string(&report).expect("plain data"));
    Ok(())
}

fn measure(block_bytes: usize) -> Result<Figure, Error> {
    let mut bench = Bench::open(block_bytes)?;
    bench.check()?;
    let bytes = (PROMPT_BLOCKS * block_bytes) as f64;
    let (mut get, mut memcpy, mut ratio) = (Vec::new(), Vec::new(), Vec::new());
    let mut picks = Picks::new(bench.prompts.len());
    for round in 0..ROUNDS {
        // The second finds the destination in the caches, so they take turns at that too.
        let (prompt, is_ours_first) = (picks.pick(), round % 2 == 0);
        let first = if is_ours_first { bench.get(prompt)? } else { bench.memcpy(prompt) };
        let second = if is_ours_first { bench.memcpy(prompt) } else { bench.get(prompt)? };
        let (ours, theirs) = if is_ours_first { (first, second) } else { (second, first) };
        get.push(bytes / ours.as_secs_f64() / 1e9);
        memcpy.push(bytes / theirs.as_secs_f64() / 1e9);
        ratio.push(theirs.as_secs_f64() / ours.as_secs_f64());
    }
    Ok(Figure {
        block_bytes,
        get_gb_per_s: Spread::of(get),
        memcpy_gb_per_s: Spread::of(memcpy),
        ratio: Spread::of(ratio),
    })
}

/// Prompts that lie in a host tier, and once more in plain memory; and the engine's memory.
struct Bench {
    blocks: Blocks,
    prompts: Vec<Vec<BlockHash>>,
    plain: HugeVec<u8>,
    engine: HugeVec<u8>,
    block_bytes: usize,
}

impl Bench {
    fn open(block_bytes: usize) -> Result<Self, Error> {
        let prompt_bytes = PROMPT_BLOCKS * block_bytes;
        let mut random = Random::new(7);
        let mut settings =
            Settings { block_bytes: Some(block_bytes as u64), ..Settings::default() };
        settings.host.capacity = Some(Capacity::Blocks((WORKING_SET / block_bytes) as u64));
        let blocks = Blocks::open(settings, Options::default())?;
        let prompts: Vec<_> =
            (0..WORKING_SET / prompt_bytes).map(|_| random.chain(PROMPT_BLOCKS)).collect();
        let mut plain = HugeVec::filled(WORKING_SET, 0);
        plain
            .chunks_exact_mut(8)
            .for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
        for (chain, bytes) in prompts.iter().zip(plain.chunks_exact(prompt_bytes)) {
            let kept = blocks.put(chain, |position, slot| {
                slot.copy_from_slice(&bytes[position * block_bytes..][..block_bytes]);
                Ok::<_, Error>(())
            })?;
            assert_eq!(kept, PROMPT_BLOCKS, "the tier has room for all prompts");
        }
        Ok(Self { blocks, prompts, plain, engine: HugeVec::filled(prompt_bytes, 0), block_bytes })
    }

    /// Not between the timed rounds: it would bring one source into the caches.
    fn check(&mut self) -> Result<(), Error> {
        let bytes = self.engine.len();
        for prompt in 0..self.prompts.len() {
            self.get(prompt)?;
            assert!(
                self.engine[..] == self.plain[prompt * bytes..][..bytes],
                "not the bytes that were put"
            );
        }
        Ok(())
    }

    fn get(&mut self, prompt: usize) -> Result<Duration, Error> {
        let (chain, block_bytes) = (&self.prompts[prompt], self.block_bytes);
        let started = Instant::now();
        let found = self.blocks.get(chain, |position, block| {
            self.engine[position * block_bytes..][..block_bytes].copy_from_slice(block);
            Ok::<_, Error>(())
        })?;
        let took = started.elapsed();
        black_box(&*self.engine);
        assert_eq!(found, chain.len());
        Ok(took)
    }

    fn memcpy(&mut self, prompt: usize) -> Duration {
        let bytes = self.engine.len();
        let from = &self.plain[prompt * bytes..][..bytes];
        let started = Instant::now();
        for (to, from) in
            self.engine.chunks_exact_mut(self.block_bytes).zip(from.chunks_exact(self.block_bytes))
        {
            to.copy_from_slice(black_box(from));
        }
        let took = started.elapsed();
        black_box(&*self.engine);
        took
    }
}
