//! What the CUDA backend reaches beside the driver's own copies, in one run and in turns. Prints a
//! Markdown table; exits 1 where there is no GPU and 2 where a figure misses its goal. `--quick` is
//! for trying the program itself.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvbm_cli::measuring::rounds::Spread;
use kvbm_tiers::cuda::{CudaBackend, Gpu};
use kvbm_tiers::raw::RawGpu;
use kvbm_tiers::testing::each;
use kvbm_tiers::transform::{Layout, Shape, Transform};
use kvbm_tiers::{
    Backend, BlockKey, CopyOp, DeviceRegion, DramOptions, DramRegion, Geometry, Memory, SegmentMap,
    SetupError, SlotId, SlotRef, Tier,
};

/// Blocks of a batch, as the scheduler makes them.
const BATCH: usize = 16;
/// Llama 3 8B, bf16, on one GPU: a block of 16 tokens is 2 MiB.
const LLAMA: Shape = Shape { blocks: 256, layers: 32, kv: 2, tokens: 16, heads: 8, row_bytes: 256 };

fn main() -> ExitCode {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("no GPU: {error}");
            return ExitCode::FAILURE;
        }
    };
    match Plan::new(quick).run(&gpu) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(2),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// How much is done.
struct Plan {
    rounds: usize,
    shape: Shape,
    /// Rows of the matrices that the engine multiplies meanwhile, and how often: for about as long
    /// as the blocks cross.
    matmul: (u32, usize),
    /// Rows of the matrix that it multiplies with vectors, and how often.
    matvec: (u32, usize),
}

/// A figure and its goal.
struct Row {
    what: String,
    ours: String,
    raw: String,
    ratio: f64,
    is_met: bool,
    goal: String,
}

impl Plan {
    const fn new(quick: bool) -> Self {
        if quick {
            let shape = Shape { blocks: 4, layers: 2, ..LLAMA };
            return Self { rounds: 1, shape, matmul: (64, 2), matvec: (64, 2) };
        }
        Self { rounds: 9, shape: LLAMA, matmul: (2048, 3), matvec: (8192, 90) }
    }

    const fn block_bytes(&self) -> usize {
        self.shape.layers
            * self.shape.kv
            * self.shape.tokens
            * self.shape.heads
            * self.shape.row_bytes
    }

    const fn bytes(&self) -> usize {
        self.shape.blocks * self.block_bytes()
    }

    /// Of keys or values of one layer, on each of `ranks` ranks.
    const fn piece_bytes(&self, ranks: usize) -> usize {
        self.block_bytes() / self.shape.layers / self.shape.kv / ranks
    }

    /// The tensors of one of `ranks` ranks: as many bytes in all, in smaller blocks. The first lies
    /// last if they are `backwards`: they are no rows then.
    fn scattered(
        &self,
        gpu: &Gpu,
        ranks: usize,
        backwards: bool,
    ) -> Result<DeviceRegion, SetupError> {
        let pieces = vec![self.piece_bytes(ranks); self.shape.layers * self.shape.kv];
        let slots = (self.shape.blocks * ranks) as u32;
        let region = gpu.allocate_tensors(slots, &pieces)?;
        if !backwards {
            return Ok(region);
        }
        let parts: Vec<_> = region.segments().parts().iter().rev().copied().collect();
        // SAFETY: the parts lie in the region that is handed over, which no other code uses.
        Ok(unsafe { gpu.adopt(SegmentMap::new(slots, &parts)?, region) })
    }

    /// Whether every goal was met.
    fn run(&self, gpu: &Gpu) -> Result<bool, SetupError> {
        let mut raw = RawGpu::open(gpu, self.bytes())?;
        // Needs NVRTC, which is better said now than after minutes.
        raw.matmul(64, 1)?;
        let whole = gpu.allocate(Geometry::new(self.shape.blocks as u32, self.block_bytes())?)?;
        let mut rows =
            Vec::from(self.crossing(&mut Bed::new(gpu, whole)?, &mut raw, "whole blocks", 0.95)?);
        for (ranks, order, goal, most) in [
            (1, "rows", 0.85, 1.08),
            (1, "rows, summed", 0.85, 1.08),
            (8, "rows", 0.5, 1.08),
            (1, "no rows", 0.7, 1.08),
            (8, "no rows", 0.7, 1.3),
        ] {
            let region = self.scattered(gpu, ranks, order == "no rows")?;
            let summed = order == "rows, summed";
            let mut bed = if summed { Bed::summing(gpu, region)? } else { Bed::new(gpu, region)? };
            let what = format!("pieces of {} KiB, {order}", self.piece_bytes(ranks) >> 10);
            rows.extend(self.crossing(&mut bed, &mut raw, &what, goal)?);
            rows.extend(self.overlap(&mut bed, &mut raw, &what, most)?);
        }
        rows.extend(self.transforms(&mut raw)?);
        println!("{gpu:?}\n\n| what | ours | baseline | ratio | goal |\n|---|---|---|---|---|");
        for Row { what, ours, raw, ratio, is_met, goal } in &rows {
            let verdict = if *is_met { "met" } else { "**missed**" };
            println!("| {what} | {ours} | {raw} | {ratio:.3} | {goal}: {verdict} |");
        }
        Ok(rows.iter().all(|row| row.is_met))
    }

