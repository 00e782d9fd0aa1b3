//! What a manager is opened with besides its settings, and what came of them.

use std::sync::Arc;

use kvbm_tiers::{MediaLayer, Tier};
use prometheus::Registry;

use crate::api::engine_memory::EngineMemory;
use crate::api::groups::CacheGroup;
use crate::api::rank::RankGroup;
use crate::clock::{Clock, SystemClock};
use crate::durable::OnDurable;
use crate::names::fingerprint::Fingerprint;

/// What a manager is opened with besides its settings.
#[derive(Debug)]
pub struct Options {
    /// Where its metrics are registered.
    pub registry: Registry,
    /// Time for policies and flushing.
    pub clock: Arc<dyn Clock>,
    /// Tokens in a block, for metrics.
    pub block_tokens: u64,
    /// An engine's own memory, in place of a device tier: [saves from](crate::Manager::save_from)
    /// and [loads into](crate::Manager::load_into) its slots take blocks from there and bring them.
    pub engine: Option<EngineMemory>,
    /// Of a hybrid model: the engine's layers that do not keep every block, each group with its
    /// memory; those of `engine` do. Tier sizes in bytes are for all groups together. Sizes in
    /// blocks are of full attention, and the other groups get theirs in addition.
    pub groups: Vec<CacheGroup>,
    /// What the bytes of its blocks depend on besides tokens. Blocks of different fingerprints
    /// share neither names nor files nor objects. `None`: the caller keeps them apart.
    pub fingerprint: Option<Fingerprint>,
    /// The processes whose memory, files and objects the tiers are; `None`: those of this process.
    pub ranks: Option<RankGroup>,
    /// Called with what has become durable in tiers that outlive the process.
    pub on_durable: Option<OnDurable>,
    /// Stands around the media of all tiers: injects faults, for tests.
    pub media_layer: Option<Arc<dyn MediaLayer>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            registry: Registry::new(),
            clock: Arc::new(SystemClock::default()),
            block_tokens: 16,
            engine: None,
            groups: Vec::new(),
            fingerprint: None,
            ranks: None,
            on_durable: None,
            media_layer: None,
        }
    }
}

/// A row of the routing table.
#[derive(Clone, Debug, serde::Serialize)]
pub struct RouteReport {
    /// Source tier.
    pub from: Tier,
    /// Destination tier.
    pub to: Tier,
    /// The backend's name, or `via host`.
    pub backend: String,
}
