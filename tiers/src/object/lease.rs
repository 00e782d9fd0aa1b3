//! Who collects garbage: one worker at a time, by a lease in the bucket, so that a thousand of them
//! do not all list it.
//!
//! A term of the lease is an object, made with a conditional put: a store gives the next one to one
//! of those that ask. Its holder makes the next term before this one is over, others when it is.
//! Nothing is lost where two collect at once, as when one was asleep for a term: the manifests, not
//! the lease, say what may go.

use std::time::Duration;

use object_store::PutMode;
use object_store::path::Path;
use parking_lot::Mutex;
use tokio::time::timeout;

use super::error::StoreError;
use super::share::BucketShare;
use super::shared::StoreContext;

/// Collections that a holder may miss before another takes over.
const MISSED: u32 = 3;
const EXTENSION: &str = ".kvlease";

/// The lease as this worker knows it.
#[derive(Debug)]
pub(super) struct CollectorLease {
    /// `<root>/<namespace>/collector`.
    directory: Path,
    /// The term that this worker made last.
    held: Mutex<Option<u64>>,
}

impl CollectorLease {
    pub(super) fn new(namespace: &Path) -> Self {
        Self { directory: namespace.clone().join("collector"), held: Mutex::default() }
    }

    fn path(&self, term: u64) -> Path {
        self.directory.clone().join(format!("{term:016x}{EXTENSION}"))
    }
}

/// `None`: it is something else.
pub(super) fn parse_term(path: &Path) -> Option<u64> {
    let digits = path.filename()?.strip_suffix(EXTENSION)?;
    (digits.len() == 16).then(|| u64::from_str_radix(digits, 16).ok())?
}

impl StoreContext {
    /// Whether this worker is the one to collect, for a term from now on.
    pub(super) async fn take_lease(&self, share: &BucketShare) -> Result<bool, StoreError> {
        let lease = &share.lease;
        let listed = self.store.listing(&lease.directory, None, self.limit).rest().await?;
        let mut terms: Vec<_> = listed
            .into_iter()
            .filter_map(|meta| Some((parse_term(&meta.location)?, meta)))
            .collect();
        terms.sort_unstable_by_key(|&(term, _)| term);
        let held = *lease.held.lock();
        if let Some((term, meta)) = terms.last()
            && held != Some(*term)
        {
            let age_ms = self.store_now_ms(share).await? - meta.last_modified.timestamp_millis();
            if age_ms <= i64::try_from(term_length(share).as_millis()).unwrap_or(i64::MAX) {
                *lease.held.lock() = None;
                return Ok(false);
            }
        }
        let next = terms.last().map_or(0, |&(term, _)| term.saturating_add(1));
        let path = lease.path(next);
        let put = self.store.client.put_opts(&path, "kvbm".into(), PutMode::Create.into());
        let is_ours = match timeout(self.limit, put).await? {
            Ok(_) => true,
            Err(object_store::Error::AlreadyExists { .. }) => false,
            Err(error) => return Err(self.store.secrets.scrub(&error)),
        };
        *lease.held.lock() = is_ours.then_some(next);
        if is_ours {
            for (_, past) in terms {
                self.remove(&past.location).await?;
            }
        }
        Ok(is_ours)
    }

    /// Another may take it at once.
    pub(super) async fn give_up_lease(&self, share: &BucketShare) {
        let held = share.lease.held.lock().take();
        if let Some(term) = held
            && let Err(error) = self.remove(&share.lease.path(term)).await
        {
            tracing::debug!(%error, "the collector's lease is left to lapse");
        }
    }
}

fn term_length(share: &BucketShare) -> Duration {
    share.grace() * MISSED
}
