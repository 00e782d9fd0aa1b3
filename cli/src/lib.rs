//! What the `kvbm` command shares: the benches, and the comparison with peers, measure as `kvbm bench` does.
#![forbid(unsafe_code)]

pub mod measuring;
