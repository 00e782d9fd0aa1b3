//! A trace moves from holders to readers that etcd knows, while one of each is killed and comes
//! back.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvbm::BlockHash;
use kvbm_tests::rig::{hash, wait_until};
use kvbm_tiers::testing::skip;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{LIMIT, Worker, number_of, tell_figures};

/// The prompts of a trace in the Mooncake format. `command` says how many, and where it is.
pub(super) fn prompts(command: &str) -> Vec<Vec<BlockHash>> {
    let [_, requests, path] = command.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    let lines = BufReader::new(File::open(path).unwrap()).lines().take(requests.parse().unwrap());
    let prompt = |line: String| {
        let request: Value = serde_json::from_str(&line).unwrap();
        let ids = request["hash_ids"].as_array().unwrap().iter();
        ids.map(|id| hash(id.as_u64().unwrap() as u32 + 1)).collect()
    };
    lines.map(|line| prompt(line.unwrap())).collect()
}

/// An etcd of one member, which ends with the test.
struct Etcd {
    child: Child,
    url: String,
    _data: TempDir,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Etcd {
    /// `None`: it is not installed.
    fn start() -> Option<Self> {
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let [url, peer] = [(); 2].map(|()| format!("http://{}", free()));
        let data = tempfile::tempdir().unwrap();
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(data.path());
        command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}")]);
        match command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
            Ok(child) => Some(Self { child, url, _data: data }),
            Err(error) => {
                skip("etcd", &format!("{error}; apt-get install etcd-server"));
                None
            }
        }
    }
}

/// Two holders and two readers; `None` where one of them is away.
struct Cluster {
    url: String,
    /// The command that names the trace, and how many requests that are.
    trace: String,
    requests: u32,
    holders: [Option<Worker>; 2],
    readers: [Option<Worker>; 2],
    /// The next request.
    next: u32,
    /// Blocks that came, and reads that brought less than they should.
    came: usize,
    short: usize,
}

