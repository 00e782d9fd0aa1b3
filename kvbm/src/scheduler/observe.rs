//! What the scheduler and the table report of themselves.

use std::sync::{Arc, OnceLock};

use kvbm_policies::RequestId;
use kvbm_tiers::{Route, Tier};

use super::Core;
use crate::metrics::TenantLeases;
use crate::names::hash::{BlockHash, Chain};
use crate::observe::requests::{DemandSample, FromPeer, RecentRequest, RecentRequests};
use crate::table::{Match, Miss, RequestInfo};

/// What requests ask for and find.
#[derive(Debug)]
pub(super) struct RequestLog {
    pub(super) demand: DemandSample,
    /// What requests found lately, once that is to be remembered.
    recent: OnceLock<RecentRequests>,
    /// Set if the settings name tenants.
    tenants: OnceLock<Arc<TenantLeases>>,
}

impl RequestLog {
    /// For tiers of which the largest has `largest` slots.
    pub(super) fn of_tiers(largest: u32) -> Self {
        let demand = DemandSample::of_tiers(largest);
        Self { demand, recent: OnceLock::new(), tenants: OnceLock::new() }
    }

    /// A request asked for a chain.
    pub(super) fn note(
        &self,
        info: &RequestInfo,
        chain: Chain<'_>,
        held: &Match,
        miss: Option<Miss>,
        now_ms: u64,
    ) {
        self.demand.observe(chain, now_ms);
        if let Some(leases) = self.tenants.get() {
            leases.requested(info.hints.tenant, chain.len(), held.longest());
        }
        if let (Some(recent), Some(request)) = (self.recent.get(), info.request) {
            recent.note(request, chain, *held, miss);
        }
    }
}

impl Core {
    /// How much of a chain each tier holds, and why the first block that none has is missing. It
    /// has no side effect.
    pub(crate) fn why(&self, chain: Chain<'_>) -> (Match, Option<Miss>) {
        let table = self.table();
        let held = table.matches(chain);
        let miss = table.miss(chain, &held);
        (held, miss)
    }

    /// The chain of `blocks` blocks that ends with this one. `None`: it is not known.
    pub(crate) fn chain_ending_with(
        &self,
        last: BlockHash,
        blocks: usize,
    ) -> Option<Vec<BlockHash>> {
        let (mut chain, mut next) = (Vec::new(), last);
        while chain.len() < blocks {
            if !self.table().name_ancestors(next, blocks - chain.len(), &mut chain) {
                return None;
            }
            if chain.len() < blocks {
                // The next hold begins with it.
                next = chain.pop()?;
            }
        }
        chain.reverse();
        Some(chain)
    }

    /// Remembers from here on what requests found. Before, this costs nothing.
    pub(crate) fn remember_requests(&self) {
        self.requests.recent.get_or_init(Default::default);
    }

    /// Counts from here on what tenants ask for, find and lose.
    pub(crate) fn count_tenants(&self, leases: TenantLeases) -> Arc<TenantLeases> {
        self.table().count_tenants(leases.shown().to_vec());
        Arc::clone(self.requests.tenants.get_or_init(|| Arc::new(leases)))
    }

    /// What a request found when it last asked, if that was recent.
    pub(crate) fn recent_request(&self, request: RequestId) -> Option<RecentRequest> {
        self.requests.recent.get()?.find(request)
    }

    /// What a request took from a peer, which may be all that it asks for.
    pub(crate) fn note_from_peer(&self, request: RequestId, chain: Chain<'_>, taken: &FromPeer) {
        let Some(recent) = self.requests.recent.get() else { return };
        if !recent.note_from_peer(request, taken) {
            let (held, miss) = self.why(chain);
            recent.note(request, chain, held, miss);
            recent.note_from_peer(request, taken);
        }
    }

    /// Blocks that a medium is copying on a route, without overdue ones.
    pub(crate) fn blocks_in_flight(&self, route: Route) -> usize {
        self.health.batches.blocks(route)
    }

    /// Whether the tier at the lower end of a route is left alone in this direction: its medium
    /// fails, or it is [withdrawn](Self::is_withdrawn).
    pub(crate) fn is_left_alone(&self, route: Route) -> bool {
        self.health.breakers.is_open(route) || self.is_withdrawn(route.lower())
    }

    /// Whether a tier is withdrawn: it gave wrong blocks.
    pub(crate) fn is_withdrawn(&self, tier: Tier) -> bool {
        self.table().is_withdrawn(tier)
    }
}
