//! The leader's side: a backend whose copies are done by all ranks, and the thread that listens to
//! them.

#![expect(unsafe_code, reason = "promises of a backend")]

use std::fmt;
use std::io;
use std::mem;
use std::num::NonZeroU16;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags};

use super::connection::{
    ConnectionEnd, ConnectionReady, ConnectionWaker, FrameInbox, RankConnection, SeldomLog,
    SendResult, wait,
};
use super::forget::PendingDeletions;
use super::loads::RankLoad;
use super::pending::{EndedReport, MAX_RANKS, PendingBatches, RankSet, UnexpectedReport};
use super::protocol::{
    EndedCopies, HelloFrame, InventoryPage, MAX_FINGERPRINT, MAX_GREETING, MAX_MESSAGE, MAX_OPS,
    MalformedFrame, Membership, PackedOps, RefusalFrame, ToLeader, ToRank, decode, frame,
};
use super::pull::{PeerSeat, PullOrder};
use super::recovery::InventoryAnswers;
use super::socket::LeaderSocket;
use crate::backend::{Backend, Fences};
use crate::clock;
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done, Route, Tier};
use crate::error::{SetupError, SetupErrorKind};
use crate::fork::ServiceThread;

/// How long a new connection may take to say who it is.
const GREETING_LIMIT: Duration = Duration::from_secs(5);
/// Before the next try to accept a connection, when one failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// How long a leader that ends waits for copies under way.
const FAREWELL_LIMIT: Duration = Duration::from_secs(5);
/// The most connections that have yet to say it.
const MAX_NEWCOMERS: usize = 2 * MAX_RANKS as usize;

/// What a leader expects of its ranks.
#[derive(Clone, Debug)]
pub struct LeaderOptions {
    /// Where they meet; its last component is created if it is missing.
    pub dir: PathBuf,
    /// How many there are, 1 to [`MAX_RANKS`].
    pub world: u16,
    /// Slots by tier that each has; in the host tier with the staging slots.
    pub slots: [u32; Tier::COUNT],
    /// Bytes of each one's slice of a block.
    pub block_bytes: u64,
    /// What else must be the same.
    pub fingerprint: String,
    /// How long to wait until all are there.
    pub limit: Duration,
    /// Where it writes down what ranks have yet to forget; `None`: it knows as long as it runs.
    pub debts: Option<PathBuf>,
}

/// A backend whose copies are done by ranks, each of its slice. Dropping it ends their service.
#[derive(Debug)]
pub struct Leader {
    pub(super) shared: Arc<LeaderState>,
    routes: Vec<Route>,
    /// Loads that ranks count the layers of.
    loads: AtomicU64,
    thread: ServiceThread,
}

impl Leader {
    /// Waits until all ranks are there. From then on `on_lost` is called with a rank's number when
    /// it is gone: all that it held is lost, and copies that it had confirmed are reported as
    /// failed only after the call returned.
    ///
    /// # Errors
    /// `Invalid`: no ranks, or too many; or some were refused, which the message names. `InUse`:
    /// the directory has a leader. `NotWritable`: the directory, or the file of debts, or others
    /// may write them. `Unavailable`: ranks that the message names have not come in time; or no
    /// thread.
    pub fn open(
        options: LeaderOptions,
        on_lost: impl Fn(u16) + Send + Sync + 'static,
    ) -> Result<Self, SetupError> {
        if !(1..=MAX_RANKS).contains(&options.world) {
            let message = format!("{} ranks: have 1 to {MAX_RANKS}", options.world);
            return Err(SetupError::invalid(message));
        }
        check_fingerprint(&options.fingerprint)?;
        let meeting = LeaderSocket::open(&options.dir)?;
        let deadline = clock::now() + options.limit;
        let waker = ConnectionWaker::new().map_err(|error| no_thread(&error))?;
        let state = RanksState {
            seats: (0..options.world).map(|_| None).collect(),
            refused: vec![None; usize::from(options.world)],
            agreed: None,
            pending: PendingBatches::new(options.world),
        };
        let debts = PendingDeletions::open(options.world, options.debts.as_deref())?;
        let shared = Arc::new(LeaderState {
            options,
            state: Mutex::new(state),
            joined: Condvar::new(),
            waker,
            listener: OnceLock::new(),
            is_closing: AtomicBool::new(false),
            on_lost: Box::new(on_lost),
            answers: InventoryAnswers::default(),
            debts,
            saturated: AtomicU64::new(0),
        });
        let seldom = SeldomLog::new(&shared.waker, meeting.listener.as_fd())
            .map_err(|error| no_thread(&error))?;
        let listener = RankListener {
            shared: Arc::clone(&shared),
            meeting,
            seldom: Some(seldom),
            ranks: Vec::new(),
            newcomers: Vec::new(),
        };
        let thread = ServiceThread::spawn("kvbm-ranks", move || listener.run());
        let thread = thread.map_err(|error| no_thread(&error))?;
        let mut leader = Self { shared, routes: Vec::new(), loads: AtomicU64::new(0), thread };
        leader.routes = leader.shared.wait_for_all(deadline)?;
        Ok(leader)
    }

