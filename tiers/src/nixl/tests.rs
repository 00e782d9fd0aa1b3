//! With the real library, where it is installed.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use super::*;
use crate::backend::Backend;
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done, Tier};
use crate::disk::{DiskOptions, DiskRegion};
use crate::dram::DramRegion;
use crate::error::SetupErrorKind;
use crate::memory::Memory;
use crate::object::{Store, StoreOptions};
use crate::testing::conformance::{self, Pair};
use crate::testing::{
    disk, disk_options, each, fill_pattern, frames, has_pattern, host, order, run, skip, take_all,
};

use std::sync::Arc;

const BLOCK: usize = 64 << 10;

/// `None`: not installed here, said aloud.
pub(super) fn library() -> Option<&'static Library> {
    Library::load(None).inspect_err(|error| skip("nixl", error)).ok()
}

fn agent(library: &'static Library) -> Agent {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    Agent::new(library, &name).unwrap()
}

fn plugin(
    library: &'static Library,
    name: &str,
    parameters: &[(&str, &str)],
) -> Arc<BackendHandle> {
    let parameters: BTreeMap<_, _> =
        parameters.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    Arc::new(agent(library).backend(name, &parameters).unwrap())
}

fn check_disk(parameters: &[(&str, &str)], dirs: usize, o_direct: bool) {
    let Some(library) = library() else { return };
    conformance::check(|slots, block_bytes| {
        let homes: Vec<_> = (0..dirs).map(|_| tempfile::tempdir().unwrap()).collect();
        let homes: Vec<_> = homes.iter().map(|home| home.path().to_owned()).collect();
        let memory = Arc::new(host(slots, block_bytes));
        let options = DiskOptions { o_direct, ..disk_options(&homes, slots, block_bytes) };
        let disk = Arc::new(DiskRegion::open(&options).unwrap());
        let posix = plugin(library, "POSIX", parameters);
        let backend = NixlBackend::disk(&posix, Arc::clone(&memory) as _, disk, 32).unwrap();
        Pair { memory, other: Tier::Disk, backend: Arc::new(backend) }
    });
}

#[test]
fn disk_conforms_with_io_uring() {
    check_disk(&[("use_uring", "true")], 1, true);
}

#[test]
fn disk_conforms_with_aio_striped() {
    check_disk(&[("use_aio", "true")], 3, true);
}

/// As on a file system without `O_DIRECT`.
#[test]
fn disk_conforms_through_the_page_cache() {
    check_disk(&[("use_uring", "true")], 1, false);
}

#[test]
fn a_short_file_fails_its_blocks_and_no_others() {
    let Some(library) = library() else { return };
    let home = tempfile::tempdir().unwrap();
    let memory = Arc::new(host(8, BLOCK));
    let disk = disk(&[home.path()], 8, BLOCK);
    let posix = plugin(library, "POSIX", &[("use_uring", "true")]);
    let backend =
        NixlBackend::disk(&posix, Arc::clone(&memory) as _, Arc::clone(&disk), 8).unwrap();
    let (here, there) = (frames(&memory), take_all(crate::FramePool::new(Tier::Disk, 8)));
    let out = |i: usize| order(i, here[i].slot_ref(), there[i].slot_ref());
    assert!(run(&backend, (0..8).map(out).collect()).iter().all(Result::is_ok));
    disk.file(0).set_len(4 * BLOCK as u64).unwrap();
    let back = |i: usize| order(i, there[i].slot_ref(), here[i].slot_ref());
    for (i, result) in run(&backend, (0..8).map(back).collect()).into_iter().enumerate() {
        let expected = (there[i].slot().0 >= 4).then_some(CopyErrorKind::Io);
        assert_eq!(result.err().map(|error| error.kind()), expected, "block {i}");
    }
}

/// Host memory and a disk, with all slot handles to both.
struct Bed {
    backend: NixlBackend,
    memory: Arc<DramRegion>,
    here: Vec<crate::Frame>,
    there: Vec<crate::Frame>,
    _home: tempfile::TempDir,
}

