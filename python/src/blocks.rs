//! Get and put, for engines that copy for themselves.

use std::collections::BTreeMap;

use kvbm::{Chain as BlockChain, Options, RequestId, blocking};
use prometheus::Registry;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::HostBytes;
use crate::errors::{classes, of_manager};
use crate::manager::reset;
use crate::names::{Chain, fingerprint, request_info};
use crate::observe;
use crate::settings::Settings;
use crate::transfer::duration;

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Blocks>()
}

/// Keeps the blocks of an engine that copies for itself, in tiers of DRAM, disk and objects.
///
/// Where bytes are asked for, any of these will do, without a copy between: an object with a
/// contiguous buffer (`bytes`, `memoryview`, an array of NumPy), a contiguous tensor on the CPU (by
/// DLPack), or `(address, bytes)`. Their length is a multiple of `block_bytes`: block after block.
/// They must not be written by others meanwhile: Python's threads go on.
///
/// Args: settings: its tiers, of which `host` must be one, and `block_bytes`. block_tokens: tokens
/// in a block. fingerprint: what the bytes depend on besides tokens, such as `{"model": …,
/// "weights": …}`. Without one nothing is found again after a restart.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct Blocks {
    blocks: blocking::Blocks,
    registry: Registry,
}

#[pymethods]
impl Blocks {
    #[new]
    #[pyo3(signature = (settings, *, block_tokens=16, fingerprint=None))]
    fn new(
        py: Python<'_>,
        settings: &Settings,
        block_tokens: u64,
        fingerprint: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let registry = Registry::new();
        let settings = settings.for_fingerprint(fingerprint)?;
        let fingerprint =
            fingerprint.map(|values| self::fingerprint(values, block_tokens)).transpose()?;
        let options =
            Options { registry: registry.clone(), block_tokens, fingerprint, ..Options::default() };
        let blocks = py.detach(|| blocking::Blocks::open(settings, options));
        Ok(Self { blocks: blocks.map_err(|error| of_manager(&error))?, registry })
    }

    /// Bytes of a block.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.blocks.block_bytes()
    }

    /// Copies the leading blocks of `chain` that any tier holds to `into`, as many as have room
    /// there. Returns how many: what is behind them is missing, cannot be read, or is sooner
    /// computed. Waits for what lies below the host tier.
    #[pyo3(signature = (chain, into, *, request=None))]
    fn get(
        &self,
        py: Python<'_>,
        chain: &Chain,
        into: &Bound<'_, PyAny>,
        request: Option<u64>,
    ) -> PyResult<usize> {
        let into = HostBytes::of(into)?.writable()?;
        let wanted = BlockChain::from(&chain.hashes).prefix(into.blocks(self.block_bytes())?);
        let copied = py.detach(|| {
            let copy = |position, block: &[u8]| fits(into.write(position, block));
            self.blocks.get_for(request_info(request, None), wanted, copy)
        });
        copied.map_err(Stopped::into_error)
    }

    /// Copies those of the first blocks of `chain` that the host tier lacks out of `blocks`, which
    /// has them from the root on. Returns how many leading blocks are kept; for the others there is
    /// no room, or they are not worth it. The flush to lower tiers happens on its own.
    #[pyo3(signature = (chain, blocks, *, request=None))]
    fn put(
        &self,
        py: Python<'_>,
        chain: &Chain,
        blocks: &Bound<'_, PyAny>,
        request: Option<u64>,
    ) -> PyResult<usize> {
        let from = HostBytes::of(blocks)?;
        let given = BlockChain::from(&chain.hashes).prefix(from.blocks(self.block_bytes())?);
        let kept = py.detach(|| {
            let copy = |position, slot: &mut [u8]| fits(from.read(position, slot));
            self.blocks.put_for(request_info(request, None), given, copy)
        });
        kept.map_err(Stopped::into_error)
    }

    /// How many leading blocks of `chain` each tier holds, without counting as their use.
    fn matches(&self, py: Python<'_>, chain: &Chain) -> BTreeMap<&'static str, usize> {
        observe::matches(py, self.blocks.manager(), chain)
    }

    /// Says that a request has ended, and how many tokens it generated: policies learn from it.
    fn finished(&self, py: Python<'_>, request: u64, output_tokens: u32) {
        py.detach(|| self.blocks.manager().finished(RequestId(request), output_tokens));
    }

    /// Begins the next epoch: no block that was there before is found again. Returns its number. A
    /// later process goes on in this epoch: blocks of weights that only this one has want names of
    /// their own (`Chain(salt=…)`). `weights` names the new weights, the same in all workers that
    /// have them; without it peers read no blocks of this epoch.
    #[pyo3(signature = (*, weights=None))]
    fn reset(&self, py: Python<'_>, weights: Option<&str>) -> PyResult<u64> {
        reset(py, self.blocks.manager(), weights)
    }

    /// Writes what is to be written to the lower tiers, and waits for it, `seconds` at most.
    /// Whether nothing is left.
    fn drain(&self, py: Python<'_>, seconds: f64) -> bool {
        let limit = duration(seconds);
        py.detach(|| self.blocks.manager().drain(limit)).is_complete()
    }

    /// Counts by tier, all in blocks: `total`, `free`, `resident`, … of its slots now; `published`,
    /// `evicted`, … since the start.
    fn stats(&self, py: Python<'_>) -> BTreeMap<&'static str, BTreeMap<&'static str, u64>> {
        py.detach(|| observe::by_tier(self.blocks.manager()))
    }

    /// Its metrics as Prometheus reads them: docs/metrics.md.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        observe::text(py, &self.registry)
    }

    /// Ends everything, and waits `seconds` at most for what the media work on. `True`: nothing is
    /// under way any more. Its files are free for another when the object is gone, too.
    fn close(&self, py: Python<'_>, seconds: f64) -> bool {
        let limit = duration(seconds);
        py.detach(|| self.blocks.manager().close(limit)).is_complete()
    }
}

/// Why a copy ended early.
enum Stopped {
    ByManager(kvbm::Error),
    /// The chain is no longer than the buffer, so this is an error of ours.
    OutOfBounds,
}

impl From<kvbm::Error> for Stopped {
    fn from(error: kvbm::Error) -> Self {
        Self::ByManager(error)
    }
}

impl Stopped {
    fn into_error(self) -> PyErr {
        match self {
            Self::ByManager(error) => of_manager(&error),
            Self::OutOfBounds => {
                classes::KvbmError::new_err("a block beyond the buffer: please report it")
            }
        }
    }
}

const fn fits(fits: bool) -> Result<(), Stopped> {
    if fits { Ok(()) } else { Err(Stopped::OutOfBounds) }
}
