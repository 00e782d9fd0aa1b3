//! A host tier that survives its process, encrypted: killed, found again with its key, and nothing
//! without it.

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use kvbm::blocking::Blocks;
use kvbm::{EngineMemory, ErrorKind, Fence, Manager, SlotId, Tier};
use kvbm_settings::Capacity;
use kvbm_tests::engine::{self, Served, serve_for};
use kvbm_tests::kept::{self, be_an_engine, leave, memory_file, options, shm};
use kvbm_tests::process::{Process, role};
use kvbm_tests::rig::{chain, files, info_of, metric, number_of};
use kvbm_tests::slots::{load_slots, save_slots};
use kvbm_tiers::sealed::SEAL_BYTES;
use kvbm_tiers::testing::{Tensors, fill_pattern, has_pattern, main_key};
use prometheus::Registry;
use tempfile::TempDir;

const BLOCK: usize = 8192;
const CHAIN: u32 = 8;
const LIMIT: Duration = Duration::from_secs(30);
/// Tenants, by the number of their chains: those above one have no tenant.
const ONE: u32 = 0;
const OTHER: u32 = 1;

fn first_key() -> String {
    main_key(1, "0123456789abcdef")
}

/// What the next start is given.
fn give_keys(dir: &Path, keys: &str) {
    let path = dir.join("keys");
    // Not those that were there.
    drop(fs::remove_file(&path));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).unwrap();
    file.write_all(keys.as_bytes()).unwrap();
}

/// A home with a first key.
fn home() -> Option<TempDir> {
    let home = shm()?;
    give_keys(home.path(), &first_key());
    Some(home)
}

fn serve(manager: &Manager, n: u32) -> Served {
    serve_for(manager, info_of((n <= OTHER).then_some(n)), &chain(n, CHAIN))
}

#[track_caller]
fn assert_served(manager: &Manager, n: u32, hit: usize) {
    let served = serve(manager, n);
    assert_eq!((served.hit, served.wrong), (hit, 0), "{n}: {served:?}");
}

/// Not a test: an engine that is to be killed, when another test starts it.
#[test]
fn process() {
    let Some((role, place)) = role() else { return };
    be_an_engine(&role, &kept::open(&place, BLOCK).unwrap().0, serve);
}

/// How many of a chain's blocks some of whose words stand in a file in memory, wherever they begin.
fn blocks_found(dir: &Path, n: u32) -> usize {
    let memory = fs::read(memory_file(dir)).unwrap();
    let there: HashSet<_> = memory.windows(8).collect();
    let is_found = |&position: &usize| {
        let mut block = vec![0; BLOCK];
        fill_pattern(number_of(chain(n, CHAIN)[position]), &mut block);
        block
            .as_chunks::<8>()
            .0
            .iter()
            .any(|word| *word != [0; 8] && there.contains(word.as_slice()))
    };
    (0..CHAIN as usize).filter(is_found).count()
}

#[test]
fn a_killed_process_leaves_nothing_readable_and_a_warm_start() {
    for is_encrypted in [false, true] {
        let Some(home) = shm() else { return };
        if is_encrypted {
            give_keys(home.path(), &first_key());
        }
        leave(module_path!(), home.path(), [ONE, OTHER, 2]);
        // Without keys it is found, so we look in the right place.
        let found = if is_encrypted { 0 } else { CHAIN as usize };
        assert_eq!([ONE, OTHER, 2].map(|n| blocks_found(home.path(), n)), [found; 3]);
        let (manager, registry) = kept::open(home.path(), BLOCK).unwrap();
        for n in [2, OTHER, ONE] {
            assert_eq!(manager.matches(&chain(n, CHAIN)).blocks(Tier::Host), 8);
            assert_served(&manager, n, 8);
        }
        assert_eq!(metric(&registry, "kvbm_checksum_failures_total", &[]), 0);
        assert_eq!((manager.admin().failures(), manager.admin().audit()), (0, vec![]));
        let to_device =
            |route: &&kvbm::RouteReport| (route.from, route.to) == (Tier::Host, Tier::Device);
        let told = manager.admin().routes().iter().find(to_device).unwrap();
        assert_eq!(told.backend.ends_with(", encrypted with key 1"), is_encrypted, "{told:?}");
    }
}

#[test]
fn an_epoch_is_in_sealed_memory_before_a_reset_returns() {
    let Some(home) = home() else { return };
    let mut process = Process::start(module_path!(), "engine", home.path());
    assert_eq!(process.hear(), "open");
    assert_eq!(process.ask("2"), "8 0");
    assert_eq!(process.ask("reset 1"), "reset");
    process.kill();
    let (manager, _) = kept::open(home.path(), BLOCK).unwrap();
    assert_eq!((manager.admin().epoch(), manager.matches(&chain(2, CHAIN)).longest()), (1, 0));
    assert_served(&manager, 2, 0);
    assert!(manager.close(LIMIT).is_complete());
    drop(manager);
    // And what is of the new epoch is found.
    assert_served(&kept::open(home.path(), BLOCK).unwrap().0, 2, 8);
}

