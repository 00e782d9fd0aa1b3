//! What of the `kvbm` command others use too.
//!
//! | module | used by |
//! |---|---|
//! | [`measuring`] | the benches, and the comparison with peers: they measure as `kvbm bench` does |
//! | [`trace`] | fuzzing: it reads files that anybody may have written |
#![forbid(unsafe_code)]

pub mod measuring;
pub mod trace;
