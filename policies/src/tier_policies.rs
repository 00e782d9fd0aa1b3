//! All policies of one tier, and the reuse model that they share.

use crate::admission::rule::{Admission, Candidates, Trigger};
use crate::eviction::policy::Eviction;
use crate::reuse::{LastUse, ReuseModel};
use crate::seam::{Access, BlockId, Ended, Forest, Upkeep};

/// The policies of one tier: which of its blocks leaves it, and which of them go to the tier below.
///
/// They share one [`ReuseModel`], which is told of each event once and before they are: two models
/// of one tier would learn the same twice. If no policy asks a model, none is fed.
#[derive(Debug)]
pub struct TierPolicies {
    pub(crate) reuse: ReuseModel,
    eviction: Box<dyn Eviction>,
    admission: Option<Box<dyn Admission>>,
}

impl TierPolicies {
    /// `admission` decides what goes down; without it, the owner does.
    pub fn new(eviction: Box<dyn Eviction>, admission: Option<Box<dyn Admission>>) -> Self {
        let needs_reuse =
            eviction.needs_reuse() || admission.as_ref().is_some_and(|rule| rule.needs_reuse());
        let reuse = if needs_reuse { ReuseModel::default() } else { ReuseModel::idle() };
        Self { reuse, eviction, admission }
    }

    /// Which request used `block` last, the last one of a path of `depth` blocks: what leaves goes
    /// down in its name. `None` if no policy of the tier needs the reuse model, which knows.
    pub fn last_use(&self, block: BlockId, depth: u32) -> Option<LastUse> {
        self.reuse.last_use(block, depth)
    }

    /// Blocks that the eviction charges to a tenant.
    pub fn charged_to(&self, tenant: Option<u32>) -> u32 {
        self.eviction.charged_to(tenant)
    }

    /// Whether a rule decides which blocks go down.
    pub const fn has_admission(&self) -> bool {
        self.admission.is_some()
    }

    /// A request used the path that ends at `access.deepest`, whose last `access.inserted` blocks
    /// are new.
    pub fn touch(&mut self, access: &Access, forest: &dyn Forest) {
        // The model first: the policies ask it what this use has changed.
        self.reuse.touch(access, forest);
        self.eviction.touch(access, forest, &self.reuse);
        if let Some(rule) = &mut self.admission {
            rule.touch(access, forest);
        }
    }

    /// `block`, whose content `key` names (see [`Forest::key`]), left the tier; it was a leaf.
    /// `exposed` is its parent where that is a leaf from now on.
    pub fn removed(&mut self, block: BlockId, key: u64, exposed: Option<BlockId>) {
        self.reuse.removed(block, key);
        self.eviction.removed(block, exposed, &self.reuse);
    }

    /// `block` is a leaf and no longer busy; [`victim`](Self::victim) may have passed it over while
    /// it was.
    pub fn released(&mut self, block: BlockId) {
        self.eviction.released(block, &self.reuse);
    }

    /// A request has ended.
    pub fn finished(&mut self, ended: &Ended) {
        self.reuse.finished(ended);
        self.eviction.finished(&self.reuse);
        if let Some(rule) = &mut self.admission {
            rule.finished(ended);
        }
    }

    /// Takes a bounded step of what is due besides, and adds to `work` what another thread is to
    /// do; its result comes back on its own. Call it now and then, and again at once when it
    /// returns true.
    pub fn upkeep(&mut self, work: &mut Vec<Upkeep>) -> bool {
        if let Some(rule) = &mut self.admission {
            rule.upkeep(work);
        }
        self.reuse.upkeep(work)
    }

    /// The leaf to evict next, or `None` when every leaf is busy. The block stays until
    /// [`removed`](Self::removed).
    pub fn victim(&mut self, forest: &dyn Forest) -> Option<BlockId> {
        self.eviction.victim(forest, &self.reuse)
    }

    /// Whether the tier may turn blocks away: see [`Eviction::may_decline`].
    pub fn may_decline(&self) -> bool {
        self.eviction.may_decline()
    }

    /// How many of the candidates go down, from the first one on. The caller writes them.
    pub fn admit(
        &mut self,
        candidates: Candidates,
        trigger: Trigger,
        now_ms: u64,
        forest: &dyn Forest,
    ) -> u32 {
        // Without a rule the caller has decided already.
        let Some(rule) = &mut self.admission else { return candidates.blocks };
        rule.admit(candidates, trigger, now_ms, forest, &self.reuse)
    }

    /// This number of the blocks just admitted was not written: the lower tier had no room for
    /// them.
    pub fn refund(&mut self, blocks: u32) {
        if let Some(rule) = &mut self.admission {
            rule.refund(blocks);
        }
    }
}
