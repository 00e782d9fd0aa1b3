//! Copies between host memory and a GPU.

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use cudarc::driver::result::DriverError;

use super::driver::{
    CudaStream, Gpu, KernelTable, PinnedHost, PitchedAddress, StreamEvent, ends_the_context, failed,
};
use super::kernels::{CopyKernels, KernelOrigin};
use super::rows::{PitchedRows, rows};
use crate::backend::{Backend, Fence, Fences, Mark};
use crate::clock;
use crate::copy::{
    Completion, CopyError, CopyErrorKind, CopyOp, Done, Endings, Route, SlotId, Tier,
};
use crate::error::{SetupError, SetupErrorKind};
use crate::geometry::{Piece, Segment, pieces};
use crate::memory::{DeviceRegion, Memory, Space, forget_checksum, no_such_slot};

/// Moves blocks between locked host memory and device memory, each direction in a stream and a
/// thread of its own: the thread starts copies and looks after their events, so no caller that
/// submits waits for the GPU.
#[derive(Debug)]
pub struct CudaBackend {
    routes: [Route; 2],
    /// To the threads, in the order of the routes.
    lanes: [Sender<FencedBatch>; 2],
    origin: KernelOrigin,
}

/// Operations submitted together.
#[derive(Debug)]
struct FencedBatch {
    ops: Vec<CopyOp>,
    fences: Fences,
    done: Done,
}

/// How pieces that are no rows cross in one direction. Measured on an H100 (docs/gpu.md): copy
/// engines cost the engine's kernels nothing, but need a moment for each piece; our kernel does
/// not, but takes room from the engine's, and what writes to the host at full speed keeps all else
/// from the GPU's memory, more so the more of it is under way.
#[derive(Clone, Copy, Debug)]
struct CopyPath {
    /// Pieces smaller than this on average are copied by the kernel, where one call starts many
    /// copies.
    small: usize,
    /// Groups of threads that copy: the fewest that fill the link.
    groups: u32,
}

const TO_GPU: CopyPath = CopyPath { small: 32 << 10, groups: 4 };
const FROM_GPU: CopyPath = CopyPath { small: 16 << 10, groups: 2 };
/// As `CopyPath::small`, where each copy takes a call of its own: in its microseconds a link moves
/// about this much.
const SMALL_ALONE: usize = 256 << 10;
/// From this many pieces on, one call for all is worth its preparation.
const MANY_PIECES: usize = 4;
/// Pieces that one launch of the kernel takes, unless a single block has more.
const TABLE_PIECES: usize = 4096;
/// Flights of a lane at a time. What they need is made at the start: to allocate locked memory
/// while copies run takes milliseconds, and the driver's locks.
const MAX_FLIGHTS: usize = 32;
/// How often a thread looks whether copies have ended. The system rounds it up by about 50 µs.
const POLL: Duration = Duration::from_micros(20);

impl CudaBackend {
    /// Moves blocks between `memory`, which is locked for that, and `device`, which is in this
    /// GPU's memory.
    ///
    /// # Errors
    /// `Invalid`: the blocks differ in size, or the device region is elsewhere. `Unavailable`: the
    /// memory cannot be locked, or the GPU gives no stream.
    pub fn new(
        gpu: &Gpu,
        memory: Arc<dyn Memory>,
        device: &Arc<DeviceRegion>,
    ) -> Result<Self, SetupError> {
        check_fit(gpu, &*memory, device)?;
        let routes = [(memory.tier(), Tier::Device), (Tier::Device, memory.tier())];
        let host = Arc::new(PinnedHost::new(gpu, memory)?);
        let kernels = Arc::new(CopyKernels::load(gpu)?);
        let start = |name: &str, way| CopyLane::start(name, way, gpu, &host, device, &kernels);
        let lanes = [start("kvbm-to-gpu", TO_GPU)?, start("kvbm-from-gpu", FROM_GPU)?];
        Ok(Self { routes, lanes, origin: kernels.origin().clone() })
    }

    /// Where the kernels come from.
    pub const fn kernels(&self) -> &KernelOrigin {
        &self.origin
    }
}

