//! Loads and stores on a thread of their own: vLLM's scheduler waits for none of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvbm::{BlockHash, Fence, GroupSlots, Lease, Manager, RequestInfo, SaveRequest, Writers};
use kvbm_tiers::clock;
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

use super::requests::{EndedRequest, Run};
use crate::errors::classes;

/// After a store without what comes before it, this many stores that lack nothing end the search
/// for beginnings.
const STORES_WITH_BEGINNINGS: u64 = 64;
/// Time between looks whether a hanging medium has let go of vLLM's memory.
const LOOK: Duration = Duration::from_millis(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobDirection {
    Store,
    Load,
}

/// What is to be copied for one of vLLM's jobs.
pub(super) struct Transfer {
    pub(super) direction: JobDirection,
    pub(super) job: u64,
    pub(super) request: String,
    pub(super) info: RequestInfo,
    pub(super) runs: Vec<Run>,
    /// Holds what is loaded until that is planned.
    pub(super) pinned: Option<Lease>,
}

/// How one of vLLM's jobs ended.
pub(super) struct Finished {
    pub(super) direction: JobDirection,
    pub(super) job: u64,
    pub(super) request: String,
    pub(super) is_whole: bool,
    /// Which of its keys are done, where not all are.
    pub(super) done: Vec<usize>,
    /// Of a load: the blocks that did not come, with their places in the chain.
    pub(super) failed: Vec<(usize, BlockHash)>,
    pub(super) seconds: f64,
    pub(super) bytes: u64,
}

enum Work {
    Transfer(Box<Transfer>),
    End(EndedRequest),
}

/// The thread, and what it has done.
pub(super) struct Jobs {
    work: UnboundedSender<Work>,
    shared: Arc<Shared>,
}

struct Shared {
    chunk_bytes: u64,
    finished: Mutex<Vec<Finished>>,
    /// Whether `finished` has any: asked in every step.
    has_finished: AtomicBool,
    /// Jobs that have not ended, those that wait for the thread among them.
    under_way: Mutex<usize>,
    idle: Condvar,
    /// The thread has gone.
    is_over: AtomicBool,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    stored: AtomicU64,
    duplicates: AtomicU64,
    orphans: AtomicU64,
    declined: AtomicU64,
    refused: AtomicU64,
    failed_stores: AtomicU64,
    loaded: AtomicU64,
    failed_loads: AtomicU64,
    /// Stores that still look for beginnings.
    lacking: AtomicU64,
}

impl Jobs {
    pub(super) fn start(manager: &Arc<Manager>, chunk_bytes: u64) -> PyResult<Self> {
        let refused =
            |error| classes::UnavailableError::new_err(format!("cannot start a thread: {error}"));
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().build().map_err(refused)?;
        let (work, jobs) = unbounded_channel();
        let shared = Arc::new(Shared {
            chunk_bytes,
            finished: Mutex::default(),
            has_finished: AtomicBool::new(false),
            under_way: Mutex::new(0),
            idle: Condvar::new(),
            is_over: AtomicBool::new(false),
            counts: Counts::default(),
        });
        let (manager, own) = (Arc::clone(manager), Arc::clone(&shared));
        let serve = move || {
            runtime.block_on(serve(manager, &own, jobs));
            let _under_way = own.under_way.lock();
            own.is_over.store(true, Ordering::Release);
            own.idle.notify_all();
        };
        clock::spawn("kvbm-vllm-tier", serve).map_err(refused)?;
        Ok(Self { work, shared })
    }

    pub(super) fn begin(&self, transfer: Transfer) {
        *self.shared.under_way.lock() += 1;
        if let Err(refused) = self.work.send(Work::Transfer(Box::new(transfer)))
            && let Work::Transfer(transfer) = refused.0
        {
            self.shared.end(Finished::nothing(&transfer));
        }
    }

    /// Counts what is here of a request's chain as used by it, and says that it has ended.
    pub(super) fn end_request(&self, manager: &Manager, ended: EndedRequest) {
        let is_idle = *self.shared.under_way.lock() == 0;
        if is_idle {
            // Sooner done than told to a thread that sleeps.
            ended.tell(manager);
        } else {
            // After the request's own stores. Without the thread there is nothing left to be told.
            let _ = self.work.send(Work::End(ended));
        }
    }

    pub(super) fn take_finished(&self) -> Vec<Finished> {
        if !self.shared.has_finished.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut *self.shared.finished.lock())
    }

    /// Until all jobs have ended, for `limit` at most. Returns how many have not.
    pub(super) fn wait_until_idle(&self, limit: Duration) -> usize {
        let deadline = clock::now() + limit;
        let mut under_way = self.shared.under_way.lock();
        while *under_way > 0 {
            if self.shared.idle.wait_until(&mut under_way, deadline).timed_out() {
                break;
            }
        }
        *under_way
    }

    /// Ends the thread when its jobs have ended, for which `limit` is left. Returns how many have
    /// not.
    pub(super) fn close(self, limit: Duration) -> u64 {
        let left = self.wait_until_idle(limit);
        let Self { work, shared } = self;
        drop(work);
        let deadline = clock::now() + limit;
        let mut under_way = shared.under_way.lock();
        while !shared.is_over.load(Ordering::Acquire) {
            if shared.idle.wait_until(&mut under_way, deadline).timed_out() {
                break;
            }
        }
        left as u64
    }

    pub(super) fn lacks_beginnings(&self) -> bool {
        self.shared.counts.lacking.load(Ordering::Relaxed) > 0
    }

    pub(super) fn counts(&self) -> Vec<(&'static str, u64)> {
        let counts = &self.shared.counts;
        let named = [
            ("stored_blocks", &counts.stored),
            ("duplicate_blocks", &counts.duplicates),
            ("orphan_blocks", &counts.orphans),
            ("declined_blocks", &counts.declined),
            ("refused_blocks", &counts.refused),
            ("failed_stores", &counts.failed_stores),
            ("loaded_blocks", &counts.loaded),
            ("failed_loads", &counts.failed_loads),
        ];
        named.into_iter().map(|(name, count)| (name, count.load(Ordering::Relaxed))).collect()
    }
}

