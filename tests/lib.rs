//! What the tests of behaviour share. They are the modules of `all.rs`, and `spans.rs`, `otel.rs`
//! and `interleavings.rs`.

pub mod bucket;
pub mod engine;
pub mod fleet;
pub mod follower;
pub mod kept;
pub mod parked;
pub mod process;
pub mod rig;
pub mod slots;
