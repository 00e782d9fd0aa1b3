//! `kvbm bench observe`: what metrics and spans take from saves and loads.
//!
//! Rounds of the same work, in turns: nobody looks; metrics are served; a tracer takes the spans; and, where it is built in,
//! these are sent to a collector. What is compared is within one turn. What reading the metrics costs is timed by itself:
//! Prometheus does it now and then.

use std::io::{Read, Write};
#[cfg(feature = "otel")]
use std::net::TcpListener;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use clap::Args;
use kvbm::{BlockHash, Manager, Options, RequestId, RequestInfo, Tier};
use kvbm_cli::measuring::chains::Random;
use kvbm_cli::measuring::rounds::Spread;
use kvbm_settings::{Capacity, DeviceBackend, Settings};
use kvbm_tiers::clock;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tokio::runtime::Runtime;
use tracing::Dispatch;
use tracing::subscriber::NoSubscriber;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};

use crate::failure::Failure;
use crate::output;
use crate::stop;

/// Times saves and loads between an emulated device and the host, with and without who looks.
#[derive(Args, Debug)]
pub(crate) struct ObserveArgs {
    /// Rounds of each kind, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Milliseconds of a round: short ones meet the same machine
    #[arg(long, value_name = "MS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    round_ms: u64,
}

/// A turn takes so many chains down and up again.
const CHAINS: usize = 16;
/// Blocks of a chain: a prompt of 1,024 tokens.
const CHAIN: usize = 64;
const BLOCK_BYTES: u64 = 64 << 10;

/// Who looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Watch {
    Nobody,
    Metrics,
    Spans,
    #[cfg(feature = "otel")]
    Export,
}

const ALL: &[Watch] = &[
    Watch::Nobody,
    Watch::Metrics,
    Watch::Spans,
    #[cfg(feature = "otel")]
    Watch::Export,
];

/// What was measured. Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(crate) struct ObserveReport {
    rounds: u32,
    round_ms: u64,
    rows: Vec<Row>,
    /// CPU time of the whole process for a reading of the metrics of this manager, in milliseconds.
    scrape_cpu_ms: Spread,
}

#[derive(Debug, Serialize)]
struct Row {
    watch: Watch,
    /// Saved and loaded, in a second.
    mib_per_s: Spread,
    /// Of the whole process, for each block.
    cpu_us_per_block: Spread,
    /// Of the throughput where nobody looks, in the same turn.
    throughput_ratio: Spread,
    /// The same of the CPU time.
    cpu_ratio: Spread,
}

pub(crate) fn run(args: &ObserveArgs) -> Result<ObserveReport, Failure> {
    let runtime = stop::runtime()?;
    let beds = [Bed::open(&runtime, false)?, Bed::open(&runtime, true)?];
    let tracers = Tracers::open()?;
    let round = Duration::from_millis(args.round_ms);
    let mut samples = vec![Vec::new(); ALL.len()];
    for turn in 0..=args.rounds as usize {
        // Who goes first changes: what comes later in a turn meets another machine.
        for i in (0..ALL.len()).map(|i| (i + turn) % ALL.len()) {
            let bed = &beds[usize::from(ALL[i] == Watch::Metrics)];
            let sample = tracing::dispatcher::with_default(tracers.of(ALL[i]), || bed.round(round))?;
            // The first turn warms up.
            if turn > 0 {
                samples[i].push(sample);
            }
        }
    }
    let rows = ALL.iter().zip(&samples).map(|(&watch, own)| Row::of(watch, own, &samples[0])).collect();
    let scrape_cpu_ms = beds[1].scrapes()?;
    Ok(ObserveReport { rounds: args.rounds, round_ms: args.round_ms, rows, scrape_cpu_ms })
}

/// A round: blocks moved, how long it took, and the CPU time of all threads.
#[derive(Clone, Copy, Debug)]
struct Sample {
    blocks: f64,
    seconds: f64,
    cpu_s: f64,
}

