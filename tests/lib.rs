//! Tests of behaviour across crates: each file beside this one is a test target, but for [`rig`], [`engine`] and
//! [`process`], which the targets share.

pub mod engine;
pub mod process;
pub mod rig;
