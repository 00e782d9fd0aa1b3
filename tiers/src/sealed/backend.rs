//! The path of a block: sealed, then sent; or fetched, then opened. For memory that is sealed
//! itself: opened, then sent; or fetched, then sealed.

#![expect(unsafe_code, reason = "reads and writes slots, and promises of a backend")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;

use super::format::{Cipher, SEAL_BYTES};
use super::scratch::{Scratch, ScratchLane, SealedRun};
use crate::backend::{Backend, Fences};
use crate::checksum::{SummedCopy, checksum};
use crate::copy::{CopyError, CopyOp, Done, Route, SlotRef};
use crate::error::{SetupError, SetupErrorKind};
use crate::frame::Frame;
use crate::memory::{Memory, forget_checksum, no_such_slot};
use crate::verifiers::{BlockWorkers, GRAIN_BYTES, Urgency, WorkedBlock};
use crate::verify::{corrupt, only_other_end, other_end};

/// A backend whose blocks are encrypted and authenticated when they leave memory, and opened when
/// they return. A block that comes back changed, or in another's place, or whose key is gone, ends
/// in [`CopyErrorKind::Corrupt`](crate::CopyErrorKind).
///
/// The submitting thread does nothing but queue: threads of this backend's seal and open, two at
/// least and on up to half the cores, in parallel with the medium. What has arrived goes first.
/// Blocks in memory are only read, or written when all is well: what is encrypted lies in the
/// [`Scratch`], whose slots bound how much is under way; the rest waits in the order in which it
/// came.
///
/// Memory that outlives its process may be [sealed itself](Self::of_memory): then it is the other
/// way round, and what is on its way is in the clear.
#[derive(Debug)]
pub struct Sealed<B>(Arc<SealedState<B>>);

#[derive(Debug)]
struct SealedState<B> {
    inner: B,
    memory: Arc<dyn Memory>,
    sealed: SealedEnd,
    scratch: Scratch,
    cipher: Cipher,
    threads: Arc<BlockWorkers>,
    /// For blocks whose keys must be asked of a store, which may take seconds: no other block waits
    /// for these.
    askers: Arc<BlockWorkers>,
    /// Blocks that the backend inside gets together, at most or, if it asked for several, always.
    run_blocks: usize,
    whole_runs: bool,
    routes: Vec<Route>,
}

/// Where blocks lie sealed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum SealedEnd {
    Medium,
    Memory,
}

/// One core encrypts less than a fast drive takes. On a machine of two cores both do, as far as the
/// engine leaves them.
const FEWEST_THREADS: usize = 2;

