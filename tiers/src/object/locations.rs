//! Which block of which segment fills a slot, which segments are worth compacting, and which are
//! not needed.

use std::collections::{BTreeSet, HashMap};

use super::names::SegmentId;
use crate::copy::SlotId;

/// Slots whose locations are allocated together: 16 KiB.
const CHUNK: usize = 2048;

/// Blocks that segments may hold for every hundred that fill a slot. Less space would cost more
/// copying (figures: `docs/object-format.md`).
const MAX_SPACE_PERCENT: u64 = 130;

/// Slot → place. Slots are numbers only: memory grows with those that were used, 12 bytes each.
#[derive(Debug, Default)]
pub(super) struct BlockLocations {
    chunks: Vec<Option<Box<[BlockLocation; CHUNK]>>>,
    segments: Vec<Option<StoredSegment>>,
    /// Free places in `segments`.
    vacant: Vec<u32>,
    /// Segments that hold blocks which fill no slot, emptiest first.
    wasteful: BTreeSet<SegmentGarbage>,
    blocks: BlockCounts,
    /// Numbers of the segments that were found in the store.
    found: HashMap<SegmentId, u32>,
}

/// How many blocks there are in segments that were written here: others bound the space of theirs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BlockCounts {
    /// In segments.
    pub(super) stored: u64,
    /// That fill a slot.
    pub(super) live: u64,
}

/// Where a block is that is being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockPlace {
    pub(super) segment: SegmentId,
    pub(super) location: BlockLocation,
}

/// Which block of which segment; a segment keeps its number as long as it is read or fills a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockLocation {
    pub(super) segment: u32,
    pub(super) position: u32,
}

/// Of blocks that were not taken over from a segment that was found.
const NO_SLOT: SlotId = SlotId(u32::MAX);

impl BlockLocation {
    const NOWHERE: Self = Self { segment: u32::MAX, position: 0 };
}

/// A block that is the content of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct LiveBlock {
    pub(super) location: BlockLocation,
    pub(super) slot: SlotId,
}

/// A segment to compact. Until it is released it stays, and no other task compacts it.
#[derive(Debug)]
pub(super) struct CompactionVictim {
    pub(super) segment: SegmentId,
    pub(super) number: u32,
    /// How many blocks it holds.
    pub(super) blocks: usize,
    /// Those that fill a slot, in the order of their positions.
    pub(super) live: Vec<LiveBlock>,
}

/// Share of a segment's blocks that fill a slot, in millionths, and its number.
type SegmentGarbage = (u64, u32);

/// A segment that could not be read counts as this much fuller each time: soon others go first.
const FAILURE: u64 = 100_000;

#[derive(Debug)]
struct StoredSegment {
    id: SegmentId,
    /// For which slots its blocks were written.
    slots: Box<[SlotId]>,
    /// Slots that lie in it.
    live: u32,
    /// It is not deleted while it is read.
    readers: u32,
    /// Another worker wrote it, or this one in an earlier life: it is neither compacted nor deleted
    /// here.
    found: bool,
    /// No task compacts it.
    compactable: bool,
    /// How often it could not be read when it was to be compacted.
    failures: u32,
}

impl StoredSegment {
    fn emptiness(&self, number: u32) -> Option<SegmentGarbage> {
        let blocks = self.slots.len() as u64;
        let live = u64::from(self.live);
        let wasteful = self.compactable && !self.found && live > 0 && live < blocks;
        wasteful.then(|| (live * 1_000_000 / blocks + u64::from(self.failures) * FAILURE, number))
    }
}

impl BlockLocations {
    /// Where the content of `slot` is; `None`: it has none. The segment stays until it is released.
    pub(super) fn read(&mut self, slot: SlotId) -> Option<BlockPlace> {
        let location = self.find(slot)?;
        let segment = self.segments.get_mut(location.segment as usize)?.as_mut()?;
        segment.readers += 1;
        Some(BlockPlace { segment: segment.id, location })
    }

