//! A leader and its ranks, which are threads here: `tests/ranks.rs` has them in processes, and
//! kills them.

#![expect(unsafe_code, reason = "a backend promises what the compiler cannot see")]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use tempfile::TempDir;

use super::protocol::{HelloFrame, MAX_SLOTS_TOLD, ToLeader, ToRank, decode, first_message, frame};
use super::socket::LeaderSocket;
use super::{
    Disagreement, JoinOptions, KeptSlots, Leader, LeaderGone, LeaderOptions, Member, Membership,
    PeerSeat, PullFrom, PullOrder, PulledSlot, RankLoads, SlotJournal, Stopper, VERSION,
};
use crate::backend::{Backend, Fence, Fences, HostFence, Layers};
use crate::copy::{BlockKey, CopyError, CopyErrorKind, CopyOp, Done, Route, SlotId, SlotRef, Tier};
use crate::dram::DramRegion;
use crate::error::{Failure, SetupError, SetupErrorKind};
use crate::frame::Frame;
use crate::index::IndexEntry;
use crate::memcpy::MemcpyBackend;
use crate::memory::Memory;
use crate::testing::{
    Fault, FaultBackend, ParkedBackend, each, fill_pattern, has_pattern, holds_in_a_child, kinds,
    options, order, run, start,
};

const SLOTS: u32 = 16;
const BYTES: usize = 4096;
const LIMIT: Duration = Duration::from_secs(20);
const SAVE: Route = Route::new(Tier::Device, Tier::Host);

fn leader_options(dir: &Path, world: u16) -> LeaderOptions {
    LeaderOptions {
        dir: dir.to_owned(),
        world,
        slots: [SLOTS, SLOTS, 0, 0],
        block_bytes: BYTES as u64,
        fingerprint: "a test".to_owned(),
        limit: LIMIT,
        debts: None,
    }
}

fn membership(rank: u16, world: u16) -> Membership {
    let LeaderOptions { slots, block_bytes, fingerprint, .. } =
        leader_options(Path::new(""), world);
    Membership { rank, world, slots, block_bytes, fingerprint, routes: Vec::new(), peers: None }
}

fn join_options(dir: &Path, member: Membership) -> JoinOptions {
    JoinOptions { dir: dir.to_owned(), member, kept: Vec::new(), limit: LIMIT }
}

/// A rank on a thread, with memory of its own that a test looks into.
struct Rank {
    device: Arc<DramRegion>,
    host: Arc<DramRegion>,
    titles: Vec<Frame>,
    faults: Arc<FaultBackend<MemcpyBackend>>,
    stopper: Stopper,
    service: JoinHandle<Result<(), Failure<LeaderGone>>>,
}

impl Rank {
    fn join(dir: &Path, member: Membership) -> Result<Self, SetupError> {
        Self::join_keeping(dir, member, Vec::new())
    }

    fn join_keeping(
        dir: &Path,
        member: Membership,
        kept: Vec<KeptSlots>,
    ) -> Result<Self, SetupError> {
        let device = Arc::new(DramRegion::emulated_device(options(SLOTS, BYTES))?);
        let host = Arc::new(DramRegion::host(options(SLOTS, BYTES))?);
        let regions = || vec![Arc::clone(&device) as Arc<dyn Memory>, Arc::clone(&host) as _];
        let faults = FaultBackend::new(MemcpyBackend::new(regions(), 1)?, regions())?;
        let faults = Arc::new(faults);
        let backends: HashMap<Route, Arc<dyn Backend>> =
            faults.routes().iter().map(|&route| (route, Arc::clone(&faults) as _)).collect();
        let member = Member::join(JoinOptions { kept, ..join_options(dir, member) }, backends)?;
        let member = member.pulling(Arc::clone(&host), Box::new(bring_patterns));
        let mut titles = [&device, &host].map(|region| region.frames().unwrap());
        let titles =
            titles.iter_mut().flat_map(|pool| (0..SLOTS).filter_map(|_| pool.take())).collect();
        let stopper = member.stopper();
        let service = thread::spawn(move || member.serve());
        Ok(Self { device, host, titles, faults, stopper, service })
    }

    /// Fills a slot of the device with what no other rank has.
    fn fill(&mut self, slot: u32, pattern: usize) {
        let title = &mut self.titles[slot as usize];
        fill_pattern(pattern, self.device.write(title).unwrap());
    }

