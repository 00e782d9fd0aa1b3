//! Leases.

use std::collections::BTreeMap;
use std::ops::Range;

use kvbm::Tier;
use pyo3::prelude::*;

use crate::errors::classes;

/// The right to read a chain's leading blocks, and of a hybrid model the checkpoints at the end of
/// them, until it is used up or dropped.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct Lease {
    /// Leading blocks that all cache groups can give back.
    #[pyo3(get)]
    blocks: usize,
    /// How many of them come from which tier: of full attention, root first.
    #[pyo3(get)]
    by_tier: BTreeMap<&'static str, usize>,
    held: Option<kvbm::Lease>,
}

impl Lease {
    pub(crate) fn new(lease: kvbm::Lease) -> Self {
        let blocks = lease.usable();
        let within = |(tier, held): (Tier, Range<usize>)| {
            let held = held.start..held.end.min(blocks);
            (tier.name(), held.len())
        };
        let by_tier = lease.held().plan().map(within).filter(|&(_, held)| held > 0).collect();
        Self { blocks, by_tier, held: Some(lease) }
    }

    pub(crate) fn take(&mut self) -> PyResult<kvbm::Lease> {
        self.held.take().ok_or_else(used_before)
    }
}

#[pymethods]
impl Lease {
    /// Positions of the blocks that a cache group has for the engine: the first, and the one behind
    /// the last.
    fn wanted(&self, group: u8) -> PyResult<(usize, usize)> {
        let wanted = self.held.as_ref().ok_or_else(used_before)?.wanted(group);
        let wanted = wanted.ok_or_else(|| {
            classes::InvalidError::new_err(format!("there is no cache group {group}"))
        })?;
        Ok((wanted.start, wanted.end))
    }
}

fn used_before() -> PyErr {
    classes::InvalidError::new_err("the lease was used before")
}
