#![expect(unsafe_code, reason = "asks the kernel for what it refuses, and ends processes")]

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::ptr::null_mut;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect};

use super::*;
use crate::checksum::{RunningChecksum, checksum};
use crate::copy::{CopyErrorKind, SlotId};
use crate::dram::DramRegion;
use crate::frame::Frame;
use crate::geometry::Geometry;
use crate::memory::Memory;
use crate::testing::{
    Child, Tensors, fill_pattern, frames, has_pattern, holds_in_a_child, host, options,
};

const SLOTS: u32 = 5;
/// Ends amid a page and a line.
const BLOCK: usize = 3 * 4096 + 77;

/// A holder whose slots have the patterns of their numbers, from `seed` on.
fn holder(seed: usize) -> DramRegion {
    let region = DramRegion::shareable_host(options(SLOTS, BLOCK)).unwrap();
    let mut frames = region.frames().unwrap();
    while let Some(mut frame) = frames.take() {
        fill_pattern(seed + frame.slot().0 as usize, region.write(&mut frame).unwrap());
        drop(frame);
    }
    region
}

fn pair() -> (UnixStream, UnixStream) {
    UnixStream::pair().unwrap()
}

/// What this process gets if it hands the region over to itself.
fn handed_over(region: &DramRegion) -> SharedMemory {
    let (ours, theirs) = pair();
    send_memory(&theirs, region.shareable().unwrap()).unwrap();
    receive_memory(&ours).unwrap()
}

/// A reader: slots of its own, and all their handles.
fn reader() -> (DramRegion, Vec<Frame>) {
    let region = host(SLOTS, BLOCK);
    let all = frames(&region);
    (region, all)
}

/// Whether all blocks arrive with the patterns from `seed` on, and with their checksums.
fn arrives(peer: &PeerMemory, seed: usize) -> bool {
    let (region, frames) = reader();
    frames.into_iter().all(|mut frame| {
        let slot = frame.slot();
        let sum = peer.copy_into(slot, &region, &mut frame).unwrap();
        let block = region.read(&frame).unwrap();
        assert_eq!(sum, checksum(block));
        assert_eq!(region.checksums().unwrap().get(slot), Some(sum));
        has_pattern(seed + slot.0 as usize, block)
    })
}

#[test]
fn blocks_arrive_with_their_checksums() {
    let region = holder(7);
    let memory = handed_over(&region);
    assert_eq!(memory.geometry(), region.geometry());
    let peer = PeerMemory::map(&memory).unwrap();
    assert!(arrives(&peer, 7));
}

#[test]
fn a_block_arrives_in_wider_slots_of_an_emulated_device() {
    let peer = PeerMemory::map(&handed_over(&holder(1))).unwrap();
    let mut roomy = options(1, BLOCK);
    roomy.geometry = roomy.geometry.with_room(9000).unwrap();
    for region in [DramRegion::host(roomy), DramRegion::emulated_device(options(1, BLOCK))] {
        let region = region.unwrap();
        let mut frame = region.frames().unwrap().take().unwrap();
        let sum = peer.copy_into(SlotId(4), &region, &mut frame).unwrap();
        assert!(has_pattern(5, region.read(&frame).unwrap()));
        assert_eq!(sum, checksum(region.read(&frame).unwrap()));
    }
}

#[test]
fn parts_of_blocks_arrive_and_are_summed() {
    let peer = PeerMemory::map(&handed_over(&holder(1))).unwrap();
    let mut block = vec![0; BLOCK];
    fill_pattern(4, &mut block);
    let ours = host(1, BLOCK);
    let mut frame = ours.frames().unwrap().take().unwrap();
    for parts in [1, 2, 3, 10] {
        let (arrived, mut sum) = (ours.write(&mut frame).unwrap(), RunningChecksum::new());
        arrived.fill(0);
        for part in (0..BLOCK).collect::<Vec<_>>().chunks(BLOCK.div_ceil(parts)) {
            let bytes = part[0]..part[0] + part.len();
            peer.copy_part(SlotId(3), bytes.clone(), &mut arrived[bytes.clone()], &mut sum)
                .unwrap();
            assert_eq!(sum.value(), checksum(&block[..bytes.end]));
        }
        assert!(arrived == block);
    }
    let mut sum = RunningChecksum::new();
    for (slot, bytes) in [(SLOTS, 0..1), (0, BLOCK..BLOCK + 1), (0, 0..2)] {
        assert!(peer.copy_part(SlotId(slot), bytes, &mut [0], &mut sum).is_err());
    }
}

