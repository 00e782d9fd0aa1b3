//! Which block leaves a tier when room is needed.
//!
//! A tier is *prefix-closed*: a block is resident only where its parent is. So the blocks of a tier
//! form a forest, and the only legal victims are its leaves. A policy ranks; the tier's owner keeps
//! the structure and answers questions about it through [`Forest`](crate::Forest).
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
mod kind;
mod leaf_queue;
pub mod lfu;
pub mod lirs;
pub mod lru;
pub mod lru2;
#[cfg(test)]
pub(crate) mod model;
pub(crate) mod policy;
#[cfg(test)]
mod properties;
mod rank_queue;
mod residents;
pub mod s3fifo;
pub mod sieve;
pub mod slru;
pub mod tenants;
pub mod turn;

pub use arc::Arc;
pub use belady::Belady;
pub use fifo::Fifo;
pub use hazard::Hazard;
pub use kind::{EvictionKind, UnknownEviction};
pub use lfu::Lfu;
pub use lirs::Lirs;
pub use lru::Lru;
pub use lru2::Lru2;
pub use policy::Eviction;
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;
pub use slru::Slru;
pub use tenants::{TenantTerms, Tenants};
pub use turn::Turn;