impl Row {
    fn of(watch: Watch, own: &[Sample], nobody: &[Sample]) -> Self {
        let speed =
            |sample: &Sample| sample.blocks * BLOCK_BYTES as f64 / f64::from(1 << 20) / sample.seconds;
        let cpu = |sample: &Sample| sample.cpu_s * 1e6 / sample.blocks;
        let all = |figure: &dyn Fn(&Sample) -> f64| Spread::of(own.iter().map(figure).collect());
        let ratio = |figure: &dyn Fn(&Sample) -> f64| {
            Spread::of(own.iter().zip(nobody).map(|(own, nobody)| figure(own) / figure(nobody)).collect())
        };
        Self {
            watch,
            mib_per_s: all(&speed),
            cpu_us_per_block: all(&cpu),
            throughput_ratio: ratio(&speed),
            cpu_ratio: ratio(&cpu),
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
    fn open(runtime: &'a Runtime, serves: bool) -> Result<Self, Failure> {
        let mut settings = Settings { block_bytes: Some(BLOCK_BYTES), ..Settings::default() };
        let slots = Some(Capacity::Blocks((CHAINS * CHAIN) as u64));
        (settings.device.capacity, settings.host.capacity) = (slots, slots);
        settings.device.backend = DeviceBackend::Emulated;
        (settings.metrics.enabled, settings.metrics.port) = (serves, 0);
        let manager = runtime.block_on(Manager::open(settings, Options::default()))?;
        let mut random = Random::new(11);
        let chains = (0..CHAINS).map(|_| random.chain(CHAIN)).collect();
        Ok(Self { runtime, manager, chains })
    }

    fn round(&self, length: Duration) -> Result<Sample, Failure> {
        let (began, cpu_before, mut blocks) = (clock::now(), cpu(), 0);
        while began.elapsed() < length {
            blocks += self.turn()?;
        }
        let (seconds, cpu_s) =
            (began.elapsed().as_secs_f64(), cpu().saturating_sub(cpu_before).as_secs_f64());
        Ok(Sample { blocks: blocks as f64, seconds, cpu_s })
    }

    /// What a reading of the metrics costs, by many.
    fn scrapes(&self) -> Result<Spread, Failure> {
        let address = self.manager.serving_at().ok_or_else(|| Failure::unexpected("nothing is served"))?;
        let scrape = |_| {
            let before = cpu();
            scrape(address).map_err(|error| Failure::unusable(format!("cannot read metrics: {error}")))?;
            Ok(cpu().saturating_sub(before).as_secs_f64() * 1e3)
        };
        (0..50).map(scrape).collect::<Result<Vec<_>, Failure>>().map(Spread::of)
    }

    /// All chains down, and up again.
    fn turn(&self) -> Result<usize, Failure> {
        let (manager, all) = (&self.manager, CHAINS * CHAIN);
        let of = |request| RequestInfo { request: Some(RequestId(request)), ..RequestInfo::default() };
        for (request, chain) in (0..).zip(&self.chains) {
            let mut allocation = manager.allocate(chain, manager.lease_for(of(request), chain))?;
            allocation.blocks().for_each(|position| _ = allocation.mark_filled(position));
            let lease = self.runtime.block_on(allocation.publish()?)?.lease;
            self.runtime.block_on(manager.save(lease))?;
        }
        manager.evict(Tier::Device, all);
        for (request, chain) in (0..).zip(&self.chains) {
            self.runtime.block_on(manager.load(manager.lease_for(of(request), chain)))?;
        }
        manager.evict(Tier::Device, all);
        if manager.evict(Tier::Host, all) != all {
            return Err(Failure::unexpected("not all blocks went down and up"));
        }
        Ok(2 * all)
    }
}

/// What all threads of the process have worked.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

fn scrape(address: SocketAddr) -> std::io::Result<usize> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: kvbm\r\nConnection: close\r\n\r\n")?;
    stream.read_to_end(&mut Vec::new())
}

/// Subscribers: none, one that takes spans and does nothing with them, and one that sends them.
struct Tracers {
    none: Dispatch,
    takes: Dispatch,
    #[cfg(feature = "otel")]
    sends: (Dispatch, kvbm::SpanExport),
}

impl Tracers {
    fn open() -> Result<Self, Failure> {
        struct Takes;
        impl<S: tracing::Subscriber> Layer<S> for Takes {}
        let takes = tracing_subscriber::registry().with(Takes.with_filter(LevelFilter::DEBUG));
        Ok(Self {
            none: Dispatch::new(NoSubscriber::default()),
            takes: Dispatch::new(takes),
            #[cfg(feature = "otel")]
            sends: sends()?,
        })
    }

