//! A rank's side: it joins, does what the leader says, and reports.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, io, mem};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags};

use super::connection::{
    ConnectionEnd, ConnectionReady, ConnectionWaker, FrameInbox, RankConnection, SendResult, wait,
};
use super::forget::{DestroyKeys, RankForgetter};
use super::leader::check_fingerprint;
use super::loads::{RankLoad, RankLoads};
use super::protocol::{
    EndedCopies, ForgotTenant, HelloFrame, MAX_GREETING, MAX_MESSAGE, Membership, RefusalFrame,
    ToLeader, ToRank, decode, frame,
};
use super::pull::{PullOrder, PullSlots, PulledBlock, PulledSlot, RankSlots, SaturatedNumbers};
use super::slots::{KeptSlots, LeftBehind, SlotGenerations, SlotJournals, part};
use super::socket;
use crate::backend::{Backend, Fences};
use crate::clock;
use crate::copy::{CopyError, CopyOp, Done, Owner, Route, Tier};
use crate::dram::DramRegion;
use crate::error::{Failure, SetupError, SetupErrorKind};

/// What has ended of a batch is reported after this time at the latest, before the rest has: a
/// leader judges media by their progress. A batch that is faster is one message, which costs the
/// leader less.
const REPORT_PERIOD: Duration = Duration::from_millis(5);
/// How long a rank whose leader is gone waits for its copies.
const ENDING_LIMIT: Duration = Duration::from_secs(10);
/// Failed copies in one message; with the longest texts they are half of what one may be.
const MAX_FAILED: usize = 1_024;

/// How a rank joins.
#[derive(Debug)]
pub struct JoinOptions {
    /// Where the leader listens.
    pub dir: PathBuf,
    /// Who joins, and what it has; its routes are those of the backends.
    pub member: Membership,
    /// Its tiers whose slots outlive the process.
    pub kept: Vec<KeptSlots>,
    /// How long to wait for the leader and its answer.
    pub limit: Duration,
}

/// Why a rank's service ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LeaderGone {
    /// It died, or closed the connection without a word.
    Away,
    /// It sent something that is no message.
    Unintelligible,
}

/// A rank that a leader let in.
#[derive(Debug)]
pub struct Member {
    rank: u16,
    world: u16,
    slots: [u32; Tier::COUNT],
    backends: HashMap<Route, Arc<dyn Backend>>,
    work: Arc<MemberWork>,
    inbox: FrameInbox,
    waker: Arc<ConnectionWaker>,
    is_stopping: Arc<AtomicBool>,
    /// When parts of batches were reported last.
    reported: Instant,
    left: LeftBehind,
    forgetter: Option<RankForgetter>,
    puller: Option<RankPuller>,
}

/// A copy of a batch that a backend was given.
struct StartedCopy {
    /// In the batch.
    place: u32,
    op: CopyOp,
}

/// Brings what ranks of other workers have.
struct RankPuller {
    memory: Arc<DramRegion>,
    pull: Box<PullSlots>,
}

impl fmt::Debug for RankPuller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RankPuller")
    }
}

/// Ends a rank's service from another thread.
#[derive(Clone, Debug)]
pub struct Stopper {
    waker: Arc<ConnectionWaker>,
    is_stopping: Arc<AtomicBool>,
}

impl Stopper {
    /// The rank takes no more copies, and leaves when those that it has begun have ended.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl Member {
    /// Joins the ranks of a leader, and waits for it where there is none yet. `backends` do the
    /// copies.
    ///
    /// # Errors
    /// `Invalid`: the leader expects something else, which the message names. `InUse`: another
    /// process has this rank's number. `Unavailable`: no leader, or it does not answer.
    /// `NotWritable`: its socket is not ours to use.
    pub fn join(
        mut options: JoinOptions,
        backends: HashMap<Route, Arc<dyn Backend>>,
    ) -> Result<Self, SetupError> {
        check_fingerprint(&options.member.fingerprint)?;
        options.member.routes = backends.keys().copied().collect();
        options.member.routes.sort_unstable();
        let deadline = clock::now() + options.limit;
        let stream = socket::connect(&options.dir, deadline)?;
        let connection = RankConnection::new(stream).map_err(|error| not_ours(&options, error))?;
        let waker = ConnectionWaker::new().map_err(|error| not_ours(&options, error))?;
        let mut inbox = FrameInbox::new(MAX_GREETING);
        let Membership { rank, world, slots, .. } = options.member;
        connection.send(&frame(&ToLeader::Hello(HelloFrame::new(options.member.clone()))));
        hear_answer(&connection, &mut inbox, deadline)
            .map_err(|why| why.explain(&options, connection.peer().pid))?;
        inbox.set_limit(MAX_MESSAGE);
        let waker = Arc::new(waker);
        let (journals, left) = part(options.kept);
        let work = MemberWork {
            connection,
            waker: Arc::clone(&waker),
            batches: Mutex::default(),
            ended: Condvar::new(),
            generations: Arc::default(),
            journals,
            loads: Arc::default(),
        };
        let (work, is_stopping, reported) = (Arc::new(work), Arc::default(), clock::now());
        Ok(Self {
            rank,
            world,
            slots,
            backends,
            work,
            inbox,
            waker,
            is_stopping,
            reported,
            left,
            forgetter: None,
            puller: None,
        })
    }

