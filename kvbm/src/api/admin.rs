//! What operators, tests and benches ask of a manager, beside what an engine does.

use std::net::SocketAddr;
use std::sync::Arc;

use kvbm_policies::RequestId;
use kvbm_tiers::{Route, Tier};

use super::manager::Manager;
use crate::api::lease::Lease;
use crate::api::manager::RouteReport;
use crate::durable::RecoveryReport;
use crate::error::{Error, Result};
use crate::names::hash::Chain;
use crate::observe::shadow::{self, Elements, ShadowCounts, ShadowSample, ShadowVerdict};
use crate::observe::state::{Readiness, State, Why};
use crate::scheduler::{Core, StagingCounts};
use crate::serve::Server;
use crate::table::{SlotCounts, TierStats, Violation};

/// What is not an engine's business: a manager's state, its counts, and commands given by hand.
/// [`Manager::admin`] gives it.
#[derive(Clone, Copy, Debug)]
pub struct Admin<'a>(pub(super) &'a Manager);

impl<'a> Admin<'a> {
    /// Its state at a glance. Of a hybrid model routes, look-ups and faults are those of full
    /// attention.
    pub fn state(self) -> State {
        self.0.observed.state().expect("the manager holds what is observed")
    }

    /// Whether it is usable, and which parts of it are degraded.
    pub fn readiness(self) -> Readiness {
        self.0.observed.readiness()
    }

