//! A leader with ranks in processes of their own: bytes right in each, and what becomes of them
//! when one is killed, hangs, is another's, or has no leader any more.

use std::path::Path;
use std::time::Duration;
use std::{fs, thread};

use kvbm::{ErrorKind, Manager, Rank, RankGroup, RankOptions, Tier};
use kvbm_settings::Capacity;
use kvbm_tests::fleet::{
    Fleet, LIMIT, LINGERS, Served, WORLD, answer, be_a_rank, group, lead, settings,
};
use kvbm_tests::process::{Process, role};
use kvbm_tests::rig::{chain, wait_until};
use prometheus::Registry;
use tempfile::TempDir;

fn open(dir: &Path, group: RankGroup, registry: &Registry) -> kvbm::Result<Manager> {
    lead(settings(dir), group, None, registry)
}

fn fleet() -> (TempDir, Fleet) {
    let home = tempfile::tempdir().unwrap();
    let fleet =
        Fleet::open(module_path!(), home.path(), settings(home.path()), group(home.path()), None);
    (home, fleet)
}

/// Not a test: the process of a rank, or of a leader that is to be killed, when another test starts
/// it.
#[test]
fn process() {
    let Some((role, place)) = role() else { return };
    match role.parse() {
        Ok(rank) => {
            let options = RankOptions::new(group(&place), rank);
            be_a_rank(&settings(&place), options);
        }
        Err(_) => be_a_leader(&place),
    }
}

fn be_a_leader(place: &Path) {
    let _manager = open(place, group(place), &Registry::new()).unwrap();
    println!("@ open");
    // Until it is killed.
    thread::sleep(4 * LIMIT);
}

#[test]
fn each_rank_has_its_own_bytes_in_every_tier() {
    let (home, mut fleet) = fleet();
    assert_eq!(fleet.manager.admin().device(), Some("ranks"));
    for n in 1..4 {
        assert_eq!(
            fleet.serve(&chain(n, 6)),
            Served { computed: 6, saved: 6, ..Served::default() }
        );
    }
    (1..4).for_each(|n| fleet.assert_heals(&chain(n, 6)));
    let files = fs::read_dir(home.path().join("slots")).unwrap();
    let names: Vec<_> =
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    for rank in 0..WORLD {
        let own = format!("-rank{rank}of{WORLD}.blocks");
        assert_eq!(names.iter().filter(|name| name.contains(&own)).count(), 1, "{names:?}");
    }
    fleet.end();
}

#[test]
fn a_rank_killed_amid_copies_costs_its_blocks_and_returns() {
    let (_home, mut fleet) = fleet();
    for n in 1..4 {
        assert_eq!(fleet.serve(&chain(n, 6)).saved, 6);
    }
    for round in 0..6 {
        fleet.empty(Tier::Device);
        let is_in_flight = round % 2 == 0;
        if is_in_flight {
            // The other ranks end their copies, and this one never does.
            fleet.ranks[2].as_ref().unwrap().stop();
        }
        let loads = (1..4)
            .map(|n| fleet.manager.load(fleet.manager.lease(&chain(n, 6))))
            .collect::<Vec<_>>();
        fleet.kill(2);
        for loaded in loads.into_iter().map(answer) {
            assert!(
                !is_in_flight || loaded.blocks == 0,
                "round {round}: what a dead rank never had"
            );
        }
        (1..4).for_each(|n| fleet.assert_forgets(&chain(n, 6), LIMIT));
        let served = fleet.serve(&chain(1, 6));
        assert_eq!(
            (served.hit, served.computed, served.saved),
            (0, 6, 0),
            "the engine goes on alone"
        );
        fleet.restart(2);
        (1..4).for_each(|n| fleet.assert_heals(&chain(n, 6)));
    }
}

#[test]
fn a_child_that_outlives_its_rank_frees_its_place() {
    let (_home, mut fleet) = fleet();
    assert_eq!(fleet.serve(&chain(1, 6)).saved, 6);
    assert_eq!(fleet.ranks[0].as_mut().unwrap().ask("fork"), "true");
    assert_eq!(fleet.away(), [0_u16; 0]);
    fleet.kill(0);
    fleet.assert_forgets(&chain(1, 6), LINGERS / 2);
    assert_eq!(fleet.away(), [0]);
    // It waits for the lock on its file, which the child has too.
    fleet.restart(0);
    assert_eq!(fleet.away(), [0_u16; 0]);
    fleet.assert_heals(&chain(1, 6));
}

