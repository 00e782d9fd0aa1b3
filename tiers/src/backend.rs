//! What moves blocks, and its order with an engine's own work: what a copy waits for before it
//! touches the engine's memory, and what the engine waits for before it uses what a copy brought.
//!
//! An engine starts its kernels long before they run. Slots that it hands over are often still
//! being written, and slots that it wants filled still being read, by work that waits in a stream.
//! A fence names that work, so that no CPU thread has to wait for it.

#![expect(unsafe_code, reason = "a backend promises what the compiler cannot see")]

use std::any::Any;
use std::fmt;
use std::num::NonZeroU16;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::copy::{CopyOp, Done, Route};
use crate::layer_count::LayerCount;
use crate::ranks::RankLoad;

/// Moves blocks between regions.
///
/// # Safety
/// An implementation completes each operation of a batch exactly once, and only when neither it nor
/// the hardware behind it can touch the operation's slots any more. It keeps the regions alive
/// until then. It never writes outside the destination slots, and `Ok` means that all bytes of the
/// block arrived.
///
/// Callers promise in turn that until an operation completes nothing else writes a slot that it
/// names, and nothing reads its destination.
///
/// # What upholds the callers' promise
/// [`submit`](Self::submit) is a safe function although it asks this, so strictly it is unsound:
/// safe code can make an operation for slots that it has no slot handle to. No type or borrow can
/// rule that out, since an operation is plain data and may come from another process; and an
/// `unsafe fn` would move the promise into the `kvbm` crate, which forbids `unsafe` code. It is
/// kept by convention, in one place. The only safe ways to a slot's bytes ask for its
/// [`Frame`](crate::Frame) or a [`Loan`](crate::Loan) of its pool's; a frame is made once per slot
/// and cannot be cloned; and the scheduler of the `kvbm` crate, the only caller outside tests and
/// benches, keeps the destinations' frames and pins the sources from before the submission until
/// the completion. An operation that never completes keeps them for ever. Backends check that slots
/// exist, not who holds them: a mistake there is a wrong block that [`Verified`](crate::Verified)
/// catches, never an access outside a region.
pub unsafe trait Backend: Send + Sync + fmt::Debug {
    /// Short name for reports: `memcpy`, `io_uring`, `threads` …
    fn name(&self) -> &'static str;

    /// The routes that it serves.
    fn routes(&self) -> &[Route];

    /// Starts the copies. Must return quickly; reports through `done`, possibly before it returns,
    /// and together what ended together.
    fn submit(&self, batch: Vec<CopyOp>, done: Done);

    /// The same, in order with an engine's work: call [`submit`] instead. By default
    /// refused, unless there is nothing to wait for.
    fn submit_fenced(&self, batch: Vec<CopyOp>, fences: Fences, done: Done) {
        submit_unfenced(self, batch, &fences, done);
    }
}

// SAFETY: everything is the inner backend's doing.
unsafe impl<B: Backend + ?Sized> Backend for Arc<B> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn routes(&self) -> &[Route] {
        (**self).routes()
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        (**self).submit(batch, done);
    }

    fn submit_fenced(&self, batch: Vec<CopyOp>, fences: Fences, done: Done) {
        (**self).submit_fenced(batch, fences, done);
    }
}

/// Submits a batch that keeps this order. A backend that knows nothing of fences gets it when the
/// engine has raised the fence; if only a GPU knows when that is, every operation is refused.
pub fn submit(backend: &Arc<dyn Backend>, batch: Vec<CopyOp>, fences: Fences, done: Done) {
    match fences.after {
        Fence::Host(fence) => {
            let batch = Some((batch, done));
            let waiting = WaitingBatch {
                batch,
                backend: Arc::clone(backend),
                mark: fences.mark,
                layers: fences.layers,
            };
            fence.park(move || waiting.submit());
        }
        _ => backend.submit_fenced(batch, fences, done),
    }
}

/// A batch that waits for a thread of the engine.
struct WaitingBatch {
    /// Taken when it is submitted.
    batch: Option<(Vec<CopyOp>, Done)>,
    backend: Arc<dyn Backend>,
    mark: Option<Mark>,
    layers: Option<Layers>,
}

impl WaitingBatch {
    fn submit(mut self) {
        if let Some((ops, done)) = self.batch.take() {
            let fences =
                Fences { after: Fence::Done, mark: self.mark.take(), layers: self.layers.take() };
            self.backend.submit_fenced(ops, fences, done);
        }
    }
}

/// Every operation is reported, also where the engine went away without raising its fence.
impl Drop for WaitingBatch {
    fn drop(&mut self) {
        if let Some((ops, done)) = self.batch.take() {
            done.refuse(0..ops.len(), "the engine dropped its fence without raising it");
        }
    }
}

/// Of a backend that cannot wait for GPUs, and copies block by block.
pub(crate) fn submit_unfenced<B: Backend + ?Sized>(
    backend: &B,
    batch: Vec<CopyOp>,
    fences: &Fences,
    done: Done,
) {
    if fences.after.is_done() {
        return backend.submit(batch, done);
    }
    done.refuse(0..batch.len(), &format!("{} cannot wait for {:?}", backend.name(), fences.after));
}

