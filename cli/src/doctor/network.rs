//! How workers on other machines are reached: RDMA devices, what UCX and libfabric are told, this
//! worker's port, and its peers.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvbm::{PeerReport, look_at_peers};
use kvbm_settings::Settings;
use tokio::process::Command;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use super::DoctorCheck;

/// The smallest MTU of an Ethernet device for the largest of RoCE, 4096 bytes.
const ROCE_MTU: u32 = 4200;

/// How long another program may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where the machine tells of itself.
pub(super) struct NetworkSources {
    /// `/sys/class/infiniband` and `/sys/class/net`.
    devices: PathBuf,
    interfaces: PathBuf,
    /// Variables of UCX and libfabric.
    variables: BTreeMap<String, String>,
}

impl NetworkSources {
    pub(super) fn of_this_machine() -> Self {
        let ours = |name: &str| name.starts_with("UCX_") || name.starts_with("FI_");
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok().filter(|name| ours(name))?;
            Some((name, value.to_string_lossy().into_owned()))
        });
        let [devices, interfaces] = ["/sys/class/infiniband", "/sys/class/net"].map(PathBuf::from);
        Self { devices, interfaces, variables: variables.collect() }
    }

    pub(super) fn checks(&self, runtime: &Runtime) -> Vec<DoctorCheck> {
        let ports = self.ports();
        let mut checks: Vec<_> = ports.iter().map(RdmaPort::check).collect();
        if ports.is_empty() {
            let none =
                format!("none in {}: other machines are reached over TCP", self.devices.display());
            checks.push(DoctorCheck::unavailable("RDMA devices", none));
        }
        checks.push(self.ucx_devices(&ports));
        checks.push(self.cut_links());
        checks.extend(self.others());
        checks.push(runtime.block_on(libfabric()));
        checks
    }

    fn ports(&self) -> Vec<RdmaPort> {
        let mut ports = Vec::new();
        for device in entries(&self.devices) {
            let names = entries(&device.join("ports"));
            ports.extend(names.iter().filter_map(|port| RdmaPort::read(&device, port)));
        }
        ports
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }

    /// The devices that UCX is to use, each of which has to be there.
    fn ucx_devices(&self, ports: &[RdmaPort]) -> DoctorCheck {
        let name = "UCX_NET_DEVICES";
        let Some(wanted) = self.variable(name).filter(|devices| *devices != "all") else {
            return DoctorCheck::disabled(name, "unless it is set: UCX chooses among all devices");
        };
        let is_there = |device: &str| {
            let of_rdma = ports.iter().any(|port| port.name == device);
            of_rdma || self.interfaces.join(device).exists()
        };
        match wanted.split(',').map(str::trim).find(|device| !is_there(device)) {
            Some(missing) => {
                let known: Vec<_> = ports.iter().map(|port| port.name.as_str()).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                let why = format!("{missing} is not there; RDMA devices: {known}");
                DoctorCheck::unavailable(name, why)
            }
            None => DoctorCheck::ready(name, format!("UCX uses {wanted} alone")),
        }
    }

    fn cut_links(&self) -> DoctorCheck {
        let name = "UCX_TCP_USER_TIMEOUT";
        match self.variable(name) {
            Some(time) => {
                DoctorCheck::ready(name, format!("UCX gives up a link that is silent for {time}"))
            }
            None => DoctorCheck::disabled(
                name,
                "reads between peers set it to 3s; else UCX over TCP never notices a cut link",
            ),
        }
    }

    /// What else is set.
    fn others(&self) -> impl Iterator<Item = DoctorCheck> + '_ {
        let is_told = ["UCX_NET_DEVICES", "UCX_TCP_USER_TIMEOUT"];
        let others = self.variables.iter().filter(move |(name, _)| !is_told.contains(&&***name));
        others.map(|(name, value)| {
            let meaning = meaning(name, value);
            DoctorCheck::ready(
                name,
                format!("{value}{}{meaning}", if meaning.is_empty() { "" } else { ": " }),
            )
        })
    }
}

/// What a variable chooses, as far as it matters here.
fn meaning(name: &str, value: &str) -> &'static str {
    let has = |transport: &str| value.split(',').any(|part| part.trim() == transport);
    match name {
        "UCX_TLS" if value == "tcp" => "TCP alone, also where there is RDMA",
        "UCX_TLS" if has("all") || value.starts_with('^') => "transports that UCX may choose among",
        "UCX_TLS" if !has("tcp") => {
            "UCX has no transport that notices the death of a peer unless one of RDMA does: add tcp"
        }
        "UCX_TLS" => "the transports that UCX may use",
        "UCX_KEEPALIVE_INTERVAL" => "does not notice a cut link by itself",
        "FI_PROVIDER" => "libfabric's provider",
        "FI_EFA_USE_DEVICE_RDMA" if value == "1" => "EFA reads and writes by RDMA",
        "FI_EFA_USE_DEVICE_RDMA" => "EFA copies by the processor: set it to 1",
        "FI_EFA_ENABLE_SHM_TRANSFER" if value != "0" => {
            "shared memory cannot be registered with GPUs: set it to 0"
        }
        _ => "",
    }
}

