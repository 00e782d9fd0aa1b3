//! Checksums on everything that leaves memory, whichever backend moves it.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::copy::{Backend, CopyError, CopyErrorKind, CopyOp, Done, Route, SlotId, SlotRef, Tier};
use crate::error::{SetupError, SetupErrorKind};
use crate::memory::{Memory, no_such_slot};

/// The crc32c (Castagnoli) of the block in each slot of one tier. Four bytes per slot up to the highest ever
/// written.
#[derive(Debug, Default)]
pub struct Checksums(Mutex<Vec<u32>>);

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
        self.0.lock().get(slot.0 as usize).copied().filter(|&crc| crc != 0)
    }

    /// Notes the checksum of the block in `slot`.
    pub fn record(&self, slot: SlotId, crc: u32) {
        let mut all = self.0.lock();
        let index = slot.0 as usize;
        if all.len() <= index {
            all.resize(index + 1, 0);
        }
        all[index] = crc;
    }
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
