//! Transfers as their callers see them: the future answer of work that has started.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::thread::Thread;
use std::time::Duration;

use kvbm_tiers::{LayerCount, clock};
use tokio::sync::oneshot;
use tokio::task::unconstrained;

use crate::api::groups::CheckpointsSaved;
use crate::api::lease::Lease;
use crate::error::{Error, Result};
use crate::table::{Reply, SharedTable, TransferEnd};
use crate::task::{TransferId, WithMedia};

/// A transfer in progress: `await` it, ask [now and then](Self::try_take) for its answer,
/// [`wait`](Self::wait) for it on a thread, or [`cancel`](Self::cancel) it. Dropping it cancels
/// nothing: the hardware finishes, and the slots come back by themselves.
#[must_use = "dropping a transfer loses the answer, not the work"]
pub struct Transfer<T> {
    state: AnswerState<T>,
    id: Option<TransferId>,
    /// Ends it early.
    cancel: Option<Box<dyn FnOnce() + Send + Sync>>,
    /// Layers of a load that arrive one by one: those of each part, with its cache group.
    layers: Vec<(u8, Arc<LayerCount>)>,
}

enum AnswerState<T> {
    UnderWay(oneshot::Receiver<T>),
    /// It has parts, and ends with the last of them.
    Joined(Pin<Box<dyn Future<Output = Result<T>> + Send + Sync>>),
    /// The answer was given, or the work was never begun: the reason, until it is asked for.
    Over(Option<Error>),
}

/// How a transfer ended.
#[derive(Debug)]
pub struct Transferred {
    /// Holds the chain; in the destination, as much of it as is there now.
    pub lease: Lease,
    /// Leading blocks of the chain that the destination holds now.
    pub blocks: usize,
    /// Blocks that this transfer copied.
    pub copied: usize,
    /// Blocks that the lease holds but that are faster to compute again: see
    /// [`Match::worth_loading`].
    ///
    /// [`Match::worth_loading`]: crate::table::Match::worth_loading
    pub recompute: usize,
    /// Blocks that are not worth their room to the destination.
    pub declined: usize,
    /// Blocks that found no room or no queue space, or whose medium is left alone for now.
    pub refused: usize,
    /// Blocks whose copy failed, and those behind them.
    pub failed: usize,
}

/// How a [`Manager::save_from`](crate::Manager::save_from) ended. All counts are in blocks.
#[derive(Debug)]
pub struct Saved {
    /// Holds as much of the chain as the tiers have now.
    pub lease: Lease,
    /// Leading blocks of the chain that the uppermost tier has now.
    pub blocks: usize,
    /// Copied by this save.
    pub copied: usize,
    /// Already there without this save: each block is copied once.
    pub duplicates: usize,
    /// Not kept, because those before them are missing: save these as well.
    pub orphans: usize,
    /// Not worth their room.
    pub declined: usize,
    /// Found no room or no queue space, or the medium is left alone for now.
    pub refused: usize,
    /// Failed, and those behind them.
    pub failed: usize,
    /// For each named cache group other than full attention; the counts above are of full
    /// attention.
    pub checkpoints: Vec<CheckpointsSaved>,
}

impl Transferred {
    pub(crate) fn new(ended: &TransferEnd, lease: Lease) -> Self {
        Self {
            blocks: lease.blocks(ended.to),
            copied: ended.copied,
            recompute: ended.recompute,
            declined: ended.declined,
            refused: ended.refused,
            failed: ended.blocks - ended.copied,
            lease,
        }
    }
}

impl Saved {
    pub(crate) fn new(ended: &TransferEnd, orphans: usize, lease: Lease) -> Self {
        Self {
            blocks: lease.blocks(ended.to),
            copied: ended.copied,
            duplicates: ended.duplicates,
            orphans,
            declined: ended.declined,
            refused: ended.refused,
            failed: ended.blocks - ended.copied,
            checkpoints: Vec::new(),
            lease,
        }
    }
}

/// How a [`Manager::load_into`](crate::Manager::load_into) ended. Counts are in blocks.
#[derive(Debug)]
pub struct Loaded {
    /// Holds the chain as before, except blocks that turned out bad.
    pub lease: Lease,
    /// Leading wanted blocks of full attention that are in the engine's slots now.
    pub arrived: usize,
    /// The wanted blocks behind them: their slots hold no usable bytes.
    pub failed: usize,
    /// Everything that was asked for is in the engine's slots, of all cache groups. Else no window
    /// and no state in them may be used: something before their position is missing.
    pub is_whole: bool,
    /// Leading blocks that may be asked for next: all, if everything came. Else lease this many
    /// blocks of the chain, or fewer, and load what that lease wants; blocks of full attention
    /// before these have arrived.
    pub usable: usize,
    /// The media that may still write the slots of failed blocks.
    pub writers: Writers,
    /// Why a peer did not give all that was wanted of it, if it did not.
    pub fault: Option<String>,
}