    fn host_has(&self, slot: u32, pattern: usize) -> bool {
        has_pattern(pattern, self.host.read(&self.titles[(SLOTS + slot) as usize]).unwrap())
    }

    /// It goes, as a process goes that ends.
    fn leave(self) {
        self.stopper.stop();
        self.service.join().unwrap().unwrap();
    }
}

/// Brings what would lie in a slot there: the pattern of its number, which is also how many numbers
/// of it are too large.
fn bring_patterns(_: PullFrom, slots: Vec<PulledSlot>) {
    for mut slot in slots {
        let pattern = slot.op().from.slot.0;
        fill_pattern(pattern as usize, slot.bytes());
        slot.saturated(pattern.into());
        slot.written();
        slot.end(Ok(()));
    }
}

/// A leader with `world` ranks, and which of them it said are lost.
struct Fleet {
    dir: TempDir,
    leader: Leader,
    ranks: Vec<Option<Rank>>,
    lost: Arc<Mutex<Vec<u16>>>,
}

impl Fleet {
    fn new(world: u16) -> Self {
        Self::new_in(tempfile::tempdir().unwrap(), world)
    }

    fn new_in(dir: TempDir, world: u16) -> Self {
        let at = dir.path().to_owned();
        let joining: Vec<_> = (0..world)
            .map(|rank| {
                let at = at.clone();
                thread::spawn(move || Rank::join(&at, membership(rank, world)).unwrap())
            })
            .collect();
        let lost = Arc::new(Mutex::new(Vec::new()));
        let note = Arc::clone(&lost);
        let leader =
            Leader::open(leader_options(&at, world), move |rank| note.lock().push(rank)).unwrap();
        let ranks = joining.into_iter().map(|rank| Some(rank.join().unwrap())).collect();
        Self { dir, leader, ranks, lost }
    }

    fn rank(&mut self, rank: usize) -> &mut Rank {
        self.ranks[rank].as_mut().unwrap()
    }

    fn rejoin(&mut self, rank: u16) {
        let member = membership(rank, self.ranks.len() as u16);
        self.ranks[rank as usize] = Some(Rank::join(self.dir.path(), member).unwrap());
    }

    /// Every rank's slots get their bytes and are saved; returns what became of the copies.
    fn save(&mut self, slots: u32) -> Vec<Result<(), CopyError>> {
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            let Some(rank) = rank else { continue };
            (0..slots).for_each(|slot| rank.fill(slot, pattern(number, slot)));
        }
        run(&self.leader, (0..slots).map(|slot| op(SAVE, slot)).collect())
    }

    fn assert_works(&mut self) {
        assert!(self.save(SLOTS).iter().all(Result::is_ok));
        for (number, rank) in self.ranks.iter().enumerate() {
            let rank = rank.as_ref().unwrap();
            assert!(
                (0..SLOTS).all(|slot| rank.host_has(slot, pattern(number, slot))),
                "rank {number}"
            );
        }
    }
}

fn pattern(rank: usize, slot: u32) -> usize {
    1_000 * (rank + 1) + slot as usize
}

fn op(route: Route, slot: u32) -> CopyOp {
    let at = |tier| SlotRef { tier, slot: SlotId(slot), generation: slot + 1 };
    order(slot as usize, at(route.from), at(route.to))
}

#[test]
fn every_rank_copies_its_own_slice() {
    let mut fleet = Fleet::new(3);
    assert!(fleet.leader.routes().contains(&SAVE));
    assert!(!fleet.leader.routes().contains(&Route::new(Tier::Host, Tier::Disk)));
    fleet.assert_works();
    assert!(fleet.lost.lock().is_empty());
}

#[test]
fn one_rank_that_fails_is_what_became_of_the_block() {
    let mut fleet = Fleet::new(3);
    fleet.rank(0).faults.inject(Fault::FailAfter(2, CopyErrorKind::NoSpace), &[SAVE]);
    fleet.rank(2).faults.inject(Fault::FailAfter(2, CopyErrorKind::Corrupt), &[SAVE]);
    let results = fleet.save(4);
    let bad = Some(CopyErrorKind::Corrupt);
    assert_eq!(kinds(&results), [None, None, bad, bad]);
    assert!(results[2].as_ref().unwrap_err().to_string().starts_with("rank 2: "));
    fleet.rank(0).faults.heal();
    fleet.rank(2).faults.heal();
    fleet.assert_works();
}

