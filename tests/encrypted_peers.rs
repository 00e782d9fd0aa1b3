//! Workers that read each other while blocks lie encrypted in the host tier of one, the other, or
//! both.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvbm::{ErrorKind, Fingerprint, KvLayout, Manager, PeerLease, Pulled, RequestInfo, Tier};
use kvbm_tests::engine::{self, address, peer_name, serve_for};
use kvbm_tests::kept::{self, memory_file, options, shm};
use kvbm_tests::rig::{chain, info_of, metric, number_of, wait_until};
use kvbm_tiers::sealed::SEAL_BYTES;
use kvbm_tiers::testing::{fill_pattern, main_key};
use prometheus::Registry;
use tempfile::TempDir;

const BLOCK: usize = 8192;
const CHAIN: u32 = 8;
const LIMIT: Duration = Duration::from_secs(30);
/// Whose prompts are whose: those above one have no tenant.
pub(crate) const ONE: u32 = 0;
pub(crate) const OTHER: u32 = 1;
pub(crate) const UNOWNED: u32 = 2;
/// Main keys.
pub(crate) const FIRST: &str = "0123456789abcdef";
pub(crate) const SECOND: &str = "fedcba9876543210";

pub(crate) fn info(n: u32) -> RequestInfo {
    info_of((n <= OTHER).then_some(n))
}

/// A worker with a place in memory of its own.
struct Worker {
    manager: Manager,
    registry: Registry,
    place: PathBuf,
}

impl Worker {
    /// `is_sealed`: its host tier outlives it, and so lies encrypted if there is a key.
    fn open(home: &Path, name: &str, tier: (bool, Option<String>), at: &str) -> Self {
        Self::with(home, name, tier, at, |_| ())
    }

    fn with(
        home: &Path,
        name: &str,
        (is_sealed, key): (bool, Option<String>),
        at: &str,
        change: impl FnOnce(&mut Fingerprint),
    ) -> Self {
        let (place, registry) = (home.join(name), Registry::new());
        fs::create_dir_all(place.join("memory")).unwrap();
        let mut settings = kept::settings(&place, BLOCK);
        settings.host.persist = settings.host.persist.filter(|_| is_sealed);
        settings.encryption.key = key;
        engine::add_peers(&mut settings, at);
        settings.peers.lease_share = 1.0;
        settings.peers.lease_ttl_ms = 1_000;
        let mut options = options(&registry);
        change(options.fingerprint.as_mut().unwrap());
        let manager = engine::open_with(settings, options).unwrap();
        Self { manager, registry, place }
    }

    /// Computes what the tiers lack of a prompt; returns how much of it was a hit. Nothing of it is
    /// on the device before, or stays there.
    #[track_caller]
    fn serve(&self, n: u32) -> usize {
        self.manager.admin().evict(Tier::Device, usize::MAX);
        let served = serve_for(&self.manager, info(n), &chain(n, CHAIN));
        assert_eq!((served.wrong, served.saved), (0, CHAIN as usize), "{served:?}");
        assert!(self.manager.drain(LIMIT).is_complete());
        self.manager.admin().evict(Tier::Device, usize::MAX);
        served.hit
    }

    #[track_caller]
    fn assert_sound(&self) {
        engine::assert_sound(&self.manager);
    }

    /// Flips a bit in each slot.
    fn damage(&self) {
        let stride = (BLOCK + SEAL_BYTES).next_multiple_of(4096) as u64;
        let file =
            OpenOptions::new().read(true).write(true).open(memory_file(&self.place)).unwrap();
        for slot in 0..kept::HOST {
            let (mut byte, at) = ([0], slot * stride + 613 * slot % BLOCK as u64);
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 4], at).unwrap();
        }
    }
}

struct Pair {
    there: Worker,
    here: Worker,
    peer: String,
    home: TempDir,
}

impl Pair {
    fn open(there: (bool, Option<String>), here: (bool, Option<String>)) -> Option<Self> {
        let home = shm()?;
        let there = Worker::open(home.path(), "there", there, "");
        let at = address(&there.manager);
        let here = Worker::open(home.path(), "here", here, &at);
        Some(Self { there, here, peer: peer_name(&at), home })
    }

    /// Both encrypt, with one main key.
    fn alike() -> Option<Self> {
        let sealed = || (true, Some(main_key(1, FIRST)));
        Self::open(sealed(), sealed())
    }

