//! A core over tiers without memory, whose copies end when a test says so.

use std::sync::Arc;
use std::time::Duration;

use kvbm::scheduler::{Core, Tuning};
use kvbm::table::{TierSet, TransferPlan};
use kvbm::{BlockHash, Chain, Class, Defect, RequestInfo, Tier, Transfer, Transferred};
use kvbm_tiers::testing::ParkedBackend;
use kvbm_tiers::{Backend, CopyError, CopyErrorKind, Route};

use crate::rig::{Sizes, TIGHT, TestClock, bare_core_by, finish_all, parked_backend, seed};

/// No copy is overdue while a test thinks.
pub const PATIENT: Tuning = Tuning {
    timeout: Duration::from_mins(1),
    object_timeout: Duration::from_mins(1),
    max_batch: 8,
    ..TIGHT
};

/// A core, and the backend of all its routes.
#[derive(Debug)]
pub struct Parked {
    /// What is tested.
    pub core: Arc<Core>,
    /// What parks its copies.
    pub parked: Arc<ParkedBackend>,
    /// Its clock.
    pub clock: Arc<TestClock>,
}

impl Parked {
    /// Tiers of these sizes, empty.
    pub fn new(sizes: Sizes, tuning: Tuning) -> Self {
        let parked = parked_backend();
        let clock = Arc::new(TestClock::simulated());
        let core = bare_core_by(
            Arc::clone(&clock),
            sizes,
            tuning,
            &(Arc::clone(&parked) as Arc<dyn Backend>),
        );
        Self { core, parked, clock }
    }

    /// Makes a chain resident in a tier.
    pub fn seed(&self, tier: Tier, chain: &[BlockHash]) {
        seed(&self.core, tier, Chain::from(chain));
    }

    /// Leases a chain and has it brought to a tier.
    pub fn transfer(&self, class: Class, to: Tier, chain: &[BlockHash]) -> Transfer<Transferred> {
        let lease = self.core.lease(Chain::from(chain), RequestInfo::default());
        self.core.transfer(class, to, lease)
    }

    /// The plan of the same, traced. From the tiers of `through` nothing leads there but through
    /// the host.
    pub fn plan(
        &self,
        class: Class,
        to: Tier,
        chain: &[BlockHash],
        through: TierSet,
    ) -> TransferPlan {
        let mut table = self.core.table();
        let pins = table.lease(Chain::from(chain), RequestInfo::default());
        let mut plan = TransferPlan::copying(class, to, pins);
        while !table.trace(&mut plan) {}
        plan.pass_host_from(through);
        plan
    }

    /// Copies that are parked now.
    pub fn pending(&self) -> Vec<(u64, Route)> {
        self.parked.pending().into_iter().map(|pending| (pending.id, pending.op.route())).collect()
    }

    /// How many of them are on a route.
    pub fn pending_on(&self, route: Route) -> usize {
        self.pending().into_iter().filter(|&(_, other)| other == route).count()
    }

    /// Ends one.
    ///
    /// # Panics
    /// If it is not parked.
    pub fn finish(&self, id: u64, result: Result<(), CopyErrorKind>) {
        assert!(
            self.parked.finish(id, result.map_err(|kind| CopyError::new(kind, "as the test says")))
        );
    }

    /// Ends all, and those that follow from them, well.
    pub fn finish_all(&self) {
        finish_all(&self.parked);
    }

    /// Leading blocks of a chain that a tier holds.
    pub fn held(&self, tier: Tier, chain: &[BlockHash]) -> usize {
        self.core.table().matches(Chain::from(chain)).blocks(tier)
    }

    /// Drops block `depth` of a chain from a tier.
    ///
    /// # Panics
    /// If it is not resident there.
    pub fn quarantine(&self, tier: Tier, chain: &[BlockHash], depth: usize) {
        let key = Chain::from(chain).key(depth);
        let mut table = self.core.table();
        let (found, pins) = table.pin_resident(tier, key).expect("a resident block");
        table.release(pins);
        assert!(table.quarantine(key, found, Defect::Corrupt) > 0);
    }
}