impl Shared {
    fn end(&self, finished: Finished) {
        self.finished.lock().push(finished);
        self.has_finished.store(true, Ordering::Release);
        let mut under_way = self.under_way.lock();
        *under_way -= 1;
        if *under_way == 0 {
            self.idle.notify_all();
        }
    }
}

impl Finished {
    /// Of a job that came to nothing.
    fn nothing(transfer: &Transfer) -> Self {
        let failed = transfer.runs.iter().flat_map(|run| run.blocks(0)).collect();
        Self {
            direction: transfer.direction,
            job: transfer.job,
            request: transfer.request.clone(),
            is_whole: false,
            done: Vec::new(),
            failed,
            seconds: 0.0,
            bytes: 0,
        }
    }
}

impl Run {
    /// Its blocks from the `skipped`th on, with their places.
    fn blocks(&self, skipped: usize) -> impl Iterator<Item = (usize, BlockHash)> {
        (self.first + skipped..self.end()).map(|place| (place, self.chain[place]))
    }
}

async fn serve(manager: Arc<Manager>, shared: &Arc<Shared>, mut work: UnboundedReceiver<Work>) {
    let mut jobs = JoinSet::new();
    while let Some(next) = work.recv().await {
        while jobs.try_join_next().is_some() {}
        match next {
            Work::Transfer(transfer) => {
                // Whatever becomes of the task, vLLM is told how its job ended.
                let job =
                    Job { shared: Arc::clone(shared), ended: Some(Finished::nothing(&transfer)) };
                jobs.spawn(job.run(Arc::clone(&manager), *transfer));
            }
            Work::End(ended) => {
                let manager = Arc::clone(&manager);
                // Tasks begin in the order in which they came.
                jobs.spawn(async move { ended.tell(&manager) });
            }
        }
    }
    while jobs.join_next().await.is_some() {}
}

impl EndedRequest {
    fn tell(&self, manager: &Manager) {
        // Counted when it was looked up, if vLLM did not have it all itself.
        let info =
            RequestInfo { request: Some(self.id), has_asked: true, ..RequestInfo::default() };
        drop(manager.lease_for(info, &*self.chain));
        manager.finished(self.id, self.output);
    }
}

struct Job {
    shared: Arc<Shared>,
    /// Told when it is dropped.
    ended: Option<Finished>,
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(ended) = self.ended.take() {
            self.shared.end(ended);
        }
    }
}

