//! A tier below vLLM's primary one: what `kvbm_rs.vllm.tier` asks of us, in one call for each batch
//! of keys.
//!
//! | module | holds |
//! |---|---|
//! | `requests` | what each request was promised: chains, pins, how much fits the primary tier |
//! | `jobs` | loads and stores on a thread of their own, and how they ended |
//! | `opening` | vLLM's memory and model, as a manager takes them |

mod jobs;
mod opening;
mod requests;

use std::sync::Arc;
use std::time::Duration;

use kvbm::{Manager, Tier as Level};
use parking_lot::Mutex;
use prometheus::Registry;
use pyo3::buffer::PyBuffer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use self::jobs::{Finished, JobDirection, Jobs, Transfer};
use self::opening::Identity;
use self::requests::{Chunks, Held, Requests, Salt};
use crate::errors::classes;
use crate::observe::{Samples, opened, samples};
use crate::settings::Settings;
use crate::transfer::duration;

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Tier>()
}

/// Keeps chunks of vLLM's primary tier on disk, in objects or in more memory, and brings them back.
///
/// For `kvbm_rs.vllm.KvbmTier`, which calls it on the scheduler's thread: nothing here waits for a
/// medium but `drain` and `close`.
///
/// Args: view: the primary tier's memory, of shape (chunks, bytes of a chunk). It is kept alive
/// until `close`. tokens_per_chunk: tokens in a chunk, by cache group. margin: chunks of the
/// primary tier that no promise to a request counts on. settings: of the manager, whose blocks are
/// chunks. identity: what the bytes depend on besides tokens; texts and numbers, see `opening.rs`.
/// answers: what `lookup` returns for a hit and for a miss.
#[pyclass(module = "kvbm_rs._native", frozen)]
pub(crate) struct Tier {
    requests: Mutex<Requests>,
    /// None: closed.
    running: Mutex<Option<Running>>,
    chunk_bytes: u64,
    registry: Registry,
    hit: Py<PyAny>,
    miss: Py<PyAny>,
    /// The request that looked up last in this step: vLLM asks key by key, and request by request.
    asked: Mutex<Option<Asked>>,
}

/// What a request was told in this step.
struct Asked {
    request: Py<PyAny>,
    /// Of its keys.
    ends: Py<PyDict>,
    held: Held,
    /// The key that is asked for next, if vLLM goes on in order.
    next: usize,
}

struct Running {
    manager: Arc<Manager>,
    jobs: Jobs,
}

/// A job that ended: its number, whether all is done, else which of its keys are, seconds, bytes.
type Ended = (u64, bool, Option<Vec<usize>>, f64, u64);

#[pymethods]
impl Tier {
    #[new]
    fn new(
        py: Python<'_>,
        view: PyBuffer<i8>,
        tokens_per_chunk: Vec<u64>,
        margin: usize,
        settings: &Settings,
        identity: Identity,
        answers: (Py<PyAny>, Py<PyAny>),
    ) -> PyResult<Self> {
        let memory = opening::Memory::of(view)?;
        let (slots, chunk_bytes) = (memory.slots, memory.chunk_bytes as u64);
        let chunks = Chunks::new(&tokens_per_chunk, slots as usize, margin)?;
        let (settings, registry) = (settings.without_epochs(), Registry::new());
        let counted = registry.clone();
        let manager =
            py.detach(move || opening::open(settings, identity, memory, chunks.tokens(), counted))?;
        let manager = Arc::new(manager);
        let jobs = Jobs::start(&manager, chunk_bytes)?;
        let running = Mutex::new(Some(Running { manager, jobs }));
        let (requests, asked) = (Mutex::new(Requests::new(chunks)), Mutex::default());
        let (hit, miss) = answers;
        Ok(Self { requests, running, chunk_bytes, registry, hit, miss, asked })
    }

    /// Whether a key of a request can be loaded, of a model with one cache group. The first time in
    /// a step all of the request's keys are looked up; what can be loaded is kept until the request
    /// is scheduled or ends.
    ///
    /// Args:
    ///     key: vLLM's `OffloadKey`.
    ///     request: vLLM's `ReqContext`.
    fn lookup(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        request: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let mut asked = self.asked.lock();
        let asked = match &mut *asked {
            Some(asked) if asked.request.is(request) => asked,
            other => other.insert(self.ask(request)?),
        };
        Ok(if asked.has(key)? { self.hit.clone_ref(py) } else { self.miss.clone_ref(py) })
    }