    /// Has `begin` called with each tenant that is forgotten and the life that begins, by the
    /// thread that serves, before it looks at what the leader says next. What it returns destroys
    /// the keys of earlier lives, on a thread of its own since that may take its time, and says
    /// what may be left, which the leader is told.
    ///
    /// # Errors
    /// `Unavailable`: no thread.
    pub fn forgetting(
        mut self,
        begin: impl Fn(u32, u32) -> DestroyKeys + Send + Sync + 'static,
    ) -> Result<Self, SetupError> {
        let work = Arc::clone(&self.work);
        let forgetter = RankForgetter::start(Box::new(begin), move |forgot| {
            work.tell(&ToLeader::Forgot(forgot));
        });
        let forgetter = forgetter.map_err(|error| {
            let message = "cannot start a thread to forget tenants: raise the limit on processes";
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })?;
        self.forgetter = Some(forgetter);
        Ok(self)
    }

    /// What lies in this rank's host tier, for ranks of other workers.
    pub fn host_slots(&self, memory: &Arc<DramRegion>) -> RankSlots {
        RankSlots::new(Arc::clone(memory), Arc::clone(&self.work.generations))
    }

    /// Has `pull` called for what is to come from ranks of other workers into the host tier, which
    /// is `memory`, by the thread that serves.
    #[must_use]
    pub fn pulling(mut self, memory: Arc<DramRegion>, pull: Box<PullSlots>) -> Self {
        self.puller = Some(RankPuller { memory, pull });
        self
    }

    /// Loads that this rank's engine may wait for, layer by layer.
    pub fn loads(&self) -> Arc<RankLoads> {
        Arc::clone(&self.work.loads)
    }

    /// What ends [`serve`](Self::serve).
    pub fn stopper(&self) -> Stopper {
        Stopper { waker: Arc::clone(&self.waker), is_stopping: Arc::clone(&self.is_stopping) }
    }

    /// The leader's process; 0 if it is of another PID namespace.
    pub fn leader(&self) -> i32 {
        self.work.connection.peer().pid
    }

    /// Does what the leader says, until it says goodbye or [`Stopper::stop`] is called; then all
    /// copies have ended.
    ///
    /// # Errors
    /// The leader is gone. Copies that it had begun were waited for; if their media hang, the
    /// message says so.
    pub fn serve(mut self) -> Result<(), Failure<LeaderGone>> {
        // The first copies may have come with the welcome.
        let mut turn = self.take_messages();
        while let Ok(MemberTurn::Next) = turn {
            turn = self.round();
        }
        let unended = self.work.finish(clock::now() + ENDING_LIMIT);
        if unended > 0 {
            // What still waits for them keeps the connection, so that the leader does not take this
            // for their end.
            tracing::error!(rank = self.rank, unended, "batches did not end with a rank's service");
        }
        turn.map(|_| ()).map_err(|end| self.gone(end, unended))
    }

    fn round(&mut self) -> Result<MemberTurn, ConnectionEnd> {
        if self.is_stopping.load(Ordering::Acquire) {
            return Ok(MemberTurn::Last);
        }
        let (is_woken, ready) = self.wait();
        if is_woken {
            self.waker.rearm();
        }
        if ready.is_writable {
            self.work.connection.flush();
        }
        if self.reported.elapsed() >= REPORT_PERIOD {
            self.work.report_partly();
            self.reported = clock::now();
        }
        if ready.is_dead {
            return Err(ConnectionEnd::Died);
        }
        if !ready.is_readable {
            return Ok(MemberTurn::Next);
        }
        self.inbox.read(&self.work.connection)?;
        self.take_messages()
    }

