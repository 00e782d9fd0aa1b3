//! Plays an inference engine on a real manager: what it loads it checks byte by byte, the rest it
//! computes.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvbm::{
    BlockHash, Error, ErrorKind, Fingerprint, Lease, Manager, Options, RecoveryReport, RequestInfo,
    Tier,
};
use kvbm_settings::{Capacity, EvictionKind, Settings};
use kvbm_tiers::testing::{fill_pattern, has_pattern};
use prometheus::Registry;

use crate::rig::{chain, number_of};

/// Media that hang keep their slots for longer.
const IN_VAIN: Duration = Duration::from_millis(200);
/// Nothing may take longer, on a busy machine.
const LIMIT: Duration = Duration::from_mins(1);

/// Settings of a device and a host tier, sized in blocks.
pub fn settings(block_bytes: u64, device: u64, host: u64) -> Settings {
    let mut settings = without_device(block_bytes, host);
    settings.device.capacity = Some(Capacity::Blocks(device));
    settings
}

/// Settings of a host tier of `host` blocks, where the device is the engine's own or there is none.
pub fn without_device(block_bytes: u64, host: u64) -> Settings {
    // Chains that are not used must leave, whatever a policy that learns makes of a handful of
    // requests.
    let eviction = EvictionKind::Lru;
    let mut settings = Settings { block_bytes: Some(block_bytes), eviction, ..Settings::default() };
    settings.host.capacity = Some(Capacity::Blocks(host));
    settings.host.huge_pages = false;
    // Nothing is read but what a test asks for.
    settings.transfer.scrub_mib_per_second = 0;
    settings
}

/// Adds a disk tier of `blocks` blocks in a directory.
pub fn add_disk(settings: &mut Settings, blocks: u64, dir: impl Into<PathBuf>) {
    settings.disk.capacity = Some(Capacity::Blocks(blocks));
    settings.disk.dirs = vec![dir.into()];
}

/// The same, of a disk tier that is found again, and to which blocks go at once.
pub fn keep_on_disk(settings: &mut Settings, blocks: u64, dir: impl Into<PathBuf>) {
    add_disk(settings, blocks, dir);
    settings.disk.keep = true;
    settings.flush.interval_ms = 1;
}

/// Adds a bucket in a directory, which is found again, and to which blocks go at once.
pub fn keep_in_bucket(settings: &mut Settings, segment_bytes: u64, dir: &Path) {
    settings.object.url = Some(format!("file://{}", dir.display()));
    settings.object.segment_bytes = segment_bytes;
    settings.object.keep = true;
    settings.flush.interval_ms = 1;
}

/// Lets others read here, and reads at `addresses`.
pub fn add_peers(settings: &mut Settings, addresses: &str) {
    settings.peers.enabled = true;
    settings.peers.port = 0;
    settings.peers.addresses = Some(addresses.to_owned()).filter(|list| !list.is_empty());
}

/// Where others read at a manager.
///
/// # Panics
/// If they cannot.
pub fn address(manager: &Manager) -> String {
    manager.peers().expect("it has peers").address().to_string()
}

/// What a worker at an address is called.
pub fn peer_name(address: &str) -> String {
    address.replace(':', "/")
}

/// Names blocks of some model with these weights.
pub fn fingerprint(weights: &str) -> Fingerprint {
    let (model, weights) = ("m".into(), weights.into());
    Fingerprint { model, weights, block_tokens: 16, ..Fingerprint::default() }
}

/// The same model in another epoch.
pub fn in_epoch(weights: &str, epoch: u64) -> Fingerprint {
    Fingerprint { epoch, ..fingerprint(weights) }
}

/// Options for a model.
pub fn model(fingerprint: Fingerprint) -> Options {
    Options { fingerprint: Some(fingerprint), ..Options::default() }
}

/// Waits for what opens a manager, on a runtime of its own.
///
/// # Panics
/// If there is no runtime to be had.
pub fn block_on<T>(opening: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(opening)
}

/// Opens a manager that counts in `registry`.
///
/// # Errors
/// Those of [`Manager::open`].
///
/// # Panics
/// If there is no runtime to be had.
pub fn open(settings: Settings, registry: &Registry) -> Result<Manager, Error> {
    open_with(settings, Options { registry: registry.clone(), ..Options::default() })
}

/// Opens a manager.
///
/// # Errors
/// Those of [`Manager::open`].
///
/// # Panics
/// If there is no runtime to be had.
pub fn open_with(settings: Settings, options: Options) -> Result<Manager, Error> {
    block_on(Manager::open(settings, options))
}

