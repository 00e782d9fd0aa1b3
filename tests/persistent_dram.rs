//! A host tier that survives its process: killed where it is, found again and served from memory,
//! every byte checked.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, thread};

use kvbm::blocking::Blocks;
use kvbm::{BlockHash, Error, ErrorKind, Manager, Tier};
use kvbm_tests::engine;
use kvbm_tests::kept::{self, HOST, be_an_engine, leave, memory_file, options, shm};
use kvbm_tests::process::{Process, role, say};
use kvbm_tests::rig::{chain, metric, number_of, wait_until};
use kvbm_tiers::testing::{fill_pattern, has_pattern, order, run};
use kvbm_tiers::{
    DramOptions, DramRegion, Geometry, MemcpyBackend, Memory, PersistOptions, SlotId, SlotRef,
};
use prometheus::Registry;

const BLOCK: usize = 64 << 10;
const LIMIT: Duration = Duration::from_secs(30);
const CHAIN: u32 = 8;

fn held(manager: &Manager, n: u32, tier: Tier) -> usize {
    manager.matches(&chain(n, CHAIN)).blocks(tier)
}

/// Not a test: an engine that is to be killed, when another test starts it.
#[test]
fn process() {
    let Some((role, place)) = role() else { return };
    let manager = match kept::open(&place, BLOCK) {
        Ok((manager, _)) => manager,
        Err(error) => return say(&format!("{:?}: {error}", error.kind())),
    };
    be_an_engine(&role, &manager, |manager, n| engine::serve(manager, &chain(n, CHAIN)));
}

/// Flips a bit of a block where it lies in memory, while no process runs.
fn spoil(dir: &Path, chain: &[BlockHash], position: usize) {
    let file = OpenOptions::new().read(true).write(true).open(memory_file(dir)).unwrap();
    let mut block = vec![0; BLOCK];
    let offset = (0..HOST).map(|slot| slot * BLOCK as u64).find(|&offset| {
        file.read_exact_at(&mut block, offset).unwrap();
        has_pattern(number_of(chain[position]), &block)
    });
    let last = BLOCK - 1;
    let at = offset.expect("it lies there") + last as u64;
    file.write_all_at(&[block[last] ^ 0x80], at).unwrap();
}

#[test]
fn a_killed_process_leaves_its_memory_to_the_next() {
    let Some(home) = shm() else { return };
    leave(module_path!(), home.path(), [1, 2]);
    let (manager, registry) = kept::open(home.path(), BLOCK).unwrap();
    for n in [2, 1] {
        assert_eq!(held(&manager, n, Tier::Host), 8);
        let served = engine::serve(&manager, &chain(n, CHAIN));
        assert_eq!((served.hit, served.wrong, served.computed), (8, 0, 0));
    }
    assert_eq!(metric(&registry, "kvbm_checksum_failures_total", &[]), 0);
    assert_eq!(manager.admin().audit(), []);
    drop(manager);
    // And the next after that, which was closed in good order.
    leave(module_path!(), home.path(), [3]);
    let (manager, _) = kept::open(home.path(), BLOCK).unwrap();
    assert_eq!([1, 2, 3].map(|n| engine::serve(&manager, &chain(n, CHAIN)).hit), [8, 8, 8]);
}

#[test]
fn an_epoch_is_in_memory_before_a_reset_returns() {
    let Some(home) = shm() else { return };
    for epoch in 1..4 {
        let mut process = Process::start(module_path!(), "engine", home.path());
        assert_eq!(process.hear(), "open");
        assert_eq!(process.ask("1"), "8 0");
        assert_eq!(process.ask(&format!("reset {epoch}")), "reset");
        process.kill();
        let (manager, _) = kept::open(home.path(), BLOCK).unwrap();
        assert_eq!(
            (manager.admin().epoch(), manager.matches(&chain(1, CHAIN)).longest()),
            (epoch, 0)
        );
        let served = engine::serve(&manager, &chain(1, CHAIN));
        assert_eq!((served.hit, served.wrong, served.computed), (0, 0, 8));
        assert_eq!(manager.admin().audit(), []);
        // And what is of the new epoch is found.
        assert!(manager.close(LIMIT).is_complete());
        drop(manager);
        let (again, _) = kept::open(home.path(), BLOCK).unwrap();
        assert_eq!(
            (again.admin().epoch(), engine::serve(&again, &chain(1, CHAIN)).hit),
            (epoch, 8)
        );
    }
}

