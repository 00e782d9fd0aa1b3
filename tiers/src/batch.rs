//! Threads that work off batches of copies together.

use std::collections::HashMap;
use std::num::NonZeroU16;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fmt, io};

use crossbeam_channel::Sender;
use parking_lot::Mutex;

use crate::backend::Layers;
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done};
use crate::fork::{ProcessBound, ServiceThread};

/// A pool of threads in which every thread takes the next few operations of the oldest batch until
/// none is left: a large batch occupies all threads, and a slow operation holds up no other.
/// Batches of one load in layers go together.
#[derive(Debug)]
pub(crate) struct CopyThreads {
    // Before the threads, which finish what was submitted.
    queue: ProcessBound<Sender<Arc<ThreadBatch>>>,
    layered: Arc<LayeredBatches>,
    threads: Vec<ServiceThread>,
    grains: Grains,
}

/// How many operations go together, of one batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grains {
    /// What a thread takes at a time.
    pub(crate) taken: usize,
    /// What a thread reports at a time, or all that it has taken if it finds no more.
    pub(crate) reported: usize,
}

/// Executes one operation, or a share of it, to its end.
pub(crate) type ExecuteFn = dyn Fn(&CopyOp, Share) -> Result<(), CopyError> + Send + Sync;

/// One of several equal shares of a block's bytes: a layer, or all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    number: u16,
    of: NonZeroU16,
}

impl Share {
    pub(crate) const WHOLE: Self = Self { number: 0, of: NonZeroU16::MIN };

    pub(crate) const fn layer(number: u16, of: NonZeroU16) -> Self {
        Self { number, of }
    }

    pub(crate) const fn is_whole(self) -> bool {
        self.of.get() == 1
    }

    /// The last share has what cannot be divided.
    pub(crate) fn of_bytes(self, bytes: usize) -> Range<usize> {
        let share = bytes / usize::from(self.of.get());
        let from = share * usize::from(self.number);
        from..if self.number + 1 == self.of.get() { bytes } else { from + share }
    }
}

struct ThreadBatch {
    ops: Vec<CopyOp>,
    done: Done,
    grains: Grains,
    next: AtomicUsize,
    layered: Option<LayeredState>,
}

impl fmt::Debug for ThreadBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("blocks", &self.ops.len()).finish_non_exhaustive()
    }
}

/// The batches that go layer by layer and have units left, oldest first. An engine waits for the
/// first layer of all blocks of a load, and much of that may be there by the time the load's next
/// batch comes.
#[derive(Debug, Default)]
struct LayeredBatches(Mutex<Vec<Arc<ThreadBatch>>>);

/// The state of a batch that goes layer by layer. What a thread takes at a time, a unit, is a layer
/// of `grain` blocks; units are numbered layer by layer.
struct LayeredState {
    layers: Layers,
    /// Units that each layer still lacks.
    of_layer: Vec<AtomicUsize>,
    /// Units that each `grain` of blocks still lacks.
    of_grain: Vec<AtomicUsize>,
    failed: Mutex<HashMap<usize, CopyError>>,
}

impl CopyThreads {
    pub(crate) fn start(
        name: &str,
        threads: usize,
        grains: Grains,
        execute: &Arc<ExecuteFn>,
    ) -> io::Result<Self> {
        let (queue, batches) = crossbeam_channel::unbounded();
        let layered = Arc::<LayeredBatches>::default();
        let grains = Grains { taken: grains.taken.max(1), ..grains };
        let mut pool =
            Self { queue: ProcessBound::new(queue), layered, threads: Vec::new(), grains };
        for number in 0..threads.max(1) {
            let (batches, execute) = (batches.clone(), Arc::clone(execute));
            let layered = Arc::clone(&pool.layered);
            let work = move || batches.iter().for_each(|batch| layered.work(&batch, &*execute));
            pool.threads.push(ServiceThread::spawn(format!("{name}-{number}"), work)?);
        }
        Ok(pool)
    }

