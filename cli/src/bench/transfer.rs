//! `kvbm bench transfer`: blocks from another process, by each way, beside `memcpy`.
//!
//! A second process computes a prompt and holds it, here or on another machine. This one leases it
//! there and pulls it, drops it, and pulls it again. Each round also copies the same bytes with one
//! thread, and by NIXL without a manager where that is the way.

#[cfg(feature = "nixl")]
mod direct;

use std::hint::black_box;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use clap::Args;
use kvbm::blocking::Blocks;
use kvbm::{BlockHash, Fingerprint, Manager, Options, RequestInfo, Tier};
use kvbm_cli::measuring::rounds::Spread;
use kvbm_settings::{Capacity, PeerNixl, PeerSettings, Settings, parse_size};
use kvbm_tiers::clock;
use serde::Serialize;
use tempfile::TempDir;

use crate::output::{self, CommandFailure};

/// Prompts whose latency is shown, in blocks, and how often each is pulled.
const PROMPTS: [usize; 3] = [1, 32, 512];
const PULLS: usize = 100;
/// Block sizes that are timed here, and between two machines.
const SIZES: [u64; 3] = [64 << 10, 1 << 20, 4 << 20];
const SIZE_BETWEEN_MACHINES: u64 = 1 << 20;
/// What the other process says begins so.
const ADDRESS: &str = "blocks are held at ";
/// A file in which it leaves what NIXL needs to know.
const INTRODUCTION: &str = "introduction";
/// Names of blocks are spread, as hashes are.
const SPREAD: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;

/// Times pulls from a process that it starts, or from another machine.
#[derive(Args, Debug)]
pub(crate) struct TransferArgs {
    /// Bytes of a block; several with commas between (64KiB,1MiB,4MiB). Between two machines one, the
    /// same on both (1MiB)
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size)]
    size: Vec<u64>,
    /// Bytes that each round moves; the same on both machines
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_size)]
    working_set: u64,
    /// Rounds, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Hold blocks for another machine, at `peers.host` and `peers.port`, until the input ends
    #[arg(long)]
    hold: bool,
    /// Read where a `--hold` on another machine says that it is, with the same secret
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "hold")]
    connect: Option<String>,
    /// Leave what NIXL needs to know of the other process in this file
    #[arg(long, hide = true, requires = "hold")]
    introduction: Option<PathBuf>,
}

/// How blocks come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum PeerPath {
    SharedMemory,
    Nixl,
    Tcp,
}

/// What was measured. Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(crate) struct TransferReport {
    working_set: u64,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    way: PeerPath,
    size: u64,
    gb_s: Spread,
    memcpy_gb_s: Spread,
    /// Of `memcpy` by one thread, in the same round.
    ratio: Spread,
    /// NIXL called directly, in the same round. `None`: another way, or another machine.
    direct: Option<Direct>,
    /// From the request for a lease until its last block is there, by the length of the prompt.
    prompts: Vec<PromptLatency>,
}

#[derive(Debug, Serialize)]
struct Direct {
    gb_s: Spread,
    ratio: Spread,
    /// The same, with a checksum of each block, as a pull takes one.
    summed_gb_s: Spread,
    summed_ratio: Spread,
}

#[derive(Debug, Serialize)]
struct PromptLatency {
    blocks: usize,
    us: LatencyQuantiles,
}

/// By nearest rank.
#[derive(Debug, Serialize)]
struct LatencyQuantiles {
    p50: f64,
    p90: f64,
    p99: f64,
}

impl LatencyQuantiles {
    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |percent: usize| samples[(samples.len() * percent).div_ceil(100) - 1];
        Self { p50: at(50), p90: at(90), p99: at(99) }
    }
}

