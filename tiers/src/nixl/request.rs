//! Transfers: prepared lists of segments, and requests that move some of them.

use std::any::Any;
use std::ffi::{CStr, c_int};
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::task::Poll;

use tracing::Span;
use tracing::field::Empty;

use super::agent::{Agent, RemotePeer};
use super::arguments::{OptArgs, done, status_name};
use super::registration::{RegisteredRange, Registration};
use super::sys::{self, MemType, Status, XferDlistHandleS, XferDlistS, XferReqS, XferTelemetry};
use crate::copy::{CopyError, CopyErrorKind};
use crate::error::SetupError;

/// Segments that were looked up once, to be named by their position in requests. Holds what they
/// are part of.
pub struct SegmentList {
    agent: Agent,
    handle: NonNull<XferDlistHandleS>,
    segments: usize,
    owner: ListOwner,
}

// SAFETY: the list is not changed after it was prepared, and the agent's functions may be called
// from any thread.
unsafe impl Send for SegmentList {}
// SAFETY: as above.
unsafe impl Sync for SegmentList {}

/// Whose the segments are.
#[derive(Debug)]
enum ListOwner {
    Own(Arc<Registration>),
    Peer(Arc<RemotePeer>),
}

impl SegmentList {
    /// Memory of this agent: the near end of a transfer.
    ///
    /// # Errors
    /// `Invalid`: more than 2³¹ − 1 segments. `Unavailable`: a segment is not part of the
    /// registration.
    pub fn near(
        registration: &Arc<Registration>,
        segments: impl IntoIterator<Item = RegisteredRange>,
    ) -> Result<Arc<Self>, SetupError> {
        let agent = registration.backend().agent();
        Self::new(
            agent,
            c"",
            registration.kind(),
            segments,
            ListOwner::Own(Arc::clone(registration)),
        )
    }

    /// Files, objects or memory of this agent: the far end of a transfer.
    ///
    /// # Errors
    /// As [`near`](Self::near).
    pub fn far(
        registration: &Arc<Registration>,
        segments: impl IntoIterator<Item = RegisteredRange>,
    ) -> Result<Arc<Self>, SetupError> {
        let agent = registration.backend().agent().clone();
        let owner = ListOwner::Own(Arc::clone(registration));
        Self::new(&agent, agent.c_name(), registration.kind(), segments, owner)
    }

    /// Memory of a peer: the far end of a transfer. The addresses are the peer's.
    ///
    /// # Errors
    /// As [`near`](Self::near), where the registration is the peer's.
    pub fn of_peer(
        peer: &Arc<RemotePeer>,
        segments: impl IntoIterator<Item = RegisteredRange>,
    ) -> Result<Arc<Self>, SetupError> {
        Self::new(
            peer.agent(),
            peer.c_name(),
            sys::MEM_DRAM,
            segments,
            ListOwner::Peer(Arc::clone(peer)),
        )
    }

    fn new(
        agent: &Agent,
        name: &CStr,
        kind: MemType,
        segments: impl IntoIterator<Item = RegisteredRange>,
        owner: ListOwner,
    ) -> Result<Arc<Self>, SetupError> {
        let mut list = XferList::new(agent, kind)?;
        let mut count = 0_usize;
        for segment in segments {
            list.push(segment)?;
            count += 1;
        }
        if c_int::try_from(count).is_err() {
            return Err(SetupError::invalid(format!("{count} segments in one NIXL list")));
        }
        let args = match &owner {
            ListOwner::Own(registration) => {
                Some(OptArgs::new(agent)?.with_backend(registration.backend())?)
            }
            ListOwner::Peer(_) => None,
        };
        let args = args.as_ref().map_or(null_mut(), OptArgs::as_ptr);
        let mut handle = null_mut();
        // SAFETY: agent, list and arguments live; what the segments are part of is kept by `owner`.
        let status = unsafe {
            (agent.api().prep_xfer_dlist)(
                agent.handle(),
                name.as_ptr(),
                list.handle,
                &raw mut handle,
                args,
            )
        };
        done(status, "prepare segments: are they all registered?")?;
        let handle =
            NonNull::new(handle).ok_or_else(|| SetupError::unavailable("NIXL prepared no list"))?;
        Ok(Arc::new(Self { agent: agent.clone(), handle, segments: count, owner }))
    }

    /// How many.
    pub const fn len(&self) -> usize {
        self.segments
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.segments == 0
    }

    #[cfg(any(test, feature = "baselines"))]
    pub(super) const fn agent(&self) -> &Agent {
        &self.agent
    }

