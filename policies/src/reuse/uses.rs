//! Requests' uses of a tier.

use super::factors::{self, Traits};
use super::ids::{PathId, UseId};
use super::sharded::ShardedMap;
use crate::chunked::Chunked;
use crate::seam::{Hints, RequestId};

/// One request's use, for as long as a segment of it is left.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestUse {
    pub(super) at_ms: u64,
    pub(super) request: Option<RequestId>,
    /// Smoothed ln(1 + seconds) between its chain's requests.
    pub(super) gap: Option<f32>,
    /// Blocks of its path that were known before.
    pub(super) known: u32,
    pub(super) path: u32,
    /// Blocks that it used so far.
    pub(super) reached: u32,
    pub(super) output: u8,
    pub(super) hints: Hints,
    pub(super) segments: u32,
    /// The radix path where its path ended.
    pub(super) end: PathId,
}

impl RequestUse {
    pub(super) fn traits(&self) -> Traits {
        Traits {
            output: self.output,
            // A block that leaves and comes back while its request goes on was known twice.
            fresh: factors::size(self.path.saturating_sub(self.known)),
            path: factors::size(self.path),
            gap: factors::gap(self.gap),
        }
    }
}

/// The uses of which something is left.
#[derive(Debug, Default)]
pub(super) struct Uses {
    all: Chunked<RequestUse>,
    free: Vec<UseId>,
    by_request: ShardedMap<UseId>,
}

impl Uses {
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
        if let Some(request) = used.request {
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
            if let Some(request) = used.request.filter(|&request| self.of(request) == Some(id)) {
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
