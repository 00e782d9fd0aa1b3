//! Checksums on everything that leaves memory, whichever backend moves it.

#![expect(unsafe_code, reason = "reads slots, and promises of a backend")]

use std::sync::Arc;

use crate::backend::Backend;
use crate::checksum::{Checksums, checksum};
use crate::copy::{
    Completion, CopyError, CopyErrorKind, CopyOp, Done, Route, SlotId, SlotRef, Tier,
};
use crate::error::SetupError;
use crate::memory::{Memory, forget_checksum, no_such_slot};
use crate::verifiers::{BlockWorkers, GRAIN_BYTES, Urgency, WorkedCopy, part_with_failed};

/// A backend whose blocks are checksummed when they leave memory and verified when they return. A
/// block that comes back changed ends in [`CopyErrorKind::Corrupt`].
///
/// Where the memory remembers the checksum of a block from its arrival (see [`Memory::checksums`]),
/// that one goes out with it, at no cost: what happens to the bytes in memory is noticed too. Else
/// the block must be read once more, which takes a tenth of a millisecond per MiB. The submitting
/// thread, which may be an engine's or another backend's, does that for 128 KiB of a batch at most;
/// more is summed by threads of this backend's, block by block and in parallel, and the whole batch
/// is handed on when its last block is: backends that pack batches or sort them get them whole.
///
/// Blocks on their way in are summed by the thread that completes them or, with
/// [`on_threads_of_its_own`](Self::on_threads_of_its_own), beside it: a thread that serves a ring
/// has other transfers to look after.
#[derive(Debug)]
pub struct Verified<B> {
    inner: Arc<B>,
    guard: Arc<ChecksumGuard>,
    verifiers: Arc<BlockWorkers>,
    arrivals: ArrivalCheck,
}

/// Who verifies what comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArrivalCheck {
    /// The thread that completes it.
    Here,
    /// The verifiers.
    Aside,
    /// A decorator around this one, which knows better.
    Elsewhere,
}

#[derive(Debug)]
struct ChecksumGuard {
    memory: Arc<dyn Memory>,
    checksums: Arc<Checksums>,
}

impl<B: Backend> Verified<B> {
    /// `inner` moves blocks between `memory` and one other tier, whose checksums are kept in
    /// `checksums`.
    ///
    /// # Errors
    /// `Invalid`: `inner` serves other routes. `Unavailable`: no threads.
    pub fn new(
        inner: B,
        memory: Arc<dyn Memory>,
        checksums: Arc<Checksums>,
    ) -> Result<Self, SetupError> {
        only_other_end(&inner, memory.tier())?;
        let verifiers = BlockWorkers::start()?;
        let guard = Arc::new(ChecksumGuard { memory, checksums });
        Ok(Self {
            inner: Arc::new(inner),
            guard,
            verifiers: Arc::new(verifiers),
            arrivals: ArrivalCheck::Here,
        })
    }

    /// The same, whose threads also verify what comes in.
    #[must_use]
    pub fn on_threads_of_its_own(mut self) -> Self {
        self.arrivals = ArrivalCheck::Aside;
        self
    }

    /// The same, which sums what leaves and leaves what comes in to the decorator around it: a seal
    /// says more of a block than its checksum does.
    #[must_use]
    pub fn of_departures(mut self) -> Self {
        self.arrivals = ArrivalCheck::Elsewhere;
        self
    }

    /// Another handle of the same.
    fn share(&self) -> Self {
        let (inner, guard) = (Arc::clone(&self.inner), Arc::clone(&self.guard));
        Self { inner, guard, verifiers: Arc::clone(&self.verifiers), arrivals: self.arrivals }
    }

    /// All checksums of what leaves are recorded.
    fn send(&self, batch: Vec<CopyOp>, done: Done) {
        let ours = self.guard.memory.tier();
        let done = if self.arrivals == ArrivalCheck::Elsewhere
            || batch.iter().all(|op| op.to.tier != ours)
        {
            done
        } else {
            self.verifying(&batch, done)
        };
        self.inner.submit(batch, done);
    }