#[test]
fn blocks_arrive_in_an_engines_slots_with_their_checksums() {
    let peer = PeerMemory::map(&handed_over(&holder(7))).unwrap();
    for cut in [1, 3, 24, 77] {
        let (engine, view) = Tensors::new(SLOTS, BLOCK, cut).shared();
        for slot in (0..SLOTS).map(SlotId) {
            // Backwards: each has a neighbour that is not written yet.
            let to = SlotId(SLOTS - 1 - slot.0);
            let sum = peer.copy_to_engine(slot, &engine, to).unwrap();
            let block = view.read(to);
            assert!(has_pattern(7 + slot.0 as usize, &block), "{cut} pieces");
            assert_eq!(sum, checksum(&block));
        }
    }
}

#[test]
fn what_no_engine_can_take_is_refused() {
    let peer = PeerMemory::map(&handed_over(&holder(1))).unwrap();
    let (engine, other) = (Tensors::new(1, BLOCK, 3), Tensors::new(1, BLOCK + 1, 1));
    let (engine, other) = (engine.into_region(), other.into_region());
    for (from, to, slot) in [(SLOTS, &engine, 0), (0, &engine, 1), (0, &other, 0)] {
        let error = peer.copy_to_engine(SlotId(from), to, SlotId(slot)).unwrap_err();
        assert_eq!(error.kind(), CopyErrorKind::Refused, "{error}");
    }
}

#[test]
fn what_cannot_be_copied_is_refused_and_touches_nothing() {
    let peer = PeerMemory::map(&handed_over(&holder(1))).unwrap();
    let (ours, other) = (host(1, BLOCK), host(1, BLOCK + 1));
    let take = |region: &DramRegion| region.frames().unwrap().take().unwrap();
    let (mut frame, mut others) = (take(&ours), take(&other));
    ours.write(&mut frame).unwrap().fill(9);
    ours.remember_checksum(&frame);
    let refused = [
        peer.copy_into(SlotId(SLOTS), &ours, &mut frame),
        peer.copy_into(SlotId(0), &ours, &mut others),
        peer.copy_into(SlotId(0), &other, &mut others),
    ];
    for error in refused.map(Result::unwrap_err) {
        assert_eq!(error.kind(), CopyErrorKind::Refused, "{error}");
    }
    assert!(ours.read(&frame).unwrap().iter().all(|&byte| byte == 9));
    assert!(ours.checksums().unwrap().get(SlotId(0)).is_some(), "and its checksum is known");
}

#[test]
fn only_a_host_tier_made_for_sharing_is_shared() {
    assert!(host(1, BLOCK).shareable().is_none());
    assert!(DramRegion::emulated_device(options(1, BLOCK)).unwrap().shareable().is_none());
}

/// Lines of this process's mappings that are of a file.
fn mappings(of: u64) -> Vec<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let is_its = |line: &&str| line.split_whitespace().nth(4) == Some(&of.to_string());
    maps.lines().filter(is_its).map(str::to_owned).collect()
}

/// Descriptors of this process that are of a file.
fn descriptors(of: u64) -> usize {
    let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
    open.filter(|entry| fs::metadata(entry.path()).is_ok_and(|found| found.ino() == of)).count()
}

fn inode(memory: &SharedMemory) -> u64 {
    memory.file().metadata().unwrap().ino()
}

fn map_writable(file: BorrowedFd<'_>) -> Result<(), Errno> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the system's choice; a test that gets it fails.
    unsafe { mmap(null_mut(), 4096, access, MapFlags::SHARED, file, 0) }.map(drop)
}

