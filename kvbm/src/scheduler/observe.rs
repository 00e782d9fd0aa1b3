//! What the scheduler and the table tell those who look at them.

use std::sync::Arc;

use kvbm_policies::RequestId;
use kvbm_tiers::{Route, Tier};

use super::Core;
use crate::hash::Chain;
use crate::metrics::TenantLeases;
use crate::recent::RecentRequest;
use crate::table::{Match, Miss};

impl Core {
    /// How much of a chain each tier holds, and why the first block that none has is not there. No side effect.
    pub(crate) fn why(&self, chain: Chain<'_>) -> (Match, Option<Miss>) {
        let table = self.table();
        let held = table.matches(chain);
        let miss = table.miss(chain, &held);
        (held, miss)
    }

    /// From here on it can be asked what requests found. Before, nothing is paid for it.
    pub(crate) fn remember_requests(&self) {
        self.recent.get_or_init(Default::default);
    }

    /// From here on what tenants ask for, find and lose is counted.
    pub(crate) fn count_tenants(&self, leases: TenantLeases) -> Arc<TenantLeases> {
        self.table().count_tenants(leases.shown().to_vec());
        Arc::clone(self.tenant_leases.get_or_init(|| Arc::new(leases)))
    }

    /// What a request found when it asked last, if that is not long ago.
    pub(crate) fn recent_request(&self, request: RequestId) -> Option<RecentRequest> {
        self.recent.get()?.find(request)
    }

    /// Blocks that a medium is copying on a route, without those that are overdue.
    pub(crate) fn blocks_in_flight(&self, route: Route) -> usize {
        self.batches.blocks(route)
    }

    /// Whether the tier at the lower end of a route is left alone in this direction: its medium fails, or it is
    /// [withdrawn](Self::is_withdrawn).
    pub(crate) fn is_left_alone(&self, route: Route) -> bool {
        self.breakers.is_open(route) || self.is_withdrawn(route.0.max(route.1))
    }

    /// Whether what a tier gives is wrong.
    pub(crate) fn is_withdrawn(&self, tier: Tier) -> bool {
        self.table().is_withdrawn(tier)
    }
}
