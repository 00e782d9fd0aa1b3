//! Models of several cache groups: full attention, and beside it layers that keep a window or a state.

use std::collections::BTreeMap;
use std::ops::Range;

use kvbm::{GroupKind, GroupSlots, HybridLoaded, HybridSaved, SlotId, Tier, Transfer, Writers};
use pyo3::prelude::*;

use crate::errors::classes;
use crate::memory::EngineMemory;
use crate::transfer::{duration, ended};

/// A group's number, the position on the chain of the first block, and the engine's slots of it and those that follow.
pub(crate) type Slots = (u8, usize, Vec<u32>);

/// Layers of a hybrid model that do not keep every block.
///
/// Args:
///     name: names it in metrics: letters, digits and `_`, and not `full`.
///     memory: the KV tensors of these layers, in blocks of their own size.
///     window: how many full blocks a token may look back into; `None`: the layers keep a state, in one slot.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct CacheGroup(kvbm::CacheGroup);

#[pymethods]
impl CacheGroup {
    #[new]
    #[pyo3(signature = (name, memory, *, window=None))]
    fn new(name: String, memory: &EngineMemory, window: Option<u32>) -> Self {
        let kind = window.map_or(GroupKind::State, |blocks| GroupKind::Window { blocks });
        Self(kvbm::CacheGroup { name, kind, memory: memory.memory.clone(), share: None })
    }
}

pub(crate) fn plain(groups: &[Bound<'_, CacheGroup>]) -> Vec<kvbm::CacheGroup> {
    groups.iter().map(|group| group.get().0.clone()).collect()
}

/// The right to read a chain's leading blocks and the checkpoints at the end of them, until it is used up or dropped.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct HybridLease {
    /// Leading blocks that all cache groups can give back.
    #[pyo3(get)]
    blocks: usize,
    /// How many of them come from which tier: of full attention, root first.
    #[pyo3(get)]
    by_tier: BTreeMap<&'static str, usize>,
    held: Option<kvbm::HybridLease>,
}

impl HybridLease {
    pub(crate) fn new(lease: kvbm::HybridLease) -> Self {
        let blocks = lease.blocks();
        let within = |(tier, held): (Tier, Range<usize>)| {
            let held = held.start..held.end.min(blocks);
            (tier.name(), held.len())
        };
        let by_tier = lease.full().held().plan().map(within).filter(|&(_, held)| held > 0).collect();
        Self { blocks, by_tier, held: Some(lease) }
    }

    pub(crate) fn take(&mut self) -> PyResult<kvbm::HybridLease> {
        self.held.take().ok_or_else(used_before)
    }
}

#[pymethods]
impl HybridLease {
    /// Positions of the blocks that a cache group has for the engine: the first, and the one behind the last.
    fn wanted(&self, group: u8) -> PyResult<(usize, usize)> {
        let wanted = self.held.as_ref().ok_or_else(used_before)?.wanted(group);
        let wanted = wanted
            .ok_or_else(|| classes::InvalidError::new_err(format!("there is no cache group {group}")))?;
        Ok((wanted.start, wanted.end))
    }
}

fn used_before() -> PyErr {
    classes::InvalidError::new_err("the lease was used before")
}

/// A load of all cache groups into an engine's slots. Dropping it loses the answer, not the work.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct HybridLoad(pub(crate) Transfer<HybridLoaded>);

#[pymethods]
impl HybridLoad {
    /// How it ended, or `None` while it is under way. The answer is given once.
    fn poll(&mut self) -> PyResult<Option<HybridLoadEnd>> {
        ended(self.0.try_take(), HybridLoadEnd::new)
    }

    /// How it ended, for which it waits `seconds` at most; `None`: it has not.
    fn wait(&mut self, py: Python<'_>, seconds: f64) -> PyResult<Option<HybridLoadEnd>> {
        let limit = duration(seconds);
        ended(py.detach(|| self.0.wait_for(limit)), HybridLoadEnd::new)
    }