/// `None`: this was the other process. What `peers` says is for two machines.
pub(crate) fn run(
    args: &TransferArgs,
    peers: &PeerSettings,
) -> Result<Option<TransferReport>, CommandFailure> {
    if args.hold {
        let mut settings = settings(args, args.only_size()?);
        settings.peers.host = peers.host;
        settings.peers.port = peers.port;
        share_secret(&mut settings, peers);
        return hold(args, settings).map(|()| None);
    }
    let mut rows = Vec::new();
    if let Some(holder) = &args.connect {
        let size = args.only_size()?;
        let mut settings = settings(args, size);
        share_secret(&mut settings, peers);
        for way in [PeerPath::Nixl, PeerPath::Tcp].into_iter().filter(|way| ways().contains(way)) {
            let reader = Reader::open(settings.clone(), way, holder);
            match reader.and_then(|reader| measure(args, size, &reader, None)) {
                Err(why) if way == PeerPath::Nixl => eprintln!("SKIPPED: NIXL: {why}"),
                row => rows.push(row?),
            }
        }
    } else {
        let sizes = if args.size.is_empty() { &SIZES[..] } else { &args.size };
        for &size in sizes {
            let holder = Holder::start(args, size)?;
            for way in ways() {
                let place = holder.home.path().join(INTRODUCTION);
                let place = (way == PeerPath::Nixl).then_some(&*place);
                let reader = Reader::open(settings(args, size), way, &holder.address)?;
                rows.push(measure(args, size, &reader, place)?);
            }
        }
    }
    Ok(Some(TransferReport { working_set: args.working_set, rows }))
}

/// NIXL where it is installed, and works here; what is missing is said.
fn ways() -> Vec<PeerPath> {
    static WHY_NOT: LazyLock<Option<String>> = LazyLock::new(|| {
        let found = kvbm::probe_nixl(&Settings::default());
        let why = found.plugins.into_iter().find_map(|plugin| plugin.state.err());
        why.inspect(|why| eprintln!("SKIPPED: no NIXL here: {why}"))
    });
    match *WHY_NOT {
        None => vec![PeerPath::SharedMemory, PeerPath::Nixl, PeerPath::Tcp],
        Some(_) => vec![PeerPath::SharedMemory, PeerPath::Tcp],
    }
}

impl TransferArgs {
    fn only_size(&self) -> Result<u64, CommandFailure> {
        match self.size[..] {
            [] => Ok(SIZE_BETWEEN_MACHINES),
            [size] => Ok(size),
            _ => Err(CommandFailure::unusable("--hold and --connect take one --size")),
        }
    }

    fn chain(&self, size: u64) -> Vec<BlockHash> {
        let blocks = (self.working_set / size.max(1)).max(1);
        let name = |n| BlockHash::from_u128(u128::from(n).wrapping_mul(SPREAD));
        (1..=blocks).map(name).collect()
    }
}

fn settings(args: &TransferArgs, size: u64) -> Settings {
    let mut settings = Settings { block_bytes: Some(size), ..Settings::default() };
    settings.host.capacity = Some(Capacity::Blocks(args.chain(size).len() as u64 + 16));
    settings.peers.enabled = true;
    settings.peers.port = 0;
    settings.peers.lease_share = 1.0;
    settings
}

fn share_secret(settings: &mut Settings, peers: &PeerSettings) {
    settings.peers.secret.clone_from(&peers.secret);
    settings.peers.secret_file.clone_from(&peers.secret_file);
}

fn open(settings: Settings) -> Result<Blocks, CommandFailure> {
    let fingerprint = Fingerprint {
        model: "bench".to_owned(),
        weights: "1".to_owned(),
        block_tokens: 16,
        ..Fingerprint::default()
    };
    let options = Options { fingerprint: Some(fingerprint), ..Options::default() };
    Ok(Blocks::open(settings, options)?)
}

/// The other process: it holds the prompt until its input ends.
fn hold(args: &TransferArgs, settings: Settings) -> Result<(), CommandFailure> {
    let chain = args.chain(args.only_size()?);
    let blocks = open(settings)?;
    let kept = blocks.put(&chain, |position, slot| {
        slot.fill(position as u8 | 1);
        Ok::<_, kvbm::Error>(())
    })?;
    if kept < chain.len() {
        let message = format!("{kept} of {} blocks fit", chain.len());
        return Err(CommandFailure::unexpected(message));
    }
    #[cfg(feature = "nixl")]
    let _held = args
        .introduction
        .as_ref()
        .filter(|_| ways().contains(&PeerPath::Nixl))
        .map(|place| direct::hold(chain.len(), args.only_size()?, place))
        .transpose()?;
    let address = blocks.manager().peers().map(kvbm::Peers::address);
    println!("{ADDRESS}{}", address.map(|address| address.to_string()).unwrap_or_default());
    let _ = io::stdin().read(&mut [0]);
    Ok(())
}

