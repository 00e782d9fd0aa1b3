//! Plays an inference engine on a real manager: what it loads it checks byte by byte, the rest it
//! computes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvbm::{
    BlockHash, Chain, Error, ErrorKind, Fingerprint, Lease, Manager, Options, RequestInfo, Tier,
};
use kvbm_settings::{Capacity, EvictionKind, Settings};
use kvbm_tiers::testing::{fill_pattern, has_pattern};
use prometheus::Registry;

use crate::rig::number;

/// Media that hang keep their slots for longer.
const IN_VAIN: Duration = Duration::from_millis(200);

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

/// Names blocks of some model with these weights.
pub fn fingerprint(weights: &str) -> Fingerprint {
    let (model, weights) = ("m".into(), weights.into());
    Fingerprint { model, weights, block_tokens: 16, ..Fingerprint::default() }
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
    let options = Options { registry: registry.clone(), ..Options::default() };
    block_on(Manager::open(settings, options))
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
        let key = Chain::from(chain).key(position);
        assert!(
            allocation.fill(position, |block| fill_pattern(number(key), block)),
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
/// until they have ended, nobody else gets slots for them.
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
        let number = number(Chain::from(chain).key(position));
        let read = manager.read_device(lease, chain, position, |block| has_pattern(number, block));
        read.expect("a block that the lease holds on the device")
    };
    blocks - (0..blocks).filter(is_right).count()
}

/// Serves other chains until neither the device nor the host holds anything of `chain`.
///
/// # Panics
/// If they do not give it up.
pub fn push_down(manager: &Manager, chain: &[BlockHash]) {
    let upper = |held: kvbm::table::Match| held.blocks(Tier::Device) + held.blocks(Tier::Host);
    for filler in 0..200 {
        if upper(manager.matches(chain)) == 0 {
            return;
        }
        let other: Vec<_> = (0..4).map(|i| crate::rig::hash(1_000_000 + 10 * filler + i)).collect();
        serve(manager, &other);
        assert!(
            manager.drain(std::time::Duration::from_secs(20)).is_complete(),
            "nothing moves any more"
        );
    }
    panic!("the upper tiers do not evict: {:?}", manager.matches(chain));
}
