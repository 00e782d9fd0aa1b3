//! The request behind a use of the table.

use kvbm_policies::{Access, BlockId, Hints, RequestId};
use kvbm_tiers::SlotId;

/// What an engine says about the request that uses a chain. All of it is optional.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestInfo {
    /// Below 2⁶³. Ties together all uses by one request, until
    /// [`Manager::finished`](crate::Manager::finished).
    pub request: Option<RequestId>,
    /// Hints for policies.
    pub hints: Hints,
    /// It has leased before, and now comes to load what it found, or at its end.
    pub has_asked: bool,
}

/// A request's use of one chain.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestContext {
    /// The request.
    pub info: RequestInfo,
    /// Blocks of its whole chain, held or not.
    pub path: u32,
}

impl RequestContext {
    /// What a tier's policy is told: the leading `depth` blocks, down to `deepest`, were used, and
    /// the last `inserted` of them are new there.
    pub(super) fn access(&self, now_ms: u64, deepest: SlotId, depth: u32, inserted: u32) -> Access {
        Access {
            now_ms,
            request: self.info.request,
            deepest: BlockId(deepest.0),
            depth,
            inserted,
            path: self.path.max(depth),
            hints: self.info.hints,
        }
    }
}