struct Holder {
    child: Child,
    address: String,
    home: TempDir,
}

impl Holder {
    fn start(args: &TransferArgs, size: u64) -> Result<Self, CommandFailure> {
        let broken = |error: io::Error| CommandFailure::unusable(error.to_string());
        let mut command = Command::new(std::env::current_exe().map_err(broken)?);
        let home = tempfile::tempdir().map_err(broken)?;
        command.args(["bench", "transfer", "--hold", "--size", &size.to_string()]);
        command.arg("--introduction").arg(home.path().join(INTRODUCTION));
        command.args(["--working-set", &args.working_set.to_string()]);
        // What this one was told is for two machines.
        for (name, _) in std::env::vars_os() {
            if name.as_encoded_bytes().starts_with(b"DYN_KVBM_") {
                command.env_remove(name);
            }
        }
        command.env("DYN_KVBM_PEERS_PORT", "0");
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(broken)?;
        let said = child.stdout.take().map(BufReader::new);
        // UCX speaks there too.
        let mut lines = said.into_iter().flat_map(BufRead::lines).map_while(Result::ok);
        let address = lines.find_map(|line| Some(line.strip_prefix(ADDRESS)?.to_owned()));
        match address {
            Some(address) => Ok(Self { child, address, home }),
            None => Err(CommandFailure::unusable("the other process does not start")),
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn measure(
    args: &TransferArgs,
    size: u64,
    reader: &Reader,
    place: Option<&Path>,
) -> Result<Row, CommandFailure> {
    let chain = args.chain(size);
    let mut direct = DirectReads::open(chain.len(), size, place)?;
    let bytes = size as usize * chain.len();
    let (from, mut to) = (vec![1_u8; bytes], vec![2_u8; bytes]);
    let [mut pulls, mut copies, mut reads, mut sums] = [const { Vec::new() }; 4];
    for round in 0..=args.rounds {
        pulls.push(reader.pull(&chain)?.as_secs_f64());
        let started = clock::now();
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
        copies.push(started.elapsed().as_secs_f64());
        if let Some((read, summed)) = direct.read()? {
            reads.push(read.as_secs_f64());
            sums.push(summed.as_secs_f64());
        }
        // The first round warms up.
        if round == 0 {
            [&mut pulls, &mut copies, &mut reads, &mut sums].into_iter().for_each(Vec::clear);
        }
    }
    let gb_s = |times: &[f64]| {
        Spread::of(times.iter().map(|seconds| bytes as f64 / 1e9 / seconds).collect())
    };
    let ratio = |other: &[f64]| {
        Spread::of(other.iter().zip(&pulls).map(|(other, pull)| other / pull).collect())
    };
    let prompts = PROMPTS.into_iter().filter(|&blocks| blocks <= chain.len());
    let prompts = prompts.map(|blocks| reader.latency(&chain[..blocks]));
    Ok(Row {
        way: reader.way,
        size,
        gb_s: gb_s(&pulls),
        memcpy_gb_s: gb_s(&copies),
        ratio: ratio(&copies),
        direct: (!reads.is_empty()).then(|| Direct {
            gb_s: gb_s(&reads),
            ratio: ratio(&reads),
            summed_gb_s: gb_s(&sums),
            summed_ratio: ratio(&sums),
        }),
        prompts: prompts.collect::<Result<_, _>>()?,
    })
}

/// NIXL without a manager, if the holder left an introduction for it.
struct DirectReads {
    #[cfg(feature = "nixl")]
    reader: Option<direct::DirectReader>,
}

impl DirectReads {
    #[cfg(feature = "nixl")]
    fn open(blocks: usize, size: u64, place: Option<&Path>) -> Result<Self, CommandFailure> {
        let reader = place.map(|place| direct::DirectReader::open(blocks, size, place));
        Ok(Self { reader: reader.transpose()? })
    }

    #[cfg(not(feature = "nixl"))]
    fn open(_: usize, _: u64, _: Option<&Path>) -> Result<Self, CommandFailure> {
        Ok(Self {})
    }

    fn read(&mut self) -> Result<Option<(Duration, Duration)>, CommandFailure> {
        #[cfg(feature = "nixl")]
        return self.reader.as_mut().map(direct::DirectReader::read).transpose();
        #[cfg(not(feature = "nixl"))]
        Ok(None)
    }
}

struct Reader {
    way: PeerPath,
    manager: Arc<Manager>,
    peer: String,
}

impl Reader {
    fn open(mut settings: Settings, way: PeerPath, holder: &str) -> Result<Self, CommandFailure> {
        settings.peers.addresses = Some(holder.to_owned());
        settings.peers.shared_memory = way == PeerPath::SharedMemory;
        settings.peers.nixl =
            if way == PeerPath::Nixl { PeerNixl::Required } else { PeerNixl::Off };
        let manager = Arc::clone(open(settings)?.manager());
        let known = manager.peers().ok_or_else(no_peers)?.known();
        let peer = known.into_iter().map(|(name, _)| name).next().unwrap_or_default();
        Ok(Self { way, manager, peer })
    }

    /// How long a prompt takes that is not here.
    fn pull(&self, chain: &[BlockHash]) -> Result<Duration, CommandFailure> {
        self.manager.admin().evict(Tier::Host, usize::MAX);
        let peers = self.manager.peers().ok_or_else(no_peers)?;
        let started = clock::now();
        let lease = peers.lease(&self.peer, chain, RequestInfo::default()).wait()?;
        let pulled = peers.pull(lease).wait()?;
        let took = started.elapsed();
        if pulled.copied < chain.len() {
            let why = pulled.fault.unwrap_or_else(|| "there is no room".to_owned());
            let message = format!("{} of {} blocks came: {why}", pulled.copied, chain.len());
            return Err(CommandFailure::unexpected(message));
        }
        Ok(took)
    }

    fn latency(&self, chain: &[BlockHash]) -> Result<PromptLatency, CommandFailure> {
        let us = (0..PULLS).map(|_| Ok(self.pull(chain)?.as_secs_f64() * 1e6));
        let us = us.collect::<Result<Vec<_>, CommandFailure>>()?;
        Ok(PromptLatency { blocks: chain.len(), us: LatencyQuantiles::of(us) })
    }
}

fn no_peers() -> CommandFailure {
    CommandFailure::unexpected("the manager has no peers")
}

impl TransferReport {
    pub(crate) fn to_text(&self) -> String {
        let titles = [
            "way",
            "block",
            "GB/s",
            "memcpy",
            "ratio",
            "NIXL directly",
            "ratio",
            "and summed",
            "1 block, p50 / p99",
            "32",
            "512",
        ];
        let mut table = output::table(&titles, 1);
        for row in &self.rows {
            let way = match row.way {
                PeerPath::SharedMemory => "shared memory",
                PeerPath::Nixl => "NIXL",
                PeerPath::Tcp => "TCP",
            };
            let direct =
                |figure: fn(&Direct) -> String| row.direct.as_ref().map(figure).unwrap_or_default();
            let latency = |blocks: usize| {
                let prompt = row.prompts.iter().find(|prompt| prompt.blocks == blocks);
                let us = prompt.map(|prompt| &prompt.us);
                us.map(|us| format!("{:.0} / {:.0} µs", us.p50, us.p99)).unwrap_or_default()
            };
            table.add_row(
                [
                    way.to_owned(),
                    output::bytes(row.size),
                    format!("{:.1}", row.gb_s.median),
                    format!("{:.1}", row.memcpy_gb_s.median),
                    format!("{:.2}", row.ratio.median),
                    direct(|direct| format!("{:.1}", direct.gb_s.median)),
                    direct(|direct| format!("{:.2}", direct.ratio.median)),
                    direct(|direct| format!("{:.2}", direct.summed_ratio.median)),
                ]
                .into_iter()
                .chain(PROMPTS.map(latency)),
            );
        }
        table.to_string()
    }
}
