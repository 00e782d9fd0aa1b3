//! The thread behind a NIXL backend: it turns copy orders into requests and looks after them.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError};

use super::backend::{ListPosition, SlotLists};
use super::request::{Direction, ListedSegments, NixlRequest};
use crate::clock;
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done, Endings, Tier};
use crate::memory::{Memory, forget_checksum, no_such_slot};

/// A request moves blocks of about this many bytes together: enough that its cost does not matter,
/// few enough that its first block need not wait long for its last.
const REQUEST_BYTES: usize = 1 << 20;
/// How long the thread looks for completions without pause.
const SPIN: Duration = Duration::from_micros(10);
/// The longest pause between two looks.
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// Operations submitted together. Those that are not taken out of it are refused when it is
/// dropped.
pub(super) struct MoverBatch {
    ops: Vec<CopyOp>,
    done: Done,
}

impl MoverBatch {
    pub(super) const fn new(ops: Vec<CopyOp>, done: Done) -> Self {
        Self { ops, done }
    }

    /// Each with the duty to report its end.
    fn take(&mut self) -> Vec<(CopyOp, ReportDuty)> {
        let ops = std::mem::take(&mut self.ops).into_iter().enumerate();
        ops.map(|(index, op)| (op, ReportDuty { done: self.done.clone(), index, is_open: true }))
            .collect()
    }
}

impl Drop for MoverBatch {
    fn drop(&mut self) {
        self.done.refuse(0..self.ops.len(), NOT_COPIED);
    }
}

const NOT_COPIED: &str = "the NIXL thread failed, or had ended, before it copied the block";

/// The duty to report the end of an operation. If it is lost, by a panic on the way, it reports a
/// failure: no caller waits for ever, and nothing was in flight.
struct ReportDuty {
    done: Done,
    index: usize,
    is_open: bool,
}

impl ReportDuty {
    /// It is reported with what `ended` has besides.
    fn join(mut self, ended: &mut Endings, result: Result<(), CopyError>) {
        self.is_open = false;
        ended.add(&self.done, self.index, result);
    }

    /// The hardware may touch the operation's slots for ever: nothing is reported.
    fn never(mut self) {
        self.is_open = false;
    }
}

impl Drop for ReportDuty {
    fn drop(&mut self) {
        if self.is_open {
            self.done.refuse([self.index], NOT_COPIED);
        }
    }
}

/// Requests between a memory region and another tier.
pub(super) struct RequestMover {
    pub(super) memory: Arc<dyn Memory>,
    pub(super) near: SlotLists,
    pub(super) other: Tier,
    pub(super) far: SlotLists,
    /// The most blocks in flight, each way.
    pub(super) depth: usize,
    /// What a failed transfer means for the other tier.
    pub(super) failure: CopyErrorKind,
    /// What loads wait for, and what flushes do. Each way has a depth of its own: a load never
    /// waits for writes to end, however many there are, nor does either starve the other.
    pub(super) reads: VecDeque<MoverOrder>,
    pub(super) writes: VecDeque<MoverOrder>,
    pub(super) flights: Vec<RequestFlight>,
    /// When something last began or ended.
    pub(super) stirred: Instant,
}

/// One operation, and where its ends are.
pub(super) struct MoverOrder {
    op: CopyOp,
    ending: ReportDuty,
    direction: Direction,
    near: ListPosition,
    far: ListPosition,
    /// A request with others failed.
    alone: bool,
}

/// A request in flight. Its orders are reported once it has ended, and never if it is lost before.
pub(super) struct RequestFlight {
    request: NixlRequest,
    orders: Vec<MoverOrder>,
}

impl Drop for RequestFlight {
    fn drop(&mut self) {
        self.orders.drain(..).for_each(|order| order.ending.never());
    }
}

impl RequestMover {
    /// Works until the senders of batches are gone and everything they sent has ended.
    pub(super) fn serve(mut self, batches: &Receiver<MoverBatch>) {
        // Else the kernel adds 50 µs to every nap. Without that, all is well but slower.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let mut open = true;
        while open || self.is_busy() {
            self.survive(|mover| open = open && mover.receive(batches));
            self.survive(Self::launch);
            self.survive(Self::land);
            if !open && self.is_busy() {
                std::thread::sleep(self.nap());
            }
        }
    }