    #[cfg(any(test, feature = "baselines"))]
    pub(super) const fn as_ptr(&self) -> *mut XferDlistHandleS {
        self.handle.as_ptr()
    }

    fn peer(&self) -> Option<&Arc<RemotePeer>> {
        match &self.owner {
            ListOwner::Own(_) => None,
            ListOwner::Peer(peer) => Some(peer),
        }
    }
}

impl fmt::Debug for SegmentList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentList")
            .field("segments", &self.segments)
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}

impl Drop for SegmentList {
    fn drop(&mut self) {
        // SAFETY: ours; requests, which hold the list, are gone.
        unsafe {
            (self.agent.api().release_xfer_dlist_handle)(self.agent.handle(), self.handle.as_ptr())
        };
    }
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the far end to the near one.
    Read,
    /// From the near end to the far one.
    Write,
}

impl Direction {
    const fn op(self) -> sys::XferOp {
        match self {
            Self::Read => sys::XFER_READ,
            Self::Write => sys::XFER_WRITE,
        }
    }
}

/// A transfer of some segments of two lists, one to one, of equal lengths. It may be started again
/// when it has ended.
///
/// A request that is dropped before its end is left to itself: it, and all that it touches, stays
/// for the rest of the process, since nothing can stop the hardware.
pub struct NixlRequest {
    /// `None` only while dropping.
    held: Option<HeldRequest>,
    direction: Direction,
    state: RequestState,
    /// From its start to its end.
    span: Span,
}

struct HeldRequest {
    handle: NonNull<XferReqS>,
    agent: Agent,
    /// Whose the far end is, if it is not this agent's.
    peer: Option<Arc<RemotePeer>>,
    /// What its segments are part of.
    _ends: [Arc<dyn Any + Send + Sync>; 2],
}

// SAFETY: a request is used by one thread at a time, through `&mut`; which one does not matter to
// the agent.
unsafe impl Send for NixlRequest {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestState {
    Idle,
    InFlight,
    /// It failed in a way that does not tell whether anything still moves.
    Unknown,
}

/// A range of this agent's memory, and one of a peer's.
#[derive(Clone, Copy, Debug)]
pub struct RangePair {
    /// Of this agent's.
    pub near: RegisteredRange,
    /// Of the peer's.
    pub far: RegisteredRange,
}

/// Some segments of a list, by their positions in it.
#[derive(Clone, Copy, Debug)]
pub struct ListedSegments<'a> {
    /// The list.
    pub list: &'a Arc<SegmentList>,
    /// Which of its segments.
    pub indices: &'a [c_int],
}

impl ListedSegments<'_> {
    fn fit(self) -> bool {
        let is_one = |&index| usize::try_from(index).is_ok_and(|index| index < self.list.segments);
        self.indices.iter().all(is_one)
    }
}

impl NixlRequest {
    /// Moves the segments of the one list to or from those of the other, in their order.
    ///
    /// # Errors
    /// `Refused`: an index is out of range, the numbers of indices differ or are zero, the lists
    /// are of different agents, or no backend moves such segments.
    pub fn new(
        direction: Direction,
        near: ListedSegments<'_>,
        far: ListedSegments<'_>,
    ) -> Result<Self, CopyError> {
        let agent = &near.list.agent;
        if near.indices.len() != far.indices.len()
            || near.indices.is_empty()
            || !near.fit()
            || !far.fit()
            || agent.handle() != far.list.agent.handle()
        {
            return Err(refused("its indices do not fit its lists"));
        }
        let mut handle = null_mut();
        // SAFETY: agent and lists live, and the indices, as many as said, are positions in the
        // lists.
        let status = unsafe {
            (agent.api().make_xfer_req)(
                agent.handle(),
                direction.op(),
                near.list.handle.as_ptr(),
                near.indices.as_ptr(),
                near.indices.len(),
                far.list.handle.as_ptr(),
                far.indices.as_ptr(),
                far.indices.len(),
                &raw mut handle,
                null_mut(),
            )
        };
        let handle = made(status, handle)?;
        let (agent, peer) = (agent.clone(), far.list.peer().cloned());
        let ends: [Arc<dyn Any + Send + Sync>; 2] =
            [Arc::clone(near.list) as _, Arc::clone(far.list) as _];
        Ok(Self::idle(direction, HeldRequest { handle, agent, peer, _ends: ends }))
    }