#[test]
fn copies_are_unavailable_until_a_lost_rank_is_back() {
    let mut fleet = Fleet::new(3);
    fleet.assert_works();
    fleet.ranks[1].take().unwrap().leave();
    let away = Some(CopyErrorKind::Unavailable);
    assert_eq!(kinds(&fleet.save(2)), [away, away]);
    assert_eq!(*fleet.lost.lock(), [1]);
    fleet.rejoin(1);
    fleet.assert_works();
    assert_eq!(*fleet.lost.lock(), [1]);
}

#[test]
fn a_rank_that_hangs_is_waited_for() {
    let mut fleet = Fleet::new(2);
    fleet.rank(1).faults.inject(Fault::Slow(Duration::from_secs(2)), &[SAVE]);
    let reports = start(&fleet.leader, vec![op(SAVE, 0)]);
    assert_eq!(
        reports.recv_timeout(Duration::from_millis(20)).unwrap_err(),
        RecvTimeoutError::Timeout
    );
    assert!(reports.recv_timeout(LIMIT).unwrap().1.is_ok());
    fleet.rank(1).faults.heal();
    fleet.assert_works();
}

#[test]
fn a_slow_batch_reports_what_has_ended_first() {
    let dir = tempfile::tempdir().unwrap();
    let parked = Arc::new(ParkedBackend::new(Vec::new(), vec![SAVE]).unwrap());
    let backends = HashMap::from([(SAVE, Arc::clone(&parked) as Arc<dyn Backend>)]);
    let options = join_options(dir.path(), membership(0, 1));
    let service = thread::spawn(|| Member::join(options, backends).unwrap().serve());
    let leader = Leader::open(leader_options(dir.path(), 1), |_| ()).unwrap();
    let reports = start(&leader, (0..3).map(|slot| op(SAVE, slot)).collect());
    while parked.pending().len() < 3 {
        thread::yield_now();
    }
    for (id, slot) in [(1, 1), (0, 0), (2, 2)] {
        assert!(reports.recv_timeout(Duration::from_millis(20)).is_err(), "nothing has ended");
        parked.finish(id, Ok(()));
        let (ended, result) = reports.recv_timeout(LIMIT).unwrap();
        assert_eq!((ended, result.is_ok()), (slot, true));
    }
    drop(leader);
    service.join().unwrap().unwrap();
}

/// Leaves it to a test when layers and copies have come.
#[derive(Debug, Default)]
struct HeldBatches(Mutex<Vec<(Option<Layers>, Done)>>);

// SAFETY: it touches no slot, and completes what a test takes.
unsafe impl Backend for HeldBatches {
    fn name(&self) -> &'static str {
        "held"
    }

    fn routes(&self) -> &[Route] {
        &[SAVE]
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        self.submit_fenced(batch, Fences::default(), done);
    }

    fn submit_fenced(&self, _: Vec<CopyOp>, fences: Fences, done: Done) {
        self.0.lock().push((fences.layers, done));
    }
}

impl HeldBatches {
    fn take(&self) -> (Option<Layers>, Done) {
        loop {
            if let Some(held) = self.0.lock().pop() {
                return held;
            }
            thread::yield_now();
        }
    }
}

/// A rank that holds batches, and the loads that its engine waits for.
struct HoldingRank {
    held: Arc<HeldBatches>,
    loads: Arc<RankLoads>,
    service: JoinHandle<Result<(), Failure<LeaderGone>>>,
}

impl HoldingRank {
    fn join(dir: &Path, rank: u16) -> Self {
        let held = Arc::new(HeldBatches::default());
        let backends = HashMap::from([(SAVE, Arc::clone(&held) as Arc<dyn Backend>)]);
        let member = Member::join(join_options(dir, membership(rank, 2)), backends).unwrap();
        let loads = member.loads();
        Self { held, loads, service: thread::spawn(move || member.serve()) }
    }
}

