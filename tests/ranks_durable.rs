//! What a leader and its ranks find that are started after others: what all of them have, and
//! nothing wrong.

use std::fs::{self, OpenOptions};
use std::io::stdin;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use kvbm::{Fingerprint, RankGroup, RankOptions, Ranks, RecoveryReport, Tier};
use kvbm_settings::{Capacity, Settings};
use kvbm_tests::engine::{self, recovered};
use kvbm_tests::fleet::{self, BLOCK, Fleet, LIMIT, Served, WORLD, be_a_rank, drained};
use kvbm_tests::kept::shm;
use kvbm_tests::process::{Process, role, say};
use kvbm_tests::rig::{chain, metric, wait_until};
use prometheus::Registry;
use tempfile::TempDir;

/// Blocks of the disk tier: four chains.
const DISK: u64 = 24;

fn of_fleet(home: &Path) -> Settings {
    let mut settings = fleet::settings(home);
    settings.disk.capacity = Some(Capacity::Blocks(DISK));
    // Where a test wants memory that outlives the processes, it says where.
    if let Ok(memory) = fs::read_link(home.join("memory")) {
        settings.host.persist = Some(memory);
        settings.disk.capacity = None;
    }
    settings
}

#[expect(clippy::unnecessary_wraps, reason = "as options have it")]
fn fingerprint(home: &Path) -> Option<Fingerprint> {
    let weights = fs::read_to_string(home.join("weights")).unwrap_or("one".to_owned());
    let ranks = Ranks { tensor_world: 2, pipeline_world: 2, ..Ranks::default() };
    Some(Fingerprint { ranks, ..engine::fingerprint(&weights) })
}

/// Two stages of two.
fn fingerprint_of(home: &Path, rank: u16) -> Option<Fingerprint> {
    let rank = u32::from(rank);
    let whole = fingerprint(home)?;
    let ranks = Ranks { tensor_rank: rank % 2, pipeline_rank: rank / 2, ..whole.ranks };
    Some(Fingerprint { ranks, ..whole })
}

fn group(home: &Path) -> RankGroup {
    let world =
        fs::read_to_string(home.join("world")).map_or(WORLD, |world| world.parse().unwrap());
    RankGroup { world, ..fleet::group(home) }
}

fn open(home: &Path) -> Fleet {
    Fleet::open(module_path!(), home, of_fleet(home), group(home), fingerprint(home))
}

/// Not a test: the process of a rank, or of a leader that starts its ranks, when another test
/// starts it.
#[test]
fn process() {
    let Some((role, home)) = role() else { return };
    match role.parse() {
        Ok(rank) => {
            let options = RankOptions {
                fingerprint: fingerprint_of(&home, rank),
                ..RankOptions::new(group(&home), rank)
            };
            be_a_rank(&of_fleet(&home), options);
        }
        Err(_) => be_a_leader(&home),
    }
}

/// Says who its ranks are, and serves the chains that it is told to.
fn be_a_leader(home: &Path) {
    let mut fleet = open(home);
    let ranks: Vec<_> = fleet.ranks.iter().flatten().map(|rank| rank.id().to_string()).collect();
    say(&ranks.join(" "));
    for line in stdin().lines() {
        let line = line.unwrap();
        let answer = match line.split_once(' ') {
            Some(("serve", n)) => {
                let n = n.parse().unwrap();
                let served = fleet.serve(&chain(n, 6));
                drained(&fleet.manager);
                format!("{served:?}")
            }
            Some(("reset", epoch)) => {
                format!("{:?}", fleet.manager.reset(epoch.parse::<u64>().unwrap()).is_ok())
            }
            _ => format!("{:?}", fleet.away()),
        };
        say(&answer);
    }
}

fn computed() -> Served {
    Served { computed: 6, saved: 6, ..Served::default() }
}

fn found() -> Served {
    Served { hit: 6, saved: 6, ..Served::default() }
}