    fn wait(&self) -> (bool, ConnectionReady) {
        let mut fds = vec![PollFd::new(&*self.waker, PollFlags::IN)];
        self.work.connection.watch(true, &mut fds);
        wait(&mut fds, self.work.is_busy().then_some(REPORT_PERIOD));
        (!fds[0].revents().is_empty(), ConnectionReady::of(&fds[1..]))
    }

    fn take_messages(&mut self) -> Result<MemberTurn, ConnectionEnd> {
        loop {
            let Some(message) = self.inbox.next()? else { return Ok(MemberTurn::Next) };
            match decode(message)? {
                ToRank::Copy { batch, load, ops } => {
                    let ops = ops.unpack()?;
                    self.left.close();
                    self.copy(batch, load, &ops);
                }
                ToRank::Pull { batch, from, ops } => {
                    let ops = ops.unpack()?;
                    self.left.close();
                    self.pull(batch, &from, &ops);
                }
                ToRank::TakeInventory { tier, from } => {
                    self.work.tell(&ToLeader::Inventory(self.left.page(tier, from)));
                }
                ToRank::Adopt { tier, lives } => {
                    let ours = lives.unpack(tier)?.filter(|&slot| self.left.has(slot));
                    ours.for_each(|slot| self.work.generations.adopt(slot));
                }
                ToRank::Forget { tenant, life } => self.forget(tenant, life),
                ToRank::LoadEnded { load, arrived } => self.work.loads.ended(load, arrived),
                ToRank::Goodbye => return Ok(MemberTurn::Last),
                // A leader that says so again is harmless.
                ToRank::Welcome | ToRank::Refused(_) => {}
            }
        }
    }

    fn forget(&self, tenant: u32, life: u32) {
        if let Some(forgetter) = &self.forgetter {
            return forgetter.forget(tenant, life);
        }
        let has_none = Err("it cannot destroy keys".to_owned());
        self.work.tell(&ToLeader::Forgot(ForgotTenant::new(Owner { tenant, life }, has_none)));
    }

    /// Starts the copies of a batch, but for those that cannot be right.
    fn copy(&self, batch: u64, load: Option<RankLoad>, ops: &[CopyOp]) {
        let Some(route) = ops.first().map(CopyOp::route) else { return };
        let backend = self.backends.get(&route);
        self.work.begin(batch, ops.len());
        let (mut started, mut refused) = (Vec::with_capacity(ops.len()), Vec::new());
        for (place, op) in (0..).zip(ops) {
            match self.check(op, route).and_then(|()| self.work.generations.begin(op)) {
                Ok(()) => {
                    self.work.journals.begun(op);
                    started.push(StartedCopy { place, op: *op });
                }
                Err(error) => refused.push((place, Err(error))),
            }
        }
        self.work.ended(batch, refused);
        let Some(backend) = backend.filter(|_| !started.is_empty()) else { return };
        let ops = started.iter().map(|copy| copy.op).collect();
        let done = self.done(batch, started);
        let layers = load.map(|load| self.work.loads.layers(load));
        let fences = Fences { layers, ..Fences::default() };
        // What became of the copies of a backend that panicked is unknown: for the leader they will
        // be overdue.
        if catch_unwind(AssertUnwindSafe(|| backend.submit_fenced(ops, fences, done))).is_err() {
            tracing::error!(from = %route.from, to = %route.to, "a backend panicked when it was given a batch");
        }
    }

    /// Where what becomes of copies is told.
    fn done(&self, batch: u64, started: Vec<StartedCopy>) -> Done {
        let work = Arc::clone(&self.work);
        Done::new(move |completions| {
            work.ended(
                batch,
                completions.into_iter().map(|(index, result)| {
                    let StartedCopy { place, op } = &started[index];
                    // The copies into a slot end together: the first speaks for all.
                    let is_first = index == 0 || started[index - 1].op.to != op.to;
                    if result.is_ok() && is_first {
                        work.generations.arrived(op);
                        work.journals.arrived(op);
                    }
                    (*place, result)
                }),
            );
        })
    }