    /// Both directions against the driver's best copies of as many bytes, whatever it is given at
    /// once.
    fn crossing(
        &self,
        bed: &mut Bed,
        raw: &mut RawGpu,
        what: &str,
        goal: f64,
    ) -> Result<[Row; 2], SetupError> {
        let calls = [2 << 20, 16 << 20, self.bytes()];
        let mut best = |way: &mut dyn FnMut(&mut RawGpu, usize) -> Result<Duration, SetupError>| {
            let times = calls
                .into_iter()
                .map(|per_call| way(raw, per_call))
                .collect::<Result<Vec<_>, _>>()?;
            Ok::<_, SetupError>(rate(self.bytes(), times.into_iter().min().unwrap_or_default()))
        };
        let mut turns = [const { Vec::new() }; 4];
        for round in 0..=self.rounds {
            let rates = [
                best(&mut |raw, per_call| raw.to_device(per_call))?,
                rate(bed.bytes(), bed.cross(Tier::Host)),
                best(&mut |raw, per_call| raw.to_host(per_call))?,
                rate(bed.bytes(), bed.cross(Tier::Device)),
            ];
            if round > 0 {
                turns.iter_mut().zip(rates).for_each(|(turn, rate)| turn.push(rate));
            }
        }
        let [raw_to, ours_to, raw_from, ours_from] = turns;
        let row = |way: &str, ours: Vec<f64>, raw: Vec<f64>| {
            let ratio =
                Spread::of(ours.iter().zip(&raw).map(|(ours, raw)| ours / raw).collect()).median;
            let goal_text = format!("≥ {goal}");
            let (ours, raw) = (gb_s(Spread::of(ours).median), gb_s(Spread::of(raw).median));
            Row {
                what: format!("{way}, {what}"),
                ours,
                raw,
                ratio,
                is_met: ratio >= goal,
                goal: goal_text,
            }
        };
        Ok([row("host to device", ours_to, raw_to), row("device to host", ours_from, raw_from)])
    }

    /// Rearranging against copying within the device.
    fn transforms(&self, raw: &mut RawGpu) -> Result<Vec<Row>, SetupError> {
        let whole = |order| Layout::new(self.shape, order).map(|layout| layout.whole());
        let half =
            Layout::new(Shape { heads: self.shape.heads / 2, ..self.shape }, Layout::BLOCKS_NHD)?;
        let ours = Layout::new(self.shape, Layout::BLOCKS_NHD)?.heads(0..self.shape.heads / 2)?;
        let cases = [
            ("NHD to HND", Transform::new(whole(Layout::BLOCKS_NHD)?, whole(Layout::BLOCKS_HND)?)?),
            ("HND to NHD", Transform::new(whole(Layout::BLOCKS_HND)?, whole(Layout::BLOCKS_NHD)?)?),
            (
                "layers first to blocks first",
                Transform::new(whole(Layout::LAYERS_NHD)?, whole(Layout::BLOCKS_NHD)?)?,
            ),
            (
                "blocks first to layers first",
                Transform::new(whole(Layout::BLOCKS_NHD)?, whole(Layout::LAYERS_NHD)?)?,
            ),
            ("half of the heads split off", Transform::new(ours, half.whole())?),
            ("half of the heads merged back", Transform::new(half.whole(), ours)?),
        ];
        cases.into_iter().map(|(what, transform)| self.transform(raw, what, &transform)).collect()
    }

    fn transform(
        &self,
        raw: &mut RawGpu,
        what: &str,
        transform: &Transform,
    ) -> Result<Row, SetupError> {
        let moved = transform.block_bytes() * self.shape.blocks;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..=self.rounds {
            let copied = rate(self.bytes(), raw.within_device()?);
            let rearranged = rate(moved, raw.transform(transform, self.shape.blocks as u32)?);
            if round > 0 {
                ours.push(rearranged);
                theirs.push(copied);
            }
        }
        let ratio =
            Spread::of(ours.iter().zip(&theirs).map(|(ours, raw)| ours / raw).collect()).median;
        let (ours, raw) = (gb_s(Spread::of(ours).median), gb_s(Spread::of(theirs).median));
        Ok(Row {
            what: what.to_owned(),
            ours,
            raw,
            ratio,
            is_met: ratio >= 0.8,
            goal: "≥ 0.8".to_owned(),
        })
    }

