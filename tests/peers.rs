//! Workers that read each other's host tier, as processes: every byte checked, whichever is killed,
//! frozen or comes back. `tests/peers.sh` runs those that it takes long, root or a trace to run.

mod messages;
mod network;
mod overlap;
mod scale;
mod trace;

use std::io::stdin;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvbm::blocking::Blocks;
use kvbm::{BlockHash, Error, FollowRequest, Manager, Pulled, RequestInfo, Tier};
use kvbm_settings::{Loader, Settings};
use kvbm_tests::engine::{self, peer_name};
use kvbm_tests::process::{Process, role, say};
use kvbm_tests::rig::{chain, has_nixl, wait_until};
use kvbm_tiers::layers::bytes_of_layer;
use kvbm_tiers::testing::{fill_pattern, has_pattern};
use serde_json::{Value, json};

const BLOCK: u64 = 16 << 10;
const SLOTS: u64 = 512;
const LAYERS: NonZeroU16 = NonZeroU16::new(8).unwrap();
const TTL_MS: u64 = 1_000;
const SECRET: &str = "the secret of these tests";
/// What ends with an event, on a busy machine.
const LIMIT: Duration = Duration::from_mins(1);

/// Those of these tests, and what TOML says beside them.
fn from_toml(toml: &str) -> Settings {
    let mut settings = engine::without_device(BLOCK, SLOTS);
    engine::add_peers(&mut settings, "");
    settings.peers.secret = Some(SECRET.to_owned());
    settings.peers.lease_ttl_ms = TTL_MS;
    Loader::new().defaults(settings).text(toml).load().unwrap().settings
}

/// The `--kills` and the like of `tests/peers.sh`.
fn number_of(variable: &str, otherwise: u32) -> u32 {
    std::env::var(variable).map_or(otherwise, |number| number.parse().unwrap())
}

/// Tells `tests/peers.sh` what was measured.
fn tell_figures(figures: &Value) {
    println!("figures {figures}");
}

fn open(settings: Settings, weights: &str) -> Result<Blocks, Error> {
    Blocks::open(settings, engine::model(engine::fingerprint(weights)))
}

/// Computes what the host tier lacks of a chain; returns how many leading blocks it has then.
fn compute(blocks: &Blocks, chain: &[BlockHash]) -> usize {
    let fill = |at: usize, slot: &mut [u8]| {
        fill_pattern(chain[at].get() as usize, slot);
        Ok::<_, Error>(())
    };
    blocks.put(chain, fill).unwrap()
}

/// The same, one layer of all blocks after the other.
fn compute_in_layers(blocks: &Blocks, chain: &[BlockHash]) -> usize {
    let info = RequestInfo::default();
    let mut put = blocks.put_in_layers(info, chain, LAYERS).unwrap();
    for layer in 0..LAYERS.get() {
        let bytes = bytes_of_layer(BLOCK as usize, layer, LAYERS);
        let mut block = vec![0; BLOCK as usize];
        put.write(|at, part| {
            fill_pattern(chain[at].get() as usize, &mut block);
            part.copy_from_slice(&block[bytes.clone()]);
            Ok::<_, Error>(())
        })
        .unwrap();
    }
    put.finish().unwrap()
}

/// How many leading blocks the tiers have, each with its own bytes.
fn check(blocks: &Blocks, chain: &[BlockHash]) -> usize {
    let check = |at: usize, block: &[u8]| {
        assert!(has_pattern(chain[at].get() as usize, block), "a wrong block at {at}");
        Ok::<_, Error>(())
    };
    blocks.get(chain, check).unwrap()
}

/// Brings a chain from a peer; says how many blocks came, and why not more.
fn read(manager: &Manager, peer: &str, chain: &[BlockHash]) -> String {
    let peers = manager.peers().unwrap();
    let lease = peers.lease(peer, chain, RequestInfo::default()).wait();
    told(lease.and_then(|lease| peers.pull(lease).wait()))
}

/// The same of one that a peer computes meanwhile.
fn follow(manager: &Manager, peer: &str, chain: &[BlockHash]) -> String {
    let (peers, patience) = (manager.peers().unwrap(), Duration::from_millis(TTL_MS));
    told(peers.follow(FollowRequest { patience, ..FollowRequest::new(peer, chain) }).wait())
}

fn told(pulled: Result<Pulled, Error>) -> String {
    match pulled {
        Ok(pulled) => format!("{} {:?}", pulled.copied, pulled.fault),
        Err(error) => format!("0 {error}"),
    }
}