    /// How many numbers of what ranks pulled were too large for the type that they have here, since
    /// this was last asked.
    pub fn take_saturated(&self) -> u64 {
        self.shared.saturated.swap(0, Ordering::Relaxed)
    }

    /// Where all ranks serve those of other workers; `None`: one is away, or serves none.
    pub fn seats(&self) -> Option<Vec<PeerSeat>> {
        let state = self.shared.state.lock();
        state.seats.iter().map(|seat| seat.as_ref()?.peers).collect()
    }

    /// Has all ranks bring blocks from those of another worker, each its slice. The sources of
    /// `batch` are slots there; successive copies into one slot make one block together. They end as
    /// any copy does: when each rank has ended it, or is gone.
    ///
    /// # Panics
    /// If the batch has more than [`MAX_OPS`] copies.
    pub fn pull(&self, from: &PullOrder, batch: &[CopyOp], done: Done) {
        assert!(batch.len() <= MAX_OPS, "{} copies in one batch", batch.len());
        self.shared.send(batch, done, BatchOrder::Pull(from));
    }

    fn send_in_parts(&self, batch: &[CopyOp], done: &Done, order: BatchOrder<'_>) {
        for (ops, first) in batch.chunks(MAX_OPS).zip((0..).step_by(MAX_OPS)) {
            self.shared.send(ops, done.clone().renumbered(move |op| first + op), order);
        }
    }

    /// Names a load of `blocks` blocks, whose layers ranks are to [count](crate::Layers::in_ranks)
    /// for their engines.
    pub fn name_load(&self, layers: NonZeroU16, blocks: usize) -> RankLoad {
        let number = self.loads.fetch_add(1, Ordering::Relaxed);
        RankLoad { number, layers, blocks: blocks as u32 }
    }

    /// Tells the ranks that a load has ended: `arrived` leading blocks are there in all of them,
    /// and nothing of it is under way any more.
    pub fn end_load(&self, load: RankLoad, arrived: usize) {
        // In a forked child it is the parent's, and may be under way still.
        if !self.thread.is_here() {
            return;
        }
        let ended = ToRank::LoadEnded { load, arrived: arrived as u32 };
        for (rank, connection) in self.shared.present() {
            if self.shared.send_to(&connection, &ended) == SendResult::Refused {
                tracing::error!(rank, "a rank reads nothing any more, and is told to go");
                connection.say_no_more();
            }
        }
    }

    /// Tells which ranks are there.
    pub fn roll_call(&self) -> RankRegistry {
        RankRegistry(Arc::downgrade(&self.shared))
    }
}

/// Tells which ranks of a leader are there. Keeps no leader open.
#[derive(Clone, Debug)]
pub struct RankRegistry(Weak<LeaderState>);

impl RankRegistry {
    /// By number, whether each rank is there; `None`: the leader is gone.
    pub fn present(&self) -> Option<Vec<bool>> {
        let shared = self.0.upgrade()?;
        let state = shared.state.lock();
        Some(state.seats.iter().map(Option::is_some).collect())
    }
}