    /// Saving and loading while the engine computes, against the engine alone.
    fn overlap(
        &self,
        bed: &mut Bed,
        raw: &mut RawGpu,
        what: &str,
        goal: f64,
    ) -> Result<Vec<Row>, SetupError> {
        let mut rows = Vec::new();
        for (engine, is_prefill) in [("prefill", true), ("decode", false)] {
            let mut compute = || {
                let ((n, times), (rows, steps)) = (self.matmul, self.matvec);
                if is_prefill { raw.matmul(n, times) } else { raw.matvec(rows, steps) }
            };
            for (way, from) in [("load", Tier::Host), ("save", Tier::Device)] {
                let (mut alone, mut beside) = (Vec::new(), Vec::new());
                for round in 0..=self.rounds {
                    let quiet = compute()?;
                    let reports = bed.start(from);
                    let busy = compute()?;
                    let expected = bed.there.slots() as usize;
                    assert_eq!(
                        reports.iter().filter(|ok| *ok).count(),
                        expected,
                        "every block crosses"
                    );
                    if round > 0 {
                        alone.push(quiet.as_secs_f64());
                        beside.push(busy.as_secs_f64());
                    }
                }
                let ratios = beside.iter().zip(&alone).map(|(busy, quiet)| busy / quiet).collect();
                let ratio = Spread::of(ratios).median;
                let ms = |times| format!("{:.2} ms", Spread::of(times).median * 1e3);
                rows.push(Row {
                    what: format!("a {engine} beside the {way} of {what}"),
                    ours: ms(beside),
                    raw: ms(alone),
                    ratio,
                    is_met: ratio < goal,
                    goal: format!("< {goal}"),
                });
            }
        }
        Ok(rows)
    }
}

type OpenBackend = fn(&Gpu, Arc<dyn Memory>, &Arc<DeviceRegion>) -> Result<CudaBackend, SetupError>;

/// Our side: blocks on the host and on the device, and what moves them.
struct Bed {
    there: kvbm_tiers::SegmentMap,
    backend: CudaBackend,
}

impl Bed {
    fn new(gpu: &Gpu, device: DeviceRegion) -> Result<Self, SetupError> {
        Self::with(gpu, device, CudaBackend::new)
    }

    /// What leaves the device is summed there, as for peers.
    fn summing(gpu: &Gpu, device: DeviceRegion) -> Result<Self, SetupError> {
        Self::with(gpu, device, CudaBackend::summing)
    }

    fn with(gpu: &Gpu, device: DeviceRegion, open: OpenBackend) -> Result<Self, SetupError> {
        let segments = device.segments().clone();
        let geometry = Geometry::new(segments.slots(), segments.block_bytes())?;
        let here = Arc::new(DramRegion::host(DramOptions {
            geometry,
            huge_pages: true,
            fault_threads: 4,
        })?);
        let backend = open(gpu, here, &Arc::new(device))?;
        Ok(Self { there: segments, backend })
    }

    fn bytes(&self) -> usize {
        self.there.block_bytes() * self.there.slots() as usize
    }

    /// Every block once, from this tier to the other; returns how long until the last arrived.
    fn cross(&mut self, from: Tier) -> Duration {
        let started = Instant::now();
        let arrived = self.start(from).iter().filter(|ok| *ok).count();
        assert_eq!(arrived, self.there.slots() as usize, "every block crosses");
        started.elapsed()
    }

    /// Submits all blocks; whether each arrived comes through the channel, which closes after the
    /// last.
    fn start(&mut self, from: Tier) -> mpsc::Receiver<bool> {
        let to = if from == Tier::Host { Tier::Device } else { Tier::Host };
        let slot = |tier, slot| SlotRef { tier, slot: SlotId(slot), generation: 0 };
        let op = |number: u32| CopyOp {
            block: BlockKey { hash: u128::from(number), group: 0 },
            parent: None,
            owner: None,
            from: slot(from, number),
            to: slot(to, number),
        };
        let (report, reports) = mpsc::channel();
        let done = each(move |_, result: Result<(), _>| {
            // Who stopped listening has failed already.
            let _ = report.send(result.is_ok());
        });
        let ops: Vec<_> = (0..self.there.slots()).map(op).collect();
        ops.chunks(BATCH).for_each(|batch| self.backend.submit(batch.to_vec(), done.clone()));
        reports
    }
}

fn rate(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64()
}

fn gb_s(rate: f64) -> String {
    format!("{:.1} GB/s", rate / 1e9)
}