#[test]
fn a_rank_counts_the_layers_of_its_own_slice() {
    let dir = tempfile::tempdir().unwrap();
    let joining = [0, 1].map(|rank| {
        let at = dir.path().to_owned();
        thread::spawn(move || HoldingRank::join(&at, rank))
    });
    let leader = Leader::open(leader_options(dir.path(), 2), |_| ()).unwrap();
    let ranks = joining.map(|rank| rank.join().unwrap());
    let begin = |fences: Fences| {
        let (report, reports) = mpsc::channel();
        let done = each(move |_, result| report.send(result).unwrap());
        leader.submit_fenced((0..3).map(|slot| op(SAVE, slot)).collect(), fences, done);
        reports
    };
    let load = leader.name_load(2.try_into().unwrap(), 3);
    let [one, other] = [0, 1].map(|rank: usize| ranks[rank].loads.slice(load));
    let layers = Layers::new(load.layers, |_, _| panic!("they are the ranks'"));
    let layers = layers.in_ranks(Some(load));
    let reports = begin(Fences { layers: Some(layers), ..Fences::default() });
    let held = [0, 1].map(|rank: usize| ranks[rank].held.take());
    let arrived = |rank: usize, layer| held[rank].0.as_ref().unwrap().arrived(layer, 3);
    arrived(0, 0);
    assert!(one.wait_layers(1, LIMIT) && !one.wait_layers(2, Duration::ZERO));
    assert!(!other.wait_layers(1, Duration::ZERO), "its own is not there");
    arrived(1, 0);
    arrived(1, 1);
    assert!(other.wait_layers(2, LIMIT) && !one.wait_layers(2, Duration::ZERO));
    held.into_iter().for_each(|(_, done)| done.report((0..3).map(|op| (op, Ok(()))).collect()));
    (0..3).for_each(|_| reports.recv_timeout(LIMIT).unwrap().unwrap());
    assert_eq!((one.wait(Duration::ZERO), other.wait(Duration::ZERO)), (None, None));
    assert!(holds_in_a_child(|| {
        leader.end_load(load, 0);
        true
    }));
    leader.end_load(load, 2);
    assert_eq!((one.wait(LIMIT), other.wait(LIMIT)), (Some(2), Some(2)));
    // Others have no name, and no layers; and what waits for this process cannot wait in ranks.
    let reports = begin(Fences::default());
    for rank in &ranks {
        let (layers, done) = rank.held.take();
        assert!(layers.is_none());
        done.report((0..3).map(|op| (op, Ok(()))).collect());
    }
    (0..3).for_each(|_| reports.recv_timeout(LIMIT).unwrap().unwrap());
    let refused = begin(Fences { after: Fence::Host(HostFence::new()), ..Fences::default() });
    let refused = refused.recv_timeout(LIMIT).unwrap().unwrap_err();
    assert_eq!(refused.kind(), CopyErrorKind::Refused);
    // A service that ends ends all loads.
    let last = ranks[0].loads.slice(leader.name_load(load.layers, 3));
    drop(leader);
    ranks.into_iter().for_each(|rank| rank.service.join().unwrap().unwrap());
    assert_eq!(last.wait(LIMIT), Some(0));
}

#[test]
fn a_rank_gives_out_nothing_that_it_was_not_given() {
    let mut fleet = Fleet::new(2);
    fleet.assert_works();
    fleet.ranks[0].take().unwrap().leave();
    fleet.rejoin(0);
    // The leader should have forgotten it: the slot of the new rank 0 was never written.
    let load = op(Route::new(Tier::Host, Tier::Device), 3);
    let result = run(&fleet.leader, vec![load]).remove(0).unwrap_err();
    assert_eq!(result.kind(), CopyErrorKind::Io);
    assert!(
        result.to_string().contains("rank 0: host slot 3 (generation 4) was never written"),
        "{result}"
    );
    let nowhere = op(SAVE, SLOTS);
    assert_eq!(
        run(&fleet.leader, vec![nowhere]).remove(0).unwrap_err().kind(),
        CopyErrorKind::Refused
    );
    fleet.assert_works();
}

/// Has all ranks bring blocks from a worker with this number of them.
fn pull(fleet: &Fleet, ranks: usize, ops: &[CopyOp]) -> Vec<Result<(), CopyError>> {
    let seats = vec![PeerSeat { port: 1, incarnation: 1 }; ranks];
    let order = PullOrder {
        host: "there".to_owned(),
        seats,
        limit_ms: 1_000,
        renamed: 0,
        first: 0,
        block_tokens: 16,
    };
    let (report, reports) = mpsc::channel();
    let done = each(move |index, result| report.send((index, result)).unwrap());
    fleet.leader.pull(&order, ops, done);
    let mut ended: Vec<_> = ops.iter().map(|_| reports.recv_timeout(LIMIT).unwrap()).collect();
    ended.sort_by_key(|(index, _)| *index);
    ended.into_iter().map(|(_, result)| result).collect()
}

