//! Workers with ranks that read each other while slices lie encrypted in the host tiers of one, the
//! other, or both. Each rank has keys of its own.

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use kvbm::{PeerLease, Tier};
use kvbm_settings::{PeerNixl, Settings};
use kvbm_tests::engine::{self, address, peer_name};
use kvbm_tests::fleet::{
    self, Fleet, HeadForm, LIMIT, Served, be_a_started_rank, drained, group_of, split_heads,
};
use kvbm_tests::kept::shm;
use kvbm_tests::rig::{chain, files, number_of, wait_until};
use kvbm_tiers::ranks::HeadShare;
use kvbm_tiers::sealed::SEAL_BYTES;
use kvbm_tiers::testing::main_key;
use tempfile::TempDir;

use crate::encrypted_peers::{FIRST, ONE, OTHER, SECOND, UNOWNED, info};

const TTL_MS: u64 = 2_000;
/// Ranks of most workers here.
const WORLD: u16 = 2;
const CHAIN: u32 = 6;

/// How a worker keeps blocks: encrypted in memory that outlives it, or not; and its main keys.
type Keeping = (bool, Option<String>);

fn sealed() -> Keeping {
    (true, Some(main_key(1, FIRST)))
}

fn in_the_clear() -> Keeping {
    (false, Some(main_key(1, FIRST)))
}

fn slice_bytes(dir: &Path) -> u64 {
    fleet::BLOCK / u64::from(group_of(dir).world)
}

/// What lies in the directory says how it keeps blocks.
fn of_peer(dir: &Path) -> Settings {
    let mut settings = fleet::settings(dir);
    settings.block_bytes = Some(slice_bytes(dir));
    settings.disk.capacity = None;
    settings.host.persist = dir.join("sealed").exists().then(|| memory(dir));
    let keys = dir.join("keys");
    settings.encryption.key_file = keys.exists().then(|| keys.display().to_string());
    engine::add_peers(&mut settings, "");
    settings.peers.secret = Some("the secret of these tests".to_owned());
    settings.peers.nixl = PeerNixl::Off;
    settings.peers.lease_ttl_ms = TTL_MS;
    settings.peers.lease_share = 1.0;
    settings
}

/// Where memory that outlives its process is.
fn memory(dir: &Path) -> PathBuf {
    dir.join("slots")
}

/// Not a test: the process of a rank, when another test starts it.
#[test]
fn process() {
    be_a_started_rank(of_peer);
}

/// A worker with a directory of its own.
struct Worker {
    fleet: Fleet,
    dir: PathBuf,
}

impl Worker {
    fn open(home: &Path, name: &str, keeping: &Keeping, reads_at: &str) -> Self {
        Self::of(home, &format!("{name}-{WORLD}"), keeping, reads_at)
    }

    fn of(home: &Path, name: &str, (is_sealed, keys): &Keeping, reads_at: &str) -> Self {
        let dir = home.join(name);
        fs::create_dir_all(&dir).unwrap();
        if *is_sealed {
            fs::write(dir.join("sealed"), "").unwrap();
        }
        if let Some(keys) = keys {
            let mut file = OpenOptions::new();
            let file = file.write(true).create(true).truncate(true).mode(0o600);
            let file = file.open(dir.join("keys")).unwrap();
            file.write_all_at(keys.replace(',', "\n").as_bytes(), 0).unwrap();
        }
        let mut settings = of_peer(&dir);
        settings.peers.addresses = Some(reads_at.to_owned()).filter(|list| !list.is_empty());
        let group = group_of(&dir);
        let fingerprint = Some(split_heads(group.world));
        let fleet = Fleet::open(module_path!(), &dir, settings, group, fingerprint);
        Self { fleet, dir }
    }

    /// Computes what the host tier lacks of a prompt; returns how much of it was a hit. Nothing of
    /// it is on the device before.
    #[track_caller]
    fn serve(&mut self, n: u32) -> usize {
        let served = self.try_to_serve(n);
        assert_eq!((served.wrong, served.saved), (0, CHAIN as usize), "{served:?}");
        served.hit
    }