fn check_fit(gpu: &Gpu, memory: &dyn Memory, device: &DeviceRegion) -> Result<(), SetupError> {
    let (ours, theirs) = (memory.block_bytes(), device.segments().block_bytes());
    let message = if ours != theirs {
        format!("{} blocks of {ours} bytes do not fit device blocks of {theirs}", memory.tier())
    } else if device.space() != Space::Cuda(gpu.ordinal()) || memory.tier() == Tier::Device {
        format!("{gpu:?} does not connect {memory:?} and {device:?}")
    } else {
        return Ok(());
    };
    Err(SetupError::invalid(message))
}

// SAFETY: an operation is reported when the event behind its copies has passed, or an error says
// that the context has ended and with it all its work; any other error says nothing, and the slots
// stay the operation's. The lanes' threads keep both regions until they have reported everything,
// and copy the pieces of blocks of one size, in slots that exist.
unsafe impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, ops: Vec<CopyOp>, done: Done) {
        self.submit_fenced(ops, Fences::default(), done);
    }

    fn submit_fenced(&self, ops: Vec<CopyOp>, fences: Fences, done: Done) {
        let batch = FencedBatch { ops, fences, done };
        if let Fence::Host(fence) = &batch.fences.after
            && !fence.is_raised()
        {
            let why = "a GPU cannot wait for a thread: submit when the fence is raised";
            return batch.end(&CopyError::refused(why));
        }
        for (lane, route) in self.lanes.iter().zip(&self.routes) {
            // A batch is of one route; whatever else is in it, the lane refuses.
            if batch.ops.first().is_some_and(|op| op.route() == *route) {
                return lane.send(batch).unwrap_or_else(|unsent| unsent.0.refuse());
            }
        }
        batch.refuse();
    }
}

impl FencedBatch {
    /// No lane serves it.
    fn refuse(self) {
        if let Some(op) = self.ops.first() {
            self.end(&no_such_slot(op.from));
        }
    }

    /// Nothing of it was started.
    fn end(&self, error: &CopyError) {
        self.done.report((0..self.ops.len()).map(|index| (index, Err(error.clone()))).collect());
    }
}

/// One direction.
struct CopyLane {
    way: CopyPath,
    gpu: Gpu,
    stream: CudaStream,
    host: Arc<PinnedHost>,
    device: Arc<DeviceRegion>,
    kernels: Arc<CopyKernels>,
    /// Copies that were started, in the order of the stream.
    flights: VecDeque<CopyFlight>,
    idle: Vec<FlightScratch>,
    /// Operations that a flight takes.
    grain: usize,
    /// The pieces of a block, if they are rows.
    rows: Vec<PitchedRows>,
    /// Of the flight that is being started.
    blocks: Vec<BlockEnds>,
    pieces: Vec<Piece>,
    call: BatchedCall,
}

/// Where a block crosses.
#[derive(Clone, Copy)]
struct BlockEnds {
    /// Its address in host memory.
    host: usize,
    /// Its slot on the GPU.
    slot: SlotId,
    is_to_gpu: bool,
}

/// The arguments of a call that starts many copies.
#[derive(Default)]
struct BatchedCall {
    from: Vec<u64>,
    to: Vec<u64>,
    bytes: Vec<usize>,
}

/// What a flight needs.
struct FlightScratch {
    /// What the kernel reads, if it copies.
    table: KernelTable<Piece>,
    /// Not reported yet, with their places in the batch.
    indices: Vec<usize>,
}

/// Copies that were started together.
struct CopyFlight {
    scratch: FlightScratch,
    event: Arc<StreamEvent>,
    /// The event is behind the copies.
    recorded: bool,
    /// Left when it is.
    mark: Option<Mark>,
    done: Done,
    /// Why some copies were not started.
    failure: Option<DriverError>,
    /// The driver was asked about it and gave no answer.
    doubtful: bool,
}

impl CopyLane {
    /// The thread ends on its own when everything submitted was reported and the sender is gone: a
    /// GPU that hangs must not hang the thread that drops the backend.
    fn start(
        name: &str,
        way: CopyPath,
        gpu: &Gpu,
        host: &Arc<PinnedHost>,
        device: &Arc<DeviceRegion>,
        kernels: &Arc<CopyKernels>,
    ) -> Result<Sender<FencedBatch>, SetupError> {
        let lane = Self::new(way, gpu, host, device, kernels)?;
        let (batches, incoming) = crossbeam_channel::unbounded();
        let (tell, told) = mpsc::sync_channel(1);
        let serve = move || lane.serve(&incoming, &tell);
        clock::spawn(name, serve).map_err(|error| {
            let message = "cannot start a thread for the GPU: raise the limit on processes";
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })?;
        match told.recv() {
            Ok(Err(error)) => Err(failed("no context", error)),
            _ => Ok(batches),
        }
    }

