//! The backends that move blocks through NIXL.

use std::collections::VecDeque;
use std::sync::Arc;

use crossbeam_channel::Sender;

use super::agent::BackendHandle;
use super::mover::{MoverBatch, RequestMover};
use super::registration::{RegisteredRange, Registration, device_of};
use super::request::SegmentList;
use super::spans::SlotLists;
use crate::backend::Backend;
use crate::clock;
use crate::copy::{CopyErrorKind, CopyOp, Done, Route, SlotId, Tier};
use crate::disk::{DiskRegion, check_fit};
use crate::error::{SetupError, SetupErrorKind};
use crate::fork::{ProcessBound, ServiceThread};
use crate::memory::Memory;

/// Slots whose segments are prepared together: 4 ms of work, 4 MiB of memory.
const SPAN: u32 = 1 << 16;

/// Moves blocks between a memory region and another tier through a plugin of NIXL, with a thread of
/// its own that forms requests of neighbouring blocks and sleeps while they move.
///
/// A transfer whose outcome the library leaves in doubt is never completed: its slots count as lost
/// when the scheduler's time limit has passed.
#[derive(Debug)]
pub struct NixlBackend {
    name: &'static str,
    routes: [Route; 2],
    // Before the thread, which finishes what was submitted.
    batches: ProcessBound<Sender<MoverBatch>>,
    _thread: ServiceThread,
}

impl NixlBackend {
    /// Between `memory` and `disk`, at most `depth` blocks at a time each way; more wait inside.
    /// `plugin` is one for files: `POSIX`, for example.
    ///
    /// # Errors
    /// `Invalid`: the regions' blocks differ in size. `Unavailable`: the plugin does not take the
    /// regions, or there is no thread.
    pub fn disk(
        plugin: &Arc<BackendHandle>,
        memory: Arc<dyn Memory>,
        disk: Arc<DiskRegion>,
        depth: u32,
    ) -> Result<Self, SetupError> {
        check_fit(&*memory, &disk)?;
        let stride = memory.stride();
        let files = Registration::files(plugin, &disk)?;
        let slots = disk.geometry().slots();
        let region = Arc::clone(&disk);
        let is_there = move |slot| region.place(slot).is_some();
        let place = move |slot: u32| {
            // A list has an entry for every slot, by number. That of a slot that is not there is
            // never named.
            let (file, offset) = disk.place(SlotId(slot)).unwrap_or_default();
            RegisteredRange {
                address: offset as usize,
                bytes: stride,
                device: device_of(disk.file(file)),
            }
        };
        let prepare =
            move |slots: std::ops::Range<u32>| SegmentList::far(&files, slots.map(&place));
        let far = SlotLists::new(slots, SPAN, Box::new(prepare)).only(is_there);
        let near = near(plugin, &memory, stride)?;
        Self::start(plugin, MoverEnds { memory, near, other: Tier::Disk, far }, depth, || {})
    }

    /// `at_end` runs in the backend's thread when all is done.
    pub(super) fn start(
        plugin: &BackendHandle,
        ends: MoverEnds,
        depth: u32,
        at_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, SetupError> {
        let MoverEnds { memory, mut near, other, mut far } = ends;
        // What the plugin does not take shows now rather than at the first copy.
        near.list(0)?;
        far.list(0)?;
        let routes = [(memory.tier(), other), (other, memory.tier())];
        let failure =
            if other == Tier::Object { CopyErrorKind::Unavailable } else { CopyErrorKind::Io };
        let mover = RequestMover {
            memory,
            near,
            other,
            far,
            depth: depth.max(1) as usize,
            failure,
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            flights: Vec::new(),
            stirred: clock::now(),
        };
        let (batches, incoming) = crossbeam_channel::unbounded();
        let serve = move || {
            mover.serve(&incoming);
            at_end();
        };
        let thread = ServiceThread::spawn("kvbm-nixl", serve).map_err(|error| {
            let message = "cannot start a thread for NIXL: raise the limit on processes";
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })?;
        let batches = ProcessBound::new(batches);
        Ok(Self { name: name_of(plugin.plugin()), routes, batches, _thread: thread })
    }
}

/// What a backend moves blocks between.
pub(super) struct MoverEnds {
    pub(super) memory: Arc<dyn Memory>,
    pub(super) near: SlotLists,
    pub(super) other: Tier,
    pub(super) far: SlotLists,
}

/// The first `bytes` bytes of each slot of `memory`.
pub(super) fn near(
    plugin: &Arc<BackendHandle>,
    memory: &Arc<dyn Memory>,
    bytes: usize,
) -> Result<SlotLists, SetupError> {
    let registration = Registration::memory(plugin, memory)?;
    let (base, stride) = (memory.base().addr().get(), memory.stride());
    let place = move |slot: u32| RegisteredRange {
        address: base + slot as usize * stride,
        bytes,
        device: 0,
    };
    let prepare =
        move |slots: std::ops::Range<u32>| SegmentList::near(&registration, slots.map(place));
    Ok(SlotLists::new(memory.slots(), SPAN, Box::new(prepare)))
}

/// For reports.
fn name_of(plugin: &str) -> &'static str {
    match plugin {
        "POSIX" => "nixl-posix",
        "OBJ" => "nixl-obj",
        "GDS" => "nixl-gds",
        "GDS_MT" => "nixl-gds-mt",
        _ => "nixl",
    }
}

// SAFETY: an operation is completed once: by the thread when its request has ended, or as refused
// when it is dropped before one was posted; those whose end is in doubt are never completed. The
// thread ends only when all have ended. The lists that requests hold keep the regions alive; they
// name whole slots that exist.
unsafe impl Backend for NixlBackend {
    fn name(&self) -> &'static str {
        self.name
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, ops: Vec<CopyOp>, done: Done) {
        // A batch that is not received any more is refused when it is dropped.
        let _ = self.batches.send(MoverBatch::new(ops, done));
    }
}