/// A worker that the tests below start.
#[test]
fn process() {
    let Some((_, place)) = role() else { return };
    let blocks = open(from_toml(place.to_str().unwrap()), "1").unwrap();
    let manager = Arc::clone(blocks.manager());
    say(&engine::address(&manager));
    let mut prompts = Vec::new();
    for line in stdin().lines() {
        let line = line.unwrap();
        let mut words = line.split(' ');
        let what = words.next().unwrap();
        let mut number = || words.next().and_then(|word| word.parse().ok()).unwrap_or_default();
        let (n, length): (u32, u32) = (number(), number());
        let chain = || prompts.get(n as usize).cloned().unwrap_or_else(|| chain(n, length));
        match what {
            "trace" => {
                prompts = trace::prompts(&line);
                say(&prompts.len().to_string());
            }
            "compute" => say(&compute(&blocks, &chain()).to_string()),
            "layers" => say(&compute_in_layers(&blocks, &chain()).to_string()),
            "has" => say(&manager.matches(&chain()).longest().to_string()),
            "check" => say(&check(&blocks, &chain()).to_string()),
            "evict" => say(&manager.admin().evict(Tier::Host, n as usize).to_string()),
            "read" => say(&read(&manager, words.next().unwrap(), &chain())),
            "follow" => say(&follow(&manager, words.next().unwrap(), &chain())),
            "known" => {
                let known = manager.peers().unwrap().known();
                say(&known.into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(" "));
            }
            "leased" => say(&manager.peers().unwrap().leased().to_string()),
            "audit" => {
                engine::assert_sound(&manager);
                say("sound");
            }
            _ => panic!("unknown: {line}"),
        }
    }
}

/// The setting that lists others, if there are any.
fn list(addresses: &str) -> String {
    if addresses.is_empty() { String::new() } else { format!("peers.addresses = {addresses:?}") }
}

/// Blocks come by this way.
fn by(way: &str) -> String {
    let (memory, nixl) = match way {
        "memory" => (true, "off"),
        "nixl" | "nixl over tcp" => (false, "required"),
        "auto" => (false, "auto"),
        _ => (false, "off"),
    };
    // Else the kernel copies, and reads over TCP fail.
    let over_tcp = "nixl.ucx.engine_config = \"TLS=tcp,PROTO_EMULATION_ENABLE=y\"";
    let ucx = if way.ends_with("over tcp") { over_tcp } else { "" };
    format!("peers.shared_memory = {memory}\npeers.nixl = {nixl:?}\n{ucx}")
}

struct Worker {
    process: Process,
    address: String,
    way: &'static str,
}

impl Worker {
    /// Its blocks go to neighbours by shared `memory`, or by `nixl`, by `tcp`, or by one of them
    /// (`auto`) as to others.
    fn start(port: u16, addresses: &str, way: &'static str) -> Self {
        Self::with(&format!("peers.port = {port}\n{}", list(addresses)), way)
    }

    fn with(settings: &str, way: &'static str) -> Self {
        let place = format!("{settings}\n{}", by(way));
        Self::of(Process::start(module_path!(), "worker", Path::new(&place)), way)
    }

    fn of(mut process: Process, way: &'static str) -> Self {
        let address = process.hear();
        Self { process, address, way }
    }

    /// Another process in its place.
    fn again(self, addresses: &str) -> Self {
        let port = self.address.parse::<SocketAddr>().unwrap().port();
        let way = self.way;
        self.process.kill();
        Self::start(port, addresses, way)
    }

    /// The number that it says first.
    fn ask(&mut self, command: &str) -> usize {
        let answer = self.process.ask(command);
        answer.split(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("{command}: {answer}"))
    }

    fn read(&mut self, n: u32, blocks: u32, at: &str) -> usize {
        self.ask(&format!("read {n} {blocks} {}", peer_name(at)))
    }

    /// Everything that was taken is given back.
    fn is_whole(&mut self) {
        wait_until(LIMIT, "leases are left", || self.ask("leased") == 0);
        assert_eq!(self.process.ask("audit"), "sound");
    }
}

#[test]
fn neighbours_read_each_other_and_outlive_each_other() {
    read_each_other_and_outlive_each_other("memory");
}

#[test]
fn workers_read_each_other_and_outlive_each_other() {
    read_each_other_and_outlive_each_other("tcp");
}

#[test]
fn workers_with_nixl_read_each_other_and_outlive_each_other() {
    if has_nixl() {
        read_each_other_and_outlive_each_other("nixl");
    }
}

fn read_each_other_and_outlive_each_other(way: &'static str) {
    let [mut a, mut b] = [(); 2].map(|()| Worker::start(0, "", way));
    let list = format!("{},{}", a.address, b.address);
    let [mut c, mut d] = [(); 2].map(|()| Worker::start(0, &list, way));
    for n in 0..8 {
        a.ask(&format!("compute {n} 16"));
        b.ask(&format!("compute {} 16", n + 8));
    }
    for n in 0..8 {
        for reader in [&mut c, &mut d] {
            assert_eq!(reader.read(n, 16, &a.address), 16);
            assert_eq!(reader.read(n + 8, 16, &b.address), 16);
            assert_eq!(reader.ask(&format!("check {n} 16")), 16);
            assert_eq!(reader.read(n, 16, &b.address), 0, "it is here");
        }
    }
    // One holder and one reader are killed: the others go on.
    let gone = a.address.clone();
    a = a.again("");
    d = d.again(&list);
    assert_eq!(c.read(20, 4, &gone), 0, "its caches went with it");
    assert_eq!((d.read(8, 16, &b.address), d.ask("check 8 16")), (16, 16));
    // And then everything works again.
    a.ask("compute 20 4");
    for reader in [&mut c, &mut d] {
        assert_eq!((reader.read(20, 4, &gone), reader.ask("check 20 4")), (4, 4));
    }
    [&mut a, &mut b, &mut c, &mut d].into_iter().for_each(Worker::is_whole);
}

