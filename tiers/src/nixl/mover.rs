//! The thread behind a NIXL backend: it turns copy orders into requests and looks after them.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::task::Poll;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError};

use super::request::{Direction, Request};
use super::spans::{Position, Spans};
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done, Tier};
use crate::memory::{Memory, forget_checksum, no_such_slot};

use std::sync::Arc;

/// A request moves blocks of about so many bytes together: enough that its cost does not matter, few enough
/// that its first block need not wait long for its last.
const REQUEST_BYTES: usize = 1 << 20;
/// How long the thread looks for completions without pause.
const SPIN: Duration = Duration::from_micros(10);
/// The longest pause between two looks.
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// Operations submitted together.
pub(super) struct Batch {
    pub(super) ops: Vec<CopyOp>,
    pub(super) done: Done,
}

impl Batch {
    /// The thread died of a panic in a completion.
    pub(super) fn refuse(self) {
        for op in 0..self.ops.len() {
            self.done.complete(op, Err(CopyError::new(CopyErrorKind::Refused, "the NIXL thread died")));
        }
    }
}

/// Requests between a memory region and another tier.
pub(super) struct Mover {
    pub(super) memory: Arc<dyn Memory>,
    pub(super) near: Spans,
    pub(super) other: Tier,
    pub(super) far: Spans,
    /// The most blocks in flight.
    pub(super) depth: usize,
    /// What a failed transfer means for the other tier.
    pub(super) failure: CopyErrorKind,
    pub(super) waiting: VecDeque<Order>,
    pub(super) flights: Vec<Flight>,
    /// When something last began or ended.
    pub(super) stirred: Instant,
}

/// One operation, and where its ends are.
pub(super) struct Order {
    op: CopyOp,
    index: usize,
    done: Done,
    direction: Direction,
    near: Position,
    far: Position,
    /// A request with others failed.
    alone: bool,
}

/// A request in flight.
pub(super) struct Flight {
    request: Request,
    orders: Vec<Order>,
}

impl Mover {
    /// Works until the senders of batches are gone and everything they sent has ended.
    pub(super) fn serve(mut self, batches: &Receiver<Batch>) {
        // Else the kernel adds 50 µs to every nap. Without that, all is well but slower.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let mut open = true;
        while open || self.is_busy() {
            open = open && self.receive(batches);
            self.launch();
            self.land();
            if !open && self.is_busy() {
                std::thread::sleep(self.nap());
            }
        }
    }

    fn is_busy(&self) -> bool {
        !self.waiting.is_empty() || !self.flights.is_empty()
    }

