//! Leases, transfers under way, and how they ended.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use kvbm::{Loaded, Saved, Tier, Transfer, Writers};
use pyo3::prelude::*;

use crate::errors::{classes, of_manager};

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

    pub(crate) fn held(&self) -> PyResult<&kvbm::Lease> {
        self.held.as_ref().ok_or_else(used_before)
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
        let wanted = self.held()?.wanted(group);
        let wanted = wanted.ok_or_else(|| {
            classes::InvalidError::new_err(format!("there is no cache group {group}"))
        })?;
        Ok((wanted.start, wanted.end))
    }
}

pub(crate) fn used_before() -> PyErr {
    classes::InvalidError::new_err("the lease was used before")
}

/// A load into an engine's slots. Dropping it loses the answer, not the work.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct Load(pub(crate) Transfer<Loaded>);

#[pymethods]
impl Load {
    /// How it ended, or `None` while it is under way. The answer is given once.
    fn poll(&mut self) -> PyResult<Option<LoadEnd>> {
        ended(self.0.try_take(), LoadEnd::new)
    }

    /// How it ended, for which it waits `seconds` at most; `None`: it has not.
    fn wait(&mut self, py: Python<'_>, seconds: f64) -> PyResult<Option<LoadEnd>> {
        let limit = duration(seconds);
        ended(py.detach(|| self.0.wait_for(limit)), LoadEnd::new)
    }

    /// Waits, `seconds` at most, until the first `layers` layers of every block of full attention
    /// are there. `False`: they are not.
    fn wait_layers(&self, py: Python<'_>, layers: u16, seconds: f64) -> bool {
        let limit = duration(seconds);
        py.detach(|| self.0.wait_layers(layers, limit))
    }

    /// Ends it early: what waits in a queue is not copied.
    fn cancel(&mut self) {
        self.0.cancel();
    }
}

/// How a load ended. Counts are in blocks.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct LoadEnd {
    /// Leading wanted blocks of full attention that are in their slots now.
    #[pyo3(get)]
    arrived: usize,
    /// Those behind them, whose slots hold nothing that can be used.
    #[pyo3(get)]
    failed: usize,
    /// Everything that was asked for is in the engine's slots, of all cache groups. Else no window
    /// and no state in them may be used.
    #[pyo3(get)]
    is_whole: bool,
    /// Leading blocks that may be asked for next; those of full attention before these that were
    /// asked for have arrived.
    #[pyo3(get)]
    usable: usize,
    /// Why a peer did not give all that was wanted of it, if it did not.
    #[pyo3(get)]
    fault: Option<String>,
    writers: Writers,
}

impl LoadEnd {
    fn new(loaded: Loaded) -> Self {
        let Loaded { arrived, failed, is_whole, usable, writers, fault, .. } = loaded;
        Self { arrived, failed, is_whole, usable, fault, writers }
    }
}

#[pymethods]
impl LoadEnd {
    /// Whether no medium may still write the slots of those that failed: until then they must not
    /// be used.
    fn slots_are_free(&self) -> bool {
        self.writers.are_gone()
    }
}

/// A load as its leader and the ranks call it: its number, layers of a block, and blocks.
pub(crate) type NamedLoad = (u64, u16, u32);

/// A rank's slice of a load. Dropping it forgets the load: wait for its end first.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct SliceLoad(pub(crate) kvbm::SliceLoad);

#[pymethods]
impl SliceLoad {
    /// Waits, `seconds` at most, until the first `layers` layers of every block are there in this
    /// rank. `False`: they are not.
    fn wait_layers(&self, py: Python<'_>, layers: u16, seconds: f64) -> bool {
        let limit = duration(seconds);
        py.detach(|| self.0.wait_layers(layers, limit))
    }

    /// How many leading blocks are there in every rank, once the load has ended and nothing touches
    /// its slots any more. It waits `seconds` at most for that; `None`: it goes on.
    fn wait(&self, py: Python<'_>, seconds: f64) -> Option<usize> {
        let limit = duration(seconds);
        py.detach(|| self.0.wait(limit))
    }
}

/// A save from an engine's slots. Dropping it loses the answer, not the work.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct Save(pub(crate) Transfer<Saved>);

#[pymethods]
impl Save {
    /// How it ended, or `None` while it is under way. The answer is given once.
    fn poll(&mut self) -> PyResult<Option<SaveEnd>> {
        ended(self.0.try_take(), |saved| SaveEnd::new(&saved))
    }

    /// How it ended, for which it waits `seconds` at most; `None`: it has not.
    fn wait(&mut self, py: Python<'_>, seconds: f64) -> PyResult<Option<SaveEnd>> {
        let limit = duration(seconds);
        ended(py.detach(|| self.0.wait_for(limit)), |saved| SaveEnd::new(&saved))
    }

    /// Ends it early: what waits in a queue is not copied.
    fn cancel(&mut self) {
        self.0.cancel();
    }
}

/// A save of blocks that are being computed. Dropping it before it is finished gives them up.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct LayeredSave(pub(crate) Option<kvbm::LayeredSave>);

#[pymethods]
impl LayeredSave {
    /// The engine has written the next layer to its slots: copies it, on this thread. The layer must
    /// not change until this returns.
    fn layer_is_ready(&mut self, py: Python<'_>) -> PyResult<()> {
        let saving = self.0.as_mut().ok_or_else(ended_before)?;
        py.detach(|| saving.layer_is_ready()).map_err(|error| of_manager(&error))
    }

    /// All layers are copied: peers may lease the blocks as any others. Returns how many leading
    /// blocks of the chain the host tier has now, or awaits.
    fn finish(&mut self, py: Python<'_>) -> PyResult<usize> {
        let saving = self.0.take().ok_or_else(ended_before)?;
        py.detach(|| saving.finish()).map_err(|error| of_manager(&error))
    }
}

fn ended_before() -> PyErr {
    classes::InvalidError::new_err("the save has ended before")
}

/// How a save ended. Counts are in blocks.
#[pyclass(module = "kvbm_rs", frozen, get_all)]
#[derive(Debug)]
pub(crate) struct SaveEnd {
    /// Leading blocks of the chain that the uppermost tier has now.
    blocks: usize,
    /// Copied by this save.
    copied: usize,
    /// There before, or on their way.
    duplicates: usize,
    /// Not kept, because those before them are not there.
    orphans: usize,
    /// Not worth the room that they would take.
    declined: usize,
    /// Found no room, or the medium is left alone for now.
    refused: usize,
    /// Failed, with those behind them.
    failed: usize,
    /// By cache group beside full attention, of which the counts above are: checkpoints that could
    /// be made, and those of them that are there now.
    checkpoints: BTreeMap<u8, (usize, usize)>,
}

impl SaveEnd {
    fn new(saved: &Saved) -> Self {
        let &Saved { blocks, copied, duplicates, orphans, declined, refused, failed, .. } = saved;
        let of_groups = saved.checkpoints.iter();
        let checkpoints =
            of_groups.map(|group| (group.group, (group.checkpoints, group.whole))).collect();
        Self { blocks, copied, duplicates, orphans, declined, refused, failed, checkpoints }
    }
}

pub(crate) fn ended<T, E>(
    answer: Option<kvbm::Result<T>>,
    end: impl FnOnce(T) -> E,
) -> PyResult<Option<E>> {
    answer.transpose().map(|answer| answer.map(end)).map_err(|error| of_manager(&error))
}

/// Of what Python counts in seconds; what is no time is none.
pub(crate) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(if seconds > 0.0 {
        Duration::MAX
    } else {
        Duration::ZERO
    })
}
