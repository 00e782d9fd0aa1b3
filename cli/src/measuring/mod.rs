//! What is timed, and how: `kvbm bench` and the benches time the same work on the same chains.
//!
//! | module | holds |
//! |---|---|
//! | [`chains`] | which chains of blocks exist, and how much of each is resident |
//! | [`subject`] | the operations that are timed, on our manager |
//! | [`rounds`] | rounds, medians with their spread |

pub mod chains;
pub mod rounds;
pub mod subject;
