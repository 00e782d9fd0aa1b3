//! Batches: the orders that the hardware is working on, and what becomes of those that never end.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvbm_tiers::Route;

use super::order::{Class, Order};
use crate::sync::{AtomicUsize, Mutex};
use crate::table::Grip;

/// Orders handed to a backend together. Each is taken out once: by its completion or by the time-out.
#[derive(Debug)]
pub(super) struct Batch {
    id: u64,
    pub(super) route: Route,
    pub(super) class: Class,
    pub(super) started: Instant,
    orders: Vec<Mutex<Place>>,
    left: AtomicUsize,
}

#[derive(Debug)]
enum Place {
    Working(Box<Order>),
    /// Timed out. Its source stays pinned until the hardware says that it is done, if it ever does.
    WrittenOff(Grip),
    Ended,
}

impl Batch {
    /// The `i`-th operation was reported. `Err`: it had timed out; its source may be released.
    pub(super) fn take(&self, i: usize) -> Result<Order, Option<Grip>> {
        match std::mem::replace(&mut *self.orders[i].lock(), Place::Ended) {
            Place::Working(order) => Ok(*order),
            Place::WrittenOff(grip) => Err(Some(grip)),
            Place::Ended => Err(None),
        }
    }

    /// Takes out what is still being worked on; `hold` pins each order's source.
    pub(super) fn write_off(&self, mut hold: impl FnMut(&Order) -> Grip) -> Vec<Order> {
        let write_off = |place: &Mutex<Place>| {
            let mut place = place.lock();
            let Place::Working(order) = &*place else { return None };
            let grip = hold(order);
            match std::mem::replace(&mut *place, Place::WrittenOff(grip)) {
                Place::Working(order) => Some(*order),
                _ => None,
            }
        };
        self.orders.iter().filter_map(write_off).collect()
    }

    /// One order was taken out and dealt with. True for the last one.
    pub(super) fn order_ended(&self) -> bool {
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

/// All batches in flight.
#[derive(Debug, Default)]
pub(super) struct Batches {
    in_flight: Mutex<Register>,
}

#[derive(Debug, Default)]
struct Register {
    batches: HashMap<u64, Arc<Batch>>,
    next: u64,
}

impl Batches {
    pub(super) fn start(&self, route: Route, class: Class, orders: Vec<Order>) -> Arc<Batch> {
        let left = AtomicUsize::new(orders.len());
        let orders = orders.into_iter().map(|order| Mutex::new(Place::Working(Box::new(order)))).collect();
        let mut register = self.in_flight.lock();
        let id = register.next;
        register.next += 1;
        let batch = Arc::new(Batch { id, route, class, started: Instant::now(), orders, left });
        register.batches.insert(id, Arc::clone(&batch));
        batch
    }

    pub(super) fn end(&self, batch: &Batch) {
        self.in_flight.lock().batches.remove(&batch.id);
    }

    /// Batches that were started longer ago than their route's limit.
    pub(super) fn overdue(&self, limit: impl Fn(Route) -> Duration) -> Vec<Arc<Batch>> {
        let register = self.in_flight.lock();
        register
            .batches
            .values()
            .filter(|batch| batch.started.elapsed() > limit(batch.route))
            .cloned()
            .collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.lock().batches.is_empty()
    }
}