impl<B: Backend + 'static> Sealed<B> {
    /// `inner` moves blocks between the memory of `scratch` and one other tier. A store that packs
    /// batches gets up to `run_blocks` blocks of those that are submitted together in one, and all
    /// its operations must end some time; others ask for 1, and get them as there is room.
    ///
    /// # Errors
    /// `Invalid`: `inner` serves other routes, or blocks differ in size. `Unavailable`: no threads.
    pub fn new(
        inner: B,
        memory: Arc<dyn Memory>,
        scratch: Scratch,
        cipher: Cipher,
        run_blocks: usize,
    ) -> Result<Self, SetupError> {
        only_other_end(&inner, memory.tier())?;
        Self::start(inner, memory, SealedEnd::Medium, scratch, cipher, run_blocks)
    }

    /// The other way round: blocks lie sealed in `memory`, which outlives its process, and `inner`
    /// moves them in the clear between the memory of `scratch` and other tiers. What comes is
    /// sealed before it is written there, and nothing is ever opened in place. A batch keeps its
    /// order with an engine's work; but the engine gets no fence behind it, since several batches
    /// may come of it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_memory(
        inner: B,
        memory: Arc<dyn Memory>,
        scratch: Scratch,
        cipher: Cipher,
        run_blocks: usize,
    ) -> Result<Self, SetupError> {
        Self::start(inner, memory, SealedEnd::Memory, scratch, cipher, run_blocks)
    }

    fn start(
        inner: B,
        memory: Arc<dyn Memory>,
        sealed: SealedEnd,
        scratch: Scratch,
        cipher: Cipher,
        run_blocks: usize,
    ) -> Result<Self, SetupError> {
        let ours = memory.tier();
        let seal_bytes = if sealed == SealedEnd::Memory { SEAL_BYTES } else { 0 };
        let sizes = [
            memory.block_bytes().saturating_sub(seal_bytes),
            scratch.block_bytes(),
            cipher.block_bytes(),
        ];
        if scratch.memory().tier() != ours || sizes.iter().any(|&bytes| bytes != sizes[0]) {
            let message = format!(
                "{}: sealed blocks of {sizes:?} bytes do not fit the {ours} tier",
                inner.name()
            );
            return Err(SetupError::invalid(message));
        }
        let routes = inner
            .routes()
            .iter()
            .copied()
            .filter(|&route| other_end(route, ours).is_some())
            .collect();
        let no_threads = |error| {
            let message = "cannot start threads for encryption: raise the limit on processes";
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        };
        let threads = BlockWorkers::named("kvbm-seal", FEWEST_THREADS).map_err(no_threads)?;
        let askers = BlockWorkers::named("kvbm-keys", 1).map_err(no_threads)?;
        let grain = (GRAIN_BYTES / sizes[0]).max(1);
        let whole_runs = run_blocks > 1;
        let run_blocks = run_blocks.max(grain).min(scratch.out.slots());
        Ok(Self(Arc::new(SealedState {
            inner,
            memory,
            sealed,
            scratch,
            cipher,
            threads: Arc::new(threads),
            askers: Arc::new(askers),
            run_blocks,
            whole_runs,
            routes,
        })))
    }
}

// SAFETY: a block in memory is read or written only between the submission and the completion of
// its operation, and completed once: when its run's part of it failed, or when the backend inside
// is done with the slot of the scratch, which has one owner at a time as its frame says. A
// destination is reported with `Ok` only when it was written to the end.
unsafe impl<B: Backend + 'static> Backend for Sealed<B> {
    fn name(&self) -> &'static str {
        self.0.inner.name()
    }

    fn routes(&self) -> &[Route] {
        &self.0.routes
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        self.submit_fenced(batch, Fences::default(), done);
    }

    fn submit_fenced(&self, batch: Vec<CopyOp>, fences: Fences, done: Done) {
        // One mark would stand for the first of several batches: the reports say more.
        let fences = Fences { mark: None, ..fences };
        let (mut out, mut back, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        for (index, op) in batch.into_iter().enumerate() {
            match self.0.way_of(&op) {
                Ok(SealDirection::Out) => out.push((index, op)),
                Ok(SealDirection::Back) => back.push((index, op)),
                Err(error) => refused.push((index, Err(error))),
            }
        }
        done.report(refused);
        for (way, ops) in [(SealDirection::Back, back), (SealDirection::Out, out)] {
            let run = |ops: &[_]| SealedRun {
                ops: ops.to_vec(),
                fences: fences.clone(),
                done: done.clone(),
            };
            let runs = ops.chunks(self.0.run_blocks).map(run);
            self.0.lane(way).enqueue(runs);
            self.0.start_runs(way);
        }
    }
}

/// From memory, or back to it.
#[derive(Clone, Copy, Debug)]
enum SealDirection {
    Out,
    Back,
}