#[test]
fn a_reader_cannot_write() {
    let region = holder(1);
    let memory = handed_over(&region);
    let peer = PeerMemory::map(&memory).unwrap();
    let ways = mappings(inode(&memory));
    let readable = ways.iter().filter(|line| line.contains(" r--s ")).count();
    assert_eq!((ways.len(), readable), (2, 1), "the holder's and the reader's: {ways:?}");
    let start = peer.slot(SlotId(0)).unwrap().cast_mut().cast();
    // SAFETY: the kernel refuses, else the test fails.
    let writable = unsafe { mprotect(start, 4096, MprotectFlags::READ | MprotectFlags::WRITE) };
    assert_eq!(writable, Err(Errno::ACCESS));
    assert_eq!(map_writable(memory.file().as_fd()), Err(Errno::ACCESS));
    // Nor can one that opens the file anew, as its owner may.
    let path = format!("/proc/self/fd/{}", memory.file().as_raw_fd());
    let mut reopened = OpenOptions::new().read(true).write(true).open(path).unwrap();
    assert_eq!(map_writable(reopened.as_fd()), Err(Errno::PERM));
    for changed in [reopened.write_all(b"x"), reopened.set_len(0), reopened.set_len(1 << 20)] {
        assert_eq!(changed.unwrap_err().raw_os_error(), Some(libc::EPERM));
    }
    assert!(fcntl_add_seals(&reopened, SealFlags::WRITE).is_err());
    assert!(arrives(&peer, 1));
}

/// A file such as a peer could make up.
fn made_up(bytes: usize, filled: bool, seals: SealFlags) -> SharedMemory {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("made-up", flags).unwrap());
    if filled {
        (&file).write_all(&vec![1; bytes]).unwrap();
    }
    ftruncate(&file, bytes as u64).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    SharedMemory::new(file, Geometry::new(SLOTS, BLOCK).unwrap())
}

#[test]
fn memory_that_its_maker_can_take_away_is_refused() {
    let whole = Geometry::new(SLOTS, BLOCK).unwrap().bytes();
    let all = SharedMemory::SEALS;
    PeerMemory::map(&made_up(whole, true, all)).unwrap();
    let cases = [
        (made_up(whole, true, SealFlags::empty()), "SHRINK"),
        (made_up(whole, true, all - SealFlags::SHRINK), "without SealFlags(SHRINK)"),
        (made_up(whole, true, all - SealFlags::GROW), "without SealFlags(GROW)"),
        (made_up(whole, true, all - SealFlags::FUTURE_WRITE), "without SealFlags(FUTURE_WRITE)"),
        (made_up(whole - 1, true, all), "81919 bytes, and 5 slots of 16384 bytes take 81920"),
        (made_up(whole, false, all), "memory for 0 of 81920 bytes"),
        (SharedMemory::new(tempfile::tempfile().unwrap(), Geometry::new(1, 1).unwrap()), "SHRINK"),
    ];
    for (memory, part) in cases {
        let error = PeerMemory::map(&memory).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Untrusted, "{error}");
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
}

/// Sends bytes with descriptors.
fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let parts = [std::io::IoSlice::new(bytes)];
    let sent = sendmsg(stream, &parts, &mut ancillary, SendFlags::empty()).unwrap();
    assert_eq!(sent, bytes.len());
}

