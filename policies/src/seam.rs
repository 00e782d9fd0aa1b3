//! The interface between the owner of a tier and the tier's policies.

use xxhash_rust::xxh3::xxh3_64;

/// Memory is set aside for at most this number of blocks, whatever a tier's nominal size. Beyond,
/// policies grow as they are used.
pub(crate) const PREPARED_BLOCKS: u32 = 1 << 20;

/// One block in one tier. Dense (the tier's slot number), so that a policy may keep its state in a
/// `Vec`. An id is reused after its block was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

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
