//! Copies between host memory and a GPU.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use cudarc::driver::result::DriverError;

use super::driver::{Event, Gpu, Pinned, Registration, Stream, failed};
use super::kernels::{KernelOrigin, Kernels};
use crate::copy::{Backend, CopyError, CopyErrorKind, CopyOp, Done, Route, Tier};
use crate::device::{DeviceRegion, Space};
use crate::error::{SetupError, SetupErrorKind};
use crate::memory::{Memory, forget_checksum, no_such_slot};
use crate::segments::{Piece, Segment, pieces};

/// Moves blocks between locked host memory and device memory, each direction in a stream and a thread of its
/// own: the thread starts copies and looks after their events, so nobody who submits waits for the GPU.
#[derive(Debug)]
pub struct CudaBackend {
    routes: [Route; 2],
    /// To the threads, in the order of the routes.
    lanes: [Sender<Batch>; 2],
    origin: KernelOrigin,
}

/// Operations submitted together.
#[derive(Debug)]
struct Batch {
    ops: Vec<CopyOp>,
    done: Done,
}

/// Pieces smaller than this on average are copied by the kernel: a copy engine needs microseconds for each, in
/// which a link to the host moves about this much.
const SMALL_PIECE: usize = 128 << 10;
/// From so many pieces on, one call for all is worth its preparation.
const MANY_PIECES: usize = 4;
/// How often a thread looks whether copies have ended. The system rounds it up by about 50 µs.
const POLL: Duration = Duration::from_micros(20);

impl CudaBackend {
    /// Moves blocks between `memory`, which is locked for that, and `device`, which is in this GPU's memory.
    ///
    /// # Errors
    /// `Invalid`: the blocks differ in size, or the device region is elsewhere. `Unavailable`: the memory cannot
    /// be locked, or the GPU gives no stream.
    pub fn new(gpu: &Gpu, memory: Arc<dyn Memory>, device: &Arc<DeviceRegion>) -> Result<Self, SetupError> {
        check_fit(gpu, &*memory, device)?;
        let routes = [(memory.tier(), Tier::Device), (Tier::Device, memory.tier())];
        let host = Arc::new(Registration::new(gpu, memory)?);
        let kernels = Arc::new(Kernels::load(gpu)?);
        let start = |name: &str| Lane::start(name, gpu, &host, device, &kernels);
        let lanes = [start("kvbm-to-gpu")?, start("kvbm-from-gpu")?];
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
    Err(SetupError::new(SetupErrorKind::Invalid, message))
}

// SAFETY: an operation is reported when the event behind its copies has passed, or the context has ended and
// with it all its work; the lanes' threads keep both regions until they have reported everything, and copy
// the pieces of blocks of one size, in slots that exist.
unsafe impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, ops: Vec<CopyOp>, done: Done) {
        for (lane, route) in self.lanes.iter().zip(&self.routes) {
            // A batch is of one route; whatever else is in it, the lane refuses.
            if ops.first().is_some_and(|op| op.route() == *route) {
                return lane.send(Batch { ops, done }).unwrap_or_else(|unsent| unsent.0.refuse());
            }
        }
        Batch { ops, done }.refuse();
    }
}

impl Batch {
    /// No lane serves it.
    fn refuse(self) {
        for (index, op) in self.ops.iter().enumerate() {
            self.done.complete(index, Err(no_such_slot(op.from)));
        }
    }
}

/// One direction.
struct Lane {
    gpu: Gpu,
    stream: Stream,
    host: Arc<Registration>,
    device: Arc<DeviceRegion>,
    kernels: Arc<Kernels>,
    flights: VecDeque<Flight>,
    /// Events and tables of flights that have ended.
    events: Vec<Event>,
    tables: Vec<Pinned<Piece>>,
}

/// A batch whose copies were started.
struct Flight {
    /// Behind the copies; `None`: not even that could be started.
    event: Option<Event>,
    /// What the kernel reads, if it copies.
    table: Option<Pinned<Piece>>,
    /// Not reported yet, with their places in the batch.
    indices: Vec<usize>,
    done: Done,
    /// Why some copies were not started.
    failure: Option<DriverError>,
}

impl Lane {
    /// The thread ends by itself when everything submitted was reported and the sender is gone: a GPU that hangs
    /// must not hang whoever drops the backend.
    fn start(
        name: &str,
        gpu: &Gpu,
        host: &Arc<Registration>,
        device: &Arc<DeviceRegion>,
        kernels: &Arc<Kernels>,
    ) -> Result<Sender<Batch>, SetupError> {
        let mut lane = Self {
            gpu: gpu.clone(),
            stream: Stream::new(gpu)?,
            host: Arc::clone(host),
            device: Arc::clone(device),
            kernels: Arc::clone(kernels),
            flights: VecDeque::new(),
            events: Vec::new(),
            tables: Vec::new(),
        };
        lane.gpu.enter().map_err(|error| failed("no context", error))?;
        let (batches, incoming) = crossbeam_channel::unbounded();
        let serve = move || lane.serve(&incoming);
        thread::Builder::new().name(name.into()).spawn(serve).map_err(|error| {
            let message = "cannot start a thread for the GPU: raise the limit on processes";
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })?;
        Ok(batches)
    }

    fn serve(&mut self, batches: &Receiver<Batch>) {
        if let Err(error) = self.gpu.enter() {
            tracing::error!(%error, "a thread cannot use the GPU: its copies will fail");
        }
        let mut open = true;
        while open || !self.flights.is_empty() {
            open = open && self.receive(batches);
            self.land();
        }
    }

