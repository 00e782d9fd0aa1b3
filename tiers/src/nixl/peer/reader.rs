//! An agent that reads at one holder.

use std::ffi::c_int;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::Sender;
use parking_lot::Mutex;

use super::posting::Post;
use crate::clock;
use crate::copy::{CopyError, CopyErrorKind, SlotId};
use crate::dram::DramRegion;
use crate::error::SetupError;
use crate::frame::Frame;
use crate::nixl::agent::{AgentWatch, BackendHandle, RemotePeer};
use crate::nixl::registration::{RegisteredRange, Registration};
use crate::nixl::request::{Direction, ListedSegments, NixlRequest, RangePair, SegmentList};
use crate::peers::{ReadDone, SlotRead, SlotReads, TierPlace, UnmetReader};

/// Destroying an agent takes 30 to 300 ms, and a second on a busy machine.
const MAX_END: Duration = Duration::from_secs(5);
/// Slots of a holder's tier. A list of them takes some 50 bytes for each.
const MAX_FAR_SLOTS: u32 = 1 << 24;
/// The name of a thread that destroys one.
const END: &str = "kvbm-nixl-end";

/// A reader's agent before it knows the holder.
pub(super) struct UnmetAgent {
    /// `None` once it has met the holder.
    pub(super) backend: Option<Arc<BackendHandle>>,
    pub(super) metadata: Vec<u8>,
    /// The host tier.
    pub(super) memory: Arc<DramRegion>,
    pub(super) posts: Sender<Post>,
    pub(super) ends: Arc<AgentEnds>,
}

impl UnmetReader for UnmetAgent {
    fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    fn meet(
        self: Box<Self>,
        name: &str,
        metadata: &[u8],
        place: TierPlace,
        into: Option<Arc<DramRegion>>,
    ) -> Result<Box<dyn SlotReads>, SetupError> {
        let posts = self.posts.clone();
        let into = into.unwrap_or_else(|| Arc::clone(&self.memory));
        Ok(Box::new(AgentReads { shared: self.met(name, metadata, place, into)?, posts }))
    }
}

impl UnmetAgent {
    pub(super) fn met(
        mut self,
        name: &str,
        metadata: &[u8],
        place: TierPlace,
        memory: Arc<DramRegion>,
    ) -> Result<Arc<SharedReader>, SetupError> {
        let own = TierPlace::of(&*memory);
        check_place(place, own)?;
        let backend = self.backend.take();
        let backend = backend.ok_or_else(|| SetupError::invalid("it has met a holder"))?;
        let holder = Arc::new(backend.agent().load_remote_metadata(metadata)?);
        if holder.name() != name {
            let message = format!("the agent {:?} answers in place of {name:?}", holder.name());
            return Err(SetupError::invalid(message));
        }
        holder.connect()?;
        let registration = Registration::memory(&backend, &(Arc::clone(&memory) as _))?;
        let near = SegmentList::near(&registration, ranges(own))?;
        let far = SegmentList::of_peer(&holder, ranges(place))?;
        let agent = backend.agent().watch();
        let parts = PartPlaces { registration, holder, own, theirs: place };
        let live = LiveReader { flights: Vec::new(), near, far, parts, agent };
        let shared = Arc::new(SharedReader {
            live: Mutex::new(Some(live)),
            is_over: AtomicBool::new(false),
            memory,
            ends: Arc::clone(&self.ends),
        });
        shared.ends.readers.lock().push(Arc::downgrade(&shared));
        Ok(shared)
    }
}

/// The end of an agent takes too long for who drops it.
impl Drop for UnmetAgent {
    fn drop(&mut self) {
        let Some(backend) = self.backend.take() else { return };
        if let Ok(thread) = clock::spawn(END, move || drop(backend)) {
            self.ends.add(thread);
        }
    }
}

