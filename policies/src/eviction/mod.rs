//! Which block leaves a tier when room is needed.
//!
//! A tier is *prefix-closed*: a block is resident only where its parent is. So the blocks of a tier form a
//! forest, and the only legal victims are its leaves. A policy ranks; the tier's owner keeps the structure
//! and answers questions about it through [`Forest`].
//!
//! | module | policy | victim |
//! |---|---|---|
//! | [`lru`] | `lru` | the leaf used least recently |
//! | [`fifo`] | `fifo` | the leaf that came first |
//! | [`hazard`] | `hazard` | the leaf least likely to return for the time it would be held |
//! | [`lfu`] | `lfu` | the leaf used least often, with aging |
//! | [`lru2`] | `lru2` | the leaf whose last use but one is the longest ago |
//! | [`slru`] | `slru` | the leaf used least recently among those without protection |
//! | [`arc`] | `arc` | the leaf used least recently among those used once, or among the others |
//! | [`s3fifo`] | `s3fifo` | the leaf that came first among the new ones, or among the others |
//! | [`sieve`] | `sieve` | the first leaf ahead of the hand that was not used since it came by |
//! | [`lirs`] | `lirs` | the leaf that came first among those with a long gap between uses |
//! | [`turn`] | `turn` | the leaf used least recently, with grace for late turns and frequent use |
//! | [`tenants`] | | as another policy, fair between tenants |
//! | [`belady`] | `belady` | the leaf used again last; needs the future, so it only serves as a bound |

mod age_list;
pub mod arc;
pub mod belady;
pub mod fifo;
mod ghosts;
pub mod hazard;
mod leaf_queue;
pub mod lfu;
pub mod lirs;
pub mod lru;
pub mod lru2;
#[cfg(test)]
mod model;
#[cfg(test)]
mod properties;
mod residents;
pub mod s3fifo;
pub mod sieve;
pub mod slru;
pub mod tenants;
pub mod turn;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

pub use arc::Arc;
pub use belady::Belady;
pub use fifo::Fifo;
pub use hazard::Hazard;
pub use lfu::Lfu;
pub use lirs::Lirs;
pub use lru::Lru;
pub use lru2::Lru2;
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;
pub use slru::Slru;
pub use tenants::Tenants;
pub use turn::Turn;

/// Memory is set aside for so many blocks at most, whatever a tier's nominal size. Beyond, policies grow as
/// they are used.
const PREPARED_BLOCKS: u32 = 1 << 20;

/// One block in one tier. Dense (the tier's slot number), so that a policy may keep its state in a `Vec`.
/// An id is reused after [`Eviction::remove`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// Names a request for as long as it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One request's use of one tier. It may come in parts, each with more of the path than the last.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Milliseconds since an arbitrary origin, never decreasing.
    pub now_ms: u64,
    /// The request, which ties the parts of its use together. `None` where the engine does not say: then a
    /// part that inserts blocks is taken for the same request as the last use of the block above them.
    pub request: Option<RequestId>,
    /// The deepest block of the request's path that the tier holds. Its ancestors were used with it.
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
    /// Nobody will continue it: what it alone used is worthless from now on.
    pub will_not_return: bool,
    /// Whose it is: see [`Tenants`].
    pub tenant: Option<u32>,
    /// How much its blocks matter beside others of the same tenant, from 0 to 100; 50 is usual.
    pub priority: Option<u8>,
}

/// Work that a policy wants done off the request path. It holds what it needs and hands its result back to
/// the policy by itself; dropping it undone is harmless.
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
}

/// An eviction policy of one tier. Victims are leaves, always.
///
/// Calls come in this order for a block: it is part of a path given to [`touch`](Self::touch), any number of
/// times; it may be named by [`victim`](Self::victim) and passed over as busy, then handed back by
/// [`release`](Self::release); [`remove`](Self::remove) ends its life.
pub trait Eviction: Send + fmt::Debug {
    /// A request used the path that ends at `access.deepest`, whose last `access.inserted` blocks are new.
    fn touch(&mut self, access: &Access, forest: &dyn Forest);

    /// `block` left the tier (it was a leaf). `exposed` is its parent where that is a leaf from now on.
    fn remove(&mut self, block: BlockId, exposed: Option<BlockId>);

    /// The leaf to evict next, or `None` when every leaf is busy. The block stays until `remove`.
    fn victim(&mut self, forest: &dyn Forest) -> Option<BlockId>;

