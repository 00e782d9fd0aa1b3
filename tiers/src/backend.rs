//! What moves blocks, and how a batch keeps an engine's order.

#![expect(unsafe_code, reason = "a backend promises what the compiler cannot see")]

use std::fmt;
use std::sync::Arc;

use crate::copy::{CopyOp, Done, Route};
use crate::fence::{Fence, Fences, Layers, Mark};

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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::copy::{CopyError, CopyErrorKind, Tier};
    use crate::dram::{DramOptions, DramRegion};
    use crate::fence::HostFence;
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
