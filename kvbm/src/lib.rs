//! A KV block manager for LLM inference: it keeps the KV cache of past prompts in a hierarchy of tiers and
//! gives it back instead of recomputing it.
//!
//! | module | holds |
//! |---|---|
//! | `hash` | names of blocks: chained hashes |
//! | [`table`] | which block lies in which slot of which tier; leases; flushing and eviction. Pure bookkeeping |
//! | [`scheduler`] | moves blocks: orders, lanes, flows, time-outs, flushing |
//! | `lease`, `ticket`, `pins` | what callers hold: the right to read a chain, the answer to come, chains kept for a while |
//! | `manager` | what an engine talks to |
//! | `assemble` | the only place that names concrete backends and policies |
//! | `device` | the device tier's bytes, for who looks at them on the CPU |
//! | `demand` | what more memory would bring: hit rate against capacity |
//! | `metrics`, `clock`, `sync` | counting, time, locks and threads, each from one place |
//!
//! Data flows one way: engine → manager (lease, load, save) → table ⇄ policies → scheduler → executor →
//! `kvbm_tiers` backends → completion → table.
#![forbid(unsafe_code)]

mod assemble;
mod clock;
mod demand;
mod device;
mod error;
mod hash;
mod lease;
mod manager;
mod metrics;
mod pins;
pub mod scheduler;
mod sync;
pub mod table;
mod ticket;

pub use assemble::{GpuReport, NixlReport, PluginReport, installed_nixl_plugins, probe_gpu, probe_nixl};
pub use clock::{Clock, JumpingClock, ManualClock, SystemClock};
pub use error::{Error, ErrorKind, Result};
pub use hash::{BlockHash, Chain, ChainHasher};
pub use kvbm_policies::{Hints, RequestId};
pub use kvbm_tiers::{BlockKey, Tier};
pub use lease::Lease;
pub use manager::{Allocation, Manager, Options, RouteReport};
pub use metrics::Metrics;
pub use scheduler::{Brought, Drained};
pub use table::Usage;
pub use ticket::Ticket;
