//! One new segment into the store, under an unused name.

use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{Error, ObjectStoreExt, PutMode, PutPayload};
use tokio::time::{Instant, timeout_at};

use super::names::SegmentId;
use super::shared::StoreContext;
use crate::copy::CopyError;

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
