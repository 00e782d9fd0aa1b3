//! What a plan found.

use serde::Serialize;

use super::model::KvModel;
use super::tiers::BitsStaircase;
use super::what_if::WhatIf;

/// What a plan found. Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(super) struct PlanOutcome {
    /// The trace, as it was named.
    pub(super) trace: String,
    pub(super) requests: u64,
    pub(super) prompt_tokens: u64,
    /// Distinct full blocks; an estimate where they are sampled.
    pub(super) blocks: u64,
    /// From the first request to the last one.
    pub(super) seconds: f64,
    /// Blocks that one in the sample stands for; 1 where all are simulated.
    pub(super) sample_stride: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) model: Option<KvModel>,
    /// One for each policy and capacity, in the order asked for: policy by policy.
    pub(super) rows: Vec<OutcomeRow>,
    /// LRU at many capacities; where it was asked what more would bring.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lru_curve: Option<MissCurve>,
    /// Several tiers together: one for each way of admission, the chosen one first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tiers: Vec<BitsStaircase>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) what_if: Option<WhatIf>,
    /// What the reader should know about the figures.
    pub(super) notes: Vec<String>,
}

/// One policy at one capacity.
#[derive(Debug, Serialize)]
pub(super) struct OutcomeRow {
    /// The policy's name.
    pub(super) eviction: &'static str,
    /// Blocks that the tier holds.
    pub(super) capacity: u32,
    /// What they take, where the model is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes: Option<u64>,
    /// Hit tokens over prompt tokens, to four decimals: 0 to 1.
    pub(super) token_hit_rate: f64,
}

/// Stack distances turned into hit rates.
#[derive(Debug, Serialize)]
pub(super) struct MissCurve {
    /// Capacity in blocks, and token hit rate.
    pub(super) points: Vec<(u32, f64)>,
    /// What measuring it took, per request of the trace.
    pub(super) microseconds_per_request: f64,
}