    /// `block` is a leaf and no longer busy; `victim` may have passed it over while it was.
    fn release(&mut self, block: BlockId);

    /// Whether it may turn blocks away. Where room is short, those that are about to come are then shown to it
    /// before: touched under ids that no block of the tier has, perhaps named as victims among the others, and in
    /// any case removed again. Those that were not named come, and are touched under ids of their own.
    fn may_decline(&self) -> bool {
        false
    }

    /// `request` has ended and generated `output_tokens`.
    fn finished(&mut self, _request: RequestId, _output_tokens: u32, _now_ms: u64) {}

    /// Work to do on another thread, or right away where time does not matter. To be asked for after
    /// accesses; it is seldom anything.
    fn upkeep(&mut self) -> Option<Upkeep> {
        None
    }
}

/// The policies that a live tier may use, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EvictionKind {
    /// [`Hazard`].
    #[default]
    Hazard,
    /// [`Lru`].
    Lru,
    /// [`Fifo`].
    Fifo,
    /// [`Lfu`].
    Lfu,
    /// [`Lru2`].
    Lru2,
    /// [`Slru`].
    Slru,
    /// [`Arc`].
    Arc,
    /// [`S3Fifo`].
    S3Fifo,
    /// [`Sieve`].
    Sieve,
    /// [`Lirs`].
    Lirs,
    /// [`Turn`].
    Turn,
}

impl EvictionKind {
    /// Every policy, the default first.
    pub const ALL: [Self; 11] = [
        Self::Hazard,
        Self::Lru,
        Self::Fifo,
        Self::Lfu,
        Self::Lru2,
        Self::Slru,
        Self::Arc,
        Self::S3Fifo,
        Self::Sieve,
        Self::Lirs,
        Self::Turn,
    ];

    /// The name used in settings and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Fifo => "fifo",
            Self::Hazard => "hazard",
            Self::Lfu => "lfu",
            Self::Lru2 => "lru2",
            Self::Slru => "slru",
            Self::Arc => "arc",
            Self::S3Fifo => "s3fifo",
            Self::Sieve => "sieve",
            Self::Lirs => "lirs",
            Self::Turn => "turn",
        }
    }

    /// A fresh policy for a tier of `capacity` blocks. Block ids beyond the capacity work too; they make the
    /// policy's arrays grow while it is used.
    pub fn build(self, capacity: u32) -> Box<dyn Eviction> {
        match self {
            Self::Lru => Box::new(Lru::with_capacity(capacity)),
            Self::Fifo => Box::new(Fifo::with_capacity(capacity)),
            Self::Hazard => Box::new(Hazard::with_capacity(capacity)),
            Self::Lfu => Box::new(Lfu::with_capacity(capacity)),
            Self::Lru2 => Box::new(Lru2::with_capacity(capacity)),
            Self::Slru => Box::new(Slru::with_capacity(capacity)),
            Self::Arc => Box::new(Arc::with_capacity(capacity)),
            Self::S3Fifo => Box::new(S3Fifo::with_capacity(capacity)),
            Self::Sieve => Box::new(Sieve::with_capacity(capacity)),
            Self::Lirs => Box::new(Lirs::with_capacity(capacity)),
            Self::Turn => Box::new(Turn::with_capacity(capacity)),
        }
    }
}

impl fmt::Display for EvictionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for EvictionKind {
    type Err = UnknownEviction;

    fn from_str(name: &str) -> Result<Self, UnknownEviction> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| UnknownEviction::new(name, Self::ALL.map(Self::name)))
    }
}

/// A policy name that does not exist; says which do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown eviction policy `{name}`; valid: {valid}")]
pub struct UnknownEviction {
    name: String,
    valid: String,
}

impl UnknownEviction {
    pub(crate) fn new(name: &str, valid: impl IntoIterator<Item = &'static str>) -> Self {
        let valid = valid.into_iter().collect::<Vec<_>>().join(", ");
        Self { name: name.to_owned(), valid }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_found_by_its_name() {
        for kind in EvictionKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
    }

    #[test]
    fn an_unknown_name_lists_the_valid_ones() {
        let error = "mru".parse::<EvictionKind>().unwrap_err();
        let expected = "unknown eviction policy `mru`; valid: hazard, lru, ";
        assert!(error.to_string().starts_with(expected), "{error}");
    }
}
