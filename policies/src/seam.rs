//! The interface between the owner of a tier and the tier's policies: what they say to each other,
//! and [`TierPolicies`], through which the owner says it.

use xxhash_rust::xxh3::xxh3_64;

use crate::admission::{Admission, Candidates, Trigger};
use crate::eviction::Eviction;
use crate::reuse::{LastUse, ReuseModel};

/// Memory is set aside for at most this number of blocks, whatever a tier's nominal size. Beyond,
/// policies grow as they are used.
pub(crate) const PREPARED_BLOCKS: u32 = 1 << 20;

/// One block in one tier. Dense (the tier's slot number), so that a policy may keep its state in a
/// `Vec`. An id is reused after its block was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// What `list` has of the block, which it reaches from here on.
    pub(crate) fn entry<T: Default>(self, list: &mut Vec<T>) -> &mut T {
        let at = self.0 as usize;
        if list.len() <= at {
            list.resize_with(at + 1, T::default);
        }
        &mut list[at]
    }
}

/// Names a request for as long as it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl RequestId {
    /// Of a request that the engine names by text: a whole number is itself, other text its hash.
    /// That has 53 bits, which every reader of JSON keeps.
    ///
    /// ```
    /// # use kvbm_policies::RequestId;
    /// assert_eq!(RequestId::named("17"), RequestId(17));
    /// assert!(RequestId::named("chatcmpl-17").0 < 1 << 53);
    /// ```
    pub fn named(name: &str) -> Self {
        Self(name.parse().unwrap_or_else(|_| xxh3_64(name.as_bytes()) >> (u64::BITS - 53)))
    }
}

/// One request's use of one tier. It may come in parts, each with more of the path than the last.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Milliseconds since an arbitrary origin, never decreasing.
    pub now_ms: u64,
    /// The request, which ties the parts of its use together. `None` where the engine does not say:
    /// then a part that inserts blocks is taken for the same request as the last use of the block
    /// above them.
    pub request: Option<RequestId>,
    /// The deepest block of the request's path that the tier holds. Its ancestors were used with
    /// it.
    pub deepest: BlockId,
    /// Blocks of the path that the tier holds, `deepest` included.
    pub depth: u32,
    /// How many of these entered the tier with this access (they are the last ones of the path).
    pub inserted: u32,
    /// Blocks of the request's whole path, so far as they are known: at least `depth`.
    pub path: u32,
    /// What the engine says about the request.
    pub hints: Hints,
}

/// What an engine may say about a request. Nothing need be said; policies use what they can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// How many tokens it is expected to generate.
    pub expected_output_tokens: Option<u32>,
    /// No request will continue it: what lies below the last fork of its path, and so only it has
    /// used, is worthless from now on.
    pub will_not_return: bool,
    /// The tenant it belongs to: see [`Tenants`](crate::eviction::Tenants).
    pub tenant: Option<u32>,
    /// How much its blocks matter beside others of the same tenant, from 0 to 100; 50 is usual.
    pub priority: Option<u8>,
}

impl Hints {
    /// What a later part of a request's use says besides. It takes nothing back.
    pub(crate) fn merge(&mut self, later: &Self) {
        self.expected_output_tokens = later.expected_output_tokens.or(self.expected_output_tokens);
        self.will_not_return |= later.will_not_return;
        self.tenant = self.tenant.or(later.tenant);
        self.priority = later.priority.or(self.priority);
    }
}

/// A request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which.
    pub request: RequestId,
    /// What it generated. It is not known earlier.
    pub output_tokens: u32,
    /// No request will continue it: as [`Hints::will_not_return`], said when it is known best.
    pub will_not_return: bool,
    /// When, in milliseconds of the same origin as [`Access::now_ms`].
    pub at_ms: u64,
}

/// Work that a policy wants done off the request path. It holds what it needs and hands its result
/// back to the policy on its own; dropping it undone is harmless.
pub type Upkeep = Box<dyn FnOnce() + Send>;

/// What may be done with a block right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It has resident children: never a victim.
    Interior,
    /// A leaf that is leased, in flight or not yet flushed: not now.
    Busy,
    /// A leaf that may go.
    Evictable,
}

/// The tier's structure, as its owner knows it.
pub trait Forest {
    /// What may be done with `block`.
    fn standing(&self, block: BlockId) -> Standing;
    /// The block before `block` in its chain; `None` at a root.
    fn parent(&self, block: BlockId) -> Option<BlockId>;
    /// Names the content of `block`: the same whenever the block returns, whatever its id is then.
    fn key(&self, block: BlockId) -> u64;
    /// Whether the owner has the time for another block to be looked at. Asked before each that a
    /// search for a victim looks at: it may meet thousands that are busy. A search that ends here
    /// goes on from there when it is asked for again, so that it comes to its end however short its
    /// parts are.
    fn may_look(&self) -> bool {
        true
    }
}

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