/// Work that others wait for. Cheap to clone.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Fence {
    /// There is none, or it has ended.
    #[default]
    Done,
    /// A thread says when it has ended: an engine on the CPU.
    Host(HostFence),
    /// A GPU says when it has ended.
    Event(EventFence),
}

impl Fence {
    /// An event of CUDA's (`CUevent`, `cudaEvent_t`), which an engine recorded behind its work.
    /// Where the engine has only a stream, `cuda::Gpu::fence_behind` records one.
    ///
    /// # Safety
    /// The handle is of an event of the GPU that the copies are on. It is not destroyed before
    /// every batch that waits for it has ended, and it was not recorded inside a stream capture:
    /// that would draw the copies into the engine's graph.
    pub const unsafe fn event(handle: u64) -> Self {
        Self::Event(EventFence { handle, _keeper: None })
    }

    /// As [`event`](Self::event), with what keeps the event: it is dropped when nothing waits for
    /// it any more.
    ///
    /// # Safety
    /// As for [`event`](Self::event), but the handle lives as long as its keeper.
    pub unsafe fn event_kept_by(handle: u64, keeper: impl Any + Send + Sync) -> Self {
        Self::Event(EventFence::kept(handle, Arc::new(keeper)))
    }

    /// Whether no wait is needed, as far as can be told without asking a GPU.
    pub fn is_done(&self) -> bool {
        match self {
            Self::Done => true,
            Self::Host(fence) => fence.is_raised(),
            Self::Event(_) => false,
        }
    }
}

/// A recorded event of CUDA's.
#[derive(Clone)]
pub struct EventFence {
    handle: u64,
    /// Keeps the event, where its owner has left that to us.
    _keeper: Option<Arc<dyn Any + Send + Sync>>,
}

impl EventFence {
    pub(crate) fn kept(handle: u64, keeper: Arc<dyn Any + Send + Sync>) -> Self {
        Self { handle, _keeper: Some(keeper) }
    }

    /// The `CUevent`, for an engine that waits for it with calls of its own. It lives as long as
    /// the fence.
    pub const fn handle(&self) -> u64 {
        self.handle
    }
}

impl fmt::Debug for EventFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EventFence({:#x})", self.handle)
    }
}

/// A flag that a thread raises when its work has ended. What still waits when the last clone is
/// dropped is refused.
#[derive(Clone, Default)]
pub struct HostFence(Arc<Mutex<FenceFlag>>);

enum FenceFlag {
    Raised,
    Down(Vec<ParkedJobs>),
}

/// What waits for a thread. The code that parks it learns when it is dropped instead of called.
type ParkedJobs = Box<dyn FnOnce() + Send>;

impl Default for FenceFlag {
    fn default() -> Self {
        Self::Down(Vec::new())
    }
}

impl HostFence {
    /// Not raised yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The work has ended: submits what waits for it.
    pub fn raise(&self) {
        // Not under the lock: a completion may drop or raise fences.
        let earlier = std::mem::replace(&mut *self.0.lock(), FenceFlag::Raised);
        if let FenceFlag::Down(parked) = earlier {
            parked.into_iter().for_each(|work| work());
        }
    }

    /// Whether it is.
    pub fn is_raised(&self) -> bool {
        matches!(*self.0.lock(), FenceFlag::Raised)
    }

    /// Does `work` when it is raised, at once if it is already. Drops it if nothing can raise it
    /// any more.
    pub fn park(&self, work: impl FnOnce() + Send + 'static) {
        if let FenceFlag::Down(parked) = &mut *self.0.lock() {
            return parked.push(Box::new(work));
        }
        work();
    }
}

impl fmt::Debug for HostFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_raised() { "HostFence(raised)" } else { "HostFence(down)" })
    }
}

/// Where a backend leaves a fence behind copies that it was given. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Mark(Arc<OnceLock<Fence>>);

impl Mark {
    /// Nothing left yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// What to wait for: for the copies alone, which may fail, so that their outcome counts too
    /// before anything that was computed from them. `None`: not started yet, or the backend gives
    /// no fence; their report is the sign.
    pub fn fence(&self) -> Option<Fence> {
        self.0.get().cloned()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn leave(&self, fence: Fence) {
        // One batch, one mark: a second call gets the first one's.
        let _ = self.0.set(fence);
    }
}

/// In which order a load brings its blocks to an engine that computes layer by layer: the first
/// layer of all blocks, then the second. A layer is an equal share of a block's bytes. A load may
/// come in several batches, of which each has a clone of this.
#[derive(Clone)]
pub struct Layers {
    count: NonZeroU16,
    arrived: Arc<dyn Fn(u16, usize) + Send + Sync>,
    in_ranks: Option<RankLoad>,
}

impl Layers {
    /// `arrived(n, blocks)` hears that layer `n` of every block of a batch is there, and how many
    /// these are, from any thread, not always in the order of the layers, and not at all from a
    /// backend that copies block by block. It must not block.
    pub fn new(count: NonZeroU16, arrived: impl Fn(u16, usize) + Send + Sync + 'static) -> Self {
        Self { count, arrived: Arc::new(arrived), in_ranks: None }
    }