#[test]
fn any_number_of_descriptors_but_one_is_refused_and_closed() {
    for count in [0, 2, 3, 8] {
        let (ours, theirs) = pair();
        let (mut end, other_end) = std::io::pipe().unwrap();
        send(&theirs, &[0; 32], &vec![other_end.as_fd(); count]);
        drop(other_end);
        let error = receive_memory(&ours).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Untrusted, "{count}: {error}");
        // The pipe ends once nothing has its other end open.
        assert_eq!(end.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn messages_cut_short_fail_and_those_in_pieces_are_whole() {
    let region = holder(1);
    let memory = region.shareable().unwrap();
    let (mut relay, theirs) = pair();
    send_memory(&theirs, memory).unwrap();
    let mut message = [0; 32];
    relay.read_exact(&mut message).unwrap();
    for whole in [false, true] {
        let (ours, mut theirs) = pair();
        send(&theirs, &message[..5], &[memory.file().as_fd()]);
        if whole {
            theirs.write_all(&message[5..]).unwrap();
            theirs.write_all(b"what follows").unwrap();
        }
        drop(theirs);
        let received = receive_memory(&ours).map(|memory| memory.geometry());
        assert_eq!(received.ok(), whole.then(|| region.geometry()));
        let mut rest = String::new();
        (&ours).read_to_string(&mut rest).unwrap();
        assert_eq!(rest, if whole { "what follows" } else { "" });
    }
    let (ours, _) = pair();
    assert_eq!(receive_memory(&ours).unwrap_err().kind(), SetupErrorKind::Io);
}

#[test]
fn what_is_received_is_closed_in_programs_that_are_started() {
    let memory = handed_over(&holder(1));
    let flags = rustix::io::fcntl_getfd(memory.file()).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn nothing_is_left_of_what_went() {
    let region = holder(1);
    let memory = handed_over(&region);
    let file = inode(&memory);
    let peer = PeerMemory::map(&memory).unwrap();
    assert_eq!((mappings(file).len(), descriptors(file)), (2, 2));
    drop(memory);
    drop(peer);
    assert_eq!((mappings(file).len(), descriptors(file)), (1, 1), "the holder's own");
    drop(region);
    assert_eq!((mappings(file).len(), descriptors(file)), (0, 0));
}

/// A forked process with one end of a stream. It is killed, as by a lack of memory, after its work.
fn in_a_child(work: impl FnOnce(&UnixStream)) -> (UnixStream, Child) {
    let (ours, theirs) = pair();
    let mut ours = Some(ours);
    let child = Child::fork(|| {
        drop(ours.take());
        work(&theirs);
        // SAFETY: ends this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        false
    });
    (ours.unwrap(), child)
}

#[test]
fn another_process_reads_blocks() {
    let region = holder(7);
    let (ours, theirs) = pair();
    send_memory(&theirs, region.shareable().unwrap()).unwrap();
    assert!(holds_in_a_child(|| {
        arrives(&PeerMemory::map(&receive_memory(&ours).unwrap()).unwrap(), 7)
    }));
}

#[test]
fn blocks_stay_readable_when_their_holder_was_killed() {
    let (stream, child) = in_a_child(|mut stream| {
        let region = holder(3);
        send_memory(stream, region.shareable().unwrap()).unwrap();
        let end = stream.read(&mut [0]);
        assert_eq!(end.unwrap(), 0);
    });
    let peer = PeerMemory::map(&receive_memory(&stream).unwrap()).unwrap();
    assert!(arrives(&peer, 3));
    drop(stream);
    assert!(!child.held(), "it was killed");
    assert!(arrives(&peer, 3));
}

#[test]
fn a_changing_block_has_the_checksum_of_what_arrived() {
    const BLOCK: usize = 256 << 10;
    let (stream, child) = in_a_child(|mut stream| {
        let region = DramRegion::shareable_host(options(1, BLOCK)).unwrap();
        let mut frame = region.frames().unwrap().take().unwrap();
        send_memory(stream, region.shareable().unwrap()).unwrap();
        stream.set_nonblocking(true).unwrap();
        for content in (0..=u8::MAX).cycle() {
            region.write(&mut frame).unwrap().fill(content);
            if stream.read(&mut [0]).is_ok() {
                break;
            }
        }
    });
    let peer = PeerMemory::map(&receive_memory(&stream).unwrap()).unwrap();
    let region = host(1, BLOCK);
    let mut frame = region.frames().unwrap().take().unwrap();
    for _ in 0..500 {
        let sum = peer.copy_into(SlotId(0), &region, &mut frame).unwrap();
        assert_eq!(sum, checksum(region.read(&frame).unwrap()));
    }
    drop(stream);
    assert!(!child.held(), "it was killed");
}

#[test]
fn a_child_that_drops_a_mapping_leaves_its_parents() {
    let mut peer = Some(PeerMemory::map(&handed_over(&holder(1))).unwrap());
    assert!(holds_in_a_child(|| {
        drop(peer.take());
        true
    }));
    assert!(arrives(peer.as_ref().unwrap(), 1));
}
