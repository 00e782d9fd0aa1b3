//! Copies between host memory and a GPU.

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use cudarc::driver::result::DriverError;

use super::checksum::BlockSummer;
use super::crossing::{BlockCopier, BlockEnds, FROM_GPU, TO_GPU};
use super::driver::{
    CudaStream, Gpu, KernelTable, LockedHost, StreamEvent, ends_the_context, failed,
};
use super::kernels::CopyKernels;
use crate::backend::{Backend, Fence, Fences, Mark};
use crate::clock;
use crate::copy::{
    Completion, CopyError, CopyErrorKind, CopyOp, Done, Endings, Route, SlotId, Tier,
};
use crate::error::{SetupError, SetupErrorKind};
use crate::geometry::Piece;
use crate::memory::{DeviceRegion, Memory, Space, forget_checksum, no_such_slot};

/// Moves blocks between locked host memory and device memory, each direction in a stream and a
/// thread of its own: the thread starts copies and looks after their events, so no caller that
/// submits waits for the GPU.
#[derive(Debug)]
pub struct CudaBackend {
    routes: [Route; 2],
    /// To the threads, in the order of the routes.
    lanes: [Sender<FencedBatch>; 2],
}

/// Operations submitted together.
#[derive(Debug)]
struct FencedBatch {
    ops: Vec<CopyOp>,
    fences: Fences,
    done: Done,
}

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
        Self::start(gpu, memory, device, false)
    }

    /// As [`new`](Self::new), and the GPU sums the blocks that leave it, where the memory remembers
    /// checksums: for those whose blocks are asked for as soon as they are there, with checksums.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn summing(
        gpu: &Gpu,
        memory: Arc<dyn Memory>,
        device: &Arc<DeviceRegion>,
    ) -> Result<Self, SetupError> {
        Self::start(gpu, memory, device, true)
    }

    fn start(
        gpu: &Gpu,
        memory: Arc<dyn Memory>,
        device: &Arc<DeviceRegion>,
        sums: bool,
    ) -> Result<Self, SetupError> {
        check_fit(gpu, &*memory, device)?;
        let routes = Route::new(memory.tier(), Tier::Device).both_ways();
        let host = Arc::new(LockedHost::of(gpu, &memory)?);
        let kernels = Arc::new(CopyKernels::load(gpu)?);
        let start = |name: &str, way, sums, memory| {
            let copier = BlockCopier::new(way, gpu, &host, device, &kernels);
            CopyLane::start(name, copier, sums, gpu, memory, device)
        };
        let sums = sums && memory.checksums().is_some();
        let to_gpu = start("kvbm-to-gpu", TO_GPU, false, Arc::clone(&memory))?;
        let lanes = [to_gpu, start("kvbm-from-gpu", FROM_GPU, sums, memory)?];
        Ok(Self { routes, lanes })
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
    copier: BlockCopier,
    gpu: Gpu,
    stream: CudaStream,
    memory: Arc<dyn Memory>,
    device: Arc<DeviceRegion>,
    /// Copies that were started, in the order of the stream.
    flights: VecDeque<CopyFlight>,
    idle: Vec<FlightScratch>,
    /// Of the flight that is being started.
    blocks: Vec<BlockEnds>,
}

