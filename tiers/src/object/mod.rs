//! The object tier: blocks in an S3-compatible store, or in files where there is none.
//!
//! Requests to a store are slow to begin and fast once they run, so blocks that are written together share a
//! *segment* object (format: [`segment`]), and blocks that are read together and lie side by side share a
//! request. An object cannot be changed: writing a slot again puts its block into a new segment, and a segment
//! is deleted when its last slot is gone.
//!
//! ```text
//! <url>/<namespace>/segments/<name>.kvseg
//! ```
//!
//! The slots of this tier are mere numbers. [`ObjectBackend`] remembers which block of which segment each one
//! stands for, and moves blocks between them and a memory region without intermediate copies: the client sends
//! from the region's slots, and received bytes go straight into them.

mod backend;
mod block;
mod error;
mod executor;
mod locations;
mod open;
mod read;
mod s3;
pub mod segment;
mod write;

#[cfg(test)]
mod tests;

pub use backend::{ObjectBackend, ObjectOptions, ObjectStats};
pub use open::{Store, StoreOptions};