    const fn of(&self, watch: Watch) -> &Dispatch {
        match watch {
            Watch::Nobody | Watch::Metrics => &self.none,
            Watch::Spans => &self.takes,
            #[cfg(feature = "otel")]
            Watch::Export => &self.sends.0,
        }
    }
}

#[cfg(feature = "otel")]
fn sends() -> Result<(Dispatch, kvbm::SpanExport), Failure> {
    let unusable = |error: std::io::Error| Failure::unusable(format!("cannot play a collector: {error}"));
    let collector = TcpListener::bind("127.0.0.1:0").map_err(unusable)?;
    let endpoint = Some(format!("http://{}", collector.local_addr().map_err(unusable)?));
    clock::spawn("kvbm-collector", move || collect(&collector)).map_err(unusable)?;
    let settings = kvbm_settings::TraceSettings { enabled: true, endpoint, ..Default::default() };
    let export = kvbm::SpanExport::open(&settings)?
        .ok_or_else(|| Failure::unexpected("spans were asked for, and are not sent"))?;
    Ok((Dispatch::new(tracing_subscriber::registry().with(export.layer())), export))
}

/// Takes what it is sent, and says so: a collector that costs next to nothing.
#[cfg(feature = "otel")]
fn collect(collector: &TcpListener) {
    for mut stream in collector.incoming().flatten() {
        let mut read = vec![0; 1 << 20];
        let mut left = 0_usize;
        while let Ok(size @ 1..) = stream.read(&mut read) {
            if left == 0 {
                let head = String::from_utf8_lossy(&read[..size.min(2048)]).to_lowercase();
                let body = head
                    .split("content-length: ")
                    .nth(1)
                    .and_then(|rest| rest.split("\r\n").next()?.parse().ok());
                let end = head.find("\r\n\r\n").map_or(size, |at| at + 4);
                left = (end + body.unwrap_or(0usize)).saturating_sub(size);
            } else {
                left = left.saturating_sub(size);
            }
            if left == 0 && stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").is_err() {
                break;
            }
        }
    }
}

impl ObserveReport {
    pub(crate) fn to_text(&self) -> String {
        let titles = ["who looks", "MiB/s", "CPU µs per block", "of the throughput", "of the CPU time"];
        let mut table = output::table(&titles, 1);
        for row in &self.rows {
            let who = match row.watch {
                Watch::Nobody => "nobody",
                Watch::Metrics => "metrics",
                Watch::Spans => "a tracer",
                #[cfg(feature = "otel")]
                Watch::Export => "a collector",
            };
            let ratio =
                |spread: Spread| format!("{:.3} ({:.3}–{:.3})", spread.median, spread.p25, spread.p75);
            table.add_row([
                who.to_owned(),
                format!("{:.0}", row.mib_per_s.median),
                format!("{:.2}", row.cpu_us_per_block.median),
                ratio(row.throughput_ratio),
                ratio(row.cpu_ratio),
            ]);
        }
        format!("{}\nreading the metrics: {:.2} ms of CPU time", table.trim_fmt(), self.scrape_cpu_ms.median)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_watch_is_compared_with_nobody() {
        let report = run(&ObserveArgs { rounds: 1, round_ms: 20 }).unwrap();
        assert_eq!(report.rows.len(), ALL.len());
        assert!((report.rows[0].throughput_ratio.median - 1.0).abs() < 1e-9, "nobody against nobody");
        for row in &report.rows {
            assert!(row.mib_per_s.median > 0.0 && row.cpu_us_per_block.median > 0.0, "{row:?}");
        }
        assert!(report.to_text().contains("reading the metrics"));
    }
}
