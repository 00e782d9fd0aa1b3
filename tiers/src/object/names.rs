//! Names of objects: no two writers choose the same, and they sort by age. Objects are listed in
//! pages: a bucket may hold any number of them, and memory does not grow with it.
//!
//! A segment lies in the directory of its epoch, so a look into one epoch's never meets another's
//! blocks.

use std::cmp;
use std::collections::BinaryHeap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::stream::{BoxStream, Fuse};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore};
use tokio::time::timeout;

use super::error::StoreError;
use super::open::Store;
use crate::clock;

const SEGMENT: &str = ".kvseg";

/// Name of a segment: 48 bits of milliseconds since 1970, 48 random bits of the writer, 32 bits of
/// its count. Sorts by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SegmentName(pub(super) u128);

impl SegmentName {
    /// `None`: it is a name of something else.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_suffix(SEGMENT)?;
        let name = Self(u128::from_str_radix(digits, 16).ok()?);
        // One spelling only: with another, what is deleted would be another object.
        (name.to_string() == text).then_some(name)
    }

    /// The first name of a time, in milliseconds since 1970.
    pub(super) const fn first_of(ms: u64) -> Self {
        Self((ms as u128) << 80)
    }

    /// When its writer named it, in milliseconds since 1970, by its writer's clock.
    pub(super) const fn millis(self) -> u64 {
        (self.0 >> 80) as u64
    }

    /// The number that its writer drew.
    pub(super) const fn writer(self) -> u64 {
        (self.0 >> 32) as u64 & 0xffff_ffff_ffff
    }
}

impl fmt::Display for SegmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}{SEGMENT}", self.0)
    }
}

/// Which segment: the epoch in whose directory it lies, and its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SegmentId {
    pub(super) epoch: u64,
    pub(super) name: SegmentName,
}

/// The directory of an epoch's segments, and the name of its marker but for the end.
pub(super) fn epoch_name(epoch: u64) -> String {
    format!("{epoch:016x}")
}

/// `None`: it is a name of something else.
pub(super) fn parse_epoch_name(text: &str) -> Option<u64> {
    let epoch = u64::from_str_radix(text, 16).ok()?;
    // One spelling only, as for segments.
    (epoch_name(epoch) == text).then_some(epoch)
}

/// Gives each segment a name that no other writer uses.
#[derive(Debug)]
pub(super) struct SegmentNames {
    writer: u64,
    count: AtomicU32,
}

impl SegmentNames {
    pub(super) fn new() -> Self {
        // The hasher's keys are random: the standard library's only source of randomness.
        let random = RandomState::new().hash_one((std::process::id(), clock::since_1970()));
        Self { writer: random >> 16, count: AtomicU32::new(0) }
    }

    /// Whether this writer gave the name.
    pub(super) const fn gave(&self, name: SegmentName) -> bool {
        name.writer() == self.writer
    }

    pub(super) fn next(&self) -> SegmentName {
        let millis = clock::since_1970().as_millis();
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        SegmentName(millis << 80 | u128::from(self.writer) << 32 | u128::from(count))
    }
}

/// Names that are looked at together.
const PAGE: usize = 1_000;

/// Objects as a store names them. Each step has a limit of time, not all of them together.
pub(super) struct Listing<'a> {
    store: &'a Store,
    /// A page that is not full is followed by an empty one: clients panic if they are asked once more.
    names: Fuse<BoxStream<'static, object_store::Result<ObjectMeta>>>,
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
        Listing { store: self, names: names.fuse(), limit }
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
    fn cmp(&self, other: &Self) -> cmp::Ordering {
        (self.name, &self.meta.location).cmp(&(other.name, &other.meta.location))
    }
}

impl PartialOrd for ListedSegment {
    fn partial_cmp(&self, other: &Self) -> Option<cmp::Ordering> {
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

    #[test]
    fn names_differ_and_sort_by_age() {
        let names = SegmentNames::new();
        let some: Vec<_> = (0..1000).map(|_| names.next()).collect();
        assert!(some.is_sorted_by(|a, b| a < b), "{some:?}");
        assert!(names.gave(some[0]) && !SegmentNames::new().gave(some[0]));
        assert_eq!(some[0].to_string().len(), "0123456789abcdef0123456789abcdef.kvseg".len());
    }

    #[test]
    fn a_time_sorts_before_its_names_and_after_earlier_ones() {
        let name = SegmentNames::new().next();
        let time = SegmentName::first_of(name.millis());
        assert!(time <= name && SegmentName::first_of(name.millis() + 1) > name);
        assert_eq!(SegmentName::first_of(u64::MAX >> 16).millis(), u64::MAX >> 16);
    }

    #[test]
    fn an_epoch_has_one_spelling() {
        assert_eq!(parse_epoch_name(&epoch_name(u64::MAX)), Some(u64::MAX));
        for stranger in ["", "9", "00000000000000009", "000000000000000A", "+000000000000009"] {
            assert_eq!(parse_epoch_name(stranger), None, "{stranger}");
        }
    }

    #[test]
    fn a_name_has_one_spelling() {
        let name = SegmentNames::new().next();
        let text = name.to_string();
        assert_eq!(SegmentName::parse(&text), Some(name));
        let upper = text.replace(SEGMENT, "").to_uppercase() + SEGMENT;
        let strangers = [
            "",
            ".kvseg",
            "0.kvseg",
            "+0000000000000000000000000000000.kvseg",
            "x.kvman",
            &text[1..],
        ];
        for stranger in strangers {
            assert_eq!(SegmentName::parse(stranger), None, "{stranger}");
        }
        assert!(upper == text || SegmentName::parse(&upper).is_none());
    }

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
