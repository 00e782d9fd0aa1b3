//! What is asked of a store, and how much it moves: what a bucket costs.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};

use super::budget::{Budgets, Expense, RequestBudget};

/// Kinds of requests, as stores charge for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestKind {
    /// Writes an object.
    Put,
    /// Reads an object, a part of it, or what it is like.
    Get,
    /// Names objects: one request for each 1,000 names.
    List,
    /// Removes an object.
    Delete,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestOutcome {
    /// It did what it was to do.
    Done,
    /// The object is not there.
    Missing,
    /// The object is there already.
    Conflict,
    /// Anything else.
    Failed,
}

impl RequestKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Put, Self::Get, Self::List, Self::Delete];

    /// Name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::List => "list",
            Self::Delete => "delete",
        }
    }
}

impl RequestOutcome {
    /// All outcomes.
    pub const ALL: [Self; 4] = [Self::Done, Self::Missing, Self::Conflict, Self::Failed];

    /// Name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Missing => "missing",
            Self::Conflict => "conflict",
            Self::Failed => "failed",
        }
    }

    const fn of(error: &Error) -> Self {
        match error {
            Error::NotFound { .. } => Self::Missing,
            Error::AlreadyExists { .. } | Error::Precondition { .. } => Self::Conflict,
            _ => Self::Failed,
        }
    }
}

/// Counts of requests and bytes, and what they may come to. What the client retries on its own
/// counts once.
#[derive(Debug)]
pub struct Traffic {
    requests: [[AtomicU64; 4]; 4],
    sent: AtomicU64,
    received: AtomicU64,
    pub(super) purse: RequestBudget,
}

impl Traffic {
    /// Requests of one kind that ended so.
    pub fn requests(&self, kind: RequestKind, outcome: RequestOutcome) -> u64 {
        self.requests[kind as usize][outcome as usize].load(Ordering::Relaxed)
    }

    /// Bytes of objects that were written.
    pub fn bytes_sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Bytes of objects that were asked for and are there.
    pub fn bytes_received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// The share of a budget that is left, 0 to 1; `None`: there is no limit.
    pub fn budget_left(&self, expense: Expense) -> Option<f64> {
        self.purse.left(expense)
    }

    /// How often a request was not sent because a budget was spent.
    pub fn refused(&self, expense: Expense) -> u64 {
        self.purse.refused(expense)
    }

    pub(super) fn new(budgets: &Budgets) -> Self {
        let purse = RequestBudget::new(budgets);
        Self {
            requests: Default::default(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            purse,
        }
    }

    fn count_sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        self.purse.pay(Expense::Bytes, bytes);
    }

    fn count_received(&self, bytes: u64) {
        self.received.fetch_add(bytes, Ordering::Relaxed);
        self.purse.pay(Expense::Bytes, bytes);
    }

    fn count<T>(&self, kind: RequestKind, result: &Result<T>) {
        self.purse.pay_request(kind);
        let outcome = result.as_ref().err().map_or(RequestOutcome::Done, RequestOutcome::of);
        self.requests[kind as usize][outcome as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// A client whose requests are counted.
#[derive(Debug)]
pub(super) struct CountedRequests {
    inner: Arc<dyn ObjectStore>,
    traffic: Arc<Traffic>,
}

/// Names that one request returns.
const PAGE: usize = 1_000;

impl CountedRequests {
    pub(super) fn new(inner: Arc<dyn ObjectStore>, traffic: Arc<Traffic>) -> Self {
        Self { inner, traffic }
    }

    fn count_pages(
        &self,
        names: BoxStream<'static, Result<ObjectMeta>>,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let traffic = Arc::clone(&self.traffic);
        // An empty listing is a request too; one that fails is counted as such besides.
        traffic.count(RequestKind::List, &Ok(()));
        let counted = names.enumerate().map(move |(at, name)| {
            if name.is_err() || at > 0 && at % PAGE == 0 {
                traffic.count(RequestKind::List, &name);
            }
            name
        });
        counted.boxed()
    }
}

impl fmt::Display for CountedRequests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl ObjectStore for CountedRequests {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let bytes = payload.content_length() as u64;
        let result = self.inner.put_opts(location, payload, opts).await;
        self.traffic.count(RequestKind::Put, &result);
        if result.is_ok() {
            self.traffic.count_sent(bytes);
        }
        result
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let is_head = options.head;
        let result = self.inner.get_opts(location, options).await;
        self.traffic.count(RequestKind::Get, &result);
        let bytes = result.as_ref().map_or(0, |got| got.range.end - got.range.start);
        self.traffic.count_received(if is_head { 0 } else { bytes });
        result
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let result = self.inner.get_ranges(location, ranges).await;
        self.traffic.count(RequestKind::Get, &result);
        let bytes = result.iter().flatten().map(|part| part.len() as u64).sum();
        self.traffic.count_received(bytes);
        result
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let traffic = Arc::clone(&self.traffic);
        let deleted = self.inner.delete_stream(locations);
        deleted.inspect(move |deleted| traffic.count(RequestKind::Delete, deleted)).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.count_pages(self.inner.list(prefix))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.count_pages(self.inner.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let result = self.inner.list_with_delimiter(prefix).await;
        self.traffic.count(RequestKind::List, &result);
        result
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.inner.rename_opts(from, to, options).await
    }
}