#[test]
fn what_a_rank_cannot_bring_is_refused_others_come() {
    let mut fleet = Fleet::new(2);
    let op = |tier, slot| {
        let at = |tier| SlotRef { tier, slot: SlotId(slot), generation: 1 };
        order(slot as usize, at(Tier::Host), at(tier))
    };
    let ops = [op(Tier::Host, 3), op(Tier::Host, SLOTS), op(Tier::Device, 4), op(Tier::Host, 5)];
    let refused = Some(CopyErrorKind::Refused);
    let pulled = pull(&fleet, 2, &ops);
    assert_eq!(kinds(&pulled), [None, refused, refused, None]);
    let said = pulled[1].as_ref().unwrap_err().to_string();
    assert!(said.contains("there is no host slot 16"), "{said}");
    for rank in fleet.ranks.iter().flatten() {
        assert!(rank.host_has(3, 3) && rank.host_has(5, 5));
    }
    // In both ranks, and once.
    assert_eq!([fleet.leader.take_saturated(), fleet.leader.take_saturated()], [16, 0]);
    // Heads of three ranks are not split among two.
    let pulled = pull(&fleet, 3, &ops[..1]);
    let said = pulled[0].as_ref().unwrap_err();
    assert_eq!(said.kind(), CopyErrorKind::Refused);
    assert!(said.to_string().contains("does not read at ranks of that worker"), "{said}");
    assert_eq!(kinds(&pull(&fleet, 4, &ops[..1])), [None]);
    fleet.assert_works();
}

#[test]
fn a_leader_that_ends_says_goodbye_unless_it_dies() {
    let Fleet { leader, ranks, .. } = Fleet::new(2);
    drop(leader);
    for rank in ranks.into_iter().flatten() {
        rank.service.join().unwrap().unwrap();
    }
    // One that welcomes a rank, and is gone.
    let dir = tempfile::tempdir().unwrap();
    let meeting = super::socket::LeaderSocket::open(dir.path()).unwrap();
    let at = dir.path().to_owned();
    let joining = thread::spawn(move || Rank::join(&at, membership(0, 1)).unwrap());
    let listener = meeting.listener.try_clone().unwrap();
    listener.set_nonblocking(false).unwrap();
    let mut stream = listener.accept().unwrap().0;
    stream.write_all(&frame(&ToRank::Welcome)).unwrap();
    let rank = joining.join().unwrap();
    drop(stream);
    let error = rank.service.join().unwrap().unwrap_err();
    assert_eq!(error.kind(), LeaderGone::Away);
    assert!(error.to_string().contains("rank 0 lost its leader"), "{error}");
}

#[test]
fn unexpected_ranks_are_told_so_and_named() {
    let fleet = Fleet::new(2);
    let refused = |change: &dyn Fn(&mut Membership)| {
        let mut member = membership(1, 2);
        change(&mut member);
        Rank::join(fleet.dir.path(), member).err().expect("a refusal")
    };
    let taken = refused(&|_| ());
    assert_eq!(taken.kind(), SetupErrorKind::InUse);
    assert!(
        taken.to_string().contains(&format!("process {} is that rank", std::process::id())),
        "{taken}"
    );
    for (change, words) in [
        (
            &(|member: &mut Membership| member.world = 4) as &dyn Fn(&mut Membership),
            "number of ranks is 4",
        ),
        (&|member| member.rank = 2, "there is no such rank"),
        (&|member| member.slots[1] = 7, "number of host slots is 7, this leader's 16"),
        (&|member| member.block_bytes = 1, "block_bytes is 1, this leader's 4096"),
        (&|member| member.fingerprint = "another".to_owned(), "fingerprint is another"),
    ] {
        let error = refused(change);
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
        assert!(error.to_string().contains(words), "{error}");
    }
    let mut fleet = fleet;
    fleet.assert_works();
}

#[test]
fn a_leader_whose_ranks_do_not_come_names_them() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().to_owned();
    let one = thread::spawn(move || {
        let _refused = Rank::join(&at, Membership { block_bytes: 1, ..membership(2, 3) }).err();
        Rank::join(&at, membership(1, 3)).map(|rank| rank.service.join().unwrap()).unwrap()
    });
    let options = LeaderOptions { limit: Duration::from_secs(3), ..leader_options(dir.path(), 3) };
    let error = Leader::open(options, |_| ()).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::Invalid);
    let words = format!("0, 2 (refused: process {}: its block_bytes is 1", std::process::id());
    assert!(error.to_string().contains(&words), "{error}");
    one.join().unwrap().unwrap();
    for (world, dir) in [(0, dir.path()), (65, dir.path())] {
        let error = Leader::open(leader_options(dir, world), |_| ()).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
    }
    // And then they come.
    Fleet::new_in(dir, 3).assert_works();
}

