//! Discovery: what a bucket holds already, from the footers of its segments.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use object_store::{ObjectMeta, ObjectStoreExt};
use tokio::time::{Instant, timeout_at};

use super::epochs::{EpochStanding, OlderEpoch};
use super::error::StoreError;
use super::names::{Least, ListedSegment, SegmentId, SegmentName};
use super::open::Store;
use super::segment::{Footer, FooterKey, FormatError, Provenance, SegmentEntry, decode};
use super::share::BucketShare;
use super::shared::{StoreContext, now_ms};
use crate::copy::{BlockKey, SlotId};
use crate::index::IndexEntry;

/// At start-up an engine waits: what was not found by then is looked for later.
pub(super) const DISCOVERY_LIMIT: Duration = Duration::from_secs(10);
/// Footers that are fetched at a time.
const CONCURRENCY: usize = 32;
/// Bytes of the longest footer that is fetched: 300,000 blocks.
const MAX_FOOTER: u64 = 16 << 20;
/// Blocks that are looked at: newest segments first, some 200 bytes of memory each while it lasts.
const MAX_BLOCKS: usize = 1 << 21;
/// Names that are in memory at a time: 300 bytes each.
const MAX_LISTED: usize = 1 << 14;
/// The time whose segments are listed first.
const FIRST_WIDTH_MS: u64 = 60_000;
/// The least time whose segments are listed together.
const MIN_WIDTH_MS: u64 = 1_000;
/// Bytes that are fetched of a segment's end at least.
pub(super) const TAIL: u64 = 16 << 10;

/// What a bucket holds already.
#[derive(Clone, Debug)]
pub struct Discovered {
    /// Blocks with all blocks before them, each behind its parent, and the slots that stand for
    /// them now.
    pub blocks: Vec<IndexEntry>,
    /// Where it is not [`Current`](EpochStanding::Current) nothing was looked for.
    pub standing: EpochStanding,
    /// The epoch of the blocks' names: the worker's own, or the bucket's if it follows.
    pub epoch: u64,
    /// Segments with blocks of this fingerprint and epoch.
    pub segments: u64,
    /// Segments that could not be understood or fetched.
    pub unread: u64,
}

/// A segment whose footer was read.
#[derive(Debug)]
pub(super) struct ReadFooter {
    pub(super) id: SegmentId,
    pub(super) footer: Footer,
}

/// Footers that were asked for.
#[derive(Debug, Default)]
pub(super) struct KnownFooters {
    pub(super) read: Vec<ReadFooter>,
    /// Blocks in them.
    blocks: usize,
    /// How many could not be fetched or understood.
    unread: u64,
    /// Segments of which that will not change.
    pub(super) looked_at: Vec<SegmentName>,
    /// Those that could not be fetched now.
    pub(super) away: Vec<SegmentName>,
    /// When the newest segment was written, in milliseconds since 1970.
    newest_ms: Option<u64>,
}

/// Finds out how the epoch stands, then what it has, and has the first slots stand for that.
pub(super) async fn discover(shared: Arc<StoreContext>, slots: u32) -> Discovered {
    let Some(share) = &shared.share else {
        return Discovered::nothing(EpochStanding::Current(0), 0);
    };
    let deadline = Instant::now() + DISCOVERY_LIMIT.min(shared.limit);
    let joined = match timeout_at(deadline, shared.join_epoch(share)).await {
        Ok(joined) => joined,
        Err(elapsed) => Err(elapsed.into()),
    };
    let standing = match joined {
        Ok(EpochStanding::Behind(latest)) if share.sharing.older_epoch == OlderEpoch::Follow => {
            shared.follow_epoch(share, latest);
            EpochStanding::Current(latest)
        }
        Ok(standing) => standing,
        Err(error) => {
            tracing::warn!(
                store = %shared.store, %error,
                "the object tier waits: which epochs have begun could not be read, and is asked again"
            );
            EpochStanding::Unknown
        }
    };
    let own = shared.provenance().epoch;
    let Some(provenance) = shared.present() else { return Discovered::nothing(standing, own) };
    shared.warn_of_former_layout(deadline).await;
    let footers = shared.survey(share, provenance, deadline).await;
    shared.adopt(&footers, provenance.epoch, slots)
}

