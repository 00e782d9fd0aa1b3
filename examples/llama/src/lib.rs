//! A Rust engine that uses kvbm: a Llama with random weights on the CPU, through candle. When a
//! prompt begins like an earlier one, the KV cache of the beginning comes from kvbm, and the engine
//! computes the rest only.
//!
//! | module | holds |
//! |---|---|
//! | [`prefix_cache`] | all that knows kvbm: KV tensors to blocks, and back |
//! | [`engine`] | a request: look up, load, run the rest, save, generate |
//! | [`model`] | the Llama and its weights |
//!
//! `docs/embedding.md` of kvbm walks through it.

pub mod engine;
pub mod model;
pub mod prefix_cache;
