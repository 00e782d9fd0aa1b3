//! What more memory would bring: a curve of hit rate against capacity, kept from the chains that are asked for.

use kvbm_policies::MissRatio;

use crate::hash::Chain;
use crate::sync::Mutex;

/// The curve reaches so many times the largest tier.
const REACH: u32 = 4;
/// It reaches at least so far, in blocks: the further, the fewer blocks are followed, and a request must not
/// be held up by an estimate.
const LEAST: u32 = 1 << 19;
/// Every so often, in milliseconds, what was observed before loses half of its weight.
const HALF_LIFE_MS: u64 = 600_000;

/// Follows the chains that are asked for, on a sample (see [`MissRatio`] for method and error): some 100 ns for
/// each block that it follows, 1.3 MB at most.
#[derive(Debug)]
pub(crate) struct Demand(Mutex<State>);

#[derive(Debug)]
struct State {
    curve: MissRatio,
    faded_ms: u64,
}

impl Demand {
    /// For tiers of up to `largest` blocks.
    pub(crate) fn of_tiers(largest: u32) -> Self {
        // Hit rates of blocks do not depend on their tokens.
        let curve = MissRatio::new(largest.saturating_mul(REACH).max(LEAST), 1);
        Self(Mutex::new(State { curve, faded_ms: 0 }))
    }

    /// A request asks for `chain`.
    pub(crate) fn observe(&self, chain: Chain<'_>, now_ms: u64) {
        let mut state = self.0.lock();
        if now_ms >= state.faded_ms + HALF_LIFE_MS {
            state.faded_ms = now_ms;
            state.curve.fade(0.5);
        }
        let key = |at| chain.key(at).hash as u64;
        state.curve.observe(chain.len(), key, u32::try_from(chain.len()).unwrap_or(u32::MAX));
    }

    /// The share of requested blocks that an LRU tier of `capacity` blocks would hold: 0 to 1.
    pub(crate) fn hit_rate(&self, capacity: u32) -> f64 {
        self.0.lock().curve.token_hit_rate(capacity)
    }
}