impl Discovered {
    pub(super) const fn nothing(standing: EpochStanding, epoch: u64) -> Self {
        Self { blocks: Vec::new(), standing, epoch, segments: 0, unread: 0 }
    }
}

/// Segments of a time, newest first.
struct Newest {
    listed: Vec<ListedSegment>,
    /// There are older ones of that time.
    has_more: bool,
}

impl StoreContext {
    /// Footers of the present epoch's segments, newest first, until there are blocks enough or no
    /// time is left. What could not be looked at is for later looks.
    pub(super) async fn survey(
        &self,
        share: &BucketShare,
        wanted: Provenance,
        deadline: Instant,
    ) -> KnownFooters {
        let mut footers = KnownFooters::default();
        let surveyed = self.survey_into(&mut footers, wanted.epoch, deadline).await;
        footers.read.retain(|read| read.footer.provenance == wanted);
        if let Err(error) = &surveyed {
            tracing::warn!(store = %self.store, %error, "not all of the object store was looked through: that is for later");
        }
        // What was not listed may be as old as can be.
        let unlisted = (!surveyed.unwrap_or(false)).then_some(SegmentName::first_of(0));
        footers.away.extend(unlisted);
        if self.provenance() == wanted {
            let mut known = share.known.lock();
            known.is_surveyed = true;
            known.looked_until(None, &footers.away);
            known.see(std::mem::take(&mut footers.looked_at), footers.newest_ms);
        }
        footers
    }