/// Has a fleet serve these chains, and end in good order.
fn leave(home: &Path, chains: &[u32]) {
    let mut fleet = open(home);
    for &n in chains {
        assert_eq!(fleet.serve(&chain(n, 6)).wrong, 0);
        drained(&fleet.manager);
    }
    fleet.end();
}

/// All works, and is found again after the next restart.
fn assert_heals(mut fleet: Fleet, home: &Path, chains: &[u32]) {
    chains.iter().for_each(|&n| fleet.assert_heals(&chain(n, 6)));
    drained(&fleet.manager);
    fleet.end();
    let mut fleet = open(home);
    for &n in chains {
        assert_eq!(
            fleet.serve(&chain(n, 6)),
            found(),
            "chain {n} after {:?}",
            fleet.manager.admin().recovered()
        );
    }
    fleet.assert_sound();
}

/// A rank's files of this kind.
fn files_of(dir: &Path, rank: u16, kind: &str) -> Vec<PathBuf> {
    let own = format!("-rank{rank}of");
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    let is_own = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.contains(&own) && name.ends_with(kind)
    };
    files.filter(is_own).collect()
}

fn slots(home: &Path) -> PathBuf {
    home.join("slots")
}

#[test]
fn what_all_ranks_kept_is_served_after_a_restart() {
    let home = tempfile::tempdir().unwrap();
    leave(home.path(), &[1, 2, 3]);
    let mut fleet = open(home.path());
    let RecoveryReport { tier, blocks, dropped, past, disagreed, damaged, .. } =
        recovered(&fleet.manager);
    assert_eq!((tier, blocks, dropped, past, disagreed, damaged), (Tier::Disk, 18, 0, 0, 0, 0));
    assert_eq!(fleet.manager.admin().audit(), []);
    for n in [2, 1, 3] {
        assert_eq!(fleet.manager.matches(&chain(n, 6)).blocks(Tier::Disk), 6);
        assert_eq!(fleet.serve(&chain(n, 6)), found());
    }
    assert_eq!(metric(&fleet.registry, "kvbm_checksum_failures_total", &[]), 0);
    // And then it goes on: other blocks take the place of these, and are found in turn.
    for n in 10..20 {
        assert_eq!(fleet.serve(&chain(n, 6)), computed());
        drained(&fleet.manager);
    }
    fleet.assert_sound();
    let resident = fleet.manager.admin().counts(Tier::Disk).resident as usize;
    fleet.end();
    let mut fleet = open(home.path());
    assert_eq!(
        (recovered(&fleet.manager).blocks, recovered(&fleet.manager).disagreed),
        (resident, 0)
    );
    // The latest first: what comes anew takes the place of the oldest.
    let served: Vec<_> = (10..20).rev().map(|n| fleet.serve(&chain(n, 6))).collect();
    assert_eq!(served.iter().map(|served| served.wrong).sum::<usize>(), 0);
    assert_eq!(served.iter().map(|served| served.hit).sum::<usize>(), resident);
    fleet.assert_sound();
}

/// A leader with ranks in a process of its own, which has served some chains; and who its ranks
/// are.
fn leader(home: &Path, chains: &[u32]) -> (Process, Vec<String>) {
    let mut leader = Process::start(module_path!(), "leader", home);
    let ranks = leader.hear().split(' ').map(str::to_owned).collect();
    for n in chains {
        let served = leader.ask(&format!("serve {n}"));
        assert!(served.contains("wrong: 0") && served.contains("saved: 6"), "{served}");
    }
    (leader, ranks)
}

/// Kills all of these at once.
fn kill(processes: &[String]) {
    let status = Command::new("kill").arg("-KILL").args(processes).status();
    assert!(status.unwrap().success(), "they were there");
}

