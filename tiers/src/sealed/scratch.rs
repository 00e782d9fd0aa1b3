//! Slots for blocks on their way, and who waits for one.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

use parking_lot::Mutex;

use super::format::SEAL_BYTES;
use crate::backend::Fences;
use crate::checksum::Checksums;
use crate::copy::{CopyError, CopyOp, Done};
use crate::dram::{DramOptions, DramRegion};
use crate::error::SetupError;
use crate::frame::{Frame, FramePool};
use crate::geometry::Geometry;
use crate::memory::{Memory, no_such_slot};

/// How much memory there is for blocks on their way.
#[derive(Clone, Copy, Debug)]
pub struct ScratchOptions {
    /// Bytes of one block, before it is sealed.
    pub block_bytes: usize,
    /// Blocks on their way at the same time, out as many as in; at least one.
    pub blocks: u32,
    /// Ask for transparent huge pages.
    pub huge_pages: bool,
}

/// Memory for blocks on their way, which plays the host tier to the backend inside. What leaves and
/// what arrives have slots of their own, so that a medium that takes nothing any more does not keep
/// others from reading; and what leaves sealed never lies where something readable lay before.
#[derive(Debug)]
pub struct Scratch {
    region: Arc<DramRegion>,
    block_bytes: usize,
    pub(super) out: ScratchLane,
    pub(super) back: ScratchLane,
}

impl ScratchOptions {
    const fn slots(&self) -> u32 {
        self.blocks.saturating_mul(2)
    }
}

impl Scratch {
    /// Takes the memory, for a backend inside that moves sealed blocks.
    ///
    /// # Errors
    /// `NoSpace`: the system has not that much. `Invalid`: no blocks, or of no bytes.
    pub fn open(options: ScratchOptions) -> Result<Self, SetupError> {
        // An empty block is for the geometry to refuse.
        let bytes = options.block_bytes;
        let sealed = if bytes == 0 { 0 } else { bytes.saturating_add(SEAL_BYTES) };
        Self::with_geometry(options, Geometry::new(options.slots(), sealed)?)
    }

    /// Takes the memory, for a backend inside that moves blocks in the clear: in their slots there
    /// is room for the seal.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn in_the_clear(options: ScratchOptions) -> Result<Self, SetupError> {
        let geometry =
            Geometry::new(options.slots(), options.block_bytes)?.with_room(SEAL_BYTES)?;
        Self::with_geometry(options, geometry)
    }

    fn with_geometry(options: ScratchOptions, geometry: Geometry) -> Result<Self, SetupError> {
        let ScratchOptions { block_bytes, blocks, huge_pages } = options;
        let region =
            Arc::new(DramRegion::host(DramOptions { geometry, huge_pages, fault_threads: 1 })?);
        let Some(mut pool) = region.frames() else { unreachable!("the first call") };
        let (out, back) =
            (ScratchLane::new(&mut pool, blocks), ScratchLane::new(&mut pool, blocks));
        Ok(Self { region, block_bytes, out, back })
    }

    /// What the backend inside moves blocks to and from.
    pub fn memory(&self) -> Arc<dyn Memory> {
        Arc::clone(&self.region) as _
    }

    /// A slot that leaves the scratch for a while, with the region that it is in; nothing is on its
    /// way yet.
    pub fn borrow_slot(&self) -> Option<(Arc<DramRegion>, Frame)> {
        Some((Arc::clone(&self.region), self.out.take()?))
    }

    /// The end of [`borrow_slot`](Self::borrow_slot).
    pub fn return_slot(&self, frame: Frame) {
        self.out.give_back(vec![frame]);
    }

    /// Bytes of one block, before it is sealed.
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The bytes of a slot that a sealed block takes.
    pub(super) fn room<'a>(&'a self, frame: &'a mut Frame) -> Result<&'a mut [u8], CopyError> {
        let (slot, bytes) = (frame.slot_ref(), self.block_bytes + SEAL_BYTES);
        let room = self.region.write_slot(frame).and_then(|slot| slot.get_mut(..bytes));
        room.ok_or_else(|| no_such_slot(slot))
    }

    /// The block in the slot is whole: the next to take it need not sum it.
    pub(super) fn remember_checksum(&self, frame: &Frame) {
        self.region.remember_checksum(frame);
    }

    /// Checksums of what the backend inside brought, as far as it sums it, and of what it is to
    /// take.
    pub(super) fn checksums(&self) -> Option<&Checksums> {
        self.region.checksums()
    }
}

/// Operations of one batch that are handed on together, each with its number in the batch.
pub(super) struct SealedRun {
    pub(super) ops: Vec<(usize, CopyOp)>,
    pub(super) fences: Fences,
    pub(super) done: Done,
}

/// The slots of one direction. A run that finds none waits here, and blocks no thread.
#[derive(Debug)]
pub(super) struct ScratchLane {
    slots: usize,
    state: Mutex<LaneState>,
}

struct LaneState {
    free: Vec<Frame>,
    waiting: VecDeque<SealedRun>,
    /// A thread is starting runs, and will see what changes meanwhile.
    is_starting: bool,
}

impl ScratchLane {
    fn new(pool: &mut FramePool, slots: u32) -> Self {
        let free: Vec<_> = (0..slots).filter_map(|_| pool.take()).collect();
        let state = LaneState { free, waiting: VecDeque::new(), is_starting: false };
        Self { slots: slots as usize, state: Mutex::new(state) }
    }

    /// The most blocks of a whole run.
    pub(super) const fn slots(&self) -> usize {
        self.slots
    }

    pub(super) fn enqueue(&self, runs: impl IntoIterator<Item = SealedRun>) {
        self.state.lock().waiting.extend(runs);
    }

    fn take(&self) -> Option<Frame> {
        self.state.lock().free.pop()
    }

    pub(super) fn give_back(&self, frames: Vec<Frame>) {
        self.state.lock().free.extend(frames);
    }

    /// Starts the runs that have room, in the order in which they came: `whole`, or as much of them
    /// as there is room for. A run may end, and so come back here, before it is started: then the
    /// outer call goes on with the next, and the stack stays flat.
    pub(super) fn start_runs(&self, whole: bool, start: impl Fn(SealedRun, Vec<Frame>)) {
        if mem::replace(&mut self.state.lock().is_starting, true) {
            return;
        }
        while let Some((run, frames)) = self.next(whole) {
            start(run, frames);
        }
    }

    /// The oldest run, or its beginning, and its slots; `None`: it must wait, and no thread starts
    /// runs any more.
    fn next(&self, whole: bool) -> Option<(SealedRun, Vec<Frame>)> {
        let mut state = self.state.lock();
        let found = state.take(whole);
        state.is_starting = found.is_some();
        found
    }
}

impl LaneState {
    fn take(&mut self, whole: bool) -> Option<(SealedRun, Vec<Frame>)> {
        let (room, run) = (self.free.len(), self.waiting.front_mut()?);
        let blocks = run.ops.len().min(room);
        if blocks == 0 || (whole && blocks < run.ops.len()) {
            return None;
        }
        let (fences, done) = (run.fences.clone(), run.done.clone());
        let taken = SealedRun { ops: run.ops.drain(..blocks).collect(), fences, done };
        self.waiting.pop_front_if(|run| run.ops.is_empty());
        Some((taken, self.free.split_off(room - blocks)))
    }
}

impl std::fmt::Debug for LaneState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (free, waiting) = (self.free.len(), self.waiting.len());
        f.debug_struct("State")
            .field("free", &free)
            .field("waiting", &waiting)
            .finish_non_exhaustive()
    }
}