    fn try_to_serve(&mut self, n: u32) -> Served {
        self.fleet.empty(Tier::Device);
        let served = self.fleet.serve_for(info(n), &chain(n, CHAIN));
        drained(&self.fleet.manager);
        served
    }

    fn holds(&self, n: u32) -> usize {
        self.fleet.manager.matches(&chain(n, CHAIN)).longest()
    }

    /// The files in memory that hold its ranks' slices, by rank.
    fn memory_files(&self) -> Vec<PathBuf> {
        let is_memory = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "memory");
        let of_rank = |rank: u16| {
            let mut files = files(&memory(&self.dir)).into_iter();
            files.find(|path| fleet::is_of_rank(path, rank) && is_memory(path))
        };
        (0..group_of(&self.dir).world).map(|rank| of_rank(rank).expect("a region")).collect()
    }

    /// The ranks that have a key of a tenant.
    fn keepers(&self, tenant: u32) -> Vec<u16> {
        fleet::keepers(&memory(&self.dir), group_of(&self.dir).world, tenant)
    }

    /// Flips a bit in each of a rank's slots.
    fn damage(&self, rank: usize) {
        let bytes = slice_bytes(&self.dir);
        let stride = (bytes + SEAL_BYTES as u64).next_multiple_of(4096);
        let path = &self.memory_files()[rank];
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        for slot in 0..fs::metadata(path).unwrap().len() / stride {
            let (mut byte, at) = ([0], slot * stride + 613 * slot % bytes);
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 4], at).unwrap();
        }
    }

    /// Whether its files in memory show a word of any slice of a prompt.
    fn shows(&self, n: u32) -> bool {
        let world = group_of(&self.dir).world;
        self.memory_files().iter().zip(0..).any(|(file, rank)| {
            let share = HeadShare::new(rank, world).unwrap();
            let slices = chain(n, CHAIN).into_iter();
            let slices = slices.flat_map(|hash| HeadForm::NHD.slice(share, number_of(hash)));
            let slices: Vec<_> = slices.collect();
            let words: HashSet<_> = slices.as_chunks::<8>().0.iter().collect();
            // Slices begin where pages do.
            let memory = fs::read(file).unwrap();
            memory.as_chunks::<8>().0.iter().any(|word| *word != [0; 8] && words.contains(word))
        })
    }
}

struct Pair {
    there: Worker,
    here: Worker,
    peer: String,
    home: TempDir,
}

impl Pair {
    fn open(there: &Keeping, here: &Keeping) -> Option<Self> {
        Self::of([there, here], [WORLD, WORLD])
    }

    /// A holder and a reader, by their numbers of ranks.
    fn of([there, here]: [&Keeping; 2], [holder, reader]: [u16; 2]) -> Option<Self> {
        let home = shm()?;
        let there = Worker::of(home.path(), &format!("holder-{holder}"), there, "");
        let at = address(&there.fleet.manager);
        let here = Worker::of(home.path(), &format!("reader-{reader}"), here, &at);
        Some(Self { there, here, peer: peer_name(&at), home })
    }

    fn lease(&self, n: u32) -> kvbm::Result<PeerLease> {
        let peers = self.here.fleet.manager.peers().unwrap();
        peers.lease(&self.peer, chain(n, CHAIN), info(n)).wait()
    }

    fn pull(&self, lease: PeerLease) -> (usize, Option<String>) {
        match self.here.fleet.manager.peers().unwrap().pull(lease).wait() {
            Ok(pulled) => (pulled.copied, pulled.fault),
            Err(error) => (0, Some(error.to_string())),
        }
    }

    /// How many blocks of a chain come, and why not more.
    fn read(&self, n: u32) -> (usize, Option<String>) {
        self.lease(n).map_or_else(|error| (0, Some(error.to_string())), |lease| self.pull(lease))
    }

