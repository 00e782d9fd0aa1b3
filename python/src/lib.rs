//! The native half of the Python package `kvbm_rs`.
//!
//! | module | holds |
//! |---|---|
//! | `blocks` | get and put, for engines that copy for themselves |
//! | `buffer` | bytes that Python shows us |
//! | `errors` | our errors as Python's: the classes are in `kvbm_rs/errors.py` |
//! | `logs` | what the Rust side has to say, for Python's logging |
//! | `manager` | the manager |
//! | `memory` | an engine's KV tensors, adopted: cache groups, fences, ranks |
//! | `names` | how blocks and requests are named, and what an engine knows of a request besides |
//! | `observe` | what a manager tells of itself: counts, events, lines for a log |
//! | `peers` | leases at other workers, and what comes from them |
//! | `policy` | our eviction for engines that keep a cache of their own |
//! | `settings` | [`kvbm_settings::Settings`], from texts, dictionaries and variables |
//! | `tier` | chunks of vLLM's primary tier, kept below it |
//! | `transfer` | leases; loads and saves under way, and how they ended |
//!
//! What a class or function is for, its docstring says; their types are in `kvbm_rs/_native.pyi`,
//! and a test compares the two.
#![deny(unsafe_code)]
#![warn(clippy::disallowed_methods)]
// Python's objects come by value, and docstrings are in Python's style.
#![allow(clippy::needless_pass_by_value, clippy::doc_markdown)]

mod blocks;
mod buffer;
mod errors;
mod logs;
mod manager;
mod memory;
mod names;
mod observe;
mod peers;
mod policy;
mod settings;
mod tier;
mod transfer;

use pyo3::prelude::*;

#[pymodule(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(version, module)?)?;
    module.add_function(wrap_pyfunction!(names::request_number, module)?)?;
    module.add_function(wrap_pyfunction!(names::vllm_request_numbers, module)?)?;
    logs::add(module)?;
    policy::add(module)?;
    settings::add(module)?;
    blocks::add(module)?;
    peers::add(module)?;
    tier::add(module)?;
    module.add_class::<names::Chain>()?;
    module.add_class::<observe::Events>()?;
    module.add_class::<names::Hints>()?;
    module.add_class::<memory::CacheGroup>()?;
    module.add_class::<manager::Manager>()?;
    module.add_class::<transfer::LayeredSave>()?;
    module.add_class::<transfer::Lease>()?;
    module.add_class::<memory::EngineMemory>()?;
    module.add_class::<memory::Rank>()?;
    module.add_class::<transfer::Load>()?;
    module.add_class::<transfer::LoadEnd>()?;
    module.add_class::<transfer::Save>()?;
    module.add_class::<transfer::SaveEnd>()?;
    module.add_class::<transfer::SliceLoad>()?;
    Ok(())
}

/// The version of this package, such as `0.1.0`.
#[pyfunction]
const fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
