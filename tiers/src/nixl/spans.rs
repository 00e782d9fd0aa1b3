//! Where slots are in prepared lists.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use super::request::SegmentList;
use crate::copy::SlotId;
use crate::error::SetupError;

/// Prepares the list of some slots, one segment for each.
pub(super) type Prepare = dyn Fn(Range<u32>) -> Result<Arc<SegmentList>, SetupError> + Send;

/// A region's slots in lists of equal length, each prepared when a slot of it is first used: a list takes time
/// and memory in proportion to its slots, and some tiers have a thousand million.
pub(super) struct Spans {
    slots: u32,
    span: u32,
    prepare: Box<Prepare>,
    lists: BTreeMap<u32, Arc<SegmentList>>,
}

/// A slot's list, by number, and its position there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    pub(super) span: u32,
    pub(super) index: c_int,
}

impl Spans {
    /// `slots` slots, `span` to a list.
    pub(super) fn new(slots: u32, span: u32, prepare: Box<Prepare>) -> Self {
        Self { slots, span, prepare, lists: BTreeMap::new() }
    }

    /// `None`: there is no such slot.
    pub(super) fn position(&self, slot: SlotId) -> Option<Position> {
        let index = c_int::try_from(slot.0 % self.span).ok()?;
        (slot.0 < self.slots).then_some(Position { span: slot.0 / self.span, index })
    }

    /// A list by its number, as a [`Position`] names it.
    pub(super) fn list(&mut self, span: u32) -> Result<&Arc<SegmentList>, SetupError> {
        if !self.lists.contains_key(&span) {
            let from = span * self.span;
            let list = (self.prepare)(from..from.saturating_add(self.span).min(self.slots))?;
            self.lists.insert(span, list);
        }
        Ok(&self.lists[&span])
    }
}