    /// Stores list names from the oldest on. So what was written in the last minute is listed
    /// first, then the time before that, and so on: eight times as much of it where that held few
    /// segments, and as much as holds a page where it held more. Returns whether that was all.
    async fn survey_into(
        &self,
        footers: &mut KnownFooters,
        epoch: u64,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        let now_ms = now_ms();
        let (mut width_ms, mut before) = (FIRST_WIDTH_MS, None::<SegmentName>);
        loop {
            let until_ms = before.map_or(now_ms, SegmentName::millis);
            // Without an order a part takes as long as all.
            let from = until_ms.checked_sub(width_ms).filter(|_| self.store.lists_in_order());
            let from = from.map(SegmentName::first_of);
            let newest = timeout_at(deadline, self.newest(epoch, from, before)).await;
            let Newest { listed, has_more } = newest??;
            let newest_ms = listed.iter().map(|segment| segment.written_ms(now_ms)).max();
            footers.newest_ms = footers.newest_ms.max(newest_ms);
            let oldest = listed.last().filter(|_| has_more).map(|oldest| oldest.name);
            width_ms = match oldest {
                Some(oldest) => until_ms.saturating_sub(oldest.millis()).max(MIN_WIDTH_MS),
                None if listed.len() < MAX_LISTED / 8 => width_ms.saturating_mul(8),
                None => width_ms,
            };
            before = oldest.or(from);
            self.read_footers(footers, epoch, listed, deadline).await;
            if footers.blocks >= MAX_BLOCKS || before.is_none() {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
        }
    }

    /// The newest segments between two names.
    async fn newest(
        &self,
        epoch: u64,
        from: Option<SegmentName>,
        before: Option<SegmentName>,
    ) -> Result<Newest, StoreError> {
        let after = from.map(|name| self.path(SegmentId { epoch, name }));
        let mut listing =
            self.store.listing(&self.epoch_directory(epoch), after.as_ref(), self.limit);
        let mut newest = Least::new(MAX_LISTED);
        while let Some(meta) = listing.next().await? {
            let Some(segment) = ListedSegment::new(meta) else { continue };
            if before.is_none_or(|before| segment.name < before) {
                newest.push(Reverse(segment));
            } else if self.store.lists_in_order() {
                break;
            }
        }
        let has_more = newest.has_dropped();
        let listed = newest.into_sorted().into_iter().map(|Reverse(segment)| segment).collect();
        Ok(Newest { listed, has_more })
    }

    /// Logs once what an operator would wonder about.
    async fn warn_of_former_layout(&self, deadline: Instant) {
        let mut former = self.store.listing(&self.former_directory, None, self.limit);
        if let Ok(Ok(Some(_))) = timeout_at(deadline, former.next()).await {
            tracing::warn!(
                store = %self.store, directory = %self.former_directory,
                "segments of a former version are not read: they lie in no epoch's directory. They are deleted when no worker \
                 relies on them any more, as object.collect_after_ms says"
            );
        }
    }

    /// Adds those of an epoch's segments, in the order in which they are given.
    pub(super) async fn read_footers(
        &self,
        footers: &mut KnownFooters,
        epoch: u64,
        listed: Vec<ListedSegment>,
        deadline: Instant,
    ) {
        let answers =
            futures::stream::iter(listed).map(|ListedSegment { name, meta }| async move {
                (name, self.read_footer(name, &meta, deadline).await)
            });
        let mut answers = answers.buffered(CONCURRENCY);
        let before = footers.unread;
        while footers.blocks < MAX_BLOCKS
            && let Some((name, footer)) = answers.next().await
        {
            let is_away = matches!(footer, Err(FooterError::Store(_)));
            let looked_at = if is_away { &mut footers.away } else { &mut footers.looked_at };
            looked_at.push(name);
            match footer {
                Ok(footer) => {
                    footers.blocks += footer.entries.len();
                    footers.read.push(ReadFooter { id: SegmentId { epoch, name }, footer });
                }
                Err(error) => {
                    let segment = self.path(SegmentId { epoch, name });
                    tracing::debug!(%segment, %error, "a segment is not used");
                    footers.unread += 1;
                }
            }
        }
        if footers.unread > before && self.keys.is_some() {
            tracing::warn!(
                store = %self.store,
                unread = footers.unread - before,
                "segments are not used: they are damaged, or were written under main keys that are not given here, or by \
                 somebody who has none"
            );
        }
    }

    async fn read_footer(
        &self,
        name: SegmentName,
        meta: &ObjectMeta,
        deadline: Instant,
    ) -> Result<Footer, FooterError> {
        let (usual, key) =
            (TAIL.max(self.footer_bytes(self.blocks_per_segment)), self.footer_key(name));
        let footer = fetch_footer(&self.store, meta, usual, key, deadline).await?;
        // Blocks are found by their position.
        let lies_well = |(at, entry): (u64, &SegmentEntry)| {
            entry.length == self.block_bytes as u64 && entry.offset == at * self.block_bytes as u64
        };
        if (0..).zip(&footer.entries).all(lies_well) {
            Ok(footer)
        } else {
            Err(FooterError::Format(FormatError::Corrupt))
        }
    }

    /// Has slots from 0 on stand for blocks, root first.
    fn adopt(
        &self,
        KnownFooters { read, unread, .. }: &KnownFooters,
        epoch: u64,
        slots: u32,
    ) -> Discovered {
        let chosen = ChainClosure::new(read).choose(slots as usize);
        let mut taken: Vec<_> =
            read.iter().map(|read| vec![None; read.footer.entries.len()]).collect();
        let mut blocks = Vec::with_capacity(chosen.len());
        for (slot, (segment, position)) in (0..).map(SlotId).zip(chosen) {
            let SegmentEntry { block, parent, crc32c, tenant, .. } =
                read[segment].footer.entries[position];
            taken[segment][position] = Some(slot);
            self.checksums.iter().for_each(|checksums| checksums.record(slot, crc32c));
            blocks.push(IndexEntry {
                slot,
                generation: 0,
                block,
                parent,
                checksum: crc32c,
                tenant,
            });
        }
        let mut locations = self.locations.lock();
        read.iter().zip(&taken).for_each(|(read, slots)| locations.adopt(read.id, slots));
        let (segments, standing) = (read.len() as u64, EpochStanding::Current(epoch));
        Discovered { blocks, standing, epoch, segments, unread: *unread }
    }
}

/// Why there is no footer.
#[derive(Debug, thiserror::Error)]
pub(super) enum FooterError {
    /// The segment was deleted.
    #[error("the segment is gone")]
    Gone,
    /// It cannot be fetched.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It is none.
    #[error(transparent)]
    Format(#[from] FormatError),
}

impl FooterError {
    pub(super) fn of(store: &Store, error: &object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::Gone,
            error => Self::Store(store.secrets.scrub(error)),
        }
    }
}

/// What a segment says of itself. Fetches `usual` bytes of its end, and more if it takes more.
pub(super) async fn fetch_footer(
    store: &Store,
    meta: &ObjectMeta,
    usual: u64,
    key: Option<FooterKey<'_>>,
    deadline: Instant,
) -> Result<Footer, FooterError> {
    match decode(&fetch_tail(store, meta, usual, deadline).await?, meta.size, key) {
        Err(FormatError::Incomplete { needed }) if needed <= MAX_FOOTER => {
            Ok(decode(&fetch_tail(store, meta, needed, deadline).await?, meta.size, key)?)
        }
        footer => Ok(footer?),
    }
}

async fn fetch_tail(
    store: &Store,
    meta: &ObjectMeta,
    bytes: u64,
    deadline: Instant,
) -> Result<Bytes, FooterError> {
    let range = meta.size.saturating_sub(bytes)..meta.size;
    // Stores know no empty range.
    if range.is_empty() {
        return Ok(Bytes::new());
    }
    let wanted = range.end - range.start;
    let tail = timeout_at(deadline, store.client.get_range(&meta.location, range)).await;
    let tail = tail.map_err(StoreError::from)?.map_err(|error| FooterError::of(store, &error))?;
    // Part of an answer says nothing of the segment.
    if tail.len() as u64 == wanted {
        Ok(tail)
    } else {
        Err(StoreError::new("the answer was cut off").into())
    }
}

/// Which segment of those that were read, and which of its blocks.
type SegmentSpot = (usize, usize);

/// Chooses blocks, each with all those before it: newest first, since they are the likeliest to be
/// asked for.
struct ChainClosure<'a> {
    read: &'a [ReadFooter],
    /// A block in two segments: either is good.
    spots: HashMap<BlockKey, SegmentSpot>,
    chosen: HashSet<BlockKey>,
    /// Blocks whose chain is not there, or leads nowhere.
    orphans: HashSet<BlockKey>,
}