#[test]
fn a_hanging_rank_makes_misses_and_then_works_again() {
    let (_home, mut fleet) = fleet();
    assert_eq!(fleet.serve(&chain(1, 6)).saved, 6);
    fleet.assert_heals(&chain(1, 6));
    fleet.empty(Tier::Device);
    fleet.ranks[1].as_ref().unwrap().stop();
    let loaded = answer(fleet.manager.load(fleet.manager.lease(&chain(1, 6))));
    assert_eq!(loaded.blocks, 0);
    drop(loaded);
    assert_eq!(fleet.manager.admin().audit(), []);
    // Asked again, the medium is left alone, but for one block that tries it.
    let overdue = fleet.manager.admin().overdue();
    drop(answer(fleet.manager.load(fleet.manager.lease(&chain(1, 6)))));
    assert!(
        fleet.manager.admin().overdue() <= overdue + 1,
        "{} after {overdue}",
        fleet.manager.admin().overdue()
    );
    fleet.ranks[1].as_ref().unwrap().signal("CONT");
    wait_until(LIMIT, "copies are still overdue", || fleet.manager.admin().overdue() == 0);
    fleet.assert_heals(&chain(1, 6));
    fleet.assert_heals(&chain(2, 6));
}

#[test]
fn a_rank_killed_while_it_hangs_gives_its_slots_back() {
    let (_home, mut fleet) = fleet();
    assert_eq!(fleet.serve(&chain(1, 6)).saved, 6);
    fleet.empty(Tier::Device);
    fleet.ranks[3].as_ref().unwrap().stop();
    assert_eq!(answer(fleet.manager.load(fleet.manager.lease(&chain(1, 6)))).blocks, 0);
    assert!(fleet.manager.admin().counts(Tier::Device).lost > 0);
    fleet.kill(3);
    fleet.restart(3);
    fleet.assert_heals(&chain(1, 6));
    fleet.assert_heals(&chain(2, 6));
}

#[test]
fn ranks_of_a_killed_leader_say_so_and_join_another() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("slots")).unwrap();
    let mut leader = Process::start(module_path!(), "leader", dir.path());
    let mut ranks: Vec<_> = (0..WORLD)
        .map(|rank| Process::start(module_path!(), &rank.to_string(), dir.path()))
        .collect();
    assert_eq!(leader.hear(), "open");
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
    leader.signal("KILL");
    for (number, mut rank) in ranks.into_iter().enumerate() {
        let outcome = rank.ask("wait");
        let words = format!("rank {number} lost its leader (process {})", leader.id());
        assert!(outcome.contains(&words), "{outcome}");
        assert!(rank.ends_well());
    }
    // All of them start anew, in the same place.
    let mut ranks: Vec<_> = (0..WORLD)
        .map(|rank| Process::start(module_path!(), &rank.to_string(), dir.path()))
        .collect();
    let registry = Registry::new();
    let manager = open(dir.path(), group(dir.path()), &registry).unwrap();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
    let mut fleet = Fleet::over(module_path!(), manager, registry, ranks, dir.path());
    fleet.assert_heals(&chain(1, 6));
}

#[test]
fn second_leaders_and_second_ranks_are_refused_and_named() {
    let (home, mut fleet) = fleet();
    let dir = home.path().to_owned();
    let second = open(&dir, group(&dir), &Registry::new()).unwrap_err();
    assert_eq!(second.kind(), ErrorKind::Unavailable);
    let own = std::process::id();
    assert!(second.to_string().contains(&format!("process {own}")), "{second}");
    let mut impostor = settings(&dir);
    impostor.disk.keep = false;
    let options = |rank| RankOptions::new(group(&dir), rank);
    let taken = Rank::join(&impostor, options(2)).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::Unavailable);
    let holder = fleet.ranks[2].as_ref().unwrap().id();
    assert!(taken.to_string().contains(&format!("process {holder} is that rank")), "{taken}");
    impostor.host.capacity = Some(Capacity::Blocks(31));
    let other = Rank::join(&impostor, options(2)).unwrap_err();
    assert_eq!(other.kind(), ErrorKind::Invalid);
    assert!(other.to_string().contains("number of host slots is 39, this leader's 40"), "{other}");
    fleet.assert_heals(&chain(1, 6));
}

#[test]
fn a_leader_says_which_ranks_it_waits_for_in_vain() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("slots")).unwrap();
    let group = RankGroup { limit: Duration::from_secs(3), ..group(dir.path()) };
    let one = Process::start(module_path!(), "1", dir.path());
    let error = open(dir.path(), group, &Registry::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().ends_with("0, 2, 3"), "{error}");
    // And then all come: it too starts anew, as after any leader's end.
    drop(one);
    let mut fleet = Fleet::open(
        module_path!(),
        dir.path(),
        settings(dir.path()),
        self::group(dir.path()),
        None,
    );
    fleet.assert_heals(&chain(1, 6));
    fleet.end();
}
