//! Policies of the KV block manager: which block leaves a tier, which may enter it, what is
//! flushed.
//!
//! Everything here is pure: no I/O, no clock, no async, no threads. The block table calls a policy
//! under its lock and passes the time in; the [`simulation`] module drives the same policies over a
//! trace without any table, which is how `kvbm plan` predicts hit rates.
//!
//! | module | holds |
//! |---|---|
//! | [`eviction`] | the [`Eviction`] trait and one file for each policy |
//! | [`admission`] | the [`Admission`] trait: which blocks are copied to the tier below, and when |
//! | [`reuse`] | the [`ReuseModel`] of a tier, which both borrow: how soon blocks return |
//! | [`checkpoints`] | what is kept of layers with a window or a state |
//! | `chunk_cache` | [`ChunkCache`]: a cache that an engine keeps itself, which only asks what goes |
//! | `seam` | what the owner of a tier and its policies say to each other, and the [`TierPolicies`] that hear it |
//! | `gradual` | arrays and maps that never grow all at once |
//! | [`sample`] | a few blocks that stand for all, and the hot ones that stand for themselves |
//! | [`miss_ratio`] | hit rate against capacity, in one pass |
//! | [`offload`] | whether a decode worker computes a prompt itself, or a prefill worker does |
//! | [`split`](mod@split) | how much of what is held is sooner loaded than computed again |
//! | [`simulation`] | policies over a trace |

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod admission;
pub mod checkpoints;
mod chunk_cache;
pub mod eviction;
mod gradual;
pub mod miss_ratio;
pub mod offload;
pub mod reuse;
pub mod sample;
mod seam;
pub mod simulation;
pub mod split;
#[cfg(test)]
mod testing;

pub use admission::{Admission, AdmissionKind, Candidates, Trigger};
pub use checkpoints::{CheckpointGrid, CheckpointPart};
pub use chunk_cache::{ChunkCache, ChunkKey};
pub use eviction::{Eviction, EvictionKind, UnknownEviction};
pub use miss_ratio::MissRatio;
pub use offload::should_offload_prefill;
pub use reuse::{LastUse, ReuseModel};
pub use sample::{Sample, SampledRequests};
pub use seam::{Access, BlockId, Ended, Forest, Hints, RequestId, Standing, TierPolicies, Upkeep};
pub use simulation::hierarchy::{Hierarchy, HierarchyOutcome, TierPlan};
pub use simulation::miniature::{Miniature, TraceThinning};
pub use simulation::single::{Outcome, Policy, simulate};
pub use simulation::workload::{BLOCK_TOKENS, Request, Running, Workload};
pub use split::{Leg, split};
