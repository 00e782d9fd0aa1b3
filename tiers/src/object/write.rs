//! Memory → store: blocks that are written together become one segment.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{Error, ObjectStoreExt, PutMode, PutPayload};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use super::block::{PendingBlock, finish_all};
use super::budget::Expense;
use super::compact::make_room;
use super::names::{SegmentId, SegmentName};
use super::segment::{FooterKey, Provenance, SegmentEntry, encode};
use super::shared::{StoreContext, now_ms};
use crate::checksum::{Checksums, checksum};
use crate::copy::{CopyError, CopyErrorKind, Owner};

/// Writes one segment and reports its blocks.
pub(super) async fn upload(
    shared: Arc<StoreContext>,
    blocks: Vec<PendingBlock>,
    deadline: Instant,
) {
    let Some(provenance) = shared.present() else {
        let message = format!(
            "how the epoch stands to those of {} is not known, or it is behind",
            shared.store
        );
        return finish_all(blocks, &Err(CopyError::new(CopyErrorKind::Unavailable, message)));
    };
    let blocks = link_known(&shared, blocks);
    if blocks.is_empty() {
        return;
    }
    if let Err(error) = shared.afford(&[Expense::Puts, Expense::Bytes]) {
        return finish_all(blocks, &Err(error));
    }
    // Before the request is taken: compactions take requests of their own, and with one at a time
    // would wait for this one.
    make_room(&shared, blocks.len(), deadline).await;
    let request = match shared.request(deadline).await {
        Ok(request) => request,
        Err(error) => return finish_all(blocks, &Err(error)),
    };
    let id = SegmentId { epoch: provenance.epoch, name: shared.names.next() };
    let slots: Vec<_> = blocks.iter().map(|block| block.object).collect();
    let upload =
        Arc::new(SegmentUpload { blocks, result: OnceLock::new(), request: Arc::new(request) });
    let result = match prepare(&shared, provenance, id.name, &upload).await {
        Ok((payload, footer)) => create(&shared, id, payload, &footer, deadline).await,
        Err(error) => Err(error),
    };
    if result.is_ok() {
        shared.locations.lock().place(id, &slots);
    }
    // Set once, here.
    let _ = upload.result.set(result);
}

/// Has the slots of blocks that another worker has stored stand for these. What is left is to be
/// stored.
fn link_known(shared: &StoreContext, blocks: Vec<PendingBlock>) -> Vec<PendingBlock> {
    let Some(share) = &shared.share else { return blocks };
    let (mut left, mut linked) = (Vec::with_capacity(blocks.len()), Vec::new());
    for pending in blocks {
        let mut known = share.known.lock();
        if let Some(Owner { tenant, life }) = pending.owner {
            known.forget_tenant(tenant, life, now_ms());
        }
        let spot = known.take(pending.block);
        drop(known);
        let Some(spot) = spot else {
            left.push(pending);
            continue;
        };
        shared.stand_for(pending.object, spot);
        linked.push(pending);
    }
    finish_all(linked, &Ok(()));
    left
}

/// The blocks of a segment under way. The client may keep its `Bytes` for a while after it gave up,
/// in a thread of its own; only when the last one is gone are the operations reported.
struct SegmentUpload {
    blocks: Vec<PendingBlock>,
    result: OnceLock<Result<(), CopyError>>,
    /// Over when the client has let go of the bytes.
    request: Arc<OwnedSemaphorePermit>,
}

impl SegmentUpload {
    /// The blocks where they are. Several parts, always: the client of `memory://` would keep a
    /// lone one as it is.
    fn lend(self: &Arc<Self>, footer: Bytes) -> PutPayload {
        let source = |index| Bytes::from_owner(LentBlock { upload: Arc::clone(self), index });
        (0..self.blocks.len()).map(source).chain([footer]).collect()
    }

    /// Copies of the blocks. A connection to a service that stopped reading keeps what it was given
    /// for half a minute, whether or not anything waits: no operation may depend on that.
    fn copy(&self, footer: Bytes) -> PutPayload {
        let bytes = self.blocks.iter().map(PendingBlock::source).collect::<Vec<_>>().concat();
        let copy = CopiedBlocks { bytes, _request: Arc::clone(&self.request) };
        [Bytes::from_owner(copy), footer].into_iter().collect()
    }