#[test]
fn a_bit_flipped_while_nobody_ran_is_only_a_miss() {
    let Some(home) = shm() else { return };
    leave(module_path!(), home.path(), [1, 2]);
    spoil(home.path(), &chain(1, CHAIN), 3);
    let (manager, registry) = kept::open(home.path(), BLOCK).unwrap();
    let served = engine::serve(&manager, &chain(1, CHAIN));
    assert_eq!((served.hit, served.wrong, served.computed), (3, 0, 5));
    assert_eq!(engine::serve(&manager, &chain(2, CHAIN)).hit, 8);
    assert!(metric(&registry, "kvbm_checksum_failures_total", &[("tier", "host")]) >= 1);
    manager.admin().evict(Tier::Device, usize::MAX);
    let served = engine::serve(&manager, &chain(1, CHAIN));
    assert_eq!((served.hit, served.wrong), (8, 0), "it was saved anew");
    assert_eq!(manager.admin().audit(), []);
}

#[test]
fn a_bit_flipped_in_idle_memory_is_found_without_reads() {
    let Some(home) = shm() else { return };
    let mut settings = kept::settings(home.path(), BLOCK);
    settings.transfer.scrub_mib_per_second = 1_000;
    let registry = Registry::new();
    let manager = engine::block_on(Manager::open(settings, options(&registry))).unwrap();
    assert_eq!(engine::serve(&manager, &chain(1, CHAIN)).saved, 8);
    let scrubbed = |outcome| {
        metric(&registry, "kvbm_scrubbed_blocks_total", &[("tier", "host"), ("outcome", outcome)])
    };
    wait_until(LIMIT, "blocks are looked at", || scrubbed("sound") > 30);
    assert_eq!(scrubbed("bad"), 0);
    spoil(home.path(), &chain(1, CHAIN), 3);
    wait_until(LIMIT, "the bad one is found", || scrubbed("bad") == 1);
    assert_eq!((held(&manager, 1, Tier::Host), manager.admin().audit()), (3, vec![]));
    // And then it heals.
    assert!(manager.close(LIMIT).is_complete());
    drop(manager);
    let (again, _) = kept::open(home.path(), BLOCK).unwrap();
    for _ in 0..2 {
        assert_eq!(engine::serve(&again, &chain(1, CHAIN)).wrong, 0);
    }
    assert_eq!(held(&again, 1, Tier::Host), 8);
}

#[test]
fn a_flipped_bit_is_found_on_the_way_to_disk() {
    let Some(dir) = shm() else { return };
    leave(module_path!(), dir.path(), [1]);
    spoil(dir.path(), &chain(1, CHAIN), 3);
    let disk = tempfile::tempdir().unwrap();
    symlink(disk.path(), dir.path().join("disk")).unwrap();
    let (manager, _) = kept::open(dir.path(), BLOCK).unwrap();
    assert!(
        manager.drain(LIMIT).is_complete(),
        "what is bad does not go down, and is not tried for ever"
    );
    assert_eq!((held(&manager, 1, Tier::Host), held(&manager, 1, Tier::Disk)), (3, 3));
    assert_eq!(engine::serve(&manager, &chain(1, CHAIN)).wrong, 0);
    assert!(manager.drain(LIMIT).is_complete());
    assert_eq!((held(&manager, 1, Tier::Host), held(&manager, 1, Tier::Disk)), (8, 8));
}

#[test]
fn engines_that_copy_themselves_get_no_changed_block() {
    let Some(home) = shm() else { return };
    leave(module_path!(), home.path(), [1]);
    spoil(home.path(), &chain(1, CHAIN), 5);
    let mut settings = kept::settings(home.path(), BLOCK);
    settings.device.capacity = None;
    let blocks = Blocks::open(settings, options(&Registry::new())).unwrap();
    let chain = chain(1, CHAIN);
    let get = || {
        blocks.get(&chain, |position, block| {
            assert!(has_pattern(number_of(chain[position]), block), "block {position} is wrong");
            Ok::<_, Error>(())
        })
    };
    assert_eq!(get().unwrap(), 5);
    let put = blocks.put(&chain, |position, slot| {
        fill_pattern(number_of(chain[position]), slot);
        Ok::<_, Error>(())
    });
    assert_eq!((put.unwrap(), get().unwrap()), (8, 8));
}

