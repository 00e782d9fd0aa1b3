//! The hazard policy inside a cache that another program keeps, over real traces, which are not
//! part of the repository: vLLM's CPU tier as `tests/vllm/policy_replay.py` plays it, without vLLM.

mod traces;

use std::collections::HashSet;

use kvbm_policies::{
    BLOCK_TOKENS, ChunkCache, ChunkKey, EvictionKind, Request, RequestId, Running,
};
use traces::load;

/// Chunks of a prompt that are computed and stored at a time.
const PIECE_CHUNKS: usize = 16;

/// By trace and capacity in chunks: the floor in per cent, half a point below docs/policies.md's
/// simulation.
const FLOORS: [(&str, usize, f64); 2] =
    [("conversation.jsonl.gz", 1_000, 8.09), ("agentic.jsonl.gz", 1_000, 36.43)];

#[test]
fn it_hits_as_often_as_a_tier_of_our_own() {
    for (trace, chunks, floor) in FLOORS {
        let Some(requests) = load(trace) else { return };
        let percent = 100.0 * replay(&requests, chunks);
        eprintln!("{trace} at {chunks}: {percent:.2} %");
        assert!(percent >= floor, "{trace} at {chunks}: {percent:.2} % is below {floor}");
    }
}

/// Keeps the chunks, as vLLM's manager does: it asks for room before anything comes.
struct Owner {
    cache: ChunkCache,
    there: HashSet<ChunkKey>,
    capacity: usize,
}

fn replay(requests: &[Request], chunks: usize) -> f64 {
    let cache = ChunkCache::new(EvictionKind::Hazard.build(chunks as u32));
    let mut owner = Owner { cache, there: HashSet::new(), capacity: chunks };
    let (mut running, mut upkeep) = (Running::default(), Vec::new());
    let (mut prompt_tokens, mut hit_tokens) = (0, 0);
    for (request, id) in requests.iter().zip((0..).map(RequestId)) {
        while let Some(ended) = running.next_ended(request.timestamp_ms) {
            owner.cache.finish(ended.request, ended.output_tokens, ended.at_ms);
        }
        let keys: Vec<_> = request.full_blocks().iter().map(|&id| ChunkKey(id.into())).collect();
        prompt_tokens += u64::from(request.input_length);
        hit_tokens += u64::from(BLOCK_TOKENS) * owner.serve(id, &keys, request.timestamp_ms) as u64;
        running.start(id, request.timestamp_ms, request.output_length);
        while owner.cache.upkeep(&mut upkeep) {}
        upkeep.drain(..).for_each(|work| work());
    }
    hit_tokens as f64 / prompt_tokens as f64
}

impl Owner {
    /// Returns how many leading chunks were there.
    fn serve(&mut self, id: RequestId, keys: &[ChunkKey], now_ms: u64) -> usize {
        self.cache.follow(id, 0, keys.iter().copied());
        let hits = keys.iter().take_while(|key| self.there.contains(key)).count();
        for &key in &keys[..hits] {
            self.cache.busy(key);
            self.cache.idle(key);
        }
        let (mut stored, mut told) = (hits, hits);
        for end in (hits + PIECE_CHUNKS..keys.len() + PIECE_CHUNKS).step_by(PIECE_CHUNKS) {
            let offered = &keys[stored..end.min(keys.len())];
            let missing: Vec<_> =
                offered.iter().copied().filter(|key| !self.there.contains(key)).collect();
            let fresh = missing.iter().copied().filter(|key| keys[told..].contains(key));
            self.cache.offer(id, 0, fresh, now_ms);
            told = end.min(keys.len());
            if self.store(offered, &missing) {
                stored += offered.len();
            }
        }
        hits
    }

    fn store(&mut self, offered: &[ChunkKey], missing: &[ChunkKey]) -> bool {
        let short = (self.there.len() + missing.len()).saturating_sub(self.capacity);
        if short > 0 {
            let Some(gone) = self.cache.evict(short, offered.iter().copied()) else { return false };
            gone.iter().for_each(|key| assert!(self.there.remove(key)));
        }
        for &key in missing {
            self.cache.insert(key);
            self.there.insert(key);
        }
        missing.iter().for_each(|&key| self.cache.idle(key));
        true
    }
}