    /// Moves ranges of registered memory to or from ranges of a peer's, which no list names.
    ///
    /// # Errors
    /// `Refused`: there are none, a range is not part of what was registered, the two of a pair are
    /// not of one length, or the peer is known to another agent.
    pub fn of_ranges(
        direction: Direction,
        near: &Arc<Registration>,
        far: &Arc<RemotePeer>,
        pairs: &[RangePair],
    ) -> Result<Self, CopyError> {
        let agent = near.backend().agent();
        if pairs.is_empty() || agent.handle() != far.agent().handle() {
            return Err(refused("its ranges fit no agent"));
        }
        let list = |kind, of: fn(&RangePair) -> RegisteredRange| {
            let mut list = XferList::new(agent, kind)?;
            pairs.iter().try_for_each(|pair| list.push(of(pair)))?;
            Ok(list)
        };
        let lists = list(near.kind(), |pair| pair.near)
            .and_then(|near| Ok((near, list(sys::MEM_DRAM, |pair| pair.far)?)));
        let (nears, fars) = lists.map_err(|error: SetupError| refused(&error.to_string()))?;
        let mut handle = null_mut();
        // SAFETY: agent, peer and lists live; the library looks the ranges up.
        let status = unsafe {
            (agent.api().create_xfer_req)(
                agent.handle(),
                direction.op(),
                nears.handle,
                fars.handle,
                far.c_name().as_ptr(),
                &raw mut handle,
                null_mut(),
            )
        };
        let handle = made(status, handle)?;
        let (agent, peer) = (agent.clone(), Some(Arc::clone(far)));
        let ends: [Arc<dyn Any + Send + Sync>; 2] = [Arc::clone(near) as _, Arc::clone(far) as _];
        Ok(Self::idle(direction, HeldRequest { handle, agent, peer, _ends: ends }))
    }

    const fn idle(direction: Direction, held: HeldRequest) -> Self {
        Self { held: Some(held), direction, state: RequestState::Idle, span: Span::none() }
    }

    /// Starts the transfer.
    ///
    /// # Errors
    /// `Refused`: it is under way, or the peer was forgotten; nothing happened. `TimedOut`: the
    /// library failed half-way, and what the request touches may be touched for ever.
    ///
    /// # Safety
    /// Until [`poll`](Self::poll) says that it ended, nothing writes the segments that are read,
    /// and nothing touches those that are written. After an error of kind `TimedOut` that holds for
    /// ever.
    pub unsafe fn post(&mut self) -> Result<(), CopyError> {
        if self.state != RequestState::Idle {
            return Err(refused("it is under way"));
        }
        self.span = span(self.direction);
        let (agent, handle) = self.parts();
        // SAFETY: agent and request live; the caller answers for the segments, which `_ends` keeps
        // alive.
        let status = unsafe { (agent.api().post_xfer_req)(agent.handle(), handle, null_mut()) };
        match status {
            // It was over before it was asked about.
            sys::SUCCESS => {
                self.end_span();
                Ok(())
            }
            sys::IN_PROGRESS => {
                self.state = RequestState::InFlight;
                Ok(())
            }
            // The library looks for the peer before all else.
            sys::ERROR_NOT_FOUND => Err(refused("the peer was forgotten")),
            status => {
                self.state = RequestState::Unknown;
                Err(unclear(status))
            }
        }
    }

    /// Whether the transfer has ended. One that was not started has.
    ///
    /// # Errors
    /// `Io`: it failed, and nothing moves any more. `TimedOut`: it failed, and the segments may
    /// still be touched: a read from a peer that is gone, for example. `Unavailable`: the peer is
    /// gone.
    pub fn poll(&mut self) -> Poll<Result<(), CopyError>> {
        match self.state {
            RequestState::Idle => return Poll::Ready(Ok(())),
            RequestState::Unknown => return Poll::Ready(Err(unclear(sys::ERROR_INVALID_STATE))),
            RequestState::InFlight => {}
        }
        let (agent, handle) = self.parts();
        // SAFETY: agent and request live.
        let status = unsafe { (agent.api().get_xfer_status)(agent.handle(), handle) };
        match status {
            sys::IN_PROGRESS => return Poll::Pending,
            sys::SUCCESS => {
                self.state = RequestState::Idle;
                self.end_span();
                return Poll::Ready(Ok(()));
            }
            _ => {}
        }
        Poll::Ready(Err(self.fail(status)))
    }

    /// It is over. What NIXL measured is said where it measures.
    fn end_span(&mut self) {
        let span = std::mem::replace(&mut self.span, Span::none());
        if span.is_none() {
            return;
        }
        let (agent, handle) = self.parts();
        let mut measured = XferTelemetry::default();
        // SAFETY: agent and request live, and the structure is that of the header.
        let status =
            unsafe { (agent.api().get_xfer_telemetry)(agent.handle(), handle, &raw mut measured) };
        if status == sys::SUCCESS {
            span.record("bytes", measured.total_bytes);
            span.record("descriptors", measured.desc_count);
            span.record("post_us", measured.post_duration_us);
            span.record("transfer_us", measured.xfer_duration_us);
        }
    }

