//! With the real library, where it is installed: over what UCX chooses between processes of one
//! host, where the kernel copies; and over TCP, where reads last until the holder has answered, as
//! on a network.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::NixlPeers;
use super::reader::ReadOrder;
use crate::copy::{CopyError, CopyErrorKind, SlotId};
use crate::dram::{DramOptions, DramRegion};
use crate::error::SetupErrorKind;
use crate::frame::{Frame, FramePool};
use crate::geometry::{ALIGNMENT, Geometry};
use crate::nixl::agent::Agent;
use crate::nixl::tests::library;
use crate::peers::{OneSided, SlotRead, SlotReads, TierPlace, UnmetReader};
use crate::testing::{fill_pattern, freeze, has_pattern, host};

const BLOCK: usize = 1 << 20;
const SLOTS: u32 = 64;
const LIMIT: Duration = Duration::from_secs(30);
/// UCX's settings.
const TCP: &str = "TLS=tcp,PROTO_EMULATION_ENABLE=y";
const ANY: &str = "";

fn peers(memory: &Arc<DramRegion>, ucx: &str) -> NixlPeers {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let parameters = BTreeMap::from([("engine_config".to_owned(), ucx.to_owned())]);
    NixlPeers::new(library().unwrap(), parameters, Arc::clone(memory), &name).unwrap()
}

/// A host tier, each slot filled with a pattern of its own.
fn filled(memory: &DramRegion, first: usize) -> FramePool {
    let mut pool = memory.frames().unwrap();
    let mut frames: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    for frame in &mut frames {
        let slot = frame.slot().0 as usize;
        fill_pattern(first + slot, memory.write(frame).unwrap());
    }
    frames.into_iter().for_each(|frame| pool.give_back(frame));
    pool
}

struct Here {
    peers: NixlPeers,
    memory: Arc<DramRegion>,
    pool: FramePool,
}

impl Here {
    fn new(ucx: &str) -> Self {
        let memory = Arc::new(host(SLOTS, BLOCK));
        let pool = filled(&memory, 500);
        Self { peers: peers(&memory, ucx), memory, pool }
    }

    fn frames(&mut self, count: usize) -> Vec<Frame> {
        std::iter::from_fn(|| self.pool.take()).take(count).collect()
    }

    /// A reader that has met a holder of this name.
    fn meet(&self, name: &str, metadata: &[u8], place: TierPlace) -> Box<dyn SlotReads> {
        self.peers.reader().unwrap().meet(name, metadata, place, None).unwrap()
    }
}

type Ended = (Vec<Frame>, Result<(), CopyError>);

fn read(reads: &dyn SlotReads, from: Vec<u32>, to: Vec<Frame>) -> Receiver<Ended> {
    read_bytes(reads, from, to, None)
}

fn read_bytes(
    reads: &dyn SlotReads,
    from: Vec<u32>,
    to: Vec<Frame>,
    bytes: Option<Range<usize>>,
) -> Receiver<Ended> {
    let (told, ended) = channel();
    let done = Box::new(move |frames, result| told.send((frames, result)).unwrap());
    let from = from.into_iter().map(SlotId).collect();
    reads.read(SlotRead { from, to, bytes }, done);
    ended
}

/// Frame `i` has what lies in slot `from[i]` of the holder.
fn all_arrived(memory: &DramRegion, frames: &[Frame], from: &[u32]) -> bool {
    let pairs = frames.iter().zip(from);
    pairs.into_iter().all(|(frame, &slot)| has_pattern(slot as usize, memory.read(frame).unwrap()))
}