fn check_place(place: TierPlace, own: TierPlace) -> Result<(), SetupError> {
    if place.stride != own.stride {
        let (theirs, ours) = (place.stride, own.stride);
        let message = format!("slots there are {theirs} bytes apart, and {ours} bytes here");
        return Err(SetupError::invalid(message));
    }
    if place.slots > MAX_FAR_SLOTS {
        let message = format!(
            "{} slots there are more than {MAX_FAR_SLOTS}: choose larger blocks",
            place.slots
        );
        return Err(SetupError::invalid(message));
    }
    // The library's own check of ranges is led astray by addresses that wrap around.
    let bytes = u64::from(place.slots).checked_mul(place.stride);
    match bytes.and_then(|bytes| place.base.checked_add(bytes)) {
        Some(_) => Ok(()),
        None => Err(SetupError::invalid("slots beyond the end of all memory")),
    }
}

/// One range for each slot. They touch: so the library joins those that are neighbours on both
/// sides.
fn ranges(place: TierPlace) -> impl Iterator<Item = RegisteredRange> {
    (0..u64::from(place.slots)).map(move |slot| RegisteredRange {
        address: (place.base + slot * place.stride) as usize,
        bytes: place.stride as usize,
        device: 0,
    })
}

/// A reader's agent and the way to its threads.
struct AgentReads {
    shared: Arc<SharedReader>,
    posts: Sender<Post>,
}

impl SlotReads for AgentReads {
    fn read(&self, read: SlotRead, done: ReadDone) {
        let order = ReadOrder::new(read, done);
        // What no thread receives is told of its end as it is dropped.
        let _ = self.posts.send((Arc::clone(&self.shared), order));
    }

    fn end(&self, why: &str) {
        self.shared.end(&CopyError::new(CopyErrorKind::Unavailable, why));
    }

    fn is_over(&self) -> bool {
        self.shared.is_over.load(Ordering::Acquire)
    }
}

impl fmt::Debug for AgentReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentReads").field("is_over", &self.is_over()).finish_non_exhaustive()
    }
}

impl Drop for AgentReads {
    fn drop(&mut self) {
        self.end("it is not used any more");
    }
}

/// Slots to be read, and where to.
pub(super) struct ReadOrder {
    from: Vec<SlotId>,
    /// `None`: all.
    bytes: Option<Range<usize>>,
    arriving: Arriving,
}

impl ReadOrder {
    pub(super) fn new(SlotRead { from, to, bytes }: SlotRead, done: ReadDone) -> Self {
        Self { from, bytes, arriving: Arriving { frames: to, done: Some(done) } }
    }
}

/// Frames, and the duty to give them back once nothing writes them any more.
struct Arriving {
    frames: Vec<Frame>,
    /// `None` once it is told.
    done: Option<ReadDone>,
}

impl Arriving {
    fn end(mut self, result: Result<(), CopyError>) {
        if let Some(done) = self.done.take() {
            done(std::mem::take(&mut self.frames), result);
        }
    }

    /// Something may write the slots for ever.
    fn never(mut self) {
        self.done = None;
        std::mem::forget(std::mem::take(&mut self.frames));
    }
}

/// It was not posted.
impl Drop for Arriving {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            let error = CopyError::refused("NIXL's threads have ended");
            done(std::mem::take(&mut self.frames), Err(error));
        }
    }
}

/// A reader's agent, as the threads see it.
pub(super) struct SharedReader {
    /// `None` once it is destroyed. Locked for a whole post, for which the library would have other
    /// calls wait too.
    live: Mutex<Option<LiveReader>>,
    is_over: AtomicBool,
    memory: Arc<DramRegion>,
    ends: Arc<AgentEnds>,
}

/// What a look for ends has found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    pub(super) has_ended: bool,
    pub(super) is_busy: bool,
}

impl SharedReader {
    /// Whether reads are under way then.
    pub(super) fn post(self: &Arc<Self>, order: ReadOrder) -> bool {
        let mut live = self.live.lock();
        // One that is over is about to be destroyed.
        let reader = live.as_mut().filter(|_| !self.is_over.load(Ordering::Acquire));
        let Some(reader) = reader else {
            drop(live);
            order.arriving.end(Err(over()));
            return false;
        };
        let posted = reader.post(order, &self.memory);
        // Where the post is the copy it has ended. Another thread may wait with the next post, and
        // who awaits this one is told first.
        let found = reader.look();
        drop(live);
        match posted {
            Posted::UnderWay => {}
            Posted::Refused(arriving, why) => arriving.end(Err(why)),
            Posted::Failed(why) => self.end(&why),
        }
        self.tell(found).is_busy
    }

