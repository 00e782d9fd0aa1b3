//! Chains of block hashes, kept on this side so that a request's hashes cross once.

use kvbm::BlockHash;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::of_manager;

/// The hashes of a prompt's full blocks, root first: each commits to all tokens before its block's
/// end. It grows as the request does.
///
/// Args: hashes: an engine's own chained hashes, of at least 16 bytes each. salt: what the blocks
/// depend on besides, and the hashes do not have: with another salt they are other blocks.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug, Default)]
pub(crate) struct Chain {
    pub(crate) hashes: Vec<BlockHash>,
    salt: Vec<u8>,
}

#[pymethods]
impl Chain {
    #[new]
    #[pyo3(signature = (hashes=None, *, salt=Vec::new()))]
    fn new(hashes: Option<&Bound<'_, PyAny>>, salt: Vec<u8>) -> PyResult<Self> {
        let mut chain = Self { hashes: Vec::new(), salt };
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
            more.push(
                self.name(hash.cast::<PyBytes>()?.as_bytes())
                    .map_err(|error| of_manager(&error))?,
            );
        }
        self.hashes.append(&mut more);
        Ok(())
    }

    /// By which names `Events` tell of its blocks, from position `first` on.
    fn names(&self, first: usize) -> Vec<u128> {
        self.hashes.iter().skip(first).map(|hash| hash.get()).collect()
    }

    fn __len__(&self) -> usize {
        self.hashes.len()
    }
}

impl Chain {
    fn name(&self, hash: &[u8]) -> Result<BlockHash, kvbm::Error> {
        let own = BlockHash::from_engine(hash)?;
        if self.salt.is_empty() {
            Ok(own)
        } else {
            BlockHash::from_engine(&[&self.salt, hash].concat())
        }
    }
}
