//! What requests asked for: what each recent one found, and, from the chains of all, what more
//! memory would bring: a curve of hit rate against capacity.

use std::collections::VecDeque;
use std::time::Instant;

use kvbm_policies::{MissRatio, RequestId, SampledRequests};
use kvbm_tiers::clock;
use kvbm_tiers::geometry::MAX_SLOTS;
use serde::Serialize;

use crate::names::hash::{BlockHash, Chain};
use crate::sync::Mutex;
use crate::table::{Match, Miss};

/// The curve reaches this many times the largest tier.
const REACH: u32 = 4;
/// It reaches at least this far, in blocks: the further, the fewer blocks it follows, and an
/// estimate must not hold up a request.
const LEAST: u32 = 1 << 19;
/// In this time, in milliseconds, earlier observations lose half of their weight.
const HALF_LIFE_MS: u64 = 600_000;
/// Most keys that wait to be observed: 4 MB.
const MAX_WAITING: usize = 1 << 18;

/// Whether a multiple of a tier of `slots` slots means anything: an object store without a limit
/// has as many slots as there can be. A curve that reached beyond them would follow one block in a
/// quarter of a million.
pub(crate) const fn has_limit(slots: u32) -> bool {
    slots < MAX_SLOTS
}

/// Follows a sample of the requested chains (see [`MissRatio`] for method and error).
///
/// A request only leaves the sampled keys of its chain here, a few nanoseconds each; the curve
/// takes them later, at some 100 ns each: for a chain of 65,536 blocks that would be ten times as
/// long as all else that a lease does.
#[derive(Debug)]
pub(crate) struct DemandSample {
    waiting: Mutex<WaitingPrompts>,
    curve: Mutex<DemandCurve>,
}

#[derive(Debug)]
struct WaitingPrompts {
    requests: SampledRequests,
    now_ms: u64,
}

#[derive(Debug)]
struct DemandCurve {
    ratio: MissRatio,
    faded_ms: u64,
    /// Empty: it replaces the requests that wait.
    spare: SampledRequests,
}

impl DemandSample {
    /// For tiers of up to `largest` blocks, which [have a limit](has_limit).
    pub(crate) fn of_tiers(largest: u32) -> Self {
        // Hit rates of blocks do not depend on their tokens.
        let curve = MissRatio::new(largest.saturating_mul(REACH).max(LEAST), 1);
        let (requests, spare) =
            (SampledRequests::new(curve.sample()), SampledRequests::new(curve.sample()));
        Self {
            waiting: Mutex::new(WaitingPrompts { requests, now_ms: 0 }),
            curve: Mutex::new(DemandCurve { ratio: curve, faded_ms: 0, spare }),
        }
    }

    /// A request asks for `chain`. It counts only once [`take_up`](Self::take_up) has come.
    pub(crate) fn observe(&self, chain: Chain<'_>, now_ms: u64) {
        let mut waiting = self.waiting.lock();
        waiting.now_ms = now_ms;
        if waiting.requests.keys() < MAX_WAITING {
            let tokens = u32::try_from(chain.len()).unwrap_or(u32::MAX);
            waiting.requests.push(chain.len(), |at| chain.key(at).folded(), tokens);
        }
    }

    /// Brings the curve up to date: off the requests' path.
    pub(crate) fn take_up(&self) {
        self.curve.lock().take_up(&self.waiting);
    }

    /// The share of requested blocks that an LRU tier of `capacity` blocks would hold: 0 to 1.
    pub(crate) fn hit_rate(&self, capacity: u32) -> f64 {
        let mut curve = self.curve.lock();
        curve.take_up(&self.waiting);
        curve.ratio.token_hit_rate(capacity)
    }
}