/// In the block, its checksum, its tag and all that is in the clear.
#[test]
fn a_flipped_bit_anywhere_is_a_miss_and_then_heals() {
    let Some(home) = home() else { return };
    leave(module_path!(), home.path(), [2]);
    let stride = (BLOCK + SEAL_BYTES).next_multiple_of(4096) as u64;
    let file = OpenOptions::new().read(true).write(true).open(memory_file(home.path())).unwrap();
    for slot in 0..48 {
        let (mut byte, at) = ([0], slot * stride + (slot * 613) % (BLOCK + SEAL_BYTES) as u64);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    }
    let (manager, registry) = kept::open(home.path(), BLOCK).unwrap();
    assert_served(&manager, 2, 0);
    assert!(metric(&registry, "kvbm_checksum_failures_total", &[("tier", "host")]) >= 1);
    assert!(manager.drain(LIMIT).is_complete());
    // Of the blocks behind the first bad one some were still on their way.
    serve(&manager, 2);
    assert!(manager.drain(LIMIT).is_complete());
    manager.admin().evict(Tier::Device, usize::MAX);
    assert_served(&manager, 2, 8);
    assert_eq!(manager.admin().audit(), []);
    drop(manager);
    assert_served(&kept::open(home.path(), BLOCK).unwrap().0, 2, 8);
}

#[test]
fn whatever_a_kill_interrupts_no_wrong_byte_is_served() {
    let Some(home) = home() else { return };
    let mut hits = 0;
    for round in 0..5 {
        let mut process = Process::start(module_path!(), "busy", home.path());
        assert_eq!(process.hear(), "open");
        thread::sleep(Duration::from_millis(20 + 57 * round));
        process.kill();
        let (manager, _) = kept::open(home.path(), BLOCK).unwrap();
        // What is there first: the others take its place.
        let there: Vec<_> =
            (0..16).filter(|&n| manager.matches(&chain(n, CHAIN)).blocks(Tier::Host) > 0).collect();
        let served: Vec<_> = there.into_iter().chain(0..16).map(|n| serve(&manager, n)).collect();
        assert!(served.iter().all(|served| served.wrong == 0), "{served:?}");
        hits += served.iter().map(|served| served.hit).sum::<usize>();
        assert_eq!(manager.admin().audit(), []);
    }
    assert!(hits > CHAIN as usize, "next to nothing was left: {hits} blocks");
}

#[test]
fn without_its_key_it_is_refused_with_an_older_found() {
    let Some(home) = home() else { return };
    let first = first_key();
    let second = main_key(2, "fedcba9876543210");
    leave(module_path!(), home.path(), [ONE, 2]);
    for wrong in [&second, &main_key(1, "0123456789abcdee")] {
        give_keys(home.path(), wrong);
        let error = kept::open(home.path(), BLOCK).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        for part in ["key", "emove"] {
            assert!(error.to_string().contains(part), "{part}: {error}");
        }
    }
    // And then it is found again: also where the key is only the older one.
    for keys in [first.clone(), format!("{second},{first}").replace(',', "\n")] {
        give_keys(home.path(), &keys);
        let (manager, _) = kept::open(home.path(), BLOCK).unwrap();
        [ONE, 2].into_iter().for_each(|n| assert_served(&manager, n, 8));
        assert_served(&manager, 3, if keys == first { 0 } else { 8 });
    }
}

#[test]
fn what_goes_down_and_comes_back_is_right() {
    let Some(home) = home() else { return };
    let disk = tempfile::tempdir().unwrap();
    symlink(disk.path(), home.path().join("disk")).unwrap();
    let (manager, _) = kept::open(home.path(), BLOCK).unwrap();
    for _ in 0..3 {
        for n in 0..12 {
            assert_eq!(serve(&manager, n).wrong, 0);
            assert!(manager.drain(LIMIT).is_complete());
        }
    }
    // Twice what the host tier holds.
    assert_eq!((0..12).map(|n| serve(&manager, n).hit).sum::<usize>(), 96);
    assert_eq!((manager.admin().failures(), manager.admin().audit()), (0, vec![]));
    assert!(manager.close(LIMIT).is_complete());
    drop(manager);
    assert_eq!((0..12).map(|n| blocks_found(home.path(), n)).sum::<usize>(), 0);
    let (again, _) = kept::open(home.path(), BLOCK).unwrap();
    assert_eq!((0..12).map(|n| serve(&again, n).hit).sum::<usize>(), 96);
}