/// A store of keys may take its time.
#[test]
fn a_rank_that_forgets_somebody_goes_on_copying() {
    let dir = tempfile::tempdir().unwrap();
    let (device, host) = (
        Arc::new(DramRegion::emulated_device(options(SLOTS, BYTES)).unwrap()),
        Arc::new(DramRegion::host(options(SLOTS, BYTES)).unwrap()),
    );
    let regions = vec![device as Arc<dyn Memory>, host as _];
    let backend: Arc<dyn Backend> = Arc::new(MemcpyBackend::new(regions, 1).unwrap());
    let backends = backend.routes().iter().map(|&route| (route, Arc::clone(&backend))).collect();
    let at = dir.path().to_owned();
    let (begun, begins) = std::sync::mpsc::channel();
    let (go_on, goes_on) = crossbeam_channel::unbounded::<()>();
    let service = thread::spawn(move || {
        let member = Member::join(join_options(&at, membership(0, 1)), backends).unwrap();
        let member = member.forgetting(move |tenant, life| {
            begun.send((tenant, life)).unwrap();
            let goes_on = goes_on.clone();
            Box::new(move || goes_on.recv().map_err(|_| "the store is away".to_owned()))
        });
        member.unwrap().serve()
    });
    let leader = Leader::open(leader_options(dir.path(), 1), |_| ()).unwrap();
    thread::scope(|scope| {
        let forgetting = scope.spawn(|| leader.forget(7, 3, LIMIT));
        assert_eq!(begins.recv(), Ok((7, 3)));
        // Its keys are being destroyed meanwhile.
        (0..4).for_each(|slot| run(&leader, vec![op(SAVE, slot)]).remove(0).unwrap());
        assert!(!forgetting.is_finished());
        go_on.send(()).unwrap();
        forgetting.join().unwrap().unwrap();
    });
    drop(go_on);
    let error = leader.forget(7, 4, LIMIT).unwrap_err();
    assert!(error.to_string().contains("rank 0 says: the store is away"), "{error}");
    drop(leader);
    service.join().unwrap().unwrap();
}

/// What a stranger put in a directory's place, or in it.
#[test]
fn nothing_is_written_through_what_strangers_put_there() {
    let home = tempfile::tempdir().unwrap();
    let precious = home.path().join("precious");
    std::fs::write(&precious, "what its owner wants to keep").unwrap();
    std::fs::set_permissions(&precious, PermissionsExt::from_mode(0o600)).unwrap();
    let make = |name: &str, mode| {
        let dir = home.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(mode)).unwrap();
        dir
    };
    let refused = |dir: &Path, why: &str| {
        let error = Leader::open(leader_options(dir, 1), |_| ()).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::NotWritable, "{error}");
        assert!(error.to_string().contains(why), "{error}");
    };
    let join_is_refused = |dir: &Path, why: &str| {
        let options = join_options(dir, membership(0, 1));
        let error = Member::join(options, HashMap::new()).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::NotWritable, "{error}");
        assert!(error.to_string().contains(why), "{error}");
    };
    for (name, mode) in [("everybody", 0o777), ("sticky", 0o1777), ("group", 0o770)] {
        let dir = make(name, mode);
        symlink(&precious, dir.join("leader.lock")).unwrap();
        refused(&dir, "others may write it");
        join_is_refused(&dir, "others may write it");
    }
    let linked = home.path().join("linked");
    symlink(make("real", 0o700), &linked).unwrap();
    refused(&linked, "is a symbolic link");
    join_is_refused(&linked, "is a symbolic link");
    let ours = make("ours", 0o755);
    symlink(&precious, ours.join("leader.lock")).unwrap();
    refused(&ours, "is a symbolic link");
    std::fs::remove_file(ours.join("leader.lock")).unwrap();
    std::fs::hard_link(&precious, ours.join("leader.lock")).unwrap();
    refused(&ours, "has 2 names");
    assert_eq!(std::fs::read_to_string(&precious).unwrap(), "what its owner wants to keep");
    // And then the directory is as it should be.
    std::fs::remove_file(ours.join("leader.lock")).unwrap();
    drop(LeaderSocket::open(&ours).unwrap());
}

