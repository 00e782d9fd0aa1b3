//! Which block of which segment fills a slot, and which segments nobody needs any more.

use super::segment::SegmentName;
use crate::copy::SlotId;

/// Slots whose locations are allocated together: 16 KiB.
const CHUNK: usize = 2048;

/// Slot → place. Slots are numbers only: memory grows with those that were used, 8 bytes each.
#[derive(Debug, Default)]
pub(super) struct Locations {
    chunks: Vec<Option<Box<[Location; CHUNK]>>>,
    segments: Vec<Option<Segment>>,
    /// Free places in `segments`.
    vacant: Vec<u32>,
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) segment: SegmentName,
    /// Which block of the segment.
    pub(super) position: u32,
}

#[derive(Clone, Copy, Debug)]
struct Location {
    segment: u32,
    position: u32,
}

impl Location {
    const NOWHERE: Self = Self { segment: u32::MAX, position: 0 };
}

#[derive(Debug)]
struct Segment {
    name: SegmentName,
    /// Slots that lie in it.
    live: u32,
}

impl Locations {
    /// Where the content of `slot` is; `None`: it has none.
    pub(super) fn find(&self, slot: SlotId) -> Option<Place> {
        let (chunk, at) = split(slot);
        let location = self.chunks.get(chunk)?.as_ref()?[at];
        let segment = self.segments.get(location.segment as usize)?.as_ref()?;
        Some(Place { segment: segment.name, position: location.position })
    }

    /// Forgets the content of `slot`. Returns its segment if no other slot lies in that.
    pub(super) fn vacate(&mut self, slot: SlotId) -> Option<SegmentName> {
        let (chunk, at) = split(slot);
        let location = self.chunks.get_mut(chunk)?.as_mut()?.get_mut(at)?;
        let number = std::mem::replace(location, Location::NOWHERE).segment;
        let entry = self.segments.get_mut(number as usize)?;
        let segment = entry.as_mut()?;
        segment.live -= 1;
        if segment.live > 0 {
            return None;
        }
        let name = segment.name;
        *entry = None;
        self.vacant.push(number);
        Some(name)
    }

    /// The blocks of the new segment `name` are the content of these slots, each of which is vacant.
    pub(super) fn place(&mut self, name: SegmentName, slots: &[SlotId]) {
        let segment = self.number(Segment { name, live: slots.len() as u32 });
        for (position, &slot) in slots.iter().enumerate() {
            let (chunk, at) = split(slot);
            self.chunk(chunk)[at] = Location { segment, position: position as u32 };
        }
    }

    /// The segments that hold the content of a slot.
    pub(super) fn segments(&self) -> impl Iterator<Item = SegmentName> {
        self.segments.iter().flatten().map(|segment| segment.name)
    }

    fn number(&mut self, segment: Segment) -> u32 {
        if let Some(number) = self.vacant.pop() {
            self.segments[number as usize] = Some(segment);
            return number;
        }
        self.segments.push(Some(segment));
        // There are fewer segments than slots, and those are numbered with 32 bits.
        (self.segments.len() - 1) as u32
    }

    fn chunk(&mut self, index: usize) -> &mut [Location; CHUNK] {
        if self.chunks.len() <= index {
            self.chunks.resize_with(index + 1, || None);
        }
        self.chunks[index].get_or_insert_with(|| Box::new([Location::NOWHERE; CHUNK]))
    }
}

const fn split(slot: SlotId) -> (usize, usize) {
    (slot.0 as usize / CHUNK, slot.0 as usize % CHUNK)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::super::segment::SegmentNames;
    use super::*;

    proptest! {
        /// Against the obvious model: a map from slot to place.
        #[test]
        fn a_segment_dies_with_its_last_slot(
            batches in prop::collection::vec(prop::collection::hash_set(0u32..40, 1..8), 1..60)
        ) {
            let names = SegmentNames::new();
            let mut locations = Locations::default();
            let mut model: HashMap<SlotId, Place> = HashMap::new();
            for batch in batches {
                // Spread over chunks.
                let slots: Vec<_> = batch.into_iter().map(|slot| SlotId(slot * 1000)).collect();
                for &slot in &slots {
                    let old = model.remove(&slot).map(|place| place.segment);
                    let dead = old.filter(|&name| !model.values().any(|place| place.segment == name));
                    prop_assert_eq!(locations.vacate(slot), dead);
                }
                let segment = names.next();
                locations.place(segment, &slots);
                for (position, &slot) in (0..).zip(&slots) {
                    model.insert(slot, Place { segment, position });
                }
                for slot in (0..40).map(|slot| SlotId(slot * 1000)) {
                    prop_assert_eq!(locations.find(slot), model.get(&slot).copied());
                }
            }
        }
    }

    #[test]
    fn the_highest_slot_costs_little() {
        let mut locations = Locations::default();
        let slot = SlotId(u32::MAX);
        assert_eq!((locations.find(slot), locations.vacate(slot)), (None, None));
        locations.place(SegmentNames::new().next(), &[slot]);
        assert!(locations.find(slot).is_some());
        assert_eq!(locations.chunks.iter().flatten().count(), 1);
    }
}
