//! A request: look up, load, run the rest, save, generate.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use candle_core::{Device, IndexOp, Tensor};
use candle_transformers::models::llama2_c::{Cache, Llama};
use kvbm::{RequestId, RequestInfo};

use crate::model::Model;
use crate::prefix_cache::{BLOCK_TOKENS, PrefixCache};

/// Prompts are computed in chunks of this many tokens, which begin at multiples of it. The same
/// tokens computed in other chunks have slightly other KV, since sums are rounded in another order.
pub const CHUNK_TOKENS: usize = 64;
const _: () = assert!(CHUNK_TOKENS.is_multiple_of(BLOCK_TOKENS), "a chunk is whole blocks");

/// Answers prompts, one at a time.
pub struct Engine {
    llama: Llama,
    /// Every request begins with a clone of it: candle never drops what a cache has learnt of
    /// masks.
    empty: Cache,
    prefixes: Option<PrefixCache>,
    requests: AtomicU64,
}

/// What came of a request.
#[derive(Debug)]
pub struct Answer {
    /// The likeliest tokens, one after the other.
    pub tokens: Vec<u32>,
    /// What each of them was chosen from: a number for every token of the vocabulary.
    pub logits: Vec<Vec<f32>>,
    /// Tokens of the prompt whose KV came from kvbm; the others were computed.
    pub loaded: usize,
    /// Leading tokens of the prompt that kvbm has now.
    pub saved: usize,
    /// How long it took.
    pub took: Took,
}

/// Where a request's time went.
#[derive(Clone, Copy, Debug)]
pub struct Took {
    /// To look up and load.
    pub load: Duration,
    /// To compute the rest of the prompt.
    pub prefill: Duration,
    /// To save what was computed.
    pub save: Duration,
}

impl Engine {
    /// Without `prefixes` every prompt is computed from its first token.
    pub fn new(model: &Model, prefixes: Option<PrefixCache>) -> Result<Self> {
        Ok(Self {
            llama: model.llama()?,
            empty: model.empty_cache()?,
            prefixes,
            requests: AtomicU64::new(0),
        })
    }

    /// What keeps the beginnings of prompts.
    pub const fn prefixes(&self) -> Option<&PrefixCache> {
        self.prefixes.as_ref()
    }

    /// Answers `prompt` with the `count` likeliest tokens.
    pub fn answer(&self, prompt: &[u32], count: usize) -> Result<Answer> {
        ensure!(!prompt.is_empty(), "a prompt has at least one token");
        let mut cache = self.empty.clone();
        let (mut loaded, mut saved) = (0, 0);
        let chain =
            self.prefixes.as_ref().map(|prefixes| prefixes.chain(prompt)).unwrap_or_default();
        // The name tells kvbm's policies that loading and saving are one request's.
        let request = RequestId(self.requests.fetch_add(1, Ordering::Relaxed));
        let info = RequestInfo { request: Some(request), ..RequestInfo::default() };

        let started = Instant::now();
        if let Some(prefixes) = &self.prefixes {
            loaded = prefixes.load(info, &chain, prompt.len(), &mut cache.kvs)?;
        }
        let looked_up = Instant::now();
        let next = self.prefill(prompt, loaded, &mut cache)?;
        let computed = Instant::now();
        if let Some(prefixes) = &self.prefixes {
            saved = prefixes.save(info, &chain, prompt.len(), &cache.kvs)?;
        }
        let took = Took {
            load: looked_up - started,
            prefill: computed - looked_up,
            save: computed.elapsed(),
        };

        let (tokens, logits) = self.generate(next, prompt.len(), count, &mut cache)?;
        if let Some(prefixes) = &self.prefixes {
            prefixes.blocks().manager().finished(request, tokens.len() as u32);
        }
        Ok(Answer { tokens, logits, loaded, saved, took })
    }

    /// Runs the model over `prompt` from token `from` on, a multiple of [`CHUNK_TOKENS`]; the cache
    /// has what comes before. Returns the logits behind the last token.
    pub fn prefill(&self, prompt: &[u32], from: usize, cache: &mut Cache) -> Result<Vec<f32>> {
        let mut logits = None;
        for (number, chunk) in prompt[from..].chunks(CHUNK_TOKENS).enumerate() {
            logits = Some(self.forward(chunk, from + number * CHUNK_TOKENS, cache)?);
        }
        logits.ok_or_else(|| {
            anyhow::anyhow!("nothing is left to compute: the last token always must be")
        })
    }

    /// Goes on greedily behind a prompt of `position` tokens.
    pub fn generate(
        &self,
        mut next: Vec<f32>,
        position: usize,
        count: usize,
        cache: &mut Cache,
    ) -> Result<(Vec<u32>, Vec<Vec<f32>>)> {
        let (mut tokens, mut logits) = (Vec::new(), Vec::new());
        for position in (position..).take(count) {
            let likeliest = next.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            let token = likeliest.map_or(0, |(token, _)| token as u32);
            tokens.push(token);
            logits.push(next);
            next = self.forward(&[token], position, cache)?;
        }
        Ok((tokens, logits))
    }

    /// An empty cache of the engine's own.
    pub fn empty_cache(&self) -> Cache {
        self.empty.clone()
    }

    fn forward(&self, tokens: &[u32], position: usize, cache: &mut Cache) -> Result<Vec<f32>> {
        let input = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        let logits = self.llama.forward(&input, position, cache)?;
        Ok(logits.i((0, tokens.len() - 1))?.to_vec1()?)
    }
}