fn every_byte_comes(ucx: &str) {
    if library().is_none() {
        return;
    }
    let (there, mut here) = (Arc::new(host(SLOTS, BLOCK)), Here::new(ucx));
    let _theirs = filled(&there, 0);
    let holder = peers(&there, ucx);
    let (metadata, place) = holder.place().unwrap();
    let unmet = here.peers.reader().unwrap();
    holder.admit(unmet.metadata()).unwrap();
    let reads = unmet.meet(&holder.name, &metadata, place, None).unwrap();
    // Neighbours and others.
    let from: Vec<u32> = (0..20).chain([40, 30, 31]).collect();
    let frames = here.frames(from.len());
    let (frames, result) = read(&*reads, from.clone(), frames).recv_timeout(LIMIT).unwrap();
    result.unwrap();
    assert!(all_arrived(&here.memory, &frames, &from));
    assert!(here.memory.shared_checksums().unwrap().get(frames[0].slot()).is_none());
    // What is not there is refused, and harms nothing.
    let (frames, result) = read(&*reads, vec![SLOTS; 23], frames).recv_timeout(LIMIT).unwrap();
    assert_eq!(result.unwrap_err().kind(), CopyErrorKind::Refused);
    let (frames, result) = read(&*reads, vec![7], frames).recv_timeout(LIMIT).unwrap();
    assert_eq!(result.unwrap_err().kind(), CopyErrorKind::Refused, "of other length");
    let (frames, result) = read(&*reads, (0..23).collect(), frames).recv_timeout(LIMIT).unwrap();
    assert!(result.is_ok() && all_arrived(&here.memory, &frames, &(0..23).collect::<Vec<_>>()));
    assert!(!reads.is_over());
}

#[test]
fn every_byte_comes_by_shared_memory() {
    every_byte_comes(ANY);
}

#[test]
fn every_byte_comes_over_tcp() {
    every_byte_comes(TCP);
}

/// Of each block the bytes in the middle, and no others.
fn parts_of_blocks_come(ucx: &str) {
    if library().is_none() {
        return;
    }
    let (there, mut here) = (Arc::new(host(SLOTS, BLOCK)), Here::new(ucx));
    let _theirs = filled(&there, 0);
    let holder = peers(&there, ucx);
    let (metadata, place) = holder.place().unwrap();
    let reads = here.meet(&holder.name, &metadata, place);
    let from: Vec<u32> = (3..23).rev().chain([40, 41]).collect();
    let (middle, mut frames) = (BLOCK / 3..BLOCK / 2 + 1, here.frames(from.len()));
    for bad in [BLOCK - 1..BLOCK + 1, 7..7] {
        let ended = read_bytes(&*reads, from.clone(), frames, Some(bad));
        let result;
        (frames, result) = ended.recv_timeout(LIMIT).unwrap();
        assert_eq!(result.unwrap_err().kind(), CopyErrorKind::Refused);
    }
    for bad in [vec![SLOTS; 22], vec![7]] {
        let ended = read_bytes(&*reads, bad, frames, Some(middle.clone()));
        let result;
        (frames, result) = ended.recv_timeout(LIMIT).unwrap();
        assert_eq!(result.unwrap_err().kind(), CopyErrorKind::Refused);
    }
    let ended = read_bytes(&*reads, from.clone(), frames, Some(middle.clone()));
    let (frames, result) = ended.recv_timeout(LIMIT).unwrap();
    result.unwrap();
    let pattern = |number: usize| {
        let mut block = vec![0; BLOCK];
        fill_pattern(number, &mut block);
        block
    };
    for (frame, from) in frames.iter().zip(from) {
        let (came, mut expected) = (here.memory.read(frame).unwrap(), pattern(from as usize));
        assert!(came[middle.clone()] == expected[middle.clone()], "slot {from}");
        expected = pattern(500 + frame.slot().0 as usize);
        assert!(came[..middle.start] == expected[..middle.start]);
        assert!(came[middle.end..] == expected[middle.end..]);
    }
    assert!(!reads.is_over());
}

#[test]
fn parts_of_blocks_come_by_shared_memory() {
    parts_of_blocks_come(ANY);
}

#[test]
fn parts_of_blocks_come_over_tcp() {
    parts_of_blocks_come(TCP);
}