impl Bed {
    fn new(library: &'static Library, slots: u32, depth: u32) -> Self {
        let home = tempfile::tempdir().unwrap();
        let memory = Arc::new(host(slots, BLOCK));
        let disk = disk(&[home.path()], slots, BLOCK);
        let posix = plugin(library, "POSIX", &[("use_uring", "true")]);
        let backend = NixlBackend::disk(&posix, Arc::clone(&memory) as _, disk, depth).unwrap();
        let (here, there) = (frames(&memory), take_all(crate::FramePool::new(Tier::Disk, slots)));
        Self { backend, memory, here, there, _home: home }
    }

    fn out(&self, slot: usize) -> CopyOp {
        order(slot, self.here[slot].slot_ref(), self.there[slot].slot_ref())
    }

    fn back(&self, slot: usize) -> CopyOp {
        order(slot, self.there[slot].slot_ref(), self.here[slot].slot_ref())
    }
}

/// Of many operations one way and one the other way behind them: how many had ended when the one
/// did.
fn ended_before(bed: &Bed, many: Vec<CopyOp>, one: CopyOp) -> usize {
    let (report, reports) = std::sync::mpsc::channel();
    let done = |is_one: bool| {
        let report = report.clone();
        each(move |_, result: Result<(), CopyError>| report.send((is_one, result)).unwrap())
    };
    bed.backend.submit(many, done(false));
    bed.backend.submit(vec![one], done(true));
    drop(report);
    let ends: Vec<_> = reports.iter().collect();
    assert!(ends.iter().all(|(_, result)| result.is_ok()));
    ends.iter().position(|(is_one, _)| *is_one).unwrap()
}

#[test]
fn loads_wait_for_no_flushes_and_starve_none() {
    const MANY: usize = 1_500;
    let Some(library) = library() else { return };
    let bed = Bed::new(library, MANY as u32 + 1, 8);
    assert!(run(&bed.backend, vec![bed.out(MANY)]).iter().all(Result::is_ok));
    let writes = (0..MANY).map(|slot| bed.out(slot)).collect();
    let before = ended_before(&bed, writes, bed.back(MANY));
    assert!(before < MANY / 4, "a read waited for {before} of {MANY} writes");
    let reads = (0..MANY).map(|slot| bed.back(slot)).collect();
    let before = ended_before(&bed, reads, bed.out(MANY));
    assert!(before < MANY / 4, "a write waited for {before} of {MANY} reads");
}

/// The thread still moves what the disk holds: nothing else could tell when the hardware is done.
#[test]
fn a_panic_in_a_completion_loses_no_other_operation() {
    const COUNT: usize = 64;
    let Some(library) = library() else { return };
    crate::testing::panics_are_meant();
    let mut bed = Bed::new(library, COUNT as u32, 32);
    for (number, frame) in bed.here.iter_mut().enumerate() {
        fill_pattern(number, bed.memory.write(frame).unwrap());
    }
    let (report, reports) = std::sync::mpsc::channel();
    let done = Done::new(move |ended| {
        ended.iter().for_each(|&(index, _)| report.send(index).unwrap());
        assert!(
            ended.iter().all(|(index, _)| index % 7 != 3),
            "a listener panics, as this test wants it"
        );
    });
    bed.backend.submit((0..COUNT).map(|slot| bed.out(slot)).collect(), done);
    let mut reported: Vec<_> = reports.iter().collect();
    reported.sort_unstable();
    assert_eq!(reported, (0..COUNT).collect::<Vec<_>>(), "each is reported once");
    // And then it heals, and everything works again.
    for ops in [Bed::out, Bed::back] {
        let batch = (0..COUNT).map(|slot| ops(&bed, slot)).collect();
        assert!(run(&bed.backend, batch).iter().all(Result::is_ok));
    }
    let blocks = bed.here.iter().enumerate();
    assert!(
        blocks
            .into_iter()
            .all(|(number, frame)| has_pattern(number, bed.memory.read(frame).unwrap()))
    );
}

