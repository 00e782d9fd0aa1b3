//! What each request was promised.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kvbm::{BlockHash, Lease, Manager, RequestId, RequestInfo, SlotId};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::errors::{classes, of_manager};
use crate::names::vllm_request_numbers;

/// How many tokens a chunk of each cache group has, since the ends of keys are told in tokens, and
/// how many chunks the primary tier has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunks {
    /// Of the only cache group. None: there are several, and which of them keeps every chunk of a
    /// prompt vLLM does not say: so no chunk of theirs hangs on another.
    chained: Option<u64>,
    /// The longest of any group.
    tokens: u64,
    /// What can be promised at once.
    budget: usize,
}

impl Chunks {
    pub(super) fn new(tokens: &[u64], slots: usize, margin: usize) -> PyResult<Self> {
        let chained = if let [only] = tokens { Some(*only) } else { None };
        let longest = tokens.iter().copied().max().filter(|_| !tokens.contains(&0));
        let budget = slots.saturating_sub(margin);
        match longest {
            Some(longest) if budget > 0 => Ok(Self { chained, tokens: longest, budget }),
            _ => {
                let message = format!(
                    "the primary tier has {slots} chunks of {tokens:?} tokens, and {margin} of them are to be left alone: \
                     give vLLM more memory (cpu_bytes_to_use)"
                );
                Err(classes::InvalidError::new_err(message))
            }
        }
    }

    pub(super) const fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The place in its chain of the chunk whose key ends there. None: it is on none.
    fn place(&self, end: u64) -> Option<usize> {
        let tokens = self.chained?;
        // A key that ends elsewhere is of a partial chunk, on which nothing hangs.
        (end > 0 && end.is_multiple_of(tokens)).then(|| (end / tokens) as usize - 1)
    }
}

/// What blocks are named by besides vLLM's keys.
pub(super) type Salt = [u8; 16];

/// Successive blocks of a chain, and the primary tier's slots for them.
pub(super) struct Run {
    pub(super) chain: Arc<Vec<BlockHash>>,
    pub(super) first: usize,
    pub(super) slots: Vec<SlotId>,
    /// Which of the job's keys they are.
    pub(super) keys: Vec<usize>,
}

impl Run {
    pub(super) fn end(&self) -> usize {
        self.first + self.slots.len()
    }
}

/// What a request can load of its chain.
#[derive(Default)]
pub(super) struct Held {
    /// Leading chunks.
    pub(super) blocks: usize,
    /// In a chunk.
    pub(super) tokens: u64,
    /// The keys of its chain, in order, where vLLM named them so.
    pub(super) keys: Option<Py<PyList>>,
}

/// A request that has ended.
pub(super) struct EndedRequest {
    pub(super) id: RequestId,
    pub(super) chain: Arc<Vec<BlockHash>>,
    /// Tokens that were generated, as far as they filled chunks.
    pub(super) output: u32,
}

struct Request {
    id: RequestId,
    chain: Arc<Vec<BlockHash>>,
    /// All keys that it is known by, in the order in which vLLM named them.
    keys: Option<Py<PyList>>,
    /// How many these are.
    known: usize,
    /// Blocks of its chain when it was first heard of: its prompt.
    prompt: usize,
    /// Keeps what it was promised where it is.
    pinned: Option<Lease>,
    /// It was looked up.
    is_counted: bool,
    /// A load failed there: no more than these leading blocks are promised again, else it would be
    /// asked for forever.
    sound: usize,
    /// The same, of blocks without a chain.
    unsound: HashSet<BlockHash>,
}

/// Chunks of the primary tier that a request needs for what it was promised.
struct Promise {
    chunks: usize,
    /// In which it asked last.
    step: u64,
}

/// All requests that vLLM has not ended.
pub(super) struct Requests {
    chunks: Chunks,
    /// Since a reset: only this process knows which weights are served.
    salt: Option<Salt>,
    by_name: HashMap<String, Request>,
    /// To those that wait for it.
    promises: HashMap<String, Promise>,
    /// Steps in which a request asked.
    step: u64,
    asked_in_step: bool,
}

impl Requests {
    pub(super) fn new(chunks: Chunks) -> Self {
        Self {
            chunks,
            salt: None,
            by_name: HashMap::new(),
            promises: HashMap::new(),
            step: 0,
            asked_in_step: false,
        }
    }

