//! Recent requests: what each found when it asked.

use std::collections::VecDeque;
use std::time::Instant;

use kvbm_policies::RequestId;
use kvbm_tiers::clock;

use crate::names::hash::{BlockHash, Chain};
use crate::sync::Mutex;
use crate::table::{Match, Miss};

/// Requests that are remembered: half a megabyte.
pub(crate) const MAX_REQUESTS: usize = 4096;

/// What a request found when it leased its chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecentRequest {
    request: RequestId,
    pub(crate) held: Match,
    /// Blocks of its chain.
    pub(crate) blocks: usize,
    /// The first block that no tier had.
    pub(crate) missing: Option<(BlockHash, Miss)>,
    pub(crate) at: Instant,
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
        let missing = miss.map(|miss| (chain.hashes[held.longest()], miss));
        let asked = RecentRequest { request, held, blocks: chain.len(), missing, at: clock::now() };
        let mut requests = self.0.lock();
        if requests.len() == MAX_REQUESTS {
            requests.pop_front();
        }
        requests.push_back(asked);
    }

    /// What a request found when it last asked.
    pub(crate) fn find(&self, request: RequestId) -> Option<RecentRequest> {
        self.0.lock().iter().rev().find(|recent| recent.request == request).copied()
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