/// The library of an old version, to see it refused.
const OLD_LIBRARY: &str = "KVBM_TEST_NIXL_1_4";

#[test]
fn a_library_before_1_5_is_refused_with_a_remedy() {
    let Some(path) = std::env::var_os(OLD_LIBRARY) else {
        return skip("nixl 1.4", &format!("{OLD_LIBRARY} is not set"));
    };
    let error = Library::load(Some(Path::new(&path))).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::Unavailable);
    let message = error.to_string();
    assert!(
        message.contains("is NIXL 1.4") && message.contains("pip install 'nixl-cu12>=1.5'"),
        "{message}"
    );
}

#[test]
fn names_of_agents_do_not_clash() {
    let Some(library) = library() else { return };
    let first = agent(library);
    let error = Agent::new(library, first.name()).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::InUse);
    let name = first.name().to_owned();
    drop(first);
    assert!(Agent::new(library, &name).is_ok());
    assert_eq!(Agent::new(library, "").unwrap_err().kind(), SetupErrorKind::Invalid);
    assert_eq!(Agent::new(library, "a\0b").unwrap_err().kind(), SetupErrorKind::Invalid);
}

#[test]
fn plugins_that_cannot_run_are_unavailable() {
    let Some(library) = library() else { return };
    let agent = agent(library);
    assert!(agent.probe("POSIX").is_ok());
    assert_eq!(agent.probe("NOSUCH").unwrap_err().kind(), SetupErrorKind::Unavailable);
    let error = agent.backend("NOSUCH", &BTreeMap::new()).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::Unavailable);
    let both = [("use_uring", "true"), ("use_aio", "true")];
    let both = both.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    assert_eq!(agent.backend("POSIX", &both).unwrap_err().kind(), SetupErrorKind::Unavailable);
}

#[test]
fn a_peer_must_not_have_our_name() {
    let Some(library) = library() else { return };
    let ucx = plugin(library, "UCX", &[]);
    // SAFETY: nothing is registered.
    let own = unsafe { ucx.agent().metadata() }.unwrap();
    assert_eq!(ucx.agent().load_remote_metadata(&own).unwrap_err().kind(), SetupErrorKind::InUse);
    for nonsense in [&b""[..], b"nonsense", &own[..own.len() / 2]] {
        assert!(ucx.agent().load_remote_metadata(nonsense).is_err());
    }
}

/// An agent with memory that peers reach, and all slot handles to it.
struct Side {
    ucx: Arc<BackendHandle>,
    memory: Arc<DramRegion>,
    registration: Arc<Registration>,
    frames: Vec<crate::Frame>,
}

const SLOTS: u32 = 16;

impl Side {
    fn new(library: &'static Library) -> Self {
        let ucx = plugin(library, "UCX", &[]);
        let memory = Arc::new(host(SLOTS, BLOCK));
        let registration = Registration::memory(&ucx, &(Arc::clone(&memory) as _)).unwrap();
        let mut frames = frames(&memory);
        frames.sort_by_key(crate::Frame::slot);
        Self { ucx, memory, registration, frames }
    }

    fn segments(&self) -> Vec<RegisteredRange> {
        segments(self.memory.base().addr().get())
    }

    fn fill(&mut self, first: usize) {
        for (i, frame) in self.frames.iter_mut().enumerate() {
            fill_pattern(first + i, self.memory.write(frame).unwrap());
        }
    }

    fn holds(&self, first: usize) -> bool {
        let frames = self.frames.iter().enumerate();
        frames
            .into_iter()
            .all(|(i, frame)| has_pattern(first + i, self.memory.read(frame).unwrap()))
    }

    fn near(&self) -> Arc<SegmentList> {
        SegmentList::near(&self.registration, self.segments()).unwrap()
    }
}

fn segments(base: usize) -> Vec<RegisteredRange> {
    let segment =
        |slot| RegisteredRange { address: base + slot as usize * BLOCK, bytes: BLOCK, device: 0 };
    (0..SLOTS).map(segment).collect()
}

