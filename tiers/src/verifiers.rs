//! Threads that read blocks to sum them, or to encrypt them.

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, select_biased, unbounded};
use parking_lot::Mutex;

use crate::clock;
use crate::copy::{Completion, CopyError, CopyOp, Done};
use crate::error::{SetupError, SetupErrorKind};
use crate::fork::ProcessBound;

/// A few threads that work off jobs. What has arrived is verified before what is about to leave is
/// summed: an engine waits for the one, nothing for the other. The threads end on their own when
/// this is dropped and nothing is left; nothing waits for them, since the last to drop it may be a
/// backend's thread that they wait for.
///
/// The queues have no bound of their own: a job is at most one copy that was submitted and has not
/// ended, and of those a scheduler has a bounded number.
#[derive(Debug)]
pub(crate) struct BlockWorkers {
    /// Of arrivals, and of departures.
    queues: ProcessBound<[Sender<BlockJob>; 2]>,
}

type BlockJob = Box<dyn FnOnce() + Send>;

/// A block that is worked on.
pub(crate) trait WorkedBlock: Send + 'static {
    /// The work on it did not come to its end.
    fn fail(&mut self, error: CopyError);
}

impl WorkedBlock for Completion {
    fn fail(&mut self, error: CopyError) {
        self.1 = Err(error);
    }
}

/// A copy whose block is worked on before it is submitted.
pub(crate) struct WorkedCopy {
    /// Its number in the batch.
    pub(crate) index: usize,
    pub(crate) op: CopyOp,
    pub(crate) result: Result<(), CopyError>,
}

impl WorkedBlock for WorkedCopy {
    fn fail(&mut self, error: CopyError) {
        self.result = Err(error);
    }
}

/// Reports the copies of a batch that failed. Returns the others, and where they are reported under
/// the numbers that they had.
pub(crate) fn part_with_failed(
    batch: Vec<CopyOp>,
    done: Done,
    worked: Vec<WorkedCopy>,
) -> (Vec<CopyOp>, Done) {
    let failed = worked.into_iter().filter_map(|copy| Some((copy.index, copy.result.err()?)));
    let failed: HashMap<_, _> = failed.collect();
    if failed.is_empty() {
        return (batch, done);
    }
    let left: Vec<_> = (0..batch.len()).filter(|index| !failed.contains_key(index)).collect();
    let batch = left.iter().map(|&index| batch[index]).collect();
    done.report(failed.into_iter().map(|(index, error)| (index, Err(error))).collect());
    (batch, done.renumbered(move |index| left[index]))
}

/// What goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// An engine waits for it.
    Awaited,
    /// Nothing waits for it.
    Background,
}

/// Bytes of a batch that one thread reads at a time. Waking another thread takes the submitting one
/// 10 to 15 µs, and the other begins 10 to 40 µs later; this much is summed from memory in 12 µs
/// (measured), so less than that is not handed over.
pub(crate) const GRAIN_BYTES: usize = 128 << 10;

/// More than a ring on the fastest drives needs: each sums about 10 GB/s, what one core gets from
/// memory.
const MAX_THREADS: usize = 4;

/// Arrivals that may overtake a departure.
const MAX_ARRIVALS_IN_A_ROW: usize = 15;

impl BlockWorkers {
    /// On half the cores: the others compute, or serve the rings.
    ///
    /// # Errors
    /// `Unavailable`: no threads.
    pub(crate) fn start() -> Result<Self, SetupError> {
        Self::named("kvbm-verify", 1).map_err(|error| {
            let message = "cannot start threads for checksums: raise the limit on processes";
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })
    }

    /// The same, for other work on blocks, and with `fewest` threads at least.
    pub(crate) fn named(name: &str, fewest: usize) -> io::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self::with_threads(name, (cores / 2).clamp(fewest, MAX_THREADS))
    }

    fn with_threads(name: &str, threads: usize) -> io::Result<Self> {
        let ((arrivals, arrived), (departures, departing)) = (unbounded(), unbounded());
        for number in 0..threads {
            let (arrived, departing) = (arrived.clone(), departing.clone());
            clock::spawn(format!("{name}-{number}"), move || work(&arrived, &departing))?;
        }
        Ok(Self { queues: ProcessBound::new([arrivals, departures]) })
    }

    /// Has `work` done on all blocks, of `block_bytes` each, in parallel; then `go_on` is called
    /// with all of them, in their order, by the thread that ended last. So a batch stays whole on
    /// its way. A block on which the work panics [fails](WorkedBlock::fail), and no other.
    pub(crate) fn work_on<T: WorkedBlock>(
        self: &Arc<Self>,
        urgency: Urgency,
        block_bytes: usize,
        blocks: Vec<T>,
        work: impl Fn(&mut T) + Send + Sync + 'static,
        go_on: impl FnOnce(Vec<T>) + Send + 'static,
    ) {
        if blocks.is_empty() {
            return go_on(blocks);
        }
        let grain = (GRAIN_BYTES / block_bytes).max(1);
        let grains = blocks.len().div_ceil(grain);
        let gathered = GatheredBlocks {
            grains: (0..grains).map(|_| None).collect(),
            left: grains,
            go_on: Some(go_on),
        };
        let batch = Arc::new((work, Mutex::new(gathered)));
        let mut blocks = blocks.into_iter();
        for number in 0..grains {
            let (batch, mut some): (_, Vec<T>) =
                (Arc::clone(&batch), blocks.by_ref().take(grain).collect());
            // Held until it is done: the threads would end with it undone when the last arrival is.
            let threads = Arc::clone(self);
            self.send(
                urgency,
                Box::new(move || {
                    let (work, gathered) = &*batch;
                    some.iter_mut().for_each(|block| work_or_fail(block, work));
                    // Called with the lock free: it may come back here.
                    let last = gathered.lock().put(number, some);
                    if let Some((go_on, all)) = last {
                        go_on(all);
                    }
                    drop(threads);
                }),
            );
        }
    }

    /// Without a thread to do it, it is done here.
    fn send(&self, urgency: Urgency, job: BlockJob) {
        let [arrivals, departures] = &*self.queues;
        let queue = match urgency {
            Urgency::Awaited => arrivals,
            Urgency::Background => departures,
        };
        queue.send(job).unwrap_or_else(|unsent| (unsent.0)());
    }
}

