//! Policies of the KV block manager: which block leaves a tier, which may enter it, what is flushed.
//!
//! Everything here is pure: no I/O, no clock, no async, no threads. The block table calls a policy under its
//! lock and passes the time in; the [`simulate`](mod@simulate) module drives the same policies over a trace
//! without any table, which is how `kvbm plan` predicts hit rates.
//!
//! | module | holds |
//! |---|---|
//! | [`eviction`] | the [`Eviction`] trait and one file for each policy |
//! | [`admission`] | the [`Admission`] trait: which blocks are copied to the tier below, and when |
//! | [`workload`] | the requests of a trace, as paths through one forest of blocks |
//! | [`running`] | requests that have not ended: their output length is not known yet |
//! | [`sample`] | a few blocks that stand for all |
//! | [`miniature`] | a workload on a smaller scale |
//! | [`miss_ratio`] | hit rate against capacity, in one pass |
//! | [`split`](mod@split) | how much of what is held is sooner loaded than computed again |
//! | [`simulate`](mod@simulate) | one tier, one workload, one policy: the token hit rate |
//! | [`hierarchy`] | several tiers, one below another: hits in each, blocks written to each |

#![forbid(unsafe_code)]

pub mod admission;
pub mod eviction;
pub mod hierarchy;
pub mod miniature;
pub mod miss_ratio;
pub mod running;
pub mod sample;
pub mod simulate;
pub mod split;
mod stages;
mod tier;
pub mod workload;

pub use admission::{Admission, AdmissionKind, Candidates, Moment, UnknownAdmission};
pub use eviction::{
    Access, BlockId, Eviction, EvictionKind, Forest, Hints, RequestId, Standing, UnknownEviction, Upkeep,
};
pub use hierarchy::{Hierarchy, HierarchyOutcome, TierPlan};
pub use miniature::{Miniature, Thinning};
pub use miss_ratio::MissRatio;
pub use running::{Ended, Running};
pub use sample::Sample;
pub use simulate::{Outcome, Policy, simulate};
pub use split::{Leg, split};
pub use workload::{BLOCK_TOKENS, Request, Workload};