/// Hellos are short.
pub(super) fn check_fingerprint(fingerprint: &str) -> Result<(), SetupError> {
    if fingerprint.len() <= MAX_FINGERPRINT {
        return Ok(());
    }
    let bytes = fingerprint.len();
    let message = format!(
        "a fingerprint of {bytes} bytes: give the ranks a digest of {MAX_FINGERPRINT} at most"
    );
    Err(SetupError::invalid(message))
}

fn no_thread(error: &io::Error) -> SetupError {
    SetupError::unavailable(format!("cannot start to listen to ranks: {error}"))
}

// SAFETY: a copy is reported when each rank has said that it ended, or when the rank is gone: its
// process has ended, or it closed the connection, which it does when it has ended its copies. The
// regions are the ranks' own.
unsafe impl Backend for Leader {
    fn name(&self) -> &'static str {
        "ranks"
    }

    fn routes(&self) -> &[Route] {
        &self.routes
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        self.submit_fenced(batch, Fences::default(), done);
    }

    fn submit_fenced(&self, batch: Vec<CopyOp>, fences: Fences, done: Done) {
        if !fences.after.is_done() {
            let after = fences.after;
            let why = format!("ranks cannot wait for {after:?}, which is another process's");
            return done.refuse(0..batch.len(), &why);
        }
        let load = fences.layers.and_then(|layers| layers.name_in_ranks());
        let order = BatchOrder::Copy { load };
        if batch.len() <= MAX_OPS {
            return self.shared.send(&batch, done, order);
        }
        self.send_in_parts(&batch, &done, order);
    }
}

/// What ranks are to do with a batch.
#[derive(Clone, Copy)]
enum BatchOrder<'a> {
    /// Of a load whose layers they count, if it is one.
    Copy { load: Option<RankLoad> },
    /// The sources are another worker's.
    Pull(&'a PullOrder),
}

impl BatchOrder<'_> {
    fn frame(self, batch: u64, ops: &[CopyOp]) -> Vec<u8> {
        let ops = PackedOps::of(ops);
        match self {
            Self::Copy { load } => frame(&ToRank::Copy { batch, load, ops }),
            Self::Pull(from) => frame(&ToRank::Pull { batch, from: from.clone(), ops }),
        }
    }
}

impl Drop for Leader {
    /// In a forked child the ranks are the parent's still, and the thread is not there.
    fn drop(&mut self) {
        if !self.thread.is_here() {
            return mem::forget(Arc::clone(&self.shared));
        }
        self.shared.is_closing.store(true, Ordering::Release);
        self.shared.waker.wake();
    }
}

/// What submitters share with the thread that listens.
pub(super) struct LeaderState {
    pub(super) options: LeaderOptions,
    state: Mutex<RanksState>,
    /// A rank came.
    joined: Condvar,
    waker: ConnectionWaker,
    /// The thread that listens.
    listener: OnceLock<ThreadId>,
    is_closing: AtomicBool,
    on_lost: Box<dyn Fn(u16) + Send + Sync>,
    /// What ranks say that they hold goes here.
    pub(super) answers: InventoryAnswers,
    /// Which tenants they have yet to forget.
    pub(super) debts: PendingDeletions,
    /// Numbers that were too large, of which no one has heard.
    saturated: AtomicU64,
}

impl fmt::Debug for LeaderState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("options", &self.options).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct RanksState {
    /// By rank: who it is, while it is there.
    seats: Vec<Option<RankSlot>>,
    /// By rank: why a process that claimed to be it was refused last, while it was not there.
    refused: Vec<Option<String>>,
    /// The routes that all ranks had when they were complete for the first time.
    agreed: Option<Vec<Route>>,
    pending: PendingBatches,
}

#[derive(Debug)]
struct RankSlot {
    connection: Arc<RankConnection>,
    routes: Vec<Route>,
    peers: Option<PeerSeat>,
}

impl RanksState {
    /// All ranks' connections; an error names one that is not there.
    fn all(&self) -> Result<Vec<Arc<RankConnection>>, u16> {
        let seats = (0..).zip(&self.seats);
        seats
            .map(|(rank, seat)| seat.as_ref().map(|seat| Arc::clone(&seat.connection)).ok_or(rank))
            .collect()
    }

