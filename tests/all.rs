//! Tests of behaviour across crates. One executable, since each links everything: a file beside
//! this one is a module of it, and `cargo nextest run -p kvbm-tests ranks::` runs those of one module. What
//! listens in the whole process (`spans`, `otel`) or takes other locks (`interleavings`) is one of
//! its own.

mod admission;
mod blocking;
mod chaos;
mod concurrency;
mod conformance;
mod cost;
mod docs;
mod durable;
mod embedded;
mod encrypted;
mod encrypted_dram;
mod encrypted_peer_ranks;
mod encrypted_peers;
mod engine_memory;
mod events;
mod faults;
mod forget;
mod fragments;
mod hybrid;
mod model;
mod namespace;
mod overdue;
mod peer_layouts;
mod peer_loads;
mod peer_ranks;
mod peers;
mod persistent_dram;
mod ranks;
mod ranks_durable;
mod ranks_forget;
mod ranks_layers;
mod recovery;
mod s3_server;
mod serve;
mod shadow;
mod shared_bucket;
mod steps;
mod transfers;