    /// Has what arrives verified before it is reported.
    fn verifying(&self, batch: &[CopyOp], done: Done) -> Done {
        let (guard, ops): (_, Arc<[CopyOp]>) = (Arc::clone(&self.guard), batch.into());
        let verifiers = (self.arrivals == ArrivalCheck::Aside).then(|| Arc::clone(&self.verifiers));
        Done::new(move |mut ended| match &verifiers {
            Some(verifiers)
                if ended.iter().any(|completion| guard.has_arrived(&ops, completion)) =>
            {
                let (done, block_bytes) = (done.clone(), guard.memory.block_bytes());
                let (guard, ops) = (Arc::clone(&guard), Arc::clone(&ops));
                let verify =
                    move |completion: &mut Completion| guard.verify_arrival(&ops, completion);
                verifiers.work_on(Urgency::Awaited, block_bytes, ended, verify, move |ended| {
                    done.report(ended);
                });
            }
            _ => {
                ended.iter_mut().for_each(|completion| guard.verify_arrival(&ops, completion));
                done.report(ended);
            }
        })
    }
}

/// The tier that all routes of a backend join `ours` to.
pub(crate) fn only_other_end<B: Backend>(backend: &B, ours: Tier) -> Result<Tier, SetupError> {
    let others: Vec<_> = backend.routes().iter().map(|&route| other_end(route, ours)).collect();
    match others.first() {
        Some(&Some(other)) if others.iter().all(|&end| end == Some(other)) => Ok(other),
        _ => {
            let message =
                format!("{}: not all routes join the {ours} tier and one other", backend.name());
            Err(SetupError::invalid(message))
        }
    }
}

/// Where such a route leads; `None`: it has both ends there, or none.
pub(crate) fn other_end(Route { from, to }: Route, ours: Tier) -> Option<Tier> {
    match (from == ours, to == ours) {
        (true, false) => Some(to),
        (false, true) => Some(from),
        _ => None,
    }
}

// SAFETY: the inner backend moves the blocks and reports each once; a report is passed on after the
// destination, which is still the operation's, has been read.
unsafe impl<B: Backend + 'static> Backend for Verified<B> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn routes(&self) -> &[Route] {
        self.inner.routes()
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        let ours = self.guard.memory.tier();
        let departing = batch.iter().enumerate().filter(|(_, op)| op.from.tier == ours);
        let unknown = departing.filter(|(_, op)| !self.guard.record_known(op));
        let unknown: Vec<_> =
            unknown.map(|(index, &op)| WorkedCopy { index, op, result: Ok(()) }).collect();
        let block_bytes = self.guard.memory.block_bytes();
        if unknown.len() * block_bytes <= GRAIN_BYTES {
            unknown.iter().for_each(|copy| self.guard.sum(&copy.op));
            return self.send(batch, done);
        }
        let (guard, verified) = (Arc::clone(&self.guard), self.share());
        let sum = move |copy: &mut WorkedCopy| guard.sum(&copy.op);
        self.verifiers.work_on(Urgency::Background, block_bytes, unknown, sum, move |summed| {
            // What could not be summed does not leave.
            let (batch, done) = part_with_failed(batch, done, summed);
            if !batch.is_empty() {
                verified.send(batch, done);
            }
        });
    }
}

impl ChecksumGuard {
    /// The block takes along the checksum that memory remembers. False: it remembers none.
    fn record_known(&self, op: &CopyOp) -> bool {
        let known = self.memory.checksums().and_then(|checksums| checksums.get(op.from.slot));
        known.inspect(|&crc| self.checksums.record(op.to.slot, crc)).is_some()
    }

    /// An operation on a slot that does not exist is left to the backend to refuse.
    fn sum(&self, op: &CopyOp) {
        if let Some(crc) = self.checksum(op.from.slot) {
            self.checksums.record(op.to.slot, crc);
        }
    }

    fn has_arrived(&self, ops: &[CopyOp], (op, result): &Completion) -> bool {
        result.is_ok() && ops[*op].to.tier == self.memory.tier()
    }

