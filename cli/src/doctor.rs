//! `kvbm doctor`: what this machine offers, and what the settings would make of it.

mod machine;
mod network;

use std::collections::HashMap;
use std::time::Duration;

use clap::Args;
use kvbm::{Manager, Options, Tier};
use kvbm_cli::measuring::rounds::Spread;
use kvbm_settings::{AdmissionKind, Capacity, DiskBackend, Loaded, ObjectBackend, Settings};
use serde::Serialize;
use tokio::runtime::Runtime;

use self::network::NetworkSources;
use crate::GlobalOptions;
use crate::bench::tiers::Bed;
use crate::engine::configured_tiers;
use crate::output::{self, CommandFailure};
use crate::scratch::CommandScratch;
use crate::stop;

/// What is examined.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Also measure the bandwidth of the routes, with 64 MiB of blocks that go to and fro
    #[arg(long)]
    measure: bool,
}

/// Serialises to the command's JSON.
#[derive(Debug, Serialize)]
struct DoctorExamination {
    machine: Vec<DoctorCheck>,
    nixl: Vec<DoctorCheck>,
    tiers: Vec<DoctorCheck>,
    routes: Vec<DoctorCheck>,
    network: Vec<DoctorCheck>,
    peers: Vec<DoctorCheck>,
}

/// Something that is there, or why not.
#[derive(Debug, Serialize)]
struct DoctorCheck {
    name: String,
    #[serde(flatten)]
    state: CheckState,
    /// Of a route that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    mib_s: Option<f64>,
}

#[derive(Debug, Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
enum CheckState {
    Ready {
        detail: String,
    },
    Unavailable {
        /// Why, and how to get it.
        detail: String,
    },
    Disabled {
        /// By whom, or how to turn it on.
        detail: String,
    },
}

use CheckState::{Disabled, Ready, Unavailable};

impl DoctorCheck {
    fn ready(name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { name: name.into(), state: Ready { detail: detail.into() }, mib_s: None }
    }

    fn unavailable(name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { name: name.into(), state: Unavailable { detail: detail.into() }, mib_s: None }
    }

    fn disabled(name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { name: name.into(), state: Disabled { detail: detail.into() }, mib_s: None }
    }

    fn of(name: impl Into<String>, found: Result<String, String>) -> Self {
        match found {
            Ok(detail) => Self::ready(name, detail),
            Err(detail) => Self::unavailable(name, detail),
        }
    }
}

pub(crate) fn run(args: &DoctorArgs, global: &GlobalOptions) -> Result<(), CommandFailure> {
    let loaded = global.load(|loader| loader)?;
    let nixl = nixl(&loaded);
    let settings = loaded.settings;
    let runtime = stop::runtime()?;
    let tiers = configured_tiers(&settings).into_iter();
    let tiers: Vec<_> = tiers.map(|tier| try_tier(&runtime, &settings, tier)).collect();
    let ready = tiers
        .iter()
        .filter(|(_, check)| matches!(check.state, Ready { .. }))
        .map(|(tier, _)| *tier);
    let ready: Vec<_> = ready.collect();
    let mut routes = try_routes(&runtime, &settings, &ready);
    if args.measure {
        measure_routes(&runtime, &settings, &ready, &mut routes);
    }
    let tiers = tiers.into_iter().map(|(_, check)| check).collect();
    let examination = DoctorExamination {
        machine: machine::machine(&settings),
        nixl,
        tiers,
        routes,
        network: NetworkSources::of_this_machine().checks(&runtime),
        peers: network::peers(&runtime, &settings),
    };
    global.show(&examination, DoctorExamination::to_text)
}

impl DoctorExamination {
    fn to_text(&self) -> String {
        let none =
            "no tier is set up; give sizes such as DYN_KVBM_CPU_CACHE_GB and DYN_KVBM_BLOCK_BYTES";
        let sections = [
            ("Machine", &self.machine, ""),
            ("NIXL", &self.nixl, ""),
            ("Tiers of these settings, each tried with one block", &self.tiers, none),
            ("Routes", &self.routes, "none"),
            ("Network", &self.network, ""),
            ("Peers", &self.peers, ""),
        ];
        let sections = sections.map(|(title, checks, otherwise)| section(title, checks, otherwise));
        sections.join("\n\n")
    }
}

fn section(title: &str, checks: &[DoctorCheck], otherwise: &str) -> String {
    if checks.is_empty() {
        return format!("{title}: {otherwise}");
    }
    let mut table = output::table(&[title, "state"], usize::MAX);
    for DoctorCheck { name, state, mib_s } in checks {
        let rate = mib_s.map_or_else(String::new, |rate| format!(", {rate:.0} MiB/s"));
        let state = match state {
            Ready { detail } => format!("ready: {detail}{rate}"),
            Unavailable { detail } => format!("unavailable: {detail}"),
            Disabled { detail } => format!("disabled {detail}"),
        };
        table.add_row([name, &state]);
    }
    table.trim_fmt()
}

