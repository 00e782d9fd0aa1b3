//! Checksums on everything that leaves memory, whichever backend moves it.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use crossbeam_channel::Sender;

use crate::checksum::{Checksums, checksum};
use crate::copy::{Backend, CopyError, CopyErrorKind, CopyOp, Done, Route, SlotId, SlotRef, Tier};
use crate::error::{SetupError, SetupErrorKind};
use crate::memory::{Memory, forget_checksum, no_such_slot};

/// A backend whose blocks are checksummed when they leave memory and verified when they return. A block that
/// comes back changed ends in [`CopyErrorKind::Corrupt`].
///
/// Where the memory remembers the checksum of a block from its arrival (see [`Memory::checksums`]), that one
/// goes out with it: what happens to the bytes in memory is noticed too. Else the submitting thread computes
/// it. Blocks on their way in are summed by the thread that completes them or, with
/// [`on_a_thread_of_its_own`](Self::on_a_thread_of_its_own), beside it: that takes a tenth of a millisecond per
/// MiB or more, in which a thread that serves a ring has other transfers to look after.
#[derive(Debug)]
pub struct Verified<B> {
    inner: B,
    guard: Arc<Guard>,
    /// To the thread that verifies, if there is one.
    arrivals: Option<Sender<Arrival>>,
}

/// A block that has arrived and is not reported yet.
#[derive(Debug)]
struct Arrival {
    op: CopyOp,
    index: usize,
    done: Done,
}

#[derive(Debug)]
struct Guard {
    memory: Arc<dyn Memory>,
    checksums: Arc<Checksums>,
}

impl<B: Backend> Verified<B> {
    /// `inner` moves blocks between `memory` and one other tier, whose checksums are kept in `checksums`.
    ///
    /// # Errors
    /// `Invalid`: `inner` serves other routes.
    pub fn new(inner: B, memory: Arc<dyn Memory>, checksums: Arc<Checksums>) -> Result<Self, SetupError> {
        let ours = memory.tier();
        let others: Vec<_> = inner.routes().iter().map(|&route| other_end(route, ours)).collect();
        if others.is_empty() || others.contains(&None) || others.windows(2).any(|pair| pair[0] != pair[1]) {
            let message = format!("{}: not all routes join the {ours} tier and one other", inner.name());
            return Err(SetupError::new(SetupErrorKind::Invalid, message));
        }
        let guard = Arc::new(Guard { memory, checksums });
        Ok(Self { inner, guard, arrivals: None })
    }

    /// The same, with a thread that verifies what comes in.
    ///
    /// # Errors
    /// `Unavailable`: no thread.
    pub fn on_a_thread_of_its_own(mut self) -> Result<Self, SetupError> {
        let started = verifier(&self.guard).map_err(|error| {
            let message = "cannot start a thread for checksums: raise the limit on processes";
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        });
        self.arrivals = Some(started?);
        Ok(self)
    }
}

/// Starts the thread that verifies. It ends by itself when all that was submitted has been reported and the
/// backend is gone.
fn verifier(guard: &Arc<Guard>) -> io::Result<Sender<Arrival>> {
    let (arrivals, arrived) = crossbeam_channel::unbounded::<Arrival>();
    let guard = Arc::clone(guard);
    let report = move |arrival: Arrival| {
        // Others wait behind this one, whatever happens to it.
        if catch_unwind(AssertUnwindSafe(|| arrival.report(&guard))).is_err() {
            tracing::error!("a completion panicked");
        }
    };
    let work = move || arrived.iter().for_each(report);
    thread::Builder::new().name("kvbm-verify".into()).spawn(work)?;
    Ok(arrivals)
}

impl Arrival {
    fn report(self, guard: &Guard) {
        self.done.complete(self.index, guard.verify(&self.op));
    }
}

fn other_end((from, to): Route, ours: Tier) -> Option<Tier> {
    match (from == ours, to == ours) {
        (true, false) => Some(to),
        (false, true) => Some(from),
        _ => None,
    }
}

// SAFETY: the inner backend moves the blocks and reports each once; a report is passed on after the
// destination, which is still the operation's, has been read.
unsafe impl<B: Backend> Backend for Verified<B> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn routes(&self) -> &[Route] {
        self.inner.routes()
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        let ours = self.guard.memory.tier();
        for op in batch.iter().filter(|op| op.from.tier == ours) {
            self.guard.record(op);
        }
        if batch.iter().all(|op| op.to.tier != ours) {
            return self.inner.submit(batch, done);
        }
        let (guard, ops, arrivals) = (Arc::clone(&self.guard), batch.clone(), self.arrivals.clone());
        let verified = Done::new(move |index, result| match result {
            Ok(()) if ops[index].to.tier == ours => {
                let arrival = Arrival { op: ops[index], index, done: done.clone() };
                let inline = match &arrivals {
                    Some(verifier) => verifier.send(arrival).err().map(|unsent| unsent.0),
                    None => Some(arrival),
                };
                inline.into_iter().for_each(|arrival| arrival.report(&guard));
            }
            result => done.complete(index, result),
        });
        self.inner.submit(batch, verified);
    }
}