    /// Takes the keys that came to a request's `positions`.
    pub(super) fn learn(&mut self, request: &str, positions: &Bound<'_, PyDict>) -> PyResult<()> {
        let (chunks, salt) = (self.chunks, self.salt);
        let request = self.entry(request);
        let (known, count) = (request.known, positions.len());
        if count == known || chunks.chained.is_none() {
            return Ok(());
        }
        let keys = positions.keys();
        let place = |key| -> PyResult<_> {
            let end = positions.get_item(key)?.map(|end| end.extract::<u64>()).transpose()?;
            Ok(end.and_then(|end| chunks.place(end)))
        };
        // vLLM adds keys in the order of the prompt, and a dictionary keeps that. So where the last
        // one has its place, none is of a partial chunk, and their ends need not be looked at.
        let mut next = request.chain.len();
        let all_follow = place(keys.get_item(count - 1)?)? == Some(next + count - known - 1);
        let chain = Arc::make_mut(&mut request.chain);
        chain.reserve(count - known);
        for key in keys.iter().skip(known) {
            if all_follow {
                chain.push(hash(&key, salt)?);
            } else if place(key.clone())? == Some(next) {
                chain.push(hash(&key, salt)?);
                next += 1;
            }
        }
        (request.keys, request.known) = (Some(keys.unbind()), count);
        if known == 0 {
            request.prompt = request.chain.len();
        }
        Ok(())
    }

    /// Leading chunks of a request that can be loaded and fit the primary tier beside what others
    /// were promised. All of the request's chunks count, from its first on: which of them the
    /// engine has itself vLLM does not say, and those that the primary tier has may have to leave
    /// it for those that are loaded.
    pub(super) fn reach(&mut self, py: Python<'_>, name: &str, manager: &Manager) -> Held {
        let room = self.room(name);
        let Some(tokens) = self.chunks.chained else { return Held::default() };
        let request = self.entry(name);
        let chain = &request.chain[..];
        let pinned = request.pinned.as_ref().map(|lease| lease.held().longest());
        // A request that asks again and again uses it once.
        if pinned.is_none_or(|pinned| manager.matches(chain).longest() > pinned) {
            // A load takes the pins along, and vLLM asks again when it has ended: that is no other
            // request.
            let info = RequestInfo {
                request: Some(request.id),
                has_asked: request.is_counted,
                ..RequestInfo::default()
            };
            request.pinned = Some(manager.lease_for(info, chain));
            request.is_counted = true;
        }
        let held = request.pinned.as_ref().map_or(0, |lease| lease.held().worth_loading());
        let blocks = held.min(request.sound).min(room);
        let in_order = request.keys.as_ref().filter(|_| request.known == chain.len());
        let keys = in_order.map(|keys| keys.clone_ref(py));
        self.promise(name, blocks);
        Held { blocks, tokens, keys }
    }

