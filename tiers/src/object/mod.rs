//! The object tier: blocks in an S3-compatible store, or in files where there is none.
//!
//! Requests to a store are slow to begin and fast once they run, so blocks that are written
//! together share a *segment* object (format: [`segment`]), and blocks that are read together and
//! lie side by side share a request. An object cannot be changed: writing a slot again puts its
//! block into a new segment, and a segment is deleted when its last slot is gone.
//!
//! ```text
//! <url>/<namespace>/blocks/<epoch>/<name>.kvseg   blocks
//! <url>/<namespace>/manifests/<worker>.kvman      which segments a worker relies on
//! <url>/<namespace>/epochs/<epoch>.kvepoch        an epoch that has begun
//! <url>/<namespace>/collector/<term>.kvlease      who collects garbage
//! ```
//!
//! The slots of this tier are mere numbers. [`ObjectBackend`] remembers which block of which
//! segment each one stands for, and moves blocks between them and a memory region: received bytes
//! go straight into the region's slots; what is sent to a service is copied first, so that no
//! operation has to wait until a service that stopped reading has let go of it.
//!
//! | modules | hold |
//! |---|---|
//! | `address`, `open`, `files`, `error`, `traffic` | the store: how it is reached, what its errors mean, what it is asked |
//! | `budget` | what that may come to |
//! | `backend`, `block`, `read`, `write`, `executor`, `shared` | the way of a block |
//! | `segment`, `manifest`, `names` | formats, names of objects, and listing them |
//! | `keys` | what tenants' blocks are sealed with |
//! | `locations`, `compact` | where each slot's block lies, and that space stays bounded |
//! | `epochs` | which epochs a bucket knows of: until a worker knows, it has no use for the bucket |
//! | `discover`, `look`, `known` | what a bucket holds already, and what others store in it meanwhile |
//! | `share`, `collect` | what workers rely on, and who removes the garbage of those that are gone |
//! | [`fsck`] | checking a bucket from outside |

mod address;
mod backend;
mod block;
mod budget;
mod collect;
mod compact;
mod discover;
mod epochs;
mod error;
mod executor;
mod files;
pub mod fsck;
mod keys;
mod known;
mod locations;
mod look;
pub mod manifest;
mod names;
mod open;
mod read;
pub mod segment;
mod share;
mod shared;
mod traffic;
mod write;

#[cfg(test)]
mod tests;

pub use address::StoreOptions;
pub use backend::{ObjectBackend, ObjectOptions, ObjectStats};
pub use budget::{Budgets, Expense};
pub use discover::Discovered;
pub use epochs::{EpochStanding, OlderEpoch};
pub use keys::ObjectKeys;
pub use look::{Discovery, FoundBlock, TakeIn};
pub use open::Store;
pub use share::Sharing;
pub use traffic::{RequestKind, RequestOutcome, Traffic};

/// How long an operation may take unless told otherwise: [`ObjectOptions::operation_limit`].
pub const OPERATION_LIMIT: std::time::Duration = std::time::Duration::from_secs(20);
