//! What other workers have stored since this one looked: it is not stored again.

use std::collections::{HashMap, HashSet, VecDeque};

use super::discover::ReadFooter;
use super::names::{ListedSegment, SegmentId, SegmentName};
use super::segment::SegmentEntry;
use crate::copy::BlockKey;

/// Blocks that are remembered: 100 bytes each.
const MAX_BLOCKS: usize = 1 << 20;
/// Clocks of workers differ by less, in milliseconds: names that are this much older than the
/// newest may be new.
const OVERLAP_MS: u64 = 10 * 60 * 1_000;

/// Blocks of other workers that fill no slot here. All of it is of one epoch.
#[derive(Debug, Default)]
pub(super) struct SegmentCatalog {
    /// The newest segments were looked at; from there on a look is for what is new, and for what
    /// that left out.
    pub(super) is_surveyed: bool,
    /// When the newest segment that was seen was written, in milliseconds since 1970.
    newest_ms: Option<u64>,
    /// Segments that were looked at, as far as they would be listed again.
    seen: HashSet<SegmentName>,
    /// Where a look goes on that did not get to the end; `None`: at the horizon.
    next: Option<SegmentName>,
    /// The oldest of those that could not be looked at.
    missed: Option<SegmentName>,
    blocks: HashMap<BlockKey, ForeignSpot>,
    /// Those that were not offered yet, or could not be taken in, parents first.
    waiting: VecDeque<BlockKey>,
    forgotten: ForgottenTenants,
}

/// Tenants that were forgotten: what lay in the store by then may be under keys that are destroyed.
#[derive(Debug, Default)]
struct ForgottenTenants(HashMap<u32, Forgotten>);

#[derive(Clone, Copy, Debug)]
struct Forgotten {
    /// How often.
    life: u32,
    /// The last time, in milliseconds since 1970.
    at_ms: u64,
}

/// Where another worker's block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ForeignSpot {
    /// Hash of the block before it in its chain.
    pub(super) parent: Option<u128>,
    pub(super) segment: SegmentId,
    pub(super) position: u32,
    /// Blocks of the segment.
    pub(super) blocks: u32,
    pub(super) crc32c: u32,
    /// Whose it is.
    pub(super) tenant: Option<u32>,
}

impl ForgottenTenants {
    /// A tenant was forgotten for the `life`-th time. Returns whether that is new.
    fn forget(&mut self, tenant: u32, life: u32, now_ms: u64) -> bool {
        let before = self.0.get(&tenant).map_or(0, |forgotten| forgotten.life);
        if life > before {
            self.0.insert(tenant, Forgotten { life, at_ms: now_ms });
        }
        life > before
    }

    /// Whether a block may be one of those that were forgotten. Clocks differ, so some that came
    /// soon after are taken for such too: they are stored once more.
    fn may_hold(&self, spot: &ForeignSpot) -> bool {
        let forgotten = spot.tenant.and_then(|tenant| self.0.get(&tenant));
        forgotten
            .is_some_and(|forgotten| spot.segment.name.millis() <= forgotten.at_ms + OVERLAP_MS)
    }
}

impl SegmentCatalog {
    /// Segments with names behind this one may be new; `None`: all may.
    pub(super) fn horizon(&self) -> Option<SegmentName> {
        let recent = SegmentName::first_of(self.newest_ms?.saturating_sub(OVERLAP_MS));
        Some(
            self.missed
                .map_or(recent, |missed| recent.min(SegmentName(missed.0.saturating_sub(1)))),
        )
    }

    /// A look at what is new begins behind this one; `None`: it looks at all.
    pub(super) fn look_from(&self) -> Option<SegmentName> {
        self.next.or_else(|| self.horizon())
    }

    /// A look got as far as this, or to the end (`None`), and could not look at some of what there
    /// is.
    pub(super) fn looked_until(&mut self, last: Option<SegmentName>, away: &[SegmentName]) {
        let before = self.missed.filter(|_| self.next.is_some());
        self.missed = away.iter().copied().chain(before).min();
        self.next = last;
    }

    pub(super) fn has_seen(&self, name: SegmentName) -> bool {
        self.seen.contains(&name)
    }

    /// These were looked at, and the newest was written then.
    pub(super) fn see(
        &mut self,
        names: impl IntoIterator<Item = SegmentName>,
        newest_ms: Option<u64>,
    ) {
        self.seen.extend(names);
        self.newest_ms = self.newest_ms.max(newest_ms);
        let from = self.look_from();
        self.seen.retain(|&name| Some(name) > from);
    }