    /// Starts what was submitted; waits for more, as long as there is nothing else to do. False: nothing will come.
    fn receive(&mut self, batches: &Receiver<Batch>) -> bool {
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

    /// Starts the copies of a batch; what names slots that do not exist is refused at once.
    fn launch(&mut self, Batch { ops, done }: Batch) {
        let (mut all, mut indices) = (Vec::new(), Vec::with_capacity(ops.len()));
        for (index, op) in ops.iter().enumerate() {
            match self.pieces(op, &mut all) {
                Ok(()) => indices.push(index),
                Err(error) => report(&done, index, Err(error)),
            }
        }
        if indices.is_empty() {
            return;
        }
        let mut flight = Flight { event: None, table: None, indices, done, failure: None };
        flight.failure = self.copy(&all, &mut flight.table).err();
        match self.mark() {
            Ok(event) => flight.event = Some(event),
            Err(error) => flight.failure = Some(error),
        }
        self.flights.push_back(flight);
    }

    /// Appends what an operation comes down to.
    fn pieces(&self, op: &CopyOp, all: &mut Vec<Piece>) -> Result<(), CopyError> {
        let memory = self.host.memory();
        let (ours, theirs, out) = match op.route() {
            (from, Tier::Device) if from == memory.tier() => (op.from, op.to, true),
            (Tier::Device, to) if to == memory.tier() => (op.to, op.from, false),
            _ => return Err(no_such_slot(op.from)),
        };
        let whole = memory.slot(ours.slot).ok_or_else(|| no_such_slot(ours))?;
        let device = self.device.segments().segments(theirs.slot).ok_or_else(|| no_such_slot(theirs))?;
        let host = Segment { address: whole.addr().get(), bytes: memory.block_bytes() };
        if out {
            all.extend(pieces(std::iter::once(host), device));
        } else {
            forget_checksum(&**memory, ours.slot);
            all.extend(pieces(device, std::iter::once(host)));
        }
        Ok(())
    }

    fn copy(&mut self, pieces: &[Piece], table: &mut Option<Pinned<Piece>>) -> Result<(), DriverError> {
        let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
        if pieces.len() >= MANY_PIECES && bytes / pieces.len() < SMALL_PIECE {
            return self.copy_by_kernel(pieces, table);
        }
        if pieces.len() >= MANY_PIECES && self.gpu.copies_batches() {
            return self.copy_in_one_call(pieces);
        }
        // SAFETY: pieces of blocks whose slots are the operations' until the event behind has passed.
        pieces.iter().try_for_each(|piece| unsafe { self.stream.copy(piece.from, piece.to, piece.bytes) })
    }

    fn copy_in_one_call(&self, pieces: &[Piece]) -> Result<(), DriverError> {
        let mut from: Vec<_> = pieces.iter().map(|piece| piece.from as u64).collect();
        let mut to: Vec<_> = pieces.iter().map(|piece| piece.to as u64).collect();
        let mut bytes: Vec<_> = pieces.iter().map(|piece| piece.bytes).collect();
        // SAFETY: as in `copy`; the driver copies batches.
        unsafe { self.stream.copy_all(&mut from, &mut to, &mut bytes) }
    }

    fn copy_by_kernel(
        &mut self,
        pieces: &[Piece],
        kept: &mut Option<Pinned<Piece>>,
    ) -> Result<(), DriverError> {
        let mapped: Vec<_> = pieces.iter().map(|piece| self.mapped(piece)).collect();
        let fitting = self.tables.iter().position(|table| table.capacity() >= mapped.len());
        let mut table = match fitting {
            Some(place) => self.tables.swap_remove(place),
            None => Pinned::new(&self.gpu, mapped.len().next_power_of_two())?,
        };
        table.write(&mapped);
        let table = kept.insert(table);
        // SAFETY: as in `copy`; the flight keeps the table.
        unsafe { self.kernels.copy_pieces(&self.stream, table.address(), mapped.len()) }
    }

    /// The piece with its host end as kernels address it.
    fn mapped(&self, piece: &Piece) -> Piece {
        let memory = self.host.memory();
        let base = memory.base().addr().get();
        let ours = base..base + memory.geometry().bytes();
        let mapped = |address| if ours.contains(&address) { self.host.mapped(address) } else { address };
        Piece { from: mapped(piece.from), to: mapped(piece.to), bytes: piece.bytes }
    }

    /// An event behind everything started so far.
    fn mark(&mut self) -> Result<Event, DriverError> {
        let event = self.events.pop().map_or_else(|| Event::new(&self.gpu, false), Ok)?;
        event.record(&self.stream).map(|()| event)
    }

    /// Reports what has ended. A stream's work ends in order.
    fn land(&mut self) {
        while let Some(flight) = self.flights.front() {
            let outcome = match flight.event.as_ref().map(Event::has_passed) {
                Some(Ok(false)) => return,
                Some(Ok(true)) => flight.failure.map_or(Ok(()), Err),
                // The context has ended, and all its work with it.
                Some(Err(error)) => Err(error),
                None => self.stream.wait().and(flight.failure.map_or(Ok(()), Err)),
            };
            let Some(flight) = self.flights.pop_front() else { unreachable!("looked at above") };
            self.events.extend(flight.event);
            self.tables.extend(flight.table);
            for index in flight.indices {
                report(&flight.done, index, outcome.map_err(failed_copy));
            }
        }
    }
}

fn failed_copy(error: DriverError) -> CopyError {
    CopyError::caused(CopyErrorKind::Io, format!("CUDA: a copy failed: {error}"), error)
}

/// Others wait behind this one, whatever happens to it.
fn report(done: &Done, index: usize, result: Result<(), CopyError>) {
    if catch_unwind(AssertUnwindSafe(|| done.complete(index, result))).is_err() {
        tracing::error!("a completion panicked");
    }
}
