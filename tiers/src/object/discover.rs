//! Discovery: what a bucket holds already, from the footers of its segments.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt, PutMode};
use tokio::time::{Instant, timeout, timeout_at};

use super::error::StoreError;
use super::names::SegmentName;
use super::open::Store;
use super::segment::{Entry, Footer, FooterKey, FormatError, Provenance, decode};
use super::share::Share;
use super::shared::Shared;
use crate::copy::{BlockKey, SlotId};
use crate::index::IndexEntry;

/// At start-up somebody waits: what was not found by then is not used.
pub(super) const DISCOVERY_LIMIT: Duration = Duration::from_secs(10);
/// Footers that are fetched at a time.
const CONCURRENCY: usize = 32;
/// Bytes of the longest footer that is fetched: 300,000 blocks.
const MAX_FOOTER: u64 = 16 << 20;
/// Blocks that are looked at: newest segments first, some 200 bytes of memory each while it lasts.
const MAX_BLOCKS: usize = 1 << 21;
/// Bytes that are fetched of a segment's end at least.
pub(super) const TAIL: u64 = 16 << 10;

/// What a bucket holds already.
#[derive(Clone, Debug, Default)]
pub struct Discovered {
    /// Blocks with all blocks before them, each behind its parent, and the slots that stand for them now.
    pub blocks: Vec<IndexEntry>,
    /// The epoch of their names: the latest that any worker has begun.
    pub epoch: u64,
    /// Segments with blocks of this fingerprint and epoch.
    pub segments: u64,
    /// Segments that could not be understood or fetched.
    pub unread: u64,
}

/// A segment whose footer was read.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) name: SegmentName,
    pub(super) footer: Footer,
}

/// Footers that were asked for.
#[derive(Debug, Default)]
pub(super) struct Footers {
    pub(super) read: Vec<Read>,
    /// How many could not be had or understood.
    unread: u64,
    /// Those that could not be had now.
    pub(super) away: Vec<SegmentName>,
}

/// Finds what there is, and has the first slots stand for it.
pub(super) async fn discover(shared: Arc<Shared>, slots: u32) -> Discovered {
    let Some(share) = &shared.share else { return Discovered::default() };
    let deadline = Instant::now() + DISCOVERY_LIMIT.min(shared.limit);
    let own_epoch = shared.provenance().epoch;
    let found = async {
        let epoch = shared.latest_epoch(share).await?;
        let mut listed = shared.list(&shared.directory).await?;
        listed.sort_unstable_by(|a, b| b.location.cmp(&a.location));
        Ok::<_, StoreError>((epoch, listed))
    };
    let (epoch, listed) = match timeout_at(deadline, found).await {
        Ok(Ok((epoch, listed))) => (epoch.unwrap_or(own_epoch).max(own_epoch), listed),
        Ok(Err(error)) => return shared.found_nothing(&error.to_string(), own_epoch),
        Err(_) => return shared.found_nothing("it did not answer in time", own_epoch),
    };
    let names: Vec<_> = listed.iter().filter_map(segment_name).collect();
    let Footers { read, unread, away } = shared.read_footers(listed, deadline).await;
    {
        // What somebody who started had no time for is looked at later.
        let mut known = share.known.lock();
        known.looked_until(None, &away);
        known.see(names.into_iter().filter(|name| !away.contains(name)));
    }
    shared.adopt(read, epoch, slots, unread)
}

impl Shared {
    fn found_nothing(&self, why: &str, epoch: u64) -> Discovered {
        tracing::warn!(store = %self.store, why, "the object tier starts cold: the store's content could not be listed");
        Discovered { epoch, ..Discovered::default() }
    }

    /// The latest epoch that a worker has begun; `None`: none since the first.
    async fn latest_epoch(&self, share: &Share) -> Result<Option<u64>, StoreError> {
        let epochs = self.list(&share.epochs).await?;
        Ok(epochs.iter().filter_map(|meta| parse_epoch(&meta.location)).max())
    }

    /// Tells later workers that an epoch has begun.
    pub(super) async fn announce_epoch(&self, share: &Share, epoch: u64) -> Result<(), StoreError> {
        let path = share.epochs.clone().join(format!("{epoch:016x}{EPOCH}"));
        let put = self.store.client.put_opts(&path, "kvbm".into(), PutMode::Create.into());
        match timeout(self.limit, put).await? {
            Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => *share.announced.lock() = epoch,
            Err(error) => return Err(self.store.secrets.scrub(&error)),
        }
        Ok(())
    }

    /// In the order in which they are given.
    pub(super) async fn read_footers(&self, listed: Vec<ObjectMeta>, deadline: Instant) -> Footers {
        let segments = listed.into_iter().filter_map(|meta| Some((segment_name(&meta)?, meta)));
        let answers = futures::stream::iter(segments)
            .map(|(name, meta)| async move { (name, self.read_footer(name, &meta, deadline).await) });
        let mut answers = answers.buffered(CONCURRENCY);
        let (mut footers, mut blocks) = (Footers::default(), 0);
        while blocks < MAX_BLOCKS
            && let Some((name, footer)) = answers.next().await
        {
            match footer {
                Ok(footer) => {
                    blocks += footer.entries.len();
                    footers.read.push(Read { name, footer });
                }
                Err(error) => {
                    tracing::debug!(segment = %self.path(name), %error, "a segment is not used");
                    footers.unread += 1;
                    footers.away.extend(matches!(error, FooterError::Store(_)).then_some(name));
                }
            }
        }
        if footers.unread > 0 && self.keys.is_some() {
            tracing::warn!(
                store = %self.store,
                unread = footers.unread,
                "segments are not used: they are damaged, or were written under main keys that are not given here, or by \
                 somebody who has none"
            );
        }
        footers
    }

