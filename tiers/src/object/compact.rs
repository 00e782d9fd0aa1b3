//! Making room: the blocks of segments that are nearly empty move together.
//!
//! A segment's space comes back when its last block is gone. Where slots are written again in
//! random order, that takes so long that segments would hold several times as many blocks as there
//! are slots. So a write first compacts: it fetches what is left of the emptiest segments and
//! writes it as one new segment. Readers find the new places at once; those that read an old
//! segment keep it until they are done.
//!
//! A compaction that fails changes nothing, and the next write tries again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use object_store::{ObjectStoreExt, PutPayload};
use tokio::time::{Instant, timeout_at};

use super::budget::Expense;
use super::locations::{BlockLocation, CompactionVictim, LiveBlock};
use super::names::SegmentId;
use super::segment::{Footer, Provenance, SegmentEntry, decode, encode};
use super::shared::{SegmentPin, StoreContext};
use super::write::create;
use crate::checksum::checksum;
use crate::copy::{CopyError, CopyErrorKind, SlotId};

/// New segments that compactions write for one that is written for its own sake.
const MAX_COMPACTIONS: usize = 4;

/// A block that moves.
struct MovedBlocks {
    from: BlockLocation,
    slot: SlotId,
    provenance: Provenance,
    entry: SegmentEntry,
    bytes: Bytes,
}

/// Makes room for `blocks` blocks, as far as that can be done with bounded work before the
/// deadline.
pub(super) async fn make_room(shared: &Arc<StoreContext>, blocks: usize, deadline: Instant) {
    for _ in 0..MAX_COMPACTIONS {
        // Requests go before tidying.
        if shared.afford(&Expense::ALL).is_err() {
            return;
        }
        // What is moved lies in memory of its own, so only a few may do it at a time.
        let Ok(Ok(_turn)) = timeout_at(deadline, shared.compactions.acquire()).await else {
            return;
        };
        let victims = shared.locations.lock().victims(blocks, shared.blocks_per_segment);
        // Nothing to gain, or other writes are compacting all that there is.
        if victims.is_empty() {
            return;
        }
        if let Err(error) = compact(shared, victims, deadline).await {
            tracing::debug!(store = %shared.store, %error, "a compaction failed and will be tried again");
            return;
        }
    }
}

/// Writes what is left of the victims as one segment. A victim that cannot be read is no failure; a
/// store that does not answer is, and then nothing moves.
async fn compact(
    shared: &Arc<StoreContext>,
    victims: Vec<CompactionVictim>,
    deadline: Instant,
) -> Result<(), CopyError> {
    // Pinned until the new places stand: a write may vacate the last live block of a victim
    // meanwhile.
    let pins: Vec<_> =
        victims.iter().map(|victim| SegmentPin::new(shared, victim.number)).collect();
    let fetched = join_all(victims.iter().map(|victim| fetch(shared, victim, deadline))).await;
    let (mut moved, mut left, mut result) = (Vec::new(), Vec::new(), Ok(()));
    for (victim, fetched) in victims.iter().zip(fetched) {
        let is_whole = fetched.as_ref().is_ok_and(|blocks| blocks.len() == victim.live.len());
        let is_away = fetched.as_ref().is_err_and(|error| error.kind() != CopyErrorKind::Io);
        // An unreachable store says nothing of the segment: only one that answers and lacks it
        // makes it worth less.
        left.push((victim.number, is_whole || is_away));
        match fetched {
            Ok(blocks) => moved.extend(blocks),
            Err(error) if is_away => result = Err(error),
            Err(error) => tracing::debug!(%error, "a segment cannot be compacted"),
        }
    }
    if result.is_ok() && !moved.is_empty() {
        result = write(shared, moved, deadline).await;
    }
    let mut locations = shared.locations.lock();
    left.into_iter().for_each(|(number, could_be_read)| locations.spare(number, could_be_read));
    drop(locations);
    drop(pins);
    result
}

/// The victim's live blocks, without those that are corrupt: a reader of the old place is told so.
async fn fetch(
    shared: &Arc<StoreContext>,
    victim: &CompactionVictim,
    deadline: Instant,
) -> Result<Vec<MovedBlocks>, CopyError> {
    let _request = shared.request(deadline).await?;
    let offset = |position: u32| u64::from(position) * shared.block_bytes as u64;
    let start = victim.live.first().map_or(0, |block| offset(block.location.position));
    let end = victim.blocks as u64 * shared.block_bytes as u64 + shared.footer_bytes(victim.blocks);
    let path = shared.path(victim.segment);
    let context = format!("cannot compact {path} of {}", shared.store);
    let tail = match timeout_at(deadline, shared.store.client.get_range(&path, start..end)).await {
        Ok(Ok(tail)) => tail,
        Ok(Err(error)) => {
            return Err(shared.store.read_error(&path, end, context, &error, deadline).await);
        }
        Err(_) => return Err(shared.too_late(&context)),
    };
    let Footer { provenance, entries } = decode(&tail, end, shared.footer_key(victim.segment.name))
        .map_err(|error| CopyError::caused(CopyErrorKind::Io, context, error))?;
    let moved = victim.live.iter().filter_map(|&LiveBlock { location: from, slot }| {
        let entry = *entries.get(from.position as usize)?;
        // The object may be shorter than it was when it was stored, and its footer speak of more.
        let at = usize::try_from(entry.offset.checked_sub(start)?).ok()?;
        let end =
            at.checked_add(usize::try_from(entry.length).ok()?).filter(|&end| end <= tail.len())?;
        let bytes = tail.slice(at..end);
        (checksum(&bytes) == entry.crc32c).then_some(MovedBlocks {
            from,
            slot,
            provenance,
            entry,
            bytes,
        })
    });
    Ok(moved.collect())
}

async fn write(
    shared: &Arc<StoreContext>,
    moved: Vec<MovedBlocks>,
    deadline: Instant,
) -> Result<(), CopyError> {
    let _request = shared.request(deadline).await?;
    let offsets = (0..).step_by(shared.block_bytes);
    let entries =
        moved.iter().zip(offsets).map(|(block, offset)| SegmentEntry { offset, ..block.entry });
    // What is left of an earlier epoch is never found, under whatever label.
    let provenance = moved.iter().map(|block| block.provenance).max().unwrap_or_default();
    let id = SegmentId { epoch: provenance.epoch, name: shared.names.next() };
    let footer = encode(&provenance, &entries.collect::<Vec<_>>(), shared.footer_key(id.name));
    let copied: Vec<_> =
        moved.iter().map(|block| LiveBlock { location: block.from, slot: block.slot }).collect();
    let payload =
        moved.into_iter().map(|block| block.bytes).chain([footer.clone()]).collect::<PutPayload>();
    create(shared, id, payload, &footer, deadline).await?;
    shared.moved_blocks.fetch_add(copied.len() as u64, Ordering::Relaxed);
    let unneeded = shared.locations.lock().relocate(id, &copied);
    unneeded.into_iter().for_each(|id| shared.discard(id, Duration::ZERO));
    Ok(())
}
