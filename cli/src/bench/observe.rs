//! `kvbm bench observe`: what metrics and spans take from saves and loads.
//!
//! Rounds of the same work, in turns: nothing observes it; metrics are read; a tracer takes the
//! spans. What is compared is within one turn, and of one manager: where the memory of another
//! happens to lie makes more of a difference than the observer. It counts in all of them, since
//! managers always do, and serves its metrics, which costs nothing until they are read.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use kvbm::{BlockHash, Manager, Options, RequestId, RequestInfo, Tier};
use kvbm_cli::measuring::chains::Random;
use kvbm_cli::measuring::rounds::Spread;
use kvbm_settings::{Capacity, DeviceBackend, Settings};
use kvbm_tiers::clock;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tracing::Dispatch;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;

use crate::output::{self, CommandFailure};
use crate::stop;

/// Times saves and loads between an emulated device and the host, with and without observers.
#[derive(Args, Debug)]
pub(crate) struct ObserveArgs {
    /// Rounds of each kind, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Milliseconds of a round. Metrics are read once in each
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    round_ms: u64,
}

/// Chains that go down and up again.
const CHAINS: usize = 16;
/// Blocks of a chain: a prompt of 1,024 tokens.
const CHAIN: usize = 64;
/// Small, so that costs for each block weigh more.
const BLOCK_BYTES: u64 = 64 << 10;

/// What observes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Watch {
    Nothing,
    Metrics,
    Spans,
}

impl Watch {
    const ALL: [Self; 3] = [Self::Nothing, Self::Metrics, Self::Spans];

    const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Metrics => "metrics",
            Self::Spans => "a tracer",
        }
    }
}

/// What was measured. Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(crate) struct ObserveReport {
    rounds: u32,
    round_ms: u64,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    watch: Watch,
    /// Saved and loaded, in a second.
    mib_per_s: Spread,
    /// Of the whole process, for each block.
    cpu_us_per_block: Spread,
    /// Of the throughput where nothing observes, in the same turn.
    throughput_ratio: Spread,
    /// The same of the CPU time.
    cpu_ratio: Spread,
}

pub(crate) fn run(args: &ObserveArgs) -> Result<ObserveReport, CommandFailure> {
    let runtime = stop::runtime()?;
    let bed = Bed::open(&runtime)?;
    let length = Duration::from_millis(args.round_ms);
    let mut samples: [Vec<Sample>; Watch::ALL.len()] = Default::default();
    for turn in 0..=args.rounds as usize {
        // The order changes: what comes later in a turn meets another machine.
        for i in (0..Watch::ALL.len()).map(|i| (i + turn) % Watch::ALL.len()) {
            let sample = bed.round(Watch::ALL[i], length)?;
            // The first turn warms up.
            if turn > 0 {
                samples[i].push(sample);
            }
        }
    }
    let rows = Watch::ALL
        .iter()
        .zip(&samples)
        .map(|(&watch, own)| Row::of(watch, own, &samples[0]))
        .collect();
    Ok(ObserveReport { rounds: args.rounds, round_ms: args.round_ms, rows })
}

/// A round: blocks moved, how long it took, and the CPU time of all threads.
#[derive(Clone, Copy, Debug)]
struct Sample {
    blocks: f64,
    seconds: f64,
    cpu_s: f64,
}

impl Sample {
    fn mib_per_s(&self) -> f64 {
        self.blocks * BLOCK_BYTES as f64 / f64::from(1 << 20) / self.seconds
    }

    fn cpu_us_per_block(&self) -> f64 {
        self.cpu_s * 1e6 / self.blocks
    }
}

impl Row {
    fn of(watch: Watch, own: &[Sample], unwatched: &[Sample]) -> Self {
        let all = |figure: fn(&Sample) -> f64| Spread::of(own.iter().map(figure).collect());
        let ratio = |figure: fn(&Sample) -> f64| {
            Spread::of(
                own.iter().zip(unwatched).map(|(own, bare)| figure(own) / figure(bare)).collect(),
            )
        };
        Self {
            watch,
            mib_per_s: all(Sample::mib_per_s),
            cpu_us_per_block: all(Sample::cpu_us_per_block),
            throughput_ratio: ratio(Sample::mib_per_s),
            cpu_ratio: ratio(Sample::cpu_us_per_block),
        }
    }
}

/// A manager, and chains that go down and up.
struct Bed<'a> {
    runtime: &'a Runtime,
    manager: Manager,
    chains: Vec<Vec<BlockHash>>,
}