#[test]
fn what_a_killed_leader_left_does_not_forbid_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let process = std::process::id();
    for name in
        [".ranks.sock".to_owned(), format!(".ranks.sock.{process}"), "ranks.sock".to_owned()]
    {
        drop(UnixListener::bind(dir.path().join(name)).unwrap());
    }
    std::fs::write(dir.path().join("leader.lock.partial"), "").unwrap();
    let mode = PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(dir.path().join("leader.lock.partial"), mode).unwrap();
    Fleet::new_in(dir, 2).assert_works();
}

#[test]
fn one_directory_has_one_leader() {
    let mut fleet = Fleet::new(1);
    let error = Leader::open(leader_options(fleet.dir.path(), 1), |_| ()).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::InUse);
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
    fleet.assert_works();
    let Fleet { dir, leader, .. } = fleet;
    drop(leader);
    let error = Leader::open(
        LeaderOptions { limit: Duration::from_millis(1), ..leader_options(dir.path(), 1) },
        |_| (),
    );
    assert_eq!(error.unwrap_err().kind(), SetupErrorKind::Unavailable, "the place is free again");
}

#[test]
fn a_rank_without_a_leader_says_so_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let options = JoinOptions {
        limit: Duration::from_millis(50),
        ..join_options(dir.path(), membership(0, 1))
    };
    let error = Member::join(options, HashMap::new()).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::Unavailable);
    assert!(error.to_string().contains("no leader listens in"), "{error}");
    // And then there is one.
    Fleet::new_in(dir, 1).assert_works();
}

/// Says something to a leader, and returns the first thing that it answers.
fn talk(dir: &Path, words: &[u8]) -> Option<Vec<u8>> {
    let mut stream = UnixStream::connect(dir.join("ranks.sock")).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // It may hang up in the middle.
    let _ = stream.write_all(words);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    first_message(&answer, 1 << 16).unwrap().map(<[u8]>::to_vec)
}

#[test]
fn another_version_is_refused_and_named() {
    let mut fleet = Fleet::new(1);
    let hello = frame(&(0_u8, u32::from_le_bytes(*b"kvbm"), VERSION + 1, 0_u64));
    let answer = talk(fleet.dir.path(), &hello).unwrap();
    let ToRank::Refused(refusal) = decode(&answer).unwrap() else { panic!("{answer:?}") };
    assert!(refusal.why.contains(&format!("leader version {VERSION}")), "{}", refusal.why);
    fleet.assert_works();
}

#[test]
fn nonsense_costs_its_speaker_the_connection_and_others_nothing() {
    let mut fleet = Fleet::new(2);
    let dir = fleet.dir.path().to_owned();
    assert_eq!(talk(&dir, &[0xff; 64]), None, "a message of 4 GiB");
    assert!(talk(&dir, &[3, 0, 0, 0, 9, 9, 9]).is_some(), "it is told that it is no rank");
    drop(UnixStream::connect(dir.join("ranks.sock")).unwrap());
    // A rank that was let in and then reports what it was never given.
    fleet.ranks[1].take().unwrap().leave();
    let routes = fleet.leader.routes().to_vec();
    let hello = ToLeader::Hello(HelloFrame::new(Membership { routes, ..membership(1, 2) }));
    let mut words = frame(&hello);
    let mut report = super::protocol::EndedCopies::new(77);
    report.arrived(0);
    words.extend(frame(&ToLeader::Ended(report)));
    assert_eq!(decode::<ToRank>(&talk(&dir, &words).unwrap()).unwrap(), ToRank::Welcome);
    fleet.rejoin(1);
    fleet.assert_works();
    assert_eq!(*fleet.lost.lock(), [1, 1]);
}

/// What a rank was told to write down: slots, and whether something came to them.
#[derive(Debug, Default)]
struct Told(Mutex<Vec<(u32, bool)>>);

impl SlotJournal for Told {
    fn begun(&self, op: &CopyOp) {
        self.0.lock().push((op.to.slot.0, false));
    }

    fn arrived(&self, op: &CopyOp) {
        self.0.lock().push((op.to.slot.0, true));
    }
}

/// Something in a host slot, as an earlier process stored it.
fn entry(slot: u32, generation: u32) -> IndexEntry {
    let block = BlockKey { hash: u128::from(slot), group: 0 };
    IndexEntry { slot: SlotId(slot), generation, block, parent: None, checksum: 1, tenant: None }
}

