//! Ranks: processes of tensor parallelism.

use std::path::PathBuf;

use kvbm::{RankGroup, RankOptions};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::of_manager;
use crate::fingerprint::fingerprint;
use crate::groups::{self, CacheGroup};
use crate::memory::EngineMemory;
use crate::settings::Settings;
use crate::transfer::duration;

/// A tensor-parallel rank: it moves its slice of blocks as its leader, a `Manager` in another
/// process, says, on a thread of its own.
///
/// Args: settings: the leader's; capacities and `block_bytes` are of one rank's slice. memory: its
/// KV tensors. group: `(directory, world, seconds)`: where leader and ranks meet, how many ranks
/// there are, how long it waits. rank: its number, from 0. fingerprint: the leader's. groups: the
/// leader's, each with this rank's KV tensors.
///
/// Blocks until the leader is there. Dropping it ends its service.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct Rank {
    #[allow(dead_code)] // kept for its drop
    rank: kvbm::Rank,
}

#[pymethods]
impl Rank {
    #[new]
    #[pyo3(signature = (settings, memory, *, group, rank, fingerprint=None, groups=Vec::new()))]
    fn new(
        py: Python<'_>,
        settings: &Settings,
        memory: &EngineMemory,
        group: (PathBuf, u16, f64),
        rank: u16,
        fingerprint: Option<&Bound<'_, PyDict>>,
        groups: Vec<Bound<'_, CacheGroup>>,
    ) -> PyResult<Self> {
        let (dir, world, seconds) = group;
        let group = RankGroup { dir, world, limit: duration(seconds) };
        let fingerprint = fingerprint.map(self::fingerprint).transpose()?;
        let (engine, groups) = (Some(memory.memory.clone()), groups::plain(&groups));
        let options = RankOptions { group, rank, engine, groups, fingerprint, media_layer: None };
        let settings = settings.plain();
        let joined = py.detach(|| kvbm::Rank::join(&settings, options));
        joined.map(|rank| Self { rank }).map_err(|error| of_manager(&error))
    }
}