/// A port of an RDMA device, as sysfs tells.
struct RdmaPort {
    /// `device:port`, as UCX names it.
    name: String,
    /// Such as `4: ACTIVE`.
    state: String,
    /// Such as `100 Gb/sec (4X EDR)`: with the active width.
    rate: String,
    /// `InfiniBand` or `Ethernet`.
    link_layer: String,
    /// Of the network interface on it.
    mtu: Option<u32>,
}

impl RdmaPort {
    fn read(device: &Path, port: &Path) -> Option<Self> {
        let name = format!("{}:{}", file_name(device)?, file_name(port)?);
        let text = |file: &str| {
            fs::read_to_string(port.join(file))
                .map_or("unknown".to_owned(), |text| text.trim().to_owned())
        };
        let interfaces = entries(&device.join("device/net"));
        let mtu = |interface: &PathBuf| {
            fs::read_to_string(interface.join("mtu")).ok()?.trim().parse().ok()
        };
        Some(Self {
            name,
            state: text("state"),
            rate: text("rate"),
            link_layer: text("link_layer"),
            mtu: interfaces.iter().find_map(mtu),
        })
    }

    fn check(&self) -> DoctorCheck {
        let Self { name, state, rate, link_layer, mtu } = self;
        let state = state.split_once(": ").map_or(state.as_str(), |(_, state)| state);
        let mut detail = format!("{link_layer}, {rate}, {state}");
        if let Some(mtu) = mtu {
            let _ = write!(detail, ", MTU of its interface {mtu}");
        }
        if state != "ACTIVE" {
            let remedy = "check cable, switch and, on InfiniBand, the subnet manager";
            return DoctorCheck::unavailable(name, format!("{detail}; {remedy}"));
        }
        if link_layer == "Ethernet" && mtu.is_some_and(|mtu| mtu < ROCE_MTU) {
            let _ = write!(
                detail,
                ", too small for RoCE's 4096: set {ROCE_MTU} or more; UDP port 4791 has to be open"
            );
        }
        DoctorCheck::ready(name, detail)
    }
}

/// What a directory has, by name; nothing if it is not there.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let found = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<_> = found.map(|entry| entry.path()).collect();
    found.sort();
    found
}