    async fn read_footer(
        &self,
        name: SegmentName,
        meta: &ObjectMeta,
        deadline: Instant,
    ) -> Result<Footer, FooterError> {
        let (usual, key) = (TAIL.max(self.footer_bytes(self.blocks_per_segment)), self.footer_key(name));
        let footer = fetch_footer(&self.store, meta, (usual, key), deadline).await?;
        // Blocks are found by their position.
        let lies_well = |(at, entry): (u64, &Entry)| {
            entry.length == self.block_bytes as u64 && entry.offset == at * self.block_bytes as u64
        };
        if (0..).zip(&footer.entries).all(lies_well) {
            Ok(footer)
        } else {
            Err(FooterError::Format(FormatError::Corrupt))
        }
    }

    /// Has slots from 0 on stand for the blocks of an epoch, root first.
    fn adopt(&self, mut read: Vec<Read>, epoch: u64, slots: u32, unread: u64) -> Discovered {
        let wanted = self.provenance();
        read.retain(|read| read.footer.provenance.fingerprint == wanted.fingerprint);
        // Its writer may have had no answer when it told of it.
        let epoch = read.iter().map(|read| read.footer.provenance.epoch).fold(epoch, u64::max);
        let forgotten = if epoch == wanted.epoch { wanted.forgotten } else { 0 };
        read.retain(|read| read.footer.provenance == Provenance { epoch, forgotten, ..wanted });
        let mut closure = Closure::new(&read);
        let chosen = closure.choose(slots as usize);
        let mut taken: Vec<_> = read.iter().map(|read| vec![None; read.footer.entries.len()]).collect();
        let mut blocks = Vec::with_capacity(chosen.len());
        for (slot, (segment, position)) in (0..).map(SlotId).zip(chosen) {
            let Entry { block, parent, crc32c, tenant, .. } = read[segment].footer.entries[position];
            taken[segment][position] = Some(slot);
            self.checksums.iter().for_each(|checksums| checksums.record(slot, crc32c));
            blocks.push(IndexEntry { slot, generation: 0, block, parent, checksum: crc32c, tenant });
        }
        let mut locations = self.locations.lock();
        read.iter().zip(&taken).for_each(|(read, slots)| locations.adopt(read.name, slots));
        Discovered { blocks, epoch, segments: read.len() as u64, unread }
    }
}

/// Why there is no footer.
#[derive(Debug, thiserror::Error)]
pub(super) enum FooterError {
    /// The segment was deleted.
    #[error("the segment is gone")]
    Gone,
    /// It cannot be had.
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

/// What a segment says of itself. So many bytes of its end are fetched, and more if it takes more.
pub(super) async fn fetch_footer(
    store: &Store,
    meta: &ObjectMeta,
    (usual, key): (u64, Option<FooterKey<'_>>),
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
    // An empty range is none that a store knows.
    if range.is_empty() {
        return Ok(Bytes::new());
    }
    let tail = timeout_at(deadline, store.client.get_range(&meta.location, range)).await;
    tail.map_err(StoreError::from)?.map_err(|error| FooterError::of(store, &error))
}

/// `None`: it is something else.
pub(super) fn segment_name(meta: &ObjectMeta) -> Option<SegmentName> {
    SegmentName::parse(meta.location.filename()?)
}

const EPOCH: &str = ".kvepoch";

pub(super) fn parse_epoch(path: &Path) -> Option<u64> {
    let digits = path.filename()?.strip_suffix(EPOCH)?;
    u64::from_str_radix(digits, 16).ok()
}

/// Which segment of those that were read, and which of its blocks.
type Spot = (usize, usize);

/// Chooses blocks, each with all those before it: newest first, since they are the likeliest to be asked for.
struct Closure<'a> {
    read: &'a [Read],
    /// A block in two segments: either is good.
    spots: HashMap<BlockKey, Spot>,
    chosen: HashSet<BlockKey>,
    /// Blocks whose chain is not there, or leads nowhere.
    orphans: HashSet<BlockKey>,
}

impl<'a> Closure<'a> {
    fn new(read: &'a [Read]) -> Self {
        let mut spots = HashMap::new();
        for (segment, read) in read.iter().enumerate() {
            for (position, entry) in read.footer.entries.iter().enumerate() {
                spots.entry(entry.block).or_insert((segment, position));
            }
        }
        Self { read, spots, chosen: HashSet::new(), orphans: HashSet::new() }
    }

    fn choose(&mut self, most: usize) -> Vec<Spot> {
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

    /// A block and those before it that are not chosen yet, upwards; none if the chain is not whole.
    fn missing(&mut self, block: BlockKey) -> Vec<(BlockKey, Spot)> {
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
