//! The native half of the Python package `kvbm_rs`.
//!
//! | module | holds |
//! |---|---|
//! | `errors` | our errors as Python's: the classes are in `kvbm_rs/errors.py` |
//! | `policy` | our eviction for engines that keep a cache of their own |
//! | `settings` | [`kvbm_settings::Settings`], from texts, dictionaries and variables |
//!
//! What a class or function is for, its docstring says; their types are in `kvbm_rs/_native.pyi`, and a test compares
//! the two.
#![deny(unsafe_code)]
#![warn(clippy::disallowed_methods)]
// Python's objects come by value, and docstrings are in Python's style.
#![allow(clippy::needless_pass_by_value, clippy::doc_markdown)]

mod errors;
mod policy;
mod settings;

use pyo3::prelude::*;

#[pymodule(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(version, module)?)?;
    policy::add(module)?;
    settings::add(module)?;
    Ok(())
}

/// The version of this package, such as `0.1.0`.
#[pyfunction]
const fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