/// What a flight needs.
struct FlightScratch {
    /// What the kernel reads, if it copies.
    table: KernelTable<Piece>,
    /// `None`: blocks are not summed.
    sums: Option<BlockSummer>,
    /// Not reported yet, with their places in the batch.
    indices: Vec<usize>,
    /// The slots in host memory that the summed blocks go to.
    summed: Vec<SlotId>,
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
        copier: BlockCopier,
        sums: bool,
        gpu: &Gpu,
        memory: Arc<dyn Memory>,
        device: &Arc<DeviceRegion>,
    ) -> Result<Sender<FencedBatch>, SetupError> {
        let lane = Self::new(copier, sums, gpu, memory, device)?;
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
        copier: BlockCopier,
        sums: bool,
        gpu: &Gpu,
        memory: Arc<dyn Memory>,
        device: &Arc<DeviceRegion>,
    ) -> Result<Self, SetupError> {
        let parts = device.segments().parts().len();
        let scratch = |_| {
            let summer = || BlockSummer::new(gpu, copier.grain(), parts);
            Ok(FlightScratch {
                table: copier.table()?,
                sums: sums.then(summer).transpose()?,
                indices: Vec::new(),
                summed: Vec::new(),
            })
        };
        let idle: Result<_, SetupError> = (0..MAX_FLIGHTS).map(scratch).collect();
        gpu.reserve_events(MAX_FLIGHTS).map_err(|error| failed("no events", error))?;
        Ok(Self {
            copier,
            gpu: gpu.clone(),
            stream: CudaStream::new(gpu)?,
            memory,
            device: Arc::clone(device),
            flights: VecDeque::with_capacity(MAX_FLIGHTS),
            idle: idle?,
            blocks: Vec::new(),
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
        let grain = self.copier.grain();
        let flights = batch.ops.len().div_ceil(grain);
        for (number, ops) in batch.ops.chunks(grain).enumerate() {
            let mark = if number + 1 == flights { mark.take() } else { None };
            self.launch_flight(number * grain, ops, &batch.done, mark);
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
        // SAFETY: the slots are the operations', and the table the flight's, until the event behind has
        // passed.
        let copied = unsafe { self.copier.copy(&self.stream, &self.blocks, &mut scratch.table) };
        let failure = copied.err();
        if failure.is_none() {
            self.sum(&mut scratch, ops);
        }
        let done = done.clone();
        let mut flight =
            CopyFlight { scratch, event, recorded: false, mark, done, failure, doubtful: false };
        // If it cannot be recorded now it is later, behind more than needs be.
        let _ = flight.record(&self.stream);
        self.flights.push_back(flight);
    }

    /// Starts summing what is copied out. What is not summed here is when it is needed.
    fn sum(&self, FlightScratch { sums, summed, .. }: &mut FlightScratch, ops: &[CopyOp]) {
        let Some(sums) = sums else { return };
        // Some of the operations were refused otherwise.
        if self.blocks.len() != ops.len() {
            return;
        }
        let slots = self.blocks.iter().map(|block| block.slot);
        let kernels = &self.copier.kernels;
        // SAFETY: the slots are the operations', which do not write them, and the scratch the
        // flight's, until the event behind has passed.
        if unsafe { sums.start_slots(&self.stream, kernels, &self.device, slots) }.is_ok() {
            summed.extend(ops.iter().map(|op| op.to.slot));
        }
    }

    /// The blocks of a flight are in host memory: so are their checksums.
    fn remember_sums(&self, scratch: &mut FlightScratch, is_copied: bool) {
        let (Some(checksums), Some(sums)) = (self.memory.checksums(), &scratch.sums) else {
            return;
        };
        let slots = std::mem::take(&mut scratch.summed);
        if is_copied {
            let sums = sums.sums(&self.device, slots.len());
            slots.iter().zip(sums).for_each(|(slot, sum)| checksums.record(*slot, sum));
        }
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
        let memory = &self.memory;
        let (ours, theirs, is_to_gpu) = match (op.from.tier, op.to.tier) {
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

    /// Reports what has ended. A stream's work ends in order.
    fn land(&mut self) {
        let mut landed = Endings::default();
        while let Some(flight) = self.flights.front_mut()
            && let Some(outcome) = flight.outcome(&self.stream)
            && let Some(mut flight) = self.flights.pop_front()
        {
            self.remember_sums(&mut flight.scratch, outcome.is_ok());
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

fn failed_copy(error: DriverError) -> CopyError {
    CopyError::caused(CopyErrorKind::Io, format!("CUDA: a copy failed: {error}"), error)
}