    /// Starts to bring what a rank of another worker has.
    fn pull(&self, batch: u64, order: &PullOrder, ops: &[CopyOp]) {
        if ops.is_empty() {
            return;
        }
        let saturated = self.work.begin(batch, ops.len());
        let Some((puller, from)) = self.puller.as_ref().zip(order.of_rank(self.rank, self.world))
        else {
            let why = "it does not read at ranks of that worker";
            let refused = |(place, _)| (place, Err(CopyError::refused(why)));
            return self.work.ended(batch, (0..).zip(ops).map(refused));
        };
        let (mut started, mut slots, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        let mut places = 0..;
        for pulled in PulledBlock::of_copies(ops, order.first) {
            let (op, copies) = (pulled.op, places.by_ref().take(pulled.from.len()));
            let Some(frame) = puller.memory.frame_of_leader(op.to) else {
                let why = CopyError::refused(format!("there is no {}", op.to));
                refused.extend(copies.map(|place| (place, Err(why.clone()))));
                continue;
            };
            self.work.generations.begin_pull(&op);
            self.work.journals.begun(&op);
            slots.push((started.len(), pulled, frame));
            started.extend(copies.map(|place| StartedCopy { place, op }));
        }
        self.work.ended(batch, refused);
        let done = self.done(batch, started);
        let slot = |(place, pulled, frame)| {
            let (done, saturated) = (done.clone(), saturated.clone());
            PulledSlot::new(&puller.memory, pulled, frame, place, done, saturated)
        };
        (puller.pull)(from, slots.into_iter().map(slot).collect());
    }

    /// The leader says which slots, and it may be wrong.
    fn check(&self, op: &CopyOp, route: Route) -> Result<(), CopyError> {
        let refused = |why: String| Err(CopyError::refused(why));
        if op.route() != route || !self.backends.contains_key(&route) {
            return refused(format!("nothing copies {} to {} in one batch", op.from, op.to));
        }
        match [op.from, op.to].into_iter().find(|at| at.slot.0 >= self.slots[at.tier.index()]) {
            Some(at) => refused(format!("there is no {at}")),
            None => Ok(()),
        }
    }

    fn gone(&self, end: ConnectionEnd, unended: usize) -> Failure<LeaderGone> {
        let kind = match end {
            ConnectionEnd::Malformed(_) => LeaderGone::Unintelligible,
            _ => LeaderGone::Away,
        };
        let (rank, pid) = (self.rank, self.leader());
        let left =
            if unended > 0 { format!("; {unended} batches did not end") } else { String::new() };
        Failure::caused(
            kind,
            format!("rank {rank} lost its leader (process {pid}): {end}{left}"),
            end,
        )
    }
}

/// What comes after a round.
enum MemberTurn {
    Next,
    Last,
}

/// What is under way, shared with the backends' completions.
#[derive(Debug)]
struct MemberWork {
    connection: RankConnection,
    waker: Arc<ConnectionWaker>,
    batches: Mutex<HashMap<u64, MemberBatch>>,
    /// A batch ended.
    ended: Condvar,
    generations: Arc<SlotGenerations>,
    journals: SlotJournals,
    loads: Arc<RankLoads>,
}

/// The service has ended, and all copies have, since a copy under way keeps this.
impl Drop for MemberWork {
    fn drop(&mut self) {
        self.loads.close();
    }
}

#[derive(Debug)]
struct MemberBatch {
    /// Copies that have not ended.
    left: usize,
    /// Those that have, and were not reported yet.
    report: EndedCopies,
    saturated: SaturatedNumbers,
}

impl MemberWork {
    fn is_busy(&self) -> bool {
        !self.batches.lock().is_empty()
    }

    fn begin(&self, batch: u64, copies: usize) -> SaturatedNumbers {
        let (report, saturated) = (EndedCopies::new(batch), SaturatedNumbers::default());
        let begun = MemberBatch { left: copies, report, saturated: saturated.clone() };
        self.batches.lock().insert(batch, begun);
        saturated
    }

