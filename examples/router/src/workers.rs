//! The engines: their health, what waits there, what they hold.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use lru::LruCache;
use parking_lot::Mutex;
use url::Url;

use crate::Shared;
use crate::prompts::PromptText;

/// Prefixes that are remembered of a worker. An engine may have evicted them, or hold more: the
/// price of a wrong guess is time.
const PREFIXES: NonZeroUsize = NonZeroUsize::new(1 << 16).unwrap();
/// Between two questions after a worker's health.
const PAUSE: Duration = Duration::from_secs(2);

/// An engine.
#[derive(Debug)]
pub struct Worker {
    url: Url,
    is_healthy: AtomicBool,
    /// Prompt tokens that it was sent and has not computed.
    waiting: AtomicU64,
    /// Requests that it decodes.
    decoding: AtomicU32,
    prefixes: Mutex<LruCache<u64, ()>>,
}

impl Worker {
    pub(crate) fn new(url: Url) -> Self {
        Self {
            url,
            is_healthy: AtomicBool::new(true),
            waiting: AtomicU64::new(0),
            decoding: AtomicU32::new(0),
            prefixes: Mutex::new(LruCache::new(PREFIXES)),
        }
    }

    /// The address of one of its pages.
    pub(crate) fn page(&self, path: &str) -> String {
        format!("{}{path}", self.url.as_str().trim_end_matches('/'))
    }

    /// For people.
    pub(crate) fn name(&self) -> &str {
        self.url.authority()
    }

    pub(crate) fn is_healthy(&self) -> bool {
        self.is_healthy.load(Relaxed)
    }

    pub(crate) fn note_health(&self, is_healthy: bool) {
        if self.is_healthy.swap(is_healthy, Relaxed) != is_healthy {
            let state = if is_healthy { "answers again" } else { "does not answer" };
            tracing::warn!(worker = self.name(), "{state}");
        }
        if !is_healthy {
            // A new process comes with an empty cache.
            self.prefixes.lock().clear();
        }
    }

    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.load(Relaxed)
    }

    pub(crate) fn decoding(&self) -> u32 {
        self.decoding.load(Relaxed)
    }

    /// Leading tokens of a prompt that it seems to hold.
    pub(crate) fn held(&self, prompt: &PromptText) -> u32 {
        let mut prefixes = self.prefixes.lock();
        prompt.held(|name| prefixes.get(&name).is_some())
    }

    /// It holds this prompt from now on.
    pub(crate) fn keep(&self, prompt: &PromptText) {
        let mut prefixes = self.prefixes.lock();
        // The beginning last: it is what others share.
        prompt.names().rev().for_each(|name| _ = prefixes.put(name, ()));
    }

    /// Counts a prompt as waiting until the guard ends.
    pub(crate) fn computes(self: &Arc<Self>, tokens: u32) -> Computing {
        self.waiting.fetch_add(tokens.into(), Relaxed);
        Computing { worker: Arc::clone(self), tokens }
    }

    /// Counts a request as decoding until the guard ends.
    pub(crate) fn decodes(self: &Arc<Self>) -> Decoding {
        self.decoding.fetch_add(1, Relaxed);
        Decoding(Arc::clone(self))
    }
}

/// A prompt that a worker was sent.
#[derive(Debug)]
pub(crate) struct Computing {
    worker: Arc<Worker>,
    tokens: u32,
}

impl Drop for Computing {
    fn drop(&mut self) {
        self.worker.waiting.fetch_sub(self.tokens.into(), Relaxed);
    }
}

/// A request that a worker decodes.
#[derive(Debug)]
pub(crate) struct Decoding(Arc<Worker>);

impl Drop for Decoding {
    fn drop(&mut self) {
        self.0.decoding.fetch_sub(1, Relaxed);
    }
}

/// Asks after the health of all workers until the router is gone.
pub(crate) async fn watch(shared: Weak<Shared>) {
    let mut turns = tokio::time::interval(PAUSE);
    loop {
        turns.tick().await;
        let Some(shared) = shared.upgrade() else { return };
        for worker in shared.prefill.iter().chain(&shared.decode) {
            let asked = shared.client.get(worker.page("/health")).timeout(PAUSE).send().await;
            worker.note_health(asked.is_ok_and(|answer| answer.status().is_success()));
        }
    }
}