impl Loaded {
    /// Of the blocks at the `wanted` positions, `arrived` came.
    pub(crate) fn new(
        wanted: Range<usize>,
        arrived: usize,
        lease: Lease,
        writers: Writers,
    ) -> Self {
        let (failed, usable) = (wanted.len() - arrived, wanted.start + arrived);
        Self { lease, arrived, failed, is_whole: failed == 0, usable, writers, fault: None }
    }
}

/// Copies into an engine's slots that were given up, but that a medium may still work on: until
/// they are gone, the engine must not use the slots of failed blocks.
#[derive(Clone, Debug)]
pub struct Writers(Weak<dyn Any + Send + Sync>);

impl Writers {
    pub(crate) fn new(with_media: &WithMedia) -> Self {
        Self(Arc::downgrade(with_media))
    }

    /// Of a load that no medium works on.
    pub(crate) fn none() -> Self {
        Self::new(&(Arc::new(()) as WithMedia))
    }

    /// Whether no medium uses any of the slots any more.
    pub fn are_gone(&self) -> bool {
        self.0.strong_count() == 0
    }

    /// Waits for that, at most for `limit`. False: a medium still uses one.
    pub fn wait(&self, limit: Duration) -> bool {
        const LOOK: Duration = Duration::from_micros(200);
        // None: the deadline overflows.
        let deadline = clock::now().checked_add(limit);
        // A hanging medium is rare, and nothing tells when it goes on.
        while !self.are_gone() && deadline.is_none_or(|deadline| clock::now() < deadline) {
            std::thread::sleep(LOOK);
        }
        self.are_gone()
    }
}

impl<T> fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transfer")
    }
}

impl<T> Transfer<T> {
    pub(crate) const fn new(answer: oneshot::Receiver<T>) -> Self {
        Self { state: AnswerState::UnderWay(answer), id: None, cancel: None, layers: Vec::new() }
    }

    /// A transfer that a table ends: what the table replies to, and the caller's side of it.
    pub(crate) fn replied(
        table: &Arc<SharedTable>,
        answer: impl FnOnce(&TransferEnd, Lease) -> T + Send + 'static,
    ) -> (Reply, Self)
    where
        T: Send + 'static,
    {
        let (told, transfer) = oneshot::channel();
        let table = Arc::clone(table);
        let reply = Reply::new(move |mut ended: TransferEnd| {
            let Some(pins) = ended.pins.take() else { return };
            // If the caller dropped its side, the lease ends here.
            drop(told.send(answer(&ended, Lease::new(table, pins))));
        });
        (reply, Self::new(transfer))
    }

    /// The transfer of work that was not begun.
    pub(crate) const fn failed(error: Error) -> Self {
        Self { state: AnswerState::Over(Some(error)), id: None, cancel: None, layers: Vec::new() }
    }

    /// The transfer of work whose answer may be an error.
    pub(crate) fn answered(answer: oneshot::Receiver<Result<T>>) -> Self
    where
        T: Send + 'static,
    {
        let answer = async move { answer.await.unwrap_or_else(|_| Err(Error::closed())) };
        let state = AnswerState::Joined(Box::pin(answer));
        Self { state, id: None, cancel: None, layers: Vec::new() }
    }

    /// The transfer of work that ended at once.
    pub(crate) fn ended(answer: T) -> Self {
        let (told, transfer) = oneshot::channel();
        // The receiver is right here.
        let _ = told.send(answer);
        Self::new(transfer)
    }