#[test]
fn what_killed_processes_kept_is_served_by_the_next() {
    let home = tempfile::tempdir().unwrap();
    for round in 0..3 {
        let (mut leader, ranks) = leader(home.path(), &[round + 1]);
        match round {
            // The leader alone: its ranks end by themselves.
            0 => leader.signal("KILL"),
            // All of them.
            1 => kill(&[ranks.as_slice(), &[leader.id().to_string()]].concat()),
            // A rank, which the leader notices, and the rest as a supervisor would.
            _ => {
                kill(&ranks[2..3]);
                wait_until(LIMIT, "a dead rank is missed", || leader.ask("away") == "[2]");
                kill(&[&ranks[..2], &ranks[3..], &[leader.id().to_string()]].concat());
            }
        }
        drop(leader);
        let mut fleet = open(home.path());
        assert_eq!(fleet.manager.admin().audit(), []);
        for n in 1..=round + 1 {
            assert_eq!(
                fleet.serve(&chain(n, 6)),
                found(),
                "round {round}: {:?}",
                fleet.manager.admin().recovered()
            );
        }
        fleet.assert_sound();
        fleet.end();
    }
}

#[test]
fn processes_killed_while_they_work_leave_nothing_wrong() {
    let home = tempfile::tempdir().unwrap();
    let mut warm = 0;
    for round in 0..4 {
        let mut leader = Process::start(module_path!(), "leader", home.path());
        let ranks: Vec<_> = leader.hear().split(' ').map(str::to_owned).collect();
        // More than there is room for, so that slots change hands.
        for n in 0..8 {
            assert!(leader.ask(&format!("serve {n}")).contains("wrong: 0"));
        }
        leader.tell("serve 9");
        thread::sleep(Duration::from_millis(20 * round));
        kill(&[ranks.as_slice(), &[leader.id().to_string()]].concat());
        drop(leader);
        let mut fleet = open(home.path());
        let served: Vec<_> = (0..10).rev().map(|n| fleet.serve(&chain(n, 6))).collect();
        assert_eq!(served.iter().map(|served| served.wrong).sum::<usize>(), 0, "round {round}");
        warm += served.iter().map(|served| served.hit).sum::<usize>();
        fleet.assert_sound();
        fleet.end();
    }
    assert!(warm >= 12, "{warm} blocks were found");
}

#[test]
fn a_rank_without_its_files_costs_misses_and_then_heals() {
    for kind in ["", ".blocks", ".index"] {
        let home = tempfile::tempdir().unwrap();
        leave(home.path(), &[1, 2]);
        let files = files_of(&slots(home.path()), 1, kind);
        assert!(!files.is_empty());
        files.iter().for_each(|file| fs::remove_file(file).unwrap());
        let mut fleet = open(home.path());
        let RecoveryReport { blocks, disagreed, .. } = recovered(&fleet.manager);
        assert_eq!((blocks, disagreed), (0, 12), "without {kind}");
        for n in [1, 2] {
            assert_eq!(fleet.serve(&chain(n, 6)), computed());
        }
        assert_heals(fleet, home.path(), &[1, 2]);
    }
}

#[test]
fn a_leader_without_its_index_starts_cold_and_then_heals() {
    let home = tempfile::tempdir().unwrap();
    leave(home.path(), &[1, 2]);
    let files = fs::read_dir(slots(home.path())).unwrap().map(|file| file.unwrap().path());
    let index = files
        .into_iter()
        .find(|path| path.extension().is_some_and(|kind| kind == "leader"))
        .unwrap();
    fs::remove_file(index).unwrap();
    let mut fleet = open(home.path());
    assert_eq!(recovered(&fleet.manager).blocks, 0);
    assert_eq!(fleet.serve(&chain(1, 6)), computed());
    assert_heals(fleet, home.path(), &[1, 2]);
}