    /// It ended badly. Bytes of a peer that is gone may still be arriving.
    fn fail(&mut self, status: Status) -> CopyError {
        let peer = self.held.as_ref().and_then(|held| held.peer.as_deref());
        let may_move =
            status == sys::ERROR_NOT_FOUND || peer.is_some() && self.direction == Direction::Read;
        let error = match peer {
            _ if may_move => unclear(status),
            Some(peer) => {
                let message = format!("a NIXL transfer to {:?} failed: is it gone?", peer.name());
                CopyError::new(CopyErrorKind::Unavailable, message)
            }
            None => failed(CopyErrorKind::Io, status),
        };
        self.state = if may_move { RequestState::Unknown } else { RequestState::Idle };
        self.span = Span::none();
        error
    }

    /// Forgets a request that may be under way, whose agent is destroyed next. Until then its bytes
    /// may move.
    pub(super) fn release_unended(mut self) {
        self.held.take().into_iter().for_each(HeldRequest::release);
    }

    fn parts(&self) -> (&Agent, *mut XferReqS) {
        let Some(held) = &self.held else { unreachable!("taken in drop only") };
        (&held.agent, held.handle.as_ptr())
    }
}

impl fmt::Debug for NixlRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("direction", &self.direction)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl Drop for NixlRequest {
    fn drop(&mut self) {
        let Some(held) = self.held.take() else { return };
        if self.state != RequestState::Idle {
            tracing::error!(
                "a NIXL request is dropped before its end: what it touches stays as it is"
            );
            std::mem::forget(held);
            return;
        }
        held.release();
    }
}

impl HeldRequest {
    fn release(self) {
        let agent = &self.agent;
        // SAFETY: the request is ours, and released once: this takes it.
        let released =
            unsafe { (agent.api().release_xfer_req)(agent.handle(), self.handle.as_ptr()) };
        if released == sys::SUCCESS {
            // SAFETY: released just now, and used no more.
            unsafe { (agent.api().destroy_xfer_req)(self.handle.as_ptr()) };
        }
    }
}

/// A list of what may be transferred.
struct XferList {
    agent: Agent,
    handle: *mut XferDlistS,
}

impl XferList {
    fn new(agent: &Agent, kind: MemType) -> Result<Self, SetupError> {
        let mut handle = null_mut();
        // SAFETY: makes an empty list, ours.
        done(unsafe { (agent.api().create_xfer_dlist)(kind, &raw mut handle) }, "hold a list")?;
        Ok(Self { agent: agent.clone(), handle })
    }

    fn push(
        &mut self,
        RegisteredRange { address, bytes, device }: RegisteredRange,
    ) -> Result<(), SetupError> {
        // SAFETY: the list is ours.
        let status =
            unsafe { (self.agent.api().xfer_dlist_add_desc)(self.handle, address, bytes, device) };
        done(status, "hold a list")
    }
}

impl Drop for XferList {
    fn drop(&mut self) {
        // SAFETY: ours, and used no more.
        unsafe { (self.agent.api().destroy_xfer_dlist)(self.handle) };
    }
}

/// What a request takes, for listeners. NIXL measures where `NIXL_TELEMETRY_ENABLE` has it do so.
fn span(direction: Direction) -> Span {
    let direction = match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    };
    // Blocks of several transfers may be in it, so it is under none.
    tracing::trace_span!(
        parent: None,
        "nixl",
        direction,
        bytes = Empty,
        descriptors = Empty,
        post_us = Empty,
        transfer_us = Empty
    )
}

/// The request that was made, if one was.
fn made(status: Status, handle: *mut XferReqS) -> Result<NonNull<XferReqS>, CopyError> {
    let handle = NonNull::new(handle).filter(|_| status == sys::SUCCESS);
    handle.ok_or_else(|| refused(status_name(status)))
}

fn refused(why: &str) -> CopyError {
    CopyError::refused(format!("NIXL refuses a request: {why}"))
}

fn failed(kind: CopyErrorKind, status: Status) -> CopyError {
    CopyError::new(
        kind,
        format!("a NIXL transfer failed ({}): see what it printed", status_name(status)),
    )
}

fn unclear(status: Status) -> CopyError {
    failed(CopyErrorKind::TimedOut, status)
}