    /// Which of a request's keys can be loaded, of a model with several cache groups.
    fn held<'py>(
        &self,
        request: &str,
        positions: &Bound<'py, PyDict>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let running = self.running.lock();
        let Some(Running { manager, .. }) = &*running else { return Ok(Vec::new()) };
        self.requests.lock().held(request, positions, manager)
    }

    /// A step of the scheduler ends: these requests need nothing more of the primary tier.
    fn end_step(&self, scheduled: Vec<String>) {
        *self.asked.lock() = None;
        self.requests.lock().end_step(scheduled);
    }

    /// Begins to store chunks. Keys come in any order, each with its chunk.
    fn store(
        &self,
        job: u64,
        request: &str,
        positions: &Bound<'_, PyDict>,
        keys: &Bound<'_, PyAny>,
        chunks: Vec<u32>,
    ) -> PyResult<()> {
        self.begin(JobDirection::Store, job, request, positions, keys, chunks)
    }

    /// Begins to load chunks. Keys come in any order, each with its chunk.
    fn load(
        &self,
        job: u64,
        request: &str,
        positions: &Bound<'_, PyDict>,
        keys: &Bound<'_, PyAny>,
        chunks: Vec<u32>,
    ) -> PyResult<()> {
        self.begin(JobDirection::Load, job, request, positions, keys, chunks)
    }

    /// The jobs that have ended since the last call: `(job, all done, which keys else, seconds,
    /// bytes)`.
    fn finished(&self) -> Vec<Ended> {
        let running = self.running.lock();
        let finished =
            running.as_ref().map(|running| running.jobs.take_finished()).unwrap_or_default();
        drop(running);
        if finished.is_empty() {
            return Vec::new();
        }
        // A load that failed changes what can be promised.
        *self.asked.lock() = None;
        let mut requests = self.requests.lock();
        finished.into_iter().map(|finished| told(finished, &mut requests)).collect()
    }

    /// A request has ended: all of its chunks that are here count as used by it.
    fn end_request(&self, request: &str, positions: &Bound<'_, PyDict>) -> PyResult<()> {
        let running = self.running.lock();
        let mut requests = self.requests.lock();
        requests.learn(request, positions)?;
        let ended = requests.end(request);
        drop(requests);
        if let (Some(Running { manager, jobs }), Some(ended)) = (&*running, ended) {
            jobs.end_request(manager, ended);
        }
        Ok(())
    }

    /// Whether stores were refused lately because what comes before them is not here: then whole
    /// requests should be offered.
    fn lacks_beginnings(&self) -> bool {
        self.running.lock().as_ref().is_some_and(|running| running.jobs.lacks_beginnings())
    }

    /// Waits until every job has ended, `seconds` at most; with `forget`, nothing that is here now
    /// is found again, and what comes is named by these 16 bytes as well, by which another process
    /// does not find it. Returns how many jobs have not ended, and what is to be known about that:
    /// the new epoch could not be noted on a medium.
    #[pyo3(signature = (seconds, forget=None))]
    fn drain(&self, py: Python<'_>, seconds: f64, forget: Option<Salt>) -> (usize, Option<String>) {
        *self.asked.lock() = None;
        py.detach(|| {
            let running = self.running.lock();
            let Some(Running { manager, jobs }) = &*running else { return (0, None) };
            let left = jobs.wait_until_idle(duration(seconds));
            let mut requests = self.requests.lock();
            let Some(salt) = forget else {
                requests.unpin();
                return (left, None);
            };
            requests.rename(salt);
            drop(requests);
            (left, manager.reset(manager.admin().epoch() + 1).err().map(|error| error.to_string()))
        })
    }

    /// Ends everything: what is not on its medium yet goes there, as far as that gets in `seconds`.
    /// Returns how many blocks did not get there, and how many copies a medium still works on. Then
    /// the primary tier's memory is not ours any more, unless there are such copies.
    fn close(&self, py: Python<'_>, seconds: f64) -> PyResult<(u64, u64)> {
        let limit = Duration::try_from_secs_f64(seconds).map_err(|error| {
            classes::InvalidError::new_err(format!("seconds to close: {error}"))
        })?;
        *self.asked.lock() = None;
        py.detach(|| {
            let Some(Running { manager, jobs }) = self.running.lock().take() else {
                return Ok((0, 0));
            };
            self.requests.lock().clear();
            let stuck = jobs.close(limit);
            let drained = manager.drain(limit);
            let closing = manager.close(limit);
            let left: usize = drained.unflushed.iter().sum();
            Ok((left as u64, closing.copies_left + stuck))
        })
    }

    /// The counters and gauges of docs/metrics.md: name, meaning, whether it only grows, and values
    /// by labels.
    fn samples(&self, py: Python<'_>) -> Vec<Samples> {
        py.detach(|| samples(&self.registry))
    }

    /// What it has, in lines for a log: tiers, what an earlier process left in them, and the routes
    /// between them.
    fn opened(&self, py: Python<'_>) -> Vec<String> {
        let running = self.running.lock();
        running.as_ref().map(|running| py.detach(|| opened(&running.manager))).unwrap_or_default()
    }

    /// Counts since the start, by name; blocks are chunks.
    fn stats(&self) -> Vec<(&'static str, u64)> {
        let running = self.running.lock();
        let Some(Running { manager, jobs }) = &*running else { return Vec::new() };
        let mut stats = jobs.counts();
        stats.push(("requests", self.requests.lock().count() as u64));
        stats.push(("epoch", manager.admin().epoch()));
        stats.push((
            "recovered_blocks",
            manager.admin().recovered().iter().map(|found| found.blocks as u64).sum(),
        ));
        for (name, level) in [
            ("host_blocks", Level::Host),
            ("disk_blocks", Level::Disk),
            ("object_blocks", Level::Object),
        ] {
            stats.push((name, manager.admin().counts(level).resident.into()));
        }
        stats.push(("chunk_bytes", self.chunk_bytes));
        stats
    }
}