    /// How much of `chain` each tier holds, and why not more. It has no side effect.
    pub fn why<'c>(self, chain: impl Into<Chain<'c>>) -> Why {
        self.0.observed.why(chain.into()).expect("the manager holds what is observed")
    }

    /// What a request found when it last asked; `None`: it is not among the recent ones, or
    /// requests are not remembered (they are from [`remember_requests`](Self::remember_requests)
    /// on).
    pub fn why_of(self, request: RequestId) -> Option<Why> {
        self.0.observed.why_of(request)
    }

    /// The present epoch: that of the [fingerprint](crate::Options::fingerprint), or 0, until the
    /// first [`reset`](Manager::reset).
    pub fn epoch(self) -> u64 {
        self.0.core().table().epoch()
    }

    /// From here on remembers what the last 4,096 requests found. A manager that serves HTTP
    /// (`metrics.enabled`) always does.
    pub fn remember_requests(self) {
        self.0.core.remember_requests();
    }

    /// Does the background work that is due: call it after moving a manual clock.
    pub fn tick(self) {
        self.0.cores().for_each(|core| core.wake());
    }

    /// The address where it serves HTTP; `None`: it does not (`metrics.enabled`).
    pub fn serving_at(self) -> Option<SocketAddr> {
        self.0.server.lock().as_ref().map(Server::address)
    }

    /// The routing table: which backend copies blocks between which tiers.
    pub fn routes(self) -> &'a [RouteReport] {
        self.0.observed.routes()
    }

    /// Whose memory the device tier is: `emulated` (the host's) or `cuda`; `None`: there is no such
    /// tier.
    pub fn device(self) -> Option<&'static str> {
        self.0.device.as_ref().map(|device| device.name())
    }

    /// Occupancy of a tier, of all cache groups.
    pub fn counts(self, tier: Tier) -> SlotCounts {
        self.0.cores().map(|core| core.table().counts(tier)).sum()
    }

    /// Counts of a tier since the start, of all cache groups.
    pub fn stats(self, tier: Tier) -> TierStats {
        self.0.cores().map(|core| core.table().stats(tier)).sum()
    }

    /// Copies that are overdue now: their media completed nothing for too long, and no caller waits
    /// for them any more. Each holds the slot that it writes, and one that bounces also holds its
    /// staging slot.
    pub fn overdue(self) -> u64 {
        self.0.cores().map(|core| core.overdue_in_all()).sum()
    }

    /// Occupancy of the DRAM slots through which blocks bounce between tiers without a direct
    /// route.
    pub fn staging(self) -> StagingCounts {
        self.0.core.staging()
    }

    /// Bytes copied so far, on each route that has copied any.
    pub fn bytes(self) -> Vec<(Tier, Tier, u64)> {
        let bytes_of = |route| self.0.cores().map(|core| core.metrics().bytes(route)).sum();
        let bytes = Route::all().map(|route| (route.from, route.to, bytes_of(route)));
        bytes.filter(|&(.., bytes)| bytes > 0).collect()
    }

    /// Copies that failed so far.
    pub fn failures(self) -> u64 {
        Route::all()
            .flat_map(|route| self.0.cores().map(move |core| core.metrics().failures(route)))
            .sum()
    }

    /// The share of recently requested blocks, 0 to 1, that an LRU tier of `capacity` blocks would
    /// have held: an estimate from a sample of the requests.
    pub fn estimated_hit_rate(self, capacity: u32) -> f64 {
        self.0.core.estimated_hit_rate(capacity)
    }

    /// What was found at the start in tiers that an earlier process left.
    pub fn recovered(self) -> &'a [RecoveryReport] {
        self.0.durable.reports()
    }

    /// Every invariant of the table that does not hold, and whether the background audit found a
    /// broken one lately. Linear in the number of blocks.
    pub fn audit(self) -> Vec<Violation> {
        self.0.cores().flat_map(|core| violations(core)).collect()
    }

    /// [`counts`](Self::counts) of a cache group; zeroes where there is none of that number.
    pub fn counts_of(self, group: u8, tier: Tier) -> SlotCounts {
        self.0.manager_of(group).map(|group| group.core().table().counts(tier)).unwrap_or_default()
    }

    /// Evicts up to `blocks` blocks of `tier`, in the order of its policy; returns how many. Leased
    /// blocks stay, and so do dirty ones, unless the tier below cannot be written now. Of a hybrid
    /// model, blocks of full attention go first; their checkpoints follow uncounted.
    pub fn evict(self, tier: Tier, blocks: usize) -> usize {
        let evict = |done, core: &Arc<Core>| done + core.evict(tier, blocks - done);
        self.0.cores().fold(0, evict)
    }

    /// [`evict`](Self::evict) of a cache group.
    pub fn evict_of(self, group: u8, tier: Tier, blocks: usize) -> usize {
        self.0.manager_of(group).map_or(0, |group| group.core().evict(tier, blocks))
    }

    /// Which hits of a lease the engine should compute again, for
    /// [`shadow_compare`](Self::shadow_compare): of the share `transfer.shadow_share` of all leases
    /// that a tier below the device has something for, all of that; none unless it is set. A block
    /// cannot be computed without those before it, so what is served of a lease is not independent
    /// of what is compared.
    pub fn shadow_sample(self, lease: &Lease) -> Vec<ShadowSample> {
        let held = lease.held();
        let below = held.plan().filter(|(tier, _)| *tier > Tier::Device);
        let hits: Vec<_> = below
            .flat_map(|(tier, range)| range.map(move |position| ShadowSample { position, tier }))
            .collect();
        if hits.is_empty() || !self.0.shadow.chooses() { Vec::new() } else { hits }
    }

    /// Compares a block that was served with what the engine computed for the same tokens, both as
    /// they lie in its memory. One that is further off than two computations are
    /// ([`Elements::tolerance`]) leaves every tier, with its descendants. A tier in which more than
    /// one block in a thousand is wrong, with a confidence of 95 %, neither gives nor takes blocks
    /// until the next [`reset`](Manager::reset).
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): these are not two computations of one
    /// block.
    pub fn shadow_compare<'c>(
        self,
        chain: impl Into<Chain<'c>>,
        sample: &ShadowSample,
        elements: Elements,
        served: &[u8],
        recomputed: &[u8],
    ) -> Result<ShadowVerdict> {
        let (chain, tier) = (chain.into(), sample.tier);
        if sample.position >= chain.len() {
            return Err(Error::invalid("the sample is of a longer chain: give that one"));
        }
        let verdict = shadow::compare(elements, served, recomputed)?;
        let wrong = match verdict {
            ShadowVerdict::Same => None,
            ShadowVerdict::Wrong { distance } => Some(distance),
        };
        let (counts, is_guilty) = self.0.shadow.note(tier, wrong.is_some());
        self.0.core.metrics().shadowed(tier, wrong.is_some(), counts.upper_bound());
        if let Some(distance) = wrong {
            tracing::error!(%tier, distance, "a block is not what its name says: it is dropped");
            self.0.core.drop_wrong(chain, sample.position);
        }
        if is_guilty {
            tracing::error!(%tier, ?counts, "too many blocks of a tier are wrong: it gives nothing any more");
            self.0.core.withdraw(tier);
        }
        Ok(verdict)
    }

    /// What was compared of a tier's blocks since the last [`reset`](Manager::reset).
    pub fn shadow_counts(self, tier: Tier) -> ShadowCounts {
        self.0.shadow.counts(tier)
    }
}

fn violations(core: &Core) -> Vec<Violation> {
    let mut violations = core.table().audit();
    let drift = core.accounting_drift();
    if drift > 0 {
        violations.push(Violation(format!(
            "the audit in the background found {drift} (the log has them)"
        )));
    }
    violations
}