/// Whatever a block is here: of the holder's the reads need to know no more.
fn other_slots_come_into_scratch(ucx: &str) {
    if library().is_none() {
        return;
    }
    // Not whole pages, and with room behind each.
    let bytes = BLOCK / 2 + 77;
    let geometry = Geometry::new(SLOTS, bytes).unwrap().with_room(3 * ALIGNMENT).unwrap();
    let options = DramOptions { geometry, huge_pages: false, fault_threads: 1 };
    let (there, mut here) = (Arc::new(DramRegion::host(options).unwrap()), Here::new(ucx));
    let _theirs = filled(&there, 0);
    let holder = peers(&there, ucx);
    let (metadata, place) = holder.place().unwrap();
    for stride in [place.stride / 2, place.stride + 1, u64::MAX] {
        let scratch = TierPlace { stride, ..place }.scratch(4, bytes);
        assert_eq!(scratch.unwrap_err().kind(), SetupErrorKind::Invalid, "{stride}");
    }
    let scratch = Arc::new(place.scratch(4, bytes).unwrap());
    let mut frames: Vec<_> = crate::testing::frames(&scratch);
    let unmet = here.peers.reader().unwrap();
    let reads = unmet.meet(&holder.name, &metadata, place, Some(Arc::clone(&scratch))).unwrap();
    for from in [vec![9, 3, 4, 60], vec![0, 1, 2, 3], vec![63, 62, 61, 60]] {
        let result;
        (frames, result) = read(&*reads, from.clone(), frames).recv_timeout(LIMIT).unwrap();
        result.unwrap();
        assert!(all_arrived(&scratch, &frames, &from));
    }
    // The host tier is no part of it.
    let (own, result) = read(&*reads, vec![0], here.frames(1)).recv_timeout(LIMIT).unwrap();
    assert_eq!((own.len(), result.unwrap_err().kind()), (1, CopyErrorKind::Refused));
    // The memory stays as long as the reads.
    let memory = Arc::downgrade(&scratch);
    drop((scratch, frames));
    assert!(memory.upgrade().is_some() && !reads.is_over());
    drop(reads);
    here.peers.close();
    let deadline = Instant::now() + LIMIT;
    // A thread that looks for ends may have just looked.
    while memory.strong_count() > 0 {
        assert!(Instant::now() < deadline, "it is still there");
        std::thread::yield_now();
    }
}

#[test]
fn other_slots_come_into_scratch_by_shared_memory() {
    other_slots_come_into_scratch(ANY);
}

#[test]
fn other_slots_come_into_scratch_over_tcp() {
    other_slots_come_into_scratch(TCP);
}

#[test]
fn a_dropped_reader_destroys_its_agent() {
    let Some(library) = library() else { return };
    let (there, mut here) = (Arc::new(host(SLOTS, BLOCK)), Here::new(ANY));
    let holder = peers(&there, ANY);
    let (metadata, place) = holder.place().unwrap();
    let reads = here.meet(&holder.name, &metadata, place);
    let name = format!("{}/0", here.peers.name);
    assert!(Agent::new(library, &name).is_err(), "it is there");
    reads.end("this test wants it");
    let frames = here.frames(1);
    let (_, result) = read(&*reads, vec![0], frames).recv_timeout(LIMIT).unwrap();
    assert_eq!(result.unwrap_err().kind(), CopyErrorKind::Unavailable);
    drop(reads);
    here.peers.close();
    Agent::new(library, &name).unwrap();
}

#[test]
fn another_agent_or_other_slots_are_refused() {
    if library().is_none() {
        return;
    }
    let (there, here) = (Arc::new(host(SLOTS, BLOCK)), Here::new(ANY));
    let holder = peers(&there, ANY);
    let (metadata, place) = holder.place().unwrap();
    for (name, metadata, place) in [
        ("another", &metadata[..], place),
        (&holder.name, &metadata[..metadata.len() / 2], place),
        (&holder.name, &metadata[..], TierPlace { stride: 4096, ..place }),
        (&holder.name, &metadata[..], TierPlace { slots: SLOTS + 1, ..place }),
        (&holder.name, &metadata[..], TierPlace { base: u64::MAX - 4096, ..place }),
    ] {
        let met = here.peers.reader().unwrap().meet(name, metadata, place, None);
        met.map(drop).unwrap_err();
    }
    holder.admit(b"nonsense").unwrap_err();
}

/// Over TCP the holder would have to send the bytes, and die with its reader.
#[test]
fn reads_that_ucx_would_emulate_fail() {
    if library().is_none() {
        return;
    }
    let (there, mut here) = (Arc::new(host(SLOTS, BLOCK)), Here::new("TLS=tcp"));
    let holder = peers(&there, "TLS=tcp");
    let (metadata, place) = holder.place().unwrap();
    let reads = here.meet(&holder.name, &metadata, place);
    let frames = here.frames(4);
    let (frames, result) = read(&*reads, vec![0, 1, 2, 3], frames).recv_timeout(LIMIT).unwrap();
    assert!(result.is_err() && frames.len() == 4 && reads.is_over());
}