    /// Those of a load, which are counted.
    pub fn counted(by: &Arc<LayerCount>) -> Self {
        let count = Arc::clone(by);
        Self::new(by.layers(), move |layer, blocks| count.add(layer, blocks))
    }

    /// Where ranks copy, they count them under this name, each of its slice. Without one they copy
    /// block by block.
    #[must_use]
    pub fn in_ranks(self, load: Option<RankLoad>) -> Self {
        Self { in_ranks: load, ..self }
    }

    pub(crate) const fn name_in_ranks(&self) -> Option<RankLoad> {
        self.in_ranks
    }

    /// How many layers a block has.
    pub const fn count(&self) -> u16 {
        self.count.get()
    }

    pub(crate) const fn shares(&self) -> NonZeroU16 {
        self.count
    }

    pub(crate) fn arrived(&self, layer: u16, blocks: usize) {
        (self.arrived)(layer, blocks);
    }

    /// Whether these are the layers of one load.
    pub(crate) fn are_of_load(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.arrived, &other.arrived)
    }
}

impl fmt::Debug for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Layers({})", self.count)
    }
}

/// The order that a batch keeps with the engine's work.
#[derive(Clone, Debug, Default)]
pub struct Fences {
    /// No slot is touched before this.
    pub after: Fence,
    /// Gets a fence behind the copies once they are started.
    pub mark: Option<Mark>,
    /// The engine begins with the first layer before the last one is there.
    pub layers: Option<Layers>,
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::backend::HostFence;
    use crate::copy::{CopyError, CopyErrorKind, Tier};
    use crate::dram::{DramOptions, DramRegion};
    use crate::frame::Frame;
    use crate::geometry::Geometry;
    use crate::memcpy::MemcpyBackend;
    use crate::testing::{each, fill_pattern, has_pattern, host, order};

    struct FenceFixture {
        backend: Arc<dyn Backend>,
        regions: [Arc<DramRegion>; 2],
        frames: [Frame; 2],
        done: Done,
        reports: mpsc::Receiver<Result<(), CopyError>>,
    }

    impl FenceFixture {
        fn new() -> Self {
            let geometry = Geometry::new(1, 4096).unwrap();
            let options = DramOptions { geometry, huge_pages: false, fault_threads: 1 };
            let device = DramRegion::emulated_device(options).unwrap();
            let regions = [Arc::new(device), Arc::new(host(1, 4096))];
            let memories = regions.iter().map(|region| Arc::clone(region) as _).collect();
            let backend = Arc::new(MemcpyBackend::new(memories, 1).unwrap());
            let frames = [0, 1].map(|end: usize| regions[end].frames().unwrap().take().unwrap());
            let (send, reports) = mpsc::channel();
            let done = each(move |_, result| send.send(result).unwrap());
            Self { backend, regions, frames, done, reports }
        }

        fn save(&self, after: Fence) {
            let op = order(0, self.frames[0].slot_ref(), self.frames[1].slot_ref());
            submit(
                &self.backend,
                vec![op],
                Fences { after, mark: Some(Mark::new()), layers: None },
                self.done.clone(),
            );
        }

        fn engine_writes(&mut self, pattern: usize) {
            fill_pattern(pattern, self.regions[0].write(&mut self.frames[0]).unwrap());
        }

        fn saved(&self, pattern: usize) -> bool {
            self.reports.recv().unwrap().unwrap();
            has_pattern(pattern, self.regions[1].read(&self.frames[1]).unwrap())
        }
    }

    #[test]
    fn a_save_waits_until_the_engine_raises_its_fence() {
        let mut fixture = FenceFixture::new();
        let fence = HostFence::new();
        fixture.save(Fence::Host(fence.clone()));
        fixture.engine_writes(7);
        assert!(fixture.reports.try_recv().is_err());
        fence.raise();
        assert!(fixture.saved(7));
        // Raised for good.
        fixture.engine_writes(8);
        fixture.save(Fence::Host(fence));
        assert!(fixture.saved(8));
    }

    #[test]
    fn a_fence_that_is_dropped_refuses_what_waits_for_it() {
        let mut fixture = FenceFixture::new();
        let fence = HostFence::new();
        fixture.save(Fence::Host(fence.clone()));
        drop(fence);
        let error = fixture.reports.recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), CopyErrorKind::Refused);
        // And then it heals.
        fixture.engine_writes(9);
        fixture.save(Fence::Done);
        assert!(fixture.saved(9));
    }

    #[test]
    fn a_backend_without_a_gpu_refuses_to_wait_for_one() {
        let fixture = FenceFixture::new();
        // SAFETY: nothing uses the handle.
        fixture.save(unsafe { Fence::event(1) });
        let error = fixture.reports.recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), CopyErrorKind::Refused);
        assert!(error.to_string().contains("memcpy cannot wait"), "{error}");
        assert_eq!(fixture.frames[0].slot_ref().tier, Tier::Device);
    }
}
