//! Checksums on everything that leaves memory, whichever backend moves it.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::copy::{Backend, CopyError, CopyErrorKind, CopyOp, Done, Route, SlotId, SlotRef, Tier};
use crate::error::{SetupError, SetupErrorKind};
use crate::memory::{Memory, no_such_slot};

/// The crc32c (Castagnoli) of the block in each slot of one tier. Four bytes per slot, in chunks that come
/// into being when a slot of theirs is first written.
#[derive(Debug, Default)]
pub struct Checksums(Mutex<Vec<Option<Box<[u32]>>>>);

const CHUNK: usize = 1 << 16;

impl Checksums {
    /// None known yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The block that is, or is about to be, in `slot`; `None`: nothing was recorded.
    ///
    /// Zero stands for that. A block whose checksum really is zero, one in four billion, counts as corrupt
    /// when it is read: a miss, which is safe.
    pub fn get(&self, slot: SlotId) -> Option<u32> {
        let (chunk, place) = position(slot);
        let chunks = self.0.lock();
        Some(chunks.get(chunk)?.as_ref()?[place]).filter(|&crc| crc != 0)
    }

    /// Notes the checksum of the block in `slot`.
    pub fn record(&self, slot: SlotId, crc: u32) {
        let (chunk, place) = position(slot);
        let mut chunks = self.0.lock();
        if chunks.len() <= chunk {
            chunks.resize(chunk + 1, None);
        }
        chunks[chunk].get_or_insert_with(|| vec![0; CHUNK].into())[place] = crc;
    }
}

/// Chunk, and place in it.
const fn position(slot: SlotId) -> (usize, usize) {
    (slot.0 as usize / CHUNK, slot.0 as usize % CHUNK)
}

/// The checksum of a block.
pub fn checksum(block: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(block)
}

/// A backend whose blocks are checksummed when they leave memory and verified when they return. A block that
/// comes back changed ends in [`CopyErrorKind::Corrupt`].
///
/// Checksums of blocks on their way out are computed by the submitting thread, those of blocks on their way in
/// by the thread that completes them.
#[derive(Debug)]
pub struct Verified<B> {
    inner: B,
    guard: Arc<Guard>,
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
        Ok(Self { inner, guard: Arc::new(Guard { memory, checksums }) })
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
        let (guard, ops) = (Arc::clone(&self.guard), batch.clone());
        let verified = Done::new(move |index, result| {
            done.complete(index, result.and_then(|()| guard.verify(&ops[index])));
        });
        self.inner.submit(batch, verified);
    }
}

impl Guard {
    /// An operation on a slot that does not exist is left to the backend to refuse.
    fn record(&self, op: &CopyOp) {
        if let Some(crc) = self.checksum(op.from.slot) {
            self.checksums.record(op.to.slot, crc);
        }
    }

    fn verify(&self, op: &CopyOp) -> Result<(), CopyError> {
        if op.to.tier != self.memory.tier() {
            return Ok(());
        }
        let actual = self.checksum(op.to.slot).ok_or_else(|| no_such_slot(op.to))?;
        match self.checksums.get(op.from.slot) {
            Some(expected) if expected == actual => Ok(()),
            expected => Err(corrupt(op.from, expected, actual)),
        }
    }

    fn checksum(&self, slot: SlotId) -> Option<u32> {
        let slot = self.memory.slot(slot)?;
        // SAFETY: the slot is of an operation that is submitted and not completed: nobody writes it now.
        let bytes = unsafe { slot.as_ref() };
        Some(checksum(&bytes[..self.memory.block_bytes()]))
    }
}

fn corrupt(slot: SlotRef, expected: Option<u32>, actual: u32) -> CopyError {
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
    use crate::testing::conformance::{self, Pair};
    use crate::testing::{Fault, FaultBackend, MemoryStore, fill_pattern, host, order, run, start};

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

    #[test]
    fn the_checksum_is_castagnoli() {
        // The check value of CRC-32/ISCSI in Greg Cook's catalogue.
        assert_eq!(checksum(b"123456789"), 0xe306_9283);
    }
}