/// A leader of two ranks that were left something in their host tiers.
fn left_with(left: [Vec<IndexEntry>; 2]) -> (Fleet, [Arc<Told>; 2]) {
    let dir = tempfile::tempdir().unwrap();
    let told = [(); 2].map(|()| Arc::<Told>::default());
    let join = |(rank, (left, told)): (u16, (Vec<IndexEntry>, &Arc<Told>))| {
        let kept = vec![KeptSlots { tier: Tier::Host, left, journal: Arc::clone(told) as _ }];
        let at = dir.path().to_owned();
        thread::spawn(move || Rank::join_keeping(&at, membership(rank, 2), kept).unwrap())
    };
    let joining: Vec<_> = (0..).zip(left.into_iter().zip(&told)).map(join).collect();
    let leader = Leader::open(leader_options(dir.path(), 2), |_| ()).unwrap();
    let ranks = joining.into_iter().map(|rank| Some(rank.join().unwrap())).collect();
    (Fleet { dir, leader, ranks, lost: Arc::default() }, told)
}

#[test]
fn ranks_give_out_what_they_were_told_to_adopt() {
    const LOAD: Route = Route::new(Tier::Host, Tier::Device);
    let left =
        [vec![entry(3, 7), entry(1, 5), entry(0, 4)], vec![entry(0, 4), entry(1, 6), entry(3, 7)]];
    let (mut fleet, told) = left_with(left);
    let ours = vec![entry(1, 5), entry(3, 7), entry(0, 4), entry(2, 9)];
    assert_eq!(fleet.leader.agree(Tier::Host, ours.clone()).unwrap(), [entry(3, 7), entry(0, 4)]);
    assert_eq!(
        fleet.leader.agree(Tier::Disk, ours.clone()).unwrap(),
        [],
        "of another tier they know nothing"
    );
    // No rank has slot 2: to adopt it means nothing.
    let lives = [(3, 4), (2, 3)].map(|(slot, generation)| SlotRef {
        tier: Tier::Host,
        slot: SlotId(slot),
        generation,
    });
    fleet.leader.adopt(Tier::Host, &lives);
    let results = run(&fleet.leader, (0..4).map(|slot| op(LOAD, slot)).collect());
    let gone = Some(CopyErrorKind::Io);
    assert_eq!(kinds(&results), [gone, gone, gone, None]);
    // From the first copy on, what an earlier process left is no matter any more.
    assert_eq!(fleet.leader.agree(Tier::Host, ours).unwrap(), []);
    assert!(fleet.save(1)[0].is_ok());
    assert_eq!(
        told.map(|told| told.0.lock().clone()),
        [[(0, false), (0, true)], [(0, false), (0, true)]]
    );
    fleet.assert_works();
}

#[test]
fn ranks_tell_in_pages_what_exceeds_a_message() {
    let many: Vec<_> = (0..2 * MAX_SLOTS_TOLD as u32 + 5).map(|slot| entry(slot, slot)).collect();
    let (mut fleet, _) = left_with([many.clone(), many.clone()]);
    assert!(fleet.leader.agree(Tier::Host, many.clone()).unwrap() == many);
    fleet.assert_works();
}

#[test]
fn a_silent_rank_is_named_and_nothing_is_agreed_on() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().to_owned();
    let join = thread::spawn(move || {
        let routes = vec![SAVE];
        let hello = ToLeader::Hello(HelloFrame::new(Membership { routes, ..membership(0, 1) }));
        let mut stream = loop {
            match UnixStream::connect(at.join("ranks.sock")) {
                Ok(stream) => break stream,
                Err(_) => thread::yield_now(),
            }
        };
        stream.write_all(&frame(&hello)).unwrap();
        stream
    });
    let options = LeaderOptions { limit: Duration::from_secs(3), ..leader_options(dir.path(), 1) };
    let leader = Leader::open(options, |_| ()).unwrap();
    let stream = join.join().unwrap();
    let late = leader.agree(Tier::Host, vec![entry(0, 1)]).unwrap_err();
    assert!(matches!(late, Disagreement::Late(0)), "{late}");
    let closing = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        drop(stream);
    });
    let lost = leader.agree(Tier::Host, vec![entry(0, 1)]).unwrap_err();
    assert!(matches!(lost, Disagreement::Lost(0)), "{lost}");
    closing.join().unwrap();
    // And then it comes again, and works.
    let rank = Rank::join(dir.path(), membership(0, 1)).unwrap();
    let mut fleet = Fleet { dir, leader, ranks: vec![Some(rank)], lost: Arc::default() };
    fleet.assert_works();
}