impl DemandCurve {
    fn take_up(&mut self, waiting: &Mutex<WaitingPrompts>) {
        let now_ms = {
            let mut waiting = waiting.lock();
            // Swapped, so that requests wait for two pointers, not for the curve.
            std::mem::swap(&mut waiting.requests, &mut self.spare);
            waiting.now_ms
        };
        if now_ms >= self.faded_ms + HALF_LIFE_MS {
            self.faded_ms = now_ms;
            self.ratio.fade(0.5);
        }
        self.ratio.take(&mut self.spare);
    }
}

/// Requests that are remembered: half a megabyte.
pub(crate) const MAX_REQUESTS: usize = 4096;

/// What a request took from the peer that it asked last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FromPeer {
    /// The peer's name.
    pub peer: String,
    /// How its blocks come: `tcp`, `shared_memory` or `nixl`. `None`: it gave no lease.
    pub way: Option<&'static str>,
    /// Blocks that were leased there, and were not here.
    pub leased_blocks: usize,
    /// Those of them that came.
    pub copied_blocks: usize,
    /// Why not more of the chain came from there, for people.
    pub why: Option<String>,
}

/// The first block of a chain that no tier had.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstMiss {
    pub(crate) block: BlockHash,
    pub(crate) miss: Miss,
}

impl FirstMiss {
    pub(crate) fn behind(held: &Match, chain: Chain<'_>, miss: Option<Miss>) -> Option<Self> {
        miss.map(|miss| Self { block: chain.hashes[held.longest()], miss })
    }
}

/// What a request found when it leased its chain.
#[derive(Clone, Debug)]
pub(crate) struct RecentRequest {
    request: RequestId,
    pub(crate) held: Match,
    /// Blocks of its chain.
    pub(crate) blocks: usize,
    pub(crate) missing: Option<FirstMiss>,
    pub(crate) at: Instant,
    pub(crate) from_peer: Option<Box<FromPeer>>,
}

/// The last requests that the engine named.
#[derive(Debug, Default)]
pub(crate) struct RecentRequests(Mutex<VecDeque<RecentRequest>>);

impl RecentRequests {
    pub(crate) fn note(
        &self,
        request: RequestId,
        chain: Chain<'_>,
        held: Match,
        miss: Option<Miss>,
    ) {
        let missing = FirstMiss::behind(&held, chain, miss);
        let (blocks, at, from_peer) = (chain.len(), clock::now(), None);
        let asked = RecentRequest { request, held, blocks, missing, at, from_peer };
        let mut requests = self.0.lock();
        if requests.len() == MAX_REQUESTS {
            requests.pop_front();
        }
        requests.push_back(asked);
    }

    /// What a request found when it last asked.
    pub(crate) fn find(&self, request: RequestId) -> Option<RecentRequest> {
        self.0.lock().iter().rev().find(|recent| recent.request == request).cloned()
    }

    /// What it took from a peer then. False: it is not remembered.
    pub(crate) fn note_from_peer(&self, request: RequestId, taken: &FromPeer) -> bool {
        let mut requests = self.0.lock();
        let recent = requests.iter_mut().rev().find(|recent| recent.request == request);
        recent.map(|recent| recent.from_peer = Some(Box::new(taken.clone()))).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_requests_are_remembered_as_they_asked_last() {
        let recent = RecentRequests::default();
        let hashes = [BlockHash::from_u128(7)];
        let chain = Chain::from(&hashes[..]);
        let found = |id| recent.find(RequestId(id)).map(|request| request.missing.is_some());
        let miss = Miss { reason: crate::table::MissReason::NeverSeen, tier: None, age_s: None };
        recent.note(RequestId(0), chain, Match::default(), Some(miss));
        recent.note(RequestId(0), chain, Match::new([1, 0, 0, 0]), None);
        assert_eq!((found(0), found(1)), (Some(false), None));
        (1..=MAX_REQUESTS as u64)
            .for_each(|id| recent.note(RequestId(id), chain, Match::default(), Some(miss)));
        assert_eq!((found(0), found(1)), (None, Some(true)));
    }
}
