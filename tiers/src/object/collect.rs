//! Garbage collection: removes segments that no living worker relies on, such as those of writers that crashed.
//!
//! Any worker does it. A segment goes if it was nobody's in two collections in a row: one who has just found it has
//! said so by then.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use object_store::ObjectMeta;

use super::budget::Expense;
use super::discover::segment_name;
use super::error::StoreError;
use super::files::remove_staged;
use super::names::SegmentName;
use super::share::{Others, Share};
use super::shared::Shared;

/// A segment as the store lists it.
#[derive(Clone, Debug)]
struct Listed {
    name: SegmentName,
    meta: ObjectMeta,
}

impl Shared {
    /// Deletes what was nobody's in the last collection and still is. A store that fails ends it; the next one goes on.
    pub(super) async fn collect(&self, share: &Share) -> Result<(), StoreError> {
        self.afford(&Expense::ALL).map_err(|error| StoreError::new(&error.to_string()))?;
        // The segments first: whoever says meanwhile that it relies on one of them is heard.
        let segments = self.list(&self.directory).await?;
        let segments: Vec<_> = segments.into_iter().filter_map(Listed::new).collect();
        let there: HashSet<_> = segments.iter().map(|segment| segment.name).collect();
        share.known.lock().forget_blocks(|name| !there.contains(&name));
        let garbage = self.hear_others(share, |others| self.garbage(share, segments, others)).await?;
        let suspects = std::mem::take(&mut *self.suspects.lock());
        let (sure, new): (Vec<_>, Vec<_>) = garbage.into_iter().partition(|old| suspects.contains(&old.name));
        *self.suspects.lock() = new.iter().chain(&sure).map(|old| old.name).collect();
        let staged = self.store.files_below(&self.directory);
        staged.into_iter().for_each(|directory| remove_staged(&directory, share.grace()));
        for old in sure {
            self.delete(old.name).await?;
            self.suspects.lock().remove(&old.name);
            self.collected.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Segments that no living worker relies on, old enough or too much.
    fn garbage(&self, share: &Share, mut segments: Vec<Listed>, others: &Others) -> Vec<Listed> {
        let own: HashSet<_> = self.locations.lock().segments().collect();
        let mut bytes: u64 = segments.iter().map(|segment| segment.meta.size).sum();
        let is_old = |segment: &Listed, age: std::time::Duration| {
            let age_ms = others.now_ms - segment.meta.last_modified.timestamp_millis();
            u128::try_from(age_ms).is_ok_and(|age_ms| age_ms > age.as_millis())
        };
        segments.sort_unstable_by_key(|segment| segment.name);
        segments.retain(|segment| {
            let is_nobodys = !own.contains(&segment.name) && !others.rely_on(segment.name);
            let is_too_much = share.sharing.collect_above.is_some_and(|most| bytes > most);
            let goes = is_nobodys
                && is_old(segment, share.grace())
                && (is_too_much || is_old(segment, share.sharing.collect_after));
            bytes -= if goes { segment.meta.size } else { 0 };
            goes
        });
        segments
    }
}

impl Listed {
    /// `None`: it is something else.
    fn new(meta: ObjectMeta) -> Option<Self> {
        Some(Self { name: segment_name(&meta)?, meta })
    }
}
