//! Our eviction for engines that keep a cache of their own: the native half of
//! `kvbm_rs.vllm.policy`.

use std::collections::HashMap;
use std::sync::Arc;

use kvbm::{Clock, ManualClock, RequestId, SystemClock};
use kvbm_policies::{ChunkCache, ChunkKey, EvictionKind, Upkeep};
use kvbm_tiers::clock;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ChunkPolicy>()
}

/// What a generated token takes, as a rule. Only the order of magnitude matters: the model learns
/// what a length means.
const TOKEN_MS: u64 = 20;

/// Bytes of a key behind its hash, which name the cache group.
const GROUP_BYTES: usize = 4;

/// Decides which chunks of an engine's own cache go.
///
/// Keys are bytes: a chained hash of at least 16 bytes and four bytes that name the cache group.
/// `positions` says which chunk follows which: the keys of a request's chunks with the token behind
/// each, in order within each group; what was told before is skipped.
///
/// Args:
///     capacity: chunks that the cache has room for.
///     eviction: one of `hazard`, `lru` and the others of docs/policies.md.
///     learn_here: learn in the calling thread, not in one of its own: for simulations.
///     manual_clock: the time is what `advance_to` says, in milliseconds.
#[pyclass(module = "kvbm_rs._native", frozen)]
pub(crate) struct ChunkPolicy {
    state: Mutex<State>,
    eviction: EvictionKind,
    capacity: u32,
    learn_here: bool,
    clock: Arc<dyn Clock>,
    manual: Option<Arc<ManualClock>>,
}

struct State {
    cache: ChunkCache,
    chunks: HashMap<ChunkKey, Chunk>,
    running: HashMap<String, Running>,
    last_request: u64,
    /// Until its round has ended, nothing more is learned.
    learning: Option<Arc<()>>,
}

struct Chunk {
    /// As the engine wrote it.
    name: Py<PyBytes>,
    /// When it was last read.
    loaded_ms: Option<u64>,
}

/// A request that has not ended.
struct Running {
    id: RequestId,
    began_ms: u64,
    /// Positions that were told.
    told: usize,
    /// Tokens of its chunks then and now: what came since, it generated.
    prompt_end: u64,
    end: u64,
    /// Tokens of a chunk.
    chunk: u64,
}

#[pymethods]
impl ChunkPolicy {
    #[new]
    #[pyo3(signature = (capacity, *, eviction="hazard", learn_here=false, manual_clock=false))]
    fn new(capacity: u32, eviction: &str, learn_here: bool, manual_clock: bool) -> PyResult<Self> {
        let eviction: EvictionKind =
            eviction.parse().map_err(|error| PyValueError::new_err(format!("{error}")))?;
        let manual = manual_clock.then(|| Arc::new(ManualClock::default()));
        let clock: Arc<dyn Clock> = match &manual {
            Some(manual) => Arc::clone(manual) as Arc<dyn Clock>,
            None => Arc::new(SystemClock::default()),
        };
        let state = Mutex::new(State::new(eviction, capacity));
        Ok(Self { state, eviction, capacity, learn_here, clock, manual })
    }

    /// Sets the clock forward; earlier times are ignored.
    fn advance_to(&self, now_ms: u64) -> PyResult<()> {
        let Some(manual) = &self.manual else {
            return Err(PyValueError::new_err("the time is real: say manual_clock=True"));
        };
        manual.advance_to(now_ms);
        Ok(())
    }

    /// A request has computed these chunks, which are not there.
    fn offer(
        &self,
        request: &str,
        positions: &Bound<'_, PyDict>,
        keys: Vec<Bound<'_, PyBytes>>,
    ) -> PyResult<()> {
        let now_ms = self.clock.now_ms();
        let mut state = self.state.lock();
        let id = state.follow(request, positions, now_ms)?;
        // Runs of one group, since each is a chain of its own.
        for run in keys.chunk_by(|one, other| group(one.as_bytes()) == group(other.as_bytes())) {
            let names = run.iter().map(|name| key(name.as_bytes()));
            state.cache.offer(id, group(run[0].as_bytes()), names, now_ms);
        }
        self.learn(&mut state);
        Ok(())
    }

    /// The chunk has come, and its bytes are being written.
    fn insert(&self, name: Bound<'_, PyBytes>) {
        let mut state = self.state.lock();
        let key = key(name.as_bytes());
        state.chunks.insert(key, Chunk { name: name.unbind(), loaded_ms: None });
        state.cache.insert(key);
    }

    /// The chunk is gone: its copy failed.
    fn remove(&self, name: &[u8]) {
        let mut state = self.state.lock();
        state.chunks.remove(&key(name));
        state.cache.remove(key(name));
    }

    /// The chunk is read, and must stay.
    fn mark_non_evictable(&self, name: &[u8]) {
        let mut state = self.state.lock();
        if let Some(chunk) = state.chunks.get_mut(&key(name)) {
            chunk.loaded_ms = Some(self.clock.now_ms());
        }
        state.cache.busy(key(name));
    }

    /// Nothing reads or writes the chunk any more.
    fn mark_evictable(&self, name: &[u8]) {
        self.state.lock().cache.idle(key(name));
    }

