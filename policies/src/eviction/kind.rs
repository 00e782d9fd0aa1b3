//! Policies by their names.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use thiserror::Error;

use super::arc::Arc;
use super::fifo::Fifo;
use super::hazard::Hazard;
use super::lfu::Lfu;
use super::lirs::Lirs;
use super::lru::Lru;
use super::lru2::Lru2;
use super::policy::Eviction;
use super::s3fifo::S3Fifo;
use super::sieve::Sieve;
use super::slru::Slru;
use super::turn::Turn;

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
        Self::ALL
            .into_iter()
            .find(|kind| kind.name().eq_ignore_ascii_case(name))
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
