//! Two workers in network namespaces of their own, and a link between them that is slow, loses
//! packets and is cut.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use kvbm_tests::engine::peer_name;
use kvbm_tests::process::Process;
use kvbm_tests::rig::wait_until;
use kvbm_tiers::testing::skip;
use serde_json::json;

use super::{LIMIT, TTL_MS, Worker, number_of, tell_figures};

/// Of a prompt: what one request for blocks asks for.
const BLOCKS: u32 = 64;
const HOLDER: &str = "10.77.0.1:6890";
/// Milliseconds that packets take, and the share of them that is lost.
const WEATHER: [&str; 5] = ["0 0", "5 0", "40 0", "5 0.01", "50 0.2"];
const CUT: &str = "0 1";

/// Two workers, and what joins them: `link.py`.
struct Network {
    holder: Worker,
    reader: Worker,
    link: Process,
    /// The next prompt.
    next: u32,
    reads: Vec<Duration>,
    short: usize,
}

impl Network {
    /// `None`: this machine does not let us.
    fn start() -> Option<Self> {
        let probe = ["--net", "ip", "tuntap", "add", "name", "probe", "mode", "tun"];
        let probe = Command::new("unshare").args(probe).output();
        if !probe.is_ok_and(|probe| probe.status.success()) {
            skip("network", &"root, ip and tun devices make namespaces that a link joins");
            return None;
        }
        let worker = |settings: &str| {
            let place = format!("peers.host = \"0.0.0.0\"\npeers.port = 6890\n{settings}");
            let process = Process::start_alone("all::peers", "worker", Path::new(&place));
            Worker::of(process, "tcp")
        };
        let holder = worker("");
        let reader = worker(&format!("peers.addresses = {HOLDER:?}"));
        let mut command = Command::new("python3");
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/link.py"));
        command.args([&holder, &reader].map(|worker| worker.process.id().to_string()));
        let mut link = Process::spawn(command);
        assert_eq!(link.hear(), "ready");
        Some(Self { holder, reader, link, next: 0, reads: Vec::new(), short: 0 })
    }

    /// The link is like this from now on.
    fn link_is(&mut self, weather: &str) {
        assert_eq!(self.link.ask(weather), "ok");
    }

    /// Reads a new prompt, while `meanwhile` happens. Returns how many blocks came, which are right.
    fn read(&mut self, meanwhile: impl FnOnce(&mut Self)) -> u32 {
        self.next += 1;
        let n = self.next;
        self.holder.ask(&format!("compute {n} {BLOCKS}"));
        let started = Instant::now();
        self.reader.process.tell(&format!("read {n} {BLOCKS} {}", peer_name(HOLDER)));
        meanwhile(self);
        let answer = self.reader.process.hear();
        self.reads.push(started.elapsed());
        let came = answer.split(' ').next().unwrap().parse().unwrap();
        let has = self.reader.ask(&format!("check {n} {BLOCKS}"));
        assert_eq!(has, came as usize, "{answer}");
        self.short += usize::from(came < BLOCKS);
        came
    }

    /// The link is well again, and so is everything else.
    fn heal(&mut self) {
        self.link_is("0 0");
        wait_until(LIMIT, "leases are left", || self.holder.ask("leased") == 0);
        wait_until(LIMIT, "a link that is well brings nothing", || self.read(|_| ()) == BLOCKS);
    }
}

/// `KVBM_PEER_CUTS` says how often the link is cut.
#[test]
#[ignore = "tests/peers.sh network: it takes root"]
fn workers_outlive_a_link_that_is_slow_lossy_and_cut() {
    let Some(mut network) = Network::start() else { return };
    for weather in WEATHER {
        network.link_is(weather);
        for _ in 0..3 {
            network.read(|_| ());
        }
        network.heal();
    }
    let mut random = fastrand::Rng::with_seed(7);
    let cuts = number_of("KVBM_PEER_CUTS", 5);
    let mut cut_short = 0;
    for _ in 0..cuts {
        let after = Duration::from_micros(random.u64(0..8_000));
        let came = network.read(|network| {
            std::thread::sleep(after);
            network.link_is(CUT);
        });
        cut_short += u32::from(came < BLOCKS);
        assert_eq!(network.read(|_| ()), 0, "the link is cut");
        network.heal();
    }
    network.holder.is_whole();
    network.reader.is_whole();
    let longest = network.reads.iter().max().unwrap();
    tell_figures(&json!({"network": {
        "reads": network.reads.len(),
        "reads_cut_short": network.short,
        "cuts": cuts,
        "cuts_amid_a_read": cut_short,
        "longest_read_ms": longest.as_millis(),
        "limit_ms": TTL_MS,
    }}));
}