/// Waits until all that is to go down has gone.
///
/// # Panics
/// If it does not.
#[track_caller]
pub fn drain(manager: &Manager) {
    assert!(manager.drain(LIMIT).is_complete());
}

/// Ends a manager in good order.
///
/// # Panics
/// If it does not end so.
#[track_caller]
pub fn stop(manager: Manager) {
    drain(&manager);
    assert!(manager.close(LIMIT).is_complete());
    drop(manager);
}

/// Checks that no slot of the host tier is lost or under way, and that the table is sound.
///
/// # Panics
/// If one is, or it is not.
#[track_caller]
pub fn assert_sound(manager: &Manager) {
    let counts = manager.admin().counts(Tier::Host);
    assert_eq!((manager.admin().audit(), counts.filling, counts.lost), (vec![], 0, 0));
}

/// What a start found in the one tier that is kept.
///
/// # Panics
/// If none is, or several are.
#[track_caller]
pub fn recovered(manager: &Manager) -> RecoveryReport {
    let [report] = manager.admin().recovered() else {
        panic!("one tier is kept: {:?}", manager.admin().recovered())
    };
    *report
}

/// What became of a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Leading blocks that were loaded or were there.
    pub hit: usize,
    /// Blocks whose load failed.
    pub failed: usize,
    /// Blocks whose bytes were not theirs. Must be 0.
    pub wrong: usize,
    /// Blocks that were computed.
    pub computed: usize,
    /// Leading blocks that the tier below the device holds at the end.
    pub saved: usize,
}

/// Serves one request: load what is held, verify it, compute the rest, save.
///
/// # Panics
/// If the manager closes, or fails in a way that it must not.
pub fn serve(manager: &Manager, chain: &[BlockHash]) -> Served {
    serve_for(manager, RequestInfo::default(), chain)
}

/// [`serve`], of a request that says something about itself.
///
/// # Panics
/// As [`serve`].
pub fn serve_for(manager: &Manager, info: RequestInfo, chain: &[BlockHash]) -> Served {
    let transferred =
        manager.load(manager.lease_for(info, chain)).wait().expect("the manager is open");
    let mut served =
        Served { hit: transferred.blocks, failed: transferred.failed, ..Served::default() };
    served.wrong = wrong_blocks(manager, &transferred.lease, chain, transferred.blocks);
    if served.failed > 0 {
        wait_for_copies_in_vain(manager);
    }
    let mut allocation = match manager.allocate(chain, transferred.lease) {
        Ok(allocation) => allocation,
        Err(error) if error.kind() == ErrorKind::Full => return served,
        Err(error) => panic!("{error}"),
    };
    for position in allocation.blocks() {
        let number = number_of(chain[position]);
        assert!(
            allocation.fill(position, |block| fill_pattern(number, block)),
            "a block of the allocation"
        );
        served.computed += 1;
    }
    let ticket = allocation.publish().expect("published once");
    let published = ticket.wait().expect("the manager is open");
    served.saved = manager.save(published.lease).wait().expect("the manager is open").blocks;
    served
}

/// A load ends with its first bad block, and others of it may still be on their way to their slots:
/// until they have ended, no other copy gets slots for them.
fn wait_for_copies_in_vain(manager: &Manager) {
    let began = Instant::now();
    while manager.admin().counts(Tier::Device).filling > 0 && began.elapsed() < IN_VAIN {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How many of the leading blocks that a lease holds on the device have bytes that are not theirs.
///
/// # Panics
/// If a block is not there at all.
pub fn wrong_blocks(manager: &Manager, lease: &Lease, chain: &[BlockHash], blocks: usize) -> usize {
    let is_right = |&position: &usize| {
        let number = number_of(chain[position]);
        let read = manager.read_device(lease, chain, position, |block| has_pattern(number, block));
        read.expect("a block that the lease holds on the device")
    };
    blocks - (0..blocks).filter(is_right).count()
}

/// Serves other chains until neither the device nor the host holds anything of `pushed`.
///
/// # Panics
/// If they do not give it up.
pub fn push_down(manager: &Manager, pushed: &[BlockHash]) {
    let upper = |held: kvbm::table::Match| held.blocks(Tier::Device) + held.blocks(Tier::Host);
    for filler in 0..200 {
        if upper(manager.matches(pushed)) == 0 {
            return;
        }
        serve(manager, &chain(1_000 + filler, 4));
        drain(manager);
    }
    panic!("the upper tiers do not evict: {:?}", manager.matches(pushed));
}