#[test]
fn losing_a_rank_while_asked_costs_a_cold_start_only() {
    for dies in [true, false] {
        let home = tempfile::tempdir().unwrap();
        leave(home.path(), &[1, 2]);
        // Long enough for all to come, and not too long for a test to wait for one that does not
        // answer.
        let asking = RankGroup { limit: Duration::from_secs(5), ..group(home.path()) };
        let place = home.path().to_owned();
        let leading = thread::spawn(move || {
            let registry = Registry::new();
            let manager = fleet::lead(of_fleet(&place), asking, fingerprint(&place), &registry);
            (manager.expect("it starts without what was kept"), registry)
        });
        let start = |rank: u16| Process::start(module_path!(), &rank.to_string(), home.path());
        let joined = |mut rank: Process| {
            assert_eq!(rank.hear(), "joined");
            rank
        };
        let mut ranks: Vec<_> = (0..WORLD - 1).map(start).map(joined).collect();
        ranks[1].stop();
        // It asks when the last one is there.
        ranks.push(joined(start(WORLD - 1)));
        if dies {
            thread::sleep(Duration::from_millis(100));
            std::mem::replace(&mut ranks[1], start(1)).kill();
        }
        let (manager, registry) = leading.join().unwrap();
        if dies {
            assert_eq!(ranks[1].hear(), "joined");
        } else {
            ranks[1].signal("CONT");
        }
        let mut fleet = Fleet::over(module_path!(), manager, registry, ranks, home.path());
        assert_eq!(recovered(&fleet.manager).blocks, 0);
        assert_eq!(fleet.serve(&chain(1, 6)).wrong, 0);
        assert_heals(fleet, home.path(), &[1, 2]);
    }
}