    /// What was computed there is a hit here.
    #[track_caller]
    fn assert_reads(&mut self, n: u32) {
        assert_eq!(self.read(n), (CHAIN as usize, None));
        assert_eq!(self.here.serve(n), CHAIN as usize);
    }

    /// Computes a chain there, reads it, and uses it here.
    #[track_caller]
    fn assert_heals(&mut self, n: u32) {
        let is_saved = |served: &Served| served.saved == CHAIN as usize;
        wait_until(LIMIT, "it does not save again", || is_saved(&self.there.try_to_serve(n)));
        wait_until(LIMIT, "it does not come again", || {
            self.read(n);
            self.here.holds(n) == CHAIN as usize
        });
        assert_eq!(self.here.serve(n), CHAIN as usize);
        self.assert_sound();
    }

    #[track_caller]
    fn await_end_of_leases(&self) {
        let peers = self.there.fleet.manager.peers().unwrap();
        wait_until(LIMIT, "leases are left", || peers.leased() == 0);
    }

    #[track_caller]
    fn assert_sound(&self) {
        self.await_end_of_leases();
        [&self.there, &self.here].into_iter().for_each(|worker| worker.fleet.assert_sound());
    }

    fn end(self) -> TempDir {
        self.here.fleet.end();
        self.there.fleet.end();
        self.home
    }
}

#[test]
fn encrypted_slices_are_a_hit_at_a_neighbour() {
    let pairs = [
        (sealed(), sealed()),
        (sealed(), in_the_clear()),
        (in_the_clear(), sealed()),
        (in_the_clear(), in_the_clear()),
    ];
    for (there, here) in pairs {
        let Some(mut pair) = Pair::open(&there, &here) else { return };
        for n in [ONE, OTHER, UNOWNED] {
            assert_eq!(pair.there.serve(n), 0);
            pair.assert_reads(n);
            assert!(!here.0 || !pair.here.shows(n));
        }
        pair.assert_sound();
        // They are sealed with keys of its ranks: the next ones open them without the neighbour.
        let home = pair.end();
        let mut again = Worker::open(home.path(), "reader", &here, "");
        let hit = if here.0 { CHAIN as usize } else { 0 };
        for n in [ONE, OTHER, UNOWNED] {
            assert_eq!(again.serve(n), hit);
        }
        again.fleet.end();
    }
}

#[test]
fn ranks_read_with_the_key_and_say_which_is_missing() {
    let Some(home) = shm() else { return };
    let mut there = Worker::open(home.path(), "holder", &sealed(), "");
    there.serve(ONE);
    let at = address(&there.fleet.manager);
    let (mut pair, wrong) = {
        let both = format!("{},{}", main_key(2, SECOND), main_key(1, FIRST));
        let here = Worker::open(home.path(), "both", &(false, Some(both)), &at);
        let wrong = [
            ("none", None, "this worker has no keys"),
            ("number", Some(main_key(2, FIRST)), "main key 1 is not given here"),
            ("other", Some(main_key(1, SECOND)), "main key 1 is another one here"),
        ];
        (Pair { there, here, peer: peer_name(&at), home }, wrong)
    };
    for (name, key, said) in wrong {
        let here = Worker::open(pair.home.path(), name, &(false, key), &at);
        let with_key = std::mem::replace(&mut pair.here, here);
        let (copied, why) = pair.read(ONE);
        assert_eq!(copied, 0);
        assert!(why.as_ref().is_some_and(|why| why.contains(said)), "{why:?}");
        assert_eq!(pair.here.serve(ONE), 0);
        pair.assert_sound();
        std::mem::replace(&mut pair.here, with_key).fleet.end();
    }
    // An older main key opens as well.
    pair.assert_reads(ONE);
    pair.assert_sound();
    pair.end();
}