    fn new(
        way: CopyPath,
        gpu: &Gpu,
        host: &Arc<PinnedHost>,
        device: &Arc<DeviceRegion>,
        kernels: &Arc<CopyKernels>,
    ) -> Result<Self, SetupError> {
        let parts = device.segments().parts().len();
        let scratch = |_| {
            Ok(FlightScratch {
                table: KernelTable::new(gpu, TABLE_PIECES.max(parts))?,
                indices: Vec::new(),
            })
        };
        let idle: Result<_, SetupError> = (0..MAX_FLIGHTS).map(scratch).collect();
        gpu.reserve_events(MAX_FLIGHTS).map_err(|error| failed("no events", error))?;
        Ok(Self {
            way,
            gpu: gpu.clone(),
            stream: CudaStream::new(gpu)?,
            host: Arc::clone(host),
            device: Arc::clone(device),
            kernels: Arc::clone(kernels),
            flights: VecDeque::with_capacity(MAX_FLIGHTS),
            idle: idle?,
            grain: (TABLE_PIECES / parts).max(1),
            rows: rows(device.segments(), |address| gpu.allocation_of(address)),
            blocks: Vec::new(),
            pieces: Vec::new(),
            call: BatchedCall::default(),
        })
    }

    fn serve(
        mut self,
        batches: &Receiver<FencedBatch>,
        tell: &mpsc::SyncSender<Result<(), DriverError>>,
    ) {
        let gpu = self.gpu.clone();
        let entered = gpu.enter();
        let outcome = entered.as_ref().map(|_| ()).map_err(|error| *error);
        // The thread that starts the lane waits for it.
        let _ = tell.send(outcome);
        let mut open = outcome.is_ok();
        while open || !self.flights.is_empty() {
            open = open && self.receive(batches);
            self.land();
        }
    }

    /// Starts what was submitted; waits for more, as long as there is nothing else to do. False:
    /// nothing will come.
    fn receive(&mut self, batches: &Receiver<FencedBatch>) -> bool {
        let first = if self.flights.is_empty() {
            batches.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            batches.recv_timeout(POLL)
        };
        let mut next = match first {
            Ok(batch) => Some(batch),
            Err(RecvTimeoutError::Timeout) => return true,
            Err(RecvTimeoutError::Disconnected) => return false,
        };
        while let Some(batch) = next {
            self.launch(batch);
            next = match batches.try_recv() {
                Ok(batch) => Some(batch),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => return false,
            };
        }
        true
    }

    /// Starts the copies of a batch, behind its fence.
    fn launch(&mut self, mut batch: FencedBatch) {
        if let Err(error) = self.wait_for(&batch.fences.after) {
            let message = format!("CUDA: copies cannot wait for the engine's event: {error}");
            return batch.end(&CopyError::caused(CopyErrorKind::Io, message, error));
        }
        let mut mark = batch.fences.mark.take();
        let flights = batch.ops.len().div_ceil(self.grain);
        for (number, ops) in batch.ops.chunks(self.grain).enumerate() {
            let mark = if number + 1 == flights { mark.take() } else { None };
            self.launch_flight(number * self.grain, ops, &batch.done, mark);
        }
    }

    fn wait_for(&self, fence: &Fence) -> Result<(), DriverError> {
        let Fence::Event(event) = fence else { return Ok(()) };
        // SAFETY: the event is as the fence's maker promised, and lives as long as the fence.
        unsafe { self.stream.wait_for(event.handle()) }
    }

