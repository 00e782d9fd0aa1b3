//! Requests' uses of a tier.

use super::factors::{self, BlockTraits};
use super::path::{PathId, UseId};
use crate::gradual::{ChunkedVec, ShardedMap};
use crate::seam::{Access, Hints, RequestId};

/// One request's use, for as long as a segment of it is left. 72 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestUse {
    pub(super) at_ms: u64,
    /// The number of its latest touch, in the order of all touches.
    pub(super) touched: u32,
    /// Without meaning unless it `is_named`.
    request: RequestId,
    /// Smoothed ln(1 + seconds) between its chain's requests; [`UNKNOWN_GAP`]: it has none yet.
    gap: f32,
    /// Blocks of its path that were known before.
    pub(super) known: u32,
    pub(super) path: u32,
    /// Blocks that it used so far.
    pub(super) reached: u32,
    pub(super) output: u8,
    is_named: bool,
    pub(super) hints: Hints,
    pub(super) segments: u32,
    /// The radix path where its path ended, once it has one.
    pub(super) end: Option<PathId>,
}

const UNKNOWN_GAP: f32 = -1.0;

impl RequestUse {
    /// Of the request that `access` is the first part of, of nothing yet.
    pub(super) fn new(access: &Access, at_ms: u64, gap: Option<f32>) -> Self {
        let output = access.hints.expected_output_tokens;
        Self {
            at_ms,
            touched: 0,
            request: access.request.unwrap_or(RequestId(0)),
            gap: gap.unwrap_or(UNKNOWN_GAP),
            known: 0,
            path: 0,
            reached: 0,
            output: output.map_or(factors::UNKNOWN_OUTPUT, factors::output),
            is_named: access.request.is_some(),
            hints: access.hints,
            segments: 0,
            end: None,
        }
    }

    pub(super) fn request(&self) -> Option<RequestId> {
        self.is_named.then_some(self.request)
    }

    pub(super) fn gap(&self) -> Option<f32> {
        (self.gap >= 0.0).then_some(self.gap)
    }

    /// Unless it has one.
    pub(super) fn learn_gap(&mut self, gap: f32) {
        self.gap = self.gap().unwrap_or(gap);
    }

    pub(super) fn traits(&self) -> BlockTraits {
        BlockTraits {
            output: self.output,
            // A block that leaves and comes back while its request goes on was known twice.
            fresh: factors::size(self.path.saturating_sub(self.known)),
            path: factors::size(self.path),
            gap: factors::gap(self.gap()),
        }
    }
}

/// The uses of which something is left.
#[derive(Debug, Default)]
pub(super) struct UseCounts {
    all: ChunkedVec<RequestUse>,
    free: Vec<UseId>,
    by_request: ShardedMap<UseId>,
}

impl UseCounts {
    pub(super) fn at(&self, id: UseId) -> &RequestUse {
        &self.all[id.0 as usize]
    }

    pub(super) fn at_mut(&mut self, id: UseId) -> &mut RequestUse {
        &mut self.all[id.0 as usize]
    }

    /// The use of a request that has not ended.
    pub(super) fn of(&self, request: RequestId) -> Option<UseId> {
        self.by_request.get(request.0).copied()
    }

    pub(super) fn add(&mut self, used: RequestUse) -> UseId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.all.push(used);
            UseId(self.all.len() as u32 - 1)
        });
        self.all[id.0 as usize] = used;
        if let Some(request) = used.request() {
            self.by_request.insert(request.0, id);
        }
        id
    }

    /// One more segment is of this use.
    pub(super) fn hold(&mut self, id: UseId) {
        self.at_mut(id).segments += 1;
    }

    /// A segment of the use is gone.
    pub(super) fn leave(&mut self, id: UseId) {
        let used = self.at_mut(id);
        used.segments -= 1;
        if used.segments == 0 {
            // If the request ended, its name may be another use's by now.
            if let Some(request) = used.request().filter(|&request| self.of(request) == Some(id)) {
                self.by_request.remove(request.0);
            }
            self.free.push(id);
        }
    }

    /// The request goes on no more: later uses under its name are another's.
    pub(super) fn end(&mut self, request: RequestId) -> Option<UseId> {
        self.by_request.remove(request.0)
    }

    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        self.all.len() + self.by_request.len()
    }
}