    fn lease(&self, n: u32) -> kvbm::Result<PeerLease> {
        self.here.manager.peers().unwrap().lease(&self.peer, chain(n, CHAIN), info(n)).wait()
    }

    fn pull(&self, lease: PeerLease) -> Pulled {
        self.here.manager.peers().unwrap().pull(lease).wait().unwrap()
    }

    /// What was computed there is a hit here.
    #[track_caller]
    fn assert_reads(&self, n: u32) {
        let pulled = self.pull(self.lease(n).unwrap());
        assert_eq!((pulled.copied, pulled.fault.as_deref()), (CHAIN as usize, None));
        drop(pulled);
        assert_eq!(self.here.serve(n), CHAIN as usize);
    }

    #[track_caller]
    fn assert_sound(&self) {
        let peers = self.there.manager.peers().unwrap();
        wait_until(LIMIT, "leases are left", || peers.leased() == 0);
        [&self.there, &self.here].into_iter().for_each(Worker::assert_sound);
    }
}

/// Whether the file in memory of a worker shows a word of any block of a prompt.
fn shows(worker: &Worker, n: u32) -> bool {
    let memory = fs::read(memory_file(&worker.place)).unwrap();
    let words: std::collections::HashSet<_> = memory.windows(8).collect();
    chain(n, CHAIN).into_iter().any(|hash| {
        let mut block = vec![0; BLOCK];
        fill_pattern(number_of(hash), &mut block);
        block.as_chunks::<8>().0.iter().any(|word| *word != [0; 8] && words.contains(&word[..]))
    })
}

#[test]
fn what_lies_encrypted_is_a_hit_at_a_neighbour() {
    for (is_sealed_there, is_sealed_here) in [(true, true), (true, false), (false, true)] {
        let key = || Some(main_key(1, FIRST));
        let pair = Pair::open((is_sealed_there, key()), (is_sealed_here, key()));
        let Some(pair) = pair else { return };
        for n in [ONE, OTHER, UNOWNED] {
            assert_eq!(pair.there.serve(n), 0);
            pair.assert_reads(n);
            assert!(!is_sealed_here || !shows(&pair.here, n));
        }
        let way = [("way", "tcp")];
        assert_eq!(metric(&pair.here.registry, "kvbm_peer_blocks_total", &way), 24);
        assert_eq!(metric(&pair.here.registry, "kvbm_checksum_failures_total", &[]), 0);
        pair.assert_sound();
        // It is sealed with a key of its own: the next process opens it without the neighbour.
        let Pair { there, here, home, .. } = pair;
        drop((there, here));
        let again = Worker::open(home.path(), "here", (is_sealed_here, key()), "");
        let hit = if is_sealed_here { CHAIN as usize } else { 0 };
        for n in [ONE, OTHER, UNOWNED] {
            assert_eq!(again.serve(n), hit);
        }
    }
}

#[test]
fn a_worker_reads_with_the_key_and_is_told_without() {
    let Some(home) = shm() else { return };
    let there = Worker::open(home.path(), "there", (true, Some(main_key(1, FIRST))), "");
    there.serve(ONE);
    let at = address(&there.manager);
    let peer = peer_name(&at);
    let open = |key: Option<String>| Worker::open(home.path(), "here", (false, key), &at);
    for (key, said) in [
        (None, "this worker has no keys"),
        (Some(main_key(2, FIRST)), "main key 1 is not given here"),
        (Some(main_key(1, SECOND)), "main key 1 is another one here"),
    ] {
        let here = open(key);
        let leasing = here.manager.peers().unwrap().lease(&peer, chain(ONE, CHAIN), info(ONE));
        let error = leasing.wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains(said), "{error}");
        assert_eq!(here.serve(ONE), 0);
        here.assert_sound();
    }
    // An older main key opens as well.
    let both = format!("{},{}", main_key(2, SECOND), main_key(1, FIRST));
    let here = open(Some(both));
    let pair = Pair { there, here, peer, home };
    pair.assert_reads(ONE);
    pair.assert_sound();
}