    /// Copies whole blocks, one after the other, or `layers` of them.
    pub(crate) fn submit(&self, ops: Vec<CopyOp>, layers: Option<Layers>, done: Done) {
        let batch = Arc::new(ThreadBatch::new(ops, layers, self.grains, done));
        self.layered.add(&batch);
        for _ in 0..batch.units().min(self.threads.len()) {
            // One message per helper and not per operation: each takes a grain of what is left when
            // it comes, so that a slow one holds up no other.
            if self.queue.send(Arc::clone(&batch)).is_err() {
                // Panics end no thread, but if all threads were gone nothing else would complete
                // the rest.
                let dead = |_: &CopyOp, _| Err(CopyError::refused("copy threads died"));
                self.layered.work(&batch, &dead);
            }
        }
    }
}

impl LayeredBatches {
    fn add(&self, batch: &Arc<ThreadBatch>) {
        if batch.layered.is_some() && batch.units() > 0 {
            self.0.lock().push(Arc::clone(batch));
        }
    }

    /// Works on a batch, and on others of its load, until none has anything left to take.
    fn work(&self, batch: &ThreadBatch, execute: &ExecuteFn) {
        match &batch.layered {
            Some(layered) => {
                while let Some((batch, unit)) = self.next_unit(&layered.layers) {
                    batch.copy_layer(unit, execute);
                }
            }
            None => batch.copy_blocks(execute),
        }
    }

    /// Of a load: of the batch that is farthest behind.
    fn next_unit(&self, load: &Layers) -> Option<(Arc<ThreadBatch>, usize)> {
        let mut batches = self.0.lock();
        let of_load = batches.iter().enumerate().filter(|(_, batch)| batch.is_of_load(load));
        let (place, _) = of_load.min_by_key(|(_, batch)| batch.next_layer())?;
        let unit = batches[place].next_unit()?;
        let is_last = unit + 1 == batches[place].units();
        let batch = if is_last { batches.remove(place) } else { Arc::clone(&batches[place]) };
        Some((batch, unit))
    }
}

impl ThreadBatch {
    fn new(ops: Vec<CopyOp>, layers: Option<Layers>, grains: Grains, done: Done) -> Self {
        // A layer of a block is less work than the block.
        let taken = grains.taken * layers.as_ref().map_or(1, |layers| usize::from(layers.count()));
        let count = ops.len().div_ceil(taken);
        let layered = layers.map(|layers| LayeredState::new(layers, count));
        Self { ops, done, grains: Grains { taken, ..grains }, next: AtomicUsize::new(0), layered }
    }

    fn grains(&self) -> usize {
        self.ops.len().div_ceil(self.grains.taken)
    }

    /// What there is to take.
    fn units(&self) -> usize {
        let layers = self.layered.as_ref().map_or(1, |layered| layered.of_layer.len());
        self.grains() * layers
    }

    /// The next one that is not taken yet.
    fn next_unit(&self) -> Option<usize> {
        let unit = self.next.fetch_add(1, Ordering::Relaxed);
        (unit < self.units()).then_some(unit)
    }

    /// The layer that is taken next; it must have blocks.
    fn next_layer(&self) -> usize {
        self.next.load(Ordering::Relaxed) / self.grains()
    }

    fn is_of_load(&self, load: &Layers) -> bool {
        self.layered.as_ref().is_some_and(|layered| layered.layers.are_of_load(load))
    }

    fn ops_of(&self, grain: usize) -> impl Iterator<Item = (usize, &CopyOp)> {
        let first = grain * self.grains.taken;
        (first..).zip(self.ops[first..].iter().take(self.grains.taken))
    }

    /// Copies whole blocks until none is left to take.
    fn copy_blocks(&self, execute: &ExecuteFn) {
        let mut ended = Vec::new();
        let most = self.grains.reported.min(self.ops.len());
        while let Some(grain) = self.next_unit() {
            ended.reserve(most - ended.len());
            let copy = |(index, op)| (index, caught(op, Share::WHOLE, execute));
            ended.extend(self.ops_of(grain).map(copy));
            if ended.len() >= self.grains.reported {
                self.done.report(std::mem::take(&mut ended));
            }
        }
        self.done.report(ended);
    }

    fn copy_layer(&self, unit: usize, execute: &ExecuteFn) {
        let Some(layered) = &self.layered else { return };
        let (layer, grain) = (unit / self.grains(), unit % self.grains());
        let share = Share { number: layer as u16, of: layered.layers.shares() };
        for (index, op) in self.ops_of(grain) {
            if let Err(error) = caught(op, share, execute) {
                layered.failed.lock().entry(index).or_insert(error);
            }
        }
        layered.layer_copied(layer, self.ops.len());
        if layered.of_grain[grain].fetch_sub(1, Ordering::AcqRel) == 1 {
            let outcome = |index| layered.failed.lock().get(&index).cloned().map_or(Ok(()), Err);
            self.done
                .report(self.ops_of(grain).map(|(index, _)| (index, outcome(index))).collect());
        }
    }
}