/// The library, the plugins that are on, and those that could be.
fn nixl(loaded: &Loaded) -> Vec<DoctorCheck> {
    let settings = &loaded.settings.nixl;
    let report = kvbm::probe_nixl(&loaded.settings);
    let nobody_asked = settings.is_default() && settings.library.is_none();
    let native =
        |why: String| if nobody_asked { format!("{why}. Blocks move natively") } else { why };
    let mut checks = vec![DoctorCheck::of("library", report.library.map_err(native))];
    checks.extend(
        report.plugins.into_iter().map(|plugin| DoctorCheck::of(plugin.name, plugin.state)),
    );
    let is_off = |name: &&String| !settings.is_enabled(name);
    for name in settings.backends.keys().filter(is_off) {
        let origin =
            loaded.origins.get(&format!("nixl.backends.{name}")).cloned().unwrap_or_default();
        checks.push(DoctorCheck::disabled(name, format!("by {origin}")));
    }
    let is_unnamed = |name: &&String| is_off(name) && !settings.backends.contains_key(*name);
    for name in report.installed.iter().filter(is_unnamed) {
        checks
            .push(DoctorCheck::disabled(name, format!("unless DYN_KVBM_NIXL_BACKEND_{name}=true")));
    }
    checks
}

fn try_tier(runtime: &Runtime, settings: &Settings, tier: Tier) -> (Tier, DoctorCheck) {
    // Alone, so that a tier that does not open says nothing of the others.
    let opened = open(runtime, miniature(settings, &[tier]));
    let check = match opened {
        Ok(opened) => DoctorCheck::ready(tier.name(), place(settings, tier, opened.device)),
        Err(failure) => DoctorCheck::unavailable(tier.name(), failure.to_string()),
    };
    (tier, check)
}

fn try_routes(runtime: &Runtime, settings: &Settings, tiers: &[Tier]) -> Vec<DoctorCheck> {
    match open(runtime, miniature(settings, tiers)) {
        Ok(opened) => opened.routes,
        Err(failure) => vec![DoctorCheck::unavailable("all", failure.to_string())],
    }
}

/// What was found of some tiers.
struct OpenedTiers {
    routes: Vec<DoctorCheck>,
    /// Whose memory the device tier is.
    device: Option<&'static str>,
}

/// Opens the tiers and lists their routes.
fn open(runtime: &Runtime, mut settings: Settings) -> Result<OpenedTiers, CommandFailure> {
    let _scratch = CommandScratch::divert(&mut settings)?;
    // The address may be an engine's, which runs.
    settings.metrics.enabled = false;
    settings.peers.enabled = false;
    let manager = runtime.block_on(Manager::open(settings, Options::default()))?;
    let routes = manager.admin().routes().iter();
    let routes =
        routes.map(|route| DoctorCheck::ready(route_name(route.from, route.to), &route.backend));
    Ok(OpenedTiers { routes: routes.collect(), device: manager.admin().device() })
}

fn route_name(from: Tier, to: Tier) -> String {
    format!("{from} → {to}")
}

/// Adds to the routes how fast they are; those through a tier that is not set up stay without.
fn measure_routes(
    runtime: &Runtime,
    settings: &Settings,
    tiers: &[Tier],
    routes: &mut Vec<DoctorCheck>,
) {
    let mut rates = HashMap::new();
    for &bottom in tiers.iter().filter(|&&tier| tier > Tier::Device) {
        match rates_below(runtime, settings, bottom) {
            Ok(measured) => {
                rates.extend(measured.map(|((from, to), rate)| (route_name(from, to), rate)));
            }
            Err(failure) => {
                let name = format!("{bottom}, measured");
                routes.push(DoctorCheck::unavailable(name, failure.to_string()));
            }
        }
    }
    for route in routes {
        route.mib_s = rates.get(&route.name).map(|rate| rate.round());
    }
}

/// Bytes that go to and fro.
const WORKING_SET: u64 = 64 << 20;
const ROUNDS: usize = 3;

/// A route and how many MiB/s it moved, with everything that the manager does on the way.
type Measured = ((Tier, Tier), f64);

