//! Memory → store: blocks that are written together become one segment.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use object_store::{Error, ObjectStoreExt, PutMode, PutPayload};

use super::backend::Shared;
use super::block::{Pending, finish_all};
use super::open::OPERATION_LIMIT;
use super::segment::{Entry, SegmentName, encode_footer};
use crate::checksum::{Checksums, checksum};
use crate::copy::{CopyError, CopyErrorKind};

/// Writes one segment and reports its blocks.
pub(super) async fn upload(shared: Arc<Shared>, blocks: Vec<Pending>) {
    let Ok(_request) = shared.requests.acquire().await else { return };
    let name = shared.names.next();
    let slots: Vec<_> = blocks.iter().map(|block| block.object).collect();
    let upload = Arc::new(Upload { blocks, result: OnceLock::new() });
    let result = put(&shared, name, &upload).await;
    if result.is_ok() {
        shared.locations.lock().place(name, &slots);
    }
    let failed = result.is_err();
    // Set once, here.
    let _ = upload.result.set(result);
    let ticket = upload.blocks.first().map(Pending::ticket);
    drop(upload);
    if failed {
        // A request without an answer may have arrived all the same.
        shared.delete(name).await;
    }
    drop(ticket);
}

/// The blocks of a segment under way. The client may keep its `Bytes` for a while after it gave up, in a task
/// or thread of its own; only when the last one is gone are the operations reported.
struct Upload {
    blocks: Vec<Pending>,
    result: OnceLock<Result<(), CopyError>>,
}

impl Upload {
    /// Several parts, always: the client of `memory://` would keep a lone one as it is.
    fn payload(self: &Arc<Self>, footer: Bytes) -> PutPayload {
        let source = |index| Bytes::from_owner(Source { upload: Arc::clone(self), index });
        (0..self.blocks.len()).map(source).chain([footer]).collect()
    }

    fn footer(&self, recorded: Option<&Checksums>) -> Bytes {
        let entry = |(index, block): (usize, &Pending)| {
            let bytes = block.source();
            let length = bytes.len() as u64;
            let recorded = recorded.and_then(|checksums| checksums.get(block.object));
            let crc32c = recorded.unwrap_or_else(|| checksum(bytes));
            Entry { block: block.block, offset: index as u64 * length, length, crc32c }
        };
        encode_footer(&self.blocks.iter().enumerate().map(entry).collect::<Vec<_>>())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(result) = self.result.take() {
            finish_all(self.blocks.drain(..), &result);
        }
    }
}

/// One block, lent to the client.
struct Source {
    upload: Arc<Upload>,
    index: usize,
}

impl AsRef<[u8]> for Source {
    fn as_ref(&self) -> &[u8] {
        self.upload.blocks[self.index].source()
    }
}

async fn put(shared: &Shared, name: SegmentName, upload: &Arc<Upload>) -> Result<(), CopyError> {
    let footer = footer(shared, upload).await?;
    let path = shared.path(name);
    let attempt = async {
        let put = shared.store.client.put_opts(&path, upload.payload(footer.clone()), PutMode::Create.into());
        match put.await {
            Ok(_) => Ok(()),
            Err(e) if arrived(shared, name, upload.blocks.len(), &footer, &e).await => Ok(()),
            Err(e) => Err(shared.store.copy_error(format!("cannot write {path} to {}", shared.store), &e)),
        }
    };
    tokio::time::timeout(OPERATION_LIMIT, attempt).await.unwrap_or_else(|_| {
        let limit = OPERATION_LIMIT.as_secs();
        let message = format!("{} did not take {path} within {limit} s", shared.store);
        Err(CopyError::new(CopyErrorKind::Unavailable, message))
    })
}

/// On a thread of its own where it has to read the blocks: that takes milliseconds.
async fn footer(shared: &Shared, upload: &Arc<Upload>) -> Result<Bytes, CopyError> {
    let (checksums, upload) = (shared.checksums.clone(), Arc::clone(upload));
    let encode = move || upload.footer(checksums.as_deref());
    tokio::task::spawn_blocking(encode)
        .await
        .map_err(|e| CopyError::caused(CopyErrorKind::Refused, "the checksums were not computed", e))
}

/// Whether the segment is in the store although the client reports `error`: the answer to its first attempt
/// got lost, and the second one met the object that the first had made. Then the end is our footer.
async fn arrived(shared: &Shared, name: SegmentName, blocks: usize, footer: &Bytes, error: &Error) -> bool {
    if !matches!(error, Error::AlreadyExists { .. } | Error::Generic { .. }) {
        return false;
    }
    let start = (blocks * shared.block_bytes) as u64;
    let range = start..start + footer.len() as u64;
    let stored = shared.store.client.get_range(&shared.path(name), range).await;
    stored.is_ok_and(|stored| stored == *footer)
}