const HOLDERS: [&str; 2] = ["holder-0", "holder-1"];
const READERS: [&str; 2] = ["reader-0", "reader-1"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Victim {
    Holder,
    Reader,
}

impl Cluster {
    fn start(etcd: &Etcd, trace: String) -> Self {
        let mut cluster = Self {
            url: etcd.url.clone(),
            trace,
            requests: 0,
            holders: [None, None],
            readers: [None, None],
            next: 0,
            came: 0,
            short: 0,
        };
        cluster.holders = HOLDERS.map(|name| Some(cluster.worker(name)));
        cluster.readers = READERS.map(|name| Some(cluster.worker(name)));
        cluster.wait_for_all();
        cluster
    }

    /// The first reader is a neighbour of the holders, the other one might be anywhere.
    fn worker(&mut self, name: &str) -> Worker {
        let way = if name == READERS[1] { "tcp" } else { "memory" };
        // There is room for the two longest prompts, and for them to be leased.
        let settings = format!(
            "host.capacity = \"16MiB\"\npeers.lease_share = 1.0\npeers.etcd = {:?}\npeers.name = {name:?}",
            self.url
        );
        let mut worker = Worker::with(&settings, way);
        self.requests = worker.ask(&self.trace) as u32;
        worker
    }

    /// Everybody knows everybody.
    fn wait_for_all(&mut self) {
        self.wait_until_known("they do not find each other", |known| {
            HOLDERS.iter().chain(&READERS).filter(|name| known.contains(*name)).count() == 3
        });
    }

    fn wait_until_known(&mut self, otherwise: &str, holds: impl Fn(&str) -> bool) {
        for worker in self.holders.iter_mut().chain(&mut self.readers).flatten() {
            wait_until(LIMIT, otherwise, || holds(&worker.process.ask("known")));
        }
    }

    /// The holder that has most of a prompt.
    fn holder_of(&mut self, request: u32) -> usize {
        let has = |holder: &mut Option<Worker>| {
            holder.as_mut().map(|holder| holder.ask(&format!("has {request}")))
        };
        let [first, second] = self.holders.each_mut().map(has);
        match first.cmp(&second) {
            std::cmp::Ordering::Equal => request as usize % 2,
            order => usize::from(order.is_lt()),
        }
    }

    /// Each reader reads a request at the holder that has most of it. Amid that one of them is
    /// killed.
    fn round(&mut self, victim: Option<Victim>) {
        let mut asked = Vec::new();
        for place in 0..self.readers.len() {
            if self.readers[place].is_none() {
                continue;
            }
            let request = self.next;
            self.next += 1;
            // One that is killed is to be amid a read.
            let at = if victim == Some(Victim::Holder) { 0 } else { self.holder_of(request) };
            let computed = self.holders[at].as_mut().unwrap().ask(&format!("compute {request}"));
            asked.push((place, at, request, computed));
        }
        for (place, at, request, _) in &asked {
            let reader = self.readers[*place].as_mut().unwrap();
            reader.process.tell(&format!("read {request} 0 {}", HOLDERS[*at]));
        }
        if let Some(victim) = victim {
            self.kill(victim);
        }
        for (place, at, request, computed) in asked {
            // One that was killed says nothing.
            let Some(reader) = self.readers[place].as_mut() else { continue };
            let answer = reader.process.hear();
            let came: usize = answer.split(' ').next().unwrap().parse().unwrap();
            let has = reader.ask(&format!("check {request}"));
            if self.holders[at].is_some() {
                assert_eq!(has, computed, "{request} at {}: {answer}", HOLDERS[at]);
            }
            self.short += usize::from(has < computed);
            self.came += came;
        }
    }

    fn kill(&mut self, victim: Victim) {
        let victims = match victim {
            Victim::Holder => &mut self.holders,
            Victim::Reader => &mut self.readers,
        };
        let worker = victims[0].take().unwrap();
        std::thread::sleep(Duration::from_micros(fastrand::u64(0..150)));
        worker.process.kill();
    }

    /// Until `quarters` of the trace are behind us.
    fn rounds(&mut self, quarters: u32) {
        while self.next + 2 <= self.requests * quarters / 4 {
            self.round(None);
        }
    }
}

/// `KVBM_PEER_TRACE` is where it is, `KVBM_PEER_REQUESTS` how much of it.
#[test]
#[ignore = "tests/peers.sh transfer: it takes a trace"]
fn a_trace_moves_between_workers_of_which_two_are_killed() {
    let Some(etcd) = Etcd::start() else { return };
    let trace = std::env::var("KVBM_PEER_TRACE").expect("KVBM_PEER_TRACE names a trace");
    let requests = number_of("KVBM_PEER_REQUESTS", 1_000);
    let mut cluster = Cluster::start(&etcd, format!("trace {requests} {trace}"));
    let started = Instant::now();

    cluster.rounds(1);
    cluster.round(Some(Victim::Holder));
    let killed = Instant::now();
    cluster.rounds(2);
    cluster.wait_until_known("it stays on the list", |known| !known.contains(HOLDERS[0]));
    let gone = killed.elapsed();

    cluster.holders[0] = Some(cluster.worker(HOLDERS[0]));
    cluster.wait_for_all();
    cluster.round(Some(Victim::Reader));
    cluster.rounds(3);

    // And then everything works again.
    cluster.readers[0] = Some(cluster.worker(READERS[0]));
    cluster.wait_for_all();
    let before = cluster.came;
    cluster.rounds(4);
    assert!(cluster.came > before, "the trace is too short");
    cluster.holders.iter_mut().chain(&mut cluster.readers).flatten().for_each(Worker::is_whole);
    tell_figures(&json!({"trace": {
        "requests": cluster.next,
        "blocks": cluster.came,
        "reads_cut_short": cluster.short,
        "killed_is_off_the_list_s": gone.as_secs(),
        "seconds": started.elapsed().as_secs(),
    }}));
}
