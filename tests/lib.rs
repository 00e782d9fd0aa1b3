//! Tests of behaviour across crates: each file beside this one is a test target, but for [`rig`], [`parked`]
//! and [`engine`], which the targets share.

pub mod engine;
pub mod parked;
pub mod rig;