    /// One reader of a segment less. Returns the segment if nothing here needs it any more, and it
    /// is ours.
    pub(super) fn release(&mut self, number: u32) -> Option<SegmentId> {
        self.change(number, |segment| segment.readers -= 1)
    }

    /// Forgets the content of `slot`. Returns its segment if nothing here needs that any more, and
    /// it is ours.
    pub(super) fn vacate(&mut self, slot: SlotId) -> Option<SegmentId> {
        let location = self.find(slot)?;
        self.set(slot, BlockLocation::NOWHERE);
        self.change(location.segment, |segment| segment.live -= 1)
    }

    /// The blocks of the new segment `id` are the content of these slots, each of which is vacant.
    pub(super) fn place(&mut self, id: SegmentId, slots: &[SlotId]) {
        let number = self.add(id, slots.into(), false);
        for (position, &slot) in (0..).zip(slots) {
            self.set(slot, BlockLocation { segment: number, position });
        }
        self.change(number, |segment| segment.live = slots.len() as u32);
    }

    /// Blocks of the segment `id`, which was found in the store, are the content of these slots,
    /// each of which is vacant. `None`: a block that fills none.
    pub(super) fn adopt(&mut self, id: SegmentId, slots: &[Option<SlotId>]) {
        let number = self.add(id, slots.iter().map(|slot| slot.unwrap_or(NO_SLOT)).collect(), true);
        let adopted = (0..).zip(slots).filter_map(|(position, slot)| Some((position, (*slot)?)));
        let live = adopted
            .map(|(position, slot)| self.set(slot, BlockLocation { segment: number, position }))
            .count();
        self.change(number, |segment| segment.live = live as u32);
    }

    /// Block `position` of a segment of `blocks`, which another worker wrote, is the content of
    /// `slot`, which is vacant.
    pub(super) fn link(&mut self, slot: SlotId, id: SegmentId, position: u32, blocks: u32) {
        let number = match self.found.get(&id) {
            Some(&number) => number,
            None => self.add(id, vec![NO_SLOT; blocks as usize].into(), true),
        };
        self.set(slot, BlockLocation { segment: number, position });
        self.change(number, |segment| segment.live += 1);
    }

    /// The blocks of the new segment `id` are copies of those that are, or were, at these
    /// locations. They replace those that are still the content of these slots. Returns `id` if
    /// none is.
    pub(super) fn relocate(&mut self, id: SegmentId, copied: &[LiveBlock]) -> Option<SegmentId> {
        let number = self.add(id, copied.iter().map(|block| block.slot).collect(), false);
        let mut live = 0;
        for (position, &LiveBlock { location: from, slot }) in (0..).zip(copied) {
            // Written again, or vacated, while its old content was copied: the newer one wins.
            if self.find(slot) == Some(from) {
                self.set(slot, BlockLocation { segment: number, position });
                self.change(from.segment, |segment| segment.live -= 1);
                live += 1;
            }
        }
        self.change(number, |segment| segment.live = live)
    }

    /// Segments to compact before `more` blocks are written: the emptiest ones, whose blocks fill
    /// at most one segment of `most`. None where space is not wasted.
    pub(super) fn victims(&mut self, more: usize, most: usize) -> Vec<CompactionVictim> {
        let mut victims: Vec<CompactionVictim> = Vec::new();
        let mut room = most;
        while self.is_wasteful(more as u64)
            && let Some(&(_, number)) = self.wasteful.first()
            && let Some(victim) =
                self.victim(number).filter(|victim| victims.is_empty() || victim.live.len() <= room)
        {
            self.change(number, |segment| {
                segment.compactable = false;
                segment.readers += 1;
            });
            room = room.saturating_sub(victim.live.len());
            victims.push(victim);
        }
        victims
    }

    /// A victim was not compacted, or not wholly. It is worth another try, if it could be read
    /// before others.
    pub(super) fn spare(&mut self, number: u32, could_be_read: bool) {
        self.change(number, |segment| {
            segment.compactable = true;
            segment.failures += u32::from(!could_be_read);
        });
    }