#[test]
fn a_holders_rank_with_changed_memory_misses_then_heals() {
    let Some(mut pair) = Pair::open(&sealed(), &sealed()) else { return };
    pair.there.serve(ONE);
    let lease = pair.lease(ONE).unwrap();
    pair.there.damage(1);
    let (copied, why) = pair.pull(lease);
    assert_eq!(copied, 0);
    assert!(why.as_ref().is_some_and(|why| why.contains("rank 1")), "{why:?}");
    // A lease keeps what is on the device, too.
    pair.await_end_of_leases();
    assert_eq!(pair.there.serve(ONE), 0);
    pair.assert_heals(ONE);
    pair.end();
}

#[test]
fn a_tenant_forgotten_at_either_side_is_forgotten_in_ranks() {
    let Some(mut pair) = Pair::open(&sealed(), &sealed()) else { return };
    [ONE, OTHER].into_iter().for_each(|n| _ = pair.there.serve(n));
    assert_eq!(pair.read(ONE), (CHAIN as usize, None));
    assert_eq!((pair.here.keepers(ONE), pair.here.keepers(OTHER)), (vec![0, 1], vec![]));
    pair.here.fleet.manager.forget(ONE).unwrap();
    assert_eq!((pair.here.holds(ONE), pair.here.keepers(ONE)), (0, vec![]));
    // It comes back, under new keys.
    pair.assert_reads(ONE);
    pair.here.fleet.manager.forget(ONE).unwrap();
    let lease = pair.lease(ONE).unwrap();
    assert_eq!(lease.only_there(), CHAIN as usize);
    // No rank gives what it has no key of.
    pair.there.fleet.manager.forget(ONE).unwrap();
    let (copied, why) = pair.pull(lease);
    assert_eq!((copied, why.is_some()), (0, true), "{why:?}");
    assert_eq!(pair.lease(ONE).unwrap().only_there(), 0);
    pair.assert_reads(OTHER);
    assert_eq!(pair.there.serve(ONE), 0);
    pair.assert_reads(ONE);
    pair.assert_sound();
    pair.end();
}

#[test]
fn killed_ranks_of_sealed_workers_cost_misses_then_it_heals() {
    let Some(mut pair) = Pair::open(&sealed(), &sealed()) else { return };
    for rank in 0..WORLD {
        // The holder's, between the lease and the pull.
        let n = 10 * (u32::from(rank) + 1);
        pair.there.serve(n);
        let lease = pair.lease(n).unwrap();
        pair.there.fleet.kill(rank.into());
        let (copied, why) = pair.pull(lease);
        assert_eq!((copied, why.is_some()), (0, true));
        pair.there.fleet.assert_forgets(&chain(n, CHAIN), LIMIT);
        pair.there.fleet.restart(rank);
        pair.assert_heals(n);
        // The reader's.
        pair.there.serve(n + 1);
        let lease = pair.lease(n + 1).unwrap();
        pair.here.fleet.kill(rank.into());
        assert_eq!(pair.pull(lease).0, 0);
        pair.here.fleet.restart(rank);
        pair.assert_heals(n + 1);
    }
    pair.end();
}

#[test]
fn heads_of_encrypted_slices_are_not_split() {
    for (there, here) in [(sealed(), in_the_clear()), (in_the_clear(), sealed())] {
        for worlds in [[2, 1], [1, 2]] {
            let Some(mut pair) = Pair::of([&there, &here], worlds) else { return };
            pair.there.serve(UNOWNED);
            let (copied, why) = pair.read(UNOWNED);
            assert_eq!(copied, 0);
            let said = "not converted where they lie encrypted";
            assert!(why.as_ref().is_some_and(|why| why.contains(said)), "{why:?}");
            assert_eq!(pair.here.serve(UNOWNED), 0);
            assert_eq!(pair.here.serve(UNOWNED), CHAIN as usize, "what is computed here is kept");
            pair.assert_sound();
            pair.end();
        }
    }
}