/// Moves all slots, and waits.
fn transfer(
    direction: Direction,
    near: &Arc<SegmentList>,
    far: &Arc<SegmentList>,
) -> Result<(), CopyError> {
    let all: Vec<c_int> = (0..SLOTS.cast_signed()).collect();
    let [near, far] = [near, far].map(|list| ListedSegments { list, indices: &all });
    let mut request = NixlRequest::new(direction, near, far)?;
    // SAFETY: the test has all slot handles of both ends, and touches nothing until the end.
    unsafe { request.post() }?;
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Poll::Ready(result) = request.poll() {
            return result;
        }
        assert!(Instant::now() < deadline, "the transfer hangs");
        std::thread::sleep(Duration::from_micros(50));
    }
}

#[test]
fn two_agents_of_a_process_exchange_blocks() {
    let Some(library) = library() else { return };
    let (mut ours, mut theirs) = (Side::new(library), Side::new(library));
    // SAFETY: the slot handles of both ends are in this test.
    let (our_data, their_data) =
        unsafe { (ours.ucx.agent().metadata().unwrap(), theirs.ucx.agent().metadata().unwrap()) };
    let them = Arc::new(ours.ucx.agent().load_remote_metadata(&their_data).unwrap());
    let us = theirs.ucx.agent().load_remote_metadata(&our_data).unwrap();
    assert_eq!((them.name(), us.name()), (theirs.ucx.agent().name(), ours.ucx.agent().name()));
    them.connect().unwrap();
    let far = SegmentList::of_peer(&them, theirs.segments()).unwrap();
    ours.fill(0);
    transfer(Direction::Write, &ours.near(), &far).unwrap();
    assert!(theirs.holds(0));
    theirs.fill(100);
    transfer(Direction::Read, &ours.near(), &far).unwrap();
    assert!(ours.holds(100));
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(library) = library() else { return };
    let (ours, theirs) = (Side::new(library), Side::new(library));
    let beyond = RegisteredRange {
        address: ours.memory.base().addr().get() + (1 << 40),
        bytes: BLOCK,
        device: 0,
    };
    let error = SegmentList::near(&ours.registration, [beyond]).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::Unavailable);
    let (near, other) = (ours.near(), theirs.near());
    let kind = |result: Result<NixlRequest, CopyError>| result.err().map(|error| error.kind());
    for (far, near_at, far_at) in [
        (&near, &[0][..], &[16][..]),
        (&near, &[-1], &[0]),
        (&near, &[0, 1], &[0]),
        (&near, &[], &[]),
        (&other, &[0], &[0]),
    ] {
        let near = ListedSegments { list: &near, indices: near_at };
        let far = ListedSegments { list: far, indices: far_at };
        let request = NixlRequest::new(Direction::Write, near, far);
        assert_eq!(kind(request), Some(CopyErrorKind::Refused));
    }
}

/// Where the two processes of a test leave what the other is to know.
const MEETING_PLACE: &str = "KVBM_TEST_MEETING_PLACE";

/// Leaves a file that is complete as soon as it is there.
fn leave(place: &Path, name: &str, bytes: &[u8]) {
    let unfinished = place.join(format!("{name}.unfinished"));
    std::fs::write(&unfinished, bytes).unwrap();
    std::fs::rename(unfinished, place.join(name)).unwrap();
}