    /// Starts copies, of which the first is the `first` of its batch; what names slots that do not
    /// exist is refused at once.
    fn launch_flight(&mut self, first: usize, ops: &[CopyOp], done: &Done, mark: Option<Mark>) {
        let mut scratch = self.take_scratch();
        let mut refused = Vec::new();
        self.blocks.clear();
        for (index, op) in ops.iter().enumerate() {
            match self.ends(op) {
                Ok(ends) => {
                    self.blocks.push(ends);
                    scratch.indices.push(first + index);
                }
                Err(error) => refused.push((first + index, Err(error))),
            }
        }
        done.report(refused);
        let event = match StreamEvent::new(&self.gpu) {
            Ok(event) if !scratch.indices.is_empty() => Arc::new(event),
            outcome => {
                // Nothing to start, or nothing that would tell when it ends.
                let error = outcome.err();
                done.report(scratch.ended(error.map_or(Ok(()), Err)).collect());
                return self.idle.push(scratch);
            }
        };
        let failure = self.copy(&mut scratch.table).err();
        let done = done.clone();
        let mut flight =
            CopyFlight { scratch, event, recorded: false, mark, done, failure, doubtful: false };
        // If it cannot be recorded now it is later, behind more than needs be.
        let _ = flight.record(&self.stream);
        self.flights.push_back(flight);
    }

    /// One that no flight uses: waits for one to land if need be.
    fn take_scratch(&mut self) -> FlightScratch {
        loop {
            if let Some(scratch) = self.idle.pop() {
                return scratch;
            }
            self.land();
            if self.idle.is_empty() {
                thread::sleep(POLL);
            }
        }
    }

    /// Where an operation's block is, and goes.
    fn ends(&self, op: &CopyOp) -> Result<BlockEnds, CopyError> {
        let memory = self.host.memory();
        let (ours, theirs, is_to_gpu) = match op.route() {
            (from, Tier::Device) if from == memory.tier() => (op.from, op.to, true),
            (Tier::Device, to) if to == memory.tier() => (op.to, op.from, false),
            _ => return Err(no_such_slot(op.from)),
        };
        let whole = memory.slot(ours.slot).ok_or_else(|| no_such_slot(ours))?;
        if theirs.slot.0 >= self.device.segments().slots() {
            return Err(no_such_slot(theirs));
        }
        if !is_to_gpu {
            forget_checksum(&**memory, ours.slot);
        }
        Ok(BlockEnds { host: whole.addr().get(), slot: theirs.slot, is_to_gpu })
    }

    /// Starts the copies of `blocks`.
    fn copy(&mut self, table: &mut KernelTable<Piece>) -> Result<(), DriverError> {
        if !self.rows.is_empty() {
            match self.copy_rows() {
                Err(error) if is_refusal(error) => {
                    let gpu = &self.gpu;
                    tracing::warn!(%error, ?gpu, "the driver does not copy blocks as rows: they go by pieces from now on");
                    self.rows.clear();
                }
                outcome => return outcome,
            }
        }
        self.cut();
        self.copy_pieces(table)
    }

    fn copy_rows(&self) -> Result<(), DriverError> {
        for &BlockEnds { host, slot, is_to_gpu } in &self.blocks {
            for rows in &self.rows {
                let here = PitchedAddress { address: host + rows.offset, pitch: rows.step };
                let there = PitchedAddress { address: rows.address(slot), pitch: rows.pitch };
                let (from, to) = if is_to_gpu { (here, there) } else { (there, here) };
                // SAFETY: pieces of blocks whose slots are the operations' until the event behind
                // has passed.
                unsafe { self.stream.copy_rows(from, to, rows.bytes, rows.count) }?;
            }
        }
        Ok(())
    }

    /// Cuts the blocks into pieces.
    fn cut(&mut self) {
        self.pieces.clear();
        let segments = self.device.segments();
        for &BlockEnds { host, slot, is_to_gpu } in &self.blocks {
            let here = std::iter::once(Segment { address: host, bytes: segments.block_bytes() });
            let there = segments.segments(slot).into_iter().flatten();
            if is_to_gpu {
                self.pieces.extend(pieces(here, there));
            } else {
                self.pieces.extend(pieces(there, here));
            }
        }
    }