    /// How many blocks there are.
    pub(super) const fn blocks(&self) -> BlockCounts {
        self.blocks
    }

    /// All slots that have content.
    pub(super) fn slots(&self) -> Vec<SlotId> {
        let chunks =
            self.chunks.iter().enumerate().filter_map(|(at, chunk)| Some((at, chunk.as_ref()?)));
        let slots = chunks.flat_map(|(at, chunk)| (at * CHUNK..).zip(chunk.iter()));
        let full = slots.filter(|(_, location)| **location != BlockLocation::NOWHERE);
        full.map(|(slot, _)| SlotId(slot as u32)).collect()
    }

    /// The segments that hold the content of a slot, or are being read.
    pub(super) fn segments(&self) -> impl Iterator<Item = SegmentId> {
        self.segments.iter().flatten().map(|segment| segment.id)
    }

    /// Those that were written here.
    pub(super) fn own_segments(&self) -> impl Iterator<Item = SegmentId> {
        self.segments.iter().flatten().filter(|segment| !segment.found).map(|segment| segment.id)
    }

    /// Blocks of segments that were found in the store which fill a slot.
    pub(super) fn found_blocks(&self) -> u64 {
        let found = self.segments.iter().flatten().filter(|segment| segment.found);
        found.map(|segment| u64::from(segment.live)).sum()
    }

    /// Whether too much space will be wasted when `more` blocks have been written.
    const fn is_wasteful(&self, more: u64) -> bool {
        (self.blocks.stored + more) * 100 > (self.blocks.live + more) * MAX_SPACE_PERCENT
    }

    fn victim(&self, number: u32) -> Option<CompactionVictim> {
        let segment = self.segments.get(number as usize)?.as_ref()?;
        let locations = (0..).map(|position| BlockLocation { segment: number, position });
        let live =
            locations.zip(&segment.slots).map(|(location, &slot)| LiveBlock { location, slot });
        let live = live.filter(|block| self.find(block.slot) == Some(block.location)).collect();
        Some(CompactionVictim { segment: segment.id, number, blocks: segment.slots.len(), live })
    }

    fn find(&self, slot: SlotId) -> Option<BlockLocation> {
        let (chunk, at) = split(slot);
        let location = self.chunks.get(chunk)?.as_ref()?[at];
        (location != BlockLocation::NOWHERE).then_some(location)
    }

    fn set(&mut self, slot: SlotId, location: BlockLocation) {
        let (chunk, at) = split(slot);
        if self.chunks.len() <= chunk {
            self.chunks.resize_with(chunk + 1, || None);
        }
        self.chunks[chunk].get_or_insert_with(|| Box::new([BlockLocation::NOWHERE; CHUNK]))[at] =
            location;
    }

    /// A segment without live blocks yet.
    fn add(&mut self, id: SegmentId, slots: Box<[SlotId]>, found: bool) -> u32 {
        if !found {
            self.blocks.stored += slots.len() as u64;
        }
        let segment = Some(StoredSegment {
            id,
            slots,
            live: 0,
            readers: 0,
            found,
            compactable: true,
            failures: 0,
        });
        // There are fewer segments than slots, and those are numbered with 32 bits.
        let number = self.vacant.pop().unwrap_or(self.segments.len() as u32);
        match self.segments.get_mut(number as usize) {
            Some(vacant) => *vacant = segment,
            None => self.segments.push(segment),
        }
        if found {
            self.found.insert(id, number);
        }
        number
    }

