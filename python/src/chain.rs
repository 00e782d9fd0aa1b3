//! Chains of block hashes, kept on this side so that a request's hashes cross once.

use kvbm::BlockHash;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::of_manager;

/// The hashes of a prompt's full blocks, root first: each commits to all tokens before its block's end. It grows as
/// the request does.
///
/// Args:
///     hashes: an engine's own chained hashes, of at least 16 bytes each.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug, Default)]
pub(crate) struct Chain(pub(crate) Vec<BlockHash>);

#[pymethods]
impl Chain {
    #[new]
    #[pyo3(signature = (hashes=None))]
    fn new(hashes: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let mut chain = Self::default();
        if let Some(hashes) = hashes {
            chain.extend(hashes)?;
        }
        Ok(chain)
    }

    /// Adds the hashes of the blocks that follow. All of them, or none if one is too short.
    fn extend(&mut self, hashes: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut more = Vec::new();
        for hash in hashes.try_iter()? {
            let hash = hash?;
            let hash = BlockHash::from_engine(hash.cast::<PyBytes>()?.as_bytes());
            more.push(hash.map_err(|error| of_manager(&error))?);
        }
        self.0.append(&mut more);
        Ok(())
    }

    /// By which names `Events` tell of its blocks, from position `first` on.
    fn names(&self, first: usize) -> Vec<u128> {
        self.0.iter().skip(first).map(|hash| hash.get()).collect()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }
}