impl Tier {
    fn ask(&self, request: &Bound<'_, PyAny>) -> PyResult<Asked> {
        let py = request.py();
        let name: String = request.getattr(intern!(py, "req_id"))?.extract()?;
        let positions =
            request.getattr(intern!(py, "_offload_key_positions"))?.cast_into::<PyDict>()?;
        let running = self.running.lock();
        let held = match &*running {
            Some(Running { manager, .. }) => {
                let mut requests = self.requests.lock();
                requests.learn(&name, &positions)?;
                requests.reach(py, &name, manager)
            }
            None => Held::default(),
        };
        Ok(Asked { request: request.clone().unbind(), ends: positions.unbind(), held, next: 0 })
    }

    fn begin(
        &self,
        direction: JobDirection,
        job: u64,
        request: &str,
        positions: &Bound<'_, PyDict>,
        keys: &Bound<'_, PyAny>,
        chunks: Vec<u32>,
    ) -> PyResult<()> {
        let running = self.running.lock();
        let Some(Running { jobs, .. }) = &*running else {
            return Err(classes::ClosedError::new_err("the tier is closed"));
        };
        let mut requests = self.requests.lock();
        // vLLM loads what a request was promised also when the request was aborted in the same
        // step.
        let has_ended = direction == JobDirection::Load && !requests.has(request);
        requests.learn(request, positions)?;
        let (info, runs) = requests.runs(request, positions, keys, chunks)?;
        let pinned =
            if direction == JobDirection::Load { requests.take_pins(request) } else { None };
        if has_ended {
            requests.end(request);
        }
        drop(requests);
        jobs.begin(Transfer { direction, job, request: request.to_owned(), info, runs, pinned });
        Ok(())
    }
}

impl Asked {
    /// Whether `key` can be loaded.
    fn has(&mut self, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = key.py();
        // vLLM asks in the order of the prompt and by the objects that it named: then the place
        // says all.
        if let Some(keys) = &self.held.keys
            && keys.bind(py).get_item(self.next).is_ok_and(|next| next.is(key))
        {
            self.next += 1;
            return Ok(self.next <= self.held.blocks);
        }
        let Some(end) = self.ends.bind(py).get_item(key)? else { return Ok(false) };
        let end: u64 = end.extract()?;
        self.next = end.checked_div(self.held.tokens).map_or(usize::MAX, |next| next as usize);
        Ok(end <= self.held.blocks as u64 * self.held.tokens)
    }
}

/// A finished job, once its request has learnt of it.
fn told(finished: Finished, requests: &mut Requests) -> Ended {
    if finished.direction == JobDirection::Load && !finished.is_whole {
        requests.failed(&finished.request, &finished.failed);
    }
    let done = (!finished.is_whole).then_some(finished.done);
    (finished.job, finished.is_whole, done, finished.seconds, finished.bytes)
}