    /// These are what others wrote, under names that blocks have now.
    pub(super) fn learn<'a>(&mut self, read: impl IntoIterator<Item = &'a ReadFooter>) {
        for read in read {
            let blocks = read.footer.entries.len() as u32;
            for (position, entry) in (0..).zip(&read.footer.entries) {
                if self.blocks.len() < MAX_BLOCKS {
                    let SegmentEntry { block, parent, crc32c, tenant, .. } = *entry;
                    let spot =
                        ForeignSpot { parent, segment: read.id, position, blocks, crc32c, tenant };
                    if self.forgotten.may_hold(&spot) {
                        continue;
                    }
                    if self.blocks.insert(block, spot).is_none() {
                        self.waiting.push_back(block);
                    }
                }
            }
        }
    }

    /// Where a block lies. Only once: if it cannot be had from there, it is stored again.
    pub(super) fn take(&mut self, block: BlockKey) -> Option<ForeignSpot> {
        self.blocks.remove(&block)
    }

    /// How many wait to be taken in.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The next ones to be taken in, at most `most`.
    pub(super) fn next_waiting(&mut self, most: usize) -> Vec<(BlockKey, ForeignSpot)> {
        let next: Vec<_> = self.waiting.drain(..most.min(self.waiting.len())).collect();
        next.into_iter().filter_map(|block| Some((block, *self.blocks.get(&block)?))).collect()
    }

    /// A block could not be taken in yet.
    pub(super) fn wait(&mut self, block: BlockKey) {
        self.waiting.push_back(block);
    }

    /// Blocks in segments that are this much older than the newest, in milliseconds, may be
    /// collected any time.
    pub(super) fn forget_older(&mut self, than_ms: u64) {
        let Some(newest) = self.newest_ms else { return };
        let oldest = SegmentName::first_of(newest.saturating_sub(than_ms));
        self.blocks.retain(|_, spot| spot.segment.name >= oldest);
    }

    /// A tenant was forgotten for the `life`-th time: what was known of it, and what is yet to be
    /// found of that time, may be under a key that is destroyed.
    pub(super) fn forget_tenant(&mut self, tenant: u32, life: u32, now_ms: u64) {
        if self.forgotten.forget(tenant, life, now_ms) {
            self.blocks.retain(|_, spot| !self.forgotten.may_hold(spot));
        }
    }

    /// Blocks have other names from here on, in a directory that was not looked at.
    pub(super) fn begin_epoch(&mut self) {
        *self = Self { forgotten: std::mem::take(&mut self.forgotten), ..Self::default() };
    }
}

impl ListedSegment {
    /// When it was written, in milliseconds since 1970. A clock that is ahead must not hide what
    /// others write, so the earliest of three counts: its writer's, the store's and this worker's.
    pub(super) fn written_ms(&self, now_ms: u64) -> u64 {
        let stored = u64::try_from(self.meta.last_modified.timestamp_millis()).unwrap_or_default();
        self.name.millis().min(stored).min(now_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::super::segment::{Footer, Provenance, SegmentEntry};
    use super::*;

    #[test]
    fn a_name_is_looked_at_once_also_where_clocks_differ() {
        let mut known = SegmentCatalog::default();
        assert_eq!(known.horizon(), None);
        let minutes = |minute: u64| Some(minute * 60_000);
        let at = |minute: u128| SegmentName((minute * 60_000) << 80 | 7);
        known.see([at(100), at(95), at(1)], minutes(100));
        assert!(known.has_seen(at(95)) && !known.has_seen(at(94)));
        assert!(at(91) > known.horizon().unwrap() && at(89) < known.horizon().unwrap());
        known.see([at(120)], minutes(120));
        assert!(
            known.has_seen(at(120)) && !known.has_seen(at(95)),
            "what is not listed again is not remembered"
        );
        // A name from the future was written when its store and this worker say.
        known.see([at(9_999)], minutes(121));
        assert!(at(119) > known.horizon().unwrap() && known.has_seen(at(9_999)));
    }

    #[test]
    fn a_block_is_had_once() {
        let block = BlockKey { hash: 1, group: 0 };
        let entry =
            SegmentEntry { block, parent: None, offset: 0, length: 64, crc32c: 9, tenant: None };
        let footer = Footer { provenance: Provenance::default(), entries: vec![entry] };
        let (mut known, id) =
            (SegmentCatalog::default(), SegmentId { epoch: 3, name: SegmentName(5) });
        known.learn(&[ReadFooter { id, footer }]);
        let spot = ForeignSpot {
            parent: None,
            segment: id,
            position: 0,
            blocks: 1,
            crc32c: 9,
            tenant: None,
        };
        assert_eq!(known.next_waiting(8), [(block, spot)]);
        known.wait(block);
        assert_eq!(known.take(block), Some(spot));
        assert_eq!((known.take(block), known.next_waiting(8)), (None, vec![]));
    }

    #[test]
    fn age_tells_what_may_be_forgotten_with_its_tenant() {
        let at = |minute: u128| SegmentId { epoch: 3, name: SegmentName((minute * 60_000) << 80) };
        let spot = |tenant, segment| ForeignSpot {
            parent: None,
            segment,
            position: 0,
            blocks: 1,
            crc32c: 9,
            tenant,
        };
        let mut forgotten = ForgottenTenants::default();
        assert!(forgotten.forget(7, 1, 100 * 60_000));
        assert!(!forgotten.forget(7, 1, 900 * 60_000), "the same call, seen later");
        let held = |tenant, minute| forgotten.may_hold(&spot(tenant, at(minute)));
        assert!(held(Some(7), 99) && held(Some(7), 110) && !held(Some(7), 111));
        assert!(!held(Some(8), 99) && !held(None, 99));
    }
}