impl<'a> Bed<'a> {
    fn open(runtime: &'a Runtime) -> Result<Self, CommandFailure> {
        let mut settings = Settings { block_bytes: Some(BLOCK_BYTES), ..Settings::default() };
        let slots = Some(Capacity::Blocks((CHAINS * CHAIN) as u64));
        (settings.device.capacity, settings.host.capacity) = (slots, slots);
        settings.device.backend = DeviceBackend::Emulated;
        (settings.metrics.enabled, settings.metrics.port) = (true, 0);
        let manager = runtime.block_on(Manager::open(settings, Options::default()))?;
        let mut random = Random::new(11);
        let chains = (0..CHAINS).map(|_| random.chain(CHAIN)).collect();
        Ok(Self { runtime, manager, chains })
    }

    fn round(&self, watch: Watch, length: Duration) -> Result<Sample, CommandFailure> {
        if watch != Watch::Spans {
            return self.time(length, watch == Watch::Metrics);
        }
        let tracer = Dispatch::new(tracing_subscriber::registry().with(LevelFilter::DEBUG));
        let sample = tracing::dispatcher::with_default(&tracer, || self.time(length, false));
        drop(tracer);
        // Else each span would go on asking whether any subscriber wants it.
        tracing::callsite::rebuild_interest_cache();
        sample
    }

    /// Moves blocks for this long. Metrics are read once, if at all.
    fn time(&self, length: Duration, reads: bool) -> Result<Sample, CommandFailure> {
        let (began, cpu_before, mut blocks) = (clock::now(), cpu(), 0);
        let address = self.manager.admin().serving_at().filter(|_| reads);
        let reading = address.map(|address| self.runtime.spawn(read_metrics(address)));
        // At least one turn, however busy the machine is.
        while blocks == 0 || began.elapsed() < length {
            blocks += self.turn()?;
        }
        if let Some(reading) = reading {
            let read = self.runtime.block_on(reading).map_err(io::Error::other).flatten();
            read.map_err(|error| {
                CommandFailure::unusable(format!("cannot read the metrics: {error}"))
            })?;
        }
        let cpu_s = cpu().saturating_sub(cpu_before).as_secs_f64();
        Ok(Sample { blocks: blocks as f64, seconds: began.elapsed().as_secs_f64(), cpu_s })
    }

    /// All chains down, and up again.
    fn turn(&self) -> Result<usize, CommandFailure> {
        let (manager, all) = (&self.manager, CHAINS * CHAIN);
        let of =
            |request| RequestInfo { request: Some(RequestId(request)), ..RequestInfo::default() };
        for (request, chain) in (0..).zip(&self.chains) {
            let mut allocation = manager.allocate(chain, manager.lease_for(of(request), chain))?;
            allocation.blocks().for_each(|position| _ = allocation.mark_filled(position));
            let lease = self.runtime.block_on(allocation.publish()?)?.lease;
            self.runtime.block_on(manager.save(lease))?;
        }
        manager.admin().evict(Tier::Device, all);
        for (request, chain) in (0..).zip(&self.chains) {
            self.runtime.block_on(manager.load(manager.lease_for(of(request), chain)))?;
        }
        manager.admin().evict(Tier::Device, all);
        if manager.admin().evict(Tier::Host, all) != all {
            return Err(CommandFailure::unexpected("not all blocks went down and up"));
        }
        Ok(2 * all)
    }
}

/// What all threads of the process have worked.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

async fn read_metrics(address: SocketAddr) -> io::Result<usize> {
    let mut stream = TcpStream::connect(address).await?;
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .await?;
    stream.read_to_end(&mut Vec::new()).await
}

impl ObserveReport {
    pub(crate) fn to_text(&self) -> String {
        let titles =
            ["who looks", "MiB/s", "CPU µs per block", "of the throughput", "of the CPU time"];
        let mut table = output::table(&titles, 1);
        let ratio =
            |spread: Spread| format!("{:.3} ({:.3}–{:.3})", spread.median, spread.p25, spread.p75);
        for row in &self.rows {
            table.add_row([
                row.watch.name().to_owned(),
                format!("{:.0}", row.mib_per_s.median),
                format!("{:.2}", row.cpu_us_per_block.median),
                ratio(row.throughput_ratio),
                ratio(row.cpu_ratio),
            ]);
        }
        table.trim_fmt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_watch_is_compared_with_none() {
        let report = run(&ObserveArgs { rounds: 1, round_ms: 20 }).unwrap();
        assert!(
            (report.rows[0].throughput_ratio.median - 1.0).abs() < 1e-9,
            "nothing against nothing"
        );
        for (row, watch) in report.rows.iter().zip(Watch::ALL) {
            assert_eq!(row.watch, watch);
            assert!(row.mib_per_s.median > 0.0 && row.cpu_us_per_block.median > 0.0, "{row:?}");
            assert!(report.to_text().contains(watch.name()));
        }
    }
}
