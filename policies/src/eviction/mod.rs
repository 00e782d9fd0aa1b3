//! Which block leaves a tier when room is needed.
//!
//! A tier is *prefix-closed*: a block is resident only where its parent is. So the blocks of a tier
//! form a forest, and the only legal victims are its leaves. A policy ranks; the tier's owner keeps
//! the structure and answers questions about it through [`Forest`].
//!
//! | module | policy | victim |
//! |---|---|---|
//! | [`lru`] | `lru` | the leaf used least recently |
//! | [`lru`] | `fifo` | the leaf that came first |
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
//! | `residents` | | what policies know of a tier's blocks, and of those that have left |
//! | [`belady`] | `belady` | the leaf used again last; needs the future, so it only serves as a bound |

pub mod arc;
pub mod belady;
pub mod hazard;
pub mod lfu;
pub mod lirs;
pub mod lru;
pub mod lru2;
#[cfg(test)]
pub(crate) mod model;
#[cfg(test)]
mod properties;
mod residents;
pub mod s3fifo;
pub mod sieve;
pub mod slru;
pub mod tenants;
pub mod turn;

pub use arc::Arc;
pub use belady::Belady;
pub use hazard::Hazard;
pub use lfu::Lfu;
pub use lirs::Lirs;
pub use lru::{Fifo, Lru};
pub use lru2::Lru2;
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;
pub use slru::Slru;
pub use tenants::{TenantTerms, Tenants};
pub use turn::Turn;

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use thiserror::Error;

use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Forest};

/// An eviction policy of one tier. Victims are leaves, always.
///
/// Calls come in this order for a block: it is part of a path given to [`touch`](Self::touch), any
/// number of times; it may be named by [`victim`](Self::victim) and passed over as busy, then
/// handed back by [`released`](Self::released); [`removed`](Self::removed) ends its life.
///
/// Each call borrows the tier's [`ReuseModel`], which is told of the event before the policy is. It
/// knows nothing unless a policy [needs](Self::needs_reuse) it.
pub trait Eviction: Send + fmt::Debug {
    /// Whether it goes by what the tier's reuse model knows.
    fn needs_reuse(&self) -> bool {
        false
    }

    /// A request used the path that ends at `access.deepest`, whose last `access.inserted` blocks
    /// are new.
    fn touch(&mut self, access: &Access, forest: &dyn Forest, reuse: &ReuseModel);

    /// `block` left the tier (it was a leaf). `exposed` is its parent where that is a leaf from now
    /// on.
    fn removed(&mut self, block: BlockId, exposed: Option<BlockId>, reuse: &ReuseModel);

    /// The leaf to evict next, or `None` when every leaf is busy. The block stays until `removed`.
    fn victim(&mut self, forest: &dyn Forest, reuse: &ReuseModel) -> Option<BlockId>;

    /// `block` is a leaf and no longer busy; `victim` may have passed it over while it was.
    fn released(&mut self, block: BlockId, reuse: &ReuseModel);

    /// A request has ended, of which `reuse` knows more now.
    fn finished(&mut self, _reuse: &ReuseModel) {}

    /// Blocks that are charged to a tenant. Empty where it does not distinguish tenants.
    fn charged_to(&self, _tenant: Option<u32>) -> u32 {
        0
    }

    /// Whether it may turn blocks away. Where room is short, those that are about to come are then
    /// shown to it before: touched under ids that no block of the tier has, perhaps named as
    /// victims among the others, and in any case removed again. Those that were not named come, and
    /// are touched under ids of their own.
    fn may_decline(&self) -> bool {
        false
    }
}

/// Which block leaves a full tier: the policies that a live tier may use, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EvictionKind {
    /// The leaf that brings the fewest expected hits for the time that it would be held; learned
    /// online: [`Hazard`].
    // At no size that was tried was it below `lru` (docs/policies.md).
    #[default]
    Hazard,
    /// The leaf used least recently: [`Lru`].
    Lru,
    /// The leaf that came first: [`Fifo`].
    Fifo,
    /// The leaf used least often, with aging: [`Lfu`].
    Lfu,
    /// The leaf whose last use but one is the longest ago: [`Lru2`].
    Lru2,
    /// Segmented LRU, blocks used again are protected: [`Slru`].
    Slru,
    /// The adaptive replacement cache: [`Arc`].
    Arc,
    /// Three static queues: [`S3Fifo`].
    S3Fifo,
    /// One queue and a hand: [`Sieve`].
    Sieve,
    /// Low inter-reference recency set: [`Lirs`].
    Lirs,
    /// LRU with grace for late turns of a conversation and for frequent use: [`Turn`].
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

    /// A fresh policy for a tier of `capacity` blocks. Block ids beyond the capacity work too; they
    /// make the policy's arrays grow while it is used.
    pub fn build(self, capacity: u32) -> Box<dyn Eviction> {
        match self {
            Self::Lru => Box::new(Lru::default()),
            Self::Fifo => Box::new(Fifo::default()),
            Self::Hazard => Box::new(Hazard::default()),
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

    /// By name, in any case.
    fn from_str(name: &str) -> Result<Self, UnknownEviction> {
        let known = Self::ALL.into_iter().find(|kind| kind.name().eq_ignore_ascii_case(name));
        known.ok_or_else(|| UnknownEviction {
            name: name.to_owned(),
            valid: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// A policy name that does not exist; says which do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown eviction policy `{name}`; valid: {valid}")]
pub struct UnknownEviction {
    name: String,
    valid: String,
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