    /// A panic takes along the operations in hand, which end as failed. Those that wait or are in
    /// flight stay: the thread goes on, since nothing else could tell when the hardware is done
    /// with them.
    fn survive(&mut self, step: impl FnOnce(&mut Self)) {
        if catch_unwind(AssertUnwindSafe(|| step(self))).is_err() {
            tracing::error!(
                "the NIXL thread recovered from a panic; the copies that it had in hand failed"
            );
        }
    }

    fn is_busy(&self) -> bool {
        !self.reads.is_empty() || !self.writes.is_empty() || !self.flights.is_empty()
    }

    /// Takes what has been submitted; waits for it if there is nothing else to do. False: nothing
    /// will come.
    fn receive(&mut self, batches: &Receiver<MoverBatch>) -> bool {
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

    /// A sixteenth of the time that the hardware has been at it: short transfers are noticed soon,
    /// and long ones cost few looks.
    fn nap(&self) -> Duration {
        let quiet = self.stirred.elapsed();
        if quiet < SPIN { Duration::ZERO } else { (quiet / 16).min(LONGEST_NAP) }
    }

    /// Queues a batch, its operations in the order of the other tier's slots: neighbours travel as
    /// one.
    fn accept(&mut self, mut batch: MoverBatch) {
        let (mut orders, mut refused) = (Vec::new(), Endings::default());
        for (op, ending) in batch.take() {
            match self.place(op) {
                Some((direction, near, far)) => {
                    orders.push(MoverOrder { op, ending, direction, near, far, alone: false });
                }
                None => ending.join(&mut refused, Err(no_such_slot(op.from))),
            }
        }
        refused.report();
        orders.sort_by_key(|order| (order.near.span, order.far));
        orders.into_iter().for_each(|order| self.queue(order.direction).push_back(order));
    }

    const fn queue(&mut self, direction: Direction) -> &mut VecDeque<MoverOrder> {
        match direction {
            Direction::Read => &mut self.reads,
            Direction::Write => &mut self.writes,
        }
    }

    /// `None`: the operation is not between slots of ours.
    fn place(&self, op: CopyOp) -> Option<(Direction, ListPosition, ListPosition)> {
        let ours = self.memory.tier();
        let (direction, near, far) = match (op.from.tier, op.to.tier) {
            (from, to) if (from, to) == (ours, self.other) => (Direction::Write, op.from, op.to),
            (from, to) if (from, to) == (self.other, ours) => (Direction::Read, op.to, op.from),
            _ => return None,
        };
        Some((direction, self.near.position(near.slot)?, self.far.position(far.slot)?))
    }

    /// Starts requests, up to the depth each way. An engine waits for what is read, so reads go
    /// first.
    fn launch(&mut self) {
        for direction in [Direction::Read, Direction::Write] {
            let mut room = self.depth.saturating_sub(self.in_flight(direction));
            while room > 0 && !self.queue(direction).is_empty() {
                let orders = self.take_request(direction, room);
                room -= orders.len();
                self.start(orders);
            }
        }
    }

    fn in_flight(&self, direction: Direction) -> usize {
        let flights = self.flights.iter().map(|flight| &flight.orders);
        flights.filter(|orders| orders[0].direction == direction).map(Vec::len).sum()
    }

    /// The next operations that fit into one request, at least one.
    fn take_request(&mut self, direction: Direction, room: usize) -> Vec<MoverOrder> {
        let most = (REQUEST_BYTES / self.memory.stride()).clamp(1, room);
        let waiting = self.queue(direction);
        let first = waiting.front();
        let together = |order: &&MoverOrder| first.is_some_and(|first| first.goes_with(order));
        let others = waiting.iter().skip(1).take(most - 1).take_while(together).count();
        waiting.drain(..=others).collect()
    }

    fn start(&mut self, orders: Vec<MoverOrder>) {
        if orders[0].direction == Direction::Read {
            orders.iter().for_each(|order| forget_checksum(&*self.memory, order.op.to.slot));
        }
        self.stirred = clock::now();
        let mut request = match self.request(&orders) {
            Ok(request) => request,
            Err(error) => return self.give_up(orders, &error),
        };
        // SAFETY: the submitter promises that nothing else uses the slots until the operations are
        // completed, and they are not completed after an error that leaves them in doubt.
        match unsafe { request.post() } {
            Ok(()) => self.flights.push(RequestFlight { request, orders }),
            Err(error) => self.give_up(orders, &error),
        }
    }

    fn request(&mut self, orders: &[MoverOrder]) -> Result<NixlRequest, CopyError> {
        let refused = |error: crate::SetupError| {
            let message = error.to_string();
            CopyError::caused(CopyErrorKind::Refused, message, error)
        };
        let (near_at, far_at): (Vec<_>, Vec<_>) =
            orders.iter().map(|order| (order.near.index, order.far.index)).unzip();
        let first = &orders[0];
        let near = self.near.list(first.near.span).map_err(refused)?;
        let far = self.far.list(first.far.span).map_err(refused)?;
        let near = ListedSegments { list: near, indices: &near_at };
        let far = ListedSegments { list: far, indices: &far_at };
        NixlRequest::new(first.direction, near, far)
    }

    /// Reports what has ended.
    fn land(&mut self) {
        let mut landed = Endings::default();
        let mut flight = 0;
        while flight < self.flights.len() {
            let Poll::Ready(result) = self.flights[flight].request.poll() else {
                flight += 1;
                continue;
            };
            let mut ended = self.flights.swap_remove(flight);
            let orders = std::mem::take(&mut ended.orders);
            drop(ended);
            self.stirred = clock::now();
            match result {
                Ok(()) => {
                    orders.into_iter().for_each(|order| order.ending.join(&mut landed, Ok(())));
                }
                Err(error) => self.give_up(orders, &error),
            }
        }
        landed.report();
    }

    /// A request failed as a whole, whichever of its blocks was to blame: the others are tried
    /// again.
    ///
    /// Operations whose slots may still be touched are never completed. The scheduler writes them
    /// off.
    fn give_up(&mut self, orders: Vec<MoverOrder>, error: &CopyError) {
        if error.kind() == CopyErrorKind::TimedOut {
            let blocks = orders.len();
            // First of all: nothing that fails from here on may report them.
            orders.into_iter().for_each(|order| order.ending.never());
            tracing::error!(%error, blocks, "blocks are left to their time-out");
        } else if orders.len() > 1 {
            let alone = orders.into_iter().map(|order| MoverOrder { alone: true, ..order });
            alone.for_each(|order| self.queue(order.direction).push_back(order));
        } else {
            let kind = if error.kind() == CopyErrorKind::Io { self.failure } else { error.kind() };
            let mut failed = Endings::default();
            for order in orders {
                let message = format!("{} to {}: {error}", order.op.from, order.op.to);
                order
                    .ending
                    .join(&mut failed, Err(CopyError::caused(kind, message, error.clone())));
            }
            failed.report();
        }
    }
}

impl MoverOrder {
    fn goes_with(&self, other: &Self) -> bool {
        !self.alone
            && !other.alone
            && (self.near.span, self.far.span) == (other.near.span, other.far.span)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::copy::{SlotId, SlotRef};
    use crate::testing::{each, order};

    fn ops(count: usize) -> Vec<CopyOp> {
        let slot = |tier| SlotRef { tier, slot: SlotId(0), generation: 0 };
        (0..count).map(|number| order(number, slot(Tier::Host), slot(Tier::Disk))).collect()
    }

    fn reports() -> (Done, Receiver<(usize, Option<CopyErrorKind>)>) {
        let (report, reports) = channel();
        let kind = |result: Result<(), CopyError>| result.err().map(|error| error.kind());
        (each(move |index, result| report.send((index, kind(result))).unwrap()), reports)
    }

    #[test]
    fn a_batch_that_nobody_receives_is_refused() {
        let (done, reports) = reports();
        drop(MoverBatch::new(ops(2), done));
        assert_eq!(
            reports.iter().collect::<Vec<_>>(),
            [0, 1].map(|index| (index, Some(CopyErrorKind::Refused)))
        );
    }

    #[test]
    fn an_operation_lost_on_the_way_is_reported_once() {
        let (done, reports) = reports();
        let mut endings =
            MoverBatch::new(ops(3), done).take().into_iter().map(|(_, ending)| ending);
        let mut ended = Endings::default();
        endings.next().unwrap().join(&mut ended, Ok(()));
        ended.report();
        endings.next().unwrap().never();
        drop(endings);
        assert_eq!(
            reports.iter().collect::<Vec<_>>(),
            [(0, None), (2, Some(CopyErrorKind::Refused))]
        );
    }
}