#[test]
fn settings_of_ucx_that_were_chosen_are_kept() {
    let with = |chosen: &str| {
        let mut settings = chosen.to_owned();
        super::add_settings(&mut settings);
        settings
    };
    assert_eq!(with(""), "TCP_USER_TIMEOUT=3s,PROTO_EMULATION_ENABLE=n,TLS=^sysv");
    assert_eq!(
        with("TLS=rc, TCP_USER_TIMEOUT=9s"),
        "TLS=rc, TCP_USER_TIMEOUT=9s,PROTO_EMULATION_ENABLE=n"
    );
}

/// Where the holder's process leaves what readers are to know.
const MEETING_PLACE: &str = "KVBM_TEST_NIXL_PLACE";
const UCX: &str = "KVBM_TEST_NIXL_UCX";

/// The other process of the tests below.
#[test]
#[ignore = "started by other tests, as a process of its own"]
fn holder_process() {
    let Some(place) = std::env::var_os(MEETING_PLACE).map(PathBuf::from) else { return };
    let memory = Arc::new(host(SLOTS, BLOCK));
    let _pool = filled(&memory, 0);
    let peers = peers(&memory, &std::env::var(UCX).unwrap());
    let (metadata, TierPlace { base, stride, slots }) = peers.place().unwrap();
    let numbers = format!("{} {base} {stride} {slots}\n", peers.name);
    let unfinished = place.join("unfinished");
    std::fs::write(&unfinished, [numbers.as_bytes(), &metadata].concat()).unwrap();
    std::fs::rename(unfinished, place.join("holder")).unwrap();
    // Until it is killed.
    std::thread::sleep(Duration::from_mins(5));
}

struct HolderProcess {
    child: Child,
    _place: tempfile::TempDir,
    name: String,
    metadata: Vec<u8>,
    place: TierPlace,
}

impl HolderProcess {
    fn start(ucx: &str) -> Self {
        let home = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "nixl::peer::tests::holder_process", "--ignored"]);
        let child = command.env(MEETING_PLACE, home.path()).env(UCX, ucx).spawn().unwrap();
        let said = await_file(&home.path().join("holder"));
        let end = said.iter().position(|&byte| byte == b'\n').unwrap();
        let numbers = std::str::from_utf8(&said[..end]).unwrap();
        let [name, base, stride, slots] =
            numbers.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let place = TierPlace {
            base: base.parse().unwrap(),
            stride: stride.parse().unwrap(),
            slots: slots.parse().unwrap(),
        };
        let metadata = said[end + 1..].to_vec();
        Self { child, _place: home, name: name.to_owned(), metadata, place }
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    fn reader(&self, here: &Here) -> Box<dyn SlotReads> {
        here.meet(&self.name, &self.metadata, self.place)
    }
}

