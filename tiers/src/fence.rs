//! Order with an engine's own work: what a copy waits for before it touches the engine's memory, and what the
//! engine waits for before it uses what a copy brought.
//!
//! An engine starts its kernels long before they run. Slots that it hands over are often still being written, and
//! slots that it wants filled still being read, by work that waits in a stream. A fence names that work, so
//! that nobody has to wait for it on a CPU.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::copy::{Backend, CopyError, CopyErrorKind, CopyOp, Done};

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
    /// An event of CUDA's (`CUevent`, `cudaEvent_t`), which an engine recorded behind its work. Where the engine has
    /// only a stream, `cuda::Gpu::fence_behind` records one.
    ///
    /// # Safety
    /// The handle is of an event of the GPU that the copies are on. It is not destroyed before every batch that
    /// waits for it has ended, and it was not recorded inside a stream capture: that would draw the copies into the
    /// engine's graph.
    pub const unsafe fn event(handle: u64) -> Self {
        Self::Event(EventFence { handle, _keeper: None })
    }

    /// Whether nobody needs to wait, as far as can be told without asking a GPU.
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
    /// Keeps an event of our own.
    _keeper: Option<Arc<dyn Any + Send + Sync>>,
}

impl EventFence {
    #[cfg(feature = "cuda")]
    pub(crate) fn kept(handle: u64, keeper: Arc<dyn Any + Send + Sync>) -> Self {
        Self { handle, _keeper: Some(keeper) }
    }

    /// The `CUevent`, for an engine that waits for it with calls of its own. It lives as long as the fence.
    pub const fn handle(&self) -> u64 {
        self.handle
    }
}

impl fmt::Debug for EventFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EventFence({:#x})", self.handle)
    }
}

/// A flag that a thread raises when its work has ended. What still waits when the last clone is dropped is refused.
#[derive(Clone, Default)]
pub struct HostFence(Arc<Mutex<Flag>>);

enum Flag {
    Raised,
    Down(Vec<Parked>),
}

impl Default for Flag {
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
        let earlier = std::mem::replace(&mut *self.0.lock(), Flag::Raised);
        if let Flag::Down(parked) = earlier {
            parked.into_iter().for_each(Parked::submit);
        }
    }

    /// Whether it is.
    pub fn is_raised(&self) -> bool {
        matches!(*self.0.lock(), Flag::Raised)
    }

    fn park(&self, batch: Parked) {
        if let Flag::Down(parked) = &mut *self.0.lock() {
            return parked.push(batch);
        }
        batch.submit();
    }
}

impl fmt::Debug for HostFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_raised() { "HostFence(raised)" } else { "HostFence(down)" })
    }
}

/// A batch that waits for a thread.
struct Parked {
    /// Taken when it is submitted.
    batch: Option<(Vec<CopyOp>, Done)>,
    backend: Arc<dyn Backend>,
    mark: Option<Mark>,
}

impl Parked {
    fn submit(mut self) {
        if let Some((ops, done)) = self.batch.take() {
            let fences = Fences { after: Fence::Done, mark: self.mark.take() };
            self.backend.submit_fenced(ops, fences, done);
        }
    }
}

/// Every operation is reported, also where the engine went away without raising its fence.
impl Drop for Parked {
    fn drop(&mut self) {
        if let Some((ops, done)) = self.batch.take() {
            refuse(&ops, &done, "the engine dropped its fence without raising it");
        }
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

    /// What to wait for: for the copies alone, which may fail, so that their outcome counts too before anything
    /// that was computed from them. `None`: not started yet, or the backend gives no fence; their report is the sign.
    pub fn fence(&self) -> Option<Fence> {
        self.0.get().cloned()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn leave(&self, fence: Fence) {
        // One batch, one mark: whoever passes it twice gets the first.
        let _ = self.0.set(fence);
    }
}

/// The order that a batch keeps with the engine's work.
#[derive(Clone, Debug, Default)]
pub struct Fences {
    /// No slot is touched before this.
    pub after: Fence,
    /// Gets a fence behind the copies once they are started.
    pub mark: Option<Mark>,
}

/// Submits a batch that keeps this order. A backend that knows nothing of fences gets it when the engine has raised
/// the fence; if only a GPU knows when that is, every operation is refused.
pub fn submit(backend: &Arc<dyn Backend>, batch: Vec<CopyOp>, fences: Fences, done: Done) {
    match fences.after {
        Fence::Host(fence) => {
            fence.park(Parked {
                batch: Some((batch, done)),
                backend: Arc::clone(backend),
                mark: fences.mark,
            });
        }
        _ => backend.submit_fenced(batch, fences, done),
    }
}

/// Of a backend that cannot wait for GPUs.
pub(crate) fn submit_unfenced<B: Backend + ?Sized>(
    backend: &B,
    batch: Vec<CopyOp>,
    fences: &Fences,
    done: Done,
) {
    if fences.after.is_done() {
        return backend.submit(batch, done);
    }
    refuse(&batch, &done, &format!("{} cannot wait for {:?}", backend.name(), fences.after));
}

fn refuse(batch: &[CopyOp], done: &Done, why: &str) {
    for index in 0..batch.len() {
        done.complete(index, Err(CopyError::new(CopyErrorKind::Refused, why)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::copy::Tier;
    use crate::dram::DramOptions;
    use crate::dram::DramRegion;
    use crate::frame::Frame;
    use crate::geometry::Geometry;
    use crate::memcpy::MemcpyBackend;
    use crate::testing::{fill_pattern, has_pattern, host, order};

    struct Fixture {
        backend: Arc<dyn Backend>,
        regions: [Arc<DramRegion>; 2],
        frames: [Frame; 2],
        done: Done,
        reports: mpsc::Receiver<Result<(), CopyError>>,
    }

    impl Fixture {
        fn new() -> Self {
            let geometry = Geometry::new(1, 4096).unwrap();
            let options = DramOptions { geometry, huge_pages: false, fault_threads: 1 };
            let device = DramRegion::emulated_device(options).unwrap();
            let regions = [Arc::new(device), Arc::new(host(1, 4096))];
            let memories = regions.iter().map(|region| Arc::clone(region) as _).collect();
            let backend = Arc::new(MemcpyBackend::new(memories, 1).unwrap());
            let frames = [0, 1].map(|end: usize| regions[end].frames().unwrap().take().unwrap());
            let (send, reports) = mpsc::channel();
            let done = Done::new(move |_, result| send.send(result).unwrap());
            Self { backend, regions, frames, done, reports }
        }

        fn save(&self, after: Fence) {
            let op = order(0, self.frames[0].slot_ref(), self.frames[1].slot_ref());
            submit(&self.backend, vec![op], Fences { after, mark: Some(Mark::new()) }, self.done.clone());
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
        let mut fixture = Fixture::new();
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
        let mut fixture = Fixture::new();
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
        let fixture = Fixture::new();
        // SAFETY: nobody uses the handle.
        fixture.save(unsafe { Fence::event(1) });
        let error = fixture.reports.recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), CopyErrorKind::Refused);
        assert!(error.to_string().contains("memcpy cannot wait"), "{error}");
        assert_eq!(fixture.frames[0].slot_ref().tier, Tier::Device);
    }
}
