//! What the benches share, so that `kvbm bench table`, criterion and the peer comparison time the same work
//! on the same chains.
//!
//! | module | holds |
//! |---|---|
//! | [`chains`] | which chains of blocks exist, and how much of each is resident |
//! | [`subject`] | the operations that are timed, on our manager |
//! | [`measure`] | rounds, medians with their spread |
#![forbid(unsafe_code)]

pub mod chains;
pub mod measure;
pub mod subject;