    /// Copies of a batch ended.
    fn ended(&self, number: u64, ended: impl IntoIterator<Item = (u32, Result<(), CopyError>)>) {
        let mut reports = Vec::new();
        let mut batches = self.batches.lock();
        let Some(batch) = batches.get_mut(&number) else { return };
        for (op, result) in ended {
            batch.left -= 1;
            match result {
                Ok(()) => batch.report.arrived(op),
                Err(error) => batch.report.failed(op, error.kind(), &error.to_string()),
            }
            if batch.report.failed.len() == MAX_FAILED {
                reports.push(batch.take_report(number));
            }
        }
        if batch.left == 0 {
            reports.push(batch.take_report(number));
            batches.remove(&number);
        }
        drop(batches);
        reports.into_iter().for_each(|report| self.send(report));
        self.ended.notify_all();
    }

    /// Reports what has ended of batches that have not.
    fn report_partly(&self) {
        let mut batches = self.batches.lock();
        let with_news = batches.iter_mut().filter(|(_, batch)| batch.report.is_news());
        let reports: Vec<_> = with_news.map(|(&number, batch)| batch.take_report(number)).collect();
        drop(batches);
        reports.into_iter().for_each(|report| self.send(report));
    }

    fn send(&self, report: EndedCopies) {
        self.tell(&ToLeader::Ended(report));
    }

    fn tell(&self, message: &ToLeader) {
        match self.connection.send(&frame(message)) {
            SendResult::Entirely => {}
            SendResult::Partly => self.waker.wake(),
            SendResult::Refused => tracing::error!("a leader that reads nothing misses a report"),
        }
    }

    /// Waits until nothing is under way. Returns how many batches are then.
    fn finish(&self, deadline: Instant) -> usize {
        let mut batches = self.batches.lock();
        while !batches.is_empty() && !self.ended.wait_until(&mut batches, deadline).timed_out() {}
        batches.len()
    }
}

impl MemberBatch {
    fn take_report(&mut self, number: u64) -> EndedCopies {
        self.report.saturated = self.saturated.take();
        mem::replace(&mut self.report, EndedCopies::new(number))
    }
}

/// Why a process did not become a member.
enum NoAnswer {
    Refused(RefusalFrame),
    Gone(ConnectionEnd),
    Late,
}

impl<E: Into<ConnectionEnd>> From<E> for NoAnswer {
    fn from(end: E) -> Self {
        Self::Gone(end.into())
    }
}

/// The leader's first message.
fn hear_answer(
    connection: &RankConnection,
    inbox: &mut FrameInbox,
    deadline: Instant,
) -> Result<(), NoAnswer> {
    loop {
        if let Some(message) = inbox.next()? {
            match decode(message)? {
                ToRank::Welcome => return Ok(()),
                ToRank::Refused(refusal) => return Err(NoAnswer::Refused(refusal)),
                ToRank::Copy { .. }
                | ToRank::Pull { .. }
                | ToRank::TakeInventory { .. }
                | ToRank::Adopt { .. }
                | ToRank::Forget { .. }
                | ToRank::LoadEnded { .. }
                | ToRank::Goodbye => return Err(NoAnswer::Gone(ConnectionEnd::Closed)),
            }
        }
        let left = deadline.saturating_duration_since(clock::now());
        if left.is_zero() {
            return Err(NoAnswer::Late);
        }
        let mut fds = Vec::new();
        connection.watch(true, &mut fds);
        wait(&mut fds, Some(left));
        let ready = ConnectionReady::of(&fds);
        if ready.is_writable {
            connection.flush();
        }
        if ready.is_readable {
            inbox.read(connection)?;
        }
    }
}

impl NoAnswer {
    fn explain(self, options: &JoinOptions, leader: i32) -> SetupError {
        let Membership { rank, world, .. } = options.member;
        let who = format!("rank {rank} of {world}");
        match self {
            Self::Refused(RefusalFrame { is_taken, why }) => {
                let kind = if is_taken { SetupErrorKind::InUse } else { SetupErrorKind::Invalid };
                SetupError::new(kind, format!("the leader (process {leader}) refuses {who}: {why}"))
            }
            Self::Gone(end) => {
                let message = format!("the leader (process {leader}) did not let {who} in: {end}");
                SetupError::caused(SetupErrorKind::Unavailable, message, end)
            }
            Self::Late => {
                let limit = options.limit;
                let message =
                    format!("the leader (process {leader}) did not answer {who} in {limit:?}");
                SetupError::unavailable(message)
            }
        }
    }
}

fn not_ours(options: &JoinOptions, error: io::Error) -> SetupError {
    let message = format!("cannot join the ranks in {}: {error}", options.dir.display());
    SetupError::caused(SetupErrorKind::NotWritable, message, error)
}