    fn footer(
        &self,
        provenance: &Provenance,
        recorded: Option<&Checksums>,
        key: Option<FooterKey<'_>>,
    ) -> Bytes {
        let entry = |(index, block): (usize, &PendingBlock)| {
            let bytes = block.source();
            let length = bytes.len() as u64;
            let recorded = recorded.and_then(|checksums| checksums.get(block.object));
            let crc32c = recorded.unwrap_or_else(|| checksum(bytes));
            let offset = index as u64 * length;
            SegmentEntry {
                block: block.block,
                parent: block.parent,
                offset,
                length,
                crc32c,
                tenant: block.owner.map(|owner| owner.tenant),
            }
        };
        encode(provenance, &self.blocks.iter().enumerate().map(entry).collect::<Vec<_>>(), key)
    }
}

impl Drop for SegmentUpload {
    fn drop(&mut self) {
        if let Some(result) = self.result.take() {
            finish_all(self.blocks.drain(..), &result);
        }
    }
}

/// One block, lent to the client.
struct LentBlock {
    upload: Arc<SegmentUpload>,
    index: usize,
}

impl AsRef<[u8]> for LentBlock {
    fn as_ref(&self) -> &[u8] {
        self.upload.blocks[self.index].source()
    }
}

/// Copies of blocks, sent to a service.
struct CopiedBlocks {
    bytes: Vec<u8>,
    _request: Arc<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for CopiedBlocks {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A segment's bytes, and of those its footer. On a thread of its own, which may read the blocks:
/// that takes milliseconds.
async fn prepare(
    shared: &StoreContext,
    provenance: Provenance,
    name: SegmentName,
    upload: &Arc<SegmentUpload>,
) -> Result<(PutPayload, Bytes), CopyError> {
    let (checksums, upload, is_remote) =
        (shared.checksums.clone(), Arc::clone(upload), shared.store.is_remote());
    let keys = shared.keys.clone();
    let prepare = move || {
        let footer = upload.footer(
            &provenance,
            checksums.as_deref(),
            keys.as_ref().map(|keys| keys.of(name.0)),
        );
        let payload =
            if is_remote { upload.copy(footer.clone()) } else { upload.lend(footer.clone()) };
        (payload, footer)
    };
    tokio::task::spawn_blocking(prepare).await.map_err(|e| {
        CopyError::caused(CopyErrorKind::Refused, "the checksums were not computed", e)
    })
}

/// Puts a new segment, which ends with `footer`, into the store.
pub(super) async fn create(
    shared: &Arc<StoreContext>,
    id: SegmentId,
    payload: PutPayload,
    footer: &Bytes,
    deadline: Instant,
) -> Result<(), CopyError> {
    let path = shared.path(id);
    let end = payload.content_length() as u64;
    let context = format!("cannot write {path} to {}", shared.store);
    let attempt = async {
        match shared.store.client.put_opts(&path, payload, PutMode::Create.into()).await {
            Ok(_) => Ok(()),
            Err(e) if arrived(shared, &path, end, footer, &e).await => Ok(()),
            Err(e) => Err(shared.store.copy_error(context.clone(), &e)),
        }
    };
    let result =
        timeout_at(deadline, attempt).await.unwrap_or_else(|_| Err(shared.too_late(&context)));
    if result.is_err() {
        // A request without an answer may still arrive, but not after a request's longest time.
        shared.discard(id, shared.limit);
    }
    result
}

/// Whether the segment is in the store although the client reports `error`: the answer to its first
/// attempt got lost, and the second one met the object that the first had made. Then the end is our
/// footer.
async fn arrived(
    shared: &StoreContext,
    path: &Path,
    end: u64,
    footer: &Bytes,
    error: &Error,
) -> bool {
    if !matches!(error, Error::AlreadyExists { .. } | Error::Generic { .. }) {
        return false;
    }
    let stored = shared.store.client.get_range(path, end - footer.len() as u64..end).await;
    stored.is_ok_and(|stored| stored == *footer)
}
