//! The backends that move blocks through NIXL: to slot files, and to objects, one for each slot.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use crossbeam_channel::Sender;

use super::agent::BackendHandle;
use super::mover::{MoverBatch, RequestMover};
use super::registration::{RegisteredRange, Registration, device_of};
use super::request::SegmentList;
use crate::backend::Backend;
use crate::clock;
use crate::copy::{CopyErrorKind, CopyOp, Done, Route, SlotId, Tier};
use crate::disk::{DiskRegion, check_fit};
use crate::error::{SetupError, SetupErrorKind};
use crate::fork::{ProcessBound, ServiceThread};
use crate::memory::Memory;
use crate::object::{Store, StoreOptions};

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
    fn start(
        plugin: &BackendHandle,
        ends: MoverEnds,
        depth: u32,
        at_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, SetupError> {
        let MoverEnds { memory, mut near, other, mut far } = ends;
        // What the plugin does not take shows now rather than at the first copy.
        near.list(0)?;
        far.list(0)?;
        let routes = Route::new(memory.tier(), other).both_ways();
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
struct MoverEnds {
    memory: Arc<dyn Memory>,
    near: SlotLists,
    other: Tier,
    far: SlotLists,
}

/// The first `bytes` bytes of each slot of `memory`.
fn near(
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

/// Prepares the list of some slots, one segment for each.
type PrepareFn = dyn Fn(Range<u32>) -> Result<Arc<SegmentList>, SetupError> + Send;
/// Whether a slot is there: a region may do without some of its directories.
type IsThere = dyn Fn(SlotId) -> bool + Send;

/// A region's slots in lists of equal length, each prepared when a slot of it is first used: a list
/// takes time and memory in proportion to its slots, and some tiers have a thousand million.
pub(super) struct SlotLists {
    slots: u32,
    span: u32,
    prepare: Box<PrepareFn>,
    is_there: Box<IsThere>,
    lists: BTreeMap<u32, Arc<SegmentList>>,
}

/// A slot's list, by number, and its position there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ListPosition {
    pub(super) span: u32,
    pub(super) index: c_int,
}

impl SlotLists {
    /// `slots` slots, `span` to a list.
    pub(super) fn new(slots: u32, span: u32, prepare: Box<PrepareFn>) -> Self {
        Self { slots, span, prepare, is_there: Box::new(|_| true), lists: BTreeMap::new() }
    }

    /// The same, of a region that has only some of these slots.
    pub(super) fn only(self, is_there: impl Fn(SlotId) -> bool + Send + 'static) -> Self {
        Self { is_there: Box::new(is_there), ..self }
    }

    /// `None`: there is no such slot.
    pub(super) fn position(&self, slot: SlotId) -> Option<ListPosition> {
        let index = c_int::try_from(slot.0 % self.span).ok()?;
        (slot.0 < self.slots && (self.is_there)(slot))
            .then_some(ListPosition { span: slot.0 / self.span, index })
    }

    /// A list by its number, as a [`ListPosition`] names it.
    pub(super) fn list(&mut self, span: u32) -> Result<&Arc<SegmentList>, SetupError> {
        if !self.lists.contains_key(&span) {
            let from = span * self.span;
            let list = (self.prepare)(from..from.saturating_add(self.span).min(self.slots))?;
            self.lists.insert(span, list);
        }
        Ok(&self.lists[&span])
    }
}

/// Objects that are registered together.
const OBJECTS_A_LIST: u32 = 1 << 10;

/// How blocks are laid out in the store.
#[derive(Clone, Debug)]
pub struct NixlObjectOptions {
    /// Part of all objects' names, `/` allowed.
    pub namespace: String,
    /// Slots of the tier.
    pub slots: u32,
    /// The most blocks in flight, each way.
    pub concurrency: u32,
}

impl NixlBackend {
    /// Between `memory` and one object for each slot in the store that `plugin` was started for,
    /// with [`object_parameters`]. `store` is the same store, reached without NIXL: what NIXL
    /// cannot do, deleting, goes through it.
    ///
    /// The objects are called `<root>/<namespace>/nixl/<process>/<slot>`, where `<process>` is 128
    /// bits that no other process has, and hold the bytes of a block and nothing else. A slot that
    /// is written again replaces its object; all are deleted at the end.
    ///
    /// NIXL takes an object that is too short for a whole one. No other process writes these
    /// objects, and [`Verified`](crate::Verified) notices it.
    ///
    /// # Errors
    /// `Unavailable`: the plugin does not take memory or objects, or there is no thread.
    pub fn objects(
        plugin: &Arc<BackendHandle>,
        memory: Arc<dyn Memory>,
        store: Store,
        options: &NixlObjectOptions,
    ) -> Result<Self, SetupError> {
        let bytes = memory.block_bytes();
        let directory = store.fresh_directory(&options.namespace, "nixl");
        let (backend, parent) = (Arc::clone(plugin), directory.clone());
        let prepare = move |slots: std::ops::Range<u32>| {
            let key = |slot: u32| {
                (u64::from(slot), parent.clone().join(format!("{slot:08x}")).to_string())
            };
            let objects = Registration::objects(&backend, bytes, slots.clone().map(key))?;
            let segment =
                |slot: u32| RegisteredRange { address: 0, bytes, device: u64::from(slot) };
            SegmentList::far(&objects, slots.map(segment))
        };
        let far = SlotLists::new(options.slots, OBJECTS_A_LIST, Box::new(prepare));
        let near = near(plugin, &memory, bytes)?;
        let ends = MoverEnds { memory, near, other: Tier::Object, far };
        Self::start(plugin, ends, options.concurrency, move || store.delete_directory(&directory))
    }
}

/// Parameters of the plugin `OBJ` for the store at `url`, `s3://bucket/prefix`. What is not given,
/// the plugin takes from the `AWS_*` variables or the instance that this runs on.
///
/// # Errors
/// `Invalid`: another kind of store, or a malformed URL.
pub fn object_parameters(
    url: &str,
    options: &StoreOptions,
    concurrency: u32,
) -> Result<BTreeMap<String, String>, SetupError> {
    let bucket = url::Url::parse(url).ok().filter(|url| url.scheme() == "s3");
    let Some(bucket) = bucket.as_ref().and_then(url::Url::host_str) else {
        let message = "NIXL reaches S3-compatible stores only: set object.url (DYN_KVBM_OBJECT_URL) to \
             s3://bucket/prefix, or object.backend (DYN_KVBM_OBJECT_BACKEND) to native";
        return Err(SetupError::invalid(message));
    };
    let scheme =
        options.endpoint.as_ref().and_then(|endpoint| endpoint.split_once("://")).map(|(s, _)| s);
    let optional = [
        ("endpoint_override", options.endpoint.as_deref()),
        ("scheme", scheme),
        ("region", options.region.as_deref()),
        ("access_key", options.access_key.as_deref()),
        ("secret_key", options.secret_key.as_deref()),
    ];
    // A thread moves one object at a time: those that write must leave as many for those that read.
    let threads = concurrency.max(1).saturating_mul(2).to_string();
    let fixed = [
        ("bucket", bucket),
        ("num_threads", &threads),
        // Works with every S3-compatible store.
        ("use_virtual_addressing", "false"),
        // Every block has a checksum of its own, and not every store knows Amazon's.
        ("req_checksum", "required"),
        ("resp_checksum", "required"),
    ];
    let given = optional.into_iter().filter_map(|(key, value)| Some((key, value?)));
    Ok(fixed
        .into_iter()
        .chain(given)
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::SetupErrorKind;

    #[test]
    fn a_slot_that_is_not_there_has_no_position() {
        let prepare = |_| Err(SetupError::unavailable("nothing is moved here"));
        // The directory of every third slot is away.
        let spans = SlotLists::new(8, 4, Box::new(prepare)).only(|slot| slot.0 % 3 != 1);
        let found = (0..10).map(|slot| spans.position(SlotId(slot)).map(|at| (at.span, at.index)));
        let there = [
            Some((0, 0)),
            None,
            Some((0, 2)),
            Some((0, 3)),
            None,
            Some((1, 1)),
            Some((1, 2)),
            None,
        ];
        assert_eq!(found.collect::<Vec<_>>(), [&there[..], &[None, None]].concat());
    }

    #[test]
    fn parameters_come_from_url_and_options() {
        let options = StoreOptions {
            endpoint: Some("http://127.0.0.1:9000".into()),
            access_key: Some("key".into()),
            secret_key: Some("secret".into()),
            region: None,
        };
        let parameters = object_parameters("s3://bucket/some/prefix", &options, 8).unwrap();
        let get = |key: &str| parameters.get(key).map(String::as_str);
        assert_eq!(
            (get("bucket"), get("scheme"), get("region")),
            (Some("bucket"), Some("http"), None)
        );
        assert_eq!((get("access_key"), get("num_threads")), (Some("key"), Some("16")));
        for url in ["file:///tmp/objects", "memory:///", "s3://", "nonsense"] {
            let error = object_parameters(url, &options, 8).unwrap_err();
            assert_eq!(error.kind(), SetupErrorKind::Invalid);
        }
    }
}