    /// Changes a segment and whatever follows from that. If nothing here needs it any more, forgets
    /// it, and returns which one it was if it is ours.
    fn change(
        &mut self,
        number: u32,
        change: impl FnOnce(&mut StoredSegment),
    ) -> Option<SegmentId> {
        let entry = self.segments.get_mut(number as usize)?;
        let segment = entry.as_mut()?;
        let (before, live) = (segment.emptiness(number), segment.live);
        change(segment);
        let (after, needed) = (segment.emptiness(number), segment.live > 0 || segment.readers > 0);
        if !segment.found {
            self.blocks.live = self.blocks.live + u64::from(segment.live) - u64::from(live);
        }
        // Readers come and go more often than blocks do, and leave the order as it is.
        if before != after {
            before.inspect(|before| _ = self.wasteful.remove(before));
            self.wasteful.extend(after);
        }
        if needed {
            return None;
        }
        let dead = entry.take()?;
        // Numbers come again only here, where nothing reads the segment: a reader's `BlockPlace`
        // names the segment by number.
        self.vacant.push(number);
        if dead.found {
            self.found.remove(&dead.id);
            return None;
        }
        self.blocks.stored -= dead.slots.len() as u64;
        Some(dead.id)
    }
}

const fn split(slot: SlotId) -> (usize, usize) {
    (slot.0 as usize / CHUNK, slot.0 as usize % CHUNK)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::super::names::{SegmentId, SegmentNames};
    use super::*;

    /// The obvious model: what every segment holds, and which writing of a slot is the last.
    #[derive(Default)]
    struct Model {
        segments: HashMap<SegmentId, Vec<(SlotId, usize)>>,
        content: HashMap<SlotId, usize>,
    }

    impl Model {
        /// `name` was said to be dead.
        fn bury(&mut self, name: SegmentId) {
            let blocks = self.segments.remove(&name).expect("it was not dead yet");
            for (slot, version) in blocks {
                let is_elsewhere =
                    || self.segments.values().flatten().any(|block| *block == (slot, version));
                assert!(
                    self.content.get(&slot) != Some(&version) || is_elsewhere(),
                    "its last copy is dead"
                );
            }
        }

        fn check(&self, locations: &mut BlockLocations) {
            let mut slots: Vec<_> = self.content.keys().copied().collect();
            slots.sort_unstable_by_key(|slot| slot.0);
            assert_eq!(locations.slots(), slots);
            for (&slot, &version) in &self.content {
                let place = locations.read(slot).expect("the slot has content");
                let block = self.segments[&place.segment][place.location.position as usize];
                assert_eq!(block, (slot, version));
                assert_eq!(locations.release(place.location.segment), None);
            }
            let stored = self.segments.values().map(Vec::len).sum::<usize>() as u64;
            assert_eq!(locations.blocks(), BlockCounts { stored, live: self.content.len() as u64 });
            assert_eq!(locations.segments().count(), self.segments.len());
        }
    }

    fn next_id() -> SegmentId {
        SegmentId { epoch: 3, name: SegmentNames::new().next() }
    }

    fn compact(
        locations: &mut BlockLocations,
        model: &mut Model,
        victims: &[CompactionVictim],
        name: SegmentId,
    ) {
        let copied: Vec<_> =
            victims.iter().flat_map(|victim| victim.live.iter().copied()).collect();
        let blocks = victims.iter().flat_map(|victim| {
            let blocks = &model.segments[&victim.segment];
            victim.live.iter().map(|block| blocks[block.location.position as usize])
        });
        let blocks = blocks.collect();
        model.segments.insert(name, blocks);
        assert_eq!(locations.relocate(name, &copied), None);
        for victim in victims {
            model.bury(locations.release(victim.number).expect("nothing is left in it"));
        }
    }

    proptest! {
        #[test]
        fn every_slot_is_found_and_space_is_bounded(
            batches in prop::collection::vec(prop::collection::hash_set(0u32..40, 1..8), 1..60)
        ) {
            let (mut locations, mut model) = (BlockLocations::default(), Model::default());
            for (version, batch) in batches.into_iter().enumerate() {
                // Spread over chunks.
                let slots: Vec<_> = batch.into_iter().map(|slot| SlotId(slot * 1000)).collect();
                for &slot in &slots {
                    model.content.remove(&slot);
                    locations.vacate(slot).into_iter().for_each(|name| model.bury(name));
                }
                loop {
                    let victims = locations.victims(slots.len(), 8);
                    if victims.is_empty() {
                        break;
                    }
                    compact(&mut locations, &mut model, &victims, next_id());
                }
                let segment = next_id();
                locations.place(segment, &slots);
                model.content.extend(slots.iter().map(|&slot| (slot, version)));
                model.segments.insert(segment, slots.into_iter().map(|slot| (slot, version)).collect());
                model.check(&mut locations);
                let BlockCounts { stored, live } = locations.blocks();
                prop_assert!(stored * 100 <= live * MAX_SPACE_PERCENT);
            }
        }
    }

    /// Four slots in one segment, of which one is written again.
    fn wasteful() -> (BlockLocations, SegmentId) {
        let (mut locations, name) = (BlockLocations::default(), next_id());
        locations.place(name, &[0, 1, 2, 3].map(SlotId));
        assert_eq!(locations.vacate(SlotId(0)), None);
        (locations, name)
    }

    #[test]
    fn a_slot_written_amid_compaction_keeps_its_new_content() {
        let (mut locations, old) = wasteful();
        let [victim] = &locations.victims(0, 4)[..] else { panic!("one segment") };
        assert!(locations.victims(0, 4).is_empty(), "it is under way");
        locations.vacate(SlotId(1));
        let [new, compacted] = [1, 2].map(|_| next_id());
        locations.place(new, &[SlotId(1)]);
        assert_eq!(locations.relocate(compacted, &victim.live), None);
        assert_eq!(locations.read(SlotId(1)).unwrap().segment, new);
        assert_eq!(locations.read(SlotId(2)).unwrap().segment, compacted);
        assert_eq!(locations.release(victim.number), Some(old));
    }

    #[test]
    fn a_segment_stays_as_long_as_it_is_read() {
        let (mut locations, old) = wasteful();
        let place = locations.read(SlotId(3)).unwrap();
        let [victim] = &locations.victims(0, 4)[..] else { panic!("one segment") };
        locations.relocate(next_id(), &victim.live);
        assert_eq!(locations.release(victim.number), None, "somebody reads it");
        assert_eq!(locations.release(place.location.segment), Some(old));
    }

    #[test]
    fn a_failed_compaction_is_tried_again_if_told_so() {
        let (mut locations, _) = wasteful();
        let victims = locations.victims(0, 4);
        assert_eq!(locations.release(victims[0].number), None);
        assert!(locations.victims(0, 4).is_empty());
        locations.spare(victims[0].number, true);
        assert_eq!(locations.victims(0, 4).len(), 1);
    }

    #[test]
    fn found_segments_are_not_counted_compacted_or_deleted_here() {
        let mut locations = BlockLocations::default();
        let found = next_id();
        locations.adopt(found, &[Some(SlotId(5)), None, Some(SlotId(6)), None]);
        locations.link(SlotId(7), found, 3, 4);
        assert_eq!((locations.found_blocks(), locations.blocks()), (3, BlockCounts::default()));
        assert_eq!(locations.read(SlotId(7)).unwrap().location.position, 3);
        assert!(locations.victims(0, 8).is_empty());
        assert_eq!(
            (locations.segments().collect::<Vec<_>>(), locations.own_segments().count()),
            (vec![found], 0)
        );
        let number = locations.find(SlotId(7)).unwrap().segment;
        let vacated = [5, 6, 7].map(|slot| locations.vacate(SlotId(slot)));
        assert_eq!((vacated, locations.release(number)), ([None; 3], None));
        assert_eq!(locations.segments().count(), 0);
        locations.link(SlotId(8), found, 0, 4);
        assert_eq!(locations.found_blocks(), 1, "it may be found again");
    }

    #[test]
    fn the_highest_slot_costs_little() {
        let mut locations = BlockLocations::default();
        let slot = SlotId(u32::MAX);
        assert_eq!((locations.read(slot), locations.vacate(slot)), (None, None));
        locations.place(next_id(), &[slot]);
        assert!(locations.read(slot).is_some());
        assert_eq!(locations.chunks.iter().flatten().count(), 1);
    }
}
