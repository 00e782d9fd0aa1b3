//! What a copy between memory and disk comes down to, what its result means, and which goes first.
//!
//! | result | becomes |
//! |---|---|
//! | all bytes of the slot | `Ok` |
//! | fewer bytes, none | `Io`: a file that was truncated, a medium that gave up half-way |
//! | EINTR, EAGAIN | tried again, up to [`MAX_TRIES`] times, then `Unavailable` |
//! | ENOSPC, EDQUOT | `NoSpace`: also of files whose space was reserved, on file systems that copy on write |
//! | ENOMEM, ENOBUFS, EMFILE, ENFILE, EBUSY | `Unavailable`: the system is short of something, the medium is not |
//! | EIO and all others | `Io` |

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::ptr::NonNull;

use crate::copy::{CopyError, CopyErrorKind, CopyOp, Route, SlotRef, Tier};
use crate::disk::DiskRegion;
use crate::error::SetupError;
use crate::geometry::Geometry;
use crate::memory::{Memory, forget_checksum, no_such_slot};

/// One read or write of a whole slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotTransfer {
    pub(super) direction: DiskDirection,
    /// The slot in memory, its whole stride.
    pub(super) memory: NonNull<[u8]>,
    pub(super) file: usize,
    pub(super) offset: u64,
    /// The slot on disk, for messages.
    pub(super) slot: SlotRef,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiskDirection {
    Read,
    Write,
}

/// The routes between a memory tier and the disk.
pub(super) const fn routes(memory: Tier) -> [Route; 2] {
    Route::new(memory, Tier::Disk).both_ways()
}

/// Whether blocks can move between the two regions at all. Whole strides move: a longer one would
/// reach into the next slot.
pub(crate) fn check_fit(memory: &dyn Memory, disk: &DiskRegion) -> Result<(), SetupError> {
    let (ours, theirs) = (memory.geometry(), disk.geometry());
    let fit = (ours.block_bytes(), ours.stride()) == (theirs.block_bytes(), theirs.stride());
    if fit && memory.tier() != Tier::Disk {
        return Ok(());
    }
    let shape =
        |cut: Geometry| format!("blocks of {} bytes, {} apart,", cut.block_bytes(), cut.stride());
    let message = format!("{} {} do not fit disk {}", memory.tier(), shape(ours), shape(theirs));
    Err(SetupError::invalid(message.trim_end_matches(',')))
}

impl SlotTransfer {
    /// The copy is about to begin.
    pub(super) fn of(
        op: &CopyOp,
        memory: &dyn Memory,
        disk: &DiskRegion,
    ) -> Result<Self, CopyError> {
        let (direction, ram, slot) = match (op.from.tier, op.to.tier) {
            (from, Tier::Disk) if from == memory.tier() => (DiskDirection::Write, op.from, op.to),
            (Tier::Disk, to) if to == memory.tier() => (DiskDirection::Read, op.to, op.from),
            _ => return Err(no_such_slot(op.from)),
        };
        let (file, offset) = disk.place(slot.slot).ok_or_else(|| no_such_slot(slot))?;
        // Before the first byte lands: a flush of this slot must not take the old sum for the new
        // content.
        if direction == DiskDirection::Read {
            forget_checksum(memory, ram.slot);
        }
        let memory = memory.slot(ram.slot).ok_or_else(|| no_such_slot(ram))?;
        Ok(Self { direction, memory, file, offset, slot })
    }

    /// Only as many bytes as a slot has are a success.
    pub(super) fn outcome(&self, moved: io::Result<usize>) -> Result<(), CopyError> {
        let verb = match self.direction {
            DiskDirection::Read => "read",
            DiskDirection::Write => "write",
        };
        match moved {
            Ok(bytes) if bytes == self.memory.len() => Ok(()),
            // Not gone on with from there: O_DIRECT wants aligned offsets, and a file that ends
            // early still does.
            Ok(bytes) => {
                let message =
                    format!("{}: {verb} {bytes} of {} bytes", self.slot, self.memory.len());
                Err(CopyError::new(CopyErrorKind::Io, message))
            }
            Err(error) => {
                let message = format!("{}: {verb} failed: {error}", self.slot);
                Err(CopyError::caused(kind_of(&error), message, error))
            }
        }
    }
}

/// How often an operation is tried that the kernel returns untried. Each try is a system call, so
/// this is soon over; what lasts longer is for the caller's breaker to wait for.
pub(super) const MAX_TRIES: u32 = 16;

/// The kernel was interrupted, or would have had to wait: nothing is wrong.
pub(super) fn is_transient(moved: &io::Result<usize>) -> bool {
    let kind = moved.as_ref().err().map(io::Error::kind);
    matches!(kind, Some(ErrorKind::Interrupted | ErrorKind::WouldBlock))
}

/// Tries until the kernel did, or did not want to for too long.
pub(super) fn persistently(mut attempt: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    let mut moved = attempt();
    for _ in 1..MAX_TRIES {
        if !is_transient(&moved) {
            break;
        }
        moved = attempt();
    }
    moved
}

