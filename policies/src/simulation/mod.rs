//! Policies over a trace, without any table: what `kvbm plan` is made of.
//!
//! A live tier runs none of this, except the two small tiers of names that
//! [`Auto`](crate::admission::Auto) simulates beside the real ones.
//!
//! | module | holds |
//! |---|---|
//! | [`workload`] | the requests of a trace, as paths through one forest of blocks; when each ends |
//! | [`single`] | one tier, one workload, one policy: the token hit rate |
//! | [`hierarchy`] | several tiers, one below another: hits in each, blocks written to each |
//! | [`miniature`] | a workload on a smaller scale |
//! | [`fleet`] | prefill and decode workers: what a rule of offloading brings |

pub mod fleet;
pub mod hierarchy;
pub mod miniature;
pub mod single;
pub mod workload;
