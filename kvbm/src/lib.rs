//! A KV block manager for LLM inference: it keeps the KV cache of past prompts in a hierarchy of tiers and
//! gives it back instead of recomputing it.
//!
//! | module | holds |
//! |---|---|
//! | `hash` | names of blocks: chained hashes |
//! | `fingerprint` | what the bytes of a block depend on besides its tokens |
//! | `events` | what comes to the tiers and leaves them, for whoever listens |
//! | `task` | what the table asks of the scheduler, and what it is told: plain data |
//! | [`table`] | which block lies in which slot of which tier; leases; flushing and eviction. Pure bookkeeping |
//! | [`scheduler`] | moves blocks: queues, batches, breakers, time-outs, flushing |
//! | `lease`, `transfer`, `pinned` | what callers hold: the right to read a chain, the answer to come, chains kept for a while |
//! | `manager`, `options` | what an engine talks to, and how it is opened |
//! | [`blocking`] | get and put for engines that copy for themselves, on plain threads |
//! | `assemble` | the only place that names concrete backends and policies |
//! | `engine_memory`, `layers` | an engine's own memory at one end of a transfer |
//! | `engine_transfers`, `engine_results` | what such an engine asks of a manager, and what it is answered |
//! | `checkpoints` | hybrid models: checkpoints of windows and states on the chain |
//! | `shadow` | hits that the engine computes again, and what that says of the tiers |
//! | `device` | the device tier's bytes, for who looks at them on the CPU |
//! | `durable` | what outlives the process: the indices of tiers whose slots do |
//! | `ranks` | a manager whose bytes lie in other processes, one for each tensor-parallel rank |
//! | `demand` | what more memory would bring: hit rate against capacity |
//! | `state`, `recent` | what a manager says of itself, and of the requests of late |
//! | `serve` | the same over HTTP, for Prometheus, people and programs; behind a feature |
//! | `traces` | spans for who traces, to an OpenTelemetry collector and a profiler; behind features |
//! | `metrics`, `clock`, `sync` | counting, time, locks and threads, each from one place |
//!
//! Data flows one way: engine → manager (lease, load, save) → table ⇄ policies → scheduler → executor →
//! `kvbm_tiers` backends → completion → table.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod assemble;
pub mod blocking;
mod checkpoints;
mod clock;
mod demand;
mod device;
mod durable;
mod engine_memory;
mod engine_results;
mod engine_transfers;
mod error;
mod events;
mod fingerprint;
mod hash;
mod layers;
mod lease;
mod manager;
mod metrics;
mod options;
mod pinned;
mod ranks;
mod recent;
pub mod scheduler;
#[cfg(feature = "serve")]
mod serve;
#[cfg(not(feature = "serve"))]
#[path = "serve/absent.rs"]
mod serve;
mod shadow;
mod state;
mod sync;
pub mod table;
mod task;
mod traces;
mod transfer;

pub use assemble::{GpuReport, NixlReport, PluginReport, installed_nixl_plugins, probe_gpu, probe_nixl};
pub use checkpoints::{
    CacheGroup, CheckpointsSaved, GroupKind, GroupSlots, HybridLease, HybridLoaded, HybridSave, HybridSaved,
};
pub use clock::{Clock, JumpingClock, ManualClock, SystemClock};
pub use durable::{DurableEvent, OnDurable, RecoveryReport};
pub use engine_memory::EngineMemory;
pub use engine_results::{Loaded, Saved, Writers};
pub use error::{Error, ErrorKind, Result};
pub use events::{CacheEvent, CachedBlock, Events, RemoveReason, StoreReason};
pub use fingerprint::{Fingerprint, Hashing, KvLayout, Ranks, Rope};
pub use hash::{BlockHash, Chain, ChainHasher};
pub use kvbm_policies::{Hints, RequestId};
pub use kvbm_tiers::{BlockKey, DeviceRegion, Fence, HostFence, Part, SegmentMap, SlotId, Space, Tier};
pub use lease::Lease;
pub use manager::{Allocation, Closing, Manager};
pub use metrics::Metrics;
pub use options::{Options, RouteReport};
pub use ranks::{Rank, RankGroup, RankOptions};
pub use scheduler::Drained;
#[cfg(feature = "serve")]
pub use serve::TIER_COLORS;
pub use shadow::{Elements, ShadowCounts, ShadowSample, ShadowVerdict};
pub use state::{
    BreakerState, Degraded, FaultState, Found, LookupCounts, Missing, NamespaceState, Readiness, RouteState,
    State, TierState, Why,
};
pub use table::RequestInfo;
#[cfg(feature = "lock-times")]
pub use table::{TableGuard, longest_hold};
pub use task::{Class, CopyTask, Defect, Outcome, TaskId, TaskResult, TransferId};
#[cfg(feature = "nvtx")]
pub use traces::NvtxRanges;
#[cfg(feature = "otel")]
pub use traces::SpanExport;
pub use transfer::{Transfer, Transferred};
