//! Policies of the KV block manager: which block leaves a tier, which may enter it, what is flushed.
//!
//! Everything here is pure: no I/O, no clock, no async, no threads. The block table calls a policy under its
//! lock and passes the time in; the [`simulate`](mod@simulate) module drives the same policies over a trace
//! without any table, which is how `kvbm plan` predicts hit rates.
//!
//! | module | holds |
//! |---|---|
//! | [`eviction`] | the [`Eviction`] trait and one file for each policy |
//! | [`simulate`](mod@simulate) | one tier, one trace, one policy: the token hit rate |

pub mod eviction;
pub mod simulate;

pub use eviction::{Access, BlockId, Eviction, Forest, Standing};
