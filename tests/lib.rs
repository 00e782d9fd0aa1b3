//! Tests of behaviour across crates: each file beside this one is a test target, but for [`rig`], [`parked`],
//! [`engine`], [`fleet`], [`follower`], [`kept`] and [`process`], which the targets share, and `fragments.rs`, a part of `docs.rs`.

pub mod engine;
pub mod fleet;
pub mod follower;
pub mod kept;
pub mod parked;
pub mod process;
pub mod rig;
