//! What of the `kvbm` command others use too.
//!
//! | module | used by |
//! |---|---|
//! | [`measuring`] | the benches, and the comparison with peers: they measure as `kvbm bench` does |
//! | [`trace`] | fuzzing: it reads untrusted files |
#![forbid(unsafe_code)]

pub mod measuring;
pub mod trace;