    /// Takes what has been submitted; waits for it if there is nothing else to do. False: nothing will come.
    fn receive(&mut self, batches: &Receiver<Batch>) -> bool {
        let first = if self.is_busy() {
            batches.recv_timeout(self.nap())
        } else {
            batches.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        match first {
            Ok(batch) => self.accept(batch),
            Err(RecvTimeoutError::Timeout) => return true,
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        loop {
            match batches.try_recv() {
                Ok(batch) => self.accept(batch),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// A sixteenth of the time that the hardware has been at it: short transfers are noticed soon, and long
    /// ones cost few looks.
    fn nap(&self) -> Duration {
        let quiet = self.stirred.elapsed();
        if quiet < SPIN { Duration::ZERO } else { (quiet / 16).min(LONGEST_NAP) }
    }

    /// Queues a batch, its operations in the order of the other tier's slots: neighbours travel as one.
    fn accept(&mut self, Batch { ops, done }: Batch) {
        let mut orders = Vec::with_capacity(ops.len());
        for (index, op) in ops.into_iter().enumerate() {
            match self.order(op, index, &done) {
                Some(order) => orders.push(order),
                None => done.complete(index, Err(no_such_slot(op.from))),
            }
        }
        orders.sort_by_key(|order| (order.direction == Direction::Read, order.near.span, order.far));
        self.waiting.extend(orders);
    }

    /// `None`: the operation is not between slots of ours.
    fn order(&self, op: CopyOp, index: usize, done: &Done) -> Option<Order> {
        let ours = self.memory.tier();
        let (direction, near, far) = match op.route() {
            (from, to) if (from, to) == (ours, self.other) => (Direction::Write, op.from, op.to),
            (from, to) if (from, to) == (self.other, ours) => (Direction::Read, op.to, op.from),
            _ => return None,
        };
        let (near, far) = (self.near.position(near.slot)?, self.far.position(far.slot)?);
        Some(Order { op, index, done: done.clone(), direction, near, far, alone: false })
    }

    /// Starts requests, up to the depth.
    fn launch(&mut self) {
        let mut room = self.depth.saturating_sub(self.flights.iter().map(|flight| flight.orders.len()).sum());
        while room > 0 && !self.waiting.is_empty() {
            let orders = self.take_request(room);
            room -= orders.len();
            self.start(orders);
        }
    }

    /// The next operations that fit into one request, at least one.
    fn take_request(&mut self, room: usize) -> Vec<Order> {
        let most = (REQUEST_BYTES / self.memory.stride()).clamp(1, room);
        let mut orders: Vec<Order> = Vec::with_capacity(most.min(self.waiting.len()));
        while orders.len() < most
            && let Some(order) = self.waiting.pop_front()
        {
            if orders.first().is_some_and(|first| !first.goes_with(&order)) {
                self.waiting.push_front(order);
                break;
            }
            orders.push(order);
        }
        orders
    }

    fn start(&mut self, orders: Vec<Order>) {
        if orders[0].direction == Direction::Read {
            orders.iter().for_each(|order| forget_checksum(&*self.memory, order.op.to.slot));
        }
        self.stirred = Instant::now();
        let mut request = match self.request(&orders) {
            Ok(request) => request,
            Err(error) => return self.give_up(orders, &error),
        };
        // SAFETY: the submitter promises that nobody else uses the slots until the operations are completed,
        // and they are not completed after an error that leaves them in doubt.
        match unsafe { request.post() } {
            Ok(()) => self.flights.push(Flight { request, orders }),
            Err(error) => self.give_up(orders, &error),
        }
    }

    fn request(&mut self, orders: &[Order]) -> Result<Request, CopyError> {
        let refused = |error: crate::SetupError| {
            let message = error.to_string();
            CopyError::caused(CopyErrorKind::Refused, message, error)
        };
        let (near_at, far_at): (Vec<_>, Vec<_>) =
            orders.iter().map(|order| (order.near.index, order.far.index)).unzip();
        let first = &orders[0];
        let near = self.near.list(first.near.span).map_err(refused)?;
        let far = self.far.list(first.far.span).map_err(refused)?;
        Request::new(first.direction, (near, &near_at), (far, &far_at), None)
    }

    /// Reports what has ended.
    fn land(&mut self) {
        let mut flight = 0;
        while flight < self.flights.len() {
            let Poll::Ready(result) = self.flights[flight].request.poll() else {
                flight += 1;
                continue;
            };
            let Flight { orders, request } = self.flights.swap_remove(flight);
            drop(request);
            self.stirred = Instant::now();
            match result {
                Ok(()) => orders.into_iter().for_each(|order| order.end(Ok(()))),
                Err(error) => self.give_up(orders, &error),
            }
        }
    }

    /// A request failed as a whole, whichever of its blocks was to blame: the others are tried again.
    ///
    /// Operations whose slots may still be touched are never completed. The scheduler writes them off.
    fn give_up(&mut self, orders: Vec<Order>, error: &CopyError) {
        if error.kind() == CopyErrorKind::TimedOut {
            tracing::error!(%error, blocks = orders.len(), "blocks are left to their time-out");
        } else if orders.len() > 1 {
            let alone = orders.into_iter().map(|order| Order { alone: true, ..order });
            alone.for_each(|order| self.waiting.push_back(order));
        } else {
            let kind = if error.kind() == CopyErrorKind::Io { self.failure } else { error.kind() };
            let result = |order: &Order| {
                let message = format!("{} to {}: {error}", order.op.from, order.op.to);
                CopyError::caused(kind, message, error.clone())
            };
            orders.into_iter().for_each(|order| order.end_with(result));
        }
    }
}

impl Order {
    fn goes_with(&self, other: &Self) -> bool {
        !self.alone
            && !other.alone
            && self.direction == other.direction
            && (self.near.span, self.far.span) == (other.near.span, other.far.span)
    }

    fn end(self, result: Result<(), CopyError>) {
        self.done.complete(self.index, result);
    }

    fn end_with(self, error: impl Fn(&Self) -> CopyError) {
        let error = error(&self);
        self.end(Err(error));
    }
}