#[test]
fn what_lies_on_disk_too_is_served_from_memory() {
    let Some(home) = shm() else { return };
    let disk = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(disk.path(), home.path().join("disk")).unwrap();
    leave(module_path!(), home.path(), [1]);
    let (manager, registry) = kept::open(home.path(), BLOCK).unwrap();
    assert_eq!(held(&manager, 1, Tier::Disk), 8);
    assert_eq!(engine::serve(&manager, &chain(1, CHAIN)).hit, 8);
    let read = metric(&registry, "kvbm_transfer_blocks_total", &[("from", "disk")]);
    assert_eq!(read, 0, "the disk was read");
    // A block that is bad in memory comes from the disk.
    drop(manager);
    spoil(home.path(), &chain(1, CHAIN), 2);
    let (manager, _) = kept::open(home.path(), BLOCK).unwrap();
    let hits = (0..2).map(|_| engine::serve(&manager, &chain(1, CHAIN)));
    let hits: Vec<_> = hits.map(|served| (served.hit, served.wrong)).collect();
    assert_eq!(hits[1], (8, 0), "{hits:?}");
}

/// Killed at any moment, in the middle of copies too.
#[test]
fn whatever_a_kill_interrupts_no_wrong_byte_is_served() {
    let Some(home) = shm() else { return };
    let mut hits = 0;
    for round in 0..8 {
        let mut process = Process::start(module_path!(), "busy", home.path());
        assert_eq!(process.hear(), "open");
        thread::sleep(Duration::from_millis(20 + 37 * round));
        process.kill();
        let (manager, _) = kept::open(home.path(), BLOCK).unwrap();
        // What is there first: the others take its place.
        let there: Vec<_> = (0..16).filter(|&n| held(&manager, n, Tier::Host) > 0).collect();
        let all = there.into_iter().chain(0..16);
        let served: Vec<_> = all.map(|n| engine::serve(&manager, &chain(n, CHAIN))).collect();
        assert!(served.iter().all(|served| served.wrong == 0), "{served:?}");
        hits += served.iter().map(|served| served.hit).sum::<usize>();
        assert_eq!(manager.admin().audit(), []);
    }
    assert!(hits > 8 * CHAIN as usize, "next to nothing was left: {hits} blocks");
}

#[test]
fn one_process_is_attached_at_a_time() {
    let Some(home) = shm() else { return };
    let (manager, _) = kept::open(home.path(), BLOCK).unwrap();
    engine::serve(&manager, &chain(1, CHAIN));
    // It waits for as long as a killed one may take to go.
    let mut second = Process::start(module_path!(), "engine", home.path());
    let refused = second.hear();
    assert!(
        refused.contains("still in use") && refused.contains("DYN_KVBM_CPU_CACHE_PERSIST"),
        "{refused}"
    );
    assert_eq!(engine::serve(&manager, &chain(1, CHAIN)).hit, 8);
}

#[test]
fn a_file_others_could_have_written_is_refused_by_name() {
    let Some(home) = shm() else { return };
    leave(module_path!(), home.path(), [1]);
    let path = memory_file(home.path());
    let refused = |reason: &str| {
        let error = kept::open(home.path(), BLOCK).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        for part in [reason, path.to_str().unwrap(), "host.persist"] {
            assert!(error.to_string().contains(part), "{part}: {error}");
        }
    };
    fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
    refused("has mode 640");
    fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    let other = home.path().join("other");
    fs::hard_link(&path, &other).unwrap();
    refused("has 2 names");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&other, &path).unwrap();
    refused("is a symbolic link");
    fs::remove_file(&path).unwrap();
    fs::rename(&other, &path).unwrap();
    assert_eq!(
        held(&kept::open(home.path(), BLOCK).unwrap().0, 1, Tier::Host),
        8,
        "and then all is well"
    );
}

/// What the index says of slots that are not those is not believed.
#[test]
fn memory_that_was_removed_is_made_anew_and_is_cold() {
    let Some(home) = shm() else { return };
    leave(module_path!(), home.path(), [1]);
    fs::remove_file(memory_file(home.path())).unwrap();
    let (manager, registry) = kept::open(home.path(), BLOCK).unwrap();
    assert_eq!(held(&manager, 1, Tier::Host), 0);
    assert_eq!(engine::serve(&manager, &chain(1, CHAIN)).computed, 8);
    assert_eq!(metric(&registry, "kvbm_checksum_failures_total", &[]), 0);
}

