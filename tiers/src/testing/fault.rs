use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::panics_are_meant;
use crate::backend::Backend;
use crate::chaos::{ChaosBackend, Effect, Faults, LateTimer};
use crate::clock;
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done, Route};
use crate::error::SetupError;
use crate::memory::{CpuMemories, Memory};

/// A way to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// This many operations succeed; all later ones end in an error of this kind.
    FailAfter(u64, CopyErrorKind),
    /// The last byte does not arrive, and the backend says so.
    Short,
    /// The last byte does not arrive, and the backend says that all did.
    LyingShort,
    /// A bit of the block arrives wrong, and the backend does not notice.
    BitFlip,
    /// Nothing happens, for ever. (This breaks a backend's promise: it is what the time-out is
    /// for.)
    NeverCompletes,
    /// Operations start this much later.
    Slow(Duration),
    /// A batch with such an operation is not taken: the backend panics instead.
    Panics,
}

/// A backend that fails as it is told to. Operations that it spares behave as the inner backend's.
///
/// Bytes can be changed where they arrive in one of its memories; elsewhere `LyingShort` and
/// `BitFlip` lose the write.
#[derive(Debug)]
pub struct FaultBackend<B> {
    backend: ChaosBackend<B, Arc<Plan>>,
    plan: Arc<Plan>,
}

/// What a test asked for.
#[derive(Debug, Default)]
struct Plan {
    order: Mutex<Order>,
    late: LateTimer,
}

#[derive(Debug, Default)]
struct Order {
    fault: Option<Fault>,
    routes: Vec<Route>,
    submitted: u64,
}

impl<B: Backend + 'static> FaultBackend<B> {
    /// Behaves as `inner` until [`inject`](Self::inject) is called.
    ///
    /// # Errors
    /// Two regions are of one tier, or their blocks differ in size.
    pub fn new(inner: B, memories: Vec<Arc<dyn Memory>>) -> Result<Self, SetupError> {
        let plan = Arc::new(Plan::default());
        let backend = ChaosBackend::new(inner, CpuMemories::new(memories)?, Arc::clone(&plan));
        Ok(Self { backend, plan })
    }

    /// Fails in this way from now on, on these routes only.
    pub fn inject(&self, fault: Fault, routes: &[Route]) {
        if fault == Fault::Panics {
            panics_are_meant();
        }
        *self.plan.order.lock() =
            Order { fault: Some(fault), routes: routes.to_vec(), submitted: 0 };
    }

    /// Works again.
    pub fn heal(&self) {
        *self.plan.order.lock() = Order::default();
    }
}

impl Plan {
    fn panics_at(&self, batch: &[CopyOp]) -> bool {
        let order = self.order.lock();
        order.fault == Some(Fault::Panics)
            && batch.iter().any(|op| order.routes.contains(&op.route()))
    }
}

impl Faults for Plan {
    fn next(&self, op: &CopyOp) -> Option<Effect> {
        let mut order = self.order.lock();
        if !order.routes.contains(&op.route()) {
            return None;
        }
        order.submitted += 1;
        let fail = |kind, message| Effect::Fail(CopyError::new(kind, message));
        Some(match order.fault? {
            Fault::FailAfter(spared, _) if order.submitted <= spared => return None,
            Fault::FailAfter(_, kind) => fail(kind, "injected failure".to_owned()),
            Fault::Short => {
                fail(CopyErrorKind::Io, format!("{}: injected short transfer", op.from))
            }
            Fault::LyingShort => Effect::Torn,
            Fault::BitFlip => Effect::Corrupt,
            Fault::NeverCompletes => Effect::Never,
            Fault::Slow(delay) => Effect::Late(clock::now() + delay),
            Fault::Panics => return None,
        })
    }

    fn at(&self, when: Instant, job: Box<dyn FnOnce() + Send>) {
        self.late.at(when, job);
    }
}

// SAFETY: everything is the inner backend's doing.
unsafe impl<B: Backend + 'static> Backend for FaultBackend<B> {
    fn name(&self) -> &'static str {
        self.backend.name()
    }

    fn routes(&self) -> &[Route] {
        self.backend.routes()
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        assert!(!self.plan.panics_at(&batch), "injected panic");
        self.backend.submit(batch, done);
    }
}
