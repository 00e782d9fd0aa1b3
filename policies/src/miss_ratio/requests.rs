//! Requests that have been sampled and not yet observed.

use super::hot::DEEPEST;
use crate::sample::Sample;

/// The sampled parts of requests, in the order of their arrival.
#[derive(Debug)]
pub struct SampledRequests {
    sample: Sample,
    requests: Vec<HitBounds>,
    // Flat, and emptied for use again: once these have grown, a request allocates nothing.
    heads: Vec<u64>,
    sampled: Vec<SampledKey>,
}

/// What is kept of one request, and where its keys end.
#[derive(Clone, Copy, Debug)]
struct HitBounds {
    blocks: usize,
    prompt_tokens: u32,
    heads_end: usize,
    sampled_end: usize,
}

/// A sampled block.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampledKey {
    /// Its position in the path.
    pub(super) at: u32,
    pub(super) key: u64,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampledRequest<'a> {
    pub(super) blocks: usize,
    pub(super) prompt_tokens: u32,
    /// The keys of its first blocks, sampled or not: these may be hot.
    pub(super) head: &'a [u64],
    pub(super) sampled: &'a [SampledKey],
}

impl SampledRequests {
    /// None yet, of which `sample` will be kept.
    pub const fn new(sample: Sample) -> Self {
        Self { sample, requests: Vec::new(), heads: Vec::new(), sampled: Vec::new() }
    }

    /// Which blocks are kept.
    pub const fn sample(&self) -> Sample {
        self.sample
    }

    /// A request came whose prompt fills `blocks` blocks. `key` names the content at a position and
    /// all before it.
    pub fn push(&mut self, blocks: usize, key: impl Fn(usize) -> u64, prompt_tokens: u32) {
        // Sampled or not: which of them are hot is known only when they are observed.
        self.heads.extend((0..blocks.min(DEEPEST)).map(&key));
        let sampled = self.sample.positions(blocks, &key);
        self.sampled.extend(sampled.map(|at| SampledKey { at: at as u32, key: key(at) }));
        let (heads_end, sampled_end) = (self.heads.len(), self.sampled.len());
        self.requests.push(HitBounds { blocks, prompt_tokens, heads_end, sampled_end });
    }

    /// Keys that are held.
    pub const fn keys(&self) -> usize {
        self.heads.len() + self.sampled.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = SampledRequest<'_>> {
        let starts = std::iter::once((0, 0));
        let starts = starts.chain(self.requests.iter().map(|of| (of.heads_end, of.sampled_end)));
        starts.zip(&self.requests).map(|((head, sampled), of)| SampledRequest {
            blocks: of.blocks,
            prompt_tokens: of.prompt_tokens,
            head: &self.heads[head..of.heads_end],
            sampled: &self.sampled[sampled..of.sampled_end],
        })
    }

    pub(super) fn clear(&mut self) {
        self.requests.clear();
        self.heads.clear();
        self.sampled.clear();
    }
}
