//! The thread behind [`UringBackend`](super::UringBackend), and how it learns that there is work
//! while it sleeps in the kernel.

#![expect(unsafe_code, reason = "the kernel works on memory of slots")]

use std::io::{self, ErrorKind};
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, TryRecvError};
use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};

use crate::copy::{CopyOp, Done, Endings, Tier};
use crate::disk::DiskRegion;
use crate::disk::transfer::{DiskDirection, MAX_TRIES, ReadsFirst, SlotTransfer, is_transient};
use crate::memory::Memory;

/// The most that the kernel registers as one buffer.
pub(super) const MAX_BUFFER: usize = 1 << 30;
const MAX_DEPTH: u32 = 4096;
/// Marks the completion of the poll of the wake-up event.
const WAKE: u64 = u64::MAX;

/// Operations submitted together.
pub(super) struct RingBatch {
    pub(super) ops: Vec<CopyOp>,
    pub(super) done: Done,
}

/// A ring, what it is registered with, and the operations that it has not completed.
pub(super) struct DiskRing {
    uring: IoUring,
    memory: Arc<dyn Memory>,
    disk: Arc<DiskRegion>,
    /// Slots per registered buffer; `None`: buffers are not registered.
    slots_per_buffer: Option<u32>,
    wake: RingWake,
    waiting: ReadsFirst<RingOrder>,
    /// Operations that the kernel has, by the number that it returns.
    flights: Vec<Option<RingFlight>>,
    grounded: Vec<u32>,
    /// Flights that the kernel returned untried.
    again: Vec<u32>,
    /// Ended since the last report.
    landed: Endings,
}

struct RingOrder {
    op: CopyOp,
    report: RingReport,
}

struct RingFlight {
    transfer: SlotTransfer,
    report: RingReport,
    tries: u32,
}

struct RingReport {
    index: usize,
    done: Done,
}

/// Whether a ring can be made and answers.
pub(super) fn probe() -> io::Result<()> {
    let mut ring = build(1)?;
    check_operations(&ring)?;
    // SAFETY: a no-op has no buffers.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }.map_err(io::Error::other)?;
    ring.submit_and_wait(1)?;
    match ring.completion().next().map(|event| event.result()) {
        Some(result) if result < 0 => Err(io::Error::from_raw_os_error(-result)),
        _ => Ok(()),
    }
}

/// Kernels before 5.6 lack reads and writes of plain memory, and the call that says so.
fn check_operations(uring: &IoUring) -> io::Result<()> {
    let mut probe = Probe::new();
    uring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::PollAdd::CODE,
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
    ];
    if needed.into_iter().all(|code| probe.is_supported(code)) {
        return Ok(());
    }
    Err(io::Error::new(ErrorKind::Unsupported, "the kernel's rings cannot read, write or poll"))
}

/// Kernels before 6.1 refuse the flags that spare interrupts of the ring's thread.
pub(crate) fn build(entries: u32) -> io::Result<IoUring> {
    let mut modern = IoUring::builder();
    match modern.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().build(entries) {
        Err(error) if error.kind() == ErrorKind::InvalidInput => IoUring::new(entries),
        result => result,
    }
}

impl DiskRing {
    pub(super) fn open(
        memory: Arc<dyn Memory>,
        disk: Arc<DiskRegion>,
        depth: u32,
        wake: Arc<OwnedFd>,
    ) -> io::Result<Self> {
        let depth = depth.clamp(1, MAX_DEPTH);
        let uring = build(depth + 1)?;
        check_operations(&uring)?;
        // Behind the slot files, for its lock: reads go on into memory that outlives the process.
        let files: Vec<_> = disk.files().chain(memory.lock()).map(AsRawFd::as_raw_fd).collect();
        uring.submitter().register_files(&files)?;
        let slots_per_buffer = register_memory(&uring, &*memory);
        Ok(Self {
            uring,
            memory,
            disk,
            slots_per_buffer,
            wake: RingWake::new(wake),
            waiting: ReadsFirst::new(),
            flights: std::iter::repeat_with(|| None).take(depth as usize).collect(),
            grounded: (0..depth).rev().collect(),
            again: Vec::new(),
            landed: Endings::default(),
        })
    }

