//! A KV block manager for LLM inference: it keeps the KV cache of past prompts in a hierarchy of
//! tiers and gives it back instead of recomputing it.
//!
//! | module | holds |
//! |---|---|
//! | `api` | what an engine talks to: manager, leases, transfers, its own memory, cache groups, ranks |
//! | `names` | names of blocks |
//! | `table` | which block lies in which slot of which tier; leases; flushing and eviction. Bookkeeping only |
//! | `task` | what the table asks of the scheduler, and what it is told: plain data |
//! | `scheduler` | moves blocks: queues, batches, breakers, time-outs, flushing |
//! | `assemble` | the place that names concrete backends (but for ranks) and policies |
//! | `durable` | what outlives the process: the indices of tiers whose slots do |
//! | `observe` | what a manager reports of itself, its blocks and its requests |
//! | `peers` | other workers, whose blocks can be brought here |
//! | `metrics` | what is counted, for Prometheus |
//! | `serve` | metrics, state and look-ups over HTTP, for Prometheus, people and programs; behind a feature |
//! | `traces` | spans for an OpenTelemetry collector and a profiler; behind features |
//! | `clock`, `error`, `sync` | time, errors, locks and threads, with few exceptions from one place |
//! | `secret` | secrets in files |
//!
//! Data flows one way: engine → manager (lease, load, save) → table ⇄ policies → scheduler →
//! executor → `kvbm_tiers` backends → completion → table.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod api;
mod assemble;
mod clock;
mod durable;
mod error;
mod metrics;
mod names;
mod observe;
mod peers;
#[cfg(feature = "testing")]
pub mod scheduler;
#[cfg(not(feature = "testing"))]
#[allow(dead_code, unreachable_pub, unused_imports, reason = "tests see it by a feature")]
mod scheduler;
mod secret;
#[cfg(feature = "serve")]
mod serve;
#[cfg(not(feature = "serve"))]
#[path = "serve/absent.rs"]
mod serve;
mod sync;
#[cfg(feature = "testing")]
pub mod table;
#[cfg(not(feature = "testing"))]
#[allow(dead_code, unreachable_pub, unused_imports, reason = "tests see it by a feature")]
mod table;
mod task;
mod traces;

pub use api::admin::Admin;
pub use api::allocation::Allocation;
pub use api::blocking;
pub use api::engine_memory::EngineMemory;
pub use api::groups::{CacheGroup, CheckpointsSaved, GroupKind, GroupSlots, SaveRequest};
pub use api::kv_transfer::{KvMoved, KvPlace, KvTransfer};
pub use api::layers::{LayeredPut, LayeredSave};
pub use api::lease::{AnyLease, Lease};
pub use api::manager::{Closing, Manager, Options, RequestEnd, RouteReport};
pub use api::rank::{Rank, RankGroup, RankOptions};
pub use api::transfer::{Loaded, Saved, Transfer, Transferred, Writers};
pub use assemble::{
    GpuReport, NixlReport, PluginReport, installed_nixl_plugins, main_keys, probe_gpu, probe_nixl,
    store_options,
};
pub use clock::{Clock, JumpingClock, ManualClock, SystemClock};
pub use durable::{DurableEvent, OnDurable, RecoveryReport};
pub use error::{Error, ErrorKind, Result};
pub use kvbm_policies::{Hints, RequestId};
pub use kvbm_tiers::ranks::{RankLoad, SliceLoad};
pub use kvbm_tiers::{
    BlockKey, DeviceRegion, Fence, HostFence, Part, SegmentMap, SlotId, Space, Tier,
};
pub use metrics::Metrics;
pub use names::epoch::NewEpoch;
pub use names::fingerprint::{Fingerprint, Hashing, KvLayout, Ranks, Rope};
pub use names::hash::{BlockHash, Chain, ChainHasher};
pub use observe::events::{CacheEvent, CachedBlock, Events, RemoveReason, StoreReason};
pub use observe::requests::FromPeer;
pub use observe::shadow::{Elements, ShadowCounts, ShadowSample, ShadowVerdict};
pub use observe::state::{
    BreakerState, Degraded, FaultState, Found, LookupCounts, Missing, NamespaceState, Readiness,
    RouteState, State, TierState, Why,
};
pub use peers::discovery::{
    EtcdSource, EtcdTls, EtcdUser, PeerAddress, PeerList, PeerSource, PeerWatch,
};
#[cfg(feature = "testing")]
pub use peers::read_peer_frame;
pub use peers::{
    ChainNames, FollowRequest, PeerFaultState, PeerLease, PeerOffer, PeerReport, PeerState, Peers,
    PeersState, Pulled, look_at_peers,
};
pub use scheduler::{Drained, StagingCounts};
#[cfg(feature = "serve")]
pub use serve::TIER_COLORS;
pub use table::{Match, MissReason, RequestInfo, SlotCounts, TierStats, Violation};
#[cfg(feature = "testing")]
pub use table::{TableGuard, longest_hold};
pub use task::{Class, CopyTask, Defect, Outcome, TaskId, TaskResult, TransferId};
#[cfg(feature = "nvtx")]
pub use traces::NvtxRanges;
#[cfg(feature = "otel")]
pub use traces::SpanExport;