impl<'a> ChainClosure<'a> {
    fn new(read: &'a [ReadFooter]) -> Self {
        let mut spots = HashMap::new();
        for (segment, read) in read.iter().enumerate() {
            for (position, entry) in read.footer.entries.iter().enumerate() {
                spots.entry(entry.block).or_insert((segment, position));
            }
        }
        Self { read, spots, chosen: HashSet::new(), orphans: HashSet::new() }
    }

    fn choose(&mut self, most: usize) -> Vec<SegmentSpot> {
        let read = self.read;
        let mut chosen = Vec::new();
        for entry in read.iter().flat_map(|read| &read.footer.entries) {
            let room = most - chosen.len();
            if room == 0 {
                break;
            }
            for (block, spot) in self.missing(entry.block).into_iter().rev().take(room) {
                self.chosen.insert(block);
                chosen.push(spot);
            }
        }
        chosen
    }

    /// A block and those before it that are not chosen yet, upwards; none if the chain is not
    /// whole.
    fn missing(&mut self, block: BlockKey) -> Vec<(BlockKey, SegmentSpot)> {
        let (mut path, mut next) = (Vec::new(), Some(block));
        while let Some(block) = next.filter(|block| !self.chosen.contains(block)) {
            let spot = self.spots.get(&block).copied();
            // A chain that bites its tail is no longer than all blocks.
            let is_lost = self.orphans.contains(&block) || path.len() > self.spots.len();
            let Some(spot) = spot.filter(|_| !is_lost) else {
                self.orphans.extend(path.iter().map(|&(block, _)| block));
                return Vec::new();
            };
            path.push((block, spot));
            let parent = self.read[spot.0].footer.entries[spot.1].parent;
            next = parent.map(|hash| BlockKey { hash, group: block.group });
        }
        path
    }
}