/// The blocks of a batch that were worked on so far.
struct GatheredBlocks<T, F> {
    grains: Vec<Option<Vec<T>>>,
    left: usize,
    go_on: Option<F>,
}

impl<T, F> GatheredBlocks<T, F> {
    /// With the last grain: what to do with all blocks.
    fn put(&mut self, number: usize, grain: Vec<T>) -> Option<(F, Vec<T>)> {
        self.grains[number] = Some(grain);
        self.left -= 1;
        if self.left > 0 {
            return None;
        }
        Some((self.go_on.take()?, self.grains.drain(..).flatten().flatten().collect()))
    }
}

fn work(arrived: &Receiver<BlockJob>, departing: &Receiver<BlockJob>) {
    let mut arrivals_in_a_row = 0;
    loop {
        if arrivals_in_a_row >= MAX_ARRIVALS_IN_A_ROW {
            arrivals_in_a_row = 0;
            // Else a reader that never stops starves all flushes.
            departing.try_iter().take(1).for_each(run);
        }
        // Biased: the plain macro picks at random among those that are ready.
        let job = select_biased! {
            recv(arrived) -> job => {
                arrivals_in_a_row += 1;
                job
            }
            recv(departing) -> job => {
                arrivals_in_a_row = 0;
                job
            }
        };
        match job {
            Ok(job) => run(job),
            Err(_) => return,
        }
    }
}

/// Others of the same batch have nothing to do with a block on which the work panics.
fn work_or_fail<T: WorkedBlock>(block: &mut T, work: &impl Fn(&mut T)) {
    if catch_unwind(AssertUnwindSafe(|| work(block))).is_err() {
        let message = "the work on the block panicked: please report it";
        // It says nothing of the medium, nor of the block.
        block.fail(CopyError::refused(message));
    }
}

/// A job that panics takes its batch along, which will be overdue, and not the thread: others wait
/// behind it.
fn run(job: BlockJob) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        tracing::error!("a job on a block panicked");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use super::*;

    /// One thread, held up until the sender is dropped.
    fn held_up() -> (Arc<BlockWorkers>, mpsc::Sender<()>) {
        let verifiers = Arc::new(BlockWorkers::with_threads("test", 1).unwrap());
        let (release, released) = mpsc::channel::<()>();
        // It errs when the sender is dropped.
        let wait = move || assert!(released.recv().is_err());
        verifiers.send(Urgency::Awaited, Box::new(wait));
        (verifiers, release)
    }

    fn order_of(arrivals: usize, departures: usize) -> Vec<char> {
        let (verifiers, release) = held_up();
        let (report, reports) = mpsc::channel();
        for _ in 0..departures {
            let (report, verifiers_too) = (report.clone(), Arc::clone(&verifiers));
            let job = move || {
                report.send('d').unwrap();
                drop(verifiers_too);
            };
            verifiers.send(Urgency::Background, Box::new(job));
        }
        for _ in 0..arrivals {
            let report = report.clone();
            verifiers.send(Urgency::Awaited, Box::new(move || report.send('a').unwrap()));
        }
        drop((release, report, verifiers));
        std::iter::from_fn(|| reports.recv_timeout(Duration::from_secs(10)).ok()).collect()
    }

    #[test]
    fn a_job_that_panics_takes_no_thread_along() {
        let verifiers = BlockWorkers::with_threads("test", 1).unwrap();
        let (report, reports) = mpsc::channel();
        for number in 0..3 {
            let report = report.clone();
            let job = move || {
                assert!(number != 1, "a panic, on purpose");
                report.send(number).unwrap();
            };
            verifiers.send(Urgency::Awaited, Box::new(job));
        }
        assert_eq!([reports.recv(), reports.recv()], [Ok(0), Ok(2)]);
    }

    #[test]
    fn a_block_whose_job_panics_fails_alone() {
        let verifiers = Arc::new(BlockWorkers::with_threads("test", 2).unwrap());
        let (report, reports) = mpsc::channel();
        let blocks: Vec<Completion> = (0..5).map(|op| (op, Ok(()))).collect();
        let work = |block: &mut Completion| assert!(block.0 != 3, "a panic, on purpose");
        // Two blocks to a job.
        verifiers.work_on(Urgency::Awaited, GRAIN_BYTES / 2, blocks, work, move |ended| {
            report.send(ended).unwrap();
        });
        let ended = reports.recv_timeout(Duration::from_secs(10)).expect("the report comes");
        let failed: Vec<_> = ended.iter().filter(|end| end.1.is_err()).map(|end| end.0).collect();
        assert_eq!((ended.len(), failed), (5, vec![3]));
    }

    #[test]
    fn what_arrived_overtakes_what_leaves() {
        assert_eq!(order_of(2, 3), ['a', 'a', 'd', 'd', 'd']);
    }

    #[test]
    fn what_leaves_waits_for_a_bounded_number_of_arrivals() {
        let order = order_of(100, 2);
        assert_eq!(order.len(), 102);
        let second = order.iter().enumerate().filter(|&(_, &job)| job == 'd').nth(1).unwrap().0;
        assert!(second <= 2 * (MAX_ARRIVALS_IN_A_ROW + 1), "{order:?}");
    }
}