#[test]
fn a_frozen_holder_costs_a_miss_until_it_thaws() {
    holder_freezes_and_thaws("memory");
}

#[test]
fn a_frozen_holder_with_nixl_costs_misses_until_it_thaws() {
    if has_nixl() {
        holder_freezes_and_thaws("nixl");
    }
}

fn holder_freezes_and_thaws(way: &'static str) {
    let mut a = Worker::start(0, "", way);
    let mut c = Worker::start(0, &a.address, way);
    a.ask("compute 1 16");
    assert_eq!(c.read(1, 8, &a.address), 8);
    a.process.stop();
    assert_eq!(c.read(1, 16, &a.address), 0);
    a.process.signal("CONT");
    assert_eq!((c.read(1, 16, &a.address), c.ask("check 1 16")), (8, 16));
    a.is_whole();
    c.is_whole();
}

#[test]
fn a_frozen_reader_keeps_no_block_beyond_its_lease() {
    let mut a = Worker::start(0, "", "tcp");
    let mut c = Worker::start(0, &a.address, "tcp");
    a.ask("compute 1 64");
    c.process.tell(&format!("read 1 64 {}", peer_name(&a.address)));
    c.process.stop();
    wait_until(LIMIT, "its lease goes on", || a.ask("leased") == 0);
    assert_eq!(a.ask("evict 64"), 64);
    a.ask("compute 2 64");
    c.process.signal("CONT");
    let came: usize = c.process.hear().split(' ').next().unwrap().parse().unwrap();
    assert_eq!(c.ask("check 1 64"), came);
    assert_eq!((c.read(2, 64, &a.address), c.ask("check 2 64")), (64, 64));
    a.is_whole();
    c.is_whole();
}

#[test]
fn either_neighbour_is_killed_or_frozen_at_any_point() {
    either_side_is_killed_or_frozen_at_any_point("memory");
}

#[test]
fn either_worker_is_killed_or_frozen_at_any_point() {
    either_side_is_killed_or_frozen_at_any_point("tcp");
}

#[test]
fn either_with_nixl_is_killed_or_frozen_at_any_point() {
    if has_nixl() {
        // Where a read does not end, the next ones go by TCP.
        either_side_is_killed_or_frozen_at_any_point("auto");
    }
}

/// `KVBM_PEER_KILLS` says how often.
fn either_side_is_killed_or_frozen_at_any_point(way: &'static str) {
    let kills = number_of("KVBM_PEER_KILLS", 10);
    let mut random = fastrand::Rng::with_seed(7);
    let mut a = Worker::start(0, "", way);
    let mut c = Worker::start(0, &a.address, way);
    let mut incomplete = 0;
    for n in 0..kills {
        // Every other one is computed while it is read, half of these layer by layer.
        let follows = n % 2 == 1;
        let computes = if n % 4 == 1 { "layers" } else { "compute" };
        a.ask(&format!("compute {n} {}", if follows { 48 } else { 128 }));
        let read = if follows { "follow" } else { "read" };
        c.process.tell(&format!("{read} {n} 128 {}", peer_name(&a.address)));
        if follows {
            a.process.tell(&format!("{computes} {n} 128"));
        }
        let list = a.address.clone();
        std::thread::sleep(Duration::from_micros(random.u64(0..1_500)));
        let choice = random.u8(0..4);
        match choice {
            0 => {
                a = a.again("");
                c.process.hear();
            }
            1 => c = c.again(&list),
            2 => {
                a.process.stop();
                c.process.hear();
                a.process.signal("CONT");
            }
            _ => {
                c.process.stop();
                std::thread::sleep(Duration::from_millis(random.u64(0..2 * TTL_MS)));
                c.process.signal("CONT");
                c.process.hear();
            }
        }
        if follows && choice != 0 {
            a.process.hear();
        }
        incomplete += usize::from(c.ask(&format!("check {n} 128")) < 128);
        a.ask(&format!("compute {n} 128"));
        c.read(n, 128, &a.address);
        assert_eq!(c.ask(&format!("check {n} 128")), 128, "then everything works again");
    }
    tell_figures(&json!({"kill": {"way": way, "kills": kills, "reads_cut_short": incomplete}}));
    a.is_whole();
    c.is_whole();
}