    /// Waits, `seconds` at most, until the first `layers` layers of every block of full attention are there. `False`: they
    /// are not.
    fn wait_layers(&self, py: Python<'_>, layers: u16, seconds: f64) -> bool {
        let limit = duration(seconds);
        py.detach(|| self.0.wait_layers(layers, limit))
    }

    /// Ends it early: what waits in a queue is not copied.
    fn cancel(&mut self) {
        self.0.cancel();
    }
}

/// How a load of all cache groups ended.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct HybridLoadEnd {
    /// Everything that was asked for is in the engine's slots. Else no window and no state in them may be used.
    #[pyo3(get)]
    is_whole: bool,
    /// Leading blocks that may be asked for next; those of full attention before these that were asked for have arrived.
    #[pyo3(get)]
    usable: usize,
    writers: Vec<Writers>,
}

impl HybridLoadEnd {
    fn new(loaded: HybridLoaded) -> Self {
        let HybridLoaded { is_whole, usable, writers } = loaded;
        Self { is_whole, usable, writers }
    }
}

#[pymethods]
impl HybridLoadEnd {
    /// Whether no medium may still write the slots of blocks that failed: until then they must not be used.
    fn slots_are_free(&self) -> bool {
        self.writers.iter().all(Writers::are_gone)
    }
}

/// A save of all cache groups from an engine's slots. Dropping it loses the answer, not the work.
#[pyclass(module = "kvbm_rs")]
#[derive(Debug)]
pub(crate) struct HybridSave(pub(crate) Transfer<HybridSaved>);

#[pymethods]
impl HybridSave {
    /// How it ended, or `None` while it is under way. The answer is given once.
    fn poll(&mut self) -> PyResult<Option<HybridSaveEnd>> {
        ended(self.0.try_take(), |saved| HybridSaveEnd::new(&saved))
    }

    /// How it ended, for which it waits `seconds` at most; `None`: it has not.
    fn wait(&mut self, py: Python<'_>, seconds: f64) -> PyResult<Option<HybridSaveEnd>> {
        let limit = duration(seconds);
        ended(py.detach(|| self.0.wait_for(limit)), |saved| HybridSaveEnd::new(&saved))
    }

    /// Ends it early: what waits in a queue is not copied.
    fn cancel(&mut self) {
        self.0.cancel();
    }
}

/// How a save of all cache groups ended.
#[pyclass(module = "kvbm_rs", frozen, get_all)]
#[derive(Debug)]
pub(crate) struct HybridSaveEnd {
    /// Leading blocks of the chain that the uppermost tier has now, of full attention.
    blocks: usize,
    /// By cache group: checkpoints that could be made, and those of them that are there now.
    checkpoints: BTreeMap<u8, (usize, usize)>,
}

impl HybridSaveEnd {
    fn new(saved: &HybridSaved) -> Self {
        let checkpoints = saved.groups.iter().map(|group| (group.group, (group.checkpoints, group.whole)));
        Self { blocks: saved.full.blocks, checkpoints: checkpoints.collect() }
    }
}

/// The engine's slots of each group, while a call names them.
pub(crate) struct Named(Vec<(u8, usize, Vec<SlotId>)>);

impl Named {
    pub(crate) fn new(slots: Vec<Slots>) -> Self {
        let named = |(group, first, slots): Slots| (group, first, slots.into_iter().map(SlotId).collect());
        Self(slots.into_iter().map(named).collect())
    }

    pub(crate) fn slots(&self) -> Vec<GroupSlots<'_>> {
        self.0.iter().map(|&(group, first, ref slots)| GroupSlots { group, first, slots }).collect()
    }

    /// Where the named blocks of full attention end on the chain.
    pub(crate) fn end_of_full(&self) -> usize {
        let of_full = self.0.iter().find(|&&(group, ..)| group == 0);
        of_full.map_or(0, |(_, first, slots)| first.saturating_add(slots.len()))
    }
}