#[test]
fn encrypted_blocks_are_not_converted() {
    let Some(home) = shm() else { return };
    let sealed = || (true, Some(main_key(1, FIRST)));
    let of = |order: &str, shape: [u64; 5]| {
        let layout = KvLayout {
            layers: 1,
            order: order.to_owned(),
            shape: shape.to_vec(),
            strides: (1..=5).map(|axis| shape[axis..].iter().product()).collect(),
        };
        move |fingerprint: &mut Fingerprint| {
            fingerprint.block_tokens = 16;
            fingerprint.layouts = vec![layout];
        }
    };
    let rows = || of("kv,token,head,channel,byte", [2, 16, 4, 32, 2]);
    let heads = || of("kv,head,token,channel,byte", [2, 4, 16, 32, 2]);
    for (there, here) in [(sealed(), sealed()), ((false, None), sealed())] {
        let there = Worker::with(home.path(), "there", there, "", rows());
        let (at, n) = (address(&there.manager), UNOWNED);
        let here = Worker::with(home.path(), "here", here, &at, heads());
        there.serve(n);
        let peers = here.manager.peers().unwrap();
        let leased = peers.lease(&peer_name(&at), chain(n, CHAIN), info(n)).wait();
        let why = match leased.and_then(|lease| peers.pull(lease).wait()) {
            Ok(pulled) => pulled.fault.unwrap_or_default(),
            Err(error) => error.to_string(),
        };
        assert!(why.contains("blocks of another form are not converted"), "{why}");
        assert_eq!(here.serve(n), 0, "what is computed here is kept");
        [&there, &here].into_iter().for_each(Worker::assert_sound);
        let places = [there, here].map(|worker| worker.place);
        places.iter().for_each(|place| fs::remove_dir_all(place).unwrap());
    }
}

#[test]
fn changed_memory_of_the_holder_is_a_miss_then_heals() {
    let Some(pair) = Pair::alike() else { return };
    pair.there.serve(ONE);
    let lease = pair.lease(ONE).unwrap();
    pair.there.damage();
    let pulled = pair.pull(lease);
    let said = "a block is not what its checksum says";
    assert_eq!((pulled.copied, pulled.fault.as_deref()), (0, Some(said)));
    drop(pulled);
    let wrong = [("end", "wrong")];
    assert_eq!(metric(&pair.here.registry, "kvbm_peer_leases_total", &wrong), 1);
    // The holder has looked, and dropped it.
    wait_until(LIMIT, "it is still there", || {
        pair.there.manager.matches(&chain(ONE, CHAIN)).longest() == 0
    });
    assert_eq!(pair.there.serve(ONE), 0);
    pair.assert_reads(ONE);
    pair.assert_sound();
}

#[test]
fn a_lease_that_is_over_gives_nothing() {
    let Some(pair) = Pair::alike() else { return };
    pair.there.serve(ONE);
    let lease = pair.lease(ONE).unwrap();
    let peers = pair.there.manager.peers().unwrap();
    wait_until(LIMIT, "the lease lasts", || peers.leased() == 0);
    pair.there.manager.admin().evict(Tier::Host, usize::MAX);
    pair.there.serve(UNOWNED);
    let pulled = pair.pull(lease);
    assert_eq!((pulled.copied, pulled.fault.as_deref()), (0, Some("its time is over")));
    drop(pulled);
    pair.there.serve(ONE);
    pair.assert_reads(ONE);
    pair.assert_sound();
}

#[test]
fn a_tenant_forgotten_at_either_side_is_forgotten_there() {
    let Some(pair) = Pair::alike() else { return };
    [ONE, OTHER].into_iter().for_each(|n| _ = pair.there.serve(n));
    pair.assert_reads(ONE);
    pair.here.manager.forget(ONE).unwrap();
    assert_eq!(pair.here.manager.matches(&chain(ONE, CHAIN)).longest(), 0);
    // It comes back, under a new key.
    pair.assert_reads(ONE);
    pair.here.manager.admin().evict(Tier::Host, usize::MAX);
    let lease = pair.lease(ONE).unwrap();
    assert_eq!(lease.only_there(), CHAIN as usize);
    pair.there.manager.forget(ONE).unwrap();
    let pulled = pair.pull(lease);
    let said = "a reset, a forgotten tenant or a damaged block ended it";
    assert_eq!((pulled.copied, pulled.fault.as_deref()), (0, Some(said)));
    drop(pulled);
    assert_eq!(pair.lease(ONE).unwrap().only_there(), 0);
    pair.assert_reads(OTHER);
    assert_eq!(pair.there.serve(ONE), 0);
    pair.assert_reads(ONE);
    pair.assert_sound();
}