impl LayeredState {
    fn new(layers: Layers, grains: usize) -> Self {
        let count = usize::from(layers.count());
        let counts = |of: usize, each: usize| (0..of).map(|_| AtomicUsize::new(each)).collect();
        let (of_layer, of_grain) = (counts(count, grains), counts(grains, count));
        Self { layers, of_layer, of_grain, failed: Mutex::default() }
    }

    /// A unit of a layer is done. Once a block has failed no layer is whole any more.
    fn layer_copied(&self, layer: usize, blocks: usize) {
        let is_last = self.of_layer[layer].fetch_sub(1, Ordering::AcqRel) == 1;
        if is_last && self.failed.lock().is_empty() {
            self.layers.arrived(layer as u16, blocks);
        }
    }
}

/// The batch goes on whatever one operation does.
fn caught(op: &CopyOp, share: Share, execute: &ExecuteFn) -> Result<(), CopyError> {
    catch_unwind(AssertUnwindSafe(|| execute(op, share))).unwrap_or_else(|_| {
        let message = format!("{} to {}: the copy panicked; please report this", op.from, op.to);
        Err(CopyError::new(CopyErrorKind::Io, message))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::copy::{Completion, SlotId, SlotRef, Tier};
    use crate::testing::{each, order};

    fn grains(taken: usize) -> Grains {
        Grains { taken, reported: 4 * taken }
    }

    /// Two threads that panic for the slot 1.
    fn pool() -> CopyThreads {
        let execute: Arc<ExecuteFn> = Arc::new(|op: &CopyOp, _| {
            assert!(op.from.slot != SlotId(1), "as the test wants");
            Ok(())
        });
        CopyThreads::start("test", 2, grains(2), &execute).unwrap()
    }

    fn ops() -> Vec<CopyOp> {
        let slot = |slot| SlotRef { tier: Tier::Host, slot: SlotId(slot), generation: 1 };
        (0..64).map(|n| order(n as usize, slot(n), slot(n))).collect()
    }

    #[test]
    fn a_copy_that_panics_is_an_error_and_others_continue() {
        let pool = pool();
        for _ in 0..3 {
            let (report, reports) = mpsc::channel();
            pool.submit(ops(), None, each(move |op, result| report.send((op, result)).unwrap()));
            let mut ended: Vec<_> = reports.into_iter().collect();
            ended.sort_unstable_by_key(|&(op, _)| op);
            assert_eq!(ended.len(), 64);
            for (op, result) in ended {
                let expected = if op == 1 { Err(CopyErrorKind::Io) } else { Ok(()) };
                assert_eq!(result.map_err(|error| error.kind()), expected);
            }
        }
    }

    #[test]
    fn a_panicking_report_ends_neither_the_thread_nor_the_batch() {
        let (pool, panics) = (pool(), Done::panics());
        for _ in 0..3 {
            let (report, reports) = mpsc::channel();
            let done = Done::new(move |ended: Vec<Completion>| {
                report.send(ended.len()).unwrap();
                panic!("as the test wants");
            });
            pool.submit(ops(), None, done);
            let deadline = Duration::from_secs(10);
            let reports: Vec<_> =
                std::iter::from_fn(|| reports.recv_timeout(deadline).ok()).collect();
            assert_eq!(reports.iter().sum::<usize>(), 64);
            // Each thread may find no more before it has eight.
            assert!((8..=9).contains(&reports.len()), "eight blocks are reported together");
        }
        assert!(Done::panics() >= panics + 3 * 8);
    }

    #[test]
    fn all_first_layers_come_before_any_second_one() {
        let copied = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&copied);
        let execute: Arc<ExecuteFn> = Arc::new(move |op: &CopyOp, share: Share| {
            log.lock().push((share.number, op.from.slot.0));
            Ok(())
        });
        let pool = CopyThreads::start("test", 1, grains(1), &execute).unwrap();
        let arrived = Arc::new(Mutex::new(Vec::new()));
        let (layers, so_far) = (Arc::clone(&arrived), Arc::clone(&copied));
        let layers = Layers::new(NonZeroU16::new(4).unwrap(), move |layer, _| {
            layers.lock().push((layer, so_far.lock().len()));
        });
        let (report, reports) = mpsc::channel();
        pool.submit(
            ops(),
            Some(layers),
            each(move |op, result| report.send((op, result)).unwrap()),
        );
        assert_eq!(reports.into_iter().filter(|(_, result)| result.is_ok()).count(), 64);
        let expected: Vec<_> =
            (0..4).flat_map(|layer| (0..64).map(move |slot| (layer, slot))).collect();
        assert_eq!(*copied.lock(), expected);
        assert_eq!(*arrived.lock(), [(0, 64), (1, 128), (2, 192), (3, 256)]);
    }

    #[test]
    fn a_next_batchs_first_layer_precedes_the_last_ones_rest() {
        let copied = Arc::new(Mutex::new(Vec::new()));
        let (begun, begins) = mpsc::channel();
        let (go_on, waits) = mpsc::channel::<()>();
        let (log, waits) = (Arc::clone(&copied), Mutex::new(waits));
        let execute: Arc<ExecuteFn> = Arc::new(move |op: &CopyOp, share: Share| {
            let mut log = log.lock();
            if log.len() == 1 {
                begun.send(()).unwrap();
                waits.lock().recv().unwrap();
            }
            log.push((share.number, op.from.slot.0));
            Ok(())
        });
        let pool = CopyThreads::start("test", 1, grains(1), &execute).unwrap();
        let arrived = Arc::new(Mutex::new(Vec::new()));
        let layers = Arc::clone(&arrived);
        let count = NonZeroU16::new(3).unwrap();
        let layers = Layers::new(count, move |layer, blocks| layers.lock().push((layer, blocks)));
        let (report, reports) = mpsc::channel();
        let done = each(move |op, result| report.send((op, result)).unwrap());
        let mut first = ops();
        let others = first.split_off(1);
        pool.submit(first, Some(layers.clone()), done.clone());
        begins.recv().unwrap();
        // Another load waits for its turn.
        let other = Layers::new(count, |_, _| {});
        pool.submit(others[2..3].to_vec(), Some(other), done.clone());
        pool.submit(others[..2].to_vec(), Some(layers), done);
        go_on.send(()).unwrap();
        assert_eq!(reports.into_iter().filter(|(_, result)| result.is_ok()).count(), 4);
        let ours = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)];
        assert_eq!(*copied.lock(), [&ours[..], &[(0, 3), (1, 3), (2, 3)]].concat());
        assert_eq!(*arrived.lock(), [(0, 1), (1, 1), (0, 2), (1, 2), (2, 1), (2, 2)]);
    }

    #[test]
    fn a_block_fails_alone_and_no_later_layer_is_whole() {
        let execute: Arc<ExecuteFn> = Arc::new(|op: &CopyOp, share: Share| {
            assert!((share.number, op.from.slot.0) != (2, 5), "as the test wants");
            Ok(())
        });
        let pool = CopyThreads::start("test", 2, grains(2), &execute).unwrap();
        for _ in 0..3 {
            let arrived = Arc::new(Mutex::new(Vec::new()));
            let layers = Arc::clone(&arrived);
            let layers =
                Layers::new(NonZeroU16::new(4).unwrap(), move |layer, _| layers.lock().push(layer));
            let (report, reports) = mpsc::channel();
            pool.submit(
                ops(),
                Some(layers),
                each(move |op, result| report.send((op, result)).unwrap()),
            );
            let failed: Vec<_> =
                reports.into_iter().filter(|(_, result)| result.is_err()).collect();
            assert_eq!(failed.iter().map(|&(op, _)| op).collect::<Vec<_>>(), [5]);
            assert!(!arrived.lock().contains(&2), "{arrived:?}");
        }
    }

    #[test]
    fn the_shares_of_a_block_are_all_of_it() {
        for (bytes, layers) in [(4096, 32), (100, 7), (5, 5), (3, 1)] {
            let of = NonZeroU16::new(layers).unwrap();
            let shares: Vec<_> =
                (0..layers).map(|number| Share { number, of }.of_bytes(bytes)).collect();
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!((shares[0].start, shares[shares.len() - 1].end), (0, bytes));
        }
    }
}