    /// What every rank can do, once all are there.
    fn agree(&mut self) {
        if self.agreed.is_some() || self.seats.iter().any(Option::is_none) {
            return;
        }
        let mut routes: Vec<_> =
            self.seats[0].as_ref().map(|seat| seat.routes.clone()).unwrap_or_default();
        routes.retain(|route| self.seats.iter().flatten().all(|seat| seat.routes.contains(route)));
        self.agreed = Some(routes);
    }
}

impl LeaderState {
    /// All ranks' connections; an error names one that is not there.
    pub(super) fn connections(&self) -> Result<Vec<Arc<RankConnection>>, u16> {
        self.state.lock().all()
    }

    /// The ranks that are there.
    pub(super) fn present(&self) -> Vec<(u16, Arc<RankConnection>)> {
        let state = self.state.lock();
        let seats = (0..).zip(&state.seats);
        seats
            .filter_map(|(rank, seat)| Some((rank, Arc::clone(&seat.as_ref()?.connection))))
            .collect()
    }

    /// Sends what the stream of a connection does not take at once when it can.
    pub(super) fn send_to(&self, connection: &RankConnection, message: &ToRank) -> SendResult {
        let sent = connection.send(&frame(message));
        if sent == SendResult::Partly {
            self.waker.wake();
        }
        sent
    }

    fn wait_for_all(&self, deadline: Instant) -> Result<Vec<Route>, SetupError> {
        let mut state = self.state.lock();
        loop {
            if let Some(routes) = &state.agreed {
                return Ok(routes.clone());
            }
            if self.joined.wait_until(&mut state, deadline).timed_out() && state.agreed.is_none() {
                return Err(self.incomplete(&state));
            }
        }
    }

    fn incomplete(&self, state: &RanksState) -> SetupError {
        let LeaderOptions { dir, limit, world, .. } = &self.options;
        let missing = (0..*world).filter(|&rank| state.seats[usize::from(rank)].is_none());
        let named: Vec<_> = missing
            .map(|rank| match &state.refused[usize::from(rank)] {
                Some(why) => format!("{rank} (refused: {why})"),
                None => rank.to_string(),
            })
            .collect();
        let is_refusal = state.refused.iter().any(Option::is_some);
        let kind = if is_refusal { SetupErrorKind::Invalid } else { SetupErrorKind::Unavailable };
        let (named, dir) = (named.join(", "), dir.display());
        SetupError::new(
            kind,
            format!("of {world} ranks these did not come to {dir} in {limit:?}: {named}"),
        )
    }

    fn is_busy(&self) -> bool {
        !self.state.lock().pending.is_empty()
    }

    /// The ranks that have copies to end, and which of them has most; `None`: none has any.
    fn busy(&self) -> Option<(RankSet, u16)> {
        self.state.lock().pending.busy()
    }

    /// Has all ranks do a batch.
    fn send(&self, ops: &[CopyOp], done: Done, order: BatchOrder<'_>) {
        if ops.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        let connections = match state.all() {
            Ok(connections) => connections,
            Err(rank) => {
                drop(state);
                let away =
                    CopyError::new(CopyErrorKind::Unavailable, format!("rank {rank} is not there"));
                return done.report((0..ops.len()).map(|op| (op, Err(away.clone()))).collect());
            }
        };
        let is_pull = matches!(order, BatchOrder::Pull(_));
        let batch = state.pending.add(ops.len(), done, is_pull);
        drop(state);
        // Written once for all of them.
        let message = order.frame(batch, ops);
        // What the thread that listens submits, since copies ended, goes at the end of its round:
        // several batches in one message, which costs little more than one.
        let is_listener = self.listener.get() == Some(&thread::current().id());
        for (rank, connection) in (0..).zip(connections) {
            let sent =
                if is_listener { connection.put_off(&message) } else { connection.send(&message) };
            match sent {
                SendResult::Partly if !is_listener => self.waker.wake(),
                SendResult::Refused => self.overrun(rank, batch, ops.len()),
                SendResult::Entirely | SendResult::Partly => {}
            }
        }
    }

