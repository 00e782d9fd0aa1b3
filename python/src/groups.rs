//! Models of several cache groups: full attention, and beside it layers that keep a window or a
//! state.

use kvbm::{GroupKind, GroupSlots, SlotId};
use pyo3::prelude::*;

use crate::memory::EngineMemory;

/// A group's number, the position on the chain of the first block, and the engine's slots of it and
/// those that follow.
pub(crate) type Slots = (u8, usize, Vec<u32>);

/// Layers of a hybrid model that do not keep every block.
///
/// Args: name: names it in metrics: letters, digits and `_`, and not `full`. memory: the KV tensors
/// of these layers, in blocks of their own size. window: how many full blocks a token may look back
/// into; `None`: the layers keep a state, in one slot.
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

/// The engine's slots of each group, while a call names them.
pub(crate) struct NamedSlots(Vec<(u8, usize, Vec<SlotId>)>);

impl NamedSlots {
    pub(crate) fn new(slots: Vec<Slots>) -> Self {
        let named =
            |(group, first, slots): Slots| (group, first, slots.into_iter().map(SlotId).collect());
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