    /// Which of a request's keys can be loaded, where they do not hang on each other. Those that
    /// end first come first: what does not fit the primary tier is behind.
    pub(super) fn held<'py>(
        &mut self,
        name: &str,
        positions: &Bound<'py, PyDict>,
        manager: &Manager,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let room = self.room(name);
        let mut keys = Vec::with_capacity(positions.len());
        for (key, end) in positions.iter() {
            keys.push((end.extract::<u64>()?, key));
        }
        keys.sort_by_key(|&(end, _)| end);
        let salt = self.salt;
        let request = self.entry(name);
        let mut held = Vec::new();
        for (_, key) in keys.into_iter().take(room) {
            let hash = hash(&key, salt)?;
            if manager.matches([hash].as_slice()).longest() > 0 && !request.unsound.contains(&hash)
            {
                held.push(key.cast_into::<PyBytes>()?);
            }
        }
        self.promise(name, held.len());
        Ok(held)
    }

    /// Chunks of the primary tier that others than this request were not promised. A request that
    /// asks again and again waits; one that has not asked for a step does not, whatever vLLM makes
    /// of it.
    fn room(&self, name: &str) -> usize {
        let waits = |promise: &Promise| promise.step + 1 >= self.step;
        let others =
            self.promises.iter().filter(|(other, promise)| *other != name && waits(promise));
        self.chunks.budget.saturating_sub(others.map(|(_, promise)| promise.chunks).sum())
    }

    fn promise(&mut self, name: &str, chunks: usize) {
        self.asked_in_step = true;
        let step = self.step;
        match self.promises.get_mut(name) {
            Some(promise) => *promise = Promise { chunks, step },
            None if chunks > 0 => {
                self.promises.insert(name.to_owned(), Promise { chunks, step });
            }
            None => {}
        }
    }

    /// A step of the scheduler ends, in which these requests were scheduled.
    pub(super) fn end_step(&mut self, scheduled: Vec<String>) {
        for name in scheduled {
            self.promises.remove(&name);
            if let Some(request) = self.by_name.get_mut(&name) {
                request.pinned = None;
            }
        }
        // In a step without any look-up no request had a chance to ask.
        self.step += u64::from(std::mem::take(&mut self.asked_in_step));
    }

    /// A job's keys as stretches of chains, in order.
    pub(super) fn runs(
        &mut self,
        name: &str,
        positions: &Bound<'_, PyDict>,
        keys: &Bound<'_, PyAny>,
        slots: Vec<u32>,
    ) -> PyResult<(RequestInfo, Vec<Run>)> {
        let (chunks, salt) = (self.chunks, self.salt);
        let request = self.entry(name);
        let (mut chained, mut alone) = (Vec::new(), Vec::new());
        for ((which, key), slot) in keys.try_iter()?.enumerate().zip(slots) {
            let (key, slot) = (key?, SlotId(slot));
            let hash = hash(&key, salt)?;
            let end = positions.get_item(&key)?.map(|end| end.extract::<u64>()).transpose()?;
            match end.and_then(|end| chunks.place(end)) {
                Some(place) if request.chain.get(place) == Some(&hash) => {
                    chained.push(ChainedKey { place, slot, which });
                }
                _ => alone.push(Run {
                    chain: Arc::new(vec![hash]),
                    first: 0,
                    slots: vec![slot],
                    keys: vec![which],
                }),
            }
        }
        chained.sort_unstable_by_key(|key| key.place);
        let mut runs = stretches(&request.chain, &chained);
        runs.extend(alone);
        Ok((RequestInfo { request: Some(request.id), ..RequestInfo::default() }, runs))
    }

    pub(super) fn take_pins(&mut self, name: &str) -> Option<Lease> {
        self.by_name.get_mut(name)?.pinned.take()
    }

    /// Loads of a request failed: of these blocks, by place in the chain.
    pub(super) fn failed(&mut self, name: &str, failed: &[(usize, BlockHash)]) {
        let Some(request) = self.by_name.get_mut(name) else { return };
        for &(place, hash) in failed {
            if request.chain.get(place) == Some(&hash) {
                request.sound = request.sound.min(place);
            }
            request.unsound.insert(hash);
        }
        request.pinned = None;
    }

    /// A request has ended. None: nothing was heard of it.
    pub(super) fn end(&mut self, name: &str) -> Option<EndedRequest> {
        self.promises.remove(name);
        let Request { id, chain, prompt, .. } = self.by_name.remove(name)?;
        let generated = (chain.len() - prompt) as u64 * self.chunks.tokens;
        Some(EndedRequest { id, chain, output: u32::try_from(generated).unwrap_or(u32::MAX) })
    }

    /// Lets go of what was promised: it is about to be forgotten.
    pub(super) fn unpin(&mut self) {
        self.promises.clear();
        self.by_name.values_mut().for_each(|request| request.pinned = None);
    }

    /// From here on blocks have other names. Of its requests only those are kept, and that they
    /// were counted.
    pub(super) fn rename(&mut self, salt: Salt) {
        self.salt = Some(salt);
        self.promises.clear();
        for request in self.by_name.values_mut() {
            let Request { id, is_counted, .. } = *request;
            *request = Request { is_counted, ..Request::new(id) };
        }
    }

    pub(super) fn clear(&mut self) {
        self.promises.clear();
        self.by_name.clear();
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    pub(super) fn count(&self) -> usize {
        self.by_name.len()
    }

    fn entry(&mut self, name: &str) -> &mut Request {
        if !self.by_name.contains_key(name) {
            self.by_name.insert(name.to_owned(), Request::new(self.number(name)));
        }
        self.by_name.get_mut(name).expect("it is there now")
    }

    /// That of the id which the client has, unless another request that lives has the same one.
    fn number(&self, name: &str) -> RequestId {
        let (of_client, own) = vllm_request_numbers(name);
        let is_taken = self.by_name.values().any(|request| request.id == RequestId(of_client));
        RequestId(if is_taken { own } else { of_client })
    }
}

impl Request {
    fn new(id: RequestId) -> Self {
        Self {
            id,
            chain: Arc::default(),
            keys: None,
            known: 0,
            prompt: 0,
            pinned: None,
            is_counted: false,
            sound: usize::MAX,
            unsound: HashSet::new(),
        }
    }
}

/// A key of a block in a request's chain.
struct ChainedKey {
    place: usize,
    slot: SlotId,
    /// Which of the keys.
    which: usize,
}

/// Places that follow each other go together.
fn stretches(chain: &Arc<Vec<BlockHash>>, keys: &[ChainedKey]) -> Vec<Run> {
    let groups = keys.chunk_by(|one, next| next.place == one.place + 1);
    groups
        .map(|group| Run {
            chain: Arc::clone(chain),
            first: group[0].place,
            slots: group.iter().map(|key| key.slot).collect(),
            keys: group.iter().map(|key| key.which).collect(),
        })
        .collect()
}

/// A key names its cache group at its end: the same tokens have other names in another group.
fn hash(key: &Bound<'_, PyAny>, salt: Option<Salt>) -> PyResult<BlockHash> {
    let key = key.cast::<PyBytes>()?.as_bytes();
    let hash = match salt {
        None => BlockHash::from_engine(key),
        Some(salt) => BlockHash::from_engine(&[&salt, key].concat()),
    };
    hash.map_err(|error| of_manager(&error))
}