/// Copies all of a rank's files to another directory, or back.
fn copy_files(from: &Path, to: &Path, rank: u16) {
    for file in files_of(from, rank, "") {
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
}

#[test]
fn an_older_copy_of_ranks_files_gives_nothing_old() {
    let home = tempfile::tempdir().unwrap();
    let old = tempfile::tempdir().unwrap();
    leave(home.path(), &[1, 2]);
    copy_files(&slots(home.path()), old.path(), 2);
    // All slots change hands, and some blocks come again, to slots in other lives.
    leave(home.path(), &[3, 4, 5, 6, 1]);
    copy_files(old.path(), &slots(home.path()), 2);
    let mut fleet = open(home.path());
    let RecoveryReport { blocks, disagreed, .. } = recovered(&fleet.manager);
    assert_eq!((blocks, disagreed), (0, DISK as usize));
    for n in 1..7 {
        let served = fleet.serve(&chain(n, 6));
        assert_eq!((served.wrong, served.hit), (0, 0), "chain {n}");
    }
    assert_heals(fleet, home.path(), &[1, 6]);
}

#[test]
fn foreign_slots_and_changed_bytes_are_misses_and_then_heal() {
    let home = tempfile::tempdir().unwrap();
    leave(home.path(), &[1, 2]);
    // The bytes of two ranks, but not what they say of them.
    let [one, two] = [1, 2].map(|rank| files_of(&slots(home.path()), rank, ".blocks").remove(0));
    let aside = home.path().join("aside");
    fs::rename(&one, &aside).unwrap();
    fs::rename(&two, &one).unwrap();
    fs::rename(&aside, &two).unwrap();
    let mut fleet = open(home.path());
    assert_eq!(recovered(&fleet.manager).blocks, 12, "so they say");
    for n in [1, 2] {
        let served = fleet.serve(&chain(n, 6));
        assert_eq!((served.wrong, served.hit), (0, 0), "chain {n}");
    }
    assert!(metric(&fleet.registry, "kvbm_checksum_failures_total", &[]) > 0);
    assert_heals(fleet, home.path(), &[1, 2]);
}

#[test]
fn nothing_from_before_a_reset_comes_back_whatever_ranks_have() {
    let home = tempfile::tempdir().unwrap();
    let old = tempfile::tempdir().unwrap();
    leave(home.path(), &[1]);
    (0..WORLD).for_each(|rank| copy_files(&slots(home.path()), old.path(), rank));
    let (mut leader, ranks) = leader(home.path(), &[2]);
    assert_eq!(leader.ask("reset 1"), "true");
    kill(&[ranks.as_slice(), &[leader.id().to_string()]].concat());
    drop(leader);
    for is_older in [false, true] {
        if is_older {
            (0..WORLD).for_each(|rank| copy_files(old.path(), &slots(home.path()), rank));
        }
        let mut fleet = open(home.path());
        assert_eq!((fleet.manager.admin().epoch(), recovered(&fleet.manager).blocks), (1, 0));
        for n in [1, 2].into_iter().filter(|_| is_older) {
            assert_eq!(fleet.serve(&chain(n, 6)), computed());
        }
        fleet.end();
    }
    assert_heals(open(home.path()), home.path(), &[1, 2]);
}

#[test]
fn another_fingerprint_or_world_starts_cold_and_leaves_others() {
    let home = tempfile::tempdir().unwrap();
    leave(home.path(), &[1]);
    for (what, other) in [("weights", "two"), ("world", "3")] {
        fs::write(home.path().join(what), other).unwrap();
        let mut fleet = open(home.path());
        assert_eq!(recovered(&fleet.manager).blocks, 0, "{what}");
        assert_eq!(fleet.serve(&chain(1, 6)), computed());
        drained(&fleet.manager);
        fleet.end();
        let mut fleet = open(home.path());
        assert_eq!(fleet.serve(&chain(1, 6)), found(), "{what}");
        fleet.end();
        fs::remove_file(home.path().join(what)).unwrap();
    }
    let mut fleet = open(home.path());
    assert_eq!(fleet.serve(&chain(1, 6)), found());
}

#[test]
fn a_rank_that_came_back_keeps_later_blocks_over_restarts() {
    let home = tempfile::tempdir().unwrap();
    leave(home.path(), &[1]);
    let mut fleet = open(home.path());
    assert_eq!(fleet.serve(&chain(1, 6)), found());
    fleet.kill(3);
    fleet.assert_forgets(&chain(1, 6), LIMIT);
    fleet.restart(3);
    // What lies in its slots it was not told to adopt.
    assert_eq!(fleet.serve(&chain(1, 6)).hit, 0);
    assert_heals(fleet, home.path(), &[1, 2]);
}

/// A directory in memory, and one that says where it is.
fn in_memory() -> Option<(TempDir, TempDir)> {
    let memory = shm()?;
    let home = tempfile::tempdir().unwrap();
    symlink(memory.path(), home.path().join("memory")).unwrap();
    Some((home, memory))
}

#[test]
fn memory_of_killed_ranks_returns_and_changed_bits_are_misses() {
    let Some((home, memory)) = in_memory() else { return };
    let (leader, ranks) = leader(home.path(), &[1, 2]);
    kill(&[ranks.as_slice(), &[leader.id().to_string()]].concat());
    drop(leader);
    let mut fleet = open(home.path());
    let RecoveryReport { tier, blocks, disagreed, .. } = recovered(&fleet.manager);
    assert_eq!((tier, blocks, disagreed), (Tier::Host, 12, 0));
    for n in [1, 2] {
        assert_eq!(fleet.manager.matches(&chain(n, 6)).blocks(Tier::Host), 6);
        assert_eq!(fleet.serve(&chain(n, 6)), found());
    }
    fleet.end();
    let changed = files_of(memory.path(), 2, ".memory").remove(0);
    let file = OpenOptions::new().read(true).write(true).open(changed).unwrap();
    let mut byte = [0];
    // Slots are taken in order, so it is the third block of the first chain.
    file.read_exact_at(&mut byte, 3 * BLOCK - 1).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 3 * BLOCK - 1).unwrap();
    let mut fleet = open(home.path());
    let served = [1, 2].map(|n| fleet.serve(&chain(n, 6)));
    assert_eq!(served.each_ref().map(|served| (served.hit, served.wrong)), [(2, 0), (6, 0)]);
    assert_eq!(fleet.serve(&chain(1, 6)).wrong, 0);
    fleet.empty(Tier::Device);
    assert_eq!(fleet.serve(&chain(1, 6)), found());
    fleet.assert_sound();
}