    /// Works until the senders of batches are gone and everything they sent has ended.
    pub(super) fn serve(mut self, batches: &Receiver<RingBatch>) {
        let mut open = true;
        while open || self.is_busy() {
            open = open && self.receive(batches);
            if let Some(poll) = self.wake.arm() {
                self.push(&poll.user_data(WAKE));
            }
            self.launch();
            if self.landed.is_empty() {
                if open || self.is_busy() {
                    self.enter(1);
                }
            } else {
                // The listener may take its time: the kernel must not run out of work meanwhile.
                self.enter(0);
                mem::take(&mut self.landed).report();
            }
            self.reap();
        }
    }

    fn is_busy(&self) -> bool {
        !self.waiting.is_empty()
            || !self.landed.is_empty()
            || self.grounded.len() < self.flights.len()
    }

    /// Queues what has been submitted. False: nothing will come any more.
    fn receive(&mut self, batches: &Receiver<RingBatch>) -> bool {
        loop {
            match batches.try_recv() {
                Ok(batch) => self.queue(batch),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn queue(&mut self, RingBatch { ops, done }: RingBatch) {
        for (index, op) in ops.into_iter().enumerate() {
            let order = RingOrder { op, report: RingReport { index, done: done.clone() } };
            if op.from.tier == Tier::Disk {
                self.waiting.push_read(order);
            } else {
                self.waiting.push_write(order);
            }
        }
    }

    /// Hands waiting operations to the kernel, up to the depth.
    fn launch(&mut self) {
        self.launch_again();
        while !self.grounded.is_empty()
            && let Some(RingOrder { op, report }) = self.waiting.pop()
        {
            match SlotTransfer::of(&op, &*self.memory, &self.disk) {
                Ok(transfer) => self.launch_one(RingFlight { transfer, report, tries: 1 }),
                Err(error) => self.landed.add(&report.done, report.index, Err(error)),
            }
        }
    }

    fn launch_again(&mut self) {
        for number in mem::take(&mut self.again) {
            let Some(flight) = &self.flights[number as usize] else { unreachable!("kept by reap") };
            let entry = self.entry(&flight.transfer).user_data(u64::from(number));
            self.push(&entry);
        }
    }

    fn launch_one(&mut self, flight: RingFlight) {
        let Some(number) = self.grounded.pop() else { unreachable!("checked by launch") };
        let entry = self.entry(&flight.transfer).user_data(u64::from(number));
        self.push(&entry);
        self.flights[number as usize] = Some(flight);
    }

    fn entry(&self, transfer: &SlotTransfer) -> squeue::Entry {
        let file = Fixed(transfer.file as u32);
        let (start, len) = (transfer.memory.cast::<u8>().as_ptr(), transfer.memory.len() as u32);
        match (transfer.direction, self.buffer_of(transfer)) {
            (DiskDirection::Read, Some(buffer)) => {
                opcode::ReadFixed::new(file, start, len, buffer).offset(transfer.offset).build()
            }
            (DiskDirection::Read, None) => {
                opcode::Read::new(file, start, len).offset(transfer.offset).build()
            }
            (DiskDirection::Write, Some(buffer)) => {
                opcode::WriteFixed::new(file, start, len, buffer).offset(transfer.offset).build()
            }
            (DiskDirection::Write, None) => {
                opcode::Write::new(file, start, len).offset(transfer.offset).build()
            }
        }
    }

    /// The registered buffer that the memory of a transfer lies in.
    fn buffer_of(&self, transfer: &SlotTransfer) -> Option<u16> {
        let slots_per_buffer = self.slots_per_buffer? as usize;
        let offset = transfer.memory.addr().get() - self.memory.base().addr().get();
        Some((offset / self.memory.stride() / slots_per_buffer) as u16)
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: memory and files outlive the ring, whose thread leaves `serve` only when nothing
        // is in flight; the submitter promises that nothing else uses the slots until then.
        let pushed = unsafe { self.uring.submission().push(entry) };
        assert!(pushed.is_ok(), "the queue has room for all flights and the wake-up poll");
    }

    /// Submits what was pushed and waits for `want` completions.
    fn enter(&self, want: usize) {
        if let Err(error) = self.uring.submit_and_wait(want)
            && error.kind() != ErrorKind::Interrupted
        {
            // Out of kernel memory or completion space. Operations in flight must still be waited
            // for.
            tracing::warn!(%error, "the ring refused a submission; trying again");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn reap(&mut self) {
        while let Some(event) = self.next_completion() {
            if event.user_data() == WAKE {
                self.wake.polled(event.result(), cqueue::more(event.flags()));
            } else {
                self.ended(event.user_data() as u32, event.result());
            }
        }
    }

    fn next_completion(&mut self) -> Option<cqueue::Entry> {
        self.uring.completion().next()
    }

    fn ended(&mut self, number: u32, result: i32) {
        let moved = usize::try_from(result)
            .map_err(|_| io::Error::from_raw_os_error(result.saturating_neg()));
        let Some(place) = self.flights.get_mut(number as usize) else { return stray(number) };
        let Some(mut flight) = place.take() else { return stray(number) };
        if is_transient(&moved) && flight.tries < MAX_TRIES {
            flight.tries += 1;
            *place = Some(flight);
            self.again.push(number);
            return;
        }
        self.grounded.push(number);
        let RingReport { index, done } = flight.report;
        self.landed.add(&done, index, flight.transfer.outcome(moved));
    }
}

fn stray(number: u32) {
    tracing::error!(number, "the ring completed an operation that it was not given");
}

/// Registers all slots, in buffers as large as the kernel allows that end between slots.
pub(crate) fn register_memory(uring: &IoUring, memory: &dyn Memory) -> Option<u32> {
    let slots_per_buffer = MAX_BUFFER / memory.stride();
    let (bytes, buffer) = (memory.geometry().bytes(), slots_per_buffer * memory.stride());
    let part = |from: usize| libc::iovec {
        iov_base: memory.base().as_ptr().wrapping_add(from).cast(),
        iov_len: buffer.min(bytes - from),
    };
    let parts: Vec<_> = (0..bytes).step_by(buffer).map(part).collect();
    // SAFETY: the parts lie within the region, which the ring's owner keeps alive longer than the
    // ring.
    match unsafe { uring.submitter().register_buffers(&parts) } {
        Ok(()) => Some(slots_per_buffer as u32),
        Err(error) => {
            tracing::warn!(%error, "memory is not registered with io_uring (is the memlock limit too low?)");
            None
        }
    }
}

/// An event that the ring polls. From Linux 5.13 on one poll reports every write to the event,
/// which is then never read. Older kernels end such a poll at once with EINVAL: for them it is
/// armed anew each time, after the event was read, since a poll of an event that was not would end
/// at once as well.
#[derive(Debug)]
struct RingWake {
    event: Arc<OwnedFd>,
    armed: bool,
    multishot: bool,
}

impl RingWake {
    pub(super) const fn new(event: Arc<OwnedFd>) -> Self {
        Self { event, armed: false, multishot: true }
    }

    /// As on a kernel that knows no multishot polls.
    #[cfg(test)]
    const fn one_shot(event: Arc<OwnedFd>) -> Self {
        Self { event, armed: false, multishot: false }
    }

    /// The poll to be submitted, if none is armed.
    fn arm(&mut self) -> Option<squeue::Entry> {
        if self.armed {
            return None;
        }
        self.armed = true;
        let poll = opcode::PollAdd::new(Fd(self.event.as_raw_fd()), libc::POLLIN as u32);
        Some(poll.multi(self.multishot).build())
    }

    /// The poll reported `result`; `more`: it is still armed.
    fn polled(&mut self, result: i32, more: bool) {
        self.armed = more;
        match (result < 0, self.multishot) {
            (false, true) => {}
            (false, false) => self.read(),
            (true, true) => {
                tracing::info!(
                    errno = -result,
                    "this kernel has no multishot polls (Linux 5.13 has)"
                );
                self.multishot = false;
            }
            (true, false) => {
                // Nothing else wakes the thread: look once a millisecond rather than never, or all
                // the time.
                tracing::warn!(
                    errno = -result,
                    "the ring cannot poll its wake-up event; trying again"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// What is written from here on ends the next poll.
    fn read(&self) {
        if let Err(error) = rustix::io::read(&self.event, &mut [0; 8])
            && error != rustix::io::Errno::AGAIN
        {
            tracing::warn!(%error, "cannot read the ring's wake-up event");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use rustix::event::EventfdFlags;

    use super::*;
    use crate::copy::{CopyError, CopyErrorKind, SlotId, SlotRef};
    use crate::testing::{disk, each, host, order, skip};

    type RingReports = mpsc::Receiver<(usize, Result<(), CopyError>)>;

    /// A ring of two at a time between eight slots in memory and as many on disk; `None`: no rings
    /// here.
    fn ring(home: &std::path::Path) -> Option<(DiskRing, Arc<OwnedFd>)> {
        if let Err(error) = probe() {
            skip("uring", &error);
            return None;
        }
        let disk = disk(&[home], 8, 4096);
        let event =
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let event = Arc::new(event);
        Some((DiskRing::open(Arc::new(host(8, 4096)), disk, 2, Arc::clone(&event)).unwrap(), event))
    }

    fn write_of(slot: u32) -> (RingBatch, RingReports) {
        let slot = |tier| SlotRef { tier, slot: SlotId(slot), generation: 1 };
        let (report, reports) = mpsc::channel();
        let done = each(move |op, result| report.send((op, result)).unwrap());
        (RingBatch { ops: vec![order(0, slot(Tier::Host), slot(Tier::Disk))], done }, reports)
    }

    /// Serves one batch, with `result` in place of what the kernel says, `times` times.
    fn outcome(ring: &mut DiskRing, result: i32, times: u32) -> Result<(), CopyError> {
        let (batch, reports) = write_of(3);
        ring.queue(batch);
        for _ in 0..times {
            ring.launch();
            ring.enter(1);
            let number = ring.next_completion().unwrap().user_data();
            ring.ended(number as u32, result);
        }
        while ring.is_busy() {
            ring.launch();
            ring.enter(usize::from(ring.landed.is_empty()));
            ring.reap();
            mem::take(&mut ring.landed).report();
        }
        reports.recv().unwrap().1
    }

    #[test]
    fn untried_operations_are_tried_again_and_in_the_end_unavailable() {
        let home = tempfile::tempdir().unwrap();
        let Some((mut ring, _)) = ring(home.path()) else { return };
        for errno in [libc::EINTR, libc::EAGAIN] {
            outcome(&mut ring, -errno, 1).unwrap();
            outcome(&mut ring, -errno, MAX_TRIES - 1).unwrap();
            let error = outcome(&mut ring, -errno, MAX_TRIES).unwrap_err();
            assert_eq!(error.kind(), CopyErrorKind::Unavailable, "{error}");
        }
        assert_eq!(outcome(&mut ring, -libc::EIO, 1).unwrap_err().kind(), CopyErrorKind::Io);
        outcome(&mut ring, 4096, 1).unwrap();
    }

    /// Of this thread.
    fn cpu_time() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes one time to a place for it.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    #[test]
    fn without_multishot_polls_a_ring_still_wakes_and_sleeps() {
        let home = tempfile::tempdir().unwrap();
        let Some((mut ring, event)) = ring(home.path()) else { return };
        ring.wake = RingWake::one_shot(Arc::clone(&event));
        let (batches, incoming) = crossbeam_channel::unbounded();
        let work = thread::spawn(move || {
            let wake = || rustix::io::write(&event, &1_u64.to_ne_bytes()).unwrap();
            for slot in 0..8 {
                let (batch, reports) = write_of(slot);
                batches.send(batch).unwrap_or_else(|_| panic!("the ring is gone"));
                wake();
                reports.recv_timeout(Duration::from_mins(1)).expect("the ring slept on").1.unwrap();
                thread::sleep(Duration::from_millis(5));
            }
            drop(batches);
            wake();
        });
        let (began, busy_before) = (Instant::now(), cpu_time());
        ring.serve(&incoming);
        let (passed, busy) = (began.elapsed(), cpu_time().saturating_sub(busy_before));
        work.join().unwrap();
        assert!(busy < passed / 2, "busy for {busy:?} of {passed:?}");
    }

    #[test]
    fn without_multishot_polls_each_wake_up_takes_one() {
        let event =
            rustix::event::eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let mut wake = RingWake::new(Arc::new(event));
        assert!(wake.arm().is_some() && wake.arm().is_none());
        wake.polled(-libc::EINVAL, false);
        assert!(!wake.multishot && wake.arm().is_some());
        wake.polled(libc::POLLIN.into(), false);
        let unread = rustix::io::read(&wake.event, &mut [0; 8]);
        assert_eq!(unread, Err(rustix::io::Errno::AGAIN), "the next poll would end at once");
        assert!(wake.arm().is_some() && wake.arm().is_none());
    }

    #[test]
    fn a_multishot_poll_is_rearmed_only_when_it_ended() {
        let event =
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let mut wake = RingWake::new(Arc::new(event));
        assert!(wake.arm().is_some());
        wake.polled(libc::POLLIN.into(), true);
        assert!(wake.arm().is_none());
        wake.polled(libc::POLLIN.into(), false);
        assert!(wake.arm().is_some() && wake.multishot);
    }
}
