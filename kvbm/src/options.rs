//! What a manager is opened with besides its settings, and what came of them.

use std::sync::Arc;

use kvbm_tiers::Tier;
use kvbm_tiers::chaos::Chaos;
use prometheus::Registry;

use crate::clock::{Clock, SystemClock};
use crate::durable::OnDurable;
use crate::fingerprint::Fingerprint;
use crate::ranks::RankGroup;

/// What a manager is opened with besides its settings.
#[derive(Debug)]
pub struct Options {
    /// Where its metrics are registered.
    pub registry: Registry,
    /// Time for policies and flushing.
    pub clock: Arc<dyn Clock>,
    /// Tokens in a block, for metrics.
    pub block_tokens: u64,
    /// What the bytes of its blocks depend on besides tokens. Blocks of different fingerprints share neither names nor
    /// files nor objects. `None`: whoever opens the manager sees to that.
    pub fingerprint: Option<Fingerprint>,
    /// The processes whose memory, files and objects the tiers are; `None`: those of this process.
    pub ranks: Option<RankGroup>,
    /// Who is told what has become durable in tiers that outlive the process.
    pub on_durable: Option<OnDurable>,
    /// What goes wrong on purpose with the copies of all tiers, for tests.
    pub chaos: Option<Chaos>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            registry: Registry::new(),
            clock: Arc::new(SystemClock::default()),
            block_tokens: 16,
            fingerprint: None,
            ranks: None,
            on_durable: None,
            chaos: None,
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
