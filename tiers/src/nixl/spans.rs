//! Where slots are in prepared lists.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use super::request::SegmentList;
use crate::copy::SlotId;
use crate::error::SetupError;

/// Prepares the list of some slots, one segment for each.
pub(super) type PrepareFn = dyn Fn(Range<u32>) -> Result<Arc<SegmentList>, SetupError> + Send;
/// Whether a slot is there: a region may do without some of its directories.
type IsThere = dyn Fn(SlotId) -> bool + Send;

/// A region's slots in lists of equal length, each prepared when a slot of it is first used: a list
/// takes time and memory in proportion to its slots, and some tiers have a thousand million.
pub(super) struct SlotLists {
    slots: u32,
    span: u32,
    prepare: Box<PrepareFn>,
    is_there: Box<IsThere>,
    lists: BTreeMap<u32, Arc<SegmentList>>,
}

/// A slot's list, by number, and its position there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ListPosition {
    pub(super) span: u32,
    pub(super) index: c_int,
}

impl SlotLists {
    /// `slots` slots, `span` to a list.
    pub(super) fn new(slots: u32, span: u32, prepare: Box<PrepareFn>) -> Self {
        Self { slots, span, prepare, is_there: Box::new(|_| true), lists: BTreeMap::new() }
    }

    /// The same, of a region that has only some of these slots.
    pub(super) fn only(self, is_there: impl Fn(SlotId) -> bool + Send + 'static) -> Self {
        Self { is_there: Box::new(is_there), ..self }
    }

    /// `None`: there is no such slot.
    pub(super) fn position(&self, slot: SlotId) -> Option<ListPosition> {
        let index = c_int::try_from(slot.0 % self.span).ok()?;
        (slot.0 < self.slots && (self.is_there)(slot))
            .then_some(ListPosition { span: slot.0 / self.span, index })
    }

    /// A list by its number, as a [`ListPosition`] names it.
    pub(super) fn list(&mut self, span: u32) -> Result<&Arc<SegmentList>, SetupError> {
        if !self.lists.contains_key(&span) {
            let from = span * self.span;
            let list = (self.prepare)(from..from.saturating_add(self.span).min(self.slots))?;
            self.lists.insert(span, list);
        }
        Ok(&self.lists[&span])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::SetupErrorKind;

    #[test]
    fn a_slot_that_is_not_there_has_no_position() {
        let prepare =
            |_| Err(SetupError::new(SetupErrorKind::Unavailable, "nobody moves anything here"));
        // The directory of every third slot is away.
        let spans = SlotLists::new(8, 4, Box::new(prepare)).only(|slot| slot.0 % 3 != 1);
        let found = (0..10).map(|slot| spans.position(SlotId(slot)).map(|at| (at.span, at.index)));
        let there = [
            Some((0, 0)),
            None,
            Some((0, 2)),
            Some((0, 3)),
            None,
            Some((1, 1)),
            Some((1, 2)),
            None,
        ];
        assert_eq!(found.collect::<Vec<_>>(), [&there[..], &[None, None]].concat());
    }
}