impl<B: Backend + 'static> SealedState<B> {
    fn way_of(&self, op: &CopyOp) -> Result<SealDirection, CopyError> {
        if !self.routes.contains(&op.route()) {
            return Err(no_such_slot(op.from));
        }
        let is_out = op.from.tier == self.memory.tier();
        let (way, here) =
            if is_out { (SealDirection::Out, op.from) } else { (SealDirection::Back, op.to) };
        self.memory.slot(here.slot).map(|_| way).ok_or_else(|| no_such_slot(here))
    }

    const fn lane(&self, way: SealDirection) -> &ScratchLane {
        match way {
            SealDirection::Out => &self.scratch.out,
            SealDirection::Back => &self.scratch.back,
        }
    }

    fn start_runs(self: &Arc<Self>, way: SealDirection) {
        self.lane(way).start_runs(self.whole_runs, |run, frames| match way {
            SealDirection::Out => self.prepare_run(run, frames),
            SealDirection::Back => self.fetch_run(run, frames),
        });
    }

    /// Hands the run on when its last block is ready.
    fn prepare_run(self: &Arc<Self>, run: SealedRun, frames: Vec<Frame>) {
        let (prepared, shared) = (Arc::clone(self), Arc::clone(self));
        let prepare = move |block: &mut BlockInScratch| {
            block.result = prepared.prepare(&block.op, &mut block.frame);
        };
        let SealedRun { ops, fences, done } = run;
        let mut blocks = blocks_of(ops, frames);
        let have_keys = blocks.iter_mut().all(|block| self.has_key(SealDirection::Out, block));
        self.work(SealDirection::Out, have_keys, blocks, prepare, move |blocks| {
            let (ready, failed): (Vec<_>, Vec<_>) =
                blocks.into_iter().partition(|block| block.result.is_ok());
            // Where a block is missing no layer can have all blocks of the run.
            let layers = fences.layers.filter(|_| failed.is_empty());
            let fences = Fences { layers, ..fences };
            shared.end(SealDirection::Out, failed, &done);
            shared.hand_on(SealDirection::Out, ready, fences, done);
        });
    }

    /// Whether a block can be sealed or opened without asking the store of keys.
    fn has_key(
        &self,
        way: SealDirection,
        BlockInScratch { op, frame, .. }: &mut BlockInScratch,
    ) -> bool {
        match (self.sealed, way) {
            (SealedEnd::Medium, SealDirection::Out) | (SealedEnd::Memory, SealDirection::Back) => {
                self.cipher.can_seal(op.owner)
            }
            (SealedEnd::Medium, SealDirection::Back) => {
                self.scratch.room(frame).map_or(true, |room| self.cipher.can_open(room))
            }
            (SealedEnd::Memory, SealDirection::Out) => {
                self.memory.slot(op.from.slot).is_none_or(|slot| {
                    // SAFETY: the slot is of an operation that is submitted and not completed:
                    // nothing writes it now.
                    self.cipher.can_open(unsafe { slot.as_ref() })
                })
            }
        }
    }

    /// An engine waits for what is opened, and nothing waits for what is sealed.
    fn work(
        &self,
        way: SealDirection,
        have_keys: bool,
        blocks: Vec<BlockInScratch>,
        work: impl Fn(&mut BlockInScratch) + Send + Sync + 'static,
        go_on: impl FnOnce(Vec<BlockInScratch>) + Send + 'static,
    ) {
        let urgency =
            match (self.sealed, way) {
                (SealedEnd::Medium, SealDirection::Out)
                | (SealedEnd::Memory, SealDirection::Back) => Urgency::Background,
                (SealedEnd::Medium, SealDirection::Back)
                | (SealedEnd::Memory, SealDirection::Out) => Urgency::Awaited,
            };
        let threads = if have_keys { &self.threads } else { &self.askers };
        threads.work_on(urgency, self.memory.block_bytes(), blocks, work, go_on);
    }

    fn fetch_run(self: &Arc<Self>, SealedRun { ops, fences, done }: SealedRun, frames: Vec<Frame>) {
        self.hand_on(SealDirection::Back, blocks_of(ops, frames), fences, done);
    }

    /// The backend inside moves these blocks between their slots in the scratch and its medium.
    fn hand_on(
        self: &Arc<Self>,
        way: SealDirection,
        blocks: Vec<BlockInScratch>,
        fences: Fences,
        done: Done,
    ) {
        if blocks.is_empty() {
            return;
        }
        let ops = blocks.iter().map(|block| block.op_inside(way)).collect();
        let under_way: Mutex<Vec<_>> = Mutex::new(blocks.into_iter().map(Some).collect());
        let shared = Arc::clone(self);
        let report = Done::new(move |ended| {
            let mut under_way = under_way.lock();
            let blocks = ended.into_iter().filter_map(|(place, result)| {
                let block = under_way[place].take()?;
                Some(BlockInScratch { result, ..block })
            });
            let blocks: Vec<_> = blocks.collect();
            drop(under_way);
            match way {
                SealDirection::Back => shared.finish_aside(blocks, &done),
                SealDirection::Out => shared.end(way, blocks, &done),
            }
        });
        // What became of a batch whose backend panicked is unknown. Its blocks are never reported
        // and keep their slots, as they would without encryption; the thread has other blocks to
        // look after.
        if catch_unwind(AssertUnwindSafe(|| self.inner.submit_fenced(ops, fences, report))).is_err()
        {
            tracing::error!(
                backend = self.inner.name(),
                "a backend panicked when it was given blocks of a sealed tier"
            );
        }
    }

    /// Blocks whose keys are known do not wait for those that a store is asked about.
    fn finish_aside(self: &Arc<Self>, blocks: Vec<BlockInScratch>, done: &Done) {
        // What could not be fetched is no block, and has no key to ask for.
        let keyed = |mut block: BlockInScratch| {
            (block.result.is_err() || self.has_key(SealDirection::Back, &mut block), block)
        };
        let (known, unknown): (Vec<_>, Vec<_>) =
            blocks.into_iter().map(keyed).partition(|&(has_key, _)| has_key);
        for (have_keys, blocks) in [(true, known), (false, unknown)] {
            let blocks: Vec<_> = blocks.into_iter().map(|(_, block)| block).collect();
            let (finisher, shared, done) = (Arc::clone(self), Arc::clone(self), done.clone());
            let finish = move |block: &mut BlockInScratch| {
                if block.result.is_ok() {
                    block.result = finisher.finish(block);
                }
            };
            self.work(SealDirection::Back, have_keys, blocks, finish, move |blocks| {
                shared.end(SealDirection::Back, blocks, &done);
            });
        }
    }

    /// The slots in the scratch are free again before any end is reported, and go to what waits
    /// after.
    fn end(self: &Arc<Self>, way: SealDirection, blocks: Vec<BlockInScratch>, done: &Done) {
        if blocks.is_empty() {
            return;
        }
        let (frames, ended): (Vec<_>, _) =
            blocks.into_iter().map(|block| (block.frame, (block.index, block.result))).unzip();
        self.lane(way).give_back(frames);
        done.report(ended);
        self.start_runs(way);
    }

    /// Brings a block from memory into the scratch, as the backend inside wants it.
    fn prepare(&self, op: &CopyOp, frame: &mut Frame) -> Result<(), CopyError> {
        match self.sealed {
            SealedEnd::Medium => self.seal(op, frame),
            SealedEnd::Memory => self.open_from_memory(op, frame),
        }
    }

    /// Brings a block from the scratch into memory, as it is to lie there.
    fn finish(&self, block: &mut BlockInScratch) -> Result<(), CopyError> {
        match self.sealed {
            SealedEnd::Medium => self.open(block),
            SealedEnd::Memory => self.seal_into_memory(block),
        }
    }

    fn seal(&self, op: &CopyOp, frame: &mut Frame) -> Result<(), CopyError> {
        let slot = self.memory.slot(op.from.slot).ok_or_else(|| no_such_slot(op.from))?;
        // SAFETY: the slot is of an operation that is submitted and not completed: nothing writes
        // it now.
        let block = &unsafe { slot.as_ref() }[..self.memory.block_bytes()];
        let known = self.memory.checksums().and_then(|checksums| checksums.get(op.from.slot));
        let crc = known.unwrap_or_else(|| checksum(block));
        self.cipher.seal(op.block, op.owner, block, crc, self.scratch.room(frame)?)?;
        // While it lies in the caches: the backend inside would have to read it again.
        self.scratch.remember_checksum(frame);
        Ok(())
    }

    fn open(&self, block: &mut BlockInScratch) -> Result<(), CopyError> {
        let BlockInScratch { op, frame, .. } = block;
        forget_checksum(&*self.memory, op.to.slot);
        let slot = self.memory.slot(op.to.slot).ok_or_else(|| no_such_slot(op.to))?;
        let room = self.scratch.room(frame)?;
        let expected =
            self.cipher.open(op.block, room).map_err(|error| of_slot(op.from, &error))?;
        // SAFETY: the destination of an operation that is submitted and not completed: nothing else
        // touches it, and it does not lie in the scratch.
        let destination = unsafe { &mut *slot.as_ptr() };
        let mut copy = SummedCopy::new();
        let block_bytes = self.memory.block_bytes();
        copy.piece(&room[..block_bytes], &mut destination[..block_bytes]);
        let actual = copy.finish();
        if actual != expected {
            return Err(corrupt(op.from, Some(expected), actual));
        }
        self.memory.checksums().inspect(|checksums| checksums.record(op.to.slot, actual));
        Ok(())
    }

    fn open_from_memory(&self, op: &CopyOp, frame: &mut Frame) -> Result<(), CopyError> {
        let slot = self.memory.slot(op.from.slot).ok_or_else(|| no_such_slot(op.from))?;
        // SAFETY: the slot is of an operation that is submitted and not completed: nothing writes
        // it now.
        let sealed = &unsafe { slot.as_ref() }[..self.memory.block_bytes()];
        let room = self.scratch.room(frame)?;
        room.copy_from_slice(sealed);
        let crc = self.cipher.open(op.block, room).map_err(|error| of_slot(op.from, &error))?;
        // The tag vouches for it: the next to take the block compares it there.
        self.scratch.checksums().inspect(|checksums| checksums.record(frame.slot(), crc));
        Ok(())
    }

    fn seal_into_memory(&self, block: &mut BlockInScratch) -> Result<(), CopyError> {
        let BlockInScratch { op, frame, .. } = block;
        forget_checksum(&*self.memory, op.to.slot);
        let slot = self.memory.slot(op.to.slot).ok_or_else(|| no_such_slot(op.to))?;
        let known = self.scratch.checksums().and_then(|checksums| checksums.get(frame.slot()));
        let block = &self.scratch.room(frame)?[..self.scratch.block_bytes()];
        let crc = known.unwrap_or_else(|| checksum(block));
        // SAFETY: the destination of an operation that is submitted and not completed: nothing else
        // touches it, and it does not lie in the scratch.
        let destination = &mut unsafe { &mut *slot.as_ptr() }[..self.memory.block_bytes()];
        self.cipher.seal(op.block, op.owner, block, crc, destination)?;
        // Of the sealed bytes: what an index says of them tells nothing of the block.
        self.memory
            .checksums()
            .inspect(|checksums| checksums.record(op.to.slot, checksum(destination)));
        Ok(())
    }
}

fn of_slot(slot: SlotRef, error: &CopyError) -> CopyError {
    CopyError::new(error.kind(), format!("{slot}: {error}"))
}

/// A block that has a slot of the scratch.
struct BlockInScratch {
    /// Its number in the batch.
    index: usize,
    op: CopyOp,
    frame: Frame,
    /// What became of it so far.
    result: Result<(), CopyError>,
}

impl WorkedBlock for BlockInScratch {
    fn fail(&mut self, error: CopyError) {
        self.result = Err(error);
    }
}

impl BlockInScratch {
    const fn op_inside(&self, way: SealDirection) -> CopyOp {
        match way {
            SealDirection::Out => CopyOp { from: self.frame.slot_ref(), ..self.op },
            SealDirection::Back => CopyOp { to: self.frame.slot_ref(), ..self.op },
        }
    }
}

fn blocks_of(ops: Vec<(usize, CopyOp)>, frames: Vec<Frame>) -> Vec<BlockInScratch> {
    let blocks = ops.into_iter().zip(frames);
    blocks.map(|((index, op), frame)| BlockInScratch { index, op, frame, result: Ok(()) }).collect()
}