    /// A transfer of several parts, with the name of the first: `answer` combines their answers, in
    /// the order of the parts.
    pub(crate) fn joined<P: Send + Sync + 'static>(
        mut parts: Vec<Transfer<P>>,
        answer: impl FnOnce(Vec<Result<P>>) -> Result<T> + Send + Sync + 'static,
    ) -> Self {
        let cancels: Vec<_> = parts.iter_mut().filter_map(|part| part.cancel.take()).collect();
        let id = parts.first().and_then(Transfer::id);
        let joined = async move {
            let mut answers = Vec::with_capacity(parts.len());
            // They all progress by themselves, whichever is waited for.
            for part in parts {
                answers.push(part.await);
            }
            answer(answers)
        };
        let state = AnswerState::Joined(Box::pin(joined));
        Self { state, id, cancel: None, layers: Vec::new() }
            .cancelled_by(move || cancels.into_iter().for_each(|cancel| cancel()))
    }

    /// [`joined`](Self::joined), of parts of cache groups.
    pub(crate) fn joined_groups<P: Send + Sync + 'static>(
        parts: Vec<(u8, Transfer<P>)>,
        answer: impl FnOnce(Vec<Result<P>>) -> Result<T> + Send + Sync + 'static,
    ) -> Self {
        let mut layers = Vec::new();
        let take = |(group, mut part): (u8, Transfer<P>)| {
            layers.extend(part.layers.drain(..).map(|(_, count)| (group, count)));
            part
        };
        let parts = parts.into_iter().map(take).collect();
        Self { layers, ..Self::joined(parts, answer) }
    }

    pub(crate) fn named(self, id: Option<TransferId>) -> Self {
        Self { id, ..self }
    }

    pub(crate) fn in_layers(self, layers: Arc<LayerCount>) -> Self {
        Self { layers: vec![(0, layers)], ..self }
    }

    /// Its name in [`Manager::completions`](crate::Manager::completions): for a save from or a load
    /// into the engine's own memory, also of all cache groups. `None` for any other transfer, a load
    /// of what a peer holds among them, and for one that was refused: its answer, an error, is
    /// there.
    pub const fn id(&self) -> Option<TransferId> {
        self.id
    }

    /// Sets what ends it early.
    pub(crate) fn cancelled_by(self, cancel: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { cancel: Some(Box::new(cancel)), ..self }
    }

    /// Ends it early: blocks that have not arrived do not come, queued copies are dropped, and the
    /// answer counts them as failed. Copies that a medium works on end by themselves.
    pub fn cancel(&mut self) {
        if let Some(cancel) = self.cancel.take() {
            cancel();
        }
    }

    /// Blocks the thread until the work has ended. An async program awaits it instead, so as not to
    /// block its runtime.
    ///
    /// # Errors
    /// The work was not begun: [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it makes no
    /// sense (a lease of another manager, slots or ranges that do not exist),
    /// [`ErrorKind::Stale`](crate::ErrorKind::Stale) if the lease is from before a reset,
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) if the manager was shut down first. A later
    /// failure is no error: the answer counts it.
    pub fn wait(mut self) -> Result<T> {
        // Only the answer ends that wait.
        self.wait_for(Duration::MAX).unwrap_or_else(|| Err(Error::closed()))
    }

    /// The answer, if it is there. It is given once; later calls get
    /// [`Closed`](crate::ErrorKind::Closed).
    ///
    /// # Errors
    /// Those of [`wait`](Self::wait).
    pub fn try_take(&mut self) -> Option<Result<T>> {
        let this = pin!(unconstrained(self));
        match this.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => None,
        }
    }

    /// [`wait`](Self::wait), for `limit` at most. `None`: it is still under way, and can be asked
    /// again.
    ///
    /// # Errors
    /// Those of [`wait`](Self::wait).
    pub fn wait_for(&mut self, limit: Duration) -> Option<Result<T>> {
        wait_for(self, limit)
    }

    /// Leading layers that have arrived in every block of the load, 0 for any other transfer. A
    /// backend that copies block by block reports none before the end. Of a hybrid model, layers of
    /// full attention.
    pub fn layers_arrived(&self) -> u16 {
        self.layers_of(0).map(LayerCount::arrived).min().unwrap_or(0)
    }

    /// Blocks the thread, for `limit` at most, until the first `layers` layers of every block are
    /// there. False: they are not there, and if the load has ended they will not come: the
    /// [answer](Self::try_take) says what arrived.
    pub fn wait_layers(&self, layers: u16, limit: Duration) -> bool {
        self.wait_group_layers(0, layers, limit)
    }

    /// [`wait_layers`](Self::wait_layers), of the layers of a cache group.
    pub fn wait_group_layers(&self, group: u8, layers: u16, limit: Duration) -> bool {
        // None: the deadline overflows.
        let deadline = clock::now().checked_add(limit);
        let left =
            || deadline.map_or(limit, |deadline| deadline.saturating_duration_since(clock::now()));
        let mut parts = self.layers_of(group).peekable();
        parts.peek().is_some() && parts.all(|part| part.wait(layers, left()) >= layers)
    }

    fn layers_of(&self, group: u8) -> impl Iterator<Item = &LayerCount> {
        self.layers.iter().filter(move |(of, _)| *of == group).map(|(_, count)| &**count)
    }
}

/// Blocks the thread until `future` is ready, for `limit` at most.
pub(crate) fn wait_for<F: Future>(future: F, limit: Duration) -> Option<F::Output> {
    // None: the deadline overflows.
    let deadline = clock::now().checked_add(limit);
    let waker = Waker::from(Arc::new(UnparkWaker(std::thread::current())));
    // On a runtime's thread too, whose budget would make a task that never yields wait.
    let mut future = pin!(unconstrained(future));
    loop {
        if let Poll::Ready(answer) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Some(answer);
        }
        let left =
            deadline.map_or(limit, |deadline| deadline.saturating_duration_since(clock::now()));
        if left.is_zero() {
            return None;
        }
        std::thread::park_timeout(left);
    }
}

/// Wakes a thread that waits.
struct UnparkWaker(Thread);

impl Wake for UnparkWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl<T> Future for Transfer<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = match &mut self.state {
            AnswerState::UnderWay(answer) => {
                ready!(Pin::new(answer).poll(context)).map_err(|_| Error::closed())
            }
            AnswerState::Joined(joined) => ready!(joined.as_mut().poll(context)),
            AnswerState::Over(error) => Err(error.take().unwrap_or_else(Error::closed)),
        };
        self.state = AnswerState::Over(None);
        Poll::Ready(answer)
    }
}