    /// A rank does not even read any more.
    fn overrun(&self, rank: u16, batch: u64, copies: usize) {
        let mut ended = EndedCopies::new(batch);
        let why = "too much waits for it";
        (0..copies as u32).for_each(|op| ended.failed(op, CopyErrorKind::Unavailable, why));
        // If the rank was lost since, that has ended the copies.
        let (report, _) = self.state.lock().pending.ended(rank, ended);
        report.into_iter().for_each(EndedReport::send);
    }

    /// What a rank reported.
    fn ended(&self, rank: u16, news: Vec<EndedCopies>) -> Result<(), UnexpectedReport> {
        let mut reports = Vec::with_capacity(news.len());
        let mut state = self.state.lock();
        let outcome = news.into_iter().try_for_each(|ended| {
            self.saturated.fetch_add(ended.saturated, Ordering::Relaxed);
            let (report, outcome) = state.pending.ended(rank, ended);
            reports.extend(report);
            outcome
        });
        drop(state);
        reports.into_iter().for_each(EndedReport::send);
        outcome
    }

    /// A rank is gone.
    fn lost(&self, rank: u16, why: &RankLoss) {
        let error =
            CopyError::new(CopyErrorKind::Unavailable, format!("rank {rank} is gone: {why}"));
        let mut state = self.state.lock();
        state.seats[usize::from(rank)] = None;
        let reports = state.pending.lost(rank, &error);
        drop(state);
        self.answers.lost(rank);
        self.debts.lost(rank);
        // First, so that nothing lands any more that the rank had confirmed.
        (self.on_lost)(rank);
        reports.into_iter().for_each(EndedReport::send);
    }

    /// Lets a rank in, or says why not.
    fn seat(
        &self,
        member: Membership,
        connection: &Arc<RankConnection>,
    ) -> Result<(), RefusalFrame> {
        let mismatch = |why| RefusalFrame { is_taken: false, why };
        self.options.check(&member).map_err(mismatch)?;
        let mut state = self.state.lock();
        let place = usize::from(member.rank);
        if let Some(holder) = &state.seats[place] {
            let pid = holder.connection.peer().pid;
            let why = format!("process {pid} is that rank: stop it first, or join as another");
            return Err(RefusalFrame { is_taken: true, why });
        }
        let lacking = |route: &&Route| !member.routes.contains(route);
        if let Some(Route { from, to }) = state.agreed.iter().flatten().find(lacking) {
            return Err(mismatch(format!("it cannot copy {from} to {to}, as it could before")));
        }
        // Before anything can send it copies.
        connection.send(&frame(&ToRank::Welcome));
        for message in self.debts.of_newcomer(member.rank) {
            connection.send(&frame(&message));
        }
        let Membership { routes, peers, .. } = member;
        state.seats[place] = Some(RankSlot { connection: Arc::clone(connection), routes, peers });
        state.refused[place] = None;
        state.agree();
        self.joined.notify_all();
        Ok(())
    }

    fn note_refusal(&self, rank: u16, why: String) {
        if let Some(noted) = self.state.lock().refused.get_mut(usize::from(rank)) {
            *noted = Some(why);
        }
    }
}

impl LeaderOptions {
    /// Whether a process is one of the ranks that are expected; an error says what is not as
    /// expected.
    fn check(&self, member: &Membership) -> Result<(), String> {
        let differs = |what: &str, its: &dyn fmt::Display, ours: &dyn fmt::Display| {
            Err(format!("its {what} is {its}, this leader's {ours}"))
        };
        if member.world != self.world {
            return differs("number of ranks", &member.world, &self.world);
        }
        if member.rank >= self.world {
            return Err(format!("there is no such rank: they are 0 to {}", self.world - 1));
        }
        if member.block_bytes != self.block_bytes {
            return differs("block_bytes", &member.block_bytes, &self.block_bytes);
        }
        let mut slots = member.slots.iter().zip(&self.slots).zip(Tier::ALL);
        if let Some(((its, ours), tier)) = slots.find(|((its, ours), _)| its != ours) {
            return differs(&format!("number of {tier} slots"), its, ours);
        }
        if member.fingerprint != self.fingerprint {
            return differs("fingerprint", &member.fingerprint, &self.fingerprint);
        }
        Ok(())
    }
}