    fn copy_pieces(&mut self, table: &mut KernelTable<Piece>) -> Result<(), DriverError> {
        let bytes: usize = self.pieces.iter().map(|piece| piece.bytes).sum();
        let batches = self.gpu.copies_batches();
        let small = if batches { self.way.small } else { SMALL_ALONE };
        if self.pieces.len() >= MANY_PIECES && bytes / self.pieces.len() < small {
            return self.copy_by_kernel(table);
        }
        if self.pieces.len() >= MANY_PIECES && batches {
            return self.copy_in_one_call();
        }
        let copy = |piece: &Piece| {
            // SAFETY: pieces of blocks whose slots are the operations' until the event behind has
            // passed.
            unsafe { self.stream.copy(piece.from, piece.to, piece.bytes) }
        };
        self.pieces.iter().try_for_each(copy)
    }

    fn copy_in_one_call(&mut self) -> Result<(), DriverError> {
        let BatchedCall { from, to, bytes } = &mut self.call;
        from.clear();
        to.clear();
        bytes.clear();
        for piece in &self.pieces {
            from.push(piece.from as u64);
            to.push(piece.to as u64);
            bytes.push(piece.bytes);
        }
        // SAFETY: as in `copy`; the driver copies batches.
        unsafe { self.stream.copy_all(from, to, bytes) }
    }

    fn copy_by_kernel(&mut self, table: &mut KernelTable<Piece>) -> Result<(), DriverError> {
        for place in 0..self.pieces.len() {
            self.pieces[place] = self.mapped(&self.pieces[place]);
        }
        // SAFETY: as in `copy`; the flight keeps the table, which no other has meanwhile.
        unsafe {
            let pieces = table.fill(&self.stream, &self.pieces)?;
            self.kernels.copy_pieces(&self.stream, pieces, self.pieces.len(), self.way.groups)
        }
    }

    /// The piece with its host end as kernels address it.
    fn mapped(&self, piece: &Piece) -> Piece {
        let memory = self.host.memory();
        let base = memory.base().addr().get();
        let ours = base..base + memory.geometry().bytes();
        let mapped =
            |address| if ours.contains(&address) { self.host.mapped(address) } else { address };
        Piece { from: mapped(piece.from), to: mapped(piece.to), bytes: piece.bytes }
    }

    /// Reports what has ended. A stream's work ends in order.
    fn land(&mut self) {
        let mut landed = Endings::default();
        while let Some(flight) = self.flights.front_mut()
            && let Some(outcome) = flight.outcome(&self.stream)
            && let Some(mut flight) = self.flights.pop_front()
        {
            flight
                .scratch
                .ended(outcome)
                .for_each(|(index, result)| landed.add(&flight.done, index, result));
            self.idle.push(flight.scratch);
        }
        landed.report();
    }
}

impl CopyFlight {
    /// How the copies ended; `None`: they may still run, for all that is known.
    fn outcome(&mut self, stream: &CudaStream) -> Option<Result<(), DriverError>> {
        match self.has_passed(stream) {
            Ok(true) => Some(self.failure.map_or(Ok(()), Err)),
            Ok(false) => None,
            Err(error) if ends_the_context(error) => Some(Err(error)),
            Err(error) => {
                if !std::mem::replace(&mut self.doubtful, true) {
                    tracing::warn!(%error, "the driver does not say whether copies have ended: asking again");
                }
                None
            }
        }
    }

    fn has_passed(&mut self, stream: &CudaStream) -> Result<bool, DriverError> {
        if !self.recorded {
            self.record(stream)?;
        }
        self.event.has_passed()
    }

    /// Puts the event behind the copies.
    fn record(&mut self, stream: &CudaStream) -> Result<(), DriverError> {
        self.event.record(stream)?;
        self.recorded = true;
        if let Some(mark) = self.mark.take() {
            mark.leave(Arc::clone(&self.event).fence());
        }
        Ok(())
    }
}

impl FlightScratch {
    /// All of its operations ended so.
    fn ended(&mut self, outcome: Result<(), DriverError>) -> impl Iterator<Item = Completion> {
        self.indices.drain(..).map(move |index| (index, outcome.map_err(failed_copy)))
    }
}

/// Whether it would be the same next time.
fn is_refusal(error: DriverError) -> bool {
    use cudarc::driver::sys::CUresult;
    matches!(error.0, CUresult::CUDA_ERROR_INVALID_VALUE | CUresult::CUDA_ERROR_NOT_SUPPORTED)
}

fn failed_copy(error: DriverError) -> CopyError {
    CopyError::caused(CopyErrorKind::Io, format!("CUDA: a copy failed: {error}"), error)
}