/// By hand: how long an attach takes, and how fast memory in a file is. `KVBM_ATTACH_DIR` names a
/// directory in memory.
#[test]
#[ignore = "it measures"]
fn attach_times_and_copy_rates() {
    let dir =
        env::var_os("KVBM_ATTACH_DIR").map_or_else(|| PathBuf::from("/dev/shm"), PathBuf::from);
    let home = tempfile::Builder::new().prefix("kvbm-attach-").tempdir_in(dir).unwrap();
    let geometry = Geometry::new(1024, 1 << 20).unwrap();
    for huge_pages in [false, true] {
        let options = DramOptions { geometry, huge_pages, fault_threads: 2 };
        let namespace = format!("huge-{huge_pages}");
        let place = PersistOptions { dir: home.path().to_owned(), namespace, slots: 1024 };
        let timed = |what, open: &dyn Fn() -> DramRegion| {
            let started = Instant::now();
            let region = open();
            eprintln!("{what}: {:?}", started.elapsed());
            region
        };
        let attach = || DramRegion::persistent(options, &place).unwrap();
        drop(timed("made", &attach));
        drop(timed("attached", &attach));
        let kept = timed("attached", &attach);
        let own = timed("private", &|| DramRegion::host(options).unwrap());
        let rates = copy_rates([own, kept]);
        eprintln!(
            "huge pages asked for: {huge_pages}; save and load, MiB/s, private and kept: {rates:?}"
        );
        fs::remove_file(home.path().join(format!("kvbm-huge-{huge_pages}.memory"))).unwrap();
    }
}

/// The medians of 33 rounds, in turns that change: to the region from a device of 256 blocks, and
/// back.
fn copy_rates(regions: [DramRegion; 2]) -> Vec<[f64; 2]> {
    let geometry = Geometry::new(256, 1 << 20).unwrap();
    let device = DramOptions { geometry, huge_pages: true, fault_threads: 2 };
    let device = Arc::new(DramRegion::emulated_device(device).unwrap());
    let backends = regions.map(|region| {
        let memories = vec![Arc::clone(&device) as Arc<dyn Memory>, Arc::new(region)];
        MemcpyBackend::new(memories, 2).unwrap()
    });
    let slot = |tier, slot| SlotRef { tier, slot: SlotId(slot), generation: 0 };
    let mut rates = vec![[const { Vec::new() }; 2]; 2];
    for round in 0..33 {
        for turn in 0..2 {
            // The first in a round finds the caches full of something else.
            let region = (turn + round as usize) % 2;
            let (backend, rates) = (&backends[region], &mut rates[region]);
            for (way, rates) in rates.iter_mut().enumerate() {
                let ends = |n| {
                    let (device, host) =
                        (slot(Tier::Device, n), slot(Tier::Host, (n + 256 * round) % 1024));
                    if way == 0 { (device, host) } else { (host, device) }
                };
                let ops = (0..256).map(|n| order(n as usize, ends(n).0, ends(n).1)).collect();
                let started = Instant::now();
                assert!(run(backend, ops).iter().all(Result::is_ok));
                rates.push(256.0 / started.elapsed().as_secs_f64());
            }
        }
    }
    rates.into_iter().map(|ways| ways.map(median)).collect()
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// `cargo nextest run -p kvbm-tests --run-ignored only --no-capture persistent_dram::`
#[test]
#[ignore = "a measurement"]
fn recovery_of_100_000_blocks() {
    let Some(memory) = shm() else { return };
    for block_bytes in [4 << 10, 64 << 10] {
        let home = tempfile::tempdir_in(memory.path()).unwrap();
        let mut settings = engine::settings(block_bytes, 16, 100_000);
        settings.device.capacity = None;
        settings.host.persist = Some(home.path().join("memory"));
        let open = || Blocks::open(settings.clone(), options(&Registry::new())).unwrap();
        let blocks = open();
        let prompt = |n| chain(n, 500);
        for n in 0..200 {
            let put = blocks.put(&prompt(n), |_, slot| {
                slot[..8].fill(n as u8);
                Ok::<_, Error>(())
            });
            assert_eq!(put.unwrap(), 500);
        }
        assert!(blocks.manager().close(LIMIT).is_complete());
        drop(blocks);
        for _ in 0..3 {
            let started = Instant::now();
            let blocks = open();
            println!(
                "{block_bytes}: {:?} in all, {:?}",
                started.elapsed(),
                blocks.manager().admin().recovered()
            );
            let got = blocks.get(&prompt(7), |_, slot| {
                assert_eq!(slot[0], 7);
                Ok::<_, Error>(())
            });
            assert_eq!(got.unwrap(), 500);
        }
    }
}