/// Why a rank is lost.
#[derive(Debug, thiserror::Error)]
enum RankLoss {
    #[error(transparent)]
    Ended(#[from] ConnectionEnd),
    #[error(transparent)]
    Unexpected(#[from] UnexpectedReport),
    #[error("it said hello twice")]
    HelloTwice,
    #[error("it told what it holds, and was not asked")]
    Unasked,
}

impl From<MalformedFrame> for RankLoss {
    fn from(error: MalformedFrame) -> Self {
        Self::Ended(ConnectionEnd::Malformed(error))
    }
}

/// The thread that listens to new connections and to ranks that have joined. It alone lets ranks in
/// and declares them lost, so that these come in an order.
struct RankListener {
    shared: Arc<LeaderState>,
    meeting: LeaderSocket,
    /// All that is not a rank's report; `None`: the kernel does not take all of it.
    seldom: Option<SeldomLog>,
    ranks: Vec<JoinedRank>,
    newcomers: Vec<NewConnection>,
}

struct JoinedRank {
    rank: u16,
    connection: Arc<RankConnection>,
    inbox: FrameInbox,
    /// What it did wrong. It was told to go, and is lost when it has ended its copies and went.
    fault: Option<RankLoss>,
}

/// A connection that has yet to say who it is.
struct NewConnection {
    connection: Arc<RankConnection>,
    inbox: FrameInbox,
    deadline: Instant,
}

impl RankListener {
    fn run(mut self) {
        self.shared.listener.get_or_init(|| thread::current().id());
        while !self.shared.is_closing.load(Ordering::Acquire) {
            self.round(None);
        }
        let goodbye = frame(&ToRank::Goodbye);
        for joined in &self.ranks {
            joined.connection.send(&goodbye);
        }
        self.meeting.close();
        // A rank that was given copies reports them first.
        let deadline = clock::now() + FAREWELL_LIMIT;
        while self.shared.is_busy() && clock::now() < deadline {
            self.round(Some(FAREWELL_LIMIT));
        }
    }

    fn round(&mut self, limit: Option<Duration>) {
        let WaitResult { is_woken, is_called, ranks, newcomers } = self.wait(limit);
        if is_woken {
            self.shared.waker.rearm();
        }
        self.hear_ranks(&ranks);
        self.hear_newcomers(&newcomers);
        if is_called {
            self.accept();
        }
        for joined in &self.ranks {
            joined.connection.flush();
        }
    }

    /// Waits until there is something to do.
    ///
    /// A copy ends when the last rank has ended it. So while copies are under way this waits for
    /// the rank that has most to say, and then listens to all that have anything: to wake up for
    /// each of them would cost more than all the rest. That a rank is gone is noticed in any case.
    fn wait(&self, limit: Option<Duration>) -> WaitResult {
        let Some((busy, busiest)) = self.shared.busy() else { return self.look(None, limit) };
        match self.wait_for_words(busiest, limit) {
            Some(true) => self.words_of(busy),
            Some(false) => self.look(Some(busiest), Some(Duration::ZERO)),
            None => self.look(Some(busiest), limit),
        }
    }

    /// Waits for a report of this rank, or for a rare event; true: only the former came. `None`:
    /// there is more to wait for.
    fn wait_for_words(&self, rank: u16, limit: Option<Duration>) -> Option<bool> {
        let is_flushed = self.ranks.iter().all(|joined| joined.connection.is_flushed());
        let seldom = self.seldom.as_ref().filter(|_| is_flushed && self.newcomers.is_empty())?;
        let joined = self.ranks.iter().find(|joined| joined.rank == rank)?;
        let mut fds = [PollFd::new(seldom, PollFlags::IN), joined.connection.watch_words()];
        wait(&mut fds, limit);
        Some(fds[0].revents().is_empty() && fds[1].revents() == PollFlags::IN)
    }

    /// Reports of these ranks, perhaps.
    fn words_of(&self, ranks: RankSet) -> WaitResult {
        let ready = |joined: &JoinedRank| ConnectionReady {
            is_readable: ranks.contains(joined.rank),
            ..ConnectionReady::default()
        };
        let ranks = self.ranks.iter().map(ready).collect();
        WaitResult { is_woken: false, is_called: false, ranks, newcomers: Vec::new() }
    }

    /// Waits with everything in the list.
    fn look(&self, busiest: Option<u16>, limit: Option<Duration>) -> WaitResult {
        let mut fds = vec![
            PollFd::new(&self.shared.waker, PollFlags::IN),
            PollFd::new(&self.meeting.listener, PollFlags::IN),
        ];
        for joined in &self.ranks {
            joined.connection.watch(busiest.is_none_or(|rank| rank == joined.rank), &mut fds);
        }
        self.newcomers.iter().for_each(|newcomer| newcomer.connection.watch(true, &mut fds));
        let deadline = self.newcomers.iter().map(|newcomer| newcomer.deadline).min();
        let until = deadline.map(|deadline| deadline.saturating_duration_since(clock::now()));
        wait(&mut fds, limit.into_iter().chain(until).min());
        let mut ready = fds[2..].chunks(2).map(ConnectionReady::of);
        let mut ranks: Vec<_> = ready.by_ref().take(self.ranks.len()).collect();
        let has_spoken = ranks.iter().any(|ready| ready.is_readable);
        ranks.iter_mut().for_each(|ready| ready.is_readable |= has_spoken);
        WaitResult {
            is_woken: !fds[0].revents().is_empty(),
            is_called: !fds[1].revents().is_empty(),
            ranks,
            newcomers: ready.collect(),
        }
    }

    fn hear_ranks(&mut self, ready: &[ConnectionReady]) {
        let mut ready = ready.iter();
        let Self { shared, seldom, ranks, .. } = self;
        ranks.retain_mut(|joined| {
            let ready = ready.next().expect("as many as were waited for");
            let outcome = joined.hear(*ready, shared);
            let is_there = outcome.is_ok();
            if let Err(why) = outcome {
                seldom.iter().for_each(|seldom| seldom.forget(&joined.connection));
                joined.lose(&why, shared);
            }
            is_there
        });
    }

    fn hear_newcomers(&mut self, ready: &[ConnectionReady]) {
        let now = clock::now();
        for (place, ready) in ready.iter().enumerate().rev() {
            let outcome = self.newcomers[place].hear(*ready, now);
            match outcome {
                Ok(None) => {}
                Ok(Some(greeting)) => {
                    let newcomer = self.newcomers.swap_remove(place);
                    self.greet(newcomer, greeting);
                }
                Err(why) => {
                    let newcomer = self.newcomers.swap_remove(place);
                    tracing::warn!(pid = newcomer.connection.peer().pid, %why, "somebody left without a hello");
                }
            }
        }
    }

    fn greet(&mut self, newcomer: NewConnection, greeting: Result<Membership, String>) {
        // It may be a rank that was started anew, and the end of the old one not heard of yet.
        let WaitResult { ranks, .. } = self.wait(Some(Duration::ZERO));
        self.hear_ranks(&ranks);
        let NewConnection { connection, mut inbox, .. } = newcomer;
        let pid = connection.peer().pid;
        let seated = greeting
            .map_err(|why| (None, RefusalFrame { is_taken: false, why }))
            .and_then(|member| {
                let rank = member.rank;
                self.shared
                    .seat(member, &connection)
                    .map_err(|refusal| (Some(rank), refusal))
                    .map(|()| rank)
            });
        match seated {
            Ok(rank) => {
                inbox.set_limit(MAX_MESSAGE);
                tracing::info!(rank, pid, "a rank joined");
                let mut joined = JoinedRank { rank, connection, inbox, fault: None };
                // A rank that says more than hello before the answer is still heard.
                joined.hear_messages(&self.shared);
                self.seat(joined);
            }
            Err((rank, refusal)) => {
                connection.send(&frame(&ToRank::Refused(refusal.clone())));
                tracing::error!(rank, pid, why = refusal.why, "a rank is refused");
                let why = format!("process {pid}: {}", refusal.why);
                rank.into_iter().for_each(|rank| self.shared.note_refusal(rank, why.clone()));
            }
        }
    }

    fn seat(&mut self, joined: JoinedRank) {
        if let Some(Err(error)) =
            self.seldom.as_ref().map(|seldom| seldom.watch(&joined.connection))
        {
            tracing::warn!(%error, "waiting for ranks costs more than it need to");
            self.seldom = None;
        }
        self.ranks.push(joined);
    }

    fn accept(&mut self) {
        let connection = match self.meeting.listener.accept() {
            Ok((stream, _)) => RankConnection::new(stream),
            Err(error) => Err(error),
        };
        match connection {
            // A process that finds too many before it sees its connection closed, and tries again.
            Ok(connection) if self.newcomers.len() < MAX_NEWCOMERS => {
                self.newcomers.push(NewConnection {
                    connection: Arc::new(connection),
                    inbox: FrameInbox::new(MAX_GREETING),
                    deadline: clock::now() + GREETING_LIMIT,
                });
            }
            Ok(_) => tracing::warn!("too many connect at once: one is sent away"),
            Err(error) => {
                tracing::warn!(%error, "somebody who connected is not let in");
                // Where file descriptors are short the connection still waits to be accepted: do
                // not spend all time on it.
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// What a wait found out.
struct WaitResult {
    is_woken: bool,
    is_called: bool,
    ranks: Vec<ConnectionReady>,
    newcomers: Vec<ConnectionReady>,
}

impl JoinedRank {
    /// An error: it is gone.
    fn hear(&mut self, ready: ConnectionReady, shared: &LeaderState) -> Result<(), RankLoss> {
        if ready.is_dead {
            return Err(ConnectionEnd::Died.into());
        }
        if ready.is_readable {
            self.inbox
                .read(&self.connection)
                .map_err(|end| self.fault.take().unwrap_or(end.into()))?;
            self.hear_messages(shared);
        }
        Ok(())
    }

    fn hear_messages(&mut self, shared: &LeaderState) {
        match &self.fault {
            None => self.take_messages(shared).unwrap_or_else(|fault| self.dismiss(fault)),
            Some(_) => self.inbox.clear(),
        }
    }

    fn take_messages(&mut self, shared: &LeaderState) -> Result<(), RankLoss> {
        let mut news = Vec::new();
        while let Some(message) = self.inbox.next()? {
            match decode(message)? {
                ToLeader::Ended(ended) => news.push(ended),
                ToLeader::Inventory(inventory) => self.take_inventory(inventory, shared)?,
                ToLeader::Forgot(forgot) => shared.debts.answered(self.rank, forgot),
                ToLeader::Hello(_) => return Err(RankLoss::HelloTwice),
            }
        }
        if !news.is_empty() {
            shared.ended(self.rank, news)?;
        }
        Ok(())
    }

    fn take_inventory(
        &self,
        inventory: InventoryPage,
        shared: &LeaderState,
    ) -> Result<(), RankLoss> {
        let is_wanted = shared.answers.told(self.rank, inventory);
        if is_wanted { Ok(()) } else { Err(RankLoss::Unasked) }
    }

    /// It cannot be understood, but it may still be copying.
    fn dismiss(&mut self, fault: RankLoss) {
        tracing::error!(rank = self.rank, %fault, "a rank does not keep to the protocol, and is told to go");
        self.connection.say_no_more();
        self.fault = Some(fault);
    }

    fn lose(&self, why: &RankLoss, shared: &LeaderState) {
        let pid = self.connection.peer().pid;
        tracing::error!(rank = self.rank, pid, %why, "a rank is gone, and with it what it held of every block");
        shared.lost(self.rank, why);
    }
}

impl NewConnection {
    /// What it said, if it has said something.
    fn hear(
        &mut self,
        ready: ConnectionReady,
        now: Instant,
    ) -> Result<Option<Result<Membership, String>>, ConnectionEnd> {
        if ready.is_readable {
            self.inbox.read(&self.connection)?;
            if let Some(message) = self.inbox.next()? {
                return Ok(Some(HelloFrame::parse(message)));
            }
        }
        if now < self.deadline { Ok(None) } else { Err(ConnectionEnd::Closed) }
    }
}
