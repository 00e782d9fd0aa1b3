//! Order with an engine's own work: what a copy waits for before it touches the engine's memory,
//! and what the engine waits for before it uses what a copy brought.
//!
//! An engine starts its kernels long before they run. Slots that it hands over are often still
//! being written, and slots that it wants filled still being read, by work that waits in a stream.
//! A fence names that work, so that no CPU thread has to wait for it.

#![expect(unsafe_code, reason = "events of another's")]

use std::any::Any;
use std::fmt;
use std::num::NonZeroU16;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

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
}

impl Layers {
    /// `arrived(n, blocks)` hears that layer `n` of every block of a batch is there, and how many
    /// these are, from any thread, not always in the order of the layers, and not at all from a
    /// backend that copies block by block. It must not block.
    pub fn new(count: NonZeroU16, arrived: impl Fn(u16, usize) + Send + Sync + 'static) -> Self {
        Self { count, arrived: Arc::new(arrived) }
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
