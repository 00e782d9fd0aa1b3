//! The native half of the Python package `kvbm_rs`.
//!
//! | module | holds |
//! |---|---|
//! | `errors` | our errors as Python's: the classes are in `kvbm_rs/errors.py` |
//! | `settings` | [`kvbm_settings::Settings`], from texts, dictionaries and variables |
//!
//! What a class or function is for, its docstring says; their types are in `kvbm_rs/_native.pyi`, and a test compares
//! the two.
#![deny(unsafe_code)]
#![warn(clippy::disallowed_methods)]

mod errors;
mod settings;

use pyo3::prelude::*;

#[pymodule(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(version, module)?)?;
    settings::add(module)?;
    Ok(())
}

/// The version of this package, such as `0.1.0`.
#[pyfunction]
const fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
