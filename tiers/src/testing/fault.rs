use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use crate::copy::{Backend, CopyError, CopyErrorKind, CopyOp, Done, Route, SlotRef};
use crate::error::SetupError;
use crate::memory::{Memories, Memory};

/// A way to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// So many operations succeed; all later ones end in an error of this kind.
    FailAfter(u64, CopyErrorKind),
    /// The last byte does not arrive, and the backend says so.
    Short,
    /// The last byte does not arrive, and the backend says that all did.
    LyingShort,
    /// A bit of the block arrives wrong, and the backend does not notice.
    BitFlip,
    /// Nothing happens, for ever. (This breaks a backend's promise: it is what the time-out is for.)
    NeverCompletes,
    /// Operations start so much later.
    Slow(Duration),
}

/// A backend that fails as it is told to. Operations that it spares behave as the inner backend's.
///
/// Bytes can be changed where they arrive in one of its memories; elsewhere `LyingShort` and `BitFlip` do
/// nothing.
#[derive(Debug)]
pub struct FaultBackend<B> {
    inner: Arc<B>,
    memories: Arc<Memories>,
    plan: Mutex<Plan>,
}

#[derive(Debug, Default)]
struct Plan {
    fault: Option<Fault>,
    routes: Vec<Route>,
    submitted: u64,
}

impl<B: Backend> FaultBackend<B> {
    /// Behaves as `inner` until [`inject`](Self::inject) is called.
    ///
    /// # Errors
    /// Two regions are of one tier, or their blocks differ in size.
    pub fn new(inner: B, memories: Vec<Arc<dyn Memory>>) -> Result<Self, SetupError> {
        Ok(Self {
            inner: Arc::new(inner),
            memories: Arc::new(Memories::new(memories)?),
            plan: Mutex::default(),
        })
    }

    /// Fails in this way from now on, on these routes only.
    pub fn inject(&self, fault: Fault, routes: &[Route]) {
        *self.plan.lock() = Plan { fault: Some(fault), routes: routes.to_vec(), submitted: 0 };
    }

    /// Works again.
    pub fn heal(&self) {
        *self.plan.lock() = Plan::default();
    }

    /// What is to happen to this operation.
    fn fate(&self, op: &CopyOp) -> Option<Fault> {
        let mut plan = self.plan.lock();
        if !plan.routes.contains(&op.route()) {
            return None;
        }
        plan.submitted += 1;
        match plan.fault {
            Some(Fault::FailAfter(spared, _)) if plan.submitted <= spared => None,
            fault => fault,
        }
    }
}

// SAFETY: an operation ends in the inner backend, or here without having been started; bytes are changed
// while the destination is still the operation's. `NeverCompletes` never touches a slot.
unsafe impl<B: Backend + 'static> Backend for FaultBackend<B> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn routes(&self) -> &[Route] {
        self.inner.routes()
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        let mut spared = Vec::new();
        for (index, op) in batch.into_iter().enumerate() {
            match self.fate(&op) {
                None => spared.push((index, op)),
                Some(fault) => self.fail(fault, index, op, &done),
            }
        }
        if spared.is_empty() {
            return;
        }
        let (indices, ops): (Vec<_>, Vec<_>) = spared.into_iter().unzip();
        self.inner.submit(ops, Done::new(move |index, result| done.complete(indices[index], result)));
    }
}

impl<B: Backend + 'static> FaultBackend<B> {
    fn fail(&self, fault: Fault, index: usize, op: CopyOp, done: &Done) {
        let done = done.clone();
        match fault {
            Fault::FailAfter(_, kind) => done.complete(index, Err(CopyError::new(kind, "injected failure"))),
            Fault::Short => {
                let message = format!("{}: injected short transfer", op.from);
                done.complete(index, Err(CopyError::new(CopyErrorKind::Io, message)));
            }
            Fault::NeverCompletes => {}
            Fault::LyingShort => {
                let memories = Arc::clone(&self.memories);
                let before = memories.last_byte(op.to);
                self.tamper(index, op, done, move |op| memories.set_last_byte(op.to, before));
            }
            Fault::BitFlip => {
                let memories = Arc::clone(&self.memories);
                self.tamper(index, op, done, move |op| {
                    let flipped = memories.last_byte(op.to).map(|byte| byte ^ 0x10);
                    memories.set_last_byte(op.to, flipped);
                });
            }
            Fault::Slow(delay) => {
                let inner = Arc::clone(&self.inner);
                thread::spawn(move || {
                    thread::sleep(delay);
                    inner.submit(vec![op], Done::new(move |_, result| done.complete(index, result)));
                });
            }
        }
    }

    /// Executes the operation and spoils the destination before its end is reported.
    fn tamper(&self, index: usize, op: CopyOp, done: Done, spoil: impl Fn(&CopyOp) + Send + Sync + 'static) {
        let report = Done::new(move |_, result| {
            spoil(&op);
            done.complete(index, result);
        });
        self.inner.submit(vec![op], report);
    }
}

impl Memories {
    fn last_byte(&self, slot: SlotRef) -> Option<u8> {
        let block = self.block(slot)?;
        // SAFETY: the last byte of a block that exists, of an operation in flight whose copy has not begun or
        // has ended.
        Some(unsafe { block.cast::<u8>().add(block.len() - 1).read() })
    }

    fn set_last_byte(&self, slot: SlotRef, byte: Option<u8>) {
        if let (Some(block), Some(byte)) = (self.block(slot), byte) {
            // SAFETY: the last byte of the destination of an operation whose copy has ended and that is not
            // reported yet.
            unsafe { block.cast::<u8>().add(block.len() - 1).write(byte) };
        }
    }
}
