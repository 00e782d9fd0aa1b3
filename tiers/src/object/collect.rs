//! Garbage collection: removes segments that no living worker relies on, such as those of writers
//! that crashed.
//!
//! One worker does it, in pages: its memory does not grow with the bucket. A segment goes if no
//! worker relied on it in two collections in a row: a worker that has just found it has said so by
//! then.
//!
//! Which worker, a lease in the bucket says, so that a thousand of them do not all list it. A term
//! of it is an object, made with a conditional put: a store gives the next one to one of those that
//! ask. Its holder makes the next term before this one is over, others when it is. Nothing is lost
//! where two collect at once, as when one was asleep for a term: the manifests, not the lease, say
//! what may go.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use object_store::PutMode;
use object_store::path::Path;
use parking_lot::Mutex;
use tokio::time::timeout;

use super::budget::Expense;
use super::error::StoreError;
use super::files::remove_staged;
use super::manifest::LAPSES;
use super::names::{Least, ListedSegment, SegmentName};
use super::share::{BucketShare, OtherWorkers};
use super::shared::StoreContext;

/// Segments that a collection notices, 300 bytes each: the oldest. The next one deletes them, and
/// notices as many more.
const MAX_CANDIDATES: usize = 1 << 16;
/// Deletions at a time.
const CONCURRENCY: usize = 16;

/// Collects again and again. Apart from renewals: a large bucket takes longer than a worker may be
/// silent.
pub(super) fn keep_collecting(shared: &Arc<StoreContext>) {
    let (own, mut ticket) = (Arc::clone(shared), shared.work.ticket());
    shared.store.executor.spawn(async move {
        let Some(share) = &own.share else { return };
        while !ticket.sleep(share.sharing.renewal * LAPSES).await {
            match ticket.unless_hurried(own.collect(share)).await {
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    tracing::debug!(store = %own.store, %error, "garbage is left to the next collection");
                }
                None => return,
            }
        }
    });
}

impl StoreContext {
    /// Deletes what no worker relied on in the last collection nor in this one. A store that fails
    /// ends it; the next one goes on.
    pub(super) async fn collect(&self, share: &BucketShare) -> Result<(), StoreError> {
        self.afford(&Expense::ALL).map_err(|error| StoreError::new(&error.to_string()))?;
        // The collector may delete it from then on.
        let oldest = share.sharing.collect_after.max(share.grace());
        share.known.lock().forget_older(u64::try_from(oldest.as_millis()).unwrap_or(u64::MAX));
        if !self.take_lease(share).await? {
            return Ok(());
        }
        let suspects = std::mem::take(&mut *self.suspects.lock());
        let garbage = self.garbage(share, &suspects).await?;
        let (sure, new): (Vec<_>, Vec<_>) =
            garbage.into_iter().partition(|old| suspects.contains(&old.name));
        *self.suspects.lock() = new.iter().chain(&sure).map(|old| old.name).collect();
        let files = self.store.files_below(&share.namespace);
        files.into_iter().for_each(|directory| remove_staged(&directory, share.grace()));
        let deletions = futures::stream::iter(sure).map(|old| async move {
            self.remove(&old.meta.location).await?;
            self.suspects.lock().remove(&old.name);
            self.collected.fetch_add(1, Ordering::Relaxed);
            Ok::<_, StoreError>(())
        });
        deletions.buffer_unordered(CONCURRENCY).try_collect().await
    }

    /// Segments that no living worker relies on, old enough or too much: the oldest of them.
    async fn garbage(
        &self,
        share: &BucketShare,
        suspects: &HashSet<SegmentName>,
    ) -> Result<Vec<ListedSegment>, StoreError> {
        let own: HashSet<SegmentName> =
            self.locations.lock().segments().map(|id| id.name).collect();
        self.hear_others(share).await?;
        let (mut bytes, mut oldest, mut candidates) = (0, Least::new(MAX_CANDIDATES), Vec::new());
        for directory in [&self.directory, &self.former_directory] {
            let mut listing = self.store.listing(directory, None, self.limit);
            loop {
                let page = listing.page().await?;
                if page.is_empty() {
                    break;
                }
                let others = share.others.lock().await;
                for segment in page.into_iter().filter_map(ListedSegment::new) {
                    bytes += segment.meta.size;
                    if own.contains(&segment.name) || !others.may_go(&segment, share) {
                        continue;
                    }
                    if suspects.contains(&segment.name) {
                        candidates.push(segment);
                    } else {
                        oldest.push(segment);
                    }
                }
            }
        }
        // Once more: a worker may have said since that it relies on one of them.
        self.hear_others(share).await?;
        let others = share.others.lock().await;
        candidates.extend(oldest.into_sorted());
        candidates.sort_unstable();
        candidates.retain(|segment| {
            let is_too_much = share.sharing.collect_above.is_some_and(|most| bytes > most);
            let is_old = others.is_older(segment, share.sharing.collect_after);
            let goes = others.may_go(segment, share) && (is_too_much || is_old);
            bytes -= if goes { segment.meta.size } else { 0 };
            goes
        });
        Ok(candidates)
    }
}

impl OtherWorkers {
    /// Whether no worker relies on a segment, and it is too late for one to say that it does.
    fn may_go(&self, segment: &ListedSegment, share: &BucketShare) -> bool {
        self.is_older(segment, share.grace()) && !self.rely_on(segment.name)
    }

    fn is_older(&self, segment: &ListedSegment, than: std::time::Duration) -> bool {
        let age_ms = self.now_ms - segment.meta.last_modified.timestamp_millis();
        u128::try_from(age_ms).is_ok_and(|age_ms| age_ms > than.as_millis())
    }
}

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
    async fn take_lease(&self, share: &BucketShare) -> Result<bool, StoreError> {
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