/// Measures the routes between the device and the host, and between the host and `bottom` if that
/// is another.
fn rates_below(
    runtime: &Runtime,
    settings: &Settings,
    bottom: Tier,
) -> Result<[Measured; 2], CommandFailure> {
    let (mut settings, bytes) = working_set(settings, bottom);
    let _scratch = CommandScratch::divert(&mut settings)?;
    let bed = Bed::open(settings, bottom, runtime)?;
    let (mut writes, mut reads) = (Vec::new(), Vec::new());
    let mib_s = |time: Duration| bytes as f64 / f64::from(1 << 20) / time.as_secs_f64();
    for round in 0..=ROUNDS {
        bed.prepare_write()?;
        let write = bed.write()?;
        bed.prepare_read()?;
        let read = bed.read()?;
        if round > 0 {
            writes.push(mib_s(write));
            reads.push(mib_s(read));
        }
    }
    let above = if bottom == Tier::Host { Tier::Device } else { Tier::Host };
    let median = |rates| Spread::of(rates).median;
    Ok([((above, bottom), median(writes)), ((bottom, above), median(reads))])
}

/// The settings with tiers just large enough, and how many bytes go through them.
fn working_set(settings: &Settings, bottom: Tier) -> (Settings, u64) {
    let block_bytes = settings.block_bytes.unwrap_or_default().max(1);
    let blocks = (WORKING_SET / block_bytes).max(1);
    let capacity = Some(Capacity::Blocks(blocks));
    let mut small = settings.clone();
    (small.device.capacity, small.host.capacity) = (capacity, capacity);
    small.disk.capacity = capacity.filter(|_| bottom == Tier::Disk);
    small.object.url = small.object.url.filter(|_| bottom == Tier::Object);
    small.object.capacity = capacity;
    // Nothing is flushed before it is asked for.
    small.flush.interval_ms = 86_400_000;
    small.flush.dirty_watermark = 1.0;
    (small, blocks * block_bytes)
}

/// The settings with these tiers alone, each as small as it can be.
fn miniature(settings: &Settings, tiers: &[Tier]) -> Settings {
    let one = |tier| tiers.contains(&tier).then_some(Capacity::Blocks(1));
    let mut small = settings.clone();
    small.device.capacity = one(Tier::Device);
    small.host.capacity = one(Tier::Host);
    small.host.staging_blocks = 1;
    if small.host.capacity.is_none() {
        (small.host.persist, small.host.persist_index) = (None, None);
    }
    // One block for each directory: a directory without a slot would not be tried.
    small.disk.capacity =
        one(Tier::Disk).map(|_| Capacity::Blocks(settings.disk.dirs.len() as u64));
    small.object.url = settings.object.url.clone().filter(|_| tiers.contains(&Tier::Object));
    // A store is not asked for its size: one probe object is written, whatever the capacity.
    small.object.capacity = None;
    if small.host.capacity.is_none() {
        // Such rules choose among the blocks of the host tier, which is tried on its own.
        small.disk.admission = AdmissionKind::WriteThrough;
        small.disk.write_budget = None;
    }
    if small.disk.capacity.is_some() && small.disk.backend == DiskBackend::Gds {
        small.device.capacity = settings.device.capacity.map(|_| Capacity::Blocks(1));
    }
    only_needed_plugins(&mut small);
    small
}

/// A tier that NIXL does not move does not suffer from its absence.
fn only_needed_plugins(settings: &mut Settings) {
    if settings.disk.capacity.is_none() {
        settings.disk.backend = DiskBackend::Auto;
    }
    if settings.object.url.is_none() {
        settings.object.backend = ObjectBackend::Native;
    }
    let needed = [
        ("POSIX", settings.disk.backend == DiskBackend::Nixl),
        ("OBJ", settings.object.backend == ObjectBackend::Nixl),
    ];
    settings.nixl.backends = needed.map(|(name, is_needed)| (name.to_owned(), is_needed)).into();
}

fn place(settings: &Settings, tier: Tier, device: Option<&str>) -> String {
    let size = |capacity: Option<Capacity>| {
        capacity.map_or_else(|| "unlimited".to_owned(), |size| size.to_string())
    };
    match tier {
        Tier::Device => match device {
            Some("emulated") => {
                format!("{}, emulated in host memory", size(settings.device.capacity))
            }
            _ => format!("{}, on GPU {}", size(settings.device.capacity), settings.device.ordinal),
        },
        Tier::Host => match &settings.host.persist {
            Some(dir) => format!("{} in {}", size(settings.host.capacity), dir.display()),
            None => size(settings.host.capacity),
        },
        Tier::Disk => {
            let dirs: Vec<_> =
                settings.disk.dirs.iter().map(|dir| dir.display().to_string()).collect();
            format!("{} in {}", size(settings.disk.capacity), dirs.join(", "))
        }
        Tier::Object => format!("{}, the store answers", size(settings.object.capacity)),
    }
}