fn file_name(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

async fn libfabric() -> DoctorCheck {
    let name = "libfabric";
    let listed = Command::new("fi_info").arg("--list").kill_on_drop(true).output();
    let listed = match timeout(PATIENCE, listed).await {
        Ok(Ok(listed)) if listed.status.success() => listed,
        Ok(_) => {
            let why = "fi_info, which lists its providers, is not installed, or fails";
            return DoctorCheck::unavailable(name, why);
        }
        Err(_) => {
            let why = format!("fi_info, which lists its providers, takes longer than {PATIENCE:?}");
            return DoctorCheck::unavailable(name, why);
        }
    };
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let providers: Vec<_> = text.lines().filter_map(|line| line.strip_suffix(':')).collect();
    DoctorCheck::ready(name, format!("providers {}", providers.join(", ")))
}

/// This worker's port, and whether each peer that the settings list answers.
pub(super) fn peers(runtime: &Runtime, settings: &Settings) -> Vec<DoctorCheck> {
    if !settings.peers.enabled {
        return vec![DoctorCheck::disabled("peers", "unless DYN_KVBM_PEERS=true: docs/peers.md")];
    }
    let mut checks = vec![own_port(settings)];
    match runtime.block_on(look_at_peers(settings)) {
        Ok(found) => checks.extend(found.into_iter().map(peer)),
        Err(error) => checks.push(DoctorCheck::unavailable("peers", error.to_string())),
    }
    checks
}

fn own_port(settings: &Settings) -> DoctorCheck {
    let address = SocketAddr::new(settings.peers.host, settings.peers.port);
    let found = TcpListener::bind(address).map(|_| "free: peers can be served here".to_owned());
    DoctorCheck::of(
        format!("address {address}"),
        found.map_err(|error| format!("{error}; a worker that runs has it, or choose another with peers.host and peers.port")),
    )
}

fn peer(report: PeerReport) -> DoctorCheck {
    let name = format!("peer {}", report.name);
    match report.offer {
        Some(offer) => DoctorCheck::ready(
            name,
            format!(
                "{} answers: model {}, blocks of {} bytes",
                report.address, offer.fingerprint.model, offer.block_bytes
            ),
        ),
        None => DoctorCheck::unavailable(
            name,
            format!("{}: {}", report.address, report.problem.unwrap_or_default()),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::CheckState;

    struct Machine {
        sysfs: tempfile::TempDir,
        sources: NetworkSources,
    }

    impl Machine {
        fn new(variables: &[(&str, &str)]) -> Self {
            let sysfs = tempfile::tempdir().unwrap();
            let variables =
                variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
            let sources = NetworkSources {
                devices: sysfs.path().join("infiniband"),
                interfaces: sysfs.path().join("net"),
                variables: variables.collect(),
            };
            Self { sysfs, sources }
        }

        fn device(self, name: &str, layer: &str, state: &str, mtu: &str) -> Self {
            let device = self.sysfs.path().join("infiniband").join(name);
            let (port, interface) = (device.join("ports/1"), device.join("device/net/eth0"));
            fs::create_dir_all(&port).unwrap();
            fs::create_dir_all(&interface).unwrap();
            for (file, text) in
                [("state", state), ("rate", "100 Gb/sec (4X EDR)"), ("link_layer", layer)]
            {
                fs::write(port.join(file), format!("{text}\n")).unwrap();
            }
            fs::write(interface.join("mtu"), format!("{mtu}\n")).unwrap();
            self
        }

        /// What is said of a name: first whether it is ready, unavailable or disabled.
        fn said(&self, name: &str) -> String {
            let runtime = Runtime::new().unwrap();
            let check = self.sources.checks(&runtime).into_iter().find(|check| check.name == name);
            match check.expect(name).state {
                CheckState::Ready { detail } => format!("ready {detail}"),
                CheckState::Unavailable { detail } => format!("unavailable {detail}"),
                CheckState::Disabled { detail } => format!("disabled {detail}"),
            }
        }
    }

    #[test]
    fn ports_are_told_with_width_state_and_mtu() {
        let machine = Machine::new(&[])
            .device("mlx5_0", "InfiniBand", "4: ACTIVE", "4092")
            .device("mlx5_1", "Ethernet", "4: ACTIVE", "1500")
            .device("mlx5_2", "Ethernet", "4: ACTIVE", "9000")
            .device("mlx5_3", "InfiniBand", "1: DOWN", "4092");
        let active = "ready InfiniBand, 100 Gb/sec (4X EDR), ACTIVE, MTU of its interface 4092";
        assert_eq!(machine.said("mlx5_0:1"), active);
        assert!(machine.said("mlx5_1:1").contains("too small for RoCE"));
        assert!(!machine.said("mlx5_2:1").contains("too small"));
        let down = machine.said("mlx5_3:1");
        assert!(down.starts_with("unavailable") && down.contains("DOWN"), "{down}");
    }

    #[test]
    fn a_machine_without_devices_says_so() {
        let machine = Machine::new(&[]);
        assert!(machine.said("RDMA devices").starts_with("unavailable none in "));
        assert!(machine.said("UCX_TCP_USER_TIMEOUT").contains("never notices a cut link"));
        assert!(machine.said("UCX_NET_DEVICES").starts_with("disabled"));
    }

    #[test]
    fn variables_are_told_with_what_they_choose() {
        let machine = Machine::new(&[
            ("UCX_TLS", "rc,cuda_copy"),
            ("UCX_NET_DEVICES", "mlx5_0:1,mlx5_9:1"),
            ("UCX_TCP_USER_TIMEOUT", "3s"),
            ("FI_EFA_USE_DEVICE_RDMA", "0"),
            ("UCX_LOG_LEVEL", "warn"),
        ])
        .device("mlx5_0", "InfiniBand", "4: ACTIVE", "4092");
        for (name, said) in [
            ("UCX_TLS", "add tcp"),
            ("UCX_NET_DEVICES", "unavailable mlx5_9:1 is not there; RDMA devices: mlx5_0:1"),
            ("UCX_TCP_USER_TIMEOUT", "silent for 3s"),
            ("FI_EFA_USE_DEVICE_RDMA", "set it to 1"),
            ("UCX_LOG_LEVEL", "ready warn"),
        ] {
            let found = machine.said(name);
            assert!(found.contains(said), "{name}: {found}");
        }
    }

    #[test]
    fn peers_that_answer_and_taken_addresses_are_told() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut settings = Settings::default();
        settings.peers.enabled = true;
        settings.peers.port = taken.local_addr().unwrap().port();
        settings.peers.addresses = Some("127.0.0.1:1".to_owned());
        let runtime = crate::stop::runtime().unwrap();
        let checks = peers(&runtime, &settings);
        let unavailable =
            |check: &DoctorCheck| matches!(check.state, CheckState::Unavailable { .. });
        assert_eq!((checks.len(), checks.iter().all(unavailable)), (2, true), "{checks:?}");
        settings.peers.port = 0;
        assert!(!unavailable(&peers(&runtime, &settings)[0]));
        settings.peers.enabled = false;
        assert_eq!(peers(&runtime, &settings).len(), 1);
    }
}