    /// Tells which reads have ended.
    pub(super) fn look(self: &Arc<Self>) -> Seen {
        // Another thread is at it, or posts.
        let Some(mut live) = self.live.try_lock() else {
            return Seen { has_ended: false, is_busy: true };
        };
        let Some(reader) = live.as_mut() else { return Seen::default() };
        let found = reader.look();
        drop(live);
        self.tell(found)
    }

    fn tell(self: &Arc<Self>, found: Found) -> Seen {
        let Found { ended, failure, is_busy } = found;
        let has_ended = !ended.is_empty();
        ended.into_iter().for_each(|arriving| arriving.end(Ok(())));
        let has_failed = failure.is_some();
        failure.into_iter().for_each(|why| self.end(&why));
        Seen { has_ended, is_busy: is_busy && !has_failed }
    }

    fn end(self: &Arc<Self>, why: &CopyError) {
        if self.is_over.swap(true, Ordering::AcqRel) {
            return;
        }
        let (reader, reason) = (Arc::clone(self), why.clone());
        match clock::spawn(END, move || reader.destroy(&reason)) {
            Ok(thread) => self.ends.add(thread),
            Err(_) => self.destroy(why),
        }
    }

    fn destroy(&self, why: &CopyError) {
        let live = self.live.lock().take();
        live.into_iter().for_each(|live| live.destroy(why, &self.memory));
    }
}

fn over() -> CopyError {
    CopyError::new(CopyErrorKind::Unavailable, "the NIXL agent for this holder has ended")
}

/// What became of a read that was to be posted.
enum Posted {
    UnderWay,
    /// Nothing happened.
    Refused(Arriving, CopyError),
    /// Something may move: the agent must end.
    Failed(CopyError),
}

/// The reads that are complete, a failure if there is one, and whether others go on.
struct Found {
    ended: Vec<Arriving>,
    failure: Option<CopyError>,
    is_busy: bool,
}

struct LiveReader {
    flights: Vec<ReadFlight>,
    near: Arc<SegmentList>,
    far: Arc<SegmentList>,
    parts: PartPlaces,
    agent: AgentWatch,
}

impl LiveReader {
    fn post(&mut self, order: ReadOrder, memory: &DramRegion) -> Posted {
        let ReadOrder { from, bytes, mut arriving } = order;
        // This also forgets the checksums of what was there.
        if !arriving.frames.iter_mut().all(|frame| memory.write(frame).is_some()) {
            return Posted::Refused(arriving, CopyError::refused("a slot of other memory"));
        }
        let to: Vec<_> = arriving.frames.iter().map(Frame::slot).collect();
        let request = match bytes {
            None => self.request(&from, &to),
            Some(bytes) => self.parts.request(&from, &to, &bytes),
        };
        let mut request = match request {
            Ok(request) => request,
            Err(why) => return Posted::Refused(arriving, why),
        };
        // SAFETY: the frames, which are the slots' only handles, stay in the flight until the
        // request has ended or its agent is destroyed. What the holder does with its slots is not
        // in our hands: what arrives is not taken for what it should be.
        let posted = unsafe { request.post() };
        match posted {
            Err(why) if why.kind() == CopyErrorKind::Refused => Posted::Refused(arriving, why),
            posted => {
                let flight = ReadFlight { request: Some(request), arriving: Some(arriving) };
                self.flights.push(flight);
                posted.map_or_else(Posted::Failed, |()| Posted::UnderWay)
            }
        }
    }

    /// Of whole slots.
    fn request(&self, from: &[SlotId], to: &[SlotId]) -> Result<NixlRequest, CopyError> {
        let index = |slot: &SlotId| c_int::try_from(slot.0).unwrap_or(-1);
        let [near, far] = [to, from].map(|slots| slots.iter().map(index).collect::<Vec<_>>());
        let near = ListedSegments { list: &self.near, indices: &near };
        let far = ListedSegments { list: &self.far, indices: &far };
        NixlRequest::new(Direction::Read, near, far)
    }