    fn verify_arrival(&self, ops: &[CopyOp], completion: &mut Completion) {
        if self.has_arrived(ops, completion) {
            completion.1 = self.verify(&ops[completion.0]);
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
        // SAFETY: the slot is of an operation that is submitted and not completed: nothing writes
        // it now.
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
    use std::collections::HashSet;
    use std::ptr::NonNull;
    use std::thread::{self, ThreadId};
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;

    use super::*;
    use crate::dram::DramRegion;
    use crate::error::SetupErrorKind;
    use crate::frame::Frame;
    use crate::geometry::Geometry;
    use crate::memcpy::MemcpyBackend;
    use crate::testing::conformance::{self, Pair};
    use crate::testing::{
        Fault, FaultBackend, MemoryStore, assert_fails, fill_pattern, frames, has_pattern, host,
        options, order, run, start,
    };

    const OUT: Route = Route::new(Tier::Host, Tier::Disk);
    const IN: Route = Route::new(Tier::Disk, Tier::Host);
    const BLOCK: usize = 5000;

    /// Verified around faults around a store, one block stored in it.
    struct VerifiedFixture {
        memory: Arc<DramRegion>,
        store: Arc<MemoryStore>,
        faults: Arc<FaultBackend<Arc<MemoryStore>>>,
        verified: Verified<Arc<FaultBackend<Arc<MemoryStore>>>>,
        here: Vec<Frame>,
        there: Vec<Frame>,
    }

    impl VerifiedFixture {
        fn new() -> Self {
            let memory = Arc::new(host(4, BLOCK));
            let store =
                Arc::new(MemoryStore::new(Arc::clone(&memory) as _, Tier::Disk, 4).unwrap());
            let regions =
                vec![Arc::clone(&memory) as _, Arc::clone(store.region()) as Arc<dyn Memory>];
            let faults = Arc::new(FaultBackend::new(Arc::clone(&store), regions).unwrap());
            let checksums = Arc::new(Checksums::new());
            let verified =
                Verified::new(Arc::clone(&faults), Arc::clone(&memory) as _, checksums).unwrap();
            let (mut here, there) = (frames(&memory), frames(store.region()));
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
    fn conforms_when_arrivals_are_verified_aside() {
        conformance::check(|slots, block_bytes| {
            let memory = Arc::new(host(slots, block_bytes));
            let store = MemoryStore::new(Arc::clone(&memory) as _, Tier::Disk, slots).unwrap();
            let backend = Verified::new(store, Arc::clone(&memory) as _, Arc::default()).unwrap();
            Pair { memory, other: Tier::Disk, backend: Arc::new(backend.on_threads_of_its_own()) }
        });
    }

    #[test]
    fn a_healthy_block_passes() {
        let fixture = VerifiedFixture::new();
        fixture.store().unwrap();
        fixture.load().unwrap();
        let ours = &fixture.memory;
        assert_eq!(ours.read(&fixture.here[0]), ours.read(&fixture.here[1]));
    }

    #[test]
    fn every_flipped_bit_is_caught_wherever_it_lies() {
        let fixture = VerifiedFixture::new();
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
        for (fault, route) in [
            (Fault::LyingShort, OUT),
            (Fault::LyingShort, IN),
            (Fault::BitFlip, OUT),
            (Fault::BitFlip, IN),
        ] {
            let fixture = VerifiedFixture::new();
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
        let fixture = VerifiedFixture::new();
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
        assert_fails(VerifiedFixture::new().load(), CopyErrorKind::Corrupt);
    }

    #[test]
    fn a_bit_flipped_in_memory_is_caught_on_return() {
        let VerifiedFixture { memory, verified, here, there, .. } = VerifiedFixture::new();
        let device = DramRegion::open(Tier::Device, options(1, BLOCK)).unwrap();
        let mut origin = device.frames().unwrap().take().unwrap();
        fill_pattern(2, device.write(&mut origin).unwrap());
        let regions = vec![Arc::new(device) as Arc<dyn Memory>, Arc::clone(&memory) as _];
        let save =
            FaultBackend::new(MemcpyBackend::new(regions.clone(), 1).unwrap(), regions).unwrap();
        let through = |fault: Option<Fault>| {
            fault
                .into_iter()
                .for_each(|fault| save.inject(fault, &[Route::new(Tier::Device, Tier::Host)]));
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
    fn a_slot_written_in_place_loses_its_old_checksum() {
        let mut fixture = VerifiedFixture::new();
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
        let fixture = VerifiedFixture::new();
        let known = || fixture.memory.checksums().unwrap().get(fixture.here[1].slot());
        fixture.store().unwrap();
        fixture.load().unwrap();
        assert_eq!(known(), Some(checksum(fixture.memory.read(&fixture.here[1]).unwrap())));
        fixture.store.flip_bit(fixture.there[0].slot(), 0);
        assert_fails(fixture.load(), CopyErrorKind::Corrupt);
        assert_eq!(known(), None);
    }

    /// What happens to the bytes in memory after the sum is noticed too, which a sum at the
    /// departure would not.
    #[test]
    fn what_was_summed_on_writing_is_not_summed_on_leaving() {
        let mut fixture = VerifiedFixture::new();
        fill_pattern(2, fixture.memory.write(&mut fixture.here[0]).unwrap());
        fixture.memory.remember_checksum(&fixture.here[0]);
        fixture.store().unwrap();
        fixture.load().unwrap();
        let sum = fixture.memory.checksums().unwrap().get(fixture.here[0].slot()).unwrap();
        fixture.memory.checksums().unwrap().record(fixture.here[0].slot(), !sum);
        fixture.store().unwrap();
        assert_fails(fixture.load(), CopyErrorKind::Corrupt);
    }

    #[test]
    fn slow_and_silent_backends_are_so() {
        let fixture = VerifiedFixture::new();
        fixture.faults.inject(Fault::Slow(Duration::from_millis(20)), &[OUT]);
        let before = Instant::now();
        fixture.store().unwrap();
        assert!(before.elapsed() >= Duration::from_millis(20));
        fixture.faults.inject(Fault::NeverCompletes, &[OUT]);
        let op = order(1, fixture.here[0].slot_ref(), fixture.there[0].slot_ref());
        assert!(
            start(&fixture.verified, vec![op]).recv_timeout(Duration::from_millis(20)).is_err()
        );
    }

    #[test]
    fn a_backend_without_an_end_in_memory_is_refused() {
        let memory = Arc::new(host(1, BLOCK));
        let store = MemoryStore::new(memory, Tier::Disk, 1).unwrap();
        let elsewhere = MemoryStore::new(Arc::new(host(1, BLOCK)), Tier::Object, 1).unwrap();
        let error =
            Verified::new(store, Arc::clone(elsewhere.region()) as _, Arc::default()).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
    }

    /// Memory that remembers which threads asked for its slots, and no checksums.
    #[derive(Debug)]
    struct WatchedMemory {
        region: DramRegion,
        readers: Mutex<HashSet<ThreadId>>,
    }

    // SAFETY: all is the region's, which this keeps.
    unsafe impl Memory for WatchedMemory {
        fn tier(&self) -> Tier {
            self.region.tier()
        }

        fn geometry(&self) -> Geometry {
            self.region.geometry()
        }

        fn base(&self) -> NonNull<u8> {
            self.region.base()
        }

        fn slot(&self, slot: SlotId) -> Option<NonNull<[u8]>> {
            self.readers.lock().insert(thread::current().id());
            self.region.slot(slot)
        }
    }

    /// A store that notes how large the batches are that it gets.
    #[derive(Debug)]
    struct Sizes {
        store: MemoryStore,
        batches: Mutex<Vec<usize>>,
    }

    // SAFETY: all is the store's doing.
    unsafe impl Backend for Sizes {
        fn name(&self) -> &'static str {
            self.store.name()
        }

        fn routes(&self) -> &[Route] {
            self.store.routes()
        }

        fn submit(&self, batch: Vec<CopyOp>, done: Done) {
            self.batches.lock().push(batch.len());
            self.store.submit(batch, done);
        }
    }

    #[test]
    fn the_submitter_sums_little_and_batches_arrive_whole() {
        const SLOTS: u32 = 64;
        let memory = Arc::new(WatchedMemory {
            region: host(SLOTS, GRAIN_BYTES / 4),
            readers: Mutex::default(),
        });
        let store = MemoryStore::new(Arc::clone(&memory) as _, Tier::Disk, SLOTS).unwrap();
        let sizes = Arc::new(Sizes { store, batches: Mutex::default() });
        let verified =
            Verified::new(Arc::clone(&sizes), Arc::clone(&memory) as _, Arc::default()).unwrap();
        let slot = |tier, slot| SlotRef { tier, slot: SlotId(slot), generation: 1 };
        let out = |n| order(n as usize, slot(Tier::Host, n), slot(Tier::Disk, n));
        let back = |n| order(n as usize, slot(Tier::Disk, n), slot(Tier::Host, n));
        let summed_here = |blocks: u32| {
            memory.readers.lock().clear();
            assert!(run(&verified, (0..blocks).map(out).collect()).iter().all(Result::is_ok));
            let here = memory.readers.lock().contains(&thread::current().id());
            assert!(run(&verified, (0..blocks).map(back).collect()).iter().all(Result::is_ok));
            here
        };
        assert!(summed_here(4), "so little is not worth another thread's waking up");
        assert!(!summed_here(SLOTS));
        assert!(!summed_here(5));
        assert_eq!(*sizes.batches.lock(), [4, 4, 64, 64, 5, 5]);
    }
}
