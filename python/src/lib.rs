//! The native half of the Python package `kvbm_rs`.
//!
//! | module | holds |
//! |---|---|
//! | `blocks` | get and put, for engines that copy for themselves |
//! | `buffer` | bytes that Python shows us |
//! | `chain` | block hashes of a request |
//! | `errors` | our errors as Python's: the classes are in `kvbm_rs/errors.py` |
//! | `events` | what comes to the tiers and leaves them |
//! | `fingerprint` | what the bytes of blocks depend on, from dictionaries |
//! | `hints` | what an engine knows of a request besides its tokens |
//! | `hybrid` | models of several cache groups |
//! | `logs` | what the Rust side has to say, for Python's logging |
//! | `manager` | the manager, and leases |
//! | `memory` | an engine's KV tensors, adopted |
//! | `opened` | what a manager has, in lines for a log |
//! | `policy` | our eviction for engines that keep a cache of their own |
//! | `rank` | processes of tensor parallelism |
//! | `requests` | the numbers of requests that engines name by text |
//! | `settings` | [`kvbm_settings::Settings`], from texts, dictionaries and variables |
//! | `stats` | a manager's counts |
//! | `tier` | chunks of vLLM's primary tier, kept below it |
//! | `transfer` | loads and saves under way, and how they ended |
//!
//! What a class or function is for, its docstring says; their types are in `kvbm_rs/_native.pyi`,
//! and a test compares the two.
#![deny(unsafe_code)]
#![warn(clippy::disallowed_methods)]
// Python's objects come by value, and docstrings are in Python's style.
#![allow(clippy::needless_pass_by_value, clippy::doc_markdown)]

mod blocks;
mod buffer;
mod chain;
mod errors;
mod events;
mod fence;
mod fingerprint;
mod groups;
mod hints;
mod lease;
mod logs;
mod manager;
mod memory;
mod opened;
mod policy;
mod rank;
mod requests;
mod settings;
mod stats;
mod tier;
mod transfer;

use pyo3::prelude::*;

#[pymodule(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(version, module)?)?;
    module.add_function(wrap_pyfunction!(requests::request_number, module)?)?;
    module.add_function(wrap_pyfunction!(requests::vllm_request_numbers, module)?)?;
    logs::add(module)?;
    policy::add(module)?;
    settings::add(module)?;
    blocks::add(module)?;
    tier::add(module)?;
    module.add_class::<chain::Chain>()?;
    module.add_class::<events::Events>()?;
    module.add_class::<hints::Hints>()?;
    module.add_class::<groups::CacheGroup>()?;
    module.add_class::<manager::Manager>()?;
    module.add_class::<lease::Lease>()?;
    module.add_class::<memory::EngineMemory>()?;
    module.add_class::<rank::Rank>()?;
    module.add_class::<transfer::Load>()?;
    module.add_class::<transfer::LoadEnd>()?;
    module.add_class::<transfer::Save>()?;
    module.add_class::<transfer::SaveEnd>()?;
    Ok(())
}

/// The version of this package, such as `0.1.0`.
#[pyfunction]
const fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