#[test]
fn the_forgotten_stay_so_where_the_memory_is_put_back() {
    let Some(home) = home() else { return };
    leave(module_path!(), home.path(), [ONE, OTHER, 2]);
    let is_key = |path: &PathBuf| path.extension().is_some_and(|end| end == "keys");
    let kept: Vec<_> = files(home.path()).into_iter().filter(|path| !is_key(path)).collect();
    let before: Vec<_> = kept.into_iter().map(|path| (fs::read(&path).unwrap(), path)).collect();
    let (manager, _) = kept::open(home.path(), BLOCK).unwrap();
    manager.forget(ONE).unwrap();
    assert_eq!(manager.matches(&chain(ONE, CHAIN)).blocks(Tier::Host), 0);
    drop(manager);
    for put_back in [false, true] {
        if put_back {
            before.iter().for_each(|(bytes, path)| fs::write(path, bytes).unwrap());
        }
        let (again, _) = kept::open(home.path(), BLOCK).unwrap();
        assert_eq!(again.matches(&chain(ONE, CHAIN)).blocks(Tier::Host), 0);
        [OTHER, 2].into_iter().for_each(|n| assert_served(&again, n, 8));
        // It comes back, under a new key.
        assert_served(&again, ONE, 0);
        again.admin().evict(Tier::Device, usize::MAX);
        assert_served(&again, ONE, 8);
        again.forget(ONE).unwrap();
    }
}

/// What it would be shown in its slot is encrypted.
#[test]
fn an_engine_that_copies_itself_is_refused_with_a_remedy() {
    let Some(home) = home() else { return };
    let mut settings = kept::settings(home.path(), BLOCK);
    settings.device.capacity = None;
    let error = Blocks::open(settings.clone(), options(&Registry::new())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    for part in ["host.persist", "encryption.key"] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    // And without one of the two it works.
    settings.host.persist = None;
    Blocks::open(settings, options(&Registry::new())).unwrap();
}

#[test]
fn an_engine_with_memory_of_its_own_is_served() {
    let Some(home) = home() else { return };
    let mut settings = kept::settings(home.path(), BLOCK);
    settings.device.capacity = None;
    let (region, view) = Tensors::new(64, BLOCK, 16).shared();
    let engine = EngineMemory::new(region, 8).unwrap();
    let opened = Manager::open(
        settings,
        kvbm::Options { engine: Some(engine), ..options(&Registry::new()) },
    );
    let manager = engine::block_on(opened).unwrap();
    let (chain, slots) =
        (chain(2, CHAIN), |first: u32| (first..first + CHAIN).map(SlotId).collect::<Vec<_>>());
    let pattern = |position: usize| number_of(chain[position]);
    for (position, slot) in slots(0).into_iter().enumerate() {
        let mut block = vec![0; BLOCK];
        fill_pattern(pattern(position), &mut block);
        view.write(slot, &block);
    }
    let saved = save_slots(&manager, &chain, 0, &slots(0), Fence::Done);
    assert_eq!(saved.wait().unwrap().copied, 8);
    let loaded =
        load_slots(&manager, manager.lease(&chain), 0, &slots(32), &Fence::Done).wait().unwrap();
    assert_eq!((loaded.arrived, loaded.failed), (8, 0));
    let is_right = |(position, slot)| has_pattern(pattern(position), &view.read(slot));
    assert!(slots(32).into_iter().enumerate().all(is_right));
    assert_eq!((manager.admin().failures(), manager.admin().audit()), (0, vec![]));
    drop((loaded, manager));
    assert_eq!(blocks_found(home.path(), 2), 0);
}

/// By hand: what sealing costs, by loads and saves of 32 blocks of 1 MiB in turns.
#[test]
#[ignore = "measures"]
fn what_sealing_memory_costs() {
    const ROUNDS: u32 = 15;
    let Some(homes) = [shm(), home()].into_iter().collect::<Option<Vec<_>>>() else { return };
    let managers = homes.iter().map(|home| {
        let mut settings = kept::settings(home.path(), BLOCK);
        settings.block_bytes = Some(1 << 20);
        settings.device.capacity = Some(Capacity::Blocks(64));
        settings.host.capacity = Some(Capacity::Blocks(128));
        engine::block_on(Manager::open(settings, options(&Registry::new()))).unwrap()
    });
    let managers: Vec<_> = managers.collect();
    let mut rates = vec![Vec::new(); 4];
    for round in 0..ROUNDS {
        for (of, manager) in managers.iter().enumerate() {
            let chain = chain(round, 32);
            let mut allocation = manager.allocate(&chain, manager.lease(&chain)).unwrap();
            for position in allocation.blocks() {
                assert!(allocation.fill(position, |block| fill_pattern(position, block)));
            }
            let published = allocation.publish().unwrap().wait().unwrap();
            let rate = |began: Instant| 32.0 / 1024.0 / began.elapsed().as_secs_f64();
            let began = Instant::now();
            assert_eq!(manager.save(published.lease).wait().unwrap().blocks, 32);
            rates[2 * of].push(rate(began));
            manager.admin().evict(Tier::Device, usize::MAX);
            let began = Instant::now();
            assert_eq!(manager.load(manager.lease(&chain)).wait().unwrap().blocks, 32);
            rates[2 * of + 1].push(rate(began));
        }
    }
    for (rates, what) in rates.iter_mut().zip(["saves", "loads", "saves, sealed", "loads, sealed"])
    {
        rates.sort_by(f64::total_cmp);
        println!("{what}: {:.2} GiB/s", rates[rates.len() / 2]);
    }
}