fn kind_of(error: &io::Error) -> CopyErrorKind {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => CopyErrorKind::NoSpace,
        Some(
            libc::ENOMEM
            | libc::ENOBUFS
            | libc::EMFILE
            | libc::ENFILE
            | libc::EBUSY
            | libc::EINTR
            | libc::EAGAIN,
        ) => CopyErrorKind::Unavailable,
        _ => CopyErrorKind::Io,
    }
}

/// Reads wait behind reads only: an engine waits for them, and nothing waits for writes. But no
/// more than [`MAX_READS_IN_A_ROW`] overtake a write, else a tier that is read all the time would
/// never be flushed to and fill up with blocks that cannot leave.
#[derive(Debug)]
pub(super) struct ReadsFirst<T> {
    reads: VecDeque<T>,
    writes: VecDeque<T>,
    reads_in_a_row: usize,
}

/// A write in sixteen operations costs reads at most as much as the disk's own jitter does.
const MAX_READS_IN_A_ROW: usize = 15;

impl<T> ReadsFirst<T> {
    pub(super) const fn new() -> Self {
        Self { reads: VecDeque::new(), writes: VecDeque::new(), reads_in_a_row: 0 }
    }

    pub(super) fn push_read(&mut self, read: T) {
        self.reads.push_back(read);
    }

    pub(super) fn push_write(&mut self, write: T) {
        self.writes.push_back(write);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty()
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        if self.writes.is_empty() || self.reads_in_a_row >= MAX_READS_IN_A_ROW {
            self.reads_in_a_row = 0;
            return self.writes.pop_front().or_else(|| self.reads.pop_front());
        }
        let read = self.reads.pop_front();
        self.reads_in_a_row = if read.is_some() { self.reads_in_a_row + 1 } else { 0 };
        read.or_else(|| self.writes.pop_front())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_says_what_a_caller_can_do() {
        let table = [
            (libc::ENOSPC, CopyErrorKind::NoSpace),
            (libc::EDQUOT, CopyErrorKind::NoSpace),
            (libc::ENOMEM, CopyErrorKind::Unavailable),
            (libc::ENOBUFS, CopyErrorKind::Unavailable),
            (libc::EMFILE, CopyErrorKind::Unavailable),
            (libc::ENFILE, CopyErrorKind::Unavailable),
            (libc::EBUSY, CopyErrorKind::Unavailable),
            (libc::EINTR, CopyErrorKind::Unavailable),
            (libc::EAGAIN, CopyErrorKind::Unavailable),
            (libc::EIO, CopyErrorKind::Io),
            (libc::EROFS, CopyErrorKind::Io),
            (libc::EINVAL, CopyErrorKind::Io),
        ];
        for (errno, kind) in table {
            let error = io::Error::from_raw_os_error(errno);
            assert_eq!(kind_of(&error), kind, "{error}");
            assert_eq!(is_transient(&Err(error)), [libc::EINTR, libc::EAGAIN].contains(&errno));
        }
        assert!(!is_transient(&Ok(0)));
    }

    #[test]
    fn the_kernel_is_asked_again_a_bounded_number_of_times() {
        let busy_for = |times| {
            let mut tries = 0;
            let moved = persistently(|| {
                tries += 1;
                if tries > times { Ok(1) } else { Err(ErrorKind::Interrupted.into()) }
            });
            (moved.is_ok(), tries)
        };
        assert_eq!(busy_for(0), (true, 1));
        assert_eq!(busy_for(MAX_TRIES - 1), (true, MAX_TRIES));
        assert_eq!(busy_for(MAX_TRIES), (false, MAX_TRIES));
    }

    #[derive(Debug, PartialEq)]
    enum Op {
        Read(usize),
        Write(usize),
    }

    fn queue(reads: usize, writes: usize) -> ReadsFirst<Op> {
        let mut queue = ReadsFirst::new();
        (0..writes).for_each(|n| queue.push_write(Op::Write(n)));
        (0..reads).for_each(|n| queue.push_read(Op::Read(n)));
        queue
    }

    #[test]
    fn a_read_overtakes_all_writes_that_wait() {
        let mut queue = queue(1, 256);
        assert_eq!(queue.pop(), Some(Op::Read(0)));
        for n in 0..256 {
            assert_eq!(queue.pop(), Some(Op::Write(n)));
        }
        assert!(queue.pop().is_none() && queue.is_empty());
    }

    #[test]
    fn a_write_waits_for_few_reads_however_many_come() {
        let mut queue = queue(100, 3);
        for write in 0..3 {
            for _ in 0..MAX_READS_IN_A_ROW {
                assert!(matches!(queue.pop(), Some(Op::Read(_))));
            }
            assert_eq!(queue.pop(), Some(Op::Write(write)));
        }
        assert_eq!(std::iter::from_fn(|| queue.pop()).count(), 100 - 3 * MAX_READS_IN_A_ROW);
    }

    #[test]
    fn reads_that_overtook_nothing_do_not_count() {
        let mut queue = queue(MAX_READS_IN_A_ROW, 0);
        while queue.pop().is_some() {}
        queue.push_write(Op::Write(0));
        queue.push_read(Op::Read(0));
        assert_eq!(queue.pop(), Some(Op::Read(0)));
    }
}