impl Job {
    async fn run(mut self, manager: Arc<Manager>, mut transfer: Transfer) {
        let began = clock::now();
        let outcome = match transfer.direction {
            JobDirection::Store => store(&manager, &transfer, &self.shared.counts).await,
            JobDirection::Load => load(&manager, &mut transfer, &self.shared.counts).await,
        };
        if let Some(ended) = &mut self.ended {
            ended.take(outcome, began, self.shared.chunk_bytes);
        }
    }
}

struct Outcome {
    is_whole: bool,
    done: Vec<usize>,
    failed: Vec<(usize, BlockHash)>,
    copied: usize,
}

impl Finished {
    fn take(&mut self, outcome: Outcome, began: Instant, chunk_bytes: u64) {
        let Outcome { is_whole, done, failed, copied } = outcome;
        (self.is_whole, self.done, self.failed) = (is_whole, done, failed);
        self.seconds = clock::now().duration_since(began).as_secs_f64();
        self.bytes = copied as u64 * chunk_bytes;
    }
}

async fn store(manager: &Manager, transfer: &Transfer, counts: &Counts) -> Outcome {
    // All are sent before any is waited for: a store that depends on another waits for it on its
    // own.
    let begin = |run: &Run| {
        manager.save_from(&SaveRequest {
            info: transfer.info,
            chain: run.chain[..run.end()].into(),
            slots: &[GroupSlots::full(run.first, &run.slots)],
            is_end: false,
            ready: Fence::Done,
        })
    };
    let pending: Vec<_> = transfer.runs.iter().map(begin).collect();
    let (mut copied, mut failed, mut orphans) = (0, 0, 0);
    for (run, save) in transfer.runs.iter().zip(pending) {
        let Ok(saved) = save.await else {
            failed += run.slots.len();
            continue;
        };
        copied += saved.copied;
        // Blocks that are refused or declined did not fail: no breaker may open for them.
        failed += saved.failed;
        orphans += saved.orphans;
        counts.duplicates.fetch_add(saved.duplicates as u64, Ordering::Relaxed);
        counts.declined.fetch_add(saved.declined as u64, Ordering::Relaxed);
        counts.refused.fetch_add(saved.refused as u64, Ordering::Relaxed);
    }
    counts.stored.fetch_add(copied as u64, Ordering::Relaxed);
    counts.failed_stores.fetch_add(failed as u64, Ordering::Relaxed);
    counts.note_orphans(orphans as u64);
    Outcome { is_whole: failed == 0, done: Vec::new(), failed: Vec::new(), copied }
}

impl Counts {
    fn note_orphans(&self, orphans: u64) {
        self.orphans.fetch_add(orphans, Ordering::Relaxed);
        let lacking = self.lacking.load(Ordering::Relaxed);
        let left = if orphans > 0 { STORES_WITH_BEGINNINGS } else { lacking.saturating_sub(1) };
        self.lacking.store(left, Ordering::Relaxed);
    }
}

async fn load(manager: &Manager, transfer: &mut Transfer, counts: &Counts) -> Outcome {
    let begin = |run: &Run| {
        let info = RequestInfo { has_asked: true, ..transfer.info };
        let lease = manager.lease_for(info, &run.chain[..run.end()]);
        manager.load_into(lease, &[GroupSlots::full(run.first, &run.slots)], &Fence::Done)
    };
    let loads: Vec<_> = transfer.runs.iter().map(begin).collect();
    // Each run has a lease of its own now.
    drop(transfer.pinned.take());
    let mut outcome = Outcome { is_whole: true, done: Vec::new(), failed: Vec::new(), copied: 0 };
    for (run, load) in transfer.runs.iter().zip(loads) {
        let arrived = match load.await {
            Ok(loaded) => {
                let_go(&loaded.writers).await;
                loaded.arrived
            }
            Err(_) => 0,
        };
        outcome.done.extend(&run.keys[..arrived]);
        outcome.failed.extend(run.blocks(arrived));
        outcome.copied += arrived;
    }
    outcome.is_whole = outcome.failed.is_empty();
    counts.loaded.fetch_add(outcome.copied as u64, Ordering::Relaxed);
    counts.failed_loads.fetch_add(outcome.failed.len() as u64, Ordering::Relaxed);
    outcome
}

/// vLLM reuses a chunk whose load failed: this waits until no medium writes it any more.
async fn let_go(writers: &Writers) {
    while !writers.are_gone() {
        tokio::time::sleep(LOOK).await;
    }
}