impl Drop for HolderProcess {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn await_file(path: &Path) -> Vec<u8> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Ok(bytes) = std::fs::read(path) {
            return bytes;
        }
        assert!(Instant::now() < deadline, "the other process does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Warms up, so that the next read is a read and nothing else.
fn first_read(here: &mut Here, reads: &dyn SlotReads) {
    let frames = here.frames(1);
    let (frames, result) = read(reads, vec![3], frames).recv_timeout(LIMIT).unwrap();
    assert!(result.is_ok() && all_arrived(&here.memory, &frames, &[3]));
    frames.into_iter().for_each(|frame| here.pool.give_back(frame));
}

/// NIXL cancels nothing: only the end of the agent keeps late bytes out of slots that have another
/// owner by then.
#[test]
fn slots_of_a_frozen_holder_return_and_nothing_lands_later() {
    if library().is_none() {
        return;
    }
    for round in 0..3 {
        let (holder, mut here) = (HolderProcess::start(TCP), Here::new(TCP));
        let reads = holder.reader(&here);
        first_read(&mut here, &*reads);
        freeze(holder.child.id());
        let frames = here.frames(SLOTS as usize - 1);
        let (from, count) = ((1..SLOTS).collect(), frames.len());
        let ended = read(&*reads, from, frames);
        assert!(ended.recv_timeout(Duration::from_millis(200)).is_err(), "it is frozen");
        reads.end("this test wants it");
        let (mut frames, result) = ended.recv_timeout(LIMIT).unwrap();
        assert_eq!((frames.len(), result.is_err()), (count, true));
        // They have another owner now.
        for (number, frame) in frames.iter_mut().enumerate() {
            fill_pattern(900 + number, here.memory.write(frame).unwrap());
        }
        holder.signal("-CONT");
        // It goes on with what it was asked for, or dies of it: UCX ends a holder that it has send
        // to a reader which is gone.
        std::thread::sleep(Duration::from_millis(500));
        for (number, frame) in frames.iter().enumerate() {
            let block = here.memory.read(frame).unwrap();
            assert!(has_pattern(900 + number, block), "round {round}: late bytes in {number}");
        }
    }
}

#[test]
fn a_killed_holder_ends_its_reads_and_no_others() {
    if library().is_none() {
        return;
    }
    for ucx in [TCP, ANY] {
        let (holder, other) = (HolderProcess::start(ucx), HolderProcess::start(ucx));
        let mut here = Here::new(ucx);
        let (reads, others) = (holder.reader(&here), other.reader(&here));
        first_read(&mut here, &*reads);
        drop(holder);
        let frames = here.frames(8);
        let (frames, result) =
            read(&*reads, (0..8).collect(), frames).recv_timeout(LIMIT).expect("it ends");
        assert!(result.is_err() && reads.is_over());
        let (frames, result) =
            read(&*others, (0..8).collect(), frames).recv_timeout(LIMIT).unwrap();
        assert!(result.is_ok(), "{result:?}");
        assert!(all_arrived(&here.memory, &frames, &(0..8).collect::<Vec<_>>()));
    }
}

/// The goal is 1 µs. Over TCP the bytes move later, by looks for the end.
#[test]
#[ignore = "tests/peers.sh transfer: it measures"]
fn what_a_post_costs() {
    const BLOCKS: usize = 512;
    const POSTS: usize = 21;
    if library().is_none() {
        return;
    }
    let memory = || Arc::new(host(BLOCKS as u32, 64 << 10));
    let (there, here) = (memory(), memory());
    let (_theirs, mut ours) = (filled(&there, 0), filled(&here, 0));
    let (holder, reader) = (peers(&there, TCP), peers(&here, TCP));
    let (metadata, place) = holder.place().unwrap();
    let agent = reader.agent().unwrap();
    holder.admit(agent.metadata()).unwrap();
    let agent = agent.met(&holder.name, &metadata, place, Arc::clone(&here)).unwrap();
    // No two are neighbours: each is a piece of its own.
    let from: Vec<_> = (0..BLOCKS as u32).map(|n| SlotId(n * 37 % BLOCKS as u32)).collect();
    let mut frames: Vec<_> = std::iter::from_fn(|| ours.take()).collect();
    let mut costs = Vec::new();
    for _ in 0..POSTS {
        let (told, ended) = channel();
        let done = Box::new(move |frames, result| told.send((frames, result)).unwrap());
        let read = SlotRead { from: from.clone(), to: frames, bytes: None };
        let order = ReadOrder::new(read, done);
        let began = clock_gettime(ClockId::ThreadCPUTime);
        agent.post(order);
        let took = clock_gettime(ClockId::ThreadCPUTime) - began;
        costs.push(Duration::try_from(took).unwrap().as_secs_f64() * 1e6 / BLOCKS as f64);
        let deadline = Instant::now() + LIMIT;
        let (back, result) = loop {
            assert!(Instant::now() < deadline, "it does not end");
            agent.look();
            if let Ok(ended) = ended.try_recv() {
                break ended;
            }
        };
        let result: Result<(), CopyError> = result;
        result.unwrap();
        frames = back;
    }
    costs.sort_by(f64::total_cmp);
    println!(
        "figures {{\"post\": {{\"blocks\": {BLOCKS}, \"us_a_block\": {:.3}}}}}",
        costs[POSTS / 2]
    );
}
