//! What other workers have stored since this one looked: it is not stored again.

use std::collections::{HashMap, HashSet, VecDeque};

use super::discover::Read;
use super::names::SegmentName;
use super::segment::Entry;
use crate::copy::BlockKey;

/// Blocks that are remembered: 100 bytes each.
const MAX_BLOCKS: usize = 1 << 20;
/// Clocks of workers differ by less, in milliseconds: names that are so much older than the newest may be new.
const OVERLAP_MS: u128 = 10 * 60 * 1_000;

/// Blocks of other workers that fill no slot here.
#[derive(Debug, Default)]
pub(super) struct Known {
    newest: Option<SegmentName>,
    /// Segments that were looked at, as far as they would be listed again.
    seen: HashSet<SegmentName>,
    /// Where a look goes on that did not get to the end; `None`: at the horizon.
    next: Option<SegmentName>,
    /// The oldest of those that could not be looked at.
    missed: Option<SegmentName>,
    blocks: HashMap<BlockKey, Spot>,
    /// Those that nobody was asked to take in yet, or nobody could take in, parents first.
    waiting: VecDeque<BlockKey>,
}

/// Where another worker's block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    /// Hash of the block before it in its chain.
    pub(super) parent: Option<u128>,
    pub(super) segment: SegmentName,
    pub(super) position: u32,
    /// Blocks of the segment.
    pub(super) blocks: u32,
    pub(super) crc32c: u32,
    /// Whose it is.
    pub(super) tenant: Option<u32>,
}

impl Known {
    /// Segments with names behind this one may be new; `None`: all may.
    pub(super) fn horizon(&self) -> Option<SegmentName> {
        let recent = self.newest?.0.saturating_sub(OVERLAP_MS << 80);
        Some(SegmentName(self.missed.map_or(recent, |missed| recent.min(missed.0.saturating_sub(1)))))
    }

    /// A look at what is new begins behind this one; `None`: it looks at all.
    pub(super) fn look_from(&self) -> Option<SegmentName> {
        self.next.or_else(|| self.horizon())
    }

    /// A look got as far as this, or to the end (`None`), and could not look at some of what there is.
    pub(super) fn looked_until(&mut self, last: Option<SegmentName>, away: &[SegmentName]) {
        let before = self.missed.filter(|_| self.next.is_some());
        self.missed = away.iter().copied().chain(before).min();
        self.next = last;
    }

    pub(super) fn has_seen(&self, name: SegmentName) -> bool {
        self.seen.contains(&name)
    }

    /// These were looked at.
    pub(super) fn see(&mut self, names: impl IntoIterator<Item = SegmentName>) {
        self.seen.extend(names);
        self.newest = self.newest.max(self.seen.iter().max().copied());
        let horizon = self.horizon();
        self.seen.retain(|&name| Some(name) > horizon);
    }

    /// These are what others wrote, under names that blocks have now.
    pub(super) fn learn(&mut self, read: &[Read]) {
        for read in read {
            let blocks = read.footer.entries.len() as u32;
            for (position, entry) in (0..).zip(&read.footer.entries) {
                if self.blocks.len() < MAX_BLOCKS {
                    let Entry { block, parent, crc32c, tenant, .. } = *entry;
                    let spot = Spot { parent, segment: read.name, position, blocks, crc32c, tenant };
                    if self.blocks.insert(block, spot).is_none() {
                        self.waiting.push_back(block);
                    }
                }
            }
        }
    }

    /// Where a block lies. Only once: if it cannot be had from there, it is stored again.
    pub(super) fn take(&mut self, block: BlockKey) -> Option<Spot> {
        self.blocks.remove(&block)
    }

    /// How many wait to be taken in.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The next ones to be taken in, at most so many.
    pub(super) fn next_waiting(&mut self, most: usize) -> Vec<(BlockKey, Spot)> {
        let next: Vec<_> = self.waiting.drain(..most.min(self.waiting.len())).collect();
        next.into_iter().filter_map(|block| Some((block, *self.blocks.get(&block)?))).collect()
    }

    /// A block could not be taken in yet.
    pub(super) fn wait(&mut self, block: BlockKey) {
        self.waiting.push_back(block);
    }

    /// Blocks have other names from here on, or what was known lies nowhere any more.
    pub(super) fn forget_blocks(&mut self, is_gone: impl Fn(SegmentName) -> bool) {
        self.blocks.retain(|_, spot| !is_gone(spot.segment));
    }
}

#[cfg(test)]
mod tests {
    use super::super::segment::{Entry, Footer, Provenance};
    use super::*;

    #[test]
    fn a_name_is_looked_at_once_also_where_clocks_differ() {
        let mut known = Known::default();
        assert_eq!(known.horizon(), None);
        let at = |minute: u128| SegmentName((minute * 60_000) << 80 | 7);
        known.see([at(100), at(95), at(1)]);
        assert!(known.has_seen(at(95)) && !known.has_seen(at(94)));
        assert!(at(91) > known.horizon().unwrap() && at(89) < known.horizon().unwrap());
        known.see([at(120)]);
        assert!(
            known.has_seen(at(120)) && !known.has_seen(at(95)),
            "what is not listed again is not remembered"
        );
    }

    #[test]
    fn a_block_is_had_once() {
        let block = BlockKey { hash: 1, group: 0 };
        let entry = Entry { block, parent: None, offset: 0, length: 64, crc32c: 9, tenant: None };
        let footer = Footer { provenance: Provenance::default(), entries: vec![entry] };
        let (mut known, name) = (Known::default(), SegmentName(5));
        known.learn(&[Read { name, footer }]);
        let spot = Spot { parent: None, segment: name, position: 0, blocks: 1, crc32c: 9, tenant: None };
        assert_eq!(known.next_waiting(8), [(block, spot)]);
        known.wait(block);
        assert_eq!(known.take(block), Some(spot));
        assert_eq!((known.take(block), known.next_waiting(8)), (None, vec![]));
    }
}