    /// Takes out `count` chunks, none of them in `protected`, in the order in which they go. `None`
    /// if fewer can go: then all stay.
    fn evict<'py>(
        &self,
        py: Python<'py>,
        count: usize,
        protected: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let keep = protected.try_iter()?.map(|name| Ok(key(name?.cast::<PyBytes>()?.as_bytes())));
        let keep: Vec<_> = keep.collect::<PyResult<_>>()?;
        let mut state = self.state.lock();
        let Some(evicted) = state.cache.evict(count, keep) else { return Ok(None) };
        let names =
            evicted.iter().filter_map(|key| state.chunks.remove(key)).map(|chunk| chunk.name);
        PyList::new(py, names.collect::<Vec<_>>()).map(Some)
    }

    /// A request has ended, which has read `reused` chunks of others.
    fn finish(
        &self,
        request: &str,
        positions: &Bound<'_, PyDict>,
        reused: Vec<Bound<'_, PyBytes>>,
    ) -> PyResult<()> {
        let now_ms = self.clock.now_ms();
        let mut state = self.state.lock();
        let began =
            reused.first().and_then(|name| state.chunks.get(&key(name.as_bytes()))?.loaded_ms);
        let id = state.follow(request, positions, began.unwrap_or(now_ms))?;
        let output =
            state.running.remove(request).map_or(0, |running| running.output_tokens(now_ms));
        state.cache.finish(id, output, now_ms);
        self.learn(&mut state);
        Ok(())
    }

    /// Forgets all chunks, and what was learned.
    fn clear(&self) {
        *self.state.lock() = State::new(self.eviction, self.capacity);
    }

    fn __len__(&self) -> usize {
        self.state.lock().cache.resident()
    }
}

impl ChunkPolicy {
    /// Does what the policy wants done besides, on a thread of its own: a fit takes milliseconds.
    fn learn(&self, state: &mut State) {
        if state.learning.as_ref().is_some_and(|round| Arc::strong_count(round) > 1) {
            return;
        }
        let mut work: Vec<Upkeep> = Vec::new();
        while state.cache.upkeep(&mut work) {}
        if work.is_empty() {
            return;
        }
        if self.learn_here {
            return work.into_iter().for_each(|work| work());
        }
        let round = Arc::new(());
        state.learning = Some(Arc::clone(&round));
        // Where the system refuses a thread, the policy asks again when the next fit is due.
        let _ = clock::spawn("kvbm-learning", move || {
            work.into_iter().for_each(|work| work());
            drop(round);
        });
    }
}

impl State {
    fn new(eviction: EvictionKind, capacity: u32) -> Self {
        Self {
            cache: ChunkCache::new(eviction.build(capacity)),
            chunks: HashMap::new(),
            running: HashMap::new(),
            last_request: 0,
            learning: None,
        }
    }

    /// Takes in what `positions` tells of the request that it did not tell before.
    fn follow(
        &mut self,
        request: &str,
        positions: &Bound<'_, PyDict>,
        began_ms: u64,
    ) -> PyResult<RequestId> {
        let mut is_new = false;
        let running = self.running.entry(request.to_owned()).or_insert_with(|| {
            is_new = true;
            self.last_request += 1;
            Running::new(RequestId(self.last_request), began_ms)
        });
        for (name, end) in positions.iter().skip(running.told) {
            let (name, end) = (name.cast_into::<PyBytes>()?, end.extract::<u64>()?);
            let name = name.as_bytes();
            self.cache.follow(running.id, group(name), [key(name)]);
            running.told += 1;
            running.end = running.end.max(end);
            running.chunk = running.chunk.min(end);
        }
        if is_new {
            running.prompt_end = running.end;
        }
        Ok(running.id)
    }
}

impl Running {
    const fn new(id: RequestId, began_ms: u64) -> Self {
        Self { id, began_ms, told: 0, prompt_end: 0, end: 0, chunk: u64::MAX }
    }

    /// What it generated, as near as can be told: to the chunk by its chunks, and within that by
    /// its time.
    fn output_tokens(&self, now_ms: u64) -> u32 {
        let by_time = now_ms.saturating_sub(self.began_ms) / TOKEN_MS;
        // The prompt ended somewhere in the chunk behind those that it filled, and so did the
        // output.
        let chunks = self.end - self.prompt_end;
        let (least, most) = (chunks.saturating_sub(self.chunk), chunks.saturating_add(self.chunk));
        by_time.clamp(least, most).try_into().unwrap_or(u32::MAX)
    }
}

/// What we know a chunk by: enough of its hash, and its group.
fn key(name: &[u8]) -> ChunkKey {
    let (hash, _) = name.split_at(name.len().saturating_sub(GROUP_BYTES));
    let mut half = [0; 16];
    let bytes = hash.len().min(half.len());
    half[..bytes].copy_from_slice(&hash[..bytes]);
    // Odd, so that no two groups fall together.
    let spread = 0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835;
    ChunkKey(u128::from_le_bytes(half) ^ u128::from(group(name)).wrapping_mul(spread))
}

fn group(name: &[u8]) -> u32 {
    name.last_chunk::<GROUP_BYTES>().map_or(0, |group| u32::from_be_bytes(*group))
}
