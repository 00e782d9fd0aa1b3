//! Listing objects in pages: a bucket may hold any number of them, and memory does not grow with
//! it.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::Duration;

use futures::TryStreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore};
use tokio::time::timeout;

use super::error::StoreError;
use super::names::SegmentName;
use super::open::Store;

/// Names that are looked at together.
const PAGE: usize = 1_000;

/// Objects as a store names them. Each step has a limit of time, not all of them together.
pub(super) struct Listing<'a> {
    store: &'a Store,
    names: BoxStream<'static, object_store::Result<ObjectMeta>>,
    limit: Duration,
}

impl Store {
    /// The objects in a directory and below it; `after`: those with greater names.
    pub(super) fn listing(
        &self,
        directory: &Path,
        after: Option<&Path>,
        limit: Duration,
    ) -> Listing<'_> {
        let names = match after {
            Some(after) => self.client.list_with_offset(Some(directory), after),
            None => self.client.list(Some(directory)),
        };
        Listing { store: self, names, limit }
    }
}

impl Listing<'_> {
    /// `None`: that were all.
    pub(super) async fn next(&mut self) -> Result<Option<ObjectMeta>, StoreError> {
        timeout(self.limit, self.names.try_next())
            .await?
            .map_err(|error| self.store.secrets.scrub(&error))
    }

    /// The next ones; empty: that were all.
    pub(super) async fn page(&mut self) -> Result<Vec<ObjectMeta>, StoreError> {
        let mut page = Vec::new();
        while page.len() < PAGE
            && let Some(meta) = self.next().await?
        {
            page.push(meta);
        }
        Ok(page)
    }

    /// All that are left, of a directory that holds few.
    pub(super) async fn rest(&mut self) -> Result<Vec<ObjectMeta>, StoreError> {
        let mut all = Vec::new();
        while let Some(meta) = self.next().await? {
            all.push(meta);
        }
        Ok(all)
    }
}

/// A segment as the store lists it. Sorts by name, so by age.
#[derive(Clone, Debug)]
pub(super) struct ListedSegment {
    pub(super) name: SegmentName,
    pub(super) meta: ObjectMeta,
}

impl ListedSegment {
    /// `None`: it is something else.
    pub(super) fn new(meta: ObjectMeta) -> Option<Self> {
        let name = SegmentName::parse(meta.location.filename()?)?;
        Some(Self { name, meta })
    }
}

impl Ord for ListedSegment {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.name, &self.meta.location).cmp(&(other.name, &other.meta.location))
    }
}

impl PartialOrd for ListedSegment {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for ListedSegment {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for ListedSegment {}

/// The least of many, with a bounded number of them in memory.
#[derive(Debug)]
pub(super) struct Least<T> {
    most: usize,
    heap: BinaryHeap<T>,
    has_dropped: bool,
}

impl<T: Ord> Least<T> {
    pub(super) const fn new(most: usize) -> Self {
        Self { most, heap: BinaryHeap::new(), has_dropped: false }
    }

    pub(super) fn push(&mut self, item: T) {
        if self.heap.len() == self.most {
            self.has_dropped = true;
            // The greatest goes, which may be the new one.
            match self.heap.peek_mut() {
                Some(mut greatest) if item < *greatest => *greatest = item,
                _ => {}
            }
        } else {
            self.heap.push(item);
        }
    }

    /// Whether there were more.
    pub(super) const fn has_dropped(&self) -> bool {
        self.has_dropped
    }

    /// In order.
    pub(super) fn into_sorted(self) -> Vec<T> {
        self.heap.into_sorted_vec()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_least_are_kept_in_order(items: Vec<u16>, most in 0..20_usize) {
            let mut least = Least::new(most);
            items.iter().for_each(|&item| least.push(item));
            prop_assert_eq!(least.has_dropped(), items.len() > most);
            let mut expected = items;
            expected.sort_unstable();
            expected.truncate(most);
            prop_assert_eq!(least.into_sorted(), expected);
        }
    }
}