impl Guard {
    /// An operation on a slot that does not exist is left to the backend to refuse.
    fn record(&self, op: &CopyOp) {
        let known = self.memory.checksums().and_then(|checksums| checksums.get(op.from.slot));
        if let Some(crc) = known.or_else(|| self.checksum(op.from.slot)) {
            self.checksums.record(op.to.slot, crc);
        }
    }

    fn verify(&self, op: &CopyOp) -> Result<(), CopyError> {
        let actual = self.checksum(op.to.slot).ok_or_else(|| no_such_slot(op.to))?;
        match self.checksums.get(op.from.slot) {
            Some(expected) if expected == actual => {
                self.memory.checksums().inspect(|checksums| checksums.record(op.to.slot, actual));
                Ok(())
            }
            expected => {
                forget_checksum(&*self.memory, op.to.slot);
                Err(corrupt(op.from, expected, actual))
            }
        }
    }

    fn checksum(&self, slot: SlotId) -> Option<u32> {
        let slot = self.memory.slot(slot)?;
        // SAFETY: the slot is of an operation that is submitted and not completed: nobody writes it now.
        let bytes = unsafe { slot.as_ref() };
        Some(checksum(&bytes[..self.memory.block_bytes()]))
    }
}

pub(crate) fn corrupt(slot: SlotRef, expected: Option<u32>, actual: u32) -> CopyError {
    let expected = expected.map_or_else(|| "none recorded".to_owned(), |crc| format!("{crc:08x}"));
    let message = format!("{slot}: checksum {actual:08x} where {expected} was expected");
    CopyError::new(CopyErrorKind::Corrupt, message)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::dram::DramRegion;
    use crate::frame::Frame;
    use crate::memcpy::MemcpyBackend;
    use crate::testing::conformance::{self, Pair};
    use crate::testing::{
        Fault, FaultBackend, MemoryStore, fill_pattern, has_pattern, host, options, order, run, start,
    };

    const OUT: Route = (Tier::Host, Tier::Disk);
    const IN: Route = (Tier::Disk, Tier::Host);
    const BLOCK: usize = 5000;

    /// Verified around faults around a store, one block stored in it.
    struct Fixture {
        memory: Arc<DramRegion>,
        store: Arc<MemoryStore>,
        faults: Arc<FaultBackend<Arc<MemoryStore>>>,
        verified: Verified<Arc<FaultBackend<Arc<MemoryStore>>>>,
        here: Vec<Frame>,
        there: Vec<Frame>,
    }

    impl Fixture {
        fn new() -> Self {
            let memory = Arc::new(host(4, BLOCK));
            let store = Arc::new(MemoryStore::new(Arc::clone(&memory) as _, Tier::Disk, 4).unwrap());
            let regions = vec![Arc::clone(&memory) as _, Arc::clone(store.region()) as Arc<dyn Memory>];
            let faults = Arc::new(FaultBackend::new(Arc::clone(&store), regions).unwrap());
            let checksums = Arc::new(Checksums::new());
            let verified = Verified::new(Arc::clone(&faults), Arc::clone(&memory) as _, checksums).unwrap();
            let mut frames = memory.frames().unwrap();
            let mut here: Vec<_> = std::iter::from_fn(|| frames.take()).collect();
            let mut frames = store.region().frames().unwrap();
            let there = std::iter::from_fn(|| frames.take()).collect();
            fill_pattern(1, memory.write(&mut here[0]).unwrap());
            Self { memory, store, faults, verified, here, there }
        }

        fn store(&self) -> Result<(), CopyError> {
            let op = order(1, self.here[0].slot_ref(), self.there[0].slot_ref());
            run(&self.verified, vec![op]).remove(0)
        }

        fn load(&self) -> Result<(), CopyError> {
            let op = order(1, self.there[0].slot_ref(), self.here[1].slot_ref());
            run(&self.verified, vec![op]).remove(0)
        }
    }

    #[track_caller]
    fn assert_fails(result: Result<(), CopyError>, kind: CopyErrorKind) {
        assert_eq!(result.unwrap_err().kind(), kind);
    }

    #[test]
    fn conforms() {
        conformance::check(|slots, block_bytes| {
            let memory = Arc::new(host(slots, block_bytes));
            let store = MemoryStore::new(Arc::clone(&memory) as _, Tier::Disk, slots).unwrap();
            let backend = Verified::new(store, Arc::clone(&memory) as _, Arc::default()).unwrap();
            Pair { memory, other: Tier::Disk, backend: Arc::new(backend) }
        });
    }

    #[test]
    fn a_healthy_block_passes() {
        let fixture = Fixture::new();
        fixture.store().unwrap();
        fixture.load().unwrap();
        let ours = &fixture.memory;
        assert_eq!(ours.read(&fixture.here[0]), ours.read(&fixture.here[1]));
    }

    #[test]
    fn every_flipped_bit_is_caught_wherever_it_lies() {
        let fixture = Fixture::new();
        fixture.store().unwrap();
        for byte in [0, 1, 4095, 4096, BLOCK - 1] {
            fixture.store.flip_bit(fixture.there[0].slot(), byte);
            assert_fails(fixture.load(), CopyErrorKind::Corrupt);
            fixture.store.flip_bit(fixture.there[0].slot(), byte);
            fixture.load().unwrap();
        }
    }

    #[test]
    fn a_backend_that_lies_is_caught_in_either_direction() {
        for (fault, route) in
            [(Fault::LyingShort, OUT), (Fault::LyingShort, IN), (Fault::BitFlip, OUT), (Fault::BitFlip, IN)]
        {
            let fixture = Fixture::new();
            if route == IN {
                fixture.store().unwrap();
            }
            fixture.faults.inject(fault, &[route]);
            if route == OUT {
                fixture.store().unwrap();
            }
            assert_fails(fixture.load(), CopyErrorKind::Corrupt);
        }
    }

    #[test]
    fn reported_failures_pass_through() {
        let fixture = Fixture::new();
        fixture.faults.inject(Fault::FailAfter(1, CopyErrorKind::NoSpace), &[OUT]);
        fixture.store().unwrap();
        assert_fails(fixture.store(), CopyErrorKind::NoSpace);
        fixture.faults.inject(Fault::Short, &[IN]);
        assert_fails(fixture.load(), CopyErrorKind::Io);
        fixture.faults.heal();
        fixture.load().unwrap();
    }

    #[test]
    fn what_was_never_stored_is_corrupt() {
        assert_fails(Fixture::new().load(), CopyErrorKind::Corrupt);
    }

    #[test]
    fn a_bit_that_flips_in_memory_is_caught_when_the_block_comes_back() {
        let Fixture { memory, verified, here, there, .. } = Fixture::new();
        let device = DramRegion::open(Tier::Device, options(1, BLOCK)).unwrap();
        let mut origin = device.frames().unwrap().take().unwrap();
        fill_pattern(2, device.write(&mut origin).unwrap());
        let regions = vec![Arc::new(device) as Arc<dyn Memory>, Arc::clone(&memory) as _];
        let save = FaultBackend::new(MemcpyBackend::new(regions.clone(), 1).unwrap(), regions).unwrap();
        let through = |fault: Option<Fault>| {
            fault.into_iter().for_each(|fault| save.inject(fault, &[(Tier::Device, Tier::Host)]));
            let orders = [
                order(2, origin.slot_ref(), here[0].slot_ref()),
                order(2, here[0].slot_ref(), there[0].slot_ref()),
                order(2, there[0].slot_ref(), here[1].slot_ref()),
            ];
            run(&save, vec![orders[0]]).remove(0).unwrap();
            run(&verified, vec![orders[1]]).remove(0).unwrap();
            run(&verified, vec![orders[2]]).remove(0)
        };
        through(None).unwrap();
        assert_fails(through(Some(Fault::BitFlip)), CopyErrorKind::Corrupt);
    }

    #[test]
    fn a_slot_that_is_written_in_place_does_not_keep_its_old_checksum() {
        let mut fixture = Fixture::new();
        fixture.store().unwrap();
        fixture.load().unwrap();
        fixture.here.swap(0, 1);
        fill_pattern(3, fixture.memory.write(&mut fixture.here[0]).unwrap());
        fixture.store().unwrap();
        fixture.load().unwrap();
        assert!(has_pattern(3, fixture.memory.read(&fixture.here[1]).unwrap()));
    }

    #[test]
    fn memory_remembers_what_was_verified_and_nothing_else() {
        let fixture = Fixture::new();
        let known = || fixture.memory.checksums().unwrap().get(fixture.here[1].slot());
        fixture.store().unwrap();
        fixture.load().unwrap();
        assert_eq!(known(), Some(checksum(fixture.memory.read(&fixture.here[1]).unwrap())));
        fixture.store.flip_bit(fixture.there[0].slot(), 0);
        assert_fails(fixture.load(), CopyErrorKind::Corrupt);
        assert_eq!(known(), None);
    }

    #[test]
    fn slow_and_silent_backends_are_so() {
        let fixture = Fixture::new();
        fixture.faults.inject(Fault::Slow(Duration::from_millis(20)), &[OUT]);
        let before = Instant::now();
        fixture.store().unwrap();
        assert!(before.elapsed() >= Duration::from_millis(20));
        fixture.faults.inject(Fault::NeverCompletes, &[OUT]);
        let op = order(1, fixture.here[0].slot_ref(), fixture.there[0].slot_ref());
        assert!(start(&fixture.verified, vec![op]).recv_timeout(Duration::from_millis(20)).is_err());
    }

    #[test]
    fn a_backend_without_an_end_in_memory_is_refused() {
        let memory = Arc::new(host(1, BLOCK));
        let store = MemoryStore::new(memory, Tier::Disk, 1).unwrap();
        let elsewhere = MemoryStore::new(Arc::new(host(1, BLOCK)), Tier::Object, 1).unwrap();
        let error = Verified::new(store, Arc::clone(elsewhere.region()) as _, Arc::default()).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
    }
}