fn await_file(place: &Path, name: &str) -> Vec<u8> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Ok(bytes) = std::fs::read(place.join(name)) {
            return bytes;
        }
        assert!(Instant::now() < deadline, "the other process did not leave {name}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Address of the first slot, then the agent's metadata.
fn introduce(side: &Side, place: &Path, name: &str) {
    let base = side.memory.base().addr().get().to_le_bytes();
    // SAFETY: the test has all slot handles, and the other process acts for it.
    let metadata = unsafe { side.ucx.agent().metadata() }.unwrap();
    leave(place, name, &[&base[..], &metadata].concat());
}

fn load_remote_metadata(side: &Side, place: &Path, name: &str) -> (Arc<RemotePeer>, usize) {
    let bytes = await_file(place, name);
    let (base, metadata) = bytes.split_first_chunk().unwrap();
    (
        Arc::new(side.ucx.agent().load_remote_metadata(metadata).unwrap()),
        usize::from_le_bytes(*base),
    )
}

/// The other process of the tests below: it is written to, checks what arrived, and says so.
#[test]
#[ignore = "started by other tests, as a process of its own"]
fn peer_process() {
    let Some(place) = std::env::var_os(MEETING_PLACE).map(PathBuf::from) else { return };
    let mut side = Side::new(Library::load(None).unwrap());
    introduce(&side, &place, "theirs");
    let _us = load_remote_metadata(&side, &place, "ours");
    await_file(&place, "written");
    assert!(side.holds(0));
    side.fill(100);
    leave(&place, "filled", b"");
    // Until it is killed.
    std::thread::sleep(Duration::from_mins(1));
}

struct PeerProcess(Child);

impl PeerProcess {
    fn start(place: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "nixl::tests::peer_process", "--ignored"])
            .env(MEETING_PLACE, place);
        Self(command.spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

#[test]
fn two_processes_exchange_blocks_and_one_survives_the_other() {
    let Some(library) = library() else { return };
    let place = tempfile::tempdir().unwrap();
    let mut process = PeerProcess::start(place.path());
    let mut ours = Side::new(library);
    introduce(&ours, place.path(), "ours");
    let (them, base) = load_remote_metadata(&ours, place.path(), "theirs");
    them.connect().unwrap();
    let far = SegmentList::of_peer(&them, segments(base)).unwrap();
    ours.fill(0);
    transfer(Direction::Write, &ours.near(), &far).unwrap();
    leave(place.path(), "written", b"");
    await_file(place.path(), "filled");
    transfer(Direction::Read, &ours.near(), &far).unwrap();
    assert!(ours.holds(100));
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        process.kill();
    });
    let until_it_fails = |direction| loop {
        if let Err(error) = transfer(direction, &ours.near(), &far) {
            return error.kind();
        }
    };
    let gone = [CopyErrorKind::Unavailable, CopyErrorKind::TimedOut, CopyErrorKind::Refused];
    assert!(gone.contains(&until_it_fails(Direction::Write)));
    assert!(gone.contains(&until_it_fails(Direction::Read)));
    killer.join().unwrap();
}

/// An S3-compatible store to test with, `http://host:port`, with a bucket `kvbm` and the keys
/// `test` and `test`.
const STORE: &str = "KVBM_TEST_S3";

#[test]
fn objects_conform() {
    let Some(library) = library() else { return };
    let Ok(endpoint) = std::env::var(STORE) else {
        return skip("s3", &format!("{STORE} is not set"));
    };
    let key = Some("test".to_owned());
    let options = StoreOptions {
        endpoint: Some(endpoint),
        region: None,
        access_key: key.clone(),
        secret_key: key,
    };
    let url = "s3://kvbm/conformance";
    let parameters = object_parameters(url, &options, 8).unwrap();
    let obj = Arc::new(agent(library).backend("OBJ", &parameters).unwrap());
    conformance::check(|slots, block_bytes| {
        let store = Store::open(url, &options).unwrap();
        let memory = Arc::new(host(slots, block_bytes));
        let options = NixlObjectOptions { namespace: "test".into(), slots, concurrency: 8 };
        let backend =
            NixlBackend::objects(&obj, Arc::clone(&memory) as _, store, &options).unwrap();
        Pair { memory, other: Tier::Object, backend: Arc::new(backend) }
    });
    let store = Store::open(url, &options).unwrap();
    // The suite's last backend ends itself, behind its back.
    let deadline = Instant::now() + Duration::from_secs(20);
    while store.count_objects() > 0 {
        assert!(Instant::now() < deadline, "objects are left behind");
        std::thread::sleep(Duration::from_millis(50));
    }
}