    fn look(&mut self) -> Found {
        let (mut ended, mut failure, mut at) = (Vec::new(), None, 0);
        while let Some(flight) = self.flights.get_mut(at) {
            match flight.request.as_mut().map_or(Poll::Pending, NixlRequest::poll) {
                Poll::Ready(Ok(())) => ended.extend(self.flights.swap_remove(at).arriving.take()),
                Poll::Ready(Err(why)) => {
                    // It may still move: it stays.
                    failure = Some(why);
                    at += 1;
                }
                Poll::Pending => at += 1,
            }
        }
        Found { ended, failure, is_busy: !self.flights.is_empty() }
    }

    /// Ends everything, whatever is under way.
    fn destroy(self, why: &CopyError, memory: &Arc<DramRegion>) {
        let Self { mut flights, near, far, parts, agent } = self;
        // In the library's order: requests, lists, registrations, agent.
        let requests = flights.iter_mut().filter_map(|flight| flight.request.take());
        requests.for_each(NixlRequest::release_unended);
        drop((near, far, parts));
        if !agent.is_gone() {
            // Its frames go nowhere, and their memory stays even if it was there for this agent alone.
            std::mem::forget(Arc::clone(memory));
            return tracing::error!("a NIXL agent is still in use: its slots stay as they are");
        }
        let arriving = flights.iter_mut().filter_map(|flight| flight.arriving.take());
        arriving.for_each(|arriving| arriving.end(Err(why.clone())));
    }
}

/// Where slots lie on both sides, for reads of parts of them: lists of all parts would take too
/// much.
struct PartPlaces {
    registration: Arc<Registration>,
    holder: Arc<RemotePeer>,
    own: TierPlace,
    theirs: TierPlace,
}

impl PartPlaces {
    fn request(
        &self,
        from: &[SlotId],
        to: &[SlotId],
        bytes: &Range<usize>,
    ) -> Result<NixlRequest, CopyError> {
        let pair = |(&from, &to)| {
            let (near, far) = (part(self.own, to, bytes)?, part(self.theirs, from, bytes)?);
            Some(RangePair { near, far })
        };
        let pairs: Option<Vec<_>> = from.iter().zip(to).map(pair).collect();
        let pairs = pairs.filter(|pairs| pairs.len() == from.len() && from.len() == to.len());
        let pairs =
            pairs.ok_or_else(|| CopyError::refused("a part of a slot that is not there"))?;
        NixlRequest::of_ranges(Direction::Read, &self.registration, &self.holder, &pairs)
    }
}

fn part(place: TierPlace, slot: SlotId, bytes: &Range<usize>) -> Option<RegisteredRange> {
    let is_there = slot.0 < place.slots && bytes.end as u64 <= place.stride && !bytes.is_empty();
    let address = place.base + u64::from(slot.0) * place.stride + bytes.start as u64;
    is_there.then_some(RegisteredRange { address: address as usize, bytes: bytes.len(), device: 0 })
}

/// A read under way. Its frames stay out for ever if it is lost before its end.
struct ReadFlight {
    /// `None` once it is released.
    request: Option<NixlRequest>,
    /// `None` once it has ended.
    arriving: Option<Arriving>,
}

impl Drop for ReadFlight {
    fn drop(&mut self) {
        self.arriving.take().into_iter().for_each(Arriving::never);
    }
}

/// The agents that there are, and the threads that destroy some of them.
#[derive(Default)]
pub(super) struct AgentEnds {
    readers: Mutex<Vec<Weak<SharedReader>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl AgentEnds {
    fn add(&self, thread: JoinHandle<()>) {
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        self.readers.lock().retain(|reader| reader.strong_count() > 0);
    }

    pub(super) fn end_all(&self) {
        let readers = std::mem::take(&mut *self.readers.lock());
        let why = CopyError::new(CopyErrorKind::Unavailable, "peers are closed");
        readers.iter().filter_map(Weak::upgrade).for_each(|reader| reader.end(&why));
        let deadline = clock::now() + MAX_END;
        while self.threads.lock().iter().any(|thread| !thread.is_finished()) {
            if clock::now() > deadline {
                return tracing::error!("NIXL does not destroy an agent: it is left to itself");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
